// Registers coverage_attention for CUDA.
#include "coverage.cuh"

#include "../launch_coverage.h"
#include "launch.h"

namespace attnfast {
namespace {

std::string describe(const Coverage& a) {
  return "coverage_attention on CUDA failed for query " + sizes({a.B, a.H, a.Tq, a.A}) +
         ", key " + sizes({a.B, a.H, a.Tk, a.A}) + ", " + std::to_string(a.filters_count) +
         " filters of " + sizes({a.channels, a.width});
}

void run_forward(Coverage& a, const Tensor& query) {
  launched(a, query, kThreads, describe, [&](const Launch& launch) { launch_forward(a, launch); });
}

void run_backward(Coverage& a, const Tensor& query) {
  launched(a, query, kThreads, describe, [&](const Launch& launch) { launch_backward(a, launch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CUDA, m) {
  m.impl("coverage_attention", TORCH_BOX(&coverage_attention));
  m.impl("coverage_attention_backward", TORCH_BOX(&coverage_attention_backward));
  m.impl("coverage_attention_backward_into", TORCH_BOX(&coverage_attention_backward_into));
}

}  // namespace attnfast
