"""Cache the projected keys and prepared memory of a replaced module's source.

A project calls its attention at every decoder step with the same source. What depends on the source
alone is kept until one of the tensors that it was made of is another, was changed in place, or the
way of calling changed; a backward through it ends it too, for its graph is gone then. Where source
after source comes once, as in a beam search that indexes it at every step, nothing is kept.

PyTorch counts changes in place as versions, but not those through ``.data``, through NumPy or
through another tensor over the same memory. A tensor that a graph made, in memory of PyTorch's own,
is compared by its version; any other on a CPU is compared with a copy at every call.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnfast._utils.torch_private import has_dispatch_mode, has_saved_tensor_hooks
from attnfast.decoding import Memory

__all__ = ["PLACE", "TensorSnapshot", "cached_per_source"]

PLACE = "_attnfast"  # where a module keeps it; never in a state_dict, a copy or a pickle
PATIENCE = 3  # so many sources in a row that come once, before nothing is kept of the next


class _Kept:
    """A result, and what it was made of; ``missed``: how many before it nobody asked for again."""

    def __init__(
        self, result: Any, of: tuple[Any, ...], source: Any, way: tuple[Any, ...], missed: int,
        made_here: list[Tensor],
    ):  # fmt: skip
        self.result, self.way, self.missed = result, way, missed
        bases = [_base(x) for x in (*of, source) if isinstance(x, Tensor)]
        self.base = _base(result) if isinstance(result, Tensor) else None
        if any(self.base is x for x in bases):
            self.base = None  # a view, whose memory others may write to
        self.of = tuple(
            TensorSnapshot(x, exact=not any(_base(x) is made for made in made_here))
            if isinstance(x, Tensor) else x
            for x in of
        )  # fmt: skip
        self.source = TensorSnapshot(source) if isinstance(source, Tensor) else source

    def holds(self, of: tuple[Any, ...], source: Any, way: tuple[Any, ...]) -> bool:
        return (
            self.way == way
            and len(of) == len(self.of)
            and (source is None if self.source is None else self.source.again(source))
            and all(
                seen.again(x)
                if isinstance(seen, TensorSnapshot)
                else not isinstance(x, Tensor) and x == seen
                for x, seen in zip(of, self.of)
            )
        )


class _Passed:
    """A source that was seen once and not cached; it may still come again."""

    result = base = None

    def __init__(self, of: tuple[Any, ...], source: Any, missed: int):
        self.missed = missed
        self.of = [weakref.ref(_base(x)) for x in (*of, source) if isinstance(x, Tensor)]

    def holds(self, of: tuple[Any, ...], source: Any, way: tuple[Any, ...]) -> bool:
        now = [_base(x) for x in (*of, source) if isinstance(x, Tensor)]
        return len(now) == len(self.of) and all(x is y() for x, y in zip(now, self.of))


class TensorSnapshot:
    """A snapshot of a tensor: the object or its base, its version and its form.

    Some elements of a parameter are kept too, because writes through ``.data`` have no version, and
    with ``exact`` a copy of any other tensor whose version does not count every change.
    """

    def __init__(self, x: Tensor, exact: bool = False):
        self.itself, self.base = weakref.ref(x), weakref.ref(_base(x))
        self.state, self.part = _state(x), _part(x)
        self.some = self.values = self.copy = None
        if x.device.type == "cpu" and type(x) is nn.Parameter:
            self.some = _some(x)
            self.values = self.some.tolist()
        elif x.device.type == "cpu" and exact and not _tells_of_changes(x):
            self.copy = x.detach().clone()

    def again(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or x.is_inference() or _state(x) != self.state:
            return False
        if x is self.itself():
            same = self.some is None or self.some.tolist() == self.values
        else:
            same = self.base() is _base(x) and _part(x) == self.part
        return same and (self.copy is None or _is_equal(x, self.copy))


def _tells_of_changes(x: Tensor) -> bool:
    """Return whether a tensor's version counts every change of its memory.

    It does where a graph made the tensor, and not a user, in PyTorch's own memory, which NumPy has
    no view of; only writes through ``.data`` are not counted.
    """
    base = _base(x)
    return base.grad_fn is not None and not _is_shared(base)


def _is_shared(x: Tensor) -> bool:
    """Return whether NumPy or another process may write to a tensor's memory."""
    return not x.untyped_storage().resizable()


_compare = ctypes.CDLL(None if os.name == "posix" else "msvcrt").memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _is_equal(x: Tensor, copy: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits."""
    if x.stride() == copy.stride():  # dense, as copies are; twice as fast as torch.equal
        return _compare(x.data_ptr(), copy.data_ptr(), x.numel() * x.itemsize) == 0
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return torch.equal(x.detach().view(integers), copy.view(integers))


def _some(x: Tensor) -> Tensor:
    """Return a view of some ten elements from all rows and columns."""
    x = x.detach().squeeze()
    while x.dim() > 1:
        x = x.diagonal()
    return x[:: len(x) // 8 or 1] if x.dim() else x


def _base(x: Tensor) -> Tensor:
    """Return the tensor, or that of which it is a view: a slice is another at every step."""
    return x if x._base is None else x._base


def _state(x: Tensor) -> tuple[Any, ...]:
    """Return what may change of one tensor: version and place, for ``.data`` may be another's."""
    return x._version, x.data_ptr() if x.numel() else 0, x.requires_grad


def _part(x: Tensor) -> tuple[Any, ...]:
    """Return which view it is."""
    return x.device, x.shape, x.stride(), x.dtype


def _way(x: Tensor) -> tuple[Any, ...] | None:
    """Return how results are computed now, or None where nothing may be kept."""
    if torch.compiler.is_compiling() or has_saved_tensor_hooks():
        return None  # under checkpointing each call saves what it needs itself
    if torch.jit.is_tracing() or has_dispatch_mode():
        return None  # what is kept would be a constant of the graph
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return torch.is_grad_enabled(), autocast


def cached_per_source(
    module: nn.Module,
    name: str,
    make: Callable[[], Any],
    *of: Any,
    source: Tensor | None = None,
    once: Callable[[], Any] | None = None,
) -> Any:
    """Return ``make()``, or what it returned last time if it was made ``of`` the same.

    Args:
        module: the project's module, which keeps the result, a tensor or a memory, under
            ``name``.
        make: computes it from nothing that may change but ``of``.
        of: what it is computed from: tensors, compared by identity and version, and on a CPU by
            their values where a version does not tell of every change; other values, compared as
            they are.
        source: a tensor that is not read, or of which the result is a view: another one, or
            another version, ends what is kept.
        once: computes what serves a single call, where nothing is kept.

    Changes of parameters without a version (through ``.data``, by a fused optimiser, in NumPy's
    view of a tensor) are seen in some elements, so not where they leave those as they are, nor on a
    GPU, which would synchronize. Of other tensors on a CPU they are all seen, but for writes
    through ``.data`` to what a graph made. ``train()`` and ``eval()`` end what is kept.
    """
    tensors = [x for x in (*of, source) if isinstance(x, Tensor)]
    way = _way(tensors[0])
    kept = module.__dict__.setdefault(PLACE, {})
    if way is None:
        kept.pop(name, None)
        return make()
    found, missed = kept.get(name), 0
    if found is not None:
        if found.holds(of, source, way):
            found.missed = 0
            if found.result is not None:
                return found.result
        else:
            missed = found.missed + 1
    if any(x.is_inference() or (x.device.type != "cpu" and _is_shared(x)) for x in tensors):
        kept.pop(name, None)  # these do not know that they were changed
        return (once or make)()
    if missed > PATIENCE:
        kept[name] = _Passed(of, source, missed)
        return (once or make)()
    result = make()
    made_here = [x.base for key, x in list(kept.items()) if key != name and x.base is not None]
    entry = kept[name] = _Kept(result, of, source, way, missed, made_here)
    node: Any = result.steps and result.steps.token if isinstance(result, Memory) else result
    if getattr(node, "grad_fn", None) is not None:
        owner, made = weakref.ref(module), weakref.ref(entry)

        def forget(_: Any) -> None:
            kept = getattr(owner(), PLACE, {})
            if kept.get(name) is made():
                kept.pop(name, None)

        node.grad_fn.register_prehook(forget)
    return result
