"""kospeech's attention of recurrent decoders, doubles: additive and aware of its location."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare, preparations
from integrations.reference_projects import KospeechAdditive, KospeechLocation

import attnfast

CLASSES = [
    lambda: KospeechAdditive(6),
    lambda: KospeechLocation(6, 5),
    lambda: KospeechLocation(6, 5, smoothing=True),
]


def use(attention, draw):
    for B, Tk in ((3, 7), (1, 4)):
        source, past = draw(B, Tk, 6), None
        for _ in range(3):
            located = hasattr(attention, "location_conv")
            context, past = attention(draw(B, 1, 6), source, past if located else source)
            yield context, past


@pytest.mark.parametrize("make", CLASSES)
def test_attention(make):
    torch.manual_seed(0)
    compare(make(), use)
    assert preparations(make(), use) == (2 if make is CLASSES[0] else 4)  # with filters


def test_a_query_for_each_key_runs_its_own_code():
    plain = KospeechLocation(6, 5)
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    query, source = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    torch.testing.assert_close(served(query, source, None), plain(query, source, None))
    additive = KospeechAdditive(6)
    attnfast.replace(additive, strict=True)
    with pytest.raises(RuntimeError):  # contexts and queries of different sizes
        additive(query, source, source)
