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

}  // namespace cpu

constexpr int64_t kMostBeam = 64;

// The words that a search reads and writes, and the weights of their scores.
struct Words {
  int64_t V, R;
  View embedding, weight_readout, weight_vocab, bias_readout, bias_vocab;
  double embedding_scale;
  bool reads_input;  // the readout reads the embedded word too
};

// A search with a beam: the steps of a layer, one at a time, each of which reads the words that
// continue the best hypotheses of the previous step.
struct Search : Words {
  Dtype dtype;
  int64_t B, T;                  // sentences, and their hypotheses: T is the beam
  int64_t begin, end, most;      // at most `most` words, the first after `begin`; an end of -1 is none
  int64_t X, unknown;            // words that only a source has, from V on, are read as `unknown`
  int64_t beam, n_best, groups;  // groups: the parts of the vocabulary that threads share
  RecurrentForward step;
  View hidden, first_cell, feed;  // [B, n]: initial values
  double length_penalty, length_bonus, coverage_penalty;
  int64_t min_length, no_repeat_ngram, prefix_length;
  View word_mask;         // bool [1 or B, V + X] or absent: false for words that may not come
  View prefix;            // int64 [B, prefix_length]: words of the first steps, -1 for any
  const double* numbers;  // [B, beam, most] in [0, 1): words are drawn by them; or null: the best are taken
  double temperature, top_p;
  int64_t top_k;
  const int64_t* limits;  // [B]
  // For a pointer-generator, else null: the words of each source that may come, sorted, [B, Tk]; their
  // number, [B]; for each key its word's index among them, or -1, [B, Tk].
  const int64_t *source_words, *source_count, *source_index;
  View weight_pointer, bias_pointer;  // the gate's, [1, R], or [1, H + Dv + E] if it reads the state; [1]
  bool gate_reads_state;              // the state, the context and the embedded word
  View read;                          // scratch [B, beam, R], unless attentional vectors are scored
  int64_t *words, *lengths;           // out [B, n_best, most] and [B, n_best]; a length is -1 after NaN
  View word_scores, scores;           // out [B n_best, most], the words' log-probabilities, and [B, n_best]
  View weights;                       // out [B n_best, most, Tk], or absent
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
  bool (*multiplies_narrow)();  // true if this processor multiplies bfloat16 pairs
  // Bytes of the packed weights of a layer and of words, if any: an optional input of a forward and of
  // a search.
  size_t (*packed)(const Layer&, const Words&);
  int64_t (*pack_items)(const Layer&, const Words&);
  void (*pack)(const Layer&, const Words&, cpu::Team&, int64_t member, void* out);
  LayerKernel<RecurrentForward> forward;
  LayerKernel<RecurrentBackward> backward;
  LayerKernel<Search> search;
};

// clang-format off
namespace portable { extern const RecurrentKernels recurrent; }
namespace avx2 { extern const RecurrentKernels recurrent; }
namespace avx512 { extern const RecurrentKernels recurrent; }
// clang-format on

}  // namespace attnfast
