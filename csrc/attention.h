// What a launcher hands to its kernels: raw pointers and sizes, no torch header and no inline
// function, for every instruction set of the CPU compiles against this file (see cpu/vector.h).
#pragma once
#include <stdint.h>

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
  View query, key, value;        // column stride 1
  View weight;                   // [H, A] by its head stride; absent: dot score
  View bias, mask;               // any strides
  const int64_t* lengths;        // [B] or null
  View context;                  // out, contiguous, of dtype
  View weights, log_sum_exp;     // out (in, for the backward), contiguous, of the accumulation
                                 // dtype; weights may be absent
  View grad_context;             // column stride 1
  View grad_weights;             // of the accumulation dtype, column stride 1, or absent
  View grad_log_sum_exp;         // contiguous, or absent
  View grad_score;               // contiguous [B, H, Tq, Tk] of the accumulation dtype
  View grad_query, grad_key, grad_value;  // contiguous
  View grad_weight;              // rows [B, H, grad_weight_parts, A] that add up to the gradient, of
                                 // the accumulation dtype
  int64_t rows;                  // CPU: query rows that one item of forward or grad_score takes
};

}  // namespace attnfast
