// What every launcher does alike: tensors become an Attention, results are allocated.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
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

// [B, (H,) rows, columns], or [B, (H,) rows] with `columns` false.
View view(const Tensor& x, bool columns = true) {
  const int64_t n = x.dim(), row = n - (columns ? 2 : 1);
  View v;
  v.data = x.data_ptr();
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

// Whether the arguments fit together; attnfast.ops.arguments.check says in a sentence what does not.
bool fit(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& weight,
         const Optional& bias, const Optional& mask, const Optional& lengths, const Optional& span,
         int64_t columns) {
  const auto q = query.sizes(), k = key.sizes(), v = value.sizes();
  const size_t n = q.size();
  if ((n != 3 && n != 4) || k.size() != n || v.size() != n || k[n - 1] != q[n - 1]) return false;
  if (!std::equal(q.begin(), q.end() - 2, k.begin())) return false;
  if (!std::equal(k.begin(), k.end() - 1, v.begin())) return false;
  const auto placed = [&](const Tensor& x) { return x.device() == query.device(); };
  const auto alike = [&](const Tensor& x) {
    return x.scalar_type() == query.scalar_type() && placed(x);
  };
  if (!alike(key) || !alike(value)) return false;
  if (weight) {
    const auto w = weight->sizes();
    const bool shared = w.size() == 1, of_heads = w.size() == 2 && n == 4 && w[0] == q[1];
    if (!alike(*weight) || !(shared || of_heads) || w[w.size() - 1] != q[n - 1]) return false;
  }
  const auto broadcasts = [&](const Tensor& x) {
    const auto s = x.sizes();
    if (s.size() != n) return false;
    for (size_t i = 0; i < n; ++i)
      if (s[i] != 1 && s[i] != (i < n - 1 ? q[i] : columns ? columns : k[n - 2])) return false;
    return true;
  };
  if (bias && (!alike(*bias) || !broadcasts(*bias))) return false;
  if (mask && (mask->scalar_type() != ScalarType::Bool || !placed(*mask) || !broadcasts(*mask)))
    return false;
  if (columns < 0 || (columns && !span)) return false;
  if (span) {
    const auto s = span->sizes();
    if (s.size() != n || s[n - 2] != q[n - 2] || s[n - 1] != 2 || !placed(*span)) return false;
    if (span->scalar_type() != ScalarType::Long) return false;
    for (size_t i = 0; i < n - 2; ++i)
      if (s[i] != 1 && s[i] != q[i]) return false;
  }
  if (!lengths) return true;
  const ScalarType type = lengths->scalar_type();
  return (type == ScalarType::Long || type == ScalarType::Int) && placed(*lengths) &&
         lengths->dim() == 1 && lengths->size(0) == q[0];
}

struct Call {
  Attention a{};
  std::vector<Tensor> keep;  // copies that outlive the pointers into them

  Call(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& weight,
       const Optional& bias, const Optional& mask, const Optional& lengths, const Optional& span,
       int64_t columns, const Optional& exponentials, double scale) {
    if (!fit(query, key, value, weight, bias, mask, lengths, span, columns))
      throw std::runtime_error("attention's arguments do not fit together");
    const int64_t n = query.dim();
    a.dtype = dtype_of(query);
    a.B = query.size(0);
    a.H = n == 4 ? query.size(1) : 1;
    a.Tq = query.size(n - 2);
    a.A = query.size(n - 1);
    a.Tk = key.size(n - 2);
    a.Dv = value.size(n - 1);
    a.scale = scale;
    a.query = view_of_rows(query, keep);
    a.key = view_of_rows(key, keep);
    a.value = view_of_rows(value, keep);
    if (weight) {
      keep.push_back(packed(*weight));
      a.weight.data = keep.back().data_ptr();
      a.weight.head = weight->dim() == 2 ? a.A : 0;
    }
    if (lengths) {
      const bool wide = lengths->scalar_type() == ScalarType::Long;
      keep.push_back(packed(wide ? *lengths : torch::stable::to(*lengths, ScalarType::Long)));
      a.lengths = static_cast<const int64_t*>(keep.back().data_ptr());
      if (query.is_cpu() && std::any_of(a.lengths, a.lengths + a.B, [&](int64_t length) {
            return length < 0 || length > a.Tk;
          }))
        throw std::runtime_error("attention's lengths must be between 0 and the number of keys");
    }
    a.compact = columns > 0;
    a.W = a.compact ? columns : a.Tk;
    if (span) {
      keep.push_back(span->stride(n - 1) == 1 ? *span : torch::stable::contiguous(*span));
      a.span = broadcast_view(keep.back());
    }
    if (bias) a.bias = broadcast_view(*bias);
    if (mask) a.mask = broadcast_view(*mask);
    if (exponentials) a.exponentials = view(*exponentials);
  }
};

}  // namespace
}  // namespace attnfast
