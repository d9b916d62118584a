"""A linear layer, ``y = x Wᵀ + b``, for the products before and after a decoder's steps.

This file is the contract, as :mod:`attnfast.ops.attention` is of attention without history.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import check_exact, check_tensor, raise_value_error
from attnfast.ops.operators import Operator


class LinearInputs(NamedTuple):
    """The arguments of the operator, float32 or float64.

    ``input [M, K]``, ``weight [N, K]``, ``bias [N]``.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None


class LinearOutputs(NamedTuple):
    """Output of ``linear``: ``output [M, N]``."""

    output: Tensor


class LinearBackward(NamedTuple):
    """The arguments of the backward."""

    grad_output: Tensor
    input: Tensor
    weight: Tensor
    need_grad_input: bool
    need_grad_parameters: bool


class LinearGradients(NamedTuple):
    """Gradients of ``linear``; those that are not needed have size [0]."""

    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor


def check(call: LinearInputs | LinearBackward) -> None:
    """Raise, in one sentence and before any computation, unless the arguments fit together."""
    check_tensor("input", call.input)
    if call.input.dim() != 2:
        raise_value_error("input", "[M, K]", list(call.input.shape))
    if call.input.dtype not in (torch.float32, torch.float64):
        raise_value_error("input", "float32 or float64", call.input.dtype)
    check_tensor("weight", call.weight)
    if call.weight.dim() != 2:
        raise_value_error("weight", "[N, K]", list(call.weight.shape))
    (M, K), N, dtype = call.input.shape, call.weight.shape[0], call.input.dtype
    check_exact(call.input, [("weight", call.weight, dtype, (N, K))])
    if isinstance(call, LinearInputs):
        check_exact(call.input, [("bias", call.bias, dtype, (N,))])
    else:
        check_exact(call.input, [("grad_output", call.grad_output, dtype, (M, N))])


def _fake(call: LinearInputs | LinearBackward) -> LinearOutputs:
    return LinearOutputs(call.input.new_empty(call.input.shape[0], call.weight.shape[0]))


def _fake_backward(call: LinearBackward) -> LinearGradients:
    empty, needed = call.input.new_empty, call.need_grad_parameters
    return LinearGradients(
        empty(call.input.shape if call.need_grad_input else (0,)),
        empty(call.weight.shape if needed else (0,)),
        empty(call.weight.shape[:1] if needed else (0,)),
    )


LINEAR = Operator(
    "linear", LinearInputs, LinearOutputs, LinearBackward, LinearGradients,
    check=check, check_backward=check, fake=_fake, fake_backward=_fake_backward,
    needs={"need_grad_input": ("input",), "need_grad_parameters": ("weight", "bias")},
    backends=("cpu",),
)  # fmt: skip
