// copy_distribution on the GPU: device code on raw pointers; the launcher is copying.cu. The
// formulas are those of cpu/copying_kernel.cpp.
//
// A row takes two passes over its logits, for the sum of exponentials and for the distribution as if
// nothing were copied. Then the words of the source are corrected. A first launch sorts the keys of each
// sequence by word, so a row adds the weights of a word's keys in a fixed order, without atomic
// additions. On sm_90 and later a cluster divides a large vocabulary, so that the logits of the rows in
// progress fit into the L2 cache.
#pragma once
#include <float.h>

#include "../word.h"
#include "cluster.cuh"

namespace attnfast {
namespace {

constexpr int kWordsPerBlock = 4096;  // a cluster has one block per this number of words

// keys: those of each sequence, sorted by word. counts: at a word's first key the number of its keys, else
// 0. Both are [B, Tk].
struct SortedKeys {
  int32_t *keys, *counts;
};

// A key's position is the number of keys that precede it; a warp counts them for one key.
__global__ void sort_keys(const int64_t* source, int Tk, const SortedKeys sorted) {
  const int parts = (Tk + kWarps - 1) / kWarps, i = blockIdx.x % parts * kWarps + threadIdx.x / 32;
  const int64_t first = blockIdx.x / parts * int64_t{Tk};
  if (i >= Tk) return;
  source += first;
  const int64_t w = source[i];
  int smaller = 0, before = 0, same = 0;
  int j = threadIdx.x % 32;
#pragma unroll 4
  for (; j < i; j += 32) {
    smaller += source[j] < w;
    before += source[j] == w;
  }
#pragma unroll 4
  for (; j < Tk; j += 32) {
    smaller += source[j] < w;
    same += source[j] == w;
  }
  before = of_warp<Add>(before);
  same = before + of_warp<Add>(same);
  const int64_t position = first + of_warp<Add>(smaller) + before;
  if (threadIdx.x % 32 != 0) return;
  sorted.keys[position] = i;
  sorted.counts[position] = before == 0 ? same : 0;
}

// Blocks that a multiprocessor has registers for.
template <class T>
constexpr int kRowBlocks = sizeof(T) == 8 ? 4 : 6;
// Words that a thread loads at a time, kThreads apart.
template <class C>
constexpr int kWordsPerThread = sizeof(C) == 4 ? 8 : 4;

// Divide the words below n among the threads of the row's blocks. use(w, x, in_range) gets
// kWordsPerThread at a time: x[i] is load(w + i * kThreads), to be used only if in_range(i). Loads come
// first, without branches, because a thread that waits for each in turn is idle most of the time.
template <class C, class Load, class Use>
__device__ void sweep(int64_t n, const Load& load, const Use& use) {
  constexpr int words = kWordsPerThread<C>, of_block = words * kThreads;
  for (int64_t first = of_block * blockIdx.y; first < n; first += of_block * gridDim.y) {
    const int64_t w = first + threadIdx.x;
    const auto take = [&](auto known) {
      constexpr bool is_full = decltype(known)::value;
      decltype(load(w)) x[words];
#pragma unroll
      for (int i = 0; i < words; ++i)
        x[i] = load(is_full ? w + i * kThreads : min(w + i * kThreads, n - 1));
      use(w, x, [&](int i) { return is_full || w + i * kThreads < n; });
    };
    if (n - first >= of_block) take(std::true_type{});
    else take(std::false_type{});
  }
}

// The inputs of a row.
template <class T>
struct Row {
  int64_t b, t, V, N, keys;
  const T *logits, *weights;
  const int64_t* source;
  Gate gate;
  SortedKeys sorted;

  __device__ Row(const Copying& a, const SortedKeys& all)
      : b(blockIdx.x / a.Tq), t(blockIdx.x % a.Tq), V(a.V), N(a.V + a.X), keys(a.Tk),
        logits(at<const T>(a.logits)), weights(at<const T>(a.weights)), source(a.source + b * a.Tk),
        gate(widen(*at<const T>(a.gate))), sorted{all.keys + b * a.Tk, all.counts + b * a.Tk} {}

  template <class U>
  __device__ U* at(const View& v) const {
    return static_cast<U*>(v.data) + b * v.batch + t * v.row;
  }

  __device__ bool exists(int64_t w) const { return 0 <= w && w < N; }
  __device__ bool generates(int64_t w) const { return w < V && widen(logits[w]) != -INFINITY; }

  // Call use(w, mass, keys, count) for each source word of this thread, with its keys, their number and
  // their total weight.
  template <class Use>
  __device__ void for_each_word(const Use& use) const {
    for (int64_t i = threadIdx.x + kThreads * blockIdx.y; i < keys; i += kThreads * gridDim.y) {
      const int count = sorted.counts[i];
      if (count == 0) continue;
      const int32_t* word_keys = sorted.keys + i;
      double mass = 0;
#pragma unroll 4
      for (int k = 0; k < count; ++k) mass += widen(weights[word_keys[k]]);
      use(source[*word_keys], mass, word_keys, count);
    }
  }

  __device__ Word word(int64_t w, double mass, double log_sum_exp) const {
    const double log_generated = generates(w) ? widen(logits[w]) - log_sum_exp + gate.log_p : -HUGE_VAL;
    return Word(log_generated, mass, gate.log_q);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, kRowBlocks<T>)
    distribution(const CopyForward a, const SortedKeys sorted) {
  using C = typename Accumulate<T>::type;
  const Row<T> r(a, sorted);
  T* out = r.template at<T>(a.distribution);
  const auto logit = [&](int64_t w) -> C { return widen(r.logits[w]); };
  int turn = 0;
  C top = sizeof(C) == 4 ? -FLT_MAX : -DBL_MAX, part = 0;  // of this thread
  sweep<C>(r.V, logit, [&](int64_t, const auto& x, const auto& in_range) {
    C highest = top;
#pragma unroll
    for (int i = 0; i < kWordsPerThread<C>; ++i)
      if (in_range(i)) highest = fmax(highest, x[i]);
    if (highest > top) part *= exp(top - highest);
    top = highest;
#pragma unroll
    for (int i = 0; i < kWordsPerThread<C>; ++i)
      if (in_range(i)) part += exp(x[i] - top);
  });
  const C thread_top = top;
  top = of_blocks<Max>(thread_top, turn);
  const C total = of_blocks<Add>(part * exp(thread_top - top), turn);
  const bool none = total == 0;  // no word can be generated
  const double log_total = none ? 0 : ::log(static_cast<double>(total));
  const double log_sum_exp = none ? -HUGE_VAL : top + log_total;
  if (threadIdx.x == 0 && blockIdx.y == 0) *r.template at<double>(a.log_sum_exp) = log_sum_exp;

  const C factor = none ? 0 : r.gate.p / total, low = r.gate.log_p - log_total;
  const auto generated = [&](C x) -> C {
    if (!a.log) return exp(x - top) * factor;
    return x == -INFINITY ? C(kLowest) : x - top + low;
  };
  sweep<C>(r.V, logit, [&](int64_t w, const auto& x, const auto& in_range) {
#pragma unroll
    for (int i = 0; i < kWordsPerThread<C>; ++i)
      if (in_range(i)) narrow(generated(x[i]), out[w + i * kThreads]);
  });
  for (int64_t w = r.V + threadIdx.x + kThreads * blockIdx.y; w < r.N; w += kThreads * gridDim.y)
    narrow(generated(-INFINITY), out[w]);
  wait_for_blocks();  // the following stores overwrite those of other threads
  r.for_each_word([&](int64_t w, double mass, const int32_t*, int) {
    if (!r.exists(w)) return;
    const double x = a.log ? r.word(w, mass, log_sum_exp).log_p
                           : generated(w < r.V ? logit(w) : C(-INFINITY)) + r.gate.q * mass;
    narrow(C(x), out[w]);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads, kRowBlocks<T>)
    distribution_gradient(const CopyBackward a, const SortedKeys sorted) {
  using C = typename Accumulate<T>::type;
  constexpr double most = sizeof(T) == 2 ? 65504 : HUGE_VAL;  // the largest gradient of a weight
  const Row<T> r(a, sorted);
  const T* grad = r.template at<const T>(a.grad_distribution);
  T* out = r.template at<T>(a.grad_logits);
  T* grad_weights = r.template at<T>(a.grad_weights);
  const double log_sum_exp = *r.template at<const double>(a.log_sum_exp);
  const bool none = log_sum_exp == -HUGE_VAL;  // no word can be generated
  const C high = none ? INFINITY : log_sum_exp, low = none ? 0 : log_sum_exp - high;
  const auto S = [&](C x) { return exp(x - high - low); };
  struct Terms {
    C x, g;
  };
  const auto terms = [&](int64_t w) -> Terms { return {widen(r.logits[w]), widen(grad[w])}; };

  C part = 0;
  int turn = 0;
  sweep<C>(r.V, terms, [&](int64_t, const auto& of, const auto& in_range) {
#pragma unroll
    for (int i = 0; i < kWordsPerThread<C>; ++i) {
      const C s = a.log ? C(1) : S(of[i].x);
      if (in_range(i) && of[i].x != -INFINITY && s != 0) part += s * of[i].g;
    }
  });
  double total = of_blocks<Add>(part, turn), all = total;  // all: sum G of the possible words
  double minus = 0, plus = 0;
  r.for_each_word([&](int64_t w, double mass, const int32_t* keys, int count) {
    if (!r.exists(w)) w = r.N;
    const double g = w < r.N ? widen(grad[w]) : 0;
    double x = r.gate.q * g;
    if (a.log) {
      const Word word = r.word(w, mass, log_sum_exp);
      x = g * word.ratio;
      if (!word.slight && x != 0) (r.generates(w) ? minus : plus) += mass * x;
      x = x > most ? most : x < -most ? -most : x;
    } else {
      minus += mass * g;
    }
    for (int first = 0; first < count; first += 4) {
      int32_t key[4];  // loads that waited for stores would take most of the time
      for (int k = 0; k < 4; ++k) key[k] = keys[min(first + k, count - 1)];
      for (int k = 0; k < 4; ++k) narrow(C(x), grad_weights[key[k]]);
    }
  });
  total -= of_blocks<Add>(minus, turn);
  all += of_blocks<Add>(plus, turn);
  const double p = r.gate.p;
  if (threadIdx.x == 0 && blockIdx.y == 0)
    narrow(C(a.log ? total - p * all : p * r.gate.q * total), *r.template at<T>(a.grad_gate));

  const double mean = a.log ? total : all;
  sweep<C>(r.V, terms, [&](int64_t w, const auto& of, const auto& in_range) {
#pragma unroll
    for (int i = 0; i < kWordsPerThread<C>; ++i) {
      const auto [x, g] = of[i];
      const C y = a.log ? g - S(x) * C(mean) : S(x) * C(p) * (g - C(mean));
      if (in_range(i)) narrow(x == -INFINITY ? C(0) : y, out[w + i * kThreads]);
    }
  });
  wait_for_blocks();
  if (!a.log) return;
  r.for_each_word([&](int64_t w, double mass, const int32_t*, int) {
    if (!r.exists(w) || !r.generates(w)) return;
    const C g = widen(grad[w]);
    narrow(g * C(r.word(w, mass, log_sum_exp).generated) - S(widen(r.logits[w])) * C(mean), out[w]);
  });
}

// ---- launches: see attention.cuh ----------------------------------------------------------------

template <class Call, class Launch>
void launch_rows(void (*kernel)(Call, SortedKeys), const Call& a, const Launch& launch) {
  if (a.B * a.Tq == 0) return;
  const int64_t elements = a.B * a.Tk;
  const SortedKeys sorted = {launch.template scratch<int32_t>(elements),
                             launch.template scratch<int32_t>(elements)};
  launch(sort_keys, a.B * tiles(a.Tk, kWarps), 1, a.source, static_cast<int>(a.Tk), sorted);
  const int64_t blocks = min(tiles(a.V + a.X, kWordsPerBlock), int64_t{launch.most_together(kernel)});
  launch.together(kernel, a.B * a.Tq, max(blocks, int64_t{1}), a, sorted);
}

template <class Launch>
void launch_forward(const CopyForward& a, const Launch& launch) {
  by_dtype(a.dtype, [&](auto zero) { launch_rows(distribution<decltype(zero)>, a, launch); });
}

template <class Launch>
void launch_backward(const CopyBackward& a, const Launch& launch) {
  by_dtype(a.dtype, [&](auto zero) { launch_rows(distribution_gradient<decltype(zero)>, a, launch); });
}

}  // namespace
}  // namespace attnfast
