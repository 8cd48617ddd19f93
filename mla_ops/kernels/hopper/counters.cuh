// Atomic operations on counters in global memory, and what tells launches apart.
#pragma once

#include "ptx.cuh"

DEVICE u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// These return what was there, and publish what this thread, and all that it has met, stored before.
DEVICE u32 fetch_add(u32* counter, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

DEVICE u32 fetch_or(u32* counter, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

DEVICE u64 load_acquire(const u64* counter) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value;
}

DEVICE u64 fetch_add(u64* counter, u64 value) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(counter), "l"(value) : "memory");
  return before;
}

// Publishes nothing. What the thread has read before, and gone by, it has read before this.
DEVICE u64 fetch_add_relaxed(u64* counter, u64 value) {
  u64 before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(counter), "l"(value) : "memory");
  return before;
}

DEVICE u64 compare_and_swap(u64* word, u64 expected, u64 value) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(word), "l"(expected), "l"(value)
               : "memory");
  return before;
}

// These publish what this thread, and all that it has met, stored before, and do not wait for an answer.
DEVICE void publish_add(u64* counter, u64 value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
}

DEVICE void clear_bits(u64* word, u64 bits) {
  asm volatile("red.release.gpu.global.and.b64 [%0], %1;" ::"l"(word), "l"(~bits) : "memory");
}

// Orders what this thread has read and written, for the others of its CTA.
DEVICE void fence_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// The number that the hardware gave this launch, never 0. No launch that runs beside it has the same.
DEVICE u32 launch_number() {
  u64 number;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
  return static_cast<u32>(number) | 1u << 31;
}

// Ends the kernel with an error that the host sees.
DEVICE void fail() { asm volatile("trap;"); }
