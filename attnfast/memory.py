"""Prepared memory: what a decoder attends to, step after step, and the gradients that can wait.

A recurrent decoder attends with one query at a time, to the same keys. Only the query's gradient
is needed for the recurrence. So a step's backward computes no more than that and leaves the
gradient of its scores with the memory; once the last step has run, one pass over all steps gives
the gradients of keys, values and weight.

In autograd's terms :func:`prepare` is a node whose outputs every step consumes, so that its
backward comes after theirs, whatever subset of the steps took part::

    keys, values, weight ─ _Prepared ─┬─ _Step 1 ─ context 1
                                      ├─ _Step 2 ─ context 2
                                      └─ …
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from attnfast.backends import choose
from attnfast.ops.attention import autocast, call, check, operators_of, refuse_tangents, run

__all__ = ["Memory", "attend", "prepare"]


class Steps:
    """What the steps of one memory share: exponentials of its keys, gradients that wait.

    A backward is known by its number in autograd's engine: the gradients of one that never
    reaches the memory (only a query's were asked for) must not be counted by the next.
    """

    def __init__(self, key: Tensor, weight: Tensor | None, backend: str, deferred: bool):
        self.deferred = deferred
        self.query_shape = (*key.shape[:-2], 1, key.shape[-1])
        self.keeps = backend == "cpu" and weight is not None and key.dtype != torch.float64
        self._exponentials: Tensor | None = None
        self._waiting: dict[int, list[tuple[Tensor, ...]]] = {}

    def exponentials(self, memory: Memory) -> Tensor | None:
        """Return what the CPU's additive score keeps of the keys, taken at the first step."""
        if self.keeps and self._exponentials is None:
            kept = torch.ops.attnfast_cpu.exponentials(memory.key.detach(), memory.lengths)
            self._exponentials, self.keeps = kept, kept.dim() > 1  # it is empty beyond its domain
        return self._exponentials if self.keeps else None

    def leave(self, *gradients: Tensor) -> None:
        """Keep the gradients of a step for the end of the running backward."""
        task = torch._C._current_graph_task_id()
        if task not in self._waiting:
            self._waiting[task] = []
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._waiting.pop(task, []).clear())
        self._waiting[task].append(gradients)

    def take(self) -> list[tuple[Tensor, ...]]:
        """Return what was left in the running backward."""
        return self._waiting.pop(torch._C._current_graph_task_id(), [])


class Memory(NamedTuple):
    """What a decoder attends to: made by :func:`prepare`, read by :func:`attend`.

    ``key [B, (H,) Tk, A]``, ``value [B, (H,) Tk, Dv]``, ``lengths [B]`` or None,
    ``mask [B, (1,) 1, Tk]`` or None; ``weight [A]`` or ``[H, A]`` of the additive score, None for
    the dot score; ``backend``, what runs it. None may be changed in place while it is in use.
    """

    key: Tensor
    value: Tensor
    lengths: Tensor | None = None
    mask: Tensor | None = None
    weight: Tensor | None = None
    backend: str | None = None
    steps: Steps | None = None

    def index_select(self, index: Tensor) -> Memory:
        """Return the memory of the sequences ``index``: reorder or repeat them for beam search."""
        names = ("key", "value", "lengths", "mask")
        kept = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        chosen = {name: x.index_select(0, index) for name, x in kept.items()}
        steps = None
        if self.steps is not None and self.backend is not None:  # autograd's own way from here on
            steps = Steps(chosen["key"], self.weight, self.backend, deferred=False)
        return self._replace(**chosen, steps=steps)


class _Prepared(Function):
    """Passes keys, values and weight on; its backward is that of all steps together."""

    @staticmethod
    def forward(ctx: Any, key, value, weight, lengths, steps, backend):
        ctx.save_for_backward(key, value, weight, lengths)
        ctx.steps, ctx.operators = steps, operators_of(backend)
        ctx.set_materialize_grads(False)
        return key, value, weight

    @staticmethod
    def backward(ctx: Any, *grads):
        key, value, weight, lengths = ctx.saved_tensors
        steps = ctx.steps.take()
        if not steps:
            return *grads, None, None, None
        query, weights, grad_score, grad_context = (torch.cat(x, -2) for x in zip(*steps))
        _, *late, _ = call(
            ctx.operators.attention_backward.default,
            grad_context, None, None, query, key, value, weight, lengths, None, weights,
            grad_score, 1.0, False, True, False,
        )  # fmt: skip
        if weight is None:
            late[2] = None
        total = [x if y is None else x + y for x, y in zip(late, grads)]
        return *total, None, None, None


class _Step(Function):
    """One query's attention; its backward is the query's alone, and leaves the rest."""

    @staticmethod
    def forward(ctx: Any, query, memory_key, memory_value, memory_weight, memory, scale):
        key, value, lengths, mask, weight, backend, steps = memory
        exponentials = steps.exponentials(memory)
        ctx.operators = operators_of(backend)
        context, weights, _ = call(
            ctx.operators.attention.default,
            query, key, value, weight, None, mask, lengths, exponentials, scale, True,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, weight, lengths, exponentials, weights)
        ctx.steps, ctx.scale = steps, scale
        ctx.set_materialize_grads(False)
        return context, weights

    @staticmethod
    def backward(ctx: Any, grad_context, grad_weights):
        query, key, value, weight, lengths, exponentials, weights = ctx.saved_tensors
        if grad_context is None:
            grad_context = query.new_zeros(()).expand(*query.shape[:-1], value.shape[-1])
        grad_query, _, _, _, grad_score = call(
            ctx.operators.attention_backward.default,
            grad_context, grad_weights, None, query, key, value, weight, lengths, exponentials,
            weights, None, ctx.scale, True, False, True,
        )  # fmt: skip
        if ctx.scale != 1:
            grad_score = grad_score * ctx.scale
        ctx.steps.leave(query, weights, grad_score, grad_context)
        return grad_query, *[None] * 5


def prepare(
    key: Tensor,
    value: Tensor,
    weight: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> Memory:
    """Make a memory of projected keys and of values, once per source.

    Args:
        key: ``[B, Tk, A]`` or ``[B, H, Tk, A]``, float32, float64, bfloat16 or float16.
        value: ``[B, Tk, Dv]`` or ``[B, H, Tk, Dv]``.
        weight: ``[A]`` or ``[H, A]`` for the additive score; None for the dot score.
        lengths: ``[B]``: keys at ``lengths[b]`` and beyond are not seen.
        mask: boolean ``[B, (H or 1,) 1, Tk]``, True where a key may be attended to.
        backend: as in :func:`attnfast.additive_attention`.

    Raises:
        ValueError, TypeError: an argument does not fit; the sentence names it.
        RuntimeError: the backend asked for cannot run.
    """
    key, value, weight = autocast(key, value, weight)
    if not isinstance(key, Tensor):
        raise TypeError(f"key must be a torch.Tensor, got {type(key).__name__}")
    if key.dim() not in (3, 4):
        raise ValueError(f"key must be [B, Tk, A] or [B, H, Tk, A], got {list(key.shape)}")
    check(key[..., :0, :], key, value, weight, None, mask, lengths)
    lengths = None if lengths is None else lengths.long()
    if torch.compiler.is_compiling():
        return Memory(key, value, lengths, mask, weight, backend)
    backend = choose(backend, key.device, key.dtype)
    deferred = backend != "reference" and torch.is_grad_enabled()
    deferred = deferred and any(x is not None and x.requires_grad for x in (key, value, weight))
    steps = Steps(key, weight, backend, deferred)
    if deferred:
        key, value, weight = _Prepared.apply(key, value, weight, lengths, steps, backend)
    return Memory(key, value, lengths, mask, weight, backend, steps)


def attend(
    query: Tensor,
    memory: Memory,
    *,
    scale: float = 1.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend to a memory with one query per sequence, or with many.

    Args:
        query: ``[B, Tq, A]`` or ``[B, H, Tq, A]``, with the memory's dtype and device.
        scale: multiplies the score.
        need_weights: return the weights too; otherwise they are None.

    Returns:
        ``context [B, (H,) Tq, Dv]`` and ``weights [B, (H,) Tq, Tk]`` or None.

    With one query the gradients of keys, values and weight are taken for all such calls at once,
    at the end of a backward; second derivatives and forward mode raise.
    """
    key, value, lengths, mask, weight, backend, steps = memory
    (query,) = autocast(query)
    exponentials = None
    if (
        steps is not None
        and not torch.compiler.is_compiling()
        and isinstance(query, Tensor)
        and query.shape == steps.query_shape
        and query.dtype == key.dtype
        and query.device == key.device
    ):
        if steps.deferred and torch.is_grad_enabled():
            refuse_tangents(query, key, value, weight)
            context, weights = _Step.apply(query, key, value, weight, memory, scale)
            return context, weights.to(query.dtype) if need_weights else None
        exponentials = steps.exponentials(memory)
    else:
        check(query, key, value, weight, None, mask, None)
        backend = choose(backend, query.device, query.dtype)
    context, weights, _ = run(
        query, key, value, weight, None, mask, lengths, exponentials, scale, need_weights, backend
    )
    return context, weights.to(query.dtype) if need_weights else None
