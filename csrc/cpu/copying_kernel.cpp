// copy_distribution on the CPU, for one instruction set (see vector.h); launched by copying.cpp.
//
//   S = softmax(logits),  p = sigmoid(gate),  C_w = sum of the weights of the keys whose word is w
//   P_w = p S_w + (1 - p) C_w,  or log P_w
//
// A row is one sweep over the vocabulary as if nothing were copied; then the copied words, a few
// hundred, are corrected. A repeated word is written several times with the same values.
#include "copying.h"
#include "product.h"
#include "../word.h"

namespace attnfast {
namespace VARIANT {
namespace {

constexpr int64_t kSum = 1024;  // elements of a partial sum: long sums lose digits

template <class C>
constexpr C infinity() {
  return __builtin_inf();
}

// Clamp a gradient to the largest value that half precision can hold: a weight of 0 times it is 0.
template <class T, class C>
void narrow_to_finite(C x, T& out) {
  const C most = sizeof(T) == sizeof(C) ? infinity<C>() : (C)65504;
  narrow(x > most ? most : x < -most ? -most : x, out);
}

template <class T>
T* at(const View& v, int64_t b, int64_t t) {
  return static_cast<T*>(v.data) + b * v.batch + t * v.row;
}

// A value to subtract, in two parts: a logit and a log-sum-exp may both be large.
template <class C>
struct Shift {
  C high, low;
  explicit Shift(double x) : high((C)x), low((C)(x - (double)high)) {}
};

// Return e^{x - shift}, 0 if it is not a normal number; NaN stays.
template <class C>
Vec<C> exp_below(Vec<C> x, Shift<C> shift) {
  x = x - shift.high - shift.low;
  Vec<C> e = exp(x);
  e = x < (C) - (sizeof(C) == 4 ? 87 : 700) ? Vec<C>{} : e;
  return x == x ? e : x;
}

// Return the sum of f(v, n) over the vectors v of n elements.
template <class C, class F>
C sum_of(int64_t n, F f) {
  C total = 0;
  for (int64_t i = 0; i < n; i += kSum) {
    Vec<C> part = {};
    for (int64_t v = i; v < min(i + kSum, n); v += Vector<C>::width) part += f(v, n - v);
    total += sum<C>(part);
  }
  return total;
}

// Compute mass[w] = sum of the weights of the keys whose word is w, for the words of the source.
template <class T, class C>
void add_up(const T* weights, const int64_t* source, int64_t n, C* mass) {
  for (int64_t i = 0; i < n; ++i) mass[source[i]] = 0;
  for (int64_t i = 0; i < n; ++i) mass[source[i]] += widen(weights[i]);
}

// The inputs and outputs of a row, followed by its scratch.
template <class T, class C>
struct Row {
  int64_t b, t, V, N;
  const T* weights;
  const int64_t* source;
  Gate gate;
  C *mass, *first, *second, *third;  // scratch: N elements each
  const C* x;                        // the logits

  Row(const Copying& a, int64_t index, void* buffer)
      : b(index / a.Tq), t(index % a.Tq), V(a.V), N(a.V + a.X), weights(at<const T>(a.weights, b, t)),
        source(a.source + b * a.Tk), gate(widen(*at<const T>(a.gate, b, t))) {
    mass = static_cast<C*>(buffer);
    first = mass + round_up(N, 16);
    second = first + round_up(N, 16);
    third = second + round_up(N, 16);
    x = gather(at<const T>(a.logits, b, t), 0, 1, V, V, first).data;
  }

  bool generates(int64_t w) const { return w < V && x[w] != -infinity<C>(); }

  // Return word w; its mass must have been computed.
  Word word(int64_t w, double log_sum_exp) const {
    const double log_generated = generates(w) ? x[w] - log_sum_exp + gate.log_p : -infinity<double>();
    return Word(log_generated, mass[w], gate.log_q);
  }
};

// Return the buffer in which n results are computed: `out`, or `scratch` if they must be rounded.
template <class C, class T>
C* computed(T* out, C* scratch) {
  if constexpr (sizeof(T) == sizeof(C)) return out;
  return scratch;
}

template <class C, class T>
void finish(const C* x, int64_t n, T* out) {
  if constexpr (sizeof(T) != sizeof(C))
    for (int64_t i = 0; i < n; ++i) narrow(x[i], out[i]);
}

template <class T, class C = typename Accumulate<T>::type>
void forward(const CopyForward& a, int64_t index, void* buffer) {
  constexpr int kLanes = Vector<C>::width;
  const Row<T, C> r(a, index, buffer);
  T* result = at<T>(a.distribution, r.b, r.t);
  C* out = computed(result, r.second);
  const int64_t V = r.V;

  Vec<C> highest = splat(-infinity<C>());
  for (int64_t v = 0; v < V; v += kLanes) {
    const Vec<C> x = load_part(r.x + v, V - v, -infinity<C>());
    highest = x > highest ? x : highest;
  }
  C top = -infinity<C>();
  for (int i = 0; i < kLanes; ++i) top = highest[i] > top ? highest[i] : top;
  const Shift<C> most(top == -infinity<C>() ? 0 : top);
  const C total = sum_of<C>(V, [&](int64_t v, int64_t n) {
    const Vec<C> e = exp_below(load_part(r.x + v, n, -infinity<C>()), most);
    if (!a.log) store_part(out + v, e, n);
    return e;
  });
  const double log_sum_exp = total == 0 ? -infinity<C>() : top + __builtin_log(total);
  *at<double>(a.log_sum_exp, r.b, r.t) = log_sum_exp;
  if (!a.log) {
    const C scale = total == 0 ? 0 : r.gate.p / total;
    for (int64_t v = 0; v < V; v += kLanes)
      store_part(out + v, load_part(out + v, V - v, (C)0) * scale, V - v);
    for (int64_t v = V; v < r.N; ++v) out[v] = 0;
    for (int64_t i = 0; i < a.Tk; ++i) out[r.source[i]] += r.gate.q * widen(r.weights[i]);
    return finish(out, r.N, result);
  }
  const Shift<C> shift(total == 0 ? 0 : log_sum_exp);
  const C low = r.gate.log_p - shift.low;
  for (int64_t v = 0; v < V; v += kLanes) {
    const Vec<C> y = load_part(r.x + v, V - v, (C)0) - shift.high + low;
    store_part(out + v, y == -infinity<C>() ? splat((C)kLowest) : y, V - v);
  }
  for (int64_t v = V; v < r.N; ++v) out[v] = (C)kLowest;
  add_up(r.weights, r.source, a.Tk, r.mass);
  for (int64_t i = 0; i < a.Tk; ++i) out[r.source[i]] = r.word(r.source[i], log_sum_exp).log_p;
  finish(out, r.N, result);
}

// S, the softmax of the logits x.
template <class C>
struct Softmax {
  const bool none;  // no word can be generated
  const Shift<C> shift;
  explicit Softmax(double log_sum_exp)
      : none(log_sum_exp == -infinity<C>()), shift(none ? 0 : log_sum_exp) {}
  Vec<C> operator()(Vec<C> x) const { return none ? Vec<C>{} : exp_below(x, shift); }
};

// Run the backward of the probabilities. With G their gradient and T = sum_w S G:
//   dlogits = p S (G - T),  dweight_i = (1 - p) G of its word
// Return dgate = p (1 - p) (T - sum_i weight_i G of its word).
template <class T, class C>
C backward_of_probabilities(const CopyBackward& a, const Row<T, C>& r, const Softmax<C>& softmax,
                            const C* G, C* out, T* grad_weights) {
  constexpr int kLanes = Vector<C>::width;
  const int64_t V = r.V;
  const C p = r.gate.p, q = r.gate.q;
  const C total = sum_of<C>(V, [&](int64_t v, int64_t n) {
    const Vec<C> S = softmax(load_part(r.x + v, n, -infinity<C>()));
    store_part(out + v, S, n);
    return S == 0 ? Vec<C>{} : S * load_part(G + v, n, (C)0);
  });
  for (int64_t v = 0; v < V; v += kLanes) {
    const Vec<C> S = load_part(out + v, V - v, (C)0), g = load_part(G + v, V - v, (C)0);
    store_part(out + v, S * p * (g - total), V - v);
  }
  C copied = 0;
  for (int64_t i = 0; i < a.Tk; ++i) {
    const C g = G[r.source[i]];
    copied += widen(r.weights[i]) * g;
    narrow(q * g, grad_weights[i]);
  }
  return p * q * (total - copied);
}

// Run the backward of the logarithms. With G their gradient, R_w = p S_w / P_w the generated share
// of a word, and T = sum_w R G:
//   dlogits = R G - S T,  dweight_i = G (1 - p) / P of its word
// Return dgate = T - p sum G over the possible words.
template <class T, class C>
C backward_of_logarithms(const CopyBackward& a, const Row<T, C>& r, const Softmax<C>& softmax,
                         double log_sum_exp, const C* G, C* out, T* grad_weights) {
  constexpr int kLanes = Vector<C>::width;
  const int64_t V = r.V;
  const C plain = sum_of<C>(V, [&](int64_t v, int64_t n) {
    const Vec<C> x = load_part(r.x + v, n, -infinity<C>());
    return x == -infinity<C>() ? Vec<C>{} : load_part(G + v, n, (C)0);
  });
  double generated = plain, all = plain;  // T, and sum G of the possible words: they nearly cancel
  add_up(r.weights, r.source, a.Tk, r.mass);
  for (int64_t i = 0; i < a.Tk; ++i) {
    const int64_t w = r.source[i];
    const Word word = r.word(w, log_sum_exp);
    const C grad = G[w] * (C)word.ratio;
    narrow_to_finite(grad, grad_weights[i]);
    const C copied = word.slight || grad == 0 ? 0 : widen(r.weights[i]) * grad;  // of G, by key i
    if (r.generates(w)) generated -= copied;
    else all += copied;
  }
  const C total = generated;
  for (int64_t v = 0; v < V; v += kLanes) {
    const Vec<C> x = load_part(r.x + v, V - v, -infinity<C>()), g = load_part(G + v, V - v, (C)0);
    store_part(out + v, x == -infinity<C>() ? Vec<C>{} : g - softmax(x) * total, V - v);
  }
  for (int64_t i = 0; i < a.Tk; ++i) {
    const int64_t w = r.source[i];
    if (!r.generates(w)) continue;
    const C S = exp_below(splat(r.x[w]), softmax.shift)[0];
    out[w] = G[w] * (C)r.word(w, log_sum_exp).generated - S * total;
  }
  return generated - r.gate.p * all;
}

template <class T, class C = typename Accumulate<T>::type>
void backward(const CopyBackward& a, int64_t index, void* buffer) {
  const Row<T, C> r(a, index, buffer);
  const C* G = gather(at<const T>(a.grad_distribution, r.b, r.t), 0, 1, r.N, r.N, r.second).data;
  T* result = at<T>(a.grad_logits, r.b, r.t);
  T* grad_weights = at<T>(a.grad_weights, r.b, r.t);
  C* out = computed(result, r.third);
  const double log_sum_exp = *at<const double>(a.log_sum_exp, r.b, r.t);
  const Softmax<C> softmax(log_sum_exp);
  const C grad_gate = a.log ? backward_of_logarithms<T>(a, r, softmax, log_sum_exp, G, out, grad_weights)
                            : backward_of_probabilities<T>(a, r, softmax, G, out, grad_weights);
  narrow(grad_gate, *at<T>(a.grad_gate, r.b, r.t));
  finish(out, r.V, result);
}

size_t scratch(const Copying& a) {
  const size_t numbers = 4 * round_up(a.V + a.X, 16);
  return (numbers * (a.dtype == Dtype::f64 ? sizeof(double) : sizeof(float)) + 63) / 64 * 64;
}

}  // namespace

extern const CopyingKernels copying = {
    .scratch = scratch,
    .forward = ATTNFAST_BY_DTYPE(forward),
    .backward = ATTNFAST_BY_DTYPE(backward),
};

}  // namespace VARIANT
}  // namespace attnfast
