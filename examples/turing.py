"""Neural Turing machines: copying, reversing, repeating, recalling and sorting.

    python examples/turing.py --out runs/turing

Every training step draws new sequences of random bits, one vector for each time step:

    copy     1 to 10 vectors of 8 bits and an end marker; target: the same vectors
    reverse  1 to 10 vectors of 8 bits and an end marker; target: these vectors, the last one first
    repeat   1 to 5 vectors of 8 bits, an end marker and a number from 1 to 5; target: the vectors,
             repeated that number of times, and an end marker
    recall   2 to 6 items of 3 vectors of 6 bits, and one of the items again; target: the item that
             followed it
    sort     2 to 8 vectors of 8 bits, each with a priority from −1 to 1, and an end marker; target:
             the four fifths with the highest priorities, in descending order

The models are attnfast.nn.NeuralTuringMachine and an LSTM with the same number of parameters. Both
are tested on the largest training size and on larger sizes, the machine with more slots. The tables
have the share of wrong bits and the share of sequences with a wrong bit. A model that always
answers 0 has half of the bits wrong, or 44 % in repeat, because the ninth bit only marks the end.
After Ctrl-C the same command resumes the training, bit for bit. The tables, and pictures of the
head weights, are written to --out.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from _experiment import Trial, at_least, by_name, learn_all, make_parser, spread
from torch import Tensor, nn

from attnfast._utils.checks import optional
from attnfast.analysis.plots import draw_addressing
from attnfast.nn import NeuralTuringMachine
from attnfast.translate.cli import run
from attnfast.translate.trainer import Options

#: Numbers of slots in training and in tests, and the features of a slot.
TRAIN_SLOTS, TEST_SLOTS, SLOT = 32, 128, 20


# ---- tasks --------------------------------------------------------------------------------------


class Size(NamedTuple):
    """The size of a task: the number of vectors or items, and of repetitions."""

    n: int
    times: int = 1

    def __str__(self) -> str:
        return f"{self.n} × {self.times}" if self.times > 1 else str(self.n)


def draw_bits(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(2, shape, generator=draw).float()


def copy(draw: torch.Generator, count: int, size: Size) -> tuple[Tensor, Tensor]:
    """Return vectors and an end marker as input, and the vectors as target."""
    bits = draw_bits(draw, count, size.n, 8)
    x = bits.new_zeros(count, 2 * size.n + 1, 9)
    x[:, : size.n, :8] = bits
    x[:, size.n, 8] = 1
    return x, bits


def reverse(draw: torch.Generator, count: int, size: Size) -> tuple[Tensor, Tensor]:
    """Return vectors and an end marker as input, and the vectors in reverse order as target."""
    x, bits = copy(draw, count, size)
    return x, bits.flip(1)


def repeat(draw: torch.Generator, count: int, size: Size) -> tuple[Tensor, Tensor]:
    """Return vectors, an end marker and the number of repetitions as input.

    The number is divided by 10. The target is the repeated vectors and an end marker.
    """
    n, times = size
    bits = draw_bits(draw, count, n, 8)
    target = bits.new_zeros(count, n * times + 1, 9)
    target[:, :-1, :8] = bits.repeat(1, times, 1)
    target[:, -1, 8] = 1
    x = bits.new_zeros(count, n + 1 + target.shape[1], 10)
    x[:, :n, :8] = bits
    x[:, n, 8] = 1
    x[:, n, 9] = times / 10
    return x, target


def recall(draw: torch.Generator, count: int, size: Size) -> tuple[Tensor, Tensor]:
    """Return items and a queried item as input, and the item that followed it as target.

    Each item, and the queried one, follows a marker; a marker also ends the query.
    """
    bits = draw_bits(draw, count, size.n, 3, 6)
    rows, queried = torch.arange(count), torch.randint(size.n - 1, (count,), generator=draw)
    x = bits.new_zeros(count, size.n + 2, 4, 8)
    x[:, : size.n, 1:, :6] = bits
    x[:, : size.n, 0, 6] = 1
    x[:, size.n, 1:, :6] = bits[rows, queried]
    x[:, size.n :, 0, 7] = 1
    return x.flatten(1, 2), bits[rows, queried + 1]


def sort(draw: torch.Generator, count: int, size: Size) -> tuple[Tensor, Tensor]:
    """Return vectors with priorities and an end marker as input, and a sorted part as target.

    The target is the four fifths with the highest priorities, in descending order.
    """
    bits = draw_bits(draw, count, size.n, 8)
    priorities = 2 * torch.rand(count, size.n, generator=draw) - 1
    order = priorities.argsort(1, descending=True)[:, : size.n - size.n // 5]
    target = bits.take_along_dim(order.unsqueeze(-1), 1)
    x = bits.new_zeros(count, size.n + 1 + target.shape[1], 10)
    x[:, : size.n, :8] = bits
    x[:, : size.n, 9] = priorities
    x[:, size.n, 8] = 1
    return x, target


class Task(NamedTuple):
    """A task, and the settings of its training.

    Attributes:
        draw: returns the inputs and targets of a number of sequences of a size.
        train_sizes: the sizes of training sequences.
        test_sizes: the sizes of test sequences.
        steps: number of training steps.
        clip: the largest norm of a gradient.
        heads: number of read heads, and of write heads.
    """

    draw: Any
    train_sizes: Sequence[Size]
    test_sizes: Sequence[Size]
    steps: int
    clip: float
    heads: int = 1

    def batch(self, count: int, size: Size, seed: str) -> tuple[Tensor, Tensor]:
        """Return inputs ``[count, T, F]`` and targets of their last steps, drawn from a seed."""
        draw = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
        return self.draw(draw, count, size)


TASKS = {
    "copy": Task(
        copy, [Size(n) for n in range(1, 11)], [Size(n) for n in (10, 20, 40, 80)], 4000, 1.0
    ),
    "reverse": Task(
        reverse, [Size(n) for n in range(1, 11)], [Size(n) for n in (10, 20, 40, 80)], 4000, 1.0
    ),
    "repeat": Task(
        repeat,
        [Size(*x) for x in itertools.product(range(1, 6), repeat=2)],
        [Size(5, 5), Size(10, 5), Size(5, 10), Size(10, 10)],
        6000,
        1.0,
    ),
    "recall": Task(
        recall, [Size(n) for n in range(2, 7)], [Size(n) for n in (6, 10, 15, 20)], 2000, 10.0
    ),
    "sort": Task(
        sort, [Size(n) for n in range(2, 9)], [Size(n) for n in (8, 10, 15, 20)], 10000, 10.0, 4
    ),
}


# ---- models -------------------------------------------------------------------------------------


def count_parameters(*parts: nn.Module) -> int:
    return sum(p.numel() for part in parts for p in part.parameters())


class RecurrentModel(nn.Module):
    """A recurrent layer, and an output layer over its last steps."""

    def __init__(self, name: str, features: int, outputs: int, dim: int, heads: int = 1):
        super().__init__()
        machine = NeuralTuringMachine(features, dim, TRAIN_SLOTS, SLOT, heads, heads)
        self.layer: Any = machine
        size = machine.output_size
        if name == "LSTM":  # with as many parameters, or a few more
            limit = count_parameters(machine) + outputs * (size + 1)
            for size in itertools.count(1):
                self.layer = nn.LSTM(features, size, batch_first=True)
                if count_parameters(self.layer) + outputs * (size + 1) >= limit:
                    break
        self.output = nn.Linear(size, outputs)

    def forward(self, x: Tensor, steps: int) -> Tensor:
        """Return logits of the bits of the last steps."""
        return self.output(self.layer(x)[0][:, -steps:])


ROWS = ("NTM", "LSTM")


class Training(Trial):
    """The training of one model; the sequences of a step depend on the seed and step alone."""

    def __init__(self, task: str, name: str, seed: int, args: argparse.Namespace):
        self.task, self.args = TASKS[task], args
        x, target = self.task.batch(1, self.task.train_sizes[0], "")
        torch.manual_seed(seed)
        self.model = RecurrentModel(name, x.shape[-1], target.shape[-1], args.dim, self.task.heads)
        self.machine = self.model.layer if name == "NTM" else None
        steps = args.steps or self.task.steps
        sizes = {x: getattr(args, x) for x in ("dim", "batch_size", "learning_rate")}
        super().__init__(
            args.out,
            [task, name],
            {
                "steps": steps,
                "clip": self.task.clip,
                "heads": self.task.heads,
                "learnt": [*map(str, self.task.train_sizes)],
                **sizes,
            },
            {
                "sequences": args.test,
                "slots": TEST_SLOTS,
                "sizes": [*map(str, self.task.test_sizes)],
            },
            {"model": self.model},
            steps,
            Options(
                batch_size=args.batch_size,
                learning_rate=args.learning_rate,
                seed=seed,
                clip=self.task.clip,
            ),
        )

    def loss(self, step: int) -> Tensor:
        """Return the loss of the sequences of a step, all of one size."""
        size = random.Random(f"{self.options.seed} {step}").choice(self.task.train_sizes)
        x, target = self.task.batch(self.args.batch_size, size, f"{self.options.seed} {step}")
        logits = self.model(x, target.shape[1])
        return nn.functional.binary_cross_entropy_with_logits(logits, target)

    @torch.no_grad()
    def judge(self) -> dict[str, Any]:
        """Return the shares of wrong bits and of sequences with a wrong bit for each test size."""
        if self.machine:
            self.machine.num_slots = TEST_SLOTS
        found = {}
        for size in self.task.test_sizes:
            x, target = self.task.batch(self.args.test, size, f"test {size}")
            wrong = (self.model(x, target.shape[1]) > 0) != target.bool()
            found[str(size)] = [
                100 * wrong.double().mean().item(),
                100 * wrong.flatten(1).any(1).double().mean().item(),
            ]
        return found

    @torch.no_grad()
    def pictures(self) -> dict[str, bytes]:
        """Draw the head weights for a sequence of the second test size.

        Priorities below 0 are drawn as 0.
        """
        if not self.machine:
            return {}
        self.machine.num_slots = TRAIN_SLOTS
        x, target = self.task.batch(1, self.task.test_sizes[1], "picture")
        weights = self.machine(x, need_weights=True).weights[0]
        read, written = weights.split(self.task.heads, 1)
        output = self.model(x, target.shape[1])[0].sigmoid()
        output = nn.functional.pad(output, (0, 0, len(x[0]) - len(output), 0))
        return {"": draw_addressing(x[0], output, read, written)}


# ---- the table ----------------------------------------------------------------------------------


def table(trained: Sequence[Training]) -> str:
    """Return a table of all trained models for each task."""
    texts = []
    for task, of_task in by_name(trained).items():
        sizes = [str(x) for x in TASKS[task].test_sizes]
        lines = [f"| {task} | seeds | model | {' | '.join(sizes)} |"]
        lines.append(f"|---|--:|---|{'--:|' * len(sizes)}")
        for i, measure in enumerate(("bits wrong, %", "sequences wrong, %")):
            for name, models in by_name(of_task, 1).items():
                cells = [spread([x.found[size][i] for x in models], ".1f") for size in sizes]
                lines.append(f"| {measure} | {len(models)} | {name} | {' | '.join(cells)} |")
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


def compare(args: argparse.Namespace) -> None:
    """Train all models, test them, and write the tables and the pictures."""
    optional("matplotlib", "this example")
    each = itertools.product(range(1, args.seeds + 1), args.tasks, args.rows)
    learn_all(args.out, (Training(task, name, seed, args) for seed, task, name in each), table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("turing", __doc__, compare, ROWS, seeds=1, tasks=TASKS)
    count = at_least(1)
    parser.add_argument(
        "--steps", type=count, help="steps of each training; by default those of the task"
    )
    parser.add_argument("--batch-size", type=count, default=32, help="sequences in a step")
    parser.add_argument(
        "--learning-rate", type=float, default=3e-3, help="the largest learning rate"
    )
    parser.add_argument("--dim", type=count, default=100, help="features of the controller")
    parser.add_argument("--test", type=count, default=200, help="sequences of each size to test on")
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
