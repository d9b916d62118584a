// Forward attention's recursion in logarithms on the GPU; cpu/transition.h is that of the CPU.
#pragma once
#include "../coverage.h"

namespace attnfast {
namespace {

// r_j = (1 - u) p_j + u p_{j-1} of log-weights: see cpu/transition.h.
template <class C>
struct Transition {
  const C* past;
  C u, log_stay, log_move;  // log(1 - u), log u
  struct Sum {
    C top, here, before, sum;
    __device__ C log() const { return top == -INFINITY ? top : top + ::log(sum); }
  };

  __device__ Transition(const C* past, const C* u)
      : past(past), u(u ? *u : C(0)), log_stay(::log(1 - this->u)), log_move(::log(this->u)) {}

  __device__ Sum operator[](int64_t j) const {
    const C here = past[j], before = j ? past[j - 1] : -INFINITY;
    const C a = here + log_stay, b = before + log_move, top = a > b ? a : b;
    const C x = ratio(here - top), y = ratio(before - top);
    return {top, x, y, (1 - u) * x + u * y};
  }
  __device__ static C ratio(C x) { return exp(x > -kLeastLogarithm<C> ? -kLeastLogarithm<C> : x); }
};

}  // namespace
}  // namespace attnfast
