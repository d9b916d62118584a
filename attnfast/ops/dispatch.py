"""Run a call on a backend: the reference, an operator, or its derivative in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnfast.ops import reference
from attnfast.ops.arguments import as_returned, raise_on_tangents
from attnfast.ops.attention import ATTENTION, AttentionInputs
from attnfast.ops.operators import ForwardOperator, is_tracing, unchecked
from attnfast.outputs import AttentionOutput, attention_result

__all__ = ["run", "run_attention"]


def run(operator: ForwardOperator, call: Any, backend: str) -> Any:
    """Return the operator's results on a backend, which must support the call.

    A call that fails is checked, for an error that names the argument.
    """
    if backend == "reference":
        operator.check(call)
        return getattr(reference, operator.name)(call)
    try:
        raise_on_tangents(call)
        if not torch.is_grad_enabled():
            return operator(backend, call)
        if not any([x.requires_grad for x in call if isinstance(x, Tensor)]):
            return operator(backend, call)
        if call._fields[-1] == "need_weights":  # the backward reads them
            call = unchecked(type(call), (*call[:-1], True))
        return operator(backend, call) if is_tracing() else operator.differentiable(backend, call)
    except Exception:
        operator.check(call)
        raise


def run_attention(call: AttentionInputs, backend: str) -> AttentionOutput:
    """Run attention and return an AttentionOutput."""
    context, weights, log_sum_exp, statistics = run(ATTENTION, call, backend)
    weights = as_returned(weights, call.query.dtype, call.need_weights)
    return attention_result(
        context, weights, log_sum_exp, statistics if call.need_statistics else None
    )
