// Values of rows in slices: those of a CTA, and its sums.
#pragma once

#include "slices_keys.cuh"
#include "scores.cuh"
#include "values.cuh"

// Weights times values of 32, 64 and 192 dims.
DEVICE void wgmma_heads_by_dims(float (&d)[16], u64 a, u64 b) {
  WGMMA_SS(32, "f16", REG16, ACC16(d, 0), "%16", "%17", "0", "1");
}
DEVICE void wgmma_heads_by_dims(float (&d)[32], u64 a, u64 b) {
  WGMMA_SS(64, "f16", REG32, ACC32(d, 0), "%32", "%33", "0", "1");
}
DEVICE void wgmma_heads_by_dims(float (&d)[96], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" REG64
               ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83"
               ", %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, %96, %97, 1, 1, 1, 0, 1;"
               : ACC64(d, 0), ACC32(d, 64)
               : "l"(a), "l"(b));
}

// A lane's bytes of two keys: 16 dims of each chunk of the slice, of RoPE that is a value 32 bytes.
template <class Y, int CHUNKS>
struct Slice {
  uint4 bytes[2][CHUNKS], more[2];
  typename Y::R::Scales scales[2];
};

template <class Y, int CHUNKS>
DEVICE void load_slice(Slice<Y, CHUNKS>& slice, const KeyAddress (&from)[2], int rank, int lane) {
  using R = typename Y::R;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool there = from[r].row;
    if constexpr (R::SCALES_APART) {
      slice.scales[r] = make_uint2(R::DEAD_SCALES, R::DEAD_SCALES);
      if (there) slice.scales[r] = __ldg(reinterpret_cast<const uint2*>(from[r].scales));
    } else {
      slice.scales[r] = make_uint4(R::DEAD_SCALE, R::DEAD_SCALE, R::DEAD_SCALE, R::DEAD_SCALE);
      if (there) slice.scales[r] = __ldg(reinterpret_cast<const uint4*>(from[r].scales));
    }
    const unsigned char* bytes = from[r].row + rank * (CHUNKS * 64) + lane % 4 * 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int chunk = rank * CHUNKS + c;
      const bool rope = R::ROPE_IS_VALUE && chunk == R::CHUNKS - 1;
      slice.bytes[r][c] = make_uint4(0, 0, 0, 0);
      if (there && chunk < 8)
        slice.bytes[r][c] = __ldg(reinterpret_cast<const uint4*>(bytes + c * 64 + (rope ? lane % 4 * 16 : 0)));
      if (R::ROPE_IS_VALUE && c == (R::CHUNKS - 1) % CHUNKS) {
        slice.more[r] = make_uint4(0, 0, 0, 0);
        if (there && rope) slice.more[r] = __ldg(reinterpret_cast<const uint4*>(bytes + c * 64 + lane % 4 * 16 + 16));
      }
    }
  }
}

// The same as float16, as `score` makes them of a key's bytes, to a slot: rows of 128 bytes a chunk and key, swizzled.
template <class Y, int CHUNKS>
DEVICE void store_slice(Slice<Y, CHUNKS>& slice, u32 slot, int rank, int lane) {
  using R = typename Y::R;
  u32 undo[2] = {ONE_EACH, ONE_EACH};
  if (__any_sync(~0u, R::outside(slice.scales)))
    R::take_out(slice.scales[0], undo[0]), R::take_out(slice.scales[1], undo[1]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = r * 8 + lane / 4, t = lane % 4;
    const u32 to = slot + key * 128;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int chunk = rank * CHUNKS + c;
      if (chunk >= 8) continue;
      u32 v[8];
      if (R::ROPE_IS_VALUE && chunk == R::CHUNKS - 1) {
        const u32 factor = twice(undo[r], 0);
#pragma unroll
        for (int w = 0; w < 4; ++w)
          v[w] = R::rope(word(slice.bytes[r][c], w), factor), v[4 + w] = R::rope(word(slice.more[r], w), factor);
      } else {
        const u32 scale = R::pair(slice.scales[r], chunk);
#pragma unroll
        for (int w = 0; w < 4; ++w) e4m3_to_float16(word(slice.bytes[r][c], w), scale, v[2 * w], v[2 * w + 1]);
      }
      store_shared_16(to + c * 2048 + ((2 * t ^ (key & 7)) << 4), v[0], v[1], v[2], v[3]);
      store_shared_16(to + c * 2048 + ((2 * t + 1 ^ (key & 7)) << 4), v[4], v[5], v[6], v[7]);
    }
  }
}

// The same where values have one kind of bytes. Neighbouring lanes have neighbouring bytes of a key, 16 each: 4 lanes a chunk,
// 4 CHUNKS lanes a key. Lanes l and l + 16 know the l-th key.
template <class Y, int CHUNKS>
struct LongSlice {
  static constexpr int LANES = 4 * CHUNKS, AT_ONCE = 32 / LANES, ROUNDS = (16 + AT_ONCE - 1) / AT_ONCE;
  uint4 bytes[ROUNDS];
  typename Y::R::Scales scales;
};

template <class Y, int CHUNKS>
DEVICE void load_slice(LongSlice<Y, CHUNKS>& slice, const KeyAddress& from, int rank, int lane) {
  using R = typename Y::R;
  using S = LongSlice<Y, CHUNKS>;
  slice.scales = make_uint4(R::DEAD_SCALE, R::DEAD_SCALE, R::DEAD_SCALE, R::DEAD_SCALE);
  if (from.row) slice.scales = __ldg(reinterpret_cast<const uint4*>(from.scales));
  const int piece = lane % S::LANES, of_round = lane / S::LANES;
  const bool has = of_round < S::AT_ONCE && rank * CHUNKS + piece / 4 < 8;
  const int offset = rank * (CHUNKS * 64) + piece * 16;
#pragma unroll
  for (int i = 0; i < S::ROUNDS; ++i) {
    const unsigned char* row = shuffle_pointer(from.row, (i * S::AT_ONCE + of_round) & 15);
    slice.bytes[i] = make_uint4(0, 0, 0, 0);
    if (has && row) slice.bytes[i] = __ldg(reinterpret_cast<const uint4*>(row + offset));
  }
}

template <class Y, int CHUNKS>
DEVICE void store_slice(LongSlice<Y, CHUNKS>& slice, u32 slot, int rank, int lane) {
  using R = typename Y::R;
  using S = LongSlice<Y, CHUNKS>;
  u32 undo;
  const typename R::Scales both[2] = {slice.scales, slice.scales};
  if (__any_sync(~0u, R::outside(both))) R::take_out(slice.scales, undo);
  const int piece = lane % S::LANES, of_round = lane / S::LANES, chunk = rank * CHUNKS + piece / 4, t = piece % 4;
  const bool has = of_round < S::AT_ONCE && chunk < 8, odd = piece & 4;
  // Lanes below 16 offer the first scale of their key's slice, the others the second.
  const int first = rank * CHUNKS * 64 / R::GROUP, second = (chunk * 64 / R::GROUP - first) * 16;
  const u32 offered = R::pair(slice.scales, min(first + lane / 16, 3) * (R::GROUP / 64));
#pragma unroll
  for (int i = 0; i < S::ROUNDS; ++i) {
    const int key = (i * S::AT_ONCE + of_round) & 15;
    const u32 scale = __shfl_sync(~0u, offered, key + second);
    // Odd chunks begin with their second half, so that neighbours meet other banks.
    const uint4& b = slice.bytes[i];
    u32 v[8];
    e4m3_to_float16(odd ? b.z : b.x, scale, v[0], v[1]), e4m3_to_float16(odd ? b.w : b.y, scale, v[2], v[3]);
    e4m3_to_float16(odd ? b.x : b.z, scale, v[4], v[5]), e4m3_to_float16(odd ? b.y : b.w, scale, v[6], v[7]);
    const u32 to = slot + piece / 4 * 2048 + key * 128;
    if (has && i * S::AT_ONCE + of_round < 16) {
      store_shared_16(to + ((2 * t + odd ^ (key & 7)) << 4), v[0], v[1], v[2], v[3]);
      store_shared_16(to + ((2 * t + !odd ^ (key & 7)) << 4), v[4], v[5], v[6], v[7]);
    }
  }
}

// The same of half a chunk, two lanes a key, to rows of 64 bytes.
template <class Y>
struct HalfSlice {
  uint4 bytes, more;
  typename Y::R::Scales scales;
};

template <class Y, int>
DEVICE void load_slice(HalfSlice<Y>& slice, const KeyAddress& from, int rank, int lane) {
  using R = typename Y::R;
  const bool rope = R::ROPE_IS_VALUE && rank >= 14;
  const unsigned char* const bytes = from.row + rank * 32 + (rope ? rank % 2 * 32 + lane % 2 * 32 : lane % 2 * 16);
  slice.bytes = slice.more = make_uint4(0, 0, 0, 0);
  if constexpr (R::SCALES_APART) {
    slice.scales = make_uint2(R::DEAD_SCALES, R::DEAD_SCALES);
    if (from.row) slice.scales = __ldg(reinterpret_cast<const uint2*>(from.scales));
  } else {
    slice.scales = make_uint4(R::DEAD_SCALE, R::DEAD_SCALE, R::DEAD_SCALE, R::DEAD_SCALE);
    if (from.row) slice.scales = __ldg(reinterpret_cast<const uint4*>(from.scales));
  }
  if (from.row) slice.bytes = __ldg(reinterpret_cast<const uint4*>(bytes));
  if (from.row && rope) slice.more = __ldg(reinterpret_cast<const uint4*>(bytes + 16));
}

template <class Y, int>
DEVICE void store_slice(HalfSlice<Y>& slice, u32 slot, int rank, int lane) {
  using R = typename Y::R;
  u32 undo = ONE_EACH, v[8];
  const typename R::Scales both[2] = {slice.scales, slice.scales};
  if (__any_sync(~0u, R::outside(both))) R::take_out(slice.scales, undo);
  if (R::ROPE_IS_VALUE && rank >= 14) {
    const u32 factor = twice(undo, 0);
#pragma unroll
    for (int w = 0; w < 4; ++w) v[w] = R::rope(word(slice.bytes, w), factor), v[4 + w] = R::rope(word(slice.more, w), factor);
  } else {
    u32 scale = R::pair(slice.scales, 0);  // without an address of its own
#pragma unroll
    for (int chunk = 1; chunk < 8; ++chunk) scale = rank / 2 == chunk ? R::pair(slice.scales, chunk) : scale;
#pragma unroll
    for (int w = 0; w < 4; ++w) e4m3_to_float16(word(slice.bytes, w), scale, v[2 * w], v[2 * w + 1]);
  }
  const int key = lane / 2, t = lane % 2;
  store_shared_16(slot + key * 64 + ((2 * t ^ (key >> 1 & 3)) << 4), v[0], v[1], v[2], v[3]);
  store_shared_16(slot + key * 64 + ((2 * t + 1 ^ (key >> 1 & 3)) << 4), v[4], v[5], v[6], v[7]);
}

template <class Y, int CHUNKS, bool LONG>
struct SliceOf {
  using Type = LongSlice<Y, CHUNKS>;
};
template <class Y, int CHUNKS>
struct SliceOf<Y, CHUNKS, false> {
  using Type = Slice<Y, CHUNKS>;
};

template <class Y>
struct SliceOf<Y, 0, true> {
  using Type = HalfSlice<Y>;
};

// This CTA's slice of all keys, a warp's 16 of each turn, in the order in which `score` has them.
template <class Y, int CHUNKS>
DEVICE void bring_values(const Params& p, const Row& row, u32 shared, int rank, int warp, int lane) {
  using R = typename Y::R;
  constexpr bool LONG = CHUNKS == 0 || !R::ROPE_IS_VALUE && CHUNKS > 1;
  constexpr int KEYS = LONG ? 1 : 2;
  const int request = uniform(request_of(p, row)), count = await_list<Y>(shared), turns = turns_of(count);
  const int place = CHUNKS ? lane : lane / 2, own = warp * 16 + (LONG ? (place & 8) + R::raw_row(place & 7) : R::raw_row(lane / 4));
  int slot = warp, parity = 1;
  Key keys[KEYS];
  auto find = [&](int turn) {
#pragma unroll
    for (int r = 0; r < KEYS; ++r) keys[r] = key_at<Y>(p, row, shared, turn * TILE_KEYS + own + r * 8, count);
  };
  auto load = [&](auto& slice) {
    const KeyAddress first = address_of<R>(p, row, request, keys[0]);
    if constexpr (LONG) {
      load_slice<Y, CHUNKS>(slice, first, rank, lane);
    } else {
      const KeyAddress from[2] = {first, address_of<R>(p, row, request, keys[1])};
      load_slice<Y, CHUNKS>(slice, from, rank, lane);
    }
  };
  auto store = [&](auto& slice) {
    mbarrier_wait(shared + Y::VALUES_FREE + slot * 8, parity);
    store_slice<Y, CHUNKS>(slice, shared + Y::VALUES + slot * Y::VALUE_SLOT, rank, lane);
    __syncwarp();
    warp_arrive(shared + Y::VALUES_FULL + slot * 8, lane);
    converge();
    next_slot<Y::VALUE_SLOTS>(slot, parity);
  };
  // Bytes of so many turns are on their way: they come from L2.
  constexpr int AHEAD = CHUNKS <= 1 ? 4 : CHUNKS == 2 ? 3 : 2;
  typename SliceOf<Y, CHUNKS, LONG>::Type slices[AHEAD];
  find(0);
#pragma unroll 1
  for (int turn = 1 - AHEAD; turn < turns; ++turn) {
#pragma unroll
    for (int i = 1; i < AHEAD; ++i) slices[i - 1] = slices[i];
    load(slices[AHEAD - 1]), find(turn + AHEAD);
    if (turn >= 0) store(slices[0]);
  }
}

// Accumulators of the most registers that ptxas takes in one instruction here.
template <int CHUNKS>
constexpr int PIECES = CHUNKS == 4 ? 2 : 1;

// Weights of turns from memory to the ring, by one thread: those up to `least`, which it waits for, and up to `most`, as far
// as they are there.
template <class Y>
DEVICE void fetch_weights(const Params& p, u32 shared, int least, int most, int turns, int& next) {
#pragma unroll 1
  for (; next <= min(turns - 1, most); ++next) {
    const u32 published = shared + Y::PUBLISHED + next * 8, place = next % Y::PLACES,
              barrier = shared + Y::WEIGHTS_FULL + place * 8;
    if (next > least && !mbarrier_test_cluster(published, 0)) break;
    mbarrier_wait_cluster(published, 0);
    fence_async();
    mbarrier_arrive_expect(barrier, 8192);
    bulk_copy(shared + Y::WEIGHTS + place * 8192, record_of(p, next), 8192, barrier);
  }
}

template <int CHUNKS, Format FORMAT>
DEVICE void add_up_in_slices(const Params& p, u32 shared, int rank, int thread) {
  using Y = Slices<CHUNKS, FORMAT>;
  using L = typename Y::L;
  constexpr int N = Y::DIMS / 2 / PIECES<CHUNKS>;
  thread = kept(thread);
  float o[PIECES<CHUNKS>][N];
#pragma unroll
  for (int piece = 0; piece < PIECES<CHUNKS>; ++piece)
#pragma unroll
    for (int e = 0; e < N; ++e) o[piece][e] = 0.f;
  if (thread == 0) {
    mbarrier_arrive_expect(shared + Y::REFERENCES_FULL, 272);
    mbarrier_arrive_expect(shared + Y::FINAL_FULL, 256);
  }
  converge();
  const int turns = turns_of(await_list<Y>(shared));
  cluster_wait();
  int slot = 0, parity = 0, place = 0, place_parity = 0, next = 0, slot_before = 0;
  // Products of a turn are over, in this warp and then in all, so that other weights may come to its place.
  auto leave_turn = [&](int number, int first_slot) {
    free_turn<Y::VALUE_SLOTS>(shared + Y::VALUES_FREE, first_slot, thread & 31);
    named_barrier(VALUES_BARRIER, 128);
    if (thread == 0) fetch_weights<Y>(p, shared, number + 1 + Y::OVERLAPS, number + Y::PLACES, turns, next);
    converge();
  };
  if (thread == 0) fetch_weights<Y>(p, shared, Y::OVERLAPS, Y::PLACES - 1, turns, next);
  converge();
#pragma unroll
  for (int piece = 0; piece < PIECES<CHUNKS>; ++piece) hold(o[piece]);
#pragma unroll 1
  for (int number = 0; number < turns; ++number) {
    mbarrier_wait(shared + Y::WEIGHTS_FULL + place * 8, place_parity);
    const int first_slot = slot;
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      mbarrier_wait(shared + Y::VALUES_FULL + slot * 8, parity);
      if (++slot == Y::VALUE_SLOTS) slot = 0, parity ^= 1;
    }
    fence_async_shared();
    const u64 weights = tile_descriptor(shared + Y::WEIGHTS + place * 8192, 1024, 16),
              ring = CHUNKS ? tile_descriptor(shared + Y::VALUES, 1024, 2048)
                          : tile_descriptor(shared + Y::VALUES, 512, 512) ^ 3ull << 62;  // swizzle of 64 bytes
    if (!Y::OVERLAPS)
#pragma unroll
      for (int piece = 0; piece < PIECES<CHUNKS>; ++piece) hold(o[piece]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u64 values = ring + slot_of<Y::VALUE_SLOTS>(first_slot, k * 16) * (Y::VALUE_SLOT / 16);
#pragma unroll
      for (int piece = 0; piece < PIECES<CHUNKS>; ++piece)
        wgmma_heads_by_dims(o[piece], weights + k * 2, values + piece * (N / 32 * 2048 / 16));
    }
    wgmma_commit();
    if constexpr (Y::OVERLAPS) {
      wgmma_wait<1>();
      if (number) leave_turn(number - 1, slot_before);
      slot_before = first_slot;
    } else {
      wgmma_wait<0>();
#pragma unroll
      for (int piece = 0; piece < PIECES<CHUNKS>; ++piece) hold(o[piece]);
      leave_turn(number, first_slot);
    }
    if (++place == Y::PLACES) place = 0, place_parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int piece = 0; piece < PIECES<CHUNKS>; ++piece) hold(o[piece]);

  const Row row = whole_row(p, true);
  const int own = thread_here() & 127, warp = own >> 5, lane = own & 31, g = lane >> 2, t = lane & 3;
  const int of_lane = warp * 16 + lane % 16, global_head = row.tile * 64 + of_lane;
  const bool there = global_head < p.num_heads;
  const float sink = p.attn_sink && there ? __ldg(p.attn_sink + global_head) : -INFINITY;
  mbarrier_wait(shared + Y::REFERENCES_FULL, 0);
  mbarrier_wait(shared + Y::FINAL_FULL, 0);
  const float total = load_shared_float(shared + Y::FINAL + of_lane * 4),
              reference = load_shared_float(shared + Y::REFERENCES + of_lane * 4);
  if (total < 0.f) return;  // of every head
  const float lse = total == 0.f ? -INFINITY : (reference + log2_approx(total)) * 0.6931471805599453f;
  float factor = __fdividef(1.f / L::FACTOR, total);
  if (rank == 0 && there && lane < 16) leave_lse(p, row, global_head, -1, lse, factor);
  if (sink != -INFINITY) factor = __fdividef(factor, 1.f + exp2_approx((sink - lse) * 1.4426950408889634f));
  factor = total == 0.f ? 0.f : factor;
  const float factors[2] = {__shfl_sync(~0u, factor, g), __shfl_sync(~0u, factor, g + 8)};
  named_barrier(VALUES_BARRIER, 128);  // all products have left the values
  constexpr int UNITS = Y::DIMS / 8, SWIZZLE = UNITS < 8 ? UNITS - 1 : 7;
  const u32 stage = shared + Y::VALUES + warp * (16 * UNITS * 16);
#pragma unroll
  for (int i = 0; i < UNITS; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      store_shared_4(stage + ((g + 8 * r) * UNITS + (i ^ g & SWIZZLE)) * 16 + t * 4,
                     scaled_pair(o[4 * i / N][4 * i % N + 2 * r], o[4 * i / N][4 * i % N + 2 * r + 1], factors[r]));
  __syncwarp();
#pragma unroll 4
  for (int at = lane; at < 16 * UNITS; at += 32) {
    const int line = at / UNITS, unit = at % UNITS, head = row.tile * 64 + warp * 16 + line;
    if (head < p.num_heads && rank * Y::DIMS + unit * 8 < 512)
      *reinterpret_cast<uint4*>(out_row(p, row, head) + rank * Y::DIMS + unit * 8) =
          load_shared_16(stage + (line * UNITS + (unit ^ line & SWIZZLE)) * 16);
  }
}
