"""Pointer networks: sorting numbers, and the convex hull of points in the plane.

    python examples/pointers.py --out runs/pointers

Sets of n numbers or of n points of the unit square are drawn at random. Models are trained on sets
of 5 to 10 items and tested on these and on larger sets. Pointers must give the numbers from the
smallest to the largest, and the corners of the hull counter-clockwise, from the one that comes
first among the points. The models:

    pointing              attnfast.nn.PointerNetwork: its attention weights are the output
    naming                an output layer that reads state and context gives a position from 1 to 10
    naming, no attention  an output layer that reads the decoder's state alone

The tables have, by n, the share of correct answers: a sorted list, or a valid polygon with the
corners of the hull; for numbers also the share of correct positions; for hulls the area that valid
polygons cover, and the share of polygons that are not valid, because edges cross or there are fewer
than three corners. After Ctrl-C the same command resumes the training, bit for bit. The tables, and
pictures of hulls, are written to --out.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from _experiment import Trial, at_least, by_name, learn_all, make_parser, spread
from torch import Tensor, nn

from attnfast._utils.checks import optional
from attnfast.analysis.plots import draw_pointing
from attnfast.losses import pointer_loss
from attnfast.nn import Memory, PointerNetwork
from attnfast.translate.cli import run
from attnfast.translate.trainer import Options

TRAIN_SIZES, TEST_SIZES = range(5, 11), (5, 7, 10, 15, 20)


# ---- tasks --------------------------------------------------------------------------------------


def sort(items: Tensor) -> Tensor:
    """Return pointers at ``items [B, N, 1]`` from the smallest on, and the end."""
    return nn.functional.pad(items.squeeze(-1).argsort(-1) + 1, (0, 1))


def turn(a: Any, b: Any) -> Any:
    """Return a number above 0 where the vector b is to the left of a, below 0 to its right."""
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def hull(points: Tensor) -> Tensor:
    """Return pointers at the corners of the hulls of ``points [B, N, 2]``, and the end.

    The line from i to j is an edge if all other points are to its left.
    """
    B, N, _ = points.shape
    points = points.double()
    apart = points.unsqueeze(1) - points.unsqueeze(2)  # [B, i, j, 2]
    one = torch.eye(N, dtype=torch.bool)
    left = turn(apart.unsqueeze(3), apart.unsqueeze(2)) > 0  # of k
    edge = (left | one | one.unsqueeze(1)).all(-1)
    after, first = edge.int().argmax(-1), edge.any(-1).int().argmax(-1)
    place, ended, answer = first, torch.zeros(B, dtype=torch.bool), []
    for _ in range(N + 1):
        answer.append((place + 1).masked_fill(ended, 0))
        place = after.gather(1, place.unsqueeze(1)).squeeze(1)
        ended = ended | (place == first)
    return torch.stack(answer, 1)


def area(polygon: Tensor) -> float:
    """Return the area of ``polygon [K, 2]``, below 0 if it is clockwise."""
    return float(turn(polygon, polygon.roll(-1, 0)).sum() / 2)


def is_simple(polygon: Tensor) -> bool:
    """Return whether a polygon ``[K, 2]`` has at least three corners and no crossing edges."""
    K = len(polygon)
    edges = list(zip(polygon, polygon.roll(-1, 0)))

    def cross(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> bool:
        return bool(
            turn(b - a, c - a) * turn(b - a, d - a) < 0
            and turn(d - c, a - c) * turn(d - c, b - c) < 0
        )

    pairs = itertools.combinations(range(K), 2)
    return K > 2 and not any(cross(*edges[i], *edges[j]) for i, j in pairs)


def chosen(pointers: Tensor) -> list[int]:
    """Return the indices, from 0 on, of the items at which pointers up to the end point."""
    return [i - 1 for i in itertools.takewhile(bool, pointers.tolist())]


def judge_list(items: Tensor, target: list[int], got: list[int]) -> dict[str, float]:
    """Return the measures of a predicted order of numbers."""
    right = [i == j for i, j in itertools.zip_longest(target, got)]
    return {"right, %": all(right), "right places, %": statistics.fmean(right)}


def judge_hull(points: Tensor, target: list[int], got: list[int]) -> dict[str, float]:
    """Return the measures of a predicted hull."""
    points = points.double()
    if not is_simple(points[got]):
        return {"right, %": False, "not valid, %": True}
    covered = abs(area(points[got])) / area(points[target])
    return {"right, %": set(got) == set(target), "not valid, %": False, "area covered, %": covered}


class Task(NamedTuple):
    """A task: features of an item, and functions for the true answers and the measures of one."""

    features: int
    answer: Any
    judge: Any
    steps: int  # training steps

    def draw(self, count: int, n: int, seed: str) -> tuple[Tensor, Tensor]:
        """Return ``count`` sets of n items and their answers, a function of the arguments alone."""
        draw = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
        items = torch.rand(count, n, self.features, generator=draw)
        return items, self.answer(items)


TASKS = {"sorting": Task(1, sort, judge_list, 3000), "hull": Task(2, hull, judge_hull, 4000)}


# ---- models -------------------------------------------------------------------------------------


class Naming(PointerNetwork):
    """A model whose output layer gives the end or a position up to the largest training size."""

    def __init__(self, item_dim: int, dim: int, attends: bool):
        super().__init__(item_dim, dim, dim)
        self.attends = attends
        self.output = nn.Linear(2 * dim if attends else dim, 1 + max(TRAIN_SIZES))

    def point(self, states: Tensor, memory: Memory) -> Tensor:
        if self.attends:
            states = torch.cat([states, self.attention(states, memory).context], -1)
        return self.output(states)[..., : memory.key.shape[1]].log_softmax(-1)


class Row(NamedTuple):
    """A model of the table: its constructor, the number of seeds, the largest set it accepts."""

    build: Any
    seeds: int
    largest: float = float("inf")


ROWS = {
    "pointing": Row(lambda features, dim: PointerNetwork(features, dim, dim), 3),
    "naming": Row(lambda features, dim: Naming(features, dim, True), 1, max(TRAIN_SIZES)),
    "naming, no attention": Row(
        lambda features, dim: Naming(features, dim, False), 1, max(TRAIN_SIZES)
    ),
}  # fmt: skip


class Training(Trial):
    """The training of one model; the sets of a step depend on the seed and step alone."""

    def __init__(self, task: str, name: str, seed: int, args: argparse.Namespace):
        self.args = args
        self.task, self.row = TASKS[task], ROWS[name]
        torch.manual_seed(seed)
        self.model = self.row.build(self.task.features, args.dim)
        steps = args.steps or self.task.steps
        sizes = {x: getattr(args, x) for x in ("dim", "batch_size", "learning_rate")}
        super().__init__(
            args.out,
            [task, name],
            {"steps": steps, **sizes},
            {"sets": args.test, "tested": list(TEST_SIZES)},
            {"model": self.model},
            steps,
            Options(batch_size=args.batch_size, learning_rate=args.learning_rate, seed=seed),
        )

    def loss(self, step: int) -> Tensor:
        """Return the loss of the sets of a step, all of the same number of items."""
        n = random.Random(f"{self.options.seed} {step}").choice(TRAIN_SIZES)
        items, answers = self.task.draw(self.args.batch_size, n, f"{self.options.seed} {step}")
        log_probs = self.model(items, torch.full((len(items),), n), answers)
        return pointer_loss(log_probs, answers)

    def judge(self) -> dict[str, Any]:
        """Measure the answers to the test sets of each size."""
        found = {}
        for n in [n for n in TEST_SIZES if n <= self.row.largest]:
            items, answers = self.task.draw(self.args.test, n, f"test {n}")
            pointers = self.model.decode(items, torch.full((len(items),), n), distinct=True)
            judged = [
                self.task.judge(x, chosen(target), chosen(got))
                for x, target, got in zip(items, answers, pointers)
            ]
            for measure in dict.fromkeys(itertools.chain(*judged)):
                values = [x[measure] for x in judged if measure in x]
                found[f"{measure} {n}"] = 100 * statistics.fmean(values)
        return found

    @torch.no_grad()
    def pictures(self) -> dict[str, bytes]:
        """Draw a hull, the predicted polygon, and the weights."""
        if self.task.answer is not hull:
            return {}
        items, answers = self.task.draw(1, max(TRAIN_SIZES), "picture")
        lengths = torch.tensor([items.shape[1]])
        pointers = self.model.decode(items, lengths, distinct=True)
        weights = self.model(items, lengths, pointers).exp()
        drawn = draw_pointing(items[0], chosen(answers[0]), chosen(pointers[0]), weights[0])
        return {"": drawn}


# ---- the tables ---------------------------------------------------------------------------------


def table(trained: Sequence[Training]) -> str:
    """Return a table of all trained models for each task."""
    texts = []
    for task, of_task in by_name(trained).items():
        measures = dict.fromkeys(key.rpartition(" ")[0] for one in of_task for key in one.found)
        measures.pop("", None)
        lines = [f"| {task} | seeds | model | {' | '.join(map(str, TEST_SIZES))} |"]
        lines.append(f"|---|--:|---|{'--:|' * len(TEST_SIZES)}")
        for measure in measures:
            for name, models in by_name(of_task, 1).items():
                keys = [f"{measure} {n}" for n in TEST_SIZES]
                cells = [
                    spread([x.found[key] for x in models], ".1f") if key in models[0].found else "–"
                    for key in keys
                ]
                lines.append(f"| {measure} | {len(models)} | {name} | {' | '.join(cells)} |")
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


def compare(args: argparse.Namespace) -> None:
    """Train all models, test them, and write the tables and the pictures."""
    optional("matplotlib", "this example")
    each = itertools.product(range(1, args.seeds + 1), args.tasks, args.rows)
    trainings = (
        Training(task, name, seed, args) for seed, task, name in each if seed <= ROWS[name].seeds
    )
    learn_all(args.out, trainings, table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("pointers", __doc__, compare, ROWS, seeds=3, tasks=TASKS)
    count = at_least(1)
    parser.add_argument(
        "--steps", type=count, help="steps of each training; by default those of the task"
    )
    parser.add_argument("--batch-size", type=count, default=64, help="sets in a step")
    parser.add_argument(
        "--learning-rate", type=float, default=4e-3, help="the largest learning rate"
    )
    parser.add_argument("--dim", type=count, default=96, help="features of states")
    parser.add_argument("--test", type=count, default=500, help="sets of each size to test on")
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
