// Scales of a key as the scores change them before float16 has to hold them.
#include "hopper_on_cpu.h"

// Declared for code that nobody calls here.
template <class T>
T __shfl_sync(unsigned, T, int);

#include "formats.cuh"

// Bits: whether a turn has to look at the key, whether float16 does not hold its scales even so. `lowers`: where a launch
// divides e4m3 of groups with small scales.
template <class R>
int take_out(typename R::Scales& scales, const typename R::Scales& usual, unsigned* undo, bool lowers) {
  const typename R::Scales both[2] = {scales, usual};
  const bool outside = R::outside(both),
             wide = lowers ? R::template take_out<true>(scales, *undo) == IS_WIDE
                           : R::template take_out<false>(scales, *undo);
  return outside | wide << 1;
}

extern "C" {

int take_out_fp8(unsigned* scales, unsigned* undo, bool lowers) {
  uint4 one = make_uint4(scales[0], scales[1], scales[2], scales[3]);
  const int flags =
      take_out<Rows<FP8_DS_MLA>>(one, make_uint4(0x3c000000u, 0x3c000000u, 0x3c000000u, 0x3c000000u), undo, lowers);
  for (int i = 0; i < 4; ++i) scales[i] = word(one, i);
  return flags;
}

unsigned raise_fp8(unsigned* scales) {
  uint4 one = make_uint4(scales[0], scales[1], scales[2], scales[3]);
  const unsigned exponents = Rows<FP8_DS_MLA>::raise_small(one);
  for (int i = 0; i < 4; ++i) scales[i] = word(one, i);
  return exponents;
}

int take_out_v4(unsigned* scales, unsigned* undo, bool lowers) {
  using R = Rows<FP8_DS_MLA_V4>;
  uint2 one = make_uint2(scales[0], scales[1]);
  const int flags = take_out<R>(one, make_uint2(R::DEAD_SCALES, R::DEAD_SCALES), undo, lowers);
  scales[0] = one.x, scales[1] = one.y;
  return flags;
}

unsigned raise_v4(unsigned* scales) {
  uint2 one = make_uint2(scales[0], scales[1]);
  const unsigned exponents = Rows<FP8_DS_MLA_V4>::raise_small(one);
  scales[0] = one.x, scales[1] = one.y;
  return exponents;
}
}
