// Queries into shared memory.
#pragma once

#include "layout.cuh"

// The magnitude, as bfloat16's bits, of each element of a pair; 0 of one that is infinite or NaN.
DEVICE u32 finite_magnitudes(u32 pair) {
  const u32 low = pair & 0x7fffu, high = pair & 0x7fff0000u;
  return (low < 0x7f80u ? low : 0) | (high < 0x7f800000u ? high : 0);
}

// Queries are in pieces of eight elements, of which sixteen threads have a head's, every sixteenth each.
template <int HEADS, Format FORMAT, int THREADS>
struct Pieces {
  static constexpr int OF_A_HEAD = Rows<FORMAT>::CHUNKS * 8, OF_A_LANE = (OF_A_HEAD + 15) / 16;
  static constexpr int GROUPS = THREADS / 16, ROUNDS = (HEADS + GROUPS - 1) / GROUPS;

  static DEVICE bool has(int lane, int i) { return OF_A_HEAD % 16 == 0 || i + 1 < OF_A_LANE || lane < OF_A_HEAD % 16; }
};

// The largest finite magnitude that sixteen lanes have, in both halves. Infinities and NaN are looked for only once one
// was met: this is at the start of a row, where instructions come from memory.
template <int N>
DEVICE u32 largest_magnitude(const uint4 (&piece)[N]) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int w = 0; w < 4; ++w) largest = larger_magnitudes(largest, word(piece[i], w));
  largest &= 0x7fff7fffu;
  if (finite_magnitudes(largest) != largest) {
    largest = 0;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w) largest = larger_halves(largest, finite_magnitudes(word(piece[i], w)));
  }
#pragma unroll
  for (int step = 8; step; step >>= 1) largest = larger_halves(largest, __shfl_xor_sync(~0u, largest, step));
  return larger_halves(largest, largest << 16 | largest >> 16);
}

// Eight elements times a power of two, as float16 or still bfloat16.
DEVICE void scale_piece(u32 (&scaled)[4], const uint4& piece, u32 factor, bool to_float16) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const u32 pair = multiply_bfloat16(word(piece, w), factor);
    scaled[w] = to_float16 ? pack_float16(low_bfloat16(pair), high_bfloat16(pair)) : pair;
  }
}

// All of a row's queries, by THREADS threads, sixteen a head: each as float16 (its RoPE part as bfloat16 if that is no
// value) times a power of two of its own that puts its largest finite magnitude below 2^16. Heads past the last repeat
// it. Registers hold two rounds; of more all are copied, as they are, to where they will be before the first is
// converted, in a loop, whose code is there after its first round.
//
// Pairs of a chunk's 64 dims stand where the fragments that `score` makes of a key's bytes meet them: lane t of four
// holds dims 16 t to 16 t + 15, and its words 2 j, 2 j + 1 are the operand of step j.
template <int HEADS, Format FORMAT, int THREADS>
DEVICE void load_queries(const Params& p, const Row& row, u32 shared, int thread, bool wait, u32 parity) {
  using P = Pieces<HEADS, FORMAT, THREADS>;
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  constexpr bool COPIED = P::ROUNDS > 2;
  constexpr int BATCH = COPIED ? 1 : P::ROUNDS;
  constexpr int STEP = 2 * L::QUERY_CHUNK;  // from a lane's piece to its next
  const int lane = thread & 15, first_head = thread / 16;
  const bool upper = lane & 8;
  auto source_of = [&](int head) {
    const int global_head = min(row.tile * HEADS + head, p.num_heads - 1);
    return p.q + row.token * p.q_token_stride + global_head * p.q_head_stride + lane * 8;
  };
  // Of a head's first piece: as it comes, and where its words go.
  auto place_of = [&](int head, int offset) {
    return shared + L::QUERY + lane / 8 * L::QUERY_CHUNK + head * 128 + (offset ^ (head & 7) << 4);
  };
  uint4 piece[BATCH][P::OF_A_LANE];
#pragma unroll
  for (int b = 0; b < BATCH; ++b)
#pragma unroll
    for (int i = 0; i < P::OF_A_LANE; ++i) piece[b][i] = make_uint4(0, 0, 0, 0);
  if constexpr (COPIED) {
    int head = first_head;
#pragma unroll 1
    for (int round = 0; round < P::ROUNDS; ++round, head += P::GROUPS) {
      const u16* source = source_of(head);
      const u32 place = place_of(head, lane % 8 * 16);
#pragma unroll
      for (int i = 0; i < P::OF_A_LANE; ++i)
        if (head < HEADS && P::has(lane, i)) copy_16(place + i * STEP, source + i * 128);
      commit_copies();
    }
  } else {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const u16* source = source_of(first_head + b * P::GROUPS);
#pragma unroll
      for (int i = 0; i < P::OF_A_LANE; ++i)
        if (P::has(lane, i)) piece[b][i] = __ldg(reinterpret_cast<const uint4*>(source + i * 128));
    }
  }
  if (wait) mbarrier_wait(shared + L::FACTORS_FREE, parity);  // the columns of the row before were read
  int first = first_head;
#pragma unroll 1
  for (int left = P::ROUNDS - BATCH; left >= 0; left -= BATCH, first += BATCH * P::GROUPS) {
    if constexpr (COPIED) {
      wait_for_copies_but(left);
      const u32 place = place_of(first, lane % 8 * 16);
#pragma unroll
      for (int i = 0; i < P::OF_A_LANE; ++i)
        if (first < HEADS && P::has(lane, i)) piece[0][i] = load_shared_16(place + i * STEP);
    }
    u32 largest[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) largest[b] = largest_magnitude(piece[b]) << 16;  // as float32's
    __syncwarp();  // what other lanes have read is written over
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int head = first + b * P::GROUPS;
      if (head >= HEADS) continue;
      // 15 - exponent, held to what float32 can undo
      const int shift = min(max(142 - static_cast<int>(largest[b] >> 23), -110), 110);
      const u32 up = (127 + shift) << 7;  // as bfloat16
      if (lane == 0)
        store_shared_float2(shared + L::COLUMNS + head * 8,
                            p.scale_log2 / R::FACTOR * __uint_as_float((127 - shift) << 23), 0.f);
      // Halves of the lanes begin with other words, so that they meet other banks.
      const u32 to = place_of(head, lane % 2 * 64 + upper * 32) + lane % 8 / 2 * 4;
#pragma unroll
      for (int i = 0; i < P::OF_A_LANE; ++i) {
        if (!P::has(lane, i)) continue;
        u32 v[4];
        scale_piece(v, piece[b][i], up | up << 16, R::ROPE_IS_VALUE || i * 2 + lane / 8 < R::CHUNKS - 1);
#pragma unroll
        for (int w = 0; w < 4; ++w) store_shared_4((to ^ w << 4) + i * STEP, upper ? v[w ^ 2] : v[w]);
      }
    }
  }
}
