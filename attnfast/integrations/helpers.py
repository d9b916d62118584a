"""Helpers for adapters: projections cached per source, prepared memories, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from attnfast.decoding import Memory, attend, attend_with_history, prepare
from attnfast.decoding.memory import HistoryTerms
from attnfast.integrations.adapter import UnsupportedCall
from attnfast.integrations.cache import cached_per_source
from attnfast.nn import _linear

__all__ = [
    "attend_to_map",
    "attend_to_source",
    "batch_first",
    "is_plain",
    "keep_in_graph",
    "project",
    "project_both",
    "project_joined",
    "promote_dtype",
    "together",
]

Value = TypeVar("Value", Tensor, None)


def together(
    module: nn.Module,
    name: str,
    parts: list[Tensor],
    source: Tensor,
    join: Callable[[list[Tensor]], Tensor] = torch.stack,
) -> Tensor:
    """Return the parts of all heads in one tensor, ``join(parts)``, cached per source."""
    return cached_per_source(module, name, lambda: join(parts), *parts, source=source)


def project(module: nn.Module, name: str, layer: nn.Module, states: Tensor) -> Tensor:
    """Return ``layer(states)``, cached per source if the layer is a plain ``nn.Linear``.

    Example:
        >>> from attnfast.integrations import project
        >>> module, states = torch.nn.Module(), torch.randn(2, 5, 8)
        >>> module.U = torch.nn.Linear(8, 4)
        >>> key = project(module, "key", module.U, states)
        >>> key.shape, project(module, "key", module.U, states) is key
        (torch.Size([2, 5, 4]), True)
    """
    if type(layer) is not nn.Linear:
        return layer(states)
    return cached_per_source(
        module, name, lambda: _linear.project(layer, states), states, layer.weight, layer.bias
    )


def is_plain(layer: nn.Module, *kinds: type) -> bool:
    """Return whether using a layer's parameters is equivalent to calling it (linear by default)."""
    return _linear.is_plain(layer, *(kinds or [nn.Linear]))


def split_weight(
    module: nn.Module, layer: nn.Module, n: int, source: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the first n columns of a layer's weight and the others, cached per source.

    The gradient of a slice is as large as the whole weight, so slicing at every step costs more.
    """
    weight: Any = layer.weight
    sizes = [n, weight.shape[1] - n]
    return cached_per_source(
        module, "halves", lambda: weight.split(sizes, 1), weight, n, source=source
    )


def project_both(
    module: nn.Module,
    layer: nn.Linear,
    query: Tensor,
    states: Tensor,
    *,
    states_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the two terms of ``layer([query; states])``; that of the states is cached.

    With ``states_first`` the layer takes ``[states; query]``; the terms are returned as otherwise.

    Example:
        >>> module, layer = torch.nn.Module(), torch.nn.Linear(6 + 8, 4)
        >>> query, states = torch.randn(2, 1, 6), torch.randn(2, 5, 8)
        >>> query_term, key = attnfast.integrations.project_both(module, layer, query, states)
        >>> joined = layer(torch.cat([query.expand(2, 5, 6), states], -1))
        >>> torch.allclose(query_term + key, joined, atol=1e-6)
        True
    """
    first = states if states_first else query
    query_weight, states_weight = split_weight(module, layer, first.shape[-1], states)
    if states_first:
        query_weight, states_weight = states_weight, query_weight
    key = cached_per_source(
        module, "key", lambda: F.linear(states, states_weight), states, layer.weight
    )
    return F.linear(query, query_weight, layer.bias), key


def project_joined(
    module: nn.Module, layer: nn.Module, context: Tensor, query: Tensor, source: Tensor
) -> Tensor:
    """Return ``layer([context; query])``; for a plain layer autograd saves no concatenated copy.

    Example:
        >>> module, layer = torch.nn.Module(), torch.nn.Linear(8 + 6, 4)
        >>> context, query, source = torch.randn(2, 8), torch.randn(2, 6), torch.randn(2, 5, 8)
        >>> attnfast.integrations.project_joined(module, layer, context, query, source).shape
        torch.Size([2, 4])
    """
    if not is_plain(layer):
        return layer(torch.cat([context, query], -1))
    context_weight, query_weight = split_weight(module, layer, context.shape[-1], source)
    bias: Any = layer.bias
    return F.linear(context, context_weight) + F.linear(query, query_weight, bias)


def batch_first(module: nn.Module, states: Tensor) -> Tensor:
    """Return time-first states with the batch first, the same tensor at every step.

    Example:
        >>> from attnfast.integrations import batch_first
        >>> module, states = torch.nn.Module(), torch.randn(5, 2, 8)
        >>> first = batch_first(module, states)
        >>> first.shape, batch_first(module, states) is first
        (torch.Size([2, 5, 8]), True)
    """
    return cached_per_source(module, "states", lambda: states.transpose(0, 1), source=states)


def attend_to_source(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Value,
    score_vector: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "tanh",
    normalisation: str = "softmax",
    **history: Unpack[HistoryTerms],
) -> tuple[Value, Tensor]:
    """Attend to a memory that is prepared once per source; return context and weights.

    Args:
        module: the project's module, which keeps the memory.
        query: ``[B, (H,) A]`` for one decoder step, ``[B, (H,) Tq, A]`` for many.
        key, value: ``[B, (H,) Tk, A]`` and ``[B, (H,) Tk, Dv]``, the same tensors at every step;
            value is None if the project needs the weights only.
        score_vector: of the additive score, ``[A]``, ``[1, A]`` or with heads ``[H, A]``; None for
            the dot score.
        lengths: ``[B]``, the same tensor at every step.
        mask: boolean ``[B, Tk]``, or of the shape of the weights, True where a key may be attended
            to.
        scale: multiplies the score.
        activation, normalisation: as in :func:`attnfast.additive_attention`; with a history, or
            ``"sigmoid"``, as in :func:`attnfast.coverage_attention`.
        history: further arguments of :func:`attnfast.coverage_attention`, if the score uses them.

    Raises:
        UnsupportedCall: queries and keys differ in batch size, or a mask has another shape. The
            module's own code then broadcasts these or raises, as the project does.

    Example:
        >>> module, query, key = torch.nn.Module(), torch.randn(2, 8), torch.randn(2, 5, 8)
        >>> context, weights = attnfast.integrations.attend_to_source(
        ...     module, query, key, key, torch.randn(8)
        ... )
        >>> context.shape, weights.shape
        (torch.Size([2, 8]), torch.Size([2, 5]))
    """
    step = query.dim() < key.dim()
    query = query.unsqueeze(-2) if step else query
    flat = score_vector is not None and key.dim() == 3
    if mask is not None and mask.dim() == 2:
        mask = mask.view(mask.shape[0], *(1,) * (key.dim() - 2), mask.shape[-1])
    shape = *query.shape[:-1], key.shape[-2]  # of the weights
    if query.shape[:-2] != key.shape[:-2] or not (mask is None or _fits(mask, shape)):
        raise UnsupportedCall("its own code computes queries, keys and masks of these shapes")
    score = "dot" if score_vector is None else activation

    def make_memory(make: Callable[..., Any], **options: Any) -> Any:
        values = key[..., :1] if value is None else value
        ends = None if lengths is None else lengths.long()
        w = score_vector if score_vector is None or not flat else score_vector.view(-1)
        return make(key, values, score_vector=w, lengths=ends, **options)

    memory = cached_per_source(
        module, "memory", lambda: make_memory(prepare, activation=activation),
        key, score_vector, lengths, activation, source=value,
        once=lambda: make_memory(Memory, score=score),
    )  # fmt: skip
    memory = memory if mask is None else memory._replace(mask=mask)
    function: Any = attend_with_history if history or normalisation == "sigmoid" else attend
    options = {"scale": scale, "normalisation": normalisation, "need_weights": True}
    context, weights, *_ = function(query, memory, **options, **history)
    if step:
        context, weights = context.squeeze(-2), weights.squeeze(-2)
    if weights.is_cuda and weights.dtype.itemsize == 2 and torch.is_autocast_enabled("cuda"):
        weights = weights.float()  # the dtype of a softmax under autocast
    return None if value is None else context, weights


def attend_to_map(
    module: nn.Module,
    query: Tensor,
    features: Tensor,
    conv: nn.Conv2d,
    score_vector: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the context of a feature map ``[B, C, H, W]``, whose keys are ``conv(features)``.

    The other arguments are those of :func:`attend_to_source`, with H · W keys, row by row. The keys
    are cached per source if the convolution is a plain ``nn.Conv2d``.
    """
    if type(conv) is nn.Conv2d:
        key = cached_per_source(
            module, "key", lambda: _rows(conv(features)), features, conv.weight, conv.bias
        )
    else:
        key = _rows(conv(features))
    value = cached_per_source(module, "value", lambda: _rows(features), key, source=features)
    context, weights = attend_to_source(module, query, key, value, score_vector, mask=mask)
    return promote_dtype(context, weights, features)


def _rows(features: Tensor) -> Tensor:
    """Return a feature map ``[B, C, H, W]`` as ``[B, H · W, C]``."""
    return features.flatten(2).transpose(1, 2).contiguous()


def _fits(mask: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a mask has this shape, or 1 for some sizes."""
    return mask.dim() == len(shape) and all(m in (n, 1) for m, n in zip(mask.shape, shape))


def promote_dtype(x: Tensor, *terms: Tensor) -> Tensor:
    """Return x in the dtype of an elementwise product and sum, as the project computes it.

    Under autocast a matrix product and the operators here return the autocast dtype; an elementwise
    product does not.

    Example:
        >>> context, gate = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(2, 8)
        >>> attnfast.integrations.promote_dtype(context, gate).dtype
        torch.float32
    """
    dtype = x.dtype
    for term in terms:
        if term.dtype != dtype:
            dtype = torch.promote_types(dtype, term.dtype)
    return x if dtype == x.dtype else x.to(dtype)


def keep_in_graph(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """Return x; parameters that cannot affect it (a bias before a softmax) get gradient 0.

    Example:
        >>> weights, bias = torch.rand(2, 5), torch.zeros(1, requires_grad=True)
        >>> attnfast.integrations.keep_in_graph(weights, bias).sum().backward()
        >>> bias.grad
        tensor([0.])
    """
    for p in parameters:
        if p is not None and p.requires_grad and torch.is_grad_enabled():
            x = x + p.flatten()[:0].sum()
    return x
