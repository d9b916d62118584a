"""Record which implementation runs a call, and why faster ones do not."""

from __future__ import annotations

import collections
import logging
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, ParamSpec, TypeVar

import torch

from attnfast._utils.checks import describe, raise_type_error

__all__ = ["Choice", "Explanation", "explain", "is_recording", "record"]

P = ParamSpec("P")
T = TypeVar("T")

LOGGER = logging.getLogger("attnfast.dispatch")


class Choice(NamedTuple):
    """One decision: an operation, its implementation, and reasons against each faster one."""

    operation: str
    ran: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.operation}: {self.ran}", *self.reasons])


@dataclass
class Explanation(Generic[T]):
    """Result of :func:`explain`; prints one line for each decision, with its reasons below.

    Args:
        choices: the decisions, in the order in which they were made.
        output: the return value of the call.

    Example:
        >>> x = torch.ones(1, 2, 3)
        >>> found = attnfast.explain(attnfast.dot_attention, x, x, x, backend="reference")
        >>> found.choices[0].operation, found.output.context.shape
        ('attention', torch.Size([1, 2, 3]))
    """

    choices: list[Choice]
    output: T

    def __str__(self) -> str:
        counts = collections.Counter(self.choices)
        times = {x: f" ({n} times)" if n > 1 else "" for x, n in counts.items()}
        lines = [str(x._replace(ran=x.ran + more)) for x, more in times.items()]
        none = "attnfast was not called, or only in a compiled graph; torch.nn never calls it"
        return "\n".join(lines) or none


class _Recorder(threading.local):
    choices: list[Choice] | None = None


_recorder = _Recorder()
_logged: set[Choice] | None = None  # choices that have been logged, if any are to be


def _log_if_asked() -> None:
    """Log each choice once to stderr if the environment has ATTNFAST_LOG=dispatch."""
    global _logged
    kinds = list(filter(None, os.environ.get("ATTNFAST_LOG", "").split(",")))
    if set(kinds) - {"dispatch"}:
        warnings.warn(f"ATTNFAST_LOG must be 'dispatch', got {','.join(kinds)!r}", stacklevel=2)
    if "dispatch" in kinds:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("attnfast: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False
        _logged = set()


_log_if_asked()


def is_recording() -> bool:
    """Return whether decisions are recorded here, so that finding reasons may take time."""
    if torch.compiler.is_compiling():
        return False
    return _recorder.choices is not None or _logged is not None


def record(operation: str, ran: str, *reasons: str | None) -> None:
    """Record a decision if :func:`explain` or ATTNFAST_LOG is active; None is no reason."""
    if not is_recording():
        return
    choice = Choice(operation, ran, tuple(x for x in reasons if x))
    if _recorder.choices is not None:
        _recorder.choices.append(choice)
    if _logged is not None and choice not in _logged:
        _logged.add(choice)
        LOGGER.info("%s", choice)


def explain(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Explanation[T]:
    """Run a call, and report its implementation and why faster ones were not used.

    Decisions are the backend of an operator, one operator or a loop for a recurrent layer, an
    ``nn.GRU`` or a search, a CUDA graph for the launches of a layer or none, and attnfast or its
    own code for a replaced module. Those of a compiled graph were made when it was traced, and are
    not reported, nor are those of other threads. An ``nn.GRU`` outside attnfast's models always
    runs in PyTorch. The environment variable ``ATTNFAST_LOG=dispatch`` logs each new decision of a
    program to stderr instead.

    Args:
        function: a function, a module or a method: of attnfast, or of a model that uses it.
        args, kwargs: its arguments.

    Returns:
        An ``Explanation``: ``print`` it, or read its ``choices`` and ``output``.

    Raises:
        TypeError: ``function`` is not callable.

    Example:
        >>> x = torch.ones(1, 2, 3)
        >>> found = attnfast.explain(attnfast.dot_attention, x, x, x, backend="reference")
        >>> print(found)
        attention: reference, as requested
    """
    if not callable(function):
        raise_type_error("function", "callable", describe(function))
    outer = _recorder.choices
    choices: list[Choice] = []
    _recorder.choices = choices
    try:
        output = function(*args, **kwargs)
    finally:
        _recorder.choices = outer
    if outer is not None:
        outer += choices
    return Explanation(choices, output)
