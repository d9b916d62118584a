"""A recurrent layer with an external memory that it addresses, reads and writes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import (
    check_flag,
    check_tensor,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast._utils.torch_private import is_autocast_on, name_in_exports
from attnfast.nn.attention import check_sizes, refuse_script
from attnfast.ops.backends import HALF
from attnfast.ops.operators import accumulation_dtype

#: The cosine of a shorter vector is scaled down in proportion to its length.
SHORT = 1e-3


class NTMState(NamedTuple):
    """State of a :class:`NeuralTuringMachine` between steps.

    ``hidden [B, H]`` and ``cell [B, H]`` of the controller; ``memory [B, N, M]``; ``weights
    [B, R + W, N]`` of the heads, read heads first; ``read [B, R, M]``.

    Example:
        >>> machine = attnfast.nn.NeuralTuringMachine(3, 8, num_slots=10, slot_size=4)
        >>> state = machine(torch.randn(2, 6, 3)).state
        >>> state.memory.shape, state.weights.shape
        (torch.Size([2, 10, 4]), torch.Size([2, 2, 10]))
        >>> output = machine(torch.randn(2, 6, 3), state).output  # continue from it
    """

    hidden: Tensor
    cell: Tensor
    memory: Tensor
    weights: Tensor
    read: Tensor

    def index_select(self, index: Tensor) -> NTMState:
        """Return the states of the sequences ``index``."""
        return NTMState(*(x.index_select(0, index) for x in self))


class NTMOutput(NamedTuple):
    """Output of a :class:`NeuralTuringMachine`.

    Attributes:
        output: the controller's state and the read vectors, ``[B, T, H + R · M]``.
        state: the state after the last step.
        weights: of the R read heads and W write heads, ``[B, T, R + W, N]``; None unless requested.

    Example:
        >>> machine = attnfast.nn.NeuralTuringMachine(input_size=3, hidden_size=8)
        >>> found = machine(torch.randn(2, 5, 3))
        >>> found.weights is None, len(found.output)
        (True, 2)
    """

    output: Tensor
    state: NTMState
    weights: Tensor | None


name_in_exports(NTMState)
name_in_exports(NTMOutput)


def norm(x: Tensor) -> Tensor:
    """Return the norm of vectors, at least SHORT; gradients of every order at 0 are 0."""
    return x.square().sum(-1).clamp_min(SHORT**2).sqrt()


class NeuralTuringMachine(Module):
    r"""An LSTM with a memory of N slots, which heads read and write at every step.

    The LSTM, the controller, reads the input and the previous step's read vectors. Its state gives
    each head a key k, a strength :math:`\beta \ge 0`, a gate g from 0 to 1, a distribution s over
    shifts from −S to S, and a sharpness :math:`\gamma \ge 1`:

    .. math::
        w^c_i &= \mathrm{softmax}_i\left(\beta \cos(k, m_i)\right) \\
        w^g &= g\, w^c + (1 - g)\, w_{t-1} \\
        \tilde w_i &= \textstyle\sum_d s_d\, w^g_{i - d} \quad \text{(the last slot is followed by
        the first)} \\
        w_i &= \tilde w_i^\gamma / \textstyle\sum_j \tilde w_j^\gamma

    Read heads return :math:`r = \sum_i w_i m_i`. Then write heads update all slots, with e from 0
    to 1 and a from −1 to 1:

    .. math:: m_i \leftarrow m_i \textstyle\prod_h (1 - w^h_i e^h) + \sum_h w^h_i a^h

    Before the first step all heads are at slot 0, and all slots hold the same learned vector. No
    parameter's size depends on the number of slots: ``num_slots`` may be changed at any time and
    applies to sequences that start afterwards; a given state keeps its slots. In a cosine, the
    norm of a vector is at least 0.001. Weights are computed in float32 or wider, and the state
    keeps the module's dtype, under autocast too.

    Args:
        input_size: features of the inputs.
        hidden_size: H, features of the controller's state.
        num_slots: N.
        slot_size: M, features of a slot.
        num_reads, num_writes: R and W, the number of heads of each kind.
        shift: S, the largest shift of a head in one step.

    Paper: Graves, Wayne and Danihelka, "Neural Turing Machines", 2014, arXiv:1410.5401.

    Example:
        >>> machine = attnfast.nn.NeuralTuringMachine(3, 8, num_slots=10, slot_size=4)
        >>> result = machine(torch.randn(2, 6, 3))
        >>> result.output.shape  # the controller's state and the vector read
        torch.Size([2, 6, 12])
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_slots: int = 128,
        slot_size: int = 20,
        num_reads: int = 1,
        num_writes: int = 1,
        shift: int = 1,
    ):
        super().__init__()
        check_sizes(
            input_size=input_size, hidden_size=hidden_size, num_slots=num_slots,
            slot_size=slot_size, num_reads=num_reads, num_writes=num_writes, shift=shift,
        )  # fmt: skip
        self.input_size, self.hidden_size = input_size, hidden_size
        self.num_slots, self.slot_size, self.shift = num_slots, slot_size, shift
        self.num_reads, self.num_writes = num_reads, num_writes
        self._check_slots()
        self.output_size = hidden_size + num_reads * slot_size
        heads = num_reads + num_writes
        #: Sizes of each head's parameters, in order: k, β, g, γ, s.
        self.parts = (slot_size, 1, 1, 1, 2 * shift + 1)
        self.controller = nn.LSTMCell(input_size + num_reads * slot_size, hidden_size)
        self.heads = nn.Linear(hidden_size, heads * sum(self.parts))
        self.writes = nn.Linear(hidden_size, num_writes * 2 * slot_size)  # each head's e and a
        self.slot = nn.Parameter(torch.empty(slot_size))
        nn.init.uniform_(self.slot, -(slot_size**-0.5), slot_size**-0.5)

    def _check_slots(self) -> None:
        """Raise unless ``num_slots``, which users may set, is an integer of at least the shift."""
        check_sizes(num_slots=self.num_slots)
        if self.num_slots < self.shift:
            raise_value_error("num_slots", f"at least shift, {self.shift}", self.num_slots)

    def start(self, batch: int) -> NTMState:
        """Return the state before the first step of ``batch`` sequences.

        Raises:
            ValueError: ``batch`` is not an integer of at least 1, or ``num_slots`` is smaller than
                the shift.
        """
        check_sizes(batch=batch)
        self._check_slots()
        return self._start(batch)

    def _start(self, batch: int) -> NTMState:
        slot, heads = self.slot, self.num_reads + self.num_writes
        hidden, cell = slot.new_zeros(2, batch, self.hidden_size)
        memory = slot.expand(batch, self.num_slots, -1).clone()  # in-place writes keep the slot
        weights = slot.new_zeros(batch, heads, self.num_slots)
        weights[..., 0] = 1
        read = slot.new_zeros(batch, self.num_reads, self.slot_size)
        return NTMState(hidden, cell, memory, weights, read)

    def address(self, parameters: Tensor, memory: Tensor, previous: Tensor) -> Tensor:
        """Return the weights ``[B, heads, N]`` of heads whose previous weights are ``previous``."""
        dtype = accumulation_dtype(previous.dtype)
        parameters, memory = parameters.to(dtype), memory.to(dtype)
        key, strength, gate, sharpness, shift = parameters.split(self.parts, -1)
        query = F.softplus(strength) * key / norm(key).unsqueeze(-1)
        content = (query @ memory.transpose(1, 2) / norm(memory).unsqueeze(1)).softmax(-1)
        mixed = previous + gate.sigmoid() * (content - previous)
        S = self.shift
        around = torch.cat([mixed[..., -S:], mixed, mixed[..., :S]], -1).unfold(-1, 2 * S + 1, 1)
        shifted = (around @ shift.softmax(-1).flip(-1).unsqueeze(-1)).squeeze(-1)
        # γ log w: powers of small weights would underflow in float32, and so would their sum
        log = shifted.clamp_min(torch.finfo(dtype).tiny).log()
        return ((1 + F.softplus(sharpness)) * log).softmax(-1).to(previous.dtype)

    def step(self, x: Tensor, state: NTMState) -> tuple[Tensor, NTMState]:
        """Take one step: ``x [B, input_size]``; return ``[B, output_size]`` and the next state.

        Arguments are not checked here, but in :meth:`forward`.
        """
        hidden, cell, memory, previous, read = state
        B, R, dtype = x.shape[0], self.num_reads, memory.dtype
        hidden, cell = self.controller(torch.cat([x, read.flatten(1)], -1), (hidden, cell))
        addresses = self.heads(hidden).view(B, -1, sum(self.parts)).to(dtype)
        erase, add = self.writes(hidden).view(B, -1, 2 * self.slot_size).to(dtype).chunk(2, -1)
        off = torch.autocast(x.device.type, enabled=False) if is_autocast_on() else nullcontext()
        with off:
            weights = self.address(addresses, memory, previous)
            read = weights[:, :R] @ memory
            erase, writing = erase.sigmoid(), weights[:, R:].transpose(1, 2)  # [B, N, W]
            for h in range(self.num_writes):
                erased = writing[..., h, None] * erase[:, None, h]
                memory = torch.addcmul(memory, erased, memory, value=-1)
            memory = torch.baddbmm(memory, writing, add.tanh())
        output = torch.cat([hidden, read.flatten(1).to(hidden.dtype)], -1)
        return output, NTMState(hidden.to(dtype), cell.to(dtype), memory, weights, read)

    def forward(
        self, x: Tensor, state: NTMState | None = None, need_weights: bool = False
    ) -> NTMOutput:
        """Run over a sequence.

        Args:
            x: ``[B, T, input_size]``, T at least 1.
            state: the state of an earlier call to continue from; None means :meth:`start`.
            need_weights: return the weights of all heads too.

        Returns:
            An ``NTMOutput``: ``output [B, T, H + R · M]``, the controller's state and the read
            vectors; the state after the last step; and weights ``[B, T, R + W, N]`` or None.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        self._check(x, state)
        check_flag("need_weights", need_weights)
        x = x.to(self.slot.dtype)  # under autocast x may have another dtype
        state = self._start(x.shape[0]) if state is None else state
        outputs, weights = [], []
        for t in range(x.shape[1]):
            output, state = self.step(x[:, t], state)
            outputs.append(output)
            weights.append(state.weights)
        shown = torch.stack(weights, 1) if need_weights else None
        return NTMOutput(torch.stack(outputs, 1), state, shown)

    def _check(self, x: Any, state: Any) -> None:
        """Raise unless the input and the state fit the module."""
        check_tensor("x", x)
        if x.dim() != 3 or x.shape[-1] != self.input_size or not x.numel():
            expected = f"[B, T, {self.input_size}] with a sequence and a step at least"
            raise_value_error("x", expected, list(x.shape))
        self._check_kind("x", x)
        if state is None:
            self._check_slots()
            return
        if not isinstance(state, NTMState):
            raise_type_error("state", "a NTMState or None", describe(state))
        for name, part in state._asdict().items():
            check_tensor(f"state.{name}", part)
        B, heads = x.shape[0], self.num_reads + self.num_writes
        slots = state.memory.shape[1] if state.memory.dim() == 3 else self.num_slots
        shapes = {
            "hidden": [B, self.hidden_size],
            "cell": [B, self.hidden_size],
            "memory": [B, slots, self.slot_size],
            "weights": [B, heads, slots],
            "read": [B, self.num_reads, self.slot_size],
        }
        for name, shape in shapes.items():
            part = getattr(state, name)
            if list(part.shape) != shape:
                raise_value_error(f"state.{name}", f"{shape} to fit x and module", list(part.shape))
            self._check_kind(f"state.{name}", part)
        if slots < self.shift:
            raise_value_error("state.memory", f"of at least {self.shift} slots, as shift is", slots)

    def _check_kind(self, name: str, x: Tensor) -> None:
        """Raise if x has another device, or a dtype that autocast does not cast."""
        if x.device != self.slot.device:
            raise_value_error(name, f"on the module's device {self.slot.device}", x.device)
        cast = is_autocast_on() and name == "x" and x.dtype in (torch.float32, *HALF)
        if x.dtype != self.slot.dtype and not cast:
            raise_value_error(name, f"of the module's dtype {self.slot.dtype}", x.dtype)

    def extra_repr(self) -> str:
        """Return the sizes that ``repr`` shows."""
        return repr_fields(self, ("num_slots", "slot_size", "num_reads", "num_writes", "shift"))
