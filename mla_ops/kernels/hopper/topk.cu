// The k best columns of each row of scores: exact, the same bits in every run.
//
// Grid: a CTA or a cluster for each row, the last row first, because rows of a causal prefill grow. Shared memory: what
// `Selection` in topk_row.cuh lays out. topk_row.cuh, topk_cluster.cuh, topk_exact.cuh, topk_short.cuh say how it works.
#include "topk_row.cuh"

// CTAs of so many threads find room beside those of scores of 32 heads: they have the 56 registers that two CTAs of 576
// would have.
constexpr int BESIDE_SCORES = 512;

template <int THREADS, int VECTORS, int SAMPLED, int CTAS, bool PLANES = false, bool LONG = false>
__global__ void __launch_bounds__(THREADS, CTAS) topk_rows(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const u32 rank = blockIdx.x % p.cluster;
  Selection<THREADS, VECTORS, SAMPLED, CTAS == 1, PLANES, LONG>(p, shared_memory)
      .run(p.num_rows - 1 - blockIdx.x / p.cluster, rank);
}

// Rows of up to 4 * THREADS * VECTORS columns for each CTA of a cluster.
template <int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS == BESIDE_SCORES ? 576 : THREADS, THREADS == BESIDE_SCORES ? 2 : 1)
    topk_cluster_rows(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  select_in_cluster<THREADS, VECTORS>(p, shared_memory, p.num_rows - 1 - blockIdx.x / p.cluster, blockIdx.x % p.cluster);
}

// Rows of up to 4 * THREADS * VECTORS - 3 columns.
template <int THREADS, int VECTORS, int CTAS>
__global__ void __launch_bounds__(THREADS, CTAS) topk_short_rows(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  select_short<THREADS, VECTORS>(p, shared_memory, p.num_rows - 1 - blockIdx.x);
}
