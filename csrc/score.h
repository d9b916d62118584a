// The scores, and their code shared by CPU and CUDA. To add one, add its name to the list, f and
// f'.
#pragma once

#if defined(__CUDACC__)
#define ATTNFAST_DEVICE __device__
#else
#define ATTNFAST_DEVICE
#endif

namespace attnfast {

// q . k, and sum_a w_a f(q_a + k_a) under the name of f, as in attnfast/ops/arguments.py.
#define ATTNFAST_ACTIVATIONS(X) X(relu) X(leaky_relu)  // all except tanh
#define ATTNFAST_NAME(name) name,
enum class Score { dot, tanh, ATTNFAST_ACTIVATIONS(ATTNFAST_NAME) };
#undef ATTNFAST_NAME

namespace {

// A score as a compile-time constant.
template <Score S>
struct Known {
  static constexpr Score score = S;
};

// Call f with an additive score, or with any score, as a compile-time constant.
template <class F>
inline auto by_activation(Score score, const F& f) {
  switch (score) {
#define ATTNFAST_CASE(name) \
  case Score::name: return f(Known<Score::name>{});
    ATTNFAST_ACTIVATIONS(ATTNFAST_CASE)
#undef ATTNFAST_CASE
    default: return f(Known<Score::tanh>{});
  }
}
template <class F>
inline auto by_score(Score score, const F& f) {
  return score == Score::dot ? f(Known<Score::dot>{}) : by_activation(score, f);
}

// Return f(z) for every activation except tanh, which each backend computes differently. V is a
// scalar C or a vector of C.
template <Score S, class C, class V>
ATTNFAST_DEVICE inline V activation(V z) {
  if constexpr (S == Score::leaky_relu) return z < V{} ? z * C(0.2) : z;
  else return z < V{} ? V{} : z;  // NaN stays NaN
}

// Return g f'(z), given g and f(z).
template <Score S, class C, class V>
ATTNFAST_DEVICE inline V times_slope(V g, V f) {
  if constexpr (S == Score::leaky_relu) return f > V{} ? g : g * C(0.2);
  else return f > V{} ? g : V{};
}

}  // namespace
}  // namespace attnfast
