"""The functions that processes of distributed tests run; importable by a spawned process."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn


class Whole(nn.Module):
    """An attention that prepares and attends in one call, for DDP wraps ``forward``."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, query, source, lengths):
        return self.attention(query, self.attention.prepare(source, lengths))[0]


def gradients(rank, port, attention, query, source, lengths, queue):
    """Differentiate the sum of the context of sequence ``rank``; the first process reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(Whole(attention))
    own = slice(rank, rank + 1)
    model(query[own], source[own], lengths[own]).sum().backward()
    if rank == 0:
        queue.put([p.grad.tolist() for p in attention.parameters()])
    dist.barrier()
    dist.destroy_process_group()


def train(stop_at, arguments):
    """Run ``attnfast train`` as one of two processes; the second gets SIGTERM in a step."""
    from attnfast.translate import trainer
    from attnfast.translate.cli import main

    original, calls = trainer.train_step, []

    def step(*args):
        calls.append(1)
        if int(os.environ["RANK"]) and len(calls) == stop_at:
            signal.raise_signal(signal.SIGTERM)
        return original(*args)

    trainer.train_step = step
    return main(arguments)


if __name__ == "__main__":
    sys.exit(train(int(sys.argv[1]), sys.argv[2:]))
