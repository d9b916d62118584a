// The loop of a recurrent layer with attention, for CUDA: products are GEMMs of the library, the
// rest is kernels of recurrent.cuh and a step's attention. Nothing synchronizes with the device, so
// a graph may capture it.
//
// A row of `state_products` holds all contributions of a state: to the query of its attention, to the
// gates of the next step and to the attentional vector, one product with the concatenated
// parameters. Row t belongs to the state before step t. In the backward the same row holds the
// gradients, and one product maps them to the state. With dropout the rows that are
// multiplied (`seen`) hold the state twice, as it is and times the mask.
//
// In a stack this is the state of the last layer; those below have products with weight_hh alone.
#pragma once
#include "../launch_recurrent.h"
#include "persistent_backward.cuh"
#include "persistent_forward.cuh"
#include "recurrent.cuh"

namespace attnfast {

namespace cuda {  // attention.cu and coverage.cu, whose kernels are compiled once
void run_forward(const Forward&, const View& added, const Tensor& like);
void run_backward(const Backward&, const Tensor& like);
void run_forward(const CoverageForward&, const Tensor& like);
void run_backward(const CoverageBackward&, const Tensor& like);
int64_t grad_score_vector_parts(const Problem&);
}  // namespace cuda

namespace {

bool weights_may_be_narrow() { return false; }
bool multiplies_narrow() { return false; }

// ---- tensors ------------------------------------------------------------------------------------

// Return a view; `offset` counts from the first element of x.
Tensor strided(const Tensor& x, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
               int64_t offset) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(x.get(), sizes.size(), sizes.data(), strides.data(), offset, &handle));
  return Tensor(handle);
}

// Return columns [first, first + n) of `rows` rows of a matrix whose rows are evenly spaced.
Tensor block(const Tensor& x, int64_t row, int64_t rows, int64_t first, int64_t n) {
  return strided(x, {rows, n}, {x.stride(0), 1}, row * x.stride(0) + first);
}
// Return such columns of step t of rows [B, T, columns], and of `count` steps from t on.
Tensor step(const Tensor& x, int64_t t, int64_t first, int64_t n) {
  return strided(x, {x.size(0), n}, {x.stride(0), 1}, t * x.stride(1) + first);
}
Tensor steps(const Tensor& x, int64_t t, int64_t count, int64_t first, int64_t n) {
  return strided(x, {x.size(0), count, n}, {x.stride(0), x.stride(1), 1}, t * x.stride(1) + first);
}
Tensor matrix(const Tensor& x) {  // of contiguous rows [B, T, columns]
  return strided(x, {x.size(0) * x.size(1), x.size(2)}, {x.size(2), 1}, 0);
}
// Return a layer's part of a tensor that every layer of a stack has; an absent result has size [0].
Tensor of_layer(const Tensor& x, int64_t number, bool stacked) {
  if (!stacked || x.dim() == 1) return x;
  const std::vector<int64_t> sizes(x.sizes().begin() + 1, x.sizes().end()),
      strides(x.strides().begin() + 1, x.strides().end());
  return strided(x, sizes, strides, number * x.stride(0));
}
Optional of_layer(const Optional& x, int64_t number, bool stacked) {
  return x ? Optional(of_layer(*x, number, stacked)) : x;
}
Tensor turned(const Tensor& x) { return strided(x, {x.size(1), x.size(0)}, {x.stride(1), x.stride(0)}, 0); }

void copy(const Tensor& from, Tensor to) { torch::stable::copy_(to, from); }
void zero(Tensor x) { torch::stable::zero_(x); }

// Compute out = a b, added to out if `adds`. The stable dispatcher takes no scalars, so this calls
// the function that AOTInductor's code calls.
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, bool adds) {
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cuda_addmm_out(out.get(), out.get(), a.get(), b.get(), adds ? 1. : 0., 1.));
}
// Compute x *= factor.
void scale(const Tensor& x, const Tensor& factor) {
  using torch::stable::detail::from;
  std::array<StableIValue, 2> stack = {from(x), from(factor)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mul_", "Tensor", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

const float* floats(const Tensor& x) { return static_cast<const float*>(data_or_sentinel(x)); }
Rows2 matrix_rows(const Tensor& x) { return {data_or_sentinel(x), x.stride(0)}; }

// ---- the parameters that multiply a state -------------------------------------------------------

// These parameters, concatenated, and the first column of each in a row of `state_products`.
struct StateParameters {
  int64_t gates, output, all;  // first columns after the query's, and the total number
  int64_t copies;              // copies of a state in a row that they multiply
  Tensor weight, bias;         // [all, copies H], [all]

  template <class Arguments>
  StateParameters(const Arguments& given, const Layer& a)
      : gates(given.weight_query ? a.A : 0), output(gates + gates_of(a.cell) * a.H),
        all(output + (given.weight_output ? a.F : 0)), copies(given.dropout ? 2 : 1),
        weight(empty(given.input.device(), {all, copies * a.H}, given.input.scalar_type())),
        bias(empty(given.input.device(), {all}, given.input.scalar_type())) {
    if (copies > 1) zero(weight);
    zero(bias);
    const auto put = [&](const Tensor& x, const Optional& of, int64_t first, int64_t column) {
      copy(x, block(weight, first, x.size(0), column, a.H));
      if (of) copy(*of, strided(bias, {x.size(0)}, {1}, first));
    };
    if (given.weight_query) put(*given.weight_query, given.bias_query, 0, 0);
    const auto last = [&](const auto& x) { return of_layer(x, a.layers - 1, a.layers > 1); };
    put(last(given.weight_hh), last(given.bias_hh), gates, masked(a));
    if (given.weight_output)
      put(block(packed(*given.weight_output), 0, a.F, a.Dv, a.H), given.bias_output, output, 0);
  }

  // Return the first column of the state that weight_hh multiplies.
  int64_t masked(const Layer& a) const { return (copies - 1) * a.H; }
};

// ---- code shared by forward and backward --------------------------------------------------------

// Raise if an argument is given that no kernel here supports.
template <class Arguments>
void refuse_unknown(const Arguments& given, const LayerChecker& fit) {
  if constexpr (requires { given.packed; }) fit.check(!given.packed, "packed");
  fit.check(!given.dropout_state, "dropout_state");
  fit.check(!given.dropout_cell, "dropout_cell");
  fit.check(!given.dropout_query, "dropout_query");
  fit.check(!given.dropout_feed, "dropout_feed");
  fit.check(!given.dropout_joined, "dropout_joined");
  fit.check(!given.weight_gate, "weight_gate");
  fit.check(given.output_activation == "tanh", "output_activation");
}

// Conversions of tensors to kernel arguments, and launches for a layer's dtype.
template <class Arguments, class Launch>
struct Loop {
  const Launch& launch;
  const typename Arguments::ArgumentChecker fit;
  const int64_t size;  // bytes of an element
  KeepAlive keep;

  Loop(const Arguments& given, const Launch& launch)
      : launch(launch), fit(given), size(fit.dtype == ScalarType::Double ? 8 : 4) {
    refuse_unknown(given, fit);
  }

  char* place(const Tensor& x, int64_t number) const {
    return static_cast<char*>(data_or_sentinel(x)) + (x.numel() ? number * size : 0);
  }
  // Return step t of rows [B, T, columns], or rows [B, columns].
  Rows2 at(const Tensor& x, int64_t t, int64_t first = 0) const {
    return {place(x, t * x.stride(1) + first), x.stride(0)};
  }
  static Rows2 at(const Optional& x) { return x ? matrix_rows(*x) : Rows2{}; }
  // Return the step before, or `first` at the first step.
  Rows2 before(const Tensor& x, const Optional& first, int64_t t) const {
    return t ? at(x, t - 1) : at(first);
  }
  View view_at(const Tensor& x, int64_t t, int64_t first = 0) const {
    const Rows2 rows = at(x, t, first);
    return {rows.data, rows.stride, 0, x.stride(1), 1};
  }

  Tensor room(std::vector<int64_t> sizes) const {
    sizes.insert(sizes.begin(), fit.B);
    return empty(fit.device(), sizes, fit.dtype);
  }
  static Optional side_by_side(const Optional& x) { return x ? Optional(packed(*x)) : x; }
  // Return contiguous rows of a layer.
  template <class X>
  auto own(const X& x, int64_t number) const {
    if constexpr (std::is_same_v<X, Tensor>) return of_layer(packed(x), number, fit.stacked);
    else return of_layer(side_by_side(x), number, fit.stacked);
  }
  // Multiply x by a mask of step t, rows [B, T, columns], if it is given.
  void mask_step(const Tensor& x, const Optional& mask, int64_t t) const {
    if (mask) scale(x, step(*mask, t, 0, x.size(1)));
  }

  // Run a kernel of the layer's dtype, kernels.operator()<C>(); `run` launches `units` of every
  // sequence.
  template <class Kernels, class... Args>
  void run_blocks(int64_t blocks, const Kernels& kernels, const Args&... args) const {
    if (size == 8) launch(kernels(double{}), blocks, 1, args...);
    else launch(kernels(float{}), blocks, 1, args...);
  }
  template <class Kernels, class... Args>
  void run(int64_t units, const Kernels& kernels, const Args&... args) const {
    run_blocks(fit.B * tiles(units, kThreads), kernels, args...);
  }
  void clear(const Layer& a, const Tensor& x) const {  // beyond the targets' ends
    if (!a.target_lengths || x.dim() != 3) return;
    const auto kernels = [](auto zero) { return clear_padding<decltype(zero)>; };
    run(a.T * x.size(2), kernels, a.T * x.size(2), x.size(2), matrix_rows(x), a.target_lengths);
  }
};

template <class Call, class Loop, class Arguments>
Call layer_of(const Arguments& given, Loop& loop) {
  Call a{};
  put_layer(given, loop.fit, a, loop.keep);
  return a;
}

// Set the lengths of the keys at every step; see put_lengths_of_steps.
template <class Loop>
void put_lengths(const Loop& loop, const Problem& attention, Layer& a) {
  if (!a.target_lengths || !a.T) return;
  int64_t* const out = loop.launch.zeros(a.T * a.B);
  loop.launch(put_lengths_of_steps, a.B * tiles(a.T, kThreads), 1, a.T, a.B, a.Tk, a.target_lengths,
              attention.lengths, out);
  a.step_lengths = out;
}

// Return the columns of W_o for the context, for input feeding.
Optional context_columns(const Optional& weight_output, const Layer& a) {
  return weight_output ? Optional(block(packed(*weight_output), 0, a.F, 0, a.Dv)) : Optional();
}

// Return the values times these columns, computed before the loop so that no step multiplies its
// context. Absent if that would cost more: with too few steps for the number of keys, or rows that
// are much longer; or if attention has a history.
template <class Arguments, class Loop>
Optional project_values(const Arguments& given, const Loop& loop, const Layer& a, const Optional& columns) {
  if (!columns || given.coverage || a.Tk > 4 * a.T || a.F > 2 * a.Dv) return {};
  const Tensor out = loop.room({a.Tk, a.F});
  multiply(matrix(out), matrix(packed(*given.value)), turned(*columns), false);
  return out;
}

// ---- all steps in one launch --------------------------------------------------------------------

template <class Layer>
PersistentLayer persistent_layer(const Layer& a, const StateParameters& of, const Tensor& state_products) {
  PersistentLayer call{};
  call.cell = a.cell;
  call.attends_first = a.attends_first;
  call.B = a.B;
  call.T = a.T;
  call.H = a.H;
  call.F = a.F;
  call.gates = gates_of(a.cell);
  call.state_rows = of.all;
  call.first_gate = of.gates;
  call.first_output = of.output;
  call.state_products = view(state_products);
  return call;
}

// Return true if the kernels that run all steps in one launch support the layer.
template <class Layer>
bool runs_at_once(const Layer& a) {
  const bool plain = a.attends && !has_history(a.attention) && a.layers == 1 && !a.dropout_output.data;
  return plain && a.dtype == Dtype::f32 && a.T && 0 < a.B && a.B <= kMostSequences;
}

// Run `kernel` if its blocks can run at once; return true if so. Shared memory holds the weights, keys and
// values, if that fits and every sequence has a block of its own; else the weights; else neither. `part`
// is the number of elements of a sequence's part. fits(blocks) returns true if the products of a block
// are not too wide for its warps.
template <class Loop, class Call, class Fits>
bool launch_at_once(const Loop& loop, Call& call, void (*kernel)(Call), int64_t part, const Fits& fits) {
  const Problem& attends = call.attends;
  bool has_weights = true;
  const auto bytes = [&](int blocks) {
    const int64_t most = std::clamp<int64_t>(attends.Tk / 4, 1, kMostParts);
    call.parts_of_row = std::clamp<int64_t>(blocks / attends.B, 1, most);
    call.blocks = blocks;
    return call.sizes().bytes(has_weights);
  };
  const auto blocks_with = [&](bool weights, bool memory) {
    has_weights = weights;
    call.caches_memory = memory;
    return loop.launch.blocks_at_once(kernel, kLoopThreads, bytes);
  };
  int blocks = attends.key_bounds.data ? 0 : blocks_with(true, true);
  if (blocks < attends.B) blocks = blocks_with(true, false);
  if (!blocks) blocks = blocks_with(false, false);
  if (!blocks || !fits(blocks) || tiles(attends.Tk, call.parts_of_row) > kLoopKeys) return false;
  const auto room = [&](int64_t elements) { return loop.launch.template scratch<float>(elements); };
  if (!has_weights) call.weights = room(int64_t{4} * blocks * call.sizes().weights());
  call.parts = {room(attends.B * call.parts_of_row * part), call.parts_of_row * part, 0, part};
  call.arrivals = loop.launch.zeros(kArrival * (attends.B + blocks + 1));
  return loop.launch.at_once(kernel, blocks, kLoopThreads, bytes(blocks), call);
}

// ---- forward ------------------------------------------------------------------------------------

// A layer's tensors in the forward.
struct ForwardLayer {
  Tensor hidden, states, cells, gates;
  Optional cell, mask;
  Tensor sums;         // the inputs' contributions, stored where the gates or states will be
  Tensor products;     // of the states before each step, with weight_hh from a column on
  int64_t first_gate;  // that column
  Tensor bias_ih;      // or nothing
  Tensor weight_hh;    // of a layer below the last
  Optional seen;       // the state and the state times the mask
};

// The buffers of a forward, and the phases of a step.
template <class Launch>
class ForwardLoop {
  const RecurrentArguments& given;
  Loop<RecurrentArguments, Launch> loop;
  RecurrentForward a;
  const RecurrentOutputs made;
  const StateParameters of;
  const int64_t H, gates;
  const Tensor weight_ih;
  const Optional of_context, projected, dropout_output, dropout_between;
  const Tensor of_fed, state_weight, state_products, log_sum_exp, losses;
  std::vector<ForwardLayer> layers;
  const ForwardLayer& last() const { return layers.back(); }

 public:
  ForwardLoop(const RecurrentArguments& given, const Launch& launch)
      : given(given), loop(given, launch), a(layer_of<RecurrentForward>(given, loop)),
        made(results_of(given, loop.fit, a)), of(given, a), H(a.H), gates(gates_of(a.cell) * H),
        weight_ih(packed(given.weight_ih)), of_context(context_columns(given.weight_output, a)),
        projected(project_values(given, loop, a, of_context)),
        dropout_output(loop.side_by_side(given.dropout_output)),
        dropout_between(loop.side_by_side(given.dropout_between)),
        of_fed(turned(block(weight_ih, 0, gates, a.E, a.F))), state_weight(turned(of.weight)),
        state_products(loop.room({a.T + 1, of.all})), log_sum_exp(loop.room({a.T, 1})),
        losses(loop.room({given.coverage ? a.T : 0, 1})) {
    for (int64_t number = 0; number < a.layers; ++number) layers.push_back(layer(number));
    const Tensor& sums = layers[0].sums;
    multiply(strided(sums, {a.B * a.T, gates}, {sums.stride(1), 1}, 0), matrix(packed(given.input)),
             turned(block(weight_ih, 0, gates, 0, a.E)), false);
    if (a.attends) put_attention(given, loop.fit, a, a.attention, loop.keep);
    if (given.coverage) {
      fill_history(given, loop.fit, a.attention, loop.keep);
      put_lengths(loop, a.attention, a);
      copy(*given.coverage, made.coverage);  // to which every step adds
      a.attention.loss = loop.view_at(losses, 0);
    }
  }

  RecurrentOutputs run() {
    if (!run_at_once()) run_steps();
    const std::vector<int64_t> steps = {1, 2};
    if (given.coverage) copy(torch::stable::sum(losses, steps, false, ScalarType::Double), made.loss);
    if (projected) multiply_weights();
    if (a.queries.data) copy_queries();
    for (const Tensor& x : {made.contexts, made.weights, made.queries, made.attentional}) loop.clear(a, x);
    return made;
  }

 private:
  ForwardLayer layer(int64_t number) const {
    const auto own = [&](const auto& x) { return loop.own(x, number); };
    ForwardLayer x = {own(given.hidden), own(made.states), own(made.cells),
                      own(made.gates),   own(given.cell),  own(given.dropout)};
    x.sums = saved_of(a.cell) ? x.gates : x.states;
    x.products = state_products;
    x.first_gate = of.gates;
    if (given.bias_ih) x.bias_ih = own(*given.bias_ih);
    if (number + 1 < a.layers) {
      x.products = loop.room({a.T, gates});
      x.first_gate = 0;
      x.weight_hh = turned(own(given.weight_hh));
      if (given.bias_hh) copy(own(*given.bias_hh), x.products);
      else zero(x.products);
    }
    if (x.mask) {
      x.seen = loop.room({2 * H});
      copy(x.hidden, block(*x.seen, 0, a.B, 0, H));
      copy(x.hidden, block(*x.seen, 0, a.B, H, H));
      scale(block(*x.seen, 0, a.B, H, H), *x.mask);
    }
    return x;
  }

  void run_steps() {
    const bool asks_last = a.attends && !a.attends_first;
    copy(of.bias, state_products);
    if (a.T) multiply_state(0);
    for (int64_t t = 0; t < a.T; ++t) {
      if (a.attends && a.attends_first) attend(t, t);
      const Tensor& all_fed = of_context ? made.attentional : made.contexts;
      Optional fed = given.feed;
      if (a.attends && (a.attends_first || t)) fed = step(all_fed, a.attends_first ? t : t - 1, 0, a.F);
      if (fed) multiply(step(layers[0].sums, t, 0, gates), *fed, of_fed, true);
      for (int64_t number = 0; number < a.layers; ++number) {
        if (number) read_below(number, t);
        if (number + 1 < a.layers) multiply_state_below(layers[number], t);
        run_cell(layers[number], t);
      }
      if (asks_last || t + 1 < a.T) multiply_state(t + 1);
      if (asks_last) attend(t, t + 1);
    }
  }

  // Run all steps in one launch if the kernel supports the layer; return true if so.
  bool run_at_once() {
    if (!runs_at_once(a) || (of_context && !projected)) return false;
    const Optional feed = loop.side_by_side(given.feed);
    PersistentForward call{persistent_layer(a, of, state_products)};
    call.attends = a.attention;
    call.added = of_context ? loop.view_at(state_products, 1, of.output) : View{};
    call.fed_weight = {floats(of_fed), weight_ih.stride(0), int(a.F)};
    call.state_weight = {floats(of.weight), of.weight.stride(0), int(of.copies * H)};
    call.state_bias = floats(of.bias);
    call.input_sums = view(last().sums);
    call.states = view(made.states);
    call.cells = given.cell ? view(made.cells) : View{};
    call.saved_gates = saved_of(a.cell) ? view(made.gates) : View{};
    call.fed = view(of_context ? made.attentional : made.contexts);
    call.hidden = matrix_rows(last().hidden);
    call.first_cell = loop.at(last().cell);
    call.feed = loop.at(feed);
    call.bias_ih = {a.bias_ih.data, 0};
    call.mask = loop.at(last().mask);
    call.seen = loop.at(last().seen);
    call.target_lengths = a.target_lengths;
    Forward& now = call.attends;
    now.Tq = a.T;
    now.query = given.weight_query ? view(state_products) : View{};
    now.weights = view(made.weights);
    now.context = call.fed;
    if (projected) now.value = view(*projected), now.Dv = a.F;
    const int64_t part = now.Dv + int64_t{sizeof(SoftmaxPart<float>) / sizeof(float)};
    return launch_at_once(loop, call, persistent_forward, part, [&](int blocks) {
      return tiles(H, blocks) <= kLoopWarps && tiles(of.all, blocks) <= kLoopWarps * kTileOutputs;
    });
  }

  // Fill row t of `state_products`.
  void multiply_state(int64_t t) {
    const ForwardLayer& x = last();
    const Tensor state = x.seen ? *x.seen : t ? step(x.states, t - 1, 0, H) : x.hidden;
    multiply(step(state_products, t, 0, of.all), state, state_weight, true);
  }

  // Fill row t of the products of a layer below the last.
  void multiply_state_below(const ForwardLayer& x, int64_t t) {
    const Tensor state = x.seen ? block(*x.seen, 0, a.B, H, H) : t ? step(x.states, t - 1, 0, H) : x.hidden;
    multiply(step(x.products, t, 0, gates), state, x.weight_hh, true);
  }

  // Set the sums of a layer at step t to the product with the state of the layer below.
  void read_below(int64_t number, int64_t t) {
    Tensor state = step(layers[number - 1].states, t, 0, H);
    if (dropout_between) {
      const Tensor below = state;
      state = loop.room({H});
      copy(below, state);
      loop.mask_step(state, of_layer(dropout_between, number - 1, true), t);
    }
    const Tensor weight = of_layer(*given.weight_ih_upper, number - 1, true);
    multiply(step(layers[number].sums, t, 0, gates), state, turned(weight), false);
  }

  // Run attention at step t with row `from` of `state_products`.
  void attend(int64_t t, int64_t from) {
    CoverageForward now = step_of(a, t, loop.size);
    const Tensor& like = last().hidden;
    if (given.weight_query) now.query = loop.view_at(state_products, from);
    else if (from) now.query = loop.view_at(last().states, from - 1);
    else now.query = view(like);
    now.log_sum_exp = loop.view_at(log_sum_exp, t);
    if (projected) {
      now.value = view(*projected);
      now.Dv = a.F;
      now.context = loop.view_at(made.attentional, t);
      cuda::run_forward(now, loop.view_at(state_products, t + 1, of.output), like);
    } else {
      now.context = loop.view_at(made.contexts, t);
      if (given.coverage) cuda::run_forward(now, like);
      else cuda::run_forward(now, {}, like);
      if (of_context) add_context(t);
    }
    if (of_context) loop.mask_step(step(made.attentional, t, 0, a.F), dropout_output, t);
  }

  // Compute the attentional vectors of step t from its contexts.
  void add_context(int64_t t) {
    const Feed call = {.B = a.B,
                       .F = a.F,
                       .Dv = a.Dv,
                       .contexts = loop.at(made.contexts, t),
                       .weight = loop.at(of_context),
                       .state_products = loop.at(state_products, t + 1, of.output),
                       .attentional = loop.at(made.attentional, t)};
    const auto kernels = [](auto zero) { return feed<decltype(zero)>; };
    loop.run_blocks(tiles(a.B, kQueries) * tiles(a.F, kKeys), kernels, call);
  }

  void run_cell(const ForwardLayer& x, int64_t t) {
    const CellStep call = {.B = a.B,
                           .H = H,
                           .t = t,
                           .target_lengths = a.target_lengths,
                           .of_input = loop.at(x.sums, t),
                           .bias_ih = {given.bias_ih ? data_or_sentinel(x.bias_ih) : nullptr, 0},
                           .state_products = loop.at(x.products, t, x.first_gate),
                           .before = loop.before(x.states, x.hidden, t),
                           .cell_before = x.cell ? loop.before(x.cells, x.cell, t) : Rows2{},
                           .mask = loop.at(x.mask),
                           .state = loop.at(x.states, t),
                           .cell = x.cell ? loop.at(x.cells, t) : Rows2{},
                           .gates = saved_of(a.cell) ? loop.at(x.gates, t) : Rows2{},
                           .seen = loop.at(x.seen)};
    by_cell(a.cell, [&](auto known) {
      const auto kernels = [](auto zero) { return cell_step<decltype(zero), decltype(known)::cell>; };
      loop.run(H, kernels, call);
    });
  }

  // Compute the contexts of all steps, if the loop read projected values: a context is a dot score's
  // grad_query with weights as grad_score.
  void multiply_weights() {
    Backward sum = {a.attention};
    sum.score = Score::dot;
    sum.scale = 1;
    sum.Tq = a.T;
    sum.A = a.Dv;
    sum.key = a.attention.value;
    sum.grad_score = view(made.weights);
    sum.grad_score_given = true;
    sum.grad_query = view(made.contexts);
    cuda::run_backward(sum, last().hidden);
  }

  void copy_queries() {
    if (given.weight_query) {
      copy(steps(state_products, a.attends_first ? 0 : 1, a.T, 0, a.A), made.queries);
    } else if (a.T) {
      copy(last().hidden, step(made.queries, 0, 0, H));
      copy(steps(last().states, 0, a.T - 1, 0, H), steps(made.queries, 1, a.T - 1, 0, H));
    }
  }
};

template <class Launch>
RecurrentOutputs run_recurrent(const RecurrentArguments& given, const Launch& launch) {
  return ForwardLoop<Launch>(given, launch).run();
}

// ---- backward -----------------------------------------------------------------------------------

// Return rows [B, T, columns] shifted by one step: `first`, or zeros, then all but the last of x.
template <class Loop>
Tensor shifted(const Loop& loop, const Tensor& x, const Optional& first) {
  const int64_t T = x.size(1), columns = x.size(2);
  const Tensor out = loop.room({T, columns});
  if (T == 0) return out;
  if (first) copy(*first, step(out, 0, 0, columns));
  else zero(step(out, 0, 0, columns));
  copy(steps(x, 0, T - 1, 0, columns), steps(out, 1, T - 1, 0, columns));
  return out;
}

// A layer's tensors in the backward.
struct BackwardLayer {
  Tensor hidden, states, cells, gates, grad_states, grad_hidden, grad_cell;
  Optional cell, mask, grad_cells;
  Tensor of_inputs;    // the gradients of the sums over inputs
  Tensor products;     // those of the products with weight_hh, from a column on
  int64_t first_gate;  // that column
  Tensor carried;      // the gradient of the state from the step after it
  Tensor reaching;     // that from its query, if it is the query itself, or from the layer above
  Tensor weight_hh;    // of a layer below the last
};

// The buffers of a backward, and the phases of a step.
template <class Launch>
class BackwardLoop {
  const RecurrentBackwardArguments& given;
  Loop<RecurrentBackwardArguments, Launch> loop;
  RecurrentBackward a;
  RecurrentGradients grads;
  const StateParameters of;
  const int64_t H, gates;
  const bool lstm;
  const Tensor attentional, queries, weights, weight_ih;
  const Optional grad_weights, of_context, dropout_output, dropout_between;
  const Optional projected;  // if present, a step reads no gradient of a context
  const Tensor state_products, grad_query, of_fed, grad_score, coverages;
  // The gradients of the contexts and attentional vectors, to which the loop adds, and which of the two
  // is that of the fed vectors.
  Tensor grad_contexts, grad_attentional;
  const Tensor& grad_fed;
  std::optional<HistorySums> of_history;
  std::vector<BackwardLayer> layers;
  const BackwardLayer& last() const { return layers.back(); }

 public:
  BackwardLoop(const RecurrentBackwardArguments& given, const Launch& launch)
      : given(given), loop(given, launch), a(layer_of<RecurrentBackward>(given, loop)),
        grads(gradients_of(given, loop.fit, a, loop.keep)), of(given, a), H(a.H),
        gates(gates_of(a.cell) * H), lstm(a.cell == Cell::lstm), attentional(packed(given.attentional)),
        queries(given.queries.dim() == 3 ? packed(given.queries) : loop.own(given.states, a.layers - 1)),
        weights(packed(given.weights)), weight_ih(packed(given.weight_ih)),
        grad_weights(loop.side_by_side(given.grad_weights)),
        of_context(context_columns(given.weight_output, a)),
        dropout_output(loop.side_by_side(given.dropout_output)),
        dropout_between(loop.side_by_side(given.dropout_between)),
        projected(given.grad_contexts ? Optional() : project_values(given, loop, a, of_context)),
        state_products(loop.room({a.T + 1, of.all})), grad_query(loop.room({1, H})),
        of_fed(block(weight_ih, 0, gates, a.E, a.F)), grad_score(loop.room({a.T, a.Tk})),
        coverages(loop.room({given.coverage ? a.T : 0, a.Tk})),
        grad_fed(of_context ? grad_attentional : grad_contexts) {
    for (int64_t number = 0; number < a.layers; ++number) layers.push_back(layer(number));
    for (const BackwardLayer& x : layers) zero(x.carried);
    for (const Tensor& x : {state_products, grad_query, grads.grad_cell}) zero(x);
    grad_contexts = returned(given.grad_contexts, a.attends, a.Dv);
    grad_attentional = returned(given.grad_attentional, a.attentional.data, a.F);
    if (!a.attends) return;
    CoverageBackward& attends = a.attention;
    put_attention(given, loop.fit, a, attends, loop.keep);
    attends.query = loop.view_at(queries, 0);
    attends.weights = loop.view_at(weights, 0);
    attends.grad_context = loop.view_at(grad_contexts, 0);
    attends.grad_score = loop.view_at(grad_score, 0);
    attends.grad_score_returned = true;
    if (grad_weights) attends.grad_weights = loop.view_at(*grad_weights, 0);
    if (given.coverage) begin_history();
  }

  RecurrentGradients run() {
    if (!run_at_once()) run_steps();
    if (a.T) multiply_gradients(0);
    for (int64_t number = 0; a.T && number + 1 < a.layers; ++number)
      multiply_gradients_below(layers[number], 0);
    write_initial_grads();
    Optional of_output;  // gradients of the sums of attentional vectors
    if (of_context) {
      of_output = loop.room({a.T, a.F});
      copy(steps(state_products, 1, a.T, of.output, a.F), *of_output);
      if (projected && given.need_grad_key)
        multiply(matrix(grad_contexts), matrix(*of_output), *of_context, false);
    }
    if (given.need_grad_input)
      multiply(matrix(grads.grad_input), matrix(layers[0].of_inputs), block(weight_ih, 0, gates, 0, a.E),
               false);
    if (given.need_grad_parameters) {
      multiply_inputs();
      multiply_states(of_output);
      for (int64_t number = 0; number < a.layers; ++number) multiply_layer(number);
    }
    const auto run_all = [&](const Backward& x) { cuda::run_backward(x, last().hidden); };
    if (of_history)
      of_history->finish(given, loop.fit, a, grads, [&](Backward of_values) {
        of_values.grad_key = of_values.grad_score_vector = View{};
        of_values.grad_score_given = true;
        run_all(of_values);
      });
    if (a.attends && given.need_grad_key && !loop.fit.K) {
      Problem all = a.attention;
      all.Tq = a.T;
      add_key_gradients(given, loop.fit, a.attention, cuda::grad_score_vector_parts(all), grads, run_all);
    }
    return grads;
  }

 private:
  BackwardLayer layer(int64_t number) const {
    const auto own = [&](const auto& x) { return loop.own(x, number); };
    BackwardLayer x = {own(given.hidden),    own(given.states),      own(given.cells),
                       own(given.gates),     own(given.grad_states), own(grads.grad_hidden),
                       own(grads.grad_cell), own(given.cell),        own(given.dropout),
                       own(given.grad_cells)};
    x.of_inputs = loop.room({a.T, gates});
    x.carried = x.mask ? loop.room({2 * H}) : x.grad_hidden;
    const bool is_last = number + 1 == a.layers;
    x.products = is_last ? state_products : loop.room({a.T, gates});
    x.first_gate = is_last ? of.gates : 0;
    x.reaching = is_last ? grad_query : loop.room({1, H});
    if (!is_last) x.weight_hh = own(given.weight_hh);
    return x;
  }

  // Compute the coverage before every step, and initialise the gradient of the history after the
  // last one.
  void begin_history() {
    of_history.emplace(given, loop.fit, a, grads, loop.keep);
    put_lengths(loop, a.attention, a);
    a.coverages = view(coverages);
    const auto rows = [](const View& x) { return Rows2{x.data, x.batch}; };
    const auto kernels = [](auto zero) { return cover_steps<decltype(zero)>; };
    loop.run(a.Tk, kernels, a.T, a.Tk, rows(a.attention.coverage_in), rows(a.attention.inverse_fertility),
             matrix_rows(weights), matrix_rows(coverages));
    if (given.grad_coverage) copy(*given.grad_coverage, grads.grad_coverage);
    else zero(grads.grad_coverage);
    zero(grads.grad_previous);
  }

  void run_steps() {
    const bool asks_last = a.attends && !a.attends_first;
    for (int64_t t = a.T - 1; t >= 0; --t) {
      if (of_context) feed_backward(t);
      if (asks_last) attend_backward(t, t + 1);
      if (asks_last || t + 1 < a.T) multiply_gradients(t + 1);
      run_cell_backward(last(), t, given.weight_query.has_value());
      for (int64_t number = a.layers - 2; number >= 0; --number) {
        reach_below(number, t);
        if (t + 1 < a.T) multiply_gradients_below(layers[number], t + 1);
        run_cell_backward(layers[number], t, false);
      }
      const Tensor from = step(layers[0].of_inputs, t, 0, gates);
      const int64_t to = a.attends_first ? t : t - 1;
      if (a.attends && to >= 0) multiply(step(grad_fed, to, 0, a.F), from, of_fed, true);
      else if (given.feed) multiply(grads.grad_feed, from, of_fed, false);
      if (a.attends && a.attends_first) attend_backward(t, t);
    }
  }

  // Run all steps in one launch if the kernel supports the layer; return true if so.
  bool run_at_once() {
    if (!runs_at_once(a) || (of_context && !projected)) return false;
    const BackwardLayer& x = last();
    PersistentBackward call{persistent_layer(a, of, state_products)};
    call.attends = a.attention;
    call.attends.Tq = a.T;
    call.attends.query = view(queries);
    call.attends.weights = view(weights);
    call.attends.grad_context = view(grad_contexts);
    call.attends.grad_score = view(grad_score);
    if (projected) {
      call.attends.value = view(*projected);
      call.attends.Dv = a.F;
      call.attends.grad_context = loop.view_at(state_products, 1, of.output);
    }
    call.grad_query = given.weight_query ? view(state_products) : view(grad_query);
    if (!given.weight_query) call.grad_query.row = 0, call.grad_state = loop.at(grad_query, 0);
    call.fed_weight = {floats(of_fed), of_fed.stride(0), int(gates)};
    call.state_weight = {floats(of.weight), of.weight.stride(0), int(of.all)};
    call.copies = of.copies;
    call.grad_states = view(x.grad_states);
    call.grad_cells_given = lstm && x.grad_cells ? view(*x.grad_cells) : View{};
    call.saved_gates = saved_of(a.cell) ? view(x.gates) : View{};
    call.states = view(x.states);
    call.cells = lstm ? view(x.cells) : View{};
    call.of_inputs = view(x.of_inputs);
    call.grad_fed = view(grad_fed);
    call.attentional = of_context ? view(attentional) : View{};
    call.hidden = matrix_rows(x.hidden);
    call.first_cell = loop.at(x.cell);
    call.mask = loop.at(x.mask);
    call.carried = matrix_rows(x.carried);
    call.grad_cell = lstm ? matrix_rows(x.grad_cell) : Rows2{};
    call.grad_feed = given.feed ? matrix_rows(grads.grad_feed) : Rows2{};
    call.target_lengths = a.target_lengths;
    const int64_t outputs = std::max(of.copies * H, a.F);
    call.partial = loop.launch.template scratch<float>(kMostSplit * outputs * a.B);
    const int64_t part = 2 * a.A + int64_t{sizeof(QueryPart) / sizeof(float)};
    return launch_at_once(loop, call, persistent_backward, part, [&](int) {
      return std::max(call.units() * call.copies, call.fed_outputs()) <= kLoopWarps * kTileOutputs;
    });
  }

  Tensor returned(const Optional& grad, bool wanted, int64_t columns) const {
    const Tensor out = loop.room({wanted ? a.T : 0, columns});
    if (grad && wanted) copy(*grad, out);
    else zero(out);
    if (wanted) loop.clear(a, out);
    return out;
  }
  static Tensor sum_of_rows(const Tensor& x) {
    return torch::stable::sum(matrix(x), std::vector<int64_t>{0}, false);
  }

  // Run the backward of the attentional vector of step t.
  void feed_backward(int64_t t) {
    const auto kernels = [](auto zero) { return attentional_backward<decltype(zero)>; };
    loop.run(a.F, kernels, a.F, loop.at(attentional, t),
             dropout_output ? loop.at(*dropout_output, t) : Rows2{}, loop.at(grad_attentional, t),
             loop.at(state_products, t + 1, of.output));
    if (!projected)
      multiply(step(grad_contexts, t, 0, a.Dv), step(state_products, t + 1, of.output, a.F), *of_context,
               true);
  }

  // Run attention's backward at step t and store into row `to` of `state_products`.
  void attend_backward(int64_t t, int64_t to) {
    CoverageBackward now = step_of(a, t, loop.size);
    if (projected) {
      now.value = view(*projected);
      now.Dv = a.F;
      now.grad_context = loop.view_at(state_products, t + 1, of.output);
    }
    now.grad_query = given.weight_query ? loop.view_at(state_products, to) : loop.view_at(grad_query, 0);
    if (of_history) cuda::run_backward(now, last().hidden);
    else cuda::run_backward(static_cast<const Backward&>(now), last().hidden);
  }

  // Map row t of `state_products` to the gradient of the state.
  void multiply_gradients(int64_t t) {
    multiply(last().carried, step(state_products, t, 0, of.all), of.weight, true);
  }

  // The same for a layer below the last; with dropout, that of the state times the mask.
  void multiply_gradients_below(const BackwardLayer& x, int64_t t) {
    const Tensor out = x.mask ? block(x.carried, 0, a.B, H, H) : x.carried;
    multiply(out, step(x.products, t, 0, gates), x.weight_hh, true);
  }

  // Compute the gradient of a layer's state at step t from the layer above.
  void reach_below(int64_t number, int64_t t) {
    const Tensor out = step(layers[number].reaching, 0, 0, H);
    multiply(out, step(layers[number + 1].of_inputs, t, 0, gates),
             of_layer(*given.weight_ih_upper, number, true), false);
    loop.mask_step(out, of_layer(dropout_between, number, true), t);
  }

  // `projects`: whether the state's query is a projection.
  void run_cell_backward(const BackwardLayer& x, int64_t t, bool projects) {
    const CellStepBackward call = {
        .B = a.B,
        .H = H,
        .t = t,
        .target_lengths = a.target_lengths,
        .grad_state = loop.at(x.grad_states, t),
        .grad_cell_given = x.grad_cells && lstm ? loop.at(*x.grad_cells, t) : Rows2{},
        .gates = saved_of(a.cell) ? loop.at(x.gates, t) : Rows2{},
        .state = loop.at(x.states, t),
        .before = loop.before(x.states, x.hidden, t),
        .cell = lstm ? loop.at(x.cells, t) : Rows2{},
        .cell_before = lstm ? loop.before(x.cells, x.cell, t) : Rows2{},
        .reaching = {matrix_rows(x.carried), loop.at(x.mask), projects ? Rows2{} : loop.at(x.reaching, 0)},
        .grad_cell = lstm ? matrix_rows(x.grad_cell) : Rows2{},
        .of_input = loop.at(x.of_inputs, t),
        .state_products = loop.at(x.products, t, x.first_gate)};
    by_cell(a.cell, [&](auto known) {
      const auto kernels = [](auto zero) {
        return cell_step_backward<decltype(zero), decltype(known)::cell>;
      };
      loop.run(H, kernels, call);
    });
  }

  void write_initial_grads() {
    if (given.feed && !a.T) zero(grads.grad_feed);
    const bool attends_first = a.attends && a.attends_first && !given.weight_query;
    for (const BackwardLayer& x : layers) {
      const bool asks = attends_first && &x == &last();
      const Reaching reaching = {matrix_rows(x.carried), loop.at(x.mask),
                                 asks ? loop.at(grad_query, 0) : Rows2{}};
      const auto kernels = [](auto zero) { return reach_first<decltype(zero)>; };
      loop.run(H, kernels, H, reaching, matrix_rows(x.grad_hidden));
    }
  }

  // Compute the gradient of weight_ih, which multiplies the inputs and the fed vectors.
  void multiply_inputs() {
    const Tensor through = turned(matrix(layers[0].of_inputs));
    Tensor input = packed(given.input);
    if (a.target_lengths) {
      input = torch::stable::clone(input);
      loop.clear(a, input);
    }
    multiply(block(grads.grad_weight_ih, 0, gates, 0, a.E), through, matrix(input), false);
    if (!a.attends) return;
    const Tensor made = packed(of_context ? attentional : given.contexts);
    const Tensor fed = a.attends_first ? made : shifted(loop, made, given.feed);
    multiply(block(grads.grad_weight_ih, 0, gates, a.E, a.F), through, matrix(fed), false);
  }

  // Compute the gradients of the parameters that multiply a state, and of the columns of W_o for the
  // context.
  void multiply_states(const Optional& of_output) {
    const Tensor seen = loop.room({a.T + 1, of.copies * H});
    for (int64_t n = 0; n < of.copies; ++n) {
      copy(last().hidden, step(seen, 0, n * H, H));
      copy(last().states, steps(seen, 1, a.T, n * H, H));
    }
    if (last().mask) scale_steps(steps(seen, 0, a.T + 1, H, H), *last().mask);
    const Tensor all = empty(loop.fit.device(), {of.all, of.copies * H}, loop.fit.dtype);
    multiply(all, turned(matrix(state_products)), matrix(seen), false);
    const Tensor sums = sum_of_rows(state_products);
    const auto put = [&](int64_t first, int64_t column, const Tensor& weight, const Tensor& bias) {
      copy(block(all, first, weight.size(0), column, H), weight);
      if (bias.numel()) copy(strided(sums, {bias.size(0)}, {1}, first), bias);
    };
    const int64_t number = a.layers - 1;
    put(of.gates, of.masked(a), loop.own(grads.grad_weight_hh, number),
        loop.own(grads.grad_bias_hh, number));
    if (given.weight_query) put(0, 0, grads.grad_weight_query, grads.grad_bias_query);
    if (!of_output) return;
    put(of.output, 0, block(grads.grad_weight_output, 0, a.F, a.Dv, H), grads.grad_bias_output);
    multiply(block(grads.grad_weight_output, 0, a.F, 0, a.Dv), turned(matrix(*of_output)),
             matrix(packed(given.contexts)), false);
  }

  // Multiply the states of all steps by the mask of a layer.
  void scale_steps(const Tensor& states, const Tensor& mask) const {
    scale(states, strided(mask, {a.B, 1, H}, {H, H, 1}, 0));
  }

  // Compute the gradients of a layer's parameters that multiply no state of the last layer.
  void multiply_layer(int64_t number) {
    const BackwardLayer& x = layers[number];
    if (grads.grad_bias_ih.numel()) copy(sum_of_rows(x.of_inputs), loop.own(grads.grad_bias_ih, number));
    if (number + 1 == a.layers) return;
    const Tensor before = shifted(loop, x.states, x.hidden);
    if (x.mask) scale_steps(before, *x.mask);
    multiply(loop.own(grads.grad_weight_hh, number), turned(matrix(x.products)), matrix(before), false);
    if (grads.grad_bias_hh.numel()) copy(sum_of_rows(x.products), loop.own(grads.grad_bias_hh, number));
    Tensor read = x.states;  // by the layer above
    if (dropout_between) {
      read = torch::stable::clone(read);
      scale(read, of_layer(*dropout_between, number, true));
    }
    multiply(of_layer(grads.grad_weight_ih_upper, number, true),
             turned(matrix(layers[number + 1].of_inputs)), matrix(read), false);
  }
};

template <class Launch>
RecurrentGradients run_recurrent_backward(const RecurrentBackwardArguments& given, const Launch& launch) {
  return BackwardLoop<Launch>(given, launch).run();
}

}  // namespace
}  // namespace attnfast
