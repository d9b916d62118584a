// What a launcher of coverage_attention hands to its kernels, as attention.h does of attention, and
// forward attention's limits.
#pragma once
#include "attention.h"

namespace attnfast {

// Numbers are of the accumulation dtype, their rows contiguous; what is absent has null data.
struct Coverage : Attention {
  bool backward = false;
  bool sums = false;  // grad_key, grad_weight, grad_filters and grad_projection are added to, for each
                      // [B, H], and of the accumulation dtype
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
};

namespace {

constexpr double kMostExponent = 80, kMostOdds = 5.54e34;  // e^80 is the largest gradient of odds

// Forward attention's r_j = (1 - u) p_j + u p_{j-1}; less than a normal float is 0.
template <class C>
ATTNFAST_DEVICE inline C transition_odds(C u, C here, C before) {
  const C r = (1 - u) * here + u * before;
  return r < C(1.1754943508222875e-38) ? 0 : r;
}

}  // namespace
}  // namespace attnfast
