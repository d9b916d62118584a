"""Compare translators that differ in one part: scores, alignments and costs, with a picture.

    python examples/ablations.py mechanisms --out runs/mechanisms --seeds 3

Every row of a table is a training by `attnfast train` whose options are printed. It learns the
made-up language of `attnfast corpus`, or the files of a folder: `--data FOLDER` has `train`,
`valid` and `test`, each with `.en` and `.de`, and `.links` if alignments are known. The table
`multi30k` needs the folder of Multi30k, whose names are as published. Trainings continue where they
were stopped. The measurements, on the test set:

    BLEU         of greedy translations; of a beam of 5 on Multi30k
    AER          alignment error rate of each target word's largest weight
    entropy      of a row of weights, in nats
    repeated     share of words in a trigram that occurred earlier in the same translation
    ms, MiB      of a training step of 32 pairs, forward and backward: median time in turns, and
                 peak memory; with --costs
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _experiment
import torch

from attnfast._utils.benchmark import costs
from attnfast._utils.checks import InputError, optional
from attnfast._utils.progress import log
from attnfast._utils.signals import Interrupted
from attnfast.analysis import diagnostics
from attnfast.models.config import NO_ATTENTION
from attnfast.ops.arguments import mean_of_heads
from attnfast.translate import checkpoint, cli
from attnfast.translate.data import Links, collate, encode_pairs, read_alignments, read_pairs
from attnfast.translate.evaluate import SearchOptions, translate
from attnfast.translate.scores import (
    bleu,
    plot_bleu_by_length,
    repeated_share,
    scores_by_length,
)
from attnfast.translate.trainer import Options, StepOptions, batch_loss

Row = dict[str, Any]
LUONG = {
    "attention": "scaled_general",
    "recurrence": "input_feeding",
    "readout": "attentional",
}
SCORES = ("dot", "scaled_dot", "general", "scaled_general", "concat", "bahdanau")


def write_copies(directory: Path, args: argparse.Namespace) -> None:
    """Write sequences of random words, each of which is its own translation."""
    draw = random.Random(1)
    words = [chr(97 + i // 5) + chr(97 + i % 5) for i in range(40)]
    for part, count in (("train", args.pairs), ("valid", args.held_out), ("test", args.held_out)):
        lines = [" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(count)]
        for ending in ("en", "de"):
            text = "".join(f"{line}\n" for line in lines)
            checkpoint.write_atomically(directory / f"{part}.{ending}", text.encode())


def write_language(directory: Path, args: argparse.Namespace) -> None:
    """Write the made-up language."""
    sizes = ["--pairs", str(args.pairs), "--held-out", str(args.held_out)]
    call(["corpus", str(directory), *sizes])


class Table(NamedTuple):
    """A table of trainings.

    The option ``pairs`` of a row is the number of training pairs; ``supervised`` supervises
    attention with their alignments. Other options are those of ``attnfast train``.

    Attributes:
        rows: the options in which each row differs, by name.
        seeds: number of trainings of a row.
        write: writes the data; None for data that must be given.
        parts: names of the files of training, validation and test.
        languages: endings of the files of sources and targets.
        options: options of all rows, instead of the example's own sizes.
        beam: beam of the search on the test set.
        length_bins: the largest number of source words of each bin but the last.
    """

    rows: dict[str, Row]
    seeds: int = 3
    write: Callable[[Path, argparse.Namespace], None] | None = write_language
    parts: tuple[str, str, str] = ("train", "valid", "test")
    languages: tuple[str, str] = ("en", "de")
    options: Row | None = None
    beam: int = 1
    length_bins: tuple[int, ...] = (5, 10, 15, 20)

    def files(self, data: Path, part: int) -> tuple[str, str]:
        """Return the files of sources and of targets of a part of the data."""
        source, target = (str(data / f"{self.parts[part]}.{x}") for x in self.languages)
        return source, target


TABLES = {
    "mechanisms": Table(
        {
            "no attention": {"attention": "none"},
            "initial state alone": {"attention": "initial"},
            "Bahdanau": {},
            "one direction": {"unidirectional": True},
            "coverage": {"attention": "coverage"},
            "copying": {"pointer_generator": True},
            "Luong, scaled general": LUONG | {"recurrence": "independent"},
            "Luong, input feeding": LUONG,
            "Luong, a window of 11": LUONG | {"attention": "local", "window": 5},
            "Luong, a predicted window of 11": LUONG | {"attention": "predictive", "window": 5},
            "dot, 512 features": LUONG | {"attention": "dot", "hidden_dim": 256},
            "scaled dot, 512 features": LUONG | {"attention": "scaled_dot", "hidden_dim": 256},
        }
    ),
    "scores": Table(
        {
            f"{score}, {features}": {
                "attention": score, "hidden_dim": features // 2, "readout": "attentional",
                "recurrence": "independent",
            }
            for score in SCORES
            for features in (32, 128, 512)
        },
    ),
    "fixed-vector": Table(
        {
            **{
                f"initial state of {2 * n} features": {"attention": "initial", "hidden_dim": n}
                for n in (16, 32, 64, 128, 256)
            },
            "attention, 64 features": {"hidden_dim": 32},
        },
        write=write_copies,
    ),
    "coverage": Table(
        {
            "none": {},
            "coverage": {"attention": "coverage"},
            "its loss from the first step": {"attention": "coverage", "coverage_from": 0.0},
            "coverage without its loss": {"attention": "coverage", "coverage_loss": 0.0},
            "coverage with a fertility of 2": {"attention": "coverage", "fertility": 2.0},
            "coverage with a penalty of 0.5": {"attention": "coverage", "attention_penalty": 0.5},
        }
    ),
    "prior": Table(
        {
            "none": LUONG,
            **{
                f"sigma {sigma:g}": LUONG | {"attention": "prior", "sigma": sigma}
                for sigma in (1.0, 3.0, 10.0)
            },
            "sigma 3, slope 0.5": LUONG | {"attention": "prior", "sigma": 3.0, "slope": 0.5},
        }
    ),
    "supervision": Table(
        {
            f"{name}, {way}": decoder | options
            for name, decoder in (("Bahdanau", {}), ("Luong, input feeding", LUONG))
            for way, options in (
                ("unsupervised", {}),
                ("supervised for half of the steps", {"supervised": 1, "alignment_until": 0.5}),
                ("supervised", {"supervised": 1}),
                ("supervised, squared", {"supervised": 1, "alignment_kind": "squared"}),
            )
        }
    ),
    "sample-efficiency": Table(
        {
            f"{pairs} pairs, {way}": {"pairs": pairs} | options
            for pairs in (300, 1000, 3000)
            for way, options in (
                ("unsupervised", {}),
                ("supervised", {"supervised": 1}),
                ("supervised, squared", {"supervised": 1, "alignment_kind": "squared"}),
            )
        }
    ),
    "learning-rate": Table(
        {
            f"{name}, {scale:g}": decoder | {"attention_lr_scale": scale}
            for name, decoder in (
                ("Bahdanau", {}),
                ("general", LUONG | {"attention": "general"}),
                ("scaled general", LUONG),
            )
            for scale in (0.01, 0.1, 1.0, 10.0)
        },
    ),
    "multi30k": Table(
        {
            "no attention": {"attention": "none"},
            "initial state alone": {"attention": "initial"},
            "Bahdanau": {},
            "one direction": {"unidirectional": True},
            "coverage": {"attention": "coverage"},
            "transformer encoder": {"encoder": "transformer", "dropout": 0.1},
            "Luong, input feeding": LUONG,
            "without input feeding": LUONG | {"recurrence": "independent"},
            "unscaled": LUONG | {"attention": "general"},
            "a window of 11": LUONG | {"attention": "local", "window": 5},
            "a predicted window of 11": LUONG | {"attention": "predictive", "window": 5},
            "every second key": LUONG | {"attention": "strided", "stride": 2},
            "monotonic": LUONG | {"attention": "monotonic"},
            "sparse self-attention": LUONG | {"self_attention": True, "window": 3, "stride": 4},
            "whole words": LUONG | {"tokenizer": "word"},
            "whole words, copying": LUONG | {"tokenizer": "word", "pointer_generator": True},
        },
        seeds=1,
        write=None,
        parts=("train", "val", "test_2016_flickr"),
        languages=("de.gz", "en.gz"),
        options={"precision": "bfloat16"},
        beam=5,
    ),
}  # fmt: skip


def call(arguments: Sequence[str]) -> None:
    """Run a command of attnfast; raise its errors."""
    parsed = cli._parser().parse_args(arguments)
    parsed.function(parsed)


def first_lines(source: Path, count: int, target: Path) -> str:
    """Write the first lines of a text to a file, and return its name."""
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    checkpoint.write_atomically(target, "".join(lines[:count]).encode())
    return str(target)


class Trained(NamedTuple):
    """A trained translator, its tokenizer and config, and its measurements by name."""

    model: Any
    tokenizer: Any
    config: Any
    found: dict[str, float]
    by_length: list[Any]


def learn(
    args: argparse.Namespace, table: Table, data: Path, name: str, row: Row, seed: int
) -> Path:
    """Train a row's model, or continue its training; return its folder."""
    directory = args.out / f"{name}-{seed}".replace(",", "").replace(" ", "-")
    checkpoint.make_folder(directory)
    row = dict(row)
    pairs, supervised = row.pop("pairs", None), row.pop("supervised", False)
    files = [*table.files(data, 0), str(data / f"{table.parts[0]}.links")]
    if pairs is not None:
        count = min(pairs, args.pairs)
        files = [first_lines(Path(file), count, directory / Path(file).name) for file in files]
    sizes = {
        "embed_dim": args.dim, "hidden_dim": args.dim, "epochs": args.epochs, "batch_size": 32,
        "learning_rate": 3e-3, "tokenizer": args.tokenizer,
    }  # fmt: skip
    options = (sizes if table.options is None else table.options) | row | {"seed": seed}
    shown = []
    for option, value in options.items():
        shown.append(f"--{option.replace('_', '-')}" + (f"={value}" if value is not True else ""))
    log(f"{name}: {' '.join(shown)}")
    valid_source, valid_target = table.files(data, 1)
    arguments = [
        "train", "--source", files[0], "--target", files[1],
        "--valid-source", valid_source, "--valid-target", valid_target,
        "--model-dir", str(directory), *shown,
        *(["--alignments", files[2]] if supervised else []),
        *(["--resume"] if (directory / "last.pt").exists() else []),
    ]  # fmt: skip
    call(arguments)
    return directory


@torch.no_grad()
def test(directory: Path, table: Table, data: Path) -> Trained:
    """Measure the best model of a folder on the test set."""
    best = directory / "best.pt"
    config, model, tokenizer = checkpoint.restore(checkpoint.load(best), name=best)
    model.eval()
    pairs = read_pairs(*table.files(data, 2))
    sources, references = zip(*pairs)
    search = SearchOptions(beam=table.beam)
    outputs = [x.text for x in translate(model, tokenizer, sources, search)]
    found = {"BLEU": bleu(outputs, references)[0], "repeated": 100 * repeated_share(outputs)}
    if config.attention not in NO_ATTENTION:
        links = data / f"{table.parts[2]}.links"
        found |= measure_attention(model, tokenizer, pairs, links)
    found["parameters"] = sum(p.numel() for p in model.parameters())
    by_length = scores_by_length(sources, outputs, references, table.length_bins)
    return Trained(model, tokenizer, config, found, by_length)


def measure_attention(
    model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], links: Path
) -> dict[str, float]:
    """Measure attention weights under teacher forcing."""
    known: Sequence[Links] | None = None
    if links.exists() and tokenizer.kind == "word":
        known = read_alignments(str(links), pairs)
    examples, _ = encode_pairs(tokenizer, pairs, 1000)
    aligned, entropy, rows = [], 0.0, 0
    for first in range(0, len(examples), 64):
        batch = collate(group := examples[first : first + 64])
        predicted = model(batch.source, batch.lengths, batch.target_in, need_weights=True)
        targets = torch.tensor([len(x.target) for x in group])  # without the end
        given = mean_of_heads(predicted.weights), batch.lengths, targets
        entropy += float(diagnostics.row_statistics(*given).entropy.sum())
        aligned += diagnostics.extract_alignment(*given, null=-1)
        rows += int(targets.sum())
    found = {"entropy": entropy / rows}
    if known is not None:
        score = diagnostics.alignment_score(aligned, [x.sure for x in known])
        found["AER"] = 100 * score.error_rate
    return found


FORMS = {"BLEU": ".1f", "AER": ".1f", "entropy": ".2f", "repeated": ".1f", "parameters": ",d"}


def write_table(done: Mapping[str, Sequence[Trained]], bins: Sequence[str]) -> str:
    """Return the measurements of all rows, and their BLEU by the words of the source."""
    lines = ["| | " + " | ".join(FORMS) + " |", "|---|" + "--:|" * len(FORMS)]
    for name, ones in done.items():
        values = [[x.found[k] for x in ones if k in x.found] for k in FORMS]
        cells = [_experiment.spread(x, form) if x else "–"
                 for x, form in zip(values[:-1], FORMS.values())]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} | {values[-1][0]:,d} |")
    lines += ["", f"| BLEU by source words | {' | '.join(bins)} |", "|---|" + "--:|" * len(bins)]
    for name, ones in done.items():
        cells = []
        for label in bins:
            values = [x.bleu for one in ones for x in one.by_length if x.name == label]
            cells.append(_experiment.spread(values, ".1f") if values else "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cost_table(done: Mapping[str, Sequence[Trained]], table: Table, data: Path) -> str:
    """Return a table of the time and memory of a training step of 32 pairs for each row."""
    pairs = read_pairs(*table.files(data, 2))
    pairs = sorted(pairs, key=lambda x: -len(x[0].split()))[:32]
    precision = (table.options or {}).get("precision", "float32")
    steps, options, now = {}, Options(precision=precision), StepOptions()
    for name, ones in done.items():
        model = ones[0].model.train()
        batch = collate(encode_pairs(ones[0].tokenizer, pairs, 1000)[0])
        steps[name] = lambda model=model, batch=batch: batch_loss(
            model, batch, options, now
        ).backward()
    lines = ["| | ms | MiB |", "|---|--:|--:|"]
    for name, cost in costs(steps, 5).items():
        lines.append(f"| {name} | {1000 * cost.seconds:.0f} | {cost.memory / 2**20:.0f} |")
    return "\n".join(lines) + "\n"


def compare(args: argparse.Namespace) -> None:
    """Train the models of a table one after the other; print and draw it."""
    optional("sacrebleu", "this example")
    table = TABLES[args.table]
    rows = {name: table.rows[name] for name in args.rows or table.rows if name in table.rows}
    if args.rows and len(rows) < len(args.rows):
        unknown = next(x for x in args.rows if x not in table.rows)
        raise InputError(f"--rows: expected some of {', '.join(table.rows)}, got {unknown}")
    checkpoint.make_folder(args.out)
    data = args.data
    if data is None and table.write is None:
        raise InputError(f"--data: {args.table} needs the folder of its files, got none")
    if data is None:
        data = args.out / "data"
        if not Path(table.files(data, 2)[1]).exists():
            checkpoint.make_folder(data)
            table.write(data, args)
    done: dict[str, list[Trained]] = {}
    try:
        for seed in range(1, (args.seeds or table.seeds) + 1):
            for name, row in rows.items():
                directory = learn(args, table, data, name, row, seed)
                done.setdefault(name, []).append(test(directory, table, data))
    except Interrupted as stop:
        raise Interrupted(stop.number, "stopped; the same command continues from there") from None
    bins = list(dict.fromkeys(x.name for ones in done.values() for x in ones[0].by_length))
    text = write_table(done, bins)
    if args.costs:
        text += "\n" + cost_table(done, table, data)
    print(text, end="")
    checkpoint.write_atomically(args.out / "table.md", text.encode())
    picture = plot_bleu_by_length({name: ones[0].by_length for name, ones in done.items()})
    checkpoint.write_atomically(args.out / "lengths.png", picture)


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", choices=TABLES, help="the table to print")
    parser.add_argument(
        "--rows", nargs="+", metavar="ROW", help="rows of the table to train; all unless given"
    )
    parser.add_argument(
        "--seeds",
        type=_experiment.at_least(1),
        help="number of seeds; by default that of the table",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/ablations"), help="folder of results"
    )
    parser.add_argument("--data", type=Path, help="folder of train, valid and test files")
    parser.add_argument("--tokenizer", choices=("word", "subword"), default="word")
    _experiment.add_sizes(parser)
    parser.add_argument("--costs", action="store_true", help="measure time and memory of a step")
    parser.set_defaults(function=compare)
    return cli.run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
