"""Checkpoints that were damaged, cut off in the middle of a write, or made by another version."""

import math
import os
import random
import re
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from attnfast._utils.checks import InputError
from attnfast.models import Config, build
from attnfast.translate import checkpoint
from attnfast.translate.cli import main
from attnfast.translate.data import WordTokenizer

TOKENIZER = WordTokenizer(["eins", "zwei", "drei", "one", "two", "three"])
CONFIG = Config(TOKENIZER.vocab_size, embed_dim=8, hidden_dim=8)


def model():
    torch.manual_seed(1)
    return build(CONFIG, "reference")


@pytest.fixture
def good(tmp_path):
    checkpoint.save(tmp_path / "good.pt", CONFIG, model(), TOKENIZER)
    return tmp_path / "good.pt"


def translate(path, capsys):
    """Return the exit status, what was said, and the translation or None."""
    source, output = path.parent / "source", path.parent / "output"
    source.write_text("eins zwei drei\nzwei\n")
    output.unlink(missing_ok=True)
    places = ["--input", str(source), "--output", str(output), "--device", "cpu"]
    status = main(["translate", str(path), "--backend", "reference", *places])
    return status, capsys.readouterr().err, output.read_text() if output.exists() else None


def damaged(content):
    """Bytes overwritten at random places, some alone and some in a row; cut off; appended."""
    draw = random.Random(0)
    for _ in range(160):
        changed = bytearray(content)
        length = draw.choice((1, 1, 4, 64))
        for _ in range(draw.choice((1, 3, 20))):
            start = draw.randrange(len(content) - length)
            changed[start : start + length] = draw.randbytes(length)
        if changed != content:
            yield bytes(changed)
    for last in (64, 66, 22, 1):  # the checksum, and the end of the archive
        for _ in range(4):
            changed = bytearray(content)
            changed[-draw.randint(1, last)] ^= draw.randint(1, 255)
            yield bytes(changed)
    for size in (0, 1, 21, 64, len(content) - 1, len(content) - 64, len(content) - 66):
        yield content[:size]
    for _ in range(20):
        yield content[: draw.randrange(len(content))]
        yield content + draw.randbytes(draw.randint(1, 99))


def test_damage_is_refused_in_one_sentence(good, capsys):
    assert translate(good, capsys)[0] == 0
    bad = good.with_name("bad.pt")
    for content in damaged(good.read_bytes()):
        bad.write_bytes(content)
        status, said, text = translate(bad, capsys)
        assert status == 2 and text is None
        assert said.startswith(f"attnfast: {bad}: expected a checkpoint") and said.count("\n") == 1


def test_a_checkpoint_is_a_file_of_torch_save(good):
    state = torch.load(good, weights_only=True)
    assert state.keys() == checkpoint.load(good).keys()
    assert zipfile.ZipFile(good).testzip() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "expected a checkpoint of format 5, got 9, which another version"),
        ({"format": 3}, "expected a checkpoint of format 5, got 3, which another version"),
        ({"format": "x"}, "got a damaged or foreign file"),
        ({"tokenizer": {"kind": "runes", "content": torch.zeros(1, dtype=torch.uint8)}}, "runes"),
        ({"config": {"attention": "none"}}, "expected a checkpoint of this version, got parts"),
    ],
)
def test_other_versions_are_refused(good, change, message, capsys):
    checkpoint.write(good, {**checkpoint.load(good), **change})
    status, said, text = translate(good, capsys)
    assert status == 2 and text is None and message in said and said.count("\n") == 1


def test_the_page_names_the_format():
    page = Path(__file__).parent.parent / "docs" / "translate.md"
    assert re.findall(r"format (\d+)", page.read_text()) == [str(checkpoint.FORMAT)]


def test_what_others_wrote_over_it_is_refused(good, capsys):
    torch.save(checkpoint.load(good), good)
    assert "as attnfast wrote it, got a damaged or foreign file" in translate(good, capsys)[1]


# Numbers that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_parameters_that_are_not_finite_are_neither_written_nor_read(good, value, capsys):
    before = good.read_bytes()
    broken = model()
    with torch.no_grad():
        broken.encoder.layers[0].weight_hh_l0[0, 0] = value
    with pytest.raises(InputError, match=r"good.pt: expected finite parameters, got .*weight_hh"):
        checkpoint.save(good, CONFIG, broken, TOKENIZER)
    assert good.read_bytes() == before

    checkpoint.write(good, {**checkpoint.load(good), "model": broken.state_dict()})
    status, said, text = translate(good, capsys)
    assert status == 2 and text is None
    assert "expected finite parameters, got NaN or infinity: encoder.layers.0.weight_hh_l0" in said
    assert main(["score", str(good), "--source", __file__, "--target", __file__]) == 2
    assert "expected finite parameters" in capsys.readouterr().err


@pytest.mark.parametrize("beam", [1, 5])
def test_scores_that_are_not_finite_are_refused(good, beam, capsys):
    large = model()
    with torch.no_grad():
        for parameter in large.parameters():
            parameter.fill_(3e38)
    checkpoint.save(good, CONFIG, large, TOKENIZER)
    command = ["translate", str(good), "--input", __file__, "--beam", str(beam)]
    assert main([*command, "--backend", "reference", "--device", "cpu"]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said.splitlines()[-1].startswith("attnfast: the model's scores must be finite numbers")


# Writes that do not come to their end

KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from attnfast.translate import checkpoint

torch.set_num_threads(1)  # threads do not survive a fork
path, kills = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(0)
numbers, left = [0], 0
checkpoint.write(path, {"format": 5, "number": 0, "filler": torch.zeros(1 << 18)})
for kill in range(kills):
    child = os.fork()
    if child == 0:
        for number in range(numbers[-1] + 1, 1 << 30):
            filler = torch.full((1 << 18,), float(number))
            checkpoint.write(path, {"format": 5, "number": number, "filler": filler})
    time.sleep(draw.uniform(0.005, 0.04))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    state = checkpoint.load(path)  # raises if it is not whole
    assert (state["filler"] == state["number"]).all() and state["number"] >= numbers[-1]
    numbers.append(state["number"])
    left += len(os.listdir(path.parent)) > 1
    assert len(os.listdir(path.parent)) <= 2, "what was left before is removed"
checkpoint.write(path, state)
print(left, numbers[-1], *os.listdir(path.parent))
"""


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_checkpoint_is_read_by_whom_the_umask_lets(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        checkpoint.save(tmp_path / "good.pt", CONFIG, model(), TOKENIZER)
    finally:
        os.umask(before)
    assert (tmp_path / "good.pt").stat().st_mode & 0o777 == mode


def test_killed_in_the_middle_of_a_write(tmp_path):
    command = [sys.executable, "-c", KILLS, str(tmp_path / "last.pt"), "25"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left, written, *names = done.stdout.split()
    assert names == ["last.pt"]
    assert int(left) > 0 and int(written) > 0, "some were killed in a write, and some wrote"


def test_a_disk_that_fills_up_leaves_what_was_there(good):
    before = good.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(InputError, match=r"cannot write .*good.pt: File too large"):
            checkpoint.save(good, CONFIG, model(), TOKENIZER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert good.read_bytes() == before
    assert [path.name for path in good.parent.iterdir()] == ["good.pt"]
