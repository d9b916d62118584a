"""Attention that people copy from tutorials: doubles of PyTorch's and bentrevett's."""

from __future__ import annotations

import pytest
import torch
from integrations.common import compare
from integrations.reference_projects import Attn, BahdanauAttention, bentrevett
from torch import nn

import attnfast


def test_translation():
    def use(attention, draw):
        for B, Tk in ((3, 7), (1, 4)):
            source = draw(B, Tk, 5)
            yield [attention(draw(B, 1, 5), source) for _ in range(3)]
            yield attention(query=draw(B, 1, 5), keys=source * 2)
            yield attention(source, source)  # what its own code makes of other queries
            yield attention(draw(1, 5), source)

    compare(BahdanauAttention(5), use)


@pytest.mark.parametrize("method", ["dot", "general", "concat"])
def test_chatbot(method):
    def use(attention, draw):
        for B, Tk in ((3, 7), (1, 4)):
            source = draw(Tk, B, 5)
            yield [attention(draw(1, B, 5), source) for _ in range(3)]
            yield attention(draw(1, B, 5), source * 2)
            if method != "concat":
                yield attention(draw(Tk, B, 5), source)  # a query for each key, as broadcast

    torch.manual_seed(0)
    compare(Attn(method, 5), use)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("edition", ["2018", "", "2024"])
def test_bentrevett(edition, masked):
    def use(attention, draw):
        for B, Tk, lengths in ((3, 7, (7, 1, 4)), (2, 3, (3, 2))):
            source, seen = draw(Tk, B, 6), draw.seen(lengths, Tk)
            for mask in (seen, seen.long(), seen.flip(1)):
                yield attention(draw(B, 4), source, *([mask] if masked else []))

    torch.manual_seed(0)
    compare(bentrevett(edition, masked), use)


def test_what_looks_alike_is_left_alone():
    """The names of these classes and parameters are common."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.v = nn.Linear(10, 4), nn.Linear(4, 1, bias=False)

        def forward(self, hidden, encoder_outputs):
            both = hidden.unsqueeze(0).expand(len(encoder_outputs), -1, -1), encoder_outputs
            features = torch.relu(self.attn(torch.cat(both, 2)))
            return self.v(features).squeeze(2).t().softmax(1)

    class BatchFirst(Attention):
        def forward(self, hidden, encoder_outputs):
            return super().forward(hidden, encoder_outputs.transpose(0, 1))

    for module in (Attention(), BatchFirst()):
        type(module).__qualname__ = "Attention"
        report = attnfast.replace(module)
        assert [x.path for x in report.skipped] == [""], report
