"""Reference sequence-to-sequence models: written once, the attention passed in.

``build(Config(vocab_size=8000, attention="bahdanau"))`` makes a translator; the parts are
:class:`Encoder`, :class:`BahdanauDecoder`, :class:`LuongDecoder` and :class:`Seq2Seq`;
:func:`greedy_search` and :func:`beam_search` decode with it. :class:`Classifier` reads a
sentence and decides.
"""

from attnfast.models.classifier import POOLINGS, Classifier
from attnfast.models.config import ATTENTIONS, Config, build
from attnfast.models.decoders import BahdanauDecoder, FixedContext, LuongDecoder
from attnfast.models.search import beam_search, greedy_search
from attnfast.models.seq2seq import BOS, EOS, PAD, UNK, Encoder, Seq2Seq, Source

__all__ = [
    "ATTENTIONS",
    "BOS",
    "EOS",
    "PAD",
    "POOLINGS",
    "UNK",
    "BahdanauDecoder",
    "Classifier",
    "Config",
    "Encoder",
    "FixedContext",
    "LuongDecoder",
    "Seq2Seq",
    "Source",
    "beam_search",
    "build",
    "greedy_search",
]
