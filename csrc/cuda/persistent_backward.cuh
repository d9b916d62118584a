// The backward of a recurrent layer with attention in one launch, from the last step to the first.
// The phases of a step, with a wait of all blocks after each, are
//   attention: as in the forward; the blocks of a sequence exchange their parts once;
//   state: the products of state_products with the transposed parameters, then the cell's backward;
//   fed: the products of the gates' gradients with the transposed columns of weight_ih for the fed vector.
// These products have many inputs and few outputs, so the blocks of a group divide the inputs of the
// group's outputs, and after a wait of the group they divide the outputs.
#pragma once
#include "persistent.cuh"

namespace attnfast {
namespace {

constexpr int kMostSplit = kLoadsInFlight;  // blocks of a group, at most

struct PersistentBackward : PersistentLayer {
  Backward attends;  // its rows are the steps
  View grad_query;   // a row of state_products, or grad_state, the same at every step
  Rows2 grad_state;  // the gradient of a query that is the state, or absent
  // Transposed: a row for each input, and `inputs` is their number.
  LoopWeight fed_weight, state_weight;
  int copies;      // of a state in a row: see StateParameters
  float* partial;  // [blocks of a group, outputs, B]
  View grad_states, grad_cells_given, saved_gates, states, cells, of_inputs;
  View grad_fed, attentional;  // attentional: absent if the contexts are fed
  Rows2 hidden, first_cell, mask, carried, grad_cell, grad_feed;
  const int64_t* target_lengths;

  __host__ __device__ int blocks_of_group() const { return min(blocks, kMostSplit); }
  __host__ __device__ int groups() const { return blocks / blocks_of_group(); }
  // Return the number of inputs that a block multiplies for its group's outputs.
  __host__ __device__ int slice(int inputs) const {
    return 16 * share_of_block(fours_of(inputs) / 4, blocks_of_group());
  }
  __host__ __device__ int fed_outputs() const { return share_of_block(F, groups()); }
  __host__ __device__ int units() const { return share_of_block(H, groups()); }
  __host__ __device__ LoopSizes sizes() const {
    return LoopSizes(*this, attends, fed_outputs(), slice(fed_weight.inputs), units() * copies,
                     slice(state_weight.inputs));
  }
};

// Copy columns of a transposed weight, each to a row of `to`; column(i) is the index of the i-th.
template <class Column>
__device__ void cache_columns(const LoopWeight& w, int first, int inputs, int columns, Four* to,
                              const Column& column) {
  const int pitch = 4 * pitch_of(fours_of(inputs));
  for (int k = threadIdx.x / 32; k < 4 * fours_of(inputs); k += kLoopWarps)
    for (int i = threadIdx.x % 32; i < columns; i += 32)
      to->x[i * pitch + k] = k < inputs ? w.data[(first + k) * w.row + column(i)] : 0;
}

// ---- products -----------------------------------------------------------------------------------

// A block's group, its part in the group, and the outputs or units that the group computes.
struct GroupShare {
  int group, part, first, count;
};

// Compute a group's outputs from the rows x; then call use(row, unit, sum) once for each row and unit,
// where sum(copy) is an output. Output i of the group is column(i) of all outputs, and copy n of a unit
// is output unit + n * count of the group. `waits` counts the group's waits.
template <class Column, class Use>
__device__ void multiply_split(const PersistentBackward& a, const BlockBuffers& buffers,
                               const GroupShare& share, const Four* weight, int copies, int stride,
                               int inputs, const Rows2& x, unsigned& waits, const Column& column,
                               const Use& use) {
  if (share.group >= a.groups()) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = a.blocks_of_group();
  const int slice = a.slice(inputs), first = share.part * slice;
  const int outputs = share.count * copies, own = max(0, min(slice, inputs - first));
  const Rows<float> rows = {static_cast<const float*>(x.data) + first, x.stride, a.B};
  multiply(
      buffers, weight, outputs, kTileOutputs, own, rows, [](int) { return 0; },
      [&](int b0, int, const LoopSums& sums) {
        for (int i = warp; b0 + lane < a.B && i < outputs; i += kLoopWarps)
          a.partial[(int64_t{share.part} * stride + column(i)) * a.B + b0 + lane] = sums(i, lane);
      });
  wait_for_all(a.arrivals + kArrival * (1 + a.B + share.group), ++waits * parts);
  const int each = share_of_block(share.count, parts), last = min((share.part + 1) * each, share.count);
  const int first_unit = share.part * each, units = last - first_unit;
  for (int i = threadIdx.x; i < units * a.B; i += kLoopThreads) {
    const int b = i / units, unit = first_unit + i % units;
    use(b, share.first + unit, [&](int copy) {
      const float* from = a.partial + int64_t{column(unit + copy * share.count)} * a.B + b;
      float of_part[kMostSplit], sum = 0;
#pragma unroll
      for (int n = 0; n < kMostSplit; ++n) of_part[n] = n < parts ? from[int64_t{n} * stride * a.B] : 0;
#pragma unroll
      for (int n = 0; n < kMostSplit; ++n) sum += of_part[n];
      return sum;
    });
  }
}

// ---- the phases of a step -----------------------------------------------------------------------

// Map row t + 1 of state_products to the gradient of the state after step t, and run the cell's backward.
template <Cell K>
__device__ void run_cells_backward(const PersistentBackward& a, const BlockBuffers& buffers,
                                   const GroupShare& share, int t, unsigned& waits) {
  const Rows2 products = rows_of_step(a.state_products, t);
  const CellStepBackward step = {
      .B = a.B,
      .H = a.H,
      .t = t,
      .target_lengths = a.target_lengths,
      .grad_state = rows_of_step(a.grad_states, t),
      .grad_cell_given = rows_of_step(a.grad_cells_given, t),
      .gates = rows_of_step(a.saved_gates, t),
      .state = rows_of_step(a.states, t),
      .before = t ? rows_of_step(a.states, t - 1) : a.hidden,
      .cell = rows_of_step(a.cells, t),
      .cell_before = t ? rows_of_step(a.cells, t - 1) : a.first_cell,
      .reaching = {a.carried, {{a.mask}, a.mask.data ? 1 : 0}, a.grad_state},
      .grad_cell = a.grad_cell,
      .of_input = rows_of_step(a.of_inputs, t),
      .state_products = {at<float>(products, 0, a.first_gate), products.stride},
  };
  multiply_split(
      a, buffers, share, buffers.state_weight, a.copies, a.copies * a.H, a.state_rows,
      rows_of_step(a.state_products, t + 1), waits,
      [&](int i) { return i / share.count * a.H + share.first + i % share.count; },
      [&](int b, int i, const auto& sum) {
        float g = step.reaching.sum<float>(b, i, a.H) + sum(0);
        if (a.copies > 1) g += sum(1) * *at<float>(a.mask, b, i);
        run_unit_backward<float, K>(step, b, i, g);
      });
}

// Store the gradient of the sum of an attentional vector's feature, given that of the feature.
__device__ inline void put_attentional(const PersistentBackward& a, int t, int b, int f, float grad) {
  const float x = *at<float>(rows_of_step(a.attentional, t), b, f);
  *at<float>(rows_of_step(a.state_products, t + 1), b, a.first_output + f) = grad * (1 - x * x);
}

// Add the gradient of the vector that was fed at step t, given those of the step's gates.
__device__ inline void multiply_fed(const PersistentBackward& a, const BlockBuffers& buffers,
                                    const GroupShare& share, int t, unsigned& waits) {
  const int to = a.attends_first ? t : t - 1;
  if (to < 0 && !a.grad_feed.data) return;
  multiply_split(
      a, buffers, share, buffers.fed_weight, 1, a.F, a.fed_weight.inputs, rows_of_step(a.of_inputs, t),
      waits, [&](int i) { return share.first + i; },
      [&](int b, int f, const auto& sum) {
        if (to < 0) return void(*at<float>(a.grad_feed, b, f) = sum(0));
        float* const grad = at<float>(rows_of_step(a.grad_fed, to), b, f);
        const float all = *grad + sum(0);
        *grad = all;
        if (a.attentional.data) put_attentional(a, to, b, f, all);
      });
}

// The sums of a part's column: see QueryPart.
struct QuerySums {
  float centred, slopes;
};

// Return the sums of column c over a part's keys; `terms` are P_j (x_j - m).
template <Score S>
__device__ QuerySums sum_keys(const BlockBuffers& buffers, const Rows<float>& key, float q, int c) {
  float centred = 0, slopes = 0;
#pragma unroll 1
  for (int j = 0; j < key.count; j += kLoadsInFlight) {
    float k[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i)
      k[i] = j + i < key.count ? key.data[(j + i) * key.stride + c] : 0;
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const float s = feature_slope<S>(q, k[i]);
      const bool sees = buffers.shares()[j + i] != 0;  // a hidden key may be NaN
      centred += sees ? buffers.terms()[j + i] * s : 0;
      slopes += sees ? buffers.shares()[j + i] * s : 0;
    }
  }
  return {centred, slopes};
}

// Run attention's backward at step t, for a block's part of sequence b, which has n keys, and store
// the query's gradient in row `to`.
__device__ inline void attend_backward(const PersistentBackward& a, const BlockBuffers& buffers, int b,
                                       int n, int t, int to) {
  const Backward& given = a.attends;
  const int lane = threadIdx.x % 32, parts = a.parts_of_row, part = blockIdx.x % parts;
  const Tile tile = {b, 0, 0, t};
  const auto [seen, column, key, value] = own_keys(given, buffers, tile, n, part, parts);
  const int keys = key.count, padded = (keys + kLoadsInFlight - 1) / kLoadsInFlight * kLoadsInFlight;
  float* const grad_score = at<float>(given.grad_score, tile, t);
  clear_unseen(given, seen, part, parts, grad_score);
  const float* const weights = at<float>(given.weights, tile, t) + column;
  const float* const more =
      given.grad_weights.data ? at<float>(given.grad_weights, tile, t) + column : nullptr;
  __syncthreads();  // the terms of the previous sequence have been read
  for (int j = threadIdx.x; j < padded; j += kLoopThreads) buffers.shares()[j] = j < keys ? weights[j] : 0;
  score_own_keys<Score::dot>(at<float>(given.grad_context, tile, t), nullptr, value, given.Dv,
                             [&](int j, float x) { buffers.scores()[j] = more ? x + more[j] : x; });
  __syncthreads();
  float mass = 0;
  QueryPart<float> own = {};
  for (int j = lane; j < keys; j += 32)
    if (const float p = buffers.shares()[j]; p != 0) mass += p, own.product += p * buffers.scores()[j];
  mass = of_warp<Add>(mass);
  own.product = of_warp<Add>(own.product);
  own.mean = mass == 0 ? 0 : own.product / mass;
  if (threadIdx.x < 32)
    for (int j = lane; j < padded; j += 32)
      buffers.terms()[j] =
          buffers.shares()[j] == 0 ? 0 : buffers.shares()[j] * (buffers.scores()[j] - own.mean);
  __syncthreads();
  const float* const q = at<float>(given.query, tile, t);
  const auto sums = [&, key = key](int c) {
    switch (given.score) {
      case Score::dot: return sum_keys<Score::dot>(buffers, key, q[c], c);
      case Score::tanh: return sum_keys<Score::tanh>(buffers, key, q[c], c);
      case Score::relu: return sum_keys<Score::relu>(buffers, key, q[c], c);
      default: return sum_keys<Score::leaky_relu>(buffers, key, q[c], c);
    }
  };
  const float* const w = given.score == Score::dot ? nullptr : at<float>(given.score_vector, tile, 0);
  const auto put = [&](int c, float sum) {
    at<float>(a.grad_query, tile, to)[c] = float(given.scale) * sum * (w ? w[c] : 1);
  };
  float mean = own.product;
  if (parts == 1) {
    for (int c = threadIdx.x; c < given.A; c += kLoopThreads) {
      const QuerySums sum = sums(c);
      put(c, sum.centred + (own.mean - mean) * sum.slopes);
    }
  } else {
    const int width = given.A;
    float* const out = at<float>(a.parts, tile, part);
    for (int c = threadIdx.x; c < width; c += kLoopThreads) {
      const QuerySums sum = sums(c);
      out[c] = sum.centred, out[width + c] = sum.slopes;
    }
    const auto end = [&](int i) {
      return reinterpret_cast<QueryPart<float>*>(at<float>(a.parts, tile, i) + 2 * width);
    };
    if (threadIdx.x == 0) *end(part) = own;
    wait_for_all(a.arrivals + kArrival * (1 + b), parts * (a.T - t));
    const QueryPart<float> of_lane = lane < parts ? *end(lane) : QueryPart<float>{};
    mean = of_warp<Add>(of_lane.product);
    const int columns = share_of_block(width, parts), last = min((part + 1) * columns, width);
    for (int c = part * columns + threadIdx.x; c < last; c += kLoopThreads) {
      float sum = 0;
#pragma unroll 2
      for (int i = 0; i < parts; ++i) {
        const float* from = at<float>(a.parts, tile, i) + c;
        sum += from[0] + (end(i)->mean - mean) * from[width];
      }
      put(c, sum);
    }
  }
  for (int j = threadIdx.x; j < keys; j += kLoopThreads)
    grad_score[column + j] =
        buffers.shares()[j] == 0 ? 0 : buffers.shares()[j] * (buffers.scores()[j] - mean);
}

__global__ void __launch_bounds__(kLoopThreads, 1) persistent_backward(const PersistentBackward a) {
  ATTNFAST_DYNAMIC_SHARED(Four, shared);
  const BlockBuffers buffers = buffers_of(a, a.sizes(), shared);
  const auto share_of_group = [&](int all, int each) {
    const int group = blockIdx.x / a.blocks_of_group(), first = group * each;
    return GroupShare{group, int(blockIdx.x) % a.blocks_of_group(), first, max(0, min(each, all - first))};
  };
  const GroupShare units = share_of_group(a.H, a.units()), fed = share_of_group(a.F, a.fed_outputs());
  const auto cache_weight = [&](const LoopWeight& w, int outputs, Four* to, const auto& column) {
    const int first = units.part * a.slice(w.inputs);
    cache_columns(w, first, max(0, min(a.slice(w.inputs), w.inputs - first)), outputs, to, column);
  };
  cache_weight(a.state_weight, units.count * a.copies, buffers.state_weight,
               [&](int i) { return i / units.count * a.H + units.first + i % units.count; });
  cache_weight(a.fed_weight, fed.count, buffers.fed_weight, [&](int i) { return fed.first + i; });
  cache_memory(a, a.attends, buffers);
  const int n = keys_of_first(a, a.attends);
  unsigned turn = 0, waits = 0;
  const auto wait = [&] { wait_for_all(a.arrivals, ++turn * gridDim.x); };
  if (a.attentional.data) {
    for (int i = blockIdx.x * kLoopThreads + threadIdx.x; i < a.B * a.F; i += gridDim.x * kLoopThreads)
      put_attentional(a, a.T - 1, i / a.F, i % a.F,
                      *at<float>(rows_of_step(a.grad_fed, a.T - 1), i / a.F, i % a.F));
    wait();
  }
  __syncthreads();
  for (int t = a.T; t >= 0; --t) {  // attention of step t, or of the step before, then the step before
    if (t == 0 && !a.attends_first) break;
    if (t < a.T || !a.attends_first) {
      for_own_sequences(a, a.attends, n, [&](int b, int keys) {
        attend_backward(a, buffers, b, keys, a.attends_first ? t : t - 1, t);
      });
      wait();
    }
    if (t == 0) break;
    switch (a.cell) {
      case Cell::tanh: run_cells_backward<Cell::tanh>(a, buffers, units, t - 1, waits); break;
      case Cell::gru: run_cells_backward<Cell::gru>(a, buffers, units, t - 1, waits); break;
      case Cell::lstm: run_cells_backward<Cell::lstm>(a, buffers, units, t - 1, waits);
    }
    wait();
    multiply_fed(a, buffers, fed, t - 1, waits);
    wait();
  }
}

}  // namespace
}  // namespace attnfast
