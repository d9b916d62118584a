"""Translating lines of text, and scoring translations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attnfast._utils.checks import (
    InputError,
    argument_message,
    describe,
    out_of_memory,
)
from attnfast._utils.settings import check_default, check_settings, setting, with_settings
from attnfast.decoding import SearchOutput, beam_search, sample, sharing_packed_parameters
from attnfast.decoding._constraints import search_limits
from attnfast.models import BOS, PAD, UNK, FixedContext, Seq2Seq
from attnfast.ops.arguments import length_mask, mean_of_heads
from attnfast.translate.data import Tokenizer, pad_sources

#: The largest number of tokens in a batch of sources, its padding included.
LARGEST = 2**14


@with_settings
@dataclass(frozen=True)
class SearchOptions:
    """The options of a search, as those of :mod:`attnfast.decoding`, and of its batches.

    Raises:
        InputError: an option is out of range, or has no effect; the message names it.
    """

    beam: int = setting(5, "hypotheses of the beam search; 1 is greedy", at_least=1)
    n_best: int = setting(
        1, "translations of each line: the best of the beam, or the number drawn", at_least=1
    )
    length_penalty: float = setting(
        1.0,
        "exponent of the length by which scores are divided; 0 favours short translations",
        at_least=-64,
        at_most=64,
    )
    coverage_penalty: float = setting(
        0.0, "weight of the penalty on unattended source tokens", at_least=0, at_most=64
    )
    length_bonus: float = setting(
        0.0, "score added for each token of a translation", at_least=-64, at_most=64
    )
    min_output_length: int = setting(0, "tokens that a translation has at least", at_least=0)
    max_output_length: int | None = setting(
        None,
        "tokens allowed in a translation; unless given, training pairs set the limit",
        at_least=1,
    )
    no_repeat_ngram: int = setting(
        0, "tokens of the n-grams that a translation may not repeat; 0 allows all", at_least=0
    )
    replace_unknown: bool = setting(
        False, "allow unknown tokens and replace each by the source token of the largest weight"
    )
    sample: bool = setting(False, "draw every token at random instead of a beam search")
    temperature: float = setting(
        1.0, "divisor of log-probabilities in sampling; below 1 favours probable tokens", above=0
    )
    top_k: int = setting(0, "most probable tokens to draw from; 0 for all", at_least=0)
    top_p: float = setting(
        1.0, "probability of the most probable tokens to draw from", above=0, at_most=1
    )
    seed: int = setting(
        1, "seed of sampling; it and the line's number determine a draw", at_least=0, below=2**63
    )
    alignments: bool = setting(
        False, "find the source token of the largest weight for each token, for --format json"
    )
    max_length: int | None = setting(
        None, "tokens to which longer sources are truncated; unlimited unless given", at_least=1
    )
    int8: bool = setting(
        False, "round weights to 8 bits: faster, with a small loss of quality; on a CPU"
    )
    batch_size: int = setting(
        64, "sentences that are searched together, fewer if they are long", at_least=1
    )

    def __post_init__(self):
        check_settings(self)
        unused, where = ("temperature", "top_k", "top_p", "seed"), "without sampling"
        if self.sample:
            unused = ("beam", "length_penalty", "coverage_penalty", "length_bonus")
            where = "with sampling"
        for name in unused:
            check_default(self, name, where)
        if self.n_best > self.beam and not self.sample:
            expected = f"at most the beam of {self.beam}"
            raise InputError(argument_message("n_best", expected, self.n_best))
        longest, least = self.max_output_length, self.min_output_length
        if longest is not None and longest < least:
            expected = f"at least the smallest length of {least}"
            raise InputError(argument_message("max_output_length", expected, longest))

    def check(self, model: Seq2Seq) -> None:
        """Raise if an option needs attention, and the model has none."""
        if isinstance(model.decoder.attention, FixedContext):
            for name in ("coverage_penalty", "replace_unknown", "alignments"):
                check_default(self, name, "for a model without attention")


class Hypothesis(NamedTuple):
    """A translation of a line.

    ``score`` is that of the search, −∞ if the translation could not end; ``token_scores`` those of
    its ``tokens``, without the end's. On request, ``alignment`` has the index of the source token
    with the largest attention weight for each token. ``copied`` says whether a token is a word of
    the source that is not in the vocabulary; it is None if the search allows none.
    """

    text: str
    score: float
    tokens: list[str]
    token_scores: list[float]
    alignment: list[int] | None = None
    copied: list[bool] | None = None


class Translation(NamedTuple):
    """The translations of a line, the best first or in the order drawn; none of an empty line.

    ``is_limited``: the first has the largest length that the search allows, and may lack its end.
    """

    source_tokens: list[str]
    hypotheses: list[Hypothesis]
    is_limited: bool = False

    @property
    def text(self) -> str:
        """The first translation; empty for an empty line."""
        return self.hypotheses[0].text if self.hypotheses else ""


class _Line(NamedTuple):
    """A line to translate: its number, ids, their tokens, and those not in the vocabulary."""

    number: int
    ids: list[int]
    tokens: list[str]
    oov: list[str]
    prefix: list[int]


def translate(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    options: SearchOptions | None = None,
    prefixes: Sequence[str] | None = None,
    *,
    name: str = "",
    first: int = 1,
    warn: Callable[[str], None] = lambda sentence: None,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Translation]:
    """Translate lines.

    Args:
        model: it runs in evaluation mode, independently of its current mode.
        lines: one sentence each.
        options: of the search.
        prefixes: the beginnings of the lines' translations, which the model continues.
        name: of the text, in warnings and errors that name a line.
        first: number of the first line.
        warn: called with a sentence about each line that was truncated, that has unknown words, or
            whose translation is as long as the search allows.
        progress: called after each batch with the number of lines in it.

    Raises:
        InputError: too little memory for a line; an option or prefix that does not fit the model.
    """
    options = options or SearchOptions()
    options.check(model)
    title = f"{name}, line" if name else "line"
    every = [
        _encode(model, tokenizer, line, prefix, number, options, title, warn)
        for number, (line, prefix) in enumerate(zip(lines, prefixes or [""] * len(lines)), first)
    ]
    translations = [Translation(x.tokens, []) for x in every]
    training = model.training
    model.eval()
    try:
        with sharing_packed_parameters(model):
            for chosen in _batches([len(x.ids) for x in every], options.batch_size):
                batch = [every[i] for i in chosen]
                try:
                    found = _search(model, tokenizer, batch, options)
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error):
                        raise
                    width = "n_best" if options.sample else "beam"
                    raise InputError(
                        f"{title} {batch[-1].number}: too little memory to translate "
                        f"{len(batch[-1].ids)} tokens with a {width} of {getattr(options, width)}: "
                        f"shorter lines or a smaller {width} may fit"
                    ) from error
                for i, translation in zip(chosen, found):
                    translations[i] = translation
                    if translation.is_limited:
                        warn(
                            f"{title} {first + i}: its translation reached the limit of "
                            f"{len(translation.hypotheses[0].tokens)} tokens and may lack its end"
                        )
                progress(len(chosen))
    finally:
        model.train(training)
    return translations


def _encode(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    line: str,
    prefix: str,
    number: int,
    options: SearchOptions,
    title: str,
    warn: Callable[[str], None],
) -> _Line:
    """Encode a line and the beginning of its translation."""
    oov = [] if model.pointer is None else tokenizer.oov_words(line)
    ids, tokens = tokenizer.encode(line, oov), tokenizer.tokens(line)
    positions = getattr(model.encoder, "max_length", None)  # including the end
    limits = [options.max_length, None if positions is None else positions - 1]
    limit = min([x for x in limits if x is not None], default=len(ids))
    if len(ids) > limit:
        warn(f"{title} {number}: cut from {len(ids)} tokens to the limit of {limit}")
        ids, tokens = ids[:limit], tokens[:limit]
    if UNK in ids:
        warn(f"{title} {number}: {ids.count(UNK)} of its tokens are unknown to the model")
    begin = tokenizer.encode(prefix, oov)
    V = tokenizer.vocab_size
    unknown = [t for t, i in enumerate(begin) if i == UNK or (i >= V and i not in ids)]
    if unknown:
        token = describe(tokenizer.tokens(prefix)[unknown[0]])
        raise InputError(
            f"{title} {number}: expected a prefix of tokens that the model knows, got {token}"
        )
    if options.max_output_length is not None and len(begin) > options.max_output_length:
        raise InputError(
            f"{title} {number}: expected a prefix of at most {options.max_output_length} tokens, "
            f"got {len(begin)}"
        )
    return _Line(number, ids, tokens, oov, begin)


def _search(
    model: Seq2Seq, tokenizer: Tokenizer, lines: Sequence[_Line], options: SearchOptions
) -> list[Translation]:
    """Translate a batch."""
    source, lengths = pad_sources([x.ids for x in lines])
    prefix = [x.prefix for x in lines] if any(x.prefix for x in lines) else None
    least, most = options.min_output_length, options.max_output_length
    sources = model, source.to(next(model.parameters()).device), lengths
    shared: dict[str, Any] = {
        "min_length": least, "max_length": most, "prefix": prefix,
        "no_repeat_ngram": options.no_repeat_ngram,
        "forbidden": (PAD, BOS) if options.replace_unknown else (PAD, UNK, BOS),
        "need_weights": options.alignments or options.replace_unknown, "int8": options.int8,
    }  # fmt: skip
    if options.sample:
        seeds = [random.Random(f"{options.seed} {x.number}").getrandbits(32) for x in lines]
        found = sample(
            *sources, options.n_best, temperature=options.temperature, top_k=options.top_k,
            top_p=options.top_p, generator=[torch.Generator().manual_seed(x) for x in seeds],
            **shared,
        )  # fmt: skip
    else:
        found = beam_search(
            *sources, options.beam, n_best=options.n_best, length_penalty=options.length_penalty,
            coverage_penalty=options.coverage_penalty, length_bonus=options.length_bonus, **shared,
        )  # fmt: skip
    limits = search_limits(model, lengths, least, most, prefix).tolist()
    return _collect(model, tokenizer, lines, lengths, found, limits, options)


def _collect(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    lines: Sequence[_Line],
    lengths: torch.Tensor,
    found: SearchOutput,
    limits: list[int],
    options: SearchOptions,
) -> list[Translation]:
    """Return the translations of a batch as text."""
    V, translations = tokenizer.vocab_size, []
    copies = model.pointer is not None or options.replace_unknown
    scores, word_scores = found.scores.tolist(), found.word_scores.tolist()
    largest = None
    if found.weights is not None:  # the end of a source is no token
        exists = length_mask(lengths - 1, found.weights.shape[-1])[:, None, None]
        largest = found.weights.cpu().masked_fill(~exists, -1).argmax(-1).tolist()
    for i, (line, several) in enumerate(zip(lines, found.hypotheses())):
        hypotheses = []
        for n, words in enumerate(several):
            alignment = [] if largest is None else largest[i][n][: len(words)]
            own = line.oov
            if options.replace_unknown:  # the source's tokens get ids too
                words = [V + len(own) + j if x == UNK else x for x, j in zip(words, alignment)]
                own = [*own, *line.tokens]
            hypotheses.append(
                Hypothesis(
                    tokenizer.decode(words, own),
                    scores[i][n],
                    tokenizer.to_tokens(words, own),
                    word_scores[i][n][: len(words)],
                    alignment if options.alignments else None,
                    [x >= V for x in words] if copies else None,
                )
            )
        is_limited = len(several[0]) + 1 >= limits[i]
        translations.append(Translation(line.tokens, hypotheses, is_limited))
    return translations


def _batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of indices of nonempty sequences, the shortest first."""
    batch: list[int] = []
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__):
        if len(batch) == batch_size or (batch and (len(batch) + 1) * lengths[i] > LARGEST):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@torch.no_grad()
def alignment(model: Seq2Seq, tokenizer: Tokenizer, source: str, target: str) -> torch.Tensor:
    """Return the weights ``[T, Tk]`` with which the model reads a source while writing a target.

    Rows and columns are the tokens of the two sentences, each with its end.
    """
    from attnfast.translate.data import Example, collate

    own = [] if model.pointer is None else tokenizer.oov_words(source)
    batch = collate([Example(tokenizer.encode(source, own), tokenizer.encode(target, own))])
    device = next(model.parameters()).device
    batch = batch.to(device)
    memory, state = model.encode(batch.source, batch.lengths)
    weights = model.decode(batch.target_in, state, memory, need_weights=True)[2]
    assert weights is not None, "the model has no attention"
    return mean_of_heads(weights)[0].cpu()
