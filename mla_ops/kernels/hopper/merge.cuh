// The end of a row: partial results of a cluster into one.
#pragma once

#include "layout.cuh"

constexpr int MAX_SPLITS = 16;

// The lse of a head whose parts' (sum, reference) lie in the lanes of a half warp, and what this lane's part counts.
template <class L>
DEVICE float merge_head(const Params& p, int global_head, float2 part, float& factor) {
  float reference = part.y;
#pragma unroll
  for (int step = MAX_SPLITS / 2; step; step >>= 1) reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
  factor = part.x == 0.f ? 0.f : exp2_approx(part.y - reference);
  float total = part.x == 0.f ? 0.f : part.x * factor;
#pragma unroll
  for (int step = MAX_SPLITS / 2; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
  const float lse = total == 0.f ? -INFINITY : (reference + log2f(total)) * 0.6931471805599453f;
  float weight = 1.f / L::FACTOR / total;
  if (p.attn_sink && global_head < p.num_heads) weight /= 1.f + expf(__ldg(p.attn_sink + global_head) - lse);
  if (factor != 0.f) factor *= weight;
  return lse;
}

// The parts of all tokens one after the other.
DEVICE i64 result_row(const Params& p, const Row& row) { return row.part * p.num_tokens + row.token; }

DEVICE u16* out_row(const Params& p, const Row& row, int global_head) {
  return p.out + row.token * p.out_token_stride + global_head * p.out_head_stride;
}

// Partial results lie as float32 [HEADS, 512] in units of 16 bytes, permuted so that the lanes of a store meet
// different banks.
template <class L>
DEVICE u32 partial_unit(u32 shared, int head, int unit) {
  const int place = L::HEADS == 64 ? unit ^ (unit >> 3 & 1) : unit ^ (head >> 1 & 3);
  return shared + L::PARTIAL + head * L::PARTIAL_PITCH + place * 16;
}

// Once every CTA's sums and partial results are there, each adds up its share of all heads; all threads but those that
// gather come here.
template <class L, int WORKERS = 384>
DEVICE void finish(const Params& p, const Row& row, u32 shared, int worker) {
  constexpr int HEADS = L::HEADS;
  constexpr int UNITS = HEADS * 128;
  named_barrier<RESULT_BARRIER, WORKERS>();
  if (row.splits > 1) {
    cluster_arrive(worker < 32);
    cluster_wait();
  }
  const int lane = worker & 31, first = UNITS * row.rank / row.splits, last = UNITS * (row.rank + 1) / row.splits;
  for (int head = first / 128 + worker / 32; head * 128 < last; head += WORKERS / 32) {
    float2 part = make_float2(0.f, NO_SCORE_YET);
    if ((lane & 15) < row.splits) part = load_peer_float2(peer_address(shared + L::COLUMNS + head * 8, lane & 15));
    float factor;
    const int global_head = row.tile * HEADS + head;
    const float lse = merge_head<L>(p, global_head, part, factor);
    if (lane < MAX_SPLITS) store_shared_float(shared + L::FACTORS + (head * MAX_SPLITS + lane) * 4, factor);
    if (lane == 0 && head * 128 >= first && global_head < p.num_heads)
      p.lse[result_row(p, row) * p.lse_token_stride + global_head * p.lse_head_stride] = lse;
  }
  named_barrier<RESULT_BARRIER, WORKERS>();
  for (int unit = first + worker; unit < last; unit += WORKERS) {
    const int head = unit >> 7, global_head = row.tile * HEADS + head;
    const u32 own = partial_unit<L>(shared, head, unit & 127), factors = shared + L::FACTORS + head * (MAX_SPLITS * 4);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    // Each CTA begins with its own part, so that not all read from the same one at a time.
    for (int r = 0; r < row.splits; r += 8) {
      float4 v[8];
      float factor[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const bool there = r + k < row.splits;
        const int next = row.rank + r + k, part = there && next >= row.splits ? next - row.splits : next;
        v[k] = load_peer_float4_if(there, peer_address(own, there ? part : 0));
        factor[k] = there ? load_shared_float(factors + part * 4) : 0.f;
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        sum.x = fmaf(v[k].x, factor[k], sum.x), sum.y = fmaf(v[k].y, factor[k], sum.y);
        sum.z = fmaf(v[k].z, factor[k], sum.z), sum.w = fmaf(v[k].w, factor[k], sum.w);
      }
    }
    if (global_head >= p.num_heads) continue;
    const i64 place = result_row(p, row) * p.out_token_stride + global_head * p.out_head_stride + (unit & 127) * 4;
    if (p.parts > 1)
      reinterpret_cast<float4*>(p.out)[place / 4] = sum;
    else
      *reinterpret_cast<uint2*>(p.out + place) = make_uint2(pack_bfloat16(sum.x, sum.y), pack_bfloat16(sum.z, sum.w));
  }
  if (row.splits > 1) {  // nobody reads this CTA's shared memory any more
    cluster_arrive(false);
    cluster_wait();
  }
}

// For warps that have no part in `finish`: its two barriers of the cluster.
DEVICE void stand_by(const Row& row) {
  if (row.splits == 1) return;
  cluster_arrive(false), cluster_wait();
  cluster_arrive(false), cluster_wait();
}
