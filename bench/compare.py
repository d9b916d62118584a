"""Shapes of decoders, and timings of several implementations that take turns."""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
import time
from collections.abc import Callable

import torch

from attnfast._utils.benchmark import best_device, peak_memory
from attnfast.ops.backends import DispatchKey, ranked_backends, unsupported_reason

DEVICE = best_device()

# glibc's malloc gives memory back above twice the largest block it has mapped and freed. A program
# that has run for a while has freed large blocks; without one, it is a matter of luck whose tensors
# go back to the system after every call, and a page fault for each of their pages doubles the time.
torch.empty(31 << 20, dtype=torch.uint8)
SHORT = 0.05  # seconds: a call so short depends on what is in the caches
HEAD_START = 600_000  # clocks of a GPU, some 0.3 ms
DIRECTIONS = ("forward", "forward + backward")
DECODERS = {  # B, steps, Tk, A, Dv; each query depends on the context before it
    "translation": (32, 20, 50, 512, 512),
    "speech": (32, 20, 400, 512, 512),
    "small": (32, 20, 50, 256, 256),
    "one sentence": (1, 20, 50, 256, 256),
}


def eager(query, key, value, score_vector=None, normalise=torch.softmax, **_):
    """Attend as people write it: context and weights."""
    if score_vector is None:
        score = query @ key.transpose(-1, -2)
    else:
        score = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ score_vector
    weights = normalise(score, -1)
    return weights @ value, weights


def fused(way: Callable, operator: str = "attention", step: bool = False) -> dict[str, Callable]:
    """Return ``way`` with each backend that runs here: first as attnfast chooses, by None.

    Args:
        way: takes ``backend``.
        operator, step: as in :class:`attnfast.ops.backends.DispatchKey`.
    """
    request = DispatchKey(DEVICE, torch.float32, operator, step)
    able = [name for name in ranked_backends(request) if unsupported_reason(name, *request) is None]
    if able != ["reference"]:
        able.remove("reference")
    asked = [None, *able[1:]]
    return {
        f"attnfast ({name})": functools.partial(way, backend=backend)
        for name, backend in zip(able, asked)
    }


def timed(way, leaves=None, grad=None):
    """Return a call of ``way()`` and of gradients of ``leaves``, if any.

    They are those of its result's sum unless ``grad`` is given.
    """

    def run():
        with torch.set_grad_enabled(bool(leaves)):
            out = way()
            grads = ()
            if leaves:
                grads = torch.autograd.grad(out if grad is not None else out.sum(), leaves, grad)
        return (out, *grads)

    return run


def time_one(call) -> float:
    """Return the seconds of one call, on a GPU of the device alone.

    There nothing is in the second-level cache, and HEAD_START clocks pass before, in which the
    launches queue up: what takes longer to launch than that shows the processor's time.
    """
    if DEVICE.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE).zero_()
    torch.cuda._sleep(HEAD_START)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def roofline(special: float, plain: float, moved: int) -> float | None:
    """Return the seconds below which no GPU of this kind can stay; None on a CPU.

    A multiprocessor issues 16 special functions and 128 float32 instructions a clock, an A100's 64;
    tensor cores are left out, for they do not multiply float32.

    Args:
        special, plain: how many of these the formula needs.
        moved: bytes of what is read and written once.
    """
    if DEVICE.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(DEVICE)
    clocks = gpu.multi_processor_count * gpu.clock_rate * 1e3
    bandwidth = 2 * gpu.memory_clock_rate * 1e3 * gpu.memory_bus_width / 8
    lanes = 64 if (gpu.major, gpu.minor) == (8, 0) else 128
    return max(special / (16 * clocks), plain / (lanes * clocks), moved / bandwidth)


def compare(benchmark, score: str, shape: str, sizes, direction: str, calls: dict) -> None:
    """Time the first of ``calls`` against the others, in turns; a peer that fails is left out."""
    ours, left_out = next(iter(calls)), {}
    for name, run in calls.items():  # compile, fill caches
        try:
            run()
        except Exception as error:
            if name == ours:
                raise
            said = str(error).strip().partition("\n")[0]
            left_out[name] = f"{type(error).__name__}: {said}"
    calls = {name: run for name, run in calls.items() if name not in left_out}
    peers = [name for name in calls if name != ours]
    memory = {name: peak_memory(run) for name, run in calls.items()}

    on_gpu = DEVICE.type == "cuda"
    once = {name: time_one(run) for name, run in calls.items()}
    share = 4 / len(calls)  # seconds for each
    rounds = {
        name: max(5 if seconds < 1 else 3, min(100, int(share / max(seconds, 1e-4))))
        for name, seconds in once.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    turn = 0

    def take_turns():
        """Time the peers, the slow ones not in every turn; a short call comes after its like.

        On a GPU ours is among them, for pytest-benchmark's clock is not the device's.
        """
        nonlocal turn
        for name in calls if on_gpu else peers:
            if turn % max(rounds[ours] // rounds[name], 1) == 0:
                if once[name] < SHORT and not on_gpu:
                    calls[name]()
                times[name].append(time_one(calls[name]))
        if once[ours] < SHORT and not on_gpu:
            calls[ours]()
        turn += 1

    def wait_for(call):
        call()
        if on_gpu:
            torch.cuda.synchronize()

    benchmark.pedantic(wait_for, args=(calls[ours],), setup=take_turns, rounds=rounds[ours])
    medians = {name: statistics.median(t) for name, t in times.items() if t}
    if on_gpu:
        benchmark.extra_info["median"] = medians[ours]
    benchmark.extra_info.update(
        score=score,
        shape=shape,
        sizes=sizes,
        direction=direction,
        ours=ours,
        peers={name: medians[name] for name in peers if name in medians},
        left_out=left_out,
        memory=memory,
        versions={
            "torch": torch.__version__,
            **({"Triton": importlib.metadata.version("triton")} if on_gpu else {}),
        },
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        threads=torch.get_num_threads(),
    )
