"""Attention shortens the path: the gradient of a word's loss at the word that it translates.

    attnfast corpus data
    for attention in initial none general bahdanau; do
      attnfast train --attention $attention --model-dir models/$attention ...
    done
    python examples/paths.py models/*/best.pt --source data/test.en --target data/test.de \\
        --alignments data/test.links

Without attention, the path from a source word to the decoder has as many encoder steps as there are
words from it to the nearer end of the source. If only the decoder's initial state depends on the
source, the path to the i-th target word also has i decoder steps. The loss of each target word has
a gradient with respect to every embedded source word. Two tables have its norm at the word that the
target word translates, divided by the mean over the words of the source, by encoder steps and by
the target word's index: 1 is the value of an average word. For the last table no gradient passes
through the decoder state before the target word; it has the norm at the aligned words, divided by
the norm with all gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnfast._utils.checks import optional
from attnfast.models import Seq2Seq
from attnfast.translate import checkpoint
from attnfast.translate.checkpoint import write_atomically
from attnfast.translate.cli import Parser, run
from attnfast.translate.data import (
    Batch,
    Links,
    collate,
    encode_pairs,
    read_alignments,
    read_pairs,
)

#: The quantities by which words are grouped, and the number of values in a column.
GROUPS = {"encoder steps": 3, "target index": 5}
COLUMNS = 5


class Norms(NamedTuple):
    """Gradient norms of one target word's loss, and its aligned source words.

    Attributes:
        norm: ``[B, Tk]``, at the embedded source words.
        direct: ``[B, Tk]``, without gradients through the earlier decoder states.
        linked: ``[B, Tk]``, the source words that the target word translates.
        index: index of the target word.
    """

    norm: Tensor
    direct: Tensor
    linked: Tensor
    index: int


def detach(state: Any) -> Any:
    """Return a state that passes no gradients to earlier steps."""
    if hasattr(state, "_fields"):
        return type(state)(*map(detach, state))
    return state.detach() if isinstance(state, Tensor) else state


def gradient_norms(model: Seq2Seq, batch: Batch) -> Iterator[Norms]:
    """Yield the gradient norms of every target word's loss."""
    with torch.no_grad():
        embedded = model.embed(batch.source)
    x = embedded.requires_grad_()
    memory, state = model.read(x, batch.lengths)
    source = model.encode(batch.source, batch.lengths)[0]._replace(memory=memory)
    logits, *_ = model.decode(batch.target_in, state, source)

    def norms(logits: Tensor, words: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, words, reduction="sum")
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
        return x.new_zeros(x.shape[:2]) if grad is None else grad.norm(dim=-1)

    for i, words in enumerate(batch.target_out.unbind(1)):
        step, state, _ = model.decode(batch.target_in[:, i : i + 1], detach(state), source)
        linked = batch.alignment[:, i] > 0
        yield Norms(norms(logits[:, i], words), norms(step[:, 0], words), linked, i)


def measure(
    model: Seq2Seq, examples: Sequence, batch_size: int = 32
) -> tuple[dict[str, list[float]], float]:
    """Return the mean ratios of the columns of each group, and the direct share."""
    sums = {name: torch.zeros(2, COLUMNS) for name in GROUPS}
    direct = whole = 0.0
    for first in range(0, len(examples), batch_size):
        batch = collate(examples[first : first + batch_size])
        n = batch.lengths.unsqueeze(1)
        j = torch.arange(batch.source.shape[1])
        steps = torch.minimum(j, n - 1 - j)
        for word in gradient_norms(model, batch):
            ratio = word.norm * n / word.norm.sum(1, keepdim=True)
            direct += float(word.direct[word.linked].sum())
            whole += float(word.norm[word.linked].sum())
            places = steps, torch.full_like(steps, word.index)
            for (name, width), place in zip(GROUPS.items(), places):
                kept = word.linked & (place // width < COLUMNS)
                for row, values in enumerate((ratio, torch.ones_like(ratio))):
                    sums[name][row].index_add_(0, (place // width)[kept], values[kept])
    return {name: (x[0] / x[1]).tolist() for name, x in sums.items()}, direct / whole


def draw(path: Path, found: dict[str, list[tuple[dict[str, list[float]], float]]]) -> None:
    """Draw the means of the models of each attention, over the seeds."""
    optional("matplotlib", "a picture")
    from io import BytesIO

    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, (name, width) in zip(figure.subplots(1, len(GROUPS), sharey=True), GROUPS.items()):
        middles = [width * (i + 0.5) - 0.5 for i in range(COLUMNS)]
        for attention, models in found.items():
            rows = torch.tensor([columns[name] for columns, _ in models])
            axes.plot(middles, rows.mean(0), marker="o", label=attention)
        axes.axhline(1, color="grey", linestyle=":", linewidth=1)
        axes.set_xlabel(name)
    figure.axes[0].set_ylabel("gradient of the aligned word\nover the mean of all words")
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[-1].legend()
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_atomically(path, buffer.getvalue())


def compare(args: argparse.Namespace) -> None:
    """Print tables by encoder steps, by target index, and of the direct share."""
    pairs = read_pairs(args.source, args.target)
    links: Sequence[Links] = read_alignments(args.alignments, pairs)
    found = defaultdict(list)
    for name in args.checkpoints:
        config, model, tokenizer = checkpoint.restore(checkpoint.load(name), name=name)
        examples, _ = encode_pairs(tokenizer, pairs, 1000, alignments=links)
        found[config.attention].append(measure(model.eval(), examples))
    for name, width in GROUPS.items():
        heads = [f"{width * i}–{width * (i + 1) - 1}" for i in range(COLUMNS)]
        print(f"| {name} | {' | '.join(heads)} |\n|---|{'--:|' * COLUMNS}")
        for attention, models in found.items():
            means = torch.tensor([columns[name] for columns, _ in models]).mean(0)
            print(f"| {attention} | {' | '.join(f'{x:.2f}' for x in means)} |", flush=True)
        print()
    print("| attention | models | without the decoder's past |\n|---|--:|--:|")
    for attention, models in found.items():
        shares = [100 * share for _, share in models]
        spread = f" ({min(shares):.0f}–{max(shares):.0f})" if len(shares) > 1 else ""
        mean = sum(shares) / len(shares)
        print(f"| {attention} | {len(models)} | {mean:.0f} %{spread} |")
    if args.plot:
        draw(Path(args.plot), found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "checkpoints", nargs="+", help="checkpoints of the models; seeds are averaged"
    )
    parser.add_argument("--source", required=True, metavar="FILE", help="one sentence per line")
    parser.add_argument("--target", required=True, metavar="FILE", help="its translation")
    parser.add_argument("--alignments", required=True, metavar="FILE", help="such as 0-0 1-2")
    parser.add_argument("--plot", metavar="FILE", help="a picture of the first two tables, PNG")
    parser.set_defaults(function=compare)
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
