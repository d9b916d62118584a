"""Checks of arguments: an error is one sentence that names the argument."""

from __future__ import annotations

import importlib
import numbers
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnfast._utils.torch_private import is_autocast_on, statically_true

#: The largest number of characters of an error message.
LONGEST = 320
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60

#: The largest length and the largest index of a key.
MAX_INT32 = 2**31 - 1
#: Kinds of elements, by their names in error messages.
KINDS: dict[str, Callable[[torch.dtype], bool]] = {
    "floating-point": lambda dtype: dtype.is_floating_point,
    "int64, int32 or floating-point": lambda dtype: (
        dtype.is_floating_point or dtype in (torch.int64, torch.int32)
    ),
    "int64": lambda dtype: dtype == torch.int64,
    "int64 or int32": lambda dtype: dtype in (torch.int64, torch.int32),
    "boolean": lambda dtype: dtype == torch.bool,
}


class InputError(ValueError):
    """An invalid file, argument or environment; the message gives the reason.

    Example:
        >>> try:
        ...     attnfast.models.Config(vocab_size=0)
        ... except attnfast.InputError as error:
        ...     print(error)
        vocab_size must be an integer of at least 1 and below 2**31, got 0
    """


def describe(x: object) -> str:
    """Return a description of x in one line: the type and shape of a tensor or an array, the length
    of a list or tuple that contains one, else a short repr.
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


def shape_of(*sizes: object) -> str:
    """Return a shape as text in which some sizes are names: ``[2, Tk, 8]``."""
    return f"[{', '.join(map(str, sizes))}]"


def argument_message(argument: str, expected: str, got: object) -> str:
    """Return one sentence in one line: the argument, the expected value and the actual value."""
    text = f"{argument} must be {expected}, got {got}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def raise_value_error(argument: str, expected: str, got: object) -> NoReturn:
    """Raise ValueError with one :func:`argument_message`."""
    raise ValueError(argument_message(argument, expected, got)) from None


def raise_type_error(argument: str, expected: str, got: object) -> NoReturn:
    """Raise TypeError with one :func:`argument_message`."""
    raise TypeError(argument_message(argument, expected, got)) from None


def check_choice(argument: str, got: object, words: Iterable[str]) -> None:
    """Raise unless ``got`` is one of the words."""
    words = list(words)
    if not isinstance(got, str) or got not in words:
        *first, last = map(repr, words)
        expected = f"{', '.join(first)} or {last}" if first else last
        raise_value_error(argument, expected, describe(got))


def check_flag(argument: str, got: object) -> bool:
    """Return ``got`` as a bool; raise ValueError unless it is True, False, 0 or 1."""
    if got is not True and got is not False and not (isinstance(got, int) and got in (0, 1)):
        raise_value_error(argument, "True or False", describe(got))
    return bool(got)


def is_int(x: object) -> bool:
    """Return whether x is an integer, or a torch.SymInt in a graph that is traced."""
    return isinstance(x, (numbers.Integral, torch.SymInt)) and not isinstance(x, bool)


def check_int(argument: str, got: object, least: int = 1) -> None:
    """Raise unless ``got`` is an integer of at least ``least`` and below 2³¹."""
    if not is_int(got):
        raise_value_error(argument, f"an integer of at least {least}", describe(got))
    if got < least:  # type: ignore[operator]
        raise_value_error(argument, f"at least {least}", got)
    if got >= 2**31:  # type: ignore[operator]
        raise_value_error(argument, "below 2**31", describe(got))


def check_tensor(name: str, x: Any) -> None:
    """Raise unless x is a dense tensor."""
    if not isinstance(x, Tensor):
        raise_type_error(name, "a torch.Tensor", type(x).__name__)
    if x.layout != torch.strided or x.is_nested:
        raise_value_error(
            name, "a dense tensor", "a nested one" if x.is_nested else f"one of {x.layout}"
        )


def check_array(
    name: str,
    x: Any,
    kind: str,
    *shapes: Sequence[int | str],
    like: Tensor | None = None,
    of: str = "",
) -> None:
    """Raise unless x is a dense tensor of a kind of :data:`KINDS` and of one of the shapes, if any.

    A size in a shape is a number, or a name if any number fits. ``like`` is a tensor whose
    device x must have, and ``of`` names it in the message.
    """
    check_tensor(name, x)
    shape = x.shape
    fits = len(shapes) == 0 or any(  # torch.compile knows no "not" of a tuple
        len(sizes) == len(shape) and all(isinstance(a, str) or a == b for a, b in zip(sizes, shape))
        for sizes in shapes
    )
    if not fits or not KINDS[kind](x.dtype):
        expected = kind
        if shapes:
            expected += " " if kind.endswith("floating-point") else " of shape "
            expected += " or ".join([shape_of(*sizes) for sizes in shapes])
        raise_value_error(name, f"{expected} to fit {of}" if of else expected, describe(x))
    check_device(name, x, like, of)


def check_device(name: str, x: Tensor, like: Tensor | None = None, of: str = "") -> None:
    """Raise unless x has data on the device of ``like``, which the message calls ``of``."""
    if not isinstance(x, Tensor):
        check_tensor(name, x)
    if like is not None and x.device != like.device:
        raise_value_error(name, f"on {like.device}" + f", as {of}" * bool(of), x.device)
    if x.is_meta and (like is None or not like.is_meta):
        raise_value_error(name, "a tensor that holds numbers", "one on meta")


def is_readable(x: Tensor) -> bool:
    """Return whether elements may be read: on a CPU and untraced; a GPU would synchronize."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_like(name: str, x: Tensor, like: Tensor, whose: str = "the module's") -> None:
    """Raise unless x has the device of ``like`` and, without autocast, its dtype."""
    if x.device != like.device:
        raise_value_error(name, f"on {whose} device {like.device}", x.device)
    if x.dtype != like.dtype and not is_autocast_on():
        raise_value_error(name, f"of {whose} dtype {like.dtype}", x.dtype)


def check_numbers(name: str, x: Any, count: int, least: int, most: int, of: str = "") -> None:
    """Raise unless x is an integer tensor ``[count]`` with elements from ``least`` to ``most``.

    Elements are read on a CPU only. ``of`` names the tensor that x must fit.
    """
    check_array(name, x, "int64 or int32", (count,), of=of)
    check_range(name, x, least, most, of=of)


def check_range(name: str, x: Tensor, least: int, most: int, what: str = "", of: str = "") -> None:
    """Raise unless integers are from ``least`` to ``most``; they are read on a CPU only.

    ``what`` names them in the message, and ``of`` the tensor that they must fit.
    """
    if not is_readable(x) or not x.numel():
        return
    for number in x.tolist() if x.dim() == 1 else map(int, x.aminmax()):
        if not least <= number <= most:
            expected = f"{what} between {least} and {most}".lstrip()
            raise_value_error(name, f"{expected} to fit {of}" if of else expected, number)


def check_exact(
    like: Tensor, tensors: Iterable[tuple[str, Tensor | None, torch.dtype, Iterable[int]]]
) -> None:
    """Raise unless every tensor has the dtype and shape listed for it and is on the device."""
    for name, x, dtype, shape in tensors:
        if x is None:
            continue
        check_tensor(name, x)
        if x.device != like.device:
            raise_value_error(name, f"on {like.device}", x.device)
        if x.dtype != dtype or list(x.shape) != list(shape):
            raise_value_error(name, f"{dtype} {list(shape)}", f"{x.dtype} {list(x.shape)}")


def is_finite(x: object) -> bool:
    """Return whether x is a finite number; unlike math.isfinite it works in a compiled graph."""
    largest = 1.7976931348623157e308  # a global of the module would be an input of the graph
    return isinstance(x, (int, float)) and not isinstance(x, bool) and -largest <= x <= largest


def check_number(name: str, x: object, least: float, most: float | None = None) -> None:
    """Raise unless x is a finite number from ``least`` to ``most``."""
    if not is_finite(x) or x < least or (most is not None and x > most):  # type: ignore[operator]
        expected = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise_value_error(name, f"a number {expected}", describe(x))


def is_one(x: float) -> bool:
    """Return whether a number is 1; in a compiled graph, whether it is 1 for all inputs."""
    if torch.compiler.is_compiling():  # comparing would make it a constant there
        return statically_true(x == 1)
    return x == 1


def reason(error: OSError) -> str:
    """Return the text of a file's error, without the error number and the file name."""
    return error.strerror or str(error)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(":")


def out_of_memory(error: Exception) -> bool:
    """Return whether an error, of Python or PyTorch, says that memory ran out."""
    sizes = "out of memory|can't allocate memory|Storage size calculation overflowed"
    return isinstance(error, MemoryError) or re.search(sizes, str(error)) is not None


#: The names on PyPI of packages whose modules have another name.
PACKAGES = {"sklearn": "scikit-learn"}


def optional(name: str, purpose: str, extra: str = "translate") -> ModuleType:
    """Import a package of an extra; raise with its name and purpose if that fails."""
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
