"""Prepared memory: a recurrent decoder's gradients, however the backward is called."""

import functools

import pytest
import torch
from table import DEVICE, Case, check, eager, inputs, oracle_of, results, runnable
from torch.utils.checkpoint import checkpoint

from attnfast import memory
from attnfast.memory import attend, prepare

CASES = [
    Case("additive", 3, 5, 33, 40, 24),
    Case("additive", 2, 4, 130, 256, 64, terms=("lengths",)),
    Case("additive", 2, 3, 9, 17, 8, H=2, terms=("mask",), weight_per_head=True),
    Case("additive", 2, 3, 20, 32, 16, scale=6.0),  # beyond the domain of kept exponentials
    Case("additive", 2, 3, 20, 32, 16, terms=("lengths", "mask"), layout="sliced"),
    Case("additive", 2, 3, 20, 32, 16, dtype=torch.float64),
    Case("additive", 2, 3, 20, 32, 16, dtype=torch.bfloat16),
    Case("additive", 2, 3, 20, 48, 16, dtype=torch.float16, terms=("lengths",)),
    Case("additive", 2, 3, 0, 8, 8),
    Case("dot", 3, 5, 33, 40, 24, terms=("lengths",)),
    Case("dot", 2, 3, 9, 17, 8, H=2, terms=("mask",)),
    Case("dot", 2, 3, 9, 17, 8, dtype=torch.float64),
]


def recurrent(step_of):
    """Return a decoder whose every query depends on the context before it."""

    def run(query, key, value, weight, bias=None, mask=None, lengths=None):
        step = step_of(key, value, weight, None if mask is None else mask[..., :1, :], lengths)
        contexts, weights, feedback = [], [], 0
        for q in query.split(1, -2):
            context, weight = step(q + feedback)
            feedback = torch.tanh(context).mean(-1, keepdim=True)
            contexts.append(context)
            weights.append(weight)
        return torch.cat(contexts, -2), torch.cat(weights, -2)

    return run


def with_memory(key, value, weight, mask, lengths, **options):
    m = prepare(key, value, weight, mask=mask, lengths=lengths, **options)
    return lambda q: attend(q, m, need_weights=True)


def plain(key, value, weight, mask, lengths):
    return lambda q: eager(q, key, value, weight, None, mask, lengths)[:2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recurrent_decoder(case, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    args = inputs(case, DEVICE[backend])
    got = results(case, args, recurrent(functools.partial(with_memory, backend=backend)))
    check(
        case, got, oracle_of(case, recurrent(plain)), results(case, inputs(case), recurrent(plain))
    )


@pytest.fixture(params=["additive", "dot"])
def parts(request):
    """Two steps on one memory: its leaves, its queries, and how to attend."""
    args = inputs(Case(request.param, 2, 4, 9, 32, 7, dtype=torch.float64))
    leaves = [args[x] for x in ("key", "value", "weight") if args[x] is not None]
    first, second, both = args["query"][:, :1], args["query"][:, 1:2], args["query"][:, 2:]
    return leaves, [x.detach().requires_grad_() for x in (first, second, both)]


def gradients(leaves, *losses, **options):
    return torch.autograd.grad([x.square().sum() for x in losses], leaves, **options)


def eager_of(leaves):
    return lambda q: eager(q, *leaves)[0]


def steps_of(leaves):
    m = prepare(*leaves)
    return lambda q: attend(q, m)[0]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_steps_and_a_whole_target_on_one_memory(parts):
    leaves, queries = parts
    got, want = ([*map(way(leaves), queries)] for way in (steps_of, eager_of))
    same(gradients([*leaves, *queries], *got), gradients([*leaves, *queries], *want))


def test_a_step_that_is_not_used(parts):
    leaves, (first, second, _) = parts
    step, want = steps_of(leaves), gradients(leaves, eager_of(leaves)(second))
    step(first)
    same(gradients(leaves, step(second)), want)


def test_only_a_query_is_asked_for(parts):
    leaves, (first, second, _) = parts
    m = prepare(*leaves)
    a, b = attend(first, m)[0], attend(second, m)[0]
    want = eager_of(leaves)
    same(gradients([first], a, retain_graph=True), gradients([first], want(first)))
    assert not m.steps._waiting  # what nobody took is gone
    same(gradients(leaves, a, b), gradients(leaves, want(first), want(second)))
    assert not m.steps._waiting


def test_retained_graph(parts):
    leaves, (first, second, _) = parts
    step, want = steps_of(leaves), eager_of(leaves)
    a, b = step(first), step(second)
    for _ in range(2):
        got = gradients(leaves, a, b, retain_graph=True)
        same(got, gradients(leaves, want(first), want(second)))
    same(gradients(leaves, b), gradients(leaves, want(second)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_steps(parts, reentrant):
    leaves, (first, second, _) = parts
    if reentrant:  # it runs a backward of its own in the backward: all of a memory must be inside

        def decode(first, second, *leaves):
            step = steps_of(leaves)
            return step(first) + step(second)

        got = checkpoint(decode, first, second, *leaves, use_reentrant=True)
    else:
        step = steps_of(leaves)
        got = checkpoint(step, first, use_reentrant=False)
        got = got + checkpoint(step, second, use_reentrant=False)
    want = eager_of(leaves)(first) + eager_of(leaves)(second)
    out = [*leaves, first, second]
    if reentrant:
        got.square().sum().backward()
        same([x.grad for x in out], gradients(out, want))
    else:
        same(gradients(out, got), gradients(out, want))


def test_second_derivative_raises(parts):
    leaves, (first, *_) = parts
    grads = gradients([first, *leaves], steps_of(leaves)(first), create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward(retain_graph=True)


def test_a_reordered_memory(parts):
    leaves, (first, *_) = parts
    order = torch.tensor([1, 0, 1])
    got = attend(first[order], prepare(*leaves).index_select(order))[0]
    want = eager(first[order], *(x[order] if x.dim() > 1 else x for x in leaves))[0]
    same(gradients(leaves, got), gradients(leaves, want))


def test_a_backward_that_fails_leaves_nothing(parts):
    leaves, (first, *_) = parts
    m = prepare(*leaves)
    handle = m.key.register_hook(lambda _: 1 / 0)
    out = attend(first, m)[0]
    extra = m.key.sum()  # the hook runs: the key has a gradient of its own
    with pytest.raises(ZeroDivisionError):
        gradients(leaves, out, extra, retain_graph=True)
    handle.remove()
    same(gradients(leaves, out), gradients(leaves, eager_of(leaves)(first)))


def test_exponentials_are_kept_and_dropped(monkeypatch):
    args = inputs(Case("additive", 2, 1, 70, 40, 8))
    m = prepare(args["key"], args["value"], args["weight"])
    calls = []
    original = torch.ops.attnfast_cpu.exponentials
    monkeypatch.setattr(
        torch.ops.attnfast_cpu, "exponentials", lambda *a: calls.append(a) or original(*a)
    )
    for _ in range(3):
        attend(args["query"], m)
    assert len(calls) == 1
    kept = m.steps.exponentials(m)
    assert kept.shape == (2, 1, 70, 64)
    torch.testing.assert_close(kept[:, 0, :, :40], torch.exp(2 * args["key"]), atol=0, rtol=2e-6)
    assert not kept[..., 40:].any()
    far = prepare(args["key"] + 11, args["value"], args["weight"])
    assert far.steps.exponentials(far) is None


def test_bad_arguments():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"value must be \[2, 3, 'Dv'\] to fit the key"):
        prepare(x, x[:1])
    with pytest.raises(ValueError, match=r"mask must be \[2, 0, 3\]"):
        prepare(x, x, mask=torch.ones(2, 3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="lengths must be between 0 and 3"):
        prepare(x, x, lengths=torch.tensor([1, 4]))
    with pytest.raises(TypeError, match=r"key must be a torch\.Tensor, got list"):
        prepare([1.0], x)
    with pytest.raises(ValueError, match=r"key must be \[2, 'Tk', 5\] to fit the query"):
        attend(torch.zeros(2, 1, 5), prepare(x, x))
    assert set(memory.__all__) == {"Memory", "attend", "prepare"}
