// Parts that a row's shares leave, added up by as many CTAs as a cluster has, by one in registers, by a cluster whose CTAs
// hold several, and by one of as many CTAs: the Hopper kernels' own code, compiled for a CPU. `test_hopper_shares.py` builds it. The shares' values are made up.

#include <cmath>
#include <map>

#include "hopper_simt.h"

static float __fdividef(float a, float b) { return a / b; }

#define exp2_approx ptx_exp2_approx
#define log2_approx ptx_log2_approx
#define reciprocal_approx ptx_reciprocal_approx
#define pack_float16 ptx_pack_float16
#define unpack_float16 ptx_unpack_float16
#define pack_bfloat16 ptx_pack_bfloat16
#define converge ptx_converge
#define cluster_rank ptx_cluster_rank
#define peer_address ptx_peer_address
#define mbarrier_release_peer ptx_mbarrier_release_peer
#define mbarrier_wait_cluster ptx_mbarrier_wait_cluster
#define mbarrier_wait ptx_mbarrier_wait
#define mbarrier_arrive_expect ptx_mbarrier_arrive_expect
#define warp_arrive ptx_warp_arrive
#define cluster_wait ptx_cluster_wait
#define send_float2 ptx_send_float2
#define send_8_unless ptx_send_8_unless
#define load_l2_8 ptx_load_l2_8
#define load_l2_16 ptx_load_l2_16
#define store_8_if ptx_store_8_if
#define store_16_if ptx_store_16_if
#define store_8_by ptx_store_8_by
#define store_16_by ptx_store_16_by
#define store_shared_4 ptx_store_shared_4
#define store_shared_float ptx_store_shared_float
#define store_shared_float2 ptx_store_shared_float2
#define store_shared_16 ptx_store_shared_16
#define load_shared_16 ptx_load_shared_16
#define load_shared_4 ptx_load_shared_4
#define load_shared_8 ptx_load_shared_8
#define load_shared_float ptx_load_shared_float
#define load_shared_float2 ptx_load_shared_float2
#define load_either_16 ptx_load_either_16
#define shared_pointer ptx_shared_pointer
#include "either.cuh"
#undef load_either_16
#undef shared_pointer
#undef exp2_approx
#undef log2_approx
#undef reciprocal_approx
#undef pack_float16
#undef unpack_float16
#undef pack_bfloat16
#undef converge
#undef cluster_rank
#undef peer_address
#undef mbarrier_release_peer
#undef mbarrier_wait_cluster
#undef mbarrier_wait
#undef mbarrier_arrive_expect
#undef warp_arrive
#undef cluster_wait
#undef send_float2
#undef send_8_unless
#undef load_l2_8
#undef load_l2_16
#undef store_8_if
#undef store_16_if
#undef store_8_by
#undef store_16_by
#undef store_shared_4
#undef store_shared_float
#undef store_shared_float2
#undef store_shared_16
#undef load_shared_16
#undef load_shared_4
#undef load_shared_8
#undef load_shared_float
#undef load_shared_float2

static float exp2_approx(float x) { return std::exp2(x); }
static float log2_approx(float x) { return std::log2(x); }
static float reciprocal_approx(float x) { return 1 / x; }
static u32 float16(float value) { return bits_of<u16>(static_cast<_Float16>(value)); }
static u32 pack_float16(float low, float high) { return float16(low) | float16(high) << 16; }
static float2 unpack_float16(u32 pair) {
  return {static_cast<float>(bits_of<_Float16>(static_cast<u16>(pair))),
          static_cast<float>(bits_of<_Float16>(static_cast<u16>(pair >> 16)))};
}
static u32 bfloat16(float value) {
  const u32 bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 pack_bfloat16(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }
static void converge() { __syncwarp(); }
static u32 cluster_rank() { return simt::current->cta; }

// Barriers by their address in the cluster: the number of the CTA, and behind it that in its memory. `missing`: bytes that
// are announced, less those that came.
struct Barrier {
  int arrivals, missing;
};
static std::map<u32, Barrier> barriers;
static int arrivals_of_a_phase;
static u32 peer_address(u32 here, u32 rank) { return (here & 0xfffff) | rank << 20; }
static Barrier& barrier_here(u32 barrier) { return barriers[peer_address(barrier, cluster_rank())]; }
static void mbarrier_release_peer(u32 barrier) { ++barriers[barrier].arrivals; }
static void warp_arrive(u32 barrier, int lane) { barrier_here(barrier).arrivals += lane == 0; }
static void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  ++barrier_here(barrier).arrivals, barrier_here(barrier).missing += bytes;
}
// Twelve warps arrive.
static void mbarrier_wait(u32 barrier, u32 parity) {
  while ((barrier_here(barrier).arrivals / 12 & 1) == parity) simt::leave();
}
// Peers arrive, or bytes land that one thread of the CTA has announced.
static void mbarrier_wait_cluster(u32 barrier, u32 parity) {
  const Barrier& here = barrier_here(barrier);
  while ((here.arrivals / (here.missing ? 1 << 30 : arrivals_of_a_phase) & 1) == parity) simt::leave();
}
static void cluster_wait() { simt::meet_cluster(); }
static void send(u32 address, u32 barrier, const void* source, int bytes) {
  std::memcpy(reinterpret_cast<unsigned char*>(simt::ctas[address >> 20].shared.data()) + (address & 0xfffff), source,
              bytes);
  barriers[barrier].missing -= bytes;
}
static void send_float2(u32 address, u32 barrier, float a, float b) {
  const float both[] = {a, b};
  send(address, barrier, both, 8);
}
static void send_8_unless(bool here, u32 address, u32 barrier, u32 a, u32 b) {
  const u32 words[] = {a, b};
  send(address, barrier, words, 8);
  if (here) barriers[barrier].missing += 8;
}

template <class T>
T loaded(const void* source) {
  T value;
  std::memcpy(&value, source, sizeof(T));
  return value;
}
static uint2 load_l2_8(const void* source) { return loaded<uint2>(source); }
static uint4 load_l2_16(const void* source) { return loaded<uint4>(source); }
static uint4 load_either_16(const void* source) { return loaded<uint4>(source); }
static const unsigned char* shared_pointer(u32 address) {
  return reinterpret_cast<unsigned char*>(simt::shared_memory()) + address;
}
static void store_8_if(bool condition, void* target, u32 a, u32 b) {
  const u32 words[] = {a, b};
  if (condition) std::memcpy(target, words, 8);
}
static void store_16_if(bool condition, void* target, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[] = {a, b, c, d};
  if (condition) std::memcpy(target, words, 16);
}
static void store_8_by(u64, void* target, u32 a, u32 b) { store_8_if(true, target, a, b); }
static void store_16_by(u64, void* target, u32 a, u32 b, u32 c, u32 d) { store_16_if(true, target, a, b, c, d); }
static void store_shared_4(u32 address, u32 a) { std::memcpy(simt::shared_memory() + address, &a, 4); }
static void store_shared_float(u32 address, float a) { store_shared_4(address, __float_as_uint(a)); }
static void store_shared_float2(u32 address, float a, float b) {
  store_shared_float(address, a), store_shared_float(address + 4, b);
}
static u32 load_shared_4(u32 address) { return loaded<u32>(simt::shared_memory() + address); }
static void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[] = {a, b, c, d};
  std::memcpy(simt::shared_memory() + address, words, 16);
}
static uint2 load_shared_8(u32 address) { return loaded<uint2>(simt::shared_memory() + address); }
static uint4 load_shared_16(u32 address) { return loaded<uint4>(simt::shared_memory() + address); }
static float load_shared_float(u32 address) { return __uint_as_float(load_shared_4(address)); }
static float2 load_shared_float2(u32 address) { return {load_shared_float(address), load_shared_float(address + 4)}; }

#include "folds.cuh"
#include "held.cuh"

// A number from 0 to 1 that everything about it decides.
static float number(const Row& row, int share, int a, int b, int c) {
  u32 bits = 2166136261u;
  for (int one : {row.token, row.tile, share, a, b, c}) bits = (bits ^ one) * 16777619u, bits ^= bits >> 15;
  return (bits & 0xffff) / 65536.f;
}

// The sum and running maximum of a head in a share: shares of some tokens have no key, others are bfloat16.
static float2 state_of(const Row& row, int share, int head) {
  if ((row.token + share) % 5 == 0) return {0.f, NO_SCORE_YET};
  const float sum = 1 + 100 * number(row, share, head, -1, 0),
              running_max = std::floor(40 * number(row, share, head, -2, 0)) - 20;
  return {row.token % 2 && (row.token + share) % 4 == 0 ? -sum : sum, running_max};  // even tokens have none of bfloat16
}

static float value_of(const Row& row, int share, int warp, int lane, int n) {
  return state_of(row, share, 0).x == 0.f ? 0.f : 1000 * number(row, share, warp, lane, n) - 500;
}

template <class L>
void in_shares(const Params& p, int clusters, int seed) {
  barriers.clear(), arrivals_of_a_phase = 8 * p.splits;
  simt::launch(clusters, p.splits, 256, L::BYTES, seed, [&] {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread == 0) barrier_here(L::MEETING) = {};
    u32 odd_row = 0;
    simt::meet_cluster();
    for (Row row = first_row<Launch::SHARES>(p, 0); row.token < p.num_tokens;
         row = next_row<Launch::SHARES, false>(p, 0, row)) {
      for (int wait = (seed * 5 + row.rank * 3 + warp) % 7; wait; --wait) simt::leave();
      unsigned char* const parts = parts_of_warp<L>(p, warp, odd_row);
      const float2 state = state_of(row, row.rank, head_of_lane<L>(warp, lane));
      if (L::HEADS == 64) {
        if (thread < L::HEADS) {  // as one of scores
          const float2 own = state_of(row, row.rank, thread);
          store_shared_float(L::COLUMNS + thread * 8 + 4, own.y);
          end_share<L>(p, row, 0, thread, own.x, odd_row);
        }
        __syncthreads();
      }
      const u32 kept = kept_of_warp<L>(0, warp);
      u32 keeps = 0;
      if (L::HEADS == 64 && ends_row(p, row))
        for (int n = cluster_rank(); n < L::Packet::OF_A_WARP; n += p.splits) keeps |= 1 << n;
      leave_share<L>(parts + row.rank * (8 * PartOfWarp<L>::BYTES), kept, keeps, lane, state.x, state.y,
                     [&](int n) { return value_of(row, row.rank, warp, lane, n); });
      if (!ends_row(p, row)) continue;
      meet_peers<L>(p, 0, lane, odd_row);
      for (int wait = (warp + cluster_rank()) % 3 * 20; wait; --wait) simt::leave();  // a peer goes on to the next row
      if (p.shares > 4)
        add_shares<L, 8>(p, row, parts, kept, warp, lane);
      else
        add_shares<L, 4>(p, row, parts, kept, warp, lane);
      odd_row ^= 1;
    }
  });
}

// By one CTA, whose threads are those that accumulate; the first ones are those of scores as well.
template <class L>
void folded(const Params& p, int ctas, int seed) {
  constexpr int PIECES = 4, N = L::HEADS / 2;
  simt::launch(ctas, 1, 256, L::BYTES, seed, [&] {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    float sums[PIECES][N], o[PIECES][N];
    for (Row row = first_row<Launch::FOLDS>(p, 0); row.token < p.num_tokens;
         row = next_row<Launch::FOLDS, false>(p, 0, row)) {
      for (int n = 0; n < PIECES * N; ++n) o[n / N][n % N] = value_of(row, row.rank, warp, lane, n);
      if (thread < L::HEADS) end_fold<L>(p, row, 0, thread, state_of(row, row.rank, thread));
      __syncthreads();
      fold<L>(sums, o, 0, lane, begins_row(p, row));
      if (ends_row(p, row)) {
        write_packets<L>(target_of<L>(p, row), warp, lane, [&](int n) {
          const int piece = n / N, e = n % N, head = e / 4 * 8 + lane % 4 * 2 + e % 2;
          return sums[piece][e] * load_shared_float(L::COLUMNS + head * 8);
        });
      }
      __syncthreads();
    }
  });
}

// A cluster whose CTAs take several shares: warpgroups of scores, two that accumulate, and one that gathers. The bytes
// of barriers may come before they are announced, as they do on a GPU.
template <class L>
void held_in_cluster(const Params& p, int clusters, int seed) {
  constexpr int PIECES = 4, N = L::HEADS / 2;
  barriers.clear(), arrivals_of_a_phase = 1;
  simt::launch(clusters, p.splits, 512, L::BYTES, seed, [&] {
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32,
              warp = (warpgroup - 1) * 4 + thread / 32;
    for (int item = cluster_index(p); item < p.num_tokens * p.head_tiles; item += gridDim.x / p.splits) {
      Row row = share_at(p, item, cluster_rank());
      if (threadIdx.x == 0)
        for (int barrier : {L::STATES_FULL, L::PACKETS_FULL, L::OWN_FULL}) barrier_here(barrier) = {};
      simt::meet_cluster();
      Held<L> held;
      for (;; row = next_share<Launch::HELD, false>(p, row)) {
        if (warpgroup == 0 && thread < L::HEADS) 
          keep_state<L>(0, row.rank / p.splits, thread, state_of(row, row.rank, thread));
        __syncthreads();
        if (warpgroup == 1 || warpgroup == 2) {
          float o[PIECES][N];
          for (int n = 0; n < PIECES * N; ++n) o[n / N][n % N] = value_of(row, row.rank, warp, lane, n);
          push<L>(held, o, 0, lane);
        }
        __syncthreads();
        if (ends_row(p, row)) break;
      }
      if (warpgroup == 3) {
        stand_by_for_shares<L>(p, 0, true, thread);
        simt::meet_cluster();
        continue;
      }
      cluster_wait();
      if (warpgroup == 0) {
        send_states<L>(p, 0, thread);
        weigh_parts<L>(p, row, 0, thread, cluster_rank() == 0, [&] {
          mbarrier_wait_cluster(L::STATES_FULL, 0);
          return true;
        });
      } else {
        send_held<L>(p, 0, held, cluster_rank(), warp, lane);
      }
      finish_shares<L>(p, row, 0, threadIdx.x / 32, lane);
      simt::meet_cluster();
    }
  });
}

// By the end of a cluster, whose CTAs are one here, with all packets in memory.
template <class L>
void in_cluster(const Params& p) {
  using P = typename L::Packet;
  std::vector<u32> packets(P::COUNT * p.splits * P::BYTES / 4);
  simt::launch(1, 1, 128, L::End::ALL_FLOAT16 + 4, 1, [&] {
    const int thread = threadIdx.x, lane = thread % 32;
    for (int item = 0; item < p.num_tokens * p.head_tiles; ++item) {
      const int token = item / p.head_tiles;
      const Row row = row_of(p, token, item % p.head_tiles, 0, p.splits, 0);
      for (int share = 0; share < p.splits; ++share) {
        if (thread < L::HEADS) {
          const float2 state = state_of(row, share, thread);
          store_shared_float2(L::End::STATES + (share * L::HEADS + thread) * 8, state.x, state.y);
        }
        for (int packet = thread / 32; packet < P::COUNT; packet += 4)
          for (int w = 0; w < P::WORDS; ++w) {
            float pair[2];
            bool bfloat16 = false;
            for (int i = 0; i < 2; ++i) {
              const int number = packet / 8, warp = packet % 8, t = lane % 4,
                        head = L::HEADS == 64 ? warp % 4 * 16 + lane / 4 + number % 2 * 8
                                              : number % (L::HEADS / 8) * 8 + 2 * t + i;
              const float2 state = state_of(row, share, head);
              const float inverse = state.x == 0.f ? 0.f : 1 / std::fabs(state.x);
              pair[i] = value_of(row, share, warp, lane, (number * P::WORDS + w) * 2 + i) * inverse;
              bfloat16 = state.x < 0.f;
            }
            const int place = (packet * p.splits + share) * P::BYTES / 4 + lane * P::UNIT + w / P::UNIT * 128 + w % P::UNIT;
            packets[place] = bfloat16 ? pack_bfloat16(pair[0], pair[1]) : pack_float16(pair[0], pair[1]);
          }
      }
      if (thread == 0) store_shared_4(L::End::ALL_FLOAT16, 1);
      __syncthreads();
      weigh_parts<L, true>(p, row, 0, thread, true, [] { return true; });
      __syncthreads();
      for (int rank = 0; rank < p.splits; ++rank) {
        const auto* own = reinterpret_cast<const unsigned char*>(packets.data()) + rank * p.splits * P::BYTES;
        (load_shared_4(L::End::ALL_FLOAT16) ? add_packets<L, 4, true, const unsigned char*>
                                            : add_packets<L, 4, false, const unsigned char*>)(
            target_of<L>(p, row), rank, 0, own, p.splits * p.splits * P::BYTES, packets_of<L>(p, rank), p.splits, p.splits,
            thread / 32, lane);
      }
      __syncthreads();
    }
  });
}

template <int HEADS>
void attend(const Params& p, int clusters, int seed) {
  using L = Layout<HEADS, FP8_DS_MLA>;
  if (!p.shares) return in_cluster<L>(p);
  if constexpr (HEADS != 16 && HEADS != 32)
    in_shares<L>(p, clusters, seed);
  else if (p.splits == 1)
    folded<L>(p, clusters, seed);
  else
    held_in_cluster<L>(p, clusters, seed);
}

extern "C" void attend(const Params* p, int heads, int clusters, int seed) {
  if (heads == 16) attend<16>(*p, clusters, seed);
  if (heads == 24) attend<24>(*p, clusters, seed);
  if (heads == 32) attend<32>(*p, clusters, seed);
  if (heads == 64) attend<64>(*p, clusters, seed);
}
