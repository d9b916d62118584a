"""Common code of the examples that train models: resumable trainings, tables over seeds."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attnfast._utils.benchmark import costs
from attnfast._utils.checks import InputError, describe, first_line
from attnfast._utils.progress import Progress, log
from attnfast._utils.signals import Interrupted, stop_on_signal
from attnfast.translate import checkpoint
from attnfast.translate.cli import Parser, integer
from attnfast.translate.trainer import Options

SAVE_EVERY = 60.0  # seconds


class Once(argparse.Action):
    """Take each of several values once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that reads an integer of at least ``least`` and below 2³¹."""

    def read(text: str) -> int:
        number = integer(text)
        if not least <= number < 2**31:
            expected = f"expected an integer of at least {least} and below 2**31"
            raise argparse.ArgumentTypeError(f"{expected}, got {number}")
        return number

    return read


def make_parser(
    name: str,
    doc: str,
    function: Callable[[argparse.Namespace], None],
    rows: Iterable[str],
    seeds: int,
    *,
    chosen: Sequence[str] = (),
    tasks: Iterable[str] = (),
) -> Parser:
    """Return the parser of an example.

    Args:
        name: name of the example and of its default folder.
        doc: docstring of the module; its first line is the description.
        function: called with the options.
        rows: names of the models.
        seeds: default number of seeds.
        chosen: the models that are trained by default; () for all.
        tasks: names of the tasks, if there are several.
    """
    parser = Parser(description=doc.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs", name), help="folder of results")
    choices = ("tasks", "tasks", [*tasks], ()), ("rows", "models", [*rows], chosen)
    for option, noun, values, default in choices:
        if values:
            parser.add_argument(
                f"--{option}", nargs="+", choices=values, action=Once, default=[*default] or values,
                help=noun + (f"; {' and '.join(default)} unless given" if default else ""),
            )  # fmt: skip
    parser.add_argument(
        "--seeds",
        type=at_least(1),
        default=seeds,
        help="largest number of seeds of a model, from 1 on",
    )

    def begin(args: argparse.Namespace) -> None:
        checkpoint.make_folder(args.out)  # raise before the data is read
        function(args)

    parser.set_defaults(function=begin)
    return parser


def add_sizes(parser: Parser) -> None:
    """Add options for the sizes of a training on the made-up language."""
    for name, value, text in (
        ("pairs", 3000, "training sentences"),
        ("held-out", 300, "sentences of the validation set and of the test set"),
        ("epochs", 10, "epochs of each training"),
        ("dim", 64, "features of words and of an encoder direction"),
    ):
        parser.add_argument(f"--{name}", type=at_least(1), default=value, help=text)


class Trial:
    """The training and the test of one model, saved in a file in ``out``.

    The batch of a step must depend on the seed and the number of the step alone.

    Args:
        out: folder of the file.
        names: names of the task, if there are several, and of the model.
        settings: settings of the training; a saved training with other settings is an error.
        test_settings: settings of the test; saved results with other settings are computed again.
        parts: modules to train, or with buffers alone, by name.
        steps: number of training steps.
        options: the options of the optimizer, and the seed.
    """

    def __init__(
        self,
        out: Path,
        names: Sequence[str],
        settings: dict[str, Any],
        test_settings: dict[str, Any],
        parts: dict[str, nn.Module],
        steps: int,
        options: Options,
    ):
        self.names, self.settings, self.test_settings = names, settings, test_settings
        self.modules, self.steps, self.options = parts, steps, options
        self.title = ", ".join([*names, f"seed {options.seed}"])
        stem = "-".join([*names, str(options.seed)]).replace(", ", "-").replace(" ", "-")
        self.path = path = out / f"{stem}.pt"
        self.parameters = [p for x in parts.values() for p in x.parameters()]
        decay = options.weight_decay
        self.optimizer = torch.optim.AdamW(self.parameters, weight_decay=decay, fused=True)
        self.step, self.found = 0, dict[str, Any]()
        self.stateful = {**parts, "optimizer": self.optimizer}
        if not path.exists():
            return
        saved = checkpoint.load(path)
        try:
            began = dict(saved["like"])
            differ = [x for x in settings | began if settings.get(x) != began.get(x)]
            if not differ:
                for name, part in self.stateful.items():
                    part.load_state_dict(saved[name])
                self.step, self.found = int(saved["step"]), dict(saved["found"])
                torch.set_rng_state(saved["random"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            detail = first_line(error)[:60]
            raise InputError(f"{path}: expected what this example keeps, got: {detail}") from error
        if differ:
            expected, got = (
                ", ".join(f"{x} {describe(of.get(x))}" for x in differ) for of in (settings, began)
            )
            raise InputError(
                f"{path}: expected {expected}, got {got}: another --out keeps both trainings"
            )

    def save(self) -> None:
        """Write the state of the training and the results of the test; raise if not finite."""
        if not all(p.isfinite().all() for p in self.parameters):
            raise InputError(
                f"{self.title}: parameters must be finite, got others after step {self.step}"
            )
        parts = {name: part.state_dict() for name, part in self.stateful.items()}
        rest = {"like": self.settings, "step": self.step, "found": self.found}
        checkpoint.write(
            self.path,
            {"format": checkpoint.FORMAT, "random": torch.get_rng_state(), **parts, **rest},
        )

    def train(self, mode: bool = True) -> None:
        """Set all modules to training mode, or to evaluation mode."""
        for part in self.modules.values():
            part.train(mode)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a step's batch."""
        raise NotImplementedError

    def learn(self) -> None:
        """Train from the saved step to the last one."""
        self.train()
        saved = time.monotonic()
        with (
            stop_on_signal() as check,
            Progress(self.title, self.steps, "step", self.step) as progress,
        ):
            while self.step < self.steps:
                try:
                    check()
                except Interrupted:
                    self.save()
                    raise
                self.optimizer.param_groups[0]["lr"] = self.options.rate(self.step, self.steps)
                self.optimizer.zero_grad(set_to_none=True)
                loss = self.loss(self.step)
                if not loss.isfinite():
                    raise InputError(
                        f"{self.title}: the loss of step {self.step + 1} must be finite, got {loss}"
                    )
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
                if not norm.isfinite():
                    raise InputError(
                        f"{self.title}: the gradient of step {self.step + 1} must be finite, "
                        f"got a norm of {norm}"
                    )
                self.optimizer.step()
                self.step += 1
                progress(1, f"loss {loss.item():.3f}")
                if self.step == self.steps or time.monotonic() - saved >= SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()

    def test(self) -> None:
        """Evaluate the trained model, unless its results were saved."""
        if self.found.get("asked") != self.test_settings:
            self.train(False)
            self.found = {"asked": self.test_settings, **self.judge()}
            self.save()

    def judge(self) -> dict[str, Any]:
        """Return the measurements of the model in the tables, by name."""
        raise NotImplementedError

    def pictures(self) -> dict[str, bytes]:
        """Return pictures of the model in evaluation mode, by the suffix of their file names."""
        return {}


T = TypeVar("T", bound=Trial)


def learn_all(
    out: Path,
    trials: Iterable[T],
    table: Callable[[Sequence[T]], str],
    last: Callable[[Sequence[T]], str] = lambda _: "",
) -> None:
    """Train and test models one after the other, and print a table.

    ``table.md`` is written after each model, with pictures of the first seed; ``last`` returns the
    text below the final table.
    """
    done, text = list[T](), ""
    try:
        for one in trials:
            one.learn()
            one.test()
            done.append(one)
            text = table(done)
            checkpoint.write_atomically(out / "table.md", text.encode())
            if one.options.seed == 1:
                one.train(False)
                for end, drawn in one.pictures().items():
                    checkpoint.write_atomically(out / f"{one.path.stem}{end}.png", drawn)
        text = "\n".join(filter(None, (text, last(done))))
    except Interrupted as stop:
        raise Interrupted(stop.number, "stopped; the same command continues from there") from None
    checkpoint.write_atomically(out / "table.md", text.encode())
    print(text, end="")
    log(f"results: {out}")


def cost_table(models: Sequence[T], loss: Callable[[T], Tensor]) -> str:
    """Return a table of the time and memory of a step of each model, forward and backward."""
    first = {name: ones[0] for name, ones in by_name(models).items()}
    for one in first.values():
        one.train()
    calls = {name: lambda one=one: loss(one).backward() for name, one in first.items()}
    lines = ["| model | ms a step | MiB a step |", "|---|--:|--:|"]
    for name, cost in costs(calls, 5).items():
        lines.append(f"| {name} | {1000 * cost.seconds:.0f} | {cost.memory / 2**20:.0f} |")
    return "\n".join(lines) + "\n"


def by_name(trials: Sequence[T], place: int = 0) -> dict[str, list[T]]:
    """Return models by one of their names, in their order."""
    found: dict[str, list[T]] = {}
    for one in trials:
        found.setdefault(one.names[place], []).append(one)
    return found


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean over seeds, with minimum and maximum if there are several."""
    mean = f"{statistics.fmean(values):{form}}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{form}}–{max(values):{form}})"
