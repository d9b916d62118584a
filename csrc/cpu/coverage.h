// What the CPU's launcher of coverage_attention knows of its kernels (see attention.h).
#pragma once
#include "../coverage.h"
#include "attention.h"

namespace attnfast {

// Passes over (sequence, head), each row after the other.
struct CoverageKernels {
  size_t (*forward_scratch)(const CoverageForward&);  // bytes
  cpu::Pass<CoverageForward> forward;                 // scores, if they have no features, become weights
  size_t (*backward_scratch)(const CoverageBackward&);
  cpu::Pass<CoverageBackward> backward;  // what the weights' gradient leaves for the scores

  // For steps that share their parameters: bytes of `features`, and of a sequence's row of `kept`; what
  // fills in the one, and after the last step adds up the other. `back` says that a backward reads them.
  size_t (*features)(const Problem&, const History&, bool back);
  size_t (*kept)(const CoverageBackward&);
  void (*prepare)(const Problem&, const History&, bool back);
  cpu::Pass<CoverageBackward> finish;
};

// clang-format off
namespace portable { extern const CoverageKernels coverage; }
namespace avx2 { extern const CoverageKernels coverage; }
namespace avx512 { extern const CoverageKernels coverage; }
// clang-format on

}  // namespace attnfast
