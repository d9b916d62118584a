"""Attention whose rows see some of the keys: windows, strides, predicted and hard positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_array,
    check_int,
    describe,
    is_finite,
    is_int,
    is_one,
    raise_type_error,
    raise_value_error,
)
from attnfast.decoding import Memory, check_memory
from attnfast.functional import additive_attention, dot_attention
from attnfast.nn.attention import (
    LuongAttention,
    MultiHeadAttention,
    check_sizes,
    check_target_mask,
)
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.span import check_form, to_form
from attnfast.spans import Position, Span, gaussian_bias, log_prior


class SpanState(NamedTuple):
    """The state of attention within a span: each step returns it, and a beam search reorders it.

    ``rows``: the number of rows so far, an int, or ``[B]`` if it differs by sequence. ``key [B]``:
    the key of largest weight in the last row of :class:`HardMonotonicWindowAttention`.

    Example:
        >>> attention = attnfast.nn.LocalAttention(query_dim=4, key_dim=6, window=2)
        >>> memory = attention.prepare(torch.randn(2, 7, 6))
        >>> context, _, state = attention(torch.randn(2, 4), memory, attnfast.nn.SpanState())
        >>> state.rows
        1
    """

    rows: int | Tensor = 0
    key: Tensor | None = None

    def index_select(self, index: Tensor) -> SpanState:
        """Return the state of the sequences ``index``."""
        tensors = {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**{name: x.index_select(0, index) for name, x in tensors.items()})

    def _after(self, rows: int | Tensor) -> SpanState:
        """Return the state after more rows: an int, or ``[B]`` counts without padding."""
        return self._replace(rows=self.rows + rows)


class PriorTerms(TypedDict, total=False):
    """The preference for keys near a position, as arguments of :func:`attnfast.attend`."""

    sigma: float | Tensor | None
    bias: Tensor


def is_number(x: object) -> bool:
    """Return whether x is a finite number and not a bool."""
    return is_finite(x) and not isinstance(x, bool)


class _SpanAttention(LuongAttention):
    """Luong's scores within a span; the history carries the index of the next row."""

    has_history = True
    knows_order = True
    span: Span
    _sizes = ("query_dim", "key_dim", "score", "span")

    def positions(self, rows: int | Tensor, Tq: int, device: torch.device) -> Position:
        """Return the positions of Tq rows that follow the first ``rows`` rows."""
        if isinstance(rows, Tensor):
            return rows.unsqueeze(-1) + torch.arange(Tq, device=device)
        return rows

    def start(self, memory: Memory) -> SpanState:
        """Return the history before the first row.

        Raises:
            TypeError: ``memory`` is not from :meth:`prepare`.
        """
        check_memory(memory)
        return SpanState()

    def forward(  # type: ignore[override]
        self,
        state: Tensor,
        memory: Memory,
        history: SpanState | None = None,
        need_weights: bool | str = False,
        target_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, SpanState]:
        """Attend from decoder states to a prepared memory.

        Args:
            state: ``[B, query_dim]`` for one decoder step or ``[B, Tq, query_dim]`` for many.
            memory: from :meth:`prepare`.
            history: the history that the last call returned, or None before the first row.
            need_weights: return the weights too, in the columns of the span (see
                :class:`attnfast.Span`), or ``"dense"`` or ``"sparse"``.
            target_mask: ``[B]`` or ``[B, Tq]``, False for rows of padding, which the history does
                not count. A stride that is not fixed counts them, because its rows must have the
                same phase in all sequences.

        Returns:
            ``context [B, Dv]`` or ``[B, Tq, Dv]``, the weights or None, and the history after the
            last of the states.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        try:
            step = state.dim() == 2
            query = self.query_proj(state.unsqueeze(1) if step else state)
            check_target_mask(target_mask, state.shape[:-1], state)
            history = self.start(memory) if history is None else history
            mask = target_mask.unsqueeze(1) if step and target_mask is not None else target_mask
            context, weights, history = self._rows(query, memory, history, need_weights, mask)
            counted = None if self.span.phases > 1 else mask
            history = history._after(query.shape[1] if counted is None else counted.sum(-1))
        except Exception:
            self._check_call(state, memory)
            if not isinstance(history, (SpanState, type(None))):
                raise_type_error("history", "a SpanState or None", describe(history))
            for name, x in [] if history is None else history._asdict().items():
                if isinstance(x, Tensor) or (name == "key" and x is not None):
                    B = state.shape[0]
                    check_array(f"history.{name}", x, "int64", (B,), like=state, of="state")
                elif name == "rows":
                    check_int("history.rows", x, 0)
            raise
        if step:
            return context.squeeze(1), None if weights is None else _first_row(weights), history
        return context, weights, history

    def terms(self, query: Tensor, memory: Memory, position: Position) -> PriorTerms:
        """Return arguments of :func:`attnfast.attend` for rows at ``position``, such as a bias."""
        return {}

    def _rows(
        self,
        query: Tensor,
        memory: Memory,
        history: SpanState,
        need_weights: bool | str,
        target_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, SpanState]:
        """Return the contexts of rows, their weights, and the history before rows are counted."""
        position = self.positions(history.rows, query.shape[1], query.device)
        context, weights = self._attend(
            query, memory, need_weights,
            span=self.span, position=position, **self.terms(query, memory, position),
        )  # fmt: skip
        return context, weights, history


def _first_row(weights: Tensor) -> Tensor:
    return weights.select(1, 0)


class LocalAttention(_SpanAttention):
    r"""Luong's local-m: row t attends to a window around the key ``slope · t``.

    .. math:: |j - a t| \le D

    With ``sigma``, :math:`-(j - a t)^2 / 2 \sigma^2` is added to the scores, which favours near
    keys. With ``gaussian_height`` as well, the bump :math:`h \exp(-(j - a t)^2 / 2 \sigma^2)` is
    added instead, which leaves the scores of far keys unchanged.

    Args:
        query_dim, key_dim, score, attn_dim, backend: as in :class:`LuongAttention`.
        window: D, or (left, right); None for no limit.
        causal: hide the keys after the row's own.
        slope: a, keys per row: 1 in the paper; None for the sequence's length over the number of
            rows, which needs all rows in one call.
        sigma: σ, in keys; None adds nothing.
        gaussian_height: h; None adds no bias.

    Raises:
        ValueError: a negative window, an unknown score, a gaussian_height without a σ.

    Paper: Luong, Pham and Manning, EMNLP 2015, arXiv:1508.04025.

    Example:
        >>> attention = attnfast.nn.LocalAttention(6, 8, window=1)
        >>> memory = attention.prepare(torch.randn(2, 9, 8))
        >>> _, weights, history = attention(torch.randn(2, 6), memory, need_weights=True)
        >>> weights.shape  # a key before the row's, its own and one after it
        torch.Size([2, 3])
    """

    _defaults: ClassVar = {
        "slope": 1.0,
        "sigma": None,
        "gaussian_height": None,
        **LuongAttention._defaults,
    }

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        window: int | tuple[int, int] | None = 10,
        score: str = "general",
        attn_dim: int | None = None,
        *,
        causal: bool = False,
        slope: float | None = 1.0,
        sigma: float | None = None,
        gaussian_height: float | None = None,
        backend: str | None = None,
    ):
        super().__init__(query_dim, key_dim, score, attn_dim, backend)
        if sigma is not None and not (is_number(sigma) and sigma > 0):
            raise_value_error("sigma", "a positive number or None", describe(sigma))
        if gaussian_height is not None and (sigma is None or not is_number(gaussian_height)):
            expected = "a number with a sigma, or None without"
            raise_value_error("gaussian_height", expected, describe(gaussian_height))
        if slope is not None and not (is_number(slope) and 0 <= slope < 1e9):
            raise_value_error("slope", "a number of at least 0, or None", describe(slope))
        self.span = Span(window=window, causal=causal)
        self.slope, self.sigma, self.gaussian_height = slope, sigma, gaussian_height

    def positions(self, rows: int | Tensor, Tq: int, device: torch.device) -> Position:
        """Return the positions of Tq rows that follow the first ``rows`` rows: slope · t.

        Raises:
            ValueError: ``rows`` is not 0, and the slope is None.
        """
        if self.slope is None:
            if isinstance(rows, Tensor) or rows:
                raise_value_error("slope", "a number to continue from earlier rows", None)
            return "diagonal"
        if is_one(self.slope):
            return super().positions(rows, Tq, device)
        first = rows.unsqueeze(-1) if isinstance(rows, Tensor) else rows
        return self.slope * (first + torch.arange(Tq, device=device, dtype=torch.float64))

    def terms(self, query: Tensor, memory: Memory, position: Position) -> PriorTerms:
        """Return ``sigma`` or the Gaussian bias, which is added to the scores."""
        if self.gaussian_height is None or self.sigma is None:
            return {"sigma": self.sigma}
        bump = gaussian_bias(
            query.shape[1], memory.key.shape[1], self.sigma, height=self.gaussian_height,
            position=position, lengths=memory.lengths, device=query.device,
            dtype=accumulation_dtype(query.dtype),
        )  # fmt: skip
        return {"bias": bump if bump.dim() == 3 else bump.unsqueeze(0)}


class StridedAttention(_SpanAttention):
    r"""Row t attends to every k-th key: j ≡ t (mod k), or j ≡ 0 (mod k) if fixed.

    .. math:: \alpha_{tj} = \mathrm{softmax}_{j \in S_t}(e_{tj}), \quad
              S_t = \{j : j \equiv t \bmod k\} \text{ or } \{j : j \equiv 0 \bmod k\}

    Args:
        query_dim, key_dim, score, attn_dim, backend: as in :class:`LuongAttention`.
        stride: k.
        fixed: the same keys for all rows.
        causal: hide the keys after the row's own.

    Raises:
        ValueError: a stride below 1, an unknown score.

    Paper: Child et al., arXiv:1904.10509.

    Example:
        >>> attention = attnfast.nn.StridedAttention(6, 8, stride=3)
        >>> _, weights, _ = attention(
        ...     torch.randn(2, 6), attention.prepare(torch.randn(2, 9, 8)), need_weights=True
        ... )
        >>> weights.shape  # every third key
        torch.Size([2, 3])
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        stride: int,
        score: str = "general",
        attn_dim: int | None = None,
        *,
        fixed: bool = False,
        causal: bool = False,
        backend: str | None = None,
    ):
        super().__init__(query_dim, key_dim, score, attn_dim, backend)
        self.span = Span(stride=stride, fixed=fixed, causal=causal)

    def positions(self, rows: int | Tensor, Tq: int, device: torch.device) -> Position:
        """Return the positions of Tq rows that follow the first ``rows`` rows.

        Raises:
            ValueError: ``rows`` is a tensor, and the stride is not fixed.
        """
        if isinstance(rows, Tensor) and self.span.phases > 1:
            expected = "one number for all sequences, because the stride is not fixed"
            raise_value_error("history.rows", expected, describe(rows))
        return super().positions(rows, Tq, device)


class HardMonotonicWindowAttention(_SpanAttention):
    r"""Hard monotonic attention: no row sees a key before the previous row's argmax.

    .. math:: j \ge m_{t-1}, \quad m_t = \mathrm{argmax}_j \alpha_{tj}

    Rows are sequential: T rows take T steps. No gradient passes through the argmax.

    Args:
        query_dim, key_dim, score, attn_dim, backend: as in :class:`LuongAttention`.
        ahead: how many keys after :math:`m_{t-1}` a row may see; None for all.

    Raises:
        ValueError: ``ahead`` below 0, an unknown score.

    Paper: Chorowski et al., "Attention-Based Models for Speech Recognition", NeurIPS 2015,
    arXiv:1506.07503, whose window follows the median of the last weights, not their argmax. The
    monotonic attention of Raffel et al., ICML 2017, arXiv:1704.00784, is another: it is stochastic.

    Example:
        >>> attention = attnfast.nn.HardMonotonicWindowAttention(6, 8, ahead=2)
        >>> context, *_ = attention(torch.randn(2, 6), attention.prepare(torch.randn(2, 9, 8)))
        >>> context.shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        ahead: int | None = None,
        score: str = "general",
        attn_dim: int | None = None,
        backend: str | None = None,
    ):
        super().__init__(query_dim, key_dim, score, attn_dim, backend)
        if ahead is not None and not (is_int(ahead) and 0 <= ahead < 2**31):
            raise_value_error("ahead", "an integer of at least 0, or None", describe(ahead))
        self.span = Span(window=(0, ahead))

    def _rows(
        self,
        query: Tensor,
        memory: Memory,
        history: SpanState,
        need_weights: bool | str,
        target_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, SpanState]:
        check_form(need_weights)
        Tk = memory.key.shape[-2]
        key = history.key
        key = query.new_zeros(query.shape[0], dtype=torch.int64) if key is None else key
        contexts, weights, keys = [], [], []
        for t, row in enumerate(query.split(1, 1)):  # a query without rows is one part
            position = key.unsqueeze(1)[:, : row.shape[1]]
            context, weight = self._attend(row, memory, True, span=self.span, position=position)
            assert weight is not None
            contexts.append(context)
            weights.append(weight)
            keys.append(position)
            if Tk and row.shape[1]:
                best = weight.detach().squeeze(1).argmax(-1)
                best = key + best if self.span.compact else best
                key = best if target_mask is None else torch.where(target_mask[:, t], best, key)
        context, weight, p = (torch.cat(x, 1) for x in (contexts, weights, keys))
        history = history._replace(key=key)
        if isinstance(need_weights, str):
            seen = self.span.key_indices(p.shape[1], Tk, position=p, lengths=memory.lengths)
            weight = to_form(need_weights, weight, seen, Tk)
        return context, weight if need_weights else None, history


class LocalPredictiveAttention(LuongAttention):
    r"""Luong's local-p: a row attends to a window around a key that it predicts.

    .. math:: p_t = S\, \sigma(v^\top \tanh(W_p s_t)), \quad
              \alpha_{tj} = \mathrm{softmax}_{|j - p_t| \le D}(e_{tj})
              \exp\left(-\frac{(j - p_t)^2}{2 (D/2)^2}\right)

    with S the length of the source. The weights sum to less than 1. The gradient reaches
    :math:`p_t` through the Gaussian.

    Args:
        query_dim, key_dim, score, attn_dim, backend: as in :class:`LuongAttention`.
        window: D, at least 1.

    Raises:
        ValueError: a window below 1, an unknown score.

    Paper: Luong, Pham and Manning, EMNLP 2015, arXiv:1508.04025.

    Example:
        >>> attention = attnfast.nn.LocalPredictiveAttention(6, 8, window=2)
        >>> context, *_ = attention(torch.randn(2, 6), attention.prepare(torch.randn(2, 9, 8)))
        >>> context.shape
        torch.Size([2, 8])
    """

    knows_order = True
    _sizes = ("query_dim", "key_dim", "score", "span")

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        window: int = 10,
        score: str = "general",
        attn_dim: int | None = None,
        backend: str | None = None,
    ):
        super().__init__(query_dim, key_dim, score, attn_dim, backend)
        check_int("window", window)
        self.span = Span(window=window)
        self.position_proj = nn.Linear(query_dim, query_dim, bias=False)
        self.position_weight = nn.Linear(query_dim, 1, bias=False)

    def positions(self, state: Tensor, memory: Memory) -> Tensor:
        """Return p ``[B, Tq]`` of the states ``[B, Tq, query_dim]``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        self._check_call(state, memory)
        check_array("state", state, "floating-point", ("B", "Tq", "query_dim"))
        return self._positions(state, memory)

    def _positions(self, state: Tensor, memory: Memory) -> Tensor:
        share = self.position_weight(torch.tanh(self.position_proj(state))).squeeze(-1)
        share = share.to(accumulation_dtype(share.dtype)).sigmoid()
        if memory.lengths is None:
            return memory.key.shape[-2] * share
        return memory.lengths.unsqueeze(-1) * share

    def forward(  # type: ignore[override]
        self, state: Tensor, memory: Memory, need_weights: bool | str = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from decoder states to a prepared memory.

        Args:
            state: ``[B, query_dim]`` for one decoder step or ``[B, Tq, query_dim]`` for many.
            memory: from :meth:`prepare`.
            need_weights: return the weights too, in the columns of the window (see
                :class:`attnfast.Span`), or ``"dense"`` or ``"sparse"``.

        Returns:
            ``context [B, Dv]`` or ``[B, Tq, Dv]``, and the weights or None.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        try:
            check_form(need_weights)
            step = state.dim() == 2
            rows = state.unsqueeze(1) if step else state
            p = self._positions(rows, memory)
            left, _ = self.span.sides
            sigma = (left or 0) / 2
            # With the Gaussian as a prior the softmax is over e + log g. Σ α / g is the ratio of
            # the paper's normaliser to that one; dividing by it recovers the paper's weights. In
            # the window g ≥ e⁻².
            wide = sigma / self.temperature**0.5  # the temperature does not apply to the Gaussian
            context, weights = self._attend(
                self.query_proj(rows), memory, True, span=self.span, position=p, sigma=wide
            )
            assert weights is not None
        except Exception:
            self._check_call(state, memory)
            raise
        Tk = memory.key.shape[-2]
        keys = self.span.key_indices(rows.shape[1], Tk, position=p.detach(), lengths=memory.lengths)
        prior = log_prior(keys, p, sigma, p.dtype).masked_fill(keys < 0, 0)
        total = (weights * (-prior).exp()).sum(-1, keepdim=True)
        scale = torch.where(total > 0, 1 / total.where(total > 0, 1), 0).to(context.dtype)
        context = context * scale
        shown: Any = weights * scale if need_weights else None
        if isinstance(need_weights, str):
            shown = to_form(need_weights, shown, keys, Tk)
        if step:
            return context.squeeze(1), None if shown is None else _first_row(shown)
        return context, shown


class SparseSelfAttention(MultiHeadAttention):
    r"""Self-attention of several heads, each with its own span.

    .. math:: y_t = W_o [c^1_t; \dots; c^H_t], \quad
              c^h_t = \sum_{j \in S^h_t} \mathrm{softmax}_{j \in S^h_t}
              \left(\mathrm{score}(W^h_q x_t, W^h_k x_j)\right) W^h_v x_j

    :math:`S^h_t` are the keys that the span of head h shows to row t. Local and strided heads, in
    one layer or two, attend to near and far keys at a cost proportional to the number of visible
    keys::

        SparseSelfAttention(512, [Span(window=5)] * 4 + [Span(stride=8)] * 4)

    Args:
        dim: features of the states, of queries, keys and values of all heads, and of the output.
        heads: a :class:`attnfast.Span` for each head; their number divides ``dim``.
        score: ``"dot"`` or ``"additive"``.
        backend: as in :func:`attnfast.dot_attention`.
        positions: :class:`RelativePositions` with as many heads, added to the scores, or None.

    Raises:
        ValueError: an unknown score, or heads that do not divide the features.

    Paper: Child et al., arXiv:1904.10509.

    Example:
        >>> heads = [attnfast.Span(window=1), attnfast.Span(stride=2)]
        >>> attention = attnfast.nn.SparseSelfAttention(8, heads)
        >>> attention(torch.randn(2, 5, 8))[0].shape
        torch.Size([2, 5, 8])
    """

    _sizes = ("attn_dim", "heads", "score")

    def __init__(
        self,
        dim: int,
        heads: Sequence[Span],
        score: str = "dot",
        backend: str | None = None,
        positions: nn.Module | None = None,
    ):
        if isinstance(heads, Iterable) and not isinstance(heads, Tensor):
            heads = list(heads)
        if not isinstance(heads, list) or not all(isinstance(x, Span) for x in heads or [None]):
            raise_value_error("heads", "a Span for each head, one or more", describe(heads))
        check_sizes(dim=dim)
        super().__init__(dim, dim, dim, len(heads), score, backend, positions=positions)
        self.heads = heads

    def forward(  # type: ignore[override]
        self,
        states: Tensor,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        need_weights: bool | str = False,
    ) -> tuple[Tensor, Tensor | list[Tensor] | None]:
        """Let states attend to each other.

        Args:
            states: ``[B, T, dim]``.
            lengths: ``[B]``, the number of states that are not padding.
            mask: boolean ``[B, T]``, True where a state may be attended to.
            need_weights: return the weights too, a list with ``[B, T, W]`` for each head; or
                ``"dense"``, ``[B, H, T, T]``, or ``"sparse"``.

        Returns:
            ``[B, T, dim]``, and the weights or None.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        try:
            query, key, value = (
                self._split(proj(states))
                for proj in (self.query_proj, self.key_proj, self.value_proj)
            )
            terms: dict[str, Any] = {
                "lengths": lengths,
                "mask": None if mask is None else mask[:, None, None],
                "temperature": self.temperature,
                "need_weights": need_weights,
                "backend": self.backend,
            }
            if self.positions is not None:
                terms["bias"] = self.positions(*states.shape[1:2] * 2)
            if self.score_vector is None:
                result = dot_attention(query, key, value, span=self.heads, **terms)
            else:
                result = additive_attention(
                    query, key, value, self.score_vector, span=self.heads, **terms
                )
        except Exception:
            self._check_states(states)
            if mask is not None:
                check_array("mask", mask, "boolean", states.shape[:2], like=states, of="states")
            raise
        context, weights = result
        return self.out_proj(context.transpose(1, 2).flatten(2)), weights
