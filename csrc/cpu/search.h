// Beam search: every step reads the words that continue the best hypotheses of the previous step,
// see recurrent_forward.h. A greedy search has a beam of one.
//
// The K hypotheses of a sentence are K rows of the layer, and K queries of one problem of attention:
// they share its keys. Rows and slots: sentence i of those that are left has the rows i K + slot;
// what is kept for the end is stored by the sentence's own number and the slot.
#pragma once
#include "recurrent_forward.h"

namespace attnfast {
namespace VARIANT {
namespace {

using cpu::LayerPlan;

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
      sum *= ::exp((double)largest - x.largest);
      largest = x.largest;
    }
    sum += x.sum * ::exp((double)x.largest - largest);
  }
};

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
      of_input = take_panels(room, a.E, panels<C>(words.R), stored);
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
    const int64_t of_readout = of_state.count;
    member.share(3 * of_readout + vocabulary.count, [&](int64_t item) {
      if (item >= 3 * of_readout)
        return Packed<C>::pack(vocabulary, words.weight_vocab, 0, words.V, item - 3 * of_readout);
      const Panels<C>* const all[] = {&of_state, &of_context, &of_input};
      const int64_t columns[] = {0, a.H, a.H + a.Dv}, which = item / of_readout;
      Packed<C>::pack(*all[which], words.weight_readout, columns[which], words.R, item % of_readout);
    });
  }
};

// The buffers of a search.
template <class C>
struct SearchRoom {
  PackedSearch<C> packed;
  int64_t panels_at_a_time;         // of the vocabulary, in one item
  Candidate<C>* candidates;         // [rows, groups, K], without the end
  Mass<C>* masses;                  // [rows, groups]
  C* of_end;                        // [rows]: the logit of the end
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
    take(of_end, rows);
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
    const int64_t depth = larger(larger(larger(step.E, step.H), larger(step.F, step.Dv)), a.R);
    take(rounded, step.int8 ? 3 * size_of_bytes(rows, depth) : 0);
  }

  int64_t groups() const { return parts(packed.vocabulary.count, panels_at_a_time); }
};

template <class C>
class BeamSearch {
  static constexpr int64_t P = kPanel<C>;
  const Search& a;
  const LayerPlan& plan;
  Member& member;
  const SearchRoom<C> room;
  void* own;
  const int64_t K, groups;
  const bool feeds;
  Problem attention;  // of the sentences that are left; queries belong to a step

 public:
  BeamSearch(const Search& a, const LayerPlan& plan, Member& member, Scratch<C> place, void* own)
      : a(a), plan(plan), member(member), room(a, place), own(own), K(a.beam), groups(room.groups()),
        feeds(!a.step.attends_first && a.step.F), attention(static_cast<const Problem&>(a.step.attention)) {
  }

  void run() {
    if (!a.step.packed) room.packed.pack(a.step, a, member);
    member.share(a.B, [&](int64_t b) { begin(b); });
    for (int64_t t = 0; attention.B && t < a.most; ++t) {
      const RecurrentForward step = step_at(t);
      Forwards<C>(step, plan, member, room.packed.layer, own, room.rounded).take_steps();
      if (a.weight_readout.data) read_out(step);
      const View output = a.weight_readout.data ? View{a.read.data, a.R} : step.attentional;
      Factor<C> outputs[] = {factor(of_step<C>(output, 0, 0), a.R)};
      round_factors(step, plan, member, room.rounded, outputs);
      member.share(blocks(step, plan, groups), [&](int64_t item) { score(step, outputs[0], item); });
      member.share(attention.B, [&](int64_t i) { choose(i, t); });
      member.share(1, [&](int64_t) { count(attention.B, t); });
      const int64_t left = room.counts[t + 1];
      member.share(left, [&](int64_t i) { go_on(step, i, t); });
      if (left < attention.B) leave_out(left);
    }
    member.share(a.B, [&](int64_t b) { write(b); });
  }

 private:
  // Return the number of values in the states of a layer.
  int64_t of_layer() const { return a.B * K * a.step.H; }

  // Return the step at t of the hypotheses that are left.
  RecurrentForward step_at(int64_t t) const {
    RecurrentForward step = a.step;
    step.B = attention.B * K;
    step.hidden = {room.hidden, step.H, of_layer()};
    if (step.cell == Cell::lstm) step.first_cell = {room.cells, step.H, of_layer()};
    step.feed = feeds ? View{room.feed, step.F} : View{};
    Problem& of = step.attention;
    const View query = of.query;
    of = attention;
    of.query = query;
    shift_to_step(of.key_bounds, t, sizeof(int64_t));
    of.key_bounds.row = 0;  // the same for all hypotheses
    return step;
  }

  // Give all hypotheses of sentence b its initial state; only the first may continue.
  void begin(int64_t b) {
    room.sentence[b] = b;
    room.finished_count[b] = 0;
    room.ended[b] = a.limits[b] <= 0;
    const RecurrentForward& step = a.step;
    for (int64_t k = 0; k < K; ++k) {
      const int64_t r = b * K + k;
      const auto put = [&](const View& from, C* to, int64_t n) {
        for (int64_t i = 0; i < n; ++i) to[r * n + i] = from.data ? row<C>(from, b)[i] : C{};
      };
      for (int64_t layer = 0; layer < step.layers; ++layer) {
        put(at_layer<C>(a.hidden, layer), room.hidden + layer * of_layer(), step.H);
        if (step.cell == Cell::lstm)
          put(at_layer<C>(a.first_cell, layer), room.cells + layer * of_layer(), step.H);
      }
      if (feeds) put(a.feed, room.feed, step.F);
      room.totals[r] = k ? -(C)__builtin_inf() : (C)0;
      embed(r, a.begin);
    }
  }

  void embed(int64_t r, int64_t word) {
    const C* const from = row<C>(a.embedding, word);
    C* const to = row<C>(a.step.input, r);
    for (int64_t i = 0; i < a.step.E; ++i) to[i] = from[i] * (C)a.embedding_scale;
  }

  // Compute the readout from the state, the context and the word.
  void read_out(const RecurrentForward& step) {
    const PackedSearch<C>& packed = room.packed;
    const Panels<C>* const with[] = {&packed.of_state, &packed.of_context, &packed.of_input};
    Factor<C> factors[] = {factor(of_step<C>(last_level<C>(step).states, 0, 0), step.H),
                           factor(of_step<C>(step.contexts, 0, 0), step.Dv),
                           factor(of_step<C>(step.input, 0, 0), step.E)};
    round_factors(step, plan, member, room.rounded, factors);
    member.share(blocks(step, plan, packed.of_state.count), [&](int64_t item) {
      const Block block(step, plan, item);
      const int64_t first = block.panel * P;
      alignas(64) C x[kMostBatch * P];
      clear(x, block.rows * P);
      for (int i = 0; i < 3; ++i) factors[i].multiply(block.b, block.rows, with[i]->at(block.panel), x);
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.R - first, [&](int64_t c, int64_t n) {
          Vec<C> sum = load(x + r * P + c);
          if (a.bias_readout.data) sum += load_part(row<C>(a.bias_readout, 0) + first + c, n, (C)0);
          store_part(static_cast<C*>(a.read.data) + (block.b + r) * a.R + first + c, tanh_of(sum), n);
        });
    });
  }

  // Compute the logits of a group of panels for some rows. Keep the best of each row but the end's,
  // to which no length bonus is added, the end's, and the mass of all.
  void score(const RecurrentForward& step, const Factor<C>& outputs, int64_t item) {
    const Block block(step, plan, item);
    const int64_t first = block.panel * room.panels_at_a_time,
                  last = min(first + room.panels_at_a_time, room.packed.vocabulary.count);
    Lanes lanes[kMostBatch];
    Best<C> best[kMostBatch];
    for (int64_t r = 0; r < block.rows; ++r) {
      lanes[r] = {splat((C)-__builtin_inf()), Vec<C>{}};
      const int64_t place = (block.b + r) * groups + block.panel;
      best[r] = {room.candidates + place * K, K, 0};
    }
    for (int64_t panel = first; panel < last; ++panel) {
      alignas(64) C x[kMostBatch * P];
      clear(x, block.rows * P);
      outputs.multiply(block.b, block.rows, room.packed.vocabulary.at(panel), x);
      add_bias(panel, block.rows, x);
      for (int64_t r = 0; r < block.rows; ++r) {
        if (a.end / P == panel) room.of_end[block.b + r] = x[r * P + a.end % P];
        for (int64_t c = 0; c < P; c += Vector<C>::width) {
          const Vec<C> logits = load(x + r * P + c);
          if (any<C>(~(logits <= best[r].least()))) insert(best[r], logits, panel * P + c);
        }
        lanes[r].add(x + r * P);
      }
    }
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t place = (block.b + r) * groups + block.panel;
      room.masses[place] = lanes[r].mass();
      if (best[r].n < K) best[r].at[best[r].n].word = -1;  // no more
    }
  }

  // Add the bias of the vocabulary to rows of a panel; words that may not come have -inf.
  void add_bias(int64_t panel, int64_t rows, C* x) const {
    for (int64_t c = 0; c < P; c += Vector<C>::width) {
      const int64_t word = panel * P + c;
      const Flags<C> may_come = lanes_within<C>(word, a.end, a.V);
      Vec<C> bias = {};
      if (a.bias_vocab.data) bias = load_part(row<C>(a.bias_vocab, 0) + word, a.V - word, (C)0);
      for (int64_t r = 0; r < rows; ++r) {
        C* const at = x + r * P + c;
        store(at, may_come ? load(at) + bias : splat((C)-__builtin_inf()));
      }
    }
  }

  void insert(Best<C>& best, Vec<C> logits, int64_t first) const {
    for (int i = 0; i < Vector<C>::width; ++i)
      if (first + i != a.end && best.takes(logits[i])) best.insert({logits[i], first + i, 0});
  }

  // The largest logit of each lane, and the sum of exp(logit - largest).
  struct Lanes {
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

  // Choose the words that continue the hypotheses of sentence i of those that are left, at step t.
  void choose(int64_t i, int64_t t) {
    const int64_t s = room.sentence[i];
    if (room.ended[s]) return;
    C* const totals = room.totals + s * K;
    Best<C> best = {room.best + s * 2 * K, 2 * K, 0};
    const bool must_end = t + 1 >= a.limits[s];
    for (int64_t k = 0; k < K; ++k) {
      if (totals[k] == -(C)__builtin_inf()) continue;
      const int64_t r = i * K + k;
      Mass<C> mass = {-(C)__builtin_inf(), 0};
      for (int64_t group = 0; group < groups; ++group) mass.add(room.masses[r * groups + group]);
      if (mass.sum != mass.sum) return void(room.ended[s] = -1);
      if (mass.sum == 0) continue;  // no word may come
      const C log_sum = ::log(mass.sum);
      const auto add = [&](int64_t word, C logit) {
        const C total =
            totals[k] + ((logit - mass.largest) - log_sum) + (word == a.end ? (C)0 : (C)a.length_bonus);
        if (best.takes(total)) best.insert({total, word, k});
      };
      add(a.end, room.of_end[r]);
      if (must_end) continue;
      for (int64_t group = 0; group < groups; ++group) {
        const Candidate<C>* const found = room.candidates + (r * groups + group) * K;
        for (int64_t j = 0; j < K && found[j].word >= 0; ++j) add(found[j].word, found[j].score);
      }
    }
    continue_beam(s, t, best);
  }

  // Finish hypotheses of sentence s, and continue the best K others.
  void continue_beam(int64_t s, int64_t t, const Best<C>& best) {
    const C normaliser = __builtin_pow((5. + t + 1) / 6, a.length_penalty);
    C* const totals = room.totals + s * K;
    C before[kMostBeam];
    for (int64_t k = 0; k < K; ++k) before[k] = totals[k], totals[k] = -(C)__builtin_inf();
    Link<C>* const links = room.links + (s * a.most + t) * K;
    int64_t going = 0;
    for (int64_t rank = 0; rank < best.n; ++rank) {
      const Candidate<C>& x = best.at[rank];
      const bool ends = x.word == a.end;
      const Link<C> link = {x.word, x.slot, x.score - before[x.slot] - (ends ? 0 : (C)a.length_bonus)};
      if (ends && rank < K) finish(s, {x.score / normaliser, t, link});
      if (ends || going == K) continue;
      links[going] = link;
      totals[going++] = x.score;
    }
    for (int64_t k = going; k < K; ++k) links[k] = {a.begin, 0, 0};
    const bool enough = room.finished_count[s] >= K;
    if (going && !(enough && room.finished[s * K].score >= totals[0] / normaliser)) return;
    room.ended[s] = 1;
    if (room.finished_count[s]) return;
    // No hypothesis could end: the best so far, without an end.
    room.finished_count[s] = 1;
    room.finished[s * K] = {-(C)__builtin_inf(), t - 1,
                            t ? room.links[(s * a.most + t - 1) * K] : Link<C>{a.begin, 0, 0}};
  }

  // Keep a finished hypothesis if it is one of the best K; of equal ones the first.
  void finish(int64_t s, const FinishedHypothesis<C>& x) {
    FinishedHypothesis<C>* const all = room.finished + s * K;
    const int64_t n = min(room.finished_count[s]++, K);
    int64_t i = n;
    if (n == K && !(x.score > all[--i].score)) return;
    for (; i > 0 && all[i - 1].score < x.score; --i) all[i] = all[i - 1];
    all[i] = x;
  }

  // Count the sentences of the step after t. Those that have ended are dropped once they are a
  // quarter. The count is stored for a thread that arrives late.
  void count(int64_t sentences, int64_t t) {
    int64_t n = 0;
    for (int64_t i = 0; i < sentences; ++i)
      if (!room.ended[room.sentence[i]]) room.goes_on[n++] = i;
    if (4 * n > 3 * sentences)
      for (n = 0; n < sentences; ++n) room.goes_on[n] = n;
    room.counts[t + 1] = n;
  }

  // Give the hypotheses of the i-th sentence that goes on their states, and embed their words.
  void go_on(const RecurrentForward& step, int64_t i, int64_t t) {
    const int64_t from = room.goes_on[i], s = room.sentence[from];
    if (room.ended[s]) return;
    const View& fed = step.weight_output.data ? step.attentional : step.contexts;
    for (int64_t k = 0; k < K; ++k) {
      const Link<C>& link = room.links[(s * a.most + t) * K + k];
      const int64_t parent = from * K + link.parent, r = i * K + k;
      const auto put = [&](const View& x, C* to, int64_t n) {
        __builtin_memcpy(to + r * n, row<C>(x, parent), n * sizeof(C));
      };
      for (int64_t layer = 0; layer < step.layers; ++layer) {
        put(at_layer<C>(step.states, layer), room.hidden + layer * of_layer(), step.H);
        if (step.cell == Cell::lstm)
          put(at_layer<C>(step.cells, layer), room.cells + layer * of_layer(), step.H);
      }
      if (feeds) put(fed, room.feed, step.F);
      embed(r, link.word);
    }
  }

  // Copy the rows of a view for the sentences that go on, each `rows` of `columns` elements, to
  // consecutive memory at `to`.
  template <class T>
  void keep(View from, T* to, int64_t n, int64_t rows, int64_t columns) const {
    if (!from.batch) return;  // absent, or shared by all sentences
    for (int64_t r = 0; r < n; ++r)
      for (int64_t i = 0; i < rows; ++i) {
        const T* const old = static_cast<T*>(from.data) + room.goes_on[r] * from.batch + i * from.row;
        T* const now = to + (r * rows + i) * columns;
        if (from.column == 1) __builtin_memmove(now, old, columns * sizeof(T));
        else
          for (int64_t c = 0; c < columns; ++c) now[c] = old[c * from.column];
      }
  }

  // Compact the arguments of attention to the n sentences that go on.
  void leave_out(int64_t n) {
    Problem& of = attention;
    member.share(6, [&](int64_t item) {
      if (item == 0) keep(of.key, room.key, n, of.Tk, of.A);
      if (item == 1) keep(of.value, room.value, n, of.Tk, of.Dv);
      if (item == 2) keep(of.exponentials, room.exponentials, n, of.Tk, of.exponentials.row);
      if (item == 3) keep(of.key_bounds, room.key_bounds, n, a.most, 2);
      if (item == 4) keep(of.mask, room.mask, n, 1, of.Tk);
      if (item != 5) return;
      if (of.lengths) keep(View{(void*)of.lengths, 1}, room.lengths, n, 1, 1);
      keep(View{room.sentence, 1}, room.sentence, n, 1, 1);
    });
    const auto put = [](View& x, auto* data, int64_t rows, int64_t columns) {
      if (x.batch) x = {data, rows * columns, 0, columns};
    };
    put(of.key, room.key, of.Tk, of.A);
    put(of.value, room.value, of.Tk, of.Dv);
    put(of.exponentials, room.exponentials, of.Tk, of.exponentials.row);
    put(of.key_bounds, room.key_bounds, a.most, 2);
    put(of.mask, room.mask, 1, of.Tk);
    of.mask.row = 0;
    if (of.lengths) of.lengths = room.lengths;
    of.B = n;
  }

  // Write the best hypotheses of sentence b, from their last words on.
  void write(int64_t b) {
    const int64_t found = room.ended[b] < 0 ? 0 : min(min(room.finished_count[b], K), a.n_best);
    for (int64_t n = 0; n < a.n_best; ++n) {
      const int64_t place = b * a.n_best + n;
      int64_t* const words = a.words + place * a.most;
      C* const scores = row<C>(a.word_scores, place);
      int64_t length = 0;
      if (n < found) {
        const FinishedHypothesis<C>& x = room.finished[b * K + n];
        Link<C> link = x.link;
        length = x.step + 1;
        for (int64_t t = x.step; t >= 0; --t) {
          words[t] = link.word, scores[t] = link.score;
          if (t) link = room.links[(b * a.most + t - 1) * K + link.parent];
        }
      }
      for (int64_t t = length; t < a.most; ++t) words[t] = 0, scores[t] = 0;
      a.lengths[place] = room.ended[b] < 0 ? -1 : length;
      row<C>(a.scores, b)[n] = n < found ? room.finished[b * K + n].score : -(C)__builtin_inf();
    }
  }
};

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
