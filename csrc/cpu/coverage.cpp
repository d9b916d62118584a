// Registers coverage_attention for the CPU: attention's own passes before and after its scan.
#include "coverage.h"

#include "../launch_coverage.h"
#include "run.h"

namespace attnfast {
namespace {

const AttentionKernels& rows() {
  static const AttentionKernels& chosen = ATTNFAST_CHOOSE(attention);
  return chosen;
}

const CoverageKernels& kernels() {
  static const CoverageKernels& chosen = ATTNFAST_CHOOSE(coverage);
  return chosen;
}

int64_t grad_weight_parts(const Attention&) { return 1; }

// Passes one after the other for every (sequence, head) where they have as many items: then one
// thread's arithmetic hides the other's reading.
void run(std::initializer_list<Pass> passes, const Coverage& a) {
  const size_t scratch = std::max(rows().scratch(a), kernels().scratch(a));
  run(passes, a, threads_for(a), scratch);
}

void run_forward(Coverage& a, const Tensor&) {
  share_out_rows(a);
  a.scores = a.weights;
  const auto& [scores, softmax, context] = rows().forward;
  if (a.filters_count) return run({kernels().forward, context}, a);
  run({scores, kernels().forward, context}, a);
}

void run_backward(Coverage& a, const Tensor&) {
  a.scores = a.grad_score;
  share_out_rows(a);
  run({rows().grad_score[0], kernels().backward}, a);  // grad_context . value, then the scan
  if (a.filters_count && !a.grad_value.data) return;
  Attention inputs = a;
  share_out_columns(inputs);
  if (a.filters_count) inputs.weight = inputs.grad_query = inputs.grad_key = inputs.grad_weight = {};
  run({rows().grad_inputs}, inputs, threads_for(a), rows().scratch(inputs));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) {
  m.impl("coverage_attention", TORCH_BOX(&coverage_attention));
  m.impl("coverage_attention_backward", TORCH_BOX(&coverage_attention_backward));
  m.impl("coverage_attention_backward_into", TORCH_BOX(&coverage_attention_backward_into));
}

}  // namespace attnfast
