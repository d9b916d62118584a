// The recurrent cell, `cell_step`, and its backward: one thread takes one unit of a sequence. The
// products are GEMMs (recurrent_loop.h has the loop), attention is in attention.cuh and step.cuh.
#pragma once
#include "../recurrent.h"
#include "score.cuh"

namespace attnfast {
namespace {

template <class C>
struct Math {
  static __device__ C tanh(C x) { return ::tanh(x); }
  static __device__ C sigmoid(C x) { return C(1) / (C(1) + exp(-x)); }
};

// Rows [B, n] of a step; `data` is null if absent.
struct Rows2 {
  void* data = nullptr;
  int64_t stride = 0;
};

// The sequence and the unit that a thread takes.
struct OwnUnit {
  int64_t b, i;
  bool exists;
  __device__ explicit OwnUnit(int64_t units) {
    const int64_t parts = (units + kThreads - 1) / kThreads;
    b = blockIdx.x / parts;
    i = blockIdx.x % parts * kThreads + threadIdx.x;
    exists = i < units;
  }
};
template <class C>
__device__ C* at(const Rows2& x, int64_t b, int64_t i) {
  return static_cast<C*>(x.data) + b * x.stride + i;
}
template <class C>
__device__ C read(const Rows2& x, int64_t b, int64_t i) {
  return x.data ? *at<C>(x, b, i) : C(0);
}

// ---- copies of a state --------------------------------------------------------------------------

constexpr int kMostMasks = 3;

// The masks of a state's copies, after the first copy, which is the state itself. A mask without
// data is 0.
struct Masks {
  Rows2 rows[kMostMasks];
  int count = 0;
};

// Store a unit's state and its product with each mask, side by side in rows [B, (1 + count) H].
template <class C>
__device__ void put_copies(const Masks& masks, const Rows2& seen, int64_t b, int64_t i, int64_t H,
                           C state) {
  if (!seen.data) return;
  *at<C>(seen, b, i) = state;
#pragma unroll
  for (int n = 0; n < kMostMasks; ++n)
    if (n < masks.count) *at<C>(seen, b, (n + 1) * H + i) = state * read<C>(masks.rows[n], b, i);
}
template <class C>
__global__ void __launch_bounds__(kThreads) copy_state(int64_t H, Rows2 state, Masks masks, Rows2 seen) {
  const OwnUnit own(H);
  if (own.exists) put_copies<C>(masks, seen, own.b, own.i, H, *at<C>(state, own.b, own.i));
}

// ---- the cell -----------------------------------------------------------------------------------

struct CellStep {
  int64_t B, H, t;
  const int64_t* target_lengths;
  Rows2 of_input, bias_ih;  // of_input aliases `gates`, or `state` of a tanh cell
  Rows2 state_products;     // includes the biases
  Rows2 before, cell_before;
  Rows2 dropout_state, dropout_cell;  // masks of the new state and cell state
  bool zoneout;
  Masks masks;                     // of the copies
  Rows2 state, cell, gates, seen;  // out; seen: copies of the state, or absent
};

// The inputs of a unit.
template <class C>
struct UnitInputs {
  C of_input[kMostGates], state_products[kMostGates], state, cell;
};

template <class C, Cell K>
__device__ UnitInputs<C> read_unit(const CellStep& a, int64_t b, int64_t i) {
  UnitInputs<C> in = {};
  for (int gate = 0; gate < KnownCell<K>::gates; ++gate) {
    const int64_t unit = gate * a.H + i;
    in.of_input[gate] = *at<C>(a.of_input, b, unit);
    in.state_products[gate] = *at<C>(a.state_products, b, unit);
  }
  in.state = *at<C>(a.before, b, i);
  in.cell = read<C>(a.cell_before, b, i);
  return in;
}

template <class C, Cell K>
__device__ void run_unit(const CellStep& a, int64_t b, int64_t i, const UnitInputs<C>& in) {
  using Known = KnownCell<K>;
  C sums[kMostGates] = {};
  for (int gate = 0; gate < Known::gates; ++gate) {
    sums[gate] = in.of_input[gate] + read<C>(a.bias_ih, 0, gate * a.H + i);
    sums[sum_index(K, gate)] += in.state_products[gate];
  }
  Unit<C> u = cell_forward<K, C, Math, C>(sums, in.state, in.cell);
  if (a.dropout_state.data) u.state = dropped(u.state, in.state, *at<C>(a.dropout_state, b, i), a.zoneout);
  if constexpr (K == Cell::lstm)
    if (a.dropout_cell.data) u.cell = dropped(u.cell, in.cell, *at<C>(a.dropout_cell, b, i), a.zoneout);
  if (a.target_lengths && a.t >= a.target_lengths[b]) u = Unit<C>{};
  *at<C>(a.state, b, i) = u.state;
  if constexpr (K == Cell::lstm) *at<C>(a.cell, b, i) = u.cell;
  for (int gate = 0; gate < Known::saved; ++gate) *at<C>(a.gates, b, gate * a.H + i) = u.gates[gate];
  put_copies<C>(a.masks, a.seen, b, i, a.H, u.state);
}

template <class C, Cell K>
__global__ void __launch_bounds__(kThreads) cell_step(const CellStep a) {
  const OwnUnit own(a.H);
  if (own.exists) run_unit<C, K>(a, own.b, own.i, read_unit<C, K>(a, own.b, own.i));
}

// The gradients that reach a state from other steps and its query.
struct Reaching {
  Rows2 carried;  // those of its copies
  Masks masks;
  Rows2 grad_query;  // gradient of the query, if it is the state itself, or absent

  template <class C>
  __device__ C sum(int64_t b, int64_t i, int64_t H) const {
    C g = *at<C>(carried, b, i) + read<C>(grad_query, b, i);
#pragma unroll
    for (int n = 0; n < kMostMasks; ++n)
      if (n < masks.count) g += *at<C>(carried, b, (n + 1) * H + i) * read<C>(masks.rows[n], b, i);
    return g;
  }
};

struct CellStepBackward {
  int64_t B, H, t;
  const int64_t* target_lengths;
  Rows2 grad_state, grad_cell_given, gates, state, before, cell, cell_before, dropout_state, dropout_cell;
  bool zoneout;
  Reaching reaching;               // in; out: the previous state's gradient not through the sums
  Rows2 grad_cell;                 // the same for the cell
  Rows2 of_input, state_products;  // out, the gradients of the sums
};

// Run the backward of a unit, whose state's gradient from other steps is g.
template <class C, Cell K>
__device__ void run_unit_backward(const CellStepBackward& a, int64_t b, int64_t i, C g) {
  using Known = KnownCell<K>;
  Unit<C> u = {};
  if (a.target_lengths && a.t >= a.target_lengths[b]) {  // padding: pass the gradient through
    u.state = g;
    u.cell = read<C>(a.grad_cell, b, i);
  } else {
    C gates[kMostGates] = {};
    for (int gate = 0; gate < Known::saved; ++gate) gates[gate] = *at<C>(a.gates, b, gate * a.H + i);
    const C before = *at<C>(a.before, b, i), cell_before = read<C>(a.cell_before, b, i);
    C grad_cell = read<C>(a.grad_cell, b, i) + read<C>(a.grad_cell_given, b, i), past_cell = 0,
      past_state = 0;
    C cell = read<C>(a.cell, b, i), state = *at<C>(a.state, b, i);
    g += *at<C>(a.grad_state, b, i);
    if constexpr (K == Cell::lstm)
      if (a.dropout_cell.data) {
        cell = gates[1] * cell_before + gates[0] * gates[2];  // before the dropout
        take_through(*at<C>(a.dropout_cell, b, i), a.zoneout, grad_cell, past_cell);
      }
    if (a.dropout_state.data) {
      const C factor = *at<C>(a.dropout_state, b, i);
      take_through(factor, a.zoneout, g, past_state);
      state = undropped(state, before, factor, a.zoneout);
    }
    u = cell_backward<K, C, Math, C>(gates, state, before, cell, cell_before, g, grad_cell);
    u.state += past_state;
    u.cell += past_cell;
  }
  *at<C>(a.reaching.carried, b, i) = u.state;
  if constexpr (K == Cell::lstm) *at<C>(a.grad_cell, b, i) = u.cell;
  for (int gate = 0; gate < Known::gates; ++gate) {
    *at<C>(a.of_input, b, gate * a.H + i) = u.gates[gate];
    *at<C>(a.state_products, b, gate * a.H + i) = u.gates[sum_index(K, gate)];
  }
}

template <class C, Cell K>
__global__ void __launch_bounds__(kThreads) cell_step_backward(const CellStepBackward a) {
  const OwnUnit own(a.H);
  if (!own.exists) return;
  const C g = a.reaching.sum<C>(own.b, own.i, a.H);
  for (int n = 1; n <= a.reaching.masks.count; ++n) *at<C>(a.reaching.carried, own.b, n * a.H + own.i) = 0;
  run_unit_backward<C, K>(a, own.b, own.i, g);
}

// Compute the gradient of the state before the first step; `out` may alias one of its terms.
template <class C>
__global__ void __launch_bounds__(kThreads) reach_first(int64_t H, Reaching reaching, Rows2 out) {
  const OwnUnit own(H);
  if (own.exists) *at<C>(out, own.b, own.i) = reaching.sum<C>(own.b, own.i, H);
}

// ---- masks of a step and gates ------------------------------------------------------------------

// Compute out = x times a mask, or add it to out, for rows [B, columns]; out may alias x.
template <class C>
__global__ void __launch_bounds__(kThreads)
    multiply_mask(int64_t columns, Rows2 x, Rows2 mask, Rows2 out, bool adds) {
  const OwnUnit own(columns);
  if (!own.exists) return;
  const C product = *at<C>(x, own.b, own.i) * *at<C>(mask, own.b, own.i);
  C* const to = at<C>(out, own.b, own.i);
  *to = adds ? *to + product : product;
}

// Multiply contexts by the gates, whose sums these are.
template <class C>
__global__ void __launch_bounds__(kThreads)
    gate_contexts(int64_t columns, Rows2 sums, Rows2 contexts, Rows2 gates) {
  const OwnUnit own(columns);
  if (!own.exists) return;
  const C gate = Math<C>::sigmoid(*at<C>(sums, own.b, own.i));
  *at<C>(gates, own.b, own.i) = gate;
  *at<C>(contexts, own.b, own.i) *= gate;
}

// Replace the gradients of gated contexts by those of the contexts, and compute those of the sums.
template <class C>
__global__ void __launch_bounds__(kThreads)
    gate_backward(int64_t columns, Rows2 gates, Rows2 gated, Rows2 grad_contexts, Rows2 grad_sums) {
  const OwnUnit own(columns);
  if (!own.exists) return;
  const C gate = *at<C>(gates, own.b, own.i);
  C* const grad = at<C>(grad_contexts, own.b, own.i);
  *at<C>(grad_sums, own.b, own.i) = *grad * *at<C>(gated, own.b, own.i) * (C(1) - gate);
  *grad *= gate;
}

// ---- input feeding ------------------------------------------------------------------------------

struct Feed {
  int64_t B, F, Dv;
  Rows2 contexts, weight;  // [B, Dv], [F, Dv]
  Rows2 state_products;    // [B, F]
  bool has_tanh;
  Rows2 attentional;  // out, like these
};

// Compute the attentional vector: the contributions of context and state are added, and if it has a tanh
// that is applied. The context's product is computed here, for a tile of sequences and features as if
// they were a score's queries and keys.
template <class C>
__global__ void __launch_bounds__(kThreads) feed(const Feed a) {
  __shared__ Staged<C> staged;
  const int64_t parts = (a.F + kKeys - 1) / kKeys;
  const int64_t b = blockIdx.x / parts * kQueries, i = blockIdx.x % parts * kKeys;
  const Rows<C> contexts = {at<C>(a.contexts, b, 0), a.contexts.stride, up_to(kQueries, a.B - b)};
  const Rows<C> weight = {at<C>(a.weight, i, 0), a.weight.stride, up_to(kKeys, a.F - i)};
  const auto none = [](int, int) { return C(0); };
  score_tile<Score::dot>(contexts, weight, static_cast<const C*>(nullptr), a.Dv, staged, none);
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; lane < weight.count && row < contexts.count; row += kWarps) {
    const C sum = staged.score(row, lane) + *at<C>(a.state_products, b + row, i + lane);
    *at<C>(a.attentional, b + row, i + lane) = a.has_tanh ? Math<C>::tanh(sum) : sum;
  }
}

// Compute the gradient of the sum from that of the attentional vector, which may have been multiplied by
// a mask.
template <class C>
__global__ void __launch_bounds__(kThreads)
    attentional_backward(int64_t features, bool has_tanh, Rows2 attentional, Rows2 mask, Rows2 grad,
                         Rows2 out) {
  const OwnUnit own(features);
  if (!own.exists) return;
  const C m = mask.data ? *at<C>(mask, own.b, own.i) : C(1);
  const C f = m == 0 || !has_tanh ? C(0) : *at<C>(attentional, own.b, own.i) / m;
  *at<C>(out, own.b, own.i) = m * *at<C>(grad, own.b, own.i) * (C(1) - f * f);
}

// ---- a history ----------------------------------------------------------------------------------

// Set lengths [T, B] of the keys at every step, 0 beyond a target's end, where the history does not
// change. They are initially 0.
__global__ void __launch_bounds__(kThreads)
    put_lengths_of_steps(int64_t T, int64_t B, int64_t Tk, const int64_t* target_lengths,
                         const int64_t* lengths, int64_t* out) {
  const OwnUnit own(T);
  if (own.exists && own.i < target_lengths[own.b]) out[own.i * B + own.b] = lengths ? lengths[own.b] : Tk;
}

// Compute the coverage before every step, [B, T, Tk], from the first [B, Tk] and the weights [B, T, Tk].
template <class C>
__global__ void __launch_bounds__(kThreads)
    cover_steps(int64_t T, int64_t Tk, Rows2 first, Rows2 inverse_fertility, Rows2 weights, Rows2 out) {
  const OwnUnit own(Tk);
  if (!own.exists) return;
  C coverage = *at<C>(first, own.b, own.i);
  for (int64_t t = 0; t < T; ++t) {
    *at<C>(out, own.b, t * Tk + own.i) = coverage;
    const C w = *at<C>(weights, own.b, t * Tk + own.i);
    coverage += inverse_fertility.data ? *at<C>(inverse_fertility, own.b, own.i) * w : w;
  }
}

// ---- padding ------------------------------------------------------------------------------------

// Clear rows [B, T, columns] beyond the targets' ends; T and columns are one dimension.
template <class C>
__global__ void __launch_bounds__(kThreads)
    clear_padding(int64_t numbers, int64_t columns, Rows2 x, const int64_t* target_lengths) {
  const OwnUnit own(numbers);
  if (own.exists && own.i / columns >= target_lengths[own.b]) *at<C>(x, own.b, own.i) = 0;
}

}  // namespace
}  // namespace attnfast
