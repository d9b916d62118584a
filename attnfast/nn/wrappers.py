"""Wrappers of attention: a gate on its context, and hard attention, which samples one key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, Generic, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import TypeVarTuple, Unpack

from attnfast._utils.checks import (
    check_array,
    check_tensor,
    describe,
    is_finite,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.representation import repr_fields
from attnfast.decoding import Memory
from attnfast.nn.attention import (
    MultiHeadAttention,
    _AttentionWrapper,
    check_sizes,
    check_target_mask,
)
from attnfast.ops.span import check_form

P = ParamSpec("P")
#: The outputs of an attention after its context.
Others = TypeVarTuple("Others")


class GatedAttention(_AttentionWrapper, Generic[P, Unpack[Others]]):
    r"""Attention whose context is scaled by a gate that depends on the decoder state.

    .. math:: \beta_t = \sigma(f^\top s_t + b), \quad c_t = \beta_t \sum_j \alpha_{tj} h_j

    The gate may close for words that need no source, such as "of". The weights are α, before the
    gate. Calls take the arguments of the wrapped attention, with a history or without.

    Args:
        attention: a module of :mod:`attnfast.nn`.
        query_dim: features of the decoder states.

    Paper: Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044, section 4.2.1.

    Example:
        >>> attention = attnfast.nn.GatedAttention(attnfast.nn.BahdanauAttention(6, 8, 4), 6)
        >>> attention(torch.randn(2, 6), attention.prepare(torch.randn(2, 5, 8)))[0].shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        attention: Callable[Concatenate[Tensor, Memory, P], tuple[Tensor, Unpack[Others]]],
        query_dim: int,
    ):
        super().__init__(attention)
        check_sizes(query_dim=query_dim)
        self.gate = nn.Linear(query_dim, 1)

    @property
    def has_history(self) -> bool:
        """True if calls take and return a history."""
        return getattr(self.attention, "has_history", False)

    def forward(
        self, state: Tensor, memory: Memory, *args: P.args, **options: P.kwargs
    ) -> tuple[Tensor, Unpack[Others]]:
        """Return the attention's result with its context, ``[B, Dv]`` or ``[B, Tq, Dv]``, gated."""
        context, *rest = self.attention(state, memory, *args, **options)
        return self.gate(state).sigmoid() * context, *rest


class HardAttentionState(NamedTuple):
    """Samples of :class:`HardAttention` so far: passed between steps, reordered by a search.

    ``log_prob [B]``: the sum over the rows of ln α of the sampled key. ``entropy [B]``: the sum of
    the rows' entropies, in nats. ``averaged [B]``: True if a sequence uses averages instead of
    samples; its sums are 0.

    Example:
        >>> attention = attnfast.nn.HardAttention(attnfast.nn.BahdanauAttention(6, 8, 4)).eval()
        >>> memory = attention.prepare(torch.randn(2, 5, 8))
        >>> _, _, history = attention(torch.randn(2, 3, 6), memory)
        >>> history.log_prob.shape, history.averaged
        (torch.Size([2]), tensor([False, False]))
    """

    log_prob: Tensor
    entropy: Tensor
    averaged: Tensor

    def index_select(self, index: Tensor) -> HardAttentionState:
        """Return the state of the sequences ``index``."""
        return HardAttentionState(*(x.index_select(0, index) for x in self))


def _fits(history: HardAttentionState, state: Tensor) -> bool:
    """Return whether a history has the batch and the device of a state."""
    batch, device = state.shape[:1], state.device
    return all([isinstance(x, Tensor) and x.shape == batch and x.device == device for x in history])


class HardAttention(_AttentionWrapper):
    r"""Attention to one key, sampled from the distribution that the weights define.

    .. math:: j_t \sim \mathrm{Multinoulli}(\alpha_{t1}, …, \alpha_{tn}), \quad c_t = h_{j_t}

    In training, with probability ``average``, a sequence uses the average
    :math:`\sum_j \alpha_{tj} h_j` instead of samples at all its rows. In evaluation nothing is
    sampled: the key is that of the largest weight. No gradient passes through the sample; the
    history, :class:`HardAttentionState`, has the log-probabilities that
    :class:`attnfast.losses.Reinforce` learns from. Recurrent layers run it step by step. A row that
    may see no key has context 0 and adds nothing to the sums; a row whose weights are NaN has a
    context of NaN.

    Args:
        attention: a module of :mod:`attnfast.nn`, without a history, heads or a gate:
            :class:`GatedAttention` may wrap this module.
        average: the probability of using the average in training.

    Paper: Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044, section 4.1, with
    ``average`` = 0.5.

    Example:
        >>> attention = attnfast.nn.HardAttention(attnfast.nn.BahdanauAttention(6, 8, 4)).eval()
        >>> source = torch.randn(1, 5, 8)
        >>> context, *_ = attention(torch.randn(1, 6), attention.prepare(source))
        >>> (context == source).all(-1).sum().item()  # one key, not an average
        1
    """

    #: Whether calls take and return a history.
    has_history = True

    def __init__(self, attention: nn.Module, average: float = 0.5):
        super().__init__(attention)
        if isinstance(attention, GatedAttention):
            expected = "ungated (use GatedAttention(HardAttention(...), ...))"
            raise_type_error("attention", expected, "GatedAttention")
        if isinstance(attention, MultiHeadAttention):
            raise_type_error("attention", "one without heads", type(attention).__name__)
        if not getattr(attention, "has_weights", True):
            raise_type_error("attention", "one with weights to draw by", type(attention).__name__)
        if getattr(attention, "has_history", False):
            raise_type_error("attention", "one without a history", type(attention).__name__)
        if not is_finite(average) or not 0 <= average <= 1:
            raise_value_error("average", "a probability", describe(average))
        self.average = average

    def extra_repr(self) -> str:
        """Return the probability of averaging."""
        return repr_fields(self, ("average",))

    def start(self, memory: Memory) -> HardAttentionState:
        """Return the history before the first row; in training, sample ``averaged``.

        Raises:
            TypeError: ``memory`` is not from :meth:`prepare`.
        """
        if not isinstance(getattr(memory, "value", None), Tensor):  # all memories have values
            raise_type_error("memory", "a result of prepare(...)", describe(memory))
        zeros = memory.value.new_zeros(memory.value.shape[0])
        zeros = zeros if zeros.dtype == torch.float64 else zeros.float()
        share = self.average if self.training else 0.0
        averaged = torch.rand_like(zeros) < share if share else zeros.bool()
        return HardAttentionState(zeros, zeros, averaged)

    def forward(
        self,
        state: Tensor,
        memory: Memory,
        history: HardAttentionState | None = None,
        need_weights: bool | str = False,
        target_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, HardAttentionState]:
        """Attend from decoder states to a prepared memory.

        Args:
            state: ``[B, query_dim]`` for one decoder step or ``[B, Tq, query_dim]`` for many.
            memory: from :meth:`prepare`.
            history: the history that the last call returned; None means :meth:`start`.
            need_weights: return the weights too: α, not the samples.
            target_mask: ``[B]`` or ``[B, Tq]``, False for padding, which adds nothing to the sums.

        Returns:
            ``context [B, Dv]`` or ``[B, Tq, Dv]``, ``weights [B, Tk]`` or ``[B, Tq, Tk]`` or None,
            and the history after the last of the states.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_tensor("state", state)
        if not isinstance(history, (HardAttentionState, type(None))):
            raise_type_error("history", "a HardAttentionState or None", describe(history))
        if history is not None and not _fits(history, state):
            for name, x in history._asdict().items():
                kind = "boolean" if name == "averaged" else "floating-point"
                check_array(f"history.{name}", x, kind, state.shape[:1], like=state, of="state")
        check_form(need_weights)
        check_target_mask(target_mask, state.shape[:-1], state)
        step = state.dim() == 2
        rows = state.unsqueeze(1) if step else state
        mean, weights = self.attention(rows, memory, "dense")
        history = self.start(memory) if history is None else history
        shown, value = weights if need_weights else None, memory.value
        if not weights.shape[-1]:  # a key that no row sees
            weights, value = F.pad(weights, (0, 1)), F.pad(value, (0, 0, 0, 1))
        mass = weights.detach().sum(-1)
        counts, damaged = mass != 0, mass.isnan()  # [B, Tq]: a row that sees a key
        if self.training:
            chances = weights.detach().to(history.log_prob.dtype)
            chances = chances.masked_fill((~counts | damaged).unsqueeze(-1), 1)
            index = torch.multinomial(chances.flatten(0, 1), 1).view(counts.shape)
        else:
            index = weights.argmax(-1)
        one = value.gather(1, index.unsqueeze(-1).expand(-1, -1, value.shape[-1]))
        one = one.masked_fill(~counts.unsqueeze(-1), 0)
        one = one.masked_fill(damaged.unsqueeze(-1), torch.nan)
        context = torch.where(history.averaged.view(-1, 1, 1), mean, one)
        if target_mask is not None:
            counts = counts & target_mask.reshape(counts.shape)
        alpha = weights.to(history.log_prob.dtype)
        safe = alpha.masked_fill(alpha == 0, 1)  # 0 · ln 0 is 0, and so is its gradient
        left_out = ~counts | history.averaged.unsqueeze(-1)
        log_prob = safe.gather(-1, index.unsqueeze(-1)).squeeze(-1).log()
        entropy = -(safe * safe.log()).sum(-1)
        history = history._replace(
            log_prob=history.log_prob + log_prob.masked_fill(left_out, 0).sum(-1),
            entropy=history.entropy + entropy.masked_fill(left_out, 0).sum(-1),
        )
        if step:
            return context.squeeze(1), None if shown is None else shown.squeeze(1), history
        return context, shown, history
