// Runs a CPU kernel in an emulator for tests/test_aarch64.py: reads a call from stdin (int64 numbers and
// contiguous tensors) and writes the results to stdout.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../csrc/cpu/attention_kernel.cpp"
#include "../csrc/cpu/linear_kernel.cpp"

using namespace attnfast;
using namespace attnfast::portable;

namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};
std::vector<std::unique_ptr<void, Free>> allocations;

// Return aligned memory full of NaN.
void* allocate(size_t bytes) {
  const size_t size = (bytes + 64) / 64 * 64;
  allocations.emplace_back(std::aligned_alloc(64, size));
  return std::memset(allocations.back().get(), 0xff, size);
}

void* read_bytes(size_t bytes) {
  void* const p = allocate(bytes);
  if (std::fread(p, 1, bytes, stdin) != bytes) std::exit(2);
  return p;
}
int64_t read_number() { return *static_cast<int64_t*>(read_bytes(8)); }
void* read_optional(size_t bytes) { return read_number() ? read_bytes(bytes) : nullptr; }
void write_bytes(const void* p, size_t bytes) {
  if (std::fwrite(p, 1, bytes, stdout) != bytes) std::exit(3);
}

size_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }
size_t size_of_sums(Dtype dtype) { return dtype == Dtype::f64 ? 8 : 4; }

// Tensors [B, H, rows, columns] of one call of attention.
struct Tensors {
  const Problem& a;
  size_t element = size_of(a.dtype), sums = size_of_sums(a.dtype), sequences = a.B * a.H;

  View view(void* data, int64_t rows, int64_t columns) const {
    return {data, a.H * rows * columns, rows * columns, columns, 1};
  }
  View read(int64_t rows, int64_t columns, size_t size) const {
    return view(read_bytes(sequences * rows * columns * size), rows, columns);
  }
  View read_optional(int64_t rows, int64_t columns, size_t size) const {
    return view(::read_optional(sequences * rows * columns * size), rows, columns);
  }
  View allocate(int64_t rows, int64_t columns, size_t size) const {
    return view(::allocate(sequences * rows * columns * size), rows, columns);
  }
  void write(const View& x, int64_t rows, int64_t columns, size_t size) const {
    write_bytes(x.data, sequences * rows * columns * size);
  }
};

void read_inputs(Problem& a) {
  a.dtype = static_cast<Dtype>(read_number());
  a.score = static_cast<Score>(read_number());
  a.normalisation = static_cast<Normalisation>(read_number());
  a.scale = 1;
  for (int64_t* size : {&a.B, &a.H, &a.Tq, &a.Tk, &a.A, &a.Dv}) *size = read_number();
  a.W = a.Tk;
  const Tensors t{a};
  a.query = t.read(a.Tq, a.A, t.element);
  a.key = t.read(a.Tk, a.A, t.element);
  a.value = t.read(a.Tk, a.Dv, t.element);
  a.score_vector = {.data = read_optional(a.H * a.A * t.element), .head = a.A};
  a.lengths = static_cast<int64_t*>(read_optional(a.B * sizeof(int64_t)));
}

template <class Call, class... Calls>
void run(const Call& a, const Plan& plan, size_t scratch, const cpu::Pass<Calls>&... passes) {
  void* const place = allocate(scratch);
  const auto run_one = [&](const auto& pass) {
    for (int64_t item = 0; item < pass.items(a, plan); ++item) pass.run(a, plan, item, place);
  };
  (run_one(passes), ...);
}

Plan plan_of(const Problem& a, int64_t columns) {
  const auto at_least_one = [](int64_t n) { return n < 1 ? 1 : n; };
  return {.rows = at_least_one(min(a.Tq, int64_t{16})),
          .keys = at_least_one(a.Tk),
          .columns = at_least_one(columns)};
}

void attention_forward() {
  Forward a{};
  read_inputs(a);
  const Tensors t{a};
  a.bias = t.read_optional(a.Tq, a.Tk, t.element);
  a.mask = t.read_optional(a.Tq, a.Tk, 1);
  a.context = t.allocate(a.Tq, a.Dv, t.element);
  a.weights = t.allocate(a.Tq, a.Tk, t.sums);
  a.log_sum_exp = t.allocate(a.Tq, 1, t.sums);
  Plan plan = plan_of(a, a.Dv);
  plan.scores = a.weights;
  const AttentionKernels& k = portable::attention;
  run(a, plan, k.forward_scratch(a, plan), k.scores, k.softmax, k.context);
  t.write(a.context, a.Tq, a.Dv, t.element);
  t.write(a.weights, a.Tq, a.Tk, t.sums);
  t.write(a.log_sum_exp, a.Tq, 1, t.sums);
}

void attention_backward() {
  Backward a{};
  read_inputs(a);
  const Tensors t{a};
  a.weights = t.read(a.Tq, a.Tk, t.sums);
  a.grad_context = t.read(a.Tq, a.Dv, t.element);
  a.grad_weights = t.read(a.Tq, a.Tk, t.sums);
  a.grad_log_sum_exp = t.read(a.Tq, 1, t.sums);
  a.grad_score = t.allocate(a.Tq, a.Tk, t.sums);
  a.grad_score_returned = true;
  a.grad_query = t.allocate(a.Tq, a.A, t.element);
  a.grad_key = t.allocate(a.Tk, a.A, t.element);
  a.grad_value = t.allocate(a.Tk, a.Dv, t.element);
  if (a.score_vector.data) a.grad_score_vector = t.allocate(1, a.A, t.sums);
  const Plan plan = plan_of(a, 2 * kPadding);
  const AttentionKernels& k = portable::attention;
  run(a, plan, k.backward_scratch(a, plan), k.grad_weights, k.grad_score, k.grad_inputs);
  t.write(a.grad_query, a.Tq, a.A, t.element);
  t.write(a.grad_key, a.Tk, a.A, t.element);
  t.write(a.grad_value, a.Tk, a.Dv, t.element);
  t.write(a.grad_score, a.Tq, a.Tk, t.sums);
  if (a.score_vector.data) t.write(a.grad_score_vector, 1, a.A, t.sums);
}

// The factors are in memory order: left [M, K] or [K, M], right [K, N] or [N, K].
void product() {
  Product a{};
  a.dtype = static_cast<Dtype>(read_number());
  for (int64_t* size : {&a.M, &a.N, &a.K}) *size = read_number();
  const size_t size = size_of(a.dtype);
  const bool left_transposed = read_number(), right_transposed = read_number();
  a.left = read_bytes(a.M * a.K * size);
  a.left_row = left_transposed ? 1 : a.K;
  a.left_column = left_transposed ? a.M : 1;
  a.right = read_bytes(a.K * a.N * size);
  a.right_row = right_transposed ? 1 : a.N;
  a.right_column = right_transposed ? a.K : 1;
  a.bias = read_bytes(a.N * size);
  a.out = allocate(a.M * a.N * size);
  if (left_transposed) a.sums = allocate(a.M * size);  // as in the gradient of a layer's weight and bias
  const LinearKernels& k = portable::linear;
  char* const packed = static_cast<char*>(allocate(k.packed(a)));
  void* const scratch = allocate(k.scratch(a));
  const int64_t panels = k.panels(a);
  for (int64_t panel = 0; panel < panels; ++panel) k.pack(a, panel, packed);
  for (int64_t block = 0; block * k.rows < a.M; ++block)
    k.multiply(a, block * k.rows, 0, panels, packed, scratch);
  write_bytes(a.out, a.M * a.N * size);
  if (left_transposed) write_bytes(a.sums, a.M * size);
}

// A float32 product with 8-bit factors, of the columns of one panel: left [M, K], right [N, K].
void product_of_bytes() {
  const int64_t M = read_number(), N = read_number(), K = read_number();
  const float* const left = static_cast<float*>(read_bytes(M * K * sizeof(float)));
  const float* const right = static_cast<float*>(read_bytes(N * K * sizeof(float)));
  float* const panel = static_cast<float*>(allocate((quads(K) + 2) * kBytePanel * sizeof(float)));
  pack_bytes(right, K, N, K, panel);
  char* place = static_cast<char*>(allocate(size_of_bytes(M, K)));
  const ByteRows rows = take_bytes(place, M, K);
  for (int64_t m = 0; m < M; ++m) round_row(left + m * K, K, rows, m);
  float* const out = static_cast<float*>(allocate(M * kBytePanel * sizeof(float)));
  std::memset(out, 0, M * kBytePanel * sizeof(float));
  multiply_bytes(rows, 0, M, K, panel, out);
  for (int64_t m = 0; m < M; ++m) write_bytes(out + m * kBytePanel, N * sizeof(float));
}

}  // namespace

int main() {
  switch (read_number()) {
    case 0: attention_forward(); break;
    case 1: attention_backward(); break;
    case 2: product(); break;
    case 3: product_of_bytes(); break;
    default: return 1;
  }
  return 0;
}
