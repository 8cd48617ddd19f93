// Scores of the lightning indexer for SM90: the sum over heads of weight * relu(query . key), times the key's scale.
//
// A tile of 64 keys is the rows of a warpgroup's products; the heads of up to eight query tokens, 256 of them, are
// their columns. With all 256, a box of queries is two heads of four tokens, so that a thread has two keys' products of
// all heads of its tokens. With fewer it has a quarter of the heads, and its three neighbours the others. Weights stay in
// its registers for as long as the tokens stay the same.
//
// A warpgroup has every second to fourth tile. Where products are the bound, two warpgroups have two sets of products
// each: one is summed up while the tensor cores make the other. Where memory is the bound, four have one set, or three
// where a request has several tokens.
// A warp brings queries and keys by bulk copies. Where memory is the bound as many warps as warpgroups do, each every
// third or fourth tile, so that none waits for another's slot. Four warps do so, too, where blocks do not fit a tile.
//
// All tiles of keys of all groups of tokens, one after the other, are cut into as many equal parts as there are CTAs.
// Lengths are read on the device, by every CTA, so that a graph follows them. Flat keys are read by clusters of two CTAs,
// which have a part together and neighbouring groups of tokens: each brings half of a tile for both.
//
// A score does not depend on who makes it: its sum has one order in every kernel.

#include "indexer_products.cuh"
#include "indexer_scores.cuh"

template <int HEADS, int TOKENS, Source SOURCE, bool PLANES = false>
__global__ void __launch_bounds__(ScoresLayout<HEADS, TOKENS, SOURCE>::THREADS, 1)
    indexer_logits(const __grid_constant__ Params p) {
  using L = ScoresLayout<HEADS, TOKENS, SOURCE>;
  EXPORT_SHARED_BYTES(L);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  make_scores<L, SOURCE, PLANES>(p, shared_address(shared_memory));
}
