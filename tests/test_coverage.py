"""coverage_attention against the float64 oracle, and the oracle against the papers' formulas."""

import functools
import gc
import itertools
import math
import random
import weakref
from dataclasses import dataclass, replace

import attention_cases
import pytest
import torch
import torch.nn.functional as F
from attention_cases import CPU, DEVICE, LAYOUTS, PLAIN, Case, inputs, size, small
from torch.autograd import forward_ad, gradcheck
from torch.utils.checkpoint import checkpoint

import attnfast
from attnfast._utils.benchmark import peak_memory
from attnfast.decoding import attend_with_history, prepare
from attnfast.ops.arguments import SCORES
from attnfast.ops.backends import unsupported_reason

NAMES = ("context", "weights", "coverage", "loss", "log_weights")
#: What a row may know of its past, and what only the additive score has.
TERMS = ("penalty", "fertility", "transition_prob", "state")
FEATURES = ("coverage_weight", "location")
HISTORY = ("penalty", "fertility", "state")  # also with sigmoids, which have no transition


@dataclass(frozen=True)
class History(Case):
    """A case whose ``terms`` may also name terms of the history."""

    filters: tuple[int, int, int] = (3, 2, 5)  # K, channels, width
    per_head: bool = False

    @property
    def elements(self) -> int:
        return super().elements + self.filters[0] * self.Tk * self.Tq * self.A


def histories() -> list[History]:
    """Return every term alone and with others, every dtype, sizes about the kernels' edges."""
    cases = []
    seeds = itertools.count()
    shapes = itertools.cycle(
        [(2, 3, 5, 7, 6, None), (2, 4, 17, 16, 8, 2), (1, 5, 70, 40, 33, None), (3, 2, 65, 8, 5, 1)]
    )
    extra = itertools.cycle([(), ("lengths",), ("lengths", "mask", "bias")])
    for score in ("tanh", "dot"):
        terms = TERMS + (FEATURES if score == "tanh" else ())
        chosen = [(), *((t,) for t in terms), *itertools.combinations(terms, 2), terms]
        for picked in chosen:
            sizes = next(shapes)
            scale = sizes[3] ** -0.25 if score == "dot" else 1.0
            case = History(score, *sizes, terms=picked + next(extra), seed=next(seeds), scale=scale)
            cases.append(replace(case, per_head=case.H is not None and case.seed % 2 == 0))
    every = (*TERMS, *FEATURES, "lengths", "mask", "bias")
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        cases.append(History("tanh", 2, 3, 33, 20, 9, 2, dtype=dtype, terms=every))
        cases.append(History("dot", 2, 3, 33, 20, 9, dtype=dtype, terms=(*TERMS, "lengths")))
    for Tk, terms in (
        (150, every),
        (200, ("location",)),
        (560, ("coverage_weight", "transition_prob")),
    ):
        cases.append(History("tanh", 1, 2, Tk, 20, 9, terms=terms, seed=next(seeds)))
    cases.append(History("dot", 1, 3, 560, 16, 9, terms=(*TERMS, "lengths"), scale=0.5))
    for filters in ((1, 1, 1), (1, 1, 31), (16, 1, 3), (17, 2, 7), (33, 2, 1)):
        cases.append(History("tanh", 2, 3, 40, 19, 6, terms=("location", "state"), filters=filters))
    for term in ("penalty", "location"):
        case = History("tanh", 2, 4, 17, 16, 8, 2, terms=(term,), layout="time first")
        cases.append(case)
    for score in PLAIN:
        cases.append(History(score, 2, 3, 19, 21, 6, terms=(*TERMS, "coverage_weight", "lengths")))
        cases.append(History(score, 2, 2, 9, 12, 5, 2, terms=every, per_head=True))
    cases.append(History(PLAIN[0], 2, 3, 9, 12, 7, dtype=torch.float16, terms=every))
    cases.append(History(PLAIN[0], 2, 3, 33, 16, 7, terms=("penalty", "state")))
    seen = ("lengths", "mask", "bias", "sigmoid")
    for score in ("tanh", "dot", PLAIN[0]):
        cases.append(History(score, 2, 3, 19, 21, 6, terms=("sigmoid",)))
        cases.append(History(score, 2, 4, 70, 16, 8, 2, terms=(*HISTORY, *seen), per_head=True))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        terms = (*HISTORY, *FEATURES, *seen)
        cases.append(History("tanh", 2, 3, 33, 20, 9, 2, dtype=dtype, terms=terms))
    cases.append(History("tanh", 1, 3, 560, 20, 9, terms=("location", "state", "sigmoid")))
    sizes = [(0, 3, 5, 8, 8), (2, 0, 5, 8, 8), (2, 3, 0, 8, 8), (2, 3, 5, 8, 0), (2, 3, 5, 0, 8)]
    for terms in (("penalty", "location"), ("penalty", "location", "sigmoid")):
        cases += [History("tanh", *s, terms=terms) for s in sizes]
    cases.append(History("tanh", 2, 3, 5, 8, 8, terms=("location",), filters=(0, 1, 3)))
    return cases


def fuzz(seed: int, count: int) -> list[History]:
    """Return seeded random cases."""
    draw = random.Random(seed)
    table = []
    while len(table) < count:
        score = draw.choice(("tanh", *SCORES))
        terms = TERMS + (FEATURES if score != "dot" else ())
        terms = tuple(t for t in (*terms, "lengths", "mask", "bias") if draw.random() < 0.4)
        if "transition_prob" not in terms and draw.random() < 0.3:
            terms = (*terms, "sigmoid")
        case = History(
            score,
            B=size(draw, 1, 3),
            Tq=size(draw, 1, 12),
            Tk=size(draw, 2, 30, 150, 700),
            A=size(draw, 8, 70),
            Dv=size(draw, 8, 40),
            H=draw.choice((None, None, size(draw, 1, 3))),
            dtype=draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
            terms=terms,
            layout=draw.choice(LAYOUTS),
            seed=draw.randint(0, 2**31),
            filters=(size(draw, 20), draw.randint(1, 2), 2 * draw.randint(0, 8) + 1),
        )
        scale = max(case.A, 1) ** -0.25 if score == "dot" else 1.0
        per_head = case.H is not None and draw.random() < 0.5
        table.append(replace(case, per_head=per_head, scale=scale))
    return table


def arguments(case: History, device: torch.device = CPU) -> dict:
    """Return the arguments of the case, leaves that require gradients where they can."""
    args = inputs(case, device)
    g = torch.Generator().manual_seed(case.seed + 2)
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    keys = (case.B, *case.heads, case.Tk)
    own = case.heads if case.per_head else ()
    K, channels, width = case.filters

    def leaf(x: torch.Tensor, kind=dtype) -> torch.Tensor:
        return x.to(device, kind).requires_grad_()

    def draw(*shape: int, scale: float = 1.0, kind=dtype) -> torch.Tensor:
        return leaf(0.3 * scale * torch.randn(shape, generator=g, dtype=torch.float64), kind)

    def positive(*shape: int) -> torch.Tensor:
        return leaf(0.2 + torch.rand(shape, generator=g, dtype=torch.float64))

    if "penalty" in case.terms:
        args["penalty"] = positive(case.H if own else 1)
    if "fertility" in case.terms:
        args["fertility"] = positive(*keys)
    if "coverage_weight" in case.terms:
        args["coverage_weight"] = draw(*own, case.A, scale=case.scale, kind=case.dtype)
    if "location" in case.terms:
        args["filters"] = draw(*own, K, channels, width)
        args["projection"] = draw(*own, case.A, K, scale=case.scale)
    if "transition_prob" in case.terms:
        chance = torch.rand(case.B, *case.heads, case.Tq, generator=g, dtype=torch.float64)
        args["transition_prob"] = leaf(0.3 + 0.4 * chance)
    if "sigmoid" in case.terms:
        args["normalisation"] = "sigmoid"
    if "state" in case.terms:
        args["coverage"] = positive(*keys)
    if {"state", "transition_prob"} & set(case.terms):
        args["previous"] = leaf(torch.rand(keys, generator=g, dtype=torch.float64).softmax(-1))
    return args


def attend(backend: str):
    """Return a call of the public function."""
    return functools.partial(
        attnfast.coverage_attention, scale=1.0, need_weights=True, backend=backend
    )


def in_steps(backend: str):
    """Return the same as a decoder does it: a prepared memory, one query after the other."""

    def attend(query, key, value, score_vector=None, *, lengths=None, fertility=None, **terms):
        score = {"activation": terms.pop("activation", "tanh")}
        memory = prepare(key, value, score_vector, **score, lengths=lengths, backend=backend)
        memory = memory._replace(fertility=fertility)
        by_row = {k: terms.pop(k) for k in ("mask", "bias") if terms.get(k) is not None}
        steps, lost, state = [], 0, {k: terms.pop(k, None) for k in ("coverage", "previous")}
        for t in range(query.shape[-2]):
            now = {k: x.expand(*x.shape[:-2], query.shape[-2], -1)[..., t : t + 1, :]
                   for k, x in by_row.items()}  # fmt: skip
            if terms.get("transition_prob") is not None:
                now["transition_prob"] = terms["transition_prob"][..., t : t + 1]
            result = attend_with_history(
                query[..., t : t + 1, :], memory, scale=1.0, need_weights=True,
                **{**terms, **now}, **state,
            )  # fmt: skip
            context, weights, coverage = result
            state = {"coverage": coverage, "previous": weights.squeeze(-2)}
            if result.log_weights is not None:
                state["log_previous"] = result.log_weights.squeeze(-2)
                del state["previous"]
            steps.append((context, weights, result.log_weights))
            lost = lost + result.loss
        *rows, log_weights = zip(*steps)
        contexts, weights = (torch.cat(x, -2) for x in rows)
        more = () if log_weights[0] is None else (torch.cat(log_weights, -2),)
        return contexts, weights, coverage, lost, *more

    return attend


def run(case: History, args: dict, backend: str, how=attend) -> dict[str, torch.Tensor]:
    """Return results and gradients."""
    return attention_cases.results(case, args, how(backend), NAMES)


def check(case: History, backend: str, how=attend) -> None:
    """Compare with the oracle by the project's one rule; the oracle in this dtype is eager code."""
    args = arguments(case)
    wanted = run(case, attention_cases.doubled(args), "reference")
    orders = attention_cases.in_orders(attend("reference"))
    plain = itertools.chain(
        (attention_cases.results(case, args, how, NAMES) for how in orders),
        (run(case, arguments(case, x), "reference") for x in attention_cases.devices()[1:]),
        attention_cases.nearby(args, lambda near: run(case, near, "reference")),
    )
    attention_cases.check(
        case, run(case, arguments(case, DEVICE[backend]), backend, how), wanted, plain
    )


def unfit(backend: str, case: History) -> str | None:
    """Return why a backend cannot run a case here, or None."""
    reason = unsupported_reason(backend, DEVICE[backend], case.dtype, "coverage_attention")
    slow = backend == "triton" and DEVICE["triton"].type == "cpu"
    return reason or ("too large for its interpreter" if slow and case.elements > 20_000 else None)


def skip_unless(backend: str, case: History) -> None:
    reason = unfit(backend, case)
    if reason:
        pytest.skip(f"{backend}: {reason}")


def name(case: History) -> str:
    return f"{case.score}-{'-'.join(case.terms)}-{case.seed}"


@pytest.mark.parametrize("case", histories(), ids=name)
def test_table(case, backend):
    skip_unless(backend, case)
    check(case, backend)


NEAR_ZERO = [
    one
    for terms in ((), ("coverage_weight",), ("location", "lengths"))
    for one in small(History("tanh", 2, 3, 19, 12, 7, terms=(*terms, "state")))
]  # without the state coverage is as large as the weights: which is the smaller would be noise


@pytest.mark.parametrize("how", [attend, in_steps])
@pytest.mark.parametrize("case", NEAR_ZERO, ids=lambda x: f"{x.terms}-{x.scale}")
def test_inputs_near_zero(case, how, backend):
    skip_unless(backend, case)
    check(case, backend, how)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz(seed, backend):
    skip_unless(backend, History("dot", 1, 1, 1, 1, 1))
    cases = [case for case in fuzz(seed, 40) if unfit(backend, case) is None]
    if backend == "triton" and DEVICE["triton"].type == "cpu":  # its interpreter is slow
        cases = [case for case in cases if case.elements * case.filters[2] < 10_000][:4]
    for case in cases:
        check(case, backend)


def see(q, k, v, w, w_c):
    """See et al. (2017), equations 10 to 13, one sequence after the other as their code does."""
    coverage, loss, contexts = torch.zeros(k.shape[:2], dtype=k.dtype), 0, []
    for t in range(q.shape[1]):
        e = torch.einsum("a,bja->bj", w, torch.tanh(k + q[:, t, None] + coverage[..., None] * w_c))
        a = torch.softmax(e, 1)
        loss = loss + torch.minimum(a, coverage).sum(1)
        coverage = coverage + a
        contexts.append(torch.einsum("bj,bjd->bd", a, v))
    return torch.stack(contexts, 1), coverage, loss


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def test_see_2017():
    q, k, v, w, w_c = tensors((2, 4, 6), (2, 5, 6), (2, 5, 3), (6,), (6,))
    result = attnfast.coverage_attention(q, k, v, w, coverage_weight=w_c)
    for got, want in zip((result.context, result.coverage, result.loss), see(q, k, v, w, w_c)):
        torch.testing.assert_close(got, want)


def test_chorowski_2015():
    """Location features: a convolution of the last weights, projected into the tanh."""
    q, k, v, w, filters, U = tensors((2, 4, 6), (2, 9, 6), (2, 9, 3), (6,), (5, 1, 3), (6, 5))
    a = torch.full((2, 9), 1 / 9, dtype=torch.float64)
    context, _, _ = attnfast.coverage_attention(
        q, k, v, w, filters=filters, projection=U, previous=a
    )
    for t in range(4):
        f = F.conv1d(a.unsqueeze(1), filters, padding=1).transpose(1, 2)
        a = torch.softmax(torch.tanh(q[:, t, None] + k + f @ U.T) @ w, 1)
        torch.testing.assert_close(context[:, t], (a.unsqueeze(1) @ v).squeeze(1))


def test_zhang_2018():
    """Forward attention: the alignment stays or moves on by one key."""
    q, k, v, w = tensors((2, 6, 6), (2, 7, 6), (2, 7, 3), (6,))
    a = F.one_hot(torch.zeros(2, dtype=torch.long), 7).double()
    _, weights, _ = attnfast.coverage_attention(
        q, k, v, w, transition_prob=0.5, previous=a, need_weights=True
    )
    for t in range(6):
        y = torch.softmax(torch.tanh(q[:, t, None] + k) @ w, 1)
        a = (a + F.pad(a, (1, 0))[:, :-1]) * y
        a = a / a.sum(1, keepdim=True)
        torch.testing.assert_close(weights[:, t], a)
    assert (weights[:, 0, 2:] == 0).all() and (weights[:, 2, 4:] == 0).all()


@pytest.mark.parametrize("own", ["filters", "coverage_weight"])
def test_heads_may_share_one_feature_and_not_the_other(own):
    q, k, v = tensors((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 3))
    w, w_c, filters, U = tensors((6,), (6,), (5, 1, 3), (6, 5), seed=1)
    shared = {"coverage_weight": w_c, "filters": filters, "projection": U}
    names = ("filters", "projection") if own == "filters" else (own,)
    each = {name: shared[name].expand(3, *shared[name].shape) for name in names}
    wanted, *_ = attnfast.coverage_attention(q, k, v, w, **shared)
    got, *_ = attnfast.coverage_attention(q, k, v, w, **{**shared, **each})
    torch.testing.assert_close(got, wanted)


def test_tu_2016():
    """Coverage divided by a fertility, in the tanh."""
    q, k, v, w, w_c, x = tensors((2, 4, 6), (2, 5, 6), (2, 5, 3), (6,), (6,), (2, 5))
    phi, c = 2 * x.sigmoid(), torch.zeros(2, 5, dtype=torch.float64)
    context, _, coverage = attnfast.coverage_attention(
        q, k, v, w, coverage_weight=w_c, fertility=phi
    )
    for t in range(4):
        a = torch.softmax(torch.tanh(q[:, t, None] + k + c.unsqueeze(-1) * w_c) @ w, 1)
        c = c + a / phi
        torch.testing.assert_close(context[:, t], (a.unsqueeze(1) @ v).squeeze(1))
    torch.testing.assert_close(coverage, c)


@pytest.mark.parametrize("carried", ["previous", "log_previous"])
@pytest.mark.parametrize("score", ["tanh", "dot"])
def test_steps_are_the_whole(score, carried, backend):
    """One query at a time, coverage and last weights carried, gives the same numbers."""
    features = FEATURES if score == "tanh" else ()
    case = History(
        score, 2, 5, 19, 12, 7, dtype=torch.float64, terms=(*TERMS, *features, "lengths")
    )
    skip_unless(backend, case)
    args = arguments(case, DEVICE[backend])
    options = {"need_weights": True, "backend": backend}
    whole = attention_cases.every(attnfast.coverage_attention(**args, **options))
    steps = []
    query, transition_prob = args.pop("query"), args.pop("transition_prob")
    for t in range(case.Tq):
        now = {"query": query[:, t : t + 1], "transition_prob": transition_prob[:, t : t + 1]}
        result = attnfast.coverage_attention(**args, **now, **options)
        last = result.weights if carried == "previous" else result.log_weights
        args = {k: x for k, x in args.items() if k not in ("previous", "log_previous")}
        args |= {"coverage": result.coverage, carried: last[:, 0]}
        steps.append((*result[:2], result.log_weights, result.loss))
    contexts, weights, log_weights, losses = zip(*steps)
    parts = (*(torch.cat(x, 1) for x in (contexts, weights)), result.coverage, sum(losses),
             torch.cat(log_weights, 1))  # fmt: skip
    for got, want in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, want)
    sums = (sum(x.nan_to_num(neginf=0).sin().sum() for x in xs) for xs in (parts, whole))
    for got, want in zip(*(torch.autograd.grad(x, [query, transition_prob]) for x in sums)):
        torch.testing.assert_close(got, want)


STEPS = [
    History("tanh", 2, 4, 19, 12, 7, terms=("location", "lengths")),
    History("tanh", 2, 4, 70, 33, 7, terms=("location",), filters=(17, 1, 7)),
    History("tanh", 2, 3, 19, 20, 7, terms=("coverage_weight", "mask", "bias")),
    History("tanh", 2, 3, 19, 32, 7, terms=("location", "lengths"), dtype=torch.float16),
    History("tanh", 2, 3, 9, 8, 5, terms=("penalty", "lengths")),
    History("tanh", 2, 3, 9, 8, 5, 2, terms=(*TERMS, *FEATURES), per_head=True),
    History("tanh", 2, 3, 9, 8, 5, 2, terms=FEATURES, dtype=torch.float64),
    History("tanh", 2, 3, 9, 8, 5, terms=("transition_prob", "penalty")),
    History("relu", 2, 3, 19, 12, 7, terms=("location", "lengths")),
    History("relu", 2, 3, 9, 8, 5, 2, terms=("penalty", "coverage_weight")),
    History("tanh", 2, 3, 9, 8, 5, terms=("location",), filters=(0, 1, 3)),
    History("dot", 2, 3, 9, 16, 5, terms=("penalty", "transition_prob"), scale=0.5),
]


@pytest.mark.parametrize("case", STEPS, ids=name)
def test_gradients_that_wait(case, backend):
    """Steps over one memory give keys, values and parameters their gradients at the end."""
    skip_unless(backend, case)
    check(case, backend, in_steps)


def test_filters_that_change_between_steps(backend):
    """Other filters, and a backward between the steps, over one memory."""
    case = History("tanh", 2, 3, 9, 8, 5, terms=("location",), dtype=torch.float64)
    skip_unless(backend, case)
    args = {k: v for k, v in arguments(case, DEVICE[backend]).items() if v is not None}
    query, key, value, weight, *features = args.values()
    leaves, grads = [key, value, weight, *features], []
    for deferred in (True, False):
        memory = prepare(key, value, weight, backend=backend)
        memory = memory if deferred else memory._replace(shared_keys=None)
        state, loss = {"previous": key.new_ones(key.shape[:-1])}, 0
        for factor in (1, 2, 2, 1):
            filters, projection = (factor * x for x in features)
            context, weights, _ = attend_with_history(
                query[:, :1], memory, filters=filters, projection=projection, need_weights=True,
                **state,
            )  # fmt: skip
            state = {"previous": weights.squeeze(-2)}
            loss = loss + context.sin().sum()
        once = torch.autograd.grad(loss, leaves, retain_graph=True)
        grads.append([*once, *torch.autograd.grad(loss * 2, leaves)])
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("by", ["penalty", "location"])
def test_steps_of_another_scale(by, backend):
    case = History("tanh", 2, 1, 9, 8, 5, terms=(by,), dtype=torch.float64)
    skip_unless(backend, case)
    args = {k: v for k, v in arguments(case, DEVICE[backend]).items() if v is not None}
    query, key, value, weight = (args.pop(k) for k in ("query", "key", "value", "score_vector"))
    leaves, grads = [query, key, value, weight, *args.values()], []
    state = {k: key.new_full((2, 9), 0.3) for k in ("coverage", "previous")}
    for deferred in (True, False):
        memory = prepare(key, value, weight, backend=backend)
        memory = memory if deferred else memory._replace(shared_keys=None)
        context, *_ = attend_with_history(query, memory, scale=0.4, **args, **state)
        grads.append(torch.autograd.grad(context.sin().sum(), leaves))
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("terms", [("penalty",), ("location",)])
def test_steps_have_no_second_derivative(terms, backend):
    """Also where the context's gradient is a constant, and for what is taken at the end."""
    case = History("tanh", 2, 3, 9, 8, 5, terms=terms)
    skip_unless(backend, case)
    if backend == "reference":
        pytest.skip("PyTorch differentiates it")
    args = {k: v for k, v in arguments(case, DEVICE[backend]).items() if v is not None}
    query, key, value, weight = (args.pop(k) for k in ("query", "key", "value", "score_vector"))
    memory = prepare(key, value, weight, backend=backend)
    context, *_ = attend_with_history(query[:, :1], memory, **args)
    leaves = [query, key, value, weight, *(x for x in args.values() if x.requires_grad)]
    for grad in torch.autograd.grad(context.sum(), leaves, create_graph=True):
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward(retain_graph=True)
        for x in leaves:
            with pytest.raises(RuntimeError, match="no second derivative"):
                torch.autograd.grad(grad.sum(), x, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("by", [(), ("penalty",), ("location",), ("coverage_weight",)])
def test_hidden_rows_may_have_any_gradient(by, backend):
    """What comes for a row that sees nothing, NaN or not, changes no other row's."""
    case = History("tanh", 2, 2, 9, 8, 5, terms=by)
    skip_unless(backend, case)
    device = DEVICE[backend]
    args = arguments(case, device)
    leaves = [args["key"], args["value"], args["score_vector"]]
    names = ("penalty", "filters", "projection", "coverage_weight")
    terms = {k: args[k] for k in names if k in args}
    nothing = torch.zeros(2, 1, 9, dtype=torch.bool, device=device)
    grads = []
    for poison in (0.0, math.nan):
        memory, total = prepare(*leaves, backend=backend), 0
        for query, mask in zip(args["query"].split(1, -2), (nothing, ~nothing)):
            context, *_ = attend_with_history(query, memory._replace(mask=mask), **terms)
            total = total + (context * (poison if mask is nothing else 1.0)).sum()
        grads.append(torch.autograd.grad(total, [*leaves, *terms.values()]))
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want)
        assert got.isfinite().all()


@pytest.mark.parametrize("by", ["location", "coverage_weight"])
def test_parameters_that_change_in_place_between_steps(by, backend):
    """Steps after it take the new ones, forward and backward, as on a memory made then."""
    case = History("tanh", 2, 2, 9, 8, 5, terms=(by,))
    skip_unless(backend, case)
    grads, contexts = [], []
    for late in (False, True):
        args = arguments(case, DEVICE[backend])
        leaves = [args["key"], args["value"], args["score_vector"]]
        terms = {k: args[k] for k in ("filters", "projection", "coverage_weight") if k in args}
        state = {
            k: torch.full((2, 9), 0.25, device=DEVICE[backend]) for k in ("coverage", "previous")
        }
        memory = prepare(*leaves, backend=backend)
        if not late:
            attend_with_history(args["query"][:, :1], memory, **terms, **state)
        with torch.no_grad():
            for x in terms.values():
                x.mul_(3)
        context, *_ = attend_with_history(args["query"][:, 1:], memory, **terms, **state)
        contexts.append(context)
        grads.append(torch.autograd.grad(context.sin().sum(), [*leaves, *terms.values()]))
    torch.testing.assert_close(*contexts)
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want)


def test_checkpointed_steps():
    args = arguments(History("tanh", 2, 3, 9, 8, 5, terms=("location",)))
    terms = {k: args[k] for k in ("filters", "projection")}
    leaves, grads = [args["key"], args["value"], *terms.values()], []
    for how in (lambda step, *a: step(*a), functools.partial(checkpoint, use_reentrant=False)):
        memory, previous, loss = prepare(args["key"], args["value"], args["score_vector"]), None, 0
        for query in args["query"].split(1, -2):
            step = functools.partial(attend_with_history, memory=memory, need_weights=True, **terms)
            context, weights, _ = how(lambda q, p, s=step: s(q, previous=p), query, previous)
            previous, loss = weights.squeeze(-2), loss + context.sin().sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reached", [True, False])
def test_steps_leave_nothing(reached):
    """Neither after a backward nor without one."""
    args = arguments(History("tanh", 2, 3, 9, 8, 5, terms=("location",)))
    memory = prepare(args["key"] * 1, args["value"], args["score_vector"])
    terms = {k: args[k] for k in ("filters", "projection")}
    result = attend_with_history(args["query"][:, :1], memory, **terms)
    if reached:
        result[0].sum().backward()
    alive = weakref.ref(memory.shared_keys), weakref.ref(memory.key)
    del memory, result
    gc.collect()
    assert [x() for x in alive] == [None, None]


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("score", ["tanh", "dot"])
def test_gradcheck(score, heads, backend):
    features = FEATURES if score == "tanh" else ()
    if backend == "triton" and DEVICE["triton"].type == "cpu":
        pytest.skip("hundreds of calls; the table checks Triton's gradients against the oracle")
    case = History(
        score, 2, 3, 4, 3, 2, heads, dtype=torch.float64, terms=(*TERMS, *features, "bias"),
        per_head=True, filters=(2, 2, 3),
    )  # fmt: skip
    skip_unless(backend, case)
    args = {k: v for k, v in arguments(case, DEVICE[backend]).items() if v is not None}

    def function(*values):
        result = attnfast.coverage_attention(
            **dict(zip(args, values)), need_weights=True, backend=backend
        )
        return attention_cases.every(result)

    assert gradcheck(function, tuple(args.values()))


@pytest.mark.parametrize(
    "terms", [("penalty",), ("transition_prob", "coverage_weight", "location")]
)
def test_hidden_keys_change_nothing(terms, backend):
    """NaN in keys and values past a length or under a mask is as good as 0.

    Results are equal to the bit, except where PyTorch multiplies: what was NaN in its product is
    summed again, in another order.
    """
    case = History("tanh", 2, 3, 21, 9, 6, terms=(*terms, "state", "lengths", "mask"))
    skip_unless(backend, case)
    clean, poisoned = arguments(case, DEVICE[backend]), arguments(case, DEVICE[backend])
    for args in (clean, poisoned):
        args["mask"][..., 1:3] = False
        args["lengths"][0] = 20
    length, mask = clean["lengths"].tolist(), clean["mask"]
    hidden = ~mask.expand(2, case.Tq, case.Tk).any(1)
    for b in range(2):
        hidden[b, length[b] :] = True
    with torch.no_grad():
        for name in ("key", "value"):
            clean[name][hidden], poisoned[name][hidden] = 0, math.nan
    wanted = run(case, clean, backend)
    for name, x in run(case, poisoned, backend).items():
        if backend == "triton":
            torch.testing.assert_close(x, wanted[name])
        else:
            assert torch.equal(x, wanted[name]), name


def test_a_key_out_of_reach_may_have_any_score(backend):
    """Forward attention cannot come to the last key in one step, whatever it would be worth."""
    skip_unless(backend, History("dot", 1, 1, 4, 1, 1))
    device = DEVICE[backend]
    key = torch.tensor([[[1.0], [2.0], [3.0], [300.0]]], device=device)
    one, first = torch.ones(1, 1, 1, device=device), torch.tensor([[1.0, 0, 0, 0]], device=device)
    _, weights, _ = attnfast.coverage_attention(
        one, key, key, transition_prob=0.5, previous=first, need_weights=True, backend=backend
    )
    wanted = torch.tensor([1.0, 2.0]).softmax(0)
    torch.testing.assert_close(weights[0, 0].cpu(), torch.cat([wanted, torch.zeros(2)]))


VANISHING = [  # the last weights, the scores
    ([1.0, 0.0, 1e-41, 2e-41], [-math.inf, -math.inf, 0.0, 0.0]),
    ([1.0, 1e-40, 0.0, 0.0], [-110.0, 0.0, 0.0, 0.0]),
    ([1 - 1e-6, 1e-6, 0.0, 0.0], [-50.0, 0.0, 85.0, 0.0]),
]


@pytest.mark.parametrize(("previous", "bias"), VANISHING)
def test_weights_that_vanish(previous, bias, backend):
    """Forward attention whose weights all lie at keys of next to no score: finite throughout."""
    skip_unless(backend, History("dot", 1, 1, 4, 1, 1))
    device = DEVICE[backend]
    key = torch.zeros(1, 4, 1, device=device)
    value = torch.arange(4.0, device=device).view(1, 4, 1)
    last = torch.tensor([previous], device=device, requires_grad=True)
    given = torch.tensor([[bias]], device=device)

    def weights_of(backend):
        return attnfast.coverage_attention(
            key[:, :1], key, value, transition_prob=0.0, previous=last, bias=given,
            need_weights=True,
            backend=backend,
        )[1]  # fmt: skip

    weights = weights_of(backend)
    torch.testing.assert_close(weights, weights_of("reference"))
    (grad,) = torch.autograd.grad((weights * value.mT).sum(), last)
    assert backend == "reference" or grad.isfinite().all()  # the others stop at e^80


def test_the_loss_of_rows_alike(backend):
    """Where a weight is its key's coverage, of the two it is the weight that gets a gradient."""
    skip_unless(backend, History("dot", 1, 1, 4, 1, 1))
    grads = []
    for name in (backend, "reference"):
        args = arguments(History("dot", 2, 2, 9, 8, 5), DEVICE[name])
        query = args["query"].detach()[:, :1].expand(2, 2, 8).clone().requires_grad_()
        coverage = torch.zeros(2, 9, device=query.device)
        coverage[:, :4] = -0.3  # of these keys the coverage is the smaller
        result = attnfast.coverage_attention(
            query, args["key"], args["value"], coverage=coverage, backend=name
        )
        grads.append(torch.autograd.grad(result.loss.sum(), query)[0].cpu())
    assert grads[1][:, 1].abs().max() > 1e-2
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("factor", [1e4, -5e4])
def test_large_scores(factor, backend):
    case = History("tanh", 2, 3, 33, 16, 8, terms=("penalty", "coverage_weight", "location"))
    skip_unless(backend, case)
    args = arguments(case, DEVICE[backend])
    args["score_vector"] = (args["score_vector"].detach() * factor).requires_grad_()
    for x in run(case, args, backend).values():
        assert x.isfinite().all()


def test_empty_rows(backend):
    """A row that sees nothing gives zeros, and counts in neither coverage nor loss."""
    case = History("tanh", 2, 4, 6, 5, 3, terms=("penalty", "coverage_weight", "location"))
    skip_unless(backend, case)
    args = arguments(case, DEVICE[backend])
    mask = torch.ones(2, 4, 1, dtype=torch.bool, device=DEVICE[backend])
    mask[0, 2:] = False
    args["mask"], args["lengths"] = mask, torch.tensor([6, 0], device=DEVICE[backend])
    got = run(case, args, backend)
    assert all(x.isfinite().all() for x in got.values())
    assert got["context"][0, 2:].eq(0).all() and got["context"][1].eq(0).all()
    assert got["coverage"][1].eq(0).all() and got["loss"][1] == 0
    assert got["coverage"][0].sum().item() == pytest.approx(2)
    assert got["grad of query"][0, 2:].eq(0).all() and got["grad of key"][1].eq(0).all()


def test_second_derivatives_and_forward_mode_raise(backend):
    case = History("tanh", 1, 2, 3, 4, 2, terms=("penalty",))
    skip_unless(backend, case)
    if backend == "reference":
        pytest.skip("PyTorch differentiates it")
    args = arguments(case, DEVICE[backend])
    context = attnfast.coverage_attention(**args, backend=backend)[0]
    (grad,) = torch.autograd.grad(context.sum(), args["query"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative|once_differentiable"):
        grad.sum().backward()
    with forward_ad.dual_level():
        query = args["query"].detach()
        args["query"] = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            attnfast.coverage_attention(**args, backend=backend)


def test_opcheck(backend):
    normalisation = "softmax" if backend == "cpu" else "sigmoid"
    terms = (*TERMS, "location", "lengths", "mask", "bias")
    sizes = (1, 2, 3, 2, 2) if backend == "triton" else (2, 3, 5, 8, 7)
    case = History("tanh", *sizes, H=2, terms=terms, layout="time first")
    skip_unless(backend, case)
    if backend == "reference":
        pytest.skip("not a registered op")
    args = {
        k: None if v is None else v.detach() for k, v in arguments(case, DEVICE[backend]).items()
    }
    ops = getattr(torch.ops, f"attnfast_{backend}")
    history = (
        *(args[k] for k in ("filters", "projection", "penalty", "fertility")),
        None if normalisation == "sigmoid" else args["transition_prob"],
        args["coverage"], args["previous"].log(),
    )  # fmt: skip
    tensors = (*(args[k] for k in ("query", "key", "value", "score_vector")),)
    terms, last = (args["bias"], args["mask"], args["lengths"]), (0.5, "tanh", normalisation)
    call = (*tensors, *terms, *history, *last)
    torch.library.opcheck(ops.coverage_attention.default, call)
    outputs = ops.coverage_attention(*call)
    grads = [torch.randn_like(x) for x in outputs[:5]]
    backward = (*grads, *tensors, args["lengths"], *history, outputs[1], *outputs[4:])
    for needed in ((True,) * 4, (True, False, False, False)):
        torch.library.opcheck(ops.coverage_attention_backward.default, (*backward, *last, *needed))
    shapes = (
        x.shape[-n:] for x, n in ((args["score_vector"], 1), (history[0], 3), (history[1], 2))
    )
    sums = [torch.zeros(args["key"].shape, device=DEVICE[backend])]
    sums += [torch.zeros(*outputs[3].shape, *shape, device=DEVICE[backend]) for shape in shapes]
    torch.library.opcheck(
        ops.coverage_attention_backward_into.default,
        (*backward, *sums, *last, True, True),
    )


def test_compile():
    def loss(args):
        result = attnfast.coverage_attention(**args, need_weights=True)
        context, weights, coverage, lost = attention_cases.every(result)
        return context.sum() + weights.square().sum() + coverage.sin().sum() + lost.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for Tk in (5, 9):
        case = History("tanh", 2, 3, Tk, 8, 8, terms=("penalty", "location", "lengths"))
        args = arguments(case)
        leaves = [v for v in args.values() if v is not None and v.requires_grad]
        for a, b in zip(
            torch.autograd.grad(compiled(args), leaves), torch.autograd.grad(loss(args), leaves)
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("terms", [("penalty",), ("coverage_weight",)])
def test_memory_is_linear(terms):
    """Forward and backward hold numbers of the size of the weights, not of weights × features."""
    case = History("tanh", 2, 60, 200, 64, 32, terms=terms)
    args = arguments(case)
    leaves = [v for v in args.values() if v is not None and v.requires_grad]

    def step():
        result = attnfast.coverage_attention(**args, backend="cpu")
        torch.autograd.grad(result.context.sum() + result.loss.sum(), leaves)

    step()
    numbers = case.B * (case.Tk * case.Tq + (case.Tk + case.Tq) * (case.A + case.Dv))
    assert peak_memory(step, CPU) < 8 * 4 * numbers


def forward_attention_in_logarithms(query, key, value, score_vector, u):
    """Zhang et al.'s recursion from the first key on, log α alone: contexts ``[B, Tq, Dv]``."""
    never = query.new_full((key.shape[0], 1), -1e30)  # whose gradient is 0, not NaN
    log_a = torch.cat([torch.zeros_like(never), never.expand(-1, key.shape[1] - 1)], 1)
    contexts = []
    for t in range(query.shape[1]):
        e = torch.tanh(query[:, t, None] + key) @ score_vector
        before = torch.cat([never, log_a[:, :-1]], 1)
        prior = torch.logaddexp(log_a + math.log(1 - u), before + math.log(u))
        log_a = (prior + e).log_softmax(-1)
        contexts.append((log_a.exp().unsqueeze(1) @ value).squeeze(1))
    return torch.stack(contexts, 1)


@pytest.mark.parametrize("how", [attend, in_steps])
@pytest.mark.parametrize("nats", [0, 9, 26, 100])
def test_forward_attention_of_spread_scores(nats, how, backend):
    """Scores of ±nats in each row: every context and gradient as from logarithms in float64."""
    skip_unless(backend, History("tanh", 2, 15, 10, 2, 1, terms=("transition_prob",)))

    def run(dtype, seed, attend):
        g = torch.Generator().manual_seed(seed)
        shapes = (2, 10, 2), (2, 8, 2), (2, 8, 1), (2,)
        args = [torch.randn(x, generator=g, dtype=torch.float64) for x in shapes]
        args[3] = nats / args[3].abs().sum() * args[3]
        noise = torch.randn(2, 10, 1, generator=g, dtype=torch.float64).to(dtype)
        args = [x.to(dtype).requires_grad_() for x in args]
        context = attend(*args).cpu()
        return [context.detach(), *torch.autograd.grad((context * noise).sum(), args)]

    def fused(q, k, v, w):
        first = torch.zeros(2, 8, dtype=q.dtype, device=DEVICE[backend])
        first[:, 0] = 1
        given = (x.to(DEVICE[backend]) for x in (q, k, v, w))
        u = torch.full((2, 10), 0.3, dtype=q.dtype, device=DEVICE[backend])
        return how(backend)(*given, transition_prob=u, previous=first)[0]

    def in_logarithms(q, k, v, w):
        return forward_attention_in_logarithms(q, k, v, w, 0.3)

    seeds = range(1 if backend == "triton" else 4)
    wanted = [run(torch.float64, seed, in_logarithms) for seed in seeds]
    for dtype, floor in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        if backend == "triton" and (dtype == torch.float64 or nats in (0, 26)):
            continue  # a minute of its interpreter
        ours, plain = (
            [run(dtype, seed, attend) for seed in seeds] for attend in (fused, in_logarithms)
        )
        for i in range(5):
            largest = max(float(x[i].abs().max()) for x in wanted)
            off, lost = (
                max(float((a[i].double() - b[i]).abs().max()) for a, b in zip(x, wanted))
                for x in (ours, plain)
            )
            assert off <= max(floor * largest, 2 * lost), (i, off, lost, largest)
