// One token's key into its slot of a cache, by one warp. cache.cu has the kernels.
#pragma once

#include "conversions.cuh"
#include "rows.cuh"

struct Params {
  const void* latent;       // [num_rows, latent_dim]
  const void* rope;         // [num_rows, row_dim - latent_dim]
  unsigned char* cache;     // [num_blocks, block_size] rows
  const i64* slot_mapping;  // [num_rows]
  i64 num_slots, block_size;
  i64 latent_stride, rope_stride;  // numbers
  i64 block_stride;                // bytes
  i64 num_rows;
  int latent_dim, row_dim;
};

constexpr int WARPS = 4;  // warps of a CTA

struct Slot {
  i64 block;
  u32 offset;
};

// Sizes that 32 bits hold are divided in 32 bits: a division of 64 takes 70 instructions.
DEVICE Slot slot_of(i64 slot, i64 block_size) {
  if ((slot | block_size) >> 32 == 0) {
    const u32 block = static_cast<u32>(slot) / static_cast<u32>(block_size);
    return {static_cast<i64>(block), static_cast<u32>(slot) - block * static_cast<u32>(block_size)};
  }
  return {slot / block_size, static_cast<u32>(slot % block_size)};
}

// N numbers of a lane, and of LANES neighbours a group, to e4m3. Returns the exponent of the group's scale:
// `max(ceil(log2(largest / 448)), LOWEST)`, 448 being 1.75 * 2^8, from the finite ones. NaN and infinities become NaN.
template <Type INPUT, int N, int LANES, int LOWEST>
DEVICE int quantize(const u32 (&bits)[N], u32 (&words)[N / 4]) {
  u32 wide[N], largest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    wide[i] = widen<INPUT>(bits[i]);
    const u32 magnitude = wide[i] & 0x7fffffffu;
    largest = max(largest, magnitude < INFINITE ? magnitude : 0u);
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  const int exponent = max(static_cast<int>(largest >> 23) - 135 + ((largest & 0x7fffffu) > 0x600000u), LOWEST);
  // The product is exact, or so small that it becomes a zero of its sign.
  const float inverse = __uint_as_float(static_cast<u32>(127 - exponent) << 23);
  float scaled[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const bool infinite = (wide[i] & 0x7fffffffu) == INFINITE;
    scaled[i] = __uint_as_float(infinite ? 0x7fc00000u : wide[i]) * inverse;
  }
#pragma unroll
  for (int i = 0; i < N; i += 4)
    words[i / 4] = pack_e4m3(scaled[i], scaled[i + 1]) | static_cast<u32>(pack_e4m3(scaled[i + 2], scaled[i + 3])) << 16;
  return exponent;
}

// A token of a launch. Its numbers are requested before its slot is known.
template <Type INPUT>
struct Token {
  using Bits = typename Memory<INPUT>::Bits;

  const Params& p;
  const int lane;
  const i64 row;

  DEVICE const Bits* latent() const { return static_cast<const Bits*>(p.latent) + row * p.latent_stride; }
  DEVICE const Bits* rope() const { return static_cast<const Bits*>(p.rope) + row * p.rope_stride; }
  DEVICE bool is_there(i64 slot) const { return slot >= 0 && slot < p.num_slots; }

  // Two of 64, as bfloat16.
  DEVICE u32 rope_pair() const {
    u32 bits[2];
    load_numbers<INPUT, 2>(rope() + lane * 2, bits);
    return convert<INPUT, BF16>(bits[0]) | convert<INPUT, BF16>(bits[1]) << 16;
  }

  // 512 e4m3, 4 float32 scales, 64 bfloat16. A lane has 16 numbers, eight lanes a group.
  DEVICE void store_fp8_ds_mla() const {
    using R = RowOfFp8DsMla;
    const i64 slot = p.slot_mapping[row];
    u32 bits[16], words[4];
    load_numbers<INPUT, 16>(latent() + lane * 16, bits);
    const u32 pair = rope_pair();
    if (!is_there(slot)) return;
    const int exponent = quantize<INPUT, 16, 8, -13>(bits, words);
    const Slot at = slot_of(slot, p.block_size);
    unsigned char* target = p.cache + at.block * p.block_stride + static_cast<i64>(at.offset) * R::BYTES;
    *reinterpret_cast<uint4*>(target + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    if (lane % 8 == 0) reinterpret_cast<u32*>(target + R::LATENT)[lane / 8] = static_cast<u32>(exponent + 127) << 23;
    reinterpret_cast<u32*>(target + R::ROPE_AT)[lane] = pair;
  }

  // 448 e4m3 and 64 bfloat16; behind all rows of the block, 7 exponents and a zero. A lane has 16 numbers, four lanes a
  // group; the last four lanes have none, and the zero.
  DEVICE void store_fp8_ds_mla_v4() const {
    using R = RowOfFp8DsMlaV4;
    const i64 slot = p.slot_mapping[row];
    u32 bits[16] = {}, words[4];
    if (lane < 28) load_numbers<INPUT, 16>(latent() + lane * 16, bits);
    const u32 pair = rope_pair();
    if (!is_there(slot)) return;
    const int exponent = quantize<INPUT, 16, 4, -22>(bits, words);
    const Slot at = slot_of(slot, p.block_size);
    unsigned char* block = p.cache + at.block * p.block_stride;
    unsigned char* target = block + static_cast<i64>(at.offset) * R::BYTES;
    if (lane < 28) *reinterpret_cast<uint4*>(target + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    reinterpret_cast<u32*>(target + R::ROPE_AT)[lane] = pair;
    const u32 byte = lane < 28 ? exponent + 127 : 0;
    if (lane % 4 == 0)
      block[p.block_size * R::BYTES + static_cast<i64>(at.offset) * R::SCALE_BYTES + lane / 4] = byte;
  }

  // 128 e4m3; behind all rows of the block, a float32 scale. A lane has 4 numbers.
  DEVICE void store_fp8_index() const {
    const i64 slot = p.slot_mapping[row];
    u32 bits[4], words[1];
    load_numbers<INPUT, 4>(latent() + lane * 4, bits);
    if (!is_there(slot)) return;
    const int exponent = quantize<INPUT, 4, 32, -22>(bits, words);
    const Slot at = slot_of(slot, p.block_size);
    unsigned char* block = p.cache + at.block * p.block_stride;
    reinterpret_cast<u32*>(block + static_cast<i64>(at.offset) * 128)[lane] = words[0];
    if (lane == 0)
      reinterpret_cast<u32*>(block + p.block_size * 128)[at.offset] = static_cast<u32>(exponent + 127) << 23;
  }

  // N numbers of latent and RoPE side by side, from a column on.
  template <int N>
  DEVICE void load_side_by_side(int column, u32 (&bits)[N]) const {
    if (column + N <= p.latent_dim) {
      load_numbers<INPUT, N>(latent() + column, bits);
    } else if (column >= p.latent_dim) {
      load_numbers<INPUT, N>(rope() + (column - p.latent_dim), bits);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        bits[i] = column + i < p.latent_dim ? latent()[column + i] : rope()[column + i - p.latent_dim];
    }
  }

  // Latent and RoPE side by side. A lane has 16 bytes of each 512.
  template <Type OUTPUT>
  DEVICE void store_plain() const {
    constexpr int SIZE = sizeof(typename Memory<OUTPUT>::Bits), N = 16 / SIZE, MOST = (576 / N + 31) / 32;
    const i64 slot = p.slot_mapping[row];
    u32 bits[MOST][N];
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      const int column = (i * 32 + lane) * N;
      if (column < p.row_dim) load_side_by_side<N>(column, bits[i]);
    }
    if (!is_there(slot)) return;
    const Slot at = slot_of(slot, p.block_size);
    unsigned char* target =
        p.cache + at.block * p.block_stride + static_cast<i64>(at.offset) * p.row_dim * SIZE + lane * 16;
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      u32 words[4] = {};
#pragma unroll
      for (int j = 0; j < N; ++j)
        words[j * SIZE / 4] |= convert<INPUT, OUTPUT>(bits[i][j]) << (SIZE == 2 ? j % 2 * 16 : 0);
      if ((i * 32 + lane) * N < p.row_dim)
        *reinterpret_cast<uint4*>(target + i * 512) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

DEVICE i64 row_of_warp() { return static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / 32; }
