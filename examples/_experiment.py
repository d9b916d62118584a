"""What examples that train models share: trainings that go on bit for bit, means over seeds."""

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
    """Return the parser of an example: what it is, what runs it, its models, tasks and seeds.

    Args:
        name: of the example and of its folder.
        doc: the module's, of which the first line is told.
        function: called with the options.
        rows: the models.
        chosen: of them, those that are trained by default; () for all.
        seeds: how many.
        tasks: if there are several.
    """
    parser = Parser(description=doc.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs", name), help="folder of results")
    choices = ("tasks", "tasks", [*tasks], ()), ("rows", "models", [*rows], chosen)
    for option, said, values, some in choices:
        if values:
            parser.add_argument(
                f"--{option}", nargs="+", choices=values, action=Once, default=[*some] or values,
                help=said + (f"; {' and '.join(some)} unless given" if some else ""),
            )  # fmt: skip
    parser.add_argument(
        "--seeds", type=at_least(1), default=seeds, help="how many at most, from 1 on"
    )

    def begin(args: argparse.Namespace) -> None:
        checkpoint.make_folder(args.out)  # not to find out after the data is read
        function(args)

    parser.set_defaults(function=begin)
    return parser


def add_sizes(parser: Parser) -> None:
    """Add the sizes of trainings on the made-up language to an example's options."""
    for name, value, text in (
        ("pairs", 3000, "sentences to learn from"),
        ("held-out", 300, "sentences to validate and to measure on"),
        ("epochs", 10, "of each training"),
        ("dim", 64, "features of words and of an encoder direction"),
    ):
        parser.add_argument(f"--{name}", type=at_least(1), default=value, help=text)


class Trial:
    """One model in training, or trained, and kept in a file of ``out``.

    A step's batch must depend on the seed and the step's number alone.

    Args:
        out: the folder.
        names: of the task if there are several, and of the model.
        like: what must be the same for a kept training to go on.
        asked: what must be the same for the kept results of a test to hold.
        parts: modules with parameters to train, or with state alone, by name.
        steps: how many.
        options: of the optimizer, and the seed.
    """

    def __init__(
        self,
        out: Path,
        names: Sequence[str],
        like: dict[str, Any],
        asked: dict[str, Any],
        parts: dict[str, nn.Module],
        steps: int,
        options: Options,
    ):
        self.names, self.like, self.asked, self.steps = names, like, asked, steps
        self.modules, self.options = parts, options
        self.title = ", ".join([*names, f"seed {options.seed}"])
        stem = "-".join([*names, str(options.seed)]).replace(", ", "-").replace(" ", "-")
        self.path = path = out / f"{stem}.pt"
        self.parameters = [p for x in parts.values() for p in x.parameters()]
        decay = options.weight_decay
        self.optimizer = torch.optim.AdamW(self.parameters, weight_decay=decay, fused=True)
        self.step, self.found = 0, dict[str, Any]()
        self.kept = {**parts, "optimizer": self.optimizer}
        if not path.exists():
            return
        kept = checkpoint.load(path)
        try:
            began = dict(kept["like"])
            differ = [x for x in like | began if like.get(x) != began.get(x)]
            if not differ:
                for name, part in self.kept.items():
                    part.load_state_dict(kept[name])
                self.step, self.found = int(kept["step"]), dict(kept["found"])
                torch.set_rng_state(kept["random"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            detail = first_line(error)[:60]
            raise InputError(f"{path}: expected what this example keeps, got: {detail}") from error
        if differ:
            wanted, got = (
                ", ".join(f"{x} {describe(of.get(x))}" for x in differ) for of in (like, began)
            )
            raise InputError(
                f"{path}: expected {wanted}, got {got}: another --out keeps both trainings"
            )

    def save(self) -> None:
        if not all(p.isfinite().all() for p in self.parameters):
            raise InputError(
                f"{self.title}: parameters must be finite, got others after step {self.step}"
            )
        parts = {name: part.state_dict() for name, part in self.kept.items()}
        rest = {x: getattr(self, x) for x in ("like", "step", "found")}
        checkpoint.write(
            self.path,
            {"format": checkpoint.FORMAT, "random": torch.get_rng_state(), **parts, **rest},
        )

    def train(self, mode: bool = True) -> None:
        """Put all modules in training mode, or in evaluation mode."""
        for part in self.modules.values():
            part.train(mode)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a step's batch."""
        raise NotImplementedError

    def learn(self) -> None:
        """Train until the last step, from the step that was reached."""
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
        """Judge what is trained, unless that is kept."""
        if self.found.get("asked") != self.asked:
            self.train(False)
            self.found = {"asked": self.asked, **self.judge()}
            self.save()

    def judge(self) -> dict[str, Any]:
        """Return what the tables tell of the model."""
        raise NotImplementedError

    def pictures(self) -> dict[str, bytes]:
        """Return pictures of the model in evaluation mode, by what their files' names end with."""
        return {}


T = TypeVar("T", bound=Trial)


def learn_all(
    out: Path,
    trials: Iterable[T],
    table: Callable[[Sequence[T]], str],
    last: Callable[[Sequence[T]], str] = lambda _: "",
) -> None:
    """Train and test models one after the other, and print a table of them.

    ``table.md`` is written after each, with pictures of the first seed; ``last`` returns the text
    below the final table.
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
    """Return what a step of each row costs, forward and backward, in turns."""
    first = {name: ones[0] for name, ones in by_name(models).items()}
    for one in first.values():
        one.train()
    calls = {name: lambda one=one: loss(one).backward() for name, one in first.items()}
    lines = ["| model | ms a step | MiB a step |", "|---|--:|--:|"]
    for name, cost in costs(calls, 5).items():
        lines.append(f"| {name} | {1000 * cost.seconds:.0f} | {cost.memory / 2**20:.0f} |")
    return "\n".join(lines) + "\n"


def by_name(trials: Sequence[T], place: int = 0) -> dict[str, list[T]]:
    """Return models by one of their names, in the order in which they came."""
    found: dict[str, list[T]] = {}
    for one in trials:
        found.setdefault(one.names[place], []).append(one)
    return found


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean over seeds, and the least and the most where there are several."""
    mean = f"{statistics.fmean(values):{form}}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{form}}–{max(values):{form}})"
