"""Patched modules: their class has an adapter's methods in front of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache, partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from attnfast._utils.dispatch_log import record
from attnfast._utils.torch_private import has_global_hooks, is_transformed
from attnfast.integrations.adapter import Adapter, UnsupportedCall, adapter_serving, is_as_it_was
from attnfast.integrations.cache import PLACE
from attnfast.integrations.registry import ADAPTERS

__all__ = ["patch", "unpatch"]


_set_class = object.__dict__["__class__"].__set__  # even if a class overrides attribute access


class _Patched:
    """Base of patched classes: everything but the adapter's methods."""

    def train(self, mode=True):
        self.__dict__.pop(PLACE, None)  # parameters may have changed through ``.data``
        return super().train(mode)  # type: ignore[misc]

    def __reduce_ex__(self, protocol):
        """Return how the original class is copied or pickled, and how the copy is patched."""
        made, args, *rest = (_of_own(x, type(self)) for x in super().__reduce_ex__(protocol))
        how = type(self)._attnfast_adapter.name, type(self)._attnfast_kinds
        return (_remade, (how, made, *args), *rest)

    def __prepare_scriptable__(self):
        """Return the module's own code for ``torch.jit.script``."""
        twin = copy(self)
        unpatch(twin)
        return twin


def _of_own(x: Any, patched: Any) -> Any:
    """Return an item of the original class's reduce value, without the patch and the cache.

    A pickle stores classes by name, and the name leads to the original class only.
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
        x = x.copy()  # a call in another thread may add items
        x.pop(PLACE, None)
    return x


def _remade(how: tuple[str, frozenset[type] | None], made: Callable[..., Any], *args: Any) -> Any:
    """Recreate a patched module, from a pickle or as a copy."""
    name, kinds = how
    if name not in ADAPTERS:
        raise RuntimeError(f"a pickled module was replaced as {name}: register that adapter first")
    module = made(*args)
    if adapter_serving(module) is None:
        _patch(module, ADAPTERS[name], kinds)
    return module


def _copying(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a class's own ``__copy__`` or ``__deepcopy__``: copies are patched, with no cache."""

    @wraps(theirs)
    def method(self, *memos):
        memo, cached = (*memos, {})[0], vars(self).get(PLACE)
        if cached is not None:
            memo[id(cached)] = {}  # the cache of the deep copy
        twin = theirs(self, *memos)
        memo.pop(id(cached), None)
        if type(twin) is type(self)._attnfast_own:
            _patch(twin, type(self)._attnfast_adapter, type(self)._attnfast_kinds)
        if twin is not self:
            vars(twin).pop(PLACE, None)
        return twin

    return method


def _own_code_reason(module: Any) -> str:
    """Return why the module's own code computes a call, or an empty string."""
    if torch.jit.is_tracing():
        return "a graph is traced that may run without attnfast, as ONNX's do"
    if torch.compiler.is_compiling():
        if torch.onnx.is_in_onnx_export():
            return "a graph for ONNX may run without attnfast"
    elif is_transformed() or has_global_hooks():
        return "torch.func, forward mode or a hook on all modules is active"
    kinds = module._attnfast_kinds
    if kinds is None or is_as_it_was(module, kinds):
        return ""
    return "an inner layer has hooks or was exchanged since replace()"


def _serving(own: type, methods: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield methods that call the original class if a call is not supported."""
    for name, ours in inspect.getmembers(methods, inspect.isfunction):
        theirs, taken = getattr(own, name, None), inspect.signature(ours).parameters
        if not inspect.isfunction(theirs):
            continue
        order = list(inspect.signature(theirs).parameters.values())[1:]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        new = {p.name: p.default for p in order if not takes_all and p.name not in taken}
        yield name, _either(theirs, ours, [p.name for p in order], new)


def _either(
    theirs: Callable[..., Any], ours: Callable[..., Any], order: list[str], new: dict[str, Any]
) -> Callable[..., Any]:
    operation = theirs.__qualname__

    @wraps(theirs)
    def method(self, *args, **kwargs):
        reason = _own_code_reason(self)
        taken, named = args, kwargs
        if new and not reason:
            taken, named = (), {**dict(zip(order, args)), **kwargs}
            for name, default in new.items():
                if named.pop(name, default) is not default:
                    reason = f"its argument {name} is not known"
        if not reason:
            try:
                result = ours(self, *taken, **named)
            except UnsupportedCall as error:
                reason = str(error)
            else:
                record(operation, "attnfast")
                return result
        record(operation, "its own code", reason)
        return theirs(self, *args, **kwargs)

    return method


@cache
def _patched_class(own: type, adapter: Adapter, kinds: frozenset[type] | None) -> type:
    """Return a subclass of the module's own class with the adapter's methods."""
    names = {
        "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__,
        "_attnfast_own": own, "_attnfast_adapter": adapter, "_attnfast_kinds": kinds,
        **dict(_serving(own, adapter.implementation)),
    }  # fmt: skip
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(own, name):
            names[name] = _copying(getattr(own, name))
    return type(own.__name__, (*_layout(own), _Patched, adapter.implementation, own), names)


def _layout(own: type) -> tuple[type, ...]:
    """Return a base that a patched class needs for the layout of a class that starts with ABC."""
    first = own
    while first.__base__ is not object:
        first = first.__base__  # type: ignore[assignment]
    return () if first.__dictoffset__ else (type("Layout", (first,), {}),)


def patch(module: nn.Module, adapter: Adapter) -> None:
    """Give the module the adapter's methods."""
    kinds = None  # whole decoders check their parts themselves
    if not adapter.attention:
        kinds = frozenset(type(x) for x in module.modules() if x is not module)
    _patch(module, adapter, kinds)


def _patch(module: nn.Module, adapter: Adapter, kinds: frozenset[type] | None) -> None:
    _set_class(module, _patched_class(type(module), adapter, kinds))  # type: ignore[arg-type]


def unpatch(module: nn.Module) -> None:
    """Give the module its own class back."""
    own = getattr(type(module), "_attnfast_own", None)
    if own is not None:
        _set_class(module, own)
        module.__dict__.pop(PLACE, None)
