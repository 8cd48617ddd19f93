// Top-k by the Hopper kernel's own code, compiled for a CPU: `test_hopper_topk.py` builds it.
#include <cmath>
#include <map>
#include <utility>

#include "hopper_simt.h"

#define shared_address ptx_shared_address
#define peer_address ptx_peer_address
#define inclusive_scan ptx_inclusive_scan
#define count_at ptx_count_at
#define count_if ptx_count_if
#define load_once_16_if ptx_load_once_16_if
#define send_8 ptx_send_8
#define send_4 ptx_send_4
#define mbarrier_init ptx_mbarrier_init
#define mbarrier_arrive_expect ptx_mbarrier_arrive_expect
#define mbarrier_wait_cluster ptx_mbarrier_wait_cluster
#define mbarrier_test ptx_mbarrier_test
#define cluster_arrive ptx_cluster_arrive
#define cluster_wait ptx_cluster_wait
#define cluster_meet ptx_cluster_meet
#define peer_pointer ptx_peer_pointer
#define load_once_16 ptx_load_once_16
#define named_barrier ptx_named_barrier
#define store_entry_if ptx_store_entry_if
#define add_if_reaches ptx_add_if_reaches
#define append_if_reaches ptx_append_if_reaches
#define append_if ptx_append_if
#define add_if_above ptx_add_if_above
#define append_word_if_bit ptx_append_word_if_bit
#define both_reach ptx_both_reach
#define load_words_once ptx_load_words_once
#define store_int_if ptx_store_int_if
#define next_number ptx_next_number
#define place_at ptx_place_at
#define load_shared_8 ptx_load_shared_8
#define store_shared_16 ptx_store_shared_16
#define store_shared_8 ptx_store_shared_8
#define wait_for_prerequisites ptx_wait_for_prerequisites
#define launch_dependents ptx_launch_dependents
#include "topk_ptx.cuh"
#undef wait_for_prerequisites
#undef launch_dependents
#undef cluster_wait
#undef shared_address
#undef peer_address
#undef inclusive_scan
#undef count_at
#undef count_if
#undef load_once_16_if
#undef send_8
#undef send_4
#undef mbarrier_init
#undef mbarrier_arrive_expect
#undef mbarrier_wait_cluster
#undef mbarrier_test
#undef cluster_arrive
#undef cluster_meet
#undef peer_pointer
#undef load_once_16
#undef named_barrier
#undef store_entry_if
#undef store_int_if
#undef add_if_reaches
#undef append_if_reaches
#undef append_if
#undef add_if_above
#undef append_word_if_bit
#undef both_reach
#undef load_words_once
#undef next_number
#undef place_at
#undef load_shared_8
#undef store_shared_16
#undef store_shared_8

static float __fdividef(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }

// Threads of a cluster that have arrived; how often all have, which those that wait remember.
static size_t arrived;
static unsigned generation;
static std::map<int, unsigned> met;
static int number_in_cluster() { return simt::current->cta * simt::num_threads + simt::current->index; }
static void cluster_arrive() {
  met[number_in_cluster()] = generation;
  if (++arrived == simt::threads.size()) arrived = 0, ++generation;
}
static void cluster_wait() {
  while (met.at(number_in_cluster()) == generation) simt::leave();
}
static void cluster_meet() { cluster_arrive(), cluster_wait(); }
static void launch_dependents() {}

// The launch in front writes a row's scores, and its results too. It ends once all threads of the row's cluster wait for
// it, so that whoever reads or writes before that has something wrong.
static std::function<void()> front;
static void wait_for_prerequisites() {
  simt::meet_cluster();
  if (front) std::exchange(front, nullptr)();
}
template <int, int COUNT>
void named_barrier() {
  simt::meet(simt::cta().named, simt::current->index, COUNT, 0);
}
static void store_entry_if(bool condition, u64* target, u64 entry) {
  if (condition) *target = entry;
}
static void store_int_if(bool condition, int* target, int value) {
  if (condition) *target = value;
}
static float4 load_once_16(const float* source) {
  if (reinterpret_cast<uintptr_t>(source) % 16) abort();
  return {source[0], source[1], source[2], source[3]};
}
template <class T>
T* peer_pointer(T* here, u32 rank) {
  const uintptr_t offset = reinterpret_cast<uintptr_t>(here) - reinterpret_cast<uintptr_t>(simt::shared_memory());
  if (rank >= simt::ctas.size() || offset >= simt::ctas[rank].shared.size() * 8) abort();
  return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(simt::ctas[rank].shared.data()) + offset);
}

// Addresses are offsets, and a peer's has its rank, and one, above.
static u32 shared_address(const void* here) {
  return reinterpret_cast<uintptr_t>(here) - reinterpret_cast<uintptr_t>(simt::shared_memory());
}
static u32 peer_address(u32 address, u32 rank) { return (rank + 1) << 24 | address; }
template <class T>
T& at(u32 address) {
  auto& shared = simt::ctas.at(address >> 24 ? (address >> 24) - 1 : simt::current->cta).shared;
  address %= 1 << 24;
  if (address % sizeof(T) || address + sizeof(T) > shared.size() * 8) abort();
  return *reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(shared.data()) + address);
}
static void add_if_reaches(u32& sum, float score, float least, u32 amount) {
  if (score >= least) sum += amount;
}
static void append_if(bool condition, u32& address, float score, u32 place) {
  if (!condition) return;
  at<u64>(address) = static_cast<u64>(__float_as_uint(score)) << 32 | place;
  address += 8;
}
template <u32 BIT>
void append_word_if_bit(u32 bits, u32& address, u32 word) {
  if (bits & BIT) at<u32>(address) = word, address += 4;
}
static u32 both_reach(u32 two, u32 least) {
  auto reaches = [](u32 a, u32 b) { return __uint_as_float(a << 16) >= __uint_as_float(b << 16); };
  return (reaches(two, least) ? 0xffff : 0) | (reaches(two >> 16, least >> 16) ? 0xffff0000 : 0);
}
static uint4 load_words_once(const u32* source) {
  if (reinterpret_cast<uintptr_t>(source) % 16) abort();
  return {source[0], source[1], source[2], source[3]};
}
static void append_if_reaches(u32& address, float score, float least, u32 place) {
  append_if(score >= least, address, score, place);
}
static void add_if_above(u32& sum, float score, float bound, u32 amount) {
  if (score > bound) sum += amount;
}
static void count_at(u32 address) { ++at<u32>(address); }
static void count_if(bool condition, u32 address) {
  if (condition) count_at(address);
}
static u32 next_number(u32 address) { return at<u32>(address)++; }
static uint2 load_shared_8(u32 address) { return at<uint2>(address); }
static void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) { at<uint4>(address) = {a, b, c, d}; }
static void store_shared_8(u32 address, u32 a, u32 b) { at<uint2>(address) = {a, b}; }
static u32 inclusive_scan(u32 value) {
  const auto& all = simt::meet_warp(value);
  u32 sum = 0;
  for (u32 lane = 0; lane <= threadIdx.x % 32; ++lane) sum += all[lane];
  return sum;
}
static float4 load_once_16_if(bool condition, const float* source) {
  return condition ? load_once_16(source) : float4{1e30f, 1e30f, 1e30f, 1e30f};
}

// Packets land in any order, while somebody waits for them. A barrier's phase is over when all have arrived and as
// many bytes have landed as they expect.
struct Barrier {
  u32 count, pending;
  i64 bytes;
  u32 phase;
  void settle() {
    if (pending == 0 && bytes == 0) pending = count, ++phase;
  }
};
static std::map<u32, Barrier> barriers;  // by addresses of peers
static std::vector<std::function<void()>> flights;
static u32 of_peer(u32 address) { return address >> 24 ? address : peer_address(address, simt::current->cta); }
static void mbarrier_init(u32 address, u32 count) { barriers[of_peer(address)] = {count, count, 0, 0}; }
static void arrive(u32 address, u32 bytes) {
  Barrier& one = barriers.at(of_peer(address));
  if (one.pending-- == 0) abort();
  one.bytes += bytes, one.settle();
}
static void mbarrier_arrive_expect(u32 address, u32 bytes) { arrive(address, bytes); }
template <class T>
void send(u32 address, u32 barrier, T value) {
  if (address >> 24 != barrier >> 24 || address >> 24 == 0) abort();
  flights.push_back([=] {
    Barrier& one = barriers.at(barrier);
    at<T>(address) = value, one.bytes -= sizeof(T), one.settle();
  });
}
static void send_8(u32 address, u32 barrier, u64 value) { send(address, barrier, value); }
static void send_4(u32 address, u32 barrier, u32 value) { send(address, barrier, value); }
static bool mbarrier_test(u32 address, u32 parity) {
  static u32 random = 1;
  static long patience = 0;
  if (barriers.at(of_peer(address)).phase % 2 != parity) return patience = 0, simt::meet_warp(0), true;
  if (++patience == 100000000) abort();
  random = random * 1664525u + 1013904223u;
  if (!flights.empty()) {
    std::swap(flights[(random >> 8) % flights.size()], flights.back());
    const auto landing = std::move(flights.back());
    flights.pop_back(), landing();
  }
  simt::leave();
  return false;
}
static void mbarrier_wait_cluster(u32 address, u32 parity) {
  while (!mbarrier_test(address, parity)) {}
}

static Place place_at(u32 address) { return {at<u32>(address), at<u32>(address + 4), at<u32>(address + 8)}; }

#include "topk_row.cuh"

static i64 row_of_front;
static void begin_front(const Params& p, i64 row, bool planes = false) {
  if (row_of_front == row) return;
  row_of_front = row;
  float* const scores = const_cast<float*>(p.scores) + row * p.pitch;
  int* const indices = p.indices + row * p.indices_pitch;
  front = [=, made = std::vector<float>(scores, scores + (planes ? p.pitch : p.num_columns)), length = p.lengths + row, was = p.lengths[row],
           results = std::vector<int>(indices, indices + p.k)] {
    std::copy(made.begin(), made.end(), scores), std::copy(results.begin(), results.end(), indices), *length = was;
  };
  std::fill(scores, scores + (planes ? p.pitch : p.num_columns), 7.f);
}

extern "C" int bytes_of_params() { return sizeof(Params); }
extern "C" int bytes_of_control() { return sizeof(Control); }

// Counts of the last cluster: 1 where the first bins told enough.
extern "C" int counts() {
  auto phase = [](size_t offset) { return barriers.at(peer_address(offset, simt::ctas.size() - 1)).phase; };
  return phase(offsetof(Control, met)) + phase(offsetof(Control, counted)) - 1;
}

template <int THREADS, int VECTORS, int SAMPLED, bool FEW_ROWS = true, bool PLANES = false, bool LONG = false>
void launch(const Params& p, int shared_bytes, int seed) {
  simt::launch(p.num_rows, p.cluster, THREADS, shared_bytes, seed, [&] {
    const i64 row = p.num_rows - 1 - blockIdx.x / p.cluster;
    begin_front(p, row, PLANES);
    Selection<THREADS, VECTORS, SAMPLED, FEW_ROWS, PLANES, LONG>(p, simt::shared_memory())
        .run(row, blockIdx.x % p.cluster);
  });
}

template <int THREADS, int VECTORS>
void launch_short(const Params& p, int shared_bytes, int seed) {
  simt::launch(p.num_rows, 1, THREADS, shared_bytes, seed, [&] {
    begin_front(p, p.num_rows - 1 - blockIdx.x);
    select_short<THREADS, VECTORS>(p, simt::shared_memory(), p.num_rows - 1 - blockIdx.x);
  });
}

template <int THREADS, int VECTORS>
void launch_cluster(const Params& p, int shared_bytes, int seed) {
  simt::launch(p.num_rows, p.cluster, THREADS, shared_bytes, seed, [&] {
    const i64 row = p.num_rows - 1 - blockIdx.x / p.cluster;
    begin_front(p, row);
    select_in_cluster<THREADS, VECTORS>(p, simt::shared_memory(), row, blockIdx.x % p.cluster);
  });
}

// Returns 1 where there is no such kernel, 3 where a row's threads did not wait for the launch in front, 4 where they did
// not wait for what was sent.
extern "C" int topk(const Params* p, int threads, int vectors, int shared_bytes, int short_rows, int seed, int planes,
                    int held) {
  row_of_front = -1, front = nullptr;
  if (held && threads == 64 && held == 1)
    launch_cluster<64, 1>(*p, shared_bytes, seed);
  else if (held && threads == 64 && held == 2)
    launch_cluster<64, 2>(*p, shared_bytes, seed);
  else if (held && threads == 64 && held == 4)
    launch_cluster<64, 4>(*p, shared_bytes, seed);
  else if (held && threads == 128 && held == 6)
    launch_cluster<128, 6>(*p, shared_bytes, seed);
  else if (held)
    return 1;
  else if (planes == 2 && threads == 128 && vectors == 2)
    launch<128, 2, 2, false, true, true>(*p, shared_bytes, seed);
  else if (planes == 1 && threads == 128 && vectors == 2)
    launch<128, 2, 2, false, true>(*p, shared_bytes, seed);
  else if (planes)
    return 1;
  else if (short_rows && threads == 512 && vectors == 1)
    launch_short<512, 1>(*p, shared_bytes, seed);
  else if (short_rows && threads == 512 && vectors == 2)
    launch_short<512, 2>(*p, shared_bytes, seed);
  else if (short_rows && threads == 128 && vectors == 4)
    launch_short<128, 4>(*p, shared_bytes, seed);
  else if (!short_rows && threads == 64 && vectors == 1)
    launch<64, 1, 2>(*p, shared_bytes, seed);
  else if (!short_rows && threads == 64 && vectors == 2)
    launch<64, 2, 2>(*p, shared_bytes, seed);
  else if (!short_rows && threads == 128 && vectors == 4)
    launch<128, 4, 1>(*p, shared_bytes, seed);
  else if (!short_rows && threads == 128 && vectors == 2)
    launch<128, 2, 2, false>(*p, shared_bytes, seed);
  else
    return 1;
  return front ? 3 : flights.empty() ? 0 : 4;
}
