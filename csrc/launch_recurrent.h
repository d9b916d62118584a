// The operator of a recurrent layer that attends: its arguments, and the part of them that every
// launcher copies into a Layer. A launcher includes this file once and defines `recurrent` and
// `recurrent_backward`.
#pragma once
#include "launch_history.h"
#include "recurrent.h"

namespace attnfast {
namespace {

// Return whether bfloat16 weights may be combined with float tensors, and whether their products
// then take bfloat16 factors. A launcher defines both.
bool weights_may_be_narrow();
bool multiplies_narrow();

#define ATTNFAST_LAYER_PARAMETERS(X)                                  \
  X(Tensor, hidden, layered, dtype, {B, H})                           \
  X(Tensor, weight_ih, sizes, of_weights, {G * H, E + F})             \
  X(Tensor, weight_hh, layered, of_weights, {G * H, H})               \
  X(Optional, cell, layered, dtype, {B, H})                           \
  X(Optional, feed, sizes, dtype, {B, F})                             \
  X(Optional, bias_ih, layered, dtype, {G * H})                       \
  X(Optional, bias_hh, layered, dtype, {G * H})                       \
  X(Optional, key, sizes, dtype, {B, Tk, A})                          \
  X(Optional, value, sizes, dtype, {B, Tk, Dv})                       \
  X(Optional, score_vector, sizes, dtype, {A})                        \
  X(Optional, weight_query, sizes, of_weights, {A, H})                \
  X(Optional, bias_query, sizes, dtype, {A})                          \
  X(Optional, weight_output, sizes, of_weights, {output_dim, Dv + H}) \
  X(Optional, bias_output, sizes, dtype, {output_dim})
#define ATTNFAST_LAYER_TERMS(X)                                           \
  ATTNFAST_LENGTHS(X)                                                     \
  X(Optional, key_bounds, spans)                                          \
  X(Optional, target_lengths, sizes, ScalarType::Long, {B})               \
  X(Optional, dropout, layered, dtype, {B, H})                            \
  X(Optional, weight_ih_upper, sizes, of_weights, {layers - 1, G * H, H}) \
  X(Optional, dropout_between, sizes, dtype, {layers - 1, B, T, H})       \
  X(Optional, dropout_output, sizes, dtype, {B, T, output_dim})           \
  X(Optional, dropout_state, layered, dtype, {B, T, H})                   \
  X(Optional, dropout_cell, layered, dtype, {B, T, H})                    \
  X(Optional, dropout_query, sizes, dtype, {B, T, H})                     \
  X(Optional, dropout_feed, sizes, dtype, {B, T, F})                      \
  X(Optional, dropout_joined, sizes, dtype, {B, T, Dv + H})               \
  X(Optional, filters, sizes, dtype, {K, channels, taps})                 \
  X(Optional, projection, sizes, dtype, {A, K})                           \
  X(Optional, penalty, sizes, dtype, {1})                                 \
  X(Optional, inverse_fertility, sizes, dtype, {B, Tk})                   \
  X(Optional, transition_prob, sizes, dtype, {B, T})                      \
  X(Optional, coverage, sizes, dtype, {B, Tk})                            \
  X(Optional, previous, sizes, dtype, {B, Tk})                            \
  X(Optional, weight_gate, sizes, of_weights, {Dv, H})
#define ATTNFAST_LAYER_OPTIONS(X)                                 \
  X(std::string, mode, any)                                       \
  X(bool, attends_first, any)                                     \
  X(double, scale, any)                                           \
  X(std::string, score, goes_with, given.key, given.score_vector) \
  X(std::string, normalisation, fits_history, given)

#define ATTNFAST_RECURRENT(X)                              \
  X(Tensor, input, sizes, dtype, {B, T, E})                \
  ATTNFAST_LAYER_PARAMETERS(X)                             \
  X(Optional, mask, terms, ScalarType::Bool, {T, Tk})      \
  ATTNFAST_LAYER_TERMS(X)                                  \
  X(Optional, bias_gate, sizes, dtype, {Dv})               \
  X(Optional, key_exponentials, exponentials, given.score) \
  X(Optional, packed, bytes)                               \
  ATTNFAST_LAYER_OPTIONS(X)                                \
  X(bool, zoneout, any)                                    \
  X(bool, detach_history, any)                             \
  X(std::string, output_activation, activates)

#define ATTNFAST_RECURRENT_BACKWARD(X)                                    \
  X(Tensor, grad_states, layered, dtype, {B, T, H})                       \
  X(Optional, grad_cells, of_layers, given.cell.has_value(), H)           \
  X(Optional, grad_contexts, result, given.key, Dv)                       \
  X(Optional, grad_weights, result, given.key, Tk)                        \
  X(Optional, grad_attentional, result, given.weight_output, output_dim)  \
  X(Optional, grad_coverage, after, given.coverage, {B, Tk})              \
  X(Optional, grad_loss, after, given.coverage, {B})                      \
  X(Optional, grad_log_weights, result, given.transition_prob, Tk)        \
  X(Tensor, input, sizes, dtype, {B, T, E})                               \
  ATTNFAST_LAYER_PARAMETERS(X)                                            \
  ATTNFAST_LAYER_TERMS(X)                                                 \
  X(Tensor, states, layered, dtype, {B, T, H})                            \
  X(Tensor, cells, of_layers, given.cell.has_value(), H)                  \
  X(Tensor, contexts, result, given.key, Dv)                              \
  X(Tensor, weights, result, given.key, Tk)                               \
  X(Tensor, attentional, result, given.weight_output, output_dim)         \
  X(Tensor, queries, of_steps, has_queries, A)                            \
  X(Tensor, gates, of_layers, given.mode != "tanh", 4 * H)                \
  X(Tensor, log_weights, of_steps, given.transition_prob.has_value(), Tk) \
  X(Tensor, sigmoid_sum, of_steps, given.normalisation == "sigmoid", 1)   \
  X(Tensor, context_gates, of_steps, given.weight_gate.has_value(), Dv)   \
  ATTNFAST_LAYER_OPTIONS(X)                                               \
  X(bool, zoneout, any)                                                   \
  X(bool, detach_history, any)                                            \
  X(std::string, output_activation, activates)                            \
  X(bool, need_grad_input, any)                                           \
  X(bool, need_grad_parameters, any)                                      \
  X(bool, need_grad_key, any)

Cell cell_of(const std::string& mode) {
  if (mode == "gru") return Cell::gru;
  if (mode == "lstm") return Cell::lstm;
  if (mode == "tanh") return Cell::tanh;
  throw std::runtime_error("mode must be tanh, gru or lstm, got " + mode);
}

// Tensors of all layers of a stack, or of one layer.
struct StackChecker : ArgumentChecker {
  bool stacked = false;  // there are layers above the first
  int64_t layers = 1;
  using ArgumentChecker::ArgumentChecker;

  // With several layers, these sizes for each layer; else exactly these sizes.
  bool layered(const Tensor& x, Types types, Sizes wanted) const {
    const bool all = !stacked || (x.dim() > 0 && x.size(0) == layers);
    return all && placed(x, types) && ends(x, stacked, wanted, false);
  }
  bool layered(const Optional& x, Types types, Sizes wanted) const {
    return !x || layered(*x, types, wanted);
  }

  static bool bytes(const Optional& x) {
    return !x || (x->scalar_type() == ScalarType::Byte && x->dim() == 1 && x->is_cpu());
  }
};

// The sizes of a layer; T is 1 if there are no inputs.
struct LayerChecker : StackChecker, FilterSizes {
  ScalarType of_weights;
  bool has_queries = false;  // the queries are not the states of their own steps
  int64_t T = 1, E = 0, H = 0, G, F = 0, output_dim = 0, Tk = 0, A = 0, Dv = 0;

  template <class Arguments>
  explicit LayerChecker(const Arguments& given)
      : StackChecker(Arguments::kOperator, given.hidden), FilterSizes(given, *this),
        of_weights(given.weight_ih.scalar_type()), G(gates_of(cell_of(given.mode))) {
    const bool narrow = of_weights == ScalarType::BFloat16 && dtype == ScalarType::Float;
    check(of_weights == dtype || (narrow && weights_may_be_narrow()), "weight_ih");
    if constexpr (requires { given.weight_ih_upper; }) stacked = given.weight_ih_upper.has_value();
    check(given.hidden.dim() == 2 + stacked && (dtype == ScalarType::Float || dtype == ScalarType::Double),
          "hidden");
    check(given.cell.has_value() == (given.mode == "lstm"), "cell");
    if (stacked) layers = given.hidden.size(0), check(layers > 1, "hidden");
    B = given.hidden.size(stacked);
    lead = 1;
    H = A = given.hidden.size(1 + stacked);
    if constexpr (requires { given.input; }) {
      check(given.input.dim() == 3, "input");
      T = given.input.size(1);
      E = given.input.size(2);
    }
    check(given.key.has_value() == given.value.has_value(), "value");
    const auto needs = [&](const Optional& x, const Optional& of, const char* name) {
      check(!x || of, name);
    };
    for (const Optional* x :
         {&given.weight_query, &given.weight_output, &given.feed, &given.lengths, &given.key_bounds})
      needs(*x, given.key, "key");
    if constexpr (requires { given.coverage; }) {
      needs(given.coverage, given.key, "key");
      for (const Optional* x : {&given.filters, &given.penalty, &given.inverse_fertility,
                                &given.transition_prob, &given.previous})
        needs(*x, given.coverage, "coverage");
      needs(given.coverage, given.previous, "previous");
      check(!given.coverage || !given.key_bounds, "key_bounds");
    }
    if constexpr (requires { given.mask; }) needs(given.mask, given.key, "key");
    if constexpr (requires { given.dropout_between; }) {
      needs(given.dropout_between, given.weight_ih_upper, "dropout_between");
      needs(given.dropout_output, given.weight_output, "dropout_output");
      needs(given.dropout_joined, given.weight_output, "dropout_joined");
      needs(given.dropout_cell, given.cell, "dropout_cell");
      needs(given.dropout_query, given.key, "dropout_query");
      needs(given.dropout_feed, given.key, "dropout_feed");
      needs(given.weight_gate, given.key, "weight_gate");
    }
    if constexpr (requires { given.bias_gate; }) needs(given.bias_gate, given.weight_gate, "bias_gate");
    needs(given.bias_query, given.weight_query, "bias_query");
    needs(given.bias_output, given.weight_output, "bias_output");
    check(!given.attends_first || (!given.feed && !given.weight_output), "attends_first");
    if (given.key) {
      check(given.key->dim() == 3, "key");
      check(given.value->dim() == 3, "value");
      Tk = given.key->size(1);
      Dv = F = given.value->size(2);
      has_queries = given.weight_query || given.attends_first;
      if constexpr (requires { given.dropout_query; }) has_queries |= given.dropout_query.has_value();
    }
    if (given.weight_query)
      check(given.weight_query->dim() == 2, "weight_query"), A = given.weight_query->size(0);
    if (given.weight_output)
      check(given.weight_output->dim() == 2, "weight_output"),
          F = output_dim = given.weight_output->size(0);
  }

  static bool goes_with(const std::string& score, const Optional& key, const Optional& score_vector) {
    return score_vector.has_value() == (score_of(score) != Score::dot) && (key || !score_vector);
  }

  static bool activates(const std::string& name) { return name == "tanh" || name == "identity"; }

  // Check the result of `key_exponentials` in cpu/attention.cpp.
  bool exponentials(const Optional& x, const std::string& score) const {
    const int64_t width = (A + kPadding - 1) / kPadding * kPadding;
    return !x || (score_of(score) == Score::tanh && dtype != ScalarType::Double &&
                  sizes(x, ScalarType::Float, {B, 1, Tk, width}));
  }

  bool spans(const Optional& x) const {
    return !x || (placed(*x, ScalarType::Long) && begins(*x, true) && ends(*x, lead, {T, 2}, false));
  }

  template <class Arguments>
  bool fits_history(const std::string& normalisation, const Arguments& given) const {
    if constexpr (requires { given.coverage; })
      return normalises(normalisation, given.coverage.has_value(), given.transition_prob.has_value());
    else return normalises(normalisation);
  }

  bool of_layers(const Optional& x, bool exists, int64_t columns) const {
    return !x || (exists ? layered(*x, dtype, {B, T, columns}) : sizes(*x, dtype, {0}));
  }

  // A result of the forward, or its gradient; it exists only if `given` is present.
  bool result(const Optional& x, const Optional& given, int64_t columns) const {
    return !x || of_steps(*x, given.has_value(), columns);
  }
  bool after(const Optional& x, const Optional& given, Sizes wanted) const {
    return !x || (given ? sizes(*x, dtype, wanted) : sizes(*x, dtype, {0}));
  }
  bool of_steps(const Tensor& x, bool exists, int64_t columns) const {
    return exists ? sizes(x, dtype, {B, T, columns}) : sizes(x, dtype, {0});
  }
};

ATTNFAST_ARGUMENTS(RecurrentArguments, "recurrent", ATTNFAST_RECURRENT, LayerChecker)
ATTNFAST_RESULTS(RecurrentOutputs, states, cells, contexts, weights, attentional, coverage, loss, queries,
                 gates, log_weights, sigmoid_sum, context_gates)
ATTNFAST_ARGUMENTS(RecurrentBackwardArguments, "recurrent_backward", ATTNFAST_RECURRENT_BACKWARD,
                   LayerChecker)
ATTNFAST_RESULTS(RecurrentGradients, grad_input, grad_hidden, grad_cell, grad_feed, grad_weight_ih,
                 grad_weight_hh, grad_bias_ih, grad_bias_hh, grad_key, grad_value, grad_score_vector,
                 grad_weight_query, grad_bias_query, grad_weight_output, grad_bias_output,
                 grad_weight_ih_upper, grad_filters, grad_projection, grad_penalty, grad_inverse_fertility,
                 grad_transition_prob, grad_coverage, grad_previous, grad_weight_gate, grad_bias_gate)

// Return a view of evenly strided rows [B, T, n], of a matrix, or of a vector. With several layers,
// the layer is the head axis.
View rows_of(const Tensor& x, bool stacked = false) {
  View v;
  const int64_t n = x.dim() - stacked;
  v.data = data_or_sentinel(x);
  v.row = n > 1 ? x.size(x.dim() - 1) : 0;
  v.batch = n == 3 ? x.size(x.dim() - 2) * v.row : v.row;
  if (stacked && x.size(0)) v.head = x.numel() / x.size(0);
  return v;
}
View packed_view(const Tensor& x, KeepAlive& keep, bool stacked = false) {
  keep.push_back(packed(x));
  return rows_of(keep.back(), stacked);
}
View packed_view(const Optional& x, KeepAlive& keep, bool stacked = false) {
  return x ? packed_view(*x, keep, stacked) : View{};
}
// Return a view of a weight, converted to float unless products take bfloat16.
View weight_of(const Optional& x, bool narrow, KeepAlive& keep) {
  if (!x || narrow || x->scalar_type() != ScalarType::BFloat16) return packed_view(x, keep);
  return packed_view(torch::stable::to(*x, ScalarType::Float), keep);
}
// Return a view of a result; a result of size [0] is absent.
View result_of(const Optional& x, KeepAlive& keep, bool stacked = false) {
  return x && x->dim() == 3 + stacked ? packed_view(*x, keep, stacked) : View{};
}

template <class Arguments>
void put_weights(const Arguments& given, Layer& a, KeepAlive& keep) {
  if constexpr (requires { given.int8; }) a.int8 = given.int8;
  a.narrow = given.weight_ih.scalar_type() == ScalarType::BFloat16 && multiplies_narrow() && !a.int8;
  a.weight_ih = weight_of(given.weight_ih, a.narrow, keep);
  a.weight_hh = weight_of(given.weight_hh, a.narrow, keep);
  a.weight_query = weight_of(given.weight_query, a.narrow, keep);
  a.weight_output = weight_of(given.weight_output, a.narrow, keep);
  if constexpr (requires { given.weight_ih_upper; })
    a.weight_ih_upper = weight_of(given.weight_ih_upper, a.narrow, keep);
  if constexpr (requires { given.weight_gate; })
    a.weight_gate = weight_of(given.weight_gate, a.narrow, keep);
}

template <class Arguments>
void put_layer(const Arguments& given, const LayerChecker& fit, Layer& a, KeepAlive& keep) {
  a.dtype = dtype_of(given.hidden);
  a.cell = cell_of(given.mode);
  a.attends = given.key.has_value();
  a.attends_first = given.attends_first;
  a.layers = fit.layers;
  a.B = fit.B;
  a.T = fit.T;
  a.E = fit.E;
  a.H = fit.H;
  a.F = fit.F;
  a.output_dim = fit.output_dim;
  a.Tk = fit.Tk;
  a.A = fit.A;
  a.Dv = fit.Dv;
  if constexpr (requires { given.input; }) a.input = packed_view(given.input, keep);
  a.hidden = packed_view(given.hidden, keep, fit.stacked);
  a.first_cell = packed_view(given.cell, keep, fit.stacked);
  a.feed = packed_view(given.feed, keep);
  if constexpr (requires { given.dropout; }) {
    a.dropout = packed_view(given.dropout, keep, fit.stacked);
    a.dropout.row = 0;  // the same at all steps
  }
  if constexpr (requires { given.dropout_between; }) {
    a.dropout_between = packed_view(given.dropout_between, keep, true);
    a.dropout_output = packed_view(given.dropout_output, keep);
    a.dropout_state = packed_view(given.dropout_state, keep, fit.stacked);
    a.dropout_cell = packed_view(given.dropout_cell, keep, fit.stacked);
    a.zoneout = given.zoneout;
    a.dropout_query = packed_view(given.dropout_query, keep);
    a.dropout_feed = packed_view(given.dropout_feed, keep);
    a.dropout_joined = packed_view(given.dropout_joined, keep);
  }
  a.output_tanh = true;
  if constexpr (requires { given.output_activation; }) a.output_tanh = given.output_activation == "tanh";
  if constexpr (requires { given.bias_gate; }) a.bias_gate = packed_view(given.bias_gate, keep);
  put_weights(given, a, keep);
  a.bias_ih = packed_view(given.bias_ih, keep);
  a.bias_hh = packed_view(given.bias_hh, keep);
  a.bias_query = packed_view(given.bias_query, keep);
  a.bias_output = packed_view(given.bias_output, keep);
  if constexpr (requires { given.target_lengths; })
    if (given.target_lengths) {
      keep.push_back(packed(*given.target_lengths));
      a.target_lengths = static_cast<const int64_t*>(data_or_sentinel(keep.back()));
    }
}

// Fill in the attention problem of one step; the launcher sets the query.
template <class Arguments>
void put_attention(const Arguments& given, const LayerChecker& fit, const Layer& layer, Problem& a,
                   KeepAlive& keep) {
  a.dtype = layer.dtype;
  a.score = score_of(given.score);
  a.normalisation = normalisation_of(given.normalisation);
  a.scale = given.scale;
  a.B = layer.B;
  a.H = 1;
  a.Tq = 1;
  a.Tk = a.W = layer.Tk;
  a.A = layer.A;
  a.Dv = layer.Dv;
  a.key = view_of_rows(*given.key, keep);
  a.value = view_of_rows(*given.value, keep);
  if (given.score_vector) a.score_vector = view_of_parameters(*given.score_vector, false, keep);
  a.lengths = lengths_of(given.lengths, fit, fit.Tk, keep);
  if (given.key_bounds) {
    keep.push_back(packed(*given.key_bounds));
    a.key_bounds = broadcast_view(keep.back());
  }
  if constexpr (requires { given.mask; })
    if (given.mask) a.mask = broadcast_view(*given.mask);
}

// Allocate the results. The gates of a GRU or LSTM unit are contiguous.
RecurrentOutputs results_of(const RecurrentArguments& given, const LayerChecker& fit, RecurrentForward& a) {
  const auto room = [&](bool wanted, int64_t columns, View& out) {
    const Tensor x = empty_if(wanted, given.input, {a.B, a.T, columns}, fit.dtype);
    if (wanted) out = rows_of(x);
    return x;
  };
  const auto of_layers = [&](bool wanted, int64_t columns, View& out) {
    if (!fit.stacked) return room(wanted, columns, out);
    const Tensor x = empty_if(wanted, given.input, {a.layers, a.B, a.T, columns}, fit.dtype);
    if (wanted) out = rows_of(x, true);
    return x;
  };
  const bool remembers = given.coverage.has_value();
  const Tensor coverage = empty_if(remembers, given.input, {a.B, a.Tk}, fit.dtype);
  const Tensor loss = empty_if(remembers, given.input, {a.B}, fit.dtype);
  if (remembers) a.attention.coverage_out = rows_of(coverage), a.loss = View{data_or_sentinel(loss), 1};
  return {
      .states = of_layers(true, a.H, a.states),
      .cells = of_layers(a.cell == Cell::lstm, a.H, a.cells),
      .contexts = room(a.attends, a.Dv, a.contexts),
      .weights = room(a.attends, a.Tk, a.attention.weights),
      .attentional = room(given.weight_output.has_value(), a.output_dim, a.attentional),
      .coverage = coverage,
      .loss = loss,
      .queries = room(fit.has_queries, a.A, a.queries),
      .gates = of_layers(a.cell != Cell::tanh, 4 * a.H, a.gates),
      .log_weights = room(given.transition_prob.has_value(), a.Tk, a.attention.log_weights),
      .sigmoid_sum = room(given.normalisation == "sigmoid", 1, a.attention.sigmoid_sum),
      .context_gates = room(given.weight_gate.has_value(), a.Dv, a.context_gates),
  };
}

// Store the saved results and the incoming gradients in `a`. Allocate the gradients, except those
// of the keys and those that a history accumulates.
RecurrentGradients gradients_of(const RecurrentBackwardArguments& given, const LayerChecker& fit,
                                RecurrentBackward& a, KeepAlive& keep) {
  a.states = packed_view(given.states, keep, fit.stacked);
  a.cells = result_of(given.cells, keep, fit.stacked);
  a.contexts = result_of(given.contexts, keep);
  a.attentional = result_of(given.attentional, keep);
  a.queries = result_of(given.queries, keep);
  a.gates = result_of(given.gates, keep, fit.stacked);
  a.context_gates = result_of(given.context_gates, keep);
  a.attention.log_weights = result_of(given.log_weights, keep);
  a.attention.sigmoid_sum = result_of(given.sigmoid_sum, keep);
  a.attention.grad_log_weights = result_of(given.grad_log_weights, keep);
  a.grad_states = packed_view(given.grad_states, keep, fit.stacked);
  a.grad_cells = result_of(given.grad_cells, keep, fit.stacked);
  a.grad_contexts = result_of(given.grad_contexts, keep);
  a.grad_attentional = result_of(given.grad_attentional, keep);
  const auto nothing = [&] { return empty_if(false, given.input, {}, fit.dtype); };
  const auto gradient = [&](const Optional& x, bool wanted, View& out, bool stacked = false) {
    if (!wanted || !x) return nothing();
    const Tensor grad = empty(x->device(), {x->sizes().begin(), x->sizes().end()}, fit.dtype);
    out = rows_of(grad, stacked);
    return grad;
  };
  const bool parameters = given.need_grad_parameters;
  const bool gates = parameters && given.weight_gate;
  const Tensor grad_bias_gate = empty_if(gates, given.input, {a.Dv}, fit.dtype);
  if (gates) a.grad_bias_gate = rows_of(grad_bias_gate);
  return {
      .grad_input = gradient(given.input, given.need_grad_input, a.grad_input),
      .grad_hidden = gradient(given.hidden, true, a.grad_hidden, fit.stacked),
      .grad_cell = gradient(given.cell, true, a.grad_cell, fit.stacked),
      .grad_feed = gradient(given.feed, true, a.grad_feed),
      .grad_weight_ih = gradient(given.weight_ih, parameters, a.grad_weight_ih),
      .grad_weight_hh = gradient(given.weight_hh, parameters, a.grad_weight_hh, fit.stacked),
      .grad_bias_ih = gradient(given.bias_ih, parameters, a.grad_bias_ih, fit.stacked),
      .grad_bias_hh = gradient(given.bias_hh, parameters, a.grad_bias_hh, fit.stacked),
      .grad_key = nothing(),
      .grad_value = nothing(),
      .grad_score_vector = nothing(),
      .grad_weight_query = gradient(given.weight_query, parameters, a.grad_weight_query),
      .grad_bias_query = gradient(given.bias_query, parameters, a.grad_bias_query),
      .grad_weight_output = gradient(given.weight_output, parameters, a.grad_weight_output),
      .grad_bias_output = gradient(given.bias_output, parameters, a.grad_bias_output),
      .grad_weight_ih_upper = gradient(given.weight_ih_upper, parameters, a.grad_weight_ih_upper, true),
      .grad_filters = nothing(),
      .grad_projection = nothing(),
      .grad_penalty = nothing(),
      .grad_inverse_fertility = gradient(given.inverse_fertility, true, a.attention.grad_inverse_fertility),
      .grad_transition_prob = gradient(given.transition_prob, true, a.attention.grad_transition_prob),
      .grad_coverage = gradient(given.coverage, true, a.attention.grad_coverage_in),
      .grad_previous = gradient(given.previous, true, a.attention.grad_previous),
      .grad_weight_gate = gradient(given.weight_gate, parameters, a.grad_weight_gate),
      .grad_bias_gate = grad_bias_gate,
  };
}

// The sums to which a history's backward adds at every step: gradients of parameters, in parts for
// each sequence, and, with filters, of the keys.
struct HistorySums {
  const GradientParts parts;

  HistorySums(const RecurrentBackwardArguments& given, const LayerChecker& fit, RecurrentBackward& a,
              RecurrentGradients& grads, KeepAlive& keep)
      : parts(given.input, fit, fit.K && given.need_grad_key ? std::optional(1) : std::nullopt,
              given.filters && given.need_grad_parameters, given.penalty && given.need_grad_parameters,
              a.attention) {
    CoverageBackward& h = a.attention;
    fill_history(given, fit, h, keep);
    a.grad_coverage = view_of_numbers(given.grad_coverage, keep);
    h.grad_loss = view_of_heads(given.grad_loss, 1, keep);
    h.grad_transition_prob.row = 1;  // [B, T]
    h.sums = true;
    a.detaches_history = given.detach_history;
    if (fit.K && given.need_grad_key) grads.grad_key = gradient_of_rows(true, *given.key, h.grad_key);
    for (Tensor x : {parts.score_vector, parts.filters, parts.projection, parts.penalty, grads.grad_key,
                     grads.grad_inverse_fertility})
      if (x.numel()) torch::stable::zero_(x);
  }

  // Store the sums' gradients; run_grad_value(Backward) computes that of the values at all steps.
  template <class Run>
  void finish(const RecurrentBackwardArguments& given, const LayerChecker& fit, const RecurrentBackward& a,
              RecurrentGradients& grads, const Run& run_grad_value) const {
    if (given.need_grad_parameters && given.filters) {
      grads.grad_filters = sum_of_parts(parts.filters, {0}, false, fit.dtype);
      grads.grad_projection = sum_of_parts(parts.projection, {0}, false, fit.dtype);
    }
    if (given.need_grad_parameters && given.penalty) grads.grad_penalty = parts.of_penalty(1, fit.dtype);
    if (!fit.K || !given.need_grad_key) return;
    grads.grad_score_vector = sum_of_parts(parts.score_vector, {0, 2}, false, fit.dtype);
    Backward all = static_cast<const Backward&>(a.attention);
    all.Tq = fit.T;
    grads.grad_value = gradient_of_rows(true, *given.value, all.grad_value);
    run_grad_value(all);
  }
};

// Compute the gradients of keys, values and the score's weight for all steps at once. `step` is the
// backward of the first step, and its score gradients cover all steps; run(Backward) does the
// computation.
template <class Run>
void add_key_gradients(const RecurrentBackwardArguments& given, const LayerChecker& fit,
                       const Backward& step, int64_t vector_parts, RecurrentGradients& grads,
                       const Run& run) {
  Backward all = step;
  all.Tq = fit.T;
  all.grad_weights = all.grad_query = View{};
  all.grad_score_given = true;
  all.grad_score_returned = false;
  grads.grad_key = gradient_of_rows(true, *given.key, all.grad_key);
  grads.grad_value = gradient_of_rows(true, *given.value, all.grad_value);
  const Tensor parts =
      empty_if(given.score_vector.has_value(), given.input, {all.B, 1, vector_parts, all.A}, fit.dtype);
  if (given.score_vector) all.grad_score_vector = view(parts);
  run(all);
  if (given.score_vector) grads.grad_score_vector = sum_of_parts(parts, {0, 2}, false, fit.dtype);
}

RecurrentOutputs recurrent(const RecurrentArguments&);
RecurrentGradients recurrent_backward(const RecurrentBackwardArguments&);
using RecurrentOperators = Operators<recurrent, recurrent_backward>;

}  // namespace

// Return the lists above, for a test.
ATTNFAST_EXPORT const char* attnfast_recurrent_operators() {
  static const std::string text = RecurrentOperators::listed();
  return text.c_str();
}

}  // namespace attnfast
