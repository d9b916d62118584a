// The interface between the CPU launcher and its kernels, one table of functions per instruction
// set (see vector.h).
#pragma once
#include <stddef.h>

#include "../attention.h"

namespace attnfast {

constexpr double kSmallSumLimit = 1;                          // up to this, tanh needs a relative error
constexpr double kExponentialsLimit = kFactoredSumLimit / 2;  // for keys whose exponentials are cached
constexpr int64_t kKeyBlock = 64;                             // keys scored at a time
constexpr int64_t kMostRows = 64;                             // rows of an item

namespace cpu {

// The plan of a call: the size of an item of a pass, and the values that passes share.
struct Plan {
  int64_t rows, keys, columns;      // of one item
  View scores;                      // forward: the scores, if they are not in a thread's scratch
  bool multiplied = false;          // products are from a library's GEMM; passes check them
  bool* has_zero_weight = nullptr;  // out: true if any weight is 0
  double grad_score_scale = 1;      // backward: factor applied to the scores' gradient on output
  double grad_inputs_scale = 1;     // backward: factor applied to the inputs' gradients
};

// The arguments of key_exponentials. Both outputs are float: the exponentials of the keys, and the largest
// |key| of each block of keys, [B, H, blocks].
struct KeyExponentials : Problem {
  View exponentials_out, ranges;
};

// A pass over the tensors of a call, cut into items that threads may run in any order.
template <class Call>
struct Pass {
  int64_t (*items)(const Call&, const Plan&);
  void (*run)(const Call&, const Plan&, int64_t item, void* scratch);
};

}  // namespace cpu

// One table of functions per instruction set. Scratch is private to a thread and 64-byte aligned.
// From scores to context, and from grad_weights to grad_score, item i of a pass depends only on
// item i of the previous pass if both passes have equally many items; the two items then also share
// a thread's scratch.
struct AttentionKernels {
  size_t (*forward_scratch)(const Forward&, const cpu::Plan&);  // bytes
  cpu::Pass<Forward> scores, softmax, context;
  cpu::Pass<Forward> span;  // replaces all three if rows have spans
  size_t (*backward_scratch)(const Backward&, const cpu::Plan&);
  cpu::Pass<Backward> grad_weights, grad_score;  // grad_context . value; the softmax's backward
  cpu::Pass<Backward> grad_score_span;           // replaces both if rows have spans
  cpu::Pass<Backward> grad_inputs;               // feature slices of every gradient but the score's
  cpu::Pass<Backward> grad_value;                // feature slices of the value's gradient only
  size_t (*key_exponentials_scratch)(const cpu::KeyExponentials&);
  cpu::Pass<cpu::KeyExponentials> key_exponentials;
};

// clang-format off
namespace portable { extern const AttentionKernels attention; }
namespace avx2 { extern const AttentionKernels attention; }
namespace avx512 { extern const AttentionKernels attention; }
// clang-format on

}  // namespace attnfast
