"""Run a call on a backend: the reference, an operator, or its derivative in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnfast._utils.checks import check_choice
from attnfast._utils.dispatch_log import record
from attnfast._utils.torch_private import is_transformed
from attnfast.ops import reference, reference_search
from attnfast.ops.arguments import as_returned, raise_on_tangents
from attnfast.ops.attention import (
    ATTENTION,
    NORMALISATIONS,
    AttentionInputs,
    AttentionOutputs,
)
from attnfast.ops.operators import ForwardOperator, is_tracing, needs_gradient, unchecked
from attnfast.ops.scores import SCORING, ScoreInputs
from attnfast.outputs import AttentionOutput, attention_result

__all__ = ["run", "run_attention"]


def run(operator: ForwardOperator, call: Any, backend: str) -> Any:
    """Return the operator's results on a backend, which must support the call.

    If the call fails, its arguments are checked, so that the error names the argument.
    """
    if backend == "reference":
        operator.check(call)
        functions = reference_search if operator.name == "search" else reference
        return getattr(functions, operator.name)(call)
    try:
        raise_on_tangents(call)
        if not torch.is_grad_enabled():
            return operator(backend, call)
        requires_grad = needs_gradient(call)
        if not requires_grad and not is_transformed():  # a transform hides requires_grad
            return operator(backend, call)
        if call._fields[-1] == "need_weights":  # the backward reads them
            call = unchecked(type(call), (*call[:-1], True))
        if not requires_grad or is_tracing():
            return operator(backend, call)
        return operator.differentiable(backend, call)
    except Exception:
        operator.check(call)
        raise


def supports_normalisation(normalisation: str, backend: str) -> bool:
    """Return whether the backend normalises scores in its kernels, without PyTorch's operators."""
    return normalisation == "softmax" or backend in ("cpu", "reference")


def _compose(call: AttentionInputs, backend: str) -> AttentionOutputs:
    """Compute attention with PyTorch's operators, on additive scores from the backend."""
    scores = "" if call.score_vector is None else f" on scores from {backend}"
    record(
        call.normalisation, f"PyTorch{scores}", f"not {backend}: its kernels support only softmax"
    )

    def score(query: Tensor, key: Tensor, score_vector: Tensor | None, name: str) -> Tensor:
        if score_vector is None:
            return reference.score(query, key, score_vector, name)
        return run(SCORING, ScoreInputs(query, key, score_vector, name), backend).scores

    ATTENTION.check(call)
    return reference.attention(call, score)


def run_attention(call: AttentionInputs, backend: str) -> AttentionOutput:
    """Run attention and return an AttentionOutput."""
    is_softmax = call.normalisation == "softmax"
    if not is_softmax:
        check_choice("normalisation", call.normalisation, NORMALISATIONS)
    fused = is_softmax or supports_normalisation(call.normalisation, backend)
    found = run(ATTENTION, call, backend) if fused else _compose(call, backend)
    context, weights, log_sum_exp, statistics = found
    weights = as_returned(weights, call.query.dtype, call.need_weights)
    return attention_result(
        context,
        weights,
        log_sum_exp if is_softmax else None,
        statistics if call.need_statistics else None,
    )
