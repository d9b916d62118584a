// Stands in for AVX-512 on an x86 processor without it: compiled with -include before the kernels,
// which then take 64-byte vectors; the compiler splits those, the few intrinsics are here. The
// reciprocal errs by as much as the instruction may, 2^-14, up and down.
#pragma once
#include <immintrin.h>
#include <stdint.h>

typedef float Emulated __attribute__((vector_size(64)));
#define __m512 Emulated

static inline Emulated emulated_rcp14(Emulated x) {
  Emulated r;
  for (int i = 0; i < 16; ++i) r[i] = (1 / x[i]) * (i % 2 ? 1 + 0x1p-14f : 1 - 0x1p-14f);
  return r;
}
#define _mm512_rcp14_ps emulated_rcp14

static inline Emulated emulated_shuffle(Emulated a, Emulated b, int control) {
  Emulated r;
  for (int i = 0; i < 16; ++i)
    r[i] = (i & 2 ? b : a)[(i & ~3) + (control >> (i & 3) * 2 & 3)];
  return r;
}
#define _mm512_shuffle_ps emulated_shuffle

static inline Emulated emulated_load(Emulated x, uint16_t mask, const float* p) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) x[i] = p[i];
  return x;
}
#define _mm512_mask_loadu_ps emulated_load
#define __mmask16 uint16_t

static inline void emulated_store(float* p, uint16_t mask, Emulated x) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) p[i] = x[i];
}
#define _mm512_mask_storeu_ps emulated_store

typedef int EmulatedInts __attribute__((vector_size(64)));

static inline __m128i emulated_bytes(__m512i x) {
  uint8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = ((EmulatedInts)x)[i];
  return _mm_loadu_si128((const __m128i*)bytes);
}
#define _mm512_cvtepi32_epi8 emulated_bytes

static inline uint16_t emulated_test(__m512i a, __m512i b) {
  const EmulatedInts both = (EmulatedInts)(a & b);
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (both[i] != 0) << i;
  return mask;
}
#define _mm512_test_epi32_mask emulated_test

// Of two numbers the second, if one is NaN.
static inline Emulated emulated_min(Emulated a, Emulated b) { return a < b ? a : b; }
static inline Emulated emulated_max(Emulated a, Emulated b) { return a > b ? a : b; }
#define _mm512_min_ps emulated_min
#define _mm512_max_ps emulated_max

static inline __m256 emulated_half(Emulated x, int half) {
  __m256 r;
  for (int i = 0; i < 8; ++i) r[i] = x[8 * half + i];
  return r;
}
#define _mm512_castps512_ps256(x) emulated_half(x, 0)
#define _mm512_extractf32x8_ps emulated_half

#define __AVX512F__ 1
