"""The recurrent decoder, which takes any attention as an argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_array,
    check_choice,
    check_flag,
    check_like,
    check_numbers,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.decoding import check_memory
from attnfast.models._checks import check_share
from attnfast.nn import AttentionGRU, AttentionLSTM, AttentionRNN, Memory, RecurrentState
from attnfast.nn._linear import project
from attnfast.nn.attention import check_sizes
from attnfast.nn.recurrent import RECURRENCES
from attnfast.ops.backends import check_backend
from attnfast.ops.span import check_form
from attnfast.outputs import RecurrentOutput, recurrent_result

CELLS = {"rnn": AttentionRNN, "gru": AttentionGRU, "lstm": AttentionLSTM}
#: Kinds of readout.
READOUTS = ("deep", "attentional")


def summary(states: Tensor, lengths: Tensor, bidirectional: bool = True) -> Tensor:
    """Return the last state of each direction of an encoder.

    Args:
        states: ``[B, Tk, 2H]``, forward and backward states side by side, or of one direction.
        lengths: ``[B]``, each at least 1.
        bidirectional: whether the states are of two directions.

    Returns:
        ``[B, 2H]``: the forward state of the last word and the backward state of the first, joined;
        of one direction, the state of the last word.
    """
    forward, backward = states.chunk(2, -1) if bidirectional else (states, states[..., :0])
    last = (lengths - 1).to(states.device).view(-1, 1, 1).expand(-1, 1, forward.shape[-1])
    first = backward[:, :1].sum(1)  # one row, or none for an empty batch
    return torch.cat([forward.gather(1, last).squeeze(1), first], -1)


class FixedContext(Module):
    r"""No attention: every decoder state gets the same context, the encoder's last states.

    .. math:: c_t = [\overrightarrow h_n; \overleftarrow h_1]

    It has the two methods of an attention module, so that decoders need no special case.

    Args:
        backend: backend of the decoder's recurrent layer; ``"reference"`` for PyTorch's own.
        bidirectional: False for an encoder of one direction: :math:`c_t = h_n`.

    Paper: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", EMNLP 2014,
    arXiv:1406.1078.

    Example:
        >>> attention = attnfast.models.FixedContext()
        >>> memory = attention.prepare(torch.randn(2, 5, 8), torch.tensor([5, 3]))
        >>> context, _ = attention(torch.randn(2, 3, 6), memory)
        >>> torch.equal(context[:, 0], context[:, 2])  # equal for all states
        True
    """

    def __init__(self, backend: str | None = None, bidirectional: bool = True):
        super().__init__()
        check_backend(backend)
        self.backend = backend
        self.bidirectional = check_flag("bidirectional", bidirectional)

    def extra_repr(self) -> str:
        """Return the options that are not defaults."""
        return repr_fields(self, defaults={"bidirectional": True, "backend": None})

    def prepare(self, states: Tensor, lengths: Tensor) -> Memory:
        """Return a memory with one value, the last states of each direction, ``[B, 1, 2H]``.

        Args:
            states: ``[B, Tk, 2H]``, of an encoder.
            lengths: ``[B]``, each at least 1.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("states", states, "floating-point", ("B", "Tk", "2H"))
        check_numbers("lengths", lengths, states.shape[0], 1, states.shape[1], "states")
        value = summary(states, lengths, self.bidirectional).unsqueeze(1)
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

    The context has one feature.

    Args:
        backend, bidirectional: as in :class:`FixedContext`.

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


class RecurrentDecoder(Module):
    r"""A recurrent layer that attends, and a readout.

    The recurrence is one of :class:`attnfast.nn.AttentionRNN`: the context is an input of the RNN
    (``"attend_first"``, Bahdanau), of its next step (``"attend_last"``, Listen, Attend and Spell),
    or of the attentional vector that the next step reads (``"input_feeding"``, Luong); or the RNN
    never reads it (``"independent"``). The readout is

    ===============  =====================================================
    ``deep``         :math:`o_t = \tanh(W_r [s_t; c_t; y_{t-1}] + b_r)`
    ``attentional``  :math:`o_t = \tanh(W_r [s_t; c_t] + b_r)`; with input
                     feeding the vector that is fed, without :math:`b_r`
    ===============  =====================================================

    The first is Bahdanau's deep output, with tanh for maxout; the second, Luong's.

    Args:
        embed_dim, context_dim, hidden_dim: features of words and outputs, contexts, and states.
        attention: a module of :mod:`attnfast.nn`, or :class:`FixedContext`.
        cell: ``"rnn"``, ``"gru"`` or ``"lstm"``.
        recurrence, query_layer: as in :class:`attnfast.nn.AttentionRNN`.
        readout: one of the table.
        layers: number of RNN layers; the readout reads the state of the last one.
        dropout: on the states that a layer reads from the one below.

    Papers: Bahdanau, Cho and Bengio, ICLR 2015, arXiv:1409.0473; Luong, Pham and Manning, EMNLP
    2015, arXiv:1508.04025; Pascanu et al., ICLR 2014, arXiv:1312.6026, for deep outputs.

    Example:
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> decoder = attnfast.models.RecurrentDecoder(3, 8, 6, attention)
        >>> memory = attention.prepare(torch.randn(2, 5, 8))
        >>> state = decoder.initial(torch.zeros(2, 6))
        >>> output, state = decoder(torch.randn(2, 7, 3), memory, state)
        >>> output.shape, state.hidden.shape
        (torch.Size([2, 7, 3]), torch.Size([1, 2, 6]))
    """

    def __init__(
        self,
        embed_dim: int,
        context_dim: int,
        hidden_dim: int,
        attention: nn.Module,
        *,
        cell: str = "gru",
        recurrence: str = "attend_first",
        query_layer: str = "last",
        readout: str = "deep",
        layers: int = 1,
        dropout: float = 0.0,
    ):
        super().__init__()
        check_sizes(
            embed_dim=embed_dim, context_dim=context_dim, hidden_dim=hidden_dim, layers=layers
        )
        check_choice("cell", cell, CELLS)
        check_choice("readout", readout, READOUTS)
        check_share("dropout", dropout)
        check_choice("recurrence", recurrence, RECURRENCES)
        feeds = recurrence == "input_feeding"
        self.rnn = CELLS[cell](
            embed_dim, hidden_dim, context_dim, attention, num_layers=layers,
            recurrence=recurrence, query_layer=query_layer,
            output_size=embed_dim if feeds else None, dropout=dropout if layers > 1 else 0.0,
        )  # fmt: skip
        self.reads_input = readout == "deep"
        self.readout: nn.Linear | None = None
        if self.reads_input or not feeds:
            read = hidden_dim + context_dim + embed_dim * self.reads_input
            self.readout = nn.Linear(read, embed_dim)

    @property
    def attention(self) -> nn.Module:
        """The attention module, that of the RNN; another one can be assigned."""
        return self.rnn.attention

    @attention.setter
    def attention(self, attention: nn.Module) -> None:
        self.rnn.attention = attention

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "attention":  # nn.Module would add a submodule, and not call the setter
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def backend(self) -> str | None:
        """The backend of the attention, which the recurrent layer and the readout use too."""
        return self.rnn.backend

    def initial(self, hidden: Tensor) -> RecurrentState:
        """Return the state before the first word, given ``hidden [B, D]`` of every layer.

        The cells of an LSTM and the fed vector are 0.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        layers, size = self.rnn.num_layers, self.rnn.hidden_size
        check_array("hidden", hidden, "floating-point", ("B", size))
        check_like("hidden", hidden, next(self.parameters(), hidden))
        hidden = hidden.repeat(layers, 1, 1)
        return RecurrentState(hidden, torch.zeros_like(hidden) if self.rnn.mode == "lstm" else None)

    def forward(
        self,
        input: Tensor,
        memory: Memory,
        hx: Tensor | tuple[Tensor, Tensor] | RecurrentState | None = None,
        *,
        target_lengths: Tensor | None = None,
        need_weights: bool = False,
    ) -> RecurrentOutput:
        """Decode the words of a target.

        Args:
            input: embedded words ``[B, T, E]``: all of a target in training, T = 1 at a step of a
                search.
            memory: from the attention's ``prepare``.
            hx: from :meth:`initial`, or from the last call; None means zeros.
            target_lengths, need_weights: as in :class:`attnfast.nn.AttentionRNN`.

        Returns:
            ``output [B, T, E]`` and the state after the last word, with the attributes of
            :class:`attnfast.nn.AttentionRNN`: ``states [B, T, H]``, ``contexts [B, T, Dv]`` and
            ``weights [B, T, Tk]``, or ``[B, H, T, Tk]`` of H heads or hops, None unless requested.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        run = self.rnn(input, memory, hx, target_lengths=target_lengths, need_weights=need_weights)
        if self.readout is None:
            return run
        read = [run.states, run.contexts, *([input] if self.reads_input else [])]
        output = torch.tanh(project(self.readout, torch.cat(read, -1), self.backend))
        return recurrent_result(output, run.state, run.states, run.contexts, run.weights)
