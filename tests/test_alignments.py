"""Alignments: files of links, tokens of words, and the training that learns from them."""

import copy
import math

import pytest
import torch

from attnfast import alignment_loss
from attnfast._utils.checks import InputError
from attnfast.analysis import diagnostics as diag
from attnfast.models import Config, build, sequence_loss
from attnfast.translate import checkpoint
from attnfast.translate.cli import main
from attnfast.translate.data import (
    Example,
    Links,
    SubwordTokenizer,
    WordTokenizer,
    collate,
    encode_pairs,
    read_alignments,
)
from attnfast.translate.evaluate import alignment
from attnfast.translate.toy_grammar import aligned_corpus
from attnfast.translate.trainer import Options, StepOptions, make_optimizer, train_step


def test_links_are_read(tmp_path):
    path, pairs = tmp_path / "links", [("a b", "c d e"), ("a", "b"), ("x", "y")]
    path.write_text("0-0 1-2 1?1\n\n0-0 0-0\n")
    wanted = [Links({(0, 0), (1, 2)}, {(1, 1)}), Links(set(), set()), Links({(0, 0)}, set())]
    assert read_alignments(path, pairs) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-0\n", "expected 2 lines, one per pair, got 1"),
        ("0-0\n0_0\n", "line 2: expected links such as 0-0 1-2, got '0_0'"),
        ("0-0 -1-0\n\n", "line 1: expected links such as"),
        ("0-0\n1-0\n", "line 2: expected a source word below 1, got 1 in 1-0"),
        ("0-3\n\n", "line 1: expected a target word below 2, got 3 in 0-3"),
    ],
)
def test_a_file_that_is_no_alignment(tmp_path, text, words):
    path = tmp_path / "links"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_alignments(path, [("a b", "c d"), ("a", "b")])


def test_every_token_of_a_word_is_aligned_to_all_of_its_words():
    pytest.importorskip("sentencepiece")
    texts = ["unbelievable things happened", "happened things unbelievable"]
    tokenizer = SubwordTokenizer.train(texts * 3, 24)
    numbers = [tokenizer.word_numbers(text) for text in texts]
    for text, found in zip(texts, numbers):
        assert len(found) == len(tokenizer.encode(text)) > 3
        assert sorted(found) == found and set(found) == {0, 1, 2}
    links = Links({(0, 2), (1, 1)}, {(2, 0)})
    (example,), _ = encode_pairs(tokenizer, [tuple(texts)], 99, alignments=[links])
    of_source = [[j for j, s in enumerate(numbers[0]) if s == word] for word in range(3)]
    assert example.alignment == [of_source[{0: 2, 1: 1, 2: 0}[t]] for t in numbers[1]]


def test_words_that_a_tokenizer_does_not_see_are_not_aligned():
    pytest.importorskip("sentencepiece")
    tokenizer = SubwordTokenizer.train(["one two three"] * 3, 16)
    pair = ("one\u00a0two", "two\u200bthree one")  # a blank to one of the two alone, or to neither
    numbers = [max(tokenizer.word_numbers(text)) + 1 for text in pair]
    counts = [len(text.split()) for text in pair]
    (example,), _ = encode_pairs(tokenizer, [pair], 99, alignments=[Links({(0, 0)}, set())])
    assert (example.alignment is None) == (numbers != counts)


def test_a_batch_shares_a_row_out():
    known = Example([5, 6, 7], [8, 9], [[0, 2], []])
    batch = collate([known, Example([5], [8, 9, 4])])
    assert batch.alignment.shape == (2, 4, 4)
    assert batch.alignment[0, 0].tolist() == [0.5, 0, 0.5, 0]
    assert float(batch.alignment.sum()) == 1
    assert collate([Example([5], [6])]).alignment is None
    assert batch.to("cpu").alignment is not None


def small(attention="bahdanau"):
    torch.manual_seed(0)
    model = build(Config(11, attention, embed_dim=8, hidden_dim=6, dropout=0.0), "reference")
    pairs = [Example([5, 6, 7], [8, 9], [[0, 2], [1]]), Example([5], [8, 9, 4], [[0], [], []])]
    return model, collate(pairs)


@pytest.mark.parametrize("kind", ["cross_entropy", "squared"])
def test_the_loss_of_a_step(kind):
    model, batch = small()
    options, plain = Options(label_smoothing=0, alignment_kind=kind), copy.deepcopy(model)
    predicted = plain(batch.source, batch.lengths, batch.target_in, need_weights=True)
    rows = alignment_loss(predicted.weights, batch.alignment, kind=kind)
    wanted = sequence_loss(predicted[0], batch.target_out) + 0.7 * rows.sum() / 3
    wanted.backward()
    norm = float(torch.nn.utils.get_total_norm([x.grad for x in plain.parameters()]))
    optimizer = make_optimizer(model, options)
    now = StepOptions(1e-3, alignment=0.7)
    assert train_step(model, optimizer, batch, options, now) == pytest.approx(wanted.item())
    for x, y in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(x.grad, y.grad * min(1, 1 / norm), rtol=1e-4, atol=1e-8)


def test_its_weight_falls():
    options = Options(alignment_loss=2.0, alignment_until=0.5)
    assert [options.at(step, 8).alignment for step in (0, 2, 4, 7)] == [2, 1, 0, 0]
    assert Options(alignment_loss=2.0).at(7, 8).alignment == 2
    for wrong in (0, 1.5, math.nan):
        with pytest.raises(
            InputError, match="alignment_until must be a number above 0 and at most 1"
        ):
            Options(alignment_until=wrong)


def test_attention_may_learn_at_a_rate_of_its_own():
    model, batch = small()
    options = Options(attention_lr_scale=0.0, weight_decay=0.0)
    own = {id(x) for x in model.decoder.attention.parameters()}
    before = [x.detach().clone() for x in model.parameters()]
    train_step(model, make_optimizer(model, options), batch, options, StepOptions(1e-2))
    moved = {id(x): not torch.equal(x, y) for x, y in zip(model.parameters(), before)}
    assert own and not any(moved[x] for x in own)
    assert sum(moved.values()) > 5


def test_supervision_aligns(tmp_path, capsys):
    """On a language that orders words differently; the same training without it knows less."""
    pytest.importorskip("sacrebleu")
    pytest.importorskip("tqdm")
    sentences = aligned_corpus(3, 440, 12)
    for name, some in (("train", sentences[:400]), ("valid", sentences[400:])):
        for side in (0, 1):
            text = "".join(x.pair[side] + "\n" for x in some)
            (tmp_path / f"{name}.{side}").write_text(text)
        lines = (" ".join(f"{i}-{j}" for i, j in sorted(x.links)) + "\n" for x in some)
        (tmp_path / f"{name}.links").write_text("".join(lines))
    files = {"source": "train.0", "target": "train.1"}
    files |= {"valid-source": "valid.0", "valid-target": "valid.1"}
    arguments = [x for name, file in files.items() for x in (f"--{name}", str(tmp_path / file))]
    sizes = {"embed-dim": 24, "hidden-dim": 24, "epochs": 9, "batch-size": 8}
    arguments += [x for name, value in sizes.items() for x in (f"--{name}", str(value))]
    arguments += ["--learning-rate", "0.01"]
    arguments += ["--tokenizer", "word", "--dropout", "0", "--vocab-size", "400"]
    links = ["--alignments", str(tmp_path / "train.links")]
    errors = []
    for more in ([], [*links, "--alignment-until", "0.9"]):
        out = tmp_path / f"out{len(more)}"
        assert main(["train", "--model-dir", str(out), *arguments, *more]) == 0
        _, model, tokenizer = checkpoint.restore(checkpoint.load(out / "last.pt"))
        found = []
        for x in sentences[400:]:
            weights = alignment(model.eval(), tokenizer, *x.pair)
            n, m = torch.tensor([len(x.english)]), torch.tensor([len(x.german)])
            found += diag.extract_alignment(weights.unsqueeze(0), n, m)
        errors.append(diag.alignment_score(found, [x.links for x in sentences[400:]]).error_rate)
    assert errors[1] < min(0.2, 0.6 * errors[0])
    assert "alignments of 400 of 400 pairs" in capsys.readouterr().err
    refused = [
        "train",
        "--model-dir",
        str(tmp_path / "no"),
        *arguments,
        *links,
        "--attention",
        "none",
    ]
    assert main(refused) == 2
    assert "--alignments: expected an attention to supervise, got none" in capsys.readouterr().err


def test_words_that_change_places_with_each_other_are_not_aligned():
    """One word split by the tokenizer and one that vanishes leave as many as there were."""
    pytest.importorskip("sentencepiece")
    tokenizer = SubwordTokenizer.train(["a b c", "c b a"] * 3, 11)
    text = "a\u200bb c a \u200b b"  # a blank of no width, of which normalization makes a blank
    numbers = tokenizer.word_numbers(text)
    if -1 not in numbers:  # then every token is of the word that it stands in
        words = text.split()
        for number in set(numbers):
            tokens = [x for x, y in zip(tokenizer.tokens(text), numbers) if y == number]
            assert tokens == tokenizer.tokens(words[number])
    assert tokenizer.word_numbers("a b c") == sorted(tokenizer.word_numbers("a b c"))


def test_a_training_is_not_resumed_with_other_options(tmp_path):
    from attnfast.translate.trainer import Trainer

    model, _ = small()
    tokenizer = WordTokenizer(list("abcdefg"))
    config, options = Config(11, "bahdanau", embed_dim=8, hidden_dim=6), Options()
    pairs = [Example([5], [6])]
    trainer = Trainer(config, model, tokenizer, options, pairs, pairs, [("a", "b")], tmp_path)
    trainer._save_last()
    state = checkpoint.load(tmp_path / "last.pt")
    trainer.resume(state, "last.pt")
    trainer.options = Options(attention_lr_scale=0.5)
    with pytest.raises(InputError, match=r"attention_lr_scale must be 1.0, .* got 0.5"):
        trainer.resume(state, "last.pt")
