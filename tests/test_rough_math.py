"""Triton's interpreter with a GPU's approximations: see rough_math.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("here Triton runs on a GPU", allow_module_level=True)
TESTS = Path(__file__).parent
#: An operation on x, and the most that a GPU's may be off by: relative, and absolute.
OPERATIONS = {
    "tl.exp2(x)": (2**-22, 0),
    "tl.exp(x)": (2**-20, 0),  # the product with log2 e is rounded too
    "tl.log2(x)": (2**-21.5, 2**-21.5),
    "tl.log(x)": (2**-21.5, 2**-21.5),
    "tl.sqrt(x)": (2**-22.4, 0),
    "tl.rsqrt(x)": (2**-22, 0),
    "1 / x": (2**-22.4, 0),
    "x / 3": (2**-22.4, 0),
    "x * 3 + x": (2**-23, 0),
}


def test_it_is_as_rough_as_a_gpu_and_no_rougher(tmp_path):
    names = {f"f{i}": x for i, x in enumerate(OPERATIONS)}
    kernels = "\n".join(
        f"@triton.jit\ndef {name}(p, out):\n    x = tl.load(p + tl.arange(0, 1024))\n"
        f"    tl.store(out + tl.arange(0, 1024), {line})\n"
        for name, line in names.items()
    )
    (tmp_path / "test_it.py").write_text(f"""
import pytest, torch, triton, triton.language as tl
{kernels}
@pytest.mark.parametrize(("kernel", "line", "bound"), {
        [(name, line, OPERATIONS[line]) for name, line in names.items()]
    })
def test_it(kernel, line, bound):
    x = torch.linspace(0.1, 8, 1024)
    found = []
    for x in (x, x.double()):
        out = torch.empty_like(x)
        globals()[kernel][(1,)](x, out)
        found.append(out.double())
    got, want = found
    off = (got - want).abs()
    assert (off <= bound[0] * want.abs() + bound[1]).all()
    rough = (off > 2**-24 * want.abs()).any()  # rounding alone is no more than that
    assert rough == ("+" not in line)
""")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "rough_math",
         "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True,
    )  # fmt: skip
    assert f"{len(OPERATIONS)} passed" in done.stdout, done.stdout + done.stderr
