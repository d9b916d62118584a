"""Calls with many launches, replayed as CUDA graphs where their shapes repeat.

A recurrent layer that runs step by step has thousands of launches, and a GPU computes most of them
faster than the host can launch them. Captured as a CUDA graph they are one launch. A graph has
fixed shapes and addresses, so

- lengths are padded to *buckets*, eight in each octave (32, 36, 40, .., 60, 64, 72, ..), and the
  operator gets lengths that do not exceed the original ones;
- arguments are copied into an *arena*, memory at fixed addresses, and results out of it. All graphs
  of a stream share one arena, because they run one after the other, and one pool for what they
  allocate.

The first call of a bucket runs without a graph, but in the arena too, so that its results have the
same bits as those of a replay. The second call is captured.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from attnfast._utils.checks import InputError, argument_message
from attnfast._utils.dispatch_log import record
from attnfast._utils.torch_private import end_allocation_to_pool, has_dispatch_mode
from attnfast.ops.operators import results_of

#: The largest number of graphs of a stream, of first calls that it remembers, and of streams. The
#: least recently used is dropped.
MAX_GRAPHS, MAX_FIRST_CALLS, MAX_STREAMS = 256, 4096, 4
#: The alignment of tensors in an arena, in bytes: that of PyTorch's allocator.
ALIGNMENT = 512
#: The classes of tensors that are copied into an arena.
PLAIN_TENSORS = {Tensor, nn.Parameter}

T = TypeVar("T")
#: The shape and dtype of a tensor.
Spec = tuple[tuple[int, ...], torch.dtype]


def are_enabled() -> bool:
    """Return whether ``ATTNFAST_CUDA_GRAPHS`` lets calls be captured."""
    value = os.environ.get("ATTNFAST_CUDA_GRAPHS") or "1"
    if value not in ("0", "1"):
        raise InputError(argument_message("ATTNFAST_CUDA_GRAPHS", "0 or 1", value))
    return value == "1"


def bucket(length: int) -> int:
    """Return the smallest of eight lengths in each octave that is no shorter."""
    unit = 1 << max(length.bit_length() - 4, 0)
    return -(-length // unit) * unit


# ---- one capture --------------------------------------------------------------------------------


class InvalidCaptureError(RuntimeError):
    """CUDA refused a launch, or something else, within a capture."""


def capture(
    work: Callable[[], None], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """Capture the launches of some work, on a stream and with memory from a pool of its own.

    PyTorch's caches are not emptied, as ``torch.cuda.graph`` empties them.

    Raises:
        InvalidCaptureError: CUDA ended the capture. An error of the work itself is raised as it is.
    """
    graph, stream = torch.cuda.CUDAGraph(), stream or torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    with torch.cuda.device(stream.device):
        current = torch.cuda.current_stream()
        torch.cuda.current_blas_handle()  # a thread's first one cannot be created in a capture
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException as error:
                _end(graph, stream, pool, error)
                raise
            _end(graph, stream, pool, None)
        current.wait_stream(stream)
    return graph


def _end(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any, cause: BaseException | None
) -> None:
    """End a capture; if it is invalid, restore PyTorch's state and raise InvalidCaptureError."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError, AttributeError):
            end_allocation_to_pool(stream.device, pool)
        with contextlib.suppress(RuntimeError):  # the end of a valid one resets the generator
            reset = torch.cuda.CUDAGraph()
            reset.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=stream.device)
            reset.capture_end()
        raise InvalidCaptureError(str(cause or error)) from error


# ---- the graphs of a stream ---------------------------------------------------------------------


class _Captured(NamedTuple):
    """A graph, with the arguments that it reads and the results that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Stream:
    """The graphs of a stream, and their memory."""

    def __init__(self, stream: torch.cuda.Stream, like: Tensor):
        self.stream, self.lock = stream, threading.Lock()
        self.arena = like.new_empty(0, dtype=torch.uint8)
        self.graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        #: The results of calls that have no graph yet; None if they will have none.
        self.first_calls: OrderedDict[Hashable, list[Spec] | None] = OrderedDict()

    @torch.inference_mode(False)  # every mode may write to the arena
    def resize(self, size: int) -> None:
        """Drop all graphs and their memory, and allocate an arena of ``size`` bytes."""
        if self.graphs:  # expandable segments are unmapped without waiting for a replay
            self.stream.synchronize()
        for key, call in self.graphs.items():
            self.first_calls[key] = [_spec(x) for x in call.outputs]
        self.graphs.clear()
        self.arena = self.arena.new_empty(0)
        self.arena = self.arena.new_empty(size)

    @torch.inference_mode(False)
    def allocate(self, specs: Sequence[Spec]) -> list[Tensor]:
        """Return tensors at the beginning of the arena, one after the other."""
        ends = [0]
        for shape, dtype in specs:
            end = ends[-1] + math.prod(shape) * dtype.itemsize
            ends.append(-(-end // ALIGNMENT) * ALIGNMENT)
        if ends[-1] > len(self.arena):
            self.resize(1 << (ends[-1] - 1).bit_length())
        return [
            self.arena[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for first, (shape, dtype) in zip(ends, specs)
        ]

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture work; if that fails, a second time with an empty cache of PyTorch's."""
        if not self.graphs:  # a pool ends with its last graph, and cuBLAS's workspace is in it
            self.side = torch.cuda.Stream(self.arena.device)
            self.pool = torch.cuda.graph_pool_handle()
        try:
            return capture(work, self.side, self.pool)
        except InvalidCaptureError:
            raise
        except RuntimeError:  # out of memory: a capture does not free what is cached
            torch.cuda.empty_cache()
            return capture(work, self.side, self.pool)


def _spec(x: Tensor) -> Spec:
    return tuple(x.shape), x.dtype


def _put(entries: OrderedDict[Hashable, T], key: Hashable, value: T, limit: int) -> T | None:
    """Make an entry the most recently used one; return the one that is dropped for it, or None."""
    entries[key] = value
    entries.move_to_end(key)
    return entries.popitem(last=False)[1] if len(entries) > limit else None


# ---- the calls of an operator -------------------------------------------------------------------


class _Call(NamedTuple):
    """A call whose lengths are padded to buckets.

    Attributes:
        key: what a graph must have in common with it.
        specs: of the tensors that a graph reads, by the argument's name.
        lengths: for each argument that has lengths, the length that they may not exceed.
        logarithms: the names of arguments that are padded with −inf.
    """

    key: Hashable
    specs: dict[str, Spec]
    lengths: dict[str, int]
    logarithms: Collection[str]


class Graphs:
    """The CUDA graphs of an operator and its backward.

    Args:
        axes: for each argument that has lengths ``[B]``, such as ``target_lengths``: the axis that
            they limit, counted from the last, of every argument and result that has it. The first
            is an argument whose size is the longest length. A gradient has the axes of its tensor.
        has_many_launches: whether a call, its arguments by name, is to be captured.
        logarithms: the names of the arguments of a call that are logarithms, of numbers that are
            padded with zeros.
    """

    def __init__(
        self,
        axes: dict[str, dict[str, int]],
        has_many_launches: Callable[[Mapping[str, Any]], bool],
        logarithms: Callable[[Mapping[str, Any]], Collection[str]] = lambda _: (),
    ):
        self.axes, self.has_many_launches, self.logarithms = axes, has_many_launches, logarithms
        #: The arguments that lengths are read from.
        self._firsts = [next(iter(of)) for of in axes.values()]
        self.failure: str | None = None  # of a capture: there is no second attempt
        self._streams: OrderedDict[Hashable, _Stream] = OrderedDict()
        self._lock = threading.Lock()

    def run(self, overload: Any, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """Run an operator on a GPU, with a graph if it has one for the call."""
        call = dict(zip(_names(overload)[0], arguments))
        reason = self._reason_against(call)
        if reason is None:
            stream = self._stream_of(call["input"])
            with stream.lock:
                results, reason = self._run(overload, call, stream)
            if results is not None:
                return results
        if reason:
            record("launches", "one by one", f"not a CUDA graph: {reason}")
        return results_of(overload(*arguments))

    def _reason_against(self, call: Mapping[str, Any]) -> str | None:
        """Return why a call is not captured, "" if that is no question for it, or None."""
        if not is_on_gpu(call["input"]) or has_dispatch_mode():
            return ""
        firsts = [call[name] for name in self._firsts]
        if any(x is not None and not x.numel() for x in firsts) or not self.has_many_launches(call):
            return ""
        if not are_enabled():
            return "ATTNFAST_CUDA_GRAPHS=0"
        tensors = [x for x in call.values() if isinstance(x, Tensor)]
        if not all(type(x) in PLAIN_TENSORS and x.device == tensors[0].device for x in tensors):
            return "an argument is on another device, or of a subclass of Tensor"
        if (allocator := torch.cuda.get_allocator_backend()) != "native":
            return f"PyTorch's allocator is {allocator}, not native"
        if torch.cuda.is_current_stream_capturing():
            return "a graph is being captured that contains them"
        return self.failure

    def _stream_of(self, x: Tensor) -> _Stream:
        current = torch.cuda.current_stream(x.device)
        key = x.device, current.cuda_stream
        with self._lock:
            found = self._streams.get(key) or _Stream(current, x)
            dropped = _put(self._streams, key, found, MAX_STREAMS)
        if dropped is not None:
            with dropped.lock:
                dropped.resize(0)
        return found

    def _run(
        self, overload: Any, given: Mapping[str, Any], stream: _Stream
    ) -> tuple[tuple[Tensor, ...] | None, str | None]:
        """Return the results of a call in the arena; or None, and why it must run outside."""
        call = self._padded(overload, given)
        captured = stream.graphs.get(call.key)
        if captured is None:
            known = stream.first_calls.get(call.key, ())
            if known is None:
                return None, "there was too little memory for one"
            try:
                results, captured = self._run_first(overload, given, call, known, stream)
            except InvalidCaptureError as error:
                self.failure = f"the capture failed: {str(error).splitlines()[0]}"
                warnings.warn(
                    f"attnfast uses no CUDA graphs, {self.failure}; "
                    "please report it, with the output of `attnfast check`",
                    stacklevel=2,
                )
                return None, self.failure
            except RuntimeError:  # out of memory, or wrong arguments: the call itself will tell
                stream.resize(0)
                _put(stream.first_calls, call.key, None, MAX_FIRST_CALLS)
                return None, "there is too little memory for one"
            if captured is None:
                return results, None
        else:
            _fill(call, given, captured.inputs)
        captured.graph.replay()
        _put(stream.graphs, call.key, captured, MAX_GRAPHS)
        record("launches", "a CUDA graph")
        cut = self._cut(overload, captured.outputs, given)
        copies = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in cut]
        _copy(copies, cut)
        return tuple(copies), None

    def _run_first(
        self, overload: Any, given: Mapping[str, Any], call: _Call, known: Sequence[Spec],
        stream: _Stream,
    ) -> tuple[tuple[Tensor, ...], _Captured | None]:  # fmt: skip
        """Return the results of the first call, or the graph of the second."""
        specs = list(call.specs.values())
        tensors = stream.allocate([*specs, *known])
        inputs, outputs = tensors[: len(specs)], tensors[len(specs) :]
        _fill(call, given, inputs)
        placed = dict(zip(call.specs, inputs))
        arguments = [placed.get(name, given[name]) for name in given]
        if known:

            def work() -> None:
                _copy(outputs, results_of(overload(*arguments)))

            graph = stream.capture(work)
            stream.first_calls.pop(call.key, None)
            return (), _Captured(graph, inputs, outputs)
        results = results_of(overload(*arguments))
        found = [_spec(x) for x in results]
        stream.allocate([*specs, *found])  # room for the capture, which would resize later
        _put(stream.first_calls, call.key, found, MAX_FIRST_CALLS)
        first = "not a CUDA graph: these are the first of their shapes"
        record("launches", "one by one", first)
        return tuple(x.contiguous() for x in self._cut(overload, results, given)), None

    def _padded(self, overload: Any, call: Mapping[str, Any]) -> _Call:
        lengths = self._lengths(call)
        sizes = {name: (n, bucket(n)) for name, n in lengths.items()}
        specs: dict[str, Spec] = {}
        key: list[Hashable] = [overload, *_settings()]
        for name, x in call.items():
            if isinstance(x, Tensor):
                specs[name] = self._resized(name, tuple(x.shape), sizes), x.dtype
            elif name in lengths:
                specs[name] = (len(call["input"]),), torch.int64
            key.append(specs.get(name, x))
        return _Call(tuple(key), specs, lengths, self.logarithms(call))

    def _lengths(self, call: Mapping[str, Any]) -> dict[str, int]:
        """Return the longest length of each axis that the call has."""
        return {
            name: call[first].shape[axes[first]]
            for (name, axes), first in zip(self.axes.items(), self._firsts)
            if call[first] is not None
        }

    def _resized(
        self, name: str, shape: tuple[int, ...], sizes: dict[str, tuple[int, int]]
    ) -> tuple[int, ...]:
        """Return a tensor's shape with other sizes for the axes; those of size 1 are broadcast."""
        for which, (old, new) in sizes.items():
            axis = self.axes[which].get(name.removeprefix("grad_"))
            if axis is not None and len(shape) >= -axis and shape[axis] == old:
                i = len(shape) + axis
                shape = (*shape[:i], new, *shape[i + 1 :])
        return shape

    def _cut(
        self, overload: Any, results: Sequence[Tensor], call: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return results without the padding."""
        sizes = {k: (bucket(n), n) for k, n in self._lengths(call).items()}
        return [
            _first(x, self._resized(name, tuple(x.shape), sizes))
            for name, x in zip(_names(overload)[1], results)
        ]


def is_on_gpu(x: Tensor) -> bool:
    """Return whether launches on a tensor can be captured."""
    return x.is_cuda


@functools.cache
def _names(overload: Any) -> tuple[list[str], list[str]]:
    """Return the names of an operator's arguments and results."""
    schema = overload._schema
    return [x.name for x in schema.arguments], [x.name for x in schema.returns]


def _settings() -> tuple[Hashable, ...]:
    """Return the settings of PyTorch that change what is launched."""
    return torch.backends.cuda.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled()


def _first(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the first part of a tensor that has a shape."""
    for axis, size in enumerate(shape):
        if x.shape[axis] != size:
            x = x.narrow(axis, 0, size)
    return x


def _fill(call: _Call, given: Mapping[str, Any], inputs: list[Tensor]) -> None:
    """Copy a call's arguments to where a graph reads them."""
    sources, targets = [], []
    for (name, (shape, _)), target in zip(call.specs.items(), inputs):
        x = given[name]
        if name in call.lengths:
            if x is None:
                target.fill_(call.lengths[name])
            else:
                torch.clamp(x, max=call.lengths[name], out=target)
            continue
        if shape != x.shape:
            target.fill_(-math.inf if name in call.logarithms else 0)
            target = _first(target, x.shape)
        sources.append(x)
        targets.append(target)
    _copy(targets, sources)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors; those of one memory layout in one launch."""
    dense: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources):
        is_alike = target.dtype == source.dtype == targets[0].dtype
        if is_alike and target.is_contiguous() and source.is_contiguous():
            dense[0].append(target)
            dense[1].append(source)
        else:
            target.copy_(source)
    if dense[0]:
        torch._foreach_copy_(*dense)
