"""joeynmt's decoder, and its attention, whose keys the decoder projects first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import (
    LOOP,
    StepDropout,
    apply_mask,
    draw_masks,
    fusion_skip_reason,
    last_states,
    linear_of,
    run_decoder,
    state_of,
)
from attnfast.integrations.helpers import attend_to_source, is_plain, project
from attnfast.integrations.search_model import DecoderParts
from attnfast.nn._fused_rnn import run_layer
from attnfast.nn._layer import Layer
from attnfast.ops.arguments import length_mask


class Luong:
    """e = q · W h."""

    def compute_proj_keys(self, keys):
        self.proj_keys = project(self, "key", self.key_layer, keys)

    def score(self, query):
        return query, None

    def forward(self, query, mask, values):
        self._check_input_shapes_forward(query=query, mask=mask, values=values)
        assert self.proj_keys is not None, "projection keys have to get pre-computed"
        query, weight = self.score(query)
        return attend_to_source(self, query, self.proj_keys, values, weight, mask=mask > 0)


class Bahdanau(Luong):
    """e = v · tanh(V q + W h)."""

    def score(self, query):
        self.compute_proj_query(query)
        return self.proj_query, self.energy_layer.weight


def layer_and_memory(self, source, mask):
    """Return the cells and the layer after the attention, and the memory of projected keys."""
    attention, output = self.attention, self.att_vector_layer
    rolled = linear_of(output.weight.roll(-self.rnn.hidden_size, 1), output.bias)  # for [c; h]
    memory = Memory(attention.proj_keys, source, mask=mask > 0)
    if hasattr(attention, "energy_layer"):
        weight = attention.energy_layer.weight[0]
        memory = memory._replace(score_vector=weight, score="tanh")
    return Layer.of(self.rnn, output=rolled, attends_first=False), memory


def encode(source, lengths, decoder, model):
    """Return a decoder's parts, the memory of sources and the first state."""
    order = lengths.argsort(descending=True, stable=True)  # as for packed sources
    mask = length_mask(lengths, source.shape[1]).unsqueeze(1)
    states, last = model._encode(src=source[order], src_length=lengths[order], src_mask=mask[order])
    states, last = states[order.argsort()], last[order.argsort()]
    decoder.attention.compute_proj_keys(states)
    layer, memory = layer_and_memory(decoder, states, mask)
    words, hidden = model.trg_embed, decoder._init_hidden(last)
    parts = DecoderParts(
        layer, getattr(decoder.attention, "query_layer", None), words.lut, decoder.output_layer,
        decoder, words.embedding_dim**0.5 if words.scale else 1.0, wrappers=(words,),
    )  # fmt: skip
    return parts, memory, state_of(*(hidden if isinstance(hidden, tuple) else (hidden,)))


class Decoder:
    """h = cell([x; f], h), c = attend(h), f = tanh(W [h; c] + b); f need not be fed."""

    def forward(
        self, trg_embed, encoder_output, encoder_hidden, src_mask, unroll_steps, hidden=None,
        prev_att_vector=None, **kwargs,
    ):  # fmt: skip
        rnn, attention, output = self.rnn, self.attention, self.att_vector_layer
        words, query = trg_embed[:, :unroll_steps], getattr(attention, "query_layer", None)
        if (hidden is None and encoder_hidden is None) or words.shape[1] != unroll_steps:
            raise UnsupportedCall("there is no state, or fewer words than steps")
        first = self._init_hidden(encoder_hidden) if hidden is None else hidden
        states = first if isinstance(first, tuple) else (first,)
        if hidden is not None:
            states = [x.transpose(0, 1).contiguous() for x in states]
        feed = [] if prev_att_vector is None else [prev_att_vector.transpose(0, 1)]
        between = nn.Dropout(rnn.dropout).train(rnn.training)
        dropouts = self.emb_dropout, between, self.hidden_dropout
        drops = [x.training and x.p > 0 for x in dropouts]
        layer, parts = Layer.of(rnn), [output, *attention.children()]
        reason = fusion_skip_reason(
            layer, unroll_steps, encoder_output, states, attention, *parts,
            feed=feed, drops=any(drops),
        )  # fmt: skip
        if not all(is_plain(x, nn.Dropout) for x in dropouts):
            reason = "a dropout has hooks or a forward of its own"
        if reason:
            raise UnsupportedCall(reason)
        self._check_shapes_input_forward(
            trg_embed, encoder_output, encoder_hidden, src_mask, states[0], prev_att_vector
        )
        sizes, times = (rnn.input_size, rnn.hidden_size, output.in_features), rnn.num_layers - 1
        input_mask, layer_masks, joined_mask = draw_masks(
            unroll_steps, words[:, 0],
            [StepDropout.of(*x) for x in zip(dropouts, sizes, (None, times, None))],
        )  # fmt: skip
        attention.compute_proj_keys(keys=encoder_output)
        key = attention.proj_keys
        state = state_of(*states, feed=feed[0][0] if feed else None)
        weight = None if query is None else attention.energy_layer.weight
        if self.input_feeding:
            fed_layer, memory = layer_and_memory(self, encoder_output, src_mask)
            masks = {"dropout_between": layer_masks}
            if input_mask is not None:
                input_mask, masks["dropout_feed"] = input_mask.tensor_split((words.shape[2],), -1)
                words = words * input_mask
            if joined_mask is not None:
                masks["dropout_joined"] = joined_mask.roll(-rnn.hidden_size, -1)
            steps = run_decoder(fed_layer, words, state, query, memory, **masks)
            vectors, weights = steps.attentional, steps.weights
        else:
            words = apply_mask(words, input_mask)
            steps = run_layer(layer, words, state, dropout_between=layer_masks)
            asking = steps.output if query is None else query(steps.output)
            context, weights = attend_to_source(
                attention, asking, key, encoder_output, weight, mask=src_mask > 0
            )
            both = torch.cat([steps.output, context], 2)
            vectors = self.activation(output(apply_mask(both, joined_mask)))
        if query is not None:
            attention.compute_proj_query(steps.output[:, -1:])
        last = [last_states(x) for x in (steps.states, steps.cells) if x is not None]
        last = tuple(x.transpose(0, 1).contiguous() for x in last)
        return self.output_layer(vectors), last if len(last) > 1 else last[0], weights, vectors


def example(attention, draw):
    size = getattr(attention, "query_layer", None)
    size = attention.key_layer.out_features if size is None else size.in_features
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        source = draw(len(lengths), max(lengths), attention.key_layer.in_features)
        seen = draw.seen(lengths, max(lengths)).unsqueeze(1)
        for _ in range(3):
            attention.compute_proj_keys(source)
            yield attention(draw(len(lengths), 1, size), seen, source)
        yield attention(draw(len(lengths), 1, size), seen, source)


def translate(decoder, draw):
    size, width = decoder.hidden_size, decoder.attention.key_layer.in_features
    cells = 2 if isinstance(decoder.rnn, nn.LSTM) else 1
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source, seen = draw(B, Tk, width), draw.seen(lengths, Tk).unsqueeze(1)
        rest: Any = {}
        for T in draw.steps(4, 1, 2):
            words = draw(B, T, decoder.emb_size)
            out = decoder(words, source, draw(B, width), seen, T, **rest)
            yield out
            rest = {"hidden": out[1], "prev_att_vector": out[3][:, -1:]}
        start = tuple(draw(B, decoder.num_layers, size) for _ in range(cells))
        hidden = start if cells > 1 else start[0]
        yield decoder(draw(B, 3, decoder.emb_size), source, None, seen, 2, hidden=hidden)


COMMON: dict[str, Any] = {
    "example": example,
    "note": "a source without words has weights 0 instead of NaN",
}
DISTRIBUTIONS = ["joeynmt"]
ADAPTERS = [
    Adapter(
        name="joeynmt's BahdanauAttention",
        implementation=Bahdanau,
        classes=["joeynmt.attention.BahdanauAttention"],
        parameters=["key_layer.weight", "query_layer.weight", "energy_layer.weight"],
        **COMMON,
    ),
    Adapter(
        name="joeynmt's LuongAttention",
        implementation=Luong,
        classes=["joeynmt.attention.LuongAttention"],
        parameters=["key_layer.weight"],
        **COMMON,
    ),
    Adapter(
        name="joeynmt's RecurrentDecoder",
        implementation=Decoder,
        classes=["joeynmt.decoders.RecurrentDecoder"],
        parameters=["rnn.*", "attention.*", "att_vector_layer.*", "output_layer.weight"],
        optional=["bridge_layer.*"],
        attention="attention",
        example=translate,
        weight_scale=4.0,  # a recurrence amplifies rounding errors
        skip_reason=lambda decoder: (
            None if decoder.activation is torch.tanh else "its attentional vectors have no tanh"
        ),
        search=encode,
        note=f"{COMMON['note']}; {LOOP}",
    ),
]
