// What the CPU's launcher knows of its kernels, one set for every instruction set (see vector.h).
#pragma once
#include <stddef.h>

#include "../attention.h"

namespace attnfast {

// Of max|q| + max|k| of the additive score: up to here (1 + e^{2(q + k)})^2 stays below 2^126,
constexpr double kFactoredSumLimit = 21.8;
constexpr double kSmallSumLimit = 1;                      // and up to here tanh's error must be relative.
constexpr double kPreparedLimit = kFactoredSumLimit / 2;  // of keys whose exponentials are kept
constexpr int64_t kKeyBlock = 64;                         // keys that are scored at a time
constexpr int64_t kMostRows = 64;                         // of an item

namespace cpu {

// How a call is carried out: what one item of a pass takes, and what passes tell each other.
struct Plan {
  int64_t rows, keys, columns;      // of one item
  View scores;                      // forward: where the scores lie, if not in a thread's scratch
  bool multiplied = false;          // a library has left the products, which passes look through
  bool* has_zero_weight = nullptr;  // out, whether any weight is 0
  double grad_score_scale = 1;      // backward: what the scores' gradient is multiplied by on its way out,
  double grad_inputs_scale = 1;     // and what the inputs' gradients are
};

// The exponentials of the keys, out, and the largest |key| of each block of them, float [B, H, blocks].
struct Preparation : Problem {
  View exponentials_out, ranges;
};

// A pass over the tensors of a call, cut into items that threads may take in any order.
template <class Call>
struct Pass {
  int64_t (*items)(const Call&, const Plan&);
  void (*run)(const Call&, const Plan&, int64_t item, void* scratch);
};

}  // namespace cpu

// One set of functions per instruction set. Scratch is private to a thread, 64-byte aligned. From scores
// to context, and from grad_weights to grad_score, item i of a pass needs item i of the pass before, and
// no other, where both have as many items; they then share a thread's scratch too.
struct AttentionKernels {
  size_t (*forward_scratch)(const Forward&, const cpu::Plan&);  // bytes
  cpu::Pass<Forward> scores, softmax, context;
  cpu::Pass<Forward> span;  // all of them where rows have spans
  size_t (*backward_scratch)(const Backward&, const cpu::Plan&);
  cpu::Pass<Backward> grad_weights, grad_score;  // grad_context . value, then the softmax's backward
  cpu::Pass<Backward> grad_score_span;           // both where rows have spans
  cpu::Pass<Backward> grad_inputs;               // slices of the features of every gradient but the score's
  cpu::Pass<Backward> grad_value;                // those of the value alone
  size_t (*prepare_scratch)(const cpu::Preparation&);
  cpu::Pass<cpu::Preparation> prepare;
};

// clang-format off
namespace portable { extern const AttentionKernels attention; }
namespace avx2 { extern const AttentionKernels attention; }
namespace avx512 { extern const AttentionKernels attention; }
// clang-format on

}  // namespace attnfast
