"""Outputs of the public functions: tuples to unpack, with attributes for less common outputs.

The number of items does not depend on flags, so that ``context, weights = …`` always works, and
further outputs can be added as attributes. ``os.stat_result`` has this form. A third item would
have to be unpacked by every caller, and a flag that adds one would break code that unpacks two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from typing_extensions import Self, TypeVar, TypeVarTuple, Unpack

from attnfast._utils.torch_private import keep_in_pytrees, name_in_exports

if TYPE_CHECKING:
    from attnfast.nn import RecurrentState

__all__ = ["AttentionOutput", "CoverageOutput", "RecurrentOutput", "RowStatistics"]


class RowStatistics(NamedTuple):
    """Statistics of each row's attention weights, ``[B, (H,) Tq]``.

    ``entropy`` −Σ_j α ln α in nats, 0 for one key and ln n for n equal weights; ``max_weight``
    and its key ``argmax``, int64, the key of the largest score, the first of equal ones, exact up
    to 2²⁴ keys; ``expected_position`` μ = Σ_j j α and ``variance`` Σ_j (j − μ)² α of the position,
    in keys. All fields except ``argmax`` are differentiable. If a row sees no key, all fields are
    0. If a row's weights are NaN, all fields are NaN except ``argmax``, which is 0.

    Example:
        >>> key = torch.eye(4).unsqueeze(0)
        >>> result = attnfast.dot_attention(9 * key, key, key, need_statistics=True)
        >>> result.statistics.argmax  # row i attends to key i
        tensor([[0, 1, 2, 3]])
    """

    entropy: Tensor
    max_weight: Tensor
    argmax: Tensor
    expected_position: Tensor
    variance: Tensor


Items = TypeVarTuple("Items")
#: Weights of an :class:`AttentionOutput`: a tensor, or with a list of spans a list of them.
Weights = TypeVar("Weights", bound=Tensor | list[Tensor], default=Tensor, covariant=True)


class _Result(tuple[Unpack[Items]]):
    """A tuple that can be constructed from separate items.

    Backward hooks of modules, and wrappers that move a module's outputs, rebuild results from the
    items; the attributes are lost then.
    """

    def __new__(cls, *items: object) -> Self:
        if len(items) == 1 and isinstance(items[0], (tuple, list)):
            return super().__new__(cls, items[0])
        return super().__new__(cls, items)


class AttentionOutput(_Result[Tensor, Weights | None]):
    """``context, weights``, also as attributes; weights are None unless requested.

    Attributes:
        log_sum_exp: log Σ_j exp(e_ij) ``[B, (H,) Tq]``, float32 (float64 for float64), −inf for
            a row that sees no key. None unless the weights are a softmax.
        statistics: :class:`RowStatistics` of the weights, in the same dtype; None unless
            requested.

    Example:
        >>> query, key = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
        >>> result = attnfast.dot_attention(query, key, key, need_weights=True)
        >>> context, weights = result
        >>> context is result.context, result.log_sum_exp.shape
        (True, torch.Size([2, 3]))
    """

    log_sum_exp: Tensor | None
    _statistics: Tensor | None = None  # [B, (H,) Tq, 5]

    @property
    def context(self) -> Tensor:
        """The context vectors, ``[B, (H,) Tq, Dv]``."""
        return self[0]

    @property
    def weights(self) -> Weights | None:
        """The attention weights, ``[B, (H,) Tq, Tk]``, a list for a list of spans, or None."""
        return self[1]

    @property
    def statistics(self) -> RowStatistics | None:
        """The statistics of the weights, or None."""
        if self._statistics is None:
            return None
        entropy, largest, position, mean, variance = self._statistics.unbind(-1)
        return RowStatistics(
            entropy, largest, position.detach().nan_to_num(0).long(), mean, variance
        )

    def with_context(self, context: Tensor) -> AttentionOutput[Weights]:
        """Return the result with another context."""
        return attention_result(context, self.weights, self.log_sum_exp, self._statistics)

    def of_one_row(self) -> AttentionOutput:
        """Return the result of a single row without the rows' axis."""
        weights, statistics = self.weights, self._statistics
        return attention_result(
            self.context.squeeze(-2),
            weights.squeeze(-2) if isinstance(weights, Tensor) else None,
            None if self.log_sum_exp is None else self.log_sum_exp.squeeze(-1),
            None if statistics is None else statistics.squeeze(-2),
        )


class CoverageOutput(_Result[Tensor, Tensor | None, Tensor]):
    """``context, weights, coverage``, also as attributes; coverage is that after the last row.

    Attributes:
        loss: every sequence's coverage loss, Σ_tj min(α_tj, C_tj), ``[B, (H)]``.
        log_weights: with a transition log α ``[B, (H,) Tq, Tk]``, −inf for 0, float32 (float64 for
            float64): the last row is the ``log_previous`` of the next call. Otherwise None.

    Example:
        >>> query, key = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
        >>> result = attnfast.coverage_attention(query, key, key, torch.randn(8), penalty=1.0)
        >>> context, weights, coverage = result
        >>> coverage.shape, result.loss.shape
        (torch.Size([2, 5]), torch.Size([2]))
    """

    loss: Tensor
    log_weights: Tensor | None = None

    @property
    def context(self) -> Tensor:
        """The context vectors, ``[B, (H,) Tq, Dv]``."""
        return self[0]

    @property
    def weights(self) -> Tensor | None:
        """The attention weights, ``[B, (H,) Tq, Tk]``, or None."""
        return self[1]

    @property
    def coverage(self) -> Tensor:
        """The coverage after the last row, ``[B, (H,) Tk]``."""
        return self[2]


class RecurrentOutput(_Result[Tensor, "RecurrentState"]):
    """``output, state`` of a recurrent layer that attends, also as attributes.

    Attributes:
        states: states of the last layer, ``[B, T, H]``.
        contexts: ``[B, T, Dv]``.
        weights: ``[B, T, Tk]``; None unless requested.

    Example:
        >>> attention = attnfast.nn.LuongAttention(query_dim=4, key_dim=6)
        >>> layer = attnfast.nn.AttentionGRU(3, 4, 6, attention)
        >>> found = layer(torch.randn(2, 5, 3), layer.prepare(torch.randn(2, 7, 6)))
        >>> output, state = found
        >>> output.shape, found.contexts.shape
        (torch.Size([2, 5, 4]), torch.Size([2, 5, 6]))
    """

    states: Tensor
    contexts: Tensor
    weights: Tensor | None

    @property
    def output(self) -> Tensor:
        """The states of the last layer, or the attentional vectors with input feeding."""
        return self[0]

    @property
    def state(self) -> RecurrentState:
        """The state after the last step."""
        return self[1]


name_in_exports(RowStatistics)
keep_in_pytrees(AttentionOutput, "log_sum_exp", "_statistics")
keep_in_pytrees(CoverageOutput, "loss", "log_weights")
keep_in_pytrees(RecurrentOutput, "states", "contexts", "weights")


def attention_result(
    context: Tensor,
    weights: Weights | None,
    log_sum_exp: Tensor | None,
    statistics: Tensor | None = None,
) -> AttentionOutput[Weights]:
    """Return a result of attention."""
    result: AttentionOutput[Weights] = AttentionOutput((context, weights))
    result.log_sum_exp = log_sum_exp
    if statistics is not None:
        result._statistics = statistics
    return result


def coverage_result(
    context: Tensor,
    weights: Tensor | None,
    coverage: Tensor,
    loss: Tensor,
    log_weights: Tensor | None = None,
) -> CoverageOutput:
    """Return a result of attention with a history."""
    result = CoverageOutput((context, weights, coverage))
    result.loss = loss
    if log_weights is not None:
        result.log_weights = log_weights
    return result


def recurrent_result(
    output: Tensor, state: RecurrentState, states: Tensor, contexts: Tensor, weights: Tensor | None
) -> RecurrentOutput:
    """Return a result of a recurrent layer that attends."""
    result = RecurrentOutput((output, state))
    result.states, result.contexts, result.weights = states, contexts, weights
    return result
