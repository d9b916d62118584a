"""What every operator takes: its arguments are checked, one sentence each, before it computes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnfast.backends import FLOATS, HALF
from attnfast.errors import check_word, describe, refuse, refuse_type
from attnfast.ops.operators import accumulation_dtype


def check_tensor(name: str, x: object) -> None:
    """Refuse what is no tensor."""
    if not isinstance(x, Tensor):
        refuse_type(name, "a torch.Tensor", type(x).__name__)


def check_dense(name: str, x: Any) -> None:
    """Refuse what is no tensor, or one that does not hold all its numbers."""
    check_tensor(name, x)
    if x.layout != torch.strided or x.is_nested:
        refuse(name, "a dense tensor", "a nested one" if x.is_nested else f"one of {x.layout}")


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    lengths: Tensor | None,
    span: Tensor | None = None,
    columns: int = 0,
) -> None:
    """Refuse arguments that do not fit together, in one sentence, before anything is computed."""
    check_dense("query", query)
    device, dtype = query.device, query.dtype
    rest: tuple[tuple[str, Any, bool], ...] = (
        ("key", key, False),
        ("value", value, False),
        ("weight", weight, True),
        ("bias", bias, True),
        ("mask", mask, True),
        ("lengths", lengths, True),
    )
    for name, x, optional in rest:
        if optional and x is None:
            continue
        check_dense(name, x)
        if x.device != device:
            refuse(name, f"on the query's device {device}", x.device)
        if x.dtype != dtype and name not in ("mask", "lengths"):
            sums = accumulation_dtype(dtype) if name == "bias" else dtype
            if x.dtype != sums:
                more = f" or {sums}" if sums != dtype else ""
                refuse(name, f"of the query's dtype {dtype}{more}", x.dtype)
    if dtype not in FLOATS:
        refuse("query", "float32, float64, bfloat16 or float16", dtype)
    q, k, v = query.shape, key.shape, value.shape
    if len(q) not in (3, 4):
        refuse("query", "[B, Tq, A] or [B, H, Tq, A]", list(q))
    if len(k) != len(q) or k[:-2] != q[:-2] or k[-1] != q[-1]:
        refuse("key", f"{[*q[:-2], 'Tk', q[-1]]} to fit the query", list(k))
    if v[:-1] != k[:-1]:
        refuse("value", f"{[*k[:-1], 'Dv']} to fit the key", list(v))
    if weight is not None and weight.shape not in (q[-1:], (*q[1:-2], q[-1])):
        shapes = f"{[q[-1]]}" + (f" or {[q[1], q[-1]]}" if len(q) == 4 else "")
        refuse("weight", f"{shapes} to fit the query", list(weight.shape))
    if mask is None and bias is None and lengths is None and span is None and not columns:
        return
    if not 0 <= columns <= (0 if span is None else k[-2]):
        expected = "0 without a span" if span is None else f"between 0 and {k[-2]}"
        refuse("columns", expected, columns)
    scores = (*q[:-1], columns or k[-2])
    if span is not None:
        fits = span.dim() == len(q) and span.shape[-2:] == (q[-2], 2)
        if not fits or any(a not in (1, b) for a, b in zip(span.shape, q[:-2])):
            refuse("span", f"{[*q[:-1], 2]}, or 1 in place of B and H", list(span.shape))
        if span.dtype != torch.int64 or span.device != device:
            refuse("span", f"int64 on {device}", f"{span.dtype} on {span.device}")
    if mask is not None and mask.dtype != torch.bool:
        refuse("mask", "boolean, True where a key may be attended to", mask.dtype)
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None and (
            x.dim() != len(scores) or any(a not in (1, b) for a, b in zip(x.shape, scores))
        ):
            refuse(name, f"{list(scores)}, or 1 in place of a size", list(x.shape))
    if lengths is not None:
        if lengths.dtype not in (torch.int32, torch.int64) or lengths.shape != q[:1]:
            got = f"{lengths.dtype} {list(lengths.shape)}"
            refuse("lengths", f"int64 or int32 of shape [{q[0]}]", got)
        readable = type(lengths) is Tensor and device.type == "cpu"  # not a fake one
        if readable and not torch.compiler.is_compiling():
            for length in lengths.tolist():
                if not 0 <= length <= k[-2]:
                    refuse("lengths", f"between 0 and {k[-2]}, the number of keys", length)


def check_exact(
    like: Tensor, tensors: Iterable[tuple[str, Tensor | None, torch.dtype, Iterable[int]]]
) -> None:
    """Refuse tensors, each with its name, dtype and shape, that are not so or not on the device."""
    for name, x, dtype, shape in tensors:
        if x is None:
            continue
        check_tensor(name, x)
        if x.device != like.device:
            refuse(name, f"on {like.device}", x.device)
        if x.dtype != dtype or list(x.shape) != list(shape):
            refuse(name, f"{dtype} {list(shape)}", f"{x.dtype} {list(x.shape)}")


def refuse_tangents(*inputs: Tensor | None) -> None:
    """Raise in forward-mode differentiation, where a registered operator gives silent zeros."""
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    ):
        raise RuntimeError(
            "attention has no forward-mode derivative on the compiled backends; "
            "backend='reference' has"
        )


def is_finite(x: object) -> bool:
    """Whether this is a finite number; unlike math.isfinite, in a graph that is compiled too."""
    largest = 1.7976931348623157e308  # a number of the module would be an input of the graph
    return isinstance(x, (int, float)) and -largest <= x <= largest


def is_one(x: float) -> bool:
    """Whether a number is 1; in a graph that is compiled, whether it can be no other."""
    if torch.compiler.is_compiling():  # to compare would make it a constant there
        return torch.fx.experimental.symbolic_shapes.statically_known_true(x == 1)
    return x == 1


def check_scale(scale: object, expected: str = "a finite number") -> None:
    """Refuse what is not a finite number: a tensor would lose its gradient."""
    if not is_finite(scale):
        refuse("scale", expected, describe(scale))


def is_relu(activation: object) -> bool:
    """Say which of the two an activation is; refuse others."""
    check_word("activation", activation, ("tanh", "relu"))
    return activation == "relu"


def check_temperature(temperature: object) -> None:
    """Refuse what is not a positive number."""
    if not is_finite(temperature) or temperature <= 0:  # type: ignore[operator]
        refuse("temperature", "a positive number", describe(temperature))


def autocast(*inputs):
    """Cast float32 and half inputs under autocast, as PyTorch does for matrix products."""
    if not torch._C._is_any_autocast_enabled():
        return inputs
    device = inputs[0].device.type if isinstance(inputs[0], Tensor) else None
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float32, *HALF)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype in narrow else x for x in inputs]


def as_returned(weights: Tensor, dtype: torch.dtype, needed: bool) -> Tensor | None:
    """Return the weights of an operator as users get them."""
    if not needed:
        return None
    return weights if weights.dtype == dtype else weights.to(dtype)


def folded(
    query: Tensor, weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None, float]:
    """Return query, weight and scale; in a graph that is compiled, the scale multiplied in.

    There an operator's number is a constant, and a graph is compiled for each that it takes.
    """
    if not torch.compiler.is_compiling() or is_one(scale):
        return query, weight, scale
    if weight is None:
        return query * scale, None, 1.0
    return query, weight * scale, 1.0


def filled(like: Tensor, shape: Any, number: float, dtype: torch.dtype) -> Tensor:
    """Return a tensor of one number, which is no constant of a graph that is compiled either."""
    if torch.compiler.is_compiling():
        return like.new_zeros(shape, dtype=dtype) + number
    return like.new_full(shape, number, dtype=dtype)
