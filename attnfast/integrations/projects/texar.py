"""Attention of texar-pytorch, which returns weights alone: Bahdanau's and Luong's."""

from __future__ import annotations

import torch

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend_to_source, promote_dtype
from attnfast.ops.arguments import length_mask


def attended(self, query, lengths, score_vector=None):
    """Return the weights of a query ``[B, A]`` over the keys that the project keeps."""
    key, mask = self._keys, None
    if query.dim() != 2 or query.shape[1] != key.shape[2]:
        raise UnsupportedCall("the query is not [B, A]")
    if lengths is not None:
        if not isinstance(lengths, torch.Tensor):
            raise UnsupportedCall("its lengths are not a tensor")
        mask = cached_per_source(self, "mask", lambda: seen(lengths, key), lengths, source=key)
    return attend_to_source(self, query, key, None, score_vector, mask=mask)[1]


def seen(lengths, key):
    """Return a mask ``[B, Tk]``, True up to the lengths."""
    if (lengths <= 0).any():
        raise UnsupportedCall("a source is empty: its own code raises")
    return length_mask(lengths, key.shape[1], key)


class Bahdanau:
    """e = v · tanh(V q + W h), or with normalisation g v / ‖v‖ · tanh(V q + W h + b)."""

    def forward(self, query, state, memory, memory_sequence_length=None):
        query = self._process_query_and_memory(query, memory, memory_sequence_length)
        v, g = self.attention_v, self.attention_g
        weight = v
        if g is not None:
            query = query + self.attention_b
            weight = cached_per_source(
                self, "weight", lambda: g * v * v.square().sum().rsqrt(), v, g, source=self._keys
            )
        weights = promote_dtype(attended(self, query, memory_sequence_length, weight), v)
        return weights, weights


class Luong:
    """e = q · W h, or with a scale g q · W h."""

    def forward(self, query, state, memory, memory_sequence_length=None):
        query = self._process_query_and_memory(query, memory, memory_sequence_length)
        query = query if self.attention_g is None else query * self.attention_g
        weights = attended(self, query, memory_sequence_length)
        return weights, weights


def example(attention, draw):
    """Call it as its decoder does, which first clears the attributes cached for a source."""
    layer, width = attention.query_layer, attention.memory_layer.in_features
    size = attention.memory_layer.out_features if layer is None else layer.in_features
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, width)
        for ends in (draw.numbers(*lengths), None):
            attention.clear_cache()
            for _ in range(3):
                weights, state = attention(draw(B, size), None, source, ends)
                yield weights, state, attention.values
    attention.clear_cache()


DISTRIBUTIONS = ["texar-pytorch"]
ADAPTERS = [
    Adapter(
        name=f"texar's {cls}",
        implementation=methods,
        classes=[f"texar.torch.core.attention_mechanism.{cls}"],
        parameters=parameters,
        optional=optional,
        example=example,
    )
    for cls, methods, parameters, optional in (
        (
            "BahdanauAttention",
            Bahdanau,
            ["_query_layer.weight", "_memory_layer.weight", "attention_v"],
            ["attention_g", "attention_b"],
        ),
        ("LuongAttention", Luong, ["_memory_layer.weight"], ["attention_g"]),
    )
]
