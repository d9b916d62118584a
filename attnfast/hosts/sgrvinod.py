"""Attention of sgrvinod's tutorial on captioning, "Show, Attend and Tell"."""

from __future__ import annotations

from attnfast.hosts.host import register_host
from attnfast.hosts.recall import attend, project, touch


class Captioning:
    """e = w · relu(U h + b + W q + a) + c."""

    def forward(self, encoder_out, decoder_hidden):
        query, weight = self.decoder_att(decoder_hidden), self.full_att.weight
        key = project(self, "key", self.encoder_att, encoder_out)
        context, alpha = attend(self, query, key, encoder_out, weight, activation="relu")
        return touch(context, self.full_att.bias), alpha


def example(attention, draw):
    """Call it as its decoder does: the batch shrinks from step to step."""
    source, size = draw(3, 5, attention.encoder_att.in_features), attention.decoder_att.in_features
    for B in (3, 3, 2, 1):
        yield attention(source[:B], draw(3, size)[:B])
    yield attention(draw(2, 4, attention.encoder_att.in_features), draw(2, size))


register_host(
    Captioning,
    name="sgrvinod's Attention",
    classes=["Attention"],
    parameters=[f"{x}_att.{y}" for x in ("encoder", "decoder", "full") for y in ("weight", "bias")],
    example=example,
)
