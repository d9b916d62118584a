// Code shared by all launchers: it checks arguments, turns tensors into views of a Problem, and
// allocates results.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "arguments.h"
#include "attention.h"

namespace attnfast {
namespace {

using torch::headeronly::ScalarType;

Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Dtype::f32;
    case ScalarType::Double: return Dtype::f64;
    case ScalarType::Half: return Dtype::f16;
    case ScalarType::BFloat16: return Dtype::bf16;
    default: throw std::runtime_error("attention takes float32, float64, float16 or bfloat16");
  }
}

ScalarType accumulation(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Return an empty tensor whose axes are laid out in memory as in `order`. It bypasses the
// dispatcher, which takes a considerable part of a small call.
Tensor empty(torch::stable::Device device, const std::vector<int64_t>& sizes, ScalarType dtype,
             const std::vector<int64_t>& order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t elements = 1;
  for (size_t i = order.size(); i-- > 0; elements *= std::max<int64_t>(sizes[order[i]], 1))
    strides[order[i]] = elements;
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), to<int32_t>(from(dtype)),
                               to<int32_t>(from(device.type())), device.index(), &handle));
  return Tensor(handle);
}

Tensor empty(torch::stable::Device device, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  return empty(device, sizes, dtype, order);
}

// Return a tensor's data. data_ptr() of an empty tensor is null, but a null View means that the
// argument is absent.
void* data_or_sentinel(const Tensor& x) {
  alignas(64) static char nowhere[64];
  return x.numel() ? x.data_ptr() : nowhere;
}

// [B, (H,) rows, columns], or [B, (H,) rows] with `columns` false.
View view(const Tensor& x, bool columns = true) {
  const int64_t n = x.dim(), row = n - (columns ? 2 : 1);
  View v;
  v.data = data_or_sentinel(x);
  v.batch = x.stride(0);
  v.head = row == 2 ? x.stride(1) : 0;
  v.row = x.stride(row);
  v.column = columns ? x.stride(n - 1) : 0;
  return v;
}

// Return a view in which sizes of 1 are broadcast.
View broadcast_view(const Tensor& x) {
  const int64_t n = x.dim();
  View v = view(x);
  if (x.size(0) == 1) v.batch = 0;
  if (x.size(1) == 1) v.head = 0;
  if (x.size(n - 2) == 1) v.row = 0;
  if (x.size(n - 1) == 1) v.column = 0;
  return v;
}

// Return a contiguous tensor; a contiguous input bypasses the dispatcher.
Tensor packed(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// Return a view with unit column stride; `keep` holds the copy if one is needed.
View view_of_rows(const Tensor& x, std::vector<Tensor>& keep) {
  if (x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) <= 1) return view(x);
  keep.push_back(torch::stable::contiguous(x));
  return view(keep.back());
}

std::vector<int64_t> shape(const Tensor& rows_of, int64_t columns) {
  std::vector<int64_t> s(rows_of.sizes().begin(), rows_of.sizes().end());
  s.back() = columns;
  return s;
}

// Allocate rows of another width, with the heads in the memory order of x, as
// attnfast.ops.operators.empty_rows does.
Tensor empty_rows(const Tensor& x, int64_t columns, ScalarType dtype) {
  std::vector<int64_t> sizes = shape(x, columns), order = {0, 1, 2, 3};
  if (sizes.size() == 4)
    std::stable_sort(order.begin(), order.end() - 1,
                     [&](int64_t i, int64_t j) { return x.stride(i) > x.stride(j); });
  const auto spread = [&](int64_t i) { return x.stride(i) == 0; };
  if (sizes.size() < 4 || std::any_of(order.begin(), order.end(), spread))
    order.resize(sizes.size()), std::iota(order.begin(), order.end(), 0);
  return empty(x.device(), sizes, dtype, order);
}

Normalisation normalisation_of(const std::string& name) {
  int i = 0;
  for (const char* known : {"softmax", "sigmoid", "sparsemax", "entmax15"}) {
    if (name == known) return Normalisation{i};
    ++i;
  }
  throw std::runtime_error("normalisation must be one that csrc/launch.h lists, got " + name);
}

// Return whether kernels compute sparsemax and 1.5-entmax.
bool weights_may_be_sparse();

// The rules that check arguments against an operator's first one, which has batch and heads in
// front of its last two sizes. attnfast.ops.arguments rejects the same arguments and explains the
// error.
class ArgumentChecker {
  const char* operator_name;
  const Tensor& first;

 protected:
  using Sizes = std::initializer_list<int64_t>;
  // The one or two dtypes that an argument may have.
  struct Types {
    ScalarType one, other;
    Types(ScalarType one) : one(one), other(one) {}
    Types(ScalarType one, ScalarType other) : one(one), other(other) {}
  };

 public:
  ScalarType dtype, sum_dtype;  // the first argument's dtype, and the accumulation dtype
  int64_t lead;                 // sizes in front of the last two
  int64_t B, heads;

  ArgumentChecker(const char* operator_name, const Tensor& first)
      : operator_name(operator_name), first(first), dtype(first.scalar_type()),
        sum_dtype(accumulation(first)), lead(first.dim() - 2), B(first.dim() ? first.size(0) : 0),
        heads(first.dim() == 4 ? first.size(1) : 1) {}

  torch::stable::Device device() const { return first.device(); }

  void check(bool fits, const char* name) const {
    if (!fits) throw std::runtime_error(std::string(operator_name) + ": " + name + " does not fit");
  }

  template <class T>
  static bool any(const T&) {
    return true;
  }

  static bool between(int64_t x, int64_t least, int64_t most) { return least <= x && x <= most; }

  // The shape is exactly these sizes.
  bool sizes(const Tensor& x, Types types, Sizes wanted) const {
    return placed(x, types) && ends(x, 0, wanted, false);
  }
  bool sizes(const Optional& x, Types types, Sizes wanted) const { return !x || sizes(*x, types, wanted); }

  // The shape is batch, heads and these sizes.
  bool rows(const Tensor& x, Types types, Sizes wanted) const {
    return placed(x, types) && begins(x, false) && ends(x, lead, wanted, false);
  }
  bool rows(const Optional& x, Types types, Sizes wanted) const { return !x || rows(*x, types, wanted); }

  // As rows, but any size may be 1.
  bool terms(const Optional& x, Types types, Sizes wanted) const {
    return !x || (placed(*x, types) && begins(*x, true) && ends(*x, lead, wanted, true));
  }

  // With a history, a softmax, or a sigmoid unless it has a transition; without one, a softmax,
  // sparsemax or 1.5-entmax.
  static bool normalises(const std::string& name, bool history = false, bool transition = false) {
    const Normalisation chosen = normalisation_of(name);
    if (chosen == Normalisation::softmax) return true;
    return history ? chosen == Normalisation::sigmoid && !transition
                   : chosen != Normalisation::sigmoid && weights_may_be_sparse();
  }

  // Parameters: these sizes for each head, or once for all heads.
  bool parameters(const Optional& x, Types types, Sizes wanted) const {
    if (!x) return true;
    const bool of_heads = lead == 2 && x->dim() == static_cast<int64_t>(wanted.size()) + 1;
    return placed(*x, types) && ends(*x, of_heads, wanted, false) && (!of_heads || x->size(0) == heads);
  }

 protected:
  bool placed(const Tensor& x, Types types) const {
    const ScalarType type = x.scalar_type();
    return (type == types.one || type == types.other) && x.device() == first.device();
  }

  bool begins(const Tensor& x, bool broadcasts) const {
    if (x.dim() < lead) return false;
    for (int64_t i = 0; i < lead; ++i)
      if (x.size(i) != (i ? heads : B) && !(broadcasts && x.size(i) == 1)) return false;
    return true;
  }

  static bool ends(const Tensor& x, int64_t from, Sizes wanted, bool broadcasts) {
    if (x.dim() != from + static_cast<int64_t>(wanted.size())) return false;
    for (const int64_t size : wanted) {
      const int64_t found = x.size(from++);
      if (found != size && !(broadcasts && found == 1)) return false;
    }
    return true;
  }
};

// Copies that outlive the pointers into them.
using KeepAlive = std::vector<Tensor>;

// Allocate a tensor if it is wanted, else one of size [0].
Tensor empty_if(bool wanted, const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  return empty(like.device(), wanted ? sizes : std::vector<int64_t>{0}, dtype);
}

// Allocate the gradient of rows and set its view if it is wanted.
Tensor gradient_of_rows(bool wanted, const Tensor& x, View& out) {
  if (!wanted) return empty_if(false, x, {}, x.scalar_type());
  const Tensor gradient = empty_rows(x, x.size(x.dim() - 1), x.scalar_type());
  out = view(gradient);
  return gradient;
}

Score score_of(const std::string& name) {
  for (int i = 0; i < kScores; ++i)
    if (name == kScoreNames[i]) return Score{i};
  throw std::runtime_error("score must be one that csrc/score.h lists, got " + name);
}

// Return whether kernels read a bias of the accumulation dtype next to half precision tensors;
// otherwise the launcher rounds it first.
bool bias_may_be_of_sums();

// The common arguments of attention and coverage_attention, as lists for ATTNFAST_ARGUMENTS.
#define ATTNFAST_KEYS(X)                  \
  X(Tensor, query, rows, dtype, {Tq, A})  \
  X(Tensor, key, rows, dtype, {Tk, A})    \
  X(Tensor, value, rows, dtype, {Tk, Dv}) \
  X(Optional, score_vector, parameters, dtype, {A})
#define ATTNFAST_TERMS(X)                                    \
  X(Optional, bias, terms, Types(dtype, sum_dtype), {Tq, W}) \
  X(Optional, mask, terms, ScalarType::Bool, {Tq, W})
#define ATTNFAST_LENGTHS(X) X(Optional, lengths, sizes, Types(ScalarType::Long, ScalarType::Int), {B})
#define ATTNFAST_SCORE(X) \
  X(double, scale, any)   \
  X(std::string, score, goes_with, given.score_vector)

// The sizes of query, key and value.
struct AttentionChecker : ArgumentChecker {
  int64_t Tq, Tk, A, Dv, W;

  template <class Arguments>
  explicit AttentionChecker(const Arguments& given) : ArgumentChecker(Arguments::kOperator, given.query) {
    const int64_t n = given.query.dim();
    check(n == 3 || n == 4, "query");
    check(given.key.dim() == n, "key");
    check(given.value.dim() == n, "value");
    Tq = given.query.size(n - 2);
    A = given.query.size(n - 1);
    Tk = W = given.key.size(n - 2);
    Dv = given.value.size(n - 1);
    if constexpr (requires { given.columns; })
      if (given.columns) W = given.columns;
  }

  // Return whether weight is given exactly if the score needs one.
  static bool goes_with(const std::string& score, const Optional& score_vector) {
    return score_vector.has_value() == (score_of(score) != Score::dot);
  }

  bool spans(const Optional& x) const {
    return !x || (placed(*x, ScalarType::Long) && begins(*x, true) && ends(*x, lead, {Tq, 2}, false));
  }

  // Check the result of `key_exponentials` in cpu/attention.cpp.
  bool exponentials(const Optional& x, const std::string& score) const {
    const int64_t width = (A + kPadding - 1) / kPadding * kPadding;
    return !x || (score_of(score) == Score::tanh && dtype != ScalarType::Double &&
                  sizes(x, ScalarType::Float, {B, heads, Tk, width}));
  }
};

// Checks keys without values, and perhaps without queries: the keys stand for both.
struct KeysChecker : AttentionChecker {
  template <class Arguments>
  explicit KeysChecker(const Arguments& given) : AttentionChecker(Rows<Arguments>(given)) {}

 private:
  template <class Arguments>
  struct Rows {
    static constexpr const char* kOperator = Arguments::kOperator;
    const Tensor &query, &key, &value;

    explicit Rows(const Arguments& given) : query(query_of(given)), key(given.key), value(given.key) {}
    static const Tensor& query_of(const Arguments& given) {
      if constexpr (requires { given.query; }) return given.query;
      else return given.key;
    }
  };
};

// Return lengths [B]; their values are checked if that needs no synchronization.
const int64_t* lengths_of(const Optional& lengths, const ArgumentChecker& fit, int64_t keys,
                          KeepAlive& keep) {
  if (!lengths) return nullptr;
  const bool wide = lengths->scalar_type() == ScalarType::Long;
  keep.push_back(packed(wide ? *lengths : torch::stable::to(*lengths, ScalarType::Long)));
  const auto* values = static_cast<const int64_t*>(data_or_sentinel(keep.back()));
  const auto possible = [&](int64_t length) { return length >= 0 && length <= keys; };
  fit.check(!lengths->is_cpu() || std::all_of(values, values + fit.B, possible), "lengths");
  return values;
}

// Return a view of a contiguous parameter, one for all heads or one for each head.
View view_of_parameters(const Tensor& x, bool of_heads, KeepAlive& keep) {
  keep.push_back(packed(x));
  View v;
  v.data = data_or_sentinel(keep.back());
  v.head = of_heads ? keep.back().stride(0) : 0;
  return v;
}

// Fill in the fields common to attention and coverage_attention.
template <class Arguments>
void fill_problem(const Arguments& given, const AttentionChecker& fit, Problem& a, KeepAlive& keep) {
  a.dtype = dtype_of(given.query);
  a.score = score_of(given.score);
  a.scale = given.scale;
  a.B = fit.B;
  a.H = fit.heads;
  a.Tq = fit.Tq;
  a.Tk = fit.Tk;
  a.A = fit.A;
  a.Dv = fit.Dv;
  a.W = fit.W;
  a.query = view_of_rows(given.query, keep);
  a.key = view_of_rows(given.key, keep);
  a.value = view_of_rows(given.value, keep);
  if (given.score_vector)
    a.score_vector = view_of_parameters(*given.score_vector, given.score_vector->dim() == 2, keep);
  a.lengths = lengths_of(given.lengths, fit, fit.Tk, keep);
  a.normalisation = normalisation_of(given.normalisation);
  if constexpr (requires { given.key_bounds; }) {
    a.compact = given.columns > 0;
    if (const Optional& bounds = given.key_bounds) {
      const bool side_by_side = bounds->stride(bounds->dim() - 1) == 1;
      keep.push_back(side_by_side ? *bounds : torch::stable::contiguous(*bounds));
      a.key_bounds = broadcast_view(keep.back());
    }
    if (given.key_exponentials) a.exponentials = view_of_rows(*given.key_exponentials, keep);
  }
  if constexpr (requires { given.bias; }) {
    if (const Optional& bias = given.bias) {
      a.bias_in_sums = bias->scalar_type() == fit.sum_dtype && bias_may_be_of_sums();
      const bool as_it_is = a.bias_in_sums || bias->scalar_type() == fit.dtype;
      keep.push_back(as_it_is ? *bias : torch::stable::to(*bias, fit.dtype));
      a.bias = broadcast_view(keep.back());
    }
    if (given.mask) a.mask = broadcast_view(*given.mask);
  }
}

// Sum, in double, the parts [B, H, ...] of a parameter's gradient over the given axes, and over the
// heads unless each has its own parameter.
Tensor sum_of_parts(const Tensor& parts, std::vector<int64_t> axes, bool of_heads, ScalarType dtype) {
  if (!of_heads) axes.insert(axes.begin() + 1, 1);
  return torch::stable::to(torch::stable::sum(parts, axes, false, ScalarType::Double), dtype);
}

}  // namespace
}  // namespace attnfast
