"""The book "Dive into Deep Learning": the real modules."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare, real, same_training_step

import attnfast

d2l = real("d2l.torch", "IPython", "matplotlib", "matplotlib_inline", "pandas", "PIL", "requests",
           "scipy", "torchvision")  # fmt: skip


def make(kind, dropout=0.0):
    torch.manual_seed(0)
    if kind == "dot":
        return d2l.DotProductAttention(dropout)
    attention = d2l.AdditiveAttention(5, dropout)
    attention(torch.randn(1, 1, 4), torch.randn(1, 2, 4), torch.randn(1, 2, 6), None)
    attention.attention_weights = None
    return attention


def use(attention, draw):
    for B, Tk, lengths in ((3, 7, (7, 1, 4)), (2, 3, (3, 2))):
        source, values, one = draw(B, Tk, 4), draw(B, Tk, 6), draw.numbers(*lengths)
        for Tq in (5, 1, 1, 1):
            yield attention(draw(B, Tq, 4), source, values, one)
        yield attention(draw(B, 2, 4), source, values, torch.stack([one, one.flip(0)], 1))
        yield attention(draw(B, 2, 4), source, source, one.float())
        yield attention(draw(B, 2, 4), source, values, one + Tk)
        yield attention(queries=draw(B, 2, 4), keys=source, values=values, valid_lens=None)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["dot", "additive"])
def test_attention(kind, dropout):
    """Dropout takes the same random numbers, and ``attention_weights`` are those before it."""
    compare(make(kind, dropout), use)


def test_dropout_between_training_and_evaluation():
    plain = make("additive", 0.5)
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    query, source = torch.randn(2, 1, 4), torch.randn(2, 3, 4)
    for training in (True, False, True):
        results = []
        for attention in (plain, served):
            torch.manual_seed(1)
            results.append(attention.train(training)(query, source, source, None))
        torch.testing.assert_close(*results)


def test_lazy_layers_are_left_alone():
    report = attnfast.replace(d2l.AdditiveAttention(5, 0.0))
    assert "have no shape yet: replace it after the first call" in str(report)


def test_heads():
    torch.manual_seed(0)
    plain = d2l.MultiHeadAttention(8, 2, 0.5)
    inputs = torch.randn(3, 5, 8), torch.randn(3, 7, 8), torch.randn(3, 7, 8)
    lengths = torch.tensor([7, 2, 4])
    plain(*inputs, lengths)
    plain.attention.attention_weights = None
    served = copy.deepcopy(plain)
    assert [x.path for x in attnfast.replace(served).replaced] == ["attention"]
    same_training_step(plain, served, lambda m: [m(*inputs, lengths), m(*inputs, None)])
