"""sgrvinod's captioning, a double: scores with the rectifier, a batch that shrinks."""

from __future__ import annotations

import torch
from hosts.common import compare
from hosts.doubles import CaptionAttention

import attnfast


def use(attention, draw):
    for pixels in (7, 4):
        source = draw(4, pixels, 6)
        for B in (4, 4, 3, 3, 1):
            yield attention(source[:B], draw(B, 5))
        yield attention(source * 2, draw(4, 5))


def test_attention():
    torch.manual_seed(0)
    compare(CaptionAttention(6, 5, 8), use)


def test_a_batch_that_shrinks_is_prepared_once_for_each_size():
    torch.manual_seed(0)
    attention = CaptionAttention(6, 5, 8)
    attnfast.replace(attention, strict=True)
    source, calls = torch.randn(4, 7, 6, requires_grad=True), []
    attention.encoder_att.register_forward_hook(lambda *_: calls.append(1))
    for B in (4, 4, 4, 3, 3, 1):
        attention(source[:B], torch.randn(B, 5))
    assert len(calls) == 3


def test_tanh_in_its_place_is_left_alone():
    attention = CaptionAttention(6, 5, 8)
    attention.relu = torch.nn.Tanh()
    report = attnfast.replace(attention)
    assert "left alone: results differ by" in str(report)
