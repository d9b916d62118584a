"""A pointer-generator with coverage: restaurant descriptions from lists of attributes.

    python examples/e2e.py FOLDER --out runs/e2e

FOLDER holds devset.csv and testset_w_refs.csv of the E2E challenge (Novikova et al., 2017,
https://github.com/tuetschek/e2e-dataset, CC BY-SA 4.0). Half of the names in the test do not occur
in training. Four models are trained, with and without copying and coverage; their trainings can be
resumed. A table compares them:

    BLEU         of sacrebleu, with all descriptions of a list as references
    names right  share of the lists whose name is in the description as in the list; of all lists,
                 and of those with a new name
    repeated     share of words in a trigram that occurred earlier in the same description
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from attnfast._utils.checks import InputError, optional, reason
from attnfast._utils.progress import Progress, log
from attnfast._utils.signals import Interrupted
from attnfast.models import Config, build
from attnfast.translate import checkpoint
from attnfast.translate.cli import Parser, run
from attnfast.translate.data import WordTokenizer, encode_pairs
from attnfast.translate.evaluate import translate
from attnfast.translate.scores import repeated_share
from attnfast.translate.trainer import Options, Trainer

Pairs = list[tuple[str, str]]


def split(text: str) -> str:
    """Separate words and punctuation by blanks."""
    return " ".join(re.findall(r"\w+(?:['’-]\w+)*|[^\w\s]", text))


def read(path: Path) -> Pairs:
    """Read attribute lists and descriptions, split into words."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(split(row["mr"]), split(row["ref"])) for row in csv.DictReader(file)]
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason(error)}") from error
    except (KeyError, TypeError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path}: expected a file of the challenge, got another: {error}"
        ) from error
    if not rows:
        raise InputError(f"{path}: expected at least one description, got none")
    return rows


def name_of(attributes: str) -> str:
    """Return the name in an attribute list."""
    return attributes.partition("name [ ")[2].partition(" ]")[0]


def score(outputs: dict[str, str], test: Pairs, known: set[str]) -> dict[str, float]:
    """Score a generated description of every list against all its references."""
    sacrebleu = optional("sacrebleu", "this example")
    references: dict[str, list[str]] = {}
    for attributes, description in test:
        references.setdefault(attributes, []).append(description)
    lists = list(references)
    most = max(map(len, references.values()))
    streams = [[(references[x] + [None] * most)[i] for x in lists] for i in range(most)]
    bleu = sacrebleu.BLEU(tokenize="none", lowercase=True, force=True)
    said = [outputs[x] for x in lists]

    def right(chosen: list[str]) -> float:
        found = sum(f" {name_of(x)} ".lower() in f" {outputs[x]} ".lower() for x in chosen)
        return 100 * found / max(len(chosen), 1)

    return {
        "BLEU": bleu.corpus_score(said, streams).score,
        "names right": right(lists),
        "new names right": right([x for x in lists if name_of(x) not in known]),
        "repeated": 100 * repeated_share(said),
    }


def learn(args: argparse.Namespace, attention: str, copying: bool) -> dict[str, float]:
    """Train a model or continue its training; return the scores of its test descriptions."""
    train, test = (read(args.data / file) for file in ("devset.csv", "testset_w_refs.csv"))
    lists = list(dict.fromkeys(x for x, _ in train))
    held = set(lists[::13])
    valid = list({x: (x, y) for x, y in train if x in held}.values())
    train = [pair for pair in train if pair[0] not in held]
    directory = args.out / f"{attention}{'-copying' if copying else ''}-{args.seed}"
    options = Options(
        epochs=args.epochs, batch_size=32, label_smoothing=0.0, seed=args.seed, coverage_loss=1.0
    )
    last = directory / "last.pt"
    checkpoint.make_folder(directory)
    torch.manual_seed(args.seed)
    tokenizer = WordTokenizer.train((x for pair in train for x in pair), args.vocab_size)
    config = Config(
        tokenizer.vocab_size, attention, embed_dim=128, hidden_dim=128, pointer_generator=copying,
        recurrence="input_feeding", readout="attentional",
    )  # fmt: skip
    if resumed := last.exists():
        state = checkpoint.load(last)
        _, model, _ = checkpoint.restore(state, name=last)
    else:
        model = build(config)
    examples, _ = encode_pairs(tokenizer, train, 100, copying)
    held_out, _ = encode_pairs(tokenizer, valid, 100, copying)
    trainer = Trainer(config, model, tokenizer, options, examples, held_out, valid, directory)
    if resumed:
        trainer.resume(state, str(last))
    trainer.run()
    best = directory / "best.pt"
    _, model, tokenizer = checkpoint.restore(checkpoint.load(best), name=best)
    lists = list(dict.fromkeys(x for x, _ in test))
    with Progress("describing", len(lists), "list") as progress:
        found = translate(model, tokenizer, lists, progress=progress)
    outputs = {x: translation.text for x, translation in zip(lists, found)}
    lines = "".join(f"{x}\t{y}\n" for x, y in outputs.items())
    checkpoint.write_atomically(directory / "test.txt", lines.encode())
    return score(outputs, test, {name_of(x) for x, _ in train + valid})


def compare(args: argparse.Namespace) -> None:
    """Train the four models and print the table."""
    rows = []
    for attention in ("concat", "coverage"):
        for copying in (False, True):
            title = f"{'coverage' if attention == 'coverage' else 'no coverage'}, "
            title += "copying" if copying else "no copying"
            log(title)
            try:
                rows.append((title, learn(args, attention, copying)))
            except Interrupted as stop:
                again = f"{stop}; the same command continues from there" if str(stop) else ""
                raise Interrupted(stop.number, again) from None
    print(f"| model | {' | '.join(rows[0][1])} |\n|---|{'--:|' * len(rows[0][1])}")
    for title, scores in rows:
        print(f"| {title} | {' | '.join(f'{x:.1f}' for x in scores.values())} |")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of devset.csv and testset_w_refs.csv")
    parser.add_argument("--out", type=Path, default=Path("runs/e2e"), help="folder of checkpoints")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--vocab-size", type=int, default=500, help="size of the vocabulary")
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(function=compare)
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
