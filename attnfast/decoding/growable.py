"""Keys and values that grow step by step, in buffers with spare capacity.

New rows are written beyond the end of every tensor returned before, so that neither older memories
nor tensors saved by autograd change.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from attnfast.ops.backends import BACKENDS

__all__ = ["GrowableBuffer", "append_rows", "copy_reason"]


class GrowableBuffer:
    """Storage ``[.., capacity, ·]``; its first rows are a tensor that grows.

    ``newest()`` returns the last such tensor, the only one that may grow in place.
    """

    def __init__(self, rows: Tensor):
        self.rows = rows
        self.newest: Any = lambda: None
        self._exponentials: GrowableBuffer | None = None  # of the rows, by a backend
        self._exponentials_rows = 0  # the number of rows that have them
        self._exponentials_for: Any = None  # the backend, and the score

    @staticmethod
    def like(x: Tensor, capacity: int) -> GrowableBuffer:
        """Return a buffer for rows of the shape, dtype and device of ``x``."""
        shape = (*x.shape[:-2], capacity, x.shape[-1])
        with torch.inference_mode(False):  # so that it can be written in any mode
            return GrowableBuffer(torch.empty(shape, dtype=x.dtype, device=x.device))

    def write(self, start: int, x: Tensor) -> Tensor:
        """Write rows from ``start`` on; return all rows up to their end."""
        rows = x.shape[-2]
        # The tensors returned before do not change, so write through .data to keep their version.
        self.rows.data.narrow(-2, start, rows).copy_(x)
        return self.rows.narrow(-2, 0, start + rows)

    def key_exponentials(self, rows: int, backend: str, score: str) -> Tensor | None:
        """Return the exponentials of the first ``rows`` keys; each is computed once."""
        if self._exponentials_for != (backend, score):
            self._exponentials, self._exponentials_rows = None, 0
            self._exponentials_for = backend, score
        start = self._exponentials_rows
        if start < rows and (start == 0 or self._exponentials is not None):
            x = BACKENDS[backend].key_exponentials(
                self.rows.narrow(-2, start, rows - start), None, score
            )
            if x is None or rows == x.shape[-2] == self.rows.shape[-2]:
                self._exponentials = None if x is None else GrowableBuffer(x)
            else:
                self._exponentials = self._exponentials or GrowableBuffer.like(
                    x, self.rows.shape[-2]
                )
                self._exponentials.write(start, x)
            self._exponentials_rows = rows
        return None if self._exponentials is None else self._exponentials.rows.narrow(-2, 0, rows)


class _Appended(Function):
    """``torch.cat([old, new], -2)`` in a buffer that already contains ``old``."""

    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor, buffer: GrowableBuffer):
        ctx.rows = old.shape[-2]
        return buffer.write(ctx.rows, new)

    @staticmethod
    def backward(ctx: Any, grad: Any):
        new = grad[..., ctx.rows :, :].clone()  # a view would keep all rows' gradients alive
        return grad[..., : ctx.rows, :], new, None


def copy_reason(buffer: GrowableBuffer | None, old: Tensor, new: Tensor) -> str | None:
    """Return why appending rows copies all rows, or None if it writes the new ones alone."""
    if buffer is None:
        return "the rows have no buffer before the first append"
    newest = buffer.newest()
    if newest is None:
        return "the buffer has no spare rows yet"
    if newest is not old:
        return "the memory is not the newest of those that share its buffer"
    if old.shape[-2] + new.shape[-2] > buffer.rows.shape[-2]:
        return "the buffer is full, and its capacity doubles"
    return None


def append_rows(
    buffer: GrowableBuffer | None, old: Tensor, new: Tensor
) -> tuple[Tensor, GrowableBuffer]:
    """Return ``torch.cat([old, new], -2)`` and its buffer.

    Spare capacity is allocated from the second append on, because a search may reorder, and so
    copy, the rows at every step.
    """
    if buffer is None:
        x = torch.cat([old, new], -2)
        return x, GrowableBuffer(x)
    if copy_reason(buffer, old, new) is not None:
        buffer = GrowableBuffer.like(old, 2 * (old.shape[-2] + new.shape[-2]))
        buffer.write(0, old)
    recorded = torch.is_grad_enabled() and (old.requires_grad or new.requires_grad)
    x = _Appended.apply(old, new, buffer) if recorded else buffer.write(old.shape[-2], new)
    buffer.newest = weakref.ref(x)
    return x, buffer
