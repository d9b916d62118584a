"""Bidirectional attention flow: find a value that a question omits in a text.

    python examples/reading.py FOLDER --out runs/reading

FOLDER holds devset.csv and testset_w_refs.csv of the E2E challenge (Novikova et al., 2017,
https://github.com/tuetschek/e2e-dataset, CC BY-SA 4.0), where several people described each place.
A text consists of the descriptions of two places. A question consists of descriptions of the same
places by two other people, in either order, without the values of one attribute, such as the names
or the areas, and asks for one of the two values. A model must therefore find the place by the rest
of its description: another attribute, whose values differ, occurs in text and question for both
places. The descriptions of a fifth of the attribute lists of both files are the test. The models:

    both ways                       text to question and question to text
    both ways, highway              two highway layers transform the embedded words
    both ways, characters           a CNN also reads the characters of each word
    both ways, characters, highway  the CNN and two highway layers
    no text to question             every word of the text reads the mean of the question
    no question to text             without attention from the question to the text
    neither                         both changes

The tables have the share of exact answers and F1, the overlap in words, and the share of exact
answers by attribute. After Ctrl-C the same command resumes the training, bit for bit. The tables,
and pictures of the attention weights, are written to --out.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _experiment import Trial, at_least, by_name, learn_all, make_parser, spread
from e2e import read
from torch import Tensor

from attnfast._utils.checks import InputError, optional
from attnfast.analysis.plots import draw_alignment
from attnfast.models import BiDAF, CharacterCNN, SpanPrediction, best_spans
from attnfast.nn import BidirectionalAttention
from attnfast.translate.cli import run
from attnfast.translate.data import pad
from attnfast.translate.trainer import Options

#: The attributes whose values a question may omit.
ATTRIBUTES = ("name", "near", "area", "food", "pricerange", "customer rating", "eattype")
UNK, ASKED, LEFT_OUT, BAR = 1, "_", "~", "|"
AMBIGUOUS = (["low"], ["average"], ["high"])  # of a price or of a rating
LONGEST = 30  # words of a description
CHARACTER = 8  # features of a character


class Asked(NamedTuple):
    """A text, a question, the attribute it asks for, and the answer's first and last word."""

    text: list[str]
    question: list[str]
    attribute: str
    span: tuple[int, int]


def find(words: Sequence[str], text: Sequence[str]) -> list[int]:
    """Return the indices at which a sequence of words begins in a text."""
    return [i for i in range(len(text)) if [*text[i : i + len(words)]] == [*words]]


class Place(NamedTuple):
    """A place: the words of the value of each attribute, and its descriptions."""

    values: dict[str, list[str]]
    texts: list[list[str]]


def split(pairs: Sequence[tuple[str, str]]) -> tuple[list[Place], list[Place]]:
    """Return the training places and the test places, each with several descriptions.

    No test description is also a training description.
    """
    found: dict[str, list[list[str]]] = {}
    for attributes, description in pairs:
        texts = found.setdefault(attributes.lower(), [])
        words = description.lower().split()
        if len(words) <= LONGEST and words not in texts:
            texts.append(words)
    train, test = list[Place](), list[Place]()
    for attributes, texts in sorted(found.items()):
        is_test = zlib.crc32(attributes.encode()) % 5 == 0
        (test if is_test else train).append(Place(read_values(attributes), texts))
    known = {tuple(text) for place in train for text in place.texts}
    test = [Place(x.values, [y for y in x.texts if tuple(y) not in known]) for x in test]
    return [x for x in train if len(x.texts) > 1], [x for x in test if len(x.texts) > 1]


def read_values(attributes: str) -> dict[str, list[str]]:
    """Read a list such as ``name [ the eagle ] , area [ riverside ]``."""
    pairs = re.findall(r"(\w[\w ]*?) \[ (.*?) \]", attributes)
    return {name: value.split() for name, value in pairs}


def ask(places: Sequence[Place], count: int) -> list[Asked]:
    """Pair every description with those of ``count`` places; return the possible questions."""
    draw, found = random.Random(0), []
    for one, i in ((place, i) for place in places for i in range(len(place.texts))):
        for other in draw.choices(places, k=count):
            ones = one.texts[i], draw.choice(one.texts[:i] + one.texts[i + 1 :])
            asked = pose(
                draw, draw.choice(ATTRIBUTES), one, ones, other, draw.sample(other.texts, 2)
            )
            found += [asked] if asked else []
    return found


def pose(
    draw: random.Random,
    kind: str,
    one: Place,
    ones: Sequence[list[str]],
    other: Place,
    others: Sequence[list[str]],
) -> Asked | None:
    """Return a question for the value of one of two places, each with two descriptions.

    Return None if the question has no single answer: a text contains the value twice or not at
    all, or no other attribute in text and question distinguishes the places.
    """
    value, another = one.values.get(kind, []), other.values.get(kind, [])
    if not value or not another or value in AMBIGUOUS:
        return None
    again, asked = without(value, ones[1], ASKED)
    its, left_out = without(another, others[1], LEFT_OUT)
    once = len(find(value, ones[0])) == asked == left_out == 1 and find(another, others[0])
    if not once or any(find(value, x) for x in others):
        return None
    if not any(distinguishes(x, one, ones, other, others) for x in ATTRIBUTES if x != kind):
        return None
    [first] = find(value, ones[0])
    parts = [ones[0], others[0]]
    if draw.random() < 0.5:
        parts.reverse()
        first += len(others[0]) + 1
    text = [*parts[0], BAR, *parts[1]]
    parts = [again, its]
    if draw.random() < 0.5:
        parts.reverse()
    question = [*parts[0], BAR, *parts[1]]
    return Asked(text, question, kind, (first, first + len(value) - 1))


def distinguishes(
    kind: str, one: Place, ones: Sequence[list[str]], other: Place, others: Sequence[list[str]]
) -> bool:
    """Return whether the values of an attribute differ and occur in all descriptions."""
    value, another = one.values.get(kind, []), other.values.get(kind, [])
    if not value or not another or value == another:
        return False
    return all(find(value, x) for x in ones) and all(find(another, x) for x in others)


def without(value: Sequence[str], text: list[str], mark: str) -> tuple[list[str], int]:
    """Return a text with each occurrence of a value replaced by a mark, and their number."""
    places = find(value, text)
    for at in reversed(places):
        text = [*text[:at], mark, *text[at + len(value) :]]
    return text, len(places)


class Batch(NamedTuple):
    """Word ids, lengths and character ids of texts and questions, and spans ``[B, 2]``."""

    text: Tensor
    text_lengths: Tensor
    text_characters: Tensor
    question: Tensor
    question_lengths: Tensor
    question_characters: Tensor
    spans: Tensor


def fingerprint(asked: Sequence[Asked]) -> int:
    return zlib.crc32(repr(asked).encode())


class Questions:
    """The questions, and the vocabulary: words that occur twice in the training questions."""

    def __init__(self, folder: Path, most: int):
        files = (folder / name for name in ("devset.csv", "testset_w_refs.csv"))
        train, tested = split([pair for file in files for pair in read(file)])
        self.train, test = ask(train, 12), ask(tested, 8)
        self.test = random.Random(0).sample(test, min(most, len(test)))
        if not self.train or not self.test:
            raise InputError(
                f"{folder}: expected places that several people described, got too few"
            )
        counts = Counter(word for x in self.train for word in (*x.text, *x.question))
        kept = sorted(word for word, count in counts.items() if count > 1)
        self.ids = {word: i for i, word in enumerate(kept, UNK + 1)}
        self.alphabet = {x: i for i, x in enumerate(sorted({*"".join(counts)}), UNK + 1)}

    def spell(self, texts: Sequence[Sequence[str]]) -> Tensor:
        """Return the character ids ``[B, T, L]`` of the words of texts, 0 in padding."""
        length = max(map(len, texts))
        words = itertools.chain(*([*text, *[""] * (length - len(text))] for text in texts))
        ids = pad([[self.alphabet.get(x, UNK) for x in word] for word in words])
        return ids.unflatten(0, (len(texts), length))

    def gather(self, asked: Sequence[Asked]) -> Batch:
        """Return a batch of questions."""
        parts = []
        for texts in ([x.text for x in asked], [x.question for x in asked]):
            parts.append(pad([[self.ids.get(word, UNK) for word in text] for text in texts]))
            parts.append(torch.tensor([len(text) for text in texts]))
            parts.append(self.spell(texts))
        return Batch(*parts, torch.tensor([x.span for x in asked]))


# ---- models -------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A model of the table: the directions in which it attends, and its word features."""

    to_question: bool = True
    to_text: bool = True
    characters: bool = False
    highway_layers: int = 0


ROWS = {
    "both ways": Row(),
    "both ways, highway": Row(highway_layers=2),
    "both ways, characters": Row(characters=True),
    "both ways, characters, highway": Row(characters=True, highway_layers=2),
    "no text to question": Row(to_question=False),
    "no question to text": Row(to_text=False),
    "neither": Row(False, False),
}


class OneWay(BidirectionalAttention):
    """Bidirectional attention without one direction, or without both."""

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
    """The training of one model; the questions of a step depend on the seed and step alone."""

    def __init__(self, name: str, seed: int, questions: Questions, args: argparse.Namespace):
        self.row, self.questions = ROWS[name], questions
        torch.manual_seed(seed)
        size = 2 * args.dim
        features = size * (4 if self.row.to_text else 3)
        characters = None
        if self.row.characters:
            alphabet = UNK + 1 + len(questions.alphabet)
            characters = CharacterCNN(alphabet, CHARACTER, args.dim, dropout=0.2)
        self.model = BiDAF(
            OneWay(size, self.row), features, UNK + 1 + len(questions.ids), args.dim, args.dim, 0.2,
            characters=characters, highway_layers=self.row.highway_layers,
        )  # fmt: skip
        sizes = {x: getattr(args, x) for x in ("dim", "steps", "batch_size")}
        super().__init__(
            args.out,
            [name],
            {"row": self.row._asdict(), "questions": fingerprint(questions.train), **sizes},
            {"test": len(questions.test), "questions": fingerprint(questions.test)},
            {"model": self.model},
            args.steps,
            Options(batch_size=args.batch_size, learning_rate=2e-3, seed=seed),
        )

    def read(self, batch: Batch, need_weights: bool = False) -> SpanPrediction:
        """Return the model's answers to a batch; only a model with a CNN reads characters."""
        inputs = batch._asdict()
        del inputs["spans"]
        if not self.row.characters:
            del inputs["text_characters"], inputs["question_characters"]
        return self.model(**inputs, need_weights=need_weights)

    def loss(self, step: int) -> Tensor:
        draw = random.Random(f"{self.options.seed} {step}")
        batch = self.questions.gather(draw.choices(self.questions.train, k=self.options.batch_size))
        found = self.read(batch)
        right = (x.gather(1, at.unsqueeze(1)) for x, at in zip(found[:2], batch.spans.T))
        return -sum(x.mean() for x in right)  # type: ignore[return-value]

    @torch.no_grad()
    def judge(self) -> dict[str, Any]:
        """Return the percentages of exact answers and F1, of all and by attribute."""
        each: dict[str, list[tuple[float, float]]] = {}
        for first in range(0, len(self.questions.test), 200):
            rows = self.questions.test[first : first + 200]
            batch = self.questions.gather(rows)
            spans = best_spans(*self.read(batch)[:2]).tolist()
            for x, span in zip(rows, spans):
                result = float(tuple(span) == x.span), overlap(span, x.span)
                for name in ("all", x.attribute):
                    each.setdefault(name, []).append(result)
        return {
            name: [100 * sum(column) / len(rows) for column in zip(*rows)]
            for name, rows in each.items()
        }

    @torch.no_grad()
    def pictures(self) -> dict[str, bytes]:
        """Draw the attention weights of a short question, with the answer in brackets."""
        if not self.row.to_question:
            return {}
        one = min(self.questions.test, key=lambda x: len(x.text) + len(x.question))
        found = self.read(self.questions.gather([one]), need_weights=True)
        [(first, last)] = best_spans(*found[:2]).tolist()
        text = [
            "[" * (i == first) + word + "]" * (i == last) for i, word in enumerate(one.text)
        ]  # fmt: skip
        titles = "text, the answer in brackets", "question"
        return {"": draw_alignment(found.weights[0][0].T, text, one.question, titles=titles)}


def overlap(a: Sequence[int], b: Sequence[int]) -> float:
    """Return F1 of the words of two spans."""
    shared = max(min(a[1], b[1]) - max(a[0], b[0]) + 1, 0)
    return 2 * shared / (a[1] - a[0] + b[1] - b[0] + 2)


# ---- the table ----------------------------------------------------------------------------------


def table(models: Sequence[Training]) -> str:
    """Return the tables of all trained models."""
    trained = by_name(models)
    names = list(trained)
    lines = ["| | seeds | exact, % | F1, % |", "|---|--:|--:|--:|"]
    for name, each in trained.items():
        cells = [spread([x.found["all"][i] for x in each], ".1f") for i in (0, 1)]
        lines.append(f"| {name} | {len(each)} | {' | '.join(cells)} |")
    lines += ["", f"| exact, % | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for kind in ATTRIBUTES:
        if kind in models[0].found:
            cells = [spread([x.found[kind][0] for x in trained[name]], ".1f") for name in names]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def compare(args: argparse.Namespace) -> None:
    """Train all models, test them, and write the table and the pictures."""
    optional("matplotlib", "this example")
    questions = Questions(args.data, args.test)
    pairs = itertools.product(range(1, args.seeds + 1), args.rows)
    learn_all(args.out, (Training(name, seed, questions, args) for seed, name in pairs), table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("reading", __doc__, compare, ROWS, seeds=1)
    count = at_least(1)
    parser.add_argument("data", type=Path, help="folder of the two files")
    parser.add_argument("--steps", type=count, default=750, help="steps of each training")
    parser.add_argument("--batch-size", type=count, default=64, help="questions in a step")
    parser.add_argument("--dim", type=count, default=64, help="features of each direction")
    parser.add_argument("--test", type=count, default=2000, help="questions to test on, at most")
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
