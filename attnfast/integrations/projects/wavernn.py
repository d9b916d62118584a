"""Attention of WaveRNN's Tacotron, and of Real-Time-Voice-Cloning's, which is derived from it."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from attnfast.integrations.adapter import Adapter, UnsupportedCall, arguments
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend_to_source, is_plain, multiplied


def attended(self, keys, query, **terms):
    """Attend with the sum of the weights so far; return the weights ``[B, Tk]``."""
    conv, layer = self.conv, self.L
    if not is_plain(layer) or type(conv) is not torch.nn.Conv1d:
        raise UnsupportedCall("a layer of its location has hooks or a forward of its own")
    constant = layer.bias if conv.bias is None else F.linear(conv.bias, layer.weight, layer.bias)
    features = self.W(query) if constant is None else self.W(query) + constant
    return attend_to_source(
        self, features, keys, None, self.v.weight, projection=layer.weight,
        coverage=self.cumulative.clone(), **terms,  # WaveRNN changes it
    )[1]  # fmt: skip


class WaveRNN:
    """e = v · tanh(W q + b + m + L (F ∗ [C, α]) + a), m projected states; normalised sigmoids."""

    def forward(self, encoder_seq_proj, query, t):
        filters = cached_per_source(
            self, "filters", lambda: self.conv.weight.flip(1), self.conv.weight,
            source=encoder_seq_proj,
        )  # fmt: skip
        if t == 0:
            self.init_attention(encoder_seq_proj)
        self.attention = attended(
            self, encoder_seq_proj, query, filters=filters, previous=self.attention,
            normalisation="sigmoid",
        )  # fmt: skip
        self.cumulative += self.attention
        return self.attention.unsqueeze(1)


class VoiceCloning:
    """e = v · tanh(W q + b + m + L (F ∗ C + a)), m projected states."""

    def forward(self, encoder_seq_proj, query, t, chars):
        padded = cached_per_source(self, "padded", lambda: bool((chars == 0).any()), chars)
        if padded:  # their scores are 0
            raise UnsupportedCall("its padding gets scores of 0, not weights of 0")
        if t == 0:
            self.init_attention(encoder_seq_proj)
        weights = attended(
            self, encoder_seq_proj, query, filters=self.conv.weight, channels="coverage"
        )
        self.attention = multiplied(weights, self.cumulative)  # by a mask of float32
        self.cumulative = self.cumulative + self.attention
        return self.attention.unsqueeze(1)


def example(attention, draw):
    """Decode three steps; Real-Time-Voice-Cloning's attention reads the characters too."""
    size = attention.W.in_features
    for lengths in draw.sources((5, 5, 5), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, size)
        chars = [draw.words(9, B, Tk) + 1] if "chars" in arguments(attention) else []
        for t in range(3):
            weights = attention(source, draw(B, size), t, *chars)
            yield weights, attention.cumulative


ADAPTERS = [
    Adapter(
        name=f"{project}'s LSA",
        implementation=methods,
        classes=[place],
        parameters=["conv.weight", "L.weight", "W.weight", "W.bias", "v.weight", bias],
        example=example,
        weight_scale=scale,
        dtype=torch.float32,
    )
    for project, methods, place, bias, scale in (
        ("WaveRNN", WaveRNN, "models.tacotron.LSA", "L.bias", 8.0),  # sigmoids must not all be 0
        ("Real-Time-Voice-Cloning", VoiceCloning, "synthesizer.models.tacotron.LSA", "conv.bias",
         16.0),
    )
]  # fmt: skip
