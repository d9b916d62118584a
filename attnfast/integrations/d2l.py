"""Attention of the book "Dive into Deep Learning"."""

from __future__ import annotations

import torch

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.serve import attend, project

EMPTY = "a row without keys has weights 0 instead of equal ones"


def attended(self, query, key, values, valid_lens, weight=None, scale=1.0):
    """Attend, and keep the weights; where they are dropped the context is of what is left."""
    mask = None
    if valid_lens is not None:
        mask = torch.arange(key.shape[1], device=key.device) < valid_lens.unsqueeze(-1)
    drops = self.dropout.training and self.dropout.p > 0
    value = None if drops else values
    context, self.attention_weights = attend(
        self, query, key, value, weight, mask=mask, scale=scale
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


def example(attention, draw, query=4, key=4):
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source, values, one = draw(B, Tk, key), draw(B, Tk, 6), draw.numbers(*lengths)
        for Tq in (4, 1, 1, 1):
            yield attention(draw(B, Tq, query), source, values, one)
        each = torch.stack([one, one.flip(0), one.roll(1)], 1)
        yield attention(draw(B, 3, query), source, source, each)
        yield attention(draw(B, 3, query), source, source, None)


ADAPTERS = [
    Adapter(
        name="d2l's AdditiveAttention",
        methods=Additive,
        classes=["AdditiveAttention"],
        parameters=["W_k.weight", "W_q.weight", "w_v.weight"],
        example=lambda attention, draw: example(
            attention, draw, attention.W_q.in_features, attention.W_k.in_features
        ),
        note=EMPTY,
    ),
    Adapter(
        name="d2l's DotProductAttention",
        methods=Dot,
        classes=["d2l.torch.DotProductAttention"],
        parameters=[],
        example=example,
        note=EMPTY,
    ),
]
