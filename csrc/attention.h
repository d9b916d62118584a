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

struct Attention {
  Dtype dtype;
  int64_t B, H, Tq, Tk, A, Dv;
  double scale;
  Score score;
  View query, key, value;        // column stride 1
  View weight;                   // [H, A] by its head stride; absent for the dot score
  View bias, mask;               // any strides
  bool bias_in_sums;             // CPU: the bias is of the accumulation dtype
  const int64_t* lengths;        // [B] or null
  View span;                     // int64 [B, H, Tq, 2]: a row's first key and the one after its
                                 // last, which may lie outside of the sequence; or absent
  int64_t W;                     // columns of scores and weights: Tk, or, if they are
  bool compact;                  // compact, of which column m is the span's m-th key
  View exponentials;             // CPU: e^{2 key}, float, rows padded with 0 to kPadding, or absent
  View context;                  // out, column stride 1, of dtype
  View weights, log_sum_exp;     // out (in, for the backward), contiguous, of the accumulation
                                 // dtype; weights may be absent
  View grad_context;             // column stride 1
  View grad_weights;             // of the accumulation dtype, column stride 1, or absent
  View grad_log_sum_exp;         // contiguous, or absent
  View grad_score;               // contiguous [B, H, Tq, W] of the accumulation dtype
  bool grad_score_given;         // or it is the first thing to compute
  bool grad_score_returned;      // CPU: for itself; else it may take the scale, as
  double grad_score_scale = 1;   // this
  View grad_query, grad_key, grad_value;  // column stride 1; absent where not needed, as grad_weight
  View grad_weight;              // rows [B, H, grad_weight_parts, A] that add up to the gradient, of
                                 // the accumulation dtype
  View rows_of_keys;             // CUDA: with a span, int64 [B, H, blocks of keys, 2], zeros
  View scores;                   // CPU: the place of the scores, if not a thread's scratch; may be weights
  View ranges;                   // CPU: out of prepare, float [B, H, blocks of keys]
  int64_t rows, keys, columns;   // CPU: what one item of a pass takes
  bool multiplied;               // CPU: a library has left the products, which passes look through
  bool* hides;                   // CPU: out, whether any weight is 0
};

// The CPU's additive score. With max|q| + max|k| up to the limit (1 + e^{2(q + k)})^2 stays below 2^126.
constexpr double kFactoredLimit = 21.8;
constexpr double kSmallLimit = 1;                      // where tanh's error must be relative
constexpr double kPreparedLimit = kFactoredLimit / 2;  // of keys whose exponentials are kept
constexpr int64_t kKeyBlock = 64;                      // keys that are scored at a time
constexpr int64_t kMostRows = 64;                      // of an item
constexpr int64_t kPadding = 32;                       // features, of exponentials

}  // namespace attnfast
