// Registers attention for the CPU: picks the instruction set, shares out the work.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#include "../launch.h"

namespace attnfast {
namespace {

const AttentionKernels& kernels() {
  static const AttentionKernels& chosen = []() -> const AttentionKernels& {
    const char* forced = std::getenv("ATTNFAST_CPU_ISA");
    const std::string name = forced ? forced : "";
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (avx512 && (name == "avx512" || name.empty())) return avx512::attention;
    if (avx2 && (name == "avx2" || name.empty())) return avx2::attention;
#endif
    if (name == "portable" || name.empty()) return portable::attention;
    throw std::runtime_error("ATTNFAST_CPU_ISA must be portable, avx2 or avx512, one that this "
                             "processor has, got " + name);
  }();
  return chosen;
}

// Run every item of a pass; threads take the next one as they come free.
void run(const Pass& pass, const Attention& a, size_t scratch) {
  const int64_t items = pass.items(a);
  if (items == 0) return;
  const int64_t threads = std::min<int64_t>(items, torch::stable::get_num_threads());
  const Tensor memory = torch::stable::empty({threads * static_cast<int64_t>(scratch)},
                                             ScalarType::Byte);
  char* base = static_cast<char*>(memory.data_ptr());
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t item; (item = next++) < items;) pass.run(a, item, base + t * scratch);
  });
}

// Rows of one item: enough to repay the preparation of the keys, few enough that scores stay in
// cache and that every thread gets several items.
void share_out(Attention& a) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t share = a.B * a.H * a.Tq / (4 * threads);
  const int64_t cached = (int64_t{1} << 18) / std::max<int64_t>(a.Tk, 1);
  a.rows = std::clamp<int64_t>(std::min(share, cached), 4, 64);
  a.rows = std::min(a.rows, std::max<int64_t>(a.Tq, 1));
}

int64_t grad_weight_parts(const Attention&) { return 1; }

void run_forward(Attention& a, const Tensor&) {
  share_out(a);
  run(kernels().forward, a, kernels().scratch(a));
}

void run_backward(Attention& a, const Tensor&) {
  share_out(a);
  const size_t scratch = kernels().scratch(a);
  run(kernels().grad_score, a, scratch);
  run(kernels().grad_inputs, a, scratch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace attnfast
