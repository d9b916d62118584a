"""Location-sensitive attention of Tacotron 2: NVIDIA's, its many copies, and torchaudio's."""

import torch

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.helpers import attend


class LocationSensitive:
    """e = v · tanh(Q q + M h + U (F ∗ [α, C])), α the last weights, C the sum of all."""

    def forward(
        self, attention_hidden_state, memory, processed_memory, attention_weights_cat, mask
    ):
        conv, dense = self.location_layer.location_conv, self.location_layer.location_dense
        previous, coverage = attention_weights_cat.unbind(1)
        return attend(
            self, self.query_layer(attention_hidden_state), processed_memory, memory,
            inner(self.v).weight, mask=None if mask is None else ~mask,
            filters=inner(conv, "conv").weight, projection=inner(dense).weight,
            previous=previous, coverage=coverage,
        )  # fmt: skip


def inner(layer, name="linear_layer"):
    """Return the layer that NVIDIA's LinearNorm or ConvNorm holds."""
    return getattr(layer, name, layer)


def example(attention, draw):
    """Decode two batches, as the decoder does: it projects the memory and keeps the weights."""
    width = inner(attention.memory_layer).in_features
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        memory, mask = draw(B, Tk, width), ~draw.seen(lengths, Tk)
        processed = attention.memory_layer(memory)
        history = draw(B, 2, Tk)
        for seen in (mask, mask, torch.zeros_like(mask)):
            query = draw(B, inner(attention.query_layer).in_features)
            context, weights = attention(query, memory, processed, history, seen)
            yield context, weights
            history = torch.stack([weights, history[:, 1] + weights], 1)


DISTRIBUTIONS = ["torchaudio"]
ADAPTERS = [
    Adapter(
        name=name,
        implementation=LocationSensitive,
        classes=[cls],
        parameters=[
            *(f"{layer}{linear}.weight" for layer in ("query_layer", "memory_layer", "v")),
            f"location_layer.location_conv{conv}.weight",
            f"location_layer.location_dense{linear}.weight",
        ],
        example=example,
        known_attributes=["data", "score_mask_value"],
        note="a source without frames has weights 0 instead of NaN",
    )
    for name, cls, linear, conv in (
        ("Tacotron 2's attention", "Attention", ".linear_layer", ".conv"),
        ("torchaudio's Tacotron 2 attention", "torchaudio.models.tacotron2._Attention", "", ""),
    )
]
