"""Selection of the implementation that runs a call: one class for each backend.

:func:`select_backend` takes the backend with the best rank among those that support a call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import describe, raise_value_error
from attnfast._utils.dispatch_log import is_recording, record
from attnfast._utils.torch_private import constant_in_graphs, has_kernel

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALF)
#: The oldest NVIDIA GPU that Triton supports; for some older ones it compiles, but spills.
OLDEST_FOR_TRITON = (8, 0)
#: NVIDIA's systems on a chip: they run no machine code but their own.
ALONE = {(7, 2), (8, 7), (10, 1)}
#: Where the compiled libraries are.
PACKAGE = Path(__file__).parents[1]


@functools.cache
def not_installed() -> str | None:
    """Return why neither compiled libraries nor Triton kernels can be found, or None.

    If Python is started in the folder of the sources, it imports them, not the installed package.
    """
    if importlib.util.find_spec("attnfast.kernels") is not None:
        return None
    return (
        f"attnfast was imported from its sources in {PACKAGE}, not as installed: "
        "start Python in another folder, or install with pip install -e"
    )


@functools.cache
def load_library(name: str) -> str | None:
    """Load the compiled library ``attnfast/<name>.so`` once; return why it cannot be, or None."""
    path = PACKAGE / f"{name}.so"
    if not path.exists():
        if reason := not_installed():
            return reason
        why = path.with_suffix(".txt")  # see setup.py
        reason = f": {why.read_text().strip()}" if why.exists() else ""
        needed = "a C++ compiler that works" if name == "_C_cpu" else "nvcc"
        return f"{path.name} was not built{reason}; install attnfast again with {needed}"
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        return f"{path.name} does not load into torch {torch.__version__}: {reason}"
    return None


def _library(name: str) -> ctypes.CDLL:
    """Return a loaded library, for its exported functions other than operators."""
    return ctypes.CDLL(str(PACKAGE / f"{name}.so"))


def triton_interpreted() -> bool:
    """Return whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _triton_missing() -> bool:
    return importlib.util.find_spec("triton") is None


def _named(*capabilities: tuple[int, int]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities)


def architectures() -> list[tuple[int, int]]:
    """Return the compute capabilities that ``_C_cuda.so`` was built for, ascending.

    It has machine code for each, and PTX for the last.
    """
    library = _library("_C_cuda")
    library.attnfast_cuda_architectures.restype = ctypes.POINTER(ctypes.c_int)
    values = itertools.takewhile(bool, library.attnfast_cuda_architectures())
    return [divmod(value // 10, 10) for value in values]


def not_built_for(own: tuple[int, int], built: list[tuple[int, int]]) -> str | None:
    """Return why a library ``built`` for these capabilities cannot run on a GPU's ``own``, or None.

    Machine code runs on later minor versions of the same major one, PTX on all later versions.
    """
    alike = [x for x in built if x[0] == own[0] and not {x, own} & ALONE]
    if own in built or own >= built[-1] or any(own >= x for x in alike):
        return None
    return (
        f"_C_cuda.so was built for compute capabilities {_named(*built)} and later than the last, "
        f"this GPU has {_named(own)}: build it with TORCH_CUDA_ARCH_LIST={_named(own)}"
    )


#: What a recurrent layer may have beyond its cell and attention.
LAYER_FEATURES = DROPS, GATE, NO_TANH, STACK = (
    "dropout that changes from step to step", "a gate on its context", "an output without tanh",
    "several layers",
)  # fmt: skip


class DispatchKey(NamedTuple):
    """The properties of a call that decide which backend runs it."""

    device: torch.device
    dtype: torch.dtype
    operator: str = "attention"
    step: bool = False  # one query for each sequence: latency dominates
    filters: int = 0
    history: bool = False  # the attention of a recurrent layer has a history
    layer_feature: str = ""  # one of LAYER_FEATURES, or none of them
    score: str = "tanh"


class Backend:
    """An implementation of the operators."""

    name: str
    packs = False  # whether :meth:`pack` is implemented
    takes_bfloat16_weights = False  # of recurrent layers with float32 inputs

    def unsupported_reason(self, request: DispatchKey) -> str | None:
        """Return why this cannot run a call, in words that follow "because", or None."""
        if reason := self._unsupported_reason(request):
            return reason
        whole = ("recurrent", "search", "linear")
        if request.operator in whole and request.dtype in HALF:
            return f"{request.operator} takes float32 or float64, not {request.dtype}"
        name, key = f"attnfast_{self.name}::{request.operator}", request.device.type.upper()
        registered = any(has_kernel(name, k) for k in (key, "CompositeExplicitAutograd"))
        return None if registered else f"it has no {request.operator} yet"

    def _unsupported_reason(self, request: DispatchKey) -> str | None:
        raise NotImplementedError

    def rank(self, request: DispatchKey) -> float:
        """Return the rank for a call, lower is better; infinity if it is only selected by name."""
        raise NotImplementedError

    def key_exponentials(self, key: Tensor, lengths: Tensor | None, score: str) -> Tensor | None:
        """Return e^{2k} of the keys, ``[.., Tk, ·]``, if steps over the same keys gain from it.

        Each key's row depends on that key alone, and its layout is private to the backend.
        """
        return None

    def pack(self, *parameters: Any) -> Tensor | None:
        """Return a tensor that calls with the same parameters of a recurrent layer share.

        The parameters are the arguments of ``pack_recurrent`` in :mod:`attnfast.ops.recurrent`.
        """
        return None


class Triton(Backend):
    """Triton kernels."""

    name = "triton"
    most_filters = 128  # more do not fit into shared memory

    def _unsupported_reason(self, request: DispatchKey) -> str | None:
        if _triton_missing():
            return "the package triton is not installed"
        if reason := not_installed():
            return reason
        if request.filters > self.most_filters:
            return f"it takes at most {self.most_filters} filters, not {request.filters}"
        if triton_interpreted():
            if request.dtype == torch.bfloat16:
                return "Triton's interpreter computes bfloat16 wrongly"
            on_cpu = request.device.type == "cpu"
            return None if on_cpu else "TRITON_INTERPRET=1 needs CPU tensors"
        if request.device.type != "cuda":
            return f"it runs on CUDA tensors, not on {request.device.type}"
        if torch.version.hip is None:
            own = torch.cuda.get_device_capability(request.device)
            if own < OLDEST_FOR_TRITON:
                needed = _named(OLDEST_FOR_TRITON)
                return f"Triton needs compute capability {needed}, this GPU has {_named(own)}"
        return None

    def rank(self, request: DispatchKey) -> float:
        return math.inf if triton_interpreted() else 1


class Cuda(Backend):
    """CUDA C++.

    On an H100 it is faster than Triton (bench/results), except for dot scores in half precision,
    where Triton uses tensor cores, and for copying (docs/performance.md).
    """

    name = "cuda"

    def _unsupported_reason(self, request: DispatchKey) -> str | None:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if request.device.type != "cuda":
            return f"it runs on CUDA tensors, not on {request.device.type}"
        if reason := load_library("_C_cuda"):
            return reason
        return not_built_for(torch.cuda.get_device_capability(request.device), architectures())

    def rank(self, request: DispatchKey) -> float:
        if request.operator == "attention":  # Triton multiplies half types on tensor cores
            products = request.score == "dot" and request.dtype in HALF and not request.step
            return 2 if products else 0
        return 2 if request.operator == "copy_distribution" else 0


def _query_cpu_library(name: str) -> bool:
    """Call an exported function of the CPU library that returns a boolean."""
    function = getattr(_library("_C_cpu"), name)
    function.restype = ctypes.c_bool
    return bool(function())


def multiplies_bfloat16() -> bool:
    """Return whether the kernels for this CPU multiply bfloat16 factors."""
    return load_library("_C_cpu") is None and _query_cpu_library("attnfast_multiplies_bfloat16")


class Cpu(Backend):
    """C++ for CPUs."""

    name = "cpu"
    packs = takes_bfloat16_weights = True

    def _unsupported_reason(self, request: DispatchKey) -> str | None:
        if request.device.type != "cpu":
            return f"it runs on CPU tensors, not on {request.device.type}"
        return load_library("_C_cpu")

    def unsupported_reason(self, request: DispatchKey) -> str | None:
        if reason := super().unsupported_reason(request):
            return reason
        if request.operator == "linear" and not _query_cpu_library("attnfast_linear_is_quicker"):
            return "PyTorch's own product is as fast on this processor"
        return None

    def rank(self, request: DispatchKey) -> float:
        return 3

    def key_exponentials(self, key: Tensor, lengths: Tensor | None, score: str) -> Tensor | None:
        exponentials = torch.ops.attnfast_cpu.key_exponentials(key.detach(), lengths, score)
        return exponentials if exponentials.numel() else None

    def pack(self, *parameters: Any) -> Tensor | None:
        return torch.ops.attnfast_cpu.pack_recurrent(*parameters)


class Reference(Backend):
    """Plain PyTorch, the oracle: it supports every call."""

    name = "reference"

    def unsupported_reason(self, request: DispatchKey) -> str | None:
        return None

    def rank(self, request: DispatchKey) -> float:
        return 4


BACKENDS: dict[str, Backend] = {x.name: x for x in (Triton(), Cuda(), Cpu(), Reference())}


def _no_self_check(backend: str, request: DispatchKey) -> str | None:
    return None


#: Returns why a backend must not run a call, or None: :mod:`attnfast.ops.self_check` sets it.
self_check: Callable[[str, DispatchKey], str | None] = _no_self_check
#: Whether the self-check was not possible, so that the choice must not be cached.
self_check_postponed = False


@functools.cache
def unsupported_reason(backend: str, *properties) -> str | None:
    """Return why a backend cannot run a call, or None; ``properties``: fields of a DispatchKey."""
    request = DispatchKey(*properties)
    return BACKENDS[backend].unsupported_reason(request) or self_check(backend, request)


def forget_choices() -> None:
    """Clear the cached choices of backends."""
    global self_check_postponed
    self_check_postponed = False
    for cached in (unsupported_reason, _first_supported, _select):
        cached.cache_clear()


def check_backend(backend: object) -> None:
    """Raise unless ``backend`` is None or the name of a backend."""
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise_value_error("backend", f"None or one of {', '.join(BACKENDS)}", describe(backend))


def ranked_backends(request: DispatchKey) -> list[str]:
    """Return the backends to try for a call, the best first."""
    ranks = {name: backend.rank(request) for name, backend in BACKENDS.items()}
    return sorted((name for name in ranks if ranks[name] < math.inf), key=ranks.__getitem__)


@functools.cache
def _first_supported(backend: str | None, *properties) -> str | None:
    order = ranked_backends(DispatchKey(*properties)) if backend is None else [backend]
    able = (x for x in order if x != "reference" and unsupported_reason(x, *properties) is None)
    return next(able, None)


_has_warned = False


def _warn_of_reference(reasons: str) -> None:
    """Warn once in a process that calls run on the reference implementation."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"attnfast runs on its reference implementation, correct but slow ({reasons})",
            stacklevel=6,
        )


@functools.cache
def _select(backend: str | None, *properties) -> str:
    if backend is None:
        order = ranked_backends(DispatchKey(*properties))
        chosen = next(name for name in order if unsupported_reason(name, *properties) is None)
        if chosen == "reference":
            _warn_of_reference("; ".join(reasons_against(chosen, *properties)))
        return chosen
    reason = unsupported_reason(backend, *properties)
    if reason is not None:
        raise RuntimeError(f"backend {backend!r} cannot run this call: {reason}")
    return backend


@constant_in_graphs
def reasons_against(chosen: str | None, *properties) -> tuple[str, ...]:
    """Return a sentence for each compiled backend that ranks above the chosen one, or for all."""
    names = [x for x in ranked_backends(DispatchKey(*properties)) if x != "reference"]
    better = names[: names.index(chosen)] if chosen in names else names
    reasons = {name: unsupported_reason(name, *properties) for name in better}
    return tuple(f"not {name}: {reason}" for name, reason in reasons.items() if reason)


@constant_in_graphs
def try_select_backend(
    backend: str | None,
    device: torch.device,
    dtype: torch.dtype,
    operator: str,
    history: bool = False,
    layer_feature: str = "",
) -> str | None:
    """Return the best compiled backend for a call, or the requested one; None if there is none."""
    chosen = _first_supported(backend, device, dtype, operator, False, 0, history, layer_feature)
    if self_check_postponed:
        forget_choices()
    return chosen


@constant_in_graphs
def select_backend(
    backend: str | None,
    device: torch.device,
    dtype: torch.dtype,
    operator: str = "attention",
    step: bool = False,
    filters: int = 0,
    score: str = "tanh",
) -> str:
    """Return the backend for a call; raise RuntimeError if a requested one cannot run it.

    ``step`` is True for one query of each sequence, ``filters`` the number of location filters, and
    ``score`` the score of the call.
    """
    check_backend(backend)
    # str.__str__: the value of an enumeration member
    name = backend if backend is None else str.__str__(backend)
    properties = DispatchKey(device, dtype, operator, step, filters, score=score)
    chosen = _select(name, *properties)
    if self_check_postponed:
        forget_choices()
    if is_recording():
        if name is None:
            record(operator, chosen, *reasons_against(chosen, *properties))
        else:
            record(operator, f"{chosen}, as requested")
    return chosen
