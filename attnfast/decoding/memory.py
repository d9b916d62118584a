"""Prepared memory: the keys and values that a decoder attends to, step after step.

A :class:`Memory` caches the tensors that a decoder computes once per source. Each step attends to
it with one query; :mod:`attnfast.decoding.deferred` computes the gradients of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnfast._utils.checks import (
    check_flag,
    check_like,
    check_tensor,
    describe,
    raise_type_error,
    raise_value_error,
    shape_of,
)
from attnfast._utils.dispatch_log import is_recording, record
from attnfast._utils.torch_private import has_dispatch_mode, has_saved_tensor_hooks
from attnfast.decoding.deferred import HistoryStep, KeyValues, SharedKeys, Step
from attnfast.decoding.growable import GrowableBuffer, append_rows, copy_reason
from attnfast.functional import coverage_call, coverage_output, filters_of, run_coverage
from attnfast.ops import dispatch, lowering
from attnfast.ops.arguments import (
    as_returned,
    autocast,
    autocast_call,
    check_activation,
    check_scale,
    fold_scale,
    length_mask,
    raise_on_tangents,
)
from attnfast.ops.attention import AttentionInputs, check
from attnfast.ops.backends import FLOATS, select_backend
from attnfast.ops.coverage import COVERAGE, CoverageInputs, CoverageOutputs
from attnfast.ops.lowering import SpanArguments, lower
from attnfast.ops.operators import is_tracing, unchecked
from attnfast.ops.span import check_form, check_span
from attnfast.outputs import (
    AttentionOutput,
    CoverageOutput,
    attention_result,
)
from attnfast.spans import Position, Span, Spans

__all__ = ["Memory", "attend", "attend_with_history", "prepare"]


class Memory(NamedTuple):
    """An encoded source that :func:`attnfast.prepare` makes and :func:`attnfast.attend` uses.

    ``key [B, (H,) Tk, A]``, projected, ``value [B, (H,) Tk, Dv]``, ``lengths [B]`` or None,
    ``mask [B, (1,) 1, Tk]`` or None; ``score_vector [A]`` or ``[H, A]`` of the additive score, None
    for the dot score; ``backend``, the requested one, or None; ``fertility [B, Tk]`` for coverage,
    or None; ``score``, ``"dot"`` or the additive score's activation; ``shared_keys``, the state
    that decoder steps share to compute the gradients of keys and values at once, or None;
    ``buffers``, the storage of key and value if the memory grows. Attending raises RuntimeError if
    key, value, lengths, score_vector or mask was modified in place (detected by version counters;
    writes through ``.data`` are not detected).

    A memory pickles as its tensors do: keys lose their autograd graph. Two threads may read the
    same memory, but not append to it.

    Example:
        >>> key = torch.randn(2, 5, 8)
        >>> memory = attnfast.decoding.Memory(key, key, torch.tensor([5, 3]))
        >>> attnfast.attend(torch.randn(2, 1, 8), memory)[0].shape
        torch.Size([2, 1, 8])
    """

    key: Tensor
    value: Tensor
    lengths: Tensor | None = None
    mask: Tensor | None = None
    score_vector: Tensor | None = None
    backend: str | None = None
    shared_keys: SharedKeys | None = None
    fertility: Tensor | None = None
    score: str = "dot"
    buffers: tuple[GrowableBuffer | None, GrowableBuffer | None] = (None, None)

    def index_select(self, index: Tensor) -> Memory:
        """Return the memory of the sequences ``index``, reordered or repeated for beam search."""
        names = ("key", "value", "lengths", "mask", "fertility")
        tensors = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.mask is not None and len(self.mask) != len(self.key):
            del tensors["mask"]  # one for all sequences
        chosen = {name: x.index_select(0, index) for name, x in tensors.items()}
        memory = self._replace(**chosen, shared_keys=None, buffers=(None, None))
        shared = self.shared_keys
        return memory if shared is None else memory._with_shared_keys(shared.backend)

    def append(self, key: Tensor, value: Tensor) -> Memory:
        """Return the memory with more keys and values appended; this one is not modified.

        The newest of a chain of memories grows in place, in storage that doubles; appending to an
        older one copies it. Appended keys are visible to every sequence, so ``lengths`` is
        converted to a mask. Over a memory that has grown, each step's backward computes the
        gradients of keys and values, instead of one pass at the end.

        Args:
            key: ``[B, (H,) A]`` for one key, ``[B, (H,) n, A]`` for several.
            value: ``[B, (H,) Dv]`` or ``[B, (H,) n, Dv]``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        new = self._new_rows(key, value)
        _usable(self.shared_keys)
        mask = self._whole_mask()
        if mask is not None:
            mask = pad(mask, (0, new[0].shape[-2]), value=True)
        both = zip((self.key, self.value), new)
        rows: list[tuple[Tensor, GrowableBuffer | None]]
        if is_tracing() or has_dispatch_mode():
            rows = [(torch.cat(x, -2), None) for x in both]
        else:
            if is_recording():
                reason = copy_reason(self.buffers[0], self.key, new[0])
                record("append", "a copy of all keys" if reason else "in place", reason)
            rows = [append_rows(buffer, *x) for buffer, x in zip(self.buffers, both)]
        (key, key_buffer), (value, value_buffer) = rows
        grown = self._replace(
            key=key,
            value=value,
            lengths=None,
            mask=mask,
            shared_keys=None,
            buffers=(key_buffer, value_buffer),
        )
        return grown if is_tracing() else grown._with_shared_keys(grown._chosen())

    def _new_rows(self, key: Any, value: Any) -> list[Tensor]:
        """Return key and value as ``[B, (H,) n, ·]``; raise if they cannot be appended."""
        if self.fertility is not None:
            raise_value_error(
                "memory", "without fertility to append keys", describe(self.fertility)
            )
        new: list[Tensor] = []
        for name, x, like in (("key", key, self.key), ("value", value, self.value)):
            check_tensor(name, x)
            *lead, _, features = like.shape
            shape, one = list(x.shape), [*lead, features]
            several = [*lead, new[0].shape[-2] if new else "n", features]
            x = x.unsqueeze(-2) if shape == one else x
            if x.dim() != like.dim() or any(a != b for a, b in zip(x.shape, several) if b != "n"):
                fit = "the memory and key" if new else "the memory"
                raise_value_error(name, f"{one} or {shape_of(*several)} to fit {fit}", shape)
            check_like(name, x, like, "the memory's")
            new.append(x.to(like.dtype))
        return new

    def _whole_mask(self) -> Tensor | None:
        """Return the mask of all keys, False beyond lengths, or None."""
        mask, keys = self.mask, self.key.shape[-2]
        if self.lengths is not None:
            seen = length_mask(self.lengths.view(-1, *[1] * (self.key.dim() - 2)), keys)
            mask = seen if mask is None else seen & mask
        return None if mask is None else mask.expand(*mask.shape[:-1], keys)

    def _call(
        self,
        query: Tensor,
        scale: float,
        need_weights: bool = False,
        need_statistics: bool = False,
        key_exponentials: Tensor | None = None,
        bias: Tensor | None = None,
        normalisation: str = "softmax",
    ) -> AttentionInputs:
        """Return the call of a query."""
        return AttentionInputs(
            query, self.key, self.value, self.score_vector, bias, self.mask, self.lengths, None, 0,
            key_exponentials, scale, self.score, normalisation, need_statistics, need_weights,
        )  # fmt: skip

    def _chosen(self) -> str:
        """Return the backend of steps."""
        like, score = self.key, self.score
        return select_backend(self.backend, like.device, like.dtype, step=True, score=score)

    def _with_shared_keys(self, backend: str, deferred: bool = False) -> Memory:
        shared = SharedKeys(self._common(), backend, deferred, self.mask, self.buffers[0])
        return self._replace(shared_keys=shared)

    def __reduce__(self) -> tuple[object, ...]:
        alone = self._replace(shared_keys=None, buffers=(None, None))
        if self.buffers[0] is not None:  # not the whole buffer
            alone = alone._replace(key=self.key.clone(), value=self.value.clone())
        return _restored, (self.shared_keys is not None, *alone)

    def _common(self) -> KeyValues:
        """Return the keys, values and terms that all steps share."""
        return unchecked(
            KeyValues,
            (self.key, self.value, self.lengths, self.score_vector, self.score, self.backend),
        )


def _restored(has_shared_keys: bool, *fields: Any) -> Memory:
    """Return an unpickled memory."""
    memory = Memory(*fields)
    return memory._with_shared_keys(memory._chosen()) if has_shared_keys else memory


def check_memory(memory: object) -> None:
    """Raise unless ``memory`` is a result of :func:`attnfast.prepare`; encoder states are not one.

    Raises:
        TypeError: ``memory`` is not a :class:`Memory` of tensors.

    Example:
        >>> attnfast.decoding.check_memory(torch.randn(2, 5, 8))  # the encoder states
        Traceback (most recent call last):
        TypeError: memory must be a result of prepare(...), got a Tensor of torch.float32 [2, 5, 8]
    """
    if (
        not isinstance(memory, Memory)
        or not isinstance(memory.key, Tensor)
        or not isinstance(memory.value, Tensor)
    ):
        raise_type_error("memory", "a result of prepare(...)", describe(memory))


def _check_query(query: Any, memory: Memory) -> None:
    """Raise unless the query fits the memory."""
    check_tensor("query", query)
    *lead, _, features = memory.key.shape
    shape = list(query.shape)
    if len(shape) != memory.key.dim() or shape[:-2] != lead or shape[-1] != features:
        raise_value_error("query", f"{[*lead, 'Tq', features]} to fit the memory", shape)
    check_like("query", query, memory.key, "the memory's")


def _usable(shared: SharedKeys | None) -> SharedKeys | None:
    """Return ``shared`` after checking that its tensors are unchanged; None while tracing."""
    if shared is None or is_tracing():
        return None
    shared.check_unchanged()
    return shared


def _record_deferral(
    query: Any, memory: Memory, steady: bool = True, normalisation: str = "softmax"
) -> None:
    """Record when a step's gradients of keys, values and score vector are computed, and why."""
    inputs = memory.key, memory.value, memory.score_vector
    needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if not needed or not isinstance(query, Tensor) or query.shape[-2:-1] != (1,):
        return
    shared = memory.shared_keys
    if shared is None:
        reason: str | None = "the memory was prepared in a compiled graph"
    elif shared.backend == "reference":
        reason = "the reference backend runs the steps"
    elif shared.token is None:
        reason = "the memory was prepared without gradients, appended to, or reordered"
    elif not shared.matches(query, memory._common()):
        reason = "the query's dtype is not the keys', or the memory's tensors were replaced"
    elif not dispatch.supports_normalisation(normalisation, shared.backend):
        reason = f"{shared.backend} does not compute {normalisation}"
    elif not steady:
        reason = "the span has a stride, or there is one for each head"
    elif has_saved_tensor_hooks():
        reason = "saved-tensor hooks are active, as in a checkpoint"
    else:
        reason = None if shared.defers() else "a backward is running, as in a checkpoint"
    when = "at every step" if reason else "once, after the backward of all steps"
    record("gradients of keys", when, reason)


def _attend_once(
    query: Tensor,
    memory: Memory,
    scale: float,
    within: SpanArguments | None,
    need_weights: bool | str,
    need_statistics: bool,
    bias: Tensor | None,
    normalisation: str,
) -> AttentionOutput:
    """Attend with one query through the memory's steps, within a span if one is given."""
    shared: Any = memory.shared_keys
    defers = shared.defers() and dispatch.supports_normalisation(normalisation, shared.backend)
    weights_too, lowered = defers or bool(need_weights), None
    exponentials = shared.key_exponentials()
    call = memory._call(
        query, scale, weights_too, need_statistics, exponentials, bias, normalisation
    )
    if within is not None:
        lowered = lower(call, within, need_weights)
        call = lowered.call
    if defers:
        raise_on_tangents(call)
        context, weights, log_sum_exp, statistics = Step.apply(
            query, shared.token, call.bias, call, shared, bool(need_weights)
        )
        weights = as_returned(weights, query.dtype, bool(need_weights))
        result = attention_result(context, weights, log_sum_exp, statistics)
    else:
        result = dispatch.run_attention(call, shared.backend)
    return result if lowered is None else lowered.restore(result, need_weights)


def prepare(
    key: Tensor,
    value: Tensor,
    score_vector: Tensor | None = None,
    *,
    activation: str = "tanh",
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> Memory:
    """Make a memory of projected keys and of values, once per source.

    Args:
        key: ``[B, Tk, A]`` or ``[B, H, Tk, A]``, float32, float64, bfloat16 or float16.
        value: ``[B, Tk, Dv]`` or ``[B, H, Tk, Dv]``.
        score_vector: ``[A]`` or ``[H, A]`` for the additive score; None for the dot score.
        activation: of the additive score, as in :func:`attnfast.additive_attention`.
        lengths: ``[B]``: keys at ``lengths[b]`` and beyond are hidden.
        mask: boolean ``[B, Tk]`` or ``[B, (H or 1,) 1, Tk]``, True where a key may be attended to.
        backend: as in :func:`attnfast.additive_attention`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: the requested backend cannot run.

    As with any tensor that several losses share, all but the last of several backward passes over
    one memory need ``retain_graph=True``.

    Example:
        >>> memory = attnfast.prepare(torch.randn(2, 5, 8), torch.randn(2, 5, 6), torch.randn(8))
        >>> context, _ = attnfast.attend(torch.randn(2, 1, 8), memory)  # at every step
        >>> context.shape
        torch.Size([2, 1, 6])
    """
    key, value, score_vector = autocast(key, value, score_vector)
    check_tensor("key", key)
    if key.dtype not in FLOATS:
        raise_value_error("key", "float32, float64, bfloat16 or float16", key.dtype)
    if key.dim() not in (3, 4):
        raise_value_error("key", "[B, Tk, A] or [B, H, Tk, A]", list(key.shape))
    for name, x in (("value", value), ("score_vector", score_vector)):
        if x is not None or name == "value":
            check_tensor(name, x)
            check_like(name, x, key, "the key's")
    if mask is not None:
        check_tensor("mask", mask)
        if mask.dim() == 2:
            rows = key.shape[0], key.shape[-2]
            if any(a not in (1, b) for a, b in zip(mask.shape, rows)):
                expected = f"{list(rows)}, or 1 instead of a size, to fit key"
                raise_value_error("mask", expected, list(mask.shape))
            mask = mask[:, None] if key.dim() == 3 else mask[:, None, None]
    one = key.new_empty((*key.shape[:-2], 1, key.shape[-1]))  # a query that fits
    activation = check_activation(activation)
    score = "dot" if score_vector is None else activation
    check(AttentionInputs(one, key, value, score_vector, None, mask, lengths, score=score))
    lengths = None if lengths is None else lengths.long()
    memory = Memory(key, value, lengths, mask, score_vector, backend, score=score)
    if torch.compiler.is_compiling():
        return memory
    chosen = memory._chosen()
    deferred = (
        chosen != "reference"
        and torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (key, value, score_vector))
    )
    return memory._with_shared_keys(chosen, deferred)


@overload
def attend(
    query: Tensor, memory: Memory, *, scale: float = ..., bias: Tensor | None = ...,
    span: Span | None = ..., position: Position = ..., sigma: float | Tensor | None = ...,
    normalisation: str = ..., need_weights: bool | str = ..., need_statistics: bool = ...,
) -> AttentionOutput: ...  # fmt: skip


@overload
def attend(
    query: Tensor, memory: Memory, *, scale: float = ..., bias: Tensor | None = ...,
    span: Sequence[Span], position: Position = ..., sigma: float | Tensor | None = ...,
    normalisation: str = ..., need_weights: bool | str = ..., need_statistics: bool = ...,
) -> AttentionOutput[Tensor | list[Tensor]]: ...  # fmt: skip


def attend(
    query: Tensor,
    memory: Memory,
    *,
    scale: float = 1.0,
    bias: Tensor | None = None,
    span: Spans = None,
    position: Position = None,
    sigma: float | Tensor | None = None,
    normalisation: str = "softmax",
    need_weights: bool | str = False,
    need_statistics: bool = False,
) -> AttentionOutput[Tensor | list[Tensor]]:
    """Attend to a memory with one query per sequence, or with many.

    Args:
        query: ``[B, Tq, A]`` or ``[B, H, Tq, A]``, with the memory's dtype and device.
        scale: multiplies the score.
        bias: added to it, with gradient: ``[B, (H,) Tq, Tk]``, or 1 for a size.
        span, position, sigma, normalisation: as in :func:`attnfast.additive_attention`.
        need_weights, need_statistics: return weights or statistics too, as in
            :func:`attnfast.additive_attention`.

    Returns:
        ``context [B, (H,) Tq, Dv]`` and ``weights [B, (H,) Tq, Tk]`` or None, an
        :class:`attnfast.AttentionOutput` as from :func:`attnfast.additive_attention`.

    With one query the gradients of keys, values and score vector are computed for all such calls at
    once, at the end of a backward; second derivatives and forward mode raise.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: a tensor of the memory was modified in place, or the requested backend cannot
            run this call.

    Example:
        >>> key = torch.randn(2, 5, 8)
        >>> memory = attnfast.prepare(key, key, lengths=torch.tensor([5, 3]))
        >>> context, weights = attnfast.attend(torch.randn(2, 1, 8), memory, need_weights=True)
        >>> weights.shape
        torch.Size([2, 1, 5])
    """
    check_scale(scale)
    check_memory(memory)
    (query,) = autocast(query)
    plain = span is None and position is None and sigma is None
    plain = plain and not isinstance(need_weights, str)
    within = None if plain else SpanArguments(Span() if span is None else span, position, sigma)
    check_form(need_weights)
    need_statistics = check_flag("need_statistics", need_statistics)
    shared = _usable(memory.shared_keys)
    try:
        if within is not None:
            check(memory._call(query, scale, bias=bias, normalisation=normalisation))
            check_span(query, memory.key, span, position, sigma, need_weights)
        steady = within is None or (isinstance(within.span, Span) and within.span.stride == 1)
        recording = is_recording()
        if recording:
            _record_deferral(query, memory, steady, normalisation)
        if steady and shared is not None and shared.matches(query, memory._common()):
            if recording:
                record("attention", shared.backend)  # chosen when the memory was prepared
            return _attend_once(
                query, memory, scale, within, need_weights, need_statistics, bias, normalisation
            )
        call = memory._call(
            query, scale, bool(need_weights), need_statistics, None, bias, normalisation
        )
        call = autocast_call(call)
        like = query.device, query.dtype
        backend = select_backend(memory.backend, *like, step=True, score=call.score)
        if backend != "reference":
            call = fold_scale(call)
        if within is None:
            return dispatch.run_attention(call, backend)
        return lowering.run_within(within, call, need_weights, backend)
    except Exception:
        _check_query(query, memory)
        check(memory._call(query, scale, bias=bias, normalisation=normalisation))
        raise


class HistoryTerms(TypedDict, total=False):
    """Arguments of :func:`attend_with_history` that continue a history or add to the scores."""

    penalty: float | Tensor | None
    coverage_weight: Tensor | None
    filters: Tensor | None
    channels: str
    projection: Tensor | None
    fertility: Tensor | None
    transition_prob: float | Tensor | None
    coverage: Tensor | None
    previous: Tensor | None
    log_previous: Tensor | None
    bias: Tensor | None
    temperature: float


def attend_with_history(
    query: Tensor,
    memory: Memory,
    *,
    penalty: float | Tensor | None = None,
    coverage_weight: Tensor | None = None,
    filters: Tensor | None = None,
    channels: str = "previous",
    projection: Tensor | None = None,
    fertility: Tensor | None = None,
    transition_prob: float | Tensor | None = None,
    coverage: Tensor | None = None,
    previous: Tensor | None = None,
    log_previous: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    normalisation: str = "softmax",
    need_weights: bool = False,
) -> CoverageOutput:
    """Attend as :func:`attnfast.coverage_attention` does, to a memory.

    Args:
        query: ``[B, Tq, A]`` or ``[B, H, Tq, A]``.
        memory: key, value, score_vector, score, lengths, mask, fertility and backend.
        fertility, mask: used instead of the memory's.
        penalty, coverage_weight: λ and w, the weights of the coverage in the score and in its tanh.
        filters, channels, projection: F, its input and U, of location features.
        transition_prob: u of forward attention.
        coverage, previous, log_previous: the state after the rows before, from the last result.
        scale, bias, temperature: of the score.
        normalisation: ``"softmax"`` or ``"sigmoid"``.
        need_weights: return the weights too.

    Their shapes and dtypes are those of :func:`attnfast.coverage_attention`.

    Returns:
        the result of :func:`attnfast.coverage_attention`. With one query the gradients of keys,
        values, score vector, filters and projection are computed for all such calls at once, at the
        end of a backward; second derivatives and forward mode raise.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: a tensor of the memory was modified in place, or the requested backend cannot
            run this call.

    Example:
        >>> key, zeros = torch.randn(2, 5, 8), torch.zeros(2, 5)
        >>> memory = attnfast.prepare(key, key, torch.randn(8))
        >>> context, _, coverage = attnfast.decoding.attend_with_history(
        ...     torch.randn(2, 1, 8), memory, penalty=1.0, coverage=zeros
        ... )
        >>> coverage.shape
        torch.Size([2, 5])
    """
    check_memory(memory)
    (query,) = autocast(query)
    fertility = memory.fertility if fertility is None else fertility
    mask = memory.mask if mask is None else mask
    call = CoverageInputs(
        query, memory.key, memory.value, memory.score_vector, bias, mask, memory.lengths, filters,
        projection, penalty, fertility, transition_prob, coverage,  # type: ignore[arg-type]
        previous, scale, memory.score, normalisation,  # type: ignore[arg-type]
    )  # fmt: skip
    shared = _usable(memory.shared_keys)
    if is_recording():
        _record_deferral(query, memory)
    if (
        shared is not None
        and shared.defers()
        and not has_saved_tensor_hooks()  # checkpointing
        and isinstance(query, Tensor)
        and shared.matches(query, memory._common())
    ):
        check_flag("need_weights", need_weights)
        checked = coverage_call(call, temperature, coverage_weight, channels, log_previous)
        properties = (memory.backend, query.device, query.dtype, COVERAGE.name)
        number, score = filters_of(checked), checked.score
        if select_backend(*properties, True, number, score) == shared.backend:
            parameters = (coverage_weight, filters, channels, projection)
            return _attend_once_with_history(checked, shared, parameters, need_weights)
    try:
        return run_coverage(
            call, temperature, coverage_weight, channels, log_previous, need_weights, memory.backend
        )
    except Exception:
        _check_query(query, memory)
        raise


def _attend_once_with_history(
    call: CoverageInputs, shared: Any, parameters: tuple[Any, ...], need_weights: bool
) -> CoverageOutput:
    """Attend with one query through the steps; ``parameters``: the user's, of the filters."""
    raise_on_tangents(call)
    token, pending_gradients = shared.token, shared.pending_gradients
    if not filters_of(call):
        call = call._replace(filters=None, projection=None)
    if call.filters is not None and call.projection is not None:
        features = shared.features(parameters, call.filters, call.projection)
        call = call._replace(filters=features.filters, projection=features.projection)
        token, pending_gradients = features.token, features.pending_gradients
    detached = {
        x: getattr(call, x) for x in ("key", "value", "score_vector")
    }  # their gradients are deferred
    call = call._replace(**{name: x.detach() for name, x in detached.items() if x is not None})
    outputs = CoverageOutputs(*HistoryStep.apply(*call, token, pending_gradients, shared.backend))
    return coverage_output(outputs, call, need_weights)
