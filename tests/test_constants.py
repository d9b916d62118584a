"""The constants that C++, CUDA and Triton share are equal."""

import math
import re
from pathlib import Path

import pytest
import torch

from attnfast.ops import copying, recurrent, self_check
from attnfast.ops.backends import DispatchKey

ROOT = Path(__file__).parent.parent


def constant(file: str, name: str) -> float:
    """Return a constant of a header."""
    [value] = re.findall(rf"\b{name}(?:<\w+>)? = ([^;]+);", (ROOT / "csrc" / file).read_text())
    number = value.removesuffix("f")
    return float.fromhex(number) if number.startswith("0x") else float(number)


def coefficients(file: str, name: str, end: str) -> list[float]:
    """Return the decimal fractions of a function, in their order."""
    text = (ROOT / file).read_text()
    return [float(x) for x in re.findall(r"\d+\.\d+", text.split(f" {name}(")[1].split(end)[0])]


@pytest.mark.parametrize(
    ("file", "name", "module", "triton_name"),
    [
        ("score.h", "kFactoredSumLimit", "attention", "FACTORED_LIMIT"),
        ("score.h", "kLeakySlope", "attention", "LEAKY_SLOPE"),
        ("cuda/tile.cuh", "kSmallTanhLimit", "attention", "SMALL_LIMIT"),
        ("cuda/score.cuh", "kLeastWeight", "attention", "LEAST_WEIGHT"),
        ("word.h", "kLowest", "copying", "LOWEST"),
        ("word.h", "kMaxLogGradient", "copying", "MAX_LOG_GRADIENT"),
        ("word.h", "kSlight", "copying", "SLIGHT"),
    ],
)
def test_triton_has_the_constants_of_csrc(file, name, module, triton_name):
    pytest.importorskip("triton")
    kernels = pytest.importorskip(f"attnfast.kernels.{module}")
    assert constant(file, name) == getattr(kernels, triton_name).value


def test_triton_has_the_polynomial_of_csrc():
    of_cuda = coefficients("csrc/cuda/tile.cuh", "small_tanh", "\n}")
    assert len(of_cuda) == 6
    assert of_cuda == coefficients("kernels/attention.py", "_small_tanh", "@triton.jit")


def test_copying_has_the_constants_of_csrc():
    assert constant("word.h", "kLowest") == copying.LOWEST
    assert constant("word.h", "kMaxLogGradient") == copying.MAX_LOG_GRADIENT
    assert constant("word.h", "kSlight") == math.exp(-copying.MAX_LOG_GRADIENT)


def test_the_self_check_multiplies_by_the_library():
    """Scores and context of its additive attention are computed one by one on a GPU."""
    text = (ROOT / "csrc" / "cuda" / "attention_products.h").read_text()
    [exponent] = re.findall(r"define ATTNFAST_LIBRARY_FORWARD \(1 << (\d+)\)", text)
    request = DispatchKey(torch.device("cuda", 0), torch.float32)
    call = self_check.OPERATORS["attention"][1](request)
    sums = call.query.shape[1] * call.key.shape[1] * call.query.shape[0]
    assert sums * (call.query.shape[2] + call.value.shape[2]) >= 1 << int(exponent)


def test_exponents_of_a_transition_have_one_limit():
    coverage = pytest.importorskip("attnfast.kernels.coverage")
    text = (ROOT / "csrc" / "coverage.h").read_text()
    [limit] = re.findall(r"kLeastLogarithm = .*: C\((-\d+)\);", text)
    assert coverage.MAX_EXPONENT.value == -float(limit)


def test_limit_of_the_single_launch():
    """Larger batches run step by step, in CUDA graphs."""
    assert constant("cuda/persistent.cuh", "kMostSequences") == recurrent.MAX_PERSISTENT_BATCH
