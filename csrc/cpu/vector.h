// Vectors of floats or doubles, exp and reciprocal, for the instruction set that VARIANT names.
//
// Every unit that includes this file is compiled once per instruction set, so it may include no
// header with ordinary inline functions (the linker would keep one copy for all), and all its
// definitions lie in a namespace of the variant.
#pragma once
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace attnfast {
namespace VARIANT {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;  // GCC compares wider vectors lane by lane
#else
constexpr int kVectorBytes = 32;  // without AVX2 two registers: more lanes, finer partial sums
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

template <class C>
struct Vector {
  typedef C type __attribute__((vector_size(kVectorBytes)));
  static constexpr int width = kVectorBytes / sizeof(C);
};
template <class C>
using Vec = typename Vector<C>::type;
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
template <class C>
using Flags = decltype(Vec<C>{} == Vec<C>{});  // of a comparison: all bits of a lane set, or none

template <class C>
static inline Vec<C> load(const C* p) {
  Vec<C> x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

template <class C>
static inline void store(C* p, Vec<C> x) {
  __builtin_memcpy(p, &x, sizeof x);
}

template <class C>
static inline void add(C* p, Vec<C> x) {
  store(p, load(p) + x);
}

template <class C>
static inline Vec<C> splat(C x) {
  return Vec<C>{} + x;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Return a mask of the first n of 8 lanes.
static inline __m256i lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// Load the first n elements at p and set the other lanes to `fill`.
template <class C>
static inline Vec<C> load_part(const C* p, int64_t n, C fill) {
  if (n >= Vector<C>::width) return load(p);
  Vec<C> x = splat(fill);
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == 4)
    return (Vec<C>)_mm512_mask_loadu_ps((__m512)x, (__mmask16)((1u << n) - 1), p);
#elif defined(__AVX2__)
  if constexpr (sizeof(C) == 4) {
    const __m256i mask = lanes(n);
    return (Vec<C>)_mm256_blendv_ps((__m256)x, _mm256_maskload_ps(p, mask), (__m256)mask);
  }
#endif
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return x;
}

// Store the first n elements of x, at most a vector.
template <class C>
static inline void store_part(C* p, Vec<C> x, int64_t n) {
  if (n >= Vector<C>::width) return store(p, x);
  if (n <= 0) return;
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == 4) return _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(C) == 4) return _mm256_maskstore_ps(p, lanes(n), (__m256)x);
#endif
  for (int64_t i = 0; i < n; ++i) p[i] = x[i];
}

// Return 0, 1, 2, ...
template <class C>
static inline Flags<C> lane_numbers() {
  Flags<C> lane;
  for (int i = 0; i < Vector<C>::width; ++i) lane[i] = i;
  return lane;
}

// Return a mask of the lanes j with from <= first + j < to.
template <class C>
static inline Flags<C> lanes_within(int64_t first, int64_t from, int64_t to) {
  using I = decltype(Flags<C>{}[0] + 0);
  const Flags<C> lane = lane_numbers<C>();
  return (lane >= (I)(from - first)) & (lane < (I)(to - first));
}

template <class C>
static inline C sum(Vec<C> x) {
#if defined(__aarch64__)
  if constexpr (sizeof(C) == 4) return vaddvq_f32((float32x4_t)x);
#endif
  C s[Vector<C>::width];
  __builtin_memcpy(s, &x, sizeof x);
  for (int n = Vector<C>::width / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) s[i] += s[i + n];
  return s[0];
}

// Return the largest element; x must not contain NaN.
template <class C>
static inline C highest(Vec<C> x) {
#if defined(__aarch64__)
  if constexpr (sizeof(C) == 4) return vmaxvq_f32((float32x4_t)x);
#endif
  C s[Vector<C>::width];
  __builtin_memcpy(s, &x, sizeof x);
  for (int n = Vector<C>::width / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) s[i] = s[i] > s[i + n] ? s[i] : s[i + n];
  return s[0];
}

// Set out[i] to the sum of x[i].
template <class C>
static inline void sums(const Vec<C> (&x)[4], C* out) {
  for (int i = 0; i < 4; ++i) out[i] = sum<C>(x[i]);
}

#if defined(__AVX2__)
// Return the sums of pairs, in lanes of 128 bits: a0 + a1, a2 + a3, b0 + b1, b2 + b3.
static inline Vec<float> pairs(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88) +
         (Vec<float>)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd);
#else
  return (Vec<float>)_mm256_hadd_ps((__m256)a, (__m256)b);
#endif
}

// Transpose eight rows of eight floats.
static inline void transpose8(const float* in, int64_t stride, float* out, int64_t out_stride) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(in + i * stride);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0x44);
      a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * out_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

template <>
inline void sums(const Vec<float> (&x)[4], float* out) {
  const Vec<float> four = pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));
#if defined(__AVX512F__)
  const __m256 half =
      _mm256_add_ps(_mm512_castps512_ps256((__m512)four), _mm512_extractf32x8_ps((__m512)four, 1));
#else
  const __m256 half = (__m256)four;
#endif
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#elif defined(__aarch64__)
template <>
inline void sums(const Vec<float> (&x)[4], float* out) {
  const auto pairs = [](auto a, auto b) { return vpaddq_f32((float32x4_t)a, (float32x4_t)b); };
  vst1q_f32(out, pairs(pairs(x[0], x[1]), pairs(x[2], x[3])));
}
#endif

template <class C>
static inline bool any(Flags<C> x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)x) != 0;
#else
  bool found = false;
  for (int i = 0; i < Vector<C>::width; ++i) found |= x[i] != 0;
  return found;
#endif
}

template <class C>
static inline bool has_nan(Vec<C> x) {
  return any<C>(x != x);
}

// Clamp x to a limit from above or below; NaN stays.
static inline Vec<float> at_most(Vec<float> x, float limit) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_min_ps((__m512)splat(limit), (__m512)x);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_min_ps((__m256)splat(limit), (__m256)x);
#elif defined(__aarch64__)
  return (Vec<float>)vminq_f32((float32x4_t)x, vdupq_n_f32(limit));
#else
  return x > limit ? splat(limit) : x;
#endif
}
static inline Vec<float> at_least(Vec<float> x, float limit) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_max_ps((__m512)splat(limit), (__m512)x);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_max_ps((__m256)splat(limit), (__m256)x);
#elif defined(__aarch64__)
  return (Vec<float>)vmaxq_f32((float32x4_t)x, vdupq_n_f32(limit));
#else
  return x < limit ? splat(limit) : x;
#endif
}

// Return exp(x), within 2 ulp; x is clamped to ±87. Cephes' polynomial on [-ln 2 / 2, ln 2 / 2].
static inline Vec<float> exp(Vec<float> x) {
  x = at_least(at_most(x, 87.f), -87.f);
  const Vec<float> shifted = x * 1.44269504088896341f + 12582912.f;  // the integer in the low bits
  const Vec<float> n = shifted - 12582912.f;
  const Vec<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  Ints power;
  __builtin_memcpy(&power, &shifted, sizeof power);
  power = (power + 127) << 23;
  Vec<float> scale;
  __builtin_memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

static inline Vec<double> exp(Vec<double> x) {
  for (int i = 0; i < Vector<double>::width; ++i) x[i] = __builtin_exp(x[i]);
  return x;
}

template <class C>
static inline Vec<C> square_root(Vec<C> x) {
  for (int i = 0; i < Vector<C>::width; ++i)
    x[i] = sizeof(C) == 4 ? __builtin_sqrtf(x[i]) : __builtin_sqrt(x[i]);
  return x;
}

// Return 1 / x within 1 ulp, for 1 <= x < 2^126. (With 8 lanes the division unit keeps up.)
static inline Vec<float> reciprocal(Vec<float> x) {
#if defined(__AVX512F__)
  const Vec<float> r = (Vec<float>)_mm512_rcp14_ps((__m512)x);
  return r * (1.f - x * r) + r;
#else
  return 1.f / x;
#endif
}

// Compute s = -tanh(z) / 2 for several vectors. tanh z = z P(z^2) / Q(z^2) has a relative error
// below 2e-8 up to |z| = 9, fitted by reweighted least squares; beyond, it is 1 to the last bit.
// Four vectors take each step together: one after the other, the processor would not look far
// enough ahead to overlap them.
template <int N>
static inline void half_tanh(const Vec<float> (&z)[N], Vec<float> (&s)[N]) {
  constexpr int n = N < 4 ? N : 4;
  constexpr float P[] = {1.335340185e-8f, 2.060817470e-5f, 3.495533821e-3f, 1.338098051e-1f,
                         9.999999796e-1f};
  constexpr float Q[] = {7.776041999e-7f, 3.285545229e-4f, 2.587677724e-2f, 4.671429616e-1f, 1.f};
  for (int from = 0; from < N; from += n) {
    Vec<float> x[n], u[n], p[n], q[n];
    for (int i = 0; i < n; ++i) x[i] = at_least(at_most(z[from + i], 9.f), -9.f);
    for (int i = 0; i < n; ++i) u[i] = x[i] * x[i];
    for (int i = 0; i < n; ++i) q[i] = u[i] * Q[0] + Q[1];
    for (int i = 0; i < n; ++i) p[i] = u[i] * (-0.5f * P[0]) + -0.5f * P[1];
#pragma GCC unroll 3
    for (int k = 2; k < 5; ++k) {
      for (int i = 0; i < n; ++i) q[i] = q[i] * u[i] + Q[k];
      for (int i = 0; i < n; ++i) p[i] = p[i] * u[i] + -0.5f * P[k];
    }
    for (int i = 0; i < n; ++i) s[from + i] = p[i] * x[i] * reciprocal(q[i]);
  }
}
template <int N>
static inline void half_tanh(const Vec<double> (&z)[N], Vec<double> (&s)[N]) {
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < Vector<double>::width; ++j) s[i][j] = -0.5 * __builtin_tanh(z[i][j]);
}

// The element types of tensors.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

static inline float as_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t as_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

static inline float widen(float x) { return x; }
static inline double widen(double x) { return x; }
static inline float widen(BFloat x) { return as_float((uint32_t)x.bits << 16); }
static inline float widen(Half x) {
  const uint32_t magnitude = (uint32_t)(x.bits & 0x7fff) << 13;
  // 2^112 moves the exponent's bias from 15 to 127 and makes subnormal numbers normal.
  float y = as_float(magnitude) * as_float((254u - 15) << 23);
  y = magnitude >= 0x0f800000u ? as_float(magnitude | 0x7f800000u) : y;  // infinity and NaN
  return as_float(as_bits(y) | (uint32_t)(x.bits & 0x8000) << 16);
}

// Round to nearest even.
static inline void narrow(float x, float& out) { out = x; }
static inline void narrow(double x, double& out) { out = x; }
static inline void narrow(float x, BFloat& out) {
  const uint32_t bits = as_bits(x);
  out.bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline void narrow(float x, Half& out) {
  const uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude >= 0x7f800000u) {
    half = 0x7c00 | (magnitude > 0x7f800000u ? 0x200 : 0);
  } else if (magnitude >= 0x477ff000u) {  // rounds past 65504
    half = 0x7c00;
  } else if (magnitude < 0x38800000u) {  // subnormal: let the adder round
    half = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  out.bits = (uint16_t)(half | (bits >> 16 & 0x8000));
}

// A table's function that selects the instance of a template by the dtype of its call.
#define ATTNFAST_BY_DTYPE(function)                          \
  [](const auto& a, auto... more) {                          \
    switch (a.dtype) {                                       \
      case Dtype::f32: return function<float>(a, more...);   \
      case Dtype::f64: return function<double>(a, more...);  \
      case Dtype::f16: return function<Half>(a, more...);    \
      case Dtype::bf16: return function<BFloat>(a, more...); \
    }                                                        \
  }

template <class T>
struct Accumulate {
  typedef float type;
};
template <>
struct Accumulate<double> {
  typedef double type;
};

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

}  // namespace VARIANT
}  // namespace attnfast
