// The parts of rows whose 64 heads CTAs have taken alone, as many as a row's length asks for (`row_ctas.cuh`), into those
// rows, for SM90.
//
// A part is 16-bit averages in units of 16 bytes of each lane, as `leave_part` stores them. A warp has a unit of a row and
// a tile of its heads, or the warps of a team have some of its parts each. Teams are larger where rows have more parts. A
// task is what a CTA does at a time, for one row. It is launched beside the kernel that writes the parts. Where rows went by
// that launch's shape, all CTAs have come and gone before it ends, but one, which stays for it.

#define BY_LENGTH 1
#include "code.cuh"
#include "cuts.cuh"

constexpr int MERGE_WARPS = 16, PARTS_AT_ONCE = 8;

// ONE_HEAD: a lane's values of a unit are one head's (fp8), else two heads' (bfloat16).
template <bool ONE_HEAD>
struct UnitTile {
  static constexpr int HEADS = 64;
  using Packet = Packets<64, ONE_HEAD>;
};

// A lane's sums of a unit relative to the largest lse of each of its heads.
template <class L>
struct UnitSums {
  static constexpr int SLOTS = L::Packet::ONE_HEAD ? 1 : 2, VALUES = PartUnits<L>::VALUES;
  float top[SLOTS], total[SLOTS], sum[VALUES];

  DEVICE UnitSums() {
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) top[i] = NO_SCORE_YET, total[i] = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sum[i] = 0.f;
  }

  // Moves the references to others, or to larger ones; what makes up for it.
  DEVICE void raise(const float (&to)[SLOTS]) {
    float factor[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i)
      factor[i] = exp2_approx((top[i] - to[i]) * LOG2_E), top[i] = to[i], total[i] *= factor[i];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sum[i] *= factor[is_second<L>(i) ? SLOTS - 1 : 0];
  }
};

// A warp's part of a task: a unit of a row and a tile, or some of its parts.
struct UnitTask {
  int token, tile, unit, member, members, first, count;
};

// Does it by all warps of a CTA. Of no parts it writes nothing.
template <class L>
DEVICE void merge_task(const Params& p, const Parts& parts, const UnitTask& task, int warp, int lane) {
  using U = PartUnits<L>;
  using Sums = UnitSums<L>;
  constexpr int SLOTS = Sums::SLOTS, WORDS = SLOTS * 2 + Sums::VALUES, UNITS = 8 * U::OF_A_WARP;
  __shared__ float others[MERGE_WARPS][WORDS][32];
  const int token = task.token, tile = task.tile, unit = task.unit, member = task.member, members = task.members,
            first = task.first, count = task.count;
  const i64 stride = static_cast<i64>(p.head_tiles) * UNITS * 32;  // from part to part
  const int eighth = unit / U::OF_A_WARP, own = unit % U::OF_A_WARP, number = own / U::OF_A_PACKET,
            head = head_of_packet<L>(number, eighth, lane), global_head = tile * 64 + head;
  const float4* const from = parts.out + first * stride + (static_cast<i64>(tile) * UNITS + unit) * 32 + lane;
  const float2* const states = parts.heads + first * p.num_heads;
  int heads[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) heads[i] = min(global_head + i * 8, p.num_heads - 1);
  Sums sums;
  int begin = member;
#pragma unroll 1
  do {
    uint4 v[PARTS_AT_ONCE];
    float2 state[PARTS_AT_ONCE][SLOTS];
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; ++i) {
      const int part = max(0, min(begin + i * members, count - 1));
      v[i] = load_l2_16(from + part * stride);
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        const uint2 words = load_l2_8(states + part * p.num_heads + heads[slot]);
        const bool there = begin + i * members < count;
        state[i][slot] = make_float2(there ? __uint_as_float(words.x) : -INFINITY, __uint_as_float(words.y));
      }
    }
    float top[SLOTS];
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      top[slot] = sums.top[slot];
#pragma unroll
      for (int i = 0; i < PARTS_AT_ONCE; ++i) top[slot] = fmaxf(top[slot], state[i][slot].x);
    }
    sums.raise(top);
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; ++i) {
      float weight[SLOTS];
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        const float part = exp2_approx((state[i][slot].x - top[slot]) * LOG2_E);
        sums.total[slot] += part;
        weight[slot] = part == 0.f ? 0.f : part * state[i][slot].y;
      }
      add_unit<L>(sums.sum, v[i], weight[0], weight[SLOTS - 1]);
    }
    begin += members * PARTS_AT_ONCE;
  } while (begin < count);
  if (members > 1) {
    auto place = [&](int of, int word) -> float& { return others[of][word][lane]; };
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) place(warp, i) = sums.top[i], place(warp, SLOTS + i) = sums.total[i];
#pragma unroll
    for (int i = 0; i < Sums::VALUES; ++i) place(warp, 2 * SLOTS + i) = sums.sum[i];
    __syncthreads();
    if (member == 0) {
      float top[SLOTS];
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) top[i] = sums.top[i];
#pragma unroll 1
      for (int other = 1; other < members; ++other)
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) top[i] = fmaxf(top[i], place(warp + other, i));
      sums.raise(top);
#pragma unroll 1
      for (int other = 1; other < members; ++other) {
        float factor[SLOTS];
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
          factor[i] = exp2_approx((place(warp + other, i) - top[i]) * LOG2_E);
          sums.total[i] += place(warp + other, SLOTS + i) * factor[i];
        }
#pragma unroll
        for (int i = 0; i < Sums::VALUES; ++i)
          sums.sum[i] += place(warp + other, 2 * SLOTS + i) * factor[is_second<L>(i) ? SLOTS - 1 : 0];
      }
    }
    __syncthreads();
    if (member) return;
  }
  Row row;
  row.token = token, row.tile = tile, row.part = 0;
  Target to = target_of<L>(p, row);
  if (count == 0) to.heads = 0;
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    const int of_row = global_head + i * 8;
    const bool there = count && of_row < p.num_heads, none = sums.total[i] == 0.f,
               tells = eighth < 4 && number < 2 / SLOTS && own % U::OF_A_PACKET == 0 && lane % 4 == 0;
    const float lse = none ? -INFINITY : sums.top[i] + log2_approx(sums.total[i]) * LN_2,
                sink = p.attn_sink && there ? __ldg(p.attn_sink + of_row) : -INFINITY;
    if (there && tells) p.lse[token * p.lse_token_stride + of_row * p.lse_head_stride] = lse;
    sums.total[i] = none ? 0.f : __fdividef(1.f, sums.total[i]);
    if (sink != -INFINITY && !none) sums.total[i] = __fdividef(sums.total[i], 1.f + exp2_approx((sink - lse) * LOG2_E));
  }
#pragma unroll
  for (int i = 0; i < Sums::VALUES; ++i) sums.sum[i] *= sums.total[is_second<L>(i) ? SLOTS - 1 : 0];
  converge();
  write_unit<L>(to, sums.sum, number, own % U::OF_A_PACKET, eighth, lane);
}

template <bool ONE_HEAD>
__global__ void __launch_bounds__(MERGE_WARPS * 32, 1) merge_units(const __grid_constant__ Params p) {
  using L = UnitTile<ONE_HEAD>;
  constexpr int UNITS = 8 * PartUnits<L>::OF_A_WARP;
  prefetch_code<32>();
  const int lane = lane_here(), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int turns = lane < p.num_tokens ? turns_of(p, lane) : 0;
  const CtasOfRow ctas = ctas_by_length(turns, p.num_tokens, p.parts, 1, p.longest, p.margin, lane);
  if (ctas.by_shape) {
    if (blockIdx.x == 0) wait_for_prerequisites();
    return;
  }
  int team = 1;  // warps of a team
#pragma unroll 1
  while (team < MERGE_WARPS && team * PARTS_AT_ONCE < ctas.count) team *= 2;
  const int tasks = lane < p.num_tokens ? p.head_tiles * (UNITS / MERGE_WARPS) * team : 0;
  int after = tasks;
#pragma unroll 1
  for (int step = 1; step < 32; step <<= 1) {
    const int below = __shfl_up_sync(~0u, after, step);
    if (lane >= step) after += below;
  }
  const int all_tasks = __shfl_sync(~0u, after, 31);
  const Parts parts = parts_of(p);
  // The first task without its parts, while these are being written: what it executes comes from memory.
  bool rehearses = true;
#pragma unroll 1
  for (int task = blockIdx.x; task < all_tasks;) {
    const int token = __popc(__ballot_sync(~0u, after <= task));
    const int count = __shfl_sync(~0u, ctas.count, token), first = __shfl_sync(~0u, ctas.first, token),
              members = __shfl_sync(~0u, team, token), within = task - __shfl_sync(~0u, after - tasks, token),
              of_tile = UNITS / MERGE_WARPS * members, tile = within / of_tile,
              unit = (within - tile * of_tile) * (MERGE_WARPS / members) + warp / members;
    merge_task<L>(p, parts, {token, tile, unit, warp % members, members, first, rehearses ? 0 : count}, warp, lane);
    if (rehearses)
      wait_for_prerequisites(), rehearses = false;
    else
      task += gridDim.x;
  }
}
