"""bfloat16 in integer arithmetic, equal to the bit to PyTorch's conversions.

Triton's interpreter truncates where it should round to nearest even, and gets subnormals wrong; on a GPU the integers
cost nothing that a kernel bound by memory would notice.
"""

import triton
import triton.language as tl


@triton.jit
def widen(x):
    """Any float type to float32, exactly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to any float type, rounded to nearest even; NaN becomes the quiet NaN 0x7FC0."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def convert(x, dtype: tl.constexpr):
    """Any float type to any, rounded to nearest even; NaN becomes the quiet NaN 0x7FC0, 0x7E00 or 0x7FC00000."""
    wide = widen(x)
    bits = wide.to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if dtype == tl.bfloat16:
        result = narrow(wide, dtype)
    elif dtype == tl.float16:
        half = wide.to(tl.float16).to(tl.int16, bitcast=True)
        result = tl.where(is_nan, 0x7E00, half).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        result = tl.where(is_nan, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    return result
