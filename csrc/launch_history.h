// Code shared by launchers of attention with a history: its arguments become views of a History,
// and the gradients of its parameters are computed in parts.
#pragma once
#include "coverage.h"
#include "launch.h"

namespace attnfast {
namespace {

// The sizes of the filters; K is 0 without filters.
struct FilterSizes {
  int64_t K = 0, channels = 2, taps = 0;

  template <class Arguments>
  FilterSizes(const Arguments& given, const ArgumentChecker& fit) {
    if constexpr (requires { given.filters; }) {
      const Optional &filters = given.filters, &projection = given.projection;
      fit.check(filters.has_value() == projection.has_value(), filters ? "projection" : "filters");
      if (!filters) return;
      const int64_t n = filters->dim();
      fit.check(n == 3 || n == 4, "filters");
      fit.check(projection->dim() == n - 1, "projection");
      K = filters->size(n - 3);
      channels = filters->size(n - 2);
      taps = filters->size(n - 1);
      fit.check((channels == 1 || channels == 2) && taps % 2 == 1, "filters");
      fit.check(given.score_vector.has_value() || K == 0, "score_vector");
    }
  }
};

// Return a contiguous view [B, (H,) n], absent without x.
View view_of_numbers(const Optional& x, KeepAlive& keep) {
  if (!x) return {};
  keep.push_back(packed(*x));
  return view(keep.back(), false);
}

// Return a contiguous view [B, (H)], absent without x.
View view_of_heads(const Optional& x, int64_t heads, KeepAlive& keep) {
  if (!x) return {};
  keep.push_back(packed(*x));
  return {data_or_sentinel(keep.back()), heads, 1};
}

template <class Arguments, class Sizes>
void fill_history(const Arguments& given, const Sizes& fit, History& h, KeepAlive& keep) {
  h.filters_count = fit.K;
  h.channels = fit.channels;
  h.taps = fit.taps;
  if (fit.K) {
    const bool of_heads = given.filters->dim() == 4;
    h.filters = view_of_parameters(*given.filters, of_heads, keep);
    h.projection = view_of_parameters(*given.projection, of_heads, keep);
  }
  if (given.penalty) h.penalty = view_of_parameters(*given.penalty, given.penalty->size(0) != 1, keep);
  h.inverse_fertility = view_of_numbers(given.inverse_fertility, keep);
  h.coverage_in = view_of_numbers(given.coverage, keep);
  h.previous = view_of_numbers(given.previous, keep);
  h.transition_prob = view_of_numbers(given.transition_prob, keep);
  h.sigmoid = given.normalisation == "sigmoid";
}

// The parts of the parameters' gradients, one or several for every sequence and head, which are
// summed at the end.
struct GradientParts {
  Tensor score_vector, filters, projection, penalty;

  template <class Sizes>
  static Tensor part(bool wanted, const Tensor& like, const Sizes& fit, std::vector<int64_t> sizes,
                     View& out) {
    sizes.insert(sizes.begin(), {fit.B, fit.heads});
    const Tensor x = empty_if(wanted, like, sizes, fit.sum_dtype);
    if (wanted) out = View{data_or_sentinel(x), x.stride(0), x.stride(1), sizes.back()};
    return x;
  }

  // Allocate the requested gradients and store their Views in a. The gradient of the score vector has
  // vector_parts parts; nullopt: not requested.
  template <class Sizes>
  GradientParts(const Tensor& like, const Sizes& fit, std::optional<int64_t> vector_parts, bool of_filters,
                bool of_penalty, CoverageBackward& a)
      : score_vector(part(vector_parts.has_value(), like, fit, {vector_parts.value_or(0), fit.A},
                          a.grad_score_vector)),
        filters(part(of_filters, like, fit, {fit.K, fit.channels, fit.taps}, a.grad_filters)),
        projection(part(of_filters, like, fit, {fit.A, fit.K}, a.grad_projection)),
        penalty(part(of_penalty, like, fit, {}, a.grad_penalty)) {}

  // Return the gradient of a penalty, [1] or [H].
  Tensor of_penalty(int64_t count, ScalarType dtype) const {
    return torch::stable::reshape(sum_of_parts(penalty, {0}, count != 1, dtype), {count});
  }
};

}  // namespace
}  // namespace attnfast
