// Registers coverage_attention for CUDA.
#include "coverage.cuh"

#include "../launch_coverage.h"
#include "launch.h"

namespace attnfast {
namespace {

template <class Call>
std::string describe(const Call& a) {
  return "coverage_attention on CUDA failed for query " + sizes({a.B, a.H, a.Tq, a.A}) + ", key " +
         sizes({a.B, a.H, a.Tk, a.A}) + ", " + std::to_string(a.filters_count) + " filters of " +
         sizes({a.channels, a.taps});
}

}  // namespace

namespace cuda {
void run_forward(const CoverageForward& a, const Tensor& like) {
  launched(
      like, kThreads, [&] { return describe(a); },
      [&](const Launch& launch) { launch_forward(a, launch); });
}

void run_backward(const CoverageBackward& a, const Tensor& like) {
  launched(
      like, kThreads, [&] { return describe(a); },
      [&](const Launch& launch) { launch_backward(a, launch); });
}
}  // namespace cuda

namespace {
void run_forward(const CoverageForward& a, const Tensor& query) { cuda::run_forward(a, query); }
void run_backward(const CoverageBackward& a, const Tensor& query) { cuda::run_backward(a, query); }
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CUDA, m) { CoverageOperators::implement(m); }

}  // namespace attnfast
