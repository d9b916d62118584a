// The scores of a search's words: their packed weights, the best of a row, and draws.
#pragma once
#include "recurrent_forward.h"

namespace attnfast {
namespace VARIANT {
namespace {

// A word that may continue a hypothesis, and its logit or its score.
template <class C>
struct Candidate {
  C score;
  int64_t word;
  int64_t slot;  // of the hypothesis
};

// The n best candidates of those inserted, the best first; of equal ones, the first that was inserted.
template <class C>
struct Best {
  Candidate<C>* at;
  int64_t most, n;

  C least() const { return n < most ? -(C)__builtin_inf() : at[n - 1].score; }
  bool takes(C score) const { return score > least(); }
  void insert(const Candidate<C>& x) {
    if (n < most) ++n;
    int64_t i = n - 1;
    for (; i > 0 && at[i - 1].score < x.score; --i) at[i] = at[i - 1];
    at[i] = x;
  }
};

// The largest logit of some words, and the sum of exp(logit - largest): NaN if any is NaN or infinite.
template <class C>
struct Mass {
  C largest;
  double sum;

  void add(const Mass& x) {
    if (x.sum == 0) return;  // of no word
    if (!(x.largest <= largest)) {
      sum *= __builtin_exp((double)largest - x.largest);
      largest = x.largest;
    }
    sum += x.sum * __builtin_exp((double)x.largest - largest);
  }
};

// The packed parameters of a search.
template <class C>
struct PackedSearch {
  Packed<C> layer;
  Panels<C> of_state, of_context, of_input;  // of the readout
  Panels<C> vocabulary;

  PackedSearch(const Layer& a, const Words& words, Scratch<C>& room) : layer(a, room) {
    const Stored stored = stored_in(a);
    if (words.weight_readout.data) {
      of_state = take_panels(room, a.H, panels<C>(words.R), stored);
      of_context = take_panels(room, a.Dv, panels<C>(words.R), stored);
      if (words.reads_input) of_input = take_panels(room, a.E, panels<C>(words.R), stored);
    }
    vocabulary = take_panels(room, words.R, panels<C>(words.V), stored);
  }

  // Return those that the caller provides, if any.
  static PackedSearch of(const Search& a, Scratch<C>& room) {
    Scratch<C> given = {static_cast<C*>(a.step.packed)};
    return PackedSearch(a.step, a, a.step.packed ? given : room);
  }

  void pack(const Layer& a, const Words& words, Member& member) const {
    layer.pack(a, member);
    const Panels<C>* const all[] = {&of_state, &of_context, &of_input, &vocabulary};
    const int64_t columns[] = {0, a.H, a.H + a.Dv, 0};
    int64_t total = 0;
    for (const auto* panels : all) total += panels->count;
    member.share(total, [&](int64_t item) {
      int which = 0;
      for (; item >= all[which]->count; ++which) item -= all[which]->count;
      const bool of_words = which == 3;
      Packed<C>::pack(*all[which], of_words ? words.weight_vocab : words.weight_readout, columns[which],
                      of_words ? words.V : words.R, item);
    });
  }
};

// The largest logit of each lane, and the sum of exp(logit - largest).
template <class C>
struct Lanes {
  static constexpr int64_t P = kPanel<C>;
  Vec<C> largest, sum;

  // Return exp(x - from), 0 if x is -inf.
  static Vec<C> exp_from(Vec<C> x, Vec<C> from) {
    return x == splat((C)-__builtin_inf()) ? Vec<C>{} : exp(x - from);
  }

  // Add a row of a panel.
  void add(const C* x) {
    Vec<C> now = largest;
    for (int64_t c = 0; c < P; c += Vector<C>::width) {
      const Vec<C> logits = load(x + c);
      now = (~(logits <= now) & (now == now)) ? logits : now;  // NaN stays
    }
    sum *= exp_from(largest, now);
    largest = now;
    for (int64_t c = 0; c < P; c += Vector<C>::width) sum += exp_from(load(x + c), largest);
  }

  Mass<C> mass() const {
    Mass<C> all = {-(C)__builtin_inf(), 0};
    for (int i = 0; i < Vector<C>::width; ++i) all.add({largest[i], (double)sum[i]});
    return all;
  }
};

// Indices of a row, those of larger numbers first; of equal ones the lower.
template <class C>
struct Order {
  const C* x;
  int32_t* heap;
  int64_t n;

  bool before(int32_t i, int32_t j) const { return x[i] > x[j] || (x[i] == x[j] && i < j); }

  void sink(int64_t at) {
    const int32_t moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
      if (child + 1 < n && before(heap[child + 1], heap[child])) ++child;
      if (!before(heap[child], moved)) break;
      heap[at] = heap[child];
    }
    heap[at] = moved;
  }

  void begin() {
    for (int64_t i = 0; i < n; ++i) heap[i] = i;
    for (int64_t i = n / 2; i-- > 0;) sink(i);
  }

  // Remove the first index and store it behind the others.
  int32_t next() {
    const int32_t first = heap[0];
    heap[0] = heap[--n];
    heap[n] = first;
    sink(0);
    return first;
  }
};

// How a word is drawn.
struct Draw {
  double temperature, top_p;
  int64_t top_k;
  bool sorts() const { return top_k || top_p < 1; }
};

// Return the word at `number` in [0, 1), or -1 if none may come: the first at which the sum of the
// probabilities so far exceeds the number, from the most probable on if there is a top_k or top_p.
// `logits` are n, whole vectors, -inf of words that may not come; `x` has room for as many numbers and
// `heap` for as many indices.
template <class C>
int64_t draw_word(const Draw& draw, double number, const C* logits, int64_t n, C* x, int32_t* heap) {
  const C never = -(C)__builtin_inf();
  Vec<C> largest = splat(never);
  for (int64_t c = 0; c < n; c += Vector<C>::width)
    largest = load(logits + c) > largest ? load(logits + c) : largest;
  const C top = highest<C>(largest), scale = 1 / (draw.temperature > 1e-30 ? draw.temperature : 1e-30);
  if (top == never) return -1;
  double total = 0;
  for (int64_t c = 0; c < n; c += Vector<C>::width) {
    const Vec<C> logit = load(logits + c);
    const Vec<C> odds = logit == splat(never) ? Vec<C>{} : exp((logit - top) * scale);
    store(x + c, odds);
    for (int i = 0; i < Vector<C>::width; ++i) total += odds[i];
  }
  int64_t last = -1;
  if (!draw.sorts()) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (x[i] == 0) continue;
      last = i, sum += x[i];
      if (sum > number * total) break;
    }
    return last;
  }
  Order<C> order = {x, heap, n};
  order.begin();
  int64_t count = 0;
  const int64_t most = draw.top_k ? min(draw.top_k, n) : n;
  if (draw.top_k)
    for (total = 0; count < most; ++count) total += x[order.next()];
  // The i-th word in order is heap[n - 1 - i].
  double sum = 0;
  int64_t kept = 0;
  for (; kept < most && sum < draw.top_p * total; ++kept) {
    if (kept == count) order.next(), ++count;
    sum += x[heap[n - 1 - kept]];
  }
  double part = 0;
  for (int64_t i = 0; i < kept; ++i) {
    if (x[heap[n - 1 - i]] == 0) break;
    last = heap[n - 1 - i], part += x[last];
    if (part > number * sum) break;
  }
  return last;
}

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
