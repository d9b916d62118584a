"""Run a command line: errors that a user can correct, and signals, end in one sentence."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from attnfast._utils.checks import InputError, out_of_memory, reason
from attnfast._utils.config_file import arguments
from attnfast._utils.progress import log
from attnfast._utils.signals import Interrupted, raise_on_signal

__all__ = ["Flag", "Parser", "run"]


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one sentence and prints the usage only for --help.

    With an option ``--config FILE``, the options in the file are read first, and typed ones
    override them.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, after those of ``--config``."""
        if args is not None and "--config" in self._option_string_actions:
            only = Parser(self.prog, add_help=False, allow_abbrev=False)
            only.add_argument("--config")
            path = super(Parser, only).parse_known_args(args)[0].config
            if path is not None:
                args = [*arguments(path, self._option_string_actions), *args]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        before, separator, choices = message.removeprefix("argument ").partition(" (choose from ")
        sentence = before + separator + choices.replace("'", "")
        hint = f": {self.prog} --help says more" if sentence == message else ""
        raise InputError(sentence + hint)


class Flag(argparse.BooleanOptionalAction):
    """A boolean option with a negation, ``--no-…``; its help has no default appended."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.help = options["help"]  # Python before 3.13 appends the default


def _with_options(text: str, args: argparse.Namespace) -> str:
    """Replace the name of an argument by the option that the user typed."""
    name, _, rest = text.partition(" ")
    named = rest.startswith("must be") and name in vars(args)
    return f"--{name.replace('_', '-')} {rest}" if named else text


def _prepare_output() -> None:
    """Make the standard output write everything or raise, with ``?`` for missing characters."""
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return
    if isinstance(out.buffer, io.RawIOBase):  # PYTHONUNBUFFERED: writes may be partial
        sys.stdout = open(  # noqa: SIM115
            out.fileno(), "w", 1, encoding=out.encoding, errors="replace", closefd=False
        )
    else:
        out.reconfigure(errors="replace")


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse a command line, call its ``function``, and return the exit status: its own, or 0.

    Errors that a user can correct, and signals, end in one sentence.
    """
    args = argparse.Namespace()
    _prepare_output()
    status = 0
    with warnings.catch_warnings(), raise_on_signal():
        warnings.showwarning = lambda message, *_, **__: log(str(message))
        try:
            try:
                parser.parse_args(argv, args)
                status = args.function(args) or 0
            except SystemExit:  # --help or --version
                pass
            if sys.stdout is not None:
                sys.stdout.flush()
        except InputError as error:
            log(_with_options(str(error), args))
            return 2
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            sizes = ("batch_size", "max_length", "hidden_dim", "dim", "beam")
            options = " or ".join(f"--{x.replace('_', '-')}" for x in sizes if hasattr(args, x))
            log("too little memory" + (f": a smaller {options} may fit" if options else ""))
            return 2
        except OSError as error:  # opening a file raises InputError: this is the standard output
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return 0
            log(f"cannot write the standard output: {reason(error)}")
            return 2
        except KeyboardInterrupt as stop:
            log(str(stop) or "interrupted; existing files are intact")
            return 128 + (stop.number if isinstance(stop, Interrupted) else signal.SIGINT)
    return status
