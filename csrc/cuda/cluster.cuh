// Blocks that work on the same rows: those along grid.y, a cluster if there are several (sm_90 and
// later). They synchronize and read each other's shared memory.
#pragma once
#include "tile.cuh"

namespace attnfast {
namespace {

// Synchronize all threads of these blocks; their previous writes become visible.
__device__ inline void wait_for_blocks() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (gridDim.y > 1) {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    return;
  }
#endif
  __syncthreads();
}

// Return the address of a shared variable in another block. No block may exit before others have
// read its variables.
template <class C>
__device__ const C* of_another(const C* mine, unsigned block) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (gridDim.y > 1) return static_cast<const C*>(__cluster_map_shared_rank(mine, block));
#endif
  return mine;
}

// Reduce the values of all threads of all blocks, always in the same order. The blocks synchronize
// once, after which one may reach the next call while others still read: `turn` alternates the
// buffer.
template <class Join, class C>
__device__ C of_blocks(C x, int& turn) {
  static_assert(kMostBlocks * kWarps == 32);  // a lane for each warp
  __shared__ C parts[2][kWarps];
  const unsigned lane = threadIdx.x % 32, block = lane / kWarps;
  turn ^= 1;
  x = of_warp<Join>(x);
  if (lane == 0) parts[turn][threadIdx.x / 32] = x;
  wait_for_blocks();
  x = Join::none;
  if (block < gridDim.y) x = of_another(parts[turn], block)[lane % kWarps];
  return of_warp<Join>(x);
}

struct Unweighted {
  template <class C>
  __device__ void operator()(C (&factor)[kMostBlocks]) const {
    for (C& x : factor) x = 1;
  }
};

// Add up the blocks' sums of the columns c < width, each times its block's factor. sum(first, count,
// sums) computes a block's sums of the columns from `first` on. weigh(factor), called once, sets the
// factors; what other blocks wrote before is visible to it. One thread calls out(c, total). No block
// continues while another reads its variables.
template <class C, class Sum, class Weigh, class Out>
__device__ void add_up_blocks(int64_t width, const Sum& sum, const Weigh& weigh, const Out& out) {
  constexpr int kAtATime = 1024;
  __shared__ C sums[kAtATime];
  C factor[kMostBlocks];
  int64_t first = 0;
  do {
    const int count = up_to(kAtATime, width - first);
    sum(first, count, sums);
    wait_for_blocks();
    if (first == 0) weigh(factor);
    for (int c = threadIdx.x + blockIdx.y * kThreads; c < count; c += kThreads * gridDim.y) {
      C total = 0;
#pragma unroll
      for (unsigned block = 0; block < kMostBlocks; ++block)
        if (block < gridDim.y) total += factor[block] * of_another(sums, block)[c];
      out(first + c, total);
    }
    wait_for_blocks();
  } while ((first += kAtATime) < width);
}

}  // namespace
}  // namespace attnfast
