"""A patched module: one whose class has an adapter's methods before its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from types import MethodType
from typing import Any

from torch import nn

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.cache import PLACE
from attnfast.integrations.registry import ADAPTERS

__all__ = ["adapter_serving", "patch", "unpatch"]


_set_class = object.__dict__["__class__"].__set__  # whatever a class makes of its attributes


class _Patched:
    """What the class of a patched module has besides its adapter's methods."""

    def train(self, mode=True):
        self.__dict__.pop(PLACE, None)  # parameters may be others now, written through ``.data``
        return super().train(mode)  # type: ignore[misc]

    def __reduce_ex__(self, protocol):
        """Say how the own class makes a copy, and that this is patched again."""
        made, args, *rest = (_of_own(x, type(self)) for x in super().__reduce_ex__(protocol))
        return (_remade, (type(self)._attnfast_adapter.name, made, *args), *rest)


def _of_own(x: Any, patched: Any) -> Any:
    """Return a part of what the own class says of a copy: without its patch and what it keeps.

    A pickle names classes, and of the name of both only the own class can be found.
    """
    own = patched._attnfast_own
    if x is patched:
        return own
    if isinstance(x, MethodType) and x.__self__ is patched:
        return getattr(own, x.__name__)
    if isinstance(x, partial):
        return partial(_of_own(x.func, patched), *_of_own(x.args, patched), **x.keywords)
    if type(x) is tuple:
        return tuple(_of_own(part, patched) for part in x)
    if type(x) is dict:
        x = x.copy()  # a call in another thread may add to the module's
        x.pop(PLACE, None)
    return x


def _remade(name: str, made: Callable[..., Any], *args: Any) -> Any:
    """Make a patched module again, from a pickle or as a copy."""
    if name not in ADAPTERS:
        raise RuntimeError(f"a pickled module was replaced as {name}: register that adapter first")
    module = made(*args)
    if adapter_serving(module) is None:
        patch(module, ADAPTERS[name])
    return module


def _copying(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Let copies of an own ``__copy__`` or ``__deepcopy__`` be patched, too, and keep nothing."""

    @wraps(theirs)
    def method(self, *memos):
        memo, kept = (*memos, {})[0], vars(self).get(PLACE)
        if kept is not None:
            memo[id(kept)] = {}  # what stands for it in a deep copy
        twin = theirs(self, *memos)
        memo.pop(id(kept), None)
        if type(twin) is type(self)._attnfast_own:
            patch(twin, type(self)._attnfast_adapter)
        if twin is not self:
            vars(twin).pop(PLACE, None)
        return twin

    return method


def _falling_back(own: type, methods: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield methods that leave a call to the own class where an argument is new to ours."""
    for name, ours in inspect.getmembers(methods, inspect.isfunction):
        theirs, taken = getattr(own, name, None), inspect.signature(ours).parameters
        if not inspect.isfunction(theirs) or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            continue
        order = list(inspect.signature(theirs).parameters.values())[1:]
        new = {p.name: p.default for p in order if p.name not in taken}
        if new:
            yield name, _either(theirs, ours, [p.name for p in order], new)


def _either(
    theirs: Callable[..., Any], ours: Callable[..., Any], order: list[str], new: dict[str, Any]
) -> Callable[..., Any]:
    @wraps(theirs)
    def method(self, *args, **kwargs):
        given = {**dict(zip(order, args)), **kwargs}
        for name, default in new.items():
            if given.pop(name, default) is not default:
                return theirs(self, *args, **kwargs)
        return ours(self, **given)

    return method


@cache
def _patched_class(own: type, adapter: Adapter) -> type:
    """Return a subclass of the module's own class with the adapter's methods."""
    names = {
        "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__,
        "_attnfast_own": own, "_attnfast_adapter": adapter,
        **dict(_falling_back(own, adapter.methods)),
    }  # fmt: skip
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(own, name):
            names[name] = _copying(getattr(own, name))
    return type(own.__name__, (_Patched, adapter.methods, own), names)


def patch(module: nn.Module, adapter: Adapter) -> None:
    """Give the module the adapter's methods."""
    _set_class(module, _patched_class(type(module), adapter))  # type: ignore[arg-type]


def unpatch(module: nn.Module) -> None:
    """Give the module its own class back."""
    own = getattr(type(module), "_attnfast_own", None)
    if own is not None:
        _set_class(module, own)
        module.__dict__.pop(PLACE, None)


def adapter_serving(module: nn.Module) -> Adapter | None:
    """Return the adapter whose methods the module has, or None."""
    return getattr(type(module), "_attnfast_adapter", None)
