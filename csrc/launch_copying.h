// The two operators of copy_distribution. A launcher includes this file once, defines the two
// functions below and registers the operators.
#pragma once
#include "copying.h"
#include "launch.h"

namespace attnfast {
namespace {

// Fill what is out; `logits` tells the device.
void run_forward(const Copying&, const Tensor& logits);
void run_backward(const Copying&, const Tensor& logits);

struct CopyingCall {
  Copying a{};
  std::vector<Tensor> keep;
  Fit fit;

  CopyingCall(const char* name, const Tensor& logits, const Tensor& weights, const Tensor& source,
              const Tensor& gate, int64_t extra_words, bool log)
      : fit(name, logits) {
    const ScalarType dtype = logits.scalar_type(), type = source.scalar_type();
    const bool wide = type == ScalarType::Long;
    fit.check(logits.dim() == 3, "logits");
    fit.check(weights.dim() == 3, "weights");
    const int64_t Tq = logits.size(1), Tk = weights.size(2);
    fit.rows("weights", weights, dtype, {Tq, Tk});
    fit.rows("gate", gate, dtype, {Tq});
    fit.rows("source", source, wide ? type : ScalarType::Int, {Tk});
    fit.check(extra_words >= 0, "extra_words");
    a.dtype = dtype_of(logits);
    a.B = logits.size(0);
    a.Tq = logits.size(1);
    a.V = logits.size(2);
    a.X = extra_words;
    a.Tk = weights.size(2);
    a.log = log;
    a.logits = view_of_rows(logits, keep);
    a.weights = view_of_rows(weights, keep);
    a.gate = view(gate, false);
    keep.push_back(packed(wide ? source : torch::stable::to(source, ScalarType::Long)));
    a.source = static_cast<const int64_t*>(place_of(keep.back()));
    const auto possible = [&](int64_t word) { return word >= 0 && word < a.V + a.X; };
    fit.check(!logits.is_cpu() || std::all_of(a.source, a.source + a.B * a.Tk, possible), "source");
  }
};

std::tuple<Tensor, Tensor> copy_distribution(const Tensor logits, const Tensor weights,
                                             const Tensor source, const Tensor gate,
                                             int64_t extra_words, bool log) {
  CopyingCall c("copy_distribution", logits, weights, source, gate, extra_words, log);
  Copying& a = c.a;
  const Tensor out = empty(logits.device(), {a.B, a.Tq, a.V + a.X}, logits.scalar_type());
  const Tensor log_sum_exp = empty(logits.device(), {a.B, a.Tq}, ScalarType::Double);
  a.distribution = view(out);
  a.log_sum_exp = view(log_sum_exp, false);
  run_forward(a, logits);
  return {out, log_sum_exp};
}

std::tuple<Tensor, Tensor, Tensor> copy_distribution_backward(
    const Tensor grad_distribution, const Tensor logits, const Tensor weights, const Tensor source,
    const Tensor gate, const Tensor log_sum_exp, int64_t extra_words, bool log) {
  CopyingCall c("copy_distribution_backward", logits, weights, source, gate, extra_words, log);
  Copying& a = c.a;
  c.fit.rows("grad_distribution", grad_distribution, logits.scalar_type(), {a.Tq, a.V + a.X});
  c.fit.rows("log_sum_exp", log_sum_exp, ScalarType::Double, {a.Tq});
  const Tensor saved = packed(log_sum_exp);
  const auto gradient = [&](const std::vector<int64_t>& sizes) {
    return empty(logits.device(), sizes, logits.scalar_type());
  };
  const Tensor grad_logits = gradient({a.B, a.Tq, a.V});
  const Tensor grad_weights = gradient({a.B, a.Tq, a.Tk}), grad_gate = gradient({a.B, a.Tq});
  a.log_sum_exp = view(saved, false);
  a.grad_distribution = view_of_rows(grad_distribution, c.keep);
  a.grad_logits = view(grad_logits);
  a.grad_weights = view(grad_weights);
  a.grad_gate = view(grad_gate, false);
  run_backward(a, logits);
  return {grad_logits, grad_weights, grad_gate};
}

}  // namespace
}  // namespace attnfast
