"""Encoders of sentences: bidirectional recurrent layers, and a sparse transformer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnfast._utils.checks import (
    check_array,
    check_choice,
    check_like,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast.models._checks import check_lengths, check_share
from attnfast.nn import (
    SinusoidalPositions,
    SparseSelfAttention,
    TransformerEncoderLayer,
)
from attnfast.nn._fused_rnn import run_rnn
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import length_mask
from attnfast.ops.backends import check_backend
from attnfast.spans import Span

CELLS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


class Encoder(nn.Module):
    r"""A bidirectional RNN over the source.

    .. math:: \overrightarrow h_j = \mathrm{RNN}(\overrightarrow h_{j-1}, x_j), \quad
              \overleftarrow h_j = \mathrm{RNN}(\overleftarrow h_{j+1}, x_j), \quad
              h_j = [\overrightarrow h_j; \overleftarrow h_j]

    With self-attention the states are :math:`\mathrm{norm}(h_j + \mathrm{attend}(h)_j)`.

    Args:
        embed_dim: E, features of the words.
        hidden_dim: H, features of each direction.
        cell: ``"rnn"``, ``"gru"`` or ``"lstm"``.
        layers: number of stacked RNNs.
        dropout: between the layers, and on the output of the self-attention.
        self_attention: lets the states attend to each other, or None; its output is added to them
            and the sum is normalised.
        backend: of the recurrent layers; ``"reference"`` for PyTorch's own.

    Paper: Schuster and Paliwal, "Bidirectional recurrent neural networks", IEEE TSP 45(11), 1997.

    Example:
        >>> encoder = attnfast.models.Encoder(embed_dim=3, hidden_dim=4)
        >>> states = encoder(torch.randn(2, 5, 3), torch.tensor([5, 3]))
        >>> states.shape, states[1, 3:].abs().sum().item()
        (torch.Size([2, 5, 8]), 0.0)
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        cell: str = "gru",
        layers: int = 1,
        dropout: float = 0.0,
        self_attention: SparseSelfAttention | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        check_backend(backend)
        self.backend = backend
        check_sizes(embed_dim=embed_dim, hidden_dim=hidden_dim, layers=layers)
        check_choice("cell", cell, CELLS)
        check_share("dropout", dropout)
        if not isinstance(self_attention, (nn.Module, type(None))):
            raise_type_error("self_attention", "a module or None", describe(self_attention))
        self.self_attention = self_attention
        if self_attention is not None:
            self.norm = nn.LayerNorm(2 * hidden_dim)
            self.dropout = nn.Dropout(dropout)
        self.rnn = CELLS[cell](
            int(embed_dim),  # PyTorch does not accept NumPy integers
            int(hidden_dim),
            int(layers),
            batch_first=True,
            bidirectional=True,
            dropout=dropout if layers > 1 else 0.0,
        )

    @property
    def output_dim(self) -> int:
        """The number of features of the states, 2H."""
        return 2 * self.rnn.hidden_size

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return ``[B, Tk, 2H]``, the states of ``embedded [B, Tk, E]``; 0 past ``lengths``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("embedded", embedded, "floating-point", ("B", "Tk", self.rnn.input_size))
        check_like("embedded", embedded, next(self.parameters(), embedded))
        check_lengths(lengths, embedded, whose="embedded")
        length = embedded.shape[1]
        done = run_rnn(self.rnn, embedded, None, lengths.to(embedded.device).long(), self.backend)
        if done is None:
            packed = pack_padded_sequence(
                embedded, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            done = self.rnn(packed)
            done = pad_packed_sequence(done[0], batch_first=True, total_length=length)
        states = done[0]
        if self.self_attention is None:
            return states
        lengths = lengths.to(states.device)
        states = self.norm(states + self.dropout(self.self_attention(states, lengths)[0]))
        return states * length_mask(lengths, length).unsqueeze(-1)


class TransformerEncoder(nn.Module):
    r"""Self-attention over the source instead of a bidirectional RNN.

    .. math:: x^0 = W e + \mathrm{positions}, \quad x^{l+1} = \mathrm{layer}(x^l), \quad
              h = \mathrm{norm}(x^L)

    It is called as :class:`Encoder`, and its states have as many features, 2H.

    Args:
        embed_dim: E, features of the words.
        hidden_dim: H.
        heads: a :class:`attnfast.Span` for each head; None for four heads that see all keys.
        layers: L.
        dropout: on the words with their positions, and on the output of each sublayer.
        backend: of the self-attention.

    Paper: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762; before a
    recurrent decoder, Chen et al., "The Best of Both Worlds", ACL 2018, arXiv:1804.09849.

    Example:
        >>> heads = [attnfast.Span(window=1), attnfast.Span(stride=2)]
        >>> encoder = attnfast.models.TransformerEncoder(embed_dim=3, hidden_dim=4, heads=heads)
        >>> encoder(torch.randn(2, 5, 3), torch.tensor([5, 3])).shape
        torch.Size([2, 5, 8])
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
            raise_value_error("hidden_dim", "even for an encoder of four heads", hidden_dim)
        heads = [Span()] * 4 if heads is None else heads
        if isinstance(heads, (list, tuple)) and heads and self.output_dim % len(heads):
            raise_value_error(
                "heads", f"as many as divide 2 · hidden_dim, {self.output_dim}", len(heads)
            )
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
        """Return ``[B, Tk, 2H]``, the states of ``embedded [B, Tk, E]``; 0 past ``lengths``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("embedded", embedded, "floating-point", ("B", "Tk", self.embed_dim))
        check_like("embedded", embedded, next(self.parameters(), embedded))
        check_lengths(lengths, embedded, whose="embedded")
        lengths = lengths.to(embedded.device)
        states = self.dropout(self.positions(self.proj(embedded)))
        for layer in self.layers:
            states, _ = layer(states, lengths)
        return self.norm(states) * length_mask(lengths, states.shape[1], states).unsqueeze(-1)
