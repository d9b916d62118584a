// Spans: rows that each see a run of keys of their own, taken by bands of rows whose keys are nearly
// the same. What a band computes beyond them is left out again.
#pragma once
#include "../span.h"
#include "rows.h"

namespace attnfast {
namespace VARIANT {
namespace {

Seen seen_by(const Attention& a, const Item& item, int64_t row) {
  return seen_within(a, at<int64_t>(a.span, item, row), item.seen);
}

// Rows [row, row + rows) and the keys that any of them sees.
struct Band {
  int64_t row, rows, from, to;
};

// The rows from `row` on, before `end`, whose keys in [first, last) are so nearly the same that all
// pairs are at most 1 + waste / 8 times those seen.
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
  return band;
}

constexpr int kTight = 1, kLoose = 4;  // waste: of scores, taken two rows at a time; of products

// The most keys of a band taken loosely, and room for its numbers.
int64_t band_keys(const Attention& a) { return 2 * min(a.W, a.Tk) + 16; }
int64_t band_scratch(const Attention& a) { return a.span.data ? kMostRows * band_keys(a) : 0; }

// Keys of a block, transposed, lie this far apart.
template <class C>
constexpr int64_t kTransposed = kKeyBlock + 2 * Vector<C>::width;

// Compute numbers for all pairs that the rows of an item see, by tiles of rows and keys, and put
// them into their columns. prepare(key, n) comes before the tiles of these keys; tile(row, rows, key,
// keys, out, stride) counts rows and keys from the first of the item and of those prepared.
template <class C, class Prepare, class Tile>
void for_tiles(const Attention& a, const Item& item, int waste, Rows<C> out, C* scratch,
               const Prepare& prepare, const Tile& tile) {
  Seen seen[kMostRows];
  for (int64_t r = 0; r < item.rows; ++r) seen[r] = seen_by(a, item, item.row + r);
  const auto see = [&](int64_t r) { return seen[r]; };
  for (int64_t j = 0;; j += kKeyBlock) {
    int64_t next = item.seen, end = 0;
    for (int64_t r = 0; r < item.rows; ++r)
      if (seen[r].to > j) next = min(next, seen[r].from > j ? seen[r].from : j);
    if (next >= item.seen) return;
    j = next;
    for (int64_t r = 0; r < item.rows; ++r) {
      const int64_t to = min(seen[r].to, j + kKeyBlock);
      if (seen[r].from < to && to > end) end = to;
    }
    prepare(j, end - j);
    for (int64_t r = 0; r < item.rows;) {
      const Band band = band_of(r, item.rows, j, end, waste, see);
      r += band.rows;
      if (band.from >= band.to) continue;
      tile(band.row, band.rows, band.from - j, band.to - band.from, scratch, kKeyBlock);
      for (int64_t i = band.row; i < r; ++i) {
        C* columns = const_cast<C*>(out.data) + i * out.stride - seen[i].origin;
        const C* from = scratch + (i - band.row) * kKeyBlock - band.from;
        const int64_t to = min(seen[i].to, band.to);
        for (int64_t x = seen[i].from > band.from ? seen[i].from : band.from; x < to; ++x)
          columns[x] = from[x];
      }
    }
  }
}

// Rows of numbers in their columns become a matrix [rows, keys] of a band, 0 where a row sees no key.
template <class C>
void spread(const Attention& a, const Item& item, const Band& band, Rows<C> p, C* out) {
  const int64_t n = band.to - band.from;
  for (int64_t r = 0; r < band.rows; ++r, out += n) {
    const Seen seen = seen_by(a, item, band.row + r);
    const C* columns = p.data + (band.row + r) * p.stride + band.from - seen.origin;
    const int64_t from = seen.from - band.from, to = seen.to - band.from;
    for (int64_t j = 0; j < min(from, n); ++j) out[j] = 0;
    for (int64_t j = from > 0 ? from : 0; j < to; ++j) out[j] = columns[j];
    for (int64_t j = to > 0 ? to : 0; j < n; ++j) out[j] = 0;
  }
}

// Visit the bands of rows [row, end).
template <class Visit>
void for_bands(const Attention& a, const Item& item, int64_t row, int64_t end, int waste,
               const Visit& visit) {
  const auto see = [&](int64_t r) { return seen_by(a, item, r); };
  while (row < end) {
    const Band band = band_of(row, end, 0, item.seen, waste, see);
    row += band.rows;
    visit(band);
  }
}

// The keys that any row of a sequence sees; one empty run if none does.
Seen hull(const Attention& a, const Item& item) {
  Seen all = {item.seen, 0, 0};
  for (int64_t r = 0; r < a.Tq; ++r) {
    const Seen s = seen_by(a, item, r);
    if (s.from == s.to) continue;
    all.from = min(all.from, s.from);
    all.to = s.to > all.to ? s.to : all.to;
  }
  return all.from < all.to ? all : Seen{0, 0, 0};
}

// From where to where rows of a product pass.
template <class T>
struct Side {
  const T* from;
  int64_t from_row;
  T* to;  // null: not wanted
  int64_t to_row;
};

// Room for the sums of span_products, for those that cannot be added up in their place.
template <class T>
int64_t sums_scratch(const Attention& a, int64_t width) {
  constexpr int64_t W2 = 2 * Vector<typename Accumulate<T>::type>::width;
  const bool apart = sizeof(T) != sizeof(typename Accumulate<T>::type);
  return a.Tk * (apart ? round_up(width, W2) : width % W2 ? W2 : 0);
}

// Two products of p, rows [row, end) of numbers in their columns, for columns [0, width):
//   keys.to_i = scale * sum_j p_ij keys.from_j,  rows.to_j = scale * sum_i p_ij rows.from_i
template <class T, class C = typename Accumulate<T>::type>
void span_products(const Attention& a, const Item& item, int64_t row, int64_t end, Rows<C> p,
                   C scale, int64_t width, const Side<T>& keys, const Side<T>& rows, C* scratch) {
  constexpr int64_t W2 = 2 * Vector<C>::width;
  constexpr bool in_place = sizeof(T) == sizeof(C);
  C* mixing = scratch + band_scratch(a);  // or a band's rows, side by side
  C* sums = mixing + mix_scratch<C>(kMostRows + band_keys(a), width);
  const int64_t apart = in_place ? width / W2 * W2 : 0;  // columns from here on have sums apart
  int64_t cleared = 0;
  const auto clear_to = [&](int64_t end) {  // just before the first sums come, while in cache
    for (; cleared < end; ++cleared)
      for (int64_t c = 0; c < apart; ++c) rows.to[cleared * rows.to_row + c] = T{};
  };
  for (int64_t x = 0; rows.to && x < sums_scratch<T>(a, width); ++x) sums[x] = 0;
  for_bands(a, item, row, end, kLoose, [&](const Band& band) {
    const int64_t n = band.to > band.from ? band.to - band.from : 0;
    if (n) spread(a, item, band, p, scratch);
    if (keys.to) {
      T* to = keys.to + band.row * keys.to_row;
      const T* from = keys.from + (n ? band.from : 0) * keys.from_row;
      int64_t c = 0;
      if constexpr (in_place) {
        for (; band.rows > 2 && c + W2 <= width; c += W2)
          mix_rows<true, false>(scratch, n, 1, band.rows, n, from + c, keys.from_row, scale,
                                to + c, keys.to_row, W2);
      }
      if (c < width)
        mix(scratch, n, 1, band.rows, n, from + c, keys.from_row, width - c, scale, to + c,
            keys.to_row, mixing);
    }
    if (!rows.to || !n) return;
    clear_to(band.to);
    const T* from = rows.from + band.row * rows.from_row;
    T* to = rows.to + band.from * rows.to_row;
    if constexpr (in_place) {
      for (int64_t c = 0; c < apart; c += W2)
        mix_rows<true, true>(scratch, 1, n, n, band.rows, from + c, rows.from_row, scale, to + c,
                             rows.to_row, W2);
    }
    for (int64_t c = apart; c < width; c += W2) {
      pack(from + c, rows.from_row, band.rows, min(width - c, W2), mixing);
      mix_rows<true, true>(scratch, 1, n, n, band.rows, mixing, W2, scale,
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
