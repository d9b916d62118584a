"""Attention of the book "Dive into Deep Learning"."""

from __future__ import annotations

import torch

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import (
    LOOP,
    fusion_skip_reason,
    gru_skip_reason,
    last_states,
    run_decoder,
    state_of,
)
from attnfast.integrations.helpers import attend_to_source, project
from attnfast.integrations.search_model import DecoderParts, find_words
from attnfast.nn._layer import Layer
from attnfast.ops.arguments import length_mask

EMPTY = "a row without keys has weights 0 instead of equal ones"


def seen(key, valid_lens):
    """Return the mask of keys that valid_lens leaves, ``[…, Tk]``."""
    return length_mask(valid_lens, key.shape[1], key)


def attended(self, query, key, values, valid_lens, score_vector=None, scale=1.0):
    """Attend, and store the weights before their dropout; the context is computed after it."""
    mask = None if valid_lens is None else seen(key, valid_lens)
    drops = self.dropout.training and self.dropout.p > 0
    value = None if drops else values
    context, self.attention_weights = attend_to_source(
        self, query, key, value, score_vector, mask=mask, scale=scale
    )
    return torch.bmm(self.dropout(self.attention_weights), values) if drops else context


class Additive:
    """e = v · tanh(W q + U h)."""

    def forward(self, queries, keys, values, valid_lens=None):
        key = project(self, "key", self.W_k, keys)
        return attended(self, self.W_q(queries), key, values, valid_lens, self.w_v.weight)


class Dot:
    """e = q · h / √d."""

    def forward(self, queries, keys, values, valid_lens=None):
        scale = queries.shape[-1] ** -0.5
        return attended(self, queries, keys, values, valid_lens, scale=scale)


def parts_of(decoder):
    """Return the decoder's parts; its cells read [c; x]."""
    layer, attention = Layer.of(decoder.rnn), decoder.attention
    if layer.weight_ih is not None:
        layer = layer._replace(weight_ih=layer.weight_ih.roll(-attention.W_k.in_features, 1))
    return DecoderParts(layer, attention.W_q, decoder.embedding, decoder.dense, decoder)


def memory_of(attention, source, valid_lens):
    """Return the memory of a decoder's source."""
    key, lengths = project(attention, "key", attention.W_k, source), None
    if valid_lens is not None:
        lengths = seen(key, valid_lens).sum(1)
    return Memory(key, source, lengths, score_vector=attention.w_v.weight[0], score="tanh")


class Decoder:
    """c = attend(h), h = cell([c; x], h)."""

    def forward(self, X, state):
        source, hidden, valid_lens = state
        parts, attention = parts_of(self), self.attention
        layer = parts.layer
        inner = [attention.W_q, attention.W_k, attention.w_v, attention.dropout]
        drops = self.rnn.training and self.rnn.dropout > 0 and self.rnn.num_layers > 1
        several = valid_lens is not None and valid_lens.dim() != 1
        reason = fusion_skip_reason(layer, X.shape[1], source, [hidden], attention, *inner)
        if several or drops:
            reason = "valid_lens are those of each query" if several else "its layers have dropout"
        if reason:
            raise UnsupportedCall(reason)
        memory = memory_of(attention, source, valid_lens)
        steps = run_decoder(layer, self.embedding(X), state_of(hidden), attention.W_q, memory)
        self._attention_weights = list(steps.weights.split(1, 1))
        attention.attention_weights = self._attention_weights[-1]
        return self.dense(steps.output), [source, last_states(steps.states), valid_lens]


def encode(source, lengths, decoder, model):
    """Return a decoder's parts, the memory of sources and the first state."""
    states, hidden, valid_lens = decoder.init_state(model.encoder(source, lengths), lengths)
    return parts_of(decoder), memory_of(decoder.attention, states, valid_lens), state_of(hidden)


class Model:
    """The words y_t = argmax P(y | y_1, ..., y_{t−1}), from one search."""

    def predict_step(self, batch, device, num_steps, save_attention_weights=False):
        source, target, lengths, _ = (x.to(device) for x in batch)
        decoder, attention = self.decoder, self.decoder.attention
        if decoder.training or not (target[:, 0] == target[:1, 0]).all():
            raise UnsupportedCall("it is in training mode, or rows start with different words")
        state = decoder.init_state(self.encoder(source, lengths), lengths)
        memory = memory_of(attention, state[0], state[2])
        words = find_words(parts_of(decoder), memory, state_of(state[1]), target[:, 0], num_steps)
        decoder(torch.cat([target[:, :1], words[:, :-1]], 1), state)  # for its weights
        every = decoder._attention_weights
        decoder._attention_weights = every[-1:]
        return words, [[x] for x in every] if save_attention_weights else []


def example(attention, draw, query=4, key=4):
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source, values, one = draw(B, Tk, key), draw(B, Tk, 6), draw.numbers(*lengths)
        for Tq in (4, 1, 1, 1):
            yield attention(draw(B, Tq, query), source, values, one)
        each = torch.stack([one, one.flip(0), one.roll(1)], 1)
        yield attention(draw(B, 3, query), source, source, each)
        yield attention(draw(B, 3, query), source, source, None)


def translate(decoder, draw):
    words, features = decoder.embedding.num_embeddings, decoder.attention.W_k.in_features
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source = draw(Tk, B, features)
        state_shape = decoder.rnn.num_layers, B, decoder.rnn.hidden_size
        for valid_lens in (draw.numbers(*lengths), None):
            state = decoder.init_state((source, draw(*state_shape)), valid_lens)
            for T in draw.steps(4, 1, 2):
                out, state = decoder(draw.words(words, B, T), state)
                yield out, list(state), list(decoder._attention_weights)


def predict(model, draw):
    words = model.encoder.embedding.num_embeddings, model.decoder.embedding.num_embeddings
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source, target = draw.words(words[0], B, Tk), draw.words(words[1], 1, 3).expand(B, 3)
        batch = source, target, draw.numbers(*lengths), target
        for steps in draw.steps(4, 1):
            yield model.predict_step(batch, draw.device, steps)[0]


DISTRIBUTIONS = ["d2l"]
ADAPTERS = [
    Adapter(
        name="d2l's AdditiveAttention",
        implementation=Additive,
        classes=["d2l.torch.AdditiveAttention"],
        parameters=["W_k.weight", "W_q.weight", "w_v.weight"],
        example=lambda attention, draw: example(
            attention, draw, attention.W_q.in_features, attention.W_k.in_features
        ),
        note=EMPTY,
    ),
    Adapter(
        name="d2l's DotProductAttention",
        implementation=Dot,
        classes=["d2l.torch.DotProductAttention"],
        parameters=[],
        example=example,
        note=EMPTY,
    ),
    Adapter(
        name="d2l's Seq2SeqAttentionDecoder",
        implementation=Decoder,
        classes=["Seq2SeqAttentionDecoder"],
        parameters=[
            *("embedding.weight", "rnn.*", "dense.*"),
            *("attention.W_k.weight", "attention.W_q.weight", "attention.w_v.weight"),
        ],
        known_attributes=["_attention_weights", "attention_weights"],
        attention="attention",
        example=translate,
        weight_scale=4.0,  # a recurrence amplifies rounding errors
        skip_reason=lambda decoder: gru_skip_reason(decoder.rnn),
        search=encode,
        note=f"{EMPTY}; {LOOP}, and training with dropout",
    ),
    Adapter(
        name="d2l's EncoderDecoder",
        implementation=Model,
        classes=["d2l.torch.Seq2Seq", "d2l.torch.EncoderDecoder"],
        parameters=[
            *("encoder.*", "decoder.embedding.weight", "decoder.rnn.*", "decoder.dense.*"),
            *("decoder.attention.W_k.weight", "decoder.attention.W_q.weight"),
            "decoder.attention.w_v.weight",
        ],
        attention="decoder.attention",
        example=predict,
        weight_scale=2.0,  # a recurrence amplifies rounding errors
        skip_reason=lambda model: gru_skip_reason(model.decoder.rnn),
        note="predict_step finds all words at once, in evaluation mode",
    ),
]
