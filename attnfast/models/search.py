"""Decoding: greedy, and beam search over a batch."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    InputError,
    check_int,
    describe,
    is_finite,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.dispatch_log import record
from attnfast.models._checks import BOS, EOS
from attnfast.models.decoders import BahdanauDecoder, LuongDecoder
from attnfast.models.seq2seq import EncodedSource, Seq2Seq, output_limit
from attnfast.nn._fused_rnn import attention_arguments, select_layer_backend, upcast_halves
from attnfast.nn._layer import RecurrentState
from attnfast.nn._linear import is_plain, not_plain_reason
from attnfast.nn.stateful import HistoryAttention
from attnfast.ops import dispatch
from attnfast.ops.copying import LOWEST
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.search import SEARCH, GreedySearchInputs

#: The largest exponent of lengths; a power with a larger one would overflow.
MAX_WEIGHT = 64


def output_limits(model: Any, lengths: Tensor, max_output_length: int | None = None) -> Tensor:
    """Return the most words, the end included, of a search for ``lengths [B]``, on the CPU.

    Args:
        model: its ``output_limit(lengths)`` is called, or :func:`output_limit` if it has none.
        max_output_length: the most words, the end not counted; None leaves it to the model.
    """
    limits = getattr(model, "output_limit", output_limit)(lengths)
    if max_output_length is None:
        return limits
    _check_count("max_output_length", max_output_length)
    return torch.full_like(limits, max_output_length + 1, device="cpu")


def _check_count(name: str, count: object) -> None:
    try:
        check_int(name, count)
    except ValueError as error:
        raise InputError(str(error)) from None


class Scorer(Protocol):
    """Protocol of a second scorer of hypotheses, such as :class:`CTCPrefixScorer`.

    Example:
        >>> from attnfast.models import Config, beam_search, build
        >>> model = build(Config(vocab_size=50, embed_dim=8, hidden_dim=8)).eval()
        >>> class Forbid:  # a word
        ...     def score(self, words, state, memory):
        ...         log_probs = torch.zeros(len(words), 50)
        ...         log_probs[:, 7] = -torch.inf
        ...         return log_probs, state
        >>> source, lengths = torch.randint(4, 50, (2, 5)), torch.tensor([5, 3])
        >>> any(7 in words for words in beam_search(model, source, lengths, scorer=Forbid()))
        False
    """

    def score(self, words: Tensor, state: Any, memory: Any) -> tuple[Tensor, Any]:
        """Return the log-probabilities ``[R, V]`` of the word after each hypothesis, and a state.

        ``words [R, 1]`` are the last words of R hypotheses, or the start with the state None;
        ``memory`` is the model's, one for each hypothesis. States have ``index_select``, as the
        model's do.
        """
        ...


def _log_probs(
    logits: Tensor, must_end: Tensor, other: Tensor | None = None, share: float = 0.0
) -> Tensor:
    """Turn ``logits [B, V]`` into log-probabilities of words that may come next.

    Padding, the unknown word and the start of a sentence may not; rows of ``must_end [B]`` end.
    If ``other`` is given, return (1 − share) · own + share · other.
    """
    goes_on = torch.arange(logits.shape[-1], device=logits.device) != EOS
    # Impossible words of a pointer-generator, including out-of-vocabulary words of other sentences.
    logits = logits.masked_fill((logits == LOWEST) & goes_on, -math.inf)
    logits = logits.to(accumulation_dtype(logits.dtype))
    logits[:, :EOS] = -math.inf  # a list of the three would be copied to a GPU
    log_probs = logits.log_softmax(-1)
    if other is not None:
        both = (1 - share) * log_probs + share * other
        log_probs = both.masked_fill(log_probs == -math.inf, -math.inf)
    return log_probs.masked_fill(must_end.to(logits.device).unsqueeze(-1) & goes_on, -math.inf)


def _best_words(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of ``logits [B, V]`` among words that may come next, and its word.

    Both are ``[B, 1]``. The word has the largest log-probability.
    """
    best, words = logits[:, EOS:].max(-1, keepdim=True)
    return best, (words + EOS).masked_fill(best == LOWEST, EOS)


def _raise_if_nan(is_nan: Tensor | bool) -> None:
    """Raise if a search met NaN scores; called at its end, so that a GPU is synchronized once."""
    if is_nan:
        raise InputError(
            "the model's scores must be finite numbers, got NaN: its parameters are damaged or too "
            "large"
        )


def check_model(model: object) -> None:
    """Raise unless ``model`` has the methods ``encode`` and ``decode`` of a :class:`Seq2Seq`."""
    has_both = all(callable(getattr(model, name, None)) for name in ("encode", "decode"))
    if not has_both or isinstance(model, type):
        raise_type_error("model", "a Seq2Seq", describe(model))


def _select_search_backend(
    model: Any, source: EncodedSource, state: RecurrentState
) -> tuple[str | None, str]:
    """Return the backend whose operator can search with a model, or None and the reason."""
    if not is_plain(model, Seq2Seq):
        return None, not_plain_reason(model, Seq2Seq)
    if model.dropout.training and model.dropout.p:
        return None, "dropout is on: call eval() first"
    decoder, words = model.decoder, model.embedding
    if any(callable(x) for part in (model, decoder) for x in vars(part).values()):
        return None, "the model or its decoder has a method of its own"
    if not is_plain(decoder, BahdanauDecoder, LuongDecoder):
        return None, not_plain_reason(decoder, BahdanauDecoder, LuongDecoder)
    if model.pointer is not None:
        return None, "the model copies words"
    plain = [(words, nn.Embedding), (decoder.readout, nn.Linear), (model.dropout, nn.Dropout)]
    if decoder.rnn.num_layers > 1:
        return None, "its decoder has several layers"
    if decoder.parts()[0].rnn is not None or words.max_norm or not all(is_plain(*x) for x in plain):
        return None, "its cell, embedding or readout is no plain module"
    if isinstance(decoder.attention, HistoryAttention):
        return None, "its attention has a history"
    return select_layer_backend(
        decoder.attention, source.memory, words.weight, history=state.history, operator=SEARCH.name
    )


def _in_one_call(
    model: Seq2Seq, source: EncodedSource, state: RecurrentState, limits: Tensor
) -> list[list[int]] | None:
    """Run :func:`greedy_search` as one operator; return None if no operator supports the model."""
    backend, reason = _select_search_backend(model, source, state)
    record("greedy search", f"one operator on {backend}" if backend else "step by step", reason)
    if backend is None:
        return None
    decoder, words, memory = model.decoder, model.embedding, source.memory
    layer, readout = decoder.parts()
    attention, like = decoder.attention, words.weight
    most = int(limits.max()) if len(limits) else 0
    steps = like.new_empty(len(limits), most, 0)
    terms, _ = attention_arguments(attention, memory, backend, state.history, steps)
    call = GreedySearchInputs(
        words.weight, words.weight, limits.flatten().long(), state.hidden,
        layer.weight_ih, layer.weight_hh, state.cell, state.feed,  # type: ignore[arg-type]
        bias_ih=layer.bias_ih, bias_hh=layer.bias_hh, bias_vocab=model.bias,
        weight_output=getattr(layer.output, "weight", None),
        bias_output=getattr(layer.output, "bias", None),
        weight_readout=getattr(readout, "weight", None),
        bias_readout=getattr(readout, "bias", None),
        mode=layer.mode, attends_first=layer.attends_first, begin=BOS, end=EOS, most=most,
        embedding_scale=words.embedding_dim**0.5, **terms,
    )  # fmt: skip
    rows = dispatch.run(SEARCH, upcast_halves(call), backend).words.tolist()
    _raise_if_nan(any(EOS not in row or -1 in row[: row.index(EOS)] for row in rows))
    return [row[: row.index(EOS)] for row in rows]


@torch.no_grad()
def greedy_search(
    model: Any, source: Tensor, lengths: Tensor, *, max_output_length: int | None = None
) -> list[list[int]]:
    """Take the most probable word at every step.

    One operator searches if it supports the model, else a loop over single steps. In half precision
    they may find different words: the operator keeps states, contexts and logits in float32,
    whereas a step rounds them.

    Args:
        model: in evaluation mode; as in :func:`beam_search`.
        source: word ids ``[B, Tk]``, or another input of the model's ``encode``.
        lengths: ``[B]``.
        max_output_length: the most words of a translation; None leaves it to the model.

    Returns:
        The words of each translation, without the end.

    Raises:
        InputError: scores are NaN.

    Example:
        >>> from attnfast.models import Config, build, greedy_search
        >>> model = build(Config(vocab_size=100, embed_dim=8, hidden_dim=8)).eval()
        >>> len(greedy_search(model, torch.randint(4, 100, (2, 5)), torch.tensor([5, 3])))
        2
    """
    check_model(model)
    limits = output_limits(model, lengths, max_output_length).unsqueeze(1)
    memory, state = model.encode(source, lengths)
    limits = limits.to(source.device)
    if (rows := _in_one_call(model, memory, state, limits)) is not None:
        return rows
    words = torch.full((source.shape[0], 1), BOS, device=source.device)
    ended = torch.zeros_like(words, dtype=torch.bool)
    nan = torch.zeros_like(ended)
    outputs: list[Tensor] = []
    while not ended.all():
        logits, state, _ = model.decode(words, state, memory)
        best, words = _best_words(logits[:, -1])
        words = words.masked_fill(limits <= len(outputs) + 1, EOS)
        nan |= ~(best > -math.inf)
        outputs.append(words)
        ended |= words == EOS
    _raise_if_nan(nan.any())
    rows = torch.cat(outputs, 1).tolist() if outputs else []
    return [row[: row.index(EOS)] for row in rows]


@torch.no_grad()
def beam_search(
    model: Any,
    source: Tensor,
    lengths: Tensor,
    beam: int = 5,
    length_penalty: float = 1.0,
    *,
    scorer: Scorer | None = None,
    scorer_weight: float = 0.3,
    length_bonus: float = 0.0,
    max_output_length: int | None = None,
) -> list[list[int]]:
    r"""Keep the best ``beam`` partial translations of each sentence at every step.

    A finished translation y of n words, its end included, scores

    .. math:: \frac{(1 - \lambda) \log P(y) + \lambda \log P_\mathrm{scorer}(y) + \gamma (n - 1)}
              {((5 + n) / 6)^\alpha}

    with the normalisation of GNMT (Wu et al., 2016, arXiv:1609.08144) as the denominator. The
    search of a sentence ends when ``beam`` translations have finished and no unfinished hypothesis
    scores more, or at the limit of its length. If no translation may end there, the result is the
    best unfinished hypothesis.

    Args:
        model: in evaluation mode, with the methods ``encode`` and ``decode``, as :class:`Seq2Seq`
            and :class:`ListenAttendSpell`.
        source: word ids ``[B, Tk]``, or another input of the model's ``encode``.
        lengths: ``[B]``.
        beam: K; 1 is :func:`greedy_search`, unless there are a ``scorer`` or a ``length_bonus``.
        length_penalty: α; 0 does not normalise and so favours short translations.
        scorer: a second scorer of hypotheses, such as :class:`CTCPrefixScorer`, or None.
        scorer_weight: λ, from 0 to 1: its share. With 1 the model's own scores are ignored.
        length_bonus: γ for each word except the end.
        max_output_length: the most words of a translation; None leaves it to the model.

    Returns:
        The words of each sentence's best translation, without the end.

    Raises:
        InputError: ``beam`` is below 1, or scores are NaN.

    Paper: Watanabe et al., "Hybrid CTC/Attention Architecture for End-to-End Speech Recognition",
    IEEE JSTSP 11(8), 2017, for the combination of two scores.

    Example:
        >>> from attnfast.models import Config, beam_search, build
        >>> model = build(Config(vocab_size=100, embed_dim=8, hidden_dim=8)).eval()
        >>> len(beam_search(model, torch.randint(4, 100, (2, 5)), torch.tensor([5, 3]), beam=3))
        2
    """
    check_model(model)
    _check_count("beam", beam)
    for name, x in (("length_penalty", length_penalty), ("length_bonus", length_bonus)):
        if not is_finite(x):
            raise_value_error(name, "a finite number", describe(x))
        if abs(x) > MAX_WEIGHT:
            raise_value_error(name, f"between -{MAX_WEIGHT} and {MAX_WEIGHT}", describe(x))
    if not is_finite(scorer_weight) or not 0 <= scorer_weight <= 1:
        raise_value_error("scorer_weight", "a number from 0 to 1", describe(scorer_weight))
    if scorer is not None and (
        isinstance(scorer, type) or not callable(getattr(scorer, "score", None))
    ):
        raise_type_error("scorer", "an object with score(...), or None", describe(scorer))
    if beam == 1 and (scorer is None or not scorer_weight) and not length_bonus:
        return greedy_search(model, source, lengths, max_output_length=max_output_length)
    limits = output_limits(model, lengths, max_output_length)
    memory, state = model.encode(source, lengths)
    batch, device = source.shape[0], source.device
    rows = torch.arange(batch, device=device).repeat_interleave(beam)
    memory, state = memory.index_select(rows), state.index_select(rows)
    words, scores = torch.full((batch * beam, 1), BOS, device=device), None
    judged = judgement = None  # the scorer's state and log-probabilities
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch)]
    nan = torch.zeros((), dtype=torch.bool, device=device)
    going = list(range(batch))  # the sentences that the rows of ``scores`` belong to

    record("beam search", "step by step", "no operator searches with a beam")
    while going:
        step = words.shape[1]
        last = limits[going] <= step
        logits, state, _ = model.decode(words[:, -1:], state, memory)
        if scorer is not None and scorer_weight:
            judgement, judged = scorer.score(words[:, -1:], judged, memory)
        log_probs = _log_probs(
            logits[:, -1], last.repeat_interleave(beam), judgement, scorer_weight
        )
        vocab = log_probs.shape[-1]
        total = log_probs.view(len(going), beam, vocab)
        if scores is None:  # all hypotheses are the same at first: only one may continue
            total[:, 1:] = -math.inf
        else:
            total += scores.unsqueeze(-1)
        total[..., EOS + 1 :] += length_bonus
        # No more than K of the best 2K end here, so at least K go on.
        scores, index = total.flatten(1).topk(2 * beam)
        nan |= scores.isnan().any()  # NaN comes before any number
        offset = torch.arange(len(going), device=device).unsqueeze(1) * beam
        origin, word = index // vocab + offset, index % vocab  # [sentences, 2K]

        ends = word == EOS
        penalty = ((5 + step) / 6) ** length_penalty
        for i, rank in (ends[:, :beam] & scores[:, :beam].isfinite()).nonzero().tolist():
            hypothesis = words[origin[i, rank], 1:].tolist()
            finished[going[i]].append((scores[i, rank].item() / penalty, hypothesis))

        alive = ends.int().sort(dim=1, stable=True).indices[:, :beam]  # the best K that go on
        ahead = (scores.gather(1, alive[:, :1]) / penalty).flatten().tolist()
        keep = []
        for i, j in enumerate(going):
            stops = last[i] or ahead[i] == -math.inf
            if not stops and (len(finished[j]) < beam or max(finished[j])[0] < ahead[i]):
                keep.append(i)
            elif not finished[j]:
                finished[j].append((-math.inf, words[i * beam, 1:].tolist()))  # the best so far
        going = [going[i] for i in keep]
        alive = alive[keep]
        scores, origin, word = (x[keep].gather(1, alive) for x in (scores, origin, word))
        rows = origin.flatten()
        if len(rows) < len(words):  # hypotheses of one sentence share its memory
            memory = memory.index_select(rows)
        words = torch.cat([words[rows], word.view(-1, 1)], 1)
        state = state.index_select(rows)
        judged = None if judged is None else judged.index_select(rows)
    _raise_if_nan(nan)
    return [max(hypotheses)[1] for hypotheses in finished]
