"""Compute attention by functions: these check arguments, run an operator and wrap its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from attnfast._utils.checks import (
    check_array,
    check_choice,
    check_flag,
    check_tensor,
    describe,
    is_finite,
    is_int,
    raise_value_error,
)
from attnfast.ops import attention, dispatch, lowering
from attnfast.ops.arguments import (
    apply_temperature,
    as_returned,
    autocast,
    autocast_call,
    check_activation,
    check_inputs,
    check_scale,
    check_terms,
    filled,
    fold_scale,
)
from attnfast.ops.attention import AttentionInputs
from attnfast.ops.backends import HALF, Triton, select_backend
from attnfast.ops.copying import COPYING, CopyInputs
from attnfast.ops.coverage import COVERAGE, CoverageInputs, CoverageOutputs, check_history
from attnfast.ops.lowering import SpanArguments
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.scores import SCORING, ScoreInputs
from attnfast.ops.span import check_form, check_span
from attnfast.outputs import (
    AttentionOutput,
    CoverageOutput,
    coverage_result,
)
from attnfast.spans import Position, Span, Spans

__all__ = [
    "additive_attention",
    "additive_score",
    "copy_distribution",
    "coverage_attention",
    "dot_attention",
]


def _attend(
    call: AttentionInputs,
    span: Spans,
    position: Position,
    sigma: float | Tensor | None,
    temperature: float,
    need_weights: bool | str,
    backend: str | None,
) -> AttentionOutput[Tensor | list[Tensor]]:
    """Check the arguments, choose a backend and run it, for both scores."""
    call = autocast_call(call)
    check_form(need_weights)
    need_weights = need_weights if isinstance(need_weights, str) else bool(need_weights)
    try:
        if call.scale is None:
            call = call._replace(scale=max(call.query.shape[-1], 1) ** -0.5)
        else:
            check_scale(call.scale, "a finite number or None")
        if call.bias is not None and not call.bias.is_floating_point():
            attention.check(call)  # integers are not accepted, and division would cast them
        scale, bias = apply_temperature(temperature, call.scale, call.bias)
        if scale is not call.scale:
            call = call._replace(scale=scale, bias=bias)
        query = call.query
        step = True if query.shape[-2] == 1 else False  # noqa: SIM210 (a constant for torch.compile)
        backend = select_backend(backend, query.device, query.dtype, step=step, score=call.score)
        if need_weights:
            call = call._replace(need_weights=True)
        if backend != "reference":
            call = fold_scale(call)
        if (
            span is None
            and position is None
            and sigma is None
            and not isinstance(need_weights, str)
        ):
            return dispatch.run_attention(call, backend)
        attention.check(call)
        check_span(query, call.key, span, position, sigma, need_weights)
        sigma = None if sigma is None else sigma * temperature**0.5
        within = SpanArguments(span, position, sigma)
        return lowering.run_within(within, call, need_weights, backend)
    except Exception:
        attention.check(call)
        raise


@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, score_vector: Tensor, *, activation: str = ...,
    lengths: Tensor | None = ..., mask: Tensor | None = ..., bias: Tensor | None = ...,
    span: Span | None = ..., position: Position = ..., sigma: float | Tensor | None = ...,
    temperature: float = ..., normalisation: str = ..., need_weights: bool | str = ...,
    need_statistics: bool = ..., backend: str | None = ...,
) -> AttentionOutput: ...  # fmt: skip


@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, score_vector: Tensor, *, activation: str = ...,
    lengths: Tensor | None = ..., mask: Tensor | None = ..., bias: Tensor | None = ...,
    span: Sequence[Span], position: Position = ..., sigma: float | Tensor | None = ...,
    temperature: float = ..., normalisation: str = ..., need_weights: bool | str = ...,
    need_statistics: bool = ..., backend: str | None = ...,
) -> AttentionOutput[Tensor | list[Tensor]]: ...  # fmt: skip


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_vector: Tensor,
    *,
    activation: str = "tanh",
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    span: Spans = None,
    position: Position = None,
    sigma: float | Tensor | None = None,
    temperature: float = 1.0,
    normalisation: str = "softmax",
    need_weights: bool | str = False,
    need_statistics: bool = False,
    backend: str | None = None,
) -> AttentionOutput[Tensor | list[Tensor]]:
    r"""Attend with Bahdanau's additive score.

    .. math:: e_{ij} = (\sum_a w_a \tanh(q_{ia} + k_{ja}) + b_{ij}) / T, \quad
              \alpha_i = \mathrm{softmax}_j(e_{ij}), \quad c_i = \sum_j \alpha_{ij} v_j

    ``query`` and ``key`` are the projected decoder states and encoder states. Luong's "concat"
    score is equivalent, with the weight matrix split in two. No tensor of size Tq·Tk·A is created,
    forward or backward.

    Args:
        query: ``[B, Tq, A]``, or ``[B, H, Tq, A]`` with heads; float32, float64, bfloat16 or
            float16. Half precision accumulates in float32.
        key: ``[B, Tk, A]`` (or with heads), with the query's dtype and device, like ``value``.
        value: ``[B, Tk, Dv]`` (or with heads).
        score_vector: ``[A]``; with heads also ``[H, A]``.
        activation: ``"tanh"``, or ``"relu"``, max(0, x), or ``"leaky_relu"``, GATv2's
            max(0.2 x, x) (Brody, Alon and Yahav, ICLR 2022, arXiv:2105.14491).
        lengths: ``[B]``, int64 or int32: keys at ``lengths[b]`` and beyond are hidden. On the
            CPU a length outside 0…Tk raises; on a GPU it is clamped, because checking would
            synchronize.
        mask: boolean, broadcastable to the scores ``[B, Tq, Tk]`` (1 for a size); True where a key
            may be attended to.
        bias: added to the score, shaped like ``mask``, differentiable; of the query's dtype, or
            float32 with half precision. −inf hides the key.
        span: the keys that a row may see, a :class:`attnfast.Span`: a window, a stride, or the
            keys up to the row's position. Memory and CPU time are proportional to the number of
            visible keys; on a GPU time also is, if consecutive rows see nearby keys. With heads, a
            list of one span per head is also accepted.
        position: the positions of the rows among the keys, for the span and sigma: see
            :class:`attnfast.Span`. A floating-point tensor gets its gradient through sigma.
        sigma: standard deviation, in keys, of a Gaussian prior around that position, which adds
            −(j − p_i)² / 2σ² to the score; a positive number, or a tensor with the shapes of
            ``position``, differentiable.
        temperature: T > 0 divides score, bias and prior.
        normalisation: how scores become weights: ``"softmax"``; ``"sparsemax"``, the Euclidean
            projection of the scores onto the simplex (Martins and Astudillo, ICML 2016,
            arXiv:1602.02068); or the smoother ``"entmax15"``,
            :math:`\alpha_{ij} = \max(0, e_{ij} / 2 - \tau_i)^2` (Peters, Niculae and Martins, ACL
            2019, arXiv:1905.05702). Both give many keys a weight of exactly 0, which the CPU's
            backward skips.
        need_weights: return the weights; otherwise they are None. With a span they may be compact,
            with a column for each key that a row sees (see :class:`attnfast.Span`); ``"dense"``
            spreads them over all keys, ``"sparse"`` makes a ``torch.sparse_coo`` tensor.
        need_statistics: return :class:`attnfast.RowStatistics`: every row's entropy, largest
            weight and its key, expected key and variance, computed in the same pass. Statistics
            need no stored weights; a call with gradients stores them in any case.
        backend: None for the fastest that can run, or ``"cpu"``, ``"triton"``, ``"cuda"``,
            ``"reference"``.

    Returns:
        ``context [B, Tq, Dv]`` and ``weights [B, Tq, Tk]`` or None, in the query's dtype: an
        :class:`attnfast.AttentionOutput`, whose attribute ``log_sum_exp [B, Tq]`` is
        log Σ_j exp(e_ij), float32 (float64 for float64), or None if the normalisation is not
        softmax, and whose ``statistics`` are those of ``need_statistics``, in that dtype, or None.
        With a list of spans the weights are a list too, one ``[B, Tq, W]`` for each head. A row
        that may see no key has context 0, weights 0, log-sum-exp −inf, statistics 0 and gradients
        0. With heads the context has the query's memory layout, as in
        ``scaled_dot_product_attention``: for a query transposed from ``[B, Tq, H, A]`` the context
        can be transposed back without a copy.

    For all finite q and k, each tanh has an absolute error of at most 4e-7 (float64: a few ulp), so
    that the error of a score is at most 4e-7·Σ|w| plus the rounding of its sum: about the error of
    eager float32 code. If all queries and keys of a block are near 0, max|q| + max|k| ≤ 0.8, each
    tanh is accurate to a few ulp, and so is the gradient of the score vector.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: the requested backend cannot run this call; or a second derivative is
            requested from a backend other than ``"reference"``.

    Paper: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", ICLR 2015, arXiv:1409.0473.

    Example:
        >>> query, key, value = torch.randn(2, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 6)
        >>> lengths = torch.tensor([5, 3])
        >>> context, weights = attnfast.additive_attention(
        ...     query, key, value, torch.randn(8), lengths=lengths, need_weights=True
        ... )
        >>> context.shape, weights.shape
        (torch.Size([2, 4, 6]), torch.Size([2, 4, 5]))
        >>> weights[1, :, 3:].sum().item()  # beyond the length
        0.0
    """
    check_tensor("score_vector", score_vector)
    call = AttentionInputs(
        query, key, value, score_vector, bias, mask, lengths, score=check_activation(activation),
        normalisation=normalisation, need_statistics=check_flag("need_statistics", need_statistics),
    )  # fmt: skip
    return _attend(call, span, position, sigma, temperature, need_weights, backend)


@overload
def dot_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = ...,
    lengths: Tensor | None = ..., mask: Tensor | None = ..., bias: Tensor | None = ...,
    span: Span | None = ..., position: Position = ..., sigma: float | Tensor | None = ...,
    temperature: float = ..., normalisation: str = ..., need_weights: bool | str = ...,
    need_statistics: bool = ..., backend: str | None = ...,
) -> AttentionOutput: ...  # fmt: skip


@overload
def dot_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = ...,
    lengths: Tensor | None = ..., mask: Tensor | None = ..., bias: Tensor | None = ...,
    span: Sequence[Span], position: Position = ..., sigma: float | Tensor | None = ...,
    temperature: float = ..., normalisation: str = ..., need_weights: bool | str = ...,
    need_statistics: bool = ..., backend: str | None = ...,
) -> AttentionOutput[Tensor | list[Tensor]]: ...  # fmt: skip


def dot_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    span: Spans = None,
    position: Position = None,
    sigma: float | Tensor | None = None,
    temperature: float = 1.0,
    normalisation: str = "softmax",
    need_weights: bool | str = False,
    need_statistics: bool = False,
    backend: str | None = None,
) -> AttentionOutput[Tensor | list[Tensor]]:
    r"""Attend with the dot-product score.

    .. math:: e_{ij} = (s\, q_i \cdot k_j + b_{ij}) / T, \quad
              \alpha_i = \mathrm{softmax}_j(e_{ij}), \quad c_i = \sum_j \alpha_{ij} v_j

    Luong's "general" score is this score with projected keys, his "dot" score is this score with
    ``scale=1``.

    Args:
        query, key, value: ``[B, (H,) Tq, A]``, ``[B, (H,) Tk, A]`` and ``[B, (H,) Tk, Dv]``.
        scale: s; None means 1/√A, as in ``scaled_dot_product_attention``.
        lengths: ``[B]``, the number of keys of each sequence.
        mask: boolean, True where a key may be attended to.
        bias: b, added to the score.
        span, position, sigma: the keys that a row may see, the rows' positions among the keys, and
            the standard deviation of a Gaussian prior around them.
        temperature: T > 0.
        normalisation: ``"softmax"``, ``"sparsemax"`` or ``"entmax15"``.
        need_weights, need_statistics: return weights, or :class:`attnfast.RowStatistics`.
        backend: None for the fastest that can run, or its name.

    Shapes and dtypes of the arguments, the results and the errors are those of
    :func:`additive_attention`.

    Papers: Luong, Pham and Manning, "Effective Approaches to Attention-based Neural Machine
    Translation", EMNLP 2015, arXiv:1508.04025; Vaswani et al., "Attention Is All You Need",
    NeurIPS 2017, arXiv:1706.03762.

    Example:
        >>> query, key, value = torch.randn(2, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 6)
        >>> context, _ = attnfast.dot_attention(query, key, value, span=attnfast.Span(window=1))
        >>> context.shape
        torch.Size([2, 4, 6])
    """
    call = AttentionInputs(
        query, key, value, None, bias, mask, lengths, scale=scale,  # type: ignore[arg-type]
        normalisation=normalisation, need_statistics=check_flag("need_statistics", need_statistics),
    )  # fmt: skip
    return _attend(call, span, position, sigma, temperature, need_weights, backend)


def _with_coverage_feature(
    filters: Tensor | None, projection: Tensor | None, coverage_weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return filters and projection with the coverage feature appended as a filter of width 1."""
    if coverage_weight is None:
        return filters, projection
    column = coverage_weight.unsqueeze(-1)
    width = 1 if filters is None else filters.shape[-1]
    one = column.new_zeros(*column.shape[:-2], 1, 2, width)
    one[..., 1, width // 2] = 1
    if filters is None or projection is None:
        return one, column
    if filters.shape[-2] == 1:  # on the last weights alone
        filters = torch.nn.functional.pad(filters, (0, 0, 0, 1))
    heads = max(filters.shape[:-3], column.shape[:-2], key=len)  # the shape of one with heads
    return (
        torch.cat([x.expand(*heads, *x.shape[-3:]) for x in (filters, one)], -3),
        torch.cat([x.expand(*heads, *x.shape[-2:]) for x in (projection, column)], -1),
    )


def additive_score(
    query: Tensor,
    key: Tensor,
    score_vector: Tensor,
    *,
    activation: str = "tanh",
    backend: str | None = None,
) -> Tensor:
    r"""Compute the additive scores alone, :math:`e_{ij} = w^\top \tanh(q_i + k_j)`, for all pairs.

    For weights that no attention function computes, such as those of a pointer network's clipped
    scores. Only the scores are stored, never the features ``[B, Tq, Tk, A]``. Mask the scores of
    padding afterwards.

    Args:
        query: ``[B, Tq, A]`` or ``[B, H, Tq, A]``: float32, float64, bfloat16 or float16.
        key: ``[B, (H,) Tk, A]``, in the query's dtype.
        score_vector: w, ``[A]`` or, with heads, ``[H, A]``.
        activation, backend: as in :func:`attnfast.additive_attention`.

    Returns:
        The scores, ``[B, (H,) Tq, Tk]``: float64 for float64, otherwise float32.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: the requested backend cannot run this call; or a second derivative is
            requested from a backend other than ``"reference"``.

    Papers: Bahdanau, Cho and Bengio, ICLR 2015, arXiv:1409.0473; Chorowski et al., NeurIPS 2015,
    arXiv:1506.07503, section 2.3, for sigmoids over their sum; Bello et al., arXiv:1611.09940, for
    clipped scores, :math:`C \tanh e_{ij}`.

    Example:
        >>> query, key = torch.randn(2, 4, 8), torch.randn(2, 5, 8)
        >>> gates = attnfast.additive_score(query, key, torch.randn(8)).sigmoid()
        >>> weights = gates / gates.sum(-1, keepdim=True)
        >>> (weights @ key).shape
        torch.Size([2, 4, 8])
    """
    check_tensor("query", query)
    check_tensor("score_vector", score_vector)
    query, key, score_vector = autocast(query, key, score_vector)
    call = ScoreInputs(query, key, score_vector, check_activation(activation))
    backend = select_backend(backend, query.device, query.dtype, SCORING.name, score=call.score)
    return dispatch.run(SCORING, call, backend).scores


def coverage_call(
    call: CoverageInputs,
    temperature: float = 1.0,
    coverage_weight: Tensor | None = None,
    channels: str = "previous",
    log_previous: Tensor | None = None,
) -> CoverageInputs:
    """Check the arguments of :func:`coverage_attention`; return those of the operator.

    In ``call``, penalty and transition_prob may be numbers, inverse_fertility is a fertility,
    previous contains weights, and the scale may be None.
    """
    call = autocast_call(call)
    check_inputs(call)
    check_terms(call, call.key.shape[-2])
    query, scale = call.query, call.scale
    if scale is None:
        scale = 1.0 if call.score_vector is not None else max(query.shape[-1], 1) ** -0.5
    check_scale(scale, "a finite number or None")
    dtype = accumulation_dtype(query.dtype)
    if coverage_weight is not None:
        A, heads = query.shape[-1], query.shape[1:-2]
        shapes = ([A], [*heads, A]) if heads else ([A],)
        check_array(
            "coverage_weight",
            coverage_weight,
            "floating-point",
            *shapes,
            like=query,
            of="the query",
        )

    def cast(name: str, x: Any) -> Any:
        """Return x in the accumulation dtype; parameters may have another dtype."""
        if not isinstance(x, Tensor) or x.dtype == dtype:
            return x
        check_array(name, x, "floating-point")
        return x.to(dtype)

    filters, projection = cast("filters", call.filters), cast("projection", call.projection)
    if filters is not None or projection is not None:
        plain = CoverageInputs(query, call.key, call.value, call.score_vector, score=call.score)
        check_history(plain._replace(filters=filters, projection=projection))
    check_choice("channels", channels, ("previous", "coverage"))
    if channels == "coverage" and filters is not None and filters.shape[-2] == 1:
        filters = torch.nn.functional.pad(filters, (0, 0, 1, 0))  # the second channel
    filters, projection = _with_coverage_feature(
        filters, projection, cast("coverage_weight", coverage_weight)
    )

    def number(name: str, x: Any, shape: Sequence[int]) -> Any:
        if x is None or isinstance(x, Tensor):
            x = cast(name, x)
            return x if x is None or x.dim() else x.expand(shape)
        if not is_finite(x) or abs(x) > torch.finfo(dtype).max:
            raise_value_error(name, "a finite number or a tensor", describe(x))
        return filled(query, shape, float(x), dtype)  # an integer may be too large for torch

    penalty = number("penalty", call.penalty, (1,))
    transition_prob = number("transition_prob", call.transition_prob, query.shape[:-1])
    if isinstance(call.transition_prob, (int, float)) and not 0 <= call.transition_prob <= 1:
        raise_value_error("transition_prob", "from 0 to 1", call.transition_prob)
    previous, log_previous = (
        cast(name, x) for name, x in (("previous", call.previous), ("log_previous", log_previous))
    )
    previous = _previous_of(previous, log_previous, transition_prob is not None)
    inverse = call.inverse_fertility
    if isinstance(inverse, Tensor):
        check_tensor("fertility", inverse)
        inverse = 1 / cast("fertility", inverse)
    scale, bias, penalty = apply_temperature(temperature, scale, call.bias, penalty)
    call = call._replace(
        bias=bias,
        filters=filters,
        projection=projection,
        penalty=penalty,
        inverse_fertility=inverse,
        transition_prob=transition_prob,
        coverage=cast("coverage", call.coverage),
        previous=previous,
        scale=scale,
    )
    call = fold_scale(call)
    check_history(call, "previous" if log_previous is None else "log_previous")
    return call


def logarithm(weights: Tensor) -> Tensor:
    """Return log α, −inf for 0; the gradient is 0 where 1/α approaches the limit of the dtype."""
    small = weights < torch.finfo(weights.dtype).tiny * 1e6
    return torch.where(small, weights.detach().log(), weights.masked_fill(small, 1).log())


def _previous_of(previous: Any, log_previous: Any, transition: bool) -> Any:
    """Return the operator's ``previous``: log-weights with a transition, otherwise weights."""
    if log_previous is not None and previous is not None:
        raise_value_error("log_previous", "None with previous", describe(log_previous))
    if not transition:
        if log_previous is not None:
            raise_value_error(
                "log_previous", "None without a transition_prob", describe(log_previous)
            )
        return previous
    if log_previous is None and previous is None:
        raise_value_error(
            "previous", "given with a transition_prob: the weights that it starts from", None
        )
    if previous is None:
        return log_previous
    check_array("previous", previous, "floating-point")
    return logarithm(previous)


def filters_of(call: CoverageInputs) -> int:
    """Return the number of filters of a call; while compiling, 0 unless it exceeds Triton's limit.

    In a compiled graph the chosen backend is a constant, and so must be this value.
    """
    count = 0 if call.filters is None else call.filters.shape[-3]
    if torch.compiler.is_compiling():
        return Triton.most_filters + 1 if count > Triton.most_filters else 0
    return count


def run_coverage(
    call: CoverageInputs,
    temperature: float,
    coverage_weight: Tensor | None,
    channels: str,
    log_previous: Tensor | None,
    need_weights: bool,
    backend: str | None,
) -> CoverageOutput:
    """Choose a backend and run a call with the arguments of :func:`coverage_call`."""
    check_flag("need_weights", need_weights)
    call = coverage_call(call, temperature, coverage_weight, channels, log_previous)
    query = call.query
    properties = (backend, query.device, query.dtype, COVERAGE.name)
    step = True if query.shape[-2] == 1 else False  # noqa: SIM210 (as above)
    backend = select_backend(*properties, step, filters_of(call), call.score)
    return coverage_output(dispatch.run(COVERAGE, call, backend), call, need_weights)


def coverage_output(
    outputs: CoverageOutputs, call: CoverageInputs, need_weights: bool
) -> CoverageOutput:
    """Return the public result of the operator's outputs."""
    weights = as_returned(outputs.weights, call.query.dtype, need_weights)
    log_weights = None if call.transition_prob is None else outputs.log_weights
    return coverage_result(outputs.context, weights, outputs.coverage, outputs.loss, log_weights)


def coverage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_vector: Tensor | None = None,
    *,
    penalty: float | Tensor | None = None,
    coverage_weight: Tensor | None = None,
    filters: Tensor | None = None,
    channels: str = "previous",
    projection: Tensor | None = None,
    fertility: Tensor | None = None,
    transition_prob: float | Tensor | None = None,
    coverage: Tensor | None = None,
    previous: Tensor | None = None,
    log_previous: Tensor | None = None,
    activation: str = "tanh",
    scale: float | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    normalisation: str = "softmax",
    need_weights: bool = False,
    backend: str | None = None,
) -> CoverageOutput:
    r"""Attend row after row; each row's scores depend on the weights of the rows before it.

    .. math:: e_{tj} = (s \cdot \mathrm{score}(q_t, k_j + f_{tj}) + b_{tj} - \lambda C_{tj}) / T,
              \quad \alpha_t = \mathrm{softmax}_j(e_{tj}), \quad
              C_{t+1,j} = C_{tj} + \alpha_{tj} / \phi_j

    All queries may be given at once, or one after the other with ``coverage`` and ``previous``
    passed from call to call; the results are equal, except in half precision for the rounding of
    the weights passed on. Memory is linear in Tq·Tk.

    Args:
        query, key, value: as in :func:`attnfast.additive_attention`.
        score_vector: of the additive score, ``[A]`` or, with heads, ``[H, A]``; None for the dot
            score.
        penalty: λ, multiplies the coverage that is subtracted from the score: a number, or a
            tensor, a scalar or ``[H]``, differentiable.
        coverage_weight: w of the coverage feature :math:`f_{tj} = w C_{tj}`, ``[A]`` or ``[H, A]``.
        filters: of location features, :math:`f_{tj} = U (F * [\alpha_{t-1}, C_t])_j`, with an odd
            number of taps and zeros past the ends: ``[K, 1, taps]`` on the last row's weights or
            ``[K, 2, taps]`` on these and the coverage; with heads also ``[H, K, 2, taps]``.
        channels: the input of filters with one channel, ``"previous"`` or ``"coverage"``.
        projection: U of the location features, ``[A, K]`` or ``[H, A, K]``.
        fertility: φ > 0, the expected sum of a key's attention weights, ``[B, Tk]`` (or with
            heads); None means 1.
        transition_prob: u of forward attention, which multiplies exp(e) by
            :math:`(1 - u_t) \alpha_{t-1,j} + u_t \alpha_{t-1,j-1}`: a number from 0 to 1 (0.5
            without a transition agent) or ``[B, Tq]``, where values outside that range give NaN.
            ``previous`` is then required as the initial alignment. The recursion is computed from
            logarithms, so that no weight underflows; a weight that is exactly 0 gets gradient 0.
        coverage: C before the first row, ``[B, Tk]``, float32 (float64 for float64); None means 0.
        previous: the weights of the row before the first, ``[B, Tk]``; None means 0.
        log_previous: with a transition, the logarithms of ``previous``, −inf for 0, instead of it:
            the last row of the result's ``log_weights``. They do not underflow.
        activation: of the additive score, as in :func:`attnfast.additive_attention`.
        scale: s; None means 1 with a score vector and 1/√A without.
        normalisation: how scores become weights: ``"softmax"``, or ``"sigmoid"``, smoother,
            :math:`\alpha_{tj} = \sigma(e_{tj}) / \sum_i \sigma(e_{ti})`, not with a transition.
        lengths, mask, bias, temperature, need_weights, backend: as in
            :func:`attnfast.additive_attention`. A row whose mask is entirely False (padding of
            the target) does not contribute to coverage or loss.

    Returns:
        ``context [B, Tq, Dv]``; ``weights [B, Tq, Tk]`` or None; ``coverage [B, Tk]`` after the
        last row, float32 (float64 for float64): an :class:`attnfast.CoverageOutput`, whose
        attribute ``loss [B]`` is every sequence's coverage loss,
        :math:`\sum_{tj} \min(\alpha_{tj}, C_{tj})`, and whose ``log_weights [B, Tq, Tk]`` are log α
        with a transition, otherwise None. With heads, ``[B, H, …]`` throughout.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: the requested backend cannot run this call; or a second derivative is
            requested from a backend other than ``"reference"``.

    Papers: See, Liu and Manning, "Get To The Point: Summarization with Pointer-Generator Networks",
    ACL 2017, arXiv:1704.04368; Tu et al., "Modeling Coverage for Neural Machine Translation", ACL
    2016, arXiv:1601.04811; Chorowski et al., "Attention-Based Models for Speech Recognition",
    NeurIPS 2015, arXiv:1506.07503; Zhang, Ling and Dai, "Forward Attention in Sequence-to-Sequence
    Acoustic Modeling for Speech Synthesis", ICASSP 2018, arXiv:1807.06736.

    Example:
        >>> query, key, score_vector = torch.randn(2, 4, 8), torch.randn(2, 5, 8), torch.randn(8)
        >>> context, weights, coverage = attnfast.coverage_attention(
        ...     query, key, key, score_vector, coverage=torch.zeros(2, 5), penalty=1.0,
        ...     need_weights=True,
        ... )
        >>> torch.allclose(coverage, weights.sum(1))  # of all rows
        True
    """
    score = "dot" if score_vector is None else check_activation(activation)
    call = CoverageInputs(
        query, key, value, score_vector, bias, mask, lengths, filters, projection,
        penalty, fertility, transition_prob, coverage, previous, scale, score,  # type: ignore[arg-type]
        normalisation,
    )  # fmt: skip
    return run_coverage(
        call, temperature, coverage_weight, channels, log_previous, need_weights, backend
    )


def copy_distribution(
    logits: Tensor,
    weights: Tensor,
    source: Tensor,
    gate: Tensor,
    *,
    num_oov: int = 0,
    log: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Mix the distribution over the vocabulary with a distribution that copies source words.

    .. math:: P_{tw} = p_t \, \mathrm{softmax}(\ell_t)_w
              + (1 - p_t) \sum_{i:\, s_i = w} \alpha_{ti}, \quad p_t = \sigma(g_t)

    Out-of-vocabulary words have ids from V on, assigned separately for each source. No tensor
    larger than the result is created, forward or backward, and the result does not depend on the
    order in which threads run.

    Args:
        logits: ℓ ``[B, Tq, V]``, or log-probabilities; −inf for a word that may not be generated.
            float32, float64, bfloat16 or float16; half precision accumulates in float32.
        weights: α ``[B, Tq, Tk]``, of the logits' dtype, each row with sum 1 (or 0).
        source: s ``[B, Tk]``, int64 or int32, the word id at every key, 0 ≤ s < V + X, also where
            the weights are 0.
        gate: g ``[B, Tq]``, the logit of p_gen, of the logits' dtype.
        num_oov: X, the number of out-of-vocabulary words in the sources of the batch.
        log: return log P, computed from logarithms, accurate also where p or P is near 0 or 1.
        backend: as in :func:`attnfast.additive_attention`.

    Returns:
        ``[B, Tq, V + X]``, of the logits' dtype; float32 for half precision under autocast. An
        impossible word has P = 0, and −87.3 as its logarithm, with gradient 0, instead of −inf. (A
        very improbable word may have less.) In log space a word's weights below e^−80 are treated
        as 0, and the gradient of a weight, (1 − p) / P times that of the result, is limited to e^80
        (float16, bfloat16: 65504).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it. On a GPU
            the ids of the source are not checked, because checking would synchronize; an id out of
            range is not copied.
        RuntimeError: the requested backend cannot run this call; or a second derivative is
            requested from a backend other than ``"reference"``.

    Papers: See, Liu and Manning, "Get To The Point: Summarization with Pointer-Generator Networks",
    ACL 2017, arXiv:1704.04368; Gu et al., "Incorporating Copying Mechanism in Sequence-to-Sequence
    Learning", ACL 2016, arXiv:1603.06393.

    Example:
        >>> logits, weights = torch.randn(2, 3, 10), torch.full((2, 3, 4), 0.25)
        >>> source = torch.tensor([[5, 6, 7, 10], [4, 4, 9, 8]])  # 10 is out of the vocabulary
        >>> gate = torch.zeros(2, 3)
        >>> p = attnfast.copy_distribution(logits, weights, source, gate, num_oov=1)
        >>> p.shape, torch.allclose(p.sum(-1), torch.ones(2, 3))
        (torch.Size([2, 3, 11]), True)
    """
    check_tensor("logits", logits)
    device = logits.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        logits, weights, gate = (
            x.float() if isinstance(x, Tensor) and x.dtype in HALF else x
            for x in (logits, weights, gate)
        )
    whole = is_int(num_oov) or isinstance(num_oov, torch.SymInt)
    if not whole or num_oov >= 2**31:
        raise_value_error("num_oov", "an integer, at least 0", describe(num_oov))
    check_flag("log", log)
    call = CopyInputs(logits, weights, source, gate, num_oov, bool(log))
    backend = select_backend(backend, logits.device, logits.dtype, COPYING.name)
    return dispatch.run(COPYING, call, backend).distribution
