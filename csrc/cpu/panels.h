// Products with a right factor that is packed into panels of two vectors.
#pragma once
#include "int8.h"
#include "narrow.h"
#include "product.h"
#include "rows.h"

namespace attnfast {
namespace VARIANT {
namespace {

constexpr int64_t kDepth = 512;                            // of a panel, for all rows at a time
constexpr int64_t kProductRows = 64, kProductDepth = 512;  // of a large product's left side

template <class C>
int64_t panels(int64_t columns) {
  return (columns + kPanel<C> - 1) / kPanel<C>;
}

// How the elements of a panel are stored.
enum class Stored { as_computed, bfloat16, int8 };

// Rows of kPanel elements. With bfloat16 an element is two values, of two rows; with int8 four, and two
// more rows come first (see int8.h).
template <class C>
struct Panel {
  C* data;
  Stored stored;
  Panel from(int64_t row) const {
    return {data + (stored == Stored::bfloat16 ? row / 2 : row) * kPanel<C>, stored};
  }
};

// A matrix [depth, columns] in consecutive panels of kPanel columns.
template <class C>
struct Panels {
  C* data = nullptr;
  int64_t depth = 0, count = 0;
  Stored stored = Stored::as_computed;
  int64_t size() const {
    if (stored == Stored::int8) return (quads(depth) + 2) * kPanel<C>;
    return (stored == Stored::bfloat16 ? (depth + 1) / 2 : depth) * kPanel<C>;
  }
  Panel<C> at(int64_t panel) const { return {data + panel * size(), stored}; }
};

template <class C>
Panels<C> take_panels(Scratch<C>& room, int64_t depth, int64_t count, Stored stored = Stored::as_computed) {
  Panels<C> x = {nullptr, depth, count, stored};
  x.data = room.take(x.size() * count);
  return x;
}

// Compute out[r] += a[r] . panel; rows have kPanel elements.
template <class C>
void multiply_panel(const C* a, int64_t a_row, int64_t a_column, int64_t rows, int64_t depth,
                    const Panel<C>& panel, C* out) {
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == sizeof(float))
    if (panel.stored == Stored::bfloat16) return multiply_narrow(a, a_row, rows, depth, panel.data, out);
#endif
  for (int64_t k = 0; k < depth; k += kDepth)
    gemm_small_rows<false, true>(a + k * a_column, a_row, a_column, rows, min(depth - k, kDepth),
                                 panel.from(k).data, kPanel<C>, (C)1, out, kPanel<C>, kPanel<C>);
}

// The left factor of products: rows, and their bytes if the panels are of bytes.
template <class C>
struct Factor {
  const C* data;
  int64_t stride, depth;
  ByteRows bytes = {};

  // Compute out[r] += row `first + r` . panel; rows of out have kPanel elements.
  void multiply(int64_t first, int64_t rows, const Panel<C>& panel, C* out) const {
    if constexpr (sizeof(C) == sizeof(float))
      if (bytes.data) return multiply_bytes(bytes, first, rows, depth, panel.data, out);
    multiply_panel(data + first * stride, stride, 1, rows, depth, panel, out);
  }
};

template <class C>
void clear(C* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = 0;
}

// Call f(c, n) for every vector of columns of a panel: c is its first column in the panel, n the
// number of columns from c on.
template <class C, class F>
inline __attribute__((always_inline)) void for_vectors(int64_t width, const F& f) {
  for (int64_t c = 0; c < min(width, kPanel<C>); c += Vector<C>::width) f(c, width - c);
}

// The arguments of a large product for some rows: out[m, n] = bias[n] + sum_k left[m, k] right[k,
// n].
template <class C>
struct ProductRows {
  const C* left;
  int64_t row, column;  // strides of left, one of them 1
  int64_t rows, depth;
  C* out;
  int64_t out_row, columns;
  const C* bias;  // or null
  C* sums;        // the sum of each row of left, or null
};

// Gather [depth, rows] of left contiguously. Add up its rows in blocks, because sums of partial
// sums lose less than one long sum.
template <class C>
void gather_left(const ProductRows<C>& x, int64_t k, int64_t depth, C* out, C* sums) {
  for (int64_t i = 0; i < depth;) {
    C of_block[kProductRows] = {};
    for (const int64_t end = min(i + 16, depth); i < end; ++i) {
      const C* from = x.left + (k + i) * x.column;
      for (int64_t m = 0; m < x.rows; ++m) of_block[m] += out[i * kProductRows + m] = from[m];
    }
    for (int64_t m = 0; m < x.rows; ++m) sums[m] += of_block[m];
  }
}

// Store two rows of a vector of columns as a row of a panel of pairs.
template <class C>
void store_two(const Vec<C>& low, const Vec<C>& high, C* out) {
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == sizeof(float)) store_pairs(low, high, out);
#endif
}

// Round [depth, kProductRows] of left to pairs.
template <class C>
void round_left(const C* left, int64_t rows, int64_t depth, C* pairs) {
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == sizeof(float))
    round_columns(left, kProductRows, rows, depth, reinterpret_cast<uint32_t*>(pairs));
#endif
}

// Compute out[r] += row r of these pairs . panel.
template <class C>
void multiply_rounded(const C* pairs, int64_t rows, int64_t depth, const Panel<C>& panel, C* out) {
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == sizeof(float))
    multiply_pairs(reinterpret_cast<const uint32_t*>(pairs), 1, kProductRows, rows, (depth + 1) / 2,
                   panel.data, out);
#endif
}

// Return the elements of scratch of `multiply_rows`: a part of left, and its pairs.
template <class C>
constexpr int64_t product_scratch() {
  return kProductRows * kProductDepth * 3 / 2;
}

// Compute panels [first, last) of the result, kProductDepth of the depth at a time. Panels of
// bfloat16 need a left whose rows have the stride 1; `own` is scratch.
template <class C>
void multiply_rows(const ProductRows<C>& x, const Panels<C>& right, int64_t first, int64_t last, C* own) {
  constexpr int64_t P = kPanel<C>;
  C sums[kProductRows] = {};
  alignas(64) C block[kProductRows * P];
  for (int64_t k = 0; k < x.depth || k == 0; k += kProductDepth) {
    const int64_t depth = min(kProductDepth, x.depth - k);
    const bool narrow = right.stored == Stored::bfloat16, gathers = x.sums || x.column != 1 || narrow;
    if (gathers) gather_left(x, k, depth, own, sums);
    const C* const left = gathers ? own : x.left + k;
    C* const pairs = own + kProductRows * kProductDepth;
    if (narrow) round_left(own, x.rows, depth, pairs);
    for (int64_t panel = first; panel < last; ++panel) {
      clear(block, x.rows * P);
      const Panel<C> columns = right.at(panel).from(k);
      if (narrow) multiply_rounded(pairs, x.rows, depth, columns, block);
      else
        multiply_panel(left, gathers ? 1 : x.row, gathers ? kProductRows : 1, x.rows, depth, columns,
                       block);
      const C* const bias = x.bias && k == 0 ? x.bias + panel * P : nullptr;
      for (int64_t m = 0; m < x.rows; ++m)
        for_vectors<C>(x.columns - panel * P, [&](int64_t c, int64_t n) {
          C* const out = x.out + m * x.out_row + panel * P + c;
          Vec<C> sum = load(block + m * P + c);
          if (bias) sum += load_part(bias + c, n, (C)0);
          store_part(out, k ? sum + load_part(out, n, (C)0) : sum, n);
        });
    }
  }
  if (x.sums)
    for (int64_t m = 0; m < x.rows; ++m) x.sums[m] = sums[m];
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
