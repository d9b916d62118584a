"""A sequence-to-sequence model of an encoder and a decoder."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_flag,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast._utils.torch_private import keep_in_pytrees
from attnfast.decoding._constraints import Constraints, output_limit
from attnfast.models._checks import (
    EOS,
    PAD,
    UNK,
    check_ids,
    check_lengths,
    check_share,
    check_source,
    check_step,
    check_target,
    embed,
)
from attnfast.models._search import select_search_backend
from attnfast.models.decoders import CELLS, RecurrentDecoder, summary
from attnfast.nn import CoverageAttention, CumulativeState, Memory, PointerGenerator
from attnfast.nn._fused_search import search_inputs
from attnfast.nn._layer import History, RecurrentState
from attnfast.nn._linear import is_plain, linear, not_plain_reason
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import mean_of_heads
from attnfast.ops.search import SearchInputs


class SourceEncoder(Protocol):
    """Protocol of the encoder of a :class:`Seq2Seq`, such as :class:`Encoder`."""

    output_dim: int

    def __call__(self, embedded: Tensor, lengths: Tensor, /) -> Tensor:
        """Return the states ``[B, Tk, output_dim]`` of embedded words ``[B, Tk, E]``."""
        ...


class EncodedSource(NamedTuple):
    """Encoded sources: the memory that the decoder attends to, and the words that it may copy.

    Attributes:
        memory: of the encoder's states.
        words: ids of the source words, ``[B, Tk]``; those from V on are out-of-vocabulary words.
            For a pointer-generator padding, 0, replaces the end, so that a target's end is not
            copied.
        num_oov: the number of out-of-vocabulary words in the batch.

    Example:
        >>> from attnfast.models import Config, build
        >>> model = build(Config(vocab_size=50, embed_dim=8, hidden_dim=8)).eval()
        >>> source, state = model.encode(torch.randint(4, 50, (2, 5)), torch.tensor([5, 3]))
        >>> source.memory.key.shape, source.num_oov
        (torch.Size([2, 5, 8]), 0)
    """

    memory: Memory
    words: Tensor
    num_oov: int

    def index_select(self, index: Tensor) -> EncodedSource:
        """Return the sources of the sequences ``index``."""
        return EncodedSource(self.memory.index_select(index), self.words[index], self.num_oov)


class Seq2SeqOutput(tuple[Tensor, Tensor | None]):
    """``logits, coverage`` of a whole target.

    The attributes are ``weights [B, T, Tk]``, or ``[B, H, T, Tk]`` of H heads or hops, None unless
    requested, and ``history``, the state of the attention after the target, such as a
    :class:`attnfast.nn.HardAttentionState`, or None.

    Example:
        >>> model = attnfast.models.build(attnfast.models.Config(50, "bahdanau"))
        >>> source, target = torch.randint(4, 50, (2, 7)), torch.randint(4, 50, (2, 5))
        >>> logits, coverage = model(source, torch.tensor([7, 4]), target)
        >>> logits.shape
        torch.Size([2, 5, 50])
    """

    weights: Tensor | None = None
    history: History | None = None


keep_in_pytrees(Seq2SeqOutput, "weights", "history")


class Seq2Seq(Module):
    r"""An encoder, a decoder, and one embedding for source, target and output layer.

    .. math:: h = \mathrm{Encoder}(\sqrt{d}\, E x), \quad
              s_0 = \tanh(W_b [\overrightarrow h_n; \overleftarrow h_1] + b_b), \quad
              o_t, s_t = \mathrm{Decoder}(\sqrt{d}\, E y_{t-1}, s_{t-1}, h), \quad
              P(y_t) = \mathrm{softmax}(E^\top o_t + b)

    with E the embedding of d features.

    Args:
        encoder: words ``[B, Tk, E]`` and lengths to states ``[B, Tk, 2H]``, an :class:`Encoder` or
            :class:`TransformerEncoder`.
        decoder: a :class:`RecurrentDecoder`, whose outputs are ``[B, T, E]``.
        vocab_size, embed_dim: V and E.
        dropout: on words, on encoder states and on decoder outputs.
        pointer: copies words of the source, or None. The gate of a
            :class:`attnfast.nn.PointerGenerator` reads the decoder's state, the context and the
            embedded word, if it has as many features as these, or the output, if it has E.

    A search returns at most ``length_ratio`` words for each word of a source plus 10, or
    ``longest_target`` if that is more, the end included: see :meth:`output_limit`.

    Paper: Press and Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017,
    arXiv:1608.05859, for the shared embedding.

    Example:
        >>> from attnfast.models import Encoder, RecurrentDecoder, Seq2Seq
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> decoder = RecurrentDecoder(3, 8, 6, attention)
        >>> model = Seq2Seq(Encoder(3, 4), decoder, vocab_size=50, embed_dim=3)
        >>> source, target_in = torch.randint(4, 50, (2, 5)), torch.randint(4, 50, (2, 7))
        >>> logits, _ = model(source, torch.tensor([5, 3]), target_in)
        >>> logits.shape
        torch.Size([2, 7, 50])
    """

    length_ratio: float = 2.0
    longest_target: int = 0

    def __init__(
        self,
        encoder: SourceEncoder,
        decoder: RecurrentDecoder,
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
                raise_type_error(name, f"a module, as {name}s of this package", describe(module))
        if not isinstance(pointer, (nn.Module, type(None))):
            raise_type_error("pointer", "a module or None", describe(pointer))
        self.encoder = encoder
        self.decoder = decoder
        self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=PAD)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.dropout = nn.Dropout(dropout)
        self.pointer = pointer
        rnn = decoder.rnn
        joined = rnn.hidden_size + rnn.context_size + embed_dim
        features = pointer.gate.in_features if isinstance(pointer, PointerGenerator) else embed_dim
        if features not in (joined, embed_dim):
            raise_value_error("pointer", f"of {joined} or {embed_dim} features", features)
        self._gate_reads_state = features == joined
        self.bridge = nn.Linear(encoder.output_dim, rnn.hidden_size)
        nn.init.normal_(self.embedding.weight, std=embed_dim**-0.5)
        with torch.no_grad():
            self.embedding.weight[PAD] = 0

    def extra_repr(self) -> str:
        """Return the options that are not defaults."""
        return repr_fields(self, defaults={"length_ratio": 2.0, "longest_target": 0})

    def output_limit(self, lengths: Tensor) -> Tensor:
        """Return the largest number of words, the end included, of translations of ``lengths [B]``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        return output_limit(lengths, self.length_ratio, self.longest_target)

    def embed(self, words: Tensor) -> Tensor:
        """Return the embedded words ``[B, T, E]`` of ``words [B, T]``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        return self._embed("words", words)

    def _embed(self, name: str, words: Tensor) -> Tensor:
        if self.pointer is not None:
            check_ids(name, words)
            words = words.masked_fill(words >= self.embedding.num_embeddings, UNK)
        embedded = embed(name, words, self.embedding)
        return self.dropout(embedded * self.embedding.embedding_dim**0.5)

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[EncodedSource, RecurrentState]:
        """Read the source and project its keys, once.

        Args:
            source: word ids ``[B, Tk]``; ids from V on are out-of-vocabulary words, which are read
                as the unknown word and can be copied.
            lengths: ``[B]``, each at least 1.

        Returns:
            The encoded source, and the decoder's state before the first word.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        embedded = self._embed("source", source)
        check_lengths(lengths, source, whose="source")
        memory, state = self.read(embedded, lengths)
        num_oov = 0
        if self.pointer is not None and source.numel():
            num_oov = max(int(source.max()) + 1 - self.embedding.num_embeddings, 0)
        if self.pointer is not None:
            source = source.masked_fill(source == EOS, PAD)
        return EncodedSource(memory, source, num_oov), state

    def read(self, embedded: Tensor, lengths: Tensor) -> tuple[Memory, RecurrentState]:
        """Encode an embedded source; return its memory and the initial state.

        Args:
            embedded: ``[B, Tk, E]``, from :meth:`embed`.
            lengths: ``[B]``, each at least 1.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        states = self.dropout(self.encoder(embedded, lengths))
        lengths = lengths.to(states.device)
        attention: Any = self.decoder.attention
        memory: Memory = attention.prepare(states, lengths)
        last = summary(states, lengths, getattr(self.encoder, "bidirectional", True))
        return memory, self.decoder.initial(torch.tanh(self.bridge(last)))

    def _search_inputs(
        self, source: EncodedSource, state: RecurrentState, constraints: Constraints
    ) -> tuple[SearchInputs | None, str | None, str]:
        """Return the operator's arguments for a search, its backend, and why there is none."""
        backend, reason = self._select_search_backend(source, state, constraints)
        if backend is None:
            return None, None, reason
        words, decoder = self.embedding, self.decoder
        layer = decoder.rnn._layer(*range(decoder.rnn.num_layers))
        copying: dict[str, Any] = {}
        if self.pointer is not None:
            copying = {
                "weight_pointer": self.pointer.gate.weight, "bias_pointer": self.pointer.gate.bias,
                "source": source.words.long(), "num_oov": source.num_oov, "unknown": UNK,
            }  # fmt: skip
        call = search_inputs(
            layer, decoder.attention, source.memory, state, constraints, backend,
            embedding=words.weight, weight_vocab=words.weight, bias_vocab=self.bias,
            readout=decoder.readout, embedding_scale=words.embedding_dim**0.5, **copying,
        )  # fmt: skip
        return call, backend, ""

    def _select_search_backend(
        self, source: EncodedSource, state: RecurrentState, constraints: Constraints
    ) -> tuple[str | None, str]:
        """Return the backend whose operator can search with this model, or None and the reason."""
        pointer, V = self.pointer, self.embedding.num_embeddings
        if pointer is not None and not is_plain(pointer, PointerGenerator):
            return None, not_plain_reason(pointer, PointerGenerator)
        if pointer is not None and constraints.start >= V:
            return None, f"the start, {constraints.start}, is not in the vocabulary of {V} words"
        if PAD not in constraints.forbidden or constraints.start == PAD:
            return None, f"a hypothesis may have the padding word, {PAD}"
        decoder = self.decoder
        if is_plain(decoder, RecurrentDecoder):
            if not is_plain(decoder.rnn, *CELLS.values()):
                return None, not_plain_reason(decoder.rnn, *CELLS.values())
            if decoder.rnn.num_layers > 1 and decoder.rnn.query_layer == "first":
                return None, "its first layer attends, not its last"
        linears = [decoder.readout, None if pointer is None else pointer.gate]
        backend, reason = select_search_backend(
            self, Seq2Seq, (RecurrentDecoder,), [x for x in linears if x is not None],
            source.memory, state.history,
        )  # fmt: skip
        if pointer is not None and backend and pointer.backend not in (None, backend):
            return None, f"its pointer-generator has the backend {pointer.backend!r}"
        return backend, reason

    def decode(
        self,
        words: Tensor,
        state: RecurrentState,
        source: EncodedSource,
        need_weights: bool = False,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        """Read target words from ``state`` on.

        Args:
            words: ids ``[B, T]``.
            state: from :meth:`encode`, or from the last call.
            source: from :meth:`encode`.
            need_weights: return the attention weights too.

        Returns:
            ``logits [B, T, V]`` of the word after each, with a pointer ``[B, T, V + X]`` and
            log-probabilities; the state after the last, and ``weights [B, T, Tk]``, or ``[B, H, T,
            Tk]`` of H heads or hops, if requested.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_flag("need_weights", need_weights)
        check_source("source", source, EncodedSource, state)
        try:
            return self._decode(words, state, source, need_weights)
        except Exception:
            rnn = self.decoder.rnn
            hidden = rnn.num_layers, rnn.hidden_size
            check_step(words, state, source, "source", rnn.context_size, hidden, self.bias)
            raise

    def _decode(
        self, words: Tensor, state: RecurrentState, source: EncodedSource, need_weights: bool
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        embedded, lengths = self.embed(words), None
        # A history skips the padding after a target; a step of a search has none.
        if getattr(self.decoder.attention, "has_history", False) and words.shape[1] > 1:
            lengths = (words != PAD).sum(-1)
        decoded = self.decoder(
            embedded, source.memory, state, target_lengths=lengths,
            need_weights=need_weights or self.pointer is not None,
        )  # fmt: skip
        output, state = decoded
        output = self.dropout(output)
        logits = linear(output, self.embedding.weight, self.bias, self.decoder.backend)
        if self.pointer is not None:
            read = [output]
            if self._gate_reads_state:
                read = [decoded.states, decoded.contexts, embedded]
            assert decoded.weights is not None
            weights = mean_of_heads(decoded.weights)
            logits = self.pointer(logits, weights, source.words, *read, num_oov=source.num_oov)
        return logits, state, decoded.weights if need_weights else None

    def forward(
        self, source: Tensor, lengths: Tensor, target_in: Tensor, need_weights: bool = False
    ) -> Seq2SeqOutput:
        """Read a source and the true previous words of its target.

        Args:
            source, lengths: as in :meth:`encode`.
            target_in: ids ``[B, T]`` that begin with the start, padded with 0.
            need_weights: return the attention weights too.

        Returns:
            ``logits, coverage``: the logits of :meth:`decode`, and ``[B]``, the coverage loss of a
            :class:`attnfast.nn.CoverageAttention`, or None; the attributes are ``weights``, as in
            :meth:`decode`, and ``history``, that of the attention.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        V = self.embedding.num_embeddings
        check_target(target_in, self.embedding, V if self.pointer is None else None)
        check_flag("need_weights", need_weights)
        check_ids("source", source)
        if source.shape[0] != target_in.shape[0]:
            raise_value_error(
                "target_in", f"of {source.shape[0]} sequences, as source", describe(target_in)
            )
        memory, state = self.encode(source, lengths)
        logits, state, weights = self.decode(target_in, state, memory, need_weights)
        attention: Any = self.decoder.attention
        while hasattr(attention, "attention"):  # a gate
            attention = attention.attention
        history, loss = state.history, None
        if isinstance(history, CumulativeState) and isinstance(attention, CoverageAttention):
            loss = history.loss
        predicted = Seq2SeqOutput((logits, loss))
        predicted.weights, predicted.history = weights, history
        return predicted
