// The two operators of attention. A launcher includes this file once, defines the four functions
// below and registers the operators.
#pragma once
#include "launch.h"

namespace attnfast {
namespace {

// Rows of grad_weight for each [B, H]; blocks of keys, with spans, of which the rows are looked up.
int64_t grad_weight_parts(const Attention&);
int64_t blocks_of_keys(const Attention&);
// Fill what is out; `query` tells the device.
void run_forward(Attention&, const Tensor& query);
void run_backward(Attention&, const Tensor& query);

// Hand over what the backend has prepared of the keys.
void put(const Optional& prepared, Call& call) {
  if (!prepared) return;
  Attention& a = call.a;
  call.fit.check(a.score == Score::tanh && a.dtype != Dtype::f64, "prepared");
  const int64_t width = (a.A + kPadding - 1) / kPadding * kPadding;
  call.fit.sizes("prepared", prepared, ScalarType::Float, {a.B, a.H, a.Tk, width});
  call.keep.push_back(packed(*prepared));
  a.exponentials = view(call.keep.back());
}

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor query, const Tensor key,
                                             const Tensor value, const Optional weight,
                                             const Optional bias, const Optional mask,
                                             const Optional lengths, const Optional span,
                                             int64_t columns, const Optional prepared,
                                             double scale, std::string score, bool need_weights) {
  Call call("attention", query, key, value, weight, bias, mask, lengths, span, columns, scale, score);
  Attention& a = call.a;
  put(prepared, call);
  const ScalarType sums = accumulation(query);
  Tensor weights = need_weights ? empty(query.device(), shape(query, a.W), sums)
                                : empty(query.device(), {0}, sums);
  std::vector<int64_t> rows = shape(query, 0);
  rows.pop_back();
  Tensor log_sum_exp = empty(query.device(), rows, sums);
  Tensor context = empty_rows(query, a.Dv, query.scalar_type());
  a.context = view(context);
  if (need_weights) a.weights = view(weights);
  a.log_sum_exp = view(log_sum_exp, false);
  run_forward(a, query);
  return {context, weights, log_sum_exp};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor grad_context, const Optional grad_weights, const Optional grad_log_sum_exp,
    const Tensor query, const Tensor key, const Tensor value, const Optional weight,
    const Optional lengths, const Optional span, int64_t columns, const Optional prepared,
    const Tensor weights, const Optional given_grad_score, double scale, std::string score,
    bool need_grad_query, bool need_grad_key, bool need_grad_score) {
  Call call("attention_backward", query, key, value, weight, {}, {}, lengths, span, columns, scale,
            score);
  Attention& a = call.a;
  put(prepared, call);
  const ScalarType sums = accumulation(query);
  const ScalarType dtype = query.scalar_type();
  call.fit.rows("grad_context", grad_context, dtype, {a.Tq, a.Dv});
  call.fit.rows("grad_weights", grad_weights, sums, {a.Tq, a.W});
  call.fit.rows("grad_log_sum_exp", grad_log_sum_exp, sums, {a.Tq});
  call.fit.rows("weights", weights, sums, {a.Tq, a.W});
  call.fit.rows("grad_score", given_grad_score, sums, {a.Tq, a.W});
  const auto gradient = [&](bool needed, const Tensor& x, View& out) {
    if (!needed) return empty(query.device(), {0}, dtype);
    const Tensor grad = empty_rows(x, x.size(x.dim() - 1), dtype);
    out = view(grad);
    return grad;
  };
  const Tensor grad_query = gradient(need_grad_query, query, a.grad_query);
  const Tensor grad_key = gradient(need_grad_key, key, a.grad_key);
  const Tensor grad_value = gradient(need_grad_key, value, a.grad_value);
  const bool need_grad_weight = need_grad_key && weight;
  Tensor grad_weight = empty(query.device(), {0}, sums);
  if (need_grad_weight) {
    grad_weight = empty(query.device(), {a.B, a.H, grad_weight_parts(a), a.A}, sums);
    a.grad_weight = view(grad_weight);
  }
  a.grad_score_given = given_grad_score.has_value();
  a.grad_score_returned = need_grad_score;
  Tensor grad_score = a.grad_score_given ? packed(*given_grad_score)
                                         : empty(query.device(), shape(weights, a.W), sums);
  const Tensor saved = packed(weights);
  a.weights = view(saved);
  a.grad_score = view(grad_score);
  a.grad_context = view_of_rows(grad_context, call.keep);
  if (grad_weights) a.grad_weights = view_of_rows(*grad_weights, call.keep);
  if (grad_log_sum_exp) a.grad_log_sum_exp = view(*grad_log_sum_exp, false);
  std::optional<Tensor> rows_of_keys;
  if (a.span.data && need_grad_key && blocks_of_keys(a) > 0) {
    const std::vector<int64_t> sizes = {a.B, a.H, blocks_of_keys(a), 2};
    rows_of_keys = torch::stable::new_zeros(query, sizes, ScalarType::Long);
    a.rows_of_keys = view(*rows_of_keys);
  }
  run_backward(a, query);

  if (need_grad_weight) {  // its parts add up, in double, over what shares a weight
    using Axes = std::vector<int64_t>;
    const Axes shared = weight->dim() == 2 ? Axes{0, 2} : Axes{0, 1, 2};
    grad_weight = torch::stable::sum(grad_weight, shared, false, ScalarType::Double);
    grad_weight = torch::stable::to(grad_weight, dtype);
  }
  if (!need_grad_score || a.grad_score_given)
    grad_score = empty(query.device(), {0}, sums);
  return {grad_query, grad_key, grad_value, grad_weight, grad_score};
}

}  // namespace
}  // namespace attnfast
