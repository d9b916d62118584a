// attention on the CPU, for one instruction set (see vector.h); the launcher is attention.cpp.
//
//   e_ij = scale * score(q_i, k_j) + bias_ij,  P = softmax(e) over visible keys,  c_i = sum P_ij v_j
//
// Each pass takes its items from a grid: (sequence, head) x blocks of query rows x parts of keys or
// columns. Scores are computed tile by tile from rows held in cache (score.h); everything else is
// rows of scores and products of a small matrix with rows (product.h). Where rows have spans the
// same is done by bands of rows whose keys are nearly the same (span.h).
#include "attention.h"
#include "rows.h"
#include "score.h"
#include "span.h"

namespace attnfast {
namespace VARIANT {
namespace {

static_assert(kPadding % (2 * Vector<float>::width) == 0, "exponentials are read by two vectors");

// ---- forward ----------------------------------------------------------------------------------

template <class T, class C = typename Accumulate<T>::type>
void scores(const Attention& a, int64_t index, void* memory) {
  const Item item(a, index, row_blocks(a), parts(a.Tk, a.keys));
  const int64_t nq = item.rows, width = padded<C>(a.A);
  const int64_t end = min(item.seen, (item.part + 1) * a.keys);
  const Rows<C> s = scores_of(a, item, static_cast<C*>(memory));
  C* q_scratch = static_cast<C*>(memory) + scores_scratch(a);
  C* q_exp = q_scratch + nq * width;
  C* k_scratch = q_exp + nq * width;
  C* k_exp = k_scratch + kKeyBlock * width;
  C* w_scratch = k_exp + kTransposed<C> * width;

  const bool additive = a.weight.data;
  const Rows<C> q = gather(at<T>(a.query, item, item.row), a.query.row, nq, a.A, width, q_scratch);
  C q_range = 0, base = 0;
  const C* w = nullptr;
  if (additive) {
    w = gather(at<T>(a.weight, item, 0), 0, 1, a.A, width, w_scratch).data;
    Vec<C> total = {};
    for (int64_t c = 0; c < width; c += Vector<C>::width) total += load(w + c);
    base = sum<C>(total);
    if constexpr (sizeof(C) == 4) q_range = exponentials(q, nq, a.A, width, q_exp);
  }
  const bool prepared = a.exponentials.data && q_range <= kPreparedLimit;
  Score path = Score::dot;
  Rows<C> rows = q, keys = {};
  const auto prepare = [&](int64_t j, int64_t n) {
    rows = {q_exp, width};
    path = Score::factored;
    if constexpr (sizeof(C) == 4) {
      if (prepared) {
        keys = {at<C>(a.exponentials, item, j), round_up(a.A, kPadding)};
        return;
      }
    }
    keys = gather(at<T>(a.key, item, j), a.key.row, n, a.A, width, k_scratch);
    if constexpr (sizeof(C) == 4) {
      if (additive && q_range + exponentials(keys, n, a.A, width, k_exp) <= kFactoredLimit) {
        keys = {k_exp, width};
        return;
      }
    }
    rows = q;
    path = additive ? Score::direct : Score::dot;
    if (!additive && a.span.data)
      transpose(keys.data, keys.stride, n, width, k_exp, kTransposed<C>);
  };
  const auto tile = [&](int64_t i, int64_t nq, int64_t j, int64_t nk, C* out, int64_t stride) {
    const Rows<C> qs = {rows.data + i * rows.stride, rows.stride};
    const Rows<C> ks = {keys.data + j * keys.stride, keys.stride};
    if (path == Score::dot && a.span.data)
      return dot_transposed(qs, nq, k_exp + j, kTransposed<C>, nk, width, out, stride);
    if (path == Score::dot) return dot_block(qs, nq, ks, nk, width, out, stride, k_exp);
    auto block = score_block<C, Score::direct>;
    if constexpr (sizeof(C) == 4) {
      if (path == Score::factored) block = score_block<C, Score::factored>;
    }
    block(qs, nq, ks, nk, w, width, base, out, stride);
  };
  C* out = const_cast<C*>(s.data);
  if (a.span.data) {
    for (int64_t x = 0; x < nq * a.W; ++x) out[x] = -__builtin_inf();
    return for_tiles(a, item, additive ? kTight : kLoose, s, w_scratch + width, prepare, tile);
  }
  for (int64_t j = item.part * a.keys; j < end; j += kKeyBlock) {
    const int64_t nk = min(kKeyBlock, end - j);
    prepare(j, nk);
    tile(0, nq, 0, nk, out + j, s.stride);
  }
}

template <class T, class C = typename Accumulate<T>::type>
void weights(const Attention& a, int64_t index, void* memory) {
  const Item item(a, index, row_blocks(a), 1);
  const Rows<C> s = scores_of(a, item, static_cast<C*>(memory));
  const int64_t n = columns_seen(a, item);
  Flags<C> zeros = {};
  for (int64_t i = 0; i < item.rows; ++i) {
    C* row = const_cast<C*>(s.data) + i * s.stride;
    finish_scores<T>(a, item, item.row + i, n, row);
    *at<C>(a.log_sum_exp, item, item.row + i) = softmax(row, n, zeros);
    for (int64_t j = n; j < a.W; ++j) row[j] = 0;
  }
  tell_of_zeros<C>(a, item, zeros);
}

// mix, or a second look at what a library has left in its place: a key of weight 0 adds nothing, even
// when its value is NaN, so what the library took for NaN comes from mix.
template <class T, class C>
void multiply(const Attention& a, const C* p, int64_t p_row, int64_t p_col, int64_t rows, int64_t n,
              const T* v, int64_t v_stride, int64_t width, C scale, T* out, int64_t out_stride,
              C* scratch) {
  if constexpr (sizeof(T) == sizeof(C)) {
    if (a.multiplied) {
      if (sound(out, out_stride, rows, width, scale)) return;
      C* again = scratch + mix_scratch<C>(n, width);
      mix(p, p_row, p_col, rows, n, v, v_stride, width, scale, again, width, scratch);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < width; ++c) {
          T& x = out[r * out_stride + c];
          x = x == x ? x : again[r * width + c];
        }
      return;
    }
  }
  mix(p, p_row, p_col, rows, n, v, v_stride, width, scale, out, out_stride, scratch);
}

template <class T, class C = typename Accumulate<T>::type>
void context(const Attention& a, int64_t index, void* memory) {
  const Item item(a, index, row_blocks(a), parts(a.Dv, a.columns));
  const int64_t c = item.part * a.columns;
  const Rows<C> p = scores_of(a, item, static_cast<C*>(memory));
  C* scratch = static_cast<C*>(memory) + scores_scratch(a);
  if (a.span.data) {
    const Rows<C> from = {p.data - item.row * p.stride, p.stride};
    const Side<T> keys = {at<T>(a.value, item, 0), a.value.row, at<T>(a.context, item, 0), a.Dv};
    return span_products<T>(a, item, item.row, item.row + item.rows, from, (C)1, a.Dv, keys,
                            Side<T>{}, scratch);
  }
  multiply(a, p.data, p.stride, 1, item.rows, item.seen, at<T>(a.value, item, 0) + c, a.value.row,
           min(a.columns, a.Dv - c), (C)1, at<T>(a.context, item, item.row) + c, a.Dv, scratch);
}

// ---- backward ---------------------------------------------------------------------------------

// x_ij = grad_context_i . v_j, in the place of grad_score
template <class T, class C = typename Accumulate<T>::type>
void grad_weights(const Attention& a, int64_t index, void* memory) {
  const Item item(a, index, row_blocks(a), parts(a.Tk, a.keys));
  const int64_t width = padded<C>(a.Dv), end = min(item.seen, (item.part + 1) * a.keys);
  C* g_scratch = static_cast<C*>(memory);
  C* v_scratch = g_scratch + item.rows * width;
  C* packed = v_scratch + kKeyBlock * width;
  const Rows<C> g = gather(at<T>(a.grad_context, item, item.row), a.grad_context.row, item.rows,
                           a.Dv, width, g_scratch);
  if (a.span.data) {
    const auto prepare = [&](int64_t j, int64_t n) {
      const Rows<C> v = gather(at<T>(a.value, item, j), a.value.row, n, a.Dv, width, v_scratch);
      transpose(v.data, v.stride, n, width, packed, kTransposed<C>);
    };
    const auto tile = [&](int64_t i, int64_t nq, int64_t j, int64_t nk, C* out, int64_t stride) {
      dot_transposed({g.data + i * g.stride, g.stride}, nq, packed + j, kTransposed<C>, nk, width,
                     out, stride);
    };
    const Rows<C> x = {at<C>(a.grad_score, item, item.row), a.W};
    return for_tiles(a, item, kLoose, x, packed + kTransposed<C> * width, prepare, tile);
  }
  for (int64_t j = item.part * a.keys; j < end; j += kKeyBlock) {
    const int64_t nk = min(kKeyBlock, end - j);
    const Rows<C> v = gather(at<T>(a.value, item, j), a.value.row, nk, a.Dv, width, v_scratch);
    dot_block(g, item.rows, v, nk, width, at<C>(a.grad_score, item, item.row) + j, a.Tk, packed);
  }
}

// grad_score_ij = P_ij (x_ij - sum_j P_ij x_ij + grad_log_sum_exp_i), x_ij with grad_weights_ij added;
// exactly 0 where P is.
template <class T, class C = typename Accumulate<T>::type>
void grad_score(const Attention& a, int64_t index, void*) {
  constexpr int W = Vector<C>::width;
  const Item item(a, index, row_blocks(a), 1);
  const int64_t n = columns_seen(a, item);
  const C scale = a.grad_score_scale;
  Flags<C> zeros = {};
  for (int64_t i = item.row; i < item.row + item.rows; ++i) {
    C* x = at<C>(a.grad_score, item, i);
    const C* p = at<C>(a.weights, item, i);
    if (a.grad_weights.data) {
      const C* extra = at<C>(a.grad_weights, item, i);
      for (int64_t j = 0; j < n; ++j) x[j] += extra[j];
    }
    Vec<C> products = {};
    for (int64_t j = 0; j < n; j += W) {
      const Vec<C> pj = load_part(p + j, n - j, (C)0);
      products += pj == 0 ? pj : pj * load_part(x + j, n - j, (C)0);
    }
    const C mean = sum<C>(products);  // x - mean is often exactly 0: the rest comes after
    const C rest = a.grad_log_sum_exp.data ? *at<C>(a.grad_log_sum_exp, item, i) : 0;
    for (int64_t j = 0; j < n; j += W) {
      const Vec<C> pj = load_part(p + j, n - j, (C)1);
      const Vec<C> xj = load_part(x + j, n - j, (C)0);
      zeros |= pj == 0;
      store_part(x + j, pj == 0 ? pj : pj * (xj - mean + rest) * scale, n - j);
    }
    for (int64_t j = n; j < a.W; ++j) x[j] = 0;
  }
  tell_of_zeros<C>(a, item, zeros);
}

// Two vectors of features of `n` rows, one after the other; returns the largest magnitude. A NaN
// counts as 0: a row that may see it has NaN weights and so a NaN grad_score; for the others it must
// not exist.
template <class T, class C>
C pack_slice(const T* src, int64_t stride, int64_t n, int64_t width, C* out) {
  constexpr int W = Vector<C>::width;
  pack(src, stride, n, width, out);
  Vec<C> most = {};
  for (C* x = out; x < out + n * 2 * W; x += W) {
    Vec<C> v = load(x);
    v = v == v ? v : Vec<C>{};
    store(x, v);
    most = v > most ? v : most;
    most = -v > most ? -v : most;
  }
  return highest<C>(most);
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

template <class T>
void clear(const View& out, const Item& item, int64_t from, int64_t to, int64_t c, int64_t width) {
  for (int64_t r = from; r < to; ++r)
    for (int64_t i = 0; i < width; ++i) at<T>(out, item, r)[c + i] = T{};
}

// The gradients of query, key and weight for two vectors of features from c on, additive score.
template <class T, class C>
void grad_slice(const Attention& a, const Item& item, const Seen& keys, int64_t c, C* scratch) {
  constexpr int W2 = 2 * Vector<C>::width;
  const int64_t width = min(W2, a.A - c), n = keys.to - keys.from;
  const Rows<C> g = {at<C>(a.grad_score, item, 0), a.W};
  const T* weight = at<T>(a.weight, item, 0) + c;
  C* q = scratch;
  C* k = q + a.Tq * W2;
  C* grad_q = k + n * W2;
  C* grad_k = grad_q + a.Tq * W2;
  C* grad_w = grad_k + n * W2;
  for (C* x = grad_q; x < grad_w + W2; ++x) *x = 0;
  const C range = pack_slice(at<T>(a.query, item, 0) + c, a.query.row, a.Tq, width, q) +
                  pack_slice(at<T>(a.key, item, keys.from) + c, a.key.row, n, width, k);
  auto blocks = grad_blocks<C, false>;
  if constexpr (sizeof(C) == 4) {
    if (range <= kFactoredLimit) {
      exponentials(Rows<C>{q, W2}, a.Tq + n, W2, W2, q);  // k follows q
      blocks = grad_blocks<C, true>;
    }
  }
  if (a.span.data) {
    C* tile = grad_w + W2;
    for_bands(a, item, 0, a.Tq, kTight, [&](const Band& band) {
      if (band.from >= band.to) return;
      const int64_t nk = band.to - band.from, i = band.row * W2, j = (band.from - keys.from) * W2;
      spread(a, item, band, g, tile);
      blocks(q + i, k + j, tile, nk, band.rows, nk, grad_q + i, grad_k + j, grad_w);
    });
  } else {
    blocks(q, k, g.data, g.stride, a.Tq, n, grad_q, grad_k, grad_w);
  }

  const C scale = a.scale;
  C factor[W2] = {};
  for (int64_t x = 0; x < width; ++x) factor[x] = 4 * scale * widen(weight[x]);
  if (a.grad_query.data)
    unpack_slice(grad_q, factor, a.Tq, width, at<T>(a.grad_query, item, 0) + c, a.A);
  if (a.grad_key.data) {
    unpack_slice(grad_k, factor, n, width, at<T>(a.grad_key, item, keys.from) + c, a.A);
    clear<T>(a.grad_key, item, 0, keys.from, c, width);
    clear<T>(a.grad_key, item, keys.to, a.Tk, c, width);
  }
  if (!a.grad_weight.data) return;
  C* out_w = at<C>(a.grad_weight, item, 0) + c;
  for (int64_t x = 0; x < width; ++x) out_w[x] = -2 * scale * grad_w[x];
}

// The same for the only query of a sequence, columns [c, c + width): whole rows of keys pass, four
// at a time, those without a gradient left out.
template <class T, class C>
void grad_step(const Attention& a, const Item& item, int64_t c, int64_t width, C* scratch) {
  constexpr int W = Vector<C>::width;
  const int64_t wide = padded<C>(width);
  const C *g = at<C>(a.grad_score, item, 0), scale = a.scale;
  const T* weight = at<T>(a.weight, item, 0) + c;
  C *q_exp = scratch + wide, *grad_q = q_exp + wide, *grad_w = grad_q + wide, *factor = grad_w + wide;
  C *k_scratch = factor + wide, *k_exp = k_scratch + 4 * wide, *grad_k = k_exp + 4 * wide;
  for (C* x = grad_q; x < factor; ++x) *x = 0;
  for (int64_t x = 0; x < wide; ++x) factor[x] = x < width ? 4 * scale * widen(weight[x]) : C{};
  const C* q = gather(at<T>(a.query, item, 0) + c, 0, 1, width, wide, scratch).data;
  C q_range = 0;
  if constexpr (sizeof(C) == 4) q_range = exponentials(Rows<C>{q, 0}, 1, width, wide, q_exp);
  const bool prepared = a.exponentials.data && q_range <= kPreparedLimit;
  const auto put_row = [&](T* out, const C* x) {
    for (int64_t i = 0; i < width; i += W)
      put<T, C>(out + i, load(x + i) * load(factor + i), width - i);
  };

  for (int64_t j = 0; j < item.seen;) {
    int64_t key[4];
    const C* k[4];
    C gradient[4] = {};
    int found = 0;
    for (; j < item.seen && found < 4; ++j) {
      if (g[j] != 0) {
        gradient[found] = g[j];
        key[found++] = j;
      } else if (a.grad_key.data) {
        clear<T>(a.grad_key, item, j, j + 1, c, width);
      }
    }
    if (found == 0) break;
    bool near = prepared;
    C range = 0;
    for (int i = 0; i < 4; ++i) {
      const int64_t row = key[i < found ? i : 0];
      if constexpr (sizeof(C) == 4) {
        if (prepared) {
          k[i] = at<C>(a.exponentials, item, row) + c;
          continue;
        }
      }
      k[i] = gather(at<T>(a.key, item, row) + c, 0, 1, width, wide, k_scratch + i * wide).data;
      if constexpr (sizeof(C) == 4) {
        const C most = exponentials(Rows<C>{k[i], 0}, 1, width, wide, k_exp + i * wide);
        range = most > range ? most : range;
      }
    }
    const bool keys = a.grad_key.data;
    if constexpr (sizeof(C) == 4) {
      if (!prepared && q_range + range <= kFactoredLimit) {
        near = true;
        for (int i = 0; i < 4; ++i) k[i] = k_exp + i * wide;
      }
      const auto rows = keys ? grad_rows<C, true, true> : grad_rows<C, true, false>;
      if (near) rows(q_exp, k, gradient, wide, grad_q, grad_k, grad_w);
    }
    const auto rows = keys ? grad_rows<C, false, true> : grad_rows<C, false, false>;
    if (!near) rows(q, k, gradient, wide, grad_q, grad_k, grad_w);
    for (int i = 0; keys && i < found; ++i)
      put_row(at<T>(a.grad_key, item, key[i]) + c, grad_k + i * wide);
  }
  if (a.grad_query.data) put_row(at<T>(a.grad_query, item, 0) + c, grad_q);
  if (!a.grad_weight.data) return;
  C* out_w = at<C>(a.grad_weight, item, 0) + c;
  for (int64_t x = 0; x < width; ++x) out_w[x] = -2 * scale * grad_w[x];
}

// The gradients of query, key and weight, columns [c, c + width), dot score.
template <class T, class C>
void grad_dot(const Attention& a, const Item& item, int64_t c, int64_t width, C* scratch) {
  const C *g = at<C>(a.grad_score, item, 0), scale = a.scale;
  if (a.span.data) {
    Side<T> keys = {at<T>(a.key, item, 0) + c, a.key.row}, rows = {at<T>(a.query, item, 0) + c,
                                                                  a.query.row};
    if (a.grad_query.data) keys.to = at<T>(a.grad_query, item, 0) + c, keys.to_row = a.A;
    if (a.grad_key.data) rows.to = at<T>(a.grad_key, item, 0) + c, rows.to_row = a.A;
    return span_products<T>(a, item, 0, a.Tq, Rows<C>{g, a.W}, scale, width, keys, rows, scratch);
  }
  if (a.grad_query.data)
    multiply(a, g, a.Tk, 1, a.Tq, item.seen, at<T>(a.key, item, 0) + c, a.key.row, width, scale,
        at<T>(a.grad_query, item, 0) + c, a.A, scratch);
  if (a.grad_key.data)
    multiply(a, g, 1, a.Tk, item.seen, a.Tq, at<T>(a.query, item, 0) + c, a.query.row, width, scale,
        at<T>(a.grad_key, item, 0) + c, a.A, scratch);
}

// A slice of the features of query, key and weight, or of the columns of value.
template <class T, class C = typename Accumulate<T>::type>
void grad_inputs(const Attention& a, int64_t index, void* memory) {
  const int64_t features = parts(a.A, a.columns);
  const Item item(a, index, 1, slices(a));
  C* scratch = static_cast<C*>(memory);
  if (item.part >= features) {
    const int64_t c = (item.part - features) * a.columns, width = min(a.columns, a.Dv - c);
    if (a.span.data) {
      const Side<T> rows = {at<T>(a.grad_context, item, 0) + c, a.grad_context.row,
                            at<T>(a.grad_value, item, 0) + c, a.Dv};
      const Rows<C> p = {at<C>(a.weights, item, 0), a.W};
      return span_products<T>(a, item, 0, a.Tq, p, (C)1, width, Side<T>{}, rows, scratch);
    }
    multiply(a, at<C>(a.weights, item, 0), 1, a.Tk, item.seen, a.Tq, at<T>(a.grad_context, item, 0) + c,
        a.grad_context.row, width, (C)1, at<T>(a.grad_value, item, 0) + c, a.Dv, scratch);
    clear<T>(a.grad_value, item, item.seen, a.Tk, c, width);
    return;
  }
  const int64_t c = item.part * a.columns, width = min(a.columns, a.A - c);
  if (!a.weight.data) {
    grad_dot<T>(a, item, c, width, scratch);
  } else if (a.Tq == 1 && !a.span.data) {
    grad_step<T>(a, item, c, width, scratch);
  } else {
    const Seen keys = a.span.data ? hull(a, item) : Seen{0, item.seen, 0};
    for (int64_t x = 0; x < width; x += 2 * Vector<C>::width)
      grad_slice<T>(a, item, keys, c + x, scratch);
  }
  if (a.grad_key.data && !a.span.data) clear<T>(a.grad_key, item, item.seen, a.Tk, c, width);
}

// ---- prepare ----------------------------------------------------------------------------------

// e^{2 key} of a block of keys, and the largest |key| among them, over which a NaN is passed.
template <class T, class C = typename Accumulate<T>::type>
void prepare(const Attention& a, int64_t index, void* memory) {
  if constexpr (sizeof(C) == 4) {
    const int64_t blocks = parts(a.Tk, kKeyBlock), width = round_up(a.A, kPadding);
    const Item item(a, index, 1, blocks);
    const int64_t j = item.part * kKeyBlock, n = min(item.seen - j, kKeyBlock);
    const Rows<C> k =
        gather(at<T>(a.key, item, j), a.key.row, n, a.A, width, static_cast<C*>(memory));
    at<float>(a.ranges, item, 0)[item.part] =
        exponentials(k, n, a.A, width, at<float>(a.exponentials, item, j));
  }
}

// ---- the table --------------------------------------------------------------------------------

int64_t span_sums(const Attention& a) {
  const auto most = [&](auto zero) {
    const int64_t sums[] = {sums_scratch<decltype(zero)>(a, min(a.columns, a.A)),
                            sums_scratch<decltype(zero)>(a, a.A % a.columns),
                            sums_scratch<decltype(zero)>(a, min(a.columns, a.Dv)),
                            sums_scratch<decltype(zero)>(a, a.Dv % a.columns)};
    int64_t top = 0;
    for (const int64_t x : sums) top = x > top ? x : top;
    return top;
  };
  if (!a.grad_score.data) return 0;
  if (a.dtype == Dtype::f64) return most(double{});
  return a.dtype == Dtype::f32 ? most(float{}) : most(Half{});
}

// Room for the most that any pass takes.
template <class C>
int64_t scratch_elements(const Attention& a) {
  constexpr int64_t W2 = 2 * Vector<C>::width;
  const int64_t A = round_up(padded<C>(a.A), kPadding), Dv = padded<C>(a.Dv);
  const int64_t longest = (a.Tq > a.Tk ? a.Tq : a.Tk) + 1, widest = a.A > a.Dv ? a.A : a.Dv;
  const int64_t again = a.grad_score.data ? longest : a.rows;
  const bool backward = a.grad_score.data;
  const int64_t tile = a.span.data ? kMostRows * kKeyBlock : 0, band = band_scratch(a);
  const int64_t passes[] = {
      (2 * a.rows + kKeyBlock + kTransposed<C> + 1) * A + tile,     // scores, prepare
      a.span.data ? band + mix_scratch<C>(kMostRows + band_keys(a), widest) + span_sums(a)
                  : mix_scratch<C>(longest, widest) + (a.multiplied ? again * a.columns : 0),
      (a.rows + kKeyBlock + kTransposed<C>) * Dv + tile,            // grad_weights
      backward && a.weight.data ? 2 * longest * 2 * W2 + W2 + band : 0,  // grad_slice
      17 * A,                                                       // grad_step
  };
  int64_t most = 0;
  for (const int64_t pass : passes) most = pass > most ? pass : most;
  return most + scores_scratch(a);
}

size_t scratch(const Attention& a) {
  const size_t bytes = a.dtype == Dtype::f64 ? scratch_elements<double>(a) * sizeof(double)
                                             : scratch_elements<float>(a) * sizeof(float);
  return (bytes + 63) / 64 * 64;
}

int64_t row_items(const Attention& a) { return a.B * a.H * row_blocks(a); }
int64_t key_items(const Attention& a) { return row_items(a) * parts(a.Tk, a.keys); }
int64_t column_items(const Attention& a) { return row_items(a) * parts(a.Dv, a.columns); }
int64_t slice_items(const Attention& a) { return a.B * a.H * slices(a); }
int64_t block_items(const Attention& a) { return a.B * a.H * parts(a.Tk, kKeyBlock); }

}  // namespace

extern const AttentionKernels attention = {
    scratch,
    {{key_items, ATTNFAST_BY_DTYPE(scores)},
     {row_items, ATTNFAST_BY_DTYPE(weights)},
     {column_items, ATTNFAST_BY_DTYPE(context)}},
    {{key_items, ATTNFAST_BY_DTYPE(grad_weights)}, {row_items, ATTNFAST_BY_DTYPE(grad_score)}},
    {slice_items, ATTNFAST_BY_DTYPE(grad_inputs)},
    {block_items, ATTNFAST_BY_DTYPE(prepare)},
};

}  // namespace VARIANT
}  // namespace attnfast
