"""Record attention in training: statistics, gradients and the weights of one sentence, by epoch.

    python examples/learning.py --out runs/learning

Three decoders learn the demo's made-up language, which moves verbs. After every epoch, `log.csv` of
each training records:

    entropy, largest, diagonality    means over the rows of attention on the validation set
    gradient_1 … gradient_5          norm of the loss's gradient at an encoder state, by fifths of
                                     the source, relative to the mean over all states

The pictures are drawn from these logs: `statistics.png`, `gradients.png`, and for each decoder
`weights-NAME.png`, the weights of one sentence before the training and after some epochs.
Trainings continue where they were stopped.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _experiment
import torch
from torch import Tensor

from attnfast._utils.checks import optional
from attnfast._utils.progress import log
from attnfast._utils.signals import Interrupted
from attnfast.models import Config, Seq2Seq, build, sequence_loss
from attnfast.translate import checkpoint, cli
from attnfast.translate.data import Example, WordTokenizer, collate, encode_pairs
from attnfast.translate.toy_grammar import aligned_corpus
from attnfast.translate.trainer import Options, Trainer

LUONG = {"recurrence": "input_feeding", "readout": "attentional"}
ROWS: dict[str, dict[str, Any]] = {
    "Bahdanau": {},
    "general": LUONG | {"attention": "general"},
    "scaled general": LUONG | {"attention": "scaled_general"},
}
STATISTICS = ("entropy", "largest", "diagonality", "bleu")
FIFTHS = 5
MAPS = 6  # of one sentence


def state_gradients(model: Seq2Seq, examples: Sequence[Example]) -> dict[str, float]:
    """Return the gradient norms at encoder states by fifths of the source, over their mean."""
    sums, counts = torch.zeros(FIFTHS), torch.zeros(FIFTHS)
    kept: list[Tensor] = []

    def keep(module: Any, inputs: Any, states: Tensor) -> None:
        states.retain_grad()
        kept.append(states)

    handle = model.encoder.register_forward_hook(keep)
    try:
        for first in range(0, len(examples), 64):
            batch = collate(examples[first : first + 64])
            with torch.enable_grad():
                logits, _ = model(batch.source, batch.lengths, batch.target_in)
                sequence_loss(logits, batch.target_out).backward()
            norm = kept.pop().grad.norm(dim=-1)  # type: ignore[union-attr]
            n = batch.lengths.unsqueeze(1)
            j = torch.arange(norm.shape[1])
            inside = (j < n) & (n >= FIFTHS)
            ratio = norm * n / norm.sum(1, keepdim=True).clamp_min(1e-30)
            fifth = (FIFTHS * j // n).clamp_max(FIFTHS - 1)
            sums.index_add_(0, fifth[inside], ratio[inside])
            counts.index_add_(0, fifth[inside], torch.ones_like(ratio)[inside])
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
    return {f"gradient_{i + 1}": float(x) for i, x in enumerate(sums / counts.clamp_min(1))}


@torch.no_grad()
def weights_of(model: Seq2Seq, example: Example) -> Tensor:
    """Return the weights ``[T, Tk]`` of one sentence under teacher forcing."""
    batch, training = collate([example]), model.training
    model.eval()
    weights = model(batch.source, batch.lengths, batch.target_in, need_weights=True).weights[0]
    model.train(training)
    return weights[: len(example.target), : len(example.source)].clone()


def learn(args: argparse.Namespace, name: str, seed: int) -> Path:
    """Train a model, or continue its training; return its folder."""
    drawn = aligned_corpus(1, args.pairs + args.held_out)
    train, valid = ([x.pair for x in part] for part in (drawn[: args.pairs], drawn[args.pairs :]))
    directory = args.out / f"{name.replace(' ', '-')}-{seed}"
    checkpoint.make_folder(directory)
    options = Options(args.epochs, 32, 3e-3, seed=seed)
    torch.manual_seed(seed)
    tokenizer = WordTokenizer.train(text for pair in train for text in pair)
    sizes = {"embed_dim": args.dim, "hidden_dim": args.dim}
    config = Config(tokenizer.vocab_size, **sizes, **ROWS[name])
    last, maps = directory / "last.pt", directory / "maps.pt"
    state = checkpoint.load(last) if last.exists() else None
    model = build(config) if state is None else checkpoint.restore(state, name=last)[1]
    examples, _ = encode_pairs(tokenizer, train, 1000)
    held_out, _ = encode_pairs(tokenizer, valid, 1000)
    shown = next((x for x in held_out if 8 <= len(x.source) <= 11), held_out[0])
    if state is None:
        checkpoint.write(maps, {"format": checkpoint.FORMAT, "0": weights_of(model, shown)})

    def measure(model: Seq2Seq) -> dict[str, float]:
        checkpoint.write(maps, checkpoint.load(maps) | {
            str(trainer.epoch + 1): weights_of(model, shown)
        })  # fmt: skip
        return state_gradients(model, held_out)

    trainer = Trainer(
        config, model, tokenizer, options, examples, held_out, valid, directory, measure=measure
    )
    if state is not None:
        trainer.resume(state, str(last))
    trainer.run()
    if seed == 1:
        words = [tokenizer.decode(ids).split() for ids in (shown.source, shown.target)]
        picture = draw_maps(checkpoint.load(maps), *words)
        checkpoint.write_atomically(args.out / f"weights-{name.replace(' ', '-')}.png", picture)
    return directory


def read_log(directory: Path) -> list[dict[str, float]]:
    """Return the epochs of a training's log."""
    with (directory / "log.csv").open(newline="") as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def draw_maps(kept: dict[str, Any], source: Sequence[str], target: Sequence[str]) -> bytes:
    """Draw the weights of one sentence in the first epochs and in the last."""
    Figure = optional("matplotlib.figure", "a picture").Figure
    epochs = sorted(int(x) for x in kept if x.isdigit())
    chosen = [*epochs[: MAPS - 1], *epochs[-1:]] if len(epochs) > MAPS else epochs
    figure = Figure(figsize=(2.3 * len(chosen) + 0.8, 3.4), layout="constrained")
    for axes, epoch in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen):
        axes.imshow(kept[str(epoch)].numpy(), cmap="GnBu", vmin=0, vmax=1, aspect="auto")
        axes.set_title(f"epoch {epoch}" if epoch else "before training", fontsize=10)
        axes.set_xticks(range(len(source)), source, rotation=90, fontsize=8)
        axes.set_yticks(range(len(target)), target if epoch == chosen[0] else [], fontsize=8)
    return _png(figure)


def means(logs: Sequence[list[dict[str, float]]], name: str) -> list[float]:
    """Return the means over trainings of each epoch's measurement."""
    return [sum(x[name] for x in epoch) / len(epoch) for epoch in zip(*logs)]


def draw_statistics(logs: dict[str, list[list[dict[str, float]]]]) -> bytes:
    """Draw the logs' statistics over epochs, means of the trainings of each decoder."""
    Figure = optional("matplotlib.figure", "a picture").Figure
    titles = ("entropy, nats", "largest weight", "share near the diagonal", "BLEU")
    figure = Figure(figsize=(11, 3), layout="constrained")
    for axes, column, title in zip(figure.subplots(1, len(STATISTICS)), STATISTICS, titles):
        for name, of_row in logs.items():
            values = means(of_row, column)
            axes.plot(range(1, len(values) + 1), values, "o-", markersize=3, label=name)
        axes.set(title=title, xlabel="epoch", ylim=(0, None))
    figure.axes[0].legend(fontsize=8)
    return _png(figure)


def draw_gradients(logs: dict[str, list[list[dict[str, float]]]]) -> bytes:
    """Draw the gradient at encoder states by fifths of the source, a line for each fifth."""
    Figure = optional("matplotlib.figure", "a picture").Figure
    figure = Figure(figsize=(3.5 * len(logs), 3), layout="constrained")
    drawn = figure.subplots(1, len(logs), sharey=True, squeeze=False)[0]
    for axes, (name, of_row) in zip(drawn, logs.items()):
        for i in range(FIFTHS):
            values = means(of_row, f"gradient_{i + 1}")
            axes.plot(range(1, len(values) + 1), values, "o-", markersize=3, label=f"fifth {i + 1}")
        axes.set(title=name, xlabel="epoch", ylim=(0, None))
    drawn[0].set_ylabel("gradient at a state\nover the mean of all")
    drawn[-1].legend(fontsize=8)
    return _png(figure)


def compare(args: argparse.Namespace) -> None:
    """Train the decoders; print and draw what their logs record."""
    optional("sacrebleu", "this example")
    logs: dict[str, list[list[dict[str, float]]]] = {}
    try:
        for seed in range(1, args.seeds + 1):
            for name in args.rows:
                log(f"{name}, seed {seed}")
                logs.setdefault(name, []).append(read_log(learn(args, name, seed)))
    except Interrupted as stop:
        raise Interrupted(stop.number, "stopped; the same command continues from there") from None
    checkpoint.write_atomically(args.out / "statistics.png", draw_statistics(logs))
    checkpoint.write_atomically(args.out / "gradients.png", draw_gradients(logs))
    epochs = range(1, args.epochs + 1)
    lines = [f"| entropy after epoch | {' | '.join(map(str, epochs))} |"]
    lines.append("|---|" + "--:|" * len(epochs))
    for name, of_row in logs.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{x:.2f}" for x in means(of_row, "entropy")) + " |"
        )
    text = "\n".join(lines) + "\n"
    checkpoint.write_atomically(args.out / "table.md", text.encode())
    print(text, end="")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _experiment.make_parser("learning", __doc__ or "", compare, ROWS, 3)
    _experiment.add_sizes(parser)
    return cli.run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
