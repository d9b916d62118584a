r"""Spans for the operators: two integers a row, phases, and columns of weights.

A row sees the keys from ``start`` up to ``stop``. Strides are views: keys j ≡ 0 (mod k) are
every k-th key, and if rows see keys j ≡ p_i (mod k), queries and keys are split into k phases, each
with its own keys, side by side on the head axis (:func:`to_phases`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnfast._utils.checks import check_tensor, describe, is_finite, raise_value_error
from attnfast.spans import (
    Position,
    Span,
    Spans,
    ceil_div,
    check_position,
    positions,
)


def rows_at(position: Position, query: Tensor, Tk: int, lengths: Tensor | None) -> Tensor:
    """Return the positions of a query's rows, with one axis for each axis of its rows."""
    p = positions(position, query.shape[-2], Tk, lengths, query.device)
    if p.dim() == 2 and query.dim() == 4:
        p = p.unsqueeze(1)
    return p.reshape(*[1] * (query.dim() - 1 - p.dim()), *p.shape)


def check_span(
    query: Tensor, key: Tensor, span: Spans, position: Position, sigma: object, need_weights: object
) -> None:
    """Raise in one sentence unless the span fits a query that fits its keys."""
    *lead, Tq, _ = query.shape
    heads = lead[1] if len(lead) == 2 else 0
    spans = [] if span is None else [span] if isinstance(span, Span) else span
    if not isinstance(spans, (list, tuple)) or not all(isinstance(x, Span) for x in spans):
        raise_value_error("span", "a Span or a list of one for each head", describe(span))
    if not isinstance(span, (Span, type(None))) and (len(spans) != heads or heads == 0):
        expected = f"{heads} Spans, one for each head" if heads else "one Span, without heads"
        raise_value_error("span", expected, f"a list of {len(spans)}")
    for name, x in (("position", position), ("sigma", sigma)):
        if not isinstance(x, Tensor):
            continue
        check_tensor(name, x)
        shape = list(x.shape)
        if shape[-1:] != [Tq] or not any(
            len(shape) == len(want) and all(a in (1, b) for a, b in zip(shape, want))
            for want in ([Tq], [lead[0], Tq], [*lead, Tq])
        ):
            raise_value_error(
                name,
                f"[{Tq}], {[lead[0], Tq]}"
                + f" or {[*lead, Tq]}" * bool(heads)
                + " to fit the query",
                shape,
            )
        if x.device != query.device:
            raise_value_error(name, f"on the query's device {query.device}", x.device)
        if x.dtype not in (torch.int64, torch.int32) and not x.is_floating_point():
            raise_value_error(name, "int64, int32 or floating-point", x.dtype)
    check_position(position, spans)
    number = is_finite(sigma) and sigma > 0  # type: ignore[operator]
    if not (number or sigma is None or isinstance(sigma, Tensor)):
        raise_value_error("sigma", "a positive number or a tensor of them", describe(sigma))
    check_form(need_weights)


def check_form(need_weights: object) -> None:
    """Raise unless ``need_weights`` is a form of the weights."""
    if need_weights is True or need_weights is False:
        return
    if isinstance(need_weights, str):
        fits = need_weights in ("dense", "sparse")
    else:
        fits = isinstance(need_weights, int) and need_weights in (0, 1)
    if not fits:
        raise_value_error(
            "need_weights", "True, False, 'dense' or 'sparse'", describe(need_weights)
        )


def at_keys(x: Tensor, keys: Tensor) -> Tensor:
    """Return ``x [B, (H,) Tq, Tk]``, whose sizes may be 1, at ``keys [.., Tq, W]``."""
    shape = (*torch.broadcast_shapes(x.shape[:-1], keys.shape[:-1]), keys.shape[-1])
    if x.shape[-1] == 0:  # no keys, and columns that no row sees
        return x.new_zeros(shape)
    if x.shape[-1] == 1:
        return x.expand(shape)
    where = [
        torch.arange(n, device=x.device).view(-1, *[1] * (x.dim() - 1 - axis))
        for axis, n in enumerate(x.shape[:-1])
    ]
    return x[(*where, keys.clamp_min(0))].expand(shape)


def some(n: int) -> bool:
    """Return whether n may be nonzero, so that one graph is compiled for all remainders."""
    return torch.compiler.is_compiling() or n != 0


def bounds_in_phases(
    span: Span, Tq: int, first: int, Tk: int, lengths: Tensor | None, heads: int, like: Tensor
) -> Tensor | None:
    """Return the bounds of visible keys in each phase, for queries and keys of :func:`to_phases`.

    ``[B, H·k, T / k, 2]``, where B and H·k may be 1; None if all rows see all keys.
    """
    k, (left, right) = span.phases, span.sides
    pad_rows, device = first % k, like.device
    padded, uneven = some(pad_rows) or some(Tq % k), some(Tk % k)
    if left is right is None and lengths is None and not padded and not uneven:
        return None
    place = torch.arange(ceil_div(pad_rows + Tq, k), device=device)  # of a row in its phase
    phase = torch.arange(k, device=device).unsqueeze(-1)
    row = place * k + (phase - pad_rows)
    place = place + first // k
    start = torch.zeros_like(place) if left is None else place - left // k
    stop = torch.full_like(place, ceil_div(Tk, k)) if right is None else place + (right // k + 1)
    if lengths is not None or uneven:
        ends = Tk if lengths is None else lengths.clamp(0, Tk).view(-1, 1, 1)
        stop = torch.minimum(stop, ceil_div(ends - phase, k))
    if padded:  # rows that do not exist see nothing
        stop = stop.masked_fill((row < 0) | (row >= Tq), 0)
    bounds = torch.stack(torch.broadcast_tensors(start, stop), -1)
    bounds = bounds.view(*[1] * (4 - bounds.dim()), *bounds.shape)
    return bounds if bounds.shape[1] == 1 else bounds.repeat(1, heads, 1, 1)


def to_phases(x: Tensor, k: int, pad_rows: int) -> Tensor:
    """Lay ``[B, (H,) T, C]`` out as ``[B, H·k, T / k, C]``, zeros in front and at the end."""
    rows = ceil_div(pad_rows + x.shape[-2], k)
    end = rows * k - pad_rows - x.shape[-2]
    if some(pad_rows) or some(end):
        x = torch.nn.functional.pad(x, (0, 0, pad_rows, end))
    x = x.view(*x.shape[:-2], rows, k, x.shape[-1]).transpose(-3, -2)
    return x if x.dim() == 4 else x.flatten(1, 2)


def from_phases(x: Tensor, k: int, pad_rows: int, like: Tensor) -> Tensor:
    """Lay ``[B, H·k, T / k, C]`` out in the order of rows ``like [B, (H,) T, ·]``."""
    x = x if like.dim() == 3 else x.view(x.shape[0], x.shape[1] // k, k, *x.shape[2:])
    x = x.transpose(-3, -2).flatten(-3, -2)
    T = like.shape[-2]
    if torch.compiler.is_compiling():  # avoid one graph for each memory layout of a part
        return x.narrow_copy(-2, pad_rows, T)
    return x if x.shape[-2] == T else x[..., pad_rows : pad_rows + T, :]


def to_dense(weights: Tensor, keys: Tensor, Tk: int) -> Tensor:
    """Spread columns over all Tk keys; columns without a key are dropped."""
    shape = torch.broadcast_shapes(weights.shape, keys.shape)
    keys, inside = keys.expand(shape), ((keys >= 0) & (keys < Tk)).expand(shape)
    weights = weights.expand(shape)
    if weights.dtype == torch.bool:
        return to_dense(weights.byte(), keys, Tk).bool()
    dense = weights.new_zeros((*shape[:-1], Tk))
    if Tk == 0:
        return dense
    return dense.scatter_add(-1, keys.clamp(0, Tk - 1), weights.masked_fill(~inside, 0))


def to_columns(x: Tensor, keys: Tensor) -> Tensor:
    """Return the elements of ``x [.., Tk]`` at ``keys [.., W]``, 0 if there is no such key."""
    inside = (keys >= 0) & (keys < x.shape[-1])
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], keys.shape[-1]))
    index = keys.clamp(0, x.shape[-1] - 1).expand(*x.shape[:-1], -1)
    return x.gather(-1, index).masked_fill(~inside, 0)


def to_sparse(weights: Tensor, keys: Tensor, Tk: int) -> Tensor:
    """Return a ``torch.sparse_coo`` tensor over the visible keys."""
    keys = keys.expand_as(weights)
    *rows, column = (keys >= 0).nonzero(as_tuple=True)
    index = torch.stack([*rows, keys[(*rows, column)]])
    shape = (*weights.shape[:-1], Tk)
    return torch.sparse_coo_tensor(
        index, weights[(*rows, column)], shape, is_coalesced=True, check_invariants=False
    )


def to_form(form: str, weights: Tensor, keys: Tensor, Tk: int) -> Tensor:
    """Return the weights of the ``keys`` in the form that ``need_weights`` selects."""
    return (to_dense if form == "dense" else to_sparse)(weights, keys, Tk)


def by_head(parts: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
    """Return the heads in order: ``heads`` are those of the parts, one after the other."""
    apart = dict(zip(heads, (head for x in parts for head in x.unbind(1))))
    return [apart[i] for i in range(len(heads))]


def join_heads(parts: Sequence[Tensor], heads: Sequence[int]) -> Tensor:
    """Join tensors along the head axis; see :func:`by_head`."""
    if parts[0].layout == torch.strided:
        return torch.stack(by_head(parts, heads), 1)
    places = torch.tensor(heads, device=parts[0].device).split([x.shape[1] for x in parts])
    indices = [x.indices() for x in parts]  # torch.cat of sparse tensors has no gradient
    index = torch.cat([torch.stack([i[0], p[i[1]], *i[2:]]) for i, p in zip(indices, places)], 1)
    shape = (len(parts[0]), len(heads), *parts[0].shape[2:])
    values = torch.cat([x.values() for x in parts])
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=False).coalesce()
