"""Attention of PyTorch's tutorials, which people copy: translation and chatbot."""

from __future__ import annotations

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.serve import (
    attend,
    batch_first,
    is_plain,
    keep_in_graph,
    multiplied,
    project,
    project_both,
)


class Translation:
    """e = v · tanh(W q + a + U h + b) + c."""

    def forward(self, query, keys):
        if query.dim() != 3 or query.shape[1] != 1:  # its own code adds other shapes, too
            return super().forward(query, keys)
        key, weight = project(self, "key", self.Ua, keys), self.Va.weight
        context, weights = attend(self, self.Wa(query), key, keys, weight)
        return keep_in_graph(context, self.Va.bias), weights


class Chatbot:
    """Luong's scores of a step: q · h, q · (W h + b), v · tanh(W [q; h] + b)."""

    def forward(self, hidden, encoder_outputs):
        plain = self.method == "dot" or is_plain(self.attn)
        if len(hidden) != 1 or not plain:
            return super().forward(hidden, encoder_outputs)
        query, key, weight = hidden[0], batch_first(self, encoder_outputs), None
        if self.method == "general":
            key = project(self, "key", self.attn, key)
        elif self.method == "concat":
            (query, key), weight = project_both(self, self.attn, query, key), self.v
        weights = attend(self, query, key, None, weight)[1].unsqueeze(1)
        return multiplied(weights, *(query, key) if weight is None else (weight,))


def translation(attention, draw):
    size = attention.Wa.in_features
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, attention.Ua.in_features)
        for _ in range(3):
            yield attention(draw(B, 1, size), source)


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
        methods=Translation,
        classes=["BahdanauAttention"],
        parameters=["Wa.weight", "Wa.bias", "Ua.weight", "Ua.bias", "Va.weight", "Va.bias"],
        example=translation,
    ),
    Adapter(
        name="the chatbot tutorial's Attn",
        methods=Chatbot,
        classes=["Attn"],
        parameters=[],
        optional=["attn.weight", "attn.bias", "v"],
        example=chatbot,
    ),
]
