// The operators of coverage_attention. A launcher includes this file once and defines the functions
// below.
#pragma once
#include "launch_history.h"

namespace attnfast {
namespace {

// Compute the outputs; `query` determines the device.
void run_forward(const CoverageForward&, const Tensor& query);
void run_backward(const CoverageBackward&, const Tensor& query);
int64_t grad_score_vector_parts(const Problem&);  // see launch_attention.h; without filters

#define ATTNFAST_HISTORY(X)                                        \
  X(Optional, filters, parameters, sum_dtype, {K, channels, taps}) \
  X(Optional, projection, parameters, sum_dtype, {A, K})           \
  X(Optional, penalty, one_or_each_head)                           \
  X(Optional, inverse_fertility, rows, sum_dtype, {Tk})            \
  X(Optional, transition_prob, rows, sum_dtype, {Tq})              \
  X(Optional, coverage, rows, sum_dtype, {Tk})                     \
  X(Optional, previous, rows, sum_dtype, {Tk})

#define ATTNFAST_COVERAGE(X) \
  ATTNFAST_KEYS(X)           \
  ATTNFAST_TERMS(X)          \
  ATTNFAST_LENGTHS(X)        \
  ATTNFAST_HISTORY(X)        \
  ATTNFAST_SCORE(X)          \
  X(std::string, normalisation, normalises, true, given.transition_prob.has_value())

#define ATTNFAST_COVERAGE_SAVED(X)                                              \
  X(Tensor, grad_context, rows, dtype, {Tq, Dv})                                \
  X(Optional, grad_weights, rows, sum_dtype, {Tq, Tk})                          \
  X(Optional, grad_coverage, rows, sum_dtype, {Tk})                             \
  X(Optional, grad_loss, rows, sum_dtype, {})                                   \
  X(Optional, grad_log_weights, optional_with, given.transition_prob, {Tq, Tk}) \
  ATTNFAST_KEYS(X)                                                              \
  ATTNFAST_LENGTHS(X)                                                           \
  ATTNFAST_HISTORY(X)                                                           \
  X(Tensor, weights, rows, sum_dtype, {Tq, Tk})                                 \
  X(Tensor, log_weights, present_with, given.transition_prob, {Tq, Tk})         \
  X(Tensor, sigmoid_sum, present_if, given.normalisation == "sigmoid", {Tq})

#define ATTNFAST_COVERAGE_BACKWARD(X)                                                \
  ATTNFAST_COVERAGE_SAVED(X)                                                         \
  ATTNFAST_SCORE(X)                                                                  \
  X(std::string, normalisation, normalises, true, given.transition_prob.has_value()) \
  X(bool, need_grad_query, any)                                                      \
  X(bool, need_grad_key, any)                                                        \
  X(bool, need_grad_score, any)                                                      \
  X(bool, need_grad_filters, any)

#define ATTNFAST_COVERAGE_BACKWARD_INTO(X)                                           \
  ATTNFAST_COVERAGE_SAVED(X)                                                         \
  X(Tensor, sum_key, packed_rows, {Tk, A})                                           \
  X(Tensor, sum_score_vector, packed_rows, {A})                                      \
  X(Tensor, sum_filters, packed_rows, {K, channels, taps})                           \
  X(Tensor, sum_projection, packed_rows, {A, K})                                     \
  ATTNFAST_SCORE(X)                                                                  \
  X(std::string, normalisation, normalises, true, given.transition_prob.has_value()) \
  X(bool, need_grad_query, any)                                                      \
  X(bool, need_grad_score, any)

// The sizes of attention and those of the filters.
struct CoverageChecker : AttentionChecker, FilterSizes {
  template <class Arguments>
  explicit CoverageChecker(const Arguments& given) : AttentionChecker(given), FilterSizes(given, *this) {
    check(!given.transition_prob || given.previous, "previous");
    check(!given.transition_prob || given.normalisation == "softmax", "transition_prob");
    if constexpr (requires { given.sum_key; }) check(K > 0, "filters");
  }

  bool one_or_each_head(const Optional& x) const {
    return sizes(x, sum_dtype, {1}) || sizes(x, sum_dtype, {heads});
  }

  // Rows if they are present or another argument is given, else size [0].
  bool present_if(const Tensor& x, bool present, Sizes wanted) const {
    return present ? rows(x, sum_dtype, wanted) : sizes(x, sum_dtype, {0});
  }
  bool present_with(const Tensor& x, const Optional& other, Sizes wanted) const {
    return present_if(x, other.has_value(), wanted);
  }

  bool optional_with(const Optional& x, const Optional& other, Sizes wanted) const {
    return !x || present_with(*x, other, wanted);
  }

  // Contiguous rows into which gradients are accumulated.
  bool packed_rows(const Tensor& x, Sizes wanted) const {
    return rows(x, sum_dtype, wanted) && x.is_contiguous();
  }
};

ATTNFAST_ARGUMENTS(CoverageArguments, "coverage_attention", ATTNFAST_COVERAGE, CoverageChecker)
ATTNFAST_ARGUMENTS(CoverageBackwardArguments, "coverage_attention_backward", ATTNFAST_COVERAGE_BACKWARD,
                   CoverageChecker)
ATTNFAST_ARGUMENTS(CoverageBackwardIntoArguments, "coverage_attention_backward_into",
                   ATTNFAST_COVERAGE_BACKWARD_INTO, CoverageChecker)
ATTNFAST_RESULTS(CoverageOutputs, context, weights, coverage, loss, log_weights, sigmoid_sum)
ATTNFAST_RESULTS(CoverageGradients, grad_query, grad_key, grad_value, grad_score_vector, grad_score,
                 grad_filters, grad_projection, grad_penalty, grad_inverse_fertility, grad_transition_prob,
                 grad_coverage, grad_previous)

CoverageOutputs coverage_attention(const CoverageArguments& given) {
  const CoverageArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  CoverageForward a{};
  fill_problem(given, fit, a, keep);
  fill_history(given, fit, a, keep);
  const Tensor &query = given.query, &key = given.key;
  const std::vector<int64_t> rows = shape(query, a.Tk), queries(rows.begin(), rows.end() - 1);
  const std::vector<int64_t> keys(key.sizes().begin(), key.sizes().end() - 1);
  const Tensor context = empty_rows(query, a.Dv, fit.dtype);
  const Tensor weights = empty(query.device(), rows, fit.sum_dtype);
  const Tensor coverage = empty(query.device(), keys, fit.sum_dtype);
  const Tensor loss = empty(query.device(), {keys.begin(), keys.end() - 1}, fit.sum_dtype);
  const Tensor log_weights = empty_if(given.transition_prob.has_value(), query, rows, fit.sum_dtype);
  const Tensor sigmoid_sum = empty_if(given.normalisation == "sigmoid", query, queries, fit.sum_dtype);
  a.context = view(context);
  a.weights = view(weights);
  if (given.normalisation == "sigmoid") a.sigmoid_sum = view(sigmoid_sum, false);
  a.coverage_out = view(coverage, false);
  a.loss = View{data_or_sentinel(loss), a.H, 1};
  if (given.transition_prob) a.log_weights = view(log_weights);
  run_forward(a, query);
  return {.context = context,
          .weights = weights,
          .coverage = coverage,
          .loss = loss,
          .log_weights = log_weights,
          .sigmoid_sum = sigmoid_sum};
}

// Accumulate the gradients into sums over steps, one for each sequence and head.
void put_sums(const CoverageBackwardIntoArguments& given, const CoverageChecker& fit, CoverageBackward& a) {
  const bool heads = fit.lead == 2;
  const auto of = [&](const Tensor& x, int64_t row) {
    return View{data_or_sentinel(x), x.stride(0), heads ? x.stride(1) : 0, row};
  };
  a.sums = true;
  a.grad_key = of(given.sum_key, fit.A);
  a.grad_score_vector = of(given.sum_score_vector, fit.A);
  a.grad_filters = of(given.sum_filters, fit.taps);
  a.grad_projection = of(given.sum_projection, fit.K);
}

// Allocate the gradient of an argument of the accumulation dtype, in its shape.
Tensor gradient_of_numbers(const Optional& x, const Tensor& like, const CoverageChecker& fit, View& out) {
  if (!x) return empty_if(false, like, {}, fit.sum_dtype);
  const Tensor gradient =
      empty(x->device(), std::vector<int64_t>(x->sizes().begin(), x->sizes().end()), fit.sum_dtype);
  out = view(gradient, false);
  return gradient;
}

// Fill in the gradients of the results.
template <class Arguments>
void put_gradients(const Arguments& given, CoverageBackward& a, KeepAlive& keep) {
  a.grad_context = view_of_rows(given.grad_context, keep);
  if (given.grad_weights) a.grad_weights = view_of_rows(*given.grad_weights, keep);
  a.grad_coverage_out = view_of_numbers(given.grad_coverage, keep);
  a.grad_loss = view_of_heads(given.grad_loss, a.H, keep);
  if (given.grad_log_weights && given.transition_prob)
    a.grad_log_weights = view_of_rows(*given.grad_log_weights, keep);
}

// Both backwards. The one that accumulates into sums returns no gradients of key, value, weight and
// filters. The function is long because it names each of twelve results.
template <class Arguments>
CoverageGradients coverage_gradients(const Arguments& given) {
  constexpr bool into = std::is_same_v<Arguments, CoverageBackwardIntoArguments>;
  const typename Arguments::ArgumentChecker fit(given);
  bool need_grad_key = false, need_grad_filters = false;
  if constexpr (!into) {
    need_grad_key = given.need_grad_key;
    need_grad_filters = given.need_grad_filters && given.filters;
  }
  KeepAlive keep;
  CoverageBackward a{};
  fill_problem(given, fit, a, keep);
  fill_history(given, fit, a, keep);
  const Tensor& query = given.query;
  const Tensor grad_query = gradient_of_rows(given.need_grad_query, query, a.grad_query);
  const Tensor grad_key = gradient_of_rows(need_grad_key, given.key, a.grad_key);
  const Tensor grad_value = gradient_of_rows(need_grad_key, given.value, a.grad_value);
  const Tensor grad_inverse_fertility =
      gradient_of_numbers(given.inverse_fertility, query, fit, a.grad_inverse_fertility);
  const Tensor grad_transition_prob =
      gradient_of_numbers(given.transition_prob, query, fit, a.grad_transition_prob);
  const Tensor grad_coverage = gradient_of_numbers(given.coverage, query, fit, a.grad_coverage_in);
  const Tensor grad_previous = gradient_of_numbers(given.previous, query, fit, a.grad_previous);
  const bool need_grad_score_vector = need_grad_key && given.score_vector;
  std::optional<int64_t> vector_parts;
  if (need_grad_score_vector) vector_parts = fit.K ? 1 : grad_score_vector_parts(a);
  const GradientParts parts(query, fit, vector_parts, need_grad_filters, given.penalty.has_value(), a);
  if constexpr (into) {
    put_sums(given, fit, a);
    for (Tensor x : {parts.penalty, grad_inverse_fertility})
      if (x.numel()) torch::stable::zero_(x);
  }

  const Tensor weights = packed(given.weights), log_weights = packed(given.log_weights),
               sigmoid_sum = packed(given.sigmoid_sum);
  const Tensor grad_score = empty(query.device(), shape(query, a.Tk), fit.sum_dtype);
  a.weights = view(weights);
  if (given.transition_prob) a.log_weights = view(log_weights);
  if (given.normalisation == "sigmoid") a.sigmoid_sum = view(sigmoid_sum, false);
  a.grad_score = view(grad_score);
  a.grad_score_returned = given.need_grad_score;
  put_gradients(given, a, keep);
  run_backward(a, query);

  const Optional& penalty = given.penalty;
  return {
      .grad_query = grad_query,
      .grad_key = grad_key,
      .grad_value = grad_value,
      .grad_score_vector = need_grad_score_vector ? sum_of_parts(parts.score_vector, {0, 2},
                                                                 given.score_vector->dim() == 2, fit.dtype)
                                                  : empty_if(false, query, {}, fit.dtype),
      .grad_score = given.need_grad_score ? grad_score : empty_if(false, query, {}, fit.sum_dtype),
      .grad_filters = need_grad_filters
                          ? sum_of_parts(parts.filters, {0}, given.filters->dim() == 4, fit.sum_dtype)
                          : parts.filters,
      .grad_projection = need_grad_filters ? sum_of_parts(parts.projection, {0},
                                                          given.projection->dim() == 3, fit.sum_dtype)
                                           : parts.projection,
      .grad_penalty = penalty ? parts.of_penalty(penalty->size(0), fit.sum_dtype) : parts.penalty,
      .grad_inverse_fertility = grad_inverse_fertility,
      .grad_transition_prob = grad_transition_prob,
      .grad_coverage = grad_coverage,
      .grad_previous = grad_previous,
  };
}

CoverageGradients coverage_attention_backward(const CoverageBackwardArguments& given) {
  return coverage_gradients(given);
}

CoverageGradients coverage_attention_backward_into(const CoverageBackwardIntoArguments& given) {
  return coverage_gradients(given);
}

using CoverageOperators =
    Operators<coverage_attention, coverage_attention_backward, coverage_attention_backward_into>;

}  // namespace

// Return the lists above, for a test.
ATTNFAST_EXPORT const char* attnfast_coverage_operators() {
  static const std::string text = CoverageOperators::listed();
  return text.c_str();
}

}  // namespace attnfast
