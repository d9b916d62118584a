"""Searches with decoders that other projects wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import (
    InputError,
    argument_message,
    check_array,
    check_like,
    check_numbers,
    describe,
    raise_type_error,
)
from attnfast.decoding import Memory
from attnfast.decoding._constraints import Constraints
from attnfast.functional import copy_distribution
from attnfast.integrations.adapter import UnsupportedCall, adapter_serving, was_exchanged
from attnfast.integrations.fused_decoders import (
    fusion_skip_reason,
    is_plain_table,
    make_attention,
)
from attnfast.nn._fused_rnn import run_layer, select_layer_backend
from attnfast.nn._fused_search import search_inputs
from attnfast.nn._layer import Layer, RecurrentState
from attnfast.nn._linear import is_plain
from attnfast.nn.wrappers import GatedAttention
from attnfast.ops import dispatch
from attnfast.ops.arguments import length_mask
from attnfast.ops.backends import HALF
from attnfast.ops.operators import is_tracing
from attnfast.ops.search import SEARCH, SearchInputs, SearchOutputs

__all__ = ["DecoderParts", "SearchModel", "find_words", "make_search_model"]


#: The cells whose parameters may be used without calling them.
CELLS = nn.RNNCell, nn.GRUCell, nn.LSTMCell


def home_of(module: nn.Module) -> str:
    """Return the package of a module's class, as its project has it."""
    return getattr(type(module), "_attnfast_own", type(module)).__module__.partition(".")[0]


class DecoderParts(NamedTuple):
    r"""The parameters of another project's decoder, named as this package names them.

    .. math:: h_t, c_t, f_t = \mathrm{layer}(s E y_{t-1}), \quad
              P(y_t) = \mathrm{softmax}(W o_t + b)

    with :math:`o_t` the attentional vector :math:`f_t` if the layer has one, else the state, or
    state and context, or both and the word: as many features as W has columns.

    Attributes:
        layer: the cells, and the layer after the attention.
        query_proj: the projection of the attention's query, or None.
        embedding, scale: E and s.
        output: W and b.
        decoder: the module whose inner modules are not called.
        wrappers: modules around the embedding and the output layer, which are not called either.
        attention: arguments of :func:`make_attention` besides the projection of the query, by name.
        pointer: the layer of the gate of a pointer-generator, which reads o_t, or None. The model
            then copies words of its source, as :func:`attnfast.copy_distribution` does.
    """

    layer: Layer
    query_proj: nn.Module | None
    embedding: nn.Embedding
    output: nn.Linear
    decoder: nn.Module
    scale: float = 1.0
    wrappers: tuple[nn.Module, ...] = ()
    attention: Mapping[str, object] = MappingProxyType({})
    pointer: nn.Linear | None = None

    def attend(self, memory: Memory) -> nn.Module:
        """Return a module of attention that takes the memory."""
        options: Any = self.attention
        terms = {"score_vector": memory.score_vector, **options.get("terms", {})}
        return make_attention(self.query_proj, **{**options, "terms": terms})

    def skip_reason(self) -> str:
        """Return why calling the modules may differ from using their parameters, or ""."""
        project = home_of(self.decoder)
        for part in (*self.decoder.modules(), self.embedding, self.output, *self.wrappers):
            name = type(part).__name__
            if not is_plain(part, type(part)):
                return f"its {name} has hooks or a forward of its own"
            if adapter_serving(part) is None and home_of(part) not in ("torch", project):
                return f"its {name} is no module of torch.nn or of the project"
            if was_exchanged(part):
                return f"an inner layer of its {name} has hooks or was exchanged since replace()"
        if not is_plain_table(self.embedding) or not is_plain(self.output, nn.Linear):
            return "its embedding or output layer is no plain module of torch.nn"
        if self.output.out_features != self.embedding.num_embeddings:
            return "it scores more or fewer words than it embeds"
        cells = [x for x in self.decoder.modules() if isinstance(x, nn.RNNCellBase)]
        if self.layer.rnn is not None or not all(is_plain(x, *CELLS) for x in cells):
            return "its recurrent layer or cell is no plain module of torch.nn"
        return ""

    def search_inputs(
        self,
        memory: Memory,
        state: RecurrentState,
        constraints: Constraints,
        words: Tensor | None = None,
    ) -> tuple[SearchInputs | None, str | None, str]:
        """Return the operator's arguments for a search, its backend, and the reason without one.

        ``words [B, Tk]`` are those of the keys, for a pointer-generator.
        """
        reason, backend = self.skip_reason(), None
        if not reason:
            states = [x.view(-1, *x.shape[-2:]) for x in state[:2] if x is not None]
            feed = [] if state.feed is None else [state.feed.unsqueeze(0)]
            parts = [x for x in (self.query_proj, self.layer.output) if x is not None]
            source = self.layer, 2, memory.value, states
            reason = fusion_skip_reason(*source, self.decoder, *parts, feed=feed) or ""
        attention = self.attend(memory)
        if isinstance(attention, GatedAttention):
            reason = reason or "the operator supports no gate on the context"
        if not reason:
            weight = self.embedding.weight
            backend, reason = select_layer_backend(
                attention, memory, weight, history=state.history, operator=SEARCH.name
            )
        if backend is None:
            return None, None, reason
        copying: dict[str, Any] = {}
        if self.pointer is not None:
            copying = {"weight_pointer": self.pointer.weight, "bias_pointer": self.pointer.bias}
        call = search_inputs(
            self.layer, attention, memory, state, constraints, backend,
            embedding=self.embedding.weight, weight_vocab=self.output.weight,
            bias_vocab=self.output.bias, embedding_scale=self.scale, source=words, **copying,
        )  # fmt: skip
        return call, backend, ""


def find_words(
    parts: DecoderParts,
    memory: Memory,
    state: RecurrentState,
    start: Tensor,
    steps: int,
    forced: Tensor | None = None,
    end: int | None = None,
    source_words: Tensor | None = None,
) -> Tensor:
    """Return the most probable word of every step, ``[B, T]``.

    Args:
        parts: of the decoder.
        memory, state: of the sources, and before the first word.
        start: ``[B]``, the word that the first step reads.
        steps: T, or the most steps if there is an end.
        forced: ``[B, steps]``, words that the search must choose, −1 where it may choose any.
        end: the word that ends a row; T is then the step at which the last row ends, ``steps`` at
            most.
        source_words: ids ``[B, Tk]`` of the source, which a pointer-generator copies.

    Raises:
        UnsupportedCall: no operator can search, or a word is not in the vocabulary.
    """
    if is_tracing():
        raise UnsupportedCall("a graph is traced")
    if start.dtype not in (torch.int32, torch.int64) or not len(start) or not steps:
        raise UnsupportedCall("there is no step, or its words are no integers")
    V, first = parts.embedding.num_embeddings, int(start[0])
    if not bool((start == first).all()) or not 0 <= first < V:
        raise UnsupportedCall("its rows start with different words, or one beyond the vocabulary")
    if forced is not None and not bool(((forced >= -1) & (forced < V)).all()):
        raise UnsupportedCall("a word is beyond the vocabulary")
    if parts.embedding.weight.dtype in HALF:
        raise UnsupportedCall("in half precision single steps may find other words")

    def search(steps: int, end: int) -> SearchOutputs:
        limits = torch.full((len(start),), steps + 1, device=start.device)
        constraints = Constraints(limits, first, end=end, forbidden=(), prefix=forced)
        call, backend, reason = parts.search_inputs(memory, state, constraints, source_words)
        if call is None or backend is None:
            raise UnsupportedCall(reason)
        found = dispatch.run(SEARCH, call, backend)
        if (found.lengths < (steps if end < 0 else 0)).any():
            raise UnsupportedCall("scores are NaN")
        return found

    with torch.no_grad():
        if end is not None:  # the second search also finds the words after the ends of rows
            steps = min(steps, int(search(steps, end).lengths.max()))
        return search(steps, -1).words[:, 0, :steps]


def check_all_visible(states: Tensor, lengths: Tensor) -> None:
    """Raise UnsupportedCall unless each length is Tk: the attention has no mask."""
    if (lengths < states.shape[1]).any():
        expected = f"lengths must be {states.shape[1]}"
        raise UnsupportedCall(f"its attention reads padding: {expected}, got {lengths.tolist()}")


class EncodedSource(NamedTuple):
    """The memory of encoded sources, the decoder's parts, and the words that it copies, if any."""

    memory: Memory
    parts: DecoderParts
    words: Tensor | None = None

    def index_select(self, index: Tensor) -> EncodedSource:
        """Return the sources of the sequences ``index``."""
        words = None if self.words is None else self.words.index_select(0, index)
        return self._replace(memory=self.memory.index_select(index), words=words)


class SearchModel:
    """Another project's modules as a model for the searches of :mod:`attnfast.decoding`.

    It reads the modules' parameters whenever it encodes sources. :func:`make_search_model` makes
    one.

    Args:
        encode: ``encode(source, lengths, decoder, *modules)`` returns the decoder's parts, the
            memory of the sources and the state before the first word. Its sources are word ids, or,
            if it names its first argument ``states``, the outputs of an encoder.
        decoder: the decoder, or the model that has it.
        modules: what ``encode`` calls beside the decoder.

    Example:
        >>> from attnfast.decoding import greedy_search
        >>> from attnfast.integrations.search_model import DecoderParts, SearchModel
        >>> from attnfast.nn import Memory
        >>> from attnfast.nn._layer import Layer, RecurrentState
        >>> class Decoder(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding, self.cell = torch.nn.Embedding(20, 4), torch.nn.GRUCell(10, 6)
        ...         self.output = torch.nn.Linear(6, 20)
        >>> def encode(source, lengths, decoder, encoder):
        ...     states, last = encoder(decoder.embedding(source))
        ...     layer = Layer.of_cells(decoder.cell)
        ...     parts = DecoderParts(layer, None, decoder.embedding, decoder.output, decoder)
        ...     return parts, Memory(states, states, lengths), RecurrentState(last[0])
        >>> encoder = torch.nn.GRU(4, 6, batch_first=True)
        >>> model = SearchModel(encode, Decoder().eval(), encoder.eval())
        >>> source, lengths = torch.randint(4, 20, (2, 5)), torch.tensor([5, 3])
        >>> len(greedy_search(model, source, lengths).best)
        2
    """

    def __init__(
        self,
        encode: Callable[..., tuple[DecoderParts, Memory, RecurrentState]],
        decoder: nn.Module,
        *modules: nn.Module,
    ):
        self._encode, self.decoder, self.modules = encode, decoder, modules

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[EncodedSource, RecurrentState]:
        """Encode sources; return them, and the state before the first word.

        Args:
            source: word ids ``[B, Tk]``, or an encoder's outputs ``[B, Tk, D]``; those of images
                may be ``[B, rows, columns, D]``, which are read row by row.
            lengths: ``[B]``, each from 1 to Tk.

        Raises:
            InputError: a module is in training mode, or its parameters alone do not say what it
                computes.
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        if next(iter(inspect.signature(self._encode).parameters)) == "states":
            shapes = ("B", "Tk", "D"), ("B", "rows", "columns", "D")
            check_array("source", source, "floating-point", *shapes)
            check_like("source", source, next(self.decoder.parameters()), "the decoder's")
            source = source.flatten(1, -2)
        else:
            check_array("source", source, "int64 or int32", ("B", "Tk"))
        check_numbers("lengths", lengths, len(source), 1, source.shape[1], "source")
        inner = (x for module in (self.decoder, *self.modules) for x in module.modules())
        if any(x.training for x in inner):
            raise InputError("model must be in evaluation mode: call eval() first")
        if not len(source):
            raise InputError(argument_message("source", "of one sentence at least", "none"))
        try:
            parts, memory, state = self._encode(source, lengths, self.decoder, *self.modules)
        except UnsupportedCall as error:
            raise InputError(f"model cannot be searched with: {error}") from None
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # PyTorch's, of shapes or dtypes
            raise InputError(f"source and modules must fit each other: {error}") from error
        if reason := parts.skip_reason():
            raise InputError(f"model cannot be searched with: {reason}")
        words, Tk = None, memory.key.shape[1]
        if parts.pointer is not None:
            words = source[:, :Tk].long().masked_fill(~length_mask(lengths, Tk), 0)
        return EncodedSource(memory, parts, words), state

    def decode(
        self,
        words: Tensor,
        state: RecurrentState,
        source: EncodedSource,
        need_weights: bool = False,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        """Return logits ``[R, T, V]`` after ``words [R, T]``, the next state, and weights.

        Those of a pointer-generator are log-probabilities.
        """
        parts, memory = source.parts, source.memory
        layer, output = parts.layer, parts.output
        x = F.embedding(words, parts.embedding.weight) * parts.scale
        feeds = layer.attends_first or layer.feed_size(x.shape[-1]) > 0
        if not feeds:  # what would be fed is multiplied by 0
            fed = memory.value.shape[-1] if layer.output is None else len(layer.output.weight)  # type: ignore[arg-type]
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
            feed=None if layer.attends_first else last[:, -1],  # type: ignore[index]
            history=steps.history, packed=steps.packed,
        )  # fmt: skip
        logits = F.linear(rows, output.weight, output.bias)
        if parts.pointer is not None:
            gate = F.linear(rows, parts.pointer.weight, parts.pointer.bias).squeeze(-1)
            logits = copy_distribution(logits, steps.weights, source.words, gate, log=True)  # type: ignore[arg-type]
        return logits, state, steps.weights if need_weights else None

    def _search_inputs(
        self, source: EncodedSource, state: RecurrentState, constraints: Constraints
    ) -> tuple[SearchInputs | None, str | None, str]:
        return source.parts.search_inputs(source.memory, state, constraints, source.words)


def make_search_model(*modules: nn.Module) -> SearchModel:
    """Return another project's modules as a model for the searches of :mod:`attnfast.decoding`.

    The model's decoder is one that :func:`attnfast.replace` made one operator, of d2l, PyTorch's
    translation tutorial, OpenNMT-py, eole, joeynmt, bentrevett's tutorials, yoyodyne, SpeechBrain,
    ESPnet, clovaai or sgrvinod. The last four read the outputs of an encoder instead of words;
    sgrvinod's searches step by step.

    Args:
        modules: the model; for PyTorch's tutorial its encoder and its decoder; for SpeechBrain its
            embedding, its decoder and its linear layer; for the others that read the outputs of an
            encoder the decoder alone.

    Raises:
        TypeError: an argument is not a module.
        InputError: the modules have no such decoder, or several, or lack what encodes sources.

    Example:
        >>> from attnfast.integrations import make_search_model
        >>> make_search_model(torch.nn.Linear(8, 8))
        Traceback (most recent call last):
            ...
        attnfast._utils.checks.InputError: modules must have one decoder that replace() made one \
operator and that can be searched with, got none
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise_type_error("modules", "torch.nn.Modules", describe(module))
    inner = dict.fromkeys(x for module in modules for x in module.modules())
    served = [(x, adapter) for x in inner if (adapter := adapter_serving(x))]
    known = [(x, adapter.search) for x, adapter in served if adapter.search]
    if len(known) != 1:
        expected = "one decoder that replace() made one operator and that can be searched with"
        others = sorted({adapter.name for _, adapter in served if adapter.attention})
        got = f"{len(known) or 'none'}{' beside ' * bool(others)}{', '.join(others)}"
        raise InputError(f"modules must have {expected}, got {got}")
    [(decoder, encode)] = known
    more = [x for x in dict.fromkeys(modules) if x is not decoder]
    names = list(inspect.signature(encode).parameters)[2:]
    needed = names[1:]
    fits = len(more) == len(needed) and all(
        name != "model" or getattr(x, "decoder", None) is decoder for x, name in zip(more, needed)
    )
    if not fits:
        alone = "the model alone" if "model" in names else "the decoder alone"
        parts = [f"the {name}" for name in (*needed, "decoder")]
        several = f"{', '.join(parts[:-1])} and {parts[-1]}"
        expected = several if needed and "model" not in names else alone
        got = ", ".join(type(x).__name__ for x in modules)
        raise InputError(argument_message("modules", expected, got))
    return SearchModel(encode, decoder, *more)
