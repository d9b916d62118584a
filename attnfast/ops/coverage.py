r"""Attention with a history: every row depends on the weights of the rows before it.

With C_t the coverage before row t and p_t the weights of row t − 1::

    f_tj    = U · (F ∗ [p_t, C_t])_j                         the history's features
    e_tj    = scale · score(q_t, k_j + f_tj) + bias_tj − λ C_tj
    r_tj    = 1,  or (1 − u_t) p_tj + u_t p_t,j−1            forward attention
    α_tj    ∝ r_tj exp(e_tj)  over the keys j visible to row t
    C_t+1,j = C_tj + ρ_j α_tj,   c_t = Σ_j α_tj v_j,   loss = Σ_tj min(α_tj, C_tj)

F are filters over the keys on one channel, the previous weights, or two, the second of which is the
coverage; U projects their outputs. A coverage feature is a filter of width 1, and ρ is the inverse
of the fertility.

Forward attention is computed in log space, log α_tj = log r_tj + e_tj − log Σ_j r_tj exp(e_tj),
and log α is carried from row to row: a weight of e^−200 can grow again, and no factor of a
gradient exceeds 1. The gradient of a weight that is exactly 0 is 0.

This file is the contract, as :mod:`attnfast.ops.attention` is of attention without history.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from attnfast._utils.checks import check_choice, check_exact, check_tensor, raise_value_error
from attnfast.ops.arguments import check_inputs, check_terms
from attnfast.ops.operators import (
    Operator,
    accumulation_dtype,
    empty_rows,
    implement,
    invoke,
)

#: How scores become weights.
NORMALISATIONS = ("softmax", "sigmoid")


class CoverageInputs(NamedTuple):
    """The arguments of the operator.

    ``filters [(H,) K, C, taps]``, ``projection [(H,) A, K]``, ``penalty [H]`` or ``[1]``,
    ``inverse_fertility``, ``coverage`` and ``previous [B, (H,) Tk]``, ``transition_prob [B, (H,)
    Tq]`` have the accumulation dtype. With a transition ``previous`` holds log p, −inf for 0.

    With ``normalisation="sigmoid"``, which excludes a transition, the weights of a row are
    σ(e) / Σ σ(e), which is the softmax of log σ(e).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_vector: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    lengths: Tensor | None = None
    filters: Tensor | None = None
    projection: Tensor | None = None
    penalty: Tensor | None = None
    inverse_fertility: Tensor | None = None
    transition_prob: Tensor | None = None
    coverage: Tensor | None = None
    previous: Tensor | None = None
    scale: float = 1.0
    score: str = "dot"
    normalisation: str = "softmax"


class CoverageOutputs(NamedTuple):
    """Outputs of ``coverage_attention``; all but the context have the accumulation dtype.

    ``coverage`` is that after the last row, ``loss [B, (H)]``; ``log_weights`` are log α, −inf for
    0, of size [0] without a transition. ``sigmoid_sum [B, (H,) Tq]``, Σ σ(e), is for the backward,
    of size [0] unless that is the normalisation.
    """

    context: Tensor
    weights: Tensor
    coverage: Tensor
    loss: Tensor
    log_weights: Tensor
    sigmoid_sum: Tensor


class CoverageBackward(NamedTuple):
    """The arguments of the backward; the saved weights are 0 for keys not visible to a row."""

    grad_context: Tensor
    grad_weights: Tensor | None
    grad_coverage: Tensor | None
    grad_loss: Tensor | None
    grad_log_weights: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    score_vector: Tensor | None
    lengths: Tensor | None
    filters: Tensor | None
    projection: Tensor | None
    penalty: Tensor | None
    inverse_fertility: Tensor | None
    transition_prob: Tensor | None
    coverage: Tensor | None
    previous: Tensor | None
    weights: Tensor
    log_weights: Tensor
    sigmoid_sum: Tensor
    scale: float
    score: str
    normalisation: str
    need_grad_query: bool
    need_grad_key: bool
    need_grad_score: bool
    need_grad_filters: bool


class CoverageGradients(NamedTuple):
    """Gradients of ``coverage_attention``; those that are not needed have size [0]."""

    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    grad_score_vector: Tensor
    grad_score: Tensor
    grad_filters: Tensor
    grad_projection: Tensor
    grad_penalty: Tensor
    grad_inverse_fertility: Tensor
    grad_transition_prob: Tensor
    grad_coverage: Tensor
    grad_previous: Tensor


#: Steps with filters that share their keys add the gradients of keys and parameters to sums in the
#: accumulation dtype, one for each sequence (and head); the value's gradient is taken at the end.
SUMS = ("sum_key", "sum_score_vector", "sum_filters", "sum_projection")
_of_all = get_type_hints(CoverageBackward)
_last = ("scale", "score", "normalisation", "need_grad_query", "need_grad_score")
_no = ("need_grad_key", "need_grad_filters", *_last)
_first = [x for x in CoverageBackward._fields if x not in _no]
_into_fields: Any = [
    *((x, _of_all[x]) for x in _first),
    *((x, Annotated[Tensor, f"Tensor({letter}!)"]) for x, letter in zip(SUMS, "abcd")),
    *((x, _of_all[x]) for x in _last),
]
CoverageBackwardInto: Any = NamedTuple("CoverageBackwardInto", _into_fields)  # type: ignore[misc]


def check_history(call: CoverageInputs, previous: str = "previous") -> None:
    """Raise unless the history fits query and key; ``previous`` names that argument."""
    query, key, filters, projection = call.query, call.key, call.filters, call.projection
    heads, keys, A = list(query.shape[1:-2]), list(key.shape[:-1]), query.shape[-1]
    dtype = accumulation_dtype(query.dtype)
    shapes = {
        "filters": (filters, None),
        "projection": (projection, None),
        "penalty": (call.penalty, [heads or [1], [1]]),
        "fertility": (call.inverse_fertility, [keys]),
        "transition_prob": (call.transition_prob, [list(query.shape[:-1])]),
        "coverage": (call.coverage, [keys]),
        previous: (call.previous, [keys]),
    }
    for name, (x, allowed) in shapes.items():
        if x is None:
            continue
        check_tensor(name, x)
        if x.device != query.device:
            raise_value_error(name, f"on the query's device {query.device}", x.device)
        if x.dtype != dtype:
            raise_value_error(name, f"of dtype {dtype}", x.dtype)
        if allowed is not None and list(x.shape) not in allowed:
            raise_value_error(name, " or ".join(map(str, allowed)), list(x.shape))
    check_choice("normalisation", call.normalisation, NORMALISATIONS)
    if call.normalisation == "sigmoid" and call.transition_prob is not None:
        raise_value_error("transition_prob", "None with weights from sigmoids", "a tensor")
    if call.transition_prob is not None and call.previous is None:
        raise_value_error(previous, "given with a transition_prob", None)
    if (filters is None) != (projection is None):
        missing = "projection" if projection is None else "filters"
        raise_value_error(missing, "given: filters and projection go together", None)
    if filters is None or projection is None:
        return
    if call.score_vector is None and filters.shape[-3:-2] != (0,):
        raise_value_error(
            "score_vector", "given with filters or coverage_weight (additive score only)", None
        )
    lead = list(filters.shape[:-3])
    if filters.dim() < 3 or filters.shape[-2] not in (1, 2) or filters.shape[-1] % 2 == 0:
        expected = "[K, 1 or 2, taps] with an odd number of taps"
        raise_value_error("filters", expected, list(filters.shape))
    if lead not in ([], heads):
        expected = f"[K, C, taps] or {[*heads, 'K', 'C', 'taps']}"
        raise_value_error("filters", expected, list(filters.shape))
    if list(projection.shape) != [*lead, A, filters.shape[-3]]:
        wanted = [*lead, A, filters.shape[-3]]
        raise_value_error(
            "projection", f"{wanted} to fit query and filters", list(projection.shape)
        )


def check(call: CoverageInputs) -> None:
    """Raise, in one sentence and before any computation, unless the arguments fit together."""
    check_inputs(call)
    check_terms(call, call.key.shape[-2])
    check_history(call)


def _check_backward(call: CoverageBackward) -> None:
    names = [x for x in CoverageInputs._fields if x in CoverageBackward._fields]
    check(CoverageInputs(**{x: getattr(call, x) for x in names}))
    query, keys, dtype = call.query, call.key.shape[:-1], accumulation_dtype(call.query.dtype)
    scores = (*query.shape[:-1], keys[-1])
    logarithms = (0,) if call.transition_prob is None else scores
    sums = scores[:-1] if call.normalisation == "sigmoid" else (0,)
    gradients = [
        ("grad_context", call.grad_context, query.dtype, (*scores[:-1], call.value.shape[-1])),
        ("grad_weights", call.grad_weights, dtype, scores),
        ("grad_coverage", call.grad_coverage, dtype, keys),
        ("grad_loss", call.grad_loss, dtype, keys[:-1]),
        ("grad_log_weights", call.grad_log_weights, dtype, logarithms),
        ("weights", call.weights, dtype, scores),
        ("log_weights", call.log_weights, dtype, logarithms),
        ("sigmoid_sum", call.sigmoid_sum, dtype, sums),
    ]
    check_exact(query, gradients)


def without_sums(call: Any) -> CoverageBackward:
    """Return the arguments of the backward without sums."""
    names = [x for x in CoverageBackward._fields if x in call._fields]
    mine: dict[str, Any] = {x: getattr(call, x) for x in names}
    return CoverageBackward(**mine, need_grad_key=False, need_grad_filters=False)


def _check_backward_into(call: Any) -> None:
    _check_backward(without_sums(call))
    if call.score_vector is None or call.filters is None or not call.filters.shape[-3]:
        raise_value_error(
            "filters", "given with score_vector: sums are of steps with filters", None
        )
    lead, A, dtype = call.key.shape[:-2], call.key.shape[-1], accumulation_dtype(call.key.dtype)
    sums = [
        ("sum_key", call.sum_key, dtype, call.key.shape),
        ("sum_score_vector", call.sum_score_vector, dtype, (*lead, A)),
        ("sum_filters", call.sum_filters, dtype, (*lead, *call.filters.shape[-3:])),
        ("sum_projection", call.sum_projection, dtype, (*lead, A, call.filters.shape[-3])),
    ]
    check_exact(call.query, sums)
    for name, x, *_ in sums:
        if not x.is_contiguous():
            raise_value_error(name, "contiguous", f"strides {list(x.stride())}")


def _fake(call: CoverageInputs) -> CoverageOutputs:
    query, keys, dtype = call.query, call.key.shape[:-1], accumulation_dtype(call.query.dtype)
    shape = (*query.shape[:-1], keys[-1])
    return CoverageOutputs(
        empty_rows(query, call.value.shape[-1]),
        query.new_empty(shape, dtype=dtype),
        query.new_empty(keys, dtype=dtype),
        query.new_empty(keys[:-1], dtype=dtype),
        query.new_empty((0,) if call.transition_prob is None else shape, dtype=dtype),
        query.new_empty(shape[:-1] if call.normalisation == "sigmoid" else (0,), dtype=dtype),
    )


def _fake_backward(call: CoverageBackward) -> CoverageGradients:
    def like(x: Tensor | None, needed: bool = True) -> Tensor:
        return call.weights.new_empty((0,)) if x is None or not needed else torch.empty_like(x)

    def half(x: Tensor | None, needed: bool) -> Tensor:
        return call.query.new_empty((0,)) if x is None or not needed else empty_rows(x)

    return CoverageGradients(
        half(call.query, call.need_grad_query),
        half(call.key, call.need_grad_key),
        half(call.value, call.need_grad_key),
        half(call.score_vector, call.need_grad_key),
        like(call.weights, call.need_grad_score),
        like(call.filters, call.need_grad_filters),
        like(call.projection, call.need_grad_filters),
        like(call.penalty),
        like(call.inverse_fertility),
        like(call.transition_prob),
        like(call.coverage),
        like(call.previous),
    )


COVERAGE = Operator(
    "coverage_attention", CoverageInputs, CoverageOutputs, CoverageBackward, CoverageGradients,
    check=check, check_backward=_check_backward, fake=_fake, fake_backward=_fake_backward,
    constant=("sigmoid_sum",),
    needs={
        "need_grad_query": ("query",),
        "need_grad_key": ("key", "value", "score_vector"),
        "need_grad_score": ("bias",),
        "need_grad_filters": ("filters", "projection"),
    },
)  # fmt: skip
_into = Operator.define(
    "coverage_attention_backward_into", CoverageBackwardInto, CoverageGradients,
    _check_backward_into, lambda call: _fake_backward(without_sums(call)),
)  # fmt: skip
implement(
    "triton", "attnfast.kernels.coverage",
    {
        "coverage_attention": "forward",
        "coverage_attention_backward": "backward",
        "coverage_attention_backward_into": "backward_into",
    },
)  # fmt: skip


def backward_into(
    backend: str, arguments: CoverageBackward, sums: tuple[Tensor, ...]
) -> CoverageGradients:
    """Run the backward that adds the gradients of keys and parameters to sums."""
    fields = arguments._asdict()
    given = {**{x: fields[x] for x in (*_first, *_last)}, **dict(zip(SUMS, sums))}
    return CoverageGradients._make(invoke(_into[backend], CoverageBackwardInto(**given)))
