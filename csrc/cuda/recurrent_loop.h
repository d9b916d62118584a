// The loop of a recurrent layer with attention, for CUDA: products are GEMMs of the library, the
// rest is kernels of recurrent.cuh and a step's attention. Nothing synchronizes with the device, so
// a graph may capture it.
//
// A row of `state_products` holds all contributions of a state: to the query of its attention, to the
// gates of the next step and to the attentional vector, one product with the concatenated
// parameters. Row t belongs to the state before step t. In the backward the same row holds the
// gradients, and one product maps them to the state. With dropout the rows that are
// multiplied (`seen`) hold copies of the state, as it is and times each mask.
//
// In a stack this is the state of the last layer; those below have products with weight_hh alone.
#pragma once
#include "../launch_recurrent.h"
#include "persistent.cuh"
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

// These parameters, concatenated, and the first column of each in a row of `state_products`. Each
// multiplies one of the copies of a state.
struct StateParameters {
  int64_t gates, output, context_gate, all;  // first columns after the query's, and the total number
  int64_t copies = 1;                        // of a state in a row; the first is the state itself
  // The copies that weight_hh, the query and the context's gate, and the output multiply.
  int64_t of_gates, of_query, of_output;
  Tensor weight, bias;  // [all, copies H], [all]

  template <class Arguments>
  StateParameters(const Arguments& given, const Layer& a)
      : gates(given.weight_query ? a.A : 0), output(gates + gates_of(a.cell) * a.H),
        context_gate(output + (given.weight_output ? a.F : 0)),
        all(context_gate + (given.weight_gate ? a.Dv : 0)), of_gates(given.dropout ? copies++ : 0),
        of_query(given.dropout_query ? copies++ : 0), of_output(given.dropout_joined ? copies++ : 0),
        weight(empty(given.input.device(), {all, copies * a.H}, given.input.scalar_type())),
        bias(empty(given.input.device(), {all}, given.input.scalar_type())) {
    if (copies > 1) zero(weight);
    zero(bias);
    const auto put = [&](const Tensor& x, const Optional& of, int64_t first, int64_t number) {
      copy(x, block(weight, first, x.size(0), number * a.H, a.H));
      if (of) copy(*of, strided(bias, {x.size(0)}, {1}, first));
    };
    if (given.weight_query) put(*given.weight_query, given.bias_query, 0, of_query);
    const auto last = [&](const auto& x) { return of_layer(x, a.layers - 1, a.layers > 1); };
    put(last(given.weight_hh), last(given.bias_hh), gates, of_gates);
    if (given.weight_output)
      put(block(packed(*given.weight_output), 0, a.F, a.Dv, a.H), given.bias_output, output, of_output);
    if (!given.weight_gate) return;
    if constexpr (requires { given.bias_gate; })
      put(*given.weight_gate, given.bias_gate, context_gate, of_query);
    else put(*given.weight_gate, {}, context_gate, of_query);
  }
};

// Return a copy of a state, of those side by side in a row.
View copy_of(const Tensor& copies, int64_t number, const Layer& a) {
  const Tensor x = block(copies, 0, a.B, number * a.H, a.H);
  return {data_or_sentinel(x), x.stride(0), 0, 0, 1};
}

// ---- code shared by forward and backward --------------------------------------------------------

// Conversions of tensors to kernel arguments, and launches for a layer's dtype.
template <class Arguments, class Launch>
struct Loop {
  const Launch& launch;
  const typename Arguments::ArgumentChecker fit;
  const int64_t size;  // bytes of an element
  KeepAlive keep;

  Loop(const Arguments& given, const Launch& launch)
      : launch(launch), fit(given), size(fit.dtype == ScalarType::Double ? 8 : 4) {
    if constexpr (requires { given.packed; }) fit.check(!given.packed, "packed");
  }

  char* place(const Tensor& x, int64_t number) const {
    return static_cast<char*>(data_or_sentinel(x)) + (x.numel() ? number * size : 0);
  }
  // Return step t of rows [B, T, columns], or rows [B, columns].
  Rows2 at(const Tensor& x, int64_t t, int64_t first = 0) const {
    return {place(x, t * x.stride(1) + first), x.stride(0)};
  }
  Rows2 at(const Optional& x, int64_t t, int64_t first = 0) const { return x ? at(*x, t, first) : Rows2{}; }
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
  // Compute out = x times step t of a mask, rows [B, T, columns or more], or add it to out.
  void put_masked(const Tensor& x, const Tensor& mask, int64_t t, const Tensor& out,
                  bool adds = false) const {
    const auto kernels = [](auto zero) { return multiply_mask<decltype(zero)>; };
    run(x.size(1), kernels, x.size(1), matrix_rows(x), at(mask, t), matrix_rows(out), adds);
  }
  // Return x times step t of a mask, or x if that is absent.
  Tensor masked(const Tensor& x, const Optional& mask, int64_t t) const {
    if (!mask) return x;
    const Tensor out = room({x.size(1)});
    put_masked(x, *mask, t, out);
    return out;
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
// are much longer; or if attention has a history, the context a gate or a mask, or the output no
// tanh.
template <class Arguments, class Loop>
Optional project_values(const Arguments& given, const Loop& loop, const Layer& a, const Optional& columns) {
  if (!columns || given.coverage || given.weight_gate || given.dropout_joined || !a.output_tanh) return {};
  if (a.Tk > 4 * a.T || a.F > 2 * a.Dv) return {};
  const Tensor out = loop.room({a.Tk, a.F});
  multiply(matrix(out), matrix(packed(*given.value)), turned(*columns), false);
  return out;
}

// The masks of the copies of the last layer's state, of contexts (in `joined`) and of fed vectors, each
// contiguous.
struct StateMasks {
  Optional dropout, query, joined, feed;

  template <class Loop, class Arguments>
  StateMasks(const Loop& loop, const Arguments& given, const Layer& a)
      : dropout(loop.own(given.dropout, a.layers - 1)), query(loop.side_by_side(given.dropout_query)),
        joined(loop.side_by_side(given.dropout_joined)), feed(loop.side_by_side(given.dropout_feed)) {}

  // Return the masks of the copies of a layer's state before step t; `mask` applies to a layer below the
  // last.
  template <class Loop>
  Masks before(const Loop& loop, const StateParameters& of, const Layer& a, int64_t number,
               const Optional& mask, int64_t t) const {
    if (number + 1 < a.layers) return mask ? Masks{{loop.at(mask)}, 1} : Masks{};
    const auto of_step = [&](const Optional& x, int64_t at, int64_t first) {
      return 0 <= at && at < a.T ? loop.at(x, at, first) : Rows2{};
    };
    Masks out;
    out.count = of.copies - 1;
    if (dropout) out.rows[of.of_gates - 1] = loop.at(dropout);
    if (query) out.rows[of.of_query - 1] = of_step(query, a.attends_first ? t : t - 1, 0);
    if (joined) out.rows[of.of_output - 1] = of_step(joined, t - 1, a.Dv);
    return out;
  }
};

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
  const View* const others[] = {&a.dropout_output, &a.dropout_state, &a.dropout_cell,  &a.dropout_query,
                                &a.dropout_feed,   &a.weight_gate,   &a.dropout_joined};
  for (const View* x : others)
    if (x->data) return false;
  const bool has_tanh = a.output_tanh || !a.output_dim;
  const bool plain = a.attends && !has_history(a.attention) && a.layers == 1 && has_tanh;
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

}  // namespace
}  // namespace attnfast
