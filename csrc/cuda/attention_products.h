// Attention over whole targets by PyTorch's GEMM, which is faster than our products: all products of dot
// scores, and in the backward of the others those with values.
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

// Return true if PyTorch multiplies the matrices of a forward.
bool multiplies(const Forward& a) {
  return !a.score_vector.data && a.weights.data && fits_library(a) && together(a) &&
         dense(a, a.context, a.Tq, a.Dv);
}
// Return true if it multiplies those of a backward: with values, and with queries and keys.
bool multiplies_values(const Backward& a) {
  return fits_library(a) && even(a, a.value) && even(a, a.grad_context) &&
         dense(a, a.grad_value, a.Tk, a.Dv);
}
bool multiplies_keys(const Backward& a) {
  return !a.score_vector.data && even(a, a.query) && even(a, a.key) && dense(a, a.grad_query, a.Tq, a.A) &&
         dense(a, a.grad_key, a.Tk, a.A);
}

// `added` is for a single step only; see put_context.
template <class Launch>
void run_forward(const Forward& a, const View& added, const Launch& launch,
                 const torch::stable::Device& device) {
  if (!multiplies(a)) return launch_forward(a, launch, added);
  multiply(a, {a.query, transposed(a.key), a.weights, a.Tq, a.A, a.Tk, 1}, device);
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
