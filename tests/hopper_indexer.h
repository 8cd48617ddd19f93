// PTX of the indexer's Hopper kernels, for a CPU: barriers, copies, products, clusters.
#pragma once

#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "hopper_simt.h"

static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// The kernel's PTX, on shared memory that begins at address 0.
#define shared_address ptx_shared_address
#define mbarrier_init ptx_mbarrier_init
#define mbarrier_arrive ptx_mbarrier_arrive
#define mbarrier_arrive_expect ptx_mbarrier_arrive_expect
#define mbarrier_wait ptx_mbarrier_wait
#define warp_arrive ptx_warp_arrive
#define bulk_copy ptx_bulk_copy
#define copy_box ptx_copy_box
#define copy_box_to ptx_copy_box_to
#define mbarrier_arrive_peer ptx_mbarrier_arrive_peer
#define peer_address ptx_peer_address
#define store_float_if ptx_store_float_if
#define evict_first ptx_evict_first
#define evict_last ptx_evict_last
#define evict_normal ptx_evict_normal
#define copy_16 ptx_copy_16
#define copy_4 ptx_copy_4
#define load_shared_16 ptx_load_shared_16
#define load_shared_8 ptx_load_shared_8
#define load_shared_4 ptx_load_shared_4
#define load_shared_float ptx_load_shared_float
#define store_shared_16 ptx_store_shared_16
#define store_shared_8 ptx_store_shared_8
#define store_shared_4 ptx_store_shared_4
#define store_shared_float ptx_store_shared_float
#define positive_or_nan ptx_positive_or_nan
#define named_barrier ptx_named_barrier
#define cluster_meet ptx_cluster_meet
#define cluster_arrive ptx_cluster_arrive
#define cluster_wait ptx_cluster_wait
#define peer_pointer ptx_peer_pointer
#define launch_dependents ptx_launch_dependents
#define wait_for_prerequisites ptx_wait_for_prerequisites
#include "ptx.cuh"
#undef launch_dependents
#undef wait_for_prerequisites
#undef named_barrier
#undef cluster_meet
#undef cluster_arrive
#undef cluster_wait
#undef peer_pointer
#undef shared_address
#undef mbarrier_init
#undef mbarrier_arrive
#undef mbarrier_arrive_expect
#undef mbarrier_wait
#undef warp_arrive
#undef bulk_copy
#undef copy_box
#undef copy_box_to
#undef mbarrier_arrive_peer
#undef peer_address
#undef store_float_if
#undef evict_first
#undef evict_last
#undef evict_normal
#undef copy_16
#undef copy_4
#undef load_shared_16
#undef load_shared_8
#undef load_shared_4
#undef load_shared_float
#undef store_shared_16
#undef store_shared_8
#undef store_shared_4
#undef store_shared_float
#undef positive_or_nan

static u32 shared_address(const void*) { return 0; }

// A CTA's named barriers, by CTA and number.
static std::map<std::pair<int, int>, simt::Meeting> named_barriers;
template <int ID, int COUNT>
void named_barrier() {
  simt::meet(named_barriers[{simt::current->cta, ID}], simt::current->index, COUNT, 0);
}
static void cluster_meet() { simt::meet_cluster_but_those_that_left(); }
static void cluster_arrive() {}
static void cluster_wait() { cluster_meet(); }
static void launch_dependents() {}

// CTAs of which a thread has waited for the launch in front, whose memory is written over; whether that was too early.
static std::set<int> waited;
static bool early;
static void wait_for_prerequisites() { waited.insert(blockIdx.x), simt::current->waited = true; }
template <class T>
T* peer_pointer(T* here, u32 rank) {
  const uintptr_t offset = reinterpret_cast<uintptr_t>(here) - reinterpret_cast<uintptr_t>(simt::shared_memory());
  if (rank >= simt::ctas.size() || offset >= simt::ctas[rank].shared.size() * 8) abort();
  return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(simt::ctas[rank].shared.data()) + offset);
}

static size_t shared_size;
template <class T>
T& at(u32 address, int cta = simt::current->cta) {
  if (address % sizeof(T) || address + sizeof(T) > shared_size) abort();
  return *reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(simt::ctas[cta].shared.data()) + address);
}
static u32 load_shared_4(u32 address) { return at<u32>(address); }
static float load_shared_float(u32 address) { return at<float>(address); }
static uint2 load_shared_8(u32 address) { return at<uint2>(address); }
static uint4 load_shared_16(u32 address) { return at<uint4>(address); }
static void store_shared_4(u32 address, u32 value) { at<u32>(address) = value; }
static void store_shared_float(u32 address, float value) { at<float>(address) = value; }
static void store_shared_8(u32 address, u32 a, u32 b) { at<uint2>(address) = {a, b}; }
static void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) { at<uint4>(address) = {a, b, c, d}; }
static void store_float_if(bool condition, float* target, float value) {
  early |= condition && !simt::current->waited;
  if (condition) *target = value;
}
static u64 evict_first() { return 1; }
static u64 evict_normal() { return 2; }
static u64 evict_unchanged() { return 4; }
static u64 evict_last() { return 3; }
static void store_float_if_by(u64 policy, bool condition, float* target, float value) {
  if (policy != 2 && policy != 3) abort();
  store_float_if(condition, target, value);
}
static float positive_or_nan(float x) { return x > 0 || x != x ? x : 0.f; }

// ---- barriers -------------------------------------------------------------------------------------------------------

struct Barrier {
  u32 count, pending, completed;
  i64 bytes;
};
static std::map<std::pair<int, u32>, Barrier> barriers;  // by CTA and address

static long patience;

// An address of a peer has its rank, and one, above the bits of shared memory.
constexpr u32 PEER = 1 << 24;
static u32 peer_address(u32 address, u32 rank) { return (rank + 1) * PEER + address; }

static Barrier& barrier_at(u32 address) {
  return barriers.at({address < PEER ? simt::current->cta : static_cast<int>(address / PEER) - 1, address % PEER});
}

static void settle(Barrier& one) {
  if (one.pending == 0 && one.bytes == 0) one.pending = one.count, ++one.completed;
}
static void mbarrier_init(u32 address, u32 count) { barriers[{simt::current->cta, address}] = {count, count, 0, 0}; }
static void arrive(u32 address, u32 bytes) {
  Barrier& one = barrier_at(address);
  if (one.pending-- == 0) abort();  // more arrivals than a phase has
  one.bytes += bytes, settle(one);
}
static void mbarrier_arrive(u32 address) { arrive(address, 0); }
static void mbarrier_arrive_peer(u32 address) {
  if (address < PEER) abort();
  arrive(address, 0);
}
static void mbarrier_arrive_expect(u32 address, u32 bytes) { arrive(address, bytes); }
static void warp_arrive(u32 address, int lane) {
  if (lane == 0) arrive(address, 0);
}
static void land(u32 address, u32 bytes) {
  Barrier& one = barrier_at(address);
  one.bytes -= bytes, settle(one);
}

// Bulk copies on their way. They land in any order, while somebody waits. Every fifth is late: slots behind its own are
// used before.
struct Flight {
  std::function<void()> landing;
  bool late;
};
static std::vector<Flight> flights;
static unsigned random_flight = 1, departures = 0;

static void fly(std::function<void()> landing) {
  auto as_issued = [thread = simt::current, landing = std::move(landing)] {
    simt::Thread* const waiting = std::exchange(simt::current, thread);
    landing();
    simt::current = waiting;
  };
  flights.push_back({as_issued, ++departures % 5 == 0});
}
static void land_one() {
  random_flight = random_flight * 1664525u + 1013904223u;
  if (flights.empty() || random_flight >> 28) return;
  const auto chosen = flights.begin() + (random_flight >> 8) % flights.size();
  if (chosen->late && (random_flight >> 16 & 255)) return;
  const Flight flight = std::move(*chosen);
  flights.erase(chosen);
  flight.landing();
}
static void mbarrier_wait(u32 address, u32 parity) {
  for (patience = 100000000; (barrier_at(address).completed & 1) == parity; simt::leave(), land_one())
    if (--patience == 0) abort();
  simt::meet_warp(0);
}

// ---- copies ---------------------------------------------------------------------------------------------------------

// The place to which the 128-byte swizzle moves a byte.
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static void copy_4(u32 to, const void* from) { std::memcpy(&at<u32>(to), from, 4); }
static void copy_16(u32 to, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) abort();
  std::memcpy(&at<uint4>(to), from, 16);
}
static void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (bytes % 16) abort();
  fly([=] {
    for (u32 i = 0; i < bytes; i += 16) copy_16(to + i, static_cast<const char*>(from) + i);
    land(barrier, bytes);
  });
}
static void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  if (policy != 1 && policy != 2 && policy != 4) abort();
  bulk_copy(to, from, bytes, barrier);
}
// A map is its address, two sizes, two strides and the box, the slowest dim first; rows have 128 bytes.
static void land_box(u32 ctas, u32 to, const TensorMap& map, int x, int y, int z, u32 barrier) {
  const auto& [base, slabs, rows, slab_stride, row_stride, box_slabs, box_rows] = reinterpret_cast<const u64(&)[7]>(map);
  if (x != 0 || to % 1024 % (box_rows * 128) || base % 16) abort();
  for (u64 slab = 0; slab < box_slabs; ++slab)
    for (u64 row = 0; row < box_rows; ++row)
      for (int i = 0; i < 128; ++i) {
        const i64 at_slab = z + static_cast<i64>(slab), at_row = y + static_cast<i64>(row);
        const bool there = at_slab >= 0 && at_row >= 0 && at_slab < (i64)slabs && at_row < (i64)rows;
        for (u32 cta = 0; cta < simt::ctas.size(); ++cta)
          if (ctas >> cta & 1)
            at<unsigned char>(swizzled(to + (slab * box_rows + row) * 128 + i), cta) =
                there ? reinterpret_cast<unsigned char*>(base)[at_slab * slab_stride + at_row * row_stride + i] : 0;
      }
  for (u32 cta = 0; cta < simt::ctas.size(); ++cta)
    if (ctas >> cta & 1) land(peer_address(barrier, cta), box_slabs * box_rows * 128);
}
static void copy_box_to(u32 ctas, u32 to, const TensorMap& map, int x, int y, int z, u32 barrier) {
  fly([=, &map] { land_box(ctas, to, map, x, y, z, barrier); });
}
static void copy_box(u32 to, const TensorMap& map, int x, int y, int z, u32 barrier, u64 policy = 2) {
  if (policy != 1 && policy != 2 && policy != 4) abort();
  copy_box_to(1 << simt::current->cta, to, map, x, y, z, barrier);
}

// ---- products -------------------------------------------------------------------------------------------------------

// Those that a thread has begun; a group reads its operands, and writes its registers, when it is waited for.
struct Product {
  float* d;
  int count;
  u64 a, b;
  bool add;
};
static std::map<simt::Thread*, std::vector<std::vector<Product>>> begun;

static float e4m3(unsigned char byte) {
  static const std::vector<float> values = [] {
    std::vector<float> all(256);
    for (int bits = 0; bits < 256; ++bits) {
      const int exponent = bits >> 3 & 15, fraction = bits & 7;
      const float size = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp(1.f * fraction, -9);
      all[bits] = (bits & 127) == 127 ? NAN : bits & 128 ? -size : size;
    }
    return all;
  }();
  return values[byte];
}
static float element(u64 descriptor, int row, int k) {
  return e4m3(at<unsigned char>(swizzled(static_cast<u32>((descriptor & 0x3fff) << 4) + row * 128 + k)));
}
static void multiply_now(const Product& p) {
  const int thread = threadIdx.x & 127, lane = thread % 32;
  for (int i = 0; i < p.count; ++i) {
    const int row = thread / 32 * 16 + lane / 4 + (i >> 1 & 1) * 8, column = i / 4 * 8 + lane % 4 * 2 + (i & 1);
    double sum = p.add ? p.d[i] : 0.0;
    for (int k = 0; k < 32; ++k) sum += double(element(p.a, row, k)) * element(p.b, column, k);
    p.d[i] = sum;
  }
}

static u64 tile_descriptor(u32 address, u32 group_bytes, u32) {
  if (address % 1024 || group_bytes != 1024) abort();
  return address >> 4;
}
static void wgmma_fence() {
  auto& groups = begun[simt::current];
  if (groups.empty()) groups.emplace_back();
}
template <int N>
void wgmma_e4m3(float (&d)[N], u64 a, u64 b, int add) {
  begun[simt::current].back().push_back({d, N, a, b, add != 0});
}
static void wgmma_commit() { begun[simt::current].emplace_back(); }
template <int PENDING>
void wgmma_wait() {
  auto& groups = begun[simt::current];
  // The last lane is late: who takes what it reads for read before this has come back shows.
  for (int late = threadIdx.x % 32 == 31 ? 3 : 0; late; --late) simt::leave();
  while (groups.size() > PENDING + 1) {
    for (const Product& product : groups.front()) multiply_now(product);
    groups.erase(groups.begin());
  }
  simt::meet_warp(0);
}
