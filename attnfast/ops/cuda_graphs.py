"""Calls with many launches, replayed as CUDA graphs where their shapes repeat.

A recurrent layer that runs step by step has thousands of launches, and a GPU computes most of them
faster than the host can launch them. Captured as a CUDA graph they are one launch. A graph has
fixed shapes and addresses, so

- lengths are padded to *buckets*, eight in each octave (32, 36, 40, .., 60, 64, 72, ..), and the
  operator is given the lengths within them, which it does not exceed;
- arguments are copied into an *arena*, memory at fixed addresses, and results out of it. All graphs
  of a stream share one arena, because they run one after the other, and one pool for what they
  allocate.

The first call of a bucket runs as it is, in the arena too, so that its numbers are those of a
replay to the last bit; the second is captured.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import InputError, argument_message
from attnfast._utils.dispatch_log import record
from attnfast._utils.torch_private import has_dispatch_mode
from attnfast.ops.operators import results_of

#: The most graphs of a stream; the one that was not used for longest is dropped.
MOST_GRAPHS = 256
#: The alignment of tensors in an arena, in bytes: that of PyTorch's allocator.
ALIGNMENT = 512


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


def capture(
    work: Callable[[], None], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """Capture the launches of some work, on a stream and with memory from a pool of its own.

    PyTorch's caches are not emptied, as ``torch.cuda.graph`` empties them.
    """
    graph, stream = torch.cuda.CUDAGraph(), stream or torch.cuda.Stream()
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # such a capture is invalid
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(stream)
    return graph


class _Spec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _Spec:
        return cls(tuple(x.shape), x.dtype)

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Captured(NamedTuple):
    """A graph, with the arguments that it reads and the results that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Stream:
    """The graphs of a stream, and their memory."""

    def __init__(self, like: Tensor):
        self.lock, self.side = threading.Lock(), torch.cuda.Stream(like.device)
        self.arena = like.new_empty(0, dtype=torch.uint8)
        #: By the call's properties: its graph or, without one, its results.
        self.known: OrderedDict[Hashable, _Captured | list[_Spec]] = OrderedDict()
        self.resize(0)

    @torch.inference_mode(False)  # every mode may write to the arena
    def resize(self, size: int) -> None:
        """Drop all graphs and their memory, and allocate an arena of so many bytes."""
        for key, call in self.known.items():
            if isinstance(call, _Captured):
                self.known[key] = [_Spec.of(x) for x in call.outputs]
        self.pool = torch.cuda.graph_pool_handle()
        self.arena = self.arena.new_empty(size)

    @torch.inference_mode(False)
    def tensors(self, specs: Sequence[_Spec]) -> list[Tensor]:
        """Return tensors that begin with the arena, one after the other."""
        ends = [0]
        for spec in specs:
            ends.append(-(-(ends[-1] + spec.bytes) // ALIGNMENT) * ALIGNMENT)
        if ends[-1] > len(self.arena):
            self.resize(1 << (ends[-1] - 1).bit_length())
        return [
            self.arena[first : first + spec.bytes].view(spec.dtype).view(spec.shape)
            for first, spec in zip(ends, specs)
        ]

    def remember(self, key: Hashable, call: _Captured | list[_Spec]) -> None:
        """Make a call the one that was used last."""
        self.known[key] = call
        self.known.move_to_end(key)
        if len(self.known) > MOST_GRAPHS:
            self.known.popitem(last=False)


class _Call(NamedTuple):
    """A call whose lengths are padded to buckets.

    Attributes:
        specs: of the tensors that a graph reads, by the argument's name.
        numbers: the other arguments.
        lengths: for each argument that has lengths, the length that they may not exceed.
        logarithms: the names of arguments that are padded with −inf.
    """

    specs: dict[str, _Spec]
    numbers: dict[str, Any]
    lengths: dict[str, int]
    logarithms: Collection[str]


class Graphs:
    """The CUDA graphs of an operator and its backward.

    Args:
        axes: for each argument that has lengths ``[B]``, such as ``target_lengths``: the axis that
            they limit, counted from the last, of every argument and result that has it. The first
            is an argument whose size is the longest length. A gradient has the axes of its tensor.
        has_many_launches: whether a call, its arguments by name, is to be captured.
        logarithms: the names of the arguments of a call that are logarithms of what is padded with
            zeros.
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
        self._streams: dict[Hashable, _Stream] = {}

    def run(self, overload: Any, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """Run an operator on a GPU, with a graph if it has one for the call."""
        call = dict(zip([x.name for x in overload._schema.arguments], arguments))
        reason = self._reason_against(call)
        if reason is None:
            stream = self._stream_of(call["input"])
            with stream.lock:
                try:
                    results = self._run(overload, call, stream)
                except torch.OutOfMemoryError:
                    stream.resize(0)
                    results = None
            if results is not None:
                return results
            reason = self.failure or "there is too little memory"
        if reason:
            record("launches", "one by one", f"not a CUDA graph: {reason}")
        return results_of(overload(*arguments))

    def _reason_against(self, call: Mapping[str, Any]) -> str | None:
        """Return why a call is not captured, "" if it has few launches, or None."""
        if not is_on_gpu(call["input"]) or has_dispatch_mode():
            return ""
        firsts = [call[name] for name in self._firsts]
        if any(x is not None and not x.numel() for x in firsts) or not self.has_many_launches(call):
            return ""
        if not are_enabled():
            return "ATTNFAST_CUDA_GRAPHS=0"
        if torch.cuda.is_current_stream_capturing():
            return "a graph is being captured that contains them"
        return self.failure

    def _stream_of(self, x: Tensor) -> _Stream:
        key = x.device, torch.cuda.current_stream(x.device).cuda_stream
        if key not in self._streams:
            self._streams[key] = _Stream(x)
        return self._streams[key]

    def _run(
        self, overload: Any, given: Mapping[str, Any], stream: _Stream
    ) -> tuple[Tensor, ...] | None:
        """Run a call in the arena, capture it or replay it; return None if a capture fails."""
        call = self._padded(given)
        key = (overload, *call.specs.items(), *call.numbers.items())
        known = stream.known.get(key)
        if isinstance(known, _Captured):
            _fill(call, given, known.inputs)
        else:
            specs = [*call.specs.values(), *(known or [])]
            tensors = stream.tensors(specs)
            inputs, outputs = tensors[: len(call.specs)], tensors[len(call.specs) :]
            _fill(call, given, inputs)
            placed = dict(zip(call.specs, inputs))
            arguments = [placed.get(name, given[name]) for name in given]
            if known is None:
                results = results_of(overload(*arguments))
                known = [_Spec.of(x) for x in results]
                stream.tensors([*specs, *known])  # room for the capture, which would resize later
                stream.remember(key, known)
                first = "not a CUDA graph: these are the first of their shapes"
                record("launches", "one by one", first)
                return tuple(x.contiguous() for x in self._cut(overload, results, given))
            graph = self._capture(overload, arguments, outputs, stream)
            if graph is None:
                return None
            known = _Captured(graph, inputs, outputs)
        known.graph.replay()
        stream.remember(key, known)
        record("launches", "a CUDA graph")
        cut = self._cut(overload, known.outputs, given)
        copies = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in cut]
        _copy(copies, cut)
        return tuple(copies)

    def _capture(
        self, overload: Any, arguments: list[Any], outputs: list[Tensor], stream: _Stream
    ) -> torch.cuda.CUDAGraph | None:
        """Return the graph of a call; None if that fails."""

        def work() -> None:
            _copy(outputs, results_of(overload(*arguments)))

        try:
            return capture(work, stream.side, stream.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.failure = f"the capture failed: {str(error).splitlines()[0]}"
            warnings.warn(
                f"attnfast uses no CUDA graphs, {self.failure}; "
                "please report it, with the output of `attnfast check`",
                stacklevel=2,
            )
            return None

    def _padded(self, call: Mapping[str, Any]) -> _Call:
        lengths = self._lengths(call)
        sizes = {name: (n, bucket(n)) for name, n in lengths.items()}
        specs, numbers = {}, {}
        for name, x in call.items():
            if isinstance(x, Tensor):
                specs[name] = _Spec(self._resized(name, x.shape, sizes), x.dtype)
            elif name in lengths:
                specs[name] = _Spec((len(call["input"]),), torch.int64)
            else:
                numbers[name] = x
        return _Call(specs, numbers, lengths, self.logarithms(call))

    def _lengths(self, call: Mapping[str, Any]) -> dict[str, int]:
        """Return the longest length of each axis that the call has."""
        return {
            name: call[first].shape[axes[first]]
            for (name, axes), first in zip(self.axes.items(), self._firsts)
            if call[first] is not None
        }

    def _resized(
        self, name: str, shape: Sequence[int], sizes: dict[str, tuple[int, int]]
    ) -> tuple[int, ...]:
        """Return a tensor's shape with other sizes for the axes; those of size 1 are broadcast."""
        result = list(shape)
        for which, (old, new) in sizes.items():
            axis = self.axes[which].get(name.removeprefix("grad_"))
            if axis is not None and len(shape) >= -axis and shape[axis] == old:
                result[axis] = new
        return tuple(result)

    def _cut(
        self, overload: Any, results: Sequence[Tensor], call: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return results without the padding."""
        sizes = {k: (bucket(n), n) for k, n in self._lengths(call).items()}
        names = [x.name for x in overload._schema.returns]
        return [_first(x, self._resized(name, x.shape, sizes)) for name, x in zip(names, results)]


def is_on_gpu(x: Tensor) -> bool:
    """Return whether launches on a tensor can be captured."""
    return x.is_cuda


def _first(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first part of a tensor that has a shape."""
    for axis, size in enumerate(shape):
        x = x.narrow(axis, 0, size)
    return x


def _fill(call: _Call, given: Mapping[str, Any], inputs: list[Tensor]) -> None:
    """Copy a call's arguments to where a graph reads them."""
    sources, targets = [], []
    for (name, spec), target in zip(call.specs.items(), inputs):
        x = given[name]
        if name in call.lengths:
            if x is None:
                target.fill_(call.lengths[name])
            else:
                torch.clamp(x, max=call.lengths[name], out=target)
            continue
        if spec.shape != tuple(x.shape):
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
