// The scores, and their code shared by CPU and CUDA. To add one, add it to the enum and its name to
// the list, then f and f'.
#pragma once

#if defined(__CUDACC__)
#define ATTNFAST_DEVICE __device__
#else
#define ATTNFAST_DEVICE
#endif

namespace attnfast {

// q . k, and sum_a w_a f(q_a + k_a) under the name of f, as in attnfast/ops/arguments.py.
enum class Score { dot, tanh, relu, leaky_relu };

namespace {

// The constants of scores. tests/test_constants.py compares those of kernels/attention.py with them.
// Bound of max|q| + max|k| for the factored tanh: up to it, d = 1 + e^{2(q + k)} stays below 2^63.
constexpr double kFactoredSumLimit = 21.8;
constexpr double kLeakySlope = 0.2;

constexpr const char* kScoreNames[] = {"dot", "tanh", "relu", "leaky_relu"};
constexpr int kScores = sizeof kScoreNames / sizeof *kScoreNames;

// A score as a compile-time constant.
template <Score S>
struct Known {
  static constexpr Score score = S;
};

// Call f with a score, which is First or a later one, as a compile-time constant.
template <Score First, class F>
inline auto by_score_from(Score score, const F& f) {
  constexpr int next = static_cast<int>(First) + 1;
  if constexpr (next < kScores)
    if (score != First) return by_score_from<Score{next}>(score, f);
  return f(Known<First>{});
}
// Call f with any score, or with an additive score.
template <class F>
inline auto by_score(Score score, const F& f) {
  return by_score_from<Score::dot>(score, f);
}
template <class F>
inline auto by_activation(Score score, const F& f) {
  return by_score_from<Score::tanh>(score, f);
}

// Return f(z) for every activation except tanh, which each backend computes differently. V is a
// scalar C or a vector of C. NaN stays NaN.
template <Score S, class C, class V>
ATTNFAST_DEVICE inline V activation(V z) {
  if constexpr (S == Score::leaky_relu) return z < V{} ? z * C(kLeakySlope) : z;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  else if constexpr (sizeof(V) == 4) {  // one instruction instead of two
    V f;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(f) : "f"(z));
    return f;
  }
#endif
  else
    return z < V{} ? V{} : z;
}

// Return g f'(z), given g and f(z).
template <Score S, class C, class V>
ATTNFAST_DEVICE inline V times_slope(V g, V f) {
  if constexpr (S == Score::leaky_relu) return f > V{} ? g : g * C(kLeakySlope);
  else return f > V{} ? g : V{};
}

}  // namespace
}  // namespace attnfast
