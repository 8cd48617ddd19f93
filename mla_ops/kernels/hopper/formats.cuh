// Cache formats: where the parts of a row lie, and how they become float16.
#pragma once

#include "ptx.cuh"
#include "rows.cuh"

enum Format { FP8_DS_MLA, FP8_DS_MLA_V4 };

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// 2^exponent as bfloat16.
DEVICE u32 power_of_two(int exponent) { return static_cast<u32>(127 + exponent) << 7; }

// A key's scales may be divided by a power of two of its own before float16 has to hold them: its scores are multiplied
// by it again in float32, and its weights before they become float16. Exponents are held to where float32 holds a sum of
// weights that are divided by such powers, in any mixture.
constexpr int LEAST_TAKEN = -60, MOST_TAKEN = 40;

// A row as the gather brings it: LATENT e4m3 with a scale for each GROUP of them, and 64 bfloat16, the RoPE part.
// It has CHUNKS chunks of 64 dims, the last one being RoPE. Operands are FACTOR times as large as keys.
// `outside(scales)` says of a lane's two keys whether one may have to have an exponent taken out, which `take_out` does:
// it leaves 2^-exponent in `undo`, bfloat16, 1 for none, and returns whether float16 does not hold a key's scales. LOWERS:
// or that it does once `raise_small` has multiplied some by powers of two, by which e4m3 of their groups have to be
// divided; that one returns the exponents, four bits for each group.
constexpr u32 IS_WIDE = 1, HAS_SMALL = 2;

template <Format FORMAT>
struct Rows;

// 512 e4m3, 4 float32 scales, 64 bfloat16.
template <>
struct Rows<FP8_DS_MLA> : RowOfFp8DsMla {
  static constexpr int CHUNKS = 9;
  static constexpr bool ROPE_IS_VALUE = false;
  // Scales of [2^-13, 2^-1), where those of unit normals and the smallest of most writers are, become the upper part of
  // float16's range, next to the place of the others. So a key's weight counts as much as another's.
  static constexpr float FACTOR = 256.f;
  static constexpr u32 FACTOR_OF_ROPE = 8 << 7;  // the exponents of queries get it; keys' RoPE stays as it is
  static constexpr u32 DEAD_SCALE = 0x3c000000u;  // 2^-7
  static constexpr int SCALES_AT = LATENT, SCALES_PITCH = BYTES;

  using Scales = uint4;

  static DEVICE Scales load_scales(u32 address) { return load_shared_16(address); }

  static DEVICE u32 pair(const Scales& scales, int chunk) {
    const float scale = __uint_as_float(word(scales, chunk / 2) + (8 << 23));  // times FACTOR; 0 becomes 2^-119
    return pack_float16(scale, scale);
  }

  static DEVICE u32 rope(u32 pair, u32) { return pair; }

  static DEVICE float scale(u32 scales, int group) { return load_shared_float(scales + group * 4); }

  static constexpr u32 LEAST = 0x35000000u, LEAST_LARGEST = 0x39000000u, TOP = 0x3f000000u;  // 2^-21, 2^-13, 2^-1
  // Least scales of groups as they are, and of those whose e4m3 are divided by the rest: 2^-22 and 2^-27.
  static constexpr u32 LEAST_NORMAL = 0x34800000u, LEAST_LOWERED = 0x32000000u;

  static DEVICE bool outside(const Scales (&scales)[2]) {
    u32 largest = 0, least = ~0u;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const u32 scale = word(scales[e / 4], e % 4);
      largest = max(largest, scale), least = min(least, scale);
    }
    return largest >= TOP || least < LEAST_LARGEST;
  }

  // Scales are held that are 0 or in [2^-21, 2^-1). Where they are not, or the largest is below 2^-13, it comes to
  // [2^-2, 2^-1). LOWERS: then those from 2^-27 on are held. No exponent is taken from scales that are denormal,
  // infinite, NaN or negative.
  template <bool LOWERS>
  static DEVICE auto take_out(Scales& scales, u32& undo) {
    u32 largest = 0, least = ~0u;  // negative, infinite and NaN bits are too large; 0 is not the least
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = max(largest, word(scales, i)), least = min(least, word(scales, i) - 1);
    least += 1;
    int taken = min(max(static_cast<int>(largest >> 23) - 125, LEAST_TAKEN), MOST_TAKEN);
    if (largest - LEAST_LARGEST < TOP - LEAST_LARGEST && least >= LEAST) taken = 0;
    const u32 shift = static_cast<u32>(taken) << 23;
    auto divided = [&](u32 scale) { return scale == 0 ? 0 : scale - shift; };
    scales = make_uint4(divided(scales.x), divided(scales.y), divided(scales.z), divided(scales.w));
    undo = power_of_two(-taken);
    if constexpr (LOWERS) {
      const int smallest = largest == 0 ? LEAST : least - shift;
      if (largest - shift >= TOP || smallest < static_cast<int>(LEAST_LOWERED)) return IS_WIDE;
      return smallest < static_cast<int>(LEAST_NORMAL) ? HAS_SMALL : 0;
    } else {
      return largest - shift >= TOP || largest != 0 && static_cast<int>(least - shift) < static_cast<int>(LEAST);
    }
  }

  static DEVICE u32 raise_small(Scales& scales) {
    u32 exponents = 0;
    auto raised = [&](u32 scale, int group) {
      const int binades = max(static_cast<int>(LEAST_NORMAL >> 23) - static_cast<int>(scale >> 23), 0);
      if (scale == 0) return scale;
      exponents |= static_cast<u32>(binades) << 4 * group;
      return scale + (static_cast<u32>(binades) << 23);
    };
    scales = make_uint4(raised(scales.x, 0), raised(scales.y, 1), raised(scales.z, 2), raised(scales.w, 3));
    return exponents;
  }

  // Keys of a warp stand in the order of its lanes' loads: neighbouring groups of four lanes then read other banks.
  static DEVICE int raw_row(int g) { return (g >> 1) | ((g & 1) << 2); }
};

// 448 e4m3 and 64 bfloat16, all of them values too; in a plane of their own, 7 exponents and a byte that pads.
template <>
struct Rows<FP8_DS_MLA_V4> : RowOfFp8DsMlaV4 {
  static constexpr int CHUNKS = 8;
  static constexpr bool ROPE_IS_VALUE = true;
  // Then float16 holds exactly what the writer's smallest scale, 2^-22, gives, and RoPE down to 2^-25.
  static constexpr float FACTOR = 256.f;
  static constexpr u32 FACTOR_OF_ROPE = 0;  // RoPE is a value here
  static constexpr int SCALES_AT = 0, SCALES_PITCH = SCALE_BYTES;
  static constexpr u32 DEAD_SCALES = 0x77777777u;  // 2^-8

  using Scales = uint2;

  static DEVICE Scales load_scales(u32 address) { return load_shared_8(address); }

  static DEVICE u32 pair(const Scales& scales, int chunk) {
    // 2^(byte - 127) times FACTOR, twice: 0x400 (byte - 104) in each half
    const u32 twice = __byte_perm(chunk < 4 ? scales.x : scales.y, 0, 0x0404 | chunk % 4 * 0x1010);
    return (twice << 2) - 104 * 0x04000400u;
  }

  static DEVICE u32 rope(u32 pair, u32 undo) {
    const u32 larger = multiply_bfloat16(pair, undo + (8 << 7) * 0x10001u);
    return pack_float16(low_bfloat16(larger), high_bfloat16(larger));
  }

  static DEVICE float scale(u32 scales, int group) {
    const u32 byte = load_shared_4(scales + (group & 4)) >> group % 4 * 8 & 255;
    return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
  }

  // Scales are held from 2^-22, byte 105, on. Where they are not, or the largest is not of bytes 110 to 122, it comes to
  // byte 120: RoPE, a part of the same vector, then has room as in keys of unit normals.
  static constexpr int LEAST = 105, LEAST_LARGEST = 110, MOST_LARGEST = 122, TAKEN_TO = 120;
  // Keys that this does not hold have their largest scale at byte 125, where float16 still holds RoPE of 1,024 times as
  // much. Groups of less than LEAST, down to byte 100, have their e4m3 divided by the rest.
  static constexpr int TAKEN_TO_MOST = 125, LEAST_LOWERED = 100;

  static DEVICE bool outside(const Scales (&scales)[2]) {
    u32 outside = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) outside |= outside_of(scales[r].x) | (outside_of(scales[r].y) & 0x00ffffffu);
    return (outside & 0x80808080u) != 0;
  }

  // The highest bit of each byte: whether it is not in LEAST_LARGEST to MOST_LARGEST.
  static DEVICE u32 outside_of(u32 bytes) {
    return bytes | ~((bytes | 0x80808080u) - LEAST_LARGEST * 0x01010101u) |
           ((bytes & 0x7f7f7f7fu) + (127 - MOST_LARGEST) * 0x01010101u);
  }

  template <bool LOWERS>
  static DEVICE auto take_out(Scales& scales, u32& undo) {
    int least = 255, largest = 0;
#pragma unroll
    for (int group = 0; group < 7; ++group) {
      const int byte = (group < 4 ? scales.x : scales.y) >> group % 4 * 8 & 255;
      least = min(least, byte), largest = max(largest, byte);
    }
    int taken = min(max(largest - TAKEN_TO, LEAST_TAKEN), MOST_TAKEN);
    if (least >= LEAST && largest >= LEAST_LARGEST && largest <= MOST_LARGEST) taken = 0;
    if constexpr (LOWERS) {
      const bool lowers = least - taken < LEAST;
      if (lowers) taken = min(max(largest - TAKEN_TO_MOST, LEAST_TAKEN), MOST_TAKEN);
      undo = power_of_two(-taken);
      if (least == 0 || least - taken < LEAST_LOWERED || largest - taken > (lowers ? TAKEN_TO_MOST : MOST_LARGEST))
        return IS_WIDE;
      scales.x -= static_cast<u32>(taken) * 0x01010101u, scales.y -= static_cast<u32>(taken) * 0x00010101u;
      return least - taken < LEAST ? HAS_SMALL : 0;
    } else {
      undo = power_of_two(-taken);
      if (least == 0 || largest == 255 || least - taken < LEAST || largest - taken > MOST_LARGEST) return true;
      scales.x -= static_cast<u32>(taken) * 0x01010101u, scales.y -= static_cast<u32>(taken) * 0x00010101u;
      return false;
    }
  }

  static DEVICE u32 raise_small(Scales& scales) {
    u32 exponents = 0, more[2] = {0, 0};
#pragma unroll
    for (int group = 0; group < 7; ++group) {
      const int byte = (group < 4 ? scales.x : scales.y) >> group % 4 * 8 & 255;
      const u32 binades = max(LEAST - byte, 0);
      exponents |= binades << 4 * group, more[group / 4] |= binades << group % 4 * 8;
    }
    scales.x += more[0], scales.y += more[1];
    return exponents;
  }

  static DEVICE int raw_row(int g) { return g; }  // a row is an odd number of half turns around the banks
};
