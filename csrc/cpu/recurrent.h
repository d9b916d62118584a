// What the CPU's launcher of a recurrent layer knows of its kernels, one set for every instruction set.
#pragma once
#include "../recurrent.h"
#include "attention.h"

namespace attnfast {
namespace cpu {

// What the members of a team tell each other.
struct Team {
  int64_t members;
  uint32_t* taken;  // for each item the last phase in which it was taken, at first 0
  uint64_t done;    // items, in all phases
};

// How a layer is carried out.
struct LayerPlan {
  int64_t rows;    // of one item of a product
  Plan attention;  // of one step
};

// The best of some words.
template <class C>
struct Found {
  C score;
  int64_t word;  // negative: none
};

}  // namespace cpu

// A search for the best word at every step, which the next one reads: a layer's steps, one at a time.
struct GreedySearch {
  Dtype dtype;
  int64_t B, T, V, R, begin, end, most;  // T is 1; at most `most` words, the first after `begin`
  RecurrentForward even, odd;            // steps, each of which begins where the other has ended
  View hidden, first_cell, feed;         // what the first step begins with
  View embedding, weight_readout, weight_vocab, bias_readout, bias_vocab;
  double embedding_scale;
  const int64_t* limits;  // [B]
  View read;              // room [B, 1, R], with a readout
  int64_t* words;         // out [B, most]
};

// Bytes of scratch, for all and for each member, and the most items of a phase; what one member does.
template <class Call>
struct LayerKernel {
  size_t (*shared)(const Call&, const cpu::LayerPlan&);
  size_t (*own)(const Call&, const cpu::LayerPlan&);
  int64_t (*items)(const Call&, const cpu::LayerPlan&);
  void (*run)(const Call&, const cpu::LayerPlan&, cpu::Team&, int64_t member, void* shared, void* own);
};

struct RecurrentKernels {
  bool (*multiplies_narrow)();     // whether this processor multiplies numbers of bfloat16
  size_t (*packed)(const Layer&);  // bytes of packed weights, which a forward may be given
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
