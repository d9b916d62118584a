// The structs that a launcher of copy_distribution passes to its kernels, as in attention.h.
#pragma once
#include "attention.h"

namespace attnfast {

// Views are [B, rows, columns] without heads, in the tensors' dtype unless noted.
struct Copying {
  Dtype dtype;
  int64_t B, Tq, Tk, V, X;  // X: words outside the vocabulary of V words
  bool log;                 // log-probabilities instead of probabilities
  View logits, weights;     // column stride 1
  View gate;                // [B, Tq], any strides
  const int64_t* source;    // [B, Tk]: the word id at each key
};

struct CopyForward : Copying {
  View distribution;  // out: [B, Tq, V + X], contiguous
  View log_sum_exp;   // out: [B, Tq], double
};

struct CopyBackward : Copying {
  View log_sum_exp;                           // saved by the forward
  View grad_distribution;                     // in, column stride 1
  View grad_logits, grad_weights, grad_gate;  // out, contiguous
};

}  // namespace attnfast
