"""GNMT's attention: a double of NVIDIA's, which is not on PyPI."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare
from integrations.reference_projects import GNMTAttention

import attnfast


def use(attention, draw):
    def sequence(*shape):
        return draw(*shape) if attention.batch_first else draw(*shape).transpose(0, 1)

    for B, Tk, lengths in ((3, 7, (7, 1, 4)), (2, 3, (3, 2))):
        source = sequence(B, Tk, 6)
        yield attention(draw(B, 4), source)
        attention.set_mask(draw.numbers(*lengths), source)
        for query in (sequence(B, 5, 4), sequence(B, 1, 4)):
            yield attention(query, source)
        for _ in range(3):
            yield attention(query=draw(B, 4), keys=source)
        attention.set_mask(draw.numbers(*(1,) * B), source)  # another mask for the same keys
        yield attention(draw(B, 4), source)
        attention.mask = None


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_attention(normalize, batch_first):
    torch.manual_seed(0)
    compare(GNMTAttention(4, 6, 5, normalize, batch_first), use)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_normalised_weight_follows_training(normalize):
    torch.manual_seed(0)
    plain = GNMTAttention(4, 6, 5, normalize).double()
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    source, queries = torch.randn(7, 3, 6).double(), torch.randn(3, 3, 4).double()
    for attention in (plain, served):
        attention.set_mask(torch.tensor([7, 2, 5]), source)
        optimiser = torch.optim.SGD(attention.parameters(), 0.5)
        for _ in range(3):
            optimiser.zero_grad()
            sum(attention(q, source)[0].square().sum() for q in queries).backward()
            optimiser.step()
    torch.testing.assert_close(list(served.parameters()), list(plain.parameters()))
    with torch.no_grad():
        for attention in (plain, served):
            attention(queries[0], source)
            attention.linear_att[0] += 1
        torch.testing.assert_close(served(queries[1], source), plain(queries[1], source))


def test_a_mask_of_another_batch_is_an_error():
    attention = GNMTAttention(4, 6, 5)
    attnfast.replace(attention)
    attention.set_mask(torch.tensor([3, 2]), torch.randn(3, 2, 6))
    with pytest.raises(RuntimeError, match="expanded size"):  # of its own code
        attention(torch.randn(3, 4), torch.randn(3, 3, 6))


def test_what_is_made_of_parameters_does_not_outlive_a_source():
    """Neither its values, where a change says nothing of itself, nor its graph."""
    torch.manual_seed(0)
    plain = GNMTAttention(4, 6, 5, True).double()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    sources, query = torch.randn(3, 7, 3, 6).double(), torch.randn(3, 4).double()
    with torch.no_grad():
        served(query, sources[0])
        for attention in (plain, served):
            attention.linear_att.data.mul_(2)
        torch.testing.assert_close(served(query, sources[1]), plain(query, sources[1]))
    losses = [served(query, source)[0].sum() for source in sources]
    for loss in losses:
        loss.backward()
