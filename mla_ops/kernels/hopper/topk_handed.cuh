// The k best columns of a row of which CTAs have handed over candidates.
#pragma once

#include "pieces.cuh"
#include "topk_params.cuh"

// Candidates of a row, and memory for a choice among them. It lies in shared memory, since registers are few. A dry run
// does all but write, on data of its own.
struct alignas(16) Choice {
  u64* candidates;  // [count, room]
  u64* gates;       // [count]
  u64* entries;     // [count, room]
  u32* words;       // a bit for each column, then how many chosen columns are in front of each word
  int* chosen;      // [k]
  u32* haves;       // [count]
  int row, request, end, k;
  int rank, count, tiles, dry;
  Handed handed;
};

// Chooses and writes, if candidates are enough: the k-th best is not below any gate, and each piece had room.
template <int THREADS>
DEVICE bool choose_of_candidates(const TopkParams& p, Control& control, u32* bins, const Choice& c) {
  constexpr int AT_ONCE = 4;
  const u32 thread = threadIdx.x, lane = thread % 32;
  const u32 half = c.handed.room / 2, pairs = c.count * half, of_half = (1u << 22) / half + 1;
  u32 gate = 0;
  for (u32 i = thread; i < static_cast<u32>(c.count); i += THREADS) {
    const u64 head = c.gates[i];
    c.haves[i] = static_cast<u32>(head), gate = max(gate, static_cast<u32>(head >> 32));
  }
  gate = __reduce_max_sync(~0u, gate);
  if (lane == 0) control.sums[0][thread / 32] = gate;
  const u32 quads = ((c.end + 127) / 128 + THREADS - 1) / THREADS;
#pragma unroll 1
  for (u32 i = 0; i < quads; ++i) reinterpret_cast<uint4*>(c.words)[i * THREADS + thread] = {0, 0, 0, 0};
  meet<THREADS>();
  const u32 highest = __reduce_max_sync(~0u, control.sums[0][lane % (THREADS / 32)]);
  if (highest == ~0u) return false;
#pragma unroll 1
  for (u32 first = thread; first < pairs; first += AT_ONCE * THREADS) {
    uint4 own[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * THREADS < pairs) own[i] = reinterpret_cast<const uint4*>(c.candidates)[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const u32 pair = first + i * THREADS, piece = static_cast<u64>(pair) * of_half >> 22;
      if (pair >= pairs) continue;
      const u32 have = c.haves[piece], at = (pair - piece * half) * 2;
      if (at >= have) own[i].x = own[i].y = 0;
      if (at + 1 >= have) own[i].z = own[i].w = 0;
      reinterpret_cast<uint4*>(c.entries)[pair] = own[i];
    }
  }
  meet<THREADS>();
  const u64 threshold = select<THREADS, true, FAILURE>(control, bins, Listed<THREADS>{c.entries, 2 * pairs}, c.k,
                                                       highest, SHIFT_OF_GATED);
  if (threshold == 0) return false;
  const u32 at = shared_address(c.words);
#pragma unroll 4
  for (u32 i = thread; i < 2 * pairs; i += THREADS) {
    const u64 entry = c.entries[i];
    const u32 column = position_of(entry);
    set_if(entry >= threshold, at + column / 32 * 4, 1u << column % 32);
  }
  meet<THREADS>();
  u32 sum = 0, total;
  u16* const fronts = reinterpret_cast<u16*>(c.words + 4 * quads * THREADS);
  uint2* const own = reinterpret_cast<uint2*>(fronts) + thread * quads;
#pragma unroll 1
  for (u32 i = 0; i < quads; ++i) {
    const uint4 bits = reinterpret_cast<const uint4*>(c.words)[thread * quads + i];
    const u32 second = sum + __popc(bits.x), third = second + __popc(bits.y), fourth = third + __popc(bits.z);
    own[i] = {sum | second << 16, third | fourth << 16};
    sum = fourth + __popc(bits.w);
  }
  const u32 before = exclusive_scan<THREADS>(control, sum, total) * 0x10001;
#pragma unroll 1
  for (u32 i = 0; i < quads; ++i) own[i] = {own[i].x + before, own[i].y + before};
  meet<THREADS>();
#pragma unroll 4
  for (u32 i = thread; i < 2 * pairs; i += THREADS) {
    const u64 entry = c.entries[i];
    const u32 column = position_of(entry);
    if (entry >= threshold) c.chosen[fronts[column / 32] + __popc(c.words[column / 32] & (1u << column % 32) - 1)] = column;
  }
  meet<THREADS>();
  int* const out = p.indices + c.row * p.indices_pitch;
  const int request = c.request;
#pragma unroll 4
  for (u32 i = thread; i < static_cast<u32>(c.k); i += THREADS)
    if (!c.dry) out[i] = p.translated(c.chosen[i], request);
  if (thread == 0 && !c.dry) p.lengths[c.row] = c.k;
  return true;
}

// Scores of a row that begins at a multiple of 16 bytes, read from memory each time.
template <int THREADS>
struct InMemory {
  static constexpr int VECTORS = 4;
  const float* scores;
  int end;

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll 1
    for (int first = 4 * threadIdx.x; first < end; first += 4 * VECTORS * THREADS) {
      float4 x[VECTORS];
#pragma unroll
      for (int i = 0; i < VECTORS; ++i)
        x[i] = load_once_16_if(first + 4 * i * THREADS < end, scores + first + 4 * i * THREADS);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const int column = first + 4 * i * THREADS;
        if (column < end) use(key_of(x[i].x), ~column);
        if (column + 1 < end) use(key_of(x[i].y), ~(column + 1));
        if (column + 2 < end) use(key_of(x[i].z), ~(column + 2));
        if (column + 3 < end) use(key_of(x[i].w), ~(column + 3));
      }
    }
  }
};

// Chooses and writes, of scores in memory: slow, for rows whose candidates are not enough.
template <int THREADS>
DEVICE void choose_of_scores(const TopkParams& p, Control& control, u32* bins, i64 row, int end, int request) {
  constexpr int OWN = 16;  // columns of a thread at one time
  const float* const scores = p.scores + row * p.pitch;
  u64 threshold = entry_of(NAN_KEY, ~0u);
  clear_bins<THREADS>(bins);
  meet<THREADS>();
  if (end > p.k) threshold = select<THREADS>(control, bins, InMemory<THREADS>{scores, end}, p.k, 1, SHIFT_OF_ALL);
  int* const out = p.indices + row * p.indices_pitch;
  u32 done = 0, parity = 0;
#pragma unroll 1
  for (int first = 0; first < end; first += OWN * THREADS, parity ^= 1) {
    const int own = first + OWN * threadIdx.x;
    u32 mask = 0, total;
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
      const float4 x = load_once_16_if(own + i < end, scores + own + i);
      const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        mask |= static_cast<u32>(own + i + j < end && entry_of(key_of(values[j]), own + i + j) >= threshold) << (i + j);
    }
    const u32 count = __popc(mask), behind = inclusive_scan(count), of_warp = __shfl_sync(~0u, behind, 31);
    u32 place = done + before_warp<THREADS>(control, of_warp, parity, total) + behind - count;
#pragma unroll 1
    for (; mask; mask &= mask - 1) out[place++] = p.translated(own + __ffs(mask) - 1, request);
    done += total;
  }
#pragma unroll 1
  for (u32 i = done + threadIdx.x; i < static_cast<u32>(p.k); i += THREADS) out[i] = -1;
  if (threadIdx.x == 0) p.lengths[row] = done;
}
