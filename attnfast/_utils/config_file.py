"""Options of a command line in a TOML file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnfast._utils.checks import InputError, optional, reason

__all__ = ["arguments", "dumps"]


def arguments(path: str, options: Iterable[str]) -> list[str]:
    """Return the command-line arguments of a file whose keys are names of options.

    Raises:
        InputError: the file cannot be read, is no TOML, or has a key that is no option.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        tomllib = optional("tomli", "--config")
    try:
        read = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason(error)}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: expected a TOML file, got {error}") from None
    known, found = set(options), []
    for name, x in read.items():
        option = f"--{name.replace('_', '-')}"
        if option not in known:
            raise InputError(f"{path}: expected options of the command, got {name}")
        if isinstance(x, bool):
            found.append(option if x else option.replace("--", "--no-", 1))
        elif isinstance(x, (str, int, float)):
            found.append(f"{option}={x}")
        else:
            raise InputError(f"{path}: {name} must be a string, number or boolean, got {x}")
    return found


def dumps(options: Mapping[str, Any]) -> str:
    """Return TOML of options that are strings, numbers or booleans; None is left out."""
    lines = []
    for name, x in options.items():
        if isinstance(x, float) and not math.isfinite(x):
            text = "inf" if x > 0 else "-inf"
        else:
            text = json.dumps(x, ensure_ascii=False)
        lines += [] if x is None else [f"{name} = {text}\n"]
    return "".join(lines)
