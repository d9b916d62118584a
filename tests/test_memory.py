"""Prepared memory: a recurrent decoder's gradients, however the backward is called."""

import copy
import functools
import gc
import math
import pickle
import weakref

import pytest
import torch
from attention_cases import (
    DEVICE,
    Case,
    check,
    eager,
    inputs,
    losses,
    oracle_of,
    results,
    runnable,
    small,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from attnfast import Span, additive_attention, dot_attention
from attnfast.decoding import attend, attend_with_history, prepare
from attnfast.ops.attention import ATTENTION

CASES = [
    Case("tanh", 3, 5, 33, 40, 24),
    Case("tanh", 2, 4, 130, 256, 64, terms=("lengths",)),
    Case("tanh", 2, 3, 9, 17, 8, H=2, terms=("mask",), weight_per_head=True),
    Case("tanh", 2, 3, 20, 32, 16, scale=6.0),  # beyond the domain of kept exponentials
    Case("tanh", 2, 3, 20, 32, 16, terms=("lengths", "mask"), layout="sliced"),
    Case("tanh", 2, 3, 20, 32, 16, dtype=torch.float64),
    Case("tanh", 2, 3, 20, 32, 16, dtype=torch.bfloat16),
    Case("tanh", 2, 3, 20, 48, 16, dtype=torch.float16, terms=("lengths",)),
    Case("tanh", 2, 3, 0, 8, 8),
    Case("tanh", 2, 3, 5, 0, 8),
    Case("dot", 2, 3, 5, 0, 8),
    Case("relu", 2, 4, 70, 33, 24, terms=("lengths", "mask")),
    Case("relu", 2, 3, 9, 17, 8, H=2, dtype=torch.bfloat16, weight_per_head=True),
    Case("dot", 3, 5, 33, 40, 24, terms=("lengths",)),
    Case("dot", 2, 3, 9, 17, 8, H=2, terms=("mask",)),
    Case("dot", 2, 3, 9, 17, 8, dtype=torch.float64),
    Case("dot", 2, 10, 20, 64, 64, terms=("mask",), layout="sliced"),
]


def recurrent(step_of):
    """Return a decoder whose every query depends on the context before it."""

    def run(query, key, value, score_vector, bias=None, mask=None, lengths=None, **options):
        mask = None if mask is None else mask[..., :1, :]
        step = step_of(key, value, score_vector, mask, lengths, **options)
        contexts, weights, feedback = [], [], 0
        for q in query.split(1, -2):
            context, score_vector = step(q + feedback)
            feedback = torch.tanh(context).sum(-1, keepdim=True) / max(1, context.shape[-1])
            contexts.append(context)
            weights.append(score_vector)
        return torch.cat(contexts, -2), torch.cat(weights, -2)

    return run


def with_memory(key, value, score_vector, mask, lengths, **options):
    m = prepare(key, value, score_vector, mask=mask, lengths=lengths, **options)
    return lambda q: attend(q, m, need_weights=True)


def plain(key, value, score_vector, mask, lengths, **options):
    return lambda q: eager(q, key, value, score_vector, None, mask, lengths, **options)[:2]


def judge(case, backend):
    args = inputs(case, DEVICE[backend])
    got = results(case, args, recurrent(functools.partial(with_memory, backend=backend)))
    check(case, got, oracle_of(case, recurrent(plain)), losses(case, recurrent(plain)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recurrent_decoder(case, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    if backend == "triton" and case not in CASES[::3]:
        pytest.skip("slow in an interpreter, whose tables have the same kernels")
    judge(case, backend)


NEAR_ZERO = small(Case("tanh", 2, 3, 20, 40, 16, terms=("lengths",)))


@pytest.mark.parametrize("case", NEAR_ZERO, ids=str)
def test_inputs_near_zero(case, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    judge(case, backend)


@pytest.mark.parametrize("score", ["tanh", "dot"])
def test_what_is_not_seen_does_not_touch_the_gradients(score, backend):
    """Ten steps on keys and values that are NaN beyond a length."""
    if backend == "triton":
        pytest.skip(
            "too many steps for Triton's interpreter; its kernels are those of a whole target"
        )
    case = Case(score, 2, 10, 20, 64, 64)
    args = inputs(case, DEVICE[backend])
    args["lengths"] = torch.tensor([20, 17], device=DEVICE[backend])
    how = recurrent(functools.partial(with_memory, backend=backend))
    clean = results(case, args, how)
    for name in ("key", "value"):
        args[name].detach()[1, 17:] = math.nan
    for name, x in results(case, args, how).items():
        torch.testing.assert_close(x, clean[name], msg=name)
    args["query"].detach()[1, 3] = math.nan
    bad = results(case, args, how)
    for name in ("key", "value"):
        assert bad[f"grad of {name}"][1, 0].isnan().any()
        assert (bad[f"grad of {name}"][1, 17:] == 0).all()


@pytest.fixture(params=["tanh", "dot"])
def parts(request):
    """Two steps on one memory: its leaves, its queries, and how to attend."""
    args = inputs(Case(request.param, 2, 4, 9, 32, 7, dtype=torch.float64))
    leaves = [args[x] for x in ("key", "value", "score_vector") if args[x] is not None]
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
    assert not m.shared_keys.pending_gradients.by_task  # what nobody took is gone
    same(gradients(leaves, a, b), gradients(leaves, want(first), want(second)))
    assert not m.shared_keys.pending_gradients.by_task


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


@pytest.mark.parametrize("history", [False, True])
def test_checkpointed_steps_over_projected_keys(history, backend):
    """The memory is made outside, of keys that have a graph of their own."""

    def run(how):
        args = inputs(Case("tanh", 2, 2, 9, 8, 5), DEVICE[backend])
        leaves = [args[x] for x in ("query", "key", "value", "score_vector")]
        query, *of_memory = (x * 1.0 for x in leaves)
        m = prepare(*of_memory, backend=backend)
        step = functools.partial(attend_with_history, penalty=1.0) if history else attend
        contexts = [how(lambda q: step(q, m)[0], q) for q in query.split(1, 1)]
        return gradients(leaves, *contexts)

    checkpointed = run(functools.partial(checkpoint, use_reentrant=False))
    same(checkpointed, run(lambda function, query: function(query)))


@pytest.mark.cpu_library
@pytest.mark.parametrize("projected", [False, True])
def test_reentrant_checkpoint_over_a_memory_made_outside(parts, projected):
    """It runs a backward of its own for every step."""
    leaves, queries = parts
    m = prepare(*(x * 1.0 for x in leaves) if projected else leaves)
    contexts = [checkpoint(lambda q: attend(q, m)[0], q, use_reentrant=True) for q in queries]
    loss = sum(x.square().sum() for x in contexts)
    if projected:
        with pytest.raises(RuntimeError, match=r"memory must be prepared inside a reentrant"):
            loss.backward()
        return
    loss.backward()
    same(
        [x.grad for x in (*leaves, *queries)],
        gradients([*leaves, *queries], *map(eager_of(leaves), queries)),
    )


@pytest.mark.parametrize("name", ["key", "value", "score_vector", "lengths", "mask"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("grad", [True, False])
def test_a_memory_changed_in_place_is_refused(name, rows, grad):
    args = inputs(Case("tanh", 2, 2, 9, 8, 5, terms=("lengths",)))
    args = {k: args[k].detach() for k in ("query", "key", "value", "score_vector", "lengths")}
    args["key"].requires_grad_(grad)
    query = args.pop("query")[:, :rows]
    args["mask"] = torch.ones(2, 9, dtype=torch.bool)
    m = prepare(**args)
    attend(query, m)
    with torch.no_grad():
        args[name].copy_(args[name].clone())
    for call in (attend, attend_with_history):
        with pytest.raises(RuntimeError, match=f"memory must be prepared again: its {name} was"):
            call(query, m)
    assert attend(query, prepare(**args))[0].isfinite().all()


def test_a_memory_pickles():
    args = inputs(Case("tanh", 2, 1, 9, 8, 5, terms=("lengths",)))
    m = prepare(args["key"] * 2, args["value"], args["score_vector"], lengths=args["lengths"])
    query = args["query"]
    for again in (pickle.loads(pickle.dumps(m)), copy.copy(m)):
        assert torch.equal(attend(query, again)[0], attend(query, m)[0])
        same(gradients([query], attend(query, again)[0]), gradients([query], attend(query, m)[0]))


def test_steps_serve_their_own_activation():
    case = Case("tanh", 2, 1, 9, 8, 5)
    args = inputs(case)
    query, leaves = args["query"], [args[k] for k in ("key", "value", "score_vector")]
    memories = prepare(*leaves)._replace(score="relu"), prepare(*leaves, activation="relu")
    got, want = (gradients(leaves, attend(query, m)[0]) for m in memories)
    same(got, want)


@pytest.mark.cpu_library
def test_second_derivative_raises(parts):
    leaves, (first, *_) = parts
    grads = gradients([first, *leaves], steps_of(leaves)(first), create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward(retain_graph=True)


@pytest.mark.cpu_library
@pytest.mark.parametrize("need_weights", [False, True])
def test_second_derivative_by_any_input_raises(parts, need_weights):
    """None would be a wrong one: all depends on all."""
    leaves, (first, second, _) = parts
    sigma = torch.full((1,), 2.0, dtype=torch.float64, requires_grad=True)
    m, span = prepare(*leaves), {"span": Span(window=4), "sigma": sigma}
    out = [attend(q, m, need_weights=need_weights, **span)[0] for q in (first, second)]
    inputs = [first, second, sigma, *leaves]
    upstream = torch.ones_like(out[0], requires_grad=True)
    grads = torch.autograd.grad(sum(out).square(), inputs, upstream, create_graph=True)
    for grad in grads[3:]:  # taken at the end, from all steps
        for x in (first, second, *leaves, upstream):
            with pytest.raises(RuntimeError, match="no second derivative"):
                torch.autograd.grad(grad.sum(), x, retain_graph=True, allow_unused=True)
    for x in (first, sigma, *leaves, upstream):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grads[0].sum(), x, retain_graph=True, allow_unused=True)


def test_steps_of_several_scales(parts):
    leaves, (first, second, _) = parts
    m = prepare(*leaves)
    got = [attend(q, m, scale=scale)[0] for q, scale in ((first, 0.5), (second, 3.0))]

    def scaled(q, scale):
        key, value, *weight = leaves
        return eager(q, key, value, weight[0] * scale) if weight else eager(q * scale, key, value)

    want = [scaled(q, scale)[0] for q, scale in ((first, 0.5), (second, 3.0))]
    out = [*leaves, first, second]
    same(gradients(out, *got), gradients(out, *want))


def test_steps_within_several_spans(parts):
    """Some of them with as many columns, over one memory, about a learned position."""
    leaves, (first, *_) = parts
    m, (key, value, *weight) = prepare(*leaves), leaves
    spans = [Span(window=1), None, Span(window=2), Span(window=1, causal=True), Span(window=2)]
    position = torch.tensor([[3.2], [4.9]], dtype=torch.float64, requires_grad=True)
    how = [{"span": x, "position": position, "sigma": 1.5} for x in spans]
    how += [{"span": x, "position": 3} for x in spans]
    got = [attend(first, m, **x)[0] for x in how]
    if weight:
        call = functools.partial(additive_attention, first, key, value, *weight)
    else:
        call = functools.partial(dot_attention, first, key, value, scale=1.0)
    out = [*leaves, first, position]
    same(gradients(out, *got), gradients(out, *(call(**x)[0] for x in how)))


def test_what_a_memory_takes_as_the_functions_do(parts):
    """Lengths of 32 bits, and weights in a form of their own."""
    leaves, (first, *_) = parts
    lengths = torch.tensor([9, 4])
    m = prepare(*leaves, lengths=lengths.int())
    want, weights = attend(first, prepare(*leaves, lengths=lengths), need_weights=True)
    torch.testing.assert_close(attend(first, m)[0], want)
    same(gradients(leaves, attend(first, m)[0]), gradients(leaves, want, retain_graph=True))
    sparse = attend(first, m, need_weights="sparse")[1]
    assert sparse.is_sparse
    torch.testing.assert_close(sparse.to_dense(), weights)
    torch.testing.assert_close(attend(first, m, need_weights="dense")[1], weights)


def test_a_reordered_memory(parts):
    leaves, (first, *_) = parts
    order = torch.tensor([1, 0, 1])
    got = attend(first[order], prepare(*leaves).index_select(order))[0]
    want = eager(first[order], *(x[order] if x.dim() > 1 else x for x in leaves))[0]
    same(gradients(leaves, got), gradients(leaves, want))


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_leaves_nothing(parts, fails):
    leaves, (first, second, _) = parts
    m = prepare(*leaves)
    once = attend(first, m)[0]
    out = attend(second + once.mean(), m)[0]
    if fails:
        once.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gradients(leaves, out)
    else:
        gradients(leaves, out)
    assert not m.shared_keys.pending_gradients.by_task
    alive = weakref.ref(m.shared_keys)
    del m, once, out
    gc.collect()
    assert alive() is None


@pytest.mark.cpu_library
def test_gradients_of_many_steps_are_taken_at_once(parts, monkeypatch):
    leaves, (first, second, _) = parts
    late = []
    original = ATTENTION.backward

    def record(backend, call):
        late.append(call.need_grad_key)
        return original(backend, call)

    monkeypatch.setattr(ATTENTION, "backward", record)
    step = steps_of(leaves)
    gradients(leaves, step(first) + step(second))
    assert late == [False, False, True]


def test_what_is_asked_of_the_keys_themselves(parts):
    leaves, (first, *_) = parts
    m, seen = prepare(*leaves), []
    want = gradients(leaves[:1], eager_of(leaves)(first), leaves[0])
    m.key.register_hook(seen.append)
    same(gradients([m.key], attend(first, m)[0], m.key), want)
    same(seen, want)


def test_a_memory_that_was_changed(parts):
    leaves, (first, *_) = parts
    m = prepare(*leaves)
    attend(first, m)
    got = attend(first, m._replace(key=m.key * 0.5))[0]
    want = eager_of([leaves[0] * 0.5, *leaves[1:]])(first)
    torch.testing.assert_close(got, want)
    same(gradients(leaves, got), gradients(leaves, want))


def test_inference_then_training(parts):
    leaves, (first, *_) = parts
    m = prepare(*leaves)
    with torch.inference_mode():
        attend(first, m)
    same(gradients(leaves, attend(first, m)[0]), gradients(leaves, eager_of(leaves)(first)))


def test_autocast_reaches_a_memory_made_outside():
    args = inputs(Case("tanh", 2, 1, 9, 32, 8))
    m = prepare(args["key"], args["value"], args["score_vector"])
    with torch.autocast("cpu", torch.bfloat16):
        context, _ = attend(args["query"], m)
    assert context.dtype == torch.bfloat16
    torch.testing.assert_close(context.float(), attend(args["query"], m)[0], atol=0.05, rtol=0.05)


def test_compiled_step_on_a_memory_made_outside(parts):
    leaves, (first, *_) = parts
    torch._dynamo.reset()
    step = torch.compile(lambda q, m: attend(q, m)[0], fullgraph=True, backend="aot_eager")
    got, want = step(first, prepare(*leaves)), eager_of(leaves)(first)
    torch.testing.assert_close(got, want)
    same(gradients(leaves, got), gradients(leaves, want))


@pytest.mark.parametrize("score", ["tanh", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_no_step_may_see_changes_nothing(score, dtype):
    keys = 100
    args = inputs(Case(score, 2, 1, keys, 40, 24, dtype=dtype))
    lengths = torch.tensor([keys, 20])
    mask = torch.arange(keys) % 3 != 1
    hidden = ~mask | (torch.arange(keys) >= lengths[:, None])
    found = []
    for filler in (0.0, float("nan")):
        key, value = (
            args[x].detach().masked_fill(hidden.unsqueeze(-1), filler).requires_grad_()
            for x in ("key", "value")
        )
        leaves = [x for x in (args["query"], key, value, args["score_vector"]) if x is not None]
        m = prepare(key, value, args["score_vector"], lengths=lengths, mask=mask.expand(2, 1, keys))
        a, weights = attend(args["query"], m, need_weights=True)
        b = attend(args["query"] * 0.5, m)[0]
        found.append([a, weights, b, *gradients(leaves, a, b, weights)])
    for clean, poisoned in zip(*found):
        assert torch.equal(clean, poisoned)


@pytest.mark.cpu_library
def test_what_a_backend_prepares_is_kept_and_dropped(monkeypatch):
    args = inputs(Case("tanh", 2, 1, 70, 40, 8))
    m = prepare(args["key"], args["value"], args["score_vector"])
    calls = []
    original = torch.ops.attnfast_cpu.key_exponentials
    monkeypatch.setattr(
        torch.ops.attnfast_cpu, "key_exponentials", lambda *a: calls.append(a) or original(*a)
    )
    for _ in range(3):
        attend(args["query"], m)
    assert len(calls) == 1
    kept = m.shared_keys.key_exponentials()
    assert kept.shape == (2, 1, 70, 64)
    torch.testing.assert_close(kept[:, 0, :, :40], torch.exp(2 * args["key"]), atol=0, rtol=2e-6)
    assert not kept[..., 40:].any()
    far = prepare(args["key"] + 11, args["value"], args["score_vector"])
    assert far.shared_keys.key_exponentials() is None
    assert prepare(args["key"], args["value"]).shared_keys.key_exponentials() is None  # dot


@pytest.mark.parametrize("keys", [9, 70])
def test_log_sum_exp_of_steps(keys, backend):
    """A step's is that of the whole, and so are its gradients, which wait for the last step."""
    found = []
    for size in (1, 3):
        args = inputs(Case("tanh", 2, 3, keys, 8, 5, terms=("lengths",)), DEVICE[backend])
        leaves = [args[x] for x in ("query", "key", "score_vector")]
        m = prepare(
            args["key"],
            args["value"],
            args["score_vector"],
            lengths=args["lengths"],
            backend=backend,
        )
        results = [attend(query, m) for query in args["query"].split(size, 1)]
        assert all(result.weights is None for result in results)
        sums = torch.cat([result.log_sum_exp for result in results], 1)
        context = torch.cat([context for context, _ in results], 1)
        finite = sums[args["lengths"] > 0]
        found.append([sums, *gradients(leaves, context, finite)])
    for steps, whole in zip(*found):
        torch.testing.assert_close(steps, whole)


@pytest.mark.cpu_library
def test_keys_out_of_reach_after_a_graph_was_recorded():
    """What a backend prepares depends on numbers, and is no part of a graph or of a mapped call."""

    def steps(query, key, value, score_vector):
        m = prepare(key, value, score_vector, backend="cpu")
        return torch.cat([attend(q, m).context for q in query.split(1, 1)], 1)

    args = inputs(Case("tanh", 2, 2, 9, 8, 5))
    near = [args[x].detach() for x in ("query", "key", "value", "score_vector")]
    far = [near[0], near[1] * 20, *near[2:]]
    with torch.no_grad():
        recorded = make_fx(steps)(*near)
        torch.testing.assert_close(recorded(*far), steps(*far))
        mapped = torch.func.vmap(steps)(*(torch.stack(pair) for pair in zip(near, far)))
    torch.testing.assert_close(mapped, torch.stack([steps(*near), steps(*far)]))
