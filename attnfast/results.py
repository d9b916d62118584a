"""What public functions return: tuples to unpack, with attributes for what few ask for.

How many items a result has depends on no flag, so that ``context, weights = …`` always works, and
there is room for more by name. ``os.stat_result`` has this form. A third item would be one that
everybody must unpack; a flag that adds one changes what code that is given a result can do with it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnfast._torch import keep_in_pytrees

__all__ = ["AttentionResult", "CoverageResult", "RecurrentResult"]


class AttentionResult(tuple):
    """``context, weights``, by name too; weights are None unless asked for.

    Attributes:
        log_sum_exp: log Σ_j exp(e_ij) ``[B, (H,) Tq]``, float32 (float64 for float64), −inf of a
            row that sees no key.
    """

    log_sum_exp: Tensor

    @property
    def context(self) -> Tensor:
        return self[0]

    @property
    def weights(self) -> Any:
        return self[1]


class CoverageResult(tuple):
    """``context, weights, coverage``, by name too, the last of them after the last row.

    Attributes:
        loss: every sequence's coverage loss, Σ_tj min(α_tj, C_tj), ``[B, (H)]``.
    """

    loss: Tensor

    @property
    def context(self) -> Tensor:
        return self[0]

    @property
    def weights(self) -> Tensor | None:
        return self[1]

    @property
    def coverage(self) -> Tensor:
        return self[2]


class RecurrentResult(tuple):
    """``output, state``, by name too, of a recurrent layer that attends.

    Attributes:
        states: of the last layer ``[B, T, H]``.
        contexts: ``[B, T, Dv]``.
        weights: ``[B, T, Tk]``, or None unless asked for.
    """

    states: Tensor
    contexts: Tensor
    weights: Any

    @property
    def output(self) -> Tensor:
        return self[0]

    @property
    def state(self) -> Any:
        return self[1]


keep_in_pytrees(AttentionResult, "log_sum_exp")
keep_in_pytrees(CoverageResult, "loss")
keep_in_pytrees(RecurrentResult, "states", "contexts", "weights")


def attention_result(context: Tensor, weights: Any, log_sum_exp: Tensor) -> AttentionResult:
    """Return a result of attention."""
    result = AttentionResult((context, weights))
    result.log_sum_exp = log_sum_exp
    return result


def coverage_result(
    context: Tensor, weights: Tensor | None, coverage: Tensor, loss: Tensor
) -> CoverageResult:
    """Return a result of attention with a history."""
    result = CoverageResult((context, weights, coverage))
    result.loss = loss
    return result


def recurrent_result(
    output: Tensor, state: Any, states: Tensor, contexts: Any, weights: Any
) -> RecurrentResult:
    """Return a result of a recurrent layer that attends."""
    result = RecurrentResult((output, state))
    result.states, result.contexts, result.weights = states, contexts, weights
    return result
