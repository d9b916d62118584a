// The keys that a row with a span may see, for CPU and CUDA. Internal to every translation unit
// that includes it (see cpu/vector.h).
#pragma once
#include "attention.h"

namespace attnfast {
namespace {

// The keys [from, to) of a row; column 0 of its scores is key `origin`.
struct Seen {
  int64_t from, to, origin;
};

// `bounds` are the two values of the row, n is the number of keys of its sequence.
ATTNFAST_DEVICE inline Seen seen_within(const Problem& a, const int64_t* bounds, int64_t n) {
  const int64_t start = bounds[0], from = start < 0 ? 0 : start;
  int64_t to = bounds[1] < n ? bounds[1] : n;
  if (start >= to) return {0, 0, 0};
  if (a.compact && start + a.W < to) to = start + a.W;
  if (from >= to) return {0, 0, 0};
  return {from, to, a.compact ? start : 0};
}

}  // namespace
}  // namespace attnfast
