// The interface between the CPU launcher of coverage_attention and its kernels (see attention.h).
#pragma once
#include "../coverage.h"
#include "attention.h"

namespace attnfast {

// Passes over (sequence, head); the rows of an item run in order.
struct CoverageKernels {
  size_t (*forward_scratch)(const CoverageForward&);  // bytes
  cpu::Pass<CoverageForward> forward;  // turns scores, if they have no features, into weights
  size_t (*backward_scratch)(const CoverageBackward&);
  cpu::Pass<CoverageBackward> backward;  // turns the weights' gradient into the scores'

  // For steps that share their parameters: `features_size` and `sums_size` return the bytes of the packed
  // parameters and of a sequence's row of partial sums. `pack_parameters` fills in the former, `finish`
  // adds up the latter after the last step. `back` is true if a backward reads the features.
  size_t (*features_size)(const Problem&, const History&, bool back);
  size_t (*sums_size)(const CoverageBackward&);
  void (*pack_parameters)(const Problem&, const History&, bool back);
  cpu::Pass<CoverageBackward> finish;
};

// clang-format off
namespace portable { extern const CoverageKernels coverage; }
namespace avx2 { extern const CoverageKernels coverage; }
namespace avx512 { extern const CoverageKernels coverage; }
// clang-format on

}  // namespace attnfast
