// Which keys each CTA of a launch of the Hopper kernels gathers, by their own arithmetic, compiled for a CPU: device
// code that is neither PTX nor of several threads. `test_hopper_rows.py` builds it.

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shfl_sync(mask, value, lane) (value)
#define __ballot_sync(mask, value) (value)
#define __all_sync(mask, value) (value)
#define __cvta_generic_to_shared(pointer) reinterpret_cast<unsigned long long>(pointer)

#include <algorithm>
#include <cstring>

using std::max, std::min;

struct Dim {
  int x, y, z;
};
static Dim blockIdx, gridDim, threadIdx;
static int rank_of_cta;

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}

static float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
static unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
unsigned __byte_perm(unsigned, unsigned, unsigned);  // neither is called here
void __syncwarp();

#include "gather.cuh"

struct Found {
  int token, tile, part, turn, live;
  const unsigned char* row;
};

template <class R>
int find(const Params& p, bool walks, Found* found) {
  int count = 0;
  for (Row row = walks ? row_at(p, blockIdx.x) : this_row(p); row.token < p.num_tokens; row = next_row(p, row)) {
    const int request = request_of(p, row);
    for (int turn = row.first; turn < row.last; ++turn)
      for (int warp = 0; warp < 4; ++warp)
        for (int lane = 0; lane < 16; ++lane) {
          const Key key = key_at<R>(p, row, turn, request, index_at(p, row, turn, warp, lane));
          found[count++] = {row.token, row.tile, row.part, turn, key.live, key.row};
        }
    if (!walks) break;
  }
  return count;
}

// Of the CTA `block` of `grid`, the rank-th of its cluster: how many keys it gathers, dead ones included.
extern "C" int keys_of(const Params* p, const int* block, const int* grid, int rank, int walks, int row_bytes,
                       Found* found) {
  blockIdx = {block[0], block[1], block[2]}, gridDim = {grid[0], grid[1], grid[2]}, rank_of_cta = rank;
  switch (row_bytes) {
    case Rows<FP8_DS_MLA>::BYTES:
      return find<Rows<FP8_DS_MLA>>(*p, walks, found);
    case Rows<FP8_DS_MLA_V4>::BYTES:
      return find<Rows<FP8_DS_MLA_V4>>(*p, walks, found);
    case 1024:
      return find<PlainRows<1024>>(*p, walks, found);
    default:
      return find<PlainRows<1152>>(*p, walks, found);
  }
}

extern "C" int bytes_of_params() { return sizeof(Params); }
