// Code common to ops on the GPU: arithmetic, and the rows and keys of a block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdint.h>

#include <type_traits>

#include "../attention.h"
#include "../span.h"

namespace attnfast {
namespace {

// The shared memory whose size the launch chooses; the tests' stand-in for CUDA's headers has its own.
#ifndef ATTNFAST_DYNAMIC_SHARED
#define ATTNFAST_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr unsigned kAll = 0xffffffff;  // lanes
constexpr int kMostBlocks = 8;         // of a cluster
constexpr int kMostOnY = 65535;        // blocks of a grid
// Bound of each |q| and |k| whose e^{2x} are multiplied; of weights, too, because they magnify the 3
// ulp that the factored path loses.
constexpr float kFactoredEachLimit = kFactoredSumLimit / 2;
// Bound of |q| + |k|: up to it, tanh is so small that its error must be relative, and small_tanh is
// valid.
constexpr float kSmallTanhLimit = 0.8f;

// ---- arithmetic -------------------------------------------------------------------------------

template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void narrow(float x, float& out) { out = x; }
__device__ inline void narrow(double x, double& out) { out = x; }
__device__ inline void narrow(float x, __half& out) { out = __float2half_rn(x); }
__device__ inline void narrow(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

// Return 1 / x for 1 <= x <= 2^126: one special function, with -ftz=true.
__device__ inline float reciprocal(float x) { return __fdividef(1.f, x); }

// Return tanh x up to kSmallTanhLimit, with a relative error of 4e-9 before rounding:
// x + x^3 P(x^2), fitted by least squares at Chebyshev's nodes, reweighted towards the largest
// error.
template <class C>
__device__ C small_tanh(C x) {
  const C u = x * x;
  const C p = (C(0.0015847615) * u - C(0.0074095660)) * u + C(0.0213029957);
  return x + x * u * (((p * u - C(0.0538523323)) * u + C(0.1333222102)) * u - C(0.3333329736));
}

// Add the product of matrices a [16, 8] and b [8, 8] to d, on tensor cores, which read significands of
// 11 bits (tf32). The lanes of a warp hold the elements as PTX defines it for mma.m16n8k8.
__device__ inline void multiply_add(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
#if !defined(__CUDACC__)
  multiply_add_on_host(d, a, b);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // see blocks_at_once
  const auto bits = [](float x) { return __float_as_uint(x); };
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(bits(a[0])), "r"(bits(a[1])), "r"(bits(a[2])), "r"(bits(a[3])), "r"(bits(b[0])),
        "r"(bits(b[1])));
#endif
}

// Begin to copy n adjacent floats, aligned to 4 n bytes, to shared memory. commit_copies ends a group of
// a thread's copies; wait_for_copies waits for all groups but the last n.
template <int n>
__device__ inline void begin_copy(float* to, const float* from) {
  static_assert(n == 1 || n == 2 || n == 4);
#if !defined(__CUDACC__)
  begin_copy_on_host(to, from, n);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const unsigned place = __cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(4 * n) : "memory");
#else
  for (int i = 0; i < n; ++i) to[i] = from[i];
#endif
}
__device__ inline void commit_copies() {
#if !defined(__CUDACC__)
  commit_copies_on_host();
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int n>
__device__ inline void wait_for_copies() {
#if !defined(__CUDACC__)
  wait_for_copies_on_host(n);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
}

struct Add {
  static constexpr float none = 0;  // the neutral element
  template <class C>
  __device__ C operator()(C x, C y) const {
    return x + y;
  }
};
struct Max {
  static constexpr float none = -INFINITY;
  template <class C>
  __device__ C operator()(C x, C y) const {
    return fmax(x, y);
  }
};

// Reduce the values of a warp's threads, always in the same order; all threads take part.
template <class Join, class C>
__device__ C of_warp(C x) {
  for (int step = 16; step > 0; step /= 2) x = Join()(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

// Call f with a zero of the dtype's element type.
template <class F>
void by_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f32: return f(float{});
    case Dtype::f64: return f(double{});
    case Dtype::f16: return f(__half{});
    case Dtype::bf16: return f(__nv_bfloat16{});
  }
}

// ---- where ------------------------------------------------------------------------------------

// The rows of a [B, H] that this block takes; blockIdx.x counts tiles within B * H.
struct Tile {
  int b, h, part;
  int64_t row;
};

inline int64_t tiles(int64_t rows, int64_t height) { return (rows + height - 1) / height; }
// Return the rows of a tile, at most those that remain; less than 0 beyond the end.
__device__ inline int up_to(int most, int64_t left) { return left < most ? left : most; }

__device__ inline Tile locate(const Problem& a, int64_t rows, int height, int block = blockIdx.x) {
  const int parts = (rows + height - 1) / height, bh = block / parts, part = block % parts;
  const int H = a.H;
  return {bh / H, bh % H, part, int64_t{part} * height};
}

__device__ inline int64_t keys_seen(const Problem& a, int64_t b) {
  return a.lengths ? max(int64_t{0}, min(a.lengths[b], a.Tk)) : a.Tk;
}

template <class T>
__device__ T* at(const View& v, const Tile& tile, int64_t row) {
  return static_cast<T*>(v.data) + tile.b * v.batch + tile.h * v.head + row * v.row;
}

// Return the keys that a query row may see, of the n of its sequence.
__device__ inline Seen seen_by(const Problem& a, const Tile& tile, int64_t row, int64_t n) {
  if (!a.key_bounds.data) return {0, n, 0};
  return seen_within(a, at<int64_t>(a.key_bounds, tile, row), n);
}

// Return the keys that any of up to 32 rows of a tile sees; every lane of a warp takes part.
__device__ inline Seen seen_by_all(const Problem& a, const Tile& tile, int64_t rows, int64_t n) {
  if (!a.key_bounds.data) return {0, n, 0};
  const int lane = threadIdx.x % 32;
  Seen all = {n, 0, 0};
  if (lane < rows) {
    const Seen own = seen_by(a, tile, tile.row + lane, n);
    if (own.from < own.to) all = own;
  }
  for (int step = 16; step > 0; step /= 2) {
    all.from = min(all.from, static_cast<int64_t>(__shfl_xor_sync(kAll, (long long)all.from, step)));
    all.to = max(all.to, static_cast<int64_t>(__shfl_xor_sync(kAll, (long long)all.to, step)));
  }
  return all;
}

template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  int count;
};

// Load rows warp, warp + kWarps, ... of a tile at feature c, zeros past the end.
template <class T, class C, int N>
__device__ void load(const Rows<T>& x, int64_t c, int64_t width, C (&out)[N]) {
  const int count = c < width ? x.count : 0;
  int row = threadIdx.x / 32;
  const T* from = x.data + row * x.stride + c;
  for (int n = 0; n < N; ++n, row += kWarps, from += kWarps * x.stride)
    out[n] = row < count ? widen(*from) : 0;
}

// Return true if any value is larger than a path's limit. NaN is ignored: one in a hidden key must
// not select the path.
template <class C, int N>
__device__ bool beyond(const C (&x)[N], float limit) {
  bool far = false;
  for (int n = 0; n < N; ++n) far |= fabs(x[n]) > limit;
  return far;
}

// ---- scores -----------------------------------------------------------------------------------

// The score that replaces a score of -inf that a row sees: a row whose largest score this is has
// diverged, and an empty row has none.
template <class C>
constexpr C kLeast = sizeof(C) == 4 ? C(-__FLT_MAX__) : C(-__DBL_MAX__);
template <class C>
constexpr C kUlp = sizeof(C) == 4 ? C(__FLT_EPSILON__) : C(__DBL_EPSILON__);

// Turn a product into the score of row i in a column: scale, bias, mask. It is -inf if hidden, also
// if it is NaN, and `least` instead of -inf elsewhere.
template <class T, class C>
__device__ C finish_score(const Problem& a, const Tile& tile, int64_t i, int64_t column, C s,
                          C least = -INFINITY) {
  s *= C(a.scale);
  bool seen = !a.mask.data || at<uint8_t>(a.mask, tile, i)[column * a.mask.column];
  if (a.bias.data) {
    const C bias = widen(at<T>(a.bias, tile, i)[column * a.bias.column]);
    seen &= bias != -INFINITY;
    s += bias;
  }
  if (s <= least) s = s == -INFINITY ? least : least * (1 - kUlp<C>);
  return seen ? s : C(-INFINITY);
}

// Return the factor from e^{score - top} to a weight: 0 in an empty row, NaN in one that diverged.
template <class C>
__device__ C share_of(C top, C total) {
  return total == 0 ? C(0) : top == kLeast<C> ? C(NAN) : 1 / total;
}

// The data from which statistics of a row are computed, with p = e^{score - top} over some of its
// keys: sum p (score - top), the key of the largest score, the mean of the keys,
// sum p (key - mean)^2.
template <class C>
struct Described {
  C drop, position, mean, squares;
};

// Return those of a warp's keys `key + 32 x`, whose masses p add up to `mass`; all lanes take part.
template <class C, int N>
__device__ Described<C> describe(const C (&score)[N], const C (&p)[N], C top, C mass, C key) {
  Described<C> row = {0, -INFINITY, 0, 0};
  for (int x = 0; x < N; ++x) {
    if (p[x] > 0) row.drop += p[x] * (score[x] - top);
    if (score[x] == top) row.position = fmax(row.position, -(key + 32 * x));
    row.mean += p[x] * (key + 32 * x);
  }
  row.drop = of_warp<Add>(row.drop);
  row.position = -of_warp<Max>(row.position);
  row.mean = mass == 0 ? C(0) : of_warp<Add>(row.mean) / mass;
  for (int x = 0; x < N; ++x) {
    const C far = key + 32 * x - row.mean;
    row.squares += p[x] * far * far;
  }
  row.squares = of_warp<Add>(row.squares);
  return row;
}

// Merge those of later keys (Chan, Golub and LeVeque's formula, which loses no digits).
template <class C>
__device__ void join(Described<C>& row, C top, C mass, const Described<C>& more, C its_top, C its_mass) {
  if (its_mass == 0) return;
  if (mass == 0) {
    row = more;
    return;
  }
  const C both = fmax(top, its_top), fade = exp(top - both), its_fade = exp(its_top - both);
  const C share = its_mass * its_fade / (mass * fade + its_mass * its_fade), step = more.mean - row.mean;
  // a gap may be infinite if a mass has vanished
  const C gap = fade == 0 ? C(0) : top - both, its_gap = its_fade == 0 ? C(0) : its_top - both;
  row.drop = fade * (row.drop + mass * gap) + its_fade * (more.drop + its_mass * its_gap);
  if (its_top > top) row.position = more.position;
  row.mean += step * share;
  row.squares = fade * row.squares + its_fade * more.squares + step * step * mass * fade * share;
}

template <class C>
__device__ void put_statistics(const Forward& a, const Tile& tile, int64_t i, C top, C mass,
                               const Described<C>& row) {
  C* out = at<C>(a.statistics, tile, i);
  const C share = share_of(top, mass), diverged = 0 * share;  // 0 or NaN
  out[kEntropy] = mass == 0 ? C(0) : log(mass) - row.drop * share;
  out[kLargest] = share;
  out[kPosition] = mass == 0 ? C(0) : row.position + diverged;
  out[kMean] = mass == 0 ? C(0) : row.mean + diverged;
  out[kVariance] = mass == 0 ? C(0) : row.squares * share;
}

// Turn the scores of row i into weights in place, one thread's share of the work, and store log sum
// exp. `total` is the sum of e^{score - top}.
template <class C>
__device__ void finish_row(const Forward& a, const Tile& tile, int64_t i, const Seen& own, C top, C total,
                           int thread, int threads) {
  if (thread == 0)
    *at<C>(a.log_sum_exp, tile, i) = total == 0 || top == kLeast<C> ? C(-INFINITY) : top + log(total);
  if (!a.weights.data) return;
  C* weights = at<C>(a.weights, tile, i);
  const C share = share_of(top, total);
  for (int64_t c = thread; c < a.W; c += threads) {
    const bool exists = own.from <= c + own.origin && c + own.origin < own.to;
    const C s = exists ? weights[c] : C(-INFINITY);
    weights[c] = s == -INFINITY ? 0 : exp(s - top) * share;
  }
}

}  // namespace
}  // namespace attnfast
