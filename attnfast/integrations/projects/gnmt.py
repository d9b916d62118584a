"""Additive attention of NVIDIA's GNMT, with or without normalisation."""

from __future__ import annotations

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend_to_source, batch_first, project


def normalized(self, keys):
    """Return the weight g v / ‖v‖, the same tensor at every step."""
    v, g = self.linear_att, self.normalize_scalar
    return cached_per_source(self, "weight", lambda: v / v.norm() * g, v, g, source=keys)


class GNMT:
    """e = v · tanh(W q + U h), or with normalisation g v / ‖v‖ · tanh(W q + U h + b)."""

    def forward(self, query, keys):
        keys = keys if self.batch_first else batch_first(self, keys)
        if query.dim() == 3 and not self.batch_first:
            query = query.transpose(0, 1)
        key, weight = project(self, "key", self.linear_k, keys), self.linear_att
        query = self.linear_q(query)
        if self.normalize:
            query, weight = query + self.normalize_bias, normalized(self, keys)
        mask = None if self.mask is None else ~self.mask
        context, weights = attend_to_source(self, query, key, keys, weight, mask=mask)
        if query.dim() == 3 and not self.batch_first:
            return context.transpose(0, 1), weights.transpose(0, 1)
        return context, weights


def example(attention, draw):
    size = attention.linear_q.in_features

    def sequence(*shape):
        return draw(*shape) if attention.batch_first else draw(*shape).transpose(0, 1)

    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B = len(lengths)
        source = sequence(B, max(lengths), attention.linear_k.in_features)
        attention.set_mask(draw.numbers(*lengths), source)
        yield attention(sequence(B, 4, size), source)
        for _ in range(3):
            yield attention(draw(B, size), source)
        attention.mask = None
        yield attention(draw(B, size), source)


ADAPTERS = [
    Adapter(
        name="GNMT's BahdanauAttention",
        implementation=GNMT,
        classes=["BahdanauAttention"],
        parameters=["linear_q.weight", "linear_k.weight", "linear_att"],
        optional=["normalize_scalar", "normalize_bias"],
        example=example,
        note="a source without words has weights 0 instead of equal ones",
    ),
]
