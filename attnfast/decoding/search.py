"""Search: greedy, with a beam, and by drawing words, over a batch of sources.

The loops here run every search; all three run as one operator where a model has it
(:mod:`attnfast.ops.search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnfast._utils.checks import (
    MAX_INT32,
    InputError,
    argument_message,
    check_flag,
    check_tensor,
    describe,
    is_finite,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.dispatch_log import explain, record
from attnfast.decoding._constraints import (
    BOS,
    EOS,
    PAD,
    UNK,
    check_count,
    make_constraints,
)
from attnfast.decoding._hypotheses import (
    Finished,
    Hypotheses,
    M,
    Rows,
    S,
    Scorer,
    Search,
    SearchableModel,
    SearchOutput,
    collect,
)
from attnfast.ops import dispatch
from attnfast.ops.arguments import length_mask
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.packing import Packed, pack_parameters, upcast_halves
from attnfast.ops.search import LEAST_COVERAGE, MOST_BEAM, SEARCH, SearchInputs
from attnfast.ops.search_steps import draw_words

__all__ = [
    "Scorer",
    "SearchOutput",
    "beam_search",
    "greedy_search",
    "sample",
    "sharing_packed_parameters",
]

#: The state of a scorer.
Judged = TypeVar("Judged", bound=Rows)

#: The largest exponent of lengths; a power with a larger one would overflow.
MAX_WEIGHT = 64


@torch.no_grad()
def greedy_search(
    model: SearchableModel[M, S],
    source: Tensor,
    lengths: Tensor,
    *,
    min_length: int = 0,
    max_length: int | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
    no_repeat_ngram: int = 0,
    word_mask: Tensor | None = None,
    forbidden: Sequence[int] = (PAD, UNK, BOS),
    start: int = BOS,
    end: int = EOS,
    scorer: Scorer[M, Judged] | None = None,
    scorer_weight: float = 0.3,
    need_weights: bool = False,
    int8: bool = False,
) -> SearchOutput:
    """Take the most probable word at every step.

    One operator searches if it supports the model and the options, else a loop over single steps;
    :func:`attnfast.explain` says which, and why. In half precision they may find different words:
    the operator keeps states, contexts and logits in float32, whereas a step rounds them.

    Args:
        model, source, lengths: as in :func:`beam_search`, like the options.

    Returns:
        A :class:`SearchOutput` of one hypothesis for each sentence, whose score is the sum of its
        words' scores.

    Raises:
        InputError, ValueError, TypeError: scores are NaN, or an argument does not fit.

    Example:
        >>> from attnfast.decoding import greedy_search
        >>> from attnfast.models import Config, build
        >>> model = build(Config(vocab_size=100, embed_dim=8, hidden_dim=8)).eval()
        >>> found = greedy_search(model, torch.randint(4, 100, (2, 5)), torch.tensor([5, 3]))
        >>> len(found.best)  # a list of words for each sentence
        2
    """
    search = _begin(
        model, source, lengths, scorer, scorer_weight, need_weights, int8, start=start, end=end,
        forbidden=forbidden, word_mask=word_mask, prefix=prefix, min_length=min_length,
        max_length=max_length, no_repeat_ngram=no_repeat_ngram,
    )  # fmt: skip
    return _search_greedily(search)


@torch.no_grad()
def beam_search(
    model: SearchableModel[M, S],
    source: Tensor,
    lengths: Tensor,
    beam: int = 5,
    *,
    n_best: int = 1,
    length_penalty: float = 1.0,
    coverage_penalty: float = 0.0,
    length_bonus: float = 0.0,
    min_length: int = 0,
    max_length: int | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
    no_repeat_ngram: int = 0,
    word_mask: Tensor | None = None,
    forbidden: Sequence[int] = (PAD, UNK, BOS),
    start: int = BOS,
    end: int = EOS,
    scorer: Scorer[M, Judged] | None = None,
    scorer_weight: float = 0.3,
    need_weights: bool = False,
    int8: bool = False,
) -> SearchOutput:
    r"""Keep the best ``beam`` partial translations of each sentence at every step.

    A finished translation y of n words, its end included, scores

    .. math:: \frac{(1 - \lambda) \log P(y) + \lambda \log P_\mathrm{scorer}(y) + \gamma (n - 1)}
              {((5 + n) / 6)^\alpha}
              + \beta \sum_j \log \min\Big(\sum_t a_{tj}, 1\Big)

    with the normalisation of GNMT (Wu et al., 2016, arXiv:1609.08144) as the denominator, and its
    coverage penalty, for weights :math:`a_{tj}` of word t and key j. The search of a sentence ends
    when ``beam`` translations have finished and no unfinished hypothesis scores more, or at the
    limit of its length. If no translation may end there, the result is the best unfinished
    hypothesis, of score −∞. Of equal translations the first that finished is the best.

    Args:
        model: in evaluation mode, with the methods ``encode`` and ``decode``, as
            :class:`attnfast.models.Seq2Seq` and :class:`attnfast.models.ListenAttendSpell`.
        source: word ids ``[B, Tk]``, or another input of the model's ``encode``.
        lengths: ``[B]``.
        beam: K.
        n_best: N, the number of translations to return for each sentence, at most K.
        length_penalty: α; 0 does not normalise and so favours short translations.
        coverage_penalty: β, at least 0, against source words that no word attends to. It applies to
            finished translations. The model must return weights, dense ones.
        length_bonus: γ for each word except the end.
        min_length: the fewest words of a translation, the end not counted.
        max_length: the most words, the end not counted; None leaves it to the method
            ``output_limit(lengths)`` of the model, or takes twice the source's length plus 9.
        prefix: the first words of each translation, a list for each sentence; their scores count.
        no_repeat_ngram: n of the n-grams that may occur only once in a translation; 0 allows all.
        word_mask: boolean ``[V]`` or ``[B, V]``, False for words that may not come.
        forbidden: ids that never come, by default those of padding, the unknown word and the start.
        start, end: ids of the start and the end of a translation.
        scorer: a second scorer of hypotheses, such as :class:`attnfast.models.CTCPrefixScorer`.
        scorer_weight: λ, from 0 to 1: its share. With 1 the model's own scores are ignored.
        need_weights: return the attention weights too.
        int8: round the weights of matrix products, and the rows that they multiply, to 8 bits. The
            search must run in one operator, and not in float64.

    Returns:
        A :class:`SearchOutput`.

    Raises:
        InputError, ValueError, TypeError: scores are NaN, or an argument does not fit.

    Papers: Wu et al., arXiv:1609.08144, section 7; Watanabe et al., "Hybrid CTC/Attention
    Architecture for End-to-End Speech Recognition", IEEE JSTSP 11(8), 2017, for the combination of
    two scores.

    Example:
        >>> from attnfast.decoding import beam_search
        >>> from attnfast.models import Config, build
        >>> model = build(Config(vocab_size=100, embed_dim=8, hidden_dim=8)).eval()
        >>> found = beam_search(model, torch.randint(4, 100, (2, 5)), torch.tensor([5, 3]), beam=3)
        >>> len(found.best)
        2
    """
    check_count("beam", beam)
    check_count("n_best", n_best)
    if n_best > beam:
        raise InputError(argument_message("n_best", f"at most the beam of {beam}", n_best))
    for name, x, least in (
        ("length_penalty", length_penalty, -MAX_WEIGHT),
        ("length_bonus", length_bonus, -MAX_WEIGHT),
        ("coverage_penalty", coverage_penalty, 0),
    ):
        if not is_finite(x):
            raise_value_error(name, "a finite number", describe(x))
        if not least <= x <= MAX_WEIGHT:
            raise_value_error(name, f"between {least} and {MAX_WEIGHT}", describe(x))
    search = _begin(
        model, source, lengths, scorer, scorer_weight, need_weights, int8, start=start, end=end,
        forbidden=forbidden, word_mask=word_mask, prefix=prefix, min_length=min_length,
        max_length=max_length, no_repeat_ngram=no_repeat_ngram,
    )  # fmt: skip
    if beam == 1 and search.scorer is None and not length_bonus and not coverage_penalty:
        found = _search_greedily(search)
        words = (found.lengths + ~found.finished).to(found.scores)
        return found._replace(scores=found.scores / _normaliser(words, length_penalty))
    done = _run_operator(
        "beam search", search, beam=beam, n_best=n_best, length_penalty=float(length_penalty),
        length_bonus=float(length_bonus), coverage_penalty=float(coverage_penalty),
    )  # fmt: skip
    if done is not None:
        return done
    if coverage_penalty:
        search = search._replace(need_weights=True)
    beams = _Beams(search, beam, length_penalty, coverage_penalty, length_bonus)
    while beams.going:
        beams.step()
    _raise_if_nan(beams.hypotheses.is_nan)
    found = collect(beams.hypotheses, beams.finished, n_best)
    return found if need_weights else found._replace(weights=None)


@torch.no_grad()
def sample(
    model: SearchableModel[M, S],
    source: Tensor,
    lengths: Tensor,
    samples: int = 1,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    min_length: int = 0,
    max_length: int | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
    no_repeat_ngram: int = 0,
    word_mask: Tensor | None = None,
    forbidden: Sequence[int] = (PAD, UNK, BOS),
    start: int = BOS,
    end: int = EOS,
    scorer: Scorer[M, Judged] | None = None,
    scorer_weight: float = 0.3,
    need_weights: bool = False,
    int8: bool = False,
) -> SearchOutput:
    r"""Draw every word from the model's distribution.

    .. math:: y_t \sim \mathrm{softmax}(\log P(\cdot \mid y_{<t}) / \tau)

    restricted to the ``top_k`` most probable words, and to the fewest most probable words whose
    probabilities, divided by their sum, add up to ``top_p``. One uniform number in [0, 1) for each
    hypothesis and step, drawn before the search, determines the word.

    Args:
        model, source, lengths: as in :func:`beam_search`, like the other options.
        samples: N, the number of translations to draw for each sentence.
        temperature: τ, above 0; below 1 it favours probable words.
        top_k: the number of most probable words to draw from, 0 for all.
        top_p: above 0 and at most 1.
        generator: of the random numbers; None for PyTorch's own. A search with the same generator
            state, batch and limits draws the same words. With a list of generators, one for each
            sentence, the words do not depend on the batch.

    Returns:
        A :class:`SearchOutput` of N translations of each sentence in the order drawn; scores are
        sums of log-probabilities without temperature.

    Raises:
        InputError, ValueError, TypeError: scores are NaN, or an argument does not fit.

    Papers: Fan et al., "Hierarchical Neural Story Generation", ACL 2018, arXiv:1805.04833, for
    ``top_k``; Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020,
    arXiv:1904.09751, for ``top_p``.

    Example:
        >>> from attnfast.decoding import sample
        >>> from attnfast.models import Config, build
        >>> model = build(Config(vocab_size=100, embed_dim=8, hidden_dim=8)).eval()
        >>> source, lengths = torch.randint(4, 100, (2, 5)), torch.tensor([5, 3])
        >>> drawn = sample(model, source, lengths, 4, top_p=0.9, generator=torch.manual_seed(0))
        >>> drawn.sequences.shape[:2]
        torch.Size([2, 4])
    """
    check_count("samples", samples)
    check_count("top_k", top_k, 0)
    if not is_finite(temperature) or temperature <= 0:
        raise_value_error("temperature", "a finite number above 0", describe(temperature))
    if not is_finite(top_p) or not 0 < top_p <= 1:
        raise_value_error("top_p", "above 0 and at most 1", describe(top_p))
    each = isinstance(generator, (list, tuple))
    generators: list[Any] = list(generator) if each else [generator]  # type: ignore[arg-type]
    if not all(isinstance(x, (torch.Generator, type(None))) for x in generators):
        expected = "a torch.Generator, one for each sentence, or None"
        raise_type_error("generator", expected, describe(generator))
    search = _begin(
        model, source, lengths, scorer, scorer_weight, need_weights, int8, start=start, end=end,
        forbidden=forbidden, word_mask=word_mask, prefix=prefix, min_length=min_length,
        max_length=max_length, no_repeat_ngram=no_repeat_ngram,
    )  # fmt: skip
    limits = search.limits if each else [max(search.limits, default=0)]
    if len(generators) != len(limits):
        expected = f"one for each of {len(limits)} sentences"
        raise InputError(argument_message("generator", expected, len(generators)))
    device, shape = source.device, (len(source) * samples, max(limits, default=0))
    numbers = torch.zeros(shape, dtype=torch.float64, device=device)
    for part, limit, x in zip(numbers.tensor_split(len(limits) or 1), limits, generators):
        part[:, :limit] = torch.rand(
            len(part), limit, dtype=torch.float64, generator=x, device=x.device if x else device
        )

    done = _run_operator(
        "sampling", search, beam=samples, n_best=samples, temperature=float(temperature),
        top_k=min(top_k, MAX_INT32), top_p=float(top_p),
        numbers=numbers.view(len(source), samples, shape[1]),
    )  # fmt: skip
    if done is not None:
        return done

    def choose(log_probs: Tensor, t: int) -> Tensor:
        return draw_words(log_probs.double() / temperature, numbers[:, t], top_k, top_p)

    return _choose_each(Hypotheses(search, samples), choose, samples)


def _begin(
    model: Any,
    source: Tensor,
    lengths: Tensor,
    scorer: Scorer[Any, Any] | None,
    scorer_weight: float,
    need_weights: bool,
    int8: bool,
    **options: Any,
) -> Search:
    """Check the arguments that all searches share, and encode the sources."""
    _check_model(model)
    check_tensor("source", source)
    check_tensor("lengths", lengths)
    if not source.dim():
        raise_value_error("source", "[B, …]", describe(source))
    if not lengths.dim() or len(lengths) != len(source):
        expected = f"one for each of {len(source)} sentences, as source"
        raise_value_error("lengths", expected, describe(lengths))
    if not is_finite(scorer_weight) or not 0 <= scorer_weight <= 1:
        raise_value_error("scorer_weight", "a number from 0 to 1", describe(scorer_weight))
    if scorer is not None and (
        isinstance(scorer, type) or not callable(getattr(scorer, "score", None))
    ):
        raise_type_error("scorer", "an object with score(...), or None", describe(scorer))
    need_weights, int8 = check_flag("need_weights", need_weights), check_flag("int8", int8)
    constraints = make_constraints(model, lengths, **options)
    limits = constraints.limits.tolist()
    memory, state = model.encode(source, lengths)
    constraints = constraints._replace(num_oov=getattr(memory, "num_oov", 0))
    if isinstance(embedding := getattr(model, "embedding", None), torch.nn.Embedding):
        constraints.check_words(embedding.num_embeddings)
    return Search(
        model, memory, state, constraints.on(source.device), limits,
        scorer if scorer_weight else None, scorer_weight, need_weights, int8,
    )  # fmt: skip


def _search_greedily(search: Search) -> SearchOutput:
    """Take the best word at every step, in one operator if the model has it."""
    found = _run_operator("greedy search", search)
    if found is not None:
        return found
    hypotheses = Hypotheses(search, 1)
    return _choose_each(hypotheses, lambda log_probs, t: log_probs.max(-1).indices, 1)


def _run_operator(name: str, search: Search, **options: Any) -> SearchOutput | None:
    """Search in one operator; return None if there is none for the model and the options.

    ``options`` are arguments of :class:`attnfast.ops.search.SearchInputs`.
    """
    reason, call, backend = "", None, None
    if search.scorer is not None:
        reason = "a scorer judges hypotheses"
    elif options.get("beam", 1) > MOST_BEAM:
        reason = f"the operator has at most {MOST_BEAM} hypotheses"
    if not reason:
        make_inputs = getattr(search.model, "_search_inputs", None)
        reason = "the model has no operator of its own"
        if make_inputs is not None:
            sources = search.memory, search.state, search.constraints
            call, backend, reason = make_inputs(*sources)
            if search.int8 and backend is None:
                *_, reason = explain(make_inputs, *sources).output  # in full
    if call is not None:
        search.constraints.check_words(len(call.embedding))
    if search.int8 and call is not None and call.embedding.dtype == torch.float64:
        reason, call, backend = "the model is float64", None, None
    if search.int8 and backend not in (None, "cpu"):
        reason, call, backend = "the model is on a GPU", None, None
    if search.int8 and backend is None:
        raise InputError(f"int8 needs a search in one operator, but {reason}")
    record(name, f"one operator on {backend}" if backend else "step by step", reason)
    if call is None or backend is None:
        return None
    call = _pack(search.model, call, backend, search.int8)
    call = call._replace(**options, need_weights=search.need_weights)
    words, word_scores, lengths, scores, weights = dispatch.run(SEARCH, call, backend)
    _raise_if_nan((lengths < 0).any())
    T = int(lengths.max()) if lengths.numel() else 0
    finished = scores > -math.inf
    return SearchOutput(
        words[..., :T], lengths, scores, finished, word_scores[..., :T],
        weights[..., :T, :] if search.need_weights else None,
    )  # fmt: skip


#: The packed parameters of models whose searches share them, None before the first.
_PACKED: WeakKeyDictionary[Any, Packed | None] = WeakKeyDictionary()


def sharing_packed_parameters(model: SearchableModel[M, S]) -> AbstractContextManager[None]:
    """Let the searches within a ``with`` block share a model's packed parameters.

    Outside of such a block every search packs them anew, because not every change of parameters is
    visible, such as one by a fused optimizer. Within the block they must not change.

    Args:
        model: as in :func:`beam_search`.

    Returns:
        A context manager. The block may search with other models, too.

    Raises:
        TypeError: ``model`` is no model.

    Example:
        >>> from attnfast.decoding import greedy_search, sharing_packed_parameters
        >>> from attnfast.models import Config, build
        >>> model = build(Config(vocab_size=100, embed_dim=8, hidden_dim=8)).eval()
        >>> with sharing_packed_parameters(model):
        ...     for words in torch.randint(4, 100, (3, 1, 5)):
        ...         found = greedy_search(model, words, torch.tensor([5]))
    """
    _check_model(model)
    return _sharing(model)


@contextmanager
def _sharing(model: Any) -> Iterator[None]:
    if model in _PACKED:
        yield
        return
    _PACKED[model] = None
    try:
        yield
    finally:
        _PACKED.pop(model, None)


def _check_model(model: Any) -> None:
    has_both = all(callable(getattr(model, name, None)) for name in ("encode", "decode"))
    if not has_both or isinstance(model, type):
        raise_type_error("model", "an object with encode(...) and decode(...)", describe(model))


def _pack(model: Any, call: SearchInputs, backend: str, int8: bool) -> SearchInputs:
    """Return the call in float32 or float64, with packed parameters if searches share them."""
    if model in _PACKED:
        feed_size = call.weight_ih.shape[1] - call.embedding.shape[1]
        packed = pack_parameters(call, feed_size, backend, _PACKED.get(model), int8)
        if packed is not None:
            _PACKED[model] = packed
            call = call._replace(packed=packed.tensor)
    return upcast_halves(call._replace(int8=int8), backend)


def _choose_each(
    hypotheses: Hypotheses, choose: Callable[[Tensor, int], Tensor], copies: int
) -> SearchOutput:
    """Continue every hypothesis by the word that ``choose`` returns, until all have ended.

    ``choose(log_probs [R, V], t)`` returns the words ``[R]`` of step t.
    """
    end = hypotheses.search.constraints.end
    rows = len(hypotheses.words)
    ended = torch.zeros(rows, dtype=torch.bool, device=hypotheses.words.device)
    lengths = torch.zeros_like(ended, dtype=torch.long)
    stuck = torch.zeros_like(ended)
    while not ended.all():
        log_probs = hypotheses.score()
        words = choose(log_probs, hypotheses.words.shape[1] - 1)
        scores = log_probs.gather(1, words.unsqueeze(1)).squeeze(1)
        stuck |= ~ended & (scores == -math.inf)  # no word may come
        lengths += ~ended & ~stuck
        words = words.masked_fill(ended | stuck, end)
        scores = scores.masked_fill(ended | stuck, 0)
        hypotheses.append(words, scores)
        ended |= stuck | (words == end)
        ended |= hypotheses.is_nan
    _raise_if_nan(hypotheses.is_nan)
    shape, T = (rows // copies, copies), int(lengths.max()) if rows else 0
    exists = length_mask(lengths, T)
    word_scores = hypotheses.word_scores[:, :T].masked_fill(~exists, 0)
    weights = None
    if hypotheses.search.need_weights:
        weights = hypotheses.trace_weights(lengths - 1, torch.arange(rows, device=lengths.device))
        weights = weights.view(*shape, *weights.shape[1:])
    return SearchOutput(
        hypotheses.words[:, 1 : T + 1].masked_fill(~exists, PAD).view(*shape, T),
        lengths.view(shape),
        word_scores.sum(-1).masked_fill(stuck, -math.inf).view(shape),
        ~stuck.view(shape),
        word_scores.view(*shape, T),
        weights,
    )


class _Beams:
    """The beams of the sentences of a batch, K hypotheses each.

    ``going`` are the numbers of the sentences whose hypotheses go on, and ``finished`` the
    hypotheses of each sentence that have ended; the others as in :func:`beam_search`.
    """

    def __init__(
        self,
        search: Search,
        beam: int,
        length_penalty: float,
        coverage_penalty: float,
        length_bonus: float,
    ):
        self.search, self.beam, self.hypotheses = search, beam, Hypotheses(search, beam)
        self.length_penalty, self.length_bonus = length_penalty, length_bonus
        self.coverage_penalty = coverage_penalty
        self.going = list(range(len(search.limits)))
        self.finished: list[list[Finished]] = [[] for _ in self.going]
        self.scores: Tensor | None = None  # [sentences, K], of the hypotheses so far
        self.coverage: Tensor | None = None  # [sentences · K, Tk], sums of weights

    def step(self) -> None:
        """Continue the hypotheses by one word."""
        hypotheses, beam, end = self.hypotheses, self.beam, self.search.constraints.end
        count = hypotheses.words.shape[1]  # of words, with the next one
        log_probs = hypotheses.score()
        vocab = log_probs.shape[-1]
        total = log_probs.view(len(self.going), beam, vocab).clone()
        if self.scores is None:  # all hypotheses are the same at first: only one may continue
            total[:, 1:] = -math.inf
        else:
            total += self.scores.unsqueeze(-1)
        if self.length_bonus:
            total += self.length_bonus
            total[..., end] -= self.length_bonus
        # No more than K of the best 2K end here, so at least K go on.
        scores, index = total.flatten(1).topk(min(2 * beam, beam * vocab))
        first = torch.arange(len(self.going), device=index.device).unsqueeze(1) * beam
        rows, words = index // vocab + first, index % vocab  # [sentences, 2K]
        word_scores = log_probs[rows, words]

        normaliser = _normaliser(count, self.length_penalty)
        final = scores / normaliser
        if self.coverage_penalty:
            final = final + self.coverage_penalty * self._uncovered()[rows]
        ends = words == end
        self._finish(ends, final, scores, rows, word_scores)
        alive = ends.int().sort(dim=1, stable=True).indices[:, :beam]  # the best K that go on
        ahead = (scores.gather(1, alive[:, :1]) / normaliser).flatten().tolist()
        kept = self._kept(count, ahead)
        self.going = [self.going[i] for i in kept]
        self.scores, rows, words, word_scores = (
            x[kept].gather(1, alive[kept]) for x in (scores, rows, words, word_scores)
        )
        hypotheses.append(words.flatten(), word_scores.flatten(), rows.flatten())
        if self.coverage is not None:
            self.coverage = self.coverage[rows.flatten()]

    def _uncovered(self) -> Tensor:
        """Return Σ_j log min(Σ_t a_tj, 1) of each hypothesis, this step included."""
        weights = self.hypotheses.weights[-1]
        weights = weights.to(accumulation_dtype(weights.dtype))
        self.coverage = weights if self.coverage is None else self.coverage + weights
        logs = self.coverage.clamp(LEAST_COVERAGE, 1).log()
        return logs.masked_fill(~_keys_of(self.hypotheses.memory, logs), 0).sum(-1)

    def _finish(
        self, ends: Tensor, final: Tensor, scores: Tensor, rows: Tensor, word_scores: Tensor
    ) -> None:
        """Add the hypotheses among the best K that end here."""
        hypotheses, K = self.hypotheses, self.beam
        step = hypotheses.words.shape[1] - 1
        for i, rank in (ends[:, :K] & scores[:, :K].isfinite()).nonzero().tolist():
            row = int(rows[i, rank])
            words = [*hypotheses.words[row, 1:].tolist(), self.search.constraints.end]
            of_words = [*hypotheses.word_scores[row].tolist(), word_scores[i, rank].item()]
            found = Finished(final[i, rank].item(), words, of_words, step, row)
            self.finished[self.going[i]].append(found)

    def _kept(self, count: int, ahead: list[float]) -> list[int]:
        """Return the places in ``going`` of the sentences that go on.

        ``ahead`` are the scores of their best hypotheses that go on, as if they ended here.
        """
        kept, hypotheses = [], self.hypotheses
        for i, j in enumerate(self.going):
            finished = self.finished[j]
            stops = not ahead[i] > -math.inf  # as at the limit, where every hypothesis has to end
            waits = len(finished) < self.beam or max(x.score for x in finished) < ahead[i]
            if waits and not stops:
                kept.append(i)
            elif not finished:  # the best so far
                row = i * self.beam
                before = int(hypotheses.parents[-1][row]) if hypotheses.parents else row
                words, scores = hypotheses.words[row, 1:], hypotheses.word_scores[row]
                found = Finished(
                    -math.inf, words.tolist(), scores.tolist(), count - 2, before, False
                )
                finished.append(found)
        return kept


def _normaliser(count: Any, length_penalty: float) -> Any:
    """Return GNMT's normaliser ((5 + n) / 6)^α of scores of n words."""
    return ((5 + count) / 6) ** length_penalty


def _keys_of(memory: Any, like: Tensor) -> Tensor:
    """Return which keys of ``like [R, Tk]`` exist in a memory, boolean ``[R, Tk]``."""
    while hasattr(memory, "memory"):  # an encoded source, or one of the best k keys
        memory = memory.memory
    memory = getattr(memory, "memories", [memory])[0]  # those of several hops have the same keys
    exists = torch.ones_like(like, dtype=torch.bool)
    if getattr(memory, "lengths", None) is not None:
        exists = length_mask(memory.lengths, like.shape[1])
    if getattr(memory, "mask", None) is not None:
        exists = exists & memory.mask.view(len(memory.mask), -1)
    return exists


def _raise_if_nan(is_nan: Tensor | bool) -> None:
    """Raise if a search met NaN scores; called at its end, so that a GPU is synchronized once."""
    if is_nan:
        raise InputError(
            "the model's scores must be finite numbers, got NaN: its parameters are damaged or too "
            "large"
        )
