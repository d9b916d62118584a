"""Scores of translations, compared with values by hand or from other libraries."""

import pytest

from attnfast.translate.scores import (
    bleu,
    compare,
    corpus_scores,
    group_by_length,
    repeated_share,
    rouge,
    score_by_frequency,
    scores_by_length,
)

sacrebleu = pytest.importorskip("sacrebleu")

REFERENCES = ["the cat sat on the mat", "a dog runs in the park", "two men play chess outside now"]
OUTPUTS = ["the cat sat on a mat", "a dog runs in the park", "men play men play chess outside"]


def test_scores_of_a_corpus_are_sacrebleus():
    found = {x.name: x for x in corpus_scores(OUTPUTS, REFERENCES)}
    for name, kind in (("BLEU", "BLEU"), ("chrF2", "CHRF"), ("TER", "TER")):
        metric = getattr(sacrebleu, kind)()
        assert found[name].score == metric.corpus_score(OUTPUTS, [REFERENCES]).score
        assert found[name].signature == str(metric.get_signature())
    assert bleu(OUTPUTS, REFERENCES) == (found["BLEU"].score, found["BLEU"].signature)


def test_lengths_are_those_of_sources():
    sources = ["a", "a b c d e", "a b c d e f", "", "a " * 30]
    assert group_by_length(sources, [5, 10]) == {"1–5": [0, 1, 3], "6–10": [2], "11–": [4]}
    outputs = ["a b c d"] * 4
    rows = scores_by_length(sources[:4], outputs, ["a b c d", "a b c d", "e f g h", "a b c d e f"])
    assert [row[:2] for row in rows] == [("1–5", 3), ("6–10", 1)]
    assert rows[1].bleu < 30 < rows[0].bleu < 100
    assert (rows[0].ratio, rows[1].ratio) == (pytest.approx(12 / 14), 1.0)
    assert rows[0].bleu == bleu(outputs[:3], ["a b c d", "a b c d", "a b c d e f"])[0]


def test_repeated_words():
    """Words of a trigram that came before in the sentence."""
    assert repeated_share(["a b c d a b c", "a b c"]) == 3 / 10
    assert repeated_share(["a a a a"]) == 3 / 4
    assert repeated_share(["a b a b"], n=2) == 2 / 4
    assert repeated_share([]) == repeated_share(["x", ""]) == 0


def test_scores_by_frequency_by_hand():
    """The rare word is lost, the frequent one too many; unseen words count as seen never."""
    training = ["the the the", "cat", "dog dog"]
    references, outputs = ["the cat", "the zebra dog"], ["the the", "the zebra dog"]
    rows = score_by_frequency(outputs, references, training, edges=(1, 2, 3))
    assert [row[:2] for row in rows] == [("0", 1), ("1", 1), ("2", 1), ("3–", 2)]
    f1 = [row[2] for row in rows]
    assert f1 == [100, 0, 100, pytest.approx(100 * 2 * 2 / (3 + 2))]
    assert [row[3] for row in rows] == [1, 1, 0, 0]
    assert rows[0][4] == bleu(outputs[1:], references[1:])[0]
    assert rows[1][4] == bleu(outputs[:1], references[:1])[0] and rows[2][4] is None


def test_systems_are_compared_with_the_first():
    references, good = REFERENCES * 10, OUTPUTS * 10
    bad = ["a cat in two", *good[1:]]
    worst = ["chess"] * 30
    found = compare({"good": good, "bad": bad, "worst": worst}, references, samples=100)
    assert list(found) == ["good", "bad", "worst"]
    assert [p for _, p in found["good"].values()] == [None] * 3
    assert found["worst"]["BLEU"][1] < 0.05 < found["bad"]["TER"][1]
    assert found["good"]["BLEU"][0] == pytest.approx(bleu(good, references)[0])


def test_rouge_by_hand():
    pytest.importorskip("rouge_score")
    found = rouge(["the cat sat"], ["the cat ran away"])
    assert found["ROUGE-1"] == found["ROUGE-L"] == pytest.approx(100 * 2 * 2 / 7)
    assert found["ROUGE-2"] == pytest.approx(100 * 2 * 1 / 5)
    assert rouge([], []) == {"ROUGE-1": 0, "ROUGE-2": 0, "ROUGE-L": 0}
