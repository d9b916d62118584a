"""Attention of ParlAI's recurrent sequence-to-sequence agent: dot, general and concat."""

from __future__ import annotations

import torch

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.helpers import attend_to_source, is_plain, project_both

SCORES = ("dot", "general", "concat")


class ParlAI:
    """e = q · h, W q · h or v · tanh(W [h; q]); the output is tanh(U [x; c])."""

    def forward(self, xes, hidden, attn_params):
        source, mask = attn_params
        query = (hidden[0] if type(hidden) is tuple else hidden)[-1]
        key, weight = source, None
        if self.attention not in SCORES or (mask is not None and mask.dtype != torch.bool):
            raise UnsupportedCall("its score is not known, or its mask not boolean")
        if self.attention == "concat":
            if not is_plain(self.attn):
                raise UnsupportedCall("its attention layer has hooks or is no plain nn.Linear")
            query, key = project_both(self, self.attn, query, source, states_first=True)
            weight = self.attn_v.weight
        elif self.attention == "general":
            query = self.attn(query)
        elif query.shape[1] != source.shape[2]:
            query = torch.cat([query, query], 1)
        context, weights = attend_to_source(self, query, key, source, weight, mask=mask)
        both = torch.cat([xes.squeeze(1), context], 1)
        return torch.tanh(self.attn_combine(both).unsqueeze(1)), weights


def example(attention, draw):
    joined, inputs = attention.attn_combine.in_features, attention.attn_combine.out_features
    width = joined - inputs
    states = {
        "dot": [width, *([width // 2] * (width % 2 == 0))],
        "general": [getattr(getattr(attention, "attn", None), "in_features", 0)],
        "concat": [getattr(getattr(attention, "attn", None), "in_features", 0) - width],
    }[attention.attention]
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source, seen = draw(B, Tk, width), draw.seen(lengths, Tk)
        for size in states:
            for mask in (seen, seen, None):
                state = draw(2, B, size)
                for hidden in (state, (state, draw(2, B, size))):
                    yield attention(draw(B, 1, inputs), hidden, (source, mask))


DISTRIBUTIONS = ["parlai"]
ADAPTERS = [
    Adapter(
        name="ParlAI's AttentionLayer",
        implementation=ParlAI,
        classes=["parlai.agents.seq2seq.modules.AttentionLayer"],
        parameters=["attn_combine.weight"],
        optional=["attn.weight", "attn_v.weight"],
        example=example,
        skip_reason=lambda attention: (
            None if attention.attention in SCORES else "its weights do not depend on the source"
        ),
        note="a source without words has weights 0 instead of equal ones",
    ),
]
