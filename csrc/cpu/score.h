// Scores of tiles of queries and keys; tanh has three paths.
//
// With Eq = e^{2q} and Ek = e^{2k} computed once per element, tanh(q + k) = 1 - 2 / (1 + Eq Ek),
// and two features share a reciprocal:  w0/d0 + w1/d1 = (w0 d1 + w1 d0) / (d0 d1). The error is
// that of values near 1, too large if tanh is small: up to kSmallSumLimit tanh(q) and tanh(k) are
// computed once, and tanh(q + k) = (tanh q + tanh k) / (1 + tanh q tanh k), where pairs share a
// reciprocal too. Beyond kFactoredSumLimit the direct path computes tanh(q + k).
#pragma once
#include "product.h"

namespace attnfast {
namespace VARIANT {
namespace {

enum class Path { direct, factored, small };  // of tanh; other scores always use the direct path

// Compute e^{2x}, with 0 in the padding so that a padded feature has d = 1 and weight 0. Return the
// largest |x|, ignoring NaN: a NaN in a masked key must not select the path.
template <class C>
C exponentials(Rows<C> x, int64_t n, int64_t width, int64_t padded, C* out) {
  constexpr int kLanes = Vector<C>::width;
  Vec<C> most = {};
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < padded; c += kLanes) {
      const Vec<C> v = load(x.data + r * x.stride + c);
      most = v > most ? v : most;
      most = -v > most ? -v : most;
      store(out + r * padded + c, exp(v * (C)2));
    }
    for (int64_t c = width; c < padded; ++c) out[r * padded + c] = 0;
  }
  return highest<C>(most);
}

// Return the largest |x|, ignoring NaN.
template <class C>
C range_of(Rows<C> x, int64_t n, int64_t padded) {
  constexpr int kLanes = Vector<C>::width;
  Vec<C> most = {};
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < padded; c += kLanes) {
      const Vec<C> v = load(x.data + r * x.stride + c);
      most = v > most ? v : most;
      most = -v > most ? -v : most;
    }
  return highest<C>(most);
}

// Compute -2 tanh(x), the input of Path::small.
template <class C>
void double_tanh(Rows<C> x, int64_t n, int64_t padded, C* out) {
  constexpr int kLanes = Vector<C>::width;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < padded; c += 2 * kLanes) {
      const C* from = x.data + r * x.stride + c;
      const Vec<C> z[] = {load(from), load(from + kLanes)};
      Vec<C> s[2];
      half_tanh(z, s);
      for (int i = 0; i < 2; ++i) store(out + r * padded + c + i * kLanes, s[i] * (C)4);
    }
}

// Compute out[i][j] = sum_c q_ic k_jc (dot), or sum_c w_c f(q_ic + k_jc). A term of tanh is -w tanh
// / 2, computed as w (1/d - 1/2): a sum of w/d that is subtracted from the sum of w is rounded to
// the precision of the sum of |w|, and if the weights have one sign the score is far smaller.
template <class C, Score S, Path P, int I, int J>
void score_tile(Rows<C> q, Rows<C> k, const C* w, int64_t padded, C* out, int64_t out_stride) {
  constexpr int kLanes = Vector<C>::width;
  constexpr int64_t kFeatures = 16 * 2 * kLanes;  // per partial sum: sums of partial sums lose less
  Vec<C> total[I][J] = {};
  for (int64_t c0 = 0; c0 < padded; c0 += kFeatures) {
    Vec<C> acc[I][J] = {};
    for (int64_t c = c0; c < min(c0 + kFeatures, padded); c += 2 * kLanes) {
      if constexpr (I == 1 && J == 4)  // a single query waits for its keys: prefetch the next four
        for (int j = 0; j < J; ++j) prefetch_step(k.data + (J + j) * k.stride + c);
      for (int i = 0; i < I; ++i) {
        const C* qi = q.data + i * q.stride + c;
        const Vec<C> q0 = load(qi), q1 = load(qi + kLanes);
        if constexpr (S == Score::tanh && P == Path::direct) {
          Vec<C> z[2 * J], s[2 * J];
          for (int j = 0; j < J; ++j) {
            z[2 * j] = q0 + load(k.data + j * k.stride + c);
            z[2 * j + 1] = q1 + load(k.data + j * k.stride + c + kLanes);
          }
          half_tanh(z, s);
          const Vec<C> w0 = load(w + c), w1 = load(w + c + kLanes);
          for (int j = 0; j < J; ++j) acc[i][j] += w0 * s[2 * j] + w1 * s[2 * j + 1];
          continue;
        }
        for (int j = 0; j < J; ++j) {
          const C* kj = k.data + j * k.stride + c;
          const Vec<C> k0 = load(kj), k1 = load(kj + kLanes);
          if constexpr (S == Score::dot) {
            acc[i][j] += q0 * k0;
            acc[i][j] += q1 * k1;
            continue;
          }
          const Vec<C> w0 = load(w + c), w1 = load(w + c + kLanes);
          if constexpr (S != Score::tanh) {
            acc[i][j] += w0 * activation<S, C>(q0 + k0);
            acc[i][j] += w1 * activation<S, C>(q1 + k1);
          } else if constexpr (P == Path::factored) {
            const Vec<C> d0 = q0 * k0 + (C)1, d1 = q1 * k1 + (C)1;
            acc[i][j] += (w0 * d1 + w1 * d0) * reciprocal(d0 * d1) - (w0 + w1) * (C)0.5;
          } else if constexpr (P == Path::small) {  // w s, as below
            const Vec<C> d0 = q0 * k0 + (C)4, d1 = q1 * k1 + (C)4;
            acc[i][j] += (w0 * (q0 + k0) * d1 + w1 * (q1 + k1) * d0) * reciprocal(d0 * d1);
          }
        }
      }
    }
    for (int i = 0; i < I; ++i)
      for (int j = 0; j < J; ++j) total[i][j] += acc[i][j];
  }
  for (int i = 0; i < I; ++i) {
    C score[J];
    if constexpr (J == 4) {
      sums(total[i], score);
    } else {
      for (int j = 0; j < J; ++j) score[j] = sum<C>(total[i][j]);
    }
    for (int j = 0; j < J; ++j) out[i * out_stride + j] = S == Score::tanh ? -2 * score[j] : score[j];
  }
}

// Compute the scores of nq queries and nk keys. Four keys stay in the L1 cache while the queries
// pass.
template <class C, Score S, Path P>
void score_block(Rows<C> q, int64_t nq, Rows<C> k, int64_t nk, const C* w, int64_t padded, C* out,
                 int64_t out_stride) {
  constexpr int I = 2;
  for (int64_t j = 0; j < nk;) {
    const int64_t keys = nk - j >= 4 ? 4 : 1;
    for (int64_t i = 0; i < nq;) {
      const int64_t rows = nq - i >= I ? I : 1;
      const auto tile = keys == 4 ? (rows == I ? score_tile<C, S, P, I, 4> : score_tile<C, S, P, 1, 4>)
                                  : (rows == I ? score_tile<C, S, P, I, 1> : score_tile<C, S, P, 1, 1>);
      tile({q.data + i * q.stride, q.stride}, {k.data + j * k.stride, k.stride}, w, padded,
           out + i * out_stride + j, out_stride);
      i += rows;
    }
    j += keys;
  }
}

// Compute the dot scores of nq queries and nk keys; scratch holds two vectors of keys, transposed.
template <class C>
void dot_block(Rows<C> q, int64_t nq, Rows<C> k, int64_t nk, int64_t padded, C* out, int64_t out_stride,
               C* scratch) {
  constexpr int W2 = 2 * Vector<C>::width;
  if (nq < 6)  // too few to repay a transposition
    return score_block<C, Score::dot, Path::direct>(q, nq, k, nk, nullptr, padded, out, out_stride);
  for (int64_t j = 0; j < nk; j += W2) {
    const int64_t keys = min(nk - j, W2);
    transpose(k.data + j * k.stride, k.stride, keys, padded, scratch, W2);
    gemm_small_packed<false>(q.data, q.stride, 1, nq, padded, scratch, (C)1, out + j, out_stride, keys);
  }
}

// Compute the dot scores of keys that are already transposed, `k_row` apart. Up to two vectors more
// are read and written.
template <class C>
void dot_transposed(Rows<C> q, int64_t nq, const C* k, int64_t k_row, int64_t nk, int64_t padded, C* out,
                    int64_t out_stride) {
  constexpr int64_t W2 = 2 * Vector<C>::width;
  for (int64_t j = 0; j < nk; j += W2)
    gemm_small_rows<false, false>(q.data, q.stride, 1, nq, padded, k + j, k_row, (C)1, out + j, out_stride,
                                  W2);
}

// Compute s = -f(q + k) / 2 for two vectors of features; for tanh, 1 / (1 + e^{2(q + k)}) - 1/2,
// or, from the results of double_tanh, (q + k) / (4 + q k).
template <class C, Score S, Path P>
inline void half_activation(Vec<C> q0, Vec<C> q1, Vec<C> k0, Vec<C> k1, Vec<C>& s0, Vec<C>& s1) {
  if constexpr (S != Score::tanh) {
    s0 = activation<S, C>(q0 + k0) * (C)-0.5;
    s1 = activation<S, C>(q1 + k1) * (C)-0.5;
  } else if constexpr (P == Path::factored) {
    const Vec<C> d0 = q0 * k0 + (C)1, d1 = q1 * k1 + (C)1;
    const Vec<C> r = reciprocal(d0 * d1);
    s0 = r * d1 - (C)0.5;
    s1 = r * d0 - (C)0.5;
  } else if constexpr (P == Path::small) {
    const Vec<C> d0 = q0 * k0 + (C)4, d1 = q1 * k1 + (C)4;
    const Vec<C> r = reciprocal(d0 * d1);
    s0 = (q0 + k0) * (r * d1);
    s1 = (q1 + k1) * (r * d0);
  } else {
    const Vec<C> z[] = {q0 + k0, q1 + k1};
    Vec<C> s[2];
    half_tanh(z, s);
    s0 = s[0], s1 = s[1];
  }
}

// Return g f'(q + k) / 4, from a quarter of g and t = g s; for tanh, g (1/4 - s^2).
template <Score S, class C>
inline Vec<C> quarter_slope(C quarter, Vec<C> t, Vec<C> s) {
  if constexpr (S == Score::tanh) return quarter - t * s;
  else return times_slope<S, C>(splat(quarter), s * (C)-2);
}

// For I queries and n keys, add to the gradients of two vectors of features, packed. With g the
// gradient of the score:
//   grad_q_i += sum_j g f' / 4,  grad_k_j += sum_i g f' / 4,  grad_w += sum_ij g s
template <class C, Score S, Path P, int I>
void grad_tile(const C* q, const C* k, const C* g, int64_t g_stride, int64_t n, C* grad_q, C* grad_k,
               C* grad_w) {
  constexpr int kLanes = Vector<C>::width;
  Vec<C> q0[I], q1[I], gq0[I] = {}, gq1[I] = {}, gw0 = {}, gw1 = {};
  for (int i = 0; i < I; ++i) {
    q0[i] = load(q + i * 2 * kLanes);
    q1[i] = load(q + i * 2 * kLanes + kLanes);
  }
  for (int64_t j = 0; j < n; ++j) {
    if (g[j] == 0 && g[(I - 1) * g_stride + j] == 0) continue;  // I is 1 or 2
    const Vec<C> k0 = load(k + j * 2 * kLanes), k1 = load(k + j * 2 * kLanes + kLanes);
    Vec<C> gk0 = load(grad_k + j * 2 * kLanes), gk1 = load(grad_k + j * 2 * kLanes + kLanes);
    for (int i = 0; i < I; ++i) {
      Vec<C> s0, s1;
      half_activation<C, S, P>(q0[i], q1[i], k0, k1, s0, s1);
      const C gij = g[i * g_stride + j], quarter = gij * (C)0.25;
      const Vec<C> t0 = gij * s0, t1 = gij * s1;
      const Vec<C> u0 = quarter_slope<S>(quarter, t0, s0), u1 = quarter_slope<S>(quarter, t1, s1);
      gw0 += t0;
      gw1 += t1;
      gq0[i] += u0;
      gq1[i] += u1;
      gk0 += u0;
      gk1 += u1;
    }
    store(grad_k + j * 2 * kLanes, gk0);
    store(grad_k + j * 2 * kLanes + kLanes, gk1);
  }
  add(grad_w, gw0);
  add(grad_w + kLanes, gw1);
  for (int i = 0; i < I; ++i) {
    add(grad_q + i * 2 * kLanes, gq0[i]);
    add(grad_q + i * 2 * kLanes + kLanes, gq1[i]);
  }
}

// Call grad_tile for all queries and keys by blocks: the data of a block stays in the L1 cache, and
// sums of partial sums lose less than one long sum.
template <class C, Score S, Path P>
void grad_blocks(const C* q, const C* k, const C* g, int64_t g_stride, int64_t nq, int64_t n, C* grad_q,
                 C* grad_k, C* grad_w) {
  constexpr int W2 = 2 * Vector<C>::width;
  constexpr int64_t kQueries = 32, kKeys = 128;
  C part_k[kKeys * W2], part_w[W2];
  for (int64_t j = 0; j < n; j += kKeys) {
    const int64_t keys = min(kKeys, n - j);
    for (int64_t i0 = 0; i0 < nq; i0 += kQueries) {
      const int64_t end = min(i0 + kQueries, nq);
      for (int64_t x = 0; x < keys * W2; ++x) part_k[x] = 0;
      for (int64_t x = 0; x < W2; ++x) part_w[x] = 0;
      for (int64_t i = i0; i < end;) {
        const bool two = i + 2 <= end;
        const auto tile = two ? grad_tile<C, S, P, 2> : grad_tile<C, S, P, 1>;
        tile(q + i * W2, k + j * W2, g + i * g_stride + j, g_stride, keys, grad_q + i * W2, part_k, part_w);
        i += two ? 2 : 1;
      }
      for (int64_t x = 0; x < keys * W2; ++x) grad_k[j * W2 + x] += part_k[x];
      for (int64_t x = 0; x < W2; ++x) grad_w[x] += part_w[x];
    }
  }
}

// Compute the same gradients for one query and four whole rows of keys; without `keys` only grad_q.
// grad_k [4, width] is overwritten, not added to. The next four rows are prefetched, `ahead`
// elements further.
template <class C, Score S, Path P, bool keys>
void grad_rows(const C* q, const C* const (&k)[4], const C (&g)[4], int64_t width, int64_t ahead, C* grad_q,
               C* grad_k, C* grad_w) {
  constexpr int kLanes = Vector<C>::width;
  for (int64_t c = 0; c < width; c += 2 * kLanes) {
    const Vec<C> q0 = load(q + c), q1 = load(q + c + kLanes);
    Vec<C> gq0 = {}, gq1 = {}, gw0 = {}, gw1 = {};
    for (int j = 0; j < 4; ++j) prefetch_step(k[j] + ahead + c);
    Vec<C> s[8];
    if constexpr (S == Score::tanh && P == Path::direct) {
      Vec<C> z[8];
      for (int j = 0; j < 4; ++j)
        z[2 * j] = q0 + load(k[j] + c), z[2 * j + 1] = q1 + load(k[j] + c + kLanes);
      half_tanh(z, s);
    } else {
      for (int j = 0; j < 4; ++j)
        half_activation<C, S, P>(q0, q1, load(k[j] + c), load(k[j] + c + kLanes), s[2 * j], s[2 * j + 1]);
    }
    for (int j = 0; j < 4; ++j) {
      const Vec<C> s0 = s[2 * j], s1 = s[2 * j + 1];
      const C quarter = g[j] * (C)0.25;
      const Vec<C> t0 = g[j] * s0, t1 = g[j] * s1;
      const Vec<C> u0 = quarter_slope<S>(quarter, t0, s0), u1 = quarter_slope<S>(quarter, t1, s1);
      gq0 += u0;
      gq1 += u1;
      if constexpr (keys) {
        gw0 += t0;
        gw1 += t1;
        store(grad_k + j * width + c, u0);
        store(grad_k + j * width + c + kLanes, u1);
      }
    }
    add(grad_q + c, gq0);
    add(grad_q + c + kLanes, gq1);
    if constexpr (keys) {
      add(grad_w + c, gw0);
      add(grad_w + c + kLanes, gw1);
    }
  }
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
