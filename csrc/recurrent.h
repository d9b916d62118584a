// The structs that a launcher passes to the kernels of a recurrent layer that attends, raw pointers
// and sizes as in attention.h, and from them the attention of a step.
#pragma once
#include "cell.h"
#include "coverage.h"

namespace attnfast {

// The common inputs of forward and backward; absent tensors have null data. Rows [B, T, n] have
// strides for sequence and step, rows [B, n] for the sequence; columns are contiguous. Input,
// results and buffers are evenly strided: all rows [B, T] are one stride apart. Tensors of several
// layers use the head stride for the layer.
struct Layer {
  Dtype dtype;
  Cell cell;
  bool narrow;  // CPU: the weights are bfloat16, and products take bfloat16 factors
  bool int8;    // CPU, a search: products take 8-bit factors
  bool attends, attends_first;
  int64_t layers;  // each reads the states of the one below; the last one's states are the queries
  // F: features fed to a step; output_dim: features of an attentional vector, else 0
  int64_t B, T, E, H, F, output_dim, Tk, A, Dv;
  View input, hidden, first_cell, feed, dropout;
  // Rows [B, T, .] that are multiplied into the inputs of the layers above the first, attentional
  // vectors, new states, new cell states, the states that become queries, fed vectors, and [context;
  // state].
  View dropout_between, dropout_output, dropout_state, dropout_cell, dropout_query, dropout_feed,
      dropout_joined;
  bool zoneout;  // masks interpolate between the new and the previous state
  View weight_ih, weight_hh, weight_ih_upper, weight_query, weight_output, weight_gate;
  View bias_ih, bias_hh, bias_query, bias_output, bias_gate;
  bool output_tanh;               // attentional vectors have a tanh
  const int64_t* target_lengths;  // [B] or null
  // Lengths of the keys, [T, B], with which a history sees no key in padding; or null
  const int64_t* step_lengths;
  // Out of the forward; context_gates [B, T, Dv] multiply the contexts, before they are stored.
  View states, cells, contexts, attentional, queries, gates, context_gates;
};

struct RecurrentForward : Layer {
  void* packed;  // CPU: the weights packed by `pack`, or null
  // The attention of the first step; views of later steps are offset by their rows. It has a
  // history if there is a coverage; its loss is then a buffer [B, T, 1].
  CoverageForward attention;
  View loss;  // out, [B], over all steps
};

struct RecurrentBackward : Layer {
  View grad_states, grad_cells, grad_contexts, grad_attentional;  // in; all but the first may be absent
  // The attention of the first step. Gradients of rows are buffers, except that of the query, which
  // covers all steps. Gradients of a history are sums over all steps.
  CoverageBackward attention;
  bool detaches_history;  // no gradient reaches the steps before through the history
  View coverages;         // buffer [B, T, Tk]: the coverage before every step
  View grad_coverage;     // in, that of the coverage after the last step, or absent
  View grad_gates;  // buffer [B, T, S H]: the gradients of weight_ih's sums; for a GRU, then of W_hn h
  View grad_context_gates;  // buffer [B, T, Dv], with a gate: the gradient of its sums
  View grad_fed;            // buffer [B, T, F], with an output: the gradient of the fed features
  View grad_input, grad_hidden, grad_cell, grad_feed;  // out, absent if not wanted
  View grad_weight_ih, grad_weight_hh, grad_weight_ih_upper, grad_weight_query, grad_weight_output;
  View grad_bias_ih, grad_bias_hh, grad_bias_query, grad_bias_output, grad_weight_gate, grad_bias_gate;
};

namespace {

// ---- attention at a step ------------------------------------------------------------------------

// Move rows of the first step to step t; an element has `bytes` bytes.
inline void shift_to_step(View& x, int64_t t, int64_t bytes) {
  if (x.data) x.data = static_cast<char*>(x.data) + t * x.row * bytes;
}
inline void shift_to_step(Problem& a, int64_t t, int64_t bytes) {
  shift_to_step(a.query, t, bytes);
  shift_to_step(a.mask, t, 1);
  shift_to_step(a.key_bounds, t, sizeof(int64_t));
}
inline bool has_history(const History& h) { return h.coverage_in.data; }

// Let step t, whose row of weights this is, start from the results of the previous steps.
template <class Step>
void remember(const Layer& a, int64_t t, int64_t bytes, const View& coverage, Step& step) {
  step.coverage_in = coverage;
  if (a.step_lengths) step.lengths = a.step_lengths + t * a.B;
  View* const rows[] = {&step.transition_prob, &step.log_weights, &step.sigmoid_sum};
  for (View* x : rows) shift_to_step(*x, t, bytes);
  if (t) shift_to_step(step.previous = step.log_weights.data ? step.log_weights : step.weights, -1, bytes);
}

// Return the attention of step t.
inline CoverageForward step_of(const RecurrentForward& a, int64_t t, int64_t bytes) {
  CoverageForward step = a.attention;
  shift_to_step(step, t, bytes);
  View* const rows[] = {&step.context, &step.weights, &step.log_sum_exp, &step.loss};
  for (View* x : rows) shift_to_step(*x, t, bytes);
  if (has_history(step)) remember(a, t, bytes, step.coverage_out, step);
  return step;
}
inline CoverageBackward step_of(const RecurrentBackward& a, int64_t t, int64_t bytes) {
  CoverageBackward step = a.attention;
  shift_to_step(step, t, bytes);
  View coverage = a.coverages;
  View* const rows[] = {&step.weights,    &step.grad_context, &step.grad_weights,
                        &step.grad_score, &step.grad_query,   &coverage};
  for (View* x : rows) shift_to_step(*x, t, bytes);
  if (!has_history(step)) return step;
  remember(a, t, bytes, coverage, step);
  if (!a.detaches_history) {
    step.grad_coverage_out = step.grad_coverage_in;  // in place, from step to step
    step.grad_last = step.grad_previous;
  }
  shift_to_step(step.grad_transition_prob, t, bytes);
  shift_to_step(step.grad_log_weights, t, bytes);
  return step;
}

}  // namespace
}  // namespace attnfast
