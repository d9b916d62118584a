"""Translating lines of text, and scoring translations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attnfast.data import Tokenizer, pad_sources
from attnfast.errors import optional
from attnfast.models import UNK, Seq2Seq, beam_search, greedy_search


def translate(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    beam: int = 5,
    max_length: int = 256,
    batch_size: int = 64,
    warn: Callable[[str], None] = lambda sentence: None,
    progress: Callable[[int], object] = lambda done: None,
) -> list[str]:
    """Translate lines; every line in gives a line out, an empty one an empty one.

    Args:
        model: it is used in evaluation mode, whatever mode it is in.
        lines: one sentence each.
        beam: width of the search; 1 is greedy.
        max_length: a longer source, in tokens, is cut to this.
        batch_size: sentences of like length that are searched together.
        warn: called with a sentence about a line that was cut or holds unknown words.
        progress: called after each batch with the number of lines in it.
    """
    sources, owns = [], []
    for number, line in enumerate(lines, 1):
        own = [] if model.pointer is None else tokenizer.own_words(line)
        ids = tokenizer.encode(line, own)
        if len(ids) > max_length:
            warn(f"line {number}: cut from {len(ids)} tokens to the limit of {max_length}")
            ids = ids[:max_length]
        if UNK in ids:
            warn(f"line {number}: {ids.count(UNK)} of its tokens are unknown to the model")
        sources.append(ids)
        owns.append(own)

    outputs = [""] * len(lines)
    order = sorted((i for i, ids in enumerate(sources) if ids), key=lambda i: len(sources[i]))
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            source, lengths = pad_sources([sources[i] for i in chosen])
            if beam == 1:
                found = greedy_search(model, source.to(device), lengths)
            else:
                found = beam_search(model, source.to(device), lengths, beam)
            for i, ids in zip(chosen, found):
                outputs[i] = tokenizer.decode(ids, owns[i])
            progress(len(chosen))
    finally:
        model.train(training)
    return outputs


@torch.no_grad()
def alignment(model: Seq2Seq, tokenizer: Tokenizer, source: str, target: str) -> torch.Tensor:
    """Return the weights ``[T, Tk]`` with which the model reads a source while writing a target.

    Rows and columns are the tokens of the two sentences, each with its end.
    """
    from attnfast.data import Example, collate

    own = [] if model.pointer is None else tokenizer.own_words(source)
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
        A row for each range of ``width`` lengths that occurs: its name, how many sentences, BLEU.
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
