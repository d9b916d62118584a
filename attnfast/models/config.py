"""The configuration of a model, and a function that builds the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from attnfast._utils.checks import InputError, argument_message, describe, raise_type_error
from attnfast._utils.settings import check_default, check_settings, setting, with_settings
from attnfast.models.decoders import (
    CELLS,
    READOUTS,
    FixedContext,
    NoContext,
    RecurrentDecoder,
)
from attnfast.models.encoders import POSITIONS, Encoder, TransformerEncoder
from attnfast.models.seq2seq import Seq2Seq
from attnfast.nn import (
    BahdanauAttention,
    CoverageAttention,
    ForwardAttention,
    GatedAttention,
    HardAttention,
    HardMonotonicWindowAttention,
    LocalAttention,
    LocalPredictiveAttention,
    LocationAwareAttention,
    LuongAttention,
    MultiHeadAttention,
    MultiHopAttention,
    PointerGenerator,
    SparseSelfAttention,
    StridedAttention,
    TopKAttention,
)
from attnfast.nn.recurrent import QUERY_LAYERS, RECURRENCES
from attnfast.nn.stateful import CHANNELS
from attnfast.spans import Span

HISTORIES = ("coverage", "location", "forward")
HEADS = ("multihead", "multihead_additive")
ENCODERS = ("rnn", "transformer")
COPY_GATES = ("state", "output")
SPANS = ("local", "prior", "predictive", "strided", "monotonic")
#: Without attention, every step reads the encoder's last states, or only the initial state does.
NO_ATTENTION = ("none", "initial")
SCORES = ("bahdanau", *LuongAttention.SCORES)
WITH_WEIGHTS = (*SCORES, *HEADS, "multihop", *HISTORIES, *SPANS)
ATTENTIONS = (*NO_ATTENTION, *WITH_WEIGHTS)
#: Standard deviation of a prior's Gaussian, in keys, unless given.
PRIOR_SIGMA = 3.0
#: The attentions for which a setting has an effect.
USED_BY = {
    "pointer_generator": WITH_WEIGHTS,
    "attention_temperature": tuple(x for x in WITH_WEIGHTS if x != "multihop"),
    "gated": WITH_WEIGHTS,
    "hard": (*SCORES, "predictive"),
    "attention_top_k": SCORES,
    "heads": HEADS,
    "hops": ("multihop",),
    "score": SPANS,
    "slope": ("local", "prior"),
    "sigma": ("local", "prior"),
    "gaussian_height": ("local", "prior"),
    "fixed_stride": ("strided",),
    "num_filters": ("location", "forward"),
    "filter_width": ("location", "forward"),
    "filter_channels": ("location", "forward"),
    "attention_penalty": ("coverage",),
    "fertility": ("coverage",),
}


@with_settings
@dataclass(frozen=True)
class Config:
    """The shape of a model.

    The attention ``"none"`` gives every decoder step the encoder's last states as its context (Cho
    et al., 2014); with ``"initial"`` the decoder's initial state alone depends on the source
    (Sutskever et al., 2014). ``"bahdanau"`` is additive; the scores of
    :class:`attnfast.nn.LuongAttention` have their names; ``"multihead"`` and
    ``"multihead_additive"`` have several heads, ``"multihop"`` several hops; ``"coverage"``,
    ``"location"`` and ``"forward"`` are additive attention with a history; and ``"local"``,
    ``"predictive"``, ``"strided"`` and ``"monotonic"`` have a ``score`` of Luong within a span.
    ``"prior"`` adds a Gaussian around the diagonal to such a score of all keys.

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
        "input of the decoder's RNN: the context of this step or of the last, the last attentional "
        "vector, or none of them",
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
    unidirectional: bool = setting(
        False, "encode with an RNN in one direction, of twice the features, instead of both"
    )
    residual: bool = setting(
        False, "add to the states of each encoder layer above the first those of the layer below"
    )
    positions: str = setting("sinusoidal", "positions that a transformer encoder knows", POSITIONS)
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
    attention_temperature: float = setting(1.0, "divisor of attention's scores", above=0)
    gated: bool = setting(False, "scale contexts by a gate that depends on the state")
    hard: bool = setting(False, "attend to one key, which training samples and learns by REINFORCE")
    attention_top_k: int | None = setting(
        None, "keys of the largest scores that attention sees; all unless given", at_least=1
    )
    heads: int = setting(4, "attention heads, which divide hidden_dim", at_least=1)
    hops: int = setting(2, "hops of multihop attention", at_least=1)
    score: str = setting("scaled_general", "score within a span or prior", LuongAttention.SCORES)
    slope: float = setting(
        1.0, "keys by which the middle of local attention or a prior moves at a step", at_least=0
    )
    num_filters: int | None = setting(
        None, "filters over the last weights; 32 for location, none for forward", at_least=0
    )
    filter_width: int = setting(31, "width of these filters in keys, odd", at_least=1)
    filter_channels: str = setting(
        "previous", "input of these filters: the last weights, their sum, or both", CHANNELS
    )
    attention_penalty: float = setting(
        0.0, "weight of the coverage that is subtracted from the scores of coverage attention"
    )
    fertility: float | None = setting(
        None, "largest fertility of a key in coverage attention; 1 for all unless given", above=0
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
        "standard deviation in keys of a Gaussian in local attention's window, flat unless given, "
        "or of a prior, 3 unless given",
        above=0,
    )
    gaussian_height: float | None = setting(
        None, "height of the Gaussian, added to the scores; its logarithm is added unless given"
    )
    self_attention: bool = setting(
        False, "let encoder states attend to each other with two windowed and two strided heads"
    )
    encoder: str = setting(
        "rnn", "RNN, or transformer of four heads, that encodes the source", ENCODERS
    )
    length_ratio: float = setting(
        Seq2Seq.length_ratio, "target tokens allowed per source token", at_least=0, below=2**31
    )
    longest_target: int = setting(
        Seq2Seq.longest_target, "target tokens allowed for any source", at_least=0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.hidden_dim % 2 and (self.self_attention or self.encoder == "transformer"):
            expected = "even for an encoder of four heads"
            raise InputError(argument_message("hidden_dim", expected, self.hidden_dim))
        for name, attentions in USED_BY.items():
            if self.attention not in attentions:
                check_default(self, name, f"for attention {self.attention!r}")
        filters = 32 * (self.attention == "location")
        filters = filters if self.num_filters is None else self.num_filters
        for name, is_used, where in (
            ("copy_gate", self.pointer_generator, "without a pointer-generator"),
            ("positions", self.encoder == "transformer", "for an RNN encoder"),
            ("unidirectional", self.encoder == "rnn", "for a transformer encoder"),
            ("residual", self.encoder == "rnn" and self.layers > 1, "without RNN layers above"),
            ("query_layer", self.decoder_layers > 1, "with one decoder layer"),
            ("query_layer", self.recurrence != "input_feeding", "with input feeding"),
            ("filter_width", filters, "without filters"),
            ("filter_channels", filters, "without filters"),
        ):
            if not is_used:
                check_default(self, name, where)
        if self.gaussian_height is not None and self.sigma is None and self.attention != "prior":
            expected = "None without a sigma"
            raise InputError(argument_message("gaussian_height", expected, self.gaussian_height))
        if self.attention in HEADS and self.hidden_dim % self.heads:
            expected = f"a divisor of hidden_dim {self.hidden_dim}"
            raise InputError(argument_message("heads", expected, self.heads))
        if not self.filter_width % 2:
            raise InputError(argument_message("filter_width", "odd", self.filter_width))


def build_attention(
    config: Config, query_dim: int, key_dim: int, backend: str | None = None
) -> nn.Module:
    """Make the attention of a config."""
    if config.attention in NO_ATTENTION:
        kind = FixedContext if config.attention == "none" else NoContext
        return kind(backend, bidirectional=not is_unidirectional(config))
    attention = _build_inner(config, query_dim, key_dim, backend)
    if config.attention_temperature != 1:
        attention.temperature = config.attention_temperature  # type: ignore[assignment]
    if config.attention_top_k is not None:
        attention = TopKAttention(attention, config.attention_top_k)
    if config.hard:
        attention = HardAttention(attention)
    return GatedAttention(attention, query_dim) if config.gated else attention


def is_unidirectional(config: Config) -> bool:
    """Return whether the encoder's states are of one direction."""
    return config.unidirectional and config.encoder == "rnn"


def _build_inner(config: Config, query_dim: int, key_dim: int, backend: str | None) -> nn.Module:
    """Make the attention of a config without wrappers."""
    options: dict[str, Any] = {"backend": backend}
    sizes, name = (query_dim, key_dim), config.attention
    attn_dim, score = config.hidden_dim, config.score
    if name == "bahdanau":
        return BahdanauAttention(*sizes, attn_dim, **options)
    if name in LuongAttention.SCORES:
        return LuongAttention(*sizes, name, attn_dim, **options)
    if name in HEADS:
        kind = "additive" if name == "multihead_additive" else "dot"
        return MultiHeadAttention(*sizes, attn_dim, config.heads, kind, **options)
    if name == "multihop":
        return MultiHopAttention(query_dim, config.hops, "layer-wise", **options)
    if name == "coverage":
        return CoverageAttention(
            *sizes, attn_dim, penalty=config.attention_penalty or None,
            fertility=config.fertility, **options,
        )  # fmt: skip
    if name in HISTORIES:
        location = name == "location"
        filters = config.num_filters
        return (LocationAwareAttention if location else ForwardAttention)(
            *sizes, attn_dim, 32 * location if filters is None else filters, config.filter_width,
            channels=config.filter_channels, **options,
        )  # fmt: skip
    if name in ("local", "prior"):
        prior = name == "prior"
        return LocalAttention(
            *sizes, None if prior else config.window, score, attn_dim, slope=config.slope,
            sigma=PRIOR_SIGMA if prior and config.sigma is None else config.sigma,
            gaussian_height=config.gaussian_height, **options,
        )  # fmt: skip
    if name == "predictive":
        return LocalPredictiveAttention(*sizes, config.window, score, attn_dim, **options)
    if name == "strided":
        return StridedAttention(
            *sizes, config.stride, score, attn_dim, fixed=config.fixed_stride, **options
        )
    return HardMonotonicWindowAttention(*sizes, score=score, attn_dim=attn_dim, **options)


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
    context_dim = config.hidden_dim if config.attention in HEADS else key_dim
    context_dim = 1 if config.attention == "initial" else context_dim
    decoder = RecurrentDecoder(
        config.embed_dim, context_dim, state_dim,
        build_attention(config, state_dim, key_dim, backend), cell=config.cell,
        recurrence=config.recurrence, query_layer=config.query_layer, readout=config.readout,
        layers=config.decoder_layers, dropout=config.dropout,
    )  # fmt: skip
    encoder: Encoder | TransformerEncoder
    heads = [Span(window=config.window)] * 2 + [Span(stride=config.stride)] * 2
    if config.encoder == "transformer":
        encoder = TransformerEncoder(
            config.embed_dim, config.hidden_dim, heads if config.self_attention else None,
            config.layers, config.dropout, backend, positions=config.positions,
        )  # fmt: skip
    else:
        sparse = None
        if config.self_attention:
            sparse = SparseSelfAttention(key_dim, heads, backend=backend)
        encoder = Encoder(
            config.embed_dim, config.hidden_dim, config.cell, config.layers, config.dropout, sparse,
            bidirectional=not config.unidirectional, residual=config.residual, backend=backend,
        )  # fmt: skip
    pointer = None
    if config.pointer_generator:
        read = [state_dim, context_dim] if config.copy_gate == "state" else []
        pointer = PointerGenerator(*read, config.embed_dim, backend=backend)
    model = Seq2Seq(encoder, decoder, config.vocab_size, config.embed_dim, config.dropout, pointer)
    model.length_ratio, model.longest_target = config.length_ratio, config.longest_target
    return model
