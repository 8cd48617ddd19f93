// The CTAs of a group, a thread each, that meet by the Hopper kernels' own code, compiled for a CPU.
// `test_hopper_groups.py` builds it, without what is written in PTX.

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "hopper_on_cpu.h"

extern "C" int patience;
int patience;
#define PATIENCE patience

// Declared for code that nobody calls here.
void __syncwarp();
bool __all_sync(unsigned, bool);
template <class T>
T __shfl_sync(unsigned, T, int);

#define load_acquire ptx_load_acquire
#define fetch_add ptx_fetch_add
#define fetch_or ptx_fetch_or
#include "ptx.cuh"
#undef load_acquire
#undef fetch_add
#undef fetch_or

static u32 load_acquire(const u32* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
static u32 fetch_add(u32* counter, u32 value) { return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL); }
static u32 fetch_or(u32* counter, u32 value) { return __atomic_fetch_or(counter, value, __ATOMIC_ACQ_REL); }

#include "meeting.cuh"

extern "C" int bytes_of_member() { return Packets<64, true>::COUNT * Packets<64, true>::BYTES + 64 * 8; }
extern "C" int bytes_of_counters() { return COUNTERS * sizeof(u32); }

// Rows one after the other through the same counters, whose CTAs come in any order, some very late. Returns how many
// shares were given up, -1 where one was not added up once, not everything was there, or counters were not left at 0.
extern "C" int meet(int splits, int rows, int seed) {
  alignas(64) u32 counters[COUNTERS] = {};
  const Meeting meeting = {nullptr, nullptr, counters, counters + 1, counters + 2};
  int given_up = 0;
  for (int number = 0; number < rows; ++number) {
    std::vector<int> parts(splits);  // no atomics: what is there is what the counters say
    std::vector<std::atomic<int>> added(splits);
    std::atomic<bool> whole = true;
    std::atomic<int> left = 0;
    std::vector<std::thread> ctas;
    for (int rank = 0; rank < splits; ++rank)
      ctas.emplace_back([&, rank] {
        std::minstd_rand random(seed + number * 64 + rank);
        for (int wait = random() % 4 ? random() % 8 : random() % 512; wait; --wait) std::this_thread::yield();
        Row row = {};
        row.rank = rank, row.splits = splits;
        parts[rank] = 1 + rank;
        const u32 shares = shares_of(meeting, row);
        if (!shares) ++left;
        for (int share = 0; share < splits; ++share)
          if (shares >> share & 1) {
            ++added[share];
            for (int part = 0; part < splits; ++part)
              if (parts[part] != 1 + part) whole = false;
          }
        leave_meeting(meeting, row), leave_meeting(meeting, row);  // two polling warps
      });
    for (std::thread& cta : ctas) cta.join();
    for (const std::atomic<int>& times : added)
      if (times != 1) return -1;
    if (!whole || std::any_of(counters, counters + COUNTERS, [](u32 count) { return count; })) return -1;
    given_up += left;
  }
  return given_up;
}

// The same for CTAs that share a row and come to their end at any time after they have left their part.
extern "C" int share(int count, int rows, int seed) {
  alignas(64) u32 counters[SHARERS_COUNTERS] = {};
  int lost_patience = 0;
  for (int number = 0; number < rows; ++number) {
    std::vector<int> parts(count);
    std::vector<std::atomic<int>> added(count);
    std::atomic<bool> whole = true;
    std::atomic<int> left = 0;
    std::vector<std::thread> ctas;
    for (int rank = 0; rank < count; ++rank)
      ctas.emplace_back([&, rank] {
        std::minstd_rand random(seed + number * 64 + rank);
        auto work = [&] {
          for (int wait = random() % 4 ? random() % 8 : random() % 512; wait; --wait) std::this_thread::yield();
        };
        work();
        parts[rank] = 1 + rank;
        fetch_add(counters, 1);
        if (rank % 3) work();
        const bool complete = await_sharers(counters, count);
        if (!complete) ++left;
        for (int share; complete && (share = take_share(counters)) < count;) {
          ++added[share];
          for (int part = 0; part < count; ++part)
            if (parts[part] != 1 + part) whole = false;
          if (rank % 2) work();
        }
        leave_sharers(counters, count);
      });
    for (std::thread& cta : ctas) cta.join();
    for (const std::atomic<int>& times : added)
      if (times != 1) return -1;
    if (!whole || std::any_of(counters, counters + SHARERS_COUNTERS, [](u32 n) { return n; })) return -1;
    lost_patience += left;
  }
  return lost_patience;
}
