// As much of CUDA as the kernels use, on the host: every CUDA thread of a block is a std::thread,
// the blocks of a launch run one after the other. Slow, but the numbers are real, and sanitizers see
// every access.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
using std::max;
using std::min;

struct dim3 {
  unsigned x, y;
};
inline dim3 blockIdx;
inline thread_local dim3 threadIdx;

// ---- half types ---------------------------------------------------------------------------------

struct __half {
  _Float16 x;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __half2float(__half h) { return h.x; }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __bfloat162float(__nv_bfloat16 b) {
  const uint32_t bits = uint32_t{b.bits} << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float __fdividef(float a, float b) { return a / b; }

// ---- threads that wait for each other -----------------------------------------------------------

// What 32 threads exchange through; the two waits keep one exchange out of the next.
struct Warp {
  std::barrier<> barrier{32};
  double values[32];
};
struct Block {
  explicit Block(int threads) : barrier(threads), warps(threads / 32) {}
  std::barrier<> barrier;
  std::atomic<int> votes[2] = {0, 0};
  std::vector<Warp> warps;
};
inline std::unique_ptr<Block> block;

inline Warp& warp() { return block->warps[threadIdx.x / 32]; }
inline void __syncthreads() { block->barrier.arrive_and_wait(); }
inline void __syncwarp() { warp().barrier.arrive_and_wait(); }

inline int __syncthreads_or(int vote) {
  static thread_local int turn = 0;
  turn ^= 1;
  block->votes[turn] |= vote;
  __syncthreads();
  const int any = block->votes[turn];
  block->votes[turn ^ 1] = 0;  // nobody looks at it before the next wait
  __syncthreads();
  return any;
}

inline void atomicMax(unsigned long long* to, unsigned long long x) {
  std::atomic_ref<unsigned long long> most(*to);
  for (auto seen = most.load(); seen < x && !most.compare_exchange_weak(seen, x);) {
  }
}

template <class C>
C __shfl_xor_sync(unsigned, C x, int mask) {
  const unsigned lane = threadIdx.x % 32;
  warp().values[lane] = x;
  __syncwarp();
  const C other = warp().values[lane ^ mask];
  __syncwarp();
  return other;
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  warp().values[threadIdx.x % 32] = vote;
  __syncwarp();
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= unsigned{warp().values[lane] != 0} << lane;
  __syncwarp();
  return lanes;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }

template <int threads>
struct LaunchOnHost {
  template <class... Args>
  void operator()(void (*kernel)(Args...), int64_t blocks_x, int64_t blocks_y,
                  const Args&... args) const {
    block = std::make_unique<Block>(threads);
    std::vector<std::thread> all;
    for (unsigned t = 0; t < unsigned{threads}; ++t)
      all.emplace_back([&, t] {
        threadIdx = {t, 0};
        for (unsigned y = 0; y < blocks_y; ++y)
          for (unsigned x = 0; x < blocks_x; ++x) {
            if (t == 0) blockIdx = {x, y};
            __syncthreads();
            kernel(args...);
            __syncthreads();
          }
      });
    for (std::thread& t : all) t.join();
  }
};
