// Registers attention for CUDA.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "attention_products.h"

#include "launch.h"

namespace attnfast {
namespace {

std::string describe(const Problem& a) {
  return "attention on CUDA failed for query " + sizes({a.B, a.H, a.Tq, a.A}) + ", key " +
         sizes({a.B, a.H, a.Tk, a.A}) + ", value " + sizes({a.B, a.H, a.Tk, a.Dv});
}

}  // namespace

namespace cuda {
void run_forward(const Forward& a, const View& added, const Tensor& like) {
  launched(
      like, kThreads, [&] { return describe(a); },
      [&](const Launch& launch) { run_forward(a, added, launch, like.device()); });
}

void run_backward(const Backward& a, const Tensor& like) {
  launched(
      like, kThreads, [&] { return describe(a); },
      [&](const Launch& launch) { run_backward(a, launch, like.device()); });
}

int64_t grad_score_vector_parts(const Problem& a) { return attnfast::grad_score_vector_parts(a); }
}  // namespace cuda

namespace {
void run_forward(const Forward& a, const Tensor& query) { cuda::run_forward(a, {}, query); }
void run_backward(const Backward& a, const Tensor& query) { cuda::run_backward(a, query); }
void run_scores(const Forward& a, const Tensor& query) {
  launched(
      query, kThreads, [&] { return describe(a); },
      [&](const Launch& launch) { launch_scores(a, launch); });
}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CUDA, m) { AttentionOperators::implement(m); }

}  // namespace attnfast
