"""Searches with decoders that other projects wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import InputError, argument_message, describe, raise_type_error
from attnfast.decoding import Memory
from attnfast.decoding._constraints import Constraints
from attnfast.integrations.adapter import UnsupportedCall, adapter_serving
from attnfast.integrations.fused_decoders import (
    fusion_skip_reason,
    is_plain_table,
    make_attention,
)
from attnfast.nn._fused_rnn import run_layer, select_layer_backend
from attnfast.nn._fused_search import search_inputs
from attnfast.nn._layer import Layer, RecurrentState
from attnfast.ops import dispatch
from attnfast.ops.packing import upcast_halves
from attnfast.ops.search import SEARCH, SearchInputs

__all__ = ["DecoderParts", "SearchModel", "find_words", "make_search_model"]


class DecoderParts(NamedTuple):
    r"""The parameters of a decoder, in the words of this package.

    .. math:: h_t, c_t, f_t = \mathrm{layer}(s E y_{t-1}), \quad
              P(y_t) = \mathrm{softmax}(W o_t + b)

    with :math:`o_t` the attentional vector :math:`f_t` if the layer has one, else the state, or
    state and context, or both and the word: as many features as W has columns.

    Attributes:
        layer: the cells, and the layer after the attention.
        query_proj: the projection of the attention's query, or None.
        embedding, scale: E and s.
        output: W and b.
        attention: the project's module, which must have no hooks because it is not called.
        normalisation: of the attention weights.
    """

    layer: Layer
    query_proj: nn.Module | None
    embedding: nn.Embedding
    output: nn.Linear
    attention: nn.Module
    scale: float = 1.0
    normalisation: str = "softmax"

    def attend(self, memory: Memory) -> Any:
        """Return a module of attention that takes the memory."""
        terms = {"normalisation": self.normalisation, "score_vector": memory.score_vector}
        return make_attention(self.query_proj, terms=terms)

    def search_inputs(
        self, memory: Memory, state: RecurrentState, constraints: Constraints
    ) -> tuple[SearchInputs | None, str | None, str]:
        """Return the operator's arguments for a search, its backend, and why there is none."""
        states = [x.view(-1, *x.shape[-2:]) for x in (state.hidden, state.cell) if x is not None]
        modules = [x for x in (self.query_proj, self.layer.output, self.output) if x is not None]
        feed = [] if state.feed is None else [state.feed.unsqueeze(0)]
        reason = fusion_skip_reason(
            self.layer, 2, memory.value, states, self.attention, *modules, feed=feed
        )
        if not is_plain_table(self.embedding):
            reason = "its embedding is no plain nn.Embedding"
        backend = None
        attention = self.attend(memory)
        if not reason:
            weight = self.embedding.weight
            backend, reason = select_layer_backend(attention, memory, weight, operator=SEARCH.name)
        if backend is None:
            return None, None, reason or ""
        call = search_inputs(
            self.layer, attention, memory, state, constraints, backend, self.embedding.weight,
            self.output.weight, self.output.bias, embedding_scale=self.scale,
        )  # fmt: skip
        return call, backend, ""


def find_words(
    parts: DecoderParts,
    memory: Memory,
    state: RecurrentState,
    start: Tensor,
    steps: int,
    given: Tensor | None = None,
) -> Tensor:
    """Return the most probable word of every step, ``[B, T]``.

    Args:
        parts, memory, state: of the decoder and its sources.
        start: ``[B]``, the word that the first step reads.
        steps: T.
        given: ``[B, T]``, words to read instead, −1 for those to find.

    Raises:
        UnsupportedCall: no operator can search, or the rows start with different words.
    """
    if not len(start) or not steps or not bool((start == start[0]).all()):
        raise UnsupportedCall("there is no step, or its rows start with different words")
    limits = torch.full((len(start),), steps + 1, device=start.device)
    constraints = Constraints(limits, int(start[0]), end=-1, forbidden=(), prefix=given)
    with torch.no_grad():
        call, backend, reason = parts.search_inputs(memory, state, constraints)
        if call is None or backend is None:
            raise UnsupportedCall(reason)
        found = dispatch.run(SEARCH, upcast_halves(call), backend)
    if (found.lengths < 0).any():
        raise UnsupportedCall("scores are NaN")
    return found.words[:, 0, :steps]


class EncodedSource(NamedTuple):
    """The memory of encoded sources, and the decoder's parts."""

    memory: Memory
    parts: DecoderParts

    def index_select(self, index: Tensor) -> EncodedSource:
        """Return the sources of the sequences ``index``."""
        return self._replace(memory=self.memory.index_select(index))


class SearchModel:
    """A model that the searches of :mod:`attnfast.decoding` take, of another project's modules.

    It reads the modules' parameters whenever it encodes sources. :func:`make_search_model` makes
    one.

    Args:
        module: the modules, which must be in evaluation mode.
        encode: ``encode(source, lengths)`` returns the decoder's parts, the memory of the sources
            and the state before the first word.

    Example:
        >>> from attnfast.decoding import greedy_search
        >>> from attnfast.integrations.search_model import DecoderParts, SearchModel
        >>> from attnfast.nn import Memory
        >>> from attnfast.nn._layer import Layer, RecurrentState
        >>> embedding, output = torch.nn.Embedding(20, 4), torch.nn.Linear(6, 20)
        >>> encoder, cell = torch.nn.GRU(4, 6, batch_first=True), torch.nn.GRUCell(4 + 6, 6)
        >>> attention = attnfast.nn.LuongAttention(6, 6)
        >>> def encode(source, lengths):
        ...     states, last = encoder(embedding(source))
        ...     parts = DecoderParts(Layer.of_cells(cell), None, embedding, output, attention)
        ...     return parts, Memory(states, states, lengths), RecurrentState(last[0])
        >>> model = SearchModel(torch.nn.ModuleList([encoder, cell]).eval(), encode)
        >>> source, lengths = torch.randint(4, 20, (2, 5)), torch.tensor([5, 3])
        >>> len(greedy_search(model, source, lengths).best)
        2
    """

    def __init__(
        self,
        module: nn.Module,
        encode: Callable[[Tensor, Tensor], tuple[DecoderParts, Memory, RecurrentState]],
    ):
        self.module, self._encode = module, encode

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[EncodedSource, RecurrentState]:
        """Encode ``source [B, Tk]`` of ``lengths [B]``; return it and the first state.

        Raises:
            InputError: the modules are in training mode.
        """
        if any(x.training for x in self.module.modules() if x is not self.module):
            raise InputError("model must be in evaluation mode: call eval() first")
        parts, memory, state = self._encode(source, lengths)
        return EncodedSource(memory, parts), state

    def decode(
        self,
        words: Tensor,
        state: RecurrentState,
        source: EncodedSource,
        need_weights: bool = False,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        """Return logits ``[R, T, V]`` after ``words [R, T]``, the next state, and weights."""
        parts, memory = source.parts, source.memory
        layer, output = parts.layer, parts.output
        x = F.embedding(words, parts.embedding.weight) * parts.scale
        feeds = layer.attends_first or layer.feed_size(x.shape[-1]) > 0
        if not feeds:  # what would be fed is multiplied by 0
            fed = memory.value.shape[-1] if layer.output is None else len(layer.output.weight)
            layer = layer._replace(weight_ih=F.pad(layer.weight_ih, (0, fed)))  # type: ignore[arg-type]
        steps = run_layer(layer, x, state, parts.attend(memory), memory, need_weights=True)
        rows = steps.attentional
        last = steps.contexts if rows is None else rows
        if rows is None:
            joined = torch.cat([steps.output, steps.contexts, x], -1)  # type: ignore[list-item]
            rows = joined[..., : output.in_features]
        state = state._replace(
            hidden=steps.states[..., -1, :],
            cell=None if steps.cells is None else steps.cells[..., -1, :],
            feed=None if layer.attends_first else last[:, -1], packed=steps.packed,  # type: ignore[index]
        )  # fmt: skip
        logits = F.linear(rows, output.weight, output.bias)
        return logits, state, steps.weights if need_weights else None

    def _search_inputs(
        self, source: EncodedSource, state: RecurrentState, constraints: Constraints
    ) -> tuple[SearchInputs | None, str | None, str]:
        return source.parts.search_inputs(source.memory, state, constraints)


def make_search_model(*modules: nn.Module) -> SearchModel:
    """Return a model for the searches of :mod:`attnfast.decoding`, of another project's modules.

    Args:
        modules: a model whose decoder :func:`attnfast.replace` has made one operator; for PyTorch's
            translation tutorial its encoder and its decoder. Decoders of d2l, PyTorch's tutorial,
            OpenNMT-py, eole, joeynmt and bentrevett's tutorials are known.

    Raises:
        TypeError: an argument is not a module.
        InputError: there is no such decoder, or not one alone, or a part of the model is not known.

    Example:
        >>> from attnfast.integrations import make_search_model
        >>> model = torch.nn.Linear(8, 8)
        >>> report = attnfast.replace(model)
        >>> make_search_model(model)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        attnfast._utils.checks.InputError: modules must be of a model with one decoder that ...
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise_type_error("modules", "torch.nn.Modules", describe(module))
    inner = dict.fromkeys(x for module in modules for x in module.modules())
    known = [(x, adapter) for x in inner if (adapter := adapter_serving(x)) and adapter.search]
    if len(known) != 1:
        expected = (
            "of a model with one decoder that attnfast.replace made one operator and whose search "
            "is known"
        )
        raise InputError(argument_message("modules", expected, len(known) or "none"))
    [(decoder, adapter)] = known
    assert adapter.search is not None
    try:
        encode = adapter.search(decoder, *modules)
    except UnsupportedCall as error:
        raise InputError(f"modules cannot be searched with: {error}") from None
    return SearchModel(nn.ModuleList(modules), encode)
