// Turns with a key whose scales float16 does not hold together: keys as bfloat16, which holds e4m3 and RoPE as they are,
// and queries as they came. Scales stay float32 for scores; values are rounded to bfloat16, as their weights are.
#pragma once

#include "layout.cuh"
#include "wide_ptx.cuh"

// Addresses of a lane: its first key and that one's scales; the values of both halves; where queries go besides.
struct WidePlaces {
  u32 raw, rope, scales, values[2], weights, scratch;
};

// All scores of a lane's two keys as powers of two, and the values.
//
// Queries come two chunks of 64 dims ahead, in the order in which `score` has a key's, to the place of weights and to
// those of the last values: a warp copies a head's 128 bytes at a time. Heads past the last repeat it. RoPE that is no
// value is there as bfloat16.
template <class L, int BARRIER>
DEVICE void wide_scores(float (&s)[L::HEADS / 2], const Params& p, const Row& row, const WidePlaces& places,
                        u32 shared, int thread) {
  using R = typename L::R;
  constexpr int CHUNK = TILE_KEYS * 128, N = L::HEADS / 2;
  const int warp = thread >> 5, lane = thread & 31, t = lane & 3;
#pragma unroll
  for (int e = 0; e < N; ++e) s[e] = 0.f;
  int token = row.token, first = row.tile * L::HEADS + warp;
  hold(token), hold(first);  // else what is made of them would take registers of all turns
  const int last = p.num_heads - 1;
  const u16* query = query_at(p, token, min(first, last)) + lane * 2;
  u32 here = places.weights, next = places.scratch, later = places.scratch + CHUNK;
#pragma unroll 1
  for (int chunk = -2; chunk < 8; ++chunk) {
    wait_for_copies_but<1>();
    fence_async_shared();
    named_barrier<BARRIER, 128>();  // the chunk is there, and products of the one before are over
    if (chunk < 6) {
      const u16* from = query;
#pragma unroll 1
      for (int head = warp; head < L::HEADS; head += 4) {
        copy_4(later + head * 128 + ((lane >> 1 & 3) * 32 + (lane & 1) * 16 + (lane >> 3) * 4 ^ (head & 7) << 4), from);
        if (first - warp + head + 4 <= last) from += 4 * p.q_head_stride;
      }
      query += 64;
    }
    commit_copies();
    // The queries' RoPE that is no value has been there all the time, times what the columns undo.
    const bool value = R::ROPE_IS_VALUE || chunk >= 0, rope = R::ROPE_IS_VALUE ? chunk == 7 : !value;
    const u32 operands = value ? here : shared + L::QUERY + (R::CHUNKS - 1) * L::QUERY_CHUNK;
    float scales[2], factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[r] = rope ? 1.f : R::scale(places.scales + r * (8 * R::SCALES_PITCH), chunk * 64 / R::GROUP);
      factors[r] = value ? scales[r] * p.scale_log2 : 1.f;
    }
#pragma unroll 1
    for (int half = chunk < 8 - R::CHUNKS ? 2 : 0; half < 2; ++half) {
      u32 f[8];
      if (rope && R::ROPE_IS_VALUE) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint4 v = load_shared_16(places.raw + r * (8 * R::BYTES) + places.rope + half * 16);
          f[r] = v.x, f[2 + r] = v.y, f[4 + r] = v.z, f[6 + r] = v.w;
        }
      } else if (rope) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4 v = load_matrices(places.raw + places.rope + half * 64 + j * 32);
          f[4 * j] = v.x, f[4 * j + 1] = v.y, f[4 * j + 2] = v.z, f[4 * j + 3] = v.w;
        }
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint2 v = load_shared_8(places.raw + r * (8 * R::BYTES) + chunk * 64 + t * 16 + half * 8);
          f[r] = e4m3_to_bfloat16(v.x), f[2 + r] = e4m3_to_bfloat16(v.x >> 16);
          f[4 + r] = e4m3_to_bfloat16(v.y), f[6 + r] = e4m3_to_bfloat16(v.y >> 16);
        }
      }
      float part[N];
      hold(f);
      wgmma_fence();
      const u64 operand = tile_descriptor(operands + half * 64, 1024, 16);
      wgmma_bfloat16(part, f, operand, 0);
      wgmma_bfloat16(part, f + 4, operand + 2, 1);
      wgmma_commit();
      wgmma_wait<0>();
      hold(part), hold(f);
#pragma unroll
      for (int e = 0; e < N; ++e) s[e] = fmaf(part[e], factors[e >> 1 & 1], s[e]);
      if (!value) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = scales[r] * R::FACTOR, upper = __uint_as_float(__float_as_uint(factor) & 0xffff0000u);
        const u32 both = pack_bfloat16(upper, upper), rest = pack_bfloat16(factor - upper, factor - upper);
#pragma unroll
        for (int i = r; i < 8; i += 2) f[i] = scaled_bfloat16<R::SCALES_APART>(f[i], both, rest);
      }
      const u32 place = (chunk < 4 ? places.values[0] : places.values[1]) + (chunk & 3) * CHUNK ^ half << 6;
      store_matrices(place, f[0], f[1], f[2], f[3]);
      store_matrices(place ^ 32, f[4], f[5], f[6], f[7]);
    }
    if (!value)
#pragma unroll
      for (int e = 0; e < N; ++e) s[e] *= load_shared_float(shared + L::COLUMNS + (e / 4 * 8 + (e & 1) + 2 * t) * 8);
    const u32 freed = here;
    here = next, next = later, later = freed;
  }
  named_barrier<BARRIER, 128>();  // no warp reads the weights' place any more
}
