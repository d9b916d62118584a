// One call forward and backward for a sanitizer to watch; every tensor is an allocation of its own,
// of the exact size. Takes B H Tq Tk A Dv W and the blocks of a cluster; with W columns a row sees the
// W keys from its own on.
#include <cstdio>
#include <cstdlib>
#include <deque>

#include "../../csrc/cuda/attention.cuh"
#include "../../csrc/cuda/copying.cuh"
#include "../../csrc/cuda/coverage.cuh"

using namespace attnfast;

int main(int, char** argv) {
  std::deque<std::vector<float>> memory;
  Attention a = {};
  int64_t* const sizes[] = {&a.B, &a.H, &a.Tq, &a.Tk, &a.A, &a.Dv};
  for (int i = 0; i < 6; ++i) *sizes[i] = atoll(argv[i + 1]);
  const auto tensor = [&](int64_t rows, int64_t columns) {
    auto& x = memory.emplace_back(a.B * a.H * rows * columns);
    for (size_t i = 0; i < x.size(); ++i) x[i] = sinf(i * 1.7f);
    return View{x.data(), a.H * rows * columns, rows * columns, columns, 1};
  };
  const int64_t columns = atoll(argv[7]);
  most_together = atoi(argv[8]);
  a.compact = columns > 0;
  a.W = a.compact ? columns : a.Tk;
  std::vector<int64_t> span, rows_of_keys;
  for (int64_t i = 0; i < a.Tq; ++i) span.insert(span.end(), {i - 2, i - 2 + columns});
  if (a.compact) a.span = {span.data(), 0, 0, 2, 1};
  for (const bool additive : {false, true}) {
    if (a.compact) {
      const int64_t blocks = blocks_of_keys(a);
      rows_of_keys.assign(a.B * a.H * blocks * 2, 0);
      a.rows_of_keys = {rows_of_keys.data(), a.H * blocks * 2, blocks * 2, 2, 1};
    }
    a.dtype = Dtype::f32;
    a.scale = 0.5;
    a.score = additive ? Score::tanh : Score::dot;
    a.query = tensor(a.Tq, a.A);
    a.key = tensor(a.Tk, a.A);
    a.value = tensor(a.Tk, a.Dv);
    a.weight = additive ? tensor(1, a.A) : View{};
    a.bias = tensor(a.Tq, a.W);
    a.context = tensor(a.Tq, a.Dv);
    a.weights = tensor(a.Tq, a.W);
    a.log_sum_exp = tensor(a.Tq, 1);
    a.grad_context = tensor(a.Tq, a.Dv);
    a.grad_weights = tensor(a.Tq, a.W);
    a.grad_log_sum_exp = tensor(a.Tq, 1);
    a.grad_score = tensor(a.Tq, a.W);
    a.grad_query = tensor(a.Tq, a.A);
    a.grad_key = tensor(a.Tk, a.A);
    a.grad_value = tensor(a.Tk, a.Dv);
    a.grad_weight = tensor(grad_weight_parts(a), a.A);
    std::vector<int64_t> lengths(a.B, a.Tk);
    if (a.B) lengths[0] = a.Tk - a.Tk / 3;
    a.lengths = lengths.data();
    launch_forward(a, LaunchOnHost<kThreads>{});
    launch_backward(a, LaunchOnHost<kThreads>{});
    if (a.Tq == 1) {  // and a step over a prepared memory
      Attention only = a;
      only.grad_key = only.grad_value = only.grad_weight = {};
      launch_backward(only, LaunchOnHost<kThreads>{});
    }

    if (a.compact || a.Tq > 4) continue;  // the history goes from row to row
    Coverage h = {};
    static_cast<Attention&>(h) = a;
    h.filters_count = additive ? 3 : 0;
    h.width = additive ? 5 : 0;
    for (View* x : {&h.filters, &h.grad_filters})
      if (additive) *x = tensor(h.filters_count, h.channels * h.width);
    for (View* x : {&h.projection, &h.grad_projection})
      if (additive) *x = tensor(a.A, h.filters_count);
    for (View* x : {&h.rate, &h.first, &h.previous, &h.last, &h.grad_last, &h.grad_rate,
                    &h.grad_first, &h.grad_previous})
      *x = tensor(1, a.Tk);
    for (View* x : {&h.transition, &h.grad_transition}) *x = tensor(1, a.Tq);
    for (View* x : {&h.penalty, &h.loss, &h.grad_loss, &h.grad_penalty}) *x = tensor(1, 1);
    h.odds = tensor(a.Tq, a.Tk);
    h.grad_weight = tensor(additive ? 1 : grad_weight_parts(a), a.A);
    launch_forward(h, LaunchOnHost<kThreads>{});
    h.backward = h.grad_score_given = true;
    launch_backward(h, LaunchOnHost<kThreads>{});
    if (!additive) continue;
    h.sums = true;  // and a step of many
    h.Tq = 1;
    h.grad_value = {};
    launch_backward(h, LaunchOnHost<kThreads>{});
  }
  std::vector<int64_t> source(a.B * a.Tk);
  std::vector<double> log_sum_exp(a.B * a.Tq);
  for (size_t i = 0; i < source.size(); ++i) source[i] = i * 7 % (a.Dv + 3);
  for (const bool log : {false, true}) {
    Copying c = {Dtype::f32, a.B, a.Tq, a.Tk, a.Dv, 3, log};
    c.source = source.data();
    c.log_sum_exp = {log_sum_exp.data(), a.Tq, 0, 1, 1};
    for (View* x : {&c.logits, &c.grad_logits}) *x = tensor(a.Tq, a.Dv);
    for (View* x : {&c.weights, &c.grad_weights}) *x = tensor(a.Tq, a.Tk);
    for (View* x : {&c.distribution, &c.grad_distribution}) *x = tensor(a.Tq, a.Dv + 3);
    for (View* x : {&c.gate, &c.grad_gate}) *x = tensor(a.Tq, 1);
    launch_forward(c, LaunchOnHost<kThreads>{});
    launch_backward(c, LaunchOnHost<kThreads>{});
  }
  for (const auto& x : memory)
    for (const float v : x)
      if (v != v) return puts("NaN"), 1;
}
