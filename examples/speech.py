"""Listen, attend and spell: strings of spoken digits, with several kinds of attention.

    python examples/speech.py FOLDER --out runs/speech

FOLDER holds the recordings of the Free Spoken Digit Dataset, ``{digit}_{speaker}_{index}.wav``, in
an archive or as files. For each digit and speaker, indices 0 to 4 are the test set, 5 to 9 the
development set, and the others the training set. A string is 1 to 5 recordings of one speaker with
random gaps, levels and faint noise, spelled in letters. The models:

    no attention       the decoder reads the pyramid's last states alone
    dot, additive, location-aware, forward
    forward, ÷ 16      two more layers, so that a letter has about one state; trained without CTC
    no CTC             location-aware, trained without CTC
    own letters        location-aware; a tenth of the letters read in training are predictions
    no pyramid         location-aware, over all frames

The tables have the word error rate on the test set by the number of words, also for strings longer
than in training, for searches with the decoder alone, with CTC, and with CTC alone; the
monotonicity of alignments and their distance from the diagonal; and the cost of a step. After
Ctrl-C the same command resumes the training, bit for bit. The tables, and pictures of the attention
weights, are written to --out.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _experiment import Trial, at_least, by_name, cost_table, learn_all, make_parser, spread
from torch import Tensor, nn

from attnfast._utils.checks import InputError, optional
from attnfast._utils.progress import Progress
from attnfast._utils.signals import stop_on_signal
from attnfast.analysis import diagnostics
from attnfast.analysis.plots import draw_listening
from attnfast.decoding import beam_search
from attnfast.models import (
    BOS,
    EOS,
    CTCPrefixScorer,
    FixedContext,
    ListenAttendSpell,
    PyramidEncoder,
    hybrid_loss,
    scheduled_sampling,
)
from attnfast.nn import (
    BahdanauAttention,
    ForwardAttention,
    LocationAwareAttention,
    LuongAttention,
)
from attnfast.speech import (
    FeatureNormalizer,
    LogMel,
    SpecAugment,
    WordErrors,
    read_recordings,
    word_errors,
)
from attnfast.translate.cli import run
from attnfast.translate.data import pad
from attnfast.translate.trainer import Options

WORDS = "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"
LETTERS = " abcdefghijklmnopqrstuvwxyz"
RATE, MELS, HOP = 8000, 40, 0.01
TRAIN_COUNTS, LONGER = range(1, 6), range(6, 9)
#: The first recording index beyond each part of the data.
PARTS = {"test": 5, "valid": 10, "train": 1 << 30}
GAP = 0.0, 0.3  # seconds before, between and after the words
LEVEL = -10.0, 5.0  # of a word, decibels
NOISE = -70.0, -50.0  # of a string, decibels of full scale


class Row(NamedTuple):
    """A model of the table, and the number of its seeds."""

    attention: str
    seeds: int = 1
    ctc_weight: float = 0.3
    layers: int = 2
    factor: int = 2
    own: float = 0.0  # share of its own predictions among the letters read in training

    def searches(self) -> list[str]:
        """Return the names of the searches that the model supports."""
        return [x for x in SEARCHES if self.ctc_weight or not SEARCHES[x].get("scorer_weight")]


ROWS = {
    "location-aware": Row("location-aware", 3),
    "no attention": Row("no attention", 3),
    "additive": Row("additive", 3),
    "dot": Row("dot", 3),
    "location-aware, no CTC": Row("location-aware", ctc_weight=0.0),
    "location-aware, own letters": Row("location-aware", own=0.1),
    "location-aware, no pyramid": Row("location-aware", factor=1),
    "forward": Row("forward"),
    "forward, ÷ 16, no CTC": Row("forward", ctc_weight=0.0, layers=4),
}
SEARCHES: dict[str, dict[str, float]] = {
    "decoder": {},
    "with CTC": {"scorer_weight": 0.3},
    "CTC alone": {"scorer_weight": 1.0},
}


# ---- data ---------------------------------------------------------------------------------------


class String(NamedTuple):
    """A string of digits: samples ``[n]``, and their text."""

    samples: Tensor
    text: str


class Digits:
    """Recordings by part, speaker and digit, from which strings are made.

    ``fingerprint`` is a checksum of names and samples.
    """

    def __init__(self, folder: Path):
        self.fingerprint, window = 0, LogMel(RATE, MELS, hop=HOP).samples
        self.parts: dict[str, dict[str, list[list[Tensor]]]] = {name: {} for name in PARTS}
        for name, samples in read_recordings(folder, RATE).items():
            match = re.fullmatch("([0-9])_([^_]+)_([0-9]{1,9})", name)
            if match is None:
                raise InputError(
                    f"{folder}: expected names such as 7_jackson_32.wav, got {name}.wav"
                )
            if len(samples) < window:
                raise InputError(
                    f"{folder}: expected {window} samples at least, a frame, got {len(samples)} in "
                    f"{name}.wav"
                )
            digit, speaker, index = match.groups()
            part = next(x for x, end in PARTS.items() if int(index) < end)
            self.parts[part].setdefault(speaker, [[] for _ in WORDS])[int(digit)].append(samples)
            for content in (name.encode(), samples.numpy().tobytes()):
                self.fingerprint = zlib.crc32(content, self.fingerprint)
        for part, speakers in self.parts.items():
            if not speakers or not all(all(x) for x in speakers.values()):
                raise InputError(
                    f"{folder}: expected ten digits of every speaker for {part}, got fewer"
                )

    def draw(self, part: str, count: int, seed: str) -> String:
        """Return a string of ``count`` words, a function of the arguments alone."""
        draw = random.Random(seed)
        speaker = self.parts[part][draw.choice(sorted(self.parts[part]))]
        pieces, words = [], []
        for _ in range(count):
            digit = draw.randrange(len(WORDS))
            gain = 10 ** (draw.uniform(*LEVEL) / 20)
            gap = torch.zeros(round(RATE * draw.uniform(*GAP)))
            pieces += [gap, gain * draw.choice(speaker[digit])]
            words.append(WORDS[digit])
        samples = torch.cat([*pieces, torch.zeros(round(RATE * draw.uniform(*GAP)))])
        level = 10 ** (draw.uniform(*NOISE) / 20)
        noise = torch.randn(
            len(samples), generator=torch.Generator().manual_seed(draw.getrandbits(63))
        )
        return String(samples + level * noise, " ".join(words))

    def strings(self, part: str, count: int, many: int) -> list[String]:
        """Return ``many`` strings of ``count`` words, on which models are compared."""
        return [self.draw(part, count, f"{part} {count} {i}") for i in range(many)]


def encode(text: str) -> list[int]:
    return [EOS + 1 + LETTERS.index(x) for x in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[i - EOS - 1] for i in ids)


class Batch(NamedTuple):
    """Features ``[B, T, M]``, their lengths, and inputs and targets of the letters."""

    frames: Tensor
    lengths: Tensor
    target_in: Tensor
    target_out: Tensor


class Ears(nn.Module):
    """Batches of log-mel features, normalised over all speakers and masked in training."""

    def __init__(self):
        super().__init__()
        self.mel = LogMel(RATE, MELS, hop=HOP)
        self.norm = FeatureNormalizer(MELS)
        self.augment = SpecAugment()

    def listen(self, strings: Sequence[String]) -> tuple[Tensor, Tensor]:
        """Return features without normalisation, and their lengths."""
        samples = nn.utils.rnn.pad_sequence([x.samples for x in strings], batch_first=True)
        return self.mel(samples, torch.tensor([len(x.samples) for x in strings]))

    def forward(self, strings: Sequence[String]) -> Batch:
        features, lengths = self.listen(strings)
        frames = self.augment(self.norm(features, lengths), lengths)
        ids = [encode(x.text) for x in strings]
        return Batch(frames, lengths, pad([[BOS, *x] for x in ids]), pad([[*x, EOS] for x in ids]))


# ---- a model ------------------------------------------------------------------------------------


def build(row: Row, dim: int) -> ListenAttendSpell:
    """Return a model with ``dim`` features per direction and twice as many per decoder state."""
    sizes = 2 * dim, 2 * dim
    attention: nn.Module = {
        "no attention": lambda: FixedContext(),
        "dot": lambda: LuongAttention(*sizes, "dot"),
        "additive": lambda: BahdanauAttention(*sizes, dim),
        "location-aware": lambda: LocationAwareAttention(*sizes, dim, num_filters=10, width=31),
        "forward": lambda: ForwardAttention(*sizes, dim),
    }[row.attention]()
    encoder = PyramidEncoder(MELS, dim, row.layers, dropout=0.2, factor=row.factor)
    return ListenAttendSpell(encoder, attention, EOS + 1 + len(LETTERS), 2 * dim, dim // 2, 0.2)


class Training(Trial):
    """The training of one model; the strings of a step depend on the seed and step alone."""

    def __init__(self, name: str, seed: int, digits: Digits, args: argparse.Namespace):
        self.digits, self.args = digits, args
        self.row = ROWS[name]
        torch.manual_seed(seed)
        self.model, self.ears = build(self.row, args.dim), Ears()
        size = {"dim": args.dim, "steps": args.steps, "batch_size": args.batch_size}
        size["recordings"] = digits.fingerprint
        super().__init__(
            args.out,
            [name],
            {"row": self.row._replace(seeds=1)._asdict(), **size},
            {
                "beam": args.beam,
                "strings": args.test,
                "searches": SEARCHES,
                "recordings": digits.fingerprint,
            },
            {"model": self.model, "ears": self.ears},
            args.steps,
            Options(batch_size=args.batch_size, learning_rate=2e-3, seed=seed),
        )
        if not self.path.exists():
            speakers = digits.parts["train"].values()
            alone = [String(x, "") for speaker in speakers for takes in speaker for x in takes]
            self.ears.norm.fit(self.ears.listen([x])[0][0] for x in alone)

    def batch(self, step: int) -> Batch:
        """Return the strings of a step, all of the same number of words."""
        count = random.Random(f"{self.options.seed} {step}").choice(TRAIN_COUNTS)
        many = -(-self.options.batch_size // count)
        seeds = (f"{self.options.seed} {step} {i}" for i in range(many))
        return self.ears([self.digits.draw("train", count, x) for x in seeds])

    def loss(self, step: int) -> Tensor:
        return self.loss_of(self.batch(step))

    def loss_of(self, batch: Batch) -> Tensor:
        if self.row.own:
            with torch.no_grad():
                logits = self.model(*batch[:3]).logits
            batch = batch._replace(
                target_in=scheduled_sampling(batch.target_in, logits, self.row.own)
            )
        output = self.model(*batch[:3])
        return hybrid_loss(output, batch.target_out, self.row.ctc_weight, 0.1)

    # ---- evaluation -----------------------------------------------------------------------------

    def judge(self) -> dict[str, Any]:
        """Measure word errors by search and number of words, and the alignments."""
        found: dict[str, Any] = {}
        title = f"{self.title}, testing"
        with (
            stop_on_signal() as check,
            Progress(title, len(TRAIN_COUNTS) + len(LONGER), "length") as bar,
        ):
            for count in (*TRAIN_COUNTS, *LONGER):
                strings = self.digits.strings("test", count, self.args.test)
                batch = self.ears(strings)
                for name in self.row.searches():
                    check()
                    texts = self.search(batch, **SEARCHES[name])
                    pairs = [(x.text.split(), text.split()) for x, text in zip(strings, texts)]
                    total = sum((word_errors(*pair) for pair in pairs), WordErrors())
                    found[f"{name} {count}"] = list(total)
                if count == max(TRAIN_COUNTS):
                    found |= self.attended(batch)
                bar()
        return found

    def search(self, batch: Batch, **options: float) -> list[str]:
        """Return the texts that a search finds."""
        scorer = CTCPrefixScorer() if options.get("scorer_weight") else None
        rows = beam_search(
            self.model, batch.frames, batch.lengths, self.args.beam, length_penalty=0.0,
            scorer=scorer, **options,
        ).best  # fmt: skip
        return [decode(x) for x in rows]

    @torch.no_grad()
    def attended(self, batch: Batch) -> dict[str, float]:
        """Return the monotonicity and the diagonality of alignments under teacher forcing."""
        output = self.model(*batch[:3], need_weights=True)
        if output.weights is None:
            return {}
        call = output.weights, output.lengths, (batch.target_out != 0).sum(-1)
        distance = diagnostics.diagonality(*call).distance / output.lengths
        return {
            "monotonic": float(diagnostics.monotonicity(*call).mean()),
            "from the diagonal": float(distance.mean()),
        }

    @torch.no_grad()
    def pictures(self) -> dict[str, bytes]:
        """Draw the attention weights for the letters of a string."""
        strings = self.digits.strings("test", 4, 1)
        batch = self.ears(strings)
        weights = self.model(*batch[:3], need_weights=True).weights
        if weights is None:
            return {}
        letters = [*strings[0].text, "end"]
        return {"": draw_listening(self.ears.listen(strings)[0][0], weights[0], letters, HOP)}


# ---- the table ----------------------------------------------------------------------------------


def table(trained: Sequence[Training]) -> str:
    """Return the tables of all trained models."""
    each = by_name(trained)
    shown = [*map(str, TRAIN_COUNTS), *(f"{min(x)}–{max(x)}" for x in (TRAIN_COUNTS, LONGER))]
    spans = [[n] for n in TRAIN_COUNTS] + [list(TRAIN_COUNTS), list(LONGER)]
    lines = [f"| model | seeds | search | {' | '.join(shown)} |"]
    lines.append(f"|---|--:|---|{'--:|' * len(shown)}")
    for name, models in each.items():
        for search in ROWS[name].searches():
            cells = []
            for span in spans:
                rates = [
                    100
                    * sum((WordErrors(*x.found[f"{search} {n}"]) for n in span), WordErrors()).rate
                    for x in models
                ]
                cells.append(spread(rates, ".1f"))
            lines.append(f"| {name} | {len(models)} | {search} | {' | '.join(cells)} |")
    heads = ["model", "substituted, left out, put in, %", "monotonic, %", "from the diagonal, %"]
    lines += ["", f"| {' | '.join(heads)} |", f"|---|{'--:|' * 3}"]
    for name, models in each.items():
        total = sum(
            (WordErrors(*x.found[f"decoder {n}"]) for x in models for n in TRAIN_COUNTS),
            WordErrors(),
        )
        kinds = ", ".join(f"{100 * x / total.words:.1f}" for x in total[:3])
        attended = [
            spread([100 * x.found[key] for x in models], ".1f") if key in models[0].found else "–"
            for key in ("monotonic", "from the diagonal")
        ]
        lines.append(f"| {name} | {' | '.join([kinds, *attended])} |")
    return "\n".join(lines) + "\n"


def cost(trained: Sequence[Training]) -> str:
    """Return a table of the costs of a step on the same strings."""
    args, count = trained[0].args, max(TRAIN_COUNTS)
    strings = trained[0].digits.strings("valid", count, -(-args.batch_size // count))
    batch = trained[0].ears.eval()(strings)
    return cost_table(trained, lambda one: one.loss_of(batch))


def compare(args: argparse.Namespace) -> None:
    """Train all models, test them, and write the table and the pictures."""
    optional("matplotlib", "this example")
    digits = Digits(args.data)
    pairs = itertools.product(range(1, args.seeds + 1), args.rows)
    trainings = (
        Training(name, seed, digits, args) for seed, name in pairs if seed <= ROWS[name].seeds
    )
    learn_all(args.out, trainings, table, cost)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("speech", __doc__, compare, ROWS, seeds=3)
    count = at_least(1)
    parser.add_argument("data", type=Path, help="folder of the recordings")
    parser.add_argument("--steps", type=count, default=1200, help="steps of each training")
    parser.add_argument("--batch-size", type=count, default=96, help="words in a step")
    parser.add_argument("--dim", type=at_least(2), default=128, help="features of each direction")
    parser.add_argument("--test", type=count, default=100, help="strings of each length to test on")
    parser.add_argument("--beam", type=count, default=5, help="width of the search")
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
