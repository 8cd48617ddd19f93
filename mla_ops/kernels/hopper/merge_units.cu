// The parts of rows whose 64 heads CTAs have taken alone, as many as a row's length asks for (`row_ctas.cuh`), into those
// rows, for SM90.
//
// A part is 16-bit averages in units of 16 bytes of each lane, as `leave_part` stores them. A warp has two units, of the same
// heads, of a row and a tile, or the warps of a team have some of their parts each. Teams are larger where rows have more
// parts. A task is what a CTA does at a time, for one row; CTAs are small, so that all tasks run at one time. It is launched beside the kernel that writes the parts. Where rows went by
// that launch's shape, all CTAs have come and gone before it ends, but one, which stays for it.

#define BY_LENGTH 1
#include "code.cuh"
#include "cuts.cuh"

constexpr int LOG_WARPS = 3, MERGE_WARPS = 1 << LOG_WARPS, MERGE_CTAS = 3, UNITS_EACH = 2, PARTS_AT_ONCE = 4;

// ONE_HEAD: a lane's values of a unit are one head's (fp8), else two heads' (bfloat16).
template <bool ONE_HEAD>
struct UnitTile {
  static constexpr int HEADS = 64;
  using Packet = Packets<64, ONE_HEAD>;
};

// A lane's sums of units relative to the largest lse of each of its heads.
template <class L>
struct UnitSums {
  static constexpr int SLOTS = L::Packet::ONE_HEAD ? 1 : 2, VALUES = PartUnits<L>::VALUES;
  float top[SLOTS], total[SLOTS], sum[UNITS_EACH][VALUES];

  DEVICE UnitSums() {
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) top[i] = NO_SCORE_YET, total[i] = 0.f;
#pragma unroll
    for (int unit = 0; unit < UNITS_EACH; ++unit)
#pragma unroll
      for (int i = 0; i < VALUES; ++i) sum[unit][i] = 0.f;
  }

  // Moves the running maxima to others, or to larger ones; what makes up for it.
  DEVICE void raise(const float (&to)[SLOTS]) {
    float factor[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i)
      factor[i] = exp2_approx((top[i] - to[i]) * LOG2_E), top[i] = to[i], total[i] *= factor[i];
    scale(factor);
  }

  DEVICE void scale(const float (&factor)[SLOTS]) {
#pragma unroll
    for (int unit = 0; unit < UNITS_EACH; ++unit)
#pragma unroll
      for (int i = 0; i < VALUES; ++i) sum[unit][i] *= factor[is_second<L>(i) ? SLOTS - 1 : 0];
  }
};

// The binary logarithm of the warps of a team of a row of so many parts.
DEVICE int log_team(int count) {
  return count <= PARTS_AT_ONCE ? 0 : count <= 2 * PARTS_AT_ONCE ? 1 : count <= 4 * PARTS_AT_ONCE ? 2 : 3;
}

template <bool ONE_HEAD>
__global__ void __launch_bounds__(MERGE_WARPS * 32, MERGE_CTAS) merge_units(const __grid_constant__ Params p) {
  using L = UnitTile<ONE_HEAD>;
  using U = PartUnits<L>;
  using Sums = UnitSums<L>;
  constexpr int SLOTS = Sums::SLOTS, WORDS = SLOTS * 2 + UNITS_EACH * Sums::VALUES, UNITS = 8 * U::OF_A_WARP,
                LOG_OF_A_TASK = 3;
  static_assert(UNITS == UNITS_EACH * MERGE_WARPS << LOG_OF_A_TASK, "a tile is not so many tasks");
  __shared__ float others[MERGE_WARPS][WORDS][32];
  prefetch_code<32>();
  const int lane = lane_here(), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int turns = lane < p.num_tokens ? turns_of(p, lane) : 0;
  const CtasOfRow ctas = ctas_by_length(turns, p.num_tokens, p.parts, 1, p.longest, p.margin, lane);
  if (ctas.by_shape) {
    if (blockIdx.x == 0) wait_for_prerequisites();
    return;
  }
  auto tasks_of = [&](int count) { return p.head_tiles << LOG_OF_A_TASK + log_team(count); };
  int after = lane < p.num_tokens ? tasks_of(ctas.count) : 0;
#pragma unroll 1
  for (int step = 1; step < 32; step <<= 1) {
    const int below = __shfl_up_sync(~0u, after, step);
    if (lane >= step) after += below;
  }
  __shared__ int ends[MOST_ROWS], of_rows[MOST_ROWS];  // tasks of rows up to each; else registers do not suffice
  if (warp == 0) ends[lane] = after, of_rows[lane] = ctas.first | ctas.count << 16;
  __syncthreads();
  const i64 stride = static_cast<i64>(p.head_tiles) * UNITS * 32;  // from part to part
#pragma unroll 1
  for (int task = blockIdx.x; task < ends[MOST_ROWS - 1]; task += gridDim.x) {
    const Parts parts = parts_of(p);
    const int token = __popc(__ballot_sync(~0u, ends[lane] <= task)), of_row = of_rows[token], first = of_row & 0xffff,
              count = of_row >> 16, log = log_team(count), members = 1 << log,
              within = task - ends[token] + tasks_of(count), tile = within >> LOG_OF_A_TASK + log,
              unit = ((within << LOG_WARPS - log) + (warp >> log)) * UNITS_EACH % UNITS, member = warp & members - 1;
    const int eighth = unit / U::OF_A_WARP, own = unit % U::OF_A_WARP, number = own / U::OF_A_PACKET,
              head = head_of_packet<L>(number, eighth, lane), global_head = tile * 64 + head;
    const float4* const from = parts.out + first * stride + (static_cast<i64>(tile) * UNITS + unit) * 32 + lane;
    const float2* const states = parts.heads + first * p.num_heads;
    int heads[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) heads[i] = min(global_head + i * 8, p.num_heads - 1);
    Sums sums;
    wait_for_prerequisites();
#pragma unroll 1
    for (int begin = member; begin < count; begin += members * PARTS_AT_ONCE) {
      float4 v[PARTS_AT_ONCE][UNITS_EACH];
      float2 state[PARTS_AT_ONCE][SLOTS];
#pragma unroll
      for (int i = 0; i < PARTS_AT_ONCE; ++i) {
        const bool there = begin + i * members < count;
        const int part = there ? begin + i * members : count - 1;
        const float* const units = reinterpret_cast<const float*>(from + part * stride);
#pragma unroll
        for (int unit = 0; unit < UNITS_EACH; ++unit) v[i][unit] = load_float4_if(there, units + unit * 128);
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
          const uint2 words = load_l2_8(states + part * p.num_heads + heads[slot]);
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
#pragma unroll
        for (int unit = 0; unit < UNITS_EACH; ++unit) {
          const float4& w = v[i][unit];
          add_unit<L>(sums.sum[unit],
                      make_uint4(__float_as_uint(w.x), __float_as_uint(w.y), __float_as_uint(w.z), __float_as_uint(w.w)),
                      weight[0], weight[SLOTS - 1]);
        }
      }
    }
    if (members > 1) {
      auto place = [&](int of, int word) -> float& { return others[of][word][lane]; };
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) place(warp, i) = sums.top[i], place(warp, SLOTS + i) = sums.total[i];
#pragma unroll
      for (int i = 0; i < UNITS_EACH * Sums::VALUES; ++i)
        place(warp, 2 * SLOTS + i) = sums.sum[i / Sums::VALUES][i % Sums::VALUES];
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
          for (int i = 0; i < UNITS_EACH * Sums::VALUES; ++i)
            sums.sum[i / Sums::VALUES][i % Sums::VALUES] +=
                place(warp + other, 2 * SLOTS + i) * factor[is_second<L>(i) ? SLOTS - 1 : 0];
        }
      }
      __syncthreads();
      if (member) continue;
    }
    Row row;
    row.token = token, row.tile = tile, row.part = 0;
    const Target to = target_of<L>(p, row);
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const int of_row = global_head + i * 8;
      const bool there = of_row < p.num_heads, none = sums.total[i] == 0.f,
                 tells = eighth < 4 && number < 2 / SLOTS && lane % 4 == 0;
      const float lse = none ? -INFINITY : sums.top[i] + log2_approx(sums.total[i]) * LN_2,
                  sink = p.attn_sink && there ? __ldg(p.attn_sink + of_row) : -INFINITY;
      if (there && tells) p.lse[token * p.lse_token_stride + of_row * p.lse_head_stride] = lse;
      sums.total[i] = none ? 0.f : __fdividef(1.f, sums.total[i]);
      if (sink != -INFINITY && !none) sums.total[i] = __fdividef(sums.total[i], 1.f + exp2_approx((sink - lse) * LOG2_E));
    }
    sums.scale(sums.total);
    converge();
#pragma unroll
    for (int unit = 0; unit < UNITS_EACH; ++unit)
      write_unit<L>(to, sums.sum[unit], (own + unit) / U::OF_A_PACKET, (own + unit) % U::OF_A_PACKET, eighth, lane);
  }
}
