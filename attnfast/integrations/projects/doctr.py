"""docTR's attention, of its SAR: over a feature map, whose keys a convolution computes."""

from __future__ import annotations

from torch.nn import functional as F

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.helpers import attend_to_map


class FeatureMap:
    """e = v · tanh(conv(F) + b + W q)."""

    def forward(self, features, hidden_state):
        query = F.linear(hidden_state, self.state_conv.weight.flatten(1))
        weight = self.attention_projector.weight
        return attend_to_map(self, query, features, self.feat_conv, weight)


def example(attention, draw):
    channels, size = attention.feat_conv.in_channels, attention.state_conv.in_channels
    for lengths in draw.sources((6, 6, 6), (3, 3)):
        B, W = len(lengths), max(lengths)
        features = draw(B, channels, 2, W)
        for _ in range(3):
            yield attention(features, draw(B, size))


DISTRIBUTIONS = ["python-doctr"]
ADAPTERS = [
    Adapter(
        name="docTR's AttentionModule",
        implementation=FeatureMap,
        classes=["doctr.models.recognition.sar.pytorch.AttentionModule"],
        parameters=[
            *("feat_conv.weight", "feat_conv.bias"),
            *("state_conv.weight", "attention_projector.weight"),
        ],
        example=example,
    ),
]
