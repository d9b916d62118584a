// Registers attention for CUDA.
#include "attention.cuh"

#include "../launch_attention.h"
#include "launch.h"

namespace attnfast {
namespace {

std::string describe(const Attention& a) {
  return "attention on CUDA failed for query " + sizes({a.B, a.H, a.Tq, a.A}) + ", key " +
         sizes({a.B, a.H, a.Tk, a.A}) + ", value " + sizes({a.B, a.H, a.Tk, a.Dv});
}

void run_forward(Attention& a, const Tensor& query) {
  launched(a, query, kThreads, describe, [&](const Launch& launch) { launch_forward(a, launch); });
}

void run_backward(Attention& a, const Tensor& query) {
  launched(a, query, kThreads, describe, [&](const Launch& launch) { launch_backward(a, launch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace attnfast
