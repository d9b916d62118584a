"""A transformer's encoder, to stand before a recurrent decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attnfast._utils.checks import refuse
from attnfast.models.seq2seq import check_lengths, check_share
from attnfast.nn import SinusoidalPositions, SparseSelfAttention, TransformerEncoderLayer
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import check_array, check_like
from attnfast.spans import Span


class TransformerEncoder(nn.Module):
    r"""Self-attention over the source in place of a bidirectional RNN.

    .. math:: x^0 = W e + \mathrm{positions}, \quad x^{l+1} = \mathrm{layer}(x^l), \quad
              h = \mathrm{norm}(x^L)

    It is called as :class:`Encoder`, and its states have as many features, 2H.

    Args:
        embed_dim: E, features of the words.
        hidden_dim: H.
        heads: a :class:`attnfast.Span` for each head; None for four that see all.
        layers: L.
        dropout: on the words with their positions, and on what a layer adds.
        backend: of the self-attention.

    Paper: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762; before a
    recurrent decoder, Chen et al., "The Best of Both Worlds", ACL 2018, arXiv:1804.09849.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        heads: Sequence[Span] | None = None,
        layers: int = 1,
        dropout: float = 0.0,
        backend: str | None = None,
    ):
        super().__init__()
        check_sizes(embed_dim=embed_dim, hidden_dim=hidden_dim, layers=layers)
        check_share("dropout", dropout)
        self.embed_dim, self.output_dim, self.backend = embed_dim, 2 * hidden_dim, backend
        self.proj = nn.Linear(embed_dim, self.output_dim)
        self.positions = SinusoidalPositions()
        if heads is None and self.output_dim % 4:
            refuse("hidden_dim", "even for an encoder of four heads", hidden_dim)
        heads = [Span()] * 4 if heads is None else heads
        if isinstance(heads, (list, tuple)) and heads and self.output_dim % len(heads):
            refuse("heads", f"as many as divide 2 · hidden_dim, {self.output_dim}", len(heads))
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                SparseSelfAttention(self.output_dim, heads, backend=backend),
                4 * self.output_dim, dropout,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(self.output_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return ``[B, Tk, 2H]``, the states of ``embedded [B, Tk, E]``; 0 past ``lengths``."""
        check_array("embedded", embedded, "real numbers", ("B", "Tk", self.embed_dim))
        check_like("embedded", embedded, next(self.parameters(), embedded))
        check_lengths(lengths, embedded, whose="embedded")
        lengths = lengths.to(embedded.device)
        states = self.dropout(self.positions(self.proj(embedded)))
        for layer in self.layers:
            states, _ = layer(states, lengths)
        exists = torch.arange(states.shape[1], device=states.device) < lengths.unsqueeze(-1)
        return self.norm(states) * exists.unsqueeze(-1)
