// Compute a history's features in the activation of an additive score, and their gradients, for one
// instruction set (see vector.h): the features of 64 keys at a time by two small products, then
// z = q + k + U f and its activation in registers.
#pragma once
#include "coverage.h"
#include "rows.h"
#include "score.h"
#include "transition.h"

namespace attnfast {
namespace VARIANT {
namespace {

// Signals over the keys: the previous weights and the coverage, zero beyond both ends, or their
// gradients.
template <class C>
struct Signals {
  C* channel[2];  // at key 0
  void take(Scratch<C>& scratch, int64_t Tk, int64_t width) {
    for (C*& x : channel) x = scratch.take(Tk + width) + width / 2;
  }
  void clear(int64_t Tk, int64_t width) {
    for (C* x : channel)
      for (int64_t j = -(width / 2); j < Tk + width / 2 + 1; ++j) x[j] = 0;
  }
};

// Return true if the keys' gradients are added to grad_key directly, not to scratch.
template <class C>
bool in_place(const CoverageBackward& a) {
  return a.sums && a.grad_key.data && a.A == padded<C>(a.A);
}

// The buffers of an item. Padded to two vectors: A, K and window_size, the taps of a filter over all channels.
template <class C>
struct Buffers {
  int64_t channels, K, found_row, taps, A, window_size;  // found_row: K padded
  Signals<C> state;
  C *window, *found, *query, *key;
  C *filters, *packed_filters, *projection, *score_vector, *slope;  // parameters; slope: backward only

  Buffers(const Problem& a, const History& h, Scratch<C>& scratch, bool back) {
    K = h.filters_count;
    taps = K ? h.taps : 1;
    channels = h.channels;
    A = padded<C>(a.A);
    found_row = padded<C>(K);
    window_size = padded<C>(channels * taps);
    state.take(scratch, a.Tk, taps);
    if (!K) return;
    window = scratch.take(kKeyBlock * window_size);
    found = scratch.take(kKeyBlock * found_row);
    query = scratch.take(A);
    key = scratch.take(kKeyBlock * A);
    Scratch<C> given{static_cast<C*>(h.features)};
    take_parameters(h.features ? given : scratch, back);
  }

  void take_parameters(Scratch<C>& room, bool back) {
    filters = room.take(K * window_size);
    packed_filters = room.take(window_size * found_row);
    projection = room.take(K * A);
    score_vector = room.take(A);
    if (back) slope = room.take(A * found_row);
  }
};

// The buffers of an item in the backward.
template <class C>
struct BackwardBuffers : Buffers<C> {
  int64_t key_rows;  // of grad_key: 1, shared by all keys, if it is not needed
  Signals<C> grad, grad_before;
  C *past, *grad_past, *shifted;  // of a transition, see transition.h
  C *coverages, *grad_z, *grad_query, *grad_key, *grad_found, *grad_window, *product, *gemm_scratch;
  C *grad_score_vector, *grad_filters, *grad_projection;

  BackwardBuffers(const CoverageBackward& a, Scratch<C>& scratch) : Buffers<C>(a, a, scratch, true) {
    const int64_t K = this->K, A = this->A, window_size = this->window_size,
                  widest = A > window_size ? A : window_size;
    key_rows = a.grad_key.data ? a.Tk : 1;
    grad.take(scratch, a.Tk, this->taps);
    grad_before.take(scratch, a.Tk, this->taps);
    const int64_t logarithms = a.transition_prob.data ? a.Tk : 0;
    past = take_logarithms(scratch, logarithms);
    grad_past = take_logarithms(scratch, logarithms);
    shifted = take_logarithms(scratch, logarithms);
    coverages = scratch.take(a.Tq * a.Tk);
    if (!K) return;
    grad_z = scratch.take(kKeyBlock * A);
    grad_query = scratch.take(A);
    grad_key = scratch.take(in_place<C>(a) ? 0 : key_rows * A);
    grad_found = scratch.take(kKeyBlock * this->found_row);
    grad_window = scratch.take(kKeyBlock * window_size);
    product = scratch.take(K * widest);
    gemm_scratch = scratch.take(gemm_small_scratch<C>(kKeyBlock > K ? kKeyBlock : K, widest));
    take_sums(scratch);
  }

  void take_sums(Scratch<C>& room) {
    grad_score_vector = room.take(this->A);
    grad_filters = room.take(this->K * this->window_size);
    grad_projection = room.take(this->K * this->A);
  }
};

template <class C>
C* row_of(const View& v, const Item& i, int64_t row = 0) {
  return at<C>(v, i, row);
}

// Pack a matrix [rows, columns] for gemm_small_packed, two vectors of columns at a time.
template <class C, class At>
void pack_columns(int64_t rows, int64_t columns, const At& at, C* out) {
  constexpr int64_t W2 = 2 * Vector<C>::width;
  for (int64_t c0 = 0; c0 < columns; c0 += W2)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = c0; c < c0 + W2; ++c) *out++ = c < columns ? at(r, c) : C{};
}

// Compute out[n, K] = p[n, columns] times the matrix packed by pack_columns.
template <class C>
void times_packed(const C* p, int64_t stride, int64_t n, int64_t columns, const C* v, int64_t K, C* out,
                  int64_t out_stride) {
  constexpr int64_t W2 = 2 * Vector<C>::width;
  for (int64_t k = 0; k < K; k += W2, v += columns * W2)
    gemm_small_packed<false>(p, stride, 1, n, columns, v, (C)1, out + k, out_stride, min(W2, K - k));
}

template <class C>
void copy(const C* from, int64_t n, C* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

// Pack the parameters of the features: filters [K, window_size] and projection [K, A], rows padded with
// zeros.
template <class T, class C>
void prepare_features(const Problem& a, const History& h, const Item& item, bool back, Buffers<C>& p) {
  const C *filters = row_of<C>(h.filters, item), *projection = row_of<C>(h.projection, item);
  const int64_t window_size = p.channels * p.taps;
  for (int64_t k = 0; k < p.K; ++k) {
    for (int64_t c = 0; c < p.window_size; ++c)
      p.filters[k * p.window_size + c] = c < window_size ? filters[k * window_size + c] : 0;
    for (int64_t c = 0; c < p.A; ++c) p.projection[k * p.A + c] = c < a.A ? projection[c * p.K + k] : 0;
  }
  pack_columns(
      window_size, p.K, [&](int64_t c, int64_t k) { return filters[k * window_size + c]; },
      p.packed_filters);
  const T* score_vector = at<T>(a.score_vector, item, 0);
  for (int64_t c = 0; c < p.A; ++c) p.score_vector[c] = c < a.A ? widen(score_vector[c]) : C{};
  if (!back) return;
  const auto slope = [&](int64_t c, int64_t k) {  // factor of grad_z_c in the gradient of feature k
    return 4 * p.score_vector[c] * p.projection[k * p.A + c];
  };
  if (p.K > 1) pack_columns(p.A, p.K, slope, p.slope);
  for (int64_t c = 0; p.K == 1 && c < p.A; ++c) p.slope[c] = slope(c, 0);
}

// Apply the filters around n keys and store found[i, k]; keys[i] are the positions of the keys.
template <class C>
void find(Buffers<C>& p, const int64_t* keys, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    C* out = p.window + i * p.window_size;
    for (int64_t x = 0; x < p.channels; ++x) {
      const C* from = p.state.channel[x] + keys[i] - p.taps / 2;
      for (int64_t c = 0; c < p.taps; ++c) *out++ = from[c];
    }
    for (int64_t c = p.channels * p.taps; c < p.window_size; ++c) *out++ = 0;
  }
  times_packed(p.window, p.window_size, n, p.channels * p.taps, p.packed_filters, p.K, p.found,
               p.found_row);
}

// Compute z = q + k_j + sum_k found_jk U_k for J keys and two vectors of features from c on: z[2 j]
// and z[2 j + 1].
template <int J, class C>
inline void features(const Buffers<C>& p, const C* q, const C* const* k, const C* found, int64_t c,
                     Vec<C> (&z)[2 * J]) {
  constexpr int V = Vector<C>::width;
  for (Vec<C>& x : z) x = Vec<C>{};
  for (int64_t i = 0; i < p.K; ++i) {
    const C* u = p.projection + i * p.A + c;
    const Vec<C> u0 = load(u), u1 = load(u + V);
    for (int j = 0; j < J; ++j) {
      z[2 * j] += found[j * p.found_row + i] * u0;
      z[2 * j + 1] += found[j * p.found_row + i] * u1;
    }
  }
  for (int j = 0; j < J; ++j) {  // add the larger terms last: less is rounded away
    z[2 * j] += load(k[j] + c);
    z[2 * j + 1] += load(k[j] + c + V);
    z[2 * j] += load(q + c);
    z[2 * j + 1] += load(q + c + V);
  }
}

// Prefetch column c of the next J keys: rows 2 KB apart are not recognised as a stream.
template <int J, class C>
inline void prefetch_next(const C* const* k, int64_t c) {
  for (int j = J; j < 2 * J; ++j) prefetch_step(k[j] + c);
}

// Compute s = -f(z) / 2.
template <Score S, int N, class C>
inline void half_activations(const Vec<C> (&z)[N], Vec<C> (&s)[N]) {
  if constexpr (S == Score::tanh) half_tanh(z, s);
  else
    for (int i = 0; i < N; ++i) s[i] = activation<S, C>(z[i]) * (C)-0.5;
}

// Compute out[j] = sum_c w_c f(z_jc) for J keys.
template <Score S, int J, class C>
void features_tile(const Buffers<C>& p, const C* const* k, const C* found, C* out) {
  constexpr int V = Vector<C>::width;
  Vec<C> acc[J] = {};
  for (int64_t c = 0; c < p.A; c += 2 * V) {
    Vec<C> z[2 * J], s[2 * J];
    prefetch_next<J>(k, c);
    features<J>(p, p.query, k, found, c, z);
    half_activations<S, 2 * J, C>(z, s);
    const Vec<C> w0 = load(p.score_vector + c), w1 = load(p.score_vector + c + V);
    for (int j = 0; j < J; ++j) acc[j] += w0 * s[2 * j] + w1 * s[2 * j + 1];
  }
  for (int j = 0; j < J; ++j) out[j] = -2 * sum<C>(acc[j]);
}

// Gather the rows of n keys at the given positions. The last row is repeated after them for code
// that prefetches.
template <class T, class C>
void take_keys(const Problem& a, const Item& item, Buffers<C>& p, const int64_t* keys, int64_t n,
               const C** out) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = gather(at<T>(a.key, item, keys[i]), 0, 1, a.A, p.A, p.key + i * p.A).data;
  for (int64_t i = n; i < n + 4; ++i) out[i] = out[n - 1];
}

// Compute the additive scores of row t with the history's features in the activation.
template <class T, class C>
void scores_with_features(const Problem& a, const Item& item, int64_t t, Buffers<C>& p, C* out) {
  const C* q = gather(at<T>(a.query, item, t), 0, 1, a.A, p.A, p.query).data;
  if (q != p.query) copy(q, a.A, p.query);
  const auto tile = [&](bool four) {
    return by_activation(a.score, [&](auto known) {
      constexpr Score S = decltype(known)::score;
      return four ? features_tile<S, 4, C> : features_tile<S, 1, C>;
    });
  };
  int64_t keys[kKeyBlock];
  const C* k[kKeyBlock + 4];
  for (int64_t j = 0; j < item.seen; j += kKeyBlock) {
    const int64_t n = min(kKeyBlock, item.seen - j);
    for (int64_t i = 0; i < n; ++i) keys[i] = j + i;
    find(p, keys, n);
    take_keys<T>(a, item, p, keys, n, k);
    for (int64_t i = 0; i < n; i += n - i >= 4 ? 4 : 1)
      tile(n - i >= 4)(p, k + i, p.found + i * p.found_row, out + j + i);
  }
}

// ---- backward ---------------------------------------------------------------------------------

// With s = -f(z) / 2 and g the gradients of J scores, compute grad_z_jc = g_j f'(z) / 4. It lacks a
// factor of 4 w_c, as does the term added to grad_query; the term g_j s added to grad_score_vector lacks
// -2. If there is only `one` filter, grad_z is added to grad_found and grad_projection here,
// otherwise it is stored.
template <Score S, int J, bool one, class C>
void grad_tile(const BackwardBuffers<C>& p, const C* const* k, const C* g, const C* found, C* const* grad_k,
               C* grad_z, C* grad_found) {
  constexpr int V = Vector<C>::width;
  Vec<C> f[J] = {};
  C *const grad_query = p.grad_query, *const grad_score_vector = p.grad_score_vector;
  C* const grad_projection = p.grad_projection;
  const C *const q = p.query, *const score_vector = p.score_vector, *const slope = p.slope;
  const int64_t A = p.A;
  for (int64_t c = 0; c < A; c += 2 * V) {
    Vec<C> z[2 * J], s[2 * J];
    prefetch_next<J>(k, c);
    prefetch_next<J>(grad_k, c);
    features<J>(p, q, k, found, c, z);
    half_activations<S, 2 * J, C>(z, s);
    const Vec<C> slope0 = load(score_vector + c) * (C)4, slope1 = load(score_vector + c + V) * (C)4;
    Vec<C> q0 = {}, q1 = {}, w0 = {}, w1 = {}, p0 = {}, p1 = {};
    for (int j = 0; j < J; ++j) {
      const Vec<C> s0 = s[2 * j], s1 = s[2 * j + 1];
      const Vec<C> t0 = g[j] * s0, t1 = g[j] * s1;
      const C quarter = g[j] * (C)0.25;
      const Vec<C> u0 = quarter_slope<S>(quarter, t0, s0), u1 = quarter_slope<S>(quarter, t1, s1);
      w0 += t0;
      w1 += t1;
      q0 += u0;
      q1 += u1;
      add(grad_k[j] + c, slope0 * u0);
      add(grad_k[j] + c + V, slope1 * u1);
      if constexpr (one) {
        f[j] += u0 * load(slope + c) + u1 * load(slope + c + V);
        p0 += found[j * p.found_row] * u0;
        p1 += found[j * p.found_row] * u1;
      } else {
        store(grad_z + j * A + c, u0);
        store(grad_z + j * A + c + V, u1);
      }
    }
    add(grad_query + c, q0);
    add(grad_query + c + V, q1);
    add(grad_score_vector + c, w0);
    add(grad_score_vector + c + V, w1);
    if constexpr (one) {
      add(grad_projection + c, p0);
      add(grad_projection + c + V, p1);
    }
  }
  if constexpr (one)
    for (int j = 0; j < J; ++j) grad_found[j * p.found_row] = sum<C>(f[j]);
}

template <class C>
void add_up(C* sum, const C* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

// Up to one block of the keys of a row that have a gradient, NaN included.
template <class C>
struct KeysWithGradient {
  int64_t at[kKeyBlock], n;
  const C* rows[kKeyBlock + 4];  // of keys and of their gradients; the last is repeated after them
  C *grad[kKeyBlock + 4], gradient[kKeyBlock];

  // Find such keys from key j on; return true if there are any.
  template <class T>
  bool find(const CoverageBackward& a, const Item& item, const C* g, C scale, BackwardBuffers<C>& p,
            int64_t& j) {
    n = 0;
    for (; j < item.seen && n < kKeyBlock; ++j) {
      if (g[j] == 0) continue;
      grad[n] = p.grad_key + (a.grad_key.data ? j : 0) * p.A;
      gradient[n] = scale * g[j];
      at[n++] = j;
    }
    if (n == 0) return false;
    for (int64_t i = n; i < n + 4; ++i) grad[i] = grad[n - 1];
    take_keys<T>(a, item, p, at, n, rows);
    return true;
  }
};

// Compute the gradients of query, key, weight, features and the history before the row from the
// gradients of row t's scores times the scale.
template <class T, class C>
void grad_features(const CoverageBackward& a, const Item& item, int64_t t, const C* g,
                   BackwardBuffers<C>& p) {
  const C scale = a.scale;
  const C* q = gather(at<T>(a.query, item, t), 0, 1, a.A, p.A, p.query).data;
  if (q != p.query) copy(q, a.A, p.query);
  for (int64_t c = 0; c < p.A; ++c) p.grad_query[c] = 0;
  KeysWithGradient<C> keys;
  for (int64_t j = 0; keys.template find<T>(a, item, g, scale, p, j);) {
    const int64_t n = keys.n;
    find(p, keys.at, n);
    const bool one = p.K == 1;
    for (int64_t i = 0; i < n; i += n - i >= 4 ? 4 : 1) {
      const auto tile = by_activation(a.score, [&](auto known) {
        constexpr Score S = decltype(known)::score;
        return n - i >= 4 ? (one ? grad_tile<S, 4, true, C> : grad_tile<S, 4, false, C>)
                          : (one ? grad_tile<S, 1, true, C> : grad_tile<S, 1, false, C>);
      });
      const int64_t of_filters = i * p.found_row;
      tile(p, keys.rows + i, keys.gradient + i, p.found + of_filters, keys.grad + i, p.grad_z + i * p.A,
           p.grad_found + of_filters);
    }
    if (!one) times_packed(p.grad_z, p.A, n, p.A, p.slope, p.K, p.grad_found, p.found_row);
    if (a.grad_filters.data) {
      if (!one) {
        gemm_small(p.found, 1, p.found_row, p.K, n, p.grad_z, p.A, p.A, (C)1, p.product, p.A,
                   p.gemm_scratch);
        add_up(p.grad_projection, p.product, p.K * p.A);
      }
      gemm_small(p.grad_found, 1, p.found_row, p.K, n, p.window, p.window_size, p.window_size, (C)1,
                 p.product, p.window_size, p.gemm_scratch);
      add_up(p.grad_filters, p.product, p.K * p.window_size);
    }
    gemm_small(p.grad_found, p.found_row, 1, n, p.K, p.filters, p.window_size, p.window_size, (C)1,
               p.grad_window, p.window_size, p.gemm_scratch);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t x = 0; x < p.channels; ++x)
        add_up((x ? p.grad : p.grad_before).channel[x] + keys.at[i] - p.taps / 2,
               p.grad_window + i * p.window_size + x * p.taps, p.taps);
  }
  if (!a.grad_query.data) return;
  T* out = at<T>(a.grad_query, item, t);
  for (int64_t c = 0; c < a.A; ++c) narrow(4 * p.score_vector[c] * p.grad_query[c], out[c]);
}

template <class C>
void begin_grad_features(const CoverageBackward& a, const Item& item, BackwardBuffers<C>& p) {
  if (in_place<C>(a)) p.grad_key = row_of<C>(a.grad_key, item);
  else
    for (C* x = p.grad_key; x < p.grad_key + p.key_rows * p.A; ++x) *x = 0;
  Scratch<C> sums{a.parameter_sums.data ? row_of<C>(a.parameter_sums, item) : nullptr};
  if (a.parameter_sums.data) return p.take_sums(sums);
  for (C* x = p.grad_score_vector; x < p.grad_score_vector + p.A; ++x) *x = 0;
  for (C* x = p.grad_filters; x < p.grad_filters + p.K * p.window_size; ++x) *x = 0;
  for (C* x = p.grad_projection; x < p.grad_projection + p.K * p.A; ++x) *x = 0;
}

template <class T, class C>
void put_grad_keys(const CoverageBackward& a, const Item& item, const BackwardBuffers<C>& p) {
  for (int64_t j = 0; a.grad_key.data && !in_place<C>(a) && j < a.Tk; ++j)
    for (int64_t c = 0; c < a.A; ++c) {
      const C x = j < item.seen ? p.grad_key[j * p.A + c] : C{};
      if (a.sums) row_of<C>(a.grad_key, item, j)[c] += x;
      else narrow(x, at<T>(a.grad_key, item, j)[c]);
    }
}

template <class C>
void put_grad_parameters(const CoverageBackward& a, const Item& item, const BackwardBuffers<C>& p) {
  const auto put = [&](const View& v, int64_t i, C x) {
    C& out = row_of<C>(v, item)[i];
    out = a.sums ? out + x : x;
  };
  for (int64_t c = 0; a.grad_score_vector.data && c < a.A; ++c)
    put(a.grad_score_vector, c, -2 * p.grad_score_vector[c]);
  for (int64_t k = 0; a.grad_filters.data && k < p.K; ++k) {
    const int64_t window_size = p.channels * p.taps;
    for (int64_t c = 0; c < window_size; ++c)
      put(a.grad_filters, k * window_size + c, p.grad_filters[k * p.window_size + c]);
    for (int64_t c = 0; c < a.A; ++c)
      put(a.grad_projection, c * p.K + k, 4 * p.score_vector[c] * p.grad_projection[k * p.A + c]);
  }
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
