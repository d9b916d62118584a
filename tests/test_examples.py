"""The examples run, on a few lines of the kind that they are for."""

import functools
import gzip
import importlib.util
import re
import signal
from pathlib import Path

import pytest
import torch

from attnfast._utils.benchmark import Cost
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write a few sentences of the made-up language; return their folder."""
    directory = tmp_path_factory.mktemp("data")
    assert cli.main(["corpus", str(directory), "--pairs", "40", "--held-out", "6"]) == 0
    return directory


@pytest.mark.parametrize("table", example("ablations").TABLES)
def test_ablations(table, corpus, tmp_path, capsys, monkeypatch):
    """The first and the last row of each table, trained and then read again."""
    module = example("ablations")
    rows = [*module.TABLES[table].rows]
    sizes = ["--pairs", "40", "--held-out", "6", "--epochs", "1", "--dim", "8", "--seeds", "1"]
    arguments = [table, "--out", str(tmp_path), *sizes, "--rows", rows[0], rows[-1]]
    if table == "multi30k":
        assert module.main(arguments) == 2
        error = f"attnfast: --data: {table} needs the folder of its files, got none\n"
        assert capsys.readouterr().err.endswith(error)
        data = tmp_path / "data"
        data.mkdir()
        for part, name in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr")):
            for ending in ("de", "en"):
                text = gzip.compress((corpus / f"{part}.{ending}").read_bytes())
                (data / f"{name}.{ending}.gz").write_bytes(text)
        small = {"vocab_size": 500, "epochs": 1, "embed_dim": 8, "hidden_dim": 8}
        given = module.TABLES[table].options | small
        monkeypatch.setitem(module.TABLES, table, module.TABLES[table]._replace(options=given))
        arguments += ["--data", str(data)]
    assert module.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "table.md").read_text() and "nan" not in printed
    scores, lengths = (x.splitlines() for x in printed.split("\n\n"))
    assert scores[0] == "| | BLEU | AER | entropy | repeated | parameters |"
    assert [x.split(" | ")[0] for x in scores[2:]] == [f"| {rows[0]}", f"| {rows[-1]}"]
    assert lengths[0].startswith("| BLEU by source words | ") and len(lengths) == 4
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    before = {x: x.stat().st_mtime_ns for x in tmp_path.rglob("best.pt")}
    assert module.main(arguments) == 0
    assert capsys.readouterr().out == printed
    assert len(before) == 2 and before == {x: x.stat().st_mtime_ns for x in before}


def test_ablations_of_other_data(corpus, tmp_path, capsys, monkeypatch):
    """With costs, and stopped in the second training."""
    module = example("ablations")
    monkeypatch.setattr(module, "costs", lambda steps, n: {x: Cost(0.25, 2**20) for x in steps})
    sizes = ["--epochs", "1", "--dim", "8", "--seeds", "2", "--rows", "none", "--costs"]
    arguments = ["coverage", "--out", str(tmp_path), "--data", str(corpus), *sizes]
    original, calls = trainer.train_step, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", interrupted)
        assert module.main(arguments) == 143
    assert capsys.readouterr().err.endswith("stopped; the same command continues from there\n")
    assert module.main(arguments) == 0
    assert capsys.readouterr().out.endswith("| | ms | MiB |\n|---|--:|--:|\n| none | 250 | 1 |\n")
    assert module.main([*arguments, "--rows", "some"]) == 2
    assert "--rows: expected some of none, coverage, " in capsys.readouterr().err
    assert module.main([*arguments, "--data", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_learning(tmp_path, capsys, monkeypatch):
    module = example("learning")
    sizes = ["--pairs", "40", "--held-out", "12", "--dim", "8", "--seeds", "2"]
    arguments = ["--out", str(tmp_path), *sizes, "--rows", "general", "--epochs"]
    assert module.main([*arguments, "1"]) == 0
    assert capsys.readouterr().out.startswith("| entropy after epoch | 1 |")
    assert module.main([*arguments, "2"]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    logs = [module.read_log(tmp_path / f"general-{seed}") for seed in (1, 2)]
    for i, cell in enumerate(row.split("|")[2:4]):
        assert float(cell) == pytest.approx(sum(x[i]["entropy"] for x in logs) / 2, abs=0.006)
    gradients = [logs[0][1][f"gradient_{i}"] for i in range(1, 6)]
    assert all(0.2 < x < 5 for x in gradients)
    maps = checkpoint.load(tmp_path / "general-1" / "maps.pt")
    assert {*maps} == {"format", "0", "1", "2"}
    assert not torch.equal(maps["0"], maps["1"]) and maps["2"].sum(-1).max() <= 1 + 1e-5
    pictures = {x.name for x in tmp_path.glob("*.png")}
    assert pictures == {"statistics.png", "gradients.png", "weights-general.png"}


def test_gradients_of_states_by_fifths_of_the_source():
    """A model that is read for its initial state alone needs the ends of its source."""
    module = example("learning")
    torch.manual_seed(0)
    model = build(Config(30, "initial", embed_dim=8, hidden_dim=8, dropout=0.0))
    examples = [trainer.Example([5, 6, 7, 8, 9] * n, [5, 6]) for n in (2, 3)]
    found = [*module.state_gradients(model, examples).values()]
    assert found[0] > 1 and found[-1] > 1 and found[1:4] == [0, 0, 0]
    assert all(p.grad is None for p in model.parameters())


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
