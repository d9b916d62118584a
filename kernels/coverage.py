"""Attention with a history in Triton: one program scans the rows of a sequence and head.

Without features the kernel of attention computes the scores of all rows at once, and the scan is a
softmax for each row. With features the scan computes a row's scores: the filters' outputs around a
key are projected and added inside the activation. The state, coverage and last weights, stays in
the multiprocessor's cache. The backward loops over the rows from the last to the first; its sums
over rows are in memory private to a program, which adds to them atomically, in the loops' order,
because several threads may hold one element.

Names: as in :mod:`attnfast.kernels.attention`; ``f`` is a filter, ``x`` a key under a filter's tap.
``features`` are query, key, score vector, filters and projection, None without filters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attnfast.kernels import attention
from attnfast.kernels.attention import (
    LAUNCH_OPTIONS,
    LENGTHS,
    _activation,
    _block,
    _head,
    _heads,
    _multiply,
    _pair,
    _scalar,
    _seen_keys,
    _strided,
)

from attnfast._utils.checks import raise_value_error
from attnfast.ops.attention import AttentionBackward, AttentionInputs
from attnfast.ops.backends import Triton
from attnfast.ops.coverage import (
    SUMS,
    CoverageBackward,
    CoverageGradients,
    CoverageInputs,
    CoverageOutputs,
    without_sums,
)
from attnfast.ops.operators import accumulation_dtype, empty_rows

MAX_EXPONENT = tl.constexpr(87.0)  # of an exponent; only terms that are multiplied by 0 exceed it


@triton.jit
def _features_of(features, i_b, i_h):
    """Return pointers to the features' inputs of a sequence and head, each with its strides."""
    query, key, weight, filters, projection = features
    return (
        (_head(query, i_b, i_h), query[1]),
        (_head(key, i_b, i_h), key[1]),
        (weight[0] + i_h * weight[1][0], weight[1][1]),
        filters[0] + i_h * filters[1],
        projection[0] + i_h * projection[1],
    )


@triton.jit
def _find(
    p_filters, p_last, p_coverage, o_k, Tk, K, taps,
    C: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """Return the filters' features of keys, [BK, BF], with zeros past the ends."""
    o_f = tl.arange(0, BF)
    b_found = tl.zeros([BK, BF], acc)
    for w in range(taps):
        o_x = o_k + w - taps // 2
        m_x = (o_x >= 0) & (o_x < Tk)
        p_f = p_filters + o_f * (C * taps) + w
        # [BK] and [BF]
        b_x = tl.load(p_last + o_x, mask=m_x, other=0)
        b_found += b_x[:, None] * tl.load(p_f, mask=o_f < K, other=0)[None, :]
        if C == 2:
            b_x = tl.load(p_coverage + o_x, mask=m_x, other=0)
            b_found += b_x[:, None] * tl.load(p_f + taps, mask=o_f < K, other=0)[None, :]
    return b_found


@triton.jit
def _features(
    features, t, b_found, o_k, o_a, m_k, A, K, BF: tl.constexpr, acc: tl.constexpr
):  # fmt: skip
    """q + k + U f of BA features, [BK, BA], and U, [BF, BA]; ``features`` are of a head."""
    p_q, s_q = features[0]
    p_k, s_k = features[1]
    p_projection = features[4]
    o_f = tl.arange(0, BF)
    m_a = o_a < A
    p_u = p_projection + o_a[None, :] * K + o_f[:, None]
    b_u = tl.load(p_u, mask=m_a[None, :] & (o_f < K)[:, None], other=0)
    p_q += tl.cast(t, tl.int64) * s_q[2]
    b_q = tl.load(p_q + o_a.to(tl.int64) * s_q[3], mask=m_a, other=0).to(acc)
    p_ka = (p_k + o_k.to(tl.int64) * s_k[2])[:, None] + o_a.to(tl.int64)[None, :] * s_k[3]
    b_k = tl.load(p_ka, mask=m_k[:, None] & m_a[None, :], other=0).to(acc)
    if BF == 1:
        b_f = b_found * b_u
    else:
        b_f = tl.dot(b_found, b_u, input_precision="ieee", out_dtype=acc)
    return b_q[None, :] + b_k + b_f, b_u


@triton.jit
def _log(u):
    """Return log u, −inf for u = 0."""
    return tl.where(u == 0, -float("inf"), tl.log(tl.where(u == 0, 1, u)))


@triton.jit
def _transition(p_past, o_k, m_k, u):
    """Return p_j, p_j−1, r_j = (1 − u) p_j + u p_j−1, divided by r's larger term; and log r_j."""
    b_here = tl.load(p_past + o_k, mask=m_k, other=-float("inf"))
    b_before = tl.load(p_past + o_k - 1, mask=m_k & (o_k > 0), other=-float("inf"))
    b_stay, b_move = b_here + _log(1 - u), b_before + _log(u)
    b_top = tl.where(b_stay > b_move, b_stay, b_move)
    b_none = b_top == -float("inf")
    b_top = tl.where(b_none, 0, b_top)
    b_here, b_before = b_here - b_top, b_before - b_top
    b_here = tl.exp(tl.where(b_here > MAX_EXPONENT, MAX_EXPONENT, b_here))
    b_before = tl.exp(tl.where(b_before > MAX_EXPONENT, MAX_EXPONENT, b_before))
    b_sum = tl.where(b_none, 1, (1 - u) * b_here + u * b_before)
    return b_here, b_before, b_sum, tl.where(b_none, -float("inf"), b_top + tl.log(b_sum))


@triton.jit
def _scores(
    features, bias, mask, p_last, p_coverage, i_b, i_h, t, o_k, m_k, scale, sizes,
    SCORE: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, BF: tl.constexpr,
    acc: tl.constexpr,
):  # fmt: skip
    """The scores of a row at keys, before penalty and transition, and the mask of visible keys."""
    Tk, A, K, taps = sizes[1:]
    p_weight, s_weight = features[2]
    b_found = _find(features[3], p_last, p_coverage, o_k, Tk, K, taps, C, BK, BF, acc)
    b_e = tl.zeros([BK], acc)
    for a in range(0, A, BA):
        o_a = a + tl.arange(0, BA)
        b_z, _ = _features(features, t, b_found, o_k, o_a, m_k, A, K, BF, acc)
        b_f, _ = _activation(b_z, SCORE)
        b_w = tl.load(p_weight + o_a * s_weight, mask=o_a < A, other=0).to(acc)
        b_e += tl.sum(b_w[None, :] * b_f, 1)
    b_e *= scale
    m_s = m_k
    o_s = o_k.to(tl.int64)
    if mask is not None:
        p_m = _head(mask, i_b, i_h) + o_s * mask[1][3] + tl.cast(t, tl.int64) * mask[1][2]
        m_s = tl.load(p_m, mask=m_k, other=0) != 0
    if bias is not None:
        p_b = _head(bias, i_b, i_h) + o_s * bias[1][3] + tl.cast(t, tl.int64) * bias[1][2]
        b_bias = tl.load(p_b, mask=m_k, other=0).to(acc)
        b_e += b_bias
        m_s = m_s & (b_bias != -float("inf"))
    return b_e, m_s


@triton.jit
def _softmax(
    b_lost, p_row, p_log_row, p_coverage, p_rate, top, n, Tk,
    LOG: tl.constexpr, BR: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """Turn a row's scores into weights, add them to the coverage, and its loss to ``b_lost``."""
    b_sum = tl.zeros([BR], acc)
    for j in range(0, n, BR):
        o_k = j + tl.arange(0, BR)
        b_sum += tl.exp(tl.load(p_row + o_k, mask=o_k < n, other=-float("inf")) - top)
    total = tl.sum(b_sum, 0)
    total = tl.where(total == 0, 1, total)
    inverse = 1 / total
    for j in range(0, Tk, BR):
        o_k = j + tl.arange(0, BR)
        m_k = o_k < n
        b_e = tl.load(p_row + o_k, mask=m_k, other=-float("inf")) - top
        b_p = tl.exp(b_e) * inverse
        if LOG:
            tl.store(p_log_row + o_k, b_e - tl.log(total), mask=o_k < Tk)
        b_c = tl.load(p_coverage + o_k, mask=m_k, other=0)
        b_lost += tl.where(b_p <= b_c, b_p, b_c)
        b_rate = 1.0
        if p_rate is not None:
            b_rate = tl.load(p_rate + o_k, mask=m_k, other=0)
        tl.store(p_coverage + o_k, b_c + b_rate * b_p, mask=m_k)
        tl.store(p_row + o_k, b_p, mask=o_k < Tk)
    return b_lost


@triton.jit(do_not_specialize=LENGTHS)
def _scan(
    features, bias, mask, p_lengths, penalty, p_rate, transition, p_sigmoid_sum, p_previous,
    p_weights, p_coverage, p_loss, scale, sizes, Tq, Tk, SCORE: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, BA: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Weights, coverage and loss. Without filters ``weights`` initially holds the scores.

    ``transition`` are its probabilities, the logarithms of ``previous``, and of the weights. With
    ``sigmoid_sum`` the softmax is of the logarithms of the scores' sigmoids, whose sum is stored.
    """
    acc: tl.constexpr = p_weights.dtype.element_ty
    H, A, K, taps = sizes
    sizes = (Tq, Tk, A, K, taps)
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    scale = _scalar(scale, acc)
    n = _seen_keys(p_lengths, i_b, Tk)
    p_coverage += i_bh * Tk
    p_previous += i_bh * Tk
    p_weights += i_bh * Tq * Tk
    if p_rate is not None:
        p_rate += i_bh * Tk
    if transition is not None:
        p_transition, p_log_previous, p_log_weights = transition
        p_log_previous += i_bh * Tk
        p_log_weights += i_bh * Tq * Tk
    if penalty is not None:
        p_penalty, s_penalty = penalty
        factor = tl.load(p_penalty + i_h * s_penalty)
    if features is not None:
        features = _features_of(features, i_b, i_h)
    b_lost = tl.zeros([BR], acc)
    for t in range(Tq):
        p_row = p_weights + tl.cast(t, tl.int64) * Tk
        if t == 0:
            p_last = p_previous
        else:
            p_last = p_row - Tk
        u = 0.0
        p_past = p_last
        p_log_row = p_row
        if transition is not None:
            u = tl.load(p_transition + i_bh * Tq + t)
            p_log_row = p_log_weights + tl.cast(t, tl.int64) * Tk
            if t == 0:
                p_past = p_log_previous
            else:
                p_past = p_log_row - Tk

        b_top = tl.full([BK], -float("inf"), acc)
        b_sigmoids = tl.zeros([BK], acc)
        for j in range(0, n, BK):
            o_k = j + tl.arange(0, BK)
            m_k = o_k < n
            # [BK]
            if features is not None:
                b_e, m_s = _scores(
                    features, bias, mask, p_last, p_coverage, i_b, i_h, t, o_k, m_k, scale, sizes,
                    SCORE, C, BK, BA, BF, acc,
                )  # fmt: skip
            else:
                b_e = tl.load(p_row + o_k, mask=m_k, other=-float("inf"))
                m_s = m_k & (b_e != -float("inf"))
            if penalty is not None:
                b_e -= factor * tl.load(p_coverage + o_k, mask=m_k, other=0)
            if transition is not None:
                _, _, _, b_log = _transition(p_past, o_k, m_k, u)
                b_e += b_log
            if p_sigmoid_sum is not None:
                b_e = tl.minimum(b_e, 0) - tl.log(1 + tl.exp(-tl.abs(b_e)))
                b_sigmoids += tl.where(m_s, tl.exp(b_e), 0)
            b_e = tl.where(m_s, b_e, -float("inf"))
            tl.store(p_row + o_k, b_e, mask=m_k)
            b_top = tl.maximum(b_top, b_e)
        top = tl.max(b_top, 0)
        top = tl.where(top == -float("inf"), 0, top)
        if p_sigmoid_sum is not None:
            tl.store(p_sigmoid_sum + i_bh * Tq + t, tl.sum(b_sigmoids, 0))
        tl.debug_barrier()
        LOG: tl.constexpr = transition is not None
        b_lost = _softmax(b_lost, p_row, p_log_row, p_coverage, p_rate, top, n, Tk, LOG, BR, acc)
        tl.debug_barrier()
    tl.store(p_loss + i_bh, tl.sum(b_lost, 0))


@triton.jit
def _store_coverages(p_before, p_first, rate, p_weights, Tq, Tk, BR: tl.constexpr):
    """Store the coverage before every row."""
    for j in range(0, Tk, BR):
        o_k = j + tl.arange(0, BR)
        m_k = o_k < Tk
        b_c = tl.load(p_first + o_k, mask=m_k, other=0)
        b_rate = tl.full([BR], 1, b_c.dtype)
        if rate is not None:
            b_rate = tl.load(rate[0] + o_k, mask=m_k, other=0)
        for t in range(Tq):
            o_row = tl.cast(t, tl.int64) * Tk + o_k
            tl.store(p_before + o_row, b_c, mask=m_k)
            b_c += b_rate * tl.load(p_weights + o_row, mask=m_k, other=0)


@triton.jit
def _weight_gradient(
    state, o_row, rate, logs, grad_loss, n, BR: tl.constexpr, acc: tl.constexpr
):  # fmt: skip
    """Complete g of a row; return Σ P g and the sum of the log-weights' gradients.

    ``state`` has pointers to g or ds, the weights and coverage of rows, and the gradients that rows
    pass on; ``logs`` to the log-weights before a row, those of rows, their gradient from outside,
    and that which rows pass on.
    """
    p_ds, p_p, p_c, p_dcoverage, p_dlast = state
    b_mean = tl.zeros([BR], acc)
    b_total = tl.zeros([BR], acc)
    for j in range(0, n, BR):
        o_k = j + tl.arange(0, BR)
        m_k = o_k < n
        # [BR]
        b_p = tl.load(p_p + o_row + o_k, mask=m_k, other=0)
        b_c = tl.load(p_c + o_row + o_k, mask=m_k, other=0)
        b_dc = tl.load(p_dcoverage + o_k, mask=m_k, other=0)
        b_g = tl.load(p_ds + o_row + o_k, mask=m_k, other=0)
        b_g += tl.load(p_dlast + o_k, mask=m_k, other=0)
        if rate is None:
            b_g += b_dc
        else:
            p_rate, p_drate = rate
            b_g += b_dc * tl.load(p_rate + o_k, mask=m_k, other=0)
            b_drate = tl.load(p_drate + o_k, mask=m_k, other=0) + b_dc * b_p
            tl.store(p_drate + o_k, b_drate, mask=m_k)
        b_g += tl.where(b_p <= b_c, grad_loss, 0)
        b_dc += tl.where(b_p <= b_c, 0, grad_loss)
        b_mean += tl.where(b_p == 0, 0, b_p * b_g)
        if logs is not None:
            p_log, p_dlog, p_dpast = logs[1:]
            b_dlog = tl.load(p_dpast + o_k, mask=m_k, other=0)
            b_log = tl.load(p_log + o_row + o_k, mask=m_k, other=0)
            b_given = tl.load(p_dlog + o_row + o_k, mask=m_k, other=0)
            b_dlog += tl.where(b_log == -float("inf"), 0, b_given)
            tl.store(p_dpast + o_k, b_dlog, mask=m_k)
            b_total += b_dlog
        tl.store(p_dcoverage + o_k, b_dc, mask=m_k)
        tl.store(p_ds + o_row + o_k, b_g, mask=m_k)
    return tl.sum(b_mean, 0), tl.sum(b_total, 0)


@triton.jit
def _softmax_gradient(
    b_dpenalty, state, o_row, logs, penalty, mean, total, sigmoids, n, Tk,
    PENALTY: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Turn g of a row into ds, subtract its penalty from dcoverage and add to ``b_dpenalty``.

    ``sigmoids`` is the quotient of a weight's sigmoid and the weight, 0 without sigmoids.
    """
    p_ds, p_p, p_c, p_dcoverage = state[:4]
    for j in range(0, Tk, BR):
        o_k = j + tl.arange(0, BR)
        m_k = o_k < n
        b_p = tl.load(p_p + o_row + o_k, mask=m_k, other=0)
        b_c = tl.load(p_c + o_row + o_k, mask=m_k, other=0)
        b_g = tl.load(p_ds + o_row + o_k, mask=m_k, other=0) - mean
        b_ds = tl.where(b_p == 0, 0, b_p * b_g * (1 - b_p * sigmoids))
        if logs is not None:
            # not one sum with the mean's: a row of one key has gradient 0
            b_ds += tl.load(logs[3] + o_k, mask=m_k, other=0) - b_p * total
        tl.store(p_ds + o_row + o_k, b_ds, mask=o_k < Tk)
        if PENALTY:
            b_dpenalty -= b_ds * b_c
            b_dc = tl.load(p_dcoverage + o_k, mask=m_k, other=0) - penalty * b_ds
            tl.store(p_dcoverage + o_k, b_dc, mask=m_k)
    return b_dpenalty


@triton.jit
def _features_gradient(
    features, gradients, state, o_row, p_last, i_bh, t, scale, n, sizes, SCORE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, BF: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """Add a row's gradients of the features' inputs, and store those of the filters' outputs."""
    p_dfound, p_dq, p_dk, p_dweight, p_dfilters, p_dprojection = gradients
    p_ds, p_c = state[0], state[2]
    p_weight, s_weight = features[2]
    Tq, Tk, A, K, taps = sizes
    o_f = tl.arange(0, BF)
    for j in range(0, n, BK):
        o_k = j + tl.arange(0, BK)
        b_ds = tl.load(p_ds + o_row + o_k, mask=o_k < n, other=0) * scale
        m_k = b_ds != 0  # the others' keys may be NaN
        b_found = _find(features[3], p_last, p_c + o_row, o_k, Tk, K, taps, C, BK, BF, acc)
        b_dfound = tl.zeros([BK, BF], acc)
        for a in range(0, A, BA):
            o_a = a + tl.arange(0, BA)
            m_a = o_a < A
            b_z, b_u = _features(features, t, b_found, o_k, o_a, m_k, A, K, BF, acc)
            # [BK, BA]
            b_f, b_slope = _activation(b_z, SCORE)
            b_f = b_ds[:, None] * b_f
            b_w = tl.load(p_weight + o_a * s_weight, mask=m_a, other=0).to(acc)
            b_dz = (b_ds[:, None] * b_w[None, :]) * (4 * b_slope)
            tl.atomic_add(p_dweight + i_bh * A + o_a, tl.sum(b_f, 0), mask=m_a, sem="relaxed")
            p_dqa = p_dq + (i_bh * Tq + t) * A + o_a
            tl.atomic_add(p_dqa, tl.sum(b_dz, 0), mask=m_a, sem="relaxed")
            p_dka = p_dk + o_k.to(tl.int64)[:, None] * A + o_a[None, :]
            tl.atomic_add(p_dka, b_dz, mask=m_k[:, None] & m_a[None, :], sem="relaxed")
            p_du = p_dprojection + o_a[:, None] * K + o_f[None, :]
            if BF == 1:
                b_dfound += tl.sum(b_dz * b_u, 1)[:, None]
                b_du = tl.sum(b_dz * b_found, 0)[:, None]
            else:
                b_dfound = tl.dot(
                    b_dz, tl.trans(b_u), b_dfound, input_precision="ieee", out_dtype=acc
                )
                b_du = tl.dot(tl.trans(b_dz), b_found, input_precision="ieee", out_dtype=acc)
            tl.atomic_add(p_du, b_du, mask=m_a[:, None] & (o_f < K)[None, :], sem="relaxed")
        p_df = p_dfound + o_k[:, None] * BF + o_f[None, :]
        tl.store(p_df, b_dfound, mask=(o_k < n)[:, None])
        for w in range(taps):
            o_x = o_k + w - taps // 2
            m_x = (o_x >= 0) & (o_x < Tk)
            p_f = p_dfilters + o_f * (C * taps) + w
            b_x = tl.load(p_last + o_x, mask=m_x, other=0)
            b_df = tl.sum(b_dfound * b_x[:, None], 0)
            tl.atomic_add(p_f, b_df, mask=o_f < K, sem="relaxed")
            if C == 2:
                b_x = tl.load(p_c + o_row + o_x, mask=m_x, other=0)
                b_df = tl.sum(b_dfound * b_x[:, None], 0)
                tl.atomic_add(p_f + taps, b_df, mask=o_f < K, sem="relaxed")


@triton.jit
def _history_gradient(
    features, gradients, state, o_row, logs, u, n, sizes,
    C: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """Store the gradients of weights and coverage before a row; return that of u for each key."""
    p_ds, p_dcoverage, p_dlast = state[0], state[3], state[4]
    Tk, K, taps = sizes[1], sizes[3], sizes[4]
    o_f = tl.arange(0, BF)
    b_du = tl.zeros([BK], acc)
    for j in range(0, Tk, BK):
        o_k = j + tl.arange(0, BK)
        m_k = o_k < Tk
        b_dp = tl.zeros([BK], acc)
        if logs is not None:
            p_past, p_dpast = logs[0], logs[3]
            b_ds = tl.load(p_ds + o_row + o_k, mask=o_k < n, other=0)
            b_next = tl.load(p_ds + o_row + o_k + 1, mask=o_k < n - 1, other=0)
            b_here, b_last, b_sum, _ = _transition(p_past, o_k, o_k < n, u)
            b_ds /= b_sum
            b_du += b_ds * (b_last - b_here)
            _, b_this, b_sum, _ = _transition(p_past, o_k + 1, o_k < n - 1, u)
            b_dlog = (1 - u) * b_here * b_ds + u * b_this * (b_next / b_sum)
            tl.store(p_dpast + o_k, b_dlog, mask=m_k)
        if features is not None:
            p_filters, p_dfound = features[3], gradients[0]
            b_dc = tl.load(p_dcoverage + o_k, mask=m_k, other=0)
            for w in range(taps):
                o_x = o_k - w + taps // 2  # the key that sees this one under tap w
                p_df = p_dfound + o_x[:, None] * BF + o_f[None, :]
                m_x = ((o_x >= 0) & (o_x < n))[:, None] & (o_f < K)[None, :]
                b_df = tl.load(p_df, mask=m_x, other=0)
                p_f = p_filters + o_f * (C * taps) + w
                b_dp += tl.sum(b_df * tl.load(p_f, mask=o_f < K, other=0)[None, :], 1)
                if C == 2:
                    b_f = tl.load(p_f + taps, mask=o_f < K, other=0)
                    b_dc += tl.sum(b_df * b_f[None, :], 1)
            tl.store(p_dcoverage + o_k, b_dc, mask=m_k)
        tl.store(p_dlast + o_k, b_dp, mask=m_k)
    return b_du


@triton.jit(do_not_specialize=LENGTHS)
def _scan_gradient(
    features, gradients, p_lengths, penalty, rate, transition, p_sigmoid_sum, previous,
    p_weights, coverage,
    p_grad_loss, p_ds, scale, sizes, Tq, Tk, SCORE: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, BA: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Turn g = dc vᵀ + dP, stored in ds, into ds and the gradients through the history.

    It is long because it unpacks the tuples, once, for the four steps of every row.

    Every tuple ends with the memory of its gradients. That of ``previous`` is the gradient of the
    weights as the next row's past, that of ``coverage`` after a row, then before it; the latter has
    a buffer for the coverage before every row, and ``gradients`` begin with one for those of the
    filters' outputs, which threads exchange. ``transition`` are its probabilities, the logarithms
    of ``previous`` and of the weights, the gradient of these, and that of those before a row.
    """
    acc: tl.constexpr = p_ds.dtype.element_ty
    H, A, K, taps = sizes
    sizes = (Tq, Tk, A, K, taps)
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    scale = _scalar(scale, acc)
    n = _seen_keys(p_lengths, i_b, Tk)
    p_previous, p_dlast = previous
    p_first, p_before, p_dcoverage = coverage
    p_weights += i_bh * Tq * Tk
    p_before += i_bh * Tq * Tk
    p_ds += i_bh * Tq * Tk
    p_previous += i_bh * Tk
    p_dlast += i_bh * Tk
    p_dcoverage += i_bh * Tk
    if rate is not None:
        rate = (rate[0] + i_bh * Tk, rate[1] + i_bh * Tk)
    if transition is not None:
        p_transition, p_log_previous, p_log_weights, p_dlog, p_dpast, p_dtransition = transition
        p_log_previous += i_bh * Tk
        p_log_weights += i_bh * Tq * Tk
        p_dpast += i_bh * Tk
        p_dlog += i_bh * Tq * Tk
    factor = 0.0
    if penalty is not None:
        factor = tl.load(penalty[0] + i_h * penalty[1])
    grad_loss = 0.0
    if p_grad_loss is not None:
        grad_loss = tl.load(p_grad_loss + i_bh)
    if features is not None:
        features = _features_of(features, i_b, i_h)
        p_dfound, p_dq, p_dk, p_dweight, p_dfilters, p_dprojection = gradients
        gradients = (
            p_dfound + i_bh * Tk * BF, p_dq, p_dk + i_bh * Tk * A, p_dweight,
            p_dfilters + i_bh * K * C * taps, p_dprojection + i_bh * A * K,
        )  # fmt: skip
    _store_coverages(p_before, p_first + i_bh * Tk, rate, p_weights, Tq, Tk, BR)
    tl.debug_barrier()

    state = (p_ds, p_weights, p_before, p_dcoverage, p_dlast)
    b_dpenalty = tl.zeros([BR], acc)
    for i in range(Tq):
        t = Tq - 1 - i
        o_row = tl.cast(t, tl.int64) * Tk
        if t == 0:
            p_last = p_previous
        else:
            p_last = p_weights + o_row - Tk
        u = 0.0
        logs = None
        if transition is not None:
            u = tl.load(p_transition + i_bh * Tq + t)
            if t == 0:
                p_past = p_log_previous
            else:
                p_past = p_log_weights + o_row - Tk
            logs = (p_past, p_log_weights, p_dlog, p_dpast)
        mean, total = _weight_gradient(state, o_row, rate, logs, grad_loss, n, BR, acc)
        tl.debug_barrier()
        PENALTY: tl.constexpr = penalty is not None
        sigmoids = 0.0
        if p_sigmoid_sum is not None:
            sigmoids = tl.load(p_sigmoid_sum + i_bh * Tq + t)
        b_dpenalty = _softmax_gradient(
            b_dpenalty, state, o_row, logs, factor, mean, total, sigmoids, n, Tk, PENALTY, BR
        )
        tl.debug_barrier()
        if features is not None:
            _features_gradient(
                features, gradients, state, o_row, p_last, i_bh, t, scale, n, sizes,
                SCORE, C, BK, BA, BF, acc,
            )  # fmt: skip
            tl.debug_barrier()
        b_du = _history_gradient(
            features, gradients, state, o_row, logs, u, n, sizes, C, BK, BF, acc
        )
        if transition is not None:
            tl.store(p_dtransition + i_bh * Tq + t, tl.sum(b_du, 0))
        tl.debug_barrier()
    if penalty is not None:
        tl.store(penalty[2] + i_bh, tl.sum(b_dpenalty, 0))


def _of_heads(x, dims: int):
    """Return contiguous parameters, and the stride from one head to the next."""
    x = x.contiguous()
    return x, x.stride(0) if x.dim() > dims else 0


def _arguments(call, q, k, w, grad_penalty=()) -> tuple:
    """Return the features, None without filters, the penalty, and both kernels' options."""
    filters, projection, penalty = call.filters, call.projection, call.penalty
    K, C, taps = (0, 1, 1) if filters is None else filters.shape[-3:]
    if Triton.most_filters < K:
        raise_value_error("filters", f"at most {Triton.most_filters} on the Triton backend", K)
    # Two warps must not hold the same element of a row: one could overwrite the element before the
    # other loads it, which would then add to the new value.
    rows = _block(k.shape[2], 1024, 256)
    features = None
    if K:
        features = (*map(_strided, (q, k, w)), _of_heads(filters, 3), _of_heads(projection, 2))
    if penalty is not None:
        penalty = (penalty, 1 if penalty.shape[0] > 1 else 0, *grad_penalty)
    options = {
        "scale": _pair(call.scale),
        "sizes": (q.shape[1], q.shape[3], K, taps), "Tq": q.shape[2], "Tk": k.shape[2],
        "SCORE": call.score, "C": C, "BK": _block(k.shape[2], 32) if K else rows, "BR": rows,
        "BA": 16, "BF": 1 if K == 1 else _block(K, 1 << 20), "num_warps": 4, **LAUNCH_OPTIONS,
    }  # fmt: skip
    return features, penalty, options


def _previous_of(call) -> tuple:
    """Return the weights before the first row, and with a transition their logarithms."""
    if call.previous is None:
        return call.query.new_zeros(
            call.key.shape[:-1], dtype=accumulation_dtype(call.query.dtype)
        ), None
    previous = call.previous.contiguous()
    return (previous, None) if call.transition_prob is None else (previous.exp(), previous)


def forward(call: CoverageInputs) -> CoverageOutputs:
    """Run the operator ``coverage_attention``."""
    query, transition_prob = call.query, call.transition_prob
    acc, shape = accumulation_dtype(query.dtype), (*query.shape[:-1], call.key.shape[-2])
    context, keys = empty_rows(query, call.value.shape[-1]), call.key.shape[:-1]
    weights = query.new_empty(shape, dtype=acc)
    coverage = weights.new_zeros(keys)
    if call.coverage is not None:
        coverage.copy_(call.coverage)
    previous, log_previous = _previous_of(call)
    loss = weights.new_zeros(keys[:-1])
    log_weights = weights.new_empty((0,) if transition_prob is None else shape)
    sigmoid_sum = weights.new_empty(shape[:-1] if call.normalisation == "sigmoid" else (0,))
    transition = None
    if transition_prob is not None:
        transition = (transition_prob.contiguous(), log_previous, log_weights)
    rate = None if call.inverse_fertility is None else call.inverse_fertility.contiguous()
    q, k, v, w, lengths, _ = attention._prepare(call)
    features, penalty, options = _arguments(call, q, k, w)
    if features is None:
        lse = weights.new_empty(query.shape[:-1])
        given = {x: getattr(call, x) for x in call._fields if x in AttentionInputs._fields}
        attention.launch_forward(AttentionInputs(**given), None, weights, lse)
    (B, H, Tq, _), Tk = q.shape, k.shape[2]
    bias, mask = (
        None if x is None or features is None else _strided(_heads(x).expand(B, H, Tq, Tk))
        for x in (call.bias, call.mask)
    )
    with torch.cuda.device_of(query):
        if B * H * Tq:
            _scan[(B * H,)](
                features, bias, mask, lengths, penalty, rate, transition,
                sigmoid_sum if sigmoid_sum.numel() else None, previous, weights, coverage, loss,
                **options,
            )  # fmt: skip
            _multiply(
                weights, v, lengths, None, 0, _heads(context), 1.0,
                over_keys=True, ignore_nonfinite=False,
            )  # fmt: skip
    return CoverageOutputs(context, weights, coverage, loss, log_weights, sigmoid_sum)


def backward_into(call) -> CoverageGradients:
    """Run ``coverage_attention_backward_into``."""
    return backward(without_sums(call), tuple(getattr(call, x) for x in SUMS))


def _added(parts: torch.Tensor, like: torch.Tensor, axes: int) -> torch.Tensor:
    """Add up the parts of a parameter over the axes that share it: sequences, and perhaps heads."""
    return parts.flatten(0, axes - 1).sum(0, dtype=torch.float64).to(like.dtype).reshape(like.shape)


def _of_features(call: CoverageBackward, dq, dk, dweight) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key, value and score_vector of a call with filters."""
    grad_value = empty_rows(call.value) if call.need_grad_key else call.value.new_empty(0)
    grad_score_vector = call.query.new_empty(0)
    if call.need_grad_key:
        assert call.score_vector is not None
        axes = dweight.dim() - call.score_vector.dim()
        grad_score_vector = _added(dweight, call.score_vector, axes)
        with torch.cuda.device_of(call.query):
            _multiply(
                call.weights.contiguous(), _heads(call.grad_context),
                None if call.lengths is None else call.lengths.contiguous(), None, 0,
                _heads(grad_value), 1.0, over_keys=False, ignore_nonfinite=False,
            )  # fmt: skip
    grad_query, grad_key = (
        empty_rows(x).copy_(dx) if needed else x.new_empty(0)
        for x, dx, needed in (
            (call.query, dq, call.need_grad_query), (call.key, dk, call.need_grad_key),
        )
    )  # fmt: skip
    return grad_query, grad_key, grad_value, grad_score_vector


def backward(call: CoverageBackward, sums=None) -> CoverageGradients:
    """Run ``coverage_attention_backward``, or with ``sums`` the operator that adds to them."""
    query, key, value, penalty = call.query, call.key, call.value, call.penalty
    rate, transition_prob, coverage = call.inverse_fertility, call.transition_prob, call.coverage
    grad_context, grad_coverage = call.grad_context, call.grad_coverage
    weights, keys, heads = call.weights, key.shape[:-1], key.shape[:-2]

    def zeros(*shape: int, needed: bool = True) -> torch.Tensor:
        return weights.new_zeros(shape if needed else (0,))

    def packed(x):
        return None if x is None else x.contiguous()

    # NaN where no weight is: unread
    ds = torch.matmul(grad_context.to(weights.dtype), value.to(weights.dtype).mT)
    ds = (ds if call.grad_weights is None else ds + call.grad_weights).contiguous()
    q, k, _, w, lengths, _ = attention._prepare(call)
    dpenalty = zeros(*heads, needed=penalty is not None)
    features, penalty_arguments, options = _arguments(call, q, k, w, (dpenalty,))
    previous, log_previous = _previous_of(call)
    dlast, dpast = zeros(*keys), zeros(*keys, needed=transition_prob is not None)
    first = zeros(*keys) if coverage is None else coverage.contiguous()
    dcoverage = zeros(*keys) if grad_coverage is None else grad_coverage.contiguous().clone()
    drate = zeros(*keys, needed=rate is not None)
    dtransition = zeros(*query.shape[:-1], needed=transition_prob is not None)
    gradients = transition = None
    if features is not None:
        (_, A, K, taps), C = options["sizes"], options["C"]
        sizes = (*key.shape,), (*heads, A), (*heads, K, C, taps), (*heads, A, K)
        dq, found = zeros(*query.shape), zeros(*keys, options["BF"])
        gradients = (found, dq, *(sums or (zeros(*size) for size in sizes)))
    if transition_prob is not None:
        grad_log_weights = packed(call.grad_log_weights)
        if grad_log_weights is None:  # Triton 3.6 compiles no tuple that contains None
            grad_log_weights = zeros(*weights.shape)
        transition = (
            transition_prob.contiguous(), log_previous, call.log_weights.contiguous(),
            grad_log_weights, dpast, dtransition,
        )  # fmt: skip
    with torch.cuda.device_of(query):
        if q.shape[:3].numel():
            _scan_gradient[(q.shape[:2].numel(),)](
                features, gradients, lengths, penalty_arguments,
                None if rate is None else (rate.contiguous(), drate), transition,
                call.sigmoid_sum.contiguous() if call.normalisation == "sigmoid" else None,
                (previous, dlast), weights.contiguous(), (first, torch.empty_like(ds), dcoverage),
                packed(call.grad_loss), ds, **options,
            )  # fmt: skip

    def none() -> torch.Tensor:
        return weights.new_empty(0)

    if transition_prob is not None:
        dlast = dpast + torch.where(previous == 0, 0, previous * dlast)
    if gradients is not None:
        _, dq, dk, dweight, dfilters, dprojection = gradients
        grad_query, grad_key, grad_value, grad_score_vector = _of_features(call, dq, dk, dweight)
    else:
        of_scores = AttentionBackward(
            grad_context=grad_context, grad_weights=None, grad_log_sum_exp=None, query=query,
            key=key, value=value, score_vector=call.score_vector, lengths=call.lengths,
            key_bounds=None, columns=0, key_exponentials=None, weights=weights, grad_score=ds,
            scale=call.scale, score=call.score, normalisation="softmax",
            need_grad_query=call.need_grad_query, need_grad_key=call.need_grad_key,
            need_grad_score=False,
        )  # fmt: skip
        grad_query, grad_key, grad_value, grad_score_vector, _ = attention.backward(of_scores)
    grad_filters, grad_projection = none(), none()
    if call.need_grad_filters and call.filters is not None and call.projection is not None:
        grad_filters = torch.zeros_like(call.filters)  # if there are none of them
        grad_projection = torch.zeros_like(call.projection)
        if gradients is not None:
            axes = dfilters.dim() - call.filters.dim()
            grad_filters = _added(dfilters, call.filters, axes)
            grad_projection = _added(dprojection, call.projection, axes)
    own = 1 if penalty is not None and penalty.shape[0] > 1 else len(heads)
    return CoverageGradients(
        grad_query, grad_key, grad_value, grad_score_vector,
        ds if call.need_grad_score else none(), grad_filters, grad_projection,
        none() if penalty is None else _added(dpenalty, penalty, own),
        drate, dtransition,
        none() if coverage is None else dcoverage,
        none() if call.previous is None else dlast,
    )  # fmt: skip
