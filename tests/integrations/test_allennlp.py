"""AllenNLP's additive attention: a double."""

from __future__ import annotations

import torch
from integrations.common import compare
from integrations.reference_projects import AdditiveAttention

import attnfast


def use(attention, draw):
    for B, Tk, lengths in ((3, 7, (7, 0, 4)), (2, 3, (3, 2))):
        source, seen = draw(B, Tk, 6), draw.seen(lengths, Tk)
        for mask in (seen, seen.long(), seen, None, seen.flip(1)):
            yield attention(draw(B, 4), source, mask)
        yield attention(vector=draw(B, 4), matrix=source * 2, matrix_mask=seen)


def test_attention():
    torch.manual_seed(0)
    compare(AdditiveAttention(4, 6), use)


def test_scores_are_left_alone():
    report = attnfast.replace(AdditiveAttention(4, 6, normalize=False))
    assert "skipped: it returns scores without a softmax" in str(report)
