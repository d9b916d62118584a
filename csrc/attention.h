// The structs that a launcher passes to its kernels: raw pointers and sizes, no torch header and no
// inline function, because every instruction set of the CPU compiles against this file (see
// cpu/vector.h).
#pragma once
#include <stdint.h>

#include "score.h"

namespace attnfast {

enum class Dtype { f32, f64, f16, bf16 };

// The normalisations; launch.h has their names. A sigmoid is divided by the row's sum.
enum class Normalisation { softmax, sigmoid, sparsemax, entmax15 };

// A tensor [B, H, rows, columns], strides in elements; data is null if an argument is absent.
struct View {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 1;
};

// The inputs of the scores, forward and backward.
struct Problem {
  Dtype dtype;
  Score score;
  Normalisation normalisation;  // sigmoid: with a history; sparsemax, entmax15: CPU, without one
  double scale;
  int64_t B, H, Tq, Tk, A, Dv;
  View query, key, value;  // column stride 1
  View score_vector;       // [H, A] by its head stride; absent for the dot score
  View bias, mask;         // any strides; forward only
  bool bias_in_sums;       // CPU: the bias has the accumulation dtype
  const int64_t* lengths;  // [B] or null
  // int64 [B, H, Tq, 2], or absent: a row's first key and one past its last key. Both may lie
  // outside the sequence.
  View key_bounds;
  // W is the number of columns of scores and weights: Tk, or, if they are compact, the largest
  // number of keys that a row sees. Column m of compact scores is the m-th key of the span.
  int64_t W;
  bool compact;
  View exponentials;  // CPU: e^{2 key}, float, rows padded with 0 to kPadding, or absent
};

// Statistics of a row's weights: the entropy, the largest weight and its key, the mean of the keys
// and their variance. All are 0 if the row sees no key, and NaN if its weights are NaN.
enum Statistics { kEntropy, kLargest, kPosition, kMean, kVariance, kStatistics };

struct Forward : Problem {
  View context;               // out, column stride 1, in dtype
  View weights, log_sum_exp;  // out, contiguous, in the accumulation dtype; weights may be absent
  View statistics;            // out, as weights: rows of five values, see Statistics; may be absent
};

// Tensors have the accumulation dtype unless noted. An absent output is not computed.
struct Backward : Problem {
  View weights;                         // saved by the forward, contiguous
  View grad_context;                    // in, column stride 1, in dtype
  View grad_weights, grad_log_sum_exp;  // in, column stride 1, or absent
  View grad_score;                      // contiguous [B, H, Tq, W]: in if grad_score_given, else out
  bool grad_score_given;
  bool grad_score_returned;               // as a result, so it must equal the scores' gradient bitwise
  View grad_query, grad_key, grad_value;  // out, column stride 1, in dtype
  View grad_score_vector;                 // out: rows [B, H, parts, A], whose sum is the gradient
};

constexpr int64_t kPadding = 32;  // features; the row length of exponentials is a multiple of it

}  // namespace attnfast
