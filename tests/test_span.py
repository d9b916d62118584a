"""Spans on every backend, against the oracle with a dense mask of the same keys."""

import itertools
import math
import random
from dataclasses import replace

import attention_cases
import pytest
import torch
from attention_cases import (
    CPU,
    DEVICE,
    Case,
    attend,
    check,
    eager,
    exact,
    frozen,
    inputs,
    losses,
    oracle_of,
    results,
    runnable,
    small,
)

import attnfast
from attnfast import Span
from attnfast._utils.benchmark import peak_memory
from attnfast.ops import dispatch
from attnfast.ops.attention import AttentionInputs

SPANS = (
    Span(window=(2, 3)),
    Span(window=0),
    Span(window=5, causal=True),
    Span(causal=True),
    Span(window=(None, 2)),
    Span(window=(0, None)),
    Span(stride=4),
    Span(stride=4, fixed=True),
    Span(stride=3, causal=True),
    Span(stride=3, fixed=True, causal=True),
    Span(window=(9, 6), stride=3),
    Span(window=7, stride=2, fixed=True),
    Span(stride=75),
)
STEADY = (None, "end", 3, -2)
POSITIONS = (*STEADY, "diagonal", "predicted")


def mask_of(span, p, Tk, lengths=None):
    """Return a dense mask ``[.., Tq, Tk]`` from the conditions as Span's docstring states them."""
    j, p = torch.arange(Tk), p.double().unsqueeze(-1)
    left, right = span.window
    seen = torch.ones(*p.shape[:-1], Tk, dtype=torch.bool)
    if left is not None:
        seen = seen & (p - left <= j)
    if right is not None:
        seen = seen & (j <= p + right)
    if span.causal:
        seen = seen & (j <= p)
    if span.stride > 1:
        seen = seen & ((j if span.fixed else j - p) % span.stride == 0)
    return seen


def place(position, case, lengths):
    """Return the argument ``position`` and what it stands for, a tensor of the rows' axes."""
    i = torch.arange(case.Tq).double()
    if position == "predicted":
        g = torch.Generator().manual_seed(case.seed)
        p = torch.rand(case.B, case.Tq, generator=g, dtype=torch.float64) * (case.Tk + 8) - 4
        p = p.float().double()
        return p.float(), p if case.H is None else p.unsqueeze(1)
    if position == "diagonal":
        if lengths is None:
            return position, i * (case.Tk / max(case.Tq, 1))
        p = i * lengths.view(-1, 1) / case.Tq
        return position, p if case.H is None else p.unsqueeze(1)
    shift = {None: 0, "end": case.Tk - case.Tq}.get(position, position)
    return position, i + shift


def judge(case, span, position, backend, freeze=False):
    """Check a backend's outputs and gradients; ``span`` may be one for each head.

    With frozen keys the query's gradient alone is asked for.
    """
    args = inputs(case, DEVICE[backend])
    if freeze:
        args = frozen(args)
    argument, p = place(position, case, inputs(case)["lengths"])
    if isinstance(argument, torch.Tensor):
        argument = argument.to(DEVICE[backend])
    spans = [span] if isinstance(span, Span) else span
    mask = torch.stack([mask_of(x, p, case.Tk) for x in spans], -3)
    mask = mask if case.H is not None else mask.squeeze(-3)
    if case.H is not None and mask.dim() == 5:  # [B, 1, H, Tq, Tk]
        mask = mask.squeeze(1)

    def seen(how):
        def masked(mask=None, **args):
            both = allowed if mask is None else mask & allowed
            return how(**args, mask=both)

        allowed = mask.expand(case.B, *case.heads, case.Tq, case.Tk)
        return masked

    span = list(span) if isinstance(span, tuple) else span
    got = results(
        case, args,
        lambda **a: attend(
            a, span=span, position=argument, backend=backend, need_weights="dense"
        ),
    )  # fmt: skip
    wanted = oracle_of(case, seen(exact))
    if freeze:
        wanted = {k: v for k, v in wanted.items() if k in got}
    check(case, got, wanted, losses(case, seen(eager)))


SIZES = ((17, 17), (33, 20), (9, 70), (1, 40), (70, 129), (3, 2))


def cases():
    """Every span, over positions, sizes, terms, layouts, heads and dtypes."""
    draw = random.Random(0)
    sizes, terms = itertools.cycle(SIZES), itertools.cycle(attention_cases.TERMS)
    layouts = itertools.cycle(attention_cases.LAYOUTS)
    out = []
    for score, span in itertools.product(("dot", "tanh"), SPANS):
        steady = span.stride > 1 and not span.fixed
        for position in draw.sample(STEADY if steady else POSITIONS, 3):
            A, Dv = draw.choice((1, 8, 33, 64)), draw.choice((1, 7, 16, 40))
            H = draw.choice((None, None, 1, 3))
            case = Case(
                score, 2, *next(sizes), A, Dv, H, terms=next(terms), layout=next(layouts),
                seed=len(out), weight_per_head=H is not None,
            )  # fmt: skip
            out.append((case, span, position))
        dtype = draw.choice((torch.float64, torch.bfloat16, torch.float16))
        half = Case(score, 2, 17, 20, 8, 8, dtype=dtype, terms=("lengths", "mask"))
        case = replace(half, seed=len(out))
        out.append((case, span, None))
    for span in SPANS[::3]:
        case = Case("relu", 2, 17, 20, 33, 8, draw.choice((None, 3)), seed=len(out))
        out.append((case, span, None))
    heads = (Span(window=1), Span(stride=4), Span(window=1), Span(stride=4, fixed=True), Span())
    for score in ("dot", "tanh"):
        case = Case(score, 2, 19, 23, 8, 8, 5, terms=("lengths", "bias"), weight_per_head=True)
        out.append((case, heads, None))
        case = Case(score, 2, 19, 23, 8, 16, 3, layout="time first")
        out += [(case, span, None) for span in (Span(window=3), Span(stride=4))]
        out += [
            (Case(score, 2, *shape), Span(window=3), None)
            for shape in ((0, 5, 8, 8), (3, 0, 8, 8), (9, 20, 0, 8), (9, 20, 8, 0))
        ]
        out.append((Case(score, 0, 9, 20, 8, 8), Span(stride=2), None))
    return out


def name(x):
    if isinstance(x, Case):
        sizes = "x".join(map(str, (x.B, *x.heads, x.Tq, x.Tk, x.A, x.Dv)))
        return f"{x.score}-{sizes}-{str(x.dtype)[6:]}-{'+'.join(x.terms)}"
    if isinstance(x, Span):
        steps = f"{'of' if x.fixed else 'by'}{x.stride}"
        return f"{x.window[0]}:{x.window[1]}{'c' if x.causal else ''}{steps}"
    return "heads" if isinstance(x, tuple) else str(x)


@pytest.mark.parametrize(("case", "span", "position"), cases(), ids=name)
def test_table(case, span, position, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    leave_out(backend, case.seed % 8 not in (0, 3))
    judge(case, span, position, backend)


NEAR_ZERO = [
    (one, span, None)
    for span in (Span(window=(2, 3)), Span(stride=4))
    for one in small(Case("tanh", 2, 17, 23, 33, 10, terms=("lengths",)))
]


@pytest.mark.parametrize(("case", "span", "position"), NEAR_ZERO, ids=str)
def test_inputs_near_zero(case, span, position, backend):
    leave_out(backend, span.stride > 1)
    judge(case, span, position, backend)


def leave_out(backend, when):
    """Skip in Triton's interpreter, which is slow, what says little of the kernels."""
    if when and backend == "triton" and DEVICE["triton"].type == "cpu":
        pytest.skip("left out in Triton's interpreter, which is slow")


def draw_span(draw):
    """A random span and a position that it can have."""
    side = lambda: draw.choice((None, 0, 1, draw.randint(0, 12), draw.randint(0, 90)))  # noqa: E731
    span = Span(
        window=draw.choice((None, draw.randint(0, 20), (side(), side()))),
        causal=draw.random() < 0.3,
        stride=draw.choice((1, 1, 1, 2, 3, 7, 20)),
        fixed=draw.random() < 0.5,
    )
    steady = span.stride > 1 and not span.fixed
    positions = (*STEADY, draw.randint(-50, 50), *(() if steady else ("diagonal", "predicted")))
    return span, draw.choice(positions)


@pytest.mark.parametrize("seed", range(8))
def test_fuzz(seed, backend):
    leave_out(backend, seed > 1)
    draw = random.Random(seed)
    count, most = (2, 4_000) if backend == "triton" else (32, 200_000)
    for case in attention_cases.fuzz(100 + seed, count, most):
        span, position = draw_span(draw)
        if runnable(backend, case) and (backend != "triton" or span.stride < 4):
            judge(case, span, position, backend)  # a failure prints the case


@pytest.mark.parametrize("span", [Span(window=3), Span(window=6, stride=3), Span(stride=2)])
def test_no_rows(span, backend):
    judge(Case("tanh", 1, 0, 130, 7, 1), span, None, backend)


SCORES = ("dot", "tanh")
SPAN = Span(window=(1, 2))


def weigh(args, span, backend, **options):
    """Context, compact weights and log-sum-exp."""
    options = {"need_weights": True, **options}
    return attention_cases.every(attend(args, span=span, backend=backend, **options))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "span", [SPAN, Span(stride=3), Span(stride=3, fixed=True), Span()], ids=name
)
def test_forms_of_the_weights(span, score, backend):
    leave_out(backend, span != SPAN)
    case = Case(score, 2, 5, 9, 8, 4, 3, terms=("lengths", "bias"))
    args = {k: v if v is None else v.detach() for k, v in inputs(case, DEVICE[backend]).items()}
    columns, dense, sparse = (
        weigh(args, span, backend, need_weights=form)[1] for form in (True, "dense", "sparse")
    )
    keys = span.key_indices(5, 9, lengths=args["lengths"]).expand(2, 5, -1).unsqueeze(1)
    assert columns.shape == (2, 3, 5, span.columns(9))
    assert torch.equal(sparse.to_dense(), dense)
    assert sparse._nnz() == 3 * (keys >= 0).sum()
    for i in range(columns.shape[-1]):
        key = keys[..., i].expand(2, 3, 5).unsqueeze(-1)
        at = dense.gather(-1, key.clamp_min(0)).masked_fill(key < 0, 0).squeeze(-1)
        assert torch.equal(columns[..., i], at)


@pytest.mark.parametrize("heads", [(0, 0, 1, 2), (1, 0, 2, 0)])
def test_sparse_weights_of_spans_by_head(heads):
    """They and their gradient are those of the dense ones."""
    spans = [(SPAN, Span(stride=3), Span())[i] for i in heads]
    case = Case("tanh", 2, 5, 9, 8, 4, 4, terms=("lengths",), weight_per_head=True)
    args = inputs(case)
    leaves = {k: v for k, v in args.items() if v is not None and v.is_floating_point()}
    weights = {}
    for form in ("dense", "sparse"):
        x = weigh(args, spans, "cpu", need_weights=form)[1]
        weights[form] = x if form == "dense" else x.to_dense()
    assert torch.equal(weights["sparse"], weights["dense"])
    ours, theirs = (
        torch.autograd.grad(x.square().sum(), list(leaves.values()), allow_unused=True)
        for x in weights.values()
    )
    assert any(x is not None and x.abs().sum() > 0 for x in ours)
    for a, b in zip(ours, theirs):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "span", [Span(), Span(window=4), Span(window=4, stride=2, fixed=True)], ids=name
)
@pytest.mark.parametrize("learned", [False, True])
def test_prior(learned, span, score, backend):
    """A Gaussian around the diagonal, or around positions that are learned, width included."""
    leave_out(backend, span != Span(window=4))
    case = Case(score, 2, 5, 9, 8, 4, terms=("lengths",))
    device = DEVICE[backend]

    def leaves(dtype, where):
        args = inputs(case, where)
        args = {
            k: v.to(dtype) if v is not None and v.is_floating_point() else v
            for k, v in args.items()
        }
        p = torch.linspace(-1, 8, 10, dtype=dtype, device=where).view(2, 5)
        sigma = torch.linspace(1, 2, 5, dtype=dtype, device=where)
        return args, p.requires_grad_(), sigma.requires_grad_()

    args, p, sigma = leaves(torch.float32, device)
    options = {"position": p, "sigma": sigma} if learned else {"position": "diagonal", "sigma": 1.5}
    got = weigh(args, span, backend, need_weights="dense", **options)
    exact, q, width = leaves(torch.float64, CPU)
    center = q if learned else torch.arange(5) * exact["lengths"].view(-1, 1) / 5
    width = width if learned else torch.tensor(1.5)
    prior = -((torch.arange(9) - center.unsqueeze(-1)) ** 2) / (2 * width.unsqueeze(-1) ** 2)
    mask = mask_of(span, center.detach(), 9)
    want = attention_cases.exact(**{**exact, "bias": prior, "mask": mask})
    for a, b in zip(got, want):
        torch.testing.assert_close(a.double().cpu(), b, atol=2e-5, rtol=1e-5)
    if not learned:
        return
    ours = torch.autograd.grad(got[0].square().sum(), [p, sigma, args["query"]])
    theirs = torch.autograd.grad(want[0].square().sum(), [q, width, exact["query"]])
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.double().cpu(), b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.0, -1.0])
@pytest.mark.parametrize("span", [SPAN, Span(causal=True)], ids=name)
def test_scale_of_any_sign(span, scale, backend):
    case = Case("dot", 2, 5, 9, 8, 4)
    args = {k: v for k, v in inputs(case, DEVICE[backend]).items() if k != "score_vector"}
    options = {"need_weights": "dense", "backend": backend, "span": span}
    got = results(case, args, lambda **a: attnfast.dot_attention(**a, scale=scale, **options))
    args = {k: v for k, v in inputs(case).items() if k != "score_vector"}
    options["backend"] = "reference"
    want = results(case, args, lambda **a: attnfast.dot_attention(**a, scale=scale, **options))
    for key, value in want.items():
        torch.testing.assert_close(got[key].cpu(), value, msg=key)


# Several blocks of 64 keys; more columns than keys; nothing to see.
STEPS = [
    (Case("tanh", 2, 1, 150, 16, 9, terms=("lengths",)), Span(window=(90, 40)), "predicted"),
    (Case("dot", 2, 1, 100, 16, 9, 2), Span(window=70), 3),
    (Case("relu", 2, 1, 140, 16, 9), Span(causal=True), "predicted"),
    (Case("tanh", 2, 1, 140, 16, 9), Span(window=(None, 2)), -40),
]


@pytest.mark.parametrize(("case", "span", "position"), STEPS, ids=lambda x: None)
def test_a_step_on_frozen_keys(case, span, position, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    judge(case, span, position, backend, freeze=True)


def test_a_row_ends_with_its_columns(backend):
    """The operator's contract: past the last column no key is seen, whatever the span says."""
    case = Case("dot", 2, 5, 9, 8, 4)
    bounds = torch.tensor([[0, 9], [2, 9], [-2, 9], [7, 9], [4, 4]]).expand(2, 5, 2)

    def run(device, dtype, name):
        args = inputs(case, device)
        q, k, v = (args[x].to(dtype) for x in ("query", "key", "value"))
        call = AttentionInputs(q, k, v, key_bounds=bounds.to(device), columns=3, need_weights=True)
        return results(case, args, lambda **_: dispatch.run_attention(call, name))

    exact = run(CPU, torch.float64, "reference")
    for key, value in run(DEVICE[backend], torch.float32, backend).items():
        torch.testing.assert_close(value.cpu().double(), exact[key].double(), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("score", ["dot", "tanh"])
@pytest.mark.parametrize("sigma", [None, 1.0])
@pytest.mark.parametrize("span", [None, Span(window=1), Span(causal=True), Span(window=(None, 9))])
def test_a_row_that_stands_nowhere_is_nan(span, sigma, score, backend):
    args = inputs(Case(score, 2, 3, 6, 4, 3), DEVICE[backend])
    position = torch.tensor([0.0, math.nan, 2.0], device=DEVICE[backend])
    got = attend(args, span=span, position=position, sigma=sigma, backend=backend)
    lost = torch.tensor([False, True, False]).expand(2, 3)
    assert torch.equal(got.context.isnan().any(-1).cpu(), lost)
    assert torch.equal(got.log_sum_exp.isnan().cpu(), lost)


def test_window_wider_than_the_keys(backend):
    """The columns are the window's all the same."""
    leave_out(backend, True)
    case = Case("tanh", 2, 5, 4, 8, 4, terms=("lengths", "mask", "bias"))
    args = inputs(case, DEVICE[backend])
    for span in (
        Span(window=9),
        Span(window=(0, 30), stride=2, fixed=True),
        Span(window=30, stride=3),
    ):
        judge(case, span, 1, backend)
        columns, dense = (
            weigh(args, span, backend, position=1, need_weights=form)[1] for form in (True, "dense")
        )
        keys = span.key_indices(5, 4, position=1, lengths=args["lengths"]).expand_as(columns)
        assert columns.shape[-1] == span.columns(4)
        assert torch.equal(columns.masked_fill(keys < 0, 0), columns)
        at = dense.gather(-1, keys.clamp_min(0)).masked_fill(keys < 0, 0)
        assert torch.equal(columns, at)


def test_positions_of_any_kind(backend):
    """int32, float16, far beyond both ends; no keys at all."""
    leave_out(backend, True)
    case = Case("dot", 1, 5, 9, 8, 4)
    args = inputs(case, DEVICE[backend])
    device = DEVICE[backend]
    want = weigh(args, SPAN, backend)
    for dtype in (torch.int32, torch.float16):
        got = weigh(args, SPAN, backend, position=torch.arange(5, device=device, dtype=dtype))
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    far = torch.full((5,), -(2**63), device=device)
    right = weigh(args, Span(window=(1, None)), backend, position=far)[1]
    torch.testing.assert_close(right.sum(-1), torch.ones_like(right[..., 0]))
    none = {**args, "key": args["key"][:, :0], "value": args["value"][:, :0]}
    mask = torch.ones(1, 5, 0, dtype=torch.bool, device=device)
    assert (weigh({**none, "mask": mask}, SPAN, backend)[0] == 0).all()


def test_prior_of_half_types_knows_its_keys(backend):
    """bfloat16 cannot count beyond 256: positions and keys are taken wider."""
    leave_out(backend, True)
    dtype = torch.bfloat16
    query, key = (torch.zeros(1, n, 8, dtype=dtype, device=DEVICE[backend]) for n in (1, 800))
    p = torch.tensor([[700.25]], device=DEVICE[backend])
    options = {"span": Span(window=4), "position": p, "sigma": 2.0, "need_weights": True}
    weights = attnfast.dot_attention(query, key, key, backend=backend, **options)[1]
    exact = torch.exp(-((torch.arange(697, 706) - 700.25) ** 2) / 8) * (torch.arange(9) < 8)
    torch.testing.assert_close(
        weights.float().cpu().view(-1), exact / exact.sum(), atol=5e-3, rtol=0
    )


@pytest.mark.parametrize("score", SCORES)
def test_empty_rows(score, backend):
    """Windows beyond the sequence and before it, and no key at all."""
    case = Case(score, 3, 5, 12, 8, 8)
    args = inputs(case, DEVICE[backend])
    device = DEVICE[backend]
    args["lengths"] = torch.tensor([12, 0, 4], device=device)
    position = torch.tensor([-9.0, 0.0, 3.0, 7.5, 40.0], device=device)
    got = results(case, args, lambda **a: weigh(a, SPAN, backend, position=position))
    assert all(not x.isnan().any() for x in got.values())
    for row in ((0, 0), (0, 4), (1,), (2, 3)):
        for x in ("context", "weights", "grad of query"):
            assert (got[x][row] == 0).all(), (x, row)
        assert (got["log_sum_exp"][row] == -math.inf).all()
    for x in ("grad of key", "grad of value"):
        assert (got[x][1] == 0).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "span", [SPAN, Span(stride=4), Span(window=0, stride=4), Span(causal=True)], ids=name
)
def test_what_is_not_seen_changes_nothing(span, score, backend):
    """NaN in keys and values that no row sees."""
    leave_out(backend, span.stride > 1)
    case = Case(score, 2, 6, 21, 16, 8, terms=("lengths",))
    device = DEVICE[backend]
    args = {**inputs(case, device), "lengths": torch.tensor([21, 13], device=device)}
    p = torch.arange(6) + 3
    hidden = ~mask_of(span, p, 21).any(0)
    hidden = hidden | (torch.arange(21) >= torch.tensor([[21], [13]]))
    hidden = hidden.unsqueeze(-1).to(device)
    assert hidden.any()
    dirty = {
        k: args[k].detach().masked_fill(hidden, math.nan).requires_grad_() for k in ("key", "value")
    }

    def run(**args):
        return weigh(args, span, backend, position=3)

    clean, dirty = results(case, args, run), results(case, {**args, **dirty}, run)
    for key, value in clean.items():
        if backend == "triton" and score == "tanh":  # a reciprocal shared with a hidden key
            torch.testing.assert_close(value, dirty[key], msg=key)
        else:
            assert torch.equal(value, dirty[key]), key


def test_a_window_wider_than_memory(backend):
    """What no sequence has costs nothing: only weights would have its columns."""
    q = torch.randn(1, 5, 8, device=DEVICE[backend])
    want = attnfast.dot_attention(q, q, q, backend=backend)[0]
    got = attnfast.dot_attention(q, q, q, span=Span(window=2**31 - 1), backend=backend)[0]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("score", SCORES)
def test_offsets_past_two_to_the_31(score, backend):
    """The second sequence lies 2³¹ elements after the first, its spans too."""
    args = inputs(Case(score, 2, 3, 5, 8, 8), DEVICE[backend])
    position = torch.tensor([[0, 2, 1], [4, 3, 1]], device=DEVICE[backend])
    want = weigh(args, SPAN, backend, position=position)
    for key in ("query", "key", "value"):
        x = args[key].detach()
        room = torch.empty(2**31 + 4096, dtype=x.dtype, device=x.device)
        far = room.as_strided(x.shape, (2**31, *x.stride()[1:])).copy_(x)
        got = weigh({**args, key: far}, SPAN, backend, position=position)
        assert all(torch.equal(a, b) for a, b in zip(want, got)), key


@pytest.mark.parametrize("score", SCORES)
def test_deterministic(score, backend):
    repeats, sizes = (250, 50), (70, 90, 24, 24)
    if backend != "cpu":
        repeats, sizes = (3, 2), (5, 9, 8, 8)
    case = Case(score, 2, *sizes, terms=("lengths",))
    args = inputs(case, DEVICE[backend])

    def run(**args):
        return weigh(args, SPAN, backend, position="diagonal")

    with torch.no_grad():
        first = run(**args)
        for _ in range(repeats[0]):
            assert all(torch.equal(a, b) for a, b in zip(first, run(**args)))
    grads = results(case, args, run)
    for _ in range(repeats[1]):
        again = results(case, args, run)
        assert all(torch.equal(a, b) for a, b in zip(grads.values(), again.values()))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "span", [Span(window=5), Span(window=9, stride=4), Span(stride=64)], ids=name
)
def test_memory_is_that_of_the_keys_seen(span, score):
    """Nothing of size Tq·Tk is allocated, forward or backward; on the CPU."""
    T, A = 4096, 32  # as many features as a kernel takes at a time
    args = inputs(Case(score, 1, T, T, A, A))
    seen = T * span.columns(T)

    def run():
        context, *_ = weigh(args, span, "cpu")
        torch.autograd.grad(context.sum(), args["query"])

    run()
    inputs_size = 3 * T * A
    # weights, their gradient and whatever has the size of the inputs
    assert peak_memory(run, CPU) <= 4 * (3 * seen + 8 * inputs_size)


@pytest.mark.parametrize("score", SCORES)
def test_gradcheck(score, backend):
    if backend == "triton":
        pytest.skip("test_table compares its gradients")
    args = inputs(Case(score, 1, 3, 5, 3, 2, dtype=torch.float64), DEVICE[backend])
    leaves = [x for x in args.values() if x is not None]
    names = [k for k, x in args.items() if x is not None]

    def run(*leaves):
        return weigh({"score_vector": None, **dict(zip(names, leaves))}, SPAN, backend)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("score", SCORES)
def test_opcheck(score, backend):
    if backend == "reference":
        pytest.skip("not a registered op")
    args = inputs(Case(score, 2, 3, 5, 8, 7), DEVICE[backend])
    args = {k: None if v is None else v.detach() for k, v in args.items()}
    ops = getattr(torch.ops, f"attnfast_{backend}")
    bounds = torch.tensor([[[-1, 2], [0, 3], [2, 9]]], device=DEVICE[backend])
    tensors = [args[k] for k in ("query", "key", "value", "score_vector")]
    bias = torch.randn(2, 3, 3, device=DEVICE[backend])
    call = AttentionInputs(
        *tensors, bias, bias > -1, key_bounds=bounds, columns=3, scale=0.5, score=score,
        need_statistics=True, need_weights=True,
    )  # fmt: skip
    torch.library.opcheck(ops.attention.default, tuple(call))
    outputs = ops.attention(*call)
    grads = [torch.randn_like(x) for x in outputs[:3]]
    rest = (*tensors, None, bounds, 3, None, outputs[1], None, 0.5, score)
    last = ("softmax", True, True, True)
    torch.library.opcheck(ops.attention_backward.default, (*grads, *rest, *last))


@pytest.mark.parametrize("span", [SPAN, Span(stride=3)], ids=name)
def test_compile(span):
    def loss(args, position):
        context, weights, _ = weigh(args, span, None, position=position, sigma=2.0)
        return context.sum() + weights.square().sum()

    phases = span.stride > 1 and not span.fixed
    compiled = torch.compile(loss, fullgraph=True, dynamic=not phases)
    for Tk in (6,) if phases else (5, 9):
        args = inputs(Case("tanh", 2, 3, Tk, 8, 8, terms=("lengths",)))
        leaves = [v for v in args.values() if v is not None and v.requires_grad]
        want = torch.autograd.grad(loss(args, "end"), leaves)
        got = torch.autograd.grad(compiled(args, "end"), leaves)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_a_bias_that_heads_share(dtype, backend):
    """It is rounded once, after it has been summed over rows and heads."""
    leave_out(backend, True)
    args = inputs(Case("dot", 2, 40, 30, 16, 8, 8, dtype=dtype), DEVICE[backend])
    spans = [Span(window=n) for n in range(3, 11)]
    bias = torch.randn(2, 1, 1, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    grads = []
    for leaf in (bias.to(DEVICE[backend]), bias.to(DEVICE[backend]).float()):
        leaf.requires_grad_()
        context, _ = attend({**args, "bias": leaf}, span=spans, backend=backend)
        grads += torch.autograd.grad(context.float().square().sum(), [leaf])
    assert torch.equal(grads[0], grads[1].to(dtype))


@pytest.mark.parametrize("T", [1.0, 2.5])
def test_a_prior_is_a_bias_like_another(T, backend):
    """It is added to the one given, and divided by the temperature with it."""
    args = inputs(Case("tanh", 2, 3, 7, 8, 5, terms=("bias",)), DEVICE[backend])
    p, sigma = torch.tensor([1.0, 2.0, 5.0], device=DEVICE[backend]), 1.7
    j = torch.arange(7.0, device=p.device)
    prior = -(j - p.unsqueeze(-1)).square() / (2 * sigma**2)
    got = attend(args, position=p, sigma=sigma, temperature=T, backend=backend)[0]
    args["bias"] = args["bias"] + prior
    want = attend(args, temperature=T, backend=backend)[0]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("span", [Span(stride=3), Span(stride=3, fixed=True), Span(causal=True)])
def test_columns_of_a_span_without_an_end(span):
    """As many as the weights have, also where the stride does not divide the keys."""
    query, key = torch.randn(1, 7, 4), torch.randn(1, 8, 4)
    _, weights = attnfast.dot_attention(query, key, key, span=span, need_weights=True)
    assert weights.shape[-1] == span.columns(8) == -(-8 // span.stride)


# ---- a bump -------------------------------------------------------------------------------------


def test_a_bump_is_its_formula():
    lengths = torch.tensor([6, 3])
    found = attnfast.gaussian_bias(4, 6, 1.5, height=2.0, lengths=lengths, dtype=torch.float64)
    for b, n in enumerate(lengths.tolist()):
        for i in range(4):
            for j in range(6):
                wanted = 2 * math.exp(-((j - i * n / 4) ** 2) / (2 * 1.5**2))
                assert float(found[b, i, j]) == pytest.approx(wanted)
    at = torch.tensor([0.5, 4.0])
    assert float(attnfast.gaussian_bias(2, 6, 1.0, position=at)[1, 4]) == 1
    assert attnfast.gaussian_bias(2, 6, 1.0, position="end").argmax(-1).tolist() == [4, 5]


def test_a_bump_is_learnt():
    given = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    height = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def of(position, sigma, height):
        return attnfast.gaussian_bias(
            3, 5, sigma + 1, height=height, position=3 * position, dtype=torch.float64
        )

    assert torch.autograd.gradcheck(of, (*given, height))


@pytest.mark.parametrize("spans", [None, Span(window=2)])
def test_a_bump_draws_attention_to_the_diagonal(spans, backend):
    x = torch.zeros(2, 6, 4, device=DEVICE[backend])
    lengths = torch.tensor([6, 6], device=x.device)
    bump = attnfast.gaussian_bias(6, 6, 1.0, height=3.0, lengths=lengths)
    weights = attnfast.dot_attention(
        x, x, x, bias=bump, span=spans, need_weights="dense", backend=backend
    )[1]
    assert weights.argmax(-1).tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert (weights > 0).all() or spans is not None


def test_keys_of_positions_by_head_and_of_lengths():
    """The lengths are the batch's, whatever the number of heads."""
    position, lengths = torch.arange(24.0).view(2, 3, 4) % 6, torch.tensor([6, 2])
    keys = Span(window=1).key_indices(4, 6, position=position, lengths=lengths)
    for h in range(3):
        alone = Span(window=1).key_indices(4, 6, position=position[:, h], lengths=lengths)
        assert torch.equal(keys[:, h], alone)
