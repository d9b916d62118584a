"""Sizes and options, as ``repr`` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def repr_fields(x: Any, sizes: Iterable[str] = (), defaults: Mapping[str, Any] = {}) -> str:
    """Return attributes as ``name=value``, separated by commas.

    Args:
        x: the object, such as a module.
        sizes: attributes that are always shown.
        defaults: attributes that are shown unless they have the default value. A tensor is shown by
            its type and shape.
    """
    values = {name: getattr(x, name) for name in (*sizes, *defaults)}
    return ", ".join(
        f"{name}={type(v).__name__}{list(v.shape)}" if isinstance(v, Tensor) else f"{name}={v!r}"
        for name, v in values.items()
        if name not in defaults or isinstance(v, Tensor) or v != defaults[name]
    )
