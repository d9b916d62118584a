"""Settings: fields of a dataclass with a help text, bounds and choices."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from attnfast._utils.checks import (
    InputError,
    argument_message,
    check_choice,
    check_flag,
    describe,
    is_finite,
    is_int,
    raise_value_error,
)

T = TypeVar("T")

#: Names of bounds, with the comparison that a value must pass and its words in error messages.
BOUNDS = {
    "at_least": (operator.ge, "of at least"),
    "above": (operator.gt, "above"),
    "at_most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def setting(default: T, text: str, choices: Sequence[str] = (), **bounds: float) -> T:
    """Return a field of a dataclass whose annotations are strings: bool, int, float or str.

    Args:
        default: with None as default, None is always accepted.
        text: one clause, with the unit of a number; a command line and the docstring show it.
        choices: the accepted strings.
        bounds: limits of a number, by a name of :data:`BOUNDS`. Numbers must be finite, but
            infinity may be the value of ``at_most``.
    """
    return field(default=default, metadata={"help": text, "choices": choices, "bounds": bounds})


def kind_of(setting: Field[Any]) -> str:
    """Return the name of a field's type, without ``| None``."""
    return str(setting.type).removesuffix(" | None")


def check_settings(x: Any) -> None:
    """Raise InputError unless each field of a dataclass has its type, bounds and choices."""
    try:
        for each in fields(x):
            _check(each, getattr(x, each.name))
    except ValueError as error:
        raise InputError(str(error)) from None


def check_default(x: Any, name: str, where: str) -> None:
    """Raise InputError unless a setting, which is unused ``where``, has its default."""
    value, default = getattr(x, name), getattr(type(x), name)
    if value != default:
        expected = "left out" if default is None else default
        raise InputError(argument_message(name, f"{expected} {where}", value))


def _check(setting: Field[Any], value: Any) -> None:
    name, kind, bounds = setting.name, kind_of(setting), dict(setting.metadata["bounds"])
    if value is None and setting.default is None:
        return
    if kind == "bool":
        check_flag(name, value)
    elif kind == "str":
        check_choice(name, value, setting.metadata["choices"])
    else:
        if kind == "int":
            noun, fits = "an integer", is_int(value)
            bounds.setdefault("below", 2**31)
        else:
            noun = "a number"
            is_infinite = isinstance(value, float) and value == math.inf
            fits = is_finite(value) or (is_infinite and bounds.get("at_most") == math.inf)
        if not (fits and all(BOUNDS[bound][0](value, x) for bound, x in bounds.items())):
            finite = {bound: x for bound, x in bounds.items() if x != math.inf}
            limits = " and ".join(f"{BOUNDS[bound][1]} {_text(x)}" for bound, x in finite.items())
            raise_value_error(name, f"{noun} {limits}".strip(), describe(value))


def _text(number: float) -> str:
    large = isinstance(number, int) and number >= 2**30
    return f"2**{int(number).bit_length() - 1}" if large else str(number)


def with_settings(cls: type[T]) -> type[T]:
    """Append the help texts of a dataclass's fields to its docstring."""
    entries = [f"    {x.name}: {x.metadata['help']}." for x in fields(cls)]  # type: ignore[arg-type]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Args:", *entries])
    return cls
