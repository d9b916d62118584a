"""neural_sp's attention of recurrent decoders, a double."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare, preparations
from integrations.reference_projects import AttentionMechanism

import attnfast

KINDS = ["add", "location", "dot", "luong_dot", "luong_general", "luong_concat"]


def make(kind, **more):
    torch.manual_seed(0)
    return AttentionMechanism(6 if kind == "luong_dot" else 8, 6, 5, kind, **more)


def use(attention, draw):
    width = 6 if attention.atype == "luong_dot" else 8
    for lengths in ((7, 1, 4), (3,)):
        B, Tk = len(lengths), max(lengths)
        source, values, past = draw(B, Tk, width), draw(B, Tk, 9), None
        attention.reset()
        seen = draw.seen(lengths, Tk).unsqueeze(1)
        for _ in range(3):
            context, past, _ = attention(source, values, draw(B, 1, 6), seen, past, cache=True)
            yield context, past
    if attention.atype in ("add", "dot"):
        yield attention(source, values, draw(B, 4, 6))
    yield attention(source, values, draw(B, 1, 6), None, past)  # and keeps no mask
    if attention.atype != "luong_concat":  # beams of one source
        yield attention(*(x.expand(2, -1, -1) for x in (source, values)), draw(2, 1, 6), cache=True)
    attention.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind):
    compare(make(kind), use)
    assert preparations(make(kind), use) >= 2


@pytest.mark.parametrize("kind", ["location", "add"])
def test_dropout_and_sharpening(kind):
    compare(make(kind, dropout=0.3, sharpening_factor=2), use)


def test_a_mask_of_another_size():
    plain = make("add")
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    for attention in (plain, served):
        with pytest.raises(AssertionError):
            attention(torch.randn(2, 4, 8), torch.randn(2, 4, 8), torch.randn(2, 1, 6),
                      torch.ones(2, 4))  # fmt: skip


@pytest.mark.parametrize("atype", ["add", "location", "dot", "luong_concat"])
def test_sigmoids(atype):
    compare(make(atype, sigmoid_smoothing=True), use)


def test_other_scores_are_left_alone():
    attention = make("add")
    attention.atype = "triggered_attention"
    assert "triggered_attention is not known" in str(attnfast.replace(attention))
