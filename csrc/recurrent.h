// What a launcher hands to the kernels of a recurrent layer that attends: raw pointers and sizes, as in
// attention.h.
#pragma once
#include "cell.h"
#include "coverage.h"

namespace attnfast {

// What forward and backward are given alike; absent tensors have no data. Rows [B, T, n] have strides for
// sequence and step, rows [B, n] for the sequence; columns lie side by side. Input, results and room lie
// evenly: all rows [B, T] are one stride apart. What every layer of a stack has lies a head apart.
struct Layer {
  Dtype dtype;
  Cell cell;
  bool narrow;  // CPU: products take bfloat16, of which the weights are
  bool attends, attends_first;
  int64_t layers;  // which read the states of the one below; the last one's states are asked with
  int64_t B, T, E, H, F, O, Tk, A, Dv;  // F: features that are fed to a step; O: of an attentional vector
  View input, hidden, first_cell, feed, dropout;
  View dropout_between, dropout_output;  // [layers - 1, B, T, H], [B, T, O]
  View weight_ih, weight_hh, weight_ih_upper, weight_query, weight_output;
  View bias_ih, bias_hh, bias_query, bias_output;
  const int64_t* target_lengths;                              // [B] or null
  const int64_t* step_lengths;                                // of the keys, [T, B], where a history wants
                                                              // to see none in padding; or null
  View states, cells, contexts, attentional, queries, gates;  // out of the forward
};

struct RecurrentForward : Layer {
  void* packed;               // CPU: the weights as its `pack` left them, or null
  CoverageForward attention;  // of the first step; its views, moved on by their rows, are those of the
                              // others; with a coverage it has a history, and its loss is room [B, T, 1]
  View loss;                  // out, [B], of all steps
};

struct RecurrentBackward : Layer {
  View grad_states, grad_cells, grad_contexts, grad_attentional;  // in; all but the first may be absent
  CoverageBackward attention;  // of the first step; gradients of rows are rooms, but the query's, which is
                               // of all; those of a history are sums of all steps
  View coverages;              // room [B, T, Tk]: the coverage before every step
  View grad_coverage;          // in, of that after the last step, or absent
  View grad_gates;             // room [B, T, S H]: what reaches weight_ih; of a GRU, W_hn h after it
  View grad_fed;               // room [B, T, F], with an output: what reaches it
  View grad_input, grad_hidden, grad_cell, grad_feed;  // out, absent where not wanted
  View grad_weight_ih, grad_weight_hh, grad_weight_ih_upper, grad_weight_query, grad_weight_output;
  View grad_bias_ih, grad_bias_hh, grad_bias_query, grad_bias_output;
};

}  // namespace attnfast
