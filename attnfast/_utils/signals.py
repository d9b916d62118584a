"""Signals that ask a process to stop: Ctrl-C, and others that are handled in the same way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Ctrl-C, the signal of ``kill`` and of schedulers, and the signal of a closed terminal.
SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop, and the work under way has ended cleanly."""

    def __init__(self, number: int, text: str = ""):
        super().__init__(text)
        self.number = number


@contextlib.contextmanager
def signals_call(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install a handler for :data:`SIGNALS`, except those that the process ignores."""
    main = threading.current_thread() is threading.main_thread()  # other threads may not
    mine = [n for n in SIGNALS if main and signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in mine}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextlib.contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise :class:`Interrupted` at the first signal; ignore later ones during cleanup."""

    def handler(number: int, frame) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    with signals_call(handler):
        yield


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], None]]:
    """Hold the first signal until the caller checks for it, so that no step is interrupted.

    A second Ctrl-C is final; a second SIGTERM is not, because some tools send it twice.

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
