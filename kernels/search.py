"""The steps of a search in Triton: scores of words, the best hypotheses, and the words of these.

    log P = x − log Σ e^x over the words of ``word_mask``; −inf for a word that a rule forbids
    total of a hypothesis + log P, of the K hypotheses of a sentence: the 2K best end or go on
    words of a hypothesis, from the last to the first

Only indices are reordered: every step stores for each row the word, its score, and the slot that
the hypothesis continues, its parent. R rows are those of K hypotheses for each of B sentences.

Names: as in :mod:`attnfast.kernels.attention`; ``w`` is a word of the vocabulary, ``c`` a
candidate, ``r`` the rank of one, ``k`` a slot, or a key of the attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from attnfast.kernels.attention import LAUNCH_OPTIONS, LENGTHS, _pair, _scalar
from torch import Tensor

from attnfast.ops.search import LEAST_COVERAGE as _LEAST_COVERAGE
from attnfast.ops.search import SearchInputs

LEAST_COVERAGE = tl.constexpr(_LEAST_COVERAGE)
#: The largest shifts in float32 and float64: finite, so that ∞ less a shift is ∞ instead of NaN.
MOST_SHIFT = tl.constexpr(3e38)
MOST_SHIFT_OF_64 = tl.constexpr(1e308)
#: The most words of the vocabulary that a program reads at a time.
MOST_WORDS = 4096


@triton.jit
def _load_scores(p_x, p_mask, o_w, m_w, acc: tl.constexpr):
    """Return the scores of words, −inf for those that the mask leaves out."""
    b_x = tl.load(p_x + o_w, mask=m_w, other=-float("inf")).to(acc)
    if p_mask is not None:
        b_x = tl.where(tl.load(p_mask + o_w, mask=m_w, other=0) != 0, b_x, -float("inf"))
    return b_x


@triton.jit
def _forbid_repeats(p_x, p_history, t, n, BT: tl.constexpr):
    """Store −inf as the scores of words that would repeat an n-gram of the first ``t`` words."""
    for i in range(0, t, BT):
        o_i = i + tl.arange(0, BT)
        m_i = o_i + n <= t
        for j in range(n - 1):
            last = tl.load(p_history + t - n + 1 + j, mask=t >= n, other=-1)
            m_i = m_i & (tl.load(p_history + o_i + j, mask=m_i, other=-1) == last)
        b_word = tl.load(p_history + o_i + n - 1, mask=m_i, other=0)
        tl.store(p_x + b_word, tl.full([BT], -float("inf"), p_x.dtype.element_ty), mask=m_i)


@triton.jit(do_not_specialize=LENGTHS)
def _score_words(
    x, p_mask, s_mask, prefix, p_limits, p_t, p_history, p_lse, best, p_out, bonus, sizes, T, end,
    min_length, ngram, BEST: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Compute log P of the words that may follow a row, or store only its best candidates.

    A candidate has its score, plus ``bonus`` if its word is not the end, and its word: the best
    ``BEST`` of every ``BW`` words. In a row with NaN or infinity, ``lse`` is NaN.
    """
    acc: tl.constexpr = p_lse.dtype.element_ty
    MOST: tl.constexpr = MOST_SHIFT_OF_64 if acc == tl.float64 else MOST_SHIFT
    K, V = sizes
    i_row = tl.program_id(0).to(tl.int64)
    i_b, t = i_row // K, tl.load(p_t)
    p_x = x[0] + i_row * x[1]
    if p_mask is not None:
        p_mask += i_b * s_mask
    b_top = tl.full([BW], -float("inf"), acc)
    b_sum = tl.zeros([BW], acc)
    for w in range(0, V, BW):
        o_w = w + tl.arange(0, BW)
        b_x = _load_scores(p_x, p_mask, o_w, o_w < V, acc)
        b_max = tl.maximum(b_top, b_x)
        b_shift = tl.where(b_max == -float("inf"), 0, tl.minimum(b_max, MOST))
        b_sum = b_sum * tl.exp(b_top - b_shift) + tl.exp(b_x - b_shift)
        b_top = b_max
    top = tl.max(b_top, 0)
    shift = tl.where(top == -float("inf"), 0, tl.minimum(top, MOST))
    total = tl.sum(b_sum * tl.exp(b_top - shift), 0)
    lse = shift + tl.log(tl.where(total == 0, 1, total))
    lse = tl.where(total < float("inf"), lse, float("nan"))
    tl.store(p_lse + i_row, lse)

    forced = -1
    if prefix is not None:
        p_prefix, P = prefix
        forced = tl.load(p_prefix + i_b * P + t, mask=t < P, other=-1)
    is_last, is_short = tl.load(p_limits + i_b) <= t + 1, t < min_length
    if p_history is not None:
        tl.debug_barrier()
        if forced < 0:
            _forbid_repeats(p_x, p_history + i_row * T, t, ngram, 64)
        tl.debug_barrier()
    for w in range(0, V, BW):
        o_w = w + tl.arange(0, BW)
        b_x = _load_scores(p_x, p_mask, o_w, o_w < V, acc) - lse
        m_w = o_w < V
        if forced >= 0:
            m_w = m_w & (o_w == forced)
        else:
            m_w = m_w & ((o_w == end) | (is_last == 0)) & ((o_w != end) | (is_short == 0))
        b_x = tl.where(m_w, b_x, -float("inf"))
        if BEST == 0:
            tl.store(p_out + i_row * V + o_w, b_x, mask=o_w < V)
        else:
            p_best, p_word = best
            o_best = (i_row * tl.cdiv(V, BW) + w // BW) * BEST
            b_x = tl.where(b_x != b_x, -float("inf"), b_x)
            b_x += tl.where(o_w == end, 0, _scalar(bonus, acc))
            for r in range(BEST):
                score, index = tl.max(b_x, 0, return_indices=True)
                tl.store(p_best + o_best + r, score)
                tl.store(p_word + o_best + r, w + index)
                b_x = tl.where(o_w == w + index, -float("inf"), b_x)


@triton.jit
def _uncovered(p_covered, p_weights, p_exists, Tk, BK: tl.constexpr, acc: tl.constexpr):
    """Return Σ log min(covered + weights, 1) over the keys that exist."""
    b_sum = tl.zeros([BK], acc)
    for j in range(0, Tk, BK):
        o_k = j + tl.arange(0, BK)
        m_k = o_k < Tk
        b_c = tl.load(p_covered + o_k, mask=m_k, other=1)
        b_c += tl.load(p_weights + o_k, mask=m_k, other=0)
        b_log = tl.log(tl.minimum(tl.maximum(b_c, LEAST_COVERAGE), 1))
        m_k = m_k & (tl.load(p_exists + o_k, mask=m_k, other=0) != 0)
        b_sum += tl.where(m_k, b_log, 0)
    return tl.sum(b_sum, 0)


@triton.jit(do_not_specialize=(*LENGTHS, "R"))
def _continue_beam(
    x, p_lse, best, p_t, steps, row, sentence, final, covered, sizes, R, Tk, end, begin,
    length_penalty, coverage_penalty, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Choose the K hypotheses of a sentence after a step.

    ``steps`` are words, scores and parents of every step and row; ``row`` the total of a row, the
    row that it continues and the word that it reads; ``sentence`` whether it has ended, whether
    with NaN, how many finished, the best score of these, and the length of the others then;
    ``final`` the score, the parent and the score of the last word of what ends with a step.
    """
    acc: tl.constexpr = p_lse.dtype.element_ty
    p_best, p_word = best
    p_words, p_scores, p_parents = steps
    p_total, p_row, p_read = row
    p_ended, p_is_nan, p_num_finished, p_best_finished, p_length = sentence
    K, C = sizes
    i_b, t = tl.program_id(0).to(tl.int64), tl.load(p_t)
    first = i_b * K
    if tl.load(p_ended + i_b) == 0:
        o_c, o_r = tl.arange(0, BC), tl.arange(0, BR)
        b_old = tl.load(p_total + first + o_c // C, mask=o_c < K * C, other=-float("inf"))
        b_all = tl.load(p_best + first * C + o_c, mask=o_c < K * C, other=-float("inf")) + b_old
        b_old = tl.load(p_total + first + o_r, mask=o_r < K, other=-float("inf"))
        b_lse = tl.load(p_lse + first + o_r, mask=o_r < K, other=0)
        has_nan = tl.sum(((b_lse != b_lse) & (b_old > -float("inf"))).to(tl.int32), 0) > 0
        # [BR]: the 2K best
        b_best = tl.full([BR], -float("inf"), acc)
        b_from = tl.zeros([BR], tl.int32)
        for r in range(2 * K):
            total, index = tl.max(b_all, 0, return_indices=True)
            b_best = tl.where(o_r == r, total, b_best)
            b_from = tl.where(o_r == r, index, b_from)
            b_all = tl.where(o_c == index, -float("inf"), b_all)
        m_r = b_best > -float("inf")
        b_slot = b_from // C
        b_word = tl.load(p_word + first * C + b_from, mask=m_r, other=0).to(tl.int64)
        b_x = tl.load(x[0] + (first + b_slot) * x[1] + b_word, mask=m_r, other=0).to(acc)
        b_x -= tl.load(p_lse + first + b_slot, mask=m_r, other=0)
        m_end = m_r & (b_word == end)

        ratio = (t + 6).to(tl.float64) / 6
        norm = tl.exp(tl.log(ratio) * _scalar(length_penalty, tl.float64)).to(acc)
        b_final = b_best / norm
        if covered is not None:
            p_covered, p_weights, p_exists = covered
            p_exists += i_b * Tk
            for k in range(K):
                o_row = (first + k) * Tk
                b_lost = _uncovered(p_covered + o_row, p_weights + o_row, p_exists, Tk, BK, acc)
                b_final += tl.where(b_slot == k, _scalar(coverage_penalty, acc) * b_lost, 0)
        m_end_now = m_end & (o_r < K)
        b_final = tl.where(m_end_now, b_final, -float("inf"))
        num_finished = tl.load(p_num_finished + i_b) + tl.sum(m_end_now.to(tl.int64), 0)
        best_finished = tl.maximum(tl.load(p_best_finished + i_b), tl.max(b_final, 0))
        tl.debug_barrier()  # no thread stores what another has yet to load

        p_final, p_final_slot, p_final_score = final
        o_final = t * R + first + o_r
        tl.store(p_final + o_final, b_final, mask=o_r < K)
        b_end_slot = tl.where(m_end_now, b_slot, -1)
        tl.store(p_final_slot + o_final, b_end_slot.to(tl.int64), mask=o_r < K)
        tl.store(p_final_score + o_final, b_x, mask=o_r < K)
        tl.store(p_num_finished + i_b, num_finished)
        tl.store(p_best_finished + i_b, best_finished)

        m_on = m_r & (m_end == 0)
        b_at = tl.cumsum(m_on.to(tl.int32), 0) - 1
        m_on = m_on & (b_at < K)
        num_going = tl.sum(m_on.to(tl.int32), 0)
        largest = tl.max(tl.where(m_on, b_best, -float("inf")), 0)
        ends = (num_going == 0) | ((num_finished >= K) & (best_finished >= largest / norm))
        if ends | has_nan:
            tl.store(p_ended + i_b, 1)
            tl.store(p_is_nan + i_b, has_nan.to(tl.int8))
            tl.store(p_length + i_b, t)
        else:
            o_step = t * R + first
            m_none = (o_r < K) & (o_r >= num_going)
            tl.store(p_total + first + o_r, tl.full([BR], -float("inf"), acc), mask=m_none)
            tl.store(p_row + first + o_r, tl.zeros([BR], tl.int64) + first, mask=m_none)
            tl.store(p_read + first + o_r, tl.zeros([BR], tl.int64) + begin, mask=m_none)
            tl.store(p_parents + o_step + o_r, tl.zeros([BR], tl.int64), mask=m_none)
            tl.store(p_total + first + b_at, b_best, mask=m_on)
            tl.store(p_row + first + b_at, first + b_slot, mask=m_on)
            tl.store(p_read + first + b_at, b_word, mask=m_on)
            tl.store(p_words + o_step + b_at, b_word, mask=m_on)
            tl.store(p_scores + o_step + b_at, b_x, mask=m_on)
            tl.store(p_parents + o_step + b_at, b_slot.to(tl.int64), mask=m_on)
            if covered is not None:
                for j in range(0, Tk, BK):
                    o_k = j + tl.arange(0, BK)
                    o_old = (first + b_slot)[:, None] * Tk + o_k[None, :]
                    m_k = m_on[:, None] & (o_k < Tk)[None, :]
                    b_c = tl.load(p_covered + o_old, mask=m_k, other=0)
                    b_c += tl.load(p_weights + o_old, mask=m_k, other=0)
                    tl.debug_barrier()
                    o_new = (first + b_at)[:, None] * Tk + o_k[None, :]
                    tl.store(p_covered + o_new, b_c, mask=m_k)


@triton.jit(do_not_specialize=(*LENGTHS, "R"))
def _trace(
    steps, of_weights, p_lengths, p_slots, last, out, sizes, R, T, Tk, end, ENDS: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Trace the words, scores and weights of a hypothesis back from its slot at its last step.

    ``last`` is the score of the end, which no step has, if ``ENDS`` and where it is not NaN.
    """
    p_words, p_scores, p_parents = steps
    p_out, p_out_scores = out
    N, K = sizes
    i_out = tl.program_id(0).to(tl.int64)
    first = i_out // N * K
    slot, length = tl.load(p_slots + i_out), tl.load(p_lengths + i_out)
    for back in range(length):
        s = length - 1 - back
        o_at = s * R + first + slot
        word, score = tl.load(p_words + o_at), tl.load(p_scores + o_at)
        parent = tl.load(p_parents + o_at)
        if ENDS:
            end_score = tl.load(last + i_out)
            is_end = (back == 0) & (end_score == end_score)
            word, score = tl.where(is_end, end, word), tl.where(is_end, end_score, score)
            parent = tl.where(is_end, slot, parent)
        slot = parent
        tl.store(p_out + i_out * T + s, word)
        tl.store(p_out_scores + i_out * T + s, score)
        if of_weights is not None:
            p_weights, p_out_weights = of_weights
            for j in range(0, Tk, BK):
                o_k = j + tl.arange(0, BK)
                b_a = tl.load(p_weights + (s * R + first + slot) * Tk + o_k, mask=o_k < Tk)
                tl.store(p_out_weights + (i_out * T + s) * Tk + o_k, b_a, mask=o_k < Tk)


class Steps(NamedTuple):
    """The words of every step.

    Attributes:
        words, scores: of every step and row, ``[T, R]``.
        parents: the slots that they continue, ``[T, R]``.
        t: the number of steps so far, ``[1]``.
    """

    words: Tensor
    scores: Tensor
    parents: Tensor
    t: Tensor


class Beam(NamedTuple):
    """The hypotheses of a beam search.

    Attributes:
        total: the score of the hypothesis in each row so far, ``[R]``.
        row: the row that it continues, ``[R]``.
        read: the word that it reads next, ``[R]``.
        ended: whether a sentence has ended, ``[B]``.
        is_nan: whether with NaN, ``[B]``.
        num_finished: the number of its finished hypotheses, ``[B]``.
        best_finished: the best score of these, ``[B]``.
        length: of its unfinished hypotheses when it ended, ``[B]``.
        final: the scores of those that finish with a step, ``[T, B, K]``.
        final_slot: the slots that these continue, −1 for those that do not finish, ``[T, B, K]``.
        final_score: the scores of their ends, ``[T, B, K]``.
        covered: the sum of a row's attention weights, ``[R, Tk]``, for a coverage penalty.
        exists: whether a key exists, ``[B, Tk]``.
    """

    total: Tensor
    row: Tensor
    read: Tensor
    ended: Tensor
    is_nan: Tensor
    num_finished: Tensor
    best_finished: Tensor
    length: Tensor
    final: Tensor
    final_slot: Tensor
    final_score: Tensor
    covered: Tensor | None
    exists: Tensor | None


def _block_words(V: int, K: int = 0) -> int:
    """Return the size of a block: a program chooses among 2**16 candidates of K rows at most."""
    words = min(triton.next_power_of_2(V), MOST_WORDS)
    while K * 2 * K * triton.cdiv(V, words) > 2**16 and words < V:
        words *= 2
    return words


def find_candidates(
    logits: Tensor, call: SearchInputs, steps: Steps, history: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Σ e^x ``[R]``, and scores and words of every row's best candidates, ``[R, C]``.

    ``history [R, T]`` has the words of each hypothesis so far, if n-grams may not repeat: logits of
    words that would repeat one become −∞.
    """
    (R, V), BW = logits.shape, _block_words(logits.shape[1], call.beam)
    best = min(2 * call.beam, BW)  # of every block
    scores = logits.new_empty(R, triton.cdiv(V, BW) * best)
    words = torch.empty_like(scores, dtype=torch.int32)
    given = logits, call, steps, history, BW, best, (scores, words), None
    return _score(*given), scores, words


def log_probs(
    logits: Tensor, call: SearchInputs, steps: Steps, history: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return log Σ e^x ``[R]`` and log P ``[R, V]``; ``history`` as in :func:`find_candidates`."""
    out = torch.empty_like(logits)
    BW = _block_words(logits.shape[1])
    return _score(logits, call, steps, history, BW, 0, None, out), out


def _score(
    logits: Tensor, call: SearchInputs, steps: Steps, history: Tensor | None, BW: int, best: int,
    candidates: tuple[Tensor, Tensor] | None, out: Tensor | None,
) -> Tensor:  # fmt: skip
    (R, V), lse = logits.shape, logits.new_empty(len(logits))
    mask, prefix = call.word_mask, None
    if call.prefix is not None and call.prefix.shape[1]:
        prefix = call.prefix.contiguous(), call.prefix.shape[1]
    with torch.cuda.device_of(logits):
        _score_words[(R,)](
            (logits, logits.stride(0)), mask,
            0 if mask is None or len(mask) == 1 else mask.stride(0), prefix,
            call.limits.contiguous(), steps.t, history, lse, candidates, out,
            _pair(call.length_bonus), (call.beam, V), len(steps.words), call.end, call.min_length,
            call.no_repeat_ngram, BEST=best, BW=BW, num_warps=8 if BW > 1024 else 4,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
    return lse


def continue_beam(
    logits: Tensor, candidates: tuple[Tensor, ...], weights: Tensor, call: SearchInputs,
    steps: Steps, beam: Beam,
) -> None:  # fmt: skip
    """Choose the hypotheses after a step among :func:`find_candidates`', and store them."""
    lse, scores, words = candidates
    K, C, (R, Tk) = call.beam, scores.shape[1], weights.shape
    covered = None if beam.covered is None else (beam.covered, weights, beam.exists)
    BC = triton.next_power_of_2(K * C)
    with torch.cuda.device_of(logits):
        _continue_beam[(R // K,)](
            (logits, logits.stride(0)), lse, (scores, words), steps.t, steps[:3],
            (beam.total, beam.row, beam.read),
            (beam.ended, beam.is_nan, beam.num_finished, beam.best_finished, beam.length),
            (beam.final, beam.final_slot, beam.final_score), covered, (K, C), R, Tk, call.end,
            call.begin, _pair(call.length_penalty), _pair(call.coverage_penalty), BC=BC,
            BR=triton.next_power_of_2(2 * K), BK=32,
            num_warps=max(1, min(16, BC // 256)), **LAUNCH_OPTIONS,
        )  # fmt: skip


def trace(
    steps: Steps, weights: Tensor | None, lengths: Tensor, slots: Tensor, last: Tensor | None,
    call: SearchInputs,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the words ``[B, N, T]`` of hypotheses, their scores and attention weights.

    Args:
        steps: the words of all steps.
        weights: the attention weights of all steps, ``[T, R, Tk]``, or None.
        lengths: ``[B, N]``, the ends included.
        slots: of the hypotheses at their last steps, ``[B, N]``, or, of one with an end, the slot
            that the end continues.
        last: the scores of ends, ``[B, N]``, NaN for a hypothesis without one.
        call: of the search.
    """
    (B, N), (T, R) = lengths.shape, steps.words.shape
    words, scores = (x.new_zeros(B, N, T) for x in steps[:2])
    Tk = 0 if weights is None else weights.shape[-1]
    shape = (0,) if weights is None else (B, N, T, Tk)
    traced = steps.scores.new_zeros(shape)
    with torch.cuda.device_of(words):
        _trace[(B * N,)](
            steps[:3], None if weights is None else (weights, traced), lengths.contiguous(),
            slots.contiguous(), None if last is None else last.contiguous(), (words, scores),
            (N, call.beam), R, T, Tk, call.end, ENDS=last is not None, BK=128, num_warps=1,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
    return words, scores, traced
