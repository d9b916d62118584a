"""Gradients that wait for the end of a backward, and backwards that have no derivative."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from attnfast._utils.torch_private import at_end_of_backward, number_of_backward


class _Differentiated(Function):
    """Hands on what a backward computed, and what it was computed from: no derivative passes."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors):
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_):
        raise RuntimeError(
            "a decoder's steps have no second derivative on the compiled backends: use "
            "backend='reference', or report.undo() in a replaced model"
        )


def no_double_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let no derivative go through what a backward computes: asking for one raises.

    The backward returns its gradients and the tensors that it took them from. PyTorch's own
    ``once_differentiable`` leaves no path to these: a derivative with respect to them is None.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads):
        with torch.no_grad():
            result, taken_from = backward(ctx, *grads)
        roots = [x for x in (*grads, *taken_from) if x is not None and x.requires_grad]
        if not torch.is_grad_enabled() or not roots:
            return result
        return _Differentiated.apply(len(result), *result, *roots)

    return run


class _Left(list):
    """What the steps of one backward left; a list that can be referred to weakly."""

    sums: tuple[Tensor, ...] | None = None


class Waiting:
    """Gradients that steps have left, by the running backward's number in autograd's engine.

    One that never reaches the memory (only a query's gradient was asked for, or it failed) must
    not be counted by the next: the engine alone holds what was left, and forgets it at the end.
    """

    def __init__(self):
        self.left: weakref.WeakValueDictionary[int, _Left] = weakref.WeakValueDictionary()

    def pending(self) -> _Left:
        """Return what is left in the running backward, to add to until its end."""
        task = number_of_backward()
        left = self.left.get(task)
        if left is None:
            left = self.left[task] = _Left()
            at_end_of_backward(lambda left=left: None)  # type: ignore[misc]
        return left

    def collect(self) -> tuple[list[Any], tuple[Tensor, ...] | None]:
        """Return what was left in the running backward, and its sums, and forget them."""
        left = self.left.get(number_of_backward(), _Left())
        taken, sums = list(left), left.sums
        left.clear()
        left.sums = None
        return taken, sums
