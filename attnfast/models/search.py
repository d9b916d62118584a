"""Decoding: greedy, and beam search over a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from attnfast import dispatch
from attnfast.errors import InputError, check_whole, describe, refuse, refuse_type
from attnfast.models.decoders import BahdanauDecoder, LuongDecoder
from attnfast.models.seq2seq import BOS, EOS, Seq2Seq, Source
from attnfast.nn.history import HistoryAttention
from attnfast.nn.layer import RecurrentState, backend_of, terms_of, widened
from attnfast.nn.linear import is_plain
from attnfast.ops.arguments import is_finite
from attnfast.ops.copying import LOWEST
from attnfast.ops.search import SEARCH, Search


def output_limit(lengths: Tensor) -> Tensor:
    """Return how many words, the end included, a translation of ``lengths [B]`` words may have."""
    return 2 * lengths.cpu() + 10


def _log_probs(logits: Tensor, must_end: Tensor) -> Tensor:
    """Turn ``logits [B, V]`` into log-probabilities of words that may come next.

    Padding, the unknown word and the start of a sentence may not; rows of ``must_end [B]`` end.
    """
    logits = logits.float()
    other = torch.arange(logits.shape[-1], device=logits.device) != EOS
    # What a pointer-generator cannot say, another sentence's own words among it.
    logits = logits.masked_fill((logits == torch.tensor(LOWEST)) & other, -math.inf)
    logits[:, :EOS] = -math.inf  # a list of the three would be copied to a GPU
    log_probs = logits.log_softmax(-1)
    return log_probs.masked_fill(must_end.to(logits.device).unsqueeze(-1) & other, -math.inf)


def _best_words(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of ``logits [B, V]`` among words that may come next, and its word.

    Both are ``[B, 1]``. It is the word whose log-probability is the largest.
    """
    best, words = logits[:, EOS:].float().max(-1, keepdim=True)
    return best, (words + EOS).masked_fill(best == LOWEST, EOS)


def _refuse_nan(found: Tensor | bool) -> None:
    """Raise if a search met scores that are NaN, asked at its end so as to wait for a GPU once."""
    if found:
        raise InputError(
            "the model's scores must be finite numbers, got NaN: its parameters are damaged or too "
            "large"
        )


def check_model(model: object) -> None:
    """Refuse what has not the two calls of a :class:`Seq2Seq`."""
    if not callable(getattr(model, "encode", None)) or not callable(getattr(model, "decode", None)):
        refuse_type("model", "a Seq2Seq", describe(model))


def _in_one_call(
    model: Seq2Seq, source: Source, state: RecurrentState, limits: Tensor
) -> list[list[int]] | None:
    """Return what :func:`greedy_search` does, by one operator; None if none serves the model."""
    if not is_plain(model, Seq2Seq) or (model.dropout.training and model.dropout.p):
        return None
    decoder, words, memory = model.decoder, model.embedding, source.memory
    if any(callable(x) for part in (model, decoder) for x in vars(part).values()):
        return None  # a method of its own
    if not is_plain(decoder, BahdanauDecoder, LuongDecoder) or model.pointer is not None:
        return None
    layer, readout = decoder.parts()
    of_plain = [(words, nn.Embedding), (decoder.readout, nn.Linear), (model.dropout, nn.Dropout)]
    if layer.rnn is not None or words.max_norm or not all(is_plain(*x) for x in of_plain):
        return None
    attention, like = decoder.attention, words.weight
    if isinstance(attention, HistoryAttention):
        return None
    backend = backend_of(attention, memory, like, history=state.history, operator=SEARCH.name)
    if backend is None:
        return None
    most = int(limits.max()) if len(limits) else 0
    steps = like.new_empty(len(limits), most, 0)
    terms, _ = terms_of(attention, memory, backend, state.history, steps)
    call = Search(
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
    call = widened(call)
    try:
        rows = dispatch.run(SEARCH, call, backend).words.tolist()
    except Exception:
        SEARCH.check(call)  # says in one sentence what does not fit
        raise
    _refuse_nan(any(EOS not in row or -1 in row[: row.index(EOS)] for row in rows))
    return [row[: row.index(EOS)] for row in rows]


@torch.no_grad()
def greedy_search(model: Seq2Seq, source: Tensor, lengths: Tensor) -> list[list[int]]:
    """Take the most probable word at every step.

    Args:
        model: in evaluation mode.
        source: word ids ``[B, Tk]``.
        lengths: ``[B]``.

    Returns:
        The words of each translation, without the end.

    Raises:
        InputError: scores are NaN.
    """
    check_model(model)
    memory, state = model.encode(source, lengths)
    limits = output_limit(lengths).to(source.device).unsqueeze(1)
    if (rows := _in_one_call(model, memory, state, limits)) is not None:
        return rows
    words = source.new_full((source.shape[0], 1), BOS)
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
    _refuse_nan(nan.any())
    rows = torch.cat(outputs, 1).tolist() if outputs else []
    return [row[: row.index(EOS)] for row in rows]


@torch.no_grad()
def beam_search(
    model: Seq2Seq, source: Tensor, lengths: Tensor, beam: int = 5, length_penalty: float = 1.0
) -> list[list[int]]:
    r"""Keep the best ``beam`` partial translations of each sentence at every step.

    A finished translation y of n words, its end included, scores
    :math:`\log P(y) / ((5 + n) / 6)^\alpha`, the normalisation of GNMT (Wu et al., 2016,
    arXiv:1609.08144). A sentence is done when ``beam`` of its translations have finished.

    Args:
        model: in evaluation mode.
        source: word ids ``[B, Tk]``.
        lengths: ``[B]``.
        beam: K; 1 is greedy search.
        length_penalty: α; 0 does not normalise and so favours short translations.

    Returns:
        The words of each sentence's best translation, without the end.

    Raises:
        InputError: ``beam`` is below 1, or scores are NaN.
    """
    check_model(model)
    try:
        check_whole("beam", beam)
    except ValueError as error:
        raise InputError(str(error)) from None
    if not is_finite(length_penalty):
        refuse("length_penalty", "a finite number", describe(length_penalty))
    memory, state = model.encode(source, lengths)
    batch, device = source.shape[0], source.device
    rows = torch.arange(batch, device=device).repeat_interleave(beam)
    memory, state = memory.index_select(rows), state.index_select(rows)
    limits = output_limit(lengths)
    words = source.new_full((batch * beam, 1), BOS)
    scores = torch.full((batch, beam), -math.inf, device=device)
    scores[:, 0] = 0  # all hypotheses are the same at first: only one may continue
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch)]
    nan = torch.zeros((), dtype=torch.bool, device=device)
    going = list(range(batch))  # the sentences that the rows of ``scores`` belong to

    while going:
        step = words.shape[1]
        last = limits[going] <= step
        logits, state, _ = model.decode(words[:, -1:], state, memory)
        log_probs = _log_probs(logits[:, -1], last.repeat_interleave(beam))
        vocab = log_probs.shape[-1]
        total = scores.unsqueeze(-1) + log_probs.view(len(going), beam, vocab)
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
        keep = [i for i, j in enumerate(going) if len(finished[j]) < beam and not last[i]]
        going = [going[i] for i in keep]
        alive = alive[keep]
        scores, origin, word = (x[keep].gather(1, alive) for x in (scores, origin, word))
        rows = origin.flatten()
        words = torch.cat([words[rows], word.view(-1, 1)], 1)
        state = state.index_select(rows)
        if len(rows) < len(memory.words):  # hypotheses of one sentence share its memory
            memory = memory.index_select(rows)
    _refuse_nan(nan)
    return [max(hypotheses)[1] for hypotheses in finished]
