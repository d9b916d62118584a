"""The parameters, states and outputs of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import Self

from attnfast.nn._linear import is_plain
from attnfast.ops.packing import Packed
from attnfast.ops.recurrent import GATES

#: The parameters of a cell.
NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class History(Protocol):
    """State of an attention between calls, such as :class:`attnfast.nn.CumulativeState`."""

    def index_select(self, index: Tensor, /) -> Self:
        """Return the state of the sequences ``index``."""
        ...


class RecurrentState(NamedTuple):
    """State of a recurrent layer between calls; a beam search reorders it.

    ``hidden``: ``[L, B, H]`` for L layers, or ``[B, H]`` for one. ``cell``: the same for an LSTM,
    or None. ``feed [B, F]``: the last output of the attention, if it is fed to the next step, or
    None for zeros. ``history``: the attention's history, or None. ``packed``: the packed
    parameters that the steps share.

    Example:
        >>> attention = attnfast.nn.BahdanauAttention(6, 8, 4)
        >>> layer = attnfast.nn.AttentionGRU(3, 6, 8, attention)
        >>> memory = layer.prepare(torch.randn(2, 5, 8))
        >>> _, state = layer(torch.randn(2, 1, 3), memory)  # one step of a search
        >>> state.index_select(torch.tensor([1, 1, 0])).hidden.shape
        torch.Size([1, 3, 6])
    """

    hidden: Tensor
    cell: Tensor | None = None
    feed: Tensor | None = None
    history: History | None = None
    packed: Packed | tuple[Packed | None, ...] | None = None

    def __reduce__(self) -> tuple[type[RecurrentState], tuple[object, ...]]:
        return type(self), (*self[:-1], None)  # packed parameters stay in this process

    def index_select(self, index: Tensor) -> RecurrentState:
        """Return the state of the sequences ``index``."""
        axes = {"hidden": -2, "cell": -2, "feed": 0}
        given = {name: axis for name, axis in axes.items() if getattr(self, name) is not None}
        chosen: dict[str, Any] = {
            name: getattr(self, name).index_select(axis, index) for name, axis in given.items()
        }
        if self.history is not None:
            chosen["history"] = self.history.index_select(index)
        return self._replace(**chosen)


class Layer(NamedTuple):
    """A recurrent layer: the parameters of its cell, as in ``nn.GRU``, or a module.

    With ``weight_ih_upper`` it is a stack, whose parameters are stacked, ``[L, ..]``: see
    :class:`attnfast.ops.recurrent.RecurrentInputs`. ``output`` computes the attentional vectors,
    before their tanh if there is one. ``rnn`` is called step by step if its parameters are not
    equivalent to it.
    """

    mode: str
    weight_ih: Tensor | None = None
    weight_hh: Tensor | None = None
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    output: nn.Module | None = None
    attends_first: bool = True
    rnn: nn.RNNBase | None = None
    weight_ih_upper: Tensor | None = None
    output_tanh: bool = True

    @classmethod
    def of(cls, rnn: Any, **options: Any) -> Layer:
        """Return the layers of an ``nn.GRU`` or ``nn.LSTM`` in one direction."""
        mode = "lstm" if isinstance(rnn, nn.LSTM) else "gru"
        if not is_plain(rnn, nn.GRU, nn.LSTM) or rnn.bidirectional or rnn.proj_size:
            return cls(mode, rnn=rnn, **options)
        every = [[getattr(rnn, f"{x}_l{i}", None) for x in NAMES] for i in range(rnn.num_layers)]
        return cls.stack(mode, every, **options)

    @classmethod
    def of_cells(cls, *cells: Any, **options: Any) -> Layer:
        """Return the layer of an ``nn.GRUCell``, ``nn.LSTMCell`` or ``nn.RNNCell``, or a stack."""
        every = [[getattr(cell, x) for x in NAMES] for cell in cells]
        weight_hh = every[0][1]
        gates = weight_hh.shape[0] // weight_hh.shape[1]
        mode = next(mode for mode, number in GATES.items() if number == gates)
        return cls.stack(mode, every, **options)

    @classmethod
    def stack(cls, mode: str, every: Sequence[Sequence[Any]], **options: Any) -> Layer:
        """Return a stack of layers; each item has one layer's parameters, ordered as NAMES."""
        if len(every) == 1:
            return cls(mode, *every[0], **options)
        weight_ih, *rest = zip(*every)
        of_all: list[Any] = [None if x[0] is None else torch.stack(x) for x in rest]
        options["weight_ih_upper"] = torch.stack(weight_ih[1:])
        return cls(mode, weight_ih[0], *of_all, **options)

    def at(self, number: int) -> Layer:
        """Return one of the layers of a stack."""
        if self.weight_ih_upper is None:
            return self
        own = {x: getattr(self, x) for x in NAMES[1:]}
        weight = self.weight_ih_upper[number - 1] if number else self.weight_ih
        own = {x: None if y is None else y[number] for x, y in own.items()}
        return self._replace(**own, weight_ih=weight, weight_ih_upper=None)

    def feed_size(self, features: int) -> int:
        """Return the number of features that the layer reads in addition to its inputs."""
        if self.weight_ih is not None:
            return self.weight_ih.shape[1] - features
        assert self.rnn is not None
        return self.rnn.input_size - features


class LayerOutputs(NamedTuple):
    """Outputs of a layer at every step, ``[B, T, ..]``, or None.

    For a stack, states and cells are those of all layers, ``[L, B, T, H]``.
    """

    states: Tensor
    cells: Tensor | None
    contexts: Tensor | None
    weights: Tensor | None
    attentional: Tensor | None
    history: History | None
    packed: Packed | None = None

    @property
    def output(self) -> Tensor:
        """The states ``[B, T, H]`` of the only or the last layer."""
        return self.states if self.states.dim() == 3 else self.states[-1]
