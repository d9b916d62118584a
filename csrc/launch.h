// What every launcher does alike: tensors become an Attention, results are allocated.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention.h"

namespace attnfast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

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

// A tensor whose axes lie in memory as in `order`, past the dispatcher, which is a good part of a
// small call.
Tensor empty(torch::stable::Device device, const std::vector<int64_t>& sizes, ScalarType dtype,
             const std::vector<int64_t>& order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t elements = 1;
  for (size_t i = order.size(); i-- > 0; elements *= std::max<int64_t>(sizes[order[i]], 1))
    strides[order[i]] = elements;
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      sizes.size(), sizes.data(), strides.data(), to<int32_t>(from(dtype)),
      to<int32_t>(from(device.type())), device.index(), &handle));
  return Tensor(handle);
}

Tensor empty(torch::stable::Device device, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  return empty(device, sizes, dtype, order);
}

// Where the numbers of a tensor lie. PyTorch gives null for one without numbers; to a View null says
// that there is no tensor.
void* place_of(const Tensor& x) {
  alignas(64) static char nowhere[64];
  return x.numel() ? x.data_ptr() : nowhere;
}

// [B, (H,) rows, columns], or [B, (H,) rows] with `columns` false.
View view(const Tensor& x, bool columns = true) {
  const int64_t n = x.dim(), row = n - (columns ? 2 : 1);
  View v;
  v.data = place_of(x);
  v.batch = x.stride(0);
  v.head = row == 2 ? x.stride(1) : 0;
  v.row = x.stride(row);
  v.column = columns ? x.stride(n - 1) : 0;
  return v;
}

// The same, sizes of 1 broadcast.
View broadcast_view(const Tensor& x) {
  const int64_t n = x.dim();
  View v = view(x);
  if (x.size(0) == 1) v.batch = 0;
  if (x.size(1) == 1) v.head = 0;
  if (x.size(n - 2) == 1) v.row = 0;
  if (x.size(n - 1) == 1) v.column = 0;
  return v;
}

// Its numbers side by side; one that is so already is not sent through the dispatcher.
Tensor packed(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// The same with unit column stride; `keep` holds the copy if one is needed.
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

// Room for rows of another width, heads in the order in which those of x lie in memory, as
// attnfast.ops.operators.empty_rows says.
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

// Refuses arguments that do not fit an operator's first one, which has batch and heads in front of its
// last two sizes. What is wrong with an argument is for attnfast.ops.arguments to say; it refuses the
// same ones.
class Fit {
  using Sizes = std::initializer_list<int64_t>;
  const char* name_of_operator;
  const Tensor& query;

 public:
  Fit(const char* name_of_operator, const Tensor& query)
      : name_of_operator(name_of_operator), query(query) {}

  void check(bool fits, const char* name) const {
    if (!fits) throw std::runtime_error(std::string(name_of_operator) + ": " + name + " does not fit");
  }

  // Whether these are the sizes from `from` on; 1 may stand for any of what broadcasts.
  static bool ends(const Tensor& x, int64_t from, Sizes wanted, bool broadcasts = false) {
    if (x.dim() != from + static_cast<int64_t>(wanted.size())) return false;
    for (const int64_t size : wanted) {
      const int64_t own = x.size(from++);
      if (own != size && !(broadcasts && own == 1)) return false;
    }
    return true;
  }

  bool placed(const Tensor& x, ScalarType type) const {
    return x.scalar_type() == type && x.device() == query.device();
  }

  // Just these sizes.
  void sizes(const char* name, const Tensor& x, ScalarType type, Sizes wanted) const {
    check(placed(x, type) && ends(x, 0, wanted), name);
  }
  void sizes(const char* name, const Optional& x, ScalarType type, Sizes wanted) const {
    if (x) sizes(name, *x, type, wanted);
  }

  // Batch and heads, then these sizes.
  void rows(const char* name, const Tensor& x, ScalarType type, Sizes wanted,
            bool broadcasts = false) const {
    const int64_t lead = query.dim() - 2;
    bool fits = placed(x, type) && ends(x, lead, wanted, broadcasts);
    for (int64_t i = 0; fits && i < lead; ++i)
      fits = x.size(i) == query.size(i) || (broadcasts && x.size(i) == 1);
    check(fits, name);
  }
  void rows(const char* name, const Optional& x, ScalarType type, Sizes wanted,
            bool broadcasts = false) const {
    if (x) rows(name, *x, type, wanted, broadcasts);
  }

  // Parameters: for each head these sizes, or the same for all.
  void parameters(const char* name, const Optional& x, ScalarType type, Sizes wanted) const {
    if (!x) return;
    const bool own = query.dim() == 4 && x->dim() == static_cast<int64_t>(wanted.size()) + 1;
    check(placed(*x, type) && ends(*x, own, wanted) && (!own || x->size(0) == query.size(1)), name);
  }
};

Score score_of(const std::string& name) {
#define ATTNFAST_CASE(score) \
  if (name == #score) return Score::score;
  ATTNFAST_CASE(dot)
  ATTNFAST_CASE(tanh)
  ATTNFAST_ACTIVATIONS(ATTNFAST_CASE)
#undef ATTNFAST_CASE
  throw std::runtime_error("score must be one that csrc/score.h lists, got " + name);
}

// Whether kernels read a bias of the accumulation dtype beside half types; else it is rounded before.
bool bias_may_be_of_sums();

struct Call {
  Attention a{};
  std::vector<Tensor> keep;  // copies that outlive the pointers into them
  Fit fit;

  Call(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
       const Optional& weight, const Optional& bias, const Optional& mask, const Optional& lengths,
       const Optional& span, int64_t columns, double scale, const std::string& score)
      : fit(name, query) {
    const int64_t n = query.dim();
    const ScalarType dtype = query.scalar_type();
    fit.check(n == 3 || n == 4, "query");
    fit.check(key.dim() == n, "key");
    fit.check(value.dim() == n, "value");
    const int64_t Tq = query.size(n - 2), Tk = key.size(n - 2), A = query.size(n - 1);
    fit.rows("key", key, dtype, {Tk, A});
    fit.rows("value", value, dtype, {Tk, value.size(n - 1)});
    fit.parameters("weight", weight, dtype, {A});
    fit.check(columns >= 0 && columns <= (span ? Tk : 0), "columns");
    const int64_t W = columns ? columns : Tk;
    fit.rows("span", span, ScalarType::Long, {Tq, 2}, true);
    if (span) fit.check(span->size(n - 2) == Tq && span->size(n - 1) == 2, "span");
    a.bias_in_sums = bias && bias->scalar_type() == accumulation(query);
    fit.rows("bias", bias, a.bias_in_sums ? accumulation(query) : dtype, {Tq, W}, true);
    fit.rows("mask", mask, ScalarType::Bool, {Tq, W}, true);
    const bool wide = lengths && lengths->scalar_type() == ScalarType::Long;
    fit.sizes("lengths", lengths, wide ? ScalarType::Long : ScalarType::Int, {query.size(0)});
    a.dtype = dtype_of(query);
    a.B = query.size(0);
    a.H = n == 4 ? query.size(1) : 1;
    a.Tq = Tq;
    a.A = A;
    a.Tk = Tk;
    a.Dv = value.size(n - 1);
    a.scale = scale;
    a.score = score_of(score);
    fit.check(weight.has_value() == (a.score != Score::dot), "score");
    a.query = view_of_rows(query, keep);
    a.key = view_of_rows(key, keep);
    a.value = view_of_rows(value, keep);
    if (weight) {
      keep.push_back(packed(*weight));
      a.weight.data = place_of(keep.back());
      a.weight.head = weight->dim() == 2 ? a.A : 0;
    }
    if (lengths) {
      keep.push_back(packed(wide ? *lengths : torch::stable::to(*lengths, ScalarType::Long)));
      a.lengths = static_cast<const int64_t*>(place_of(keep.back()));
      const auto possible = [&](int64_t length) { return length >= 0 && length <= Tk; };
      fit.check(!query.is_cpu() || std::all_of(a.lengths, a.lengths + a.B, possible), "lengths");
    }
    a.compact = columns > 0;
    a.W = W;
    if (span) {
      keep.push_back(span->stride(n - 1) == 1 ? *span : torch::stable::contiguous(*span));
      a.span = broadcast_view(keep.back());
    }
    if (bias) {
      const bool as_it_is = bias->scalar_type() == dtype || bias_may_be_of_sums();
      keep.push_back(as_it_is ? *bias : torch::stable::to(*bias, dtype));
      a.bias = broadcast_view(keep.back());
    }
    if (mask) a.mask = broadcast_view(*mask);
  }
};

}  // namespace
}  // namespace attnfast
