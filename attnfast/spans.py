r"""Spans: the keys that are visible to a query row.

A span is an arithmetic progression of key positions for every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import (
    KINDS,
    check_device,
    check_flag,
    check_int,
    check_numbers,
    check_tensor,
    describe,
    is_finite,
    is_int,
    raise_value_error,
    shape_of,
)
from attnfast._utils.representation import repr_fields

__all__ = ["Position", "Span", "gaussian_bias"]

#: The positions of rows among the keys: see :class:`Span`.
Position = int | str | Tensor | None


@dataclass(frozen=True, repr=False)
class Span:
    r"""The keys visible to a row: those that satisfy all conditions.

    ==============================  =========================================================
    ``window=(left, right)``        p_i − left ≤ j ≤ p_i + right; None for an unbounded side,
                                    one number for both
    ``causal=True``                 j ≤ p_i
    ``stride=k``                    j ≡ p_i (mod k)
    ``stride=k, fixed=True``        j ≡ 0 (mod k)
    ==============================  =========================================================

    p_i is the position of row i among the keys, the argument ``position`` of the calls:

    ==============================  =========================================================
    None                            p_i = i: Luong's local-m
    a number n                      p_i = n + i: rows from the n-th on, a decoder's n-th step
    ``"end"``                       p_i = i + Tk − Tq: the last row at the last key
    ``"diagonal"``                  p_i = i · S / Tq, S the sequence's length
    a tensor                        ``[Tq]``, ``[B, Tq]`` or ``[B, H, Tq]``, integers or
                                    floating point, such as predicted ones
    ==============================  =========================================================

    A stride that is not fixed needs one of the first three. A dilated window of radius r is
    ``window=r * k, stride=k``.

    If the window is bounded on both sides, weights are compact: ``[B, Tq, W]``, where W is the
    largest number of keys visible to a row (:meth:`key_indices` returns the key of each column;
    keys outside the sequence have weight 0). With a stride alone the columns are the keys of the
    row's progression; otherwise they are all keys.

    Raises:
        ValueError: a negative window, a stride below 1, or either is 2³¹ or more.

    Papers: Luong, Pham and Manning, EMNLP 2015, arXiv:1508.04025, for local attention; Child et
    al., "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, for strides.

    Example:
        >>> attnfast.Span(window=1).key_indices(3, 4)  # the keys that each of three rows may see
        tensor([[-1,  0,  1],
                [ 0,  1,  2],
                [ 1,  2,  3]])
    """

    window: int | tuple[int | None, int | None] | None = None
    causal: bool = False
    stride: int = 1
    fixed: bool = False

    def __post_init__(self) -> None:
        window = self.window
        sides = window if isinstance(window, (tuple, list)) else (window, window)
        if len(sides) != 2 or not all(x is None or (is_int(x) and 0 <= x < 2**31) for x in sides):
            raise_value_error(
                "window",
                "a number, (left, right) or None, none negative, all below 2**31",
                describe(window),
            )
        if not is_int(self.stride) or not 1 <= self.stride < 2**31:
            raise_value_error(
                "stride", "an integer of at least 1, below 2**31", describe(self.stride)
            )
        check_flag("causal", self.causal)
        check_flag("fixed", self.fixed)
        object.__setattr__(self, "window", tuple(None if x is None else int(x) for x in sides))
        object.__setattr__(self, "stride", int(self.stride))

    def __repr__(self) -> str:
        """Return the conditions; those without effect are left out."""
        without = {"window": (None, None), "causal": False, "stride": 1, "fixed": False}
        return f"{type(self).__name__}({repr_fields(self, defaults=without)})"

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The number of keys visible to the left and right of a row, None if unbounded."""
        left, right = self.window  # type: ignore[misc]
        return left, 0 if self.causal else right

    @property
    def compact(self) -> bool:
        """True if the window bounds the number of visible keys of a row."""
        return None not in self.sides

    @property
    def phases(self) -> int:
        """The number of phases of rows, which see different keys; 1 for a fixed stride."""
        return 1 if self.fixed else self.stride

    def columns(self, Tk: int) -> int:
        """Return W, the number of columns of the weights.

        Raises:
            ValueError: ``Tk`` is not an integer of at least 0.
        """
        check_int("Tk", Tk, 0)
        left, right = self.sides
        if left is None or right is None:
            return ceil_div(Tk, self.stride)
        if self.stride == 1 or not self.fixed:
            return left // self.stride + right // self.stride + 1
        return (left + right) // self.stride + 1

    def locate(self, p: Tensor, Tk: int) -> Rows:
        """Return the keys visible to rows at positions ``p [*, Tq]`` if all Tk keys exist."""
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
        return Rows(phase, ceil_div(first - phase, k), ceil_div(last + 1 - phase, k))

    def stop(self, rows: Rows, Tk: int, lengths: Tensor | None) -> Tensor:
        """Return the end of the visible keys of rows, limited to the sequences' lengths."""
        end: Any = Tk
        if lengths is not None:
            end = lengths.clamp(0, Tk).view(-1, *[1] * (max(rows.stop.dim(), 2) - 1))
        end = ceil_div(end - rows.phase, self.stride)
        if isinstance(end, Tensor):
            return torch.minimum(rows.stop, end)
        return rows.stop.clamp(max=end)

    def key_indices(
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
            Tq, Tk: the numbers of rows and keys.
            position: the positions of the rows.
            lengths: ``[B]``, the number of keys of each sequence.
            device: device of the result, if no other argument is a tensor.

        Returns:
            ``[Tq, W]``, preceded by the batch and head axes of position and lengths.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_int("Tq", Tq, 0)
        check_int("Tk", Tk, 0)
        check_position(position, [self])
        _check_place(Tq, Tk, position, lengths, device)
        p = positions(position, Tq, Tk, lengths, device)
        return self.columns_of(self.locate(p, Tk), Tk, lengths, self.compact)

    def columns_of(self, rows: Rows, Tk: int, lengths: Tensor | None, compact: bool) -> Tensor:
        """Return the key of every column of these rows, −1 where there is none."""
        stop = self.stop(rows, Tk, lengths)
        wide = self.columns(Tk) if compact else ceil_div(Tk, self.stride)
        column = torch.arange(wide, device=rows.start.device)
        if compact:
            column = rows.start.unsqueeze(-1) + column
        seen = column >= rows.start.clamp_min(0).unsqueeze(-1)
        seen = seen & (column < stop.unsqueeze(-1))
        phase = rows.phase.unsqueeze(-1) if isinstance(rows.phase, Tensor) else rows.phase
        return torch.where(seen, column * self.stride + phase, -1)


class Rows(NamedTuple):
    """Visible keys of rows: ``phase + k·u`` with start ≤ u < stop, except those before 0."""

    phase: Tensor | int
    start: Tensor
    stop: Tensor


Spans = Span | Sequence[Span] | None


def ceil_div(n: Any, k: int) -> Any:
    """Return n / k, rounded up."""
    if k == 1:
        return n
    n = n + (k - 1)
    return n.div(k, rounding_mode="floor") if isinstance(n, Tensor) else n // k


def positions(
    position: Position, Tq: int, Tk: int, lengths: Tensor | None, device: torch.device | None
) -> Tensor:
    """Return the positions of the rows: ``[Tq]``, or the given tensor."""
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
    """Return the position of the first row if the others follow it key by key."""
    if is_int(position):
        return int(position)  # type: ignore[arg-type]
    return Tk - Tq if position == "end" else 0


def check_position(position: object, spans: Sequence[Span]) -> None:
    """Raise unless ``position`` is a position that these spans accept."""
    given = isinstance(position, Tensor)
    named = position is None or (isinstance(position, str) and position in ("end", "diagonal"))
    number = is_int(position) and abs(int(position)) < 2**62  # type: ignore[call-overload]
    if not (given or named or number):
        raise_value_error(
            "position", "None, a number, 'end', 'diagonal' or a tensor", describe(position)
        )
    strides = any(x.phases > 1 for x in spans)
    if strides and (given or (named and position == "diagonal")):
        got = "a tensor" if given else describe(position)
        raise_value_error("position", "None, a number or 'end' for a stride that is not fixed", got)


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
        raise_value_error("device", "a torch.device or None", describe(device))


def _check_rows(
    name: str, x: Tensor, rows: Sequence[int], like: object, whole: bool = False
) -> Sequence[int]:
    """Raise unless x has one element for each row; return the shape of all rows."""
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
    kind = "int64, int32 or floating-point" if whole else "floating-point"
    if not fits or not KINDS[kind](x.dtype):
        others = "Tq and lengths" if whole else "Tq and position"
        raise_value_error(name, f"{kind} {shape_of('..', rows[-1])} to fit {others}", describe(x))
    check_device(name, x, like, "lengths" if whole else "position")  # type: ignore[arg-type]
    return shape


def log_prior(keys: Tensor, p: Tensor, sigma: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return −(j − p)² / 2σ² for the keys j ``[.., Tq, W]``, taken in ``dtype`` or wider."""
    dtype = torch.promote_types(dtype, p.dtype) if p.is_floating_point() else dtype
    sigma = sigma.to(dtype).unsqueeze(-1) if isinstance(sigma, Tensor) else float(sigma)
    return -0.5 * ((keys - p.to(dtype).unsqueeze(-1)) / sigma).square()


def gaussian_bias(
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
    r"""Return a Gaussian bias for the scores, a soft preference for keys near a position.

    .. math:: b_{ij} = h \exp\left(-\frac{(j - p_i)^2}{2 \sigma^2}\right)

    The bias raises the scores near p by at most h and leaves those far from p unchanged. The
    argument ``sigma`` of :func:`attnfast.additive_attention` adds the logarithm of a Gaussian
    instead, which is unbounded below, so that far keys get almost no weight.

    Args:
        Tq, Tk: the numbers of rows and keys.
        sigma: σ > 0, in keys; a number or a tensor of the rows' shape, differentiable.
        height: h; a number or a tensor, differentiable.
        position: p: ``"diagonal"`` for i · n / Tq with n the source's length, a tensor
            ``[.., Tq]``, or any position that :meth:`Span.key_indices` takes.
        lengths: ``[B]``, n of each source; None means Tk.
        dtype: dtype of the result: the query's, or float32 with half precision.
        device: device of the result, if no other argument is a tensor.

    Returns:
        ``[Tq, Tk]``, preceded by the batch and head axes of position and lengths.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Example:
        >>> attnfast.gaussian_bias(2, 4, sigma=1.0).argmax(-1)
        tensor([0, 2])
    """
    check_int("Tq", Tq, 0)
    check_int("Tk", Tk, 0)
    check_position(position, [])
    _check_place(Tq, Tk, position, lengths, device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise_value_error("dtype", "a floating-point torch.dtype", describe(dtype))
    p = positions(position, Tq, Tk, lengths, device)
    rows: Sequence[int] = p.shape
    for name, x in (("sigma", sigma), ("height", height)):
        if isinstance(x, Tensor):
            rows = _check_rows(name, x, rows, p)
        elif not is_finite(x) or (x <= 0 and name == "sigma"):
            expected = "a positive number" if name == "sigma" else "a finite number"
            raise_value_error(name, f"{expected} or a tensor of them", describe(x))
    j = torch.arange(Tk, device=p.device)
    if isinstance(height, Tensor) and height.dim():
        height = height.unsqueeze(-1)
    height = height if isinstance(height, Tensor) else float(height)  # an integer may be too large
    return (height * log_prior(j, p, sigma, dtype).exp()).to(dtype)
