// The structs that a launcher of coverage_attention passes to its kernels, as in attention.h, and
// the limits of forward attention.
#pragma once
#include "attention.h"

namespace attnfast {

// The state that one row passes to the next. Tensors have the accumulation dtype and contiguous
// rows; an absent tensor has null data.
struct History {
  int64_t filters_count = 0, channels = 2, taps = 0;  // K filters; K is 0 without filters
  // [K, channels, taps] and [A, K], separate for each head if the head stride is not 0
  View filters, projection;
  View penalty;                                   // [H] by its head stride
  View inverse_fertility, coverage_in, previous;  // [B, H, Tk]
  View transition_prob;                           // [B, H, Tq]; with it `previous` holds log-weights
  bool sigmoid = false;                           // weights are sigmoids of the scores over their sum
  // CPU: the result of `pack_parameters` for filters, projection and weight of one head, or null
  void* features = nullptr;
};

// log_sum_exp is absent.
struct CoverageForward : Forward, History {
  View coverage_out, loss;  // out: [B, H, Tk]; [B, H]
  View log_weights;         // out, [B, H, Tq, Tk], with a transition
  View sigmoid_sum;         // out, [B, H, Tq], the sum of a row's sigmoids, if there are any
};

// With filters, grad_query, grad_key and grad_score_vector are also written by the kernels of this
// struct.
struct CoverageBackward : Backward, History {
  View log_weights, sigmoid_sum;      // saved by the forward
  View grad_coverage_out, grad_loss;  // in
  View grad_log_weights;              // in, [B, H, Tq, Tk], or absent
  // In, [B, H, Tk], or absent: the gradient of the last row's weights from the row after it;
  // with a transition, the gradient of their logarithms
  View grad_last;
  // Accumulate into grad_key, grad_score_vector, grad_filters, grad_projection, grad_penalty and
  // grad_inverse_fertility, separately for each [B, H] and in the accumulation dtype. The caller has
  // zeroed them before the first step.
  bool sums;
  // CPU: a buffer [B, H] for the sums of grad_score_vector, grad_filters and grad_projection until
  // `finish`, zeroed before the first step; or absent
  View parameter_sums;
  View grad_filters, grad_projection;  // out: one part for each [B, H]
  View grad_penalty;                   // out: one part for each [B, H]
  View grad_inverse_fertility, grad_transition_prob, grad_coverage_in, grad_previous;  // out
};

namespace {

// Exponentials of smaller arguments are 0; exponentials of arguments above its negative are not
// computed.
template <class C>
constexpr C kLeastLogarithm = sizeof(C) == 8 ? C(-700) : C(-87);

}  // namespace
}  // namespace attnfast
