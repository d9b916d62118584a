// Registers the recurrent layer with attention for CUDA.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "recurrent.cuh"

#include "launch.h"
#include "recurrent_backward.h"
#include "recurrent_forward.h"

namespace attnfast {
namespace {

template <class Arguments>
std::string describe(const Arguments& given) {
  return "recurrent on CUDA failed for input " + sizes(given.input.sizes()) + ", hidden " +
         sizes(given.hidden.sizes());
}

RecurrentOutputs recurrent(const RecurrentArguments& given) {
  RecurrentOutputs made;
  launched(
      given.input, kThreads, [&] { return describe(given); },
      [&](const Launch& launch) { made = run_recurrent(given, launch); });
  return made;
}

RecurrentGradients recurrent_backward(const RecurrentBackwardArguments& given) {
  RecurrentGradients grads;
  launched(
      given.input, kThreads, [&] { return describe(given); },
      [&](const Launch& launch) { grads = run_recurrent_backward(given, launch); });
  return grads;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CUDA, m) { RecurrentOperators::implement(m); }

}  // namespace attnfast
