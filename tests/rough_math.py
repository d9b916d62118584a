"""A pytest plugin, ``-p rough_math``: Triton's interpreter with a GPU's approximations.

NumPy's functions are right to the last bit or nearly, so in the interpreter a kernel that leans on
one which is not on a GPU looks better than it is. Here each errs by as much as NVIDIA's PTX manual
lets ``ex2.approx``, ``lg2.approx``, ``sqrt.approx``, ``rsqrt.approx`` and ``rcp.approx`` err, up or
down as the argument's bits decide, and what is not normal counts as 0 in them, as with ``.ftz``. A
quotient is a product with ``rcp.approx``. Float64, sums and products are right on a GPU too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton's own functions are compiled
from triton.runtime.interpreter import InterpreterBuilder

TINY = np.finfo(np.float32).tiny
LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)


def noise(x: np.ndarray) -> np.ndarray:
    """Return numbers in [−1, 1] that hang on the bits of ``x`` alone."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (bits * np.uint64(2654435761) >> np.uint64(8) & np.uint64(0xFFFF)) / 32767.5 - 1


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def approximate(exact: Callable, relative: float, absolute: float = 0.0) -> Callable:
    """Return a float32 function that errs by these bounds; of another dtype it is exact."""

    def run(*x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            if np.result_type(*x) != np.float32:
                return exact(*x)
            y = exact(*(flushed(a).astype(np.float64) for a in x))
            n = noise(functools.reduce(np.add, x))
            return flushed((y * (1 + relative * n) + absolute * n).astype(np.float32))

    return run


exp2 = approximate(np.exp2, 2**-22.5)
log2_of_few = approximate(np.log2, 0.0, 2**-22)
log2_of_many = approximate(np.log2, 2**-22)


def log2(x: np.ndarray) -> np.ndarray:
    """Between 1/2 and 2 the error is absolute, elsewhere relative."""
    return np.where((x > 0.5) & (x < 2), log2_of_few(x), log2_of_many(x))


def exp(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # to infinity, whose power is 0 or infinity
        return exp2(x * LOG2_E) if x.dtype == np.float32 else np.exp(x)


def log(x: np.ndarray) -> np.ndarray:
    return log2(x) * LN_2 if x.dtype == np.float32 else np.log(x)


def unary(function: Callable) -> Callable:
    return lambda self, x: self.unary_op(x, function)


def binary(function: Callable) -> Callable:
    return lambda self, x, y: self.binary_op(x, y, function)


OPERATIONS = {
    "exp": unary(exp),
    "exp2": unary(exp2),
    "log": unary(log),
    "log2": unary(log2),
    "sqrt": unary(approximate(np.sqrt, 2**-23)),
    "rsqrt": unary(approximate(lambda x: 1 / np.sqrt(x), 2**-22.9)),
    "fdiv": binary(approximate(np.divide, 2**-23)),
}


def pytest_configure(config):
    for name, operation in OPERATIONS.items():
        assert hasattr(InterpreterBuilder, f"create_{name}"), f"the interpreter has no {name}"
        setattr(InterpreterBuilder, f"create_{name}", operation)
