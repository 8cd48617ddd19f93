// Types of numbers in memory, and the conversions between them: to nearest even, NaN to one NaN of each type.
#pragma once

#include "arithmetic.cuh"

enum Type { BF16, FP16, FP32 };

template <Type TYPE>
struct Memory {
  using Bits = u16;
};
template <>
struct Memory<FP32> {
  using Bits = u32;
};

constexpr u32 INFINITE = 0x7f800000u;  // bits of float32's infinity

// The bits of a number as float32, exactly.
template <Type TYPE>
DEVICE u32 widen(u32 bits) {
  if (TYPE == FP32) return bits;
  return TYPE == BF16 ? bits << 16 : __float_as_uint(float16_to_float(static_cast<u16>(bits)));
}

// The bits of a float32 as a number of `TYPE`.
template <Type TYPE>
DEVICE u32 narrow(u32 bits) {
  const bool is_nan = (bits & 0x7fffffffu) > INFINITE;
  if (TYPE == FP32) return is_nan ? 0x7fc00000u : bits;
  if (TYPE == BF16) return is_nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return is_nan ? 0x7e00u : float_to_float16(__uint_as_float(bits));
}

// A number that keeps its type keeps its bits, those of a NaN too.
template <Type FROM, Type TO>
DEVICE u32 convert(u32 bits) {
  return FROM == TO ? bits : narrow<TO>(widen<FROM>(bits));
}

// The bits of N numbers. They may begin at any multiple of a number's size.
template <Type TYPE, int N>
DEVICE void load_numbers(const typename Memory<TYPE>::Bits* from, u32 (&bits)[N]) {
  constexpr int SIZE = sizeof(typename Memory<TYPE>::Bits), BYTES = N * SIZE, UNIT = BYTES < 16 ? BYTES : 16;
  static_assert(BYTES % UNIT == 0 && (UNIT == 4 || UNIT == 8 || UNIT == 16), "whole words");
  if (reinterpret_cast<u64>(from) % UNIT != 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) bits[i] = from[i];
    return;
  }
  u32 words[BYTES / 4];
#pragma unroll
  for (int i = 0; i < BYTES / UNIT; ++i) {
    if (UNIT == 16) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    } else if (UNIT == 8) {
      const uint2 two = reinterpret_cast<const uint2*>(from)[i];
      words[2 * i] = two.x, words[2 * i + 1] = two.y;
    } else {
      words[i] = reinterpret_cast<const u32*>(from)[i];
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) bits[i] = SIZE == 4 ? words[i] : words[i / 2] >> i % 2 * 16 & 0xffffu;
}
