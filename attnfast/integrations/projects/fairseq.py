"""Attention of fairseq's recurrent decoder, time first."""

from __future__ import annotations

import torch

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.helpers import (
    attend_to_source,
    batch_first,
    project_joined,
    promote_dtype,
)


class Fairseq:
    """e = h · W q; the output is tanh(U [c; q])."""

    def forward(self, input, source_hids, encoder_padding_mask):
        source = batch_first(self, source_hids)
        mask = None if encoder_padding_mask is None else encoder_padding_mask.t() == 0
        query = self.input_proj(input)
        context, weights = attend_to_source(self, query, source, source, mask=mask)
        weights = promote_dtype(weights, query, source)
        out = project_joined(self, self.output_proj, context, input, source_hids)
        return torch.tanh(out), weights.t()


def example(attention, draw):
    size, width = attention.input_proj.in_features, attention.input_proj.out_features
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        source = draw(max(lengths), len(lengths), width)
        padding = ~draw.seen(lengths, max(lengths)).t()
        for mask in (padding, padding, padding, None):
            yield attention(draw(len(lengths), size), source, mask)


ADAPTERS = [
    Adapter(
        name="fairseq's AttentionLayer",
        implementation=Fairseq,
        classes=["fairseq.models.lstm.AttentionLayer"],
        parameters=["input_proj.weight", "output_proj.weight"],
        optional=["input_proj.bias", "output_proj.bias"],
        example=example,
        note="a source without words has weights 0 instead of NaN",
        dtype=torch.float32,  # the dtype of its scores, whatever that of the module
    ),
]
