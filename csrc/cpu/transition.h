// Forward attention's recursion in logarithms, for one instruction set (see vector.h): its softmax
// and the backward. A weight of e^-200 is kept, and no ratio that multiplies a gradient exceeds 1.
#pragma once
#include "../coverage.h"
#include "vector.h"

namespace attnfast {
namespace VARIANT {
namespace {

// Return e^x for a logarithm of at most 0; NaN stays.
template <class C>
inline Vec<C> weight_of(Vec<C> x) {
  const Vec<C> y = exp(x);
  return x < kLeastLogarithm<C> ? Vec<C>{} : x == x ? y : x;
}

// Return e^x for a difference of logarithms, which may be positive; clamped to the range of C.
template <class C>
inline Vec<C> ratio_of(Vec<C> x) {
  return weight_of<C>(x > -kLeastLogarithm<C> ? splat(-kLeastLogarithm<C>) : x);
}

// Return log(1 + y) for y in [0, 1], minus a rounding error at 0, from 2 artanh(y / (2 + y)); its
// error is below 1e-8.
inline Vec<float> log_of_one_more(Vec<float> y) {
  const Vec<float> s = y / (y + 2.f), square = s * s;
  Vec<float> p = square * (1.f / 15) + 1.f / 13;
  constexpr float more[] = {1.f / 11, 1.f / 9, 1.f / 7, 1.f / 5, 1.f / 3, 1.f};
  for (const float c : more) p = p * square + c;
  return s * p * 2.f;
}
inline Vec<double> log_of_one_more(Vec<double> y) {
  for (int i = 0; i < Vector<double>::width; ++i) y[i] = __builtin_log(1 + y[i]);
  return y;
}

// r_j = (1 - u) p_j + u p_{j-1} of log-weights. All three are divided by e^top, the larger term, so
// that an error of top cancels in their quotients.
template <class C>
struct Transition {
  C u, log_stay, log_move;  // log(1 - u), log u
  struct Sum {
    Vec<C> top, here, before, sum;
    Vec<C> log() const { return top == -(C)__builtin_inf() ? top : top + log_of_one_more(sum - (C)1); }
  };

  explicit Transition(C u)
      : u(u), log_stay(__builtin_log((double)(1 - u))), log_move(__builtin_log((double)u)) {}

  Sum operator()(Vec<C> here, Vec<C> before) const {
    const Vec<C> a = here + log_stay, b = before + log_move, top = a > b ? a : b;
    const Vec<C> x = ratio_of<C>(here - top), y = ratio_of<C>(before - top);
    return {top, x, y, (1 - u) * x + u * y};
  }
};

// Allocate a row of n log-weights, or of their gradients; [-1, n] may be read.
template <class C>
C* take_logarithms(Scratch<C>& scratch, int64_t n) {
  return scratch.take(n + 2) + 1;
}
template <class C>
void fill(C* x, int64_t n, C value) {
  for (int64_t j = 0; j < n; ++j) x[j] = value;
}

// Turn scores e into weights proportional to r exp(e). `past`, the log-weights of the previous row,
// becomes the log-weights of this row, and so does `log_weights`: -inf beyond n, at keys that are not
// visible.
template <class C>
void transition_softmax(C u, int64_t n, int64_t Tk, C* past, C* log_weights, C* e) {
  constexpr int V = Vector<C>::width;
  constexpr C none = -__builtin_inf();
  const Transition<C> transition(u);
  Vec<C> most = splat(none);
  for (int64_t j = 0; j < n; j += V) {
    const auto part = [&](const C* x) { return load_part(x + j, n - j, none); };
    const Vec<C> x = part(e) + transition(part(past), part(past - 1)).log();
    most = x > most ? x : most;
    store_part(log_weights + j, x, n - j);
  }
  C top = highest<C>(most);
  if (top == none) top = 0;
  Vec<C> total = {};
  for (int64_t j = 0; j < n; j += V) {
    const Vec<C> x = load_part(log_weights + j, n - j, none) - top, y = weight_of<C>(x);
    total += y;
    store_part(log_weights + j, x, n - j);
    store_part(e + j, y, n - j);
  }
  const C mass = sum<C>(total), inverse = mass == 0 ? 0 : 1 / mass;
  const C log_mass = mass == 0 ? 0 : __builtin_log((double)mass);
  for (int64_t j = 0; j < n; ++j) {
    e[j] *= inverse;
    past[j] = log_weights[j] -= log_mass;
  }
  fill(past + n, Tk - n, none);
  fill(log_weights + n, Tk - n, none);
}

// Compute the gradient of `past`, the log-weights of the previous row, from g, the gradient of
// log(r exp(e)) of a row; `shifted` is scratch. Return the gradient of u.
template <class C>
double transition_backward(C u, int64_t n, int64_t Tk, const C* past, const C* g, C* shifted,
                           C* grad_past) {
  constexpr int V = Vector<C>::width;
  constexpr C none = -__builtin_inf();
  const Transition<C> transition(u);
  Vec<C> grad_u = {};
  for (int64_t j = 0; j < n; j += V) {
    const auto part = [&](const C* x) { return load_part(x + j, n - j, none); };
    const Vec<C> here = part(past), before = part(past - 1), x = load_part(g + j, n - j, (C)0);
    const auto r = transition(here, before);
    const Vec<C> y = x == 0 ? x : x / r.sum;
    const auto times = [&](Vec<C> term) { return y == 0 ? y : y * term; };
    grad_u += times(r.before - r.here);
    store_part(grad_past + j, times(r.here) * (1 - u), n - j);
    store_part(shifted + j, times(r.before) * u, n - j);
  }
  fill(grad_past + n, Tk - n, (C)0);
  for (int64_t j = 1; j < n; ++j) grad_past[j - 1] += shifted[j];
  return VARIANT::sum<C>(grad_u);
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
