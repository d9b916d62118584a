// Every kernel and nothing else, for the compiler's report.
#include "../../csrc/cuda/attention.cuh"
#include "../../csrc/cuda/copying.cuh"
#include "../../csrc/cuda/coverage.cuh"

namespace attnfast {
void all(const Attention& a, const Copying& c, const Coverage& h) {
  const auto launch = [](auto kernel, int64_t x, int64_t y, const auto&... args) {
    kernel<<<dim3(x, y), kThreads>>>(args...);
  };
  launch_forward(a, launch);
  launch_backward(a, launch);
  launch_forward(c, launch);
  launch_backward(c, launch);
  launch_forward(h, launch);
  launch_backward(h, launch);
}
}  // namespace attnfast
