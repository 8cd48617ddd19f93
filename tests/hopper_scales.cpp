// Scales of a key as the scores change them before float16 has to hold them.
#include "hopper_on_cpu.h"

// Declared for code that nobody calls here.
template <class T>
T __shfl_sync(unsigned, T, int);

#include "formats.cuh"

extern "C" {

// Bits: outside, wide.
int take_out_fp8(unsigned* scales, unsigned* undo) {
  using R = Rows<FP8_DS_MLA>;
  uint4 one = make_uint4(scales[0], scales[1], scales[2], scales[3]);
  const uint4 both[2] = {one, make_uint4(0x3c000000u, 0x3c000000u, 0x3c000000u, 0x3c000000u)};
  const bool outside = R::outside(both), wide = R::take_out<true>(one, *undo) == IS_WIDE;
  for (int i = 0; i < 4; ++i) scales[i] = word(one, i);
  return outside | wide << 1;
}

unsigned raise_fp8(unsigned* scales) {
  uint4 one = make_uint4(scales[0], scales[1], scales[2], scales[3]);
  const unsigned exponents = Rows<FP8_DS_MLA>::raise_small(one);
  for (int i = 0; i < 4; ++i) scales[i] = word(one, i);
  return exponents;
}

unsigned raise_v4(unsigned* scales) {
  uint2 one = make_uint2(scales[0], scales[1]);
  const unsigned exponents = Rows<FP8_DS_MLA_V4>::raise_small(one);
  scales[0] = one.x, scales[1] = one.y;
  return exponents;
}

int take_out_v4(unsigned* scales, unsigned* undo) {
  using R = Rows<FP8_DS_MLA_V4>;
  uint2 one = make_uint2(scales[0], scales[1]);
  const uint2 both[2] = {one, make_uint2(R::DEAD_SCALES, R::DEAD_SCALES)};
  const bool outside = R::outside(both), wide = R::take_out<true>(one, *undo) == IS_WIDE;
  scales[0] = one.x, scales[1] = one.y;
  return outside | wide << 1;
}
}
