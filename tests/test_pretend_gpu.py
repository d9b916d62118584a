"""Tests that take a GPU's tensors, with CPU tensors that say they are: see pretend_gpu.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnfast.ops.backends import unsupported_reason

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here they run on a GPU"),
    pytest.mark.skipif(
        unsupported_reason("cpu", torch.device("cpu"), torch.float32) is not None,
        reason="no _C_cpu",
    ),
]
TESTS = Path(__file__).parent
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "pretend_gpu"]
#: What looks into tensors from below, where they are on the CPU; activations look at no device.
ELSEWHERE = "compile or opcheck or gradcheck or forward_mode or fuzz or relu"
#: Searches and translators that take the way of others, with another score.
ALIKE = "local- or general or scaled or concat or cosine or multihead or predictive"
ALIKE += " or translates and (location or none or prior or initial or forward)"
ALIKE += " or one_graph and (bahdanau-beam or coverage-beam)"


def pretend(*arguments: str) -> subprocess.CompletedProcess:
    """Run pytest with the plugin."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *arguments],
        cwd=TESTS,
        env={**env, "PYTHONPATH": os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("files", "selection"),
    [
        (["test_gpu.py"], f"not reference and not compiled and not ({ALIKE})"),
        (
            [f"test_{x}.py" for x in ("attention", "coverage", "memory")],
            f"cuda and not ({ELSEWHERE})",  # to Python triton is the same
        ),
    ],
    ids=["what only a GPU shows", "the table"],
)
def test_devices_are_kept_apart(files, selection):
    done = pretend(*files, "-k", selection)
    assert done.returncode == 0, done.stdout + done.stderr


COMPLAINTS = {
    "x + torch.ones(3)": "on the CPU",
    "x.numpy()": "no NumPy array",
    "captured(lambda: x.sum().item())": "while a graph is captured",
    "captured(lambda: x[x > 0])": "while a graph is captured",
    "captured(lambda: x[[0, 2]])": "while a graph is captured",
    "captured(lambda: x.cpu())": "while a graph is captured",
    "captured(lambda: torch.tensor([1.0], device='cuda'))": "while a graph is captured",
}


def test_it_complains(tmp_path):
    """Each line in a test of its own, which fails with these words."""
    lines = (
        f"COMPLAINTS = {COMPLAINTS!r}"
        + """
import pytest
import torch

def captured(work):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        work()

@pytest.mark.parametrize("line", COMPLAINTS)
def test_it(line):
    x = torch.ones(3, device="cuda")
    assert x.device == torch.device("cuda:0") and (x + 1).sum().item() == 6
    with pytest.raises(BaseException) as raised:
        exec(line, {**globals(), "x": x})
    assert COMPLAINTS[line] in str(raised.value)
"""
    )
    (tmp_path / "test_it.py").write_text(lines)
    done = pretend(str(tmp_path), "--rootdir", str(tmp_path))
    assert f"{len(COMPLAINTS)} passed" in done.stdout, done.stdout + done.stderr
