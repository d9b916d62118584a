"""clovaai's cell for text recognition, a double: attention, then an LSTM."""

from __future__ import annotations

import pytest
import torch
from integrations.common import compare, preparations
from integrations.reference_projects import AttentionCell
from torch.nn import functional as F

import attnfast


def use(cell, draw):
    """Read two words, as the project's decoder does, and a third alone."""
    for B, Tk in ((3, 7), (2, 3), (1, 5)):
        source, state = draw(B, Tk, 6), (torch.zeros(B, 5, dtype=draw.dtype),) * 2
        for word in draw.words(4, B, 3).unbind(1):
            state, weights = cell(state, source, F.one_hot(word, 4).to(draw.dtype))
            yield state, weights


def test_cell():
    torch.manual_seed(0)
    compare(AttentionCell(6, 5, 4), use)


def test_a_source_is_prepared_once():
    assert preparations(AttentionCell(6, 5, 4), use) == 3


class Relu(AttentionCell):
    """A copy with the rectifier."""

    __qualname__ = "AttentionCell"

    def forward(self, prev_hidden, batch_H, char_onehots):
        query = self.h2h(prev_hidden[0]).unsqueeze(1)
        alpha = F.softmax(self.score(torch.relu(self.i2h(batch_H) + query)), dim=1)
        context = torch.bmm(alpha.permute(0, 2, 1), batch_H).squeeze(1)
        return self.rnn(torch.cat([context, char_onehots], 1), prev_hidden), alpha


class TimeFirst(AttentionCell):
    """A copy that takes the source time first, as MORAN's does."""

    __qualname__ = "AttentionCell"

    def forward(self, prev_hidden, feats, char_onehots):
        return super().forward(prev_hidden, feats.transpose(0, 1), char_onehots)


@pytest.mark.parametrize("copy", [Relu, TimeFirst])
def test_copies_that_differ_are_left_alone(copy):
    report = attnfast.replace(copy(6, 5, 4))
    assert report.skipped and not report.replaced, report


def test_a_copy_with_another_cell_is_left_alone():
    cell = AttentionCell(6, 5, 4)
    cell.rnn = torch.nn.GRUCell(10, 5)
    report = attnfast.replace(cell)
    assert report.skipped and not report.replaced, report
