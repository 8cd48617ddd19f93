// The parts of tokens that intervals of work have cut (`balance.cuh`), into those tokens' results, for SM90.
//
// Grid: (a few, workers - 1); y + 1 is a worker whose interval may begin inside of a token. The CTAs of all workers that
// begin in one token share its units, 128 dims of a head each. A unit is one warp's, or, of many parts, that of a team of
// warps, which add up some of the parts each. It is launched beside the kernel that writes the parts: CTAs take their
// places as that one's leave, and wait there for the last of them.

#include "parts.cuh"

struct Params {
  unsigned char* exchange;
  const float* attn_sink;  // null: none
  u16* out;
  float* lse;
  i64 out_token_stride, out_head_stride, lse_token_stride, lse_head_stride;
  int workers, num_heads;
};

constexpr int WARPS = 8, AT_ONCE = 8;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// How many of the records from `i` on, one every `step`, say that `token` is cut.
DEVICE int cuts_of(const int2* records, int workers, int token, int i, int step, int lane) {
  int count = 0;
  for (;;) {
    const int own = i + (count + lane) * step;
    bool cut = false;
    if (own >= 0 && own < workers) {
      const int2 record = records[own];
      cut = record.y && record.x == token;
    }
    const u32 others = ~__ballot_sync(~0u, cut);
    if (others) return count + __ffs(others) - 1;
    count += 32;
  }
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) merge_cuts(const __grid_constant__ Params p) {
  static_assert(THREADS == WARPS * 32, "a warp has 128 dims of a head");
  __shared__ __align__(16) float4 sums[WARPS][32];
  __shared__ float totals[WARPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, begin = blockIdx.y + 1;
  const Parts parts = parts_in(p.exchange, p.workers, p.num_heads);
  launch_dependents();
  wait_for_prerequisites();
  const int2 record = parts.records[begin];
  if (!record.y) return;
  const int token = record.x, before = cuts_of(parts.records, p.workers, token, begin - 1, -1, lane),
            first = begin - before, cuts = before + cuts_of(parts.records, p.workers, token, begin, 1, lane);
  // Part 0 is that of the worker in front of the first cut, which goes on; the others were begun before.
  auto slot_of = [&](int part) { return part == 0 ? p.workers + first - 1 : first + part - 1; };
  const int count = cuts + 1, team = count > 4 * AT_ONCE ? 8 : count > 2 * AT_ONCE ? 4 : count > AT_ONCE ? 2 : 1;
  const int teams = WARPS / team, member = warp % team, units = p.num_heads * 4;
#pragma unroll 1
  for (int from_unit = (before * gridDim.x + blockIdx.x) * teams; from_unit < units;
       from_unit += cuts * gridDim.x * teams) {
    const int unit = from_unit + warp / team, head = min(unit, units - 1) >> 2, dim = (unit & 3) * 128 + lane * 4;
    auto lse_of = [&](int part) { return load_float(parts.lse + slot_of(part) * p.num_heads + head); };
    float top = -INFINITY, total = 0.f;
    for (int part = lane; part < count; part += 32) top = fmaxf(top, lse_of(part));
#pragma unroll
    for (int step = 16; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (top == -INFINITY) top = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int from = member * AT_ONCE; from < count; from += team * AT_ONCE) {
      float4 v[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const i64 row = static_cast<i64>(slot_of(from + i)) * p.num_heads + head;
        v[i] = load_float4_if(from + i < count, parts.out + row * 512 + dim);
      }
      const int own = from + lane % AT_ONCE;
      const float weight_here = own < count ? exp2_approx((lse_of(own) - top) * LOG2_E) : 0.f;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float weight = __shfl_sync(~0u, weight_here, i);
        total += weight;
        const bool counts = weight != 0.f;  // what has no weight may be anything
        sum.x += counts ? v[i].x * weight : 0.f, sum.y += counts ? v[i].y * weight : 0.f;
        sum.z += counts ? v[i].z * weight : 0.f, sum.w += counts ? v[i].w * weight : 0.f;
      }
    }
    if (team > 1) {
      sums[warp][lane] = sum;
      if (lane == 0) totals[warp] = total;
      __syncthreads();
      for (int other = 1; member == 0 && other < team; ++other) {
        const float4 v = sums[warp + other][lane];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w, total += totals[warp + other];
      }
      __syncthreads();
    }
    if (member > 0 || unit >= units) continue;
    const float lse = total == 0.f ? -INFINITY : top + log2f(total) * LN_2;
    float factor = total == 0.f ? 0.f : __fdividef(1.f, total);
    if (p.attn_sink && total != 0.f) factor = __fdividef(factor, 1.f + exp2_approx((p.attn_sink[head] - lse) * LOG2_E));
    *reinterpret_cast<uint2*>(p.out + token * p.out_token_stride + head * p.out_head_stride + dim) =
        make_uint2(pack_bfloat16(sum.x * factor, sum.y * factor), pack_bfloat16(sum.z * factor, sum.w * factor));
    if (dim == 0) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = lse;
  }
}
