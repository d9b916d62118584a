"""Sparsemax and 1.5-entmax on every backend: the rule for numbers, zeros, and what calls share."""

import itertools
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    DEVICE,
    LAYOUTS,
    TERMS,
    Case,
    attend,
    check,
    eager,
    every,
    exact,
    frozen,
    fuzz,
    inputs,
    losses,
    oracle_of,
    results,
    runnable,
)
from torch.autograd import gradcheck

import attnfast
from attnfast.nn import AttentionGRU, BahdanauAttention, LuongAttention, MultiHeadAttention
from attnfast.ops import reference

NAMES = ("context", "weights")
SPARSE = ("sparsemax", "entmax15")
ALPHA = {"sparsemax": 2, "entmax15": 1.5}


@pytest.fixture(params=SPARSE)
def normalisation(request):
    return request.param


def judge(case, backend, args=None):
    args = inputs(case, DEVICE[backend]) if args is None else args
    got = results(
        case, args, lambda **a: every(attend(a, need_weights=True, backend=backend)), NAMES
    )
    wanted = {k: v for k, v in oracle_of(case, exact, NAMES).items() if k in got}
    check(case, got, wanted, losses(case, eager, NAMES))


def table():
    sizes = [
        (2, 1, 40, 33, 10), (3, 2, 5, 7, 8), (1, 17, 65, 64, 64), (2, 40, 130, 16, 70),
        (2, 9, 1, 8, 8), (2, 3, 0, 8, 8), (0, 3, 5, 8, 8), (1, 2, 600, 8, 8),
    ]  # fmt: skip
    terms, layouts = itertools.cycle(TERMS), itertools.cycle(LAYOUTS)
    for normalisation, score in itertools.product(SPARSE, ("dot", "tanh")):
        for size in sizes:
            yield Case(
                score, *size, terms=next(terms), layout=next(layouts), normalisation=normalisation
            )
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            of = {"dtype": dtype, "terms": ("lengths", "mask"), "normalisation": normalisation}
            yield Case(score, 2, 5, 19, 24, 8, 2, **of)


@pytest.mark.parametrize("case", [*table()], ids=str)
def test_table(case, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    judge(case, backend)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz(seed, backend, normalisation):
    cases = fuzz(100 + seed, 16, 6_000 if backend == "triton" else 200_000)
    for case in cases[:2] if backend == "triton" else cases:
        if runnable(backend, case):
            judge(replace(case, normalisation=normalisation), backend)


@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_a_step_on_frozen_keys(score, backend, normalisation):
    case = Case(score, 2, 1, 70, 40, 24, terms=("lengths",), normalisation=normalisation)
    judge(case, backend, frozen(inputs(case, DEVICE[backend])))


def test_weights_are_the_definition(normalisation):
    """Weights add up to 1 and are max(0, z − τ)^r with one τ, below which lie the zeros."""
    scores = 3 * torch.randn(50, 20, dtype=torch.float64)
    weights = reference.entmax(scores, ALPHA[normalisation])
    torch.testing.assert_close(weights.sum(-1), torch.ones(50, dtype=torch.float64))
    alpha = ALPHA[normalisation]
    thresholds = (alpha - 1) * scores - weights ** (alpha - 1)
    seen = weights > 0
    of_seen = thresholds.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    assert (thresholds - of_seen)[seen].abs().max() < 1e-12
    assert (((alpha - 1) * scores <= of_seen) | seen).all()
    assert 1 < seen.sum(-1).double().mean() < 12


def test_gradcheck(backend, normalisation):
    if backend == "triton":
        pytest.skip("it composes what the reference computes")
    case = Case("tanh", 1, 2, 6, 3, 2, dtype=torch.float64, normalisation=normalisation)
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    args = inputs(case, DEVICE[backend])
    names = [k for k, v in args.items() if isinstance(v, torch.Tensor)]

    def run(*tensors):
        given = {**args, **dict(zip(names, tensors))}
        return tuple(attend(given, need_weights=True, backend=backend))

    assert gradcheck(run, [args[k] for k in names])


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_scores_that_are_far_apart_or_equal(rows, backend, normalisation):
    """Newton's method takes most steps where every step drops one key."""
    apart = -(2.0 ** -torch.arange(40)).flip(0).cumsum(0)
    for scores in (apart, torch.zeros(40), 1e4 * apart, torch.linspace(-1, 0, 40)):
        bias = scores.expand(1, rows, 40).to(DEVICE[backend])
        x = bias.new_zeros(1, rows, 4), bias.new_zeros(1, 40, 4), bias.new_zeros(1, 40, 4)
        _, weights = attnfast.dot_attention(
            *x, bias=bias, normalisation=normalisation, need_weights=True, backend=backend
        )
        wanted = reference.entmax(bias.double(), ALPHA[normalisation])
        torch.testing.assert_close(weights.double(), wanted, atol=2e-6, rtol=1e-4)


def test_a_key_at_the_threshold_has_no_gradient(backend):
    """Scores that differ by exactly 1 give sparsemax the weights 1 and 0."""
    x = torch.zeros(1, 1, 1, device=DEVICE[backend]), torch.zeros(1, 2, 1, device=DEVICE[backend])
    value = torch.tensor([[[1.0], [10.0]]], device=DEVICE[backend])
    bias = torch.tensor([[[1.0, 0.0]]], device=DEVICE[backend]).requires_grad_()
    context, weights = attnfast.dot_attention(
        *x, value, bias=bias, normalisation="sparsemax", need_weights=True, backend=backend
    )
    assert weights.flatten().tolist() == [1, 0]
    assert torch.autograd.grad(context.sum(), bias)[0].flatten().tolist() == [0, 0]


def test_a_bias_as_low_as_numbers_go_hides_keys(backend, normalisation):
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor([[[0.0, 0.2, lowest, lowest, lowest]]], device=DEVICE[backend])
    x = bias.new_zeros(1, 1, 4), bias.new_zeros(1, 5, 4), bias.new_zeros(1, 5, 4)
    _, weights = attnfast.dot_attention(
        *x, bias=bias, normalisation=normalisation, need_weights=True, backend=backend
    )
    assert weights[0, 0, :2].sum().item() == pytest.approx(1) and (weights[0, 0, 2:] == 0).all()


@pytest.mark.parametrize("keys", [200, 10_000])
def test_nearly_equal_scores(keys, backend, normalisation):
    """Newton's first step, from far below, may pass the threshold by a rounding."""
    g = torch.Generator().manual_seed(keys)
    bias = (torch.randn(1, 8, keys, generator=g) * 0.01 / keys).to(DEVICE[backend])
    x = bias.new_zeros(1, 8, 4), bias.new_zeros(1, keys, 4), bias.new_zeros(1, keys, 4)
    _, weights = attnfast.dot_attention(
        *x, bias=bias, normalisation=normalisation, need_weights=True, backend=backend
    )
    wanted = reference.entmax(bias.double(), ALPHA[normalisation])
    assert (weights - wanted).abs().max() < 4e-6 * wanted.max()


def test_many_keys(normalisation):
    """A hundred thousand equal scores share the weight equally."""
    x = torch.zeros(1, 1, 4), torch.zeros(1, 100_000, 4), torch.ones(1, 100_000, 4)
    context, weights = attnfast.dot_attention(*x, normalisation=normalisation, need_weights=True)
    torch.testing.assert_close(weights, torch.full_like(weights, 1e-5))
    torch.testing.assert_close(context, torch.ones(1, 1, 4))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_rows_without_keys_or_that_have_diverged(rows, backend, normalisation):
    key = torch.randn(4, 9, 8, device=DEVICE[backend])
    query = torch.randn(4, rows, 8, device=DEVICE[backend])
    query[1, 0] = torch.nan
    bias = torch.zeros(4, 1, 9, device=DEVICE[backend])
    bias[2, :, 4] = torch.inf
    key[3, 4] = torch.nan
    lengths = torch.tensor([0, 7, 9, 9], device=DEVICE[backend])
    context, weights = attnfast.dot_attention(
        query, key, key, bias=bias, lengths=lengths, normalisation=normalisation,
        need_weights=True, backend=backend,
    )  # fmt: skip
    assert (context[0] == 0).all() and (weights[0] == 0).all()
    assert weights[1, 0, :7].isnan().all() and (weights[1, 0, 7:] == 0).all()
    assert not weights[1, 1:].isnan().any()
    assert weights[2:].isnan().all()


def test_keys_without_weight_are_not_touched(backend, normalisation):
    """NaN values there change nothing, and their gradients are exactly 0."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, n, 8, generator=generator).to(DEVICE[backend]) for n in (5, 30, 30)
    )
    x = [2 * y.requires_grad_() for y in (query, key)]
    options = {"normalisation": normalisation, "need_weights": True, "backend": backend}
    context, weights = attnfast.additive_attention(*x, value, torch.ones(8).to(key), **options)
    unseen = (weights == 0).all(1)
    assert 5 < unseen.sum() < 55
    [grad] = torch.autograd.grad(context.sum(), key)
    assert (grad[unseen] == 0).all() and (grad[~unseen] != 0).any(-1).all()
    if backend != "cpu":  # a product of PyTorch's
        return
    with torch.no_grad():
        value[unseen] = torch.nan
        again, _ = attnfast.additive_attention(*x, value, torch.ones(8).to(key), **options)
    assert torch.equal(again, context)


@pytest.mark.parametrize(
    ("span", "sees"),
    [
        (attnfast.Span(window=4), lambda apart: apart.abs() <= 4),
        (attnfast.Span(stride=3), lambda apart: apart % 3 == 0),
        (attnfast.Span(causal=True), lambda apart: apart <= 0),
    ],
)
def test_spans(span, sees, backend, normalisation):
    query, key = (torch.randn(2, 12, 8, device=DEVICE[backend]) for _ in range(2))
    score_vector = torch.randn(8, device=DEVICE[backend])
    j = torch.arange(12)
    seen = sees(j - j.unsqueeze(-1))
    options = {"normalisation": normalisation, "backend": backend, "need_statistics": True}
    result = attnfast.additive_attention(
        query, key, key, score_vector, span=span, need_weights="dense", **options
    )
    wanted = attnfast.additive_attention(
        query, key, key, score_vector, mask=seen.unsqueeze(0).to(key.device), need_weights=True,
        **options,
    )  # fmt: skip
    torch.testing.assert_close(result.weights, wanted.weights)
    torch.testing.assert_close(result.context, wanted.context)
    for name, x in wanted.statistics._asdict().items():
        torch.testing.assert_close(getattr(result.statistics, name), x, msg=name)
    assert result.log_sum_exp is None


def test_statistics(backend, normalisation):
    query, key = (2 * torch.randn(2, n, 8, device=DEVICE[backend]) for n in (3, 12))
    lengths = torch.tensor([12, 0], device=DEVICE[backend])
    result = attnfast.dot_attention(
        query.requires_grad_(), key, key, lengths=lengths, normalisation=normalisation,
        need_weights=True, need_statistics=True, backend=backend,
    )  # fmt: skip
    p, found, j = result.weights.double(), result.statistics, torch.arange(12).to(key)
    mean = (p * j).sum(-1)
    wanted = {
        "entropy": -(p * p.masked_fill(p == 0, 1).log()).sum(-1), "max_weight": p.amax(-1),
        "expected_position": mean,
        "variance": (p * (j - mean.unsqueeze(-1)).square()).sum(-1),
    }  # fmt: skip
    for name, x in wanted.items():
        torch.testing.assert_close(getattr(found, name).double(), x, atol=1e-5, rtol=1e-5)
        assert (getattr(found, name)[1] == 0).all()
    assert torch.equal(found.argmax, p.argmax(-1))
    same = attnfast.dot_attention(
        0 * query, key, key, normalisation=normalisation, need_statistics=True, backend=backend
    )
    assert (same.statistics.argmax == 0).all()
    got, want = (
        torch.autograd.grad(x.sum(), query, retain_graph=True)[0]
        for x in (found.entropy + found.variance, wanted["entropy"] + wanted["variance"])
    )
    torch.testing.assert_close(got, want.float(), atol=1e-4, rtol=1e-4)


def modules(**options):
    return {
        "bahdanau": BahdanauAttention(6, 8, 5, **options),
        "luong": LuongAttention(6, 8, **options),
        "heads": MultiHeadAttention(6, 8, 4, 2, **options),
    }


@pytest.mark.parametrize("name", [*modules()])
def test_steps_of_a_module_are_one_call(name, backend, normalisation):
    attention = modules(normalisation=normalisation, backend=backend)[name].to(DEVICE[backend])
    source = 2 * torch.randn(2, 9, 8, device=DEVICE[backend])
    state = 2 * torch.randn(2, 4, 6, device=DEVICE[backend])
    lengths = torch.tensor([9, 5], device=DEVICE[backend])
    found = []
    for steps in (False, True):
        leaf = source.clone().requires_grad_()
        memory = attention.prepare(leaf, lengths)
        rows = state.split(1, 1) if steps else [state]
        parts = [attention(x, memory, need_weights=True) for x in rows]
        context, weights = (torch.cat(x, -2) for x in zip(*parts))
        attention.zero_grad()
        context.square().sum().backward()
        grads = [leaf.grad, *(x.grad.clone() for x in attention.parameters())]
        found.append([context, weights, *grads])
        assert (weights == 0).any()
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bahdanau", "luong"])
def test_a_recurrent_layer_is_its_steps(name, backend, normalisation):
    attention = modules(normalisation=normalisation, backend=backend)[name]
    layer = AttentionGRU(3, 6, 8, attention).to(DEVICE[backend])
    x = torch.randn(2, 4, 3, device=DEVICE[backend])
    source = 3 * torch.randn(2, 9, 8, device=DEVICE[backend])
    if attention.score_vector is not None:
        attention.score_vector.data *= 8
    found = []
    for steps in (False, True):
        memory, state = layer.prepare(source), None
        outputs, weights = [], []
        for part in x.split(1, 1) if steps else [x]:
            result = layer(part, memory, state, need_weights=True)
            state = result.state
            outputs.append(result.output)
            weights.append(result.weights)
        layer.zero_grad()
        output = torch.cat(outputs, 1)
        output.square().sum().backward()
        grads = [p.grad.clone() for p in layer.parameters()]
        found.append([output, torch.cat(weights, 1), *grads])
    assert (found[0][1] == 0).any()
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_what_runs_is_explained(backend, normalisation):
    x = torch.randn(1, 2, 4, device=DEVICE[backend])
    call = {"normalisation": normalisation, "backend": backend}
    report = str(attnfast.explain(attnfast.dot_attention, x, x, x, **call))
    composed = f"not {backend}: its kernels support only softmax" in report
    assert composed == (backend in ("triton", "cuda"))
    layer = AttentionGRU(3, 6, 8, modules(**call)["bahdanau"]).to(DEVICE[backend])
    memory = layer.prepare(torch.randn(1, 5, 8, device=DEVICE[backend]))
    report = str(attnfast.explain(layer, torch.randn(1, 2, 3, device=DEVICE[backend]), memory))
    assert ("recurrent layer: one operator on cpu" in report) == (backend == "cpu")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no compiler is likely")
def test_compile(normalisation):
    x = torch.randn(2, 3, 8)
    call = torch.compile(
        lambda q: attnfast.additive_attention(q, q, q, torch.ones(8), normalisation=normalisation),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    wanted = attnfast.additive_attention(x, x, x, torch.ones(8), normalisation=normalisation)
    torch.testing.assert_close(call(x).context, wanted.context)
