"""attention on every backend: the project's rule for numbers, and the ways kernels go wrong."""

import enum
import functools
import importlib
import itertools
import math
import warnings

import pytest
import torch
from attention_cases import (
    DEVICE,
    NAMES,
    Case,
    attend,
    cases,
    check,
    eager,
    every,
    exact,
    frozen,
    fuzz,
    inputs,
    losses,
    oracle,
    oracle_of,
    results,
    runnable,
    small,
)
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import attnfast
from attnfast.ops.attention import AttentionBackward, AttentionInputs, AttentionOutputs
from attnfast.ops.backends import unsupported_reason


def everything(args, **options) -> tuple:
    """Return context, weights and log-sum-exp of the public function."""
    return every(attend(args, need_weights=True, **options))


def run(case, backend, **changes):
    args = {**inputs(case, DEVICE[backend]), **changes}
    return results(case, args, lambda **a: everything(a, backend=backend))


def judge(case, backend):
    check(case, run(case, backend), oracle(case), losses(case, eager))


def name(case):
    sizes = "x".join(map(str, (case.B, *case.heads, case.Tq, case.Tk, case.A, case.Dv)))
    return f"{case.score}-{sizes}-{str(case.dtype)[6:]}-{'+'.join(case.terms)}-{case.layout}"


@pytest.mark.parametrize("case", cases(), ids=name)
def test_table(case, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    judge(case, backend)


@pytest.mark.parametrize("seed", range(8))
def test_fuzz(seed, backend):
    table = fuzz(seed, 32, 6_000 if backend == "triton" else 400_000)
    for case in table[: 16 if seed < 2 else 2] if backend == "triton" else table:
        if runnable(backend, case):
            judge(case, backend)  # a failure prints the case: paste it into judge()


# One query, of which alone the gradient is asked: what a step over prepared keys comes to.
STEPS = [
    Case("dot", 2, 1, 65, 33, 40, 2, terms=("lengths",)),
    Case("dot", 3, 1, 150, 1030, 24, terms=("mask",), layout="sliced"),
    Case("dot", 1, 1, 530, 24, 16, terms=("lengths",)),
    Case("tanh", 2, 1, 150, 70, 1100, terms=("lengths", "mask", "bias")),
    Case("tanh", 2, 1, 64, 8, 8, 3, weight_per_head=True, layout="transposed"),
    Case("tanh", 1, 1, 530, 24, 16, terms=("bias",)),
    Case("tanh", 1, 1, 8300, 35, 8, 2),
    Case("tanh", 5, 1, 12, 8, 8, terms=("lengths",), scale=30.0),
    Case("tanh", 2, 1, 70, 40, 24, dtype=torch.float64, terms=("mask",)),
    Case("tanh", 2, 1, 200, 40, 24, dtype=torch.bfloat16, terms=("lengths",)),
    Case("relu", 2, 1, 130, 33, 24, terms=("lengths", "mask")),
    Case("relu", 2, 1, 70, 33, 24, 2, dtype=torch.float16, weight_per_head=True),
]


def judge_step(case, backend):
    got = run(case, backend, **frozen(inputs(case, DEVICE[backend])))
    wanted = {k: v for k, v in oracle(case).items() if k in got}
    assert "grad of query" in wanted and "grad of key" not in wanted
    check(case, got, wanted, losses(case, eager))


@pytest.mark.parametrize("case", STEPS, ids=name)
def test_a_step_on_frozen_keys(case, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    judge_step(case, backend)


#: Whole targets, two rows, one, of numbers near 0. Float64 has no oracle that is better than it.
NEAR_ZERO = [
    Case("tanh", 2, 9, 21, 33, 10),
    Case("tanh", 1, 40, 70, 64, 16, terms=("lengths", "bias")),
    Case("tanh", 2, 2, 20, 24, 8, 2, weight_per_head=True, layout="sliced"),
    Case("tanh", 2, 1, 30, 40, 8),
    Case("tanh", 1, 18, 40, 24, 300),
    Case("tanh", 2, 9, 20, 24, 10, dtype=torch.bfloat16),
    Case("tanh", 2, 1, 20, 24, 10, dtype=torch.float16),
]


@pytest.mark.parametrize("case", NEAR_ZERO, ids=name)
def test_inputs_near_zero(case, backend):
    for one in small(case):
        if not runnable(backend, one):
            pytest.skip(f"{backend} does not run this case here")
        judge(one, backend)
        if one.Tq == 1 and one.scale == 0.1:  # below, the query's gradient alone is noise
            judge_step(one, backend)


@pytest.mark.parametrize("by", ["keys", "features"])
def test_blocks_near_zero_beside_others(by, backend):
    """Every block of keys takes its own path with the same queries; one feature can decide."""
    size = (1, 5, 17, 8, 8) if backend == "triton" else (1, 5, 300, 16, 8)
    case = Case("tanh", *size, scale=0.05)
    if by == "keys":
        width = 64 if case.Tk > 64 else 4
        apart = torch.arange(case.Tk).div(width, rounding_mode="floor").view(-1, 1) % 2
    else:
        apart = torch.arange(case.A) == 6

    def far(how):
        return lambda key, **rest: how(key=key * (1 + 30 * apart.to(key)), **rest)

    args = inputs(case, DEVICE[backend])
    got = results(case, args, far(lambda **a: everything(a, backend=backend)))
    check(case, got, oracle_of(case, far(exact)), losses(case, far(eager)))


@pytest.mark.parametrize("rows", [1, 2, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_near_zero(dtype, rows, backend):
    """log Σ exp over one key is w tanh(q + k), and its derivative by w the tanh."""
    if reason := unsupported_reason(backend, DEVICE[backend], dtype):
        pytest.skip(reason)
    count = 200 if backend in ("cpu", "reference") else 6  # heads are slow in an interpreter
    z = torch.logspace(-12, 0, count, dtype=torch.float64).to(dtype).double()
    z = torch.cat([-z, z]).view(-1, 1, 1, 1)
    args = {"query": z, "key": z / 2, "value": z, "score_vector": torch.ones(z.shape[0], 1)}
    args["query"] = (z / 2).expand(-1, -1, rows, 1)  # halves: their sum is exact
    args = {k: x.transpose(0, 1) if x.dim() == 4 else x for k, x in args.items()}  # heads
    args = {k: x.to(DEVICE[backend], dtype).requires_grad_() for k, x in args.items()}
    tanh = attend(args, backend=backend).log_sum_exp
    (grad,) = torch.autograd.grad(tanh[..., 0].sum(), args["score_vector"])
    right = torch.tensor([math.tanh(x) for x in z.flatten()], dtype=torch.float64)
    for got in (tanh[0, :, 0], tanh[0, :, -1], grad.flatten()):
        error = (got.detach().double().cpu() / right - 1).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps, float(error / torch.finfo(dtype).eps)


@pytest.mark.parametrize("score", ["dot", "tanh"])
@pytest.mark.parametrize(
    "sizes", [(2, 9, 20, 33, 17), (2, 64, 70, 64, 64), (1, 1, 40, 16, 8)], ids=str
)
def test_heads_keep_their_order(score, sizes, backend):
    """Results of heads that lie behind time lie so too: transposed back they are contiguous."""
    case = Case(score, *sizes, H=3, layout="time first")
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    judge(case, backend)
    args = inputs(case, DEVICE[backend])
    context, weights, _ = everything(args, backend=backend)
    grads = torch.autograd.grad(context.sum(), [args[k] for k in ("query", "key", "value")])
    if backend != "reference":
        for x in (context, *grads):
            assert x.transpose(1, 2).is_contiguous()
    assert weights.is_contiguous()
    with torch.no_grad():  # nor weights for a backward
        alone, _ = attend(args, backend=backend)
    torch.testing.assert_close(alone, context)


def test_textbook_softmax(backend):
    """softmax(0.5, 2.0, −1.0), as the bias of a query that sees three keys alike."""
    zeros = torch.zeros(1, 3, 4, device=DEVICE[backend])
    for scores, expected in (
        ((0.5, 2.0, -1.0), (0.175, 0.786, 0.039)),
        ((0.8, 0.54, 0.74, 0.12, 0.36), (0.259, 0.200, 0.244, 0.131, 0.167)),
    ):
        n = len(scores)
        zeros = torch.zeros(1, n, 4, device=DEVICE[backend])
        bias = torch.tensor(scores, device=DEVICE[backend]).view(1, 1, n)
        value = torch.eye(n, device=DEVICE[backend]).unsqueeze(0)
        context, weights = attnfast.dot_attention(
            zeros[:, :1], zeros, value, bias=bias, need_weights=True, backend=backend
        )
        for got in (context, weights):
            assert torch.equal(got.cpu().flatten().round(decimals=3), torch.tensor(expected))


def test_temperature_divides_score_and_bias(backend):
    args = inputs(Case("tanh", 2, 3, 5, 8, 8, terms=("bias",)), DEVICE[backend])
    warm = everything(args, temperature=2.0, backend=backend)
    halved = {
        k: v / 2 if k in ("score_vector", "bias") else v for k, v in args.items() if v is not None
    }
    half = everything({**args, **halved}, backend=backend)
    for a, b in zip(warm, half):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("terms", [(), ("bias",)])
@pytest.mark.parametrize("size", [(3, 5, 8, 8), (9, 20, 64, 64)])
def test_scale_multiplies_the_query(size, terms, backend):
    """Also in the gradients, whether that of the score is wanted for itself (the bias) or not."""
    case = Case("dot", 2, *size, terms=terms)
    args = inputs(case, DEVICE[backend])
    args.pop("score_vector")
    dot = functools.partial(attnfast.dot_attention, backend=backend)
    got = results(case, args, lambda **a: dot(**a, scale=0.3)[:1])
    want = results(case, args, lambda query, **a: dot(0.3 * query, **a, scale=1.0)[:1])
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, msg=key)


@pytest.mark.parametrize("scale", [0.0, 1e-50])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter
def test_a_scale_of_0_hides_no_nan(scale, backend):
    """Also one that float32 rounds to 0; a GEMM does not read matrices with such a factor."""
    case = Case("dot", 1, 9, 20, 64, 64)
    args = inputs(case, DEVICE[backend])
    args.pop("score_vector")
    args["query"].data[0, 0, 0] = math.nan

    def of(backend):
        dot = functools.partial(attnfast.dot_attention, scale=scale, backend=backend)
        return results(case, args, lambda **a: dot(**a)[:1])

    got, want = of(backend), of("reference")
    for name, value in want.items():
        assert torch.equal(got[name].isnan(), value.isnan()), name


@pytest.mark.parametrize("columns", [8, 600])
def test_results_do_not_depend_on_what_is_asked(columns, backend):
    args = inputs(Case("tanh", 2, 5, 17, 8, columns, terms=("lengths",)), DEVICE[backend])
    with torch.no_grad():
        full = everything(args, backend=backend)
        context, weights = attend(args, backend=backend)
    assert weights is None
    torch.testing.assert_close(context, full[0])


@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_rows_for_all_processors(score, monkeypatch):
    """Triton takes fewer rows at a time where a GPU would have more processors than programs."""
    if reason := unsupported_reason("triton", DEVICE["triton"], torch.float32):
        pytest.skip(reason)
    kernels = importlib.import_module("attnfast.kernels.attention")
    monkeypatch.setattr(kernels, "_processors", lambda device: 3)
    assert [kernels._shorter(64, 40, n, torch.device("cpu")) for n in (1, 2, 3)] == [16, 32, 64]
    judge(Case(score, 1, 40, 19, 24, 40), "triton")
    test_results_do_not_depend_on_what_is_asked(300, "triton")


@pytest.mark.parametrize("score", ["dot", "tanh"])
@pytest.mark.parametrize("size", [(4, 70, 8, 8), (9, 70, 64, 64)])
def test_empty_rows(score, size, backend):
    case = Case(score, 5, *size, terms=("bias",))
    device = DEVICE[backend]
    mask = torch.ones(5, case.Tq, 70, dtype=torch.bool, device=device)
    mask[0, 1] = False  # one row
    mask[1, :, :66] = False  # the first block of every row
    lengths = torch.tensor([70, 70, 0, 70, 70], device=device)
    bias = inputs(case, device)["bias"].detach().expand_as(mask).clone()
    bias[0, 2] = -math.inf  # a float mask says the same
    got = run(case, backend, mask=mask, lengths=lengths, bias=bias.requires_grad_())
    assert all(not x.isnan().any() for x in got.values())
    for index in ((0, 1), (0, 2), (2,)):
        for x in ("context", "weights", "grad of query"):
            assert (got[x][index] == 0).all()
        assert (got["log_sum_exp"][index] == -math.inf).all()
    for x in ("grad of key", "grad of value", "grad of bias"):
        assert (got[x][2] == 0).all()
    torch.testing.assert_close(got["weights"][1].sum(-1), torch.ones(case.Tq, device=device))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # in Triton's interpreter
@pytest.mark.parametrize(("Tq", "Tk"), [(1, 40), (3, 40), (20, 40)])
@pytest.mark.parametrize("span", [False, True])
def test_a_row_that_has_diverged_is_nan(span, Tq, Tk, backend):
    """Where all scores are −∞ or one is +∞ or NaN, as a softmax; what it may not see is 0 still."""
    device = DEVICE[backend]
    args = inputs(Case("relu", 2, Tq, Tk, 9, 5, terms=("bias",)), device)
    weight, key = -args["score_vector"].detach().abs() - 0.1, args["key"].detach().clone()
    key[0], key[1, 7] = math.inf, -math.inf  # scores are all −∞ there, and usual here
    mask = torch.ones(2, Tq, Tk, dtype=torch.bool, device=device)
    mask[:, :, 25:30] = False
    bias = args["bias"].detach().expand_as(mask).clone()
    bias[..., 10:14] = -math.inf
    if Tq == 20:
        mask[0, 4] = False  # an empty row
        bias[1, 5, 15], bias[1, 6, 21], bias[1, 7] = math.inf, math.nan, torch.finfo(bias.dtype).min
    changed = {"score_vector": weight, "key": key, "bias": bias, "mask": mask}
    if span:
        changed["span"] = attnfast.Span(window=Tk - 10)
    changed["need_statistics"] = True
    want = everything({**args, **changed}, backend="reference")
    assert want[1][0, 0].isnan().any() and want[1][1, 0].isfinite().all()
    got = everything({**args, **changed}, backend=backend)
    for x, y in zip(got, want, strict=True):
        x, y = (z.masked_fill(z == math.inf, math.nan) for z in (x, y))  # a row's log-sum-exp
        torch.testing.assert_close(x, y, equal_nan=True)
    context = attend({**args, **changed}, backend=backend)[0]  # without weights to return
    torch.testing.assert_close(context, want[0], equal_nan=True)


def assert_same(a, b, case, backend):
    """Assert equal bits; a library's product, where it was NaN, is summed in another order."""
    if backend == "triton" or (case.Tq > 8 and (case.score == "dot" or backend == "cuda")):
        torch.testing.assert_close(a, b)
    else:
        assert torch.equal(a, b)


@pytest.mark.parametrize("score", ["dot", "tanh"])
@pytest.mark.parametrize("size", [(5, 40, 16, 8), (9, 40, 64, 64)])
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_what_is_not_seen_changes_nothing(by, score, size, backend):
    """NaN beyond a length, under a mask or where the bias is −inf, in keys and values."""
    case = Case(score, 2, *size, terms=("bias",))
    device = DEVICE[backend]
    mask = torch.ones(2, case.Tq, 40, dtype=torch.bool, device=device)
    mask[:, :, 3] = False
    bias = inputs(case, device)["bias"].detach().clone()
    bias[..., 3] = -math.inf
    terms = {"mask": mask} if by == "mask" else {"bias": bias.requires_grad_()}
    lengths = torch.tensor([40, 31], device=device)
    hidden = torch.zeros(2, 40, 1, dtype=torch.bool, device=device)
    hidden[:, 3], hidden[1, 31:] = True, True
    clean = inputs(case, device)
    dirty = {
        k: clean[k].detach().masked_fill(hidden, math.nan).requires_grad_()
        for k in ("key", "value")
    }
    a = run(case, backend, lengths=lengths, **terms)
    b = run(case, backend, lengths=lengths, **terms, **dirty)
    for key, value in a.items():
        if backend == "triton" and score == "tanh":
            # its backward shares a reciprocal between two keys, one of which may be hidden
            torch.testing.assert_close(value, b[key], msg=key)
        else:
            assert_same(value, b[key], case, backend)
    context = attend({**clean, **dirty, **terms, "lengths": lengths}, backend=backend)[0]
    torch.testing.assert_close(context, a["context"])  # without weights to return


@pytest.mark.parametrize("score", ["dot", "tanh"])
@pytest.mark.parametrize("size", [(3, 20, 16, 8), (9, 20, 64, 64)])
def test_a_row_is_not_touched_by_what_others_see(score, size, backend):
    """Row 0 may not see the one key and value that are NaN; its results stay the same."""
    if backend == "reference":
        pytest.skip("the oracle is plain PyTorch, where 0 · NaN is NaN")
    if backend == "triton":
        pytest.xfail("rows of a tile share a product, where 0 · NaN is NaN")
    case = Case(score, 1, *size)
    device = DEVICE[backend]
    mask = torch.ones(1, case.Tq, 20, dtype=torch.bool, device=device)
    mask[0, 0, 7] = False
    clean = inputs(case, device)
    dirty = {k: clean[k].detach().clone() for k in ("key", "value")}
    for x in dirty.values():
        x[0, 7] = math.nan
        x.requires_grad_()
    a, b = run(case, backend, mask=mask), run(case, backend, mask=mask, **dirty)
    for key in ("context", "weights", "log_sum_exp", "grad of query"):
        assert_same(a[key][0, 0], b[key][0, 0], case, backend)
        if key != "grad of query" or score == "dot":
            assert b[key][0, 1].isnan().any(), key


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # in Triton's interpreter
@pytest.mark.parametrize("Tq", [1, 3, 20])
def test_what_relu_may_not_see_may_be_infinite(Tq, backend):
    """Its slope there is not 0, as that of tanh is."""
    case = Case("relu", 2, Tq, 9, 33, 5)
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    clean = inputs(case, DEVICE[backend])
    mask = torch.ones(2, 1, 9, dtype=torch.bool, device=DEVICE[backend])
    mask[1, :, 4:7] = False
    key = clean["key"].detach().clone()
    key[1, 4:7] = math.inf
    a, b = run(case, backend, mask=mask), run(case, backend, mask=mask, key=key.requires_grad_())
    for name in a:
        assert_same(a[name], b[name], case, backend)


def test_an_empty_row_beside_a_nan():
    """The other rows see the value that is NaN, and no weight of theirs is 0."""
    args = inputs(Case("dot", 1, 9, 20, 64, 64))
    args["value"].detach()[0, 7] = math.nan
    mask = torch.ones(1, 9, 1, dtype=torch.bool)
    mask[0, 0] = False
    context = attend(args, mask=mask, backend="cpu")[0]
    assert (context[0, 0] == 0).all()
    assert context[0, 1:].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_a_row_that_is_nan_leaves_alone_what_it_may_not_see(score, backend):
    """Row 0 sees the key that is NaN and nothing else, row 1 the other."""
    device = DEVICE[backend]
    args = inputs(Case(score, 1, 2, 2, 16, 8), device)
    args["key"] = args["key"].detach().clone()
    args["key"][0, 0] = math.nan
    args["key"].requires_grad_()
    mask = torch.eye(2, dtype=torch.bool, device=device).unsqueeze(0)
    context, weights, _ = everything(args, mask=mask, backend=backend)
    assert torch.equal(weights[0, :, 1].cpu(), torch.tensor([0.0, 1.0]))
    grads = torch.autograd.grad(context[:, 1].sum(), [args["key"], args["value"]])
    for grad in grads:
        assert grad[0, 1].isfinite().all()


@pytest.mark.parametrize("factor", [1e4, -5e4])
def test_large_scores(factor, backend):
    case = Case("tanh", 2, 3, 33, 16, 8)
    args = inputs(case, DEVICE[backend])
    weight = args["score_vector"].detach() * factor
    wanted_args = {**inputs(case), "score_vector": weight.cpu()}
    double = {k: v.detach().double() for k, v in wanted_args.items() if v is not None}
    wanted = eager(**double)
    with torch.no_grad():
        plain = eager(**wanted_args)
        got = everything({**args, "score_vector": weight}, backend=backend)
    got, wanted, plain = (dict(zip(NAMES, outputs)) for outputs in (got, wanted, plain))
    check(case, got, wanted, [plain])


@pytest.mark.parametrize(
    ("q", "k"),
    [
        (8.0, 8.0),
        (18.0, 18.0),
        (10.8, 10.9),
        (21.7, -21.7),
        (30.0, -29.0),
        (-300.0, 299.5),
        (1e30, 1.0),
    ],
)
def test_factored_domain(q, k, backend):
    """About the edge of the factored tanh and beyond: all features, or an enormous one."""
    case = Case("tanh", 2, 5, 19, 24, 8)
    args = {x: v.detach() for x, v in inputs(case).items() if v is not None}
    features = slice(None) if q == k else 5
    args["query"][:, :, features] += q
    args["key"][:, ::2, features] += k
    judge_on(case, args, backend)


def judge_on(case, args, backend):
    leaves = {x: v.clone().requires_grad_() for x, v in args.items()}
    double = {x: v.double().requires_grad_() for x, v in args.items()}
    device = DEVICE[backend]
    got = results(
        case,
        {x: v.detach().to(device).requires_grad_() for x, v in leaves.items()},
        lambda **a: everything(a, backend=backend),
    )
    check(case, got, results(case, double, eager), [results(case, leaves, eager)])


@pytest.mark.filterwarnings("ignore:overflow")  # an infinite product, of which the reciprocal is 0
@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize(
    "small", [slice(1, None, 2), slice(None, None, 2), slice(8, 32), slice(None)]
)
@pytest.mark.parametrize("factor", [0.0, 1e-8, 1e-30])
def test_weights_that_vanish(factor, small, offset, backend):
    """Of one feature of a pair, of many, of all: a factored path may divide by a weight."""
    if backend == "triton" and factor == 1e-8 and DEVICE["triton"].type == "cpu":
        pytest.skip("slow in an interpreter, and between the other two")
    case = Case("tanh", 2, 18, 19, 48, 8)
    args = {x: v.detach() for x, v in inputs(case).items() if v is not None}
    args["score_vector"][small] *= factor
    for side in ("query", "key"):
        args[side][:, ::2] += offset
    judge_on(case, args, backend)


def test_a_dot_is_scaled_as_pytorch_scales_it(backend):
    query, key, value = (torch.randn(2, n, 16, device=DEVICE[backend]) for n in (3, 5, 5))
    context, _ = attnfast.dot_attention(query, key, value, backend=backend)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(context, want, rtol=1e-5, atol=1e-5)


def test_a_temperature_divides_the_weight(backend):
    args = inputs(Case("tanh", 2, 3, 5, 8, 4), DEVICE[backend])
    leaves = [args[k] for k in ("query", "key", "value", "score_vector")]
    query, key, value, weight = leaves
    warm, _ = attnfast.additive_attention(*leaves, temperature=2.0, backend=backend)
    halved, _ = attnfast.additive_attention(query, key, value, weight / 2, backend=backend)
    for got, want in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (warm, halved))):
        torch.testing.assert_close(got, want)


@torch.no_grad()
@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_a_context_alone_knows_nothing_of_keys_unseen(score, backend):
    """Without weights to return, and nothing kept for a backward."""
    args = inputs(Case(score, 2, 3, 40, 16, 8), DEVICE[backend])
    args["mask"] = (torch.arange(40, device=DEVICE[backend]) % 3 != 1).expand(2, 3, 40)
    want = attend(args, need_weights=True, backend=backend)[0]
    args["value"] = args["value"].masked_fill(~args["mask"][:, :1].mT, math.nan)
    torch.testing.assert_close(attend(args, backend=backend)[0], want)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_context_lies_in_memory_as_its_query(order, backend):
    sizes = [(2, 3, 4)[axis] for axis in order]
    back = [order.index(axis) for axis in range(3)]
    query = torch.randn(*sizes, 8, device=DEVICE[backend]).permute(*back, 3)
    key = torch.randn(2, 3, 5, 8, device=DEVICE[backend])
    context, _ = attnfast.dot_attention(query, key, key, backend=backend)
    assert backend == "reference" or context.stride() == query.stride()


def test_only_a_weight_wants_its_gradient(backend):
    args = inputs(Case("tanh", 2, 3, 5, 8, 4), DEVICE[backend])
    query, key, value, weight = (args[k] for k in ("query", "key", "value", "score_vector"))
    grads = []
    for leaves in ((query, key, value), (x.detach() for x in (query, key, value))):
        context, _ = attnfast.additive_attention(*leaves, weight, backend=backend)
        grads.append(torch.autograd.grad(context.sin().sum(), weight)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("k", [-12.3, -1e-3, 0.0, 0.7, 10.9, 21.8, -40.0])
def test_bound_on_the_error_of_a_tanh(k, backend):
    """The log-sum-exp of one key is its score, here a tanh alone: the bound of the docstring."""
    query = torch.cat([torch.linspace(-45, 45, 300), -k + torch.linspace(-3, 3, 300)])
    query = query.view(1, -1, 1).to(DEVICE[backend])
    key = torch.full_like(query[:, :1], k)
    weight = torch.ones(1, device=query.device)
    tanh = attnfast.additive_attention(query, key, key, weight, backend=backend).log_sum_exp
    exact = torch.tanh(query.double() + key.double()).squeeze(-1)
    assert (tanh - exact).abs().max() <= 4e-7


def test_a_vanishing_weight_of_a_saturated_feature(backend):
    """It shares a reciprocal with one that counts, and takes nothing from it."""
    query = torch.tensor([0.3, 10.0] * 4, device=DEVICE[backend]).view(1, 1, 8)
    weight = torch.tensor([1.0, 1e-25] * 4, device=DEVICE[backend])
    result = attnfast.additive_attention(query, query, query, weight, backend=backend)
    torch.testing.assert_close(result.log_sum_exp.item(), 4 * math.tanh(0.6), rtol=2e-6, atol=0)


def test_half_inputs_of_256(backend):
    """Scores past 65504: float16 in, float32 inside."""
    case = Case("dot", 1, 2, 5, 8, 8, dtype=torch.float16)
    args = dict(inputs(case, DEVICE[backend]))
    args["query"] = torch.full_like(args["query"], 256.0)
    args["key"] = torch.full_like(args["key"], 256.0)
    _, weights, log_sum_exp = everything(args, backend=backend)
    assert torch.allclose(weights.float(), torch.full_like(weights, 0.2).float(), atol=1e-3)
    assert torch.allclose(log_sum_exp, torch.full_like(log_sum_exp, 8 * 256.0**2 + math.log(5)))


@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_offsets_past_two_to_the_31(score, backend):
    """The second sequence lies 2³¹ elements after the first; only the pages touched exist."""
    args = inputs(Case(score, 2, 3, 5, 8, 8, terms=("mask", "bias")), DEVICE[backend])
    far = dict(args)
    for key in ("query", "key", "value", "mask", "bias"):
        x = args[key].detach()
        room = torch.empty(2**31 + 4096, dtype=x.dtype, device=x.device)
        strides = (2**31, *x.stride()[1:])
        far[key] = room.as_strided(x.shape, strides).copy_(x)
        if x.is_floating_point():
            far[key].requires_grad_()
        want = everything(args, backend=backend)
        got = everything(far, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(want, got)), key
        far[key] = args[key]


@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_deterministic(score, backend):
    repeats = (250, 50) if backend == "cpu" else (3, 2)
    case = Case(score, 3, 33, 65, 64, 40, terms=("lengths",))
    if backend == "triton" and DEVICE["triton"].type == "cpu":
        case = Case(score, 2, 3, 17, 8, 8, terms=("lengths",))
    args = inputs(case, DEVICE[backend])
    with torch.no_grad():
        first = everything(args, backend=backend)
        for _ in range(repeats[0]):
            again = everything(args, backend=backend)
            assert all(torch.equal(a, b) for a, b in zip(first, again))
    grads = run(case, backend)
    for _ in range(repeats[1]):
        assert all(torch.equal(a, b) for a, b in zip(grads.values(), run(case, backend).values()))


def test_threads_and_batch_do_not_change_a_row():
    case = Case("tanh", 6, 33, 65, 64, 40)
    args = {k: v.detach() for k, v in inputs(case).items() if v is not None}
    whole = attnfast.additive_attention(**args)[0]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(whole, attnfast.additive_attention(**args)[0])
    finally:
        torch.set_num_threads(threads)
    one = {k: v if k == "score_vector" else v[:1] for k, v in args.items()}
    torch.testing.assert_close(whole[:1], attnfast.additive_attention(**one)[0])


@pytest.mark.parametrize(
    "shape", [(3, 600, 1024, 64, 16), (1, 1100, 1024, 64, 16), (2, 300, 1024, 64, 16, 3)]
)
def test_scores_that_are_not_returned_pass_in_parts(shape):
    """Several sequences at a time, or some rows of one: 2²⁰ scores, no more."""
    case = Case("dot", *shape, terms=("lengths", "bias"), seed=1, scale=0.5)
    args = {k: v if v is None else v.detach() for k, v in inputs(case).items()}
    args["lengths"] = torch.tensor([1024, 900, 777][: case.B])
    args["mask"] = torch.rand(case.B, *case.heads, case.Tq, case.Tk) > 0.3
    in_parts = attend(args, need_statistics=True, backend="cpu")
    whole = attend(args, need_weights=True, need_statistics=True, backend="cpu")
    torch.testing.assert_close(in_parts.context, whole.context)
    torch.testing.assert_close(in_parts.log_sum_exp, whole.log_sum_exp)
    for got, want in zip(in_parts.statistics, whole.statistics):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_no_heads():
    x = torch.empty(1, 0, 9, 64)
    context, weights = attnfast.dot_attention(x, x, x, need_weights=True)
    assert (context.shape, weights.shape) == ((1, 0, 9, 64), (1, 0, 9, 9))


def _double(case, backend):
    args = inputs(case, DEVICE[backend])
    names = [k for k, v in args.items() if v is not None and v.requires_grad]

    def call(*leaves, backend):
        return everything({**args, **dict(zip(names, leaves))}, backend=backend)

    return call, [args[k] for k in names]


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_gradcheck(score, layout, backend):
    if backend == "triton":
        pytest.skip("hundreds of calls; the table checks Triton's gradients against the oracle")
    case = Case(score, 2, 3, 4, 5, 3, None, torch.float64, ("mask", "bias"), layout)
    call, leaves = _double(case, backend)
    assert gradcheck(lambda *x: call(*x, backend=backend), leaves)


def test_second_derivatives(backend):
    call, leaves = _double(Case("tanh", 1, 2, 3, 4, 3, None, torch.float64), backend)
    if backend == "reference":
        assert gradgradcheck(lambda *x: call(*x, backend=backend)[:2], leaves)
        return
    context = call(*leaves, backend=backend)[0]
    (grad,) = torch.autograd.grad(context.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (grad.sum() + context.sum()).backward()  # a gradient penalty


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
def test_gradients_pass_through_vmap(backend):
    """There a tensor does not show that it requires a gradient."""
    if backend != "cpu" or unsupported_reason("cpu", DEVICE["cpu"], torch.float32):
        pytest.skip("PyTorch differentiates it, or it cannot run under vmap")
    query, key = (torch.randn(3, 1, n, 8, requires_grad=True) for n in (2, 5))
    score_vector = torch.randn(8)

    def attend(q, k):
        return attnfast.additive_attention(q, k, k, score_vector).context

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it runs sequence by sequence
        mapped = torch.vmap(attend)(query, key)
        wanted = torch.stack([attend(*pair) for pair in zip(query, key)])
        got, want = (torch.autograd.grad(x.square().sum(), [query, key]) for x in (mapped, wanted))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_forward_mode_raises(backend):
    if backend == "reference":
        pytest.skip("PyTorch differentiates it")
    args = inputs(Case("dot", 1, 2, 3, 4, 3), DEVICE[backend])
    with forward_ad.dual_level():
        query = args["query"].detach()
        args["query"] = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            attend(args, backend=backend)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(
            lambda x: attend({**args, "query": x}, backend=backend)[0], (query,), (query,)
        )


@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_opcheck(score, backend):
    if backend == "reference":
        pytest.skip("not a registered op")
    args = inputs(Case(score, 2, 3, 5, 8, 7, terms=("lengths", "mask", "bias")), DEVICE[backend])
    args = {k: None if v is None else v.detach() for k, v in args.items()}
    ops = getattr(torch.ops, f"attnfast_{backend}")
    call = AttentionInputs(**args, scale=0.5, score=score, need_statistics=True, need_weights=True)
    torch.library.opcheck(ops.attention.default, tuple(call))
    result = ops.attention(*call)
    needs = ("need_grad_query", "need_grad_key", "need_grad_score")
    saved = {x: getattr(call, x) for x in AttentionInputs._fields if x in AttentionBackward._fields}
    saved["weights"] = result[1]
    grads = {f"grad_{x}": torch.randn_like(y) for x, y in zip(AttentionOutputs._fields, result[:3])}
    for grad_score, *needed in (
        (None, True, True, True),
        (None, True, False, False),
        (result[1], False, True, False),  # begins at the gradient of the scores
    ):
        fields = {**saved, **grads, "grad_score": grad_score, **dict(zip(needs, needed))}
        torch.library.opcheck(ops.attention_backward.default, tuple(AttentionBackward(**fields)))
    args = inputs(Case(score, 2, 3, 5, 8, 7, H=2, layout="time first"), DEVICE[backend])
    args = {k: None if v is None else v.detach() for k, v in args.items()}
    torch.library.opcheck(ops.attention.default, tuple(AttentionInputs(**args, score=score)))


@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_compile(score):
    def loss(args):
        context, weights, log_sum_exp = everything(args)
        return context.sum() + weights.square().sum() + log_sum_exp.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for Tk in (5, 9, 17):
        args = inputs(Case(score, 2, 3, Tk, 8, 8, terms=("lengths",)))
        leaves = [v for v in args.values() if v is not None and v.requires_grad]
        want = torch.autograd.grad(loss(args), leaves)
        got = torch.autograd.grad(compiled(args), leaves)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b)


def test_export():
    class Attend(torch.nn.Module):
        def forward(self, query, key, value, score_vector):
            return attnfast.additive_attention(query, key, value, score_vector)[0]

    args = [v.detach() for v in inputs(Case("tanh", 2, 3, 5, 8, 8)).values() if v is not None]
    program = torch.export.export(Attend(), tuple(args))
    torch.testing.assert_close(program.module()(*args), Attend()(*args))


def test_fake_tensors():
    """Shapes without numbers, as tracing uses them."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        args = {k: v for k, v in inputs(Case("tanh", 2, 3, 5, 8, 7)).items() if v is not None}
        args["lengths"] = torch.tensor([5, 2])
        context = attnfast.additive_attention(**args)[0]
        assert context.shape == (2, 3, 7)
        context.sum().backward()
        assert args["key"].grad.shape == (2, 5, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_casts_every_narrower_type(dtype):
    x = torch.randn(2, 3, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert attnfast.dot_attention(x, x, x)[0].dtype == torch.bfloat16


def test_autocast_takes_mixed_dtypes():
    args = inputs(Case("tanh", 2, 3, 5, 8, 8))
    args["query"] = args["query"].detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        context, _ = attend(args)
    assert context.dtype == torch.bfloat16


GOOD = Case("tanh", 2, 3, 5, 8, 7)


def test_a_backend_asked_for_is_never_replaced():
    args = inputs(GOOD)
    with pytest.raises(
        RuntimeError, match="backend 'cuda' cannot run this call: torch sees no CUDA"
    ):
        attend(args, backend="cuda")


def test_graph_is_freed():
    """No output is kept alive by the autograd context of its own graph."""
    import gc
    import weakref

    args = inputs(GOOD)
    context = attend(args)[0]
    node = weakref.ref(context)
    gc.disable()
    try:
        del context
        assert node() is None
    finally:
        gc.enable()


def test_words_of_an_enumeration():
    """A member that is its word."""

    class Word(str, enum.Enum):
        ACTIVATION, BACKEND = "relu", "cpu"

    args = {k: v for k, v in inputs(Case("tanh", 2, 3, 5, 8, 7)).items() if v is not None}
    words = {"activation": Word.ACTIVATION, "backend": Word.BACKEND}
    want = attnfast.additive_attention(**args, activation="relu", backend="cpu")
    assert torch.equal(attnfast.additive_attention(**args, **words).context, want.context)


def test_what_another_device_prepared():
    ops, x = torch.ops.attnfast_cpu, torch.ones(1, 2, 4)
    prepared = ops.key_exponentials(x, None, "tanh").to("meta")
    call = AttentionInputs(x, x, x, torch.ones(4), key_exponentials=prepared, score="tanh")
    with pytest.raises(
        ValueError, match="key_exponentials must be on the query's device cpu, got meta"
    ):
        ops.attention(*call)
