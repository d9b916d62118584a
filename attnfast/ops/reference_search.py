"""The oracle of searches: hypotheses are lists of words, sentence by sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast.ops.copying import LOWEST, CopyInputs, CopyOutputs
from attnfast.ops.recurrent import RecurrentOutputs
from attnfast.ops.reference import copy_distribution, product, recurrent, widen_weights
from attnfast.ops.search import (
    LEAST_COVERAGE,
    SearchInputs,
    SearchOutputs,
    gate_reads_state,
    layer_of,
    reads_input,
)


def search(call: SearchInputs) -> SearchOutputs:
    """Continue the hypotheses of each sentence, by the best words or those drawn, at every step."""
    call = widen_weights(call)
    B, K = len(call.limits), call.beam
    rows = torch.arange(B).repeat_interleave(K)
    names = (
        "hidden", "cell", "feed", "key", "value", "mask", "lengths", "key_bounds",
        "inverse_fertility", "transition_prob", "coverage", "previous", "source",
    )  # fmt: skip
    given = {name: x for name in names if (x := getattr(call, name)) is not None}
    repeated = {
        name: x.index_select(-2, rows) if name in ("hidden", "cell") else x[rows]
        for name, x in given.items()
        if name in ("hidden", "cell") or len(x) == B
    }
    several: Any = _Beam if call.numbers is None else _Draws
    beams = [several(call, b) for b in range(B)]
    call = call._replace(**repeated)  # type: ignore[arg-type]
    word = call.limits.new_full((B * K,), call.begin)
    for t in range(call.most):
        known = word.masked_fill(word >= len(call.embedding), call.unknown)
        x = call.embedding[known] * call.embedding_scale
        bounds = None if call.key_bounds is None else call.key_bounds[:, t : t + 1]
        u = None if call.transition_prob is None else call.transition_prob[:, t : t + 1]
        step = call._replace(key_bounds=bounds, transition_prob=u)
        layer = layer_of(step, x.unsqueeze(1))
        made = recurrent(layer, call.int8)
        log_probs, state = next_words(call, made, x)
        parents = []
        for b, beam in enumerate(beams):
            part = slice(b * K, (b + 1) * K)
            parents += [b * K + k for k in beam.step(log_probs[part], made.weights[part, 0])]
        word = call.limits.new_tensor([w for beam in beams for w in beam.last_words])
        chosen = {name: x[..., parents, :] for name, x in state.items() if x is not None}
        call = call._replace(**chosen)  # type: ignore[arg-type]
        if all(beam.ended for beam in beams):
            break
    outputs = [beam.outputs() for beam in beams]
    like, n = call.hidden, call.n_best
    shapes = [(B, n, call.most), (B, n, call.most), (B, n), (B, n)]
    kinds = [call.limits, like, call.limits, like, like]
    columns = [list(x) for x in zip(*outputs)] if outputs else [[]] * 5
    made_of = [like.new_tensor(x).to(kind.dtype) for x, kind in zip(columns[:4], kinds)]
    weights = like.new_empty(0)
    if call.need_weights:
        Tk = given["key"].shape[1]
        weights = like.new_zeros(B, n, call.most, Tk)
        for b, of_sentence in enumerate(columns[4]):
            for i, w in enumerate(of_sentence):
                weights[b, i, : len(w)] = torch.stack(w) if w else 0
    return SearchOutputs(*(x.view(y) for x, y in zip(made_of, shapes)), weights)  # type: ignore[call-arg]


def next_words(
    call: SearchInputs, made: RecurrentOutputs, x: Tensor
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the log-probabilities of all words, and the state after the step."""
    logits, state = score_words(call, made, x)
    if call.word_mask is not None:
        several = len(logits) // max(len(call.word_mask), 1)  # rows of a mask
        mask = call.word_mask.unsqueeze(1).expand(-1, several, -1).flatten(0, 1)
        logits = logits.masked_fill(~mask, -math.inf)
    none = (logits == -math.inf).all(-1, keepdim=True)
    return logits.log_softmax(-1).masked_fill(none, -math.inf), state


def score_words(
    call: SearchInputs,
    made: RecurrentOutputs,
    x: Tensor,
    copy: Callable[[CopyInputs], CopyOutputs] = copy_distribution,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the logits of all words, whatever may come, and the state after the step.

    With copying they are log-probabilities, which ``copy`` computes.
    """
    states, context = made.states[..., 0, :], made.contexts[:, 0]
    h = states if states.dim() == 2 else states[-1]
    output = None if call.weight_output is None else made.attentional[:, 0]
    feeds = not call.attends_first and call.weight_ih.shape[1] > x.shape[1]
    fed = (context if output is None else output) if feeds else None
    if call.weight_readout is not None:
        read = [h, context, x] if reads_input(call) else [h, context]
        output = product(read, call.weight_readout, call.bias_readout, call.int8)
        output = output.tanh()
    elif output is None:
        output = torch.cat([h, context, x], -1)[:, : call.weight_vocab.shape[1]]
    logits = product([output], call.weight_vocab, call.bias_vocab, call.int8)  # type: ignore[list-item]
    if call.source is not None:
        read = [h, context, x] if gate_reads_state(call) else [output]  # type: ignore[list-item]
        gate = torch.nn.functional.linear(
            torch.cat(read, -1),
            call.weight_pointer,  # type: ignore[arg-type]
            call.bias_pointer,
        )
        terms = logits.unsqueeze(1), made.weights, call.source, gate
        logits = copy(CopyInputs(*terms, call.num_oov, log=True)).distribution[:, 0]
        logits = logits.masked_fill(logits == LOWEST, -math.inf)
    cell = None if call.cell is None else made.cells[..., 0, :]
    state = {"hidden": states, "cell": cell, "feed": fed}
    if call.coverage is not None:
        weights = made.weights if call.transition_prob is None else made.log_weights
        state |= {"coverage": made.coverage, "previous": weights[:, 0]}
    return logits, state


class _Hypothesis(NamedTuple):
    """The words of a hypothesis and their scores; ``total`` decides, ``ends`` with the end."""

    total: float
    words: list[int]
    scores: list[float]
    weights: list[Tensor]
    ends: bool = False


class _Several:
    """The hypotheses of one sentence."""

    def __init__(self, call: SearchInputs, b: int):
        self.call, self.limit, self.b = call, int(call.limits[b]), b
        self.alive = [_Hypothesis(0.0, [], [], [])]
        self.finished: list[_Hypothesis] = []
        self.ended, self.has_nan = self.limit <= 0, False

    @property
    def last_words(self) -> list[int]:
        """The word that each of K hypotheses reads next; the start for those that are none."""
        words = [(x.words or [self.call.begin])[-1] for x in self.alive]
        return [*words, *[self.call.begin] * (self.call.beam - len(words))]

    def allowed(self, log_probs: Tensor, words: list[int]) -> Tensor:
        """Return the log-probabilities of the next word, −∞ where a rule forbids it."""
        call, t, n = self.call, len(words), self.call.no_repeat_ngram
        log_probs = log_probs.clone()
        everything = torch.arange(len(log_probs))
        prefix = [] if call.prefix is None else call.prefix[self.b].tolist()
        if t < len(prefix) and prefix[t] >= 0:
            log_probs[everything != prefix[t]] = -math.inf
            return log_probs
        if t < call.min_length and call.end >= 0:
            log_probs[call.end] = -math.inf
        if t + 1 >= self.limit:
            log_probs[everything != call.end] = -math.inf
        for i in range(t - n + 1 if n else 0):
            if words[i : i + n - 1] == words[t - n + 1 :]:
                log_probs[words[i + n - 1]] = -math.inf
        return log_probs

    def extend(self, x: _Hypothesis, word: int, score: float, total: float, weights: Tensor) -> Any:
        """Return a hypothesis with one more word."""
        ends = word == self.call.end
        return _Hypothesis(total, [*x.words, word], [*x.scores, score], [*x.weights, weights], ends)

    def best(self) -> list[_Hypothesis]:
        """Return the hypotheses in the order of the outputs."""
        return self.finished

    def outputs(self) -> tuple[list[Any], ...]:
        """Return words, their scores, lengths, scores and weights of N hypotheses."""
        n, most = self.call.n_best, self.call.most
        best = [] if self.has_nan else self.best()[:n]
        best = [*best, *[_Hypothesis(-math.inf, [], [], [])] * (n - len(best))]
        words, scores = (
            [[*part, *[0] * (most - len(part))] for part in parts]
            for parts in ([x.words for x in best], [x.scores for x in best])
        )
        lengths = [-1 if self.has_nan else len(x.words) for x in best]
        return words, scores, lengths, [x.total for x in best], [x.weights for x in best]


class _Draws(_Several):
    """Hypotheses that go on alone, by words that are drawn."""

    def __init__(self, call: SearchInputs, b: int):
        super().__init__(call, b)
        self.alive = self.alive * call.beam
        self.done: list[bool] = [False] * call.beam

    def step(self, log_probs: Tensor, weights: Tensor) -> list[int]:
        """Continue the hypotheses; return their own numbers."""
        K, call = self.call.beam, self.call
        if not self.ended and log_probs.isnan().any():
            self.ended = self.has_nan = True
        for k, x in enumerate(self.alive):
            if self.ended or self.done[k]:
                continue
            left = self.allowed(log_probs[k], x.words)
            number = float(call.numbers[self.b, k, len(x.words)])  # type: ignore[index]
            word = _draw(left / call.temperature, number, call.top_k, call.top_p)
            self.done[k] = word is None or word == call.end
            if word is None:
                self.alive[k] = x._replace(total=-math.inf)
                continue
            score = float(left[word])
            self.alive[k] = self.extend(x, word, score, x.total + score, weights[k])
        self.ended |= all(self.done)
        return list(range(K))

    def best(self) -> list[_Hypothesis]:
        return self.alive if self.limit > 0 else []


def _draw(logits: Tensor, number: float, top_k: int, top_p: float) -> int | None:
    """Return the word at a number in [0, 1), or None if no word may come."""
    if (logits == -math.inf).all():
        return None
    probs = logits.softmax(-1).tolist()
    words = list(range(len(probs)))
    if top_k or top_p < 1:
        words.sort(key=lambda word: -probs[word])
    words = words[:top_k] if top_k else words
    total, kept = sum(probs[word] for word in words), list[int]()
    for word in words:
        if sum(probs[x] for x in kept) < top_p * total:
            kept.append(word)
    total, part = sum(probs[word] for word in kept), 0.0
    for word in kept:
        part += probs[word]
        if part > number * total:
            return word
    return kept[-1]


class _Beam(_Several):
    """The best hypotheses."""

    def step(self, log_probs: Tensor, weights: Tensor) -> list[int]:
        """Continue the hypotheses; return the parents of K hypotheses, 0 for those that are none.

        ``log_probs [K, V]`` are of all words, ``weights [K, Tk]`` of the attention.
        """
        call, K, end = self.call, self.call.beam, self.call.end
        if self.ended:
            return [0] * K
        if log_probs[: len(self.alive)].isnan().any():
            self.ended = self.has_nan = True
            return [0] * K
        options = []
        for k, x in enumerate(self.alive):
            left = self.allowed(log_probs[k], x.words).tolist()
            words = range(len(left)) if end < 0 else [end, *range(end), *range(end + 1, len(left))]
            for word in words:
                total = x.total + left[word] + (0 if word == end else call.length_bonus)
                if left[word] > -math.inf:
                    options.append((total, k, word, left[word]))
        options.sort(key=lambda option: -option[0])
        going: list[_Hypothesis] = []
        parents = []
        normaliser = ((5 + len(self.alive[0].words) + 1) / 6) ** call.length_penalty
        for rank, (total, k, word, score) in enumerate(options[: 2 * K]):
            new = self.extend(self.alive[k], word, score, total, weights[k])
            if word == end and rank < K:
                final = total / normaliser + call.coverage_penalty * self.uncovered(new)
                self.finished.append(new._replace(total=final))
            elif word != end and len(going) < K:
                going.append(new)
                parents.append(k)
        best = max((x.total for x in self.finished), default=-math.inf)
        if not going or (len(self.finished) >= K and best >= going[0].total / normaliser):
            self.ended = True
            if not self.finished:
                self.finished = [self.alive[0]._replace(total=-math.inf)]
            return [0] * K
        self.alive = going
        return [*parents, *[0] * (K - len(parents))]

    def uncovered(self, x: _Hypothesis) -> float:
        """Return Σ_j log min(Σ_t a_tj, 1) over the keys that exist."""
        call, sums = self.call, torch.stack(x.weights).sum(0)
        logs = sums.clamp(LEAST_COVERAGE, 1).log()
        if call.lengths is not None:
            logs = logs[: int(call.lengths[self.b])]
        if call.mask is not None:
            logs = logs * call.mask[self.b % len(call.mask), 0, : len(logs)]
        return float(logs.sum())

    def best(self) -> list[_Hypothesis]:
        return sorted(self.finished, key=lambda x: -x.total)
