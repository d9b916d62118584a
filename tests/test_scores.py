"""Scores alone: against the oracle, and weights of other kinds made of them."""

from __future__ import annotations

from itertools import product

import attention_cases
import pytest
import torch
from attention_cases import DEVICE, EAGER, Case, check, fuzz, inputs, results, runnable
from torch import nn

import attnfast
from attnfast.ops.operators import CHECKS
from attnfast.ops.scores import SCORING, ScoreInputs

CASES = [
    Case("tanh", 2, 9, 33, 40, 8),
    Case("tanh", 2, 5, 20, 33, 8, 3, weight_per_head=True, layout="sliced"),
    Case("tanh", 3, 1, 70, 24, 8, layout="transposed"),
    Case("tanh", 1, 40, 130, 130, 8, scale=6.0),  # beyond the domain of factored tanh
    Case("tanh", 2, 7, 9, 16, 8, scale=1e-3),
    Case("tanh", 2, 7, 9, 17, 8, dtype=torch.float64),
    Case("tanh", 2, 7, 20, 17, 8, dtype=torch.bfloat16),
    Case("tanh", 2, 7, 20, 17, 8, 2, dtype=torch.float16),
    Case("relu", 2, 7, 20, 17, 8),
    Case("leaky_relu", 2, 7, 20, 17, 8, 2, weight_per_head=True),
    *(Case("tanh", 2, *sizes, 8) for sizes in product((0, 3), repeat=3) if 0 in sizes),
]


def arguments(case, device=attention_cases.CPU):
    given = inputs(case, device)
    return {x: given[x] for x in ("query", "key", "score_vector")}


def eager(activation):
    def run(query, key, score_vector):
        features = EAGER[activation](query.unsqueeze(-2) + key.unsqueeze(-3))
        if score_vector.dim() == 1:
            return (features @ score_vector,)
        return ((features @ score_vector[:, None, :, None]).squeeze(-1),)

    return run


def judge(case, backend):
    plain, names = eager(case.score), ("scores",)
    got = results(
        case,
        arguments(case, DEVICE[backend]),
        lambda **args: (attnfast.additive_score(**args, activation=case.score, backend=backend),),
        names,
    )
    args = arguments(case)
    wanted = results(case, attention_cases.doubled(args), plain, names)
    check(case, got, wanted, attention_cases.nearby(args, lambda x: results(case, x, plain, names)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_table(case, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    judge(case, backend)


@pytest.mark.parametrize("seed", range(2))
def test_fuzz(seed, backend):
    for case in fuzz(seed, 12, 60_000):
        if case.score != "dot" and runnable(backend, case):
            judge(case, backend)


def test_opcheck(backend):
    args = arguments(Case("tanh", 2, 3, 9, 16, 8, 2, weight_per_head=True), DEVICE[backend])
    if backend == "reference":
        pytest.skip("not a registered operator")
    torch.library.opcheck(SCORING.forwards[backend], (*args.values(), "tanh"))


def test_large_scores_are_kept():
    """Where weights would underflow: 300 apart, in float32."""
    query, key = torch.zeros(1, 1, 3), torch.tensor([[[9.0] * 3, [-9.0] * 3]])
    scores = attnfast.additive_score(query, key, torch.full((3,), 50.0))
    torch.testing.assert_close(scores, torch.tensor([[[150.0, -150.0]]]))


def test_half_types_return_float32_and_autocast_casts():
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    assert attnfast.additive_score(x, x, x[0, 0]).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        scores = attnfast.additive_score(x.float(), x.float(), x[0, 0].float())
    torch.testing.assert_close(scores, attnfast.additive_score(x, x, x[0, 0]))


def test_compiled():
    query, key = (x.requires_grad_() for x in torch.randn(2, 2, 4, 8).unbind())
    w = torch.randn(8)

    def gates(query, key, w):
        return attnfast.additive_score(query, key, w).sigmoid().sum()

    compiled = torch.compile(gates, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(query, key, w), [query, key]) for f in (gates, compiled)]
    torch.testing.assert_close(*grads)


def test_only_what_needs_a_gradient_has_one(backend):
    args = arguments(Case("tanh", 2, 3, 9, 16, 8), DEVICE[backend])
    args = {k: v.detach() for k, v in args.items()}
    for name in args:
        given = args | {name: args[name].clone().requires_grad_()}
        attnfast.additive_score(**given, backend=backend).sum().backward()
        assert given[name].grad is not None


def test_a_second_derivative_raises():
    query, key = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 4, 8)
    (grad,) = torch.autograd.grad(
        attnfast.additive_score(query, key, torch.randn(8)).sum(), query, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_it_is_refused_as_attention_is():
    query, key, w = torch.randn(2, 3, 8), torch.randn(2, 4, 8), torch.randn(8)
    for wrong, message in (
        ((query, key[..., :7], w), r"key must be \[2, 'Tk', 8\]|key must be"),
        ((query, key.double(), w), "key must be of the query's dtype"),
        ((query, key, w[:7]), "score_vector must be"),
        ((query[0], key, w), "query must be"),
    ):
        with pytest.raises(ValueError, match=message):
            attnfast.additive_score(*wrong)
        with pytest.raises(ValueError, match=message):
            CHECKS["scores"](*wrong, "tanh")
    with pytest.raises(ValueError, match="activation must be"):
        attnfast.additive_score(query, key, w, activation="sigmoid")
    assert ScoreInputs(query, key, w).score == "tanh"


class SigmoidAttention(nn.Module):
    """Weights of Chorowski et al., 2015, section 2.3: sigmoids over their sum, masked."""

    def forward(self, query, key, w, mask, how):
        gates = how(query, key, w).sigmoid() * mask
        return (gates / gates.sum(-1, keepdim=True)) @ key


def test_sigmoids_over_their_sum():
    torch.manual_seed(0)
    query, key, w = torch.randn(2, 5, 8), torch.randn(2, 9, 8), torch.randn(8)
    leaves = [x.requires_grad_() for x in (query, key, w)]
    mask = (torch.arange(9) < torch.tensor([9, 4])[:, None]).unsqueeze(1)
    attention = SigmoidAttention()
    contexts = [
        attention(*leaves, mask, how)
        for how in (attnfast.additive_score, lambda *x: eager("tanh")(*x)[0])
    ]
    torch.testing.assert_close(*contexts)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in contexts)):
        torch.testing.assert_close(a, b)
