"""Attention of bastings's "The Annotated Encoder-Decoder", whose decoder projects the keys."""

from __future__ import annotations

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.helpers import attend_to_source


class Annotated:
    """e = v · tanh(V q + W h); the weights are kept."""

    def forward(self, query=None, proj_key=None, value=None, mask=None):
        assert mask is not None, "mask is required"
        if query.dim() != 3 or query.shape[1] != 1 or mask.dim() != 3:
            raise UnsupportedCall("the query is not [B, 1, D] or the mask not [B, 1, T]")
        context, self.alphas = attend_to_source(
            self, self.query_layer(query), proj_key, value, self.energy_layer.weight, mask=mask != 0
        )
        return context, self.alphas


def example(attention, draw):
    size, width = attention.query_layer.in_features, attention.key_layer.in_features
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source, seen = draw(B, Tk, width), draw.seen(lengths, Tk).unsqueeze(1)
        key = attention.key_layer(source)
        for _ in range(3):
            yield attention(query=draw(B, 1, size), proj_key=key, value=source, mask=seen)


ADAPTERS = [
    Adapter(
        name="bastings's BahdanauAttention",
        implementation=Annotated,
        classes=["BahdanauAttention"],
        parameters=["key_layer.weight", "query_layer.weight", "energy_layer.weight"],
        known_attributes=["data"],
        example=example,
        note="a source without words has weights 0 instead of NaN",
    ),
]
