// A kernel's own machine code. Where other kernels ran in between no cache has it, and each line comes from memory when
// it is first executed. Asked for at the start of the kernel, it is in L2 by then. That pays for rows and groups of 64
// heads, and where rows may be shared evenly; others lose as much as they gain (docs/notes.md).
#pragma once

#include "ptx.cuh"

// How long the code of this file's kernel is, and where it begins. A file is compiled for one kernel. The host fills in
// the bytes, and makes the kernel what the address is of (kernels/cuda/compiler.py); without it there are none.
static __constant__ volatile u64 code_bytes = 0;
static __constant__ const volatile u64* volatile code_begin = &code_bytes;

constexpr u32 CODE_SLICES = 64;  // CTAs that ask for a slice each

// Asks for the code into L2, by one thread of a CTA: the first thing that a kernel does.
template <int THREAD>
DEVICE void prefetch_code() {
  if (threadIdx.x != THREAD) return;
  const bool is_address = !(reinterpret_cast<u64>(code_begin) >> 47);  // a prefetch of anything else is an error
  const u32 bytes = is_address ? code_bytes : 0, slice = (bytes + CODE_SLICES * 128 - 1) / (CODE_SLICES * 128) * 128;
  const char* begin = reinterpret_cast<const char*>(const_cast<const u64*>(code_begin));
  const u32 cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  for (u32 i = cta; i < CODE_SLICES && i * slice < bytes; i += gridDim.x * gridDim.y * gridDim.z)
    prefetch_bulk_to_l2(begin + i * slice, min(slice, bytes - i * slice));
}
