// Launches kernels on the current stream of a tensor's device; nothing synchronizes.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>

#include <limits>
#include <map>
#include <mutex>
#include <string>

#include "../launch.h"
#include "tile.cuh"

namespace attnfast {
namespace {

bool bias_may_be_of_sums() { return false; }
bool weights_may_be_sparse() { return false; }

class Launch {
  torch::stable::Device device;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream = nullptr;
  int threads;
  mutable std::vector<Tensor> scratch_tensors;

  static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clear the error, or the next launch would report it again
    throw std::runtime_error(cudaGetErrorString(error));
  }

  template <class... Args>
  void start(void (*kernel)(Args...), int64_t x, int64_t y, int64_t cluster, const Args&... args) const {
    if (x == 0 || y == 0) return;
    if (x > std::numeric_limits<int32_t>::max() || y > kMostOnY)
      throw std::runtime_error("more blocks than a grid holds");
    cudaLaunchAttribute dimension{};
    dimension.id = cudaLaunchAttributeClusterDimension;
    dimension.val.clusterDim = {1, static_cast<unsigned>(cluster), 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(x, y);
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &dimension;
    config.numAttrs = cluster > 1;
    check(cudaLaunchKernelEx(&config, kernel, args...));
  }

 public:
  Launch(const Tensor& like, int threads) : device(like.device()), guard(device.index()), threads(threads) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }

  template <class... Args>
  void operator()(void (*kernel)(Args...), int64_t x, int64_t y, const Args&... args) const {
    start(kernel, x, y, 1, args...);
  }

  // Launch blocks that differ in y as a cluster.
  template <class... Args>
  void together(void (*kernel)(Args...), int64_t x, int64_t y, const Args&... args) const {
    start(kernel, x, y, y, args...);
  }

  // Return the number of multiprocessors if each can run one block of a cooperative launch at the same
  // time, else 0. With n blocks, each has bytes(n) bytes of dynamic shared memory.
  template <class Shared, class... Args>
  int blocks_at_once(void (*kernel)(Args...), int threads, const Shared& bytes) const {
    int major = 0, cooperative = 0, most = 0, processors = 0, blocks = 0;
    const auto read = [&](int& value, cudaDeviceAttr attribute) {
      check(cudaDeviceGetAttribute(&value, attribute, device.index()));
    };
    read(major, cudaDevAttrComputeCapabilityMajor);  // from 8 on, tensor cores multiply tf32
    read(cooperative, cudaDevAttrCooperativeLaunch);
    read(most, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    read(processors, cudaDevAttrMultiProcessorCount);
    const int64_t shared = bytes(processors);
    if (major < 8 || !cooperative || shared > most) return 0;
    // As much as any launch may take, because other threads launch the kernel too.
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared));
    return blocks ? processors : 0;
  }

  // Run a cooperative launch, whose blocks may wait for each other; `blocks` is from blocks_at_once.
  // Return false if a process that may use only a part of the device has no room for them.
  template <class... Args>
  bool at_once(void (*kernel)(Args...), int blocks, int threads, int64_t shared,
               const Args&... args) const {
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &cooperative;
    config.numAttrs = 1;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
    if (error == cudaErrorCooperativeLaunchTooLarge) {
      cudaGetLastError();
      return false;
    }
    check(error);
    return true;
  }

  // Return the number of blocks of the largest cluster, up to kMostBlocks: 1 if the device has
  // none, or runs code built for one that has none.
  template <class... Args>
  int most_together(void (*kernel)(Args...)) const {
    static std::mutex one;
    static std::map<std::pair<const void*, int>, int> known;
    const std::lock_guard lock(one);
    int& most = known[{reinterpret_cast<const void*>(kernel), device.index()}];
    if (most) return most;
    cudaFuncAttributes code{};
    check(cudaFuncGetAttributes(&code, kernel));
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1, kMostBlocks);
    config.blockDim = dim3(threads);
    if (code.ptxVersion < 90 ||
        cudaOccupancyMaxPotentialClusterSize(&most, kernel, &config) != cudaSuccess) {
      cudaGetLastError();
      most = 1;
    }
    return most = std::clamp(most, 1, kMostBlocks);
  }

  // Return the number of blocks that the device runs at once.
  template <class... Args>
  int places(void (*kernel)(Args...)) const {
    static std::mutex one;
    static std::map<std::pair<const void*, int>, int> known;
    const std::lock_guard lock(one);
    int& places = known[{reinterpret_cast<const void*>(kernel), device.index()}];
    if (places) return places;
    int processors = 0, blocks = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device.index()));
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0));
    return places = std::max(processors * blocks, 1);
  }

  // Allocate memory that lasts until the kernels have finished.
  template <class C>
  C* scratch(int64_t numbers) const {
    scratch_tensors.push_back(
        empty(device, {numbers}, sizeof(C) == 8 ? ScalarType::Double : ScalarType::Float));
    return static_cast<C*>(scratch_tensors.back().data_ptr());
  }

  // Allocate such memory filled with zeros.
  int64_t* zeros(int64_t numbers) const {
    scratch_tensors.push_back(empty(device, {numbers}, ScalarType::Long));
    void* place = scratch_tensors.back().data_ptr();
    if (numbers) check(cudaMemsetAsync(place, 0, numbers * sizeof(int64_t), stream));
    return static_cast<int64_t*>(place);
  }
};

template <class List = std::initializer_list<int64_t>>
std::string sizes(const List& list) {
  std::string text;
  for (const int64_t size : list) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text + "]";
}

// Call run(launch); an error message includes describe().
template <class Describe, class Run>
void launched(const Tensor& like, int threads, const Describe& describe, const Run& run) {
  const Launch launch(like, threads);
  try {
    run(launch);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(describe() + ": " + error.what());
  }
}

}  // namespace
}  // namespace attnfast
