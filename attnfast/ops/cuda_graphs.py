"""Calls with many launches, replayed as CUDA graphs where their shapes repeat.

A recurrent layer that runs step by step has thousands of launches, and a GPU computes most of them
faster than the host can launch them. Captured as a CUDA graph they are one launch. A graph has
fixed shapes and addresses, so

- lengths are padded to *buckets*, eight in each octave (32, 36, 40, .., 60, 64, 72, ..), and the
  operator gets lengths that do not exceed the original ones;
- arguments are copied into an *arena*, memory at fixed addresses, and results out of it. All graphs
  of a stream share one arena, because they run one after the other, and one pool for what they
  allocate.

The first call of a bucket runs without a graph, but with its padded arguments in the arena, so that
its results have the same bits as those of a replay. The second call is captured.
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
from attnfast.ops.operators import CHECKS, results_of

#: The largest number of graphs of a stream, of first calls that it remembers, and of streams of a
#: device. The least recently used is dropped.
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
    """CUDA invalidated a capture."""


def capture(
    work: Callable[[], None], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """Capture the launches of some work, on a stream and with memory from a pool of its own.

    PyTorch's caches are not emptied, as ``torch.cuda.graph`` empties them.

    Raises:
        InvalidCaptureError: the capture is invalid. In a valid one, exceptions of the work are
            raised unchanged.
        torch.OutOfMemoryError: there is too little memory for the graph itself.
    """
    graph, stream = torch.cuda.CUDAGraph(), stream or torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    with torch.cuda.device(stream.device):
        current = torch.cuda.current_stream()
        torch.cuda.current_blas_handle()  # a thread's first one cannot be created in a capture
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")
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
    """End a capture; raise if it is invalid, with PyTorch's state restored."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError, AttributeError):
            end_allocation_to_pool(stream.device, pool)
        reset = torch.cuda.CUDAGraph()  # the end of a valid capture resets the generator
        with contextlib.suppress(RuntimeError):
            reset.capture_begin(capture_error_mode="thread_local")
            try:
                torch.zeros(1, device=stream.device)
            finally:
                reset.capture_end()
        if cause is not None and not isinstance(cause, Exception):  # Ctrl-C
            return
        message = str(cause or error) or "no message"
        if "out of memory" in f"{error} {cause}":
            raise torch.OutOfMemoryError(message) from error
        raise InvalidCaptureError(message) from error


# ---- the graphs of a stream ---------------------------------------------------------------------


class _GraphEntry(NamedTuple):
    """A graph, with the arguments that it reads and the results that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Stream:
    """The graphs of a stream, and their memory."""

    def __init__(self, stream: torch.cuda.Stream, like: Tensor):
        self.stream, self.lock = stream, threading.Lock()
        self.arena = like.new_empty(0, dtype=torch.uint8)
        self.graphs: OrderedDict[Hashable, _GraphEntry] = OrderedDict()
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
        """Capture work; if memory is short, a second time with PyTorch's cache emptied."""
        self._renew_pool()
        try:
            return capture(work, self.side, self.pool)
        except InvalidCaptureError:
            raise
        except RuntimeError:  # out of memory: a capture does not free what is cached
            torch.cuda.empty_cache()
            self._renew_pool()
            return capture(work, self.side, self.pool)

    def _renew_pool(self) -> None:
        """Use a new pool if there are no graphs: a pool ends with its last one.

        The stream of the captures is new, too, because cuBLAS's workspace for it is in the pool.
        """
        if not self.graphs:
            self.side = torch.cuda.Stream(self.arena.device)
            self.pool = torch.cuda.graph_pool_handle()


def _spec(x: Tensor) -> Spec:
    return tuple(x.shape), x.dtype


def _insert(entries: OrderedDict[Hashable, T], key: Hashable, value: T, limit: int) -> T | None:
    """Make an entry the most recently used one; return the one that is dropped for it, or None."""
    entries[key] = value
    entries.move_to_end(key)
    return entries.popitem(last=False)[1] if len(entries) > limit else None


# ---- the calls of an operator -------------------------------------------------------------------


class _PaddedCall(NamedTuple):
    """A call whose lengths are padded to buckets.

    Attributes:
        key: identifies the graph that can replay the call.
        specs: the shape and dtype of each tensor that the graph reads, by argument.
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
        has_many_launches: returns whether a call, its arguments by name, is to be captured.
        logarithms: returns the names of a call's arguments that are logarithms; they are padded
            with −inf, the others with zeros.
    """

    def __init__(
        self,
        axes: dict[str, dict[str, int]],
        has_many_launches: Callable[[Mapping[str, Any]], bool],
        logarithms: Callable[[Mapping[str, Any]], Collection[str]],
    ):
        self.axes, self.has_many_launches, self.logarithms = axes, has_many_launches, logarithms
        #: The arguments whose sizes are the longest lengths.
        self._length_sources = [next(iter(of)) for of in axes.values()]
        #: Why a capture was invalid; after it nothing is captured.
        self.failure: str | None = None
        self._streams: dict[torch.device, OrderedDict[Hashable, _Stream]] = {}
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
        """Return the reason not to capture a call, "" if it needs no report; None means capture."""
        x = call["input"]
        if not is_on_gpu(x) or has_dispatch_mode() or torch.jit.is_tracing():
            return ""
        sources = [call[name] for name in self._length_sources]
        is_empty = any(source is not None and not source.numel() for source in sources)
        if is_empty or not self.has_many_launches(call):
            return ""
        if not are_enabled():
            return "ATTNFAST_CUDA_GRAPHS=0"
        tensors = [y for y in call.values() if isinstance(y, Tensor)]
        if not all(type(y) in PLAIN_TENSORS and y.device == x.device for y in tensors):
            return "an argument is on another device, or of a subclass of Tensor"
        if (allocator := torch.cuda.get_allocator_backend()) != "native":
            return f"PyTorch's allocator is {allocator}, not native"
        with torch.cuda.device(x.device):
            if torch.cuda.is_current_stream_capturing():
                return "a graph is being captured that contains them"
        return self.failure

    def _stream_of(self, x: Tensor) -> _Stream:
        current = torch.cuda.current_stream(x.device)
        with self._lock:
            streams = self._streams.setdefault(x.device, OrderedDict())
            stream = streams.get(current.cuda_stream) or _Stream(current, x)
            dropped = _insert(streams, current.cuda_stream, stream, MAX_STREAMS)
        if dropped is not None:
            with dropped.lock:
                dropped.resize(0)
        return stream

    def _run(
        self, overload: Any, given: Mapping[str, Any], stream: _Stream
    ) -> tuple[tuple[Tensor, ...] | None, str | None]:
        """Return the results of a call in the arena; or None, and why it must run outside."""
        call = self._padded(overload, given)
        if stream.first_calls.get(call.key, ()) is None:
            return None, "there was too little memory for one"
        entry = stream.graphs.get(call.key)
        try:
            if entry is not None:
                _fill(call, given, entry.inputs)
            elif call.key in stream.first_calls:
                entry = self._capture(overload, given, call, stream)
            else:
                results = self._run_first(overload, given, call, stream)
                self._make_room(call, results, stream)
                first = "not a CUDA graph: these are the first of their shapes"
                record("launches", "one by one", first)
                return self._unpad(overload, results, given, is_shared=False), None
            entry.graph.replay()
        except InvalidCaptureError as error:
            self.failure = f"the capture failed: {str(error).splitlines()[0]}"
            stream.resize(0)
            warnings.warn(
                f"attnfast uses no CUDA graphs, {self.failure}; "
                "please report it, with the output of `attnfast check`",
                stacklevel=2,
            )
            return None, self.failure
        except RuntimeError:
            name = overload._schema.name.rpartition("::")[2]
            CHECKS[name](*given.values())  # raises if the arguments are wrong
            stream.resize(0)
            _insert(stream.first_calls, call.key, None, MAX_FIRST_CALLS)
            return None, "there is too little memory for one"
        _insert(stream.graphs, call.key, entry, MAX_GRAPHS)
        record("launches", "a CUDA graph")
        return self._unpad(overload, entry.outputs, given, is_shared=True), None

    def _place(
        self, given: Mapping[str, Any], call: _PaddedCall, results: Sequence[Spec], stream: _Stream
    ) -> tuple[list[Any], list[Tensor], list[Tensor]]:
        """Copy a call's arguments into the arena; return all of them, the copies, and results."""
        specs = list(call.specs.values())
        tensors = stream.allocate([*specs, *results])
        inputs, outputs = tensors[: len(specs)], tensors[len(specs) :]
        _fill(call, given, inputs)
        placed = dict(zip(call.specs, inputs))
        return [placed.get(name, given[name]) for name in given], inputs, outputs

    def _run_first(
        self, overload: Any, given: Mapping[str, Any], call: _PaddedCall, stream: _Stream
    ) -> tuple[Tensor, ...]:
        """Return the padded results of the first call."""
        arguments, _, _ = self._place(given, call, (), stream)
        return results_of(overload(*arguments))

    def _make_room(self, call: _PaddedCall, results: tuple[Tensor, ...], stream: _Stream) -> None:
        """Remember a first call; make room for its capture, which would drop other graphs later."""
        specs = [_spec(x) for x in results]
        with contextlib.suppress(RuntimeError):
            stream.allocate([*call.specs.values(), *specs])
        _insert(stream.first_calls, call.key, specs, MAX_FIRST_CALLS)

    def _capture(
        self, overload: Any, given: Mapping[str, Any], call: _PaddedCall, stream: _Stream
    ) -> _GraphEntry:
        """Return the graph of a second call."""
        results = stream.first_calls[call.key] or ()
        arguments, inputs, outputs = self._place(given, call, results, stream)

        def work() -> None:
            _copy(outputs, results_of(overload(*arguments)))

        graph = stream.capture(work)
        stream.first_calls.pop(call.key, None)
        return _GraphEntry(graph, inputs, outputs)

    def _padded(self, overload: Any, call: Mapping[str, Any]) -> _PaddedCall:
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
        return _PaddedCall(tuple(key), specs, lengths, self.logarithms(call))

    def _lengths(self, call: Mapping[str, Any]) -> dict[str, int]:
        """Return the longest length of each axis that the call has."""
        return {
            name: call[first].shape[axes[first]]
            for (name, axes), first in zip(self.axes.items(), self._length_sources)
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

    def _unpad(
        self, overload: Any, results: Sequence[Tensor], call: Mapping[str, Any], is_shared: bool
    ) -> tuple[Tensor, ...]:
        """Return results without the padding; as copies if they have any or a graph shares them."""
        sizes = {k: (bucket(n), n) for k, n in self._lengths(call).items()}
        shapes = [
            self._resized(name, tuple(x.shape), sizes)
            for name, x in zip(_names(overload)[1], results)
        ]
        cut = [_narrow(x, shape) for x, shape in zip(results, shapes)]
        copied = [y for x, y in zip(results, cut) if is_shared or y is not x]
        copies = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in copied]
        _copy(copies, copied)
        fresh = iter(copies)
        return tuple(next(fresh) if is_shared or y is not x else x for x, y in zip(results, cut))


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
    blas = torch.backends.cuda.preferred_blas_library()
    precision = torch.backends.cuda.matmul.fp32_precision
    return blas, precision, torch.are_deterministic_algorithms_enabled()


def _narrow(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the first part of a tensor that has a shape."""
    for axis, size in enumerate(shape):
        if x.shape[axis] != size:
            x = x.narrow(axis, 0, size)
    return x


def _fill(call: _PaddedCall, given: Mapping[str, Any], inputs: list[Tensor]) -> None:
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
            target = _narrow(target, x.shape)
        sources.append(x)
        targets.append(target)
    _copy(targets, sources)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors; contiguous ones of one dtype together."""
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
