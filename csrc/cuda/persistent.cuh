// The common part of the kernels that run all steps of a recurrent layer with attention in one launch:
// every block of the grid runs all steps, and the blocks wait for each other. Weights, keys and values
// stay in shared memory from the first step to the last if they fit. persistent_forward.cuh and
// persistent_backward.cuh have the steps.
#pragma once
#include <cuda/atomic>

#include "recurrent.cuh"
#include "step.cuh"

namespace attnfast {
namespace {

constexpr int kLoopWarps = 16, kLoopThreads = 32 * kLoopWarps;
constexpr int kTileRows = 32, kTileOutputs = 16;  // sequences and outputs of a product's tile
constexpr int kSumsPitch = kTileRows + 4;         // few lanes access the same bank
constexpr int kStaged = 144;                      // groups of four columns (Four) staged at a time
constexpr int kLoopKeys = 512;                    // keys of a block, at most
constexpr int kLoadsInFlight = 16;                // loads in flight of a thread that sums over keys
constexpr int kMostParts = kLoadsInFlight;        // of a sequence, at most
constexpr int kMostSequences = 128;               // more are faster step by step

// A weight [outputs, inputs]; rows `row` elements apart.
struct LoopWeight {
  const float* data;
  int64_t row;
  int inputs;
};

constexpr int kArrival = 16;  // distance between counters in int64: a cache line

// The common arguments of forward and backward; rows of views are steps.
struct PersistentLayer {
  Cell cell;
  bool attends_first;
  int B, T, H, F, gates, state_rows;  // state_rows: columns of state_products
  int first_gate, first_output;       // of these columns; first_output: of attentional vectors
  View state_products, parts;         // parts: of a sequence, which its blocks join
  int parts_of_row;
  int64_t* arrivals;   // counters of the grid and of groups of blocks, kArrival apart; 0 at first
  void* weights;       // global memory for the weights of all blocks if they do not fit in shared; or null
  bool caches_memory;  // shared memory has a block's keys and values, of one sequence
  int blocks;          // of the grid
};

// ---- waiting ------------------------------------------------------------------------------------

// Add 1 to the counter for this block, and wait until it is at least `target`. What the other blocks
// wrote before they added 1 is then visible.
__device__ inline void wait_for_all(int64_t* arrivals, unsigned target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<unsigned, cuda::thread_scope_device> arrived(*reinterpret_cast<unsigned*>(arrivals));
    arrived.fetch_add(1, cuda::memory_order_release);
    while (arrived.load(cuda::memory_order_acquire) < target) {
    }
  }
  __syncthreads();
}

// ---- products -----------------------------------------------------------------------------------

// Return the number of Fours of a row, which is padded with zeros to a multiple of 16 columns; and the
// distance between rows, in Fours, with which lanes that read 16 columns of 8 rows access separate banks.
__device__ __host__ inline int fours_of(int columns) { return (columns + 15) / 16 * 4; }
__device__ __host__ inline int pitch_of(int fours) { return fours | 4; }

using Four = Quad<float>;  // four adjacent columns of a row

__device__ __host__ inline int share_of_block(int all, int blocks) { return (all + blocks - 1) / blocks; }

// The buffers of a block, all in shared memory except perhaps the weights. `keys` and `values` may be null.
struct BlockBuffers {
  static constexpr int kX = kTileRows * (kStaged | 4),
                       kScores = (kLoopKeys + kLoadsInFlight) / 4;  // in Fours

  Four *x, *fed_weight, *state_weight;
  float *keys, *values;

  __device__ float* scores() const { return x[kX].x; }
  __device__ float* shares() const { return x[kX + kScores].x; }
  __device__ float* terms() const { return x[kX + 2 * kScores].x; }
};

// The sizes of BlockBuffers, in Fours.
struct LoopSizes {
  int fed_weight, state_weight;
  int64_t keys, values;

  __host__ __device__ LoopSizes(const PersistentLayer& a, const Problem& attends, int fed_outputs,
                                int fed_inputs, int state_outputs, int state_inputs) {
    fed_weight = fed_outputs * pitch_of(fours_of(fed_inputs));
    state_weight = state_outputs * pitch_of(fours_of(state_inputs));
    const int64_t cached = a.caches_memory ? share_of_block(attends.Tk, a.parts_of_row) : 0;
    keys = cached * fours_of(attends.A);
    values = cached * fours_of(attends.Dv);
  }
  __host__ __device__ int weights() const { return fed_weight + state_weight; }
  __host__ __device__ int64_t bytes(bool has_weights) const {
    return 16 *
           (BlockBuffers::kX + 3 * BlockBuffers::kScores + keys + values + (has_weights ? weights() : 0));
  }
};

__device__ inline BlockBuffers buffers_of(const PersistentLayer& a, const LoopSizes& sizes, Four* shared) {
  BlockBuffers buffers;
  buffers.x = shared;
  Four* next = shared + BlockBuffers::kX + 3 * BlockBuffers::kScores;
  const auto take = [&](int64_t fours) { return (next += fours) - fours; };
  buffers.keys = a.caches_memory ? take(sizes.keys)->x : nullptr;
  buffers.values = a.caches_memory ? take(sizes.values)->x : nullptr;
  if (a.weights) next = static_cast<Four*>(a.weights) + blockIdx.x * int64_t{sizes.weights()};
  buffers.fed_weight = take(sizes.fed_weight);
  buffers.state_weight = take(sizes.state_weight);
  return buffers;
}

// Copy rows to `to`, padded with zeros; row(i) is the address of row i.
template <class Row>
__device__ void copy_padded(int rows, int columns, int pitch, Four* to, const Row& row) {
  for (int i = threadIdx.x / 32; i < rows; i += kLoopWarps)
    for (int q = threadIdx.x % 32; q < fours_of(columns); q += 32) {
      float x[4];
      load(row(i) + 4 * q, false, columns - 4 * q, x);
      for (int n = 0; n < 4; ++n) to[i * pitch + q].x[n] = x[n];
    }
}

// The sums of a block's outputs: each is the total of one sum for every warp that has a part of the
// inputs. They overwrite the staged rows of x.
struct LoopSums {
  const float* data;
  int tile, warps;  // outputs of a tile, and warps that have one

  __device__ float operator()(int output, int row) const {
    const float* from = data + ((output / tile * warps) * kTileOutputs + output % tile) * kSumsPitch + row;
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < kLoopWarps; ++warp)
      total += warp < warps ? from[warp * kTileOutputs * kSumsPitch] : 0;
    return total;
  }
};
static_assert(kLoopWarps * kTileOutputs * kSumsPitch <= 4 * BlockBuffers::kX);

// Tensor cores read significands of 11 bits (tf32), so a float32 is split into two: the error of a product,
// 2^-22, is that of float32.
template <int N>
__device__ void split(const float (&x)[N], float (&high)[N], float (&low)[N]) {
  for (int i = 0; i < N; ++i) {
    high[i] = __uint_as_float((__float_as_uint(x[i]) + 0x1000) & ~0x1fffu);
    low[i] = x[i] - high[i];
  }
}

// Compute the products of the rows of x and of a block's outputs, of which there are at most
// kLoopWarps tiles. For every kTileRows rows, early(first row) is called before the product, so that its
// loads are in flight during it, and use(first row, result of early, sums) after it. The warps divide the
// tiles and the inputs. Every thread of the block takes part.
template <class Early, class Use>
__device__ void multiply(const BlockBuffers& buffers, const Four* weight, int outputs, int tile, int inputs,
                         const Rows<float>& x, const Early& early, const Use& use) {
  if (outputs == 0) return;
  const int fours = fours_of(inputs), pitch = pitch_of(fours);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quad = lane % 4;
  const int warps = kLoopWarps / ((outputs + tile - 1) / tile);
  const int first_output = warp / warps * tile, part = warp % warps;
  const bool is_whole = aligned(x) && inputs % 16 == 0;
  const Four* w[2];
  for (int j = 0; j < 2; ++j)
    w[j] = weight + min(first_output + min(row + 8 * j, tile - 1), outputs - 1) * pitch + quad;
  for (int b0 = 0; b0 < x.count; b0 += kTileRows) {
    const auto held = early(b0);
    float sum[4][4] = {};
    for (int q0 = 0; q0 < fours; q0 += kStaged) {
      const int staged = min(kStaged, fours - q0), x_pitch = pitch_of(staged);
      __syncthreads();  // the previous chunk has been read
      constexpr int kOwnRows = kTileRows / kLoopWarps;
      const auto stage = [&](auto known) {  // if whole, no load waits for a branch
        constexpr bool whole = decltype(known)::value;
#pragma unroll(whole ? 4 : 1)
        for (int q = lane; q < staged; q += 32) {
          float from[kOwnRows][4];
          const int c = 4 * (q0 + q);
#pragma unroll
          for (int r = 0; r < kOwnRows; ++r)
            load(x.data + min(b0 + warp * kOwnRows + r, x.count - 1) * x.stride + c, whole,
                 whole ? 4 : inputs - c, from[r]);
#pragma unroll
          for (int r = 0; r < kOwnRows; ++r)
            for (int m = 0; m < 4; ++m) buffers.x[(warp * kOwnRows + r) * x_pitch + q].x[m] = from[r][m];
        }
      };
      if (is_whole) stage(std::true_type{});
      else stage(std::false_type{});
      __syncthreads();
      const int each = (staged / 4 + warps - 1) / warps * 4, end = min((part + 1) * each, staged);
#pragma unroll 1
      for (int q = part * each; q < end; q += 4) {  // 16 inputs, in the order in which lanes load them
        Four of_w[2];
        for (int j = 0; j < 2; ++j) of_w[j] = w[j][q0 + q];
        float high[2][4], low[2][4];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const float own[] = {of_w[0].x[2 * step], of_w[1].x[2 * step], of_w[0].x[2 * step + 1],
                               of_w[1].x[2 * step + 1]};
          split(own, high[step], low[step]);
        }
#pragma unroll
        for (int r = 0; r < kTileRows / 8; ++r) {
          const Four of_x = buffers.x[(row + 8 * r) * x_pitch + q + quad];
          float more[4] = {};  // tensor cores round towards 0, so they add only 16 products
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const float own[] = {of_x.x[2 * step], of_x.x[2 * step + 1]};
            float x_high[2], x_low[2];
            split(own, x_high, x_low);
            multiply_add(more, low[step], x_high);
            multiply_add(more, high[step], x_low);
            multiply_add(more, high[step], x_high);
          }
          for (int i = 0; i < 4; ++i) sum[r][i] += more[i];
        }
      }
    }
    __syncthreads();  // the last chunk has been read
    float* const sums = buffers.x->x;
#pragma unroll
    for (int r = 0; r < kTileRows / 8; ++r)
      for (int j = 0; j < 2; ++j) {
        float* const to = sums + (warp * kTileOutputs + row + 8 * j) * kSumsPitch + 8 * r + 2 * quad;
        to[0] = sum[r][2 * j], to[1] = sum[r][2 * j + 1];
      }
    __syncthreads();
    use(b0, held, LoopSums{sums, tile, warps});
    __syncthreads();  // the sums have been read
  }
}

// ---- a block's keys -----------------------------------------------------------------------------

// Return row t of rows [B, T, columns] of every sequence.
__device__ inline Rows2 rows_of_step(const View& x, int64_t t) {
  return {x.data ? static_cast<float*>(x.data) + t * x.row : nullptr, x.batch};
}

// Call f with the score as a compile-time constant.
template <class F>
__device__ void by_score_on_device(Score score, const F& f) {
  switch (score) {
    case Score::dot: return f(Known<Score::dot>{});
    case Score::tanh: return f(Known<Score::tanh>{});
    case Score::relu: return f(Known<Score::relu>{});
    case Score::leaky_relu: return f(Known<Score::leaky_relu>{});
  }
}

// Compute the scores of a query and a block's keys; finish(key, score) is called once for each.
template <Score S, class Finish>
__device__ void score_own_keys(const float* q, const float* w, const Rows<float>& keys, int width,
                               const Finish& finish) {
  const int lane = threadIdx.x % 32;
  const bool is_whole =
      aligned(keys) && aligned(Rows<float>{q, 0, 1}) && aligned(Rows<float>{w, 0, 1}) && width % 4 == 0;
  for (int j = threadIdx.x / 32; j < keys.count; j += kLoopWarps) {
    const float* k = keys.data + j * keys.stride;
    float s = 0;
    const auto add = [&](auto known) {  // if whole, no load waits for a branch
      constexpr bool whole = decltype(known)::value;
#pragma unroll(whole ? 4 : 1)
      for (int c = 4 * lane; c < width; c += 128) {
        const int left = whole ? 4 : width - c;
        float of_q[4], of_w[4] = {}, of_k[4];
        load(k + c, whole, left, of_k);
        load(q + c, whole, left, of_q);
        if (S != Score::dot) load(w + c, whole, left, of_w);
        for (int i = 0; i < 4; ++i) s += feature_score<S>(of_q[i], of_k[i], of_w[i]);
      }
    };
    if (is_whole) add(std::true_type{});
    else add(std::false_type{});
    s = of_warp<Add>(s);
    if (lane == 0) finish(j, s);
  }
}

// A block's keys: one of `parts` parts of the keys of a sequence that a row sees.
struct OwnKeys {
  Seen seen;
  int column;  // of the first key, in a row of the weights
  Rows<float> key, value;
};
__device__ inline OwnKeys own_keys(const Problem& a, const BlockBuffers& buffers, const Tile& tile, int n,
                                   int part, int parts) {
  const Seen seen = seen_by(a, tile, tile.row, n);
  const int share = share_of_block(seen.to - seen.from, parts);
  const int64_t first = seen.from + part * share;
  const int count = max(0, up_to(share, seen.to - first));
  const auto rows = [&](const View& given, const float* cached, int64_t columns) {
    return cached ? Rows<float>{cached, 4 * fours_of(columns), count}
                  : Rows<float>{at<float>(given, tile, first), given.row, count};
  };
  return {seen, int(first - seen.origin), rows(a.key, buffers.keys, a.A),
          rows(a.value, buffers.values, a.Dv)};
}

// Write 0 for the keys that a row does not see; the blocks of a sequence divide them.
__device__ inline void clear_unseen(const Problem& a, const Seen& seen, int part, int parts, float* row) {
  for (int c = part * kLoopThreads + threadIdx.x; c < a.W; c += parts * kLoopThreads)
    if (c + seen.origin < seen.from || c + seen.origin >= seen.to) row[c] = 0;
}

// Copy a block's keys and values to shared memory if a.caches_memory.
__device__ inline void cache_memory(const PersistentLayer& a, const Problem& attends,
                                    const BlockBuffers& buffers) {
  const int b = blockIdx.x / a.parts_of_row;
  if (!a.caches_memory || b >= a.B) return;
  const Tile tile = {b, 0, 0, 0};
  const int n = keys_seen(attends, b), each = share_of_block(n, a.parts_of_row);
  const int first = blockIdx.x % a.parts_of_row * each, count = max(0, min(each, n - first));
  const auto cache_rows = [&](const View& x, int64_t columns, float* to) {
    copy_padded(count, columns, fours_of(columns), reinterpret_cast<Four*>(to),
                [&](int i) { return at<float>(x, tile, first + i); });
  };
  cache_rows(attends.key, attends.A, buffers.keys);
  cache_rows(attends.value, attends.Dv, buffers.values);
}

// Call run(sequence, number of its keys) for the sequences of a block, of each of which it processes one
// part; `own` is the number of keys of its first sequence.
template <class Run>
__device__ void for_own_sequences(const PersistentLayer& a, const Problem& attends, int own,
                                  const Run& run) {
  const int at_once = gridDim.x / a.parts_of_row, first = blockIdx.x / a.parts_of_row;
  if (first >= at_once) return;
  for (int b = first; b < a.B; b += at_once) run(b, b == first ? own : int(keys_seen(attends, b)));
}

// Return the number of keys of a block's first sequence.
__device__ inline int keys_of_first(const PersistentLayer& a, const Problem& attends) {
  const int b = blockIdx.x / a.parts_of_row;
  return b < a.B ? keys_seen(attends, b) : 0;
}

}  // namespace
}  // namespace attnfast
