// Spans: each row sees a separate range of keys. Rows are processed in bands whose keys are nearly
// the same; the surplus that a band computes is discarded.
#pragma once
#include "../span.h"
#include "rows.h"

namespace attnfast {
namespace VARIANT {
namespace {

Seen seen_by(const Problem& a, const Item& item, int64_t row) {
  return seen_within(a, at<int64_t>(a.key_bounds, item, row), item.seen);
}

// The visible keys of an item's rows, looked up once.
struct SeenByRows {
  Seen rows[kMostRows];
  int64_t last = 0;  // one past the last key that any of them sees
  SeenByRows(const Problem& a, const Item& item) {
    for (int64_t r = 0; r < item.rows; ++r) {
      rows[r] = seen_by(a, item, item.row + r);
      last = rows[r].to > last ? rows[r].to : last;
    }
  }
  Seen operator()(int64_t r) const { return rows[r]; }
};

// Rows [row, row + rows) and the keys that any of them sees.
struct Band {
  int64_t row, rows, from, to;
};

// Return a band of rows from `row` on, before `end`, over their keys in [first, last): as many rows
// as keep rows x keys of the band at most 1 + waste / 8 times the number of visible pairs.
template <class See>
Band band_of(int64_t row, int64_t end, int64_t first, int64_t last, int waste, const See& see) {
  Band band = {row, 0, last, first};
  int64_t total = 0;
  for (; row < end && band.rows < kMostRows; ++row, ++band.rows) {
    const Seen s = see(row);
    const int64_t from = s.from > first ? s.from : first, to = min(s.to, last);
    const int64_t own = to > from ? to - from : 0;
    const int64_t low = own ? min(band.from, from) : band.from;
    const int64_t high = own && to > band.to ? to : band.to;
    if (band.rows && (high - low) * (band.rows + 1) * 8 > (total + own) * (8 + waste)) break;
    band.from = low;
    band.to = high;
    total += own;
  }
  if (total == 0) band.from = band.to = first;
  return band;
}

constexpr int kTight = 1, kLoose = 4;  // waste of scores, two rows at a time, and of products

// Visit the bands of rows [row, end).
template <class See, class Visit>
void for_bands(int64_t row, int64_t end, int64_t first, int64_t last, int waste, const See& see,
               const Visit& visit) {
  while (row < end) {
    const Band band = band_of(row, end, first, last, waste, see);
    row += band.rows;
    visit(band);
  }
}

// Return the largest number of keys of a loose band, the row length of a band as a matrix [rows,
// keys], because tiles write up to two vectors beyond their keys, and the size of its scratch.
int64_t band_keys(const Problem& a) { return 2 * min(a.W, a.Tk) + 16; }
template <class C>
int64_t band_row(int64_t keys) {
  return round_up(keys, Vector<C>::width) + 2 * Vector<C>::width;
}
template <class C>
int64_t band_scratch(const Problem& a) {
  return a.key_bounds.data ? kMostRows * band_row<C>(band_keys(a)) : 0;
}

// The location of a row's visible elements: [from, to) in the matrix, [column, end()) in its
// columns.
struct VisiblePart {
  int64_t from, to, column;
  int64_t end() const { return column + to - from; }
};

VisiblePart visible_part_of(const Seen& s, const Band& band) {
  if (s.from == s.to) return {0, 0, 0};
  return {s.from - band.from, s.to - band.from, s.from - s.origin};
}

// The distance of the features of a block of transposed keys.
template <class C>
constexpr int64_t kTransposed = kKeyBlock + 2 * Vector<C>::width;

// Compute the scores of a band as a matrix; elements that its rows do not see are undefined.
template <class Scores, class C>
void compute_band(const Band& band, const SeenByRows& seen, Scores& scores, C* out, int64_t stride) {
  for (int64_t j = band.from, end; j < band.to; j = end) {
    if (j < scores.from() || band.to > scores.to()) scores.load_keys(j, min(j + kKeyBlock, seen.last));
    end = min(scores.to(), band.to);
    for_bands(band.row, band.row + band.rows, j, end, scores.waste(), seen, [&](const Band& part) {
      if (part.from < part.to)
        scores.tile(part.row, part.rows, part.from, part.to,
                    out + (part.row - band.row) * stride + part.from - band.from, stride);
    });
  }
}

// Copy rows of elements in their columns to the matrix of a band, with 0 at keys that a row does
// not see.
template <class C>
void spread(const Problem& a, const Item& item, const Band& band, Rows<C> p, C* out) {
  const int64_t n = band.to - band.from;
  for (int64_t r = 0; r < band.rows; ++r, out += n) {
    const VisiblePart own = visible_part_of(seen_by(a, item, band.row + r), band);
    const C* columns = p.data + (band.row + r) * p.stride + own.column;
    for (int64_t j = own.from; j < own.to; ++j) out[j] = columns[j - own.from];
    clear_outside(out, n, own.from, own.to);
  }
}

// Return the range of keys that any row of a sequence sees; an empty one if none does.
Seen hull(const Problem& a, const Item& item) {
  Seen all = {item.seen, 0, 0};
  for (int64_t r = 0; r < a.Tq; ++r) {
    const Seen s = seen_by(a, item, r);
    if (s.from == s.to) continue;
    all.from = min(all.from, s.from);
    all.to = s.to > all.to ? s.to : all.to;
  }
  return all.from < all.to ? all : Seen{0, 0, 0};
}

// The source and the destination of the rows of a product.
template <class T>
struct Side {
  const T* from;
  int64_t from_row;
  T* to;  // null: not needed
  int64_t to_row;
};

// Compute keys.to_i = scale * sum_j p_ij keys.from_j for the rows of a band, p [rows, keys],
// columns [0, width).
template <class T, class C>
void band_product(const C* p, int64_t stride, const Band& band, C scale, int64_t width, const Side<T>& keys,
                  C* gemm_scratch) {
  constexpr int64_t W2 = 2 * Vector<C>::width;
  const int64_t n = band.to - band.from;
  const T* from = keys.from + band.from * keys.from_row;
  T* to = keys.to + band.row * keys.to_row;
  int64_t c = 0;
  if constexpr (sizeof(T) == sizeof(C)) {
    for (; band.rows > 2 && c + W2 <= width; c += W2)
      gemm_small_rows<true, false>(p, stride, 1, band.rows, n, from + c, keys.from_row, scale, to + c,
                                   keys.to_row, W2);
  }
  if (c < width)
    gemm_small(p, stride, 1, band.rows, n, from + c, keys.from_row, width - c, scale, to + c, keys.to_row,
               gemm_scratch);
}

// Return the size of the scratch for those sums of span_products that cannot be accumulated in
// place.
template <class T>
int64_t sums_scratch(const Problem& a, int64_t width) {
  constexpr int64_t W2 = 2 * Vector<typename Accumulate<T>::type>::width;
  const bool apart = sizeof(T) != sizeof(typename Accumulate<T>::type);
  return a.Tk * (apart ? round_up(width, W2) : width % W2 ? W2 : 0);
}

// Compute two products of p, rows of elements in their columns, for columns [0, width):
//   keys.to_i = scale * sum_j p_ij keys.from_j,  rows.to_j = scale * sum_i p_ij rows.from_i
template <class T, class C = typename Accumulate<T>::type>
void span_products(const Problem& a, const Item& item, Rows<C> p, C scale, int64_t width,
                   const Side<T>& keys, const Side<T>& rows, C* scratch) {
  constexpr int64_t W2 = 2 * Vector<C>::width;
  constexpr bool in_place = sizeof(T) == sizeof(C);
  C* gemm_scratch = scratch + band_scratch<C>(a);  // or a band's rows, contiguous
  C* sums = gemm_scratch + gemm_small_scratch<C>(kMostRows + band_keys(a), width);
  const int64_t apart = in_place ? width / W2 * W2 : 0;  // columns from here on have separate sums
  int64_t cleared = 0;
  const auto clear_to = [&](int64_t end) {  // just before the first sums arrive, while in cache
    for (; cleared < end; ++cleared)
      for (int64_t c = 0; c < apart; ++c) rows.to[cleared * rows.to_row + c] = T{};
  };
  for (int64_t x = 0; rows.to && x < sums_scratch<T>(a, width); ++x) sums[x] = 0;
  const auto see = [&](int64_t r) { return seen_by(a, item, r); };
  for_bands(0, a.Tq, 0, item.seen, kLoose, see, [&](const Band& band) {
    const int64_t n = band.to - band.from;
    const int64_t next = band.row + band.rows;
    if (keys.to) {
      prefetch(keys.from, keys.from_row, band.to, band.rows, item.seen, width);
      prefetch(keys.to, keys.to_row, next, band.rows, a.Tq, width);
    }
    if (rows.to) {
      prefetch(rows.from, rows.from_row, next, band.rows, a.Tq, width);
      prefetch(rows.to, rows.to_row, band.to, band.rows, item.seen, width);
    }
    spread(a, item, band, p, scratch);
    if (keys.to) band_product<T>(scratch, n, band, scale, width, keys, gemm_scratch);
    if (!rows.to || !n) return;
    clear_to(band.to);
    const T* from = rows.from + band.row * rows.from_row;
    T* to = rows.to + band.from * rows.to_row;
    if constexpr (in_place) {
      for (int64_t c = 0; c < apart; c += W2)
        gemm_small_rows<true, true>(scratch, 1, n, n, band.rows, from + c, rows.from_row, scale, to + c,
                                    rows.to_row, W2);
    }
    for (int64_t c = apart; c < width; c += W2) {
      pack(from + c, rows.from_row, band.rows, min(width - c, W2), gemm_scratch);
      gemm_small_rows<true, true>(scratch, 1, n, n, band.rows, gemm_scratch, W2, scale,
                                  sums + (c - apart) * a.Tk + band.from * W2, W2, W2);
    }
  });
  if (rows.to) clear_to(a.Tk);
  for (int64_t c = apart; rows.to && c < width; c += W2)
    for (int64_t r = 0; r < a.Tk; ++r)
      for (int64_t x = 0; x < W2; x += W2 / 2)
        put<T, C>(rows.to + r * rows.to_row + c + x, load(sums + (c - apart) * a.Tk + r * W2 + x),
                  width - c - x);
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
