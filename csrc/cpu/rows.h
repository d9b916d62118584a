// Code common to the passes: the item of work, and rows of scores that become weights.
#pragma once
#include "attention.h"
#include "product.h"

namespace attnfast {
namespace VARIANT {
namespace {

using cpu::Plan;

// A buffer that is handed out piece by piece.
template <class C>
struct Scratch {
  C* next;
  C* take(int64_t n) {
    C* p = next;
    next += round_up(n, 64 / sizeof(C));
    return p;
  }
};

int64_t parts(int64_t n, int64_t size) { return n > size ? (n + size - 1) / size : 1; }

int64_t keys_seen(const Problem& a, int64_t b) {
  const int64_t n = a.lengths ? a.lengths[b] : a.Tk;
  return n < 0 ? 0 : min(n, a.Tk);
}

int64_t row_blocks(const Problem& a, const Plan& plan) { return (a.Tq + plan.rows - 1) / plan.rows; }

// Return the parts of a (sequence, head) in grad_inputs: slices of the features, and of the values'
// columns.
int64_t feature_slices(const Problem& a, const Plan& plan) { return parts(a.A, plan.columns); }
int64_t value_slices(const Backward& a, const Plan& plan) {
  return a.grad_value.data ? parts(a.Dv, plan.columns) : 0;
}

// Item `index` of a pass: rows of a (sequence, head) and one part of its keys or columns.
struct Item {
  int64_t b, h, bh, row, rows, part, seen;

  // Blocks of rows, each in `parts` parts.
  Item(const Problem& a, const Plan& plan, int64_t index, int64_t parts)
      : Item(a, index / parts / row_blocks(a, plan)) {
    part = index % parts;
    row = index / parts % row_blocks(a, plan) * plan.rows;
    rows = min(plan.rows, a.Tq - row);
  }
  // All rows.
  Item(const Problem& a, int64_t bh)
      : b(bh / a.H), h(bh % a.H), bh(bh), row(0), rows(a.Tq), part(0), seen(keys_seen(a, b)) {}
};

template <class T>
T* at(const View& v, const Item& i, int64_t row) {
  return static_cast<T*>(v.data) + i.b * v.batch + i.h * v.head + row * v.row;
}

template <class C>
int64_t padded(int64_t width) {
  return round_up(width, 2 * Vector<C>::width);
}

// Return the number of elements of a thread's scratch for an item's scores, 0 if these are in a
// tensor.
template <class C>
int64_t scores_scratch(const Problem& a, const Plan& plan) {
  return plan.scores.data || a.key_bounds.data ? 0 : round_up(plan.rows * a.W, 64 / sizeof(C));
}
template <class C>
Rows<C> scores_of(const Problem& a, const Plan& plan, const Item& item, Scratch<C>& scratch) {
  if (plan.scores.data) return {at<C>(plan.scores, item, item.row), a.W};
  return {scratch.take(scores_scratch<C>(a, plan)), a.W};
}

// Set the elements of a row outside [from, to) to 0.
template <class C>
void clear_outside(C* row, int64_t n, int64_t from, int64_t to) {
  for (int64_t j = 0; j < min(from, n); ++j) row[j] = 0;
  for (int64_t j = to > 0 ? to : 0; j < n; ++j) row[j] = 0;
}

// Elements [0, n) of a row; nothing beyond them may be touched.
template <class C>
struct Exactly {
  C* x;
  int64_t n;
  C* numbers() const { return x; }
  int64_t first() const { return 0; }
  int64_t end() const { return n; }
  Vec<C> get(int64_t j, C fill) const { return load_part(x + j, n - j, fill); }
  Vec<C> get_put(int64_t j, C fill) const { return get(j, fill); }
  void put(int64_t j, Vec<C> v) const { store_part(x + j, v, n - j); }
};

// Elements [from, to) of a row whose neighbours, up to the next multiples of a vector, have no
// meaning: `put` writes its argument there, and `get_put` reads it.
template <class C>
struct Within {
  C* x;
  int64_t from, to;
  C* numbers() const { return x + from; }
  int64_t first() const { return from / Vector<C>::width * Vector<C>::width; }
  int64_t end() const { return to; }
  Vec<C> get(int64_t j, C fill) const {
    const Vec<C> v = load(x + j);
    if (j >= from && j + Vector<C>::width <= to) return v;
    return lanes_within<C>(j, from, to) ? v : splat(fill);
  }
  Vec<C> get_put(int64_t j, C) const { return load(x + j); }
  void put(int64_t j, Vec<C> v) const { store(x + j, v); }
};

// Softmax of a row: `largest`, `exponentiate`, `normalise`. Sparsemax and 1.5-entmax: `largest`,
// `entmax`, `normalise`.

// Return the largest score.
template <class C, template <class> class Row>
C largest(const Row<C>& s) {
  const C infinity = __builtin_inf();
  Vec<C> most = splat(-infinity);
  for (int64_t j = s.first(); j < s.end(); j += Vector<C>::width) {
    const Vec<C> x = s.get(j, -infinity);
    most = x > most ? x : most;
  }
  return highest<C>(most);
}

// Return e^x of scores less the largest; NaN stays, and makes the whole row NaN.
template <class C>
Vec<C> mass_of(Vec<C> x) {
  Vec<C> e = exp(x);
  e = x < (C)-87 ? Vec<C>{} : e;
  return x == x ? e : x;
}

// Add terms of the elements [from, to) to `sums`, a vector of them by `term(j, sums)`: in blocks of
// 256 vectors, four partial sums each, because rounding errors grow with the number of terms in one
// sum.
template <class C, int N, class Term>
void add_up(int64_t from, int64_t to, Vec<C> (&sums)[N], const Term& term) {
  constexpr int64_t kLanes = Vector<C>::width, kBlock = 256 * kLanes;
  for (int64_t begin = from; begin < to; begin += kBlock) {
    const int64_t end = min(begin + kBlock, to);
    Vec<C> of_block[4][N] = {};
    int64_t j = begin;
    for (; j + 3 * kLanes < end; j += 4 * kLanes)
      for (int x = 0; x < 4; ++x) term(j + x * kLanes, of_block[x]);
    for (; j < end; j += kLanes) term(j, of_block[0]);
    for (int n = 0; n < N; ++n)
      sums[n] += (of_block[0][n] + of_block[1][n]) + (of_block[2][n] + of_block[3][n]);
  }
}

// Replace the scores by their exponentials, and neighbours without meaning by 0; return the sum.
template <class C, template <class> class Row>
C exponentiate(const Row<C>& s, C top) {
  const C infinity = __builtin_inf(), shift = top == -infinity ? 0 : top;
  Vec<C> total[1] = {};
  add_up<C>(s.first(), s.end(), total, [&](int64_t j, auto& sums) {
    const Vec<C> e = mass_of<C>(s.get(j, -infinity) - shift);
    sums[0] += e;
    s.put(j, e);
  });
  return sum<C>(total[0]);
}

// As above, and compute statistics of the row whose first element is key `first`, without the
// entropy's ln sum e, which `normalise` adds:
//   entropy = ln sum e - sum e (x - top) / sum e,  largest = 1 / sum e,
//   mean = sum e j / sum e,  variance = sum e (j - mean)^2 / sum e
template <class C, template <class> class Row>
C exponentiate(const Row<C>& s, C top, int64_t first, C* statistics) {
  constexpr int kLanes = Vector<C>::width;
  const C infinity = __builtin_inf(), shift = top == -infinity ? 0 : top;
  Vec<C> earliest = splat(-infinity);  // minus the index of the first largest
  const Vec<C> numbers = __builtin_convertvector(lane_numbers<C>(), Vec<C>) + (C)s.first();
  Vec<C> number = numbers;
  Vec<C> totals[3] = {}, squares[1] = {};
  add_up<C>(s.first(), s.end(), totals, [&](int64_t j, auto& sums) {
    const Vec<C> x = s.get(j, -infinity) - shift, e = mass_of<C>(x);
    sums[0] += e;
    sums[1] += e == 0 ? e : e * x;
    sums[2] += e * number;
    const Flags<C> earlier = (x == 0) & (-number > earliest);
    earliest = earlier ? -number : earliest;
    s.put(j, e);
    number += (C)kLanes;
  });
  C of_row[4];
  sums({totals[0], totals[1], totals[2], squares[0]}, of_row);  // the squares are still 0
  const C mass = of_row[0], share = 1 / mass, mean = of_row[2] * share;
  number = numbers - mean;
  add_up<C>(s.first(), s.end(), squares, [&](int64_t j, auto& sums) {
    sums[0] += s.get_put(j, (C)0) * number * number;
    number += (C)kLanes;
  });
  statistics[kEntropy] = -of_row[1] * share;
  statistics[kLargest] = share;
  statistics[kPosition] = (C)first - highest<C>(earliest);
  statistics[kMean] = (C)first + mean;
  statistics[kVariance] = sum<C>(squares[0]) * share;
  return mass;
}

// Replace the scores by the weights of sparsemax (alpha 2) or 1.5-entmax, up to rounding, and return
// their sum. With z = (alpha - 1) (score - top):
//   p = max(0, z - t)^r,  r = 1 / (alpha - 1),  with the threshold t of sum p = 1
// Newton's method starts below t, where the sum is convex and falls, so only rounding takes it past
// t; the next step then lowers it and is the last. NaN stays.
template <class C, template <class> class Row>
C entmax(const Row<C>& s, C top, Normalisation normalisation) {
  constexpr int kLanes = Vector<C>::width;
  const C infinity = __builtin_inf(), shift = top == -infinity ? 0 : top;
  const bool square = normalisation == Normalisation::entmax15;
  const C factor = square ? 0.5 : 1;
  for (int64_t j = s.first(); j < s.end(); j += kLanes) s.put(j, (s.get(j, -infinity) - shift) * factor);
  C threshold = -1;
  for (;;) {
    Vec<C> totals[2] = {};  // of p and of its slope
    add_up<C>(s.first(), s.end(), totals, [&](int64_t j, auto& sums) {
      const Vec<C> d = s.get(j, -infinity) - threshold, zero = {};
      const Vec<C> above = d > 0 ? d : zero;
      sums[0] += square ? above * above : above;
      sums[1] += square ? above + above : d > 0 ? zero + 1 : zero;
    });
    const C next = threshold + (sum<C>(totals[0]) - 1) / sum<C>(totals[1]);
    const bool rises = next > threshold;
    if (next > -2) threshold = next;  // not without a finite score
    if (!rises) break;
  }
  Vec<C> total[1] = {};
  add_up<C>(s.first(), s.end(), total, [&](int64_t j, auto& sums) {
    const Vec<C> d = s.get(j, -infinity) - threshold, above = d > 0 ? d : Vec<C>{};
    const Vec<C> p = d == d ? (square ? above * above : above) : d;
    sums[0] += p;
    s.put(j, p);
  });
  return sum<C>(total[0]);
}

// Compute the statistics of weights whose sum is `mass`, as `exponentiate` does.
template <class C, template <class> class Row>
void describe(const Row<C>& s, C mass, int64_t first, C* statistics) {
  const auto each_weight = [&](const auto& f) {
    for (int64_t j = s.first(); j < s.end(); j += Vector<C>::width) {
      const Vec<C> p = s.get(j, (C)0);
      for (int lane = 0; lane < Vector<C>::width; ++lane)
        if (p[lane] > 0) f((double)p[lane], (double)(j + lane));
    }
  };
  double entropy = 0, most = 0, position = 0, mean = 0, variance = 0;
  each_weight([&](double p, double j) {
    entropy -= p * __builtin_log(p);
    if (p > most) most = p, position = j;
    mean += p / mass * j;
  });
  each_weight([&](double p, double j) { variance += p / mass * (j - mean) * (j - mean); });
  statistics[kEntropy] = entropy / mass;
  statistics[kLargest] = most / mass;
  statistics[kPosition] = first + position;
  statistics[kMean] = first + mean;
  statistics[kVariance] = variance;
}

// Third, divide by the mass; return the log of the mass. A row without mass becomes zeros: see
// `fill_nan_row`. `zeros` marks the lanes where a weight is 0.
template <class C, template <class> class Row>
C normalise(const Row<C>& s, C mass, Flags<C>& zeros) {
  if (mass == 0) {
    zeros = ~zeros | zeros;
    return -__builtin_inf();
  }
  for (int64_t j = s.first(); j < s.end(); j += Vector<C>::width) {
    const Vec<C> e = s.get_put(j, (C)1);
    const Vec<C> p = e == 0 ? e : e / mass;  // 0 also where mass is NaN
    zeros |= p == 0;
    s.put(j, p);
  }
  if constexpr (sizeof(C) == 4) return __builtin_logf(mass);
  else return __builtin_log(mass);
}

// Replace a row of scores by its softmax, in coverage_attention. Attention runs the three steps
// itself, each over several rows.
template <class C>
void softmax_of_row(C* s, int64_t n, Flags<C>& zeros) {
  const Exactly<C> row = {s, n};
  normalise(row, exponentiate(row, largest(row)), zeros);
}

template <class C>
void report_zero_weights(const Problem& a, const Plan& plan, const Item& item, Flags<C> zeros) {
  if (plan.has_zero_weight && (item.seen < a.Tk || any<C>(zeros)))
    __atomic_store_n(plan.has_zero_weight, true, __ATOMIC_RELAXED);
}

template <class C>
void multiply_by(C scale, int64_t n, C* x) {
  if (scale != 1)
    for (int64_t j = 0; j < n; ++j) x[j] *= scale;
}

// Add the bias to the scores of columns [from, to), and hide the keys at which the mask is false.
template <class T, class C>
void finish_scores(const Problem& a, const Item& item, int64_t i, int64_t from, int64_t to, C* s) {
  const int64_t n = to - from;
  const C hidden = -__builtin_inf();
  const auto add_bias = [&](const auto* bias) {
    bias += from * a.bias.column;
    for (int64_t j = 0; j < n; ++j) {
      const C x = widen(bias[j * a.bias.column]);
      s[j] = x == hidden ? hidden : s[j] + x;  // also where the score is NaN
    }
  };
  if (a.bias.data && a.bias_in_sums) add_bias(at<C>(a.bias, item, i));
  else if (a.bias.data) add_bias(at<T>(a.bias, item, i));
  if (a.mask.data) {
    const uint8_t* mask = at<uint8_t>(a.mask, item, i) + from * a.mask.column;
    for (int64_t j = 0; j < n; ++j) s[j] = mask[j * a.mask.column] ? s[j] : hidden;
  }
}

// Set the weights of a row that has diverged to NaN at its visible keys [from, to). A softmax
// diverges if a score is +inf or NaN, or if there are scores and all are -inf. Return true if any
// weight was set.
template <class T, class C>
bool fill_nan_row(const Problem& a, const Item& item, int64_t i, int64_t from, int64_t to, C* p) {
  bool any = false;
  for (int64_t j = from; j < to; ++j) {
    C seen = 0;
    finish_scores<T>(a, item, i, j, j + 1, &seen);
    if (seen == -(C)__builtin_inf()) continue;
    p[j - from] = __builtin_nan("");
    any = true;
  }
  return any;
}

// Turn row i into weights; its elements are those of the keys [from, to) in their columns. Store
// log sum exp and statistics: 0 without mass, NaN if the row has diverged.
template <class T, class C, template <class> class Row>
void finish_row(const Forward& a, const Item& item, int64_t i, const Row<C>& s, int64_t from, int64_t to,
                C top, C mass, Flags<C>& zeros) {
  const C log_mass = normalise(s, mass, zeros);
  *at<C>(a.log_sum_exp, item, i) = top + log_mass;
  const bool diverged = !(mass > 0) && fill_nan_row<T>(a, item, i, from, to, s.numbers());
  if (!a.statistics.data) return;
  C* statistics = at<C>(a.statistics, item, i);
  statistics[kEntropy] += log_mass;
  if (mass > 0) return;
  for (int x = 0; x < kStatistics; ++x) statistics[x] = diverged ? __builtin_nan("") : 0;
}

// Compute the coverage after a row of weights; `rate` is an inverse fertility, or null.
template <class C>
void cover(const C* before, const C* weights, const C* rate, int64_t n, C* now) {
  if (rate)
    for (int64_t j = 0; j < n; ++j) now[j] = before[j] + rate[j] * weights[j];
  else
    for (int64_t j = 0; j < n; ++j) now[j] = before[j] + weights[j];
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
