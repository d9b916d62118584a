// copy_distribution on the GPU: device code on raw pointers; the launcher is copying.cu. The
// formulas are those of cpu/copying_kernel.cpp.
//
// A block takes a row: one sweep over the vocabulary as if nothing were copied, then the words of
// the source are corrected, each by the thread of its first key. The total weight of a word's keys
// comes from comparing each key with each, a few hundred, so that no atomic additions are needed.
#pragma once
#include "../word.h"
#include "cluster.cuh"

namespace attnfast {
namespace {

// The inputs of a row.
template <class T>
struct Row {
  int64_t b, t, V, N, keys;
  const T *logits, *weights;
  const int64_t* source;
  Gate gate;

  __device__ explicit Row(const Copying& a)
      : b(blockIdx.x / a.Tq), t(blockIdx.x % a.Tq), V(a.V), N(a.V + a.X), keys(a.Tk),
        logits(at<const T>(a.logits)), weights(at<const T>(a.weights)), source(a.source + b * a.Tk),
        gate(widen(*at<const T>(a.gate))) {}

  template <class U>
  __device__ U* at(const View& v) const {
    return static_cast<U*>(v.data) + b * v.batch + t * v.row;
  }

  __device__ bool exists(int64_t w) const { return 0 <= w && w < N; }
  __device__ bool generates(int64_t w) const { return w < V && widen(logits[w]) != -INFINITY; }

  // Return the total weight of the keys whose word is that of key i; `first` is set if i is the
  // first.
  __device__ double mass(int64_t i, bool& first) const {
    double total = 0;
    first = true;
    for (int64_t j = 0; j < keys; ++j) {
      if (source[j] != source[i]) continue;
      total += widen(weights[j]);
      first = first && j >= i;
    }
    return total;
  }

  __device__ Word word(int64_t w, double mass, double log_sum_exp) const {
    const double log_generated = generates(w) ? widen(logits[w]) - log_sum_exp + gate.log_p : -HUGE_VAL;
    return Word(log_generated, mass, gate.log_q);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 6) distribution(const CopyForward a) {
  using C = typename Accumulate<T>::type;
  const Row<T> r(a);
  T* out = r.template at<T>(a.distribution);
  C top = -INFINITY;
  int turn = 0;
  for (int64_t v = threadIdx.x; v < r.V; v += kThreads) top = fmax(top, C(widen(r.logits[v])));
  top = of_blocks<Max>(top, turn);
  if (top == -INFINITY) top = 0;
  C part = 0;
  for (int64_t v = threadIdx.x; v < r.V; v += kThreads) part += exp(widen(r.logits[v]) - top);
  const C total = of_blocks<Add>(part, turn);
  const bool none = total == 0;  // no word can be generated
  const double log_total = none ? 0 : ::log(static_cast<double>(total));
  const double log_sum_exp = none ? -HUGE_VAL : top + log_total;
  if (threadIdx.x == 0) *r.template at<double>(a.log_sum_exp) = log_sum_exp;

  const C factor = none ? 0 : r.gate.p / total, low = r.gate.log_p - log_total;
  const auto generated = [&](int64_t w) -> C {
    const C x = w < r.V ? widen(r.logits[w]) : C(-INFINITY);
    if (!a.log) return exp(x - top) * factor;
    return x == -INFINITY ? C(kLowest) : x - top + low;
  };
  for (int64_t v = threadIdx.x; v < r.N; v += kThreads) narrow(generated(v), out[v]);
  __syncthreads();  // the following stores overwrite those of other threads
  for (int64_t i = threadIdx.x; i < r.keys; i += kThreads) {
    const int64_t w = r.source[i];
    bool first;
    const double mass = r.mass(i, first);
    if (!first || !r.exists(w)) continue;
    const double x = a.log ? r.word(w, mass, log_sum_exp).log_p : generated(w) + r.gate.q * mass;
    narrow(C(x), out[w]);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 6) distribution_gradient(const CopyBackward a) {
  using C = typename Accumulate<T>::type;
  constexpr double most = sizeof(T) == 2 ? 65504 : HUGE_VAL;  // the largest gradient of a weight
  const Row<T> r(a);
  const T* grad = r.template at<const T>(a.grad_distribution);
  T* out = r.template at<T>(a.grad_logits);
  T* grad_weights = r.template at<T>(a.grad_weights);
  const double log_sum_exp = *r.template at<const double>(a.log_sum_exp);
  const bool none = log_sum_exp == -HUGE_VAL;
  const C high = none ? 0 : log_sum_exp, low = none ? 0 : log_sum_exp - high;
  const auto S = [&](C x) { return none ? C(0) : exp(x - high - low); };

  C part = 0;
  int turn = 0;
  for (int64_t v = threadIdx.x; v < r.V; v += kThreads) {
    const C x = widen(r.logits[v]), g = widen(grad[v]), s = a.log ? C(1) : S(x);
    if (x != -INFINITY && s != 0) part += s * g;
  }
  double total = of_blocks<Add>(part, turn), all = total;  // all: sum G of the possible words
  double minus = 0, plus = 0;
  for (int64_t i = threadIdx.x; i < r.keys; i += kThreads) {
    const int64_t w = r.source[i];
    const double g = r.exists(w) ? widen(grad[w]) : 0, weight = widen(r.weights[i]);
    if (!a.log) {
      narrow(C(r.gate.q * g), grad_weights[i]);
      minus += weight * g;
      continue;
    }
    bool first;
    const Word word = r.word(r.exists(w) ? w : r.N, r.mass(i, first), log_sum_exp);
    const double x = g * word.ratio, copied = word.slight || x == 0 ? 0 : weight * x;
    narrow(C(x > most ? most : x < -most ? -most : x), grad_weights[i]);
    (r.generates(r.exists(w) ? w : r.N) ? minus : plus) += copied;
  }
  total -= of_blocks<Add>(minus, turn);
  all += of_blocks<Add>(plus, turn);
  const double p = r.gate.p;
  if (threadIdx.x == 0)
    narrow(C(a.log ? total - p * all : p * r.gate.q * total), *r.template at<T>(a.grad_gate));

  const double mean = a.log ? total : all;
  for (int64_t v = threadIdx.x; v < r.V; v += kThreads) {
    const C x = widen(r.logits[v]), g = widen(grad[v]);
    const C y = a.log ? g - S(x) * C(mean) : S(x) * C(p) * (g - C(mean));
    narrow(x == -INFINITY ? C(0) : y, out[v]);
  }
  if (!a.log) return;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < r.keys; i += kThreads) {
    const int64_t w = r.source[i];
    bool first;
    const double mass = r.mass(i, first);
    if (!first || !r.exists(w) || !r.generates(w)) continue;
    const C g = widen(grad[w]);
    narrow(g * C(r.word(w, mass, log_sum_exp).generated) - S(widen(r.logits[w])) * C(mean), out[w]);
  }
}

// ---- launches: see attention.cuh ----------------------------------------------------------------

template <class Launch>
void launch_forward(const CopyForward& a, const Launch& launch) {
  by_dtype(a.dtype, [&](auto zero) { launch(distribution<decltype(zero)>, a.B * a.Tq, 1, a); });
}

template <class Launch>
void launch_backward(const CopyBackward& a, const Launch& launch) {
  by_dtype(a.dtype, [&](auto zero) { launch(distribution_gradient<decltype(zero)>, a.B * a.Tq, 1, a); });
}

}  // namespace
}  // namespace attnfast
