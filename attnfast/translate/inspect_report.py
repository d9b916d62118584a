"""Reports on a model's attention: the most suspicious sentences, in a table and on a page."""

from __future__ import annotations

import html
import json
import statistics
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnfast.analysis import diagnostics
from attnfast.models import Seq2Seq
from attnfast.ops.arguments import mean_of_heads
from attnfast.translate.data import Example, Links, Tokenizer, collate

#: The names of failures.
PATTERNS = (
    "diffuse", "concentrated", "stuck", "drifting", "skipped", "saturated", "striped", "block",
    "crossing",
)  # fmt: skip
#: Measurements of a sentence, and their names in tables.
NUMBERS = {
    "entropy": "mean entropy of a row, nats",
    "largest": "mean largest weight of a row",
    "diagonality": "weight within two words of the diagonal",
    "over": "translated more than once, share of the source",
    "under": "not translated, share of the source",
    "repetition": "repeated pairs of words, share of the target",
}


class Sentence(NamedTuple):
    """Measurements of one sentence's attention.

    Attributes:
        number: number of the line.
        source, target: tokens, each with the end.
        weights: ``[T, Tk]``.
        numbers: measurements by name.
        failures: names of :data:`PATTERNS`.
        links: the true links of tokens, ``(source, target)``, or None.
        error_rate: the alignment error rate, or None.
        words: the predicted, the sure and the possible links of words, or None.
    """

    number: int
    source: list[str]
    target: list[str]
    weights: Tensor
    numbers: dict[str, float]
    failures: list[str]
    links: set[tuple[int, int]] | None = None
    error_rate: float | None = None
    words: tuple[diagnostics.LinkSet, diagnostics.LinkSet, diagnostics.LinkSet] | None = None

    @property
    def suspicion(self) -> float:
        """The suspicion score: the number of failures plus the shares of errors."""
        shares = [self.numbers[x] for x in ("over", "under", "repetition")]
        return len(self.failures) + sum(shares) + (self.error_rate or 0.0)


@torch.no_grad()
def inspect(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    alignments: Sequence[Links] | None = None,
    batch_size: int = 64,
    max_length: int = 256,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Sentence]:
    """Measure attention under teacher forcing; return sentences, the most suspicious first.

    Args:
        model: it runs in evaluation mode, independently of its current mode.
        pairs: sources and targets; those with an empty side, or more than ``max_length`` tokens on
            one, are skipped.
        alignments: of the pairs' words, if they are known.
        batch_size: sentences that are read together.
        progress: called after each batch with the number of pairs in it.
    """
    device, training = next(model.parameters()).device, model.training
    examples = []
    for number, (source, target) in enumerate(pairs):
        own = [] if model.pointer is None else tokenizer.oov_words(source)
        example = Example(tokenizer.encode(source, own), tokenizer.encode(target, own))
        if 0 < len(example.source) <= max_length and 0 < len(example.target) <= max_length:
            examples.append((number, example))
    found: list[Sentence] = []
    model.eval()
    try:
        for first in range(0, len(examples), batch_size):
            some = examples[first : first + batch_size]
            batch = collate([example for _, example in some]).to(device)
            memory, state = model.encode(batch.source, batch.lengths)
            weights = model.decode(batch.target_in, state, memory, need_weights=True)[2]
            assert weights is not None, "the model has no attention"
            weights = mean_of_heads(weights).float().cpu()
            found += _sentences(tokenizer, pairs, some, weights, alignments)
            progress(len(some))
    finally:
        model.train(training)
    return sorted(found, key=lambda x: (-x.suspicion, x.number))


def _sentences(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    some: Sequence[tuple[int, Example]],
    weights: Tensor,
    alignments: Sequence[Links] | None,
) -> list[Sentence]:
    """Return the sentences of a batch; no measurement counts the end of source or target."""
    lengths, targets = (
        torch.tensor([len(getattr(example, side)) for _, example in some])
        for side in ("source", "target")
    )
    call = weights, lengths, targets
    rows, near = diagnostics.row_statistics(*call), diagnostics.diagonality(*call).share
    lacks = diagnostics.over_under_translation(*call)
    failures = diagnostics.failures(*call).sentences
    links = diagnostics.extract_alignment(weights, lengths + 1, targets, null=-1)
    found = []
    for b, (number, example) in enumerate(some):
        n, m = len(example.source), len(example.target)
        numbers = {
            "entropy": float(rows.entropy[b, :m].mean()),
            "largest": float(rows.max_weight[b, :m].mean()),
            "diagonality": float(near[b]),
            "over": float(lacks.over[b]),
            "under": float(lacks.under[b]),
            "repetition": diagnostics.repetition(example.target, 2),
        }
        error = true = compared = None
        if alignments is not None:
            of_source, of_target = (tokenizer.word_numbers(text) for text in pairs[number])
            if -1 not in (*of_source, *of_target):
                words = {(of_source[j], of_target[i]) for j, i in links[b]}
                known = alignments[number]
                compared = words, known.sure, known.possible
                error = diagnostics.alignment_score(*([x] for x in compared)).error_rate
                either = known.sure | known.possible
                true = {
                    (j, i)
                    for i, t in enumerate(of_target)
                    for j, s in enumerate(of_source)
                    if (s, t) in either
                }
        source, target = (tokenizer.tokens(text) for text in pairs[number])
        flags = [x for x in PATTERNS if failures[x][b]]
        shown = weights[b, : m + 1, : n + 1]
        both = [*source, "(end)"], [*target, "(end)"]
        found.append(Sentence(number + 1, *both, shown, numbers, flags, true, error, compared))
    return found


def _quantiles(values: Sequence[float]) -> list[float]:
    """Return the least, the quartiles and the largest."""
    if len(values) == 1:
        return [values[0]] * 5
    return [min(values), *statistics.quantiles(values, n=4, method="inclusive"), max(values)]


def _numbers(sentences: Sequence[Sentence]) -> dict[str, list[float]]:
    """Return the measurements of all sentences, by name."""
    numbers = {text: [x.numbers[name] for x in sentences] for name, text in NUMBERS.items()}
    errors = [x.error_rate for x in sentences if x.error_rate is not None]
    return numbers | ({"alignment error rate": errors} if errors else {})


def _by_length(sentences: Sequence[Sentence], width: int = 10) -> list[str]:
    """Return a table by the number of source tokens: means, and the alignment of all words."""
    groups: dict[int, list[Sentence]] = {}
    for x in sentences:
        groups.setdefault(max(len(x.source) - 2, 0) // width, []).append(x)
    columns = ("over", "under", "repetition")
    heads = ("sentences", *columns, "F1", "error rate")
    lines = [f"{'source tokens':<14}" + "".join(f"{x:>12}" for x in heads)]
    for group, some in sorted(groups.items()):
        name = f"{group * width + 1}–{(group + 1) * width}"
        cells = [f"{len(some):>12}"]
        cells += [f"{statistics.fmean(x.numbers[c] for x in some):>12.2f}" for c in columns]
        known = [x.words for x in some if x.words is not None]
        if known:
            score = diagnostics.alignment_score(*zip(*known))
            cells += [f"{score.f1:>12.2f}", f"{score.error_rate:>12.2f}"]
        lines.append(f"{name:<14}" + "".join(cells))
    return lines


def table(sentences: Sequence[Sentence], most: int = 10) -> str:
    """Return a text report: failures, quantiles of measurements, and the worst sentences."""
    lines = [f"{'fails':<14}{'sentences':>10}"]
    for name in PATTERNS:
        lines.append(f"{name:<14}{sum(name in x.failures for x in sentences):>10}")
    heads = ("least", "quarter", "median", "3 quarters", "most")
    lines += ["", f"{'':<48}" + "".join(f"{x:>12}" for x in heads)]
    for text, values in _numbers(sentences).items():
        lines.append(f"{text:<48}" + "".join(f"{x:>12.2f}" for x in _quantiles(values)))
    lines += ["", *_by_length(sentences)]
    lines += ["", f"{'line':>6}  {'suspicion':>9}  {'fails':<34}source"]
    for x in sentences[:most]:
        fails = ", ".join(x.failures) or "–"
        text = " ".join(x.source[:-1])
        text = text if len(text) <= 60 else f"{text[:59]}…"
        lines.append(f"{x.number:>6}  {x.suspicion:>9.2f}  {fails:<34}{text}")
    return "\n".join(lines)


def page(sentences: Sequence[Sentence], title: str, max_sentences: int = 200) -> str:
    """Return a self-contained HTML page: the table, and a map of each sentence.

    Args:
        title: title of the page.
        max_sentences: the largest number of sentences, the most suspicious first.
    """
    shown = sentences[:max_sentences]
    count = f"{len(sentences)} sentences" if len(sentences) != 1 else "one sentence"
    counts = f"{count}." if len(shown) == len(sentences) else f"{count}, {len(shown)} on this page."
    rows = [(x, sum(x in y.failures for y in sentences)) for x in PATTERNS]
    failures = _facts(["", "sentences"], [(name, str(n)) for name, n in rows])
    heads = ["", "least", "quarter", "median", "three quarters", "most", "distribution"]
    spread = [
        (text, *(f"{x:.2f}" for x in _quantiles(values)), _bars(values, text))
        for text, values in _numbers(sentences).items()
    ]
    data = [
        {
            "number": x.number, "source": x.source, "target": x.target,
            "weights": (100 * x.weights).round().nan_to_num(0).int().tolist(),
            "links": sorted(map(list, x.links or ())),
        }
        for x in shown
    ]  # fmt: skip
    template = string.Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(title),
        counts=counts,
        failures=failures,
        distributions=_facts(heads, spread, raw=6),
        sentences="\n".join(_details(i, x) for i, x in enumerate(shown)),
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _facts(heads: Sequence[str], rows: Sequence[Sequence[str]], raw: int = -1) -> str:
    """Return a table of HTML; column ``raw`` is HTML already."""
    top = "".join(f'<th scope="col">{html.escape(x)}</th>' for x in heads)
    body = ""
    for first, *others in rows:
        cells = (x if i == raw else html.escape(x) for i, x in enumerate(others, 1))
        body += f'<tr><th scope="row">{html.escape(first)}</th>'
        body += "".join(f"<td>{x}</td>" for x in cells) + "</tr>\n"
    return f'<table class="facts"><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table>'


def _bars(values: Sequence[float], text: str, bins: int = 20) -> str:
    """Return a histogram as SVG."""
    least, most = min(values), max(values)
    counts = [0] * bins
    for x in values:
        counts[min(int((x - least) / ((most - least) or 1) * bins), bins - 1)] += 1
    high = max(counts)
    bars = "".join(
        f'<rect x="{7 * i}" y="{30 - 30 * n / high:.1f}" width="6" height="{30 * n / high:.1f}"/>'
        for i, n in enumerate(counts)
    )
    label = html.escape(f"histogram of {text}, from {least:.2f} to {most:.2f}")
    return (
        f'<svg role="img" aria-label="{label}" width="{7 * bins}" height="30" fill="#08518a">'
        f"{bars}</svg>"
    )


def _details(i: int, sentence: Sentence) -> str:
    """Return a sentence as an HTML element that unfolds to its map; the first is open."""
    flags = "".join(f'<span class="flag">{html.escape(x)}</span>' for x in sentence.failures)
    facts = [f"{name} {x:.2f}" for name, x in sentence.numbers.items()]
    if sentence.error_rate is not None:
        facts.append(f"alignment error rate {sentence.error_rate:.2f}")
    texts = [html.escape(" ".join(x[:-1])) for x in (sentence.source, sentence.target)]
    return (
        f'<details{" open" if i == 0 else ""}><summary><span class="of">{sentence.number}</span> '
        f'{texts[0]} <span aria-hidden="true">→</span> {texts[1]}{flags}</summary>'
        f'<div class="of">{html.escape(", ".join(facts))}</div>'
        f'<div class="map" data-sentence="{i}"></div></details>'
    )
