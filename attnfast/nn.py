"""Modules: the parameters of an attention, and the keys projected once per sentence.

Every module has the same two calls::

    memory = attention.prepare(encoder_states, lengths)  # once per source
    context, weights = attention(state, memory)          # state [B, D]: one step; [B, Tq, D]: many

Attention with a history also takes that of the rows before, and returns that of the rows after::

    context, weights, history = attention(state, memory, history)

The attribute ``temperature``, 1 unless set, divides every module's scores.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnfast.errors import refuse
from attnfast.memory import Memory, attend, prepare
from attnfast.ops.copying import copy_distribution
from attnfast.ops.coverage import coverage_attention

__all__ = [
    "BahdanauAttention",
    "CoverageAttention",
    "ForwardAttention",
    "History",
    "LocationAwareAttention",
    "LuongAttention",
    "Memory",
    "MultiHeadAttention",
    "PointerGenerator",
]


class _Attention(nn.Module):
    """Projections around an op: additive where there is a weight, dot where there is none."""

    query_proj: nn.Module
    key_proj: nn.Module
    weight: nn.Parameter | None
    temperature: float = 1.0

    def __init__(self, weight_shape: tuple[int, ...] | None, scale: float | None, backend):
        super().__init__()
        self.scale = scale
        self.backend = backend
        self.weight = None
        if weight_shape is not None and min(weight_shape) < 1:
            raise ValueError(f"attn_dim must be at least 1, got {weight_shape[-1]}")
        if weight_shape is not None:
            bound = weight_shape[-1] ** -0.5
            self.weight = nn.Parameter(torch.empty(weight_shape).uniform_(-bound, bound))

    def prepare(
        self, states: Tensor, lengths: Tensor | None = None, mask: Tensor | None = None
    ) -> Memory:
        """Project the keys of a source once.

        Args:
            states: encoder states ``[B, Tk, key_dim]``, the source of keys and values.
            lengths: ``[B]``, the number of states that are not padding.
            mask: boolean ``[B, Tk]``, True where a state may be attended to.
        """
        mask = None if mask is None else mask.unsqueeze(1)
        return self._remember(self.key_proj(states), states, lengths, mask)

    def _remember(self, key: Tensor, value: Tensor, lengths, mask) -> Memory:
        """Make the memory of projected keys."""
        return prepare(key, value, self.weight, lengths=lengths, mask=mask, backend=self.backend)

    def _attend(self, query: Tensor, memory: Memory, need_weights: bool):
        """Run the op on a projected query."""
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        scale = scale / self.temperature
        return attend(query, memory, scale=scale, need_weights=need_weights)

    def forward(
        self, state: Tensor, memory: Memory, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from decoder states to a prepared memory.

        Args:
            state: ``[B, query_dim]`` for one decoder step or ``[B, Tq, query_dim]`` for many.
            memory: from :meth:`prepare`.
            need_weights: return the weights too.

        Returns:
            ``context [B, Dv]`` or ``[B, Tq, Dv]``, and ``weights [B, (H,) Tk]`` or
            ``[B, (H,) Tq, Tk]`` or None.
        """
        step = state.dim() == 2
        query = self.query_proj(state.unsqueeze(1) if step else state)
        context, weights = self._attend(query, memory, need_weights)
        if step:
            return context.squeeze(1), None if weights is None else weights.squeeze(-2)
        return context, weights


class BahdanauAttention(_Attention):
    r"""Additive attention, :math:`e_{ij} = w^\top \tanh(W_q s_i + W_k h_j)`.

    Args:
        query_dim, key_dim, attn_dim: features of the decoder states, of the encoder states, and
            of the space that they are compared in.
        bias: give the query projection a bias.
        backend: as in :func:`attnfast.additive_attention`.

    Paper: Bahdanau, Cho and Bengio, ICLR 2015, arXiv:1409.0473.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        bias: bool = False,
        backend: str | None = None,
    ):
        super().__init__((attn_dim,), 1.0, backend)
        self.query_proj = nn.Linear(query_dim, attn_dim, bias=bias)
        self.key_proj = nn.Linear(key_dim, attn_dim, bias=False)


class LuongAttention(_Attention):
    r"""Luong's scores.

    ==============  ========================================  ===========================
    ``score``       :math:`e_{ij}`                            needs
    ==============  ========================================  ===========================
    ``dot``         :math:`s_i^\top h_j`                      ``query_dim == key_dim``
    ``scaled_dot``  :math:`s_i^\top h_j / \sqrt{d}`           ``query_dim == key_dim``
    ``general``     :math:`s_i^\top W h_j`
    ``concat``      :math:`w^\top \tanh(W [s_i; h_j])`        ``attn_dim``
    ==============  ========================================  ===========================

    The matrix W of concat is kept in two parts, one for the states and one for the keys, so that
    the keys are projected once.

    Args:
        query_dim, key_dim: features of the decoder states and of the encoder states.
        score: one of the table.
        attn_dim: features of the concat score; None means ``query_dim``.
        backend: as in :func:`attnfast.dot_attention`.

    Raises:
        ValueError: an unknown score, or dimensions that it cannot compare.

    Paper: Luong, Pham and Manning, EMNLP 2015, arXiv:1508.04025.
    """

    SCORES = ("dot", "scaled_dot", "general", "concat")

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        score: str = "general",
        attn_dim: int | None = None,
        backend: str | None = None,
    ):
        if score not in self.SCORES:
            raise ValueError(f"score must be one of {', '.join(self.SCORES)}, got {score!r}")
        if score in ("dot", "scaled_dot") and query_dim != key_dim:
            raise ValueError(
                f"query_dim must equal key_dim for score {score!r}, got {query_dim} and {key_dim}"
            )
        attn_dim = query_dim if attn_dim is None else attn_dim
        super().__init__(
            (attn_dim,) if score == "concat" else None,
            None if score == "scaled_dot" else 1.0,
            backend,
        )
        self.query_proj = nn.Identity()
        self.key_proj = nn.Identity()
        if score == "general":
            self.key_proj = nn.Linear(key_dim, query_dim, bias=False)
        if score == "concat":
            self.query_proj = nn.Linear(query_dim, attn_dim, bias=False)
            self.key_proj = nn.Linear(key_dim, attn_dim, bias=False)


class MultiHeadAttention(_Attention):
    r"""Attention by several heads at once, with either score.

    Every head compares its own slice of the projected queries and keys and averages its own slice
    of the projected values; the concatenated contexts pass through an output projection.

    Args:
        query_dim, key_dim: features of the decoder states and of the encoder states.
        attn_dim: features of queries, keys, values and output, all heads together.
        num_heads: H, a divisor of ``attn_dim``.
        score: ``"dot"`` (scaled by the root of a head's features) or ``"additive"``.
        backend: as in :func:`attnfast.dot_attention`.

    The weights are ``[B, H, Tq, Tk]``.

    Raises:
        ValueError: an unknown score, or heads that do not divide the features.

    Papers: Vaswani et al., NeurIPS 2017, arXiv:1706.03762; Chiu et al., ICASSP 2018,
    arXiv:1712.01769, for several heads in a recurrent decoder.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        num_heads: int,
        score: str = "dot",
        backend: str | None = None,
    ):
        if score not in ("dot", "additive"):
            raise ValueError(f"score must be 'dot' or 'additive', got {score!r}")
        if num_heads < 1 or attn_dim % num_heads:
            raise ValueError(f"num_heads must divide attn_dim {attn_dim}, got {num_heads}")
        head_dim = attn_dim // num_heads
        weight_shape, scale = ((num_heads, head_dim), 1.0) if score == "additive" else (None, None)
        super().__init__(weight_shape, scale, backend)
        self.num_heads = num_heads
        self.query_proj = nn.Linear(query_dim, attn_dim, bias=False)
        self.key_proj = nn.Linear(key_dim, attn_dim, bias=False)
        self.value_proj = nn.Linear(key_dim, attn_dim, bias=False)
        self.out_proj = nn.Linear(attn_dim, attn_dim, bias=False)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, A/H]

    def prepare(
        self, states: Tensor, lengths: Tensor | None = None, mask: Tensor | None = None
    ) -> Memory:
        mask = None if mask is None else mask[:, None, None]
        key, value = self._split(self.key_proj(states)), self._split(self.value_proj(states))
        return self._remember(key, value, lengths, mask)

    def _attend(self, query: Tensor, memory: Memory, need_weights: bool):
        context, weights = super()._attend(self._split(query), memory, need_weights)
        return self.out_proj(context.transpose(1, 2).flatten(2)), weights


class History(NamedTuple):
    """What attention knows of the rows before: passed from step to step, reordered by a search.

    ``coverage [B, Tk]``, the sum of their weights; ``previous [B, Tk]``, the weights of the last;
    ``loss [B]``, the coverage loss so far, or None for 0.
    """

    coverage: Tensor
    previous: Tensor
    loss: Tensor | None = None

    def index_select(self, index: Tensor) -> History:
        """Return the history of the sequences ``index``."""
        kept = {name: x for name, x in self._asdict().items() if x is not None}
        return self._replace(**{name: x.index_select(0, index) for name, x in kept.items()})


class HistoryAttention(_Attention):
    r"""Additive attention that knows what it attended to before: what its kinds share.

    Their calls differ from those of the other modules in the history alone. All queries at once,
    or one after the other with the history carried along, give the same numbers; in half types, up
    to the rounding of the weights that the history carries.
    """

    def __init__(self, query_dim: int, key_dim: int, attn_dim: int, bias: bool, backend):
        super().__init__((attn_dim,), 1.0, backend)
        self.query_proj = nn.Linear(query_dim, attn_dim, bias=bias)
        self.key_proj = nn.Linear(key_dim, attn_dim, bias=False)

    def _remember(self, key: Tensor, value: Tensor, lengths, mask) -> Memory:
        return Memory(key, value, lengths, mask, self.weight, self.backend)

    def _terms(self, memory: Memory) -> dict[str, Any]:
        """Return the arguments of :func:`attnfast.coverage_attention` that make the kind."""
        raise NotImplementedError

    def start(self, memory: Memory) -> History:
        """Return the history before the first row."""
        zeros = memory.key.new_zeros(memory.key.shape[:-1])
        zeros = zeros if zeros.dtype == torch.float64 else zeros.float()
        return History(zeros, zeros)

    def forward(  # type: ignore[override]
        self,
        state: Tensor,
        memory: Memory,
        history: History | None = None,
        need_weights: bool = False,
        target_mask: Tensor | None = None,
        **terms: Any,
    ) -> tuple[Tensor, Tensor | None, History]:
        """Attend from decoder states to a prepared memory.

        Args:
            state: ``[B, query_dim]`` for one decoder step or ``[B, Tq, query_dim]`` for many.
            memory: from :meth:`prepare`.
            history: what the last call returned, or :meth:`start`; None for that.
            need_weights: return the weights too.
            target_mask: ``[B]`` or ``[B, Tq]``, False for the padding at a target's end, which
                counts in neither coverage nor loss and leaves no last weights.

        Returns:
            ``context [B, Dv]`` or ``[B, Tq, Dv]``, ``weights [B, Tk]`` or ``[B, Tq, Tk]`` or None,
            and the history after the last of the states.
        """
        step = state.dim() == 2
        query = self.query_proj(state.unsqueeze(1) if step else state)
        mask = memory.mask
        if not isinstance(history, (History, type(None))):
            raise TypeError(f"history must be a History or None, got {type(history).__name__}")
        if target_mask is not None:
            rows = list(query.shape[: 1 if step else 2])
            if not isinstance(target_mask, Tensor):
                got = type(target_mask).__name__
                raise TypeError(f"target_mask must be a torch.Tensor, got {got}")
            if target_mask.dtype != torch.bool or list(target_mask.shape) != rows:
                got = f"{target_mask.dtype} {list(target_mask.shape)}"
                refuse("target_mask", f"boolean of shape {rows}", got)
            seen = target_mask.reshape(*query.shape[:2], 1)
            mask = seen if mask is None else seen & mask
        history = self.start(memory) if history is None else history
        result: Any = coverage_attention(
            query,
            memory.key,
            memory.value,
            memory.weight,
            coverage=history.coverage,
            previous=history.previous,
            lengths=memory.lengths,
            mask=mask,
            temperature=self.temperature,
            need_weights=True,
            need_loss=True,
            backend=memory.backend,
            **self._terms(memory),
            **terms,
        )
        context, weights, coverage, loss = result
        loss = loss if history.loss is None else history.loss + loss
        previous = weights[:, -1] if weights.shape[1] else history.previous
        history = History(coverage, previous.to(coverage.dtype), loss)
        shown = weights if need_weights else None
        if step:
            return context.squeeze(1), None if shown is None else shown.squeeze(1), history
        return context, shown, history


class CoverageAttention(HistoryAttention):
    r"""Additive attention that is told how much each key has been attended to.

    .. math:: e_{tj} = w^\top \tanh(W_q s_t + b + W_k h_j + w_c C_{tj}) - \lambda C_{tj}, \quad
              C_{t+1,j} = C_{tj} + \alpha_{tj} / \phi_j

    Args:
        query_dim, key_dim, attn_dim: as in :class:`BahdanauAttention`.
        feature: put the coverage into the tanh, with a learned :math:`w_c`.
        penalty: λ: a number, None for 0, or an :class:`~torch.nn.Parameter` to learn it.
        fertility: the most attention that a key may ask for, N: :math:`\phi_j = N \sigma(u^\top
            h_j)`, the fertility of Tu et al.; None for :math:`\phi = 1`.
        bias: give the query projection a bias.
        backend: as in :func:`attnfast.coverage_attention`.

    The coverage loss of See et al., Σ min(α, C), is the history's ``loss [B]``.

    Papers: See, Liu and Manning, ACL 2017, arXiv:1704.04368; Tu et al., ACL 2016, arXiv:1601.04811.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        feature: bool = True,
        penalty: float | nn.Parameter | None = None,
        fertility: float | None = None,
        bias: bool = True,
        backend: str | None = None,
    ):
        super().__init__(query_dim, key_dim, attn_dim, bias, backend)
        if fertility is not None and not 0 < fertility < math.inf:
            refuse("fertility", "a positive number or None", repr(fertility))
        number = isinstance(penalty, (int, float)) and math.isfinite(penalty)
        if not (number or penalty is None or isinstance(penalty, nn.Parameter)):
            refuse("penalty", "a finite number, a Parameter or None", repr(penalty))
        bound = attn_dim**-0.5
        self.penalty = penalty
        self.fertility = fertility
        self.coverage_weight = (
            nn.Parameter(torch.empty(attn_dim).uniform_(-bound, bound)) if feature else None
        )
        self.fertility_proj = None if fertility is None else nn.Linear(key_dim, 1, bias=False)

    def prepare(
        self, states: Tensor, lengths: Tensor | None = None, mask: Tensor | None = None
    ) -> Memory:
        memory = super().prepare(states, lengths, mask)
        if self.fertility_proj is None or self.fertility is None:
            return memory
        asked = self.fertility_proj(states).squeeze(-1).sigmoid()
        return memory._replace(fertility=self.fertility * asked)

    def _terms(self, memory: Memory) -> dict[str, Any]:
        return {
            "coverage_weight": self.coverage_weight,
            "penalty": self.penalty,
            "fertility": memory.fertility,
        }


class LocationAwareAttention(HistoryAttention):
    r"""Additive attention that sees where around a key it looked before.

    .. math:: e_{tj} = w^\top \tanh(W_q s_t + b + W_k h_j + U (F * [\alpha_{t-1}, C_t])_j)

    Args:
        query_dim, key_dim, attn_dim: as in :class:`BahdanauAttention`.
        filters: K, how many; 0 for the content alone.
        width: of the filters, odd.
        over: what they look at: ``"previous"``, the last weights (Chorowski et al.);
            ``"cumulative"``, the sum of all; ``"both"``, on two channels (Tacotron 2).
        bias: give the query projection a bias.
        backend: as in :func:`attnfast.coverage_attention`.

    Raises:
        ValueError: an even width, or an unknown ``over``.

    Papers: Chorowski et al., NeurIPS 2015, arXiv:1506.07503; Shen et al., "Natural TTS Synthesis by
    Conditioning WaveNet on Mel Spectrogram Predictions", ICASSP 2018, arXiv:1712.05884.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        filters: int = 32,
        width: int = 31,
        over: str = "previous",
        bias: bool = True,
        backend: str | None = None,
    ):
        super().__init__(query_dim, key_dim, attn_dim, bias, backend)
        if over not in ("previous", "cumulative", "both"):
            refuse("over", "'previous', 'cumulative' or 'both'", repr(over))
        if width < 1 or width % 2 == 0:
            refuse("width", "odd and at least 1", width)
        if filters < 0:
            refuse("filters", "at least 0", filters)
        self.over = over
        self.location_conv = self.location_proj = None
        if filters:
            self.location_conv = nn.Conv1d(1 + (over == "both"), filters, width, bias=False)
            self.location_proj = nn.Linear(filters, attn_dim, bias=False)

    def _terms(self, memory: Memory) -> dict[str, Any]:
        if self.location_conv is None or self.location_proj is None:
            return {}
        filters = self.location_conv.weight
        if self.over == "cumulative":  # the second channel
            filters = nn.functional.pad(filters, (0, 0, 1, 0))
        return {"filters": filters, "projection": self.location_proj.weight}


class ForwardAttention(LocationAwareAttention):
    r"""Location-aware attention whose alignment stays or moves on by one key at every step.

    .. math:: \alpha_{tj} \propto ((1 - u_t)\, \alpha_{t-1,j} + u_t\, \alpha_{t-1,j-1})
              \exp(e_{tj})

    It begins at the first key. What :meth:`forward` takes more is ``transition``, u: a number, 0.5
    for the plain recursion, or from a transition agent, which the decoder computes from what it
    knows, the last context included: ``[B]`` for one step, ``[B, Tq]`` for many.

    Args:
        query_dim, key_dim, attn_dim: as in :class:`BahdanauAttention`.
        filters, width, over, bias, backend: as in :class:`LocationAwareAttention`; without filters
            the score is that of the content alone.

    Paper: Zhang, Ling and Dai, ICASSP 2018, arXiv:1807.06736.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        filters: int = 0,
        width: int = 31,
        over: str = "previous",
        bias: bool = True,
        backend: str | None = None,
    ):
        super().__init__(query_dim, key_dim, attn_dim, filters, width, over, bias, backend)

    def start(self, memory: Memory) -> History:
        history = super().start(memory)
        first = torch.zeros_like(history.previous)
        first[:, :1] = 1
        return history._replace(previous=first)

    def forward(  # type: ignore[override]
        self,
        state: Tensor,
        memory: Memory,
        history: History | None = None,
        need_weights: bool = False,
        target_mask: Tensor | None = None,
        transition: float | Tensor = 0.5,
    ) -> tuple[Tensor, Tensor | None, History]:
        if isinstance(transition, Tensor) and transition.dim() == 1 and state.dim() == 2:
            transition = transition.unsqueeze(1)
        return super().forward(
            state, memory, history, need_weights, target_mask, transition=transition
        )


class PointerGenerator(nn.Module):
    r"""The distribution over words to generate and words to copy, and the choice between both.

    .. math:: p_t = \sigma(W x_t + b), \quad
              P_{tw} = p_t\, \mathrm{softmax}(\ell_t)_w + (1 - p_t) \sum_{i:\, s_i = w} \alpha_{ti}

    Args:
        feature_dims: sizes of what the choice depends on, side by side in x: context, state and
            input of the decoder in the paper.
        backend: as in :func:`attnfast.copy_distribution`.

    Paper: See, Liu and Manning, ACL 2017, arXiv:1704.04368.
    """

    def __init__(self, *feature_dims: int, backend: str | None = None):
        super().__init__()
        if not feature_dims or min(feature_dims) < 1:
            refuse("feature_dims", "one size or more, each at least 1", list(feature_dims))
        self.gate = nn.Linear(sum(feature_dims), 1)
        self.backend = backend

    def forward(
        self,
        logits: Tensor,
        weights: Tensor,
        source: Tensor,
        *features: Tensor,
        extra_words: int = 0,
        log: bool = True,
    ) -> Tensor:
        """Return ``[B, Tq, V + X]``: log-probabilities, or probabilities.

        Args:
            logits: ``[B, Tq, V]``; or ``[B, V]`` for one step, and so on below.
            weights: ``[B, Tq, Tk]``, of the attention.
            source: ``[B, Tk]``, the word at every key, from V on where the vocabulary lacks it.
            features: ``[B, Tq, ·]``, what the choice depends on.
            extra_words: X, how many words beyond the vocabulary the sources of the batch bring.
            log: return logarithms.
        """
        sizes = [x.shape[-1] for x in features]
        if sum(sizes) != self.gate.in_features:
            refuse("features", f"{self.gate.in_features} in all to fit the module", sizes)
        gate = self.gate(torch.cat(features, -1)).squeeze(-1)
        step = logits.dim() == 2
        if step:
            logits, weights, gate = (x.unsqueeze(1) for x in (logits, weights, gate))
        out = copy_distribution(
            logits, weights, source, gate, extra_words=extra_words, log=log, backend=self.backend
        )
        return out.squeeze(1) if step else out
