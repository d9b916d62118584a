// A search: every step reads the words that continue the hypotheses of the previous step, the best or
// drawn ones, see recurrent_forward.h. A greedy search has a beam of one.
//
// The K hypotheses of a sentence are K rows of the layer, and K queries of one problem of attention:
// they share its keys. Rows and slots: sentence i of those that are left has the rows i K + slot;
// what is kept for the end is stored by the sentence's own number and the slot.
#pragma once
#include "search_copying.h"
#include "search_room.h"

namespace attnfast {
namespace VARIANT {
namespace {

using cpu::LayerPlan;

template <class C>
class BeamSearch {
  static constexpr int64_t P = kPanel<C>;
  const Search& a;
  const LayerPlan& plan;
  Member& member;
  const SearchRoom<C> room;
  const SourceWords<C> source;
  void* own;
  const int64_t K, groups;
  const bool feeds;
  CoverageForward attention;  // of the sentences that are left; queries belong to a step

 public:
  BeamSearch(const Search& a, const LayerPlan& plan, Member& member, Scratch<C> place, void* own)
      : a(a), plan(plan), member(member), room(a, place), source{a, room.of_source}, own(own), K(a.beam),
        groups(room.groups()), feeds(!a.step.attends_first && a.step.F), attention(a.step.attention) {
    attention.features = room.features;
    attention.inverse_fertility.column = attention.transition_prob.column = 1;
  }

  void run() {
    if (!a.step.packed) room.packed.pack(a.step, a, member);
    member.share(a.B, [&](int64_t b) { begin(b); });
    if (room.features)
      member.share(1, [&](int64_t) { pack_parameters_once(a.step.attention, room.features, false); });
    const int64_t masks = a.word_mask.batch ? a.B : 1;
    member.share(masks + copies(), [&](int64_t b) {
      const bool* const mask = a.word_mask.data ? row<bool>(a.word_mask, b) : nullptr;
      if (b < masks) return put_bias(mask, !copies(), bias_of(b));
      put_bias(nullptr, true, room.whole_bias);
    });
    for (int64_t t = 0; attention.B && t < a.most; ++t) {
      const RecurrentForward step = step_at(t);
      Forwards<C>(step, plan, member, room.packed.layer, own, room.rounded).take_steps();
      if (a.weight_readout.data) read_out(step);
      else if (!step.weight_output.data) join(step);
      const bool reads = a.weight_readout.data || !step.weight_output.data;
      const View output = reads ? View{a.read.data, a.R} : step.attentional;
      Factor<C> outputs[] = {factor(of_step<C>(output, 0, 0), a.R)};
      round_factors(step, plan, member, room.rounded, outputs);
      member.share(blocks(step, plan, groups), [&](int64_t item) { score(step, outputs[0], t, item); });
      member.share(attention.B, [&](int64_t i) {
        if (room.ended[room.sentence[i]]) return;
        keep_weights(step, i, t);
        if (a.numbers) draw(step, outputs[0], i, t);
        else choose(step, outputs[0], i, t);
      });
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
    CoverageForward& of = step.attention;
    of = attention;
    shift_to_step(of.key_bounds, t, sizeof(int64_t));
    of.key_bounds.row = 0;  // the same for all hypotheses
    if (!has_history(of)) return step;
    of.coverage_out = {history_of(0, t), K * step.Tk, step.Tk};
    of.previous = {room.previous, K * step.Tk, step.Tk};
    shift_to_step(of.transition_prob, t, sizeof(C));
    return step;
  }

  // Return the coverage of row r's attention before step t, if it has a history.
  C* history_of(int64_t r, int64_t t) const { return room.history + (t % 2 * a.B * K + r) * a.step.Tk; }

  bool copies() const { return a.source_words; }

  // Return the bias of a sentence's words: -inf of those that may not come, or 0 if all have theirs.
  C* bias_of(int64_t s) const { return room.bias + (a.word_mask.batch ? s : 0) * room.padded_words(); }

  // Write the bias of the words, -inf for those that may not come.
  void put_bias(const bool* may_come, bool biased, C* out) const {
    for (int64_t word = 0; word < room.padded_words(); ++word) {
      const bool comes = word < a.V && (!may_come || may_come[word]);
      const C bias = comes && biased && a.bias_vocab.data ? row<C>(a.bias_vocab, 0)[word] : C{};
      out[word] = comes ? bias : -(C)__builtin_inf();
    }
  }

  // Give all hypotheses of sentence b its initial state; of a beam, only the first may continue.
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
      if (has_history(step.attention)) {
        put(step.attention.coverage_in, room.history, step.Tk);
        put(step.attention.previous, room.previous, step.Tk);
      }
      room.totals[r] = k && !a.numbers ? -(C)__builtin_inf() : (C)0;
      if (a.no_repeat_ngram) room.repetitions[r] = 0;
      if (a.coverage_penalty) clear(room.coverage + r * step.Tk, step.Tk);
      embed(r, a.begin);
    }
  }

  void embed(int64_t r, int64_t word) {
    const C* const from = row<C>(a.embedding, word < a.V ? word : a.unknown);
    C* const to = row<C>(a.step.input, r);
    for (int64_t i = 0; i < a.step.E; ++i) to[i] = from[i] * (C)a.embedding_scale;
  }

  // Compute the readout from the state, the context and the word.
  void read_out(const RecurrentForward& step) {
    const PackedSearch<C>& packed = room.packed;
    const Panels<C>* const with[] = {&packed.of_state, &packed.of_context, &packed.of_input};
    Factor<C> factors[] = {factor(of_step<C>(last_level<C>(step).states, 0, 0), step.H),
                           factor(of_step<C>(step.contexts, 0, 0), step.Dv),
                           {nullptr, 0, step.E}};
    if (a.reads_input) factors[2] = factor(of_step<C>(step.input, 0, 0), step.E);
    round_factors(step, plan, member, room.rounded, factors);
    member.share(blocks(step, plan, packed.of_state.count), [&](int64_t item) {
      const Block block(step, plan, item);
      const int64_t first = block.panel * P;
      alignas(64) C x[kMostBatch * P];
      clear(x, block.rows * P);
      for (int i = 0; i < 2 + a.reads_input; ++i)
        factors[i].multiply(block.b, block.rows, with[i]->at(block.panel), x);
      for (int64_t r = 0; r < block.rows; ++r)
        for_vectors<C>(a.R - first, [&](int64_t c, int64_t n) {
          Vec<C> sum = load(x + r * P + c);
          if (a.bias_readout.data) sum += load_part(row<C>(a.bias_readout, 0) + first + c, n, (C)0);
          store_part(static_cast<C*>(a.read.data) + (block.b + r) * a.R + first + c, tanh_of(sum), n);
        });
    });
  }

  // Join the state, the context and the word, up to R features.
  void join(const RecurrentForward& step) {
    const View all[] = {last_level<C>(step).states, step.contexts, step.input};
    const int64_t sizes[] = {step.H, step.Dv, step.E};
    member.share(step.B, [&](int64_t r) {
      C* to = static_cast<C*>(a.read.data) + r * a.R;
      for (int64_t i = 0, left = a.R; left > 0; left -= sizes[i], to += sizes[i], ++i)
        __builtin_memcpy(to, row<C>(all[i], r), sizes[i] * sizeof(C));
    });
  }

  // Return the sentence of a row of the hypotheses that are left.
  int64_t sentence_of(int64_t r) const { return room.sentence[r / K]; }

  // Return the word of the sentence's prefix at step t, or -1.
  int64_t forced(int64_t s, int64_t t) const {
    return t < a.prefix_length ? row<int64_t>(a.prefix, s)[t] : -1;
  }

  // Compute the logits of a group of panels for some rows. Keep the best of each row but the end's,
  // to which no length bonus is added, or all for a draw; those of the end, the prefix and the source;
  // and the mass of all.
  void score(const RecurrentForward& step, const Factor<C>& outputs, int64_t t, int64_t item) {
    const Block block(step, plan, item);
    const int64_t first = block.panel * room.panels_at_a_time,
                  last = min(first + room.panels_at_a_time, room.packed.vocabulary.count);
    Lanes<C> lanes[kMostBatch], all_lanes[kMostBatch];
    Best<C> best[kMostBatch];
    for (int64_t r = 0; r < block.rows; ++r) {
      lanes[r] = all_lanes[r] = {splat((C)-__builtin_inf()), Vec<C>{}};
      const int64_t place = (block.b + r) * groups + block.panel;
      best[r] = {room.candidates + place * K, K, 0};
    }
    for (int64_t panel = first; panel < last; ++panel) {
      alignas(64) C x[kMostBatch * P];
      clear(x, block.rows * P);
      outputs.multiply(block.b, block.rows, room.packed.vocabulary.at(panel), x);
      for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t of_row = block.b + r, s = sentence_of(of_row), word = forced(s, t);
        C* const logits = x + r * P;
        if (copies()) {
          add_bias(room.whole_bias + panel * P, logits);
          all_lanes[r].add(logits);
          source.keep(of_row, s, panel * P, logits);
        }
        add_bias(bias_of(s) + panel * P, logits);
        if (a.end >= 0 && a.end / P == panel) room.of_end[of_row] = logits[a.end % P];
        if (word >= 0 && word / P == panel) room.of_forced[of_row] = logits[word % P];
        lanes[r].add(logits);
        if (a.numbers) {
          C* const to = room.logits + of_row * room.words_of_row(a) + panel * P;
          __builtin_memcpy(to, logits, P * sizeof(C));
          continue;
        }
        for (int64_t c = 0; c < P; c += Vector<C>::width) {
          const Vec<C> several = load(logits + c);
          if (any<C>(~(several <= best[r].least()))) insert(best[r], several, panel * P + c, of_row);
        }
      }
    }
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t place = (block.b + r) * groups + block.panel;
      room.masses[place] = lanes[r].mass();
      if (copies()) room.all_masses[place] = all_lanes[r].mass();
      if (best[r].n < K) best[r].at[best[r].n].word = -1;  // no more
    }
  }

  // Add a bias to a row of a panel.
  static void add_bias(const C* from, C* x) {
    const Vec<C> never = splat(-(C)__builtin_inf());
    for (int64_t c = 0; c < P; c += Vector<C>::width) {
      const Vec<C> bias = load(from + c);
      store(x + c, bias == never ? never : load(x + c) + bias);
    }
  }

  void insert(Best<C>& best, Vec<C> logits, int64_t first, int64_t r) const {
    for (int i = 0; i < Vector<C>::width; ++i)
      if (first + i != a.end && best.takes(logits[i]) && !repeats(r, first + i))
        best.insert({logits[i], first + i, 0});
  }

  // Return true if a word would repeat an n-gram of a row.
  bool repeats(int64_t r, int64_t word) const {
    if (!a.no_repeat_ngram) return false;
    const int64_t at = sentence_of(r) * K + r % K;
    const int64_t* const repeated = room.repeated + at * a.most;
    for (int64_t i = 0; i < room.repetitions[at]; ++i)
      if (repeated[i] == word) return true;
    return false;
  }

  // Store the weights of sentence i of those that are left, and add them to its coverage.
  void keep_weights(const RecurrentForward& step, int64_t i, int64_t t) {
    if (!a.weights.data && !a.coverage_penalty) return;
    const int64_t s = room.sentence[i], Tk = step.Tk;
    for (int64_t k = 0; k < K; ++k) {
      const C* const from = row<C>(step.attention.weights, i, k);
      if (a.weights.data)
        __builtin_memcpy(room.weights + ((s * a.most + t) * K + k) * Tk, from, Tk * sizeof(C));
      C* const sums = coverage_of(s, k, t);
      for (int64_t j = 0; j < Tk && a.coverage_penalty; ++j) sums[j] += from[j];
    }
  }

  // Return the coverage of a hypothesis at step t.
  C* coverage_of(int64_t s, int64_t k, int64_t t) const {
    return room.coverage + ((t % 2 * a.B + s) * K + k) * a.step.Tk;
  }

  // Return the coverage penalty of a hypothesis of sentence i of those that are left.
  C penalty_of(int64_t i, int64_t k, int64_t t) const {
    if (!a.coverage_penalty) return 0;
    const C* const sums = coverage_of(room.sentence[i], k, t);
    const C least = __FLT_MIN__;
    const int64_t seen = attention.lengths ? attention.lengths[i] : a.step.Tk;
    double sum = 0;
    for (int64_t j = 0; j < min(seen, a.step.Tk); ++j) {
      if (attention.mask.data && !row<bool>(attention.mask, i)[j * attention.mask.column]) continue;
      sum += __builtin_log((double)(sums[j] > 1 ? 1 : sums[j] < least ? least : sums[j]));
    }
    return a.coverage_penalty * sum;
  }

  // Return the logarithm of the sum of e^logit, given masses of groups.
  double log_of_sum(const Mass<C>* masses) const {
    Mass<C> mass = {-(C)__builtin_inf(), 0};
    for (int64_t group = 0; group < groups; ++group) mass.add(masses[group]);
    return mass.largest + __builtin_log(mass.sum);
  }

  // Return the shift that turns a logit of row r into its score, a log-probability: NaN if any score is,
  // without copying infinity if no word may come. With copying, the words of the source get their own scores;
  // probabilities of the words that may come add up to 1.
  double normalise(const RecurrentForward& step, const Factor<C>& outputs, int64_t r, int64_t i) const {
    const double sum = log_of_sum(room.masses + r * groups);
    if (!copies()) return -sum;
    const double all = log_of_sum(room.all_masses + r * groups);
    const C* const weights = row<C>(attention.weights, i, r - i * K);
    return source.score(r, room.sentence[i], gate(step, outputs, r), weights, sum, all,
                        static_cast<double*>(own));
  }

  // Return the logit of a row's pointer-generator.
  double gate(const RecurrentForward& step, const Factor<C>& outputs, int64_t r) const {
    const C* weight = row<C>(a.weight_pointer, 0);
    double sum = a.bias_pointer.data ? *row<C>(a.bias_pointer, 0) : 0;
    const auto add = [&](const C* x, int64_t n) {
      for (int64_t j = 0; j < n; ++j) sum += (double)weight[j] * x[j];
      weight += n;
    };
    if (!a.gate_reads_state) {
      add(outputs.data + r * outputs.stride, a.R);
      return sum;
    }
    add(row<C>(last_level<C>(step).states, r), step.H);
    add(row<C>(step.contexts, r), step.Dv);
    add(row<C>(step.input, r), step.E);
    return sum;
  }

  // Return the score of a word of row r, given its logit, and `shift` of normalise.
  C score_of(int64_t r, int64_t s, int64_t word, C logit, double shift) const {
    if (copies() && source.has(s, word)) return source.scores_of(r)[source.find(s, word)];
    return word < a.V ? (C)(logit + shift) : (C)-__builtin_inf();
  }

  // Draw the words that continue the hypotheses of sentence i of those that are left, at step t.
  void draw(const RecurrentForward& step, const Factor<C>& outputs, int64_t i, int64_t t) {
    const int64_t s = room.sentence[i], next = forced(s, t);
    bool all_ended = true;
    for (int64_t k = 0; k < K; ++k) {
      const int64_t r = i * K + k;
      C& total = room.totals[s * K + k];
      Link<C>* const links = room.links + (s * a.most + t) * K;
      const double shift = normalise(step, outputs, r, i);
      if (shift != shift) return void(room.ended[s] = -1);
      if (total == -(C)__builtin_inf()) {  // has ended
        links[k] = {a.begin, k, 0};
        continue;
      }
      const Candidate<C> drawn = draw_row(r, s, t, next, shift);
      if (drawn.score == -(C)__builtin_inf()) {  // no word may come
        room.finished[s * K + k] = {drawn.score, t - 1, t ? links[k - K] : Link<C>{a.begin, 0, 0}};
        total = drawn.score;
        links[k] = {a.begin, k, 0};
        continue;
      }
      links[k] = {drawn.word, k, drawn.score};
      total += links[k].score;
      if (drawn.word == a.end) {
        room.finished[s * K + k] = {total, t, links[k]};
        total = -(C)__builtin_inf();
      } else {
        all_ended = false;
      }
    }
    if (!all_ended) return;
    room.ended[s] = 1;
    room.finished_count[s] = K;
  }

  // Return the word that is drawn for a row, and its score.
  Candidate<C> draw_row(int64_t r, int64_t s, int64_t t, int64_t next, double shift) {
    constexpr C never = -(C)__builtin_inf();
    if (shift == __builtin_inf()) return {never, -1, 0};
    if (next >= 0) return {score_of(r, s, next, room.of_forced[r], shift), next, 0};
    const bool may_end = a.end >= 0 && t >= a.min_length;
    if (t + 1 >= a.limits[s])
      return {may_end ? score_of(r, s, a.end, room.of_end[r], shift) : never, a.end, 0};
    const int64_t at = s * K + r % K, n = room.words_of_row(a);
    C* const scores = room.logits + r * n;
    for (int64_t c = 0; c < n; c += Vector<C>::width)
      store(scores + c, c < room.padded_words() ? load(scores + c) + (C)shift : splat(never));
    for (int64_t j = 0; copies() && j < source.count(s); ++j)
      scores[source.words(s)[j]] = source.scores_of(r)[j];
    if (!may_end && a.end >= 0) scores[a.end] = never;
    for (int64_t i = 0; a.no_repeat_ngram && i < room.repetitions[at]; ++i)
      scores[room.repeated[at * a.most + i]] = never;
    auto* const odds = static_cast<C*>(own);
    const int64_t word = draw_word<C>({a.temperature, a.top_p, a.top_k}, a.numbers[at * a.most + t], scores,
                                      n, odds, reinterpret_cast<int32_t*>(odds + n));
    return {word < 0 ? never : scores[word], word, 0};
  }

  // Choose the words that continue the hypotheses of sentence i of those that are left, at step t.
  void choose(const RecurrentForward& step, const Factor<C>& outputs, int64_t i, int64_t t) {
    const int64_t s = room.sentence[i], next = forced(s, t);
    C* const totals = room.totals + s * K;
    Best<C> best = {room.best + s * 2 * K, 2 * K, 0};
    const bool must_end = t + 1 >= a.limits[s];
    for (int64_t k = 0; k < K; ++k) {
      if (totals[k] == -(C)__builtin_inf()) continue;
      const int64_t r = i * K + k;
      const double shift = normalise(step, outputs, r, i);
      if (shift != shift) return void(room.ended[s] = -1);
      if (shift == __builtin_inf()) continue;  // no word may come
      const auto add = [&](int64_t word, C score) {
        const C total = totals[k] + score + (word == a.end ? (C)0 : (C)a.length_bonus);
        if (best.takes(total)) best.insert({total, word, k});
      };
      if (next >= 0) {
        add(next, score_of(r, s, next, room.of_forced[r], shift));
        continue;
      }
      if (a.end >= 0 && t >= a.min_length) add(a.end, score_of(r, s, a.end, room.of_end[r], shift));
      if (must_end) continue;
      for (int64_t j = 0; copies() && j < source.count(s); ++j) {
        const int64_t word = source.words(s)[j];
        if (word != a.end && !repeats(r, word)) add(word, source.scores_of(r)[j]);
      }
      for (int64_t group = 0; group < groups; ++group) {
        const Candidate<C>* const found = room.candidates + (r * groups + group) * K;
        for (int64_t j = 0; j < K && found[j].word >= 0; ++j) {
          const int64_t word = found[j].word;
          if (copies() && source.has(s, word)) continue;
          add(word, (C)(found[j].score + shift));
        }
      }
    }
    continue_beam(i, t, best);
  }

  // Finish hypotheses of sentence i of those that are left, and continue the best K others.
  void continue_beam(int64_t i, int64_t t, const Best<C>& best) {
    const int64_t s = room.sentence[i];
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
      if (ends && rank < K) finish(s, {x.score / normaliser + penalty_of(i, x.slot, t), t, link});
      if (ends || going == K) continue;
      if (a.coverage_penalty)
        __builtin_memcpy(coverage_of(s, going, t + 1), coverage_of(s, x.slot, t), a.step.Tk * sizeof(C));
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
      if (has_history(step.attention)) {
        const CoverageForward& of = step.attention;
        __builtin_memcpy(history_of(r, t + 1), history_of(parent, t), step.Tk * sizeof(C));
        const View& weights = of.log_weights.data ? of.log_weights : of.weights;
        __builtin_memcpy(room.previous + r * step.Tk, row<C>(weights, from, link.parent),
                         step.Tk * sizeof(C));
      }
      embed(r, link.word);
      if (a.no_repeat_ngram) find_repetitions(s, k, t);
    }
  }

  // Find the words after step t that would repeat an n-gram of hypothesis k of sentence s.
  void find_repetitions(int64_t s, int64_t k, int64_t t) {
    const int64_t at = s * K + k, n = a.no_repeat_ngram;
    int64_t *const words = room.words + at * a.most, *const repeated = room.repeated + at * a.most;
    int64_t& count = room.repetitions[at];
    count = 0;
    for (int64_t i = t; i >= 0; --i) {
      const Link<C>& link = room.links[(s * a.most + i) * K + k];
      words[i] = link.word;
      k = link.parent;
    }
    const int64_t* const last = words + t + 2 - n;  // n - 1 words
    for (int64_t i = 0; i + n <= t + 1; ++i) {
      bool same = true;
      for (int64_t j = 0; j + 1 < n; ++j) same &= words[i + j] == last[j];
      if (same) repeated[count++] = words[i + n - 1];
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
    CoverageForward& of = attention;
    member.share(8, [&](int64_t item) {
      if (item == 0) keep(of.key, room.key, n, of.Tk, of.A);
      if (item == 1) keep(of.value, room.value, n, of.Tk, of.Dv);
      if (item == 2) keep(of.exponentials, room.exponentials, n, of.Tk, of.exponentials.row);
      if (item == 3) keep(of.key_bounds, room.key_bounds, n, a.most, 2);
      if (item == 4) keep(of.mask, room.mask, n, 1, of.Tk);
      if (item == 6) keep(of.inverse_fertility, room.inverse_fertility, n, 1, of.Tk);
      if (item == 7) keep(of.transition_prob, room.transition_prob, n, 1, a.most);
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
    put(of.inverse_fertility, room.inverse_fertility, 1, of.Tk);
    put(of.transition_prob, room.transition_prob, 1, a.most);
    of.transition_prob.row = 1;
    of.mask.row = 0;
    if (of.lengths) of.lengths = room.lengths;
    of.B = n;
  }

  // Write the best hypotheses of sentence b, from their last words on.
  void write(int64_t b) {
    const int64_t Tk = a.step.Tk;
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
          if (a.weights.data)
            __builtin_memcpy(row<C>(a.weights, place, t),
                             room.weights + ((b * a.most + t) * K + link.parent) * Tk, Tk * sizeof(C));
          if (t) link = room.links[(b * a.most + t - 1) * K + link.parent];
        }
      }
      for (int64_t t = length; t < a.most; ++t) {
        words[t] = 0, scores[t] = 0;
        if (a.weights.data) clear(row<C>(a.weights, place, t), Tk);
      }
      a.lengths[place] = room.ended[b] < 0 ? -1 : length;
      row<C>(a.scores, b)[n] = n < found ? room.finished[b * K + n].score : -(C)__builtin_inf();
    }
  }
};

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
