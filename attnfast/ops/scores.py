r"""The additive scores alone, ``e_ij = Σ_a w_a f(q_ia + k_ja)``, of all rows and keys.

For attention whose weights are no softmax of the scores. The gradients are those of
:mod:`attnfast.ops.attention`, whose backward can begin at the gradient of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from attnfast.ops.arguments import check_inputs
from attnfast.ops.attention import ATTENTION, AttentionBackward, AttentionInputs
from attnfast.ops.operators import (
    ForwardOperator,
    accumulation_dtype,
    implement,
    invoke,
    unchecked,
)


class ScoreInputs(NamedTuple):
    """The arguments of the operator: ``query [B, (H,) Tq, A]``, ``key [B, (H,) Tk, A]``.

    ``score_vector [A]`` or ``[H, A]``; ``score`` is the name of f.
    """

    query: Tensor
    key: Tensor
    score_vector: Tensor
    score: str = "tanh"


class ScoreOutputs(NamedTuple):
    """Output of ``scores``: ``scores [B, (H,) Tq, Tk]`` in the accumulation dtype."""

    scores: Tensor


def check(inputs: ScoreInputs) -> None:
    """Raise, in one sentence and before any computation, unless the arguments fit together."""
    check_inputs(AttentionInputs(*inputs[:2], inputs.key, *inputs[2:3], score=inputs.score))


def _fake(inputs: ScoreInputs) -> ScoreOutputs:
    rows, dtype = inputs.query.shape[:-1], accumulation_dtype(inputs.query.dtype)
    return ScoreOutputs(inputs.query.new_empty(*rows, inputs.key.shape[-2], dtype=dtype))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, score_vector, ctx.score = inputs
    ctx.save_for_backward(query, key, score_vector)


def _gradients(ctx: Any, backend: str, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, from those of the scores."""
    query, key, score_vector = ctx.saved_tensors
    need_query, *need_keys = ctx.needs_input_grad[:3]
    nothing, grad = query.new_empty(*query.shape[:-1], 0), grad.contiguous()
    gradients = ATTENTION.backward(
        backend,
        AttentionBackward(
            nothing, None, None, query, key, key[..., :0], score_vector, None, None, 0, None,
            weights=grad, grad_score=grad, scale=1.0, score=ctx.score, normalisation="softmax",
            need_grad_query=need_query, need_grad_key=any(need_keys), need_grad_score=False,
        ),
    )  # fmt: skip
    results = (gradients.grad_query, gradients.grad_key, gradients.grad_score_vector)
    return *(x if need else None for x, need in zip(results, (need_query, *need_keys))), None


class _ScoreOperator(ForwardOperator):
    """The operator, whose gradient is the backward of attention."""

    def __init__(self):
        super().__init__("scores", ScoreInputs, ScoreOutputs, check=check, fake=_fake)
        for backend, library in self.libraries.items():
            torch.library.register_autograd(
                f"attnfast_{backend}::scores", self._derivative(backend), setup_context=_save,
                lib=library,
            )  # fmt: skip
        own = self

        class Eager(Function):
            @staticmethod
            def forward(ctx: Any, *inputs):
                *arguments, ctx.backend = inputs
                _save(ctx, arguments, None)
                return invoke(own.forwards[ctx.backend], arguments)[0]

            @staticmethod
            def backward(ctx: Any, grad):
                return *_gradients(ctx, ctx.backend, grad), None

        self.eager = Eager

    @staticmethod
    def _derivative(backend: str) -> Callable[..., Any]:
        return lambda ctx, grad: _gradients(ctx, backend, grad)

    def differentiable(self, backend: str, arguments: Any) -> Any:
        """Return the result of an autograd function, in eager mode."""
        return unchecked(self.Result, (self.eager.apply(*arguments, backend),))


SCORING = _ScoreOperator()
implement("triton", "attnfast.kernels.attention", {"scores": "scores"})
