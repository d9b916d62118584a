// The kernels of csrc/cuda on the host, registered for CPU tensors: everything but the launchers in
// the .cu files is what runs on a GPU. What they are given to write is full of NaN.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <utility>

#include "cuda_runtime.h"

inline AOTITorchError empty_but_for_nan(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device, int32_t index,
                                        AtenTensorHandle* out) {
  void* data;
  int64_t bytes;
  AOTITorchError error = aoti_torch_empty_strided(dim, sizes, strides, dtype, device, index, out);
  if (!error) error = aoti_torch_get_data_ptr(*out, &data);
  if (!error) error = aoti_torch_get_storage_size(*out, &bytes);
  if (!error && bytes) memset(data, 0xff, bytes);
  return error;
}
#define aoti_torch_empty_strided empty_but_for_nan
// A product counts as a launch.
inline AOTITorchError counted_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle a,
                                        AtenTensorHandle b, double beta, double alpha) {
  ++launches;
  return aoti_torch_cpu_addmm_out(out, self, a, b, beta, alpha);
}
#define aoti_torch_cuda_addmm_out counted_addmm_out
inline AOTITorchError counted_baddbmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle a,
                                          AtenTensorHandle b, double beta, double alpha) {
  ++launches;
  return aoti_torch_cpu_baddbmm_out(out, self, a, b, beta, alpha);
}
#define aoti_torch_cuda_baddbmm_out counted_baddbmm_out

#define ATTNFAST_LIBRARY_FORWARD (1 << 16)
#include "../../csrc/cuda/attention_products.h"
#include "../../csrc/cuda/copying.cuh"
#include "../../csrc/cuda/coverage.cuh"
#include "../../csrc/cuda/recurrent_backward.h"
#include "../../csrc/cuda/recurrent_forward.h"
#include "../../csrc/launch_copying.h"
#include "../../csrc/launch_coverage.h"

namespace attnfast {
namespace {
bool bias_may_be_of_sums() { return false; }
bool weights_may_be_sparse() { return false; }
template <class Call>
void run_forward(const Call& a) {
  launch_forward(a, LaunchOnHost<kThreads>{});
}
template <class Call>
void run_backward(const Call& a) {
  launch_backward(a, LaunchOnHost<kThreads>{});
}
}  // namespace
namespace cuda {
void run_forward(const Forward& a, const View& added, const Tensor& like) {
  attnfast::run_forward(a, added, LaunchOnHost<kThreads>{}, like.device());
}
void run_backward(const Backward& a, const Tensor& like) {
  attnfast::run_backward(a, LaunchOnHost<kThreads>{}, like.device());
}
}  // namespace cuda
namespace {
void run_forward(const Forward& a, const Tensor& like) { cuda::run_forward(a, {}, like); }
void run_backward(const Backward& a, const Tensor& like) { cuda::run_backward(a, like); }
void run_scores(const Forward& a, const Tensor&) { launch_scores(a, LaunchOnHost<kThreads>{}); }
void run_forward(const CopyForward& a, const Tensor&) { run_forward(a); }
void run_backward(const CopyBackward& a, const Tensor&) { run_backward(a); }
void run_forward(const CoverageForward& a, const Tensor&) { run_forward(a); }
void run_backward(const CoverageBackward& a, const Tensor&) { run_backward(a); }
}  // namespace
namespace cuda {
void run_forward(const CoverageForward& a, const Tensor&) { attnfast::run_forward(a); }
void run_backward(const CoverageBackward& a, const Tensor&) { attnfast::run_backward(a); }
int64_t grad_score_vector_parts(const Problem& a) { return attnfast::grad_score_vector_parts(a); }
}  // namespace cuda
namespace {
RecurrentOutputs recurrent(const RecurrentArguments& given) {
  return run_recurrent(given, LaunchOnHost<kThreads>{});
}
RecurrentGradients recurrent_backward(const RecurrentBackwardArguments& given) {
  return run_recurrent_backward(given, LaunchOnHost<kThreads>{});
}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnfast_cuda, CPU, m) {
  AttentionOperators::implement(m);
  CopyOperators::implement(m);
  CoverageOperators::implement(m);
  Operators<recurrent, recurrent_backward>::implement(m);
}
}  // namespace attnfast

// For the tests: set the number of blocks of a cluster, of multiprocessors with a block's bytes of shared
// memory, and of blocks that run at once; return the number of launches since the previous call.
extern "C" void set_most_together(int blocks) { most_together = blocks; }
extern "C" void set_multiprocessors(int blocks, int bytes) {
  multiprocessors = blocks, shared_memory = bytes;
}
extern "C" void set_places(int blocks) { places = blocks; }
extern "C" int take_launches() { return std::exchange(launches, 0); }
// Record launches instead of running them, or stop that; return the blocks of the i-th, or 0.
extern "C" void set_only_recorded(bool x) { only_recorded = x, recorded.clear(); }
extern "C" int64_t recorded_blocks(size_t i) { return i < recorded.size() ? recorded[i] : 0; }
