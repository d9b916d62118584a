"""Listen, attend and spell: a pyramid of BiLSTMs, a speller that attends, a CTC head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import check_flag, describe, refuse, refuse_type
from attnfast.models.seq2seq import (
    EOS,
    PAD,
    Encoder,
    check_ids,
    check_lengths,
    check_share,
    check_source,
    check_step,
    check_target,
    embed,
)
from attnfast.nn import AttentionLSTM, Memory, RecurrentState
from attnfast.nn._linear import linear
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import MOST, check_array, check_like, check_numbers, check_tensor
from attnfast.ops.operators import accumulation_dtype

#: CTC's blank: the id of padding, which is no label.
BLANK = PAD
#: Below it the logarithm of a product of probabilities has too few digits to divide by it.
LEAST = -1e6


def join_frames(frames: Tensor, lengths: Tensor, size: int = 2) -> tuple[Tensor, Tensor]:
    """Put ``size`` neighbours of ``frames [B, T, F]`` side by side, ``[B, ⌈T / size⌉, size · F]``.

    Beside it the lengths, ``⌈lengths / size⌉``. What a last group lacks is 0, as padding must be.
    """
    B, T, features = frames.shape
    frames = F.pad(frames, (0, 0, 0, -T % size))
    return frames.reshape(B, -(-T // size), size * features), (lengths + size - 1) // size


class PyramidEncoder(nn.Module):
    r"""BiLSTMs on top of each other, each of which reads its input's frames joined by two.

    .. math:: h^l_j = \mathrm{BiLSTM}(h^l_{j-1}, [h^{l-1}_{2j}; h^{l-1}_{2j+1}])

    L layers leave ⌈T / 2ᴸ⌉ of T frames, of which attention and CTC have the less to do. An odd
    frame at the end of a recording is joined with zeros.

    Args:
        features: of a frame.
        hidden_dim: H, features of each direction.
        layers: L; the paper has 3 above one that joins nothing.
        dropout: on what layers above the first read, and on the output.
        join: how many frames; 1 for a plain encoder.
        backend: of the recurrent layers; ``"reference"`` for PyTorch's own.

    Paper: Chan et al., "Listen, Attend and Spell", ICASSP 2016, arXiv:1508.01211.
    """

    def __init__(
        self,
        features: int,
        hidden_dim: int,
        layers: int = 3,
        dropout: float = 0.0,
        join: int = 2,
        backend: str | None = None,
    ):
        super().__init__()
        check_sizes(features=features, hidden_dim=hidden_dim, layers=layers, join=join)
        check_share("dropout", dropout)
        self.features, self.output_dim, self.join = features, 2 * hidden_dim, join
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Encoder(
                join * (2 * hidden_dim if number else features), hidden_dim, "lstm", backend=backend
            )
            for number in range(layers)
        )  # fmt: skip

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return states ``[B, ⌈T / 2ᴸ⌉, 2H]``, 0 in padding, and their lengths.

        Args:
            frames: ``[B, T, features]``.
            lengths: ``[B]``, each at least ``join ** layers``; frames beyond do not count.

        Raises:
            ValueError, TypeError: an argument does not fit, or a frame is not finite.
        """
        check_array("frames", frames, "real numbers", ("B", "T", self.features))
        check_like("frames", frames, next(self.parameters(), frames))
        least = self.join ** len(self.layers)
        if frames.shape[0] and frames.shape[1] < least:
            expected = f"at least {least} a recording, which the pyramid joins into one state"
            refuse("frames", expected, frames.shape[1])
        check_lengths(lengths, frames, whose="frames")
        if len(lengths) and int(lengths.min()) < least:
            found = int(lengths.min())
            refuse("lengths", f"at least {least}, what the pyramid makes one of", found)
        place = torch.arange(frames.shape[1], device=frames.device)
        exists = place < lengths.to(frames.device).unsqueeze(-1)
        states = frames.masked_fill(~exists.unsqueeze(-1), 0)  # the last group reads padding
        if not torch.compiler.is_compiling() and not states.isfinite().all():
            refuse("frames", "finite numbers", "NaN or infinity")
        for number, layer in enumerate(self.layers):
            states = self.dropout(states) if number else states
            states, lengths = join_frames(states, lengths, self.join)
            states = layer(states, lengths)
        return self.dropout(states), lengths


class Heard(NamedTuple):
    """A recording that has been read: what the speller attends to, and what CTC makes of it.

    ``frame_log_probs [B, Tk, V]``, of the label of each state, float32 for half types;
    ``lengths [B]`` of the states.
    """

    memory: Memory
    frame_log_probs: Tensor
    lengths: Tensor

    def index_select(self, index: Tensor) -> Heard:
        """Return the recordings ``index``."""
        return Heard(self.memory.index_select(index), *(x[index] for x in self[1:]))


class Spelled(NamedTuple):
    """What a model says of a whole target, and of the recording by CTC.

    ``logits [B, T, V]`` of the letter after each; ``frame_log_probs [B, Tk, V]`` of a label, and
    how many states have one, ``lengths [B]``; ``weights [B, T, Tk]``, None unless asked for.
    """

    logits: Tensor
    frame_log_probs: Tensor
    lengths: Tensor
    weights: Tensor | None = None


class ListenAttendSpell(nn.Module):
    r"""A pyramid that listens, an LSTM that attends and spells, and a CTC head on the pyramid.

    .. math:: h = \mathrm{Listen}(x), \quad s_i = \mathrm{LSTM}([y_{i-1}; c_{i-1}], s_{i-1}), \quad
              c_i = \mathrm{attend}(s_i, h), \quad
              P(y_i) = \mathrm{softmax}(W_o \tanh(W_r [s_i; c_i]))

    .. math:: P_\mathrm{ctc}(\pi_j) = \mathrm{softmax}(W_c h_j)

    The speller is one :class:`attnfast.nn.AttentionLSTM`, which begins with zeros. Labels are ids
    from 4 on, as everywhere; CTC's blank is the id of padding. It has the calls ``encode`` and
    ``decode`` of :class:`Seq2Seq`, so that :func:`greedy_search` and :func:`beam_search` take it.

    Args:
        encoder: frames and lengths to states and lengths.
        attention: of the speller, a module of :mod:`attnfast.nn` with queries of ``hidden_dim``
            and keys of the encoder's features, or :class:`FixedContext`.
        vocab_size: V, labels and the four special ids.
        hidden_dim, embed_dim: features of the speller's states, and of a letter.
        dropout: on letters and on what the output layer reads.

    Papers: Chan et al., ICASSP 2016, arXiv:1508.01211; Watanabe et al., "Hybrid CTC/Attention
    Architecture for End-to-End Speech Recognition", IEEE JSTSP 11(8), 2017.
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
            refuse_type("encoder", "a PyramidEncoder", describe(encoder))
        check_sizes(vocab_size=vocab_size, hidden_dim=hidden_dim, embed_dim=embed_dim)
        check_share("dropout", dropout)
        context_dim = encoder.output_dim
        self.encoder = encoder
        self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=PAD)
        self.speller = AttentionLSTM(
            embed_dim, hidden_dim, context_dim, attention, recurrence="attend_last"
        )
        self.readout = nn.Linear(hidden_dim + context_dim, hidden_dim)
        self.output = nn.Linear(hidden_dim, vocab_size)
        self.ctc = nn.Linear(context_dim, vocab_size)
        self.dropout = nn.Dropout(dropout)

    def output_limit(self, lengths: Tensor) -> Tensor:
        """Return how many letters, the end included, a recording of ``lengths [B]`` may have.

        They are as many as states, the end beside: no label is shorter than a state.
        """
        check_tensor("lengths", lengths)
        check_numbers("lengths", lengths, lengths.numel(), 0, MOST)
        for _ in self.encoder.layers:
            lengths = (lengths + self.encoder.join - 1) // self.encoder.join
        return lengths.cpu() + 1

    def encode(self, frames: Tensor, lengths: Tensor) -> tuple[Heard, RecurrentState]:
        """Listen to recordings, and project their keys, once.

        Args:
            frames: ``[B, T, features]``.
            lengths: ``[B]``.

        Returns:
            What the speller attends to, and its state before the first letter.
        """
        states, lengths = self.encoder(frames, lengths)
        lengths = lengths.to(states.device)
        memory = self.speller.attention.prepare(states, lengths)
        backend = getattr(self.speller.attention, "backend", None)
        labels = linear(states, self.ctc.weight, self.ctc.bias, backend)
        labels = labels.log_softmax(-1, dtype=accumulation_dtype(labels.dtype))
        zeros = states.new_zeros(1, states.shape[0], self.speller.hidden_size)
        return Heard(memory, labels, lengths), RecurrentState(zeros, zeros)

    def decode(
        self, words: Tensor, state: RecurrentState, heard: Heard, need_weights: bool = False
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        """Read the letters ``words [B, T]`` from ``state`` on.

        Returns:
            ``logits [B, T, V]`` of the letter after each, the state after the last, and
            ``weights [B, T, Tk]`` if asked for, in the columns of its span if attention has one.
        """
        check_source("heard", heard, Heard, state)
        check_flag("need_weights", need_weights)
        try:
            return self._spell(words, state, heard, need_weights, None)
        except Exception:
            context_dim, hidden = self.speller.context_size, (1, self.speller.hidden_size)
            check_step(words, state, heard, "heard", context_dim, hidden, self.output.weight)
            raise

    def _spell(
        self, words: Tensor, state: Any, heard: Heard, need_weights: bool, lengths: Tensor | None
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        result = self.speller(
            self.dropout(embed("words", words, self.embedding)), heard.memory, state,
            target_lengths=lengths, need_weights=need_weights,
        )  # fmt: skip
        backend = getattr(self.speller.attention, "backend", None)
        read = self.dropout(torch.cat([result.states, result.contexts], -1))
        read = linear(read, self.readout.weight, self.readout.bias, backend).tanh()
        logits = linear(self.dropout(read), self.output.weight, self.output.bias, backend)
        return logits, result.state, result.weights

    def forward(
        self, frames: Tensor, lengths: Tensor, target_in: Tensor, need_weights: bool = False
    ) -> Spelled:
        """Read the true letters before each, ``target_in [B, T]``, padded with 0."""
        check_target(target_in, self.embedding, self.embedding.num_embeddings)
        check_flag("need_weights", need_weights)
        check_array("frames", frames, "real numbers", ("B", "T", "features"))
        if frames.shape[0] != target_in.shape[0]:
            refuse("target_in", f"of {frames.shape[0]} sequences, as frames", describe(target_in))
        heard, state = self.encode(frames, lengths)
        counts = (target_in != PAD).sum(-1)
        logits, _, weights = self._spell(target_in, state, heard, need_weights, counts)
        return Spelled(logits, heard.frame_log_probs, heard.lengths, weights)


class Prefix(NamedTuple):
    """What :class:`CTCPrefixScorer` keeps of hypotheses g, in logarithms of float64.

    ``blank`` and ``label [R, T + 1]``: the probability of all paths of the first t states that
    spell g and end with a blank, or with its last label; ``scores [R, V]``: of g and each label,
    as a beginning, and of g alone at the end's id; ``last [R, 1]``, its last label.
    """

    blank: Tensor
    label: Tensor
    scores: Tensor
    last: Tensor

    def index_select(self, index: Tensor) -> Prefix:
        """Return what is kept of the hypotheses ``index``."""
        return Prefix(*(x[index] for x in self))


class CTCPrefixScorer:
    r"""Says how probable CTC holds each label after a hypothesis: a scorer of :func:`beam_search`.

    The prefix probability of g is that of all texts that begin with it. With
    :math:`\gamma^n_t(g)` and :math:`\gamma^b_t(g)`, the probabilities that the first t states say g
    and end with its last label, or with a blank:

    .. math:: \Phi_t(c) = \gamma^b_t(g) + [c \ne g_{-1}]\, \gamma^n_t(g), \quad
              \Psi(gc) = \sum_t \Phi_{t-1}(c)\, p_t(c), \quad
              \Psi(g\,\mathrm{end}) = \gamma^b_T(g) + \gamma^n_T(g)

    .. math:: \gamma^n_t(gc) = (\gamma^n_{t-1}(gc) + \Phi_{t-1}(c))\, p_t(c), \quad
              \gamma^b_t(gc) = (\gamma^b_{t-1}(gc) + \gamma^n_{t-1}(gc))\, p_t(\mathrm{blank})

    A step costs R · T · V for R hypotheses, T states and V labels. The recurrences of γ over the
    states are cumulative sums, all states at once.

    Papers: Graves, "Supervised Sequence Labelling with Recurrent Neural Networks", 2008, section
    7.5; Watanabe et al., IEEE JSTSP 11(8), 2017, algorithm 2.
    """

    def score(self, words: Tensor, state: Prefix | None, heard: Heard) -> tuple[Tensor, Prefix]:
        r"""Read the last word of every hypothesis, and score the next one.

        Args:
            words: ``[R, 1]``, the words that are new in the hypotheses.
            state: what the last call returned, or None where ``words`` are the start.
            heard: the recordings, one a hypothesis.

        Returns:
            :math:`\ln \Psi(gc) - \ln \Psi(g)`, ``[R, V]``, of the dtype of
            ``frame_log_probs``; and the state.
        """
        if not hasattr(heard, "frame_log_probs"):
            got = type(heard).__name__
            refuse_type("heard", "of a model with frame_log_probs, as ListenAttendSpell's", got)
        log_p = heard.frame_log_probs
        check_array("heard.frame_log_probs", log_p, "real numbers", ("R", "T", "V"))
        R, T, V = log_p.shape
        log_p = log_p.double()
        check_array("words", words, "int64", (R, 1), like=log_p, of="heard")
        check_ids("words", words, V)
        if not isinstance(state, (Prefix, type(None))):
            refuse_type("state", "what score(...) returned, or None", describe(state))
        if state is not None:
            shapes = {"blank": (R, T + 1), "label": (R, T + 1), "scores": (R, V), "last": (R, 1)}
            for name, shape in shapes.items():
                kind = "int64" if name == "last" else "real numbers"
                x = getattr(state, name)
                check_array(f"state.{name}", x, kind, shape, like=log_p, of="heard")
        if state is None:
            blank = _summed(log_p[..., BLANK])
            label = torch.full_like(blank, -torch.inf)
            total, last = blank.new_zeros(len(blank), 1), words
        else:
            last = words
            entering = torch.logaddexp(state.blank, state.label)
            entering = torch.where(words == state.last, state.blank, entering)
            label = _walked(entering, _of_label(log_p, words))
            blank = _walked(label, log_p[..., BLANK])
            total = state.scores.gather(-1, words)
        both = torch.logaddexp(blank, label)
        place = torch.arange(log_p.shape[1], device=log_p.device)
        log_p = log_p.masked_fill((place >= heard.lengths.unsqueeze(-1)).unsqueeze(-1), -torch.inf)
        scores = (both[:, :-1].unsqueeze(-1) + log_p).logsumexp(1)
        again = blank[:, :-1] + _of_label(log_p, last)
        scores = scores.scatter(-1, last, again.logsumexp(1, keepdim=True))
        scores[:, EOS] = both.gather(-1, heard.lengths.unsqueeze(-1)).squeeze(-1)
        gain = torch.where(total == -torch.inf, total, scores - total)
        return gain.to(heard.frame_log_probs.dtype), Prefix(blank, label, scores, last)


def _of_label(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return of ``log_p [R, T, V]`` what every state says of ``labels [R, 1]``, ``[R, T]``."""
    return log_p.gather(-1, labels.unsqueeze(1).expand(-1, log_p.shape[1], 1)).squeeze(-1)


def _summed(x: Tensor) -> Tensor:
    """Return Σ_{s ≤ t} x_s for t from 0 to T, ``[R, T + 1]``."""
    return F.pad(x.cumsum(-1), (1, 0))


def _walked(entering: Tensor, log_p: Tensor) -> Tensor:
    """Return ln y of y_t = (y_{t−1} + a_{t−1}) p_t from y_0 = 0 on, ``[R, T + 1]``.

    ``entering [R, T + 1]`` is ln a, ``log_p [R, T]`` ln p. With P_t = Π_{s ≤ t} p_s it is
    y_t = P_t Σ_{s < t} a_s / P_s. Where P is too small to divide by, the sums of 1, 2, 4, … states
    are put together.
    """
    product = _summed(log_p)
    if not (product > LEAST).all():
        y, product, size = entering[:, :-1] + log_p, log_p, 1
        while size < log_p.shape[1]:
            more = torch.logaddexp(y[:, size:], y[:, :-size] + product[:, size:])
            y = torch.cat([y[:, :size], more], 1)
            longer = product[:, size:] + product[:, :-size]
            product, size = torch.cat([product[:, :size], longer], 1), 2 * size
        return F.pad(y, (1, 0), value=-torch.inf)
    sums = (entering - product)[:, :-1].logcumsumexp(-1)
    return torch.cat([torch.full_like(sums[:, :1], -torch.inf), product[:, 1:] + sums], -1)
