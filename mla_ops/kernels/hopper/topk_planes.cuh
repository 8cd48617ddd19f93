// Rows of scores by planes (planes.cuh): a thread's share of the upper halves, and entries that have no more of a key.
#pragma once
#include "planes.cuh"
#include "topk_cluster.cuh"

// Entries in shared memory whose keys' lower halves are those of the row, or 0.
template <int THREADS>
struct UpperListed {
  u64* entries;
  u32 count;
  const u32* row;

  template <class F>
  DEVICE void each(F use) const {
    Listed<THREADS>{entries, count}.each(use);
  }

  DEVICE u64 completed(u64 entry) const {
    const u32 column = position_of(entry), word = word_of(column);
    const float score = __uint_as_float(whole_bits(row[word], row[word + LOWER_HALVES], in_high_bits(column)));
    return entry_of(key_of_number(score), column);
  }

  // Whole keys for those from `least` to `most`.
  DEVICE void complete(u32 least, u32 most) const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
      if (static_cast<u32>(entries[i] >> 32) - least > most - least) continue;
      entries[i] = completed(entries[i]);
    }
  }

  // The same for a few, which control lists; they are asked for at one time.
  DEVICE void complete_few(Control& control, u32 at, u32 least, u32 most, u32 inside) const {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS)
      if (static_cast<u32>(entries[i] >> 32) - least <= most - least)
        store_shared_8(at + 8 * next_number(at + Control::LISTED), i, 0);
    meet<THREADS>();
    if (threadIdx.x < inside) {
      const u32 number = static_cast<u32>(control.list[threadIdx.x]);
      entries[number] = control.list[threadIdx.x] = completed(entries[number]);
    }
    meet<THREADS>();
  }
};
template <int THREADS>
constexpr bool UPPER_KEYS<UpperListed<THREADS>> = true;

// Halves of a thread's columns of a chunk, in two pieces: of four neighbours and of those eight behind them each. A warp's
// pieces are neighbours, 32 at a time, and two of them are 16 columns.
template <int THREADS>
struct Pieces {
  static constexpr int COLUMNS = THREADS * 16, NEXT = 256;  // of a chunk; from a thread's first piece to its second
  uint4 words[2];

  // A thread's first column of a chunk.
  DEVICE static int first() { return threadIdx.x / 32 * (2 * NEXT) + threadIdx.x % 32 / 2 * 16 + threadIdx.x % 2 * 4; }

  // `own` is the word of the first column, and there are so many columns from it on. What they have not is not read.
  DEVICE void load(const u32* own, int columns) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece)
      if (columns > piece * NEXT) words[piece] = load_words_once(own + piece * NEXT);
  }

  // Bits of the columns that reach the gate: byte n has those of piece n % 2, neighbours n / 2.
  DEVICE u32 reaching(u32 gate) const {
    u32 bits = 0;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const u32 own[4] = {words[piece].x, words[piece].y, words[piece].z, words[piece].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) bits |= both_reach(own[i], gate) & 0x00010001u << 8 * piece + i;
    }
    return bits;
  }

  // Bits of the columns that a row has, which begins and ends so many columns behind the first one.
  DEVICE static u32 inside(int start, int end) {
    u32 bits = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int before = n % 2 * NEXT + n / 2 * 8;
      const u32 in_front_of_end = (1u << min(max(end - before, 0), 4)) - 1;
      bits |= (in_front_of_end & ~0u << min(max(start - before, 0), 4)) << 8 * n;
    }
    return bits;
  }

  // Bytes that entries of the bits of each byte take.
  DEVICE static u32 entry_bytes(u32 bits) {
    u32 counts = bits - (bits >> 1 & 0x05050505);
    counts = (counts & 0x03030303) + (counts >> 2 & 0x03030303);
    return counts << 3;
  }

  // Bytes of both pieces, 16 bits each: of the first neighbours, and of those behind them.
  DEVICE static u32 low(u32 bytes) { return __byte_perm(bytes, 0, 0x4140); }
  DEVICE static u32 high(u32 bytes) { return __byte_perm(bytes, 0, 0x4342); }

  // Appends the columns of byte N of the bits: words as they are, whose half `key_of_word` finds. `place` is the complement
  // of the first column.
  template <int N>
  DEVICE void append(u32 bits, u32 address, u32 place) const {
    const uint4& own = words[N % 2];
    place -= N % 2 * NEXT + N / 2 * 8;
    append_if_bit<1u << 8 * N>(bits, address, own.x, place);
    append_if_bit<2u << 8 * N>(bits, address, own.y, place - 1);
    append_if_bit<4u << 8 * N>(bits, address, own.z, place - 2);
    append_if_bit<8u << 8 * N>(bits, address, own.w, place - 3);
  }
};

// Halves of four neighbouring columns, with those of other columns beside them.
struct Halves {
  uint4 upper, lower;

  DEVICE void load(const u32* row, u32 column) {
    upper = load_words_once(row + word_of(column)), lower = load_words_once(row + word_of(column) + LOWER_HALVES);
  }

  // Scores of the columns that the row has.
  DEVICE float4 scores(const Row& row, u32 column) const {
    const bool high = in_high_bits(column);
    auto score = [&](u32 above, u32 below, u32 i) {
      return row.has(column + i) ? __uint_as_float(whole_bits(above, below, high)) : absent();
    };
    return {score(upper.x, lower.x, 0), score(upper.y, lower.y, 1), score(upper.z, lower.z, 2),
            score(upper.w, lower.w, 3)};
  }
};

// Four columns as they are loaded.
template <bool PLANES>
struct FourOf {
  using Type = float4;
};
template <>
struct FourOf<true> {
  using Type = Halves;
};

// Key of a word and the complement of a column, with a lower half of 0. Halves of -0 and of what is below it by less than
// a half says are those of 0.
DEVICE u32 key_of_word(u32 word, u32 place) {
  return key_of_number(__uint_as_float(in_high_bits(~place) ? word & 0xffff0000u : word << 16));
}

// Twice the upper half of the least score of an upper key.
DEVICE u32 gate_of_key(u32 key) {
  const u32 half = __float_as_uint(score_of(key)) >> 16;
  return half | half << 16;
}
