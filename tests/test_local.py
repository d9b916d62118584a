"""Modules with spans: against the papers' formulas written out, step by step as all at once."""

import math

import pytest
import torch

from attnfast import Span
from attnfast.nn import (
    HardMonotonicWindowAttention,
    LocalAttention,
    LocalPredictiveAttention,
    SparseSelfAttention,
    StridedAttention,
)

B, TQ, TK, D = 2, 7, 11, 8
LENGTHS = torch.tensor([11, 6])


def states(seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(B, TQ, D, generator=g, dtype=torch.float64, requires_grad=True),
        torch.randn(B, TK, D, generator=g, dtype=torch.float64, requires_grad=True),
    )


def scores(attention, state, source):
    """e [B, Tq, Tk] of Luong's general or concat score."""
    query, key = attention.query_proj(state), attention.key_proj(source)
    if attention.score_vector is None:
        return query @ key.transpose(1, 2)
    return torch.tanh(query.unsqueeze(2) + key.unsqueeze(1)) @ attention.score_vector


def softmax(attention, e, seen):
    seen = seen & (torch.arange(TK) < LENGTHS.view(-1, 1, 1))
    return (e / attention.temperature).masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0)


def local(attention, state, source):
    t, j = torch.arange(TQ).view(-1, 1).double(), torch.arange(TK)
    e = scores(attention, state, source)
    slope = LENGTHS.view(-1, 1, 1) / TQ if attention.slope is None else attention.slope
    apart = slope * t - j
    if attention.sigma is not None:
        prior = -(apart**2) / (2 * attention.sigma**2)
        e = e + (
            prior if attention.gaussian_height is None else attention.gaussian_height * prior.exp()
        )
    weights = softmax(attention, e, apart.abs() <= (2 if attention.span.sides[0] == 2 else TK))
    return weights @ source, weights


def strided(attention, state, source):
    t, j = torch.arange(TQ).view(-1, 1), torch.arange(TK)
    seen = (j if attention.span.fixed else j - t) % 3 == 0
    weights = softmax(attention, scores(attention, state, source), seen.expand(TQ, TK))
    return weights @ source, weights


def predictive(attention, state, source):
    share = torch.sigmoid(
        torch.tanh(state @ attention.position_proj.weight.T) @ attention.position_weight.weight.T
    )
    p, j = LENGTHS.view(-1, 1, 1) * share, torch.arange(TK)
    gauss = torch.exp(-((j - p) ** 2) / (2 * (3 / 2) ** 2))
    weights = softmax(attention, scores(attention, state, source), (j - p).abs() <= 3) * gauss
    return weights @ source, weights


def monotonic(attention, state, source):
    e, j, last, rows = scores(attention, state, source), torch.arange(TK), torch.zeros(B), []
    for t in range(TQ):
        seen = (j >= last.view(-1, 1, 1)) & (j <= last.view(-1, 1, 1) + attention.span.sides[1])
        rows.append(softmax(attention, e[:, t : t + 1], seen))
        last = rows[-1].argmax(-1).view(-1)
    weights = torch.cat(rows, 1)
    return weights @ source, weights


KINDS = [
    (lambda **k: LocalAttention(D, D, window=2, **k), local),
    (lambda **k: LocalAttention(D, D, window=2, slope=1.5, **k), local),
    (lambda **k: LocalAttention(D, D, window=2, slope=None, **k), local),
    (lambda **k: LocalAttention(D, D, window=2, sigma=0.8, **k), local),
    (lambda **k: LocalAttention(D, D, None, sigma=1.5, gaussian_height=3.0, **k), local),
    (
        lambda **k: LocalAttention(D, D, None, slope=None, sigma=2.0, gaussian_height=-1.0, **k),
        local,
    ),
    (lambda **k: StridedAttention(D, D, stride=3, **k), strided),
    (lambda **k: StridedAttention(D, D, stride=3, fixed=True, **k), strided),
    (lambda **k: LocalPredictiveAttention(D, D, window=3, **k), predictive),
    (lambda **k: HardMonotonicWindowAttention(D, D, ahead=4, **k), monotonic),
]
IDS = (
    "m",
    "m-slope",
    "m-diagonal",
    "m-prior",
    "m-bump",
    "m-diagonal-bump",
    "strided",
    "fixed",
    "p",
    "monotonic",
)


def grads(outputs, attention, *leaves):
    parameters = list(attention.parameters())
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs)
    return torch.autograd.grad(loss, [*leaves, *parameters])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("score", ["general", "concat"])
@pytest.mark.parametrize(("make", "formula"), KINDS, ids=IDS)
def test_formula(make, formula, score, temperature):
    torch.manual_seed(0)
    attention = make(score=score).double()
    attention.temperature = temperature
    state, source = states()
    memory = attention.prepare(source, LENGTHS)
    context, weights = attention(state, memory, need_weights="dense")[:2]
    wanted = formula(attention, state, source)
    for got, want in zip((context, weights), wanted):
        torch.testing.assert_close(got, want)
    got = grads((context, weights), attention, state, source)
    for a, b in zip(got, grads(wanted, attention, state, source)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_heads_of_self_attention(score):
    """Every head is a MultiHeadAttention's with the mask of its span."""
    spans = [Span(window=1), Span(stride=3), Span(window=1), Span(causal=True)]
    torch.manual_seed(0)
    attention = SparseSelfAttention(D, spans, score).double()
    source = states()[1]
    out, weights = attention(source, LENGTHS, need_weights=True)
    assert [x.shape[-1] for x in weights] == [3, 4, 3, TK]
    query, key, value = (
        attention._split(f(source))
        for f in (attention.query_proj, attention.key_proj, attention.value_proj)
    )
    if score == "dot":
        e = query @ key.transpose(-1, -2) * (D / 4) ** -0.5
    else:
        e = (
            torch.tanh(query.unsqueeze(3) + key.unsqueeze(2))
            * attention.score_vector[:, None, None]
        )
        e = e.sum(-1)
    i, j = torch.arange(TK).view(-1, 1), torch.arange(TK)
    near = (i - j).abs() <= 1
    seen = torch.stack([near, (i - j) % 3 == 0, near, j <= i])
    seen = seen & (j < LENGTHS.view(-1, 1, 1, 1))
    dense = e.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0)
    want = attention.out_proj((dense @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, want)
    out, weights = attention(source, LENGTHS, need_weights="dense")
    torch.testing.assert_close(weights, dense)
    sparse = attention(source, LENGTHS, need_weights="sparse")[1]
    torch.testing.assert_close(sparse.to_dense(), dense)
    assert sparse._nnz() == seen.expand_as(dense).sum()
    leaves = [source, *attention.parameters()]
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(want.square().sum(), leaves),
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", [False, True, "dense"])
@pytest.mark.parametrize("ahead", [None, 2])
def test_no_rows_leave_a_monotonic_position_where_it_was(ahead, form):
    attention = HardMonotonicWindowAttention(4, 4, ahead)
    memory = attention.prepare(torch.randn(2, 5, 4))
    _, _, before = attention(torch.randn(2, 3, 4), memory)
    context, weights, after = attention(torch.empty(2, 0, 4), memory, before, form)
    assert context.shape == (2, 0, 4)
    columns = 5 if ahead is None or form == "dense" else 3
    assert weights is None if not form else weights.shape == (2, 0, columns)
    assert after.rows == 3 and after.key.equal(before.key)
