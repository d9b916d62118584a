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

  CopyingCall(const Tensor& logits, const Tensor& weights, const Tensor& source, const Tensor& gate,
              int64_t extra_words, bool log) {
    const bool ranks = logits.dim() == 3 && weights.dim() == 3 && source.dim() == 2 &&
                       gate.dim() == 2 && extra_words >= 0;
    if (!ranks || weights.size(0) != logits.size(0) || weights.size(1) != logits.size(1) ||
        gate.size(0) != logits.size(0) || gate.size(1) != logits.size(1) ||
        source.size(0) != logits.size(0) || source.size(1) != weights.size(2))
      throw std::runtime_error("copy_distribution's arguments do not fit together");
    const ScalarType type = source.scalar_type();
    for (const Tensor* x : {&weights, &gate})
      if (x->scalar_type() != logits.scalar_type() || x->device() != logits.device())
        throw std::runtime_error("copy_distribution's arguments do not fit together");
    if ((type != ScalarType::Long && type != ScalarType::Int) || source.device() != logits.device())
      throw std::runtime_error("copy_distribution's source must be int64 or int32");
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
    const bool wide = type == ScalarType::Long;
    keep.push_back(packed(wide ? source : torch::stable::to(source, ScalarType::Long)));
    a.source = static_cast<const int64_t*>(keep.back().data_ptr());
    if (logits.is_cpu() && std::any_of(a.source, a.source + a.B * a.Tk, [&](int64_t word) {
          return word < 0 || word >= a.V + a.X;
        }))
      throw std::runtime_error("copy_distribution's source must be at least 0 and below V + extra_words");
  }
};

std::tuple<Tensor, Tensor> copy_distribution(const Tensor logits, const Tensor weights,
                                             const Tensor source, const Tensor gate,
                                             int64_t extra_words, bool log) {
  CopyingCall c(logits, weights, source, gate, extra_words, log);
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
  CopyingCall c(logits, weights, source, gate, extra_words, log);
  Copying& a = c.a;
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
