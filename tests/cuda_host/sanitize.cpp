// One call forward and backward for a sanitizer to watch; every tensor is an allocation of its own,
// of the exact size. Takes B H Tq Tk A Dv W and the blocks of a cluster; with W columns a row sees the
// W keys from its own on.
#include <cstdio>
#include <cstdlib>
#include <deque>

#include "../../csrc/cuda/attention.cuh"
#include "../../csrc/cuda/copying.cuh"
#include "../../csrc/cuda/coverage.cuh"
#include "../../csrc/cuda/recurrent.cuh"

using namespace attnfast;

std::deque<std::vector<float>> memory;

// The sizes of the tensors to make.
struct Sizes {
  int64_t B, H;

  View tensor(int64_t rows, int64_t columns) const {
    auto& x = memory.emplace_back(B * H * rows * columns);
    for (size_t i = 0; i < x.size(); ++i) x[i] = sinf(i * 1.7f);
    return View{x.data(), H * rows * columns, rows * columns, columns, 1};
  }
};

const LaunchOnHost<kThreads> launch;

Problem problem(const Problem& sizes, const Sizes& make, bool additive) {
  Problem a = sizes;
  a.dtype = Dtype::f32;
  a.scale = 0.5;
  a.score = additive ? Score::tanh : Score::dot;
  a.query = make.tensor(a.Tq, a.A);
  a.key = make.tensor(a.Tk, a.A);
  a.value = make.tensor(a.Tk, a.Dv);
  if (additive) a.score_vector = make.tensor(1, a.A);
  a.bias = make.tensor(a.Tq, a.W);
  return a;
}

Forward forward_of(const Problem& p, const Sizes& make) {
  Forward a = {p};
  a.context = make.tensor(a.Tq, a.Dv);
  a.weights = make.tensor(a.Tq, a.W);
  a.log_sum_exp = make.tensor(a.Tq, 1);
  a.statistics = make.tensor(a.Tq, kStatistics);
  return a;
}

Backward backward_of(const Forward& forward, const Sizes& make) {
  Backward a = {static_cast<const Problem&>(forward)};
  a.weights = forward.weights;
  a.grad_context = make.tensor(a.Tq, a.Dv);
  a.grad_weights = make.tensor(a.Tq, a.W);
  a.grad_log_sum_exp = make.tensor(a.Tq, 1);
  a.grad_score = make.tensor(a.Tq, a.W);
  a.grad_query = make.tensor(a.Tq, a.A);
  a.grad_key = make.tensor(a.Tk, a.A);
  a.grad_value = make.tensor(a.Tk, a.Dv);
  a.grad_score_vector = make.tensor(grad_score_vector_parts(a), a.A);
  return a;
}

History history(const Problem& a, const Sizes& make, bool additive) {
  History h;
  h.filters_count = additive ? 3 : 0;
  h.taps = additive ? 5 : 0;
  if (additive) h.filters = make.tensor(h.filters_count, h.channels * h.taps);
  if (additive) h.projection = make.tensor(a.A, h.filters_count);
  for (View* x : {&h.inverse_fertility, &h.coverage_in, &h.previous}) *x = make.tensor(1, a.Tk);
  h.transition_prob = make.tensor(1, a.Tq);
  for (float& u : memory.back()) u = 0.5f + 0.4f * u;  // a probability
  h.penalty = make.tensor(1, 1);
  return h;
}

void run_attention(const Forward& forward, const Backward& backward) {
  launch_forward(forward, launch);
  launch_backward(backward, launch);
  if (backward.Tq != 1) return;
  Backward only = backward;  // a step over a prepared memory
  only.grad_key = only.grad_value = only.grad_score_vector = {};
  launch_backward(only, launch);
  const View& added = backward.grad_context;  // to a step of input feeding
  launch_forward(forward, launch, added);
}

void run_coverage(const Forward& forward, const Backward& backward, const Sizes& make, bool additive) {
  const History h = history(forward, make, additive);
  CoverageForward f = {forward, h};
  f.coverage_out = make.tensor(1, f.Tk);
  f.loss = make.tensor(1, 1);
  f.log_weights = make.tensor(f.Tq, f.Tk);
  launch_forward(f, launch);
  CoverageBackward b = {backward, h};
  b.log_weights = b.grad_log_weights = f.log_weights;
  if (additive) b.grad_filters = make.tensor(h.filters_count, h.channels * h.taps);
  if (additive) b.grad_projection = make.tensor(b.A, h.filters_count);
  for (View* x : {&b.grad_coverage_out, &b.grad_inverse_fertility, &b.grad_coverage_in, &b.grad_previous})
    *x = make.tensor(1, b.Tk);
  b.grad_transition_prob = make.tensor(1, b.Tq);
  for (View* x : {&b.grad_loss, &b.grad_penalty}) *x = make.tensor(1, 1);
  b.grad_score_vector = make.tensor(additive ? 1 : grad_score_vector_parts(b), b.A);
  launch_backward(b, launch);
  f.Tq = b.Tq = 1;  // a step of many, in place
  f.coverage_in = f.coverage_out;
  launch_forward(f, launch);
  b.sums = true;
  b.grad_value = {};
  b.grad_last = b.grad_previous;
  b.grad_coverage_out = b.grad_coverage_in;
  launch_backward(b, launch);
}

// Run copy_distribution with V words and 3 outside the vocabulary.
void run_copying(const Problem& p, const Sizes& make, int64_t V, const int64_t* source,
                 double* log_sum_exp) {
  for (const bool log : {false, true}) {
    const Copying c = {.dtype = Dtype::f32,
                       .B = p.B,
                       .Tq = p.Tq,
                       .Tk = p.Tk,
                       .V = V,
                       .X = 3,
                       .log = log,
                       .logits = make.tensor(p.Tq, V),
                       .weights = make.tensor(p.Tq, p.Tk),
                       .gate = make.tensor(p.Tq, 1),
                       .source = source};
    const View rows = {log_sum_exp, p.Tq, 0, 1, 1};
    launch_forward(CopyForward{c, make.tensor(p.Tq, V + 3), rows}, launch);
    launch_backward(CopyBackward{c, rows, make.tensor(p.Tq, V + 3), make.tensor(p.Tq, V),
                                 make.tensor(p.Tq, p.Tk), make.tensor(p.Tq, 1)},
                    launch);
  }
}

// Of Tq sequences and Tk features.
void run_feed(const Problem& p, const Sizes& make) {
  const auto rows = [&](int64_t count, int64_t columns) {
    return Rows2{make.tensor(count, columns).data, columns};
  };
  const Feed a = {.B = p.Tq,
                  .F = p.Tk,
                  .Dv = p.Dv,
                  .contexts = rows(p.Tq, p.Dv),
                  .weight = rows(p.Tk, p.Dv),
                  .state_products = rows(p.Tq, p.Tk),
                  .attentional = rows(p.Tq, p.Tk)};
  launch(feed<float>, tiles(p.Tq, kQueries) * tiles(p.Tk, kKeys), 1, a);
}

int main(int, char** argv) {
  Problem a = {};
  int64_t* const sizes[] = {&a.B, &a.H, &a.Tq, &a.Tk, &a.A, &a.Dv};
  for (int i = 0; i < 6; ++i) *sizes[i] = atoll(argv[i + 1]);
  const Sizes make = {a.B, a.H};
  const int64_t columns = atoll(argv[7]);
  most_together = atoi(argv[8]);
  a.compact = columns > 0;
  a.W = a.compact ? columns : a.Tk;
  std::vector<int64_t> span, lengths(a.B, a.Tk);
  for (int64_t i = 0; i < a.Tq; ++i) span.insert(span.end(), {i - 2, i - 2 + columns});
  if (a.compact) a.key_bounds = {span.data(), 0, 0, 2, 1};
  if (a.B) lengths[0] = a.Tk - a.Tk / 3;
  a.lengths = lengths.data();
  for (const bool additive : {false, true}) {
    const Forward forward = forward_of(problem(a, make, additive), make);
    const Backward backward = backward_of(forward, make);
    run_attention(forward, backward);
    if (a.compact || a.Tq > 4) continue;  // the history goes from row to row
    run_coverage(forward, backward, make, additive);
  }
  std::vector<int64_t> source(a.B * a.Tk);
  std::vector<double> log_sum_exp(a.B * a.Tq);
  const int64_t words = a.Tq == 2 ? 9000 : a.Dv;  // enough for a cluster, or for one block
  for (size_t i = 0; i < source.size(); ++i) source[i] = i * 7 % (words + 3);
  run_copying(a, make, words, source.data(), log_sum_exp.data());
  if (a.B) run_feed(a, make);
  for (const auto& x : memory)
    for (const float v : x)
      if (v != v) return puts("NaN"), 1;
}
