"""IBM's pytorch-seq2seq, a double: whole targets and steps, with a mask that is set before."""

from __future__ import annotations

import copy

import torch
from integrations.common import compare, preparations
from integrations.reference_projects import DotAttention

import attnfast


def use(attention, draw):
    for lengths in ((7, 1, 4), (3,)):
        B, Tk = len(lengths), max(lengths)
        source, hidden = draw(B, Tk, 6), ~draw.seen(lengths, Tk).unsqueeze(1)
        for mask in (hidden, None):
            attention.set_mask(mask)
            for Tq in (4, 1, 1):
                yield attention(draw(B, Tq, 6), source)


def test_attention():
    torch.manual_seed(0)
    compare(DotAttention(6), use)
    assert preparations(DotAttention(6), use) == 2


def test_a_mask_for_each_query():
    plain = DotAttention(6)
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    target, source, past = torch.randn(3, 3, 6), torch.randn(3, 3, 6), torch.ones(3, 3).tril()
    for mask in (past == 0, (past == 0).expand(3, 3, 3)):
        for m in (plain, served):
            m.set_mask(mask)
        torch.testing.assert_close(served(target, source), plain(target, source))
