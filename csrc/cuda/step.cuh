// The forward of a decoder's step, the only row of a sequence, whose cost is all latency: its keys are
// shared by blocks.
#pragma once
#include "tile.cuh"

namespace attnfast {
namespace {

constexpr int kStepKeys = 64;  // of a block; longer rows are shared by several
constexpr int kAtOnce = 4;     // keys of a warp, whose loads are under way together

// Two features of a score. Every pair of a query and a key meets once, so nothing is factored:
// e^{2(q + k)} is taken as it is, of what tanh does not tell from 1 no more than its limit.
template <Score S, class C>
__device__ C pair_score(C q0, C q1, C k0, C k1, C w0, C w1) {
  if constexpr (S == Score::dot) {
    return q0 * k0 + q1 * k1;
  } else if constexpr (S == Score::relu) {
    return w0 * rectified(q0 + k0) + w1 * rectified(q1 + k1);
  } else if constexpr (sizeof(C) == 8) {
    return w0 * tanh(q0 + k0) + w1 * tanh(q1 + k1);
  } else {
    constexpr float limit = 2 * kFactoredLimit;  // d0 d1 < 2^126
    float x0 = q0 + k0, x1 = q1 + k1;
    x0 = x0 > limit ? limit : x0 < -limit ? -limit : x0;  // NaN stays
    x1 = x1 > limit ? limit : x1 < -limit ? -limit : x1;
    const float d0 = 1 + expf(2 * x0), d1 = 1 + expf(2 * x1);
    return (w0 + w1) - 2 * ((w0 * d1 + w1 * d0) * reciprocal(d0 * d1));
  }
}

template <class T, Score S>
__global__ void __launch_bounds__(kThreads) step(const Attention a) {
  using C = typename Accumulate<T>::type;
  __shared__ C share[kStepKeys];  // scores, then e^{score - top}
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile tile = locate(a, 1, 1);
  const Seen own = seen_by(a, tile, 0, keys_seen(a, tile.b));
  const int64_t j0 = own.from + blockIdx.y * int64_t{kStepKeys};
  const int keys = max(int64_t{0}, min(own.to - j0, int64_t{kStepKeys}));
  const T* q = at<T>(a.query, tile, 0);
  const T* w = S == Score::dot ? nullptr : at<T>(a.weight, tile, 0);

  for (int first = warp * kAtOnce; first < keys; first += kWarps * kAtOnce) {
    C s[kAtOnce] = {};
    const T* k[kAtOnce];
    for (int x = 0; x < kAtOnce; ++x) k[x] = at<T>(a.key, tile, j0 + min(first + x, keys - 1));
#pragma unroll 1
    for (int64_t c = 2 * lane; c < a.A; c += 64) {
      const bool two = c + 1 < a.A;
      const C q0 = widen(q[c]), q1 = two ? widen(q[c + 1]) : 0;
      const C w0 = w ? widen(w[c]) : 0, w1 = w && two ? widen(w[c + 1]) : 0;
      for (int x = 0; x < kAtOnce; ++x)
        s[x] += pair_score<S>(q0, q1, widen(k[x][c]), two ? widen(k[x][c + 1]) : C(0), w0, w1);
    }
    for (int x = 0; x < kAtOnce; ++x) {
      s[x] = of_warp<Add>(s[x]);
      if (lane != x || first + x >= keys) continue;
      const int64_t column = j0 + first + x - own.origin;
      share[first + x] = finish_score<T>(a, tile, 0, column, s[x]);
      if (a.weights.data) at<C>(a.weights, tile, 0)[column] = share[first + x];
    }
  }
  __syncthreads();
  C mine[2];
  for (int x = 0; x < 2; ++x) mine[x] = lane + 32 * x < keys ? share[lane + 32 * x] : -INFINITY;
  const C top = of_warp<Max>(fmax(mine[0], mine[1])), shift = top == -INFINITY ? 0 : top;
  for (C& x : mine) x = exp(x - shift);
  const C mass = of_warp<Add>(mine[0] + mine[1]);
  __syncthreads();  // every warp has read the scores
  if (warp < 2 && lane + 32 * warp < keys) share[lane + 32 * warp] = mine[warp];
  __syncthreads();

  C* part = nullptr;
  C factor = 1;
  if (a.parts.data) {
    part = at<C>(a.parts, tile, blockIdx.y);
    if (threadIdx.x == 0) part[a.Dv] = shift, part[a.Dv + 1] = mass;
  } else {
    factor = mass == 0 ? C(0) : 1 / mass;
  }
  for (int64_t c = threadIdx.x; c < a.Dv; c += kThreads) {
    const T* value = at<T>(a.value, tile, j0) + c;
    C sum = 0;
#pragma unroll 4
    for (int j = 0; j < keys; ++j, value += a.value.row)
      if (share[j] != 0) sum += share[j] * widen(*value);
    if (part)
      part[c] = sum;
    else
      narrow(sum * factor, at<T>(a.context, tile, 0)[c]);
  }
  if (!part) finish_row(a, tile, 0, own, shift, mass, threadIdx.x, kThreads);
}

// What the parts of a row add up to.
template <class T>
__global__ void __launch_bounds__(kThreads) combine(const Attention a, int64_t parts) {
  using C = typename Accumulate<T>::type;
  const Tile tile = locate(a, 1, 1);
  const C* part = at<C>(a.parts, tile, 0);
  C top = -INFINITY, total = 0;
  for (int64_t i = 0; i < parts; ++i)  // a part without keys has mass 0
    if (part[i * a.parts.row + a.Dv + 1] != 0) top = fmax(top, part[i * a.parts.row + a.Dv]);
  if (top == -INFINITY) top = 0;
  const auto fade = [&](int64_t i) {
    const C mass = part[i * a.parts.row + a.Dv + 1];
    return mass == 0 ? C(0) : exp(part[i * a.parts.row + a.Dv] - top);
  };
  for (int64_t i = 0; i < parts; ++i) total += part[i * a.parts.row + a.Dv + 1] * fade(i);
  for (int64_t c = threadIdx.x; c < a.Dv; c += kThreads) {
    C sum = 0;
    for (int64_t i = 0; i < parts; ++i) sum += part[i * a.parts.row + c] * fade(i);
    narrow(total == 0 ? C(0) : sum / total, at<T>(a.context, tile, 0)[c]);
  }
  const Seen own = seen_by(a, tile, 0, keys_seen(a, tile.b));
  finish_row(a, tile, 0, own, top, total, threadIdx.x, kThreads);
}

inline int64_t key_parts(const Attention& a) {
  return a.Tq == 1 ? max(tiles(min(a.W, a.Tk), kStepKeys), int64_t{1}) : 1;
}

template <class T, class Launch>
void launch_step(const Attention& a, const Launch& launch) {
  const int64_t parts = key_parts(a);
  const auto kernel = !a.weight.data ? step<T, Score::dot>
                      : a.relu       ? step<T, Score::relu>
                                     : step<T, Score::additive>;
  launch(kernel, a.B * a.H, parts, a);
  if (parts > 1) launch(combine<T>, a.B * a.H, 1, a, parts);
}

}  // namespace
}  // namespace attnfast
