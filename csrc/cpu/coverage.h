// What the CPU's launcher of coverage_attention knows of its kernels (see attention.h).
#pragma once
#include "../coverage.h"
#include "attention.h"

namespace attnfast {

// Passes over (sequence, head), each row after the other; they take a Coverage.
struct CoverageKernels {
  size_t (*scratch)(const Coverage&);  // bytes
  Pass forward;                        // scores, if they have no features, become weights
  Pass backward;                       // what the weights' gradient leaves for the scores
};

// clang-format off
namespace portable { extern const CoverageKernels coverage; }
namespace avx2 { extern const CoverageKernels coverage; }
namespace avx512 { extern const CoverageKernels coverage; }
// clang-format on

}  // namespace attnfast
