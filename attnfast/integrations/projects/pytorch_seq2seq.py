"""Attention of IBM's pytorch-seq2seq: a dot product and an output layer."""

from __future__ import annotations

import torch

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.helpers import attend_to_source, project_joined


class Seq2Seq:
    """e = q · h; the output is tanh(W [c; q] + b)."""

    def forward(self, output, context):
        if output.dim() != 3 or (self.mask is not None and self.mask.dim() != 3):
            raise UnsupportedCall("a query is not [B, T, D], or its mask not [B, T, Tk]")
        mask = None if self.mask is None else ~self.mask
        mix, weights = attend_to_source(self, output, context, context, mask=mask)
        out = project_joined(self, self.linear_out, mix, output, context)
        return torch.tanh(out), weights


def example(attention, draw):
    """Call it with a whole target and step by step; it keeps a mask that hides keys."""
    size = attention.linear_out.out_features
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source, hidden = draw(B, Tk, size), ~draw.seen(lengths, Tk).unsqueeze(1)
        for mask in (hidden, None):
            attention.set_mask(mask)
            for T in (4, 1, 1):
                yield attention(draw(B, T, size), source)


ADAPTERS = [
    Adapter(
        name="pytorch-seq2seq's Attention",
        implementation=Seq2Seq,
        classes=["Attention"],
        parameters=["linear_out.weight", "linear_out.bias"],
        known_attributes=["data"],
        example=example,
        note="a source without words has weights 0 instead of NaN",
    ),
]
