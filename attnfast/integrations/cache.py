"""What a served module keeps of a source: projected keys, prepared memory.

A project calls its attention at every decoder step with the same source. What depends on the source
alone is kept until one of the tensors that it was made of is another, was changed in place, or the
way of calling changed; a backward through it ends it too, for its graph is gone then. Where source
after source comes once, as in a beam search that indexes it at every step, nothing is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnfast._torch import is_intercepted, saves_elsewhere
from attnfast.decoding import Memory

__all__ = ["PLACE", "Seen", "cached_per_source"]

PLACE = "_attnfast"  # where a module keeps it; never in a state_dict, a copy or a pickle
PATIENCE = 3  # so many sources in a row that come once, before nothing is kept of the next


class _Kept:
    """A result, and what it was made of; ``missed``: how many before it nobody asked for again."""

    def __init__(self, result: Any, of: tuple[Any, ...], way: tuple[Any, ...], missed: int):
        self.result, self.way, self.missed = result, way, missed
        self.of = tuple(Seen(x) if isinstance(x, Tensor) else x for x in of)

    def holds(self, of: tuple[Any, ...], way: tuple[Any, ...]) -> bool:
        return (
            self.way == way
            and len(of) == len(self.of)
            and all(
                seen.again(x) if isinstance(seen, Seen) else not isinstance(x, Tensor) and x == seen
                for x, seen in zip(of, self.of)
            )
        )


class _Passed:
    """What nothing was kept of; it may still come again."""

    result = None

    def __init__(self, of: tuple[Any, ...], missed: int):
        self.missed = missed
        self.of = [weakref.ref(_base(x)) for x in of if isinstance(x, Tensor)]

    def holds(self, of: tuple[Any, ...], way: tuple[Any, ...]) -> bool:
        now = [_base(x) for x in of if isinstance(x, Tensor)]
        return len(now) == len(self.of) and all(x is y() for x, y in zip(now, self.of))


class Seen:
    """A tensor as it was: the object, or that of which it is a view, and what is told of it.

    Of a parameter also some of its values, for what is written through ``.data`` has no version.
    """

    def __init__(self, x: Tensor):
        self.itself, self.base = weakref.ref(x), weakref.ref(_base(x))
        self.state, self.part = _state(x), _part(x)
        self.some = _some(x) if type(x) is nn.Parameter and x.device.type == "cpu" else None
        self.values = None if self.some is None else self.some.tolist()

    def again(self, x: Any) -> bool:
        if not isinstance(x, Tensor):
            return False
        if x is self.itself():
            same = self.some is None or self.some.tolist() == self.values
            return same and _state(x) == self.state
        if x.is_inference() or self.base() is not _base(x):
            return False
        return _state(x) == self.state and _part(x) == self.part


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
    if torch.compiler.is_compiling() or saves_elsewhere():
        return None  # under checkpointing each call saves what it needs itself
    if torch.jit.is_tracing() or is_intercepted():
        return None  # what is kept would be a constant of the graph
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return torch.is_grad_enabled(), autocast


def cached_per_source(
    module: nn.Module,
    name: str,
    make: Callable[[], Any],
    *of: Any,
    once: Callable[[], Any] | None = None,
) -> Any:
    """Return ``make()``, or what it returned last time if it was made ``of`` the same.

    Args:
        module: the project's module, which keeps the result, a tensor or a memory, under
            ``name``.
        make: computes it from nothing that may change but ``of``.
        of: tensors, compared by identity and version, and other values, compared as they are.
        once: computes what serves a single call, where nothing is kept.

    Changes without a version (through ``.data``, by a fused optimiser, in NumPy's view of a tensor)
    are seen in some elements of a CPU's parameters, so not where they leave those as they are, nor
    in other tensors, nor on a GPU, which would have to wait; ``train()`` and ``eval()`` end what is
    kept, and so does another source where it is among what it is made ``of``.
    """
    way = _way(next(x for x in of if isinstance(x, Tensor)))
    kept = module.__dict__.setdefault(PLACE, {})
    if way is None:
        kept.pop(name, None)
        return make()
    found, missed = kept.get(name), 0
    if found is not None:
        if found.holds(of, way):
            found.missed = 0
            if found.result is not None:
                return found.result
        else:
            missed = found.missed + 1
    if any(isinstance(x, Tensor) and x.is_inference() for x in of):
        kept.pop(name, None)  # these do not know that they were changed
        return (once or make)()
    if missed > PATIENCE:
        kept[name] = _Passed(of, missed)
        return (once or make)()
    result = make()
    entry = kept[name] = _Kept(result, of, way, missed)
    node: Any = result.steps and result.steps.token if isinstance(result, Memory) else result
    if getattr(node, "grad_fn", None) is not None:
        owner, made = weakref.ref(module), weakref.ref(entry)

        def forget(_: Any) -> None:
            kept = getattr(owner(), PLACE, {})
            if kept.get(name) is made():
                kept.pop(name, None)

        node.grad_fn.register_prehook(forget)
    return result
