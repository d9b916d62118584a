// Products of a small matrix with rows, and the functions that convert rows to the computing type.
#pragma once
#include "vector.h"

namespace attnfast {
namespace VARIANT {
namespace {

// Rows of elements in the computing type, `stride` apart.
template <class C>
struct Rows {
  const C* data;
  int64_t stride;
};

// Prefetch rows [from, from + n) that lie before `end`: they are read next, in steps too short for
// the processor to predict. (GCC drops a call of a function that does nothing else.)
template <class T>
__attribute__((always_inline)) inline void prefetch(const T* rows, int64_t stride, int64_t from, int64_t n,
                                                    int64_t end, int64_t width) {
  for (int64_t r = from; r < min(from + n, end); ++r)
    for (int64_t c = 0; c < width; c += 64 / (int64_t)sizeof(T)) __builtin_prefetch(rows + r * stride + c);
}

// Prefetch `n` rows that are read now, unless they are contiguous.
template <class T>
__attribute__((always_inline)) inline void prefetch_apart(const T* rows, int64_t stride, int64_t n,
                                                          int64_t width) {
  if (stride != width) prefetch(rows, stride, 0, n, n, width);
}

// Prefetch two vectors, the columns of a row that a tile takes at a time.
template <class C>
__attribute__((always_inline)) inline void prefetch_step(const C* x) {
  for (int64_t c = 0; c < 2 * Vector<C>::width; c += 64 / (int64_t)sizeof(C)) __builtin_prefetch(x + c);
}

// Convert `n` rows to the computing type, `padded` columns with zeros past `width`. The result is
// in `scratch` unless the rows have this form already.
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

// Round the first n elements of x, at most a vector, to the tensor's dtype and store them.
template <class T, class C>
void put(T* out, Vec<C> x, int64_t n) {
  if constexpr (sizeof(T) == sizeof(C)) return store_part(out, x, n);
  for (int64_t i = 0; i < n && i < Vector<C>::width; ++i) narrow(x[i], out[i]);
}

// Compute acc[r] = sum_k p[r, k] v[k] for R rows and two vectors of columns; those of v are
// adjacent.
template <int R, bool skip_zeros, class C>
inline __attribute__((always_inline)) void gemm_small_block(const C* p, int64_t p_row, int64_t p_col,
                                                            int64_t n, const C* v, int64_t v_row,
                                                            Vec<C> (&acc)[R][2]) {
  constexpr int kLanes = Vector<C>::width;
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = Vec<C>{};
  for (int64_t k = 0; k < n; ++k, p += p_col, v += v_row) {
    const Vec<C> v0 = load(v), v1 = load(v + kLanes);
    for (int r = 0; r < R; ++r) {
      const C x = p[r * p_row];
      if (skip_zeros && x == 0) continue;
      acc[r][0] += x * v0;
      acc[r][1] += x * v1;
    }
  }
}

// Compute gemm_small_block in blocks of keys, because sums of partial sums lose less than one long
// sum.
template <int R, bool skip_zeros, class C>
inline __attribute__((always_inline)) void gemm_small_sums(const C* p, int64_t p_row, int64_t p_col,
                                                           int64_t n, const C* v, int64_t v_row,
                                                           Vec<C> (&acc)[R][2]) {
  constexpr int64_t kBlock = 32;
  gemm_small_block<R, skip_zeros>(p, p_row, p_col, min(n, kBlock), v, v_row, acc);
  for (int64_t k = kBlock; k < n; k += kBlock) {
    Vec<C> part[R][2];
    gemm_small_block<R, skip_zeros>(p + k * p_col, p_row, p_col, min(n - k, kBlock), v + k * v_row, v_row,
                                    part);
    for (int r = 0; r < R; ++r) {
      acc[r][0] += part[r][0];
      acc[r][1] += part[r][1];
    }
  }
}

// Compute out[r] = scale * sum_k p[r, k] v[k] for R rows, added to out if `more`. If p are weights,
// a key of weight 0 adds nothing even when its value is NaN: a sum that is NaN is computed again
// without such keys, which changes no bit otherwise.
template <int R, bool weights, bool more, class C, class O>
__attribute__((noinline)) void gemm_small_tile(const C* p, int64_t p_row, int64_t p_col, int64_t n,
                                               const C* v, int64_t v_row, C scale, O* out,
                                               int64_t out_stride, int64_t width) {
  constexpr int kLanes = Vector<C>::width;
  Vec<C> acc[R][2];
  gemm_small_sums<R, false>(p, p_row, p_col, n, v, v_row, acc);
  if constexpr (weights) {
    Vec<C> check = {};
    for (int r = 0; r < R; ++r) check += acc[r][0] + acc[r][1];
    if (__builtin_expect(has_nan<C>(check), 0)) gemm_small_sums<R, true>(p, p_row, p_col, n, v, v_row, acc);
  }
  for (int r = 0; r < R; ++r) {
    if constexpr (more) {
      add(out + r * out_stride, acc[r][0] * scale);
      add(out + r * out_stride + kLanes, acc[r][1] * scale);
      continue;
    }
    put<O, C>(out + r * out_stride, acc[r][0] * scale, width);
    put<O, C>(out + r * out_stride + kLanes, acc[r][1] * scale, width - kLanes);
  }
}

// Compute gemm_small_tile for any number of rows.
template <bool weights, bool more, class C, class O>
void gemm_small_rows(const C* p, int64_t p_row, int64_t p_col, int64_t rows, int64_t n, const C* v,
                     int64_t v_row, C scale, O* out, int64_t out_stride, int64_t width) {
  constexpr int R = kRegisters == 32 ? 8 : 6;  // rows that the registers hold
  const auto run = [&](auto tile, int64_t r) {
    tile(p + r * p_row, p_row, p_col, n, v, v_row, scale, out + r * out_stride, out_stride, width);
  };
  int64_t r = 0;
  for (; r + R <= rows; r += R) run(gemm_small_tile<R, weights, more, C, O>, r);
  if constexpr (more)  // a beam of five
    for (; r + 5 <= rows; r += 5) run(gemm_small_tile<5, weights, more, C, O>, r);
  for (; r + 3 <= rows; r += 3) run(gemm_small_tile<3, weights, more, C, O>, r);
  for (; r < rows; ++r) run(gemm_small_tile<1, weights, more, C, O>, r);
}

template <bool weights, class C, class O>
void gemm_small_packed(const C* p, int64_t p_row, int64_t p_col, int64_t rows, int64_t n, const C* v,
                       C scale, O* out, int64_t out_stride, int64_t width) {
  constexpr int W2 = 2 * Vector<C>::width;
  gemm_small_rows<weights, false>(p, p_row, p_col, rows, n, v, W2, scale, out, out_stride, width);
}

// Scale a matrix that was computed elsewhere; return true if all elements are finite.
template <class C>
bool is_finite(C* x, int64_t stride, int64_t rows, int64_t width, C scale) {
  constexpr int kLanes = Vector<C>::width;
  Vec<C> check = {};
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) {
      const Vec<C> v = load(x + c) * scale;
      if (scale != 1) store(x + c, v);
      check += v * 0;
    }
    for (; c < width; ++c) {
      x[c] *= scale;
      check[0] += x[c] * 0;
    }
  }
  return !has_nan<C>(check);
}

// Compute out = scale * sum_k p[k] v[k] in one pass over the rows of v, four at a time, skipping
// those of weight 0. Sums of partial sums lose less than one long sum; `acc` is a buffer for both.
template <class T, class C, class O>
void gemm_small_row(const C* p, int64_t p_col, int64_t n, const T* v, int64_t v_stride, int64_t width,
                    C scale, O* out, C* acc) {
  constexpr int kLanes = Vector<C>::width;
  constexpr int64_t kPart = 256;  // fours of a partial sum
  C* const total = acc + round_up(width, kLanes);
  for (C* x = acc; x < total + round_up(width, kLanes); ++x) *x = 0;
  for (int64_t k = 0, fours = 1;; ++fours) {
    const T* row[4];
    C x[4] = {};
    int found = 0;
    for (; k < n && found < 4; ++k) {
      if (p[k * p_col] == 0) continue;
      row[found] = v + k * v_stride;
      x[found++] = p[k * p_col];
    }
    if (found == 0) break;
    for (int i = found; i < 4; ++i) row[i] = row[0];
    for (int64_t c = 0; c < width; ++c)
      acc[c] += (x[0] * widen(row[0][c]) + x[1] * widen(row[1][c])) +
                (x[2] * widen(row[2][c]) + x[3] * widen(row[3][c]));
    if (fours % kPart) continue;
    for (int64_t c = 0; c < width; ++c) total[c] += acc[c], acc[c] = 0;
  }
  for (int64_t c = 0; c < width; c += kLanes)
    put<O, C>(out + c, (load(total + c) + load(acc + c)) * scale, width - c);
}

// Pack `n` rows, two vectors of columns at a time, with zeros past `width`.
template <class T, class C>
void pack(const T* v, int64_t stride, int64_t n, int64_t width, C* out) {
  constexpr int kLanes = Vector<C>::width;
  for (int64_t k = 0; k < n; ++k, v += stride, out += 2 * kLanes) {
    if constexpr (sizeof(T) == sizeof(C)) {
      if (width >= 2 * kLanes) {
        store(out, load(v));
        store(out + kLanes, load(v + kLanes));
        continue;
      }
    }
    for (int64_t i = 0; i < 2 * kLanes; ++i) out[i] = i < width ? widen(v[i]) : C{};
  }
}

// Set out[c * out_stride + r] to row r, column c, and zeros past the last row: stale values there
// may be subnormal, and a product with them a hundred times slower.
template <class C>
void transpose(const C* rows, int64_t stride, int64_t n, int64_t columns, C* out, int64_t out_stride) {
  int64_t r = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(C) == 4) {
    for (; r + 8 <= n; r += 8)  // the number of columns is a multiple of 8
      for (int64_t c = 0; c < columns; c += 8)
        transpose8(rows + r * stride + c, stride, out + c * out_stride + r, out_stride);
  }
#endif
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t i = r; i < n; ++i) out[c * out_stride + i] = rows[i * stride + c];
    for (int64_t i = n; i < out_stride; ++i) out[c * out_stride + i] = 0;
  }
}

template <class C>
constexpr int64_t kPanel = 2 * Vector<C>::width;  // columns

// Pack columns [first, first + n) of a panel: the rows of a weight as they are stored in memory.
template <class C>
void pack_rows(const C* weight, int64_t stride, int64_t n, int64_t depth, C* out) {
  const int64_t whole = depth / 8 * 8;  // `transpose` takes multiples of 8
  transpose(weight, stride, n, whole, out, kPanel<C>);
  for (int64_t k = whole; k < depth; ++k)
    for (int64_t i = 0; i < kPanel<C>; ++i) out[k * kPanel<C> + i] = i < n ? weight[i * stride + k] : C{};
}

// Compute out[r] = scale * sum_k p[r, k] v[k] for columns [0, width) of v. Scratch: see
// gemm_small_scratch.
template <class T, class C, class O>
void gemm_small(const C* p, int64_t p_row, int64_t p_col, int64_t rows, int64_t n, const T* v,
                int64_t v_stride, int64_t width, C scale, O* out, int64_t out_stride, C* scratch) {
  constexpr int kLanes = Vector<C>::width;
  if (rows < 3 || n < 3) {  // too few to repay packing
    for (int64_t r = 0; r < rows; ++r)
      gemm_small_row(p + r * p_row, p_col, n, v, v_stride, width, scale, out + r * out_stride, scratch);
    return;
  }
  for (int64_t c = 0; c < width; c += 2 * kLanes) {
    const int64_t part = min(width - c, 2 * kLanes);
    pack(v + c, v_stride, n, part, scratch);
    gemm_small_packed<true>(p, p_row, p_col, rows, n, scratch, scale, out + c, out_stride, part);
  }
}

template <class C>
int64_t gemm_small_scratch(int64_t n, int64_t width) {
  constexpr int kLanes = Vector<C>::width;
  return n * 2 * kLanes + 2 * round_up(width, kLanes);
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
