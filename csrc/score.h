// The scores, and what CPU and CUDA share of them. To add one: its name in the list, f and f'.
#pragma once

#if defined(__CUDACC__)
#define ATTNFAST_DEVICE __device__
#else
#define ATTNFAST_DEVICE
#endif

namespace attnfast {

// q . k, and sum_a w_a f(q_a + k_a) by the name of f, as attnfast/ops/arguments.py lists them.
#define ATTNFAST_ACTIVATIONS(X) X(relu) X(leaky_relu)  // but tanh
#define ATTNFAST_NAME(name) name,
enum class Score { dot, tanh, ATTNFAST_ACTIVATIONS(ATTNFAST_NAME) };
#undef ATTNFAST_NAME

namespace {

// A score that is known where code is compiled.
template <Score S>
struct Known {
  static constexpr Score score = S;
};

// Call f with an additive score, known; with any score.
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

// f(z) of every activation but tanh, which each backend takes in its own way. V is a number C or a vector
// of them.
template <Score S, class C, class V>
ATTNFAST_DEVICE inline V activation(V z) {
  if constexpr (S == Score::leaky_relu) return z < V{} ? z * C(0.2) : z;
  else return z < V{} ? V{} : z;  // and NaN as it is
}

// g f'(z), of g and f(z)
template <Score S, class C, class V>
ATTNFAST_DEVICE inline V times_slope(V g, V f) {
  if constexpr (S == Score::leaky_relu) return f > V{} ? g : g * C(0.2);
  else return f > V{} ? g : V{};
}

}  // namespace
}  // namespace attnfast
