r"""Spans: which keys a query row may see.

A span is an arithmetic progression of key positions for every row. What a kernel knows of it is
two numbers a row: the row sees the keys from ``start`` up to ``stop``. Wider steps are views: keys
j ≡ 0 (mod k) are every k-th key, and where keys j ≡ p_i (mod k) are seen, queries and keys
fall into k phases, each with its own keys, side by side on the head axis (:func:`to_phases`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import check_flag, check_whole, describe, is_whole, refuse, shape_of
from attnfast.ops.arguments import KINDS, check_device, check_numbers, check_tensor, is_finite

#: Where rows stand among the keys: see :class:`Span`.
Position = int | str | Tensor | None


@dataclass(frozen=True)
class Span:
    r"""The keys that a row may see: those that all its conditions allow.

    ==============================  =========================================================
    ``window=(left, right)``        p_i − left ≤ j ≤ p_i + right; None for a side without end,
                                    one number for both
    ``causal=True``                 j ≤ p_i
    ``stride=k``                    j ≡ p_i (mod k)
    ``stride=k, fixed=True``        j ≡ 0 (mod k)
    ==============================  =========================================================

    p_i is where row i stands among the keys, the argument ``position`` of the calls:

    ==============================  =========================================================
    None                            p_i = i
    a number n                      p_i = n + i: rows from the n-th on, a decoder's n-th step
    ``"end"``                       p_i = i + Tk − Tq: the last row at the last key
    ``"diagonal"``                  p_i = i · S / Tq, S the sequence's length: Luong's local-m
    a tensor                        ``[Tq]``, ``[B, Tq]`` or ``[B, H, Tq]``, whole numbers or
                                    not: Luong's local-p
    ==============================  =========================================================

    A stride that is not fixed needs one of the first three. A dilated window of radius r is
    ``window=r * k, stride=k``.

    Where the window ends on both sides, weights are compact: ``[B, Tq, W]`` with a column for each
    of the W keys that a row may see at most (:meth:`keys` tells which; those outside of the
    sequence have weight 0). With a stride alone the columns are the keys of the row's progression;
    else they are all keys.

    Raises:
        ValueError: a negative window, a stride below 1, or one of them 2³¹ and more.

    Papers: Luong, Pham and Manning, EMNLP 2015, arXiv:1508.04025, for local attention; Child et
    al., "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, for strides.
    """

    window: int | tuple[int | None, int | None] | None = None
    causal: bool = False
    stride: int = 1
    fixed: bool = False

    def __post_init__(self):
        window = self.window
        sides = window if isinstance(window, (tuple, list)) else (window, window)
        if len(sides) != 2 or not all(x is None or (is_whole(x) and 0 <= x < 2**31) for x in sides):
            refuse(
                "window",
                "a number, (left, right) or None, none negative, all below 2**31",
                describe(window),
            )
        if not is_whole(self.stride) or not 1 <= self.stride < 2**31:
            refuse("stride", "a whole number of at least 1, below 2**31", describe(self.stride))
        check_flag("causal", self.causal)
        check_flag("fixed", self.fixed)
        object.__setattr__(self, "window", tuple(None if x is None else int(x) for x in sides))
        object.__setattr__(self, "stride", int(self.stride))

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """How far a row sees to the left and to the right, None for no end."""
        left, right = self.window  # type: ignore[misc]
        return left, 0 if self.causal else right

    @property
    def compact(self) -> bool:
        """Whether a row sees no more keys than the window holds."""
        return None not in self.sides

    @property
    def phases(self) -> int:
        """How many phases rows and keys fall into, each with its own keys: 1 for a fixed stride."""
        return 1 if self.fixed else self.stride

    def columns(self, Tk: int) -> int:
        """Return W, how many columns the weights have."""
        check_whole("Tk", Tk, 0)
        left, right = self.sides
        if left is None or right is None:
            return _steps(Tk, self.stride)
        if self.stride == 1 or not self.fixed:
            return left // self.stride + right // self.stride + 1
        return (left + right) // self.stride + 1

    def locate(self, p: Tensor, Tk: int) -> Rows:
        """Return what rows at the positions ``p [*, Tq]`` see of Tk keys, all of them existing."""
        left, right = self.sides
        k = self.stride
        far = Tk + max(left or 0, right or 0) + k  # beyond it a row sees all keys or none
        if p.is_floating_point():
            p = p.detach().double().nan_to_num(0).clamp(-far, far)
            first = p if left is None else (p - left).ceil().long()
            last = p if right is None else (p + right).floor().long()
        else:
            p = p.long()
            p = p if self.phases > 1 else p.clamp(-far, far)
            first = p if left is None else p - left
            last = p if right is None else p + right
        first = torch.zeros_like(p, dtype=torch.int64) if left is None else first
        last = torch.full_like(p, Tk - 1, dtype=torch.int64) if right is None else last
        if k == 1:
            return Rows(0, first, last + 1)
        phase = 0 if self.fixed else p % k
        return Rows(phase, _steps(first - phase, k), _steps(last + 1 - phase, k))

    def stop(self, rows: Rows, Tk: int, lengths: Tensor | None) -> Tensor:
        """Return where rows stop seeing keys that their sequences have."""
        end: Any = Tk
        if lengths is not None:
            end = lengths.clamp(0, Tk).view(-1, *[1] * (max(rows.stop.dim(), 2) - 1))
        end = _steps(end - rows.phase, self.stride)
        if isinstance(end, Tensor):
            return torch.minimum(rows.stop, end)
        return rows.stop.clamp(max=end)

    def keys(
        self,
        Tq: int,
        Tk: int,
        *,
        position: Position = None,
        lengths: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return the key of every column of the weights, int64, −1 where there is none.

        Args:
            Tq, Tk: how many rows and keys there are.
            position: where the rows stand.
            lengths: ``[B]``, the keys of each sequence.
            device: of the result, if no other argument is a tensor.

        Returns:
            ``[Tq, W]``, with the batch's and heads' axes of position and lengths before it.
        """
        check_whole("Tq", Tq, 0)
        check_whole("Tk", Tk, 0)
        check_position(position, [self])
        _check_place(Tq, Tk, position, lengths, device)
        p = positions(position, Tq, Tk, lengths, device)
        return self.columns_of(self.locate(p, Tk), Tk, lengths, self.compact)

    def columns_of(self, rows: Rows, Tk: int, lengths: Tensor | None, compact: bool) -> Tensor:
        """Return the key of every column of these rows, −1 where there is none."""
        stop = self.stop(rows, Tk, lengths)
        wide = self.columns(Tk) if compact else _steps(Tk, self.stride)
        column = torch.arange(wide, device=rows.start.device)
        if compact:
            column = rows.start.unsqueeze(-1) + column
        seen = column >= rows.start.clamp_min(0).unsqueeze(-1)
        seen = seen & (column < stop.unsqueeze(-1))
        phase = rows.phase.unsqueeze(-1) if isinstance(rows.phase, Tensor) else rows.phase
        return torch.where(seen, column * self.stride + phase, -1)


class Rows(NamedTuple):
    """What rows see: the keys ``phase + k·u`` with start ≤ u < stop, those before 0 left out."""

    phase: Tensor | int
    start: Tensor
    stop: Tensor


Spans = Span | Sequence[Span] | None


def _steps(n: Any, k: int) -> Any:
    """Return how many steps of k it takes to n, rounded up."""
    if k == 1:
        return n
    n = n + (k - 1)
    return n.div(k, rounding_mode="floor") if isinstance(n, Tensor) else n // k


def positions(
    position: Position, Tq: int, Tk: int, lengths: Tensor | None, device: torch.device | None
) -> Tensor:
    """Return where the rows stand, ``[Tq]`` or what was given."""
    if isinstance(position, Tensor):
        return position
    if lengths is not None:
        device = lengths.device
    if position == "diagonal":
        rows = torch.arange(Tq, device=device, dtype=torch.float64)
        ends = Tk if lengths is None else lengths.clamp(0, Tk).view(-1, 1)
        return rows * ends / max(Tq, 1)
    first = first_position(position, Tq, Tk)
    return torch.arange(first, first + Tq, device=device)


def first_position(position: int | str | None, Tq: int, Tk: int) -> int:
    """Return where the first row stands if the others follow it key by key."""
    if is_whole(position):
        return int(position)  # type: ignore[arg-type]
    return Tk - Tq if position == "end" else 0


def rows_at(position: Position, query: Tensor, Tk: int, lengths: Tensor | None) -> Tensor:
    """Return where the rows of a query stand, with as many axes as it has rows'."""
    p = positions(position, query.shape[-2], Tk, lengths, query.device)
    if p.dim() == 2 and query.dim() == 4:
        p = p.unsqueeze(1)
    return p.reshape(*[1] * (query.dim() - 1 - p.dim()), *p.shape)


def check_span(
    query: Tensor, key: Tensor, span: Spans, position: Position, sigma: object, need_weights: object
) -> None:
    """Refuse in one sentence what does not fit a query that fits its keys."""
    *lead, Tq, _ = query.shape
    heads = lead[1] if len(lead) == 2 else 0
    spans = [] if span is None else [span] if isinstance(span, Span) else span
    if not isinstance(spans, (list, tuple)) or not all(isinstance(x, Span) for x in spans):
        refuse("span", "a Span or a list of one for each head", describe(span))
    if not isinstance(span, (Span, type(None))) and (len(spans) != heads or heads == 0):
        expected = f"{heads} Spans, one for each head" if heads else "one Span, without heads"
        refuse("span", expected, f"a list of {len(spans)}")
    for name, x in (("position", position), ("sigma", sigma)):
        if not isinstance(x, Tensor):
            continue
        check_tensor(name, x)
        shape = list(x.shape)
        if shape[-1:] != [Tq] or not any(
            len(shape) == len(want) and all(a in (1, b) for a, b in zip(shape, want))
            for want in ([Tq], [lead[0], Tq], [*lead, Tq])
        ):
            refuse(
                name,
                f"[{Tq}], {[lead[0], Tq]}"
                + f" or {[*lead, Tq]}" * bool(heads)
                + " to fit the query",
                shape,
            )
        if x.device != query.device:
            refuse(name, f"on the query's device {query.device}", x.device)
        if x.dtype not in (torch.int64, torch.int32) and not x.is_floating_point():
            refuse(name, "of whole or real numbers", x.dtype)
    check_position(position, spans)
    number = is_finite(sigma) and sigma > 0  # type: ignore[operator]
    if not (number or sigma is None or isinstance(sigma, Tensor)):
        refuse("sigma", "a positive number or a tensor of them", describe(sigma))
    check_form(need_weights)


def check_position(position: object, spans: Sequence[Span]) -> None:
    """Refuse what is no position, or none for these spans."""
    given = isinstance(position, Tensor)
    named = position is None or (isinstance(position, str) and position in ("end", "diagonal"))
    number = is_whole(position) and abs(int(position)) < 2**62  # type: ignore[call-overload]
    if not (given or named or number):
        refuse("position", "None, a number, 'end', 'diagonal' or a tensor", describe(position))
    strides = any(x.phases > 1 for x in spans)
    if strides and (given or (named and position == "diagonal")):
        got = "a tensor" if given else describe(position)
        refuse("position", "None, a number or 'end' for a stride that is not fixed", got)


def _check_place(Tq: int, Tk: int, position: Position, lengths: object, device: object) -> None:
    """Raise unless lengths, a tensor of positions and a device fit each other, Tq and Tk."""
    if lengths is not None:
        check_tensor("lengths", lengths)
        assert isinstance(lengths, Tensor)
        check_numbers("lengths", lengths, lengths.numel(), 0, Tk, "Tk keys [B]")
    if isinstance(position, Tensor):
        batch = [] if lengths is None else [*lengths.shape, *[1] * (position.dim() - 2)]
        rows = (*batch, Tq)
        _check_rows("position", position, rows, lengths, whole=True)
    if device is None:
        return
    try:
        torch.device(device)  # type: ignore[call-overload]
        fits = not isinstance(device, int)
    except (RuntimeError, TypeError, ValueError):
        fits = False
    if not fits:
        refuse("device", "a torch.device or None", describe(device))


def _check_rows(
    name: str, x: Tensor, rows: Sequence[int], like: object, whole: bool = False
) -> Sequence[int]:
    """Raise unless x has a number for each row; return the shape of all rows."""
    check_tensor(name, x)
    try:
        shape = torch.broadcast_shapes(x.shape, rows)
        fits = (
            x.dim() <= 3
            and shape[-1] == rows[-1]
            and not (whole and [*x.shape[-1:]] != [*rows[-1:]])
        )
    except RuntimeError:
        shape, fits = rows, False
    kind = "whole or real numbers" if whole else "real numbers"
    if not fits or not KINDS[kind](x.dtype):
        others = "Tq and lengths" if whole else "Tq and position"
        refuse(name, f"{kind} {shape_of('..', rows[-1])} to fit {others}", describe(x))
    check_device(name, x, like, "lengths" if whole else "position")  # type: ignore[arg-type]
    return shape


def check_form(need_weights: object) -> None:
    """Refuse what is no form of the weights."""
    if need_weights is True or need_weights is False:
        return
    if isinstance(need_weights, str):
        fits = need_weights in ("dense", "sparse")
    else:
        fits = isinstance(need_weights, int) and need_weights in (0, 1)
    if not fits:
        refuse("need_weights", "True, False, 'dense' or 'sparse'", describe(need_weights))


def log_prior(keys: Tensor, p: Tensor, sigma: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return −(j − p)² / 2σ² for the keys j ``[.., Tq, W]``, taken in ``dtype`` or wider."""
    dtype = torch.promote_types(dtype, p.dtype) if p.is_floating_point() else dtype
    sigma = sigma.to(dtype).unsqueeze(-1) if isinstance(sigma, Tensor) else sigma
    return -0.5 * ((keys - p.to(dtype).unsqueeze(-1)) / sigma).square()


def gaussian_bump(
    Tq: int,
    Tk: int,
    sigma: float | Tensor,
    *,
    height: float | Tensor = 1.0,
    position: Position = "diagonal",
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    r"""Return a bump to add to the scores, as ``bias``: a mild wish for keys near a position.

    .. math:: b_{ij} = h \exp\left(-\frac{(j - p_i)^2}{2 \sigma^2}\right)

    It raises the scores near p by at most h and leaves those far away as they are; the argument
    ``sigma`` of :func:`attnfast.additive_attention` adds the logarithm of a Gaussian instead, which
    falls without end, so that far keys cannot be seen.

    Args:
        Tq, Tk: how many rows and keys there are.
        sigma: σ > 0, in keys; a number or a tensor of the rows' shape, with gradient.
        height: h; a number or a tensor, with gradient.
        position: p: ``"diagonal"`` for i · n / Tq with n the source's length, a tensor
            ``[.., Tq]``, or what :meth:`Span.keys` takes.
        lengths: ``[B]``, n of each source; None means Tk.
        dtype: of the result: the query's, or float32 beside half types.
        device: of the result, if no other argument is a tensor.

    Returns:
        ``[Tq, Tk]``, with the batch's and heads' axes of position and lengths before it.

    Raises:
        ValueError, TypeError: an argument does not fit; the sentence names it.
    """
    check_whole("Tq", Tq, 0)
    check_whole("Tk", Tk, 0)
    check_position(position, [])
    _check_place(Tq, Tk, position, lengths, device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        refuse("dtype", "a torch.dtype of real numbers", describe(dtype))
    p = positions(position, Tq, Tk, lengths, device)
    rows: Sequence[int] = p.shape
    for name, x in (("sigma", sigma), ("height", height)):
        if isinstance(x, Tensor):
            rows = _check_rows(name, x, rows, p)
        elif not is_finite(x) or (x <= 0 and name == "sigma"):
            expected = "a positive number" if name == "sigma" else "a finite number"
            refuse(name, f"{expected} or a tensor of them", describe(x))
    j = torch.arange(Tk, device=p.device)
    if isinstance(height, Tensor) and height.dim():
        height = height.unsqueeze(-1)
    return (height * log_prior(j, p, sigma, dtype).exp()).to(dtype)


def at_keys(x: Tensor, keys: Tensor) -> Tensor:
    """Return ``x [B, (H,) Tq, Tk]``, or 1 in place of a size, at ``keys [.., Tq, W]``."""
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
    """Whether n is not 0, or may be: one graph is compiled for all remainders of a size."""
    return torch.compiler.is_compiling() or n != 0


def bounds_in_phases(
    span: Span, Tq: int, first: int, Tk: int, lengths: Tensor | None, heads: int, like: Tensor
) -> Tensor | None:
    """Return which keys of their phase rows see, for queries and keys of :func:`to_phases`.

    ``[B, H·k, T / k, 2]`` or 1 in place of B and H·k; None where all see all.
    """
    k, (left, right) = span.phases, span.sides
    front, device = first % k, like.device
    padded, uneven = some(front) or some(Tq % k), some(Tk % k)
    if left is right is None and lengths is None and not padded and not uneven:
        return None
    place = torch.arange(_steps(front + Tq, k), device=device)  # of a row in its phase
    phase = torch.arange(k, device=device).unsqueeze(-1)
    row = place * k + (phase - front)
    place = place + first // k
    start = torch.zeros_like(place) if left is None else place - left // k
    stop = torch.full_like(place, _steps(Tk, k)) if right is None else place + (right // k + 1)
    if lengths is not None or uneven:
        ends = Tk if lengths is None else lengths.clamp(0, Tk).view(-1, 1, 1)
        stop = torch.minimum(stop, _steps(ends - phase, k))
    if padded:  # rows that do not exist see nothing
        stop = stop.masked_fill((row < 0) | (row >= Tq), 0)
    bounds = torch.stack(torch.broadcast_tensors(start, stop), -1)
    bounds = bounds.view(*[1] * (4 - bounds.dim()), *bounds.shape)
    return bounds if bounds.shape[1] == 1 else bounds.repeat(1, heads, 1, 1)


def to_phases(x: Tensor, k: int, front: int) -> Tensor:
    """Lay ``[B, (H,) T, C]`` out as ``[B, H·k, T / k, C]``, zeros in front and at the end."""
    rows = _steps(front + x.shape[-2], k)
    end = rows * k - front - x.shape[-2]
    if some(front) or some(end):
        x = torch.nn.functional.pad(x, (0, 0, front, end))
    x = x.view(*x.shape[:-2], rows, k, x.shape[-1]).transpose(-3, -2)
    return x if x.dim() == 4 else x.flatten(1, 2)


def from_phases(x: Tensor, k: int, front: int, like: Tensor) -> Tensor:
    """Lay ``[B, H·k, T / k, C]`` out in the order of rows ``like [B, (H,) T, ·]``."""
    x = x if like.dim() == 3 else x.view(x.shape[0], x.shape[1] // k, k, *x.shape[2:])
    x = x.transpose(-3, -2).flatten(-3, -2)
    T = like.shape[-2]
    if torch.compiler.is_compiling():  # nor a graph for each way that a part lies in memory
        return x.narrow_copy(-2, front, T)
    return x if x.shape[-2] == T else x[..., front : front + T, :]


def to_dense(weights: Tensor, keys: Tensor, Tk: int) -> Tensor:
    """Spread columns over all Tk keys, those without a key left out."""
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
    """Return the numbers ``x [.., Tk]`` of the ``keys [.., W]``, 0 where there is no such key."""
    inside = (keys >= 0) & (keys < x.shape[-1])
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], keys.shape[-1]))
    index = keys.clamp(0, x.shape[-1] - 1).expand(*x.shape[:-1], -1)
    return x.gather(-1, index).masked_fill(~inside, 0)


def to_sparse(weights: Tensor, keys: Tensor, Tk: int) -> Tensor:
    """Return a ``torch.sparse_coo`` tensor of the keys that rows may see."""
    keys = keys.expand_as(weights)
    *rows, column = (keys >= 0).nonzero(as_tuple=True)
    index = torch.stack([*rows, keys[(*rows, column)]])
    shape = (*weights.shape[:-1], Tk)
    return torch.sparse_coo_tensor(
        index, weights[(*rows, column)], shape, is_coalesced=True, check_invariants=False
    )


def to_form(form: str, weights: Tensor, keys: Tensor, Tk: int) -> Tensor:
    """Return the weights of the ``keys`` as ``need_weights`` asks for them."""
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
