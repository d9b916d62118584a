"""Parameters in a backend's own layout, cached for many calls, and calls in half precision."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast.ops.backends import BACKENDS, HALF
from attnfast.ops.recurrent import WEIGHTS

#: The parameters that ``pack_recurrent`` packs, in its order.
PACKED = (
    "weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_query", "weight_output",
    "weight_ih_upper", "weight_readout", "weight_vocab",
)  # fmt: skip


class Packed(NamedTuple):
    """Parameters packed by a backend, and what shows most later changes."""

    tensor: Tensor
    made_of: tuple[object, ...]
    memory: list[Tensor]  # of the parameters, referenced so that it is not reused


def pack_parameters(
    call: Any, feed_size: int, backend: str, before: Any = None, int8: bool = False
) -> Packed | None:
    """Return the packed parameters of a call, or None if the backend packs none.

    ``before`` is returned if its parameters are unchanged; else, the result is new. ``feed_size``
    is the number of columns of ``weight_ih`` that read fed features.
    """
    if not BACKENDS[backend].packs:
        return None
    parameters = [getattr(call, name, None) for name in PACKED]
    given = [x for x in parameters if x is not None]
    if any(x.is_inference() for x in given):
        return None  # inference tensors have no version counter
    context_size = 0 if call.value is None else call.value.shape[-1]
    options = feed_size, context_size, call.mode, int8
    made_of = (backend, *options, *[None if x is None else _version(x) for x in parameters])
    if isinstance(before, Packed) and before.made_of == made_of:
        return before
    wide = upcast_halves(call, backend)
    tensor = BACKENDS[backend].pack(*[getattr(wide, x, None) for x in PACKED], *options)
    return None if tensor is None else Packed(tensor, made_of, [x.detach() for x in given])


def _version(x: Tensor) -> tuple[object, ...]:
    """Return what changes with a tensor: ``module.float()`` changes its memory, not its version."""
    return x.data_ptr(), x._version, x.dtype, x.shape, x.stride()


def upcast_halves(call: Any, backend: str, autocasts: bool = False) -> Any:
    """Return an operator's call in float32 if it is in half precision, or under autocast.

    A backend that takes weights in bfloat16 is given those of a call in bfloat16, and under
    autocast all weights.
    """
    if not (autocasts or is_half(call.hidden)):
        return call
    narrow = autocasts or call.hidden.dtype == torch.bfloat16
    in_bfloat16 = WEIGHTS if narrow and BACKENDS[backend].takes_bfloat16_weights else ()
    cast = {}
    for name, x in call._asdict().items():
        if isinstance(x, Tensor) and x.is_floating_point() and (autocasts or is_half(x)):
            cast[name] = x.bfloat16() if name in in_bfloat16 else x.float()
    return call._replace(**cast)


def is_half(x: Any) -> bool:
    """Return True for a tensor in half precision."""
    return isinstance(x, Tensor) and x.dtype in HALF
