"""A layer of a transformer's encoder, around self-attention with or without spans."""

from __future__ import annotations

from torch import Tensor, nn

from attnfast._utils.checks import (
    check_array,
    check_like,
    check_numbers,
    describe,
    is_finite,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast.nn.attention import check_sizes
from attnfast.nn.local import SparseSelfAttention


class TransformerEncoderLayer(Module):
    r"""Self-attention and a feed-forward network, each with a residual connection.

    .. math:: y = x + \mathrm{attend}(\mathrm{norm}(x)), \quad
              z = y + W_2\, \mathrm{relu}(W_1\, \mathrm{norm}(y) + b_1) + b_2

    The norms come first (pre-norm), unlike in Vaswani et al.

    Args:
        attention: a :class:`SparseSelfAttention`; heads ``[Span()] * H`` see all keys.
        feedforward_dim: features between W_1 and W_2.
        dropout: dropout probability of both added terms, in training.

    Papers: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762; Xiong et
    al., "On Layer Normalization in the Transformer Architecture", ICML 2020, arXiv:2002.04745.

    Example:
        >>> heads = [attnfast.Span(window=1), attnfast.Span()]
        >>> attention = attnfast.nn.SparseSelfAttention(8, heads)
        >>> layer = attnfast.nn.TransformerEncoderLayer(attention, feedforward_dim=16)
        >>> layer(torch.randn(2, 5, 8), torch.tensor([5, 3]))[0].shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, attention: SparseSelfAttention, feedforward_dim: int, dropout: float = 0.0):
        super().__init__()
        if not isinstance(attention, SparseSelfAttention):
            raise_type_error("attention", "a SparseSelfAttention", type(attention).__name__)
        check_sizes(feedforward_dim=feedforward_dim)
        if not is_finite(dropout) or not 0 <= dropout < 1:
            raise_value_error("dropout", "a probability below 1", describe(dropout))
        self.attention = attention
        self.dim = attention.out_proj.out_features
        self.norms = nn.ModuleList(nn.LayerNorm(self.dim) for _ in range(2))
        self.feedforward = nn.Sequential(
            nn.Linear(self.dim, feedforward_dim), nn.ReLU(), nn.Linear(feedforward_dim, self.dim)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, states: Tensor, lengths: Tensor | None = None, need_weights: bool | str = False
    ) -> tuple[Tensor, Tensor | list[Tensor] | None]:
        """Return z, ``[B, T, dim]``, and the attention weights or None.

        Args:
            states: ``[B, T, dim]``; states beyond ``lengths [B]`` are padding and are hidden.
            need_weights: as in :class:`SparseSelfAttention`.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("states", states, "floating-point", ("B", "T", self.dim))
        check_like("states", states, self.norms[0].weight)  # type: ignore[arg-type]
        if lengths is not None:
            check_numbers("lengths", lengths, states.shape[0], 0, states.shape[1], "states")
        found, weights = self.attention(
            self.norms[0](states), lengths=lengths, need_weights=need_weights
        )
        states = states + self.dropout(found)
        return states + self.dropout(self.feedforward(self.norms[1](states))), weights
