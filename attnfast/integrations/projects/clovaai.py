"""Attention of clovaai's deep-text-recognition-benchmark, which people copy: cell and head."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import fusion_skip_reason, run_decoder, state_of
from attnfast.integrations.helpers import attend_to_source, is_plain, project
from attnfast.nn._layer import Layer


class Recognition:
    """e = v · tanh(U h + W q + b), then s = cell([c; y], s)."""

    def forward(self, prev_hidden, batch_H, char_onehots):
        query, key = self.h2h(prev_hidden[0]), project(self, "key", self.i2h, batch_H)
        context, weights = attend_to_source(self, query, key, batch_H, self.score.weight)
        state = self.rnn(torch.cat([context, char_onehots], 1), prev_hidden)
        return state, weights.unsqueeze(2)


class Head:
    """c = attend(h), h = cell([c; y], h), for all characters y of a text."""

    def forward(self, batch_H, text, is_train=True, batch_max_length=25):
        cell, T, B = self.attention_cell, batch_max_length + 1, len(batch_H)
        if not is_train or text.shape[1] < T:
            raise UnsupportedCall("there is no text, or one of too few characters")
        layer = Layer.of_cells(cell.rnn)
        zeros, parts = batch_H.new_zeros(1, B, self.hidden_size), (cell.i2h, cell.h2h, cell.score)
        reason = fusion_skip_reason(layer, T, batch_H, [zeros, zeros], cell, *parts)
        if reason or not is_plain(cell.rnn, nn.LSTMCell):
            raise UnsupportedCall(reason or "its recurrent layer is no plain nn.LSTMCell")
        key = project(cell, "key", cell.i2h, batch_H)
        steps = run_decoder(
            layer._replace(weight_ih=layer.weight_ih.roll(-batch_H.shape[2], 1)),  # for [y; c]
            F.one_hot(text[:, :T], self.num_classes).to(batch_H.dtype),
            state_of(zeros, zeros), cell.h2h,
            Memory(key, batch_H, score_vector=cell.score.weight[0], score="tanh"),
        )  # fmt: skip
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
            yield head(draw(B, Tk, width), text, True, T - 1)


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
        known_attributes=["device", "_char_to_onehot"],
        attention="attention_cell",
        example=recognise,
        weight_scale=2.0,  # a recurrence amplifies rounding errors
        note="its own code runs without a text",
        dtype=torch.float32,
    ),
]
