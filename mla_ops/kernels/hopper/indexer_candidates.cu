// Selection of keys for few rows, in one launch: scores of the lightning indexer as `indexer_logits.cu` makes them. Each
// CTA has every n-th tile of a row, counts its scores in bins, and hands over those that reach a gate of its own. The last
// CTA of a row chooses.

#include "code.cuh"
#include "indexer_products.cuh"
#include "indexer_candidates.cuh"

template <int HEADS>
__global__ void __launch_bounds__(CandidatesLayout<HEADS>::THREADS, 1)
    indexer_candidates(const __grid_constant__ SelectionParams p) {
  using L = CandidatesLayout<HEADS>;
  EXPORT_SHARED_BYTES(L);
  prefetch_code<0>();
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  make_candidates<L>(p, shared_address(shared_memory), shared_memory);
}
