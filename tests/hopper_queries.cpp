// Places of the queries of 64 heads in shared memory once a CTA has copied them, and prefetches to L2 before, by the
// kernels' own code, compiled for a CPU. `test_hopper_queries.py` builds it.
#include <vector>

#include "hopper_on_cpu.h"

// Declared for code that nobody calls here.
template <class T>
T __shfl_sync(unsigned, T, int);
template <class T>
T __shfl_xor_sync(unsigned, T, int);
void __syncwarp();

#define copy_16 ptx_copy_16
#define prefetch_to_l2 ptx_prefetch_to_l2
#include "ptx.cuh"
#undef copy_16
#undef prefetch_to_l2

static unsigned char* shared_memory;
static std::vector<const void*>* lines;
static bool failed;  // a copy from or to no multiple of 16 bytes

template <int TO, int FROM>
static void copy_16(u32 to, const void* from) {
  failed |= (to + TO) % 16 || (reinterpret_cast<u64>(from) + FROM) % 16;
  std::memcpy(shared_memory + to + TO, static_cast<const unsigned char*>(from) + FROM, 16);
}
static void prefetch_to_l2(const void* line) { lines->push_back(line); }

#include "queries.cuh"

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
}
