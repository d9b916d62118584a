// What the CPU's launcher knows of its kernels, one set for every instruction set (see vector.h).
#pragma once
#include <stddef.h>

#include "../attention.h"

namespace attnfast {

// A pass over the tensors, cut into items that threads may take in any order.
struct Pass {
  int64_t (*items)(const Attention&);
  void (*run)(const Attention&, int64_t item, void* scratch);
};

// One set of functions per instruction set. Scratch is private to a thread, 64-byte aligned.
struct AttentionKernels {
  size_t (*scratch)(const Attention&);  // bytes
  Pass forward;
  Pass grad_score;
  Pass grad_inputs;  // a slice of the features of every gradient but the score's
};

// clang-format off
namespace portable { extern const AttentionKernels attention; }
namespace avx2 { extern const AttentionKernels attention; }
namespace avx512 { extern const AttentionKernels attention; }
// clang-format on

}  // namespace attnfast
