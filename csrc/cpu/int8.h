// Products of 8-bit integers, summed in 32 bits: weights have a scale for each column, rows of the
// left factor one each.
//
//     x ≈ s_x q_x,   q_x = round(x / s_x),   s_x = max |x| / 127
//     x · w ≈ s_x s_w Σ_k q_x[k] q_w[k]
//
// Row m of a panel holds rows 4m to 4m + 3 of every column, one in each byte of a 32-bit element. The
// sums are exact, and so the same for every instruction set. A row or column that is not finite has
// the scale NaN.
#pragma once
#include "product.h"

#if defined(__aarch64__) && defined(__linux__)
extern "C" unsigned long getauxval(unsigned long) noexcept;
#endif

namespace attnfast {
namespace VARIANT {
namespace {

constexpr int64_t kBytePanel = 2 * Vector<float>::width;  // columns

int64_t quads(int64_t depth) { return (depth + 3) / 4; }

// Round a vector to bytes and return them as integers.
Ints round_vector(Vec<float> x, float inverse, int8_t* out) {
  const Vec<float> shifted = x * inverse + 12582912.f;  // the integer in the low bits
  Ints bits;
  __builtin_memcpy(&bits, &shifted, sizeof bits);
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8((__m512i)bits));
#elif defined(__AVX2__)
  const __m256i low = _mm256_set1_epi32(0x0c080400), fours = _mm256_shuffle_epi8((__m256i)bits, low);
  _mm_storel_epi64((__m128i*)out,
                   _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1)));
#elif defined(__aarch64__)
  const int8x16_t bytes = (int8x16_t)bits, fours = vuzp1q_s8(vuzp1q_s8(bytes, bytes), bytes);
  __builtin_memcpy(out, &fours, 4);
#else
  for (int i = 0; i < Vector<float>::width; ++i) out[i] = (int8_t)bits[i];
#endif
  return bits << 24 >> 24;
}

// Return the scale of n elements.
float scale_of(const float* x, int64_t n) {
  Vec<float> largest = {}, check = {};
  for (int64_t i = 0; i < n; i += Vector<float>::width) {
    const Vec<float> v = load_part(x + i, n - i, 0.f);
    const Vec<float> size = v < 0.f ? -v : v;
    largest = size > largest ? size : largest;
    check += v * 0.f;
  }
  return has_nan<float>(check) ? __builtin_nanf("") : highest<float>(largest) / 127.f;
}
float inverse_of(float scale) { return scale > 1e-30f ? 1.f / scale : 0.f; }

// Pack columns [0, n) of a panel: the rows of a weight as they are stored in memory. Scales of the
// columns and -128 times their sums come first.
void pack_bytes(const float* weight, int64_t stride, int64_t n, int64_t depth, float* out) {
  constexpr int64_t P = kBytePanel, kPart = 512;
  auto* const offsets = reinterpret_cast<int32_t*>(out + P);
  float inverses[P];
  for (int64_t i = 0; i < P; ++i) {
    out[i] = i < n ? scale_of(weight + i * stride, depth) : 0.f;
    inverses[i] = inverse_of(out[i]);
    offsets[i] = 0;
  }
  for (int64_t k = 0; k < depth; k += kPart) {
    alignas(64) float rounded[P * kPart / 4];  // four bytes each
    const int64_t part = min(kPart, depth - k);
    for (int64_t i = 0; i < n; ++i) {
      auto* const bytes = reinterpret_cast<int8_t*>(rounded + i * kPart / 4);
      const float* const x = weight + i * stride + k;
      Ints sums = {};
      for (int64_t j = 0; j < part; j += Vector<float>::width)
        sums += round_vector(load_part(x + j, part - j, 0.f), inverses[i], bytes + j);
      for (int lane = 0; lane < Vector<float>::width; ++lane) offsets[i] -= 128 * sums[lane];
    }
    pack_rows(rounded, kPart / 4, n, quads(part), out + (2 + k / 4) * P);
  }
}

// Rows of a left factor as bytes plus 128, and their scales.
struct ByteRows {
  uint8_t* data;
  int64_t stride;
  float* scales;
};

// Return the size of ByteRows.
int64_t size_of_bytes(int64_t rows, int64_t depth) {
  return rows * round_up(depth, 64) + round_up(rows * (int64_t)sizeof(float), 64);
}
ByteRows take_bytes(char*& room, int64_t rows, int64_t depth) {
  auto* const data = reinterpret_cast<uint8_t*>(room);
  const int64_t stride = round_up(depth, 64);
  room += size_of_bytes(rows, depth);
  return {data, stride, reinterpret_cast<float*>(data + rows * stride)};
}

void round_row(const float* x, int64_t depth, const ByteRows& out, int64_t row) {
  uint8_t* const bytes = out.data + row * out.stride;
  out.scales[row] = scale_of(x, depth);
  const float inverse = inverse_of(out.scales[row]);
  for (int64_t i = 0; i < depth; i += Vector<float>::width)
    round_vector(load_part(x + i, depth - i, 0.f), inverse, reinterpret_cast<int8_t*>(bytes + i));
  for (int64_t i = 0; i < round_up(depth, Vector<float>::width); ++i) bytes[i] ^= 0x80;
}

// ---- tiles --------------------------------------------------------------------------------------

// Compute out[r] += a[r] . panel for R rows, the columns of two vectors; rows of out have kBytePanel
// elements.
template <int R>
void byte_tile(const ByteRows& a, int64_t first, int64_t depth, const float* panel, float* out) {
  constexpr int64_t P = kBytePanel;
  const auto* const weights = reinterpret_cast<const int8_t*>(panel + 2 * P);
  for (int r = 0; r < R; ++r)
    for (int64_t i = 0; i < P; ++i) {
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k)
        sum += (a.data[(first + r) * a.stride + k] - 128) * weights[(k / 4 * P + i) * 4 + k % 4];
      out[r * P + i] += (float)sum * (a.scales[first + r] * panel[i]);
    }
}

#if defined(__AVX2__)
// The sums of bytes times bytes are those of pairs in 16 bits, then of two pairs: |a| w sign(a), at
// most 2 · 127² in a pair.
template <int R>
void pair_tile(const ByteRows& a, int64_t first, int64_t depth, const float* panel, float* out) {
  constexpr int64_t P = kBytePanel;
  for (int64_t c = 0; c < P; c += 16) {
    __m256i sums[R][2] = {};
    const float* weights = panel + 2 * P + c;
    for (int64_t k = 0; k < quads(depth); ++k, weights += P) {
      const __m256i w0 = _mm256_loadu_si256((const __m256i*)weights),
                    w1 = _mm256_loadu_si256((const __m256i*)(weights + 8));
      for (int r = 0; r < R; ++r) {
        int32_t four;
        __builtin_memcpy(&four, a.data + (first + r) * a.stride + 4 * k, 4);
        const __m256i x = _mm256_set1_epi32(four ^ (int32_t)0x80808080), size = _mm256_abs_epi8(x),
                      ones = _mm256_set1_epi16(1);
        const auto add = [&](__m256i sum, __m256i w) {
          const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w, x));
          return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        };
        sums[r][0] = add(sums[r][0], w0);
        sums[r][1] = add(sums[r][1], w1);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2; ++i) {
        float* const to = out + r * P + c + 8 * i;
        const __m256 scale = _mm256_set1_ps(a.scales[first + r]) * _mm256_loadu_ps(panel + c + 8 * i);
        _mm256_storeu_ps(to, _mm256_loadu_ps(to) + _mm256_cvtepi32_ps(sums[r][i]) * scale);
      }
  }
}
#endif

#if defined(__AVX512F__)
// The instruction multiplies unsigned by signed bytes: offsets take the 128 of the unsigned ones off.
template <int R>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))) void quad_tile(
    const ByteRows& a, int64_t first, int64_t depth, const float* panel, float* out) {
  constexpr int64_t P = kBytePanel;
  __m512i sums[R][2];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) sums[r][i] = _mm512_loadu_si512(panel + P + 16 * i);
  const float* weights = panel + 2 * P;
  const uint8_t* const rows = a.data + first * a.stride;
  for (int64_t k = 0; k < quads(depth); ++k, weights += P) {
    const __m512i w0 = _mm512_loadu_si512(weights), w1 = _mm512_loadu_si512(weights + 16);
    for (int r = 0; r < R; ++r) {
      int32_t four;
      __builtin_memcpy(&four, rows + r * a.stride + 4 * k, 4);
      const __m512i x = _mm512_set1_epi32(four);
      sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], x, w0);
      sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], x, w1);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) {
      float* const to = out + r * P + 16 * i;
      const __m512 scale = _mm512_set1_ps(a.scales[first + r]) * _mm512_loadu_ps(panel + 16 * i);
      _mm512_storeu_ps(to, _mm512_loadu_ps(to) + _mm512_cvtepi32_ps(sums[r][i]) * scale);
    }
}
#endif

#if defined(__aarch64__)
// Return whether the processor sums products of four bytes in one instruction.
bool has_dot_products() {
#if defined(__ARM_FEATURE_DOTPROD)
  return true;
#elif defined(__linux__)
  return getauxval(16) >> 20 & 1;  // AT_HWCAP, HWCAP_ASIMDDP
#else
  return false;
#endif
}

// Set out[r] += (sums of x and w) s_x s_w for the columns of a vector.
inline __attribute__((always_inline)) void add_bytes(int32x4_t sums, float scale, const float* scales,
                                                     float* out) {
  const float32x4_t scaled = vmulq_f32(vcvtq_f32_s32(sums), vmulq_n_f32(vld1q_f32(scales), scale));
  vst1q_f32(out, vaddq_f32(vld1q_f32(out), scaled));
}

// The sums are those of pairs of products in 16 bits.
template <int R>
void pair_tile(const ByteRows& a, int64_t first, int64_t depth, const float* panel, float* out) {
  constexpr int64_t P = kBytePanel;
  int32x4_t sums[R][4] = {};  // of half a vector of columns, two of each
  const auto* weights = reinterpret_cast<const int8_t*>(panel + 2 * P);
  for (int64_t k = 0; k < quads(depth); ++k, weights += 4 * P) {
    const int8x16_t w[2] = {vld1q_s8(weights), vld1q_s8(weights + 16)};
    for (int r = 0; r < R; ++r) {
      uint32_t four;
      __builtin_memcpy(&four, a.data + (first + r) * a.stride + 4 * k, 4);
      const int8x16_t x = vreinterpretq_s8_u32(vdupq_n_u32(four ^ 0x80808080u));
      for (int i = 0; i < 2; ++i) {
        sums[r][2 * i] = vpadalq_s16(sums[r][2 * i], vmull_s8(vget_low_s8(w[i]), vget_low_s8(x)));
        sums[r][2 * i + 1] = vpadalq_s16(sums[r][2 * i + 1], vmull_high_s8(w[i], x));
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i)
      add_bytes(vpaddq_s32(sums[r][2 * i], sums[r][2 * i + 1]), a.scales[first + r], panel + 4 * i,
                out + r * P + 4 * i);
}

template <int R>
__attribute__((target("arch=armv8.2-a+dotprod"))) void quad_tile(const ByteRows& a, int64_t first,
                                                                 int64_t depth, const float* panel,
                                                                 float* out) {
  constexpr int64_t P = kBytePanel;
  int32x4_t sums[R][2] = {};
  const auto* weights = reinterpret_cast<const int8_t*>(panel + 2 * P);
  for (int64_t k = 0; k < quads(depth); ++k, weights += 4 * P) {
    const int8x16_t w[2] = {vld1q_s8(weights), vld1q_s8(weights + 16)};
    for (int r = 0; r < R; ++r) {
      uint32_t four;
      __builtin_memcpy(&four, a.data + (first + r) * a.stride + 4 * k, 4);
      const int8x16_t x = vreinterpretq_s8_u32(vdupq_n_u32(four ^ 0x80808080u));
      for (int i = 0; i < 2; ++i) sums[r][i] = vdotq_s32(sums[r][i], w[i], x);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i)
      add_bytes(sums[r][i], a.scales[first + r], panel + 4 * i, out + r * P + 4 * i);
}
#endif

// Compute out[r] += a[first + r] . panel.
void multiply_bytes(const ByteRows& a, int64_t first, int64_t rows, int64_t depth, const float* panel,
                    float* out) {
  int64_t r = 0;
  const auto run = [&](auto tile, int64_t n) {
    for (; r + n <= rows; r += n) tile(a, first + r, depth, panel, out + r * kBytePanel);
  };
#if defined(__AVX512F__)
  static const bool has_quads = __builtin_cpu_supports("avx512vnni");
  if (has_quads)
    return run(quad_tile<8>, 8), run(quad_tile<5>, 5), run(quad_tile<3>, 3), run(quad_tile<1>, 1);
#endif
#if defined(__AVX2__)
  return run(pair_tile<4>, 4), run(pair_tile<1>, 1);
#elif defined(__aarch64__)
  static const bool has_quads = has_dot_products();
  if (has_quads) return run(quad_tile<8>, 8), run(quad_tile<3>, 3), run(quad_tile<1>, 1);
  return run(pair_tile<4>, 4), run(pair_tile<1>, 1);
#endif
  run(byte_tile<1>, 1);
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
