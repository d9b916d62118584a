"""Positions of states in a sequence, to which self-attention alone is invariant."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from attnfast._utils.checks import check_array, check_int, check_like, raise_value_error
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields


class SinusoidalPositions(Module):
    r"""Add sines and cosines of the position to each state, without parameters, for any length.

    .. math:: p_{t,2i} = \sin\left(t / 10000^{2i/D}\right), \quad
              p_{t,2i+1} = \cos\left(t / 10000^{2i/D}\right)

    Paper: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762.

    Example:
        >>> attnfast.nn.SinusoidalPositions()(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Return ``x [B, T, D]`` with the positions from ``offset`` on added.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("x", x, "floating-point", ("B", "T", "D"))
        check_int("offset", offset, 0)
        T, D = x.shape[1:]
        t = torch.arange(offset, offset + T, device=x.device, dtype=torch.float64).unsqueeze(-1)
        rate = torch.arange(0, D, 2, device=x.device, dtype=torch.float64) / max(D, 1)
        angle = t * torch.exp(-math.log(10000.0) * rate)
        both = torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[:, :D]
        return x + both.to(x.dtype)


class LearnedPositions(Module):
    r"""Add a learned vector for the position to each state, :math:`x_t + p_t`.

    Args:
        max_length: the number of positions.
        dim: features of a state.

    Paper: Gehring et al., "Convolutional Sequence to Sequence Learning", ICML 2017,
    arXiv:1705.03122.

    Example:
        >>> attnfast.nn.LearnedPositions(max_length=10, dim=8)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, max_length: int, dim: int):
        super().__init__()
        check_int("max_length", max_length)
        check_int("dim", dim)
        self.max_length, self.dim = max_length, dim
        self.weight = nn.Parameter(torch.empty(max_length, dim).normal_(std=0.02))

    def extra_repr(self) -> str:
        """Return the sizes."""
        return repr_fields(self, ("max_length", "dim"))

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Return ``x [B, T, dim]`` with the positions from ``offset`` on added.

        Raises:
            ValueError, TypeError: an argument does not fit, or there are more positions than
                ``max_length``.
        """
        max_length, dim = self.weight.shape
        check_array("x", x, "floating-point", ("B", "T", dim))
        check_like("x", x, self.weight)
        check_int("offset", offset, 0)
        if offset + x.shape[1] > max_length:
            raise_value_error("x", f"of {max_length} positions at most", offset + x.shape[1])
        return x + self.weight[offset : offset + x.shape[1]]


class RelativePositions(Module):
    r"""Learned bias of the scores for each head and each distance of a key from the row.

    .. math:: b_{htj} = w_{h,\, \mathrm{clip}(j - t,\, -k,\, k)}

    Distances are clipped at k as in Shaw et al., who learn a vector for each distance and add its
    product with the query. The biases are initialised to 0.

    Args:
        num_heads: H.
        max_distance: k.

    Papers: Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position Representations",
    NAACL 2018, arXiv:1803.02155; scalar biases, Raffel et al., JMLR 2020, arXiv:1910.10683.

    Example:
        >>> positions = attnfast.nn.RelativePositions(num_heads=2, max_distance=3)
        >>> positions(4, 5).shape
        torch.Size([1, 2, 4, 5])
        >>> attention = attnfast.nn.MultiHeadAttention(6, 8, 4, num_heads=2, positions=positions)
    """

    def __init__(self, num_heads: int, max_distance: int):
        super().__init__()
        check_int("num_heads", num_heads)
        check_int("max_distance", max_distance)
        self.num_heads, self.max_distance = num_heads, max_distance
        self.weight = nn.Parameter(torch.zeros(num_heads, 2 * max_distance + 1))

    def extra_repr(self) -> str:
        """Return the sizes."""
        return repr_fields(self, ("num_heads", "max_distance"))

    def forward(self, Tq: int, Tk: int, offset: int = 0) -> Tensor:
        """Return the bias ``[1, H, Tq, Tk]`` for rows from ``offset`` on and keys from 0.

        Raises:
            ValueError: a number is not an integer of at least 0.
        """
        for name, x in (("Tq", Tq), ("Tk", Tk), ("offset", offset)):
            check_int(name, x, 0)
        rows, keys = (torch.arange(n, device=self.weight.device) for n in (Tq, Tk))
        apart = (keys - (offset + rows).unsqueeze(-1)).clamp(-self.max_distance, self.max_distance)
        return self.weight[:, apart + self.max_distance].unsqueeze(0)
