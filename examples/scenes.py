"""Scenes of handwritten digits, captions of them, and measures of captions.

A scene is a noisy canvas with digits that do not touch. A caption states where it begins and names
the digits one after the other, each with its position relative to the next: in "at the top a seven
above a small two , left of a four" the two is left of the four.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnfast._utils.checks import check_int, describe, raise_value_error

NUMBERS = "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"
#: Two phrases for each relation of a digit to the next one.
RELATIONS = {
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
OPENERS, JOINERS = ("", "there is"), (",", ", which is")
#: The sides at which a caption may begin; it continues to the right, or down.
ORDERS = "on the left", "at the top"
#: The vocabulary of captions.
WORDS = tuple(
    sorted({*NUMBERS, "a", "an", "small", *" ".join(
        [*ORDERS, *OPENERS, *JOINERS, *itertools.chain(*RELATIONS.values())]
    ).split()})
)  # fmt: skip

CANVAS = 36, 48  # pixels of a side, minimum and maximum
SMALL, LARGE = (8, 10), (13, 16)  # pixels of a digit's height
GAP = 2  # pixels between two digits, at least
INK, NOISE = (0.7, 1.0), (0.05, 0.15)  # largest value of a digit; standard deviation of the noise
SLACK = 3  # pixels by which a relation may miss the diagonal and still hold


class Placed(NamedTuple):
    """A digit of a scene: its value, whether it is small, and its bounding box in pixels.

    The box is top, left, bottom and right; bottom and right are the first pixels beyond it.
    """

    value: int
    small: bool
    box: tuple[int, int, int, int]

    @property
    def centre(self) -> tuple[float, float]:
        """The row and the column of the centre of the box."""
        top, left, bottom, right = self.box
        return (top + bottom) / 2, (left + right) / 2


class Scene(NamedTuple):
    """An image ``[1, H, W]``, float32, 0 for paper and 1 for ink, and the digits on it."""

    image: Tensor
    digits: tuple[Placed, ...]


def draw_scene(glyphs: Sequence[Sequence[Tensor]], count: int, seed: str) -> Scene:
    """Return a scene of ``count`` digits, a function of the arguments alone.

    Args:
        glyphs: for each of the ten digits, its pictures ``[h, w]`` from 0 to 1.
        count: number of digits.
        seed: any text.

    Raises:
        ValueError: an argument does not fit, or a canvas has no space for ``count`` digits.
    """
    check_int("count", count)
    if len(glyphs) != len(NUMBERS) or not all(len(x) for x in glyphs):
        raise_value_error("glyphs", "pictures of each of ten digits", [len(x) for x in glyphs])
    draw = random.Random(seed)
    for _ in range(100):
        height, width = draw.randint(*CANVAS), draw.randint(*CANVAS)
        image, digits = torch.zeros(height, width), list[Placed]()
        for _ in range(20 * count):
            value, small = draw.randrange(len(NUMBERS)), draw.random() < 0.5
            rows = draw.randint(*(SMALL if small else LARGE))
            columns = round(rows * draw.uniform(0.85, 1.15))
            glyph = _scaled(draw.choice(glyphs[value]), rows, columns)
            top, left = draw.randint(0, height - rows), draw.randint(0, width - columns)
            ink = (glyph > 0.25).nonzero()
            (t, x), (b, y) = ink.amin(0).tolist(), ink.amax(0).tolist()
            one = Placed(value, small, (top + t, left + x, top + b + 1, left + y + 1))
            if any(_touch(one, other) for other in digits):
                continue
            digits.append(one)
            image[top : top + rows, left : left + columns] += draw.uniform(*INK) * glyph
            if len(digits) == count:
                noise = torch.Generator().manual_seed(draw.getrandbits(63))
                image += draw.uniform(*NOISE) * torch.randn(height, width, generator=noise)
                return Scene(image.unsqueeze(0), tuple(digits))
    raise_value_error("count", "no more digits than a canvas has room for", count)
    raise AssertionError  # not reached


def _scaled(glyph: Tensor, rows: int, columns: int) -> Tensor:
    size = rows, columns
    return F.interpolate(glyph[None, None], size, mode="bilinear", align_corners=False)[0, 0]


def _touch(a: Placed, b: Placed) -> bool:
    """Return whether boxes overlap, or are closer than the gap."""
    return all(
        a.box[i] < b.box[i + 2] + GAP and b.box[i] < a.box[i + 2] + GAP for i in range(2)
    )  # fmt: skip


# ---- captions -----------------------------------------------------------------------------------


def relation(a: Placed, b: Placed) -> str:
    """Return the relation of a to b along the axis on which their distance is larger."""
    down, across = (x - y for x, y in zip(a.centre, b.centre))
    if abs(across) >= abs(down):
        return "left" if across < 0 else "right"
    return "above" if down < 0 else "below"


def holds(name: str, a: Placed, b: Placed) -> bool:
    """Return whether a relation of a to b is correct; near the diagonal two relations are."""
    down, across = (x - y for x, y in zip(a.centre, b.centre))
    ahead, aside = {
        "left": (-across, down), "right": (across, down),
        "above": (-down, across), "below": (down, across),
    }[name]  # fmt: skip
    return ahead > 0 and ahead >= abs(aside) - SLACK


def caption(scene: Scene, order: str, opener: str, way: int, joiner: str) -> str:
    """Return a caption of a scene, its words separated by blanks.

    Args:
        order: one of :data:`ORDERS`.
        opener, joiner: one of :data:`OPENERS` and one of :data:`JOINERS`.
        way: index of the phrase for a relation, 0 or 1.
    """
    digits = sorted(scene.digits, key=lambda x: x.centre[_axis(order)])
    words = [order, opener, _named(digits[0])]
    for number, (a, b) in enumerate(itertools.pairwise(digits)):
        if number:
            words.append(joiner)
        words += [RELATIONS[relation(a, b)][way], _named(b)]
    return " ".join(" ".join(words).split())


def _axis(order: str) -> int:
    """Return the axis along which a caption of an order continues."""
    return 1 if order == ORDERS[0] else 0


def _named(digit: Placed) -> str:
    word = NUMBERS[digit.value]
    if digit.small:
        return f"a small {word}"
    return f"{'an' if word == 'eight' else 'a'} {word}"


def captions(scene: Scene) -> list[str]:
    """Return the training captions of a scene: all orders and phrasings, 16 texts."""
    ways = itertools.product(ORDERS, OPENERS, (0, 1), JOINERS)
    return [caption(scene, *way) for way in ways]


class Named(NamedTuple):
    """A digit in a caption: its value, whether it is called small, and the index of its word."""

    value: int
    small: bool
    place: int


class Parsed(NamedTuple):
    """A parsed caption: its digits, the relation of each to the next, and where it begins."""

    digits: tuple[Named, ...]
    relations: tuple[str, ...]
    order: str | None = None


def parse(text: str) -> Parsed | None:
    """Parse a caption; return None if it does not follow this grammar."""
    words, at = text.split(), 0

    def take(*phrases: str) -> str | None:
        """Consume the longest of the phrases that comes next; return it, or None."""
        nonlocal at
        for phrase in sorted(phrases, key=len, reverse=True):
            expected = phrase.split()
            if words[at : at + len(expected)] == expected:
                at += len(expected)
                return phrase
        return None

    phrases = {phrase: name for name, ways in RELATIONS.items() for phrase in ways}
    digits, relations = list[Named](), list[str]()
    order = take(*ORDERS)
    take(*OPENERS)
    while True:
        article = take("a", "an")
        small = take("small") is not None
        number = take(*NUMBERS)
        if article is None or number is None:
            return None
        if (article == "an") != (not small and number == "eight"):
            return None
        digits.append(Named(NUMBERS.index(number), small, at - 1))
        if at == len(words):
            return Parsed(tuple(digits), tuple(relations), order)
        if relations and take(*JOINERS) is None:
            return None
        phrase = take(*phrases)
        if phrase is None:
            return None
        relations.append(phrases[phrase])


# ---- measures of a caption ----------------------------------------------------------------------


class Judged(NamedTuple):
    """The correct parts of a caption.

    Attributes:
        exact: whether the caption names every digit once, with its value and size, begins where it
            states, and all its relations are correct.
        digits: number of digits whose values are correct, of ``num_digits``.
        num_digits: the larger of the numbers of digits in scene and caption.
        relations: number of correct relations, of ``num_relations``.
        num_relations: number of relations in the caption.
        matches: for each digit of the caption the index of its digit in the scene; None for a
            superfluous one.
    """

    exact: bool
    digits: int
    num_digits: int
    relations: int
    num_relations: int
    matches: tuple[int | None, ...] = ()


def judge(scene: Scene, text: str) -> Judged:
    """Compare a caption with a scene.

    The digits of the caption are matched with those of the scene so that as much as possible is
    correct: values first, then sizes and relations. If the caption has too many digits, the last
    ones have no match. A caption that cannot be parsed has nothing correct.
    """
    count, said = len(scene.digits), parse(text)
    if said is None:
        return Judged(False, 0, count, 0, 0)
    first = min(len(said.digits), count + 1)
    rest = (None,) * (len(said.digits) - first)
    places: list[int | None] = [*range(count), *[None] * (first - count)]

    def right(matches: tuple[int | None, ...]) -> tuple[int, int, int, bool]:
        """Count correct values, sizes and relations; return whether the beginning is correct."""
        of = [None if i is None else scene.digits[i] for i in matches]
        values = sum(a is not None and a.value == b.value for a, b in zip(of, said.digits))
        sizes = sum(a is not None and a.small == b.small for a, b in zip(of, said.digits))
        pairs = zip(said.relations, of, of[1:])
        related = sum(
            a is not None and b is not None and holds(name, a, b) for name, a, b in pairs
        )  # fmt: skip
        begins = said.order is None
        if said.order is not None and of[0] is not None:
            axis = _axis(said.order)
            begins = of[0].centre[axis] <= min(x.centre[axis] for x in scene.digits) + SLACK
        return values, sizes, related, begins

    several = (x + rest for x in itertools.permutations(places, first))
    matches = max(several, key=lambda x: (right(x)[0], sum(right(x)[1:])))
    values, sizes, related, begins = right(matches)
    num_relations = len(said.relations)
    exact = len(said.digits) == count == values == sizes and related == num_relations and begins
    return Judged(exact, values, max(count, len(said.digits)), related, num_relations, matches)


# ---- measures of attention ----------------------------------------------------------------------


def points_at(row: Tensor, columns: int, stride: int, box: Sequence[int]) -> bool:
    """Return whether the centre of the receptive field of the largest weight is in a box.

    Args:
        row: ``[R · C]``, weights row after row of a grid.
        columns: C.
        stride: pixels from a cell to the next; the first is at pixel 0, as in a GridEncoder.
        box: top, left, bottom and right.
    """
    if row.dim() != 1 or len(row) % columns:
        raise_value_error("row", f"[R · {columns}]", describe(row))
    y, x = (stride * i for i in divmod(int(row.argmax()), columns))
    return box[0] <= y < box[2] and box[1] <= x < box[3]


def overlap(weights: Tensor, box: Sequence[int]) -> float:
    """Return the intersection over union of a box and the part of a map above half its maximum.

    Args:
        weights: ``[H, W]``, a map resized to the image.
        box: top, left, bottom and right.
    """
    top, left, bottom, right = box
    bright = weights > 0.5 * weights.max()
    inside = torch.zeros_like(bright)
    inside[top:bottom, left:right] = True
    return float((bright & inside).sum() / (bright | inside).sum())
