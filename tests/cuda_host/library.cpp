// The kernels of csrc/cuda on the host, registered for CPU tensors: everything but the launchers in
// the .cu files is what runs on a GPU.
#include "../../csrc/cuda/attention.cuh"
#include "../../csrc/cuda/copying.cuh"
#include "../../csrc/cuda/coverage.cuh"
#include "../../csrc/launch_attention.h"
#include "../../csrc/launch_copying.h"
#include "../../csrc/launch_coverage.h"

namespace attnfast {
namespace {
void run_forward(Attention& a, const Tensor&) { launch_forward(a, LaunchOnHost<kThreads>{}); }
void run_backward(Attention& a, const Tensor&) { launch_backward(a, LaunchOnHost<kThreads>{}); }
void run_forward(const Copying& a, const Tensor&) { launch_forward(a, LaunchOnHost<kThreads>{}); }
void run_backward(const Copying& a, const Tensor&) { launch_backward(a, LaunchOnHost<kThreads>{}); }
void run_forward(Coverage& a, const Tensor&) { launch_forward(a, LaunchOnHost<kThreads>{}); }
void run_backward(Coverage& a, const Tensor&) { launch_backward(a, LaunchOnHost<kThreads>{}); }
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("copy_distribution", TORCH_BOX(&copy_distribution));
  m.impl("copy_distribution_backward", TORCH_BOX(&copy_distribution_backward));
  m.impl("coverage_attention", TORCH_BOX(&coverage_attention));
  m.impl("coverage_attention_backward", TORCH_BOX(&coverage_attention_backward));
  m.impl("coverage_attention_backward_into", TORCH_BOX(&coverage_attention_backward_into));
}
}  // namespace attnfast
