// CUDA C++ for a CPU's compiler, apart from the kernels' own PTX.
#pragma once

#include <algorithm>
#include <cstring>

using std::max, std::min;

#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Dim {
  int x, y, z;
};
static Dim blockIdx, gridDim, threadIdx;

static int2 make_int2(int x, int y) { return {x, y}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
To bits_of(From value) {
  To bits;
  static_assert(sizeof(To) == sizeof(From), "");
  std::memcpy(&bits, &value, sizeof(To));
  return bits;
}
static float __int_as_float(int bits) { return bits_of<float>(bits); }
static unsigned __float_as_uint(float value) { return bits_of<unsigned>(value); }
static float __uint_as_float(unsigned bits) { return bits_of<float>(bits); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned order) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> (order >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
static unsigned long long __cvta_generic_to_shared(const void*) { return 0; }
static void* __cvta_shared_to_generic(unsigned long long) { return nullptr; }

template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}
