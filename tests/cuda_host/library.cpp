// The kernels of csrc/cuda/attention.cuh on the host, registered for CPU tensors: everything but
// attention.cu is what runs on a GPU.
#include "../../csrc/cuda/attention.cuh"
#include "../../csrc/launch_attention.h"

namespace attnfast {
namespace {
void run_forward(Attention& a, const Tensor&) { launch_forward(a, LaunchOnHost<kThreads>{}); }
void run_backward(Attention& a, const Tensor&) { launch_backward(a, LaunchOnHost<kThreads>{}); }
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}
}  // namespace attnfast
