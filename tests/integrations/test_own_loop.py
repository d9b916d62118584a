"""Weights' gradients of a loop, computed at once, against autograd's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attnfast.integrations.own_loop import WeightGradients

STEPS = 5


class Loop(nn.Module):
    """A cell over steps and a layer on its states; the first input is the layer's last output."""

    def __init__(self, cell=nn.LSTMCell, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.cell = cell(6, 6, bias=bias)
        self.layer = nn.Linear(6, 6, bias=bias)
        self.double()

    def forward(self, x, steps=STEPS):
        state = (x, x.tanh()) if isinstance(self.cell, nn.LSTMCell) else x
        outputs = []
        for _ in range(steps):
            state = self.cell(x, state)
            x = self.layer(state[0] if isinstance(state, tuple) else state)
            outputs.append(x)
        return torch.stack(outputs)


def gradients(loop, x, use, at_once):
    with WeightGradients() if at_once else torch.enable_grad():
        y = loop(x)
    return use(y, [x, *loop.parameters()])


def check(use, loop=None, rows=3):
    """Compare what ``use`` returns of a loop's outputs and leaves."""
    loop = loop or Loop()
    x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    old, new = (gradients(loop, x, use, at_once) for at_once in (False, True))
    torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 3, 20])
def test_gradients(cell, bias, rows):
    check(lambda y, leaves: torch.autograd.grad(y.sin().sum(), leaves), Loop(cell, bias), rows)


def test_inputs_of_three_axes():
    layer, x = nn.Linear(8, 5).double(), torch.randn(2, 3, 8, dtype=torch.float64)

    def loop(at_once):
        with WeightGradients() if at_once else torch.enable_grad():
            y = sum(layer(x * t) for t in range(3))
        return torch.autograd.grad(y.sin().sum(), [layer.weight, layer.bias])

    torch.testing.assert_close(loop(True), loop(False), rtol=1e-12, atol=1e-12)


def test_several_backwards():
    """Backward passes through one graph, through a part of it, and to its input alone."""

    def use(y, leaves):
        def grad(y, of):
            return torch.autograd.grad(y.sum(), of, retain_graph=True, allow_unused=True)

        return [
            *grad(y, leaves[:1]), *grad(y[1], leaves), *grad(y, leaves), *grad(y[3], leaves[1:]),
            *grad(y * 2, leaves),
        ]  # fmt: skip

    check(use)


def test_second_derivatives():
    def use(y, leaves):
        first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    check(use)


def test_weights_that_are_computed():
    """As weight normalisation does; its parameters have gradients, and frozen ones have none."""
    loop = Loop()
    nn.utils.parametrizations.weight_norm(loop.layer)
    loop.layer.bias.requires_grad_(False)

    def use(y, leaves):
        leaves = [x for x in leaves if x.requires_grad]
        return torch.autograd.grad(y.sin().sum(), leaves)

    check(use, loop)


def test_an_input_that_is_overwritten_raises():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with WeightGradients():
        y = layer(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Products(TorchDispatchMode):
    """Record the sizes of the products that run."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.sizes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize(("rows", "products"), [(3, 1), (20, STEPS)])
def test_one_product_for_each_weight(rows, products):
    """None of them is deferred where inputs have more rows than features."""
    weight, x = nn.Parameter(torch.randn(7, 6)), torch.randn(rows, 6)
    with WeightGradients():
        y = sum(F.linear(x + t, weight) for t in range(STEPS))
    with Products() as run:
        y.sum().backward()
    assert run.sizes.count((6, 7)) + run.sizes.count((7, 6)) == products
