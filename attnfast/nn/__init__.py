"""Modules: the parameters of an attention, and the keys projected once per sentence.

Every module has the same two calls::

    memory = attention.prepare(encoder_states, lengths)  # once per source
    context, weights = attention(state, memory)          # state [B, D]: one step; [B, Tq, D]: many

Attention with a history also takes that of the rows before, and returns that of the rows after::

    context, weights, history = attention(state, memory, history)

Attention whose rows see some of the keys only (:class:`LocalAttention` and those beside it) has a
history too, of how far the rows have come.

:class:`GatedAttention`, :class:`HardAttention` and :class:`TopKAttention` go around another
attention; :class:`MultiHopAttention` asks a memory several times,
and :class:`BidirectionalAttention` lets a text and a question attend to each other.

Self-attention does not know where a state stands: :class:`SinusoidalPositions`,
:class:`LearnedPositions` and :class:`RelativePositions` tell it.

Recurrent layers that attend (:class:`AttentionGRU` and those beside it) take an attention and run
over a whole target in one call::

    output, state = layer(embedded, layer.prepare(encoder_states, lengths))

:class:`PointerNetwork` reads a set of items and answers by pointing at them;
:class:`NeuralTuringMachine` has a memory of its own, which it writes too.

The attribute ``temperature``, 1 unless set, divides every module's scores, with what is added to
them.
"""

from attnfast.decoding import Memory
from attnfast.nn.attention import BahdanauAttention, LuongAttention, MultiHeadAttention
from attnfast.nn.bidirectional import BidirectionalAttention
from attnfast.nn.local import (
    HardMonotonicWindowAttention,
    LocalAttention,
    LocalPredictiveAttention,
    SparseSelfAttention,
    StridedAttention,
)
from attnfast.nn.multi_hop import MultiHopAttention, TopKAttention
from attnfast.nn.ntm import NeuralTuringMachine, NTMState
from attnfast.nn.pointer import PointerGenerator, PointerNetwork
from attnfast.nn.positions import LearnedPositions, RelativePositions, SinusoidalPositions
from attnfast.nn.recurrent import AttentionGRU, AttentionLSTM, AttentionRNN, RecurrentState
from attnfast.nn.stateful import (
    CoverageAttention,
    CumulativeState,
    ForwardAttention,
    HistoryAttention,
    LocationAwareAttention,
)
from attnfast.nn.transformer import TransformerEncoderLayer
from attnfast.nn.wrappers import GatedAttention, HardAttention, HardAttentionState

__all__ = [
    "AttentionGRU",
    "AttentionLSTM",
    "AttentionRNN",
    "BahdanauAttention",
    "BidirectionalAttention",
    "CoverageAttention",
    "CumulativeState",
    "ForwardAttention",
    "GatedAttention",
    "HardAttention",
    "HardAttentionState",
    "HardMonotonicWindowAttention",
    "HistoryAttention",
    "LearnedPositions",
    "LocalAttention",
    "LocalPredictiveAttention",
    "LocationAwareAttention",
    "LuongAttention",
    "Memory",
    "MultiHeadAttention",
    "MultiHopAttention",
    "NTMState",
    "NeuralTuringMachine",
    "PointerGenerator",
    "PointerNetwork",
    "RecurrentState",
    "RelativePositions",
    "SinusoidalPositions",
    "SparseSelfAttention",
    "StridedAttention",
    "TopKAttention",
    "TransformerEncoderLayer",
]
