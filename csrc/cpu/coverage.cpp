// Registers coverage_attention for the CPU: attention's passes before and after its scan.
#include "coverage.h"

#include "../launch_coverage.h"
#include "run.h"

namespace attnfast {
namespace {

const AttentionKernels& rows() {
  static const AttentionKernels& chosen = choose<portable::attention, avx2::attention, avx512::attention>();
  return chosen;
}

const CoverageKernels& kernels() {
  static const CoverageKernels& chosen = choose<portable::coverage, avx2::coverage, avx512::coverage>();
  return chosen;
}

int64_t grad_score_vector_parts(const Problem&) { return 1; }

// In each call, passes run consecutively for every (sequence, head) if they have equally many
// items: one thread's arithmetic then hides another's memory reads.
void run_forward(const CoverageForward& a, const Tensor&) {
  Plan plan = plan_by_rows(a);
  plan.scores = a.weights;
  const AttentionKernels& attention = rows();
  const CoverageKernels& history = kernels();
  const size_t scratch = std::max(attention.forward_scratch(a, plan), history.forward_scratch(a));
  const int64_t threads = threads_for(a);
  if (a.filters_count) return run(a, plan, threads, scratch, history.forward, attention.context);
  run(a, plan, threads, scratch, attention.scores, history.forward, attention.context);
}

void run_backward(const CoverageBackward& a, const Tensor&) {
  Plan plan = plan_by_rows(a);
  const AttentionKernels& attention = rows();
  const CoverageKernels& history = kernels();
  const int64_t threads = threads_for(a);
  const size_t scratch = std::max(attention.backward_scratch(a, plan), history.backward_scratch(a));
  run(a, plan, threads, scratch, attention.grad_weights, history.backward);
  if (a.filters_count) return a.grad_value.data ? cpu::run_grad_value(a) : void();
  plan.columns = columns_of_gradients(a);
  plan.grad_inputs_scale = a.scale;
  run(a, plan, threads, attention.backward_scratch(a, plan), attention.grad_inputs);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) { CoverageOperators::implement(m); }

}  // namespace attnfast
