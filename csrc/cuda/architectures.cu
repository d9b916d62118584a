// The architectures of this build, for attnfast/ops/backends.py: the values of __CUDA_ARCH__,
// ascending, then 0.
extern "C" __attribute__((visibility("default"))) const int* attnfast_cuda_architectures() {
  static constexpr int architectures[] = {__CUDA_ARCH_LIST__, 0};
  return architectures;
}
