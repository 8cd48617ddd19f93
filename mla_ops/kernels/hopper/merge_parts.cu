// The parts of rows whose keys several clusters share, into those rows, for SM90.
//
// Grid: (tokens, heads); a CTA has a row, a thread four of its dims. All parts' values are requested before their
// weights are known. It is launched beside the kernel that writes the parts: CTAs take their places as that one's
// leave, and wait there for the last of them.

#include "ptx.cuh"

struct Params {
  const float* outs;  // [parts, tokens, heads, 512]
  const float* lses;  // [parts, tokens, heads]; -inf, or +inf as some kernels have it: a part without keys
  u16* out;    // [tokens, heads, 512]
  float* lse;  // [tokens, heads]
  i64 out_token_stride, out_head_stride, lse_token_stride, lse_head_stride;
  int num_rows, parts;
  const int* balanced;  // whether another launch has these rows; null: none has
};

constexpr int THREADS = 128;

template <int MAX_PARTS>
__global__ void __launch_bounds__(THREADS) merge_parts(const __grid_constant__ Params p) {
  __shared__ __align__(16) float lses[MAX_PARTS];
  const int thread = threadIdx.x, token = blockIdx.x, head = blockIdx.y, row = token * gridDim.y + head;
  const i64 part_stride = static_cast<i64>(p.num_rows) * THREADS * 4;
  const float* from = p.outs + static_cast<i64>(row) * THREADS * 4 + thread * 4;
  const float* own = p.lses + static_cast<i64>(thread) * p.num_rows + row;
  hold(from), hold(own);
  wait_for_prerequisites();
  if (p.balanced && *p.balanced) return;
  float4 v[MAX_PARTS];
  if (thread < MAX_PARTS) {
    const float lse = thread < p.parts ? load_float(own) : -INFINITY;
    lses[thread] = lse == INFINITY ? -INFINITY : lse;
  }
#pragma unroll
  for (int i = 0; i < MAX_PARTS; ++i) v[i] = load_float4_if(i < p.parts, from + i * part_stride);
  __syncthreads();
  float weight[MAX_PARTS], top = -INFINITY, total = 0.f;
#pragma unroll
  for (int i = 0; i < MAX_PARTS; ++i) weight[i] = lses[i], top = fmaxf(top, weight[i]);
  if (top == -INFINITY) top = 0.f;
#pragma unroll
  for (int i = 0; i < MAX_PARTS; ++i) {
    weight[i] = exp2_approx((weight[i] - top) * 1.4426950408889634f);
    total += weight[i];
  }
  const float factor = total == 0.f ? 0.f : __fdividef(1.f, total);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < MAX_PARTS; ++i) {
    const bool counts = weight[i] != 0.f;  // a part without weight may hold anything
    sum.x += counts ? v[i].x * weight[i] : 0.f, sum.y += counts ? v[i].y * weight[i] : 0.f;
    sum.z += counts ? v[i].z * weight[i] : 0.f, sum.w += counts ? v[i].w * weight[i] : 0.f;
  }
  *reinterpret_cast<uint2*>(p.out + token * p.out_token_stride + head * p.out_head_stride + thread * 4) =
      make_uint2(pack_bfloat16(sum.x * factor, sum.y * factor), pack_bfloat16(sum.z * factor, sum.w * factor));
  if (thread == 0)
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] =
        total == 0.f ? -INFINITY : top + log2f(total) * 0.6931471805599453f;
}
