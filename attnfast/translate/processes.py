"""Training in several processes, as ``torchrun`` starts them: each has a part of every batch."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of a training; without ``torchrun``, one, for which nothing is sent.

    ``rank`` is the number of this process, ``count`` that of all. The first validates, reports and
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
        """Return this process's part of a batch, and whether it is one.

        A batch may have fewer examples than there are processes; one without a part computes with
        the first example, and counts no word of it.
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
        """Return an object of the first process."""
        if self.count == 1:
            return x
        box: list[Any] = [x]
        dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return a tensor of each process, all of one shape on the CPU."""
        if self.count == 1:
            return [x]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, x)
        return found


#: A training in this process alone.
SINGLE = Processes()


@contextlib.contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Join the processes that ``torchrun`` has started, if it has."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(device=device)
        return
    backend = "gloo"
    if device.type == "cuda":
        backend, device = "nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # The others wait while the first one validates.
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=24))
    try:
        yield Processes(dist.get_rank(), count, device)
    finally:
        dist.destroy_process_group()
