"""Lower spans to operator arguments: key bounds become two integers a row, strides become views.

:func:`run_within` runs a call on a backend within one span, or one span for each head, and returns
the weights in the requested form.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast.ops import dispatch
from attnfast.ops.attention import AttentionInputs
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.span import (
    at_keys,
    bounds_in_phases,
    by_head,
    from_phases,
    join_heads,
    rows_at,
    to_columns,
    to_form,
    to_phases,
)
from attnfast.outputs import AttentionOutput, attention_result
from attnfast.spans import Position, Span, Spans, first_position, log_prior

__all__ = ["LoweredCall", "SpanArguments", "lower", "run_within"]


class SpanArguments(NamedTuple):
    """The span of visible keys, the rows' positions among the keys and a prior's width."""

    span: Spans = None
    position: Position = None
    sigma: float | Tensor | None = None


class LoweredCall(NamedTuple):
    """A call for a backend, and the values that restore a span's results from its results."""

    call: AttentionInputs
    like: Tensor  # the query as it was
    Tk: int
    keys: Any  # key indices of the columns, if they are needed
    window_columns: Tensor | None  # the operator's columns that belong to the span, if not all
    span: Span
    pad_rows: int = 0  # rows of the first phase that do not exist

    def restore(self, result: AttentionOutput, form: bool | str) -> AttentionOutput:
        """Return the results of the call before it was lowered."""
        context: Any = result.context
        weights, log_sum_exp, statistics = result.weights, result.log_sum_exp, result._statistics
        if self.span.phases > 1:
            sums: Any = None if log_sum_exp is None else log_sum_exp.unsqueeze(-1)
            context, weights, statistics, sums = (
                None if x is None else from_phases(x, self.span.stride, self.pad_rows, self.like)
                for x in (context, weights, statistics, sums)
            )
            log_sum_exp = None if sums is None else sums.squeeze(-1)
        if self.span.stride > 1 and statistics is not None:
            statistics = self._on_all_keys(statistics)
        if isinstance(form, str):
            assert weights is not None
            weights = to_form(form, weights, self.keys, self.Tk)
        elif form and self.window_columns is not None:
            assert weights is not None
            weights = to_columns(weights, self.window_columns)
        return attention_result(context, weights, log_sum_exp, statistics)

    def _on_all_keys(self, statistics: Tensor) -> Tensor:
        """Convert statistics over every k-th key, from the first of a row's phase, to all keys."""
        entropy, largest, position, mean, variance = statistics.unbind(-1)
        k = self.span.stride
        first: Any = 0
        if self.span.phases > 1:
            rows = torch.arange(
                self.pad_rows, self.pad_rows + entropy.shape[-1], device=entropy.device
            )
            first = (rows % k) * (largest != 0)  # 0 for a row without visible keys
        position, mean = k * position + first, k * mean + first
        return torch.stack([entropy, largest, position, mean, k * k * variance], -1)


def lower(call: AttentionInputs, within: SpanArguments, form: bool | str) -> LoweredCall:
    """Express one span by the arguments of the operator."""
    span: Any = within.span
    position: Any = within.position
    sigma = within.sigma
    query, Tk, lengths, bias = call.query, call.key.shape[-2], call.lengths, call.bias
    # For windows wider than all keys the columns are gathered from the keys at the end.
    compact = span.compact and span.columns(Tk) <= (Tk + span.stride - 1) // span.stride
    some = compact or span.stride > 1  # the columns are not simply all keys
    terms = bias is not None or call.mask is not None
    spread = isinstance(form, str)
    need_keys = spread or sigma is not None or (some and terms)
    need_window_columns = form and not spread and span.compact and not compact
    if isinstance(position, Tensor) and position.is_floating_point():
        # a row whose position is NaN gets a NaN query, so that its results are NaN
        lost = rows_at(position, query, Tk, lengths).isnan().unsqueeze(-1)
        query = query.masked_fill(lost, math.nan)
        call = call._replace(query=query)
    need_bounds = span.phases == 1 and span.sides != (None, None)  # phases have their own
    keys: Any = None
    window_columns = None
    if need_keys or need_bounds or need_window_columns:
        p = rows_at(position, query, Tk, lengths)
        rows = span.locate(p, Tk)
    if need_keys:
        keys = span.columns_of(rows, Tk, lengths, compact)
    if some and terms:
        bias, mask = (None if x is None else at_keys(x, keys) for x in (bias, call.mask))
        call = call._replace(bias=bias, mask=mask)
    if sigma is not None:
        sigma = rows_at(sigma, query, Tk, None) if isinstance(sigma, Tensor) else sigma
        dtype = accumulation_dtype(query.dtype)
        prior = log_prior(keys, p, sigma, dtype).to(dtype)
        call = call._replace(bias=prior if call.bias is None else call.bias + prior)
    if need_bounds:
        call = call._replace(key_bounds=torch.stack([rows.start, rows.stop], -1))
    if need_window_columns:
        window_columns = rows.start.unsqueeze(-1) + torch.arange(
            span.columns(Tk), device=query.device
        )
    call = call._replace(columns=span.columns(Tk) if compact else 0)
    if span.phases > 1:
        pad_rows = first_position(position, query.shape[-2], Tk) % span.stride
        call = _in_phases(call, span, position, pad_rows)
        return LoweredCall(call, query, Tk, keys, window_columns, span, pad_rows)
    return LoweredCall(_strided_keys(call, span.stride), query, Tk, keys, window_columns, span)


def _strided_keys(call: AttentionInputs, k: int) -> AttentionInputs:
    """Return the call on every k-th key."""
    if k == 1:
        return call
    lengths = call.lengths
    if lengths is not None:
        lengths = (lengths + (k - 1)).div(k, rounding_mode="floor")
    key, value = call.key[..., ::k, :], call.value[..., ::k, :]
    return call._replace(key=key, value=value, lengths=lengths)


def _in_phases(call: AttentionInputs, span: Span, position: Any, pad_rows: int) -> AttentionInputs:
    """Return the call with the phases of rows and keys side by side on the head axis."""
    query, k = call.query, span.stride
    Tq, Tk = query.shape[-2], call.key.shape[-2]
    heads = query.shape[1] if query.dim() == 4 else 1
    first = first_position(position, Tq, Tk)
    score_vector = call.score_vector
    if score_vector is not None and score_vector.dim() == 2:
        score_vector = score_vector.repeat_interleave(k, 0)
    rows = (*query.shape[1:-1], -1)
    bias, mask = (
        None if x is None else to_phases(x.expand(-1, *rows), k, pad_rows)
        for x in (call.bias, call.mask)
    )
    return call._replace(
        query=to_phases(query, k, pad_rows),
        key=to_phases(call.key, k, 0),
        value=to_phases(call.value, k, 0),
        score_vector=score_vector,
        bias=bias,
        mask=mask,
        lengths=None,
        key_bounds=bounds_in_phases(span, Tq, first, Tk, call.lengths, heads, query),
    )


def _run_within_one(
    within: SpanArguments, call: AttentionInputs, form: bool | str, backend: str
) -> AttentionOutput:
    """Run a backend within one span."""
    lowered = lower(call, within, form)
    return lowered.restore(dispatch.run_attention(lowered.call, backend), form)


def run_within(
    within: SpanArguments, call: AttentionInputs, form: bool | str, backend: str
) -> AttentionOutput[Tensor | list[Tensor]]:
    """Run a backend within a span, or one for each head; heads of one span run together.

    With a list of spans the weights are a list, one for each head, unless ``form`` is a string.
    """
    if call.bias is not None:  # its gradient is rounded once, after sums over keys and heads
        call = call._replace(bias=call.bias.to(accumulation_dtype(call.bias.dtype)))
    spans = within.span
    if spans is None or isinstance(spans, Span):
        return _run_within_one(within._replace(span=spans or Span()), call, form, backend)

    groups = {span: [i for i, x in enumerate(spans) if x == span] for span in dict.fromkeys(spans)}
    neighbours = all(index[-1] - index[0] < len(index) for index in groups.values())
    apart: dict[int, Any] = {}  # an index tensor of heads would synchronize the GPU

    def heads(x: Any, index: list[int], axis: int = 1) -> Any:
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
        of_heads = call._replace(
            score_vector=heads(call.score_vector, index, 0),
            **{
                x: heads(getattr(call, x), index) for x in ("query", "key", "value", "bias", "mask")
            },
        )
        own = SpanArguments(span, heads(within.position, index), heads(within.sigma, index))
        results.append(_run_within_one(own, of_heads, form, backend))
    contexts, weights = zip(*results)
    sums: Any = [result.log_sum_exp for result in results]
    statistics: Any = [result._statistics for result in results]
    sums, statistics = (None if x[0] is None else join_heads(x, order) for x in (sums, statistics))
    joined: Tensor | list[Tensor] | None = None
    if form:
        joined = join_heads(weights, order) if isinstance(form, str) else by_head(weights, order)
    return attention_result(join_heads(contexts, order), joined, sums, statistics)
