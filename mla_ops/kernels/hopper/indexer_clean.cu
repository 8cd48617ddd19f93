// What `clean` asks of scores: -inf in the columns that a row has not.

#include "indexer_rows.cuh"

template <Source SOURCE>
__global__ void __launch_bounds__(256) indexer_clean(const __grid_constant__ Params p) {
  for (int token = blockIdx.y; token < p.num_tokens; token += gridDim.y) {
    const Bounds row = bounds_of<SOURCE>(p, token);
    float* out = p.out + token * p.out_stride;
    for (int column = blockIdx.x * 256 + threadIdx.x; column < p.width; column += gridDim.x * 256)
      if (column < row.start || column >= row.end) out[column] = -INFINITY;
  }
}
