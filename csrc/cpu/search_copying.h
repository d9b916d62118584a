// The words of a source in a search with a pointer-generator, see ../word.h.
#pragma once
#include "search_words.h"
#include "../word.h"

namespace attnfast {
namespace VARIANT {
namespace {

// The words of each source that may come, sorted, and their logits, then their scores, for each row.
template <class C>
struct SourceWords {
  const Search& a;
  C* scores;  // [rows, Tk]

  const int64_t* words(int64_t s) const { return a.source_words + s * a.step.Tk; }
  int64_t count(int64_t s) const { return a.source_count[s]; }
  C* scores_of(int64_t r) const { return scores + r * a.step.Tk; }

  // Return the index of the first word of a source from `word` on.
  int64_t find(int64_t s, int64_t word) const {
    int64_t first = 0, last = count(s);
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (words(s)[middle] < word) first = middle + 1;
      else last = middle;
    }
    return first;
  }

  bool has(int64_t s, int64_t word) const {
    const int64_t at = find(s, word);
    return at < count(s) && words(s)[at] == word;
  }

  // Keep the logits of a row's panel, whose first word is `first`.
  void keep(int64_t r, int64_t s, int64_t first, const C* logits) const {
    const int64_t end = first + kPanel<C>;
    for (int64_t at = find(s, first); at < count(s) && words(s)[at] < end; ++at)
      scores_of(r)[at] = logits[words(s)[at] - first];
  }

  // Compute the scores of a row's words. Return what added to another word's logit is its score.
  // `pointer` is the logit of the gate, `sum` the log-sum-exp of the logits of words that may come,
  // `all` that of all words; `copied` has room for as many numbers as the source has words.
  double score(int64_t r, int64_t s, double pointer, const C* weights, double sum, double all,
               double* copied) const {
    const Gate gate(pointer);
    for (int64_t at = 0; at < count(s); ++at) copied[at] = 0;
    const int64_t* const index = a.source_index + s * a.step.Tk;
    double copied_sum = 0;
    for (int64_t j = 0; j < a.step.Tk; ++j)
      if (index[j] >= 0) copied[index[j]] += weights[j], copied_sum += weights[j];
    const double log_p = gate.log_p - all, never = -__builtin_inf();
    const Word every(sum + log_p, copied_sum, gate.log_q);
    for (int64_t at = 0; at < count(s); ++at) {
      C& x = scores_of(r)[at];
      const double logit = words(s)[at] < a.V ? x : never;
      const Word word(logit + log_p, copied[at], gate.log_q);
      x = word.slight && logit == never ? never : word.log_p - every.log_p;
    }
    return log_p - every.log_p;
  }
};

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
