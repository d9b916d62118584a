// A team of threads that work on one problem phase by phase, with one barrier per phase.
#pragma once
#include <sched.h>

#include "recurrent.h"
#include "vector.h"

namespace attnfast {
namespace VARIANT {
namespace {

using cpu::Team;

// A thread of a team. All members call the same phases in the same order. No member waits for a
// thread that has not started yet: the others do its work, and it skips the phases that are over.
class Member {
  Team& team;
  int64_t me;
  uint32_t phase = 0;
  uint64_t expected = 0;

  bool take(int64_t item) {
    uint32_t found = __atomic_load_n(&team.taken[item], __ATOMIC_RELAXED);
    return found < phase && __atomic_compare_exchange_n(&team.taken[item], &found, phase, false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }

  void wait() const {
    for (int64_t turns = 0; __atomic_load_n(&team.done, __ATOMIC_ACQUIRE) < expected; ++turns) {
#if defined(__AVX2__)
      _mm_pause();
#elif defined(__aarch64__)
      __asm__ volatile("yield");
#endif
      if (turns > 4000) sched_yield();
    }
  }

 public:
  Member(Team& team, int64_t me) : team(team), me(me) {}

  // Call run(item) once for every item; return when all are done. A member starts with its own
  // share, whose part of the weights is in its cache, and then helps the others.
  template <class Run>
  void share(int64_t items, const Run& run) {
    ++phase;
    const int64_t first = items * me / team.members;
    uint64_t mine = 0;
    for (int64_t i = 0; i < items; ++i) {
      const int64_t item = first + i < items ? first + i : first + i - items;
      if (!take(item)) continue;
      run(item);
      ++mine;
    }
    if (mine) __atomic_fetch_add(&team.done, mine, __ATOMIC_RELEASE);
    expected += items;
    wait();
  }
};

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
