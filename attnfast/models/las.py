"""Listen, attend and spell: a pyramid of BiLSTMs, a decoder that attends, a CTC head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import (
    MAX_INT32,
    check_array,
    check_flag,
    check_like,
    check_numbers,
    check_tensor,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.decoding._constraints import Constraints
from attnfast.models._checks import (
    PAD,
    check_lengths,
    check_share,
    check_source,
    check_step,
    check_target,
    embed,
)
from attnfast.models._search import select_search_backend
from attnfast.models.encoders import Encoder
from attnfast.nn import AttentionLSTM, Memory, RecurrentState
from attnfast.nn._fused_search import search_inputs
from attnfast.nn._linear import linear
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import length_mask
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.search import SearchInputs

#: CTC's blank: the id of padding, which is not a label.
BLANK = PAD


def join_frames(frames: Tensor, lengths: Tensor, size: int = 2) -> tuple[Tensor, Tensor]:
    """Join ``size`` neighbours of ``frames [B, T, F]`` to one, ``[B, ⌈T / size⌉, size · F]``.

    The lengths ``⌈lengths / size⌉`` are returned too. An incomplete last group is filled with 0;
    padding must be 0.
    """
    B, T, features = frames.shape
    frames = F.pad(frames, (0, 0, 0, -T % size))
    return frames.reshape(B, -(-T // size), size * features), (lengths + size - 1) // size


class PyramidEncoder(Module):
    r"""Stacked BiLSTMs, each of which reads its input's frames joined in pairs.

    .. math:: h^l_j = \mathrm{BiLSTM}(h^l_{j-1}, [h^{l-1}_{2j}; h^{l-1}_{2j+1}])

    L layers reduce T frames to ⌈T / 2ᴸ⌉, which makes attention and CTC cheaper. An odd frame at
    the end of a recording is joined with zeros.

    Args:
        features: number of features of a frame.
        hidden_dim: H, features of each direction.
        layers: L; the paper has 3, above one that does not join frames.
        dropout: on the input of layers above the first, and on the output.
        factor: number of frames joined to one; 1 for a plain encoder.
        backend: of the recurrent layers; ``"reference"`` for PyTorch's own.

    Paper: Chan et al., "Listen, Attend and Spell", ICASSP 2016, arXiv:1508.01211.

    Example:
        >>> encoder = attnfast.models.PyramidEncoder(features=5, hidden_dim=4, layers=2)
        >>> states, lengths = encoder(torch.randn(2, 9, 5), torch.tensor([9, 6]))
        >>> states.shape, lengths
        (torch.Size([2, 3, 8]), tensor([3, 2]))
    """

    def __init__(
        self,
        features: int,
        hidden_dim: int,
        layers: int = 3,
        dropout: float = 0.0,
        factor: int = 2,
        backend: str | None = None,
    ):
        super().__init__()
        check_sizes(features=features, hidden_dim=hidden_dim, layers=layers, factor=factor)
        check_share("dropout", dropout)
        self.features, self.output_dim, self.factor = features, 2 * hidden_dim, factor
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Encoder(
                factor * (2 * hidden_dim if number else features), hidden_dim, "lstm",
                backend=backend,
            )
            for number in range(layers)
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the number of frames that are joined to one."""
        return repr_fields(self, ("factor",))

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return states ``[B, ⌈T / 2ᴸ⌉, 2H]``, 0 in padding, and their lengths.

        Args:
            frames: ``[B, T, features]``.
            lengths: ``[B]``, each at least ``factor ** layers``; frames beyond are ignored.

        Raises:
            ValueError, TypeError: an argument does not fit, or a frame is not finite.
        """
        check_array("frames", frames, "floating-point", ("B", "T", self.features))
        check_like("frames", frames, next(self.parameters(), frames))
        least = self.factor ** len(self.layers)
        if frames.shape[0] and frames.shape[1] < least:
            expected = f"at least {least}, which the pyramid joins into one state"
            raise_value_error("frames", expected, frames.shape[1])
        check_lengths(lengths, frames, whose="frames")
        if len(lengths) and int(lengths.min()) < least:
            found = int(lengths.min())
            expected = f"at least {least}, the frames that the pyramid joins into one state"
            raise_value_error("lengths", expected, found)
        exists = length_mask(lengths, frames.shape[1], frames)
        states = frames.masked_fill(~exists.unsqueeze(-1), 0)  # the last group reads padding
        if not torch.compiler.is_compiling() and not states.isfinite().all():
            raise_value_error("frames", "finite numbers", "NaN or infinity")
        for number, layer in enumerate(self.layers):
            states = self.dropout(states) if number else states
            states, lengths = join_frames(states, lengths, self.factor)
            states = layer(states, lengths)
        return self.dropout(states), lengths


class EncodedSpeech(NamedTuple):
    """Encoded recordings: the memory that the decoder attends to, and CTC's log-probabilities.

    ``frame_log_probs [B, Tk, V]``, of the label of each state, float32 for half precision;
    ``lengths [B]`` of the states.

    Example:
        >>> from attnfast.models import ListenAttendSpell, PyramidEncoder
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> model = ListenAttendSpell(PyramidEncoder(5, 4, layers=1), attention, 20, 6, 3).eval()
        >>> frames, lengths = torch.randn(2, 8, 5), torch.tensor([8, 6])
        >>> encoded, state = model.encode(frames, lengths)
        >>> encoded.frame_log_probs.shape, encoded.lengths
        (torch.Size([2, 4, 20]), tensor([4, 3]))
    """

    memory: Memory
    frame_log_probs: Tensor
    lengths: Tensor

    def index_select(self, index: Tensor) -> EncodedSpeech:
        """Return the recordings ``index``."""
        return EncodedSpeech(self.memory.index_select(index), *(x[index] for x in self[1:]))


class LASOutput(NamedTuple):
    """Output of :class:`ListenAttendSpell` for a whole target, and CTC's for the recording.

    ``logits [B, T, V]`` of the letter after each; ``frame_log_probs [B, Tk, V]`` of the label of
    each state; ``lengths [B]`` of the states; ``weights [B, T, Tk]``, None unless requested.

    Example:
        >>> from attnfast.models import ListenAttendSpell, PyramidEncoder
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> model = ListenAttendSpell(PyramidEncoder(5, 4, layers=1), attention, 20, 6, 3).eval()
        >>> frames, lengths = torch.randn(2, 8, 5), torch.tensor([8, 6])
        >>> spelled = model(frames, lengths, torch.tensor([[2, 7, 5], [2, 9, 0]]))
        >>> spelled.logits.shape, spelled.frame_log_probs.shape
        (torch.Size([2, 3, 20]), torch.Size([2, 4, 20]))
    """

    logits: Tensor
    frame_log_probs: Tensor
    lengths: Tensor
    weights: Tensor | None = None


class ListenAttendSpell(Module):
    r"""A pyramid that listens, an LSTM that attends and spells, and a CTC head on the pyramid.

    .. math:: h = \mathrm{Listen}(x), \quad s_i = \mathrm{LSTM}([y_{i-1}; c_{i-1}], s_{i-1}), \quad
              c_i = \mathrm{attend}(s_i, h), \quad
              P(y_i) = \mathrm{softmax}(W_o \tanh(W_r [s_i; c_i]))

    .. math:: P_\mathrm{ctc}(\pi_j) = \mathrm{softmax}(W_c h_j)

    The decoder is one :class:`attnfast.nn.AttentionLSTM`, whose initial state is 0. Labels are ids
    from 4 on, as everywhere; CTC's blank is the id of padding. The model has the methods ``encode``
    and ``decode`` of :class:`Seq2Seq`, so that the searches of :mod:`attnfast.decoding`
    accept it.

    Args:
        encoder: maps frames and lengths to states and lengths.
        attention: of the decoder, a module of :mod:`attnfast.nn` with queries of ``hidden_dim``
            and keys of the encoder's features, or :class:`FixedContext`.
        vocab_size: V, labels and the four special ids.
        hidden_dim, embed_dim: features of the decoder's states, and of a letter.
        dropout: on letters and on the input of the output layer.

    Papers: Chan et al., ICASSP 2016, arXiv:1508.01211; Watanabe et al., "Hybrid CTC/Attention
    Architecture for End-to-End Speech Recognition", IEEE JSTSP 11(8), 2017.

    Example:
        >>> from attnfast.decoding import greedy_search
        >>> from attnfast.models import ListenAttendSpell, PyramidEncoder
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> model = ListenAttendSpell(PyramidEncoder(5, 4, layers=1), attention, 20, 6, 3).eval()
        >>> frames, lengths = torch.randn(2, 8, 5), torch.tensor([8, 6])
        >>> model(frames, lengths, torch.tensor([[2, 7, 5], [2, 9, 0]])).logits.shape
        torch.Size([2, 3, 20])
        >>> texts = greedy_search(model, frames, lengths).best
    """

    def __init__(
        self,
        encoder: PyramidEncoder,
        attention: nn.Module,
        vocab_size: int,
        hidden_dim: int,
        embed_dim: int,
        dropout: float = 0.0,
    ):
        super().__init__()
        if not isinstance(encoder, nn.Module) or not hasattr(encoder, "output_dim"):
            raise_type_error("encoder", "a PyramidEncoder", describe(encoder))
        check_sizes(vocab_size=vocab_size, hidden_dim=hidden_dim, embed_dim=embed_dim)
        check_share("dropout", dropout)
        context_dim = encoder.output_dim
        self.encoder = encoder
        self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=PAD)
        self.decoder = AttentionLSTM(
            embed_dim, hidden_dim, context_dim, attention, recurrence="attend_last"
        )
        self.readout = nn.Linear(hidden_dim + context_dim, hidden_dim)
        self.output = nn.Linear(hidden_dim, vocab_size)
        self.ctc = nn.Linear(context_dim, vocab_size)
        self.dropout = nn.Dropout(dropout)

    def output_limit(self, lengths: Tensor) -> Tensor:
        """Return the largest number of letters for recordings of ``lengths [B]`` frames.

        It is one letter per state plus the end, because no label is shorter than a state.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_tensor("lengths", lengths)
        check_numbers("lengths", lengths, lengths.numel(), 0, MAX_INT32)
        for _ in self.encoder.layers:
            lengths = (lengths + self.encoder.factor - 1) // self.encoder.factor
        return lengths.cpu() + 1

    def encode(self, frames: Tensor, lengths: Tensor) -> tuple[EncodedSpeech, RecurrentState]:
        """Encode recordings and project their keys, once.

        Args:
            frames: ``[B, T, features]``.
            lengths: ``[B]``, in frames.

        Returns:
            The encoded recordings, and the decoder's state before the first letter.

        Raises:
            ValueError, TypeError: an argument does not fit, or a frame is not finite.
        """
        states, lengths = self.encoder(frames, lengths)
        lengths = lengths.to(states.device)
        memory = self.decoder.attention.prepare(states, lengths)
        backend = getattr(self.decoder.attention, "backend", None)
        labels = linear(states, self.ctc.weight, self.ctc.bias, backend)
        labels = labels.log_softmax(-1, dtype=accumulation_dtype(labels.dtype))
        zeros = states.new_zeros(1, states.shape[0], self.decoder.hidden_size)
        return EncodedSpeech(memory, labels, lengths), RecurrentState(zeros, zeros)

    def _search_inputs(
        self, encoded: EncodedSpeech, state: RecurrentState, constraints: Constraints
    ) -> tuple[SearchInputs | None, str | None, str]:
        """Return the operator's arguments for a search, its backend, and why there is none."""
        backend, reason = select_search_backend(
            self, ListenAttendSpell, (AttentionLSTM,), (self.readout, self.output), encoded.memory,
            state.history,
        )  # fmt: skip
        if backend is None:
            return None, None, reason
        call = search_inputs(
            self.decoder._layer(0), self.decoder.attention, encoded.memory, state, constraints,
            backend, embedding=self.embedding.weight, weight_vocab=self.output.weight,
            bias_vocab=self.output.bias, readout=self.readout,
        )  # fmt: skip
        return call, backend, ""

    def decode(
        self,
        words: Tensor,
        state: RecurrentState,
        encoded: EncodedSpeech,
        need_weights: bool = False,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        """Read letters from ``state`` on.

        Args:
            words: ids ``[B, T]``.
            state: from :meth:`encode`, or from the last call.
            encoded: from :meth:`encode`.
            need_weights: return the attention weights too.

        Returns:
            ``logits [B, T, V]`` of the letter after each, the state after the last, and
            ``weights [B, T, Tk]`` if requested, in the columns of the attention's span, if any.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_source("encoded", encoded, EncodedSpeech, state)
        check_flag("need_weights", need_weights)
        try:
            return self._spell(words, state, encoded, need_weights, None)
        except Exception:
            context_dim, hidden = self.decoder.context_size, (1, self.decoder.hidden_size)
            check_step(words, state, encoded, "encoded", context_dim, hidden, self.output.weight)
            raise

    def _spell(
        self,
        words: Tensor,
        state: RecurrentState,
        encoded: EncodedSpeech,
        need_weights: bool,
        lengths: Tensor | None,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        result = self.decoder(
            self.dropout(embed("words", words, self.embedding)), encoded.memory, state,
            target_lengths=lengths, need_weights=need_weights,
        )  # fmt: skip
        backend = getattr(self.decoder.attention, "backend", None)
        read = self.dropout(torch.cat([result.states, result.contexts], -1))
        read = linear(read, self.readout.weight, self.readout.bias, backend).tanh()
        logits = linear(self.dropout(read), self.output.weight, self.output.bias, backend)
        return logits, result.state, result.weights

    def forward(
        self, frames: Tensor, lengths: Tensor, target_in: Tensor, need_weights: bool = False
    ) -> LASOutput:
        """Read recordings and the true letters before each letter.

        Args:
            frames, lengths: as in :meth:`encode`.
            target_in: ids ``[B, T]`` that begin with the start, padded with 0.
            need_weights: return the attention weights too.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_target(target_in, self.embedding, self.embedding.num_embeddings)
        check_flag("need_weights", need_weights)
        check_array("frames", frames, "floating-point", ("B", "T", "features"))
        if frames.shape[0] != target_in.shape[0]:
            raise_value_error(
                "target_in", f"of {frames.shape[0]} sequences, as frames", describe(target_in)
            )
        encoded, state = self.encode(frames, lengths)
        counts = (target_in != PAD).sum(-1)
        logits, _, weights = self._spell(target_in, state, encoded, need_weights, counts)
        return LASOutput(logits, encoded.frame_log_probs, encoded.lengths, weights)
