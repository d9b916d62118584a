// Registers linear for the CPU: selects the instruction set and schedules blocks of its products.
#include "linear.h"

#include "run.h"
#include "scratchpad.h"

namespace attnfast {
namespace {

const LinearKernels& kernels() {
  static const LinearKernels& chosen = choose<portable::linear, avx2::linear, avx512::linear>();
  return chosen;
}

#define ATTNFAST_LINEAR(X)                \
  X(Tensor, input, sizes, dtype, {M, K})  \
  X(Tensor, weight, sizes, dtype, {N, K}) \
  X(Optional, bias, sizes, dtype, {N})
#define ATTNFAST_LINEAR_BACKWARD(X)            \
  X(Tensor, grad_output, sizes, dtype, {M, N}) \
  X(Tensor, input, sizes, dtype, {M, K})       \
  X(Tensor, weight, sizes, dtype, {N, K})      \
  X(bool, need_grad_input, any)                \
  X(bool, need_grad_parameters, any)

struct LinearChecker : ArgumentChecker {
  int64_t M, K, N;

  template <class Arguments>
  explicit LinearChecker(const Arguments& given) : ArgumentChecker(Arguments::kOperator, given.input) {
    check(given.input.dim() == 2 && given.input.is_cpu(), "input");
    check(dtype == ScalarType::Float || dtype == ScalarType::Double, "input");
    check(given.weight.dim() == 2, "weight");
    M = given.input.size(0);
    K = given.input.size(1);
    N = given.weight.size(0);
  }
};

ATTNFAST_ARGUMENTS(LinearArguments, "linear", ATTNFAST_LINEAR, LinearChecker)
ATTNFAST_ARGUMENTS(LinearBackwardArguments, "linear_backward", ATTNFAST_LINEAR_BACKWARD, LinearChecker)
ATTNFAST_RESULTS(LinearOutputs, output)
ATTNFAST_RESULTS(LinearGradients, grad_input, grad_weight, grad_bias)

constexpr int64_t kWorkOfAThread = 1 << 16;  // multiply-adds that repay another thread
constexpr int64_t kItemsOfAThread = 16;      // so that all threads end at the same time

void multiply(const Product& a) {
  if (a.M == 0) return;
  const LinearKernels& k = kernels();
  const int64_t threads =
      std::clamp<int64_t>(a.M * a.N * a.K / kWorkOfAThread, 1, torch::stable::get_num_threads());
  const int64_t panels = k.panels(a), blocks = (a.M + k.rows - 1) / k.rows;
  const int64_t groups = std::max<int64_t>(std::min(kItemsOfAThread * threads / blocks, panels), 1);
  Scratchpad pad(k.packed(a));
  char* const packed = pad.take(k.packed(a));
  parallel_items(panels, threads, 0, [&](int64_t panel, void*) { k.pack(a, panel, packed); });
  parallel_items(blocks * groups, threads, k.scratch(a), [&](int64_t item, void* scratch) {
    const int64_t group = item % groups;
    k.multiply(a, item / groups * k.rows, panels * group / groups, panels * (group + 1) / groups, packed,
               scratch);
  });
}

LinearOutputs linear(const LinearArguments& given) {
  const LinearArguments::ArgumentChecker fit(given);
  const Tensor input = packed(given.input), weight = packed(given.weight);
  const Tensor bias = given.bias ? packed(*given.bias) : weight;
  const Tensor output = empty(kCpu, {fit.M, fit.N}, fit.dtype);
  multiply({.dtype = dtype_of(input),
            .M = fit.M,
            .N = fit.N,
            .K = fit.K,
            .left = data_or_sentinel(input),
            .right = data_or_sentinel(weight),
            .left_row = fit.K,
            .left_column = 1,
            .right_row = 1,
            .right_column = fit.K,
            .out = data_or_sentinel(output),
            .bias = given.bias ? data_or_sentinel(bias) : nullptr});
  return {output};
}

LinearGradients linear_backward(const LinearBackwardArguments& given) {
  const LinearBackwardArguments::ArgumentChecker fit(given);
  const Tensor grad = packed(given.grad_output), input = packed(given.input), weight = packed(given.weight);
  const int64_t M = fit.M, N = fit.N, K = fit.K;
  const Tensor grad_input = empty_if(given.need_grad_input, input, {M, K}, fit.dtype);
  const Tensor grad_weight = empty_if(given.need_grad_parameters, input, {N, K}, fit.dtype);
  const Tensor grad_bias = empty_if(given.need_grad_parameters, input, {N}, fit.dtype);
  Product of_both = {.dtype = dtype_of(input), .left = data_or_sentinel(grad)};
  if (given.need_grad_input) {
    Product a = of_both;
    a.M = M, a.N = K, a.K = N;
    a.right = data_or_sentinel(weight);
    a.left_row = N, a.left_column = 1, a.right_row = K, a.right_column = 1;
    a.out = data_or_sentinel(grad_input);
    multiply(a);
  }
  if (given.need_grad_parameters) {
    Product a = of_both;
    a.M = N, a.N = K, a.K = M;
    a.right = data_or_sentinel(input);
    a.left_row = 1, a.left_column = N, a.right_row = K, a.right_column = 1;
    a.out = data_or_sentinel(grad_weight);
    a.sums = data_or_sentinel(grad_bias);
    multiply(a);
  }
  return {grad_input, grad_weight, grad_bias};
}

using LinearOperators = Operators<linear, linear_backward>;

}  // namespace

// Return the lists above, for a test.
ATTNFAST_EXPORT const char* attnfast_linear_operators() {
  static const std::string text = LinearOperators::listed();
  return text.c_str();
}

// Return true if these products are faster than PyTorch's, whose library uses AVX-512 only on Intel
// processors.
ATTNFAST_EXPORT bool attnfast_linear_is_quicker() {
#if defined(__x86_64__)
  try {
    return chooses_avx512<portable::linear, avx2::linear, avx512::linear>() && !__builtin_cpu_is("intel");
  } catch (const std::exception&) {  // an unsupported instruction set: the operators report it
    return false;
  }
#else
  return false;
#endif
}

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) { LinearOperators::implement(m); }

}  // namespace attnfast
