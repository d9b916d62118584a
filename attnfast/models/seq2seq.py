"""The encoder, and the model that joins it to a decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnfast._utils.checks import check_flag, check_word, describe, refuse, refuse_type
from attnfast._utils.torch_private import keep_in_pytrees
from attnfast.models.decoders import (
    CELLS,
    BahdanauDecoder,
    LuongDecoder,
    summary,
)
from attnfast.nn import CoverageAttention, Memory, PointerGenerator, SparseSelfAttention
from attnfast.nn._fused_rnn import RecurrentState, run_rnn
from attnfast.nn._linear import linear
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import (
    check_array,
    check_device,
    check_like,
    check_numbers,
    check_range,
    check_tensor,
    is_finite,
)
from attnfast.ops.backends import check_backend

#: The ids that every vocabulary starts with.
PAD, UNK, BOS, EOS = range(4)  # searches never say the first three


def output_limit(lengths: Tensor, ratio: float = 2.0, longest: int = 0) -> Tensor:
    r"""Return how many words, the end included, translations of ``lengths [B]`` words may have.

    .. math:: \max(\lfloor r n \rfloor + 10, \text{longest})
    """
    check_array("lengths", lengths, "int64 or int32", ("B",))
    check_range("lengths", lengths, 0, 2**31 - 1, "lengths")
    return ((ratio * lengths.cpu().double()).long() + 10).clamp_min(longest)


def check_share(name: str, x: object) -> None:
    """Refuse what is no share of a whole, or all of it."""
    if not is_finite(x) or not 0 <= x < 1:  # type: ignore[operator]
        refuse(name, "at least 0 and below 1", describe(x))


def check_ids(name: str, words: object, count: int | None = None) -> None:
    """Refuse what are no word ids ``[B, T]``, below ``count`` if given, which a CPU alone reads."""
    check_tensor(name, words)
    assert isinstance(words, Tensor)
    if words.dtype not in (torch.int64, torch.int32) or words.dim() != 2:
        refuse(name, "word ids [B, T], int64 or int32", describe(words))
    if count is not None:
        check_range(name, words, 0, count - 1, "word ids")


def embed(name: str, words: Tensor, embedding: nn.Embedding) -> Tensor:
    """Return embedded ``words [B, T]``; raise if these are not ids of the vocabulary.

    The embedding itself raises for ids out of bounds; they are read again only then.
    """
    check_ids(name, words)
    check_device(name, words, embedding.weight, "the module")
    try:
        return embedding(words)
    except Exception:
        check_ids(name, words, embedding.num_embeddings)
        raise


def check_source(name: str, source: Any, kind: type, state: object) -> None:
    """Raise unless a source, called ``name``, and a state are those of a model's ``encode``."""
    memory = getattr(source, "memory", None)
    if not isinstance(source, kind) or (isinstance(memory, Memory) and memory.value is None):
        refuse_type(name, "what encode(...) returns", describe(source))
    if not isinstance(state, RecurrentState):
        refuse_type("state", "a RecurrentState", describe(state))


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
    if isinstance(value, Tensor):  # attention of other projects may have none
        check_like(name, value, like)
        if math.prod((*value.shape[1:-2], value.shape[-1])) != context_dim:
            refuse(name, f"of contexts of {context_dim} features", describe(value))
        if value.shape[0] != B:
            refuse("words", f"of {value.shape[0]} sequences, as {name}", describe(words))
    check_array("state.hidden", state.hidden, "real numbers", (*layers, B, features), of="words")
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

    ``whose`` is what the sequences are called.
    """
    B, Tk = of.shape[:2]
    if B and Tk < least:
        refuse(name, f"at least {least}", f"sequences of length {Tk}")
    check_numbers(name, lengths, B, least, Tk, whose)


class Encoder(nn.Module):
    """A bidirectional RNN over the source.

    Args:
        embed_dim: E, features of the words.
        hidden_dim: H, features of each direction.
        cell: ``"gru"`` or ``"lstm"``.
        layers: how many RNNs on top of each other.
        dropout: between the layers, and on what the self-attention returns.
        self_attention: lets the states attend to each other, or None; its output is added to them
            and the sum normalised.
        backend: of the recurrent layers; ``"reference"`` for PyTorch's own.

    Paper: Schuster and Paliwal, "Bidirectional recurrent neural networks", IEEE TSP 45(11), 1997.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        cell: str = "gru",
        layers: int = 1,
        dropout: float = 0.0,
        self_attention: SparseSelfAttention | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        check_backend(backend)
        self.backend = backend
        check_sizes(embed_dim=embed_dim, hidden_dim=hidden_dim, layers=layers)
        check_word("cell", cell, CELLS)
        check_share("dropout", dropout)
        if not isinstance(self_attention, (nn.Module, type(None))):
            refuse_type("self_attention", "a module or None", describe(self_attention))
        self.self_attention = self_attention
        if self_attention is not None:
            self.norm = nn.LayerNorm(2 * hidden_dim)
            self.dropout = nn.Dropout(dropout)
        self.rnn = CELLS[cell](
            int(embed_dim),  # PyTorch takes no integers of NumPy
            int(hidden_dim),
            int(layers),
            batch_first=True,
            bidirectional=True,
            dropout=dropout if layers > 1 else 0.0,
        )

    @property
    def output_dim(self) -> int:
        """Features 2H of the states."""
        return 2 * self.rnn.hidden_size

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return ``[B, Tk, 2H]``, the states of ``embedded [B, Tk, E]``; 0 past ``lengths``."""
        check_array("embedded", embedded, "real numbers", ("B", "Tk", self.rnn.input_size))
        check_like("embedded", embedded, next(self.parameters(), embedded))
        check_lengths(lengths, embedded, whose="embedded")
        length = embedded.shape[1]
        done = run_rnn(self.rnn, embedded, None, lengths.to(embedded.device).long(), self.backend)
        if done is None:
            packed = pack_padded_sequence(
                embedded, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            done = self.rnn(packed)
            done = pad_packed_sequence(done[0], batch_first=True, total_length=length)
        states = done[0]
        if self.self_attention is None:
            return states
        lengths = lengths.to(states.device)
        states = self.norm(states + self.dropout(self.self_attention(states, lengths)[0]))
        exists = torch.arange(length, device=states.device) < lengths.unsqueeze(-1)
        return states * exists.unsqueeze(-1)


class Source(NamedTuple):
    """A source that has been read: what the decoder attends to, and the words that it may copy.

    ``words [B, Tk]``, of which those from V on are the source's own, ``extra_words`` in the batch.
    """

    memory: Memory
    words: Tensor
    extra_words: int

    def index_select(self, index: Tensor) -> Source:
        """Return the sources of the sequences ``index``."""
        return Source(self.memory.index_select(index), self.words[index], self.extra_words)


class Predicted(tuple):
    """``logits, coverage`` of a whole target; ``weights [B, T, Tk]``, None unless asked for."""

    weights: Tensor | None = None


keep_in_pytrees(Predicted, "weights")


class Seq2Seq(nn.Module):
    """Encoder, decoder, and one embedding for source words, target words and the output layer.

    Args:
        encoder: words ``[B, Tk, E]`` and lengths to states ``[B, Tk, 2H]``, an :class:`Encoder` or
            :class:`TransformerEncoder`.
        decoder: :class:`BahdanauDecoder` or :class:`LuongDecoder`; its outputs are ``[B, T, E]``.
        vocab_size, embed_dim: V and E.
        dropout: on words, on encoder states and on decoder outputs.
        pointer: copies words of the source, or None.

    A search writes at most ``length_ratio`` words for each word of a source, and 10 more, or as
    many as ``longest_target``, the end included, whichever is more: see :meth:`output_limit`.

    Paper: Press and Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017,
    arXiv:1608.05859, for the shared embedding.
    """

    length_ratio: float = 2.0
    longest_target: int = 0

    def __init__(
        self,
        encoder: Any,
        decoder: BahdanauDecoder | LuongDecoder,
        vocab_size: int,
        embed_dim: int,
        dropout: float = 0.0,
        pointer: PointerGenerator | None = None,
    ):
        super().__init__()
        check_sizes(vocab_size=vocab_size, embed_dim=embed_dim)
        check_share("dropout", dropout)
        for name, module, has in (("encoder", encoder, "output_dim"), ("decoder", decoder, "rnn")):
            if not isinstance(module, nn.Module) or not hasattr(module, has):
                refuse_type(name, f"a module, as {name}s of this package", describe(module))
        if not isinstance(pointer, (nn.Module, type(None))):
            refuse_type("pointer", "a module or None", describe(pointer))
        self.encoder = encoder
        self.decoder = decoder
        self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=PAD)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.dropout = nn.Dropout(dropout)
        self.pointer = pointer
        hidden_dim = decoder.rnn.hidden_size
        self.bridge = nn.Linear(encoder.output_dim, hidden_dim)
        nn.init.normal_(self.embedding.weight, std=embed_dim**-0.5)
        with torch.no_grad():
            self.embedding.weight[PAD] = 0

    def output_limit(self, lengths: Tensor) -> Tensor:
        """Return how many words, the end included, translations of ``lengths [B]`` may have."""
        return output_limit(lengths, self.length_ratio, self.longest_target)

    def embed(self, words: Tensor) -> Tensor:
        """Return the embedded words ``[B, T, E]`` of ``words [B, T]``."""
        return self._embed("words", words)

    def _embed(self, name: str, words: Tensor) -> Tensor:
        if self.pointer is not None:
            check_ids(name, words)
            words = words.masked_fill(words >= self.embedding.num_embeddings, UNK)
        embedded = embed(name, words, self.embedding)
        return self.dropout(embedded * self.embedding.embedding_dim**0.5)

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Source, RecurrentState]:
        """Read the source and project its keys, once.

        Args:
            source: word ids ``[B, Tk]``; from V on, each sentence's own words, which are read as
                unknown ones and can be copied.
            lengths: ``[B]``, each at least 1.

        Returns:
            What the decoder attends to, and its state before the first word.
        """
        embedded = self._embed("source", source)
        check_lengths(lengths, source, whose="source")
        memory, state = self.read(embedded, lengths)
        extra_words = 0
        if self.pointer is not None:
            extra_words = max(int(source.max()) + 1 - self.embedding.num_embeddings, 0)
        return Source(memory, source, extra_words), state

    def read(self, embedded: Tensor, lengths: Tensor) -> tuple[Memory, RecurrentState]:
        """Do the same with an embedded source ``[B, Tk, E]``."""
        states = self.dropout(self.encoder(embedded, lengths))
        lengths = lengths.to(states.device)
        memory = self.decoder.attention.prepare(states, lengths)
        return memory, self.decoder.initial(torch.tanh(self.bridge(summary(states, lengths))))

    def decode(
        self, words: Tensor, state: RecurrentState, source: Source, need_weights: bool = False
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        """Read the target words ``[B, T]`` from ``state`` on.

        Returns:
            ``logits [B, T, V]`` of the word after each, with a pointer ``[B, T, V + X]`` and
            log-probabilities; the state after the last, and ``weights [B, T, Tk]`` if asked for.
        """
        check_flag("need_weights", need_weights)
        check_source("source", source, Source, state)
        try:
            return self._decode(words, state, source, need_weights)
        except Exception:
            decoder = self.decoder
            hidden = [decoder.rnn.hidden_size]
            check_step(words, state, source, "source", decoder.context_dim, hidden, self.bias)
            raise

    def _decode(
        self, words: Tensor, state: RecurrentState, source: Source, need_weights: bool
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        output, state, weights = self.decoder(
            self.embed(words),
            state,
            source.memory,
            need_weights or self.pointer is not None,
            words != PAD,
        )
        output = self.dropout(output)
        logits = linear(
            output, self.embedding.weight, self.bias, getattr(self.decoder, "backend", None)
        )
        if self.pointer is not None:
            logits = self.pointer(
                logits, weights, source.words, output, extra_words=source.extra_words
            )
        return logits, state, weights if need_weights else None

    def forward(
        self, source: Tensor, lengths: Tensor, target_in: Tensor, need_weights: bool = False
    ) -> Predicted:
        """Read the true previous words ``target_in [B, T]``.

        Returns:
            ``logits, coverage``: the logits of :meth:`decode`, and ``[B]``, the coverage loss of a
            :class:`attnfast.nn.CoverageAttention`, or None; the attribute ``weights`` is as there.
        """
        V = self.embedding.num_embeddings
        check_target(target_in, self.embedding, V if self.pointer is None else None)
        check_flag("need_weights", need_weights)
        check_ids("source", source)
        if source.shape[0] != target_in.shape[0]:
            refuse("target_in", f"of {source.shape[0]} sequences, as source", describe(target_in))
        memory, state = self.encode(source, lengths)
        logits, state, weights = self.decode(target_in, state, memory, need_weights)
        covers = state.history is not None and isinstance(self.decoder.attention, CoverageAttention)
        predicted = Predicted((logits, state.history.loss if covers else None))
        predicted.weights = weights
        return predicted
