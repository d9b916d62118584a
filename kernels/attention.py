"""Attention without history in Triton: five kernels for all scores, forward and backward.

The additive score never computes a tanh per (query, key, feature). With E(x) = e^{2x},

    tanh(q + k) = 1 − 2r,    r = 1 / (1 + E(q)·E(k)),    1 − tanh² = 4r(1 − r),

so exponentials are computed once per query element and once per key element, and two terms share a
reciprocal: w0/d0 + w1/d1 = (w0·D + d0) / (d0·D) with D = d1/w1 = 1/w1 + (E(q)/w1)·E(k), so that w1
costs nothing once the query's side has been divided by it. If max|q| + max|k| ≤ 21.8, each d is
below 2^63. The error is that of numbers near 1, so tiles where the sum is at most 0.8 use an odd
polynomial of q + k. Tiles above 21.8, weights of extreme norm, and float64 use a direct path: one
exponential per element, correct for every finite input. Other activations use none of these.

Names: ``p_`` a pointer, ``b_`` a block in registers, ``m_`` a mask, ``o_`` offsets, ``s_`` strides,
``i_`` a program's or block's index, ``B.`` a block's size. ``acc`` is the accumulation dtype.
Arguments that belong together are a tuple, or None without them: a tensor is its pointer and its
strides.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnfast.ops.attention import (
    AttentionBackward,
    AttentionGradients,
    AttentionInputs,
    AttentionOutputs,
)
from attnfast.ops.backends import HALF, triton_interpreted
from attnfast.ops.operators import accumulation_dtype, empty_rows
from attnfast.ops.scores import ScoreInputs, ScoreOutputs
from attnfast.outputs import RowStatistics

# The reciprocal without a guard is inline assembly, which neither the interpreter nor AMD supports.
NVIDIA = tl.constexpr(torch.version.hip is None and not triton_interpreted())
FACTORED_LIMIT = tl.constexpr(21.8)  # 1 + e^{2·21.8} < 2^63
SMALL_LIMIT = tl.constexpr(0.8)
LEAKY_SLOPE = tl.constexpr(0.2)
# r is accurate to a few ulp of 1 where tanh saturates exactly: beyond this norm of w, which no
# trained model approaches, the direct path keeps scores as accurate as eager code does.
WEIGHT_LIMIT = tl.constexpr(16.0)
CHUNK = tl.constexpr(8)  # features summed separately: rounding errors add up in one long sum
# A weight used as a divisor is clamped to at least this, and to 2^-30 of its chunk's largest. If
# d0·D overflows float32 and its reciprocal is 0, w0/d0 is then below 2^-33.
LEAST_WEIGHT = tl.constexpr(2.0**-42)
STATISTICS = tl.constexpr(len(RowStatistics._fields))
# Options of every launch: a product and a sum are one instruction, rounded once (fused).
LAUNCH_OPTIONS = {"enable_fp_fusion": True}
SUMS = 16, 64  # rows and keys of a tile in a kernel that reads scores or products from memory
PROGRAMS = 4  # for each multiprocessor, if a launch computes only scores and has enough keys
#: Arguments that differ between batches. Machine code that knew which of them 16 divides would be
#: compiled again for many batches.
LENGTHS = ("T", "Tq", "Tk", "Tx", "Ty", "M", "K", "W")


@triton.jit
def _reciprocal(b_x):
    if NVIDIA and b_x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / b_x


@triton.jit
def _exp_twice(b_x):
    """e^{2x} = 2^n e^r with |r| ≤ ln(2)/2: the hardware's exponential alone loses |x| ulp."""
    b_n = tl.floor(b_x * 2.8853900817779268 + 0.5)
    b_r = b_x * 2 - b_n * 0.693145751953125 - b_n * 1.4286068203094172e-06  # ln 2 in two parts
    # 2^n by its bits: an error of ex2.approx would be the same for every element
    b_bits = (tl.where(b_n >= -64, b_n, 0).to(tl.int32) + 127) << 23  # of a NaN, 1
    return tl.exp(b_r) * b_bits.to(tl.float32, bitcast=True)


@triton.jit
def _small_tanh(b_x):
    """tanh x up to SMALL_LIMIT, with a relative error of 4e-9 before rounding.

    x + x³ P(x²), fitted by least squares at Chebyshev's nodes, reweighted to the largest error.
    """
    b_u = b_x * b_x
    b_p = (b_u * 0.0015847615 - 0.0074095660) * b_u + 0.0213029957
    b_p = ((b_p * b_u - 0.0538523323) * b_u + 0.1333222102) * b_u - 0.3333329736
    return b_x + b_x * b_u * b_p


@triton.jit
def _tanh(b_x):
    """tanh x, and r(1 − r) = (1 − tanh²) / 4, both accurate to a few ulp for every x."""
    b_t = tl.exp(-2 * tl.abs(b_x))
    b_r = _reciprocal(1 + b_t)
    b_far = 1 - 2 * b_t * b_r
    LIMIT: tl.constexpr = SMALL_LIMIT if b_x.dtype == tl.float32 else 0.625
    m_near = tl.abs(b_x) <= LIMIT
    b_x0 = tl.where(m_near, b_x, 0)
    if b_x.dtype == tl.float32:
        b_near = _small_tanh(b_x0)
    else:  # x + x³ P(x²) / Q(x²), fitted in the same way, within 6e-19
        b_u = b_x0 * b_x0
        b_p = (b_u * -1.99088907658369684e-4 - 2.04967860591928167e-2) * b_u
        b_q = (b_u * 2.06438280116139047e-4 + 2.32886480894974918e-2) * b_u
        b_q = (b_q + 4.61490358177563374e-1) * b_u + 1
        b_near = b_x0 + b_x0 * b_u * ((b_p - 0.333333333333333235) / b_q)
    b_tanh = tl.where(m_near, b_near, tl.where(b_x < 0, -b_far, b_far))
    return b_tanh, tl.where(m_near, 0.25 - 0.25 * b_tanh * b_tanh, b_t * b_r * b_r)


@triton.jit
def _activation(b_z, SCORE: tl.constexpr):
    """f(z) of an additive score, and f'(z) / 4."""
    if SCORE == "relu":
        return tl.where(b_z < 0, 0, b_z), tl.where(b_z > 0, tl.full(b_z.shape, 0.25, b_z.dtype), 0)
    elif SCORE == "leaky_relu":
        b_ones = tl.full(b_z.shape, 1, b_z.dtype)
        b_slope = tl.where(b_z > 0, 0.25 * b_ones, 0.25 * LEAKY_SLOPE * b_ones)
        return tl.where(b_z < 0, LEAKY_SLOPE * b_z, b_z), b_slope
    else:
        return _tanh(b_z)


@triton.jit
def _finite(b_x):
    return tl.where(tl.abs(b_x) < float("inf"), b_x, 0)


@triton.jit
def _scalar(pair, dtype: tl.constexpr):
    """Rebuild a float64 from two float32 halves: Triton passes Python floats as float32."""
    return tl.cast(pair[0], dtype) + tl.cast(pair[1], dtype)


@triton.jit
def _head(x, i_b, i_h):
    """Return the pointer to a sequence and head of a tensor ``(pointer, strides)``."""
    return x[0] + tl.cast(i_b, tl.int64) * x[1][0] + tl.cast(i_h, tl.int64) * x[1][1]


@triton.jit
def _indices(i, H, T, BT: tl.constexpr):
    """Return a program's block of BT rows, and its row of B·H, sequence and head as int64."""
    NT = tl.cdiv(T, BT)
    i_bh = i // NT
    return i % NT, i_bh.to(tl.int64), (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)


@triton.jit
def _seen_keys(p_lengths, i_b, Tk):
    """The number of keys visible to the rows of sequence ``i_b``."""
    if p_lengths is None:
        n = Tk
    else:
        n = tl.minimum(tl.maximum(tl.load(p_lengths + i_b), 0), Tk).to(tl.int32)
    return n


@triton.jit
def _rows_seen(span, i_b, i_h, o_q, m_q, n, W, COMPACT: tl.constexpr):
    """The first visible key of rows with spans, the one after the last, and the key of column 0."""
    p_span = _head(span, i_b, i_h) + tl.cast(o_q, tl.int64) * span[1][2]
    b_start = tl.load(p_span, mask=m_q, other=0)
    b_stop = tl.minimum(tl.load(p_span + 1, mask=m_q, other=0), n)
    if COMPACT:
        b_stop = tl.minimum(b_stop, b_start + W)
    b_first = tl.maximum(b_start, 0)
    m_some = b_first < b_stop
    b_first = tl.cast(tl.where(m_some, b_first, n), tl.int32)
    b_stop = tl.cast(tl.where(m_some, b_stop, 0), tl.int32)
    b_origin = tl.cast(tl.where(m_some, b_start, 0), tl.int32) if COMPACT else b_stop * 0
    return b_first, b_stop, b_origin


@triton.jit
def _key_range(span, i_b, i_h, o_q, m_q, n, W, COMPACT: tl.constexpr):
    """Return the first key that a block's rows see, the one after the last, and those of each row.

    The last are the three results of :func:`_rows_seen`, unused without spans.
    """
    if span is None:
        b_none = tl.zeros_like(o_q)
        return tl.cast(0, tl.int32), tl.cast(n, tl.int32), (b_none, b_none, b_none)
    else:
        rows = _rows_seen(span, i_b, i_h, o_q, m_q, n, W, COMPACT)
        return tl.min(rows[0], 0), tl.max(rows[1], 0), rows


@triton.jit
def _visible(span, rows, o_k, m_q, m_k):
    """Return the mask ``[rows, keys]`` of keys visible to rows, and the columns of the keys."""
    if span is None:
        return m_q[:, None] & m_k[None, :], o_k[None, :]
    else:
        m_s = (o_k[None, :] >= rows[0][:, None]) & (o_k[None, :] < rows[1][:, None])
        return m_s, o_k[None, :] - rows[2][:, None]


@triton.jit(do_not_specialize=LENGTHS)
def _exponentials(
    x, weight, p_lengths, e, p_ew, p_range, sizes, T,
    IGNORE_NONFINITE: tl.constexpr, BT: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    """E(x) of one block of BT rows, 1 where there is no x, and the largest |x| of the block.

    With ``p_ew [H, AP + AP / CHUNK]`` weights are stored there in the forward's layout: −2w of the
    first feature of a pair, 1 / −2w of the second, whose E(x) is divided too; then the chunks' Σ w.
    """
    H, A, AP = sizes
    i_t, _, i_b, i_h = _indices(tl.program_id(0), H, T, BT)
    n = _seen_keys(p_lengths, i_b, T)
    o_t = i_t * BT + tl.arange(0, BT)
    p_x = _head(x, i_b, i_h) + o_t.to(tl.int64)[:, None] * x[1][2]
    p_e, s_e = e
    p_e += tl.program_id(0).to(tl.int64) * BT * AP + tl.arange(0, BT)[:, None] * s_e[0]
    p_weight = weight[0] + i_h * weight[1][0]
    b_range = tl.zeros([BT], tl.float32)
    b_norm = 0.0
    for a in range(0, A, BA):
        o_a = a + tl.arange(0, BA)
        # [BT, BA]
        m_x = (o_t < n)[:, None] & (o_a < A)[None, :]
        b_x = tl.load(p_x + o_a.to(tl.int64)[None, :] * x[1][3], mask=m_x, other=0).to(tl.float32)
        b_number = tl.where(tl.abs(b_x) >= 0, b_x, 0)  # a NaN may belong to a key that no row sees
        b_range = tl.maximum(b_range, tl.max(tl.abs(b_number), 1))
        # [BA]
        b_w = tl.load(p_weight + o_a * weight[1][1], mask=o_a < A, other=0).to(tl.float32)
        b_norm += tl.sum(b_w * b_w, 0)
        b_x = b_number if IGNORE_NONFINITE else b_x
        b_e = _exp_twice(tl.where(tl.abs(b_x) > FACTORED_LIMIT, 0, b_x))  # not read beyond it
        if p_ew is not None:
            # [BA / CHUNK, CHUNK]
            b_chunks = tl.reshape(b_w, [BA // CHUNK, CHUNK])
            b_least = tl.maximum(tl.max(tl.abs(b_chunks), 1) * 2.0**-30, LEAST_WEIGHT)
            m_second = tl.reshape(o_a, [BA // CHUNK, CHUNK]) % 2 == 1
            m_least = m_second & (tl.abs(b_chunks) < b_least[:, None])
            b_chunks = tl.where(m_least, b_least[:, None], b_chunks)
            b_inverse = -0.5 / tl.where(m_second, b_chunks, 1)
            b_ew = tl.reshape(tl.where(m_second, b_inverse, -2 * b_chunks), [BA])
            b_e *= tl.where(o_a % 2 == 1, b_ew, 1)[None, :]
            if i_b == 0 and i_t == 0:
                p_ewh = p_ew + i_h * (AP + AP // CHUNK)
                tl.store(p_ewh + o_a, b_ew, mask=o_a < AP)
                o_chunk = a // CHUNK + tl.arange(0, BA // CHUNK)
                m_chunk = o_chunk < AP // CHUNK
                tl.store(p_ewh + AP + o_chunk, tl.sum(b_chunks, 1), mask=m_chunk)
        tl.store(p_e + (o_a // 2 * s_e[1] + o_a % 2)[None, :], b_e, mask=(o_a < AP)[None, :])
    b_range = tl.where(b_norm <= WEIGHT_LIMIT * WEIGHT_LIMIT, tl.max(b_range, 0), float("inf"))
    tl.store(p_range + tl.program_id(0), b_range)


@triton.jit
def _dot_scores(
    query, key, A, BQ: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, acc: tl.constexpr
):  # fmt: skip
    """The dot scores of one tile."""
    p_q, s_q, m_q = query
    p_k, s_k, m_k = key
    b_s = tl.zeros([BQ, BK], acc)
    for a in range(0, A, BA):
        o_a = a + tl.arange(0, BA)
        m_a = o_a < A
        # [BQ, BA]
        p_qa = p_q[:, None] + o_a.to(tl.int64)[None, :] * s_q
        b_q = tl.load(p_qa, mask=m_q[:, None] & m_a[None, :], other=0)
        # [BA, BK]
        p_ka = p_k[None, :] + o_a.to(tl.int64)[:, None] * s_k
        b_k = tl.load(p_ka, mask=m_a[:, None] & m_k[None, :], other=0)
        if b_q.dtype == acc:
            # With fma the compiler does not sum all features in one chain, whose error grows with
            # their number.
            b_part = tl.dot(b_q, b_k, input_precision="ieee", out_dtype=acc)
            b_s = tl.fma(b_part, tl.full([BQ, BK], 1.0, acc), b_s)
        else:
            b_s = tl.dot(b_q, b_k, b_s, input_precision="ieee", out_dtype=acc)
    return b_s


@triton.jit
def _factored_scores(
    p_eq, p_ek, p_ew, A, AP, BQ: tl.constexpr, BK: tl.constexpr, acc: tl.constexpr
):  # fmt: skip
    """Σ w tanh(q + k) = Σ w − 2 Σ w / (1 + E(q)·E(k)) of one tile, two features at a time.

    ``p_eq [BQ, 2]`` and ``p_ek [BK, 2]`` point into panels, ``[AP / 2, BQ, 2]`` and
    ``[AP / 2, BK, 2]``, and ``p_ew`` to the weights as :func:`_exponentials` stores them.
    """
    b_s = tl.zeros([BQ, BK], acc)
    for chunk in range(0, A, CHUNK):
        # start at Σ w and subtract: this loses less to rounding than adding Σ w at the end
        b_part = tl.zeros([BQ, BK], acc) + tl.load(p_ew + AP + chunk // CHUNK)
        for i in tl.static_range(0, CHUNK, 2):
            b_w0, b_w1 = tl.load(p_ew + chunk + i), tl.load(p_ew + chunk + i + 1)
            # [BQ] and [BK]
            b_eq0, b_eq1 = tl.split(tl.load(p_eq + i * BQ))
            b_ek0, b_ek1 = tl.split(tl.load(p_ek + i * BK))
            b_d0 = 1 + b_eq0[:, None] * b_ek0[None, :]
            b_d1 = b_w1 + b_eq1[:, None] * b_ek1[None, :]
            b_part += (b_w0 * b_d1 + b_d0) * _reciprocal(b_d0 * b_d1)
        b_s += b_part
        p_eq += CHUNK * BQ
        p_ek += CHUNK * BK
    return b_s


@triton.jit
def _direct_scores(
    query, key, weight, small, A,
    SCORE: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """The additive scores of one tile, of any activation and any finite input."""
    p_q, s_q, m_q = query
    p_k, s_k, m_k = key
    p_weight, s_weight = weight
    b_s = tl.zeros([BQ, BK], acc)
    for chunk in range(0, A, CHUNK):
        b_part = tl.zeros([BQ, BK], acc)
        for a in range(chunk, tl.minimum(chunk + CHUNK, A)):
            b_w = tl.load(p_weight + a * s_weight).to(acc)
            b_q = tl.load(p_q + tl.cast(a, tl.int64) * s_q, mask=m_q, other=0).to(acc)
            b_k = tl.load(p_k + tl.cast(a, tl.int64) * s_k, mask=m_k, other=0).to(acc)
            b_x = b_q[:, None] + b_k[None, :]
            if small:
                b_part += b_w * _small_tanh(b_x)
            else:
                b_f, _ = _activation(b_x, SCORE)
                b_part += b_w * b_f
        b_s += b_part
    return b_s


@triton.jit
def _reach(p_range_x, p_range_y, i_x, i_y):
    """Return whether a tile's max|x| + max|y| fits the polynomial, and the factored path."""
    reach = tl.load(p_range_x + i_x) + tl.load(p_range_y + i_y)
    return reach <= SMALL_LIMIT, (reach > SMALL_LIMIT) & (reach <= FACTORED_LIMIT)


@triton.jit
def _scores(
    query, key, weight, factors, i_q, i_k, A, SCORE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """The scores of one tile, without scale; ``i_q`` and ``i_k`` count blocks of all heads.

    ``query`` and ``key`` are pointers to rows, the stride of features, and the mask of rows.
    """
    if SCORE == "dot":
        return _dot_scores(query, key, A, BQ, BK, BA, acc)
    elif factors is None:
        return _direct_scores(query, key, weight, False, A, SCORE, BQ, BK, acc)
    else:
        p_eq, p_ek, p_ew, p_range_q, p_range_k, AP = factors
        small, near = _reach(p_range_q, p_range_k, i_q, i_k)
        if near:
            o_pair = tl.arange(0, 2)[None, :]
            p_eq_tile = p_eq + i_q * AP * BQ + tl.arange(0, BQ)[:, None] * 2 + o_pair
            p_ek_tile = p_ek + i_k * AP * BK + tl.arange(0, BK)[:, None] * 2 + o_pair
            b_s = _factored_scores(p_eq_tile, p_ek_tile, p_ew, A, AP, BQ, BK, acc)
        else:
            b_s = _direct_scores(query, key, weight, small, A, SCORE, BQ, BK, acc)
        return b_s


@triton.jit
def _masked(b_s, m_s, bias, mask, i_b, i_h, o_q, o_column):
    """Add a tile's bias to its scores; return them and the mask of visible keys."""
    o_q, o_column = o_q.to(tl.int64)[:, None], o_column.to(tl.int64)
    if mask is not None:
        p_m = _head(mask, i_b, i_h) + o_q * mask[1][2] + o_column * mask[1][3]
        m_s = m_s & (tl.load(p_m, mask=m_s, other=0) != 0)
    if bias is not None:
        p_b = _head(bias, i_b, i_h) + o_q * bias[1][2] + o_column * bias[1][3]
        b_bias = tl.load(p_b, mask=m_s, other=0).to(b_s.dtype)
        b_s += b_bias
        m_s = m_s & (b_bias != -float("inf"))  # also if the score is NaN
    return b_s, m_s


@triton.jit
def _described(statistics, b_s, b_p, o_k, b_shift, b_m, b_l, b_rescale):
    """Update the sums of a row's statistics by a block of keys.

    With p = e^{s − m}: Σ p (s − m), the key of the largest score, μ = Σ p j / l and Σ p (j − μ)².
    Blocks are combined by the formula of Chan, Golub and LeVeque, which avoids cancellation.
    """
    b_entropy_sum, b_position, b_mean, b_squares = statistics
    # infinite if the previous maximum was infinite, or if the previous sum underflows
    b_gap = tl.where((b_l == 0) | (b_rescale == 0), 0, b_m - b_shift)
    b_entropy_sum = b_rescale * (b_entropy_sum + b_l * b_gap)
    b_entropy_sum += tl.sum(b_p * tl.where(b_p > 0, b_s - b_shift[:, None], 0), 1)
    b_highest, b_column = tl.max(b_s, 1, return_indices=True)
    acc: tl.constexpr = b_p.dtype
    b_position = tl.where(b_highest > b_m, (tl.min(o_k, 0) + b_column).to(acc), b_position)
    b_j = o_k.to(acc)[None, :]
    b_more = tl.sum(b_p, 1)
    b_old = b_l * b_rescale
    b_own = tl.sum(b_p * b_j, 1) / tl.where(b_more == 0, 1, b_more)
    b_far = b_j - b_own[:, None]
    b_share = b_more / tl.where(b_old + b_more == 0, 1, b_old + b_more)
    b_step = b_own - b_mean
    b_squares = b_squares * b_rescale + tl.sum(b_p * b_far * b_far, 1)
    b_squares += b_step * b_step * b_old * b_share
    return b_entropy_sum, b_position, b_mean + b_step * b_share, b_squares


@triton.jit
def _store_statistics(p_row, statistics, b_l, b_inverse, m_q):
    """Store the fields of RowStatistics: 0 of an empty row, NaN of a diverged one."""
    b_entropy_sum, b_position, b_mean, b_squares = statistics
    m_empty = b_l == 0
    b_mass = tl.where(m_empty, 1, b_l)
    b_seen = tl.where(m_empty, 0, 1 + 0 * b_inverse)  # or NaN
    tl.store(p_row, (tl.log(b_mass) - b_entropy_sum / b_mass) * b_seen, mask=m_q)
    tl.store(p_row + 1, b_seen / b_mass, mask=m_q)
    tl.store(p_row + 2, b_position * b_seen, mask=m_q)
    tl.store(p_row + 3, b_mean * b_seen, mask=m_q)
    tl.store(p_row + 4, b_squares / b_mass * b_seen, mask=m_q)


@triton.jit
def _normalise(p_weights, span, rows, b_shift, b_inverse, m_q, n, W, BK: tl.constexpr):
    """Turn the scores of rows into e^{s − m} / l."""
    tl.debug_barrier()  # another thread may read the scores than stored them
    for column in range(0, W, BK):
        o_column = column + tl.arange(0, BK)
        p_s = p_weights[:, None] + o_column[None, :]
        if span is None:
            m_s = m_q[:, None] & (o_column < n)[None, :]
        else:
            b_key = o_column[None, :] + rows[2][:, None]
            m_s = (b_key >= rows[0][:, None]) & (b_key < rows[1][:, None])
            m_s = m_s & (o_column < W)[None, :]
        b_s = tl.load(p_s, mask=m_s, other=-float("inf"))
        b_p = tl.exp(b_s - b_shift[:, None]) * b_inverse[:, None]
        b_p = tl.where(b_s == -float("inf"), 0, b_p)
        tl.store(p_s, b_p, mask=m_q[:, None] & (o_column < W)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def _forward(
    query, key, value, weight, factors, bias, mask, p_lengths, span, context, p_weights, p_lse,
    p_statistics, scale, sizes, Tq, Tk, W,
    SCORE: tl.constexpr, COMPACT: tl.constexpr, SCORES: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Context, weights and log-sum-exp of BQ rows: one sweep over the keys with online softmax.

    With m the largest score so far: l = Σ e^{s − m}, c = Σ e^{s − m} v, both rescaled as m grows.
    The weights need the last m and l. So the sweep stores the scores in the weights' memory, and a
    second sweep turns them into e^{s − m} / l: one read and one write per element, negligible
    compared with the features that the score reads. With ``SCORES`` the weights are scores, there
    is neither softmax nor second sweep, and programs divide the keys. If ``SCORE`` is "sums", the
    weights' memory contains scores without scale, bias and mask. Statistics are updated online too:
    see :func:`_described`. The sweep is one long function, because every part of it would take and
    return the same dozen values.
    """
    acc: tl.constexpr = p_lse.dtype.element_ty
    # A visible score of −∞ is replaced by MIN_FINITE, which no other score equals. If MIN_FINITE is
    # a row's maximum, the row has diverged; if −∞ is, the row is empty.
    MIN_FINITE: tl.constexpr = (
        -1.7976931348623157e308 if acc == tl.float64 else -3.4028234663852886e38
    )
    JUST_BELOW_ONE: tl.constexpr = 1 - 2.0**-52 if acc == tl.float64 else 1 - 2.0**-23
    H, A, Dv = sizes
    i_q, i_bh, i_b, i_h = _indices(tl.program_id(0), H, Tq, BQ)
    i_v = tl.program_id(1)
    scale = _scalar(scale, acc)
    n = _seen_keys(p_lengths, i_b, Tk)
    o_q = i_q * BQ + tl.arange(0, BQ)
    o_v = i_v * BV + tl.arange(0, BV)
    m_q, m_v = o_q < Tq, o_v < Dv
    o_row = i_bh * Tq + o_q
    p_q = _head(query, i_b, i_h) + o_q.to(tl.int64) * query[1][2]
    p_k, p_v = _head(key, i_b, i_h), _head(value, i_b, i_h)
    p_v += o_v.to(tl.int64)[None, :] * value[1][3]
    if weight is not None:
        weight = (weight[0] + i_h * weight[1][0], weight[1][1])
    if factors is not None:
        p_eq, p_ek, p_ew, p_range_q, p_range_k, AP = factors
        factors = (p_eq, p_ek, p_ew + i_h * (AP + AP // CHUNK), p_range_q, p_range_k, AP)

    b_m = tl.full([BQ], -float("inf"), acc)
    b_l = tl.zeros([BQ], acc)
    b_c = tl.zeros([BQ, BV], acc)
    statistics = (b_l, b_l, b_l, b_l)
    first, stop, rows = _key_range(span, i_b, i_h, o_q, m_q, n, W, COMPACT)
    from_k, to_k = first // BK, tl.cdiv(stop, BK)
    if SCORES:  # programs divide the keys
        share = tl.cdiv(to_k - from_k, tl.num_programs(1))
        from_k += i_v * share
        to_k = tl.minimum(from_k + share, to_k)
    for i_k in range(from_k, to_k):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < n
        m_s, o_column = _visible(span, rows, o_k, m_q, m_k)
        m_column = m_q[:, None] & (o_k < Tk)[None, :] if span is None else m_s
        # [BQ, BK]
        if SCORE == "sums":
            b_s = tl.load(p_weights + o_row[:, None] * W + o_column, mask=m_s, other=0)
        else:
            b_s = _scores(
                (p_q, query[1][3], m_q), (p_k + o_k.to(tl.int64) * key[1][2], key[1][3], m_k),
                weight, factors, i_bh * tl.cdiv(Tq, BQ) + i_q, i_bh * tl.cdiv(Tk, BK) + i_k, A,
                SCORE, BQ, BK, BA, acc,
            )  # fmt: skip
        b_s *= scale
        b_s, m_s = _masked(b_s, m_s, bias, mask, i_b, i_h, o_q, o_column)
        if not SCORES:
            b_low = tl.where(b_s == -float("inf"), MIN_FINITE, b_s * JUST_BELOW_ONE)
            b_s = tl.where(b_s > MIN_FINITE, b_s, b_low)
        b_s = tl.where(m_s, b_s, -float("inf"))
        if p_weights is not None and (SCORES or i_v == 0):
            tl.store(p_weights + o_row[:, None] * W + o_column, b_s, mask=m_column)

        if not SCORES:
            b_max = tl.maximum(b_m, tl.max(b_s, 1))
            b_shift = tl.where(b_max == -float("inf"), 0, b_max)
            b_p = tl.exp(b_s - b_shift[:, None])
            b_rescale = tl.exp(b_m - b_shift)
            if p_statistics is not None:
                statistics = _described(statistics, b_s, b_p, o_k, b_shift, b_m, b_l, b_rescale)
            b_l = b_l * b_rescale + tl.sum(b_p, 1)
            b_m = b_max
            if context is not None:
                b_c = b_c * b_rescale[:, None]
                if mask is not None or bias is not None or span is not None:
                    # mask values that no row here sees, because 0·NaN = NaN
                    m_k = tl.max(m_s.to(tl.int32), 0) > 0
                # [BK, BV]
                p_vk = p_v + o_k.to(tl.int64)[:, None] * value[1][2]
                b_v = tl.load(p_vk, mask=m_k[:, None] & m_v[None, :], other=0)
                b_c = tl.dot(b_p.to(b_v.dtype), b_v, b_c, input_precision="ieee", out_dtype=acc)

    m_empty = b_l == 0
    b_shift = tl.where(m_empty, 0, b_m)
    m_diverged = b_m == MIN_FINITE
    b_inverse = tl.where(m_diverged, float("nan"), 1 / tl.where(m_empty, 1, b_l))
    if context is not None:
        p_c = _head(context, i_b, i_h) + o_v[None, :] + o_q.to(tl.int64)[:, None] * context[1][2]
        tl.store(p_c, b_c * b_inverse[:, None], mask=m_q[:, None] & m_v[None, :])
    if not SCORES and i_v == 0:
        b_lse = b_shift + tl.log(tl.where(m_empty, 1, b_l))
        b_lse = tl.where(m_empty | m_diverged, -float("inf"), b_lse)
        tl.store(p_lse + o_row, b_lse, mask=m_q)
        if p_statistics is not None:
            _store_statistics(p_statistics + o_row * STATISTICS, statistics, b_l, b_inverse, m_q)
        if p_weights is not None:
            _normalise(p_weights + o_row * W, span, rows, b_shift, b_inverse, m_q, n, W, BK)


@triton.jit
def _sum_range(
    span, p_rows, i, i_b, i_h, o, m, n, size, W, OVER_KEYS: tl.constexpr, COMPACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the range of a sum over the keys that a block's rows see, as :func:`_key_range` does.

    Unless ``OVER_KEYS`` it is that of the rows that see a block of keys.
    """
    if OVER_KEYS:
        return _key_range(span, i_b, i_h, o, m, n, W, COMPACT)
    else:
        b_none = tl.zeros_like(o)
        start, stop = 0, tl.where(i * BLOCK < n, size, 0)
        if span is not None:  # as _rows_of_keys stores it
            p_rows += tl.program_id(0).to(tl.int64) * 2
            start, stop = tl.load(p_rows).to(tl.int32), tl.load(p_rows + 1).to(tl.int32)
        return start, stop, (b_none, b_none, b_none)


@triton.jit(do_not_specialize=LENGTHS)
def _product(
    p_m, x, p_lengths, span, p_rows, out, scale, sizes, Tk, W, M, K,
    OVER_KEYS: tl.constexpr, COMPACT: tl.constexpr, IGNORE_NONFINITE: tl.constexpr,
    ONLY_NONFINITE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out = scale · m x, for weights or score gradients m ``[Tq, W]``.

    The sum runs over the keys, or over the queries if m is transposed. As 0·NaN = NaN, a row of x
    that is multiplied only by zeros is not loaded; with ``IGNORE_NONFINITE`` nonfinite elements of
    x count as 0, because m is already NaN wherever such an element is visible. With
    ``ONLY_NONFINITE`` out already contains the product, and only rows of a tile with NaN or
    infinity are computed again.
    """
    acc: tl.constexpr = p_m.dtype.element_ty
    H, N = sizes
    i_m, i_bh, i_b, i_h = _indices(tl.program_id(0), H, M, BM)
    n = _seen_keys(p_lengths, i_b, Tk)
    o_m = i_m * BM + tl.arange(0, BM)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_m, m_n = o_m < M, o_n < N
    start, stop, rows = _sum_range(
        span, p_rows, i_m, i_b, i_h, o_m, m_m, n, K, W, OVER_KEYS, COMPACT, BM
    )
    p_m += i_bh * (M if OVER_KEYS else K) * W + o_m.to(tl.int64)[:, None] * (W if OVER_KEYS else 1)
    p_x = _head(x, i_b, i_h) + o_n.to(tl.int64)[None, :] * x[1][3]
    p_out = _head(out, i_b, i_h) + o_m.to(tl.int64)[:, None] * out[1][2] + o_n[None, :]
    m_out = m_m[:, None] & m_n[None, :]
    if ONLY_NONFINITE:
        b_size = tl.abs(tl.load(p_out, mask=m_out, other=0))
        b_is_finite = tl.min((b_size < float("inf")).to(tl.int32), 1)  # of each row
        stop = tl.where(tl.min(b_is_finite) == 0, stop, start)
        m_out = m_out & (b_is_finite == 0)[:, None]
    b_out = tl.zeros([BM, BN], acc)
    for k in range(start, stop, BK):
        o_k = (k + tl.arange(0, BK)).to(tl.int64)
        m_k = o_k < stop
        if OVER_KEYS:
            m_mk, o_column = _visible(span, rows, o_k, m_m, m_k)
        else:
            m_mk, o_column = m_m[:, None] & m_k[None, :], o_k[None, :] * W
            if span is not None:
                b_first, b_stop, b_origin = _rows_seen(span, i_b, i_h, o_k, m_k, n, W, COMPACT)
                m_mk = (o_m[:, None] >= b_first[None, :]) & (o_m[:, None] < b_stop[None, :])
                o_column = o_column - b_origin[None, :]
        # [BM, BK] and [BK, BN]
        b_m = tl.load(p_m + o_column, mask=m_mk, other=0)
        if not IGNORE_NONFINITE:
            m_k = tl.max((b_m != 0).to(tl.int32), 0) > 0
        b_x = tl.load(p_x + o_k[:, None] * x[1][2], mask=m_k[:, None] & m_n[None, :], other=0)
        if IGNORE_NONFINITE:
            b_x = _finite(b_x)
        b_out = tl.dot(b_m.to(b_x.dtype), b_x, b_out, input_precision="ieee", out_dtype=acc)
    tl.store(p_out, b_out * _scalar(scale, acc), mask=m_out)


@triton.jit(do_not_specialize=LENGTHS)
def _score_gradient(
    grad_context, p_grad_weights, p_grad_lse, value, p_weights, p_lengths, span, p_ds, sizes,
    Tq, Tk, W,
    COMPACT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """ds = P (g − Σ P g + dlse) with g = dc vᵀ + dP, of BQ rows; exactly 0 where P is 0.

    The first sweep stores g in the memory of ds, and the second turns it into ds. Without value the
    memory contains dc vᵀ.
    """
    acc: tl.constexpr = p_ds.dtype.element_ty
    H, Dv = sizes
    i_q, i_bh, i_b, i_h = _indices(tl.program_id(0), H, Tq, BQ)
    n = _seen_keys(p_lengths, i_b, Tk)
    o_q = i_q * BQ + tl.arange(0, BQ)
    m_q = o_q < Tq
    o_row = i_bh * Tq + o_q
    if value is not None:
        p_v, s_v, s_dc = _head(value, i_b, i_h), value[1], grad_context[1]
        p_dc = _head(grad_context, i_b, i_h) + o_q.to(tl.int64)[:, None] * s_dc[2]
    b_delta = tl.zeros([BQ], acc)
    b_dlse = tl.zeros([BQ], acc)  # kept separate from delta, because g − delta is often exactly 0
    if p_grad_lse is not None:
        b_dlse = tl.load(p_grad_lse + o_row, mask=m_q, other=0)
    start, stop, rows = _key_range(span, i_b, i_h, o_q, m_q, n, W, COMPACT)
    for k in range(start, stop, BK):
        o_k = (k + tl.arange(0, BK)).to(tl.int64)
        m_k = o_k < stop
        m_s, o_column = _visible(span, rows, o_k, m_q, m_k)
        # [BQ, BK]
        o_s = o_row[:, None] * W + o_column
        if value is None:
            b_g = tl.load(p_ds + o_s, mask=m_s, other=0)
        else:
            b_g = tl.zeros([BQ, BK], acc)
            for v in range(0, Dv, BV):
                o_v = (v + tl.arange(0, BV)).to(tl.int64)
                m_v = o_v < Dv
                # [BQ, BV]
                p_dcv = p_dc + o_v[None, :] * s_dc[3]
                b_dc = tl.load(p_dcv, mask=m_q[:, None] & m_v[None, :], other=0)
                # [BV, BK]
                p_vk = p_v + o_v[:, None] * s_v[3] + o_k[None, :] * s_v[2]
                b_v = tl.load(p_vk, mask=m_v[:, None] & m_k[None, :], other=0)
                b_g = tl.dot(b_dc, b_v, b_g, input_precision="ieee", out_dtype=acc)
        if p_grad_weights is not None:
            b_g += tl.load(p_grad_weights + o_s, mask=m_s, other=0)
        b_p = tl.load(p_weights + o_s, mask=m_s, other=0)
        b_g = tl.where(b_p != 0, b_g, 0)
        b_delta += tl.sum(b_p * b_g, 1)
        tl.store(p_ds + o_s, b_g, mask=m_s)
    tl.debug_barrier()
    for column in range(0, W, BK):
        o_column = column + tl.arange(0, BK)
        m_w = m_q[:, None] & (o_column < W)[None, :]
        m_s = m_q[:, None] & (o_column < n)[None, :] if span is None else m_w
        o_s = o_row[:, None] * W + o_column[None, :]
        b_p = tl.load(p_weights + o_s, mask=m_s, other=0)
        b_g = tl.load(p_ds + o_s, mask=m_s & (b_p != 0), other=0)
        b_ds = tl.where(b_p != 0, b_p * (b_g - b_delta[:, None] + b_dlse[:, None]), 0)
        tl.store(p_ds + o_s, b_ds, mask=m_w)


@triton.jit
def _column_of(ds, y, exists, m_x, OVER_KEYS: tl.constexpr, COMPACT: tl.constexpr):
    """ds of a block's rows at key ``y`` or, unless ``OVER_KEYS``, of row ``y`` at the block's keys.

    ``ds`` has the pointer to the rows' key 0, or to the keys in row 0. 0 if not visible.
    """
    p_ds, span, rows, i_b, i_h, o_x, n, W = ds
    if span is None:
        return tl.load(p_ds + tl.cast(y, tl.int64) * (1 if OVER_KEYS else W), mask=m_x, other=0)
    elif OVER_KEYS:
        return tl.load(p_ds + y, mask=(y >= rows[0]) & (y < rows[1]), other=0)
    else:
        first, stop, origin = _rows_seen(span, i_b, i_h, y, exists, n, W, COMPACT)
        p_ds += tl.cast(y, tl.int64) * W - origin
        return tl.load(p_ds, mask=(o_x >= first) & (o_x < stop), other=0)


@triton.jit
def _factored_terms(b_dx, b_dw, b_ex, b_ds0, b_ds1, p_ey, m_a, A, WEIGHTS: tl.constexpr):
    """Add the terms of two rows of y, whose E(y) are at ``p_ey``, to Σ ds f'/4 and Σ ds (−f/2)."""
    b_d0 = 1 + b_ex * tl.load(p_ey, mask=m_a, other=0)[None, :]
    b_d1 = 1 + b_ex * tl.load(p_ey + A, mask=m_a, other=0)[None, :]
    b_inverse = _reciprocal(b_d0 * b_d1)
    b_s0, b_s1 = b_d1 * b_inverse - 0.5, b_d0 * b_inverse - 0.5
    b_dx += b_ds0[:, None] * (0.25 - b_s0 * b_s0)
    b_dx += b_ds1[:, None] * (0.25 - b_s1 * b_s1)
    if WEIGHTS:
        b_dw += b_ds0[:, None] * b_s0
        b_dw += b_ds1[:, None] * b_s1
    return b_dx, b_dw


@triton.jit
def _direct_terms(b_dx, b_dw, b_z, b_ds, small, SCORE: tl.constexpr, WEIGHTS: tl.constexpr):
    """Add the terms of one row of y, z = x + y, to Σ ds f'/4 and Σ ds (−f/2)."""
    if small:
        b_f = _small_tanh(b_z)
        b_slope = 0.25 - 0.25 * b_f * b_f
    else:
        b_f, b_slope = _activation(b_z, SCORE)
    b_dx += b_ds[:, None] * b_slope
    if WEIGHTS:
        b_dw += b_ds[:, None] * (-0.5 * b_f)
    return b_dx, b_dw


@triton.jit(do_not_specialize=LENGTHS)
def _additive_gradient(
    x, y, weight, factors, p_ds, p_lengths, span, p_rows, dx, p_dw, scale, sizes, Tk, W, Tx, Ty,
    SCORE: tl.constexpr, OVER_KEYS: tl.constexpr, COMPACT: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    """dx = scale · w Σ_y ds f'(x + y) of BX rows and BA features, and dw = scale · Σ ds f(x + y).

    For tanh, f' is 4r(1 − r) and f is 1 − 2r. The score is symmetric: x are the queries and y the
    keys, or the other way round. Every thread keeps its elements of x in registers while it loops
    over y, so threads reduce their sums only at the end.
    """
    acc: tl.constexpr = p_ds.dtype.element_ty
    WEIGHTS: tl.constexpr = p_dw is not None
    H, A = sizes
    NX, NY = tl.cdiv(Tx, BX), tl.cdiv(Ty, BY)
    i_x, i_bh, i_b, i_h = _indices(tl.program_id(0), H, Tx, BX)
    n = _seen_keys(p_lengths, i_b, Tk)
    o_x = (i_x * BX + tl.arange(0, BX)).to(tl.int64)
    o_a = (tl.program_id(1) * BA + tl.arange(0, BA)).to(tl.int64)
    m_x, m_a = o_x < Tx, o_a < A
    m_xa = m_x[:, None] & m_a[None, :]
    start, stop, rows = _sum_range(
        span, p_rows, i_x, i_b, i_h, o_x, m_x, n, Ty, W, OVER_KEYS, COMPACT, BX
    )
    p_ds += i_bh * (Tx if OVER_KEYS else Ty) * W + o_x * (W if OVER_KEYS else 1)
    if OVER_KEYS and span is not None:
        p_ds -= rows[2]
    ds = (p_ds, span, rows, i_b, i_h, o_x, n, W)
    p_x = _head(x, i_b, i_h) + o_x[:, None] * x[1][2] + o_a[None, :] * x[1][3]
    p_y = _head(y, i_b, i_h) + o_a * y[1][3]
    # [BX, BA]: Σ_y ds f'/4 and Σ_y ds (−f/2)
    b_dx = tl.zeros([BX, BA], acc)
    b_dw = tl.zeros([BX, BA], acc)
    for i_y in range(start // BY, tl.cdiv(stop, BY)):
        end = tl.minimum(stop, i_y * BY + BY)
        if factors is not None:
            p_ex, p_ey, p_range_x, p_range_y = factors
            small, near = _reach(p_range_x, p_range_y, i_bh * NX + i_x, i_bh * NY + i_y)
        else:
            near: tl.constexpr = False  # type: ignore[no-redef]
            small: tl.constexpr = False  # type: ignore[no-redef]
        if near:
            p_tile = p_ex + (i_bh * NX * BX + o_x)[:, None] * A + o_a[None, :]
            b_ex = tl.load(p_tile, mask=m_xa, other=0)
            for k in range(i_y * BY, end, 2):
                # [BX] and [BA]; a row of y beyond the end is 1 and is multiplied by ds = 0
                m_1 = o_x < tl.where(k + 1 < end, Tx, 0)
                b_ds0 = _column_of(ds, k, k < end, m_x, OVER_KEYS, COMPACT)
                b_ds1 = _column_of(ds, k + 1, k + 1 < end, m_1, OVER_KEYS, COMPACT)
                p_eyy = p_ey + (i_bh * NY * BY + k) * A + o_a
                b_dx, b_dw = _factored_terms(b_dx, b_dw, b_ex, b_ds0, b_ds1, p_eyy, m_a, A, WEIGHTS)
        else:
            b_x = _finite(tl.load(p_x, mask=m_xa, other=0).to(acc))
            for k in range(i_y * BY, end):
                b_ds = _column_of(ds, k, k < end, m_x, OVER_KEYS, COMPACT)
                b_y = tl.load(p_y + tl.cast(k, tl.int64) * y[1][2], mask=m_a, other=0).to(acc)
                b_z = b_x + _finite(b_y)[None, :]
                b_dx, b_dw = _direct_terms(b_dx, b_dw, b_z, b_ds, small, SCORE, WEIGHTS)
    # [BA]
    scale = _scalar(scale, acc)
    p_weight = weight[0] + i_h * weight[1][0] + o_a * weight[1][1]
    b_weight = tl.load(p_weight, mask=m_a, other=0).to(acc)
    if dx is not None:
        b_dx *= (4 * scale * b_weight)[None, :]
        p_dx = _head(dx, i_b, i_h) + o_x[:, None] * dx[1][2] + o_a[None, :]
        tl.store(p_dx, b_dx, mask=m_xa)
    if p_dw is not None:
        b_dw = -2 * scale * tl.sum(b_dw, 0)
        tl.store(p_dw + (i_bh * NX + i_x) * A + o_a, b_dw, mask=m_a)


def _heads(x: Any) -> Any:
    """View ``[B, T, ·]`` as ``[B, 1, T, ·]``."""
    return x.unsqueeze(1) if x is not None and x.dim() == 3 else x


def _strided(x: Tensor | None) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return a tensor and its strides, which are one argument of a kernel."""
    return None if x is None else (x, x.stride())


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _pair(scale: float) -> tuple[float, float]:
    """Split a float64 into two float32, the only float type of kernel arguments."""
    high = ctypes.c_float(scale).value
    return high, scale - high


def _registers(most: int | None) -> dict[str, int]:
    """Return the option that limits a thread's registers, so that more programs run at once."""
    return {"maxnreg": most} if most and NVIDIA.value else {}


def _block(size: int, largest: int, smallest: int = 16) -> int:
    """Return the power of two that covers ``size``, within limits; dots need at least 16."""
    return min(max(triton.next_power_of_2(size), smallest), largest)


def _depth(dtype: torch.dtype) -> int:
    """Return the depth of one step of a dot; without tensor cores its operands use registers."""
    return 32 if dtype in HALF else 16


def _exponentials_of(x, score_vector, lengths, block: int, *, transposed: bool, weights=None):
    """Launch :func:`_exponentials`: ``[B·H, blocks, block, A]`` and the range of every block.

    ``transposed`` makes it panels ``[…, A / 2, block, 2]``, A rounded up to CHUNK, for the forward.
    ``weights``: the buffer in which weights are stored, if given.
    """
    (B, H, T, A), blocks = x.shape, triton.cdiv(x.shape[2], block)
    columns = _whole_chunks(A) if transposed else A
    e = x.new_empty(B * H * blocks * block * columns, dtype=torch.float32)
    ranges = x.new_empty(B * H * blocks, dtype=torch.float32)
    _exponentials[(B * H * blocks,)](
        _strided(x), _strided(score_vector), lengths,
        (e, (2, 2 * block) if transposed else (columns, 2)), weights, ranges, (H, A, columns), T,
        IGNORE_NONFINITE=not transposed, BT=block, BA=_block(A, 32), num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return e, ranges


def _whole_chunks(features: int) -> int:
    return triton.cdiv(features, CHUNK.value) * CHUNK.value


def _prepare(call: Any) -> tuple[Any, ...]:
    """Normalise the inputs: add a head axis, and a row of ``score_vector`` for each head."""
    query, key, value = _heads(call.query), _heads(call.key), _heads(call.value)
    score_vector, lengths = call.score_vector, call.lengths
    bounds = _heads(getattr(call, "key_bounds", None))
    if score_vector is not None:
        score_vector = score_vector.expand(query.shape[1], query.shape[3])
    if lengths is not None:
        lengths = lengths.contiguous()
    if bounds is not None:  # the two bounds of a row must be adjacent in memory
        bounds = bounds.contiguous().expand(*query.shape[:2], -1, -1)
    return query, key, value, score_vector, lengths, bounds


def _tile(size: int, bounds: Tensor | None, columns: int) -> int:
    """Return the number of rows in a tile: fewer if each row sees its own keys, or few keys."""
    if bounds is None:
        return size
    return min(size // 2, _block(columns, size)) if columns else size // 2


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _shorter(block: int, rows: int, programs: int, device: torch.device) -> int:
    """Halve a block of rows, to 16, while a GPU has more processors than programs for them.

    ``programs`` run for each block.
    """
    while block > 16 and programs * triton.cdiv(rows, block) < _processors(device):
        block //= 2
    return block


def _rows_of_keys(bounds, columns: int, B: int, H: int, Tk: int, block: int) -> Tensor | None:
    """Return the range of rows that see any key of a block: the first, and the one after the last.

    int64 ``[B, H, blocks, 2]``. Rows within the range need not see one.
    """
    if bounds is None:
        return None
    own = tuple(slice(None) if step else slice(1) for step in bounds.stride()[:2])
    start, stop = bounds[own].unbind(-1)
    stop = stop.clamp(max=Tk)
    stop = torch.minimum(stop, start + columns) if columns else stop
    first = start.clamp(min=0)
    empty = first >= stop
    # The first row whose keys end after the block begins, the last whose begin before it ends.
    ends = stop.masked_fill(empty, 0).cummax(-1).values.contiguous()
    begins = first.masked_fill(empty, Tk).flip(-1).cummin(-1).values.flip(-1).contiguous()
    keys = torch.arange(0, Tk, block, device=bounds.device).expand(*ends.shape[:-1], -1)
    low = torch.searchsorted(ends, keys.contiguous(), right=True)
    high = torch.searchsorted(begins, (keys + block).clamp(max=Tk).contiguous())
    rows = torch.stack([low, high], -1)
    return rows.expand(B, H, -1, -1).contiguous()


def _by_library(dtype: torch.dtype, bounds: Tensor | None, queries: int, scale: float = 1) -> bool:
    """Return whether PyTorch's GEMM computes products: it is faster if tl.dot has no tensor cores.

    A GEMM does not read its factors if the scale, rounded to float32, is 0, which would hide NaN.
    """
    is_ordinary = 0 < abs(_pair(scale)[0]) < math.inf
    return dtype not in HALF and bounds is None and queries > 1 and is_ordinary


def _matrices(x: Tensor) -> Tensor:
    """Return the matrices ``[B·H, ·, ·]`` of all sequences and heads."""
    return _heads(x).flatten(0, 1)


def _multiply_all(left: Tensor, right: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """Compute ``out = scale · left right``: out ``[B, H, ·, ·]``, the factors ``[B·H, ·, ·]``."""
    B, H, *size = out.shape
    is_even = B == 1 or H == 1 or out.stride(0) == H * out.stride(1)
    product = out.flatten(0, 1) if is_even else out.new_empty(B * H, *size)
    # autocast does not apply to calls with out
    torch.baddbmm(product, left, right, beta=0, alpha=scale, out=product)
    if not is_even:
        out.copy_(product.view_as(out))


def _multiply(
    m, x, lengths, bounds, columns: int, out, scale: float, *,
    over_keys: bool, ignore_nonfinite: bool,
) -> None:  # fmt: skip
    """Compute ``out = scale · m x``, or ``scale · mᵀ x`` unless ``over_keys``.

    If PyTorch multiplies, :func:`_product` computes only what is not finite.
    """
    (B, H, K, N), M = x.shape, out.shape[-2]
    by_library = _by_library(x.dtype, bounds, M if over_keys else K, scale)
    if by_library:
        _multiply_all(_matrices(m) if over_keys else _matrices(m).mT, _matrices(x), out, scale)
    Tk = K if over_keys else M
    BM, BK, BN = _block(M, _tile(64, bounds, columns)), _block(K, _depth(x.dtype)), _block(N, 64)
    rows = None if over_keys else _rows_of_keys(bounds, columns, B, H, Tk, BM)
    _product[(B * H * triton.cdiv(M, BM), triton.cdiv(N, BN))](
        m, _strided(x), lengths, _strided(bounds), rows, _strided(out), _pair(scale),
        (H, N), Tk, m.shape[-1], M, K,
        OVER_KEYS=over_keys, COMPACT=columns > 0, IGNORE_NONFINITE=ignore_nonfinite,
        ONLY_NONFINITE=by_library, BM=BM, BK=BK, BN=BN, num_warps=4 if x.dtype in HALF else 8,
        **LAUNCH_OPTIONS,
    )  # fmt: skip


def launch_forward(
    call: AttentionInputs, context: Tensor | None, weights: Tensor | None, lse: Tensor,
    statistics: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch :func:`_forward` for context, weights, log-sum-exp and statistics.

    Outputs that are None are not computed; without context the weights are scores: −inf for keys
    not visible to a row.
    """
    acc, Dv = accumulation_dtype(call.query.dtype), call.value.shape[-1]
    query, key, value, score_vector, lengths, bounds = _prepare(call)
    bias, mask, columns, scale, score = call.bias, call.mask, call.columns, call.scale, call.score
    context = _heads(context)
    (B, H, Tq, A), Tk, W = query.shape, key.shape[2], columns or key.shape[2]
    bias, mask = (None if x is None else _heads(x).expand(B, H, Tq, W) for x in (bias, mask))
    # First compute the scores, by a GEMM or by programs that divide the keys; then their softmax.
    # In half types the products with values stay fused where weights would be rounded before them.
    apart = weights is not None and context is not None and bounds is None and Tq > 1
    apart &= query.dtype not in HALF or (score != "dot" and Dv > 128)
    if apart:
        with torch.cuda.device_of(query):
            if score == "dot":
                _multiply_all(_matrices(query), _matrices(key).mT, _heads(weights))
            else:
                sums = call._replace(bias=None, mask=None, scale=1.0)
                launch_forward(sums, None, weights, lse)
        score = "sums"
    features = _whole_chunks(A)
    BA = _block(A, _depth(query.dtype))
    factored = score == "tanh" and acc == torch.float32
    plain = score in ("relu", "leaky_relu")
    BK = _block(Tk, 32 if factored or plain else _depth(query.dtype))
    # Stored weights avoid computing the scores again for values wider than a block, and save
    # registers if a dot has no tensor cores. A factored score is expensive: wider blocks.
    separate = apart or (weights is not None and (Dv > 128 or query.dtype not in HALF))
    within = None if separate else context
    BV = _block(Dv, 256 if factored and not separate else 128)
    # Plain activations of float32 and a context do not fit the registers together in taller tiles.
    most = 4096 if plain and not separate and query.dtype not in HALF else 8192
    BQ = 1 if Tq == 1 else _block(Tq, min(_tile(64, bounds, columns), most // BV))
    slices = 1 if within is None else max(triton.cdiv(Dv, BV), 1)
    options = {"num_warps": 8, **LAUNCH_OPTIONS}
    if score == "sums":
        BQ, BK = SUMS
        options["num_warps"] = 4
    elif factored and context is None:
        BQ = min(BQ, 32)
        options |= {"num_warps": 4, **_registers(128)}
    BQ = _shorter(BQ, Tq, B * H * slices, query.device)
    tiles = B * H * triton.cdiv(Tq, BQ)
    if context is None:
        wanted = triton.cdiv(PROGRAMS * _processors(query.device), max(tiles, 1))
        slices = max(min(wanted, triton.cdiv(Tk, BK)), 1)
    factors = None
    with torch.cuda.device_of(query):
        if factored:
            e_w = query.new_empty(H, features + features // CHUNK.value, dtype=acc)
            e_q, range_q = _exponentials_of(
                query, score_vector, None, BQ, transposed=True, weights=e_w
            )
            e_k, range_k = _exponentials_of(key, score_vector, lengths, BK, transposed=True)
            factors = (e_q, e_k, e_w, range_q, range_k, features)
        _forward[(tiles, slices)](
            *map(_strided, (query, key, value, score_vector)), factors, _strided(bias),
            _strided(mask), lengths, _strided(bounds), _strided(within), weights, lse, statistics,
            _pair(scale), (H, A, Dv), Tq, Tk, W, SCORE=score, COMPACT=columns > 0,
            SCORES=context is None, BQ=BQ, BK=BK, BA=BA, BV=BV, **options,
        )  # fmt: skip
        if separate and context is not None:
            seen = (lengths, bounds, columns)
            _multiply(weights, value, *seen, context, 1.0, over_keys=True, ignore_nonfinite=False)


def _check_normalisation(call: AttentionInputs | AttentionBackward) -> None:
    """Raise unless the normalisation is the kernels' own."""
    if call.normalisation != "softmax":
        raise RuntimeError(f"normalisation must be 'softmax' on Triton, got {call.normalisation!r}")


def forward(call: AttentionInputs) -> AttentionOutputs:
    """Run the operator ``attention``."""
    _check_normalisation(call)
    query, Tk = call.query, call.key.shape[-2]
    acc, rows = accumulation_dtype(query.dtype), query.shape[:-1]
    context = empty_rows(query, call.value.shape[-1])
    weights = query.new_empty((*rows, call.columns or Tk) if call.need_weights else (0,), dtype=acc)
    lse = query.new_empty(rows, dtype=acc)
    shape = (*rows, STATISTICS.value) if call.need_statistics else (0,)
    statistics = query.new_empty(shape, dtype=acc)
    launch_forward(
        call, context, weights if call.need_weights else None, lse,
        statistics if call.need_statistics else None,
    )  # fmt: skip
    return AttentionOutputs(context, weights, lse, statistics)


def scores(call: ScoreInputs) -> ScoreOutputs:
    """Run the operator ``scores``."""
    query, key, rows = call.query, call.key, call.query.shape[:-1]
    out = query.new_empty(*rows, key.shape[-2], dtype=accumulation_dtype(query.dtype))
    of_scores = AttentionInputs(query, key, key[..., :0], call.score_vector, score=call.score)
    launch_forward(of_scores, None, out, out.new_empty(rows))
    return ScoreOutputs(out)


def _additive_gradients(call: AttentionBackward, ds: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Launch :func:`_additive_gradient` for queries and keys; return partial weight gradients.

    The partial sums ``[B, H, blocks, A]`` are computed if the gradients of keys are needed.
    """
    query, key, _, score_vector, lengths, bounds = _prepare(call)
    (B, H, Tq, A), Tk, W = query.shape, key.shape[2], call.weights.shape[-1]
    factored = call.score == "tanh" and ds.dtype == torch.float32
    BQ, BK = (2 if T <= 2 else _block(T, 32) for T in (Tq, Tk))
    BA = _block(A, 64 if factored else 32)
    of_queries = of_keys = None
    if factored:
        e_q, range_q = _exponentials_of(query, score_vector, None, BQ, transposed=False)
        e_k, range_k = _exponentials_of(key, score_vector, lengths, BK, transposed=False)
        of_queries, of_keys = (e_q, e_k, range_q, range_k), (e_k, e_q, range_k, range_q)
    parts = ds.new_empty((B, H, triton.cdiv(Tq, BQ), A))
    options = {
        "SCORE": call.score,
        "COMPACT": call.columns > 0,
        "BA": BA,
        "num_warps": 4,
        **LAUNCH_OPTIONS,
    }
    q, k, w, span, scale = *map(_strided, (query, key, score_vector, bounds)), _pair(call.scale)
    # With 168 registers three programs fit on a multiprocessor, with 128 four. With spans, 128
    # would spill.
    most = (168, 128 if bounds is None else None) if factored else (None, None)
    over_keys, over_queries = map(_registers, most)
    _additive_gradient[(B * H * triton.cdiv(Tq, BQ), triton.cdiv(A, BA))](
        q, k, w, of_queries, ds, lengths, span, None,
        _strided(dq if call.need_grad_query else None), parts if call.need_grad_key else None,
        scale, (H, A), Tk, W, Tq, Tk, OVER_KEYS=True, BX=BQ, BY=BK, **options, **over_keys,
    )  # fmt: skip
    if call.need_grad_key:
        rows = _rows_of_keys(bounds, call.columns, B, H, Tk, BK)
        _additive_gradient[(B * H * triton.cdiv(Tk, BK), triton.cdiv(A, BA))](
            k, q, w, of_keys, ds, lengths, span, rows, _strided(dk), None, scale,
            (H, A), Tk, W, Tk, Tq, OVER_KEYS=False, BX=BK, BY=BQ, **options, **over_queries,
        )  # fmt: skip
    return parts


def backward(call: AttentionBackward) -> AttentionGradients:
    """Run the operator ``attention_backward``."""
    _check_normalisation(call)
    scale, columns = call.scale, call.columns
    weights, grad_score, grad_log_sum_exp = call.weights, call.grad_score, call.grad_log_sum_exp

    def empty(needed: bool, x: Tensor) -> Tensor:
        return empty_rows(x) if needed else x.new_empty(0)

    need_grad_query, need_grad_key = call.need_grad_query, call.need_grad_key
    grad_query = empty(need_grad_query, call.query)
    grad_key, grad_value = empty(need_grad_key, call.key), empty(need_grad_key, call.value)
    grad_score_vector = call.query.new_empty(0)
    ds = torch.empty_like(weights) if grad_score is None else grad_score.contiguous()
    query, key, value, _, lengths, bounds = _prepare(call)
    grad_context = _heads(call.grad_context)
    dq, dk, dv = _heads(grad_query), _heads(grad_key), _heads(grad_value)
    (B, H, Tq, _), (Tk, Dv), W = query.shape, value.shape[2:], weights.shape[-1]
    BQ = _shorter(_block(Tq, _tile(64, bounds, columns)), Tq, B * H, query.device)
    BK, BV = _block(Tk, 32), _block(Dv, _depth(query.dtype))
    seen = (lengths, bounds, columns)
    with torch.cuda.device_of(query):
        if grad_score is None:
            of_product = _strided(grad_context), _strided(value)
            if _by_library(query.dtype, bounds, Tq):
                _multiply_all(_matrices(grad_context), _matrices(value).mT, _heads(ds))
                of_product, (BQ, BK) = (None, None), SUMS
            _score_gradient[(B * H * triton.cdiv(Tq, BQ),)](
                of_product[0], *map(_contiguous, (call.grad_weights, grad_log_sum_exp)),
                of_product[1], weights, lengths, _strided(bounds), ds, (H, Dv), Tq, Tk, W,
                COMPACT=columns > 0, BQ=BQ, BK=BK, BV=BV, num_warps=8, **LAUNCH_OPTIONS,
            )  # fmt: skip
        if need_grad_key:
            _multiply(
                weights, grad_context, *seen, dv, 1.0, over_keys=False, ignore_nonfinite=False
            )
        if call.score_vector is None:
            if need_grad_query:
                _multiply(ds, key, *seen, dq, scale, over_keys=True, ignore_nonfinite=True)
            if need_grad_key:
                _multiply(ds, query, *seen, dk, scale, over_keys=False, ignore_nonfinite=True)
        elif need_grad_query or need_grad_key:
            parts = _additive_gradients(call, ds, dq, dk)
            if need_grad_key:
                shared = (0, 2) if call.score_vector.dim() == 2 else (0, 1, 2)
                grad_score_vector = parts.sum(shared).to(query.dtype)
    keep_score = call.need_grad_score and grad_score is None
    return AttentionGradients(
        grad_query, grad_key, grad_value, grad_score_vector, ds if keep_score else ds.new_empty(0)
    )
