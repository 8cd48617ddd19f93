// Loads and stores of global and shared memory, and where values are kept, as functions, one line of PTX each. ptx.cuh
// has barriers, clusters and asynchronous copies.
#pragma once

#include "arithmetic.cuh"

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- global memory --------------------------------------------------------------------------------------------------

// Policies of L2 for what a copy reads.
DEVICE u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE u64 evict_last() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Stores with a policy of L2.
DEVICE void store_8_by(u64 policy, void* target, u32 a, u32 b) {
  asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(target), "r"(a), "r"(b), "l"(policy)
               : "memory");
}

DEVICE void store_16_by(u64 policy, void* target, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(target), "r"(a), "r"(b), "r"(c),
               "r"(d), "l"(policy)
               : "memory");
}

DEVICE u64 evict_normal() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE void store_float_if(bool condition, float* target, float value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(target), "f"(value),
               "r"(static_cast<u32>(condition))
               : "memory");
}

DEVICE void store_8_if(bool condition, void* target, u32 a, u32 b) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(target), "r"(a),
               "r"(b), "r"(static_cast<u32>(condition))
               : "memory");
}

DEVICE void store_16_if(bool condition, void* target, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(target),
               "r"(a), "r"(b), "r"(c), "r"(d), "r"(static_cast<u32>(condition))
               : "memory");
}

// Loads past L1 what other SMs wrote.
DEVICE uint4 load_l2_16(const void* source) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

DEVICE uint2 load_l2_8(const void* source) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(source) : "memory");
  return v;
}

// Loads what is not read again soon, without a place in L1.
DEVICE float4 load_once_16(const float* source) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

DEVICE float load_float(const float* source) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(source) : "memory");
  return v;
}

// -inf where there is nothing to load.
DEVICE float load_float_if(bool there, const float* source) {
  float v = -INFINITY;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p ld.global.f32 %0, [%1];\n"
      "}"
      : "+f"(v)
      : "l"(source), "r"(static_cast<u32>(there))
      : "memory");
  return v;
}

// Leaves the value where there is nothing to load.
DEVICE void load_int_if(bool there, const int* source, int& value) {
  asm("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.nc.s32 %0, [%1];\n}"
      : "+r"(value)
      : "l"(source), "r"(static_cast<u32>(there)));
}

// Zeros where there is nothing to load. Loads and shuffles stay in the order in which they are written.
DEVICE float4 load_float4_if(bool there, const float* source) {
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
      : "l"(source), "r"(static_cast<u32>(there))
      : "memory");
  return v;
}

// 16 bytes that nobody reads soon.
DEVICE void store_streaming_16(void* destination, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- shared memory --------------------------------------------------------------------------------------------------

DEVICE uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Four matrices of 8 x 8 elements of 16 bits as an operand's fragment; each lane has the address of a row of 16 bytes.
DEVICE uint4 load_matrices(u32 address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

DEVICE uint2 load_shared_8(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

DEVICE u32 load_shared_4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

DEVICE void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE void store_shared_8(u32 address, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

DEVICE void store_shared_2(u32 address, u32 value) {
  asm volatile("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nst.shared.b16 [%0], a;\n}" ::"r"(address), "r"(value)
               : "memory");
}

DEVICE void store_shared_4(u32 address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE float load_shared_float(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

DEVICE float2 load_shared_float2(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

DEVICE void store_shared_float(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

DEVICE void store_shared_float2(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

// Four 8x8 tiles of 16-bit values; lane l names row l % 8 of tile l / 8.
DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The same, each tile written transposed; lane l names row l % 8 of tile l / 8.
DEVICE void store_matrices_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Two of them; lanes of the upper half name none.
DEVICE void store_matrices_transposed(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}

// Stores to this CTA's shared memory, without a branch.
DEVICE void store_entry_if(bool condition, u64* target, u64 entry) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.shared.u64 [%0], %1;\n}" ::"r"(shared_address(target)),
               "l"(entry), "r"(static_cast<u32>(condition))
               : "memory");
}

// ---- registers ------------------------------------------------------------------------------------------------------

DEVICE const unsigned char* shuffle_pointer(const unsigned char* pointer, int lane) {
  const u64 bits = reinterpret_cast<u64>(pointer);
  const u32 low = __shfl_sync(~0u, static_cast<u32>(bits), lane),
            high = __shfl_sync(~0u, static_cast<u32>(bits >> 32), lane);
  return reinterpret_cast<const unsigned char*>(static_cast<u64>(high) << 32 | low);
}

// The same value, which the compiler then keeps instead of reading a special register (30 cycles) wherever it is
// needed.
DEVICE int kept(int value) { return __shfl_sync(~0u, value, threadIdx.x & 31); }

// Tells the compiler that a warp's lanes have the same value: it takes a uniform register, and all lanes branch
// together.
DEVICE int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// `a` if the condition holds, else `b`, without a branch.
DEVICE float select(bool condition, float a, float b) {
  float value;
  asm("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nselp.f32 %0, %1, %2, p;\n}"
      : "=f"(value)
      : "f"(a), "f"(b), "r"(static_cast<u32>(condition)));
  return value;
}

// Keeps values in their registers up to here: wgmma reads and writes them while other instructions run.
template <int N>
DEVICE void hold(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int N>
DEVICE void hold(u32 (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

DEVICE void hold(int& value) { asm volatile("" : "+r"(value)); }
DEVICE void hold(i64& value) { asm volatile("" : "+l"(value)); }
DEVICE void hold(u64& value) { asm volatile("" : "+l"(value)); }
DEVICE void hold(float& value) { asm volatile("" : "+f"(value)); }
DEVICE void hold(u32& value) { asm volatile("" : "+r"(value)); }
template <class T>
DEVICE void hold(T*& value) {
  asm volatile("" : "+l"(value));
}

// This lane, read where this stands and not kept from before.
DEVICE int lane_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// This thread's number, read anew: else the compiler keeps what was read first until the last use of all.
DEVICE int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Ends this thread. What a return leads to, others may share, and ptxas takes them for parted there.
DEVICE void end_thread_if(bool condition) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p exit;\n}" ::"r"(static_cast<u32>(condition)) : "memory");
}

// The same value, of which the compiler knows nothing.
DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
