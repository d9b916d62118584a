// A linear layer's products on the CPU, for one instruction set (see vector.h); the launcher is linear.cpp.
#include "linear.h"
#include "panels.h"

namespace attnfast {
namespace VARIANT {
namespace {

template <class C>
Panels<C> panels_of(const Product& a, const void* packed) {
  return {static_cast<C*>(const_cast<void*>(packed)), a.K, panels<C>(a.N)};
}

template <class C>
void pack_panel(const Product& a, int64_t panel, void* packed) {
  const int64_t first = panel * kPanel<C>, n = min(kPanel<C>, a.N - first);
  const C* const from = static_cast<const C*>(a.right) + first * a.right_column;
  C* const out = panels_of<C>(a, packed).at(panel).data;
  if (a.right_column == 1) pack(from, a.right_row, a.K, n, out);
  else pack_rows(from, a.right_column, n, a.K, out);
}

template <class C>
void multiply(const Product& a, int64_t first_row, int64_t first_panel, int64_t last_panel,
              const void* packed, void* scratch) {
  const bool sums = a.sums && first_panel == 0;
  const ProductRows<C> rows = {static_cast<const C*>(a.left) + first_row * a.left_row,
                               a.left_row,
                               a.left_column,
                               min(kProductRows, a.M - first_row),
                               a.K,
                               static_cast<C*>(a.out) + first_row * a.N,
                               a.N,
                               a.N,
                               static_cast<const C*>(a.bias),
                               sums ? static_cast<C*>(a.sums) + first_row : nullptr};
  multiply_rows(rows, panels_of<C>(a, packed), first_panel, last_panel, static_cast<C*>(scratch));
}

size_t size_of(const Product& a) { return a.dtype == Dtype::f64 ? sizeof(double) : sizeof(float); }
int64_t panels_of_right(const Product& a) {
  return a.dtype == Dtype::f64 ? panels<double>(a.N) : panels<float>(a.N);
}

}  // namespace

extern const LinearKernels linear = {
    .rows = kProductRows,
    .panels = panels_of_right,
    .packed = [](const Product& a) -> size_t { return panels_of_right(a) * a.K * 2 * kVectorBytes; },
    .scratch = [](const Product& a) -> size_t { return kProductRows * kProductDepth * size_of(a); },
    .pack =
        [](const Product& a, int64_t panel, void* packed) {
          (a.dtype == Dtype::f64 ? pack_panel<double> : pack_panel<float>)(a, panel, packed);
        },
    .multiply =
        [](const Product& a, int64_t first_row, int64_t first_panel, int64_t last_panel, const void* packed,
           void* scratch) {
          (a.dtype == Dtype::f64 ? multiply<double> : multiply<float>)(a, first_row, first_panel,
                                                                       last_panel, packed, scratch);
        },
};

}  // namespace VARIANT
}  // namespace attnfast
