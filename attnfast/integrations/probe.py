"""Compare a module with its replacement, on copies of both, before it is replaced.

The module's own class and the adapter's methods compute the adapter's example: in the module's own
dtype, in training, in float64, under autocast, and with larger parameters on a long source.
Results, state and gradients must agree.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnfast.integrations.adapter import Adapter, ProbeInputs
from attnfast.integrations.inspection import INTERNAL, integers, static_skip_reason
from attnfast.integrations.patch import patch

__all__ = ["Measurement", "judge", "measure", "tensors"]

OTHERS = ((600,), (2, 1))  # lengths of further sources of one comparison
LARGE = 1 << 18  # elements of a parameter whose gradients are compared in one config only
WORDS = 512  # words used of a larger vocabulary, in all configs but that one
OWN = (torch.float32, torch.float64)  # dtypes of modules that are compared unconverted
SEEDS = 3  # examples to try, if rounding decides the results of the first
BATCHES = tuple(tuple(1 + i * i % 5 for i in range(rows)) for rows in (9, 17))


def judge(module: nn.Module, adapter: Adapter) -> tuple[str | None, list[str]]:
    """Return why a module of a known class is skipped, or None; see :func:`compare`."""
    why = static_skip_reason(module, adapter)
    return (why, []) if why else compare(module, adapter)


@dataclass(frozen=True)
class ProbeConfig:
    """One configuration of the comparison; its name ends a sentence about a difference."""

    name: str
    dtype: torch.dtype
    device: torch.device
    tolerance: float
    training: bool = False
    autocast: bool = False
    weight_scale: float | None = None  # size of drawn parameters; None: the module's own
    others: tuple[tuple[int, ...], ...] = ()  # lengths of further sources
    repeats: bool = False  # the input has rows of zeros and repeated rows
    late: bool = False  # one long target, with words that are equal in all rows
    large: bool = False  # the whole vocabulary and gradients of large parameters; one batch
    seed: int = 0  # of the example's random numbers
    perturbation: float = 0.0  # relative change of the parameters


def probe_configs(module: nn.Module, adapter: Adapter) -> Iterator[ProbeConfig]:
    """Yield the configurations in which a module and its replacement are compared."""
    cpu = torch.device("cpu")
    parameter = next(module.parameters(), torch.empty(0, device=cpu))
    exact = adapter.dtype == torch.float64
    tolerance = 1e-9 if exact else 1e-4
    dtype = f"in {str(adapter.dtype).removeprefix('torch.')}"
    name = f"{dtype} with batches of {' and '.join(str(len(x)) for x in BATCHES)}"
    yield ProbeConfig(name, adapter.dtype, cpu, tolerance, others=BATCHES, repeats=True, late=True)
    name = f"{dtype} in training mode"
    yield ProbeConfig(name, adapter.dtype, cpu, tolerance, training=True, late=True)
    if parameter.dtype in OWN:
        name = f"in the module's own {str(parameter.dtype).removeprefix('torch.')}"
        yield ProbeConfig(name, parameter.dtype, parameter.device, 1e-4, large=True)
    yield ProbeConfig(
        f"{dtype} with large parameters and {OTHERS[0][0]} keys",
        adapter.dtype,
        cpu,
        1e-6 if exact else 1e-3,
        weight_scale=adapter.weight_scale,
        others=OTHERS,
    )
    half = parameter.dtype not in OWN
    name = "under autocast to bfloat16"
    yield ProbeConfig(name, torch.float32, parameter.device, 0.1, autocast=True, large=half)


KINDS = ("results", "state", "gradients")  # the parts of an outcome


@dataclass(frozen=True)
class Measurement:
    """The comparison of a module with its replacement in one configuration.

    Args:
        config: the configuration.
        outcomes: results, state and gradients by name, of the module's own class and of its
            replacement; fewer if one failed.
        reason: the first difference or the failure, None if there is none.
        error: the exception of a failure.
    """

    config: ProbeConfig
    outcomes: tuple[tuple[dict[str, Any], ...], ...]
    reason: str | None
    error: Exception | None = None

    def largest(self) -> dict[str, float]:
        """Return the largest difference of results, state and gradients; infinity if one lacks."""
        return {
            what: max((_distance(x, b[name]) for name, x in a.items()), default=0.0)
            if a.keys() == b.keys()
            else math.inf
            for what, a, b in zip(KINDS, *self.outcomes)
        }

    def other_dtypes(self) -> int:
        """Return how many results, tensors of the state and gradients differ in dtype."""
        pairs = [(x, b.get(name)) for a, b in zip(*self.outcomes) for name, x in a.items()]
        tensors = [x for x in pairs if all(isinstance(part, Tensor) for part in x)]
        return sum(a.dtype != b.dtype for a, b in tensors)

    def moved(self) -> list[set[str]]:
        """Return the names of the gradients that are not 0, of each outcome."""
        grads = [x[KINDS.index("gradients")] for x in self.outcomes]
        return [{k for k, x in y.items() if x is not None and _numbers(x).any()} for y in grads]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Disable logging, and use one thread, which is faster on a busy machine."""
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    handlers = list(logging.root.handlers)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.disable(level)
        logging.root.handlers[:] = handlers  # the first warning makes one


@quietly()
def compare(module: nn.Module, adapter: Adapter) -> tuple[str | None, list[str]]:
    """Call the module and its replacement on the adapter's example, in every configuration.

    Returns:
        The difference, or None; and the parameters whose gradient is now 0, while the module's own
        code gives them rounding errors.
    """
    theirs: set[str] = set()
    ours: set[str] = set()
    for measured in measure(module, adapter):
        if measured.reason is not None:
            return measured.reason, []
        for names, moved in zip((theirs, ours), measured.moved()):
            names |= moved
        del measured  # its tensors, before the next are computed
    trained = [name for name, p in module.named_parameters() if p.requires_grad and p.numel()]
    return None, [name for name in trained if name in theirs - ours]


def measure(module: nn.Module, adapter: Adapter) -> Iterator[Measurement]:
    """Yield the comparison of a module with its replacement in every configuration."""
    words = words_to_compare(module, adapter)
    for config in probe_configs(module, adapter):
        for seed in range(SEEDS):
            measured = _measure(module, adapter, replace(config, seed=seed), words)
            if not is_decided_by_rounding(module, adapter, measured, words):
                break
        yield measured


def _measure(
    module: nn.Module, adapter: Adapter, config: ProbeConfig, words: int | None
) -> Measurement:
    """Return the comparison of a module with its replacement in one configuration."""
    outcomes: list[tuple[dict[str, Any], ...]] = []
    whose, reason, failure = "its own class", None, None
    try:
        outcomes.append(outcome_of(module, adapter, config, False, words))
        whose = "its replacement"
        outcomes.append(outcome_of(module, adapter, config, True, words))
        whose = "the comparison"  # of tensors whose layout it does not support
        reason = outcome_mismatch(outcomes[0], outcomes[1], config)
        if reason and config.large and config.dtype == torch.float32 and not config.autocast:
            rounded = rounding_error(module, adapter, config, outcomes[0], words)
            config = replace(config, tolerance=max(config.tolerance, 8 * rounded))
            reason = outcome_mismatch(outcomes[0], outcomes[1], config)
    except Exception as error:
        failure = error
        if outcomes or not config.autocast:  # its own class may not support autocast either
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            reason = f"{whose} fails on an example: {what}, {config.name}"
            if not outcomes and re.search("double|float64", what, re.IGNORECASE):
                reason += "; Adapter(dtype=torch.float32) compares in float32 only"
    return Measurement(config, tuple(outcomes), reason, failure)


def is_decided_by_rounding(
    module: nn.Module, adapter: Adapter, measured: Measurement, words: int | None
) -> bool:
    """Return whether a difference says nothing, for the module's own class jumps at the example.

    Then parameters that differ by some rounding errors give other results, too: a mask that follows
    the largest of two nearly equal weights follows the other one.
    """
    config = measured.config
    if measured.reason is None or measured.error is not None or config.autocast:
        return False
    change = 32 * torch.finfo(config.dtype).eps
    near = (replace(config, perturbation=x) for x in (change, -change))
    own = (outcome_of(module, adapter, x, False, words) for x in near)
    return any(outcome_mismatch(measured.outcomes[0], x, config) for x in own)


def rounding_error(
    module: nn.Module,
    adapter: Adapter,
    config: ProbeConfig,
    rounded: tuple[Any, ...],
    words: int | None,
) -> float:
    """Return how far an outcome of the module's own class is from that in float64, at most 1e-3.

    It is relative to the largest element of each tensor. The parameters of a trained recurrence may
    amplify rounding errors.
    """
    if adapter.dtype != torch.float64:
        return 0.0
    exact = outcome_of(module, adapter, replace(config, dtype=torch.float64), False, words)
    errors = [0.0]
    for a, b in zip(rounded, exact):
        for name, x in a.items():
            y = b.get(name)
            if isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point():
                numbers = _numbers(y)
                finite = numbers[numbers.isfinite()].abs()
                largest = max(1.0, float(finite.max()) if finite.numel() else 0.0)
                errors.append(_distance(x, y) / largest)
    return min(max(errors), 1e-3)


def words_to_compare(module: nn.Module, adapter: Adapter) -> int | None:
    """Return how many words of a large vocabulary are enough to compare, or None for all.

    They include all word ids in the module's code, and its own code must run with that many: it may
    store the vocabulary size in an attribute. With tens of thousands of words every decoder step
    has a large GEMM, forward and backward, and the comparison takes hundreds of steps.
    """
    tables = [x for x in module.modules() if type(x) is nn.Embedding and x.num_embeddings > WORDS]
    if not tables:
        return None
    most = min(x.num_embeddings for x in tables)
    special = [*integers(type(module)), *(x.padding_idx or 0 for x in tables)]
    words = max(WORDS, *(1 + x for x in special if x < most))
    try:
        outcome_of(module, adapter, next(probe_configs(module, adapter)), False, words)
    except Exception:
        return None
    return words if words < most else None


def outcome_of(
    module: nn.Module, adapter: Adapter, config: ProbeConfig, served: bool, words: int | None = None
) -> tuple[Any, ...]:
    """Run the adapter's example on a copy of the module; return results, state and gradients."""
    with (
        torch.random.fork_rng(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device(config.device),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(config.seed)
        twin = _copy(module, None if config.large else words)
        twin.to(config.device, config.dtype).train(config.training)
        compared = _with_vocabulary(twin, words) if words else []  # with fewer words
        for part, _ in compared:
            part.requires_grad_(False)
        for p in twin.parameters():
            if p.numel() > LARGE and not config.large:
                p.requires_grad_(False)  # each step's gradient is as large as the parameter
            if p.is_floating_point() and config.weight_scale is not None:
                size = config.weight_scale * max(p.shape[-1:], default=1) ** -0.5
                p.data.copy_(torch.randn(p.shape, dtype=torch.float32) * size)
            if config.perturbation and p.is_floating_point():
                same = torch.Generator().manual_seed(1)
                noise = torch.randn(p.shape, generator=same, dtype=torch.float64, device="cpu")
                p.data.mul_((1 + config.perturbation * noise).to(p))
        if served:
            patch(twin, adapter)
        draw = ProbeInputs(
            config.dtype, config.device, seed=config.seed, others=config.others,
            repeats=config.repeats, late=config.late, first=config.large,
            known=integers(type(module)) if config.late else (),
        )  # fmt: skip
        with torch.autocast(config.device.type, torch.bfloat16, enabled=config.autocast):
            return run(twin, adapter.example, draw)


def run(module: nn.Module, example: Any, draw: ProbeInputs) -> tuple[dict[str, Any], ...]:
    """Run an example; return its results, the module's state, and the gradients of all of them.

    The state is recorded after every call, because a call may overwrite an earlier one's state.
    """
    results: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for number, result in enumerate(calls(module, example, draw), 1):
        results |= _flat(f"call {number}", result)
        state |= {f"{name} after call {number}": x for name, x in state_of(module).items()}
    if not any(isinstance(x, Tensor) for x in results.values()):
        raise ValueError("the example yields no tensor")
    every = (*results.values(), *state.values())
    made = [x for x in every if isinstance(x, Tensor) and x.requires_grad]
    parameters = dict(module.named_parameters())
    leaves = {f"input {i}": x for i, x in enumerate(draw.leaves, 1)} | parameters
    leaves = {name: x for name, x in leaves.items() if x.requires_grad}
    weighted = ProbeInputs(torch.float64, draw.device, seed=1)
    loss: Any = sum((x * weighted(*x.shape, grad=False).to(x.dtype)).sum() for x in made)
    grads: Any = [None] * len(leaves)
    if made:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return results, state, dict(zip(leaves, grads))


def calls(module: nn.Module, example: Any, draw: ProbeInputs) -> Iterator[Any]:
    """Yield an example's results, repeated until its targets have used all required words."""
    before = None
    while before is None or before < draw.marked < draw.marks:
        before = draw.marked
        yield from example(module, draw)


def tensors(x: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        yield from tensors(list(x.values()))
    elif isinstance(x, Iterable) and not isinstance(x, str):
        for part in x:
            yield from tensors(part)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return buffers and plain attributes, also those of inner layers, by name."""
    state: dict[str, Any] = {}
    for path, part in module.named_modules():
        ready_made = type(part).__module__.startswith("torch.nn.")  # their attributes are PyTorch's
        attributes = {k: v for k, v in vars(part).items() if not ready_made and k not in INTERNAL}
        for name, x in sorted((attributes | part._buffers).items()):
            state.update(_flat(f"{path}.{name}".lstrip("."), x))
    return state


def _flat(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors, numbers and strings of nested containers by name, and the types of others."""
    if isinstance(x, (Tensor, bool, int, float, complex, str, bytes, type(None))):
        yield name, x
    elif isinstance(x, (list, tuple, deque, dict)):
        yield name, (type(x), len(x))
        for key, part in x.items() if isinstance(x, dict) else enumerate(x):
            yield from _flat(f"{name}[{key!r}]", part)
    else:
        yield name, type(x)


def _copy(module: nn.Module, words: int | None = None) -> nn.Module:
    """Return a copy without hooks, whose tensors have no autograd graph.

    If ``words`` is given, embeddings and linear layers of the vocabulary's size are cut to it.
    """
    every = [list(vars(part).values()) for part in module.modules()]
    memo = {id(x): x.detach().clone() for x in tensors(every) if not x.is_leaf}
    cut = _with_vocabulary(module, words) if words else []
    for part, _ in cut:
        for p in part.parameters():
            memo[id(p)] = nn.Parameter(p.detach()[:words].clone(), p.requires_grad)
    twin = copy.deepcopy(module, memo)
    for part, size in cut:
        setattr(memo[id(part)], size, words)
    for part in twin.modules():
        for name, value in vars(part).items():
            if name.endswith("_hooks") and hasattr(value, "clear"):
                value.clear()
    return twin


def _with_vocabulary(module: nn.Module, words: int) -> list[tuple[nn.Module, str]]:
    """Return the embeddings of more words and the layers that score them, with size attributes."""
    tables = [x for x in module.modules() if type(x) is nn.Embedding and x.num_embeddings > words]
    sizes = {x.num_embeddings for x in tables}
    scores = [x for x in module.modules() if type(x) is nn.Linear and x.out_features in sizes]
    return [(x, "num_embeddings") for x in tables] + [(x, "out_features") for x in scores]


def outcome_mismatch(old: tuple[Any, ...], new: tuple[Any, ...], config: ProbeConfig) -> str | None:
    """Return the first difference of two outcomes, with its configuration and a cure, or None.

    If one result is 0 where the other is not, as under autocast with a sparsemax, rounding decided
    which keys have a gradient: then only the dtypes and shapes of the gradients are compared.
    """
    jumps = config.autocast and any(
        _zeros_differ(x, new[0].get(name)) for name, x in old[0].items()
    )
    for what, a, b in zip(KINDS, old, new):
        # Under autocast some gradients are rounding noise: tolerances are relative to the largest.
        every = [x for x in a.values() if isinstance(x, Tensor) and x.is_floating_point()]
        sizes = [float(_numbers(x).abs().max()) for x in every if config.autocast and x.numel()]
        magnitude = max(sizes, default=0.0)
        for name, x in a.items():
            tolerance = math.inf if jumps and what == "gradients" else config.tolerance
            if name in b and not _close(x, b[name], tolerance, magnitude):
                difference, where = f"by {_far(x, b[name])}", f"in {name}"
                places = (difference, where) if what == "results" else (where, difference)
                found = " ".join([what, "differ", *places])
                return f"{found}, {config.name}{_cure(x, b[name], config)}"
        if a.keys() != b.keys():
            only_one = sorted({x.partition(" after call ")[0] for x in a.keys() ^ b.keys()})
            return f"{what} differ in {', '.join(only_one)}, {config.name}"
    return None


def _cure(a: Any, b: Any, config: ProbeConfig) -> str:
    """Return the helper that may remove the difference of a replacement's b from a, if any."""
    if isinstance(a, Tensor) and b is None:  # a gradient
        return "; keep_in_graph gives a parameter gradient 0 that cannot change a result"
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    if config.autocast and both and a.dtype == torch.promote_types(a.dtype, b.dtype) != b.dtype:
        return "; promote_dtype gives a result the dtype of an elementwise product"
    return ""


def _close(a: Any, b: Any, tolerance: float, magnitude: float = 1.0) -> bool:
    """Return whether two items differ by at most ``tolerance`` times the largest element.

    The largest element counts as at least 1, and as at least ``magnitude``.
    """
    if isinstance(a, float) and isinstance(b, float):
        a, b = torch.tensor(a), torch.tensor(b)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if _form(a) != _form(b):
        return False
    a, b = _numbers(a), _numbers(b)
    if not a.numel():
        return True
    if (a - b).abs().max() <= tolerance * max(1.0, magnitude):  # False for NaN
        return True
    finite = a[a.isfinite()].abs()
    largest = max(1.0, magnitude, float(finite.max()) if finite.numel() else 0.0)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _zeros_differ(a: Any, b: Any) -> bool:
    """Return whether two results have zeros in different places, and not by an underflow."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or _form(a) != _form(b):
        return False
    a, b = _numbers(a), _numbers(b)
    return bool((((a == 0) != (b == 0)) & ((a - b).abs() > 1e-6)).any())


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.layout


def _numbers(x: Tensor) -> Tensor:
    """Return a tensor's elements in float64, dense also where its layout is sparse."""
    return x.detach().to_dense().double()


def _far(a: Any, b: Any) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return f"being {_short(b)} instead of {_short(a)}"
    if _form(a) != _form(b):
        named = zip(("shape", "dtype", "layout"), _form(a), _form(b))
        what = next(name for name, old, new in named if old != new)
        layouts = ["" if x.layout == torch.strided else f" {x.layout}" for x in (b, a)]
        forms = [f"{x.dtype} {list(x.shape)}{y}" for x, y in zip((b, a), layouts)]
        return f"{what}: {forms[0]} instead of {forms[1]}"
    return f"{float((_numbers(a) - _numbers(b)).abs().max()):.2g}"


def _distance(a: Any, b: Any) -> float:
    """Return the largest difference of two items, infinity if they cannot be subtracted."""
    if isinstance(a, float) and isinstance(b, float):
        a, b = torch.tensor(a), torch.tensor(b)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return 0.0 if type(a) is type(b) and a == b else math.inf
    if a.shape != b.shape:
        return math.inf
    a, b = _numbers(a), _numbers(b)
    same = (a == b) | (a.isnan() & b.isnan())  # also infinities
    far = (a - b).abs().nan_to_num(math.inf, math.inf)[~same]
    return float(far.max()) if far.numel() else 0.0


def _short(x: Any) -> str:
    if isinstance(x, tuple):  # a container's type and length: see _flat
        return f"a {x[0].__name__} of {x[1]}"
    return f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.40}"
