"""Losses on attention weights, and on samples of hard attention.

An argument that does not fit raises ValueError or TypeError, and the message names it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnfast._utils.checks import (
    MAX_INT32,
    check_array,
    check_choice,
    check_device,
    check_range,
    check_tensor,
    describe,
    is_finite,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast.ops.operators import accumulation_dtype

__all__ = ["Reinforce", "alignment_loss", "doubly_stochastic_loss", "pointer_loss"]

KINDS = ("cross_entropy", "squared")
#: Smaller weights are clamped to this value before their logarithm is taken.
SMALLEST = 1e-8


def alignment_loss(
    weights: Tensor,
    alignment: Tensor,
    *,
    key_indices: Tensor | None = None,
    kind: str = "cross_entropy",
) -> Tensor:
    r"""Compare attention weights with given alignments, row by row.

    ==================  =================================================
    ``cross_entropy``   :math:`-\sum_j \hat\alpha_{ij} \log \alpha_{ij}`
    ``squared``         :math:`\frac12 \sum_j (\alpha_{ij} - \hat\alpha_{ij})^2`
    ==================  =================================================

    A span's weights stay in their columns; no tensor of size Tq·Tk is created. An alignment to a
    key that is hidden from the row counts with α = 0, in the logarithm with α = 1e-8.

    Args:
        weights: α, ``[B, (H,) Tq, Tk]``, or ``[B, (H,) Tq, W]`` in the columns of a span.
        alignment: α̂: the aligned key of every row, int64 ``[B, (H,) Tq]``, −1 for none; or weights
            ``[B, (H,) Tq, Tk]``, dense or ``torch.sparse_coo``. Unless sparse, H may be 1.
        key_indices: the key of each column, ``[.., Tq, W]`` from :meth:`attnfast.Span.key_indices`,
            if the weights are a span's.
        kind: one of the table.

    Returns:
        ``[B, (H,) Tq]``, differentiable, float32 for half precision; 0 where the aligned key is −1.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Papers: Mi, Wang and Ittycheriah, "Supervised Attentions for Neural Machine Translation", EMNLP
    2016, arXiv:1608.00112; Liu et al., "Neural Machine Translation with Supervised Attention",
    COLING 2016, arXiv:1609.04186.

    Example:
        >>> weights = torch.eye(3).unsqueeze(0)  # row i looks at key i
        >>> attnfast.alignment_loss(weights, torch.tensor([[0, 1, 2]])).sum().item()
        0.0
    """
    check_weights(weights, "W")
    if not isinstance(alignment, Tensor) or alignment.layout != torch.sparse_coo:
        check_tensor("alignment", alignment)
    check_choice("kind", kind, KINDS)
    check_device("alignment", alignment, weights, "weights")
    weights = weights.to(accumulation_dtype(weights.dtype))
    if key_indices is not None:
        key_indices = check_key_indices(key_indices, weights)
    whole = alignment.dtype == torch.int64 and not alignment.is_sparse
    rows = list(alignment.shape if whole else alignment.shape[:-1])
    shape = list(weights.shape[:-1])
    heads = len(shape) == 3 and not alignment.is_sparse
    fits = rows in (shape, [shape[0], 1, *shape[2:]] if heads else shape)
    if (
        not fits
        or not (whole or alignment.is_floating_point())
        or (not whole and key_indices is None and alignment.shape[-1] != weights.shape[-1])
    ):
        raise_value_error(
            "alignment",
            f"int64 {shape} or floating-point {list(weights.shape)} to fit the weights",
            f"{alignment.dtype} {list(alignment.shape)}",
        )
    if whole:
        most = weights.shape[-1] - 1 if key_indices is None else MAX_INT32
        check_range("alignment", alignment, -1, most, "keys of weights, or -1 for none,")
        return _of_keys(weights, alignment.long(), key_indices, kind)
    if alignment.is_sparse:
        return _of_entries(weights, alignment.coalesce(), key_indices, kind)
    alignment = alignment.to(weights.dtype)
    if key_indices is None:
        return _of_numbers(weights, alignment, kind)
    index = key_indices.clamp_min(0).expand(weights.shape)
    aligned = alignment.expand(*weights.shape[:-1], -1)
    inside = aligned.gather(-1, index).masked_fill(key_indices < 0, 0)
    loss = _of_numbers(weights, inside, kind)
    return loss + _unseen(aligned, inside, kind)


def doubly_stochastic_loss(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Penalise keys whose attention weights do not sum to 1 over the target.

    .. math:: \sum_j \left(1 - \sum_i \alpha_{ij}\right)^2

    Args:
        weights: α, ``[B, Tq, Tk]``, 0 in padding.
        mask: boolean ``[B, Tk]``, True for keys that exist; None means all.

    Returns:
        ``[B]``, differentiable, float32 for half precision.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Paper: Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044, section 4.2.1.

    Example:
        >>> attnfast.losses.doubly_stochastic_loss(torch.eye(3).unsqueeze(0)).item()
        0.0
    """
    check_array("weights", weights, "floating-point", ("B", "Tq", "Tk"))
    left = (1 - weights.to(accumulation_dtype(weights.dtype)).sum(1)).square()
    if mask is not None:
        check_array("mask", mask, "boolean", left.shape, like=weights, of="weights")
        left = left.masked_fill(~mask, 0)
    return left.sum(-1)


class Reinforce(Module):
    r"""Loss of hard attention: REINFORCE with a moving baseline and an entropy term.

    .. math:: L = -\frac{1}{B} \sum_n \left[\log p(y_n \mid \tilde s_n) + \lambda_r
              (\log p(y_n \mid \tilde s_n) - b) \log p(\tilde s_n) + \lambda_e H[s_n]\right],
              \quad b \leftarrow 0.9\, b + 0.1\, \frac{1}{B} \sum_n \log p(y_n \mid \tilde s_n)

    The factor before :math:`\log p(\tilde s)` is detached: with :math:`\lambda_r = 1` and
    :math:`\lambda_e = 0` the expected gradient over the samples is that of the mean of
    :math:`-\log p(y \mid s)`. The baseline b is computed from previous batches, so that it does not
    depend on the samples of this batch; the first batch initialises it. It is a buffer, which is
    updated in training only and skips batches whose mean is infinite or NaN.

    Args:
        weight: λ_r.
        entropy_weight: λ_e.
        decay: decay of the baseline, 0.9 in the formula.

    Papers: Williams, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning", Machine Learning 8, 1992; Xu et al., "Show, Attend and Tell", ICML
    2015, arXiv:1502.03044, section 4.1.

    Example:
        >>> attention = attnfast.nn.HardAttention(attnfast.nn.BahdanauAttention(6, 8, 4))
        >>> memory = attention.prepare(torch.randn(2, 5, 8))
        >>> context, _, history = attention(torch.randn(2, 3, 6), memory)
        >>> log_likelihood = -context.square().sum((1, 2))  # of each target
        >>> reinforce = attnfast.losses.Reinforce(entropy_weight=0.01)
        >>> reinforce(log_likelihood, history.log_prob, history.entropy).shape
        torch.Size([])
    """

    baseline: Tensor

    def __init__(self, weight: float = 1.0, entropy_weight: float = 0.0, decay: float = 0.9):
        super().__init__()
        for name, x in (("weight", weight), ("entropy_weight", entropy_weight)):
            if not is_finite(x) or x < 0:
                raise_value_error(name, "a number, at least 0", describe(x))
        if not is_finite(decay) or not 0 <= decay < 1:
            raise_value_error("decay", "at least 0 and below 1", describe(decay))
        self.weight, self.entropy_weight, self.decay = weight, entropy_weight, decay
        self.register_buffer("baseline", torch.tensor(torch.nan, dtype=torch.float64))

    def forward(self, log_likelihood: Tensor, log_prob: Tensor, entropy: Tensor) -> Tensor:
        r"""Return the loss of a batch, a scalar.

        Args:
            log_likelihood: ``[B]``, :math:`\log p(y \mid \tilde s)` of whole targets.
            log_prob, entropy: ``[B]``, of :class:`attnfast.nn.HardAttentionState`.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("log_likelihood", log_likelihood, "floating-point", ("B",))
        check_device("log_likelihood", log_likelihood, self.baseline, "the module")
        if not len(log_likelihood):
            raise_value_error(
                "log_likelihood", "[B], of one target at least", describe(log_likelihood)
            )
        of = "log_likelihood"
        for name, x in (("log_prob", log_prob), ("entropy", entropy)):
            check_array(name, x, "floating-point", log_likelihood.shape, like=log_likelihood, of=of)
        reward = log_likelihood.detach().double()
        before = torch.where(self.baseline.isnan(), reward.mean(), self.baseline)
        if self.training:
            mean = reward.mean()
            moved = self.decay * before + (1 - self.decay) * mean
            self.baseline.copy_(torch.where(mean.isfinite(), moved, self.baseline))
        gain = (reward - before).to(log_prob.dtype)
        terms = log_likelihood + self.weight * gain * log_prob + self.entropy_weight * entropy
        return -terms.mean()


def check_weights(weights: object, columns: str = "Tk") -> None:
    """Raise unless ``weights`` is a floating-point tensor ``[B, (H,) Tq, Tk]``."""
    shapes = ("B", "Tq", columns), ("B", "H", "Tq", columns)
    check_array("weights", weights, "floating-point", *shapes)


def check_key_indices(key_indices: Tensor, weights: Tensor) -> Tensor:
    """Return the column keys of ``weights`` with a head axis; raise if they do not fit."""
    check_tensor("key_indices", key_indices)
    check_device("key_indices", key_indices, weights, "weights")
    if key_indices.dim() == 3 and weights.dim() == 4:
        key_indices = key_indices.unsqueeze(1)
    try:
        fits = torch.broadcast_shapes(key_indices.shape, weights.shape) == weights.shape
    except RuntimeError:
        fits = False
    if not fits or key_indices.dtype != torch.int64 or key_indices.shape[-1] != weights.shape[-1]:
        expected = f"int64 {list(weights.shape)}, or 1 instead of B and H, to fit weights"
        raise_value_error("key_indices", expected, describe(key_indices))
    check_range("key_indices", key_indices, -1, MAX_INT32, "keys, or -1 for none,")
    return key_indices


def _log(weights: Tensor) -> Tensor:
    return weights.clamp_min(SMALLEST).log()


def _of_numbers(weights: Tensor, aligned: Tensor, kind: str) -> Tensor:
    if kind == "squared":
        return 0.5 * (weights - aligned).square().sum(-1)
    return -(aligned * _log(weights)).sum(-1)


def _unseen(aligned: Tensor, inside: Tensor, kind: str) -> Tensor:
    """Return the loss of alignments to keys that no column has."""
    if kind == "squared":
        return 0.5 * (aligned.square().sum(-1) - inside.square().sum(-1))
    log = torch.log(aligned.new_tensor(SMALLEST))
    return -log * (aligned.sum(-1) - inside.sum(-1))


def _of_keys(weights: Tensor, alignment: Tensor, key_indices: Tensor | None, kind: str) -> Tensor:
    alignment = alignment.expand(weights.shape[:-1]).unsqueeze(-1)
    exists = (alignment >= 0).squeeze(-1)
    if key_indices is None:
        aligned = weights.gather(-1, alignment.clamp_min(0)).squeeze(-1)
    else:
        aligned = weights.masked_fill(key_indices != alignment, 0).sum(-1)
    if kind == "squared":
        loss = 0.5 * (weights.square().sum(-1) - 2 * aligned + 1)
    else:
        loss = -_log(aligned)
    return loss.masked_fill(~exists, 0)


def _of_entries(
    weights: Tensor, alignment: Tensor, key_indices: Tensor | None, kind: str
) -> Tensor:
    *where, key = alignment.indices()
    number = alignment.values().to(weights.dtype)
    if key_indices is None:
        aligned = weights[(*where, key)]
    else:
        row_keys = key_indices.expand(weights.shape)[tuple(where)]  # [entries, W]
        aligned = weights[tuple(where)].masked_fill(row_keys != key.unsqueeze(-1), 0).sum(-1)
    if kind == "squared":
        each, base = number * (number - 2 * aligned), weights.square().sum(-1)
    else:
        each, base = -2 * number * _log(aligned), weights.new_zeros(weights.shape[:-1])
    return 0.5 * base.index_put(tuple(where), each, accumulate=True)


def pointer_loss(log_probs: Tensor, pointers: Tensor) -> Tensor:
    r"""Return the negative log-likelihood per pointer, in nats; ends count as pointers.

    .. math:: -\frac{1}{\sum_b T_b} \sum_b \sum_{t \le T_b} \ln P(y_{bt}), \quad
              T_b \text{ the position of the first end, from 1 on}

    Args:
        log_probs: ``[B, T, 1 + N]``, of :class:`attnfast.nn.PointerNetwork`.
        pointers: ``[B, T]``, int64: 0 for the end, i for the i-th item; pointers after a row's
            first end are ignored.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Example:
        >>> log_probs = torch.full((1, 2, 3), 0.5).log()
        >>> round(attnfast.losses.pointer_loss(log_probs, torch.tensor([[2, 0]])).item(), 4)
        0.6931
    """
    check_array("log_probs", log_probs, "floating-point", ("B", "T", "1 + N"))
    check_array("pointers", pointers, "int64", log_probs.shape[:-1], of="log_probs")
    items = log_probs.shape[-1] - 1
    check_range("pointers", pointers, 0, items, "0 for the end, or items of log_probs,")
    pointers = pointers.to(log_probs.device)
    ends = pointers == 0
    counts = ends.cumsum(-1) - ends.long() == 0
    chosen = log_probs.gather(-1, pointers.unsqueeze(-1)).squeeze(-1)
    return -chosen.masked_fill(~counts, 0).sum() / counts.sum().clamp_min(1)
