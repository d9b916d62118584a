// attention on the CPU, for one instruction set (see vector.h); the launcher is attention.cpp.
//
//   e_ij = scale * score(q_i, k_j) + bias_ij,  P = softmax(e) over visible keys,  c_i = sum P_ij v_j
//
// Each pass takes its items from a grid: (sequence, head) x blocks of query rows x parts of keys or
// columns. Scores are computed tile by tile from rows held in cache (score.h); the rest is rows of
// scores and products of a small matrix with rows (product.h). If rows have spans, the work is done
// in bands of rows whose keys are nearly the same (span.h).
#include "attention.h"
#include "rows.h"
#include "score.h"
#include "span.h"

namespace attnfast {
namespace VARIANT {
namespace {

static_assert(kPadding % (2 * Vector<float>::width) == 0, "exponentials are read by two vectors");

// ---- forward ----------------------------------------------------------------------------------

// The scores of the rows of an item, or other products of rows. Keys are prepared by blocks, and
// the values of a block select the path of its additive scores.
template <class T, class C = typename Accumulate<T>::type>
class Scores {
 public:
  Scores(const Problem& a, const Item& item, const View& query, const View& key, int64_t depth,
         bool additive, Scratch<C>& scratch)
      : a(a), item(item), key(key), depth(depth), width(padded<C>(depth)), additive(additive) {
    C* q_scratch = scratch.take(item.rows * width);
    k_scratch = scratch.take(kKeyBlock * width);
    k_held = scratch.take(kTransposed<C> * width);
    prefetch_apart(at<T>(query, item, item.row), query.row, item.rows, depth);
    q = gather(at<T>(query, item, item.row), query.row, item.rows, depth, width, q_scratch);
    if (!additive) return;
    q_held = scratch.take(item.rows * width);
    w = gather(at<T>(a.score_vector, item, 0), 0, 1, depth, width, scratch.take(width)).data;
    if constexpr (sizeof(C) == 4)
      if (factorable()) q_range = exponentials(q, item.rows, depth, width, q_held);
  }

  // Prepare keys [from, to), at most kKeyBlock, for `tile`.
  void load_keys(int64_t from, int64_t to) {
    first = from;
    last = to;
    const int64_t n = to - from;
    const bool has_exponentials = factorable() && a.exponentials.data && q_range <= kExponentialsLimit;
    if (has_exponentials && q_range > kSmallSumLimit) return take_exponentials();
    prefetch_apart(at<T>(key, item, from), key.row, n, depth);
    keys = gather(at<T>(key, item, from), key.row, n, depth, width, k_scratch);
    rows = q;
    path = Path::direct;
    if constexpr (sizeof(C) == 4) {
      if (factorable()) {
        const bool near = q_range <= kSmallSumLimit;
        if (near && q_range + range_of(keys, n, width) <= kSmallSumLimit) {
          if (item.rows < 3) return;  // too few to repay tanh(k)
          double_tanh(keys, n, width, k_held);
          return take(Path::small, {k_held, width});
        }
        if (has_exponentials) return take_exponentials();
        if (q_range + exponentials(keys, n, depth, width, k_held) <= kFactoredSumLimit)
          return take(Path::factored, {k_held, width});
      }
    }
    if (!additive && a.key_bounds.data) transpose(keys.data, keys.stride, n, width, k_held, kTransposed<C>);
  }

  // Compute the scores of the item's rows [row, row + n) and the keys [from, to). If rows have
  // spans, up to two vectors more are written.
  void tile(int64_t row, int64_t n, int64_t from, int64_t to, C* out, int64_t stride) const {
    const int64_t j = from - first, nk = to - from;
    const Rows<C> qs = {rows.data + row * rows.stride, rows.stride};
    const Rows<C> ks = {keys.data + j * keys.stride, keys.stride};
    if (!additive && a.key_bounds.data)
      return dot_transposed(qs, n, k_held + j, kTransposed<C>, nk, width, out, stride);
    if (!additive) return dot_block(qs, n, ks, nk, width, out, stride, k_held);
    auto block = by_activation(
        a.score, [](auto known) { return score_block<C, decltype(known)::score, Path::direct>; });
    if constexpr (sizeof(C) == 4) {
      if (path == Path::factored) block = score_block<C, Score::tanh, Path::factored>;
      if (path == Path::small) block = score_block<C, Score::tanh, Path::small>;
    }
    block(qs, n, ks, nk, w, width, out, stride);
  }

  // Return the number of elements of scratch that the constructor takes.
  static int64_t room(int64_t rows, int64_t depth) {
    return (2 * rows + kKeyBlock + kTransposed<C> + 1) * padded<C>(depth);
  }

  int waste() const { return additive ? kTight : kLoose; }  // see band_of
  int64_t from() const { return first; }
  int64_t to() const { return last; }

 private:
  bool factorable() const { return additive && a.score == Score::tanh; }

  // Set the keys that tiles read, and the matching form of the query rows.
  void take(Path next, Rows<C> next_keys) {
    if (held != next) {
      if (next == Path::small) double_tanh(q, item.rows, width, q_held);
      else exponentials(q, item.rows, depth, width, q_held);
    }
    held = path = next;
    rows = {q_held, width};
    keys = next_keys;
  }

  void take_exponentials() {
    take(Path::factored, {at<C>(a.exponentials, item, first), a.exponentials.row});
  }

  const Problem& a;
  const Item& item;
  const View& key;
  const int64_t depth, width;
  const bool additive;
  int64_t first = 0, last = 0;
  C q_range = 0;
  C *q_held = nullptr, *k_scratch, *k_held;
  const C* w = nullptr;
  Path path = Path::direct, held = Path::factored;
  Rows<C> q, rows, keys;
};

// Compute the scores of all rows and keys of an item, in their columns.
template <class T, class C>
void compute_rows(const Plan& plan, const Item& item, Scores<T, C> scores, Rows<C> out) {
  const int64_t end = min(item.seen, (item.part + 1) * plan.keys);
  for (int64_t j = item.part * plan.keys; j < end; j += kKeyBlock) {
    const int64_t to = min(j + kKeyBlock, end);
    scores.load_keys(j, to);
    scores.tile(0, item.rows, j, to, const_cast<C*>(out.data) + j, out.stride);
  }
}

template <class T, class C = typename Accumulate<T>::type>
void scores(const Forward& a, const Plan& plan, int64_t index, void* buffer) {
  const Item item(a, plan, index, parts(a.Tk, plan.keys));
  Scratch<C> scratch = {static_cast<C*>(buffer)};
  const Rows<C> s = scores_of(a, plan, item, scratch);
  compute_rows(plan, item, Scores<T>(a, item, a.query, a.key, a.A, a.score_vector.data, scratch), s);
}

// Replace a row of scores, from key `first` on, by exponentials or by sparse weights; return their
// sum.
template <class C, template <class> class Row>
C exponentials_or_entmax(const Forward& a, const Item& item, int64_t i, const Row<C>& s, C top,
                         int64_t first) {
  C* statistics = a.statistics.data ? at<C>(a.statistics, item, i) : nullptr;
  if (a.normalisation == Normalisation::softmax)
    return statistics ? exponentiate(s, top, first, statistics) : exponentiate(s, top);
  const C mass = entmax(s, top, a.normalisation);
  if (statistics) describe(s, mass, first, statistics);
  return mass;
}

template <class T, class C = typename Accumulate<T>::type>
void softmax(const Forward& a, const Plan& plan, int64_t index, void* buffer) {
  const Item item(a, plan, index, 1);
  Scratch<C> scratch = {static_cast<C*>(buffer)};
  const Rows<C> s = scores_of(a, plan, item, scratch);
  Flags<C> zeros = {};
  // Each step runs over a few rows that stay in the L1 cache, so that no row waits for another.
  constexpr int64_t kMost = 16, kNumbers = 2048;
  const int64_t group = min(kMost, parts(kNumbers, item.seen + 1));
  for (int64_t first = 0; first < item.rows; first += group) {
    const int64_t last = min(first + group, item.rows);
    const auto row = [&](int64_t i) { return const_cast<C*>(s.data) + i * s.stride; };
    const auto numbers = [&](int64_t i) { return Exactly<C>{row(i), item.seen}; };
    C top[kMost], mass[kMost];
    for (int64_t i = first; i < last; ++i) {
      multiply_by((C)a.scale, item.seen, row(i));
      finish_scores<T>(a, item, item.row + i, 0, item.seen, row(i));
    }
    for (int64_t i = first; i < last; ++i) top[i - first] = largest(numbers(i));
    for (int64_t i = first; i < last; ++i) {
      const int64_t r = i - first;
      mass[r] = exponentials_or_entmax(a, item, item.row + i, numbers(i), top[r], 0);
    }
    for (int64_t i = first; i < last; ++i) {
      const int64_t r = i - first;
      finish_row<T>(a, item, item.row + i, numbers(i), 0, item.seen, top[r], mass[r], zeros);
      clear_outside(row(i), a.W, 0, item.seen);
    }
  }
  report_zero_weights<C>(a, plan, item, zeros);
}

// Call gemm_small, or check a product that a library has computed: a key of weight 0 adds nothing,
// even when its value is NaN, so elements that are NaN in the library's product are replaced by
// those of gemm_small.
template <class T, class C>
void multiply(const Plan& plan, const C* p, int64_t p_row, int64_t p_col, int64_t rows, int64_t n,
              const T* v, int64_t v_stride, int64_t width, C scale, T* out, int64_t out_stride,
              C* scratch) {
  if constexpr (sizeof(T) == sizeof(C)) {
    if (plan.multiplied) {
      if (is_finite(out, out_stride, rows, width, scale)) return;
      C* again = scratch + gemm_small_scratch<C>(n, width);
      gemm_small(p, p_row, p_col, rows, n, v, v_stride, width, scale, again, width, scratch);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < width; ++c) {
          T& x = out[r * out_stride + c];
          x = x == x ? x : again[r * width + c];
        }
      return;
    }
  }
  gemm_small(p, p_row, p_col, rows, n, v, v_stride, width, scale, out, out_stride, scratch);
}

template <class T, class C = typename Accumulate<T>::type>
void context(const Forward& a, const Plan& plan, int64_t index, void* buffer) {
  const Item item(a, plan, index, parts(a.Dv, plan.columns));
  const int64_t c = item.part * plan.columns;
  Scratch<C> scratch = {static_cast<C*>(buffer)};
  const Rows<C> p = scores_of(a, plan, item, scratch);
  multiply(plan, p.data, p.stride, 1, item.rows, item.seen, at<T>(a.value, item, 0) + c, a.value.row,
           min(plan.columns, a.Dv - c), (C)1, at<T>(a.context, item, item.row) + c, a.context.row,
           scratch.next);
}

// Run the whole forward for rows with spans: scores, weights and context of a band are computed in
// turn in a matrix that stays in cache.
template <class T, class C = typename Accumulate<T>::type>
void forward_span(const Forward& a, const Plan& plan, int64_t index, void* buffer) {
  const Item item(a, plan, index, 1);
  Scratch<C> scratch = {static_cast<C*>(buffer)};
  Scores<T> scores(a, item, a.query, a.key, a.A, a.score_vector.data, scratch);
  const SeenByRows seen(a, item);
  C* matrix = scratch.take(band_scratch<C>(a));
  const Side<T> side = {at<T>(a.value, item, 0), a.value.row, at<T>(a.context, item, item.row),
                        a.context.row};
  Flags<C> zeros = {};
  for_bands(0, item.rows, 0, item.seen, kLoose, seen, [&](const Band& band) {
    const int64_t n = band.to - band.from, stride = band_row<C>(n);
    compute_band(band, seen, scores, matrix, stride);
    multiply_by((C)a.scale, band.rows * stride, matrix);
    VisiblePart own[kMostRows];
    C top[kMostRows], mass[kMostRows];
    const auto numbers = [&](int64_t r) { return Within<C>{matrix + r * stride, own[r].from, own[r].to}; };
    for (int64_t r = 0; r < band.rows; ++r) {
      own[r] = visible_part_of(seen(band.row + r), band);
      finish_scores<T>(a, item, item.row + band.row + r, own[r].column, own[r].end(),
                       matrix + r * stride + own[r].from);
    }
    // step by step, so that no row waits for another
    for (int64_t r = 0; r < band.rows; ++r) top[r] = largest(numbers(r));
    for (int64_t r = 0; r < band.rows; ++r)
      mass[r] = exponentials_or_entmax(a, item, item.row + band.row + r, numbers(r), top[r], band.from);
    for (int64_t r = 0; r < band.rows; ++r) {
      const int64_t row = item.row + band.row + r;
      const Within<C> p = numbers(r);
      finish_row<T>(a, item, row, p, own[r].column, own[r].end(), top[r], mass[r], zeros);
      clear_outside(p.x, n, p.first(), round_up(p.to, Vector<C>::width));
      if (!a.weights.data) continue;
      C* columns = at<C>(a.weights, item, row);
      for (int64_t j = p.from; j < p.to; ++j) columns[own[r].column + j - p.from] = p.x[j];
      clear_outside(columns, a.W, own[r].column, own[r].end());
    }
    band_product<T>(matrix, stride, band, (C)1, a.Dv, side, scratch.next);
  });
}

// ---- backward ---------------------------------------------------------------------------------

// Compute x_ij = grad_context_i . v_j, stored in grad_score.
template <class T, class C = typename Accumulate<T>::type>
void grad_weights(const Backward& a, const Plan& plan, int64_t index, void* buffer) {
  const Item item(a, plan, index, parts(a.Tk, plan.keys));
  Scratch<C> scratch = {static_cast<C*>(buffer)};
  const Rows<C> x = {at<C>(a.grad_score, item, item.row), a.W};
  compute_rows(plan, item, Scores<T>(a, item, a.grad_context, a.value, a.Dv, false, scratch), x);
}

// Compute out_j = u_j (x_j - sum_j u_j x_j / sum_j u_j + grad_log_sum_exp_i) for the columns [from, to) of a
// row i, with grad_weights_ij added to x_j; exactly 0 if P_ij is 0. The slope u of a weight P is P for
// softmax, where sum u = 1, the root of P for 1.5-entmax, and 1 for sparsemax.
template <class C>
void normalisation_backward(const Backward& a, const Item& item, int64_t i, int64_t from, int64_t to,
                            C scale, C* x, C* out, Flags<C>& zeros) {
  constexpr int kLanes = Vector<C>::width;
  const int64_t n = to - from;
  const C* p = at<C>(a.weights, item, i) + from;
  if (a.grad_weights.data) {
    const C* extra = at<C>(a.grad_weights, item, i) + from;
    for (int64_t j = 0; j < n; ++j) x[j] += extra[j];
  }
  const auto slope = [&](Vec<C> pj) {
    if (a.normalisation == Normalisation::softmax) return pj;
    return a.normalisation == Normalisation::entmax15 ? square_root<C>(pj) : pj > 0 ? Vec<C>{} + 1 : pj;
  };
  Vec<C> products = {}, slopes = {};
  for (int64_t j = 0; j < n; j += kLanes) {
    const Vec<C> pj = load_part(p + j, n - j, (C)0), uj = slope(pj);
    products += pj == 0 ? pj : uj * load_part(x + j, n - j, (C)0);
    slopes += uj;
  }
  // x - mean is often exactly 0: the rest comes after
  const C mean = sum<C>(products) / (a.normalisation == Normalisation::softmax ? 1 : sum<C>(slopes));
  const C rest = a.grad_log_sum_exp.data ? *at<C>(a.grad_log_sum_exp, item, i) : 0;
  for (int64_t j = 0; j < n; j += kLanes) {
    const Vec<C> pj = load_part(p + j, n - j, (C)1);
    const Vec<C> xj = load_part(x + j, n - j, (C)0);
    zeros |= pj == 0;
    store_part(out + j, pj == 0 ? pj : slope(pj) * (xj - mean + rest) * scale, n - j);
  }
}

template <class T, class C = typename Accumulate<T>::type>
void grad_score(const Backward& a, const Plan& plan, int64_t index, void*) {
  const Item item(a, plan, index, 1);
  Flags<C> zeros = {};
  for (int64_t i = item.row; i < item.row + item.rows; ++i) {
    C* x = at<C>(a.grad_score, item, i);
    normalisation_backward(a, item, i, 0, item.seen, (C)plan.grad_score_scale, x, x, zeros);
    clear_outside(x, a.W, 0, item.seen);
  }
  report_zero_weights<C>(a, plan, item, zeros);
}

// Run both passes for rows with spans, by bands.
template <class T, class C = typename Accumulate<T>::type>
void grad_score_span(const Backward& a, const Plan& plan, int64_t index, void* buffer) {
  const Item item(a, plan, index, 1);
  Scratch<C> scratch = {static_cast<C*>(buffer)};
  Scores<T> products(a, item, a.grad_context, a.value, a.Dv, false, scratch);
  const SeenByRows seen(a, item);
  C* matrix = scratch.take(band_scratch<C>(a));
  Flags<C> zeros = {};
  for_bands(0, item.rows, 0, item.seen, kLoose, seen, [&](const Band& band) {
    const int64_t stride = band_row<C>(band.to - band.from);
    compute_band(band, seen, products, matrix, stride);
    for (int64_t r = 0; r < band.rows; ++r) {
      const VisiblePart own = visible_part_of(seen(band.row + r), band);
      const int64_t row = item.row + band.row + r;
      C* out = at<C>(a.grad_score, item, row);
      normalisation_backward(a, item, row, own.column, own.end(), (C)plan.grad_score_scale,
                             matrix + r * stride + own.from, out + own.column, zeros);
      clear_outside(out, a.W, own.column, own.end());
    }
  });
}

// Pack two vectors of features of `n` rows; return the largest magnitude. A NaN counts as 0: a row
// that may see it has NaN weights and so a NaN grad_score; for the other rows it must not have any
// effect.
template <class T, class C>
C pack_slice(const T* src, int64_t stride, int64_t n, int64_t width, bool finite, C* out) {
  constexpr int kLanes = Vector<C>::width;
  pack(src, stride, n, width, out);
  Vec<C> most = {};
  for (C* x = out; x < out + n * 2 * kLanes; x += kLanes) {
    Vec<C> v = load(x);
    v = finite ? (v - v == 0 ? v : Vec<C>{}) : (v == v ? v : Vec<C>{});
    store(x, v);
    most = v > most ? v : most;
    most = -v > most ? -v : most;
  }
  return highest<C>(most);
}

// Undo pack_slice and multiply each feature by its factor.
template <class T, class C>
void unpack_slice(const C* x, const C* factor, int64_t n, int64_t width, T* out, int64_t stride) {
  constexpr int kLanes = Vector<C>::width;
  const Vec<C> f0 = load(factor), f1 = load(factor + kLanes);
  for (int64_t r = 0; r < n; ++r) {
    put<T, C>(out + r * stride, load(x + r * 2 * kLanes) * f0, width);
    put<T, C>(out + r * stride + kLanes, load(x + r * 2 * kLanes + kLanes) * f1, width - kLanes);
  }
}

template <class T>
void clear(const View& out, const Item& item, int64_t from, int64_t to, int64_t c, int64_t width) {
  for (int64_t r = from; r < to; ++r)
    for (int64_t i = 0; i < width; ++i) at<T>(out, item, r)[c + i] = T{};
}

// A function that adds the gradients of packed queries and keys, additive score; see grad_blocks.
template <class C>
using GradBlocks = void (*)(const C* q, const C* k, const C* g, int64_t g_stride, int64_t nq, int64_t n,
                            C* grad_q, C* grad_k, C* grad_w);

// Prepare nq queries and the n keys that follow them for the path that the sum of their largest
// magnitudes allows.
template <class C>
GradBlocks<C> prepare_blocks(Score score, C range, C* q, int64_t n) {
  if constexpr (sizeof(C) == 4) {
    constexpr int W2 = 2 * Vector<C>::width;
    const Rows<C> both = {q, W2};
    if (range <= kSmallSumLimit && score == Score::tanh) {
      double_tanh(both, n, W2, q);
      return grad_blocks<C, Score::tanh, Path::small>;
    }
    if (range <= kFactoredSumLimit && score == Score::tanh) {
      exponentials(both, n, W2, W2, q);
      return grad_blocks<C, Score::tanh, Path::factored>;
    }
  }
  return by_activation(score, [](auto known) -> GradBlocks<C> {
    return grad_blocks<C, decltype(known)::score, Path::direct>;
  });
}

// Compute the gradients of query, key and weight for two vectors of features from c on, additive
// score.
template <class T, class C>
void grad_slice(const Backward& a, const Item& item, const Seen& keys, int64_t c, C scale, C* scratch) {
  constexpr int W2 = 2 * Vector<C>::width;
  const int64_t width = min(W2, a.A - c), n = keys.to - keys.from;
  const Rows<C> g = {at<C>(a.grad_score, item, 0), a.W};
  const T* score_vector = at<T>(a.score_vector, item, 0) + c;
  C* q = scratch;
  C* k = q + a.Tq * W2;
  C* grad_q = k + n * W2;
  C* grad_k = grad_q + a.Tq * W2;
  C* grad_w = grad_k + n * W2;
  for (C* x = grad_q; x < grad_w + W2; ++x) *x = 0;
  const bool bounded = a.score == Score::tanh;
  const C range = pack_slice(at<T>(a.query, item, 0) + c, a.query.row, a.Tq, width, !bounded, q) +
                  pack_slice(at<T>(a.key, item, keys.from) + c, a.key.row, n, width, !bounded, k);
  const auto blocks = prepare_blocks(a.score, range, q, a.Tq + n);
  if (a.key_bounds.data) {
    C* tile = grad_w + W2;
    const auto see = [&](int64_t row) { return seen_by(a, item, row); };
    for_bands(0, a.Tq, 0, item.seen, kTight, see, [&](const Band& band) {
      const int64_t nk = band.to - band.from, i = band.row * W2, j = (band.from - keys.from) * W2;
      spread(a, item, band, g, tile);
      blocks(q + i, k + j, tile, nk, band.rows, nk, grad_q + i, grad_k + j, grad_w);
    });
  } else {
    blocks(q, k, g.data, g.stride, a.Tq, n, grad_q, grad_k, grad_w);
  }

  C factor[W2] = {};
  for (int64_t x = 0; x < width; ++x) factor[x] = 4 * scale * widen(score_vector[x]);
  if (a.grad_query.data)
    unpack_slice(grad_q, factor, a.Tq, width, at<T>(a.grad_query, item, 0) + c, a.grad_query.row);
  if (a.grad_key.data) {
    unpack_slice(grad_k, factor, n, width, at<T>(a.grad_key, item, keys.from) + c, a.grad_key.row);
    clear<T>(a.grad_key, item, 0, keys.from, c, width);
    clear<T>(a.grad_key, item, keys.to, a.Tk, c, width);
  }
  if (!a.grad_score_vector.data) return;
  C* out_w = at<C>(a.grad_score_vector, item, 0) + c;
  for (int64_t x = 0; x < width; ++x) out_w[x] = -2 * scale * grad_w[x];
}

// Compute the same gradients for the only query of a sequence, columns [c, c + width): whole rows
// of keys pass, four at a time; keys without a gradient are skipped.
template <class T, class C = typename Accumulate<T>::type>
class StepGradient {
 public:
  StepGradient(const Backward& a, const Item& item, int64_t c, int64_t width, C scale, C* scratch)
      : a(a), item(item), c(c), width(width), wide(padded<C>(width)), scale(scale) {
    q_exp = scratch + wide;
    grad_q = q_exp + wide;
    grad_w = grad_q + wide;
    factor = grad_w + wide;
    k_scratch = factor + wide;
    k_exp = k_scratch + 4 * wide;
    grad_k = k_exp + 4 * wide;
    const T* score_vector = at<T>(a.score_vector, item, 0) + c;
    for (C* x = grad_q; x < factor; ++x) *x = 0;
    for (int64_t x = 0; x < wide; ++x) factor[x] = x < width ? 4 * scale * widen(score_vector[x]) : C{};
    q = gather(at<T>(a.query, item, 0) + c, 0, 1, width, wide, scratch).data;
    factorable = sizeof(C) == 4 && a.score == Score::tanh;
    if constexpr (sizeof(C) == 4)
      if (factorable) q_range = exponentials(Rows<C>{q, 0}, 1, width, wide, q_exp);
    near = q_range <= kSmallSumLimit;
    has_exponentials = a.exponentials.data && q_range <= kExponentialsLimit;
  }

  void run() {
    const bool keys = a.grad_key.data;
    Four four;
    for (int64_t j = 0; find(j, four);) {
      int64_t ahead = 0;
      const C* of_query = q;
      const GradRows rows = load_four(four, of_query, ahead);
      rows(of_query, four.k, four.gradient, wide, ahead, grad_q, grad_k, grad_w);
      for (int i = 0; keys && i < four.found; ++i)
        put_row(at<T>(a.grad_key, item, four.key[i]) + c, grad_k + i * wide);
    }
    if (a.grad_query.data) put_row(at<T>(a.grad_query, item, 0) + c, grad_q);
    if (!a.grad_score_vector.data) return;
    C* out_w = at<C>(a.grad_score_vector, item, 0) + c;
    for (int64_t x = 0; x < width; ++x) out_w[x] = -2 * scale * grad_w[x];
  }

 private:
  using GradRows = void (*)(const C* q, const C* const (&k)[4], const C (&g)[4], int64_t width,
                            int64_t ahead, C* grad_q, C* grad_k, C* grad_w);
  // Keys that have a gradient; if fewer than four remain, the first fills the other places.
  struct Four {
    int64_t key[4];
    const C* k[4];
    C gradient[4];
    int found;
  };

  // Find the next four from key j on; return true if there are any.
  bool find(int64_t& j, Four& four) const {
    const C* g = at<C>(a.grad_score, item, 0);
    four.found = 0;
    for (C& x : four.gradient) x = 0;
    for (; j < item.seen && four.found < 4; ++j) {
      if (g[j] != 0) {
        four.gradient[four.found] = g[j];
        four.key[four.found++] = j;
      } else if (a.grad_key.data) {
        clear<T>(a.grad_key, item, j, j + 1, c, width);
      }
    }
    for (int i = four.found; i < 4; ++i) four.key[i] = four.key[0];
    return four.found > 0;
  }

  // Return the function of the path for these keys. The rows of keys and of the query are replaced
  // by its inputs; the next four rows lie `ahead` of the keys.
  GradRows load_four(Four& four, const C*& of_query, int64_t& ahead) const {
    const bool look = !has_exponentials || near;  // read the keys themselves
    for (int i = 0; look && i < 4; ++i)
      four.k[i] = gather(at<T>(a.key, item, four.key[i]) + c, 0, 1, width, wide, k_scratch + i * wide).data;
    const bool keys = a.grad_key.data;
    if constexpr (sizeof(C) == 4) {
      const auto all_keys = [&](const auto& range_of_key) {  // with the query
        C range = 0;
        for (int i = 0; i < 4; ++i) {
          const C most = range_of_key(i);
          range = most > range ? most : range;
        }
        return q_range + range;
      };
      const auto range = [&](int i) { return range_of(Rows<C>{four.k[i], 0}, 1, wide); };
      const auto factored = [&](int i) {
        return exponentials(Rows<C>{four.k[i], 0}, 1, width, wide, k_exp + i * wide);
      };
      const bool small = near && all_keys(range) <= kSmallSumLimit;  // no tanh(k) for one query
      if (factorable && !small && (has_exponentials || all_keys(factored) <= kFactoredSumLimit)) {
        of_query = q_exp;
        for (int i = 0; i < 4; ++i)
          four.k[i] = has_exponentials ? at<C>(a.exponentials, item, four.key[i]) + c : k_exp + i * wide;
        ahead = has_exponentials ? 4 * a.exponentials.row : 0;
        return keys ? grad_rows<C, Score::tanh, Path::factored, true>
                    : grad_rows<C, Score::tanh, Path::factored, false>;
      }
    }
    return by_activation(a.score, [&](auto known) -> GradRows {
      constexpr Score S = decltype(known)::score;
      return keys ? grad_rows<C, S, Path::direct, true> : grad_rows<C, S, Path::direct, false>;
    });
  }

  void put_row(T* out, const C* x) const {
    constexpr int kLanes = Vector<C>::width;
    for (int64_t i = 0; i < width; i += kLanes)
      put<T, C>(out + i, load(x + i) * load(factor + i), width - i);
  }

  const Backward& a;
  const Item& item;
  const int64_t c, width, wide;
  const C scale;
  const C* q;
  C *q_exp, *grad_q, *grad_w, *factor, *k_scratch, *k_exp, *grad_k;
  C q_range = 0;
  bool factorable, near, has_exponentials;  // near: the query is small, perhaps the keys too
};

// Compute the gradients of query, key and weight, columns [c, c + width), dot score.
template <class T, class C>
void grad_dot(const Backward& a, const Plan& plan, const Item& item, int64_t c, int64_t width, C* scratch) {
  const C *g = at<C>(a.grad_score, item, 0), scale = plan.grad_inputs_scale;
  if (a.key_bounds.data) {
    Side<T> keys = {at<T>(a.key, item, 0) + c, a.key.row},
            rows = {at<T>(a.query, item, 0) + c, a.query.row};
    if (a.grad_query.data) keys.to = at<T>(a.grad_query, item, 0) + c, keys.to_row = a.grad_query.row;
    if (a.grad_key.data) rows.to = at<T>(a.grad_key, item, 0) + c, rows.to_row = a.grad_key.row;
    return span_products<T>(a, item, Rows<C>{g, a.W}, scale, width, keys, rows, scratch);
  }
  if (a.grad_query.data)
    multiply(plan, g, a.Tk, 1, a.Tq, item.seen, at<T>(a.key, item, 0) + c, a.key.row, width, scale,
             at<T>(a.grad_query, item, 0) + c, a.grad_query.row, scratch);
  if (a.grad_key.data)
    multiply(plan, g, 1, a.Tk, item.seen, a.Tq, at<T>(a.query, item, 0) + c, a.query.row, width, scale,
             at<T>(a.grad_key, item, 0) + c, a.grad_key.row, scratch);
}

// Compute columns [c, c + columns) of the value's gradient.
template <class T, class C>
void grad_value_slice(const Backward& a, const Plan& plan, const Item& item, int64_t c, C* scratch) {
  const int64_t width = min(plan.columns, a.Dv - c);
  const C* weights = at<C>(a.weights, item, 0);
  const T* grad_context = at<T>(a.grad_context, item, 0) + c;
  T* out = at<T>(a.grad_value, item, 0) + c;
  if (a.key_bounds.data) {
    const Side<T> rows = {grad_context, a.grad_context.row, out, a.grad_value.row};
    return span_products<T>(a, item, Rows<C>{weights, a.W}, (C)1, width, Side<T>{}, rows, scratch);
  }
  multiply(plan, weights, 1, a.Tk, item.seen, a.Tq, grad_context, a.grad_context.row, width, (C)1, out,
           a.grad_value.row, scratch);
  clear<T>(a.grad_value, item, item.seen, a.Tk, c, width);
}

template <class T, class C = typename Accumulate<T>::type>
void grad_value(const Backward& a, const Plan& plan, int64_t index, void* buffer) {
  const int64_t slices = value_slices(a, plan);
  const Item item(a, index / slices);
  grad_value_slice<T>(a, plan, item, index % slices * plan.columns, static_cast<C*>(buffer));
}

// Compute a slice of the features of query, key and weight, or of the columns of value.
template <class T, class C = typename Accumulate<T>::type>
void grad_inputs(const Backward& a, const Plan& plan, int64_t index, void* buffer) {
  const int64_t features = feature_slices(a, plan), slices = features + value_slices(a, plan);
  const Item item(a, index / slices);
  const int64_t slice = index % slices;
  C* scratch = static_cast<C*>(buffer);
  if (slice >= features)
    return grad_value_slice<T>(a, plan, item, (slice - features) * plan.columns, scratch);
  const int64_t c = slice * plan.columns, width = min(plan.columns, a.A - c);
  const C scale = plan.grad_inputs_scale;
  if (!a.score_vector.data) {
    grad_dot<T>(a, plan, item, c, width, scratch);
  } else if (a.Tq == 1 && !a.key_bounds.data) {
    StepGradient<T>(a, item, c, width, scale, scratch).run();
  } else {
    const Seen keys = a.key_bounds.data ? hull(a, item) : Seen{0, item.seen, 0};
    for (int64_t x = 0; x < width; x += 2 * Vector<C>::width)
      grad_slice<T>(a, item, keys, c + x, scale, scratch);
  }
  if (a.grad_key.data && !a.key_bounds.data) clear<T>(a.grad_key, item, item.seen, a.Tk, c, width);
}

// ---- exponentials of the keys ----------------------------------------------------------------------------------

// Compute e^{2 key} of a block of keys, and the largest |key| among them, ignoring NaN.
template <class T, class C = typename Accumulate<T>::type>
void key_exponentials(const cpu::KeyExponentials& a, const Plan&, int64_t index, void* buffer) {
  if constexpr (sizeof(C) == 4) {
    const int64_t blocks = parts(a.Tk, kKeyBlock), width = round_up(a.A, kPadding);
    const Item item(a, index / blocks);
    const int64_t block = index % blocks, j = block * kKeyBlock, n = min(item.seen - j, kKeyBlock);
    const Rows<C> k = gather(at<T>(a.key, item, j), a.key.row, n, a.A, width, static_cast<C*>(buffer));
    at<float>(a.ranges, item, 0)[block] =
        exponentials(k, n, a.A, width, at<float>(a.exponentials_out, item, j));
  }
}

// ---- the table --------------------------------------------------------------------------------

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Return the size of the sums' scratch of span_products.
template <class T>
int64_t span_sums(const Backward& a, const Plan& plan) {
  return larger(
      larger(sums_scratch<T>(a, min(plan.columns, a.A)), sums_scratch<T>(a, a.A % plan.columns)),
      larger(sums_scratch<T>(a, min(plan.columns, a.Dv)), sums_scratch<T>(a, a.Dv % plan.columns)));
}
int64_t span_sums(const Backward& a, const Plan& plan) {
  if (a.dtype == Dtype::f64) return span_sums<double>(a, plan);
  return a.dtype == Dtype::f32 ? span_sums<float>(a, plan) : span_sums<Half>(a, plan);
}

// Return the size of the scratch for scores and for bands of them.
template <class C>
int64_t tiles_elements(const Problem& a, const Plan& plan) {
  const int64_t widest = larger(a.A, a.Dv);
  const int64_t bands =
      a.key_bounds.data ? gemm_small_scratch<C>(kMostRows + band_keys(a), widest) + band_scratch<C>(a) : 0;
  return Scores<float, C>::room(plan.rows, widest) + bands;
}

// Return the size of the scratch for products, and for `again` rows of them if a library computes
// them.
template <class C>
int64_t product_elements(const Problem& a, const Plan& plan, int64_t again) {
  const int64_t longest = larger(a.Tq, a.Tk) + 1;
  return gemm_small_scratch<C>(longest, larger(a.A, a.Dv)) + (plan.multiplied ? again * plan.columns : 0);
}

template <class C>
int64_t forward_elements(const Forward& a, const Plan& plan) {
  return larger(tiles_elements<C>(a, plan), product_elements<C>(a, plan, plan.rows)) +
         scores_scratch<C>(a, plan);
}

template <class C>
int64_t backward_elements(const Backward& a, const Plan& plan) {
  constexpr int64_t W2 = 2 * Vector<C>::width;
  const int64_t longest = larger(a.Tq, a.Tk) + 1, tiles = tiles_elements<C>(a, plan);
  const int64_t products =
      a.key_bounds.data ? tiles + span_sums(a, plan) : product_elements<C>(a, plan, longest);
  const int64_t slice = a.score_vector.data ? 2 * longest * 2 * W2 + W2 + band_scratch<C>(a) : 0;
  const int64_t step = 17 * round_up(padded<C>(a.A), kPadding);
  return larger(larger(tiles, products), larger(slice, step));
}

// Return the bytes of `floats` floats, or, for float64, of `doubles` doubles.
size_t scratch_bytes(Dtype dtype, int64_t floats, int64_t doubles) {
  const size_t bytes = dtype == Dtype::f64 ? doubles * sizeof(double) : floats * sizeof(float);
  return (bytes + 63) / 64 * 64;
}

size_t forward_scratch(const Forward& a, const Plan& plan) {
  return scratch_bytes(a.dtype, forward_elements<float>(a, plan), forward_elements<double>(a, plan));
}
size_t backward_scratch(const Backward& a, const Plan& plan) {
  return scratch_bytes(a.dtype, backward_elements<float>(a, plan), backward_elements<double>(a, plan));
}
size_t key_exponentials_scratch(const cpu::KeyExponentials& a) {
  const int64_t numbers = kKeyBlock * round_up(a.A, kPadding);
  return scratch_bytes(a.dtype, numbers, numbers);
}

int64_t row_items(const Problem& a, const Plan& plan) { return a.B * a.H * row_blocks(a, plan); }
int64_t key_items(const Problem& a, const Plan& plan) {
  return row_items(a, plan) * parts(a.Tk, plan.keys);
}

}  // namespace

extern const AttentionKernels attention = {
    .forward_scratch = forward_scratch,
    .scores = {[](const Forward& a, const Plan& plan) { return key_items(a, plan); },
               ATTNFAST_BY_DTYPE(scores)},
    .softmax = {[](const Forward& a, const Plan& plan) { return row_items(a, plan); },
                ATTNFAST_BY_DTYPE(softmax)},
    .context = {[](const Forward& a, const Plan& plan) {
                  return row_items(a, plan) * parts(a.Dv, plan.columns);
                },
                ATTNFAST_BY_DTYPE(context)},
    .span = {[](const Forward& a, const Plan& plan) { return row_items(a, plan); },
             ATTNFAST_BY_DTYPE(forward_span)},
    .backward_scratch = backward_scratch,
    .grad_weights = {[](const Backward& a, const Plan& plan) { return key_items(a, plan); },
                     ATTNFAST_BY_DTYPE(grad_weights)},
    .grad_score = {[](const Backward& a, const Plan& plan) { return row_items(a, plan); },
                   ATTNFAST_BY_DTYPE(grad_score)},
    .grad_score_span = {[](const Backward& a, const Plan& plan) { return row_items(a, plan); },
                        ATTNFAST_BY_DTYPE(grad_score_span)},
    .grad_inputs = {[](const Backward& a, const Plan& plan) {
                      return a.B * a.H * (feature_slices(a, plan) + value_slices(a, plan));
                    },
                    ATTNFAST_BY_DTYPE(grad_inputs)},
    .grad_value = {[](const Backward& a, const Plan& plan) { return a.B * a.H * value_slices(a, plan); },
                   ATTNFAST_BY_DTYPE(grad_value)},
    .key_exponentials_scratch = key_exponentials_scratch,
    .key_exponentials = {[](const cpu::KeyExponentials& a, const Plan&) {
                           return a.B * a.H * parts(a.Tk, kKeyBlock);
                         },
                         ATTNFAST_BY_DTYPE(key_exponentials)},
};

}  // namespace VARIANT
}  // namespace attnfast
