"""Keras 3 with PyTorch as its backend: Attention and AdditiveAttention."""

import sys

import torch

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.helpers import attend_to_source, promote_dtype


class Dot:
    """e = s q · k, or with ``score_mode="concat"`` c Σ tanh(s (q + k))."""

    __class__ = property(lambda self: type(self)._attnfast_own)  # type: ignore  # for its files

    def terms(self, query, key):
        scale = 1 if self.scale is None else self.scale.value
        if self.score_mode == "dot":
            return query * scale, key, None
        return query * scale, key * scale, self.concat_score_weight.value.expand(key.shape[-1])

    def call(self, inputs, mask=None, training=False, return_attention_scores=False,
             use_causal_mask=False):  # fmt: skip
        self._validate_inputs(inputs=inputs, mask=mask)
        query, value, key = inputs if len(inputs) > 2 else (*inputs, inputs[1])
        if not query.dim() == key.dim() == 3:
            raise UnsupportedCall("queries or keys are not [B, T, dim]")
        rows, seen = mask[:2] if mask else (None, None)
        if seen is not None:
            seen = seen.bool().reshape(len(seen), -1, key.shape[1])
        if use_causal_mask:
            past = query.new_ones(1, query.shape[1], key.shape[1], dtype=torch.bool).tril()
            seen = past if seen is None else seen & past
        drops = training and self.dropout > 0
        given, (query, key, weight) = (query, key), self.terms(query, key)
        out, weights = attend_to_source(
            self, query, key, None if drops else value, weight, mask=seen
        )
        weights = promote_dtype(weights, *given)
        if drops:
            random = sys.modules["keras"].random
            weights = random.dropout(weights, self.dropout, seed=self.seed_generator)
            out = weights @ value
        out = promote_dtype(out, weights, value)
        out = out if rows is None else out.masked_fill(~rows.bool().unsqueeze(-1), 0)
        return (out, weights) if return_attention_scores else out


class Additive(Dot):
    """e = s · tanh(q + k)."""

    def terms(self, query, key):
        return query, key, self.scale.value if self.use_scale else key.new_ones(key.shape[-1])


def example(attention, draw):
    attention.dtype_policy, scale = str(draw.dtype).rpartition(".")[2], attention.scale
    size = scale.shape[0] if scale is not None and scale.shape else 4
    with sys.modules["keras"].device(str(draw.device)):
        for lengths in draw.sources((5, 2, 4), (4, 1)):
            B, Tk = len(lengths), max(lengths)
            value, key, seen = draw(B, Tk, size), draw(B, Tk, size), draw.seen(lengths, Tk)
            for Tq in (min(3, Tk), 1, 1):
                inputs, masks = [draw(B, Tq, size), value, key], [seen[:, :Tq], seen]
                yield attention(inputs, mask=masks, return_attention_scores=True)
                yield attention(inputs, mask=masks, use_causal_mask=True, training=True)
            yield attention([draw(B, 2, size), value])


def attention_skip_reason(attention):
    if attention.compute_dtype == "float64":
        return "Keras's own computes parts of float64 in float32"
    return None if attention.built else "it is not built yet: replace it after the first call"


LAYERS = {"attention.Attention": Dot, "additive_attention.AdditiveAttention": Additive}
DISTRIBUTIONS = ["keras"]
ADAPTERS = [
    Adapter(
        name=f"Keras's {layer.rpartition('.')[2]}",
        implementation=methods,
        classes=[f"keras.src.layers.attention.{layer}"],
        parameters=[],
        optional=["scale", "concat_score_weight", "seed_generator_state"],
        example=example,
        skip_reason=attention_skip_reason,
        note="a row without keys has weights 0; a copy of the model has Keras's own again",
        dtype=torch.float32,
    )
    for layer, methods in LAYERS.items()
]
