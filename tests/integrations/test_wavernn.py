"""Location-sensitive attention of WaveRNN and Real-Time-Voice-Cloning, doubles."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare, preparations
from integrations.reference_projects import VoiceCloningLSA, WaveRNNLSA

import attnfast

CLASSES = [WaveRNNLSA, VoiceCloningLSA]
SINGLE = (torch.float32,)  # the projects' own first weights are float32


def make(cls):
    torch.manual_seed(0)
    return cls(6, 5, 3)


def use(attention, draw):
    for B, Tk in ((3, 7), (1, 4)):
        source = draw(B, Tk, 6)
        chars = draw.seen([Tk, Tk - 2, Tk - 1][:B], Tk).long()  # 0 is padding
        more = (chars,) * attention.cloning
        for t in range(4):
            yield attention(source, draw(B, 6), t, *more), attention.cumulative


@pytest.mark.parametrize("cls", CLASSES)
def test_attention(cls):
    compare(make(cls), use, SINGLE)
    assert preparations(make(cls), use) > 0


def test_padding_has_scores_of_0():
    plain = make(VoiceCloningLSA)
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    source, query = torch.randn(2, 4, 6), torch.randn(2, 6)
    chars = torch.tensor([[3, 1, 2, 5], [4, 2, 0, 0]])
    for t in range(3):
        torch.testing.assert_close(served(source, query, t, chars), plain(source, query, t, chars))
    assert served.attention[1, 2:].min() > 0
    assert isinstance(served, attnfast.integrations.projects.wavernn.VoiceCloning)
    silent = torch.zeros_like(chars)  # padding alone
    torch.testing.assert_close(served(source, query, 0, silent), plain(source, query, 0, silent))
