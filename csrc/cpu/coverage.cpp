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

void run_rows(std::initializer_list<Pass> passes, const Attention& a) {
  run(passes, a, threads_for(a), rows().scratch(a));
}

void scan(const Pass& pass, const Coverage& a) {
  run({pass}, a, threads_for(a), kernels().scratch(a));
}

void run_forward(Coverage& a, const Tensor&) {
  share_out_rows(a);
  a.scores = a.weights;
  const auto& [scores, softmax, context] = rows().forward;
  if (!a.filters_count) run_rows({scores}, a);
  scan(kernels().forward, a);
  run_rows({context}, a);
}

void run_backward(Coverage& a, const Tensor&) {
  a.scores = a.grad_score;
  share_out_rows(a);
  run_rows({rows().grad_score[0]}, a);  // grad_context . value
  scan(kernels().backward, a);
  Attention inputs = a;
  share_out_columns(inputs);
  if (a.filters_count) inputs.weight = inputs.grad_query = inputs.grad_key = inputs.grad_weight = {};
  run_rows({rows().grad_inputs}, inputs);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) {
  m.impl("coverage_attention", TORCH_BOX(&coverage_attention));
  m.impl("coverage_attention_backward", TORCH_BOX(&coverage_attention_backward));
}

}  // namespace attnfast
