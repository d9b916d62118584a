"""joeynmt's attention, whose decoder projects the keys before it asks."""

from __future__ import annotations

from typing import Any

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.helpers import attend, project


class Luong:
    """e = q · W h."""

    def compute_proj_keys(self, keys):
        self.proj_keys = project(self, "key", self.key_layer, keys)

    def score(self, query):
        return query, None

    def forward(self, query, mask, values):
        self._check_input_shapes_forward(query=query, mask=mask, values=values)
        assert self.proj_keys is not None, "projection keys have to get pre-computed"
        query, weight = self.score(query)
        return attend(self, query, self.proj_keys, values, weight, mask=mask > 0)


class Bahdanau(Luong):
    """e = v · tanh(V q + W h)."""

    def score(self, query):
        self.compute_proj_query(query)
        return self.proj_query, self.energy_layer.weight


def example(attention, draw):
    size = getattr(attention, "query_layer", None)
    size = attention.key_layer.out_features if size is None else size.in_features
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        source = draw(len(lengths), max(lengths), attention.key_layer.in_features)
        seen = draw.seen(lengths, max(lengths)).unsqueeze(1)
        for _ in range(3):
            attention.compute_proj_keys(source)
            yield attention(draw(len(lengths), 1, size), seen, source)
        yield attention(draw(len(lengths), 1, size), seen, source)


COMMON: dict[str, Any] = {
    "example": example,
    "note": "a source without words has weights 0 instead of NaN",
}
DISTRIBUTIONS = ["joeynmt"]
ADAPTERS = [
    Adapter(
        name="joeynmt's BahdanauAttention",
        implementation=Bahdanau,
        classes=["joeynmt.attention.BahdanauAttention"],
        parameters=["key_layer.weight", "query_layer.weight", "energy_layer.weight"],
        **COMMON,
    ),
    Adapter(
        name="joeynmt's LuongAttention",
        implementation=Luong,
        classes=["joeynmt.attention.LuongAttention"],
        parameters=["key_layer.weight"],
        **COMMON,
    ),
]
