// Cache writes by the Hopper kernels' own code, compiled for a CPU: `test_hopper_cache.py` builds it.
#include <cmath>

#include "hopper_simt.h"

#define pack_e4m3 ptx_pack_e4m3
#define float16_to_float ptx_float16_to_float
#define float_to_float16 ptx_float_to_float16
#include "arithmetic.cuh"
#undef pack_e4m3
#undef float16_to_float
#undef float_to_float16

static unsigned e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const unsigned sign = __float_as_uint(value) >> 24 & 0x80;
  const float magnitude = std::fabs(value);
  if (magnitude >= 464.f) return sign | 0x7e;
  if (magnitude < 0x1p-6f) return sign | static_cast<unsigned>(std::nearbyint(magnitude * 512.f));
  int exponent;
  const float fraction = std::frexp(magnitude, &exponent);  // [1/2, 1)
  const unsigned eighths = static_cast<unsigned>(std::nearbyint(fraction * 16.f)) - 8;
  return sign | ((exponent + 6) * 8 + eighths);  // a carry goes to the exponent
}
static u16 pack_e4m3(float low, float high) { return e4m3(low) | e4m3(high) << 8; }
static float float16_to_float(u16 bits) { return bits_of<_Float16>(bits); }
static u16 float_to_float16(float value) { return bits_of<u16>(static_cast<_Float16>(value)); }

#include "cache.cuh"

template <class Write>
void launch(const Params& p, int seed, Write write) {
  simt::launch((p.num_rows + WARPS - 1) / WARPS, 1, 32 * WARPS, 0, seed, [&] {
    const i64 row = row_of_warp();
    if (row < p.num_rows) write(row, threadIdx.x % 32);
  });
}

#define STORE(KIND, INPUT, ...) \
  launch(*p, seed, [&](i64 row, int lane) { Token<INPUT>{*p, lane, row}.KIND __VA_ARGS__(); })
#define QUANTIZED(INPUT)                        \
  if (kind == 0) STORE(store_fp8_ds_mla, INPUT); \
  if (kind == 1) STORE(store_fp8_ds_mla_v4, INPUT); \
  if (kind == 2) STORE(store_fp8_index, INPUT);

extern "C" int bytes_of_params() { return sizeof(Params); }

// `kind`: 0 to 2 the quantised formats, else 3 and the type of what is written.
extern "C" void store(const Params* p, int kind, int input, int seed) {
  if (input == BF16) { QUANTIZED(BF16) }
  if (input == FP16) { QUANTIZED(FP16) }
  if (input == FP32) { QUANTIZED(FP32) }
  const int output = kind - 3;
  if (output == BF16 && input == BF16) STORE(template store_plain, BF16, <BF16>);
  if (output == BF16 && input == FP32) STORE(template store_plain, FP32, <BF16>);
  if (output == FP16 && input == FP16) STORE(template store_plain, FP16, <FP16>);
  if (output == FP16 && input == FP32) STORE(template store_plain, FP32, <FP16>);
  if (output == FP32 && input == BF16) STORE(template store_plain, BF16, <FP32>);
  if (output == FP32 && input == FP16) STORE(template store_plain, FP16, <FP32>);
  if (output == FP32 && input == FP32) STORE(template store_plain, FP32, <FP32>);
}

extern "C" void place(i64 slot, i64 block_size, i64* block, i64* offset) {
  const Slot at = slot_of(slot, block_size);
  *block = at.block, *offset = at.offset;
}
