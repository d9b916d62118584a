// Matrix products of attention over whole targets by PyTorch's GEMM, which is faster than ours: those of
// dot scores and, for all scores, those with values. A forward uses it only if weights are returned.
#pragma once
#include "../launch_attention.h"
#include "attention.cuh"

namespace attnfast {
namespace {

void multiply(const Problem& a, const MatrixProduct& x, const torch::stable::Device& device) {
  const auto tensor = [&](const View& of, int64_t rows, int64_t columns) {
    return matrices(a, of, rows, columns, device, 0, a.B);
  };
  const Tensor out = tensor(x.out, x.rows, x.columns);
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cuda_baddbmm_out(out.get(), out.get(), tensor(x.left, x.rows, x.depth).get(),
                                  tensor(x.right, x.depth, x.columns).get(), 0., x.scale));
}
// Compute a product whose left factors of 0 hide what they multiply.
template <class Launch>
void multiply_seen(const Problem& a, const MatrixProduct& x, const Launch& launch,
                   const torch::stable::Device& device) {
  multiply(a, x, device);
  const int64_t rows = a.B * a.H * x.rows, parts = tiles(x.columns, kThreads);
  if (a.dtype == Dtype::f64) launch(drop_hidden<double>, rows, parts, a, x);
  else launch(drop_hidden<float>, rows, parts, a, x);
}

constexpr int64_t kLibraryKeys = 8192;  // of a row that `normalise` takes, at most
// Multiply-adds of scores and contexts from which the forward of other scores than dot gains from its
// larger number of launches; the host tests define a smaller number.
#ifndef ATTNFAST_LIBRARY_FORWARD
#define ATTNFAST_LIBRARY_FORWARD (1 << 27)
#endif

// Return true if PyTorch takes the products of these matrices, among others.
bool multiplies(const Problem& a, std::initializer_list<View> matrices) {
  const auto takes = [&](const View& x) {
    return even(a, x) && x.row <= std::numeric_limits<int32_t>::max();
  };
  return fits_library(a) && std::min({a.Tk, a.A, a.Dv}) > 0 && std::ranges::all_of(matrices, takes);
}
bool multiplies(const Forward& a) {
  const bool fits = a.weights.data && a.Tk <= kLibraryKeys && dense(a, a.context, a.Tq, a.Dv);
  if (a.score == Score::dot) return fits && multiplies(a, {a.query, a.key, a.value});
  const bool is_large = a.B * a.H * a.Tq * a.Tk * (a.A + a.Dv) >= ATTNFAST_LIBRARY_FORWARD;
  return fits && is_large && a.Dv >= kLibraryColumns && multiplies(a, {a.value});
}
// The products of a backward with values, and those with queries and keys.
bool multiplies_values(const Backward& a) {
  return multiplies(a, {a.value, a.grad_context}) && dense(a, a.grad_value, a.Tk, a.Dv);
}
bool multiplies_keys(const Backward& a) {
  const float scale = std::abs(float(a.scale));  // a GEMM with a factor of 0 would hide NaN
  return a.score == Score::dot && 0 < scale && scale < INFINITY && multiplies(a, {a.query, a.key}) &&
         dense(a, a.grad_query, a.Tq, a.A) && dense(a, a.grad_key, a.Tk, a.A);
}

// `added` is for a single step only; see put_context.
template <class Launch>
void run_forward(const Forward& a, const View& added, const Launch& launch,
                 const torch::stable::Device& device) {
  if (!multiplies(a)) return launch_forward(a, launch, added);
  if (a.score == Score::dot) {
    multiply(a, {a.query, transposed(a.key), a.weights, a.Tq, a.A, a.Tk, 1}, device);
  } else {
    Forward sums = a;  // which `normalise` turns into scores
    sums.scale = 1;
    sums.mask = sums.bias = View{};
    launch_scores(sums, launch);
  }
  const int64_t rows = a.B * a.H * a.Tq;
  if (a.dtype == Dtype::f64) launch(normalise<double>, rows, 1, a);
  else launch(normalise<float>, rows, 1, a);
  multiply_seen(a, {a.weights, a.value, a.context, a.Tq, a.Tk, a.Dv, 1}, launch, device);
}

template <class Launch>
void run_backward(const Backward& a, const Launch& launch, const torch::stable::Device& device) {
  if (!multiplies_values(a)) return launch_backward(a, launch);
  const auto run = [&](const MatrixProduct& x) { multiply_seen(a, x, launch, device); };
  if (!a.grad_score_given) {
    multiply(a, {a.grad_context, transposed(a.value), a.grad_score, a.Tq, a.Dv, a.Tk, 1}, device);
    launch_grad_score(a, launch);
  }
  if (a.grad_value.data) run({transposed(a.weights), a.grad_context, a.grad_value, a.Tk, a.Tq, a.Dv, 1});
  Backward rest = a;
  rest.grad_value = View{};
  rest.grad_score_given = true;
  if (!multiplies_keys(a)) return launch_backward(rest, launch);
  if (a.grad_query.data) run({a.grad_score, a.key, a.grad_query, a.Tq, a.Tk, a.A, a.scale});
  if (a.grad_key.data) run({transposed(a.grad_score), a.query, a.grad_key, a.Tk, a.Tq, a.A, a.scale});
}

}  // namespace
}  // namespace attnfast
