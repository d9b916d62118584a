// The interface between the CPU launcher of copy_distribution and its kernels (see attention.h).
#pragma once
#include <stddef.h>

#include "../copying.h"

namespace attnfast {

// Both functions process row i of B x Tq; scratch is private to a thread and 64-byte aligned.
struct CopyingKernels {
  size_t (*scratch)(const Copying&);  // bytes
  void (*forward)(const CopyForward&, int64_t row, void* scratch);
  void (*backward)(const CopyBackward&, int64_t row, void* scratch);
};

// clang-format off
namespace portable { extern const CopyingKernels copying; }
namespace avx2 { extern const CopyingKernels copying; }
namespace avx512 { extern const CopyingKernels copying; }
// clang-format on

}  // namespace attnfast
