"""Sparse weights against the package entmax, whose authors' formulas they are."""

from __future__ import annotations

import pytest
import torch

import attnfast
from attnfast.nn import BahdanauAttention

entmax = pytest.importorskip("entmax", reason="`make integrations` installs it")
PACKAGE = {"sparsemax": entmax.sparsemax, "entmax15": entmax.entmax15}


def eager(q, k, v, w, mask, normalisation):
    """Attend as models with sparse weights write it."""
    scores = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ w
    weights = PACKAGE[normalisation](scores.masked_fill(~mask, -1e9), -1)
    return weights @ v, weights


@pytest.mark.parametrize("normalisation", PACKAGE)
@pytest.mark.parametrize("rows", [1, 2, 11])
def test_attention(rows, normalisation):
    torch.manual_seed(rows)
    leaves = [torch.randn(3, n, 16, dtype=torch.float64) for n in (rows, 40, 40)]
    leaves.append(3 * torch.randn(16, dtype=torch.float64))
    lengths = torch.tensor([40, 17, 1])
    mask, outcomes = torch.arange(40) < lengths.view(-1, 1, 1), []
    for ours in (True, False):
        args = [x.clone().requires_grad_() for x in leaves]
        if ours:
            made = attnfast.additive_attention(
                *args, lengths=lengths, normalisation=normalisation, need_weights=True
            )
        else:
            made = eager(*args, mask, normalisation)
        context, weights = made
        loss = (context * torch.linspace(-1, 1, 16)).sum() + weights.square().sum()
        outcomes.append([context, weights, *torch.autograd.grad(loss, args)])
    for a, b in zip(*outcomes):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert torch.equal(outcomes[0][1] == 0, outcomes[1][1] == 0)


@pytest.mark.parametrize("normalisation", PACKAGE)
def test_a_module(normalisation):
    torch.manual_seed(0)
    attention = BahdanauAttention(6, 8, 5, normalisation=normalisation).double()
    attention.score_vector.data *= 6
    states, queries = (torch.randn(2, n, d, dtype=torch.float64) for n, d in ((9, 8), (4, 6)))
    memory = attention.prepare(states, torch.tensor([9, 4]))
    mask = torch.arange(9) < torch.tensor([[[9]], [[4]]])
    steps = [attention(x, memory, need_weights=True) for x in queries.unbind(1)]
    wanted = eager(
        attention.query_proj(queries), attention.key_proj(states), states,
        attention.score_vector, mask, normalisation,
    )  # fmt: skip
    for found, want in zip(zip(*steps), wanted):
        torch.testing.assert_close(torch.stack(found, 1), want, rtol=1e-9, atol=1e-9)
