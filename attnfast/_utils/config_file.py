"""Options of a command line in a TOML file."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnfast._utils.checks import InputError, optional, reason

__all__ = ["arguments", "dumps"]


def arguments(path: str, options: Mapping[str, argparse.Action]) -> list[str]:
    """Return the command-line arguments of a file whose keys are names of options.

    Raises:
        InputError: the file cannot be read, is not TOML, or has a key or value that does not fit.
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
    found = []
    for name, x in read.items():
        option = f"--{name.replace('_', '-')}"
        action = options.get(option)
        if action is None or option in ("--config", "--help") or option.startswith("--no-"):
            raise InputError(f"{path}: expected names of options as keys, got {name}")
        is_flag = action.nargs == 0
        if is_flag != isinstance(x, bool) or not isinstance(x, (str, int, float)):
            expected = "true or false" if is_flag else "a string or a number"
            raise InputError(f"{path}: {name} must be {expected}, got {x}")
        if not is_flag:
            found.append(f"{option}={x}")
        elif x:
            found.append(option)
        elif len(action.option_strings) > 1:
            found.append(action.option_strings[1])
    return found


def dumps(options: Mapping[str, Any]) -> str:
    """Return TOML of options that are strings, numbers or booleans; None is left out."""
    lines = []
    for name, x in options.items():
        text = json.dumps(x, ensure_ascii=False).replace("\x7f", "\\u007f")
        if isinstance(x, float) and not math.isfinite(x):
            text = str(x)  # inf, -inf, nan
        lines += [] if x is None else [f"{name} = {text}\n"]
    return "".join(lines)
