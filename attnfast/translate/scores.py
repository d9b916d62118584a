"""Scores of translations: of a corpus, by length and word frequency, and of several models."""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attnfast._utils.checks import optional

__all__ = [
    "CorpusScore",
    "LengthScore",
    "bleu",
    "compare",
    "corpus_scores",
    "group_by_length",
    "plot_bleu_by_length",
    "repeated_share",
    "rouge",
    "score_by_frequency",
    "scores_by_length",
]

#: Numbers of occurrences in a text that separate rare words from frequent ones.
FREQUENCIES = (1, 10, 100, 1000)


class CorpusScore(NamedTuple):
    """A score of a corpus, in per cent, with sacrebleu's name and signature."""

    name: str
    score: float
    signature: str


def _metrics() -> dict[str, Any]:
    """Return sacrebleu's metrics by name."""
    sacrebleu = optional("sacrebleu", "scoring")
    return {"BLEU": sacrebleu.BLEU(), "chrF2": sacrebleu.CHRF(), "TER": sacrebleu.TER()}


def bleu(outputs: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return sacrebleu's corpus BLEU and its signature.

    Paper: Post, "A Call for Clarity in Reporting BLEU Scores", WMT 2018, arXiv:1804.08771.
    """
    metric = _metrics()["BLEU"]
    score = metric.corpus_score(list(outputs), [list(references)]).score
    return score, str(metric.get_signature())


def corpus_scores(outputs: Sequence[str], references: Sequence[str]) -> list[CorpusScore]:
    """Return sacrebleu's BLEU, chrF2 and TER.

    Papers: Papineni et al., ACL 2002; Popović, "chrF: character n-gram F-score", WMT 2015; Snover
    et al., "A Study of Translation Edit Rate", AMTA 2006.
    """
    return [
        CorpusScore(
            name,
            metric.corpus_score(list(outputs), [list(references)]).score,
            str(metric.get_signature()),
        )
        for name, metric in _metrics().items()
    ]


def compare(
    systems: Mapping[str, Sequence[str]], references: Sequence[str], samples: int = 1000
) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Compare systems with the first one by sacrebleu's paired bootstrap.

    Args:
        systems: outputs by name.
        samples: the number of resampled corpora.

    Returns:
        For each system and metric, the score and p, the probability of a difference as large if the
        systems are equal; None for the first system.

    Paper: Koehn, "Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004.
    """
    significance = optional("sacrebleu.significance", "scoring")
    test = significance.PairedTest(
        [(name, list(outputs)) for name, outputs in systems.items()], _metrics(),
        [list(references)], "bs", samples,
    )  # fmt: skip
    _, found = test()
    names = found.pop("System")
    return {
        str(name): {str(metric).partition("|")[0]: (x[i].score, x[i].p_value)
                    for metric, x in found.items()}
        for i, name in enumerate(names)
    }  # fmt: skip


def group_by_length(sources: Sequence[str], edges: Sequence[int]) -> dict[str, list[int]]:
    """Return the indices of sentences by the number of words in their source.

    Args:
        edges: the largest lengths of all groups but the last, which has longer sentences.

    Returns:
        A list for each group that occurs, by its name, such as "6–10".
    """
    groups: dict[int, list[int]] = {}
    for i, source in enumerate(sources):
        groups.setdefault(bisect_left(edges, max(len(source.split()), 1)), []).append(i)

    def name(group: int) -> str:
        first = edges[group - 1] + 1 if group else 1
        return f"{first}–{edges[group]}" if group < len(edges) else f"{first}–"

    return {name(group): members for group, members in sorted(groups.items())}


class LengthScore(NamedTuple):
    """Scores of the sentences whose source lengths are in a group.

    Attributes:
        name: name of the group, such as "6–10".
        sentences: number of sentences.
        bleu: corpus BLEU.
        ratio: ratio of the words of outputs to those of references.
        repeated: the share of :func:`repeated_share`.
    """

    name: str
    sentences: int
    bleu: float
    ratio: float
    repeated: float


def scores_by_length(
    sources: Sequence[str],
    outputs: Sequence[str],
    references: Sequence[str],
    edges: Sequence[int] | None = None,
    width: int = 5,
) -> list[LengthScore]:
    """Score sentences by the number of words in their source.

    Args:
        edges: as in :func:`group_by_length`; multiples of ``width`` unless given.
    """
    if edges is None:
        longest = max((len(x.split()) for x in sources), default=1)
        edges = range(width, longest + width, width)
    rows = []
    for name, members in group_by_length(sources, edges).items():
        own, wanted = ([x[i] for i in members] for x in (outputs, references))
        words, of_references = (sum(len(x.split()) for x in lines) for lines in (own, wanted))
        ratio = words / max(of_references, 1)
        score, _ = bleu(own, wanted)
        rows.append(LengthScore(name, len(members), score, ratio, repeated_share(own)))
    return rows


def repeated_share(outputs: Sequence[str], n: int = 3) -> float:
    """Return the share of words in an n-gram that occurred earlier in the same sentence."""
    repeated = words = 0
    for output in outputs:
        tokens = output.split()
        seen: set[tuple[str, ...]] = set()
        covered: set[int] = set()
        for i in range(len(tokens) - n + 1):
            gram = tuple(tokens[i : i + n])
            if gram in seen:
                covered.update(range(i, i + n))
            seen.add(gram)
        repeated, words = repeated + len(covered), words + len(tokens)
    return repeated / max(words, 1)


def score_by_frequency(
    outputs: Sequence[str],
    references: Sequence[str],
    training: Sequence[str],
    edges: Sequence[int] = FREQUENCIES,
) -> list[tuple[str, int, float, int, float | None]]:
    """Score words by their frequency in the text that a model was trained on.

    Args:
        training: the target side of the training text.
        edges: the smallest frequencies of all groups but the first, which has unseen words.

    Returns:
        A row for each group: its name; the number of words in the references; F1 of the words that
        outputs and references have in common, sentence by sentence; the number of sentences whose
        rarest word is in the group, and their BLEU, or None if there are none.

    Paper: Neubig et al., "compare-mt: A Tool for Holistic Comparison of Language Generation
    Systems", NAACL 2019, arXiv:1903.07926.
    """
    counts = Counter(word for line in training for word in line.split())
    size = len(edges) + 1
    own, wanted, common = [0] * size, [0] * size, [0] * size
    members: list[list[int]] = [[] for _ in range(size)]
    for i, (output, reference) in enumerate(zip(outputs, references)):
        have, want = Counter(output.split()), Counter(reference.split())
        for total, words in ((own, have), (wanted, want), (common, have & want)):
            for word, n in words.items():
                total[bisect_right(edges, counts[word])] += n
        if want:
            rarest = min(counts[word] for word in want)
            members[bisect_right(edges, rarest)].append(i)
    rows: list[tuple[str, int, float, int, float | None]] = []
    for group in range(size):
        first = edges[group - 1] if group else 0
        last = f"–{edges[group] - 1}" if group < len(edges) else "–"
        name = str(first) if group < len(edges) and edges[group] - 1 == first else f"{first}{last}"
        f1 = 2 * common[group] / max(own[group] + wanted[group], 1)
        own_lines, lines = ([x[i] for i in members[group]] for x in (outputs, references))
        score = bleu(own_lines, lines)[0] if lines else None
        rows.append((name, wanted[group], 100 * f1, len(members[group]), score))
    return rows


def rouge(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L in per cent, by Google's rouge-score.

    It is for English: words are stemmed, and all characters but a to z and digits separate them.

    Paper: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", ACL workshop, 2004.
    """
    scorer = optional("rouge_score.rouge_scorer", "--rouge", "rouge")
    names = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
    scoring = scorer.RougeScorer(list(names.values()), use_stemmer=True)
    found = [scoring.score(reference, output) for output, reference in zip(outputs, references)]
    return {
        name: 100 * sum(x[key].fmeasure for x in found) / max(len(found), 1)
        for name, key in names.items()
    }


def plot_bleu_by_length(rows: Mapping[str, Sequence[LengthScore]]) -> bytes:
    """Draw BLEU over the length of sources, a line for each system; return a PNG."""
    figures = optional("matplotlib.figure", "--plot")
    figure = figures.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, of_system in rows.items():
        axes.plot([x.name for x in of_system], [x.bleu for x in of_system], "o-", label=name)
    axes.set(xlabel="source words", ylabel="BLEU", ylim=(0, None))
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()
