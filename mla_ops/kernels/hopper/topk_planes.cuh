// Rows of scores by planes (planes.cuh): a thread's share of the upper halves, and what is chosen by them.
#pragma once
#include "planes.cuh"
#include "topk_exact.cuh"

// A word in shared memory is an upper half and the low 16 bits of a column. LONG rows may have twice as many columns,
// which are counted from a multiple of 64 on.
DEVICE float upper_of(u32 word) { return __uint_as_float(word & 0xffff0000u); }
constexpr u32 NO_WORD = 0xff800000, CHOSEN = 0x7fc00000;  // halves of -inf, which reaches no gate, and of NaN

// Such words, and `rest`, which has room for so many whole entries with their numbers. The key of 0 is that of -0, too, and
// of what is so little below it that its upper half is that of -0.
template <int THREADS, bool LONG>
struct UpperListed {
  u32* words;
  u32 count;
  const u32* row;
  u64* rest;
  u32 room;
  u32 origin, turn;  // LONG: the column that is counted as 0; words of the first 65,536 from there on

  DEVICE u32 column_of(u32 word, u32 number) const {
    return (word & 0xffff) + (LONG ? origin + (number >= turn ? 65536 : 0) : 0);
  }

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS) use(key_of_number(upper_of(words[i])), i);
  }

  DEVICE u64 whole(u32 number) const {
    const u32 column = column_of(words[number], number), word = word_of(column);
    const float score = __uint_as_float(whole_bits(row[word], row[word + LOWER_HALVES], in_high_bits(column)));
    return entry_of(key_of_number(score), column);
  }

  DEVICE void mark(u32 number) const { words[number] = words[number] & 0xffff | CHOSEN; }

  // Marks the best `rank` words of those from `least` to `most`, by their lower halves. Returns 0 if there is no room.
  DEVICE u64 choose(Control& control, u32* bins, u32 at, u32 least, u32 most, u32 inside, u32 rank) const {
    constexpr u32 HIGHEST = 0xff800000;  // key of inf
    const u32 last = min(most, HIGHEST) & 0xffff0000u;  // none has the half below that of 0, which is as large as 0
    const u64 bound = static_cast<u64>(last == KEY_OF_ZERO - (1 << 16) ? last - (1 << 16) : last) << 32;
    u32* const numbers = reinterpret_cast<u32*>(rest);
    u64* const entries = rest + (inside + 1) / 2;
    if (inside > room) return 0;
    each([&](u32 key, u32 number) {
      if (key - least <= most - least) numbers[next_number(at + Control::LISTED)] = number;
    });
    meet<THREADS>();
    if (inside <= SHORT_LIST) {
      u64 own = 0;
      if (threadIdx.x < inside) own = control.list[threadIdx.x] = whole(numbers[threadIdx.x]);
      meet<THREADS>();
      const u64 threshold = entry_of_list<THREADS>(control, at, inside, rank);
      if (threadIdx.x < inside && own >= threshold) mark(numbers[threadIdx.x]);
    } else {
      for (u32 i = threadIdx.x; i < inside; i += THREADS) entries[i] = whole(numbers[i]);
      meet<THREADS>();
      const u32 lowest = least == KEY_OF_ZERO ? least - (1 << 16) : least;
      const u64 threshold = select_listed<THREADS>(control, bins, entries, inside, rank, lowest);
      for (u32 i = threadIdx.x; i < inside; i += THREADS)
        if (entries[i] >= threshold) mark(numbers[i]);
    }
    meet<THREADS>();
    return bound;
  }
};
template <int THREADS, bool LONG>
constexpr bool UPPER_KEYS<UpperListed<THREADS, LONG>> = true;

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

  // Bytes that words of the bits of each byte take.
  DEVICE static u32 word_bytes(u32 bits) {
    u32 counts = bits - (bits >> 1 & 0x05050505);
    counts = (counts & 0x03030303) + (counts >> 2 & 0x03030303);
    return counts << 2;
  }

  // Bytes of both pieces, 16 bits each: of the first neighbours, and of those behind them.
  DEVICE static u32 low(u32 bytes) { return __byte_perm(bytes, 0, 0x4140); }
  DEVICE static u32 high(u32 bytes) { return __byte_perm(bytes, 0, 0x4342); }

  // Appends words of the columns of byte N of the bits. `columns` are the first one and that of its other half.
  template <int N>
  DEVICE void append(u32 bits, u32 address, u32 columns) const {
    constexpr u32 HALF = N < 2 ? 0x1054 : 0x3276, STEP = 0x00010001;
    const uint4& own = words[N % 2];
    columns += N % 2 * NEXT * STEP;
    append_word_if_bit<1u << 8 * N>(bits, address, __byte_perm(own.x, columns, HALF));
    append_word_if_bit<2u << 8 * N>(bits, address, __byte_perm(own.y, columns + STEP, HALF));
    append_word_if_bit<4u << 8 * N>(bits, address, __byte_perm(own.z, columns + 2 * STEP, HALF));
    append_word_if_bit<8u << 8 * N>(bits, address, __byte_perm(own.w, columns + 3 * STEP, HALF));
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

// Twice the upper half of the least score of an upper key.
DEVICE u32 gate_of_key(u32 key) {
  const u32 half = __float_as_uint(score_of(key)) >> 16;
  return half | half << 16;
}
