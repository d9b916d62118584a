"""What an adapter computes once per source and keeps: projected keys, prepared memory.

A host calls its attention at every decoder step with the same source. What depends on the source
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
from torch.nn import functional as F

from attnfast._torch import is_intercepted, saves_elsewhere
from attnfast.memory import Memory, attend_with_history, prepare
from attnfast.memory import attend as attend_to

__all__ = [
    "Seen",
    "attend",
    "batch_first",
    "is_plain",
    "multiplied",
    "project",
    "project_both",
    "project_joined",
    "recall",
    "together",
    "touch",
]

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


def recall(
    module: nn.Module,
    name: str,
    make: Callable[[], Any],
    *of: Any,
    once: Callable[[], Any] | None = None,
) -> Any:
    """Return ``make()``, or what it returned last time if it was made ``of`` the same.

    Args:
        module: the host's module, which keeps the result, a tensor or a memory, under
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


def together(
    module: nn.Module,
    name: str,
    parts: list[Tensor],
    source: Tensor,
    join: Callable[[list[Tensor]], Tensor] = torch.stack,
) -> Tensor:
    """Return the parts of all heads in one tensor, ``join(parts)``, once per source."""
    return recall(module, name, lambda: join(parts), *parts, source)


def project(module: nn.Module, name: str, layer: nn.Module, states: Tensor) -> Tensor:
    """Return ``layer(states)``, once per source where the layer is plain ``nn.Linear``."""
    if type(layer) is not nn.Linear:
        return layer(states)
    return recall(module, name, lambda: layer(states), states, layer.weight, layer.bias)


def is_plain(layer: nn.Module) -> bool:
    """Whether its weight and bias stand for a layer: it need not be called."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
    return type(layer) is nn.Linear and not any((*hooks, layer._backward_pre_hooks))


def halves(module: nn.Module, layer: nn.Module, n: int, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first n columns of a layer's weight and the others, taken once per source.

    A slice's gradient is as large as the whole, so one that every step took would cost them more.
    """
    weight: Any = layer.weight
    sizes = [n, weight.shape[1] - n]
    return recall(module, "halves", lambda: weight.split(sizes, 1), weight, n, source)


def project_both(
    module: nn.Module, layer: nn.Linear, query: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the two terms of ``layer([query; states])``, that of the states once per source."""
    of_query, of_states = halves(module, layer, query.shape[-1], states)
    key = recall(module, "key", lambda: F.linear(states, of_states), states, layer.weight)
    return F.linear(query, of_query, layer.bias), key


def project_joined(
    module: nn.Module, layer: nn.Module, context: Tensor, query: Tensor, source: Tensor
) -> Tensor:
    """Return ``layer([context; query])``; of a plain layer autograd then saves no copy of both."""
    if not is_plain(layer):
        return layer(torch.cat([context, query], -1))
    of_context, of_query = halves(module, layer, context.shape[-1], source)
    bias: Any = layer.bias
    return F.linear(context, of_context) + F.linear(query, of_query, bias)


def batch_first(module: nn.Module, states: Tensor) -> Tensor:
    """Return time-first states with the batch first, the same tensor at every step."""
    return recall(module, "states", lambda: states.transpose(0, 1), states)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "tanh",
    **history: Any,
) -> tuple[Any, Tensor]:
    """Attend to a memory that is prepared once per source; return context and weights.

    Args:
        module: the host's module, which keeps the memory.
        query: ``[B, (H,) A]`` for one decoder step, ``[B, (H,) Tq, A]`` for many.
        key, value: ``[B, (H,) Tk, A]`` and ``[B, (H,) Tk, Dv]``, the same tensors at every step;
            value None where the host wants weights alone.
        weight: of the additive score, ``[A]``, ``[1, A]`` or with heads ``[H, A]``; None for the
            dot score.
        lengths: ``[B]``, the same tensor at every step.
        mask: boolean ``[B, Tk]``, or of the shape of the weights, True where a key may be attended
            to.
        scale: multiplies the score.
        activation: of the additive score, as in :func:`attnfast.additive_attention`.
        history: what :func:`attnfast.coverage_attention` takes besides, if the score knows it.
    """
    step = query.dim() < key.dim()
    query = query.unsqueeze(-2) if step else query
    flat = weight is not None and key.dim() == 3
    if mask is not None and mask.dim() < key.dim():
        mask = mask.view(mask.shape[0], *(1,) * (key.dim() - 2), mask.shape[-1])
    relu = activation == "relu"

    def made(how: Callable[..., Any], **more: Any) -> Any:
        values, ends = key[..., :1] if value is None else value, lengths
        ends = None if ends is None else ends.long()
        w = weight if weight is None or not flat else weight.view(-1)
        return how(key, values, weight=w, lengths=ends, **more)

    memory = recall(
        module, "memory", lambda: made(prepare, activation=activation),
        key, value, weight, lengths, activation, once=lambda: made(Memory, relu=relu),
    )  # fmt: skip
    rows = None
    B, sources = query.shape[0], key.shape[0]
    if B != sources == 1 and not history:  # hosts broadcast
        rows = B, query.shape[-2]
        query = _as_row(query)
        if mask is not None:
            mask = _as_row(mask.expand(rows[0], *mask.shape[1:-2], rows[1], -1))
    elif B == 1 != sources:
        query = query.expand(sources, *query.shape[1:])
    memory = memory if mask is None else memory._replace(mask=mask)
    how: Any = attend_with_history if history else attend_to
    context, weights, *_ = how(query, memory, scale=scale, need_weights=True, **history)
    if rows is not None:
        context, weights = (
            x.squeeze(0).unflatten(-2, rows).movedim(-3, 0) for x in (context, weights)
        )
    if step:
        context, weights = context.squeeze(-2), weights.squeeze(-2)
    if weights.is_cuda and weights.dtype.itemsize == 2 and torch.is_autocast_enabled("cuda"):
        weights = weights.float()  # as a softmax has it there
    return None if value is None else context, weights


def _as_row(x: Tensor) -> Tensor:
    """Return the rows of many sequences, ``[B, (H,) Tq, ·]``, as those of one."""
    return x.movedim(0, -3).flatten(-3, -2).unsqueeze(0)


def multiplied(x: Tensor, *terms: Tensor) -> Tensor:
    """Return x with the type of a product of all, where a host multiplies and sums, element wise.

    Under autocast a matrix product and the operators here have its type, and such a sum has not.
    """
    dtype = x.dtype
    for term in terms:
        if term.dtype != dtype:
            dtype = torch.promote_types(dtype, term.dtype)
    return x if dtype == x.dtype else x.to(dtype)


def touch(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """Return x; parameters that cannot change it, as a bias before a softmax, have gradient 0."""
    for p in parameters:
        if p is not None and p.requires_grad and torch.is_grad_enabled():
            x = x + p.flatten()[:0].sum()
    return x
