// What ops on the GPU share: numbers, tiles, and the scores of a tile of queries and a block of keys.
//
// The additive score is the factored one: with Eq = e^{2q} and Ek = e^{2k} taken once per staged
// element, tanh(q + k) = 1 - 2 / (1 + Eq Ek), and two features share a reciprocal:
//   w0/d0 + w1/d1 = (w0 d1 + w1 d0) / (d0 d1).
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

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr unsigned kAll = 0xffffffff;  // lanes
constexpr int kMostBlocks = 8;           // of a cluster
// While both sides stay within this, d0 d1 <= (1 + e^{4 * 10.9})^2 < 2^126. Beyond, a staged tile
// takes the direct path, tanh(q + k); so it does where the weights would magnify the 3 ulp that the
// factored path loses.
constexpr float kFactoredLimit = 10.9f;

enum class Score { dot, additive, relu };

// ---- numbers ----------------------------------------------------------------------------------

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

// 1 / x for 1 <= x <= 2^126: one special function, with -ftz=true.
__device__ inline float reciprocal(float x) { return __fdividef(1.f, x); }

// r = 1 / (1 + e^{2x}), so that tanh x = 1 - 2r and its derivative is 4r(1 - r).
__device__ inline float logistic(float x) { return 1 / (1 + expf(2 * x)); }
__device__ inline double logistic(double x) { return 0.5 * (1 - tanh(x)); }

struct Add {
  static constexpr float none = 0;  // changes nothing
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

// The numbers of a warp's threads joined, always in the same order; all take part.
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

// Which rows of which [B, H] this block takes; blockIdx.x counts tiles within B * H.
struct Tile {
  int64_t b, h, part, row;
};

inline int64_t tiles(int64_t rows, int64_t height) { return (rows + height - 1) / height; }

__device__ inline Tile locate(const Attention& a, int64_t rows, int height) {
  const int64_t parts = (rows + height - 1) / height, bh = blockIdx.x / parts;
  const int64_t part = blockIdx.x % parts;
  return {bh / a.H, bh % a.H, part, part * height};
}

__device__ inline int64_t keys_seen(const Attention& a, int64_t b) {
  return a.lengths ? max(int64_t{0}, min(a.lengths[b], a.Tk)) : a.Tk;
}

template <class T>
__device__ T* at(const View& v, const Tile& tile, int64_t row) {
  return static_cast<T*>(v.data) + tile.b * v.batch + tile.h * v.head + row * v.row;
}

// The keys that a query row may see, of the n of its sequence.
__device__ inline Seen seen_by(const Attention& a, const Tile& tile, int64_t row, int64_t n) {
  if (!a.span.data) return {0, n, 0};
  return seen_within(a, at<int64_t>(a.span, tile, row), n);
}

// The keys that any of up to 32 rows of a tile sees; every lane of a warp takes part.
__device__ inline Seen seen_by_all(const Attention& a, const Tile& tile, int64_t rows, int64_t n) {
  if (!a.span.data) return {0, n, 0};
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
  int64_t stride, count;
};

// Rows warp, warp + kWarps, ... of a tile at feature c, zeros past the end.
template <class T, class C, int N>
__device__ void load(const Rows<T>& x, int64_t c, int64_t width, C (&out)[N]) {
  const int64_t count = c < width ? x.count : 0;
  int64_t row = threadIdx.x / 32;
  const T* from = x.data + row * x.stride + c;
  for (int n = 0; n < N; ++n, row += kWarps, from += kWarps * x.stride)
    out[n] = row < count ? widen(*from) : 0;
}

// Whether the factored path cannot hold these. Passes over NaN: one in a key that is not seen must
// not choose the path.
template <class C, int N>
__device__ bool beyond(const C (&x)[N]) {
  bool far = false;
  for (int n = 0; n < N; ++n) far |= fabs(x[n]) > kFactoredLimit;
  return far;
}

// ---- scores -----------------------------------------------------------------------------------

// A product becomes the score of row i in a column: scale, bias, mask; -inf where it is hidden, also
// where it is NaN.
template <class T, class C>
__device__ C finish_score(const Attention& a, const Tile& tile, int64_t i, int64_t column, C s) {
  s *= C(a.scale);
  if (a.bias.data) {
    const C bias = widen(at<T>(a.bias, tile, i)[column * a.bias.column]);
    s = bias == -INFINITY ? C(-INFINITY) : s + bias;
  }
  const bool seen = !a.mask.data || at<uint8_t>(a.mask, tile, i)[column * a.mask.column];
  return seen ? s : C(-INFINITY);
}

// The scores of row i, in their place, become weights: one thread's share of the work, and log sum exp.
// `total` is the sum of e^{score - top}.
template <class C>
__device__ void finish_row(const Attention& a, const Tile& tile, int64_t i, const Seen& own, C top,
                           C total, int thread, int threads) {
  if (thread == 0)
    *at<C>(a.log_sum_exp, tile, i) = total == 0 ? C(-INFINITY) : top + log(total);
  if (!a.weights.data) return;
  C* weights = at<C>(a.weights, tile, i);
  const C share = total == 0 ? 0 : 1 / total;
  for (int64_t c = thread; c < a.W; c += threads) {
    const bool exists = own.from <= c + own.origin && c + own.origin < own.to;
    const C p = exists && total != 0 ? exp(weights[c] - top) : 0;
    weights[c] = p == 0 ? 0 : p * share;
  }
}

constexpr int kRows = 4;                  // query rows of a warp
constexpr int kQueries = kWarps * kRows;  // of a block
constexpr int kKeys = 64;                 // at a time, two for each lane
constexpr int kFeatures = 32;             // staged at a time
constexpr int kPitch = kFeatures + 4;     // lanes that read 16 bytes of their rows meet all banks

// and NaN as it is
template <class C>
__device__ C rectified(C z) {
  return z < 0 ? C(0) : z;
}

template <class C>
struct Staged {
  alignas(16) C q[kQueries][kPitch], k[kKeys][kPitch], w[kFeatures];
  C total;  // of w
};

// s[r][x] += sum over the staged features of q k (dot) or of w f(q + k), for query row r of this
// warp and key lane + 32 x. `lost` is what s has rounded away (Kahan), for a long sum in order would
// lose more than the eager code's.
template <Score S, bool direct, class C>
__device__ void score_features(const Staged<C>& staged, C (&s)[kRows][2], C (&lost)[kRows][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  using Wide = std::conditional_t<S == Score::additive && direct, double, C>;  // rare, so exact
  Wide sum[kRows][2] = {};
#pragma unroll(direct ? 1 : 2)  // two pairs are 16 bytes of a row
  for (int c = 0; c < kFeatures; c += 2) {
    const C w0 = staged.w[c], w1 = staged.w[c + 1];
    for (int x = 0; x < 2; ++x) {
      const C *k = &staged.k[lane + 32 * x][c], k0 = k[0], k1 = k[1];
      for (int r = 0; r < kRows; ++r) {
        const C *q = &staged.q[warp * kRows + r][c], q0 = q[0], q1 = q[1];
        if constexpr (S == Score::dot) {
          const C first = q0 * k0;
          sum[r][x] += first + q1 * k1;
        } else if constexpr (S == Score::relu) {
          sum[r][x] += w0 * rectified(q0 + k0);
          sum[r][x] += w1 * rectified(q1 + k1);
        } else if constexpr (direct) {
          sum[r][x] += Wide(w0) * tanh(q0 + k0);
          sum[r][x] += Wide(w1) * tanh(q1 + k1);
        } else {
          const C d0 = q0 * k0 + 1, d1 = q1 * k1 + 1;
          sum[r][x] += (w0 * d1 + w1 * d0) * reciprocal(d0 * d1);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int x = 0; x < 2; ++x) {
      const C part = direct ? C(sum[r][x]) : staged.total - 2 * C(sum[r][x]);
      const C more = part - lost[r][x], total = s[r][x] + more;
      lost[r][x] = (total - s[r][x]) - more;
      s[r][x] = total;
    }
}

// The same over all features; every thread of the block takes part.
template <Score S, class T, class C>
__device__ void score_tile(const Rows<T>& q, const Rows<T>& k, const T* w, int64_t width,
                           Staged<C>& staged, C (&s)[kRows][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  C lost[kRows][2] = {};
  for (int r = 0; r < kRows; ++r) s[r][0] = s[r][1] = 0;
  for (int64_t c = lane; c - lane < width; c += kFeatures) {
    C part_q[kQueries / kWarps], part_k[kKeys / kWarps];
    load(q, c, width, part_q);
    load(k, c, width, part_k);
    C part_w[1] = {S != Score::dot && c < width ? widen(w[c]) : C(0)};
    bool direct = true;
    if constexpr (S == Score::additive && sizeof(C) == 4) {
      direct = __syncthreads_or(beyond(part_q) || beyond(part_k) || beyond(part_w));
      if (!direct) {
        for (C& x : part_q) x = expf(2 * x);
        for (C& x : part_k) x = expf(2 * x);
      }
    } else {
      __syncthreads();  // the features staged before are used up
    }
    for (int n = 0; n < kQueries / kWarps; ++n) staged.q[warp + n * kWarps][lane] = part_q[n];
    for (int n = 0; n < kKeys / kWarps; ++n) staged.k[warp + n * kWarps][lane] = part_k[n];
    if (S != Score::dot && warp == 0) {
      staged.w[lane] = part_w[0];
      const C total = of_warp<Add>(part_w[0]);
      if (lane == 0) staged.total = total;
    }
    __syncthreads();
    if (warp * kRows >= q.count) continue;  // a warp without rows only helps to stage
    if constexpr (S == Score::additive && sizeof(C) == 4) {
      if (!direct) {
        score_features<S, false>(staged, s, lost);
        continue;
      }
    }
    score_features<S, true>(staged, s, lost);
  }
}

}  // namespace
}  // namespace attnfast
