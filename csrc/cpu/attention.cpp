// Registers attention for the CPU: selects the instruction set and schedules the passes.
#include "attention.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <numeric>

#include "../launch_attention.h"
#include "run.h"

namespace attnfast {
namespace {

const AttentionKernels& kernels() {
  static const AttentionKernels& chosen = choose<portable::attention, avx2::attention, avx512::attention>();
  return chosen;
}

// The number of scores computed at a time if they are not returned, and the fewest rows of them.
constexpr int64_t kPart = 1 << 20, kPartRows = 16;
// Multiply-adds of one matrix from which a separate library call is worth its overhead.
constexpr int64_t kOwnCall = 1 << 26;
constexpr int64_t kSoftmaxDepth = 8;  // cost of a softmax alone, in features of a score

int64_t grad_score_vector_parts(const Problem&) { return 1; }

template <class... Calls>
void run_passes(const Forward& a, const Plan& plan, int64_t threads, const Pass<Calls>&... passes) {
  run(a, plan, threads, kernels().forward_scratch(a, plan), passes...);
}
template <class... Calls>
void run_passes(const Backward& a, const Plan& plan, int64_t threads, const Pass<Calls>&... passes) {
  run(a, plan, threads, kernels().backward_scratch(a, plan), passes...);
}

// ---- with a library's GEMM ----------------------------------------------------------------------

// Return true if a library's GEMM uses all the instructions that our kernels use: MKL uses AVX-512
// only on Intel processors.
bool library_keeps_up() {
#if defined(__x86_64__)
  static const bool keeps_up = !chooses_avx512<portable::attention, avx2::attention, avx512::attention>() ||
                               __builtin_cpu_is("intel");
  return keeps_up;
#else
  return true;
#endif
}

// Return true if PyTorch's GEMM may be faster than our kernels, for dot scores: there are enough
// rows to repay its packing, and few keys beyond the lengths, which only our kernels skip.
bool may_multiply(const Problem& a) {
  if (!library_keeps_up() || a.score_vector.data || !fits_library(a)) return false;
  if (!a.lengths) return true;
  return 4 * std::accumulate(a.lengths, a.lengths + a.B, int64_t{0}) >= 3 * a.B * a.Tk;
}

bool together(const Problem& a) { return even(a, a.query) && even(a, a.key) && even(a, a.value); }

// Return true if it is used: one call for all matrices, or, in the backward, large matrices.
bool multiplies(const Forward& a) {
  if (!a.weights.data && a.H * a.Tk * std::min(a.Tq, kPartRows) > kPart) return false;
  return together(a) && dense(a, a.context, a.Tq, a.Dv) && may_multiply(a);
}
bool multiplies(const Backward& a) {
  const bool large = a.Tq * a.Tk * std::max(a.A, a.Dv) >= kOwnCall;
  const bool at_once = together(a) && even(a, a.grad_context) && dense(a, a.grad_query, a.Tq, a.A) &&
                       dense(a, a.grad_key, a.Tk, a.A) && dense(a, a.grad_value, a.Tk, a.Dv);
  return (large || at_once) && may_multiply(a);
}

// Compute out = left right, matrices [m, k] and [k, n] of every sequence and head: in one call if
// they are evenly spaced, else one sequence at a time.
void multiply(const Problem& a, const View& left, const View& right, const View& out, int64_t m, int64_t k,
              int64_t n) {
  const bool together = even(a, left) && even(a, right) && even(a, out);
  for (int64_t b = 0; b < (together ? 1 : a.B); ++b) {
    const auto tensor = [&](const View& x, int64_t rows, int64_t columns) {
      return matrices(a, x, rows, columns, kCpu, b, together ? a.B : 1);
    };
    const Tensor product = tensor(out, m, n);
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_cpu_bmm_out(product.get(), tensor(left, m, k).get(), tensor(right, k, n).get()));
  }
}

// Return the forward of rows [row, row + rows) of sequences [b, b + n) only.
Forward part_of(const Forward& whole, int64_t b, int64_t n, int64_t row, int64_t rows) {
  Forward a = whole;
  const int64_t size = a.dtype == Dtype::f64 ? 8 : 4;
  const auto shift = [&](View& x, int64_t i, int64_t bytes) {
    if (x.data) x.data = static_cast<char*>(x.data) + (b * x.batch + i * x.row) * bytes;
  };
  for (View* x : {&a.query, &a.bias, &a.context, &a.weights, &a.log_sum_exp, &a.statistics})
    shift(*x, row, size);
  for (View* x : {&a.key, &a.value}) shift(*x, 0, size);
  shift(a.mask, row, 1);
  if (a.lengths) a.lengths += b;
  a.B = n;
  a.Tq = rows;
  return a;
}

// Run the forward with a library's GEMM. If weights are not returned, scores go part by part
// through a temporary buffer.
void forward_with_products(const Forward& whole) {
  const bool apart = !whole.weights.data;
  const int64_t row = std::max<int64_t>(whole.H * whole.Tk, 1);  // of all heads
  const int64_t rows = apart ? std::clamp<int64_t>(kPart / row, 1, whole.Tq) : whole.Tq;
  const int64_t n = apart ? std::clamp<int64_t>(kPart / (rows * row), 1, whole.B) : whole.B;
  const Tensor place = empty(kCpu, {apart ? n : 0, whole.H, rows, whole.Tk}, dtype_of_sums(whole));
  for (int64_t b = 0; b < whole.B; b += n)
    for (int64_t i = 0; i < whole.Tq; i += rows) {
      const Forward a = part_of(whole, b, std::min(n, whole.B - b), i, std::min(rows, whole.Tq - i));
      bool has_zero_weight = false;
      Plan plan = plan_by_rows(a);
      plan.multiplied = true;
      plan.has_zero_weight = &has_zero_weight;
      plan.scores = apart ? view(place) : a.weights;
      plan.scores.head = a.Tq * a.Tk;
      plan.scores.batch = a.H * plan.scores.head;
      multiply(a, a.query, transposed(a.key), plan.scores, a.Tq, a.A, a.Tk);
      run_passes(a, plan, threads_for(a, kSoftmaxDepth), kernels().softmax);
      multiply(a, plan.scores, a.value, a.context, a.Tq, a.Tk, a.Dv);
      if (has_zero_weight) run_passes(a, plan, threads_for(a), kernels().context);
    }
}

void backward_with_products(const Backward& a, Plan plan) {
  bool has_zero_weight = a.grad_score_given;
  plan.multiplied = true;
  plan.has_zero_weight = &has_zero_weight;
  if (!a.grad_score_given) {
    multiply(a, a.grad_context, transposed(a.value), a.grad_score, a.Tq, a.Dv, a.Tk);
    run_passes(a, plan, threads_for(a, kSoftmaxDepth), kernels().grad_score);
  }
  if (a.grad_query.data) multiply(a, a.grad_score, a.key, a.grad_query, a.Tq, a.Tk, a.A);
  if (a.grad_key.data) multiply(a, transposed(a.grad_score), a.query, a.grad_key, a.Tk, a.Tq, a.A);
  if (a.grad_value.data) multiply(a, transposed(a.weights), a.grad_context, a.grad_value, a.Tk, a.Tq, a.Dv);
  if (has_zero_weight || plan.grad_inputs_scale != 1)
    run_passes(a, plan, threads_for(a), kernels().grad_inputs);
}

// ---- forward and backward -----------------------------------------------------------------------

void run_forward(const Forward& a, const Tensor&) {
  if (multiplies(a)) return forward_with_products(a);
  Plan plan = plan_by_rows(a);
  const int64_t threads = threads_for(a);
  if (a.key_bounds.data) return run_passes(a, plan, threads, kernels().span);
  plan.scores = a.weights;
  std::optional<Tensor> scores;
  if (!a.weights.data && (plan.keys < a.Tk || plan.columns < a.Dv)) {  // threads share few rows
    scores = empty(kCpu, {a.B, a.H, a.Tq, a.Tk}, dtype_of_sums(a));
    plan.scores = view(*scores);
  }
  run_passes(a, plan, threads, kernels().scores, kernels().softmax, kernels().context);
}

void run_scores(const Forward& a, const Tensor&) {
  Plan plan = plan_by_rows(a);
  plan.scores = a.weights;
  run_passes(a, plan, threads_for(a), kernels().scores);
}

void run_backward(const Backward& a, const Tensor&) {
  Plan plan = plan_by_rows(a);
  const bool whole = plan.rows >= a.Tq && plan.keys >= a.Tk;
  plan.columns = columns_of_gradients(a);
  const bool takes_scale = !a.grad_score_given && !a.grad_score_returned && !a.score_vector.data;
  (takes_scale ? plan.grad_score_scale : plan.grad_inputs_scale) = a.scale;
  if (multiplies(a)) return backward_with_products(a, plan);
  const auto &grad_weights = kernels().grad_weights, &grad_score = kernels().grad_score;
  const auto &grad_score_span = kernels().grad_score_span, &grad_inputs = kernels().grad_inputs;
  const int64_t threads = threads_for(a);
  const bool inputs = a.grad_query.data || a.grad_key.data || a.grad_value.data || a.grad_score_vector.data;
  if (whole && inputs && !a.grad_score_given && grad_inputs.items(a, plan) == a.B * a.H) {
    // one item has all the data of a sequence
    return a.key_bounds.data ? run_passes(a, plan, threads, grad_score_span, grad_inputs)
                             : run_passes(a, plan, threads, grad_weights, grad_score, grad_inputs);
  }
  if (!a.grad_score_given)
    a.key_bounds.data ? run_passes(a, plan, threads, grad_score_span)
                      : run_passes(a, plan, threads, grad_weights, grad_score);
  if (inputs) run_passes(a, plan, threads, grad_inputs);
}

// ---- exponentials of the keys ------------------------------------------------------------------------------------

#define ATTNFAST_EXPONENTIALS(X)       \
  X(Tensor, key, rows, dtype, {Tk, A}) \
  ATTNFAST_LENGTHS(X)                  \
  X(std::string, score, any)

ATTNFAST_ARGUMENTS(ExponentialsArguments, "key_exponentials", ATTNFAST_EXPONENTIALS, KeysChecker)
ATTNFAST_RESULTS(ExponentialsOutputs, exponentials)

ExponentialsOutputs key_exponentials(const ExponentialsArguments& given) {
  const ExponentialsArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  Problem a{};
  a.dtype = dtype_of(given.key);
  a.score = score_of(given.score);
  a.B = fit.B;
  a.H = fit.heads;
  a.Tk = fit.Tk;
  a.A = fit.A;
  a.key = view_of_rows(given.key, keep);
  a.lengths = lengths_of(given.lengths, fit, fit.Tk, keep);
  return {cpu::exponentials_of(a)};
}

}  // namespace

namespace cpu {

Tensor exponentials_of(const Problem& problem) {
  const Tensor none = empty(kCpu, {0}, ScalarType::Float);
  if (problem.score != Score::tanh || problem.dtype == Dtype::f64) return none;
  KeyExponentials a{problem};
  a.Tq = a.W = a.Tk;
  a.Dv = a.A;
  const int64_t blocks = std::max<int64_t>((a.Tk + kKeyBlock - 1) / kKeyBlock, 1);
  const int64_t width = (a.A + kPadding - 1) / kPadding * kPadding;
  const Tensor out = empty(kCpu, {a.B, a.H, a.Tk, width}, ScalarType::Float);
  const Tensor ranges = empty(kCpu, {a.B, a.H, blocks, 1}, ScalarType::Float);
  a.exponentials_out = view(out);
  a.ranges = view(ranges);
  const Plan plan = {.rows = 1, .keys = kKeyBlock, .columns = width};
  run(a, plan, threads_for(a), kernels().key_exponentials_scratch(a), kernels().key_exponentials);
  const float* range = static_cast<const float*>(data_or_sentinel(ranges));
  const bool far =
      std::any_of(range, range + a.B * a.H * blocks, [](float x) { return x > kExponentialsLimit; });
  return far ? none : out;
}

void run_backward(const Backward& a) { attnfast::run_backward(a, Tensor()); }

void run_grad_value(const Backward& a) {
  Plan plan = plan_by_rows(a);
  plan.columns = columns_of_gradients(a);
  run_passes(a, plan, threads_for(a), kernels().grad_value);
}

}  // namespace cpu

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) {
  AttentionOperators::implement(m);
  Operators<key_exponentials>::implement(m);
}

}  // namespace attnfast
