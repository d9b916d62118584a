"""Measure the time and peak memory of a computation."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


def best_device() -> torch.device:
    """Return the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def peak_memory(function: Callable[[], object], device: torch.device | None = None) -> int:
    """Return the peak memory of ``function`` in bytes: see :func:`memory_of`."""
    return memory_of(function, device)[0]


def memory_of(
    function: Callable[[], object], device: torch.device | None = None
) -> tuple[int, int]:
    """Return the peak memory of ``function`` in bytes, and the memory that its result holds.

    Memory allocated before the call is not counted. A result that requires gradients holds the
    tensors saved for its backward. On a GPU PyTorch's allocator counts the bytes. On the CPU they
    are the running maximum of bytes allocated minus bytes freed, as ``torch.profiler`` records
    them.

    Args:
        function: it is called once.
        device: where it allocates; None is the GPU if there is one.
    """
    device = device or best_device()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        highest, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del result
        return highest - before, held - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints that it starts
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities,
        profile_memory=True,
        acc_events=True,  # or torch before 2.13 warns that it would clear them
    ) as profile:
        result = function()
    del result
    recorded = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(e.start_ns(), e.nbytes()) for e in recorded if e.name() == "[memory]"]
    held = highest = 0
    for _, change in sorted(changes):
        held += change
        highest = max(highest, held)
    return highest, held


def median_times(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each function.

    They take turns, after one warm-up call each, so that other load on the machine slows all of
    them equally.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


class Cost(NamedTuple):
    """Seconds and bytes."""

    seconds: float
    memory: int


def costs(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Cost]:
    """Return the median time and the peak memory of each function."""
    times = median_times(functions, repeats)
    return {name: Cost(times[name], peak_memory(functions[name])) for name in functions}
