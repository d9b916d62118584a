// The hypotheses and the buffers of a search.
#pragma once
#include "search_words.h"

namespace attnfast {
namespace VARIANT {
namespace {

// How a hypothesis was continued at a step.
template <class C>
struct Link {
  int64_t word;
  int64_t parent;  // its slot at the step before
  C score;         // of the word
};

// A finished hypothesis: its last link is that of `step` and `link`.
template <class C>
struct FinishedHypothesis {
  C score;
  int64_t step;
  Link<C> link;
};

// The buffers of a search.
template <class C>
struct SearchRoom {
  PackedSearch<C> packed;
  int64_t panels_at_a_time;         // of the vocabulary, in one item
  Candidate<C>* candidates;         // [rows, groups, K], without the end
  Mass<C>* masses;                  // [rows, groups]
  Mass<C>* all_masses;              // [rows, groups], with the words that may not come, for copying
  C* bias;                          // [masks, padded V]: -inf of words that may not come; see bias_of
  C* whole_bias;                    // [padded V]: of all words, for copying
  C *of_end, *of_forced;            // [rows]: the logits of the end, and of the prefix's word
  C* of_source;                     // [rows, Tk]: the logits of the source's words, then their scores
  C* logits;                        // [rows, words of a row], for draws
  C* totals;                        // [B, K]: the scores of the hypotheses, by sentence
  Candidate<C>* best;               // [B, 2 K]: scratch
  Link<C>* links;                   // [B, most, K]
  FinishedHypothesis<C>* finished;  // [B, K], the best first
  int64_t* finished_count;          // [B], of all that have finished
  int64_t* sentence;                // [B]: of those that are left
  int64_t* ended;                   // [B]: 1, or -1 after NaN
  int64_t* goes_on;                 // [B]: the sentences that the next step still needs
  int64_t* counts;                  // [most + 1]: the number of sentences of each step
  C *hidden, *cells, *feed;         // of a step's rows, hidden and cells of all layers
  // Arguments of attention, compacted once some sentences have been dropped.
  C *key, *value, *exponentials;
  int64_t *lengths, *key_bounds;
  bool* mask;
  C* weights;            // [B, most, K, Tk]: of all steps, if they are returned
  C* coverage;           // [2, B, K, Tk]: sums of weights, of even and odd steps
  int64_t* words;        // [B, K, most]: scratch
  int64_t* repeated;     // [B, K, most]: the words that would repeat an n-gram
  int64_t* repetitions;  // [B, K]: their number
  // For attention with a history: each row's coverage, at even and at odd steps, and its weights or
  // log-weights of the step before.
  C *history, *previous;
  C *inverse_fertility, *transition_prob;  // compacted
  void* features;
  char* rounded;  // the bytes of up to three left factors

  SearchRoom(const Search& a, Scratch<C>& room) : packed(PackedSearch<C>::of(a, room)) {
    const RecurrentForward& step = a.step;
    const int64_t K = a.beam, rows = a.B * K;
    panels_at_a_time = larger(parts(packed.vocabulary.count, a.groups), 1);
    const auto take = [&]<class T>(T*& out, int64_t n) {
      out = reinterpret_cast<T*>(room.take(parts(n * sizeof(T), sizeof(C))));
    };
    const Forward& of = step.attention;
    take(candidates, rows * groups() * K);
    take(masses, rows * groups());
    take(all_masses, a.source_words ? rows * groups() : 0);
    take(bias, (a.word_mask.batch ? a.B : 1) * padded_words());
    take(whole_bias, a.source_words ? padded_words() : 0);
    take(of_end, rows);
    take(of_forced, rows);
    take(of_source, a.source_words ? rows * of.Tk : 0);
    take(logits, a.numbers ? rows * words_of_row(a) : 0);
    take(totals, rows);
    take(best, a.B * 2 * K);
    take(links, rows * a.most);
    take(finished, rows);
    take(finished_count, a.B);
    take(sentence, a.B);
    take(ended, a.B);
    take(goes_on, a.B);
    take(counts, a.most + 1);
    take(hidden, step.layers * rows * step.H);
    take(cells, step.cell == Cell::lstm ? step.layers * rows * step.H : 0);
    take(feed, rows * step.F);
    take(key, a.B * of.Tk * of.A);
    take(value, a.B * of.Tk * of.Dv);
    take(exponentials, of.exponentials.data ? a.B * of.Tk * of.exponentials.row : 0);
    take(lengths, a.B);
    take(key_bounds, of.key_bounds.batch ? a.B * a.most * 2 : 0);
    take(mask, of.mask.batch ? a.B * of.Tk : 0);
    take(weights, a.weights.data ? rows * a.most * of.Tk : 0);
    take(coverage, a.coverage_penalty ? 2 * rows * of.Tk : 0);
    const int64_t of_ngrams = a.no_repeat_ngram ? rows * a.most : 0;
    take(words, of_ngrams);
    take(repeated, of_ngrams);
    take(repetitions, a.no_repeat_ngram ? rows : 0);
    const CoverageForward& past = step.attention;
    const int64_t of_past = has_history(past) ? of.Tk : 0;
    take(history, 2 * rows * of_past);
    take(previous, rows * of_past);
    take(inverse_fertility, past.inverse_fertility.data ? a.B * of.Tk : 0);
    take(transition_prob, past.transition_prob.data ? a.B * a.most : 0);
    features = take_features(of, past, false, room);
    const int64_t depth = larger(larger(larger(step.E, step.H), larger(step.F, step.Dv)), a.R);
    take(rounded, step.int8 ? 3 * size_of_bytes(rows, depth) : 0);
  }

  int64_t padded_words() const { return packed.vocabulary.count * kPanel<C>; }
  int64_t words_of_row(const Search& a) const { return round_up(a.V + a.X, kPanel<C>); }
  int64_t groups() const { return parts(packed.vocabulary.count, panels_at_a_time); }
};

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
