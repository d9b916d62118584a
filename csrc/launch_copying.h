// The two operators of copy_distribution. A launcher includes this file once and defines the functions
// below.
#pragma once
#include "copying.h"
#include "launch.h"

namespace attnfast {
namespace {

// Compute the outputs; `logits` determines the device.
void run_forward(const CopyForward&, const Tensor& logits);
void run_backward(const CopyBackward&, const Tensor& logits);

#define ATTNFAST_COPY_ROWS(X)                                             \
  X(Tensor, logits, rows, dtype, {Tq, V})                                 \
  X(Tensor, weights, rows, dtype, {Tq, Tk})                               \
  X(Tensor, source, rows, Types(ScalarType::Long, ScalarType::Int), {Tk}) \
  X(Tensor, gate, rows, dtype, {Tq})

#define ATTNFAST_COPY(X)                                               \
  ATTNFAST_COPY_ROWS(X)                                                \
  X(int64_t, num_oov, between, 0, std::numeric_limits<int64_t>::max()) \
  X(bool, log, any)

#define ATTNFAST_COPY_BACKWARD(X)                                      \
  X(Tensor, grad_distribution, rows, dtype, {Tq, V + given.num_oov})   \
  ATTNFAST_COPY_ROWS(X)                                                \
  X(Tensor, log_sum_exp, rows, ScalarType::Double, {Tq})               \
  X(int64_t, num_oov, between, 0, std::numeric_limits<int64_t>::max()) \
  X(bool, log, any)

// The sizes of logits and weights, which have no heads.
struct CopyChecker : ArgumentChecker {
  int64_t Tq, Tk, V;

  template <class Arguments>
  explicit CopyChecker(const Arguments& given) : ArgumentChecker(Arguments::kOperator, given.logits) {
    check(given.logits.dim() == 3, "logits");
    check(given.weights.dim() == 3, "weights");
    Tq = given.logits.size(1);
    V = given.logits.size(2);
    Tk = given.weights.size(2);
  }
};

ATTNFAST_ARGUMENTS(CopyArguments, "copy_distribution", ATTNFAST_COPY, CopyChecker)
ATTNFAST_ARGUMENTS(CopyBackwardArguments, "copy_distribution_backward", ATTNFAST_COPY_BACKWARD, CopyChecker)
ATTNFAST_RESULTS(CopyOutputs, distribution, log_sum_exp)
ATTNFAST_RESULTS(CopyGradients, grad_logits, grad_weights, grad_gate)

template <class Arguments>
void put_copying(const Arguments& given, const CopyChecker& fit, Copying& a, KeepAlive& keep) {
  a.dtype = dtype_of(given.logits);
  a.B = fit.B;
  a.Tq = fit.Tq;
  a.Tk = fit.Tk;
  a.V = fit.V;
  a.X = given.num_oov;
  a.log = given.log;
  a.logits = view_of_rows(given.logits, keep);
  a.weights = view_of_rows(given.weights, keep);
  a.gate = view(given.gate, false);
  const bool wide = given.source.scalar_type() == ScalarType::Long;
  keep.push_back(packed(wide ? given.source : torch::stable::to(given.source, ScalarType::Long)));
  a.source = static_cast<const int64_t*>(data_or_sentinel(keep.back()));
  const auto possible = [&](int64_t word) { return word >= 0 && word < a.V + a.X; };
  fit.check(!given.logits.is_cpu() || std::all_of(a.source, a.source + a.B * a.Tk, possible), "source");
}

CopyOutputs copy_distribution(const CopyArguments& given) {
  const CopyArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  CopyForward a{};
  put_copying(given, fit, a, keep);
  const torch::stable::Device device = given.logits.device();
  const Tensor distribution = empty(device, {a.B, a.Tq, a.V + a.X}, fit.dtype);
  const Tensor log_sum_exp = empty(device, {a.B, a.Tq}, ScalarType::Double);
  a.distribution = view(distribution);
  a.log_sum_exp = view(log_sum_exp, false);
  run_forward(a, given.logits);
  return {.distribution = distribution, .log_sum_exp = log_sum_exp};
}

CopyGradients copy_distribution_backward(const CopyBackwardArguments& given) {
  const CopyBackwardArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  CopyBackward a{};
  put_copying(given, fit, a, keep);
  const torch::stable::Device device = given.logits.device();
  const Tensor grad_logits = empty(device, {a.B, a.Tq, a.V}, fit.dtype);
  const Tensor grad_weights = empty(device, {a.B, a.Tq, a.Tk}, fit.dtype);
  const Tensor grad_gate = empty(device, {a.B, a.Tq}, fit.dtype);
  const Tensor log_sum_exp = packed(given.log_sum_exp);
  a.log_sum_exp = view(log_sum_exp, false);
  a.grad_distribution = view_of_rows(given.grad_distribution, keep);
  a.grad_logits = view(grad_logits);
  a.grad_weights = view(grad_weights);
  a.grad_gate = view(grad_gate, false);
  run_backward(a, given.logits);
  return {.grad_logits = grad_logits, .grad_weights = grad_weights, .grad_gate = grad_gate};
}

using CopyOperators = Operators<copy_distribution, copy_distribution_backward>;

}  // namespace

// Return the lists above, for a test.
ATTNFAST_EXPORT const char* attnfast_copying_operators() {
  static const std::string text = CopyOperators::listed();
  return text.c_str();
}

}  // namespace attnfast
