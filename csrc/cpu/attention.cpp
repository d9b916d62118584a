// Registers attention for the CPU: unpacks tensors, picks the instruction set, shares out the work.
#include "attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace attnfast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

const AttentionKernels& kernels() {
  static const AttentionKernels& chosen = []() -> const AttentionKernels& {
    const char* forced = std::getenv("ATTNFAST_CPU_ISA");
    const std::string name = forced ? forced : "";
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (avx512 && (name == "avx512" || name.empty())) return avx512::attention;
    if (avx2 && (name == "avx2" || name.empty())) return avx2::attention;
#endif
    if (name == "portable" || name.empty()) return portable::attention;
    throw std::runtime_error("ATTNFAST_CPU_ISA must be portable, avx2 or avx512, one that this processor "
                             "has, got " + name);
  }();
  return chosen;
}

// Run every item of a pass; threads take the next one as they come free.
void run(const Pass& pass, const Attention& a, size_t scratch) {
  const int64_t items = pass.items(a);
  if (items == 0) return;
  const int64_t threads = std::min<int64_t>(items, torch::stable::get_num_threads());
  const Tensor memory = torch::stable::empty({threads * static_cast<int64_t>(scratch)},
                                             ScalarType::Byte);
  char* base = static_cast<char*>(memory.data_ptr());
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t item; (item = next++) < items;) pass.run(a, item, base + t * scratch);
  });
}

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

struct Call {
  Attention a;
  std::vector<Tensor> keep;  // copies that outlive the pointers into them

  Call(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& weight,
       const Optional& lengths, double scale) {
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
      keep.push_back(torch::stable::contiguous(*weight));
      a.weight.data = keep.back().data_ptr();
      a.weight.head = weight->dim() == 2 ? a.A : 0;
    }
    a.lengths = nullptr;
    if (lengths) {
      keep.push_back(torch::stable::contiguous(torch::stable::to(*lengths, ScalarType::Long)));
      a.lengths = static_cast<const int64_t*>(keep.back().data_ptr());
    }
    // Rows of one item: enough to repay the preparation of the keys, few enough that scores stay in
    // cache and that every thread gets several items.
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t share = a.B * a.H * a.Tq / (4 * threads);
    const int64_t cached = (int64_t{1} << 18) / std::max<int64_t>(a.Tk, 1);
    a.rows = std::clamp<int64_t>(std::min(share, cached), 4, 64);
    a.rows = std::min(a.rows, std::max<int64_t>(a.Tq, 1));
  }
};

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor query, const Tensor key,
                                             const Tensor value, const Optional weight,
                                             const Optional bias, const Optional mask,
                                             const Optional lengths, double scale,
                                             bool need_weights) {
  Call call(query, key, value, weight, lengths, scale);
  Attention& a = call.a;
  const ScalarType sums = accumulation(query);
  Tensor context = torch::stable::new_empty(query, shape(query, a.Dv));
  Tensor weights = need_weights ? torch::stable::new_empty(query, shape(query, a.Tk), sums)
                                : torch::stable::new_empty(query, {0}, sums);
  std::vector<int64_t> rows = shape(query, 0);
  rows.pop_back();
  Tensor log_sum_exp = torch::stable::new_empty(query, rows, sums);
  if (bias) a.bias = broadcast_view(*bias);
  if (mask) a.mask = broadcast_view(*mask);
  a.context = view(context);
  if (need_weights) a.weights = view(weights);
  a.log_sum_exp = view(log_sum_exp, false);
  run(kernels().forward, a, kernels().scratch(a));
  return {context, weights, log_sum_exp};
}

// grad_weight: the rows [B * H, A] added up over what shares a weight, in double.
template <class T>
void reduce_rows(const Attention& a, const T* rows, int64_t heads, T* out) {
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t c = 0; c < a.A; ++c) {
      double total = 0;
      for (int64_t i = h; i < a.B * a.H; i += heads) total += rows[i * a.A + c];
      out[h * a.A + c] = static_cast<T>(total);
    }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor grad_context, const Optional grad_weights, const Optional grad_log_sum_exp,
    const Tensor query, const Tensor key, const Tensor value, const Optional weight,
    const Optional lengths, const Tensor weights, double scale, bool need_grad_bias) {
  Call call(query, key, value, weight, lengths, scale);
  Attention& a = call.a;
  const ScalarType sums = accumulation(query);
  Tensor grad_query = torch::stable::new_empty(query, query.sizes());
  Tensor grad_key = torch::stable::new_empty(query, key.sizes());
  Tensor grad_value = torch::stable::new_empty(query, value.sizes());
  Tensor grad_score = torch::stable::new_empty(query, weights.sizes(), sums);
  Tensor grad_rows = torch::stable::new_empty(query, {weight ? a.B * a.H : 0, a.A}, sums);
  const Tensor saved = torch::stable::contiguous(weights);
  a.weights = view(saved);
  a.grad_context = view_of_rows(grad_context, call.keep);
  if (grad_weights) a.grad_weights = view_of_rows(*grad_weights, call.keep);
  if (grad_log_sum_exp) a.grad_log_sum_exp = view(*grad_log_sum_exp, false);
  a.grad_score = view(grad_score);
  a.grad_query = view(grad_query);
  a.grad_key = view(grad_key);
  a.grad_value = view(grad_value);
  a.grad_weight.data = grad_rows.data_ptr();
  a.grad_weight.batch = a.H * a.A;
  a.grad_weight.head = a.A;
  const size_t scratch = kernels().scratch(a);
  run(kernels().grad_score, a, scratch);
  run(kernels().grad_inputs, a, scratch);

  Tensor grad_weight = torch::stable::new_empty(query, {0});
  if (weight) {
    const int64_t heads = weight->dim() == 2 ? a.H : 1;
    grad_weight = torch::stable::new_empty(query, weight->sizes(), sums);
    if (sums == ScalarType::Double)
      reduce_rows(a, static_cast<const double*>(grad_rows.data_ptr()), heads,
                  static_cast<double*>(grad_weight.data_ptr()));
    else
      reduce_rows(a, static_cast<const float*>(grad_rows.data_ptr()), heads,
                  static_cast<float*>(grad_weight.data_ptr()));
    if (sums != query.scalar_type())
      grad_weight = torch::stable::to(grad_weight, query.scalar_type());
  }
  if (!need_grad_bias) grad_score = torch::stable::new_empty(query, {0}, sums);
  return {grad_query, grad_key, grad_value, grad_weight, grad_score};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace attnfast
