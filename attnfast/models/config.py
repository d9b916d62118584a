"""The configuration of a model, and a function that builds the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from attnfast._utils.checks import (
    InputError,
    check_choice,
    check_flag,
    check_int,
    describe,
    is_finite,
    raise_type_error,
    raise_value_error,
)
from attnfast.models._checks import check_share
from attnfast.models.decoders import CELLS, BahdanauDecoder, FixedContext, LuongDecoder
from attnfast.models.encoders import Encoder, TransformerEncoder
from attnfast.models.seq2seq import Seq2Seq
from attnfast.nn import (
    BahdanauAttention,
    CoverageAttention,
    ForwardAttention,
    HardMonotonicWindowAttention,
    LocalAttention,
    LocalPredictiveAttention,
    LocationAwareAttention,
    LuongAttention,
    PointerGenerator,
    SparseSelfAttention,
    StridedAttention,
)
from attnfast.spans import Span

HISTORIES = {
    "coverage": CoverageAttention,
    "location": LocationAwareAttention,
    "forward": ForwardAttention,
}
ENCODERS = ("rnn", "transformer")
SPANS = ("local", "predictive", "strided", "monotonic")
ATTENTIONS = ("none", "bahdanau", *LuongAttention.SCORES, *HISTORIES, *SPANS)


@dataclass(frozen=True)
class Config:
    """The shape of a model.

    Args:
        vocab_size: V, words of source and target together.
        attention: ``"none"`` and ``"bahdanau"`` make a :class:`BahdanauDecoder`; a score of
            :class:`attnfast.nn.LuongAttention` makes a :class:`LuongDecoder`, as do
            ``"coverage"``, ``"location"`` and ``"forward"``, additive attention with a history,
            and ``"local"``, ``"predictive"``, ``"strided"`` and ``"monotonic"``, Luong's general
            score within a span.
        window: how many keys to each side local and predictive attention see.
        sigma, height: of the Gaussian around local attention's position, in keys: see
            :class:`attnfast.nn.LocalAttention`.
        stride: strided attention sees every stride-th key, from a word's own on, or with
            ``fixed_stride`` from the first.
        self_attention: let the encoder's states attend to each other with four heads, two within
            the window and two with the stride; a transformer then uses these heads.
        input_feeding: of the Luong decoder.
        encoder: ``"rnn"``, or ``"transformer"`` with four heads in each layer.
        cell: ``"gru"`` or ``"lstm"``, of the RNNs.
        embed_dim: E, features of a word.
        hidden_dim: H, features of each encoder direction and of the attention; the decoder's
            states have 2H.
        layers: of the encoder.
        dropout: in training, the share of features dropped.
        copying: use a pointer-generator, which chooses between words of the vocabulary and words
            of the source, including out-of-vocabulary words.
        length_ratio, longest_target: limits on the length of translations, see :class:`Seq2Seq`.
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
    window: int = 10
    stride: int = 4
    fixed_stride: bool = False
    sigma: float | None = None
    height: float | None = None
    self_attention: bool = False
    encoder: str = "rnn"
    length_ratio: float = Seq2Seq.length_ratio
    longest_target: int = Seq2Seq.longest_target

    def __post_init__(self):
        try:
            check_choice("attention", self.attention, ATTENTIONS)
            check_choice("cell", self.cell, CELLS)
            check_choice("encoder", self.encoder, ENCODERS)
            for name in ("vocab_size", "embed_dim", "hidden_dim", "layers", "window", "stride"):
                check_int(name, getattr(self, name))
            if self.hidden_dim >= 2**30:  # an encoder has two of them side by side
                raise_value_error("hidden_dim", "below 2**30", self.hidden_dim)
            for name in ("input_feeding", "copying", "self_attention", "fixed_stride"):
                check_flag(name, getattr(self, name))
            if self.hidden_dim % 2 and (self.self_attention or self.encoder == "transformer"):
                raise_value_error(
                    "hidden_dim", "even for an encoder of four heads", self.hidden_dim
                )
            check_share("dropout", self.dropout)
            check_int("longest_target", self.longest_target, 0)
            if not is_finite(self.length_ratio) or not 0 <= self.length_ratio < 2**31:
                raise_value_error(
                    "length_ratio", "a number, at least 0", describe(self.length_ratio)
                )
            for name in ("sigma", "height"):
                x = getattr(self, name)
                if x is not None and not (is_finite(x) and (x > 0 or name == "height")):
                    raise_value_error(name, "a number, sigma above 0, or None", describe(x))
        except ValueError as error:
            raise InputError(str(error)) from None
        for name, kind in (("fixed_stride", "strided"), ("sigma", "local"), ("height", "local")):
            if getattr(self, name) not in (None, False) and self.attention != kind:
                default = getattr(Config, name)
                raise InputError(
                    f"{name} must be {default} for attention {self.attention!r}, "
                    f"got {getattr(self, name)}"
                )
        if self.height is not None and self.sigma is None:
            raise InputError(f"height must be None without a sigma, got {self.height}")
        if self.copying and self.attention == "none":
            raise InputError("copying must be False for attention 'none', got True")
        if self.input_feeding and self.attention in ("none", "bahdanau"):
            raise InputError(
                f"input_feeding must be False for attention {self.attention!r}, got True"
            )


def build(config: Config, backend: str | None = None) -> Seq2Seq:
    """Make the model of a config; ``backend`` is that of :func:`attnfast.additive_attention`.

    Example:
        >>> from attnfast.models import Config, build
        >>> model = build(Config(vocab_size=100, embed_dim=8, hidden_dim=8))
        >>> source, target = torch.randint(4, 100, (2, 5)), torch.randint(4, 100, (2, 6))
        >>> model(source, torch.tensor([5, 3]), target)[0].shape  # logits
        torch.Size([2, 6, 100])
    """
    if not isinstance(config, Config):
        raise_type_error("config", "a Config", describe(config))
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
        elif config.attention == "local":
            attention = LocalAttention(
                state_dim, key_dim, config.window,
                sigma=config.sigma, height=config.height, backend=backend,
            )  # fmt: skip
        elif config.attention == "predictive":
            attention = LocalPredictiveAttention(state_dim, key_dim, config.window, backend=backend)
        elif config.attention == "strided":
            attention = StridedAttention(
                state_dim, key_dim, config.stride, fixed=config.fixed_stride, backend=backend
            )
        elif config.attention == "monotonic":
            attention = HardMonotonicWindowAttention(state_dim, key_dim, backend=backend)
        else:
            attention = LuongAttention(
                state_dim, key_dim, config.attention, config.hidden_dim, backend=backend
            )
        decoder = LuongDecoder(*sizes, attention, config.cell, config.input_feeding)
    encoder: Encoder | TransformerEncoder
    heads = [Span(window=config.window)] * 2 + [Span(stride=config.stride)] * 2
    if config.encoder == "transformer":
        encoder = TransformerEncoder(
            config.embed_dim, config.hidden_dim, heads if config.self_attention else None,
            config.layers, config.dropout, backend,
        )  # fmt: skip
    else:
        sparse = None
        if config.self_attention:
            sparse = SparseSelfAttention(key_dim, heads, backend=backend)
        encoder = Encoder(
            config.embed_dim, config.hidden_dim, config.cell, config.layers, config.dropout, sparse
        )
    pointer = PointerGenerator(config.embed_dim, backend=backend) if config.copying else None
    model = Seq2Seq(encoder, decoder, config.vocab_size, config.embed_dim, config.dropout, pointer)
    model.length_ratio, model.longest_target = config.length_ratio, config.longest_target
    return model
