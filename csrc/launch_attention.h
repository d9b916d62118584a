// The two operators of attention. A launcher includes this file once and defines the functions below.
#pragma once
#include "launch.h"

namespace attnfast {
namespace {

// Return the number of rows of grad_score_vector for each [B, H].
int64_t grad_score_vector_parts(const Problem&);
// Compute the outputs; `query` determines the device.
void run_forward(const Forward&, const Tensor& query);
void run_backward(const Backward&, const Tensor& query);

#define ATTNFAST_SPAN(X)                                     \
  X(Optional, key_bounds, spans)                             \
  X(int64_t, columns, between, 0, given.key_bounds ? Tk : 0) \
  X(Optional, prepared, exponentials, given.score)

#define ATTNFAST_ATTENTION(X)   \
  ATTNFAST_KEYS(X)              \
  ATTNFAST_TERMS(X)             \
  ATTNFAST_LENGTHS(X)           \
  ATTNFAST_SPAN(X)              \
  ATTNFAST_SCORE(X)             \
  X(bool, need_statistics, any) \
  X(bool, need_weights, any)

#define ATTNFAST_ATTENTION_BACKWARD(X)            \
  X(Tensor, grad_context, rows, own, {Tq, Dv})    \
  X(Optional, grad_weights, rows, sums, {Tq, W})  \
  X(Optional, grad_log_sum_exp, rows, sums, {Tq}) \
  ATTNFAST_KEYS(X)                                \
  ATTNFAST_LENGTHS(X)                             \
  ATTNFAST_SPAN(X)                                \
  X(Tensor, weights, rows, sums, {Tq, W})         \
  X(Optional, grad_score, rows, sums, {Tq, W})    \
  ATTNFAST_SCORE(X)                               \
  X(bool, need_grad_query, any)                   \
  X(bool, need_grad_key, any)                     \
  X(bool, need_grad_score, any)

ATTNFAST_ARGUMENTS(AttentionArguments, "attention", ATTNFAST_ATTENTION, AttentionChecker)
ATTNFAST_ARGUMENTS(AttentionBackwardArguments, "attention_backward", ATTNFAST_ATTENTION_BACKWARD,
                   AttentionChecker)
ATTNFAST_RESULTS(AttentionOutputs, context, weights, log_sum_exp, statistics)
ATTNFAST_RESULTS(AttentionGradients, grad_query, grad_key, grad_value, grad_score_vector, grad_score)

AttentionOutputs attention(const AttentionArguments& given) {
  const AttentionArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  Forward a{};
  fill_problem(given, fit, a, keep);
  const Tensor& query = given.query;
  std::vector<int64_t> rows = shape(query, a.W);
  const Tensor weights = empty_if(given.need_weights, query, rows, fit.sums);
  rows.pop_back();
  const Tensor log_sum_exp = empty(query.device(), rows, fit.sums);
  rows.push_back(kStatistics);
  const Tensor statistics = empty_if(given.need_statistics, query, rows, fit.sums);
  const Tensor context = empty_rows(query, a.Dv, fit.own);
  a.context = view(context);
  if (given.need_weights) a.weights = view(weights);
  a.log_sum_exp = view(log_sum_exp, false);
  if (given.need_statistics) a.statistics = view(statistics);
  run_forward(a, query);
  return {.context = context, .weights = weights, .log_sum_exp = log_sum_exp, .statistics = statistics};
}

AttentionGradients attention_backward(const AttentionBackwardArguments& given) {
  const AttentionBackwardArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  Backward a{};
  fill_problem(given, fit, a, keep);
  const Tensor& query = given.query;
  const Tensor grad_query = gradient_of_rows(given.need_grad_query, query, a.grad_query);
  const Tensor grad_key = gradient_of_rows(given.need_grad_key, given.key, a.grad_key);
  const Tensor grad_value = gradient_of_rows(given.need_grad_key, given.value, a.grad_value);
  const bool need_grad_score_vector = given.need_grad_key && given.score_vector;
  const std::vector<int64_t> parts = {a.B, a.H, need_grad_score_vector ? grad_score_vector_parts(a) : 0,
                                      a.A};
  const Tensor grad_score_vector = empty_if(need_grad_score_vector, query, parts, fit.sums);
  if (need_grad_score_vector) a.grad_score_vector = view(grad_score_vector);
  a.grad_score_given = given.grad_score.has_value();
  a.grad_score_returned = given.need_grad_score && !a.grad_score_given;
  const Tensor grad_score = a.grad_score_given ? packed(*given.grad_score)
                                               : empty(query.device(), shape(given.weights, a.W), fit.sums);
  const Tensor weights = packed(given.weights);
  a.weights = view(weights);
  a.grad_score = view(grad_score);
  a.grad_context = view_of_rows(given.grad_context, keep);
  if (given.grad_weights) a.grad_weights = view_of_rows(*given.grad_weights, keep);
  if (given.grad_log_sum_exp) a.grad_log_sum_exp = view(*given.grad_log_sum_exp, false);
  run_backward(a, query);

  return {
      .grad_query = grad_query,
      .grad_key = grad_key,
      .grad_value = grad_value,
      .grad_score_vector = need_grad_score_vector ? sum_of_parts(grad_score_vector, {0, 2},
                                                                 given.score_vector->dim() == 2, fit.own)
                                                  : grad_score_vector,
      .grad_score = a.grad_score_returned ? grad_score : empty_if(false, query, {}, fit.sums),
  };
}

using AttentionOperators = Operators<attention, attention_backward>;

}  // namespace

// Return the lists above, for a test.
ATTNFAST_EXPORT const char* attnfast_attention_operators() {
  static const std::string text = AttentionOperators::listed();
  return text.c_str();
}

}  // namespace attnfast
