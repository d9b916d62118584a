// Registers attention for CUDA: device, stream, launches and their errors.
#include "attention.cuh"

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>

#include <limits>
#include <string>

#include "../launch_attention.h"

namespace attnfast {
namespace {

// Hands kernels to the current stream of the query's device; nothing waits.
struct Launch {
  const Attention& a;
  const Tensor& query;
  torch::stable::accelerator::DeviceGuard guard{query.get_device_index()};
  cudaStream_t stream = nullptr;

  Launch(const Attention& a, const Tensor& query) : a(a), query(query) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(query.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }

  template <class... Args>
  void operator()(void (*kernel)(Args...), int64_t x, int64_t y, const Args&... args) const {
    if (x == 0 || y == 0) return;
    if (x > std::numeric_limits<int32_t>::max() || y > 65535) fail("more blocks than a grid holds");
    kernel<<<dim3(x, y), kThreads, 0, stream>>>(args...);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) fail(cudaGetErrorString(error));
  }

  [[noreturn]] void fail(const std::string& why) const {
    const auto sizes = [](std::initializer_list<int64_t> list) {
      std::string text;
      for (const int64_t size : list) text += (text.empty() ? "[" : ", ") + std::to_string(size);
      return text + "]";
    };
    throw std::runtime_error("attention on CUDA failed for query " + sizes({a.B, a.H, a.Tq, a.A}) +
                             ", key " + sizes({a.B, a.H, a.Tk, a.A}) + ", value " +
                             sizes({a.B, a.H, a.Tk, a.Dv}) + ": " + why);
  }
};

void run_forward(Attention& a, const Tensor& query) {
  const Launch launch(a, query);
  launch_forward(a, [&](auto... args) { launch(args...); });
}

void run_backward(Attention& a, const Tensor& query) {
  const Launch launch(a, query);
  launch_backward(a, [&](auto... args) { launch(args...); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace attnfast
