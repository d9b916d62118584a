"""Errors that are the user's to mend, each one sentence."""

from __future__ import annotations

import importlib
import numbers
import re
import reprlib
from collections.abc import Iterable
from types import ModuleType
from typing import NoReturn

import torch

#: No error has more letters.
LONGEST = 200
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


class InputError(ValueError):
    """A file, an argument or an environment that cannot be worked with; the text says why."""


def describe(x: object) -> str:
    """Return in a line what x is: type and shape of a tensor or an array, the length of a list or
    tuple that holds some, else a short repr.
    """
    if isinstance(x, (list, tuple)) and any(
        hasattr(part, "shape") and not isinstance(part, numbers.Number) for part in x
    ):
        return f"a {type(x).__name__} of {len(x)} items"
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None or isinstance(x, numbers.Number):
        text = " ".join(_short.repr(x).split())
        return text if len(text) <= 80 else f"{text[:79]}…"
    article = "an" if type(x).__name__ == "ndarray" else "a"
    return f"{article} {type(x).__name__} of {dtype} {list(shape)}"


def shape_of(*of: object) -> str:
    """Return a shape as it is written, some of its sizes by their names: ``[2, Tk, 8]``."""
    return f"[{', '.join(map(str, of))}]"


def sentence(argument: str, expected: str, got: object) -> str:
    """Return one sentence in one line: the argument, what was expected and what came."""
    text = f"{argument} must be {expected}, got {got}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def refuse(argument: str, expected: str, got: object) -> NoReturn:
    """Raise ValueError with one :func:`sentence`."""
    raise ValueError(sentence(argument, expected, got)) from None


def refuse_type(argument: str, expected: str, got: object) -> NoReturn:
    """Raise TypeError with one :func:`sentence`."""
    raise TypeError(sentence(argument, expected, got)) from None


def check_word(argument: str, got: object, words: Iterable[str]) -> None:
    """Refuse what is none of the words."""
    words = list(words)
    if not isinstance(got, str) or got not in words:
        *some, last = map(repr, words)
        refuse(argument, f"{', '.join(some)} or {last}" if some else last, describe(got))


def check_flag(argument: str, got: object) -> bool:
    """Refuse what is neither True nor False, nor 1 or 0; return which."""
    if got is not True and got is not False and not (isinstance(got, int) and got in (0, 1)):
        refuse(argument, "True or False", describe(got))
    return bool(got)


def is_whole(x: object) -> bool:
    """Return whether x is an integer, or a torch.SymInt in a graph that is traced."""
    return isinstance(x, (numbers.Integral, torch.SymInt)) and not isinstance(x, bool)


def check_whole(argument: str, got: object, least: int = 1) -> None:
    """Refuse what is no whole number, or too small a one."""
    if not is_whole(got):
        refuse(argument, f"a whole number of at least {least}", describe(got))
    if got < least:  # type: ignore[operator]
        refuse(argument, f"at least {least}", got)
    if got >= 2**31:  # type: ignore[operator]
        refuse(argument, "below 2**31", describe(got))


def reason(error: OSError) -> str:
    """Return what went wrong with a file, without its number and name."""
    return error.strerror or str(error)


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or what kind it is."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(":")


def out_of_memory(error: Exception) -> bool:
    """Whether this is what Python, or PyTorch on a CPU or a GPU, says where memory is short."""
    sizes = "out of memory|can't allocate memory|Storage size calculation overflowed"
    return isinstance(error, MemoryError) or re.search(sizes, str(error)) is not None


#: What pip calls packages whose modules have another name.
PACKAGES = {"sklearn": "scikit-learn"}


def optional(name: str, purpose: str, extra: str = "translate") -> ModuleType:
    """Import a package of an extra, or say which is missing and what it is for."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # one of the wrong version may fail with anything
        package = name.partition(".")[0]
        missing = (getattr(error, "name", None) or package).partition(".")[0]
        package, missing = (PACKAGES.get(x, x) for x in (package, missing))
        raise InputError(
            f"{purpose} needs the package {package} of the extra attnfast[{extra}], which cannot "
            f"be imported ({first_line(error)[:60]}): pip install {missing}"
        ) from error
