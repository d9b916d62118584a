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

void run_forward(const CopyForward& a, const Tensor& logits) {
  launched(
      logits, kThreads, [&] { return describe(a); },
      [&](const Launch& launch) { launch_forward(a, launch); });
}

void run_backward(const CopyBackward& a, const Tensor& logits) {
  launched(
      logits, kThreads, [&] { return describe(a); },
      [&](const Launch& launch) { launch_backward(a, launch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CUDA, m) { CopyOperators::implement(m); }

}  // namespace attnfast
