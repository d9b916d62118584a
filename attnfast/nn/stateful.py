"""Attention that uses its previous weights: coverage, location-aware and forward attention."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from attnfast._utils.checks import (
    check_array,
    check_choice,
    check_flag,
    check_int,
    describe,
    is_finite,
    is_int,
    raise_type_error,
    raise_value_error,
)
from attnfast.decoding import Memory, attend_with_history, check_memory
from attnfast.functional import logarithm
from attnfast.nn._linear import weight_of
from attnfast.nn.attention import _Attention, check_sizes, check_target_mask
from attnfast.ops.arguments import check_activation, length_mask
from attnfast.ops.coverage import NORMALISATIONS
from attnfast.ops.span import check_form


class CumulativeState(NamedTuple):
    """Cumulative attention of the previous rows: passed between steps, reordered by a search.

    ``coverage [B, Tk]``: the sum of their weights. ``previous [B, Tk]``: the weights of the last
    row. ``loss [B]``: the coverage loss so far, or None for 0. ``log_previous [B, Tk]``: for
    forward attention, the logarithms of ``previous``, which do not underflow; if None, they are
    computed from ``previous``.

    Example:
        >>> attention = attnfast.nn.CoverageAttention(6, 8, 4)
        >>> history = attention.start(attention.prepare(torch.randn(2, 5, 8)))
        >>> history.coverage.sum().item()  # no row has attended yet
        0.0
        >>> history.index_select(torch.tensor([1, 1, 0])).coverage.shape
        torch.Size([3, 5])
    """

    coverage: Tensor
    previous: Tensor
    loss: Tensor | None = None
    log_previous: Tensor | None = None

    def index_select(self, index: Tensor) -> CumulativeState:
        """Return the history of the sequences ``index``."""
        tensors = {name: x for name, x in self._asdict().items() if x is not None}
        return self._replace(**{name: x.index_select(0, index) for name, x in tensors.items()})

    def detach(self) -> CumulativeState:
        """Return the history without the graph that made it."""
        return self._replace(
            **{name: x.detach() for name, x in self._asdict().items() if x is not None}
        )

    def _state(self) -> dict[str, Tensor]:
        """Return the arguments of :func:`attnfast.coverage_attention` that continue from it."""
        if self.log_previous is None:
            return {"coverage": self.coverage, "previous": self.previous}
        return {"coverage": self.coverage, "log_previous": self.log_previous}

    def _after(
        self,
        weights: Tensor,
        log_weights: Tensor | None,
        coverage: Tensor,
        loss: Tensor,
        lengths: Tensor | None,
    ) -> CumulativeState:
        """Return the history after more rows, ``lengths [B]`` of which are not padding."""
        log_previous = None
        if log_weights is not None:
            first = logarithm(self.previous) if self.log_previous is None else self.log_previous
            log_previous = last_of(log_weights, first, lengths)
        return CumulativeState(
            coverage,
            last_of(weights.to(coverage.dtype), self.previous, lengths),
            loss if self.loss is None else self.loss + loss,
            log_previous,
        )


def last_of(steps: Tensor, first: Tensor, lengths: Tensor | None) -> Tensor:
    """Return every sequence's last row that is not padding, or ``first`` if there is none.

    The result is ``[B, H]`` for ``steps [B, T, H]``, and ``[L, B, H]`` for a stack.
    """
    if steps.shape[-2] == 0:
        return first
    if lengths is None:
        return steps.select(-2, -1)
    index = (lengths - 1).clamp(min=0).view(-1, 1, 1)
    last = steps.gather(-2, index.expand(*steps.shape[:-2], 1, steps.shape[-1])).squeeze(-2)
    return torch.where((lengths > 0).unsqueeze(-1), last, first)


class _Terms(TypedDict, total=False):
    """Arguments of :func:`attnfast.coverage_attention` that a call of the module may add."""

    transition_prob: float | Tensor


class HistoryAttention(_Attention):
    r"""Base class of additive attention that depends on the weights of previous rows.

    Calls differ from those of the other modules only by the history. All queries in one call, or
    one after the other with the history passed on, give the same results; in half precision, up to
    the rounding of the weights in the history.

    Example:
        >>> attention = attnfast.nn.CoverageAttention(6, 8, 4)
        >>> isinstance(attention, attnfast.nn.HistoryAttention), attention.has_history
        (True, True)
    """

    has_history = True

    def __init__(
        self, query_dim: int, key_dim: int, attn_dim: int, *, bias: bool, activation: str,
        normalisation: str = "softmax", backend: str | None
    ):  # fmt: skip
        check_sizes(query_dim=query_dim, key_dim=key_dim, attn_dim=attn_dim)
        check_flag("bias", bias)
        check_activation(activation)
        check_choice("normalisation", normalisation, NORMALISATIONS)
        super().__init__((attn_dim,), 1.0, backend)
        self.query_dim, self.key_dim, self.attn_dim = query_dim, key_dim, attn_dim
        self.activation = activation
        self.normalisation = normalisation
        self.query_proj = nn.Linear(query_dim, attn_dim, bias=bias)
        self.key_proj = nn.Linear(key_dim, attn_dim, bias=False)

    def _terms(self, memory: Memory) -> dict[str, Any]:
        """Return the module's own arguments of :func:`attnfast.coverage_attention`."""
        return {"normalisation": self.normalisation}

    def start(self, memory: Memory) -> CumulativeState:
        """Return the history before the first row.

        Raises:
            TypeError: ``memory`` is not from :meth:`prepare`.
        """
        check_memory(memory)
        zeros = memory.key.new_zeros(memory.key.shape[:-1])
        zeros = zeros if zeros.dtype == torch.float64 else zeros.float()
        return CumulativeState(zeros, zeros, zeros.new_zeros(zeros.shape[:-1]))

    def forward(  # type: ignore[override]
        self,
        state: Tensor,
        memory: Memory,
        history: CumulativeState | None = None,
        need_weights: bool | str = False,
        target_mask: Tensor | None = None,
        **terms: Unpack[_Terms],
    ) -> tuple[Tensor, Tensor | None, CumulativeState]:
        """Attend from decoder states to a prepared memory.

        Args:
            state: ``[B, query_dim]`` for one decoder step or ``[B, Tq, query_dim]`` for many.
            memory: from :meth:`prepare`.
            history: the history that the last call returned; None means that of
                :meth:`HistoryAttention.start`.
            need_weights: return the weights too.
            target_mask: ``[B]`` or ``[B, Tq]``, False for the padding at a target's end, which
                leaves the history as it was.

        Returns:
            ``context [B, Dv]`` or ``[B, Tq, Dv]``, ``weights [B, Tk]`` or ``[B, Tq, Tk]`` or None,
            and the history after the last of the states.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        try:
            step = state.dim() == 2
            check_form(need_weights)
            query = self.query_proj(state.unsqueeze(1) if step else state)
            mask = memory.mask
            if not isinstance(history, (CumulativeState, type(None))):
                raise_type_error("history", "a CumulativeState or None", describe(history))
            if history is not None and (history.coverage is None or history.previous is None):
                raise_value_error(
                    "history",
                    "a CumulativeState whose coverage and previous are tensors",
                    describe(history),
                )
            if target_mask is not None:
                check_target_mask(target_mask, list(query.shape[: 1 if step else 2]))
                seen = target_mask.reshape(*query.shape[:2], 1)
                mask = seen if mask is None else seen & mask
            history = self.start(memory) if history is None else history
            result = attend_with_history(
                query,
                memory,
                mask=mask,
                temperature=self.temperature,
                need_weights=True,
                **{**history._state(), **self._terms(memory), **terms},
            )
        except Exception:
            self._check_call(state, memory)
            if isinstance(history, CumulativeState):
                for name in ("coverage", "previous"):
                    x, shape = getattr(history, name), memory.key.shape[:2]
                    check_array(
                        f"history.{name}", x, "floating-point", shape, like=state, of="memory"
                    )
            raise
        context, weights, coverage = result
        assert weights is not None
        counts = None if target_mask is None else target_mask.reshape(query.shape[:2]).sum(-1)
        history = history._after(weights, result.log_weights, coverage, result.loss, counts)
        shown = weights if need_weights else None
        if step:
            return context.squeeze(1), None if shown is None else shown.squeeze(1), history
        return context, shown, history


class CoverageAttention(HistoryAttention):
    r"""Additive attention with a coverage vector: the sum of each key's previous weights.

    .. math:: e_{tj} = w^\top \tanh(W_q s_t + b + W_k h_j + w_c C_{tj}) - \lambda C_{tj}, \quad
              C_{t+1,j} = C_{tj} + \alpha_{tj} / \phi_j

    Args:
        query_dim, key_dim, attn_dim: as in :class:`BahdanauAttention`.
        feature: put the coverage into the tanh, with a learned :math:`w_c`.
        penalty: λ: a number, None for 0, or an :class:`~torch.nn.Parameter` to learn it.
        fertility: N, the largest fertility of a key in Tu et al.: :math:`\phi_j = N \sigma(u^\top
            h_j)`; None for :math:`\phi = 1`.
        bias: give the query projection a bias.
        activation, normalisation, backend: as in :func:`attnfast.coverage_attention`.

    The coverage loss of See et al., Σ min(α, C), is the history's ``loss [B]``.

    Papers: See, Liu and Manning, ACL 2017, arXiv:1704.04368; Tu et al., ACL 2016, arXiv:1601.04811.

    Example:
        >>> attention = attnfast.nn.CoverageAttention(6, 8, 4, penalty=1.0)
        >>> memory = attention.prepare(torch.randn(2, 5, 8))
        >>> context, _, history = attention(torch.randn(2, 6), memory)  # the first step
        >>> context, _, history = attention(torch.randn(2, 6), memory, history)
        >>> history.coverage.sum(-1).round()  # two rows of weights
        tensor([2., 2.], grad_fn=<RoundBackward0>)
    """

    _defaults: ClassVar = {
        "feature": True,
        "penalty": None,
        "fertility": None,
        **HistoryAttention._defaults,
    }

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        *,
        feature: bool = True,
        penalty: float | nn.Parameter | None = None,
        fertility: float | None = None,
        bias: bool = True,
        activation: str = "tanh",
        normalisation: str = "softmax",
        backend: str | None = None,
    ):
        super().__init__(
            query_dim, key_dim, attn_dim, bias=bias, activation=activation,
            normalisation=normalisation, backend=backend,
        )  # fmt: skip
        if fertility is not None and not (is_finite(fertility) and fertility > 0):
            raise_value_error("fertility", "a positive number or None", describe(fertility))
        if not (is_finite(penalty) or penalty is None or isinstance(penalty, nn.Parameter)):
            raise_value_error("penalty", "a finite number, a Parameter or None", describe(penalty))
        self.feature = check_flag("feature", feature)
        bound = attn_dim**-0.5
        self.penalty = penalty
        self.fertility = fertility
        self.coverage_weight = (
            nn.Parameter(torch.empty(attn_dim).uniform_(-bound, bound)) if feature else None
        )
        self.fertility_proj = None if fertility is None else nn.Linear(key_dim, 1, bias=False)

    def prepare(
        self,
        states: Tensor,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Memory:
        """Project the keys of a source once, and predict their fertility if the module has one.

        The arguments are those of :meth:`BahdanauAttention.prepare`.
        """
        memory = super().prepare(states, lengths, mask, values)
        if self.fertility_proj is None or self.fertility is None:
            return memory
        logits = self.fertility_proj(states).squeeze(-1)
        seen = memory._whole_mask()
        if seen is not None:  # a sigmoid that underflows in the padding has no reciprocal
            logits = logits.masked_fill(~seen.squeeze(-2), 0)
        return memory._replace(fertility=self.fertility * logits.sigmoid())

    def _terms(self, memory: Memory) -> dict[str, Any]:
        return {
            **super()._terms(memory),
            "coverage_weight": self.coverage_weight,
            "penalty": self.penalty,
            "fertility": memory.fertility,
        }


#: Inputs of the filters of location features.
CHANNELS = ("previous", "coverage", "both")


class LocationAwareAttention(HistoryAttention):
    r"""Additive attention with location features: filters over the previous weights.

    .. math:: e_{tj} = w^\top \tanh(W_q s_t + b + W_k h_j + U (F * [\alpha_{t-1}, C_t])_j)

    Args:
        query_dim, key_dim, attn_dim: as in :class:`BahdanauAttention`.
        num_filters: K, the number of filters; 0 for the content score alone.
        width: the width of the filters, odd.
        channels: the input of the filters: ``"previous"``, the last weights (Chorowski et al.);
            ``"coverage"``, the sum of all weights; ``"both"``, on two channels (Tacotron 2).
        bias: give the query projection a bias.
        initial_weights: α_0, the weights before the first row: ``"zeros"``, or ``"uniform"`` over
            the keys of a sequence, as in ESPnet and SpeechBrain; C_0 is the same.
        activation, normalisation, backend: as in :func:`attnfast.coverage_attention`;
            Chorowski et al. smooth the weights with ``normalisation="sigmoid"``.

    Raises:
        ValueError: an even width, unknown ``channels`` or ``initial_weights``.

    Papers: Chorowski et al., NeurIPS 2015, arXiv:1506.07503; Shen et al., "Natural TTS Synthesis by
    Conditioning WaveNet on Mel Spectrogram Predictions", ICASSP 2018, arXiv:1712.05884.

    Example:
        >>> attention = attnfast.nn.LocationAwareAttention(6, 8, 4, num_filters=3, width=5)
        >>> memory = attention.prepare(torch.randn(2, 9, 8))
        >>> context, _, history = attention(torch.randn(2, 6), memory)
        >>> history.previous.shape
        torch.Size([2, 9])
    """

    knows_order = True
    _defaults: ClassVar = {
        "channels": "previous", "initial_weights": "zeros", **HistoryAttention._defaults,
    }  # fmt: skip

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        num_filters: int = 32,
        width: int = 31,
        *,
        channels: str = "previous",
        bias: bool = True,
        initial_weights: str = "zeros",
        activation: str = "tanh",
        normalisation: str = "softmax",
        backend: str | None = None,
    ):
        super().__init__(
            query_dim, key_dim, attn_dim, bias=bias, activation=activation,
            normalisation=normalisation, backend=backend,
        )  # fmt: skip
        check_choice("channels", channels, CHANNELS)
        check_choice("initial_weights", initial_weights, ("zeros", "uniform"))
        check_int("num_filters", num_filters, 0)
        if not is_int(width) or width < 1 or width % 2 == 0:
            raise_value_error("width", "odd and at least 1", describe(width))
        self.channels, self.initial_weights = channels, initial_weights
        self.location_conv = self.location_proj = None
        if num_filters:
            self.location_conv = nn.Conv1d(1 + (channels == "both"), num_filters, width, bias=False)
            self.location_proj = nn.Linear(num_filters, attn_dim, bias=False)

    def _terms(self, memory: Memory) -> dict[str, Any]:
        if self.location_conv is None or self.location_proj is None:
            return super()._terms(memory)
        return {
            **super()._terms(memory),
            "filters": self.location_conv.weight,
            "channels": "coverage" if self.channels == "coverage" else "previous",
            "projection": weight_of(self.location_proj),
        }

    def start(self, memory: Memory) -> CumulativeState:
        """Return the history before the first row, with the initial weights.

        Raises:
            TypeError: ``memory`` is not from :meth:`prepare`.
        """
        history = super().start(memory)
        if self.initial_weights == "zeros":
            return history
        visible = torch.ones_like(history.previous)
        if memory.lengths is not None:
            visible = visible * length_mask(memory.lengths, visible.shape[-1], visible)
        if memory.mask is not None:
            visible = visible * memory.mask.squeeze(-2)
        first = visible / visible.sum(-1, keepdim=True).clamp_min(1)
        return history._replace(coverage=first, previous=first)


class ForwardAttention(LocationAwareAttention):
    r"""Location-aware attention whose alignment stays or moves on by one key at every step.

    .. math:: \alpha_{tj} \propto ((1 - u_t)\, \alpha_{t-1,j} + u_t\, \alpha_{t-1,j-1})
              \exp(e_{tj})

    The alignment begins at the first key. :meth:`forward` takes one more argument,
    ``transition_prob``, u: a number, 0.5 for the plain recursion, or the output of a transition
    agent, which the decoder computes from its state and the last context: ``[B]`` for one step,
    ``[B, Tq]`` for many.

    Args:
        query_dim, key_dim, attn_dim: as in :class:`BahdanauAttention`.
        num_filters, width, channels, bias, activation, backend: as in
            :class:`LocationAwareAttention`; without filters the score depends on the content alone.

    Paper: Zhang, Ling and Dai, ICASSP 2018, arXiv:1807.06736.

    Example:
        >>> attention = attnfast.nn.ForwardAttention(6, 8, 4)
        >>> memory = attention.prepare(torch.randn(2, 9, 8))
        >>> _, weights, _ = attention(
        ...     torch.randn(2, 6), memory, transition_prob=0.5, need_weights=True
        ... )
        >>> weights[:, 2:].sum().item()  # the first step reaches the second key at most
        0.0
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        num_filters: int = 0,
        width: int = 31,
        *,
        channels: str = "previous",
        bias: bool = True,
        activation: str = "tanh",
        backend: str | None = None,
    ):
        super().__init__(
            query_dim, key_dim, attn_dim, num_filters, width,
            channels=channels, bias=bias, activation=activation, backend=backend,
        )  # fmt: skip

    def _terms(self, memory: Memory) -> dict[str, Any]:
        return {**super()._terms(memory), "transition_prob": 0.5}

    def start(self, memory: Memory) -> CumulativeState:
        """Return the history before the first row, with all weight on the first key."""
        history = super().start(memory)
        first = torch.zeros_like(history.previous)
        first[:, :1] = 1
        return history._replace(previous=first, log_previous=logarithm(first))

    def forward(  # type: ignore[override]
        self,
        state: Tensor,
        memory: Memory,
        history: CumulativeState | None = None,
        need_weights: bool | str = False,
        target_mask: Tensor | None = None,
        transition_prob: float | Tensor = 0.5,
    ) -> tuple[Tensor, Tensor | None, CumulativeState]:
        """Attend from decoder states to a prepared memory.

        Args:
            state, memory, history, need_weights, target_mask: as in
                :meth:`HistoryAttention.forward`.
            transition_prob: u, the probability of moving on by one key: a number from 0 to 1,
                ``[B]`` for one step or ``[B, Tq]`` for many.

        Returns:
            Context, weights and history, as :meth:`HistoryAttention.forward` does.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        if transition_prob is None:  # None would mean attention without a transition
            raise_type_error("transition_prob", "a number or a tensor", "None")
        one = isinstance(state, Tensor) and state.dim() == 2
        if one and isinstance(transition_prob, Tensor) and transition_prob.dim() == 1:
            transition_prob = transition_prob.unsqueeze(1)
        return super().forward(
            state, memory, history, need_weights, target_mask, transition_prob=transition_prob
        )
