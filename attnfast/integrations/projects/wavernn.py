"""Attention of WaveRNN's Tacotron, and of Real-Time-Voice-Cloning's, which is derived from it."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from attnfast.integrations.adapter import Adapter, UnsupportedCall, arguments
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend_to_source, is_plain, promote_dtype


def attended(self, keys, query, **terms):
    """Attend with the sum of the weights so far; return the weights ``[B, Tk]``."""
    conv, layer = self.conv, self.L
    if not is_plain(layer) or type(conv) is not torch.nn.Conv1d:
        raise UnsupportedCall("a layer of its location has hooks or a forward of its own")
    constant = layer.bias if conv.bias is None else F.linear(conv.bias, layer.weight, layer.bias)
    features = self.W(query) if constant is None else self.W(query) + constant
    return attend_to_source(
        self, features, keys, None, self.v.weight, projection=layer.weight, **terms
    )[1]


def padding_of(chars):
    """Return the mask of characters, and the count of padding and a bias of −∞ there, or None."""
    exists = chars != 0
    count = (~exists).sum(1, keepdim=True).float()
    bias = torch.zeros_like(exists, dtype=torch.float32).masked_fill(~exists, -torch.inf)
    return (exists, count, bias) if count.any() else (exists, None, None)


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
            coverage=self.cumulative.clone(), normalisation="sigmoid",
        )  # fmt: skip
        self.cumulative += self.attention
        return self.attention.unsqueeze(1)


SATURATED = 1e4  # a key whose tanh is 1, whatever the query and the location


class VoiceCloning:
    """e = v · tanh(W q + b + m + L (F ∗ C + a)), m projected states; 0, not −∞, at padding.

    A row's n keys of padding share the weight of one more key, of the score log n.
    """

    def forward(self, encoder_seq_proj, query, t, chars):
        if t == 0:
            self.init_attention(encoder_seq_proj)
        seen, count, hidden = cached_per_source(self, "seen", lambda: padding_of(chars), chars)
        keys, cumulative, terms = encoder_seq_proj, self.cumulative, {}
        if count is not None:
            keys = cached_per_source(
                self, "keys", lambda: F.pad(keys, (0, 0, 0, 1), value=SATURATED), encoder_seq_proj
            )
            cumulative = F.pad(cumulative, (0, 1))
            bias = torch.cat([hidden, count.log() - self.v.weight.sum()], 1)
            terms["bias"] = bias.unsqueeze(1).to(query.dtype)
        weights = attended(
            self, keys, query, filters=self.conv.weight, channels="coverage", coverage=cumulative,
            **terms,
        )  # fmt: skip
        if count is not None:
            weights, rest = weights[:, :-1], weights[:, -1:]
            weights = torch.where(seen, weights, rest / count.clamp(min=1))
        self.attention = promote_dtype(weights, self.cumulative)  # by a mask of float32
        self.cumulative = self.cumulative + self.attention
        return self.attention.unsqueeze(1)


def example(attention, draw):
    """Decode three steps; Real-Time-Voice-Cloning's attention reads the characters too."""
    size = attention.W.in_features
    for lengths in draw.sources((5, 2, 5), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        source, seen = draw(B, Tk, size), draw.seen(lengths, Tk)
        chars = [(draw.words(9, B, Tk) + 1) * seen] if "chars" in arguments(attention) else []
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
