"""The special ids of a vocabulary, and checks of models' arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_array,
    check_device,
    check_like,
    check_numbers,
    check_range,
    check_tensor,
    describe,
    is_finite,
    raise_type_error,
    raise_value_error,
)
from attnfast.decoding._constraints import BOS, EOS, PAD, UNK
from attnfast.nn import Memory, RecurrentState

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "UNK",
    "check_characters",
    "check_ids",
    "check_lengths",
    "check_share",
    "check_source",
    "check_step",
    "check_target",
    "embed",
]


def check_share(name: str, x: object) -> None:
    """Raise unless ``x`` is a number from 0 to below 1."""
    if not is_finite(x) or not 0 <= x < 1:  # type: ignore[operator]
        raise_value_error(name, "at least 0 and below 1", describe(x))


def check_ids(name: str, words: object, count: int | None = None) -> None:
    """Raise unless ``words [B, T]`` are word ids, below ``count`` if given (read on a CPU only)."""
    check_tensor(name, words)
    assert isinstance(words, Tensor)
    if words.dtype not in (torch.int64, torch.int32) or words.dim() != 2:
        raise_value_error(name, "word ids [B, T], int64 or int32", describe(words))
    if count is not None:
        check_range(name, words, 0, count - 1, "word ids")


def embed(name: str, words: Tensor, embedding: nn.Embedding) -> Tensor:
    """Return embedded ``words [B, T]``; raise if these are not ids of the vocabulary.

    The embedding itself raises if ids are out of bounds; only then are they read again.
    """
    check_ids(name, words)
    check_device(name, words, embedding.weight, "the module")
    try:
        return embedding(words)
    except Exception:
        check_ids(name, words, embedding.num_embeddings)
        raise


def check_characters(
    name: str, characters: object, shape: Sequence[int | str], embedding: nn.Embedding
) -> None:
    """Raise unless ``characters`` are ids of the alphabet of ``shape``, with a character a word.

    Ids are read on a CPU only.
    """
    check_array(name, characters, "int64 or int32", shape, like=embedding.weight, of="the module")
    assert isinstance(characters, Tensor)
    if not characters.shape[2]:
        raise_value_error(name, "of at least 1 character a word", describe(characters))
    check_range(name, characters, 0, embedding.num_embeddings - 1, "character ids")


def check_source(name: str, source: Any, kind: type, state: object) -> None:
    """Raise unless a source, called ``name``, and a state are results of a model's ``encode``."""
    memory = getattr(source, "memory", None)
    if not isinstance(source, kind) or (isinstance(memory, Memory) and memory.value is None):
        raise_type_error(name, "a result of encode(...)", describe(source))
    if not isinstance(state, RecurrentState):
        raise_type_error("state", "a RecurrentState", describe(state))


def check_step(
    words: object,
    state: Any,
    source: Any,
    name: str,
    context_dim: int,
    hidden: Sequence[int],
    like: Tensor,
) -> None:
    """Raise unless words ``[B, T]``, a state and a source, called ``name``, fit each other.

    ``context_dim`` is the size of a context, ``hidden`` the shape of a state but for B, and
    ``like`` a parameter of the model.
    """
    check_ids("words", words)
    assert isinstance(words, Tensor)
    *layers, features = hidden
    B = words.shape[0]
    value = getattr(source.memory, "value", None)
    if isinstance(value, Tensor):  # a memory of another project's attention may have no value
        check_like(name, value, like)
        if math.prod((*value.shape[1:-2], value.shape[-1])) != context_dim:
            raise_value_error(name, f"of contexts of {context_dim} features", describe(value))
        if value.shape[0] != B:
            raise_value_error("words", f"of {value.shape[0]} sequences, as {name}", describe(words))
    check_array("state.hidden", state.hidden, "floating-point", (*layers, B, features), of="words")
    check_like("state.hidden", state.hidden, like)


def check_target(target_in: object, embedding: nn.Embedding, count: int | None = None) -> None:
    """Raise unless targets are word ids on the model's device, below ``count`` if given."""
    check_ids("target_in", target_in, count)
    assert isinstance(target_in, Tensor)
    check_device("target_in", target_in, embedding.weight, "the module")


def check_lengths(
    lengths: object, of: Tensor, least: int = 1, name: str = "lengths", whose: str = ""
) -> None:
    """Raise unless these are lengths of the sequences ``of [B, Tk, ..]``, ``least`` or more.

    ``whose`` names the sequences in the message.
    """
    B, Tk = of.shape[:2]
    if B and Tk < least:
        raise_value_error(name, f"at least {least}", f"sequences of length {Tk}")
    check_numbers(name, lengths, B, least, Tk, whose)
