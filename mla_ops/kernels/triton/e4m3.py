"""OCP float8_e4m3fn in integer arithmetic, for devices without the conversion (SM80) and for Triton's interpreter.

Everything here agrees to the bit with `torch.Tensor.to(torch.float8_e4m3fn)` and back, on every machine.

A number that is not finite becomes 0x7F, the NaN without a sign.
"""

import triton
import triton.language as tl

from .bfloat16 import narrow


@triton.jit
def power_of_two_exponent(amax_bits, LOWEST: tl.constexpr):
    """log2 of the scale of a group whose largest finite magnitude has the float32 bits `amax_bits`.

    `max(ceil(log2(amax / 448)), LOWEST)`; 448 is 1.75 * 2**8, so it is the exponent of amax, less 8, plus one if the
    mantissa is above 1.75. LOWEST is -13 where the format floors amax / 448 at 1e-4, -22 where it floors amax.
    """
    exponent = (amax_bits >> 23) - (127 + 8) + ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.maximum(exponent, LOWEST)


@triton.jit
def exponent_of(bits, LOWEST: tl.constexpr, axis: tl.constexpr):
    """`power_of_two_exponent` of values along `axis`, float32 as bits: NaN and infinities do not count."""
    magnitude = bits & 0x7FFFFFFF
    return power_of_two_exponent(tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), axis), LOWEST)


@triton.jit
def decode_scale(byte):
    """ue8m0 bytes (any integer type) to float32: 2**(byte - 127), NaN for 255."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 0x400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_scale_bf16(byte):
    """Decodes a scale to bfloat16, which holds every power of two as well."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 0x40, tl.where(wide == 255, 0x7FC0, wide << 7))
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def encode(bits, exponent):
    """float32 bits over `2**exponent`, rounded to nearest even, as the byte (int32). NaN and infinities give 0x7F.

    The quotient must be within +-448. It is exact: where the division by a power of two would be subnormal in
    float32, the byte is (signed) zero whatever the last bits are.
    """
    magnitude_bits = bits & 0x7FFFFFFF
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    quotient = magnitude_bits.to(tl.float32, bitcast=True) * inverse
    u = quotient.to(tl.int32, bitcast=True)
    # 20 of 23 mantissa bits go; the exponent bias falls from 127 to 7
    normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # below 2**-6 the step is 2**-9, which is one unit in the last place of 2**14: the addition does the rounding
    subnormal = (quotient + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(u < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude_bits < 0x7F800000, byte, 0x7F)


@triton.jit
def decode(byte):
    """Bytes (uint8) to float32, exactly."""
    wide = byte.to(tl.int32)
    # the byte's fields on float16's: 8 less in the exponent, subnormals included
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    value = half.to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


def decode_method(device_capability: tuple[int, int]) -> str:
    """How e4m3 is converted on a device: by the conversion of capability 8.9 and up, or by arithmetic."""
    if device_capability[0] < 8:
        return "portable"
    return "packed" if device_capability < (8, 9) else "hardware"


@triton.jit
def decode_by(byte, METHOD: tl.constexpr):
    """`decode`, by the conversion where there is one."""
    if METHOD == "hardware":
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {a, b}, first;
            mov.b32 {c, d}, second;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }
            """,
            "=f,=f,=f,=f,r",
            [byte],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        value = decode(byte)
    return value


@triton.jit
def narrow_by(x, METHOD: tl.constexpr):
    """`narrow` to bfloat16, by the instruction where `decode_by` has one: its NaN is another."""
    if METHOD == "hardware":
        bits = tl.where(x == x, x.to(tl.bfloat16).to(tl.int16, bitcast=True), 0x7FC0)
        value = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        value = narrow(x, tl.bfloat16)
    return value
