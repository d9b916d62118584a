"""Training in several processes, as ``torchrun`` starts them: each has a part of every batch."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from attnfast._utils.checks import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """A group of training processes; a single one unless ``torchrun`` started more.

    ``rank`` is the number of this process, from 0, of ``count``. The first validates, reports and
    writes.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model whose gradients are means over all processes."""
        if self.count == 1:
            return model
        return nn.parallel.DistributedDataParallel(model)

    def hold_gradients(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which gradients are added up in each process, and not sent."""
        return contextlib.nullcontext() if self.count == 1 else model.no_sync()  # type: ignore[operator]

    def part(self, examples: Sequence[T]) -> tuple[Sequence[T], bool]:
        """Return this process's examples of a batch, and whether it has any.

        A batch may have fewer examples than there are processes; a process without any computes
        with the first example, whose words are not counted.
        """
        own = examples[self.rank :: self.count]
        return (own, True) if own else (examples[:1], False)

    def sums(self, *numbers: float) -> list[float]:
        """Return the sums of numbers over all processes."""
        if self.count == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def from_first(self, x: T) -> T:
        """Return the first process's object in every process."""
        if self.count == 1:
            return x
        box: list[Any] = [x]
        dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, which are on the CPU."""
        if self.count == 1:
            return [x]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, x)
        return found


#: A training in this process alone.
SINGLE = Processes()


@contextlib.contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Join the process group that ``torchrun`` started, if any.

    Raises:
        InputError: several processes, and a device with an index.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(device=device)
        return
    if device.index is not None:
        raise InputError(f"--device: expected cpu or cuda in several processes, got {device}")
    backend = "gloo"
    if device.type == "cuda":
        backend, device = "nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # The others wait while the first one validates.
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=24))
    try:
        yield Processes(dist.get_rank(), count, device)
    except BaseException as error:
        # The error's frames hold the model, and the model holds the group, whose threads must end
        # before Python does.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()
