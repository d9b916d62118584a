// The operators of coverage_attention. A launcher includes this file once, defines the functions
// below and registers the operators.
#pragma once
#include "coverage.h"
#include "launch.h"

namespace attnfast {
namespace {

// Fill what is out; `query` tells the device.
void run_forward(Coverage&, const Tensor& query);
void run_backward(Coverage&, const Tensor& query);
int64_t grad_weight_parts(const Attention&);  // see launch_attention.h; without filters

// The arguments of the history.
struct History {
  Optional filters, projection, penalty, rate, transition, coverage, previous;
};

// A tensor of parameters, one for all or one for each head, whose rows are side by side.
View view_of_parameters(const Tensor& x, bool of_heads, std::vector<Tensor>& keep) {
  keep.push_back(packed(x));
  View v;
  v.data = place_of(keep.back());
  v.head = of_heads ? keep.back().stride(0) : 0;
  return v;
}

// [B, (H,) n], whose last sizes are side by side.
View view_of_numbers(const Tensor& x, std::vector<Tensor>& keep) {
  keep.push_back(packed(x));
  return view(keep.back(), false);
}

struct CoverageCall {
  Call call;
  Coverage a;

  CoverageCall(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
               const Optional& weight, const Optional& bias, const Optional& mask,
               const Optional& lengths, const History& h, double scale, const std::string& score)
      : call(name, query, key, value, weight, bias, mask, lengths, {}, 0, scale, score) {
    const Fit& fit = call.fit;
    const ScalarType number = accumulation(query);
    fit.rows("fertility", h.rate, number, {call.a.Tk});
    fit.rows("transition", h.transition, number, {call.a.Tq});
    fit.rows("coverage", h.coverage, number, {call.a.Tk});
    fit.rows("previous", h.previous, number, {call.a.Tk});
    if (h.penalty) {
      const bool one = h.penalty->dim() == 1 && h.penalty->size(0) == 1;
      fit.sizes("penalty", h.penalty, number, {one ? 1 : call.a.H});
    }
    fit.check(h.filters.has_value() == h.projection.has_value(), h.filters ? "projection" : "filters");
    if (h.filters) {
      const Tensor& f = *h.filters;
      const int64_t n = f.dim();
      fit.check(n == 3 || n == 4, "filters");
      const int64_t K = f.size(n - 3), channels = f.size(n - 2), width = f.size(n - 1);
      fit.check((channels == 1 || channels == 2) && width % 2 == 1, "filters");
      fit.parameters("filters", h.filters, number, {K, channels, width});
      fit.parameters("projection", h.projection, number, {call.a.A, K});
      fit.check(h.projection->dim() == n - 1, "projection");
      fit.check(weight.has_value() || K == 0, "weight");
    }
    static_cast<Attention&>(a) = call.a;
    if (h.filters) {
      const int64_t n = h.filters->dim();
      a.filters_count = h.filters->size(n - 3);
      a.channels = h.filters->size(n - 2);
      a.width = h.filters->size(n - 1);
      if (a.filters_count) {
        a.filters = view_of_parameters(*h.filters, n == 4, call.keep);
        a.projection = view_of_parameters(*h.projection, n == 4, call.keep);
      }
    }
    if (h.penalty) a.penalty = view_of_parameters(*h.penalty, h.penalty->size(0) != 1, call.keep);
    if (h.rate) a.rate = view_of_numbers(*h.rate, call.keep);
    if (h.coverage) a.first = view_of_numbers(*h.coverage, call.keep);
    if (h.previous) a.previous = view_of_numbers(*h.previous, call.keep);
    if (h.transition) a.transition = view_of_numbers(*h.transition, call.keep);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> coverage_attention(
    const Tensor query, const Tensor key, const Tensor value, const Optional weight,
    const Optional bias, const Optional mask, const Optional lengths, const Optional filters,
    const Optional projection, const Optional penalty, const Optional rate,
    const Optional transition, const Optional coverage, const Optional previous, double scale,
    std::string score) {
  CoverageCall c("coverage_attention", query, key, value, weight, bias, mask, lengths,
                 {filters, projection, penalty, rate, transition, coverage, previous}, scale, score);
  Coverage& a = c.a;
  const ScalarType sums = accumulation(query);
  const auto out = [&](std::vector<int64_t> sizes, ScalarType dtype) {
    return empty(query.device(), sizes, dtype);
  };
  std::vector<int64_t> keys(key.sizes().begin(), key.sizes().end() - 1);
  std::vector<int64_t> heads(keys.begin(), keys.end() - 1);
  const Tensor context = empty_rows(query, a.Dv, query.scalar_type());
  const Tensor weights = out(shape(query, a.Tk), sums);
  const Tensor last = out(keys, sums), loss = out(heads, sums);
  const Tensor odds = transition ? out(shape(query, a.Tk), sums) : out({0}, sums);
  a.context = view(context);
  a.weights = view(weights);
  a.last = view(last, false);
  a.loss = View{place_of(loss), a.H, 1};
  if (transition) a.odds = view(odds);
  run_forward(a, query);
  return {context, weights, last, loss, odds};
}

// What steps add the gradients of key, weight, filters and projection to: one for each sequence and
// head, of the accumulation dtype.
struct Sums {
  Tensor key, weight, filters, projection;

  void put(Coverage& a, const Fit& fit, bool heads, ScalarType type) const {
    fit.check(a.filters_count > 0, "filters");
    const auto of = [&](const char* name, const Tensor& x, std::initializer_list<int64_t> sizes) {
      fit.rows(name, x, type, sizes);
      fit.check(x.is_contiguous(), name);
      return View{place_of(x), x.stride(0), heads ? x.stride(1) : 0, *(sizes.end() - 1)};
    };
    a.sums = true;
    a.grad_key = of("sum_key", key, {a.Tk, a.A});
    a.grad_weight = of("sum_weight", weight, {a.A});
    a.grad_filters = of("sum_filters", filters, {a.filters_count, a.channels, a.width});
    a.grad_projection = of("sum_projection", projection, {a.A, a.filters_count});
  }
};

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                             Tensor, Tensor, Tensor>;

Gradients backward(const char* name, const Tensor& grad_context, const Optional& grad_weights,
                   const Optional& grad_coverage, const Optional& grad_loss, const Tensor& query,
                   const Tensor& key, const Tensor& value, const Optional& weight,
                   const Optional& lengths, const History& history, const Tensor& weights,
                   const Tensor& odds, double scale, const std::string& score, bool need_grad_query,
                   bool need_grad_key, bool need_grad_score, bool need_grad_filters,
                   const Sums* of_steps = nullptr) {
  const auto& [filters, projection, penalty, rate, transition, coverage, previous] = history;
  CoverageCall c(name, query, key, value, weight, {}, {}, lengths, history, scale, score);
  Coverage& a = c.a;
  const Fit& fit = c.call.fit;
  const ScalarType sums = accumulation(query), dtype = query.scalar_type();
  fit.rows("grad_context", grad_context, dtype, {a.Tq, a.Dv});
  fit.rows("grad_weights", grad_weights, sums, {a.Tq, a.Tk});
  fit.rows("grad_coverage", grad_coverage, sums, {a.Tk});
  fit.rows("grad_loss", grad_loss, sums, {});
  fit.rows("weights", weights, sums, {a.Tq, a.Tk});
  if (transition) fit.rows("odds", odds, sums, {a.Tq, a.Tk});
  else fit.sizes("odds", odds, sums, {0});
  const auto out = [&](bool needed, const std::vector<int64_t>& sizes, ScalarType type) {
    return empty(query.device(), needed ? sizes : std::vector<int64_t>{0}, type);
  };
  const auto like = [&](const Tensor& x, bool needed, ScalarType type) {
    return out(needed, std::vector<int64_t>(x.sizes().begin(), x.sizes().end()), type);
  };
  const auto rows = [&](const Tensor& x, bool needed, View& v) {
    if (!needed) return out(false, {}, dtype);
    const Tensor grad = empty_rows(x, x.size(x.dim() - 1), dtype);
    v = view(grad);
    return grad;
  };
  const auto numbers = [&](const Optional& x, View& v) {
    if (!x) return out(false, {}, sums);
    const Tensor grad = like(*x, true, sums);
    v = view(grad, false);
    return grad;
  };
  const Tensor grad_query = rows(query, need_grad_query, a.grad_query);
  const Tensor grad_key = rows(key, need_grad_key, a.grad_key);
  const Tensor grad_value = rows(value, need_grad_key, a.grad_value);
  const Tensor grad_rate = numbers(rate, a.grad_rate);
  const Tensor grad_transition = numbers(transition, a.grad_transition);
  const Tensor grad_first = numbers(coverage, a.grad_first);
  const Tensor grad_previous = numbers(previous, a.grad_previous);

  // Parts for every sequence and head, added up at the end.
  const int64_t K = a.filters_count, W = a.width;
  const auto part = [&](bool needed, std::vector<int64_t> sizes, View& v) {
    sizes.insert(sizes.begin(), {a.B, a.H});
    const Tensor x = out(needed, sizes, sums);
    if (needed) v = View{place_of(x), x.stride(0), x.stride(1), sizes.back()};
    return x;
  };
  const Tensor part_weight =
      part(need_grad_key && weight, {K ? 1 : grad_weight_parts(a), a.A}, a.grad_weight);
  const bool of_filters = need_grad_filters && filters;
  const Tensor part_filters = part(of_filters, {K, a.channels, W}, a.grad_filters);
  const Tensor part_projection = part(of_filters, {a.A, K}, a.grad_projection);
  if (of_steps) of_steps->put(a, fit, query.dim() == 4, sums);
  const Tensor part_penalty = part(penalty.has_value(), {}, a.grad_penalty);
  const auto added = [&](const Optional& x, const Tensor& parts, bool needed, bool of_heads,
                         bool row, ScalarType type) {
    if (!needed) return like(*x, false, type);
    std::vector<int64_t> axes{0};
    if (!of_heads) axes.push_back(1);
    if (row) axes.push_back(2);
    return torch::stable::to(torch::stable::sum(parts, axes, false, ScalarType::Double), type);
  };

  const Tensor saved = packed(weights), saved_odds = packed(odds);
  const Tensor grad_score = empty(query.device(), shape(query, a.Tk), sums);
  a.weights = view(saved);
  if (transition) a.odds = view(saved_odds);
  a.grad_score = view(grad_score);
  a.backward = a.grad_score_given = true;
  a.grad_score_returned = need_grad_score;
  a.grad_context = view_of_rows(grad_context, c.call.keep);
  if (grad_weights) a.grad_weights = view_of_rows(*grad_weights, c.call.keep);
  if (grad_coverage) a.grad_last = view_of_numbers(*grad_coverage, c.call.keep);
  if (grad_loss) {
    c.call.keep.push_back(packed(*grad_loss));
    a.grad_loss = View{place_of(c.call.keep.back()), a.H, 1};
  }
  run_backward(a, query);

  const auto none = [&] { return out(false, {}, sums); };
  return {grad_query, grad_key, grad_value,
          weight ? added(weight, part_weight, need_grad_key, weight->dim() == 2, true, dtype)
                 : out(false, {}, dtype),
          need_grad_score ? grad_score : none(),
          filters ? added(filters, part_filters, of_filters, filters->dim() == 4, false, sums) : none(),
          projection ? added(projection, part_projection, of_filters, projection->dim() == 3, false,
                             sums)
                     : none(),
          penalty ? torch::stable::reshape(
                        added(penalty, part_penalty, true, penalty->size(0) != 1, false, sums),
                        {penalty->size(0)})
                  : none(),
          grad_rate, grad_transition, grad_first, grad_previous};
}

Gradients coverage_attention_backward(
    const Tensor grad_context, const Optional grad_weights, const Optional grad_coverage,
    const Optional grad_loss, const Tensor query, const Tensor key, const Tensor value,
    const Optional weight, const Optional lengths, const Optional filters,
    const Optional projection, const Optional penalty, const Optional rate,
    const Optional transition, const Optional coverage, const Optional previous,
    const Tensor weights, const Tensor odds, double scale, std::string score, bool need_grad_query,
    bool need_grad_key, bool need_grad_score, bool need_grad_filters) {
  return backward("coverage_attention_backward", grad_context, grad_weights, grad_coverage,
                  grad_loss, query, key, value, weight, lengths,
                  {filters, projection, penalty, rate, transition, coverage, previous},
                  weights, odds, scale, score, need_grad_query, need_grad_key, need_grad_score,
                  need_grad_filters);
}

Gradients coverage_attention_backward_into(
    const Tensor grad_context, const Optional grad_weights, const Optional grad_coverage,
    const Optional grad_loss, const Tensor query, const Tensor key, const Tensor value,
    const Optional weight, const Optional lengths, const Optional filters,
    const Optional projection, const Optional penalty, const Optional rate,
    const Optional transition, const Optional coverage, const Optional previous,
    const Tensor weights, const Tensor odds, Tensor sum_key, Tensor sum_weight, Tensor sum_filters,
    Tensor sum_projection, double scale, std::string score, bool need_grad_query,
    bool need_grad_score) {
  const Sums sums = {sum_key, sum_weight, sum_filters, sum_projection};
  return backward("coverage_attention_backward_into", grad_context, grad_weights, grad_coverage,
                  grad_loss, query, key, value, weight, lengths,
                  {filters, projection, penalty, rate, transition, coverage, previous}, weights, odds, scale, score,
                  need_grad_query, false, need_grad_score, false, &sums);
}

}  // namespace
}  // namespace attnfast
