"""Helpers for adapters of whole decoders, which run all target steps in one operator call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnfast.decoding import Memory
from attnfast.nn._fused_rnn import Layer, LayerOutputs, RecurrentState, backend_of, run_layer
from attnfast.nn._linear import is_plain
from attnfast.nn.attention import LuongAttention

__all__ = [
    "LOOP",
    "is_one_operator",
    "last_states",
    "masks_of",
    "run_decoder",
    "state_of",
    "why_not_one_gru",
]

LOOP = "its own code runs single steps"


def why_not_one_gru(rnn: nn.Module) -> str | None:
    """Say that this is not PyTorch's GRU in one direction."""
    known = type(rnn) is nn.GRU and not rnn.bidirectional
    return None if known else "its recurrent layer is not an nn.GRU in one direction"


def is_one_operator(
    layer: Layer,
    steps: int,
    source: Any,
    states: Sequence[Any],
    attention: nn.Module,
    *parts: Any,
    feed: Sequence[Any] = (),
    drops: bool = False,
) -> bool:
    """Return whether one operator call can replace a decoder's loop over ``steps`` steps.

    Args:
        layer: its cells.
        source: what it attends to, ``[B, Tk, D]``.
        states: those before the first step, ``[L, B, H]``.
        attention: not called any more, and so without hooks.
        parts: the linear layers, whose parameters stand for them, and dropouts, which must not
            drop.
        feed: what is fed to the first step, ``[1, B, F]``, if anything.
        drops: whether the operator is to drop numbers.
    """
    like, inputs = layer.weight_ih, [source, *states, *feed]
    layers = 1 if layer.weight_ih_upper is None else 1 + len(layer.weight_ih_upper)
    return (
        steps > 1
        and like is not None
        and all(isinstance(x, Tensor) and x.dim() == 3 for x in inputs)
        and all(x.shape[:2] == (layers, len(source)) for x in states)
        and all(x.shape[:2] == (1, len(source)) for x in feed)
        and is_plain(attention, type(attention))
        and all(is_plain(x, nn.Linear, nn.Dropout) for x in parts)
        and not any(isinstance(x, nn.Dropout) and x.training and x.p > 0 for x in parts)
        and all(x.dtype == like.dtype and x.device == like.device for x in inputs)
        and backend_of(None, None, like, stack=drops or layers > 1) is not None
    )


def state_of(*hidden: Tensor, feed: Tensor | None = None) -> RecurrentState:
    """Return the state before the first step of ``hidden [L, B, H]`` and an LSTM's cells."""
    state = RecurrentState(*(x if len(x) > 1 else x[0] for x in hidden))
    return state._replace(feed=feed)


def last_states(steps: Tensor) -> Tensor:
    """Return those after the last step, ``[L, B, H]``."""
    last = steps[..., -1, :]
    return last if last.dim() == 3 else last.unsqueeze(0)


def masks_of(
    steps: int, like: Tensor, dropouts: Sequence[tuple[nn.Dropout, int]]
) -> list[Tensor | None]:
    """Draw what dropouts multiply numbers ``[B, F]`` like these by, each so often in every step.

    In the order in which a loop over the steps draws it, so that random numbers are the same.

    Returns:
        ``[n, B, T, F]`` for each, None for one that does not drop.
    """
    masks: list[list[Tensor]] = [[] for _ in dropouts]
    for _ in range(steps):
        for (dropout, times), drawn in zip(dropouts, masks):
            keep = 1 - dropout.p
            for _ in range(times if dropout.training and keep < 1 else 0):
                drawn.append(torch.empty_like(like).bernoulli_(keep).div_(keep or 1))
    return [torch.stack(x).unflatten(0, (steps, -1)).movedim(0, 2) if x else None for x in masks]


def run_decoder(
    layer: Layer,
    input: Tensor,
    state: RecurrentState,
    query_proj: nn.Module | None,
    memory: Memory,
    **dropouts: Tensor | None,
) -> LayerOutputs:
    """Run the layer over ``input [B, T, E]``; the memory says by which score it attends."""
    attention = LuongAttention(1, 1, "dot")  # without parameters
    if query_proj is not None:
        attention.query_proj = query_proj
    return run_layer(layer, input, state, attention, memory, need_weights=True, **dropouts)
