"""The command ``python -m attnfast.integrations check``, which examines a class of attention.

The exit status is 0 if ``attnfast.replace`` replaces it, 1 if not, and 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib
import inspect
import math
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from attnfast._utils.checks import InputError, first_line
from attnfast._utils.command_line import Parser, run
from attnfast._utils.dispatch_log import Choice, explain
from attnfast.integrations.adapter import Adapter
from attnfast.integrations.find import Found, attention_code, find_attention
from attnfast.integrations.inspection import static_skip_reason, unsupported_attributes
from attnfast.integrations.probe import Measurement, measure, quietly
from attnfast.integrations.registry import (
    ADAPTERS,
    adapters_of,
    candidates,
    describe_mismatches,
    register_adapter,
    unknown_reason,
)

__all__ = ["main"]

NEAREST = 5  # candidates to print
#: Columns of a comparison, and their widths.
COLUMNS = {"results": 9, "state": 9, "gradients": 11, "dtypes": 7, "allowed": 8, "served": 9}
PAGE = "docs/adapters.md"

# ---- input ---------------------------------------------------------------------------------------


def import_code(place: str) -> ModuleType:
    """Import a file, as a part of the packages that it is in, or a module by name."""
    name, path = place, Path(place)
    if path.suffix == ".py":
        if not path.is_file():
            raise InputError(f"{place}: no such file")
        name, folder = path.stem, path.resolve().parent
        while (folder / "__init__.py").exists():
            name, folder = f"{folder.name}.{name}", folder.parent
        name = name.removesuffix(".__init__")
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        detail = f"{type(error).__name__}: {first_line(error)}"  # type: ignore[arg-type]
        raise InputError(f"cannot import {place}: {detail}") from error
    file = getattr(module, "__file__", None)
    if path.suffix == ".py" and (file is None or Path(file).resolve() != path.resolve()):
        raise InputError(f"{place}: another module is named {name}: {file}")
    return module


def read_value(text: str) -> Any:
    """Return the Python literal, or else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_arguments(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments that ``8 16 dropout=0.1`` stands for."""
    positional, named = [], {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            named[name] = read_value(value)
        else:
            positional.append(read_value(text))
    return positional, named


def make_module(target: str, texts: Sequence[str]) -> nn.Module:
    """Return the module that ``module:Class``, ``file.py:Class`` or a function there makes."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InputError(f"expected module:Class or path/to/file.py:Class, got {target}")
    made: Any = import_code(place)
    for part in name.split("."):
        if not hasattr(made, part):
            classes = {k: v for k, v in vars(made).items() if inspect.isclass(v)}
            known = [k for k, v in classes.items() if issubclass(v, nn.Module)]
            raise InputError(f"{place} has no {name}; its modules: {', '.join(known) or 'none'}")
        made = getattr(made, part)
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise InputError(f"{target}: expected a class or a function, got {made!r:.40}")
        positional, named = read_arguments(texts)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                made = made(*positional, **named)
        except Exception as error:
            given = f"by --init {' '.join(texts)}" if texts else "without --init"
            detail = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"{target} cannot be made {given}: {detail}") from error
    if not isinstance(made, nn.Module):
        raise InputError(f"{target}: expected a torch.nn.Module, got {type(made).__name__}")
    return made


def add_adapters(place: str) -> None:
    """Import code that registers adapters, or has a list ``ADAPTERS`` of them."""
    for adapter in vars(import_code(place)).get("ADAPTERS", ()):
        if isinstance(adapter, Adapter):
            register_adapter(adapter)


def named_adapter(name: str, module: nn.Module) -> Adapter:
    """Return the adapter of this name, for the module's class."""
    adapter, cls = ADAPTERS[name], type(module)
    copied = not all("." in x for x in adapter.classes)
    if adapter.is_original(module) or (copied and adapter.named_class(module)):
        return adapter
    own = cls.__qualname__ if copied else f"{cls.__module__}.{cls.__qualname__}"
    return dataclasses.replace(adapter, classes=[own])


# ---- output --------------------------------------------------------------------------------------


def print_candidates(module: nn.Module, new: Sequence[Adapter]) -> None:
    """Print the nearest adapters, and new ones, with how they differ from the module."""
    near = candidates(module)
    others = [] if any(x.fits(module) for x in new) else [x for x in new if x not in near]
    listed = [*others, *near[:NEAREST]]
    print("\nadapters of this class name or of these parameters:" + " none" * (not listed))
    for adapter in listed:
        differs = describe_mismatches(module, adapter)
        what = f"the module {differs}" if differs else "its parameters"
        if not adapter.named_class(module):
            what += f"; of a class {' or '.join(adapter.classes)}"
        print(f"  {adapter.name}: {what}")
    if len(near) > NEAREST:
        print(f"  and {len(near) - NEAREST} more")


def compared(module: nn.Module, adapter: Adapter) -> Iterator[tuple[Measurement, list[Choice]]]:
    """Yield the comparison in every configuration, with the code that ran each call."""
    measurements = measure(module, adapter)
    while (found := explain(next, measurements, None)).output is not None:
        yield found.output, [x for x in found.choices if x.ran in ("attnfast", "its own code")]


@quietly()
def print_comparison(module: nn.Module, adapter: Adapter) -> str:
    """Print the comparison in every configuration; return the first reason against it, or ""."""
    print(f"\ncompared as {adapter.name}:")
    if static_reason := static_skip_reason(module, adapter):
        print(f"  {static_reason}")
        return static_reason
    print(f"  {'':<45}{in_columns(COLUMNS)}")
    reasons: dict[str, str] = {}  # by their text without the configuration and numbers
    left: set[str] = set()
    theirs: set[str] = set()
    ours: set[str] = set()
    for number, (measured, calls) in enumerate(compared(module, adapter)):
        name, reason = measured.config.name, measured.reason
        print(f"  {name:<45}{row_of(measured, calls)}")
        if number == 0 and not reason and all(x.ran == "its own code" for x in calls):
            reason = f"its replacement leaves every call to the module's own code, {name}"
        short = reason.replace(f", {name}", "") if reason else ""
        if reason and (kind := re.sub(r"\d", "", short)) not in reasons:
            reasons[kind] = reason
            print(f"    {short}{place_of(measured.error)}")
        left.update(why for x in calls for why in x.reasons)
        for names, moved in zip((theirs, ours), measured.moved()):
            names |= moved
    for why in sorted(left):
        print(f"  some calls ran the module's own code: {why}")
    if adapter.note:
        print(f"  note: {adapter.note}")
    cancelled = [name for name, _ in module.named_parameters() if name in theirs - ours]
    if cancelled and not reasons:
        print(f"  gradient 0 instead of rounding errors: {', '.join(cancelled)}")
    return next(iter(reasons.values()), "")


def row_of(measured: Measurement, calls: Sequence[Choice]) -> str:
    """Return the numbers of one configuration."""
    if len(measured.outcomes) < 2:
        return "   failed" if measured.reason else "   not compared: its own class fails"
    numbers = measured.largest().values()
    cells = ["unlike" if x == math.inf else f"{x:.1e}" if x else "0" for x in numbers]
    served = sum(x.ran == "attnfast" for x in calls)
    cells += [str(measured.other_dtypes()), f"{measured.config.tolerance:.0e}"]
    return in_columns([*cells, f"{served} of {len(calls)}"])


def in_columns(cells: Iterable[str]) -> str:
    """Return a line of the table of a comparison."""
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values()))


def place_of(error: Exception | None) -> str:
    """Return the last line of the module's or the adapter's code where an exception passed."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    others = [Path(torch.__path__[0]), Path(__file__).parents[1]]
    own = [
        x
        for x in frames
        if Path(x.filename).parent.name == "projects"
        or not any(folder in Path(x.filename).parents for folder in others)
    ]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def print_module(found: Found, wanted: str | None, new: Sequence[Adapter]) -> bool:
    """Print a module's parameters and adapters, and the next step; return whether it is served."""
    module, cls = found.module, type(found.module)
    print(f"{found.path}: " * bool(found.path) + f"{cls.__module__}.{cls.__qualname__}")
    for name, p in module.named_parameters():
        print(f"  {name} {list(p.shape)}")
    print_candidates(module, new)
    adapters = adapters_of(module) if wanted is None else [named_adapter(wanted, module)]
    reasons = [print_comparison(module, x) for x in adapters]
    print()
    agreeing = next((x for x, reason in zip(adapters, reasons) if not reason), None)
    if agreeing is not None:
        if agreeing in adapters_of(module):
            print("served: attnfast.replace(model) replaces it")
            return True
        name, own = agreeing.name, list(agreeing.classes)
        print(
            "served once it is registered:\n"
            "  import dataclasses, attnfast\n"
            f"  known = attnfast.integrations.ADAPTERS[{name!r}]\n"
            f"  own = dataclasses.replace(known, name={cls.__qualname__!r}, classes={own!r})\n"
            "  attnfast.register_adapter(own)"
        )
        copied = dataclasses.replace(agreeing, classes=[cls.__qualname__])
        if reason := unsupported_attributes(module, copied):
            print(f"beware: {reason}; the comparison sees only its present value")
        return True
    if reasons:
        of_attributes = reasons[0] == unsupported_attributes(module, adapters[0])
        part = "what-known_attributes-is-for" if of_attributes else "reading-the-comparison"
        print(f"not served: {reasons[0]}\nnext: {PAGE}#{part}")
    else:
        print(f"not served: {unknown_reason(module)}\nnext: {what_to_do(module)}")
    return False


def what_to_do(module: nn.Module) -> str:
    """Return the next step for a module that no adapter fits."""
    alike = [x for x in candidates(module) if not any(x.mismatches(module))]
    if alike:
        return f'compare it, --as "{alike[0].name}"; or write an adapter, {PAGE}'
    code = attention_code(module)
    if any(isinstance(x, (nn.RNNBase, nn.RNNCellBase)) for x in module.modules()) and code:
        return f"{code}: {PAGE}#attention-inside-a-decoder"
    return f"write an adapter, {PAGE}"


def check(args: argparse.Namespace) -> int:
    """Compare a class with its replacement; print the differences and the next step."""
    known = set(ADAPTERS.values())
    for place in args.adapters:
        add_adapters(place)
    if args.adapter not in (None, *ADAPTERS):
        near = ", ".join(difflib.get_close_matches(args.adapter, ADAPTERS, 3, 0.3)) or "none"
        raise InputError(f'--as: no adapter is named "{args.adapter}"; near: {near}')
    module = make_module(args.target, args.init)
    new = [x for x in ADAPTERS.values() if x not in known]
    found = [] if args.adapter else find_attention(module)
    served = [print_module(x, args.adapter, new) for x in found or [Found("", module, None)]]
    return 0 if all(served) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    parser = Parser(prog="python -m attnfast.integrations", description="Adapters of attention")
    commands = parser.add_subparsers(required=True, metavar="command")
    sub = commands.add_parser("check", help=check.__doc__, description=check.__doc__)
    text = "module:Class, path/to/file.py:Class, or a function there that returns a module"
    sub.add_argument("target", help=text)
    text = "its arguments, such as 8 16 dropout=0.1"
    sub.add_argument("--init", nargs="*", default=[], metavar="VALUE", help=text)
    text = "compare it as an adapter of other classes with the same parameters"
    sub.add_argument("--as", dest="adapter", metavar="NAME", help=text)
    text = "a file or module that registers adapters, or lists them as ADAPTERS"
    sub.add_argument("--adapters", action="append", default=[], metavar="CODE", help=text)
    sub.set_defaults(function=check)
    return run(parser, argv)
