"""Helpers for adapters of whole decoders, which run all target steps in one operator call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from attnfast.decoding import Memory
from attnfast.nn._fused_rnn import layer_feature, run_layer, select_layer_backend
from attnfast.nn._layer import Layer, LayerOutputs, RecurrentState
from attnfast.nn._linear import is_plain
from attnfast.nn.attention import LuongAttention
from attnfast.nn.wrappers import GatedAttention
from attnfast.ops.backends import try_select_backend
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.recurrent import RECURRENT

__all__ = [
    "LOOP",
    "StepDropout",
    "apply_mask",
    "draw_masks",
    "fusion_skip_reason",
    "gru_skip_reason",
    "is_plain_table",
    "last_states",
    "linear_of",
    "make_attention",
    "run_decoder",
    "state_of",
]

LOOP = "its own code runs single steps"
#: The parts of decoders whose parameters may be used without calling them.
PARTS = (
    nn.Linear, nn.Dropout, nn.Conv1d, nn.Conv2d, nn.RNNCell, nn.GRUCell, nn.LSTMCell, nn.Softmax,
    nn.ModuleList, nn.ReLU, nn.Sigmoid,
)  # fmt: skip


def gru_skip_reason(rnn: nn.Module) -> str | None:
    """Return the reason if this is not PyTorch's GRU in one direction, or None."""
    known = type(rnn) is nn.GRU and not rnn.bidirectional
    return None if known else "its recurrent layer is not an nn.GRU in one direction"


def is_plain_table(table: Any) -> bool:
    """Return whether embedding many words at once equals embedding them one by one."""
    plain = is_plain(table, nn.Embedding)
    return plain and table.max_norm is None and not table.scale_grad_by_freq


def fusion_skip_reason(
    layer: Layer,
    steps: int,
    source: Any,
    states: Sequence[Any],
    attention: nn.Module,
    *parts: Any,
    feed: Sequence[Any] = (),
    drops: bool = False,
    has_history: bool = False,
) -> str | None:
    """Return why no operator can replace a decoder's loop over ``steps`` steps, or None.

    Args:
        layer: the decoder's cells.
        source: the encoder states, ``[B, Tk, D]``.
        states: the states before the first step, ``[L, B, H]``.
        attention: the decoder's attention, which must have no hooks because it is not called.
        parts: modules whose parameters are used without calling them, and dropouts, which must be
            inactive unless the operator applies them.
        feed: the vector fed to the first step, ``[1, B, F]``, if any.
        drops: whether the operator must apply dropout.
        has_history: whether the attention has a history.
    """
    like, inputs = layer.weight_ih, [source, *states, *feed]
    layers = 1 if layer.weight_ih_upper is None else 1 + len(layer.weight_ih_upper)
    if steps <= 1:
        return LOOP
    if like is None or not all(isinstance(x, Tensor) and x.dim() == 3 for x in inputs):
        return "its source, states or fed vectors are not tensors of three axes"
    if not all(x.shape[:2] == (layers, len(source)) for x in states):
        return "its states do not have the sizes of its layers and source"
    if not all(x.shape[:2] == (1, len(source)) for x in feed):
        return "its fed vectors do not have the size of its source"
    if not is_plain(attention, type(attention)):
        return "its attention has hooks or a forward of its own"
    inner = [x for part in parts for x in part.modules()]
    if not all(is_plain(x, *((type(x),) if x._modules else PARTS)) for x in inner):
        return "an inner layer has hooks, or is no plain layer of torch.nn"
    if any(isinstance(x, nn.Dropout) and x.inplace for x in inner):
        return "a dropout changes states in place"
    if not drops and any(isinstance(x, nn.Dropout) and x.training and x.p > 0 for x in inner):
        return "its own code drops attention weights"
    if any(x.dtype != like.dtype or x.device != like.device for x in inputs):
        return "its parameters and inputs differ in dtype or device"
    if (
        has_history
        and try_select_backend(
            None, like.device, accumulation_dtype(like.dtype), RECURRENT.name, True
        )
        is None
    ):
        return "no backend runs a whole target of attention with a history"
    return select_layer_backend(None, None, like, feature=layer_feature(layer, drops))[1] or None


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer of a computed weight, which gradients pass through."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer._parameters.clear()
    layer.__dict__.update(weight=weight, bias=bias)
    return layer


def state_of(*hidden: Tensor, feed: Tensor | None = None) -> RecurrentState:
    """Return the state before the first step of ``hidden [L, B, H]`` and an LSTM's cells."""
    first, *cell = (x if len(x) > 1 else x[0] for x in hidden)
    return RecurrentState(first, cell[0] if cell else None, feed)


def last_states(steps: Tensor) -> Tensor:
    """Return the states after the last step, ``[L, B, H]``."""
    last = steps[..., -1, :]
    return last if last.dim() == 3 else last.unsqueeze(0)


class StepDropout(NamedTuple):
    """A dropout in a loop over steps; with ``zoneout`` a zoneout, which keeps old elements.

    ``p`` and ``training`` are those of ``nn.Dropout``. ``size``: the number of features, None for
    that of the states. ``times``: the number of masks that a step draws, such as one per layer;
    None for one, whose result has no axis for them.
    """

    p: float
    training: bool
    size: int | None = None
    times: int | None = None
    zoneout: bool = False

    @classmethod
    def of(cls, module: Any, size: int | None = None, times: int | None = None) -> StepDropout:
        """Return the dropout of an ``nn.Dropout``."""
        return cls(module.p, module.training, size, times)

    @property
    def is_active(self) -> bool:
        """Return whether it has masks; a zoneout has them in evaluation too, and if p is 0."""
        return self.zoneout or (self.training and self.p > 0)


def draw_masks(steps: int, like: Tensor, dropouts: Sequence[StepDropout]) -> list[Tensor | None]:
    """Draw the masks of dropouts on states like ``like [B, F]``, in the order of a loop.

    On a CPU the random numbers are those of a loop over the steps. Masks of a zoneout multiply new
    states: Bernoulli with probability 1 − p in training, the constant 1 − p in evaluation.

    Returns:
        ``[B, T, F]`` or ``[times, B, T, F]`` for each dropout, None if it is inactive.
    """

    def draw(dropout: StepDropout, mask: Tensor) -> Tensor:
        p = dropout.p
        if dropout.zoneout:
            return (mask.bernoulli_(p) if dropout.training else mask.fill_(p)).neg_().add_(1)
        return mask.bernoulli_(1 - p).div_(1 - p) if p < 1 else mask.zero_()

    B, F = like.shape
    masks = [
        like.new_empty(x.times or 1, B, steps, x.size or F) if x.is_active else None
        for x in dropouts
    ]
    active = [(x, mask) for x, mask in zip(dropouts, masks) if mask is not None]
    if like.is_cuda:  # for all steps at once
        for dropout, mask in active:
            draw(dropout, mask)
    else:
        for t in range(steps):
            for dropout, mask in active:
                for rows in mask:
                    rows[:, t] = draw(dropout, rows.new_empty(B, rows.shape[-1]))
    return [
        mask if mask is None or dropout.times is not None else mask[0]
        for dropout, mask in zip(dropouts, masks)
    ]


def apply_mask(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return states times the mask of a dropout, which is None if that is inactive."""
    return states if mask is None else states * mask


def make_attention(
    query_proj: nn.Module | None,
    scale: float = 1.0,
    kind: type[nn.Module] = LuongAttention,
    terms: dict[str, Any] | None = None,
    gate: nn.Linear | None = None,
) -> Any:
    """Return a module of attention whose memory determines the score.

    Args:
        query_proj: the projection of the query, None for the identity.
        scale: multiplies the score.
        kind: the class of the attention, one with a history if the score has one.
        terms: the attributes from which such a class takes the terms of the score.
        gate: computes the sums of the gate on the context, if there is one.
    """
    attention: Any = kind.__new__(kind)  # its parameters are set below: none are drawn at random
    nn.Module.__init__(attention)
    projection = nn.Identity() if query_proj is None else query_proj
    # the temperature scales every score: with a history there is no other scale
    attributes = {"query_proj": projection, "scale": 1.0, "temperature": 1 / scale}
    for name, value in {**attributes, "normalisation": "softmax", **(terms or {})}.items():
        setattr(attention, name, value)
    if gate is not None:
        inner, attention = attention, GatedAttention.__new__(GatedAttention)
        nn.Module.__init__(attention)
        attention.attention, attention.gate = inner, gate
    return attention


def run_decoder(
    layer: Layer,
    input: Tensor,
    state: RecurrentState,
    query_proj: nn.Module | None,
    memory: Memory,
    scale: float = 1.0,
    kind: type[nn.Module] = LuongAttention,
    terms: dict[str, Any] | None = None,
    gate: nn.Linear | None = None,
    **options: Any,
) -> LayerOutputs:
    """Run the layer over ``input [B, T, E]``; the memory determines the score.

    Args:
        layer, input, state, memory, options: as in :func:`attnfast.nn._fused_rnn.run_layer`.
        query_proj, scale, kind, terms, gate: as in :func:`make_attention`.
    """
    attention = make_attention(query_proj, scale, kind, terms, gate)
    return run_layer(layer, input, state, attention, memory, need_weights=True, **options)
