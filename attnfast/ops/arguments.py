"""Check and convert the arguments that operators of attention share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnfast._utils.checks import (
    check_choice,
    check_tensor,
    describe,
    is_finite,
    is_one,
    is_readable,
    raise_value_error,
    shape_of,
)
from attnfast._utils.torch_private import has_tangents, is_autocast_on
from attnfast.ops.backends import FLOATS, HALF
from attnfast.ops.operators import accumulation_dtype

#: q·k, and Σ_a w_a f(q_a + k_a) by the name of f.
SCORES = ("dot", "tanh", "relu", "leaky_relu")


def check_inputs(call: Any) -> None:
    """Raise unless query, keys, values, score vector and terms fit together.

    ``call`` holds the arguments of an attention operator, with or without a history.
    """
    check_tensor("query", call.query)
    device, dtype = call.query.device, call.query.dtype
    for name in ("key", "value", "score_vector", "bias", "mask", "lengths"):
        x = getattr(call, name)
        if x is None and name not in ("key", "value"):
            continue
        check_tensor(name, x)
        if x.device != device:
            raise_value_error(name, f"on the query's device {device}", x.device)
        if x.dtype != dtype and name not in ("mask", "lengths"):
            sums = accumulation_dtype(dtype) if name == "bias" else dtype
            if x.dtype != sums:
                more = f" or {sums}" if sums != dtype else ""
                raise_value_error(name, f"of the query's dtype {dtype}{more}", x.dtype)
    if dtype not in FLOATS:
        raise_value_error("query", "float32, float64, bfloat16 or float16", dtype)
    q, k, v = call.query.shape, call.key.shape, call.value.shape
    if len(q) not in (3, 4):
        raise_value_error("query", "[B, Tq, A] or [B, H, Tq, A]", list(q))
    if len(k) != len(q) or k[:-2] != q[:-2] or k[-1] != q[-1]:
        raise_value_error("key", f"{shape_of(*q[:-2], 'Tk', q[-1])} to fit the query", list(k))
    if v[:-1] != k[:-1]:
        raise_value_error("value", f"{shape_of(*k[:-1], 'Dv')} to fit the key", list(v))
    if call.score not in SCORES or (call.score == "dot") != (call.score_vector is None):
        scores = "dot" if call.score_vector is None else " or ".join(SCORES[1:])
        more = "out" if call.score_vector is None else ""
        raise_value_error("score", f"{scores} with{more} a score_vector", call.score)
    if call.score_vector is not None and call.score_vector.shape not in (q[-1:], (*q[1:-2], q[-1])):
        shapes = f"{[q[-1]]}" + (f" or {[q[1], q[-1]]}" if len(q) == 4 else "")
        raise_value_error(
            "score_vector", f"{shapes} to fit the query and key", list(call.score_vector.shape)
        )


def check_terms(call: Any, columns: int) -> None:
    """Raise unless mask, bias and lengths fit scores of ``columns`` columns."""
    keys = call.key.shape[-2]
    scores = (*call.query.shape[:-1], columns)
    mask, lengths = call.mask, call.lengths
    if mask is not None and mask.dtype != torch.bool:
        raise_value_error("mask", "boolean, True where a key may be attended to", mask.dtype)
    for name in ("mask", "bias"):
        x = getattr(call, name)
        if x is not None and (
            x.dim() != len(scores) or any(a not in (1, b) for a, b in zip(x.shape, scores))
        ):
            expected = f"{list(scores)}, or 1 instead of a size, to fit query and key"
            raise_value_error(name, expected, list(x.shape))
    if lengths is not None:
        if lengths.dtype not in (torch.int32, torch.int64) or lengths.shape != scores[:1]:
            got = f"{lengths.dtype} {list(lengths.shape)}"
            raise_value_error("lengths", f"int64 or int32 of shape [{scores[0]}]", got)
        if is_readable(lengths):
            for length in lengths.tolist():
                if not 0 <= length <= keys:
                    raise_value_error(
                        "lengths", f"between 0 and {keys}, the number of keys", length
                    )


def raise_on_tangents(inputs: Iterable[Any]) -> None:
    """Raise in forward-mode differentiation, where a registered operator gives silent zeros."""
    if has_tangents() and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    ):
        raise RuntimeError(
            "attention has no forward-mode derivative on the compiled backends: use "
            "backend='reference'"
        )


def check_scale(scale: object, expected: str = "a finite number") -> None:
    """Raise unless ``scale`` is a finite number; a tensor would lose its gradient."""
    if not is_finite(scale):
        raise_value_error("scale", expected, describe(scale))


def check_activation(activation: Any) -> str:
    """Return the additive score of an activation; raise if there is none."""
    check_choice("activation", activation, SCORES[1:])
    return SCORES[SCORES.index(activation)]


def check_temperature(temperature: object) -> None:
    """Raise unless ``temperature`` is a positive number."""
    if not is_finite(temperature) or temperature <= 0:  # type: ignore[operator]
        raise_value_error("temperature", "a positive number", describe(temperature))


def apply_temperature(temperature: Any, *terms: Any) -> tuple[Any, ...]:
    """Return terms of the scores divided by the temperature; raise unless it is positive."""
    check_temperature(temperature)
    if is_one(temperature):
        return terms
    return tuple(None if x is None else x / temperature for x in terms)


def autocast(*inputs: Any) -> Sequence[Any]:
    """Cast float32 and half inputs under autocast, as PyTorch does for matrix products."""
    if not is_autocast_on():
        return inputs
    device = inputs[0].device.type if isinstance(inputs[0], Tensor) else None
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float32, *HALF)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype in narrow else x for x in inputs]


def autocast_call(call: Any) -> Any:
    """Cast those tensors of a call that have the query's dtype, as autocast does."""
    if not is_autocast_on():
        return call
    names = ("query", "key", "value", "score_vector", "bias")
    return call._replace(**dict(zip(names, autocast(*(getattr(call, x) for x in names)))))


def as_returned(weights: Tensor, dtype: torch.dtype, needed: bool) -> Tensor | None:
    """Return the weights of an operator in the caller's dtype, or None if they are not needed."""
    if not needed:
        return None
    return weights if weights.dtype == dtype else weights.to(dtype)


def fold_scale(call: Any) -> Any:
    """Return a call; in a compiled graph, its scale is multiplied into query or score vector.

    There an operator's scalar is a constant, and a graph is compiled for each of its values.
    """
    if not torch.compiler.is_compiling() or is_one(call.scale):
        return call
    if call.score_vector is None:
        return call._replace(query=call.query * call.scale, scale=1.0)
    return call._replace(score_vector=call.score_vector * call.scale, scale=1.0)


def mean_of_heads(weights: Tensor) -> Tensor:
    """Return weights ``[B, Tq, Tk]``; those of several heads, ``[B, H, Tq, Tk]``, are averaged."""
    return weights.mean(1) if weights.dim() == 4 else weights


def length_mask(lengths: Tensor, count: int, like: Tensor | None = None) -> Tensor:
    """Return a mask ``[.., count]``, True below ``lengths [..]``, on the device of ``like``."""
    lengths = lengths if like is None else lengths.to(like.device)
    return torch.arange(count, device=lengths.device) < lengths.unsqueeze(-1)


def filled(like: Tensor, shape: Any, number: float, dtype: torch.dtype) -> Tensor:
    """Return a tensor filled with a number that is not a constant in a compiled graph either."""
    if torch.compiler.is_compiling():
        return like.new_zeros(shape, dtype=dtype) + number
    return like.new_full(shape, number, dtype=dtype)
