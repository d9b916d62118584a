"""Recurrent layers that attend at every step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import (
    check_choice,
    check_flag,
    check_tensor,
    describe,
    is_finite,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.representation import repr_fields
from attnfast._utils.torch_private import has_dispatch_mode, is_autocast_on
from attnfast.decoding import Memory, check_memory
from attnfast.nn._fused_rnn import run_layer, split_gate
from attnfast.nn._layer import NAMES, History, Layer, RecurrentState
from attnfast.nn.attention import _Attention, _AttentionWrapper, check_sizes
from attnfast.nn.stateful import last_of
from attnfast.ops.arguments import length_mask
from attnfast.ops.operators import is_tracing
from attnfast.ops.recurrent import GATES
from attnfast.outputs import RecurrentOutput, recurrent_result

__all__ = ["AttentionGRU", "AttentionLSTM", "AttentionRNN", "RecurrentState"]

QUERY_LAYERS = ("first", "last")
RECURRENCES = ("attend_first", "attend_last", "input_feeding", "independent")


class AttentionRNN(_AttentionWrapper):
    r"""A recurrent layer, :math:`\tanh`, that attends at every step.

    ==================  ========================================================================
    ``recurrence``      step t
    ==================  ========================================================================
    ``attend_first``    :math:`c_t = \mathrm{attend}(h_{t-1}), \; h_t = \mathrm{cell}([x_t; c_t],
                        h_{t-1})` (Bahdanau)
    ``attend_last``     :math:`h_t = \mathrm{cell}([x_t; c_{t-1}], h_{t-1}), \; c_t =
                        \mathrm{attend}(h_t)` (Listen, Attend and Spell; Tacotron)
    ``input_feeding``   :math:`h_t = \mathrm{cell}([x_t; \tilde h_{t-1}], h_{t-1}), \; c_t =
                        \mathrm{attend}(h_t), \; \tilde h_t = \tanh(W_o [c_t; h_t])` (Luong)
    ``independent``     :math:`h_t = \mathrm{cell}(x_t, h_{t-1}), \; c_t = \mathrm{attend}(h_t)`
                        (Luong without input feeding): attention is one call for all steps
    ==================  ========================================================================

    The cells are those of ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM``, with the same names and shapes of
    parameters, such as ``weight_ih_l0 [G·H, input_size + F]``, whose last F columns read the output
    of the attention; F is 0 if ``independent``. The weights of an ``nn.GRU``, or of an
    ``nn.GRUCell`` in a loop, with input ``[x; c]`` can be loaded. Tensors are batch first.

    Args:
        input_size: features E of the inputs.
        hidden_size: features H of the states.
        context_size: features of a context, those of the attention's values.
        attention: a module of :mod:`attnfast.nn`, which makes the memory.
        num_layers: the number of layers; each reads the states of the layer below.
        bias: whether the cells have biases.
        recurrence: one of the table.
        query_layer: the layer whose state is the query. ``"last"``: the last layer, as in Luong's
            stacks; the layers are those of an ``nn.GRU`` with as many. ``"first"``: the first
            layer, and the others read its context too, ``[h_t; c_t]`` (GNMT); not with input
            feeding.
        output_size: features F of :math:`\tilde h_t` with input feeding; None means
            ``hidden_size``.
        dropout: dropout probability of the outputs of every layer except the last, in training.
        recurrent_dropout: dropout probability of the state that :math:`W_{hh}` reads, with one mask
            for all steps of a call.

    Papers: Bahdanau, Cho and Bengio, ICLR 2015, arXiv:1409.0473; Luong, Pham and Manning, EMNLP
    2015, arXiv:1508.04025; Wu et al., arXiv:1609.08144 (GNMT); Gal and Ghahramani, NeurIPS 2016,
    arXiv:1512.05287 (dropout).

    Example:
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> layer = attnfast.nn.AttentionRNN(3, 6, 8, attention)
        >>> output, state = layer(torch.randn(2, 7, 3), layer.prepare(torch.randn(2, 5, 8)))
        >>> output.shape, state.hidden.shape
        (torch.Size([2, 7, 6]), torch.Size([1, 2, 6]))
    """

    #: Name of the cell, ``"tanh"``, ``"gru"`` or ``"lstm"``.
    mode = "tanh"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        context_size: int,
        attention: nn.Module,
        *,
        num_layers: int = 1,
        bias: bool = True,
        recurrence: str = "attend_first",
        query_layer: str = "first",
        output_size: int | None = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
    ):
        super().__init__(attention)
        check_sizes(
            input_size=input_size, hidden_size=hidden_size, context_size=context_size,
            num_layers=num_layers,
        )  # fmt: skip
        check_flag("bias", bias)
        check_choice("recurrence", recurrence, RECURRENCES)
        check_choice("query_layer", query_layer, QUERY_LAYERS)
        feeds = recurrence == "input_feeding"
        if output_size is not None:
            check_sizes(output_size=output_size)
            if not feeds:
                raise_value_error("output_size", "None without input feeding", output_size)
        if feeds and num_layers > 1 and query_layer == "first":
            raise_value_error(
                "query_layer", "'last' with input feeding and several layers", "'first'"
            )
        for name, p in (("dropout", dropout), ("recurrent_dropout", recurrent_dropout)):
            if not is_finite(p) or not 0 <= p < 1:
                raise_value_error(name, "a probability below 1", describe(p))
        if dropout and num_layers == 1:
            warnings.warn("dropout is between layers: one layer has none", stacklevel=2)
        self.input_size, self.hidden_size, self.context_size = input_size, hidden_size, context_size
        self.num_layers, self.bias, self.recurrence = num_layers, bool(bias), recurrence
        self.dropout, self.recurrent_dropout = dropout, recurrent_dropout
        self.query_layer = query_layer
        self.output_size = hidden_size if output_size is None else output_size
        self.output_proj = None
        if feeds:
            self.output_proj = nn.Linear(context_size + hidden_size, self.output_size, bias=False)
        fed = self._fed = self.output_size if feeds else context_size
        if recurrence == "independent":
            fed = self._fed = 0
        above = context_size if query_layer == "first" else 0
        for layer in range(num_layers):
            features = hidden_size + above if layer else input_size + fed
            for name, shape in zip(NAMES, ((features,), (hidden_size,), (), ())):
                room = torch.empty(GATES[self.mode] * hidden_size, *shape)
                parameter = nn.Parameter(room) if bias or shape else None
                self.register_parameter(f"{name}_l{layer}", parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the cells' parameters as PyTorch does, uniform in ±1/√H."""
        bound = self.hidden_size**-0.5
        for x in self.parameters(recurse=False):
            nn.init.uniform_(x, -bound, bound)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Also accept the parameter names of PyTorch's cells, which lack the layer suffix."""
        for name in NAMES:
            if f"{prefix}{name}" in state_dict and f"{prefix}{name}_l0" not in state_dict:
                state_dict[f"{prefix}{name}_l0"] = state_dict.pop(f"{prefix}{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the sizes, and the options that are not defaults."""
        return repr_fields(
            self, ("input_size", "hidden_size", "context_size"),
            {
                "num_layers": 1, "bias": True, "recurrence": "attend_first", "query_layer": "first",
                "dropout": 0.0, "recurrent_dropout": 0.0,
            },
        )  # fmt: skip

    @property
    def _is_stack(self) -> bool:
        """Return whether all layers and the attention are one call."""
        several = self.num_layers > 1 and self.query_layer == "last"
        return several and self.recurrence != "independent"

    def _layer(self, *numbers: int) -> Layer:
        plain = self._parameters  # nn.Module's getattr takes 1 µs; a parametrised one is not here
        names = [[f"{x}_l{number}" for x in NAMES] for number in numbers]
        every = [[plain[x] if x in plain else getattr(self, x) for x in own] for own in names]
        first = self.recurrence == "attend_first"
        return Layer.stack(self.mode, every, output=self.output_proj, attends_first=first)

    def _start(self, input: Tensor, hx: Any) -> RecurrentState:
        """Return the state before the first step, made from the caller's ``hx``."""
        shape = (self.num_layers, input.shape[0], self.hidden_size)
        if hx is None:
            hx = RecurrentState(input.new_zeros(shape))
        elif isinstance(hx, Tensor):
            hx = RecurrentState(hx)
        elif isinstance(hx, tuple) and not isinstance(hx, RecurrentState) and len(hx) == 2:
            hx = RecurrentState(*hx)
        if not isinstance(hx, RecurrentState):
            raise_type_error("hx", "a tensor, a pair of them for an LSTM or a state", describe(hx))
        check_tensor("hx.hidden", hx.hidden)
        if hx.feed is not None and self.recurrence in ("attend_first", "independent"):
            raise_value_error(
                "hx.feed", f"None with recurrence {self.recurrence!r}", describe(hx.feed)
            )
        if hx.history is not None and not getattr(self.attention, "has_history", False):
            raise_value_error(
                "hx.history", "None for attention without one", type(hx.history).__name__
            )
        if self.mode == "lstm" and hx.cell is None:
            hx = hx._replace(cell=torch.zeros_like(hx.hidden))
        if self.mode != "lstm" and hx.cell is not None:
            raise_value_error("hx.cell", f"None for {self.mode}", describe(hx.cell))
        of_feed = (input.shape[0], self._fed)
        for name, wanted in (("hidden", shape), ("cell", shape), ("feed", of_feed)):
            x = getattr(hx, name)
            if x is None and name != "hidden":
                continue
            check_tensor(f"hx.{name}", x)
            if x.shape != wanted:
                raise_value_error(f"hx.{name}", f"{list(wanted)}", list(x.shape))
            if not is_autocast_on() and (x.dtype != input.dtype or x.device != input.device):
                like = f"{input.dtype} on {input.device}, as the input"
                raise_value_error(f"hx.{name}", like, f"{x.dtype} on {x.device}")
        packed = hx.packed
        if packed is None or (isinstance(packed, tuple) and len(packed) == self.num_layers):
            return hx
        return hx._replace(packed=None)

    def _check(self, input: Any, memory: Any, target_lengths: Any) -> None:
        """Raise unless the inputs fit the layer."""
        check_tensor("input", input)
        if input.dim() != 3 or input.shape[-1] != self.input_size:
            raise_value_error("input", f"[B, T, {self.input_size}]", list(input.shape))
        weight = self.weight_ih_l0
        if input.dtype != weight.dtype and not is_autocast_on():
            raise_value_error("input", f"of the module's dtype {weight.dtype}", input.dtype)
        if input.device != weight.device:
            raise_value_error("input", f"on the module's device {weight.device}", input.device)
        B, T = input.shape[:2]
        if isinstance(split_gate(self.attention)[0], _Attention):
            check_memory(memory)
        if isinstance(memory, Memory):
            if memory.key.shape[0] != B:
                raise_value_error("memory", f"of {B} sources, as input has", memory.key.shape[0])
            features = memory.value.shape[-1] * math.prod(memory.value.shape[1:-2])  # of all heads
            if features != self.context_size:
                raise_value_error("memory", f"of values of {self.context_size} features", features)
        if target_lengths is None:
            return
        check_tensor("target_lengths", target_lengths)
        x = target_lengths
        if x.dtype not in (torch.int32, torch.int64) or x.dim() != 1 or x.shape[0] != B:
            found = f"{x.dtype} {list(x.shape)}"
            raise_value_error("target_lengths", f"int64 or int32 of shape [{B}]", found)
        if x.device != input.device:
            raise_value_error("target_lengths", f"on the input's device {input.device}", x.device)
        if x.device.type == "cpu" and not is_tracing() and not has_dispatch_mode():
            for length in x.tolist():
                if not 0 <= length <= T:
                    raise_value_error(
                        "target_lengths", f"between 0 and {T}, the steps of the input", length
                    )

    def forward(
        self,
        input: Tensor,
        memory: Memory,
        hx: Tensor | tuple[Tensor, Tensor] | RecurrentState | None = None,
        *,
        target_lengths: Tensor | None = None,
        need_weights: bool = False,
    ) -> RecurrentOutput:
        """Run over a whole target, or a part of it.

        Args:
            input: ``[B, T, input_size]``, T = 1 for one step of a search.
            memory: from :meth:`prepare`.
            hx: the state before the first step: ``[num_layers, B, H]``, a pair of them for an LSTM,
                or the state that the last call returned; None means zeros.
            target_lengths: ``[B]``, between 0 and T, not checked while tracing or on a GPU: results
                from these steps on are 0, and the returned state is that of the last step before.
            need_weights: return the weights too.

        Returns:
            ``output, state``: the states of the last layer ``[B, T, H]``, or with input feeding
            the attentional vectors ``[B, T, F]``; a :class:`RecurrentState`. The result's
            attributes are ``states [B, T, H]`` of the last layer, ``contexts [B, T, Dv]`` and
            ``weights [B, T, Tk]``, or ``[B, H, T, Tk]`` of H heads or hops, None unless requested.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        self._check(input, memory, target_lengths)
        check_flag("need_weights", need_weights)
        start = self._start(input, hx)
        lengths = None if target_lengths is None else target_lengths.long()
        hidden, cells, packs = [], [], []
        x, layers, stack = input, list(range(self.num_layers)), self._is_stack
        alone, last = self.recurrence == "independent", self.num_layers - 1
        contexts = weights = attentional = None
        history = start.history
        for numbers in [layers] if stack else [[i] for i in layers]:
            initial: Any = (start.hidden, start.cell, start.packed)
            first = numbers[0]
            if not stack:
                initial = [None if y is None else y[first] for y in initial]
            h, c, packed = initial
            dropout = dropout_between = None
            if self.training:
                dropout = self._mask(self.recurrent_dropout, h, h.shape)
            if self.training and stack:
                above = (self.num_layers - 1, *x.shape[:2], self.hidden_size)
                dropout_between = self._mask(self.dropout, h, above)
            attends = not (first or alone)
            outputs = run_layer(
                self._layer(*numbers), x, RecurrentState(h, c, start.feed, start.history, packed),
                *((self.attention, memory) if attends else (None, None)), target_lengths=lengths,
                dropout=dropout, dropout_between=dropout_between, need_weights=bool(need_weights),
            )  # fmt: skip
            hidden.append(last_of(outputs.states, h, lengths))
            if outputs.cells is not None:
                cells.append(last_of(outputs.cells, c, lengths))
            packs.append(outputs.packed)
            states = outputs.output
            if attends:
                contexts, weights, history = outputs.contexts, outputs.weights, outputs.history
                attentional = outputs.attentional
            elif alone and first == (0 if self.query_layer == "first" else last):
                contexts, weights, history = self._attend_to(
                    memory, states, history, lengths, bool(need_weights)
                )
            if numbers[-1] < last:
                x = F.dropout(states, self.dropout, self.training)
                if self.query_layer == "first":
                    assert contexts is not None
                    x = torch.cat([x, contexts], -1)
        feed, fed = start.feed, contexts if attentional is None else attentional
        if self._fed and self.recurrence != "attend_first" and fed is not None:
            zeros = fed.new_zeros(fed.shape[0], fed.shape[-1]) if feed is None else feed
            feed = last_of(fed, zeros, lengths)
        joined = torch.cat if stack else torch.stack
        state = RecurrentState(
            joined(hidden), joined(cells) if cells else None, feed, history,
            None if stack else tuple(packs),
        )  # fmt: skip
        output = states if attentional is None else attentional
        assert contexts is not None
        return recurrent_result(output, state, states, contexts, weights)

    def _attend_to(
        self,
        memory: Memory,
        states: Tensor,
        history: History | None,
        lengths: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None, History | None]:
        """Attend with the states ``[B, T, H]`` of all steps; return contexts, weights, history."""
        form = "dense" if need_weights else False
        seen = None if lengths is None else length_mask(lengths, states.shape[1])
        if getattr(self.attention, "has_history", False):
            contexts, weights, history = self.attention(states, memory, history, form, seen)
        else:
            contexts, weights = self.attention(states, memory, form)
        if seen is not None:
            padding = ~seen.unsqueeze(-1)
            contexts = contexts.masked_fill(padding, 0)
            if weights is not None:  # [B, T, Tk], or [B, heads, T, Tk]
                weights = weights.masked_fill(
                    padding if weights.dim() == 3 else padding[:, None], 0
                )
        return contexts, weights, history

    @staticmethod
    def _mask(share: float, like: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Draw the mask of a dropout."""
        return like.new_empty(shape).bernoulli_(1 - share) / (1 - share) if share else None


class AttentionGRU(AttentionRNN):
    """A gated recurrent layer that attends at every step: see :class:`AttentionRNN`.

    Paper: Cho et al., EMNLP 2014, arXiv:1406.1078; the formula is that of ``nn.GRU``.

    Example:
        >>> attention = attnfast.nn.LuongAttention(query_dim=6, key_dim=8)
        >>> layer = attnfast.nn.AttentionGRU(3, 6, 8, attention, recurrence="input_feeding")
        >>> output, state = layer(torch.randn(2, 7, 3), layer.prepare(torch.randn(2, 5, 8)))
        >>> output.shape, state.feed.shape
        (torch.Size([2, 7, 6]), torch.Size([2, 6]))
    """

    mode = "gru"


class AttentionLSTM(AttentionRNN):
    """A long short-term memory that attends at every step: see :class:`AttentionRNN`.

    Paper: Hochreiter and Schmidhuber, Neural Computation 1997; the formula is that of ``nn.LSTM``.

    Example:
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> layer = attnfast.nn.AttentionLSTM(3, 6, 8, attention, num_layers=2)
        >>> output, state = layer(torch.randn(2, 7, 3), layer.prepare(torch.randn(2, 5, 8)))
        >>> output.shape, state.cell.shape
        (torch.Size([2, 7, 6]), torch.Size([2, 2, 6]))
    """

    mode = "lstm"
