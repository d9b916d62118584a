"""Attention that queries a memory several times, and attention to the top k of many keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import (
    check_array,
    check_choice,
    check_flag,
    check_int,
    check_like,
    check_tensor,
    describe,
    raise_type_error,
    raise_value_error,
    shape_of,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.decoding import Memory, attend, check_memory, prepare
from attnfast.functional import additive_attention
from attnfast.nn._linear import is_plain
from attnfast.nn.attention import (
    BahdanauAttention,
    LuongAttention,
    _AttentionWrapper,
    check_sizes,
    refuse_script,
)
from attnfast.ops.arguments import length_mask
from attnfast.ops.backends import check_backend
from attnfast.ops.operators import accumulation_dtype, is_tracing
from attnfast.ops.reference import ACTIVATIONS

TYINGS = ("adjacent", "layer-wise")


class MultiHopMemory(NamedTuple):
    """Memory of :class:`MultiHopAttention`.

    Attributes:
        memories: one for each hop, or one for all hops.

    Example:
        >>> attention = attnfast.nn.MultiHopAttention(4, hops=2)
        >>> memory = attention.prepare(torch.randn(3, 7, 4))
        >>> memory.index_select(torch.tensor([2, 0])).memories[0].key.shape
        torch.Size([2, 7, 4])
    """

    memories: tuple[Memory, ...]

    def index_select(self, index: Tensor) -> MultiHopMemory:
        """Return the memories of the sequences ``index``."""
        return MultiHopMemory(tuple(x.index_select(index) for x in self.memories))


class MultiHopAttention(Module):
    r"""Attention that queries a memory K times, updating the query with each hop's context.

    .. math:: u^1 = q, \quad
              \alpha^k = \mathrm{softmax}_j\left(u^k \cdot m^k_j\right), \quad
              u^{k+1} = H u^k + \sum_j \alpha^k_j c^k_j

    ==============  ============================================================  =============
    ``tying``       keys m and values c                                           H
    ==============  ============================================================  =============
    ``adjacent``    K + 1 tensors: :math:`m^{k+1} = c^k`                          the identity
    ``layer-wise``  two: the same m and c, prepared once, at every hop            learned
    ==============  ============================================================  =============

    Args:
        dim: features of queries, keys and values.
        hops: K.
        tying: one of the table.
        backend: as in :func:`attnfast.dot_attention`.

    The attribute ``linear``, False by default, omits the softmax: training may start without it and
    continue with it ("linear start").

    Paper: Sukhbaatar et al., "End-To-End Memory Networks", NeurIPS 2015, arXiv:1503.08895.

    Example:
        >>> attention = attnfast.nn.MultiHopAttention(8, hops=2)
        >>> states = torch.randn(2, 5, 8)
        >>> memory = attention.prepare([states, states, states], torch.tensor([5, 3]))
        >>> attention(torch.randn(2, 8), memory)[0].shape
        torch.Size([2, 8])
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self, dim: int, hops: int = 3, tying: str = "adjacent", backend: str | None = None
    ):
        super().__init__()
        check_sizes(dim=dim, hops=hops)
        check_backend(backend)
        check_choice("tying", tying, TYINGS)
        self.dim, self.hops, self.tying, self.backend = dim, hops, tying, backend
        self.linear = False
        self.between = nn.Linear(dim, dim, bias=False) if tying == "layer-wise" else nn.Identity()

    def extra_repr(self) -> str:
        """Return the sizes, and the options that are not defaults."""
        return repr_fields(self, ("dim", "hops", "tying"), {"linear": False, "backend": None})

    def prepare(
        self,
        sources: Tensor | Sequence[Tensor],
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> MultiHopMemory:
        """Prepare a source's keys and values for all hops.

        Args:
            sources: tensors ``[B, Tk, dim]``: keys and values, or with adjacent tying ``hops + 1``
                tensors, where each hop's values are the next hop's keys; or one tensor for all.
            lengths, mask: as in :func:`attnfast.prepare`.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        wanted = self.hops + 1 if self.tying == "adjacent" else 2
        if isinstance(sources, Tensor):
            check_array("sources", sources, "floating-point", ("B", "Tk", self.dim))
            sources = [sources] * wanted
        if not isinstance(sources, (list, tuple)) or len(sources) != wanted:
            got = len(sources) if isinstance(sources, (list, tuple)) else describe(sources)
            raise_value_error("sources", f"{wanted} tensors with {self.tying} tying", got)
        for x in sources:
            check_tensor("sources", x)
            if x.dim() != 3 or x.shape[-1] != self.dim or x.shape != sources[0].shape:
                raise_value_error(
                    "sources", f"all of the same {shape_of('B', 'Tk', self.dim)}", describe(x)
                )
        options: dict[str, Any] = {"lengths": lengths, "mask": mask, "backend": self.backend}
        return MultiHopMemory(tuple(prepare(key, c, **options) for key, c in pairwise(sources)))

    def forward(
        self, query: Tensor, memory: MultiHopMemory, need_weights: bool | str = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the memory K times.

        Args:
            query: q, ``[B, dim]`` or ``[B, Tq, dim]``.
            memory: from :meth:`prepare`.
            need_weights: return the weights of all hops too, or the scores if ``linear``;
                ``"dense"`` is equivalent.

        Returns:
            :math:`u^{K+1}`, ``[B, dim]`` or ``[B, Tq, dim]``, and ``[B, K, Tk]`` or ``[B, K, Tq,
            Tk]`` or None.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_tensor("query", query)
        if not (isinstance(need_weights, str) and need_weights == "dense"):
            need_weights = check_flag("need_weights", need_weights)
        if not isinstance(memory, MultiHopMemory) or not isinstance(memory.memories, tuple):
            raise_type_error("memory", "a result of prepare(...)", describe(memory))
        wanted = self.hops if self.tying == "adjacent" else 1
        if len(memory.memories) != wanted:
            got = len(memory.memories)
            raise_value_error(
                "memory", f"of {wanted} pairs of keys and values, one per hop or one for all", got
            )
        check_memory(memory.memories[0])
        key = memory.memories[0].key
        if key.shape[-1] != self.dim:
            raise_value_error("memory", f"of {self.dim} features", key.shape[-1])
        B = len(key)
        if query.dim() not in (2, 3) or (query.shape[0], query.shape[-1]) != (B, self.dim):
            expected = f"[{B}, {self.dim}] or [{B}, Tq, {self.dim}] to fit the memory"
            raise_value_error("query", expected, list(query.shape))
        whose = "the memory's" if self.tying == "adjacent" else "the module's"
        for name, x in (("memory", key), ("query", query)):
            check_like(name, x, next(self.parameters(), key), whose)
        step = query.dim() == 2
        u = query.unsqueeze(1) if step else query
        found = []
        for k in range(self.hops):
            at = memory.memories[k if self.tying == "adjacent" else 0]
            if self.linear:
                if at.shared_keys is not None and not is_tracing():
                    at.shared_keys.check_unchanged()
                weights: Any = _scores(u, at, 0)
                context = weights @ at.value
            else:
                context, weights = attend(u, at, need_weights=need_weights)
            u = self.between(u) + context
            found.append(weights)
        shown = torch.stack(found, 1) if need_weights else None
        if step:
            return u.squeeze(1), None if shown is None else shown.squeeze(2)
        return u, shown


def _scores(query: Tensor, memory: Memory, unseen: float) -> Tensor:
    """Return products ``[B, Tq, Tk]`` of queries and keys, ``unseen`` for hidden keys."""
    scores = query @ memory.key.transpose(1, 2)
    if memory.lengths is not None:
        visible = length_mask(memory.lengths, scores.shape[-1]).unsqueeze(1)
        scores = scores.masked_fill(~visible, unseen)
    return scores if memory.mask is None else scores.masked_fill(~memory.mask, unseen)


#: Logarithm of the largest ratio of two weights that float32 can represent.
WIDEST = 60.0


def _order(query: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """Return values ``[B, Tq, Tk]`` that order additive scores, and their relative error.

    The values are the attention weights of scores scaled so that no weight underflows, and 0 for
    hidden keys. Values that differ by less than the error may be in any order.
    """
    key, score_vector = memory.key, memory.score_vector
    assert score_vector is not None
    score_vector = score_vector.to(key.dtype)
    largest: Tensor | float = 1.0  # of the activation's output
    if memory.score != "tanh":
        seen = memory._whole_mask()
        shown = key if seen is None else key.masked_fill(~seen.transpose(1, 2), 0)
        largest = sum(F.pad(x.abs().flatten(0, 1), (0, 0, 0, 1)).amax(0) for x in (query, shown))
    most = 2 * (score_vector.abs() * largest).sum()
    score_vector = score_vector * (WIDEST / most.clamp_min(WIDEST))
    weights = additive_attention(
        query, key, memory.value.to(key.dtype), score_vector, activation=memory.score,
        lengths=memory.lengths, mask=memory.mask, need_weights=True, backend=memory.backend,
    ).weights  # fmt: skip
    assert weights is not None
    return weights, 16 * torch.finfo(key.dtype).eps * (1 + most.clamp_max(WIDEST))


#: The largest number of feature elements in memory while keys are scored by the formula.
FEATURES = 1 << 22


def _score_pairs(query: Tensor, memory: Memory, index: Tensor) -> Tensor:
    """Return the additive scores of the keys ``index [B, Tq, m]``, computed by the formula."""
    assert memory.score_vector is not None
    (B, Tq, m), A = index.shape, query.shape[-1]
    pairs, rows = index.reshape(B, Tq * m), torch.arange(Tq * m, device=index.device) // max(m, 1)
    scores = []
    for some, of in zip(*(x.split(max(FEATURES // max(B * A, 1), 1), -1) for x in (pairs, rows))):
        key = memory.key.gather(1, some.unsqueeze(-1).expand(-1, -1, A))
        features = ACTIVATIONS[memory.score](query[:, of] + key)
        scores.append(features @ memory.score_vector.to(query.dtype))
    return torch.cat(scores, -1).view(B, Tq, m)


def _largest(query: Tensor, memory: Memory, k: int) -> Tensor:
    """Return the k keys of the largest additive scores, ``[B, Tq, k]``, largest first.

    The fused kernel finds the candidate keys; these are scored again by the formula, which
    distinguishes scores that the weights of a row do not. While tracing, all keys are scored.
    """
    order, error = _order(query, memory)
    first = order.topk(k)
    near = (order >= first.values[..., -1:] * (1 - error)) & (order > 0)
    count = order.shape[-1]
    if not is_tracing() and near.numel():
        count = max(k, int(near.sum(-1).amax()))
    index = first.indices if count == k else order.topk(count).indices
    scores = _score_pairs(query, memory, index)
    scores = scores.masked_fill(order.gather(-1, index) == 0, -torch.inf)
    return index.gather(-1, scores.topk(k).indices)


class TopKMemory(NamedTuple):
    """Memory of :class:`TopKAttention`.

    Attributes:
        memory: the attention's memory of keys.
        value: all values, ``[B, Tk, Dv]``.

    Example:
        >>> attention = attnfast.nn.TopKAttention(attnfast.nn.LuongAttention(4, 6), k=3)
        >>> attention.prepare(torch.randn(2, 7, 6)).value.shape
        torch.Size([2, 7, 6])
    """

    memory: Memory
    value: Tensor

    def index_select(self, index: Tensor) -> TopKMemory:
        """Return the memory of the sequences ``index``."""
        return TopKMemory(self.memory.index_select(index), self.value.index_select(0, index))


class TopKAttention(_AttentionWrapper):
    r"""Attention to the k keys of largest score.

    .. math:: S_t = \mathrm{top}_k\, e_t, \quad
              c_t = \sum_{j \in S_t} \mathrm{softmax}_{j \in S_t}(e_{tj})\, v_j

    Keys are chosen by their scores in float32 (float64 for float64), computed without a gradient:
    the scores that a fused pass finds near the k-th are recomputed by the formula. Values of the
    other keys are not read, and nothing is saved for their backward. Ties are broken arbitrarily.
    A row that sees fewer than k keys attends to all of them.

    Args:
        attention: a :class:`BahdanauAttention` or :class:`LuongAttention`.
        k: how many keys a row attends to.

    Papers: Miller et al., "Key-Value Memory Networks for Directly Reading Documents", EMNLP 2016,
    arXiv:1606.03126, for memories too large to average; Gupta et al., "Memory-efficient
    Transformers via Top-k Attention", 2021, arXiv:2106.06899.

    Example:
        >>> attention = attnfast.nn.TopKAttention(attnfast.nn.BahdanauAttention(6, 8, 4), k=2)
        >>> memory = attention.prepare(torch.randn(2, 5, 8))
        >>> _, weights = attention(torch.randn(2, 6), memory, need_weights=True)
        >>> (weights > 0).sum(-1)
        tensor([2, 2])
    """

    def __init__(self, attention: nn.Module, k: int):
        if not is_plain(attention, BahdanauAttention, LuongAttention):
            raise_type_error(
                "attention", "a BahdanauAttention or LuongAttention", type(attention).__name__
            )
        check_int("k", k)
        super().__init__(attention)
        self.k = k

    def extra_repr(self) -> str:
        """Return the number of keys that a row attends to."""
        return repr_fields(self, ("k",))

    def prepare(  # type: ignore[override]
        self,
        states: Tensor,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        values: Tensor | None = None,
    ) -> TopKMemory:
        """Make the memory, as the attention's ``prepare`` does.

        Args:
            states: encoder states ``[B, Tk, key_dim]``.
            lengths: ``[B]``, the number of states that are not padding.
            mask: boolean ``[B, Tk]``, True where a state may be attended to.
            values: ``[B, Tk, Dv]``, separate from the keys; None uses the states.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        memory = self.attention.prepare(states, lengths, mask, values)
        if memory.score == "dot":
            return TopKMemory(memory, memory.value)
        one_column = memory.value[..., :1].detach().contiguous()  # only the scores are used
        short = self.attention._remember(memory.key, one_column, lengths, mask)
        return TopKMemory(short, memory.value)

    def choose(self, state: Tensor, memory: TopKMemory) -> Tensor:
        """Return the k keys of the largest scores, ``[B, k]`` or ``[B, Tq, k]``, largest first.

        If there are fewer than k keys, k is the number of keys. Hidden keys come last.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        if not isinstance(memory, TopKMemory):
            raise_type_error("memory", "a result of prepare(...)", describe(memory))
        keys, attention = memory.memory, self.attention
        attention._check_call(state, keys)
        with torch.no_grad():
            rows = attention.query_proj(state.unsqueeze(1) if state.dim() == 2 else state)
            wide = accumulation_dtype(rows.dtype)
            rows, keys = rows.to(wide), keys._replace(key=keys.key.to(wide), shared_keys=None)
            k = min(self.k, keys.key.shape[1])
            if keys.score == "dot":
                index = _scores(rows, keys, -torch.inf).topk(k).indices
            else:
                index = _largest(rows, keys, k)
        return index.view(*state.shape[:-1], k)

    def forward(
        self, state: Tensor, memory: TopKMemory, need_weights: bool | str = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from decoder states to a prepared memory.

        Args:
            state: ``[B, query_dim]`` for one decoder step or ``[B, Tq, query_dim]`` for many.
            memory: from :meth:`prepare`.
            need_weights: return the weights too, 0 for keys that were not chosen.

        Returns:
            ``context [B, Dv]`` or ``[B, Tq, Dv]``, and ``weights [B, Tk]`` or ``[B, Tq, Tk]`` or
            None.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        index = self.choose(state, memory)
        keys, Tk = memory.memory, memory.value.shape[1]
        rows, k = index.shape[:-1], index.shape[-1]
        Tq = rows[1] if rows[1:] else 1
        flat = index.reshape(len(index), Tq * k, 1)

        def chosen(x: Tensor) -> Tensor:
            """Return the k rows of x for every state, ``[B · Tq, k, ·]``."""
            picked = x.gather(1, flat.expand(-1, -1, x.shape[-1]))
            return picked.view(x.shape[0] * Tq, k, x.shape[-1])

        seen = torch.ones_like(index, dtype=torch.bool)
        if keys.lengths is not None:
            seen = index < keys.lengths.view(-1, *[1] * len(rows[1:]), 1)
        if keys.mask is not None:
            of = keys.mask.expand(len(index), 1, Tk).expand(-1, Tq, -1)
            seen = seen & of.reshape(*rows, Tk).gather(-1, index)
        few = Memory(
            chosen(keys.key), chosen(memory.value), None, seen.view(len(index) * Tq, 1, k),
            keys.score_vector, keys.backend, score=keys.score,
        )  # fmt: skip
        context, weights = self.attention(state.flatten(0, -2), few, need_weights)
        context = context.view(*rows, context.shape[-1])
        if not need_weights:
            return context, None
        dense = weights.new_zeros(*rows, Tk)
        return context, dense.scatter(-1, index, weights.view(*rows, k))
