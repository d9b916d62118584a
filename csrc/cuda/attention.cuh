// attention on the GPU: device code on raw pointers; the launcher is attention.cu.
//
//   e_ij = scale * score(q_i, k_j) + bias_ij,  P = softmax(e) over visible keys,  c_i = sum P_ij v_j
//
// A block takes a tile of query rows and iterates over the keys with a running softmax: scores are
// stored only if weights are requested. Keys that a row may not see are excluded by selection,
// never by multiplying by 0, because they may be NaN. If there are too few tiles to fill the GPU, a
// tile's keys are split into parts of one block each, along grid.y. If these blocks are a
// cluster, they join the parts; else step.cuh's combine does.
#pragma once
#include "score.cuh"
#include "step.cuh"

namespace attnfast {
namespace {

// ---- forward ----------------------------------------------------------------------------------

// The running state of a tile's rows: the largest score, the sum of e^{score - highest}, and the
// factor by which that sum and the context were last multiplied; also e^{score - highest} of the
// current keys.
template <class C>
struct Softmax {
  C highest[kQueries], mass[kQueries], factor[kQueries];
  Described<C> described[kQueries];  // if requested
  alignas(16) C shares[kKeys][kQueries + 4];
};

// Update the softmax with the scores of the keys from j0 on; the scores are kept if `stored`.
template <class T, class C, int buffers>
__device__ void update_softmax(const Forward& a, const Tile& tile, int64_t j0, int rows, int64_t n,
                               bool stored, Staged<C, buffers>& staged, Softmax<C>& softmax) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < kQueries; r += kWarps) {
    const int64_t i = tile.row + r, j = j0 + lane;
    const Seen own = r < rows ? seen_by(a, tile, i, n) : Seen{0, 0, 0};
    C s = -INFINITY;
    if (own.from <= j && j < own.to) {
      s = finish_score<T>(a, tile, i, j - own.origin, staged.score(r, lane), kLeast<C>);
      if (stored) at<C>(a.weights, tile, i)[j - own.origin] = s;
    }
    const C before = softmax.highest[r], top = fmax(before, of_warp<Max>(s));
    const C shift = top == -INFINITY ? 0 : top, fade = exp(before - shift), p = exp(s - shift);
    __syncwarp();  // every lane has read the previous highest
    const C more = of_warp<Add>(p);
    softmax.shares[lane][r] = p;
    if (a.statistics.data) {
      const C scores[] = {s}, masses[] = {p};
      const Described<C> block = describe(scores, masses, shift, more, C(j));
      if (lane == 0) join(softmax.described[r], before, softmax.mass[r], block, shift, more);
    }
    if (lane == 0) {
      softmax.highest[r] = top;
      softmax.factor[r] = fade;
      softmax.mass[r] = softmax.mass[r] * fade + more;
    }
  }
}

// Add the values of `keys` keys from j0 on, times their shares, to columns of the context kThreads
// apart.
template <class T, class C, int columns>
__device__ void add_values(const Forward& a, const Tile& tile, int64_t j0, int keys, int column,
                           const C (&shares)[kKeys][kQueries + 4], C (&context)[kQueries][columns]) {
  const T* value = at<T>(a.value, tile, j0) + column;
#pragma unroll 1
  for (int j = 0; j < keys && column < a.Dv; j += kAtOnce, value += kAtOnce * a.value.row) {
    C v[kAtOnce][columns], none = 0;
#pragma unroll
    for (int y = 0; y < kAtOnce; ++y)
      for (int x = 0; x < columns; ++x) {
        const bool exists = j + y < keys && column + kThreads * x < a.Dv;
        v[y][x] = exists ? widen(value[y * a.value.row + kThreads * x]) : 0;
        none += 0 * v[y][x];
      }
    const auto add = [&](auto finite) {
#pragma unroll
      for (int y = 0; y < kAtOnce; ++y)
        for (int r = 0; r < kQueries; ++r) {
          const C p = shares[j + y][r];
          for (int x = 0; x < columns; ++x)
            if (decltype(finite)::value || p != 0) context[r][x] += p * v[y][x];
        }
    };
    if (none == 0) add(std::true_type{});
    else add(std::false_type{});  // a non-finite value must not meet a weight of 0
  }
}

// Store this block's part of the rows of a tile: context, largest score, mass and statistics.
template <class C, int columns>
__device__ void put_part(const Forward& a, const Tile& tile, int rows, int column,
                         const Softmax<C>& softmax, const C (&context)[kQueries][columns],
                         const View& parts) {
  const auto part = [&](int r) { return at<C>(parts, tile, (tile.row + r) * gridDim.y + blockIdx.y); };
#pragma unroll
  for (int r = 0; r < kQueries; ++r) {
    if (r >= rows) break;
    C* out = part(r);
    for (int x = 0; x < columns; ++x)
      if (const int c = column + kThreads * x; c < a.Dv) out[c] = context[r][x];
  }
  if (const int r = threadIdx.x; column < kThreads && r < rows) {
    C* out = part(r);
    auto* const end = reinterpret_cast<SoftmaxPart<C>*>(out + a.Dv);
    end->top = softmax.highest[r];
    end->mass = softmax.mass[r];
    if (a.statistics.data) end->row = softmax.described[r];
  }
}

constexpr int kExchanged = 8;  // rows whose contexts blocks exchange at a time

// Join a tile's parts within a cluster, and store context, weights and statistics.
template <class T, class C, int columns>
__device__ void join_blocks(const Forward& a, const Tile& tile, int rows, int column, int64_t n,
                            const Softmax<C>& softmax, const C (&context)[kQueries][columns],
                            C (&exchanged)[kExchanged][kThreads * columns]) {
  __shared__ C top[kQueries], mass[kQueries], factor[kQueries];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  wait_for_blocks();  // all scores are stored
  if (const int r = threadIdx.x; r < kQueries) {
    const auto softmax_of = [&](unsigned block) { return of_another(&softmax, block); };
    C highest = -INFINITY, total = 0;
    for (unsigned block = 0; block < gridDim.y; ++block)
      highest = fmax(highest, softmax_of(block)->highest[r]);
    const C shift = highest == -INFINITY ? 0 : highest;
    for (unsigned block = 0; block < gridDim.y; ++block)
      total += softmax_of(block)->mass[r] * exp(softmax_of(block)->highest[r] - shift);
    top[r] = highest, mass[r] = total;
    factor[r] = exp(softmax.highest[r] - shift) * share_of(highest, total);
    if (a.statistics.data && column < kThreads && blockIdx.y == 0 && r < rows) {
      const auto part = [&](unsigned block) {
        return SoftmaxPart<C>{softmax_of(block)->highest[r], softmax_of(block)->mass[r],
                              softmax_of(block)->described[r]};
      };
      put_statistics(a, tile, tile.row + r, highest, total, described<C>(gridDim.y, part));
    }
  }
  __syncthreads();
  if (column < kThreads)
    for (int r = warp + kWarps * blockIdx.y; r < rows; r += kWarps * gridDim.y) {
      const int64_t i = tile.row + r;
      finish_row(a, tile, i, seen_by(a, tile, i, n), top[r], mass[r], lane, 32);
    }
#pragma unroll
  for (int first = 0; first < kQueries; first += kExchanged) {
    if (first >= rows) break;
    for (int r = 0; r < kExchanged; ++r) {
      const C f = factor[first + r];  // if 0, nothing is added: context may be NaN
      for (int x = 0; x < columns; ++x)
        exchanged[r][threadIdx.x + kThreads * x] = f == 0 ? C(0) : context[first + r][x] * f;
    }
    wait_for_blocks();
    for (int r = blockIdx.y; r < min(kExchanged, rows - first); r += gridDim.y)
      for (int x = 0; x < columns; ++x) {
        const int c = column + kThreads * x;
        if (c >= a.Dv) break;
        C total = 0;
#pragma unroll
        for (unsigned block = 0; block < kMostBlocks; ++block)
          if (block < gridDim.y) total += of_another(exchanged[r], block)[threadIdx.x + kThreads * x];
        narrow(total, at<T>(a.context, tile, tile.row + first + r)[c]);
      }
    wait_for_blocks();  // no block goes on, or exits, while others read
  }
}

// Compute a slice of a tile's context; grid.y is a cluster unless `parts`.
template <class T, Score S, int columns>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2
                                            : columns == 1 ? 4
                                                           : 3)
    forward(const Forward a, const Factored factored, const View parts, int slices) {
  using C = typename Accumulate<T>::type;
  __shared__ union {
    StagedScore<S, C> staged;
    C exchanged[kExchanged][kThreads * columns];
  } buffer;
  __shared__ Softmax<C> softmax;
  auto& staged = buffer.staged;
  const Tile tile = locate(a, a.Tq, kQueries, blockIdx.x / slices);
  const int rows = up_to(kQueries, a.Tq - tile.row);
  const int64_t n = keys_seen(a, tile.b);
  const int slice = blockIdx.x % slices;  // of the context's columns
  const bool first = slice == 0;
  const int column = slice * kThreads * columns + threadIdx.x;
  C context[kQueries][columns] = {};
  if (threadIdx.x < kQueries) softmax.highest[threadIdx.x] = -INFINITY, softmax.mass[threadIdx.x] = 0;

  const Seen all = seen_by_all(a, tile, rows, n);
  const auto [from, to] = keys_of_part(all, blockIdx.y, gridDim.y, kKeys);
#pragma unroll 1
  for (int left = to - from; left > 0; left -= kKeys) {
    const int j0 = to - left, keys = min(left, kKeys);
    score_tile<S, T>(a, factored, tile, j0, keys, staged);
    update_softmax<T>(a, tile, j0, rows, n, a.weights.data && first, staged, softmax);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kQueries; ++r)
      for (int x = 0; x < columns; ++x) context[r][x] *= softmax.factor[r];
    add_values<T>(a, tile, j0, keys, column, softmax.shares, context);
  }

  __syncthreads();  // and other lanes read the scores than wrote them
  if (parts.data) return put_part(a, tile, rows, column, softmax, context, parts);
  if (gridDim.y > 1) return join_blocks<T>(a, tile, rows, column, n, softmax, context, buffer.exchanged);
  if (first)
    for (int r = threadIdx.x / 32; r < rows; r += kWarps) {
      const int64_t i = tile.row + r;
      finish_row(a, tile, i, seen_by(a, tile, i, n), softmax.highest[r], softmax.mass[r], threadIdx.x % 32,
                 32);
      if (a.statistics.data && threadIdx.x % 32 == 0)
        put_statistics(a, tile, i, softmax.highest[r], softmax.mass[r], softmax.described[r]);
    }
#pragma unroll
  for (int r = 0; r < kQueries; ++r) {
    if (r >= rows) break;
    const C share = share_of(softmax.highest[r], softmax.mass[r]);
    T* out = at<T>(a.context, tile, tile.row + r);
    for (int x = 0; x < columns; ++x) {
      const int c = column + kThreads * x;
      if (c < a.Dv) narrow(context[r][x] * share, out[c]);
    }
  }
}

// Turn a row's sums over features, stored as weights, into the weights.
template <class T>
__global__ void __launch_bounds__(kThreads) normalise(const Forward a) {
  using C = typename Accumulate<T>::type;
  const Tile tile = locate(a, a.Tq, 1);
  const int64_t n = keys_seen(a, tile.b);
  C* const scores = at<C>(a.weights, tile, tile.row);
  C top = -INFINITY, mass = 0;
#pragma unroll 4
  for (int64_t j = threadIdx.x; j < n; j += kThreads) {
    scores[j] = finish_score<T>(a, tile, tile.row, j, scores[j], kLeast<C>);
    top = fmax(top, scores[j]);
  }
  int turn = 0;
  top = of_blocks<Max>(top, turn);
  const C shift = top == -INFINITY ? 0 : top;
#pragma unroll 4
  for (int64_t j = threadIdx.x; j < n; j += kThreads) mass += exp(scores[j] - shift);
  mass = of_blocks<Add>(mass, turn);
  if (a.statistics.data && threadIdx.x < 32) {
    Described<C> row = {};
    C before = 0, position = INFINITY;
    for (int64_t first = 0; first < n; first += 32) {
      const int64_t j = first + threadIdx.x;
      const C s[] = {j < n ? scores[j] : -INFINITY}, p[] = {exp(s[0] - shift)};
      const C more = of_warp<Add>(p[0]);
      const Described<C> block = describe(s, p, shift, more, C(j));
      position = fmin(position, block.position);  // all blocks have the same top
      join(row, shift, before, block, shift, more);
      before += more;
    }
    row.position = position;
    if (threadIdx.x == 0) put_statistics(a, tile, tile.row, top, mass, row);
  }
  __syncthreads();  // the scores of all have been read
  finish_row(a, tile, tile.row, Seen{0, n, 0}, top, mass, threadIdx.x, kThreads);
}

// ---- products by a library ----------------------------------------------------------------------

// out = scale * left right, of every sequence and head.
struct MatrixProduct {
  View left, right, out;
  int64_t rows, depth, columns;
  double scale;
};

// Recompute the elements of a product that are not finite: what a weight of 0 multiplies may be NaN and
// must not have any effect.
template <class C>
__global__ void __launch_bounds__(kThreads) drop_hidden(const Problem a, const MatrixProduct x) {
  const Tile tile = locate(a, x.rows, 1);
  const int64_t c = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (c >= x.columns) return;
  C& out = at<C>(x.out, tile, tile.row)[c * x.out.column];
  if (out - out == 0) return;
  const C *left = at<C>(x.left, tile, tile.row), *right = at<C>(x.right, tile, 0) + c * x.right.column;
  C sum = 0;
  for (int64_t k = 0; k < x.depth; ++k)
    if (const C factor = left[k * x.left.column]; factor != 0) sum += factor * right[k * x.right.row];
  out = C(x.scale) * sum;
}

// ---- backward ---------------------------------------------------------------------------------

// Set staged.score(row, key) to grad_context_i . v_j for a tile; see score_tile.
template <class T, class C>
__device__ void score_gradients(const Backward& a, const Tile& tile, int64_t j0, int keys,
                                Staged<C>& staged) {
  const Rows<T> g = {at<T>(a.grad_context, tile, tile.row), a.grad_context.row,
                     up_to(kQueries, a.Tq - tile.row)};
  const Rows<T> v = {at<T>(a.value, tile, j0), a.value.row, keys};
  score_tile<Score::dot>(g, v, static_cast<const T*>(nullptr), a.Dv, staged, nullptr);
}

// Store the scores of all pairs in weights (forward), or grad_context_i . v_j in grad_score
// (backward). Blocks with different y take different keys.
template <class T, Score S, bool backward>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 4)
    products(const std::conditional_t<backward, Backward, Forward> a, const Factored factored) {
  using C = typename Accumulate<T>::type;
  __shared__ StagedScore<S, C> staged;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile tile = locate(a, a.Tq, kQueries);
  const int rows = up_to(kQueries, a.Tq - tile.row);
  const int64_t n = keys_seen(a, tile.b);
  const Seen all = seen_by_all(a, tile, rows, n);
#pragma unroll 1
  for (int64_t j0 = all.from + blockIdx.y * kKeys; j0 < all.to; j0 += gridDim.y * kKeys) {
    const int keys = up_to(kKeys, all.to - j0);
    if constexpr (backward) score_gradients<T>(a, tile, j0, keys, staged);
    else score_tile<S, T>(a, factored, tile, j0, keys, staged);
#pragma unroll 1
    for (int r = warp; r < rows; r += kWarps) {
      const int64_t i = tile.row + r, j = j0 + lane;
      const Seen own = seen_by(a, tile, i, n);
      if (j < own.from || j >= own.to) continue;
      const C s = staged.score(r, lane);
      if constexpr (backward) at<C>(a.grad_score, tile, i)[j - own.origin] = s;
      else at<C>(a.weights, tile, i)[j - own.origin] = finish_score<T>(a, tile, i, j - own.origin, s);
    }
  }
}

// Turn the products of grad_context and values of a row, in place, into the scores' gradients:
//   grad_score_ij = P_ij (x_ij - sum_j P_ij x_ij + grad_log_sum_exp_i),
//   x_ij = grad_context_i . v_j + grad_weights_ij; exactly 0 if P_ij is 0.
template <class T>
__global__ void __launch_bounds__(kThreads) grad_score(const Backward a) {
  using C = typename Accumulate<T>::type;
  const Tile tile = locate(a, a.Tq, 1);
  const C *weights = at<C>(a.weights, tile, tile.row),
          *given = a.grad_weights.data ? at<C>(a.grad_weights, tile, tile.row) : nullptr;
  C* out = at<C>(a.grad_score, tile, tile.row);
  const int64_t columns = a.key_bounds.data ? a.W : keys_seen(a, tile.b);
  const auto x = [&](int64_t j) { return given ? out[j] + given[j] : out[j]; };
  C product = 0;
#pragma unroll 4
  for (int64_t j = threadIdx.x; j < columns; j += kThreads)
    if (const C p = weights[j]; p != 0) product += p * x(j);  // 0 if a row sees no key
  int turn = 0;
  const C mean = of_blocks<Add>(product, turn);
  const C extra = a.grad_log_sum_exp.data ? *at<C>(a.grad_log_sum_exp, tile, tile.row) : 0;
#pragma unroll 4
  for (int64_t j = threadIdx.x; j < a.W; j += kThreads) {
    const C p = j < columns ? weights[j] : 0;
    out[j] = p == 0 ? 0 : p * (x(j) - mean + extra);  // for a single key x - mean is exactly 0
  }
}

// A gradient is a sum over the other side, for every row and feature. Queries and keys take the
// role of the rows in turn, so that no two blocks add to the same element:
//   dot       out_r = scale * sum_c g_rc y_c
//   tanh      out_r = 4 scale w * sum_c g_rc (1/4 - s^2),  s = 1/(1 + e^{2(x_r + y_c)}) - 1/2
//   others    out_r = 4 scale w * sum_c g_rc f'(x_r + y_c) / 4,  s = -f(x_r + y_c) / 2
// and, if queries are the rows, grad_score_vector = -2 scale * sum_rc g_rc s.
struct Sum {
  View g;          // [Tq, W] of the accumulation dtype: grad_score or weights
  View x, y, out;  // [rows, width], [columns, width], [rows, width]
  int64_t rows, columns, width;
  double scale;
  View grad_score_vector;  // [tiles of rows, width] for each [B, H], or absent
  View rows_of_keys;       // if keys are the rows and have spans: see find_rows_of_keys
};

constexpr int kHeight = 8;                  // rows of a warp
constexpr int kSumRows = kWarps * kHeight;  // of a block
constexpr int kSumColumns = 32;             // staged at a time, by a warp
constexpr int kPart = 32 / kWarps;          // the number of rows or columns per warp
constexpr int kSlice = 64;                  // features of a block, two for each lane

template <class C>
struct StagedSum {
  alignas(16) C g[kSumColumns][kSumRows + 4], y[kSumColumns][kSlice], score_vector[kWarps][kSlice];
  C total[kHeight + 1][2][kThreads];  // a thread's totals

  // Add the sums of some columns to the totals and reset them to 0: sums of partial sums have
  // smaller errors.
  __device__ void add(C (&out)[kHeight][2], C (&grad_score_vector)[2]) {
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < kHeight; ++r) {
        total[r][half][threadIdx.x] += out[r][half];
        out[r][half] = 0;
      }
      total[kHeight][half][threadIdx.x] += grad_score_vector[half];
      grad_score_vector[half] = 0;
    }
  }
};

// For every block of kSumRows keys, find the range from the first to the last row that sees any of
// them, stored as the maxima of Tq minus the first row and of the last row plus one. rows_of_keys
// is int64 [B, H, blocks, 2], initially zero.
__global__ void __launch_bounds__(kThreads) find_rows_of_keys(const Problem a, const View rows_of_keys) {
  Tile tile = locate(a, a.Tq, kThreads);
  tile.row += threadIdx.x / 32 * 32;  // a row for each lane
  const int64_t i = tile.row + threadIdx.x % 32, n = keys_seen(a, tile.b);
  const Seen own = i < a.Tq ? seen_by(a, tile, i, n) : Seen{0, 0, 0};
  const Seen all = seen_by_all(a, tile, a.Tq - tile.row, n);
  for (int64_t block = all.from / kSumRows; block * kSumRows < all.to; ++block) {
    const int64_t from = block * kSumRows;
    const bool sees = own.from < own.to && own.from < from + kSumRows && own.to > from;
    const unsigned lanes = __ballot_sync(kAll, sees);
    if (lanes == 0 || threadIdx.x % 32 != 0) continue;
    const int64_t first = tile.row + __ffs(lanes) - 1, last = tile.row + 31 - __clz(lanes);
    auto* rows = at<unsigned long long>(rows_of_keys, tile, block);
    atomicMax(&rows[0], static_cast<unsigned long long>(a.Tq - first));
    atomicMax(&rows[1], static_cast<unsigned long long>(last + 1));
  }
}

// Replace NaN by 0, and, except under tanh, every non-finite value: a row that may see it has NaN
// weights and so a NaN g; for the other rows it must not have any effect.
template <Score S, class C, int N>
__device__ void drop_unseen(C (&x)[N]) {
  for (C& v : x) v = (S == Score::tanh ? v == v : v - v == 0) ? v : 0;
}

// Add the staged columns to the rows warp + kWarps * r, features lane + 32 x of the slice. On the
// quick path rows and columns hold e^{2x}, or, for the dot score, only values that may be
// multiplied by 0. This path is too inaccurate if all tanh are small.
template <Score S, bool quick, bool weighs, class C>
__device__ void sum_columns(const StagedSum<C>& staged, int columns, const C (&x)[kHeight][2],
                            C (&out)[kHeight][2], C (&grad_score_vector)[2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll(S == Score::tanh && !quick ? 1 : 2)
  for (int c = 0; c < columns; ++c) {
    const C y[2] = {staged.y[c][lane], staged.y[c][lane + 32]};
    for (int r = 0; r < kHeight; ++r) {
      const C g = staged.g[c][warp * kHeight + r];
      if constexpr (S == Score::dot) {
        for (int half = 0; half < 2; ++half)
          if (quick || g != 0) out[r][half] += g * y[half];
      } else {
        C s[2];
        if constexpr (S == Score::tanh && quick) {
          const C d0 = x[r][0] * y[0] + 1, d1 = x[r][1] * y[1] + 1, both = reciprocal(d0 * d1);
          s[0] = both * d1 - C(0.5), s[1] = both * d0 - C(0.5);
        } else {
          for (int half = 0; half < 2; ++half) {
            const C z = x[r][half] + y[half];
            if constexpr (S == Score::tanh) s[half] = C(-0.5) * tanh(z);
            else s[half] = C(-0.5) * activation<S, C>(z);
          }
        }
        for (int half = 0; half < 2; ++half) {
          if constexpr (S == Score::tanh) out[r][half] += g * (C(0.25) - s[half] * s[half]);
          else out[r][half] += times_slope<S, C>(g / 4, -2 * s[half]);
          if (weighs) grad_score_vector[half] += g * s[half];
        }
      }
    }
  }
}

// Return the keys that rows of a tile see, or, if keys are the rows, the query rows that see them.
template <bool keys_are_rows>
__device__ Seen columns_of(const Problem& a, const Sum& sum, const Tile& tile, int rows, int64_t n) {
  if (!keys_are_rows) return seen_by_all(a, tile, rows, n);
  if (!a.key_bounds.data) return {0, tile.row < n ? a.Tq : 0, 0};
  const int64_t* of = at<int64_t>(sum.rows_of_keys, tile, tile.part);
  return {a.Tq - of[0], of[1], 0};
}

// Load g of the rows and `count` columns from c0 on, each warp its part. Neighbouring lanes read
// neighbouring elements.
template <bool keys_are_rows, class C>
__device__ void load_g(const Problem& a, const Sum& sum, const Tile& tile, int rows, int64_t c0, int count,
                       C (&g)[kPart]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t i = (keys_are_rows ? c0 : tile.row) + warp;
  const int64_t j = (keys_are_rows ? tile.row : c0) + lane;
  const int of_i = keys_are_rows ? count : rows, of_j = keys_are_rows ? rows : count;
  const C* of_g = at<C>(sum.g, tile, i) + j;
#pragma unroll
  for (int m = 0; m < kPart; ++m, of_g += kWarps * sum.g.row) {
    bool exists = lane < of_j && warp + m * kWarps < of_i;
    int64_t origin = 0;
    if (a.key_bounds.data && exists) {
      const Seen own = seen_by(a, tile, i + m * kWarps, a.Tk);  // g beyond n is 0
      exists = own.from <= j && j < own.to;
      origin = own.origin;
    }
    g[m] = exists ? of_g[-origin] : 0;
  }
}

// Stage each warp's part of the columns, e^{2y} if they are factored, and of g.
template <bool keys_are_rows, bool factorable, class C>
__device__ void stage(const C (&y)[2][kPart], const C (&g)[kPart], bool quick, StagedSum<C>& staged) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int half = 0; half < 2; ++half)
    for (int m = 0; m < kPart; ++m)
      staged.y[warp + m * kWarps][lane + 32 * half] =
          factorable && quick ? expf(2 * y[half][m]) : y[half][m];
  for (int m = 0; m < kPart; ++m) {
    const int other = warp + m * kWarps, r = keys_are_rows ? lane : other;
    staged.g[keys_are_rows ? other : lane][r % kWarps * kHeight + r / kWarps] = g[m];
  }
}

// Write the sums, each feature times its factor, and the rows' contribution to the weight's gradient.
// The blocks of a cluster have divided the columns; now they divide the rows and add up their totals.
template <class T, Score S, bool weighs, class C>
__device__ void finish_sums(const Problem& a, const Sum& sum, const Tile& tile, int rows, int64_t slice,
                            StagedSum<C>& staged) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t width = sum.width - slice;
  const auto add_up = [](const auto& mine, const auto& element) {
    C total = 0;
    for (unsigned block = 0; block < gridDim.y; ++block) total += element(*of_another(&mine, block));
    return total;
  };
  for (int half = 0; half < 2; ++half)
    staged.score_vector[warp][lane + 32 * half] = staged.total[kHeight][half][threadIdx.x];
  wait_for_blocks();
  for (int half = 0; sum.out.data && half < 2; ++half) {
    const int64_t c = lane + 32 * half;
    if (c >= width) break;
    C factor = sum.scale;
    if (S != Score::dot) factor *= 4 * widen(at<T>(a.score_vector, tile, 0)[slice + c]);
    for (int r = blockIdx.y; r < kHeight; r += gridDim.y) {
      const int64_t row = warp + r * kWarps;
      if (row >= rows) break;
      const C total = add_up(staged.total, [&](const auto& x) { return x[r][half][threadIdx.x]; });
      narrow(factor * total, at<T>(sum.out, tile, tile.row + row)[slice + c]);
    }
  }
  if (S != Score::dot && weighs && sum.grad_score_vector.data && blockIdx.y == 0)
    for (int c = threadIdx.x; c < up_to(kSlice, width); c += kThreads) {
      C total = 0;
      for (int from = 0; from < kWarps; ++from)
        total += add_up(staged.score_vector, [&](const auto& x) { return x[from][c]; });
      at<C>(sum.grad_score_vector, tile, tile.part)[slice + c] = -2 * C(sum.scale) * total;
    }
  wait_for_blocks();  // no block exits while another reads its totals
}

template <class T, Score S, bool keys_are_rows>
constexpr int kResident = sizeof(T) == 8    ? 2
                          : S == Score::dot ? 5
                          : keys_are_rows   ? 4
                                            : 3;

template <class T, Score S, bool keys_are_rows>
__global__ void __launch_bounds__(kThreads, kResident<T, S, keys_are_rows>)
    grad_rows(const Problem a, const Sum sum) {
  using C = typename Accumulate<T>::type;
  constexpr bool factorable = S == Score::tanh && sizeof(C) == 4, weighs = !keys_are_rows;
  __shared__ StagedSum<C> staged;
  const int lane = threadIdx.x % 32;
  const int slices = (sum.width + kSlice - 1) / kSlice;
  const Tile tile = locate(a, sum.rows, kSumRows, blockIdx.x / slices);
  const int rows = up_to(kSumRows, sum.rows - tile.row);
  // that are not 0 for some row
  const Seen all = columns_of<keys_are_rows>(a, sum, tile, rows, keys_seen(a, tile.b));
  const auto [from_column, to_column] = keys_of_part(all, blockIdx.y, gridDim.y, kSumColumns);
  const int64_t slice = blockIdx.x % slices * kSlice, width = sum.width - slice;

  C x[kHeight][2] = {}, e[kHeight][2] = {}, out[kHeight][2] = {}, grad_score_vector[2] = {};
  for (auto& row : staged.total) row[0][threadIdx.x] = row[1][threadIdx.x] = 0;
  bool far = false, wide = false;
  const auto beyond_small = [](const auto& x) { return beyond(x, kSmallTanhLimit / 2); };
  if constexpr (S != Score::dot) {
    const Rows<T> from = {at<T>(sum.x, tile, tile.row) + slice, sum.x.row, rows};
    for (int half = 0; half < 2; ++half) {
      C part[kHeight];
      load(from, lane + 32 * half, width, part);
      drop_unseen<S>(part);
      far |= beyond(part, kFactoredEachLimit);
      wide |= beyond_small(part);
      for (int r = 0; r < kHeight; ++r) x[r][half] = part[r], e[r][half] = expf(2 * part[r]);
    }
  }
  for (int c0 = from_column; c0 < to_column; c0 += kSumColumns) {
    const int count = min(kSumColumns, to_column - c0);
    const Rows<T> from = {at<T>(sum.y, tile, c0) + slice, sum.y.row, count};
    C y[2][kPart], g[kPart];
    bool special = (S != Score::dot && !factorable) || far, large = wide;
    for (int half = 0; half < 2; ++half) {
      load(from, lane + 32 * half, width, y[half]);
      if constexpr (S == Score::dot)
        for (const C v : y[half]) special |= v - v != 0;
      else drop_unseen<S>(y[half]);
      if (factorable) special |= beyond(y[half], kFactoredEachLimit), large |= beyond_small(y[half]);
    }
    load_g<keys_are_rows>(a, sum, tile, rows, c0, count, g);
    bool quick = !__syncthreads_or(special);  // and the previously staged columns have been read
    if (factorable) quick &= __syncthreads_or(large) != 0;
    stage<keys_are_rows, factorable>(y, g, quick, staged);
    __syncthreads();
    constexpr bool has_quick = factorable || S == Score::dot;
    if (has_quick && quick) sum_columns<S, has_quick, weighs>(staged, count, e, out, grad_score_vector);
    else sum_columns<S, false, weighs>(staged, count, x, out, grad_score_vector);
    staged.add(out, grad_score_vector);
  }
  finish_sums<T, S, weighs>(a, sum, tile, rows, slice, staged);
}

// ---- launches -----------------------------------------------------------------------------------
//
// Each function calls launch(kernel, blocks on x, blocks on y, the kernel's arguments).
// launch.together does the same with the blocks that differ in y as a cluster, whose largest size
// is launch.most_together(kernel); launch.places(kernel) is the number of blocks that run at once;
// launch.scratch<C>(numbers) is memory that lasts until the kernels have finished.

// Return the number of parts, at most `most`, to cut the work of each block into, so that all blocks
// need the fewest waves; a wave takes as long as one part.
inline int parts_of_blocks(int64_t blocks, int64_t places, int64_t most) {
  most = min(most, 2 * places / max(blocks, int64_t{1}));
  const auto waves = [&](int64_t count) { return double(tiles(blocks * count, places)) / count; };
  int best = 1;
  for (int count = 2; count <= most; ++count)
    if (waves(count) < 0.9 * waves(best)) best = count;  // joining them has a cost, too
  return best;
}

// The same for the keys of blocks of kQueries rows.
template <class Launch, class Kernel>
int key_parts(const Problem& a, int64_t blocks, const Launch& launch, Kernel kernel) {
  return parts_of_blocks(blocks, launch.places(kernel), tiles(min(a.Tk, a.W + kQueries), kKeys));
}

inline int64_t grad_score_vector_parts(const Problem& a) { return tiles(a.Tq, kSumRows); }

// `added` is for a single step only; see put_context.
template <class Launch>
void launch_forward(const Forward& a, const Launch& launch, const View& added = {}) {
  by_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (is_step(a) || added.data) return launch_step<T>(a, launch, added);
    const Factored of = factored<T>(a, launch);
    const auto with = [&](auto columns) {
      constexpr int N = decltype(columns)::value;
      const auto kernel =
          by_score(a.score, [](auto known) { return forward<T, decltype(known)::score, N>; });
      const int slices = max(tiles(a.Dv, N * kThreads), int64_t{1});  // also if Dv = 0
      const int64_t blocks = a.B * a.H * tiles(a.Tq, kQueries) * slices;
      const int count = key_parts(a, blocks, launch, kernel);
      if (count <= launch.most_together(kernel))
        return launch.together(kernel, blocks, count, a, of, View{}, slices);
      const View parts = room_for_parts<T, SoftmaxPart>(a, count, a.Dv, launch);
      launch(kernel, blocks, count, a, of, parts, slices);
      launch_combine<T>(a, launch, View{}, parts, count);
    };
    if (a.Dv <= kThreads) return with(std::integral_constant<int, 1>{});
    if (a.Dv <= 2 * kThreads) return with(std::integral_constant<int, 2>{});
    with(std::integral_constant<int, kColumns<typename Accumulate<T>::type>>{});
  });
}

template <class Call, class Launch>
void launch_products(const Call& a, const Factored& factored, const Launch& launch,
                     void (*kernel)(Call, Factored)) {
  const int64_t blocks = a.B * a.H * tiles(a.Tq, kQueries);
  launch(kernel, blocks, key_parts(a, blocks, launch, kernel), a, factored);
}

template <class Launch>
void launch_scores(const Forward& a, const Launch& launch) {
  by_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel =
        by_score(a.score, [](auto known) { return products<T, decltype(known)::score, false>; });
    launch_products(a, factored<T>(a, launch), launch, kernel);
  });
}

template <class T, class Launch>
void launch_sum(const Problem& a, const Sum& sum, const Launch& launch,
                void (*kernel)(Problem, Sum) = grad_rows<T, Score::dot, true>) {
  const int64_t blocks = a.B * a.H * tiles(sum.rows, kSumRows) * tiles(sum.width, kSlice);
  const int64_t columns = min(sum.columns, a.W + kSumRows);
  const int64_t most = min(tiles(columns, kSumColumns), int64_t{launch.most_together(kernel)});
  launch.together(kernel, blocks, parts_of_blocks(blocks, launch.places(kernel), most), a, sum);
}

// With spans, return the rows that see the keys of each block, for sums whose rows are keys; else
// absent.
template <class Launch>
View rows_of_keys(const Backward& a, const Launch& launch) {
  if (!a.key_bounds.data || !(a.grad_key.data || a.grad_value.data)) return {};
  const int64_t head = 2 * tiles(a.Tk, kSumRows), batch = a.H * head;
  const View rows = {launch.zeros(a.B * batch), batch, head, 2, 1};
  launch(find_rows_of_keys, a.B * a.H * tiles(a.Tq, kThreads), 1, static_cast<const Problem&>(a), rows);
  return rows;
}

// Compute the gradient of the value, if it is needed.
template <class T, class Launch>
void launch_grad_value(const Backward& a, const View& rows_of_keys, const Launch& launch) {
  if (!a.grad_value.data) return;
  launch_sum<T>(a, {a.weights, {}, a.grad_context, a.grad_value, a.Tk, a.Tq, a.Dv, 1, {}, rows_of_keys},
                launch);
}

// Compute the gradients of query, key, weight and value that are needed, from the scores' gradient.
template <class T, class Launch>
void launch_grad_inputs(const Backward& a, const Launch& launch) {
  const View of_keys = rows_of_keys(a, launch);
  const Sum query = {a.grad_score, a.query, a.key,   a.grad_query,        a.Tq,
                     a.Tk,         a.A,     a.scale, a.grad_score_vector, {}};
  const Sum key = {a.grad_score, a.key, a.query, a.grad_key, a.Tk, a.Tq, a.A, a.scale, {}, of_keys};
  const auto kernel = [&](auto keys) {
    constexpr bool are_rows = decltype(keys)::value;
    return by_score(a.score, [](auto known) { return grad_rows<T, decltype(known)::score, are_rows>; });
  };
  if (a.grad_query.data || a.grad_score_vector.data)
    launch_sum<T>(a, query, launch, kernel(std::false_type{}));
  if (a.grad_key.data) launch_sum<T>(a, key, launch, kernel(std::true_type{}));
  launch_grad_value<T>(a, of_keys, launch);
}

template <class Launch>
void launch_grad_score(const Backward& a, const Launch& launch) {
  by_dtype(a.dtype, [&](auto zero) { launch(grad_score<decltype(zero)>, a.B * a.H * a.Tq, 1, a); });
}

template <class Launch>
void launch_backward(const Backward& a, const Launch& launch) {
  by_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (launch_step_backward<T>(a, launch)) return;
    if (!a.grad_score_given) {
      launch_products(a, Factored{}, launch, products<T, Score::dot, true>);
      launch_grad_score(a, launch);
    }
    launch_grad_inputs<T>(a, launch);
  });
}

}  // namespace
}  // namespace attnfast
