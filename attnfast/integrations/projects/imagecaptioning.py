"""Attention of ruotianluo's ImageCaptioning.pytorch and self-critical.pytorch."""

from __future__ import annotations

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend_to_source, keep_in_graph


class Captioning:
    """e = v · tanh(W h + b + p) + c, p the features that its decoder projects.

    The project multiplies its softmax by the mask and normalises again, which gives the softmax
    over the visible keys.
    """

    def forward(self, h, att_feats, p_att_feats, att_masks=None):
        source = att_feats.flatten(1, -2)
        key = p_att_feats.view(-1, source.shape[1], p_att_feats.shape[-1])
        mask = None
        if att_masks is not None:
            mask = cached_per_source(
                self, "mask", lambda: att_masks.view(-1, source.shape[1]) != 0, att_masks
            )
        score = self.alpha_net
        context, _ = attend_to_source(self, self.h2att(h), key, source, score.weight, mask=mask)
        return keep_in_graph(context, score.bias)


def example(attention, draw):
    width, features = attention.h2att.in_features, attention.h2att.out_features
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        source, key, seen = draw(B, Tk, width), draw(B, Tk, features), draw.seen(lengths, Tk)
        for mask in (None, seen.to(draw.dtype), seen.long()):
            for _ in range(2):
                yield attention(draw(B, width), source, key, mask)


ADAPTERS = [
    Adapter(
        name="ImageCaptioning.pytorch's Attention",
        implementation=Captioning,
        classes=["Attention"],
        parameters=["h2att.weight", "h2att.bias", "alpha_net.weight", "alpha_net.bias"],
        known_attributes=["att_hid_size"],
        example=example,
        note="an image without regions has context 0 instead of NaN",
    ),
]
