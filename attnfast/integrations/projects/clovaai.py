"""Attention of clovaai's deep-text-recognition-benchmark, which people copy, with its cell."""

from __future__ import annotations

import torch

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.helpers import attend, project


class Recognition:
    """e = v · tanh(U h + W q + b), then s = cell([c; y], s)."""

    def forward(self, prev_hidden, batch_H, char_onehots):
        query, key = self.h2h(prev_hidden[0]), project(self, "key", self.i2h, batch_H)
        context, weights = attend(self, query, key, batch_H, self.score.weight)
        state = self.rnn(torch.cat([context, char_onehots], 1), prev_hidden)
        return state, weights.unsqueeze(2)


def example(cell, draw):
    width, size = cell.i2h.in_features, cell.h2h.in_features
    classes = cell.rnn.input_size - width
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        source, state = draw(B, Tk, width), (draw(B, size), draw(B, size))
        for _ in range(3):
            state, weights = cell(state, source, draw(B, classes))
            yield state, weights


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
]
