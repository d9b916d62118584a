"""pointer_summarizer's attention, by a double, alone and in a decoder that copies."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare, preparations, same_training_step
from integrations.reference_projects import PointerAttention, config

import attnfast


def decode(attention, draw, steps=3):
    for lengths in ((7, 1, 4), (3, 3), (5,)):
        B, Tk = len(lengths), max(lengths)
        outputs, mask = draw(B, Tk, 6), draw.seen(lengths, Tk).to(draw.dtype)
        feature = draw(B, Tk, 6).view(-1, 6)
        coverage = torch.zeros(B, Tk, dtype=draw.dtype) if config.is_coverage else None
        for _ in range(steps):
            result = attention(draw(B, 6), outputs, feature, mask, coverage)
            coverage = result[2]
            yield [x for x in result if x is not None]


@pytest.fixture(params=[False, True])
def is_coverage(request, monkeypatch):
    monkeypatch.setattr(config, "is_coverage", request.param)
    return request.param


def test_attention(is_coverage):
    compare(PointerAttention(), decode)


def test_a_source_is_prepared_once(is_coverage):
    attention = PointerAttention()  # three sources; coverage's feature besides
    assert preparations(attention, decode) == (6 if is_coverage else 3)


def test_coverage_that_is_switched_off_is_left_alone(monkeypatch):
    attention = PointerAttention()
    monkeypatch.setattr(config, "is_coverage", False)
    assert "skipped" in str(attnfast.replace(attention))


class Model(torch.nn.Module):
    """A decoder that generates and copies, with the loss of coverage."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.feature = torch.nn.LSTM(4, 6, batch_first=True), torch.nn.Linear(6, 6)
        self.attention = PointerAttention()
        self.cell, self.words = torch.nn.GRUCell(6, 6), torch.nn.Linear(12, 9)

    def forward(self, source, mask, steps=4):
        outputs = self.encoder(source)[0]
        feature = self.feature(outputs.reshape(-1, 6))
        state, context, coverage = outputs[:, 0], outputs[:, 0], outputs.new_zeros(mask.shape)
        losses, logits = [], []
        for _ in range(steps):
            state = self.cell(context, state)
            context, weights, following = self.attention(state, outputs, feature, mask, coverage)
            losses.append(torch.minimum(weights, coverage).sum(1))
            logits.append(self.words(torch.cat([state, context], 1)))
            coverage = following
        return torch.stack(logits), torch.stack(losses), coverage


def test_a_word_of_the_source_under_autocast():
    """Copying adds the weights to a distribution of their type."""
    served = PointerAttention()
    attnfast.replace(served, strict=True)
    states, mask, words = torch.randn(2, 5, 6), torch.ones(2, 5), torch.randint(9, (2, 5))
    with torch.autocast("cpu", torch.bfloat16):
        _, weights, _ = served(
            torch.randn(2, 6), states, states.flatten(0, 1), mask, torch.zeros(2, 5)
        )
    torch.zeros(2, 9).scatter_add(1, words, weights)


def test_a_whole_decoder():
    plain = Model()
    served = copy.deepcopy(plain)
    assert [x.path for x in attnfast.replace(served).replaced] == ["attention"]
    source, mask = torch.randn(3, 7, 4), (torch.arange(7) < torch.tensor([[7], [2], [5]])).float()
    for _ in range(2):
        same_training_step(plain, served, lambda m: m(source, mask))
    index = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        results = [m(source[index], mask[index]) for m in (plain, served)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
