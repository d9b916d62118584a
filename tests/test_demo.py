"""The demo: its grammar, its measurements, its pictures, and a run that takes seconds."""

import errno
import os
import re
import sys

import pytest
import torch

from attnfast._utils.benchmark import best_device, median_times, peak_memory
from attnfast.models import Config, build
from attnfast.ops.backends import unsupported_reason
from attnfast.translate import checkpoint, demo
from attnfast.translate.cli import main
from attnfast.translate.data import WordTokenizer
from attnfast.translate.evaluate import alignment
from attnfast.translate.toy_grammar import (
    ADJECTIVES,
    ADVERBS,
    ARTICLES,
    ENDINGS,
    INTRANSITIVE,
    NOUNS,
    TRANSITIVE,
    Grammar,
    agreement,
    corpus,
)

for name in ("matplotlib", "sacrebleu", "tqdm"):
    pytest.importorskip(name)

TINY = demo.Settings(
    pairs=40, test_pairs=10, steps=4, batch_size=4, dim=8, lengths=(3, 6), repeats=1
)

NO_FUSED = best_device().type == "cpu" and unsupported_reason(
    "cpu", torch.device("cpu"), torch.float32
)

# Grammar


def test_the_corpus_is_a_function_of_its_seed():
    pairs = corpus(1, 500)
    assert pairs == corpus(1, 500) != corpus(2, 500)
    assert len({english for english, _ in pairs}) == 500


def test_sentences_are_short_and_long():
    lengths = [len(english.split()) for english, _ in corpus(1, 1000)]
    assert max(lengths) <= 30
    for low, high in ((1, 10), (11, 20), (21, 30)):
        assert sum(low <= n <= high for n in lengths) > 100
    assert max(len(english.split()) for english, _ in corpus(1, 1000, longest=40)) > 35


def test_articles_and_adjectives_agree_with_their_noun():
    nouns = {noun.german[plural]: (noun.gender, plural) for noun in NOUNS for plural in (0, 1)}
    articles = "|".join([*ENDINGS, *("dies" + ending for ending in ENDINGS.values())])
    stems = "|".join(ADJECTIVES.values())
    phrase = re.compile(rf"\b({articles}) (?:(?:{stems})(en?) )?({'|'.join(nouns)})\b")
    seen = set()
    for _, german in corpus(1, 500):
        for article, ending, noun in phrase.findall(german):
            forms = [agreement(*nouns[noun], case) for case in ARTICLES]
            assert any(
                article in (form, "dies" + ENDINGS[form]) and ending in ("", adjective)
                for form, adjective in forms
            ), german
            seen.add((article, ending, *nouns[noun]))
    some = {("den", "en", "m", 0), ("der", "e", "m", 0), ("das", "", "n", 0), ("die", "en", "f", 1)}
    assert some <= seen


def test_verbs_agree_with_their_subject():
    grammar = Grammar(4)
    forms = [{"hat", "kann", "wird", "muss"}, {"haben", "können", "werden", "müssen"}]
    english_forms = [{"has", "can", "will", "must"}, {"have", "can", "will", "must"}]
    for verb in TRANSITIVE + INTRANSITIVE:
        for plural in (0, 1):
            forms[plural].add(verb.german[1 - plural])
            english_forms[plural].add(verb.english[1 - plural])
    nouns = {
        noun.german[plural]: (noun.english[plural], plural) for noun in NOUNS for plural in (0, 1)
    }
    for _ in range(300):
        english, german, _ = grammar.clause(0.0)
        if german[0] in ADVERBS.values():
            continue
        subject = next(word for word in german if word in nouns)
        word, plural = nouns[subject]
        assert german[german.index(subject) + 1] in forms[plural]
        assert english[english.index(word) + 1] in english_forms[plural]


def test_verbs_are_reordered():
    finite = {verb.english[1]: verb.german[1] for verb in TRANSITIVE}
    perfect = {verb.english[2]: verb.german[2] for verb in TRANSITIVE}
    last = inverted = subordinate = 0
    for english, german in corpus(1, 1000):
        source, target = english.split(), german.split()
        if {"that", "and", "but"}.isdisjoint(source) and source[-1] not in perfect:
            for participle in set(source) & set(perfect):
                assert target[-1] == perfect[participle]
                last += 1
        if source[0] == "today":
            inverted += 1
            assert target[1][0].islower() and target[2][0] == "d"
        if source[3:4] == ["that"] and source[4] in finite and "," in target[4:]:
            assert finite[source[4]] in target
            subordinate += target[target.index(finite[source[4]]) - 1] != target[4]
    assert min(last, inverted, subordinate) > 5


def test_a_relative_clause_ends_in_its_verb():
    grammar = Grammar(3)
    verbs = {form for verb in TRANSITIVE for form in verb.german[:2]}
    verbs |= {"hat", "haben", "wird", "werden", "kann", "können", "muss", "müssen"}
    for _ in range(200):
        clause = grammar.relative_clause("m", False, 0.0)
        assert clause.english[0] == "that"
        assert clause.german[:2] in ([",", "der"], [",", "den"])
        assert clause.german[-2] in verbs and clause.german[-1] == ","


# Measurements


def test_peak_memory_is_that_of_known_tensors():
    def work():
        first = torch.empty(1 << 20)  # 4 MiB
        second = torch.empty(1 << 19)  # 2 MiB
        del first, second
        return torch.empty(5 << 18)  # 5 MiB

    assert peak_memory(work, torch.device("cpu")) == 6 << 20
    assert peak_memory(lambda: None, torch.device("cpu")) == 0


@pytest.mark.gpu
def test_peak_memory_on_a_gpu():
    held = torch.empty(1 << 22, device="cuda")
    assert peak_memory(lambda: torch.empty(1 << 20, device="cuda")) == 4 << 20
    del held


def test_functions_are_timed_in_turns():
    calls = []
    times = median_times({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert times.keys() == {"a", "b"} and min(times.values()) >= 0


@pytest.mark.parametrize("attention", ["bahdanau", "concat"])
def test_alignment_is_a_distribution_for_each_target_word(attention):
    tokenizer = WordTokenizer(["a", "b", "c"])
    config = Config(tokenizer.vocab_size, attention, embed_dim=6, hidden_dim=5)
    weights = alignment(build(config, "reference").eval(), tokenizer, "a b c", "c a")
    assert weights.shape == (3, 4)  # each sentence with its end
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))


# The demo


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.skipif(bool(NO_FUSED), reason=f"no fused attention: {NO_FUSED}")
def test_a_tiny_demo_writes_pictures_and_returns_its_numbers(tmp_path, capsys, monkeypatch):
    said, out, write = [], [], demo.write_atomically

    def written(path, content):  # the table comes first: a full disk does not cost it
        out.append(capsys.readouterr().out)
        write(path, content)

    monkeypatch.setattr(demo, "write_atomically", written)
    result = demo.run(tmp_path / "new" / "demo", said.append, TINY)
    assert sorted(path.name for path in (tmp_path / "new" / "demo").iterdir()) == [
        "alignment.png",
        "speed.png",
    ]
    assert all(is_png(path) for path in (tmp_path / "new" / "demo").iterdir())
    for values in result[:4]:
        assert list(values) == ["none", "eager", "fused"]
    assert min(result.step_seconds.values()) > 0
    assert result.memory["fused"] < result.memory["eager"]
    assert sum(x.sentences for x in result.bleu_by_length["fused"]) == 10
    assert result.loss_difference < 1e-4

    lines = out[0].split("\n\n")[0].splitlines()
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    assert lines[0].split() == ["none", "eager", "fused"]
    assert "difference between the losses of eager and fused" in out[0]


def test_eager_and_fused_begin_with_the_same_weights():
    options = demo.Options()
    none, eager, fused = (
        demo.make_learner(name, 30, options, 8).model.state_dict() for name in demo.MODELS
    )
    assert eager.keys() == fused.keys() > none.keys()
    assert all(torch.equal(eager[key], fused[key]) for key in eager)
    assert all(torch.equal(eager[key], none[key]) for key in none)


def test_training_and_test_sentences_do_not_overlap(tmp_path, monkeypatch):
    seen = {}
    encode_pairs = demo.encode_pairs

    def spy(tokenizer, pairs, max_length):
        seen["train"] = pairs
        return encode_pairs(tokenizer, pairs, max_length)

    def stop(learners, groups, options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "encode_pairs", spy)
    monkeypatch.setattr(demo, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        demo.run(tmp_path, lambda sentence: None, TINY)
    assert len(seen["train"]) == TINY.pairs
    test = set(corpus(TINY.seed, TINY.pairs + TINY.test_pairs)) - set(seen["train"])
    assert len(test) == TINY.test_pairs


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert main(["demo", "--output-dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err.endswith("attnfast: interrupted; existing files are intact\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["a file", "read-only"])
def test_a_folder_that_cannot_be_written_is_refused_first(case, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    if case == "a file":
        out.write_text("here first")
    else:

        def refuse(**options):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(checkpoint.tempfile, "TemporaryFile", refuse)
    assert main(["demo", "--output-dir", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"attnfast: cannot write to the folder {out}: ")
    assert len(error.splitlines()) == 1


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", "--output-dir", str(tmp_path)]) == 2
    assert "attnfast demo needs the package matplotlib" in capsys.readouterr().err
