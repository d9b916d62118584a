"""Linear layers of many rows, by the operator where it is quicker than PyTorch's product."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from attnfast import dispatch
from attnfast._torch import has_tangents, is_autocast_on, is_intercepted
from attnfast.backends import best
from attnfast.ops.linear import LINEAR, Linear
from attnfast.ops.operators import is_recorded

#: Below so many rows, or multiply-adds, PyTorch's product is as quick.
LEAST_ROWS, LEAST_WORK = 64, 1 << 22


def is_plain(module: Any, *kinds: type) -> bool:
    """Whether a module's parameters stand for it: one of these kinds, which need not be called."""
    if type(module) not in kinds or "forward" in vars(module):
        return False
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return not any((*hooks, module._backward_pre_hooks))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, backend: Any = None) -> Tensor:
    """Return ``x Wᵀ + b`` of ``x [..., K]`` and ``weight [N, K]``, as ``F.linear`` does."""
    if is_recorded() or not x.is_cpu or x.dim() == 0:
        return F.linear(x, weight, bias)
    rows = x.numel() // max(x.shape[-1], 1)
    if (
        not weight.is_cpu
        or rows < LEAST_ROWS
        or rows * weight.numel() < LEAST_WORK
        or x.dtype != weight.dtype
        or x.shape[-1] != weight.shape[-1]
        or is_autocast_on()
        or has_tangents()
        or is_intercepted()
        or best(backend, x.device, x.dtype, LINEAR.name) is None
    ):
        return F.linear(x, weight, bias)
    call = Linear(x.reshape(rows, x.shape[-1]), weight, bias)
    return dispatch.run(LINEAR, call, "cpu").output.view(*x.shape[:-1], len(weight))


def project(layer: nn.Module, x: Tensor, backend: Any = None) -> Tensor:
    """Return ``layer(x)``, by :func:`linear` where parameters stand for the layer."""
    if not is_plain(layer, nn.Linear):
        return layer(x)
    return linear(x, layer.weight, layer.bias, backend)  # type: ignore[arg-type]
