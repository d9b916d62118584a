r"""Attention without history: every query row weighs the keys it may see, rows are independent.

    e_ij    = scale · score(q_i, k_j) + bias_ij
    α_ij    = exp(e_ij − log_sum_exp_i)  over the keys j that row i may see, 0 elsewhere
    c_i     = Σ_j α_ij v_j

with ``score(q, k) = q·k`` (dot), or ``Σ_a w_a f(q_a + k_a)`` (additive) when a weight is given, f
being tanh or the rectifier.
What a row may see is a span of keys (:mod:`attnfast.ops.span`), a length, a mask.

This file is the contract. A backend implements the two operators of :data:`SCHEMAS`, under its own
namespace ``attnfast_<backend>``; the CPU also ``exponentials``, which those two take. The reference
is the oracle. Every operator refuses arguments that do not fit together, before it computes;
:func:`attnfast.ops.arguments.check` finds the sentence that says why.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast.backends import choose
from attnfast.errors import check_flag, refuse
from attnfast.ops.arguments import (
    as_returned,
    autocast,
    check,
    check_exact,
    check_scale,
    check_temperature,
    check_tensor,
    folded,
    is_one,
    is_relu,
    refuse_tangents,
)
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
from attnfast.ops.span import (
    Position,
    Span,
    Spans,
    at_keys,
    bounds_in_phases,
    by_head,
    check_form,
    check_span,
    first_position,
    from_phases,
    join_heads,
    log_prior,
    rows_at,
    to_columns,
    to_dense,
    to_form,
    to_phases,
)

#: ``weights`` and ``log_sum_exp`` come in the accumulation dtype (float32; float64 for float64);
#: ``weights`` has size [0] unless needed; context and gradients of query, key and value lie in
#: memory as :func:`empty_rows` says. ``bias`` and ``mask`` have the shape of the scores or 1 in
#: place of a size. ``span [B, (H,) Tq, 2]``, int64, or 1 in place of B and H, holds the first key
#: that a row may see and the one after the last, which may lie outside of the sequence.
#: With ``columns`` W > 0 scores are compact, ``[B, (H,) Tq, W]``: column m of row i is key
#: ``span[i, 0] + m``, and keys beyond the W-th are not seen; else they are ``[B, (H,) Tq, Tk]``.
#: ``exponentials`` is what ``attnfast_cpu::exponentials`` made of the keys. ``relu`` makes f of the
#: additive score the rectifier.
#: The backward takes the saved weights, which are exactly 0 where a row may not see a key, and
#: returns tensors of size [0] for the gradients that are not needed; ``need_grad_key`` stands for
#: key, value and weight. It begins at ``grad_score``, the gradient of the scores, if that is given.
SCHEMAS = {
    "attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? weight, Tensor? bias, Tensor? mask, "
        "Tensor? lengths, Tensor? span, int columns, Tensor? exponentials, float scale, "
        "bool relu, bool need_weights) -> (Tensor context, Tensor weights, Tensor log_sum_exp)"
    ),
    "attention_backward": (
        "(Tensor grad_context, Tensor? grad_weights, Tensor? grad_log_sum_exp, Tensor query, "
        "Tensor key, Tensor value, Tensor? weight, Tensor? lengths, Tensor? span, int columns, "
        "Tensor? exponentials, Tensor weights, Tensor? grad_score, float scale, "
        "bool relu, bool need_grad_query, bool need_grad_key, bool need_grad_score) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weight, "
        "Tensor grad_score)"
    ),
}


def visible_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which keys a row may see, and keys and values with zeros where no row may see them."""
    visible = torch.ones(*query.shape[:-1], key.shape[-2], dtype=torch.bool, device=query.device)
    if lengths is not None:
        positions = torch.arange(key.shape[-2], device=query.device)
        visible = visible & (positions < lengths.view(-1, *[1] * (visible.dim() - 1)))
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (bias != -math.inf)
    unseen = ~visible.any(-2).unsqueeze(-1)  # [B, Tk, 1]: what no row may see must not leak NaN
    return visible, key.masked_fill(unseen, 0), value.masked_fill(unseen, 0)


def score(query: Tensor, key: Tensor, weight: Tensor | None, relu: bool = False) -> Tensor:
    """Return the dot scores ``[B, Tq, Tk]``, or the additive ones with a weight."""
    if weight is None:
        return query @ key.transpose(-1, -2)
    weight = weight[:, None, None, :] if weight.dim() == 2 else weight  # [H, A]: one for each head
    features = query.unsqueeze(-2) + key.unsqueeze(-3)
    return (weight * (features.relu() if relu else features.tanh())).sum(-1)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    lengths: Tensor | None,
    span: Tensor | None,
    columns: int,
    scale: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute context, weights and log-sum-exp in plain PyTorch: the oracle of every backend."""
    dtype = accumulation_dtype(query.dtype)
    q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
    keys = None
    if span is not None:
        j = torch.arange(key.shape[-2], device=query.device)
        inside = (j >= span[..., :1]) & (j < span[..., 1:])
        if columns:
            inside = inside & (j < span[..., :1] + columns)
            keys = span[..., :1] + torch.arange(columns, device=query.device)
            bias, mask = (None if x is None else to_dense(x, keys, len(j)) for x in (bias, mask))
        mask = inside if mask is None else inside & mask
    visible, k, v = visible_keys(q, k, v, bias, mask, lengths)
    e = scale * score(q, k, None if weight is None else weight.to(dtype), relu)
    if bias is not None:
        e = e + bias.to(dtype)

    empty = ~visible.any(-1, keepdim=True)
    e = e.masked_fill(~visible, -math.inf).masked_fill(empty, 0)
    log_sum_exp = e.logsumexp(-1) if key.shape[-2] else e.sum(-1)
    log_sum_exp = log_sum_exp.masked_fill(empty.squeeze(-1), -math.inf)
    weights = e.softmax(-1).masked_fill(~visible, 0)
    context = (weights @ v).to(query.dtype)
    return context, weights if keys is None else to_columns(weights, keys), log_sum_exp


def _check(
    query, key, value, weight, bias, mask, lengths, span, columns, exponentials, scale, relu,
    need_weights,
):  # fmt: skip
    check(query, key, value, weight, bias, mask, lengths, span, columns)
    if exponentials is None:
        return
    if weight is None or relu or key.dtype == torch.float64:
        refuse("exponentials", "None but for tanh in float32", "a tensor")
    made = _fake_exponentials(key, None)
    check_exact(key, [("exponentials", exponentials, made.dtype, made.shape)])


def _check_backward(
    grad_context, grad_weights, grad_log_sum_exp, query, key, value, weight, lengths, span,
    columns, exponentials, weights, grad_score, scale, relu, need_grad_query,
    need_grad_key, need_grad_score,
):  # fmt: skip
    seen = (None, None, lengths, span, columns)
    _check(query, key, value, weight, *seen, exponentials, scale, relu, True)
    dtype, rows = accumulation_dtype(query.dtype), query.shape[:-1]
    scores = (*rows, columns or key.shape[-2])
    gradients = [
        ("grad_context", grad_context, query.dtype, (*rows, value.shape[-1])),
        ("grad_weights", grad_weights, dtype, scores),
        ("grad_log_sum_exp", grad_log_sum_exp, dtype, rows),
        ("weights", weights, dtype, scores),
        ("grad_score", grad_score, dtype, scores),
    ]
    check_exact(query, gradients)


#: What refuses an operator's arguments, with the same parameters; compiled code refuses the same.
CHECKS: dict[str, Any] = {"attention": _check, "attention_backward": _check_backward}


def _fake(
    query, key, value, weight, bias, mask, lengths, span, columns, exponentials, scale, relu,
    need_weights,
):  # fmt: skip
    dtype = accumulation_dtype(query.dtype)
    rows = query.shape[:-1]
    shape = (*rows, columns or key.shape[-2]) if need_weights else (0,)
    weights = query.new_empty(shape, dtype=dtype)
    context = empty_rows(query, value.shape[-1])
    return context, weights, query.new_empty(rows, dtype=dtype)


def _fake_backward(
    grad_context, grad_weights, grad_log_sum_exp, query, key, value, weight, lengths, span,
    columns, exponentials, weights, grad_score, scale, relu, need_grad_query,
    need_grad_key, need_grad_score,
):  # fmt: skip
    return (
        empty_rows(query) if need_grad_query else query.new_empty(0),
        empty_rows(key) if need_grad_key else query.new_empty(0),
        empty_rows(value) if need_grad_key else query.new_empty(0),
        query.new_empty(weight.shape if need_grad_key and weight is not None else (0,)),
        weights.new_empty(weights.shape if need_grad_score and grad_score is None else (0,)),
    )


def _setup_context(ctx: Any, inputs, output):
    query, key, value, weight, bias, _, lengths, span, columns, exponentials, scale, relu, _ = (
        inputs
    )
    ctx.save_for_backward(query, key, value, weight, lengths, span, exponentials, output[1])
    ctx.columns, ctx.scale, ctx.relu = columns, scale, relu
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_context, grad_weights, grad_log_sum_exp):
    query, key, value, weight, lengths, span, exponentials, weights = ctx.saved_tensors
    grad_context = or_zeros(grad_context, query, value)
    need_query, need_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    need_key = any(ctx.needs_input_grad[1:4])
    grad_query, grad_key, grad_value, grad_weight, grad_bias = call(
        ctx.operator,
        grad_context, grad_weights, grad_log_sum_exp, query, key, value, weight, lengths, span,
        ctx.columns, exponentials, weights, None, ctx.scale, ctx.relu, need_query, need_key,
        need_bias,
    )  # fmt: skip
    if need_bias:
        shape, dtype = ctx.bias
        grad_bias = grad_bias.sum_to_size(shape).to(dtype)
    return (
        grad_query if need_query else None,
        grad_key if need_key else None,
        grad_value if need_key else None,
        grad_weight if need_key and weight is not None else None,
        grad_bias if need_bias else None,
        *[None] * 8,
    )


_Attention = define("attention", SCHEMAS, CHECKS, _fake, _fake_backward, _setup_context, _backward)

# e^{2 key} in float32, [B, H, Tk, A rounded up to 32]; size [0] if a key is beyond its domain.
LIBRARIES["cpu"].define("exponentials(Tensor key, Tensor? lengths) -> Tensor")


@torch.library.register_fake("attnfast_cpu::exponentials", lib=LIBRARIES["cpu"])
def _fake_exponentials(key, lengths):
    *lead, Tk, A = key.shape
    shape = (lead[0], lead[1] if len(lead) == 2 else 1, Tk, (A + 31) // 32 * 32)
    return key.new_empty(shape, dtype=torch.float32)


@torch.library.impl("attnfast_triton::attention", "default", lib=LIBRARIES["triton"])
def _triton(*args):
    from attnfast.kernels import attention  # Triton stays unimported until it is used

    _check(*args)
    return attention.forward(*args)


@torch.library.impl("attnfast_triton::attention_backward", "default", lib=LIBRARIES["triton"])
def _triton_backward(*args):
    from attnfast.kernels import attention

    _check_backward(*args)
    return attention.backward(*args)


def run(
    query, key, value, weight, bias, mask, lengths, span, columns, exponentials, scale, relu,
    need_weights, backend,
):  # fmt: skip
    """Run a backend; return context, weights as users get them, log-sum-exp."""
    inputs, seen = (query, key, value, weight, bias), (mask, lengths, span, columns)
    if backend == "reference":
        check(*inputs, *seen)
        context, weights, log_sum_exp = reference(*inputs, *seen, scale, relu)
        return context, as_returned(weights, query.dtype, need_weights), log_sum_exp
    refuse_tangents(*inputs)
    query, weight, scale = folded(query, weight, scale)
    inputs = (query, key, value, weight, bias)
    operators, rest = operators_of(backend), (*seen, exponentials, scale, relu)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if keep and not is_recorded():
        context, weights, log_sum_exp = _Attention.apply(*inputs, *rest, True, operators)
    else:
        context, weights, log_sum_exp = call(
            operators.attention.default, *inputs, *rest, bool(need_weights) or keep
        )
    return context, as_returned(weights, query.dtype, need_weights), log_sum_exp


class _Columns(NamedTuple):
    """What an operator takes of a span: all in the columns of its weights."""

    bias: Tensor | None
    mask: Tensor | None
    bounds: Tensor | None
    columns: int
    keys: Any  # of the columns, or None if they were not needed
    narrow: Tensor | None  # which of the operator's columns are the span's, if not all

    def returned(self, weights: Any, Tk: int, form: bool | str) -> Any:
        """Return the operator's weights as they were asked for."""
        if isinstance(form, str):
            return to_form(form, weights, self.keys, Tk)
        return to_columns(weights, self.narrow) if form and self.narrow is not None else weights


def columns_of(query, key, bias, mask, lengths, span, position, sigma, need_weights) -> _Columns:
    """Bring what one span says of the keys into columns; see :data:`SCHEMAS`."""
    Tk = key.shape[-2]
    # Of windows wider than all keys the columns are taken from the keys in the end.
    compact = span.compact and span.columns(Tk) <= (Tk + span.stride - 1) // span.stride
    some = compact or span.stride > 1  # the columns are not simply all keys
    terms = bias is not None or mask is not None
    spread = isinstance(need_weights, str)
    need_keys = spread or sigma is not None or (some and terms)
    need_narrow = need_weights and not spread and span.compact and not compact
    need_bounds = span.phases == 1 and span.sides != (None, None)  # phases have their own
    keys: Any = None
    bounds = narrow = None
    if need_keys or need_bounds or need_narrow:
        p = rows_at(position, query, Tk, lengths)
        rows = span.locate(p, Tk)
    if need_keys:
        keys = span.columns_of(rows, Tk, lengths, compact)
    if some and terms:
        bias, mask = (None if x is None else at_keys(x, keys) for x in (bias, mask))
    if sigma is not None:
        sigma = rows_at(sigma, query, Tk, None) if isinstance(sigma, Tensor) else sigma
        dtype = accumulation_dtype(query.dtype)
        prior = log_prior(keys, p, sigma, dtype).to(dtype)
        bias = prior if bias is None else bias + prior
    if need_bounds:
        bounds = torch.stack([rows.start, rows.stop], -1)
    if need_narrow:
        narrow = rows.start.unsqueeze(-1) + torch.arange(span.columns(Tk), device=query.device)
    return _Columns(bias, mask, bounds, span.columns(Tk) if compact else 0, keys, narrow)


def run_span(
    query, key, value, weight, bias, mask, lengths, span, position, sigma, scale, relu,
    need_weights, backend,
):  # fmt: skip
    """Run a backend on what one span leaves of the keys; results as :func:`run`'s."""
    Tq, Tk, k = query.shape[-2], key.shape[-2], span.stride
    seen = columns_of(query, key, bias, mask, lengths, span, position, sigma, need_weights)
    bias, mask, bounds, columns, *_ = seen
    if span.phases == 1:
        if k > 1:
            key, value = key[..., ::k, :], value[..., ::k, :]
            lengths = None if lengths is None else (lengths + (k - 1)).div(k, rounding_mode="floor")
        context, weights, log_sum_exp = run(
            query, key, value, weight, bias, mask, lengths, bounds, columns, None, scale, relu,
            need_weights, backend,
        )  # fmt: skip
    else:
        heads = query.shape[1] if query.dim() == 4 else 1
        first = first_position(position, Tq, Tk)
        front, bounds = first % k, bounds_in_phases(span, Tq, first, Tk, lengths, heads, query)
        if weight is not None and weight.dim() == 2:
            weight = weight.repeat_interleave(k, 0)
        rows = (*query.shape[1:-1], -1)
        bias, mask = (
            None if x is None else to_phases(x.expand(-1, *rows), k, front) for x in (bias, mask)
        )
        results = run(
            to_phases(query, k, front), to_phases(key, k, 0), to_phases(value, k, 0), weight, bias,
            mask, None, bounds, columns, None, scale, relu, need_weights, backend,
        )  # fmt: skip
        context, weights, log_sum_exp = (
            None if x is None else from_phases(x, k, front, query)
            for x in (*results[:2], results[2].unsqueeze(-1))
        )
        log_sum_exp = log_sum_exp.squeeze(-1)
    return context, seen.returned(weights, Tk, need_weights), log_sum_exp


def run_spans(
    query, key, value, weight, bias, mask, lengths, spans, position, sigma, scale, relu,
    need_weights, backend,
):  # fmt: skip
    """Run a backend with a span for each head; heads of the same one go together.

    Results are those of :func:`run`; weights are a list, one for each head, unless spread.
    """
    if bias is not None:  # its gradient is to be rounded once, after the sums over keys and heads
        bias = bias.to(accumulation_dtype(bias.dtype))
    if isinstance(spans, Span):
        return run_span(
            query, key, value, weight, bias, mask, lengths, spans, position, sigma, scale,
            relu, need_weights, backend,
        )  # fmt: skip

    groups = {span: [i for i, x in enumerate(spans) if x == span] for span in dict.fromkeys(spans)}
    neighbours = all(index[-1] - index[0] < len(index) for index in groups.values())
    apart = {}  # an index of heads would be a tensor that a GPU waits for

    def heads(x, index, axis=1):
        if not isinstance(x, Tensor) or x.dim() < 2 + axis or x.shape[axis] == 1:
            return x
        if neighbours:
            return x.narrow(axis, index[0], len(index))
        if id(x) not in apart:
            apart[id(x)] = x.unbind(axis)
        return torch.stack([apart[id(x)][i] for i in index], axis)

    results, order = [], []
    for span, index in groups.items():
        order += index
        results.append(run_span(
            *(heads(x, index) for x in (query, key, value)), heads(weight, index, 0),
            heads(bias, index), heads(mask, index), lengths, span, heads(position, index),
            heads(sigma, index), scale, relu, need_weights, backend,
        ))  # fmt: skip
    contexts, weights, sums = zip(*results)
    if need_weights is True:
        weights = by_head(weights, order)
    else:
        weights = join_heads(weights, order) if need_weights else None
    return join_heads(contexts, order), weights, join_heads(sums, order)


def _attention(
    query, key, value, weight, scale, relu, lengths, mask, bias, span, position, sigma,
    temperature, need_weights, need_log_sum_exp, backend,
):  # fmt: skip
    """Choose a backend and run, or say what does not fit: what both public functions share."""
    query, key, value, weight, bias = autocast(query, key, value, weight, bias)
    check_form(need_weights)
    need_weights = need_weights if isinstance(need_weights, str) else bool(need_weights)
    check_flag("need_log_sum_exp", need_log_sum_exp)
    try:
        check_temperature(temperature)
        if scale is None:
            scale = max(query.shape[-1], 1) ** -0.5
        else:
            check_scale(scale, "a finite number or None")
        if not is_one(temperature):
            scale, bias = scale / temperature, None if bias is None else bias / temperature
        step = True if query.shape[-2] == 1 else False  # noqa: SIM210 (a constant for torch.compile)
        backend = choose(backend, query.device, query.dtype, step=step)
        terms = (query, key, value, weight, bias, mask, lengths)
        if (
            span is None
            and position is None
            and sigma is None
            and not isinstance(need_weights, str)
        ):
            context, weights, log_sum_exp = run(
                *terms, None, 0, None, scale, relu, need_weights, backend
            )
        else:
            check(*terms)
            check_span(query, key, span, position, sigma, need_weights)
            span = Span() if span is None else span
            sigma = None if sigma is None else sigma * temperature**0.5
            context, weights, log_sum_exp = run_spans(
                *terms, span, position, sigma, scale, relu, need_weights, backend
            )
    except Exception:
        check(query, key, value, weight, bias, mask, lengths)
        raise
    return (context, weights, log_sum_exp) if need_log_sum_exp else (context, weights)


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    activation: str = "tanh",
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    span: Spans = None,
    position: Position = None,
    sigma: float | Tensor | None = None,
    temperature: float = 1.0,
    need_weights: bool | str = False,
    need_log_sum_exp: bool = False,
    backend: str | None = None,
) -> tuple[Tensor | None, ...]:
    r"""Attend with Bahdanau's additive score.

    .. math:: e_{ij} = (\sum_a w_a \tanh(q_{ia} + k_{ja}) + b_{ij}) / T, \quad
              \alpha_i = \mathrm{softmax}_j(e_{ij}), \quad c_i = \sum_j \alpha_{ij} v_j

    ``query`` and ``key`` are the projected decoder states and encoder states. Luong's "concat"
    score is the same thing with the weight matrix split in two. No tensor of size Tq·Tk·A exists
    at any time, forward or backward.

    Args:
        query: ``[B, Tq, A]``, or ``[B, H, Tq, A]`` with heads; float32, float64, bfloat16 or
            float16. Half types accumulate in float32.
        key: ``[B, Tk, A]`` (or with heads), dtype and device of the query, as ``value``.
        value: ``[B, Tk, Dv]`` (or with heads).
        weight: ``[A]``; with heads also ``[H, A]``.
        activation: ``"tanh"``, or ``"relu"`` for max(0, q + k) in its place.
        lengths: ``[B]``, int64 or int32: keys at ``lengths[b]`` and beyond are not seen. On the
            CPU a length outside 0…Tk is refused; on a GPU it is clamped, for checking would wait.
        mask: boolean, the shape of the scores ``[B, Tq, Tk]`` or 1 in place of a size; True where
            a key may be attended to.
        bias: added to the score, shaped like ``mask``, differentiable; of the query's dtype, or
            float32 beside half types.
        span: the keys that a row may see, a :class:`attnfast.Span`: a window, a stride, those
            before it. Memory is in proportion to the keys seen, and so is time, on a GPU as far as
            rows that follow each other see keys near each other. With heads also a list of one for
            each head.
        position: where the rows stand among the keys, for the span and sigma: see
            :class:`attnfast.Span`. A tensor of real numbers gets its gradient through sigma.
        sigma: of a Gaussian prior around that position, −(j − p_i)² / 2σ² added to the score; a
            positive number of keys, or a tensor of them with the shapes of ``position``,
            differentiable.
        temperature: T > 0 divides score, bias and prior.
        need_weights: return the weights; otherwise they are None. A span's may be compact, with a
            column for each key that a row sees (see :class:`attnfast.Span`); ``"dense"`` spreads
            them over all keys, ``"sparse"`` makes a ``torch.sparse_coo`` tensor.
        need_log_sum_exp: return log Σ_j exp(e_ij) as a third result, float32 (float64 for float64).
        backend: None for the fastest that can run, or ``"cpu"``, ``"triton"``, ``"cuda"``,
            ``"reference"``.

    Returns:
        ``context [B, Tq, Dv]`` and ``weights [B, Tq, Tk]`` or None, in the query's dtype, then
        ``log_sum_exp [B, Tq]`` if asked for. With a list of spans weights are a list too, one
        ``[B, Tq, W]`` for each head. A row that may see no key has context 0, weights 0,
        log-sum-exp −inf and gradients 0. With heads the context lies in memory as the query does,
        like that of ``scaled_dot_product_attention``: who has transposed ``[B, Tq, H, A]``
        transposes back without a copy.

    For every finite q and k each tanh is right to 4e-7, absolute (float64: to a few ulp of
    itself), so that a score is right to 4e-7·Σ|w| and the rounding of its sum: about what eager
    float32 code loses. Where all queries and keys of a block are near 0, max|q| + max|k| ≤ 0.8,
    each tanh is right to a few ulp of itself, and with it the gradient of the weight.

    Raises:
        ValueError, TypeError: an argument does not fit; the sentence names it.
        RuntimeError: the backend asked for cannot run this call; or a second derivative is asked
            of a backend other than ``"reference"``.

    Paper: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", ICLR 2015, arXiv:1409.0473.
    """
    check_tensor("weight", weight)
    return _attention(
        query, key, value, weight, 1.0, is_relu(activation), lengths, mask, bias, span, position,
        sigma, temperature, need_weights, need_log_sum_exp, backend,
    )  # fmt: skip


def dot_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    span: Spans = None,
    position: Position = None,
    sigma: float | Tensor | None = None,
    temperature: float = 1.0,
    need_weights: bool | str = False,
    need_log_sum_exp: bool = False,
    backend: str | None = None,
) -> tuple[Tensor | None, ...]:
    r"""Attend with the dot-product score.

    .. math:: e_{ij} = (s\, q_i \cdot k_j + b_{ij}) / T, \quad
              \alpha_i = \mathrm{softmax}_j(e_{ij}), \quad c_i = \sum_j \alpha_{ij} v_j

    Luong's "general" score is this with projected keys; his "dot" is this with ``scale=1``.

    Args:
        scale: s; None means 1/√A, as in ``scaled_dot_product_attention``.

    The other arguments, the results and the errors are those of :func:`additive_attention`.

    Papers: Luong, Pham and Manning, "Effective Approaches to Attention-based Neural Machine
    Translation", EMNLP 2015, arXiv:1508.04025; Vaswani et al., "Attention Is All You Need",
    NeurIPS 2017, arXiv:1706.03762.
    """
    return _attention(
        query, key, value, None, scale, False, lengths, mask, bias, span, position, sigma,
        temperature, need_weights, need_log_sum_exp, backend,
    )  # fmt: skip
