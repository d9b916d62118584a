"""Modules: the parameters of an attention, and the keys projected once per sentence.

Every module has the same two calls::

    memory = attention.prepare(encoder_states, lengths)  # once per source
    context, weights = attention(state, memory)          # state [B, D]: one step; [B, Tq, D]: many

Attention with a history also takes that of the rows before, and returns that of the rows after::

    context, weights, history = attention(state, memory, history)

Attention whose rows see only some of the keys (:class:`LocalAttention` and its siblings) has a
history too: the number of rows so far.

:class:`GatedAttention`, :class:`HardAttention` and :class:`TopKAttention` wrap another attention;
:class:`MultiHopAttention` queries a memory several times, and :class:`BidirectionalAttention` lets
a text and a question attend to each other.

Self-attention is invariant to the order of the states: :class:`SinusoidalPositions`,
:class:`LearnedPositions` and :class:`RelativePositions` add their positions.

Recurrent layers that attend (:class:`AttentionGRU` and its siblings) take an attention and run
over a whole target in one call::

    output, state = layer(embedded, layer.prepare(encoder_states, lengths))

:class:`PointerNetwork` reads a set of items and answers by pointing at them;
:class:`NeuralTuringMachine` reads and writes its own memory.

The attribute ``temperature``, 1 by default, divides every module's scores, including the terms that
are added to them.

An argument that does not fit, of a module or of a call, raises ValueError or TypeError, and the
message names it.
"""

from attnfast.decoding import Memory
from attnfast.nn.attention import BahdanauAttention, LuongAttention, MultiHeadAttention
from attnfast.nn.bidirectional import BidirectionalAttention
from attnfast.nn.local import (
    HardMonotonicWindowAttention,
    LocalAttention,
    LocalPredictiveAttention,
    SpanState,
    SparseSelfAttention,
    StridedAttention,
)
from attnfast.nn.multi_hop import MultiHopAttention, MultiHopMemory, TopKAttention, TopKMemory
from attnfast.nn.ntm import NeuralTuringMachine, NTMOutput, NTMState
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
    "MultiHopMemory",
    "NTMOutput",
    "NTMState",
    "NeuralTuringMachine",
    "PointerGenerator",
    "PointerNetwork",
    "RecurrentState",
    "RelativePositions",
    "SinusoidalPositions",
    "SpanState",
    "SparseSelfAttention",
    "StridedAttention",
    "TopKAttention",
    "TopKMemory",
    "TransformerEncoderLayer",
]
