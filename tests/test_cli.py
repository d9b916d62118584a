"""The command line apart from what it computes: options, packages, streams and signals."""

import dataclasses
import errno
import gzip
import io
import json
import math
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from attnfast._utils import command_line
from attnfast._utils.checks import InputError
from attnfast.decoding import beam_search, sample
from attnfast.models import BOS, EOS, PAD, UNK, Config, build
from attnfast.ops.backends import unsupported_reason
from attnfast.translate import checkpoint, cli, evaluate
from attnfast.translate.cli import main
from attnfast.translate.data import WordTokenizer, pad_sources
from attnfast.translate.evaluate import SearchOptions
from attnfast.translate.trainer import MEASURED, Options

TRAIN = [
    "train",
    *(f"--{x}=x" for x in ("source", "target", "valid-source", "valid-target", "model-dir")),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint ``model.pt`` and two lines of ``text``."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    tokenizer = WordTokenizer(["eins", "zwei", "drei"])
    config = Config(tokenizer.vocab_size, embed_dim=8, hidden_dim=8)
    checkpoint.save(folder / "model.pt", config, build(config, "reference"), tokenizer)
    (folder / "text").write_text("eins zwei\ndrei\n")
    return folder


def refused(arguments, capsys, status=2):
    """Return the one sentence with which a command ends, without its beginning."""
    assert main(arguments) == status
    out, said = capsys.readouterr()
    assert out == "" and said.startswith("attnfast: ") and said.count("\n") == 1
    sentence, _, _ = said.removeprefix("attnfast: ").strip().partition(" (choose from ")
    assert len(sentence) <= 200
    return said.removeprefix("attnfast: ").strip()


# Options


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attnfast {version('attnfast')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command: attnfast --help says more"),
        (["train"], "the following arguments are required: --source, .*: attnfast train --help"),
        (["sing"], "command: invalid choice: 'sing'"),
        ([*TRAIN, "--attention=magic"], "--attention: invalid choice: 'magic'"),
        ([*TRAIN, "--epochs=1.5"], "--epochs: expected an integer, got '1.5'"),
        (
            [*TRAIN, f"--hidden-dim={10**9 * 2}"],
            "--hidden-dim must be an .* below 2..30, got 2000000000",
        ),
        ([*TRAIN, "--dropout=some"], "--dropout: invalid float value: 'some'"),
        (
            [*TRAIN, "--batch-size=0"],
            "--batch-size must be an integer of at least 1 and below 2..31, ",
        ),
        ([*TRAIN, "--save-every=nan"], "--save-every must be a number of at least 0, got nan"),
        (
            [*TRAIN, "--coverage-loss=-1"],
            "--coverage-loss must be a number of at least 0, got -1.0",
        ),
        ([*TRAIN, "--coverage-loss=0.5"], "--coverage-loss must be 1.0 for attention 'bahdanau', "),
        ([*TRAIN, "--alignment-loss=2"], "--alignment-loss: expected alignments to learn from"),
        ([*TRAIN, "--alignment-until=1"], "--alignment-until: expected alignments to learn from"),
        (
            [*TRAIN, "--alignment-kind=squared"],
            "--alignment-kind: expected alignments to learn from",
        ),
        ([*TRAIN, "--window=5"], "--window must be 10 for attention 'bahdanau', got 5"),
        ([*TRAIN, "--stride=2", "--attention=local"], "--stride must be 4 for attention 'local'"),
        (
            [*TRAIN, "--tokenizer=word", "--normalisation=NFC"],
            "--normalisation: expected --tokenizer subword, got word",
        ),
        (
            [*TRAIN, "--pointer-generator", "--attention=none"],
            "--pointer-generator must be False for attention 'none'",
        ),
        (
            [*TRAIN, "--pointer-generator", "--label-smoothing=0.2"],
            "--label-smoothing must be 0.1 with a pointer-generator, got 0.2",
        ),
        ([*TRAIN, "--label-smoothing=1.5"], "--label-smoothing must be a number of at least 0 and"),
        ([*TRAIN, "--clip=0"], "--clip must be a number above 0, got 0.0"),
        ([*TRAIN, "--cell=qrnn"], r"--cell: invalid choice: 'qrnn' .*choose from rnn, gru, lstm"),
        ([*TRAIN, "--sigma", "2"], "--sigma must be left out for attention 'bahdanau'"),
        ([*TRAIN, "--device=abacus"], ".* got abacus: only cpu and cuda are supported"),
    ],
)
def test_errors_name_what_was_typed(arguments, message, capsys):
    assert re.match(message, refused(arguments, capsys))


@pytest.mark.parametrize("option", ["--beam", "--max-length", "--max-output-length"])
def test_options_of_a_search_are_named_as_they_were_typed(option, files, capsys):
    arguments = ["translate", str(files / "model.pt"), "--input", str(files / "text")]
    said = refused([*arguments, f"{option}=0"], capsys)
    assert said == f"{option} must be an integer of at least 1 and below 2**31, got 0"


def options_of(command):
    """Return the options of a command by the names of their values, without --help."""
    (commands,) = (x for x in cli._parser()._actions if hasattr(x, "choices") and x.choices)
    return {x.dest: x for x in commands.choices[command]._actions if x.dest != "help"}


COMMANDS = [(Config, "train"), (Options, "train"), (SearchOptions, "translate")]


@pytest.mark.parametrize(("settings", "command"), COMMANDS)
def test_every_setting_is_an_option_with_its_default(settings, command):
    options = options_of(command)
    for field in dataclasses.fields(settings):
        if field.name in MEASURED:  # a trainer sets them: see test_trainer.py
            assert field.name not in options
            continue
        option = options[field.name]
        name = field.name.replace("_", "-")
        twin = [f"--no-{name}"] if field.type == "bool" else []
        assert option.option_strings == [f"--{name}", *twin]
        assert option.default == field.default and type(option.default) is type(field.default)
        assert f"\n    {field.name}: {option.help}.\n" in settings.__doc__ + "\n"


@pytest.mark.parametrize(("settings", "command"), COMMANDS)
def test_every_option_reaches_its_setting(settings, command, monkeypatch):
    monkeypatch.setattr(settings, "__post_init__", lambda self: None)  # some need each other
    options = options_of(command)
    required = TRAIN if command == "train" else [command, "x"]
    for field in dataclasses.fields(settings):
        if field.name not in options:
            continue
        if field.type == "bool":
            value, typed = True, []
        else:
            choices = [x for x in options[field.name].choices or ["7"] if x != field.default]
            typed = choices[-1:]
            value = {"int": int, "str": str}.get(field.type, float)(typed[0])
        args = [*required, options[field.name].option_strings[0], *typed]
        args = cli._parser().parse_args(args)
        read = cli._read_settings(settings, args)
        assert getattr(read, field.name) == value != field.default
        assert read == dataclasses.replace(settings(), **{field.name: value})


def test_corpus(tmp_path, capsys):
    """Aligned sentences, none of which is in two parts; the same for the same seed."""
    texts = []
    for name, seed in (("one", "1"), ("two", "1"), ("three", "2")):
        command = ["corpus", str(tmp_path / name), "--pairs", "30", "--held-out", "10"]
        assert main([*command, "--seed", seed]) == 0
        parts = {x.name: x.read_text().splitlines() for x in sorted((tmp_path / name).iterdir())}
        texts.append(parts)
    assert texts[0] == texts[1] != texts[2]
    counts = {"train": 30, "valid": 10, "test": 10}
    names = {f"{part}.{x}": n for part, n in counts.items() for x in ("en", "de", "links")}
    assert {name: len(lines) for name, lines in texts[0].items()} == names
    assert len({line for part in counts for line in texts[0][f"{part}.en"]}) == 50
    for english, german, links in zip(*(texts[0][f"test.{x}"] for x in ("en", "de", "links"))):
        pairs = [tuple(map(int, link.split("-"))) for link in links.split()]
        sizes = len(english.split()), len(german.split())
        assert pairs and all(i < sizes[0] and j < sizes[1] for i, j in pairs)
    (tmp_path / "file").touch()
    capsys.readouterr()
    assert main(["corpus", str(tmp_path / "file")]) == 2
    assert "cannot write to the folder" in capsys.readouterr().err


COMMANDS = ["train", "translate", "score", "inspect", "corpus", "demo", "info", "check"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_its_own_help(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "999")
    options = options_of(command).values()
    texts = [x.help for x in options]
    assert all(texts) and len(set(texts)) == len(texts)
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    for option in options:
        assert not re.search(r"of training|of the model|None|\.$", option.help)
        shows = option.default is not None and option.default is not False
        default = f" (default: {option.default})" if shows else ""
        assert f" {option.help}{default}\n" in shown


# Searches

LINES = ["a b c", "", "d c b a e", "f", "x a y b", "d c b a e"]


def save(path, seed=6, unknown=0.0, **settings):
    """Write a checkpoint of a model with random parameters; return the model and its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = WordTokenizer(list("abcdefg"))
    config = Config(tokenizer.vocab_size, embed_dim=8, hidden_dim=8, **settings)
    model = build(config, "reference").eval()
    with torch.no_grad():
        model.embedding.weight *= 2  # words that differ, with ends that come and others that do not
        model.bias[UNK], model.bias[EOS] = unknown, 0.3
    checkpoint.save(path, config, model, tokenizer)
    return model, tokenizer


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A folder with a checkpoint and ``text``, a function that translates it, and the model."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "text").write_text("".join(f"{line}\n" for line in LINES))
    model, tokenizer = save(folder / "model.pt")

    def run(*arguments):
        """Return the lines of a translation."""
        files = ["--input", str(folder / "text"), "--output", str(folder / "out")]
        command = ["translate", str(folder / "model.pt"), "--backend=reference"]
        assert main([*command, *files, *arguments]) == 0
        return (folder / "out").read_text().splitlines()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # those of tiny sizes wait for each other
    yield folder, run, model, tokenizer
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ([], {}),
        (["--beam=1"], {"beam": 1}),
        (["--beam=3", "--n-best=3"], {"beam": 3, "n_best": 3}),
        (["--length-penalty=0"], {"length_penalty": 0.0}),
        (["--coverage-penalty=9"], {"coverage_penalty": 9.0}),
        (["--length-bonus=2"], {"length_bonus": 2.0}),
        (["--min-output-length=9"], {"min_length": 9}),
        (["--max-output-length=2"], {"max_length": 2}),
        (["--no-repeat-ngram=1"], {"no_repeat_ngram": 1}),
        (["--batch-size=2", "--n-best=2"], {"n_best": 2}),
        (["--sample", "--n-best=3", "--seed=7"], {"samples": 3}),
        (["--sample", "--temperature=0.1"], {"temperature": 0.1}),
        (["--sample", "--top-k=1"], {"top_k": 1}),
        (["--sample", "--top-p=0.2"], {"top_p": 0.2}),
    ],
)
def test_json_of_a_search(searched, typed, options):
    """Each line by itself, with the search's own names of the options."""
    _, run, model, tokenizer = searched
    rows = [json.loads(row) for row in run(*typed, "--format=json", "--alignments")]
    assert len(rows) == len(LINES)
    for number, (line, row) in enumerate(zip(LINES, rows), 1):
        words = line.split()
        assert list(row) == ["source", "source_tokens", "hypotheses"]
        assert (row["source"], row["source_tokens"]) == (line, words)
        if not words:
            assert row["hypotheses"] == []
            continue
        source, lengths = pad_sources([tokenizer.encode(line)])
        if "--sample" in typed:
            seed = random.Random(f"{7 if '--seed=7' in typed else 1} {number}").getrandbits(32)
            generator = [torch.Generator().manual_seed(seed)]
            found = sample(
                model, source, lengths, generator=generator, need_weights=True, **options
            )
        else:
            found = beam_search(model, source, lengths, need_weights=True, **options)
        (expected,) = found.hypotheses()
        assert len(expected) == len(row["hypotheses"]) == options.get("n_best", len(expected))
        for n, (ids, got) in enumerate(zip(expected, row["hypotheses"])):
            assert list(got) == ["text", "score", "tokens", "token_scores", "alignment"]
            assert got["text"] == tokenizer.decode(ids) == " ".join(got["tokens"])
            assert got["score"] == pytest.approx(float(found.scores[0, n]), abs=1e-5)
            scores = found.word_scores[0, n, : len(ids)].tolist()
            assert got["token_scores"] == pytest.approx(scores, abs=1e-5)
            largest = found.weights[0, n, : len(ids), : len(words)].argmax(-1)
            assert got["alignment"] == largest.tolist()
    if options:  # it is no option without effect
        assert run(*typed) != run(*(["--sample"] if "--sample" in typed else []))


def test_weights_in_8_bits(searched, capsys):
    folder, run, *_ = searched
    command = ["translate", str(folder / "model.pt"), "--input", str(folder / "text"), "--int8"]
    assert main([*command, "--backend=reference"]) == 2
    assert "int8 needs a search in one operator, but reference, as" in capsys.readouterr().err
    if unsupported_reason("cpu", torch.device("cpu"), torch.float32, "search"):
        return
    assert main([*command, "--format=json"]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    exact = [json.loads(row) for row in run("--format=json")]
    of = [[x["score"] for row in several for x in row["hypotheses"]] for several in (rows, exact)]
    differences = [abs(x - y) for x, y in zip(*of)]
    assert len(rows) == len(exact) and 1e-6 < max(differences) < 0.1


def test_the_n_best_are_lines_one_after_another(searched):
    _, run, *_ = searched
    rows = [json.loads(row) for row in run("--n-best=3", "--format=json")]
    texts = [[x["text"] for x in row["hypotheses"]] or [""] * 3 for row in rows]
    assert run("--n-best=3") == [text for several in texts for text in several]
    assert run() == [several[0] for several in texts]
    for row in rows:
        scores = [x["score"] for x in row["hypotheses"]]
        assert scores == sorted(scores, reverse=True) and "alignment" not in str(row)


def test_fewer_than_n_hypotheses_leave_empty_lines(searched):
    texts = cli._to_text(
        3, "a", evaluate.Translation(["a"], [evaluate.Hypothesis("b", -1, [], [])])
    )
    assert texts == "b\n\n\n"
    unfinished = evaluate.Hypothesis("b", -math.inf, ["b"], [-1.0])
    row = json.loads(cli._to_json("a", evaluate.Translation(["a"], [unfinished])))
    assert row["hypotheses"][0]["score"] is None


def test_drawn_translations_depend_on_seed_and_line_alone(searched, monkeypatch, capsys):
    folder, run, *_ = searched
    first = run("--sample", "--n-best=2")
    assert first == run("--sample", "--n-best=2", "--batch-size=1", "--seed=1")
    assert first != run("--sample", "--n-best=2", "--seed=2")
    assert first[4:6] != first[10:12], "equal lines have their own draws"
    content = io.BytesIO((folder / "text").read_bytes())
    monkeypatch.setattr(sys, "stdin", type("Stream", (), {"buffer": content}))
    command = ["translate", str(folder / "model.pt"), "--backend=reference", "--batch-size=2"]
    assert main([*command, "--sample", "--n-best=2"]) == 0
    assert capsys.readouterr().out.splitlines() == first


@pytest.mark.parametrize("pointer_generator", [False, True])
def test_unknown_words_are_replaced_by_source_words(searched, tmp_path, pointer_generator):
    folder, _, *_ = searched
    path = tmp_path / "model.pt"
    model, tokenizer = save(path, 1, unknown=2.0, pointer_generator=pointer_generator)
    arguments = ["translate", str(path), "--input", str(folder / "text")]
    arguments += ["--format=json", "--backend=reference"]
    arguments += ["--min-output-length=3", "--max-output-length=4"]
    arguments += ["--output", str(tmp_path / "out")]

    def run(*more):
        assert main([*arguments, *more]) == 0
        return [json.loads(row) for row in (tmp_path / "out").read_text().splitlines()]

    at_end = set()  # whether the end of the source has the largest weight
    replaced = run("--replace-unknown", "--alignments")
    for line, row in zip(LINES, replaced):
        if not line:
            continue
        words = line.split()
        oov = tokenizer.oov_words(line) if pointer_generator else []
        source, lengths = pad_sources([tokenizer.encode(line, oov)])
        found = beam_search(
            model, source, lengths, min_length=3, max_length=4, forbidden=(PAD, BOS),
            need_weights=True,
        )  # fmt: skip
        (got,) = row["hypotheses"]
        V = tokenizer.vocab_size
        for t, word in enumerate(found.best[0]):
            largest = int(found.weights[0, 0, t, : len(words)].argmax())
            assert got["alignment"][t] == largest
            expected = words[largest] if word == UNK else tokenizer.decode([word], oov)
            assert got["tokens"][t] == expected == got["text"].split()[t]
            assert got["copied"][t] == (word == UNK or word >= V)
            if word == UNK:
                at_end.add(int(found.weights[0, 0, t].argmax()) == len(words))
    assert at_end == {True, False}
    for before, after in zip(replaced, run("--replace-unknown")):
        for got in before["hypotheses"]:
            del got["alignment"]
        assert before == after
    for row in run():
        for got in row["hypotheses"]:
            assert ("copied" in got) == pointer_generator
            if pointer_generator:
                known = [x in "abcdefg" for x in got["tokens"]]
                assert got["copied"] == [not x for x in known]


def test_a_prefix_begins_translations(searched, tmp_path, capsys):
    folder, run, *_ = searched
    prefixes = ["g g", "a", "", "b", "c", ""]
    (tmp_path / "prefix").write_text("".join(f"{x}\n" for x in prefixes))
    option = f"--prefix={tmp_path / 'prefix'}"
    free, found = run(), run(option)
    for line, prefix, before, after in zip(LINES, prefixes, free, found):
        words = prefix.split() if line else []
        assert after.split()[: len(words)] == words
        assert words or after == before
    capsys.readouterr()
    arguments = ["translate", str(folder / "model.pt"), "--input", str(folder / "text"), option]
    said = refused([*arguments, "--max-output-length=1"], capsys)
    assert said.endswith("text, line 1: expected a prefix of at most 1 tokens, got 2")
    (tmp_path / "prefix").write_text("a\nb x\n" + "\n" * 4)
    said = refused(arguments, capsys)
    assert said.endswith("line 2: expected a prefix of tokens that the model knows, got 'x'")
    (tmp_path / "prefix").write_text("a\nb\n")
    said = refused(arguments, capsys)
    assert said.endswith(f"prefix: expected 6 lines, as in {folder / 'text'}, got 2")


def test_a_prefix_may_copy(tmp_path):
    model, tokenizer = save(tmp_path / "model.pt", pointer_generator=True)
    lines, prefixes = ["a x b y", "a"], ["y c x", ""]
    found = evaluate.translate(model, tokenizer, lines, None, prefixes)
    message = "line 1: expected a prefix of tokens that the model knows, got 'y'"
    with pytest.raises(InputError, match=message):  # y is beyond the limit of the source
        evaluate.translate(model, tokenizer, lines, SearchOptions(max_length=3), prefixes)
    assert found[0].text.startswith("y c x") and found[0].hypotheses[0].copied[:3] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--n-best=6"], "--n-best must be at most the beam of 5, got 6"),
        (["--temperature=2"], "--temperature must be 1.0 without sampling, got 2.0"),
        (["--seed=3"], "--seed must be 1 without sampling, got 3"),
        (["--sample", "--beam=3"], "--beam must be 5 with sampling, got 3"),
        (["--sample", "--length-bonus=1"], "--length-bonus must be 0.0 with sampling, got 1.0"),
        (["--sample", "--top-p=0"], "--top-p must be a number above 0 and at most 1, got 0.0"),
        (
            ["--length-penalty=nan"],
            "--length-penalty must be a number of at least -64 and at most 64",
        ),
        (
            ["--min-output-length=5", "--max-output-length=4"],
            "--max-output-length must be at least the smallest length of 5, got 4",
        ),
        (["--alignments"], "--alignments: expected --format json, got text"),
        (["--threads=0"], "--threads: expected at least 1, got 0"),
        (["--prefix=nowhere"], "cannot read nowhere: No such file or directory"),
        (
            ["--coverage-penalty=1"],
            "--coverage-penalty must be 0.0 for a model without attention, got 1.0",
        ),
        (
            ["--replace-unknown"],
            "--replace-unknown must be False for a model without attention, got True",
        ),
    ],
)
def test_options_of_a_search_that_do_not_fit(typed, message, searched, tmp_path, capsys):
    folder, *_ = searched
    save(tmp_path / "model.pt", attention="none")
    arguments = ["translate", str(tmp_path / "model.pt"), "--input", str(folder / "text")]
    assert refused([*arguments, *typed], capsys).startswith(message)


def test_threads(searched, monkeypatch):
    _, run, *_ = searched
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    run("--threads=3")
    run()
    assert counts == [3]


def test_score_searches_as_translate_does(searched, tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    folder, run, *_ = searched
    options = ["--beam=2", "--length-penalty=0", "--coverage-penalty=1", "--max-output-length=6"]
    (tmp_path / "target").write_text("".join(f"{x}\n" for x in run(*options)))
    files = ["--source", str(folder / "text"), "--target", str(tmp_path / "target")]
    arguments = ["score", str(folder / "model.pt"), "--backend=reference", *files]
    scores = []
    for more in ([*options, "--batch-size=2"], []):
        assert main([*arguments, *more]) == 0
        scores.append(capsys.readouterr().out.splitlines()[0])
    assert scores[0] == "BLEU 100.00, chrF2 100.00, TER 0.00 on 6 sentences, beam 2"
    assert "100.00" not in scores[1]
    assert main(["score", arguments[1], *arguments[1:]]) == 2
    said = capsys.readouterr()
    assert "expected different files to compare, got " in said.err and not said.out


def test_a_line_longer_than_all_learned_positions_is_cut(tmp_path, capsys):
    save(tmp_path / "model.pt", encoder="transformer", positions="learned")
    (tmp_path / "x").write_text("a " * 511 + "\n" + "b " * 512 + "\n")
    command = ["translate", str(tmp_path / "model.pt"), "--input", str(tmp_path / "x")]
    assert main([*command, "--max-output-length=3", "--backend=reference"]) == 0
    said = capsys.readouterr().err
    assert said.count("cut from") == 1 and "line 2: cut from 512 tokens to the limit of 511" in said
    pairs = ["--source", str(tmp_path / "x"), "--target", str(tmp_path / "x")]
    command = ["inspect", str(tmp_path / "model.pt"), *pairs, "--html", str(tmp_path / "page")]
    assert main([*command, "--max-length=512"]) == 2
    said = capsys.readouterr().err
    assert "--max-length must be below 512 with learned positions, got 512" in said
    assert main([*command, "--max-length=511"]) == 0


# Packages


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("sentencepiece", TRAIN),
        ("sacrebleu", TRAIN),
        ("sacrebleu", ["score", "x", "--source=x", "--target=x"]),
        ("sacrebleu", ["demo"]),
        ("matplotlib", ["demo"]),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package, arguments, monkeypatch, capsys):
    for name in ("sentencepiece", "sacrebleu", "matplotlib"):  # what others lack does not count
        monkeypatch.setitem(sys.modules, name, io)
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(arguments, capsys)
    assert f"{arguments[0]} needs the package {package} of the extra attnfast[translate]" in said
    assert said.endswith(f": pip install {package}")


def test_a_missing_package_is_not_blamed_on_the_checkpoint(files, monkeypatch, capsys):
    pytest.importorskip("sentencepiece")
    from attnfast.translate.data import SubwordTokenizer

    tokenizer = SubwordTokenizer.train(["eins zwei drei vier"] * 9, 30)
    config = Config(tokenizer.vocab_size, embed_dim=8, hidden_dim=8)
    path = files / "subwords.pt"
    checkpoint.save(path, config, build(config, "reference"), tokenizer)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    said = refused(["translate", str(path), "--input", str(files / "text")], capsys)
    assert said.startswith("subword tokenization needs the package sentencepiece of the extra")


def test_no_optional_package_is_needed_to_translate(files, tmp_path):
    """Nor NumPy, which torch itself looks for when it is imported."""
    for name in ("numpy", "sentencepiece", "sacrebleu", "tqdm", "matplotlib", "triton"):
        missing = f"raise ModuleNotFoundError('No module named {name}', name={name!r})\n"
        (tmp_path / f"{name}.py").write_text(missing)
    program = (
        "import sys\n"
        "from attnfast.translate.cli import main\n"
        "code = main(['info'])\n"
        "sys.exit(code or main(['translate', *sys.argv[1:]]) or main(['demo']))\n"
    )
    arguments = [str(files / "model.pt"), "--input", str(files / "text")]
    arguments += ["--output", str(tmp_path / "out"), "--backend", "reference", "--device", "cpu"]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 2
    for name in ("attnfast", "python", "torch", "triton", "threads", "cuda", "cpu", "reference"):
        assert any(line.startswith(name) for line in done.stdout.splitlines()), name
    assert "reference  on" in done.stdout
    assert (tmp_path / "out").read_text().count("\n") == 2
    assert done.stderr.startswith("attnfast: attnfast demo needs the package matplotlib of the ")


# Streams


def test_a_full_output_is_said_and_a_broken_pipe_is_not():
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}

    def write_to(output, command):
        program = [sys.executable, "-m", "attnfast", command]
        streams = {"stdout": output, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(program, env=environment, **streams)
        return done.returncode, done.stderr

    with open("/dev/full", "w") as full:
        expected = "attnfast: cannot write the standard output: No space left on device\n"
        assert write_to(full, "--version") == (2, expected)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert write_to(writer, "info") == (0, "")
    finally:
        os.close(writer)


def test_an_unbuffered_output_is_written_whole_or_refused(tmp_path, monkeypatch, capsys):
    """PYTHONUNBUFFERED=1 lets a write end early on a full disk without an error."""

    def function(args):
        sys.stdout.buffer.write(b"x" * 5000)

    parser = command_line.Parser()
    parser.set_defaults(function=function)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, status in ((1000, 2), (9000, 0)):
        raw = open(tmp_path / "out", "wb", buffering=0)  # noqa: SIM115
        with monkeypatch.context() as patch, io.TextIOWrapper(raw, write_through=True) as out:
            patch.setattr(sys, "stdout", out)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                assert command_line.run(parser, []) == status
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        said = capsys.readouterr().err
        full = "attnfast: cannot write the standard output: File too large\n"
        assert said == (full if status else "")
    assert (tmp_path / "out").stat().st_size == 5000


@pytest.fixture
def stream(tmp_path):
    """A process that translates its standard input, and a function that does so in one call."""
    model, tokenizer = save(tmp_path / "model.pt", 5)
    program = [sys.executable, "-m", "attnfast", "translate", str(tmp_path / "model.pt")]
    program += ["--backend=reference", "--threads=1"]

    def translated(line):
        (found,) = evaluate.translate(model, tokenizer, [line])
        assert bool(found.text) == bool(line) and not found.is_limited
        return f"{found.text}\n"

    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(program, **pipes) as process:
        yield process, translated
        process.kill()


def next_line(process):
    """Return a line of the output that comes within a minute."""
    assert select.select([process.stdout], [], [], 60)[0]
    return process.stdout.readline().decode()


def test_a_line_is_translated_before_the_next_is_read(stream):
    process, translated = stream
    for line in ("a b c", "", "f"):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
        assert next_line(process) == translated(line)
    process.stdin.write(b"a b")
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert said == b"attnfast: interrupted; the translations of 3 lines are written\n"


def test_a_stream_ends_with_its_reader(stream):
    process, translated = stream
    process.stdin.write(b"a b c\ne d\nf")
    process.stdin.flush()
    assert next_line(process) == translated("a b c")
    process.stdout.close()
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""


def test_a_bad_line_of_a_stream_ends_it_after_the_lines_before(files, monkeypatch, capsys):
    blocks = iter([b"eins\nzwei\n", b"dr\xffei\n"])
    buffer = type("Buffer", (), {"read1": lambda self, size: next(blocks)})()
    monkeypatch.setattr(sys, "stdin", type("Stream", (), {"buffer": buffer}))
    assert main(["translate", str(files / "model.pt"), "--backend=reference"]) == 2
    out, said = capsys.readouterr()
    assert out.count("\n") == 2
    assert said == (
        "attnfast: standard input, line 3: expected UTF-8 text, got byte 0xff at position 3\n"
    )


def test_the_standard_input_may_be_gzipped(files, tmp_path, monkeypatch):
    outputs = []
    for content in (gzip.compress(b"eins zwei\n"), b"eins zwei\n"):
        stream = type("Stream", (), {"buffer": io.BytesIO(content)})
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["translate", str(files / "model.pt"), "--output", str(tmp_path / "out")]) == 0
        outputs.append((tmp_path / "out").read_text())
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == 1


def test_closed_streams_are_said(files, monkeypatch, capsys):
    translate = ["translate", str(files / "model.pt")]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        assert refused(translate, capsys) == "cannot read the standard input: it is closed"
    monkeypatch.setattr(sys, "stdout", None)
    texts = ["--source", str(files / "text"), "--target", str(files / "text")]
    for arguments in (
        [*translate, "--input", str(files / "text")],
        ["score", *translate[1:], *texts],
    ):
        assert refused(arguments, capsys) == "cannot write the standard output: it is closed"


def test_an_unreadable_input_is_not_blamed_on_the_output(files, monkeypatch, capsys):
    class Broken:
        class buffer:
            @staticmethod
            def read1(size):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sys, "stdin", Broken)
    said = refused(["translate", str(files / "model.pt")], capsys)
    assert said == "cannot read the standard input: Input/output error"


def test_an_output_that_cannot_be_written_is_refused_before_the_work(files, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "translate", None)
    arguments = ["translate", str(files / "model.pt"), "--input", str(files / "text"), "--output"]
    assert refused([*arguments, str(files)], capsys) == f"cannot write {files}: it is a folder"
    assert refused([*arguments, str(files / "text")], capsys) == (
        f"--output: expected another file than --input, got {files / 'text'}"
    )
    nowhere = files / "nowhere" / "x"
    assert refused([*arguments, str(nowhere)], capsys) == (
        f"cannot write {nowhere}: there is no such folder"
    )

    def read_only(**options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint.tempfile, "TemporaryFile", read_only)
    said = refused([*arguments, str(files / "new")], capsys)
    assert said == f"cannot write to the folder {files}: Read-only file system"


# Limits


def test_a_translation_as_long_as_allowed_is_said(files):
    _, model, tokenizer = checkpoint.restore(checkpoint.load(files / "model.pt"), "reference")
    lines = ["eins zwei drei eins", "", "zwei"]
    for beam in (1, 3):
        with torch.no_grad():
            model.bias[EOS] = -1e4
        said = []
        options = SearchOptions(beam, max_length=3, max_output_length=6)
        found = evaluate.translate(model, tokenizer, lines, options, name="x", warn=said.append)
        assert [len(x.text.split()) for x in found] == [6, 0, 6]
        assert [x.is_limited for x in found] == [True, False, True]
        assert said == [
            "x, line 1: cut from 4 tokens to the limit of 3",
            "x, line 3: its translation reached the limit of 6 tokens and may lack its end",
            "x, line 1: its translation reached the limit of 6 tokens and may lack its end",
        ]
        found = evaluate.translate(model, tokenizer, lines, SearchOptions(beam))
        assert [len(x.text.split()) for x in found] == [2 * 5 + 9, 0, 2 * 2 + 9]
        with torch.no_grad():
            model.bias[EOS] = 1e4
        found = evaluate.translate(model, tokenizer, lines, SearchOptions(beam))
        assert not any(x.is_limited for x in found)


def test_long_lines_make_small_batches():
    lengths = [1, 0, 300, 20_000, 7, 0, 9000, 8000, 2, 300]
    found = list(evaluate._batches(lengths, 3))
    assert found == [[0, 8, 4], [2, 9], [7], [6], [3]]


def test_a_line_too_long_for_the_memory_is_named(files, monkeypatch, capsys):
    def full(*args, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr(evaluate, "beam_search", full)
    arguments = ["translate", str(files / "model.pt"), "--input", str(files / "text")]
    said = refused(arguments, capsys)
    assert said.startswith(
        f"{files / 'text'}, line 1: too little memory to translate 2 tokens with"
    )
    assert said.endswith("shorter lines or a smaller beam may fit")


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_translation_in_one_sentence(files, tmp_path, number, monkeypatch, capsys):
    def stopped(*args, **options):
        signal.raise_signal(number)

    (tmp_path / "out").write_text("before")
    monkeypatch.setattr(evaluate, "translate", stopped)
    arguments = ["translate", str(files / "model.pt"), "--input", str(files / "text"), "--output"]
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    said = refused([*arguments, str(tmp_path / "out")], capsys, status=128 + number)
    assert said == "interrupted; existing files are intact"
    assert [x.name for x in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "before"
    after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert before == after


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), ""),
        (("--beam", "--hidden-dim"), ": a smaller --hidden-dim or --beam may fit"),
        (("--batch-size", "--max-length"), ": a smaller --batch-size or --max-length may fit"),
    ],
)
def test_too_little_memory(options, said, capsys):
    def function(args):
        raise MemoryError

    parser = command_line.Parser()
    parser.set_defaults(function=function)
    for option in options:
        parser.add_argument(option)
    assert command_line.run(parser, []) == 2
    assert capsys.readouterr().err == f"attnfast: too little memory{said}\n"
