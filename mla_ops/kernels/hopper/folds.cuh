// All shares of a row by one CTA, which keeps their sum in registers: what parts in memory (`shares.cuh`) and packets of a
// cluster (`merge.cuh`) add up to, bit for bit. Tiles of 16 and 32 heads have the registers.
//
// A share's accumulators become float16 averages, as in a packet, and are added to the sum with the share's weight, in
// the order of shares. A cluster knows the row's highest running maximum before it adds; here the sum is relative to the
// highest up to now, and follows it. Running maxima are whole numbers, so this multiplies by powers of two, which commutes
// with the rounding of float32. It does not below 2^-126: a share whose scores lie 87 below another's may give other bits
// where all shares above it have averages of 0.
#pragma once

#include "shares.cuh"

// The factors that add a share: the inverse of its sum, its weight, what the sum up to now is multiplied by. A thread for
// each head finds them from its state.
template <class L>
DEVICE void weigh_fold(u32 shared, int head, float2 state, bool begins) {
  const u32 top_at = shared + L::FOLD_TOPS + head * 4;
  const float before = begins ? NO_SCORE_YET : load_shared_float(top_at), top = fmaxf(before, state.y),
              sum = fabsf(state.x);
  const float inverse = sum == 0.f ? 0.f : reciprocal_approx(sum),
              weight = state.x * (sum == 0.f ? 0.f : exp2_approx(state.y - top));
  store_shared_float(top_at, top);
  store_shared_16(shared + L::FOLD + head * 16, __float_as_uint(inverse), __float_as_uint(fabsf(weight)),
                  __float_as_uint(exp2_approx(before - top)), __float_as_uint(state.x) >> 31);
}

// The end of a share, by a thread for each head; at the row's end its lse and the factor of its result, too.
template <class L>
DEVICE void end_fold(const Params& p, const Row& row, u32 shared, int head, float2 state) {
  weigh_fold<L>(shared, head, state, begins_row(p, row));
  const u32 states = shared + L::FOLD_STATES + head * 8;
  store_shared_float2(states + row.rank * (L::HEADS * 8), state.x, state.y);
  if (!ends_row(p, row)) return;
  const int global_head = row.tile * L::HEADS + head;
  const bool there = global_head < p.num_heads;
  const float sink = p.attn_sink && there ? __ldg(p.attn_sink + global_head) : -INFINITY;
  float2 all[MOST_SHARES];
#pragma unroll
  for (int s = 0; s < MOST_SHARES; ++s) {
    all[s] = make_float2(0.f, NO_SCORE_YET);
    if (s < p.shares) all[s] = load_shared_float2(states + s * (L::HEADS * 8));
  }
  const Weights<MOST_SHARES> weights = weigh_shares<L>(all, sink);
  if (there) p.lse[row.token * p.lse_token_stride + global_head * p.lse_head_stride] = weights.lse;
  store_shared_float(shared + L::COLUMNS + head * 8, weights.whole);
}

// Adds a share's accumulators to the sum of those before it.
template <class L, int PIECES, int N>
DEVICE void fold(float (&sums)[PIECES][N], const float (&o)[PIECES][N], u32 shared, int lane, bool begins) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const u32 from = shared + L::FOLD + (j * 8 + (lane & 3) * 2) * 16;
    const uint4 first = load_shared_16(from), second = load_shared_16(from + 16);  // heads
    const bool bfloat16 = first.w != 0;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
      for (int e = j * 4; e < j * 4 + 4; e += 2) {
        const float a = o[piece][e] * __uint_as_float(first.x), b = o[piece][e + 1] * __uint_as_float(second.x);
        const float2 average = unpack(bfloat16 ? pack_bfloat16(a, b) : pack_float16(a, b), bfloat16);
        float2 before = make_float2(0.f, 0.f);
        if (!begins)
          before = make_float2(sums[piece][e] * __uint_as_float(first.z),
                               sums[piece][e + 1] * __uint_as_float(second.z));
        sums[piece][e] = fmaf(average.x, __uint_as_float(first.y), before.x);
        sums[piece][e + 1] = fmaf(average.y, __uint_as_float(second.y), before.y);
      }
  }
}
