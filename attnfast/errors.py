"""Errors that are the user's to mend, each one sentence."""

from __future__ import annotations

import importlib
from types import ModuleType


class InputError(ValueError):
    """A file, an argument or an environment that cannot be worked with; the text says why."""


def refuse(argument: str, expected: str, got: object) -> None:
    """Raise ValueError with one sentence: the argument, what was expected and what came."""
    raise ValueError(f"{argument} must be {expected}, got {got}") from None


def reason(error: OSError) -> str:
    """Return what went wrong with a file, without its number and name."""
    return error.strerror or str(error)


def optional(name: str, purpose: str) -> ModuleType:
    """Import an optional package, or say which one is missing and what it is for."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(
            f"{purpose} needs the package {package}, which cannot be imported ({error}): "
            f"pip install {package}"
        ) from error
