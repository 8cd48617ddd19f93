// Which keys each CTA of a launch of the Hopper kernels gathers, and what it leaves in shared memory, by their own
// code, compiled for a CPU. `test_hopper_rows.py` builds it, without what is written in PTX: the few instructions that
// a gather consists of are modelled below. A warp's lanes are coroutines that meet where they exchange something.

#include <math.h>

#include <map>
#include <vector>

#include "hopper_coroutines.h"
#include "hopper_on_cpu.h"

static int rank_of_cta;

// ---- the warps that gather -----------------------------------------------------------------------------------------

constexpr int WARPS = 4, LANES = 32, THREADS = WARPS * LANES;
static Coroutine threads[THREADS];
static char stacks[THREADS][1 << 16];
static unsigned long long exchanged[2][THREADS];
static int current, rounds[THREADS], meetings[THREADS];
static int live[WARPS], arrived[WARPS], complete[WARPS];  // lanes that run, that wait for the others; rounds
static bool done[THREADS], stuck;
static void (*body)(int warp, int lane);

// Lets others go on until something is true; gives up when nobody can.
template <class Condition>
void wait_until(Condition condition) {
  for (int turns = 0; !condition(); ++turns) {
    if (turns > 4 * THREADS) stuck = true;
    if (stuck) return;
    leave(threads[current]);
  }
}

static void complete_round(int warp) {
  if (arrived[warp] == live[warp]) arrived[warp] = 0, ++complete[warp];
}

// The values of a warp's lanes, once all that run have come.
static const unsigned long long* exchange(unsigned long long value) {
  const int round = ++rounds[current], warp = current / LANES;
  exchanged[round & 1][current] = value;
  ++arrived[warp], complete_round(warp);
  wait_until([&] { return complete[warp] >= round; });
  return exchanged[round & 1] + warp * LANES;
}

static void begin() {
  const int thread = current;
  for (;;) {  // a run begins where the last one ended
    body(thread / LANES, thread % LANES);
    done[thread] = true, --live[thread / LANES], complete_round(thread / LANES);
    leave(threads[thread]);
  }
}

// Whether all threads come to their end.
static bool run(void (*threads_body)(int warp, int lane)) {
  body = threads_body, stuck = false;
  for (int warp = 0; warp < WARPS; ++warp) live[warp] = LANES, arrived[warp] = complete[warp] = 0;
  for (int thread = 0; thread < THREADS; ++thread) {
    if (!threads[thread].begun) threads[thread].set_up(begin, stacks[thread], sizeof(stacks[thread]));
    rounds[thread] = meetings[thread] = 0, done[thread] = false;
  }
  while (!std::all_of(done, done + THREADS, [](bool over) { return over; }))
    for (current = 0; current < THREADS; ++current)
      if (!done[current]) threadIdx.x = current, resume(threads[current]);
  return !stuck;
}

static void __syncwarp() { exchange(0); }
static void __syncthreads() {
  const int meeting = ++meetings[current];
  wait_until([&] { return *std::min_element(meetings, meetings + THREADS) >= meeting; });
}
static int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = current % LANES;
  const unsigned long long* values = exchange(static_cast<unsigned>(value));
  return static_cast<int>(values[lane >= step ? lane - step : lane]);
}
static int __reduce_add_sync(unsigned, int value) {
  const unsigned long long* values = exchange(static_cast<unsigned>(value));
  int sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += static_cast<int>(values[lane]);
  return sum;
}
static int __reduce_max_sync(unsigned, int value) {
  const unsigned long long* values = exchange(static_cast<unsigned>(value));
  int most = value;
  for (int lane = 0; lane < LANES; ++lane) most = max(most, static_cast<int>(values[lane]));
  return most;
}
static unsigned __ballot_sync(unsigned, bool value) {
  const unsigned long long* values = exchange(value);
  unsigned bits = 0;
  for (int lane = 0; lane < LANES; ++lane) bits |= static_cast<unsigned>(values[lane]) << lane;
  return bits;
}
static bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
static bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
static unsigned __reduce_or_sync(unsigned, unsigned value) {
  const unsigned long long* values = exchange(value);
  unsigned bits = 0;
  for (int lane = 0; lane < LANES; ++lane) bits |= static_cast<unsigned>(values[lane]);
  return bits;
}
static float __fdividef(float a, float b) { return a / b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return static_cast<T>(exchange(static_cast<unsigned long long>(value))[lane]);
}

// ---- instructions ---------------------------------------------------------------------------------------------------

#define cluster_rank ptx_cluster_rank
#define mbarrier_wait ptx_mbarrier_wait
#define mbarrier_arrive ptx_mbarrier_arrive
#define mbarrier_expect ptx_mbarrier_expect
#define mbarrier_arrive_expect ptx_mbarrier_arrive_expect
#define warp_arrive ptx_warp_arrive
#define bulk_copy ptx_bulk_copy
#define store_shared_4 ptx_store_shared_4
#define store_shared_8 ptx_store_shared_8
#define store_shared_16 ptx_store_shared_16
#define load_shared_4 ptx_load_shared_4
#define load_shared_8 ptx_load_shared_8
#define prefetch_to_l2 ptx_prefetch_to_l2
#define arrive_when_copied ptx_arrive_when_copied
#define copy_4 ptx_copy_4
#define copy_8 ptx_copy_8
#define shuffle_pointer ptx_shuffle_pointer
#define thread_here ptx_thread_here
#define lane_here ptx_lane_here
#define load_int_if ptx_load_int_if
#define named_barrier_any ptx_named_barrier_any
#include "ptx.cuh"
#undef cluster_rank
#undef mbarrier_wait
#undef mbarrier_arrive
#undef mbarrier_expect
#undef mbarrier_arrive_expect
#undef warp_arrive
#undef bulk_copy
#undef store_shared_4
#undef store_shared_8
#undef store_shared_16
#undef load_shared_4
#undef load_shared_8
#undef prefetch_to_l2
#undef arrive_when_copied
#undef copy_4
#undef copy_8
#undef shuffle_pointer
#undef thread_here
#undef lane_here
#undef load_int_if
#undef named_barrier_any

struct Barrier {
  int arrivals, bytes;  // arrivals so far, bytes still missing in this phase
  int completed;        // phases
};

static unsigned char shared_memory[232448];
static std::map<u32, Barrier> barriers;  // one arrival completes a phase
static void (*on_copy)(const unsigned char* source, u32 bytes);
static bool failed;                      // an access past the end or at no multiple of its size
static void (*on_completion)(u32 barrier);

static void check(u32 barrier) {
  Barrier& b = barriers[barrier];
  if (b.arrivals != 1 || b.bytes != 0) return;
  b.arrivals = 0, ++b.completed;
  on_completion(barrier);
}

static u32 cluster_rank() { return rank_of_cta; }
static void load_int_if(bool there, const int* source, int& value) {
  if (there) value = *source;
}
template <int ID, int COUNT>
static bool named_barrier_any(bool value) {
  static bool values[THREADS];
  values[current] = value;
  __syncthreads();
  const bool any = std::any_of(values, values + THREADS, [](bool one) { return one; });
  __syncthreads();
  return any;
}
static int thread_here() { return current; }
static int lane_here() { return current % LANES; }
static void mbarrier_wait(u32 barrier, u32 parity) {
  wait_until([&] { return (barriers[barrier].completed + 1 & 1) == static_cast<int>(parity); });
}
static void mbarrier_expect(u32 barrier, u32 bytes) { barriers[barrier].bytes += bytes; }
static void mbarrier_arrive(u32 barrier) { ++barriers[barrier].arrivals, check(barrier); }
static void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  mbarrier_expect(barrier, bytes), mbarrier_arrive(barrier);
}
static void warp_arrive(u32 barrier, int lane) {
  if (lane == 0) mbarrier_arrive(barrier);
}
static void write_shared(u32 address, const void* source, u32 bytes) {
  if (address % min(bytes & -bytes, 16u) || address + bytes > sizeof(shared_memory))
    failed = true;
  else
    std::memcpy(shared_memory + address, source, bytes);
}
static void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier) {
  if (destination % 16 || reinterpret_cast<u64>(source) % 16 || bytes % 16) failed = true;
  write_shared(destination, source, bytes);
  on_copy(static_cast<const unsigned char*>(source), bytes);
  barriers[barrier].bytes -= bytes;
  check(barrier);
}
static void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier, u64) {
  bulk_copy(destination, source, bytes, barrier);
}
static void store_shared_4(u32 address, u32 a) { write_shared(address, &a, 4); }
static void store_shared_8(u32 address, u32 a, u32 b) {
  const u32 words[] = {a, b};
  write_shared(address, words, 8);
}
static void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[] = {a, b, c, d};
  write_shared(address, words, 16);
}
static void prefetch_to_l2(const void* source) {
  volatile unsigned char there = *static_cast<const unsigned char*>(source);  // faults outside of a tensor
}
static void copy_8(u32 destination, const void* source) {
  if (destination % 8 || reinterpret_cast<u64>(source) % 8) failed = true;
  write_shared(destination, source, 8);
}
static void copy_4(u32 destination, const void* source) {
  if (reinterpret_cast<u64>(source) % 4) failed = true;
  write_shared(destination, source, 4);
}
static void arrive_when_copied(u32) {}  // copies are done at once
static u32 load_shared_4(u32 address) {
  u32 value;
  std::memcpy(&value, shared_memory + address, 4);
  return value;
}
static uint2 load_shared_8(u32 address) {
  uint2 value;
  std::memcpy(&value, shared_memory + address, 8);
  return value;
}
static const unsigned char* shuffle_pointer(const unsigned char* pointer, int lane) {
  return reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, reinterpret_cast<u64>(pointer), lane));
}

#include "balance.cuh"
#include "listed.cuh"

// ---- which keys -----------------------------------------------------------------------------------------------------

struct Found {
  int token, tile, part, turn;
  const unsigned char* row;
};

static const Params* params;
static Launch launch;
static std::vector<Found> found;
static Row row_of_warp[WARPS];
static int turn_of_warp[WARPS];
static std::map<int, int> turns_of_row;  // by number of the row, counted by its first warp

// Shared memory without a slot or a list.
constexpr u32 INTERVAL = sizeof(shared_memory) - 512, SCRATCH = INTERVAL + 64, UNREAD = INTERVAL - 16;

static Row first_row() {
  if (launch == Launch::ROWS) return row_at(*params, blockIdx.x);
  if (launch == Launch::SHARES) return first_row<Launch::SHARES>(*params, INTERVAL);
  if (launch == Launch::HELD) return first_row<Launch::HELD>(*params, INTERVAL);
  if (launch == Launch::BALANCED) {
    find_interval<THREADS>(*params, INTERVAL, SCRATCH);
    return first_row<Launch::BALANCED>(*params, INTERVAL);
  }
  return launch == Launch::GROUPS ? this_row<Launch::GROUPS>(*params) : this_row<Launch::CLUSTERS>(*params);
}

// Whether another follows.
static bool goes_on(Row& row) {
  if (!is_persistent(launch)) return false;
  if (launch == Launch::HELD && ends_row(*params, row)) return false;
  if (launch == Launch::SHARES)
    row = next_row<Launch::SHARES, true>(*params, INTERVAL, row);
  else if (launch == Launch::HELD)
    row = next_row<Launch::HELD, true>(*params, INTERVAL, row);
  else
    row = launch == Launch::ROWS ? next_row(*params, row) : next_row<Launch::BALANCED, true>(*params, INTERVAL, row);
  return row.token < (launch == Launch::BALANCED ? params->all_tokens : params->num_tokens);
}

static int number_of(const Row& row) { return row.token * params->head_tiles + row.tile; }

static void finds(const unsigned char* row) {
  const int warp = current / LANES;
  const Row& of = row_of_warp[warp];
  found.push_back({of.token, of.tile, of.part, turn_of_warp[warp], row});
}

// Whether no position of a share may be a key's, as one thread sees it.
static bool is_without_keys(const Row& row) {
  const Params& p = *params;
  for (int turn = row.first; turn < row.last; turn += row.stride)
    for (int position = 0; position < TILE_KEYS; ++position)
      if (in_range(p.caches[turn >= row.main_turns], index_at(p, row, turn, position / 32, position % 32)))
        return false;
  return true;
}

// Whether any position of a row may be a key's.
static bool has_any_key(Row row) {
  row.first = 0, row.stride = 1, row.last = row.main_turns + (row.extra_length + TILE_KEYS - 1) / TILE_KEYS;
  return !is_without_keys(row);
}

// Rows of bfloat16: each lane's keys, turn by turn.
template <class R>
void choose_all(int warp, int lane) {
  const Params& p = *params;
  Row row = first_row();
  for (bool more = row.token < p.all_tokens; more; more = goes_on(row)) {
    Stream stream = begin_stream(p, row, warp, lane);
    row_of_warp[warp] = row;
    const int request = request_of(p, row);
    bool last = false;
    for (int turn = 0; !last; ++turn) {
      const Chosen chosen = choose_keys(p, row, stream, warp * LIST_WORDS * 4, turn & 1, warp, lane);
      const Place place = place_of(p, request, chosen);
      turn_of_warp[warp] = turn, last = chosen.last;
      const bool none = has_no_keys(stream, chosen, warp);
      if (turn == 0 && lane == 0) failed |= none != is_without_keys(row);
      if (is_live(p.caches[chosen.extra()], place)) {
        failed |= lane >= 16;
        finds(row_of_key<R>(p.caches[chosen.extra()], place));
      }
      if (lane == 0 && warp == 0) ++turns_of_row[number_of(row)];
      __syncwarp();
    }
  }
}

// ---- what is in shared memory ---------------------------------------------------------------------------------------

// 16 rows of a turn, when their barrier completes.
struct Slot {
  int token, tile;
  u32 alive;
  unsigned char rows[16 * 656], scales[16 * 8];
};

static std::vector<Slot> slots;

// The consumers of a slot take what it has at once, and give it back.
template <int HEADS, Format FORMAT>
void take(u32 barrier) {
  using L = Layout<HEADS, FORMAT>;
  const u32 slot = (barrier - L::RAW_FULL) / 8;
  const Row& row = row_of_warp[current / LANES];
  slots.push_back({row.token, row.tile});
  Slot& taken = slots.back();
  std::memcpy(&taken.alive, shared_memory + L::LIVE + slot * 4, 4);
  std::memcpy(taken.rows, shared_memory + L::RAW + slot * L::RAW_SLOT, L::RAW_SLOT);
  if (L::R::SCALES_APART) std::memcpy(taken.scales, shared_memory + L::SCALES + slot * L::SCALES_SLOT, L::SCALES_SLOT);
  std::memset(shared_memory + L::RAW + slot * L::RAW_SLOT, 0x7f, L::RAW_SLOT);
  ++barriers[barrier + L::RAW_FREE - L::RAW_FULL].completed;
  turns_of_row[number_of(row)] += current / LANES == 0;
}

template <int HEADS, Format FORMAT>
void gather_keys(int warp, int lane) {
  const Params& p = *params;
  int slot = warp, parity = 1;
  bool first = true;
  Row row = first_row();
  for (bool more = row.token < p.all_tokens; more; more = goes_on(row), first = false) {
    row_of_warp[warp] = row;
    if (HEADS != 24 && (launch == Launch::CLUSTERS || launch == Launch::GROUPS)) {
      ask_for_indices(p, row, UNREAD);
      __syncwarp();
      const Indices ahead = indices_at(p, row, row.first, lane);
      bool empty;
      if constexpr (HEADS < 64) {
        empty = produce_listed<HEADS, FORMAT, true>(p, row, 0, ahead, warp, lane, slot, parity);
      } else {
        const auto gather = launch == Launch::GROUPS && FORMAT == FP8_DS_MLA ? produce<HEADS, FORMAT, false, true, false>
                                                                             : produce<HEADS, FORMAT, false, true, true>;
        empty = gather(p, row, 0, ahead, warp, lane, slot, parity, first);
      }
      failed |= empty != is_without_keys(row) || empty && has_keys(p, row, thread_here()) != has_any_key(row);
    } else if (HEADS != 24 && launch == Launch::ROWS) {
      const Indices ahead = begin_asking<32>(p, row, lane, UNREAD);
      __syncwarp();
      if constexpr (HEADS < 64)
        produce_listed<HEADS, FORMAT, false>(p, row, 0, ahead, warp, lane, slot, parity);
      else
        produce<HEADS, FORMAT, false, false, false, true, FORMAT == FP8_DS_MLA>(p, row, 0, ahead, warp, lane, slot, parity, first);
    } else {
      const Indices ahead = begin_share(p, row, lane).now;
      __syncwarp();
      produce<HEADS, FORMAT>(p, row, 0, ahead, warp, lane, slot, parity, HEADS == 64 && first);
    }
  }
}

template <int HEADS, Format FORMAT>
int gather() {
  std::memset(shared_memory, 0x7f, sizeof(shared_memory));  // e4m3's NaN
  barriers.clear(), slots.clear(), found.clear(), turns_of_row.clear(), failed = false;
  on_completion = take<HEADS, FORMAT>;
  on_copy = [](const unsigned char* source, u32 bytes) {
    for (u32 at = 0; at < bytes; at += Rows<FORMAT>::BYTES) finds(source + at);
  };
  failed |= !run(gather_keys<HEADS, FORMAT>);
  for (const auto& barrier : barriers) failed |= barrier.second.bytes != 0 || barrier.second.arrivals != 0;
  return failed ? -1 : static_cast<int>(slots.size());
}

// ---- calls ----------------------------------------------------------------------------------------------------------

extern "C" int bytes_of_params() { return sizeof(Params); }

// The CTA `block` of `grid`, the rank-th of its cluster.
extern "C" void choose_cta(const Params* p, const int* block, const int* grid, int rank, int launch_) {
  params = p, launch = static_cast<Launch>(launch_), rank_of_cta = rank;
  blockIdx = {block[0], block[1], block[2]}, gridDim = {grid[0], grid[1], grid[2]};
}

template <Format FORMAT>
int gather_of(int heads) {
  if (heads == 16) return gather<16, FORMAT>();
  if (heads == 24) return gather<24, FORMAT>();
  return heads == 32 ? gather<32, FORMAT>() : gather<64, FORMAT>();
}

// How many slots of quantised keys it fills, -1 where it would wait for ever or leave a barrier unfinished.
extern "C" int slots_of_cta(int row_bytes, int heads) {
  return row_bytes == Rows<FP8_DS_MLA>::BYTES ? gather_of<FP8_DS_MLA>(heads) : gather_of<FP8_DS_MLA_V4>(heads);
}

extern "C" const Slot* slots_filled() { return slots.data(); }

template <class R>
int choose() {
  found.clear(), turns_of_row.clear(), failed = false;
  failed |= !run(choose_all<R>);
  return failed ? -1 : static_cast<int>(found.size());
}

// How many keys it gathers.
extern "C" int keys_of_cta(int row_bytes, int heads) {
  if (row_bytes == 1024) return choose<PlainRows<1024>>();
  if (row_bytes == 1152) return choose<PlainRows<1152>>();
  const int slots_ = slots_of_cta(row_bytes, heads);
  return slots_ < 0 ? slots_ : static_cast<int>(found.size());
}

extern "C" const Found* keys_found() { return found.data(); }

// A worker's CTA takes this much of a token and leaves it at `part`, which is -1 for a whole token.
struct Taken {
  int token, tile, part, first, last;
};

static std::vector<Taken> taken;

static void take_pieces(int warp, int lane) {
  Row row = first_row();
  for (bool more = row.token < params->all_tokens; more; more = goes_on(row)) {
    const int part = part_of(*params, INTERVAL, row.token);
    if (warp == 0 && lane == 0) taken.push_back({row.token, row.tile, part, row.first, row.last});
  }
}

static bool decision;

static void decide_all(int warp, int lane) {
  if (warp == 0 && lane == 0) decision = false;
  const bool balanced = shares_evenly<Launch::ROWS>(*params, add_up_costs<THREADS>(*params, SCRATCH));
  if (warp == 3 && lane == 31) decision = balanced;
}

// Whether it shares rows evenly, -1 where it would wait for ever. The first one tells the others' merge.
extern "C" int decision_of_cta() {
  failed = false;
  failed |= !run(decide_all);
  return failed ? -1 : decision;
}

// How many pieces it takes, -1 where it would wait for ever.
extern "C" int pieces_of_cta() {
  taken.clear(), failed = false;
  failed |= !run(take_pieces);
  return failed ? -1 : static_cast<int>(taken.size());
}

extern "C" const Taken* pieces_taken() { return taken.data(); }

// How many turns it takes for a token and a tile; 0 of one that is not its own.
extern "C" int turns_of(int token, int tile) { return turns_of_row[token * params->head_tiles + tile]; }

template <class R>
long long bytes_to_key(const Cache& cache, int offset, bool scales) {
  const Place place{1, offset};
  if constexpr (R::SCALES_APART) {
    if (scales) return scales_of_key<R>(cache, place) - cache.rows;
  }
  return row_of_key<R>(cache, place) - cache.rows;
}

// How far the row, or the scales, of a key at `offset` of the second block are from the first byte of the cache.
extern "C" long long bytes_to(int row_bytes, long long block_bytes, int block_size, int offset, bool scales) {
  Cache cache{};
  cache.block_bytes = block_bytes, cache.block_size = block_size;
  if (row_bytes == 1152) return bytes_to_key<PlainRows<1152>>(cache, offset, scales);
  if (row_bytes == 1024) return bytes_to_key<PlainRows<1024>>(cache, offset, scales);
  if (row_bytes == Rows<FP8_DS_MLA>::BYTES) return bytes_to_key<Rows<FP8_DS_MLA>>(cache, offset, scales);
  return bytes_to_key<Rows<FP8_DS_MLA_V4>>(cache, offset, scales);
}
