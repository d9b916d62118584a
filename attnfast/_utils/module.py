"""The base class of attnfast's modules, whose calls have the types of their ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from torch import nn

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class _HasForward(Protocol[P, R_co]):
    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


if TYPE_CHECKING:

    class Module(nn.Module):
        """``nn.Module``, whose call is otherwise a ``Callable[..., Any]``."""

        def __init__(self) -> None: ...

        @property
        def __call__(self: _HasForward[P, R_co]) -> Callable[P, R_co]: ...  # type: ignore[override]

else:
    Module = nn.Module
