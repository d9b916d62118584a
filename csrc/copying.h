// What a launcher of copy_distribution hands to its kernels, as attention.h does of attention.
#pragma once
#include "attention.h"

namespace attnfast {

// Views [B, rows, columns] without heads; of the tensors' dtype unless said.
struct Copying {
  Dtype dtype;
  int64_t B, Tq, Tk, V, X;  // X words beyond the vocabulary's V
  bool log;                 // log-probabilities instead of probabilities
  View logits, weights;     // column stride 1
  View gate;                // [B, Tq], any strides
  const int64_t* source;    // [B, Tk]: the word at every key
};

struct CopyForward : Copying {
  View distribution;  // out: [B, Tq, V + X], contiguous
  View log_sum_exp;   // out: [B, Tq], double
};

struct CopyBackward : Copying {
  View log_sum_exp;                           // as the forward left it
  View grad_distribution;                     // in, column stride 1
  View grad_logits, grad_weights, grad_gate;  // out, contiguous
};

}  // namespace attnfast
