"""What examples that train models share: trainings that go on bit for bit, means over seeds."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnfast import checkpoint
from attnfast.errors import InputError, describe, first_line
from attnfast.interrupts import Interrupted, stop_on_signal
from attnfast.progress import Progress
from attnfast.training import Options

SAVE_EVERY = 60.0  # seconds


class Once(argparse.Action):
    """Take each of several values once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


class Trial:
    """One model in training, or trained, and kept in a file.

    A step's batch must depend on the seed and the step's number alone.

    Args:
        title: of the progress.
        path: the file.
        like: what must be the same for a kept training to go on.
        parts: modules with parameters to train, or with state alone, by name.
        steps: how many.
        options: of the optimizer.
    """

    def __init__(
        self,
        title: str,
        path: Path,
        like: dict[str, Any],
        parts: dict[str, nn.Module],
        steps: int,
        options: Options,
    ):
        self.title, self.path, self.like, self.steps = title, path, like, steps
        self.modules, self.options = parts, options
        self.parameters = [p for x in parts.values() for p in x.parameters()]
        decay = options.weight_decay
        self.optimizer = torch.optim.AdamW(self.parameters, weight_decay=decay, fused=True)
        self.step, self.found = 0, dict[str, Any]()
        self.kept = {**parts, "optimizer": self.optimizer}
        if not path.exists():
            return
        kept = checkpoint.load(path)
        try:
            began = dict(kept["like"])
            differ = [x for x in like | began if like.get(x) != began.get(x)]
            if not differ:
                for name, part in self.kept.items():
                    part.load_state_dict(kept[name])
                self.step, self.found = int(kept["step"]), dict(kept["found"])
                torch.set_rng_state(kept["random"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            detail = first_line(error)[:60]
            raise InputError(f"{path}: expected what this example keeps, got: {detail}") from error
        if differ:
            wanted, got = (
                ", ".join(f"{x} {describe(of.get(x))}" for x in differ) for of in (like, began)
            )
            raise InputError(
                f"{path}: expected {wanted}, got {got}: another --out keeps both trainings"
            )

    def save(self) -> None:
        parts = {name: part.state_dict() for name, part in self.kept.items()}
        rest = {x: getattr(self, x) for x in ("like", "step", "found")}
        checkpoint.write(
            self.path,
            {"format": checkpoint.FORMAT, "random": torch.get_rng_state(), **parts, **rest},
        )

    def train(self, mode: bool = True) -> None:
        """Put all modules in training mode, or in evaluation mode."""
        for part in self.modules.values():
            part.train(mode)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a step's batch."""
        raise NotImplementedError

    def learn(self) -> None:
        """Train until the last step, from the step that was reached."""
        self.train()
        saved = time.monotonic()
        with (
            stop_on_signal() as check,
            Progress(self.title, self.steps, "step", self.step) as progress,
        ):
            while self.step < self.steps:
                try:
                    check()
                except Interrupted:
                    self.save()
                    raise
                self.optimizer.param_groups[0]["lr"] = self.options.rate(self.step, self.steps)
                self.optimizer.zero_grad(set_to_none=True)
                loss = self.loss(self.step)
                if not loss.isfinite():
                    raise InputError(f"the loss of step {self.step + 1} must be finite, got {loss}")
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
                self.optimizer.step()
                self.step += 1
                progress(1, f"loss {loss.item():.3f}")
                if self.step == self.steps or time.monotonic() - saved >= SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean over seeds, and the least and the most where there are several."""
    mean = f"{statistics.fmean(values):{form}}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{form}}–{max(values):{form}})"
