"""SpeechBrain: attention by content, location, keys and values; the decoder that has them."""

import copy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.fused_decoders import (
    LOOP,
    StepDropout,
    draw_masks,
    fusion_skip_reason,
    linear_of,
    run_decoder,
    state_of,
)
from attnfast.integrations.helpers import attend_to_source
from attnfast.integrations.search_model import DecoderParts
from attnfast.nn._layer import Layer
from attnfast.nn.stateful import CumulativeState, LocationAwareAttention


def mask_of(states, lengths):
    """Return the project's mask, of the type of the lengths, 1 up to these."""
    frames = torch.arange(states.size(1), device=lengths.device, dtype=lengths.dtype)
    return (frames < lengths.unsqueeze(1)).to(lengths.dtype).to(states.device)


def lengths_of(self):
    """Return the number of states of each source that the project's mask leaves, ``[B]``."""
    return cached_per_source(self, "lengths", lambda: (self.mask != 0).flatten(1).sum(1), self.mask)


def attended(self, *terms, **more):
    return attend_to_source(self, *terms, lengths=lengths_of(self), **more)


def begin(self, enc_states, enc_len):
    """Store the attributes that the project stores for a source."""
    if hasattr(self, "key_linear"):
        if self.keys is None:
            self.keys, self.values = self.key_linear(enc_states), self.value_linear(enc_states)
            self.mask = mask_of(enc_states, enc_len).unsqueeze(2)
    elif self.precomputed_enc_h is None:
        self.precomputed_enc_h = self.mlp_enc(enc_states)
        self.mask = mask_of(enc_states, enc_len)
        if hasattr(self, "conv_loc"):
            self.prev_attn = self.mask * (1 / enc_len.float()).unsqueeze(1)


class Additive:
    """e = s g · tanh(W h + b + V q + c), and U (F ∗ α) + d in it, α the last weights."""

    def forward(self, enc_states, enc_len, dec_states):
        query, more, located = self.mlp_dec(dec_states), {}, hasattr(self, "conv_loc")
        begin(self, enc_states, enc_len)
        if located:
            query = query + self.mlp_loc.bias
            more = {"filters": self.conv_loc.weight, "projection": self.mlp_loc.weight}
            more["previous"] = self.prev_attn
        terms = query, self.precomputed_enc_h, enc_states, self.mlp_attn.weight
        context, weights = attended(self, *terms, scale=self.scaling, **more)
        if located:
            self.prev_attn = weights.detach()
        return self.mlp_out(context), weights


class KeyValue:
    """e = (V q + c) · (W h + b) / √A; values are projected too."""

    def forward(self, enc_states, enc_len, dec_states):
        begin(self, enc_states, enc_len)
        query, scale = self.query_linear(dec_states), 1 / float(self.scaling)
        context, weights = attended(self, query, self.keys, self.values, scale=scale)
        return context, weights.unsqueeze(1)


def layer_of(decoder):
    """Return the decoder's cells."""
    return Layer.of_cells(*decoder.rnn.rnn_cells, attends_first=False)


def prepare_source(decoder, attention, states, lengths):
    """Return a source's memory, the first state, the query layer and make_attention's arguments.

    A layer on a context, Σ α (W h + b), is one on the values: the weights α sum to 1.
    """
    attention.reset()
    begin(attention, states, lengths)
    ends, cells = lengths_of(attention), list(decoder.rnn.rnn_cells)
    zeros = states.new_zeros(len(cells), len(states), decoder.hidden_size)
    state = state_of(*[zeros] * (1 + isinstance(cells[0], nn.LSTMCell)))
    if hasattr(attention, "key_linear"):
        memory = Memory(attention.keys, attention.values, ends)
        return memory, state, attention.query_linear, {"scale": 1 / float(attention.scaling)}
    key, options = attention.precomputed_enc_h, {"scale": attention.scaling}
    if hasattr(attention, "conv_loc"):
        key = key + attention.mlp_loc.bias
        options |= {"kind": LocationAwareAttention, "terms": {
            "location_conv": attention.conv_loc, "location_proj": attention.mlp_loc,
            "channels": "previous",
        }}  # fmt: skip
        first = attention.prev_attn.to(states)
        state = state._replace(history=CumulativeState(first, first))
    vector = attention.mlp_attn.weight[0]
    memory = Memory(key, attention.mlp_out(states), ends, score_vector=vector, score="tanh")
    return memory, state, attention.mlp_dec, options


def unwrap(module, name, attribute):
    """Return the module of torch.nn that SpeechBrain's module ``name`` wraps, or the module."""
    cls = type(module)
    is_own = f"{cls.__module__}.{cls.__qualname__}" == f"speechbrain.nnet.{name}"
    return getattr(module, attribute) if is_own else module


def encode(states, lengths, decoder, embedding, linear):
    """Return the decoder's parts, the memory of encoder states and the first state.

    No activation is between the layers after the attention: U (V [c; h] + d) + e is one layer.
    """
    table = unwrap(embedding, "embedding.Embedding", "Embedding")
    last, first = unwrap(linear, "linear.Linear", "w"), decoder.proj
    if type(last) is not nn.Linear or getattr(linear, "max_norm", None) is not None:
        raise UnsupportedCall("its linear layer is no plain nn.Linear, or has a maximum norm")
    attention = copy.copy(decoder.attn)  # whose attributes stay as they are
    memory, state, query, options = prepare_source(decoder, attention, states, lengths)
    weight, bias = last.weight @ first.weight, F.linear(first.bias, last.weight, last.bias)
    output = linear_of(weight.roll(decoder.hidden_size, 1), bias)  # for [h; c]
    parts = DecoderParts(
        layer_of(decoder), query, table, output, decoder, attention=options,
        wrappers=(embedding, linear, last),
    )  # fmt: skip
    return parts, memory, state


class Decoder:
    """h = cell([x; c], h), c = attend(h), y = V [c; h] + d."""

    def forward(self, inp_tensor, enc_states, wav_len):
        attention, T, cells = self.attn, inp_tensor.shape[1], list(self.rnn.rnn_cells)
        zeros = enc_states.new_zeros(len(cells), len(enc_states), self.hidden_size)
        layer = layer_of(self)
        located, by_key = hasattr(attention, "conv_loc"), hasattr(attention, "key_linear")
        dropouts = [self.drop, *self.rnn.dropout_layers]
        parts = [self.proj, self.rnn, self.drop, attention]
        if len({(x.p, x.training) for x in dropouts[1:]}) > 1:
            raise UnsupportedCall("its layers differ in dropout")
        drops = any(x.training and x.p > 0 for x in dropouts)
        if reason := fusion_skip_reason(
            layer, T, enc_states, [zeros], attention, *parts, drops=drops, has_history=located
        ):
            raise UnsupportedCall(reason)
        ends = torch.round(enc_states.shape[1] * wav_len).long()
        memory, state, query, options = prepare_source(self, attention, enc_states, ends)
        joined = inp_tensor.shape[2], self.attn_dim
        cell_dropouts = [StepDropout.of(x, times=len(cells) - 1) for x in dropouts[1:2]]
        input_mask, *between = draw_masks(
            T, zeros[0], [StepDropout.of(self.drop, sum(joined)), *cell_dropouts]
        )
        masks = dict(zip(["dropout_between"], between))
        if input_mask is not None:
            input_mask, masks["dropout_feed"] = input_mask.split(joined, -1)
            inp_tensor = inp_tensor * input_mask
        steps = run_decoder(
            layer, inp_tensor, state, query, memory, detach_history=located, **options, **masks
        )
        if located:
            attention.prev_attn = steps.weights[:, -1].detach()
        weights = steps.weights.unsqueeze(2) if by_key else steps.weights
        return self.proj(torch.cat([steps.contexts, steps.output], -1)), weights


def example(attention, draw):
    """Call it as its decoder does: two batches, several steps, beams that change their order."""
    source, state = (layer.in_features for layer in list(attention.children())[:2])
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        attention.reset()
        states = draw(len(lengths), max(lengths), source)
        for _ in range(3):
            ends = draw.numbers(*lengths).to(draw.dtype)
            yield attention(states, ends, draw(len(lengths), state))
            if getattr(attention, "prev_attn", None) is not None:
                attention.prev_attn = attention.prev_attn.flip(0)


def decode(decoder, draw):
    """Call it as recipes do: sources of relative lengths, teacher forcing."""
    features = decoder.rnn.rnn_cells[0].input_size - decoder.attn_dim
    source = next(iter(decoder.attn.children())).in_features
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        ends = draw.numbers(*lengths).to(draw.dtype) / Tk
        for T in draw.steps(4, 1, 2):
            yield decoder(draw(B, T, features), draw(B, Tk, source), ends)


def decoder_skip_reason(decoder, located):
    """Return why the operator cannot run a decoder, or None."""
    if hasattr(decoder.attn, "conv_loc") != located:
        return f"its attention {'does not know' if located else 'knows'} its location"
    rectified = getattr(decoder.rnn.rnn_cells[0], "nonlinearity", "tanh") != "tanh"
    return "its cells have a relu" if rectified else None


def names(*layers):
    return [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]


CONTENT = [*names("mlp_enc", "mlp_dec", "mlp_out"), "mlp_attn.weight"]
NOTE = "an empty source has weights 0, not NaN"
DISTRIBUTIONS = ["speechbrain"]
ADAPTERS = [
    Adapter(
        name=f"SpeechBrain's {cls}",
        implementation=methods,
        classes=[f"speechbrain.nnet.attention.{cls}"],
        parameters=parameters,
        known_attributes=["detach"],  # of the last weights
        example=example,
        note=NOTE,
    )
    for cls, methods, parameters in (
        ("ContentBasedAttention", Additive, CONTENT),
        ("LocationAwareAttention", Additive, [*CONTENT, "conv_loc.weight", *names("mlp_loc")]),
        ("KeyValueAttention", KeyValue, names("key_linear", "query_linear", "value_linear")),
    )
]
ADAPTERS += [
    Adapter(
        name=f"SpeechBrain's AttentionalRNNDecoder{of_kind}",
        implementation=Decoder,
        classes=["speechbrain.nnet.RNN.AttentionalRNNDecoder"],
        parameters=["proj.*", "attn.*", "rnn.*"],
        known_attributes=["attn_dim"],  # of the zeros that it feeds first
        attention="attn",
        example=decode,
        weight_scale=4.0,  # a recurrence amplifies rounding errors
        skip_reason=partial(decoder_skip_reason, located=bool(of_kind)),
        search=encode,
        note=f"{NOTE}; {LOOP}",
        dtype=dtype,
    )
    for of_kind, dtype in (
        ("", torch.float64),
        (" with location", torch.float32),  # the project's first weights, whatever its parameters
    )
]
