// The backward of a recurrent layer on a GPU, see recurrent_loop.h.
#pragma once
#include "persistent_backward.cuh"
#include "recurrent_loop.h"

namespace attnfast {
namespace {

// Return rows [B, T, columns] shifted by one step: `first`, or zeros, then all but the last of x.
template <class Loop>
Tensor shifted(const Loop& loop, const Tensor& x, const Optional& first) {
  const int64_t T = x.size(1), columns = x.size(2);
  const Tensor out = loop.room({T, columns});
  if (T == 0) return out;
  if (first) copy(*first, step(out, 0, 0, columns));
  else zero(step(out, 0, 0, columns));
  copy(steps(x, 0, T - 1, 0, columns), steps(out, 1, T - 1, 0, columns));
  return out;
}

// A layer's tensors in the backward.
struct BackwardLayer {
  Tensor hidden, states, cells, gates, grad_states, grad_hidden, grad_cell;
  Optional cell, mask, grad_cells, dropout_state, dropout_cell;
  Tensor of_inputs;    // the gradients of the sums over inputs
  Tensor products;     // those of the products with weight_hh, from a column on
  int64_t first_gate;  // that column
  Tensor carried;      // the gradients of the state's copies from the step after it
  Tensor reaching;     // that from its query, if it is the query itself, or from the layer above
  Tensor weight_hh;    // of a layer below the last
};

// The buffers of a backward, and the phases of a step.
template <class Launch>
class BackwardLoop {
  const RecurrentBackwardArguments& given;
  Loop<RecurrentBackwardArguments, Launch> loop;
  RecurrentBackward a;
  RecurrentGradients grads;
  const StateParameters of;
  const StateMasks masks;
  const int64_t H, gates;
  const bool lstm;
  const Tensor attentional, contexts, context_gates, queries, weights, weight_ih;
  const Optional grad_weights, of_context, dropout_output, dropout_between;
  const Optional projected;  // if present, a step reads no gradient of a context
  const Tensor state_products, grad_query, of_fed, grad_score, coverages;
  // The gradients of the contexts and attentional vectors, to which the loop adds, and which of the two
  // is that of the fed vectors.
  Tensor grad_contexts, grad_attentional;
  const Tensor& grad_fed;
  std::optional<HistorySums> of_history;
  std::vector<BackwardLayer> layers;
  const BackwardLayer& last() const { return layers.back(); }

 public:
  BackwardLoop(const RecurrentBackwardArguments& given, const Launch& launch)
      : given(given), loop(given, launch), a(layer_of<RecurrentBackward>(given, loop)),
        grads(gradients_of(given, loop.fit, a, loop.keep)), of(given, a), masks(loop, given, a), H(a.H),
        gates(gates_of(a.cell) * H), lstm(a.cell == Cell::lstm), attentional(packed(given.attentional)),
        contexts(packed(given.contexts)), context_gates(packed(given.context_gates)),
        queries(given.queries.dim() == 3 ? packed(given.queries) : loop.own(given.states, a.layers - 1)),
        weights(packed(given.weights)), weight_ih(packed(given.weight_ih)),
        grad_weights(loop.side_by_side(given.grad_weights)),
        of_context(context_columns(given.weight_output, a)),
        dropout_output(loop.side_by_side(given.dropout_output)),
        dropout_between(loop.side_by_side(given.dropout_between)),
        projected(given.grad_contexts ? Optional() : project_values(given, loop, a, of_context)),
        state_products(loop.room({a.T + 1, of.all})), grad_query(loop.room({1, H})),
        of_fed(block(weight_ih, 0, gates, a.E, a.F)), grad_score(loop.room({a.T, a.Tk})),
        coverages(loop.room({given.coverage ? a.T : 0, a.Tk})),
        grad_fed(of_context ? grad_attentional : grad_contexts) {
    for (int64_t number = 0; number < a.layers; ++number) layers.push_back(layer(number));
    for (const BackwardLayer& x : layers) zero(x.carried);
    for (const Tensor& x : {state_products, grad_query, grads.grad_cell}) zero(x);
    grad_contexts = returned(given.grad_contexts, a.attends, a.Dv);
    grad_attentional = returned(given.grad_attentional, a.attentional.data, a.F);
    if (!a.attends) return;
    CoverageBackward& attends = a.attention;
    put_attention(given, loop.fit, a, attends, loop.keep);
    attends.query = loop.view_at(queries, 0);
    attends.weights = loop.view_at(weights, 0);
    attends.grad_context = loop.view_at(grad_contexts, 0);
    attends.grad_score = loop.view_at(grad_score, 0);
    attends.grad_score_returned = true;
    if (grad_weights) attends.grad_weights = loop.view_at(*grad_weights, 0);
    if (given.coverage) begin_history();
  }

  RecurrentGradients run() {
    if (!run_at_once()) run_steps();
    if (a.T) multiply_gradients(0);
    for (int64_t number = 0; a.T && number + 1 < a.layers; ++number)
      multiply_gradients_below(layers[number], 0);
    write_initial_grads();
    Optional of_output;  // gradients of the sums of attentional vectors
    if (of_context) {
      of_output = loop.room({a.T, a.F});
      copy(steps(state_products, 1, a.T, of.output, a.F), *of_output);
      if (projected && given.need_grad_key)
        multiply(matrix(grad_contexts), matrix(*of_output), *of_context, false);
    }
    if (given.need_grad_input)
      multiply(matrix(grads.grad_input), matrix(layers[0].of_inputs), block(weight_ih, 0, gates, 0, a.E),
               false);
    if (given.need_grad_parameters) {
      multiply_inputs();
      multiply_states(of_output);
      for (int64_t number = 0; number < a.layers; ++number) multiply_layer(number);
    }
    const auto run_all = [&](const Backward& x) { cuda::run_backward(x, last().hidden); };
    if (of_history)
      of_history->finish(given, loop.fit, a, grads, [&](Backward of_values) {
        of_values.grad_key = of_values.grad_score_vector = View{};
        of_values.grad_score_given = true;
        run_all(of_values);
      });
    if (a.attends && given.need_grad_key && !loop.fit.K) {
      Problem all = a.attention;
      all.Tq = a.T;
      add_key_gradients(given, loop.fit, a.attention, cuda::grad_score_vector_parts(all), grads, run_all);
    }
    return grads;
  }

 private:
  BackwardLayer layer(int64_t number) const {
    const auto own = [&](const auto& x) { return loop.own(x, number); };
    BackwardLayer x = {own(given.hidden),     own(given.states),        own(given.cells),
                       own(given.gates),      own(given.grad_states),   own(grads.grad_hidden),
                       own(grads.grad_cell),  own(given.cell),          own(given.dropout),
                       own(given.grad_cells), own(given.dropout_state), own(given.dropout_cell)};
    x.of_inputs = loop.room({a.T, gates});
    const bool is_last = number + 1 == a.layers;
    const int64_t copies = is_last ? of.copies : x.mask ? 2 : 1;
    x.carried = copies > 1 ? loop.room({copies * H}) : x.grad_hidden;
    x.products = is_last ? state_products : loop.room({a.T, gates});
    x.first_gate = is_last ? of.gates : 0;
    x.reaching = is_last ? grad_query : loop.room({1, H});
    if (!is_last) x.weight_hh = own(given.weight_hh);
    return x;
  }

  // Compute the coverage before every step, and initialise the gradient of the history after the
  // last one.
  void begin_history() {
    of_history.emplace(given, loop.fit, a, grads, loop.keep);
    put_lengths(loop, a.attention, a);
    a.coverages = view(coverages);
    const auto rows = [](const View& x) { return Rows2{x.data, x.batch}; };
    const auto kernels = [](auto zero) { return cover_steps<decltype(zero)>; };
    loop.run(a.Tk, kernels, a.T, a.Tk, rows(a.attention.coverage_in), rows(a.attention.inverse_fertility),
             matrix_rows(weights), matrix_rows(coverages));
    if (given.grad_coverage) copy(*given.grad_coverage, grads.grad_coverage);
    else zero(grads.grad_coverage);
    zero(grads.grad_previous);
  }

  void run_steps() {
    const bool asks_last = a.attends && !a.attends_first;
    for (int64_t t = a.T - 1; t >= 0; --t) {
      if (of_context) feed_backward(t);
      if (asks_last) attend_backward(t, t + 1);
      if (asks_last || t + 1 < a.T) multiply_gradients(t + 1);
      run_cell_backward(a.layers - 1, t);
      for (int64_t number = a.layers - 2; number >= 0; --number) {
        reach_below(number, t);
        if (t + 1 < a.T) multiply_gradients_below(layers[number], t + 1);
        run_cell_backward(number, t);
      }
      const int64_t to = a.attends_first ? t : t - 1;
      if (a.attends && to >= 0) reach_fed(t, step(grad_fed, to, 0, a.F), true);
      else if (given.feed) reach_fed(t, grads.grad_feed, false);
      if (a.attends && a.attends_first) attend_backward(t, t);
    }
  }

  // Run all steps in one launch if the kernel supports the layer; return true if so.
  bool run_at_once() {
    if (!runs_at_once(a) || (of_context && !projected)) return false;
    const BackwardLayer& x = last();
    PersistentBackward call{persistent_layer(a, of, state_products)};
    call.attends = a.attention;
    call.attends.Tq = a.T;
    call.attends.query = view(queries);
    call.attends.weights = view(weights);
    call.attends.grad_context = view(grad_contexts);
    call.attends.grad_score = view(grad_score);
    if (projected) {
      call.attends.value = view(*projected);
      call.attends.Dv = a.F;
      call.attends.grad_context = loop.view_at(state_products, 1, of.output);
    }
    call.grad_query = given.weight_query ? view(state_products) : view(grad_query);
    if (!given.weight_query) call.grad_query.row = 0, call.grad_state = loop.at(grad_query, 0);
    call.fed_weight = {floats(of_fed), of_fed.stride(0), int(gates)};
    call.state_weight = {floats(of.weight), of.weight.stride(0), int(of.all)};
    call.copies = of.copies;
    call.grad_states = view(x.grad_states);
    call.grad_cells_given = lstm && x.grad_cells ? view(*x.grad_cells) : View{};
    call.saved_gates = saved_of(a.cell) ? view(x.gates) : View{};
    call.states = view(x.states);
    call.cells = lstm ? view(x.cells) : View{};
    call.of_inputs = view(x.of_inputs);
    call.grad_fed = view(grad_fed);
    call.attentional = of_context ? view(attentional) : View{};
    call.hidden = matrix_rows(x.hidden);
    call.first_cell = loop.at(x.cell);
    call.mask = loop.at(x.mask);
    call.carried = matrix_rows(x.carried);
    call.grad_cell = lstm ? matrix_rows(x.grad_cell) : Rows2{};
    call.grad_feed = given.feed ? matrix_rows(grads.grad_feed) : Rows2{};
    call.target_lengths = a.target_lengths;
    const int64_t outputs = std::max(of.copies * H, a.F);
    call.partial = loop.launch.template scratch<float>(kMostSplit * outputs * a.B);
    const int64_t part = 2 * a.A + int64_t{sizeof(QueryPart<float>) / sizeof(float)};
    return launch_at_once(loop, call, persistent_backward, part, [&](int) {
      return std::max(call.units() * call.copies, call.fed_outputs()) <= kLoopWarps * kTileOutputs;
    });
  }

  Tensor returned(const Optional& grad, bool wanted, int64_t columns) const {
    const Tensor out = loop.room({wanted ? a.T : 0, columns});
    if (grad && wanted) copy(*grad, out);
    else zero(out);
    if (wanted) loop.clear(a, out);
    return out;
  }
  static Tensor sum_of_rows(const Tensor& x) {
    return torch::stable::sum(matrix(x), std::vector<int64_t>{0}, false);
  }

  // Compute the product of gradients and a weight, times the first columns of step t of a mask if that is
  // given, and add it to out if `adds`.
  void multiply_through(const Tensor& out, const Tensor& from, const Tensor& weight, const Optional& mask,
                        int64_t t, bool adds) {
    if (!mask) return multiply(out, from, weight, adds);
    const Tensor product = loop.room({out.size(1)});
    multiply(product, from, weight, false);
    loop.put_masked(product, *mask, t, out, adds);
  }

  // Compute the gradient of the vector that step t is fed, or add it.
  void reach_fed(int64_t t, const Tensor& out, bool adds) {
    multiply_through(out, step(layers[0].of_inputs, t, 0, gates), of_fed, masks.feed, t, adds);
  }

  // Run the backward of the attentional vector of step t.
  void feed_backward(int64_t t) {
    const auto kernels = [](auto zero) { return attentional_backward<decltype(zero)>; };
    loop.run(a.F, kernels, a.F, a.output_tanh, loop.at(attentional, t), loop.at(dropout_output, t),
             loop.at(grad_attentional, t), loop.at(state_products, t + 1, of.output));
    if (!projected)
      multiply_through(step(grad_contexts, t, 0, a.Dv), step(state_products, t + 1, of.output, a.F),
                       *of_context, masks.joined, t, true);
  }

  // Run attention's backward at step t and store into row `to` of `state_products`.
  void attend_backward(int64_t t, int64_t to) {
    if (given.weight_gate) {
      const auto kernels = [](auto zero) { return gate_backward<decltype(zero)>; };
      loop.run(a.Dv, kernels, a.Dv, loop.at(context_gates, t), loop.at(contexts, t),
               loop.at(grad_contexts, t), loop.at(state_products, to, of.context_gate));
    }
    CoverageBackward now = step_of(a, t, loop.size);
    if (projected) {
      now.value = view(*projected);
      now.Dv = a.F;
      now.grad_context = loop.view_at(state_products, t + 1, of.output);
    }
    if (given.weight_query) now.grad_query = loop.view_at(state_products, to);
    else if (masks.query) now.grad_query = copy_of(last().carried, of.of_query, a);
    else now.grad_query = loop.view_at(grad_query, 0);
    if (of_history) cuda::run_backward(now, last().hidden);
    else cuda::run_backward(static_cast<const Backward&>(now), last().hidden);
  }

  // Map row t of `state_products` to the gradient of the state.
  void multiply_gradients(int64_t t) {
    multiply(last().carried, step(state_products, t, 0, of.all), of.weight, true);
  }

  // The same for a layer below the last; with dropout, that of the state times the mask.
  void multiply_gradients_below(const BackwardLayer& x, int64_t t) {
    const Tensor out = x.mask ? block(x.carried, 0, a.B, H, H) : x.carried;
    multiply(out, step(x.products, t, 0, gates), x.weight_hh, true);
  }

  // Compute the gradient of a layer's state at step t from the layer above.
  void reach_below(int64_t number, int64_t t) {
    multiply_through(
        step(layers[number].reaching, 0, 0, H), step(layers[number + 1].of_inputs, t, 0, gates),
        of_layer(*given.weight_ih_upper, number, true), of_layer(dropout_between, number, true), t, false);
  }

  // Return the gradients that reach a layer's state before step t. `asks`: a query is the state itself.
  Reaching reaching(int64_t number, int64_t t, bool asks) const {
    const BackwardLayer& x = layers[number];
    const Masks of_copies = masks.before(loop, of, a, number, x.mask, t);
    return {matrix_rows(x.carried), of_copies, asks ? loop.at(x.reaching, 0) : Rows2{}};
  }
  // Return true if the gradient of a query is that of the state itself.
  bool query_is_state() const { return a.attends && !given.weight_query && !masks.query; }

  void run_cell_backward(int64_t number, int64_t t) {
    const BackwardLayer& x = layers[number];
    const CellStepBackward call = {
        .B = a.B,
        .H = H,
        .t = t,
        .target_lengths = a.target_lengths,
        .grad_state = loop.at(x.grad_states, t),
        .grad_cell_given = x.grad_cells && lstm ? loop.at(*x.grad_cells, t) : Rows2{},
        .gates = saved_of(a.cell) ? loop.at(x.gates, t) : Rows2{},
        .state = loop.at(x.states, t),
        .before = loop.before(x.states, x.hidden, t),
        .cell = lstm ? loop.at(x.cells, t) : Rows2{},
        .cell_before = lstm ? loop.before(x.cells, x.cell, t) : Rows2{},
        .dropout_state = loop.at(x.dropout_state, t),
        .dropout_cell = loop.at(x.dropout_cell, t),
        .zoneout = a.zoneout,
        .reaching = reaching(number, t + 1, number + 1 < a.layers || query_is_state()),
        .grad_cell = lstm ? matrix_rows(x.grad_cell) : Rows2{},
        .of_input = loop.at(x.of_inputs, t),
        .state_products = loop.at(x.products, t, x.first_gate)};
    by_cell(a.cell, [&](auto known) {
      const auto kernels = [](auto zero) {
        return cell_step_backward<decltype(zero), decltype(known)::cell>;
      };
      loop.run(H, kernels, call);
    });
  }

  void write_initial_grads() {
    if (given.feed && !a.T) zero(grads.grad_feed);
    for (int64_t number = 0; number < a.layers; ++number) {
      const bool asks = number + 1 == a.layers && a.attends_first && query_is_state();
      const auto kernels = [](auto zero) { return reach_first<decltype(zero)>; };
      loop.run(H, kernels, H, reaching(number, 0, asks), matrix_rows(layers[number].grad_hidden));
    }
  }

  // Compute the gradient of weight_ih, which multiplies the inputs and the fed vectors.
  void multiply_inputs() {
    const Tensor through = turned(matrix(layers[0].of_inputs));
    Tensor input = packed(given.input);
    if (a.target_lengths) {
      input = torch::stable::clone(input);
      loop.clear(a, input);
    }
    multiply(block(grads.grad_weight_ih, 0, gates, 0, a.E), through, matrix(input), false);
    if (!a.attends) return;
    const Tensor& made = of_context ? attentional : contexts;
    Tensor fed = a.attends_first ? made : shifted(loop, made, given.feed);
    if (masks.feed) fed = masked_rows(fed, *masks.feed);
    multiply(block(grads.grad_weight_ih, 0, gates, a.E, a.F), through, matrix(fed), false);
  }

  // Compute the gradients of the parameters that multiply a state, and of the columns of W_o for the
  // context.
  void multiply_states(const Optional& of_output) {
    std::vector<Tensor> seen;  // the copies of the states before all steps, and after the last
    for (int64_t n = 0; n < of.copies; ++n) {
      seen.push_back(loop.room({a.T + 1, H}));
      copy(last().hidden, step(seen[n], 0, 0, H));
      copy(last().states, steps(seen[n], 1, a.T, 0, H));
    }
    if (masks.dropout) scale_steps(seen[of.of_gates], *masks.dropout);
    if (masks.query) scale(steps(seen[of.of_query], a.attends_first ? 0 : 1, a.T, 0, H), *masks.query);
    if (masks.joined) scale(steps(seen[of.of_output], 1, a.T, 0, H), steps(*masks.joined, 0, a.T, a.Dv, H));
    const Tensor sums = sum_of_rows(state_products);
    const auto put = [&](int64_t first, int64_t number, const Tensor& weight, const Tensor& bias) {
      const Tensor through = block(matrix(state_products), 0, a.B * (a.T + 1), first, weight.size(0));
      multiply(weight, turned(through), matrix(seen[number]), false);
      if (bias.numel()) copy(strided(sums, {bias.size(0)}, {1}, first), bias);
    };
    const int64_t number = a.layers - 1;
    put(of.gates, of.of_gates, loop.own(grads.grad_weight_hh, number),
        loop.own(grads.grad_bias_hh, number));
    if (given.weight_query) put(0, of.of_query, grads.grad_weight_query, grads.grad_bias_query);
    if (given.weight_gate) put(of.context_gate, of.of_query, grads.grad_weight_gate, grads.grad_bias_gate);
    if (!of_output) return;
    put(of.output, of.of_output, block(grads.grad_weight_output, 0, a.F, a.Dv, H), grads.grad_bias_output);
    Tensor read = contexts;
    if (masks.joined) read = masked_rows(read, steps(*masks.joined, 0, a.T, 0, a.Dv));
    multiply(block(grads.grad_weight_output, 0, a.F, 0, a.Dv), turned(matrix(*of_output)), matrix(read),
             false);
  }

  // Return rows times those of a mask.
  static Tensor masked_rows(const Tensor& x, const Tensor& mask) {
    const Tensor out = torch::stable::clone(x);
    scale(out, mask);
    return out;
  }

  // Multiply the states of all steps by the mask of a layer.
  void scale_steps(const Tensor& states, const Tensor& mask) const {
    scale(states, strided(mask, {a.B, 1, H}, {H, H, 1}, 0));
  }

  // Compute the gradients of a layer's parameters that multiply no state of the last layer.
  void multiply_layer(int64_t number) {
    const BackwardLayer& x = layers[number];
    if (grads.grad_bias_ih.numel()) copy(sum_of_rows(x.of_inputs), loop.own(grads.grad_bias_ih, number));
    if (number + 1 == a.layers) return;
    const Tensor before = shifted(loop, x.states, x.hidden);
    if (x.mask) scale_steps(before, *x.mask);
    multiply(loop.own(grads.grad_weight_hh, number), turned(matrix(x.products)), matrix(before), false);
    if (grads.grad_bias_hh.numel()) copy(sum_of_rows(x.products), loop.own(grads.grad_bias_hh, number));
    Tensor read = x.states;  // by the layer above
    if (dropout_between) read = masked_rows(read, of_layer(*dropout_between, number, true));
    multiply(of_layer(grads.grad_weight_ih_upper, number, true),
             turned(matrix(layers[number + 1].of_inputs)), matrix(read), false);
  }
};

template <class Launch>
RecurrentGradients run_recurrent_backward(const RecurrentBackwardArguments& given, const Launch& launch) {
  return BackwardLoop<Launch>(given, launch).run();
}

}  // namespace
}  // namespace attnfast
