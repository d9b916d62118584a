"""Compare translators without attention, with eager and with fused attention, on made-up data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from attnfast._utils.benchmark import Cost, best_device, costs, peak_memory
from attnfast._utils.checks import optional
from attnfast._utils.progress import Progress
from attnfast.analysis.plots import draw_alignment, draw_speed
from attnfast.functional import additive_attention
from attnfast.models import Encoder, FixedContext, RecurrentDecoder, Seq2Seq
from attnfast.nn import LuongAttention
from attnfast.translate.checkpoint import make_folder, write_atomically
from attnfast.translate.data import (
    Batch,
    Example,
    Tokenizer,
    WordTokenizer,
    batches,
    collate,
    encode_pairs,
)
from attnfast.translate.evaluate import SearchOptions, alignment, translate
from attnfast.translate.scores import LengthScore, bleu, scores_by_length
from attnfast.translate.toy_grammar import ADVERBS, Pair, corpus
from attnfast.translate.trainer import Options, StepOptions, make_optimizer, train_step

#: The three models, and the backend of attention and recurrent layers: PyTorch's own code for two.
MODELS = {"none": "reference", "eager": "reference", "fused": None}


class Settings(NamedTuple):
    """The amount of work of a demo.

    Args:
        pairs, test_pairs: numbers of training sentences and of test sentences.
        steps, batch_size, learning_rate: settings of the training.
        dim: features of words and of each encoder direction; decoder and attention have twice as
            many.
        lengths, repeats: sentence lengths of the time and memory charts, and the number of timings
            of each.
    """

    pairs: int = 6400
    test_pairs: int = 300
    steps: int = 600
    batch_size: int = 32
    learning_rate: float = 3e-3
    dim: int = 64
    lengths: Sequence[int] = (10, 20, 40, 80)
    repeats: int = 3
    seed: int = 1


class Learner(NamedTuple):
    """A model, its optimizer, and the seconds and the loss of each of its steps."""

    model: Seq2Seq
    optimizer: torch.optim.Optimizer
    seconds: list[float]
    losses: list[float]


class Result(NamedTuple):
    """Measurements by model; ``bleu_by_length`` is from :mod:`attnfast.translate.scores`."""

    step_seconds: dict[str, float]
    long_step_seconds: dict[str, float]
    memory: dict[str, int]
    bleu: dict[str, float]
    bleu_by_length: dict[str, list[LengthScore]]
    loss_difference: float


def make_learner(name: str, vocab_size: int, options: Options, dim: int) -> Learner:
    """Make a model of :data:`MODELS`; all have the same weights except for the attention."""
    torch.manual_seed(options.seed)
    attention = LuongAttention(2 * dim, 2 * dim, "concat", backend=MODELS[name])
    decoder = RecurrentDecoder(
        dim, 2 * dim, 2 * dim, attention, recurrence="independent", readout="attentional"
    )
    encoder = Encoder(dim, dim, backend=MODELS[name])
    model = Seq2Seq(encoder, decoder, vocab_size, dim).to(best_device())
    if name == "none":
        decoder.attention = FixedContext(MODELS[name])
    return Learner(model, make_optimizer(model, options), [], [])


def train(
    learners: Mapping[str, Learner],
    groups: Sequence[Sequence[Example]],
    options: Options,
) -> None:
    """Train all models side by side on the same batches, so that their times can be compared."""
    with Progress("training all three", len(groups), "step") as progress:
        for step, group in enumerate(groups):
            batch = collate(group).to(best_device())
            now = options.at(step, len(groups))
            for model, optimizer, seconds, losses in learners.values():
                start = time.perf_counter()
                losses.append(train_step(model, optimizer, batch, options, now))
                seconds.append(time.perf_counter() - start)
            progress()
    for learner in learners.values():
        learner.optimizer.zero_grad(set_to_none=True)


def idle_step(learner: Learner, batch: Batch, options: Options) -> None:
    """Run a training step of learning rate 0 and free its gradients and other tensors."""
    train_step(learner.model, learner.optimizer, batch, options, StepOptions())
    learner.optimizer.zero_grad(set_to_none=True)


def random_batch(length: int, size: int, vocab_size: int) -> Batch:
    """Make sentences of ``length`` random words, in both languages."""
    words = torch.randint(4, vocab_size, (2, size, length - 1)).tolist()
    return collate([Example(*pair) for pair in zip(*words)]).to(best_device())


def attend(length: int, size: int, features: int) -> dict[str, Callable[[], None]]:
    """Return additive attention forward and backward, eager and fused, on the same tensors."""
    shape = (size, length, features)
    query, key, value = (
        torch.randn(shape, device=best_device(), requires_grad=True) for _ in range(3)
    )
    weight = torch.randn(features, device=best_device(), requires_grad=True)

    def run(backend: str | None) -> None:
        context = additive_attention(query, key, value, weight, backend=backend)[0]
        assert context is not None
        torch.autograd.grad(context.sum(), (query, key, value, weight))

    return {name: partial(run, MODELS[name]) for name in ("eager", "fused")}


def measure(
    functions: Callable[[int], Mapping[str, Callable[[], object]]],
    lengths: Sequence[int],
    repeats: int,
    title: str,
) -> dict[str, list[Cost]]:
    """Return the cost of each function at each length."""
    rows = []
    with Progress(title, len(lengths), "length") as progress:
        for n in lengths:
            rows.append(costs(functions(n), repeats))
            progress()
    return {name: [row[name] for row in rows] for name in rows[0]}


def draw_charts(
    learners: Mapping[str, Learner], vocab_size: int, options: Options, settings: Settings
) -> bytes:
    """Measure a training step and attention alone over the length of the source; draw both."""
    size, features = settings.batch_size, 2 * settings.dim

    def steps(length: int) -> dict[str, Callable[[], None]]:
        batch = random_batch(length, size, vocab_size)
        return {name: partial(idle_step, x, batch, options) for name, x in learners.items()}

    lengths, repeats = settings.lengths, settings.repeats
    rows = {
        "a whole training step": measure(steps, lengths, repeats, "timing steps"),
        "attention alone, forward and backward": measure(
            lambda length: attend(length, size, features), lengths, repeats, "timing attention"
        ),
    }
    device = best_device()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    note = f"additive attention on {name}: batch {size}, {features} features, float32"
    return draw_speed(rows, lengths, note)


def draw_sentence(
    model: Seq2Seq, tokenizer: Tokenizer, test: Sequence[Pair], outputs: Sequence[str]
) -> bytes:
    """Draw the attention of a correct translation of medium length with reordered words."""

    def worth(i: int) -> tuple[bool, bool, bool, bool]:
        words = test[i][0].split()
        right, middle = outputs[i] == test[i][1], 9 <= len(words) <= 15
        return right, middle, "that" in words, words[0] in ADVERBS

    chosen = max(range(len(test)), key=worth)
    source, output = test[chosen][0], outputs[chosen]
    weights = alignment(model, tokenizer, source, output)
    return draw_alignment(weights, [*source.split(), "(end)"], [*output.split(), "(end)"])


def evaluate(
    learners: Mapping[str, Learner],
    groups: Sequence[Sequence[Example]],
    options: Options,
    test: Sequence[Pair],
    outputs: Mapping[str, Sequence[str]],
) -> Result:
    """Collect the costs and the translation quality of the models that :func:`train` trained."""
    sources, references = zip(*test)
    order = sorted(range(1, len(groups)), key=lambda step: len(groups[step][-1].target))
    longest = collate(groups[order[-1]]).to(best_device())

    def median(steps: Sequence[int]) -> dict[str, float]:
        return {n: statistics.median(x.seconds[i] for i in steps) for n, x in learners.items()}

    return Result(
        median(order),
        median(order[-max(len(order) // 10, 1) :]),
        {n: peak_memory(partial(idle_step, x, longest, options)) for n, x in learners.items()},
        {name: bleu(lines, references)[0] for name, lines in outputs.items()},
        {n: scores_by_length(sources, lines, references, width=10) for n, lines in outputs.items()},
        max(abs(a - b) for a, b in zip(learners["eager"].losses, learners["fused"].losses)),
    )


def table(result: Result) -> str:
    """Return a result as text, with a column for each model."""
    rows = [["", *MODELS]]
    for title, values, scale, form in (
        ("training step, median", result.step_seconds, 1e3, "{:.0f} ms"),
        ("training step, longest tenth", result.long_step_seconds, 1e3, "{:.0f} ms"),
        ("peak memory of a long step", result.memory, 2**-20, "{:.1f} MiB"),
        ("BLEU", result.bleu, 1, "{:.2f}"),
    ):
        rows.append([title, *(form.format(values[name] * scale) for name in MODELS)])
    for entries in zip(*(result.bleu_by_length[name] for name in MODELS)):
        title = f"  {entries[0].name} words ({entries[0].sentences} sentences)"
        rows.append([title, *(f"{x.bleu:.2f}" for x in entries)])
    width = max(len(row[0]) for row in rows)
    lines = [f"{row[0]:<{width}}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows]
    last = f"largest difference between the losses of eager and fused: {result.loss_difference:.1e}"
    return "\n".join([*lines, "", last])


def run(
    directory: Path, say: Callable[[str], None] = print, settings: Settings | None = None
) -> Result:
    """Compare no, eager and fused attention; print a table, write two pictures.

    Args:
        directory: folder of ``alignment.png`` and ``speed.png``, written at the very end.
        say: called with progress messages.
        settings: the amount of work; the default takes less than two minutes on two cores.

    Raises:
        InputError: the folder cannot be written to, or a package is missing.
    """
    for package in ("matplotlib", "sacrebleu"):
        optional(package, "attnfast demo")
    make_folder(directory)
    settings = settings or Settings()
    start = time.perf_counter()
    pairs = corpus(settings.seed, settings.pairs + settings.test_pairs)
    test, training = pairs[: settings.test_pairs], pairs[settings.test_pairs :]
    tokenizer = WordTokenizer.train(text for pair in pairs for text in pair)
    examples, _ = encode_pairs(tokenizer, training, max_length=100)
    options = Options(
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        label_smoothing=0.0,
        seed=settings.seed,
    )
    epochs = -(-settings.steps * options.batch_size // len(examples))
    groups = [
        group
        for epoch in range(epochs)
        for group in batches(examples, options.batch_size, options.seed, epoch)
    ][: settings.steps]
    say(f"made {len(pairs)} sentence pairs, English to German, such as “{test[0][0]}”")

    learners = {
        name: make_learner(name, tokenizer.vocab_size, options, settings.dim) for name in MODELS
    }
    train(learners, groups, options)
    sources = [source for source, _ in test]
    greedy = SearchOptions(beam=1)
    outputs = {
        name: [y.text for y in translate(x.model, tokenizer, sources, greedy)]
        for name, x in learners.items()
    }
    result = evaluate(learners, groups, options, test, outputs)
    print(table(result), flush=True)
    pictures = {
        "alignment.png": draw_sentence(learners["fused"].model, tokenizer, test, outputs["fused"]),
        "speed.png": draw_charts(learners, tokenizer.vocab_size, options, settings),
    }
    for name, content in pictures.items():
        write_atomically(directory / name, content)
    files = " and ".join(str(directory / name) for name in pictures)
    say(f"{files} written, {time.perf_counter() - start:.0f} s in all")
    return result
