// Registers attention for the CPU: picks the instruction set, shares out the work.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <initializer_list>
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

// Below this many score elements a second thread costs more than it brings.
constexpr int64_t kWorthAThread = 1 << 15;

int64_t threads_for(const Attention& a) {
  const int64_t elements = a.B * a.H * a.Tq * a.Tk * std::max<int64_t>({a.A, a.Dv, 1});
  return std::clamp<int64_t>(elements / kWorthAThread, 1, torch::stable::get_num_threads());
}

// Run passes that follow one another: item by item where they have as many, else one after the
// other. Threads take the next item as they come free.
void run(std::initializer_list<Pass> passes, const Attention& a) {
  const size_t scratch = kernels().scratch(a);
  const auto run_group = [&](const Pass* first, const Pass* last) {
    const int64_t items = first->items(a);
    if (items == 0) return;
    const int64_t threads = std::min(items, threads_for(a));
    const Tensor memory = torch::stable::empty({threads * static_cast<int64_t>(scratch)},
                                               ScalarType::Byte);
    char* base = static_cast<char*>(memory.data_ptr());
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t item; (item = next++) < items;)
          for (const Pass* pass = first; pass < last; ++pass) pass->run(a, item, base + t * scratch);
    });
  };
  const Pass* first = passes.begin();
  for (const Pass* pass = first; pass < passes.end(); ++pass) {
    if (pass->items(a) == first->items(a)) continue;
    run_group(first, pass);
    first = pass;
  }
  run_group(first, passes.end());
}

// Rows of one item: enough to repay the preparation of the keys, few enough that scores stay in
// cache and that every thread gets several items. Where rows alone make too few items, keys and
// columns are shared out too.
void share_out_rows(Attention& a) {
  const int64_t threads = threads_for(a);
  const int64_t share = a.B * a.H * a.Tq / (4 * threads);
  const int64_t cached = (int64_t{1} << 18) / std::max<int64_t>(a.Tk, 1);
  a.rows = std::clamp<int64_t>(std::min(share, cached), 4, 64);
  a.rows = std::min(a.rows, std::max<int64_t>(a.Tq, 1));
  a.keys = std::max<int64_t>(a.Tk, 1);
  a.columns = std::max<int64_t>(a.Dv, 1);
  const int64_t items = std::max<int64_t>(a.B * a.H * ((a.Tq + a.rows - 1) / a.rows), 1);
  if (threads == 1 || items >= 2 * threads) return;
  const auto part = [&](int64_t n, int64_t multiple) {
    const int64_t size = n * items / (2 * threads);
    return std::max<int64_t>((size + multiple - 1) / multiple, 1) * multiple;
  };
  a.keys = part(a.Tk, kKeyBlock);
  a.columns = part(a.Dv, kPadding);
}

// Narrow slices make use of registers; whole rows, for one query, of the memory's bandwidth.
void share_out_columns(Attention& a) {
  const int64_t widest = std::max<int64_t>({a.A, a.Dv, 1}), items = std::max<int64_t>(a.B * a.H, 1);
  a.columns = kPadding;
  if (a.Tq > 1) return;
  const int64_t slices = (2 * threads_for(a) + items - 1) / items;
  a.columns = std::max<int64_t>((widest + slices * kPadding - 1) / (slices * kPadding), 1) * kPadding;
}

int64_t grad_weight_parts(const Attention&) { return 1; }

void run_forward(Attention& a, const Tensor& query) {
  share_out_rows(a);
  a.scores = a.weights;
  Tensor scores = query;
  if (!a.scores.data && (a.keys < a.Tk || a.columns < a.Dv)) {  // few rows, shared by threads
    const bool wide = a.dtype == Dtype::f64;
    scores = torch::stable::new_empty(query, {a.B, a.H, a.Tq, a.Tk},
                                      wide ? ScalarType::Double : ScalarType::Float);
    a.scores = view(scores);
  }
  const auto& [score, softmax, context] = kernels().forward;
  run({score, softmax, context}, a);
}

void run_backward(Attention& a, const Tensor&) {
  a.scores = a.grad_score;
  share_out_rows(a);
  const bool whole = a.rows >= a.Tq && a.keys >= a.Tk;
  const auto& [grad_weights, softmax] = kernels().grad_score;
  const Pass& grad_inputs = kernels().grad_inputs;
  const bool inputs =
      a.grad_query.data || a.grad_key.data || a.grad_value.data || a.grad_weight.data;
  share_out_columns(a);
  if (whole && inputs && !a.grad_score_given && grad_inputs.items(a) == a.B * a.H) {
    run({grad_weights, softmax, grad_inputs}, a);  // one item has all that concerns a sequence
    return;
  }
  if (!a.grad_score_given) run({grad_weights, softmax}, a);
  if (inputs) run({grad_inputs}, a);
}

// The exponentials of prepared keys, or size [0] if one of them lies beyond their domain.
Tensor exponentials(const Tensor key, const Optional lengths) {
  Call call(key, key, key, {}, lengths, {}, 1);
  Attention& a = call.a;
  const int64_t blocks = std::max<int64_t>((a.Tk + kKeyBlock - 1) / kKeyBlock, 1);
  const int64_t width = (a.A + kPadding - 1) / kPadding * kPadding;
  const Tensor out = torch::stable::new_empty(key, {a.B, a.H, a.Tk, width}, ScalarType::Float);
  const Tensor ranges = torch::stable::new_empty(key, {a.B, a.H, blocks, 1}, ScalarType::Float);
  a.exponentials = view(out);
  a.ranges = view(ranges);
  a.rows = 1;
  a.scores = a.exponentials;
  if (a.dtype != Dtype::f64) run({kernels().prepare}, a);
  const float* range = static_cast<const float*>(ranges.data_ptr());
  const bool far = a.dtype == Dtype::f64 ||
      std::any_of(range, range + a.B * a.H * blocks, [](float x) { return x > kPreparedLimit; });
  return far ? torch::stable::new_empty(key, {0}, ScalarType::Float) : out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("exponentials", TORCH_BOX(&exponentials));
}

}  // namespace attnfast
