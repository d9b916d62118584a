r"""Measure attention weights: row statistics, alignments and known failures.

Functions take ``weights [B, Tq, Tk]``, or ``[B, H, Tq, Tk]`` with heads, of any dtype and device:

``lengths``
    ``[B]``, the keys of each source; None means Tk.
``target_lengths``
    ``[B]``, the rows of each target; None means Tq.
``key_indices``
    key indices of the columns, from :meth:`attnfast.Span.key_indices`, if the weights are those of
    a span. Tk is then the largest length; lengths of None end at the last key visible to any row.

In the formulas α are the weights, i is a row of m, j a key of n; :math:`p_{ij} = \alpha_{ij} /
\sum_j \alpha_{ij}` are normalised weights, which differ from α if rows do not sum to 1, as with a
Gaussian prior. Entropies are in nats. Sums are float32, or float64 for float64. Padding is ignored,
even if it is NaN, and its results are 0. Lengths and keys are below 2³¹. An argument that does not
fit raises ValueError or TypeError, and the message names it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import (
    MAX_INT32,
    check_array,
    check_device,
    check_int,
    check_number,
    check_numbers,
    describe,
    is_int,
    raise_type_error,
    raise_value_error,
)
from attnfast.losses import check_key_indices, check_weights
from attnfast.ops.arguments import length_mask
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.span import to_dense
from attnfast.outputs import RowStatistics

__all__ = [
    "AlignmentScore",
    "Diagonality",
    "Failures",
    "HeadRoles",
    "KeyCoverage",
    "OverUnderTranslation",
    "RowStatistics",
    "Thresholds",
    "alignment_score",
    "diagonality",
    "extract_alignment",
    "failures",
    "head_roles",
    "key_coverage",
    "kl_from_uniform",
    "monotonicity",
    "over_under_translation",
    "repetition",
    "row_statistics",
]


class _Given:
    """Weights whose padding is 0, and masks of the elements that are not padding.

    ``weights``, ``p``, ``seen [B, (H,) Tq, W]``; ``rows [B, (1,) Tq]``; ``key_indices`` of the
    columns; ``n`` and ``m [B]``.
    """

    def __init__(
        self, weights: object, lengths: object, target_lengths: object, key_indices: object
    ):
        check_weights(weights)
        assert isinstance(weights, Tensor)
        self.heads = weights.dim() - 3
        Tq, W = weights.shape[-2:]
        columns = torch.arange(W, device=weights.device)
        if key_indices is None:
            self.key_indices, self.Tk = columns, W
        else:
            self.key_indices = check_key_indices(key_indices, weights)  # type: ignore[arg-type]
            self.Tk = int(self.key_indices.max()) + 1 if self.key_indices.numel() else 0
        self.n = self._lengths("lengths", lengths, None if key_indices is not None else W, weights)
        self.m = self._lengths("target_lengths", target_lengths, Tq, weights)
        if key_indices is not None and lengths is not None:
            self.Tk = max(self.n.tolist(), default=0)
        self.rows = length_mask(self.each(self.m, 0), Tq)
        inside = (self.key_indices >= 0) & (self.key_indices < self.each(self.n, 2))
        self.seen = (inside & self.rows.unsqueeze(-1)).expand(weights.shape)
        numbers = weights.to(accumulation_dtype(weights.dtype))
        self.weights = numbers.masked_fill(~self.seen, 0)
        self.p = _shares(self.weights)

    def _lengths(self, name: str, x: object, most: int | None, like: Tensor) -> Tensor:
        B = like.shape[0]
        if x is None:
            return torch.full((B,), self.Tk if most is None else most, device=like.device)
        check_device(name, x, like, "weights")  # type: ignore[arg-type]
        check_numbers(name, x, B, 0, MAX_INT32 if most is None else most, "weights")
        assert isinstance(x, Tensor)
        return x.long()

    def each(self, x: Tensor, axes: int = 0) -> Tensor:
        """Return ``x [B]`` with an axis for heads, if there are any, and ``axes`` more."""
        return x.view(-1, *[1] * (self.heads + axes))

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over a target's rows of ``x [B, (H,) Tq]``."""
        return x.masked_fill(~self.rows, 0).sum(-1) / self.each(self.m).clamp_min(1)

    def diagonal(self) -> Tensor:
        """Return a row's position among the keys, ``[B, (1,) Tq]``: (i + ½) n / m − ½."""
        like = self.weights
        i = torch.arange(self.rows.shape[-1], device=like.device, dtype=like.dtype)
        return (i + 0.5) * self.each(self.n, 1) / self.each(self.m, 1).clamp_min(1) - 0.5

    def entropy(self) -> Tensor:
        """Return −Σ_j p ln p of every row."""
        return _entropy(self.p)

    def evenness(self) -> Tensor:
        """Return every row's entropy over the largest entropy for its number of visible keys."""
        return self.entropy() / self.seen.sum(-1).clamp_min(2).to(self.p.dtype).log()

    def largest(self) -> tuple[Tensor, Tensor]:
        """Return every row's largest weight, and its key; key 0 where there is no weight."""
        if self.weights.shape[-1] == 0:
            zeros = self.weights.sum(-1)
            return zeros, zeros.long()
        most, column = self.weights.max(-1)
        key = (
            self.key_indices.expand(self.weights.shape).gather(-1, column.unsqueeze(-1)).squeeze(-1)
        )
        return most, key.masked_fill(most == 0, 0)

    def coverage(self) -> Tensor:
        """Return Σ_i α of every key, ``[B, (H,) Tk]``."""
        if self.key_indices.dim() == 1:
            return self.weights.sum(-2)
        return to_dense(self.weights.flatten(-2), self._all_keys().flatten(-2), self.Tk)

    def _all_keys(self) -> Tensor:
        return self.key_indices.expand(self.weights.shape)

    def keys_exist(self) -> Tensor:
        """Return the mask ``[B, (1,) Tk]`` of keys that are not padding."""
        return length_mask(self.each(self.n, 0), self.Tk)


def _shares(x: Tensor) -> Tensor:
    """Return x over its sum over the last axis, 0 where that is 0."""
    mass = x.sum(-1, keepdim=True)
    return x / mass.masked_fill(mass == 0, 1)


def _entropy(p: Tensor) -> Tensor:
    """Return −Σ p ln p over the last axis, with gradient 0 for elements that are 0."""
    return -(p * torch.where(p > 0, p, 1).log()).sum(-1)


# ---- rows ---------------------------------------------------------------------------------------


def row_statistics(
    weights: Tensor,
    lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    key_indices: Tensor | None = None,
) -> RowStatistics:
    r"""Return the entropy, largest weight, mean and variance of each row's weights.

    .. math:: H_i = -\sum_j p_{ij} \ln p_{ij}, \quad \mu_i = \sum_j j\, p_{ij}, \quad
              \sigma^2_i = \sum_j (j - \mu_i)^2 p_{ij}

    Returns:
        ``entropy`` H, 0 for one key and ln n for uniform weights; ``max_weight`` α and its
        key ``argmax``, int64, the first of equal ones; ``expected_position`` μ and its ``variance``
        σ², in keys. All but ``argmax`` are differentiable. The module's docstring describes the
        arguments.

    Example:
        >>> weights = torch.eye(3).unsqueeze(0)
        >>> attnfast.analysis.diagnostics.row_statistics(weights).argmax
        tensor([[0, 1, 2]])
    """
    of = _Given(weights, lengths, target_lengths, key_indices)
    largest, position = of.largest()
    j = of.key_indices.to(of.weights.dtype)
    mean = (of.p * j).sum(-1)
    variance = (of.p * (j - mean.unsqueeze(-1)).square()).sum(-1)
    return RowStatistics(of.entropy(), largest, position, mean, variance)


def kl_from_uniform(
    weights: Tensor,
    lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    key_indices: Tensor | None = None,
) -> Tensor:
    r"""Return :math:`\mathrm{KL}(p_i \,\|\, \text{uniform}) = \ln n_i - H_i`, in nats.

    It is 0 for uniform weights and ln n if all weight is on one key. n_i is the number of keys
    visible to the row: those of its source, or of its span.

    Returns:
        ``[B, (H,) Tq]``, differentiable; 0 for a row without visible keys.

    Example:
        >>> attnfast.analysis.diagnostics.kl_from_uniform(torch.full((1, 2, 4), 0.25))
        tensor([[0., 0.]])
    """
    of = _Given(weights, lengths, target_lengths, key_indices)
    seen = of.seen.sum(-1)
    gap = seen.clamp_min(1).to(of.weights.dtype).log() - of.entropy()
    return gap.clamp_min(0).masked_fill(of.weights.sum(-1) == 0, 0)


# ---- sentences ----------------------------------------------------------------------------------


class KeyCoverage(NamedTuple):
    """Attention that each key receives over the target.

    Attributes:
        total: Σ_i α of each key, ``[B, (H,) Tk]``.
        uniformity: the normalised entropy of the totals, ``[B, (H)]``, from 0 to 1.

    Example:
        >>> from attnfast.analysis.diagnostics import key_coverage
        >>> weights = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])  # both rows attend to the first key
        >>> key_coverage(weights).total
        tensor([[2., 0.]])
    """

    total: Tensor
    uniformity: Tensor


def key_coverage(
    weights: Tensor,
    lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    key_indices: Tensor | None = None,
) -> KeyCoverage:
    r"""Return the total attention of every key, and the uniformity of these totals.

    .. math:: C_j = \sum_i \alpha_{ij}, \quad
              u = -\frac{1}{\ln n} \sum_j p_j \ln p_j, \quad p_j = C_j / \textstyle\sum_j C_j

    u is 1 if all totals are equal, 0 if one key has all attention, and 1 for a source of one key.

    Paper: Tu et al., "Modeling Coverage for Neural Machine Translation", ACL 2016,
    arXiv:1601.04811.

    Example:
        >>> attnfast.analysis.diagnostics.key_coverage(torch.eye(3).unsqueeze(0)).total
        tensor([[1., 1., 1.]])
    """
    of = _Given(weights, lengths, target_lengths, key_indices)
    total = of.coverage()
    p = _shares(total)
    n = of.each(of.n).to(p.dtype)
    uniformity = (_entropy(p) / n.clamp_min(2).log()).clamp_max(1)
    uniformity = uniformity.masked_fill(n == 1, 1)
    return KeyCoverage(total, uniformity.masked_fill(total.sum(-1) == 0, 0))


class Diagonality(NamedTuple):
    """Diagonality of each sentence, ``[B, (H)]``.

    Attributes:
        share: the mean weight within the radius of the diagonal, from 0 to 1.
        offset: the mean signed distance from the diagonal in keys, below 0 if rows look back.
        distance: the mean absolute distance from the diagonal in keys.

    Example:
        >>> from attnfast.analysis.diagnostics import diagonality
        >>> weights = torch.eye(4).roll(1, -1).unsqueeze(0)  # one key after the diagonal
        >>> found = diagonality(weights, radius=1)
        >>> found.share, found.distance
        (tensor([0.7500]), tensor([1.5000]))
    """

    share: Tensor
    offset: Tensor
    distance: Tensor


def diagonality(
    weights: Tensor,
    lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    radius: float = 2.0,
    key_indices: Tensor | None = None,
) -> Diagonality:
    r"""Return the distance of the weights from the diagonal, :math:`d_i = (i + ½) n / m - ½`.

    Args:
        radius: r, in keys.

    Returns:
        ``share``, the mean over the rows of :math:`\sum_{|j - d_i| \le r} p_{ij}`; ``offset``, that
        of :math:`\sum_j (j - d_i) p_{ij}`, below 0 if rows look back; ``distance``, that of
        :math:`\sum_j |j - d_i| p_{ij}`.

    Paper: Chen et al., "MultiSpeech: Multi-Speaker Text to Speech with Transformer", Interspeech
    2020, arXiv:2006.04664, whose diagonal attention rate is such a share.

    Example:
        >>> attnfast.analysis.diagnostics.diagonality(torch.eye(4).unsqueeze(0)).share
        tensor([1.])
    """
    check_number("radius", radius, 0)
    of = _Given(weights, lengths, target_lengths, key_indices)
    apart = of.key_indices - of.diagonal().unsqueeze(-1)
    ways = of.p * (apart.abs() <= radius), of.p * apart, of.p * apart.abs()
    return Diagonality(*(of.mean(x.sum(-1)) for x in ways))


def monotonicity(
    weights: Tensor,
    lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    key_indices: Tensor | None = None,
) -> Tensor:
    r"""Return the share of rows whose largest weight is not before that of the previous row.

    .. math:: \frac{1}{m - 1} \sum_{i \ge 1} [a_i \ge a_{i-1}], \quad
              a_i = \mathrm{argmax}_j \alpha_{ij}

    Returns:
        ``[B, (H)]``, from 0 to 1; 1 for a target of one row.

    Paper: Raffel et al., "Online and Linear-Time Attention by Enforcing Monotonic Alignments", ICML
    2017, arXiv:1704.00784, whose attention enforces a value of 1.

    Example:
        >>> attnfast.analysis.diagnostics.monotonicity(torch.eye(4).unsqueeze(0))
        tensor([1.])
    """
    of = _Given(weights, lengths, target_lengths, key_indices)
    _, position = of.largest()
    back = (position[..., 1:] < position[..., :-1]) & of.rows[..., 1:]
    return 1 - back.sum(-1, dtype=of.weights.dtype) / of.each(of.m - 1).clamp_min(1)


class OverUnderTranslation(NamedTuple):
    """Over- and under-translation of each sentence, ``[B, (H)]``, as shares of its keys.

    Attributes:
        over: the mean over the keys of max(0, C / φ − 1), with attention C and fertility φ.
        under: the mean over the keys of max(0, 1 − C / φ), from 0 to 1.

    Example:
        >>> from attnfast.analysis.diagnostics import over_under_translation
        >>> over, under = over_under_translation(torch.eye(3).unsqueeze(0))
        >>> over, under
        (tensor([0.]), tensor([0.]))
    """

    over: Tensor
    under: Tensor


def over_under_translation(
    weights: Tensor,
    lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    fertility: Tensor | None = None,
    key_indices: Tensor | None = None,
) -> OverUnderTranslation:
    r"""Return the shares of a source that were translated more than once, and not at all.

    .. math:: \text{over} = \frac1n \sum_j \max(0, C_j / \phi_j - 1), \quad
              \text{under} = \frac1n \sum_j \max(0, 1 - C_j / \phi_j), \quad
              C_j = \sum_i \alpha_{ij}

    Args:
        fertility: φ > 0, the expected attention of a key, ``[B, Tk]``; None means m / n, so that
            a difference in length alone does not count.

    Paper: Tu et al., ACL 2016, arXiv:1601.04811, who count these errors by hand.

    Example:
        >>> from attnfast.analysis.diagnostics import over_under_translation
        >>> weights = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])  # no row attends to the second key
        >>> over_under_translation(weights)
        OverUnderTranslation(over=tensor([0.5000]), under=tensor([0.5000]))
    """
    of = _Given(weights, lengths, target_lengths, key_indices)
    total = of.coverage()
    n, m = (of.each(x, 1).to(total.dtype) for x in (of.n, of.m))
    asked = m / n.clamp_min(1)
    if fertility is not None:
        shape = (total.shape[0], of.Tk)
        check_array("fertility", fertility, "floating-point", shape, like=total, of="weights")
        if fertility.device.type == "cpu" and not (fertility > 0).all():
            raise_value_error("fertility", "above 0", float(fertility.min()))
        asked = (fertility.unsqueeze(1) if of.heads else fertility).to(total.dtype)
    beyond = total / asked.masked_fill(asked == 0, 1) - 1
    beyond = beyond.masked_fill(~of.keys_exist() | (asked == 0), 0)
    count = n.squeeze(-1).clamp_min(1)
    return OverUnderTranslation(
        beyond.clamp_min(0).sum(-1) / count, (-beyond).clamp_min(0).sum(-1) / count
    )


def repetition(words: Sequence[Hashable], size: int = 1) -> float:
    """Return the share of a sentence's n-grams of ``size`` words that repeat an earlier one.

    Example:
        >>> attnfast.analysis.diagnostics.repetition(["a", "b", "a"])
        0.33333333333333337
    """
    check_int("size", size)
    if isinstance(words, Tensor):
        check_array("words", words, "int64 or int32", ("T",))
        words = words.tolist()
    if (
        not isinstance(words, Sequence)
        or isinstance(words, str)
        or not all(isinstance(x, Hashable) for x in words)
    ):
        raise_type_error("words", "a sequence of words or word ids", describe(words))
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# ---- alignments ---------------------------------------------------------------------------------

LinkSet = set[tuple[int, int]]  # (source, target)


def extract_alignment(
    weights: Tensor,
    lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    min_weight: float = 0.0,
    null: int | None = None,
    key_indices: Tensor | None = None,
) -> list[LinkSet]:
    """Return every sentence's links ``(source, target)``: each row's largest weight.

    Args:
        min_weight: a row whose largest weight is smaller has no link: its word is aligned to NULL;
            so is a row whose weights are 0.
        null: a key that stands for NULL, if there is one, such as the end of the source; −1 is the
            last key of each source.

    With heads, the mean of their weights is used.

    Example:
        >>> attnfast.analysis.diagnostics.extract_alignment(torch.tensor([[[0.0, 1.0]]]))
        [{(1, 0)}]
    """
    check_number("min_weight", min_weight, 0, 1)
    if null is not None and (not is_int(null) or not -1 <= null <= MAX_INT32):
        raise_value_error("null", "None, −1 or the number of a key", describe(null))
    of = _Given(weights, lengths, target_lengths, key_indices)
    if of.heads:
        if key_indices is not None:
            weights = to_dense(of.weights, of._all_keys(), of.Tk)
        of = _Given(weights.to(of.weights.dtype).mean(1), of.n, of.m, None)
    largest, position = of.largest()
    nulls = [n - 1 if null == -1 else null for n in of.n.tolist()]
    return [
        {
            (j, i)
            for i, (most, j) in enumerate(zip(values[:m], places[:m]))
            if most > 0 and most >= min_weight and j != nothing
        }
        for values, places, m, nothing in zip(
            largest.tolist(), position.tolist(), of.m.tolist(), nulls
        )
    ]


def _link_sets(name: str, x: Any) -> list[LinkSet]:
    """Return a list of the sentences' sets of links; raise unless they are sets of links."""
    sets: Any = list(x) if isinstance(x, Iterable) and not isinstance(x, Tensor) else [None]
    if not all(isinstance(each, (set, frozenset)) for each in sets):
        raise_type_error(name, "sets of links", describe(x))
    return sets


class AlignmentScore(NamedTuple):
    """Agreement of links with reference links; all fields are from 0 to 1.

    Attributes:
        precision: the share of the links that are sure or possible.
        recall: the share of the sure links that are among the links.
        f1: the harmonic mean of both.
        error_rate: the alignment error rate; lower is better.

    Example:
        >>> from attnfast.analysis.diagnostics import alignment_score
        >>> alignment_score(predicted=[{(0, 0), (1, 0)}], sure=[{(0, 0)}], possible=[{(1, 0)}])
        AlignmentScore(precision=1.0, recall=1.0, f1=1.0, error_rate=0.0)
    """

    precision: float
    recall: float
    f1: float
    error_rate: float


def alignment_score(
    predicted: Iterable[LinkSet], sure: Iterable[LinkSet], possible: Iterable[LinkSet] | None = None
) -> AlignmentScore:
    r"""Compare links with reference links, over all sentences together.

    .. math:: \text{precision} = \frac{|A \cap P|}{|A|}, \quad
              \text{recall} = \frac{|A \cap S|}{|S|}, \quad
              \mathrm{AER} = 1 - \frac{|A \cap S| + |A \cap P|}{|A| + |S|}

    Args:
        predicted: A, links ``(source, target)`` of every sentence, as :func:`extract_alignment`
            returns them.
        sure: S, the required links. A word without a link is aligned to NULL.
        possible: P, the allowed links, which always include the sure ones. None: no others.

    Without any link, predicted or sure, the error rate is 0, and so are precision and recall.

    Paper: Och and Ney, "A Systematic Comparison of Various Statistical Alignment Models",
    Computational Linguistics 29(1), 2003.

    Example:
        >>> score = attnfast.analysis.diagnostics.alignment_score([{(0, 0)}], [{(0, 0), (1, 1)}])
        >>> score.precision, score.recall
        (1.0, 0.5)
    """
    predicted, sure = _link_sets("predicted", predicted), _link_sets("sure", sure)
    possible = [set()] * len(sure) if possible is None else _link_sets("possible", possible)
    for name, x in (("predicted", predicted), ("possible", possible)):
        if len(x) != len(sure):
            raise_value_error(name, f"of as many sentences as sure, {len(sure)}", len(x))
    counts: Counter[str] = Counter()
    for a, s, p in zip(predicted, sure, possible):
        counts.update(A=len(a), S=len(s), AS=len(a & s), AP=len(a & (p | s)))
    A, S, AS, AP = (counts[x] for x in ("A", "S", "AS", "AP"))
    precision, recall = (AP / A if A else 0.0), (AS / S if S else 0.0)
    both = precision + recall
    error = 1 - (AS + AP) / (A + S) if A + S else 0.0
    return AlignmentScore(precision, recall, 2 * precision * recall / both if both else 0.0, error)


# ---- heads --------------------------------------------------------------------------------------


class HeadRoles(NamedTuple):
    """Measures of the role of each head; all but the offset are from 0 to 1.

    Attributes:
        distance: the mean divergence of the rows of two heads, ``[H, H]``.
        positional: the share of rows that attend to one offset from the diagonal, ``[H]``.
        offset: that offset, in keys, ``[H]``, int64.
        local: the mean weight within the radius of the largest one, ``[H]``.
        broad: the mean normalised entropy, ``[H]``.

    Example:
        >>> from attnfast.analysis.diagnostics import head_roles
        >>> roles = head_roles(torch.eye(4).expand(1, 2, 4, 4))  # two equal heads
        >>> roles.positional, roles.offset
        (tensor([1., 1.]), tensor([0, 0]))
    """

    distance: Tensor
    positional: Tensor
    offset: Tensor
    local: Tensor
    broad: Tensor


def head_roles(
    weights: Tensor,
    lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    radius: int = 2,
    key_indices: Tensor | None = None,
) -> HeadRoles:
    r"""Return measures of the role of each head of ``weights [B, H, Tq, Tk]``, over all rows.

    .. math:: \text{distance}_{gh} = \frac{1}{\ln 2}\, \overline{\mathrm{JSD}(p^g_i, p^h_i)}, \quad
              \text{positional}_h = \max_{|o| \le r}\, \overline{[\,\mathrm{round}(a_i - d_i) = o]}

    .. math:: \text{local}_h = \overline{\textstyle\sum_{|j - a_i| \le r} p_{ij}}, \quad
              \text{broad}_h = \overline{H_i / \ln n_i}, \quad a_i = \mathrm{argmax}_j \alpha_{ij}

    The bar is the mean over the rows i of all sentences, :math:`d_i` the row's position on the
    diagonal of :func:`diagonality`, and :math:`H_i` the row's entropy.

    Args:
        radius: of a neighbourhood, in keys.

    Returns:
        ``distance``: the mean Jensen–Shannon divergence of two heads' rows, over ln 2: 0 if their
        weights are equal, 1 if they share no key. ``positional``: the share of rows whose largest
        weight is at the same ``offset`` from the diagonal, rounded, the most frequent one within
        the radius. ``local``: the mean share of weight within the radius of the largest.
        ``broad``: the mean entropy over ln n, with n visible keys.

    Papers: Voita et al., "Analyzing Multi-Head Self-Attention", ACL 2019, arXiv:1905.09418; Clark
    et al., "What Does BERT Look At?", BlackboxNLP 2019, arXiv:1906.04341.

    Example:
        >>> from attnfast.analysis.diagnostics import head_roles
        >>> heads = torch.stack([torch.eye(4), torch.full((4, 4), 0.25)]).unsqueeze(0)
        >>> roles = head_roles(heads, radius=1)
        >>> roles.local, roles.broad  # the first is sharp, the second uniform
        (tensor([1.0000, 0.5000]), tensor([0., 1.]))
    """
    check_int("radius", radius, 0)
    of = _Given(weights, lengths, target_lengths, key_indices)
    if not of.heads:
        raise_value_error("weights", "[B, H, Tq, Tk], with heads", list(weights.shape))
    evenness = of.evenness()
    if key_indices is not None:  # heads may see different keys
        dense = to_dense(of.weights, of._all_keys(), of.Tk)
        of = _Given(dense, of.n, of.m, None)
    H, live = of.weights.shape[1], of.weights.sum(-1) > 0  # [B, H, Tq]
    entropy = of.entropy()

    def mean(x: Tensor, rows: Tensor) -> Tensor:  # over [B, ·, Tq]
        return x.masked_fill(~rows, 0).sum((0, 2)) / rows.sum((0, 2)).clamp_min(1)

    distance = []
    for h in range(H):  # one head with all: no tensor of all pairs' rows
        both = (of.p + of.p[:, h : h + 1]) / 2
        gap = (_entropy(both) - (entropy + entropy[:, h : h + 1]) / 2).clamp_min(0) / math.log(2)
        distance.append(mean(gap, live & live[:, h : h + 1]))
    _, position = of.largest()
    off = (position - of.diagonal()).round()
    shares = [
        mean((off == offset).to(entropy.dtype), live) for offset in range(-radius, radius + 1)
    ]
    positional, which = torch.stack(shares).max(0)
    near = (of.key_indices - position.unsqueeze(-1)).abs() <= radius
    return HeadRoles(
        torch.stack(distance) if H else entropy.new_zeros(0, 0),
        positional,
        (which - radius).masked_fill(positional == 0, 0),
        mean((of.p * near).sum(-1), live),
        mean(evenness, live),
    )


# ---- failures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of :func:`failures`; the defaults are this package's, from no paper.

    Attributes:
        diffuse: a row's entropy, over ln n, with n visible keys.
        concentrated: a key's share of a sentence's weight, of three keys and rows or more.
        stuck: number of consecutive rows, not diffuse, with the largest weight at the same key.
        drift: the mean distance from the diagonal in the last third of the rows less that in the
            first third, over n.
        skipped: a key's coverage, over m / n; below it the key is skipped.
        sentence: the share of diffuse or saturated rows, or of skipped keys, from which a sentence
            is flagged.
        saturated: the largest weight's share of a row, of two visible keys or more.
        alike: the largest total variation distance between rows that count as alike.
        crossing: the share of a sentence's pairs of rows whose largest weights cross.

    Example:
        >>> from attnfast.analysis.diagnostics import Thresholds, failures
        >>> weights = torch.eye(4)[[0, 0, 0, 3]].unsqueeze(0)  # three rows attend to the first key
        >>> [failures(weights, thresholds=Thresholds(stuck=n)).stuck.any().item() for n in (3, 4)]
        [True, False]
    """

    diffuse: float = 0.9
    concentrated: float = 0.5
    stuck: int = 4
    drift: float = 0.25
    skipped: float = 0.1
    sentence: float = 0.5
    saturated: float = 0.9
    alike: float = 0.1
    crossing: float = 0.25

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "stuck":
                check_int("stuck", self.stuck, 2)
            else:
                check_number(field.name, getattr(self, field.name), 0, 1)


class Failures(NamedTuple):
    """Boolean flags of failed rows, keys and sentences.

    Attributes:
        diffuse: rows with nearly uniform weights, ``[B, (H,) Tq]``.
        stuck: rows of a run that attends to one key, ``[B, (H,) Tq]``.
        concentrated: keys with most of a sentence's weight, ``[B, (H,) Tk]``.
        skipped: keys that no row attends to, ``[B, (H,) Tk]``.
        saturated: rows with almost all of their weight at one key, ``[B, (H,) Tq]``.
        block: rows of a run that attends to the same group of keys, ``[B, (H,) Tq]``.
        sentences: flags ``[B, (H)]`` by the names that :func:`failures` lists.

    Example:
        >>> from attnfast.analysis.diagnostics import failures
        >>> found = failures(torch.full((1, 4, 4), 0.25))
        >>> found.diffuse
        tensor([[True, True, True, True]])
        >>> [name for name, flags in found.sentences.items() if flags.any()]
        ['diffuse']
    """

    diffuse: Tensor
    stuck: Tensor
    concentrated: Tensor
    skipped: Tensor
    saturated: Tensor
    block: Tensor
    sentences: dict[str, Tensor]


def failures(
    weights: Tensor,
    lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    thresholds: Thresholds | None = None,
    key_indices: Tensor | None = None,
) -> Failures:
    """Detect known failures of attention.

    ================  ===========================================================================
    diffuse           a row's weights are nearly uniform; a sentence has many such rows
    concentrated      one key has most of a sentence's weight, independently of the row
    stuck             many consecutive rows attend to the same key: a word that repeats
    drifting          a sentence's rows move away from the diagonal towards its end
    skipped           no row attends to a key; a sentence has many such keys
    saturated         a row has almost all of its weight at one key, and a gradient near 0; a
                      sentence has many such rows
    striped           all rows of a sentence are alike, and not diffuse: vertical stripes
    block             many consecutive rows are alike, and each attends to several keys
    crossing          the largest weights of many pairs of rows are in the reverse order
    ================  ===========================================================================

    Args:
        thresholds: the limits of each failure; None means the defaults of :class:`Thresholds`.

    A flag is not a proof: word order that differs between languages leaves the diagonal, and a word
    with several translations is attended to several times.

    Example:
        >>> from attnfast.analysis.diagnostics import failures
        >>> weights = torch.eye(5)[[0, 1, 1, 1, 1]].unsqueeze(0)  # four rows attend to one key
        >>> found = failures(weights)
        >>> found.stuck
        tensor([[False,  True,  True,  True,  True]])
        >>> found.skipped
        tensor([[False, False,  True,  True,  True]])
    """
    limit = Thresholds() if thresholds is None else thresholds
    if not isinstance(limit, Thresholds):
        raise_type_error("thresholds", "attnfast.analysis.diagnostics.Thresholds", describe(limit))
    of = _Given(weights, lengths, target_lengths, key_indices)
    dtype, live = of.weights.dtype, of.weights.sum(-1) > 0
    n, m = of.each(of.n).to(dtype), of.each(of.m).to(dtype)
    several_seen = of.seen.sum(-1) > 1
    diffuse = (
        live & several_seen & (of.evenness() >= limit.diffuse - 1e-5)
    )  # tolerance for rounding

    most, position = of.largest()
    share = most / of.weights.sum(-1).masked_fill(~live, 1)
    saturated = live & several_seen & (share >= limit.saturated)
    sharp = live & several_seen & ~diffuse
    stuck = _runs(position.masked_fill(~sharp, -1), limit.stuck) & sharp

    total, exists = of.coverage(), of.keys_exist()
    several = ((n > 2) & (m > 2)).unsqueeze(-1)
    concentrated = (_shares(total) >= limit.concentrated) & exists & several
    asked = (m / n.clamp_min(1)).unsqueeze(-1)
    skipped = exists & (total < limit.skipped * asked) & (m > 0).unsqueeze(-1)

    j = of.key_indices.to(dtype)
    apart = ((of.p * j).sum(-1) - of.diagonal()).abs().masked_fill(~live, 0)
    i = torch.arange(apart.shape[-1], device=apart.device)
    third = (of.each(of.m, 1) + 2) // 3
    first, last = (i < third) & live, (i >= of.each(of.m, 1) - third) & of.rows & live
    near, far = ((apart * x).sum(-1) / x.sum(-1).clamp_min(1) for x in (first, last))

    rows = to_dense(of.p, of._all_keys(), of.Tk)
    count = live.sum(-1, dtype=dtype)
    average = rows.sum(-2, keepdim=True) / count.clamp_min(1)[..., None, None]
    far_from_average = _distance(rows, average).masked_fill(~live, 0).sum(-1)
    long = (n > 2) & (m > 2)
    striped = long & sharp.any(-1) & (far_from_average <= limit.alike * count)
    changes = torch.ones_like(live)
    changes[..., 1:] = _distance(rows[..., 1:, :], rows[..., :-1, :]) > limit.alike
    broad = sharp & (share < 0.5)
    block = _runs(changes.cumsum(-1).masked_fill(~broad, -1), limit.stuck) & broad
    place = position.to(dtype).masked_fill(~live, math.nan)
    crossed = place.unsqueeze(-1) > place.unsqueeze(-2)  # [.., i, k]
    crossings = crossed.triu(1).sum((-2, -1))
    pairs = count * (count - 1) / 2

    return Failures(
        diffuse,
        stuck,
        concentrated,
        skipped,
        saturated,
        block,
        {
            "diffuse": (diffuse.sum(-1) >= limit.sentence * m) & diffuse.any(-1),
            "concentrated": concentrated.any(-1),
            "stuck": stuck.any(-1),
            "drifting": (far - near >= limit.drift * n) & (m > 2) & (n > 2),
            "skipped": (skipped.sum(-1) >= limit.sentence * n) & skipped.any(-1),
            "saturated": (saturated.sum(-1) >= limit.sentence * m) & saturated.any(-1),
            "striped": striped,
            "block": block.any(-1) & ~striped,
            "crossing": long & (crossings >= limit.crossing * pairs),
        },
    )


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the total variation distance of rows."""
    return (x - y).abs().sum(-1) / 2


def _runs(x: Tensor, least: int) -> Tensor:
    """Return the mask of elements of ``x [.., T]`` in runs of ``least`` or more equal elements."""
    T = x.shape[-1]
    if least > T:
        return torch.zeros_like(x, dtype=torch.bool)
    windows = x.unfold(-1, least, 1)
    alike = (windows == windows[..., :1]).all(-1)  # of the windows that begin at each
    padded = torch.nn.functional.pad(alike, (least - 1, least - 1))
    return padded.unfold(-1, least, 1).any(-1)
