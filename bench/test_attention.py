"""Times attention against its peers: ``pytest bench --benchmark-json=bench.json``.

One benchmark is one shape in one direction. Its rounds are interleaved: before each timed call of
attnfast every peer is timed once, so that noise falls on all alike; the report takes medians.
A result is compared with the float64 oracle first, and a wrong one is not timed.
"""

from __future__ import annotations

from dataclasses import replace

import attention_cases
import pytest
import torch
from attention_cases import Case, attend, inputs
from compare import DECODERS, DEVICE, DIRECTIONS, compare, eager, fused, roofline, timed
from torch.nn.attention.flex_attention import flex_attention

from attnfast.analysis.diagnostics import row_statistics
from attnfast.decoding import attend as attend_to
from attnfast.decoding import prepare

SHAPES = {  # B, Tq, Tk, A, Dv
    "translation": (32, 50, 50, 512, 512),
    "speech": (16, 100, 400, 256, 512),
    "one step": (32, 1, 400, 512, 512),
    "one step, in cache": (32, 1, 50, 256, 256),
    "one step, one sentence": (1, 1, 50, 256, 256),
    "one sentence": (1, 50, 50, 512, 512),
    "long": (1, 1000, 1000, 128, 128),
    "short, many": (256, 20, 20, 128, 128),
    "few features": (64, 30, 30, 32, 32),
    "many features": (4, 64, 64, 1024, 1024),
}

FLEXIBLE = ("short, many", "long")  # of 128 features; each takes seconds to compile


def case_of(score: str, sizes: tuple[int, ...]) -> Case:
    """Return the case of a score; queries and keys are drawn so that dot scores are about 1."""
    if score == "dot":
        return Case("dot", *sizes, scale=sizes[3] ** -0.25)
    return Case("tanh", *sizes)


def scaled_dot_product(query, key, value, **_):
    """PyTorch's own fused attention; it takes four dimensions and returns no weights."""
    query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=1.0)
    return out.squeeze(1), None


def flexible():
    """Return FlexAttention of one head: score functions of q·k alone, and no weights."""
    flex = torch.compile(flex_attention, dynamic=False)

    def run(query, key, value, **_):
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return flex(query, key, value, scale=1.0).squeeze(1), None

    return run


def call(way, args: dict, grad: torch.Tensor | None):
    """Return a function that runs one direction."""
    leaves = [x for x in args.values() if x is not None and x.requires_grad]
    return timed(lambda: way(**args)[0], leaves if grad is not None else None, grad)


def refuse_wrong_results(case: Case, args: dict, ways: dict, grad: torch.Tensor) -> None:
    """Compare attnfast's first sequence with the oracle: rows of others do not touch it."""
    first = replace(case, B=1)
    names = [k for k in ("query", "key", "value") if args[k] is not None]

    def run(way, tensors, grad):
        with torch.enable_grad():
            context = way(**tensors)[0]
            grads = torch.autograd.grad(context, [tensors[k] for k in names], grad)
        return dict(zip(["context", *names], (context.detach()[:1], *(g[:1] for g in grads))))

    def part(dtype):
        return {
            k: None
            if v is None
            else (v if k == "score_vector" else v[:1]).detach().to("cpu", dtype)
            for k, v in args.items()
        }

    small, exact = (
        {k: attention_cases._leaf(v) for k, v in part(d).items()}
        for d in (torch.float32, torch.float64)
    )
    cut = grad[:1].cpu()
    wanted, plain = run(ways["eager"], exact, cut.double()), run(ways["eager"], small, cut)
    for name, way in ways.items():
        if name.startswith("attnfast"):
            attention_cases.check(first, run(way, args, grad), wanted, [plain])


#: Special functions and float32 instructions for each (query, key, feature), and instructions for
#: each (query, key, column of values); see the bounds in docs/performance.md.
OPERATIONS = {
    ("additive", "forward"): (0.5, 2.5, 1),
    ("additive", "forward + backward"): (1, 9, 3),
    ("dot", "forward"): (0, 1, 1),
    ("dot", "forward + backward"): (0, 3, 3),
}


def bound(case: Case, direction: str) -> float | None:
    """Return the least time of a call on this GPU: every tensor is read or written once a pass."""
    score = "dot" if case.score == "dot" else "additive"
    special, plain, more = OPERATIONS[score, direction]
    pairs, keys = case.B * case.Tq * case.Tk, case.B * case.Tk
    inputs = case.B * case.Tq * case.A + keys * (case.A + case.Dv)
    numbers = inputs + case.B * case.Tq * case.Dv + pairs
    numbers += (numbers + inputs) * (direction != "forward")
    return roofline(
        pairs * case.A * special, pairs * (case.A * plain + case.Dv * more), numbers * 4
    )


def measure(
    benchmark, case: Case, shape: str, direction: str, ways: dict, unlike: dict | None = None
) -> None:
    """Check attnfast's ways against the oracle, then time the first against all others.

    ``unlike`` are ways that compute something else.
    """
    args = inputs(case, DEVICE)
    grad = torch.randn(case.B, case.Tq, case.Dv, device=DEVICE)
    refuse_wrong_results(case, args, ways, grad)
    upstream = grad if direction != "forward" else None
    calls = {name: call(way, args, upstream) for name, way in (ways | (unlike or {})).items()}
    sizes = (case.B, case.Tq, case.Tk, case.A, case.Dv)
    compare(benchmark, benchmark.group, shape, sizes, direction, calls)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("score", ["additive", "dot"])
def test_attention(benchmark, score, shape, direction):
    case = case_of(score, SHAPES[shape])
    torch._dynamo.reset()  # or past eight shapes it would fall back to eager
    ways = {
        **fused(
            lambda backend, **a: attend(a, need_weights=True, backend=backend), step=case.Tq == 1
        ),
        "eager": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
    }
    benchmark.group = score
    measure(benchmark, case, shape, direction, ways)
    benchmark.extra_info["bound"] = bound(case, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", ["translation", "speech", "one step"])
@pytest.mark.parametrize("normalisation", ["sparsemax", "entmax15"])
def test_sparse_weights(benchmark, normalisation, shape, direction):
    """Time sparse weights beside the softmax and the package entmax."""
    normalise = getattr(pytest.importorskip("entmax"), normalisation)
    options = {"need_weights": True, "normalisation": normalisation}
    ways = {
        "attnfast": lambda **args: attend(args, **options),
        "eager": lambda **args: eager(**args, normalise=normalise),
    }
    benchmark.group = normalisation
    softmax = {"softmax": lambda **args: attend(args, need_weights=True)}
    measure(benchmark, case_of("additive", SHAPES[shape]), shape, direction, ways, softmax)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dot_without_weights(benchmark, shape, direction):
    case = case_of("dot", SHAPES[shape])
    ways = {
        **fused(lambda backend, **a: attend(a, backend=backend), step=case.Tq == 1),
        "SDPA": scaled_dot_product,
        "eager": eager,
    }
    if DEVICE.type == "cuda" and shape in FLEXIBLE:  # on a CPU it has no backward
        torch._dynamo.reset()
        ways["FlexAttention"] = flexible()
    benchmark.group = "dot, no weights returned"
    measure(benchmark, case, shape, direction, ways)
    benchmark.extra_info["bound"] = bound(case, direction)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("score", ["additive", "dot"])
def test_statistics(benchmark, score, shape):
    """What statistics of rows cost in attention's own pass, and from its weights."""
    case = case_of(score, SHAPES[shape])
    args = inputs(case, DEVICE)

    def from_weights():
        weights = attend(args, need_weights=True)[1]
        return row_statistics(weights).entropy

    ways = {
        "attnfast, with statistics": lambda: attend(args, need_statistics=True)[0],
        "without": lambda: attend(args)[0],
        "from weights": from_weights,
    }
    with torch.no_grad():
        got, want = attend(args, need_statistics=True).statistics.entropy, from_weights()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    sizes = (case.B, case.Tq, case.Tk, case.A, case.Dv)
    calls = {name: timed(way) for name, way in ways.items()}
    compare(benchmark, f"{score}, statistics of rows", shape, sizes, "forward", calls)


def recurrent(step_of):
    """Return a decoder whose every query has something of the context before it."""

    def run(query, key, value, score_vector=None, **_):
        step, contexts, context = step_of(key, value, score_vector), [], 0
        for q in query.split(1, 1):
            context = step(torch.add(q, context, alpha=0.1))
            contexts.append(context)
        return torch.cat(contexts, 1), None

    return run


def remembered(backend):
    def step_of(key, value, score_vector):
        memory = prepare(key, value, score_vector, backend=backend)
        return lambda query: attend_to(query, memory)[0]

    return recurrent(step_of)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", DECODERS)
@pytest.mark.parametrize("score", ["additive", "dot"])
def test_recurrent_decoder(benchmark, score, shape, direction):
    case = case_of(score, DECODERS[shape])
    torch._dynamo.reset()
    compiled = torch.compile(eager, dynamic=False)
    ways = {
        **fused(lambda backend, **a: remembered(backend)(**a), step=True),
        "eager": recurrent(lambda *memory: lambda query: eager(query, *memory)[0]),
        "torch.compile": recurrent(lambda *memory: lambda query: compiled(query, *memory)[0]),
    }
    benchmark.group = f"{score}, a recurrent decoder's steps"
    measure(benchmark, case, shape, direction, ways)
