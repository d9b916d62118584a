"""Examples that train models: they stop, go on bit for bit, and refuse in one sentence."""

import importlib
import re
import signal
import sys
import wave
from typing import NamedTuple

import _experiment
import pytest
import tiny
import torch

from attnfast._utils.benchmark import Cost, costs
from attnfast._utils.checks import InputError
from attnfast.translate import checkpoint, trainer


def looking(image, maps, words):
    assert maps.shape == (len(words), *image.shape)
    return b"a picture"


class Run(NamedTuple):
    """A tiny run: its options, what to set in the module, what makes its data, what it writes."""

    options: str
    tables: dict[str, int | None]  # rows by the first line, None of as many as measures
    pictures: set[str]
    module: dict[str, object] = {}  # noqa: RUF012
    data: object = None  # writes the folder that is the first argument


EACH = "exact, digits, pointing, %"
COSTS = "| model | ms a step | MiB a step |"
RUNS = {
    "captioning": Run(
        "--rows|soft|hard|soft, doubly stochastic|no attention|--captions|2|--scenes|3|--test|1",
        {
            "| 2 to 4 digits | seeds | exact, % | digits, % | relations, % | pointing, % | IoU, % "
            "| BLEU |": 5,
            f"| by digits | {' | '.join(f'{n}: {EACH}' for n in range(2, 6))} |": 5,
            COSTS: 4,
        },
        {f"{name}-1-wrong.png" for name in ("soft", "hard", "soft-doubly-stochastic")},
        {"FEATURES": (4, 4), "STRIDES": (4, 2), "draw_looking": looking},
    ),
    "pointers": Run(
        "--rows|pointing|naming|--test|3",
        {
            "| sorting | seeds | model | 5 | 7 | 10 | 15 | 20 |": 4,
            "| hull | seeds | model | 5 | 7 | 10 | 15 | 20 |": None,
        },
        {"hull-naming-1.png", "hull-pointing-1.png"},
    ),
    "reading": Run(
        "--rows|both ways, characters, highway|no question to text|no text to question|neither"
        "|--test|30",
        {
            "| | seeds | exact, % | F1, % |": 4,
            "| exact, % | both ways, characters, highway | no question to text "
            "| no text to question | neither |": None,
        },
        {"both-ways-characters-highway-1.png", "no-question-to-text-1.png"},
        data=tiny.write_descriptions,
    ),
    "speech": Run(
        "--rows|location-aware, own letters|no attention|--test|1",
        {
            "| model | seeds | search | 1 | 2 | 1–2 | 3–3 |": 6,
            "| model | substituted, left out, put in, % | monotonic, % | from the diagonal, % |": 2,
            COSTS: 2,
        },
        {"location-aware-own-letters-1.png"},
        {"TRAIN_COUNTS": range(1, 3), "LONGER": range(3, 4)},
        tiny.write_recordings,
    ),
    "stories": Run(
        "--rows|2 hops|LSTM|3 hops, layer-wise|--tasks|one fact|--stories|9|--test|5",
        {
            "| wrong, % | 2 hops | LSTM | 3 hops, layer-wise |": 1,
            "| weight of the facts at each hop, % | evenly | 2 hops | 3 hops, layer-wise |": 1,
        },
        {"one-fact-2-hops-1.png", "one-fact-3-hops-layer-wise-1.png"},
    ),
    "turing": Run(
        "--rows|NTM|LSTM|--tasks|reverse|sort|--test|2",
        {
            "| reverse | seeds | model | 10 | 20 |": 4,
            "| sort | seeds | model | 8 | 10 |": 4,
        },
        {"reverse-NTM-1.png", "sort-NTM-1.png"},
    ),
}


PACKAGES = {"captioning": ("sacrebleu", "sklearn")}


def cost(call):
    call()
    return Cost(0.25, 1 << 20)  # and no profile, which takes seconds


@pytest.fixture
def run(request, tmp_path, capsys, monkeypatch):
    """Return a tiny run, its module, and a call of it: an output folder and more options."""
    for package in ("matplotlib", *PACKAGES.get(request.param, ())):
        pytest.importorskip(package)
    one = RUNS[request.param]
    module = importlib.import_module(request.param)
    for name, value in one.module.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(_experiment, "costs", lambda calls, _: {x: cost(calls[x]) for x in calls})
    if request.param == "turing":
        for task in module.TASKS:
            few = module.TASKS[task]._replace(test_sizes=module.TASKS[task].test_sizes[:2])
            monkeypatch.setitem(module.TASKS, task, few)
    sizes = ["--dim", "8", "--steps", "4", "--batch-size", "4", "--seeds", "1"]
    folder = [str(one.data(tmp_path / "data"))] if one.data else []

    def call(out, *more):
        arguments = [*folder, "--out", str(tmp_path / out), *sizes, *one.options.split("|")]
        return module.main([*arguments, *more]), *capsys.readouterr()

    return one, module, call


every = pytest.mark.parametrize("run", RUNS, indirect=True)


@every
def test_what_stops_goes_on(run, tmp_path, monkeypatch):
    one, _, call = run
    status, table, said = call("whole")
    assert status == 0, said
    assert said.endswith(f"results: {tmp_path / 'whole'}\n")
    assert (tmp_path / "whole" / "table.md").read_text() == table and "nan" not in table
    tables = [x.splitlines() for x in table.split("\n\n")]
    assert [x[0] for x in tables] == list(one.tables)
    assert all(rows in (len(x) - 2, None) for x, rows in zip(tables, one.tables.values()))
    assert {x.name for x in (tmp_path / "whole").glob("*.png")} == one.pictures
    original, calls = torch.nn.utils.clip_grad_norm_, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 6:  # in the second model
            signal.raise_signal(signal.SIGTERM)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", interrupted)
        status, out, said = call("parts")
    assert (status, out) == (143, "")
    assert said.endswith("stopped; the same command continues from there\n")
    files = {x.name: checkpoint.load(x) for x in (tmp_path / "parts").glob("*.pt")}
    assert sorted(x["step"] for x in files.values()) == [2, 4]
    assert call("parts")[0] == 0
    for file in files:
        whole, parts = (checkpoint.load(tmp_path / x / file) for x in ("whole", "parts"))
        assert whole["found"] == parts["found"]
        for part in whole.keys() - {"format", "random", "optimizer", "like", "step", "found"}:
            torch.testing.assert_close(parts[part], whole[part], rtol=0, atol=0, equal_nan=True)
    kept = {x: x.stat().st_mtime_ns for x in (tmp_path / "whole").glob("*.pt")}
    assert call("whole")[1] == table
    assert kept == {x: x.stat().st_mtime_ns for x in kept}
    status, _, said = call("whole", "--dim", "10")
    assert status == 2 and said.count("\n") == 1
    assert "-1.pt: expected dim 10, got dim 8: another --out keeps both trainings" in said


@every
def test_what_is_trained_is_kept_before_it_is_tested(run, tmp_path, monkeypatch):
    _, module, call = run
    with monkeypatch.context() as patch:
        patch.setattr(module.Training, "judge", lambda self: signal.raise_signal(signal.SIGINT))
        assert call("out")[0] == 130
    [file] = (tmp_path / "out").glob("*.pt")
    kept = checkpoint.load(file)
    assert kept["step"] == 4 and not kept["found"]
    found = {"asked": {}, "of another test": 1}
    checkpoint.write(file, {**kept, "found": found})
    assert call("out")[0] == 0  # tested anew
    assert checkpoint.load(file)["found"]["asked"]


@every
def test_one_sentence(run):
    _, module, call = run

    def said(*options):
        status, out, said = call("out", *options)
        assert (status, out, said.count("\n")) == (2, "", 1)
        return said

    assert said("--steps", "0") == (
        "attnfast: --steps: expected an integer of at least 1 and below 2**31, got 0\n"
    )
    least = 1 + (module.__name__ in ("captioning", "speech"))  # a word has half as many features
    assert said("--dim", str(least - 1)).endswith(
        f"of at least {least} and below 2**31, got {least - 1}\n"
    )
    for number in ("x", "1.5"):
        wanted = f"attnfast: --batch-size: expected an integer, got '{number}'\n"
        assert said("--batch-size", number) == wanted
    assert said("--batch-size", "99999999999").endswith("and below 2**31, got 99999999999\n")
    for option in ("rows", *["tasks"] * hasattr(module, "TASKS")):
        assert said(f"--{option}", "none").startswith(f"attnfast: --{option}: invalid choice: 'n")


@every
def test_models_and_tasks_are_taken_once(run, monkeypatch):
    _, module, call = run
    given = []
    monkeypatch.setattr(module, "compare", given.append)
    for option in ("rows", *["tasks"] * hasattr(module, "TASKS")):
        first, second, *_ = getattr(module, option.upper())
        call("out", f"--{option}", second, first, second)
        assert getattr(given[-1], option) == [second, first]


def of(name):
    return pytest.mark.parametrize("run", [name], indirect=True)


@of("captioning")
def test_the_rows_of_captions(run, monkeypatch):
    """Costs are measured, and what a model is tested on is a part of what is kept."""
    _, module, call = run
    monkeypatch.setattr(_experiment, "costs", costs)
    names = ["soft", "soft, doubly stochastic"]
    table = call("out", "--rows", *names)[1].splitlines()
    rows = [x.split(" | ")[0].strip("| ") for x in table]
    assert rows[2:5] == [*names, "soft, shuffled"]
    assert re.fullmatch(r"\| soft \| \d+ \| \d+ \|", table[-2])
    row = module.ROWS["soft"]._replace(shuffled=False)
    monkeypatch.setitem(module.ROWS, "soft", row)
    assert "expected row" in call("out", "--rows", "soft")[2]


@of("pointers")
def test_sets_that_are_too_large_for_names(run):
    _, _, call = run
    rows = call("out", "--tasks", "sorting")[1].splitlines()
    assert rows[3].endswith("| – | – |") and "–" not in rows[2]


@of("turing")
def test_other_sizes(run, monkeypatch):
    _, module, call = run
    assert call("out", "--tasks", "copy", "--rows", "LSTM")[0] == 0
    task = module.TASKS["copy"]
    monkeypatch.setitem(module.TASKS, "copy", task._replace(test_sizes=[module.Size(3)]))
    table = call("out", "--tasks", "copy", "--rows", "LSTM")[1]
    assert table.startswith("| copy | seeds | model | 3 |")
    monkeypatch.setitem(module.TASKS, "copy", task._replace(train_sizes=[module.Size(3)]))
    assert "LSTM-1.pt: expected learnt" in call("out", "--tasks", "copy", "--rows", "LSTM")[2]


@of("captioning")
def test_captioning_that_cannot_be(run, monkeypatch):
    _, _, call = run
    assert call("out", "--captions", "17")[2] == "attnfast: --captions must be at most 16, got 17\n"
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "needs the package scikit-learn of the extra attnfast[test]" in call("out")[2]


@of("reading")
def test_other_descriptions(run, tmp_path):
    _, _, call = run
    assert call("out", "--rows", "neither")[0] == 0
    file = tmp_path / "data" / "devset.csv"
    for one in file.parent.iterdir():
        one.write_text(one.read_text().replace("serves", "offers"))
    status, _, said = call("out", "--rows", "neither")
    assert status == 2 and "expected questions " in said and said.count("\n") == 1
    for one in file.parent.iterdir():
        one.write_text(one.read_text().replace(" food", " food" * 40))  # longer than any it takes
    assert "expected places that several people described, got too few" in call("new")[2]
    file.unlink()
    assert call("new")[2].startswith(f"attnfast: cannot read {file}: ")


@of("reading")
def test_the_rows_of_readers(run, tmp_path):
    """A row has the parts of its name, and the others have not."""
    _, module, call = run
    named = {"characters": "characters.conv.weight", "highway": "highway.gates.1.weight"}
    rows = [name for name in module.ROWS if name.startswith("both ways")]
    assert len(rows) == 4 and call("out", "--steps", "1", "--rows", *rows)[0] == 0
    for row in rows:
        file = tmp_path / "out" / f"{row.replace(', ', '-').replace(' ', '-')}-1.pt"
        model = checkpoint.load(file)["model"]
        parts = row.split(", ")
        assert {x for x, name in named.items() if name in model} == {*parts[1:]}


@of("speech")
def test_other_recordings(run, tmp_path):
    _, _, call = run
    assert call("out")[0] == 0
    kept = checkpoint.load(tmp_path / "out" / "no-attention-1.pt")
    assert kept["found"]["asked"]["recordings"] == kept["like"]["recordings"]
    louder = tmp_path / "data" / "0_me_10.wav"
    louder.write_bytes(louder.read_bytes()[:-2] + b"\0\1")
    status, _, said = call("out")
    assert status == 2 and re.search("expected recordings [0-9]+, got recordings [0-9]+: an", said)


@of("speech")
def test_recordings_that_cannot_be(run, tmp_path):
    _, _, call = run
    digits = tmp_path / "data"

    def said():
        status, _, said = call("out")
        assert status == 2 and said.count("\n") == 1
        return said

    (digits / "9_me_10.wav").rename(digits / "-1_me_10.wav")
    assert "expected names such as 7_jackson_32.wav, got -1_me_10.wav" in said()
    (digits / "-1_me_10.wav").rename(digits / "9_me_10.wav")
    content = (digits / "3_me_10.wav").read_bytes()
    with wave.open(str(digits / "3_me_10.wav"), "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", ""))
        out.writeframes(bytes(2 * 199))
    assert "expected 200 samples at least, a frame, got 199 in 3_me_10.wav" in said()
    (digits / "3_me_10.wav").write_bytes(content)
    (digits / "3_me_10.wav").rename(digits / "3_me_x.wav")
    assert "expected names such as 7_jackson_32.wav, got 3_me_x.wav" in said()
    (digits / "3_me_x.wav").unlink()
    assert "expected ten digits of every speaker for train, got fewer" in said()


@of("stories")
def test_stories_that_cannot_be(run, tmp_path):
    _, _, call = run
    status, _, said = call("out", "--linear-start", "1.5")
    assert (status, said) == (2, "attnfast: --linear-start must be a share below 1, got 1.5\n")
    assert call("out", "--rows", "1 hop")[0] == 0
    said = call("out", "--rows", "1 hop", "--learning-rate", "0.1")[2]
    assert "expected learning_rate 0.1, got learning_rate 0.005" in said


@of("stories")
def test_stories_without_facts(run):
    """A number of none has no sentences that it follows from, and so no share of them."""
    _, module, call = run
    assert not module.draw_story("counting", "counting test 0").facts
    status, table, _ = call("out", "--tasks", "counting", "--test", "1")
    assert status == 0 and "nan" not in table


def test_a_trial_that_another_has_kept(tmp_path):
    def trial(size=2, **like):
        part = {"part": torch.nn.Linear(size, 2)}
        options = trainer.Options(seed=3)
        return _experiment.Trial(tmp_path, ["a, b", "c"], like, {}, part, 1, options)

    one = trial(dim=2, steps=3, seed=1)
    assert one.path == tmp_path / "a-b-c-3.pt" and one.title == "a, b, c, seed 3"
    one.save()
    kept = checkpoint.load(one.path)
    assert trial(dim=2, steps=3, seed=1).step == 0
    said = r"c-3\.pt: expected dim 1, steps 4, got dim 2, steps 3: another --out keeps both train"
    with pytest.raises(InputError, match=said):
        trial(dim=1, steps=4, seed=1)
    with pytest.raises(InputError, match=r"c-3\.pt: expected more 1, got more None: another --out"):
        trial(dim=2, steps=3, seed=1, more=1)
    with pytest.raises(InputError, match=r"c-3\.pt: expected seed None, got seed 1: another --out"):
        trial(dim=2, steps=3)
    damaged = [{x: y for x, y in kept.items() if x != lost} for lost in kept if lost != "format"]
    damaged += [{**kept, "like": 1}, {**kept, "part": {}}, {**kept, "random": torch.zeros(3)}]
    for content in damaged:
        checkpoint.write(one.path, content)
        with pytest.raises(InputError, match=r"c-3\.pt: expected what this example keeps") as error:
            trial(dim=2, steps=3, seed=1)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("rate", [1e-3, 1e308])
def test_what_is_not_finite_is_not_kept(tmp_path, rate):
    class Broken(_experiment.Trial):
        def loss(self, step):
            [total] = (p.sum() for p in self.parameters)
            return (0 * total).sqrt() if rate < 1 and step == 2 else total

    part = torch.nn.Linear(2, 2, bias=False)
    options = trainer.Options(learning_rate=rate, warmup=0)
    one = Broken(tmp_path, ["a"], {}, {}, {"part": part}, 4 if rate < 1 else 1, options)
    said = (
        "a, seed 1: the gradient of step 3 must be" if rate < 1 else "a, seed 1: parameters must be"
    )
    with pytest.raises(InputError, match=f"{said} finite, got"):
        one.learn()
    assert not one.path.exists()


def test_pictures_are_of_the_first_seed(tmp_path, capsys):
    class Drawn(_experiment.Trial):
        def loss(self, step):
            return self.parameters[0].sum()

        def judge(self):
            return {"steps": self.step}

        def pictures(self):
            assert not self.modules["part"].training
            return {"-a": b"a picture", "-b": b"another"}

    seeds = (
        Drawn(tmp_path, ["x"], {}, {}, {"part": torch.nn.Linear(2, 2)}, 1, trainer.Options(seed=i))
        for i in (1, 2, 3)
    )
    each = lambda done: " ".join(f"{x.names[0]}{x.found['steps']}" for x in done) + "\n"  # noqa: E731
    _experiment.learn_all(tmp_path, seeds, each, lambda done: f"{len(done)}\n")
    assert capsys.readouterr().out == (tmp_path / "table.md").read_text() == "x1 x1 x1\n\n3\n"
    assert {x.name for x in tmp_path.glob("*.png")} == {"x-1-a.png", "x-1-b.png"}
