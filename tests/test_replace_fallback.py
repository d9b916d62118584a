"""Calls of a replaced module that attnfast does not serve: its own code runs."""

from __future__ import annotations

import copy
import pickle
import warnings
from unittest import mock

import pytest
import torch
from integrations.plain import inputs, register
from integrations.reference_projects import BahdanauAttention, Plain, bentrevett
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

import attnfast
from attnfast.integrations import ADAPTERS


@pytest.fixture(autouse=True)
def adapters():
    with mock.patch.dict(ADAPTERS):
        register()
        yield


@pytest.fixture(name="both")
def two_modules():
    """Return a function that compares what it computes with a module and its replacement."""
    torch.manual_seed(0)
    plain = BahdanauAttention(6)
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    query, keys = torch.randn(2, 1, 6), torch.randn(2, 4, 6)
    served(query, keys)  # what is kept of the source must not be taken

    def compare(compute):
        got, want = (tree_leaves(compute(m, query, keys)) for m in (served, plain))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)

    return compare


def total(m, query, keys):
    return m(query, keys)[0].sin().sum()


def of_parameters(m, query, keys):
    parameters = {name: p.detach() for name, p in m.named_parameters()}
    return grad(lambda p: functional_call(m, p, (query, keys))[0].sin().sum())(parameters)


def of_samples(m, query, keys):
    parameters = {name: p.detach() for name, p in m.named_parameters()}

    def loss(p, q, k):
        return functional_call(m, p, (q[None], k[None]))[0].sin().sum()

    return vmap(grad(loss), (None, 0, 0))(parameters, query, keys)


def of_scaled_parameters(m, query, keys):
    return [
        functional_call(m, {n: p * s for n, p in m.named_parameters()}, (query, keys))
        for s in (1.0, 2.0)
    ]


def forward_mode(m, query, keys):
    with forward_ad.dual_level():
        dual = m(forward_ad.make_dual(query, query.sin()), keys)[0]
        return forward_ad.unpack_dual(dual).tangent


TRANSFORMS = {
    "grad": lambda m, q, k: grad(lambda q: total(m, q, k))(q),
    "grad of parameters": of_parameters,
    "grad of samples": of_samples,
    "functional_call": of_scaled_parameters,
    "vmap": lambda m, q, k: vmap(lambda s: m(q * s, k))(torch.arange(3.0)),
    "jacrev": lambda m, q, k: jacrev(lambda q: m(q, k)[0])(q),
    "hessian": lambda m, q, k: hessian(lambda q: total(m, q, k))(q),
    "jvp": lambda m, q, k: jvp(lambda q: m(q, k)[0], (q,), (q.sin(),)),
    "forward mode": forward_mode,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(both, name):
    both(TRANSFORMS[name])


def test_what_has_no_second_derivative_names_the_way_back(both):
    def twice(m, query, keys):
        query = query.clone().requires_grad_()
        (first,) = torch.autograd.grad(total(m, query, keys), query, create_graph=True)
        return torch.autograd.grad(first.square().sum(), query)

    with pytest.raises(RuntimeError, match=r"report.undo\(\) in a replaced model"):
        both(twice)

    def over_steps(m, query, keys):
        keys = keys.clone().requires_grad_()
        loss = total(m, query, keys) + total(m, query * 2, keys)
        (first,) = torch.autograd.grad(loss, keys, create_graph=True)
        return torch.autograd.grad(first.square().sum(), keys)

    with pytest.raises(RuntimeError, match=r"report.undo\(\) in a replaced model"):
        both(over_steps)


# ---- inner layers that are no longer as they were ------------------------------------------------


def calls_of(hook):
    def calls_of_hooks(m, query, keys):
        calls = []
        for number, layer in enumerate(m.children()):
            getattr(layer, f"register_{hook}")(lambda *_, n=number: calls.append(n))
        for _ in range(2):
            total(m, query.requires_grad_(), keys.requires_grad_()).backward()
        return torch.tensor(calls)

    return calls_of_hooks


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


def doubling_hook(m, query, keys):
    handle = m.Va.register_forward_hook(lambda module, args, output: 2 * output)
    hooked = m(query, keys)
    handle.remove()
    return hooked, m(query, keys)


def global_hook(m, query, keys):
    calls = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: calls.append(type(module) is nn.Linear)
    )
    m(query, keys)
    handle.remove()
    return torch.tensor(sum(calls))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def exchanged(m, query, keys):
    layer = Doubled(6, 1)
    layer.load_state_dict(m.Va.state_dict())
    m.Va = layer
    return m(query, keys), copy.deepcopy(m)(query, keys)


def assigned_forward(m, query, keys):
    m.Va.forward = lambda x: torch.ones(*x.shape[:-1], 1)
    return m(query, keys)


def quantised(m, query, keys):
    both = nn.ModuleDict({"attention": m})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        both = torch.ao.quantization.quantize_dynamic(both, {nn.Linear})
        assert type(both["attention"].Va) is not nn.Linear
        return both["attention"](query, keys)


@pytest.mark.parametrize(
    "change",
    [*map(calls_of, HOOKS), doubling_hook, global_hook, exchanged, assigned_forward, quantised],
)
def test_inner_layers_that_changed(both, change):
    both(change)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_knows_its_layers_too(copied):
    plain = Plain()
    m = copied(copy.deepcopy(plain))
    attnfast.replace(m, strict=True)
    m.energy = Doubled(5, 1)
    m.energy.load_state_dict(plain.energy.state_dict())
    m = copied(m)
    (state, *_), memory, mask = inputs()
    plain.energy.weight.data.mul_(2)
    torch.testing.assert_close(m(state, memory, mask), plain(state, memory, mask))


# ---- shapes that its own code broadcasts or refuses ----------------------------------------------


def same_outcome(served, plain, *args):
    """Compare the results, or the error."""
    outcomes = []
    for m in (served, plain):
        try:
            outcomes.append(tree_leaves(m(*args)))
        except (RuntimeError, IndexError, ValueError) as error:
            outcomes.append(f"{type(error)}: {error}")
    if any(isinstance(x, str) for x in outcomes):
        assert outcomes[0] == outcomes[1]
    else:
        torch.testing.assert_close(*outcomes)


def arguments(make, B, S):
    """Return the states of B decoders and S sources of seven words."""
    if make is bentrevett:
        return torch.randn(B, 4), torch.randn(7, S, 6)
    return torch.randn(B, 6), torch.randn(S, 7, 6)


@pytest.mark.parametrize(
    "shape", [(3, 7), (1, 7), (3, 1), (1, 1), (7,), (1,), (), (2, 3, 7), (1, 3, 7), (2, 7), (3, 6)]
)
@pytest.mark.parametrize("make", [bentrevett, Plain])
def test_masks_of_other_shapes(make, shape):
    torch.manual_seed(0)
    plain = make()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    args = arguments(make, 3, 3)
    mask = torch.rand(shape) < (0.7 if 7 in shape else 1.0)
    same_outcome(served, plain, *args, mask)


@pytest.mark.parametrize("rows", [(1, 3), (3, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("make", [bentrevett, Plain])
def test_batches_that_differ(make, rows):
    """Its own code broadcasts them, or says in its words that it does not."""
    torch.manual_seed(0)
    plain = make()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    args = arguments(make, *rows)
    for mask in (torch.ones(3, 7) > 0, torch.ones(1, 7) > 0):
        same_outcome(served, plain, *args, mask)


# ---- graphs that other programs run --------------------------------------------------------------


def test_a_traced_graph_is_of_the_own_code(both):
    def traced(m, query, keys):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = torch.jit.trace(m, (query, keys))
        assert "attnfast" not in str(graph.inlined_graph)
        return graph(query * 2, keys + 1)

    both(traced)


class Within(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, query, keys):
        return self.attention(query, keys)


def test_a_script_is_of_the_own_code(both):
    def scripted(m, query, keys):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(Within(m))(query * 2, keys + 1)

    both(scripted)


def test_an_onnx_graph_is_of_the_own_code(both):
    def exported(m, query, keys):
        graph = torch.export.export(m, (query, keys), strict=False)
        assert "attnfast" not in str(graph.graph)
        return graph.module()(query * 2, keys + 1)

    with mock.patch("torch.onnx.is_in_onnx_export", return_value=True):
        both(exported)
