// Registers copy_distribution for CUDA.
#include "copying.cuh"

#include "../launch_copying.h"
#include "launch.h"

namespace attnfast {
namespace {

std::string describe(const Copying& a) {
  return "copy_distribution on CUDA failed for logits " + sizes({a.B, a.Tq, a.V}) + ", weights " +
         sizes({a.B, a.Tq, a.Tk});
}

void run_forward(const Copying& a, const Tensor& logits) {
  launched(a, logits, kThreads, describe, [&](const Launch& launch) { launch_forward(a, launch); });
}

void run_backward(const Copying& a, const Tensor& logits) {
  launched(a, logits, kThreads, describe, [&](const Launch& launch) { launch_backward(a, launch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CUDA, m) {
  m.impl("copy_distribution", TORCH_BOX(&copy_distribution));
  m.impl("copy_distribution_backward", TORCH_BOX(&copy_distribution_backward));
}

}  // namespace attnfast
