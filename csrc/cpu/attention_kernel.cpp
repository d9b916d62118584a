// attention on the CPU, for one instruction set (see vector.h); the launcher is attention.cpp.
//
//   e_ij = scale * score(q_i, k_j) + bias_ij,  P = softmax(e) over visible keys,  c_i = sum P_ij v_j
//
// Scores are computed tile by tile from rows held in cache; everything else is rows of scores and
// products of a small matrix with rows (mix). The additive score is the factored one: with
// Eq = e^{2q} and Ek = e^{2k} taken once per element, tanh(q + k) = 1 - 2 / (1 + Eq Ek), and two
// features share a reciprocal:  w0/d0 + w1/d1 = (w0 d1 + w1 d0) / (d0 d1).
#include "attention.h"
#include "vector.h"

namespace attnfast {
namespace VARIANT {
namespace {

constexpr int64_t kKeyBlock = 64;
// With max|q| + max|k| up to here d0 d1 stays below 2^126. Beyond, the direct path takes e^{2(q+k)}.
constexpr double kFactoredLimit = 21.8;

enum class Score { dot, factored, direct };

struct Item {
  int64_t b, h, bh, part;
};

Item locate(const Attention& a, int64_t item, int64_t parts) {
  const int64_t bh = item / parts;
  return {bh / a.H, bh % a.H, bh, item % parts};
}

int64_t keys_seen(const Attention& a, int64_t b) {
  const int64_t n = a.lengths ? a.lengths[b] : a.Tk;
  return n < 0 ? 0 : min(n, a.Tk);
}

template <class T>
T* at(const View& v, const Item& i, int64_t row) {
  return static_cast<T*>(v.data) + i.b * v.batch + i.h * v.head + row * v.row;
}

// ---- rows -------------------------------------------------------------------------------------

// Rows of numbers to compute with; `stride` apart, `padded` columns with zeros past the last.
template <class C>
struct Rows {
  const C* data;
  int64_t stride;
};

// Bring `n` rows into computing type and padding, in `scratch` unless they are so already.
template <class T, class C>
Rows<C> gather(const T* src, int64_t stride, int64_t n, int64_t width, int64_t padded, C* scratch) {
  if constexpr (sizeof(T) == sizeof(C)) {
    if (width == padded) return {src, stride};
  }
  for (int64_t r = 0; r < n; ++r) {
    C* out = scratch + r * padded;
    for (int64_t c = 0; c < width; ++c) out[c] = widen(src[r * stride + c]);
    for (int64_t c = width; c < padded; ++c) out[c] = 0;
  }
  return {scratch, padded};
}

// The largest magnitude, passing over NaN: a NaN in a masked key must not choose the path.
template <class C>
C largest(Rows<C> x, int64_t n, int64_t padded) {
  constexpr int W = Vector<C>::width;
  Vec<C> m = {};
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < padded; c += W) {
      const Vec<C> v = load(x.data + r * x.stride + c);
      m = v > m ? v : m;
      m = -v > m ? -v : m;
    }
  C best = 0;
  for (int i = 0; i < W; ++i) best = m[i] > best ? m[i] : best;
  return best;
}

// e^{2x}, with 0 in the padding so that a padded feature has d = 1 and weight 0.
template <class C>
Rows<C> exponentials(Rows<C> x, int64_t n, int64_t width, int64_t padded, C* out) {
  constexpr int W = Vector<C>::width;
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < padded; c += W)
      store(out + r * padded + c, exp(load(x.data + r * x.stride + c) * (C)2));
    for (int64_t c = width; c < padded; ++c) out[r * padded + c] = 0;
  }
  return {out, padded};
}

// The first n numbers at p, the rest of the vector filled up.
template <class C>
Vec<C> load_part(const C* p, int64_t n, C fill) {
  if (n >= Vector<C>::width) return load(p);
  Vec<C> x = splat(fill);
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return x;
}

template <class T, class C>
void put(T* out, Vec<C> x, int64_t n) {
  if constexpr (sizeof(T) == sizeof(C)) {
    if (n >= Vector<C>::width) return store(out, x);
  }
  for (int64_t i = 0; i < n && i < Vector<C>::width; ++i) narrow(x[i], out[i]);
}

// ---- scores -----------------------------------------------------------------------------------

// out[i][j] = base + scale * sum_c of q_ic k_jc (dot), or of w_c / (1 + e^{2(q_ic + k_jc)})
template <class C, Score S, int I, int J>
void score_tile(const C* q, int64_t q_stride, const C* k, int64_t k_stride, const C* w,
                int64_t padded, C base, C scale, C* out, int64_t out_stride) {
  constexpr int W = Vector<C>::width;
  Vec<C> acc[I][J] = {};
  for (int64_t c = 0; c < padded; c += 2 * W) {
    for (int i = 0; i < I; ++i) {
      const Vec<C> q0 = load(q + i * q_stride + c), q1 = load(q + i * q_stride + c + W);
      for (int j = 0; j < J; ++j) {
        const Vec<C> k0 = load(k + j * k_stride + c), k1 = load(k + j * k_stride + c + W);
        if constexpr (S == Score::dot) {
          acc[i][j] += q0 * k0;
          acc[i][j] += q1 * k1;
        } else {
          const Vec<C> w0 = load(w + c), w1 = load(w + c + W);
          if constexpr (S == Score::factored) {
            const Vec<C> d0 = q0 * k0 + (C)1, d1 = q1 * k1 + (C)1;
            acc[i][j] += (w0 * d1 + w1 * d0) * reciprocal(d0 * d1);
          } else {
            acc[i][j] += w0 * logistic(q0 + k0);
            acc[i][j] += w1 * logistic(q1 + k1);
          }
        }
      }
    }
  }
  for (int i = 0; i < I; ++i)
    for (int j = 0; j < J; ++j) out[i * out_stride + j] = base + scale * sum<C>(acc[i][j]);
}

template <class C, Score S>
void score_block(Rows<C> q, int64_t nq, Rows<C> k, int64_t nk, const C* w, int64_t padded, C base,
                 C scale, C* out, int64_t out_stride) {
  for (int64_t i = 0; i < nq;) {
    const int64_t rows = nq - i >= 2 ? 2 : 1;
    for (int64_t j = 0; j < nk;) {
      const C *qi = q.data + i * q.stride, *kj = k.data + j * k.stride;
      C* o = out + i * out_stride + j;
      const bool wide = nk - j >= 4;
      const auto tile = rows == 2 ? (wide ? score_tile<C, S, 2, 4> : score_tile<C, S, 2, 1>)
                                  : (wide ? score_tile<C, S, 1, 4> : score_tile<C, S, 1, 1>);
      tile(qi, q.stride, kj, k.stride, w, padded, base, scale, o, out_stride);
      j += wide ? 4 : 1;
    }
    i += rows;
  }
}

// ---- products ---------------------------------------------------------------------------------

// acc[r] = sum_k p[r, k] v[k] for R rows and two vectors of columns, v packed; in blocks of keys,
// for sums of sums lose less than one long sum.
template <int R, bool skip_zeros, class C>
void mix_sums(const C* p, int64_t p_row, int64_t p_col, int64_t n, const C* v, Vec<C> (&total)[R][2]) {
  constexpr int W = Vector<C>::width;
  constexpr int64_t kBlock = 128;
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = Vec<C>{};
  for (int64_t k0 = 0; k0 < n; k0 += kBlock) {
    Vec<C> acc[R][2] = {};
    for (int64_t k = k0; k < min(k0 + kBlock, n); ++k) {
      const Vec<C> v0 = load(v + k * 2 * W), v1 = load(v + k * 2 * W + W);
      for (int r = 0; r < R; ++r) {
        const C x = p[r * p_row + k * p_col];
        if (skip_zeros && x == 0) continue;
        acc[r][0] += x * v0;
        acc[r][1] += x * v1;
      }
    }
    for (int r = 0; r < R; ++r) {
      total[r][0] += acc[r][0];
      total[r][1] += acc[r][1];
    }
  }
}

// out[r] = scale * sum_k p[r, k] v[k] for R rows. A key of weight 0 adds nothing even when its value
// is NaN: a sum that is NaN is taken again without such keys, which changes no bit otherwise.
template <int R, class C, class O>
void mix_tile(const C* p, int64_t p_row, int64_t p_col, int64_t n, const C* v, C scale, O* out,
              int64_t out_stride, int64_t width) {
  constexpr int W = Vector<C>::width;
  Vec<C> acc[R][2];
  mix_sums<R, false>(p, p_row, p_col, n, v, acc);
  C check = 0;
  for (int r = 0; r < R; ++r) check += sum<C>(acc[r][0] + acc[r][1]);
  if (__builtin_expect(check != check, 0)) mix_sums<R, true>(p, p_row, p_col, n, v, acc);
  for (int r = 0; r < R; ++r) {
    put<O, C>(out + r * out_stride, acc[r][0] * scale, width);
    put<O, C>(out + r * out_stride + W, acc[r][1] * scale, width - W);
  }
}

// out[r] = scale * sum_k p[r, k] v[k], columns [0, width) of v.
template <class T, class C, class O>
void mix(const C* p, int64_t p_row, int64_t p_col, int64_t rows, int64_t n, const T* v,
         int64_t v_stride, int64_t width, C scale, O* out, int64_t out_stride, C* scratch) {
  constexpr int W = Vector<C>::width;
  if (rows < 3) {  // too few to pay for packing: run through the rows of v once
    C* acc = scratch;
    const int64_t padded = round_up(width, W);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < padded; ++c) acc[c] = 0;
      for (int64_t k = 0; k < n; ++k) {
        const C x = p[r * p_row + k * p_col];
        if (x == 0) continue;
        for (int64_t c = 0; c < width; ++c) acc[c] += x * widen(v[k * v_stride + c]);
      }
      for (int64_t c = 0; c < width; c += W)
        put<O, C>(out + r * out_stride + c, load(acc + c) * scale, width - c);
    }
    return;
  }
  for (int64_t c = 0; c < width; c += 2 * W) {
    const int64_t part = min(width - c, 2 * W);
    for (int64_t k = 0; k < n; ++k) {
      C* packed = scratch + k * 2 * W;
      for (int64_t i = 0; i < part; ++i) packed[i] = widen(v[k * v_stride + c + i]);
      for (int64_t i = part; i < 2 * W; ++i) packed[i] = 0;
    }
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
      mix_tile<4>(p + r * p_row, p_row, p_col, n, scratch, scale, out + r * out_stride + c,
                  out_stride, part);
    for (; r < rows; ++r)
      mix_tile<1>(p + r * p_row, p_row, p_col, n, scratch, scale, out + r * out_stride + c,
                  out_stride, part);
  }
}

// ---- forward ----------------------------------------------------------------------------------

// Turn a row of scores into weights in place; return log sum exp. An empty row becomes zeros.
template <class C>
C softmax(C* s, int64_t n) {
  constexpr int W = Vector<C>::width;
  const C infinity = __builtin_inf();
  Vec<C> highest = splat(-infinity), total = {};
  for (int64_t j = 0; j < n; j += W) {
    const Vec<C> x = load_part(s + j, n - j, -infinity);
    highest = x > highest ? x : highest;
  }
  C top = -infinity;
  for (int i = 0; i < W; ++i) top = highest[i] > top ? highest[i] : top;
  const C shift = top == -infinity ? 0 : top;
  for (int64_t j = 0; j < n; j += W) {
    const Vec<C> x = load_part(s + j, n - j, -infinity) - shift;
    Vec<C> e = exp(x);
    e = x < (C)-87 ? Vec<C>{} : e;
    e = x == x ? e : x;  // NaN stays, and makes the whole row NaN
    total += e;
    put<C, C>(s + j, e, n - j);
  }
  const C mass = sum<C>(total);
  if (mass == 0) return -infinity;
  for (int64_t j = 0; j < n; ++j) s[j] /= mass;
  if constexpr (sizeof(C) == 4) return top + ::logf(mass);
  return top + ::log(mass);
}

template <class T, class C>
void add_bias(const Attention& a, const Item& item, int64_t i, int64_t n, C* s) {
  if (a.bias.data) {
    const T* bias = at<T>(a.bias, item, i);
    for (int64_t j = 0; j < n; ++j) s[j] += widen(bias[j * a.bias.column]);
  }
  if (a.mask.data) {
    const uint8_t* mask = at<uint8_t>(a.mask, item, i);
    for (int64_t j = 0; j < n; ++j) s[j] = mask[j * a.mask.column] ? s[j] : (C)-__builtin_inf();
  }
}

template <class C>
struct Layout {  // of a thread's scratch, in elements
  int64_t padded, queries, keys, scores, pack, total;
  explicit Layout(const Attention& a) {
    constexpr int W = Vector<C>::width;
    padded = round_up(a.A > a.Dv ? a.A : a.Dv, 2 * W);
    queries = a.rows * padded;
    keys = kKeyBlock * padded;
    scores = round_up(a.rows * a.Tk, W);
    const int64_t longest = (a.Tq > a.Tk ? a.Tq : a.Tk) + 2;
    pack = longest * 2 * W + padded;
    const int64_t forward = padded + 2 * queries + 2 * keys + scores + pack;
    const int64_t backward = 4 * pack + 2 * W;
    total = forward > backward ? forward : backward;
  }
};

template <class T, class C = typename Accumulate<T>::type>
void forward(const Attention& a, int64_t index, void* memory) {
  const Layout<C> layout(a);
  const int64_t padded = round_up(a.A, 2 * Vector<C>::width);
  const Item item = locate(a, index, (a.Tq + a.rows - 1) / a.rows);
  const int64_t i0 = item.part * a.rows, nq = min(a.rows, a.Tq - i0), n = keys_seen(a, item.b);
  const bool additive = a.weight.data;
  C* w_scratch = static_cast<C*>(memory);
  C* q_scratch = w_scratch + layout.padded;
  C* q_exp = q_scratch + layout.queries;
  C* k_scratch = q_exp + layout.queries;
  C* k_exp = k_scratch + layout.keys;
  C* scores = k_exp + layout.keys;
  C* pack = scores + layout.scores;

  int64_t score_stride = n;
  if (a.weights.data) {
    scores = at<C>(a.weights, item, i0);
    score_stride = a.Tk;
  }

  const Rows<C> q = gather(at<T>(a.query, item, i0), a.query.row, nq, a.A, padded, q_scratch);
  C q_range = 0, base = 0;
  const C* w = nullptr;
  if (additive) {
    w = gather(at<T>(a.weight, item, 0), 0, 1, a.A, padded, w_scratch).data;
    for (int64_t c = 0; c < a.A; ++c) base += w[c];
    q_range = largest(q, nq, padded);
    if (sizeof(C) == 4 && q_range <= kFactoredLimit) exponentials(q, nq, a.A, padded, q_exp);
  }
  for (int64_t j = 0; j < n; j += kKeyBlock) {
    const int64_t nk = min(kKeyBlock, n - j);
    const Rows<C> k = gather(at<T>(a.key, item, j), a.key.row, nk, a.A, padded, k_scratch);
    C* out = scores + j;
    const C scale = a.scale;
    if (!additive) {
      score_block<C, Score::dot>(q, nq, k, nk, w, padded, 0, scale, out, score_stride);
      continue;
    }
    if constexpr (sizeof(C) == 4) {
      if (q_range + largest(k, nk, padded) <= kFactoredLimit) {
        const Rows<C> e = exponentials(k, nk, a.A, padded, k_exp);
        score_block<C, Score::factored>({q_exp, padded}, nq, e, nk, w, padded, base * scale,
                                        -2 * scale, out, score_stride);
        continue;
      }
    }
    score_block<C, Score::direct>(q, nq, k, nk, w, padded, base * scale, -2 * scale, out,
                                  score_stride);
  }
  for (int64_t i = 0; i < nq; ++i) {
    C* s = scores + i * score_stride;
    add_bias<T>(a, item, i0 + i, n, s);
    *at<C>(a.log_sum_exp, item, i0 + i) = softmax(s, n);
    if (a.weights.data)
      for (int64_t j = n; j < a.Tk; ++j) s[j] = 0;
  }
  mix(scores, score_stride, 1, nq, n, at<T>(a.value, item, 0), a.value.row, a.Dv, (C)1,
      at<T>(a.context, item, i0), a.Dv, pack);
}

// ---- backward ---------------------------------------------------------------------------------

// grad_score_ij = P_ij (x_ij - sum_j P_ij x_ij + grad_log_sum_exp_i),
// x_ij = grad_context_i . v_j + grad_weights_ij; exactly 0 where P is.
template <class T, class C = typename Accumulate<T>::type>
void grad_score(const Attention& a, int64_t index, void* memory) {
  constexpr int W = Vector<C>::width;
  const Layout<C> layout(a);
  const int64_t padded = round_up(a.Dv, 2 * W);
  const Item item = locate(a, index, (a.Tq + a.rows - 1) / a.rows);
  const int64_t i0 = item.part * a.rows, nq = min(a.rows, a.Tq - i0), n = keys_seen(a, item.b);
  C* g_scratch = static_cast<C*>(memory);
  C* v_scratch = g_scratch + layout.queries;
  const Rows<C> g =
      gather(at<T>(a.grad_context, item, i0), a.grad_context.row, nq, a.Dv, padded, g_scratch);
  C* out = at<C>(a.grad_score, item, i0);
  for (int64_t j = 0; j < n; j += kKeyBlock) {
    const int64_t nk = min(kKeyBlock, n - j);
    const Rows<C> v = gather(at<T>(a.value, item, j), a.value.row, nk, a.Dv, padded, v_scratch);
    score_block<C, Score::dot>(g, nq, v, nk, nullptr, padded, 0, 1, out + j, a.Tk);
  }
  for (int64_t i = 0; i < nq; ++i) {
    C* x = out + i * a.Tk;
    const C* p = at<C>(a.weights, item, i0 + i);
    if (a.grad_weights.data) {
      const C* extra = at<C>(a.grad_weights, item, i0 + i);
      for (int64_t j = 0; j < n; ++j) x[j] += extra[j];
    }
    Vec<C> products = {};
    for (int64_t j = 0; j < n; j += W) {
      const Vec<C> pj = load_part(p + j, n - j, (C)0);
      products += pj == 0 ? pj : pj * load_part(x + j, n - j, (C)0);
    }
    const C mean = sum<C>(products);  // x - mean is often exactly 0: the rest comes after
    const C rest = a.grad_log_sum_exp.data ? *at<C>(a.grad_log_sum_exp, item, i0 + i) : 0;
    for (int64_t j = 0; j < n; j += W) {
      const Vec<C> pj = load_part(p + j, n - j, (C)0);
      const Vec<C> xj = load_part(x + j, n - j, (C)0);
      put<C, C>(x + j, pj == 0 ? pj : pj * (xj - mean + rest), n - j);
    }
    for (int64_t j = n; j < a.Tk; ++j) x[j] = 0;
  }
}

// Two vectors of features of `n` rows, one after the other. A NaN counts as 0: a row that may see
// it has NaN weights and so a NaN grad_score; for the others it must not exist.
template <class T, class C>
C pack_slice(const T* src, int64_t stride, int64_t n, int64_t width, C* out) {
  constexpr int W = Vector<C>::width;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < 2 * W; ++c) {
      const C x = c < width ? widen(src[r * stride + c]) : 0;
      out[r * 2 * W + c] = x == x ? x : 0;
    }
  return largest(Rows<C>{out, 2 * W}, n, 2 * W);
}

// The way back, each feature times its factor.
template <class T, class C>
void unpack_slice(const C* x, const C* factor, int64_t n, int64_t width, T* out, int64_t stride) {
  constexpr int W = Vector<C>::width;
  const Vec<C> f0 = load(factor), f1 = load(factor + W);
  for (int64_t r = 0; r < n; ++r) {
    put<T, C>(out + r * stride, load(x + r * 2 * W) * f0, width);
    put<T, C>(out + r * stride + W, load(x + r * 2 * W + W) * f1, width - W);
  }
}

// For I queries and n keys, two vectors of features: with g = grad_score and
// s = 1/(1 + e^{2(q+k)}) - 1/2 = -tanh(q + k)/2
//   grad_q_i += sum_j g (1/4 - s^2),  grad_k_j += sum_i g (1/4 - s^2),  grad_w += sum_ij g s
template <class C, bool factored, int I>
void grad_tile(const C* q, const C* k, const C* g, int64_t g_stride, int64_t n, C* grad_q,
               C* grad_k, C* grad_w) {
  constexpr int W = Vector<C>::width;
  Vec<C> q0[I], q1[I], gq0[I] = {}, gq1[I] = {}, gw0 = {}, gw1 = {};
  for (int i = 0; i < I; ++i) {
    q0[i] = load(q + i * 2 * W);
    q1[i] = load(q + i * 2 * W + W);
  }
  for (int64_t j = 0; j < n; ++j) {
    const Vec<C> k0 = load(k + j * 2 * W), k1 = load(k + j * 2 * W + W);
    Vec<C> gk0 = load(grad_k + j * 2 * W), gk1 = load(grad_k + j * 2 * W + W);
    for (int i = 0; i < I; ++i) {
      Vec<C> s0, s1;
      if constexpr (factored) {
        const Vec<C> d0 = q0[i] * k0 + (C)1, d1 = q1[i] * k1 + (C)1;
        const Vec<C> r = reciprocal(d0 * d1);
        s0 = r * d1 - (C)0.5;
        s1 = r * d0 - (C)0.5;
      } else {
        s0 = logistic(q0[i] + k0) - (C)0.5;
        s1 = logistic(q1[i] + k1) - (C)0.5;
      }
      const C gij = g[i * g_stride + j], quarter = gij * (C)0.25;
      const Vec<C> t0 = gij * s0, t1 = gij * s1;
      const Vec<C> u0 = quarter - t0 * s0, u1 = quarter - t1 * s1;
      gw0 += t0;
      gw1 += t1;
      gq0[i] += u0;
      gq1[i] += u1;
      gk0 += u0;
      gk1 += u1;
    }
    store(grad_k + j * 2 * W, gk0);
    store(grad_k + j * 2 * W + W, gk1);
  }
  add(grad_w, gw0);
  add(grad_w + W, gw1);
  for (int i = 0; i < I; ++i) {
    add(grad_q + i * 2 * W, gq0[i]);
    add(grad_q + i * 2 * W + W, gq1[i]);
  }
}

// The same for all queries and keys, by blocks: what is touched stays in the first cache, and sums
// of sums lose less than one long sum.
template <class C, bool factored>
void grad_blocks(const C* q, const C* k, const C* g, int64_t g_stride, int64_t nq, int64_t n,
                 C* grad_q, C* grad_k, C* grad_w) {
  constexpr int W2 = 2 * Vector<C>::width;
  constexpr int64_t kQueries = 64, kKeys = 128;
  C part_k[kKeys * W2], part_w[W2];
  for (int64_t j = 0; j < n; j += kKeys) {
    const int64_t keys = min(kKeys, n - j);
    for (int64_t i0 = 0; i0 < nq; i0 += kQueries) {
      const int64_t end = min(i0 + kQueries, nq);
      for (int64_t x = 0; x < keys * W2; ++x) part_k[x] = 0;
      for (int64_t x = 0; x < W2; ++x) part_w[x] = 0;
      for (int64_t i = i0; i < end;) {
        const bool two = i + 2 <= end;
        const auto tile = two ? grad_tile<C, factored, 2> : grad_tile<C, factored, 1>;
        tile(q + i * W2, k + j * W2, g + i * g_stride + j, g_stride, keys, grad_q + i * W2, part_k,
             part_w);
        i += two ? 2 : 1;
      }
      for (int64_t x = 0; x < keys * W2; ++x) grad_k[j * W2 + x] += part_k[x];
      for (int64_t x = 0; x < W2; ++x) grad_w[x] += part_w[x];
    }
  }
}

// grad_query, grad_key and grad_weight of the features from c on, additive score.
template <class T, class C>
void grad_additive(const Attention& a, const Item& item, int64_t c, int64_t n, C* scratch) {
  constexpr int W = Vector<C>::width, W2 = 2 * W;
  const int64_t width = min(W2, a.A - c);
  const C* g = at<C>(a.grad_score, item, 0);
  const T* weight = at<T>(a.weight, item, 0) + c;
  C* q = scratch;
  C* k = q + a.Tq * W2;
  C* grad_q = k + n * W2;
  C* grad_k = grad_q + a.Tq * W2;
  C* grad_w = grad_k + n * W2;
  for (C* x = grad_q; x < grad_w + W2; ++x) *x = 0;
  const C range = pack_slice(at<T>(a.query, item, 0) + c, a.query.row, a.Tq, width, q) +
                  pack_slice(at<T>(a.key, item, 0) + c, a.key.row, n, width, k);
  bool factored = false;
  if constexpr (sizeof(C) == 4) {
    factored = range <= kFactoredLimit;
    if (factored) {
      exponentials(Rows<C>{q, W2}, a.Tq + n, W2, W2, q);  // k follows q
      grad_blocks<C, true>(q, k, g, a.Tk, a.Tq, n, grad_q, grad_k, grad_w);
    }
  }
  if (!factored) grad_blocks<C, false>(q, k, g, a.Tk, a.Tq, n, grad_q, grad_k, grad_w);

  const C scale = a.scale;
  C* out_w = at<C>(a.grad_weight, item, 0) + c;
  C factor[W2] = {};
  for (int64_t x = 0; x < width; ++x) {
    factor[x] = 4 * scale * widen(weight[x]);
    out_w[x] = -2 * scale * grad_w[x];
  }
  unpack_slice(grad_q, factor, a.Tq, width, at<T>(a.grad_query, item, 0) + c, a.A);
  unpack_slice(grad_k, factor, n, width, at<T>(a.grad_key, item, 0) + c, a.A);
}

template <class T>
void clear(const View& out, const Item& item, int64_t from, int64_t to, int64_t c, int64_t width) {
  for (int64_t r = from; r < to; ++r)
    for (int64_t i = 0; i < width; ++i) at<T>(out, item, r)[c + i] = T{};
}

template <class T, class C = typename Accumulate<T>::type>
void grad_inputs(const Attention& a, int64_t index, void* memory) {
  constexpr int W2 = 2 * Vector<C>::width;
  const int64_t slices = (a.A + W2 - 1) / W2;
  const Item item = locate(a, index, slices + (a.Dv + W2 - 1) / W2);
  const int64_t n = keys_seen(a, item.b);
  C* scratch = static_cast<C*>(memory);
  const C* g = at<C>(a.grad_score, item, 0);
  if (item.part >= slices) {
    const int64_t c = (item.part - slices) * W2, width = min(W2, a.Dv - c);
    const C* p = at<C>(a.weights, item, 0);
    mix(p, 1, a.Tk, n, a.Tq, at<T>(a.grad_context, item, 0) + c, a.grad_context.row, width, (C)1,
        at<T>(a.grad_value, item, 0) + c, a.Dv, scratch);
    clear<T>(a.grad_value, item, n, a.Tk, c, width);
    return;
  }
  const int64_t c = item.part * W2, width = min(W2, a.A - c);
  if (a.weight.data) {
    grad_additive<T>(a, item, c, n, scratch);
  } else {
    const C scale = a.scale;
    mix(g, a.Tk, 1, a.Tq, n, at<T>(a.key, item, 0) + c, a.key.row, width, scale,
        at<T>(a.grad_query, item, 0) + c, a.A, scratch);
    mix(g, 1, a.Tk, n, a.Tq, at<T>(a.query, item, 0) + c, a.query.row, width, scale,
        at<T>(a.grad_key, item, 0) + c, a.A, scratch);
  }
  clear<T>(a.grad_key, item, n, a.Tk, c, width);
}

// ---- the table --------------------------------------------------------------------------------

#define ATTNFAST_BY_DTYPE(function)                                \
  [](const Attention& a, int64_t item, void* scratch) {            \
    switch (a.dtype) {                                             \
      case Dtype::f32: return function<float>(a, item, scratch);   \
      case Dtype::f64: return function<double>(a, item, scratch);  \
      case Dtype::f16: return function<Half>(a, item, scratch);    \
      case Dtype::bf16: return function<BFloat>(a, item, scratch); \
    }                                                              \
  }

size_t scratch(const Attention& a) {
  const size_t bytes = a.dtype == Dtype::f64 ? Layout<double>(a).total * sizeof(double)
                                             : Layout<float>(a).total * sizeof(float);
  return (bytes + 63) / 64 * 64;
}

int64_t row_items(const Attention& a) { return a.B * a.H * ((a.Tq + a.rows - 1) / a.rows); }

int64_t grad_inputs_items(const Attention& a) {
  const int64_t columns = 2 * kVectorBytes / (a.dtype == Dtype::f64 ? 8 : 4);
  return a.B * a.H * ((a.A + columns - 1) / columns + (a.Dv + columns - 1) / columns);
}

}  // namespace

extern const AttentionKernels attention = {
    scratch,
    {row_items, ATTNFAST_BY_DTYPE(forward)},
    {row_items, ATTNFAST_BY_DTYPE(grad_score)},
    {grad_inputs_items, ATTNFAST_BY_DTYPE(grad_inputs)},
};

}  // namespace VARIANT
}  // namespace attnfast
