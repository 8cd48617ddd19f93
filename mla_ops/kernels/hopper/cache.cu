// Writes of the caches, for SM90: the bytes of the reference, whatever the numbers, strides and slots are.
//
// Grid: (rows / WARPS,); a warp has a token. No shared memory: a group's largest number goes from lane to lane. Slots
// beyond the cache are not written.
#include "cache.cuh"

#define FOR_MY_TOKEN(INPUT, WRITE)   \
  const i64 row = row_of_warp();     \
  if (row < p.num_rows) Token<INPUT>{p, static_cast<int>(threadIdx.x % 32), row}.WRITE()

template <Type INPUT>
__global__ void __launch_bounds__(32 * WARPS) store_fp8_ds_mla(const __grid_constant__ Params p) {
  FOR_MY_TOKEN(INPUT, store_fp8_ds_mla);
}

template <Type INPUT>
__global__ void __launch_bounds__(32 * WARPS) store_fp8_ds_mla_v4(const __grid_constant__ Params p) {
  FOR_MY_TOKEN(INPUT, store_fp8_ds_mla_v4);
}

template <Type INPUT>
__global__ void __launch_bounds__(32 * WARPS) store_fp8_index(const __grid_constant__ Params p) {
  FOR_MY_TOKEN(INPUT, store_fp8_index);
}

template <Type INPUT, Type OUTPUT>
__global__ void __launch_bounds__(32 * WARPS) store_plain(const __grid_constant__ Params p) {
  FOR_MY_TOKEN(INPUT, template store_plain<OUTPUT>);
}
