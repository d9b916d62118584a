"""A source that is refilled: a served module must see every change, whoever made it."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from integrations.plain import projections
from integrations.reference_projects import Attn, BahdanauAttention, bentrevett

import attnfast
from attnfast.integrations.cache import TensorSnapshot

B, TK, D = 2, 5, 6


def through_data(x, new):
    x.data.copy_(new)


def through_numpy(x, new):
    x.detach().numpy()[:] = new.numpy()


def in_place(x, new):
    x.copy_(new)


def of_one_element(x, new):
    x.data[-1, 1, 2] = new[0, 0, 0]


def permuted(x, new):
    x.data.copy_(x.flip(0).clone())


def own_memory():
    return torch.randn(B, TK, D)


def shared_memory():
    return torch.randn(B, TK, D).share_memory_()


def memory_of_numpy():
    return torch.from_numpy(np.random.default_rng(0).normal(size=(B, TK, D)).astype(np.float32))


def part_of_a_buffer():
    return torch.randn(B, TK + 3, D)[:, :TK]


def transposed():
    return torch.randn(TK, B, D).transpose(0, 1)


def that_needs_gradients():
    return torch.randn(B, TK, D, requires_grad=True)


def made_in_inference_mode():
    with torch.inference_mode():
        return torch.randn(B, TK, D)


KINDS = {
    "additive": (lambda: BahdanauAttention(D), lambda m, q, k: m(q.unsqueeze(1), k)),
    "dot": (lambda: Attn("dot", D), lambda m, q, k: m(q.unsqueeze(0), k.transpose(0, 1))),
    "concat": (lambda: bentrevett("", False, D, D), lambda m, q, k: m(q, k.transpose(0, 1))),
}


@functools.cache
def modules(kind):
    """Return a module and its replacement; each is compared but once."""
    torch.manual_seed(0)
    plain = KINDS[kind][0]().eval()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    return plain, served


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change", [through_data, through_numpy, in_place, of_one_element, permuted]
)
@pytest.mark.parametrize(
    "source",
    [own_memory, shared_memory, memory_of_numpy, part_of_a_buffer, transposed,
     that_needs_gradients, made_in_inference_mode],
)  # fmt: skip
def test_a_refilled_source(kind, change, source):
    (plain, served), call, x = modules(kind), KINDS[kind][1], source()
    grad = x.requires_grad and change is not in_place
    with torch.inference_mode(x.is_inference()), torch.set_grad_enabled(grad):
        for _ in range(3):
            for _ in range(2):
                query = torch.randn(B, D)
                torch.testing.assert_close(call(served, query, x), call(plain, query, x))
            change(x, torch.randn(B, TK, D))


def test_lengths_that_are_refilled():
    lengths = torch.tensor([2, 3])
    seen = TensorSnapshot(lengths, exact=True)
    assert seen.is_unchanged(lengths)
    lengths.numpy()[1] = 2
    assert not seen.is_unchanged(lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_stays_is_projected_once(kind):
    (_, served), call = modules(kind), KINDS[kind][1]
    for x in (own_memory(), memory_of_numpy(), part_of_a_buffer(), own_memory().fill_(torch.nan),
              made_in_inference_mode()):  # fmt: skip
        with torch.inference_mode(x.is_inference()), torch.no_grad(), projections() as projected:
            call(served, torch.randn(B, D), x)
            before = projected.call_count
            for _ in range(3):
                call(served, torch.randn(B, D), x)
            assert projected.call_count == before


def test_what_a_graph_made_is_known_by_its_version():
    """Its values are not compared, and no copy is made; NumPy's view of it ends that."""
    weight = torch.randn(D, D, requires_grad=True)
    made = torch.randn(B, TK, D) @ weight
    assert (
        TensorSnapshot(made, exact=True).copy is None
        and TensorSnapshot(made.mT, exact=True).copy is None
    )
    made.detach().numpy()
    assert TensorSnapshot(made, exact=True).copy is not None
    buffer = memory_of_numpy()
    buffer.copy_(torch.randn(B, TK, D) * weight.sum())
    assert buffer.grad_fn is not None and TensorSnapshot(buffer, exact=True).copy is not None
