"""ASTER's attention, which people copy; it returns weights alone."""

from __future__ import annotations

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.helpers import attend_to_source, keep_in_graph, project


class Aster:
    """e = w · tanh(U h + b + W q + a) + c."""

    def forward(self, x, sPrev):
        query, key = self.sEmbed(sPrev.squeeze(0)), project(self, "key", self.xEmbed, x)
        weights = attend_to_source(self, query, key, None, self.wEmbed.weight)[1]
        return keep_in_graph(weights, self.wEmbed.bias)


def example(attention, draw):
    width, size = attention.xEmbed.in_features, attention.sEmbed.in_features
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, width)
        for _ in range(3):
            yield attention(source, draw(1, B, size))


ADAPTERS = [
    Adapter(
        name="ASTER's AttentionUnit",
        implementation=Aster,
        classes=["AttentionUnit"],
        parameters=[f"{x}Embed.{y}" for x in "sxw" for y in ("weight", "bias")],
        known_attributes=["sDim", "xDim", "attDim"],
        example=example,
    ),
]
