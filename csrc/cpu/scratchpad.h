// The scratch memory of a launcher's call.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

namespace attnfast {
namespace {

// Bytes of scratch that a thread caches between calls: fresh pages from the system cost up to a
// quarter of a call.
constexpr size_t kMostKept = size_t{1} << 27;

struct Release {
  void operator()(void* buffer) const { std::free(buffer); }
};
using Memory = std::unique_ptr<void, Release>;

// The scratch of a call. A thread caches it for its next call unless it is too large.
class Scratchpad {
  Memory own;
  char* next;

 public:
  explicit Scratchpad(size_t bytes) {
    static thread_local Memory kept;
    static thread_local size_t of_kept = 0;
    const bool keeps = bytes <= kMostKept;
    if (!keeps || bytes > of_kept) {
      Memory fresh(std::aligned_alloc(64, std::max<size_t>(whole(bytes), 64)));
      if (!fresh) throw std::bad_alloc();
      (keeps ? kept : own) = std::move(fresh);
      if (keeps) of_kept = bytes;
    }
    next = static_cast<char*>(keeps ? kept.get() : own.get());
  }
  static size_t whole(size_t bytes) { return (bytes + 63) / 64 * 64; }
  char* take(size_t bytes) {
    char* const place = next;
    next += whole(bytes);
    return place;
  }
};

}  // namespace
}  // namespace attnfast
