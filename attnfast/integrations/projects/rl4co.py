"""The attention of rl4co's pointer network, which returns scores, clipped or not."""

from __future__ import annotations

from torch import nn

from attnfast.functional import additive_score
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import is_plain


class Pointer:
    """u = v · tanh(W q + a + U h + b); the scores are u, or C tanh u."""

    def forward(self, query, ref):
        layer = self.project_ref
        if not is_plain(layer, nn.Conv1d):
            raise UnsupportedCall("its project_ref is no plain nn.Conv1d")
        projected = cached_per_source(
            self, "projected", lambda: layer(ref.permute(1, 2, 0)), ref, layer.weight, layer.bias
        )
        key = cached_per_source(
            self, "key", lambda: projected.transpose(1, 2).contiguous(), projected
        )
        scores = additive_score(self.project_query(query).unsqueeze(1), key, self.v).squeeze(1)
        scores = scores.to(key.dtype)
        scores = self.C * scores.tanh() if self.use_tanh else scores
        return projected.clone(), scores  # a caller may write to both


def example(attention, draw):
    size = attention.project_query.in_features
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        source = draw(Tk, B, size)
        for _ in range(3):
            yield attention(draw(B, size), source)


DISTRIBUTIONS = ["rl4co"]
ADAPTERS = [
    Adapter(
        name="rl4co's SimpleAttention",
        implementation=Pointer,
        classes=["rl4co.models.zoo.ptrnet.decoder.SimpleAttention"],
        parameters=[
            *("project_query.weight", "project_query.bias"),
            *("project_ref.weight", "project_ref.bias", "v"),
        ],
        example=example,
    ),
]
