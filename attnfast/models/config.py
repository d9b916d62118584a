"""From a few numbers to a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from attnfast.errors import InputError
from attnfast.models.decoders import CELLS, BahdanauDecoder, FixedContext, LuongDecoder
from attnfast.models.seq2seq import Encoder, Seq2Seq
from attnfast.nn import (
    BahdanauAttention,
    CoverageAttention,
    ForwardAttention,
    LocationAwareAttention,
    LuongAttention,
    PointerGenerator,
)

HISTORIES = {
    "coverage": CoverageAttention,
    "location": LocationAwareAttention,
    "forward": ForwardAttention,
}
ATTENTIONS = ("none", "bahdanau", *LuongAttention.SCORES, *HISTORIES)


@dataclass(frozen=True)
class Config:
    """The shape of a model.

    Args:
        vocab_size: V, words of source and target together.
        attention: ``"none"`` and ``"bahdanau"`` make a :class:`BahdanauDecoder`; a score of
            :class:`attnfast.nn.LuongAttention` makes a :class:`LuongDecoder`, as do
            ``"coverage"``, ``"location"`` and ``"forward"``, additive attention with a history.
        input_feeding: of the Luong decoder.
        cell: ``"gru"`` or ``"lstm"``.
        embed_dim: E, features of a word.
        hidden_dim: H, features of each encoder direction and of the attention; the decoder's
            states have 2H.
        layers: of the encoder.
        dropout: in training, the share of features dropped.
        copying: choose between words of the vocabulary and words of the source, those included
            that the vocabulary lacks: a pointer-generator.
    """

    vocab_size: int
    attention: str = "bahdanau"
    input_feeding: bool = False
    cell: str = "gru"
    embed_dim: int = 256
    hidden_dim: int = 256
    layers: int = 1
    dropout: float = 0.3
    copying: bool = False

    def __post_init__(self):
        for name, choices in (("attention", ATTENTIONS), ("cell", tuple(CELLS))):
            if getattr(self, name) not in choices:
                got = getattr(self, name)
                raise InputError(f"{name} must be one of {', '.join(choices)}, got {got!r}")
        for name in ("vocab_size", "embed_dim", "hidden_dim", "layers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.copying and self.attention == "none":
            raise InputError("copying must be False for attention 'none', got True")
        if self.input_feeding and self.attention in ("none", "bahdanau"):
            raise InputError(
                f"input_feeding must be False for attention {self.attention!r}, got True"
            )


def build(config: Config, backend: str | None = None) -> Seq2Seq:
    """Make the model of a config; ``backend`` is that of :func:`attnfast.additive_attention`."""
    key_dim = state_dim = 2 * config.hidden_dim
    sizes = (config.embed_dim, key_dim, state_dim)
    attention: nn.Module
    decoder: BahdanauDecoder | LuongDecoder
    if config.attention == "none":
        decoder = BahdanauDecoder(*sizes, FixedContext(), config.cell)
    elif config.attention == "bahdanau":
        attention = BahdanauAttention(state_dim, key_dim, config.hidden_dim, backend=backend)
        decoder = BahdanauDecoder(*sizes, attention, config.cell)
    else:
        if config.attention in HISTORIES:
            kind = HISTORIES[config.attention]
            attention = kind(state_dim, key_dim, config.hidden_dim, backend=backend)
        else:
            attention = LuongAttention(
                state_dim, key_dim, config.attention, config.hidden_dim, backend=backend
            )
        decoder = LuongDecoder(*sizes, attention, config.cell, config.input_feeding)
    encoder = Encoder(
        config.embed_dim, config.hidden_dim, config.cell, config.layers, config.dropout
    )
    pointer = PointerGenerator(config.embed_dim, backend=backend) if config.copying else None
    return Seq2Seq(encoder, decoder, config.vocab_size, config.embed_dim, config.dropout, pointer)
