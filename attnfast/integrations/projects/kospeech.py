"""Attention of kospeech's recurrent decoder: additive, and aware of its location."""

from __future__ import annotations

import torch

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend_to_source, keep_in_graph, project


class Additive:
    """e = v · tanh(W h + V q + b) + c; the query is added to the context."""

    def forward(self, query, key, value):
        if query.shape[1:2] != (1,):
            raise UnsupportedCall("the query is not [B, 1, D]")
        score, features = self.score_proj.linear, self.query_proj(query) + self.bias
        keys = project(self, "key", self.key_proj.linear, key)
        context, weights = attend_to_source(self, features, keys, value, score.weight)
        context = keep_in_graph(context, score.bias)
        return (context + query).to(context.dtype), weights.squeeze(1)


class Location:
    """e = v · tanh(V q + W h + F ∗ α + a + b) + c, α the last weights; a softmax or sigmoids."""

    def forward(self, query, value, last_alignment_energy):
        if query.shape[1:2] != (1,):
            raise UnsupportedCall("the query is not [B, 1, D]")
        score, conv, previous = self.fc.linear, self.location_conv, last_alignment_energy
        key, smoothed = project(self, "key", self.value_proj.linear, value), {}
        if self.smoothing:
            smoothed = {"normalisation": "sigmoid", "bias": score.bias.view(1, 1, 1)}
        filters, projection = cached_per_source(
            self, "filters", lambda: factors(conv.weight), conv.weight, source=value
        )
        context, weights = attend_to_source(
            self, self.query_proj(query).squeeze(1) + conv.bias + self.bias, key, value,
            score.weight, filters=filters, projection=projection,
            previous=value.new_zeros(value.shape[:2]) if previous is None else previous, **smoothed,
        )  # fmt: skip
        return keep_in_graph(context, score.bias).unsqueeze(1), weights


def factors(weight):
    """Return filters and a projection whose product are the filters ``[A, 1, width]``."""
    shifts = torch.eye(weight.shape[2], dtype=weight.dtype, device=weight.device)
    return shifts.unsqueeze(1), weight.squeeze(1)


def example(attention, draw):
    layer = attention.query_proj.linear
    size, located = layer.in_features, hasattr(attention, "location_conv")
    for lengths in draw.sources((5, 5, 5), (3, 3)):
        source, past = draw(len(lengths), max(lengths), size), None
        for _ in range(3):
            query = draw(len(lengths), 1, size)
            context, past = attention(query, source, past if located else source)
            yield context, past


def names(*layers):
    return [f"{layer}.linear.weight" for layer in layers]


ADAPTERS = [
    Adapter(
        name=f"kospeech's {cls}",
        implementation=methods,
        classes=[f"kospeech.models.attention.{cls}"],
        parameters=parameters,
        example=example,
    )
    for cls, methods, parameters in (
        (
            "AdditiveAttention",
            Additive,
            [*names("query_proj", "key_proj", "score_proj"), "score_proj.linear.bias", "bias"],
        ),
        (
            "LocationAwareAttention",
            Location,
            [*names("query_proj", "value_proj", "fc"), "fc.linear.bias", "location_conv.weight",
             "location_conv.bias", "bias"],
        ),
    )
]  # fmt: skip
