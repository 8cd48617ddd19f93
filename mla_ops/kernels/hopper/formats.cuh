// Cache formats: where the parts of a row lie, and how they become float16.
#pragma once

#include "ptx.cuh"

enum Format { FP8_DS_MLA, FP8_DS_MLA_V4 };

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A row as the gather brings it: LATENT e4m3 with a scale for each GROUP of them, and 64 bfloat16, the RoPE part.
// In chunks of 64 dims it is CHUNKS long, the last one being RoPE.
template <Format FORMAT>
struct Rows;

// 512 e4m3, 4 float32 scales, 64 bfloat16.
template <>
struct Rows<FP8_DS_MLA> {
  static constexpr int BYTES = 656, ROPE_AT = 528, LATENT = 512, GROUP = 128, CHUNKS = 9;
  static constexpr bool ROPE_IS_VALUE = false;
  static constexpr float FACTOR = 1.f;  // keys as operands are this often as large
  static constexpr bool SCALES_APART = false;
  static constexpr int SCALES_AT = 512, SCALES_PITCH = BYTES;

  using Scales = uint4;

  static DEVICE Scales load_scales(u32 address) { return load_shared_16(address); }

  static DEVICE u32 pair(const Scales& scales, int chunk) {
    const float scale = __uint_as_float(word(scales, chunk / 2));
    return pack_float16(scale, scale);
  }

  static DEVICE u32 rope(u32 pair) { return pair; }

  static DEVICE float scale(const unsigned char* scales, int group) {
    return *reinterpret_cast<const float*>(scales + group * 4);
  }

  // Whether float16 does not hold the products of a scale: it holds those of [2^-13, 2^7).
  static DEVICE bool wide(const Scales (&scales)[2]) {
    u32 farthest = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) farthest = max(farthest, word(scales[e / 4], e % 4) - 0x39000000u);
    return farthest >= 0x0a000000u;
  }

  // Keys of a warp stand in the order of its lanes' loads: neighbouring groups of four lanes then read other banks.
  static DEVICE int raw_row(int g) { return (g >> 1) | ((g & 1) << 2); }
};

// 448 e4m3 and 64 bfloat16, all of them values too; in a plane of their own, 7 exponents and a byte that pads.
template <>
struct Rows<FP8_DS_MLA_V4> {
  static constexpr int BYTES = 576, ROPE_AT = 448, LATENT = 448, GROUP = 64, CHUNKS = 8;
  static constexpr bool ROPE_IS_VALUE = true;
  // Then float16 holds exactly what the writer's smallest scale, 2^-22, gives, and RoPE down to 2^-25.
  static constexpr float FACTOR = 256.f;
  static constexpr bool SCALES_APART = true;
  static constexpr int SCALES_AT = 0, SCALES_PITCH = 8;
  static constexpr u32 DEAD_SCALES = 0x77777777u;  // 2^-8

  using Scales = uint2;

  static DEVICE Scales load_scales(u32 address) { return load_shared_8(address); }

  static DEVICE u32 pair(const Scales& scales, int chunk) {
    // 2^(byte - 127) times FACTOR, twice: 0x400 (byte - 104) in each half
    const u32 twice = __byte_perm(chunk < 4 ? scales.x : scales.y, 0, 0x0404 | chunk % 4 * 0x1010);
    return (twice << 2) - 104 * 0x04000400u;
  }

  static DEVICE u32 rope(u32 pair) {
    const u32 larger = multiply_bfloat16(pair, 0x43804380u);
    return pack_float16(low_bfloat16(larger), high_bfloat16(larger));
  }

  static DEVICE float scale(const unsigned char* scales, int group) {
    const u32 byte = scales[group];
    return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
  }

  // Whether float16 does not hold the products of a scale: it holds those of 2^-22 to 2^-1, bytes 105 to 126.
  static DEVICE bool wide(const Scales (&scales)[2]) {
    u32 outside = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) outside |= outside_of(scales[r].x) | (outside_of(scales[r].y) & 0x00ffffffu);
    return (outside & 0x80808080u) != 0;
  }

  // The highest bit of each byte: whether it is not in 105 to 126.
  static DEVICE u32 outside_of(u32 bytes) {
    return bytes | ~((bytes | 0x80808080u) - 0x69696969u) | ((bytes & 0x7f7f7f7fu) + 0x01010101u);
  }

  static DEVICE int raw_row(int g) { return g; }  // a row is an odd number of half turns around the banks
};
