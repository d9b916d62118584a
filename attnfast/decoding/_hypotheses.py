"""The hypotheses of a search, and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from attnfast._utils.checks import InputError
from attnfast.decoding._constraints import PAD, Constraints
from attnfast.ops.arguments import mean_of_heads


class SearchOutput(NamedTuple):
    """Result of a search: up to N hypotheses for each of B sentences, the best first.

    Attributes:
        sequences: word ids ``[B, N, T]``, the end included, 0 after it.
        lengths: the number of words of each, the end included, ``[B, N]``; 0 where a sentence has
            fewer than N hypotheses.
        scores: ``[B, N]``, by which hypotheses are sorted; −∞ if one could not end.
        finished: ``[B, N]``, True if the end is the last word. Without it, no word could follow.
        word_scores: the score of each word, ``[B, N, T]``, 0 after the end: its log-probability, or
            the combination with a scorer's.
        weights: attention weights ``[B, N, T, Tk]``, 0 after the end, if requested, else None;
            those of several heads or hops are averaged.

    Example:
        >>> from attnfast.models import Config, build
        >>> model = build(Config(vocab_size=100, embed_dim=8, hidden_dim=8)).eval()
        >>> source, lengths = torch.randint(4, 100, (2, 5)), torch.tensor([5, 3])
        >>> found = attnfast.decoding.beam_search(model, source, lengths, n_best=3)
        >>> found.scores.shape, len(found.hypotheses()[0]), len(found.best)
        (torch.Size([2, 3]), 3, 2)
    """

    sequences: Tensor
    lengths: Tensor
    scores: Tensor
    finished: Tensor
    word_scores: Tensor
    weights: Tensor | None = None

    @property
    def best(self) -> list[list[int]]:
        """The words of each sentence's best hypothesis, without the end."""
        return [words[0] for words in self.hypotheses()]

    def hypotheses(self) -> list[list[list[int]]]:
        """Return the words of all hypotheses of each sentence, without the end."""
        every = zip(self.sequences.tolist(), self.lengths.tolist(), self.finished.tolist())
        return [
            [
                words[: n - has_end]
                for i, (words, n, has_end) in enumerate(zip(*rows))
                if n or not i  # the best may be a hypothesis without words
            ]
            for rows in every
        ]


class Rows(Protocol):
    """One row for each hypothesis, which a search reorders: a model's memory, or a state."""

    def index_select(self, index: Tensor, /) -> Self:
        """Return the rows ``index``."""
        ...


M = TypeVar("M", bound=Rows)
S = TypeVar("S", bound=Rows)
M_contra = TypeVar("M_contra", bound=Rows, contravariant=True)


class SearchableModel(Protocol[M, S]):
    """Protocol of a model that can be searched, with its memory and the state of its decoder."""

    def encode(self, source: Tensor, lengths: Tensor, /) -> tuple[M, S]:
        """Return the encoded sources, and the state before the first word."""
        ...

    def decode(self, words: Tensor, state: S, memory: M, /) -> tuple[Tensor, S, Tensor | None]:
        """Return logits ``[R, T, V]`` after ``words [R, T]``, the next state, and weights."""
        ...


class Scorer(Protocol[M_contra, S]):
    """Protocol of a second scorer of hypotheses, such as :class:`attnfast.models.CTCPrefixScorer`.

    Example:
        >>> from attnfast.decoding import beam_search
        >>> from attnfast.models import Config, build
        >>> model = build(Config(vocab_size=50, embed_dim=8, hidden_dim=8)).eval()
        >>> class Forbid:  # a word
        ...     def score(self, words, state, memory):
        ...         log_probs = torch.zeros(len(words), 50)
        ...         log_probs[:, 7] = -torch.inf
        ...         return log_probs, state
        >>> source, lengths = torch.randint(4, 50, (2, 5)), torch.tensor([5, 3])
        >>> found = beam_search(model, source, lengths, scorer=Forbid())
        >>> any(7 in words for words in found.best)
        False
    """

    def score(self, words: Tensor, state: S | None, memory: M_contra, /) -> tuple[Tensor, S]:
        """Return the log-probabilities ``[R, V]`` of the word after each hypothesis, and a state.

        ``words [R, 1]`` are the last words of R hypotheses, or the start with the state None;
        ``memory`` is the model's, one for each hypothesis. States have ``index_select``, as the
        model's do.
        """
        ...


class Search(NamedTuple):
    """A model, its encoded sources and the options, which determine the scores of words.

    ``memory`` and ``state`` are of the model's ``encode``; ``limits`` the most words of each
    sentence's hypotheses, the end included, as in ``constraints``, but on the CPU.
    """

    model: Any
    memory: Any
    state: Any
    constraints: Constraints
    limits: list[int]
    scorer: Scorer[Any, Any] | None
    scorer_weight: float
    need_weights: bool
    int8: bool


class Hypotheses:
    """``copies`` hypotheses of each sentence of a batch, and the model's state after each."""

    def __init__(self, search: Search, copies: int):
        limits = search.constraints.limits
        self.search, self.memory, self.state = search, search.memory, search.state
        self.judged = None  # the scorer's state
        self.sentence = torch.arange(len(limits), device=limits.device).repeat_interleave(copies)
        if copies > 1:
            self.memory = self.memory.index_select(self.sentence)
            self.state = self.state.index_select(self.sentence)
        self.words = torch.full_like(self.sentence, search.constraints.start).unsqueeze(1)
        self.word_scores = torch.zeros(len(self.words), 0, device=limits.device)
        self.weights: list[Tensor] = []  # of each step, [R, Tk]
        self.parents: list[Tensor] = []  # the row that each row of the next step continues
        self.is_nan = torch.zeros((), dtype=torch.bool, device=limits.device)

    def score(self) -> Tensor:
        """Return the log-probabilities ``[R, V]`` of the next words."""
        search, last = self.search, self.words[:, -1:]
        more = (True,) if search.need_weights else ()
        logits, self.state, weights = search.model.decode(last, self.state, self.memory, *more)
        if search.need_weights:
            if weights is None:
                raise InputError("the model returns no attention weights, which the search needs")
            self.weights.append(mean_of_heads(weights)[:, -1])
        other = None
        if search.scorer is not None:
            other, self.judged = search.scorer.score(last, self.judged, self.memory)
        log_probs = search.constraints.log_probs(
            logits[:, -1], self.words, self.sentence, other, search.scorer_weight
        )
        self.is_nan |= log_probs.isnan().any()
        return log_probs

    def append(self, words: Tensor, scores: Tensor, rows: Tensor | None = None) -> None:
        """Continue the hypotheses ``rows``, or all, by ``words [R]``, whose scores are given."""
        if rows is not None:
            self.parents.append(rows)
            if len(rows) < len(self.words):  # hypotheses of one sentence share its memory
                self.memory = self.memory.index_select(rows)
            self.state = self.state.index_select(rows)
            self.judged = None if self.judged is None else self.judged.index_select(rows)
            parts = self.words, self.word_scores, self.sentence
            self.words, self.word_scores, self.sentence = (x[rows] for x in parts)
        self.words = torch.cat([self.words, words.unsqueeze(1)], 1)
        self.word_scores = torch.cat([self.word_scores.to(scores), scores.unsqueeze(1)], 1)

    def trace_weights(self, last: Tensor, row: Tensor) -> Tensor:
        """Return the weights ``[n, T, Tk]`` of n hypotheses.

        ``last [n]`` is the number of the last step of each, −1 for none, ``row [n]`` its row there.
        """
        T = int(last.max()) + 1 if len(last) else 0
        Tk = self.weights[0].shape[-1] if self.weights else 0
        weights = self.word_scores.new_zeros(len(last), T, Tk)
        for t in reversed(range(T)):
            if self.parents and t + 1 < T:
                row = torch.where(last > t, self.parents[t][row.masked_fill(last <= t, 0)], row)
            there = last >= t
            weights[there, t] = self.weights[t][row[there]].to(weights.dtype)
        return weights


class Finished(NamedTuple):
    """A hypothesis that has ended, or that cannot go on: its last step and its row there."""

    score: float
    words: list[int]
    word_scores: list[float]
    step: int
    row: int
    has_end: bool = True


def collect(hypotheses: Hypotheses, finished: list[list[Finished]], n_best: int) -> SearchOutput:
    """Return the best N finished hypotheses of each sentence; the earlier first of equal ones."""
    best = [sorted(x, key=lambda y: -y.score)[:n_best] for x in finished]
    every = [x for several in best for x in several]
    T = max((len(x.words) for x in every), default=0)
    shape, dtype = (len(finished), n_best), hypotheses.word_scores.dtype
    device = hypotheses.words.device
    place = [i * n_best + n for i, several in enumerate(best) for n in range(len(several))]

    def table(rows: Sequence[Any], fill: float, dtype: torch.dtype, *more: int) -> Tensor:
        x = torch.full((shape[0] * n_best, *more), fill, dtype=dtype)
        if rows:
            x[place] = torch.tensor(rows, dtype=dtype)
        return x.view(*shape, *more).to(device)

    def padded(rows: list[list[Any]]) -> list[list[Any]]:
        return [[*row, *[0] * (T - len(row))] for row in rows]

    weights = None
    if hypotheses.search.need_weights:
        steps, rows = (torch.tensor(x, dtype=torch.long, device=device) for x in (
            [x.step for x in every], [x.row for x in every]))  # fmt: skip
        traced = hypotheses.trace_weights(steps, rows)
        weights = traced.new_zeros(shape[0] * n_best, T, traced.shape[-1])
        weights[place, : traced.shape[1]] = traced
        weights = weights.view(*shape, *weights.shape[1:])
    return SearchOutput(
        table(padded([x.words for x in every]), PAD, torch.long, T),
        table([len(x.words) for x in every], 0, torch.long),
        table([x.score for x in every], -math.inf, dtype),
        table([x.has_end for x in every], False, torch.bool),
        table(padded([x.word_scores for x in every]), 0, dtype, T),
        weights,
    )
