"""Attention of clovaai's deep-text-recognition-benchmark, which people copy: cell and head."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import fusion_skip_reason, run_decoder, state_of
from attnfast.integrations.helpers import attend_to_source, is_plain, project
from attnfast.integrations.search_model import DecoderParts, check_all_visible, find_words
from attnfast.nn._layer import Layer


class Recognition:
    """e = v · tanh(U h + W q + b), then s = cell([c; y], s)."""

    def forward(self, prev_hidden, batch_H, char_onehots):
        query, key = self.h2h(prev_hidden[0]), project(self, "key", self.i2h, batch_H)
        context, weights = attend_to_source(self, query, key, batch_H, self.score.weight)
        state = self.rnn(torch.cat([context, char_onehots], 1), prev_hidden)
        return state, weights.unsqueeze(2)


def parts_of(head):
    """Return the head's parts; its cells read [c; y], and words are rows of the identity."""
    cell, weight = head.attention_cell, head.generator.weight
    layer = Layer.of_cells(cell.rnn)
    layer = layer._replace(weight_ih=layer.weight_ih.roll(-cell.i2h.in_features, 1))
    table = nn.Embedding.from_pretrained(torch.eye(head.num_classes).to(weight))
    return DecoderParts(layer, cell.h2h, table, head.generator, head)


def memory_and_state(head, source):
    """Return the memory of a source, and the state before the first character."""
    cell, zeros = head.attention_cell, source.new_zeros(1, len(source), head.hidden_size)
    key, weight = project(cell, "key", cell.i2h, source), cell.score.weight[0]
    return Memory(key, source, score_vector=weight, score="tanh"), state_of(zeros, zeros)


def encode(states, lengths, head):
    """Return the head's parts, the memory of encoded images and the first state."""
    check_all_visible(states, lengths)
    return parts_of(head), *memory_and_state(head, states)


class Head:
    """c = attend(h), h = cell([c; y], h), for all characters y of a text or a prediction."""

    def forward(self, batch_H, text, is_train=True, batch_max_length=25):
        cell, T = self.attention_cell, batch_max_length + 1
        if is_train and text.shape[1] < T:
            raise UnsupportedCall("its text has fewer than batch_max_length + 1 characters")
        parts, (memory, state) = parts_of(self), memory_and_state(self, batch_H)
        inner, states = (cell.i2h, cell.h2h, cell.score), [state.hidden[None], state.cell[None]]
        reason = fusion_skip_reason(parts.layer, T, batch_H, states, cell, *inner)
        if reason or not is_plain(cell.rnn, nn.LSTMCell):
            raise UnsupportedCall(reason or "its recurrent layer is no plain nn.LSTMCell")
        if not is_train:
            start = torch.zeros(len(batch_H), dtype=torch.long, device=batch_H.device)
            words = find_words(parts, memory, state, start, T - 1)
            text = torch.cat([start.unsqueeze(1), words], 1)
        read = F.one_hot(text[:, :T], self.num_classes).to(batch_H.dtype)
        steps = run_decoder(parts.layer, read, state, parts.query_proj, memory)
        return self.generator(steps.output)


def example(cell, draw):
    width, size = cell.i2h.in_features, cell.h2h.in_features
    classes = cell.rnn.input_size - width
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        source, state = draw(B, Tk, width), (draw(B, size), draw(B, size))
        for _ in range(3):
            state, weights = cell(state, source, draw(B, classes))
            yield state, weights


def recognise(head, draw):
    width = head.attention_cell.i2h.in_features
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        for T in draw.steps(5, 2):
            text = draw.words(head.num_classes, B, T)
            for forced in (True, False):
                yield head(draw(B, Tk, width), text, forced, T - 1)


ADAPTERS = [
    Adapter(
        name="clovaai's AttentionCell",
        implementation=Recognition,
        classes=["AttentionCell"],
        parameters=[
            *("i2h.weight", "h2h.weight", "h2h.bias", "score.weight"),
            *(f"rnn.{x}_{y}" for x in ("weight", "bias") for y in ("ih", "hh")),
        ],
        example=example,
    ),
    Adapter(
        name="clovaai's Attention",
        implementation=Head,
        classes=["Attention"],
        parameters=["attention_cell.*", "generator.*"],
        known_attributes=["device", "_char_to_onehot", "hidden_size"],
        attention="attention_cell",
        example=recognise,
        weight_scale=2.0,  # a recurrence amplifies rounding errors
        search=encode,
        dtype=torch.float32,
    ),
]
