"""Run a recurrent layer: by one operator where it applies, otherwise step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import raise_value_error
from attnfast._utils.dispatch_log import is_recording, record
from attnfast._utils.torch_private import has_dispatch_mode, has_tangents, is_autocast_on
from attnfast.decoding import Memory
from attnfast.functional import coverage_call
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
from attnfast.ops.arguments import apply_temperature, length_mask
from attnfast.ops.backends import (
    BACKENDS,
    HALF,
    reasons_against,
    try_select_backend,
    unsupported_reason,
)
from attnfast.ops.coverage import CoverageInputs
from attnfast.ops.operators import is_tracing
from attnfast.ops.recurrent import GATES, RECURRENT, WEIGHTS, RecurrentInputs, feed_size
from attnfast.ops.reference import cell_step, dropped
from attnfast.ops.span import rows_at

#: The parameters of a cell.
NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
CELL_STEPS = {"tanh": torch.rnn_tanh_cell, "gru": torch.gru_cell, "lstm": torch.lstm_cell}


class RecurrentState(NamedTuple):
    """State of a recurrent layer between calls; a beam search reorders it.

    ``hidden``: ``[L, B, H]`` for L layers, or ``[B, H]`` for one. ``cell``: the same for an LSTM,
    or None. ``feed [B, F]``: the last output of the attention, if it is fed to the next step, or
    None for zeros. ``history``: the attention's history, or None. ``packed``: the packed
    parameters that the steps share.

    Example:
        >>> attention = attnfast.nn.BahdanauAttention(6, 8, 4)
        >>> layer = attnfast.nn.AttentionGRU(3, 6, 8, attention)
        >>> memory = layer.prepare(torch.randn(2, 5, 8))
        >>> _, state = layer(torch.randn(2, 1, 3), memory)  # one step of a search
        >>> state.index_select(torch.tensor([1, 1, 0])).hidden.shape
        torch.Size([1, 3, 6])
    """

    hidden: Tensor
    cell: Tensor | None = None
    feed: Tensor | None = None
    history: Any = None
    packed: Any = None

    def __reduce__(self):
        return type(self), (*self[:-1], None)  # packed parameters stay in this process

    def index_select(self, index: Tensor) -> RecurrentState:
        """Return the state of the sequences ``index``."""
        axes = {"hidden": -2, "cell": -2, "feed": 0}
        given = {name: axis for name, axis in axes.items() if getattr(self, name) is not None}
        chosen: dict[str, Any] = {
            name: getattr(self, name).index_select(axis, index) for name, axis in given.items()
        }
        if self.history is not None:
            chosen["history"] = self.history.index_select(index)
        return self._replace(**chosen)


class Layer(NamedTuple):
    """A recurrent layer: the parameters of its cell, as in ``nn.GRU``, or a module.

    With ``weight_ih_upper`` it is a stack, whose parameters are stacked, ``[L, ..]``: see
    :class:`attnfast.ops.recurrent.RecurrentInputs`. ``output`` computes the attentional vectors,
    before their tanh if there is one. ``rnn`` is called step by step if its parameters are not
    equivalent to it.
    """

    mode: str
    weight_ih: Tensor | None = None
    weight_hh: Tensor | None = None
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    output: Any = None
    attends_first: bool = True
    rnn: Any = None
    weight_ih_upper: Tensor | None = None
    output_tanh: bool = True

    @classmethod
    def of(cls, rnn: Any, **options: Any) -> Layer:
        """Return the layers of an ``nn.GRU`` or ``nn.LSTM`` in one direction."""
        mode = "lstm" if isinstance(rnn, nn.LSTM) else "gru"
        if not is_plain(rnn, nn.GRU, nn.LSTM) or rnn.bidirectional or rnn.proj_size:
            return cls(mode, rnn=rnn, **options)
        every = [[getattr(rnn, f"{x}_l{i}", None) for x in NAMES] for i in range(rnn.num_layers)]
        return cls.stack(mode, every, **options)

    @classmethod
    def of_cells(cls, *cells: Any, **options: Any) -> Layer:
        """Return the layer of an ``nn.GRUCell``, ``nn.LSTMCell`` or ``nn.RNNCell``, or a stack."""
        every = [[getattr(cell, x) for x in NAMES] for cell in cells]
        weight_hh = every[0][1]
        gates = weight_hh.shape[0] // weight_hh.shape[1]
        mode = next(mode for mode, number in GATES.items() if number == gates)
        return cls.stack(mode, every, **options)

    @classmethod
    def stack(cls, mode: str, every: Sequence[Sequence[Any]], **options: Any) -> Layer:
        """Return a stack of layers; each item has one layer's parameters, ordered as NAMES."""
        if len(every) == 1:
            return cls(mode, *every[0], **options)
        weight_ih, *rest = zip(*every)
        of_all: list[Any] = [None if x[0] is None else torch.stack(x) for x in rest]
        options["weight_ih_upper"] = torch.stack(weight_ih[1:])
        return cls(mode, weight_ih[0], *of_all, **options)

    def at(self, number: int) -> Layer:
        """Return one of the layers of a stack."""
        if self.weight_ih_upper is None:
            return self
        own = {x: getattr(self, x) for x in NAMES[1:]}
        weight = self.weight_ih_upper[number - 1] if number else self.weight_ih
        own = {x: None if y is None else y[number] for x, y in own.items()}
        return self._replace(**own, weight_ih=weight, weight_ih_upper=None)

    def feed_size(self, features: int) -> int:
        """Return the number of features that the layer reads in addition to its inputs."""
        size = self.rnn.input_size if self.weight_ih is None else self.weight_ih.shape[1]
        return size - features


class Packed(NamedTuple):
    """Parameters packed by a backend, and the versions that show later changes."""

    backend: str
    tensor: Tensor
    parameters: list[Tensor | None]  # referenced, so that their memory is not reused
    versions: list[int]


class LayerOutputs(NamedTuple):
    """Outputs of a layer at every step, ``[B, T, ..]``, or None.

    For a stack, states and cells are those of all layers, ``[L, B, T, H]``.
    """

    states: Tensor
    cells: Tensor | None
    contexts: Tensor | None
    weights: Tensor | None
    attentional: Tensor | None
    history: Any
    packed: Packed | None = None

    @property
    def output(self) -> Tensor:
        """The states ``[B, T, H]`` of the only or the last layer."""
        return self.states if self.states.dim() == 3 else self.states[-1]


def select_layer_backend(
    attention: Any, memory: Memory | None, like: Tensor, requested: str | None = None,
    history: Any = None, operator: str = RECURRENT.name, feature: str = "",
) -> tuple[str | None, str]:  # fmt: skip
    """Return the backend whose operator runs a whole layer; without one, None and the reason."""
    if is_autocast_on():
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
        if memory.key.dtype != like.dtype or memory.key.device != like.device:
            return None, "keys and inputs differ in dtype or device"
        requested = memory.backend
    half = like.dtype in HALF and like.device.type == "cpu"
    dtype = torch.float32 if half else like.dtype
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


def upcast_halves(call: Any) -> Any:
    """Return an operator's call in float32 if it is in half precision; weights stay bfloat16."""
    if not _is_half(call.hidden):
        return call
    bfloat16_names = WEIGHTS if call.hidden.dtype == torch.bfloat16 else ()
    half = {n: x for n, x in call._asdict().items() if _is_half(x) and n not in bfloat16_names}
    return call._replace(**{n: x.float() for n, x in half.items()})


def _is_half(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in HALF


#: The kinds of attention that the operator supports.
FUSED_ATTENTIONS = (
    BahdanauAttention, LuongAttention, LocalAttention, CoverageAttention, LocationAwareAttention,
    ForwardAttention,
)  # fmt: skip

#: Number of elements of parameters, keys and values from which a single step with gradients is
#: faster in a loop: a loop packs no parameters and computes the key gradients of all steps at once.
LARGE = 1 << 20


def layer_feature(layer: Layer, drops_at_steps: bool = False, is_gated: bool = False) -> str:
    """Return the first feature of a layer that not every backend has, or "".

    ``drops_at_steps``: whether it has dropout with other masks at every step; ``is_gated``: whether
    it has a gate on its context.
    """
    if layer.weight_ih_upper is not None:
        return "several layers"
    if drops_at_steps:
        return "dropout that changes from step to step"
    if is_gated:
        return "a gate on its context"
    return "" if layer.output_tanh else "an output without tanh"


def split_gate(attention: Any) -> tuple[Any, nn.Linear | None]:
    """Return an attention without its gate, and the gate's layer; None if no operator gates it."""
    if not isinstance(attention, GatedAttention):
        return attention, None
    if not is_plain(attention, GatedAttention) or not is_plain(attention.gate, nn.Linear):
        return attention, None
    return attention.attention, attention.gate


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
    inner, gate = split_gate(attention)
    feature = layer_feature(layer, bool(given.keys() - {"dropout"}), gate is not None)
    if plain and single and feature:
        reason = f"a single step of a layer with {feature} runs in a loop"
    elif plain and single and torch.is_grad_enabled() and _is_large(layer, memory):
        reason = "a single step of a large layer with gradients runs in a loop"
    elif plain:
        backend, reason = select_layer_backend(
            inner, memory, input, history=state.history, feature=feature
        )
        if single and backend is not None and not BACKENDS[backend].packs:
            backend, reason = None, f"{backend} keeps no packed parameters for single steps"
    ran = f"one operator on {backend}" if backend else "step by step"
    record("recurrent layer", ran, reason)
    if backend is None and input.shape[1] == 0:
        return _run_no_step(layer, input, state, attention, memory, need_weights)
    if backend is None:
        return _run_steps(
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
        packed = _packed(call, backend, state.packed)
        call = call._replace(packed=None if packed is None else packed.tensor)
    done = dispatch.run(RECURRENT, upcast_halves(call), backend)
    lengths = target_lengths if target_mask is None else target_mask.sum(-1)
    if isinstance(history, SpanState):
        history = history.after(input.shape[1] if lengths is None else lengths)
    if isinstance(history, CumulativeState):
        log_weights = None if call.transition_prob is None else done.log_weights
        history = history._after(done.weights, log_weights, done.coverage, done.loss, lengths)
    if _is_half(input):  # rounded once; a history keeps its sums
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


def _packed(call: RecurrentInputs, backend: str, before: Packed | None) -> Packed | None:
    """Return the backend's packed parameters; reuse ``before`` if its parameters are unchanged."""
    names = (*NAMES, "weight_query", "weight_output")
    parameters = [getattr(call, name) for name in names]
    given = [x for x in parameters if x is not None]
    if any(x.is_inference() for x in given):
        return None  # inference tensors have no version counter
    versions = [x._version for x in given]
    if (
        isinstance(before, Packed)
        and (before.backend, before.versions) == (backend, versions)
        and all(x is y for x, y in zip(parameters, before.parameters))
    ):
        return before
    wide = upcast_halves(call)
    tensor = BACKENDS[backend].pack(*[getattr(wide, x) for x in names], feed_size(call), call.mode)
    return None if tensor is None else Packed(backend, tensor, parameters, versions)


def _run_steps(
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


def _run_no_step(
    layer: Layer, input: Tensor, state: Any, attention: Any, memory: Any, need_weights: bool
) -> LayerOutputs:
    """Return the outputs for an input without steps: those of one step, cut to length 0."""
    if getattr(attention, "has_history", False) and state.history is None:
        inner: Any = attention
        while not hasattr(inner, "start"):  # wrapped
            inner = inner.attention
        state = state._replace(history=inner.start(memory))
    step = _run_steps(
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


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return sequences ``[B, T, E]`` in reverse order; padding stays at the end."""
    if lengths is None:
        return x.flip(1)
    steps = torch.arange(x.shape[1], device=x.device)
    index = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    return x.gather(1, index.unsqueeze(-1).expand_as(x))


def run_rnn(
    rnn: nn.RNNBase,
    input: Tensor,
    hx: Any = None,
    lengths: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Any] | None:
    """Return the output and state of an ``nn.GRU`` or ``nn.LSTM``, or None if PyTorch is as fast.

    Args:
        rnn: the module whose parameters, layers, directions and dropout are used.
        input: ``[B, T, E]``.
        hx: ``[L, B, H]``, a pair of them for an LSTM; None means zeros.
        lengths: ``[B]``, int64: states beyond the length are 0.
        backend: the only one to try, if given.
    """
    lstm = isinstance(rnn, nn.LSTM)
    reason = ""
    if not is_plain(rnn, nn.GRU, nn.LSTM) or rnn.proj_size or not rnn.batch_first:
        reason = "it is no plain nn.GRU or nn.LSTM, batch first and without projections"
    elif (lstm and lengths is None) or input.is_cuda:
        reason = "oneDNN is as fast for an nn.LSTM without lengths, and cuDNN faster"
    elif input.dim() != 3:
        reason = "its input is not [B, T, E]"
    else:
        _, reason = select_layer_backend(None, None, input, backend)
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
            layer = Layer("lstm" if lstm else "gru", **parameters)  # type: ignore[arg-type]
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
