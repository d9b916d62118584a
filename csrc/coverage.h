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
  View transition_prob;                                // [B, H, Tq]; with it `previous` holds log-weights
  void* features = nullptr;                            // CPU: what `prepare` made of filters, projection
                                                       // and weight, of one head; or null
};

// log_sum_exp is absent.
struct CoverageForward : Forward, History {
  View coverage_out, loss;  // out: [B, H, Tk]; [B, H]
  View log_weights;         // out, [B, H, Tq, Tk], with a transition
};

// What filters touch is of this struct: with them grad_query, grad_key and grad_weight too are theirs.
struct CoverageBackward : Backward, History {
  View log_weights;                   // as the forward left them
  View grad_coverage_out, grad_loss;  // in
  View grad_log_weights;              // in, [B, H, Tq, Tk], or absent
  View grad_last;                     // CPU: in, what reaches the last row's weights from the row after it,
                                      // [B, H, Tk], or absent; with a transition, their logarithms
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

// The exponential of less counts as 0; the exponential of more than its negative is not taken.
template <class C>
constexpr C kLeastLogarithm = sizeof(C) == 8 ? C(-700) : C(-87);

}  // namespace
}  // namespace attnfast
