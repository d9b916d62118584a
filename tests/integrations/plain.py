"""An adapter for the double Plain, which the tests of replacing itself register and call."""

from __future__ import annotations

from unittest import mock

import torch
from integrations.reference_projects import Plain
from torch import nn

import attnfast
from attnfast.integrations import Adapter, attend_to_source, keep_in_graph, project
from attnfast.nn import _linear

PARAMETERS = ["query.weight", "query.bias", "key.weight", "energy.weight", "energy.bias"]


class Served:
    """The methods of Plain's replacement."""

    def forward(self, state, memory, mask=None):
        key = project(self, "key", self.key, memory)
        context, self.last = attend_to_source(
            self, self.query(state), key, memory, self.energy.weight, mask=mask
        )
        return keep_in_graph(context, self.energy.bias), self.last


def example(module, draw):
    for lengths in draw.sources((4, 2)):
        B, Tk = len(lengths), max(lengths)
        memory = draw(B, Tk, module.key.in_features)
        for _ in range(3):
            yield module(draw(B, module.query.in_features), memory, mask=draw.seen(lengths, Tk))


def register(implementation=Served, **more):
    terms = {"classes": ["Plain"], "parameters": PARAMETERS, "example": example, "name": "plain"}
    attnfast.register_adapter(Adapter(implementation=implementation, **{**terms, **more}))


def model(n=1):
    torch.manual_seed(0)
    return nn.ModuleDict({f"a{i}": Plain() for i in range(n)})


def inputs(B=2, Tk=4, steps=3):
    torch.manual_seed(1)
    memory = torch.randn(B, Tk, 6, requires_grad=True)
    mask = torch.arange(Tk) < torch.tensor([Tk, Tk - 2] * (B // 2)).unsqueeze(1)
    return [torch.randn(B, 6, requires_grad=True) for _ in range(steps)], memory, mask


def run(attention, states, memory, mask):
    """All outputs and gradients of a recurrent loop."""
    context, outputs = 0, []
    for state in states:
        context, weights = attention(state + context, memory, mask)
        outputs += [context, weights]
    loss = sum((x.sin() * (i + 1)).sum() for i, x in enumerate(outputs))
    leaves = [*states, memory, *attention.parameters()]
    return outputs, torch.autograd.grad(loss, leaves, allow_unused=True)


def same(got, want):
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def projections():
    """Count the projections of keys: a hook would have the module run its own code."""
    return mock.patch.object(_linear, "project", wraps=_linear.project)


def as_plain(cls):
    """Let a class be known as Plain, as a copy is."""
    cls.__qualname__ = "Plain"
    return cls
