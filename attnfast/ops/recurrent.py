"""A recurrent layer that attends at every step: one operator for all of them.

.. code-block:: text

    attends first   c_t = attend(h_{t−1});  h_t = cell([x_t; c_t], h_{t−1})
    attends last    h_t = cell([x_t; f_{t−1}], h_{t−1});  c_t = attend(h_t);  f_t = c_t
    input feeding   the same with f_t = tanh(W_o [c_t; h_t] + b_o)

with the query ``W_q h + b_q``, or h itself. The cells and the names and shapes of their parameters
are PyTorch's. Layers above the first read the states of the layer below, and h is the state of the
last layer::

    h¹_t = cell([x_t; ·], h¹_{t−1});  hˡ_t = cell(hˡ⁻¹_t, hˡ_{t−1})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import check_choice, check_exact, check_tensor, raise_value_error
from attnfast.ops.attention import NORMALISATIONS, AttentionInputs
from attnfast.ops.attention import check as check_attention
from attnfast.ops.coverage import NORMALISATIONS as WITH_HISTORY
from attnfast.ops.coverage import CoverageInputs
from attnfast.ops.coverage import check as check_coverage
from attnfast.ops.cuda_graphs import Graphs
from attnfast.ops.operators import LIBRARIES, Operator

#: The cells: the number of gates in the parameters, and of values per unit that the backward reads.
GATES = {"tanh": 1, "gru": 3, "lstm": 4}
SAVED_GATES = {"tanh": 0, "gru": 4, "lstm": 4}

#: The activations of an attentional vector.
OUTPUT_ACTIVATIONS = ("tanh", "identity")

#: The weights of matrix products: they may all be bfloat16 if the other tensors are float32.
WEIGHTS = (
    "weight_ih", "weight_hh", "weight_ih_upper", "weight_query", "weight_output", "weight_gate",
    "weight_readout", "weight_vocab",
)  # fmt: skip


class RecurrentInputs(NamedTuple):
    """The arguments of the operator, float32 or float64.

    Weights may be bfloat16 with float32 inputs: their products round the inputs to bfloat16, where
    the processor has the instructions, and accumulate in float32.

    ``input [B, T, E]``; ``hidden [B, H]`` and an LSTM's ``cell [B, H]``, the state before the first
    step; ``feed [B, F]``, the vector fed to the first step of a layer that attends last, None for
    zeros. With G gates: ``weight_ih [G·H, E + F]``, whose last F columns read the fed vector,
    ``weight_hh [G·H, H]``, ``bias_ih`` and ``bias_hh [G·H]``. F is the size of a context or, with
    ``weight_output [F, Dv + H]`` and ``bias_output [F]``, of an attentional vector.

    Attention: ``key [B, Tk, A]``, ``value [B, Tk, Dv]``, ``score_vector [A]`` of an additive score,
    ``weight_query [A, H]`` and ``bias_query [A]``, ``lengths [B]`` of the keys, ``mask [B, T,
    Tk]``, whose B and T may be 1, ``key_bounds [B, T, 2]``, whose B may be 1, scale and
    score are those of :class:`AttentionInputs`. Without a key this is a plain recurrent layer.

    With ``coverage`` and ``previous [B, Tk]``, the history before the first step, attention has a
    history, and no span: ``filters [K, C, taps]``, ``projection [A, K]``, ``penalty [1]``,
    ``inverse_fertility [B, Tk]``, ``transition_prob [B, T]`` and ``normalisation`` are those of
    :class:`CoverageInputs`, where ``previous`` holds logarithms if there is a transition. Steps at
    ``target_lengths`` and beyond leave the history unchanged. With ``detach_history`` no gradient
    reaches a step through the history of the steps after it.

    With ``weight_gate [Dv, H]`` and ``bias_gate [Dv]`` a context is multiplied by σ(W_g h + b_g),
    where h is the state that becomes its query (Xu et al., ICML 2015, arXiv:1502.03044).
    ``output_activation`` is that of the attentional vectors, "tanh" or "identity".

    ``target_lengths [B]``, int64: results at these steps and beyond are 0.

    Dropout masks are factors: ``dropout [B, H]``, the same at all steps, of the state that
    ``weight_hh`` reads; ``dropout_state [B, T, H]`` of the cell's new state, whatever reads it;
    ``dropout_cell [B, T, H]`` of an LSTM's new cell state, once the state is computed from it;
    ``dropout_query [B, T, H]`` of the state that becomes the query; ``dropout_feed [B, T, F]`` of
    the vector that a step is fed; ``dropout_joined [B, T, Dv + H]`` of [c; h], which
    ``weight_output`` reads; ``dropout_output [B, T, F]`` of the attentional vectors. With
    ``zoneout`` (Krueger et al., ICLR 2017, arXiv:1606.01305) a state or cell state and its mask m
    become m · new + (1 − m) · previous.

    With ``weight_ih_upper [L − 1, G·H, H]`` there are L layers, two or more; ``hidden``, ``cell``,
    ``weight_hh``, ``bias_ih``, ``bias_hh``, ``dropout``, ``dropout_state``, ``dropout_cell`` and
    the results ``states``, ``cells`` and ``gates`` are stacked, ``[L, ..]``. ``dropout_between [L −
    1, B, T, H]`` is of the inputs of the layers above the first. ``key_exponentials`` is that of
    :class:`AttentionInputs`; ``packed`` is the result of the same backend's ``pack`` for the
    parameters.
    """

    input: Tensor
    hidden: Tensor
    weight_ih: Tensor
    weight_hh: Tensor
    cell: Tensor | None = None
    feed: Tensor | None = None
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    score_vector: Tensor | None = None
    weight_query: Tensor | None = None
    bias_query: Tensor | None = None
    weight_output: Tensor | None = None
    bias_output: Tensor | None = None
    mask: Tensor | None = None
    lengths: Tensor | None = None
    key_bounds: Tensor | None = None
    target_lengths: Tensor | None = None
    dropout: Tensor | None = None
    weight_ih_upper: Tensor | None = None
    dropout_between: Tensor | None = None
    dropout_output: Tensor | None = None
    dropout_state: Tensor | None = None
    dropout_cell: Tensor | None = None
    dropout_query: Tensor | None = None
    dropout_feed: Tensor | None = None
    dropout_joined: Tensor | None = None
    filters: Tensor | None = None
    projection: Tensor | None = None
    penalty: Tensor | None = None
    inverse_fertility: Tensor | None = None
    transition_prob: Tensor | None = None
    coverage: Tensor | None = None
    previous: Tensor | None = None
    weight_gate: Tensor | None = None
    bias_gate: Tensor | None = None
    key_exponentials: Tensor | None = None
    packed: Tensor | None = None
    mode: str = "gru"
    attends_first: bool = True
    scale: float = 1.0
    score: str = "dot"
    normalisation: str = "softmax"
    zoneout: bool = False
    detach_history: bool = False
    output_activation: str = "tanh"


class RecurrentOutputs(NamedTuple):
    """Outputs of ``recurrent`` at every step; absent ones have size [0].

    ``states`` and ``cells [B, T, H]``, ``contexts [B, T, Dv]``, ``weights [B, T, Tk]``,
    ``attentional [B, T, F]``; with a history ``coverage [B, Tk]`` after the last step and ``loss
    [B]``, and with a transition ``log_weights [B, T, Tk]``, −inf for 0. Only the backward reads
    ``queries [B, T, A]``, absent if they are the states, ``gates [B, T, S·H]``: r, z, n and
    W_hn h + b_hn of a GRU, i, f, g and o of an LSTM, ``sigmoid_sum [B, T, 1]``, and
    ``context_gates [B, T, Dv]``.
    """

    states: Tensor
    cells: Tensor
    contexts: Tensor
    weights: Tensor
    attentional: Tensor
    coverage: Tensor
    loss: Tensor
    queries: Tensor
    gates: Tensor
    log_weights: Tensor
    sigmoid_sum: Tensor
    context_gates: Tensor


class RecurrentBackward(NamedTuple):
    """The arguments of the backward: 64, the most that a schema of PyTorch can have.

    ``bias_gate`` is not among them: its gradient comes with that of ``weight_gate``.
    """

    grad_states: Tensor
    grad_cells: Tensor | None
    grad_contexts: Tensor | None
    grad_weights: Tensor | None
    grad_attentional: Tensor | None
    grad_coverage: Tensor | None
    grad_loss: Tensor | None
    grad_log_weights: Tensor | None
    input: Tensor
    hidden: Tensor
    weight_ih: Tensor
    weight_hh: Tensor
    cell: Tensor | None
    feed: Tensor | None
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    key: Tensor | None
    value: Tensor | None
    score_vector: Tensor | None
    weight_query: Tensor | None
    bias_query: Tensor | None
    weight_output: Tensor | None
    bias_output: Tensor | None
    lengths: Tensor | None
    key_bounds: Tensor | None
    target_lengths: Tensor | None
    dropout: Tensor | None
    weight_ih_upper: Tensor | None
    dropout_between: Tensor | None
    dropout_output: Tensor | None
    dropout_state: Tensor | None
    dropout_cell: Tensor | None
    dropout_query: Tensor | None
    dropout_feed: Tensor | None
    dropout_joined: Tensor | None
    filters: Tensor | None
    projection: Tensor | None
    penalty: Tensor | None
    inverse_fertility: Tensor | None
    transition_prob: Tensor | None
    coverage: Tensor | None
    previous: Tensor | None
    weight_gate: Tensor | None
    states: Tensor
    cells: Tensor
    contexts: Tensor
    weights: Tensor
    attentional: Tensor
    queries: Tensor
    gates: Tensor
    log_weights: Tensor
    sigmoid_sum: Tensor
    context_gates: Tensor
    mode: str
    attends_first: bool
    scale: float
    score: str
    normalisation: str
    zoneout: bool
    detach_history: bool
    output_activation: str
    need_grad_input: bool
    need_grad_parameters: bool
    need_grad_key: bool


class RecurrentGradients(NamedTuple):
    """Gradients of ``recurrent``; those that are absent or not needed have size [0]."""

    grad_input: Tensor
    grad_hidden: Tensor
    grad_cell: Tensor
    grad_feed: Tensor
    grad_weight_ih: Tensor
    grad_weight_hh: Tensor
    grad_bias_ih: Tensor
    grad_bias_hh: Tensor
    grad_key: Tensor
    grad_value: Tensor
    grad_score_vector: Tensor
    grad_weight_query: Tensor
    grad_bias_query: Tensor
    grad_weight_output: Tensor
    grad_bias_output: Tensor
    grad_weight_ih_upper: Tensor
    grad_filters: Tensor
    grad_projection: Tensor
    grad_penalty: Tensor
    grad_inverse_fertility: Tensor
    grad_transition_prob: Tensor
    grad_coverage: Tensor
    grad_previous: Tensor
    grad_weight_gate: Tensor
    grad_bias_gate: Tensor


#: The fields that :attr:`RecurrentBackward.need_grad_parameters` stands for.
PARAMETERS = (
    "weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_query", "bias_query", "weight_output",
    "bias_output", "weight_ih_upper", "filters", "projection", "penalty", "weight_gate",
    "bias_gate",
)  # fmt: skip


#: The tensors that every layer has.
PER_LAYER = (
    "hidden",
    "cell",
    "weight_hh",
    "bias_ih",
    "bias_hh",
    "dropout",
    "dropout_state",
    "dropout_cell",
    "states",
    "cells",
    "gates",
)

#: The arguments that sizes are read from, without the axis of layers in front.
RANKS: dict[str, tuple[str, ...]] = {
    "hidden": ("B", "H"), "key": ("B", "Tk", "A"), "value": ("B", "Tk", "Dv"),
    "weight_query": ("A", "H"), "weight_output": ("F", "Dv + H"), "mask": ("B", "T", "Tk"),
    "key_bounds": ("B", "T", "2"),
}  # fmt: skip


def layers(call: Any) -> tuple[int, ...]:
    """Return the leading sizes of the tensors that every layer has: (L,), or () for one layer."""
    return () if call.weight_ih_upper is None else tuple(call.hidden.shape[:1])


def feed_size(call: Any) -> int:
    """Return F, the number of features fed to a step."""
    if call.weight_output is not None:
        return call.weight_output.shape[0]
    return 0 if call.value is None else call.value.shape[-1]


def check_packed(packed: Tensor, like: Tensor) -> None:
    """Raise unless ``packed`` is a byte tensor on the device of ``like``."""
    check_tensor("packed", packed)
    if packed.dtype != torch.uint8 or packed.device != like.device:
        raise_value_error("packed", "a result of the backend's pack", packed.dtype)


def dtype_of_weights(call: Any) -> torch.dtype:
    """Return the required dtype of :data:`WEIGHTS`."""
    dtype = call.hidden.dtype
    narrow = dtype == torch.float32 and call.weight_ih.dtype == torch.bfloat16
    return torch.bfloat16 if narrow else dtype


def attention_of(call: Any, query: Tensor, t: slice) -> AttentionInputs:
    """Return the attention call for the queries of some steps."""

    mask = call.mask if call.mask is None or call.mask.shape[1] == 1 else call.mask[:, t]
    bounds = None if call.key_bounds is None else call.key_bounds[:, t]
    exponentials = getattr(call, "key_exponentials", None)
    return AttentionInputs(
        query, call.key, call.value, call.score_vector, None, mask, call.lengths, bounds, 0,
        exponentials, call.scale, call.score, call.normalisation, False, True,
    )  # fmt: skip


def coverage_of(
    call: Any, query: Tensor, t: slice, coverage: Tensor, previous: Tensor
) -> CoverageInputs:
    """Return the call of attention with a history for the queries of some steps."""
    plain = attention_of(call, query, t)
    transition = None if call.transition_prob is None else call.transition_prob[:, t]
    return CoverageInputs(
        query, call.key, call.value, call.score_vector, None, plain.mask, call.lengths,
        call.filters, call.projection, call.penalty, call.inverse_fertility, transition, coverage,
        previous, call.scale, call.score, call.normalisation,
    )  # fmt: skip


def check(call: RecurrentInputs) -> None:
    """Raise, in one sentence and before any computation, unless the arguments fit together."""
    check_tensor("input", call.input)
    if call.input.dim() != 3:
        raise_value_error("input", "[B, T, E]", list(call.input.shape))
    if call.input.dtype not in (torch.float32, torch.float64):
        raise_value_error("input", "float32 or float64", call.input.dtype)
    if call.mode not in GATES:
        raise_value_error("mode", f"one of {', '.join(GATES)}", call.mode)
    if (call.mode == "lstm") != (call.cell is not None):
        expected = "a tensor for an LSTM" if call.mode == "lstm" else f"None for {call.mode}"
        raise_value_error("cell", expected, "None" if call.cell is None else "a tensor")
    for name, axes in RANKS.items():
        x = getattr(call, name)
        if x is None and name != "hidden":
            continue
        check_tensor(name, x)
        if name == "hidden" and call.weight_ih_upper is not None:
            axes = "L", *axes
        if x.dim() != len(axes):
            raise_value_error(name, f"[{', '.join(axes)}]", list(x.shape))
    if call.weight_ih_upper is not None and call.hidden.shape[0] < 2:
        raise_value_error("hidden", "[L, B, H] with L of at least 2", list(call.hidden.shape))
    (B, T, E), H = call.input.shape, call.hidden.shape[-1]
    gates = GATES[call.mode] * H
    if call.key is None:
        given = [x for x in ("value", "score_vector", "weight_query", "bias_query", "weight_output",
                             "bias_output", "mask", "lengths", "key_bounds", "feed", "coverage",
                             "dropout_query", "dropout_feed", "weight_gate",
                             "key_exponentials")
                 if getattr(call, x) is not None]  # fmt: skip
        if given:
            raise_value_error(given[0], "None without a key", "a tensor")
    _check_past(call)
    for name, of in (
        ("bias_query", "weight_query"), ("bias_output", "weight_output"),
        ("dropout_output", "weight_output"), ("dropout_joined", "weight_output"),
        ("dropout_between", "weight_ih_upper"), ("dropout_cell", "cell"),
        ("bias_gate", "weight_gate"),
    ):  # fmt: skip
        if getattr(call, name) is not None and getattr(call, of) is None:
            raise_value_error(name, f"None without {of}", "a tensor")
    if call.feed is not None and call.attends_first:
        raise_value_error("feed", "None for a layer that attends first", "a tensor")
    if call.packed is not None and call.weight_gate is not None:
        raise_value_error("packed", "None with a weight_gate", "a tensor")
    check_choice("output_activation", call.output_activation, OUTPUT_ACTIVATIONS)
    if call.weight_output is not None and call.attends_first:
        raise_value_error("weight_output", "None for a layer that attends first", "a tensor")
    A = H if call.weight_query is None else call.weight_query.shape[0]
    Dv, F = 0 if call.value is None else call.value.shape[-1], feed_size(call)
    shapes: dict[str, tuple[int, ...]] = {
        "hidden": (B, H), "weight_ih": (gates, E + F), "weight_hh": (gates, H), "cell": (B, H),
        "feed": (B, F), "bias_ih": (gates,), "bias_hh": (gates,), "weight_query": (A, H),
        "bias_query": (A,), "weight_output": (F, Dv + H), "bias_output": (F,), "dropout": (B, H),
        "transition_prob": (B, T), "dropout_output": (B, T, F), "dropout_state": (B, T, H),
        "dropout_cell": (B, T, H), "weight_gate": (Dv, H), "bias_gate": (Dv,),
        "dropout_query": (B, T, H), "dropout_feed": (B, T, F), "dropout_joined": (B, T, Dv + H),
    }  # fmt: skip
    if lead := layers(call):
        above = lead[0] - 1
        shapes = {x: (*lead * (x in PER_LAYER), *shape) for x, shape in shapes.items()}
        shapes |= {"weight_ih_upper": (above, gates, H), "dropout_between": (above, B, T, H)}
    dtype, of_weights = call.input.dtype, dtype_of_weights(call)
    for name, shape in shapes.items():
        wanted = of_weights if name in WEIGHTS else dtype
        check_exact(call.input, [(name, getattr(call, name), wanted, shape)])
    check_exact(call.input, [("target_lengths", call.target_lengths, torch.int64, (B,))])
    if call.packed is not None:
        check_packed(call.packed, call.input)
    if call.key is not None:
        query = call.input.new_empty(B, T, A)
        plain = attention_of(call, query, slice(None))
        if call.coverage is not None and call.previous is not None:
            plain = plain._replace(normalisation="softmax")  # the history's is checked below
            check_coverage(coverage_of(call, query, slice(None), call.coverage, call.previous))
        check_attention(plain)


def _check_past(call: RecurrentInputs) -> None:
    """Raise if only a part of a history is given."""
    choices = NORMALISATIONS if call.coverage is None else WITH_HISTORY
    check_choice("normalisation", call.normalisation, choices)
    if call.coverage is None:
        if call.detach_history:
            raise_value_error("detach_history", "False without a coverage", True)
        for name in (
            "filters", "projection", "penalty", "inverse_fertility", "transition_prob", "previous",
        ):  # fmt: skip
            if getattr(call, name) is not None:
                raise_value_error(name, "None without a coverage", "a tensor")
    elif call.previous is None:
        raise_value_error(
            "previous", "given with a coverage: the weights before the first step", None
        )
    elif call.key_bounds is not None:
        raise_value_error("key_bounds", "None with a coverage", "a tensor")


def _check_backward(call: RecurrentBackward) -> None:
    names = [x for x in RecurrentInputs._fields if x in RecurrentBackward._fields]
    given = RecurrentInputs(**{x: getattr(call, x) for x in names})
    check(given)
    results = fake(given)
    saved = {x: x for x in RecurrentOutputs._fields if x not in RecurrentInputs._fields}
    saved |= {f"grad_{x}": x for x in RecurrentOutputs._fields}
    for name, x in saved.items():
        if name in RecurrentBackward._fields:
            shape = getattr(results, x).shape
            check_exact(call.input, [(name, getattr(call, name), call.input.dtype, shape)])


def fake(call: RecurrentInputs) -> RecurrentOutputs:
    """Return empty results."""
    (B, T, _), H = call.input.shape, call.hidden.shape[-1]

    def empty(needed: Any, columns: int, lead: tuple[int, ...] = ()) -> Tensor:
        return call.input.new_empty((*lead, B, T, columns) if needed else (0,))

    attends = call.key is not None
    projects = call.weight_query is not None or call.dropout_query is not None
    A = H if call.weight_query is None else call.weight_query.shape[0]
    Tk, Dv = (0, 0) if call.value is None else call.value.shape[-2:]
    return RecurrentOutputs(
        empty(True, H, layers(call)),
        empty(call.mode == "lstm", H, layers(call)),
        empty(attends, Dv),
        empty(attends, Tk),
        empty(call.weight_output is not None, feed_size(call)),
        call.input.new_empty((0,) if call.coverage is None else (B, Tk)),
        call.input.new_empty((0,) if call.coverage is None else (B,)),
        empty(attends and (projects or call.attends_first), A),
        empty(SAVED_GATES[call.mode], SAVED_GATES[call.mode] * H, layers(call)),
        empty(call.transition_prob is not None, Tk),
        empty(call.normalisation == "sigmoid", 1),
        empty(call.weight_gate is not None, Dv),
    )


def _fake_backward(call: RecurrentBackward) -> RecurrentGradients:
    def like(name: str, needed: bool) -> Tensor:
        x = getattr(call, name)
        return call.input.new_empty(x.shape if needed and x is not None else (0,))

    grads = {x: like(x, call.need_grad_parameters) for x in PARAMETERS if x != "bias_gate"}
    grads["bias_gate"] = call.input.new_empty(grads["weight_gate"].shape[:1])
    grads |= {x: like(x, call.need_grad_key) for x in ("key", "value", "score_vector")}
    past = ("inverse_fertility", "transition_prob", "coverage", "previous")
    grads |= {x: like(x, True) for x in ("hidden", "cell", "feed", *past)}
    grads["input"] = like("input", call.need_grad_input)
    return RecurrentGradients(**{f"grad_{name}": x for name, x in grads.items()})


#: The axes over steps and keys, counted from the last, of arguments and results.
STEPS = {"input": -2, "transition_prob": -1} | dict.fromkeys(
    (
        "mask", "key_bounds", "dropout_between", "dropout_output", "dropout_state", "dropout_cell",
        "dropout_query", "dropout_feed", "dropout_joined", "states", "cells", "contexts", "weights",
        "attentional", "queries", "gates", "log_weights", "sigmoid_sum", "context_gates",
    ), -2
)  # fmt: skip
KEYS = {"key": -2, "value": -2} | dict.fromkeys(
    ("mask", "inverse_fertility", "coverage", "previous", "weights", "log_weights"), -1
)
#: The largest batch whose steps the CUDA library runs in one launch, and the smallest number of
#: steps for which a CUDA graph is assumed to be worth its copies.
MAX_PERSISTENT_BATCH, MIN_STEPS = 128, 8


def runs_step_by_step(call: Mapping[str, Any]) -> bool:
    """Return whether the CUDA library certainly has launches for each of many steps."""
    B, T, _ = call["input"].shape
    more = (
        "coverage", "weight_ih_upper", "dropout_output", "dropout_state", "dropout_cell",
        "dropout_query", "dropout_feed", "dropout_joined", "weight_gate",
    )  # fmt: skip
    has_tanh = call["weight_output"] is None or call["output_activation"] == "tanh"
    alone = call["key"] is not None and has_tanh and all(call[name] is None for name in more)
    at_once = alone and call["input"].dtype == torch.float32 and B <= MAX_PERSISTENT_BATCH
    return T >= MIN_STEPS and not at_once


def _logarithms(call: Mapping[str, Any]) -> tuple[str, ...]:
    return () if call["transition_prob"] is None else ("previous", "log_weights")


GRAPHS = Graphs({"target_lengths": STEPS, "lengths": KEYS}, runs_step_by_step, _logarithms)

# The parameters in a layout that a backend caches for many calls, private to the backend.
LIBRARIES["cpu"].define(
    "pack_recurrent(Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih, Tensor? bias_hh, "
    "Tensor? weight_query, Tensor? weight_output, Tensor? weight_ih_upper, Tensor? weight_readout, "
    "Tensor? weight_vocab, int feed_size, int context_size, str mode, bool int8) -> Tensor"
)

RECURRENT = Operator(
    "recurrent", RecurrentInputs, RecurrentOutputs, RecurrentBackward, RecurrentGradients,
    check=check, check_backward=_check_backward, fake=fake, fake_backward=_fake_backward,
    constant=("queries", "gates", "sigmoid_sum", "context_gates"), backends=("cpu", "cuda"),
    runners={"cuda": GRAPHS.run},
    needs={
        "need_grad_input": ("input",),
        "need_grad_parameters": PARAMETERS,
        "need_grad_key": ("key", "value", "score_vector"),
    },
)  # fmt: skip
