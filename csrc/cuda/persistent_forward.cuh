// The forward of a recurrent layer with attention in one launch. The phases of a step, with a
// wait of all blocks after each, are
//   products of the state: a block computes some rows of the concatenated parameters (recurrent_loop.h);
//   attention: the blocks divide the sequences and, if there are fewer sequences than blocks, the keys
//     of each; the blocks of a sequence then join its parts;
//   cell: a block computes some units of all sequences, first the product of the fed vector with the
//     weights of their gates, then the cell.
#pragma once
#include "persistent.cuh"

namespace attnfast {
namespace {

struct PersistentForward : PersistentLayer {
  // The rows are the steps. The query is a row of `state_products`, unless it is the state.
  Forward attends;
  View added;  // to the context, or absent: see put_context
  LoopWeight fed_weight, state_weight;
  const float* state_bias;
  View input_sums, states, cells, saved_gates, fed;
  Rows2 hidden, first_cell, feed, bias_ih, mask, seen;
  const int64_t* target_lengths;

  __host__ __device__ LoopSizes sizes() const {
    return LoopSizes(*this, attends, share_of_block(H, blocks) * gates, fed_weight.inputs,
                     share_of_block(state_rows, blocks), state_weight.inputs);
  }
};

// The part of the weights' rows that a block multiplies.
struct LoopShare {
  int units, first_unit, outputs, first_output;
};

// Fill a block's columns of row t of state_products from the state before step t.
__device__ inline void multiply_state(const PersistentForward& a, const BlockBuffers& buffers,
                                      const LoopShare& share, int t) {
  const Rows2 state = a.seen.data ? a.seen : t ? rows_of_step(a.states, t - 1) : a.hidden;
  const Rows<float> x = {static_cast<const float*>(state.data), state.stride, a.B};
  const Rows2 out = rows_of_step(a.state_products, t);
  const int row = threadIdx.x / kTileOutputs;  // a row's outputs are stored together
  multiply(
      buffers, buffers.state_weight, share.outputs, kTileOutputs, a.state_weight.inputs, x,
      [](int) { return 0; },
      [&](int b0, int, const LoopSums& sums) {
        for (int i = threadIdx.x % kTileOutputs; b0 + row < x.count && i < share.outputs;
             i += kTileOutputs) {
          const int output = share.first_output + i;
          *at<float>(out, b0 + row, output) = a.state_bias[output] + sums(i, row);
        }
      });
}

// Run the cell at step t.
template <Cell K>
__device__ void run_cells(const PersistentForward& a, const BlockBuffers& buffers, const LoopShare& share,
                          int t) {
  constexpr int gates = KnownCell<K>::gates, units = kTileOutputs / gates;
  const bool fed_now = a.attends_first || t;
  const Rows2 fed = fed_now ? rows_of_step(a.fed, a.attends_first ? t : t - 1) : a.feed;
  const Rows2 products = rows_of_step(a.state_products, t);
  const CellStep step = {
      .B = a.B,
      .H = a.H,
      .t = t,
      .target_lengths = a.target_lengths,
      .of_input = rows_of_step(a.input_sums, t),
      .bias_ih = a.bias_ih,
      .state_products = {at<float>(products, 0, a.first_gate), products.stride},
      .before = t ? rows_of_step(a.states, t - 1) : a.hidden,
      .cell_before = t ? rows_of_step(a.cells, t - 1) : a.first_cell,
      .masks = {{a.mask}, 1},
      .state = rows_of_step(a.states, t),
      .cell = rows_of_step(a.cells, t),
      .gates = rows_of_step(a.saved_gates, t),
      .seen = a.seen,
  };
  const Rows<float> x = {static_cast<const float*>(fed.data), fed.stride, a.B};
  if (share.units == 0) return;
  const int row = threadIdx.x / share.units, unit = threadIdx.x % share.units, i = share.first_unit + unit;
  const auto takes = [&](int b0) { return row < min(kTileRows, x.count - b0); };
  multiply(
      buffers, buffers.fed_weight, share.units * gates, units * gates, fed.data ? a.fed_weight.inputs : 0,
      x, [&](int b0) { return takes(b0) ? read_unit<float, K>(step, b0 + row, i) : UnitInputs<float>{}; },
      [&](int b0, UnitInputs<float> in, const LoopSums& sums) {
        if (!takes(b0)) return;
        for (int gate = 0; gate < gates; ++gate) in.of_input[gate] += sums(unit * gates + gate, row);
        run_unit<float, K>(step, b0 + row, i, in);
      });
}

// Run attention at step t for a block's part of sequence b, which has n keys. The query is in row
// `from`.
__device__ inline void attend(const PersistentForward& a, const BlockBuffers& buffers, int b, int n, int t,
                              int from) {
  const Forward& given = a.attends;
  const int lane = threadIdx.x % 32, parts = a.parts_of_row, part = blockIdx.x % parts;
  const Tile tile = {b, 0, 0, t};
  const auto [seen, column, key, value] = own_keys(given, buffers, tile, n, part, parts);
  const int keys = key.count;
  float* const weights = at<float>(given.weights, tile, t);
  clear_unseen(given, seen, part, parts, weights);
  const float* q = given.query.data ? at<float>(given.query, tile, from)
                   : from           ? at<float>(a.states, tile, from - 1)
                                    : at<float>(a.hidden, b, 0);
  __syncthreads();  // the scores of the previous sequence have been read
  const float* w = given.score == Score::dot ? nullptr : at<float>(given.score_vector, tile, 0);
  by_score_on_device(given.score, [&, column = column](auto known) {
    score_own_keys<decltype(known)::score>(q, w, key, given.A, [&](int j, float s) {
      buffers.scores()[j] = finish_score<float>(given, tile, t, column + j, s, kLeast<float>);
    });
  });
  __syncthreads();
  SoftmaxPart<float> all = {-INFINITY, 0, {}};
  for (int j = lane; j < keys; j += 32) all.top = fmax(all.top, buffers.scores()[j]);
  all.top = of_warp<Max>(all.top);
  if (all.top == -INFINITY) all.top = 0;
  for (int j = lane; j < (keys + kLoadsInFlight - 1) / kLoadsInFlight * kLoadsInFlight; j += 32) {
    const float p = j < keys ? exp(buffers.scores()[j] - all.top) : 0;
    all.mass += p;
    if (threadIdx.x < 32) buffers.shares()[j] = p;
  }
  all.mass = of_warp<Add>(all.mass);
  __syncthreads();

  const auto weighted_sum = [&, value = value, keys = keys](int c) {
    float sum = 0;
#pragma unroll 1
    for (int j = 0; j < keys; j += kLoadsInFlight) {
      float v[kLoadsInFlight];
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i)
        v[i] = j + i < keys ? value.data[(j + i) * value.stride + c] : 0;
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {  // a hidden value may be NaN
        const float p = buffers.shares()[j + i];
        sum += p == 0 ? 0 : p * v[i];
      }
    }
    return sum;
  };
  if (parts == 1) {
    for (int c = threadIdx.x; c < given.Dv; c += kLoopThreads)
      put_context<float>(given, a.added, tile, c, weighted_sum(c) * all.share());
  } else {
    float* const out = at<float>(a.parts, tile, part);
    for (int c = threadIdx.x; c < given.Dv; c += kLoopThreads) out[c] = weighted_sum(c);
    const auto end = [&](int i) {
      return reinterpret_cast<SoftmaxPart<float>*>(at<float>(a.parts, tile, i) + given.Dv);
    };
    if (threadIdx.x == 0) *end(part) = all;
    wait_for_all(a.arrivals + kArrival * (b + 1), parts * (t + 1));
    const int columns = share_of_block(given.Dv, parts), last = min((part + 1) * columns, int(given.Dv));
    int c = part * columns + threadIdx.x;
    float of_part[kMostParts];
    const auto load_column = [&] {
      const float* const from = at<float>(a.parts, tile, 0) + c;
#pragma unroll
      for (int i = 0; i < kMostParts; ++i) of_part[i] = i < parts && c < last ? from[i * a.parts.row] : 0;
    };
    load_column();
    const SoftmaxPart<float> mine = lane < parts ? *end(lane) : SoftmaxPart<float>{};
    all.top = of_warp<Max>(mine.mass == 0 ? -INFINITY : mine.top);
    if (all.top == -INFINITY) all.top = 0;
    const float faded = mine.faded(all.top);
    all.mass = of_warp<Add>(mine.mass * faded);
    if (threadIdx.x < kMostParts) buffers.shares()[lane] = faded;
    __syncthreads();
    for (; c < last; c += kLoopThreads, load_column()) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kMostParts; ++i) sum += buffers.shares()[i] * of_part[i];
      put_context<float>(given, a.added, tile, c, sum * all.share());
    }
  }
  const float factor = all.share();
  for (int j = threadIdx.x; j < keys; j += kLoopThreads)
    weights[column + j] =
        buffers.scores()[j] == -INFINITY ? 0 : exp(buffers.scores()[j] - all.top) * factor;
}

__global__ void __launch_bounds__(kLoopThreads, 1) persistent_forward(const PersistentForward a) {
  ATTNFAST_DYNAMIC_SHARED(Four, shared);
  const BlockBuffers buffers = buffers_of(a, a.sizes(), shared);
  LoopShare share;
  const int units = share_of_block(a.H, gridDim.x), outputs = share_of_block(a.state_rows, gridDim.x);
  share.first_unit = blockIdx.x * units;
  share.first_output = blockIdx.x * outputs;
  share.units = max(0, min(units, a.H - share.first_unit));
  share.outputs = max(0, min(outputs, a.state_rows - share.first_output));
  const auto cache_weight = [&](const LoopWeight& w, int rows, Four* to, const auto& row) {
    copy_padded(rows, w.inputs, pitch_of(fours_of(w.inputs)), to,
                [&](int i) { return w.data + row(i) * w.row; });
  };
  cache_weight(a.fed_weight, share.units * a.gates, buffers.fed_weight,
               [&](int i) { return int64_t{i % a.gates} * a.H + share.first_unit + i / a.gates; });
  cache_weight(a.state_weight, share.outputs, buffers.state_weight,
               [&](int i) { return int64_t{share.first_output} + i; });
  cache_memory(a, a.attends, buffers);
  __syncthreads();
  const int n = keys_of_first(a, a.attends);
  unsigned turn = 0;
  const auto wait = [&] { wait_for_all(a.arrivals, ++turn * gridDim.x); };
  for (int t = 0; t <= a.T; ++t) {  // attention of step t, or of the step before with the new state
    if (t == a.T && a.attends_first) break;
    multiply_state(a, buffers, share, t);
    wait();
    if (a.attends_first || t) {
      for_own_sequences(a, a.attends, n, [&](int b, int keys) {
        attend(a, buffers, b, keys, a.attends_first ? t : t - 1, t);
      });
      wait();
    }
    if (t == a.T) break;
    switch (a.cell) {
      case Cell::tanh: run_cells<Cell::tanh>(a, buffers, share, t); break;
      case Cell::gru: run_cells<Cell::gru>(a, buffers, share, t); break;
      case Cell::lstm: run_cells<Cell::lstm>(a, buffers, share, t);
    }
    wait();
  }
}

}  // namespace
}  // namespace attnfast
