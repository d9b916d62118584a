"""What attention knows of alignments: taught, taught for a while, or left to itself.

    python examples/alignments.py --out runs/alignments

The demo's grammar writes German for English and says which words translate each other: verbs go to
the end of a clause or to its front. Three decoders are trained three ways each, resumable. Then
attention's weights, read while each model is given the test's translations, are compared with the
true alignments:

    AER, F1      of each target word's largest weight
    entropy      of a row, in nats
    diagonal     share of the weight within two words of the diagonal
    stuck        share of the sentences with four rows or more at the same word
    BLEU         of greedy translations
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from attnfast._utils.checks import optional
from attnfast._utils.progress import log
from attnfast._utils.signals import Interrupted
from attnfast.analysis import diagnostics
from attnfast.models import Config, build
from attnfast.translate import checkpoint
from attnfast.translate.cli import Parser, run
from attnfast.translate.data import Links, WordTokenizer, collate, encode_pairs
from attnfast.translate.evaluate import SearchOptions, translate
from attnfast.translate.scores import bleu
from attnfast.translate.toy_grammar import Aligned, aligned_corpus
from attnfast.translate.trainer import Options, Trainer

DECODERS = {
    "Bahdanau": {"attention": "bahdanau"},
    "Luong, general": {
        "attention": "general",
        "recurrence": "independent",
        "readout": "attentional",
    },
    "Luong, general, input feeding": {
        "attention": "general",
        "recurrence": "input_feeding",
        "readout": "attentional",
    },
}
WAYS = {
    "left alone": {"alignment_loss": 0.0},
    "taught for half of the steps": {"alignment_until": 0.5},
    "taught": {},
}


@torch.no_grad()
def score(model, tokenizer, test: Sequence[Aligned]) -> dict[str, float]:
    """Compare attention with the true alignments, and translations with the true ones."""
    pairs = [x.pair for x in test]
    examples, _ = encode_pairs(tokenizer, pairs, 1000)
    found, entropy, near, stuck, rows = [], 0.0, 0.0, 0, 0
    model.eval()
    for first in range(0, len(examples), 64):
        batch = collate(group := examples[first : first + 64])
        memory, state = model.encode(batch.source, batch.lengths)
        weights = model.decode(batch.target_in, state, memory, need_weights=True)[2]
        targets = torch.tensor([len(x.target) for x in group])  # the end aside
        found += diagnostics.extract_alignment(weights, batch.lengths, targets, null=-1)
        call = weights, batch.lengths, targets
        entropy += float(diagnostics.row_statistics(*call).entropy.sum())
        near += float((diagnostics.diagonality(*call).share * targets).sum())
        stuck += int(diagnostics.failures(*call).sentences["stuck"].sum())
        rows += int(targets.sum())
    links = diagnostics.alignment_score(found, [x.links for x in test])
    sources, references = zip(*pairs)
    found = translate(model, tokenizer, sources, SearchOptions(beam=1))
    return {
        "AER": 100 * links.error_rate,
        "F1": 100 * links.f1,
        "entropy": entropy / rows,
        "diagonal": 100 * near / rows,
        "stuck": 100 * stuck / len(test),
        "BLEU": bleu([x.text for x in found], references)[0],
    }


def learn(args: argparse.Namespace, decoder: str, way: str) -> dict[str, float]:
    """Train a model, or go on with its training; score it."""
    drawn = aligned_corpus(args.seed, args.pairs + 2 * args.test)
    train, valid, test = (
        drawn[: args.pairs], drawn[args.pairs :][: args.test], drawn[-args.test :]
    )  # fmt: skip
    name = f"{decoder} {way} {args.seed}".lower().replace(",", "").replace(" ", "-")
    directory = args.out / name
    options = Options(args.epochs, 32, 3e-3, seed=args.seed, **WAYS[way])
    last = directory / "last.pt"
    checkpoint.make_folder(directory)
    torch.manual_seed(args.seed)
    tokenizer = WordTokenizer.train(text for x in train for text in x.pair)
    config = Config(
        tokenizer.vocab_size, embed_dim=args.dim, hidden_dim=args.dim, **DECODERS[decoder]
    )
    if resumed := last.exists():
        state = checkpoint.load(last)
        _, model, _ = checkpoint.restore(state, name=last)
    else:
        model = build(config)
    alignments = [Links(x.links, set()) for x in train]
    examples, _ = encode_pairs(tokenizer, [x.pair for x in train], 1000, alignments=alignments)
    held_out, _ = encode_pairs(tokenizer, [x.pair for x in valid], 1000)
    trainer = Trainer(
        config, model, tokenizer, options, examples, held_out, [x.pair for x in valid], directory
    )
    if resumed:
        trainer.resume(state, str(last))
    trainer.run()
    return score(model, tokenizer, test)


def compare(args: argparse.Namespace) -> None:
    """Train all models and print the table."""
    optional("sacrebleu", "this example")
    rows = []
    for decoder in DECODERS:
        for way in WAYS:
            log(f"{decoder}, {way}")
            try:
                rows.append((decoder, way, learn(args, decoder, way)))
            except Interrupted as stop:
                again = f"{stop}; the same command continues from there" if str(stop) else ""
                raise Interrupted(stop.number, again) from None
    print(
        f"| decoder | attention | {' | '.join(rows[0][2])} |\n|---|---|{'--:|' * len(rows[0][2])}"
    )
    for decoder, way, scores in rows:
        values = (f"{x:.2f}" if name == "entropy" else f"{x:.1f}" for name, x in scores.items())
        print(f"| {decoder} | {way} | {' | '.join(values)} |")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/alignments"), help="folder of checkpoints"
    )
    parser.add_argument("--pairs", type=int, default=3000, help="sentences to learn from")
    parser.add_argument("--test", type=int, default=300, help="sentences to compare on")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--dim", type=int, default=64, help="features of words and states")
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(function=compare)
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
