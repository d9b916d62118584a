"""Attention of bentrevett's tutorials, which people copy; it returns weights alone."""

from __future__ import annotations

from attnfast.integrations.adapter import Adapter, UnsupportedCall, arguments
from attnfast.integrations.helpers import attend, batch_first, is_plain, project_both


def parts(attention):
    """Return the projection and the weight of the score, of an edition's names."""
    layer = attention.attn if hasattr(attention, "attn") else attention.attn_fc
    v = attention.v if hasattr(attention, "v") else attention.v_fc
    return layer, getattr(v, "weight", v)


class Bentrevett:
    """e = v · tanh(W [q; h] + b)."""

    def forward(self, hidden, encoder_outputs, mask=None):
        layer, weight = parts(self)
        if not is_plain(layer):
            raise UnsupportedCall("its attention layer has hooks or is no plain nn.Linear")
        query, key = project_both(self, layer, hidden, batch_first(self, encoder_outputs))
        return attend(self, query, key, None, weight, mask=None if mask is None else mask != 0)[1]


def example(attention, draw):
    layer, _ = parts(attention)
    size = layer.out_features
    for lengths in draw.sources((5, 2, 4), (4, 1)):
        source = draw(max(lengths), len(lengths), layer.in_features - size)
        seen = [draw.seen(lengths, max(lengths))] if "mask" in arguments(attention) else []
        for _ in range(3):
            yield attention(draw(len(lengths), size), source, *seen)


ADAPTERS = [
    Adapter(
        name=f"bentrevett's Attention{edition}",
        implementation=Bentrevett,
        classes=["Attention"],
        parameters=[f"{layer}.weight", f"{layer}.bias", v],
        example=example,
        note="a source without words has weights 0 instead of equal ones",
    )
    for edition, layer, v in (
        ("", "attn", "v.weight"),
        (" of 2018", "attn", "v"),
        (" of 2024", "attn_fc", "v_fc.weight"),
    )
]
