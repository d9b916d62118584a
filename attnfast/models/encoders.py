"""Encoders of sentences: recurrent layers, and a sparse transformer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnfast._utils.checks import (
    check_array,
    check_choice,
    check_flag,
    check_like,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.models._checks import check_lengths, check_share
from attnfast.nn import (
    LearnedPositions,
    RelativePositions,
    SinusoidalPositions,
    SparseSelfAttention,
    TransformerEncoderLayer,
)
from attnfast.nn._fused_rnn import run_rnn
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import length_mask
from attnfast.ops.backends import check_backend
from attnfast.spans import Span

#: Positions or distances with parameters of their own, unless given.
MAX_DISTANCE = 512
POSITIONS = ("sinusoidal", "learned", "relative")
CELLS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


class Encoder(Module):
    r"""An RNN over the source, in both directions or one.

    .. math:: \overrightarrow h_j = \mathrm{RNN}(\overrightarrow h_{j-1}, x_j), \quad
              \overleftarrow h_j = \mathrm{RNN}(\overleftarrow h_{j+1}, x_j), \quad
              h_j = [\overrightarrow h_j; \overleftarrow h_j]

    A layer reads the states of the layer below; with ``residual`` these are added to its own. With
    self-attention the states are :math:`\mathrm{norm}(h_j + \mathrm{attend}(h)_j)`.

    Args:
        embed_dim: E, features of the words.
        hidden_dim: H, features of each direction; an RNN in one direction has 2H.
        cell: ``"rnn"``, ``"gru"`` or ``"lstm"``.
        layers: number of stacked RNNs.
        dropout: between the layers, and on the output of the self-attention.
        self_attention: self-attention of the states, or None; its output is added to them and the
            sum is normalised.
        bidirectional: read the source in both directions; otherwise forwards.
        residual: add to the states of each layer above the first those of the layer below.
        backend: of the recurrent layers; ``"reference"`` for PyTorch's own.

    Papers: Schuster and Paliwal, "Bidirectional recurrent neural networks", IEEE TSP 45(11), 1997;
    Wu et al., arXiv:1609.08144 (GNMT), for residual connections.

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
        *,
        bidirectional: bool = True,
        residual: bool = False,
        backend: str | None = None,
    ):
        super().__init__()
        check_backend(backend)
        self.backend = backend
        check_sizes(embed_dim=embed_dim, hidden_dim=hidden_dim, layers=layers)
        check_choice("cell", cell, CELLS)
        check_share("dropout", dropout)
        self.bidirectional = check_flag("bidirectional", bidirectional)
        self.residual = check_flag("residual", residual)
        if not isinstance(self_attention, (nn.Module, type(None))):
            raise_type_error("self_attention", "a module or None", describe(self_attention))
        self.self_attention = self_attention
        if self_attention is not None:
            self.norm = nn.LayerNorm(2 * hidden_dim)
        self.dropout = nn.Dropout(dropout)
        self.embed_dim, self.output_dim = int(embed_dim), 2 * int(hidden_dim)
        features = int(hidden_dim) if self.bidirectional else self.output_dim
        self.layers = nn.ModuleList(
            CELLS[cell](
                self.output_dim if layer else self.embed_dim, features, batch_first=True,
                bidirectional=self.bidirectional,
            )
            for layer in range(layers)
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the options that are not defaults."""
        return repr_fields(self, defaults={"residual": False, "backend": None})

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return ``[B, Tk, 2H]``, the states of ``embedded [B, Tk, E]``; 0 past ``lengths``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("embedded", embedded, "floating-point", ("B", "Tk", self.embed_dim))
        check_like("embedded", embedded, next(self.parameters(), embedded))
        check_lengths(lengths, embedded, whose="embedded")
        states, there = embedded, lengths.to(embedded.device)
        for number, layer in enumerate(self.layers):
            read = self.dropout(states) if number else states
            above = self._run(layer, read, lengths, there.long())
            states = states + above if number and self.residual else above
        if self.self_attention is None:
            return states
        states = self.norm(states + self.dropout(self.self_attention(states, there)[0]))
        return states * length_mask(there, states.shape[1]).unsqueeze(-1)

    def _run(self, rnn: nn.Module, x: Tensor, lengths: Tensor, there: Tensor) -> Tensor:
        """Return the states of a layer; ``there`` are the lengths on the device."""
        assert isinstance(rnn, nn.RNNBase)
        done = run_rnn(rnn, x, None, there, self.backend)
        if done is not None:
            return done[0]
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class TransformerEncoder(Module):
    r"""Self-attention over the source instead of a bidirectional RNN.

    .. math:: x^0 = W e + \mathrm{positions}, \quad x^{l+1} = \mathrm{layer}(x^l), \quad
              h = \mathrm{norm}(x^L)

    It is called like :class:`Encoder`, and its states have the same number of features, 2H.

    Args:
        embed_dim: E, features of the words.
        hidden_dim: H.
        heads: a :class:`attnfast.Span` for each head; None for four heads that see all keys.
        layers: L.
        dropout: on the output of each sublayer; a model drops features of the words itself.
        backend: of the self-attention.
        positions: ``"sinusoidal"``; ``"learned"``, a vector for each of ``max_distance``
            positions; or ``"relative"``, a bias of the scores for each distance up to
            ``max_distance``, in each layer and head.
        max_distance: positions or distances with parameters of their own.

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
        *,
        positions: str = "sinusoidal",
        max_distance: int = MAX_DISTANCE,
    ):
        super().__init__()
        check_sizes(
            embed_dim=embed_dim, hidden_dim=hidden_dim, layers=layers, max_distance=max_distance
        )
        check_choice("positions", positions, POSITIONS)
        check_share("dropout", dropout)
        self.embed_dim, self.output_dim, self.backend = embed_dim, 2 * hidden_dim, backend
        self.proj = nn.Linear(embed_dim, self.output_dim)
        #: The most words of a source, or None.
        self.max_length = max_distance if positions == "learned" else None
        self.positions: nn.Module = nn.Identity()
        if positions == "sinusoidal":
            self.positions = SinusoidalPositions()
        elif positions == "learned":
            self.positions = LearnedPositions(max_distance, self.output_dim)
        if heads is None and self.output_dim % 4:
            raise_value_error("hidden_dim", "even for an encoder of four heads", hidden_dim)
        heads = [Span()] * 4 if heads is None else heads
        relative = positions == "relative"
        if isinstance(heads, (list, tuple)) and heads and self.output_dim % len(heads):
            raise_value_error(
                "heads", f"as many as divide 2 · hidden_dim, {self.output_dim}", len(heads)
            )
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                SparseSelfAttention(
                    self.output_dim, heads, backend=backend,
                    positions=RelativePositions(len(heads), max_distance) if relative else None,
                ),
                4 * self.output_dim, dropout,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(self.output_dim)

    def extra_repr(self) -> str:
        """Return the options that are not defaults."""
        return repr_fields(self, defaults={"backend": None})

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return ``[B, Tk, 2H]``, the states of ``embedded [B, Tk, E]``; 0 past ``lengths``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("embedded", embedded, "floating-point", ("B", "Tk", self.embed_dim))
        check_like("embedded", embedded, next(self.parameters(), embedded))
        check_lengths(lengths, embedded, whose="embedded")
        lengths = lengths.to(embedded.device)
        states = self.positions(self.proj(embedded))
        for layer in self.layers:
            states, _ = layer(states, lengths)
        return self.norm(states) * length_mask(lengths, states.shape[1], states).unsqueeze(-1)
