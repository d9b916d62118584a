"""Prepared memory: what a decoder attends to, step after step, and the gradients that can wait.

A recurrent decoder attends with one query at a time, to the same keys. Only the query's gradient
is needed for the recurrence. So a step's backward computes no more than that and leaves the
gradient of its scores with the memory; once the last step has run, one pass over all steps gives
the gradients of keys, values and weight.

In autograd's terms :func:`prepare` is a node whose output, an empty token, every step consumes, so
that its backward comes after theirs, whatever subset of the steps took part::

    keys, values, weight ─ _Prepared ─ token ─┬─ _Step 1 ─ context 1
                                              ├─ _Step 2 ─ context 2
                                              └─ …

Steps with a history go the same way; those with filters take a token of their own, which the
filters went into too. Taking their features' tanh again at the end would cost more than to read and
write the keys' gradient at every step, so they add theirs to sums, and only the values' waits.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attnfast.backends import FLOATS, choose
from attnfast.errors import refuse
from attnfast.ops.attention import (
    as_returned,
    autocast,
    check,
    check_scale,
    columns_of,
    is_relu,
    refuse_tangents,
    run,
    run_spans,
)
from attnfast.ops.coverage import coverage_attention, gradients, inputs_of, setup_context
from attnfast.ops.operators import call, operators_of, or_zeros
from attnfast.ops.span import Position, Span, Spans, check_span

__all__ = ["Memory", "attend", "attend_with_history", "prepare"]


class _Left(list):
    """What the steps of one backward left; a list that can be referred to weakly."""

    sums: tuple[Tensor, ...] | None = None


class _Waiting:
    """Gradients that steps have left, by the running backward's number in autograd's engine.

    One that never reaches the memory (only a query's gradient was asked for, or it failed) must
    not be counted by the next: the engine alone holds what was left, and forgets it at the end.
    """

    def __init__(self):
        self.left: weakref.WeakValueDictionary[int, _Left] = weakref.WeakValueDictionary()

    def here(self) -> _Left:
        """Return what is left in the running backward, to add to until its end."""
        task = torch._C._current_graph_task_id()
        left = self.left.get(task)
        if left is None:
            left = self.left[task] = _Left()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda left=left: None)  # type: ignore[misc]
        return left

    def take(self) -> tuple[list[tuple[Any, ...]], tuple[Tensor, ...] | None]:
        """Return what was left in the running backward, and its sums, and forget them."""
        left = self.left.get(torch._C._current_graph_task_id(), _Left())
        taken, sums = list(left), left.sums
        left.clear()
        left.sums = None
        return taken, sums


@dataclass(eq=False)
class _Features:
    """Filters and their projection, and the token of the steps that use them."""

    of: tuple[Any, ...]
    filters: Tensor
    projection: Tensor
    token: Tensor
    waiting: _Waiting


class Steps:
    """What the steps of one memory share: the exponentials of its keys, gradients that wait."""

    def __init__(self, memory: Memory, token: Tensor | None = None, waiting: Any = None):
        key, weight = memory.key, memory.weight
        self.of = (key, memory.value, memory.lengths, weight)
        self.how = (memory.backend, memory.relu)
        self.query_shape = (*key.shape[:-2], 1, key.shape[-1])
        self.token = token  # None: not deferred
        self.waiting = waiting
        self.operators = operators_of(str(memory.backend))
        exact = key.dtype == torch.float64 or memory.relu
        self.keeps = memory.backend == "cpu" and weight is not None and not exact
        self._exponentials: Tensor | None = None
        self._features: _Features | None = None

    def serve(self, query: Tensor, memory: Memory) -> bool:
        """Whether this is one query for the tensors that the steps were made for."""
        key, value, lengths, weight = self.of
        return (
            memory.key is key
            and memory.value is value
            and memory.lengths is lengths
            and memory.weight is weight
            and (memory.backend, memory.relu) == self.how
            and query.dtype == key.dtype
            and query.shape == self.query_shape
        )

    def exponentials(self) -> Tensor | None:
        """Return what the CPU's additive score keeps of the keys, taken at the first step."""
        if self.keeps and self._exponentials is None:
            key, _, lengths, _ = self.of
            with torch.inference_mode(False):  # or no backward could save them
                kept = self.operators.exponentials(key.detach(), lengths)
            self._exponentials, self.keeps = kept, kept.dim() > 1  # empty beyond its domain
        return self._exponentials if self.keeps else None

    def features(self, of: tuple[Any, ...], filters: Tensor, projection: Tensor) -> _Features:
        """Return the token of steps with such filters, made once for what they are made ``of``."""
        of = tuple((x, None if x is None else x._version) for x in of)
        known = self._features
        if known is None or any(a[0] is not b[0] or a[1] != b[1] for a, b in zip(of, known.of)):
            key, value, lengths, weight = self.of
            waiting, operators = _Waiting(), self.operators
            token = _Prepared.apply(
                key, value, weight, filters, projection, self.token, lengths, waiting, operators,
                False,
            )  # fmt: skip
            known = self._features = _Features(
                of, filters.detach(), projection.detach(), token, waiting
            )
            if token.grad_fn is not None:
                steps, made = weakref.ref(self), weakref.ref(known)

                def forget(_: Any) -> None:  # the graph of the filters is gone now
                    if (here := steps()) is not None and here._features is made():
                        here._features = None

                token.grad_fn.register_prehook(forget)
        return known


class Memory(NamedTuple):
    """What a decoder attends to: made by :func:`prepare`, read by :func:`attend`.

    ``key [B, (H,) Tk, A]``, ``value [B, (H,) Tk, Dv]``, ``lengths [B]`` or None,
    ``mask [B, (1,) 1, Tk]`` or None; ``weight [A]`` or ``[H, A]`` of the additive score, None for
    the dot score; ``backend``, what runs it; ``fertility [B, Tk]``, of coverage, or None; ``relu``,
    whether the rectifier stands for tanh. None may be changed in place while it is in use.
    """

    key: Tensor
    value: Tensor
    lengths: Tensor | None = None
    mask: Tensor | None = None
    weight: Tensor | None = None
    backend: str | None = None
    steps: Steps | None = None
    fertility: Tensor | None = None
    relu: bool = False

    def index_select(self, index: Tensor) -> Memory:
        """Return the memory of the sequences ``index``: reorder or repeat them for beam search."""
        names = ("key", "value", "lengths", "mask", "fertility")
        kept = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        chosen = {name: x.index_select(0, index) for name, x in kept.items()}
        memory = self._replace(**chosen, steps=None)
        return memory if self.steps is None else memory._replace(steps=Steps(memory))


class _Prepared(Function):
    """Makes the token that every step takes; its backward is that of all steps together."""

    @staticmethod
    def forward(
        ctx: Any, key, value, weight, filters, projection, before, lengths, waiting, operators, relu
    ):  # fmt: skip
        ctx.save_for_backward(key, value, weight, lengths, filters, projection)
        ctx.waiting, ctx.operators, ctx.relu = waiting, operators, relu
        ctx.set_materialize_grads(False)
        return key.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _):
        steps, sums = ctx.waiting.take()
        if not steps:
            return (None,) * 10
        key, value, weight, lengths, *features = ctx.saved_tensors
        if sums is not None:
            weights, grad_context = (torch.cat(x, -2) for x in zip(*steps))
            grad_value = weights.mT @ grad_context.to(weights.dtype)
            grad_key, *parts = sums  # of every sequence and head
            of_all = (weight, *features)
            summed = [part.sum_to_size(x.shape).to(x.dtype) for part, x in zip(parts, of_all)]
            return grad_key.to(key.dtype), grad_value.to(value.dtype), *summed, *[None] * 5
        grads: list[Tensor] = []
        for columns in dict.fromkeys(step[0] for step in steps):
            alike = [step[1:] for step in steps if step[0] == columns]
            query, weights, grad_score, grad_context, *span = (
                torch.cat(x, -2) for x in zip(*alike)
            )
            bounds = span[0] if span else None
            _, *more, _ = call(
                ctx.operators.attention_backward.default,
                grad_context, None, None, query, key, value, weight, lengths, bounds,
                columns[0], None, weights, grad_score, 1.0, ctx.relu, False, True, False,
            )  # fmt: skip
            grads = [a + b for a, b in zip(grads, more)] if grads else more
        return *grads[:2], None if weight is None else grads[2], *[None] * 7


class _Step(Function):
    """One query's attention; its backward is the query's alone, and leaves the rest."""

    @staticmethod
    def forward(ctx: Any, query, token, bias, mask, span, columns, memory, scale, need_weights):
        key, value, lengths, _, weight, _, steps, _, relu = memory
        exponentials = steps.exponentials()
        context, weights, _ = call(
            steps.operators.attention.default,
            query, key, value, weight, bias, mask, lengths, span, columns, exponentials, scale,
            relu, True,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, weight, lengths, span, exponentials, weights)
        ctx.operators, ctx.waiting, ctx.scale = steps.operators, steps.waiting, scale
        ctx.relu = relu
        ctx.columns, ctx.bias_shape = columns, None if bias is None else bias.shape
        ctx.set_materialize_grads(False)
        return (context, weights) if need_weights else context

    @staticmethod
    def backward(ctx: Any, grad_context, grad_weights=None):
        query, key, value, weight, lengths, span, exponentials, weights = ctx.saved_tensors
        grad_context = or_zeros(grad_context, query, value)
        grad_query, _, _, _, grad_score = call(
            ctx.operators.attention_backward.default,
            grad_context, grad_weights, None, query, key, value, weight, lengths, span,
            ctx.columns, exponentials, weights, None, ctx.scale, ctx.relu, True, False, True,
        )  # fmt: skip
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = grad_score.sum_to_size(ctx.bias_shape).to(query.dtype)
        if ctx.scale != 1:
            grad_score = grad_score * ctx.scale
        left = (query, weights, grad_score, grad_context)
        if span is None:
            ctx.waiting.here().append(((0, False), *left))
        else:  # rows of several steps go together where their weights have as many columns
            span = span.expand(*query.shape[:-1], 2)
            ctx.waiting.here().append(((ctx.columns, True), *left, span))
        return grad_query, None, grad_bias, *[None] * 6


class _HistoryStep(Function):
    """The same with a history. ``inputs`` are the operator's; what waits is detached."""

    @staticmethod
    def forward(ctx: Any, *arguments):
        *inputs, _, waiting, operators = arguments
        outputs = call(operators.coverage_attention.default, *inputs)
        setup_context(ctx, inputs, outputs)
        ctx.operators, ctx.waiting = operators, waiting
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs):
        query, key, value, weight, _, filters, projection, *_, weights, _ = ctx.saved_tensors
        grad_context = or_zeros(grad_outputs[0], query, value)
        left = ctx.waiting.here()
        if filters is None:
            ctx.operator = ctx.operators.coverage_attention_backward.default
            grads, grad_score = gradients(ctx, grad_outputs, need_grad_score=True)
            left.append(((0, False), query, weights, grad_score * ctx.scale, grad_context))
            return *grads, None, None, None
        if left.sums is None:
            batch = weights.shape[:-2]
            of_all = (x.shape[-n:] for x, n in ((weight, 1), (filters, 3), (projection, 2)))
            shapes = (key.shape, *((*batch, *shape) for shape in of_all))
            left.sums = tuple(weights.new_zeros(shape) for shape in shapes)
        ctx.operator = ctx.operators.coverage_attention_backward_into.default
        grads, _ = gradients(ctx, grad_outputs, sums=left.sums)
        left.append((weights, grad_context))
        return *grads, None, None, None


def _attend_once(
    query: Tensor,
    memory: Memory,
    steps: Any,
    scale: float,
    around: tuple[Any, ...] | None,
    need_weights: bool | str,
) -> tuple[Any, ...]:
    """Attend with one query that the steps serve, within a span at a position if given."""
    key, value, lengths, mask, weight, backend, *_, relu = memory
    bias = bounds = seen = None
    columns = 0
    if around is not None:
        span, position, sigma = around
        seen = columns_of(query, key, None, mask, lengths, span, position, sigma, need_weights)
        bias, mask, bounds, columns, *_ = seen
    if steps.token is not None and torch.is_grad_enabled():
        refuse_tangents(query, key, value, weight, bias)
        result = _Step.apply(
            query, steps.token, bias, mask, bounds, columns, memory, scale, bool(need_weights)
        )
        context, weights = result if need_weights else (result, None)
        weights = None if weights is None else as_returned(weights, query.dtype, True)
    else:
        context, weights, _ = run(
            query, key, value, weight, bias, mask, lengths, bounds, columns, steps.exponentials(),
            scale, relu, need_weights, backend,
        )  # fmt: skip
    if seen is not None:
        weights = seen.returned(weights, key.shape[-2], need_weights)
    return context, weights


def prepare(
    key: Tensor,
    value: Tensor,
    weight: Tensor | None = None,
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
        weight: ``[A]`` or ``[H, A]`` for the additive score; None for the dot score.
        activation: of the additive score, as in :func:`attnfast.additive_attention`.
        lengths: ``[B]``: keys at ``lengths[b]`` and beyond are not seen.
        mask: boolean ``[B, (H or 1,) 1, Tk]``, True where a key may be attended to.
        backend: as in :func:`attnfast.additive_attention`.

    Raises:
        ValueError, TypeError: an argument does not fit; the sentence names it.
        RuntimeError: the backend asked for cannot run.

    As with any tensor that several losses share, all but the last of several backwards over one
    memory need ``retain_graph=True``.
    """
    key, value, weight = autocast(key, value, weight)
    if not isinstance(key, Tensor):
        raise TypeError(f"key must be a torch.Tensor, got {type(key).__name__}")
    if key.dtype not in FLOATS:
        refuse("key", "float32, float64, bfloat16 or float16", key.dtype)
    if key.dim() not in (3, 4):
        refuse("key", "[B, Tk, A] or [B, H, Tk, A]", list(key.shape))
    one = key.new_empty((*key.shape[:-2], 1, key.shape[-1]))  # a query that fits
    check(one, key, value, weight, None, mask, lengths)
    lengths = None if lengths is None else lengths.long()
    relu = is_relu(activation)
    memory = Memory(key, value, lengths, mask, weight, backend, relu=relu)
    if torch.compiler.is_compiling():
        return memory
    backend = choose(backend, key.device, key.dtype, step=True)
    memory = memory._replace(backend=backend)
    token, waiting = None, _Waiting()
    if (
        backend != "reference"
        and torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (key, value, weight))
    ):
        token = _Prepared.apply(
            key,
            value,
            weight,
            None,
            None,
            None,
            lengths,
            waiting,
            operators_of(backend),
            relu,
        )
    return memory._replace(steps=Steps(memory, token, waiting))


def attend(
    query: Tensor,
    memory: Memory,
    *,
    scale: float = 1.0,
    span: Spans = None,
    position: Position = None,
    sigma: float | Tensor | None = None,
    need_weights: bool | str = False,
) -> tuple[Any, ...]:
    """Attend to a memory with one query per sequence, or with many.

    Args:
        query: ``[B, Tq, A]`` or ``[B, H, Tq, A]``, with the memory's dtype and device.
        scale: multiplies the score.
        span, position, sigma: as in :func:`attnfast.additive_attention`.
        need_weights: return the weights too; otherwise they are None; as there.

    Returns:
        ``context [B, (H,) Tq, Dv]`` and ``weights [B, (H,) Tq, Tk]`` or None; those of a span as
        :func:`attnfast.additive_attention` returns them.

    With one query the gradients of keys, values and weight are taken for all such calls at once,
    at the end of a backward; second derivatives and forward mode raise.
    """
    check_scale(scale)
    key, value, lengths, mask, weight, backend, steps, _, relu = memory
    (query,) = autocast(query)
    around = (span, position, sigma)
    plain = all(x is None for x in around) and not isinstance(need_weights, str)
    try:
        if not plain:
            check(query, key, value, weight, None, mask, lengths)
            check_span(query, key, span, position, sigma, need_weights)
            span = Span() if span is None else span
        steady = plain or (isinstance(span, Span) and span.stride == 1)
        serves = steady and steps is not None and not torch.compiler.is_compiling()
        if serves and steps.serve(query, memory):  # type: ignore[union-attr]
            around = (span, position, sigma)
            return _attend_once(
                query, memory, steps, scale, None if plain else around, need_weights
            )
        key, value, weight = autocast(key, value, weight)
        backend = choose(backend, query.device, query.dtype, step=True)
        terms = (query, key, value, weight, None, mask, lengths)
        if plain:
            return run(*terms, None, 0, None, scale, relu, need_weights, backend)[:2]
        return run_spans(*terms, span, position, sigma, scale, relu, need_weights, backend)[:2]
    except Exception:
        if isinstance(query, Tensor):
            *lead, _, features = key.shape
            shape = list(query.shape)
            if len(shape) != key.dim() or shape[:-2] != lead or shape[-1] != features:
                refuse("query", f"{[*lead, 'Tq', features]} to fit the memory", shape)
        check(query, key, value, weight, None, mask, lengths)
        raise


def attend_with_history(
    query: Tensor,
    memory: Memory,
    *,
    need_weights: bool = False,
    need_loss: bool = False,
    coverage_weight: Tensor | None = None,
    filters: Tensor | None = None,
    projection: Tensor | None = None,
    **terms: Any,
) -> tuple[Tensor | None, ...]:
    """Attend as :func:`attnfast.coverage_attention` does, to a memory.

    Args:
        query: ``[B, Tq, A]`` or ``[B, H, Tq, A]``.
        memory: key, value, weight, lengths, mask, fertility and backend; its activation is tanh.
        need_weights, need_loss, coverage_weight, filters, projection, terms: as there.

    Returns:
        what :func:`attnfast.coverage_attention` does. With one query the gradients of keys, values,
        weight, filters and projection are taken for all such calls at once, at the end of a
        backward.
    """
    key, value, lengths, mask, weight, backend, steps, fertility, relu = memory
    if relu:
        refuse("memory", "one of tanh: a history knows no other activation", "one of relu")
    made_of = {"coverage_weight": coverage_weight, "filters": filters, "projection": projection}
    terms = {**made_of, "mask": mask, "fertility": fertility, **terms}
    (query,) = autocast(query)
    deferred = (
        steps is not None
        and steps.token is not None
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._autograd._top_saved_tensors_default_hooks(True)  # checkpointing
        and isinstance(query, Tensor)
        and steps.serve(query, memory)
    )
    if not deferred:
        return coverage_attention(
            query, key, value, weight, lengths=lengths, backend=backend, need_weights=need_weights,
            need_loss=need_loss, **terms,
        )  # fmt: skip
    inputs = list(inputs_of(query, key, value, weight, lengths=lengths, **terms))
    refuse_tangents(*(x for x in inputs if isinstance(x, Tensor)))
    token, waiting = steps.token, steps.waiting  # type: ignore[union-attr]
    if inputs[7] is not None and not inputs[7].shape[-3]:
        inputs[7:9] = None, None
    if inputs[7] is not None:
        features = steps.features(tuple(made_of.values()), *inputs[7:9])  # type: ignore[union-attr]
        inputs[7:9] = features.filters, features.projection
        token, waiting = features.token, features.waiting
    inputs[1:4] = (None if x is None else x.detach() for x in inputs[1:4])
    operators = steps.operators  # type: ignore[union-attr]
    context, weights, coverage, loss, _ = _HistoryStep.apply(*inputs, token, waiting, operators)
    result = (context, as_returned(weights, query.dtype, need_weights), coverage)
    return (*result, loss) if need_loss else result
