// How CTAs of the Hopper kernels that share rows evenly add up the parts of those that are cut, by their own code,
// compiled for a CPU: `test_hopper_cuts.py` builds it. Parts are made up; the CTAs come to their ends in any order.

#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <vector>

#include "hopper_simt.h"

extern "C" int patience;
int patience;
#define PATIENCE patience

template <int ID, int THREADS>
void named_barrier() {
  simt::meet(simt::cta().named, threadIdx.x, THREADS, 0);
}
static float __fdividef(float a, float b) { return a / b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }

// Teams of neighbouring threads, each with a barrier of its own.
static std::map<int, simt::Meeting> teams;
static void named_barrier(int id, int threads) { simt::meet(teams[id], threadIdx.x % threads, threads, 0); }

#define named_barrier ptx_named_barrier
#define exp2_approx ptx_exp2_approx
#define log2_approx ptx_log2_approx
#define pack_bfloat16 ptx_pack_bfloat16
#define pack_float16 ptx_pack_float16
#define unpack_float16 ptx_unpack_float16
#define select ptx_select
#define converge ptx_converge
#define thread_here ptx_thread_here
#define mbarrier_init ptx_mbarrier_init
#define mbarrier_arrive_expect ptx_mbarrier_arrive_expect
#define mbarrier_wait ptx_mbarrier_wait
#define fence_async_shared ptx_fence_async_shared
#define fence_async_global ptx_fence_async_global
#define fence_barrier_init ptx_fence_barrier_init
#define bulk_copy ptx_bulk_copy
#define load_float ptx_load_float
#define load_float_if ptx_load_float_if
#define load_float4_if ptx_load_float4_if
#define load_l2_8 ptx_load_l2_8
#define load_l2_16 ptx_load_l2_16
#define lane_here ptx_lane_here
#define wait_for_prerequisites ptx_wait_for_prerequisites
#define store_8_if ptx_store_8_if
#define store_16_if ptx_store_16_if
#define store_shared_4 ptx_store_shared_4
#define store_shared_8 ptx_store_shared_8
#define store_shared_16 ptx_store_shared_16
#define load_shared_4 ptx_load_shared_4
#define load_shared_8 ptx_load_shared_8
#define load_shared_16 ptx_load_shared_16
#define load_shared_float ptx_load_shared_float
#define store_shared_float ptx_store_shared_float
#include "ptx.cuh"
#undef named_barrier
#undef exp2_approx
#undef log2_approx
#undef pack_bfloat16
#undef pack_float16
#undef unpack_float16
#undef select
#undef converge
#undef thread_here
#undef mbarrier_init
#undef mbarrier_arrive_expect
#undef mbarrier_wait
#undef fence_async_shared
#undef fence_async_global
#undef fence_barrier_init
#undef bulk_copy
#undef load_float
#undef load_float_if
#undef load_float4_if
#undef load_l2_8
#undef load_l2_16
#undef lane_here
#undef wait_for_prerequisites
#undef store_8_if
#undef store_16_if
#undef store_shared_4
#undef store_shared_8
#undef store_shared_16
#undef load_shared_4
#undef load_shared_8
#undef load_shared_16
#undef load_shared_float
#undef store_shared_float

static float exp2_approx(float x) { return std::exp2(x); }
static float log2_approx(float x) { return std::log2(x); }
static u32 bfloat16(float value) {
  const u32 bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 pack_bfloat16(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }
static u32 pack_float16(float low, float high) {
  const _Float16 halves[] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  u32 pair;
  std::memcpy(&pair, halves, 4);
  return pair;
}
static float2 unpack_float16(u32 pair) {
  _Float16 halves[2];
  std::memcpy(halves, &pair, 4);
  return make_float2(halves[0], halves[1]);
}
static float select(bool condition, float a, float b) { return condition ? a : b; }
static void converge() { __syncwarp(); }
static int thread_here() { return threadIdx.x; }
static bool is_merge = false;  // parts are there behind its wait, and nothing is written before it
static bool is_early() { return is_merge && !simt::current->waited; }
static void load(void* value, const void* source, int bytes) {
  if (is_early())
    std::memset(value, 0xff, bytes);  // NaN
  else
    std::memcpy(value, source, bytes);
}
static uint2 load_l2_8(const void* source) {
  uint2 value;
  load(&value, source, 8);
  return value;
}
static float load_float(const float* source) {
  float value;
  load(&value, source, 4);
  return value;
}
static float load_float_if(bool there, const float* source) {
  return there ? load_float(source) : -std::numeric_limits<float>::infinity();
}
static float4 load_float4_if(bool there, const float* source) {
  float4 value = {};
  if (there) load(&value, source, 16);
  return value;
}
static uint4 load_l2_16(const void* source) {
  uint4 value;
  load(&value, source, 16);
  return value;
}
static int lane_here() { return threadIdx.x % 32; }
static void wait_for_prerequisites() { simt::current->waited = true; }
static void fence_async_shared() {}
static void fence_async_global() {}
static void fence_barrier_init() {}
// A barrier of one arrival; copies land when all bytes of a phase are on their way and a thread waits for them.
struct Barrier {
  struct Copy {
    u32 to;
    const void* from;
    u32 bytes;
  };
  int arrivals, bytes, completed;
  std::vector<Copy> copies;
};
static std::map<std::pair<int, u32>, Barrier> barriers;
static Barrier& barrier_at(u32 address) { return barriers[{simt::current->cta, address}]; }
static void mbarrier_init(u32 barrier, u32) { barrier_at(barrier) = {}; }
static void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  ++barrier_at(barrier).arrivals, barrier_at(barrier).bytes += bytes;
}
static void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  barrier_at(barrier).copies.push_back({to, from, bytes}), barrier_at(barrier).bytes -= bytes;
}
static void mbarrier_wait(u32 barrier, u32 parity) {
  Barrier& b = barrier_at(barrier);
  while ((b.completed & 1) == static_cast<int>(parity)) {
    if (b.arrivals == 0 || b.bytes != 0) {
      simt::leave();
      continue;
    }
    for (const Barrier::Copy& copy : b.copies) std::memcpy(simt::shared_memory() + copy.to, copy.from, copy.bytes);
    b.copies.clear(), b.arrivals = 0, ++b.completed;
  }
}
static void store_8_if(bool condition, void* target, u32 a, u32 b) {
  const u32 words[] = {a, b};
  if (condition && is_early()) std::abort();
  if (condition) std::memcpy(target, words, 8);
}
static void store_16_if(bool condition, void* target, u32 a, u32 b, u32 c, u32 d) {
  store_8_if(condition, target, a, b), store_8_if(condition, static_cast<char*>(target) + 8, c, d);
}
static void store_shared_4(u32 address, u32 a) { std::memcpy(simt::shared_memory() + address, &a, 4); }
static void store_shared_8(u32 address, u32 a, u32 b) { store_shared_4(address, a), store_shared_4(address + 4, b); }
static void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) {
  store_shared_8(address, a, b), store_shared_8(address + 8, c, d);
}
static u32 load_shared_4(u32 address) {
  u32 value;
  std::memcpy(&value, simt::shared_memory() + address, 4);
  return value;
}
static float load_shared_float(u32 address) { return __uint_as_float(load_shared_4(address)); }
static void store_shared_float(u32 address, float a) { store_shared_4(address, __float_as_uint(a)); }
static uint2 load_shared_8(u32 address) { return {load_shared_4(address), load_shared_4(address + 4)}; }
static uint4 load_shared_16(u32 address) {
  return {load_shared_4(address), load_shared_4(address + 4), load_shared_4(address + 8), load_shared_4(address + 12)};
}

#define OTHERS_GO_ON simt::leave  // while this one looks
#include "cuts.cuh"
#if BY_LENGTH
#undef __shared__
#define __shared__ static  // one CTA runs at a time
#define __constant__
#include "merge_units.cu"
namespace of_parts {
#include "merge_parts.cu"
}
#endif

template <int HEADS_, bool PACKED, bool PERMUTED_>
struct Places {
  static constexpr int HEADS = HEADS_, INTERVAL = 0;
  static constexpr bool PERMUTED = PERMUTED_;
  using Packet = Packets<HEADS, PACKED>;
};

constexpr u32 FIND = 1024, SCRATCH = 2048;

// The element of a tile that an accumulator is: of a warp and a lane, the n-th in the order of packets.
template <class L>
std::vector<int> elements() {
  constexpr int OF_A_LANE = L::HEADS * 2, OF_A_PACKET = L::Packet::QUADS * 4;
  std::vector<float> tile(L::HEADS * 512);
  simt::launch(1, 1, 256, 0, 0, [&] {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int number = 0; number < L::Packet::OF_A_WARP; ++number) {
      float v[OF_A_PACKET];
      for (int e = 0; e < OF_A_PACKET; ++e) v[e] = threadIdx.x * OF_A_LANE + number * OF_A_PACKET + e;
      write_packet<L>(Target{reinterpret_cast<char*>(tile.data()), 512, L::HEADS, false}, v, number, warp, lane);
    }
  });
  std::vector<int> found(tile.size());
  for (int element = 0; element < L::HEADS * 512; ++element) found[static_cast<int>(tile[element])] = element;
  return found;
}

// Leaves a part of lse and values that the test knows by the part's first turn.
template <class L>
void leave_known(const Params& p, const Row& row, int part, const std::vector<int>& element_of, int thread) {
  const int first_head = row.tile * L::HEADS;
  auto factor_of = [](int head) { return head % 2 ? 0.5f : 2.f; };
  const bool bfloat16 = PartUnits<L>::PACKED && row.first % 2;  // then factors are below 0
  auto value_of = [&](int n) {
    const int element = element_of[thread * (L::HEADS * 2) + n], head = first_head + element / 512;
    const int lse = (head + row.first * 5) % 7;
    if (lse == 0) return NAN;  // no keys: nobody reads it
    return ((head * 7 + element % 512 * 3 + row.first * 11) % 32 - 16) / factor_of(head);
  };
  if (bfloat16)
    leave_part<L, true>(p, row, part, thread / 32, thread % 32, value_of);
  else
    leave_part<L>(p, row, part, thread / 32, thread % 32, value_of);
  for (int head = first_head + thread; head < min(first_head + L::HEADS, p.num_heads); head += 256) {
    const int lse = (head + row.first * 5) % 7;
    leave_lse(p, row, head, part, lse == 0 ? -INFINITY : lse, lse == 0 ? 0.f : factor_of(head) * (bfloat16 ? -1 : 1));
  }
}

// The CTAs of a launch at the same time. Each leaves parts of lse and values that the test knows.
template <class L, int BARRIER>
void share(const Params& p, int ctas, int seed) {
  const std::vector<int> element_of = elements<L>();
  constexpr int ROOM = SumPlaces<L>::stage(MOST_WORKERS) + MOST_WORKERS * 512;  // the least
  simt::launch(1, ctas, 256, SCRATCH + ROOM, seed, [&] {
    const int thread = threadIdx.x, cta = blockIdx.x;
    find_interval<256>(p, L::INTERVAL, FIND);
    Row row = first_row<Launch::BALANCED>(p, L::INTERVAL);
    while (row.token < p.all_tokens) {
      for (int wait = (cta * 7 + seed * 5 + row.token) % 11; wait; --wait) simt::leave();
      const int part = part_of(p, L::INTERVAL, row.token);
      if (part >= 0) {
        leave_known<L>(p, row, part, element_of, thread);
        tell_sharers<L, BARRIER>(p, 0, part, thread);
      }
      row = next_row<Launch::BALANCED, true>(p, L::INTERVAL, row);
    }
    add_up_cuts<L, BARRIER, ROOM>(p, 0, SCRATCH, thread);
  });
}

extern "C" void share_rows(const Params* p, int ctas, int tile, bool quantized, int seed) {
  if (tile == 64)
    quantized ? share<Places<64, true, true>, 1>(*p, ctas, seed)
              : share<Places<64, false, false>, 1>(*p, ctas, seed);
  else if (tile == 24)
    share<Places<24, true, true>, 1>(*p, ctas, seed);
  else
    quantized ? share<Places<16, true, true>, 1>(*p, ctas, seed)
              : share<Places<16, false, false>, 1>(*p, ctas, seed);
}

#if BY_LENGTH
// Rows of CTAs by length, whose parts begin with turn 0, 1, and so on, and their merge by `ctas` CTAs.
template <bool ONE_HEAD>
void merge(const Params& p, int ctas, int seed) {
  using L = Places<64, ONE_HEAD, ONE_HEAD>;
  const std::vector<int> element_of = elements<L>();
  simt::launch(1, 1, 256, 0, seed, [&] {
    const int lane = threadIdx.x % 32, turns = lane < p.num_tokens ? turns_of(p, lane) : 0;
    const CtasOfRow found = ctas_by_length(turns, p.num_tokens, p.parts, 1, p.longest, p.margin, lane);
    for (int token = 0; token < p.num_tokens; ++token) {
      const int first = __shfl_sync(~0u, found.first, token), count = __shfl_sync(~0u, found.count, token);
      for (int part = 0; part < count; ++part)
        for (int tile = 0; tile < p.head_tiles; ++tile) {
          Row row;
          row.token = token, row.tile = tile, row.first = part;
          leave_known<L>(p, row, first + part, element_of, threadIdx.x);
        }
    }
  });
  is_merge = true;
  simt::launch(ctas, 1, MERGE_WARPS * 32, 0, seed, [&] { merge_units<ONE_HEAD>(p); });
  is_merge = false;
}

extern "C" void merge_parts_by_length(const of_parts::Params* p, int ctas, int seed) {
  is_merge = true;
  simt::launch(ctas, 1, of_parts::MERGE_GROUPS * of_parts::THREADS, 0, seed, [&] { of_parts::merge_by_length(*p); });
  is_merge = false;
}

extern "C" void merge_rows(const Params* p, int ctas, bool quantized, int seed) {
  quantized ? merge<true>(*p, ctas, seed) : merge<false>(*p, ctas, seed);
}
#endif
