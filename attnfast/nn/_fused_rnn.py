"""Run a recurrent layer by one operator if one can, else step by step; say why."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import raise_value_error
from attnfast._utils.dispatch_log import is_recording, record
from attnfast._utils.torch_private import has_dispatch_mode, has_tangents, is_autocast_on
from attnfast.decoding import Memory
from attnfast.functional import coverage_call
from attnfast.nn._layer import NAMES, Layer, LayerOutputs, RecurrentState
from attnfast.nn._layer_steps import run_no_step, run_steps
from attnfast.nn._linear import is_plain, not_plain_reason
from attnfast.nn.attention import BahdanauAttention, LuongAttention
from attnfast.nn.local import LocalAttention, SpanState
from attnfast.nn.stateful import (
    CoverageAttention,
    CumulativeState,
    ForwardAttention,
    HistoryAttention,
    LocationAwareAttention,
    last_of,
)
from attnfast.nn.wrappers import GatedAttention
from attnfast.ops import dispatch
from attnfast.ops.arguments import apply_temperature
from attnfast.ops.backends import (
    BACKENDS,
    HALF,
    LAYER_FEATURES,
    reasons_against,
    try_select_backend,
    unsupported_reason,
)
from attnfast.ops.coverage import CoverageInputs
from attnfast.ops.operators import is_tracing
from attnfast.ops.packing import is_half, pack_parameters, upcast_halves
from attnfast.ops.recurrent import RECURRENT, RecurrentInputs, feed_size
from attnfast.ops.span import rows_at


def select_layer_backend(
    attention: Any, memory: Memory | None, like: Tensor, requested: str | None = None,
    history: Any = None, operator: str = RECURRENT.name, feature: str = "", autocasts: bool = False,
) -> tuple[str | None, str]:  # fmt: skip
    """Return the backend whose operator runs a whole layer; without one, None and the reason.

    ``autocasts``: whether the caller casts the arguments, so that autocast is no obstacle.
    """
    if is_autocast_on() and not autocasts:
        return None, "autocast is on"
    if has_tangents():
        return None, "forward-mode differentiation is on"
    if not is_tracing() and has_dispatch_mode():
        return None, "a dispatch mode is active, such as make_fx's or vmap's"
    has_history = isinstance(attention, HistoryAttention)
    if attention is not None:
        if isinstance(attention, GatedAttention) and split_gate(attention)[1] is None:
            return None, "GatedAttention or its gate has hooks or a forward of its own"
        if not is_plain(attention, *FUSED_ATTENTIONS):
            return None, not_plain_reason(attention, *FUSED_ATTENTIONS)
        if memory is None or not isinstance(
            history, (CumulativeState if has_history else SpanState, type(None))
        ):
            return None, "the attention's memory or history is another module's"
        is_local = isinstance(attention, LocalAttention)
        if is_local and (attention.slope is None or attention.sigma or attention.span.stride != 1):
            return None, "the operator has windows at a fixed slope, without sigma or stride"
        if not is_plain(attention.query_proj, nn.Linear, nn.Identity) or memory.key.dim() != 3:
            return None, "its query projection is no plain nn.Linear, or its keys have heads"
        same = autocasts or memory.key.dtype == like.dtype
        if not same or memory.key.device != like.device:
            return None, "keys and inputs differ in dtype or device"
        requested = memory.backend
    dtype = torch.float32 if like.dtype in HALF else like.dtype
    backend = try_select_backend(requested, like.device, dtype, operator, has_history, feature)
    normalisation = "softmax" if attention is None or has_history else attention.normalisation
    if backend is not None and not dispatch.supports_normalisation(normalisation, backend):
        return None, f"not {backend}: its kernels support only softmax"
    if backend is not None:
        return backend, ""
    if not is_recording():
        return None, "no backend has the operator"
    properties = like.device, dtype, operator, False, 0, has_history, feature
    if requested is None:
        return None, "; ".join(reasons_against(None, *properties))
    reason = unsupported_reason(requested, *properties) or "plain PyTorch"
    return None, f"{requested}, as requested: {reason}"


#: The kinds of attention that the operator supports.
FUSED_ATTENTIONS = (
    BahdanauAttention, LuongAttention, LocalAttention, CoverageAttention, LocationAwareAttention,
    ForwardAttention,
)  # fmt: skip

#: Number of elements of parameters, keys and values from which a single step with gradients is
#: faster in a loop: a loop packs no parameters and computes the key gradients of all steps at once.
LARGE = 1 << 20


def layer_feature(layer: Layer, drops_at_steps: bool = False, is_gated: bool = False) -> str:
    """Return what a layer has beyond its cell and attention, one of :data:`LAYER_FEATURES` or "".

    ``drops_at_steps``: whether it has dropout with other masks at every step; ``is_gated``: whether
    it has a gate on its context.
    """
    has = drops_at_steps, is_gated, not layer.output_tanh, layer.weight_ih_upper is not None
    return next((name for name, given in zip(LAYER_FEATURES, has) if given), "")


def split_gate(attention: Any) -> tuple[Any, nn.Linear | None]:
    """Return an attention without its gate, and the gate's layer; None if no operator gates it."""
    if not isinstance(attention, GatedAttention):
        return attention, None
    if not is_plain(attention, GatedAttention) or not is_plain(attention.gate, nn.Linear):
        return attention, None
    return attention.attention, attention.gate


def runs_under_autocast(x: Tensor) -> bool:
    """Return whether the operator can run a layer under autocast; on a CPU only to bfloat16."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return False
    dtype = torch.get_autocast_dtype(device)
    known = (torch.bfloat16,) if device == "cpu" else HALF
    return dtype in known and x.dtype in (torch.float32, dtype)


def _is_large(layer: Layer, memory: Any) -> bool:
    read = [layer.weight_ih, layer.weight_hh]
    read += [memory.key, memory.value] if isinstance(memory, Memory) else []
    return sum([x.numel() for x in read if x is not None]) >= LARGE


def run_layer(
    layer: Layer,
    input: Tensor,
    state: Any,
    attention: Any = None,
    memory: Memory | None = None,
    *,
    target_lengths: Tensor | None = None,
    target_mask: Tensor | None = None,
    need_weights: bool = False,
    zoneout: bool = False,
    detach_history: bool = False,
    **dropouts: Tensor | None,
) -> LayerOutputs:
    """Run a layer, or a stack, over ``input [B, T, E]``, starting from ``state``.

    ``state.hidden`` is ``[B, H]``, or ``[L, B, H]`` for a stack. ``target_mask [B, T]`` is for
    attention whose history needs it; ``zoneout``, ``detach_history`` and ``dropouts``, masks by
    name, are those of :class:`attnfast.ops.recurrent.RecurrentInputs`. One operator runs the layer
    if it can, otherwise a loop over steps of PyTorch's cells. A single step of one layer keeps the
    packed parameters for the next step, if the backend packs them.
    """
    single = input.shape[1] == 1
    backend, reason, output = None, "its cell or output layer is no plain module", layer.output
    plain = layer.rnn is None and (output is None or is_plain(output, nn.Linear))
    given = {name: x for name, x in dropouts.items() if x is not None}
    bare = attention is None and output is None and layer.weight_ih_upper is None
    whole = not (single or given) and target_lengths is None
    if bare and whole and plain and input.is_cuda and not is_tracing():
        record("recurrent layer", "PyTorch", "cuDNN is faster for a layer without attention")
        return run_torch(layer, input, state)
    inner, gate = split_gate(attention)
    autocasts = runs_under_autocast(input) and not single
    feature = layer_feature(layer, bool(given.keys() - {"dropout"}), gate is not None)
    if plain and single and feature:
        reason = f"a single step of a layer with {feature} runs in a loop"
    elif plain and single and torch.is_grad_enabled() and _is_large(layer, memory):
        reason = "a single step of a large layer with gradients runs in a loop"
    elif plain:
        backend, reason = select_layer_backend(
            inner, memory, input, history=state.history, feature=feature, autocasts=autocasts
        )
        if single and backend is not None and not BACKENDS[backend].packs:
            backend, reason = None, f"{backend} keeps no packed parameters for single steps"
    ran = f"one operator on {backend}" if backend else "step by step"
    record("recurrent layer", ran, reason)
    if backend is None and input.shape[1] == 0:
        return run_no_step(layer, input, state, attention, memory, need_weights)
    if backend is None:
        return run_steps(
            layer, input, state, attention, memory, target_lengths=target_lengths,
            target_mask=target_mask, need_weights=need_weights, dropouts=given,
            zoneout=zoneout, detach_history=detach_history,
        )  # fmt: skip
    terms: dict[str, Any] = {}
    history = packed = None
    if attention is not None:
        assert memory is not None
        terms, history = attention_arguments(
            inner, memory, backend, state.history, input, target_mask=target_mask
        )
        terms["feed"] = None if layer.attends_first else state.feed
        if gate is not None:
            terms |= _gate_arguments(gate, layer, memory.value.shape[-1])
    call = RecurrentInputs(
        input, state.hidden, layer.weight_ih, layer.weight_hh,  # type: ignore[arg-type]
        state.cell, bias_ih=layer.bias_ih, bias_hh=layer.bias_hh,
        weight_output=getattr(output, "weight", None), bias_output=getattr(output, "bias", None),
        target_lengths=target_lengths, weight_ih_upper=layer.weight_ih_upper, mode=layer.mode,
        zoneout=zoneout, detach_history=detach_history, attends_first=layer.attends_first,
        output_activation="tanh" if layer.output_tanh else "identity", **terms, **given,  # type: ignore[arg-type]
    )  # fmt: skip
    if single and not is_tracing():
        packed = pack_parameters(call, feed_size(call), backend, state.packed)
        call = call._replace(packed=None if packed is None else packed.tensor)
    call = upcast_halves(call, backend, autocasts)
    done = dispatch.run(RECURRENT, call, backend)
    lengths = target_lengths if target_mask is None else target_mask.sum(-1)
    if isinstance(history, SpanState):
        history = history._after(input.shape[1] if lengths is None else lengths)
    if isinstance(history, CumulativeState):
        log_weights = None if call.transition_prob is None else done.log_weights
        history = history._after(done.weights, log_weights, done.coverage, done.loss, lengths)
    if is_half(input) and not autocasts:  # rounded once; a history keeps its sums
        names = ("states", "cells", "contexts", "weights", "attentional")
        done = done._replace(**{x: getattr(done, x).to(input.dtype) for x in names})
    return LayerOutputs(
        done.states,
        done.cells if layer.mode == "lstm" else None,
        None if attention is None else done.contexts,
        done.weights if attention is not None and need_weights else None,
        None if output is None else done.attentional,
        history,
        packed,
    )


def run_torch(layer: Layer, input: Tensor, state: Any) -> LayerOutputs:
    """Run a layer without attention by PyTorch's function, cuDNN's on a GPU.

    Of the cells, the last alone is returned, ``[B, 1, H]``.
    """
    parameters = [x for x in (getattr(layer, name) for name in NAMES) if x is not None]
    options = len(parameters) == 4, 1, 0.0, torch.is_grad_enabled(), False, True
    h, cell = state.hidden.unsqueeze(0), None
    with warnings.catch_warnings():  # that the weights of a step are not one piece of memory
        warnings.simplefilter("ignore")
        if layer.mode == "lstm":
            states, _, cell = torch.lstm(input, (h, state.cell.unsqueeze(0)), parameters, *options)
        else:
            function = torch.gru if layer.mode == "gru" else torch.rnn_tanh
            states, _ = function(input, h, parameters, *options)
    cells = None if cell is None else cell.transpose(0, 1)
    return LayerOutputs(states, cells, None, None, None, state.history)


def _gate_arguments(gate: nn.Linear, layer: Layer, features: int) -> dict[str, Tensor | None]:
    """Return the arguments of a gate on contexts, which all features share if it has one output."""
    weight, like = gate.weight, layer.weight_hh
    assert like is not None
    sizes, H = tuple(weight.shape), like.shape[-1]
    if sizes not in ((1, H), (features, H)) or weight.dtype != like.dtype:
        wanted = f"{like.dtype} of {H} features to 1 or {features}"
        found = f"{weight.dtype} of {sizes[1]} to {sizes[0]}"
        raise_value_error("attention.gate", wanted, found)
    bias = None if gate.bias is None else gate.bias.expand(features)
    return {"weight_gate": weight.expand(features, -1), "bias_gate": bias}


def attention_arguments(
    attention: Any,
    memory: Memory,
    backend: str,
    history: Any,
    input: Tensor,
    *,
    target_mask: Tensor | None = None,
) -> tuple[dict[str, Any], Any]:
    """Return the attention's arguments of a call for inputs ``[B, T, E]``, and its history.

    For a window the history is the one after the call, otherwise the one before it.
    """
    terms: dict[str, Any] = {}
    if isinstance(attention, HistoryAttention):
        history = attention.start(memory) if history is None else history
        terms = _history_arguments(attention, history, memory, input, target_mask)
    elif isinstance(attention, LocalAttention):
        history = history or SpanState()
        terms["key_bounds"] = _within(attention, history, memory, input)
    return _common_arguments(
        attention, memory, backend, terms.get("filters") is None
    ) | terms, history


def _common_arguments(
    attention: Any, memory: Memory, backend: str, with_exponentials: bool
) -> dict[str, Any]:
    """Return the arguments common to all kinds of attention, on request with key exponentials."""
    exponentials, shared_keys = None, None if is_tracing() else memory.shared_keys
    if shared_keys is not None:
        shared_keys.check_unchanged()
        if with_exponentials and shared_keys.backend == backend:
            exponentials = shared_keys.key_exponentials()
    scale = attention.scale if attention.scale is not None else memory.key.shape[-1] ** -0.5
    (scale,) = apply_temperature(attention.temperature, scale)
    query = attention.query_proj
    return {
        "key": memory.key, "value": memory.value, "score_vector": memory.score_vector,
        "lengths": memory.lengths, "mask": memory.mask, "score": memory.score, "scale": scale,
        "normalisation": attention.normalisation,
        "key_exponentials": exponentials,
        "weight_query": getattr(query, "weight", None), "bias_query": getattr(query, "bias", None),
    }  # fmt: skip


def _history_arguments(
    attention: HistoryAttention,
    history: CumulativeState,
    memory: Memory,
    input: Tensor,
    target_mask: Tensor | None,
) -> dict[str, Any]:
    """Return the arguments of a layer's call for attention with a history."""
    mask = memory.mask
    if target_mask is not None:
        seen = target_mask.unsqueeze(-1)
        mask = seen if mask is None else seen & mask
    of, state = attention._terms(memory), history._state()
    query = input.new_empty(*input.shape[:2], memory.key.shape[-1])
    call = CoverageInputs(
        query, memory.key, memory.value, memory.score_vector, None, mask, memory.lengths,
        of.get("filters"), of.get("projection"), of.get("penalty"), of.get("fertility"),
        of.get("transition_prob"),  # type: ignore[arg-type]
        state["coverage"], state.get("previous"), None, memory.score,  # type: ignore[arg-type]
        of.get("normalisation", "softmax"),
    )  # fmt: skip
    options = of.get("coverage_weight"), of.get("channels", "previous"), state.get("log_previous")
    call = coverage_call(call, attention.temperature, *options)
    names = (
        "score_vector", "mask", "filters", "projection", "penalty", "inverse_fertility",
        "transition_prob", "coverage", "previous", "scale", "normalisation",
    )  # fmt: skip
    return {x: getattr(call, x) for x in names}


def _within(attention: LocalAttention, history: SpanState, memory: Memory, input: Tensor) -> Tensor:
    """Return the range of keys visible to each row of a window, ``[1 or B, T, 2]``."""
    T, Tk = input.shape[1], memory.key.shape[1]
    positions = attention.positions(history.rows, T, input.device)
    seen = attention.span.locate(rows_at(positions, input, Tk, memory.lengths), Tk)
    return torch.stack([seen.start, seen.stop], -1)


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return sequences ``[B, T, E]`` in reverse order; padding stays at the end."""
    if lengths is None:
        return x.flip(1)
    steps = torch.arange(x.shape[1], device=x.device)
    index = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    return x.gather(1, index.unsqueeze(-1).expand_as(x))


#: The layers of PyTorch whose cells the operator has, with its names for them.
MODES = {nn.GRU: "gru", nn.LSTM: "lstm", nn.RNN: "tanh"}


def run_rnn(
    rnn: nn.RNNBase,
    input: Tensor,
    hx: Any = None,
    lengths: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Any] | None:
    """Return the output and state of an ``nn.GRU``, ``nn.LSTM`` or ``nn.RNN``, or None.

    None means that PyTorch is as fast.

    Args:
        rnn: the module whose parameters, layers, directions and dropout are used.
        input: ``[B, T, E]``.
        hx: ``[L, B, H]``, a pair of them for an LSTM; None means zeros.
        lengths: ``[B]``, int64: states beyond the length are 0.
        backend: the only one to try, if given.
    """
    lstm = isinstance(rnn, nn.LSTM)
    reason = ""
    is_tanh = getattr(rnn, "nonlinearity", "tanh") == "tanh"
    if not is_plain(rnn, *MODES) or rnn.proj_size or not rnn.batch_first or not is_tanh:
        reason = "it is no plain nn.GRU, nn.LSTM or nn.RNN, batch first and without projections"
    elif (lstm and lengths is None) or input.is_cuda:
        reason = "oneDNN is as fast for an nn.LSTM without lengths, and cuDNN faster"
    elif input.dim() != 3:
        reason = "its input is not [B, T, E]"
    else:
        autocasts = runs_under_autocast(input)
        _, reason = select_layer_backend(None, None, input, backend, autocasts=autocasts)
    if reason:
        record(type(rnn).__name__, "PyTorch", reason)
        return None
    directions = 2 if rnn.bidirectional else 1
    h, c = hx if lstm and hx is not None else (hx, None)
    zeros = input.new_zeros(input.shape[0], rnn.hidden_size)
    hidden, cells, x = [], [], input
    for number in range(rnn.num_layers):
        if number:
            x = F.dropout(x, rnn.dropout, rnn.training)
        outputs = []
        for direction in range(directions):
            place, suffix = number * directions + direction, "_reverse" * direction
            parameters = {y: getattr(rnn, f"{y}_l{number}{suffix}", None) for y in NAMES}
            mode = next(mode for kind, mode in MODES.items() if isinstance(rnn, kind))
            layer = Layer(mode, **parameters)  # type: ignore[arg-type]
            first = zeros if h is None else h[place], zeros if c is None else c[place]
            state = RecurrentState(first[0], first[1] if lstm else None)
            read = _reversed(x, lengths) if direction else x
            steps = run_layer(layer, read, state, target_lengths=lengths)
            hidden.append(last_of(steps.states, first[0], lengths))
            if steps.cells is not None:
                cells.append(last_of(steps.cells, first[1], lengths))
            states = steps.states
            outputs.append(_reversed(states, lengths) if direction else states)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    last = torch.stack(hidden)
    return x, (last, torch.stack(cells)) if lstm else last
