"""The pointer-generator's distribution in Triton: one program for every row.

    S = softmax(logits),  p = sigmoid(gate),  C_w = Σ of the weights of the keys whose word is w
    P_w = p S_w + (1 − p) C_w,  or log P_w

A row is a sweep over the vocabulary as if nothing were copied. Then the words of the source are
corrected. A first kernel sorts the keys of each sequence by their words, so a row adds the weights
of a word's keys in a fixed order, without atomic additions. These few hundred results are computed
in float64, because in log space differences of large logarithms are exponents.

Names: as in :mod:`attnfast.kernels.attention`; ``w`` is a word, ``i`` a key in the order of the
words, ``k`` one of a word's keys.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attnfast.kernels.attention import LAUNCH_OPTIONS, LENGTHS, _strided

from attnfast.ops.copying import LOWEST as _LOWEST
from attnfast.ops.copying import MAX_LOG_GRADIENT as _MAX_LOG_GRADIENT
from attnfast.ops.copying import CopyBackward, CopyGradients, CopyInputs, CopyOutputs
from attnfast.ops.operators import accumulation_dtype

MAX_LOG_GRADIENT = tl.constexpr(float(_MAX_LOG_GRADIENT))
LOWEST = tl.constexpr(_LOWEST)
SLIGHT = tl.constexpr(math.exp(-_MAX_LOG_GRADIENT))
BLOCK = 2048  # words of the vocabulary at a time
WORDS = 256  # words of the source at a time: one for each thread
KEYS = 4  # keys of a word at a time
SORT_BLOCK = 32  # keys that a program sorts


@triton.jit
def _exp(b_x):
    """e^x in float64, at most e^MAX_LOG_GRADIENT."""
    return tl.exp(tl.minimum(b_x, MAX_LOG_GRADIENT, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _gate(p_gate):
    """p, 1 − p and their logarithms, float64."""
    g = tl.load(p_gate).to(tl.float64)
    e = tl.exp(-tl.abs(g))
    near, far, log_sum = 1 / (1 + e), e / (1 + e), tl.log(1 + e)
    p, q = tl.where(g < 0, far, near), tl.where(g < 0, near, far)
    return p, q, tl.where(g < 0, g, 0.0) - log_sum, tl.where(g < 0, 0.0, -g) - log_sum


@triton.jit(do_not_specialize=LENGTHS)
def _sort_keys(p_source, p_keys, p_counts, Tk, BI: tl.constexpr):
    """Sort the keys of each sequence by word: store them, and each word's number of keys.

    A key's position is the number of keys that precede it. The number of keys is stored at the
    word's first key, 0 at the others.
    """
    parts = tl.cdiv(Tk, BI)
    offset = (tl.program_id(0) // parts).to(tl.int64) * Tk
    o_i = tl.program_id(0) % parts * BI + tl.arange(0, BI)
    m_i = o_i < Tk
    b_w = tl.load(p_source + offset + o_i, mask=m_i, other=0)[:, None]
    b_smaller = tl.zeros([BI, BI], tl.int32)
    b_before, b_same = b_smaller, b_smaller
    for j in range(0, Tk, BI):
        o_j = (j + tl.arange(0, BI))[None, :]
        b_other = tl.load(p_source + offset + o_j, mask=o_j < Tk, other=0)
        m_same = (b_other == b_w) & (o_j < Tk)
        b_smaller += ((b_other < b_w) & (o_j < Tk)).to(tl.int32)
        b_before += (m_same & (o_j < o_i[:, None])).to(tl.int32)
        b_same += m_same.to(tl.int32)
    b_smaller, b_before, b_same = tl.sum(b_smaller, 1), tl.sum(b_before, 1), tl.sum(b_same, 1)
    o_sorted = offset + b_smaller + b_before
    tl.store(p_keys + o_sorted, o_i, mask=m_i)
    tl.store(p_counts + o_sorted, tl.where(b_before == 0, b_same, 0), mask=m_i)


@triton.jit
def _words(p_source, p_weights, p_keys, p_counts, i, Tk, BI: tl.constexpr, BK: tl.constexpr):
    """Return the words whose first sorted keys are i to i + BI − 1, −1 where there is none.

    Return also each word's number of keys and the sum of their weights.
    """
    o_i = i + tl.arange(0, BI)
    b_count = tl.load(p_counts + o_i, mask=o_i < Tk, other=0)
    b_first = tl.load(p_keys + o_i, mask=b_count > 0, other=0)
    b_w = tl.load(p_source + b_first, mask=b_count > 0, other=-1).to(tl.int64)
    b_mass = tl.zeros([BI], tl.float64)
    for k in range(0, tl.max(b_count, 0), BK):
        b_key, m_k = _keys(p_keys, b_count, i, k, BI, BK)
        b_mass += tl.sum(tl.load(p_weights + b_key, mask=m_k, other=0).to(tl.float64), 1)
    return b_w, b_count, b_mass


@triton.jit
def _keys(p_keys, b_count, i, k, BI: tl.constexpr, BK: tl.constexpr):
    """Return keys k to k + BK − 1 of BI words, and which of them exist."""
    o_i, o_k = i + tl.arange(0, BI), k + tl.arange(0, BK)
    m_k = o_k[None, :] < b_count[:, None]
    return tl.load(p_keys + o_i[:, None] + o_k[None, :], mask=m_k, other=0), m_k


@triton.jit
def _word(p_x, s_x, b_w, b_mass, lse, log_p, log_q, V):
    """Return log P of words, the generated share of P, q / P, the logit, and the copied mask.

    A word that cannot be generated has logit −inf. The mask is False if its mass is negligible.
    """
    b_x = tl.load(p_x + b_w * s_x, mask=(b_w >= 0) & (b_w < V), other=-float("inf"))
    b_x = b_x.to(tl.float64)
    m_x = b_x != -float("inf")
    b_e = tl.where(m_x, tl.where(m_x, b_x, 0.0) - tl.where(m_x, lse, 0.0) + log_p, -float("inf"))
    b_d = b_e - log_q
    b_u = _exp(b_d)
    m_copied = b_mass >= SLIGHT
    m_copied = m_copied | (b_mass != b_mass)
    b_ratio = 1 / tl.where(m_copied, b_mass + b_u, 1.0)
    b_part = tl.where(m_copied, b_u * b_ratio, m_x.to(tl.float64))
    b_log = tl.where(
        b_d > 0,
        b_e + tl.log(1 + b_mass * _exp(-b_d)),
        log_q + tl.log(tl.where(m_copied, b_mass + b_u, 1.0)),
    )
    b_log = tl.where(m_copied, b_log, tl.where(m_x, b_e, LOWEST))
    b_ratio = tl.where(m_copied, b_ratio, tl.where(m_x, _exp(tl.where(m_x, -b_d, 0.0)), 0.0))
    return b_log, b_part, b_ratio, b_x, m_copied


@triton.jit
def _row(x, i_b, i_t):
    """Return the pointer to a row of a tensor ``(pointer, strides)``."""
    return x[0] + i_b * x[1][0] + i_t * x[1][1]


@triton.jit
def _log_sum_exp(p_x, s_x, V, BV: tl.constexpr, acc: tl.constexpr):
    """Return the largest logit of a row, 0 if none is finite, and Σ e^{x − largest}."""
    b_m = tl.full([BV], -float("inf"), acc)
    b_l = tl.zeros([BV], acc)
    for v in range(0, V, BV):
        o_v = v + tl.arange(0, BV)
        b_x = tl.load(p_x + o_v.to(tl.int64) * s_x, mask=o_v < V, other=-float("inf")).to(acc)
        b_max = tl.maximum(b_m, b_x)
        b_shift = tl.where(b_max == -float("inf"), 0, b_max)
        b_l = b_l * tl.exp(b_m - b_shift) + tl.exp(b_x - b_shift)
        b_m = b_max
    top = tl.max(b_m, 0)
    shift = tl.where(top == -float("inf"), 0, top)
    return shift, tl.sum(b_l * tl.exp(b_m - shift), 0)


@triton.jit(do_not_specialize=(*LENGTHS, "X"))
def _distribution(
    logits, p_weights, p_source, p_keys, p_counts, p_gate, p_out, p_lse, V, Tq, Tk, X,
    LOG: tl.constexpr, BV: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """The distribution of a row, and the log-sum-exp of its logits."""
    i_row = tl.program_id(0).to(tl.int64)
    i_b, i_t = i_row // Tq, i_row % Tq
    p_x, s_x = _row(logits, i_b, i_t), logits[1][2]
    p_weights += i_row * Tk
    p_source, p_keys, p_counts = p_source + i_b * Tk, p_keys + i_b * Tk, p_counts + i_b * Tk
    p_out += i_row * (V + X)
    p, q, log_p, log_q = _gate(p_gate + i_row)

    shift, total = _log_sum_exp(p_x, s_x, V, BV, acc)
    none = total == 0
    log_total = tl.log(tl.where(none, 1, total).to(tl.float64))
    lse = tl.where(none, -float("inf"), shift.to(tl.float64) + log_total)
    tl.store(p_lse + i_row, lse)

    low = (log_p - log_total).to(acc)
    factor = tl.where(none, 0.0, p / tl.where(none, 1, total)).to(acc)
    for v in range(0, V + X, BV):
        o_v = v + tl.arange(0, BV)
        b_x = tl.load(p_x + o_v.to(tl.int64) * s_x, mask=o_v < V, other=-float("inf")).to(acc)
        if LOG:
            b_out = tl.where(b_x == -float("inf"), LOWEST, b_x - shift + low)
        else:
            b_out = tl.exp(b_x - shift) * factor
        tl.store(p_out + o_v, b_out, mask=o_v < V + X)
    tl.debug_barrier()  # the following stores overwrite values stored by other threads
    for i in range(0, Tk, BI):
        b_w, _, b_mass = _words(p_source, p_weights, p_keys, p_counts, i, Tk, BI, BK)
        m_w = (b_w >= 0) & (b_w < V + X)
        if LOG:
            b_out, _, _, _, _ = _word(p_x, s_x, b_w, b_mass, lse, log_p, log_q, V)
        else:
            p_w = p_x + b_w * s_x
            b_x = tl.load(p_w, mask=m_w & (b_w < V), other=-float("inf")).to(acc)
            b_out = (tl.exp(b_x - shift) * factor).to(tl.float64) + q * b_mass
        tl.store(p_out + b_w, b_out.to(acc), mask=m_w)


@triton.jit
def _vocabulary_terms(p_grad, s_grad, p_x, s_x, v, V, BV: tl.constexpr, acc: tl.constexpr):
    """Load G and the logits of BV words of the vocabulary."""
    o_v = v + tl.arange(0, BV)
    b_x = tl.load(p_x + o_v.to(tl.int64) * s_x, mask=o_v < V, other=-float("inf")).to(acc)
    b_g = tl.load(p_grad + o_v.to(tl.int64) * s_grad, mask=o_v < V, other=0).to(acc)
    return o_v, b_x, b_g


@triton.jit(do_not_specialize=(*LENGTHS, "X"))
def _distribution_gradient(
    grad, logits, p_weights, p_source, p_keys, p_counts, p_gate, p_lse,
    p_dx, p_dweights, p_dgate, V, Tq, Tk, X,
    LOG: tl.constexpr, BV: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr, acc: tl.constexpr,
    HIGHEST: tl.constexpr,
):  # fmt: skip
    """Gradients of a row, G that of its result; csrc/cpu/copying_kernel.cpp has the formulas."""
    i_row = tl.program_id(0).to(tl.int64)
    i_b, i_t = i_row // Tq, i_row % Tq
    p_grad, s_grad = _row(grad, i_b, i_t), grad[1][2]
    p_x, s_x = _row(logits, i_b, i_t), logits[1][2]
    p_weights += i_row * Tk
    p_source, p_keys, p_counts = p_source + i_b * Tk, p_keys + i_b * Tk, p_counts + i_b * Tk
    p_dx += i_row * V
    p_dweights += i_row * Tk
    p, q, log_p, log_q = _gate(p_gate + i_row)
    lse = tl.load(p_lse + i_row)
    none = lse == -float("inf")
    high = tl.where(none, 0.0, lse).to(acc)
    low = tl.where(none, 0.0, lse - high.to(tl.float64)).to(acc)

    # Σ S G, or Σ G, of the words that can be generated
    b_sum = tl.zeros([BV], acc)
    for v in range(0, V, BV):
        o_v, b_x, b_g = _vocabulary_terms(p_grad, s_grad, p_x, s_x, v, V, BV, acc)
        m_x = b_x != -float("inf")
        if LOG:
            b_sum += tl.where(m_x, b_g, 0)
        else:
            b_sum += tl.where(m_x, tl.exp(b_x - high - low) * b_g, 0)
    total = tl.sum(b_sum, 0).to(tl.float64)

    every = total  # Σ G of the possible words
    b_minus, b_plus = tl.zeros([BI], tl.float64), tl.zeros([BI], tl.float64)
    for i in range(0, Tk, BI):
        b_w, b_count, b_mass = _words(p_source, p_weights, p_keys, p_counts, i, Tk, BI, BK)
        m_w = (b_w >= 0) & (b_w < V + X)
        if LOG:
            _, _, b_ratio, b_x, m_copied = _word(p_x, s_x, b_w, b_mass, lse, log_p, log_q, V)
        else:
            b_ratio = q
            b_x = tl.zeros([BI], tl.float64)
            m_copied = m_w
        b_g = tl.load(p_grad + b_w * s_grad, mask=m_w, other=0).to(tl.float64)
        b_da = b_g * b_ratio
        b_held = tl.where(b_da > HIGHEST, HIGHEST, tl.where(b_da < -HIGHEST, -HIGHEST, b_da))
        for k in range(0, tl.max(b_count, 0), BK):
            b_key, m_k = _keys(p_keys, b_count, i, k, BI, BK)
            tl.store(p_dweights + b_key, b_held.to(acc)[:, None], mask=m_k)
        b_copied = tl.where((b_da == 0) | (m_copied == 0), 0.0, b_mass * (b_da if LOG else b_g))
        m_x = b_x != -float("inf")
        b_minus += tl.where(m_x, b_copied, 0.0)
        b_plus += tl.where(m_x, 0.0, b_copied)
    if LOG:
        total -= tl.sum(b_minus, 0)
        every += tl.sum(b_plus, 0)
        dgate = total - p * every
    else:
        dgate = p * q * (total - tl.sum(b_minus, 0))
    tl.store(p_dgate + i_row, dgate.to(acc))

    for v in range(0, V, BV):
        o_v, b_x, b_g = _vocabulary_terms(p_grad, s_grad, p_x, s_x, v, V, BV, acc)
        b_s = tl.exp(b_x - high - low)
        b_dx = b_g - b_s * total.to(acc) if LOG else b_s * p.to(acc) * (b_g - total.to(acc))
        tl.store(p_dx + o_v, tl.where(b_x == -float("inf"), 0, b_dx), mask=o_v < V)
    if LOG:
        tl.debug_barrier()
        for i in range(0, Tk, BI):
            b_w, _, b_mass = _words(p_source, p_weights, p_keys, p_counts, i, Tk, BI, BK)
            _, b_part, _, b_x, _ = _word(p_x, s_x, b_w, b_mass, lse, log_p, log_q, V)
            m_w = b_x != -float("inf")
            b_g = tl.load(p_grad + b_w * s_grad, mask=m_w, other=0).to(tl.float64)
            b_s = tl.exp(tl.where(m_w, b_x, 0.0) - tl.where(none, 0.0, lse))
            b_dx = tl.where(m_w, b_g * b_part - b_s * total, 0.0)
            tl.store(p_dx + b_w, b_dx.to(acc), mask=m_w)


def _options(x: torch.Tensor) -> dict:
    acc = tl.float64 if accumulation_dtype(x.dtype) == torch.float64 else tl.float32
    return {
        "BV": BLOCK, "BI": WORDS, "BK": KEYS, "acc": acc, "num_warps": 8, **LAUNCH_OPTIONS
    }  # fmt: skip


def _sort_by_word(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the words, the keys sorted by their words, and the number of keys of each word."""
    source = source.contiguous()
    (B, Tk), keys = source.shape, torch.empty_like(source, dtype=torch.int32)
    counts = torch.empty_like(keys)
    if source.numel():
        _sort_keys[(B * triton.cdiv(Tk, SORT_BLOCK),)](
            source, keys, counts, Tk, BI=SORT_BLOCK, num_warps=4, **LAUNCH_OPTIONS
        )
    return source, keys, counts


def forward(call: CopyInputs) -> CopyOutputs:
    """Run the operator ``copy_distribution``."""
    logits, weights, source, gate, num_oov, log = call
    (B, Tq, V), Tk = logits.shape, weights.shape[-1]
    out = logits.new_empty((B, Tq, V + num_oov))
    lse = logits.new_empty((B, Tq), dtype=torch.float64)
    if B * Tq:
        with torch.cuda.device_of(logits):
            _distribution[(B * Tq,)](
                _strided(logits), weights.contiguous(), *_sort_by_word(source), gate.contiguous(),
                out, lse, V, Tq, Tk, num_oov, LOG=log, **_options(logits),
            )  # fmt: skip
    return CopyOutputs(out, lse)


def backward(call: CopyBackward) -> CopyGradients:
    """Run the operator ``copy_distribution_backward``."""
    grad, logits, weights, source, gate, lse, num_oov, log = call
    (B, Tq, V), Tk = logits.shape, weights.shape[-1]
    grads = CopyGradients(*(x.new_empty(x.shape) for x in (logits, weights, gate)))
    half = logits.dtype in (torch.float16, torch.bfloat16)
    if B * Tq:
        with torch.cuda.device_of(logits):
            _distribution_gradient[(B * Tq,)](
                _strided(grad), _strided(logits), weights.contiguous(), *_sort_by_word(source),
                gate.contiguous(), lse.contiguous(), *grads,
                V, Tq, Tk, num_oov,
                LOG=log, HIGHEST=65504.0 if half else float("inf"), **_options(logits),
            )  # fmt: skip
    return grads
