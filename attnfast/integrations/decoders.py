"""What adapters of whole decoders share: the steps of a target in one call of an operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnfast.decoding import Memory
from attnfast.nn.attention import LuongAttention
from attnfast.nn.layer import Layer, RecurrentState, Steps, backend_of, run_layer
from attnfast.nn.linear import is_plain

__all__ = ["LOOP", "is_one_operator", "run_decoder", "why_not_one_layer"]

LOOP = "its own code runs single steps, and training with dropout"


def why_not_one_layer(rnn: nn.Module) -> str | None:
    """Say that this is not a GRU of one layer; of more the query is the last one's state."""
    known = type(rnn) is nn.GRU and rnn.num_layers == 1 and not rnn.bidirectional
    return None if known else "its recurrent layer is not one nn.GRU in one direction"


def is_one_operator(
    layer: Layer, steps: int, source: Any, states: list[Any], attention: nn.Module, *parts: Any
) -> bool:
    """Whether an operator may stand for a decoder's loop over so many steps.

    Args:
        layer: its cell.
        source: what it attends to, ``[B, Tk, D]``.
        states: those before the first step, ``[1, B, H]``.
        attention: not called any more, and so without hooks.
        parts: the linear layers and dropouts whose parameters stand for them.
    """
    like, inputs = layer.weight_ih, [source, *states]
    return (
        steps > 1
        and like is not None
        and all(isinstance(x, Tensor) and x.dim() == 3 for x in inputs)
        and all(x.shape[:2] == (1, len(source)) for x in states)
        and is_plain(attention, type(attention))
        and all(is_plain(x, nn.Linear, nn.Dropout) for x in parts)
        and not any(isinstance(x, nn.Dropout) and x.training and x.p > 0 for x in parts)
        and all(x.dtype == like.dtype and x.device == like.device for x in inputs)
        and backend_of(None, None, like) is not None
    )


def run_decoder(
    layer: Layer, input: Tensor, state: RecurrentState, query_proj: nn.Module | None, memory: Memory
) -> Steps:
    """Run the layer over ``input [B, T, E]``; the memory says by which score it attends."""
    attention = LuongAttention(1, 1, "dot")  # without parameters
    if query_proj is not None:
        attention.query_proj = query_proj
    return run_layer(layer, input, state, attention, memory, need_weights=True)
