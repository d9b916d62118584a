// Registers attention for CUDA.
#include "attention.cuh"

#include "../launch_attention.h"
#include "launch.h"

namespace attnfast {
namespace {

std::string describe(const Problem& a) {
  return "attention on CUDA failed for query " + sizes({a.B, a.H, a.Tq, a.A}) + ", key " +
         sizes({a.B, a.H, a.Tk, a.A}) + ", value " + sizes({a.B, a.H, a.Tk, a.Dv});
}

void run_forward(const Forward& a, const Tensor& query) {
  launched(
      query, kThreads, [&] { return describe(a); },
      [&](const Launch& launch) { launch_forward(a, launch); });
}

void run_backward(const Backward& a, const Tensor& query) {
  launched(
      query, kThreads, [&] { return describe(a); },
      [&](const Launch& launch) { launch_backward(a, launch); });
}

}  // namespace

namespace cuda {
void run_forward(const Forward& a, const Tensor& like) { attnfast::run_forward(a, like); }
void run_backward(const Backward& a, const Tensor& like) { attnfast::run_backward(a, like); }
int64_t grad_weight_parts(const Problem& a) { return attnfast::grad_weight_parts(a); }
}  // namespace cuda

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CUDA, m) { AttentionOperators::implement(m); }

}  // namespace attnfast
