// What a launcher hands to its kernels: raw pointers and sizes, no torch header and no inline
// function, for every instruction set of the CPU compiles against this file (see cpu/vector.h).
#pragma once
#include <stdint.h>

#include "score.h"

namespace attnfast {

enum class Dtype { f32, f64, f16, bf16 };

// A tensor [B, H, rows, columns], strides in elements; data is null where an argument is absent.
struct View {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 1;
};

// What scores depend on, forward and backward.
struct Problem {
  Dtype dtype;
  Score score;
  double scale;
  int64_t B, H, Tq, Tk, A, Dv;
  View query, key, value;  // column stride 1
  View weight;             // [H, A] by its head stride; absent for the dot score
  View bias, mask;         // any strides; of the forward alone
  bool bias_in_sums;       // CPU: the bias is of the accumulation dtype
  const int64_t* lengths;  // [B] or null
  View span;               // int64 [B, H, Tq, 2]: a row's first key and the one after its last, which
                           // may lie outside of the sequence; or absent
  int64_t W;               // columns of scores and weights: Tk, or, if they are compact, as many as
  bool compact;            // a row sees at most; column m is then the span's m-th key
  View exponentials;       // CPU: e^{2 key}, float, rows padded with 0 to kPadding, or absent
};

// Of a row's weights: the entropy, the largest weight and its key, the mean of the keys and their variance.
// All 0 if the row sees no key, NaN if its weights are.
enum Statistics { kEntropy, kLargest, kPosition, kMean, kVariance, kStatistics };

struct Forward : Problem {
  View context;               // out, column stride 1, of dtype
  View weights, log_sum_exp;  // out, contiguous, of the accumulation dtype; weights may be absent
  View statistics;            // out, as those: rows of five numbers, see Statistics; may be absent
};

// Numbers are of the accumulation dtype unless said; an output that is absent is not wanted.
struct Backward : Problem {
  View weights;                         // as the forward left them, contiguous
  View grad_context;                    // in, column stride 1, of dtype
  View grad_weights, grad_log_sum_exp;  // in, column stride 1, or absent
  View grad_score;                      // contiguous [B, H, Tq, W]: in, if it is given, else out
  bool grad_score_given;
  bool grad_score_returned;               // for itself, so that it is the scores' gradient to the bit
  View grad_query, grad_key, grad_value;  // out, column stride 1, of dtype
  View grad_weight;                       // out: rows [B, H, parts, A] that add up to the gradient
};

constexpr int64_t kPadding = 32;  // features, of exponentials

}  // namespace attnfast
