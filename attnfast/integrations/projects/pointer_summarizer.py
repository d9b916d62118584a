"""Attention of atulkum's pointer_summarizer, a pointer-generator network with coverage."""

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend_to_source, promote_dtype


class PointerGenerator:
    """e = v · tanh(W h + V s + b + w_c C), C the sum of the weights so far if there is coverage.

    The project multiplies its softmax by the mask and normalises again, which gives the softmax
    over the visible keys.
    """

    def forward(self, s_t_hat, encoder_outputs, encoder_feature, enc_padding_mask, coverage):
        key = cached_per_source(
            self, "key", lambda: encoder_feature.reshape(encoder_outputs.shape), encoder_feature
        )
        mask = cached_per_source(self, "mask", lambda: enc_padding_mask != 0, enc_padding_mask)
        covered, history = hasattr(self, "W_c"), {}
        if covered:
            coverage = coverage.view(-1, key.size(1))
            weight = self.W_c.weight
            feature = cached_per_source(
                self, "feature", lambda: weight.view(-1), weight, source=encoder_feature
            )
            history = {"coverage": coverage, "coverage_weight": feature}
        context, weights = attend_to_source(
            self, self.decode_proj(s_t_hat), key, encoder_outputs, self.v.weight, mask=mask,
            **history,
        )  # fmt: skip
        weights = promote_dtype(weights, enc_padding_mask)
        return context, weights, coverage + weights if covered else coverage


def example(attention, draw):
    """Decode two batches; the feature has the words of all sources in one dimension."""
    width = attention.decode_proj.in_features
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        outputs, feature = draw(B, Tk, width), draw(B * Tk, width)
        mask, coverage = draw.seen(lengths, Tk).to(draw.dtype), draw(B, Tk)
        for _ in range(3):
            result = attention(draw(B, width), outputs, feature, mask, coverage)
            coverage = result[2]
            yield result


ADAPTERS = [
    Adapter(
        name="pointer_summarizer's attention",
        implementation=PointerGenerator,
        classes=["Attention"],
        parameters=["decode_proj.weight", "decode_proj.bias", "v.weight"],
        optional=["W_c.weight"],
        known_attributes=["config"],
        example=example,
        note="a source without words has weights 0 instead of NaN",
    ),
]
