// The forward of the steps of a recurrent layer, see recurrent_steps.h.
#pragma once
#include "recurrent_steps.h"

namespace attnfast {
namespace VARIANT {
namespace {

// The packed parameters of a layer.
template <class C>
struct Packed {
  Panels<C> input, fed, hidden, above, query, context, output, gate;  // two of weight_output
  C* bias;  // of the sums of `cell_forward` in every layer, padded to whole panels

  Packed(const Layer& a, Scratch<C>& room) {
    const Stored stored = stored_in(a);
    const int64_t units = panels<C>(a.H), gates = gates_of(a.cell) * units;
    input = take_panels(room, a.E, gates, stored);
    fed = take_panels(room, a.F, gates, stored);
    hidden = take_panels(room, a.H, a.layers * gates, stored);
    if (a.weight_ih_upper.data) above = take_panels(room, a.H, (a.layers - 1) * gates, stored);
    if (a.weight_query.data) query = take_panels(room, a.H, panels<C>(a.A), stored);
    if (a.weight_output.data) {
      context = take_panels(room, a.Dv, panels<C>(a.output_dim), stored);
      output = take_panels(room, a.H, panels<C>(a.output_dim), stored);
    }
    if (a.weight_gate.data) gate = take_panels(room, a.H, panels<C>(a.Dv), stored);
    bias = room.take(a.layers * kMostGates * units * kPanel<C>);
  }

  // Return the packed parameters that the caller provides, if any.
  static Packed of(const RecurrentForward& a, Scratch<C>& room) {
    Scratch<C> given = {static_cast<C*>(a.packed)};
    return Packed(a, a.packed ? given : room);
  }

  // Pack a panel of a weight whose rows come in blocks, one for each gate of a layer, each padded
  // to whole panels.
  static void pack(const Panels<C>& out, const View& weight, int64_t column, int64_t rows, int64_t panel) {
    const int64_t of_block = panels<C>(rows), block = panel / of_block,
                  first = panel % of_block * kPanel<C>;
    const auto pack_from = [&](auto* rows_of_weight) {
      pack_rows(rows_of_weight + column, weight.row, min(kPanel<C>, rows - first), out.depth,
                out.at(panel).data);
    };
    if constexpr (sizeof(C) == sizeof(float)) {
      if (out.stored == Stored::bfloat16) return pack_from(row<uint16_t>(weight, 0, block * rows + first));
      if (out.stored == Stored::int8)
        return pack_bytes(row<C>(weight, 0, block * rows + first) + column, weight.row,
                          min(kPanel<C>, rows - first), out.depth, out.at(panel).data);
    }
    pack_from(row<C>(weight, 0, block * rows + first));
  }

  void pack(const Layer& a, Member& member) const {
    const Panels<C>* const all[] = {&input, &fed, &hidden, &above, &query, &context, &output, &gate};
    const View* const weights[] = {&a.weight_ih,    &a.weight_ih,     &a.weight_hh,     &a.weight_ih_upper,
                                   &a.weight_query, &a.weight_output, &a.weight_output, &a.weight_gate};
    const int64_t columns[] = {0, a.E, 0, 0, 0, 0, a.Dv, 0},
                  rows[] = {a.H, a.H, a.H, a.H, a.A, a.output_dim, a.output_dim, a.Dv};
    int64_t total = 1;  // the biases
    for (const auto* panels : all) total += panels->count;
    member.share(total, [&](int64_t item) {
      if (item-- == 0) return add_biases(a);
      int which = 0;
      for (; item >= all[which]->count; ++which) item -= all[which]->count;
      pack(*all[which], *weights[which], columns[which], rows[which], item);
    });
  }

  void add_biases(const Layer& a) const {
    const int64_t width = panels<C>(a.H) * kPanel<C>;
    clear(bias, a.layers * kMostGates * width);
    const int64_t gates = gates_of(a.cell);
    for (int64_t block = 0; block < a.layers * gates; ++block)
      for (int64_t i = 0; i < a.H; ++i) {
        C* const out = bias_of(a, block / gates) + i;
        const int gate = block % gates;
        if (a.bias_ih.data) out[gate * width] += row<C>(a.bias_ih, 0)[block * a.H + i];
        if (a.bias_hh.data) out[sum_index(a.cell, gate) * width] += row<C>(a.bias_hh, 0)[block * a.H + i];
      }
  }

  C* bias_of(const Layer& a, int64_t layer) const {
    return bias + layer * kMostGates * panels<C>(a.H) * kPanel<C>;
  }
};

template <class C>
class Forwards {
  const RecurrentForward& a;
  const LayerPlan& plan;
  Member& member;
  const Packed<C> packed;
  C* masked[2];  // states times the dropout, of even and odd steps
  C* lifted;     // states times the dropout between layers, or null
  // Rows of a step times their dropout, or null: states that become queries, fed vectors, and
  // [context; state].
  C *dropped_query, *dropped_feed, *dropped_joined;
  void* features;
  char *own, *rounded;  // rounded: the bytes of left factors, if products take bytes
  const int64_t gates, units;
  const View sums;  // the inputs' contribution to the gates, until its step

 public:
  Forwards(const RecurrentForward& a, const LayerPlan& plan, Member& member, Scratch<C> room, void* own)
      : Forwards(a, plan, member, Packed<C>::of(a, room), own) {
    for (C*& x : masked) x = a.dropout.data ? room.take(a.layers * a.B * a.H) : nullptr;
    if (a.dropout_between.data) lifted = room.take((a.layers - 1) * a.B * a.H);
    if (a.dropout_query.data) dropped_query = room.take(a.B * a.H);
    if (a.dropout_feed.data) dropped_feed = room.take(a.B * a.F);
    if (a.dropout_joined.data) dropped_joined = room.take(a.B * (a.Dv + a.H));
    features = take_features(a.attention, a.attention, false, room);
  }
  Forwards(const RecurrentForward& a, const LayerPlan& plan, Member& member, const Packed<C>& packed,
           void* own, void* rounded = nullptr)
      : a(a), plan(plan), member(member), packed(packed), masked{}, lifted(nullptr), dropped_query(nullptr),
        dropped_feed(nullptr), dropped_joined(nullptr), features(a.attention.features),
        own(static_cast<char*>(own)), rounded(static_cast<char*>(rounded)), gates(gates_of(a.cell)),
        units(panels<C>(a.H)), sums(saved_of(a.cell) ? a.gates : a.states) {}

  void run() {
    if (!a.packed) packed.pack(a, member);
    if (a.dropout.data) mask_first();
    if (has_history(a.attention)) begin_history();
    take_steps();
    if (a.attends && a.target_lengths) clear_padding();
    if (has_history(a.attention)) add_losses();
  }

  void take_steps() {
    multiply_inputs();
    for (int64_t t = 0; t < a.T; ++t) {
      if (a.attends && a.attends_first) attend(t);
      for (int64_t layer = 0; layer < a.layers; ++layer) update_states(t, layer);
      if (a.attends && !a.attends_first) attend(t);
      if (a.weight_output.data) compute_attentional(t);
    }
  }

 private:
  template <size_t count>
  void round(Factor<C> (&factors)[count]) const {
    round_factors(a, plan, member, rounded, factors);
  }

  void mask_first() {
    member.share(a.layers * a.B, [&](int64_t item) {
      const Level level = level_of<C>(a, item / a.B);
      const int64_t b = item % a.B;
      for (int64_t i = 0; i < a.H; ++i)
        masked[0][item * a.H + i] = row<C>(level.hidden, b)[i] * row<C>(level.dropout, b)[i];
    });
  }

  // Multiply the inputs of all steps at once.
  void multiply_inputs() {
    const int64_t chunks = parts(a.B * a.T, kMostBatch);
    Factor<C> input[] = {{row<C>(a.input, 0), a.input.row, a.E}};
    round(input);
    member.share(a.B && a.T ? chunks * packed.input.count : 0, [&](int64_t item) {
      const int64_t panel = item / chunks, first = item % chunks * kMostBatch,
                    unit = panel % units * kPanel<C>;
      const int64_t rows = min(kMostBatch, a.B * a.T - first);
      alignas(64) C x[kMostBatch * kPanel<C>];
      clear(x, rows * kPanel<C>);
      input[0].multiply(first, rows, packed.input.at(panel), x);
      for (int64_t r = 0; r < rows; ++r)
        for_vectors<C>(a.H - unit, [&](int64_t c, int64_t n) {
          store_part(row<C>(sums, 0, first + r) + panel / units * a.H + unit + c,
                     load(x + r * kPanel<C> + c), n);
        });
    });
  }

  void attend(int64_t t) {
    if (dropped_query)
      drop(t, a.dropout_query, 0, a.H, dropped_query, a.H, [&](int64_t b) { return query_state(b, t); });
    if (a.queries.data) project_queries(t);
    weigh(t);
    if (a.weight_gate.data) apply_gate(t);
  }

  // Compute the weights and the context of step t.
  void weigh(int64_t t) {
    CoverageForward step = step_of(a, t, sizeof(C));
    step.features = features;
    const AttentionKernels& passes = VARIANT::attention;
    if (step.key_bounds.data) return run_passes(step, plan.attention, member, own, passes.span);
    cpu::Plan in_place = plan.attention;
    in_place.scores = step.weights;
    const auto run = [&](const auto&... each) { run_passes(step, in_place, member, own, each...); };
    if (!has_history(step)) return run(passes.scores, passes.softmax, passes.context);
    const auto& with_history = VARIANT::coverage.forward;
    if (step.filters_count) return run(with_history, passes.context);
    run(passes.scores, with_history, passes.context);
  }

  // Multiply the contexts of step t by their gates, which depend on the states of the queries.
  void apply_gate(int64_t t) {
    member.share(blocks(a, plan, packed.gate.count), [&](int64_t item) {
      const Block block(a, plan, item);
      const int64_t first = block.panel * kPanel<C>;
      alignas(64) C x[kMostBatch * kPanel<C>];
      clear(x, block.rows * kPanel<C>);
      const Sources<C> state = dropped_state(block.b, t);
      multiply_panel(state.data, state.stride, 1, block.rows, a.H, packed.gate.at(block.panel), x);
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.Dv - first, [&](int64_t c, int64_t n) {
          Vec<C> gate = load(x + r * kPanel<C> + c);
          if (a.bias_gate.data) gate += load_part(row<C>(a.bias_gate, 0) + first + c, n, (C)0);
          gate = sigmoid_of(gate);
          C* const context = row<C>(a.contexts, block.b + r, t) + first + c;
          store_part(row<C>(a.context_gates, block.b + r, t) + first + c, gate, n);
          store_part(context, load_part(context, n, (C)0) * gate, n);
        });
    });
  }

  // Copy the coverage to the output that every step adds to, and prepare the parameters for the
  // steps.
  void begin_history() {
    const View &from = a.attention.coverage_in, &to = a.attention.coverage_out;
    member.share(a.B, [&](int64_t b) {
      if (b == 0 && features) pack_parameters_once(a.attention, features, false);
      for (int64_t j = 0; j < a.Tk; ++j) row<C>(to, b)[j] = row<C>(from, b)[j];
    });
  }

  void add_losses() {
    member.share(a.B, [&](int64_t b) {
      double sum = 0;
      for (int64_t t = 0; t < a.T; ++t) sum += *row<C>(a.attention.loss, b, t);
      *row<C>(a.loss, b) = sum;
    });
  }

  // Return the state that is the query at step t.
  Sources<C> query_state(int64_t b, int64_t t) const {
    const Level level = last_level<C>(a);
    if (!a.attends_first) return of_step<C>(level.states, b, t);
    return t ? of_step<C>(level.states, b, t - 1) : of_step<C>(level.hidden, b, 0);
  }

  // Return that state times its dropout.
  Sources<C> dropped_state(int64_t b, int64_t t) const {
    return dropped_query ? Sources<C>{dropped_query + b * a.H, a.H} : query_state(b, t);
  }

  // Compute the query, or, if the query is not a state of this step, copy the state.
  void project_queries(int64_t t) {
    const bool projects = a.weight_query.data;
    Factor<C> state[] = {factor(dropped_state(0, t), a.H)};
    if (projects) round(state);
    const Factor<C>& from = state[0];
    member.share(blocks(a, plan, panels<C>(a.A)), [&](int64_t item) {
      const Block block(a, plan, item);
      const int64_t first = block.panel * kPanel<C>;
      alignas(64) C x[kMostBatch * kPanel<C>];
      clear(x, block.rows * kPanel<C>);
      if (projects) from.multiply(block.b, block.rows, packed.query.at(block.panel), x);
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.A - first, [&](int64_t c, int64_t n) {
          Vec<C> q = projects ? load(x + r * kPanel<C> + c)
                              : load_part(from.data + (block.b + r) * from.stride + first + c, n, (C)0);
          if (a.bias_query.data) q += load_part(row<C>(a.bias_query, 0) + first + c, n, (C)0);
          store_part(row<C>(a.queries, block.b + r, t) + first + c, q, n);
        });
    });
  }

  // Write n features of every sequence, times those of a mask of step t from `first` on, to the rows
  // of out.
  template <class From>
  void drop(int64_t t, const View& mask, int64_t first, int64_t n, C* out, int64_t stride,
            const From& from) {
    member.share(a.B, [&](int64_t b) {
      const C *const x = from(b).data, *const factor = row<C>(mask, b, t) + first;
      for (int64_t i = 0; i < n; ++i) out[b * stride + i] = x[i] * factor[i];
    });
  }

  void update_states(int64_t t, int64_t layer) {
    const Level level = level_of<C>(a, layer);
    if (dropped_feed && !layer && read(t, 0, 0).data)
      drop(t, a.dropout_feed, 0, a.F, dropped_feed, a.F, [&](int64_t b) { return read(t, 0, b); });
    const Sources<C> state = t ? of_step<C>(level.states, 0, t - 1) : of_step<C>(level.hidden, 0, 0);
    Sources<C> below = read(t, layer, 0), seen = state;
    if (dropped_feed && !layer && below.data) below = {dropped_feed, a.F};
    if (a.dropout.data) seen = {masked[t % 2] + layer * a.B * a.H, a.H};
    Factor<C> read_and_seen[] = {factor(below, layer ? a.H : a.F), factor(seen, a.H)};
    round(read_and_seen);
    by_cell(a.cell, [&](auto known) {
      member.share(blocks(a, plan, units), [&](int64_t item) {
        update_block(known, t, layer, level, state, read_and_seen, Block(a, plan, item));
      });
    });
  }

  // Return the input of a layer, other than its previous state, if there is one.
  Sources<C> read(int64_t t, int64_t layer, int64_t b) const {
    if (layer && lifted) return {lifted + ((layer - 1) * a.B + b) * a.H, a.H};
    if (layer) return of_step<C>(at_layer<C>(a.states, layer - 1), b, t);
    if (!a.F || !(a.attends_first || t || a.feed.data)) return {};
    if (!a.attends_first && !t) return of_step<C>(a.feed, b, 0);
    return of_step<C>(a.weight_output.data ? a.attentional : a.contexts, b, a.attends_first ? t : t - 1);
  }

  template <class Known>
  void update_block(Known, int64_t t, int64_t layer, const Level& level, const Sources<C>& state,
                    const Factor<C> (&read_and_seen)[2], const Block& block) {
    constexpr int64_t P = kPanel<C>;
    const auto& [below, seen] = read_and_seen;
    alignas(64) C x[kMostGates][kMostBatch * P];
    for (auto& gate : x) clear(gate, block.rows * P);
    const Panels<C>& of_fed = layer ? packed.above : packed.fed;
    for (int gate = 0; gate < Known::gates; ++gate) {
      const int64_t panel = gate * units + block.panel, own = layer * Known::gates * units + panel;
      if (below.data)
        below.multiply(block.b, block.rows, of_fed.at(layer ? own - Known::gates * units : panel), x[gate]);
      seen.multiply(block.b, block.rows, packed.hidden.at(own), x[sum_index(Known::cell, gate)]);
    }
    for (int64_t r = 0; r < block.rows; ++r)
      update_units<Known>(t, layer, level, block.b + r, block.panel * P, x[0] + r * P,
                          state.data + (block.b + r) * state.stride);
  }

  // Run the cell on a panel's units, from i on, for one sequence; x are its sums, those of
  // successive gates kMostBatch * P apart.
  template <class Known>
  void update_units(int64_t t, int64_t layer, const Level& level, int64_t b, int64_t i, const C* x,
                    const C* before) {
    const int64_t width = units * kPanel<C>, H = a.H, at = (layer * a.B + b) * H + i;
    const bool pads = !runs(a, b, t);
    const C* const of_input = layer ? nullptr : row<C>(sums, b, t) + i;
    const C* const bias = packed.bias_of(a, layer) + i;
    const C* const mask = a.dropout.data ? row<C>(level.dropout, b) + i : nullptr;
    const bool lifts = lifted && layer + 1 < a.layers;
    const C* const of_state = factors_of<C>(level.dropout_state, b, t, i);
    const C* const of_cell = factors_of<C>(level.dropout_cell, b, t, i);
    const C* const lift = lifts ? row<C>(at_layer<C>(a.dropout_between, layer), b, t) + i : nullptr;
    const C* cell_before = nullptr;
    C *const state = row<C>(level.states, b, t) + i, *const gates = row<C>(level.gates, b, t) + i;
    C* cell = nullptr;
    if constexpr (Known::cell == Cell::lstm) {
      cell = row<C>(level.cells, b, t) + i;
      cell_before = (t ? row<C>(level.cells, b, t - 1) : row<C>(level.first_cell, b)) + i;
    }
    for_vectors<C>(H - i, [&](int64_t c, int64_t n) {
      Vec<C> sum[kMostGates] = {};
      for (int gate = 0; gate < Known::gates; ++gate) {
        sum[gate] = load(x + gate * kMostBatch * kPanel<C> + c) + load(bias + gate * width + c);
        if (of_input) sum[gate] += load_part(of_input + gate * H + c, n, (C)0);
      }
      if constexpr (Known::cell == Cell::gru)
        sum[3] = load(x + 3 * kMostBatch * kPanel<C> + c) + load(bias + 3 * width + c);
      const Vec<C> old = load_part(before + i + c, n, (C)0);
      const Vec<C> last = cell_before ? load_part(cell_before + c, n, (C)0) : Vec<C>{};
      Unit<Vec<C>> unit = cell_forward<Known::cell, C, Math>(sum, old, last);
      if (of_state) unit.state = dropped(unit.state, old, load_part(of_state + c, n, (C)0), a.zoneout);
      if (of_cell) unit.cell = dropped(unit.cell, last, load_part(of_cell + c, n, (C)0), a.zoneout);
      if (pads) unit = Unit<Vec<C>>{};
      store_part(state + c, unit.state, n);
      if (cell) store_part(cell + c, unit.cell, n);
      for (int gate = 0; gate < Known::saved; ++gate) store_part(gates + gate * H + c, unit.gates[gate], n);
      if (mask) store_part(masked[(t + 1) % 2] + at + c, unit.state * load_part(mask + c, n, (C)0), n);
      if (lift) store_part(lifted + at + c, unit.state * load_part(lift + c, n, (C)0), n);
    });
  }

  void compute_attentional(int64_t t) {
    const int64_t width = a.Dv + a.H;
    const auto context_of = [&](int64_t b) { return of_step<C>(a.contexts, b, t); };
    const auto state_of = [&](int64_t b) { return of_step<C>(last_level<C>(a).states, b, t); };
    C* const joined = dropped_joined;
    if (joined) {
      drop(t, a.dropout_joined, 0, a.Dv, joined, width, context_of);
      drop(t, a.dropout_joined, a.Dv, a.H, joined + a.Dv, width, state_of);
    }
    Factor<C> factors[] = {factor(joined ? Sources<C>{joined, width} : context_of(0), a.Dv),
                           factor(joined ? Sources<C>{joined + a.Dv, width} : state_of(0), a.H)};
    round(factors);
    const auto& [context, state] = factors;
    member.share(blocks(a, plan, packed.output.count), [&](int64_t item) {
      const Block block(a, plan, item);
      const int64_t first = block.panel * kPanel<C>;
      alignas(64) C x[kMostBatch * kPanel<C>];
      clear(x, block.rows * kPanel<C>);
      context.multiply(block.b, block.rows, packed.context.at(block.panel), x);
      state.multiply(block.b, block.rows, packed.output.at(block.panel), x);
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.output_dim - first, [&](int64_t c, int64_t n) {
          Vec<C> sum = load(x + r * kPanel<C> + c);
          if (a.bias_output.data) sum += load_part(row<C>(a.bias_output, 0) + first + c, n, (C)0);
          if (a.output_tanh) sum = tanh_of(sum);
          if (a.dropout_output.data)
            sum *= load_part(row<C>(a.dropout_output, block.b + r, t) + first + c, n, (C)0);
          store_part(row<C>(a.attentional, block.b + r, t) + first + c, sum, n);
        });
    });
  }

  // Clear the results of attention beyond the targets' ends.
  void clear_padding() {
    member.share(a.B, [&](int64_t b) {
      for (int64_t t = larger(a.target_lengths[b], 0); t < a.T; ++t) {
        clear(row<C>(a.contexts, b, t), a.Dv);
        clear(row<C>(a.attention.weights, b, t), a.Tk);
        if (a.queries.data) clear(row<C>(a.queries, b, t), a.A);
        if (a.weight_output.data) clear(row<C>(a.attentional, b, t), a.output_dim);
        if (a.weight_gate.data) clear(row<C>(a.context_gates, b, t), a.Dv);
      }
    });
  }
};

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
