"""Registry of adapters: those of the projects listed here, and those that users register."""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import iter_modules

from torch import nn

from attnfast._utils.checks import describe, raise_type_error
from attnfast.integrations import projects
from attnfast.integrations.adapter import Adapter

__all__ = [
    "ADAPTERS",
    "PROJECTS",
    "adapters_of",
    "candidates",
    "check_command",
    "describe_mismatches",
    "register_adapter",
    "unknown_reason",
]

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
        TypeError: ``adapter`` is not an :class:`attnfast.integrations.Adapter`.

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


def candidates(module: nn.Module) -> list[Adapter]:
    """Return the adapters of the module's class name or parameters, the nearest first."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    found = []
    for adapter in ADAPTERS.values():
        more, missing = adapter.mismatches(module)
        common = len(names) - len(more)
        if adapter.named_class(module) or common > len(more) + len(missing):
            known = not adapter.named_class(module), -len(adapter.parameters)
            found.append((len(more) + len(missing), *known, adapter))
    return [adapter for *_, adapter in sorted(found, key=lambda x: x[:3])]


def describe_mismatches(module: nn.Module, adapter: Adapter, most: int = 3) -> str:
    """Return in words the parameters that the module has more than the adapter's, or lacks."""
    more, missing = (
        ", ".join(names[:most]) + ", …" * (len(names) > most)
        for names in adapter.mismatches(module)
    )
    return " and ".join([f"has {more}"] * bool(more) + [f"lacks {missing}"] * bool(missing))


def check_command(cls: type) -> str:
    """Return the command that examines a class."""
    place, name = cls.__module__, cls.__qualname__
    if place == "__main__":  # a script
        place = getattr(sys.modules[place], "__file__", None) or "module"
    if "<locals>" in name:
        place, name = "module", cls.__name__
    return f"python -m attnfast.integrations check {place}:{name}"


def unknown_reason(module: nn.Module) -> str:
    """Return why no adapter fits the module."""
    cls, near = type(module), candidates(module)
    alike = next((x for x in near if not any(x.mismatches(module))), None)
    if alike is not None:
        place = f"{cls.__module__}.{cls.__qualname__}"
        return f"its class {place} is not known, but its parameters are those of {alike.name}"
    named = next((x for x in near if x.named_class(module)), None)
    if named is not None:
        return (
            f"only its class's name is like that of a known class, {named.name}; its parameters "
            f"differ: it {describe_mismatches(module, named)}"
        )
    return f"its class {cls.__module__}.{cls.__qualname__} is not known"


def adapters_of(module: nn.Module) -> list[Adapter]:
    """Return the adapters that match the module's class and parameters, last registered first.

    An adapter of the class excludes those of a class that it extends; one that names the place of
    the class excludes those that take it for a copy.
    """
    fitting = [a for a in reversed(ADAPTERS.values()) if a.fits(module)]
    classes = {a.named_class(module) for a in fitting}
    nearest = next((c for c in type(module).__mro__ if c in classes), None)
    fitting = [a for a in fitting if a.named_class(module) is nearest]
    return [a for a in fitting if a.is_original(module)] or fitting
