"""OpenNMT-py and its successor eole."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.serve import attend, project, project_joined


def attended(self, src, source, **seen):
    """Attend by the module's score, and project what comes out beside the query."""
    if self.attn_type == "mlp":
        key, weight = project(self, "key", self.linear_context, source), self.v.weight
        query = self.linear_query(src)
    else:
        key, weight = source, None
        query = self.linear_in(src) if self.attn_type == "general" else src
    context, weights = attend(self, query, key, source, weight, **seen)
    out = project_joined(self, self.linear_out, context, src, source)
    return out if self.attn_type == "mlp" else torch.tanh(out), weights


class OpenNMT:
    """Scores of Luong and Bahdanau; coverage goes into keys and values, tanh(h + w C)."""

    def forward(self, src, enc_out, src_len=None, coverage=None):
        if coverage is not None:  # the project changes its argument
            enc_out += self.linear_cover(coverage.view(-1, 1)).view_as(enc_out)
            enc_out = torch.tanh(enc_out)
        return attended(self, src, enc_out, lengths=src_len)


class Eole:
    """The same with a mask of padding."""

    def forward(self, src, enc_out, src_pad_mask=None, coverage=None):
        if coverage is not None and self.linear_cover is not None:
            feature = self.linear_cover(coverage.view(-1, 1)).view_as(enc_out)
            enc_out = torch.tanh(enc_out + feature)
        return attended(self, src, enc_out, mask=None if src_pad_mask is None else ~src_pad_mask)


def example(attention, draw, seen):
    for lengths in draw.sources((5, 2, 4)):
        B, Tk = len(lengths), max(lengths)
        source, keys = draw(B, Tk, attention.dim), seen(draw, lengths, Tk)
        yield attention(draw(B, 4, attention.dim), source, keys)
        for _ in range(3):
            yield attention(draw(B, attention.dim), source, keys)
        if getattr(attention, "linear_cover", None) is not None:
            yield attention(draw(B, attention.dim), source * 1, keys, draw(B, Tk))


COMMON: dict[str, Any] = {
    "parameters": ["linear_out.weight"],
    "optional": [
        "linear_in.weight", "linear_context.weight", "linear_query.weight", "linear_query.bias",
        "v.weight", "linear_out.bias", "linear_cover.weight",
    ],
    "why_not": lambda m: "its weights are a sparsemax" if m.attn_func != "softmax" else None,
    "note": "a source without words has weights 0 instead of NaN",
}  # fmt: skip

ADAPTERS = [
    Adapter(
        name="OpenNMT-py's GlobalAttention",
        methods=OpenNMT,
        classes=["onmt.modules.global_attention.GlobalAttention"],
        example=partial(example, seen=lambda draw, lengths, Tk: draw.numbers(*lengths)),
        **COMMON,
    ),
    Adapter(
        name="eole's GlobalAttention",
        methods=Eole,
        classes=["eole.modules.global_attention.GlobalAttention"],
        example=partial(example, seen=lambda draw, *seen: ~draw.seen(*seen).unsqueeze(1)),
        **COMMON,
    ),
]
