// The parts of rows whose keys several clusters share, into those rows, for SM90. `merge_parts`: of rows that have as many
// each; `merge_by_length`: of rows that have as many as their length asks for (`row_ctas.cuh`).
//
// Grid of `merge_parts`: (tokens, heads); a CTA has a row, a thread four of its dims. All parts' values are requested
// before their weights are known. It is launched beside the kernel that writes the parts: CTAs take their places as that one's
// leave, and wait there for the last of them.

#include "code.cuh"
#include "row_ctas.cuh"

struct Params {
  const float* outs;  // [parts, tokens, heads, 512]
  const float* lses;  // [parts, tokens, heads]; -inf, or +inf as some kernels have it: a part without keys
  u16* out;    // [tokens, heads, 512]
  float* lse;  // [tokens, heads]
  i64 out_token_stride, out_head_stride, lse_token_stride, lse_head_stride;
  int num_rows, parts;
  const int* balanced;  // whether another launch has these rows; null: none has
  // By which rows have parts, so many in all: numbers of the launch, and keys of each token in two caches.
  float longest, margin;
  int splits;
  const int* topk_length[2];
  int topk[2];
  int num_tokens, heads;
};

constexpr int LOG_THREADS = 7, THREADS = 1 << LOG_THREADS;  // of a group
constexpr int MERGE_GROUPS = 4;  // of a CTA of `merge_by_length`

// A row's sum by weights relative to `top`, of which a thread has four dims, and their `total`.
DEVICE void write_row(const Params& p, int token, int head, int thread, const float4& sum, float top, float total) {
  hold(token), hold(head);  // else addresses take registers while parts come
  const float factor = total == 0.f ? 0.f : __fdividef(1.f, total);
  *reinterpret_cast<uint2*>(p.out + token * p.out_token_stride + head * p.out_head_stride + thread * 4) =
      make_uint2(pack_bfloat16(sum.x * factor, sum.y * factor), pack_bfloat16(sum.z * factor, sum.w * factor));
  if (thread == 0)
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] =
        total == 0.f ? -INFINITY : top + log2f(total) * 0.6931471805599453f;
}

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
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < MAX_PARTS; ++i) {
    const bool counts = weight[i] != 0.f;  // a part without weight may hold anything
    sum.x += counts ? v[i].x * weight[i] : 0.f, sum.y += counts ? v[i].y * weight[i] : 0.f;
    sum.z += counts ? v[i].z * weight[i] : 0.f, sum.w += counts ? v[i].w * weight[i] : 0.f;
  }
  write_row(p, token, head, thread, sum, top, total);
}

constexpr int AT_ONCE = 8;  // values of a thread on their way
constexpr int MANY_AT_ONCE = 7;  // the same of many parts
constexpr int LOG_SLICES = 2, MOST_SLICES = 1 << LOG_SLICES;  // of a head's dims

// Merges some heads of a row that has few parts, by one group of threads.
template <int HEADS>
DEVICE void merge_few(const Params& p, int token, int head, int first, int count, int thread) {
  constexpr int PARTS = AT_ONCE / HEADS;
  const i64 stride = static_cast<i64>(p.heads) * THREADS * 4;
  float4 v[HEADS][PARTS];
  float weight[HEADS][PARTS];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    const int own = min(head + h, p.heads - 1);
    const float* const from = p.outs + first * stride + (own * THREADS + thread) * 4;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) v[h][i] = load_float4_if(i < count, from + i * stride);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      weight[h][i] = load_float_if(i < count, p.lses + (first + i) * p.heads + own);
      if (weight[h][i] == INFINITY) weight[h][i] = -INFINITY;
    }
  }
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    float top = -INFINITY, total = 0.f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) top = fmaxf(top, weight[h][i]);
    if (top == -INFINITY) top = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const float own = exp2_approx((weight[h][i] - top) * 1.4426950408889634f);
      total += own;
      const bool counts = own != 0.f;  // a part without weight may hold anything
      sum.x += counts ? v[h][i].x * own : 0.f, sum.y += counts ? v[h][i].y * own : 0.f;
      sum.z += counts ? v[h][i].z * own : 0.f, sum.w += counts ? v[h][i].w * own : 0.f;
    }
    if (head + h < p.heads) write_row(p, token, head + h, thread, sum, top, total);
  }
}

// Merges a head of a row that has many parts, or a slice of its dims, by a team of so many groups: a member has a thread
// for each four dims, and adds up every so many-th part.
DEVICE void merge_many(const Params& p, int token, int head, int slice, int log_slices, int first, int count, int groups,
                       int group) {
  __shared__ float lses[MERGE_GROUPS][MOST_CTAS], totals[MERGE_GROUPS * MOST_SLICES];
  __shared__ float4 sums[MERGE_GROUPS * THREADS];
  const int team = group / groups, width = THREADS >> log_slices, members = groups << log_slices,
            within = group % groups * THREADS + thread_here() % THREADS, member = within >> LOG_THREADS - log_slices,
            column = within & width - 1;
  auto all_of_team = [&]() { named_barrier(1 + team, groups * THREADS); };
  const i64 stride = static_cast<i64>(p.heads) * THREADS * 4;
  const float* const from = p.outs + (first + member) * stride + (head * THREADS + slice * width + column) * 4;
  float4 v[MANY_AT_ONCE];
  auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < MANY_AT_ONCE; ++i) {
      const int part = (begin + i) * members;
      v[i] = load_float4_if(part + member < count, from + part * stride);
    }
  };
  float top = -INFINITY, total = 0.f;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int begin = 0; begin * members < count; begin += MANY_AT_ONCE) {
    load(begin);
    if (begin == 0) {
#pragma unroll 1
      for (int part = within; part < count; part += groups * THREADS) {
        const float lse = load_float(p.lses + (first + part) * p.heads + head);
        lses[team][part] = lse == INFINITY ? -INFINITY : lse;
      }
      all_of_team();
#pragma unroll 1
      for (int part = lane_here(); part < count; part += 32) top = fmaxf(top, lses[team][part]);
#pragma unroll
      for (int step = 16; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      if (top == -INFINITY) top = 0.f;
    }
#pragma unroll
    for (int i = 0; i < MANY_AT_ONCE; ++i) {
      const int part = (begin + i) * members + member;
      const float weight = part < count ? exp2_approx((lses[team][part] - top) * 1.4426950408889634f) : 0.f;
      total += weight;
      const bool counts = weight != 0.f;
      sum.x += counts ? v[i].x * weight : 0.f, sum.y += counts ? v[i].y * weight : 0.f;
      sum.z += counts ? v[i].z * weight : 0.f, sum.w += counts ? v[i].w * weight : 0.f;
    }
  }
  const int base = team * groups;
  if (member) sums[base * THREADS + within] = sum;
  if (column == 0) totals[base * MOST_SLICES + member] = total;
  all_of_team();
  if (member) return;
#pragma unroll 3
  for (int other = 1; other < members; ++other) {
    const float4 more = sums[base * THREADS + other * width + within];
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w, total += totals[base * MOST_SLICES + other];
  }
  write_row(p, token, head, slice * width + column, sum, top, total);
}

// The binary logarithm of the heads of a task of a row with so many parts.
DEVICE int log_heads(int count) {
  return count <= 2 ? 4 : count <= 4 ? 3 : count <= AT_ONCE ? 2 : count <= 2 * MANY_AT_ONCE ? 1 : 0;
}

// The binary logarithm of the slices of a head's dims: a task has one where a thread of a whole head had more parts than
// come at once.
DEVICE int log_slices_of(int count) { return count <= MERGE_GROUPS * MANY_AT_ONCE ? 0 : LOG_SLICES; }

// A task is some heads of a row, or a slice of one, for the groups of threads of a CTA: more heads where the row has fewer parts. There are
// no more CTAs than run at one time: where rows went by the launch's shape, all have come and gone before it ends, but
// one, which stays for it.
__global__ void __launch_bounds__(MERGE_GROUPS* THREADS, 2) merge_by_length(const __grid_constant__ Params p) {
  prefetch_code<THREADS>();
  const int thread = threadIdx.x % THREADS, group = __shfl_sync(~0u, threadIdx.x / THREADS, 0), lane = lane_here();
  int turns = 0;
#pragma unroll
  for (int cache = 0; cache < 2; ++cache) {
    int length = lane < p.num_tokens ? p.topk[cache] : 0;
    if (p.topk_length[cache] && lane < p.num_tokens) length = max(0, min(length, __ldg(p.topk_length[cache] + lane)));
    turns += (length + 63) / 64;
  }
  const CtasOfRow ctas = ctas_by_length(turns, p.num_tokens, p.parts, p.splits, p.longest, p.margin, lane);
  if (ctas.by_shape) {
    if (blockIdx.x == 0) wait_for_prerequisites();
    return;
  }
  auto tasks_of = [&](int count) { return (p.heads - 1 >> log_heads(count)) + 1 << log_slices_of(count); };
  __shared__ int ends[MOST_ROWS], parts[MOST_ROWS];  // tasks of rows up to each; else registers do not suffice
  int after = lane < p.num_tokens ? tasks_of(ctas.count) : 0;
#pragma unroll 1
  for (int step = 1; step < 32; step <<= 1) {
    const int below = __shfl_up_sync(~0u, after, step);
    if (lane >= step) after += below;
  }
  if (group == 0) ends[lane] = after, parts[lane] = ctas.first | ctas.count << 16;
  __syncthreads();
#pragma unroll 1
  for (int task = blockIdx.x; task < ends[MOST_ROWS - 1]; task += gridDim.x) {
    const int token = __popc(__ballot_sync(~0u, ends[lane] <= task)), own_parts = parts[token],
              first = own_parts & 0xffff, count = own_parts >> 16, log = log_heads(count),
              log_slices = log_slices_of(count), number = task - ends[token] + tasks_of(count),
              head = number >> log_slices << log;
    wait_for_prerequisites();
    if (log < 2) {
      const int own = head + (group >> 2 - log);
      if (own < p.heads)
        merge_many(p, token, own, number & (1 << log_slices) - 1, log_slices, first, count, MERGE_GROUPS >> log, group);
      __syncthreads();
      continue;
    }
    const int own = head + (group << log - 2);
    if (own >= p.heads) continue;
    if (log == 4)
      merge_few<4>(p, token, own, first, count, thread);
    else if (log == 3)
      merge_few<2>(p, token, own, first, count, thread);
    else
      merge_few<1>(p, token, own, first, count, thread);
  }
}
