"""Reference sequence-to-sequence models, each of which takes its attention as an argument.

``build(Config(vocab_size=8000, attention="bahdanau"))`` makes a translator; the parts are
:class:`Encoder`, :class:`TransformerEncoder`, :class:`RecurrentDecoder` and :class:`Seq2Seq`; the
searches of :mod:`attnfast.decoding` find its translations. :class:`Classifier` classifies
sentences. :class:`ListenAttendSpell`, with a :class:`PyramidEncoder`, recognises speech;
:class:`CTCPrefixScorer` adds the scores of its CTC head to a search. :class:`ShowAttendTell`, with
a :class:`GridEncoder`, describes images.
:class:`MemoryNetwork` answers questions about a story, and :class:`BiDAF` finds the span of an
answer in a text; a :class:`CharacterCNN` and a :class:`HighwayNetwork` make features of its words.

An argument that does not fit, of a module or of a call, raises ValueError or TypeError, and the
message names it.
"""

from attnfast.models._checks import BOS, EOS, PAD, UNK
from attnfast.models.bidaf import BiDAF, SpanPrediction, best_spans
from attnfast.models.classifier import POOLINGS, Classifier
from attnfast.models.config import ATTENTIONS, ENCODERS, Config, build
from attnfast.models.ctc import CTCPrefixScorer
from attnfast.models.decoders import FixedContext, NoContext, RecurrentDecoder
from attnfast.models.embeddings import CharacterCNN, HighwayNetwork
from attnfast.models.encoders import Encoder, TransformerEncoder
from attnfast.models.las import EncodedSpeech, LASOutput, ListenAttendSpell, PyramidEncoder
from attnfast.models.memory_network import MemoryNetwork, MemoryNetworkOutput, position_encoding
from attnfast.models.objectives import hybrid_loss, scheduled_sampling, sequence_loss
from attnfast.models.seq2seq import EncodedSource, Seq2Seq, Seq2SeqOutput
from attnfast.models.show_attend_tell import (
    CaptionOutput,
    EncodedImage,
    GridEncoder,
    MeanContext,
    ShowAttendTell,
)

__all__ = [
    "ATTENTIONS",
    "BOS",
    "ENCODERS",
    "EOS",
    "PAD",
    "POOLINGS",
    "UNK",
    "BiDAF",
    "CTCPrefixScorer",
    "CaptionOutput",
    "CharacterCNN",
    "Classifier",
    "Config",
    "EncodedImage",
    "EncodedSource",
    "EncodedSpeech",
    "Encoder",
    "FixedContext",
    "GridEncoder",
    "HighwayNetwork",
    "LASOutput",
    "ListenAttendSpell",
    "MeanContext",
    "MemoryNetwork",
    "MemoryNetworkOutput",
    "NoContext",
    "PyramidEncoder",
    "RecurrentDecoder",
    "Seq2Seq",
    "Seq2SeqOutput",
    "ShowAttendTell",
    "SpanPrediction",
    "TransformerEncoder",
    "best_spans",
    "build",
    "hybrid_loss",
    "position_encoding",
    "scheduled_sampling",
    "sequence_loss",
]
