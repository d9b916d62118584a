r"""The pointer-generator's distribution over words of the vocabulary and of the source.

    S_w = softmax(logits)_w,   p = sigmoid(gate),   C_w = Σ_{i: source_i = w} α_i
    P_w = p S_w + (1 − p) C_w     over V words of the vocabulary and X out-of-vocabulary words

This file is the contract, as :mod:`attnfast.ops.attention` is of attention without history.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import (
    check_exact,
    check_tensor,
    describe,
    is_readable,
    raise_value_error,
)
from attnfast.ops.backends import FLOATS
from attnfast.ops.operators import Operator, implement

#: The log-probability of an impossible word: that of the smallest normal float32.
LOWEST = math.log(torch.finfo(torch.float32).tiny)
#: The logarithm of the largest gradient of a log-probability; a copy probability of less than e to
#: the power of −MAX_LOG_GRADIENT counts as 0.
MAX_LOG_GRADIENT = 80


class CopyInputs(NamedTuple):
    """The arguments of the operator."""

    logits: Tensor
    weights: Tensor
    source: Tensor
    gate: Tensor
    num_oov: Annotated[int, "SymInt"] = 0
    log: bool = False


class CopyOutputs(NamedTuple):
    """Outputs of ``copy_distribution``.

    ``log_sum_exp`` of the logits is float64, because a logit and it may both be large while their
    difference is small.
    """

    distribution: Tensor
    log_sum_exp: Tensor


class CopyBackward(NamedTuple):
    """The arguments of the backward."""

    grad_distribution: Tensor
    logits: Tensor
    weights: Tensor
    source: Tensor
    gate: Tensor
    log_sum_exp: Tensor
    num_oov: Annotated[int, "SymInt"]
    log: bool


class CopyGradients(NamedTuple):
    """Gradients of ``copy_distribution``."""

    grad_logits: Tensor
    grad_weights: Tensor
    grad_gate: Tensor


def check(call: CopyInputs | CopyBackward) -> None:
    """Raise, in one sentence and before any computation, unless the arguments fit together."""
    logits, weights, source, gate = call.logits, call.weights, call.source, call.gate
    num_oov = call.num_oov
    named = {"logits": logits, "weights": weights, "source": source, "gate": gate}
    for name, x in named.items():
        check_tensor(name, x)
        if x.device != logits.device:
            raise_value_error(name, f"on the logits' device {logits.device}", x.device)
        if name in ("weights", "gate") and x.dtype != logits.dtype:
            raise_value_error(name, f"of the logits' dtype {logits.dtype}", x.dtype)
    if logits.dtype not in FLOATS:
        raise_value_error("logits", "float32, float64, bfloat16 or float16", logits.dtype)
    if logits.dim() != 3:
        raise_value_error("logits", "[B, Tq, V]", list(logits.shape))
    B, Tq, V = logits.shape
    if weights.dim() != 3 or weights.shape[:2] != logits.shape[:2]:
        raise_value_error("weights", f"[{B}, {Tq}, Tk] to fit the logits", list(weights.shape))
    if gate.shape != logits.shape[:2]:
        raise_value_error("gate", f"[{B}, {Tq}] to fit the logits", list(gate.shape))
    shape = [B, weights.shape[-1]]
    if source.dtype not in (torch.int32, torch.int64) or list(source.shape) != shape:
        got = f"{source.dtype} {list(source.shape)}"
        raise_value_error("source", f"int64 or int32 of shape {shape} to fit the weights", got)
    if not isinstance(num_oov, (int, torch.SymInt)) or not 0 <= num_oov < 2**31:
        raise_value_error("num_oov", "an integer, at least 0", describe(num_oov))
    if source.numel() and V + num_oov < 1:
        raise_value_error("logits", "[B, Tq, V] with V > 0 for a source", list(logits.shape))
    check_words("source", source, V + num_oov)


def check_words(name: str, words: Tensor, count: int) -> None:
    """Raise ValueError unless all ids, if they can be read, are between 0 and ``count`` − 1."""
    if is_readable(words) and words.numel():
        for word in (int(words.min()), int(words.max())):
            if not 0 <= word < count:
                raise_value_error(name, f"between 0 and {count - 1}, a word", word)


def _check_backward(call: CopyBackward) -> None:
    check(call)
    *rows, V = call.logits.shape
    gradients = [
        (
            "grad_distribution",
            call.grad_distribution,
            call.logits.dtype,
            (*rows, V + call.num_oov),
        ),
        ("log_sum_exp", call.log_sum_exp, torch.float64, rows),
    ]
    check_exact(call.logits, gradients)


def _fake(call: CopyInputs) -> CopyOutputs:
    *rows, V = call.logits.shape
    log_sum_exp = call.logits.new_empty(rows, dtype=torch.float64)
    return CopyOutputs(call.logits.new_empty((*rows, V + call.num_oov)), log_sum_exp)


def _fake_backward(call: CopyBackward) -> CopyGradients:
    return CopyGradients(*(x.new_empty(x.shape) for x in (call.logits, call.weights, call.gate)))


COPYING = Operator(
    "copy_distribution", CopyInputs, CopyOutputs, CopyBackward, CopyGradients,
    check=check, check_backward=_check_backward, fake=_fake, fake_backward=_fake_backward,
    needs={}, constant=("log_sum_exp",),
)  # fmt: skip
implement(
    "triton", "attnfast.kernels.copying",
    {"copy_distribution": "forward", "copy_distribution_backward": "backward"},
)  # fmt: skip
