// Token-level sparse MLA over a paged cache of fp8, for SM90, of few rows: `slices.cuh`.

#include "code.cuh"
#include "slices.cuh"

template <int CHUNKS, Format FORMAT>
__global__ void __attribute__((cluster_dims())) __launch_bounds__(512, 1)
    sparse_attention_slices(const __grid_constant__ Params p) {
  using Y = Slices<CHUNKS, FORMAT>;
  EXPORT_SHARED_BYTES(Y);
  attend_in_slices<CHUNKS, FORMAT>(p);
}
