"""A decoder's steps over one memory, with key gradients deferred to the end of the backward.

A recurrent decoder attends with one query at a time, to the same keys. The recurrence needs only
the query's gradient. A step's backward therefore computes only that and stores the gradient of its
scores with the memory; after the last step, one pass over all steps computes the gradients of keys,
values and score vector.

In autograd's terms :class:`DeferredKeyGradients` is a node whose output, an empty token, is an
input of every step, so that its backward runs after those of all steps that took part::

    keys, values, score vector ─ DeferredKeyGradients ─ token ─┬─ Step 1 ─ context 1
                                                               ├─ Step 2 ─ context 2
                                                               └─ …

Steps with a history are deferred in the same way; steps with filters take their own token, which
also depends on the filters. Recomputing the tanh of their features at the end would cost more than
reading and writing the keys' gradient at every step, so each step adds its key gradient to a sum,
and only the gradient of the values is deferred.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from attnfast._utils.torch_private import (
    at_end_of_backward,
    has_dispatch_mode,
    has_saved_tensor_hooks,
    number_of_backward,
)
from attnfast.decoding.growable import GrowableBuffer
from attnfast.ops.attention import ATTENTION, AttentionBackward, AttentionInputs
from attnfast.ops.backends import BACKENDS
from attnfast.ops.coverage import COVERAGE, backward_into


class _Differentiated(Function):
    """Return the outputs of a backward, connected to its inputs; differentiating them raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors):
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_):
        raise RuntimeError(
            "a decoder's steps have no second derivative on the compiled backends: use "
            "backend='reference', or report.undo() in a replaced model"
        )


def no_double_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the gradients of a backward raise if they are differentiated.

    The backward returns its gradients and the tensors that they were computed from. PyTorch's own
    ``once_differentiable`` leaves no path to these: a derivative with respect to them is None.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads):
        with torch.no_grad():
            result, taken_from = backward(ctx, *grads)
        roots = [x for x in (*grads, *taken_from) if x is not None and x.requires_grad]
        if not torch.is_grad_enabled() or not roots:
            return result
        return _Differentiated.apply(len(result), *result, *roots)

    return run


class _PendingSteps(list):
    """List of pending steps of one backward pass, which can be weakly referenced."""

    sums: tuple[Tensor, ...] | None = None


class PendingGradients:
    """Pending gradients of steps, keyed by the graph task of the running backward.

    If a backward never reaches the memory (because it failed, or only a query's gradient was
    requested), the next backward must not use its pending gradients: only the autograd engine
    references them, and it drops them when that backward ends.
    """

    def __init__(self):
        self.by_task = weakref.WeakValueDictionary[int, _PendingSteps]()

    def of_this_backward(self) -> _PendingSteps:
        """Return the list of pending steps of the running backward, to append to."""
        task = number_of_backward()
        pending = self.by_task.get(task)
        if pending is None:
            pending = self.by_task[task] = _PendingSteps()
            at_end_of_backward(lambda pending=pending: None)  # type: ignore[misc]
        return pending

    def collect(self) -> tuple[list[Any], tuple[Tensor, ...] | None]:
        """Return the pending steps of the running backward and their sums, and clear both."""
        pending = self.by_task.get(number_of_backward(), _PendingSteps())
        taken, sums = list(pending), pending.sums
        pending.clear()
        pending.sums = None
        return taken, sums


@dataclass(eq=False)
class Features:
    """Filters and their projection, and the token of the steps that use them."""

    of: tuple[Any, ...]
    filters: Tensor
    projection: Tensor
    token: Tensor
    pending_gradients: PendingGradients


class KeyValues(NamedTuple):
    """The keys, values and terms of one memory; ``backend`` is the requested one, or None."""

    key: Tensor
    value: Tensor
    lengths: Tensor | None
    score_vector: Tensor | None
    score: str
    backend: str | None


class Shared(NamedTuple):
    """The settings that a token's backward needs besides its tensors."""

    lengths: Tensor | None
    score: str
    backend: str
    pending_gradients: PendingGradients


class SavedStep(NamedTuple):
    """The tensors of one step that the gradients of keys, values and score vector need."""

    query: Tensor
    weights: Tensor
    grad_score: Tensor  # times the scale
    grad_context: Tensor
    key_bounds: Tensor | None = None
    columns: int = 0

    @property
    def kind(self) -> tuple[int, bool]:
        """Return the properties that steps must share to be processed together."""
        return self.columns, self.key_bounds is None


class SavedFeatures(NamedTuple):
    """The tensors of one step with filters; the sums hold its other gradients."""

    weights: Tensor
    grad_context: Tensor


class SharedKeys:
    """The state that steps over one memory share: exponentials of keys and pending gradients.

    The keys themselves are in :class:`attnfast.decoding.Memory`.
    """

    def __init__(
        self,
        source: KeyValues,
        backend: str,
        deferred: bool = False,
        mask: Tensor | None = None,
        buffer: GrowableBuffer | None = None,
    ):
        self.source = source
        key, value, _, score_vector, _, _ = source
        # An inference tensor has no version.
        named = zip(("key", "value", "lengths", "score_vector", "mask"), (*source[:4], mask))
        self.versions = [
            (x, x._version, name) for name, x in named if x is not None and not x.is_inference()
        ]
        self.task = number_of_backward()  # of the running backward, or -1
        self.query_shape = (*key.shape[:-2], 1, key.shape[-1])
        self.backend = backend
        self.pending_gradients = PendingGradients()
        self.token = None  # not deferred
        if deferred:
            self.token = DeferredKeyGradients.apply(
                key, value, score_vector, None, None, None, self._shared()
            )
        self._buffer = buffer  # the buffer of the keys, if they grow
        self._has_exponentials = False
        self._exponentials: Tensor | None = None
        self._features: Features | None = None

    def _shared(self, pending_gradients: PendingGradients | None = None) -> Shared:
        _, _, lengths, _, score, _ = self.source
        return Shared(lengths, score, self.backend, pending_gradients or self.pending_gradients)

    def check_unchanged(self) -> None:
        """Raise if tensors of the memory were modified in place since it was prepared."""
        for x, version, name in self.versions:
            if x._version != version:
                raise RuntimeError(
                    f"memory must be prepared again: its {name} was changed in place since"
                )

    def defers(self) -> bool:
        """Return whether the gradients of keys, values and score vector can be deferred.

        A step that a reentrant checkpoint recomputes cannot defer them: it runs in a nested
        backward, which would end after the first such step.
        """
        if self.token is None or not torch.is_grad_enabled():
            return False
        if number_of_backward() == self.task:
            return True
        if has_saved_tensor_hooks():  # a non-reentrant checkpoint, which handles saved tensors only
            return False
        key, value, _, score_vector, *_ = self.source
        if any(x is not None and x.grad_fn is not None for x in (key, value, score_vector)):
            raise RuntimeError(
                "memory must be prepared inside a reentrant checkpoint that attends to it; "
                "or call checkpoint(..., use_reentrant=False)"
            )
        return False

    def matches(self, query: Tensor, source: KeyValues) -> bool:
        """Return whether this is one query over the tensors that the keys were prepared from."""
        key, value, lengths, score_vector, score, backend = self.source
        return (
            source[0] is key
            and source[1] is value
            and source[2] is lengths
            and source[3] is score_vector
            and source[4] == score
            and source[5] == backend
            and query.dtype == key.dtype
            and query.shape == self.query_shape
        )

    def key_exponentials(self) -> Tensor | None:
        """Return the exponentials of the keys, computed at the first step, or None.

        It is None while operators are traced or vmapped, because whether there are any depends on
        the keys' values.
        """
        if has_dispatch_mode():
            return None
        if not self._has_exponentials:
            key, _, lengths, _, score, _ = self.source
            with torch.inference_mode(False):  # so that a backward can save it
                if self._buffer is None:
                    self._exponentials = BACKENDS[self.backend].key_exponentials(
                        key, lengths, score
                    )
                else:
                    self._exponentials = self._buffer.key_exponentials(
                        key.shape[-2], self.backend, score
                    )
            self._has_exponentials = True
        return self._exponentials

    def features(self, of: tuple[Any, ...], filters: Tensor, projection: Tensor) -> Features:
        """Return the token of steps with these filters; reuse it while ``of`` is unchanged."""
        of = tuple((x, getattr(x, "_version", None)) for x in of)
        known = self._features
        if known is None or any(a[0] is not b[0] or a[1] != b[1] for a, b in zip(of, known.of)):
            key, value, _, score_vector, _, _ = self.source
            pending_gradients = PendingGradients()
            token = DeferredKeyGradients.apply(
                key,
                value,
                score_vector,
                filters,
                projection,
                self.token,
                self._shared(pending_gradients),
            )
            known = self._features = Features(
                of, filters.detach(), projection.detach(), token, pending_gradients
            )
            if token.grad_fn is not None:
                steps, made = weakref.ref(self), weakref.ref(known)

                def forget(_: Any) -> None:  # the graph of the filters is freed now
                    if (here := steps()) is not None and here._features is made():
                        here._features = None

                token.grad_fn.register_prehook(forget)
        return known


class DeferredKeyGradients(Function):
    """Return the token that every step takes.

    The token's backward computes the gradients of keys, values and score vector for all steps.
    """

    @staticmethod
    def forward(ctx: Any, key, value, score_vector, filters, projection, before, shared: Shared):
        ctx.save_for_backward(key, value, score_vector, shared.lengths, filters, projection)
        ctx.shared = shared._replace(lengths=None)
        ctx.set_materialize_grads(False)
        return key.new_empty(0)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, _):
        steps, sums = ctx.shared.pending_gradients.collect()
        if not steps:
            return (None,) * 7, ()
        key, value, score_vector, lengths, *features = saved = ctx.saved_tensors
        if sums is not None:
            weights, grad_context = (torch.cat(x, -2) for x in zip(*steps))
            hidden = (weights == 0).all(-1, keepdim=True)  # their gradients are ignored
            grad_context = grad_context.to(weights.dtype).masked_fill(hidden, 0)
            with torch.autocast(weights.device.type, enabled=False):
                grad_value = weights.mT @ grad_context
            grad_key, *parts = sums  # of every sequence and head
            parameters = (score_vector, *features)
            summed = [part.sum_to_size(x.shape).to(x.dtype) for part, x in zip(parts, parameters)]
            grads = (grad_key.to(key.dtype), grad_value.to(value.dtype), *summed)
            return (*grads, None, None), (*saved, *itertools.chain(*steps))
        grads = ()
        for kind in dict.fromkeys(step.kind for step in steps):
            alike = zip(*(step for step in steps if step.kind == kind))
            rows: list[Any] = [None if x[0] is None else torch.cat(x, -2) for x in [*alike][:5]]
            query, weights, grad_score, grad_context, bounds = rows
            arguments = AttentionBackward(
                grad_context=grad_context, grad_weights=None, grad_log_sum_exp=None,
                query=query, key=key, value=value, score_vector=score_vector, lengths=lengths,
                key_bounds=bounds, columns=kind[0], key_exponentials=None, weights=weights,
                grad_score=grad_score, scale=1.0, score=ctx.shared.score, normalisation="softmax",
                need_grad_query=False, need_grad_key=True, need_grad_score=False,
            )  # fmt: skip
            _, *new_grads, _ = ATTENTION.backward(ctx.shared.backend, arguments)
            grads = tuple(a + b for a, b in zip(grads, new_grads)) if grads else new_grads
        step_tensors = (x for step in steps for x in step if isinstance(x, Tensor))
        return (*grads[:2], None if score_vector is None else grads[2], *[None] * 4), (
            *saved,
            *step_tensors,
        )


class Step(Function):
    """Attention of one query; its backward computes the query's gradient and defers the others.

    The call also contains query and bias; its other tensors are the memory's, whose gradients
    arrive through the token.
    """

    @staticmethod
    def forward(ctx: Any, query, token, bias, call: AttentionInputs, shared, need_weights):
        result = ATTENTION(shared.backend, call)
        ATTENTION.setup_context(ctx, call, result, bias if ctx.needs_input_grad[2] else None)
        ctx.backend, ctx.pending_gradients = shared.backend, shared.pending_gradients
        weights = result.weights if need_weights else None
        statistics = result.statistics if call.need_statistics else None
        sums = result.log_sum_exp if call.normalisation == "softmax" else None
        return result.context, weights, sums, statistics

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *grads):
        call, saved = ATTENTION.arguments(ctx, grads, needs=(True, False, True))
        grad_query, _, _, _, grad_score = ATTENTION.backward(ctx.backend, call)
        grad_bias = ATTENTION.of_bias(ctx, grad_score) if ctx.needs_input_grad[2] else None
        if call.scale != 1:
            grad_score = grad_score * call.scale
        bounds = call.key_bounds
        if bounds is not None:
            bounds = bounds.expand(*call.query.shape[:-1], 2)
        rows = call.query, call.weights, grad_score, call.grad_context
        step = SavedStep(*rows, bounds, call.columns)
        ctx.pending_gradients.of_this_backward().append(step)
        return (grad_query, None, grad_bias, None, None, None), saved


class HistoryStep(Function):
    """A step with a history. The first inputs are the call's; deferred ones are detached."""

    @staticmethod
    def forward(ctx: Any, *inputs):
        *call, _, ctx.pending_gradients, ctx.backend = inputs
        outputs = COVERAGE(ctx.backend, call)
        COVERAGE.setup_context(ctx, call, outputs)
        return tuple(outputs)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *grad_outputs):
        pending, (call, saved) = (
            ctx.pending_gradients.of_this_backward(),
            COVERAGE.arguments(ctx, grad_outputs),
        )
        if call.filters is None:
            gradients = COVERAGE.backward(ctx.backend, call._replace(need_grad_score=True))
            grad_score = gradients.grad_score * call.scale
            pending.append(SavedStep(call.query, call.weights, grad_score, call.grad_context))
        else:
            if pending.sums is None:
                batch = call.weights.shape[:-2]
                parameters = (
                    (call.score_vector, 1),
                    (call.filters, 3),
                    (call.projection, 2),
                )
                shapes = (call.key.shape, *((*batch, *x.shape[-n:]) for x, n in parameters))
                pending.sums = tuple(call.weights.new_zeros(shape) for shape in shapes)
            gradients = backward_into(ctx.backend, call, pending.sums)
            pending.append(SavedFeatures(call.weights, call.grad_context))
        return (*COVERAGE.of_inputs(ctx, gradients), None, None, None), saved
