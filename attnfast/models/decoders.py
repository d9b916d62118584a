"""Recurrent decoders, which take any attention as an argument.

A decoder has one call for training and search::

    output, state, weights = decoder(embedded, state, memory)

with ``embedded [B, T, E]``: the whole target in teacher forcing, T = 1 at each step of a search.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import (
    check_array,
    check_choice,
    check_flag,
    check_like,
    check_numbers,
    check_tensor,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.torch_private import is_autocast_on
from attnfast.decoding import check_memory
from attnfast.models._checks import check_share
from attnfast.nn import Memory
from attnfast.nn._fused_rnn import run_layer, run_rnn
from attnfast.nn._layer import Layer, LayerOutputs, RecurrentState
from attnfast.nn._linear import project
from attnfast.nn.attention import check_sizes, check_target_mask
from attnfast.ops.backends import check_backend
from attnfast.ops.span import check_form

CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}


def state_shape(rnn: nn.RNNBase) -> tuple[int, ...]:
    """Return the shape of a decoder's state without the batch: ``(D,)``, ``(L, D)`` for a stack."""
    return (*[rnn.num_layers] * (rnn.num_layers > 1), rnn.hidden_size)


def summary(states: Tensor, lengths: Tensor) -> Tensor:
    """Return the last state of each direction of a bidirectional encoder.

    Args:
        states: ``[B, Tk, 2H]``, forward and backward states side by side.
        lengths: ``[B]``, each at least 1.

    Returns:
        ``[B, 2H]``: the forward state of the last word and the backward state of the first, joined.
    """
    forward, backward = states.chunk(2, -1)
    last = (lengths - 1).to(states.device).view(-1, 1, 1).expand(-1, 1, forward.shape[-1])
    first = backward[:, :1].sum(1)  # one row, or none for an empty batch
    return torch.cat([forward.gather(1, last).squeeze(1), first], -1)


class FixedContext(nn.Module):
    r"""No attention: every decoder state gets the same context, the encoder's last states.

    .. math:: c_t = [\overrightarrow h_n; \overleftarrow h_1]

    It has the two methods of an attention, so that decoders need no special case.

    Args:
        backend: of the decoder's recurrent layer; ``"reference"`` for PyTorch's own.

    Paper: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", EMNLP 2014,
    arXiv:1406.1078.

    Example:
        >>> attention = attnfast.models.FixedContext()
        >>> memory = attention.prepare(torch.randn(2, 5, 8), torch.tensor([5, 3]))
        >>> context, _ = attention(torch.randn(2, 3, 6), memory)
        >>> torch.equal(context[:, 0], context[:, 2])  # equal for all states
        True
    """

    def __init__(self, backend: str | None = None):
        super().__init__()
        check_backend(backend)
        self.backend = backend

    def prepare(self, states: Tensor, lengths: Tensor) -> Memory:
        """Return a memory with one value, the last states of each direction, ``[B, 1, 2H]``.

        Args:
            states: ``[B, Tk, 2H]``, of a bidirectional encoder.
            lengths: ``[B]``, each at least 1.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("states", states, "floating-point", ("B", "Tk", "2H"))
        check_numbers("lengths", lengths, states.shape[0], 1, states.shape[1], "states")
        value = summary(states, lengths).unsqueeze(1)
        return Memory(value, value)

    def forward(
        self, state: Tensor, memory: Memory, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """Return the memory's value for any state.

        Args:
            state: ``[B, D]`` for one decoder step or ``[B, Tq, D]`` for many.
            memory: from :meth:`prepare`.
            need_weights: has no effect: there are no weights.

        Returns:
            ``[B, 2H]`` or ``[B, Tq, 2H]``, and None.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_memory(memory)
        B, value = memory.value.shape[0], memory.value
        check_array(
            "state", state, "floating-point", (B, "D"), (B, "Tq", "D"), like=value, of="memory"
        )
        check_form(need_weights)
        if state.dim() == 2:
            return memory.value.squeeze(1), None
        return memory.value.expand(-1, state.shape[1], -1), None


class NoContext(FixedContext):
    r"""No attention and no context: a decoder reads the source in its initial state alone.

    .. math:: c_t = 0

    The context is one feature.

    Args:
        backend: of the decoder's recurrent layer; ``"reference"`` for PyTorch's own.

    Paper: Sutskever, Vinyals and Le, "Sequence to Sequence Learning with Neural Networks",
    NeurIPS 2014, arXiv:1409.3215.

    Example:
        >>> attention = attnfast.models.NoContext()
        >>> memory = attention.prepare(torch.randn(2, 5, 8), torch.tensor([5, 3]))
        >>> attention(torch.randn(2, 6), memory)[0]
        tensor([[0.],
                [0.]])
    """

    def prepare(self, states: Tensor, lengths: Tensor) -> Memory:
        """Return a memory with one value of one feature, 0, ``[B, 1, 1]``.

        Args:
            states: ``[B, Tk, 2H]``.
            lengths: ``[B]``, each at least 1.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        super().prepare(states, lengths)
        value = states.new_zeros(len(states), 1, 1)
        return Memory(value, value)


class _Decoder(nn.Module):
    """Base of both decoders: the initial state, a call of the RNN and one of the attention."""

    readout: nn.Linear

    def __init__(
        self,
        attention: nn.Module,
        cell: str,
        input_dim: int,
        context_dim: int,
        hidden_dim: int,
        layers: int,
        dropout: float,
    ):
        check_sizes(context_dim=context_dim, hidden_dim=hidden_dim, layers=layers)
        check_share("dropout", dropout)
        super().__init__()
        if not isinstance(attention, nn.Module):
            raise_type_error("attention", "a module", describe(attention))
        check_choice("cell", cell, CELLS)
        self.context_dim = context_dim
        self.attention: Any = attention  # it has the two methods of the modules of attnfast.nn
        # PyTorch does not accept NumPy integers
        self.rnn = CELLS[cell](
            int(input_dim), int(hidden_dim), int(layers), batch_first=True,
            dropout=dropout if layers > 1 else 0.0,
        )  # fmt: skip

    @property
    def backend(self) -> str | None:
        """The backend of the attention, which the recurrent layer and the readout use too."""
        return getattr(self.attention, "backend", None)

    def parts(self) -> tuple[Layer, nn.Linear | None]:
        """Return the layer that attends, and the readout of states, contexts and words, or None."""
        raise NotImplementedError

    def _run(self, inputs: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Run the RNN over ``inputs [B, T, ·]``; return its states ``[B, T, D]`` and the last."""
        shape = self.rnn.num_layers, *state.hidden.shape[-2:]
        hx: Any = state.hidden.reshape(shape)
        if state.cell is not None:
            hx = hx, state.cell.reshape(shape)
        single = inputs.shape[1] == 1  # for which a step of a loop is as fast
        done = None if single else run_rnn(self.rnn, inputs, hx, None, self.backend)
        states, hx = self.rnn(inputs, hx) if done is None else done
        if state.cell is None:
            return states, state._replace(hidden=hx.view_as(state.hidden))
        hidden, cell = (x.view_as(state.hidden) for x in hx)
        return states, state._replace(hidden=hidden, cell=cell)

    def _together(
        self,
        embedded: Tensor,
        state: RecurrentState,
        memory: Memory,
        need_weights: bool,
        target_mask: Tensor | None,
    ) -> tuple[LayerOutputs, RecurrentState]:
        """Run RNN and attention step by step, as each depends on the other's last step."""
        between = None
        if self.training and self.rnn.dropout:
            B, T, rnn = *embedded.shape[:2], self.rnn
            between = embedded.new_ones(rnn.num_layers - 1, B, T, rnn.hidden_size)
            between = F.dropout(between, rnn.dropout)
        done = run_layer(
            self.parts()[0], embedded, state, self.attention, memory,
            target_mask=target_mask, dropout_between=between, need_weights=need_weights,
        )  # fmt: skip
        cell = None if done.cells is None else done.cells[..., -1, :]
        state = state._replace(
            hidden=done.states[..., -1, :], cell=cell, history=done.history, packed=done.packed
        )
        return done, state

    def _attend(
        self,
        query: Tensor,
        state: RecurrentState,
        memory: Memory,
        need_weights: bool,
        target_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, RecurrentState]:
        """Attend with ``query [B, D]`` or ``[B, T, D]``; return context, weights and the state."""
        form = "dense" if need_weights else False
        if not getattr(self.attention, "has_history", False):
            return *self.attention(query, memory, form), state
        context, weights, history = self.attention(query, memory, state.history, form, target_mask)
        return context, weights, state._replace(history=history)

    def forward(
        self,
        embedded: Tensor,
        state: RecurrentState,
        memory: Memory,
        need_weights: bool = False,
        target_mask: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        """Decode the words of a target.

        Args:
            embedded: ``[B, T, E]``.
            state: from :meth:`initial`, or from the last call.
            memory: from the attention's ``prepare``.
            need_weights: return the attention weights too.
            target_mask: ``[B, T]``, False for padding, which attention with a history skips.

        Returns:
            ``output [B, T, E]``, the state after the last word, ``weights [B, T, Tk]`` or None.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        try:
            check_flag("need_weights", need_weights)
            check_target_mask(target_mask, embedded.shape[:2], embedded, "embedded")
            promoted = embedded.dtype != state.hidden.dtype and not is_autocast_on()
            if promoted or state.hidden.dim() != 2 + (self.rnn.num_layers > 1):
                self._check_call(embedded, state, memory)  # PyTorch would promote or broadcast
            return self._words(embedded, state, memory, need_weights, target_mask)
        except Exception:
            self._check_call(embedded, state, memory)
            raise

    def _words(
        self,
        embedded: Tensor,
        state: RecurrentState,
        memory: Memory,
        need_weights: bool,
        target_mask: Tensor | None,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        raise NotImplementedError

    def _check_call(self, embedded: Any, state: Any, memory: Any) -> None:
        """Raise, in one sentence, unless the arguments of a call fit."""
        features = self.readout.out_features
        check_tensor("embedded", embedded)
        if not isinstance(state, RecurrentState):
            raise_type_error("state", "a RecurrentState", describe(state))
        check_memory(memory)
        *layers, H = state_shape(self.rnn)
        B, shape = len(memory.key), (*layers, len(memory.key), H)
        check_array("state.hidden", state.hidden, "floating-point", shape, of="memory and decoder")
        if embedded.dim() != 3 or len(embedded) != B or embedded.shape[-1] != features:
            raise_value_error(
                "embedded", f"[{B}, T, {features}] to fit decoder and state", describe(embedded)
            )
        if embedded.dtype != state.hidden.dtype or embedded.device != state.hidden.device:
            like = f"{state.hidden.dtype} on {state.hidden.device}, as the state"
            raise_value_error("embedded", like, f"{embedded.dtype} on {embedded.device}")
        if not embedded.shape[1]:
            raise_value_error(
                "embedded", f"[{B}, T, {features}] with T of at least 1", describe(embedded)
            )
        check_like("memory", memory.key, embedded, "the inputs'")
        *heads, _, found = memory.value.shape[1:]
        if math.prod(heads) * found != self.context_dim:
            raise_value_error(
                "memory", f"of values of {self.context_dim} features", describe(memory.value)
            )

    def initial(self, hidden: Tensor) -> RecurrentState:
        """Return the state before the first word, given ``hidden [B, D]`` of every layer.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("hidden", hidden, "floating-point", ("B", self.rnn.hidden_size))
        check_like("hidden", hidden, next(self.parameters(), hidden))
        lstm = isinstance(self.rnn, nn.LSTM)
        if self.rnn.num_layers > 1:
            hidden = torch.stack([hidden] * self.rnn.num_layers)
        return RecurrentState(hidden, torch.zeros_like(hidden) if lstm else None)


class BahdanauDecoder(_Decoder):
    r"""The decoder of Bahdanau: it attends first, and the RNN reads the context.

    .. math:: c_t = \mathrm{attention}(s_{t-1}), \quad s_t = \mathrm{RNN}(s_{t-1}, [y_{t-1}; c_t]),
              \quad o_t = \tanh(W_o [s_t; c_t; y_{t-1}])

    Args:
        embed_dim, context_dim, hidden_dim: features of words and outputs, of contexts, of states.
        attention: a module of :mod:`attnfast.nn`, or :class:`FixedContext`.
        cell: ``"gru"`` or ``"lstm"``.
        layers: RNN layers; the state of the last one attends and is read out.
        dropout: on the states that a layer reads from the one below.

    Paper: Bahdanau, Cho and Bengio, ICLR 2015, arXiv:1409.0473; tanh replaces maxout.

    Example:
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> decoder = attnfast.models.BahdanauDecoder(3, 8, 6, attention)
        >>> memory = attention.prepare(torch.randn(2, 5, 8))
        >>> state = decoder.initial(torch.zeros(2, 6))
        >>> output, state, _ = decoder(torch.randn(2, 7, 3), state, memory)
        >>> output.shape, state.hidden.shape
        (torch.Size([2, 7, 3]), torch.Size([2, 6]))
    """

    def __init__(
        self,
        embed_dim: int,
        context_dim: int,
        hidden_dim: int,
        attention: nn.Module,
        *,
        cell: str = "gru",
        layers: int = 1,
        dropout: float = 0.0,
    ):
        check_sizes(embed_dim=embed_dim, context_dim=context_dim)
        input_dim = embed_dim + context_dim
        super().__init__(attention, cell, input_dim, context_dim, hidden_dim, layers, dropout)
        self.readout = nn.Linear(hidden_dim + context_dim + embed_dim, embed_dim)

    def parts(self) -> tuple[Layer, nn.Linear | None]:
        """Return the layer, which attends before its cell, and the readout."""
        return Layer.of(self.rnn), self.readout

    def _words(
        self,
        embedded: Tensor,
        state: RecurrentState,
        memory: Memory,
        need_weights: bool,
        target_mask: Tensor | None,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        done, state = self._together(embedded, state, memory, need_weights, target_mask)
        joined = torch.cat([done.output, done.contexts, embedded], -1)  # type: ignore[list-item]
        return torch.tanh(project(self.readout, joined, self.backend)), state, done.weights


class LuongDecoder(_Decoder):
    r"""The decoder of Luong: the RNN takes its step first, then its state attends.

    .. math:: s_t = \mathrm{RNN}(s_{t-1}, y_{t-1}), \quad c_t = \mathrm{attention}(s_t), \quad
              \tilde s_t = \tanh(W_c [c_t; s_t])

    No state depends on an attention, so the whole target is one call of the RNN and one of the
    attention. With input feeding the RNN reads :math:`[y_{t-1}; \tilde s_{t-1}]`, so that
    alignments depend on past ones, and the target is decoded word by word.

    Args:
        embed_dim, context_dim, hidden_dim: features of words and outputs, of contexts, of states.
        attention: a module of :mod:`attnfast.nn`, or :class:`FixedContext`.
        cell: ``"gru"`` or ``"lstm"``.
        input_feeding: feed the attentional vector back.
        layers, dropout: as in :class:`BahdanauDecoder`.

    Paper: Luong, Pham and Manning, EMNLP 2015, arXiv:1508.04025.

    Example:
        >>> attention = attnfast.nn.LuongAttention(query_dim=6, key_dim=8)
        >>> decoder = attnfast.models.LuongDecoder(3, 8, 6, attention, input_feeding=True)
        >>> memory = attention.prepare(torch.randn(2, 5, 8))
        >>> state = decoder.initial(torch.zeros(2, 6))
        >>> output, state, _ = decoder(torch.randn(2, 7, 3), state, memory)
        >>> torch.equal(state.feed, output[:, -1])
        True
    """

    def __init__(
        self,
        embed_dim: int,
        context_dim: int,
        hidden_dim: int,
        attention: nn.Module,
        *,
        cell: str = "gru",
        input_feeding: bool = False,
        layers: int = 1,
        dropout: float = 0.0,
    ):
        check_sizes(embed_dim=embed_dim)
        check_flag("input_feeding", input_feeding)
        input_dim = embed_dim * (1 + input_feeding)
        super().__init__(attention, cell, input_dim, context_dim, hidden_dim, layers, dropout)
        self.readout = nn.Linear(context_dim + hidden_dim, embed_dim)
        self.input_feeding = input_feeding

    def parts(self) -> tuple[Layer, nn.Linear | None]:
        """Return the layer, which attends after its cell, and None."""
        return Layer.of(self.rnn, output=self.readout, attends_first=False), None

    def initial(self, hidden: Tensor) -> RecurrentState:
        """Return the state before the first word, given ``hidden [B, D]`` of every layer.

        With input feeding the attentional vector before the first word is 0.
        """
        state = super().initial(hidden)
        if not self.input_feeding:
            return state
        return state._replace(feed=hidden.new_zeros(len(hidden), self.readout.out_features))

    def _decode(
        self,
        inputs: Tensor,
        state: RecurrentState,
        memory: Memory,
        need_weights: bool,
        target_mask: Tensor | None,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        states, state = self._run(inputs, state)
        context, weights, state = self._attend(states, state, memory, need_weights, target_mask)
        joined = torch.cat([context, states], -1)
        return torch.tanh(project(self.readout, joined, self.backend)), state, weights

    def _words(
        self,
        embedded: Tensor,
        state: RecurrentState,
        memory: Memory,
        need_weights: bool,
        target_mask: Tensor | None,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        if not self.input_feeding:
            return self._decode(embedded, state, memory, need_weights, target_mask)
        done, state = self._together(embedded, state, memory, need_weights, target_mask)
        assert done.attentional is not None
        return done.attentional, state._replace(feed=done.attentional[:, -1]), done.weights
