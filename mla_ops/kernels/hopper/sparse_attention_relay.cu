// Token-level sparse MLA over a paged cache of fp8, for SM90, of few rows: `relay.cuh`.

#include "relay.cuh"

template <int CHUNKS, Format FORMAT>
__global__ void __attribute__((cluster_dims())) __launch_bounds__(512, 1)
    sparse_attention_relay(const __grid_constant__ Params p) {
  using Y = Relay<CHUNKS, FORMAT>;
  EXPORT_SHARED_BYTES(Y);
  relay<CHUNKS, FORMAT>(p);
}
