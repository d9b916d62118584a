r"""Attention with a memory of its past: every row depends on the weights of the rows before it.

With C_t the coverage before row t and p_t the weights of row t − 1::

    f_tj    = U · (F ∗ [p_t, C_t])_j                         the history's features, in the tanh
    e_tj    = scale · score(q_t, k_j + f_tj) + bias_tj − λ C_tj
    r_tj    = 1,  or (1 − u_t) p_tj + u_t p_t,j−1            forward attention
    α_tj    ∝ r_tj exp(e_tj)  over the keys j that row t may see
    C_t+1,j = C_tj + ρ_j α_tj,   c_t = Σ_j α_tj v_j,   loss = Σ_tj min(α_tj, C_tj)

F are filters over the keys on one channel, the last weights, or two, the coverage the second; U
projects what they find. A coverage feature is a filter of width 1, the inverse of a fertility is ρ.

This file is the contract, as :mod:`attnfast.ops.attention` is of attention without history.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnfast.backends import choose
from attnfast.errors import check_flag, check_word, describe, refuse
from attnfast.ops.arguments import (
    as_returned,
    autocast,
    check,
    check_exact,
    check_scale,
    check_temperature,
    check_tensor,
    filled,
    folded,
    is_finite,
    is_one,
    refuse_tangents,
)
from attnfast.ops.attention import score, visible_keys
from attnfast.ops.operators import (
    LIBRARIES,
    accumulation_dtype,
    call,
    define,
    empty_rows,
    is_recorded,
    operators_of,
    or_zeros,
)

#: ``filters [(H,) K, C, W]``, ``projection [(H,) A, K]``, ``penalty [H]`` or ``[1]``, ``rate``,
#: ``coverage`` and ``previous [B, (H,) Tk]``, ``transition [B, (H,) Tq]`` are of the accumulation
#: dtype, as are ``weights``, ``coverage``, ``loss [B, (H)]`` and ``odds``, which is exp(e) over the
#: sum that α is divided by, of size [0] without a transition. The backward takes the saved weights,
#: which are exactly 0 where a row may not see a key; what is not needed comes with size [0]. Steps
#: with filters that share their keys add what these and the parameters get to sums, of the
#: accumulation dtype, one for each sequence (and head), and leave the value's gradient for the end.
_BACKWARD = (
    "(Tensor grad_context, Tensor? grad_weights, Tensor? grad_coverage, Tensor? grad_loss, "
    "Tensor query, Tensor key, Tensor value, Tensor? weight, Tensor? lengths, Tensor? filters, "
    "Tensor? projection, Tensor? penalty, Tensor? rate, Tensor? transition, Tensor? coverage, "
    "Tensor? previous, Tensor weights, Tensor odds, {}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weight, "
    "Tensor grad_score, Tensor grad_filters, Tensor grad_projection, Tensor grad_penalty, "
    "Tensor grad_rate, Tensor grad_transition, Tensor grad_coverage, Tensor grad_previous)"
)
SCHEMAS = {
    "coverage_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? weight, Tensor? bias, Tensor? mask, "
        "Tensor? lengths, Tensor? filters, Tensor? projection, Tensor? penalty, Tensor? rate, "
        "Tensor? transition, Tensor? coverage, Tensor? previous, float scale) "
        "-> (Tensor context, Tensor weights, Tensor coverage, Tensor loss, Tensor odds)"
    ),
    "coverage_attention_backward": _BACKWARD.format(
        "float scale, bool need_grad_query, bool need_grad_key, bool need_grad_score, "
        "bool need_grad_filters"
    ),
}
INTO = (
    "coverage_attention_backward_into",
    _BACKWARD.format(
        "Tensor(a!) sum_key, Tensor(b!) sum_weight, Tensor(c!) sum_filters, "
        "Tensor(d!) sum_projection, float scale, bool need_grad_query, bool need_grad_score"
    ),
)


def windows(signals: Tensor, width: int) -> Tensor:
    """Return what a filter sees around every key: ``[..., C, Tk]`` to ``[..., Tk, C · width]``."""
    padded = torch.nn.functional.pad(signals, (width // 2, width // 2))
    return padded.unfold(-1, width, 1).transpose(-3, -2).flatten(-2)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    lengths: Tensor | None,
    filters: Tensor | None,
    projection: Tensor | None,
    penalty: Tensor | None,
    rate: Tensor | None,
    transition: Tensor | None,
    coverage: Tensor | None,
    previous: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute context, weights, coverage and loss in plain PyTorch, row by row: the oracle."""
    dtype = accumulation_dtype(query.dtype)
    q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
    w = None if weight is None else weight.to(dtype)
    visible, k, v = visible_keys(q, k, v, bias, mask, lengths)
    zeros = k.new_zeros(k.shape[:-1])
    c = zeros if coverage is None else coverage
    p = zeros if previous is None else previous
    loss = k.new_zeros(k.shape[:-2])
    rows = []
    for t in range(query.shape[-2]):
        seen = visible[..., t, :]
        keys = k
        if filters is not None and projection is not None and k.shape[-2]:
            width = filters.shape[-1]
            signals = torch.stack([p, c][: filters.shape[-2]], -2)
            found = windows(signals, width) @ filters.flatten(-2).mT
            keys = k + found @ projection.mT
        e = scale * score(q[..., t : t + 1, :], keys, w).squeeze(-2)
        if bias is not None:
            e = e + bias.to(dtype).expand(*bias.shape[:-2], query.shape[-2], -1)[..., t, :]
        if penalty is not None:
            e = e - penalty.unsqueeze(-1) * c
        odds = torch.ones_like(e)
        if transition is not None:
            u = transition[..., t, None]
            odds = (1 - u) * p + u * torch.nn.functional.pad(p, (1, 0))[..., :-1]
            slight = odds < torch.finfo(torch.float32).tiny  # counts as 0, but for its gradient
            odds = odds - odds.detach().masked_fill(~slight, 0)
        odds = odds.masked_fill(~seen, 0)
        e = e.masked_fill(~seen, 0)
        top = e.detach().masked_fill(odds == 0, -math.inf)
        top = top.amax(-1, keepdim=True) if e.shape[-1] else e.sum(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0)
        mass = odds * (e - top).clamp(max=80).exp()  # beyond 80 no odds, and a gradient past use
        total = mass.sum(-1, keepdim=True)
        p = mass / total.masked_fill(total == 0, 1)
        loss = loss + torch.where(p <= c, p, c).masked_fill(~seen, 0).sum(-1)
        c = c + (p if rate is None else rate * p)
        rows.append(p)
    weights = torch.stack(rows, -2) if rows else q @ k.mT
    return (weights @ v).to(query.dtype), weights, c, loss


def check_history(
    query: Tensor,
    key: Tensor,
    weight: Tensor | None,
    filters: Tensor | None,
    projection: Tensor | None,
    penalty: Tensor | None,
    rate: Tensor | None,
    transition: Tensor | None,
    coverage: Tensor | None,
    previous: Tensor | None,
) -> None:
    """Refuse what does not fit the query and the key, in one sentence."""
    heads, keys, A = list(query.shape[1:-2]), list(key.shape[:-1]), query.shape[-1]
    dtype = accumulation_dtype(query.dtype)
    shapes = {
        "filters": (filters, None),
        "projection": (projection, None),
        "penalty": (penalty, [heads or [1], [1]]),
        "fertility": (rate, [keys]),
        "transition": (transition, [list(query.shape[:-1])]),
        "coverage": (coverage, [keys]),
        "previous": (previous, [keys]),
    }
    for name, (x, allowed) in shapes.items():
        if x is None:
            continue
        check_tensor(name, x)
        if x.device != query.device:
            refuse(name, f"on the query's device {query.device}", x.device)
        if x.dtype != dtype:
            refuse(name, f"of dtype {dtype}", x.dtype)
        if allowed is not None and list(x.shape) not in allowed:
            refuse(name, " or ".join(map(str, allowed)), list(x.shape))
    if (filters is None) != (projection is None):
        missing = "projection" if projection is None else "filters"
        refuse(missing, "given when the other of filters and projection is", None)
    if filters is None or projection is None:
        return
    if weight is None and filters.shape[-3:-2] != (0,):
        refuse("weight", "given: coverage_weight and filters belong in the additive score", None)
    lead = list(filters.shape[:-3])
    if filters.dim() < 3 or filters.shape[-2] not in (1, 2) or filters.shape[-1] % 2 == 0:
        refuse("filters", "[K, 1 or 2, W] with an odd width W", list(filters.shape))
    if lead not in ([], heads):
        refuse("filters", f"[K, C, W] or {[*heads, 'K', 'C', 'W']}", list(filters.shape))
    if list(projection.shape) != [*lead, A, filters.shape[-3]]:
        wanted = [*lead, A, filters.shape[-3]]
        refuse("projection", f"{wanted} to fit query and filters", list(projection.shape))


def _check(
    query, key, value, weight, bias, mask, lengths, filters, projection, penalty, rate, transition,
    coverage, previous, scale,
):  # fmt: skip
    check(query, key, value, weight, bias, mask, lengths)
    history = (filters, projection, penalty, rate, transition, coverage, previous)
    check_history(query, key, weight, *history)


def _check_backward(
    grad_context, grad_weights, grad_coverage, grad_loss, query, key, value, weight, lengths,
    filters, projection, penalty, rate, transition, coverage, previous, weights, odds, scale,
    need_grad_query, need_grad_key, need_grad_score, need_grad_filters,
):  # fmt: skip
    history = (filters, projection, penalty, rate, transition, coverage, previous)
    _check(query, key, value, weight, None, None, lengths, *history, scale)
    dtype = accumulation_dtype(query.dtype)
    scores, keys = (*query.shape[:-1], key.shape[-2]), key.shape[:-1]
    gradients = [
        ("grad_context", grad_context, query.dtype, (*query.shape[:-1], value.shape[-1])),
        ("grad_weights", grad_weights, dtype, scores),
        ("grad_coverage", grad_coverage, dtype, keys),
        ("grad_loss", grad_loss, dtype, keys[:-1]),
        ("weights", weights, dtype, scores),
        ("odds", odds, dtype, (0,) if transition is None else scores),
    ]
    check_exact(query, gradients)


def _check_backward_into(*args):
    *args, sum_key, sum_weight, sum_filters, sum_projection, scale, need_query, need_score = args
    _check_backward(*args, scale, need_query, False, need_score, False)
    query, key, _, weight, _, filters, *_ = args[4:]
    if weight is None or filters is None or not filters.shape[-3]:
        refuse("filters", "given, with a weight: sums are of steps with filters", None)
    lead, dtype = key.shape[:-2], accumulation_dtype(key.dtype)
    A = key.shape[-1]
    sums = [
        ("sum_key", sum_key, dtype, key.shape),
        ("sum_weight", sum_weight, dtype, (*lead, A)),
        ("sum_filters", sum_filters, dtype, (*lead, *filters.shape[-3:])),
        ("sum_projection", sum_projection, dtype, (*lead, A, filters.shape[-3])),
    ]
    check_exact(query, sums)
    for name, x, *_ in sums:
        if not x.is_contiguous():
            refuse(name, "contiguous", f"strides {list(x.stride())}")


#: What refuses an operator's arguments, with the same parameters; compiled code refuses the same.
CHECKS: dict[str, Any] = {
    "coverage_attention": _check,
    "coverage_attention_backward": _check_backward,
    INTO[0]: _check_backward_into,
}


def _fake(
    query, key, value, weight, bias, mask, lengths, filters, projection, penalty, rate, transition,
    coverage, previous, scale,
):  # fmt: skip
    dtype = accumulation_dtype(query.dtype)
    shape = (*query.shape[:-1], key.shape[-2])
    return (
        empty_rows(query, value.shape[-1]),
        query.new_empty(shape, dtype=dtype),
        query.new_empty(key.shape[:-1], dtype=dtype),
        query.new_empty(key.shape[:-2], dtype=dtype),
        query.new_empty((0,) if transition is None else shape, dtype=dtype),
    )


def _fake_backward(
    grad_context, grad_weights, grad_coverage, grad_loss, query, key, value, weight, lengths,
    filters, projection, penalty, rate, transition, coverage, previous, weights, odds, scale,
    need_grad_query, need_grad_key, need_grad_score, need_grad_filters,
):  # fmt: skip
    def like(x: Tensor | None, needed: bool = True) -> Tensor:
        return weights.new_empty((0,)) if x is None or not needed else torch.empty_like(x)

    def half(x: Tensor | None, needed: bool) -> Tensor:
        return query.new_empty((0,)) if x is None or not needed else empty_rows(x)

    return (
        half(query, need_grad_query),
        half(key, need_grad_key),
        half(value, need_grad_key),
        half(weight, need_grad_key),
        like(weights, need_grad_score),
        like(filters, need_grad_filters),
        like(projection, need_grad_filters),
        *(like(x) for x in (penalty, rate, transition, coverage, previous)),
    )


def setup_context(ctx: Any, inputs, output):
    """Keep what :func:`gradients` needs."""
    query, key, value, weight, bias, _, lengths, *history, scale = inputs
    _, weights, _, _, odds = output
    ctx.save_for_backward(query, key, value, weight, lengths, *history, weights, odds)
    ctx.scale = scale
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.mark_non_differentiable(odds)
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any,
    grads: tuple[Tensor | None, ...],
    need_grad_score: bool = False,
    sums: tuple[Tensor, ...] | None = None,
) -> tuple[list, Tensor]:
    """Return the gradients of all inputs, and those of the scores, from those of the outputs.

    With ``sums`` those of key, weight, filters and projection are added there instead, by the
    operator ``INTO``, and value has none.
    """
    grad_context, *grad_outputs, _odds = grads
    query, key, value, weight, lengths, *rest = ctx.saved_tensors
    grad_context = or_zeros(grad_context, query, value)
    needed = ctx.needs_input_grad
    need_query, need_key, need_bias = needed[0], any(needed[1:4]), needed[4]
    need_filters, need_score = needed[7] or needed[8], need_grad_score or need_bias
    if sums is None:
        more = (ctx.scale, need_query, need_key, need_score, need_filters)
    else:
        more = (*sums, ctx.scale, need_query, need_score)
    grad_query, grad_key, grad_value, grad_weight, grad_score, *grad_history = call(
        ctx.operator,
        grad_context, *grad_outputs, query, key, value, weight, lengths, *rest, *more,
    )  # fmt: skip
    grad_bias = None
    if need_bias:
        shape, dtype = ctx.bias
        grad_bias = grad_score.sum_to_size(shape).to(dtype)
    grads = (grad_query, grad_key, grad_value, grad_weight, grad_bias, None, None, *grad_history)
    return [*(g if need else None for g, need in zip(grads, needed)), None], grad_score


def _backward(ctx: Any, *grads):
    return tuple(gradients(ctx, grads)[0])


_Coverage = define(
    "coverage_attention", SCHEMAS, CHECKS, _fake, _fake_backward, setup_context, _backward
)


@torch.library.impl("attnfast_triton::coverage_attention", "default", lib=LIBRARIES["triton"])
def _triton(*args):
    from attnfast.kernels import coverage  # Triton stays unimported until it is used

    _check(*args)
    return coverage.forward(*args)


def _fake_backward_into(*args):
    _check_backward_into(*args)
    *args, _, _, _, _, scale, need_grad_query, need_grad_score = args
    return _fake_backward(*args, scale, need_grad_query, False, need_grad_score, False)


def _triton_backward(*args):
    from attnfast.kernels import coverage

    _check_backward(*args)
    return coverage.backward(*args)


def _triton_backward_into(*args):
    from attnfast.kernels import coverage

    _check_backward_into(*args)
    *args, sum_key, sum_weight, sum_filters, sum_projection, scale, need_query, need_score = args
    sums = (sum_key, sum_weight, sum_filters, sum_projection)
    return coverage.backward(*args, scale, need_query, False, need_score, False, sums)


for _backend, _library in LIBRARIES.items():
    _library.define("".join(INTO))
    torch.library.register_fake(
        f"attnfast_{_backend}::{INTO[0]}", _fake_backward_into, lib=_library
    )
for _name, _kernel in {
    "coverage_attention_backward": _triton_backward,
    INTO[0]: _triton_backward_into,
}.items():
    torch.library.impl(f"attnfast_triton::{_name}", "default", _kernel, lib=LIBRARIES["triton"])


def _with_coverage_feature(
    filters: Tensor | None, projection: Tensor | None, coverage_weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return filters and projection, the coverage feature among them: a filter of width 1."""
    if coverage_weight is None:
        return filters, projection
    column = coverage_weight.unsqueeze(-1)
    width = 1 if filters is None else filters.shape[-1]
    one = column.new_zeros(*column.shape[:-2], 1, 2, width)
    one[..., 1, width // 2] = 1
    if filters is None or projection is None:
        return one, column
    if filters.shape[-2] == 1:  # on the last weights alone
        filters = torch.nn.functional.pad(filters, (0, 0, 0, 1))
    heads = max(filters.shape[:-3], column.shape[:-2], key=len)  # of one that each head has its own
    return (
        torch.cat([x.expand(*heads, *x.shape[-3:]) for x in (filters, one)], -3),
        torch.cat([x.expand(*heads, *x.shape[-2:]) for x in (projection, column)], -1),
    )


def inputs_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    *,
    penalty: Any = None,
    coverage_weight: Tensor | None = None,
    filters: Tensor | None = None,
    over: str = "previous",
    projection: Tensor | None = None,
    fertility: Tensor | None = None,
    transition: Any = None,
    coverage: Tensor | None = None,
    previous: Tensor | None = None,
    scale: float | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
) -> Any:
    """Check the arguments of :func:`coverage_attention`; return the operator's."""
    query, key, value, weight, bias = autocast(query, key, value, weight, bias)
    check(query, key, value, weight, bias, mask, lengths)
    check_temperature(temperature)
    if scale is None:
        scale = 1.0 if weight is not None else max(query.shape[-1], 1) ** -0.5
    check_scale(scale, "a finite number or None")
    dtype = accumulation_dtype(query.dtype)
    if coverage_weight is not None:
        heads = list(query.shape[1:-2])
        shapes = [[query.shape[-1]], [*heads, query.shape[-1]]]
        if not isinstance(coverage_weight, Tensor) or list(coverage_weight.shape) not in shapes:
            refuse("coverage_weight", f"{shapes[-1]} to fit the query", describe(coverage_weight))

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.dtype != dtype else x

    filters, projection = cast(filters), cast(projection)
    check_history(query, key, weight, filters, projection, None, None, None, None, None)
    check_word("over", over, ("previous", "coverage"))
    if over == "coverage" and filters is not None and filters.shape[-2] == 1:
        filters = torch.nn.functional.pad(filters, (0, 0, 1, 0))  # the second channel
    filters, projection = _with_coverage_feature(filters, projection, cast(coverage_weight))

    def number(name: str, x: Any, shape) -> Any:
        if x is None or isinstance(x, Tensor):
            return x if x is None or x.dim() else x.expand(shape).to(dtype)
        if not is_finite(x):
            refuse(name, "a finite number or a tensor", describe(x))
        return filled(query, shape, x, dtype)

    penalty = number("penalty", penalty, (1,))
    transition = number("transition", transition, query.shape[:-1])
    if transition is not None and previous is None:
        refuse("previous", "given with a transition: the weights that it starts from", None)
    rate = 1 / cast(fertility) if isinstance(fertility, Tensor) else fertility
    if not is_one(temperature):
        scale = scale / temperature
        bias = None if bias is None else bias / temperature
        penalty = None if penalty is None else penalty / temperature
    penalty, transition, coverage, previous = map(cast, (penalty, transition, coverage, previous))
    query, weight, scale = folded(query, weight, scale)
    history: Any = (filters, projection, penalty, rate, transition, coverage, previous)
    check_history(query, key, weight, *history)
    return query, key, value, weight, bias, mask, lengths, *history, scale


def coverage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None = None,
    *,
    penalty: float | Tensor | None = None,
    coverage_weight: Tensor | None = None,
    filters: Tensor | None = None,
    over: str = "previous",
    projection: Tensor | None = None,
    fertility: Tensor | None = None,
    transition: float | Tensor | None = None,
    coverage: Tensor | None = None,
    previous: Tensor | None = None,
    scale: float | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    need_weights: bool = False,
    need_loss: bool = False,
    backend: str | None = None,
) -> tuple[Tensor | None, ...]:
    r"""Attend row after row, each row knowing what the rows before it attended to.

    .. math:: e_{tj} = (s \cdot \mathrm{score}(q_t, k_j + f_{tj}) + b_{tj} - \lambda C_{tj}) / T,
              \quad \alpha_t = \mathrm{softmax}_j(e_{tj}), \quad
              C_{t+1,j} = C_{tj} + \alpha_{tj} / \phi_j

    All queries may be given at once, or one after the other with ``coverage`` and ``previous``
    carried from call to call; the numbers are the same, but for the rounding of the weights that
    half types carry. Memory is linear in Tq·Tk.

    Args:
        query, key, value: as in :func:`attnfast.additive_attention`.
        weight: of the additive score ``[A]`` or, with heads, ``[H, A]``; None for the dot score.
        penalty: λ, subtracts the coverage from the score: a number, or a tensor, one number or
            ``[H]``, with gradient.
        coverage_weight: w of the coverage feature :math:`f_{tj} = w C_{tj}`, ``[A]`` or ``[H, A]``.
        filters: of location features, :math:`f_{tj} = U (F * [\alpha_{t-1}, C_t])_j`: ``[K, 1, W]``
            on the last row's weights or ``[K, 2, W]`` on these and the coverage, W odd, zeros past
            the ends; with heads also ``[H, K, 2, W]``.
        over: what filters of one channel look at, ``"previous"`` or ``"coverage"``.
        projection: U of the location features, ``[A, K]`` or ``[H, A, K]``.
        fertility: φ > 0, how much attention a key asks for, ``[B, Tk]`` (or with heads); None
            means 1.
        transition: u of forward attention, which multiplies exp(e) by
            :math:`(1 - u_t) \alpha_{t-1,j} + u_t \alpha_{t-1,j-1}`: a number (0.5 for the plain
            one) or ``[B, Tq]``. ``previous`` must then say where to begin.
        coverage: C before the first row, ``[B, Tk]``, float32 (float64 for float64); None means 0.
        previous: the weights of the row before the first, ``[B, Tk]``; None means 0.
        scale: s; None means 1 with a weight and 1/√A without.
        lengths, mask, bias, temperature, need_weights, backend: as in
            :func:`attnfast.additive_attention`. A row whose mask is False throughout (padding of
            the target) counts in neither coverage nor loss.
        need_loss: return the coverage loss too.

    Returns:
        ``context [B, Tq, Dv]``; ``weights [B, Tq, Tk]`` or None; ``coverage [B, Tk]`` after the
        last row, float32 (float64 for float64); with ``need_loss`` every sequence's coverage loss,
        :math:`\sum_{tj} \min(\alpha_{tj}, C_{tj})`, ``[B]``. With heads, ``[B, H, …]`` throughout.

    Raises:
        ValueError, TypeError: an argument does not fit; the sentence names it.
        RuntimeError: the backend asked for cannot run this call; or a second derivative is asked
            of a backend other than ``"reference"``.

    Papers: See, Liu and Manning, "Get To The Point: Summarization with Pointer-Generator Networks",
    ACL 2017, arXiv:1704.04368; Tu et al., "Modeling Coverage for Neural Machine Translation", ACL
    2016, arXiv:1601.04811; Chorowski et al., "Attention-Based Models for Speech Recognition",
    NeurIPS 2015, arXiv:1506.07503; Zhang, Ling and Dai, "Forward Attention in Sequence-to-Sequence
    Acoustic Modeling for Speech Synthesis", ICASSP 2018, arXiv:1807.06736.
    """
    check_flag("need_weights", need_weights)
    check_flag("need_loss", need_loss)
    inputs = inputs_of(
        query, key, value, weight, penalty=penalty, coverage_weight=coverage_weight,
        filters=filters, over=over, projection=projection, fertility=fertility,
        transition=transition, coverage=coverage, previous=previous, scale=scale, lengths=lengths,
        mask=mask, bias=bias, temperature=temperature,
    )  # fmt: skip
    query = inputs[0]
    backend = choose(backend, query.device, query.dtype, "coverage_attention")
    if backend == "reference":
        context, weights, coverage, loss = reference(*inputs)
    else:
        refuse_tangents(*(x for x in inputs if isinstance(x, Tensor)))
        operators = operators_of(backend)
        grad = torch.is_grad_enabled() and not is_recorded()
        if grad and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            context, weights, coverage, loss, _ = _Coverage.apply(*inputs, operators)
        else:
            context, weights, coverage, loss, _ = call(
                operators.coverage_attention.default, *inputs
            )
    result = (context, as_returned(weights, query.dtype, need_weights), coverage)
    return (*result, loss) if need_loss else result
