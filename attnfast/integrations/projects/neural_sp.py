"""Attention of neural_sp's recurrent decoders: additive, location-aware, dot and Luong's scores."""

from __future__ import annotations

import torch

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend_to_source, is_plain, project, project_both

SCORES = ("add", "location", "dot", "luong_dot", "luong_general", "luong_concat")


class NeuralSP:
    """e = s v · tanh(W h + b + V q), with U (F ∗ α) in it, α the last weights, or s q · h.

    Weights are a softmax or, with s = 1, normalised sigmoids.
    """

    def forward(self, key, value, query, mask=None, aw_prev=None, cache=False, mode="",
                trigger_points=None, streaming=False):  # fmt: skip
        if attention_skip_reason(self) or (
            query.shape[1] != 1 and self.atype in ("location", "luong_concat")
        ):
            raise UnsupportedCall("its score is not known, or takes one query")
        if self.key is None or not cache:
            self.key = project(self, "keys", self.w_key, key) if hasattr(self, "w_key") else key
            self.mask = mask
            assert mask is None or mask.size() == (len(key), 1, key.shape[1]), mask.size()
        query, keys = terms(self, query)
        seen = self.mask
        if seen is not None:
            seen = cached_per_source(self, "seen", lambda: self.mask != 0, seen)
        drops = self.dropout.training and self.dropout.p > 0
        context, weights = attend_to_source(
            self, query, keys, None if drops else value,
            self.v.weight if hasattr(self, "v") else None, mask=seen,
            scale=1.0 if self.sigmoid_smoothing else float(self.sharpening_factor),
            **history(self, aw_prev),
        )  # fmt: skip
        if query.dim() == 2:
            weights = weights.unsqueeze(1)
            context = context if context is None else context.unsqueeze(1)
        weights = self.dropout(weights)
        return torch.bmm(weights, value) if drops else context, weights.unsqueeze(1), {}


def terms(self, query):
    """Return the query, ``[B, A]`` if it is one with a location, and the keys of its score."""
    keys = self.key
    if self.atype == "luong_concat":
        if not is_plain(self.w):
            raise UnsupportedCall("its attention layer has hooks or is no plain nn.Linear")
        return project_both(self, self.w, query, keys, states_first=True)
    query = self.w_query(query) if hasattr(self, "w_query") else query
    return query.squeeze(1) if self.atype == "location" else query, keys


def history(self, previous):
    """Return the terms of a location, and the choice of sigmoids."""
    sigmoids = {"normalisation": "sigmoid"} if self.sigmoid_smoothing else {}
    if self.atype != "location":
        return sigmoids
    kernel, shape = self.conv.weight, self.key.shape[:2]
    filters = cached_per_source(self, "filters", lambda: kernel.squeeze(2), kernel, source=self.key)
    previous = self.key.new_zeros(shape) if previous is None else previous.view(-1, shape[1])
    more = {"filters": filters, "projection": self.w_conv.weight, "previous": previous}
    return sigmoids | more


def attention_skip_reason(attention):
    return None if attention.atype in SCORES else f"its score {attention.atype} is not known"


def example(attention, draw):
    """Call it as its decoder does, which first resets the attributes cached for a source."""
    layers = [getattr(attention, x, None) for x in ("w_key", "w_query", "w")]
    key_layer, query_layer, joint_layer = layers
    size = joint_layer.in_features // 2 if joint_layer else 4
    width = key_layer.in_features if key_layer else size
    size = query_layer.in_features if query_layer else key_layer.out_features if key_layer else size
    one = attention.atype in ("location", "luong_concat")
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source, values = draw(B, Tk, width), draw(B, Tk, 6)
        for seen in (draw.seen(lengths, Tk).unsqueeze(1), None):
            attention.reset()
            past = None
            for T in (1, 1, 1) if one else (1, 3):
                query = draw(B, T, size)
                context, past, _ = attention(source, values, query, seen, past, cache=True)
                yield context, past
            yield attention(source, values, draw(B, 1, size), seen, past if one else None)


ADAPTERS = [
    Adapter(
        name="neural_sp's AttentionMechanism",
        implementation=NeuralSP,
        classes=["neural_sp.models.modules.attention.AttentionMechanism"],
        parameters=[],
        optional=["w_key.weight", "w_key.bias", "w_query.weight", "w_conv.weight", "conv.weight",
                  "w.weight", "v.weight"],
        example=example,
        skip_reason=attention_skip_reason,
        weight_scale=4.0,  # sigmoids of large scores are all 0, and their weights NaN
        note="a source without frames has weights 0 instead of equal ones",
    ),
]  # fmt: skip
