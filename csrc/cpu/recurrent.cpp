// Registers the recurrent layer with attention for the CPU: selects the instruction set and starts
// the team.
#include "recurrent.h"

#include "../launch_recurrent.h"
#include "run.h"
#include "scratchpad.h"

namespace attnfast {
namespace {

using cpu::LayerPlan;
using cpu::Team;

const RecurrentKernels& kernels() {
  static const RecurrentKernels& chosen = choose<portable::recurrent, avx2::recurrent, avx512::recurrent>();
  return chosen;
}

bool weights_may_be_narrow() { return true; }
bool multiplies_narrow() { return kernels().multiplies_narrow(); }

// Multiply-adds of a step from which another thread is worth its barriers.
constexpr int64_t kStepWorthAThread = 1 << 16;
constexpr int64_t kMostBatch = 32, kLeastBatch = 8;  // sequences of one item

// ---- the team -----------------------------------------------------------------------------------

int64_t threads_for(const Layer& a, int64_t more = 0) {
  const int64_t gates = gates_of(a.cell);
  const int64_t products =
      a.H * (gates * (a.F + (2 * a.layers - 1) * a.H) + (a.weight_query.data ? a.A : 0)) +
      a.output_dim * a.Dv + (a.weight_gate.data ? a.Dv * a.H : 0);
  const int64_t work = a.B * (products + a.Tk * (a.A + a.Dv) + more);
  return std::clamp<int64_t>(work / kStepWorthAThread, 1, torch::stable::get_num_threads());
}

// Choose the sequences of an item: enough to repay loading a panel into the cache, few enough that
// all threads have work.
LayerPlan plan_of(const Layer& a, int64_t threads) {
  LayerPlan plan{};
  const int64_t panels = std::max<int64_t>(a.H / 32, 1);
  plan.rows = kMostBatch;
  while (plan.rows > kLeastBatch && panels * ((a.B + plan.rows - 1) / plan.rows) < 2 * threads)
    plan.rows /= 2;
  return plan;
}

// Rows [B, T, columns] of scratch, for `layers` layers.
struct Room {
  View* view;
  int64_t columns, layers = 1;
};

template <class Call, size_t count>
Scratchpad run_team(Call& a, const LayerPlan& plan, int64_t threads, const LayerKernel<Call>& kernel,
                    const Room (&rooms)[count]) {
  const size_t of_row = a.B * a.T * (a.dtype == Dtype::f64 ? sizeof(double) : sizeof(float));
  const size_t shared = kernel.shared(a, plan), own = Scratchpad::whole(kernel.own(a, plan));
  size_t bytes = Scratchpad::whole(shared) + threads * own;
  for (const Room& room : rooms) bytes += Scratchpad::whole(room.layers * room.columns * of_row);
  Scratchpad pad(bytes);
  for (const Room& room : rooms) {
    const int64_t of_sequence = a.T * room.columns;
    *room.view = {pad.take(room.layers * room.columns * of_row), of_sequence, a.B * of_sequence,
                  room.columns};
  }
  void* const of_all = pad.take(shared);
  char* const of_member = pad.take(threads * own);
  std::vector<uint32_t> taken(kernel.items(a, plan));
  Team team = {threads, taken.data(), 0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernel.run(a, plan, team, i, of_all, of_member + i * own);
  });
  return pad;
}

// Set the lengths of the keys at every step, [T, B], if targets have ends. They are 0 beyond an end, where
// the history does not change.
void put_lengths_of_steps(Layer& a, const Problem& attention, KeepAlive& keep) {
  if (!a.target_lengths) return;
  keep.push_back(
      empty(torch::stable::Device(torch::headeronly::DeviceType::CPU), {a.T, a.B}, ScalarType::Long));
  auto* const out = static_cast<int64_t*>(data_or_sentinel(keep.back()));
  const int64_t* const lengths = attention.lengths;
  for (int64_t t = 0; t < a.T; ++t)
    for (int64_t b = 0; b < a.B; ++b)
      out[t * a.B + b] = t >= a.target_lengths[b] ? 0 : lengths ? lengths[b] : a.Tk;
  a.step_lengths = out;
}

// Return the states that are the queries.
View states_of_last(const Layer& a) {
  View x = a.states;
  const int64_t size = a.dtype == Dtype::f64 ? sizeof(double) : sizeof(float);
  x.data = static_cast<char*>(x.data) + (a.layers - 1) * x.head * size;
  x.head = 0;
  return x;
}

// ---- forward and backward -----------------------------------------------------------------------

RecurrentOutputs recurrent(const RecurrentArguments& given) {
  const RecurrentArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  RecurrentForward a{};
  put_layer(given, fit, a, keep);
  if (given.packed) {
    fit.check(!given.weight_gate, "packed");
    fit.check(static_cast<size_t>(given.packed->numel()) == kernels().packed(a, {}), "packed");
    keep.push_back(packed(*given.packed));
    a.packed = data_or_sentinel(keep.back());
  }
  const RecurrentOutputs results = results_of(given, fit, a);
  const int64_t threads = threads_for(static_cast<const Layer&>(a));
  LayerPlan plan = plan_of(a, threads);
  if (a.attends) {
    Forward& step = a.attention;
    put_attention(given, fit, a, step, keep);
    step.query = a.queries.data ? a.queries : states_of_last(a);
    step.context = a.contexts;
    if (!fit.K)
      keep.push_back(given.key_exponentials ? packed(*given.key_exponentials) : cpu::exponentials_of(step));
    if (!fit.K && keep.back().numel()) step.exponentials = view(keep.back());
    plan.attention = plan_by_rows(step);
    if (given.coverage) {
      fill_history(given, fit, a.attention, keep);
      put_lengths_of_steps(a, a.attention, keep);
    }
  }
  const Room rooms[] = {{&a.attention.log_sum_exp, a.attends},
                        {&a.attention.loss, given.coverage.has_value()}};
  run_team(a, plan, threads, kernels().forward, rooms);
  return results;
}

RecurrentGradients recurrent_backward(const RecurrentBackwardArguments& given) {
  const RecurrentBackwardArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  RecurrentBackward a{};
  put_layer(given, fit, a, keep);
  RecurrentGradients grads = gradients_of(given, fit, a, keep);
  const int64_t threads = threads_for(static_cast<const Layer&>(a));
  LayerPlan plan = plan_of(a, threads);
  if (a.attends) {
    Backward& step = a.attention;
    put_attention(given, fit, a, step, keep);
    step.query = a.queries.data ? a.queries : states_of_last(a);
    step.weights = packed_view(given.weights, keep);
    step.grad_weights = result_of(given.grad_weights, keep);
    step.grad_score_returned = true;
    if (!fit.K) keep.push_back(cpu::exponentials_of(step));
    if (!fit.K && keep.back().numel()) step.exponentials = view(keep.back());
    plan.attention = plan_by_rows(step);
    plan.attention.columns = columns_of_gradients(step);
    plan.attention.grad_inputs_scale = step.scale;
  }
  std::optional<HistorySums> sums;
  if (given.coverage) {
    sums.emplace(given, fit, a, grads, keep);
    put_lengths_of_steps(a, a.attention, keep);
  }
  const bool feeds_back = given.weight_output.has_value();
  const Room rooms[] = {{&a.grad_gates, sums_of(a.cell) * a.H, a.layers},
                        {&a.grad_fed, feeds_back ? a.F : 0},
                        {&a.attention.grad_query, a.attends ? a.A : 0},
                        {&a.attention.grad_context, a.attends ? a.Dv : 0},
                        {&a.attention.grad_score, a.attends ? a.Tk : 0},
                        {&a.coverages, given.coverage ? a.Tk : 0},
                        {&a.grad_context_gates, given.weight_gate ? a.Dv : 0}};
  const Scratchpad pad = run_team(a, plan, threads, kernels().backward, rooms);
  if (sums) sums->finish(given, fit, a, grads, cpu::run_grad_value);
  if (a.attends && given.need_grad_key && !fit.K)
    add_key_gradients(given, fit, a.attention, 1, grads,
                      [](const Backward& all) { cpu::run_backward(all); });
  return grads;
}

// Return the features of the embedded word that the readout reads: E or none.
int64_t input_of_readout(const Optional& weight_readout, int64_t others, int64_t E) {
  return weight_readout && weight_readout->dim() == 2 && weight_readout->size(1) == others ? 0 : E;
}

// ---- packed weights -----------------------------------------------------------------------------

#define ATTNFAST_PACK(X)                                             \
  X(Tensor, weight_ih, sizes, dtype, {G * H, E + F})                 \
  X(Tensor, weight_hh, layered, dtype, {G * H, H})                   \
  X(Optional, bias_ih, layered, sum_dtype, {G * H})                  \
  X(Optional, bias_hh, layered, sum_dtype, {G * H})                  \
  X(Optional, weight_query, sizes, dtype, {A, H})                    \
  X(Optional, weight_output, sizes, dtype, {output_dim, Dv + H})     \
  X(Optional, weight_ih_upper, sizes, dtype, {layers - 1, G * H, H}) \
  X(Optional, weight_readout, sizes, dtype, {R, H + Dv + read})      \
  X(Optional, weight_vocab, sizes, dtype, {V, R})                    \
  X(int64_t, feed_size, between, 0, E + F)                           \
  X(int64_t, context_size, between, 0, INT32_MAX)                    \
  X(std::string, mode, any)                                          \
  X(bool, int8, any)

struct PackChecker : StackChecker {
  int64_t E = 0, H = 0, G, F, A = 0, Dv, output_dim = 0, V = 0, R = 0, read;

  template <class Arguments>
  explicit PackChecker(const Arguments& given)
      : StackChecker(Arguments::kOperator, given.weight_ih), G(gates_of(cell_of(given.mode))),
        F(given.feed_size), Dv(given.context_size) {
    check(given.weight_ih.dim() == 2 && given.weight_ih.is_cpu(), "weight_ih");
    check(dtype == sum_dtype || dtype == ScalarType::BFloat16, "weight_ih");
    check(!given.int8 || sum_dtype == ScalarType::Float, "int8");
    stacked = given.weight_ih_upper.has_value();
    check(given.weight_hh.dim() == 2 + stacked, "weight_hh");
    if (stacked) layers = given.weight_hh.size(0);
    check(between(F, 0, given.weight_ih.size(1)), "feed_size");
    E = given.weight_ih.size(1) - F;
    H = A = given.weight_hh.size(1 + stacked);
    for (const auto& [x, name] :
         {std::pair(&given.weight_query, "weight_query"), std::pair(&given.weight_output, "weight_output"),
          std::pair(&given.weight_vocab, "weight_vocab")})
      check(!*x || (*x)->dim() == 2, name);
    if (given.weight_query) A = given.weight_query->size(0);
    if (given.weight_output) output_dim = given.weight_output->size(0);
    if (given.weight_vocab) V = given.weight_vocab->size(0), R = given.weight_vocab->size(1);
    read = input_of_readout(given.weight_readout, H + Dv, E);
  }
};

ATTNFAST_ARGUMENTS(PackArguments, "pack_recurrent", ATTNFAST_PACK, PackChecker)
ATTNFAST_RESULTS(PackedWeights, packed)

PackedWeights pack_recurrent(const PackArguments& given) {
  const PackArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  Layer a{};
  a.dtype = fit.dtype == ScalarType::Double ? Dtype::f64 : Dtype::f32;
  a.cell = cell_of(given.mode);
  a.layers = fit.layers;
  a.E = fit.E;
  a.H = fit.H;
  a.F = fit.F;
  a.A = fit.A;
  a.output_dim = fit.output_dim;
  a.Dv = fit.Dv;
  put_weights(given, a, keep);
  a.bias_ih = packed_view(given.bias_ih, keep, fit.stacked);
  a.bias_hh = packed_view(given.bias_hh, keep, fit.stacked);
  Words words{};
  words.V = fit.V;
  words.R = fit.R;
  words.reads_input = fit.read;
  words.weight_readout = weight_of(given.weight_readout, a.narrow, keep);
  words.weight_vocab = weight_of(given.weight_vocab, a.narrow, keep);
  const Tensor out = empty(kCpu, {static_cast<int64_t>(kernels().packed(a, words))}, ScalarType::Byte);
  a.B = 32;  // as much work as 32 sequences make
  const int64_t threads = threads_for(a);
  std::vector<uint32_t> taken(kernels().pack_items(a, words));
  Team team = {threads, taken.data(), 0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernels().pack(a, words, team, i, data_or_sentinel(out));
  });
  return {out};
}

// ---- search -------------------------------------------------------------------------------------

#define ATTNFAST_SEARCH(X)                                                \
  X(Tensor, embedding, sizes, dtype, {V, E})                              \
  X(Tensor, weight_vocab, sizes, of_weights, {V, R})                      \
  X(Tensor, limits, sizes, ScalarType::Long, {B})                         \
  ATTNFAST_LAYER_PARAMETERS(X)                                            \
  X(Optional, weight_readout, sizes, of_weights, {R, H + Dv + read})      \
  X(Optional, bias_readout, sizes, dtype, {R})                            \
  X(Optional, bias_vocab, sizes, dtype, {V})                              \
  X(Optional, weight_pointer, sizes, dtype, {1, of_gate})                 \
  X(Optional, bias_pointer, sizes, dtype, {1})                            \
  X(Optional, weight_ih_upper, sizes, of_weights, {layers - 1, G * H, H}) \
  X(Optional, mask, terms, ScalarType::Bool, {1, Tk})                     \
  ATTNFAST_LENGTHS(X)                                                     \
  X(Optional, key_bounds, spans)                                          \
  X(Optional, key_exponentials, exponentials, given.score)                \
  X(Optional, packed, bytes)                                              \
  X(Optional, word_mask, word_masks)                                      \
  X(Optional, prefix, sizes, ScalarType::Long, {B, prefix_length})        \
  X(Optional, numbers, sizes, ScalarType::Double, {B, given.beam, T})     \
  X(Optional, source, sizes, ScalarType::Long, {B, Tk})                   \
  X(Optional, filters, sizes, dtype, {K, channels, taps})                 \
  X(Optional, projection, sizes, dtype, {A, K})                           \
  X(Optional, penalty, sizes, dtype, {1})                                 \
  X(Optional, inverse_fertility, sizes, dtype, {B, Tk})                   \
  X(Optional, transition_prob, sizes, dtype, {B, T})                      \
  X(Optional, coverage, sizes, dtype, {B, Tk})                            \
  X(Optional, previous, sizes, dtype, {B, Tk})                            \
  ATTNFAST_LAYER_OPTIONS(X)                                               \
  X(std::string, output_activation, activates)                            \
  X(bool, int8, any)                                                      \
  X(double, embedding_scale, any)                                         \
  X(int64_t, begin, between, 0, V - 1)                                    \
  X(int64_t, end, between, -1, V - 1)                                     \
  X(int64_t, unknown, between, 0, V - 1)                                  \
  X(int64_t, num_oov, between, 0, given.source ? INT32_MAX : 0)           \
  X(int64_t, most, between, 0, INT32_MAX)                                 \
  X(int64_t, beam, between, 1, kMostBeam)                                 \
  X(int64_t, n_best, between, 1, given.beam)                              \
  X(double, length_penalty, any)                                          \
  X(double, length_bonus, any)                                            \
  X(double, coverage_penalty, any)                                        \
  X(int64_t, min_length, between, 0, INT32_MAX)                           \
  X(int64_t, no_repeat_ngram, between, 0, INT32_MAX)                      \
  X(double, temperature, positive)                                        \
  X(int64_t, top_k, between, 0, INT32_MAX)                                \
  X(double, top_p, positive)                                              \
  X(bool, need_weights, any)

// The most products of bytes, up to 255 · 127 each, in a sum of 32 bits.
constexpr int64_t kMostBytes = 1 << 16;

struct SearchChecker : LayerChecker {
  int64_t V = 0, R = 0, prefix_length = 0, num_oov, read, of_gate;

  template <class Arguments>
  explicit SearchChecker(const Arguments& given) : LayerChecker(given) {
    check(given.hidden.is_cpu(), "hidden");
    check(given.key.has_value(), "key");
    check(given.embedding.dim() == 2, "embedding");
    check(given.weight_vocab.dim() == 2, "weight_vocab");
    check(given.weight_ih.dim() == 2, "weight_ih");
    T = given.most;
    V = given.embedding.size(0);
    E = given.embedding.size(1);
    R = given.weight_vocab.size(1);
    num_oov = given.num_oov;
    check(!given.bias_readout || given.weight_readout, "bias_readout");
    read = input_of_readout(given.weight_readout, H + Dv, E);
    const int64_t longest = std::max({E, F, H, Dv, R});
    check(!given.int8 || (dtype == ScalarType::Float && longest <= kMostBytes), "int8");
    const bool joins = !given.weight_readout && !given.weight_output;
    check(given.weight_readout || R == output_dim || (joins && (R == H || R == H + Dv || R == H + Dv + E)),
          "weight_vocab");
    if (!given.attends_first && given.weight_ih.size(1) == E) F = 0, check(!given.feed, "feed");
    if (given.prefix) check(given.prefix->dim() == 2, "prefix"), prefix_length = given.prefix->size(1);
    check(!given.numbers || given.n_best == given.beam, "n_best");
    of_gate = input_of_readout(given.weight_pointer, R, E) ? H + Dv + E : R;
    check(!given.weight_pointer || given.source, "source");
    check(!given.source || given.weight_pointer, "weight_pointer");
    check(!given.bias_pointer || given.weight_pointer, "bias_pointer");
  }

  static bool positive(double x) { return x > 0; }

  bool word_masks(const Optional& x) const {
    const int64_t words = V + num_oov;
    return !x || sizes(*x, ScalarType::Bool, {1, words}) || sizes(*x, ScalarType::Bool, {B, words});
  }
};

ATTNFAST_ARGUMENTS(SearchArguments, "search", ATTNFAST_SEARCH, SearchChecker)
ATTNFAST_RESULTS(SearchOutputs, words, word_scores, lengths, scores, weights)

// Allocate the buffers of a step. Attention has the K hypotheses of a sentence as its queries.
void put_rooms(const SearchArguments& given, const SearchArguments::ArgumentChecker& fit, Search& a,
               KeepAlive& keep) {
  const auto room = [&](bool wanted, int64_t columns) {
    if (!wanted) return View{};
    keep.push_back(empty(kCpu, {a.B, a.beam, columns}, fit.dtype));
    return rows_of(keep.back());
  };
  RecurrentForward& step = a.step;
  const auto flat = [](View x) { return View{x.data, x.row, 0, x.row}; };
  const auto of_layers = [&](bool wanted, int64_t columns) {
    if (!wanted) return View{};
    keep.push_back(empty(kCpu, {step.layers, step.B, columns}, fit.dtype));
    return View{data_or_sentinel(keep.back()), columns, step.B * columns, columns};
  };
  step.input = flat(room(true, step.E));
  step.gates = of_layers(saved_of(step.cell), 4 * step.H);
  const View contexts = room(true, step.Dv);
  const View queries = room(given.weight_query || given.attends_first, step.A);
  step.states = of_layers(true, step.H);
  step.contexts = flat(contexts);
  step.queries = queries.data ? flat(queries) : View{};
  step.cells = of_layers(step.cell == Cell::lstm, step.H);
  step.attentional = flat(room(given.weight_output.has_value(), step.output_dim));
  CoverageForward& of = step.attention;
  // With a history, the hypotheses are heads.
  const auto rows_or_heads = [](View x) { return View{x.data, x.batch, x.row, x.row}; };
  of.weights = rows_or_heads(room(true, step.Tk));
  of.log_sum_exp = rows_or_heads(room(true, 1));
  of.context = rows_or_heads(contexts);
  View states = states_of_last(step);
  states.batch = a.beam * step.H;
  of.query = rows_or_heads(queries.data ? queries : states);
  if (!given.coverage) return;
  of.loss = rows_or_heads(room(true, 1));
  of.sigmoid_sum = rows_or_heads(room(of.sigmoid, 1));
  of.log_weights = rows_or_heads(room(given.transition_prob.has_value(), step.Tk));
}

// List the words of each source that may come.
void put_source(const SearchArguments& given, const SearchArguments::ArgumentChecker& fit, Search& a,
                KeepAlive& keep) {
  if (!given.source) return;
  const auto room = [&](int64_t columns) {
    keep.push_back(empty(kCpu, {a.B, columns}, ScalarType::Long));
    return static_cast<int64_t*>(data_or_sentinel(keep.back()));
  };
  const int64_t Tk = fit.Tk;
  const Tensor source = packed(*given.source);
  const auto* const all = static_cast<const int64_t*>(data_or_sentinel(source));
  const auto possible = [&](int64_t word) { return word >= 0 && word < a.V + a.X; };
  fit.check(std::all_of(all, all + a.B * Tk, possible), "source");
  int64_t *const words = room(Tk), *const count = room(1), *const index = room(Tk);
  for (int64_t b = 0; b < a.B; ++b) {
    const int64_t *const from = all + b * Tk, *const to = from + Tk;
    const auto* const mask = static_cast<const bool*>(a.word_mask.data) + b * a.word_mask.batch;
    const auto may_come = [&](int64_t word) { return !a.word_mask.data || mask[word]; };
    int64_t *const first = words + b * Tk, *last = std::copy_if(from, to, first, may_come);
    std::sort(first, last);
    last = std::unique(first, last);
    count[b] = last - first;
    std::transform(from, to, index + b * Tk, [&](int64_t word) {
      return may_come(word) ? std::lower_bound(first, last, word) - first : -1;
    });
  }
  a.source_words = words;
  a.source_count = count;
  a.source_index = index;
  a.gate_reads_state = fit.of_gate != a.R;
  a.weight_pointer = packed_view(given.weight_pointer, keep);
  a.bias_pointer = packed_view(given.bias_pointer, keep);
}

SearchOutputs search(const SearchArguments& given) {
  const SearchArguments::ArgumentChecker fit(given);
  KeepAlive keep;
  Search a{};
  RecurrentForward& step = a.step;
  put_layer(given, fit, step, keep);
  a.dtype = step.dtype;
  a.B = step.B;
  a.T = a.beam = given.beam;
  a.n_best = given.n_best;
  step.B = a.B * a.beam;
  step.T = 1;
  a.V = fit.V;
  a.R = fit.R;
  a.reads_input = fit.read;
  a.begin = given.begin;
  a.end = given.end;
  a.X = given.num_oov;
  a.unknown = given.unknown;
  a.most = given.most;
  a.hidden = step.hidden;
  a.first_cell = step.first_cell;
  a.feed = step.feed;
  a.embedding = packed_view(given.embedding, keep);
  a.weight_readout = weight_of(given.weight_readout, step.narrow, keep);
  a.weight_vocab = weight_of(given.weight_vocab, step.narrow, keep);
  a.bias_readout = packed_view(given.bias_readout, keep);
  a.bias_vocab = packed_view(given.bias_vocab, keep);
  a.embedding_scale = given.embedding_scale;
  if (given.packed) {
    fit.check(static_cast<size_t>(given.packed->numel()) == kernels().packed(step, a), "packed");
    keep.push_back(packed(*given.packed));
    step.packed = data_or_sentinel(keep.back());
  }
  a.length_penalty = given.length_penalty;
  a.length_bonus = given.length_bonus;
  a.coverage_penalty = given.coverage_penalty;
  a.min_length = given.min_length;
  a.no_repeat_ngram = given.no_repeat_ngram;
  a.prefix_length = fit.prefix_length;
  a.word_mask = packed_view(given.word_mask, keep);
  if (given.word_mask && given.word_mask->size(0) == 1) a.word_mask.batch = 0;
  a.prefix = packed_view(given.prefix, keep);
  put_source(given, fit, a, keep);
  if (given.numbers) {
    keep.push_back(packed(*given.numbers));
    a.numbers = static_cast<const double*>(data_or_sentinel(keep.back()));
  }
  a.temperature = given.temperature;
  a.top_k = given.top_k;
  a.top_p = given.top_p;
  keep.push_back(packed(given.limits));
  a.limits = static_cast<const int64_t*>(data_or_sentinel(keep.back()));
  const Tensor words = empty(kCpu, {a.B, a.n_best, a.most}, ScalarType::Long),
               lengths = empty(kCpu, {a.B, a.n_best}, ScalarType::Long),
               word_scores = empty(kCpu, {a.B, a.n_best, a.most}, fit.dtype),
               scores = empty(kCpu, {a.B, a.n_best}, fit.dtype),
               weights =
                   empty_if(given.need_weights, given.hidden, {a.B, a.n_best, a.most, fit.Tk}, fit.dtype);
  a.words = static_cast<int64_t*>(data_or_sentinel(words));
  a.lengths = static_cast<int64_t*>(data_or_sentinel(lengths));
  a.word_scores = {data_or_sentinel(word_scores), a.most};
  a.scores = {data_or_sentinel(scores), a.n_best};
  if (given.need_weights) a.weights = {data_or_sentinel(weights), a.most * fit.Tk, 0, fit.Tk};
  put_attention(given, fit, step, step.attention, keep);
  Forward& of = step.attention;
  of.B = a.B;
  if (!fit.K)
    keep.push_back(given.key_exponentials ? packed(*given.key_exponentials) : cpu::exponentials_of(of));
  if (!fit.K && keep.back().numel()) of.exponentials = view(keep.back());
  of.exponentials.head = 0;  // the same for all hypotheses
  fill_history(given, fit, step.attention, keep);
  (given.coverage ? of.H : of.Tq) = a.beam;
  of.mask.row = of.mask.head = 0;
  put_rooms(given, fit, a, keep);
  const int64_t of_words = a.R * (a.V + (given.weight_readout ? step.H + step.Dv : 0));
  const int64_t threads = threads_for(step, of_words);
  LayerPlan plan = plan_of(step, threads);
  plan.attention = plan_by_rows(of);
  const int64_t row_blocks = std::max<int64_t>((step.B + plan.rows - 1) / plan.rows, 1);
  a.groups = (4 * threads + row_blocks - 1) / row_blocks;
  const Room rooms[] = {{&a.read, given.weight_readout || !given.weight_output ? a.R : 0}};
  run_team(a, plan, threads, kernels().search, rooms);
  return {words, word_scores, lengths, scores, weights};
}

using SearchOperators = Operators<search>;

}  // namespace

// Return the list above, for a test.
ATTNFAST_EXPORT const char* attnfast_search_operators() {
  static const std::string text = SearchOperators::listed();
  return text.c_str();
}

// Return true if this processor multiplies bfloat16 factors.
ATTNFAST_EXPORT bool attnfast_multiplies_bfloat16() {
  try {
    return multiplies_narrow();
  } catch (const std::exception&) {  // an unsupported instruction set: the operators report it
    return false;
  }
}

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) {
  RecurrentOperators::implement(m);
  Operators<pack_recurrent>::implement(m);
  SearchOperators::implement(m);
}

}  // namespace attnfast
