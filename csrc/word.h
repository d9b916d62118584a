// Code of copy_distribution shared by CPU and CUDA: its few hundred source words. It computes in
// double, because differences of large logarithms become exponents in log space. Internal to every
// translation unit that includes it; without math.h, see cpu/vector.h.
#pragma once
#include "copying.h"

namespace attnfast {
namespace {

constexpr double kLowest = -87.336544750553102;     // the logarithm of the smallest normal float
constexpr double kMaxLogGradient = 80;              // e^80 is the largest gradient
constexpr double kSlight = 1.8048513878454153e-35;  // e^-80; a smaller mass counts as 0

#if defined(__CUDACC__)
ATTNFAST_DEVICE inline double exponential(double x) { return ::exp(x); }
ATTNFAST_DEVICE inline double logarithm(double x) { return ::log(x); }
#else
inline double exponential(double x) { return __builtin_exp(x); }
inline double logarithm(double x) { return __builtin_log(x); }
#endif

ATTNFAST_DEVICE inline double exp_of(double x) {
  return exponential(x > kMaxLogGradient ? kMaxLogGradient : x);
}

// p = sigmoid(gate) and q = 1 - p, and their logarithms.
struct Gate {
  double p, q, log_p, log_q;
  ATTNFAST_DEVICE explicit Gate(double gate) {
    const double e = exponential(gate < 0 ? gate : -gate), sum = logarithm(1 + e);
    const double likely = 1 / (1 + e), unlikely = e / (1 + e);
    p = gate < 0 ? unlikely : likely;
    q = gate < 0 ? likely : unlikely;
    log_p = (gate < 0 ? gate : 0) - sum;
    log_q = (gate < 0 ? 0 : -gate) - sum;
  }
};

// A word of the source in log space: log P, the generated share of P, and q / P.
struct Word {
  double log_p, generated, ratio;
  bool slight;
  // log_generated = log(p S), copied = C
  ATTNFAST_DEVICE Word(double log_generated, double copied, double log_q) {
    const double d = log_generated - log_q, u = exp_of(d);
    slight = copied < kSlight;
    if (slight) {
      const bool never = log_generated == -__builtin_huge_val();
      log_p = never ? kLowest : log_generated;
      generated = never ? 0 : 1;
      ratio = never ? 0 : exp_of(-d);
      return;
    }
    ratio = 1 / (copied + u);
    generated = u * ratio;
    log_p = d > 0 ? log_generated + logarithm(1 + copied * exp_of(-d)) : log_q + logarithm(copied + u);
  }
};

}  // namespace
}  // namespace attnfast
