"""ruotianluo's captioning, a double: keys projected outside, a mask multiplied in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from integrations.common import compare, preparations
from integrations.reference_projects import RegionAttention

import attnfast


def make():
    torch.manual_seed(0)
    return RegionAttention(SimpleNamespace(rnn_size=6, att_hid_size=5))


def use(attention, draw):
    for lengths in ((7, 1, 4), (3,)):
        B, Tk = len(lengths), max(lengths)
        source, key, seen = draw(B, Tk, 8), draw(B, Tk, 5), draw.seen(lengths, Tk)
        for mask in (seen.to(draw.dtype), seen, None):
            yield attention(draw(B, 6), source, key, mask)
    source, key = draw(2, 2, 3, 8), draw(2, 2, 3, 5)  # a grid
    for _ in range(2):
        yield attention(draw(2, 6), source, key)


def test_attention():
    compare(make(), use)
    assert preparations(make(), use) == 3


@pytest.mark.parametrize("name", ["h2att", "alpha_net"])
def test_a_layer_of_another_kind_is_left_alone(name):
    attention = make()
    layer = getattr(attention, name)
    setattr(attention, name, torch.nn.Sequential(layer, torch.nn.Tanh()))
    assert "its parameters differ" in str(attnfast.replace(attention))
