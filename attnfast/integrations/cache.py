"""Cache the projected keys and prepared memory of a replaced module's source.

A project calls its attention at every decoder step with the same source. Results that depend only
on the source are cached until one of their inputs is a different tensor or was modified in place,
or the grad mode or autocast changes; a backward through a result also drops it, because its graph
is freed then. If each source is used only once, as in a beam search that indexes the source at
every step, nothing is cached.

Version counters record in-place changes, but not those through ``.data``, through NumPy or through
another tensor over the same memory. A tensor that autograd created, in memory that PyTorch owns, is
compared by its version; any other tensor on the CPU is compared with a copy at every call. So are
inference tensors, which have no version; on a GPU nothing is cached for them.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attnfast._utils.torch_private import has_dispatch_mode, has_saved_tensor_hooks
from attnfast.decoding import Memory

__all__ = ["PLACE", "TensorSnapshot", "cached_per_source"]

T = TypeVar("T")

PLACE = "_attnfast"  # a module's cache attribute; never in a state_dict, a copy or a pickle
PATIENCE = 3  # consecutive sources used only once, before caching stops


class _CachedResult:
    """A cached result and its inputs; ``missed``: the number of results not reused before it."""

    def __init__(
        self, result: Any, of: tuple[Any, ...], source: Any, modes: tuple[Any, ...], missed: int,
        made_here: list[Tensor],
    ):  # fmt: skip
        self.result, self.modes, self.missed = result, modes, missed
        bases = [_base(x) for x in (*of, source) if isinstance(x, Tensor)]
        self.base = _base(result) if isinstance(result, Tensor) else None
        if any(self.base is x for x in bases):
            self.base = None  # a view of memory that others may write to
        self.of = tuple(
            TensorSnapshot(x, exact=not any(_base(x) is made for made in made_here))
            if isinstance(x, Tensor) else x
            for x in of
        )  # fmt: skip
        self.source = TensorSnapshot(source) if isinstance(source, Tensor) else source

    def matches(self, of: tuple[Any, ...], source: Any, modes: tuple[Any, ...]) -> bool:
        return (
            self.modes == modes
            and len(of) == len(self.of)
            and (source is None if self.source is None else self.source.is_unchanged(source))
            and all(
                seen.is_unchanged(x)
                if isinstance(seen, TensorSnapshot)
                else not isinstance(x, Tensor) and x == seen
                for x, seen in zip(of, self.of)
            )
        )


class _UsedOnce:
    """A source that was used once and not cached; it may still be used again."""

    result = base = None

    def __init__(self, of: tuple[Any, ...], source: Any, missed: int):
        self.missed = missed
        self.of = [weakref.ref(_base(x)) for x in (*of, source) if isinstance(x, Tensor)]

    def matches(self, of: tuple[Any, ...], source: Any, modes: tuple[Any, ...]) -> bool:
        now = [_base(x) for x in (*of, source) if isinstance(x, Tensor)]
        return len(now) == len(self.of) and all(x is y() for x, y in zip(now, self.of))


class TensorSnapshot:
    """A snapshot of a tensor: the object or its base, its version and its layout.

    Some elements of a parameter are stored too, because writes through ``.data`` do not change its
    version, and a copy of inference tensors, which have no version, and with ``exact`` of any other
    tensor whose version misses some changes.
    """

    def __init__(self, x: Tensor, exact: bool = False):
        self.itself, self.base = weakref.ref(x), weakref.ref(_base(x))
        self.state, self.part = _state(x), _part(x)
        self.some = self.values = self.copy = None
        if x.device.type == "cpu" and type(x) is nn.Parameter:
            self.some = _some(x)
            self.values = self.some.tolist()
        elif x.device.type == "cpu" and (x.is_inference() or (exact and not _tells_of_changes(x))):
            self.copy = x.detach().clone()

    def is_unchanged(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or _state(x) != self.state:
            return False
        if x is self.itself():
            same = self.some is None or self.some.tolist() == self.values
        else:
            same = self.base() is _base(x) and _part(x) == self.part
        return same and (self.copy is None or _is_equal(x, self.copy))


def _tells_of_changes(x: Tensor) -> bool:
    """Return whether a tensor's version counts every change of its memory.

    It does if the tensor is the output of an autograd graph, in memory that PyTorch owns and NumPy
    does not share; only writes through ``.data`` are not counted.
    """
    base = _base(x)
    return base.grad_fn is not None and not _is_shared(base)


def _is_shared(x: Tensor) -> bool:
    """Return whether NumPy or another process may write to a tensor's memory."""
    return not x.untyped_storage().resizable()


def _may_change_undetected(x: Tensor) -> bool:
    """Return whether neither a version nor a copy tells of the changes of a tensor."""
    if x.device.type == "cpu":
        return x.is_inference() and type(x) is nn.Parameter  # of which only some values are stored
    return x.is_inference() or _is_shared(x)


_compare = ctypes.CDLL(None if os.name == "posix" else "msvcrt").memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _is_equal(x: Tensor, copy: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits."""
    if x.stride() == copy.stride():  # dense, as copies are; twice as fast as torch.equal
        return _compare(x.data_ptr(), copy.data_ptr(), x.numel() * x.itemsize) == 0
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return torch.equal(x.detach().view(integers), copy.view(integers))


def _some(x: Tensor) -> Tensor:
    """Return a view of about ten elements, from the diagonal."""
    x = x.detach().squeeze()
    while x.dim() > 1:
        x = x.diagonal()
    return x[:: len(x) // 8 or 1] if x.dim() else x


def _base(x: Tensor) -> Tensor:
    """Return the base of a view, or the tensor: a slice is a new object at every step."""
    return x if x._base is None else x._base


def _state(x: Tensor) -> tuple[Any, ...]:
    """Return a tensor's version, address and requires_grad; ``.data`` may change the address."""
    version = None if x.is_inference() else x._version
    return version, x.data_ptr() if x.numel() else 0, x.requires_grad


def _part(x: Tensor) -> tuple[Any, ...]:
    """Return the attributes that identify a view of its base."""
    return x.device, x.shape, x.stride(), x.dtype


def _modes(x: Tensor) -> tuple[Any, ...] | None:
    """Return the grad mode and autocast dtype, or None if nothing may be cached."""
    if torch.compiler.is_compiling() or has_saved_tensor_hooks():
        return None  # with checkpointing each call saves its own tensors
    if torch.jit.is_tracing() or has_dispatch_mode():
        return None  # a cached result would be a constant of the graph
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return torch.is_grad_enabled(), autocast


def cached_per_source(
    module: nn.Module,
    name: str,
    make: Callable[[], T],
    *of: object,
    source: Tensor | None = None,
    once: Callable[[], T] | None = None,
) -> T:
    """Return ``make()``, or its cached result if the inputs ``of`` are unchanged.

    Args:
        module: the project's module, which caches the result, a tensor or a memory, as ``name``.
        make: computes the result; ``of`` are its only inputs that may change.
        of: the inputs: tensors, compared by identity and version, and on a CPU by their values if a
            version does not count every change; other values, compared by equality.
        source: a tensor that is not read, or of which the result is a view; another tensor or
            version drops the cached result.
        once: computes the result for a single call, used instead of ``make`` if nothing is cached.

    Changes of parameters that no version counts (through ``.data``, by a fused optimiser, in
    NumPy's view of a tensor) are detected by sampling some elements, on a CPU only, because it
    would synchronize on a GPU; a change that leaves these elements as they were is missed. For
    other tensors on a CPU every change is detected, except writes through ``.data`` to the output
    of a graph. ``train()`` and ``eval()`` clear the cache.

    Example:
        >>> from attnfast.integrations import cached_per_source
        >>> module, states = torch.nn.Module(), torch.randn(2, 5, 8)
        >>> largest = [cached_per_source(module, "max", states.amax, states) for step in range(2)]
        >>> largest[0] is largest[1]  # computed once
        True
    """
    tensors = [x for x in (*of, source) if isinstance(x, Tensor)]
    modes = _modes(tensors[0])
    cached = module.__dict__.setdefault(PLACE, {})
    if modes is None:
        cached.pop(name, None)
        return make()
    found, missed = cached.get(name), 0
    if found is not None:
        if found.matches(of, source, modes):
            found.missed = 0
            if found.result is not None:
                return found.result
        else:
            missed = found.missed + 1
    if any(_may_change_undetected(x) for x in tensors):
        cached.pop(name, None)
        return (once or make)()
    if missed > PATIENCE:
        cached[name] = _UsedOnce(of, source, missed)
        return (once or make)()
    result = make()
    made_here = [x.base for key, x in list(cached.items()) if key != name and x.base is not None]
    entry = cached[name] = _CachedResult(result, of, source, modes, missed, made_here)
    node: Any = (
        result.shared_keys and result.shared_keys.token if isinstance(result, Memory) else result
    )
    if getattr(node, "grad_fn", None) is not None:
        owner, made = weakref.ref(module), weakref.ref(entry)

        def forget(_: Any) -> None:
            cached = getattr(owner(), PLACE, {})
            if cached.get(name) is made():
                cached.pop(name, None)

        node.grad_fn.register_prehook(forget)
    return result
