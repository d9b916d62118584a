// The architectures of this build, for attnfast/ops/backends.py: the values of __CUDA_ARCH__,
// ascending.
#define TEXT(...) #__VA_ARGS__
#define TEXT_OF(...) TEXT(__VA_ARGS__)

extern "C" __attribute__((visibility("default"))) const char* attnfast_cuda_architectures() {
  return TEXT_OF(__CUDA_ARCH_LIST__);
}
