"""What a replaced module keeps: keys are projected once per source, and never stale."""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import pytest
import torch
from integrations.plain import inputs, model, projections, register, run, same
from integrations.reference_projects import (
    AdditiveAttention,
    AttentionLayer,
    Attn,
    CaptionAttention,
    GNMTAttention,
    Plain,
    bentrevett,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune

import attnfast
from attnfast.decoding import prepare
from attnfast.integrations import ADAPTERS
from attnfast.integrations.cache import PLACE, TensorSnapshot
from attnfast.integrations.probe import tensors


@pytest.fixture(autouse=True)
def adapters():
    with mock.patch.dict(ADAPTERS):
        register()
        yield


def test_keys_are_projected_once_per_source():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    with projections() as projected:
        for _ in range(2):
            states, memory, mask = inputs(steps=4)
            same(run(m, states, memory, mask), run(plain, states, memory, mask))
    assert projected.call_count == 2


def test_after_an_optimiser_step():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    for attention in (m, plain):
        optimiser = torch.optim.SGD(attention.parameters(), 0.5)
        for _ in range(2):
            optimiser.zero_grad()
            sum(attention(s, memory, mask)[0].sum() for s in states).backward()
            optimiser.step()
    with torch.no_grad():
        for s in states:
            torch.testing.assert_close(m(s, memory, mask), plain(s, memory, mask))


def test_a_step_between_two_calls_without_gradients():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    with torch.no_grad():
        for change in (m.key.weight, m.energy.weight, memory):
            m(states[0], memory, mask)
            change.mul_(1.5)
            if change is not memory:
                dict(plain.named_parameters())[
                    next(k for k, p in m.named_parameters() if p is change)
                ].mul_(1.5)
            torch.testing.assert_close(m(states[1], memory, mask), plain(states[1], memory, mask))


def averages(m):
    return {k: 0.5 * p.detach() + 0.1 * torch.randn_like(p) for k, p in m.named_parameters()}


def copy_through_data(m, new):
    for k, p in m.named_parameters():
        p.data.copy_(new[k])


def mix_through_data(m, new):
    for k, p in m.named_parameters():
        p.data.mul_(0.5).add_(new[k], alpha=0.5)


def assign_data(m, new):
    for k, p in m.named_parameters():
        p.data = new[k].clone()


def from_a_vector(m, new):
    vector = torch.cat([new[k].flatten() for k, _ in m.named_parameters()])
    nn.utils.vector_to_parameters(vector, m.parameters())


def load(m, new):
    m.load_state_dict({**m.state_dict(), **new})


def load_assigned(m, new):
    m.load_state_dict({**m.state_dict(), **new}, assign=True)


CHANGES = [copy_through_data, mix_through_data, assign_data, from_a_vector, load, load_assigned]


OF_ONE_SOURCE = {
    "plain": (Plain, lambda m, q, h: m(q, h)),
    "gnmt": (lambda: GNMTAttention(6, 6, 5, True, True), lambda m, q, h: m(q, h)),
    "bentrevett": (lambda: bentrevett("2024", False, 6, 6), lambda m, q, h: m(q, h)),
    "allennlp": (lambda: AdditiveAttention(6, 6), lambda m, q, h: m(q, h)),
    "sgrvinod": (lambda: CaptionAttention(6, 6, 5), lambda m, q, h: m(h, q)),
    "chatbot": (lambda: Attn("general", 6), lambda m, q, h: m(q.unsqueeze(0), h)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OF_ONE_SOURCE)
def test_averages_that_are_swapped_in_between_two_calls(name, change, grad):
    make, call = OF_ONE_SOURCE[name]
    torch.manual_seed(0)
    plain = make()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    source, query = torch.randn(3, 3, 6), torch.randn(3, 6)
    with torch.set_grad_enabled(grad):
        for _ in range(4):  # also where what was freed is allocated again
            torch.testing.assert_close(call(served, query, source), call(plain, query, source))
            new = averages(plain)
            for m in (plain, served):
                change(m, new)


def test_averages_of_torch():
    """A served model within a running average, which is updated between two calls."""
    m = model()["a0"]
    attnfast.replace(m)
    averaged = torch.optim.swa_utils.AveragedModel(m)
    plain = Plain()
    states, memory, mask = inputs()
    with torch.no_grad():
        for _ in range(3):
            averaged.update_parameters(m)
            plain.load_state_dict(averaged.module.state_dict())
            torch.testing.assert_close(
                averaged(states[0], memory, mask), plain(states[0], memory, mask)
            )
            for p in m.parameters():
                p.add_(0.5)


def test_training_and_evaluation_end_what_is_kept():
    m = model()["a0"]
    attnfast.replace(m)
    states, memory, mask = inputs()
    with torch.no_grad():
        for change in (m.train, m.eval):
            m(states[0], memory, mask)
            assert vars(m)[PLACE]
            change()
            assert not vars(m).get(PLACE)


@torch.no_grad()
def test_a_source_that_a_graph_made_and_that_changes_in_place():
    """Its version tells, and no copy is kept."""
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    with torch.enable_grad():
        made = memory * 2
    for state in states:
        torch.testing.assert_close(m(state, made, mask), plain(state, made, mask))
        made.mul_(-1.5)


def test_backward_twice_over_one_source():
    """The graph of the kept keys is gone after the first."""
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    args = inputs()
    for _ in range(2):
        same(run(m, *args), run(plain, *args))


def test_retained_graph_and_a_loss_for_each_step():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    grads = []
    for attention in (m, plain):
        losses = [attention(s, memory, mask)[0].square().sum() for s in states]
        grads.append(
            [
                torch.autograd.grad(x, [memory, *attention.parameters()], retain_graph=True)
                for x in losses
            ]
        )
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_grad_mode_may_change():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    args = inputs()
    with torch.no_grad():
        m(args[0][0], *args[1:])
    same(run(m, *args), run(plain, *args))
    with torch.inference_mode():
        torch.testing.assert_close(m(args[0][0], *args[1:]), plain(args[0][0], *args[1:]))
    same(run(m, *args), run(plain, *args))


def test_parameters_made_in_inference_mode():
    """They have no version, and a change may spare the elements that are stored of others."""
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    with torch.inference_mode():
        for x in (m, plain):
            x.key.weight = torch.nn.Parameter(x.key.weight.clone())
        for _ in range(2):
            torch.testing.assert_close(m(states[0], memory, mask), plain(states[0], memory, mask))
            for x in (m, plain):
                x.key.weight[0, 1] += 5


def test_slices_and_beams():
    """The batch shrinks, and a beam search repeats and reorders sources."""
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs(B=4)
    with torch.no_grad():
        for index in ([0, 1, 2, 3], [0, 1, 2], [2, 0], [0, 0, 2, 2, 3, 3], [3, 3, 0, 2, 2, 1]):
            for s in states:
                args = s[index], memory[index], mask[index]
                torch.testing.assert_close(m(*args), plain(*args))
            views = states[0][: len(index)], memory[: len(index)], mask[: len(index)]
            torch.testing.assert_close(m(*views), plain(*views))


@pytest.mark.parametrize("grad", [False, True])
def test_sources_that_come_once_are_not_prepared(grad):
    """A beam search that indexes its source at every step; then one that does not."""
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs(B=4, steps=20)
    with (
        torch.set_grad_enabled(grad),
        mock.patch("attnfast.integrations.helpers.prepare", wraps=prepare) as made,
    ):
        for s in states:
            args = s, memory[torch.randperm(4)], mask
            torch.testing.assert_close(m(*args), plain(*args))
        assert made.call_count <= 4
        for s in states:
            torch.testing.assert_close(m(s, memory, mask), plain(s, memory, mask))
        assert made.call_count <= 5
        with projections() as projected:
            m(states[0], memory, mask)
        assert not projected.called


BROADCAST = [(n, r) for n in ("plain", "sgrvinod", "allennlp", "dot") for r in ((3, 1), (1, 3))]


@pytest.mark.parametrize(("name", "rows"), [*BROADCAST, ("fairseq", (3, 1))])
def test_one_source_for_many_queries_and_the_reverse(name, rows):
    """Where the project's own code broadcasts."""
    torch.manual_seed(0)
    B, S = rows
    if name == "fairseq":
        plain, call = AttentionLayer(6, 6, 5), lambda m, q, h: m(q, h.transpose(0, 1), None)
    elif name == "dot":
        plain, call = Attn("dot", 6), lambda m, q, h: m(q.unsqueeze(0), h.transpose(0, 1))
    else:
        make, call = OF_ONE_SOURCE[name]
        plain = make()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    source = torch.randn(S, 4, 6, requires_grad=True)
    for _ in range(3):
        query = torch.randn(B, 6, requires_grad=True)
        got, want = (
            [x for x in tensors(call(m, query, source)) if x is not None] for m in (served, plain)
        )
        torch.testing.assert_close(got, want)
        weights = [torch.randn_like(x) for x in want]
        grads = [
            torch.autograd.grad(x, [query, source, *m.parameters()], weights, allow_unused=True)
            for x, m in ((got, served), (want, plain))
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    grads = []
    for attention in (m, plain):
        losses = [
            torch.utils.checkpoint.checkpoint(
                lambda s, h, a=attention: a(s, h, mask)[0], s, memory, use_reentrant=reentrant
            )
            .square()
            .sum()
            for s in states
        ]
        for p in attention.parameters():
            p.grad = None
        memory.grad = None
        sum(losses).backward()
        grads.append([memory.grad, *(p.grad for p in attention.parameters())])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_autocast():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    m(states[0], memory, mask)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = m(states[0], memory, mask), plain(states[0], memory, mask)
    torch.testing.assert_close(
        [x.float() for x in got], [x.float() for x in want], atol=2e-2, rtol=2e-2
    )
    assert m(states[0], memory, mask)[0].dtype == torch.float32


def test_nothing_of_a_source_stays_after_backward():
    m = model()["a0"]
    attnfast.replace(m)
    run(m, *inputs())
    assert not vars(m)[PLACE]


def test_layers_that_are_not_plain_are_called_at_every_step():
    m = model()["a0"]
    m.key = nn.utils.parametrizations.weight_norm(m.key)
    names = [n for n, _ in m.named_parameters()]
    register(parameters=names)
    plain = copy.deepcopy(m)
    assert attnfast.replace(m).replaced
    same(run(m, *inputs()), run(plain, *inputs()))


@torch.no_grad()
def test_a_weight_that_a_hook_computes_is_seen_to_change():
    plain = bentrevett("2024", False, 6, 6)
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    state, memory = torch.randn(2, 6), torch.randn(5, 2, 6)
    for m in (served, plain):
        m(state, memory)
        prune.random_unstructured(m.attn_fc, "weight", 0.0)
        m.attn_fc.weight_orig.mul_(2)  # its weight is another after the next call
    torch.testing.assert_close(served(state, memory), plain(state, memory))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler of torch 2.10 and 2.11
def test_compile():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    got = torch.compile(m)(states[0], memory, mask)
    torch.testing.assert_close(got, plain(states[0], memory, mask))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compile_in_one_graph_with_the_rectifier():
    plain = CaptionAttention(6, 6, 5)
    m = copy.deepcopy(plain)
    attnfast.replace(m, strict=True)
    source, query = torch.randn(3, 4, 6), torch.randn(3, 6)
    got = torch.compile(m, backend="aot_eager", fullgraph=True)(source, query)
    torch.testing.assert_close(got, plain(source, query))


def test_views_of_one_tensor_are_told_apart():
    x = torch.randn(4, 6)
    seen = TensorSnapshot(x[:, :3])
    assert seen.is_unchanged(x[:, :3])
    for other in (x[:, :2], x[:3, :3], x[:, :6:2], x[:, :3].T, x.view(torch.int32)[:, :3]):
        assert not seen.is_unchanged(other)


@pytest.mark.parametrize("grad", [False, True])
def test_a_graph_that_is_traced_takes_its_own_source(grad):
    """What is kept of a source would be a constant of the graph."""
    m = model()["a0"].requires_grad_(grad)
    attnfast.replace(m, strict=True)
    (state, *_), memory, mask = inputs()
    with torch.set_grad_enabled(grad):
        m(state, memory, mask)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jit.trace is deprecated
            traced = torch.jit.trace(m, (state, memory, mask), check_trace=False)
        graphs = [traced] if grad else [traced, make_fx(m)(state, memory, mask)]
        want = m(state * 2, memory + 1, mask)
        for graph in graphs:
            torch.testing.assert_close(graph(state * 2, memory + 1, mask), want)
