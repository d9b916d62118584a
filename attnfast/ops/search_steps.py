"""Searches in steps of fixed shapes, which a GPU repeats as one CUDA graph.

A step changes tensors in place and never synchronizes: the rows of finished sentences are computed
too, and ignored. On a GPU the second step is captured, and every later one replays it. After every
eighth step the search synchronizes, to test whether all sentences are finished.

PyTorch computes products and cells, and draws words. The best backends compute attention and
copying, and :mod:`attnfast.kernels.search` scores words and chooses hypotheses. Without a history
the K hypotheses of a sentence are K queries of its keys; with one, each has a copy of the keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnfast._utils.checks import raise_value_error
from attnfast.ops import dispatch
from attnfast.ops.attention import AttentionInputs
from attnfast.ops.backends import select_backend
from attnfast.ops.copying import COPYING, CopyInputs
from attnfast.ops.coverage import COVERAGE, CoverageInputs
from attnfast.ops.cuda_graphs import capture
from attnfast.ops.recurrent import RecurrentInputs
from attnfast.ops.reference import recurrent, widen_weights
from attnfast.ops.reference_search import score_words
from attnfast.ops.search import SearchInputs, SearchOutputs, layer_of

#: The number of steps after which a search tests whether all sentences are finished.
STEPS_PER_SYNC = 8

#: The arguments of which each hypothesis needs a row.
REPEATED = ("hidden", "cell", "feed", "coverage", "previous", "source")
#: Those of attention with a history, where each hypothesis is a row of its own.
OF_ATTENTION = ("key", "value", "mask", "lengths", "inverse_fertility", "transition_prob")


@torch.no_grad()
def search(call: SearchInputs) -> SearchOutputs:
    """Continue the hypotheses of each sentence, by the best words or those drawn, at every step."""
    if call.int8:
        raise_value_error("int8", "False: products in 8 bits are for CPUs", "True")
    steps = (_BeamSearch if call.numbers is None else _Sampling)(call)
    if call.most and len(call.limits):
        steps.run()
    return steps.outputs()


def draw_words(logits: Tensor, numbers: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return the word ``[R]`` of each row of ``logits [R, V]`` at its number in [0, 1).

    It is the first word at which the sum of the probabilities so far exceeds the number, from the
    most probable word on if there is a ``top_k`` or ``top_p``.
    """
    probs = logits.double().softmax(-1)
    words = None
    if top_k or top_p < 1:
        probs, words = probs.sort(dim=-1, descending=True, stable=True)
        if top_k:
            probs[:, top_k:] = 0
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(before >= top_p * probs.sum(-1, keepdim=True), 0)
    sums = probs.cumsum(-1)
    index = (sums <= numbers.unsqueeze(-1) * sums[:, -1:]).sum(-1, keepdim=True)
    index = index.clamp_max(logits.shape[-1] - 1)
    return (index if words is None else words.gather(-1, index)).squeeze(-1)


def _next_state(
    call: RecurrentInputs, reads: list[Tensor], h: Tensor, c: Tensor | None, int8: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the next state ``[R, H]``, an LSTM's next cell or None, and no gates."""
    x = reads[0] if len(reads) == 1 else torch.cat(reads, -1)
    biases = [call.bias_ih, call.bias_hh]
    if (call.bias_ih is None) != (call.bias_hh is None):  # a GPU's cells take both or none
        biases = [h.new_zeros(len(call.weight_hh)) if b is None else b for b in biases]
    parameters: Any = call.weight_ih, call.weight_hh, *biases
    if call.mode == "lstm":
        h, c = torch.lstm_cell(x, (h, c), *parameters)  # type: ignore[arg-type]
    else:
        cell = torch.gru_cell if call.mode == "gru" else torch.rnn_tanh_cell
        h = cell(x, h, *parameters)
    return h, c, h[:, :0]


class _SearchState:
    """The state of a search of B sentences with K hypotheses each, in R = B K rows."""

    def __init__(self, call: SearchInputs):
        from attnfast.kernels import search as kernels

        self.kernels, call = kernels, widen_weights(call)
        like, B, K, T = call.hidden, len(call.limits), call.beam, call.most
        self.B, self.K, self.R, self.T, self.device = B, K, B * K, T, like.device
        if call.word_mask is not None:
            call = call._replace(word_mask=call.word_mask.contiguous())
        names = REPEATED if call.coverage is None else (*REPEATED, *OF_ATTENTION)
        given = {name: x for name in names if (x := getattr(call, name)) is not None}
        repeated = {name: self.of_rows(name, x) for name, x in given.items()}
        self.sentences, self.call = call, call._replace(**repeated)  # type: ignore[arg-type]
        self.Tk = call.key.shape[1]  # type: ignore[union-attr]
        self.steps = kernels.Steps(
            self.long(T, self.R), like.new_zeros(T, self.R), self.long(T, self.R), self.long(1)
        )
        # The words that the next step reads.
        self.word = self.long(self.R) + call.begin
        state: dict[str, Tensor | None] = {
            name: getattr(self.call, name) for name in ("hidden", "cell", "coverage", "previous")
        }
        if not call.attends_first and call.weight_ih.shape[1] > call.embedding.shape[1]:
            size = call.weight_ih.shape[1] - call.embedding.shape[1]
            state["feed"] = self.call.feed
            if call.feed is None:
                state["feed"] = like.new_zeros(self.R, size)
        self.state = {name: x.clone() for name, x in state.items() if x is not None}
        self.ended = call.limits <= 0
        self.is_nan = torch.zeros_like(self.ended)
        # An n-gram of more words than a sentence has never repeats.
        self.history = self.long(self.R, T) if 0 < call.no_repeat_ngram <= T else None
        self.weights = like.new_zeros(T, self.R, self.Tk) if call.need_weights else None

    def long(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=self.device)

    def of_rows(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor with the row of each sentence K times."""
        axis = x.dim() - 2 if name in ("hidden", "cell") else 0
        if name == "mask":
            x = x.expand(self.B, -1, -1)
        shape = [*x.shape[:axis], self.B, self.K, *x.shape[axis + 1 :]]
        return x.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1)

    def run(self) -> None:
        """Take steps until all sentences have ended."""
        graph = None
        on_gpu = self.device.type == "cuda"
        captured = on_gpu and torch.cuda.is_current_stream_capturing()  # in a graph of the caller
        captures = on_gpu and not captured
        for t in range(self.T):
            if t and t % STEPS_PER_SYNC == 0 and not captured and bool(self.ended.all()):
                return
            if captures and t == 1:
                graph = capture(self.step)
            if graph is None:
                self.step()
            else:
                graph.replay()

    def step(self) -> None:
        """Take a step; write the next state into the memory of the last."""
        call, state, t = self.call, self.state, self.steps.t
        word = self.word
        if call.source is not None:
            word = word.masked_fill(word >= len(call.embedding), call.unknown)
        x = call.embedding[word]
        if call.embedding_scale != 1:
            x = x * call.embedding_scale
        names = ("key_bounds", "transition_prob")
        now = {n: y.index_select(1, t) for n in names if (y := getattr(call, n)) is not None}
        step = call._replace(**now, **state)  # type: ignore[arg-type]
        made = recurrent(
            layer_of(step, x.unsqueeze(1)), attend=self.attend,
            attend_with_history=self.attend_with_history, next_state=_next_state,
        )  # fmt: skip
        logits, after = score_words(step, made, x, self.copy)
        weights = made.weights.view(self.R, self.Tk)
        if self.weights is not None:
            self.weights.index_copy_(0, t, weights.unsqueeze(0))
        row = self.continue_hypotheses(logits, weights)
        if self.history is not None:
            if row is not None:
                self.history.copy_(self.history.index_select(0, row))
            self.history.index_copy_(1, t, self.word.unsqueeze(1))
        for name, new in after.items():
            if new is None:
                continue
            if row is None:
                state[name].copy_(new)
            else:
                axis = new.dim() - 2 if name in ("hidden", "cell") else 0
                torch.index_select(new, axis, row, out=state[name])
        t.add_(1)

    def attend(self, call: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return contexts ``[R, 1, Dv]`` and weights ``[R, 1, Tk]`` of queries ``[R, 1, A]``."""
        bounds = call.key_bounds
        several = call._replace(
            query=call.query.view(self.B, self.K, call.query.shape[-1]), need_weights=True,
            key_bounds=None if bounds is None else bounds.expand(-1, self.K, -1).contiguous(),
        )  # fmt: skip
        backend = select_backend(None, self.device, call.query.dtype, score=call.score)
        context, weights, *_ = dispatch.run_attention(several, backend)
        assert weights is not None
        context = context.reshape(self.R, 1, context.shape[-1])
        return context, weights.reshape(self.R, 1, self.Tk)

    def attend_with_history(self, call: CoverageInputs) -> Any:
        """Return the results of ``coverage_attention``."""
        filters = 0 if call.filters is None else call.filters.shape[-3]
        request = self.device, call.query.dtype, COVERAGE.name, True
        backend = select_backend(None, *request, filters=filters, score=call.score)
        return dispatch.run(COVERAGE, call, backend)

    def copy(self, call: CopyInputs) -> Any:
        """Return the results of ``copy_distribution``."""
        backend = select_backend(None, self.device, call.logits.dtype, COPYING.name)
        return dispatch.run(COPYING, call, backend)

    def continue_hypotheses(self, logits: Tensor, weights: Tensor) -> Tensor | None:
        """Store the hypotheses after the step; return the rows that they continue, or None."""
        raise NotImplementedError

    def outputs(self) -> SearchOutputs:
        """Return the hypotheses that were found."""
        raise NotImplementedError

    def as_outputs(
        self, lengths: Tensor, slots: Tensor, scores: Tensor, last: Tensor | None = None
    ) -> SearchOutputs:
        """Return N hypotheses ``[B, N]``; of a sentence with NaN lengths are −1, scores −∞."""
        is_nan = self.is_nan.unsqueeze(-1)
        lengths = lengths.masked_fill(is_nan, 0)
        words, word_scores, weights = self.kernels.trace(
            self.steps, self.weights, lengths, slots, last, self.call
        )
        lengths = lengths.masked_fill(is_nan, -1)
        scores = scores.masked_fill(is_nan, -math.inf)
        return SearchOutputs(words, word_scores, lengths, scores, weights)


class _BeamSearch(_SearchState):
    """The best hypotheses."""

    def __init__(self, call: SearchInputs):
        super().__init__(call)
        B, K, T, like, call = self.B, self.K, self.T, self.call.hidden, self.sentences
        total = like.new_full((B, K), -math.inf)
        total[:, 0] = 0  # only the first hypothesis may continue at first
        covered = exists = None
        if call.coverage_penalty:
            covered = like.new_zeros(self.R, self.Tk)
            exists = torch.ones(B, self.Tk, dtype=torch.bool, device=self.device)
            if call.lengths is not None:
                exists &= torch.arange(self.Tk, device=self.device) < call.lengths.unsqueeze(1)
            if call.mask is not None:
                exists &= call.mask.squeeze(1)
        self.beam = self.kernels.Beam(
            total.flatten(), self.long(self.R), self.word, self.ended, self.is_nan,
            self.long(B), like.new_full((B,), -math.inf), self.long(B),
            like.new_full((T, B, K), -math.inf), self.long(T, B, K) - 1, like.new_zeros(T, B, K),
            covered, exists,
        )  # fmt: skip

    def continue_hypotheses(self, logits: Tensor, weights: Tensor) -> Tensor:
        given = self.call, self.steps
        candidates = self.kernels.find_candidates(logits, *given, self.history)
        self.kernels.continue_beam(logits, candidates, weights, *given, self.beam)
        return self.beam.row

    def outputs(self) -> SearchOutputs:
        N, beam = self.call.n_best, self.beam

        def of_sentences(x: Tensor) -> Tensor:  # [T, B, K] as [B, T K]
            return x.transpose(0, 1).flatten(1)

        if not self.T:
            lengths = self.long(self.B, N)
            return self.as_outputs(lengths, lengths, beam.total.new_full((self.B, N), -math.inf))
        # A hypothesis may have a score of −∞: those that exist precede empty places.
        exists = of_sentences(beam.final_slot) >= 0
        first = exists.int().sort(dim=-1, descending=True, stable=True).indices
        scores = of_sentences(beam.final).gather(1, first)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        scores, index = scores[:, :N], first.gather(1, order[:, :N])
        slots, last = (
            of_sentences(x).gather(1, index) for x in (beam.final_slot, beam.final_score)
        )
        rank = torch.arange(N, device=self.device)
        exists = rank < beam.num_finished.unsqueeze(1)
        # The first hypothesis is the result where none could end.
        unfinished = beam.length.unsqueeze(1) * (rank == 0)
        lengths = torch.where(exists, index // self.K + 1, unfinished)
        last = last.masked_fill(~exists, math.nan)
        return self.as_outputs(lengths, slots.masked_fill(~exists, 0), scores, last)


class _Sampling(_SearchState):
    """Hypotheses that continue independently of each other, with drawn words."""

    def __init__(self, call: SearchInputs):
        super().__init__(call)
        shape = self.B, self.K
        self.slots = torch.arange(self.K, device=self.device).expand(shape)
        self.steps.parents.copy_(self.slots.flatten())
        self.total = call.hidden.new_zeros(shape)
        self.lengths, self.done = self.long(*shape), torch.zeros_like(self.slots, dtype=torch.bool)

    def continue_hypotheses(self, logits: Tensor, weights: Tensor) -> None:
        call, steps = self.call, self.steps
        lse, log_probs = self.kernels.log_probs(logits, call, steps, self.history)
        is_nan = ~self.ended & lse.isnan().view(self.B, self.K).any(-1)
        live = ~(self.ended | is_nan).unsqueeze(-1) & ~self.done
        number = call.numbers.index_select(2, steps.t).flatten()  # type: ignore[union-attr]
        scaled = log_probs.double() / call.temperature
        words = draw_words(scaled, number, call.top_k, call.top_p)
        scores = log_probs.gather(-1, words.unsqueeze(-1)).squeeze(-1)
        steps.words.index_copy_(0, steps.t, words.unsqueeze(0))
        steps.scores.index_copy_(0, steps.t, scores.unsqueeze(0))
        words, scores = words.view_as(live), scores.view_as(live)
        stuck = live & (log_probs == -math.inf).all(-1).view_as(live)  # no word may come
        says = live & ~stuck
        self.total += torch.where(says, scores, 0)
        self.total.masked_fill_(stuck, -math.inf)
        self.lengths += says
        self.done |= stuck | (says & (words == call.end))
        self.word.copy_(torch.where(says, words, self.word.view_as(words)).flatten())
        self.is_nan |= is_nan
        self.ended |= is_nan | self.done.all(-1)

    def outputs(self) -> SearchOutputs:
        scores = self.total.masked_fill((self.call.limits <= 0).unsqueeze(-1), -math.inf)
        return self.as_outputs(self.lengths, self.slots, scores)
