// The k best keys of each query token of the indexer: select_rows.cuh says how they are chosen, indexer_logits.cu how
// scores are made.
//
// Grid: a CTA or a cluster for every TOKENS query tokens, the last ones first, because rows of a causal prefill grow.
// Shared memory: IndexerLayout's, `Choice`, bins, and entries for as long as there is room.
#include "indexer_products.cuh"
#include "select_rows.cuh"

template <int HEADS, int TOKENS, Source SOURCE>
__global__ void __launch_bounds__(THREADS, 1) select_keys(const __grid_constant__ SelectParams s) {
  using L = SelectLayout<HEADS, TOKENS>;
  EXPORT_SHARED_BYTES(Fixed<L>);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const int units = gridDim.x / s.cluster, unit = units - 1 - blockIdx.x / s.cluster;
  select_rows<L, SOURCE>(s, shared_memory, unit, blockIdx.x % s.cluster);
}
