"""The self-check: an operator of a backend is compared with the reference before its first call.

Few kinds of GPU have run these kernels. On a GPU the first call of an operator, for each dtype,
score and form, begins with a comparison of its results and gradients on small inputs with those of
the reference in float64. A backend that is wrong, raises or hangs is left out, with one warning.
The outcome is stored in a file for the device, its driver, PyTorch, Triton and the build of
attnfast.

``ATTNFAST_SELF_CHECK=0`` turns it off; with ``all`` the CPU's operators are compared too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import InputError, argument_message
from attnfast.ops import backends, cuda_graphs
from attnfast.ops.arguments import SCORES
from attnfast.ops.attention import ATTENTION, AttentionInputs
from attnfast.ops.backends import (
    BACKENDS,
    DROPS,
    GATE,
    HALF,
    LAYER_FEATURES,
    NO_TANH,
    PACKAGE,
    STACK,
    DispatchKey,
)
from attnfast.ops.copying import COPYING, CopyInputs
from attnfast.ops.coverage import COVERAGE, CoverageInputs
from attnfast.ops.dispatch import run
from attnfast.ops.linear import LINEAR, LinearInputs
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.recurrent import RECURRENT, RecurrentInputs
from attnfast.ops.scores import SCORING, ScoreInputs
from attnfast.ops.search import SEARCH, SearchInputs

#: Seconds after which an operator counts as hanging, the compilation of Triton kernels included.
LIMIT = 120.0
#: The largest error, relative to the largest number of a result, or to 1. It may also be eight
#: times that of the reference in the same dtype.
TOLERANCE = {
    torch.float64: 1e-8, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2,
}  # fmt: skip
REPORT = "please report it, with the output of `attnfast check`"


# ---- small inputs -------------------------------------------------------------------------------


class _Numbers:
    """Random inputs in float64, the same at every call."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def weights(self, *shape: int) -> Tensor:
        return self(*shape).softmax(-1)

    def masks(self, *shape: int) -> Tensor:
        return torch.randint(2, shape, generator=self.generator).double()

    def words(self, vocabulary: int, *shape: int) -> Tensor:
        return torch.randint(vocabulary, shape, generator=self.generator)


def _attention(request: DispatchKey) -> AttentionInputs:
    x, dot = _Numbers(), request.score == "dot"
    B, Tq, Tk, A, Dv = 2, 1 if request.step else 9, 37, 24, 72  # PyTorch multiplies 72
    if request.device.type == "cuda" and not (dot or request.step or request.dtype in HALF):
        Tq, Tk, Dv = 257, 261, 1000  # the scores and the context are then computed one by one
    return AttentionInputs(
        x(B, Tq, A), x(B, Tk, A), x(B, Tk, Dv),
        score_vector=None if dot else x(A), bias=x(B, 1, Tk), lengths=torch.tensor([Tk, 20]),
        scale=A**-0.5 if dot else 1.0, score=request.score, need_weights=True,
        need_statistics=request.dtype not in HALF,  # which may have another largest weight
    )  # fmt: skip


def _coverage(request: DispatchKey) -> CoverageInputs:
    x, (B, Tk, A, Dv), K = _Numbers(), (2, 37, 24, 20), request.filters
    dot = request.score == "dot"
    return CoverageInputs(
        x(B, 1 if request.step else 4, A), x(B, Tk, A), x(B, Tk, Dv),
        score_vector=None if dot else x(A), lengths=torch.tensor([Tk, 20]),
        filters=x(K, 1, 5) if K else None, projection=x(A, K, scale=K**-0.5) if K else None,
        penalty=x(1).abs(), coverage=x.weights(B, Tk), previous=x.weights(B, Tk),
        scale=A**-0.5 if dot else 1.0, score=request.score,
    )  # fmt: skip


def _copying(request: DispatchKey) -> CopyInputs:
    x, (B, Tq, V, X, Tk) = _Numbers(), (2, 3, 70, 5, 19)
    return CopyInputs(x(B, Tq, V), x.weights(B, Tq, Tk), x.words(V + X, B, Tk), x(B, Tq), num_oov=X)


def _scores(request: DispatchKey) -> ScoreInputs:
    x = _Numbers()
    return ScoreInputs(x(2, 5, 24), x(2, 37, 24), x(24), request.score)


def _recurrent(request: DispatchKey) -> RecurrentInputs:
    x, (B, T, E, H, Tk, A, Dv) = _Numbers(), (3, 17, 6, 16, 19, 12, 10)
    feature = request.layer_feature
    drops, layers = feature == DROPS, (2,) if feature in (STACK, DROPS) else ()
    gates = (4 if drops else 3) * H
    call = RecurrentInputs(
        x(B, T, E), x(*layers, B, H), x(gates, E + Dv, scale=0.2), x(*layers, gates, H, scale=0.2),
        cell=x(*layers, B, H) if drops else None, mode="lstm" if drops else "gru",
        bias_ih=x(*layers, gates), bias_hh=x(*layers, gates), key=x(B, Tk, A), value=x(B, Tk, Dv),
        weight_ih_upper=x(1, gates, H, scale=0.2) if layers else None, score_vector=x(A),
        weight_query=x(A, H, scale=0.2), lengths=torch.tensor([Tk, 7, 1]), score="tanh",
    )  # fmt: skip
    if feature in (GATE, DROPS):
        call = call._replace(weight_gate=x(Dv, H, scale=0.2), bias_gate=x(Dv))
    if feature in (NO_TANH, DROPS):
        call = call._replace(
            weight_output=x(Dv, Dv + H, scale=0.2), bias_output=x(Dv), attends_first=False
        )
    if feature == NO_TANH:
        call = call._replace(output_activation="identity")
    if drops:  # with zoneout, which has more terms than dropout
        call = call._replace(
            dropout_state=x.masks(2, B, T, H), dropout_cell=x.masks(2, B, T, H), zoneout=True,
            dropout_between=x.masks(1, B, T, H), dropout_query=x.masks(B, T, H),
            dropout_joined=x.masks(B, T, Dv + H), dropout_feed=x.masks(B, T, Dv),
            dropout_output=x.masks(B, T, Dv),
        )  # fmt: skip
    if request.history:
        zeros = torch.zeros(B, Tk, dtype=torch.float64)
        call = call._replace(
            filters=x(4, 1, 5), projection=x(A, 4, scale=0.5), coverage=zeros, previous=zeros
        )
    return call


def _search(request: DispatchKey) -> SearchInputs:
    layer, x, V, H, E = _recurrent(request), _Numbers(), 40, 16, 6
    R = H + 10  # state and context
    shared = {k: v for k, v in layer._asdict().items() if k in SearchInputs._fields}
    return SearchInputs(
        x(V, E), x(V, R, scale=R**-0.5), torch.tensor([6, 5, 6]), bias_vocab=x(V),
        begin=1, end=2, most=6, beam=3, n_best=3, **shared,
    )  # fmt: skip


def _linear(request: DispatchKey) -> LinearInputs:
    x = _Numbers()
    return LinearInputs(x(21, 35), x(18, 35), x(18))


#: Each operator, and its small inputs, by name.
OPERATORS: dict[str, tuple[Any, Callable[[DispatchKey], Any]]] = {
    operator.name: (operator, inputs)
    for operator, inputs in (
        (ATTENTION, _attention),
        (COVERAGE, _coverage),
        (COPYING, _copying),
        (SCORING, _scores),
        (RECURRENT, _recurrent),
        (SEARCH, _search),
        (LINEAR, _linear),
    )
}
#: The operators that use PyTorch's products on a GPU.
_MULTIPLIED = {"attention", "recurrent", "search"}
#: Inputs that have the accumulation dtype.
_ACCUMULATED = {"filters", "projection", "penalty", "coverage", "previous"}


# ---- the comparison -----------------------------------------------------------------------------


def _results(
    operator: Any, call: Any, backend: str, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the results of a call and the gradients of its inputs, on the CPU in float64."""

    def moved(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x.to(device) if isinstance(x, Tensor) else x
        own = accumulation_dtype(dtype) if name in _ACCUMULATED else dtype
        is_constant = operator is SEARCH or name.startswith("dropout")  # masks have no gradient
        return x.to(device, own).requires_grad_(not is_constant)

    arguments = {name: moved(name, x) for name, x in call._asdict().items()}
    outputs = run(operator, type(call)(**arguments), backend)._asdict()
    results = {k: x for k, x in outputs.items() if isinstance(x, Tensor) and x.numel()}
    noise = _Numbers()
    fields = operator.Backward._fields if hasattr(operator, "Backward") else ("grad_scores",)
    differentiable = {k: x for k, x in results.items() if x.requires_grad and f"grad_{k}" in fields}
    leaves = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    if differentiable:
        terms = [(x.double() * noise(*x.shape).to(device)).sum() for x in differentiable.values()]
        loss = torch.stack(terms).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for name, grad in zip(leaves, grads):
            if grad is not None:
                results[f"the gradient of {name}"] = grad
    first = operator.Result._fields[0]
    fewer = {"need_weights": False} if "need_weights" in arguments else {}
    with torch.no_grad():
        again = run(operator, type(call)(**{**arguments, **fewer}), backend)
    results[f"{first} without gradients"] = getattr(again, first)
    return {name: x.detach().to("cpu", torch.float64) for name, x in results.items()}


def _rounded(call: Any, dtype: torch.dtype) -> Any:
    """Return a call whose numbers the dtype represents."""
    return call._replace(
        **{
            name: x.to(accumulation_dtype(dtype) if name in _ACCUMULATED else dtype).double()
            for name, x in call._asdict().items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }
    )


class Comparison(NamedTuple):
    """Result of a comparison.

    Attributes:
        failure: what is wrong, or None.
        error: the largest error, as a share of what is allowed.
        seconds: how long it took.
    """

    failure: str | None
    error: float
    seconds: float


def compare(backend: str, request: DispatchKey) -> Comparison:
    """Compare an operator with the reference, forward and backward.

    The caller's modes, such as autocast or a trace, do not reach it: it runs in another thread.

    Raises:
        torch.OutOfMemoryError: there is too little memory for small inputs.
    """
    outcome: list[Comparison | BaseException] = []

    def work() -> None:
        try:
            outcome.append(_compare(backend, request))
        except Exception as error:
            outcome.append(error)

    begin = time.perf_counter()
    thread = threading.Thread(target=work, name="attnfast-self-check", daemon=True)
    thread.start()
    thread.join(LIMIT)
    seconds = time.perf_counter() - begin
    if not outcome:
        return Comparison(f"it did not end within {LIMIT:.0f} seconds", math.inf, seconds)
    (result,) = outcome
    if isinstance(result, Comparison):
        return result._replace(seconds=seconds)
    if isinstance(result, torch.OutOfMemoryError):
        raise result
    message = " ".join(str(result).split())
    message = message if len(message) <= 200 else f"{message[:199]}…"
    return Comparison(f"{type(result).__name__}: {message}", math.inf, seconds)


def _compare(backend: str, request: DispatchKey) -> Comparison:
    operator, inputs = OPERATORS[request.operator]
    dtype, cpu = request.dtype, torch.device("cpu")
    calls = [_rounded(inputs(request), dtype)]
    if backend in operator.runners and cuda_graphs.are_enabled():  # a second call replays graphs
        first = calls[0]
        calls.append(first._replace(input=-first.input, hidden=-first.hidden))
    on_gpu = request.device.type == "cuda"
    with torch.cuda.device(request.device) if on_gpu else contextlib.nullcontext():
        found = [_results(operator, call, backend, request.device, dtype) for call in calls]
    worst, failure = 0.0, None
    for number, (got, call) in enumerate(zip(found, calls)):
        exact = _results(operator, call, "reference", cpu, torch.float64)
        plain = _results(operator, call, "reference", cpu, dtype)
        for name, want in exact.items():
            what = f"{name} of a second call" if number else name
            if name not in got or got[name].shape != want.shape:
                return Comparison(f"{what} is missing or of another shape", math.inf, 0.0)
            scale = max(1.0, _distance(want.masked_fill(~want.isfinite(), 0.0), torch.zeros(())))
            allowed = max(_tolerance(request) * scale, 8 * _distance(plain[name], want))
            error = _distance(got[name], want) / allowed
            worst = max(worst, error) if error == error else math.inf
            if failure is None and not error <= 1:
                failure = f"{what} differs by {error * allowed:.3g}, allowed is {allowed:.1g}"
    return Comparison(failure, worst, 0.0)


def _tolerance(request: DispatchKey) -> float:
    """Return the largest relative error: PyTorch's products may be in TF32, as exact as float16."""
    is_rounded = request.device.type == "cuda" and request.operator in _MULTIPLIED
    is_rounded &= request.dtype == torch.float32 and _products_of_gpu() == "tf32"
    return TOLERANCE[torch.float16 if is_rounded else request.dtype]


def _products_of_gpu() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors; equal infinities have none."""
    differs = (a - b).abs().masked_fill(a == b, 0.0)
    return float(differs.max()) if differs.numel() else 0.0


# ---- stored outcomes ----------------------------------------------------------------------------


def identity(device: torch.device) -> list[str]:
    """Return what a comparison depends on: the device, its driver, and all versions."""
    parts = [torch.__version__, str(torch.version.cuda or torch.version.hip)]
    for name in ("attnfast", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(importlib.metadata.version(name))
    kernels = importlib.util.find_spec("attnfast.kernels")
    folders = (kernels and kernels.submodule_search_locations) or []
    sources = (x for folder in folders for x in Path(folder).glob("*.py"))
    for path in sorted([*PACKAGE.glob("_C_*.so"), *sources]):
        built = path.stat()
        parts.append(f"{path.name} {built.st_size} {built.st_mtime_ns}")
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
        parts.append(str(torch.cuda.get_device_capability(device)))
        parts.append(_products_of_gpu())
        parts.append(f"CUDA graphs {cuda_graphs.are_enabled()}")
        files = ["/proc/driver/nvidia/version", "/sys/module/amdgpu/version"]
    else:
        files = ["/proc/cpuinfo"]
    for name in files:
        with contextlib.suppress(OSError):
            lines = Path(name).read_text().splitlines()
            parts += [x for x in lines if not x.startswith(("cpu MHz", "bogomips"))][:40]
    return parts


class OutcomeFile:
    """The file of outcomes of earlier comparisons, one file for each identity.

    Each comparison is recorded before it starts, so that the next process detects a crash or a hang
    that was killed. A folder that cannot be written to is no error.
    """

    def __init__(self, device: torch.device):
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        digest = hashlib.sha256("\n".join(identity(device)).encode()).hexdigest()[:16]
        self.path = Path(home) / "attnfast" / f"self-check-{digest}.json"

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def load(self, name: str) -> tuple[bool, str | None]:
        """Return whether a comparison is known, and its failure."""
        entry = self._read().get(name)
        if not isinstance(entry, dict):
            return False, None
        if "process" not in entry:
            return True, entry.get("failure")
        if _is_alive(entry["process"]):  # another process is comparing
            return False, None
        return True, f"an earlier comparison did not end ({self.path} has it)"

    def write(self, name: str, **entry: Any) -> None:
        """Store the entry of a comparison, or remove it if it is empty."""
        part = self.path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            known = {k: v for k, v in self._read().items() if k != name}
            text = json.dumps(known | ({name: entry} if entry else {}), indent=1)
            try:
                part.write_text(text)
                part.replace(self.path)
            except OSError:  # a full disk
                part.unlink(missing_ok=True)


def _is_alive(process: Any) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, TypeError):
        return False
    except OSError:
        return True
    return True


@functools.cache
def _outcome_file(device: torch.device) -> OutcomeFile:
    return OutcomeFile(device)


def name_of(backend: str, request: DispatchKey) -> str:
    """Return the name of a comparison: "cuda attention of float32, tanh, a step"."""
    words = [f"{backend} {request.operator} of {str(request.dtype).removeprefix('torch.')}"]
    if request.operator in ("attention", "coverage_attention", "scores"):
        words.append(request.score)
    words += ["a step"] * request.step + ["a history"] * request.history
    words += [request.layer_feature] * bool(request.layer_feature)
    words += [f"{request.filters} filters"] * bool(request.filters)
    return ", ".join(words)


def compare_once(backend: str, request: DispatchKey) -> str | None:
    """Return what is wrong with an operator, from the file or by a comparison."""
    outcomes, name = _outcome_file(request.device), name_of(backend, request)
    is_known, failure = outcomes.load(name)
    if is_known:
        return failure
    outcomes.write(name, process=os.getpid())
    try:
        comparison = compare(backend, request)
    except torch.OutOfMemoryError:  # which says nothing about the operator
        outcomes.write(name)
        backends.self_check_postponed = True
        return None
    except BaseException:  # Ctrl-C
        outcomes.write(name)
        raise
    store_outcome(backend, request, comparison)
    return comparison.failure


def store_outcome(backend: str, request: DispatchKey, comparison: Comparison) -> None:
    """Store the outcome of a comparison."""
    _outcome_file(request.device).write(name_of(backend, request), failure=comparison.failure)


def reason_against(backend: str, request: DispatchKey) -> str | None:
    """Return why a backend must not run a call: its self-check has failed; or None."""
    mode = os.environ.get("ATTNFAST_SELF_CHECK") or "1"
    if mode not in ("0", "1", "all"):
        raise InputError(argument_message("ATTNFAST_SELF_CHECK", "0, 1 or all", mode))
    on_gpu = request.device.type == "cuda" and torch.cuda.is_available()
    if mode == "0" or not (on_gpu or mode == "all"):
        return None
    if backend == "reference" or request.operator not in OPERATORS:
        return None
    if on_gpu and torch.cuda.is_current_stream_capturing():
        backends.self_check_postponed = True  # nothing may wait for the device
        return None
    failure = compare_once(backend, request)
    if failure is None:
        return None
    warnings.warn(
        f"attnfast does not use {name_of(backend, request)}: {failure}; {REPORT}", stacklevel=2
    )
    return f"its self-check has failed: {failure}"


backends.self_check = reason_against


def comparisons(device: torch.device, complete: bool) -> Iterator[tuple[str, DispatchKey]]:
    """Yield the comparisons for a device: those of float32, or all."""
    dtypes = list(TOLERANCE) if complete else [torch.float32]
    for backend, dtype, operator in (
        (x, y, z) for x in BACKENDS if x != "reference" for y in dtypes for z in OPERATORS
    ):
        plain = DispatchKey(device, dtype, operator)
        forms = [plain]
        if operator in ("attention", "coverage_attention", "scores"):
            scores = SCORES if complete else ("dot", "tanh")
            forms = [plain._replace(score=x) for x in scores if (operator, x) != ("scores", "dot")]
        if operator == "coverage_attention":
            forms += [x._replace(filters=8) for x in forms if x.score != "dot"]
        if operator in ("attention", "coverage_attention"):
            forms += [x._replace(step=True) for x in forms]
        if operator == "recurrent":
            forms.append(plain._replace(history=True))
            forms += [plain._replace(layer_feature=x) for x in LAYER_FEATURES]
        for request in forms:
            if BACKENDS[backend].unsupported_reason(request) is None:
                yield backend, request
