"""Modules with spans: against the papers' formulas written out, step by step as all at once."""

import math

import pytest
import torch
from torch import nn

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
    if attention.weight is None:
        return query @ key.transpose(1, 2)
    return torch.tanh(query.unsqueeze(2) + key.unsqueeze(1)) @ attention.weight


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
        e = e + (prior if attention.height is None else attention.height * prior.exp())
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
    (lambda **k: LocalAttention(D, D, None, sigma=1.5, height=3.0, **k), local),
    (lambda **k: LocalAttention(D, D, None, slope=None, sigma=2.0, height=-1.0, **k), local),
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


@pytest.mark.parametrize("score", ["general", "concat"])
@pytest.mark.parametrize(("make", "_"), KINDS, ids=IDS)
def test_steps_are_the_whole(make, _, score):
    """One row after the other, as a decoder does, with the same gradients."""
    torch.manual_seed(0)
    attention = make(score=score).double()
    state, source = states(1)
    memory = attention.prepare(source, LENGTHS)
    whole = attention(state, memory, need_weights="dense")[:2]
    if attention.has_history and getattr(attention, "slope", 1) is None:
        history = attention(state[:, 0], memory)[2]
        with pytest.raises(ValueError, match="slope must be a number"):
            attention(state[:, 1], memory, history)
        return
    memory, history, steps = attention.prepare(source, LENGTHS), None, []
    for row in state.unbind(1):
        if attention.has_history:
            context, weights, history = attention(row, memory, history, need_weights="dense")
        else:
            context, weights = attention(row, memory, need_weights="dense")
        steps.append((context, weights))
    steps = [torch.stack(x, 1) for x in zip(*steps)]
    for got, want in zip(steps, whole):
        torch.testing.assert_close(got, want)
    got = grads(steps, attention, state, source)
    for a, b in zip(got, grads(whole, attention, state, source)):
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
        e = torch.tanh(query.unsqueeze(3) + key.unsqueeze(2)) * attention.weight[:, None, None]
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


def test_progress_is_reordered():
    attention = HardMonotonicWindowAttention(D, D).double()
    state, source = states()
    memory = attention.prepare(source, LENGTHS)
    history = attention(state, memory)[2]
    again = history.index_select(torch.tensor([1, 0, 1]))
    assert torch.equal(again.key, history.key[[1, 0, 1]])
    assert again.rows == TQ


def test_modules_compile():
    attention = nn.ModuleList([LocalAttention(D, D, 2), LocalPredictiveAttention(D, D, 2)])

    def both(state, source):
        contexts = [a(state, a.prepare(source))[0] for a in attention]
        return sum(contexts)

    state, source = (x.detach().float() for x in states())
    compiled = torch.compile(both, fullgraph=True)
    torch.testing.assert_close(compiled(state, source), both(state, source))


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


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalAttention(4, 5, window=1),
        lambda: LocalAttention(4, 5, window=1, slope=1.5),
        lambda: HardMonotonicWindowAttention(4, 5, ahead=2),
    ],
)
def test_a_history_does_not_count_padding(make, in_steps):
    attention = make().double()
    states, more, source = (torch.randn(2, n, m).double() for n, m in ((4, 4), (2, 4), (9, 5)))
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    memory, history = attention.prepare(source), None
    if in_steps:
        for t in range(4):
            history = attention(states[:, t], memory, history, target_mask=mask[:, t])[2]
    else:
        history = attention(states, memory, target_mask=mask)[2]
    context = attention(more, memory, history)[0]
    for b, n in enumerate(mask.sum(-1).tolist()):
        alone = attention.prepare(source[b : b + 1])
        history = attention(states[b : b + 1, :n], alone)[2]
        torch.testing.assert_close(context[b], attention(more[b : b + 1], alone, history)[0][0])
