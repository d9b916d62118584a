// Registers copy_distribution for the CPU.
#include "copying.h"

#include "../launch_copying.h"
#include "run.h"

namespace attnfast {
namespace {

const CopyingKernels& kernels() {
  static const CopyingKernels& chosen = choose<portable::copying, avx2::copying, avx512::copying>();
  return chosen;
}

template <class Call>
void run_rows(void (*run)(const Call&, int64_t, void*), const Call& a) {
  const int64_t rows = a.B * a.Tq, threads = threads_for(rows * (a.V + a.X + a.Tk));
  parallel_items(rows, threads, kernels().scratch(a),
                 [&](int64_t row, void* scratch) { run(a, row, scratch); });
}

void run_forward(const CopyForward& a, const Tensor&) { run_rows(kernels().forward, a); }
void run_backward(const CopyBackward& a, const Tensor&) { run_rows(kernels().backward, a); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) { CopyOperators::implement(m); }

}  // namespace attnfast
