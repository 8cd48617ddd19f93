// The CTAs of a group, a thread each, that meet by the Hopper kernels' own code, compiled for a CPU.
// `test_hopper_groups.py` builds it, without what is written in PTX.

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "hopper_on_cpu.h"

#define OTHERS_GO_ON std::this_thread::yield

extern "C" int patience;
int patience;
#define PATIENCE patience

// Declared for code that nobody calls here.
void __syncwarp();
bool __all_sync(unsigned, bool);
template <class T>
T __shfl_sync(unsigned, T, int);

#include "ptx.cuh"

#include "meeting.cuh"

extern "C" int bytes_of_member() { return Packets<64, true>::COUNT * Packets<64, true>::BYTES + 64 * 8; }
extern "C" int bytes_of_counters() { return sizeof(RowCounters); }

static bool all_zero(const RowCounters& counters) {
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(&counters);
  return std::all_of(bytes, bytes + sizeof(counters), [](unsigned char byte) { return !byte; });
}

// Runs `ctas` of each of `launches` at the same time, a thread each, and waits for them all.
template <class Cta>
static void run(int launches, int ctas, const Cta& cta) {
  std::vector<std::thread> threads;
  for (int launch = 0; launch < launches; ++launch)
    for (int rank = 0; rank < ctas; ++rank)
      threads.emplace_back([&cta, launch, rank] {
        this_launch = 1u << 31 | launch * 7 + 3;
        cta(launch, rank);
      });
  for (std::thread& thread : threads) thread.join();
}

// Rows one after the other through the same counters, each of so many launches at the same time, whose CTAs come in any
// order, some very late. Returns how many shares were given up, -1 where a launch did not add one up once, not
// everything was there, or counters were not left at 0.
extern "C" int meet(int splits, int rows, int seed, int launches) {
  RowCounters counters = {};
  int given_up = 0;
  for (int number = 0; number < rows; ++number) {
    std::vector<int> parts(launches * splits);  // no atomics: what is there is what the counters say
    std::vector<std::atomic<int>> added(launches * splits);
    std::atomic<bool> whole = true;
    std::atomic<int> left = 0;
    run(launches, splits, [&](int launch, int rank) {
      std::minstd_rand random(seed + (number * launches + launch) * 64 + rank);
      for (int wait = random() % 4 ? random() % 8 : random() % 512; wait; --wait) std::this_thread::yield();
      Row row = {};
      row.rank = rank, row.splits = splits;
      parts[launch * splits + rank] = 1 + rank;
      u32* const set = counters.sets[own_set(&counters.owners)];
      if (counters.sets[own_set(&counters.owners)] != set) whole = false;
      const u32 shares = shares_of(set, row);
      if (!shares) ++left;
      for (int share = 0; share < splits; ++share)
        if (shares >> share & 1) {
          ++added[launch * splits + share];
          for (int part = 0; part < splits; ++part)
            if (parts[launch * splits + part] != 1 + part) whole = false;
        }
      leave_row(&counters, set, 2 * splits), leave_row(&counters, set, 2 * splits);  // two polling warps
    });
    for (const std::atomic<int>& times : added)
      if (times != 1) return -1;
    if (!whole || !all_zero(counters)) return -1;
    given_up += left;
  }
  return given_up;
}

// The same for CTAs that share a row and come to their end at any time after they have left their part. Several launches
// at a time see that they are: -2 where one is wrong and none failed.
extern "C" int share(int count, int rows, int seed, int launches) {
  const int shares = count - 1;  // the last one has none
  int lost_patience = 0;
  for (int number = 0; number < rows; ++number) {
    std::vector<SharersCounters> own(count);
    SharersCounters& counters = own[0];
    std::vector<int> parts(launches * count);
    std::vector<std::atomic<int>> added(launches * shares);
    std::atomic<bool> whole = true;
    std::atomic<int> left = 0;
    failures = 0;
    run(launches, count, [&](int launch, int rank) {
      std::minstd_rand random(seed + (number * launches + launch) * 64 + rank);
      auto work = [&] {
        for (int wait = random() % 4 ? random() % 8 : random() % 512; wait; --wait) std::this_thread::yield();
      };
      auto add_up = [&](int share) {
        ++added[launch * shares + share];
        for (int part = 0; part < count; ++part)
          if (parts[launch * count + part] != 1 + part) whole = false;
        if (rank % 2) work();
      };
      work();
      parts[launch * count + rank] = 1 + rank;
      if (count == 2 && rank == 0)  // adds up both where the other's part is there
        for (int looks = random() % 64; looks; --looks)
          if (other_is_here(&counters)) {
            add_up(0), work();
            fetch_add(&counters.here, ones(1)), leave_sharers(&counters, count, 1);
            return;
          }
      publish_add(&counters.here, ones(1));
      if (rank % 3) work();
      const int given_up = await_sharers(&counters, count, &own[rank], rank);
      if (given_up == NOT_ALL_HERE && rank < shares) ++left;
      if (given_up >= 0 && rank < shares) add_up(rank);
      for (int share = 0; given_up > 0 && share < shares; ++share)
        if (share != rank && load_acquire(&own[share].given_up) & bit_of_share(share)) add_up(share);
      leave_sharers(&counters, count, 1);
    });
    const bool all = std::all_of(added.begin(), added.end(), [](const std::atomic<int>& times) { return times > 0; });
    if (failures) {
      if (launches == 1) return -3;
      continue;
    }
    if (!whole || !all) return launches > 1 ? -2 : -1;
    for (const SharersCounters& counters : own)
      if (counters.here || counters.gone || counters.given_up) return -1;
    lost_patience += left;
  }
  return lost_patience;
}
