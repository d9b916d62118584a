// What a launcher of coverage_attention hands to its kernels, as attention.h does of attention.
#pragma once
#include "attention.h"

namespace attnfast {

// Numbers are of the accumulation dtype, their rows contiguous; what is absent has null data.
struct Coverage : Attention {
  bool backward = false;
  int64_t filters_count = 0, channels = 2, width = 0;  // K filters of W taps; none: K is 0
  View filters, projection;  // [K, channels, W] and [A, K], each head's own by the head stride
  View penalty;              // [H] by its head stride
  View rate, first, previous;                             // [B, H, Tk]
  View transition;                                        // [B, H, Tq]
  View last, loss;                                        // out: coverage [B, H, Tk]; [B, H]
  View odds;                                              // out (in): [B, H, Tq, Tk]
  View grad_last, grad_loss;                              // in
  View grad_filters, grad_projection;                     // out: a part for each [B, H]
  View grad_penalty;                                      // out: a part for each [B, H]
  View grad_rate, grad_transition, grad_first, grad_previous;  // out
  View scratch;                                           // CUDA: [B, H, what it takes]
};

}  // namespace attnfast
