// The forward of a recurrent layer on a GPU, see recurrent_loop.h.
#pragma once
#include "persistent_forward.cuh"
#include "recurrent_loop.h"

namespace attnfast {
namespace {

// A layer's tensors in the forward.
struct ForwardLayer {
  Tensor hidden, states, cells, gates;
  Optional cell, mask, dropout_state, dropout_cell;
  Tensor sums;         // the inputs' contributions, stored where the gates or states will be
  Tensor products;     // of the states before each step, with weight_hh from a column on
  int64_t first_gate;  // that column
  Tensor bias_ih;      // or nothing
  Tensor weight_hh;    // of a layer below the last
  Optional seen;       // copies of the state, if it has masks
};

// The buffers of a forward, and the phases of a step.
template <class Launch>
class ForwardLoop {
  const RecurrentArguments& given;
  Loop<RecurrentArguments, Launch> loop;
  RecurrentForward a;
  const RecurrentOutputs made;
  const StateParameters of;
  const StateMasks masks;
  const int64_t H, gates;
  const Tensor weight_ih;
  const Optional first_fed, of_context, projected, dropout_output, dropout_between;
  const Tensor of_fed, state_weight, state_products, log_sum_exp, losses;
  std::vector<ForwardLayer> layers;
  const ForwardLayer& last() const { return layers.back(); }

 public:
  ForwardLoop(const RecurrentArguments& given, const Launch& launch)
      : given(given), loop(given, launch), a(layer_of<RecurrentForward>(given, loop)),
        made(results_of(given, loop.fit, a)), of(given, a), masks(loop, given, a), H(a.H),
        gates(gates_of(a.cell) * H), weight_ih(packed(given.weight_ih)),
        first_fed(loop.side_by_side(given.feed)), of_context(context_columns(given.weight_output, a)),
        projected(project_values(given, loop, a, of_context)),
        dropout_output(loop.side_by_side(given.dropout_output)),
        dropout_between(loop.side_by_side(given.dropout_between)),
        of_fed(turned(block(weight_ih, 0, gates, a.E, a.F))), state_weight(turned(of.weight)),
        state_products(loop.room({a.T + 1, of.all})), log_sum_exp(loop.room({a.T, 1})),
        losses(loop.room({given.coverage ? a.T : 0, 1})) {
    for (int64_t number = 0; number < a.layers; ++number) layers.push_back(layer(number));
    const Tensor& sums = layers[0].sums;
    multiply(strided(sums, {a.B * a.T, gates}, {sums.stride(1), 1}, 0), matrix(packed(given.input)),
             turned(block(weight_ih, 0, gates, 0, a.E)), false);
    if (a.attends) put_attention(given, loop.fit, a, a.attention, loop.keep);
    if (given.coverage) {
      fill_history(given, loop.fit, a.attention, loop.keep);
      put_lengths(loop, a.attention, a);
      copy(*given.coverage, made.coverage);  // to which every step adds
      a.attention.loss = loop.view_at(losses, 0);
    }
  }

  RecurrentOutputs run() {
    if (!run_at_once()) run_steps();
    const std::vector<int64_t> steps = {1, 2};
    if (given.coverage) copy(torch::stable::sum(losses, steps, false, ScalarType::Double), made.loss);
    if (projected) multiply_weights();
    if (a.queries.data) copy_queries();
    for (const Tensor& x :
         {made.contexts, made.weights, made.queries, made.attentional, made.context_gates})
      loop.clear(a, x);
    return made;
  }

 private:
  ForwardLayer layer(int64_t number) const {
    const auto own = [&](const auto& x) { return loop.own(x, number); };
    ForwardLayer x = {own(given.hidden),        own(made.states),       own(made.cells),
                      own(made.gates),          own(given.cell),        own(given.dropout),
                      own(given.dropout_state), own(given.dropout_cell)};
    x.sums = saved_of(a.cell) ? x.gates : x.states;
    x.products = state_products;
    x.first_gate = of.gates;
    if (given.bias_ih) x.bias_ih = own(*given.bias_ih);
    if (number + 1 < a.layers) {
      x.products = loop.room({a.T, gates});
      x.first_gate = 0;
      x.weight_hh = turned(own(given.weight_hh));
      if (given.bias_hh) copy(own(*given.bias_hh), x.products);
      else zero(x.products);
    }
    if (const Masks of_first = masks.before(loop, of, a, number, x.mask, 0); of_first.count) {
      x.seen = loop.room({(1 + of_first.count) * H});
      const auto kernels = [](auto zero) { return copy_state<decltype(zero)>; };
      loop.run(H, kernels, H, matrix_rows(x.hidden), of_first, loop.at(x.seen));
    }
    return x;
  }

  void run_steps() {
    const bool asks_last = a.attends && !a.attends_first;
    copy(of.bias, state_products);
    if (a.T) multiply_state(0);
    for (int64_t t = 0; t < a.T; ++t) {
      if (a.attends && a.attends_first) attend(t, t);
      const Tensor& all_fed = of_context ? made.attentional : made.contexts;
      Optional fed = first_fed;
      if (a.attends && (a.attends_first || t)) fed = step(all_fed, a.attends_first ? t : t - 1, 0, a.F);
      if (fed) multiply(step(layers[0].sums, t, 0, gates), loop.masked(*fed, masks.feed, t), of_fed, true);
      for (int64_t number = 0; number < a.layers; ++number) {
        if (number) read_below(number, t);
        if (number + 1 < a.layers) multiply_state_below(layers[number], t);
        run_cell(number, t);
      }
      if (asks_last || t + 1 < a.T) multiply_state(t + 1);
      if (asks_last) attend(t, t + 1);
    }
  }

  // Run all steps in one launch if the kernel supports the layer; return true if so.
  bool run_at_once() {
    if (!runs_at_once(a) || (of_context && !projected)) return false;
    PersistentForward call{persistent_layer(a, of, state_products)};
    call.attends = a.attention;
    call.added = of_context ? loop.view_at(state_products, 1, of.output) : View{};
    call.fed_weight = {floats(of_fed), weight_ih.stride(0), int(a.F)};
    call.state_weight = {floats(of.weight), of.weight.stride(0), int(of.copies * H)};
    call.state_bias = floats(of.bias);
    call.input_sums = view(last().sums);
    call.states = view(made.states);
    call.cells = given.cell ? view(made.cells) : View{};
    call.saved_gates = saved_of(a.cell) ? view(made.gates) : View{};
    call.fed = view(of_context ? made.attentional : made.contexts);
    call.hidden = matrix_rows(last().hidden);
    call.first_cell = loop.at(last().cell);
    call.feed = loop.at(first_fed);
    call.bias_ih = {a.bias_ih.data, 0};
    call.mask = loop.at(last().mask);
    call.seen = loop.at(last().seen);
    call.target_lengths = a.target_lengths;
    Forward& now = call.attends;
    now.Tq = a.T;
    now.query = given.weight_query ? view(state_products) : View{};
    now.weights = view(made.weights);
    now.context = call.fed;
    if (projected) now.value = view(*projected), now.Dv = a.F;
    const int64_t part = now.Dv + int64_t{sizeof(SoftmaxPart<float>) / sizeof(float)};
    return launch_at_once(loop, call, persistent_forward, part, [&](int blocks) {
      return tiles(H, blocks) <= kLoopWarps && tiles(of.all, blocks) <= kLoopWarps * kTileOutputs;
    });
  }

  // Fill row t of `state_products`.
  void multiply_state(int64_t t) {
    const ForwardLayer& x = last();
    const Tensor state = x.seen ? *x.seen : t ? step(x.states, t - 1, 0, H) : x.hidden;
    multiply(step(state_products, t, 0, of.all), state, state_weight, true);
  }

  // Fill row t of the products of a layer below the last.
  void multiply_state_below(const ForwardLayer& x, int64_t t) {
    const Tensor state = x.seen ? block(*x.seen, 0, a.B, H, H) : t ? step(x.states, t - 1, 0, H) : x.hidden;
    multiply(step(x.products, t, 0, gates), state, x.weight_hh, true);
  }

  // Set the sums of a layer at step t to the product with the state of the layer below.
  void read_below(int64_t number, int64_t t) {
    const Tensor state = loop.masked(step(layers[number - 1].states, t, 0, H),
                                     of_layer(dropout_between, number - 1, true), t);
    const Tensor weight = of_layer(*given.weight_ih_upper, number - 1, true);
    multiply(step(layers[number].sums, t, 0, gates), state, turned(weight), false);
  }

  // Run attention at step t with row `from` of `state_products`.
  void attend(int64_t t, int64_t from) {
    CoverageForward now = step_of(a, t, loop.size);
    const Tensor& like = last().hidden;
    if (given.weight_query) now.query = loop.view_at(state_products, from);
    else if (masks.query) now.query = copy_of(*last().seen, of.of_query, a);
    else if (from) now.query = loop.view_at(last().states, from - 1);
    else now.query = view(like);
    now.log_sum_exp = loop.view_at(log_sum_exp, t);
    if (projected) {
      now.value = view(*projected);
      now.Dv = a.F;
      now.context = loop.view_at(made.attentional, t);
      cuda::run_forward(now, loop.view_at(state_products, t + 1, of.output), like);
    } else {
      now.context = loop.view_at(made.contexts, t);
      if (given.coverage) cuda::run_forward(now, like);
      else cuda::run_forward(now, {}, like);
      if (given.weight_gate) gate_step(t, from);
      if (of_context) add_context(t);
    }
    if (!dropout_output) return;
    const Tensor attentional = step(made.attentional, t, 0, a.F);
    loop.put_masked(attentional, *dropout_output, t, attentional);
  }

  // Multiply the contexts of step t by the gates, whose sums are in row `from` of `state_products`.
  void gate_step(int64_t t, int64_t from) {
    const auto kernels = [](auto zero) { return gate_contexts<decltype(zero)>; };
    loop.run(a.Dv, kernels, a.Dv, loop.at(state_products, from, of.context_gate), loop.at(made.contexts, t),
             loop.at(made.context_gates, t));
  }

  // Compute the attentional vectors of step t from its contexts.
  void add_context(int64_t t) {
    const Tensor contexts = loop.masked(step(made.contexts, t, 0, a.Dv), masks.joined, t);
    const Feed call = {.B = a.B,
                       .F = a.F,
                       .Dv = a.Dv,
                       .contexts = matrix_rows(contexts),
                       .weight = loop.at(of_context),
                       .state_products = loop.at(state_products, t + 1, of.output),
                       .has_tanh = a.output_tanh,
                       .attentional = loop.at(made.attentional, t)};
    const auto kernels = [](auto zero) { return feed<decltype(zero)>; };
    loop.run_blocks(tiles(a.B, kQueries) * tiles(a.F, kKeys), kernels, call);
  }

  void run_cell(int64_t number, int64_t t) {
    const ForwardLayer& x = layers[number];
    const CellStep call = {.B = a.B,
                           .H = H,
                           .t = t,
                           .target_lengths = a.target_lengths,
                           .of_input = loop.at(x.sums, t),
                           .bias_ih = {given.bias_ih ? data_or_sentinel(x.bias_ih) : nullptr, 0},
                           .state_products = loop.at(x.products, t, x.first_gate),
                           .before = loop.before(x.states, x.hidden, t),
                           .cell_before = x.cell ? loop.before(x.cells, x.cell, t) : Rows2{},
                           .dropout_state = loop.at(x.dropout_state, t),
                           .dropout_cell = loop.at(x.dropout_cell, t),
                           .zoneout = a.zoneout,
                           .masks = masks.before(loop, of, a, number, x.mask, t + 1),
                           .state = loop.at(x.states, t),
                           .cell = x.cell ? loop.at(x.cells, t) : Rows2{},
                           .gates = saved_of(a.cell) ? loop.at(x.gates, t) : Rows2{},
                           .seen = loop.at(x.seen)};
    by_cell(a.cell, [&](auto known) {
      const auto kernels = [](auto zero) { return cell_step<decltype(zero), decltype(known)::cell>; };
      loop.run(H, kernels, call);
    });
  }

  // Compute the contexts of all steps, if the loop read projected values: a context is a dot score's
  // grad_query with weights as grad_score.
  void multiply_weights() {
    Backward sum = {a.attention};
    sum.score = Score::dot;
    sum.score_vector = View{};
    sum.scale = 1;
    sum.Tq = a.T;
    sum.A = a.Dv;
    sum.key = a.attention.value;
    sum.grad_score = view(made.weights);
    sum.grad_score_given = true;
    sum.grad_query = view(made.contexts);
    cuda::run_backward(sum, last().hidden);
  }

  void copy_queries() {
    if (given.weight_query) {
      copy(steps(state_products, a.attends_first ? 0 : 1, a.T, 0, a.A), made.queries);
      return;
    }
    if (!a.attends_first) {
      copy(last().states, made.queries);
    } else if (a.T) {
      copy(last().hidden, step(made.queries, 0, 0, H));
      copy(steps(last().states, 0, a.T - 1, 0, H), steps(made.queries, 1, a.T - 1, 0, H));
    }
    if (masks.query) scale(made.queries, *masks.query);
  }
};

template <class Launch>
RecurrentOutputs run_recurrent(const RecurrentArguments& given, const Launch& launch) {
  return ForwardLoop<Launch>(given, launch).run();
}

}  // namespace
}  // namespace attnfast
