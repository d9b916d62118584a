// coverage_attention on the GPU: device code on raw pointers; the launcher is coverage.cu. The
// formulas are those of cpu/coverage_kernel.cpp.
//
// A row's scores need the weights of the previous rows, so the blocks of a cluster, each with a
// share of the keys, take a sequence and head and process its rows in order. Work that needs no
// history is done before and after, by all blocks. The only row of a decoder's step is computed in
// one launch. A key belongs to one thread, which alone adds to its sums. Sums over keys are
// computed per block, and nothing is added atomically.
#pragma once
#include "../coverage.h"
#include "attention.cuh"
#include "transition.cuh"

namespace attnfast {
namespace {

// Return an activation, and g times its slope at x, for a score that is known only at run time.
template <class C, int S = kScores - 1>
__device__ C activated(Score score, C z) {
  if constexpr (Score{S} == Score::tanh) return tanh(z);
  else return score == Score{S} ? activation<Score{S}, C>(z) : activated<C, S - 1>(score, z);
}
template <class C, int S = kScores - 1>
__device__ C times_slope(Score score, C g, C x) {
  if constexpr (Score{S} == Score::tanh) return g * (1 - x * x);
  else return score == Score{S} ? times_slope<Score{S}, C>(g, x) : times_slope<C, S - 1>(score, g, x);
}

// A signal over the keys, 0 beyond both ends; null is 0 everywhere. x may hold its logarithms.
template <class C>
struct Signal {
  const C* x;
  int64_t size;
  bool logarithms = false;
  __device__ C operator[](int64_t j) const {
    const C value = x && j >= 0 && j < size ? x[j] : logarithms ? C(-INFINITY) : C(0);
    return logarithms ? exp(value) : value;
  }
};

// The inputs and buffers of a block, forward or backward. Its keys are [from, to), of which the row
// may see those before `seen`.
template <class T, class Call, class C = typename Accumulate<T>::type>
struct Scan {
  const Call& a;
  const Tile tile;
  const int64_t n, from, to, seen, K, taps, window_size;
  const T* const score_vector;
  const C *const filters, *const projection, *const inverse_fertility;
  const C penalty;
  C* found;  // shared by all blocks: [Tk, K]
  C* next;   // remaining scratch

  __device__ Scan(const Call& a, const View& scratch)
      : a(a), tile(locate(a, 1, 1)), n(keys_seen(a, tile.b)), from(blockIdx.y * share(a, gridDim.y)),
        to(min(from + share(a, gridDim.y), a.Tk)), seen(min(to, n)), K(a.filters_count), taps(a.taps),
        window_size(a.channels * taps),
        score_vector(a.score == Score::dot ? nullptr : at<T>(a.score_vector, tile, 0)),
        filters(row(a.filters)), projection(row(a.projection)), inverse_fertility(row(a.inverse_fertility)),
        penalty(a.penalty.data ? *row(a.penalty) : C(0)), next(row(scratch)) {
    found = take(a.Tk * K);
  }

  // Return the scratch elements of each sequence and head; see above.
  static int64_t numbers(const Call& a, int64_t) { return a.Tk * a.filters_count; }

  static __device__ int64_t share(const Call& a, int64_t blocks) { return (a.Tk + blocks - 1) / blocks; }

  __device__ C* take(int64_t numbers) {
    C* place = next;
    next += numbers;
    return place;
  }
  __device__ C* row(const View& v, int64_t i = 0) const { return v.data ? at<C>(v, tile, i) : nullptr; }
  // Return the weights of the previous row. With a transition, `previous` holds their logarithms.
  __device__ Signal<C> last(int64_t t) const {
    if (t) return {row(a.weights, t - 1), a.Tk};
    return {row(a.previous), a.Tk, a.transition_prob.data != nullptr};
  }
  __device__ Transition<C> transition(int64_t t) const {
    const C* const past = t ? row(a.log_weights, t - 1) : row(a.previous);
    return {past, a.transition_prob.data ? row(a.transition_prob) + t : nullptr};
  }

  // Apply the filters around the block's keys.
  __device__ void find(const Signal<C>& last, const Signal<C>& coverage) const {
    for (int64_t index = from * K + threadIdx.x; index < seen * K; index += kThreads) {
      const int64_t j = index / K, k = index % K;
      C sum = 0;
      for (int64_t x = 0; x < a.channels; ++x) {
        const Signal<C> signal = x ? coverage : last;
        const C* filter = filters + k * window_size + x * taps;
        for (int64_t c = 0; c < taps; ++c) sum += filter[c] * signal[j + c - taps / 2];
      }
      found[index] = sum;
    }
  }

  // Compute the scores of row t, with the features in the tanh if there are any: warps take keys,
  // lanes features.
  __device__ void score(int64_t t, C* out) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T* q = at<T>(a.query, tile, t);
    for (int64_t first = from + warp * kAtOnce; first < seen; first += kWarps * kAtOnce) {
      const T* k[kAtOnce];
      const C* features[kAtOnce];
      C s[kAtOnce] = {};
#pragma unroll
      for (int x = 0; x < kAtOnce; ++x) {
        const int64_t j = min(first + x, seen - 1);
        k[x] = at<T>(a.key, tile, j);
        features[x] = found + j * K;
      }
      for (int64_t c = lane; c < a.A; c += 32) {
        C z[kAtOnce] = {};
        for (int64_t i = 0; i < K; ++i) {
          const C u = projection[c * K + i];
#pragma unroll
          for (int x = 0; x < kAtOnce; ++x) z[x] += features[x][i] * u;
        }
        const C qc = widen(q[c]);
        if (a.score == Score::dot) {
#pragma unroll
          for (int x = 0; x < kAtOnce; ++x) s[x] += widen(k[x][c]) * qc;
          continue;
        }
        const C w = widen(score_vector[c]);
#pragma unroll
        for (int x = 0; x < kAtOnce; ++x) s[x] += w * activated(a.score, z[x] + widen(k[x][c]) + qc);
      }
#pragma unroll
      for (int x = 0; x < kAtOnce; ++x) {
        s[x] = of_warp<Add>(s[x]);
        if (lane == x && first + x < seen) out[first + x] = finish_score<T>(a, tile, t, first + x, s[x]);
      }
    }
  }
};

// The inputs and buffers of the backward, and its gradients with the features in the tanh.
template <class T, class C = typename Accumulate<T>::type>
struct BackwardScan : Scan<T, CoverageBackward> {
  using Base = Scan<T, CoverageBackward>;
  using Base::a, Base::tile, Base::n, Base::from, Base::to, Base::seen, Base::K, Base::taps,
      Base::window_size;
  using Base::row, Base::take;
  using Base::score_vector, Base::filters, Base::projection, Base::inverse_fertility, Base::found;
  // shared by all blocks: [Tq, Tk], [Tk], [Tk, K] and [Tk, A]; the log-weights' gradient of a
  // transition follows `past`
  C *coverages, *past, *grad_coverage, *grad_found, *slopes, *grad_keys;
  C* parts;  // a block's sums over its keys: [A], [K, window_size] and [A, K]

  __device__ BackwardScan(const CoverageBackward& a, const View& scratch) : Base(a, scratch) {
    coverages = take(a.Tq * a.Tk);
    past = take(2 * a.Tk);
    grad_coverage = take(a.Tk);
    grad_found = take(a.Tk * K);
    slopes = take(K ? a.Tk * a.A : 0);
    parts = take(gridDim.y * part_size(a)) + blockIdx.y * part_size(a);
    grad_keys = a.sums ? row(a.grad_key) : take(K ? a.Tk * a.A : 0);
  }

  __device__ C& grad_past(int64_t j) const { return past[a.Tk + j]; }

  static int64_t numbers(const CoverageBackward& a, int64_t blocks) {
    const int64_t K = a.filters_count;
    return 2 * a.Tk * K + (a.Tq + 3) * a.Tk + (K ? (a.sums ? 1 : 2) * a.Tk * a.A : 0) +
           blocks * part_size(a);
  }
  static __host__ __device__ int64_t part_size(const CoverageBackward& a) {
    const int64_t K = a.filters_count;
    return K ? a.A + K * a.channels * a.taps + a.A * K : 0;
  }

  // Compute the gradients of row t's query, of keys, parameters and the history from those of its
  // scores.
  __device__ void score_backward(int64_t t, const C* g) const {
    const Signal<C> last = this->last(t), coverage = {coverages + t * a.Tk, a.Tk};
    this->find(last, coverage);
    __syncthreads();
    grad_features(t, g);
    for (int64_t index = from * K + threadIdx.x; index < seen * K; index += kThreads) {
      const int64_t j = index / K, i = index % K;
      C sum = 0;
      for (int64_t c = 0; g[j] != 0 && c < a.A; ++c) sum += slopes[j * a.A + c] * projection[c * K + i];
      grad_found[index] = sum;
    }
    wait_for_blocks();
    grad_signals(g, last, coverage);
  }

  // Compute the gradient of row t's query, and add to those of keys, weight and projection.
  __device__ void grad_features(int64_t t, const C* g) const {
    const T* q = at<T>(a.query, tile, t);
    C* const grad_projection = parts + a.A + K * window_size;
    const auto of_feature = [&](int64_t c) {
      const C qc = widen(q[c]), w = widen(score_vector[c]), *u = projection + c * K;
      C grad_q = 0, grad_w = 0;
      for (int64_t first = from; first < seen; first += kAtOnce) {
        C grad[kAtOnce], key[kAtOnce], before[kAtOnce], z[kAtOnce] = {};
        const C* features[kAtOnce];
#pragma unroll
        for (int y = 0; y < kAtOnce; ++y) {
          const int64_t j = min(first + y, seen - 1);
          grad[y] = first + y < seen ? g[j] : C(0);
          key[y] = widen(at<T>(a.key, tile, j)[c]);
          before[y] = a.grad_key.data ? grad_keys[j * a.A + c] : C(0);
          features[y] = found + j * K;
        }
        for (int64_t i = 0; i < K; ++i)
#pragma unroll
          for (int y = 0; y < kAtOnce; ++y) z[y] += features[y][i] * u[i];
#pragma unroll
        for (int y = 0; y < kAtOnce; ++y) {
          if (first + y >= seen) break;
          const int64_t j = first + y;
          C slope = 0;
          if (grad[y] != 0) {
            const C x = activated(a.score, z[y] + key[y] + qc), scaled = C(a.scale) * grad[y];
            slope = times_slope(a.score, scaled * w, x);
            grad_w += scaled * x;
            grad_q += slope;
            if (a.grad_key.data) grad_keys[j * a.A + c] = before[y] + slope;
          }
          slopes[j * a.A + c] = slope;
        }
      }
      parts[c] += grad_w;
      for (int64_t i = 0; a.grad_projection.data && i < K; ++i) {
        C sum = 0;
        for (int64_t j = from; j < seen; ++j)
          if (g[j] != 0) sum += slopes[j * a.A + c] * found[j * K + i];
        grad_projection[c * K + i] += sum;
      }
      return grad_q;
    };
    const auto of_features = [&](int64_t first, int count, C* sums) {
      for (int c = threadIdx.x; c < count; c += kThreads) sums[c] = of_feature(first + c);
    };
    add_up_blocks<C>(a.A, of_features, Unweighted{}, [&](int64_t c, C grad_q) {
      if (a.grad_query.data) narrow(grad_q, at<T>(a.grad_query, tile, t)[c]);
    });
  }

  // Compute the gradients of the filters and of their inputs from grad_found.
  __device__ void grad_signals(const C* g, const Signal<C>& last, const Signal<C>& coverage) const {
    C* const grad_filters = parts + a.A;
    for (int64_t index = threadIdx.x; a.grad_filters.data && index < K * window_size; index += kThreads) {
      const int64_t i = index / window_size, x = index % window_size / taps, c = index % window_size % taps;
      const Signal<C> signal = x ? coverage : last;
      C sum = 0;
#pragma unroll 4
      for (int64_t j = from; j < seen; ++j) {
        const C found = grad_found[j * K + i], more = found * signal[j + c - taps / 2];
        sum += found == 0 ? C(0) : more;
      }
      grad_filters[index] += sum;
    }
    for (int64_t p = from + threadIdx.x; p < to; p += kThreads)
      for (int64_t x = 0; x < a.channels; ++x) {
        C sum = 0;
        for (int64_t c = 0; c < taps; ++c) {
          const int64_t j = p - c + taps / 2;
          if (j < 0 || j >= n || g[j] == 0) continue;
          for (int64_t i = 0; i < K; ++i)
            sum += grad_found[j * K + i] * filters[i * window_size + x * taps + c];
        }
        (x ? grad_coverage : past)[p] += sum;
      }
  }

  // For a thread's keys, from `begin` on, compute the coverage before every row and initialise the
  // sums over rows.
  __device__ void begin(int64_t begin) const {
    const C *coverage_in = row(a.coverage_in), *grad_coverage_out = row(a.grad_coverage_out);
    const C* const grad_last = row(a.grad_last);
    C* const grad_inverse_fertility = row(a.grad_inverse_fertility);
    for (int64_t j = begin; j < to; j += kThreads) {
      C coverage = coverage_in ? coverage_in[j] : C(0);
      for (int64_t t = 0; t < a.Tq; ++t) {
        coverages[t * a.Tk + j] = coverage;
        const C w = row(a.weights, t)[j];
        coverage += inverse_fertility ? inverse_fertility[j] * w : w;
      }
      past[j] = grad_past(j) = 0;
      if (grad_last) (a.transition_prob.data ? grad_past(j) : past[j]) = grad_last[j];
      grad_coverage[j] = grad_coverage_out ? grad_coverage_out[j] : C(0);
      if (grad_inverse_fertility && !a.sums) grad_inverse_fertility[j] = 0;
    }
  }

  // Compute the gradient of the previous log-weights from g, the gradient of a row's scores; return
  // that of u.
  __device__ double past_backward(int64_t begin, const Transition<C>& transition, const C* g) const {
    double grad_u = 0;
    for (int64_t j = begin; j < seen; j += kThreads) {
      C x = 0;
#pragma unroll 1  // two copies of the code would spill
      for (int64_t i = j; i < j + 2 && i < n; ++i) {
        if (g[i] == 0) continue;
        const auto r = transition[i];
        const C share = g[i] / r.sum;
        x += share * (i == j ? (1 - transition.u) * r.here : transition.u * r.before);
        if (i == j) grad_u += share * (r.before - r.here);
      }
      grad_past(j) = x;
    }
    return grad_u;
  }

  // Write the gradients of the history before all rows, for the same keys.
  __device__ void end(int64_t begin) const {
    C *const grad_coverage_in = row(a.grad_coverage_in), *const grad_previous = row(a.grad_previous);
    for (int64_t j = begin; j < to; j += kThreads) {
      if (grad_coverage_in) grad_coverage_in[j] = grad_coverage[j];
      if (!grad_previous) continue;
      const C p = this->last(0)[j];  // its gradient goes to its logarithm, too
      grad_previous[j] = !a.transition_prob.data ? past[j] : grad_past(j) + (p == 0 ? 0 : p * past[j]);
    }
  }

  // Clear the sums of score_backward, before the rows.
  __device__ void begin_backward() const {
    for (int64_t i = threadIdx.x; i < part_size(a); i += kThreads) parts[i] = 0;
    if (a.sums) return;
    for (int64_t i = from * a.A + threadIdx.x; i < to * a.A; i += kThreads) grad_keys[i] = 0;
  }

  // Compute the gradients of keys and parameters, after the rows of all blocks.
  __device__ void end_backward() const {
    C* const outs[] = {row(a.grad_score_vector), row(a.grad_filters), row(a.grad_projection)};
    const int64_t sizes[] = {a.A, K * window_size, a.A * K}, size = part_size(a);
    const C* part = parts - blockIdx.y * size;
#pragma unroll
    for (int x = 0; x < 3; part += sizes[x], ++x)
      for (int64_t i = threadIdx.x + blockIdx.y * kThreads; outs[x] && i < sizes[x];
           i += kThreads * gridDim.y) {
        C sum = a.sums ? outs[x][i] : C(0);
        for (unsigned block = 0; block < gridDim.y; ++block) sum += part[block * size + i];
        outs[x][i] = sum;
      }
    if (!a.grad_key.data || a.sums) return;
    for (int64_t index = from * a.A + threadIdx.x; index < to * a.A; index += kThreads)
      narrow(grad_keys[index], at<T>(a.grad_key, tile, index / a.A)[index % a.A]);
  }
};

// Compute the context of the only row from the weights of all blocks.
template <class T, class C>
__device__ void sum_values(const CoverageForward& a, const Scan<T, CoverageForward>& s, const C* weights) {
  __shared__ C share[kStepKeys];
  const auto of_keys = [&](int64_t first, int count, C* sums) {
    int64_t j = s.from;
    do {
      __syncthreads();  // the shares before have been read
      if (threadIdx.x < kStepKeys)
        share[threadIdx.x] = j + threadIdx.x < s.seen ? weights[j + threadIdx.x] : 0;
      __syncthreads();
      const Rows<T> values = {at<T>(a.value, s.tile, j) + first, a.value.row, up_to(kStepKeys, s.seen - j)};
      weighted_sums<kFewRows>(
          share, values, count, static_cast<const T*>(nullptr), Identity(),
          [&](int c, const C* sum) { sums[c] = (j == s.from ? C(0) : sums[c]) + *sum; });
    } while ((j += kStepKeys) < s.seen);
  };
  add_up_blocks<C>(a.Dv, of_keys, Unweighted{},
                   [&](int64_t c, C total) { narrow(total, at<T>(a.context, s.tile, 0)[c]); });
}

// Return the logarithm of the sigmoid of x.
template <class C>
__device__ C log_sigmoid(C x) {
  return (x > 0 ? C(0) : x) - log1p(exp(x > 0 ? -x : x));
}

template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    scan(const CoverageForward a, const View scratch, bool alone) {
  using C = typename Accumulate<T>::type;
  const Scan<T, CoverageForward> s(a, scratch);
  const int64_t begin = s.from + threadIdx.x;  // first key of this thread
  C* coverage = s.row(a.coverage_out);
  const C* coverage_in = s.row(a.coverage_in);
  for (int64_t j = begin; j < s.to; j += kThreads) coverage[j] = coverage_in ? coverage_in[j] : C(0);
  double loss = 0;
  int turn = 0;
  for (int64_t t = 0; t < a.Tq; ++t) {
    const Signal<C> last = s.last(t);
    C *row = s.row(a.weights, t), *logarithms = s.row(a.log_weights, t);
    if (s.K || logarithms) wait_for_blocks();  // reads other blocks' weights and coverage
    if (s.K) {
      s.find(last, {coverage, a.Tk});
      __syncthreads();
    }
    if (s.K || alone) {
      s.score(t, row);
      __syncthreads();
    }
    C top = -INFINITY, sigmoids = 0;
    const Transition<C> transition = s.transition(t);
    for (int64_t j = begin; j < s.seen; j += kThreads) {
      if (s.penalty != 0) row[j] -= s.penalty * coverage[j];
      if (logarithms) row[j] += transition[j].log();
      if (a.sigmoid) sigmoids += exp(row[j] = log_sigmoid(row[j]));
      top = fmax(top, row[j]);
    }
    top = of_blocks<Max>(top, turn);
    if (top == -INFINITY) top = 0;
    if (a.sigmoid) sigmoids = of_blocks<Add>(sigmoids, turn);
    if (a.sigmoid && begin == 0) s.row(a.sigmoid_sum)[t] = sigmoids;
    C part = 0;
    for (int64_t j = begin; j < s.seen; j += kThreads) {
      const C x = row[j] - top;
      if (logarithms) logarithms[j] = x;
      row[j] = exp(x);
      part += row[j];
    }
    const C total = of_blocks<Add>(part, turn), share = total == 0 ? 0 : 1 / total;
    const C log_total = total == 0 ? 0 : log(total);
    for (int64_t j = begin; j < s.to; j += kThreads) {
      if (j >= s.n) {
        row[j] = 0;
        if (logarithms) logarithms[j] = -INFINITY;
        continue;
      }
      const C p = row[j] == 0 ? 0 : row[j] * share, c = coverage[j];
      row[j] = p;
      if (logarithms) logarithms[j] -= log_total;
      loss += p <= c ? p : c;
      coverage[j] = c + (s.inverse_fertility ? s.inverse_fertility[j] * p : p);
    }
  }
  loss = of_blocks<Add>(loss, turn);
  if (begin == 0) *s.row(a.loss) = loss;
  if (alone) return sum_values<T>(a, s, s.row(a.weights));
  wait_for_blocks();  // others may still read
}

// Run the rows from the last to the first. grad_score holds grad_context . value, computed here for a
// row `alone`, and becomes the scores' gradient; `past` is the gradient of the row's weights
// through the next row's history, grad_coverage that of the coverage after the row, then before it.
template <class T, bool transition>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 3)
    scan_backward(const CoverageBackward a, const View scratch, bool alone) {
  using C = typename Accumulate<T>::type;
  const BackwardScan<T> s(a, scratch);
  if (alone) {
    const Rows<T> values = {at<T>(a.value, s.tile, s.from), a.value.row,
                            up_to(int(s.to - s.from), s.seen - s.from)};
    C* const products = s.row(a.grad_score) + s.from;
    score_keys<Score::dot, C>(at<T>(a.grad_context, s.tile, 0), static_cast<const T*>(nullptr), values,
                              a.Dv, [&](int j, C x) { products[j] = x; });
    __syncthreads();
  }
  const int64_t begin = s.from + threadIdx.x;  // first key of this thread
  int turn = 0;
  const C grad_loss = a.grad_loss.data ? *s.row(a.grad_loss) : C(0);
  C* const grad_inverse_fertility = s.row(a.grad_inverse_fertility);
  s.begin(begin);
  if (s.K) s.begin_backward();

  double grad_penalty = 0;
  for (int64_t t = a.Tq - 1; t >= 0; --t) {
    const C *weights = s.row(a.weights, t), *coverage = s.coverages + t * a.Tk;
    const C *extra = s.row(a.grad_weights, t), *logarithms = s.row(a.log_weights, t);
    const C* const given = s.row(a.grad_log_weights, t);
    C *g = s.row(a.grad_score, t), part = 0, part_of_logarithms = 0;
    for (int64_t j = begin; j < s.seen; j += kThreads) {
      const C w = weights[j], c = s.grad_coverage[j];
      const bool smaller = w <= coverage[j];
      C x = g[j] + (extra ? extra[j] : C(0)) + s.past[j] +
            (s.inverse_fertility ? s.inverse_fertility[j] * c : c);
      if (smaller) x += grad_loss;
      if (w != 0) part += w * x;
      g[j] = x;
      if (grad_inverse_fertility) grad_inverse_fertility[j] += c * w;
      if (!smaller) s.grad_coverage[j] = c + grad_loss;
      if constexpr (transition) {
        if (given && logarithms[j] != -INFINITY) s.grad_past(j) += given[j];
        part_of_logarithms += s.grad_past(j);
      }
    }
    // afterwards, all results of the next row, or of the start, are visible
    const C mean = of_blocks<Add>(part, turn);
    for (int64_t j = begin; j < s.to; j += kThreads) s.past[j] = 0;
    // separate from the mean, so that a row of one key has no gradient
    const C total = transition ? of_blocks<Add>(part_of_logarithms, turn) : C(0);
    const C sigmoids = a.sigmoid ? s.row(a.sigmoid_sum)[t] : C(0);  // a weight's sigmoid over the weight
    for (int64_t j = begin; j < s.to; j += kThreads) {
      C x = j < s.n && weights[j] != 0 ? weights[j] * (g[j] - mean) * (1 - weights[j] * sigmoids) : C(0);
      if (transition && j < s.n) x += s.grad_past(j) - weights[j] * total;
      g[j] = x;
      if (x != 0) grad_penalty -= x * coverage[j];
      s.grad_coverage[j] -= s.penalty * x;
    }
    if constexpr (transition) {
      wait_for_blocks();  // a key's gradient goes to the previous key, too
      const C grad_u = of_blocks<Add>(s.past_backward(begin, s.transition(t), g), turn);
      if (begin == 0) s.row(a.grad_transition_prob)[t] = grad_u;
    }
    if (s.K) s.score_backward(t, g);
  }

  grad_penalty = of_blocks<Add>(grad_penalty, turn);  // all blocks have finished their rows
  if (begin == 0 && a.grad_penalty.data)
    *s.row(a.grad_penalty) = grad_penalty + (a.sums ? *s.row(a.grad_penalty) : C(0));
  s.end(begin);
  if (s.K) s.end_backward();
  wait_for_blocks();  // others may still read
}

// ---- launches: see attention.cuh ----------------------------------------------------------------

// Return true if a scan kernel computes everything of a single row: if a cluster can share its keys as
// the blocks of a step do.
template <class Call, class Launch>
bool scans_alone(const Call& a, void (*kernel)(Call, View, bool), const Launch& launch) {
  return a.Tq == 1 && tiles(a.Tk, kStepKeys) <= launch.most_together(kernel);
}

// `Keeps` is the class of a scan kernel's inputs and buffers.
template <class T, class Keeps, class Call, class Launch>
void launch_scan(const Call& a, void (*kernel)(Call, View, bool), bool alone, const Launch& launch) {
  using C = typename Accumulate<T>::type;
  int64_t blocks = alone ? step_blocks(a, launch, kernel) : tiles(a.Tk, kStepKeys);
  blocks = blocks <= 1 ? 1 : min(blocks, int64_t{launch.most_together(kernel)});
  const int64_t size = Keeps::numbers(a, blocks);
  const View scratch = {launch.template scratch<C>(a.B * a.H * size), a.H * size, size};
  launch.together(kernel, a.B * a.H, blocks, a, scratch, alone);
}

template <class Launch>
void launch_forward(const CoverageForward& a, const Launch& launch) {
  const Forward& rows = a;
  const Sum context = {a.weights, {}, a.value, a.context, a.Tq, a.Tk, a.Dv, 1, {}, {}};
  by_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto scores =
        by_score(a.score, [](auto known) { return products<T, decltype(known)::score, false>; });
    const bool alone = scans_alone(a, scan<T>, launch);
    if (!a.filters_count && !alone) launch_products(rows, factored<T>(rows, launch), launch, scores);
    launch_scan<T, Scan<T, CoverageForward>>(a, scan<T>, alone, launch);
    if (!alone) launch_sum<T>(a, context, launch, grad_rows<T, Score::dot, false>);
  });
}

template <class Launch>
void launch_backward(const CoverageBackward& a, const Launch& launch) {
  const Backward& rows = a;
  by_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto scan = a.transition_prob.data ? scan_backward<T, true> : scan_backward<T, false>;
    const bool alone = scans_alone(a, scan, launch);
    if (!alone) launch_products(rows, Factored{}, launch, products<T, Score::dot, true>);
    launch_scan<T, BackwardScan<T>>(a, scan, alone, launch);
    if (a.filters_count) return launch_grad_value<T>(rows, {}, launch);
    Backward inputs = rows;
    inputs.grad_score_given = true;
    if (!launch_step_backward<T>(inputs, launch)) launch_grad_inputs<T>(inputs, launch);
  });
}

}  // namespace
}  // namespace attnfast
