"""Every operator refuses what does not fit, before it computes, and crashes on nothing."""

import random
import subprocess
import sys

import misfits
import pytest
import torch

from attnfast.ops.backends import unsupported_reason


def test_compiled_operators_refuse_misfits(tmp_path):
    """Three thousand of them, in a process of its own: a crash would end it."""
    if reason := unsupported_reason("cpu", torch.device("cpu"), torch.float32):
        pytest.skip(reason)
    last = tmp_path / "last"
    command = [sys.executable, misfits.__file__, "cpu", "3000", "0", str(last)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr[-800:]} at {last.read_text()}"
    assert int(done.stdout.split()[-1]) > 1000  # as many fit


def test_triton_refuses_misfits():
    if reason := unsupported_reason("triton", torch.device("cpu"), torch.float32):
        pytest.skip(reason)
    draw = random.Random(1)
    calls = [misfits.Call(draw) for _ in range(500)]
    assert sum(misfits.judge(call, "triton", only_misfits=True) for call in calls) < 300
