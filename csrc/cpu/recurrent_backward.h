// The backward of the steps of a recurrent layer, see recurrent_steps.h.
#pragma once
#include <vector>

#include "recurrent_steps.h"

namespace attnfast {
namespace VARIANT {
namespace {

// A parameter's gradient: out[m, n] = sum of left[m] right[n] over all steps of all sequences.
template <class C>
struct ParameterGradient {
  View left;          // rows [B, T, .] that are evenly spaced, from the first relevant column on
  View right, first;  // of a step, or, if `earlier`, of the step before: initially `first` or 0
  bool earlier;
  View factor;  // multiplied into right, or absent
  int64_t rows, columns;
  View out, sums;  // and the sums of left, or absent
  Panels<C> packed;
  bool packs;  // false if another gradient packs `right`
};

// The buffers of a backward.
template <class C>
struct BackwardRoom {
  Panels<C> input, fed, hidden, above, query, context, output, gate;  // two of weight_output
  C *to_state, *to_cell;  // gradients of a step's state and cell, [layers, B, H]
  void* features;
  View parameter_sums;  // of a history's filters, [B]
  std::vector<ParameterGradient<C>> gradients;

  BackwardRoom(const RecurrentBackward& a, Scratch<C>& room) {
    const int64_t units = panels<C>(a.H), gates = gates_of(a.cell) * a.H;
    const Stored stored = stored_in(a);
    fed = take_panels(room, gates, panels<C>(a.F), stored);
    hidden = take_panels(room, gates, a.layers * units, stored);
    if (a.weight_ih_upper.data) above = take_panels(room, gates, (a.layers - 1) * units, stored);
    if (a.weight_query.data) query = take_panels(room, a.A, units, stored);
    if (a.weight_output.data) {
      context = take_panels(room, a.F, panels<C>(a.Dv), stored);
      output = take_panels(room, a.F, units, stored);
    }
    if (a.weight_gate.data) gate = take_panels(room, a.Dv, units, stored);
    if (a.grad_input.data) input = take_panels(room, gates, panels<C>(a.E), stored);
    to_state = room.take(a.layers * a.B * a.H);
    to_cell = room.take(a.layers * a.B * a.H);
    if ((features = take_features(a.attention, a.attention, true, room))) {
      parameter_sums.batch = VARIANT::coverage.sums_size(a.attention) / sizeof(C);
      parameter_sums.data = room.take(a.B * parameter_sums.batch);
    }
    if (a.grad_weight_ih.data) list_gradients(a, gates, room);
  }

 private:
  void list_gradients(const RecurrentBackward& a, int64_t gates, Scratch<C>& room) {
    const View none = {};
    const auto columns_from = [](View x, int64_t column) {
      if (x.data) x.data = static_cast<C*>(x.data) + column;
      return x;
    };
    const auto list = [&](const View& left, const View& right, const View& first, bool earlier,
                          const View& factor, int64_t rows, int64_t columns, const View& out,
                          const View& sums) {
      const Panels<C> packed = take_panels(room, a.B * a.T, panels<C>(columns), stored_in(a));
      gradients.push_back({left, right, first, earlier, factor, rows, columns, out, sums, packed, true});
    };
    gradients.reserve(5 + 3 * a.layers);
    list(a.grad_gates, a.input, none, false, none, gates, a.E, a.grad_weight_ih, a.grad_bias_ih);
    if (a.F)
      list(a.grad_gates, a.weight_output.data ? a.attentional : a.contexts, a.feed, !a.attends_first,
           a.dropout_feed, gates, a.F, columns_from(a.grad_weight_ih, a.E), none);
    for (int64_t layer = 0; layer < a.layers; ++layer) {
      const auto own = [&](const View& x) { return at_layer<C>(x, layer); };
      const auto below = [&](const View& x) { return at_layer<C>(x, layer - 1); };
      if (layer)
        list(own(a.grad_gates), below(a.states), none, false, below(a.dropout_between), gates, a.H,
             below(a.grad_weight_ih_upper), own(a.grad_bias_ih));
      const int64_t alike = a.cell == Cell::gru ? 2 * a.H : gates;  // shared by inputs and states
      list(own(a.grad_gates), own(a.states), own(a.hidden), true, own(a.dropout), alike, a.H,
           own(a.grad_weight_hh), own(a.grad_bias_hh));
      if (alike == gates) continue;
      ParameterGradient<C> rest = gradients.back();
      rest.packs = false;
      rest.rows = gates - alike;
      rest.left = columns_from(rest.left, gates);
      rest.out = columns_from(rest.out, alike * rest.out.row);
      rest.sums = columns_from(rest.sums, alike);
      gradients.push_back(rest);
    }
    const Level last = last_level<C>(a);
    if (a.weight_query.data)
      list(a.attention.grad_query, last.states, last.hidden, a.attends_first, a.dropout_query, a.A, a.H,
           a.grad_weight_query, a.grad_bias_query);
    if (a.weight_gate.data)
      list(a.grad_context_gates, last.states, last.hidden, a.attends_first, a.dropout_query, a.Dv, a.H,
           a.grad_weight_gate, a.grad_bias_gate);
    if (!a.weight_output.data) return;
    list(a.grad_fed, a.contexts, none, false, a.dropout_joined, a.F, a.Dv, a.grad_weight_output,
         a.grad_bias_output);
    list(a.grad_fed, last.states, none, false, columns_from(a.dropout_joined, a.Dv), a.F, a.H,
         columns_from(a.grad_weight_output, a.Dv), none);
  }
};

template <class C>
class BackwardPass {
  static constexpr int64_t P = kPanel<C>;
  const RecurrentBackward& a;
  const LayerPlan& plan;
  Member& member;
  const BackwardRoom<C> room;
  char* own;
  const int64_t gates, units, of_fed;  // panels of the state, of the fed vector

 public:
  BackwardPass(const RecurrentBackward& a, const LayerPlan& plan, Member& member, Scratch<C> place,
               void* own)
      : a(a), plan(plan), member(member), room(a, place), own(static_cast<char*>(own)),
        gates(gates_of(a.cell)), units(panels<C>(a.H)), of_fed(panels<C>(a.F)) {}

  void run() {
    pack_weights();
    if (has_history(a.attention)) begin_history();
    for (int64_t t = a.T - 1; t >= 0; --t) {
      if (a.attends && !a.attends_first) {
        if (a.weight_output.data) reach_contexts(t);
        attend_back(t);
      }
      for (int64_t layer = a.layers - 1; layer >= 0; --layer) step_back(t, layer);
      if (a.attends && a.attends_first) attend_back(t);
    }
    const int64_t states = blocks(a, plan, units);
    member.share(a.layers * states,
                 [&](int64_t item) { write_initial_grads(item / states, Block(a, plan, item % states)); });
    if (room.parameter_sums.data) finish_history();
    if (a.grad_input.data) grad_to_inputs();
    if (!room.gradients.empty()) grad_to_parameters();
  }

 private:
  // Pack the columns of a weight from `first` on, each row of the weight as a row of a panel; then
  // those of the next layer's weight.
  void pack_columns(const Panels<C>& out, const View& weight, int64_t first, int64_t columns,
                    int64_t panel) {
    const int64_t of_layer = panels<C>(columns), c = panel % of_layer * P;
    const auto pack_from = [&](auto* rows) {
      pack(rows + first + c, weight.row, out.depth, min(P, columns - c), out.at(panel).data);
    };
    const int64_t r = panel / of_layer * out.depth;
    if constexpr (sizeof(C) == sizeof(float))
      if (out.stored == Stored::bfloat16) return pack_from(row<uint16_t>(weight, 0, r));
    pack_from(row<C>(weight, 0, r));
  }

  void pack_weights() {
    const Panels<C>* const all[] = {&room.fed,     &room.hidden, &room.above, &room.query,
                                    &room.context, &room.output, &room.input, &room.gate};
    const View* const weights[] = {&a.weight_ih,     &a.weight_hh,     &a.weight_ih_upper, &a.weight_query,
                                   &a.weight_output, &a.weight_output, &a.weight_ih,       &a.weight_gate};
    const int64_t first[] = {a.E, 0, 0, 0, 0, a.Dv, 0, 0};
    const int64_t columns[] = {a.F, a.H, a.H, a.H, a.Dv, a.H, a.E, a.H};
    int64_t total = 1;
    for (const auto* panels : all) total += panels->count;
    member.share(total, [&](int64_t item) {
      if (item-- == 0) return begin();
      int which = 0;
      for (; item >= all[which]->count; ++which) item -= all[which]->count;
      pack_columns(*all[which], *weights[which], first[which], columns[which], item);
    });
  }

  // Initialise the gradients of the last step's outputs; later steps contribute nothing.
  void begin() {
    clear(room.to_state, a.layers * a.B * a.H);
    clear(room.to_cell, a.layers * a.B * a.H);
    for (int64_t b = 0; a.grad_feed.data && a.T == 0 && b < a.B; ++b) clear(row<C>(a.grad_feed, b), a.F);
    if (!a.attends || a.attends_first || a.T == 0) return;
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t c = 0; c < a.F; c += Vector<C>::width) put_fed(b, a.T - 1, c, a.F - c, Vec<C>{});
  }

  // Store the gradient of the attentional vector's sum, or of the context, at step t: x, the
  // gradient of the next step's fed vector, plus the gradient that the caller gives.
  void put_fed(int64_t b, int64_t t, int64_t c, int64_t n, Vec<C> x) {
    const View& given = a.weight_output.data ? a.grad_attentional : a.grad_contexts;
    const View& out = a.weight_output.data ? a.grad_fed : a.attention.grad_context;
    if (given.data) x += load_part(row<C>(given, b, t) + c, n, (C)0);
    if (a.weight_output.data) {
      Vec<C> f = load_part(row<C>(a.attentional, b, t) + c, n, (C)0);
      if (a.dropout_output.data) {
        const Vec<C> mask = load_part(row<C>(a.dropout_output, b, t) + c, n, (C)0);
        x *= mask;
        f = mask == 0 ? Vec<C>{} : f / mask;
      }
      if (a.output_tanh) x *= (C)1 - f * f;
    }
    if (!runs(a, b, t)) x = Vec<C>{};
    store_part(row<C>(out, b, t) + c, x, n);
  }

  // Propagate the gradient of the attentional vector of step t to the context.
  void reach_contexts(int64_t t) {
    member.share(blocks(a, plan, room.context.count), [&](int64_t item) {
      const Block block(a, plan, item);
      const int64_t first = block.panel * P;
      alignas(64) C x[kMostBatch * P];
      clear(x, block.rows * P);
      const Sources<C> from = of_step<C>(a.grad_fed, block.b, t);
      multiply_panel(from.data, from.stride, 1, block.rows, a.F, room.context.at(block.panel), x);
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.Dv - first, [&](int64_t c, int64_t n) {
          Vec<C> g = load(x + r * P + c);
          if (a.dropout_joined.data)
            g *= load_part(row<C>(a.dropout_joined, block.b + r, t) + first + c, n, (C)0);
          if (a.grad_contexts.data)
            g += load_part(row<C>(a.grad_contexts, block.b + r, t) + first + c, n, (C)0);
          if (!runs(a, block.b + r, t)) g = Vec<C>{};
          store_part(row<C>(a.attention.grad_context, block.b + r, t) + first + c, g, n);
        });
    });
  }

  // Replace the gradients of gated contexts by those of the contexts, and of the gates' sums.
  void gate_back(int64_t t) {
    member.share(a.B, [&](int64_t b) {
      C *const grad = row<C>(a.attention.grad_context, b, t), *const grad_gate =
                                                                  row<C>(a.grad_context_gates, b, t);
      const C *const gate = row<C>(a.context_gates, b, t), *const gated = row<C>(a.contexts, b, t);
      for (int64_t c = 0; c < a.Dv; c += Vector<C>::width) {
        const int64_t n = a.Dv - c;
        const Vec<C> g = load_part(grad + c, n, (C)0), factor = load_part(gate + c, n, (C)0);
        store_part(grad_gate + c, g * load_part(gated + c, n, (C)0) * ((C)1 - factor), n);
        store_part(grad + c, g * factor, n);
      }
    });
  }

  void attend_back(int64_t t) {
    if (a.weight_gate.data) gate_back(t);
    CoverageBackward step = step_of(a, t, sizeof(C));
    step.features = room.features;
    step.parameter_sums = room.parameter_sums;
    const AttentionKernels& passes = VARIANT::attention;
    const auto run = [&](const auto&... each) { run_passes(step, plan.attention, member, own, each...); };
    if (step.key_bounds.data) return run(passes.grad_score_span, passes.grad_inputs);
    if (!has_history(step)) return run(passes.grad_weights, passes.grad_score, passes.grad_inputs);
    const auto& rewind = VARIANT::coverage.backward;
    if (step.filters_count) return run(passes.grad_weights, rewind);
    run(passes.grad_weights, rewind, passes.grad_inputs);
  }

  // Compute the coverage before every step, and initialise the gradient of the history after the
  // last one.
  void begin_history() {
    const CoverageBackward& h = a.attention;
    member.share(a.B, [&](int64_t b) {
      if (b == 0 && room.features) pack_parameters_once(h, room.features, true);
      if (room.parameter_sums.data) clear(row<C>(room.parameter_sums, b), room.parameter_sums.batch);
      const C* const rate = h.inverse_fertility.data ? row<C>(h.inverse_fertility, b) : nullptr;
      const C* before = row<C>(h.coverage_in, b);
      for (int64_t t = 0; t < a.T; ++t) {
        C* const now = row<C>(a.coverages, b, t);
        if (t) cover(before, row<C>(h.weights, b, t - 1), rate, a.Tk, now);
        else
          for (int64_t j = 0; j < a.Tk; ++j) now[j] = before[j];
        before = now;
      }
      for (int64_t j = 0; j < a.Tk; ++j) {
        row<C>(h.grad_coverage_in, b)[j] = a.grad_coverage.data ? row<C>(a.grad_coverage, b)[j] : 0;
        row<C>(h.grad_previous, b)[j] = 0;
      }
    });
  }

  void finish_history() {
    CoverageBackward all = a.attention;
    all.features = room.features;
    all.parameter_sums = room.parameter_sums;
    run_passes(all, plan.attention, member, own, VARIANT::coverage.finish);
  }

  // Add to x[r] the gradient of the state through the query of step t and, if it attends last, the
  // output.
  void add_attended(int64_t t, const Block& block, C* x) {
    if (!a.attends || t >= a.T) return;
    const Sources<C> grad_query = of_step<C>(a.attention.grad_query, block.b, t);
    if (a.weight_query.data) {
      multiply_panel(grad_query.data, grad_query.stride, 1, block.rows, a.A, room.query.at(block.panel), x);
    } else {
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.H - block.panel * P, [&](int64_t c, int64_t n) {
          add(x + r * P + c,
              load_part(grad_query.data + r * grad_query.stride + block.panel * P + c, n, (C)0));
        });
    }
    if (a.weight_gate.data) {
      const Sources<C> grad_gate = of_step<C>(a.grad_context_gates, block.b, t);
      multiply_panel(grad_gate.data, grad_gate.stride, 1, block.rows, a.Dv, room.gate.at(block.panel), x);
    }
    if (a.dropout_query.data) multiply_mask(a.dropout_query, 0, t, block, x);
    if (!a.weight_output.data) return;
    const Sources<C> through = of_step<C>(a.grad_fed, block.b, t);
    const Panel<C> panel = room.output.at(block.panel);
    if (!a.dropout_joined.data)
      return multiply_panel(through.data, through.stride, 1, block.rows, a.F, panel, x);
    alignas(64) C y[kMostBatch * P];
    clear(y, block.rows * P);
    multiply_panel(through.data, through.stride, 1, block.rows, a.F, panel, y);
    multiply_mask(a.dropout_joined, a.Dv, t, block, y);
    for (int64_t i = 0; i < block.rows * P; ++i) x[i] += y[i];
  }

  // Multiply a panel of gradients of the state by step t of a mask, whose columns of the state start
  // at `first`.
  void multiply_mask(const View& mask, int64_t first, int64_t t, const Block& block, C* x) {
    const int64_t from = block.panel * P;
    for (int64_t r = 0; r < block.rows; ++r)
      for_vectors<C>(a.H - from, [&](int64_t c, int64_t n) {
        const C* const factor = row<C>(mask, block.b + r, t) + first + from + c;
        store(x + r * P + c, load(x + r * P + c) * load_part(factor, n, (C)0));
      });
  }

  C* to_state(int64_t layer, int64_t b) const { return room.to_state + (layer * a.B + b) * a.H; }
  C* to_cell(int64_t layer, int64_t b) const { return room.to_cell + (layer * a.B + b) * a.H; }

  // Propagate the gradient of a layer's step to its sums, the previous state and the layer's input.
  void step_back(int64_t t, int64_t layer) {
    by_cell(a.cell, [&](auto known) {
      member.share(blocks(a, plan, units),
                   [&](int64_t item) { backward_block(known, t, layer, Block(a, plan, item)); });
    });
    const int64_t states = blocks(a, plan, units);
    const bool more = layer || a.attends_first || t || a.grad_feed.data;
    member.share(states + (more ? layer ? states : blocks(a, plan, of_fed) : 0), [&](int64_t item) {
      if (item < states) grad_to_state(t, layer, Block(a, plan, item));
      else if (layer) grad_to_below(t, layer, Block(a, plan, item - states));
      else grad_to_fed(t, Block(a, plan, item - states));
    });
  }

  template <class Known>
  void backward_block(Known, int64_t t, int64_t layer, const Block& block) {
    alignas(64) C x[kMostBatch * P];
    clear(x, block.rows * P);
    if (layer == a.layers - 1) add_attended(a.attends_first ? t + 1 : t, block, x);
    for (int64_t r = 0; r < block.rows; ++r) {
      if (runs(a, block.b + r, t)) backward_units<Known>(t, layer, block.b + r, block.panel * P, x + r * P);
      else pass_row<Known>(t, layer, block.b + r, block.panel * P, x + r * P);
    }
  }

  // Padding: pass the gradient of the state through.
  template <class Known>
  void pass_row(int64_t t, int64_t layer, int64_t b, int64_t i, const C* x) {
    C* const state = to_state(layer, b) + i;
    C* const out = row<C>(at_layer<C>(a.grad_gates, layer), b, t) + i;
    for_vectors<C>(a.H - i, [&](int64_t c, int64_t n) {
      store_part(state + c, load_part(state + c, n, (C)0) + load(x + c), n);
      for (int gate = 0; gate < Known::sums; ++gate) store_part(out + gate * a.H + c, Vec<C>{}, n);
    });
  }

  // Run the backward of a panel's units, from i on, for one sequence; x is attention's gradient of
  // the state.
  template <class Known>
  void backward_units(int64_t t, int64_t layer, int64_t b, int64_t i, const C* x) {
    const int64_t H = a.H;
    const Level level = level_of<C>(a, layer);
    C *const to_state = this->to_state(layer, b) + i, *const to_cell = this->to_cell(layer, b) + i;
    C* const out = row<C>(at_layer<C>(a.grad_gates, layer), b, t) + i;
    const C* const given = row<C>(at_layer<C>(a.grad_states, layer), b, t) + i;
    const C* const gates = row<C>(level.gates, b, t) + i;
    const C* const state = row<C>(level.states, b, t) + i;
    const C* const before = (t ? row<C>(level.states, b, t - 1) : row<C>(level.hidden, b)) + i;
    const C* const of_state = factors_of<C>(level.dropout_state, b, t, i);
    const C* const of_cell = factors_of<C>(level.dropout_cell, b, t, i);
    const C *cell = nullptr, *cell_before = nullptr, *given_cell = nullptr;
    if constexpr (Known::cell == Cell::lstm) {
      cell = row<C>(level.cells, b, t) + i;
      cell_before = (t ? row<C>(level.cells, b, t - 1) : row<C>(level.first_cell, b)) + i;
      if (a.grad_cells.data) given_cell = row<C>(at_layer<C>(a.grad_cells, layer), b, t) + i;
    }
    for_vectors<C>(H - i, [&](int64_t c, int64_t n) {
      const auto part = [&](const C* from) { return load_part(from + c, n, (C)0); };
      Vec<C> saved[kMostGates] = {}, now = {}, old = {}, grad_cell = {}, past_state = {}, past_cell = {};
      for (int gate = 0; gate < Known::saved; ++gate) saved[gate] = part(gates + gate * H);
      if constexpr (Known::cell == Cell::lstm) {
        now = part(cell), old = part(cell_before), grad_cell = part(to_cell);
        if (given_cell) grad_cell += part(given_cell);
        if (of_cell) {
          now = saved[1] * old + saved[0] * saved[2];  // before the dropout
          take_through(part(of_cell), a.zoneout, grad_cell, past_cell);
        }
      }
      const Vec<C> last = part(before);
      Vec<C> g = part(to_state) + load(x + c) + part(given), value = part(state);
      if (of_state) {
        const Vec<C> factor = part(of_state);
        take_through(factor, a.zoneout, g, past_state);
        value = undropped(value, last, factor, a.zoneout);
      }
      const Unit<Vec<C>> back =
          cell_backward<Known::cell, C, Math>(saved, value, last, now, old, g, grad_cell);
      if constexpr (Known::cell == Cell::lstm) store_part(to_cell + c, back.cell + past_cell, n);
      store_part(to_state + c, back.state + past_state, n);
      for (int gate = 0; gate < Known::sums; ++gate) store_part(out + gate * H + c, back.gates[gate], n);
    });
  }

  // Add to x[r] the gates' gradients times weight_hh, the gradient of the previous state.
  void multiply_hidden(int64_t t, int64_t layer, const Block& block, C* x) {
    const Sources<C> from = of_step<C>(at_layer<C>(a.grad_gates, layer), block.b, t);
    const Panel<C> panel = room.hidden.at(layer * units + block.panel);
    const bool gru = a.cell == Cell::gru;
    const int64_t depth = (gru ? 2 : gates) * a.H;
    multiply_panel(from.data, from.stride, 1, block.rows, depth, panel, x);
    if (gru) multiply_panel(from.data + 3 * a.H, from.stride, 1, block.rows, a.H, panel.from(depth), x);
  }

  void grad_to_state(int64_t t, int64_t layer, const Block& block) {
    alignas(64) C x[kMostBatch * P];
    clear(x, block.rows * P);
    multiply_hidden(t, layer, block, x);
    add_to_state(layer, block, x, at_layer<C>(a.dropout, layer), t);
  }

  // Propagate the gradient of a layer's input, the states of the layer below.
  void grad_to_below(int64_t t, int64_t layer, const Block& block) {
    alignas(64) C x[kMostBatch * P];
    clear(x, block.rows * P);
    const Sources<C> from = of_step<C>(at_layer<C>(a.grad_gates, layer), block.b, t);
    multiply_panel(from.data, from.stride, 1, block.rows, gates * a.H,
                   room.above.at((layer - 1) * units + block.panel), x);
    add_to_state(layer - 1, block, x, at_layer<C>(a.dropout_between, layer - 1), t);
  }

  // Add x, times the rows of step t of a mask if there is one.
  void add_to_state(int64_t layer, const Block& block, const C* x, const View& mask, int64_t t) {
    const int64_t first = block.panel * P;
    for (int64_t r = 0; r < block.rows; ++r)
      for_vectors<C>(a.H - first, [&](int64_t c, int64_t n) {
        Vec<C> g = load(x + r * P + c);
        if (mask.data) g *= load_part(row<C>(mask, block.b + r, t) + first + c, n, (C)0);
        C* const state = to_state(layer, block.b + r) + first + c;
        store_part(state, g + load_part(state, n, (C)0), n);
      });
  }

  void grad_to_fed(int64_t t, const Block& block) {
    const int64_t first = block.panel * P;
    alignas(64) C x[kMostBatch * P];
    clear(x, block.rows * P);
    const Sources<C> from = of_step<C>(a.grad_gates, block.b, t);
    multiply_panel(from.data, from.stride, 1, block.rows, gates * a.H, room.fed.at(block.panel), x);
    for (int64_t r = 0; r < block.rows; ++r)
      for_vectors<C>(a.F - first, [&](int64_t c, int64_t n) {
        Vec<C> g = load(x + r * P + c);
        if (a.dropout_feed.data)
          g *= load_part(row<C>(a.dropout_feed, block.b + r, t) + first + c, n, (C)0);
        if (a.attends_first || t) put_fed(block.b + r, t - !a.attends_first, first + c, n, g);
        else store_part(row<C>(a.grad_feed, block.b + r) + first + c, g, n);
      });
  }

  // Write the gradients of the state and the cell before the first step.
  void write_initial_grads(int64_t layer, const Block& block) {
    const int64_t first = block.panel * P;
    alignas(64) C x[kMostBatch * P];
    clear(x, block.rows * P);
    if (layer == a.layers - 1 && a.attends_first && a.T) add_attended(0, block, x);
    for (int64_t r = 0; r < block.rows; ++r)
      for_vectors<C>(a.H - first, [&](int64_t c, int64_t n) {
        const int64_t b = block.b + r, i = first + c;
        store_part(row<C>(at_layer<C>(a.grad_hidden, layer), b) + i,
                   load(x + r * P + c) + load_part(to_state(layer, b) + i, n, (C)0), n);
        if (a.grad_cell.data)
          store_part(row<C>(at_layer<C>(a.grad_cell, layer), b) + i,
                     load_part(to_cell(layer, b) + i, n, (C)0), n);
      });
  }

  void grad_to_inputs() {
    const int64_t all = a.B * a.T, chunks = parts(all, kMostBatch);
    member.share(all ? chunks * room.input.count : 0, [&](int64_t item) {
      const int64_t first = item / chunks * P, from = item % chunks * kMostBatch;
      const int64_t rows = min(kMostBatch, all - from);
      alignas(64) C x[kMostBatch * P];
      clear(x, rows * P);
      multiply_panel(row<C>(a.grad_gates, 0, from), a.grad_gates.row, 1, rows, gates * a.H,
                     room.input.at(first / P), x);
      for (int64_t r = 0; r < rows; ++r)
        for_vectors<C>(a.E - first, [&](int64_t c, int64_t n) {
          store_part(row<C>(a.grad_input, 0, from + r) + first + c, load(x + r * P + c), n);
        });
    });
  }

  // ---- parameters -------------------------------------------------------------------------------

  // Return the gradient that an item belongs to and make `item` an index into it; `items` gives the
  // number of items of each gradient.
  template <class Items>
  const ParameterGradient<C>& find(int64_t& item, const Items& items) const {
    int which = 0;
    for (; item >= items(room.gradients[which]); ++which) item -= items(room.gradients[which]);
    return room.gradients[which];
  }
  template <class Items>
  int64_t total(const Items& items) const {
    int64_t n = 0;
    for (const ParameterGradient<C>& x : room.gradients) n += items(x);
    return n;
  }

  void grad_to_parameters() {
    const auto of_right = [](const ParameterGradient<C>& x) { return x.packs ? x.packed.count : 0; };
    const auto of_left = [](const ParameterGradient<C>& x) {
      return (x.rows + kProductRows - 1) / kProductRows;
    };
    member.share(total(of_right), [&](int64_t item) {
      const ParameterGradient<C>& x = find(item, of_right);
      pack_right(x, item);
    });
    member.share(total(of_left), [&](int64_t item) {
      const ParameterGradient<C>& x = find(item, of_left);
      sum_products(x, item * kProductRows);
    });
  }

  void pack_right(const ParameterGradient<C>& x, int64_t panel) {
    const int64_t first = panel * P, all = a.B * a.T;
    C* out = x.packed.at(panel).data;
    const auto read = [&](int64_t of_all, int64_t i) {
      const int64_t b = of_all / a.T, t = of_all % a.T, n = x.columns - i;
      const bool before = x.earlier && t == 0, there = runs(a, b, t) && (!before || x.first.data);
      Vec<C> v = {};
      if (n > 0 && there)
        v = load_part((before ? row<C>(x.first, b) : row<C>(x.right, b, t - x.earlier)) + i, n, (C)0);
      if (n > 0 && x.factor.data) v *= load_part(row<C>(x.factor, b, t) + i, n, (C)0);
      return v;
    };
    const bool narrow = x.packed.stored == Stored::bfloat16;
    for (int64_t r = 0; r < all; r += narrow ? 2 : 1)
      for (int64_t c = first; c < first + P; c += Vector<C>::width, out += Vector<C>::width) {
        if (narrow) store_two(read(r, c), r + 1 < all ? read(r + 1, c) : Vec<C>{}, out);
        else store(out, read(r, c));
      }
  }

  // Compute rows [first, first + kProductRows) of a gradient.
  void sum_products(const ParameterGradient<C>& x, int64_t first) {
    C* const sums = x.sums.data ? row<C>(x.sums, 0) + first : nullptr;
    const ProductRows<C> rows = {row<C>(x.left, 0) + first,
                                 1,
                                 x.left.row,
                                 min(kProductRows, x.rows - first),
                                 a.B * a.T,
                                 row<C>(x.out, 0) + first * x.out.row,
                                 x.out.row,
                                 x.columns,
                                 nullptr,
                                 sums};
    multiply_rows(rows, x.packed, 0, x.packed.count, reinterpret_cast<C*>(own));
  }
};

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
