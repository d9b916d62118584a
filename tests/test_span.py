"""Spans on every backend, against the oracle with a dense mask of the same keys."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import table
import torch
from table import DEVICE, Case, attend, check, eager, inputs, oracle_of, results, runnable

import attnfast
from attnfast import Span
from attnfast.ops.attention import reference

OUTPUTS = {"need_weights": "dense", "need_log_sum_exp": True}
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


def judge(case, span, position, backend):
    """Check a backend's outputs and gradients; ``span`` may be one for each head."""
    args = inputs(case, DEVICE[backend])
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

    exact = seen(lambda **a: reference(**a, span=None, columns=0, scale=1.0))
    span = list(span) if isinstance(span, tuple) else span
    got = results(
        case, args,
        lambda **a: attend(a, span=span, position=argument, backend=backend, **OUTPUTS),
    )  # fmt: skip
    check(case, got, oracle_of(case, exact), results(case, inputs(case), seen(eager)))


SIZES = ((17, 17), (33, 20), (9, 70), (1, 40), (70, 129), (3, 2))


def cases():
    """Every span, over positions, sizes, terms, layouts, heads and dtypes."""
    draw = random.Random(0)
    sizes, terms = itertools.cycle(SIZES), itertools.cycle(table.TERMS)
    layouts = itertools.cycle(table.LAYOUTS)
    out = []
    for score, span in itertools.product(("dot", "additive"), SPANS):
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
    heads = (Span(window=1), Span(stride=4), Span(window=1), Span(stride=4, fixed=True), Span())
    for score in ("dot", "additive"):
        case = Case(score, 2, 19, 23, 8, 8, 5, terms=("lengths", "bias"), weight_per_head=True)
        out.append((case, heads, None))
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
    if backend == "triton" and DEVICE["triton"].type == "cpu" and case.seed % 8 not in (0, 3, 4):
        pytest.skip("Triton's interpreter takes three cases of eight")
    judge(case, span, position, backend)
