"""Errors that are the user's to mend, each one sentence."""

from __future__ import annotations

import importlib
import re
from types import ModuleType


class InputError(ValueError):
    """A file, an argument or an environment that cannot be worked with; the text says why."""


def refuse(argument: str, expected: str, got: object) -> None:
    """Raise ValueError with one sentence: the argument, what was expected and what came."""
    raise ValueError(f"{argument} must be {expected}, got {got}") from None


def reason(error: OSError) -> str:
    """Return what went wrong with a file, without its number and name."""
    return error.strerror or str(error)


def out_of_memory(error: Exception) -> bool:
    """Whether this is what Python, or PyTorch on a CPU or a GPU, says where memory is short."""
    sizes = "out of memory|can't allocate memory|Storage size calculation overflowed"
    return isinstance(error, MemoryError) or re.search(sizes, str(error)) is not None


def optional(name: str, purpose: str) -> ModuleType:
    """Import a package of the extra ``translate``, or say which is missing and what it is for."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # one of the wrong version may fail with anything
        package = name.partition(".")[0]
        missing = (getattr(error, "name", None) or package).partition(".")[0]
        detail = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"{purpose} needs the package {package} of the extra attnfast[translate], which cannot "
            f"be imported ({detail[:60]}): pip install {missing}"
        ) from error
