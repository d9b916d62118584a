"""Run a recurrent layer step by step, with PyTorch's cells and any attention."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnfast.decoding import Memory
from attnfast.nn._layer import Layer, LayerOutputs
from attnfast.nn.local import SpanState
from attnfast.ops.arguments import length_mask
from attnfast.ops.recurrent import RecurrentInputs
from attnfast.ops.reference import cell_step, dropped

CELL_STEPS = {"tanh": torch.rnn_tanh_cell, "gru": torch.gru_cell, "lstm": torch.lstm_cell}


def run_steps(
    layer: Layer,
    input: Tensor,
    state: Any,
    attention: Any,
    memory: Memory | None,
    *,
    target_lengths: Tensor | None,
    target_mask: Tensor | None,
    need_weights: bool,
    zoneout: bool = False,
    detach_history: bool = False,
    dropouts: Mapping[str, Tensor] = MappingProxyType({}),
) -> LayerOutputs:
    """Run the layer step by step, with any attention."""
    h, c, history = state.hidden, state.cell, state.history
    stacked = h.dim() == 3
    every = [layer.at(i) for i in range(len(h))] if layer.weight_ih_upper is not None else []
    features = layer.feed_size(input.shape[-1])
    f = input.new_zeros(input.shape[0], features) if state.feed is None else state.feed
    has_history = getattr(attention, "has_history", False)
    rows: list[list[Any]] = [[] for _ in range(5)]

    def attend(h: Tensor, t: int) -> tuple[Any, Any, Any]:
        h, form = _drop(h, masks.get("dropout_query")), "dense" if need_weights else False
        if not has_history:
            return *attention(h, memory, form), history
        mask = None if target_lengths is None else target_lengths > t
        mask = mask if target_mask is None else target_mask[:, t]
        context, weights, after = attention(h, memory, history, form, mask)
        return context, weights, after.detach() if detach_history else after

    if target_lengths is not None:  # NaN in padding must not leak into gradients
        input = input.masked_fill(~length_mask(target_lengths, input.shape[1]).unsqueeze(-1), 0)
    for t, x in enumerate(input.unbind(1)):
        context = weights = attentional = None
        masks = {n: y if n == "dropout" else y.select(-2, t) for n, y in dropouts.items()}
        if attention is not None and layer.attends_first:
            context, weights, history = attend(h[-1] if stacked else h, t)
            f = context
        if features:
            x = torch.cat([x, _drop(f, masks.get("dropout_feed"))], -1)
        if every:
            new_h, new_c = _move_all(every, x, h, c, masks, zoneout)
        else:
            new_h, new_c = _move(layer, x, h, c, masks, zoneout)
        last = new_h[-1] if stacked else new_h
        if attention is not None and not layer.attends_first:
            context, weights, history = attend(last, t)
            f = context
        if layer.output is not None:
            both = torch.cat([context, last], -1)  # type: ignore[list-item]
            attentional = layer.output(_drop(both, masks.get("dropout_joined")))
            attentional = attentional.tanh() if layer.output_tanh else attentional
            f = attentional = _drop(attentional, masks.get("dropout_output"))
        shown = [new_h, new_c, context, weights, attentional]
        if target_lengths is not None:
            padding = target_lengths <= t
            for i, y in enumerate(shown):
                axes = 1 if i < 2 else y.dim() - 1 if y is not None else 0  # states of all layers
                if y is not None:
                    shown[i] = y.masked_fill(padding.view(-1, *[1] * axes), 0)
        h, c = new_h, new_c
        for values, y in zip(rows, shown):
            values.append(y)
    done: list[Any] = [None if not x or x[0] is None else torch.stack(x, -2) for x in rows]
    if isinstance(history, SpanState) and target_lengths is not None:
        first = 0 if state.history is None else state.history.rows
        history = history._replace(rows=first + target_lengths)
    return LayerOutputs(done[0], done[1], done[2], done[3], done[4], history)


def run_no_step(
    layer: Layer, input: Tensor, state: Any, attention: Any, memory: Any, need_weights: bool
) -> LayerOutputs:
    """Return the outputs for an input without steps: those of one step, cut to length 0."""
    if getattr(attention, "has_history", False) and state.history is None:
        inner: Any = attention
        while not hasattr(inner, "start"):  # wrapped
            inner = inner.attention
        state = state._replace(history=inner.start(memory))
    step = run_steps(
        layer, input.new_zeros(input.shape[0], 1, input.shape[2]), state, attention, memory,
        target_lengths=None, target_mask=None, need_weights=need_weights,
    )  # fmt: skip
    rows: dict[str, Any] = {
        x: y[..., :0, :] for x, y in step._asdict().items() if isinstance(y, Tensor)
    }
    return step._replace(**rows, history=state.history)


def _drop(x: Any, mask: Tensor | None) -> Any:
    """Return x times a dropout mask, if there is one."""
    return x if mask is None else x * mask


def _move_all(
    layers: list[Layer],
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    masks: Mapping[str, Tensor],
    zoneout: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the next states and cells of a stack ``[L, B, H]``."""
    states, cells = [], []
    names = [x for x in ("dropout", "dropout_state", "dropout_cell") if x in masks]
    for i, layer in enumerate(layers):
        if i and "dropout_between" in masks:
            x = x * masks["dropout_between"][i - 1]
        layer_masks = {name: masks[name][i] for name in names}
        x, cell = _move(layer, x, h[i], None if c is None else c[i], layer_masks, zoneout)
        states.append(x)
        cells.append(cell)
    return torch.stack(states), None if c is None else torch.stack(cells)  # type: ignore[arg-type]


def _move(
    layer: Layer,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    masks: Mapping[str, Tensor],
    zoneout: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the next state and cell."""
    state_masks = [masks.get(name) for name in ("dropout_state", "dropout_cell")]
    if any(mask is not None for mask in state_masks):
        now = _move(layer, x, h, c, {n: y for n, y in masks.items() if n == "dropout"}, zoneout)
        updates = zip(now, (h, c), state_masks)
        return tuple(x if m is None else dropped(x, before, m, zoneout) for x, before, m in updates)  # type: ignore[return-value]
    if layer.rnn is not None:
        hidden = h if h.dim() == 3 else h.unsqueeze(0)
        if c is None:
            return layer.rnn(x.unsqueeze(1), hidden)[1].view_as(h), None
        states = layer.rnn(x.unsqueeze(1), (hidden, c.view_as(hidden)))[1]
        return states[0].view_as(h), states[1].view_as(c)
    weights: Any = (layer.weight_ih, layer.weight_hh, layer.bias_ih, layer.bias_hh)
    if "dropout" in masks:
        call = RecurrentInputs(x, h, weights[0], weights[1], c, bias_hh=layer.bias_hh)
        call = call._replace(dropout=masks["dropout"], mode=layer.mode)
        return cell_step(call, F.linear(x, weights[0], layer.bias_ih), h, c)[:2]
    step: Any = CELL_STEPS[layer.mode]
    if layer.mode == "lstm":
        return step(x, (h, c), *weights)
    return step(x, h, *weights), c
