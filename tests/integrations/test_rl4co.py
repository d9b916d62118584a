"""rl4co: the attention of its pointer network, and its decoder whole."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import alone, compare, same_training_step

import attnfast

ptrnet = alone("rl4co.models.zoo.ptrnet.decoder", "rl4co.utils")


def use(attention, draw):
    for B, Tk in ((3, 7), (2, 4)):
        source = draw(Tk, B, 6)
        for _ in range(3):
            yield attention(draw(B, 6), source)


@pytest.mark.parametrize("clipped", [False, True])
def test_attention(clipped):
    torch.manual_seed(0)
    compare(ptrnet.SimpleAttention(6, use_tanh=clipped, C=7), use)


class Model(torch.nn.Module):
    """The steps of the decoder, each of which visits the next city."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.LSTM(4, 6)
        self.decoder = ptrnet.Decoder(4, 6)

    def forward(self, cities):
        context, (h, c) = self.encoder(cities)
        state, mask = (h[-1], c[-1]), torch.ones(cities.shape[1], len(cities), dtype=torch.bool)
        last, chosen = None, []
        for t, x in enumerate(cities):
            state, log_p, mask = self.decoder.recurrence(x, state, mask, last, t, context)
            last = torch.full((cities.shape[1],), t)
            chosen.append(log_p[:, t])
        return torch.stack(chosen)


def test_a_training_step():
    plain = Model()
    served = copy.deepcopy(plain)
    report = attnfast.replace(served)
    assert [x.path for x in report.replaced] == ["decoder.pointer", "decoder.glimpse"]
    cities = torch.randn(7, 3, 4)
    for _ in range(3):
        same_training_step(plain, served, lambda m: m(cities))


def test_what_a_caller_writes_to_its_result_is_not_cached():
    plain = ptrnet.SimpleAttention(6)
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    source, query = torch.randn(5, 2, 6), torch.randn(2, 6)
    with torch.no_grad():
        for attention in (plain, served):
            attention(query, source)[0].zero_()
        torch.testing.assert_close(served(query, source), plain(query, source))
