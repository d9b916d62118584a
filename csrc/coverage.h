// What a launcher of coverage_attention hands to its kernels, as attention.h does of attention, and
// forward attention's limits.
#pragma once
#include "attention.h"

namespace attnfast {

// What one row passes to the next. Numbers are of the accumulation dtype, their rows contiguous; what is
// absent has null data.
struct History {
  int64_t filters_count = 0, channels = 2, width = 0;  // K filters of `width` taps; none: K is 0
  View filters, projection;                            // [K, channels, width] and [A, K], each
                                                       // head's own by the head stride
  View penalty;                                        // [H] by its head stride
  View inverse_fertility, coverage_in, previous;       // [B, H, Tk]
  View transition_prob;                                // [B, H, Tq]
  void* features = nullptr;                            // CPU: what `prepare` made of filters, projection
                                                       // and weight, of one head; or null
};

// log_sum_exp is absent.
struct CoverageForward : Forward, History {
  View coverage_out, loss;  // out: [B, H, Tk]; [B, H]
  View odds;                // out, [B, H, Tq, Tk], or absent
};

// What filters touch is of this struct: with them grad_query, grad_key and grad_weight too are theirs.
struct CoverageBackward : Backward, History {
  View odds;                          // as the forward left them
  View grad_coverage_out, grad_loss;  // in
  View grad_last;                     // CPU: in, what reaches the last row's weights from the row after it,
                                      // [B, H, Tk], or absent
  bool sums;                          // grad_key, grad_weight, grad_filters and grad_projection, and on
                                      // the CPU grad_penalty and grad_inverse_fertility, are added to, for
                                      // each [B, H], and of the accumulation dtype
  View kept;                          // CPU: room [B, H] for the sums of grad_weight, grad_filters and
                                      // grad_projection, cleared before the first step, until `finish`;
                                      // or absent
  View grad_filters, grad_projection;  // out: a part for each [B, H]
  View grad_penalty;                   // out: a part for each [B, H]
  View grad_inverse_fertility, grad_transition_prob, grad_coverage_in, grad_previous;  // out
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
