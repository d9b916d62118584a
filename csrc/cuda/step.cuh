// Attention of one query per sequence, as in a decoder's step. Latency dominates, so its keys are
// split over blocks. If these are a cluster (sm_90 and later, up to 512 keys), one launch is enough;
// else the blocks store parts, which a second launch joins.
#pragma once
#include "cluster.cuh"
#include "score.cuh"

namespace attnfast {
namespace {

constexpr int kStepKeys = 64;             // of a block, at most
constexpr int kAtOnce = 4;                // keys of a warp that are loaded together
constexpr int kRound = kWarps * kAtOnce;  // keys that the warps of a block take together
constexpr int kJoined = 64;               // parts of a row that a block joins
constexpr int kFewRows = 8;               // loaded together where registers do not suffice for kRound
// The most columns that a thread sums together. In the forward of whole targets a wider context takes
// more blocks, on grid.x, which recompute the scores.
template <class C>
constexpr int kColumns = sizeof(C) == 4 ? 4 : 2;

// ---- a block's keys -----------------------------------------------------------------------------

// The keys [from, to) of a part, if `count` parts divide keys in multiples of `unit`.
struct PartKeys {
  int from, to;
};
__device__ inline PartKeys keys_of_part(const Seen& all, int part, int count, int unit) {
  const int first = all.from, end = all.to;
  const int share = (end - first + count * unit - 1) / (count * unit) * unit;
  const int from = min(first + part * share, end);
  return {from, min(from + share, end)};
}

struct StepKeys {
  Seen row;      // all that the row sees
  int64_t from;  // first key of this block
  int count;
};

__device__ inline StepKeys keys_of_block(const Problem& a, const Tile& tile) {
  const Seen own = seen_by(a, tile, 0, keys_seen(a, tile.b));
  const auto [from, to] = keys_of_part(own, blockIdx.y, gridDim.y, kRound);
  return {own, from, to - from};
}

// Return a feature's term of a score. Every pair of a query and a key occurs once, so nothing is
// factored.
template <Score S, class C>
__device__ C feature_score(C q, C k, C w) {
  if constexpr (S == Score::dot) return q * k;
  else if constexpr (S == Score::tanh) return w * tanh(q + k);
  else return w * activation<S, C>(q + k);
}
// Return feature_score's derivative by q, without the factor w.
template <Score S, class C>
__device__ C feature_slope(C q, C k) {
  if constexpr (S == Score::dot) {
    return k;
  } else if constexpr (S == Score::tanh) {
    const C t = tanh(q + k);
    return 1 - t * t;
  } else {
    return times_slope<S, C>(C(1), activation<S, C>(q + k));
  }
}

// Compute the scores of a query row and the block's keys; each calls finish(key, score) once.
template <Score S, class C, class T, class Finish>
__device__ void score_keys(const T* q, const T* w, const Rows<T>& keys, int64_t width,
                           const Finish& finish) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool fours =
      aligned(keys) && aligned(Rows<T>{q, 0, 1}) && aligned(Rows<T>{w, 0, 1}) && width % 4 == 0;
  for (int first = warp * kAtOnce; first < keys.count; first += kRound) {
    C s[kAtOnce] = {};
    const T* k[kAtOnce];
#pragma unroll
    for (int x = 0; x < kAtOnce; ++x) k[x] = keys.data + min(first + x, keys.count - 1) * keys.stride;
    const auto add = [&](auto known) {  // if whole, no load waits for a branch
      constexpr bool whole = decltype(known)::value;
#pragma unroll 2
      for (int64_t c = 4 * lane; c < width; c += 128) {
        const int left = whole ? 4 : width - c;
        C of_q[4], of_w[4] = {}, of_k[kAtOnce][4];
        load(q + c, whole, left, of_q);
        if (S != Score::dot) load(w + c, whole, left, of_w);
#pragma unroll
        for (int x = 0; x < kAtOnce; ++x) load(k[x] + c, whole, left, of_k[x]);
#pragma unroll
        for (int x = 0; x < kAtOnce; ++x)
          for (int i = 0; i < 4; ++i) s[x] += feature_score<S>(of_q[i], of_k[x][i], of_w[i]);
      }
    };
    if (fours) add(std::true_type{});
    else add(std::false_type{});
    C own = 0;  // of the lane's key
#pragma unroll
    for (int x = 0; x < kAtOnce; ++x) {
      const C score = of_warp<Add>(s[x]);
      if (lane == x) own = score;
    }
    if (lane < kAtOnce && first + lane < keys.count) finish(first + lane, own);
  }
}

// Call put(c, sum) for the columns c < width, with the sum of share_j term(x_jc, own_c) over the rows
// x_j; own may be null. A thread loads kColumns columns of N rows together. Terms whose share is 0
// are skipped, because a hidden x_j may be NaN. Shares up to a multiple of N are 0. `sum` points
// to `sums` sums of the same terms; those of sum m have the shares from share + m kStepKeys on.
template <int N, int sums = 1, class C, class T, class Term, class Put>
__device__ void weighted_sums(const C* share, const Rows<T>& x, int width, const T* own, const Term& term,
                              const Put& put) {
  constexpr int columns = kColumns<C>;
  for (int first = threadIdx.x; first < width; first += kThreads * columns) {
    const auto exists = [&](int n) { return first + kThreads * n < width; };
    C sum[columns][sums] = {}, of_own[columns] = {};
    for (int n = 0; own && n < columns; ++n)
      if (exists(n)) of_own[n] = widen(own[first + kThreads * n]);
#pragma unroll 1
    for (int j = 0; j < x.count; j += N) {
      C of_x[columns][N];
#pragma unroll
      for (int i = 0; i < N; ++i)
        for (int n = 0; n < columns; ++n)
          of_x[n][i] = j + i < x.count && exists(n)
                           ? widen(x.data[(j + i) * x.stride + first + kThreads * n])
                           : C(0);
#pragma unroll
      for (int n = 0; n < columns; ++n) {
        if (!exists(n)) break;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const C more = term(of_x[n][i], of_own[n]);
          for (int m = 0; m < sums; ++m) {
            const C p = share[m * kStepKeys + j + i];
            sum[n][m] += p == 0 ? C(0) : p * more;
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < columns; ++n)
      if (exists(n)) put(first + kThreads * n, sum[n]);
  }
}
struct Identity {
  template <class C>
  __device__ C operator()(C x, C) const {
    return x;
  }
};

// ---- forward ------------------------------------------------------------------------------------

// The softmax of a row, or of some of its keys.
template <class C>
struct SoftmaxPart {
  C top, mass;       // mass is 0 if no key is visible
  Described<C> row;  // if requested

  __device__ C faded(C to) const { return mass == 0 ? C(0) : exp(top - to); }
  __device__ C share() const { return share_of(top, mass); }
};

// Join the blocks' parts of a row, and set factor[i] to the factor by which block i's exponentials are
// multiplied.
template <class C>
__device__ SoftmaxPart<C> join(const SoftmaxPart<C>& mine, C (&factor)[kMostBlocks]) {
  SoftmaxPart<C> all = {-INFINITY, 0, {}};
  C mass[kMostBlocks];
#pragma unroll
  for (unsigned block = 0; block < kMostBlocks; ++block) {
    const SoftmaxPart<C>* const part = of_another(&mine, min(block, gridDim.y - 1));
    mass[block] = block < gridDim.y ? part->mass : C(0);
    factor[block] = mass[block] == 0 ? C(-INFINITY) : part->top;
    all.top = fmax(all.top, factor[block]);
  }
  if (all.top == -INFINITY) all.top = 0;
#pragma unroll
  for (int block = 0; block < kMostBlocks; ++block) {
    factor[block] = exp(factor[block] - all.top);
    all.mass += mass[block] * factor[block];
  }
  return all;
}

// Return the sums of a row's statistics, combined from its parts in order; for one thread.
template <class C, class Part>
__device__ Described<C> described(int64_t parts, const Part& part) {
  SoftmaxPart<C> before = {};
  for (int64_t i = 0; i < parts; ++i) {
    const SoftmaxPart<C> next = part(i);
    if (next.mass == 0) continue;
    join(before.row, before.top, before.mass, next.row, next.top, next.mass);
    const C top = before.mass == 0 ? next.top : fmax(before.top, next.top);
    before.mass = before.mass * before.faded(top) + next.mass * next.faded(top);
    before.top = top;
  }
  return before.row;
}

// Store a column of a row's context x, or, if `added` is given, tanh(x + added).
template <class T, class C>
__device__ void put_context(const Forward& a, const View& added, const Tile& tile, int64_t c, C x) {
  if (added.data) x = tanh(x + widen(at<T>(added, tile, tile.row)[c]));
  narrow(x, at<T>(a.context, tile, tile.row)[c]);
}

// Run a row's step. Without `parts`, the row's blocks are a cluster or a single block; else they
// store parts for combine.
template <class T, Score S>
__global__ void __launch_bounds__(kThreads, 3) step(const Forward a, const View added, const View parts) {
  using C = typename Accumulate<T>::type;
  __shared__ C share[kStepKeys];  // scores, then e^{score - top}
  __shared__ SoftmaxPart<C> end;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile tile = locate(a, 1, 1);
  const auto [own, from, keys] = keys_of_block(a, tile);
  const T* w = S == Score::dot ? nullptr : at<T>(a.score_vector, tile, 0);
  const Rows<T> key = {at<T>(a.key, tile, from), a.key.row, keys};
  score_keys<S, C>(at<T>(a.query, tile, 0), w, key, a.A, [&, own = own, from = from](int j, C s) {
    const int64_t column = from + j - own.origin;
    share[j] = finish_score<T>(a, tile, 0, column, s, kLeast<C>);
    if (a.weights.data) at<C>(a.weights, tile, 0)[column] = share[j];
  });
  __syncthreads();
  C mine[2];
  for (int x = 0; x < 2; ++x) mine[x] = lane + 32 * x < keys ? share[lane + 32 * x] : -INFINITY;
  const C top = of_warp<Max>(fmax(mine[0], mine[1])), shift = top == -INFINITY ? 0 : top;
  const C scores[] = {mine[0], mine[1]};
  for (C& x : mine) x = exp(x - shift);
  const C mass = of_warp<Add>(mine[0] + mine[1]);
  SoftmaxPart<C> of_block = {shift, mass, {}};
  if (a.statistics.data) of_block.row = describe(scores, mine, shift, mass, C(from + lane));
  if (threadIdx.x == 0) end = of_block;
  __syncthreads();  // every warp has read the scores
  if (warp < 2) share[lane + 32 * warp] = warp ? mine[1] : mine[0];
  __syncthreads();

  const Rows<T> value = {at<T>(a.value, tile, from), a.value.row, keys};
  const T* const none = nullptr;
  if (parts.data) {
    C* part = at<C>(parts, tile, blockIdx.y);
    if (threadIdx.x == 0) *reinterpret_cast<SoftmaxPart<C>*>(part + a.Dv) = of_block;
    weighted_sums<kRound>(share, value, a.Dv, none, Identity(),
                          [&](int c, const C* sum) { part[c] = *sum; });
    return;
  }
  const auto sum_values = [&](int64_t first, int count, C* sums) {
    const Rows<T> columns = {value.data + first, value.stride, keys};
    weighted_sums<kRound>(share, columns, count, none, Identity(),
                          [&](int c, const C* sum) { sums[c] = *sum; });
  };
  const auto weigh = [&, own = own](C(&factor)[kMostBlocks]) {
    const SoftmaxPart<C> all = join(end, factor);
    const auto of = [&](unsigned block) { return *of_another(&end, block); };
    if (a.statistics.data && threadIdx.x + blockIdx.y == 0)
      put_statistics(a, tile, 0, all.top, all.mass, described<C>(gridDim.y, of));
    finish_row(a, tile, 0, own, all.top, all.mass, threadIdx.x + blockIdx.y * kThreads,
               kThreads * gridDim.y);
    for (C& x : factor) x *= all.share();
  };
  add_up_blocks<C>(a.Dv, sum_values, weigh,
                   [&](int64_t c, C total) { put_context<T>(a, added, tile, c, total); });
}

// Join up to kJoined parts of each row. If there are more, each block in y joins kJoined of them
// and stores the result in `joined`.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 4 : 6)
    combine(const Forward a, const View added, const View parts, int64_t count, const View joined) {
  using C = typename Accumulate<T>::type;
  __shared__ C share[kJoined];
  const int lane = threadIdx.x % 32;
  const Tile tile = locate(a, a.Tq, 1);
  const int64_t first = blockIdx.y * int64_t{kJoined};
  const int mine = up_to(kJoined, count - first);
  const C* const columns = at<C>(parts, tile, tile.row * count + first);
  const auto part = [&](int64_t i) {
    return reinterpret_cast<const SoftmaxPart<C>*>(columns + i * parts.row + a.Dv);
  };
  C top[kJoined / 32], mass[kJoined / 32];
#pragma unroll
  for (int x = 0; x < kJoined / 32; ++x) {
    const int i = lane + 32 * x;
    top[x] = i < mine ? part(i)->top : C(0);
    mass[x] = i < mine ? part(i)->mass : C(0);
    if (mass[x] == 0) top[x] = -INFINITY;
  }
  SoftmaxPart<C> all = {of_warp<Max>(fmax(top[0], top[1])), 0, {}};
  if (all.top == -INFINITY) all.top = 0;
#pragma unroll
  for (int x = 0; x < kJoined / 32; ++x) {
    const C faded = exp(top[x] - all.top);
    all.mass += mass[x] * faded;
    if (threadIdx.x < 32) share[lane + 32 * x] = faded;
  }
  all.mass = of_warp<Add>(all.mass);
  __syncthreads();
  C* const out = joined.data ? at<C>(joined, tile, tile.row * gridDim.y + blockIdx.y) : nullptr;
  const Rows<C> rows = {columns, parts.row, mine};
  const C* const none = nullptr;
  weighted_sums<kFewRows>(share, rows, a.Dv, none, Identity(), [&](int c, const C* sum) {
    if (out) out[c] = *sum;
    else put_context<T>(a, added, tile, c, *sum * all.share());
  });
  if (a.statistics.data && threadIdx.x == 0)
    all.row = described<C>(mine, [&](int64_t i) { return *part(i); });
  if (out) {
    if (threadIdx.x == 0) *reinterpret_cast<SoftmaxPart<C>*>(out + a.Dv) = all;
    return;
  }
  finish_row(a, tile, tile.row, seen_by(a, tile, tile.row, keys_seen(a, tile.b)), all.top, all.mass,
             threadIdx.x, kThreads);
  if (a.statistics.data && threadIdx.x == 0) put_statistics(a, tile, tile.row, all.top, all.mass, all.row);
}

// ---- backward -----------------------------------------------------------------------------------

// A row's weights P_j and their gradients x_j = grad_context . v_j + grad_weights_j give
//   grad_score_j = P_j (x_j - sum_j P_j x_j + grad_log_sum_exp),
//   grad_query = scale w sum_j grad_score_j s_j,
// where s_j is feature_slope. A part subtracts the mean m of its own keys, and joining replaces it by
// that of all, mean = sum_j P_j x_j:
//   grad_query = scale w sum_parts (centred + (m - mean) slopes),
//   centred = sum_j P_j (x_j - m + grad_log_sum_exp) s_j,  slopes = sum_j P_j s_j.
template <class C>
struct QueryPart {
  C product, mean;  // sum_j P_j x_j, and m
};

// Return a score's gradient; if p is 0, x may be NaN.
template <class C>
__device__ C score_gradient(C p, C x, C mean, C extra) {
  return p == 0 ? C(0) : p * (x - mean + extra);
}

// Set share[0] to the gradients of a block's scores, and store them. `in_parts` their mean is m: store x
// instead, and set share[1] to P.
template <bool in_parts, class T, class C>
__device__ QueryPart<C> differentiate_scores(const Backward& a, const Tile& tile, const StepKeys& keys,
                                             C (&share)[1 + in_parts][kStepKeys]) {
  __shared__ C product;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = keys.count;
  const int64_t column = keys.from - keys.row.origin;  // of the first key
  const Rows<T> value = {at<T>(a.value, tile, keys.from), a.value.row, count};
  score_keys<Score::dot, C>(
      at<T>(a.grad_context, tile, 0), static_cast<const T*>(nullptr), value, a.Dv, [&](int j, C x) {
        share[0][j] = a.grad_weights.data ? x + at<C>(a.grad_weights, tile, 0)[column + j] : x;
      });
  __syncthreads();
  C p[2], x[2], sum = 0;
  for (int half = 0; half < 2; ++half) {
    const int j = lane + 32 * half;
    p[half] = j < count ? at<C>(a.weights, tile, 0)[column + j] : 0;
    x[half] = j < count ? share[0][j] : 0;
    if (p[half] != 0) sum += p[half] * x[half];
  }
  sum = of_warp<Add>(sum);
  C mean = 0;
  if constexpr (in_parts) {
    const C mass = of_warp<Add>(p[0] + p[1]);
    mean = mass == 0 ? C(0) : sum / mass;
    __syncthreads();  // every warp has read x
  } else {
    if (threadIdx.x == 0) product = sum;
    wait_for_blocks();  // and every warp has read x
#pragma unroll
    for (unsigned block = 0; block < kMostBlocks; ++block)
      if (block < gridDim.y) mean += *of_another(&product, block);
  }
  const C extra = a.grad_log_sum_exp.data ? *at<C>(a.grad_log_sum_exp, tile, 0) : 0;
  C* const grad_score = at<C>(a.grad_score, tile, 0);
  if (const int j = lane + 32 * warp; warp < 2) {
    const C weight = warp ? p[1] : p[0], of_weight = warp ? x[1] : x[0];
    share[0][j] = score_gradient(weight, of_weight, mean, extra);
    if constexpr (in_parts) share[1][j] = weight;
    if (j < count) grad_score[column + j] = in_parts ? of_weight : share[0][j];
  }
  for (int64_t c = threadIdx.x + blockIdx.y * kThreads; c < a.W; c += kThreads * gridDim.y)
    if (c + keys.row.origin < keys.row.from || c + keys.row.origin >= keys.row.to) grad_score[c] = 0;
  return {sum, mean};
}

// Compute the gradients of scores, unless they are given, and query: all that a step over a prepared
// memory needs. If `in_parts`, the blocks store centred, slopes and QueryPart for combine_backward; else
// they are a cluster or one block.
template <class T, Score S, bool in_parts>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 3)
    step_backward(const Backward a, const View parts) {
  using C = typename Accumulate<T>::type;
  __shared__ C share[1 + in_parts][kStepKeys];  // grad_score, then P
  const Tile tile = locate(a, 1, 1);
  const StepKeys keys = keys_of_block(a, tile);
  QueryPart<C> end = {};
  if (a.grad_score_given) {
    const C* const given = at<C>(a.grad_score, tile, 0) + keys.from - keys.row.origin;
    if (const int j = threadIdx.x; j < kStepKeys) {
      share[0][j] = j < keys.count ? given[j] : 0;
      if constexpr (in_parts) share[1][j] = 0;
    }
  } else {
    end = differentiate_scores<in_parts, T>(a, tile, keys, share);
  }
  __syncthreads();

  const T *q = at<T>(a.query, tile, 0), *w = S == Score::dot ? nullptr : at<T>(a.score_vector, tile, 0);
  const Rows<T> key = {at<T>(a.key, tile, keys.from), a.key.row, keys.count};
  const auto slope = [](C k, C q) { return feature_slope<S>(q, k); };
  if constexpr (in_parts) {
    C* part = at<C>(parts, tile, blockIdx.y);
    if (threadIdx.x == 0) *reinterpret_cast<QueryPart<C>*>(part + 2 * a.A) = end;
    weighted_sums<kFewRows, 2>(&share[0][0], key, a.A, q, slope,
                               [&](int c, const C* sums) { part[c] = sums[0], part[a.A + c] = sums[1]; });
    return;
  }
  const auto sum_keys = [&](int64_t first, int count, C* sums) {
    weighted_sums<kFewRows>(share[0], Rows<T>{key.data + first, key.stride, key.count}, count, q + first,
                            slope, [&](int c, const C* sum) { sums[c] = *sum; });
  };
  add_up_blocks<C>(a.A, sum_keys, Unweighted(), [&](int64_t c, C total) {
    if (S != Score::dot) total *= widen(w[c]);
    narrow(C(a.scale) * total, at<T>(a.grad_query, tile, 0)[c]);
  });
}

// Join the `count` parts of each row. A block takes 32 features and its warps divide the parts; a row's
// blocks also divide its keys and turn x into grad_score.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 4 : 6)
    combine_backward(const Backward a, const View parts, int count, int slices) {
  using C = typename Accumulate<T>::type;
  __shared__ C sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = blockIdx.x % slices;
  const int64_t c = slice * 32 + lane;
  const Tile tile = locate(a, 1, 1, blockIdx.x / slices);
  const C* const columns = at<C>(parts, tile, 0);
  const auto part = [&](int i) {
    return reinterpret_cast<const QueryPart<C>*>(columns + i * parts.row + 2 * a.A);
  };
  C product = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kThreads) product += part(i)->product;
  int turn = 0;
  const C mean = of_blocks<Add>(product, turn);
  C sum = 0;
#pragma unroll 1
  for (int first = warp; first < count && c < a.A; first += kWarps * kAtOnce) {
    C centred[kAtOnce], slopes[kAtOnce], its_mean[kAtOnce];
#pragma unroll
    for (int x = 0; x < kAtOnce; ++x) {
      const int i = min(first + kWarps * x, count - 1);
      centred[x] = columns[i * parts.row + c];
      slopes[x] = columns[i * parts.row + a.A + c];
      its_mean[x] = part(i)->mean;
    }
#pragma unroll
    for (int x = 0; x < kAtOnce; ++x)
      if (first + kWarps * x < count) sum += centred[x] + (its_mean[x] - mean) * slopes[x];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && c < a.A) {
    C total = C(a.scale);
    if (a.score != Score::dot) total *= widen(at<T>(a.score_vector, tile, 0)[c]);
    narrow(total * (sums[0][lane] + sums[1][lane] + sums[2][lane] + sums[3][lane]),
           at<T>(a.grad_query, tile, 0)[c]);
  }
  if (a.grad_score_given) return;
  const Seen own = seen_by(a, tile, 0, keys_seen(a, tile.b));
  const C extra = a.grad_log_sum_exp.data ? *at<C>(a.grad_log_sum_exp, tile, 0) : 0;
  const C* const weights = at<C>(a.weights, tile, 0);
  C* const grad_score = at<C>(a.grad_score, tile, 0);
#pragma unroll 4
  for (int64_t j = own.from - own.origin + slice * kThreads + threadIdx.x; j < own.to - own.origin;
       j += slices * kThreads)
    grad_score[j] = score_gradient(weights[j], grad_score[j], mean, extra);
}

// ---- launches -----------------------------------------------------------------------------------

// Return true if the call has one row, whose keys need no more blocks than a grid has on y.
inline bool is_step(const Problem& a) { return a.Tq == 1 && tiles(min(a.W, a.Tk), kStepKeys) <= kMostOnY; }

// Return the number of blocks that divide a row's keys: enough for kStepKeys keys each, and more up
// to the largest cluster while the blocks of all rows run at once, because a block's time is
// proportional to its keys.
template <class Launch, class Kernel>
int64_t step_blocks(const Problem& a, const Launch& launch, Kernel kernel) {
  const int64_t keys = max(min(a.W, a.Tk), int64_t{1}), rows = max(a.B * a.H, int64_t{1});
  const int64_t most = min(launch.places(kernel) / rows, int64_t{launch.most_together(kernel)});
  const int64_t rounds = tiles(keys, max(most, int64_t{1}) * kRound);
  return tiles(keys, min(rounds * kRound, int64_t{kStepKeys}));
}

// Allocate `count` parts of every row, each of `columns` and an End.
template <class T, template <class> class End, class Launch>
View room_for_parts(const Problem& a, int64_t count, int64_t columns, const Launch& launch) {
  using C = typename Accumulate<T>::type;
  const int64_t row = columns + int64_t{sizeof(End<C>) / sizeof(C)};
  const int64_t head = a.Tq * count * row, batch = a.H * head;
  return {launch.template scratch<C>(a.B * batch), batch, head, row, 1};
}

// Join the parts of all rows.
template <class T, class Launch>
void launch_combine(const Forward& a, const Launch& launch, const View& added, View parts, int64_t count) {
  while (count > kJoined) {
    const int64_t fewer = tiles(count, kJoined);
    const View joined = room_for_parts<T, SoftmaxPart>(a, fewer, a.Dv, launch);
    launch(combine<T>, a.B * a.H * a.Tq, fewer, a, View{}, parts, count, joined);
    parts = joined;
    count = fewer;
  }
  launch(combine<T>, a.B * a.H * a.Tq, 1, a, added, parts, count, View{});
}

template <class T, class Launch>
void launch_step(const Forward& a, const Launch& launch, const View& added) {
  const auto kernel = by_score(a.score, [](auto known) { return step<T, decltype(known)::score>; });
  const int64_t blocks = step_blocks(a, launch, kernel);
  if (blocks <= launch.most_together(kernel))
    return launch.together(kernel, a.B * a.H, blocks, a, added, View{});
  const View parts = room_for_parts<T, SoftmaxPart>(a, blocks, a.Dv, launch);
  launch(kernel, a.B * a.H, blocks, a, added, parts);
  launch_combine<T>(a, launch, added, parts, blocks);
}

// Run a step's backward, and return true, if only the gradients of scores and query are needed.
template <class T, class Launch>
bool launch_step_backward(const Backward& a, const Launch& launch) {
  const bool others = a.grad_key.data || a.grad_value.data || a.grad_score_vector.data;
  if (!is_step(a) || !a.grad_query.data || others) return false;
  const auto kernel = [&](auto parts) {
    constexpr bool in_parts = decltype(parts)::value;
    return by_score(a.score, [](auto known) { return step_backward<T, decltype(known)::score, in_parts>; });
  };
  const auto whole = kernel(std::false_type{});
  const int64_t blocks = step_blocks(a, launch, whole);
  if (blocks <= launch.most_together(whole)) {
    launch.together(whole, a.B * a.H, blocks, a, View{});
    return true;
  }
  const View parts = room_for_parts<T, QueryPart>(a, blocks, 2 * a.A, launch);
  launch(kernel(std::true_type{}), a.B * a.H, blocks, a, parts);
  const int slices = max(tiles(a.A, 32), int64_t{1});
  launch(combine_backward<T>, a.B * a.H * slices, 1, a, parts, int(blocks), slices);
  return true;
}

}  // namespace
}  // namespace attnfast
