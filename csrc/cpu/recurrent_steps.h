// Code common to forward and backward of a recurrent layer: items of a step's products, cells,
// attention.
//
// A team of threads walks through the steps together. Each phase is a product whose columns, in
// panels of two vectors, the threads share, or a pass of attention. Weights are packed once for all
// steps. The inputs' contribution to the gates is one product before the first step, and every
// parameter's gradient is one product after the last.
#pragma once
#include "coverage.h"
#include "panels.h"
#include "recurrent.h"
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

// Return the slice of one layer of a stack.
template <class C>
View at_layer(View x, int64_t layer) {
  if (x.data) x.data = static_cast<C*>(x.data) + layer * x.head;
  return x;
}
struct Level {
  View hidden, first_cell, dropout, dropout_state, dropout_cell, states, cells, gates;
};
template <class C>
Level level_of(const Layer& a, int64_t layer) {
  const auto of = [&](const View& x) { return at_layer<C>(x, layer); };
  return {.hidden = of(a.hidden),
          .first_cell = of(a.first_cell),
          .dropout = of(a.dropout),
          .dropout_state = of(a.dropout_state),
          .dropout_cell = of(a.dropout_cell),
          .states = of(a.states),
          .cells = of(a.cells),
          .gates = of(a.gates)};
}
template <class C>
Level last_level(const Layer& a) {
  return level_of<C>(a, a.layers - 1);
}

// Return true unless step t of sequence b is padding.
bool runs(const Layer& a, int64_t b, int64_t t) { return !a.target_lengths || t < a.target_lengths[b]; }

// Return a mask's rows of step t from feature i on, or null.
template <class C>
const C* factors_of(const View& mask, int64_t b, int64_t t, int64_t i) {
  return mask.data ? row<C>(mask, b, t) + i : nullptr;
}

// ---- products -----------------------------------------------------------------------------------

// The left rows of a product: those of step t of the sequences from b on.
template <class C>
struct Sources {
  const C* data;
  int64_t stride;
};
template <class C>
Sources<C> of_step(const View& x, int64_t b, int64_t t) {
  return {row<C>(x, b, t), x.batch};
}

// Return how a layer's weights are packed.
Stored stored_in(const Layer& a) {
  if (a.int8) return Stored::int8;
  return a.narrow ? Stored::bfloat16 : Stored::as_computed;
}

// An item of a product over a step's sequences: a panel and a range of sequences.
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

// Return rows as a left factor.
template <class C>
Factor<C> factor(const Sources<C>& rows, int64_t depth) {
  return {rows.data, rows.stride, depth};
}

// Round the factors of a layer's rows if products take bytes, into `room`; absent ones have no data.
template <class C, size_t count>
void round_factors(const Layer& a, const LayerPlan& plan, Member& member, char* room,
                   Factor<C> (&factors)[count]) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (!a.int8) return;
    for (Factor<C>& x : factors)
      if (x.data) x.bytes = take_bytes(room, a.B, x.depth);
    member.share(blocks(a, plan, count), [&](int64_t item) {
      const Block block(a, plan, item);
      const Factor<C>& x = factors[block.panel];
      for (int64_t b = block.b; x.data && b < block.b + block.rows; ++b)
        round_row(x.data + b * x.stride, x.depth, x.bytes, b);
    });
  }
}

// ---- cells --------------------------------------------------------------------------------------

static inline Vec<float> tanh_of(Vec<float> x) {
  Vec<float> z[1] = {x}, half[1];
  half_tanh(z, half);
  return half[0] * -2.f;
}
static inline Vec<double> tanh_of(Vec<double> x) {
  for (int i = 0; i < Vector<double>::width; ++i) x[i] = __builtin_tanh(x[i]);
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

// Return a buffer for a history's packed parameters, which all steps read, or null.
template <class C>
void* take_features(const Problem& a, const History& h, bool back, Scratch<C>& room) {
  if (!has_history(h) || !h.filters_count) return nullptr;
  return room.take(VARIANT::coverage.features_size(a, h, back) / sizeof(C));
}

template <class Call>
void pack_parameters_once(Call a, void* features, bool back) {
  a.features = features;
  VARIANT::coverage.pack_parameters(a, a, back);
}

// Run consecutive passes, item by item if they have equally many items.
template <class Call>
void run_passes(const Call&, const cpu::Plan&, Member&, void*) {}
template <class Call, class Of, class... Rest>
void run_passes(const Call& a, const cpu::Plan& plan, Member& member, void* own, const Pass<Of>& pass,
                const Rest&... rest) {
  const int64_t items = pass.items(a, plan);
  const bool alike = ((rest.items(a, plan) == items) && ...);
  member.share(items, [&](int64_t item) {
    pass.run(a, plan, item, own);
    if (alike) (rest.run(a, plan, item, own), ...);
  });
  if (!alike) run_passes(a, plan, member, own, rest...);
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
