// A recurrent layer that attends at every step, on the CPU, for one instruction set (see vector.h); the
// launcher is recurrent.cpp.
//
// A team of threads walks through the steps together: each phase is a product whose columns, in panels
// of two vectors, they share, or a pass of attention. Weights are packed once for all steps; what the
// inputs give to the gates is one product before the first step, and every parameter's gradient one
// product after the last.
#include "recurrent.h"
#include "panels.h"
#include "team.h"

namespace attnfast {
namespace VARIANT {
namespace {

using cpu::LayerPlan;
using cpu::Pass;

constexpr int64_t kMostBatch = 32;  // rows of an item

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <class C>
C* row(const View& x, int64_t b, int64_t t = 0) {
  return static_cast<C*>(x.data) + b * x.batch + t * x.row;
}

// Whether step t of sequence b is more than padding.
bool runs(const Layer& a, int64_t b, int64_t t) { return !a.target_lengths || t < a.target_lengths[b]; }

// ---- products -----------------------------------------------------------------------------------

// Rows that a product takes: of step t of the sequences from b on.
template <class C>
struct Sources {
  const C* data;
  int64_t stride;
};
template <class C>
Sources<C> of_step(const View& x, int64_t b, int64_t t) {
  return {row<C>(x, b, t), x.batch};
}

// An item of a product over a step's sequences: a panel, and so many of them.
struct Block {
  int64_t panel, b, rows;
  Block(const Layer& a, const LayerPlan& plan, int64_t item) {
    const int64_t blocks = parts(a.B, plan.rows);
    panel = item / blocks;
    b = item % blocks * plan.rows;
    rows = min(plan.rows, a.B - b);
  }
};
int64_t blocks(const Layer& a, const LayerPlan& plan, int64_t panels) {
  return a.B ? panels * parts(a.B, plan.rows) : 0;
}

// ---- cells --------------------------------------------------------------------------------------

static inline Vec<float> tanh_of(Vec<float> x) {
  Vec<float> z[1] = {x}, half[1];
  half_tanh(z, half);
  return half[0] * -2.f;
}
static inline Vec<double> tanh_of(Vec<double> x) {
  for (int i = 0; i < Vector<double>::width; ++i) x[i] = ::tanh(x[i]);
  return x;
}
static inline Vec<float> sigmoid_of(Vec<float> x) { return reciprocal(exp(-x) + 1.f); }
static inline Vec<double> sigmoid_of(Vec<double> x) { return 1. / (exp(-x) + 1.); }

template <class C>
struct Math {
  static inline __attribute__((always_inline)) Vec<C> tanh(Vec<C> x) { return tanh_of(x); }
  static inline __attribute__((always_inline)) Vec<C> sigmoid(Vec<C> x) { return sigmoid_of(x); }
};

// ---- attention ----------------------------------------------------------------------------------

void move_on(View& x, int64_t t, int64_t bytes) {
  if (x.data) x.data = static_cast<char*>(x.data) + t * x.row * bytes;
}
void move_on(Problem& a, int64_t t, int64_t bytes) {
  move_on(a.query, t, bytes);
  move_on(a.mask, t, 1);
  move_on(a.span, t, sizeof(int64_t));
}
template <class C>
Forward step_of(const RecurrentForward& a, int64_t t) {
  Forward step = a.attention;
  move_on(step, t, sizeof(C));
  View* const rows[] = {&step.context, &step.weights, &step.log_sum_exp};
  for (View* x : rows) move_on(*x, t, sizeof(C));
  return step;
}
template <class C>
Backward step_of(const RecurrentBackward& a, int64_t t) {
  Backward step = a.attention;
  move_on(step, t, sizeof(C));
  View* const rows[] = {&step.weights, &step.grad_context, &step.grad_weights, &step.grad_score,
                        &step.grad_query};
  for (View* x : rows) move_on(*x, t, sizeof(C));
  return step;
}

// Passes that follow one another, item by item where they have as many.
template <class Call>
void run_passes(const Call&, const cpu::Plan&, Member&, void*) {}
template <class Call, class... Rest>
void run_passes(const Call& a, const cpu::Plan& plan, Member& member, void* own, const Pass<Call>& pass,
                const Rest&... rest) {
  const int64_t items = pass.items(a, plan);
  const bool alike = ((rest.items(a, plan) == items) && ...);
  member.share(items, [&](int64_t item) {
    pass.run(a, plan, item, own);
    if (alike) (rest.run(a, plan, item, own), ...);
  });
  if (!alike) run_passes(a, plan, member, own, rest...);
}

// ---- forward ------------------------------------------------------------------------------------

// What a layer's parameters are packed into.
template <class C>
struct Packed {
  Panels<C> input, fed, hidden, query, context, output;  // the last two of weight_output
  C* bias;                                               // of the sums of `move`, each to whole panels

  Packed(const Layer& a, Scratch<C>& room) {
    const int64_t units = panels<C>(a.H), gates = gates_of(a.cell) * units;
    input = take_panels(room, a.E, gates);
    fed = take_panels(room, a.F, gates);
    hidden = take_panels(room, a.H, gates);
    if (a.weight_query.data) query = take_panels(room, a.H, panels<C>(a.A));
    if (a.weight_output.data) {
      context = take_panels(room, a.Dv, panels<C>(a.F));
      output = take_panels(room, a.H, panels<C>(a.F));
    }
    bias = room.take(kMostGates * units * kPanel<C>);
  }

  // Those that are given, if any.
  static Packed of(const RecurrentForward& a, Scratch<C>& room) {
    Scratch<C> given = {static_cast<C*>(a.packed)};
    return Packed(a, a.packed ? given : room);
  }

  // Pack a panel of a weight whose rows come in blocks, one for each gate, each to whole panels.
  static void pack(const Panels<C>& out, const View& weight, int64_t column, int64_t rows, int64_t panel) {
    const int64_t of_block = panels<C>(rows), block = panel / of_block,
                  first = panel % of_block * kPanel<C>;
    pack_rows(row<C>(weight, 0, block * rows + first) + column, weight.row, min(kPanel<C>, rows - first),
              out.depth, out.at(panel));
  }

  void fill(const Layer& a, Member& member) const {
    const int64_t counts[] = {input.count, fed.count,     hidden.count,
                              query.count, context.count, output.count};
    const Panels<C>* const all[] = {&input, &fed, &hidden, &query, &context, &output};
    const View* const weights[] = {&a.weight_ih,    &a.weight_ih,     &a.weight_hh,
                                   &a.weight_query, &a.weight_output, &a.weight_output};
    const int64_t columns[] = {0, a.E, 0, 0, 0, a.Dv}, rows[] = {a.H, a.H, a.H, a.A, a.F, a.F};
    int64_t total = 1;  // the biases
    for (const int64_t count : counts) total += count;
    member.share(total, [&](int64_t item) {
      if (item-- == 0) return add_biases(a);
      int which = 0;
      for (; item >= counts[which]; ++which) item -= counts[which];
      pack(*all[which], *weights[which], columns[which], rows[which], item);
    });
  }

  void add_biases(const Layer& a) const {
    const int64_t width = panels<C>(a.H) * kPanel<C>;
    clear(bias, kMostGates * width);
    for (int gate = 0; gate < gates_of(a.cell); ++gate)
      for (int64_t i = 0; i < a.H; ++i) {
        if (a.bias_ih.data) bias[gate * width + i] += row<C>(a.bias_ih, 0)[gate * a.H + i];
        if (a.bias_hh.data)
          bias[of_state(a.cell, gate) * width + i] += row<C>(a.bias_hh, 0)[gate * a.H + i];
      }
  }
};

template <class C>
class Forwards {
  const RecurrentForward& a;
  const LayerPlan& plan;
  Member& member;
  const Packed<C> packed;
  C* masked[2];  // states times the dropout, of even and odd steps
  char* own;
  const int64_t gates, units;
  const View sums;  // where the inputs' share of the gates lies until its step

 public:
  Forwards(const RecurrentForward& a, const LayerPlan& plan, Member& member, Scratch<C> room, void* own)
      : a(a), plan(plan), member(member), packed(Packed<C>::of(a, room)), own(static_cast<char*>(own)),
        gates(gates_of(a.cell)), units(panels<C>(a.H)), sums(kept_of(a.cell) ? a.gates : a.states) {
    for (C*& x : masked) x = a.dropout.data ? room.take(a.B * a.H) : nullptr;
  }

  void run() {
    if (!a.packed) packed.fill(a, member);
    if (a.dropout.data) mask_first();
    multiply_inputs();
    for (int64_t t = 0; t < a.T; ++t) {
      if (a.attends && a.attends_first) attend(t);
      move_states(t);
      if (a.attends && !a.attends_first) attend(t);
      if (a.weight_output.data) feed_back(t);
    }
    if (a.attends && a.target_lengths) clear_padding();
  }

 private:
  void mask_first() {
    member.share(a.B, [&](int64_t b) {
      for (int64_t i = 0; i < a.H; ++i)
        masked[0][b * a.H + i] = row<C>(a.hidden, b)[i] * row<C>(a.dropout, b)[i];
    });
  }

  // The inputs of all steps at once.
  void multiply_inputs() {
    const int64_t chunks = parts(a.B * a.T, kMostBatch);
    member.share(a.B && a.T ? chunks * packed.input.count : 0, [&](int64_t item) {
      const int64_t panel = item / chunks, first = item % chunks * kMostBatch,
                    unit = panel % units * kPanel<C>;
      const int64_t rows = min(kMostBatch, a.B * a.T - first);
      alignas(64) C x[kMostBatch * kPanel<C>];
      clear(x, rows * kPanel<C>);
      multiply_panel(row<C>(a.input, 0, first), a.input.row, 1, rows, a.E, packed.input.at(panel), x);
      for (int64_t r = 0; r < rows; ++r)
        for_vectors<C>(a.H - unit, [&](int64_t c, int64_t n) {
          store_part(row<C>(sums, 0, first + r) + panel / units * a.H + unit + c,
                     load(x + r * kPanel<C> + c), n);
        });
    });
  }

  void attend(int64_t t) {
    if (a.queries.data)
      member.share(blocks(a, plan, panels<C>(a.A)),
                   [&](int64_t item) { project(t, Block(a, plan, item)); });
    const Forward step = step_of<C>(a, t);
    const AttentionKernels& passes = VARIANT::attention;
    if (step.span.data) return run_passes(step, plan.attention, member, own, passes.span);
    cpu::Plan in_place = plan.attention;
    in_place.scores = step.weights;
    run_passes(step, in_place, member, own, passes.scores, passes.softmax, passes.context);
  }

  // The state that is asked with at step t.
  Sources<C> asked(int64_t b, int64_t t) const {
    if (!a.attends_first) return of_step<C>(a.states, b, t);
    return t ? of_step<C>(a.states, b, t - 1) : of_step<C>(a.hidden, b, 0);
  }

  // The query, or, where it is no state of this step, a copy of the state.
  void project(int64_t t, const Block& block) {
    const int64_t first = block.panel * kPanel<C>;
    const bool projects = a.weight_query.data;
    alignas(64) C x[kMostBatch * kPanel<C>];
    clear(x, block.rows * kPanel<C>);
    const Sources<C> from = asked(block.b, t);
    if (projects)
      multiply_panel(from.data, from.stride, 1, block.rows, a.H, packed.query.at(block.panel), x);
    for (int64_t r = 0; r < block.rows; ++r)
      for_vectors<C>(a.A - first, [&](int64_t c, int64_t n) {
        Vec<C> q = projects ? load(x + r * kPanel<C> + c)
                            : load_part(from.data + r * from.stride + first + c, n, (C)0);
        if (a.bias_query.data) q += load_part(row<C>(a.bias_query, 0) + first + c, n, (C)0);
        store_part(row<C>(a.queries, block.b + r, t) + first + c, q, n);
      });
  }

  void move_states(int64_t t) {
    by_cell(a.cell, [&](auto known) {
      member.share(blocks(a, plan, units),
                   [&](int64_t item) { move_block(known, t, Block(a, plan, item)); });
    });
  }

  template <class Known>
  void move_block(Known, int64_t t, const Block& block) {
    constexpr int64_t P = kPanel<C>;
    const int64_t b = block.b;
    alignas(64) C x[kMostGates][kMostBatch * P];
    for (auto& gate : x) clear(gate, block.rows * P);
    const Sources<C> state = t ? of_step<C>(a.states, b, t - 1) : of_step<C>(a.hidden, b, 0);
    Sources<C> seen = state, fed = {};
    if (a.dropout.data) seen = {masked[t % 2] + b * a.H, a.H};
    if (a.attends_first || t) {
      const View& from = a.weight_output.data ? a.attentional : a.contexts;
      if (a.F) fed = of_step<C>(from, b, a.attends_first ? t : t - 1);
    } else if (a.feed.data) {
      fed = of_step<C>(a.feed, b, 0);
    }
    for (int gate = 0; gate < Known::gates; ++gate) {
      const int64_t panel = gate * units + block.panel;
      if (fed.data) multiply_panel(fed.data, fed.stride, 1, block.rows, a.F, packed.fed.at(panel), x[gate]);
      multiply_panel(seen.data, seen.stride, 1, block.rows, a.H, packed.hidden.at(panel),
                     x[of_state(Known::cell, gate)]);
    }
    for (int64_t r = 0; r < block.rows; ++r)
      move_row<Known>(t, b + r, block.panel * P, x[0] + r * P, state.data + r * state.stride);
  }

  // The units of a panel, from i on, of one sequence; x are its sums, those of a gate kMostBatch * P apart.
  template <class Known>
  void move_row(int64_t t, int64_t b, int64_t i, const C* x, const C* before) {
    const int64_t width = units * kPanel<C>, H = a.H;
    const bool pads = !runs(a, b, t);
    const C* const of_input = row<C>(sums, b, t) + i;
    const C* const bias = packed.bias + i;
    const C* const mask = a.dropout.data ? row<C>(a.dropout, b) + i : nullptr;
    const C* cell_before = nullptr;
    C *const state = row<C>(a.states, b, t) + i, *const gates = row<C>(a.gates, b, t) + i;
    C* cell = nullptr;
    if constexpr (Known::cell == Cell::lstm) {
      cell = row<C>(a.cells, b, t) + i;
      cell_before = (t ? row<C>(a.cells, b, t - 1) : row<C>(a.first_cell, b)) + i;
    }
    for_vectors<C>(H - i, [&](int64_t c, int64_t n) {
      Vec<C> sum[kMostGates] = {};
      for (int gate = 0; gate < Known::gates; ++gate)
        sum[gate] = load(x + gate * kMostBatch * kPanel<C> + c) + load(bias + gate * width + c) +
                    load_part(of_input + gate * H + c, n, (C)0);
      if constexpr (Known::cell == Cell::gru)
        sum[3] = load(x + 3 * kMostBatch * kPanel<C> + c) + load(bias + 3 * width + c);
      const Vec<C> last = cell_before ? load_part(cell_before + c, n, (C)0) : Vec<C>{};
      Unit<Vec<C>> unit = move<Known::cell, C, Math>(sum, load_part(before + i + c, n, (C)0), last);
      if (pads) unit = Unit<Vec<C>>{};
      store_part(state + c, unit.state, n);
      if (cell) store_part(cell + c, unit.cell, n);
      for (int gate = 0; gate < Known::kept; ++gate) store_part(gates + gate * H + c, unit.gates[gate], n);
      if (mask)
        store_part(masked[(t + 1) % 2] + b * H + i + c, unit.state * load_part(mask + c, n, (C)0), n);
    });
  }

  void feed_back(int64_t t) {
    member.share(blocks(a, plan, packed.output.count), [&](int64_t item) {
      const Block block(a, plan, item);
      const int64_t first = block.panel * kPanel<C>;
      alignas(64) C x[kMostBatch * kPanel<C>];
      clear(x, block.rows * kPanel<C>);
      const Sources<C> context = of_step<C>(a.contexts, block.b, t),
                       state = of_step<C>(a.states, block.b, t);
      multiply_panel(context.data, context.stride, 1, block.rows, a.Dv, packed.context.at(block.panel), x);
      multiply_panel(state.data, state.stride, 1, block.rows, a.H, packed.output.at(block.panel), x);
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.F - first, [&](int64_t c, int64_t n) {
          Vec<C> sum = load(x + r * kPanel<C> + c);
          if (a.bias_output.data) sum += load_part(row<C>(a.bias_output, 0) + first + c, n, (C)0);
          store_part(row<C>(a.attentional, block.b + r, t) + first + c, tanh_of(sum), n);
        });
    });
  }

  // What attention has left beyond the targets' ends.
  void clear_padding() {
    member.share(a.B, [&](int64_t b) {
      for (int64_t t = larger(a.target_lengths[b], 0); t < a.T; ++t) {
        clear(row<C>(a.contexts, b, t), a.Dv);
        clear(row<C>(a.attention.weights, b, t), a.Tk);
        if (a.queries.data) clear(row<C>(a.queries, b, t), a.A);
        if (a.weight_output.data) clear(row<C>(a.attentional, b, t), a.F);
      }
    });
  }
};

// ---- backward -----------------------------------------------------------------------------------

// A parameter's gradient: out[m, n] = the sum, over all steps of all sequences, of left[m] right[n].
template <class C>
struct ParameterGradient {
  View left;          // rows [B, T, .] that lie evenly, from the first column that counts on
  View right, first;  // of a step; if `earlier`, of the step before, at first of `first` or, without it, 0
  bool earlier;
  View factor;  // multiplied into right, or absent
  int64_t rows, columns;
  View out, sums;  // and the sums of left, or absent
  Panels<C> packed;
  bool packs;  // else another one does
};

// Where a backward keeps what it computes with.
template <class C>
struct BackwardRoom {
  Panels<C> input, fed, hidden, query, context, output;  // the last two of weight_output
  C *to_state, *to_cell;                                 // what reaches a step's state and cell, [B, H]
  ParameterGradient<C> gradients[7];
  int count = 0;

  BackwardRoom(const RecurrentBackward& a, Scratch<C>& room) {
    const int64_t units = panels<C>(a.H), gates = gates_of(a.cell) * a.H;
    fed = take_panels(room, gates, panels<C>(a.F));
    hidden = take_panels(room, gates, units);
    if (a.weight_query.data) query = take_panels(room, a.A, units);
    if (a.weight_output.data) {
      context = take_panels(room, a.F, panels<C>(a.Dv));
      output = take_panels(room, a.F, units);
    }
    if (a.grad_input.data) input = take_panels(room, gates, panels<C>(a.E));
    to_state = room.take(a.B * a.H);
    to_cell = room.take(a.B * a.H);
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
      gradients[count++] = {left, right,   first, earlier, factor,
                            rows, columns, out,   sums,    take_panels(room, a.B * a.T, panels<C>(columns)),
                            true};
    };
    list(a.grad_gates, a.input, none, false, none, gates, a.E, a.grad_weight_ih, a.grad_bias_ih);
    if (a.F)
      list(a.grad_gates, a.weight_output.data ? a.attentional : a.contexts, a.feed, !a.attends_first, none,
           gates, a.F, columns_from(a.grad_weight_ih, a.E), none);
    const int64_t alike = a.cell == Cell::gru ? 2 * a.H : gates;  // gates that inputs and states share
    list(a.grad_gates, a.states, a.hidden, true, a.dropout, alike, a.H, a.grad_weight_hh, a.grad_bias_hh);
    if (alike < gates) {
      ParameterGradient<C>& rest = gradients[count] = gradients[count - 1];
      ++count;
      rest.packs = false;
      rest.rows = gates - alike;
      rest.left = columns_from(rest.left, gates);
      rest.out = columns_from(rest.out, alike * rest.out.row);
      rest.sums = columns_from(rest.sums, alike);
    }
    if (a.weight_query.data)
      list(a.attention.grad_query, a.states, a.hidden, a.attends_first, none, a.A, a.H, a.grad_weight_query,
           a.grad_bias_query);
    if (!a.weight_output.data) return;
    list(a.grad_fed, a.contexts, none, false, none, a.F, a.Dv, a.grad_weight_output, a.grad_bias_output);
    list(a.grad_fed, a.states, none, false, none, a.F, a.H, columns_from(a.grad_weight_output, a.Dv), none);
  }
};

template <class C>
class Backwards {
  static constexpr int64_t P = kPanel<C>;
  const RecurrentBackward& a;
  const LayerPlan& plan;
  Member& member;
  const BackwardRoom<C> room;
  char* own;
  const int64_t gates, units, of_fed;  // panels of the state, of what is fed

 public:
  Backwards(const RecurrentBackward& a, const LayerPlan& plan, Member& member, Scratch<C> place, void* own)
      : a(a), plan(plan), member(member), room(a, place), own(static_cast<char*>(own)),
        gates(gates_of(a.cell)), units(panels<C>(a.H)), of_fed(panels<C>(a.F)) {}

  void run() {
    pack_weights();
    for (int64_t t = a.T - 1; t >= 0; --t) {
      if (a.attends && !a.attends_first) {
        if (a.weight_output.data) reach_contexts(t);
        attend_back(t);
      }
      by_cell(a.cell, [&](auto known) {
        member.share(blocks(a, plan, units),
                     [&](int64_t item) { move_back_block(known, t, Block(a, plan, item)); });
      });
      const int64_t states = blocks(a, plan, units), more = a.attends_first || t || a.grad_feed.data;
      member.share(states + (more ? blocks(a, plan, of_fed) : 0), [&](int64_t item) {
        if (item < states) reach_state(t, Block(a, plan, item));
        else reach_fed(t, Block(a, plan, item - states));
      });
      if (a.attends && a.attends_first) attend_back(t);
    }
    member.share(blocks(a, plan, units), [&](int64_t item) { put_first(Block(a, plan, item)); });
    if (a.grad_input.data) reach_inputs();
    if (room.count) reach_parameters();
  }

 private:
  // Columns of a weight from `first` on, each row of the weight a row of a panel.
  void pack_columns(const Panels<C>& out, const View& weight, int64_t first, int64_t columns,
                    int64_t panel) {
    const int64_t c = panel * P;
    pack(row<C>(weight, 0) + first + c, weight.row, out.depth, min(P, columns - c), out.at(panel));
  }

  void pack_weights() {
    const Panels<C>* const all[] = {&room.fed,     &room.hidden, &room.query,
                                    &room.context, &room.output, &room.input};
    const View* const weights[] = {&a.weight_ih,     &a.weight_hh,     &a.weight_query,
                                   &a.weight_output, &a.weight_output, &a.weight_ih};
    const int64_t first[] = {a.E, 0, 0, 0, a.Dv, 0}, columns[] = {a.F, a.H, a.H, a.Dv, a.H, a.E};
    int64_t total = 1;
    for (const auto* panels : all) total += panels->count;
    member.share(total, [&](int64_t item) {
      if (item-- == 0) return begin();
      int which = 0;
      for (; item >= all[which]->count; ++which) item -= all[which]->count;
      pack_columns(*all[which], *weights[which], first[which], columns[which], item);
    });
  }

  // What reaches the results of the last step, and nothing from beyond it.
  void begin() {
    clear(room.to_state, a.B * a.H);
    clear(room.to_cell, a.B * a.H);
    if (!a.attends || a.attends_first || a.T == 0) return;
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t c = 0; c < a.F; c += Vector<C>::width) put_fed(b, a.T - 1, c, a.F - c, Vec<C>{});
  }

  // What the next step gives to what it is fed, to what else reaches the attentional vector or context.
  void put_fed(int64_t b, int64_t t, int64_t c, int64_t n, Vec<C> x) {
    const View& given = a.weight_output.data ? a.grad_attentional : a.grad_contexts;
    const View& out = a.weight_output.data ? a.grad_fed : a.attention.grad_context;
    if (given.data) x += load_part(row<C>(given, b, t) + c, n, (C)0);
    if (a.weight_output.data) {
      const Vec<C> f = load_part(row<C>(a.attentional, b, t) + c, n, (C)0);
      x *= (C)1 - f * f;
    }
    if (!runs(a, b, t)) x = Vec<C>{};
    store_part(row<C>(out, b, t) + c, x, n);
  }

  // What reaches the attentional vector of step t reaches the context.
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
          if (a.grad_contexts.data)
            g += load_part(row<C>(a.grad_contexts, block.b + r, t) + first + c, n, (C)0);
          if (!runs(a, block.b + r, t)) g = Vec<C>{};
          store_part(row<C>(a.attention.grad_context, block.b + r, t) + first + c, g, n);
        });
    });
  }

  void attend_back(int64_t t) {
    const Backward step = step_of<C>(a, t);
    const AttentionKernels& passes = VARIANT::attention;
    if (step.span.data)
      return run_passes(step, plan.attention, member, own, passes.grad_score_span, passes.grad_inputs);
    run_passes(step, plan.attention, member, own, passes.grad_weights, passes.grad_score,
               passes.grad_inputs);
  }

  // x[r] += what reaches the state through the query of step t and, if it attends last, the output.
  void add_attended(int64_t t, const Block& block, C* x) {
    if (!a.attends || t >= a.T) return;
    const Sources<C> asked = of_step<C>(a.attention.grad_query, block.b, t);
    if (a.weight_query.data) {
      multiply_panel(asked.data, asked.stride, 1, block.rows, a.A, room.query.at(block.panel), x);
    } else {
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.H - block.panel * P, [&](int64_t c, int64_t n) {
          add(x + r * P + c, load_part(asked.data + r * asked.stride + block.panel * P + c, n, (C)0));
        });
    }
    if (!a.weight_output.data) return;
    const Sources<C> through = of_step<C>(a.grad_fed, block.b, t);
    multiply_panel(through.data, through.stride, 1, block.rows, a.F, room.output.at(block.panel), x);
  }

  template <class Known>
  void move_back_block(Known, int64_t t, const Block& block) {
    alignas(64) C x[kMostBatch * P];
    clear(x, block.rows * P);
    add_attended(a.attends_first ? t + 1 : t, block, x);
    for (int64_t r = 0; r < block.rows; ++r) {
      if (runs(a, block.b + r, t)) move_row_back<Known>(t, block.b + r, block.panel * P, x + r * P);
      else pass_row<Known>(t, block.b + r, block.panel * P, x + r * P);
    }
  }

  // Padding: what reaches the state goes by.
  template <class Known>
  void pass_row(int64_t t, int64_t b, int64_t i, const C* x) {
    C *const to_state = room.to_state + b * a.H + i, *const out = row<C>(a.grad_gates, b, t) + i;
    for_vectors<C>(a.H - i, [&](int64_t c, int64_t n) {
      store_part(to_state + c, load_part(to_state + c, n, (C)0) + load(x + c), n);
      for (int gate = 0; gate < Known::sums; ++gate) store_part(out + gate * a.H + c, Vec<C>{}, n);
    });
  }

  // The units of a panel, from i on, of one sequence; x is what attention gives to the state.
  template <class Known>
  void move_row_back(int64_t t, int64_t b, int64_t i, const C* x) {
    const int64_t H = a.H;
    C *const to_state = room.to_state + b * H + i, *const to_cell = room.to_cell + b * H + i;
    C* const out = row<C>(a.grad_gates, b, t) + i;
    const C *const given = row<C>(a.grad_states, b, t) + i, *const gates = row<C>(a.gates, b, t) + i;
    const C* const state = row<C>(a.states, b, t) + i;
    const C* const before = (t ? row<C>(a.states, b, t - 1) : row<C>(a.hidden, b)) + i;
    const C *cell = nullptr, *cell_before = nullptr, *given_cell = nullptr;
    if constexpr (Known::cell == Cell::lstm) {
      cell = row<C>(a.cells, b, t) + i;
      cell_before = (t ? row<C>(a.cells, b, t - 1) : row<C>(a.first_cell, b)) + i;
      if (a.grad_cells.data) given_cell = row<C>(a.grad_cells, b, t) + i;
    }
    for_vectors<C>(H - i, [&](int64_t c, int64_t n) {
      const auto part = [&](const C* from) { return load_part(from + c, n, (C)0); };
      Vec<C> kept[kMostGates] = {}, now = {}, old = {}, grad_cell = {};
      for (int gate = 0; gate < Known::kept; ++gate) kept[gate] = part(gates + gate * H);
      if constexpr (Known::cell == Cell::lstm) {
        now = part(cell), old = part(cell_before), grad_cell = part(to_cell);
        if (given_cell) grad_cell += part(given_cell);
      }
      const Vec<C> g = part(to_state) + load(x + c) + part(given);
      const Unit<Vec<C>> back =
          move_back<Known::cell, C, Math>(kept, part(state), part(before), now, old, g, grad_cell);
      if constexpr (Known::cell == Cell::lstm) store_part(to_cell + c, back.cell, n);
      store_part(to_state + c, back.state, n);
      for (int gate = 0; gate < Known::sums; ++gate) store_part(out + gate * H + c, back.gates[gate], n);
    });
  }

  // x[r] += what the gates give to the state before, times weight_hh.
  void multiply_hidden(int64_t t, const Block& block, C* x) {
    const Sources<C> from = of_step<C>(a.grad_gates, block.b, t);
    const C* const panel = room.hidden.at(block.panel);
    const bool gru = a.cell == Cell::gru;
    const int64_t depth = (gru ? 2 : gates) * a.H;
    multiply_panel(from.data, from.stride, 1, block.rows, depth, panel, x);
    if (gru) multiply_panel(from.data + 3 * a.H, from.stride, 1, block.rows, a.H, panel + depth * P, x);
  }

  void reach_state(int64_t t, const Block& block) {
    const int64_t first = block.panel * P;
    alignas(64) C x[kMostBatch * P];
    clear(x, block.rows * P);
    multiply_hidden(t, block, x);
    for (int64_t r = 0; r < block.rows; ++r)
      for_vectors<C>(a.H - first, [&](int64_t c, int64_t n) {
        Vec<C> g = load(x + r * P + c);
        if (a.dropout.data) g *= load_part(row<C>(a.dropout, block.b + r) + first + c, n, (C)0);
        C* const state = room.to_state + (block.b + r) * a.H + first + c;
        store_part(state, g + load_part(state, n, (C)0), n);
      });
  }

  void reach_fed(int64_t t, const Block& block) {
    const int64_t first = block.panel * P;
    alignas(64) C x[kMostBatch * P];
    clear(x, block.rows * P);
    const Sources<C> from = of_step<C>(a.grad_gates, block.b, t);
    multiply_panel(from.data, from.stride, 1, block.rows, gates * a.H, room.fed.at(block.panel), x);
    for (int64_t r = 0; r < block.rows; ++r)
      for_vectors<C>(a.F - first, [&](int64_t c, int64_t n) {
        const Vec<C> g = load(x + r * P + c);
        if (a.attends_first || t) put_fed(block.b + r, t - !a.attends_first, first + c, n, g);
        else store_part(row<C>(a.grad_feed, block.b + r) + first + c, g, n);
      });
  }

  // What reaches the state and the cell before the first step.
  void put_first(const Block& block) {
    const int64_t first = block.panel * P;
    alignas(64) C x[kMostBatch * P];
    clear(x, block.rows * P);
    if (a.attends_first && a.T) add_attended(0, block, x);
    for (int64_t r = 0; r < block.rows; ++r)
      for_vectors<C>(a.H - first, [&](int64_t c, int64_t n) {
        const int64_t b = block.b + r, i = first + c;
        store_part(row<C>(a.grad_hidden, b) + i,
                   load(x + r * P + c) + load_part(room.to_state + b * a.H + i, n, (C)0), n);
        if (a.grad_cell.data)
          store_part(row<C>(a.grad_cell, b) + i, load_part(room.to_cell + b * a.H + i, n, (C)0), n);
      });
  }

  void reach_inputs() {
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

  // ---- parameters ---------------------------------------------------------------------------------

  // Which of the gradients an item belongs to, of those that have so many items each.
  template <class Items>
  const ParameterGradient<C>& find(int64_t& item, const Items& items) const {
    int which = 0;
    for (; item >= items(room.gradients[which]); ++which) item -= items(room.gradients[which]);
    return room.gradients[which];
  }
  template <class Items>
  int64_t total(const Items& items) const {
    int64_t n = 0;
    for (int i = 0; i < room.count; ++i) n += items(room.gradients[i]);
    return n;
  }

  void reach_parameters() {
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
    const int64_t first = panel * P;
    C* out = x.packed.at(panel);
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t t = 0; t < a.T; ++t)
        for (int64_t c = 0; c < P; c += Vector<C>::width, out += Vector<C>::width) {
          const int64_t i = first + c, n = x.columns - i;
          const bool before = x.earlier && t == 0, there = runs(a, b, t) && (!before || x.first.data);
          Vec<C> v = {};
          if (n > 0 && there)
            v = load_part((before ? row<C>(x.first, b) : row<C>(x.right, b, t - x.earlier)) + i, n, (C)0);
          if (n > 0 && x.factor.data) v *= load_part(row<C>(x.factor, b) + i, n, (C)0);
          store(out, v);
        }
  }

  // Rows [first, first + kProductRows) of a gradient.
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

// ---- the table --------------------------------------------------------------------------------

// Where room is measured, nothing lies.
template <class C>
Scratch<C> nowhere() {
  return {reinterpret_cast<C*>(64)};
}
template <class C>
size_t bytes_of(const Scratch<C>& room) {
  return reinterpret_cast<uintptr_t>(room.next) - 64;
}

template <class C>
size_t forward_room(const RecurrentForward& a) {
  Scratch<C> room = nowhere<C>();
  if (!a.packed) Packed<C>(a, room);
  if (a.dropout.data) room.take(a.B * a.H), room.take(a.B * a.H);
  return bytes_of(room);
}
template <class C>
size_t packed_room(const Layer& a) {
  Scratch<C> room = nowhere<C>();
  Packed<C>(a, room);
  return bytes_of(room);
}
template <class C>
void pack_weights(const Layer& a, Team& team, int64_t who, void* out) {
  Member member(team, who);
  Scratch<C> room = {static_cast<C*>(out)};
  Packed<C>(a, room).fill(a, member);
}
template <class C>
size_t backward_room(const RecurrentBackward& a) {
  Scratch<C> room = nowhere<C>();
  const BackwardRoom<C> taken(a, room);
  return bytes_of(room);
}

// The most items that a phase of products has: panels are at least 4 columns wide.
int64_t most_items(const Layer& a, const LayerPlan& plan) {
  const int64_t columns = larger(larger(a.E, a.H), larger(a.A, larger(a.F, a.Dv)));
  const int64_t all_panels = 6 + 6 * kMostGates * parts(columns, 4);
  const int64_t widest = (kMostGates + 1) * parts(columns, 4) + 2;
  return larger(all_panels,
                widest * larger(parts(a.B * a.T, kMostBatch), larger(parts(a.B, plan.rows), 2)));
}

int64_t forward_items(const RecurrentForward& a, const LayerPlan& plan) {
  int64_t most = larger(most_items(a, plan), a.B);
  const AttentionKernels& passes = VARIANT::attention;
  if (!a.attends) return most;
  const Pass<Forward> all[] = {passes.scores, passes.softmax, passes.context, passes.span};
  for (const auto& pass : all) most = larger(most, pass.items(a.attention, plan.attention));
  return most;
}
int64_t backward_items(const RecurrentBackward& a, const LayerPlan& plan) {
  int64_t most = most_items(a, plan);
  const AttentionKernels& passes = VARIANT::attention;
  if (!a.attends) return most;
  const Pass<Backward> all[] = {passes.grad_weights, passes.grad_score, passes.grad_score_span,
                                passes.grad_inputs};
  for (const auto& pass : all) most = larger(most, pass.items(a.attention, plan.attention));
  return most;
}

template <class C>
void run_forward(const RecurrentForward& a, const LayerPlan& plan, Team& team, int64_t who, void* shared,
                 void* own) {
  Member member(team, who);
  Forwards<C>(a, plan, member, {static_cast<C*>(shared)}, own).run();
}
template <class C>
void run_backward(const RecurrentBackward& a, const LayerPlan& plan, Team& team, int64_t who, void* shared,
                  void* own) {
  Member member(team, who);
  Backwards<C>(a, plan, member, {static_cast<C*>(shared)}, own).run();
}

}  // namespace

extern const RecurrentKernels recurrent = {
    .packed =
        [](const Layer& a) {
          return a.dtype == Dtype::f64 ? packed_room<double>(a) : packed_room<float>(a);
        },
    .pack_items = [](const Layer& a) { return most_items(a, LayerPlan{.rows = kMostBatch}); },
    .pack =
        [](const Layer& a, Team& team, int64_t who, void* out) {
          const auto run = a.dtype == Dtype::f64 ? pack_weights<double> : pack_weights<float>;
          run(a, team, who, out);
        },
    .forward = {.shared =
                    [](const RecurrentForward& a, const LayerPlan&) {
                      return a.dtype == Dtype::f64 ? forward_room<double>(a) : forward_room<float>(a);
                    },
                .own =
                    [](const RecurrentForward& a, const LayerPlan& plan) {
                      return a.attends ? attention.forward_scratch(a.attention, plan.attention) : 0;
                    },
                .items = forward_items,
                .run =
                    [](const RecurrentForward& a, const LayerPlan& plan, Team& team, int64_t who,
                       void* shared, void* own) {
                      const auto run = a.dtype == Dtype::f64 ? run_forward<double> : run_forward<float>;
                      run(a, plan, team, who, shared, own);
                    }},
    .backward = {.shared =
                     [](const RecurrentBackward& a, const LayerPlan&) {
                       return a.dtype == Dtype::f64 ? backward_room<double>(a) : backward_room<float>(a);
                     },
                 .own = [](const RecurrentBackward& a, const LayerPlan& plan) -> size_t {
                   const size_t size = a.dtype == Dtype::f64 ? 8 : 4;
                   const size_t block = kProductRows * kProductDepth * size;
                   if (!a.attends) return block;
                   const size_t attends = attention.backward_scratch(a.attention, plan.attention);
                   return attends > block ? attends : block;
                 },
                 .items = backward_items,
                 .run =
                     [](const RecurrentBackward& a, const LayerPlan& plan, Team& team, int64_t who,
                        void* shared, void* own) {
                       const auto run = a.dtype == Dtype::f64 ? run_backward<double> : run_backward<float>;
                       run(a, plan, team, who, shared, own);
                     }},
};

}  // namespace VARIANT
}  // namespace attnfast
