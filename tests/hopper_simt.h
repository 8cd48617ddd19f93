// Clusters of CTAs on one CPU thread: each CUDA thread is a coroutine, which goes on until it has to wait for others.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#define __shared__
#define __align__(n)
#define __launch_bounds__(...)
#define __global__
#define __grid_constant__

#include "hopper_coroutines.h"
#include "hopper_on_cpu.h"

namespace simt {

// Threads that wait for one another; each brings a value, and gets all of them.
struct Meeting {
  std::vector<uint64_t> brought, values;
  int arrived = 0;
  unsigned generation = 0;
};

struct Cta {
  std::vector<uint64_t> shared;
  Meeting all, named;
  std::vector<Meeting> warps;
};

struct Thread {
  Coroutine coroutine;
  std::unique_ptr<char[]> stack;
  int cta, index;
  bool done = false, waited = false;  // `waited`: for the launch in front
};

inline std::vector<Thread> threads;
inline std::vector<Cta> ctas;
inline Meeting cluster;
inline Thread* current;
inline std::function<void()> body;
inline int num_threads, num_ctas;
constexpr int STACK = 64 * 1024;

inline void leave() { ::leave(current->coroutine); }

inline const std::vector<uint64_t>& meet(Meeting& meeting, int index, int size, uint64_t value) {
  meeting.brought.resize(size);
  meeting.brought[index] = value;
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == size) {
    meeting.arrived = 0, meeting.values = meeting.brought, ++meeting.generation;
  } else {
    while (meeting.generation == generation) leave();
  }
  return meeting.values;
}

inline Cta& cta() { return ctas[current->cta]; }
inline const std::vector<uint64_t>& meet_warp(uint64_t value) {
  return meet(cta().warps[current->index / 32], current->index % 32, 32, value);
}
inline const std::vector<uint64_t>& meet_cta(uint64_t value = 0) {
  return meet(cta().all, current->index, num_threads, value);
}
inline void meet_cluster() { meet(cluster, current->cta * num_threads + current->index, num_ctas * num_threads, 0); }

// Threads that have left are not waited for.
inline void meet_cluster_but_those_that_left() {
  const unsigned generation = cluster.generation;
  ++cluster.arrived;
  while (cluster.generation == generation) {
    int there = 0;
    for (const Thread& thread : threads) there += !thread.done;
    if (cluster.arrived == there)
      cluster.arrived = 0, ++cluster.generation;
    else
      leave();
  }
}

inline void enter() {
  body();
  current->done = true;
  leave();
}

// A grid, one cluster after the other, whose threads go on in the order of a random seed.
inline void launch(int clusters, int cluster_size, int block, size_t shared_bytes, unsigned seed,
                   std::function<void()> kernel) {
  num_threads = block, num_ctas = cluster_size, body = kernel;
  gridDim.x = clusters * cluster_size;
  for (int number = 0; number < clusters; ++number) {
    cluster = Meeting(), ctas.clear(), ctas.resize(cluster_size), threads.clear(), threads.resize(cluster_size * block);
    for (Cta& one : ctas) {
      one.shared.resize(shared_bytes / 8 + 2), one.warps.resize(block / 32);
      for (uint64_t& word : one.shared) word = 0xa5a5a5a5a5a5a5a5ull * (seed + 1);
    }
    for (size_t i = 0; i < threads.size(); ++i) {
      Thread& thread = threads[i];
      thread.cta = i / block, thread.index = i % block, thread.stack.reset(new char[STACK]);
      thread.coroutine.set_up(enter, thread.stack.get(), STACK);
    }
    unsigned random = seed * 2654435761u + 1;
    for (size_t left = threads.size(); left;) {
      random = random * 1664525u + 1013904223u;
      const size_t first = random % threads.size();
      for (size_t i = 0; i < threads.size(); ++i) {
        Thread& thread = threads[(first + i) % threads.size()];
        if (thread.done) continue;
        current = &thread;
        threadIdx = {thread.index, 0, 0}, blockIdx = {number * cluster_size + thread.cta, 0, 0};
        resume(thread.coroutine);
        left -= thread.done;
      }
    }
  }
}

inline unsigned char* shared_memory() { return reinterpret_cast<unsigned char*>(cta().shared.data()); }

}  // namespace simt

static void __syncthreads() { simt::meet_cta(); }
static int __syncthreads_or(int value) {
  for (uint64_t one : simt::meet_cta(value != 0))
    if (one) return 1;
  return 0;
}
static void __syncwarp() { simt::meet_warp(0); }
template <class T>
uint64_t as_word(T value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <class T>
T of_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return of_word<T>(simt::meet_warp(as_word(value))[lane & 31]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = threadIdx.x % 32;
  const auto& all = simt::meet_warp(as_word(value));
  return lane >= step ? of_word<T>(all[lane - step]) : value;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = threadIdx.x % 32;
  return of_word<T>(simt::meet_warp(as_word(value))[lane ^ mask]);
}
static unsigned __ballot_sync(unsigned, bool value) {
  const auto& all = simt::meet_warp(value);
  unsigned mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(all[lane]) << lane;
  return mask;
}
static bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
static bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
static unsigned __reduce_add_sync(unsigned, unsigned value) {
  unsigned sum = 0;
  for (uint64_t one : simt::meet_warp(value)) sum += one;
  return sum;
}
static unsigned __reduce_min_sync(unsigned, unsigned value) {
  uint64_t least = ~0ull;
  for (uint64_t one : simt::meet_warp(value)) least = min(least, one);
  return least;
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
  uint64_t most = 0;
  for (uint64_t one : simt::meet_warp(value)) most = max(most, one);
  return most;
}
template <class T>
T atomicAdd(T* place, T value) {
  const T before = *place;
  *place += value;
  return before;
}
template <class T>
T atomicOr(T* place, T value) {
  const T before = *place;
  *place |= value;
  return before;
}
template <class T>
T atomicMin(T* place, T value) {
  const T before = *place;
  *place = min(before, value);
  return before;
}
template <class T>
T atomicMax(T* place, T value) {
  const T before = *place;
  *place = max(before, value);
  return before;
}
static int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
static int __clzll(unsigned long long value) { return value ? __builtin_clzll(value) : 64; }
static unsigned __reduce_or_sync(unsigned, unsigned value) {
  unsigned any = 0;
  for (uint64_t one : simt::meet_warp(value)) any |= static_cast<unsigned>(one);
  return any;
}
static int __ffs(unsigned value) { return __builtin_ffs(value); }
static int __popc(unsigned value) { return __builtin_popcount(value); }
