// Greedy search: every step reads the best word of the previous step, see recurrent_forward.h.
#pragma once
#include "recurrent_forward.h"

namespace attnfast {
namespace VARIANT {
namespace {

using cpu::Found;

constexpr int64_t kPanelsAtATime = 8;  // of the vocabulary, in one item

// The packed parameters and the buffers of a search.
template <class C>
struct SearchRoom {
  Packed<C> layer;
  Panels<C> of_state, of_context, of_input;  // of the readout
  Panels<C> vocabulary;
  Found<C>* found;  // [B, groups]: the best word of every group of panels
  int64_t groups;
  C* of_end;          // [B]: the score of the end
  int64_t* sequence;  // [B]: the sequence of each row
  int64_t* goes_on;   // [B]: the rows that the next step still needs
  int64_t* rows;      // [most + 1]: the number of rows of each step
  // Rows of the attention's arguments, compacted once some have been dropped.
  C *key, *value, *exponentials;
  int64_t *lengths, *key_bounds;
  bool* mask;

  SearchRoom(const GreedySearch& a, Scratch<C>& room) : layer(a.even, room) {
    if (a.weight_readout.data) {
      of_state = take_panels(room, a.even.H, panels<C>(a.R), a.even.narrow);
      of_context = take_panels(room, a.even.Dv, panels<C>(a.R), a.even.narrow);
      of_input = take_panels(room, a.even.E, panels<C>(a.R), a.even.narrow);
    }
    vocabulary = take_panels(room, a.R, panels<C>(a.V), a.even.narrow);
    groups = parts(vocabulary.count, kPanelsAtATime);
    const auto take = [&]<class T>(T*& out, int64_t n) {
      out = reinterpret_cast<T*>(room.take(parts(n * sizeof(T), sizeof(C))));
    };
    const Forward& of = a.even.attention;
    take(found, a.B * groups);
    take(of_end, a.B);
    take(sequence, a.B);
    take(goes_on, a.B);
    take(rows, a.most + 1);
    take(key, a.B * of.Tk * of.A);
    take(value, a.B * of.Tk * of.Dv);
    take(exponentials, of.exponentials.data ? a.B * of.Tk * of.exponentials.row : 0);
    take(lengths, a.B);
    take(key_bounds, of.key_bounds.batch ? a.B * a.most * 2 : 0);
    take(mask, of.mask.batch ? a.B * of.Tk : 0);
  }
};

template <class C>
class Search {
  static constexpr int64_t P = kPanel<C>;
  const GreedySearch& a;
  const LayerPlan& plan;
  Member& member;
  const SearchRoom<C> room;
  void* own;
  Problem attention;  // of the remaining rows; queries belong to a step

 public:
  Search(const GreedySearch& a, const LayerPlan& plan, Member& member, Scratch<C> place, void* own)
      : a(a), plan(plan), member(member), room(a, place), own(own),
        attention(static_cast<const Problem&>(a.even.attention)) {}

  void run() {
    room.layer.pack(a.even, member);
    pack_words();
    member.share(a.B, [&](int64_t b) { begin(b); });
    for (int64_t t = 0; attention.B && t < a.most; ++t) {
      const RecurrentForward step = step_at(t);
      Forwards<C>(step, plan, member, room.layer, own).take_steps();
      if (a.weight_readout.data) read_out(step);
      const View& output = a.weight_readout.data ? a.read : step.attentional;
      member.share(blocks(step, plan, room.groups), [&](int64_t item) { find(step, output, item); });
      member.share(step.B, [&](int64_t r) { choose(r, t); });
      member.share(1, [&](int64_t) { count(step.B, t); });
      if (room.rows[t + 1] < step.B) leave_out(step, room.rows[t + 1]);
    }
  }

 private:
  RecurrentForward step_at(int64_t t) const {
    RecurrentForward step = t % 2 ? a.odd : a.even;
    step.B = attention.B;
    Problem& of = step.attention;
    const View query = of.query;
    of = attention;
    of.query = query;
    shift_to_step(of.key_bounds, t, sizeof(int64_t));
    return step;
  }

  void pack_words() {
    const int64_t H = a.even.H, of_readout = room.of_state.count;
    member.share(3 * of_readout + room.vocabulary.count, [&](int64_t item) {
      if (item >= 3 * of_readout)
        return Packed<C>::pack(room.vocabulary, a.weight_vocab, 0, a.V, item - 3 * of_readout);
      const Panels<C>* const all[] = {&room.of_state, &room.of_context, &room.of_input};
      const int64_t columns[] = {0, H, H + a.even.Dv}, which = item / of_readout;
      Packed<C>::pack(*all[which], a.weight_readout, columns[which], a.R, item % of_readout);
    });
  }

  // Copy the initial state of sequence b, and its fed vector, into the outputs of the odd steps.
  void begin(int64_t b) {
    room.sequence[b] = b;
    const RecurrentForward& last = a.odd;
    const auto put = [&](const View& from, const View& to, int64_t n) {
      for (int64_t i = 0; i < n; ++i) row<C>(to, b)[i] = from.data ? row<C>(from, b)[i] : C{};
    };
    put(a.hidden, last.states, last.H);
    if (last.cell == Cell::lstm) put(a.first_cell, last.cells, last.H);
    if (!last.attends_first && last.F) put(a.feed, a.even.feed, last.F);
    embed(b, a.begin);
  }

  void embed(int64_t b, int64_t word) {
    const C* const from = row<C>(a.embedding, word);
    C* const to = row<C>(a.even.input, b);
    for (int64_t i = 0; i < a.even.E; ++i) to[i] = from[i] * (C)a.embedding_scale;
  }

  // Compute the readout from the state, the context and the word.
  void read_out(const RecurrentForward& step) {
    member.share(blocks(step, plan, room.of_state.count), [&](int64_t item) {
      const Block block(step, plan, item);
      const int64_t first = block.panel * P;
      alignas(64) C x[kMostBatch * P];
      clear(x, block.rows * P);
      const auto multiply = [&](const View& from, const Panels<C>& with) {
        if (from.data)
          multiply_panel(row<C>(from, block.b), from.batch, 1, block.rows, with.depth, with.at(block.panel),
                         x);
      };
      multiply(step.states, room.of_state);
      multiply(step.contexts, room.of_context);
      multiply(step.input, room.of_input);
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.R - first, [&](int64_t c, int64_t n) {
          Vec<C> sum = load(x + r * P + c);
          if (a.bias_readout.data) sum += load_part(row<C>(a.bias_readout, 0) + first + c, n, (C)0);
          store_part(row<C>(a.read, block.b + r) + first + c, tanh_of(sum), n);
        });
    });
  }

  // Find the best word of a group of panels for some rows.
  void find(const RecurrentForward& step, const View& output, int64_t item) {
    const Block block(step, plan, item);
    Lanes best[kMostBatch];
    for (int64_t r = 0; r < block.rows; ++r)
      best[r] = {splat((C)-__builtin_inf()), Flags<C>{} - 1, Vec<C>{}};
    const int64_t first = block.panel * kPanelsAtATime;
    for (int64_t panel = first; panel < min(first + kPanelsAtATime, room.vocabulary.count); ++panel) {
      alignas(64) C x[kMostBatch * P];
      clear(x, block.rows * P);
      multiply_panel(row<C>(output, block.b), output.batch, 1, block.rows, a.R, room.vocabulary.at(panel),
                     x);
      Vec<C> before[kMostBatch];
      for (int64_t r = 0; r < block.rows; ++r) before[r] = best[r].score;
      for_vectors<C>(a.V - panel * P, [&](int64_t c, int64_t n) {
        const int64_t word = panel * P + c;
        const Flags<C> may_be_said = lanes_within<C>(word, a.end, a.V);
        Vec<C> bias = {};
        if (a.bias_vocab.data) bias = load_part(row<C>(a.bias_vocab, 0) + word, n, (C)0);
        for (int64_t r = 0; r < block.rows; ++r) {
          const Vec<C> scores = may_be_said ? load(x + r * P + c) + bias : splat((C)-__builtin_inf());
          store(x + r * P + c, scores);
          best[r].compare(scores, word, may_be_said);
        }
      });
      for (int64_t r = 0; r < block.rows; ++r) {
        if (a.end / P == panel) room.of_end[block.b + r] = x[r * P + a.end % P];
        best[r].scale(before[r]);
        for_vectors<C>(a.V - panel * P, [&](int64_t c, int64_t) { best[r].add(load(x + r * P + c)); });
      }
    }
    for (int64_t r = 0; r < block.rows; ++r)
      room.found[(block.b + r) * room.groups + block.panel] = best[r].first();
  }

  // Return true if `score` beats `best`: the first of equal scores wins, and NaN beats any number.
  static bool is_better(C score, C best) { return !(score <= best) && best == best; }

  // The best word of each lane, and the sum of exp(score - its score) over the lane.
  struct Lanes {
    Vec<C> score;
    Flags<C> word;
    Vec<C> sum;

    // Return exp(x - best), 0 if x is -inf.
    static Vec<C> exp_from(Vec<C> x, Vec<C> best) {
      return x == splat((C)-__builtin_inf()) ? Vec<C>{} : exp(x - best);
    }

    void scale(Vec<C> before) { sum *= exp_from(before, score); }

    void add(Vec<C> scores) { sum += exp_from(scores, score); }

    inline __attribute__((always_inline)) void compare(Vec<C> scores, int64_t first, Flags<C> among) {
      const Flags<C> better = ~(scores <= score) & (score == score) & among;
      score = better ? scores : score;
      using I = decltype(word[0] + 0);
      word = better ? lane_numbers<C>() + (I)first : word;
    }

    Found<C> first() const {
      Found<C> best = {(C)-__builtin_inf(), -1, 0};
      for (int i = 0; i < Vector<C>::width; ++i)
        if (is_better(score[i], best.score) || (score[i] == best.score && word[i] < best.word))
          best = {score[i], word[i], 0};
      best.sum = attnfast::VARIANT::sum<C>(sum * exp_from(score, splat(best.score)));
      return best;
    }
  };

  // Choose the best word of row r at step t, which the next step reads.
  void choose(int64_t r, int64_t t) {
    const int64_t b = room.sequence[r];
    int64_t* const words = a.words + b * a.most;
    C* const scores = row<C>(a.scores, b);
    if (t && is_last(words[t - 1])) return;
    const Found<C>* const groups = room.found + r * room.groups;
    Found<C> best = {(C)-__builtin_inf(), -1, 0};
    for (int64_t i = 0; i < room.groups; ++i)
      if (is_better(groups[i].score, best.score)) best = groups[i];
    double sum = 0;  // of exp(score - best.score) over all words
    for (int64_t i = 0; i < room.groups; ++i)
      if (groups[i].sum > 0) sum += groups[i].sum * ::exp((double)groups[i].score - best.score);
    C score = -(C)::log(sum);
    int64_t word = best.score == best.score ? best.word : -1;
    if (word >= 0 && a.limits[b] <= t + 1) word = a.end, score += room.of_end[r] - best.score;
    words[t] = word;
    scores[t] = score;
    if (!is_last(word)) return embed(r, word);
    for (int64_t i = t + 1; i < a.most; ++i) words[i] = word, scores[i] = 0;
  }

  bool is_last(int64_t word) const { return word < 0 || word == a.end; }

  // Count the rows of the step after t. Ended sequences are dropped once they are a quarter of the
  // rows. The count is stored for a thread that arrives late.
  void count(int64_t rows, int64_t t) {
    int64_t n = 0;
    for (int64_t r = 0; r < rows; ++r)
      if (!is_last(a.words[room.sequence[r] * a.most + t])) room.goes_on[n++] = r;
    room.rows[t + 1] = 4 * n <= 3 * rows ? n : rows;
  }

  // Copy the rows of a view for the sequences that go on, each `rows` of `columns` elements, to
  // consecutive memory at `to`.
  template <class T>
  void keep(View from, T* to, int64_t n, int64_t rows, int64_t columns) const {
    if (!from.batch) return;  // absent, or shared by all sequences
    for (int64_t r = 0; r < n; ++r)
      for (int64_t i = 0; i < rows; ++i) {
        const T* const old = static_cast<T*>(from.data) + room.goes_on[r] * from.batch + i * from.row;
        T* const now = to + (r * rows + i) * columns;
        if (from.column == 1) __builtin_memmove(now, old, columns * sizeof(T));
        else
          for (int64_t c = 0; c < columns; ++c) now[c] = old[c * from.column];
      }
  }

  // Compact the n rows that go on so that they are adjacent.
  void leave_out(const RecurrentForward& step, int64_t n) {
    Problem& of = attention;
    const auto in_place = [&](const View& x, int64_t columns) {
      keep(x, static_cast<C*>(x.data), n, 1, columns);
    };
    member.share(7, [&](int64_t item) {
      if (item == 0) keep(of.key, room.key, n, of.Tk, of.A);
      if (item == 1) keep(of.value, room.value, n, of.Tk, of.Dv);
      if (item == 2) keep(of.exponentials, room.exponentials, n, of.Tk, of.exponentials.row);
      if (item == 3) keep(of.key_bounds, room.key_bounds, n, a.most, 2);
      if (item == 4) keep(of.mask, room.mask, n, 1, of.Tk);
      if (item == 5) in_place(step.states, step.H), in_place(step.cells, step.H);
      if (item != 6) return;
      in_place(step.attentional, step.output_dim);
      in_place(step.contexts, step.Dv);
      in_place(a.even.input, step.E);
      if (of.lengths) keep(View{(void*)of.lengths, 1}, room.lengths, n, 1, 1);
      keep(View{room.sequence, 1}, room.sequence, n, 1, 1);
    });
    const auto put = [](View& x, auto* data, int64_t rows, int64_t columns) {
      if (x.batch) x = {data, rows * columns, 0, columns};
    };
    put(of.key, room.key, of.Tk, of.A);
    put(of.value, room.value, of.Tk, of.Dv);
    put(of.exponentials, room.exponentials, of.Tk, of.exponentials.row);
    put(of.key_bounds, room.key_bounds, a.most, 2);
    put(of.mask, room.mask, 1, of.Tk);
    if (of.lengths) of.lengths = room.lengths;
    of.B = n;
  }
};

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
