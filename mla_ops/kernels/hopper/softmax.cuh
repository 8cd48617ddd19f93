// Reductions of the softmax over a row's keys among the threads of a warpgroup. Each thread has two keys of a turn.
#pragma once

#include "layout.cuh"

// N values in lanes that differ in BIT become half as many each: the lower lane keeps the first ones, the other the
// rest.
template <int BIT, int N, int M, class Combine>
DEVICE void fold(float (&values)[M], int lane, Combine combine) {
  const bool upper = lane & BIT;
#pragma unroll
  for (int c = 0; c < N / 2; ++c) {
    const float away = __shfl_xor_sync(~0u, upper ? values[c] : values[N / 2 + c], BIT);
    values[c] = combine(upper ? values[N / 2 + c] : values[c], away);
  }
}

// Writes one value for each head to shared memory, of all keys of a warp. A lane has heads 8 j + 2 t and 8 j + 2 t + 1.
template <int HEADS, class Combine>
DEVICE void store_folded(float (&values)[HEADS / 4], u32 place, int lane, Combine combine) {
  const int t = lane & 3, b = lane >> 2 & 1;
  fold<16, HEADS / 4>(values, lane, combine);
  if constexpr (HEADS != 24) fold<8, HEADS / 8>(values, lane, combine);
  if constexpr (HEADS == 24) {
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      values[c] = combine(values[c], __shfl_xor_sync(~0u, values[c], 8));
      values[c] = combine(values[c], __shfl_xor_sync(~0u, values[c], 4));
      const int n = (lane >> 4) * 3 + c;
      if ((lane & 12) == 0) store_shared_float(place + ((n >> 1) * 8 + 2 * t + (n & 1)) * 4, values[c]);
    }
  } else if constexpr (HEADS == 16) {
    values[0] = combine(values[0], __shfl_xor_sync(~0u, values[0], 4));
    if (b == 0) store_shared_float(place + ((lane >> 4) * 8 + 2 * t + (lane >> 3 & 1)) * 4, values[0]);
  } else if constexpr (HEADS == 32) {
    fold<4, 2>(values, lane, combine);
    store_shared_float(place + ((lane >> 3) * 8 + 2 * t + b) * 4, values[0]);
  } else {
    fold<4, 4>(values, lane, combine);
    store_shared_float2(place + ((lane >> 2) * 8 + 2 * t) * 4, values[0], values[1]);
  }
}

template <int N>
DEVICE void negate(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = -values[i];
}

// The sums of a warp's weights.
template <int HEADS>
DEVICE void store_sums(float (&sums)[HEADS / 4], u32 place, int lane) {
  store_folded<HEADS>(sums, place, lane, [](float a, float b) { return a + b; });
}

// The sum of a head over the four warps, at `place` as `store_sums` left them.
template <int HEADS>
DEVICE float sum_of(u32 place, int head) {
  float part[4];
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) part[warp] = load_shared_float(place + (warp * HEADS + head) * 4);
  return part[0] + part[1] + (part[2] + part[3]);
}

// A turn in which a score exceeds its head's running maximum by far, or the first with keys: `s` holds scores relative to the
// old running maxima, and is made relative to the new, which `alpha` says how to reach. Those of heads that have no score
// above `least` stay. With WHOLE_RUNNING_MAX they are whole numbers: what is relative to one becomes relative to another without an
// error (`folds.cuh`). With others the largest weight is a power of two, so that the weights of equal keys are not rounded.
template <class L>
DEVICE void raise_running_max(float (&s)[L::HEADS / 2], float (&sums)[L::HEADS / 4], bool seen, float least, u32 shared,
                             int thread) {
  constexpr int HEADS = L::HEADS, TILES = HEADS / 8;
  thread = opaque(thread);
  const int lane = thread & 31, first = 2 * (lane & 3);
  const u32 tops = shared + L::WEIGHTS,
            rises = tops + HEADS * 16;  // float [4, HEADS] and [HEADS], where no weights are
  float top[TILES * 2];
#pragma unroll
  for (int c = 0; c < TILES * 2; ++c) top[c] = fmaxf(s[c / 2 * 4 + (c & 1)], s[c / 2 * 4 + (c & 1) + 2]);
  store_folded<HEADS>(top, tops + thread / 32 * (HEADS * 4), lane, [](float a, float b) { return fmaxf(a, b); });
  named_barrier<SCORE_BARRIER, 128>();
  if (thread < HEADS) {
    float top = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) top = fmaxf(top, load_shared_float(tops + (warp * HEADS + thread) * 4));
    const float raised = top - RAISED_TO, rise = seen && !(top > least) ? 0.f : L::WHOLE_RUNNING_MAX ? floorf(raised) : raised;
    const u32 running_max = shared + L::COLUMNS + thread * 8 + 4;
    store_shared_float(running_max, load_shared_float(running_max) + rise);
    store_shared_float(rises + thread * 4, rise);
    store_shared_float(shared + L::ALPHA + thread * 4, seen ? exp2_approx(-rise) : 0.f);
  }
  named_barrier<SCORE_BARRIER, 128>();
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    const float2 rise = load_shared_float2(rises + (8 * j + first) * 4),
                 alpha = load_shared_float2(shared + L::ALPHA + (8 * j + first) * 4);
    sums[2 * j] *= alpha.x, sums[2 * j + 1] *= alpha.y;
    s[4 * j] -= rise.x, s[4 * j + 1] -= rise.y, s[4 * j + 2] -= rise.x, s[4 * j + 3] -= rise.y;
  }
  named_barrier<SCORE_BARRIER, 128>();
}
