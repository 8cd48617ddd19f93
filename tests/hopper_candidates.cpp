// Selection of keys in one launch by the Hopper kernel's own code, compiled for a CPU: `test_hopper_candidates.py` builds
// it.
#define load_once_16 ptx_load_once_16
#define store_entry_if ptx_store_entry_if
#include "hopper_indexer.h"
#undef load_once_16
#undef store_entry_if
#define inclusive_scan ptx_inclusive_scan
#define count_at ptx_count_at
#define next_number ptx_next_number
#define place_at ptx_place_at
#define set_if ptx_set_if
#define add_if_reaches ptx_add_if_reaches
#define append_if_reaches ptx_append_if_reaches
#define append_if ptx_append_if
#define load_once_16_if ptx_load_once_16_if
#include "topk_ptx.cuh"
#undef inclusive_scan
#undef count_at
#undef next_number
#undef place_at
#undef set_if
#undef add_if_reaches
#undef append_if_reaches
#undef append_if
#undef load_once_16_if

static void count_at(u32 address) { ++at<u32>(address); }
static u32 next_number(u32 address) { return at<u32>(address)++; }
static Place place_at(u32 address) { return {at<u32>(address), at<u32>(address + 4), at<u32>(address + 8)}; }
static void set_if(bool condition, u32 address, u32 bits) {
  if (condition) at<u32>(address) |= bits;
}
static void add_if_reaches(u32& sum, float score, float least, u32 amount) {
  if (score >= least) sum += amount;
}
static void append_if(bool condition, u32& address, float score, u32 place) {
  if (!condition) return;
  at<u64>(address) = static_cast<u64>(__float_as_uint(score)) << 32 | place;
  address += 8;
}
static void append_if_reaches(u32& address, float score, float least, u32 place) {
  append_if(score >= least, address, score, place);
}
static u32 inclusive_scan(u32 value) {
  const auto& all = simt::meet_warp(value);
  u32 sum = 0;
  for (u32 lane = 0; lane <= threadIdx.x % 32; ++lane) sum += all[lane];
  return sum;
}
static void store_entry_if(bool condition, u64* target, u64 entry) {
  if (condition) *target = entry;
}
static float4 load_once_16(const float* source) {
  if (reinterpret_cast<uintptr_t>(source) % 16) abort();
  return {source[0], source[1], source[2], source[3]};
}
static bool of_memory;  // a row was chosen of scores in memory
static float4 load_once_16_if(bool condition, const float* source) {
  of_memory |= condition;
  return condition ? load_once_16(source) : float4{1e30f, 1e30f, 1e30f, 1e30f};
}

#include "indexer_candidates.cuh"

template <int HEADS>
int launch(const SelectionParams& p, int ctas, int seed) {
  using L = CandidatesLayout<HEADS>;
  shared_size = L::BYTES;
  begun.clear(), barriers.clear(), flights.clear(), waited.clear(), early = of_memory = false, failures = 0;
  simt::launch(ctas, 1, L::THREADS, L::BYTES, seed, [&] { make_candidates<L>(p, 0, simt::shared_memory()); });
  return early || failures || waited.size() != static_cast<size_t>(ctas) ? 3 : 0;
}

extern "C" int select_in_one(const void* params, int heads, int ctas, int seed) {
  alignas(SelectionParams) unsigned char bytes[sizeof(SelectionParams)];
  std::memcpy(bytes, params, sizeof(SelectionParams));
  const SelectionParams& p = reinterpret_cast<const SelectionParams&>(bytes);
  return heads == 64 ? launch<64>(p, ctas, seed) : launch<32>(p, ctas, seed);
}
extern "C" int bytes_of_params() { return sizeof(SelectionParams); }
extern "C" int chosen_of_memory() { return of_memory; }
