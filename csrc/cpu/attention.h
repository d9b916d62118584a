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

// One set of functions per instruction set. Scratch is private to a thread, 64-byte aligned. In forward
// and grad_score item i of a pass needs item i of the pass before, and no other, where both have as
// many items; they then share a thread's scratch too.
struct AttentionKernels {
  size_t (*scratch)(const Attention&);  // bytes
  Pass forward[3];                      // scores, softmax, context
  Pass forward_span;                    // all of them where rows have spans
  Pass grad_score[2];                   // grad_weights, then the softmax's backward
  Pass grad_score_span;
  Pass grad_inputs;                     // slices of the features of every gradient but the score's
  Pass prepare;                         // exponentials of the keys
};

// clang-format off
namespace portable { extern const AttentionKernels attention; }
namespace avx2 { extern const AttentionKernels attention; }
namespace avx512 { extern const AttentionKernels attention; }
// clang-format on

}  // namespace attnfast
