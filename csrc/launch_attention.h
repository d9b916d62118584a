// The two operators of attention, and its scores alone. A launcher includes this file once and
// defines the functions below.
#pragma once
#include "launch.h"

namespace attnfast {
namespace {

// Return the number of rows of grad_score_vector for each [B, H].
int64_t grad_score_vector_parts(const Problem&);
// Compute the outputs; `query` determines the device.
void run_forward(const Forward&, const Tensor& query);
void run_backward(const Backward&, const Tensor& query);
// Compute the scores of all rows and keys, stored as weights.
void run_scores(const Forward&, const Tensor& query);

#define ATTNFAST_SPAN(X)                                     \
  X(Optional, key_bounds, spans)                             \
  X(int64_t, columns, between, 0, given.key_bounds ? Tk : 0) \
  X(Optional, key_exponentials, exponentials, given.score)

#define ATTNFAST_ATTENTION(X)               \
  ATTNFAST_KEYS(X)                          \
  ATTNFAST_TERMS(X)                         \
  ATTNFAST_LENGTHS(X)                       \
  ATTNFAST_SPAN(X)                          \
  ATTNFAST_SCORE(X)                         \
  X(std::string, normalisation, normalises) \
  X(bool, need_statistics, any)             \
  X(bool, need_weights, any)

#define ATTNFAST_ATTENTION_BACKWARD(X)                 \
  X(Tensor, grad_context, rows, dtype, {Tq, Dv})       \
  X(Optional, grad_weights, rows, sum_dtype, {Tq, W})  \
  X(Optional, grad_log_sum_exp, rows, sum_dtype, {Tq}) \
  ATTNFAST_KEYS(X)                                     \
  ATTNFAST_LENGTHS(X)                                  \
  ATTNFAST_SPAN(X)                                     \
  X(Tensor, weights, rows, sum_dtype, {Tq, W})         \
  X(Optional, grad_score, rows, sum_dtype, {Tq, W})    \
  ATTNFAST_SCORE(X)                                    \
  X(std::string, normalisation, normalises)            \
  X(bool, need_grad_query, any)                        \
  X(bool, need_grad_key, any)                          \
  X(bool, need_grad_score, any)

// ---- matrix products of PyTorch -----------------------------------------------------------------

// Smaller matrices than this are multiplied by the kernels of this library.
constexpr int64_t kLibraryRows = 8, kLibraryColumns = 64;

// Return true if PyTorch's GEMM may be faster than our kernels for the products with values and, for
// dot scores, with queries and keys.
bool fits_library(const Problem& a) {
  const bool is_wide = a.dtype == Dtype::f32 || a.dtype == Dtype::f64;
  return is_wide && !a.key_bounds.data && a.B * a.H > 0 && a.Tq >= kLibraryRows &&
         std::max(a.A, a.Dv) >= kLibraryColumns;
}

// Return true if one call can take the matrices of all sequences and heads.
bool even(const Problem& a, const View& x) { return a.H == 1 || a.B == 1 || x.batch == a.H * x.head; }
bool dense(const Problem& a, const View& x, int64_t rows, int64_t columns) {
  return !x.data || (x.row == columns && even(a, x) && (a.H == 1 ? x.batch : x.head) == rows * columns);
}

View transposed(View x) {
  std::swap(x.row, x.column);
  return x;
}

// Return the matrices of all heads of `count` sequences from b on, [count H, rows, columns].
Tensor matrices(const Problem& a, const View& x, int64_t rows, int64_t columns,
                const torch::stable::Device& device, int64_t b, int64_t count) {
  const bool doubles = a.dtype == Dtype::f64;
  return torch::stable::from_blob(static_cast<char*>(x.data) + b * x.batch * (doubles ? 8 : 4),
                                  {count * a.H, rows, columns},
                                  {a.H == 1 ? x.batch : x.head, x.row, x.column}, device,
                                  doubles ? ScalarType::Double : ScalarType::Float);
}

// ---- attention ----------------------------------------------------------------------------------

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
  const Tensor weights = empty_if(given.need_weights, query, rows, fit.sum_dtype);
  rows.pop_back();
  const Tensor log_sum_exp = empty(query.device(), rows, fit.sum_dtype);
  rows.push_back(kStatistics);
  const Tensor statistics = empty_if(given.need_statistics, query, rows, fit.sum_dtype);
  const Tensor context = empty_rows(query, a.Dv, fit.dtype);
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
  const Tensor grad_score_vector = empty_if(need_grad_score_vector, query, parts, fit.sum_dtype);
  if (need_grad_score_vector) a.grad_score_vector = view(grad_score_vector);
  a.grad_score_given = given.grad_score.has_value();
  a.grad_score_returned = given.need_grad_score && !a.grad_score_given;
  const Tensor grad_score = a.grad_score_given
                                ? packed(*given.grad_score)
                                : empty(query.device(), shape(given.weights, a.W), fit.sum_dtype);
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
                                                                 given.score_vector->dim() == 2, fit.dtype)
                                                  : grad_score_vector,
      .grad_score = a.grad_score_returned ? grad_score : empty_if(false, query, {}, fit.sum_dtype),
  };
}

// ---- scores -------------------------------------------------------------------------------------

#define ATTNFAST_SCORES(X)                        \
  X(Tensor, query, rows, dtype, {Tq, A})          \
  X(Tensor, key, rows, dtype, {Tk, A})            \
  X(Tensor, score_vector, parameters, dtype, {A}) \
  X(std::string, score, goes_with, given.score_vector)

ATTNFAST_ARGUMENTS(ScoreArguments, "scores", ATTNFAST_SCORES, KeysChecker)
ATTNFAST_RESULTS(ScoreOutputs, scores)

ScoreOutputs scores(const ScoreArguments& given) {
  const ScoreArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  Forward a{};
  a.dtype = dtype_of(given.query);
  a.score = score_of(given.score);
  a.scale = 1;
  a.B = fit.B;
  a.H = fit.heads;
  a.Tq = fit.Tq;
  a.Tk = a.W = fit.Tk;
  a.A = fit.A;
  a.query = view_of_rows(given.query, keep);
  a.key = view_of_rows(given.key, keep);
  a.score_vector = view_of_parameters(given.score_vector, given.score_vector.dim() == 2, keep);
  const Tensor scores = empty(given.query.device(), shape(given.query, a.W), fit.sum_dtype);
  a.weights = view(scores);
  run_scores(a, given.query);
  return {.scores = scores};
}

using AttentionOperators = Operators<attention, attention_backward, scores>;

}  // namespace

// Return the lists above, for a test.
ATTNFAST_EXPORT const char* attnfast_attention_operators() {
  static const std::string text = AttentionOperators::listed();
  return text.c_str();
}

}  // namespace attnfast
