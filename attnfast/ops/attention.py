r"""Attention without history: every query row weighs its visible keys, rows are independent.

    e_ij    = scale · score(q_i, k_j) + bias_ij
    α_ij    = exp(e_ij − log_sum_exp_i)  over the keys j that row i may see, 0 elsewhere
    c_i     = Σ_j α_ij v_j

or, with another ``normalisation`` than softmax, and z = (α − 1) e,

    α_ij    = max(0, z_ij − τ_i)^(1 / (α − 1)),  with the threshold τ_i of Σ_j α_ij = 1,

where α is 2 for sparsemax and 1.5 for 1.5-entmax; and, on request, statistics of a row's weights,
which need no stored weights,

    H_i = −Σ_j α_ij ln α_ij,  max_j α_ij and its first j,  μ_i = Σ_j j α_ij,  Σ_j (j − μ_i)² α_ij

with ``score(q, k) = q·k`` (``dot``), or the additive ``Σ_a w_a f(q_a + k_a)``, which has the name
of f, as :data:`attnfast.ops.reference.ACTIVATIONS` lists them. A span of keys
(:mod:`attnfast.ops.span`), lengths and a mask select the keys that are visible to a row.

This file is the contract: the inputs and outputs of the operator and of its backward. Every
backend implements both under its own namespace ``attnfast_<backend>``.
:mod:`attnfast.ops.reference` is the oracle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import check_choice, check_exact, check_tensor, raise_value_error
from attnfast.ops.arguments import check_inputs, check_terms
from attnfast.ops.operators import (
    LIBRARIES,
    Operator,
    accumulation_dtype,
    empty_rows,
    implement,
)
from attnfast.outputs import RowStatistics

#: How scores become weights.
NORMALISATIONS = ("softmax", "sparsemax", "entmax15")
#: The numbers of a row.
STATISTICS = len(RowStatistics._fields)


class AttentionInputs(NamedTuple):
    """The arguments of the operator.

    ``bias`` and ``mask`` are broadcast to the shape of the scores. ``key_bounds [B, (H,) Tq, 2]``,
    int64, whose B and H may be 1, holds the first visible key of a row and the one after the last;
    both may lie outside the sequence. With ``columns`` W > 0 scores are compact,
    ``[B, (H,) Tq, W]``: column m of row i is key ``key_bounds[i, 0] + m``, and keys beyond the W-th
    are not visible; else they are ``[B, (H,) Tq, Tk]``. ``key_exponentials``, for the CPU's tanh
    score, holds e^{2k} of the keys as that backend's function of this name returns it. ``score`` is
    one of :data:`attnfast.ops.arguments.SCORES`; all but the dot score have a score vector.
    ``normalisation`` is one of :data:`NORMALISATIONS`; the GPU kernels support only the softmax.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_vector: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    lengths: Tensor | None = None
    key_bounds: Tensor | None = None
    columns: int = 0
    key_exponentials: Tensor | None = None
    scale: float = 1.0
    score: str = "dot"
    normalisation: str = "softmax"
    need_statistics: bool = False
    need_weights: bool = False  # the last: see dispatch.run


class AttentionOutputs(NamedTuple):
    """Outputs of ``attention``; all but the context have the accumulation dtype.

    That is float32, or float64 for float64. ``statistics [B, (H,) Tq, 5]`` are the fields of
    :class:`attnfast.RowStatistics`: 0 for an empty row, NaN for a row whose weights are NaN.
    log_sum_exp is meaningful only for the softmax. Weights and statistics have size [0] unless
    needed; context and gradients of query, key and value have the memory layout of
    :func:`empty_rows`.
    """

    context: Tensor
    weights: Tensor
    log_sum_exp: Tensor
    statistics: Tensor


class AttentionBackward(NamedTuple):
    """The arguments of the backward.

    The saved weights are exactly 0 for keys that are not visible to a row. The gradient of the
    statistics is part of that of the weights. The backward begins at ``grad_score``, the gradient
    of the scores, if that is given. ``need_grad_key`` stands for key, value and score_vector.
    """

    grad_context: Tensor
    grad_weights: Tensor | None
    grad_log_sum_exp: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    score_vector: Tensor | None
    lengths: Tensor | None
    key_bounds: Tensor | None
    columns: int
    key_exponentials: Tensor | None
    weights: Tensor
    grad_score: Tensor | None
    scale: float
    score: str
    normalisation: str
    need_grad_query: bool
    need_grad_key: bool
    need_grad_score: bool


class AttentionGradients(NamedTuple):
    """Gradients of ``attention``; those that are not needed have size [0]."""

    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    grad_score_vector: Tensor
    grad_score: Tensor


def check(call: AttentionInputs) -> None:
    """Raise, in one sentence and before any computation, unless the arguments fit together."""
    check_inputs(call)
    check_choice("normalisation", call.normalisation, NORMALISATIONS)
    q, keys = call.query.shape, call.key.shape[-2]
    bounds, columns = call.key_bounds, call.columns
    if not 0 <= columns <= (0 if bounds is None else keys):
        expected = "0 without key_bounds" if bounds is None else f"between 0 and {keys}"
        raise_value_error("columns", expected, columns)
    if bounds is not None:
        fits = bounds.dim() == len(q) and bounds.shape[-2:] == (q[-2], 2)
        if not fits or any(a not in (1, b) for a, b in zip(bounds.shape, q[:-2])):
            raise_value_error(
                "key_bounds", f"{[*q[:-1], 2]}, or 1 instead of B and H", list(bounds.shape)
            )
        if bounds.dtype != torch.int64 or bounds.device != call.query.device:
            raise_value_error(
                "key_bounds", f"int64 on {call.query.device}", f"{bounds.dtype} on {bounds.device}"
            )
    check_terms(call, columns or keys)
    if call.key_exponentials is not None:
        check_tensor("key_exponentials", call.key_exponentials)
        if call.key_exponentials.device != call.query.device:
            raise_value_error(
                "key_exponentials",
                f"on the query's device {call.query.device}",
                call.key_exponentials.device,
            )


def _check_backward(call: AttentionBackward) -> None:
    names = [x for x in AttentionInputs._fields if x in AttentionBackward._fields]
    check(AttentionInputs(**{x: getattr(call, x) for x in names}))
    dtype, rows = accumulation_dtype(call.query.dtype), call.query.shape[:-1]
    scores = (*rows, call.columns or call.key.shape[-2])
    context = (*rows, call.value.shape[-1])
    gradients = [
        ("grad_context", call.grad_context, call.query.dtype, context),
        ("grad_weights", call.grad_weights, dtype, scores),
        ("grad_log_sum_exp", call.grad_log_sum_exp, dtype, rows),
        ("weights", call.weights, dtype, scores),
        ("grad_score", call.grad_score, dtype, scores),
    ]
    check_exact(call.query, gradients)


def _fake(call: AttentionInputs) -> AttentionOutputs:
    dtype, rows = accumulation_dtype(call.query.dtype), call.query.shape[:-1]
    shape = (*rows, call.columns or call.key.shape[-2]) if call.need_weights else (0,)
    statistics = (*rows, STATISTICS) if call.need_statistics else (0,)
    return AttentionOutputs(
        empty_rows(call.query, call.value.shape[-1]),
        call.query.new_empty(shape, dtype=dtype),
        call.query.new_empty(rows, dtype=dtype),
        call.query.new_empty(statistics, dtype=dtype),
    )


def _fake_backward(call: AttentionBackward) -> AttentionGradients:
    query, score_vector, weights = call.query, call.score_vector, call.weights
    score = call.need_grad_score and call.grad_score is None
    return AttentionGradients(
        empty_rows(query) if call.need_grad_query else query.new_empty(0),
        empty_rows(call.key) if call.need_grad_key else query.new_empty(0),
        empty_rows(call.value) if call.need_grad_key else query.new_empty(0),
        query.new_empty(
            score_vector.shape if score_vector is not None and call.need_grad_key else (0,)
        ),
        weights.new_empty(weights.shape if score else (0,)),
    )


class _AttentionOperator(Operator):
    """Derive the statistics' gradients from the weights, which the backward has."""

    def arguments(self, ctx: Any, grads: Any, needs: Any = None) -> tuple[Any, Any]:
        of, saved = super().arguments(ctx, grads, needs)
        of_statistics = grads[self.Result._fields.index("statistics")]
        if of_statistics is None:
            return of, saved
        more = _through_weights(of_statistics, of.weights)
        if of.grad_weights is not None:
            more = more + of.grad_weights
        return of._replace(grad_weights=more), saved


def _through_weights(grad: Tensor, weights: Tensor) -> Tensor:
    """Return the part of the weights' gradient due to the statistics' gradient ``[.., 5]``.

    Terms that are constant in a row are omitted, because the normalisation cancels them: −1 of the
    entropy's −ln α − 1, and the first column of a span, because positions count from μ.
    """
    if weights.shape[-1] == 0:
        return weights
    of_entropy, of_largest, _, of_mean, of_variance = grad.unsqueeze(-2).unbind(-1)
    j = torch.arange(weights.shape[-1], device=weights.device, dtype=weights.dtype)
    j = j - (weights * j).sum(-1, keepdim=True)
    through = j * (of_mean + of_variance * j)
    through = through - of_entropy * weights.masked_fill(weights == 0, 1).log()
    return through.scatter_add(-1, weights.argmax(-1, keepdim=True), of_largest)


ATTENTION = _AttentionOperator(
    "attention", AttentionInputs, AttentionOutputs, AttentionBackward, AttentionGradients,
    check=check, check_backward=_check_backward, fake=_fake, fake_backward=_fake_backward,
    needs={
        "need_grad_query": ("query",),
        "need_grad_key": ("key", "value", "score_vector"),
        "need_grad_score": ("bias",),
    },
)  # fmt: skip
implement(
    "triton", "attnfast.kernels.attention",
    {"attention": "forward", "attention_backward": "backward"},
)  # fmt: skip

# The exponentials e^{2k} that all steps over the same keys share: tanh(q + k) is a function of the
# product with e^{2q}. Size [0] if the score has another activation or the keys are too large.
LIBRARIES["cpu"].define("key_exponentials(Tensor key, Tensor? lengths, str score) -> Tensor")


@torch.library.register_fake("attnfast_cpu::key_exponentials", lib=LIBRARIES["cpu"])
def _fake_key_exponentials(key, lengths, score):
    return key.new_empty(0, dtype=torch.float32)
