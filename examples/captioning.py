"""Show, attend and tell: captions of scenes of handwritten digits, with several kinds of attention.

    python examples/captioning.py --out runs/captioning

``scenes.py`` makes scenes of scikit-learn's handwritten digits; every fifth digit is held out for
the test. Training scenes have 2 to 4 digits, after easier ones of 1 and 2. The models:

    soft                     additive attention
    no attention             the decoder reads the mean of the features
    soft, doubly stochastic  trained with a loss that spreads attention over the whole scene
    hard                     attention to one sampled cell, trained by REINFORCE
    soft, shuffled           the first, with its weights permuted among the cells in the test

The tables have the share of exact captions, BLEU, the shares of correct digits and relations, and,
for the words that name digits, how often the largest weight is inside the digit's box and the
overlap of map and box, also for scenes of more digits than in training; and the cost of a step.
After Ctrl-C the same command resumes the training, bit for bit. The tables, and pictures of the
attention maps, are written to --out.

By default the first two models are trained, with one seed; --rows and --seeds select more.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from _experiment import Trial, at_least, by_name, cost_table, learn_all, make_parser, spread
from scenes import (
    NUMBERS,
    WORDS,
    Scene,
    captions,
    draw_scene,
    judge,
    overlap,
    parse,
    points_at,
)
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import InputError, optional
from attnfast._utils.progress import Progress
from attnfast._utils.signals import stop_on_signal
from attnfast.analysis.plots import draw_looking
from attnfast.decoding import greedy_search
from attnfast.losses import Reinforce, doubly_stochastic_loss
from attnfast.models import (
    BOS,
    EOS,
    GridEncoder,
    MeanContext,
    ShowAttendTell,
    sequence_loss,
)
from attnfast.nn import BahdanauAttention, HardAttention, Memory
from attnfast.translate.cli import run
from attnfast.translate.data import pad
from attnfast.translate.trainer import Options

TRAIN_COUNTS, MORE = (2, 3, 4), (5,)
#: The numbers of digits of training scenes, by the share of the steps up to which they apply.
COURSE = {0.1: (1,), 0.4: (1, 2), 1.0: TRAIN_COUNTS}
FEATURES, STRIDES = (16, 32, 64, 128), (1, 2, 2, 1)


class Row(NamedTuple):
    """A model of the table."""

    attention: str
    stochastic: float = 0.0  # weight of the doubly stochastic loss, a mean over cells
    shuffled: bool = False  # whether it is also tested with shuffled weights


ROWS = {
    "soft": Row("soft", shuffled=True),
    "no attention": Row("no attention"),
    "soft, doubly stochastic": Row("soft", stochastic=1.0),
    "hard": Row("hard"),
}


# ---- data ---------------------------------------------------------------------------------------


class Example(NamedTuple):
    """A scene, and the ids of the words of all its captions."""

    scene: Scene
    captions: list[list[int]]


class Batch(NamedTuple):
    """Images ``[B, 1, H, W]``, sizes ``[B, 2]``, inputs and targets of captions ``[B · N, T]``."""

    images: Tensor
    sizes: Tensor
    target_in: Tensor
    target_out: Tensor


class Digits:
    """Handwritten digits of training and test, and scenes of them, which are made on request."""

    def __init__(self):
        found = optional("sklearn.datasets", "this example", "test").load_digits()
        pictures = torch.tensor(found.images / 16, dtype=torch.float32)
        self.glyphs: dict[str, list[list[Tensor]]] = {
            part: [[] for _ in NUMBERS] for part in ("train", "test")
        }
        for i, (picture, value) in enumerate(zip(pictures, found.target.tolist())):
            self.glyphs["train" if i % 5 else "test"][value].append(picture)
        self.made: dict[tuple[str, int, int], list[Example]] = {}

    def examples(self, part: str, count: int, many: int) -> list[Example]:
        """Return ``many`` scenes of ``count`` digits, a function of the arguments alone."""
        key = part, count, many
        if key not in self.made:
            made, title = list[Example](), f"drawing scenes of {count}"
            with stop_on_signal() as check, Progress(title, many, "scene") as progress:
                for i in range(many):
                    check()
                    scene = draw_scene(self.glyphs[part], count, f"{part} {count} {i}")
                    made.append(Example(scene, [encode(text) for text in captions(scene)]))
                    progress()
            self.made[key] = made
        return self.made[key]


def gather(examples: Sequence[Example], chosen: Sequence[Sequence[list[int]]]) -> Batch:
    """Return a batch of scenes with the captions chosen for each."""
    sizes = torch.tensor([x.scene.image.shape[1:] for x in examples])
    images = torch.zeros(len(examples), 1, *sizes.amax(0).tolist())
    for image, example, (height, width) in zip(images, examples, sizes.tolist()):
        image[:, :height, :width] = example.scene.image
    ids = [x for each in chosen for x in each]
    return Batch(images, sizes, pad([[BOS, *x] for x in ids]), pad([[*x, EOS] for x in ids]))


def encode(text: str) -> list[int]:
    return [EOS + 1 + WORDS.index(x) for x in text.split()]


def decode(ids: Sequence[int]) -> str:
    return " ".join(WORDS[i - EOS - 1] for i in ids)


# ---- a model ------------------------------------------------------------------------------------


class Shuffled(nn.Module):
    """Attention whose weights are randomly permuted among the cells of an image, row by row."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention: Any = attention

    def prepare(self, states: Tensor, lengths: Any = None, mask: Any = None) -> Memory:
        return self.attention.prepare(states, lengths, mask)

    def forward(self, state: Tensor, memory: Memory, need_weights: Any = False) -> Any:
        """Return contexts and permuted weights for states ``[B, D]``."""
        weights = self.attention(state, memory, need_weights=True)[1]  # [B, Tk]
        hidden = ~memory.mask.flatten(1)
        order = torch.rand(weights.shape).masked_fill(hidden, 2).argsort(-1)  # of those that exist
        places = hidden.int().argsort(dim=-1, stable=True)
        weights = torch.zeros_like(weights).scatter(-1, places, weights.gather(-1, order))
        context = (weights.unsqueeze(1) @ memory.value).squeeze(1)
        return context, weights if need_weights else None


def build(row: Row, dim: int) -> ShowAttendTell:
    """Return a model whose decoder states have ``dim`` features."""
    encoder = GridEncoder(1, FEATURES, STRIDES, place_scale=5.0)
    attention: nn.Module = MeanContext()
    if row.attention != "no attention":
        attention = BahdanauAttention(dim, encoder.output_dim, dim // 2)
    if row.attention == "hard":
        attention = HardAttention(attention)
    return ShowAttendTell(encoder, attention, EOS + 1 + len(WORDS), dim, dim // 2)


class Tally(NamedTuple):
    """Sums over captions: see :class:`scenes.Judged`.

    Of the ``named`` digits, those whose values are correct, the largest weight was inside the box
    of ``pointed``; ``covered`` is the sum of the intersections over unions.
    """

    scenes: int = 0
    exact: int = 0
    digits: int = 0
    num_digits: int = 0
    relations: int = 0
    num_relations: int = 0
    named: int = 0
    pointed: int = 0
    covered: float = 0.0

    def plus(self, other: Sequence[float]) -> Tally:
        return Tally(*(a + b for a, b in zip(self, other)))

    def shares(self) -> dict[str, float]:
        """Return percentages."""
        pairs = {
            "exact": (self.exact, self.scenes),
            "digits": (self.digits, self.num_digits),
            "relations": (self.relations, self.num_relations),
            "pointing": (self.pointed, self.named),
            "IoU": (self.covered, self.named),
        }
        return {name: 100 * a / max(b, 1) for name, (a, b) in pairs.items()}


class Training(Trial):
    """The training of one model; the scenes of a step depend on the seed and step alone."""

    def __init__(self, name: str, seed: int, digits: Digits, args: argparse.Namespace):
        self.digits, self.args = digits, args
        self.row = ROWS[name]
        sizes = {x: getattr(args, x) for x in ("dim", "steps", "batch_size", "captions", "scenes")}
        ways = ["own", *["shuffled"] * self.row.shuffled]
        torch.manual_seed(seed)
        self.model, self.reinforce = build(self.row, args.dim), Reinforce(entropy_weight=0.01)
        super().__init__(
            args.out,
            [name],
            {"row": self.row._asdict(), **sizes},
            {"test": args.test, "counts": [*TRAIN_COUNTS, *MORE], "ways": ways},
            {"model": self.model, "reinforce": self.reinforce},
            args.steps,
            Options(batch_size=args.batch_size, learning_rate=2e-3, seed=seed),
        )

    def batch(self, step: int) -> Batch:
        """Return the scenes of a step, with a number of captions of each."""
        draw = random.Random(f"{self.options.seed} {step}")
        counts = next(x for end, x in COURSE.items() if step < end * self.steps)
        pools = [self.digits.examples("train", x, self.args.scenes) for x in counts]
        drawn = [draw.choice(draw.choice(pools)) for _ in range(self.options.batch_size)]
        return gather(drawn, [draw.sample(x.captions, self.args.captions) for x in drawn])

    def loss(self, step: int) -> Tensor:
        return self.loss_of(self.batch(step))

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the loss of a batch in nats per word."""
        stochastic, after = self.row.stochastic, batch.target_out
        output = self.model(*batch[:3], need_weights=stochastic > 0)
        if self.row.attention == "hard":
            logits, drawn = output.logits.mT, output.history
            lost = F.cross_entropy(logits, after, ignore_index=0, reduction="none").sum(-1)
            each = self.reinforce(-lost, drawn.log_prob, drawn.entropy)
            return each * len(after) / (after != 0).sum()
        loss = sequence_loss(output.logits, after)
        if stochastic:
            cells = output.mask.flatten(1)
            uneven = doubly_stochastic_loss(output.weights, cells) / cells.sum(-1)
            loss = loss + stochastic * uneven.mean()
        return loss

    # ---- evaluation -----------------------------------------------------------------------------

    def judge(self) -> dict[str, Any]:
        """Measure captions of test scenes, by the number of digits."""
        found: dict[str, Any] = {}
        ways = self.test_settings["ways"]
        title, many = f"{self.title}, testing", len(ways) * len((*TRAIN_COUNTS, *MORE))
        with stop_on_signal() as check, Progress(title, many, "number") as bar:
            for way in ways:
                said, references = list[str](), list[list[str]]()
                for count in (*TRAIN_COUNTS, *MORE):
                    check()
                    drawn = self.digits.examples("test", count, self.args.test)
                    texts, weights = self.tell(drawn, way == "shuffled")
                    found[f"{way} {count}"] = list(self.judged(drawn, texts, weights))
                    if count in TRAIN_COUNTS:
                        said += texts
                        references += [[*map(decode, x.captions)] for x in drawn]
                    bar()
                bleu = optional("sacrebleu", "this example").BLEU()
                found[f"{way} BLEU"] = bleu.corpus_score(said, [*zip(*references)]).score
        return found

    @torch.no_grad()
    def tell(
        self, drawn: Sequence[Example], shuffled: bool = False
    ) -> tuple[list[str], Tensor | None]:
        """Return captions, and the weights ``[B, T, R, C]`` of their words, or None."""
        images, sizes, *_ = gather(drawn, [x.captions[:1] for x in drawn])
        decoder, own = self.model.decoder, self.model.decoder.attention
        try:
            if shuffled:
                decoder.attention = Shuffled(own)
                torch.manual_seed(0)
            ids = greedy_search(self.model, images, sizes).best
            needs = self.row.attention != "no attention"
            output = self.model(images, sizes, pad([[BOS, *x] for x in ids]), need_weights=needs)
        finally:
            decoder.attention = own
        weights = output.weights
        if weights is not None:
            weights = weights.unflatten(-1, output.mask.shape[1:])
        return [decode(x) for x in ids], weights

    def judged(self, drawn: Sequence[Example], texts: list[str], weights: Tensor | None) -> Tally:
        """Count the correct parts of captions, and the digits that the weights point at."""
        total, stride = Tally(), self.model.encoder.stride
        for i, ((scene, _), text) in enumerate(zip(drawn, texts)):
            right, said = judge(scene, text), parse(text)
            total = total.plus((1, *right[:5], 0, 0, 0))
            for word, place in zip(said.digits if said else (), right.matches):
                if weights is None or place is None or word.value != scene.digits[place].value:
                    continue
                box, row = scene.digits[place].box, weights[i, word.place]
                points = points_at(row.flatten(), row.shape[-1], stride, box)
                over = overlap(self.maps(row.unsqueeze(0), scene)[0], box)
                total = total.plus((0,) * 6 + (1, points, over))
        return total

    def maps(self, weights: Tensor, scene: Scene) -> Tensor:
        """Resize weights ``[T, R, C]`` to the size of a scene's image."""
        (height, width), stride = scene.image.shape[1:], self.model.encoder.stride
        rows, columns = -(-height // stride), -(-width // stride)
        of_cells = weights[None, :, :rows, :columns]
        size = stride * (rows - 1) + 1, stride * (columns - 1) + 1  # from the first to the last
        large = F.interpolate(of_cells, size, mode="bilinear", align_corners=True)
        edge = 0, width - size[1], 0, height - size[0]
        return F.pad(large, edge, mode="replicate")[0]

    def pictures(self) -> dict[str, bytes]:
        """Draw the maps of the first exact caption and of the first that is not exact."""
        drawn = self.digits.examples("test", max(TRAIN_COUNTS), self.args.test)
        texts, weights = self.tell(drawn)
        shown = dict[str, bytes]()
        if weights is None:
            return shown
        for (scene, _), text, row in zip(drawn, texts, weights):
            name = "-right" if judge(scene, text).exact else "-wrong"
            if name not in shown:
                words = [*text.split(), "end"]
                shown[name] = draw_looking(
                    scene.image[0], self.maps(row[: len(words)], scene), words
                )
        return shown


# ---- the table ----------------------------------------------------------------------------------


def tallies(trained: Sequence[Training]) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Return for each row of the table the test and its results for each seed."""
    each = by_name(trained)
    rows = {name: ("own", [x.found for x in models]) for name, models in each.items()}
    for name, models in each.items():
        if ROWS[name].shuffled:
            rows[f"{name}, shuffled"] = "shuffled", [x.found for x in models]
    return rows


def table(trained: Sequence[Training]) -> str:
    """Return the tables of all trained models."""
    names = ["exact", "digits", "relations", "pointing", "IoU"]
    first = f"{min(TRAIN_COUNTS)} to {max(TRAIN_COUNTS)} digits"
    lines = [f"| {first} | seeds | {', % | '.join(names)}, % | BLEU |", f"|---|{'--:|' * 7}"]
    heads = [f"{n}: exact, digits, pointing, %" for n in (*TRAIN_COUNTS, *MORE)]
    more = [f"| by digits | {' | '.join(heads)} |"]
    more.append(f"|---|{'--:|' * len((*TRAIN_COUNTS, *MORE))}")
    for name, (way, found) in tallies(trained).items():
        sums = [Tally() for _ in found]
        for count in TRAIN_COUNTS:
            sums = [x.plus(y[f"{way} {count}"]) for x, y in zip(sums, found)]
        cells = [shown(sums, x) for x in names] + [spread([x[f"{way} BLEU"] for x in found], ".1f")]
        lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} |")
        cells = []
        for count in (*TRAIN_COUNTS, *MORE):
            each = [Tally(*x[f"{way} {count}"]) for x in found]
            cells.append(", ".join(shown(each, x, False) for x in ("exact", "digits", "pointing")))
        more.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *more]) + "\n"


def shown(sums: Sequence[Tally], name: str, span: bool = True) -> str:
    """Return the mean of a percentage, and its range; a dash for a model without attention."""
    if name in ("pointing", "IoU") and not any(x.named for x in sums):
        return "–"
    values = [x.shares()[name] for x in sums]
    return spread(values, ".1f") if span else f"{sum(values) / len(values):.1f}"


def compare(args: argparse.Namespace) -> None:
    """Train all models, test them, and write the table and the pictures."""
    if args.captions > 16:
        raise InputError(f"--captions must be at most 16, got {args.captions}")
    for package in ("matplotlib", "sacrebleu"):
        optional(package, "this example")
    digits = Digits()
    pairs = itertools.product(range(1, args.seeds + 1), args.rows)
    learn_all(args.out, (Training(name, seed, digits, args) for seed, name in pairs), table, cost)


def cost(trained: Sequence[Training]) -> str:
    """Return a table of the costs of a step on the same scenes."""
    batch = trained[0].batch(trained[0].steps - 1)
    return cost_table(trained, lambda one: one.loss_of(batch))


def main(argv: Sequence[str] | None = None) -> int:
    chosen = ["soft", "no attention"]
    parser = make_parser("captioning", __doc__, compare, ROWS, seeds=1, chosen=chosen)
    count = at_least(1)
    parser.add_argument("--steps", type=count, default=2400, help="steps of each training")
    parser.add_argument("--batch-size", type=count, default=64, help="scenes in a step")
    parser.add_argument(
        "--captions", type=count, default=2, help="captions of each scene in a step"
    )
    parser.add_argument(
        "--scenes", type=count, default=4000, help="training scenes of each number of digits"
    )
    parser.add_argument(
        "--dim", type=at_least(2), default=128, help="features of the decoder's states"
    )
    parser.add_argument(
        "--test", type=count, default=200, help="test scenes of each number of digits"
    )
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
