"""Training of a translator in epochs; resuming from any step is bitwise exact."""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from attnfast._utils.checks import InputError, argument_message
from attnfast._utils.progress import Progress, log
from attnfast._utils.settings import check_default, check_settings, setting, with_settings
from attnfast._utils.signals import Interrupted, stop_on_signal
from attnfast.analysis import diagnostics
from attnfast.losses import KINDS, Reinforce, alignment_loss
from attnfast.models import PAD, Config, Seq2Seq, scheduled_sampling, sequence_loss
from attnfast.models.config import NO_ATTENTION
from attnfast.models.encoders import MAX_DISTANCE
from attnfast.ops.arguments import mean_of_heads
from attnfast.translate import checkpoint
from attnfast.translate.data import Batch, Example, Tokenizer, batches, collate
from attnfast.translate.evaluate import SearchOptions, translate
from attnfast.translate.processes import SINGLE, Processes
from attnfast.translate.scores import bleu

#: Options that may change when a training is resumed.
FREE = ("save_every", "compile", "patience")
#: The settings of a model that a trainer sets, to the lengths of its pairs.
MEASURED = ("length_ratio", "longest_target")
PRECISIONS = ("float32", "bfloat16")


class StepOptions(NamedTuple):
    """Options that change from step to step.

    The learning ``rate``; the weights of the losses on ``alignment`` and ``coverage``; the share of
    target words that are ``sampled`` from the model.
    """

    rate: float = 0.0
    alignment: float = 0.0
    coverage: float = 0.0
    sampled: float = 0.0


@with_settings
@dataclass(frozen=True)
class Options:
    """Options of a training."""

    epochs: int = setting(
        6, "passes over the training pairs; the learning rate reaches 0 at their end", at_least=1
    )
    batch_size: int = setting(64, "sentence pairs in a batch", at_least=1)
    learning_rate: float = setting(
        1e-3, "learning rate, which half a cosine over all steps lowers to 0", above=0
    )
    warmup: float = setting(
        0.05,
        "share of all steps in which a factor of the learning rate rises from 0 to 1",
        at_least=0,
        at_most=1,
    )
    label_smoothing: float = setting(
        0.1,
        "probability spread over the vocabulary in the target; unused with a pointer-generator and "
        "with hard attention",
        at_least=0,
        at_most=1,
    )
    coverage_loss: float = setting(
        1.0, "weight of the coverage loss of coverage attention", at_least=0
    )
    coverage_from: float = setting(
        0.8,
        "share of all steps after which the coverage loss counts; before, it keeps attention from "
        "learning",
        at_least=0,
        at_most=1,
    )
    reinforce_weight: float = setting(
        1.0, "weight of the reward of the keys that hard attention samples", at_least=0
    )
    entropy_weight: float = setting(
        0.01, "weight of the entropy of hard attention, which keeps it from choosing too early",
        at_least=0,
    )  # fmt: skip
    alignment_loss: float = setting(
        1.0, "weight of the loss on the attention weights of aligned pairs", at_least=0
    )
    alignment_until: float | None = setting(
        None,
        "share of all steps in which alignment_loss falls linearly to 0; constant unless given",
        above=0,
        at_most=1,
    )
    alignment_kind: str = setting(
        "cross_entropy", "loss that compares attention weights with alignments", KINDS
    )
    attention_lr_scale: float = setting(
        1.0, "factor on the learning rate of attention's parameters", at_least=0
    )
    weight_decay: float = setting(1e-4, "weight decay of AdamW", at_least=0)
    clip: float = setting(
        1.0, "largest norm of the gradient; inf leaves it unclipped", above=0, at_most=math.inf
    )
    patience: int | None = setting(
        None,
        "epochs without a better BLEU, or an equal one with a lower validation loss, after which "
        "training ends; all are run unless given",
        at_least=1,
    )
    accumulate: int = setting(1, "batches whose gradients are added up for a step", at_least=1)
    scheduled_sampling: float = setting(
        0.0,
        "share of target words that the model's own replace at the last step, rising from 0 at the "
        "first",
        at_least=0,
        at_most=1,
    )
    average: float = setting(
        0.0,
        "decay of the moving average of parameters that is validated and saved in best.pt; 0 "
        "validates and saves the parameters themselves",
        at_least=0,
        below=1,
    )
    precision: str = setting(
        "float32",
        "dtype of the factors of matrix products in training; parameters and sums are float32",
        PRECISIONS,
    )
    compile: bool = setting(False, "compile the model with torch.compile, for training alone")
    seed: int = setting(
        1, "seed of initial parameters, data order and dropout", at_least=0, below=2**63
    )
    save_every: float = setting(
        10.0, "minutes after which last.pt is written within an epoch too", at_least=0
    )
    max_length: int = setting(
        100, "tokens of the longest side of a pair; longer pairs are skipped", at_least=1
    )

    def __post_init__(self):
        check_settings(self)

    def check(self, config: Config) -> None:
        """Raise if one of these options, or of the config, has no effect on a training."""
        attention, sparse = config.attention, config.self_attention
        unused = f"for attention {attention!r}"
        for x, name, is_used, where in (
            (config, "window", sparse or attention in ("local", "predictive"), unused),
            (config, "stride", sparse or attention == "strided", unused),
            (self, "coverage_loss", attention == "coverage", unused),
            (self, "coverage_from", attention == "coverage", unused),
            (self, "attention_lr_scale", attention not in NO_ATTENTION, unused),
            (self, "label_smoothing", not config.pointer_generator, "with a pointer-generator"),
            (self, "label_smoothing", not config.hard, "with hard attention"),
            (self, "reinforce_weight", config.hard, "without hard attention"),
            (self, "entropy_weight", config.hard, "without hard attention"),
        ):
            if not is_used:
                check_default(x, name, where)

        if config.positions == "learned" and self.max_length >= MAX_DISTANCE:
            expected = f"below {MAX_DISTANCE} with learned positions"
            raise InputError(argument_message("max_length", expected, self.max_length))

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step: half a cosine down to 0, times a linear rise."""
        rise = min(1.0, (step + 1) / max(self.warmup * steps, 1))
        return self.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * step / steps))

    def at(self, step: int, steps: int) -> StepOptions:
        """Return the options of a step that change from step to step."""
        left = 1.0 if self.alignment_until is None else 1 - step / (self.alignment_until * steps)
        return StepOptions(
            self.rate(step, steps),
            self.alignment_loss * max(left, 0.0),
            self.coverage_loss * (step >= self.coverage_from * steps),
            self.scheduled_sampling * step / max(steps - 1, 1),
        )


def make_optimizer(model: Seq2Seq, options: Options) -> torch.optim.Optimizer:
    """Make AdamW over all parameters, in its fused form; those of attention may be a group."""
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if options.attention_lr_scale != 1:
        attention = list(model.decoder.attention.parameters())
        if not attention:
            expected = "1.0 for an attention without parameters"
            got = options.attention_lr_scale
            raise InputError(argument_message("attention_lr_scale", expected, got))
        own = set(map(id, attention))
        rest = [x for x in model.parameters() if id(x) not in own]
        groups = [{"params": rest}, {"params": attention, "scale": options.attention_lr_scale}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        options.learning_rate,
        weight_decay=options.weight_decay,
        fused=True,
    )


def batch_loss(
    model: nn.Module,
    batch: Batch,
    options: Options,
    now: StepOptions,
    reinforce: Reinforce | None = None,
    rows: float | None = None,
) -> Tensor:
    """Return the loss of a batch, a mean over its words.

    Args:
        now: the options of the step.
        reinforce: the loss of hard attention.
        rows: divisor of the summed loss on alignments; the aligned rows of the batch unless given.
    """
    aligned = batch.alignment if now.alignment else None
    needs = {} if aligned is None else {"need_weights": True}
    target_in = batch.target_in
    narrow = options.precision == "bfloat16"
    with torch.autocast(target_in.device.type, torch.bfloat16, enabled=narrow):
        if now.sampled:
            with torch.no_grad():
                logits, _ = model(batch.source, batch.lengths, target_in)
            target_in = scheduled_sampling(target_in, logits, now.sampled)
        predicted = model(batch.source, batch.lengths, target_in, **needs)
    logits, coverage = predicted
    words = (batch.target_out != PAD).sum()
    copying = getattr(getattr(model, "module", model), "pointer", None) is not None
    if reinforce is None:
        smoothing = 0.0 if copying else options.label_smoothing
        loss = sequence_loss(logits, batch.target_out, smoothing)
    else:  # of sentences, per word
        log_likelihood = logits.float().log_softmax(-1).gather(-1, batch.target_out.unsqueeze(-1))
        log_likelihood = log_likelihood.squeeze(-1).masked_fill(batch.target_out == PAD, 0).sum(-1)
        drawn = predicted.history
        of_sentences = reinforce(log_likelihood, drawn.log_prob, drawn.entropy)
        loss = of_sentences * len(batch.target_out) / words
    if coverage is not None and now.coverage:
        loss = loss + now.coverage * coverage.sum() / words
    if aligned is not None:
        rows = max(aligned_rows(batch), 1) if rows is None else rows
        weights = mean_of_heads(predicted.weights)
        of_rows = alignment_loss(weights, aligned, kind=options.alignment_kind)
        loss = loss + now.alignment * of_rows.sum() / rows
    return loss


def aligned_rows(batch: Batch) -> int:
    """Return the number of target words of a batch that are aligned to a source word."""
    return 0 if batch.alignment is None else int((batch.alignment.sum(-1) > 0).sum())


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batch | Sequence[Batch],
    options: Options,
    now: StepOptions,
    reinforce: Reinforce | None = None,
    processes: Processes = SINGLE,
    has_part: Sequence[bool] = (),
) -> float:
    """Run a training step on one batch or several; return the loss, a mean over all words.

    The loss on alignments is a mean over the aligned rows of all batches and processes.

    Args:
        batches: this process's parts of the batches.
        has_part: for each batch, whether its words count; all count unless given.
        processes: those that share the batches.

    The other arguments are those of :func:`batch_loss`.
    """
    for group in optimizer.param_groups:
        group["lr"] = now.rate * group.get("scale", 1.0)
    optimizer.zero_grad(set_to_none=True)
    batches = [batches] if isinstance(batches, Batch) else batches
    counts = [int((x.target_out != PAD).sum()) for x in batches]
    parts = has_part or [True] * len(counts)
    counts = [n * has for n, has in zip(counts, parts)]
    rows: float = 0
    if now.alignment:
        rows = sum(aligned_rows(x) * has for x, has in zip(batches, parts))
    words, rows = processes.sums(sum(counts), rows)
    mean = 0.0
    for i, (batch, count) in enumerate(zip(batches, counts)):
        is_last = i + 1 == len(batches)
        with contextlib.nullcontext() if is_last else processes.hold_gradients(model):
            share = count / words
            loss = batch_loss(model, batch, options, now, reinforce, rows * share or 1.0)
            # Gradients become means over the processes.
            (loss * (share * processes.count)).backward()
        mean += loss.item() * share
    nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    return processes.sums(mean)[0]


class AttentionLog:
    """Means over all rows of attention: entropy, largest weight, diagonality."""

    def __init__(self):
        self.sums: dict[str, float] = {}
        self.rows = 0

    def add(self, weights: Tensor | None, batch: Batch) -> None:
        """Count the weights of a batch, if it has any."""
        if weights is None or not batch.target_out.numel():
            return
        lengths = batch.lengths.to(weights.device)
        targets = (batch.target_out != PAD).sum(-1)
        rows = diagnostics.row_statistics(weights, lengths, targets)
        near = diagnostics.diagonality(weights, lengths, targets).share
        heads = weights.shape[1] if weights.dim() == 4 else 1
        counts = targets.view(-1, *[1] * (weights.dim() - 3))
        for name, x in (
            ("entropy", rows.entropy), ("largest", rows.max_weight), ("diagonality", near * counts),
        ):  # fmt: skip
            self.sums[name] = self.sums.get(name, 0.0) + x.sum().item() / heads
        self.rows += int(targets.sum())

    def means(self) -> dict[str, float]:
        """Return the means; an empty dictionary without attention."""
        return {name: x / max(self.rows, 1) for name, x in self.sums.items()}


@torch.no_grad()
def validation_loss(
    model: Seq2Seq,
    groups: Sequence[Sequence[Example]],
    progress: Callable[[int], object] = lambda done: None,
    log: AttentionLog | None = None,
) -> float:
    """Return the mean cross-entropy over all words of all batches, without smoothing.

    ``progress`` is called after each batch with the number of pairs in it; ``log`` is given its
    attention weights.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, words = 0.0, 0
    try:
        for group in groups:
            batch = collate(group).to(device)
            count = int((batch.target_out != PAD).sum())
            needs = {} if log is None else {"need_weights": True}
            predicted = model(batch.source, batch.lengths, batch.target_in, **needs)
            logits, _ = predicted
            if log is not None:
                log.add(predicted.weights, batch)
            total += sequence_loss(logits, batch.target_out).item() * count
            words += count
            progress(len(group))
    finally:
        model.train(training)
    return total / max(words, 1)


def rank(entry: dict[str, float]) -> tuple[float, float]:
    """Order epochs by BLEU, and by validation loss if BLEU is equal."""
    return entry["bleu"], -entry["valid_loss"]


@dataclass
class Trainer:
    """A model in training, and the state of the training.

    Args:
        config, model, tokenizer: the model to train, on its device, with config and tokenizer.
        train: training pairs.
        valid: pairs for the validation loss.
        valid_text: source and target lines for the validation BLEU.
        directory: folder of the checkpoints ``last.pt`` and ``best.pt`` and of ``log.csv``.
        processes: those that train together, each with a part of every batch.
        measure: returns further measurements of the validated model, by name, for the log.

    The length limit of translations is raised to the longest target of ``train``, and to twice the
    mean ratio of targets to sources, unless the config sets larger limits.
    """

    config: Config
    model: Seq2Seq
    tokenizer: Tokenizer
    options: Options
    train: Sequence[Example]
    valid: Sequence[Example]
    valid_text: Sequence[tuple[str, str]]
    directory: Path
    processes: Processes = SINGLE
    measure: Callable[[Seq2Seq], dict[str, float]] = lambda model: {}

    def __post_init__(self):
        self.device = next(self.model.parameters()).device
        if self.config.hard and self.processes.count > 1:
            raise InputError(f"--hard: expected one process, got {self.processes.count}")
        if self.processes.rank:  # parameters are those of the first process; dropout differs
            torch.manual_seed(self.options.seed + self.processes.rank)
        self.optimizer = make_optimizer(self.model, self.options)
        self.reinforce = None
        if self.config.hard:
            weights = self.options.reinforce_weight, self.options.entropy_weight
            self.reinforce = Reinforce(*weights).to(self.device)
        #: The model that is trained, and the one that is validated and saved in best.pt.
        self.trained: Any = self.model
        if self.options.compile:
            torch._dynamo.config.allow_rnn = True  # the encoder uses the parameters of an nn.RNN
            self.trained = torch.compile(self.model, dynamic=True)
        self.trained = self.processes.wrap(self.trained)
        self.average = None
        if self.options.average:
            mean = get_ema_multi_avg_fn(self.options.average)
            self.average = AveragedModel(self.model, multi_avg_fn=mean, use_buffers=True)
        self.epoch, self.step = 0, 0  # the next step of the current epoch
        self.loss_sum, self.seconds = 0.0, 0.0  # over the steps of the current epoch
        self.history: list[dict[str, float]] = []
        self.saved = time.monotonic()
        of_step = self.options.batch_size * self.options.accumulate
        self.steps = -(-len(self.train) // of_step)
        if not self.train or not self.valid:
            raise InputError("expected training and validation pairs, got none that can be used")
        sources, targets = ([len(x[side]) + 1 for x in self.train] for side in (0, 1))
        ratio = max(self.config.length_ratio, 2 * sum(targets) / sum(sources))
        longest = max(self.config.longest_target, *targets)
        self.config = replace(self.config, length_ratio=ratio, longest_target=longest)
        for model in (self.model, self.validated):
            model.length_ratio, model.longest_target = ratio, longest

    def _fingerprints(self) -> dict[str, int]:
        """Return checksums of the training pairs and of the lines of the validation BLEU."""
        both = {"pairs": self.train, "valid_pairs": [tuple(x) for x in self.valid_text]}
        return {name: zlib.crc32(repr(pairs).encode()) for name, pairs in both.items()}

    def _progress(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("epoch", "step", "loss_sum", "seconds", "history")
        }
        state |= {"options": asdict(self.options), **self._fingerprints()}
        state["optimizer"] = self.optimizer.state_dict()
        for name, module in (("reinforce", self.reinforce), ("average", self.average)):
            if module is not None:
                state[name] = module.state_dict()
        state["random"] = self.processes.gather(torch.get_rng_state())
        if self.device.type == "cuda":
            of_device = torch.cuda.get_rng_state(self.device)
            state["random_cuda"] = self.processes.gather(of_device)
        return {"training": state}

    @property
    def validated(self) -> Seq2Seq:
        """The model that is validated: the trained one, or its moving average."""
        return self.model if self.average is None else self.average.module

    def save(self, name: str, model: Seq2Seq | None = None, **state: Any) -> None:
        """Write a checkpoint of this name, of the validated model unless another is given."""
        if self.processes.rank:
            return
        model = self.validated if model is None else model
        checkpoint.save(self.directory / name, self.config, model, self.tokenizer, **state)

    def _save_last(self) -> None:
        self.save("last.pt", self.model, **self._progress())
        self.saved = time.monotonic()

    def resume(self, state: dict[str, Any], name: str) -> None:
        """Resume the training of a checkpoint, whose model is already loaded.

        With more epochs than before it continues at the learning rates of the longer training.

        Raises:
            InputError: the checkpoint holds no training, or one of another model, on other pairs,
                with another validation set or with other options; or ``best.pt`` is missing.
        """
        if "training" not in state:
            raise InputError(f"{name}: expected the training's last checkpoint, got a model alone")
        training = state["training"]
        began = {**state["config"], **training["options"]}
        for option, value in {**asdict(self.config), **asdict(self.options)}.items():
            if option in MEASURED:
                continue
            first = began[option]
            more = option == "epochs" and value > first
            if value != first and not more and option not in FREE:
                least = "at least " if option == "epochs" else ""
                raise InputError(
                    f"{option} must be {least}{first}, as when the training of {name} began, "
                    f"got {value}"
                )
        fingerprints = self._fingerprints()
        if training["pairs"] != fingerprints["pairs"]:
            raise InputError(
                f"{name}: expected the training pairs that this training began with, and their "
                "alignments, got others"
            )
        if training["valid_pairs"] != fingerprints["valid_pairs"]:
            raise InputError(
                f"{name}: expected the validation pairs that this training began with, got others, "
                "whose BLEU is another"
            )
        began_with, count = len(training["random"]), self.processes.count
        if began_with != count:
            raise InputError(
                f"{name}: expected {began_with} processes, as when this training began, got {count}"
            )
        best = self.directory / "best.pt"
        if training["history"] and not best.exists():
            epoch = max(training["history"], key=rank)["epoch"]
            raise InputError(
                f"{best}: expected the best checkpoint so far, that after epoch {epoch}, got no "
                "file; a copy of last.pt may stand in"
            )
        self.optimizer.load_state_dict(training["optimizer"])
        for name, module in (("reinforce", self.reinforce), ("average", self.average)):
            if module is not None:
                module.load_state_dict(training[name])
        for attribute in ("epoch", "step", "loss_sum", "seconds", "history"):
            setattr(self, attribute, training[attribute])
        number = self.processes.rank
        torch.set_rng_state(training["random"][number])
        if self.device.type == "cuda" and "random_cuda" in training:
            torch.cuda.set_rng_state(training["random_cuda"][number], self.device)

    def run(self, report: Callable[[str], None] = log) -> None:
        """Train until the last epoch; write checkpoints and the log after each.

        ``last.pt`` is also written every ``options.save_every`` minutes.

        Args:
            report: called with a line on each epoch, and every minute if no bar is shown.

        Raises:
            Interrupted: Ctrl-C or SIGTERM; ``last.pt`` has the state after the last finished step.
        """
        with stop_on_signal() as check:
            while self.epoch < self.options.epochs and not self._has_converged():
                try:
                    self._run_epoch(check, report)
                    entry = self._validate_once(check, report)
                except Interrupted as stop:
                    self._save_last()
                    raise Interrupted(
                        stop.number, f"stopped after step {self.step} of epoch {self.epoch + 1}"
                    ) from None
                better = not self.history or rank(entry) > max(map(rank, self.history))
                self.history.append(entry)
                self.epoch, self.step, self.loss_sum, self.seconds = self.epoch + 1, 0, 0.0, 0.0
                if better:
                    self.save("best.pt")
                self._save_last()
                self._write_log()
                report(
                    "epoch {epoch}: loss {loss:.3f}, validation loss {valid_loss:.3f}, "
                    "BLEU {bleu:.2f}, {step_ms:.0f} ms a step, {seconds:.0f} s".format(**entry)
                )

    def _has_converged(self) -> bool:
        """Return whether no epoch within the patience was better."""
        if self.options.patience is None or not self.history:
            return False
        best = max(range(len(self.history)), key=lambda i: rank(self.history[i]))
        return len(self.history) - 1 - best >= self.options.patience

    def _finite(self, loss: float, name: str) -> float:
        if not math.isfinite(loss):
            raise InputError(
                f"the {name} of epoch {self.epoch + 1} must be finite, got {loss}: "
                f"a learning rate below {self.options.learning_rate} may help"
            )
        return loss

    def _run_epoch(self, check: Callable[[], None], report: Callable[[str], None]) -> None:
        self.model.train()
        options = self.options
        groups = batches(self.train, options.batch_size, options.seed, self.epoch)
        name = f"epoch {self.epoch + 1} of {options.epochs}"
        is_first = not self.processes.rank
        with Progress(name, self.steps, "step", self.step, report, is_first) as progress:
            while self.step < self.steps:
                if self._agree(check) and self.step:
                    self._save_last()
                start = time.perf_counter()
                first = self.step * options.accumulate
                some = groups[first : first + options.accumulate]
                parts, has_part = zip(*map(self.processes.part, some))
                place = self.epoch * self.steps + self.step, options.epochs * self.steps
                loss = train_step(
                    self.trained, self.optimizer, [collate(x).to(self.device) for x in parts],
                    options, options.at(*place), self.reinforce, self.processes, has_part,
                )  # fmt: skip
                if self.average is not None:
                    self.average.update_parameters(self.model)
                self.loss_sum += self._finite(loss, f"loss of step {self.step + 1}")
                self.seconds += time.perf_counter() - start
                self.step += 1
                progress(1, f"loss {self.loss_sum / self.step:.3f}")

    def _agree(self, check: Callable[[], None]) -> bool:
        """Return whether last.pt is due; raise Interrupted if any process was asked to stop."""
        number = 0
        try:
            check()
        except Interrupted as stop:
            number = stop.number
        is_due = time.monotonic() - self.saved >= 60 * self.options.save_every
        due, stopped, of_all = self.processes.sums(
            is_due and not self.processes.rank, number > 0, number
        )
        if stopped:
            raise Interrupted(round(of_all / stopped))
        return bool(due)

    def _validate_once(
        self, check: Callable[[], None], report: Callable[[str], None]
    ) -> dict[str, float]:
        """Validate in the first process; return its measurements in all of them."""
        found: Any = None
        if not self.processes.rank:
            try:
                found = self._validate(check, report)
            except Interrupted as stop:
                found = stop.number
        found = self.processes.from_first(found)
        if isinstance(found, int):
            raise Interrupted(found)
        return found

    def _validate(
        self, check: Callable[[], None], report: Callable[[str], None]
    ) -> dict[str, float]:
        options = self.options
        groups = batches(self.valid, options.batch_size, options.seed, 0)
        sources, references = zip(*self.valid_text)
        total = len(self.valid) + sum(map(bool, sources))
        with Progress("validating", total, "sentence", report=report) as progress:

            def done(count: int) -> None:
                progress(count)
                check()

            log = AttentionLog()
            loss = validation_loss(self.validated, groups, done, log)
            loss = self._finite(loss, "validation loss")
            greedy = SearchOptions(beam=1)
            found = translate(self.validated, self.tokenizer, sources, greedy, progress=done)
        limited = sum(x.is_limited for x in found)
        if limited:
            report(
                f"{limited} of {len(found)} translations of the validation set "
                "reached their limit of length and may lack their ends"
            )
        score, _ = bleu([x.text for x in found], references)
        return {
            "epoch": self.epoch + 1,
            "loss": self.loss_sum / self.steps,
            "valid_loss": loss,
            "bleu": score,
            "step_ms": 1000 * self.seconds / self.steps,
            "seconds": self.seconds,
            **log.means(),
            **self.measure(self.validated),
        }

    def _write_log(self) -> None:
        names = list(self.history[-1])  # earlier epochs, of an earlier version, may lack some
        rows = [",".join(names)]
        rows += [
            ",".join(f"{entry[x]:.6g}" if x in entry else "" for x in names)
            for entry in self.history
        ]
        content = "\n".join(rows) + "\n"
        if self.processes.rank:
            return
        checkpoint.write_atomically(self.directory / "log.csv", content.encode())
