// Queries into shared memory.
#pragma once

#include "layout.cuh"

// Pairs of a chunk's 64 dims stand where the fragments that `score` makes of a key's bytes meet them: lane t of four
// holds dims 16 t to 16 t + 15, and its words 2 j, 2 j + 1 are the operand of step j.
template <int HEADS>
DEVICE void store_query_piece(u32 chunk, int head, int piece, u32 w0, u32 w1, u32 w2, u32 w3) {
  const u32 row = chunk + head * 128 + (piece >> 1) * 4;
  const int unit = (piece & 1) * 4, swizzle = head & 7;
  store_shared_4(row + ((unit ^ swizzle) << 4), w0);
  store_shared_4(row + (((unit + 1) ^ swizzle) << 4), w1);
  store_shared_4(row + (((unit + 2) ^ swizzle) << 4), w2);
  store_shared_4(row + (((unit + 3) ^ swizzle) << 4), w3);
}

// The magnitude, as bfloat16's bits, of each element of a pair; 0 of one that is infinite or NaN.
DEVICE u32 finite_magnitudes(u32 pair) {
  const u32 low = pair & 0x7fffu, high = pair & 0x7fff0000u;
  return (low < 0x7f80u ? low : 0) | (high < 0x7f800000u ? high : 0);
}

// Eight elements a piece: every sixteenth piece of a head, from the lane's own on.
template <int N>
DEVICE const uint4* piece_of(const uint4* source, int i, int lane) {
  return source + min(i * 16 + lane, N - 1);
}

// The largest finite magnitude that sixteen lanes have, in both halves. Infinities and NaN are looked for only once one
// was met, in what is then read again: this is at the start of a row, where instructions come from memory.
template <int N, int OF_A_LANE>
DEVICE u32 largest_magnitude(const uint4 (&piece)[OF_A_LANE], const uint4* source, int lane) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < OF_A_LANE; ++i)
#pragma unroll
    for (int w = 0; w < 4; ++w) largest = larger_halves(largest, word(piece[i], w) & 0x7fff7fffu);
  if (finite_magnitudes(largest) != largest) {
    largest = 0;
#pragma unroll 1
    for (int i = 0; i < OF_A_LANE; ++i) {
      const uint4 again = __ldg(piece_of<N>(source, i, lane));
#pragma unroll
      for (int w = 0; w < 4; ++w) largest = larger_halves(largest, finite_magnitudes(word(again, w)));
    }
  }
#pragma unroll
  for (int step = 8; step; step >>= 1) largest = larger_halves(largest, __shfl_xor_sync(~0u, largest, step));
  return larger_halves(largest, largest << 16 | largest >> 16);
}

// All of a row's queries, by THREADS threads, sixteen a head: each as float16 (its RoPE part as bfloat16 if that is no
// value) times a power of two of its own that puts its largest finite magnitude below 2^16. Heads past the last repeat
// it. A loop, whose code is there after its first round; the next round's loads are under way in each.
template <int HEADS, Format FORMAT, int THREADS>
DEVICE void load_queries(const Params& p, const Row& row, u32 shared, int thread, bool wait, u32 parity) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  constexpr int PIECES = R::CHUNKS * 8, OF_A_LANE = (PIECES + 15) / 16;
  constexpr int GROUPS = THREADS / 16, ROUNDS = (HEADS + GROUPS - 1) / GROUPS;
  const int lane = thread & 15;
  auto source_of = [&](int head) {
    const int global_head = min(row.tile * HEADS + head, p.num_heads - 1);
    return reinterpret_cast<const uint4*>(p.q + row.token * p.q_token_stride + global_head * p.q_head_stride);
  };
  int head = thread / 16;
  const uint4* source = source_of(head);
  uint4 piece[OF_A_LANE];
#pragma unroll
  for (int i = 0; i < OF_A_LANE; ++i) piece[i] = __ldg(piece_of<PIECES>(source, i, lane));
  if (wait) mbarrier_wait(shared + L::FACTORS_FREE, parity);  // the columns of the row before were read
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    const uint4* next_source = source_of(head + GROUPS);
    uint4 next[OF_A_LANE];
    if (ROUNDS > 1) {
#pragma unroll
      for (int i = 0; i < OF_A_LANE; ++i) next[i] = __ldg(piece_of<PIECES>(next_source, i, lane));
    }
    const u32 largest = largest_magnitude<PIECES>(piece, source, lane) << 16;  // as float32's
    // 15 - exponent, held to what float32 can undo
    const int shift = min(max(142 - static_cast<int>(largest >> 23), -110), 110);
    const float up = __uint_as_float((127 + shift) << 23);
    if (head < HEADS) {
      if (lane == 0)
        store_shared_float2(shared + L::COLUMNS + head * 8,
                            p.scale_log2 / R::FACTOR * __uint_as_float((127 - shift) << 23), 0.f);
#pragma unroll
      for (int i = 0; i < OF_A_LANE; ++i) {
        const int index = i * 16 + lane;
        if (index >= PIECES) continue;
        u32 scaled[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float a = low_bfloat16(word(piece[i], w)) * up, b = high_bfloat16(word(piece[i], w)) * up;
          scaled[w] = R::ROPE_IS_VALUE || index < 64 ? pack_float16(a, b) : pack_bfloat16(a, b);
        }
        store_query_piece<HEADS>(shared + L::QUERY + index / 8 * L::QUERY_CHUNK, head, index & 7, scaled[0], scaled[1],
                                 scaled[2], scaled[3]);
      }
    }
    head += GROUPS, source = next_source;
    if (ROUNDS > 1) {
#pragma unroll
      for (int i = 0; i < OF_A_LANE; ++i) piece[i] = next[i];
    }
  }
}
