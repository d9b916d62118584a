// Products of bfloat16 values, summed in float, by the instruction that multiplies pairs. A panel
// holds pairs: row m has elements 2m and 2m + 1 of every column.
#pragma once
#include "product.h"

namespace attnfast {
namespace VARIANT {
namespace {

constexpr int64_t kNarrowPanel = 2 * Vector<float>::width;  // columns

// Pack columns [0, n) of a panel: the rows of a weight as they are stored in memory.
void pack_rows(const uint16_t* weight, int64_t stride, int64_t n, int64_t depth, float* out) {
  auto* const pairs = reinterpret_cast<uint32_t*>(out);
  int64_t k = 0;
  if (stride % 2 == 0 && reinterpret_cast<uintptr_t>(weight) % sizeof(float) == 0) {
    k = depth / 16 * 16;  // `transpose` takes multiples of 8
    transpose(reinterpret_cast<const float*>(weight), stride / 2, n, k / 2, out, kNarrowPanel);
  }
  for (; k < depth; k += 2)
    for (int64_t i = 0; i < kNarrowPanel; ++i) {
      const uint16_t* const x = weight + i * stride + k;
      pairs[k / 2 * kNarrowPanel + i] = i < n ? x[0] | (k + 1 < depth ? (uint32_t)x[1] << 16 : 0) : 0;
    }
}

// Pack `depth` rows of a weight, n of its columns.
void pack(const uint16_t* weight, int64_t stride, int64_t depth, int64_t n, float* out) {
  auto* pairs = reinterpret_cast<uint32_t*>(out);
  for (int64_t k = 0; k < depth; k += 2, weight += 2 * stride, pairs += kNarrowPanel) {
    const uint16_t* const next = k + 1 < depth ? weight + stride : nullptr;
    for (int64_t i = 0; i < kNarrowPanel; ++i)
      pairs[i] = i < n ? weight[i] | (next ? (uint32_t)next[i] << 16 : 0) : 0;
  }
}

#if defined(__AVX512F__)
#define ATTNFAST_NARROW __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
constexpr int64_t kPairs = 256, kNarrowRows = 8;  // of the left factor, at a time

__mmask16 some_lanes(int64_t n) { return (__mmask16)(n >= 16 ? 0xffff : n > 0 ? (1u << n) - 1 : 0); }

// Round n elements to bfloat16 and fill up with zeros.
ATTNFAST_NARROW void round_pairs(const float* x, int64_t n, uint32_t* out) {
  for (int64_t k = 0; k < n; k += 32, out += 16) {
    const __m512 low = _mm512_maskz_loadu_ps(some_lanes(n - k), x + k);
    const __m512 high = _mm512_maskz_loadu_ps(some_lanes(n - k - 16), x + k + 16);
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    __builtin_memcpy(out, &both, sizeof both);
  }
}

// Round two vectors to bfloat16 and store them as pairs (low, high).
ATTNFAST_NARROW void store_pairs(const Vec<float>& low, const Vec<float>& high, float* out) {
  const __m512i first = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)low));
  const __m512i second = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)high));
  _mm512_storeu_si512(out, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
}

// Round the n columns of [depth, stride] to pairs of rows, [depth / 2, stride].
void round_columns(const float* x, int64_t stride, int64_t n, int64_t depth, uint32_t* out) {
  for (int64_t k = 0; k < depth; k += 2, x += 2 * stride, out += stride)
    for (int64_t i = 0; i < n; i += Vector<float>::width)
      store_pairs(load(x + i), k + 1 < depth ? load(x + stride + i) : Vec<float>{},
                  reinterpret_cast<float*>(out + i));
}

// Compute out[r] += a[r] . panel for R rows of pairs with these strides.
template <int R>
ATTNFAST_NARROW void narrow_tile(const uint32_t* a, int64_t a_row, int64_t a_column, int64_t pairs,
                                 const float* panel, float* out) {
  __m512 sums[R][2];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) sums[r][i] = _mm512_loadu_ps(out + r * kNarrowPanel + 16 * i);
  for (int64_t k = 0; k < pairs; ++k, panel += kNarrowPanel) {
    const auto v0 = (__m512bh)_mm512_loadu_ps(panel), v1 = (__m512bh)_mm512_loadu_ps(panel + 16);
    for (int r = 0; r < R; ++r) {
      const auto x = (__m512bh)_mm512_set1_epi32((int)a[r * a_row + k * a_column]);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], x, v0);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], x, v1);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) _mm512_storeu_ps(out + r * kNarrowPanel + 16 * i, sums[r][i]);
}

void multiply_pairs(const uint32_t* a, int64_t a_row, int64_t a_column, int64_t rows, int64_t pairs,
                    const float* panel, float* out) {
  int64_t r = 0;
  const auto run = [&](auto tile, int64_t n) {
    for (; r + n <= rows; r += n)
      tile(a + r * a_row, a_row, a_column, pairs, panel, out + r * kNarrowPanel);
  };
  run(narrow_tile<8>, 8);
  run(narrow_tile<4>, 4);
  run(narrow_tile<1>, 1);
}

// Compute out[r] += a[r] . panel, with a rounded to bfloat16.
void multiply_narrow(const float* a, int64_t a_row, int64_t rows, int64_t depth, const float* panel,
                     float* out) {
  alignas(64) uint32_t rounded[kNarrowRows * kPairs];
  for (int64_t k = 0; k < depth; k += 2 * kPairs, panel += kPairs * kNarrowPanel) {
    const int64_t n = min(2 * kPairs, depth - k), pairs = (n + 1) / 2;
    for (int64_t r = 0; r < rows; r += kNarrowRows) {
      const int64_t left = min(kNarrowRows, rows - r);
      for (int64_t i = 0; i < left; ++i) round_pairs(a + (r + i) * a_row + k, n, rounded + i * kPairs);
      multiply_pairs(rounded, kPairs, 1, left, pairs, panel, out + r * kNarrowPanel);
    }
  }
}
#endif

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
