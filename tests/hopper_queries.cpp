// Places of the queries of 64 heads in shared memory once a CTA has copied them, prefetches to L2 before, and their
// conversion in place by the warpgroups of a CTA, by the kernels' own code, compiled for a CPU. `test_hopper_queries.py` builds it.
#include <vector>

#include "hopper_simt.h"

#define copy_16 ptx_copy_16
#define prefetch_to_l2 ptx_prefetch_to_l2
#define fence_async_shared ptx_fence_async_shared
#define larger_halves ptx_larger_halves
#define larger_magnitudes ptx_larger_magnitudes
#define load_shared_16 ptx_load_shared_16
#define load_shared_4 ptx_load_shared_4
#define mbarrier_wait ptx_mbarrier_wait
#define multiply_bfloat16 ptx_multiply_bfloat16
#define named_barrier ptx_named_barrier
#define named_barrier_arrive ptx_named_barrier_arrive
#define pack_float16 ptx_pack_float16
#define store_shared_16 ptx_store_shared_16
#define store_shared_4 ptx_store_shared_4
#define store_shared_float2 ptx_store_shared_float2
#include "ptx.cuh"
#undef copy_16
#undef prefetch_to_l2
#undef fence_async_shared
#undef larger_halves
#undef larger_magnitudes
#undef load_shared_16
#undef load_shared_4
#undef mbarrier_wait
#undef multiply_bfloat16
#undef named_barrier
#undef named_barrier_arrive
#undef pack_float16
#undef store_shared_16
#undef store_shared_4
#undef store_shared_float2

static unsigned char* shared_memory;
static std::vector<const void*>* lines;
static bool failed;  // a copy from or to no multiple of 16 bytes

template <int TO, int FROM>
static void copy_16(u32 to, const void* from) {
  failed |= (to + TO) % 16 || (reinterpret_cast<u64>(from) + FROM) % 16;
  std::memcpy(shared_memory + to + TO, static_cast<const unsigned char*>(from) + FROM, 16);
}
static void prefetch_to_l2(const void* line) { lines->push_back(line); }

static u32 each_half(u32 a, u32 b, u32 (*f)(u32, u32)) { return f(a & 0xffff, b & 0xffff) | f(a >> 16, b >> 16) << 16; }
static u32 larger_halves(u32 a, u32 b) {
  return each_half(a, b, [](u32 x, u32 y) { return max(x, y); });
}
static u32 larger_magnitudes(u32 a, u32 b) {  // NaN only where both are
  return each_half(a, b, [](u32 x, u32 y) {
    x &= 0x7fff, y &= 0x7fff;
    return x > 0x7f80 ? y : y > 0x7f80 ? x : max(x, y);
  });
}
// By a power of two whose result neither overflows nor loses bits.
static u32 multiply_bfloat16(u32 pair, u32 factor) {
  return each_half(pair, factor, [](u32 x, u32 y) {
    return __float_as_uint(__uint_as_float(x << 16) * __uint_as_float(y << 16)) >> 16;
  });
}
static u32 pack_float16(float low, float high) {  // bits that tell both numbers, in the places of the two
  return __float_as_uint(low) >> 16 | __float_as_uint(high) & 0xffff0000u;
}

static std::vector<int> stores;  // of each 16 bytes of queries
static int copied, columns_read, weights;
static bool overwritten;

static uint4 load_shared_16(u32 at) {
  uint4 v;
  std::memcpy(&v, shared_memory + at, 16);
  simt::leave();
  return v;
}
static u32 load_shared_4(u32 at) {
  u32 v;
  std::memcpy(&v, shared_memory + at, 4);
  return v;
}
static void store_shared_16(u32 at, u32 a, u32 b, u32 c, u32 d) {
  const u32 v[4] = {a, b, c, d};
  std::memcpy(shared_memory + at, v, 16), ++stores[at / 16];
  simt::leave();
}
static void store_shared_4(u32 at, u32 v) { std::memcpy(shared_memory + at, &v, 4); }
static void store_shared_float2(u32 at, float a, float b) {
  std::memcpy(shared_memory + at, &a, 4), std::memcpy(shared_memory + at + 4, &b, 4);
}
static void await(const int& count, int enough) {
  while (count < enough) simt::leave();
}
static int row_number;
static void mbarrier_wait(u32, u32) { await(columns_read, 256 * (row_number + 1)); }  // FACTORS_FREE
static void fence_async_shared() {}

static struct {
  int arrived = 0;
  unsigned generation = 0;
} named[16];
static void named_barrier_arrive(int id, int threads) {
  if (++named[id].arrived == threads) named[id].arrived = 0, ++named[id].generation;
}
static void named_barrier(int id, int threads) {
  const unsigned generation = named[id].generation;
  named_barrier_arrive(id, threads);
  while (named[id].generation == generation) simt::leave();
}

#include "queries.cuh"

// Rows one after the other, as `sparse_attention.cu` goes from one to the next. What the queries and columns of each are
// goes to `found`; whether each place was written once is returned.
template <Format FORMAT, bool LENDS>
bool convert_rows(const Params& p, int rows, unsigned char* found, unsigned seed) {
  using L = Layout<64, FORMAT>;
  constexpr int QUERIES = L::R::CHUNKS * L::QUERY_CHUNK, COLUMNS = 64 * 8;
  std::vector<unsigned char> room(L::BYTES);
  shared_memory = room.data(), stores.assign(L::BYTES / 16, 0);
  copied = columns_read = weights = row_number = 0, overwritten = failed = false;
  for (auto& one : named) one.arrived = 0;
  simt::launch(1, 1, 512, 16, seed, [&]() {
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    for (int number = 0; number < rows; ++number) {
      Row row{};
      row.token = number;
      if (warpgroup == 3) {
        await(weights, 128 * number);  // QUERIES_FREE
        copy_queries<64, FORMAT, 128>(p, row, 0, thread);
        ++copied;
      } else if (warpgroup == 0) {
        await(copied, 128 * (number + 1));
        convert_copied_queries<L, LENDS>(p, 0, thread, number & 1);
        named_barrier(QUERY_BARRIER, LENDS ? 384 : 128);
        if (thread == 0) {
          unsigned char* to = found + number * (QUERIES + COLUMNS);
          std::memcpy(to, shared_memory + L::QUERY, QUERIES);
          std::memcpy(to + QUERIES, shared_memory + L::COLUMNS, COLUMNS);
          for (int i = 0; i < QUERIES / 16; ++i) overwritten |= stores[L::QUERY / 16 + i] != number + 1;
          ++row_number;
        }
        named_barrier(SCORE_BARRIER, 128);
        ++weights;
      } else {
        const auto columns = [&]() {
          return std::vector<unsigned char>(&room[L::COLUMNS], &room[L::COLUMNS] + COLUMNS);
        };
        const auto before = columns();
        for (int i = 0; i < thread * 7 % 97; ++i) simt::leave();
        overwritten |= columns() != before;
        ++columns_read;
        if (LENDS) convert_lent_chunk<L>(0, warpgroup - 1, thread);
        await(weights, 128 * (number + 1));
      }
    }
  });
  return !overwritten && !failed;
}

template <Format FORMAT>
bool copy(const Params& p, const Row& row, int threads) {
  for (int thread = 0; thread < threads; ++thread)
    if (threads == 128)
      copy_queries<64, FORMAT, 128>(p, row, 0, thread);
    else
      copy_queries<64, FORMAT, 384>(p, row, 0, thread);
  for (int thread = 0; thread < 128; ++thread) prefetch_queries<64, FORMAT>(p, row, thread);
  return true;
}

extern "C" {

// Whether all was aligned; `strides` are those of tokens and heads in `q`, then in `q_rope`.
bool copy_row(const u16* q, const u16* q_rope, const i64* strides, int num_heads, int token, int tile, int threads,
              bool rope, unsigned char* shared, const void** asked, int* num_asked) {
  Params p{};
  p.q = q, p.q_rope = q_rope, p.num_heads = num_heads;
  p.q_token_stride = strides[0], p.q_head_stride = strides[1];
  p.q_rope_token_stride = strides[2], p.q_rope_head_stride = strides[3];
  Row row{};
  row.token = token, row.tile = tile;
  std::vector<const void*> found;
  shared_memory = shared, lines = &found, failed = false;
  rope ? copy<FP8_DS_MLA>(p, row, threads) : copy<FP8_DS_MLA_V4>(p, row, threads);
  std::copy(found.begin(), found.end(), asked);
  *num_asked = static_cast<int>(found.size());
  return !failed;
}

bool convert(const u16* q, const u16* q_rope, const i64* strides, int num_heads, int rows, bool rope, bool lends,
             unsigned char* found, unsigned seed) {
  Params p{};
  p.q = q, p.q_rope = q_rope, p.num_heads = num_heads, p.scale_log2 = 0.1f;
  p.q_token_stride = strides[0], p.q_head_stride = strides[1];
  p.q_rope_token_stride = strides[2], p.q_rope_head_stride = strides[3];
  const auto run = rope ? lends ? convert_rows<FP8_DS_MLA, true> : convert_rows<FP8_DS_MLA, false>
                        : lends ? convert_rows<FP8_DS_MLA_V4, true> : convert_rows<FP8_DS_MLA_V4, false>;
  return run(p, rows, found, seed);
}
}
