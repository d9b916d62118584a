"""Training a translator: one epoch after the other, resumable at any step to the bit."""

from __future__ import annotations

import contextlib
import math
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnfast import checkpoint
from attnfast.data import Batch, Example, Tokenizer, batches, collate
from attnfast.errors import InputError, optional
from attnfast.models import PAD, Config, Seq2Seq
from attnfast.translation import bleu, translate


class Interrupted(Exception):
    """Ctrl-C was pressed, and the training has come to a clean stop."""


@dataclass(frozen=True)
class Options:
    """How to train.

    Args:
        epochs: passes over the training pairs; the learning rate reaches 0 at their end.
        batch_size: sentences in a batch.
        learning_rate: the highest.
        warmup: share of all steps in which the learning rate rises to it.
        label_smoothing: share of the target distribution spread over the whole vocabulary; none
            where words are copied, of which most cannot come.
        coverage_loss: weight of the coverage loss of attention with coverage.
        weight_decay: of AdamW.
        clip: the largest norm of a gradient.
        seed: of the weights, of the order of the data and of dropout.
    """

    epochs: int = 6
    batch_size: int = 64
    learning_rate: float = 1e-3
    warmup: float = 0.05
    label_smoothing: float = 0.1
    coverage_loss: float = 1.0
    weight_decay: float = 1e-4
    clip: float = 1.0
    seed: int = 1

    def __post_init__(self):
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate must be a positive number, got {self.learning_rate}")
        if not 0 <= self.coverage_loss < math.inf:
            raise InputError(
                f"coverage_loss must be a number, at least 0, got {self.coverage_loss}"
            )
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be at least 0 and below 2**63, got {self.seed}")

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step: a linear rise, then half a cosine down to 0."""
        rise = min(1.0, (step + 1) / max(self.warmup * steps, 1))
        return self.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * step / steps))


def sequence_loss(logits: Tensor, target_out: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of ``logits [B, T, V]`` over words that are not padding."""
    return nn.functional.cross_entropy(
        logits.flatten(0, 1),
        target_out.flatten(),
        ignore_index=PAD,
        label_smoothing=label_smoothing,
    )


def make_optimizer(model: Seq2Seq, options: Options) -> torch.optim.Optimizer:
    """Make AdamW over all parameters, in its fused form."""
    return torch.optim.AdamW(
        model.parameters(), options.learning_rate, weight_decay=options.weight_decay, fused=True
    )


def train_step(
    model: Seq2Seq,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    options: Options,
    rate: float,
) -> float:
    """Learn from one batch; return its loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    logits, coverage = model(batch.source, batch.lengths, batch.target_in)
    copying = getattr(getattr(model, "module", model), "pointer", None) is not None
    smoothing = 0.0 if copying else options.label_smoothing
    loss = sequence_loss(logits, batch.target_out, smoothing)
    if coverage is not None and options.coverage_loss:
        words = (batch.target_out != PAD).sum()
        loss = loss + options.coverage_loss * coverage.sum() / words
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def validation_loss(model: Seq2Seq, groups: Sequence[Sequence[Example]]) -> float:
    """Return the mean cross-entropy over all words of all batches, without smoothing."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, words = 0.0, 0
    for group in groups:
        batch = collate(group).to(device)
        count = int((batch.target_out != PAD).sum())
        logits, _ = model(batch.source, batch.lengths, batch.target_in)
        total += sequence_loss(logits, batch.target_out).item() * count
        words += count
    model.train(training)
    return total / max(words, 1)


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, so that no step is cut in two; a second one is final."""
    pressed = False

    def handler(number, frame):
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass
class Trainer:
    """A model in training, and where it stands.

    Args:
        config, model, tokenizer: what is trained, on the device where it is to be.
        train: the pairs to learn from.
        valid: the pairs to measure the loss on.
        valid_text: source and target lines to measure BLEU on.
        directory: where the checkpoints ``last.pt`` and ``best.pt`` and ``log.csv`` go.
    """

    config: Config
    model: Seq2Seq
    tokenizer: Tokenizer
    options: Options
    train: Sequence[Example]
    valid: Sequence[Example]
    valid_text: Sequence[tuple[str, str]]
    directory: Path

    def __post_init__(self):
        self.device = next(self.model.parameters()).device
        self.optimizer = make_optimizer(self.model, self.options)
        self.epoch, self.step = 0, 0  # the next step of the current epoch
        self.loss_sum, self.seconds = 0.0, 0.0  # over the steps of the current epoch
        self.history: list[dict[str, float]] = []
        self.steps = -(-len(self.train) // self.options.batch_size)
        if not self.train or not self.valid:
            raise InputError("expected training and validation pairs, got none that can be used")

    def _fingerprint(self) -> int:
        return zlib.crc32(repr(self.train).encode())

    def _progress(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("epoch", "step", "loss_sum", "seconds", "history")
        }
        state["options"], state["pairs"] = asdict(self.options), self._fingerprint()
        state["optimizer"] = self.optimizer.state_dict()
        state["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self.device)
        return {"training": state}

    def save(self, name: str, **state: Any) -> None:
        """Write a checkpoint of this name."""
        path = self.directory / name
        checkpoint.save(path, self.config, self.model, self.tokenizer, **state)

    def resume(self, state: dict[str, Any], name: str) -> None:
        """Take up the training of a checkpoint, whose model is already loaded.

        Raises:
            InputError: the checkpoint holds no training, or one on other pairs or options.
        """
        if "training" not in state:
            raise InputError(f"{name}: expected the training's last checkpoint, got a model alone")
        training = state["training"]
        for option, value in asdict(self.options).items():
            if training["options"][option] != value:
                raise InputError(
                    f"{name}: expected {option} {training['options'][option]}, as this training "
                    f"began, got {value}"
                )
        if training["pairs"] != self._fingerprint():
            raise InputError(
                f"{name}: expected the training pairs that this training began with, got others"
            )
        self.optimizer.load_state_dict(training["optimizer"])
        for attribute in ("epoch", "step", "loss_sum", "seconds", "history"):
            setattr(self, attribute, training[attribute])
        torch.set_rng_state(training["random"])
        if self.device.type == "cuda" and "random_cuda" in training:
            torch.cuda.set_rng_state(training["random_cuda"], self.device)

    def run(self, report: Callable[[str], None] = print) -> None:
        """Train until the last epoch; write checkpoints and the log after each.

        Raises:
            Interrupted: Ctrl-C; ``last.pt`` holds everything up to the last finished step.
        """
        with stop_on_interrupt() as stopped:
            while self.epoch < self.options.epochs:
                try:
                    self._run_epoch(stopped)
                    entry = self._validate(stopped)
                except Interrupted:
                    self.save("last.pt", **self._progress())
                    raise
                best = max((past["bleu"] for past in self.history), default=-1.0)
                self.history.append(entry)
                self.epoch, self.step, self.loss_sum, self.seconds = self.epoch + 1, 0, 0.0, 0.0
                if entry["bleu"] > best:
                    self.save("best.pt")
                self.save("last.pt", **self._progress())
                self._write_log()
                report(
                    "epoch {epoch}: loss {loss:.3f}, validation loss {valid_loss:.3f}, "
                    "BLEU {bleu:.2f}, {step_ms:.0f} ms a step, {seconds:.0f} s".format(**entry)
                )

    def _run_epoch(self, stopped: Callable[[], bool]) -> None:
        tqdm = optional("tqdm", "training").tqdm
        self.model.train()
        options = self.options
        groups = batches(self.train, options.batch_size, options.seed, self.epoch)
        with tqdm(
            total=self.steps, initial=self.step, desc=f"epoch {self.epoch + 1}", leave=False
        ) as bar:
            while self.step < self.steps:
                if stopped():
                    raise Interrupted
                start = time.perf_counter()
                batch = collate(groups[self.step]).to(self.device)
                rate = options.rate(
                    self.epoch * self.steps + self.step, options.epochs * self.steps
                )
                loss = train_step(self.model, self.optimizer, batch, options, rate)
                if not math.isfinite(loss):
                    raise InputError(
                        f"the loss of step {self.step + 1} of epoch {self.epoch + 1} is {loss}: "
                        f"expected a finite number; learning_rate {options.learning_rate} may be "
                        "too high"
                    )
                self.loss_sum += loss
                self.seconds += time.perf_counter() - start
                self.step += 1
                bar.update()
                bar.set_postfix(loss=f"{self.loss_sum / self.step:.3f}", refresh=False)

    def _validate(self, stopped: Callable[[], bool]) -> dict[str, float]:
        def check(done: int) -> None:
            if stopped():
                raise Interrupted

        options = self.options
        groups = batches(self.valid, options.batch_size, options.seed, 0)
        loss = validation_loss(self.model, groups)
        check(0)
        sources, references = zip(*self.valid_text)
        outputs = translate(self.model, self.tokenizer, sources, beam=1, progress=check)
        score, _ = bleu(outputs, references)
        return {
            "epoch": self.epoch + 1,
            "loss": self.loss_sum / self.steps,
            "valid_loss": loss,
            "bleu": score,
            "step_ms": 1000 * self.seconds / self.steps,
            "seconds": self.seconds,
        }

    def _write_log(self) -> None:
        rows = [",".join(self.history[0])]
        rows += [",".join(f"{value:.6g}" for value in entry.values()) for entry in self.history]
        content = "\n".join(rows) + "\n"
        checkpoint.write_atomically(self.directory / "log.csv", content.encode())
