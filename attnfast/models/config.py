"""The configuration of a model, and a function that builds the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from attnfast._utils.checks import InputError, argument_message, describe, raise_type_error
from attnfast._utils.settings import check_settings, setting, with_settings
from attnfast.models.decoders import (
    CELLS,
    READOUTS,
    FixedContext,
    NoContext,
    RecurrentDecoder,
)
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
from attnfast.nn.recurrent import QUERY_LAYERS, RECURRENCES
from attnfast.spans import Span

HISTORIES = {
    "coverage": CoverageAttention,
    "location": LocationAwareAttention,
    "forward": ForwardAttention,
}
ENCODERS = ("rnn", "transformer")
COPY_GATES = ("state", "output")
SPANS = ("local", "predictive", "strided", "monotonic")
#: Without attention, every step reads the encoder's last states, or only the initial state does.
NO_ATTENTION = ("none", "initial")
ATTENTIONS = (*NO_ATTENTION, "bahdanau", *LuongAttention.SCORES, *HISTORIES, *SPANS)


@with_settings
@dataclass(frozen=True)
class Config:
    """The shape of a model.

    The attention ``"none"`` gives every decoder step the encoder's last states as its context (Cho
    et al., 2014); with ``"initial"`` the decoder's initial state alone depends on the source
    (Sutskever et al., 2014). ``"bahdanau"`` is additive; the scores of
    :class:`attnfast.nn.LuongAttention` have their names; ``"coverage"``, ``"location"`` and
    ``"forward"`` are additive attention with a history; and ``"local"``, ``"predictive"``,
    ``"strided"`` and ``"monotonic"``, Luong's general score within a span.

    The decoder, a :class:`RecurrentDecoder`, is Bahdanau's unless ``recurrence`` and ``readout``
    are given; Luong's has ``recurrence="input_feeding"`` and ``readout="attentional"``.

    Raises:
        InputError: a setting is out of range, or does not fit the others; the message names it.

    Example:
        >>> from attnfast.models import Config
        >>> Config(vocab_size=8000, attention="local", sigma=5.0).layers
        1
    """

    vocab_size: int = setting(4000, "tokens in the joint vocabulary of both languages", at_least=1)
    attention: str = setting("bahdanau", "attention mechanism of the decoder", ATTENTIONS)
    recurrence: str = setting(
        "attend_first",
        "input of the decoder's RNN: the context of this step, of the last, the last attentional "
        "vector, or neither",
        RECURRENCES,
    )
    readout: str = setting(
        "deep", "output of the decoder from state, context and word, or without the word", READOUTS
    )
    query_layer: str = setting("last", "decoder layer whose state attends", QUERY_LAYERS)
    cell: str = setting("gru", "recurrent cell of encoder and decoder", tuple(CELLS))
    embed_dim: int = setting(256, "features of an embedded token", at_least=1)
    hidden_dim: int = setting(  # an encoder has two of them side by side
        256,
        "features of each encoder direction and the attention; decoder states have twice as many",
        at_least=1,
        below=2**30,
    )
    layers: int = setting(1, "encoder layers", at_least=1)
    decoder_layers: int = setting(1, "decoder layers", at_least=1)
    dropout: float = setting(
        0.3, "probability of zeroing a feature during training", at_least=0, below=1
    )
    pointer_generator: bool = setting(
        False, "generate tokens or copy them from the source, out-of-vocabulary words included"
    )
    copy_gate: str = setting(
        "state",
        "input of the pointer-generator's gate: state, context and word, or the decoder's output",
        COPY_GATES,
    )
    window: int = setting(
        10,
        "keys visible to each side in local and predictive attention and windowed encoder heads",
        at_least=1,
    )
    stride: int = setting(
        4,
        "distance in keys between visible keys in strided attention and encoder heads",
        at_least=1,
    )
    fixed_stride: bool = setting(
        False, "count the strides of strided attention from the first key instead of the row's own"
    )
    sigma: float | None = setting(
        None,
        "standard deviation in keys of a Gaussian in local attention's window; flat unless given",
        above=0,
    )
    gaussian_height: float | None = setting(
        None, "height of the Gaussian, added to the scores; its logarithm is added unless given"
    )
    self_attention: bool = setting(
        False, "let encoder states attend to each other with two windowed and two strided heads"
    )
    encoder: str = setting(
        "rnn", "bidirectional RNN, or transformer of four heads, that encodes the source", ENCODERS
    )
    length_ratio: float = setting(
        Seq2Seq.length_ratio, "target tokens allowed per source token", at_least=0, below=2**31
    )
    longest_target: int = setting(
        Seq2Seq.longest_target, "target tokens allowed for any source", at_least=0
    )

    def __post_init__(self):
        check_settings(self)
        if self.hidden_dim % 2 and (self.self_attention or self.encoder == "transformer"):
            expected = "even for an encoder of four heads"
            raise InputError(argument_message("hidden_dim", expected, self.hidden_dim))
        for name, attentions in (
            ("fixed_stride", ("strided",)),
            ("sigma", ("local",)),
            ("gaussian_height", ("local",)),
            ("pointer_generator", ATTENTIONS[2:]),
        ):
            value, default = getattr(self, name), getattr(Config, name)
            if value != default and self.attention not in attentions:
                expected = f"{default} for attention {self.attention!r}"
                raise InputError(argument_message(name, expected, value))
        if self.copy_gate != Config.copy_gate and not self.pointer_generator:
            expected = f"{Config.copy_gate} without a pointer-generator"
            raise InputError(argument_message("copy_gate", expected, self.copy_gate))
        if self.gaussian_height is not None and self.sigma is None:
            expected = "None without a sigma"
            raise InputError(argument_message("gaussian_height", expected, self.gaussian_height))


def build_attention(
    config: Config, query_dim: int, key_dim: int, backend: str | None = None
) -> nn.Module:
    """Make the attention of a config."""
    sizes, name = (query_dim, key_dim), config.attention
    if name in NO_ATTENTION:
        return FixedContext(backend) if name == "none" else NoContext(backend)
    if name == "bahdanau":
        return BahdanauAttention(*sizes, config.hidden_dim, backend=backend)
    if name in HISTORIES:
        return HISTORIES[name](*sizes, config.hidden_dim, backend=backend)
    if name == "local":
        return LocalAttention(
            *sizes, config.window, sigma=config.sigma, gaussian_height=config.gaussian_height,
            backend=backend,
        )  # fmt: skip
    if name == "predictive":
        return LocalPredictiveAttention(*sizes, config.window, backend=backend)
    if name == "strided":
        return StridedAttention(*sizes, config.stride, fixed=config.fixed_stride, backend=backend)
    if name == "monotonic":
        return HardMonotonicWindowAttention(*sizes, backend=backend)
    return LuongAttention(*sizes, name, config.hidden_dim, backend=backend)


def build(config: Config, backend: str | None = None) -> Seq2Seq:
    """Make the model of a config; ``backend`` is that of :func:`attnfast.additive_attention`.

    Raises:
        TypeError: ``config`` is not a :class:`Config`.

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
    decoder = RecurrentDecoder(
        config.embed_dim, 1 if config.attention == "initial" else key_dim, state_dim,
        build_attention(config, state_dim, key_dim, backend), cell=config.cell,
        recurrence=config.recurrence, query_layer=config.query_layer, readout=config.readout,
        layers=config.decoder_layers, dropout=config.dropout,
    )  # fmt: skip
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
    pointer = None
    if config.pointer_generator:
        read = [state_dim, key_dim] if config.copy_gate == "state" else []
        pointer = PointerGenerator(*read, config.embed_dim, backend=backend)
    model = Seq2Seq(encoder, decoder, config.vocab_size, config.embed_dim, config.dropout, pointer)
    model.length_ratio, model.longest_target = config.length_ratio, config.longest_target
    return model
