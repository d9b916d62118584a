// Registers attention for the CPU: picks the instruction set, shares out the work.
#include "attention.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <numeric>

#include "../launch_attention.h"
#include "run.h"

namespace attnfast {
namespace {

const AttentionKernels& kernels() {
  static const AttentionKernels& chosen = ATTNFAST_CHOOSE(attention);
  return chosen;
}

// Smaller matrices than this are multiplied by our own kernels.
constexpr int64_t kLibraryRows = 8, kLibraryColumns = 64;
// Scores that pass at a time where they are not returned, and the fewest rows of them.
constexpr int64_t kPart = 1 << 20, kPartRows = 16;
// Multiply-adds of one matrix from which the library earns a call of its own.
constexpr int64_t kOwnCall = 1 << 26;
constexpr int64_t kSoftmaxDepth = 8;  // of a softmax alone, in features of a score

void run(std::initializer_list<Pass> passes, const Attention& a, int64_t most_threads) {
  run(passes, a, most_threads, kernels().scratch(a));
}

void run(std::initializer_list<Pass> passes, const Attention& a) { run(passes, a, threads_for(a)); }

int64_t grad_weight_parts(const Attention&) { return 1; }
int64_t blocks_of_keys(const Attention&) { return 0; }

// ---- with a library's products ------------------------------------------------------------------

// Whether one call of a library can take the matrices of all sequences and heads.
bool even(const Attention& a, const View& x) {
  return a.H == 1 || a.B == 1 || x.batch == a.H * x.head;
}
bool together(const Attention& a) {
  const auto dense = [&](const View& x, int64_t rows, int64_t columns) {
    return !x.data || (x.row == columns && even(a, x) &&
                       (a.H == 1 ? x.batch : x.head) == rows * columns);
  };
  return even(a, a.query) && even(a, a.key) && even(a, a.value) && even(a, a.grad_context) &&
      dense(a.context, a.Tq, a.Dv) && dense(a.grad_query, a.Tq, a.A) &&
      dense(a.grad_key, a.Tk, a.A) && dense(a.grad_value, a.Tk, a.Dv);
}

// Whether a library's products use all that ours do: MKL leaves AVX-512 to Intel's processors.
bool library_keeps_up() {
#if defined(__x86_64__)
  static const bool keeps_up = &kernels() != &avx512::attention || __builtin_cpu_is("intel");
  return keeps_up;
#else
  return true;
#endif
}

// Whether PyTorch's matrix product beats ours, for dot scores: enough rows to repay its packing,
// few keys beyond the lengths, which only ours leaves out, and one call for all matrices, or, in the
// backward, large ones.
bool multiplies(const Attention& a) {
  if (!library_keeps_up()) return false;
  if (a.weight.data || a.span.data || (a.dtype != Dtype::f32 && a.dtype != Dtype::f64)) return false;
  if (a.B * a.H == 0 || a.Tq < kLibraryRows) return false;
  if (std::max(a.A, a.Dv) < kLibraryColumns) return false;
  if (!a.weights.data && a.H * a.Tk * std::min(a.Tq, kPartRows) > kPart) return false;
  const bool large = a.grad_context.data && a.Tq * a.Tk * std::max(a.A, a.Dv) >= kOwnCall;
  if (!large && !together(a)) return false;
  if (!a.lengths) return true;
  return 4 * std::accumulate(a.lengths, a.lengths + a.B, int64_t{0}) >= 3 * a.B * a.Tk;
}

View transposed(View x) {
  std::swap(x.row, x.column);
  return x;
}

// out = left right: matrices [m, k] and [k, n] of every sequence and head, all at once if they lie
// evenly, else sequence by sequence.
void multiply(const Attention& a, const View& left, const View& right, const View& out, int64_t m,
              int64_t k, int64_t n) {
  const bool together = even(a, left) && even(a, right) && even(a, out);
  const int64_t size = a.dtype == Dtype::f64 ? 8 : 4;
  for (int64_t b = 0; b < (together ? 1 : a.B); ++b) {
    const auto tensor = [&](const View& x, int64_t rows, int64_t columns) {
      return torch::stable::from_blob(static_cast<char*>(x.data) + b * x.batch * size,
                                      {together ? a.B * a.H : a.H, rows, columns},
                                      {a.H == 1 ? x.batch : x.head, x.row, x.column}, kCpu,
                                      dtype_of_sums(a));
    };
    const Tensor product = tensor(out, m, n);
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_bmm_out(product.get(), tensor(left, m, k).get(),
                                                  tensor(right, k, n).get()));
  }
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
  if (a.span.data) return run({kernels().forward_span}, a);
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
  const Pass &grad_score_span = kernels().grad_score_span, &grad_inputs = kernels().grad_inputs;
  const bool inputs =
      a.grad_query.data || a.grad_key.data || a.grad_value.data || a.grad_weight.data;
  if (whole && inputs && !a.grad_score_given && grad_inputs.items(a) == a.B * a.H) {
    // one item has all that concerns a sequence
    return a.span.data ? run({grad_score_span, grad_inputs}, a)
                       : run({grad_weights, softmax, grad_inputs}, a);
  }
  if (!a.grad_score_given)
    a.span.data ? run({grad_score_span}, a) : run({grad_weights, softmax}, a);
  if (inputs) run({grad_inputs}, a);
}

// What steps over the same keys keep of them: their exponentials, for tanh; size [0] if nothing, as
// where a key lies beyond the exponentials' domain.
Tensor prepare(const Tensor key, const Optional lengths, std::string score) {
  Call call("prepare", key, key, key, {}, {}, {}, lengths, {}, 0, 1, "dot");
  Attention& a = call.a;
  if (score_of(score) != Score::tanh || a.dtype == Dtype::f64) return empty(kCpu, {0}, ScalarType::Float);
  const int64_t blocks = std::max<int64_t>((a.Tk + kKeyBlock - 1) / kKeyBlock, 1);
  const int64_t width = (a.A + kPadding - 1) / kPadding * kPadding;
  const Tensor out = empty(kCpu, {a.B, a.H, a.Tk, width}, ScalarType::Float);
  const Tensor ranges = empty(kCpu, {a.B, a.H, blocks, 1}, ScalarType::Float);
  a.exponentials = view(out);
  a.ranges = view(ranges);
  a.rows = 1;
  a.scores = a.exponentials;
  run({kernels().prepare}, a);
  const float* range = static_cast<const float*>(place_of(ranges));
  const bool far =
      std::any_of(range, range + a.B * a.H * blocks, [](float x) { return x > kPreparedLimit; });
  return far ? empty(kCpu, {0}, ScalarType::Float) : out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("prepare", TORCH_BOX(&prepare));
}

}  // namespace attnfast
