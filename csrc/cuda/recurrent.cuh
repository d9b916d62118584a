// The recurrent cell, `cell_step`, and its backward: one thread takes one unit of a sequence. The
// products are GEMMs (recurrent_loop.h, which has the loop), attention is in attention.cuh and
// step.cuh.
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

// ---- the cell -----------------------------------------------------------------------------------

struct CellStep {
  int64_t B, H, t;
  const int64_t* target_lengths;
  Rows2 of_input, bias_ih;          // of_input aliases `gates`, or `state` of a tanh cell
  Rows2 state_products;             // includes the biases
  Rows2 before, cell_before, mask;  // mask: the dropout
  Rows2 state, cell, gates, seen;   // out; seen [B, 2 H]: the state, and the state times the mask
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
  if (a.target_lengths && a.t >= a.target_lengths[b]) u = Unit<C>{};
  *at<C>(a.state, b, i) = u.state;
  if constexpr (K == Cell::lstm) *at<C>(a.cell, b, i) = u.cell;
  for (int gate = 0; gate < Known::saved; ++gate) *at<C>(a.gates, b, gate * a.H + i) = u.gates[gate];
  if (!a.seen.data) return;
  *at<C>(a.seen, b, i) = u.state;
  *at<C>(a.seen, b, a.H + i) = u.state * *at<C>(a.mask, b, i);
}

template <class C, Cell K>
__global__ void __launch_bounds__(kThreads) cell_step(const CellStep a) {
  const OwnUnit own(a.H);
  if (own.exists) run_unit<C, K>(a, own.b, own.i, read_unit<C, K>(a, own.b, own.i));
}

// The gradients that reach a state from other steps and its query.
struct Reaching {
  Rows2 carried;  // [B, H], or [B, 2 H] with a mask, which is the dropout
  Rows2 mask;
  Rows2 grad_query;  // gradient of the query, if it is the state itself, or absent

  template <class C>
  __device__ C sum(int64_t b, int64_t i, int64_t H) const {
    const C masked = mask.data ? *at<C>(carried, b, H + i) * *at<C>(mask, b, i) : C(0);
    return *at<C>(carried, b, i) + masked + read<C>(grad_query, b, i);
  }
};

struct CellStepBackward {
  int64_t B, H, t;
  const int64_t* target_lengths;
  Rows2 grad_state, grad_cell_given, gates, state, before, cell, cell_before;
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
    const C grad_cell = read<C>(a.grad_cell, b, i) + read<C>(a.grad_cell_given, b, i);
    u = cell_backward<K, C, Math, C>(gates, *at<C>(a.state, b, i), *at<C>(a.before, b, i),
                                     read<C>(a.cell, b, i), read<C>(a.cell_before, b, i),
                                     g + *at<C>(a.grad_state, b, i), grad_cell);
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
  if (a.reaching.mask.data) *at<C>(a.reaching.carried, own.b, a.H + own.i) = 0;
  run_unit_backward<C, K>(a, own.b, own.i, g);
}

// Compute the gradient of the state before the first step; `out` may alias one of its terms.
template <class C>
__global__ void __launch_bounds__(kThreads) reach_first(int64_t H, Reaching reaching, Rows2 out) {
  const OwnUnit own(H);
  if (own.exists) *at<C>(out, own.b, own.i) = reaching.sum<C>(own.b, own.i, H);
}

// ---- input feeding ------------------------------------------------------------------------------

struct Feed {
  int64_t B, F, Dv;
  Rows2 contexts, weight;  // [B, Dv], [F, Dv]
  Rows2 state_products;    // [B, F]
  Rows2 attentional;       // out, like these
};

// Compute the attentional vector, tanh of the contributions of context and state, including the
// context's product: for a tile of sequences and features, as if they were a score's queries and
// keys.
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
  for (int row = threadIdx.x / 32; lane < weight.count && row < contexts.count; row += kWarps)
    *at<C>(a.attentional, b + row, i + lane) =
        tanh(staged.score(row, lane) + *at<C>(a.state_products, b + row, i + lane));
}

// Compute the gradient of the tanh's argument from that of the attentional vector, which may have been
// multiplied by a mask.
template <class C>
__global__ void __launch_bounds__(kThreads)
    attentional_backward(int64_t features, Rows2 attentional, Rows2 mask, Rows2 grad, Rows2 out) {
  const OwnUnit own(features);
  if (!own.exists) return;
  const C m = mask.data ? *at<C>(mask, own.b, own.i) : C(1);
  const C f = m == 0 ? C(0) : *at<C>(attentional, own.b, own.i) / m;
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
