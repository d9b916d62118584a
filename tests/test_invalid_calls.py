"""Every operator refuses what does not fit, before it computes, and crashes on nothing."""

import random
import subprocess
import sys

import invalid_calls
import pytest
import torch

from attnfast.ops.backends import unsupported_reason


def test_compiled_operators_refuse_invalid_calls(tmp_path):
    """Three thousand of them, in a process of its own: a crash would end it."""
    if reason := unsupported_reason("cpu", torch.device("cpu"), torch.float32):
        pytest.skip(reason)
    last = tmp_path / "last"
    command = [sys.executable, invalid_calls.__file__, "cpu", "3000", "0", str(last)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr[-800:]} at {last.read_text()}"
    assert int(done.stdout.split()[-1]) > 1000  # as many fit


def test_triton_refuses_invalid_calls():
    if reason := unsupported_reason("triton", torch.device("cpu"), torch.float32):
        pytest.skip(reason)
    draw = random.Random(1)
    calls = [invalid_calls.Call(draw) for _ in range(500)]
    assert sum(invalid_calls.judge(call, "triton", only_invalid=True) for call in calls) < 300
