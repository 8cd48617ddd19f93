// Loads of what lies in global memory or in shared.
#pragma once

#include "ptx.cuh"

// The pointer of an address in shared memory, for what may lie there or in global memory.
DEVICE const unsigned char* shared_pointer(u32 address) {
  return static_cast<const unsigned char*>(__cvta_shared_to_generic(address));
}

// Loads past L1 what other SMs wrote, or from shared memory.
DEVICE uint4 load_either_16(const unsigned char* source) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}
