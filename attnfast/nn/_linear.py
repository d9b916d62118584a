"""Linear layers of many rows, by the operator where it is faster than PyTorch's GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.dispatch_log import record
from attnfast._utils.torch_private import class_of, has_dispatch_mode, has_tangents, is_autocast_on
from attnfast.ops import dispatch
from attnfast.ops.backends import reasons_against, try_select_backend
from attnfast.ops.linear import LINEAR, LinearInputs
from attnfast.ops.operators import is_tracing

#: Below this number of rows, or of multiply-adds, PyTorch's GEMM is as fast.
LEAST_ROWS, LEAST_WORK = 64, 1 << 22


def is_a(module: Any, *kinds: type) -> bool:
    """Return whether a module is of one of the classes, and not of a subclass."""
    return type(module) in kinds or class_of(module) in kinds


def not_plain_reason(module: Any, *kinds: type) -> str:
    """Return why a module that is not plain is not."""
    name = type(module).__name__
    if is_a(module, *kinds):
        return f"{name} has hooks or a forward of its own"
    return f"no operator supports {name}"


def is_plain(module: Any, *kinds: type) -> bool:
    """Return whether using a module's parameters is equivalent to calling it."""
    if not is_a(module, *kinds):
        return False
    if "forward" in vars(module):
        return False
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return not any((*hooks, module._backward_pre_hooks))


def weight_of(layer: Any) -> Tensor:
    """Return a linear layer's weight, dequantised if the layer was quantised."""
    weight = layer.weight
    return weight if isinstance(weight, Tensor) else weight().dequantize()


def _is_own(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether tensors are plain, without subclasses, in a dtype of the operator."""
    given = [y for y in (x, weight, bias) if y is not None]
    return (
        x.dtype in (torch.float32, torch.float64)
        and x.dim() > 0
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[-1]
        and all(
            type(y) in (Tensor, nn.Parameter)
            and y.is_cpu
            and y.layout == torch.strided
            and y.dtype == x.dtype
            for y in given
        )
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, backend: Any = None) -> Tensor:
    """Return ``x Wᵀ + b`` for ``x [..., K]`` and ``weight [N, K]``, as ``F.linear`` does.

    The operator always saves both input and weight for the backward. ``F.linear`` is used instead
    if only one of them needs a gradient.
    """
    if is_tracing() or not _is_own(x, weight, bias) or backend not in (None, "cpu"):
        record("linear", "PyTorch", "the operator takes dense float32 or float64 on the CPU")
        return F.linear(x, weight, bias)
    rows = x.numel() // max(x.shape[-1], 1)
    reason = ""
    if rows < LEAST_ROWS or rows * weight.numel() < LEAST_WORK:
        reason = "PyTorch is as fast for few rows or small weights"
    elif torch.is_grad_enabled() and x.requires_grad != weight.requires_grad:
        reason = "the operator saves both input and weight, and only one needs a gradient"
    elif is_autocast_on() or has_tangents() or has_dispatch_mode():
        reason = "autocast, forward mode or a dispatch mode is on"
    elif try_select_backend(backend, x.device, x.dtype, LINEAR.name) is None:
        reason = "; ".join(reasons_against(None, x.device, x.dtype, LINEAR.name))
        reason = reason or "no backend has the operator"
    record("linear", "PyTorch" if reason else "cpu", reason)
    if reason:
        return F.linear(x, weight, bias)
    call = LinearInputs(x.reshape(rows, x.shape[-1]), weight, bias)
    return dispatch.run(LINEAR, call, "cpu").output.view(*x.shape[:-1], len(weight))


def project(layer: nn.Module, x: Tensor, backend: Any = None) -> Tensor:
    """Return ``layer(x)``, by :func:`linear` if the layer is a plain ``nn.Linear``."""
    if not is_plain(layer, nn.Linear):
        return layer(x)
    return linear(x, layer.weight, layer.bias, backend)  # type: ignore[arg-type]
