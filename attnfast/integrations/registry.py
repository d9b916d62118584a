"""Registry of adapters: those of the projects listed here, and those that users register."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from torch import nn

from attnfast._utils.checks import describe, raise_type_error
from attnfast.integrations import projects
from attnfast.integrations.adapter import Adapter

__all__ = ["ADAPTERS", "PROJECTS", "adapters_of", "register_adapter", "why_unknown"]

#: The modules of adapters, each with its own list.
PROJECTS = tuple(
    import_module(f"{projects.__name__}.{x.name}") for x in iter_modules(projects.__path__)
)
#: All registered adapters, by name.
ADAPTERS: dict[str, Adapter] = {a.name: a for project in PROJECTS for a in project.ADAPTERS}


def register_adapter(adapter: Adapter) -> None:
    """Make :func:`attnfast.replace` support one more class of attention.

    Args:
        adapter: the adapter; it replaces an existing one with the same name.

    Raises:
        TypeError: ``adapter`` is not an :class:`Adapter`.

    Example:
        >>> from dataclasses import replace
        >>> from attnfast.integrations import ADAPTERS, register_adapter
        >>> known = ADAPTERS["the translation tutorial's BahdanauAttention"]
        >>> register_adapter(replace(known, name="my copy", classes=["my_model.Attention"]))
        >>> ADAPTERS.pop("my copy").classes  # unregister it
        ['my_model.Attention']
    """
    if not isinstance(adapter, Adapter):
        raise_type_error("adapter", "an attnfast.integrations.Adapter", describe(adapter))
    ADAPTERS[adapter.name] = adapter


def why_unknown(module: nn.Module) -> str:
    """Return why no adapter fits the module."""
    named = [adapter for adapter in ADAPTERS.values() if adapter.is_named(module)]
    if not named:
        cls = type(module)
        return (
            f"its class {cls.__module__}.{cls.__qualname__} is not known; attnfast.register_adapter"
        )
    adapter = min(named, key=lambda adapter: sum(map(len, adapter.mismatches(module))))
    more, missing = (
        ", ".join(names[:3]) + ", …" * (len(names) > 3) for names in adapter.mismatches(module)
    )
    said = [f"it has {more}"] * bool(more) + [f"it lacks {missing}"] * bool(missing)
    what = f"its parameters are not known: unlike {adapter.name} {' and '.join(said)}"
    return f"{what}; attnfast.register_adapter"


def adapters_of(module: nn.Module) -> list[Adapter]:
    """Return the adapters that match the module's class and parameters, last registered first."""
    return [adapter for adapter in reversed(ADAPTERS.values()) if adapter.fits(module)]
