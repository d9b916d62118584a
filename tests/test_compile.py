"""torch.compile: every module and function in one graph, for all sizes and numbers that change."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, check, every, in_orders, inputs, oracle_of, results
from torch import Tensor

import attnfast
from attnfast import Span, alignment_loss, copy_distribution, coverage_attention
from attnfast.nn import (
    BahdanauAttention,
    CoverageAttention,
    ForwardAttention,
    HardMonotonicWindowAttention,
    LocalAttention,
    LocalPredictiveAttention,
    LocationAwareAttention,
    LuongAttention,
    MultiHeadAttention,
    PointerGenerator,
    SparseSelfAttention,
    StridedAttention,
)

A, DV, V = 8, 6, 10
#: B, Tq, Tk, and a number that changes from call to call, from 1 on, as annealing does.
CALLS = [(3, 5, 11, 1.0), (2, 4, 9, 1.3), (5, 3, 12, 0.7)]

MODULES = {
    "bahdanau": BahdanauAttention(A, A, A, bias=True),
    "relu": BahdanauAttention(A, A, A, activation="relu"),
    **{score: LuongAttention(A, A, score) for score in LuongAttention.SCORES},
    "heads, dot": MultiHeadAttention(A, A, A, 2),
    "heads, additive": MultiHeadAttention(A, A, A, 2, "additive"),
    "coverage": CoverageAttention(A, A, A, penalty=1.0, fertility=2.0),
    "location": LocationAwareAttention(A, A, A, num_filters=3, width=3, channels="both"),
    "forward": ForwardAttention(A, A, A),
    "local": LocalAttention(A, A, window=2),
    "predictive": LocalPredictiveAttention(A, A, window=2),
    "strided": StridedAttention(A, A, 2),
    "monotonic": HardMonotonicWindowAttention(A, A, ahead=2),
}
SELF = {
    "dot": SparseSelfAttention(A, [Span(window=2), Span(stride=2)]),
    "additive": SparseSelfAttention(A, [Span(window=2), Span(stride=2, fixed=True)], "additive"),
}
POINTER = PointerGenerator(4, 3)


def tensors(B: int, Tq: int, Tk: int, H: int | None = None) -> dict[str, Tensor]:
    """What attention takes, leaves that require gradients where they can."""
    lead = (B,) if H is None else (B, H)
    x = {
        "query": torch.randn(*lead, Tq, A),
        "key": torch.randn(*lead, Tk, A),
        "value": torch.randn(*lead, Tk, DV),
        "bias": torch.randn(*lead, 1, Tk),
        "score_vector": torch.randn(A),
    }
    x = {name: leaf.requires_grad_() for name, leaf in x.items()}
    mask = (torch.rand(*lead, Tq, Tk) > 0.2).index_fill(-1, torch.tensor(0), True)
    return x | {"mask": mask, "lengths": torch.randint(1, Tk + 1, (B,))}


def additive(x, number, **options):
    return attnfast.additive_attention(**x, temperature=number, need_weights=True, **options)


def dot(x, number, **options):
    x = {name: y for name, y in x.items() if name != "score_vector"}
    return attnfast.dot_attention(**x, temperature=number, need_weights=True, **options)


def by_penalty(x, number):
    B, Tk = x["key"].shape[:2]
    terms = {"penalty": number, "fertility": x["key"].sigmoid().sum(-1), "scale": number / 2}
    x = {name: y for name, y in x.items() if name != "score_vector"}
    start = x["value"].new_zeros(B, Tk)
    return every(coverage_attention(**x, **terms, coverage=start, need_weights=True))


def by_filters(x, number):
    wide = {"filters": x["key"].sum() * torch.ones(2, 1, 3), "projection": torch.ones(A, 2)}
    return every(coverage_attention(**x, **wide, temperature=number, channels="coverage"))


def forward(x, number):
    start = x["bias"].squeeze(1).softmax(-1)
    return coverage_attention(**x, transition_prob=number / 3, previous=start, need_weights=True)


def copying(x, number, num_oov=2):
    logits = torch.nn.functional.pad(x["query"], (0, V - A))
    weights = x["bias"].expand(-1, logits.shape[1], -1).softmax(-1)
    gate = x["query"].sum(-1) / number
    source = x["lengths"].unsqueeze(1).expand(weights.shape[0], weights.shape[2]) % V
    mixed = copy_distribution(logits, weights, source, gate, num_oov=num_oov, log=True)
    features = (x["query"][..., :4], x["query"][..., 4:7])
    return mixed, POINTER(logits, weights, source, *features, num_oov=num_oov)


def aligned(x, number):
    weights = (x["bias"] * number + x["query"].sum(-1, keepdim=True)).softmax(-1)
    B, Tq, Tk = weights.shape
    keys = Span(window=2).key_indices(Tq, Tk)
    index = torch.arange(Tq).expand(B, Tq)
    return (
        alignment_loss(weights, index),
        alignment_loss(weights, weights.detach() / 2, kind="squared"),
        alignment_loss(weights[..., :5], index, key_indices=keys),
        alignment_loss(weights[..., :5], weights.detach(), key_indices=keys),
    )


def predicted(x, number):
    position = x["query"].sum(-1)
    return additive(x, number, span=Span(window=2), position=position, sigma=2 * number)


def heads(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two heads, of one's numbers."""
    alone = ("score_vector", "lengths")
    return {k: y if k in alone else torch.stack([y, y], 1) for k, y in x.items()}


def itself(name):
    def run(x, number):
        mask = x["mask"][:, 0]
        out, weights = SELF[name](x["key"], x["lengths"], mask, need_weights=True)
        return out, *weights

    return run


FUNCTIONS = {
    "additive": additive,
    "dot": dot,
    "dot, scale": lambda x, n: dot(x, 1.0, scale=n),
    "window": lambda x, n: dot(x, n, span=Span(window=2), position="end", sigma=n),
    "window, heads": lambda x, n: additive(heads(x), n, span=[Span(window=2), Span(stride=2)])[:1],
    "diagonal": lambda x, n: additive(x, n, span=Span(window=2), position="diagonal"),
    "predicted": predicted,
    "stride": lambda x, n: dot(x, n, span=Span(stride=2)),
    "stride, fixed": lambda x, n: additive(x, n, span=Span(stride=2, fixed=True)),
    "dilated": lambda x, n: dot(x, n, span=Span(window=4, stride=2)),
    "coverage, penalty": by_penalty,
    "coverage, filters": by_filters,
    "coverage, forward": forward,
    "copying": copying,
    "alignment": aligned,
    **{f"self-attention, {name}": itself(name) for name in SELF},
}


def anneal(number: float) -> None:
    """Give modules the number that changes."""
    for module in (*MODULES.values(), *SELF.values()):
        module.temperature = number
    MODULES["coverage"].penalty = number / 2
    MODULES["local"].slope = number


def of_module(name):
    """A module's memory, all rows at once and a loop of steps."""
    module = MODULES[name]

    def run(x, number):
        more = {"transition_prob": number / 2} if name == "forward" else {}
        memory = module.prepare(x["key"], x["lengths"], x["mask"][:, 0])
        states = x["query"]
        state, outputs = states[:, 0], []
        if name != "monotonic":  # as many steps as rows
            outputs.append(module(states, memory, need_weights=True, **more)[:2])
        history = ()
        for _ in range(2):
            context, weights, *history = module(state, memory, *history, need_weights=True, **more)
            state = state + context
            outputs.append((context, weights))
        return [y for pair in outputs for y in pair]

    return run


RUNS = {f"{name} module": of_module(name) for name in MODULES} | FUNCTIONS


def both(run, compiled, number, x):
    """Assert that compiled and eager code return the same, and give the same gradients."""
    leaves = [y for y in x.values() if y.requires_grad]
    for parameters in (*MODULES.values(), *SELF.values(), POINTER):
        leaves += parameters.parameters()
    outputs = [[y for y in how(x, number) if y is not None] for how in (compiled, run)]
    noise = [torch.randn_like(y) for y in outputs[0]]
    grads = [
        torch.autograd.grad([(y * n).sum() for y, n in zip(of, noise)], leaves, allow_unused=True)
        for of in outputs
    ]
    torch.testing.assert_close(*outputs)
    for a, b, leaf in zip(*grads, leaves):
        zeros = torch.zeros_like(leaf)
        a, b = (zeros if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


#: Nearly all in a graph for every size; some as the default goes, which is theirs to know.
SLOW = {"window, heads", "dilated", "self-attention, dot", "strided module", "predictive module"}
#: Their graphs are those of others but for a projection or an activation.
ALIKE = {f"{x} module" for x in ("relu", "scaled_dot", "general", "concat", "cosine")}
ALIKE |= {"heads, additive module", "self-attention, additive"}
ALIKE |= {"stride", "predicted"}  # in those of "strided module" and "predictive module"
GRAPHS = [
    *((name, True) for name in RUNS if name not in {"window, heads", "dilated"} | ALIKE),
    *((name, None) for name in [*RUNS][::9] if name not in SLOW | ALIKE),
]


@pytest.mark.parametrize(("name", "dynamic"), GRAPHS)
def test_one_graph(name, dynamic):
    """It serves other sizes and other numbers: with the default, from the second call on.

    Operators are traced by functions and by two modules; others compute around them as these do.
    """
    run = RUNS[name]
    torch._dynamo.reset()
    traced = name in FUNCTIONS or name in {"bahdanau module", "location module"}
    backend = "aot_eager" if dynamic and traced else "eager"
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=backend)
    for i, (*sizes, number) in enumerate(CALLS):
        torch.manual_seed(i)
        stance = "fail_on_recompile" if i > (not dynamic) else "default"
        with torch.compiler.set_stance(stance):
            anneal(number)
            both(run, compiled, number, tensors(*sizes))


def test_one_graph_of_the_default_compiler():
    torch._dynamo.reset()
    run = RUNS["coverage, penalty"]
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for i, (*sizes, number) in enumerate(CALLS[:2]):
        torch.manual_seed(i)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            both(run, compiled, number, tensors(*sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_scales_keep_the_rule(score, dtype):
    """In a graph the scale is multiplied into the query or the weight, and so rounded with it."""
    case = Case(score, 2, 5, 70, 96, 24, dtype=dtype)
    scale = 0.37

    def attend(query, key, value, score_vector, bias, mask, lengths, backend=None):
        terms = {"need_weights": True, "backend": backend, "temperature": 1 / scale}
        if score_vector is None:
            return attnfast.dot_attention(query, key, value, scale=1.0, **terms)
        return attnfast.additive_attention(query, key, value, score_vector, **terms)

    def eager(query, key, value, score_vector, **_):
        if score_vector is None:
            e = query @ key.mT * scale
        else:
            e = (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh() @ score_vector * scale
        return e.softmax(-1) @ value, e.softmax(-1), e.logsumexp(-1)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    want = oracle_of(case, lambda **args: attend(**args, backend="reference"))
    plain = (results(case, inputs(case), how) for how in in_orders(eager))
    check(case, results(case, inputs(case), compiled), want, plain)
