// Registers attention for the CPU: picks the instruction set, shares out the work.
#include "attention.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <numeric>
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

const torch::stable::Device kCpu(torch::headeronly::DeviceType::CPU);

// Smaller matrices than this are multiplied by our own kernels.
constexpr int64_t kLibraryRows = 8, kLibraryColumns = 64;
// Scores that pass at a time where they are not returned, and the fewest rows of them.
constexpr int64_t kPart = 1 << 20, kPartRows = 16;

// Below this many score elements a second thread costs more than it brings.
constexpr int64_t kWorthAThread = 1 << 15;
constexpr int64_t kSoftmaxDepth = 8;  // of a softmax alone, in features of a score

int64_t threads_for(const Attention& a, int64_t depth) {
  const int64_t elements = a.B * a.H * a.Tq * a.Tk * depth;
  return std::clamp<int64_t>(elements / kWorthAThread, 1, torch::stable::get_num_threads());
}

int64_t threads_for(const Attention& a) {
  return threads_for(a, std::max<int64_t>({a.A, a.Dv, 1}));
}

// Run passes that follow one another: item by item where they have as many, else one after the
// other. A thread begins with its own share of the items, which is in its cache when the next pass
// comes, and then helps the others.
void run(std::initializer_list<Pass> passes, const Attention& a, int64_t most_threads) {
  const size_t scratch = kernels().scratch(a);
  const auto run_group = [&](const Pass* first, const Pass* last) {
    const int64_t items = first->items(a);
    if (items == 0) return;
    const int64_t threads = std::min(items, most_threads);
    const Tensor memory = empty(kCpu, {threads * static_cast<int64_t>(scratch)}, ScalarType::Byte);
    char* base = static_cast<char*>(memory.data_ptr());
    std::vector<std::atomic<int64_t>> taken(threads);  // of each share
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t i = 0; i < threads; ++i) {
          const int64_t share = (t + i) % threads, stop = items * (share + 1) / threads;
          for (int64_t item; (item = items * share / threads + taken[share]++) < stop;)
            for (const Pass* pass = first; pass < last; ++pass)
              pass->run(a, item, base + t * scratch);
        }
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

void run(std::initializer_list<Pass> passes, const Attention& a) { run(passes, a, threads_for(a)); }

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

// ---- with a library's products ------------------------------------------------------------------

ScalarType dtype_of_sums(const Attention& a) {
  return a.dtype == Dtype::f64 ? ScalarType::Double : ScalarType::Float;
}

// Whether the matrices of all sequences and heads lie evenly.
bool even(const Attention& a, const View& x) {
  return a.H == 1 || a.B == 1 || x.batch == a.H * x.head;
}

// Whether PyTorch's matrix product beats ours, for dot scores: enough rows to repay its packing, and
// few keys beyond the lengths, which only ours leaves out.
bool multiplies(const Attention& a) {
  if (a.weight.data || (a.dtype != Dtype::f32 && a.dtype != Dtype::f64)) return false;
  if (a.B * a.H == 0 || a.Tq < kLibraryRows) return false;
  if (std::max(a.A, a.Dv) < kLibraryColumns) return false;
  if (!a.weights.data && a.H * a.Tk * std::min(a.Tq, kPartRows) > kPart) return false;
  if (!even(a, a.query) || !even(a, a.key) || !even(a, a.value)) return false;
  if (a.grad_context.data && !even(a, a.grad_context)) return false;
  if (!a.lengths) return true;
  return 4 * std::accumulate(a.lengths, a.lengths + a.B, int64_t{0}) >= 3 * a.B * a.Tk;
}

View transposed(View x) {
  std::swap(x.row, x.column);
  return x;
}

// out = left right: matrices [m, k] and [k, n] of every sequence and head.
void multiply(const Attention& a, const View& left, const View& right, const View& out, int64_t m,
              int64_t k, int64_t n) {
  const auto tensor = [&](const View& x, int64_t rows, int64_t columns) {
    return torch::stable::from_blob(x.data, {a.B * a.H, rows, columns},
                                    {a.H == 1 ? x.batch : x.head, x.row, x.column}, kCpu,
                                    dtype_of_sums(a));
  };
  const Tensor product = tensor(out, m, n);
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_bmm_out(product.get(), tensor(left, m, k).get(),
                                                tensor(right, k, n).get()));
}

// The forward of rows [row, row + rows) of sequences [b, b + n) alone.
Attention part_of(Attention a, int64_t b, int64_t n, int64_t row, int64_t rows) {
  const int64_t size = a.dtype == Dtype::f64 ? 8 : 4;
  const auto shift = [&](View& x, int64_t i, int64_t bytes) {
    if (x.data) x.data = static_cast<char*>(x.data) + (b * x.batch + i * x.row) * bytes;
  };
  for (View* x : {&a.query, &a.bias, &a.context, &a.weights, &a.log_sum_exp}) shift(*x, row, size);
  for (View* x : {&a.key, &a.value}) shift(*x, 0, size);
  shift(a.mask, row, 1);
  if (a.lengths) a.lengths += b;
  a.B = n;
  a.Tq = rows;
  return a;
}

// Without weights to return, scores pass part by part through a place of their own.
void forward_with_products(const Attention& whole) {
  const bool apart = !whole.weights.data;
  const int64_t row = std::max<int64_t>(whole.H * whole.Tk, 1);  // of all heads
  const int64_t rows = apart ? std::clamp<int64_t>(kPart / row, 1, whole.Tq) : whole.Tq;
  const int64_t n = apart ? std::clamp<int64_t>(kPart / (rows * row), 1, whole.B) : whole.B;
  const Tensor place = empty(kCpu, {apart ? n : 0, whole.H, rows, whole.Tk}, dtype_of_sums(whole));
  const auto& [score, softmax, context] = kernels().forward;
  for (int64_t b = 0; b < whole.B; b += n)
    for (int64_t i = 0; i < whole.Tq; i += rows) {
      Attention a = part_of(whole, b, std::min(n, whole.B - b), i, std::min(rows, whole.Tq - i));
      a.scores = apart ? view(place) : a.weights;
      a.scores.head = a.Tq * a.Tk;
      a.scores.batch = a.H * a.scores.head;
      share_out_rows(a);
      bool hides = false;
      a.hides = &hides;
      multiply(a, a.query, transposed(a.key), a.scores, a.Tq, a.A, a.Tk);
      run({softmax}, a, threads_for(a, kSoftmaxDepth));
      multiply(a, a.scores, a.value, a.context, a.Tq, a.Tk, a.Dv);
      if (hides) run({context}, a);
    }
}

void backward_with_products(Attention& a) {
  bool hides = a.grad_score_given;
  a.hides = &hides;
  if (!a.grad_score_given) {
    multiply(a, a.grad_context, transposed(a.value), a.grad_score, a.Tq, a.Dv, a.Tk);
    run({kernels().grad_score[1]}, a, threads_for(a, kSoftmaxDepth));
  }
  if (a.grad_query.data) multiply(a, a.grad_score, a.key, a.grad_query, a.Tq, a.Tk, a.A);
  if (a.grad_key.data)
    multiply(a, transposed(a.grad_score), a.query, a.grad_key, a.Tk, a.Tq, a.A);
  if (a.grad_value.data)
    multiply(a, transposed(a.weights), a.grad_context, a.grad_value, a.Tk, a.Tq, a.Dv);
  if (hides || a.scale != 1) run({kernels().grad_inputs}, a);
}

// ---- forward and backward -----------------------------------------------------------------------

void run_forward(Attention& a, const Tensor&) {
  a.multiplied = multiplies(a);
  if (a.multiplied) return forward_with_products(a);
  share_out_rows(a);
  a.scores = a.weights;
  std::optional<Tensor> scores;
  if (!a.scores.data && (a.keys < a.Tk || a.columns < a.Dv)) {  // few rows, shared by threads
    scores = empty(kCpu, {a.B, a.H, a.Tq, a.Tk}, dtype_of_sums(a));
    a.scores = view(*scores);
  }
  const auto& [score, softmax, context] = kernels().forward;
  run({score, softmax, context}, a);
}

void run_backward(Attention& a, const Tensor&) {
  a.scores = a.grad_score;
  share_out_rows(a);
  const bool whole = a.rows >= a.Tq && a.keys >= a.Tk;
  share_out_columns(a);
  if (!a.grad_score_given && !a.grad_score_returned && !a.weight.data)
    std::swap(a.scale, a.grad_score_scale);
  a.multiplied = multiplies(a);
  if (a.multiplied) return backward_with_products(a);
  const auto& [grad_weights, softmax] = kernels().grad_score;
  const Pass& grad_inputs = kernels().grad_inputs;
  const bool inputs =
      a.grad_query.data || a.grad_key.data || a.grad_value.data || a.grad_weight.data;
  if (whole && inputs && !a.grad_score_given && grad_inputs.items(a) == a.B * a.H) {
    run({grad_weights, softmax, grad_inputs}, a);  // one item has all that concerns a sequence
    return;
  }
  if (!a.grad_score_given) run({grad_weights, softmax}, a);
  if (inputs) run({grad_inputs}, a);
}

// The exponentials of prepared keys, or size [0] if one of them lies beyond their domain.
Tensor exponentials(const Tensor key, const Optional lengths) {
  Call call(key, key, key, {}, {}, {}, lengths, {}, 1);
  Attention& a = call.a;
  const int64_t blocks = std::max<int64_t>((a.Tk + kKeyBlock - 1) / kKeyBlock, 1);
  const int64_t width = (a.A + kPadding - 1) / kPadding * kPadding;
  const Tensor out = empty(kCpu, {a.B, a.H, a.Tk, width}, ScalarType::Float);
  const Tensor ranges = empty(kCpu, {a.B, a.H, blocks, 1}, ScalarType::Float);
  a.exponentials = view(out);
  a.ranges = view(ranges);
  a.rows = 1;
  a.scores = a.exponentials;
  if (a.dtype != Dtype::f64) run({kernels().prepare}, a);
  const float* range = static_cast<const float*>(ranges.data_ptr());
  const bool far = a.dtype == Dtype::f64 ||
      std::any_of(range, range + a.B * a.H * blocks, [](float x) { return x > kPreparedLimit; });
  return far ? empty(kCpu, {0}, ScalarType::Float) : out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("exponentials", TORCH_BOX(&exponentials));
}

}  // namespace attnfast
