"""Bidirectional attention flow: where in descriptions of restaurants an answer is.

    python examples/reading.py FOLDER --out runs/reading

FOLDER holds devset.csv and testset_w_refs.csv of the E2E challenge (Novikova et al., 2017,
https://github.com/tuetschek/e2e-dataset, CC BY-SA 4.0). A text is the descriptions of two places,
one after the other. A question names one of them and asks for an attribute, in one of two
phrasings; its answer is the attribute's value where it stands in that place's description. All
descriptions of a fifth of the attribute lists of both files are for the test. The models:

    both ways            text to question and question to text
    no text to question  every word of the text finds the mean of the question
    no question to text  what the question finds in the text is left out
    neither              both are

The table has the share of exact answers and F1, the overlap in words, in all and by attribute. What
is trained is kept, so that the same command goes on after Ctrl-C, bit for bit. Tables and a picture
of what words of a question look at go to --out.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from e2e import read
from torch import Tensor
from trials import Once, Trial, spread

from attnfast import checkpoint
from attnfast.cli import Parser, run
from attnfast.data import pad
from attnfast.errors import InputError, optional
from attnfast.interrupts import Interrupted
from attnfast.models import BiDAF, best_spans
from attnfast.nn import BidirectionalAttention
from attnfast.plots import draw_alignment
from attnfast.progress import say
from attnfast.training import Options

#: By attribute, two ways to ask a place for it.
QUESTIONS = {
    "near": ("what is {} close to", "which place is next to {}"),
    "area": ("where is {}", "in which part of the city is {}"),
    "food": ("what do they serve at {}", "what kind of food is there at {}"),
    "priceRange": ("how expensive is {}", "what are the prices like at {}"),
    "customer rating": ("how is {} rated", "what do customers think of {}"),
    "eatType": ("what kind of place is {}", "what sort of venue is {}"),
}
UNK = 1


class Asked(NamedTuple):
    """Descriptions of two places, a question about one, and the answer's first and last word."""

    text: list[str]
    question: list[str]
    attribute: str
    name: str
    span: tuple[int, int]


def find(words: Sequence[str], text: Sequence[str]) -> list[int]:
    """Return where words begin in a text."""
    return [i for i in range(len(text)) if [*text[i : i + len(words)]] == [*words]]


Place = tuple[list[str], dict[str, str]]


def split(pairs: Sequence[tuple[str, str]]) -> tuple[list[Place], list[Place]]:
    """Return what to learn from and to test on: descriptions that name their place once."""
    train, test = list[Place](), list[Place]()
    for attributes, description in pairs:
        values = dict(re.findall(r"(\w[\w ]*?) \[ (.*?) \]", attributes.lower()))
        text = description.lower().split()
        if len(find(values.get("name", "").split(), text)) == 1:
            (train if zlib.crc32(attributes.encode()) % 5 else test).append((text, values))
    return train, test


def ask(places: Sequence[Place]) -> list[Asked]:
    """Make the questions: each description beside that of another place, in any order."""
    draw, found = random.Random(0), []
    for text, values in places:
        other, its = draw.choice(places)
        names = [x["name"].split() for x in (values, its)]
        if find(names[0], other) or find(names[1], text):
            continue
        before = draw.random() < 0.5
        both = [*other, *text] if before else [*text, *other]
        for attribute, forms in QUESTIONS.items():
            words = values.get(attribute.lower(), "").split()
            at = find(words, text) if words else []
            if len(at) == 1:
                first = at[0] + before * len(other)
                question = draw.choice(forms).format(values["name"]).split()
                span = first, first + len(words) - 1
                found.append(Asked(both, question, attribute, values["name"], span))
    return found


class Batch(NamedTuple):
    """Word ids and lengths of texts and questions, and spans ``[B, 2]``."""

    text: Tensor
    text_lengths: Tensor
    question: Tensor
    question_lengths: Tensor
    spans: Tensor


def fingerprint(asked: Sequence[Asked]) -> int:
    return zlib.crc32(repr(asked).encode())


class Questions:
    """The questions, and the words that occur twice in those to learn from."""

    def __init__(self, folder: Path, most: int):
        files = (folder / name for name in ("devset.csv", "testset_w_refs.csv"))
        self.train, test = map(ask, split([pair for file in files for pair in read(file)]))
        self.test = random.Random(0).sample(test, min(most, len(test)))
        if not self.train or not self.test:
            raise InputError(f"{folder}: expected descriptions with their attributes, got none")
        counts = Counter(word for x in self.train for word in (*x.text, *x.question))
        kept = sorted(word for word, count in counts.items() if count > 1)
        self.ids = {word: i for i, word in enumerate(kept, UNK + 1)}

    def gather(self, asked: Sequence[Asked]) -> Batch:
        """Put questions into a batch."""
        parts = []
        for texts in ([x.text for x in asked], [x.question for x in asked]):
            parts.append(pad([[self.ids.get(word, UNK) for word in text] for text in texts]))
            parts.append(torch.tensor([len(text) for text in texts]))
        return Batch(*parts, torch.tensor([x.span for x in asked]))


# ---- models -------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A model of the table: which ways it attends."""

    to_question: bool = True
    to_text: bool = True


ROWS = {
    "both ways": Row(),
    "no text to question": Row(to_question=False),
    "no question to text": Row(to_text=False),
    "neither": Row(False, False),
}


class OneWay(BidirectionalAttention):
    """Attention one way or none: a mean in place of what a word finds, or a part left out."""

    def __init__(self, dim: int, row: Row):
        super().__init__(dim)
        self.row = row

    def forward(  # type: ignore[override]
        self, text: Tensor, question: Tensor, text_lengths: Tensor, question_lengths: Tensor,
        need_weights: bool = False,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        g, weights = super().forward(text, question, text_lengths, question_lengths, need_weights)
        if not self.row.to_question:
            mean = question.sum(1, keepdim=True) / question_lengths.view(-1, 1, 1)  # padding is 0
            parts = text, mean.expand_as(text), text * mean, g[..., 3 * self.dim :]
            g = torch.cat(parts, -1)
        return g if self.row.to_text else g[..., : 3 * self.dim], weights


class Training(Trial):
    """One model in training, or trained: a step's questions depend on the seed and its number."""

    def __init__(self, name: str, seed: int, questions: Questions, args: argparse.Namespace):
        self.name, self.row, self.questions = name, ROWS[name], questions
        torch.manual_seed(seed)
        size = 2 * args.dim
        features = size * (4 if self.row.to_text else 3)
        self.model = BiDAF(
            OneWay(size, self.row), features, UNK + 1 + len(questions.ids), args.dim, args.dim, 0.2
        )
        sizes = {x: getattr(args, x) for x in ("dim", "steps", "batch_size")}
        super().__init__(
            f"{name}, seed {seed}",
            args.out / f"{name.replace(' ', '-')}-{seed}.pt",
            {"row": self.row._asdict(), "questions": fingerprint(questions.train), **sizes},
            {"model": self.model},
            args.steps,
            Options(batch_size=args.batch_size, learning_rate=2e-3, seed=seed),
        )

    def loss(self, step: int) -> Tensor:
        draw = random.Random(f"{self.options.seed} {step}")
        batch = self.questions.gather(draw.choices(self.questions.train, k=self.options.batch_size))
        found = self.model(*batch[:4])
        right = (x.gather(1, at.unsqueeze(1)) for x, at in zip(found[:2], batch.spans.T))
        return -sum(x.mean() for x in right)  # type: ignore[return-value]

    @torch.no_grad()
    def test(self) -> None:
        """Compare answers with the true ones, word for word."""
        asked = {"test": len(self.questions.test), "questions": fingerprint(self.questions.test)}
        if self.found.get("asked") == asked:
            return
        self.train(False)
        each: dict[str, list[tuple[float, float]]] = {}
        for first in range(0, asked["test"], 200):
            rows = self.questions.test[first : first + 200]
            batch = self.questions.gather(rows)
            spans = best_spans(*self.model(*batch[:4])[:2]).tolist()
            for x, span in zip(rows, spans):
                result = float(tuple(span) == x.span), overlap(span, x.span)
                for name in ("all", x.attribute):
                    each.setdefault(name, []).append(result)
        means = {
            name: [100 * sum(column) / len(rows) for column in zip(*rows)]
            for name, rows in each.items()
        }
        self.found = {"asked": asked, **means}
        self.save()

    @torch.no_grad()
    def picture(self) -> bytes:
        """Draw what the words of a question look at, the answer between brackets."""
        self.train(False)
        one = next(
            (x for x in self.questions.test if x.attribute == "near"), self.questions.test[0]
        )
        found = self.model(*self.questions.gather([one])[:4], need_weights=True)
        [(first, last)] = best_spans(*found[:2]).tolist()
        text = [
            "[" * (i == first) + word + "]" * (i == last) for i, word in enumerate(one.text)
        ]  # fmt: skip
        return draw_alignment(found.weights[0][0].T, text, one.question)


def overlap(a: Sequence[int], b: Sequence[int]) -> float:
    """Return F1 of the words of two spans."""
    shared = max(min(a[1], b[1]) - max(a[0], b[0]) + 1, 0)
    return 2 * shared / (a[1] - a[0] + b[1] - b[0] + 2)


# ---- the table ----------------------------------------------------------------------------------


def table(trained: dict[str, list[Training]]) -> str:
    """Return the tables of all models that are trained."""
    names = list(trained)
    every = next(iter(trained.values()))[0].found
    lines = ["| | seeds | exact, % | F1, % |", "|---|--:|--:|--:|"]
    for name, models in trained.items():
        cells = [spread([x.found["all"][i] for x in models], ".1f") for i in (0, 1)]
        lines.append(f"| {name} | {len(models)} | {' | '.join(cells)} |")
    lines += ["", f"| exact, % | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for kind in QUESTIONS:
        if kind in every:
            cells = [spread([x.found[kind][0] for x in trained[name]], ".1f") for name in names]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def compare(args: argparse.Namespace) -> None:
    """Train all models, test them, and write the table and the picture."""
    for name in ("seeds", "steps", "batch_size", "dim", "test"):
        if getattr(args, name) < 1:
            raise InputError(f"{name} must be at least 1, got {getattr(args, name)}")
    optional("matplotlib", "this example")
    checkpoint.make_folder(args.out)
    questions = Questions(args.data, args.test)
    trained: dict[str, list[Training]] = {}
    try:
        for seed in range(1, args.seeds + 1):
            for name in args.rows:
                one = Training(name, seed, questions, args)
                one.learn()
                one.test()
                trained.setdefault(name, []).append(one)
                text = table(trained)
                checkpoint.write_atomically(args.out / "table.md", text.encode())
    except Interrupted as stop:
        raise Interrupted(stop.number, "stopped; the same command goes on from there") from None
    drawn = trained[args.rows[0]][0].picture()
    checkpoint.write_atomically(args.out / "question.png", drawn)
    print(text, end="")
    say(f"table.md and question.png: {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of the two files")
    parser.add_argument("--out", type=Path, default=Path("runs/reading"), help="folder of results")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, action=Once, default=list(ROWS), help="models"
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 1 on")
    parser.add_argument("--steps", type=int, default=600, help="of each training")
    parser.add_argument("--batch-size", type=int, default=64, help="questions in a step")
    parser.add_argument("--dim", type=int, default=64, help="features of each direction")
    parser.add_argument("--test", type=int, default=4000, help="questions to test on, at most")
    parser.set_defaults(function=compare)
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
