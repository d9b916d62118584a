// Hands kernels to the current stream of a tensor's device; nothing waits.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>

#include <limits>
#include <string>

#include "../launch.h"

namespace attnfast {
namespace {

class Launch {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream = nullptr;
  int threads;

 public:
  Launch(const Tensor& like, int threads) : guard(like.get_device_index()), threads(threads) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }

  template <class... Args>
  void operator()(void (*kernel)(Args...), int64_t x, int64_t y, const Args&... args) const {
    if (x == 0 || y == 0) return;
    if (x > std::numeric_limits<int32_t>::max() || y > 65535)
      throw std::runtime_error("more blocks than a grid holds");
    kernel<<<dim3(x, y), threads, 0, stream>>>(args...);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  }
};

std::string sizes(std::initializer_list<int64_t> list) {
  std::string text;
  for (const int64_t size : list) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text + "]";
}

// Call run(launch); an error says what failed, as describe tells.
template <class Arguments, class Run>
void launched(const Arguments& a, const Tensor& like, int threads,
              std::string (*describe)(const Arguments&), const Run& run) {
  const Launch launch(like, threads);
  try {
    run(launch);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(describe(a) + ": " + error.what());
  }
}

}  // namespace
}  // namespace attnfast
