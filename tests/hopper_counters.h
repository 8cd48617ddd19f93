// What `counters.cuh` has, for a CPU: `hopper_on_cpu.build` puts it in place of that.
#pragma once

#ifndef OTHERS_GO_ON
#define OTHERS_GO_ON()  // while this one looks
#endif

static thread_local u32 this_launch = 1;
static int failures;  // of CTAs, which go on here

static u32 load_acquire(const u32* counter) {
  OTHERS_GO_ON();
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}
static u32 fetch_add(u32* counter, u32 value) { return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL); }
static u32 fetch_or(u32* counter, u32 value) { return __atomic_fetch_or(counter, value, __ATOMIC_ACQ_REL); }
static u64 load_acquire(const u64* counter) {
  OTHERS_GO_ON();
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}
static u64 fetch_add(u64* counter, u64 value) { return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL); }
static u64 fetch_add_relaxed(u64* counter, u64 value) { return fetch_add(counter, value); }
static void publish_add(u64* counter, u64 value) { __atomic_fetch_add(counter, value, __ATOMIC_RELEASE); }
static u64 compare_and_swap(u64* word, u64 expected, u64 value) {
  u64 before = expected;
  const bool stored = __atomic_compare_exchange_n(word, &before, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  if (!stored || value == expected) OTHERS_GO_ON();
  return before;
}
static void clear_bits(u64* word, u64 bits) { __atomic_fetch_and(word, ~bits, __ATOMIC_RELEASE); }
static void fence_cta() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
static u32 launch_number() { return this_launch; }
static void fail() { __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED); }
