"""The oracle of every operator in plain PyTorch: one formula each, exact in float64.

It is a backend like any other, ``backend="reference"``, and is not optimised.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnfast.ops.arguments import length_mask
from attnfast.ops.attention import AttentionInputs, AttentionOutputs
from attnfast.ops.copying import LOWEST, MAX_LOG_GRADIENT, CopyInputs, CopyOutputs
from attnfast.ops.coverage import CoverageInputs, CoverageOutputs
from attnfast.ops.linear import LinearInputs, LinearOutputs
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.recurrent import (
    PER_LAYER,
    WEIGHTS,
    RecurrentInputs,
    RecurrentOutputs,
    attention_of,
    coverage_of,
    feed_size,
    layers,
)
from attnfast.ops.recurrent import fake as fake_recurrent
from attnfast.ops.scores import ScoreInputs, ScoreOutputs
from attnfast.ops.span import to_columns, to_dense

__all__ = [
    "attention",
    "copy_distribution",
    "coverage_attention",
    "linear",
    "recurrent",
    "scores",
]  # fmt: skip


def visible_keys(call: AttentionInputs | CoverageInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask of visible keys, and keys and values with zeros where no row sees them."""
    query, key = call.query, call.key
    visible = torch.ones(*query.shape[:-1], key.shape[-2], dtype=torch.bool, device=query.device)
    if call.lengths is not None:
        lengths = call.lengths.view(-1, *[1] * (visible.dim() - 2))
        visible = visible & length_mask(lengths, key.shape[-2])
    if call.mask is not None:
        visible = visible & call.mask
    if call.bias is not None:
        visible = visible & (call.bias != -math.inf)
    unseen = ~visible.any(-2).unsqueeze(-1)  # [B, Tk, 1]: keys that no row sees must not leak NaN
    return visible, key.masked_fill(unseen, 0), call.value.masked_fill(unseen, 0)


def exactly(call: Any) -> Any:
    """Return a call whose query, key, value, score vector and bias have the accumulation dtype."""
    dtype = accumulation_dtype(call.query.dtype)
    names = ("query", "key", "value", "score_vector", "bias")
    given = {name: getattr(call, name) for name in names}
    return call._replace(**{name: x.to(dtype) for name, x in given.items() if x is not None})


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "leaky_relu": functools.partial(torch.nn.functional.leaky_relu, negative_slope=0.2),
}


def score(query: Tensor, key: Tensor, score_vector: Tensor | None, name: str) -> Tensor:
    """Return the dot scores ``[B, Tq, Tk]``, or the additive scores with an activation."""
    if score_vector is None:
        return query @ key.transpose(-1, -2)
    if score_vector.dim() == 2:  # [H, A]: one for each head
        score_vector = score_vector[:, None, None, :]
    features = query.unsqueeze(-2) + key.unsqueeze(-3)
    return (score_vector * ACTIVATIONS[name](features)).sum(-1)


def scores(call: ScoreInputs) -> ScoreOutputs:
    """Compute the additive scores."""
    dtype = accumulation_dtype(call.query.dtype)
    query, key, score_vector = (x.to(dtype) for x in call[:3])
    return ScoreOutputs(score(query, key, score_vector, call.score))


def entmax(scores: Tensor, alpha: float) -> Tensor:
    """Return the weights of α-entmax, α 1.5 or 2 (sparsemax), of rows with at least a finite score.

    The support is the largest k for which the k-th largest score exceeds the threshold computed
    from the k largest: Martins and Astudillo, ICML 2016, arXiv:1602.02068; Peters, Niculae and
    Martins, ACL 2019, arXiv:1905.05702.
    """
    if not scores.shape[-1]:
        return scores
    z = (alpha - 1) * (scores - scores.detach().amax(-1, keepdim=True))
    z = z.clamp(min=-4)  # scores that have no weight may be −inf, or too low for a sum
    ranked = z.sort(-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    mean = ranked.cumsum(-1) / k
    if alpha == 2:
        thresholds = mean - 1 / k
    else:
        mean_square = ranked.square().cumsum(-1) / k
        inside = 1 / k - (mean_square - mean.square())
        thresholds = mean - inside.clamp(min=torch.finfo(z.dtype).tiny).sqrt()
    support = (ranked > thresholds).sum(-1, keepdim=True)
    threshold = thresholds.gather(-1, (support - 1).clamp(min=0))
    excess = torch.where(z <= threshold, 0, z - threshold)  # no gradient where they are equal
    diverged = 0 * z.detach().sum(-1, keepdim=True)  # NaN in a row makes its gradients NaN
    return excess ** (1 / (alpha - 1)) * (1 + diverged)


def attention(call: AttentionInputs, score: Callable[..., Tensor] = score) -> AttentionOutputs:
    """Compute context, weights and log-sum-exp."""
    dtype, keys = call.query.dtype, None
    call = exactly(call)
    Tk = call.key.shape[-2]
    if call.key_bounds is not None:
        j = torch.arange(Tk, device=call.query.device)
        inside = (j >= call.key_bounds[..., :1]) & (j < call.key_bounds[..., 1:])
        if call.columns:
            inside = inside & (j < call.key_bounds[..., :1] + call.columns)
            keys = call.key_bounds[..., :1] + torch.arange(call.columns, device=call.query.device)
            bias, mask = (
                None if x is None else to_dense(x, keys, Tk) for x in (call.bias, call.mask)
            )
            call = call._replace(bias=bias, mask=mask)
        call = call._replace(mask=inside if call.mask is None else inside & call.mask)
    visible, k, v = visible_keys(call)
    e = call.scale * score(call.query, k, call.score_vector, call.score)
    if call.bias is not None:
        e = e + call.bias

    empty = ~visible.any(-1, keepdim=True)
    e = e.masked_fill(~visible, -math.inf).masked_fill(empty, 0)
    log_sum_exp = e.logsumexp(-1) if Tk else e.sum(-1)
    log_sum_exp = log_sum_exp.masked_fill(empty.squeeze(-1), -math.inf)
    if call.normalisation == "softmax":
        weights = e.softmax(-1)
    else:
        weights = entmax(e, 2 if call.normalisation == "sparsemax" else 1.5)
    weights = weights.masked_fill(~visible, 0)
    context = (weights @ v).to(dtype)
    statistics = weights.new_empty(0)
    if call.need_statistics:
        log_weights = weights.masked_fill(weights == 0, 1).log()
        if call.normalisation == "softmax":
            log_weights = e.log_softmax(-1)
        statistics = row_statistics(weights, log_weights)
    weights = weights if keys is None else to_columns(weights, keys)
    return AttentionOutputs(context, weights, log_sum_exp, statistics)


def row_statistics(weights: Tensor, log_weights: Tensor) -> Tensor:
    """Return the statistics of rows, ``[.., 5]``."""
    entropy = -(weights * log_weights.masked_fill(weights == 0, 0)).sum(-1)
    j = torch.arange(weights.shape[-1], device=weights.device, dtype=weights.dtype)
    mean = (weights * j).sum(-1)
    variance = (weights * (j - mean.unsqueeze(-1)).square()).sum(-1)
    if not len(j):
        return torch.stack([entropy] * 5, -1)
    largest, position = weights.max(-1)
    position = position.to(weights.dtype).masked_fill(largest.isnan(), math.nan)
    return torch.stack([entropy, largest, position, mean, variance], -1)


def windows(signals: Tensor, width: int) -> Tensor:
    """Return a filter's window around every key: ``[..., C, Tk]`` to ``[..., Tk, C · width]``."""
    padded = torch.nn.functional.pad(signals, (width // 2, width // 2))
    return padded.unfold(-1, width, 1).transpose(-3, -2).flatten(-2)


def log_transition(log_p: Tensor, u: Tensor) -> Tensor:
    """Return log((1 − u) p_j + u p_j−1) ``[..., Tk]``, −inf for 0."""
    log_before = torch.nn.functional.pad(log_p, (1, 0), value=-math.inf)[..., :-1]
    with torch.no_grad():
        top = torch.maximum(log_p + (1 - u).log(), log_before + u.log())
        none = top == -math.inf
        top = top.masked_fill(none, 0)
    # Only a term that is multiplied by 0 exceeds the limit; it affects only the gradient of u.
    limit = 0.98 * math.log(torch.finfo(u.dtype).max)
    here, before = ((x - top).clamp(max=limit).exp() for x in (log_p, log_before))
    r = ((1 - u) * here + u * before).masked_fill(none, 1)
    return (top + r.log()).masked_fill(none, -math.inf)


def coverage_attention(call: CoverageInputs) -> CoverageOutputs:
    """Compute context, weights, coverage and loss, row by row."""
    dtype = call.query.dtype
    call = exactly(call)
    q, bias, filters, u_t = call.query, call.bias, call.filters, call.transition_prob
    visible, k, v = visible_keys(call)
    zeros = k.new_zeros(k.shape[:-1])
    c = zeros if call.coverage is None else call.coverage
    p, log_p = call.previous, None
    if p is None:
        p = zeros
    elif u_t is not None:
        p, log_p = p.exp(), p
    loss = k.new_zeros(k.shape[:-2])
    rows, logarithms, sigmoid_sums = [], [], []
    for t in range(q.shape[-2]):
        seen = visible[..., t, :]
        keys = k
        if filters is not None and call.projection is not None and k.shape[-2]:
            width = filters.shape[-1]
            signals = torch.stack([p, c][: filters.shape[-2]], -2)
            found = windows(signals, width) @ filters.flatten(-2).mT
            keys = k + found @ call.projection.mT
        e = call.scale * score(q[..., t : t + 1, :], keys, call.score_vector, call.score).squeeze(
            -2
        )
        if bias is not None:
            e = e + bias.expand(*bias.shape[:-2], q.shape[-2], -1)[..., t, :]
        if call.penalty is not None:
            e = e - call.penalty.unsqueeze(-1) * c
        if u_t is not None and log_p is not None:
            log_r = log_transition(log_p, u_t[..., t, None])
            seen = seen & (log_r != -math.inf)
            e = e + log_r.masked_fill(~seen, 0)
        if call.normalisation == "sigmoid":
            e = torch.nn.functional.logsigmoid(e)
            sigmoid_sums.append(e.exp().masked_fill(~seen, 0).sum(-1))
        empty = ~seen.any(-1, keepdim=True)
        e = e.masked_fill(~seen, -math.inf).masked_fill(empty, 0)
        if u_t is not None:
            log_p = e.log_softmax(-1).masked_fill(~seen, -math.inf)
            logarithms.append(log_p)
        p = e.softmax(-1).masked_fill(~seen, 0)
        loss = loss + torch.where(p <= c, p, c).masked_fill(~visible[..., t, :], 0).sum(-1)
        c = c + (p if call.inverse_fertility is None else call.inverse_fertility * p)
        rows.append(p)
    weights = torch.stack(rows, -2) if rows else q @ k.mT
    log_weights = weights.new_empty(0)
    if u_t is not None:
        log_weights = torch.stack(logarithms, -2) if logarithms else weights
    sigmoid_sum = weights.new_empty(0)
    if call.normalisation == "sigmoid":
        sigmoid_sum = torch.stack(sigmoid_sums, -1) if sigmoid_sums else q.sum(-1)
    return CoverageOutputs((weights @ v).to(dtype), weights, c, loss, log_weights, sigmoid_sum)


def copy_distribution(call: CopyInputs) -> CopyOutputs:
    """Compute the distribution, and the log-sum-exp of the logits."""
    dtype = accumulation_dtype(call.logits.dtype)
    x, a, g = (z.to(dtype) for z in (call.logits, call.weights, call.gate.unsqueeze(-1)))
    num_oov, log_sum_exp = call.num_oov, x.double().logsumexp(-1)
    none = (x == -math.inf).all(-1, keepdim=True)  # no word can be generated
    index = call.source.long().unsqueeze(1).expand(a.shape)
    copied = a.new_zeros((*x.shape[:-1], x.shape[-1] + num_oov)).scatter_add(-1, index, a)
    if not call.log:
        generated = x.masked_fill(none, 0).softmax(-1).masked_fill(none, 0)
        generated = torch.nn.functional.pad(generated, (0, num_oov))
        distribution = g.sigmoid() * generated + (-g).sigmoid() * copied
        return CopyOutputs(distribution.to(call.logits.dtype), log_sum_exp)
    log_p, log_q = (torch.nn.functional.logsigmoid(y) for y in (g, -g))
    generated = log_p + x.masked_fill(none, 0).log_softmax(-1).masked_fill(none, -math.inf)
    generated = torch.nn.functional.pad(generated, (0, num_oov), value=-math.inf)
    # log P = m + log(e^{generated − m} + C e^{log q − m}), with the larger of the two as m.
    slight = copied < math.exp(-MAX_LOG_GRADIENT)  # counts as 0, except in its gradient
    copied = copied - copied.detach().masked_fill(~slight, 0)
    never = (generated == -math.inf) & slight
    top = (log_q + copied.log()).maximum(generated).masked_fill(never, 0).detach()
    total = (generated - top).exp() + copied * (log_q - top).clamp(max=MAX_LOG_GRADIENT).exp()
    log_probs = top + total.masked_fill(never, 1).log()
    return CopyOutputs(log_probs.masked_fill(never, LOWEST).to(call.logits.dtype), log_sum_exp)


def layer_at(call: RecurrentInputs, number: int) -> RecurrentInputs:
    """Return the call of layer ``number`` alone, with this layer's own tensors."""
    if call.weight_ih_upper is None:
        return call
    given = {x: getattr(call, x) for x in PER_LAYER if x in RecurrentInputs._fields}
    own: dict[str, Any] = {name: None if x is None else x[number] for name, x in given.items()}
    weight = call.weight_ih if number == 0 else call.weight_ih_upper[number - 1]
    return call._replace(**own, weight_ih=weight, weight_ih_upper=None)


def cell_step(
    call: RecurrentInputs, x: Tensor, h: Tensor, c: Tensor | None, int8: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the next state ``[B, H]``, an LSTM's next cell or None, and the gates.

    ``x [B, G·H]`` is the product of ``weight_ih`` with its bias.
    """
    y = h if call.dropout is None else h * call.dropout
    y = product([y], call.weight_hh, call.bias_hh, int8)
    if call.mode == "gru":
        (xr, xz, xn), (yr, yz, yn) = x.chunk(3, -1), y.chunk(3, -1)
        r, z = (xr + yr).sigmoid(), (xz + yz).sigmoid()
        n = (xn + r * yn).tanh()
        return (1 - z) * n + z * h, c, torch.cat([r, z, n, yn], -1)
    if call.mode == "tanh":
        return (x + y).tanh(), c, y[:, :0]
    i, f, g, o = (x + y).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    assert c is not None
    c = f * c + i * g
    return o * c.tanh(), c, torch.cat([i, f, g, o], -1)


def dropped(now: Any, before: Any, mask: Tensor, zoneout: bool) -> Tensor:
    """Multiply a state by its mask; with zoneout, add 1 − mask times the previous state."""
    return before + mask * (now - before) if zoneout else now * mask


def product(parts: list[Tensor], weight: Tensor, bias: Tensor | None, int8: bool = False) -> Tensor:
    """Return weight · [part 1; part 2; …] + bias, of numbers rounded to 8 bits with ``int8``."""
    if not int8:
        x = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return torch.nn.functional.linear(x, weight, bias)
    columns = weight.split([x.shape[-1] for x in parts], -1)
    total = sum(_round8(x) @ _round8(w).mT for x, w in zip(parts, columns))
    return total if bias is None else total + bias  # type: ignore[return-value]


def _round8(x: Tensor) -> Tensor:
    """Round each row of a matrix to multiples of its largest magnitude over 127."""
    if not x.shape[-1]:
        return x
    scale = x.abs().amax(-1, keepdim=True) / 127
    return scale * (x / scale.masked_fill(scale == 0, 1)).round()


def linear(call: LinearInputs) -> LinearOutputs:
    """Compute the product and add the bias."""
    return LinearOutputs(torch.nn.functional.linear(call.input, call.weight, call.bias))


def widen_weights(call: Any) -> Any:
    """Return the call of a layer with its weights in the dtype of the other tensors."""
    weights = [x for x in WEIGHTS if getattr(call, x, None) is not None]
    return call._replace(**{x: getattr(call, x).to(call.hidden.dtype) for x in weights})


def _stack(steps: list[Tensor]) -> Tensor:
    """Return the rows of steps side by side, those of one step without a copy."""
    return torch.stack(steps, -2) if len(steps) > 1 else steps[0].unsqueeze(-2)


def _next_state(
    call: RecurrentInputs, reads: list[Tensor], h: Tensor, c: Tensor | None, int8: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the results of :func:`cell_step` for what the cell reads."""
    return cell_step(call, product(reads, call.weight_ih, call.bias_ih, int8), h, c, int8)


def recurrent(
    call: RecurrentInputs,
    int8: bool = False,
    attend: Callable[..., Any] = attention,
    attend_with_history: Callable[[CoverageInputs], CoverageOutputs] = coverage_attention,
    next_state: Callable[..., Any] = _next_state,
) -> RecurrentOutputs:
    """Compute states, contexts and weights step by step; ``int8`` as in a search.

    ``attend``, ``attend_with_history`` and ``next_state`` compute these parts of a step.
    """
    call = widen_weights(call)
    B, T, _ = call.input.shape
    f = call.input.new_zeros(B, feed_size(call)) if call.feed is None else call.feed
    levels = [layer_at(call, i) for i in range(*layers(call) or (1,))]
    moved = [(x.hidden, x.cell) for x in levels]
    past, loss = (call.coverage, call.previous), call.input.new_zeros(B)
    results: dict[str, list[Tensor]] = {x: [] for x in RecurrentOutputs._fields}
    inputs, padding = call.input, None
    if call.target_lengths is not None:
        padding = ~length_mask(call.target_lengths, T).unsqueeze(-1)
        inputs = inputs.masked_fill(padding, 0)  # NaN there must not leak

    def attend_at(h: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal past, loss
        query = h if call.dropout_query is None else h * call.dropout_query[:, t]
        if call.weight_query is not None:
            query = product([query], call.weight_query, call.bias_query, int8)
        now = query.unsqueeze(1), slice(t, t + 1)
        if past[0] is None or past[1] is None:
            context, weights, *_ = attend(attention_of(call, *now))
            return query, context.squeeze(1), weights.squeeze(1)
        step = coverage_of(call, *now, past[0], past[1])
        if padding is not None:
            row_mask = ~padding[:, t : t + 1]
            step = step._replace(mask=row_mask if step.mask is None else row_mask & step.mask)
        outputs = attend_with_history(step)
        loss = loss + outputs.loss
        weights = outputs.weights.squeeze(1)
        if call.normalisation == "sigmoid":
            results["sigmoid_sum"].append(outputs.sigmoid_sum)
        if call.transition_prob is None:
            past = outputs.coverage, weights
        else:
            past = outputs.coverage, outputs.log_weights.squeeze(1)
            results["log_weights"].append(past[1])
        if call.detach_history:
            past = past[0].detach(), past[1].detach()
        return query, outputs.context.squeeze(1), weights

    def attend_and_gate(h: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
        query, context, weights = attend_at(h, t)
        if call.weight_gate is None:
            return query, context, weights
        read = h if call.dropout_query is None else h * call.dropout_query[:, t]
        gate = product([read], call.weight_gate, call.bias_gate, int8).sigmoid()
        results["context_gates"].append(gate)
        return query, gate * context, weights

    def of_layers(rows: list[Any]) -> Any:
        return rows[0] if call.weight_ih_upper is None or rows[0] is None else torch.stack(rows)

    for t in range(T):
        query: Any = None
        context: Any = None
        weights = attentional = None
        if call.attends_first and call.key is not None:
            query, context, weights = attend_and_gate(moved[-1][0], t)
            f = context
        fed = f if call.dropout_feed is None else f * call.dropout_feed[:, t]
        reads, saved_gates = [inputs[:, t], fed], []
        for i, level in enumerate(levels):
            if i and call.dropout_between is not None:
                reads = [reads[0] * call.dropout_between[i - 1, :, t]]
            read, c, gates = next_state(level, reads, *moved[i], int8)
            if level.dropout_state is not None:
                read = dropped(read, moved[i][0], level.dropout_state[:, t], call.zoneout)
            if level.dropout_cell is not None:
                c = dropped(c, moved[i][1], level.dropout_cell[:, t], call.zoneout)
            moved[i], reads = (read, c), [read]
            saved_gates.append(gates)
        h = moved[-1][0]
        if not call.attends_first and call.key is not None:
            query, context, weights = attend_and_gate(h, t)
            f = context
        if call.weight_output is not None:
            joined = [context, h]
            if call.dropout_joined is not None:
                sizes = [context.shape[-1], h.shape[-1]]
                masks = call.dropout_joined[:, t].split(sizes, -1)
                joined = [x * mask for x, mask in zip(joined, masks)]
            f = attentional = product(joined, call.weight_output, call.bias_output, int8)
            if call.output_activation == "tanh":
                f = attentional = attentional.tanh()
            if call.dropout_output is not None:
                f = attentional = attentional * call.dropout_output[:, t]
        projects = call.weight_query is not None or call.dropout_query is not None
        query = query if call.attends_first or projects else None
        row = {
            "states": of_layers([h for h, _ in moved]), "cells": of_layers([c for _, c in moved]),
            "contexts": context, "weights": weights, "attentional": attentional, "queries": query,
            "gates": of_layers(saved_gates),
        }  # fmt: skip
        for name, y in row.items():
            results[name] += [] if y is None or not y.shape[-1] else [y]
    empty = fake_recurrent(call)
    rows = [_stack(results[x]) if results[x] else y for x, y in empty._asdict().items()]
    if padding is not None:
        logarithms = rows[RecurrentOutputs._fields.index("log_weights")]
        rows = [
            x.masked_fill(padding, -math.inf if x is logarithms else 0) if x.dim() >= 3 else x
            for x in rows
        ]
    made = RecurrentOutputs(*rows)
    return made if past[0] is None else made._replace(coverage=past[0], loss=loss)
