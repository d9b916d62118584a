// The interface between the CPU launcher of linear and its kernels, one table per instruction set.
#pragma once
#include <stddef.h>

#include "../attention.h"

namespace attnfast {

// out[m, n] = bias[n] + sum_k left[m, k] right[k, n]. One of the two strides of each factor is 1;
// all tensors have one dtype, float32 or float64.
struct Product {
  Dtype dtype;
  int64_t M, N, K;
  const void *left, *right;
  int64_t left_row, left_column, right_row, right_column;
  void* out;         // contiguous
  const void* bias;  // or null
  void* sums;        // [M], the sum of each row of left, or null
};

// `packed` holds right in panels of columns; scratch is private to a thread. Both are 64-byte
// aligned.
struct LinearKernels {
  int64_t rows;                       // rows of an item
  int64_t (*panels)(const Product&);  // panels of right
  size_t (*packed)(const Product&);   // bytes
  size_t (*scratch)(const Product&);  // bytes
  void (*pack)(const Product&, int64_t panel, void* packed);
  void (*multiply)(const Product&, int64_t first_row, int64_t first_panel, int64_t last_panel,
                   const void* packed, void* scratch);
};

// clang-format off
namespace portable { extern const LinearKernels linear; }
namespace avx2 { extern const LinearKernels linear; }
namespace avx512 { extern const LinearKernels linear; }
// clang-format on

}  // namespace attnfast
