// As much of CUDA as the kernels use, on the host: every CUDA thread of a block is a fiber, which runs
// until it has to wait; the blocks of a launch run one after the other, those of a cluster side by side,
// each on a thread of its own, whose variables are the block's shared memory. The numbers are real, and
// sanitizers see every access: to ThreadSanitizer fibers are threads that only a barrier puts in order.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#else
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
inline void* __tsan_create_fiber(unsigned) { return nullptr; }
inline void __tsan_destroy_fiber(void*) {}
inline void* __tsan_get_current_fiber() { return nullptr; }
inline void __tsan_switch_to_fiber(void*, unsigned) {}
#endif

#define __device__
#define __host__
#define __global__
#define __shared__ static thread_local
#define __launch_bounds__(...)
using std::max;
using std::min;

struct dim3 {
  unsigned x, y;
};
inline thread_local dim3 blockIdx, gridDim;

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
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline float __fdividef(float a, float b) { return a / b; }

// ---- threads that wait for each other -----------------------------------------------------------

// What puts fibers in turn is none of ThreadSanitizer's business.
#define SHIM __attribute__((no_sanitize("thread"), noinline)) inline

// An asynchronous copy to shared memory. Until it is waited for, its target holds 1e9, not NaN:
// sums that are NaN are computed again, and hide it.
struct Copy {
  float* to;
  const float* from;  // null at the end of a group
  int count;
  void spoil() const { std::fill_n(to, count, 1e9f); }
};
struct Fiber {
  ucontext_t context;
  char* stack;
  void* tsan;
  bool runs;
  unsigned turn;  // of its votes
  std::vector<Copy> copies;
};
constexpr unsigned kMostThreads = 512;
inline thread_local Fiber fibers[kMostThreads + 1];  // the last is the one that launches
inline thread_local unsigned running;

SHIM dim3 this_thread() { return {running, 0}; }
#define threadIdx this_thread()

SHIM void run(unsigned next) {
  Fiber &from = fibers[running], &to = fibers[next];
  running = next;
  __tsan_switch_to_fiber(to.tsan, 1);  // 1: the switch orders nothing
  swapcontext(&from.context, &to.context);
}
// Lets the next fiber go on that has not ended; after the last one the launch goes on.
SHIM void run_another() {
  unsigned next = running;
  for (unsigned i = 0; i < kMostThreads; ++i) {
    next = (next + 1) % kMostThreads;
    if (fibers[next].runs) return next == running ? void() : run(next);
  }
  run(kMostThreads);
}

struct Barrier {
  unsigned size, arrived = 0, turn = 0;
  char before[2] = {};  // what comes before this turn; who is a turn ahead leaves it in the other
  SHIM void arrive_and_wait() {
    const unsigned mine = turn;
    __tsan_release(&before[mine % 2]);
    if (++arrived == size) arrived = 0, ++turn;
    while (turn == mine) run_another();
    __tsan_acquire(&before[mine % 2]);
  }
};

// What 32 threads exchange through; the two waits keep one exchange out of the next.
struct Warp {
  Barrier barrier{32};
  double values[32];
  float a[16][8], b[8][8];  // matrices
};
struct Block {
  explicit Block(unsigned threads) : barrier{threads}, warps(threads / 32) {}
  Barrier barrier;
  int votes[2] = {0, 0};
  std::vector<Warp> warps;
};
inline thread_local std::unique_ptr<Block> block;

inline Warp& warp() { return block->warps[threadIdx.x / 32]; }
inline void __syncthreads() { block->barrier.arrive_and_wait(); }
inline void __syncwarp() { warp().barrier.arrive_and_wait(); }

SHIM int __syncthreads_or(int vote) {
  const unsigned turn = fibers[running].turn ^= 1;
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

// Blocks that wait for each other, and where the variables of each one's thread lie.
struct Cluster {
  explicit Cluster(unsigned blocks) : barrier(blocks), shared(blocks) {}
  std::barrier<> barrier;
  std::vector<const char*> shared;
};
inline thread_local Cluster* cluster;
inline thread_local char own_shared;

inline void __cluster_barrier_arrive() {
  __syncthreads();
  if (threadIdx.x == 0) cluster->barrier.arrive_and_wait();
}
inline void __cluster_barrier_wait() { __syncthreads(); }
// What blocks look at in each other. One that leaves writes to it, so that a look that comes too late is
// a race.
inline thread_local volatile char* looked_at[16];
SHIM void remember(const void* mine) {
  for (volatile char*& place : looked_at) {
    if (place == mine) return;
    if (!place) return void(place = static_cast<char*>(const_cast<void*>(mine)));
  }
  abort();
}
inline void leave() {
  for (volatile char* place : looked_at)
    if (place) *place = *place;
}
inline void* __cluster_map_shared_rank(const void* mine, unsigned rank) {
  remember(mine);
  return const_cast<char*>(static_cast<const char*>(mine) - &own_shared + cluster->shared[rank]);
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
// mma.m16n8k8 of tf32: lane l has rows l / 4 and l / 4 + 8 of a, in columns l % 4 and l % 4 + 4; rows
// l % 4 and l % 4 + 4 of b, in column l / 4; and rows l / 4 and l / 4 + 8 of d, in columns 2 (l % 4) and
// 2 (l % 4) + 1. The sum is rounded towards 0.
inline void multiply_add_on_host(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  const unsigned lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  float (&of_a)[16][8] = warp().a, (&of_b)[8][8] = warp().b;
  const auto narrow = [](float x) { return __uint_as_float(__float_as_uint(x) & ~0x1fffu); };
  for (int i = 0; i < 4; ++i) of_a[row + i % 2 * 8][column + i / 2 * 4] = narrow(a[i]);
  for (int i = 0; i < 2; ++i) of_b[column + 4 * i][row] = narrow(b[i]);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int k = 0; k < 8; ++k) sum += double{of_a[row + i / 2 * 8][k]} * of_b[k][2 * column + i % 2];
    d[i] = float(sum);
    if (fabs(double{d[i]}) > fabs(sum)) d[i] = nextafterf(d[i], 0);
  }
  __syncwarp();
}

inline void begin_copy_on_host(float* to, const float* from, int count) {
  if (reinterpret_cast<uintptr_t>(to) % (4 * count) || reinterpret_cast<uintptr_t>(from) % (4 * count))
    abort();  // not aligned
  fibers[running].copies.push_back({to, from, count});
  fibers[running].copies.back().spoil();
}
inline void commit_copies_on_host() { fibers[running].copies.push_back({}); }
inline void wait_for_copies_on_host(int most) {
  std::vector<Copy>& copies = fibers[running].copies;
  int groups = std::ranges::count(copies, nullptr, &Copy::from);
  auto x = copies.begin();
  for (; groups > most; ++x)
    if (x->from) std::copy_n(x->from, x->count, x->to);
    else --groups;
  copies.erase(copies.begin(), x);
  for (const Copy& copy : copies) copy.spoil();
}

inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }

// The stacks of threads that have ended: new ones would have to be cleared by the system. Never
// destroyed, or they would be leaks.
constexpr size_t kStack = 1 << 18;
inline std::mutex stacks_in_turn;
inline auto& stacks = *new std::vector<char*>;
inline char* take_stack() {
  const std::lock_guard lock(stacks_in_turn);
  if (stacks.empty()) return static_cast<char*>(malloc(kStack));
  char* const stack = stacks.back();
  stacks.pop_back();
  return stack;
}
inline void free_fibers() {
  for (Fiber& fiber : fibers) {
    if (!fiber.stack) continue;
    const std::lock_guard lock(stacks_in_turn);
    stacks.push_back(fiber.stack);
    __tsan_destroy_fiber(fiber.tsan);
  }
}

inline int most_together = 8;  // blocks of a cluster; without any, 1
inline int places = 8;         // blocks that run at once
// Multiprocessors, each of which runs one block of a cooperative launch, or 0 if the device has no such
// launch; and the bytes of dynamic shared memory that a block may have.
inline int multiprocessors = 0, shared_memory = 0;
// The dynamic shared memory of a block.
inline thread_local std::vector<double> dynamic_shared;
#define ATTNFAST_DYNAMIC_SHARED(type, name) \
  type* const name = reinterpret_cast<type*>(dynamic_shared.data())
inline int launches = 0;
inline bool only_recorded = false;     // launches, which then compute nothing
inline std::vector<int64_t> recorded;  // the blocks of each launch

template <unsigned threads>
struct LaunchOnHost {
  inline static thread_local const void* all_blocks;
  mutable std::vector<std::unique_ptr<char[]>> kept;

  template <class AllBlocks>
  SHIM static void begin() {
    __tsan_acquire(fibers);
    (*static_cast<const AllBlocks*>(all_blocks))();
    __tsan_release(fibers);
    fibers[running].runs = false;
    run_another();
  }

  template <class AllBlocks>
  SHIM static void launch(const AllBlocks& what) {
    all_blocks = &what;
    block = std::make_unique<Block>(threads);
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = fibers[t];
      if (!fiber.stack) {
        fiber.stack = take_stack();
        fiber.tsan = __tsan_create_fiber(0);
      }
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack;
      fiber.context.uc_stack.ss_size = kStack;
      makecontext(&fiber.context, begin<AllBlocks>, 0);
      fiber.runs = true;
    }
    fibers[kMostThreads].tsan = __tsan_get_current_fiber();
    running = kMostThreads;
    __tsan_release(fibers);
    run(0);
    __tsan_acquire(fibers);
  }

  // The blocks [first_y, last_y) of every x.
  template <class... Args>
  static void run_blocks(void (*kernel)(Args...), dim3 grid, unsigned first_y, unsigned last_y,
                         const Args&... args) {
    launch([&] {
      for (unsigned y = first_y; y < last_y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
          if (threadIdx.x == 0) blockIdx = {x, y}, gridDim = grid;
          __syncthreads();
          kernel(args...);
          if (std::ranges::any_of(fibers[running].copies, [](const Copy& x) { return x.from; }))
            abort();  // nobody waits for it
          __syncthreads();
          if (threadIdx.x == 0) leave();
        }
    });
  }

  template <class... Args>
  void operator()(void (*kernel)(Args...), int64_t x, int64_t y, const Args&... args) const {
    const dim3 grid = {static_cast<unsigned>(x), static_cast<unsigned>(y)};
    ++launches;
    if (only_recorded) return recorded.push_back(x * y);
    run_blocks(kernel, grid, 0, grid.y, args...);
  }

  template <class... Args>
  void together(void (*kernel)(Args...), int64_t x, int64_t y, const Args&... args) const {
    if (y == 1 || only_recorded) return (*this)(kernel, x, y, args...);
    const dim3 grid = {static_cast<unsigned>(x), static_cast<unsigned>(y)};
    ++launches;
    Cluster shared(grid.y);
    std::vector<std::jthread> blocks;
    for (unsigned rank = 0; rank < grid.y; ++rank)
      blocks.emplace_back([&, rank] {
        cluster = &shared;
        shared.shared[rank] = &own_shared;
        shared.barrier.arrive_and_wait();  // all know where
        run_blocks(kernel, grid, rank, rank + 1, args...);
        free_fibers();
      });
  }

  template <class Shared, class... Args>
  int blocks_at_once(void (*)(Args...), int, const Shared& bytes) const {
    return multiprocessors && bytes(multiprocessors) <= shared_memory ? multiprocessors : 0;
  }

  template <class... Args>
  bool at_once(void (*kernel)(Args...), int blocks, int many_threads, int64_t shared,
               const Args&... args) const {
    ++launches;
    if (many_threads != kMostThreads) abort();
    std::vector<std::jthread> running;
    for (int rank = 0; rank < blocks; ++rank)
      running.emplace_back([&, rank] {
        dynamic_shared.assign(shared / sizeof(double), NAN);
        LaunchOnHost<kMostThreads>::launch([&] {
          if (threadIdx.x == 0) blockIdx = {unsigned(rank), 0}, gridDim = {unsigned(blocks), 1};
          __syncthreads();
          kernel(args...);
        });
        free_fibers();
      });
    return true;
  }

  int most_together(...) const { return ::most_together; }
  int places(...) const { return ::places; }

  template <class C>
  C* scratch(int64_t numbers) const {
    kept.emplace_back(new char[numbers * sizeof(C)]);
    memset(kept.back().get(), 0xff, numbers * sizeof(C));  // NaN
    return reinterpret_cast<C*>(kept.back().get());
  }

  int64_t* zeros(int64_t numbers) const {
    int64_t* place = scratch<int64_t>(numbers);
    memset(place, 0, numbers * sizeof(int64_t));
    return place;
  }
};
