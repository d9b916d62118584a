"""Why attention shortens the path: whether a word's loss reaches the word that it translates.

    python examples/paths.py none/best.pt general/best.pt --source test.en --target test.de \\
        --alignments test.links

Checkpoints are those of `attnfast train --tokenizer word`, alignments the true ones. Without
attention a source word reaches a target word by the encoder's steps from it to the nearer end of
the source, and the decoder's steps from there: so many is their distance. With attention there is a
way of one step beside it. The gradient of each target word's own loss has a norm at every source
word's embedding; the table has the share of the word that it translates, by distance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import nn

from attnfast.translate import checkpoint
from attnfast.translate.cli import Parser, run
from attnfast.translate.data import Links, collate, encode_pairs, read_alignments, read_pairs

WIDTH, MOST = 5, 8  # distances of a column, columns


def shares(model, tokenizer, pairs, links: Sequence[Links]) -> list[float]:
    """Return the mean share at distances 0 to 4, 5 to 9, and so on."""
    examples, _ = encode_pairs(tokenizer, pairs, 1000, alignments=links)
    sums, counts = torch.zeros(MOST), torch.zeros(MOST)
    embedded = []

    def keep(module, inputs):
        inputs[0].retain_grad()
        embedded.append(inputs[0])

    handle = model.eval().encoder.register_forward_pre_hook(keep)
    try:
        for first in range(0, len(examples), 32):
            batch = collate(examples[first : first + 32])
            logits, _ = model(batch.source, batch.lengths, batch.target_in)
            x, n = embedded.pop(), batch.lengths.unsqueeze(1)
            j = torch.arange(x.shape[1])
            to_end = torch.minimum(j, n - 1 - j)
            for i, word in enumerate(batch.target_out.unbind(1)):
                loss = nn.functional.cross_entropy(logits[:, i], word, reduction="sum")
                (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
                norm = grad.norm(dim=-1)
                share = norm / norm.sum(1, keepdim=True)
                linked = batch.alignment[:, i] > 0
                column = ((to_end + i) // WIDTH)[linked]
                some = column < MOST
                sums.index_add_(0, column[some], share[linked][some])
                counts.index_add_(0, column[some], torch.ones(int(some.sum())))
    finally:
        handle.remove()
    return (100 * sums / counts).tolist()


def compare(args: argparse.Namespace) -> None:
    """Print a row for each checkpoint."""
    pairs = read_pairs(args.source, args.target)
    links = read_alignments(args.alignments, pairs)
    heads = [f"{WIDTH * i}–{WIDTH * (i + 1) - 1}" for i in range(MOST)]
    print(f"| distance | {' | '.join(heads)} |")
    print(f"|---|{'--:|' * MOST}")
    for name in args.checkpoints:
        _, model, tokenizer = checkpoint.restore(checkpoint.load(name), name=name)
        row = shares(model, tokenizer, pairs, links)
        print(f"| {name} | {' | '.join(f'{x:.0f} %' for x in row)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoints", nargs="+", help="of models to compare")
    parser.add_argument("--source", required=True, metavar="FILE", help="one sentence per line")
    parser.add_argument("--target", required=True, metavar="FILE", help="its translation")
    parser.add_argument("--alignments", required=True, metavar="FILE", help="such as 0-0 1-2")
    parser.set_defaults(function=compare)
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
