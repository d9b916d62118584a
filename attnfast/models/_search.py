"""The choice of an operator for the search of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from attnfast.nn import Memory
from attnfast.nn._fused_rnn import select_layer_backend
from attnfast.nn._linear import is_plain, not_plain_reason
from attnfast.ops.search import SEARCH


def select_search_backend(
    model: Any,
    kind: type,
    decoders: Sequence[type],
    linears: Sequence[nn.Module],
    memory: Memory,
    history: Any,
) -> tuple[str | None, str]:
    """Return the backend whose operator can search with a model, or None and the reason.

    Args:
        model: with ``decoder``, ``embedding`` and ``dropout``.
        kind, decoders: the classes that the model and its decoder must have.
        linears: the linear layers of the words' scores.
        memory, history: of the decoder's attention.
    """
    decoder, words = model.decoder, model.embedding
    if not is_plain(model, kind):
        return None, not_plain_reason(model, kind)
    if model.dropout.training and model.dropout.p:
        return None, "dropout is on: call eval() first"
    if any(callable(x) for part in (model, decoder) for x in vars(part).values()):
        return None, "the model or its decoder has a method of its own"
    if not is_plain(decoder, *decoders):
        return None, not_plain_reason(decoder, *decoders)
    plain = [(words, nn.Embedding), (model.dropout, nn.Dropout), *((x, nn.Linear) for x in linears)]
    if words.max_norm or not all(is_plain(*x) for x in plain):
        return None, "its embedding or a linear layer is no plain module"
    return select_layer_backend(
        decoder.attention, memory, words.weight, history=history, operator=SEARCH.name
    )
