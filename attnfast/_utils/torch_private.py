"""Wrap every private name of PyTorch that attnfast uses.

For each name, tests/test_private_torch.py states which feature breaks if PyTorch drops it.
``Tensor._version`` and ``Tensor._base``, which PyTorch's notes document, are used directly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])

#: A context in which an operator runs below autograd, at two thirds of a small call's time.
below_autograd = torch._C._AutoDispatchBelowAutograd

#: Return whether autocast is on for any device: one call instead of one for each device.
is_autocast_on = torch._C._is_any_autocast_enabled

#: The number of the backward that runs in this thread, −1 outside of one.
number_of_backward = torch._C._current_graph_task_id


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Let autograd's engine call this at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[misc]


def end_allocation_to_pool(device: torch.device, pool: Any) -> None:
    """Let a GPU's allocator leave the pool of a capture that PyTorch did not end properly."""
    torch._C._cuda_endAllocateToPool(device.index, pool)


def has_saved_tensor_hooks() -> bool:
    """Return whether saved-tensor hooks are active, as under gradient checkpointing."""
    return bool(torch._C._autograd._top_saved_tensors_default_hooks(True))


def has_dispatch_mode() -> bool:
    """Return whether a dispatch mode is active, as under ``make_fx`` and ``vmap``."""
    return torch._C._len_torch_dispatch_stack() > 0 or _functorch_level() > 0


def _functorch_level() -> int:
    return torch._C._functorch.maybe_current_level() or 0


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    return _functorch_level() > 0 or has_tangents()


_HOOKS = [
    getattr(torch.nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
]


def has_global_hooks() -> bool:
    """Return whether a hook of all modules is registered."""
    return any(_HOOKS)


def class_of(module: Any) -> type:
    """Return a module's class, also if torch.export traces its second name by a proxy."""
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    proxied = tracing is not None and isinstance(module, tracing._AttrProxy)
    return type(module).__bases__[1] if proxied else type(module)


def keep_in_pytrees(result: type, *names: str) -> None:
    """Let pytrees, and so ``vmap`` and ``export``, keep the named attributes of a tuple."""

    def leaves_of(x: Any) -> Any:
        there = [name for name in names if getattr(x, name) is not None]
        return [*x, *(getattr(x, name) for name in there)], there

    def rebuilt(leaves: Any, there: Any) -> Any:
        items = len(leaves) - len(there)
        made = result(leaves[:items])
        for name in names:
            setattr(made, name, None)
        for name, x in zip(there, leaves[items:]):
            setattr(made, name, x)
        return made

    torch.utils._pytree.register_pytree_node(
        result,
        leaves_of,
        rebuilt,
        serialized_type_name=f"attnfast.{result.__name__}",
    )


def name_in_exports(result: type) -> None:
    """Let ``torch.export.save`` write that a graph returns a named tuple."""
    torch.utils._pytree._register_namedtuple(
        result, serialized_type_name=f"attnfast.{result.__name__}"
    )


def has_tangents() -> bool:
    """Return whether forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


def has_kernel(operator: str, key: str) -> bool:
    """Return whether a library has registered an operator for a dispatch key."""
    if not torch._C._dispatch_has_kernel(operator):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def statically_true(condition: Any) -> bool:
    """Return whether a condition holds for all inputs of a compiled graph."""
    return torch.fx.experimental.symbolic_shapes.statically_known_true(condition)


def constant_in_graphs(function: Function) -> Function:
    """Let a compiled graph take a function's result as a constant.

    Unlike torch.compiler.assume_constant_result, it does not import all of dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
