"""Attention of PyTorch's tutorials, which people copy: translation and chatbot."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import (
    fusion_skip_reason,
    gru_skip_reason,
    is_plain_table,
    run_decoder,
)
from attnfast.integrations.helpers import (
    attend_to_source,
    batch_first,
    is_plain,
    keep_in_graph,
    project,
    project_both,
    promote_dtype,
)
from attnfast.integrations.search_model import DecoderParts, find_words
from attnfast.nn._layer import Layer, RecurrentState


class Translation:
    """e = v · tanh(W q + a + U h + b) + c."""

    def forward(self, query, keys):
        if query.dim() != 3 or query.shape[1] != 1:  # its own code adds other shapes, too
            raise UnsupportedCall("the query is not [B, 1, D]")
        key, weight = project(self, "key", self.Ua, keys), self.Va.weight
        context, weights = attend_to_source(self, self.Wa(query), key, keys, weight)
        return keep_in_graph(context, self.Va.bias), weights


PARTS = ("Wa", "Ua", "Va")


def constants(decoder):
    """Return MAX_LENGTH and SOS_token of the file that defines a copied decoder."""
    names = getattr(type(decoder), "_attnfast_own", type(decoder)).forward.__globals__
    return names.get("MAX_LENGTH"), names.get("SOS_token")


def parts_of(decoder):
    """Return the decoder's parts."""
    attention = decoder.attention
    layer = Layer.of(decoder.gru)
    return DecoderParts(layer, attention.Wa, decoder.embedding, decoder.out, decoder)


def memory_of(attention, source):
    """Return the memory of a decoder's source."""
    key = project(attention, "key", attention.Ua, source)
    return Memory(key, source, score_vector=attention.Va.weight[0], score="tanh")


class TranslationDecoder:
    """c = attend(h), h = cell([x; c], h), for MAX_LENGTH words of a target."""

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        T, start = constants(self)
        parts, attention, words = parts_of(self), self.attention, target_tensor
        layer, states, inner = parts.layer, [encoder_hidden], [getattr(attention, x) for x in PARTS]
        if words is not None and words.shape[1] < T:
            raise UnsupportedCall("its target has fewer words than MAX_LENGTH")
        plain = is_plain_table(self.embedding) and is_plain(self.dropout, nn.Dropout)
        if not plain or not is_plain(self.out):
            raise UnsupportedCall("its embedding, dropout or output layer is no plain module")
        if reason := fusion_skip_reason(layer, T, encoder_outputs, states, attention, *inner):
            raise UnsupportedCall(reason)
        memory, state = memory_of(attention, encoder_outputs), RecurrentState(encoder_hidden[0])
        drops = self.dropout.training and self.dropout.p > 0
        first = torch.full((len(encoder_outputs),), start, device=encoder_outputs.device)
        if words is None and drops:
            raise UnsupportedCall("there is no target, and dropout is on")
        if words is None:
            words = find_words(parts, memory, state, first, T - 1)
        embedded = self.embedding(torch.cat([first.unsqueeze(1), words[:, : T - 1]], 1))
        if drops:  # the random numbers of its own loop
            embedded = torch.cat([self.dropout(x) for x in embedded.split(1, 1)], 1)
        steps = run_decoder(layer, embedded, state, attention.Wa, memory)
        states = keep_in_graph(steps.states, attention.Va.bias)
        last = steps.states[:, -1].unsqueeze(0)
        return F.log_softmax(self.out(states), -1), last, steps.weights


def encode(source, lengths, decoder, encoder):
    """Return a decoder's parts, the memory of sources and the first state."""
    states, hidden = encoder(source)
    return parts_of(decoder), memory_of(decoder.attention, states), RecurrentState(hidden[0])


class Chatbot:
    """Luong's scores of a step: q · h, q · (W h + b), v · tanh(W [q; h] + b)."""

    def forward(self, hidden, encoder_outputs):
        plain = self.method == "dot" or is_plain(self.attn)
        if len(hidden) != 1 or not plain:
            raise UnsupportedCall("the query is not one step, or its layer no plain nn.Linear")
        query, key, weight = hidden[0], batch_first(self, encoder_outputs), None
        if self.method == "general":
            key = project(self, "key", self.attn, key)
        elif self.method == "concat":
            (query, key), weight = project_both(self, self.attn, query, key), self.v
        weights = attend_to_source(self, query, key, None, weight)[1].unsqueeze(1)
        return promote_dtype(weights, *(query, key) if weight is None else (weight,))


def translation(attention, draw):
    size = attention.Wa.in_features
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, attention.Ua.in_features)
        for _ in range(3):
            yield attention(draw(B, 1, size), source)


def translate(decoder, draw):
    words, size = decoder.embedding.num_embeddings, decoder.gru.hidden_size
    most = constants(decoder)[0]
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        inputs = draw(B, Tk, size), draw(1, B, size)
        for more in (0, 2) if B < 9 else (0,):
            yield decoder(*inputs, F.pad(draw.words(words, B, most), (0, more)))
        yield decoder(*inputs)


def decoder_skip_reason(decoder):
    """Return why the operator cannot run a decoder, or None."""
    if None in constants(decoder):
        return "its file lacks MAX_LENGTH or SOS_token"
    if decoder.gru.num_layers > 1:
        return f"it has {decoder.gru.num_layers} layers"
    return gru_skip_reason(decoder.gru)


def chatbot(attention, draw):
    size = attention.hidden_size
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        source = draw(Tk, B, size)
        for _ in range(3):
            yield attention(draw(1, B, size), source)


ADAPTERS = [
    Adapter(
        name="the translation tutorial's BahdanauAttention",
        implementation=Translation,
        classes=["BahdanauAttention"],
        parameters=["Wa.weight", "Wa.bias", "Ua.weight", "Ua.bias", "Va.weight", "Va.bias"],
        example=translation,
    ),
    Adapter(
        name="the translation tutorial's AttnDecoderRNN",
        implementation=TranslationDecoder,
        classes=["AttnDecoderRNN"],
        parameters=[
            *("embedding.weight", "gru.*", "out.*"),
            *("attention.Wa.*", "attention.Ua.*", "attention.Va.*"),
        ],
        known_attributes=["MAX_LENGTH", "SOS_token", "detach"],
        attention="attention",
        example=translate,
        weight_scale=2.0,  # a recurrence amplifies rounding errors
        skip_reason=decoder_skip_reason,
        search=encode,
    ),
    Adapter(
        name="the chatbot tutorial's Attn",
        implementation=Chatbot,
        classes=["Attn"],
        parameters=[],
        optional=["attn.weight", "attn.bias", "v"],
        example=chatbot,
    ),
]
