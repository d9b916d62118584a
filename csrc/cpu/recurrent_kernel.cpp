// A recurrent layer that attends at every step, on the CPU, for one instruction set (see vector.h);
// the launcher is recurrent.cpp.
#include "search.h"
#include "recurrent_backward.h"

namespace attnfast {
namespace VARIANT {
namespace {

// Return a scratch at no real address, for measuring sizes.
template <class C>
Scratch<C> nowhere() {
  return {reinterpret_cast<C*>(64)};
}
template <class C>
size_t bytes_of(const Scratch<C>& room) {
  return reinterpret_cast<uintptr_t>(room.next) - 64;
}

template <class C>
size_t forward_room(const RecurrentForward& a) {
  Scratch<C> room = nowhere<C>();
  if (!a.packed) Packed<C>(a, room);
  for (int i = 0; i < 2 && a.dropout.data; ++i) room.take(a.layers * a.B * a.H);
  if (a.dropout_between.data) room.take((a.layers - 1) * a.B * a.H);
  if (a.dropout_query.data) room.take(a.B * a.H);
  if (a.dropout_feed.data) room.take(a.B * a.F);
  if (a.dropout_joined.data) room.take(a.B * (a.Dv + a.H));
  take_features(a.attention, a.attention, false, room);
  return bytes_of(room);
}
template <class C>
size_t packed_room(const Layer& a, const Words& words) {
  Scratch<C> room = nowhere<C>();
  PackedSearch<C>(a, words, room);
  return bytes_of(room);
}
template <class C>
void pack_weights(const Layer& a, const Words& words, Team& team, int64_t who, void* out) {
  Member member(team, who);
  Scratch<C> room = {static_cast<C*>(out)};
  PackedSearch<C>(a, words, room).pack(a, words, member);
}
template <class C>
size_t backward_room(const RecurrentBackward& a) {
  Scratch<C> room = nowhere<C>();
  const BackwardRoom<C> taken(a, room);
  return bytes_of(room);
}

template <class C>
size_t search_room(const Search& a) {
  Scratch<C> room = nowhere<C>();
  const SearchRoom<C> taken(a, room);
  return bytes_of(room);
}

// Return the largest number of items of a phase of products: panels are at least 4 columns wide.
int64_t most_items(const Layer& a, const LayerPlan& plan) {
  const int64_t columns = larger(larger(a.E, a.H), larger(a.A, larger(a.F, a.Dv)));
  const int64_t all_panels = 8 + (5 + 3 * a.layers) * kMostGates * parts(columns, 4);
  const int64_t widest = (kMostGates + 1) * parts(columns, 4) + 2;
  return larger(all_panels, larger(widest, a.layers * parts(columns, 4)) *
                                larger(parts(a.B * a.T, kMostBatch), larger(parts(a.B, plan.rows), 2)));
}

int64_t forward_items(const RecurrentForward& a, const LayerPlan& plan) {
  int64_t most = larger(most_items(a, plan), a.layers * a.B);
  const AttentionKernels& passes = VARIANT::attention;
  if (!a.attends) return most;
  const Pass<Forward> all[] = {passes.scores, passes.softmax, passes.context, passes.span};
  for (const auto& pass : all) most = larger(most, pass.items(a.attention, plan.attention));
  return most;
}
int64_t backward_items(const RecurrentBackward& a, const LayerPlan& plan) {
  int64_t most = larger(most_items(a, plan), a.layers * a.B);
  const AttentionKernels& passes = VARIANT::attention;
  if (!a.attends) return most;
  const Pass<Backward> all[] = {passes.grad_weights, passes.grad_score, passes.grad_score_span,
                                passes.grad_inputs};
  for (const auto& pass : all) most = larger(most, pass.items(a.attention, plan.attention));
  return most;
}

int64_t pack_items(const Layer& a, const Words& words) {
  return larger(most_items(a, LayerPlan{.rows = kMostBatch}), 3 * parts(words.R, 4) + parts(words.V, 4));
}
int64_t search_items(const Search& a, const LayerPlan& plan) {
  return larger(forward_items(a.step, plan),
                pack_items(a.step, a) * larger(parts(a.B * a.beam, plan.rows), 1));
}
size_t forward_scratch(const RecurrentForward& a, const LayerPlan& plan) {
  if (!a.attends) return 0;
  const size_t bytes = attention.forward_scratch(a.attention, plan.attention);
  return has_history(a.attention) ? larger(bytes, coverage.forward_scratch(a.attention)) : bytes;
}
// Attention, the weights of a source's words, or a draw.
size_t search_scratch(const Search& a, const LayerPlan& plan) {
  const int64_t of_word = (a.dtype == Dtype::f64 ? sizeof(double) : sizeof(float)) + sizeof(int32_t);
  const int64_t drawn = a.numbers ? round_up(a.V + a.X, kPanel<float>) * of_word : 0;
  const int64_t copied = a.source_words ? a.step.Tk * sizeof(double) : 0;
  return larger(forward_scratch(a.step, plan), larger(drawn, copied));
}
size_t backward_scratch(const RecurrentBackward& a, const LayerPlan& plan) {
  const size_t block = a.dtype == Dtype::f64 ? 8 * product_scratch<double>() : 4 * product_scratch<float>();
  if (!a.attends) return block;
  const size_t bytes = larger(block, attention.backward_scratch(a.attention, plan.attention));
  return has_history(a.attention) ? larger(bytes, coverage.backward_scratch(a.attention)) : bytes;
}

template <class C>
void run_forward(const RecurrentForward& a, const LayerPlan& plan, Team& team, int64_t who, void* shared,
                 void* own) {
  Member member(team, who);
  Forwards<C>(a, plan, member, {static_cast<C*>(shared)}, own).run();
}
template <class C>
void run_backward(const RecurrentBackward& a, const LayerPlan& plan, Team& team, int64_t who, void* shared,
                  void* own) {
  Member member(team, who);
  BackwardPass<C>(a, plan, member, {static_cast<C*>(shared)}, own).run();
}
template <class C>
void run_search(const Search& a, const LayerPlan& plan, Team& team, int64_t who, void* shared, void* own) {
  Member member(team, who);
  BeamSearch<C>(a, plan, member, {static_cast<C*>(shared)}, own).run();
}

}  // namespace

extern const RecurrentKernels recurrent = {
    .multiplies_narrow =
        [] {
#if defined(__AVX512F__)
          return __builtin_cpu_supports("avx512bf16") != 0;
#else
          return false;
#endif
        },
    .packed =
        [](const Layer& a, const Words& words) {
          return a.dtype == Dtype::f64 ? packed_room<double>(a, words) : packed_room<float>(a, words);
        },
    .pack_items = pack_items,
    .pack =
        [](const Layer& a, const Words& words, Team& team, int64_t who, void* out) {
          const auto run = a.dtype == Dtype::f64 ? pack_weights<double> : pack_weights<float>;
          run(a, words, team, who, out);
        },
    .forward = {.shared =
                    [](const RecurrentForward& a, const LayerPlan&) {
                      return a.dtype == Dtype::f64 ? forward_room<double>(a) : forward_room<float>(a);
                    },
                .own = forward_scratch,
                .items = forward_items,
                .run =
                    [](const RecurrentForward& a, const LayerPlan& plan, Team& team, int64_t who,
                       void* shared, void* own) {
                      const auto run = a.dtype == Dtype::f64 ? run_forward<double> : run_forward<float>;
                      run(a, plan, team, who, shared, own);
                    }},
    .backward = {.shared =
                     [](const RecurrentBackward& a, const LayerPlan&) {
                       return a.dtype == Dtype::f64 ? backward_room<double>(a) : backward_room<float>(a);
                     },
                 .own = backward_scratch,
                 .items = backward_items,
                 .run =
                     [](const RecurrentBackward& a, const LayerPlan& plan, Team& team, int64_t who,
                        void* shared, void* own) {
                       const auto run = a.dtype == Dtype::f64 ? run_backward<double> : run_backward<float>;
                       run(a, plan, team, who, shared, own);
                     }},
    .search = {.shared =
                   [](const Search& a, const LayerPlan&) {
                     return a.dtype == Dtype::f64 ? search_room<double>(a) : search_room<float>(a);
                   },
               .own = search_scratch,
               .items = search_items,
               .run =
                   [](const Search& a, const LayerPlan& plan, Team& team, int64_t who, void* shared,
                      void* own) {
                     const auto run = a.dtype == Dtype::f64 ? run_search<double> : run_search<float>;
                     run(a, plan, team, who, shared, own);
                   }},
};

}  // namespace VARIANT
}  // namespace attnfast
