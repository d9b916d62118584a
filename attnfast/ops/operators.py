"""The operators of the compiled backends: schemas, shapes and derivatives are the same for all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

LIBRARIES = {
    backend: torch.library.Library(f"attnfast_{backend}", "DEF")
    for backend in ("cpu", "triton", "cuda")
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are taken in: float64 for float64, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_rows(x: Tensor, columns: int | None = None) -> Tensor:
    """Return room for rows like those of x, heads in the order in which they lie in memory.

    Who has transposed a query ``[B, T, H, A]`` so transposes its context back without a copy.
    """
    *lead, _ = strides = x.stride()
    shape = (*x.shape[:-1], x.shape[-1] if columns is None else columns)
    if x.dim() < 4 or 0 in strides:
        return x.new_empty(shape)
    order = sorted(range(3), key=lambda axis: -lead[axis])
    out = x.new_empty([*(shape[axis] for axis in order), shape[-1]])
    return out.permute(*(order.index(axis) for axis in range(3)), 3)


def or_zeros(grad_context: Tensor | None, query: Tensor, value: Tensor) -> Tensor:
    """Return a context's gradient, zeros where autograd has none."""
    if grad_context is not None:
        return grad_context
    return query.new_zeros(()).expand(*query.shape[:-1], value.shape[-1])


def operators_of(backend: str) -> Any:
    """Return the namespace of a compiled backend's operators."""
    return getattr(torch.ops, f"attnfast_{backend}")


def is_recorded() -> bool:
    """Whether a graph is made of what runs: by torch.compile, torch.export or torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def call(operator: Any, *args: Any) -> Any:
    """Call an operator; where nothing is to be differentiated, below autograd, which is quicker."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _checked(check: Callable, fake: Callable) -> Callable:
    """Return what refuses arguments before it says what results look like."""

    @functools.wraps(fake)
    def run(*args):
        check(*args)
        return fake(*args)

    return run


def define(
    name: str,
    schemas: dict[str, str],
    checks: dict[str, Callable],
    fake: Callable,
    fake_backward: Callable,
    setup_context: Callable,
    backward: Callable,
) -> type[Function]:
    """Define an operator and its backward in the namespace of every compiled backend.

    ``checks`` refuse the arguments of each operator, with the same parameters.
    ``setup_context(ctx, inputs, output)`` keeps what ``backward(ctx, *grads)`` needs, which calls
    ``ctx.operator`` and returns a gradient for every input. Returned is the derivative for eager
    mode: that of the registered operator at half its overhead, its last input an
    :func:`operators_of`.
    """

    def no_second_derivative(ctx: Any, *grads):
        raise RuntimeError(
            f"{name} has no second derivative on the compiled backends; backend='reference' has"
        )

    for backend, library in LIBRARIES.items():

        def derivative(ctx: Any, *grads, backend=backend):
            ctx.operator = getattr(operators_of(backend), f"{name}_backward").default
            return backward(ctx, *grads)

        for operator, schema in schemas.items():
            library.define(operator + schema)
        full = f"attnfast_{backend}::{name}"
        for operator, shapes in ((name, fake), (f"{name}_backward", fake_backward)):
            shapes = _checked(checks[operator], shapes)
            torch.library.register_fake(f"attnfast_{backend}::{operator}", shapes, lib=library)
        torch.library.register_autograd(full, derivative, setup_context=setup_context, lib=library)
        torch.library.register_autograd(f"{full}_backward", no_second_derivative, lib=library)

    class Eager(Function):
        @staticmethod
        def forward(ctx: Any, *inputs):
            *arguments, operators = inputs
            output = call(getattr(operators, name).default, *arguments)
            setup_context(ctx, arguments, output)
            ctx.operator = getattr(operators, f"{name}_backward").default
            return output

        @staticmethod
        def backward(ctx: Any, *grads):
            return *backward(ctx, *grads), None

    return Eager
