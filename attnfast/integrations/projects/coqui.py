"""The attention of Coqui's (and Mozilla's) Tacotrons."""

import torch

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.helpers import attend, keep_in_graph
from attnfast.ops.coverage import NORMALISATIONS


class Original:
    """e = v · tanh(Q q + M h + U (F ∗ [α, C])) + b, U and F for location-sensitive attention.

    Weights are a softmax or normalised sigmoids. Forward attention is the project's own, on our
    weights. Windows at inference are left to its own code.
    """

    def forward(self, query, inputs, processed_inputs, mask):
        if self.norm not in NORMALISATIONS or (self.windowing and not self.training):
            raise UnsupportedCall(
                "its norm is not known, or its weights have windows in evaluation"
            )
        terms, bias = {}, self.v.linear_layer.bias
        if self.norm == "sigmoid":
            terms = {"normalisation": "sigmoid", "bias": bias.view(1, 1, 1)}
        if self.location_attention:
            terms |= {
                "filters": self.location_layer.location_conv1d.weight,
                "projection": self.location_layer.location_dense.linear_layer.weight,
                "previous": self.attention_weights,
                "coverage": self.attention_weights_cum.clone(),  # the project changes it
            }
        context, weights = attend(
            self, self.query_layer(query), processed_inputs, None if self.forward_attn else inputs,
            self.v.linear_layer.weight, mask=mask, **terms,
        )  # fmt: skip
        if self.location_attention:
            self.update_location_attention(weights)
        if self.forward_attn:
            self.alpha = weights = self.apply_forward_attention(weights)
            context = torch.bmm(weights.unsqueeze(1), inputs).squeeze(1)
        self.attention_weights = weights
        if self.forward_attn and self.trans_agent:
            self.u = torch.sigmoid(self.ta(torch.cat([context, query.squeeze(1)], -1)))
        return keep_in_graph(context, bias)


def example(attention, draw):
    """Decode two batches and, as at inference, one sentence without a mask."""
    attention.train(attention.training or bool(attention.windowing))  # windows have no gradient
    for lengths in draw.sources((5, 2, 4), (3, 3), (6,)):
        B, Tk = len(lengths), max(lengths)
        inputs = draw(B, Tk, attention.inputs_layer.linear_layer.in_features)
        mask = draw.seen(lengths, Tk) if B > 1 else None
        attention.init_states(inputs)
        processed = attention.preprocess_inputs(inputs)
        for _ in range(3):
            query = draw(B, attention.query_layer.linear_layer.in_features)
            yield attention(query, inputs, processed, mask), attention.attention_weights


DISTRIBUTIONS = ["coqui-tts"]
ADAPTERS = [
    Adapter(
        name="Coqui's OriginalAttention",
        implementation=Original,
        classes=["TTS.tts.layers.tacotron.attentions.OriginalAttention"],
        parameters=[
            *(f"{name}.linear_layer.weight" for name in ("query_layer", "inputs_layer", "v")),
            "v.linear_layer.bias",
        ],
        optional=[
            "location_layer.location_conv1d.weight",
            "location_layer.location_dense.linear_layer.weight",
            *("ta.weight", "ta.bias"),
        ],
        example=example,
        # of masks, and of the windows that its own code makes
        known_attributes=["data", "_mask_value", "win_idx", "win_back", "win_front"],
        note="a source without frames has weights 0 instead of NaN",
        dtype=torch.float32,
    ),
]
