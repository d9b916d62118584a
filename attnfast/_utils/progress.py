"""Progress of long work: a bar in a terminal or notebook, elsewhere a line every minute."""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
from collections.abc import Callable

#: Seconds between two plain lines.
INTERVAL = 60.0


def log(sentence: str) -> None:
    """Print a line to stderr; do nothing if stderr is closed."""
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            print(f"attnfast: {sentence}", file=sys.stderr, flush=True)


def _shows_bars() -> bool:
    """Return whether stderr is a terminal, or the output of a notebook's cell."""
    if sys.stderr is None:
        return False
    return sys.stderr.isatty() or type(sys.stderr).__module__ == "ipykernel.iostream"


class Progress:
    """A context manager that shows the progress of work; call it after each part.

    The bar is tqdm's, of text, which needs no widgets; without that package there are lines.

    Args:
        name: name of the work.
        total: number of parts.
        unit: name of a part.
        done: number of parts done before.
        report: called with each plain line.
        has_bar: whether there may be a bar.
    """

    def __init__(
        self,
        name: str,
        total: int,
        unit: str,
        done: int = 0,
        report: Callable[[str], object] = log,
        has_bar: bool = True,
    ):
        self.name, self.total, self.unit, self.report = name, total, unit, report
        self.before = self.done = done
        self.start = self.said = time.monotonic()
        self.bar = None
        if has_bar and _shows_bars():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self.bar = tqdm(total=total, initial=done, desc=name, unit=unit, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, count: int = 1, note: str = "") -> None:
        """Count finished parts; ``note`` is shown with them."""
        self.done += count
        now = time.monotonic()
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(count)
        elif now - self.said >= INTERVAL:
            self.said = now
            speed = (self.done - self.before) / (now - self.start)
            left = datetime.timedelta(seconds=round((self.total - self.done) / speed))
            what = f"{self.unit} {self.done} of {self.total}"
            self.report(
                f"{self.name}: "
                + ", ".join(filter(None, (what, note, f"{speed:.3g} a second, {left} left")))
            )
