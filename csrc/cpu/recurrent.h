// The interface between the CPU launcher of a recurrent layer and its kernels, one table per
// instruction set.
#pragma once
#include "../recurrent.h"
#include "attention.h"

namespace attnfast {
namespace cpu {

// The state that the members of a team share.
struct Team {
  int64_t members;
  uint32_t* taken;  // for each item the last phase that took it, initially 0
  uint64_t done;    // number of items done, over all phases
};

// The plan of a layer.
struct LayerPlan {
  int64_t rows;    // of one item of a product
  Plan attention;  // of one step
};

// The best word of a range, and the sum of exp(score - its score) over the range.
template <class C>
struct Found {
  C score;
  int64_t word;  // negative: none
  C sum;
};

}  // namespace cpu

// Greedy search: the steps of a layer, one at a time, each of which reads the best word of the
// previous step.
struct GreedySearch {
  Dtype dtype;
  int64_t B, T, V, R, begin, end, most;  // T is 1; at most `most` words, the first after `begin`
  RecurrentForward even, odd;            // steps, each starting from the other's results
  View hidden, first_cell, feed;         // initial values of the first step
  View embedding, weight_readout, weight_vocab, bias_readout, bias_vocab;
  double embedding_scale;
  const int64_t* limits;  // [B]
  View read;              // scratch [B, 1, R], with a readout
  int64_t* words;         // out [B, most]
  View scores;            // out [B, most], the words' log-probabilities
};

// The size in bytes of the scratch shared by all and of each member's, the largest number of items
// of a phase, and the work of one member.
template <class Call>
struct LayerKernel {
  size_t (*shared)(const Call&, const cpu::LayerPlan&);
  size_t (*own)(const Call&, const cpu::LayerPlan&);
  int64_t (*items)(const Call&, const cpu::LayerPlan&);
  void (*run)(const Call&, const cpu::LayerPlan&, cpu::Team&, int64_t member, void* shared, void* own);
};

struct RecurrentKernels {
  bool (*multiplies_narrow)();     // true if this processor multiplies bfloat16 pairs
  size_t (*packed)(const Layer&);  // bytes of packed weights, an optional input of a forward
  int64_t (*pack_items)(const Layer&);
  void (*pack)(const Layer&, cpu::Team&, int64_t member, void* out);
  LayerKernel<RecurrentForward> forward;
  LayerKernel<RecurrentBackward> backward;
  LayerKernel<GreedySearch> search;
};

// clang-format off
namespace portable { extern const RecurrentKernels recurrent; }
namespace avx2 { extern const RecurrentKernels recurrent; }
namespace avx512 { extern const RecurrentKernels recurrent; }
// clang-format on

}  // namespace attnfast
