"""The loop of another project's decoder, with the gradients of its weights computed at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnfast._utils.dispatch_log import record
from attnfast._utils.torch_private import (
    at_end_of_backward,
    has_dispatch_mode,
    has_saved_tensor_hooks,
    has_tangents,
    is_autocast_on,
    number_of_backward,
)
from attnfast.integrations.adapter import Adapter
from attnfast.ops.operators import is_tracing

__all__ = ["WeightGradients", "own_loop"]


class _Terms:
    """The inputs and gradients of all steps, from which the gradient of a weight is computed."""

    def __init__(self, weight: Tensor):
        self.of_backward: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by the backward's number
        self.end = _Sum.apply(weight, self)

    def add(self, x: Tensor, grad: Tensor) -> None:
        """Keep a step's input and gradient until the running backward ends."""
        number = number_of_backward()
        if number not in self.of_backward:
            self.of_backward[number] = []
            at_end_of_backward(lambda: self.of_backward.pop(number, []).clear())
        self.of_backward[number].append((x.flatten(0, -2), grad.flatten(0, -2)))


class _Sum(torch.autograd.Function):
    """A number whose backward, which follows all steps', returns the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, terms: _Terms) -> Tensor:
        ctx.terms = terms
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, None]:
        terms = ctx.terms.of_backward.pop(number_of_backward(), [])
        if not terms:
            return None, None
        x, grad = (y[0] if len(y) == 1 else torch.cat(y) for y in zip(*terms))
        return grad.t() @ x, None


class _Product(torch.autograd.Function):
    """``x Wᵀ``, whose backward leaves the gradient of W to the end of the loop's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, end: Tensor, terms: _Terms) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.terms = terms
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        ctx.terms.add(x, grad)
        return grad_x, None, None, None


class WeightGradients(TorchFunctionMode):
    """Compute the gradient of each weight that a loop multiplies by, Σ_t g_tᵀ x_t, in one product.

    Autograd's own computation writes and adds a matrix of the weight's size at every step, by a
    product of few rows. Here the steps' inputs x_t and gradients g_t are kept, and the backward
    multiplies them after the first step's. Results are those of the loop, but for rounding.

    ``F.linear`` and the cells ``lstm_cell`` and ``gru_cell`` of ``torch.nn`` are covered, for
    inputs of at most as many rows as features: with more, keeping g_t takes more than the matrix.

    Example:
        >>> cell = torch.nn.LSTMCell(4, 4)
        >>> x = h = c = torch.zeros(2, 4)
        >>> with WeightGradients():
        ...     for _ in range(3):
        ...         h, c = cell(x, (h, c))
        >>> h.sum().backward()
    """

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[int, tuple[Tensor, _Terms]] = {}  # by the weight's id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a product or a cell of one step, and anything else as it is."""
        if not kwargs:
            if func is F.linear:
                return self.multiply(*args)
            if func is torch.lstm_cell:
                return self.step_lstm(*args)
            if func is torch.gru_cell:
                return self.step_gru(*args)
        return func(*args, **(kwargs or {}))

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x Wᵀ + b``."""
        few = x.dim() > 1 and x.numel() <= x.shape[-1] ** 2
        if not few or not weight.requires_grad or not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        if id(weight) not in self.terms:
            self.terms[id(weight)] = weight, _Terms(weight)
        terms = self.terms[id(weight)][1]
        y = _Product.apply(x, weight, terms.end, terms)
        return y if bias is None else y + bias

    def step_lstm(
        self, x: Tensor, state: Any, weight_ih: Tensor, weight_hh: Tensor, *biases: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the next h and c of ``torch.lstm_cell``."""
        h, c = state
        pair = zip((x, h), (weight_ih, weight_hh), biases or (None, None))
        sums = torch.add(*(self.multiply(*args) for args in pair))
        i, f, g, o = sums.chunk(4, 1)
        c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
        return o.sigmoid() * c.tanh(), c

    def step_gru(
        self, x: Tensor, h: Tensor, weight_ih: Tensor, weight_hh: Tensor, *biases: Tensor | None
    ) -> Tensor:
        """Return the next h of ``torch.gru_cell``."""
        pair = zip((x, h), (weight_ih, weight_hh), biases or (None, None))
        (ri, zi, ni), (rh, zh, nh) = (self.multiply(*args).chunk(3, 1) for args in pair)
        n = torch.addcmul(ni, (ri + rh).sigmoid(), nh).tanh()
        return torch.lerp(n, h, (zi + zh).sigmoid())


def _skip_reason(decoder: nn.Module) -> str:
    """Return why the loop's gradients are left to autograd, or an empty string."""
    if any(not p.is_cpu for p in decoder.parameters()):
        return "a GPU has cells in one kernel, which autograd differentiates"
    if is_tracing():
        return "a graph is traced"
    if not torch.is_grad_enabled():
        return "no gradient is computed"
    if is_autocast_on() or has_tangents() or has_dispatch_mode():
        return "autocast, forward mode or a dispatch mode is on"
    return "saved tensors are packed by hooks" if has_saved_tensor_hooks() else ""


def own_loop(
    adapter: Adapter, method: str, skip_reason: Callable[[Any], str | None] = lambda decoder: None
) -> Adapter:
    """Return the adapter of decoders whose loop no operator runs, for those that another has.

    Their attention is replaced, and ``method`` runs the loop in :class:`WeightGradients`.

    Args:
        adapter: that of the decoders of the same class that an operator runs.
        method: the name of the method that runs the loop.
        skip_reason: returns why a decoder's loop is left as it is, or None.
    """

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = getattr(super(OwnLoop, self), method)
        reason = _skip_reason(self)
        record("weight gradients", "autograd" if reason else "one product each", reason)
        if reason:
            return theirs(*args, **kwargs)
        with WeightGradients():
            return theirs(*args, **kwargs)

    OwnLoop = type("OwnLoop", (), {method: run})
    return replace(
        adapter, name=f"{adapter.name} with its own loop", implementation=OwnLoop,
        skip_reason=skip_reason, search=None,
    )  # fmt: skip
