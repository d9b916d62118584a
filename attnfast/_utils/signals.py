"""Signals that ask a process to stop: Ctrl-C, and what is to be as clean as that."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Ctrl-C, what ``kill`` and schedulers send, and a terminal that is closed.
SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop, and what was under way has come to a clean end."""

    def __init__(self, number: int, text: str = ""):
        super().__init__(text)
        self.number = number


@contextlib.contextmanager
def signals_call(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let a handler take :data:`SIGNALS`, but for those that the process was told to ignore."""
    main = threading.current_thread() is threading.main_thread()  # no other may
    mine = [n for n in SIGNALS if main and signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in mine}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextlib.contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise :class:`Interrupted` at the first signal, and let no other disturb what cleans up."""

    def handler(number: int, frame) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    with signals_call(handler):
        yield


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], None]]:
    """Keep the first signal until it is asked for, so that no step is cut in two.

    A second Ctrl-C is final; a second SIGTERM is not, for some send it twice.

    Yields:
        A function that raises :class:`Interrupted` if a signal has come.
    """
    came = 0

    def handler(number: int, frame) -> None:
        nonlocal came
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came = came or number

    def check() -> None:
        if came:
            raise Interrupted(came)

    with signals_call(handler):
        yield check
