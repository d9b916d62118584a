// Greedy search: every step takes the word that the step before has found best, see recurrent_forward.h.
#pragma once
#include "recurrent_forward.h"

namespace attnfast {
namespace VARIANT {
namespace {

using cpu::Found;

constexpr int64_t kPanelsAtATime = 8;  // of the vocabulary, of an item

// What the parameters of a search are packed into.
template <class C>
struct SearchRoom {
  Packed<C> layer;
  Panels<C> readout, vocabulary;
  Found<C>* found;  // [B, groups]: the best word of every group of panels
  int64_t groups;
  int64_t* ended;  // how many sequences have

  SearchRoom(const GreedySearch& a, Scratch<C>& room) : layer(a.even, room) {
    if (a.weight_readout.data) readout = take_panels(room, a.even.H + a.even.Dv + a.even.E, panels<C>(a.R));
    vocabulary = take_panels(room, a.R, panels<C>(a.V));
    groups = parts(vocabulary.count, kPanelsAtATime);
    found = reinterpret_cast<Found<C>*>(room.take(a.B * groups * sizeof(Found<C>) / sizeof(C)));
    ended = reinterpret_cast<int64_t*>(room.take(sizeof(int64_t) / sizeof(C)));
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

 public:
  Search(const GreedySearch& a, const LayerPlan& plan, Member& member, Scratch<C> place, void* own)
      : a(a), plan(plan), member(member), room(a, place), own(own) {}

  void run() {
    room.layer.fill(a.even, member);
    pack_words();
    member.share(a.B, [&](int64_t b) { begin(b); });
    for (int64_t t = 0; a.B && t < a.most; ++t) {
      RecurrentForward step = t % 2 ? a.odd : a.even;
      move_on(step.attention.span, t, sizeof(int64_t));
      Forwards<C>(step, plan, member, room.layer, own).take_steps();
      if (a.weight_readout.data) read_out(step);
      const View& output = a.weight_readout.data ? a.read : step.attentional;
      member.share(blocks(room.groups), [&](int64_t item) { find(output, item); });
      member.share(a.B, [&](int64_t b) { choose(b, t); });
      if (__atomic_load_n(room.ended, __ATOMIC_RELAXED) == a.B) return;
    }
  }

 private:
  int64_t blocks(int64_t items) const { return VARIANT::blocks(a.even, plan, items); }

  void pack_words() {
    member.share(room.readout.count + room.vocabulary.count, [&](int64_t item) {
      if (item < room.readout.count) Packed<C>::pack(room.readout, a.weight_readout, 0, a.R, item);
      else Packed<C>::pack(room.vocabulary, a.weight_vocab, 0, a.V, item - room.readout.count);
    });
  }

  // The state before the first step lies where that of every second step does; the fed one too.
  void begin(int64_t b) {
    if (b == 0) *room.ended = 0;
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

  // What the state, the context and the word say of the next one.
  void read_out(const RecurrentForward& step) {
    member.share(blocks(room.readout.count), [&](int64_t item) {
      const Block block(step, plan, item);
      const int64_t first = block.panel * P;
      alignas(64) C x[kMostBatch * P];
      clear(x, block.rows * P);
      const C* panel = room.readout.at(block.panel);
      const auto multiply = [&](const View& from, int64_t depth) {
        if (from.data) multiply_panel(row<C>(from, block.b), from.batch, 1, block.rows, depth, panel, x);
        panel += depth * P;
      };
      multiply(step.states, step.H);
      multiply(step.contexts, step.Dv);
      multiply(step.input, step.E);
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.R - first, [&](int64_t c, int64_t n) {
          Vec<C> sum = load(x + r * P + c);
          if (a.bias_readout.data) sum += load_part(row<C>(a.bias_readout, 0) + first + c, n, (C)0);
          store_part(row<C>(a.read, block.b + r) + first + c, tanh_of(sum), n);
        });
    });
  }

  // The best word of a group of panels, of some sequences.
  void find(const View& output, int64_t item) {
    const Block block(a.even, plan, item);
    Lanes best[kMostBatch];
    for (int64_t r = 0; r < block.rows; ++r) best[r] = {splat((C)-__builtin_inf()), Flags<C>{} - 1};
    const int64_t first = block.panel * kPanelsAtATime;
    for (int64_t panel = first; panel < min(first + kPanelsAtATime, room.vocabulary.count); ++panel) {
      alignas(64) C x[kMostBatch * P];
      clear(x, block.rows * P);
      multiply_panel(row<C>(output, block.b), output.batch, 1, block.rows, a.R, room.vocabulary.at(panel),
                     x);
      for_vectors<C>(a.V - panel * P, [&](int64_t c, int64_t n) {
        const int64_t word = panel * P + c;
        const Flags<C> may_be_said = lanes_within<C>(word, a.end, a.V);
        Vec<C> bias = {};
        if (a.bias_vocab.data) bias = load_part(row<C>(a.bias_vocab, 0) + word, n, (C)0);
        for (int64_t r = 0; r < block.rows; ++r)
          best[r].compare(load(x + r * P + c) + bias, word, may_be_said);
      });
    }
    for (int64_t r = 0; r < block.rows; ++r)
      room.found[(block.b + r) * room.groups + block.panel] = best[r].first();
  }

  // Of equal scores the first is the best, and NaN is better than any.
  static bool is_better(C score, C best) { return !(score <= best) && best == best; }

  // The best word of each lane.
  struct Lanes {
    Vec<C> score;
    Flags<C> word;

    inline __attribute__((always_inline)) void compare(Vec<C> scores, int64_t first, Flags<C> among) {
      const Flags<C> better = ~(scores <= score) & (score == score) & among;
      score = better ? scores : score;
      using I = decltype(word[0] + 0);
      word = better ? lane_numbers<C>() + (I)first : word;
    }

    Found<C> first() const {
      Found<C> best = {(C)-__builtin_inf(), -1};
      for (int i = 0; i < Vector<C>::width; ++i)
        if (is_better(score[i], best.score) || (score[i] == best.score && word[i] < best.word))
          best = {score[i], word[i]};
      return best;
    }
  };

  // The best word of sequence b at step t, which the next step reads.
  void choose(int64_t b, int64_t t) {
    int64_t* const words = a.words + b * a.most;
    if (t && (words[t - 1] == a.end || words[t - 1] < 0)) {
      words[t] = words[t - 1];
      return;
    }
    Found<C> best = {(C)-__builtin_inf(), -1};
    for (int64_t i = 0; i < room.groups; ++i) {
      const Found<C>& of_group = room.found[b * room.groups + i];
      if (is_better(of_group.score, best.score)) best = of_group;
    }
    int64_t word = best.score == best.score ? best.word : -1;
    if (word >= 0 && a.limits[b] <= t + 1) word = a.end;
    words[t] = word;
    if (word < 0 || word == a.end) __atomic_fetch_add(room.ended, 1, __ATOMIC_RELAXED);
    else embed(b, word);
  }
};

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
