"""What public functions return: tuples to unpack, with attributes for what few ask for.

How many items a result has depends on no flag, so that ``context, weights = …`` always works, and
there is room for more by name. ``os.stat_result`` has this form, and so have PyTorch's own named
tuples in their names. A third item would be one that everybody must unpack; a flag that adds one,
as ``return_lse`` of other libraries, changes what code that is given a result can do with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["AttentionResult", "CoverageResult"]


class _Attention(NamedTuple):
    context: Tensor
    weights: Any


class AttentionResult(_Attention):
    """``context, weights``; weights are None unless asked for.

    Attributes:
        log_sum_exp: log Σ_j exp(e_ij) ``[B, (H,) Tq]``, float32 (float64 for float64), −inf of a
            row that sees no key.
    """

    log_sum_exp: Tensor


class _Coverage(NamedTuple):
    context: Tensor
    weights: Tensor | None
    coverage: Tensor


class CoverageResult(_Coverage):
    """``context, weights, coverage``, the last of them after the last row.

    Attributes:
        loss: every sequence's coverage loss, Σ_tj min(α_tj, C_tj), ``[B, (H)]``.
    """

    loss: Tensor


def attention_result(context: Tensor, weights: Any, log_sum_exp: Tensor) -> AttentionResult:
    """Return a result; in half the time that its own constructor takes."""
    result = tuple.__new__(AttentionResult, (context, weights))
    result.log_sum_exp = log_sum_exp
    return result


def coverage_result(
    context: Tensor, weights: Tensor | None, coverage: Tensor, loss: Tensor
) -> CoverageResult:
    """Return a result of attention with a history."""
    result = tuple.__new__(CoverageResult, (context, weights, coverage))
    result.loss = loss
    return result
