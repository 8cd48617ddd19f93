// `clean`: writes -inf into the columns of scores that a row does not have.

#include "indexer_rows.cuh"

template <Source SOURCE>
__global__ void __launch_bounds__(256) indexer_clean(const __grid_constant__ Params p) {
  for (int token = blockIdx.y; token < p.num_tokens; token += gridDim.y) {
    const Bounds row = bounds_of<SOURCE>(p, token);
    float* out = p.out + token * p.out_stride;
    const int first = blockIdx.x * 256 + threadIdx.x, step = gridDim.x * 256;
    for (i64 column = first; column < row.start; column += step) out[column] = -INFINITY;
    for (i64 column = static_cast<i64>(row.end) + first; column < p.width; column += step) out[column] = -INFINITY;
  }
}
