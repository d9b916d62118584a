// What the CPU's launcher of linear knows of its kernels, one set for every instruction set.
#pragma once
#include <stddef.h>

#include "../attention.h"

namespace attnfast {

// out[m, n] = bias[n] + the sum over k of left[m, k] right[k, n]. Of both strides of a factor one is 1;
// tensors are of one dtype, float32 or float64.
struct Product {
  Dtype dtype;
  int64_t M, N, K;
  const void *left, *right;
  int64_t left_row, left_column, right_row, right_column;
  void* out;         // contiguous
  const void* bias;  // or null
  void* sums;        // [M], of each row of left, or null
};

// `packed` holds right in panels of some columns, scratch is private to a thread; both 64-byte aligned.
struct LinearKernels {
  int64_t rows;                       // of an item
  int64_t (*panels)(const Product&);  // of right
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
