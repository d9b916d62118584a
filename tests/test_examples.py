"""The examples run, on a few lines of the kind that they are for."""

import functools
import gzip
import importlib.util
import re
import signal
from pathlib import Path

import pytest
import torch

from attnfast.models import Config, build
from attnfast.translate import checkpoint, cli, trainer
from attnfast.translate.data import WordTokenizer

pytest.importorskip("sacrebleu")

ROOT = Path(__file__).parent.parent


def example(name):
    """Import an example."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_alignments(tmp_path, capsys, monkeypatch):
    module = example("alignments")
    monkeypatch.setattr(module, "DECODERS", {"Bahdanau": {"attention": "bahdanau"}})
    sizes = ["--pairs", "60", "--test", "8", "--epochs", "2", "--dim", "16"]
    arguments = ["--out", str(tmp_path), *sizes]
    assert module.main(arguments) == 0
    table = capsys.readouterr().out
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert rows[0][2:] == ["AER", "F1", "entropy", "diagonal", "stuck", "BLEU"]
    assert [row[1] for row in rows[2:]] == list(module.WAYS)
    assert all(0 <= float(x) <= 100 for row in rows[2:] for x in row[2:])
    assert module.main(arguments) == 0  # all are trained: the same table again
    assert capsys.readouterr().out == table


def test_paths(tmp_path, capsys):
    """Without its past, a decoder with the source in its initial state alone reads no source."""
    assert cli.main(["corpus", str(tmp_path), "--pairs", "1", "--held-out", "20"]) == 0
    files = {
        "source": tmp_path / "test.en", "target": tmp_path / "test.de",
        "alignments": tmp_path / "test.links",
    }  # fmt: skip
    lines = [x for name in ("source", "target") for x in files[name].read_text().splitlines()]
    tokenizer = WordTokenizer.train(lines)
    models = []
    for number, attention in enumerate(("initial", "none", "general", "coverage", "initial")):
        torch.manual_seed(number)
        config = Config(tokenizer.vocab_size, attention, embed_dim=12, hidden_dim=10)
        models.append(str(tmp_path / f"{number}.pt"))
        checkpoint.save(tmp_path / f"{number}.pt", config, build(config), tokenizer)
    options = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    module = example("paths")
    capsys.readouterr()
    assert module.main([*models, *options, "--plot", str(tmp_path / "paths.png")]) == 0
    assert (tmp_path / "paths.png").read_bytes().startswith(b"\x89PNG")
    by_steps, by_index, past = (x.splitlines() for x in capsys.readouterr().out.split("\n\n"))
    assert by_steps[0].startswith("| encoder steps | 0–2 |")
    assert by_index[0].startswith("| target index | 0–4 |")
    shares = {row.split("|")[1].strip(): row.split("|")[2:] for row in past[2:]}
    assert [x.strip() for x in shares["initial"][:2]] == ["2", "0 % (0–0)"]
    assert all(0 < int(shares[x][1].strip(" %")) <= 100 for x in ("none", "general", "coverage"))
    first, last = (float(x) for x in by_steps[2].split("|")[2:7:4])
    assert first > last  # the encoder's nearer end alone passes gradients on
    assert module.main([*models, *options[:4], "--alignments", str(files["source"])]) == 2
    assert "expected links such as 0-0 1-2" in capsys.readouterr().err


def test_explanation(tmp_path, capsys, monkeypatch):
    module = example("explanation")
    monkeypatch.setattr(module, "SEEDS", (1, 2))
    monkeypatch.setattr(module, "EPOCHS", {"classifier": 30, "translator": 1})
    for name, less in (
        ("adversarial", {"restarts": 1, "steps": 2}),
        ("permutation_test", {"count": 5}),
    ):
        quick = functools.partial(getattr(module.faithfulness, name), **less)
        monkeypatch.setattr(module.faithfulness, name, quick)
    for name, word in (("pos", "fine"), ("neg", "dull")):
        lines = [f"a {word} film" + " again" * (i % 3) for i in range(60)]
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    sizes = ["--pairs", "60", "--test", "4", "--dim", "16"]
    arguments = [str(tmp_path), "--out", str(tmp_path / "out"), *sizes]
    original, calls = module.Reviews._loss, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 100:  # in the second model, of three steps an epoch
            signal.raise_signal(signal.SIGTERM)
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(module.Reviews, "_loss", interrupted)
        assert module.main(arguments) == 143
    assert capsys.readouterr().err.endswith("the same command continues from there\n")
    kept = {x.name: x.stat().st_mtime_ns for x in (tmp_path / "out").glob("*.pt")}
    assert len(kept) == 1
    assert module.main(arguments) == 0
    tables = capsys.readouterr().out
    for name, when in kept.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == when
    titles = re.findall(r"^[\wτ]+$", tables, re.MULTILINE)
    assert titles == ["accuracy", "τ", "permuted", "adversarial", "erasure", "linked"]
    rows = [x.strip("| ").split(" | ") for x in tables.splitlines() if x.startswith("| ")]
    assert ["mean", "100.0 (100.0–100.0)"] in rows
    assert [len(x) for x in rows].count(5) == 1 + 2 * len(module.PAIRS) + 1 + 6 + 4
    assert "nan" not in tables
    assert module.main(arguments) == 0  # all are trained: the same tables again
    assert capsys.readouterr().out == tables
    assert module.main([*arguments[:-1], "15"]) == 2
    assert "expected a model of {'dim': 15" in capsys.readouterr().err


@pytest.fixture
def e2e(tmp_path, capsys):
    """Call the example; return its exit status, its output and what it said."""
    for file, names in (("devset.csv", "ABCDEFGH"), ("testset_w_refs.csv", "AXYZ")):
        rows = [f'"name[The {x}], area[riverside]","The {x} is by the river."' for x in names]
        rows += [f'"name[The {x}], area[riverside]",At the riverside: The {x}.' for x in names]
        (tmp_path / file).write_text("\n".join(["mr,ref", *rows]) + "\n", encoding="utf-8-sig")
    module = example("e2e")

    def call(*options):
        arguments = (tmp_path, "--epochs", 1, "--vocab-size", 20, *options)
        return module.main(list(map(str, arguments))), *capsys.readouterr()

    return call


def test_e2e_stops_and_goes_on(e2e, tmp_path, monkeypatch):
    status, table, said = e2e("--out", tmp_path / "whole")
    assert status == 0, said
    assert table.splitlines()[0].startswith("| model | BLEU | names right |")
    assert len(table.splitlines()) == 6
    original, calls = trainer.train_step, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) in (1, 3):  # in the first model and in the third
            signal.raise_signal(signal.SIGTERM)
        return original(*args)

    parts = ("--out", tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", interrupted)
        for line in ("no coverage, no copying", "coverage, no copying"):
            status, out, said = e2e(*parts)
            assert (status, out) == (143, "")
            titles = [x for x in said.splitlines() if x.endswith("copying")]
            assert titles[-1] == f"attnfast: {line}"
            assert said.endswith(
                "stopped after step 1 of epoch 1; the same command continues from there\n"
            )
    assert e2e(*parts)[:2] == (0, table)
    assert e2e(*parts, "--epochs", 2)[0] == 0
    for last in (tmp_path / "parts").glob("*/last.pt"):
        assert checkpoint.load(last)["training"]["epoch"] == 2


def test_e2e_refuses_in_one_sentence(e2e, tmp_path, monkeypatch):
    def last(*options):
        status, out, said = e2e(*options)
        assert (status, out) == (2, "")
        return said.splitlines()[-1]

    monkeypatch.chdir(tmp_path)
    assert last("--epochs", 0) == (
        "attnfast: --epochs must be an integer of at least 1 and below 2**31, got 0"
    )
    assert "--seed: invalid int value: 'x'" in last("--seed", "x")
    assert e2e()[0] == 0
    assert "attnfast: --vocab-size must be 20, as when the training of" in last("--vocab-size", 19)
    for file in tmp_path.glob("*.csv"):
        file.unlink()
    assert last() == f"attnfast: cannot read {tmp_path}/devset.csv: No such file or directory"
    (tmp_path / "devset.csv").write_text("a,b\n1,2\n")
    assert "devset.csv: expected a file of the challenge, got another: 'mr'" in last()
