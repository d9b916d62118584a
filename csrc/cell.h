// The cells of a recurrent layer, one formula for CPU and CUDA. V is a scalar or a vector, C is its
// element type; `Math<C>` provides tanh and sigmoid of a V.
#pragma once
#include "score.h"

namespace attnfast {

enum class Cell { tanh, gru, lstm };

namespace {

constexpr int kMostGates = 4;

// Return the number of gates in the parameters of a cell.
constexpr int gates_of(Cell cell) { return cell == Cell::gru ? 3 : cell == Cell::lstm ? 4 : 1; }
// Return the number of values per unit that the backward reads, and the number of sums per unit
// that have a gradient.
constexpr int saved_of(Cell cell) { return cell == Cell::tanh ? 0 : 4; }
constexpr int sums_of(Cell cell) { return cell == Cell::tanh ? 1 : 4; }
// Return the sum to which a gate's product with the state is added. A GRU's third gate has a
// separate sum.
ATTNFAST_DEVICE constexpr int sum_index(Cell cell, int gate) {
  return cell == Cell::gru && gate == 2 ? 3 : gate;
}

// A cell type as a compile-time constant.
template <Cell K>
struct KnownCell {
  static constexpr Cell cell = K;
  static constexpr int gates = gates_of(K), saved = saved_of(K), sums = sums_of(K);
};
template <class F>
inline void by_cell(Cell cell, const F& f) {
  if (cell == Cell::gru) f(KnownCell<Cell::gru>{});
  else if (cell == Cell::lstm) f(KnownCell<Cell::lstm>{});
  else f(KnownCell<Cell::tanh>{});
}

// The values of a unit at one step.
template <class V>
struct Unit {
  V gates[kMostGates], state, cell;
};

// Apply dropout or zoneout to a new state, with the mask's factor.
template <class V>
ATTNFAST_DEVICE inline V dropped(V now, V before, V factor, bool zoneout) {
  return zoneout ? before + factor * (now - before) : now * factor;
}
// Propagate a gradient through it; with zoneout, the rest goes to the previous state.
template <class V>
ATTNFAST_DEVICE inline void take_through(V factor, bool zoneout, V& gradient, V& past) {
  if (zoneout) past = gradient - factor * gradient;
  gradient *= factor;
}
// Return the state before it; any value where the factor is 0, because it has no gradient there.
template <class V>
ATTNFAST_DEVICE inline V undropped(V value, V before, V factor, bool zoneout) {
  if (zoneout) value -= before - factor * before;
  return factor == 0 ? V{} : value / factor;
}

// Run a cell on the sums `x` over inputs and state, the previous state and an LSTM's previous cell
// state. For a GRU's third gate, x[2] is the sum over inputs and x[3] the sum over the state.
template <Cell K, class C, template <class> class Math, class V>
ATTNFAST_DEVICE inline __attribute__((always_inline)) Unit<V> cell_forward(const V (&x)[kMostGates],
                                                                           V state, V cell) {
  Unit<V> u = {};
  if constexpr (K == Cell::tanh) {
    u.state = Math<C>::tanh(x[0]);
  } else if constexpr (K == Cell::gru) {
    const V r = Math<C>::sigmoid(x[0]), z = Math<C>::sigmoid(x[1]), n = Math<C>::tanh(x[2] + r * x[3]);
    u.state = n + z * (state - n);
    u.gates[0] = r, u.gates[1] = z, u.gates[2] = n, u.gates[3] = x[3];
  } else {
    const V i = Math<C>::sigmoid(x[0]), f = Math<C>::sigmoid(x[1]), g = Math<C>::tanh(x[2]),
            o = Math<C>::sigmoid(x[3]);
    u.cell = f * cell + i * g;
    u.state = o * Math<C>::tanh(u.cell);
    u.gates[0] = i, u.gates[1] = f, u.gates[2] = g, u.gates[3] = o;
  }
  return u;
}

// Run the backward of a cell. `g` is the gradient of the new state, `grad_cell` that of the new
// cell state. Return the gradients of the sums, and those of the previous state and cell state that
// do not pass through the sums.
template <Cell K, class C, template <class> class Math, class V>
ATTNFAST_DEVICE inline __attribute__((always_inline)) Unit<V> cell_backward(const V (&gates)[kMostGates],
                                                                            V state, V before, V cell,
                                                                            V cell_before, V g,
                                                                            V grad_cell) {
  Unit<V> u = {};
  if constexpr (K == Cell::tanh) {
    u.gates[0] = g * ((C)1 - state * state);
  } else if constexpr (K == Cell::gru) {
    const V r = gates[0], z = gates[1], n = gates[2];
    const V to_n = g * ((C)1 - z) * ((C)1 - n * n);
    u.gates[0] = to_n * gates[3] * r * ((C)1 - r);
    u.gates[1] = g * (before - n) * z * ((C)1 - z);
    u.gates[2] = to_n;
    u.gates[3] = to_n * r;
    u.state = g * z;
  } else {
    const V i = gates[0], f = gates[1], c = gates[2], o = gates[3], t = Math<C>::tanh(cell);
    const V to_cell = grad_cell + g * o * ((C)1 - t * t);
    u.gates[0] = to_cell * c * i * ((C)1 - i);
    u.gates[1] = to_cell * cell_before * f * ((C)1 - f);
    u.gates[2] = to_cell * i * ((C)1 - c * c);
    u.gates[3] = g * t * o * ((C)1 - o);
    u.cell = to_cell * f;
  }
  return u;
}

}  // namespace
}  // namespace attnfast
