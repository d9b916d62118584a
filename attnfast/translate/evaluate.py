"""Translating lines of text, and scoring translations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from attnfast._utils.checks import InputError, optional, out_of_memory
from attnfast.decoding import beam_search
from attnfast.models import UNK, Seq2Seq
from attnfast.translate.data import Tokenizer, pad_sources

#: The largest number of tokens in a batch of sources, its padding included.
LARGEST = 2**14


class Translations(list[str]):
    """Translated lines; ``limited`` holds the numbers of those that reached the limit of length."""

    def __init__(self, lines: Sequence[str], limited: Sequence[int] = ()):
        super().__init__(lines)
        self.limited = list(limited)


def translate(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    beam: int = 5,
    max_length: int | None = None,
    batch_size: int = 64,
    *,
    max_output_length: int | None = None,
    name: str = "",
    warn: Callable[[str], None] = lambda sentence: None,
    progress: Callable[[int], object] = lambda done: None,
) -> Translations:
    """Translate lines, one output line for each input line; empty lines stay empty.

    Args:
        model: it runs in evaluation mode, independently of its current mode.
        lines: one sentence each.
        beam: width of the search; 1 is greedy.
        max_length: tokens to which a longer source is truncated; None reads it whole.
        batch_size: sentences of similar length that are searched together; fewer if they are long.
        max_output_length: the most tokens of a translation; None leaves it to the model.
        name: of the text, in warnings and errors that name a line.
        warn: called with a sentence about each line that was truncated, that has unknown words, or
            whose translation is as long as the search allows.
        progress: called after each batch with the number of lines in it.

    Raises:
        InputError: too little memory for a line; as for the searches.
    """
    sizes = {"max_length": max_length, "batch_size": batch_size}
    for size, least in (*sizes.items(), ("max_output_length", max_output_length)):
        if least is not None and least < 1:
            raise InputError(f"{size} must be at least 1, got {least}")
    title = f"{name}, line" if name else "line"
    sources, owns = [], []
    for number, line in enumerate(lines, 1):
        own = [] if model.pointer is None else tokenizer.oov_words(line)
        ids = tokenizer.encode(line, own)
        if max_length is not None and len(ids) > max_length:
            warn(f"{title} {number}: cut from {len(ids)} tokens to the limit of {max_length}")
            ids = ids[:max_length]
        if UNK in ids:
            warn(f"{title} {number}: {ids.count(UNK)} of its tokens are unknown to the model")
        sources.append(ids)
        owns.append(own)

    outputs, limited = [""] * len(lines), []
    training = model.training
    model.eval()
    try:
        for chosen in _batches([len(ids) for ids in sources], batch_size):
            try:
                batch = [sources[i] for i in chosen]
                found, limits = _search(model, batch, beam, max_output_length)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                raise InputError(
                    f"{title} {chosen[-1] + 1}: too little memory to translate "
                    f"{len(batch[-1])} tokens with a beam of {beam}: shorter lines or a smaller "
                    "beam may fit"
                ) from error
            for i, ids, limit in zip(chosen, found, limits):
                outputs[i] = tokenizer.decode(ids, owns[i])
                if len(ids) + 1 >= limit:
                    limited.append(i + 1)
                    warn(
                        f"{title} {i + 1}: its translation reached the limit of {limit - 1} tokens "
                        "and may lack its end"
                    )
            progress(len(chosen))
    finally:
        model.train(training)
    return Translations(outputs, sorted(limited))


def _search(
    model: Seq2Seq, sources: Sequence[list[int]], beam: int, max_output_length: int | None
) -> tuple[list[list[int]], list[int]]:
    """Return the translations of a batch, and the token limit of each, the end included."""
    source, lengths = pad_sources(sources)
    limits = model.output_limit(lengths)
    if max_output_length is not None:
        limits = torch.full_like(limits, max_output_length + 1)
    source = source.to(next(model.parameters()).device)
    found = beam_search(model, source, lengths, beam, max_length=max_output_length)
    return found.best, limits.tolist()


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
    return weights[0].cpu()


def bleu(outputs: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return sacrebleu's corpus BLEU and its signature.

    Paper: Post, "A Call for Clarity in Reporting BLEU Scores", WMT 2018, arXiv:1804.08771.
    """
    metric = optional("sacrebleu", "scoring").BLEU()
    score = metric.corpus_score(list(outputs), [list(references)]).score
    return score, str(metric.get_signature())


def bleu_by_length(
    sources: Sequence[str], outputs: Sequence[str], references: Sequence[str], width: int = 5
) -> list[tuple[str, int, float]]:
    """Score sentences by the number of words in their source.

    Returns:
        A row for each range of ``width`` lengths that occurs: name, number of sentences, BLEU.
    """
    groups: dict[int, list[int]] = {}
    for i, source in enumerate(sources):
        groups.setdefault((max(len(source.split()), 1) - 1) // width, []).append(i)
    rows = []
    for group, members in sorted(groups.items()):
        name = f"{group * width + 1}–{(group + 1) * width}"
        score, _ = bleu([outputs[i] for i in members], [references[i] for i in members])
        rows.append((name, len(members), score))
    return rows
