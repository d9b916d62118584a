// Scheduling for the CPU launchers: the instruction set, threads, items of passes.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#include "../launch.h"
#include "attention.h"

namespace attnfast {
namespace cpu {

// Return the exponentials of the keys, which steps over the same keys cache, for tanh; the size is
// [0] if there is nothing to cache, e.g. if a key is outside the exponentials' domain.
Tensor exponentials_of(const Problem&);
// Run the backward of attention, as its operator does.
void run_backward(const Backward&);
// Run the part of that backward that computes the values' gradient.
void run_grad_value(const Backward&);

}  // namespace cpu

namespace {

using cpu::Pass;
using cpu::Plan;

bool bias_may_be_of_sums() { return true; }
bool weights_may_be_sparse() { return true; }

const torch::stable::Device kCpu(torch::headeronly::DeviceType::CPU);

#define ATTNFAST_QUOTED(x) #x
#define ATTNFAST_EXPANDED(x) ATTNFAST_QUOTED(x)

// Return the table of kernels for this processor, or for the instruction set that is requested. Only
// `portable` is defined on other processors than x86.
template <auto& portable, auto& avx2, auto& avx512>
const auto& choose() {
  const char* forced = std::getenv("ATTNFAST_CPU_ISA");
  const std::string name = forced ? forced : "";
#ifdef ATTNFAST_BUILD_ISA  // the only one in this build, see setup.py
  if (name == ATTNFAST_EXPANDED(ATTNFAST_BUILD_ISA) || name.empty()) return ATTNFAST_BUILD_ISA;
#else
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (name == "avx512" || name.empty())) return avx512;
  if (has_avx2 && (name == "avx2" || name.empty())) return avx2;
#endif
  if (name == "portable" || name.empty()) return portable;
#endif
  throw std::runtime_error(
      "ATTNFAST_CPU_ISA must be portable, avx2 or avx512, one that the "
      "processor and the build have, got " +
      name);
}

template <auto&>
struct Table {};

// Return true if `choose` returns the table for AVX-512, which a build for another instruction set
// does not have.
template <auto& portable, auto& avx2, auto& avx512>
bool chooses_avx512() {
#ifdef ATTNFAST_BUILD_ISA
  return std::is_same_v<Table<ATTNFAST_BUILD_ISA>, Table<avx512>>;
#else
  return &choose<portable, avx2, avx512>() == &avx512;
#endif
}

// Below this number of score elements a second thread costs more than it gains.
constexpr int64_t kWorthAThread = 1 << 15;

int64_t threads_for(int64_t elements) {
  return std::clamp<int64_t>(elements / kWorthAThread, 1, torch::stable::get_num_threads());
}

int64_t threads_for(const Problem& a, int64_t depth) { return threads_for(a.B * a.H * a.Tq * a.W * depth); }

int64_t threads_for(const Problem& a) { return threads_for(a, std::max<int64_t>({a.A, a.Dv, 1})); }

ScalarType dtype_of_sums(const Problem& a) {
  return a.dtype == Dtype::f64 ? ScalarType::Double : ScalarType::Float;
}

// Call run(item, scratch) for every item. A thread starts with its share of the items and then
// helps the others.
template <class Run>
void parallel_items(int64_t items, int64_t most_threads, size_t scratch, const Run& run) {
  if (items == 0) return;
  const int64_t threads = std::min(items, most_threads);
  const Tensor buffers = empty(kCpu, {threads * static_cast<int64_t>(scratch)}, ScalarType::Byte);
  char* base = static_cast<char*>(buffers.data_ptr());
  std::vector<std::atomic<int64_t>> taken(threads);  // items taken of each share
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < threads; ++i) {
        const int64_t share = (t + i) % threads, stop = items * (share + 1) / threads;
        for (int64_t item; (item = items * share / threads + taken[share]++) < stop;)
          run(item, base + t * scratch);
      }
  });
}

// Run consecutive passes: item by item if they have equally many items, so that a thread's share is
// in its cache when the next pass starts; otherwise one after the other.
template <class Call, class... Calls>
void run(const Call& a, const Plan& plan, int64_t most_threads, size_t scratch,
         const Pass<Calls>&... passes) {
  constexpr size_t count = sizeof...(passes);
  const int64_t items[] = {passes.items(a, plan)...};
  for (size_t first = 0, last; first < count; first = last) {
    for (last = first + 1; last < count && items[last] == items[first];) ++last;
    parallel_items(items[first], most_threads, scratch, [&](int64_t item, void* place) {
      size_t i = 0;
      const auto run_one = [&](const auto& pass) {
        if (first <= i && i < last) pass.run(a, plan, item, place);
        ++i;
      };
      (run_one(passes), ...);
    });
  }
}

// Choose the rows of one item: enough to repay the preparation of the keys, few enough that the
// scores stay in cache and that all threads get the same number of items, or several each. If rows
// alone give too few items, keys and columns are split too.
Plan plan_by_rows(const Problem& a) {
  Plan plan{};
  const int64_t threads = threads_for(a), sequences = a.B * a.H;
  const int64_t cached = (int64_t{1} << 18) / std::max<int64_t>(a.W, 1);
  const int64_t most = std::clamp<int64_t>(cached, 4, kMostRows);
  int64_t pieces = std::max<int64_t>((a.Tq + most - 1) / most, 1);  // of a sequence and head
  while (sequences * pieces % threads != 0 && sequences * pieces < 4 * threads) ++pieces;
  plan.rows = std::clamp<int64_t>((a.Tq + pieces - 1) / pieces, 4, most);
  plan.rows = std::min(plan.rows, std::max<int64_t>(a.Tq, 1));
  plan.keys = std::max<int64_t>(a.Tk, 1);
  plan.columns = std::max<int64_t>(a.Dv, 1);
  const int64_t items = std::max<int64_t>(sequences * ((a.Tq + plan.rows - 1) / plan.rows), 1);
  if (threads == 1 || items >= 2 * threads || a.key_bounds.data) return plan;
  const auto part = [&](int64_t n, int64_t multiple) {
    const int64_t size = n * items / (2 * threads);
    return std::max<int64_t>((size + multiple - 1) / multiple, 1) * multiple;
  };
  plan.keys = part(a.Tk, kKeyBlock);
  plan.columns = part(a.Dv, kPadding);
  return plan;
}

// Return the columns of one item of the inputs' gradients: a few registers' worth, and more only if
// each thread still gets two items; whole rows for one query, because of the memory's bandwidth.
int64_t columns_of_gradients(const Problem& a) {
  const int64_t widest = std::max<int64_t>({a.A, a.Dv, 1}), items = std::max<int64_t>(a.B * a.H, 1);
  const bool half = a.dtype == Dtype::f16 || a.dtype == Dtype::bf16;  // separate sums
  const bool rows = a.Tq == 1 || (a.key_bounds.data && !half);
  const int64_t most = rows ? widest : half ? kPadding : 4 * kPadding;
  const int64_t slices = (2 * threads_for(a) + items - 1) / items, n = slices * kPadding;
  return std::clamp<int64_t>((widest + n - 1) / n * kPadding, kPadding, std::max(most, kPadding));
}

}  // namespace
}  // namespace attnfast
