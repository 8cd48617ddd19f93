// Token-level sparse MLA over a paged cache, for SM90: one cluster a query token and tile of heads, one CTA a share of
// its keys.
//
// Roles, a warpgroup each: `produce` brings the rows of 64 keys a turn into shared memory as they are; `score` makes
// float16 (or bfloat16) fragments of them, which are the register operand of S^T = K Q^T and, stored once, the values;
// two warpgroups `accumulate` 256 dims of the values each. A cluster's partial results are merged through distributed
// shared memory.

#include "gather.cuh"
#include "queries.cuh"
#include "scores.cuh"
#include "values.cuh"

template <int HEADS, Format FORMAT>
__global__ void __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention(const __grid_constant__ Params p) {
  using L = Layout<HEADS, FORMAT>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  const Row row = this_row(p);
  if (row.token >= p.num_tokens) return;
  constexpr int PRODUCER = L::THREADS / 128 - 1;

  // The way from an index to a key in shared memory is the longest of the start.
  int index = -1;
  if (warpgroup == PRODUCER) index = index_at(p, row, row.first, thread >> 5, thread & 31);
  if (threadIdx.x == 0) {
    constexpr int SCORERS = FIRST_STEPS<HEADS, FORMAT> < Rows<FORMAT>::CHUNKS ? 2 : 1;
    for (int i = 0; i < L::STAGES * 4; ++i)
      mbarrier_init(shared + L::RAW_FULL + i * 8, 1), mbarrier_init(shared + L::RAW_FREE + i * 8, SCORERS);
    mbarrier_init(shared + L::WEIGHTS_FULL, 4 * SCORERS);
    for (int i = 0; i < 4; ++i) mbarrier_init(shared + L::VALUES_FREE + i * 8, 4);
    if (SCORERS == 2)
      for (int i = 0; i < 4; ++i) mbarrier_init(shared + L::SCORES_FULL + i * 8, 4);
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == PRODUCER) {
    fewer_registers<24>();
    produce<HEADS, FORMAT>(p, row, shared, index, __shfl_sync(~0u, thread >> 5, 0), thread & 31);
    stand_by(row);
    return;
  }
  load_queries<HEADS, FORMAT>(p, row, shared, threadIdx.x);
  fence_async_shared();
  named_barrier<QUERY_BARRIER, L::QUERY_THREADS>();
  if (warpgroup == 0) {
    more_registers<L::SCORE_REGISTERS>();
    score<HEADS, FORMAT>(p, row, shared_memory, shared, thread);
  } else if (warpgroup < 3) {
    if constexpr (HEADS == 16) fewer_registers<88>();
    if constexpr (HEADS == 64) more_registers<160>();
    accumulate<HEADS, FORMAT>(p, row, shared_memory, shared, warpgroup - 1, thread);
  } else if constexpr (HEADS < 64) {
    more_registers<L::REST_REGISTERS>();
    score_rest<HEADS, FORMAT>(row, shared, thread);
    stand_by(row);
  }
}
