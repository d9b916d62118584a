// Scores of a tile of queries and a block of keys.
//
// The additive score is factored: with Eq = e^{2q} and Ek = e^{2k} computed once per element,
// tanh(q + k) = 1 - 2/d, d = 1 + Eq Ek, and two features share a reciprocal; the query's factor of
// the second is divided by its weight:
//   w0/d0 + w1/d1 = (w0 D + d0) / (d0 D),  D = d1/w1 = 1/w1 + (Eq/w1) Ek.
// Values that this cannot represent are NaN in it, and such sums are recomputed, tanh by tanh. Its
// error is that of values near 1: tiles up to kSmallTanhLimit use a polynomial of q + k.
#pragma once
#include "tile.cuh"

namespace attnfast {
namespace {

// A weight that divides is clamped to at least this, and to 2^-30 of its chunk's largest, so that
// |D| < 2^106. If d0 D is so large that its reciprocal is 0, w0/d0 is below 2^-33.
constexpr float kLeastWeight = 0x1p-42f;

constexpr int kRows = 4;                  // query rows of a warp
constexpr int kQueries = kWarps * kRows;  // of a block
constexpr int kKeys = 32;                 // at a time, one for each lane
constexpr int kFeatures = 16;             // that a warp stages at a time
constexpr int kPitch = kFeatures + 4;     // lanes that read 16 bytes of their rows access all banks
constexpr int kSumPitch = kKeys + 8;      // and lanes that write their sums

// Each warp's features of queries, then of keys, finally its sums; and its weights. With two buffers a
// warp's next features are copied while it adds the current ones.
template <class C, int buffers = 1>
struct Staged {
  alignas(16) C rows[buffers][kWarps][kQueries + kKeys][kPitch], w[buffers][kWarps][kPitch];

  __device__ C& sum(int warp, int row, int key) { return (&rows[0][warp][0][0])[row * kSumPitch + key]; }
  // Return the sum over all warps, after score_tile.
  __device__ C score(int row, int key) {
    C score = 0;
    for (int warp = 0; warp < kWarps; ++warp) score += sum(warp, row, key);
    return score;
  }
};

// Factored inputs of score_tile are copied as they are, into two buffers.
template <Score S, class C>
constexpr bool is_factored = S == Score::tanh && sizeof(C) == 4;
template <Score S, class C>
using StagedScore = Staged<C, is_factored<S, C> ? 2 : 1>;

// Four adjacent elements, loaded at once if they are aligned.
template <class T>
struct alignas(sizeof(T) < 4 ? 8 : 16) Quad {
  T x[4];
};
// Return true if rows are aligned for loads of four elements.
template <class T>
__device__ bool aligned(const Rows<T>& x) {
  return reinterpret_cast<uintptr_t>(x.data) % alignof(Quad<T>) == 0 && x.stride % 4 == 0;
}
// Load four features, zeros past the `count` that remain in a row.
template <class T, class C>
__device__ void load(const T* from, bool aligned, int count, C (&out)[4]) {
  if (aligned && count >= 4) {
    const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(from);
    for (int i = 0; i < 4; ++i) out[i] = widen(quad.x[i]);
  } else {
    for (int i = 0; i < 4; ++i) out[i] = i < count ? widen(from[i]) : 0;
  }
}

// Return the sum of w tanh(q + k) over the features of a warp; see score_tile. Rare, so exact.
template <class T>
__device__ double sum_of_tanh(const T* q, const T* k, const T* w, int64_t width) {
  double sum = 0;
#pragma unroll 1
  for (int64_t first = threadIdx.x / 32 * kFeatures; first < width; first += kWarps * kFeatures)
#pragma unroll 1
    for (int64_t c = first; c < min(first + kFeatures, width); ++c)
      sum += double(widen(w[c])) * tanh(widen(q[c]) + widen(k[c]));
  return sum;
}

// The inputs of the factored score, in chunks of kFeatures: e^{2x} of queries and keys, and -2w;
// for every second feature 1 / -2w, by which the query's e^{2x} is multiplied. Each chunk's sum
// follows the weights. After all of these come x and w themselves, for tiles near 0, and then the
// largest |x| of each row. (Separate views would make the parameters so long that registers spill
// on sm_100.)
struct Factored {
  View query, key, score_vector;
};

// Return the location of the largest |x| of a row, of `count` in a sequence.
__device__ inline float* range_of(const Problem& a, const View& panel, const Tile& tile, int64_t count,
                                  int64_t row) {
  const int64_t before = (int64_t{tile.b} * a.H + tile.h) * count;
  return static_cast<float*>(panel.data) + 2 * a.B * panel.batch + before + row;
}

// Convert four features' weights as above; three other lanes have those of the rest of the chunk,
// and all lanes its sum in `total`.
__device__ inline void divide_by_second(float (&w)[4], float& total) {
  float most = 0;
  for (const float x : w) most = fmax(most, fabs(x));
  for (int step = 1; step < 4; step *= 2) most = fmax(most, __shfl_xor_sync(kAll, most, step));
  const float least = fmax(most / (1 << 30), kLeastWeight);
  total = 0;
  for (int i = 0; i < 4; ++i) {
    if (i % 2 && fabs(w[i]) < least) w[i] = least;
    total += w[i];
    w[i] = most > kFactoredEachLimit ? NAN : i % 2 ? -0.5f / w[i] : -2 * w[i];
  }
  for (int step = 1; step < 4; step *= 2) total += __shfl_xor_sync(kAll, total, step);
}

constexpr int kQuads = 4;  // of a row, loaded together by a lane: 512 features by its warp

// Load kQuads quads of a row, 128 features apart, from feature c on; zeros from `width` on.
template <class T>
__device__ void load_quads(const T* row, bool fours, int64_t c, int64_t width, float (&x)[kQuads][4]) {
  if (fours) {  // no load waits for a branch
#pragma unroll
    for (int u = 0; u < kQuads; ++u) load(row + min(c + 128 * u, width - 4), true, 4, x[u]);
#pragma unroll
    for (int u = 0; u < kQuads; ++u)
      for (float& v : x[u]) v = c + 128 * u < width ? v : 0;
  } else {
#pragma unroll
    for (int u = 0; u < kQuads; ++u) load(row + c + 128 * u, false, width - c - 128 * u, x[u]);
  }
}

// Factor a block's rows of queries, or of keys; a warp takes one.
template <class T, bool keys>
__device__ void factor_rows(const Problem& a, const Factored& out, int block) {
  const View &from = keys ? a.key : a.query, &to = keys ? out.key : out.query;
  const int lane = threadIdx.x % 32;
  Tile tile = locate(a, keys ? a.Tk : a.Tq, kWarps, block);
  tile.row += threadIdx.x / 32;
  if (tile.row >= (keys ? keys_seen(a, tile.b) : a.Tq)) return;
  const int64_t width = out.key.row;
  const T* const row = at<T>(from, tile, tile.row);
  const T* const score_vector = keys ? nullptr : at<T>(a.score_vector, tile, 0);
  const auto fours = [&](const T* x) { return a.A % 4 == 0 && aligned(Rows<T>{x, 0, 1}); };
  // an index of Quads, because the compiler splits a store whose alignment it cannot derive
  auto* const place = reinterpret_cast<Quad<float>*>(at<float>(to, tile, tile.row));
  float most = 0;
#pragma unroll 1
  for (int64_t first = 4 * lane; first < width + 4 * lane; first += 128 * kQuads) {
    float x[kQuads][4], w[kQuads][4];
    load_quads(row, fours(row), first, a.A, x);
    if (!keys) load_quads(score_vector, fours(score_vector), first, a.A, w);
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int64_t c = first + 128 * u;
      if (c - 4 * lane >= width) break;  // warp-uniform
      float total;
      Quad<float> e, near;
      for (int i = 0; i < 4; ++i) near.x[i] = keys ? 0 : w[u][i];
      if (!keys) divide_by_second(w[u], total);
      if (c >= width) continue;
      if (!keys && tile.b == 0 && tile.row == 0) {
        float* const weights = at<float>(out.score_vector, tile, 0);
        float* const of_near = weights + a.H * out.score_vector.head;
        for (int i = 0; i < 4; ++i) weights[c + i] = w[u][i], of_near[c + i] = near.x[i];
        if (lane % 4 == 0) weights[width + c / kFeatures] = total, of_near[width + c / kFeatures] = 0;
      }
      for (int i = 0; i < 4; ++i) {
        near.x[i] = x[u][i];
        most = fmax(most, fabs(x[u][i]));  // ignores NaN
        const float finite = fabs(x[u][i]) <= kFactoredEachLimit ? x[u][i] : NAN;
        e.x[i] = expf(2 * finite);  // a NaN is not skipped: a branch would cost more
        if (!keys && i % 2) e.x[i] *= w[u][i];
      }
      place[c / 4] = e;
      if (most <= kSmallTanhLimit) place[a.B * to.batch / 4 + c / 4] = near;
    }
  }
  most = of_warp<Max>(most);
  if (lane == 0) *range_of(a, to, tile, keys ? a.Tk : a.Tq, tile.row) = most;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 6) factor(const Problem a, const Factored out) {
  const int blocks = a.B * a.H * ((a.Tq + kWarps - 1) / kWarps);
  if (int(blockIdx.x) < blocks) factor_rows<T, false>(a, out, blockIdx.x);
  else factor_rows<T, true>(a, out, blockIdx.x - blocks);
}

template <class T, class Launch>
Factored factored(const Problem& a, const Launch& launch) {
  Factored out = {};
  if constexpr (sizeof(typename Accumulate<T>::type) == 4) {
    if (a.score != Score::tanh) return out;
    const int64_t width = tiles(a.A, kFeatures) * kFeatures;
    const auto rows = [&](int64_t count) {
      const int64_t head = count * width, batch = a.H * head;
      return View{launch.template scratch<float>(a.B * (2 * batch + a.H * count)), batch, head, width};
    };
    const int64_t weights = width + width / kFeatures;
    out = {rows(a.Tq), rows(a.Tk), {launch.template scratch<float>(2 * a.H * weights), 0, weights}};
    launch(factor<T>, a.B * a.H * (tiles(a.Tq, kWarps) + tiles(a.Tk, kWarps)), 1, a, out);
  }
  return out;
}

// Add q k (dot) or w f(q + k) of the staged features, for the tile's queries lane / 8 + 4 r and its
// keys lane % 8 + 8 x.
template <Score S, bool small, class C>
__device__ void score_features(const C (*rows)[kPitch], const C* w, C (&sum)[4][4]) {
  const int lane = threadIdx.x % 32;
  const C(*const queries)[kPitch] = rows + lane / 8, (*const keys)[kPitch] = rows + kQueries + lane % 8;
  constexpr int n = 2;  // with 4 features, too few registers are left for reciprocals to overlap
#pragma unroll 1
  for (int c = 0; c < kFeatures; c += n) {
    C k[4][n];
    for (int x = 0; x < 4; ++x)
      for (int i = 0; i < n; ++i) k[x][i] = keys[8 * x][c + i];
    for (int r = 0; r < 4; ++r) {
      const C* q = &queries[4 * r][c];
      for (int x = 0; x < 4; ++x)
        for (int i = 0; i < n; i += 2) {
          const C q0 = q[i], q1 = q[i + 1], k0 = k[x][i], k1 = k[x][i + 1];
          if constexpr (S == Score::dot) {
            sum[r][x] += q0 * k0;
            sum[r][x] += q1 * k1;
          } else if constexpr (S != Score::tanh) {
            sum[r][x] += w[c + i] * activation<S, C>(q0 + k0);
            sum[r][x] += w[c + i + 1] * activation<S, C>(q1 + k1);
          } else if constexpr (small) {
            sum[r][x] += w[c + i] * small_tanh(q0 + k0);
            sum[r][x] += w[c + i + 1] * small_tanh(q1 + k1);
          } else {
            const C d0 = q0 * k0 + 1, d1 = q1 * k1 + w[c + i + 1];
            sum[r][x] += (w[c + i] * d1 + d0) * reciprocal(d0 * d1);
          }
        }
    }
  }
}

// Replace sums of w tanh(q + k) by again(row, key): those that are NaN, because the factored score
// cannot represent them, or all if nothing is factored; see score_tile.
template <bool factored, class C, class Again>
__device__ void take_again(C (&sum)[4][4], const Again& again) {
  const int lane = threadIdx.x % 32;
  bool missing = !factored;
  for (int r = 0; r < 4; ++r)
    for (int x = 0; x < 4; ++x) missing |= sum[r][x] != sum[r][x];
#pragma unroll 1
  for (int pair = 0; missing && pair < 16; ++pair) {
    C value = NAN;
    for (int r = 0; factored && r < 4; ++r)
      for (int x = 0; x < 4; ++x) value = pair == 4 * r + x ? sum[r][x] : value;
    if (value == value) continue;
    value = again(lane / 8 + pair / 4 * 4, lane % 8 + pair % 4 * 8);
    for (int r = 0; r < 4; ++r)
      for (int x = 0; x < 4; ++x) sum[r][x] = pair == 4 * r + x ? value : sum[r][x];
  }
}

// Set staged.score(row, key) to the sum over all features of q k (dot) or of w f(q + k). Warps
// split the features in chunks; every thread of the block takes part. If the score is tanh, X is
// float and q, k and w are factored, or X is double; `again(row, key)` returns the sum of the
// warp's features, tanh by tanh; `small` is true if they are near 0, and not factored.
template <Score S, class X, class C, class Again>
__device__ void score_tile(const Rows<X>& q, const Rows<X>& k, const X* w, int width,
                           StagedScore<S, C>& staged, const Again& again, bool small = false) {
  constexpr int kSteps = (kQueries + kKeys) / 8;  // each of 8 rows, four lanes to a row
  constexpr bool factored = is_factored<S, C>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4 * 4;
  const bool fours = aligned(q) && aligned(k);
  using Step = std::conditional_t<factored, int, int64_t>;
  Step from[kSteps];  // where rows begin; past the last row, the last again
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    const Rows<X>& side = n < kQueries / 8 ? q : k;
    const int row = lane / 4 + 8 * n - (n < kQueries / 8 ? 0 : kQueries);
    from[n] = min(row, side.count - 1) * Step(side.stride) + quad;
  }
  const auto source = [&](int n, int first) { return (n < kQueries / 8 ? q : k).data + first + from[n]; };
  const auto copy = [&](int first, int turn) {
    if constexpr (factored) {
      if (first < width) {
#pragma unroll
        for (int n = 0; n < kSteps; ++n)
          begin_copy<4>(&staged.rows[turn][warp][lane / 4 + 8 * n][quad], source(n, first));
        if (lane <= kFeatures)  // the chunk's sum, too
          begin_copy<1>(&staged.w[turn][warp][lane],
                        w + (lane < kFeatures ? first + lane : width + first / kFeatures));
      }
      commit_copies();
    }
  };
  constexpr int stride = kWarps * kFeatures;
  C sum[4][4] = {};
  __syncthreads();  // the scores of the previous tile have been read
  int turn = 0;
  copy(warp * kFeatures, 0);
#pragma unroll 1
  for (int first = warp * kFeatures; first < width; first += stride) {
    C(*const rows)[kPitch] = staged.rows[turn][warp], * const weights = staged.w[turn][warp];
    C part[4][4] = {};
    if constexpr (factored) {
      copy(first + stride, turn ^= 1);
      wait_for_copies<1>();  // the current ones
      __syncwarp();
      for (int r = 0; r < 4; ++r)
        for (int x = 0; x < 4; ++x) part[r][x] = weights[kFeatures];
      if (small) score_features<S, true>(rows, weights, part);
      else score_features<S, false>(rows, weights, part);
      __syncwarp();  // the features have been read
    } else if constexpr (S != Score::tanh) {
      C x[kSteps][4];
#pragma unroll
      for (int n = 0; n < kSteps; ++n) load(source(n, first), fours, width - first - quad, x[n]);
      C v = 0;
      if (S != Score::dot && lane < kFeatures && first + lane < width) v = widen(w[first + lane]);
      __syncwarp();  // the previously staged features have been read
#pragma unroll
      for (int n = 0; n < kSteps; ++n)
        for (int i = 0; i < 4; ++i) rows[lane / 4 + 8 * n][quad + i] = x[n][i];
      if (S != Score::dot && lane < kFeatures) weights[lane] = v;
      __syncwarp();
      score_features<S, false>(rows, weights, part);
    }
    for (int r = 0; r < 4; ++r)  // sums of partial sums lose less
      for (int x = 0; x < 4; ++x) sum[r][x] += part[r][x];
  }
  if constexpr (S == Score::tanh) take_again<factored>(sum, again);
  __syncwarp();
  for (int r = 0; r < 4; ++r)
    for (int x = 0; x < 4; ++x) staged.sum(warp, lane / 8 + 4 * r, lane % 8 + 8 * x) = sum[r][x];
  __syncthreads();
}

// Compute the scores of a tile's query rows and the keys from j0 on.
template <Score S, class T, class C>
__device__ void score_tile(const Problem& a, const Factored& f, const Tile& tile, int64_t j0, int keys,
                           StagedScore<S, C>& staged) {
  const int rows = up_to(kQueries, a.Tq - tile.row);
  const T *q = at<T>(a.query, tile, tile.row), *k = at<T>(a.key, tile, j0);
  const T* w = S == Score::dot ? nullptr : at<T>(a.score_vector, tile, 0);
  const auto again = [&](int row, int key) {
    if (row >= rows || key >= keys) return C(0);
    return C(sum_of_tanh(q + row * a.query.row, k + key * a.key.row, w, a.A));
  };
  if constexpr (is_factored<S, C>) {
    const int lane = threadIdx.x % 32;
    const float of_q = lane < rows ? *range_of(a, f.query, tile, a.Tq, tile.row + lane) : 0;
    const float of_k = lane < keys ? *range_of(a, f.key, tile, a.Tk, j0 + lane) : 0;
    const bool small = of_warp<Max>(of_q) + of_warp<Max>(of_k) <= kSmallTanhLimit;
    Rows<C> e_q = {at<C>(f.query, tile, tile.row), f.query.row, rows};
    Rows<C> e_k = {at<C>(f.key, tile, j0), f.key.row, keys};
    const C* e_w = at<C>(f.score_vector, tile, 0);
    if (small)
      e_q.data += a.B * f.query.batch, e_k.data += a.B * f.key.batch, e_w += a.H * f.score_vector.head;
    score_tile<S>(e_q, e_k, e_w, f.key.row, staged, again, small);
  } else {
    score_tile<S>(Rows<T>{q, a.query.row, rows}, Rows<T>{k, a.key.row, keys}, w, a.A, staged, again);
  }
}

}  // namespace
}  // namespace attnfast
