"""The arguments of a search in one operator, from a recurrent layer and its attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnfast.decoding import Memory
from attnfast.decoding._constraints import Constraints
from attnfast.nn._fused_rnn import attention_arguments
from attnfast.nn._layer import Layer, RecurrentState
from attnfast.ops.search import SearchInputs


def search_inputs(
    layer: Layer,
    attention: Any,
    memory: Memory,
    state: RecurrentState,
    constraints: Constraints,
    backend: str,
    *,
    embedding: Tensor,
    weight_vocab: Tensor,
    bias_vocab: Tensor | None,
    readout: Any = None,
    num_oov: int = 0,
    **more: Any,
) -> SearchInputs:
    """Return the operator's arguments for a search from ``state`` on.

    ``embedding [V, E]`` of the words, ``weight_vocab [V, R]`` and ``bias_vocab`` of their scores,
    ``readout`` the linear layer before them, or None. The first axis of the states of a single
    layer, if there is one, is left out. ``more`` are other arguments of the operator.
    """
    limits = constraints.limits
    most = int(limits.max()) if len(limits) else 0
    steps = embedding.new_empty(len(limits), most, 0)
    terms, _ = attention_arguments(attention, memory, backend, state.history, steps)
    hidden, cell = state.hidden, state.cell
    if layer.weight_ih_upper is None and hidden.dim() == 3:
        hidden, cell = hidden[0], None if cell is None else cell[0]
    return SearchInputs(
        embedding, weight_vocab, limits.long(), hidden,
        layer.weight_ih, layer.weight_hh, cell, state.feed,  # type: ignore[arg-type]
        bias_ih=layer.bias_ih, bias_hh=layer.bias_hh, bias_vocab=bias_vocab,
        weight_output=getattr(layer.output, "weight", None),
        bias_output=getattr(layer.output, "bias", None),
        weight_readout=getattr(readout, "weight", None),
        bias_readout=getattr(readout, "bias", None),
        weight_ih_upper=layer.weight_ih_upper, mode=layer.mode, attends_first=layer.attends_first,
        output_activation="tanh" if layer.output_tanh else "identity",
        begin=constraints.start, end=constraints.end, most=most, num_oov=num_oov,
        **terms, **more, **constraints.for_operator(len(embedding) + num_oov),
    )  # fmt: skip
