"""SpeechBrain: attention by content, location, keys and values; the decoder that has them."""

from functools import partial

import torch

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.fused_decoders import (
    LOOP,
    StepDropout,
    draw_masks,
    fusion_skip_reason,
    run_decoder,
    state_of,
)
from attnfast.integrations.helpers import attend_to_source
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


class Decoder:
    """h = cell([x; c], h), c = attend(h), y = V [c; h] + d.

    A layer on a context, Σ α (W h + b), is one on the values: the weights α sum to 1.
    """

    def forward(self, inp_tensor, enc_states, wav_len):
        attention, (B, T), cells = self.attn, inp_tensor.shape[:2], list(self.rnn.rnn_cells)
        layer = Layer.of_cells(*cells, attends_first=False)
        zeros = enc_states.new_zeros(len(cells), B, self.hidden_size)
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
        attention.reset()
        begin(attention, enc_states, torch.round(enc_states.shape[1] * wav_len).long())
        state, lengths = state_of(*[zeros] * (1 + (layer.mode == "lstm"))), lengths_of(attention)
        if by_key:
            query, scale = attention.query_linear, 1 / float(attention.scaling)
            memory = Memory(attention.keys, attention.values, lengths)
        else:
            query, scale = attention.mlp_dec, attention.scaling
            key, values = attention.precomputed_enc_h, attention.mlp_out(enc_states)
            key = key + attention.mlp_loc.bias if located else key
            vector = attention.mlp_attn.weight[0]
            memory = Memory(key, values, lengths, score_vector=vector, score="tanh")
        history = {}
        if located:
            history = {"kind": LocationAwareAttention, "detach_history": True}
            history["terms"] = {
                "location_conv": attention.conv_loc, "location_proj": attention.mlp_loc,
                "channels": "previous",
            }  # fmt: skip
            first = attention.prev_attn.to(enc_states)
            state = state._replace(history=CumulativeState(first, first))
        joined = inp_tensor.shape[2], self.attn_dim
        cell_dropouts = [StepDropout.of(x, times=len(cells) - 1) for x in dropouts[1:2]]
        input_mask, *between = draw_masks(
            T, zeros[0], [StepDropout.of(self.drop, sum(joined)), *cell_dropouts]
        )
        masks = dict(zip(["dropout_between"], between))
        if input_mask is not None:
            input_mask, masks["dropout_feed"] = input_mask.split(joined, -1)
            inp_tensor = inp_tensor * input_mask
        steps = run_decoder(layer, inp_tensor, state, query, memory, scale, **history, **masks)
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
        note=f"{NOTE}; {LOOP}",
        dtype=dtype,
    )
    for of_kind, dtype in (
        ("", torch.float64),
        (" with location", torch.float32),  # the project's first weights, whatever its parameters
    )
]
