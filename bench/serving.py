"""Measures the memory, warm-up and threads of a search, for docs/serving.md.

``python bench/serving.py`` prints a line for each. Every measurement runs in its own process,
because a process's reported peak of memory never decreases.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time

import torch

from attnfast.decoding import beam_search
from attnfast.models import Config, build

SIZES = {"vocab_size": 8000, "embed_dim": 256, "hidden_dim": 256}
SENTENCES, WORDS, BEAM = 64, 25, 5


def peak() -> float:
    """Return the peak of this process's resident memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def milliseconds(call) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def measure(what: str, threads: int = 0, sentences: int = SENTENCES) -> str:
    """Return a line of figures."""
    torch.manual_seed(0)
    torch.set_num_threads(threads or torch.get_num_threads())
    model = build(Config(**SIZES)).eval()
    source = torch.randint(4, SIZES["vocab_size"], (sentences, WORDS))
    lengths = torch.full((sentences,), WORDS)

    def search() -> None:
        beam_search(model, source, lengths, BEAM)

    before = peak()
    if what == "search":
        search()
        return f"first search: the peak rises from {before:.0f} MiB by {peak() - before:.0f} MiB"
    if what == "training":
        logits = model.train()(source, lengths, source)[0]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), source.flatten()).backward()
        return f"training step: the peak rises from {before:.0f} MiB by {peak() - before:.0f} MiB"
    first, second = milliseconds(search), milliseconds(search)
    usual = statistics.median(milliseconds(search) for _ in range(9))
    return (
        f"{sentences} sentences, {threads} threads: first search {first:.1f} ms, second "
        f"{second:.1f} ms, median of nine more {usual:.1f} ms"
    )


def main() -> None:
    if len(sys.argv) > 1:
        what, *numbers = sys.argv[1:]
        return print(measure(what, *map(int, numbers)))
    cores = len(os.sched_getaffinity(0))
    each = [(str(n), str(B)) for B in (1, 8, 64) for n in range(1, cores + 1)]
    for arguments in (["search"], ["training"], *(["time", *x] for x in each)):
        subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()
