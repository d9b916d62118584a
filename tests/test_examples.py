"""The examples run, on a few lines of the kind that they are for."""

import subprocess
import sys
from pathlib import Path

import pytest

for name in ("sacrebleu", "tqdm"):
    pytest.importorskip(name)

ROOT = Path(__file__).parent.parent


def e2e(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "examples" / "e2e.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_e2e(tmp_path):
    for file, names in (("devset.csv", "ABCDEFGH"), ("testset_w_refs.csv", "AXYZ")):
        rows = [f'"name[The {x}], area[riverside]","The {x} is by the river."' for x in names]
        rows += [f'"name[The {x}], area[riverside]",At the riverside: The {x}.' for x in names]
        (tmp_path / file).write_text("\n".join(["mr,ref", *rows]) + "\n")
    options = (tmp_path, "--out", tmp_path / "runs", "--epochs", 1, "--vocab-size", 20)
    done = e2e(*options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("| model | BLEU | names right |")
    assert len(done.stdout.splitlines()) == 6
    again = e2e(*options)
    assert again.stdout == done.stdout
    done = e2e(tmp_path / "nowhere")
    assert done.returncode == 2 and done.stderr.count("\n") == 2
    assert "cannot read" in done.stderr and "No such file" in done.stderr
