"""Data, training and the command line, on a language small enough to train on in a second."""

import errno
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attnfast._utils import progress
from attnfast.models import sequence_loss
from attnfast.translate import checkpoint, data, trainer
from attnfast.translate.cli import main
from attnfast.translate.data import read_lines
from attnfast.translate.evaluate import Translation, translate

pytest.importorskip("sentencepiece")
pytest.importorskip("sacrebleu")
pytest.importorskip("tqdm")

WORDS = dict(zip(["eins", "zwei", "drei", "vier", "fünf"], ["one", "two", "three", "four", "five"]))


def write_pairs(folder, name, count, seed):
    draw = random.Random(seed)
    pairs = [[draw.choice(list(WORDS)) for _ in range(draw.randint(3, 7))] for _ in range(count)]
    source = "".join(" ".join(words) + "\n" for words in pairs)
    target = "".join(" ".join(WORDS[word] for word in words) + "\n" for words in pairs)
    (folder / f"{name}.de").write_text(source)
    (folder / f"{name}.en").write_text(target)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_pairs(folder, "train", 240, 1)
    write_pairs(folder, "valid", 20, 2)
    return folder


def command(corpus, out, *more):
    files = {"source": "train.de", "target": "train.en"}
    files |= {"valid-source": "valid.de", "valid-target": "valid.en"}
    arguments = ["train", "--model-dir", str(out), "--backend", "reference"]
    arguments += [
        part for name, file in files.items() for part in (f"--{name}", str(corpus / file))
    ]
    arguments += [
        "--vocab-size",
        "55",
        "--embed-dim",
        "24",
        "--hidden-dim",
        "16",
        "--epochs",
        "2",
        "--batch-size",
        "16",
        "--dropout",
        "0.1",
    ]
    return [*arguments, "--device", "cpu", *more]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    assert main(command(corpus, out, "--epochs", "9", "--learning-rate", "0.02")) == 0
    return out


def sentence(capsys):
    """Return what the command had to say at its end: one line."""
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.replace("\r", "\n").strip().splitlines()[-1]


FILES = ["best.pt", "config.toml", "last.pt", "log.csv"]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# Training


def test_a_file_of_options(corpus, trained, tmp_path, capsys):
    """A training writes its options; a file of them trains the same; what is typed comes first."""
    arguments = command(corpus, tmp_path / "typed", "--gated", "--clip=inf", "--epochs=1")
    assert main(arguments) == 0
    written = tmp_path / "typed" / "config.toml"
    own = tmp_path / "own.toml"
    keys = re.sub(r"^\w+", lambda x: x[0].replace("_", "-"), written.read_text(), flags=re.M)
    own.write_text(keys)
    read = ["train", "--backend=reference"]
    assert main([*read, "--config", str(own), f"--model-dir={tmp_path / 'read'}"]) == 0
    same_training(tmp_path / "typed", tmp_path / "read")
    assert (tmp_path / "read" / "config.toml").read_text() == written.read_text()
    more = ["--no-gated", "--dropout=0", "--epochs=1", f"--model-dir={tmp_path / 'other'}"]
    assert main([*read, *more, f"--config={own}"]) == 0
    own.write_text(own.read_text() + "resume = false\n")
    other = ["--epochs=2", f"--model-dir={tmp_path / 'other'}", f"--config={own}", "--resume"]
    assert main([*read, *more[:2], *other]) == 0
    assert "epochs = 2\n" in (tmp_path / "other" / "config.toml").read_text()
    config = checkpoint.load(tmp_path / "other" / "last.pt")["config"]
    assert config["gated"] is False and config["dropout"] == 0 and config["hidden_dim"] == 16
    capsys.readouterr()
    for content, message in (
        ("magic = 3", "own.toml: expected names of options as keys, got magic"),
        ("no_gated = true", "own.toml: expected names of options as keys, got no_gated"),
        ("config = 'x'", "own.toml: expected names of options as keys, got config"),
        ("epochs = [3]", "own.toml: epochs must be a string or a number, got [3]"),
        ("epochs = true", "own.toml: epochs must be a string or a number, got True"),
        ("gated = 1", "own.toml: gated must be true or false, got 1"),
        ("epochs = 1.5", "--epochs: expected an integer, got '1.5'"),
        ("epochs 3", "own.toml: expected a TOML file, got "),
        ("cell = 'x'", "--cell: invalid choice: 'x'"),
    ):
        own.write_text(content + "\n")
        assert main([*arguments, "--config", str(own)]) == 2
        assert message in sentence(capsys)
    assert main([*read, "--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: No such file or directory" in sentence(capsys)


def test_loss_ignores_padding_and_the_rate_rises_and_falls():
    logits, target = torch.randn(2, 3, 7), torch.tensor([[4, 3, 0], [5, 6, 3]])
    loss = sequence_loss(logits, target)
    logits[0, 2] = 9e4
    assert loss == sequence_loss(logits, target)
    options = trainer.Options(warmup=0.1, learning_rate=2.0)
    rates = [options.rate(step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == rates[9] > 1.9
    assert rates[100] == pytest.approx(0) and sorted(rates[9:], reverse=True) == rates[9:]


def test_training_learns_and_logs(trained):
    rows = (trained / "log.csv").read_text().splitlines()
    names = "epoch,loss,valid_loss,bleu,step_ms,seconds,entropy,largest,diagonality"
    assert rows[0] == names and len(rows) == 10
    first, last = (dict(zip(rows[0].split(","), map(float, row.split(",")))) for row in rows[1::8])
    assert last["valid_loss"] < 0.5 * first["valid_loss"]
    assert last["bleu"] > first["bleu"] + 20
    assert last["entropy"] < first["entropy"] - 0.2  # it has learnt where to look
    assert last["largest"] > first["largest"] and last["diagonality"] > first["diagonality"]
    assert sorted(path.name for path in trained.iterdir()) == FILES


@pytest.mark.parametrize(
    "options",
    [
        ["--attention=bahdanau"],
        ["--attention=general", "--recurrence=independent"],
        ["--hard", "--average=0.9", "--scheduled-sampling=0.5"],
    ],
)
def test_a_resumed_training_ends_with_the_same_bits(corpus, tmp_path, options, monkeypatch, capsys):
    assert main(command(corpus, tmp_path / "whole", *options)) == 0
    original, calls = trainer.train_step, []

    def interrupted_step(*args):
        calls.append(1)
        if len(calls) in (5, 19):
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(trainer, "train_step", interrupted_step)
    parts = command(corpus, tmp_path / "parts", *options)
    assert main(parts) == 130
    assert "after step 5 of epoch 1; the same command with --resume continues" in sentence(capsys)
    assert main([*parts, "--resume"]) == 130
    assert "after step 4 of epoch 2" in sentence(capsys)
    assert main([*parts, "--resume"]) == 0

    assert len(calls) == 30
    same_training(tmp_path / "whole", tmp_path / "parts")


def same_training(whole, other):
    """Whether two trainings are the same to the bit, but for the time they took."""
    whole, other = (checkpoint.load(folder / "last.pt") for folder in (whole, other))
    assert same(whole["model"], other["model"])
    parts = {"optimizer", "random", "epoch", "step", "average", "reinforce"}
    for name in parts & whole["training"].keys():
        assert same(whole["training"][name], other["training"][name])
    for a, b in zip(whole["training"]["history"], other["training"]["history"], strict=True):
        assert all(a[name] == b[name] for name in ("epoch", "loss", "valid_loss", "bleu"))


def in_two_processes(arguments, stop_at=0):
    """Train as torchrun does; the second process is asked to stop at a step, if given.

    Return their exit statuses and what the first one said.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    worker = Path(__file__).with_name("distributed_worker.py")
    running = [
        subprocess.Popen(
            [sys.executable, str(worker), str(stop_at), *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [x.communicate(timeout=120)[1] for x in running]
    finally:
        for x in running:
            x.kill()
    assert said[1] == "" or stop_at, said[1]
    return [x.returncode for x in running], said[0]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_two_processes_train_as_one(corpus, tmp_path, capsys):
    """To rounding; and to the same bits when they resume, also where one alone was stopped."""
    more = ["--dropout=0", "--accumulate=2", "--clip=0.5", "--batch-size=15", "--save-every=0"]
    assert main(command(corpus, tmp_path / "one", *more)) == 0
    status, said = in_two_processes(command(corpus, tmp_path / "two", *more))
    assert status == [0, 0], said
    assert said.count("parameters, 8 steps an epoch, on cpu, in 2 processes") == 1
    one, two = (checkpoint.load(tmp_path / x / "last.pt") for x in ("one", "two"))
    torch.testing.assert_close(two["model"], one["model"], rtol=1e-3, atol=1e-4)
    for a, b in zip(one["training"]["history"], two["training"]["history"]):
        for name in ("loss", "valid_loss"):
            assert b[name] == pytest.approx(a[name], rel=1e-4)
    more = ["--dropout=0.3", "--batch-size=24", "--epochs=1"]
    assert in_two_processes(command(corpus, tmp_path / "whole", *more))[0] == [0, 0]
    parts = command(corpus, tmp_path / "parts", *more)
    status, said = in_two_processes(parts, stop_at=5)
    assert status == [143, 143] and "stopped after step 5 of epoch 1" in said
    capsys.readouterr()
    assert main([*parts, "--resume"]) == 2
    assert "expected 2 processes, as when this training began, got 1" in sentence(capsys)
    assert in_two_processes([*parts, "--resume"])[0] == [0, 0]
    same_training(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_one_sentence(corpus, tmp_path, number):
    program = [sys.executable, "-m", "attnfast"]
    process = subprocess.Popen(
        program + command(corpus, tmp_path, "--epochs", "1000000"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "last.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number and out == ""
    last = error.strip().splitlines()[-1]
    assert last.startswith("attnfast: stopped after step ") and "--resume" in last
    assert "Traceback" not in error and "\r" not in error, "a log has no bar"
    assert checkpoint.load(tmp_path / "last.pt")["training"]["epoch"] >= 1


KILLED = """
import os, signal, sys
from attnfast.translate import trainer
from attnfast.translate.cli import main

last, original, calls = int(sys.argv[1]), trainer.train_step, []

def step(*args):
    calls.append(1)
    if len(calls) > last:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)

trainer.train_step = step
main(sys.argv[2:])
"""


def test_killed_in_an_epoch_a_training_goes_on_from_there(corpus, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(command(corpus, whole)) == 0
    arguments = command(corpus, parts, "--save-every", "0")
    done = subprocess.run([sys.executable, "-c", KILLED, "19", *arguments])
    assert done.returncode == -signal.SIGKILL
    state = checkpoint.load(parts / "last.pt")["training"]
    assert (state["epoch"], state["step"]) == (1, 4)
    assert main([*command(corpus, parts), "--resume"]) == 0
    same_training(whole, parts)
    assert sorted(path.name for path in parts.iterdir()) == FILES


@pytest.mark.parametrize("minutes", [0, 1, 1e9])
def test_minutes_between_two_checkpoints(corpus, tmp_path, minutes, monkeypatch):
    """The clock goes on by 20 seconds at each of the 15 steps of an epoch."""
    now = [0.0]
    steps, written = [], []
    original_step, original_save = trainer.train_step, checkpoint.save

    def step(*args):
        now[0] += 20
        steps.append(1)
        return original_step(*args)

    def save(path, *args, **state):
        if path.name == "last.pt":
            written.append(len(steps))
        return original_save(path, *args, **state)

    monkeypatch.setattr(trainer.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(trainer, "train_step", step)
    monkeypatch.setattr(checkpoint, "save", save)
    assert main(command(corpus, tmp_path, "--epochs", "1", "--save-every", str(minutes))) == 0
    expected = {0: list(range(1, 15)), 1: [3, 6, 9, 12], 1e9: []}[minutes]
    assert written == [*expected, 15]


@pytest.mark.parametrize(
    ("where", "number"), [("validation_loss", signal.SIGTERM), ("translate", signal.SIGHUP)]
)
def test_a_signal_in_the_validation(corpus, tmp_path, where, number, monkeypatch, capsys):
    assert main(command(corpus, tmp_path / "whole")) == 0
    original = getattr(trainer, where)

    def stopped(*args, **options):
        signal.raise_signal(number)
        signal.raise_signal(number)  # some send it to a process and then to its group
        return original(*args, **options)

    arguments = command(corpus, tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "translate", None)  # what comes next, and is not reached
        patch.setattr(trainer, where, stopped)
        assert main(arguments) == 128 + number
    assert "stopped after step 15 of epoch 1; the same command with --resume" in sentence(capsys)
    assert main([*arguments, "--resume"]) == 0
    same_training(tmp_path / "whole", tmp_path / "parts")


def test_a_log_shows_how_far_the_training_is(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    assert main(command(corpus, tmp_path)) == 0
    lines = capsys.readouterr().err.splitlines()
    epoch = r"attnfast: epoch 2 of 2: step \d+ of 15, loss \d\.\d{3}, [\d.]+ a second, [\d:]+ left"
    assert sum(re.fullmatch(epoch, line) is not None for line in lines) == 15
    assert sum(line.startswith("attnfast: validating: sentence ") for line in lines) == 6


def test_a_second_ctrl_c_is_final(corpus, tmp_path, monkeypatch, capsys):
    def impatient(*args):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer, "train_step", impatient)
    assert main(command(corpus, tmp_path)) == 130
    assert sentence(capsys) == "attnfast: interrupted; existing files are intact"
    assert [x.name for x in tmp_path.iterdir()] == ["config.toml"]


def test_signals_that_are_ignored_stay_so(corpus, tmp_path, monkeypatch):
    """As nohup and shells without job control ask for."""
    original = trainer.train_step

    def told(*args):
        signal.raise_signal(signal.SIGHUP)
        return original(*args)

    monkeypatch.setattr(trainer, "train_step", told)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(command(corpus, tmp_path, "--epochs", "1")) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_more_epochs_go_on(corpus, tmp_path, capsys):
    arguments = command(corpus, tmp_path, "--resume", "--epochs")
    assert main([*command(corpus, tmp_path), "--epochs", "1"]) == 0
    first = checkpoint.load(tmp_path / "last.pt")["training"]
    assert main([*arguments, "3"]) == 0
    assert "continuing to epoch 3 instead of 1" in capsys.readouterr().err
    second = checkpoint.load(tmp_path / "last.pt")["training"]
    assert second["epoch"] == 3 and second["history"][0] == first["history"][0]
    rates = [x["optimizer"]["param_groups"][0]["lr"] for x in (first, second)]
    assert rates[1] == trainer.Options(epochs=3).rate(44, 45) < 1e-4
    assert main([*arguments, "2"]) == 2
    assert "--epochs must be at least 3, as when the training of" in sentence(capsys)


def test_ties_in_bleu_are_broken_by_the_loss(corpus, tmp_path, monkeypatch, capsys):
    scores, losses = iter([3.0, 3.0, 3.0, 2.0]), iter([2.0, 1.0, 1.5, 0.5])
    monkeypatch.setattr(trainer, "bleu", lambda *_: (next(scores), ""))
    monkeypatch.setattr(trainer, "validation_loss", lambda *_: next(losses))
    written, original = [], checkpoint.save

    def save(path, *args, **state):
        written.append(path.name)
        return original(path, *args, **state)

    monkeypatch.setattr(checkpoint, "save", save)
    assert main(command(corpus, tmp_path, "--epochs", "4")) == 0
    assert written == ["best.pt", "last.pt"] * 2 + ["last.pt"] * 2
    assert "best BLEU 3.00 after epoch 2: " in sentence(capsys)


def test_a_full_disk_leaves_the_last_checkpoint(corpus, tmp_path, monkeypatch, capsys):
    arguments = command(corpus, tmp_path / "out", "--epochs", "1")
    assert main(arguments) == 0
    arguments = command(corpus, tmp_path / "copy", "--epochs", "2")
    original, calls = os.fsync, []

    def full(descriptor):
        calls.append(1)
        if len(calls) > 4:  # the options, two checkpoints and the log of epoch 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert main(arguments) == 2
    said = sentence(capsys)
    assert "cannot write " in said and said.endswith(".pt: No space left on device")
    assert checkpoint.load(tmp_path / "copy" / "last.pt")["training"]["epoch"] == 1
    names = sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert names == FILES
    monkeypatch.undo()
    assert main([*arguments, "--resume"]) == 0


def test_a_training_is_not_overwritten_nor_resumed_otherwise(corpus, trained, tmp_path, capsys):
    before = (trained / "last.pt").read_bytes()
    for more, message in [
        ([], "holds an earlier training: add --resume"),
        (
            ["--resume"],
            "--epochs must be at least 9, as when the training of .*last.pt began, got 2",
        ),
        (
            ["--resume", "--epochs", "9", "--learning-rate", "0.02", "--max-length", "60"],
            "--max-length must be 100, as when the training of .*last.pt began, got 60",
        ),
        (
            ["--resume", "--normalisation", "NFC"],
            "--normalisation must be None, as when the training of .*last.pt began, got NFC",
        ),
        (
            ["--resume", "--hidden-dim", "8"],
            "--hidden-dim must be 16, as when the training of .*last.pt began, got 8",
        ),
    ]:
        assert main(command(corpus, trained, *more)) == 2
        assert re.search(message, sentence(capsys))
    assert (trained / "last.pt").read_bytes() == before
    more = ["--resume", "--epochs", "9", "--learning-rate", "0.02"]
    shutil.copy(trained / "last.pt", tmp_path)
    assert main(command(corpus, tmp_path, *more)) == 2
    assert "best.pt: expected the best checkpoint so far, that after epoch " in sentence(capsys)
    shutil.copy(trained / "best.pt", tmp_path / "last.pt")
    assert main(command(corpus, tmp_path, "--resume")) == 2
    assert "expected the training's last checkpoint, got a model alone" in sentence(capsys)
    shorter = tmp_path / "shorter"
    shutil.copytree(corpus, shorter)
    write_pairs(shorter, "train", 199, 1)
    assert main(command(shorter, trained, *more)) == 2
    assert "expected the training pairs that this training began with" in sentence(capsys)
    write_pairs(shorter, "train", 240, 1)
    write_pairs(shorter, "valid", 20, 3)
    assert main(command(shorter, trained, *more)) == 2
    assert "expected the validation pairs that this training began with" in sentence(capsys)


def test_a_folder_is_one_trainings(corpus, tmp_path, capsys):
    with checkpoint.lock(tmp_path):
        assert main(command(corpus, tmp_path)) == 2
        said = f"attnfast: cannot write to the folder {tmp_path}: another training writes to it"
        assert sentence(capsys) == said
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_process(tmp_path):
    program = (
        "import os, pathlib, signal, sys; from attnfast.translate.checkpoint import lock\n"
        "with lock(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL and list(tmp_path.iterdir()) != []
    with checkpoint.lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_subwords_are_learnt(corpus, tmp_path, monkeypatch, capsys):
    def interrupted(text, form):
        signal.raise_signal(signal.SIGINT)
        return text

    monkeypatch.setattr(data, "_normalised", interrupted)
    assert main(command(corpus, tmp_path)) == 130
    assert sentence(capsys) == "attnfast: interrupted; existing files are intact"


def test_what_the_vocabulary_lacks_is_said(corpus, tmp_path, monkeypatch, capsys):
    """Before the training begins, of which this needs none."""
    files = tmp_path / "files"
    shutil.copytree(corpus, files)
    (files / "valid.en").write_text("one 漢 two\u200c\n" * 20)
    monkeypatch.setattr(trainer.Trainer, "run", lambda *_: sys.exit())
    assert main(command(files, tmp_path / "a")) == 0
    (said,) = (x for x in capsys.readouterr().err.splitlines() if "vocabulary" in x)
    valid = f"{files / 'valid.de'}, {files / 'valid.en'}"
    assert said == (
        f"attnfast: {valid}: characters not in the vocabulary: 40, "
        "2 different, such as '漢', '\\u200c'"
    )
    assert main(command(files, tmp_path / "b", "--tokenizer=word", "--vocab-size=9")) == 0
    said = capsys.readouterr().err
    assert "train.en: words not in the vocabulary: " in said
    assert ", 5 different, such as" in said


def test_a_validation_says_how_many_translations_may_lack_their_ends(
    corpus, tmp_path, monkeypatch, capsys
):
    found = [Translation([], [], i in (0, 3, 4)) for i in range(20)]
    monkeypatch.setattr(trainer, "translate", lambda *_, **__: found)
    assert main(command(corpus, tmp_path, "--epochs", "1")) == 0
    said = "3 of 20 translations of the validation set reached their limit of length"
    assert said in capsys.readouterr().err


# Commands


def test_damaged_checkpoint_is_one_sentence(trained, tmp_path, capsys):
    """Parts that are missing, of another version, or of another size."""
    state = torch.load(trained / "best.pt", weights_only=True)
    for damage in (
        {"model": {}},
        {"config": {**state["config"], "layers": 2}},
        {"config": {**state["config"], "colour": "blue"}},
        {"tokenizer": {}},
    ):
        checkpoint.write(tmp_path / "bad.pt", {**state, **damage})
        assert main(["translate", str(tmp_path / "bad.pt"), "--input", "/dev/null"]) == 2
        assert "bad.pt: expected a checkpoint of this version" in sentence(capsys)


def test_output_keeps_links_and_devices(trained, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    arguments = ["translate", str(trained / "best.pt"), "--input", str(tmp_path / "in.txt")]
    assert main([*arguments, "--output", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "\n"
    assert main([*arguments, "--output", "/dev/null"]) == 0
    assert not os.path.isfile("/dev/null")
    assert main([*arguments, "--output", str(tmp_path / "nowhere" / "x")]) == 2
    assert "there is no such folder" in sentence(capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--source": "missing.de"}, "cannot read missing.de: No such file or directory"),
        (
            {"--model-dir": "{corpus}/train.de/out"},
            "cannot write to the folder .*: Not a directory",
        ),
        (
            {"--hidden-dim": "0"},
            "attnfast: --hidden-dim must be an integer of at least 1 and below .*, got 0",
        ),
        (
            {"--layers": "0"},
            "attnfast: --layers must be an integer of at least 1 and below .*, got 0",
        ),
        (
            {"--warmup": "nan"},
            "attnfast: --warmup must be a number of at least 0 and at most 1, got nan",
        ),
        (
            {"--warmup": "1.5"},
            "attnfast: --warmup must be a number of at least 0 and at most 1, got 1.5",
        ),
        (
            {"--epochs": "0"},
            "attnfast: --epochs must be an integer of at least 1 and below .*, got 0",
        ),
        ({"--learning-rate": "-1"}, "attnfast: --learning-rate must be a number above 0, got -1.0"),
        ({"--backend": "cuda"}, "--backend cuda cannot run on cpu"),
        ({"--device": "abacus"}, "--device: expected a device of this machine, got abacus"),
        (
            {"--vocab-size": "5"},
            r"--vocab-size must be at least \d+ for subwords of this text, got 5",
        ),
        (
            {"--max-length": "0"},
            "--max-length must be an integer of at least 1 and below .*, got 0",
        ),
        ({"--max-length": "1"}, "expected training and validation pairs, got none"),
        ({"--device": "meta"}, "--device: .*only cpu and cuda are supported"),
        (
            {"--seed": "99999999999999999999"},
            "attnfast: --seed must be an integer of at least 0 and below 2..63, got 9",
        ),
        (
            {"--learning-rate": "1e30"},
            "the loss of step . of epoch 1 must be finite, got (nan|inf): a learning rate",
        ),
    ],
)
def test_train_refuses_in_one_sentence(corpus, tmp_path, change, message, capsys):
    arguments = command(corpus, tmp_path / "out")
    for name, value in change.items():
        if name in arguments:
            arguments[arguments.index(name) + 1] = value.format(corpus=corpus)
        else:
            arguments += [name, value]
    assert main(arguments) == 2
    assert re.search(message, sentence(capsys))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_refused(corpus, tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert main(command(corpus, tmp_path)) == 2
    assert "Permission denied" in sentence(capsys)


def test_translate_keeps_every_line(trained, tmp_path, capsys):
    (tmp_path / "in").write_text("eins zwei drei\n\ndrei 漢\n" + "vier " * 270 + "\n")
    checkpoint_path = str(trained / "best.pt")
    arguments = ["translate", checkpoint_path, "--backend", "reference", "--device", "cpu"]
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert main([*arguments, *files]) == 0
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) == 4 and all(lines[i] for i in (0, 2, 3)) and lines[1] == ""
    said = capsys.readouterr().err
    assert "in, line 3: 1 of its tokens are unknown to the model" in said
    assert "in, line 4: cut " not in said  # a source is read whole
    short = ["--output", str(tmp_path / "short"), "--max-length=5", "--max-output-length=2"]
    assert main([*arguments, *files, *short]) == 0
    said = capsys.readouterr().err
    assert "in, line 4: cut from " in said and "to the limit of 5" in said
    assert "in, line 1: its translation reached the limit of 2 tokens" in said
    assert len((tmp_path / "short").read_text().splitlines()[0].split()) <= 2

    _, model, tokenizer = checkpoint.restore(checkpoint.load(checkpoint_path), "reference")
    sources = read_lines(tmp_path / "in")
    assert [x.text for x in translate(model, tokenizer, sources[:3])] == lines[:3]
    assert [translate(model, tokenizer, [line])[0].text for line in sources] == lines
    assert translate(model, tokenizer, []) == []


def test_translate_reads_and_writes_pipes(trained):
    arguments = ["translate", str(trained / "last.pt"), "--backend", "reference"]
    program = [sys.executable, "-m", "attnfast", *arguments]
    done = subprocess.run(program, input=b"eins zwei drei\n\n", capture_output=True)
    _, model, tokenizer = checkpoint.restore(checkpoint.load(arguments[1]), "reference")
    (expected,) = translate(model, tokenizer, ["eins zwei drei"])
    assert (done.returncode, done.stdout.decode()) == (0, f"{expected.text}\n\n")
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, input=b"eins\n", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == b"attnfast: cannot write the standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda good: good[: len(good) // 2],
            "expected a checkpoint as attnfast wrote it, got a damaged or foreign file",
        ),
        (
            lambda good: b"",
            "expected a checkpoint as attnfast wrote it, got a damaged or foreign file",
        ),
        (
            lambda good: b"hello\n" * 99,
            "expected a checkpoint as attnfast wrote it, got a damaged or foreign file",
        ),
        (None, "cannot read checkpoint .*bad.pt: No such file or directory"),
    ],
)
def test_bad_checkpoints_are_refused(corpus, trained, tmp_path, content, message, capsys):
    bad = tmp_path / "bad.pt"
    if content is not None:
        bad.write_bytes(content((trained / "best.pt").read_bytes()))
    for name in ("translate", "score"):
        files = ["--input"] if name == "translate" else ["--target", "x", "--source"]
        if name == "score":
            files[1] = str(corpus / "valid.en")
        assert main([name, str(bad), *files, str(corpus / "valid.de")]) == 2
        assert re.search(message, sentence(capsys))


def test_a_checkpoint_runs_no_code(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "made"),))

    torch.save({"format": 1, "config": Evil()}, tmp_path / "evil.pt")
    assert main(["translate", str(tmp_path / "evil.pt"), "--input", os.devnull]) == 2
    assert "expected a checkpoint" in sentence(capsys)
    assert not (tmp_path / "made").exists()


def test_score_prints_scores_signatures_and_tables(corpus, trained, tmp_path, capsys):
    files = ["--source", str(corpus / "valid.de"), "--target", str(corpus / "valid.en")]
    common = ["--backend", "reference", "--device", "cpu", "--beam=2"]
    best = str(trained / "best.pt")
    assert main(["score", best, *common, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    number = r"\d+\.\d\d"
    scores = f"BLEU {number}, chrF2 {number}, TER {number} on 20 sentences, beam 2"
    assert re.fullmatch(scores, lines[0])
    assert all("|version:" in line for line in lines[1:4])
    assert sum(int(line.split()[1]) for line in lines[6:]) == 20
    other = tmp_path / "other.pt"
    state = checkpoint.load(best)
    state["model"]["bias"] = state["model"]["bias"].roll(7)
    checkpoint.write(other, state)
    more = ["--length-bins=4,6", "--frequencies", str(corpus / "train.en"), "--rouge"]
    more += ["--plot", str(tmp_path / "plot.png")]
    assert main(["score", best, str(other), *common, *files, *more]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(f"pt: {scores}", out)) == 2
    assert len(re.findall(r"other.pt: p = 0\.\d{3} for BLEU, p = .* for chrF2, p = ", out)) == 1
    assert len(re.findall(f"pt: ROUGE-1 {number}, ROUGE-2 {number}, ROUGE-L {number}\n", out)) == 2
    assert len(re.findall(r" 1–4 +\d+ ", out)) == len(re.findall(r" 5–6 +\d+ ", out)) == 2
    assert out.count(", by the frequency of words in ") == 2
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    for bins in ("3,x", "5,5", "0,4"):
        assert main(["score", best, *files, f"--length-bins={bins}"]) == 2
        said = f"--length-bins: expected rising numbers such as 10,20,30, got {bins}"
        assert said in sentence(capsys)
    empty = tmp_path / "empty"
    empty.touch()
    assert main(["score", best, *files, "--frequencies", str(empty)]) == 2
    assert f"{empty}: expected at least one line, got an empty file" in sentence(capsys)


def test_a_pointer_generator_learns_to_copy(tmp_path, capsys):
    """From the command line: names that the training never showed come through."""
    names = [f"name{i}" for i in range(60)]
    (tmp_path / "source").write_text("".join(f"call {n} now\n" for n in names))
    (tmp_path / "target").write_text("".join(f"now comes {n} to us\n" for n in names))
    (tmp_path / "new").write_text("call somebody now\ncall anyone now\n")
    files = [
        f"--{v}{side}={tmp_path / side}" for v in ("", "valid-") for side in ("source", "target")
    ]
    model = ["--tokenizer=word", "--pointer-generator", "--attention=coverage"]
    model += ["--vocab-size=10", "--epochs=12"]
    sizes = ["--embed-dim=16", "--hidden-dim=16", "--batch-size=4", "--learning-rate=0.01"]
    command = ["train", *files, *model, *sizes, f"--model-dir={tmp_path / 'run'}", "--dropout=0"]
    assert main(command) == 0
    assert main([*command, "--resume"]) == 0  # nothing is left to do
    capsys.readouterr()
    out = tmp_path / "out"
    assert main(["translate", str(tmp_path / "run/best.pt"), f"--input={tmp_path / 'new'}",
                 f"--output={out}"]) == 0  # fmt: skip
    assert out.read_text() == "now comes somebody to us\nnow comes anyone to us\n"
    assert main([*(x for x in command if x != "--tokenizer=word"), "--resume"]) == 2
    assert "--tokenizer must be word, as when the training of" in capsys.readouterr().err
    assert main([*command, "--vocab-size=4", f"--model-dir={tmp_path / 'small'}"]) == 2
    assert "attnfast: --vocab-size must be at least 5 for words, got 4" in capsys.readouterr().err
