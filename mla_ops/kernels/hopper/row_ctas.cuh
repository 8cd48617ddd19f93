// Rows of a launch of few tokens by their lengths: a row has a CTA, or a cluster, for every `quota` of its turns, one at
// least, and these are neighbours. The quota is about the least for which there are enough. Where rows are about as long,
// they go by the launch's shape instead. Who works on a part and who merges them find the same, each warp by itself: no
// product may become a fused one in one kernel only.
#pragma once

#include "ptx.cuh"

constexpr int MOST_ROWS = 32;  // a lane of a warp each
constexpr int MOST_CTAS = 256;  // or clusters

struct CtasOfRow {
  int first, count;  // of this lane's row
  bool by_shape;     // nobody goes by lengths
};

// A lane's row has so many `turns`, 0 past the last one; the quota is `least` or more. `longest`, `margin`: numbers of the
// launch; rows go by its shape unless `longest` times the longest row is more than the quota and the margin. All lanes of a
// warp call this.
DEVICE CtasOfRow ctas_by_length(int turns, int num_rows, int num_ctas, int least, float longest, float margin, int lane) {
  const float own = turns, ctas = num_ctas, most = __reduce_max_sync(~0u, turns);
  float quota = max(static_cast<float>(least), __fdividef(static_cast<float>(__reduce_add_sync(~0u, turns)), ctas));
  int count;
#pragma unroll 1
  for (;;) {
    // Less a little, so that a whole number of quotas is not rounded up.
    const int needed = max(1, static_cast<int>(ceilf(__fadd_rn(__fdividef(own, quota), -0.01f))));
    count = lane < num_rows ? needed : 0;
    const int too_many = __reduce_add_sync(~0u, count) - num_ctas;
    if (too_many <= 0) break;
    quota = __fmul_rn(quota, __fadd_rn(1.f, __fdividef(__fmul_rn(0.5f, too_many), ctas)));
  }
  const bool by_length = __fmul_rn(most, longest) > __fadd_rn(quota, margin);
  if (__reduce_max_sync(~0u, by_length) == 0) return {0, 0, true};
  int after = count;
#pragma unroll 1
  for (int step = 1; step < 32; step <<= 1) {
    const int below = __shfl_up_sync(~0u, after, step);
    if (lane >= step) after += below;
  }
  return {after - count, count, false};
}
