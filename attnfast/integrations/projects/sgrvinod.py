"""Attention of sgrvinod's tutorial on captioning, "Show, Attend and Tell"."""

from __future__ import annotations

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.helpers import attend_to_source, keep_in_graph, multiplied, project


class Captioning:
    """e = w · relu(U h + b + W q + a) + c."""

    def forward(self, encoder_out, decoder_hidden):
        query, weight = self.decoder_att(decoder_hidden), self.full_att.weight
        key = project(self, "key", self.encoder_att, encoder_out)
        context, alpha = attend_to_source(self, query, key, encoder_out, weight, activation="relu")
        return keep_in_graph(multiplied(context, alpha, encoder_out), self.full_att.bias), alpha


def example(attention, draw):
    """Call it as its decoder does: the batch shrinks from step to step."""
    width, size = attention.encoder_att.in_features, attention.decoder_att.in_features
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        source = draw(len(lengths), max(lengths), width)
        for B in range(len(lengths), 0, -1):
            for _ in range(2):
                yield attention(source[:B], draw(B, size))


ADAPTERS = [
    Adapter(
        name="sgrvinod's Attention",
        implementation=Captioning,
        classes=["Attention"],
        parameters=[
            f"{x}_att.{y}" for x in ("encoder", "decoder", "full") for y in ("weight", "bias")
        ],
        example=example,
    ),
]
