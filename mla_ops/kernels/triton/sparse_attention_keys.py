"""Places of the keys of a cache, and how its rows become operands of tensor cores."""

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from .bfloat16 import narrow, widen
from .common import Constant
from .e4m3 import decode, decode_scale, decode_scale_bf16
from .rows import FP8_ROPE_AT, FP8_SCALES_AT, V4_LATENT, V4_ROW_BYTES, V4_SCALE_BYTES

# float16 operands of fp8_ds_mla: scales times a program's unit (`half_unit`), of 0 and in [HALF_LEAST, HALF_MOST). It
# holds 448 * 128, and the least scales in four bits. A row's largest weight is HALF_WEIGHT.
HALF_LEAST = tl.constexpr(2.0**-21)
HALF_MOST = tl.constexpr(2.0**7)
HALF_EXPONENT = tl.constexpr(8.0)
HALF_WEIGHT = tl.constexpr(2.0**8)


@dataclass(frozen=True, eq=False)
class Keys(Constant):
    """The rows of a cache, as one constant of a kernel.

    Attributes:
        operands: of tensor cores: "fp8" (fp8_ds_mla, bfloat16 without the scale), "fp8_half" (the same, float16 with
            it), "fp8_v4" (fp8_ds_mla_v4, bfloat16 with it), "plain" (what is there); "fp8_exact", "fp8_v4_exact" and
            "exact" are float32 without tensor cores.
        row_width: elements from one row of a block to the next.
        unit: elements that all addresses are multiples of.
        in_line: whether each index is a row of its own, so that there is nothing to divide.
        translated: whether blocks go through a block table; else what stands in its place is not read.
        decode: how e4m3 becomes bfloat16: the conversion "hardware" (capability 8.9 and up), "packed" arithmetic on
            pairs of values, or "portable" arithmetic.
    """

    operands: str
    row_width: int
    unit: int
    in_line: bool
    translated: bool
    decode: str

    def with_operands(self, operands: str) -> "Keys":
        return make_keys(operands, self.row_width, self.unit, self.in_line, self.translated, self.decode)


# made once: a launch finds it sooner than it would make it
make_keys = functools.cache(Keys)


@triton.constexpr_function
def is_exact(keys):
    return keys.operands.endswith("exact")


@triton.constexpr_function
def is_half(keys):
    return keys.operands == "fp8_half"


@triton.constexpr_function
def is_v4(keys):
    return keys.operands.startswith("fp8_v4")


@triton.jit
def divider(divisor):
    """A factor below 2**32 and a shift above it, for `quotient`: one division a program, not one a key."""
    divisor = divisor.to(tl.int64)
    # the shift is log2 of the divisor, rounded up
    shift = ((2 * divisor - 1).to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    factor = ((tl.full((), 1, tl.int64) << (31 + shift)) + divisor - 1) // divisor
    return factor + (shift << 32)


@triton.jit
def quotient(x, inverse):
    """`x // divisor` of int32 that are not negative, in 32 bits."""
    doubled = tl.cast(x, tl.uint32, bitcast=True) * 2
    return (tl.umulhi(doubled, inverse.to(tl.uint32)) >> (inverse >> 32).to(tl.uint32)).to(tl.int32, bitcast=True)


@triton.jit
def fetch_indices(index_row, column, end):
    """Indices of the keys at `column`, -1 from `end` on; the columns themselves where there is no `index_row`."""
    if index_row is not None:
        index = tl.load(index_row + column, mask=column < end, other=-1)
    else:
        index = tl.where(column < end, column, -1)
    return index


@triton.jit
def locate(cache, index, KEYS: tl.constexpr):
    """Places of the rows of `index`, for `rows_at`; for V4 those of scales, in bytes; and whether there is a key.

    A key is looked at only if its index, its request, its block-table entry and its block are in range: all else is
    masked at the load, so that nothing in an unused slot is ever seen.
    """
    _kv, table, known, num_blocks, block_size, inverse, max_blocks, stride_block = cache
    if KEYS.in_line:
        valid = _is_below(index, num_blocks)
        place = _times(index, stride_block.to(tl.uint32) * in_line_unit(_kv, KEYS))
        places = (place, place, valid)
    else:
        valid = index >= 0
        block = quotient(index, inverse)
        offset = index - block * block_size
        if KEYS.translated:
            valid &= known & (block < max_blocks)
            block = tl.load(table + block, mask=valid, other=-1)
        places = _rows_of_block(cache, block, offset, valid, KEYS)
    return places


@triton.jit
def look_up_block(cache, first, end):
    """The block-table entry of the keys from `first` on, -1 if they are behind the end."""
    _kv, table, known, _num_blocks, _block_size, inverse, max_blocks, _stride_block = cache
    number = quotient(first, inverse)
    return tl.load(table + number, mask=known & (first < end) & (number < max_blocks), other=-1)


@triton.jit
def locate_in_block(cache, entry, first, end, OPTIONS: tl.constexpr):
    """Does what `locate` does for a tile of keys from `first` on, all of the block `entry`."""
    _kv, _table, _known, _num_blocks, block_size, inverse, _max_blocks, _stride_block = cache
    KEYS: tl.constexpr = OPTIONS.keys
    n = tl.arange(0, OPTIONS.tile.block_n)
    offset = first - quotient(first, inverse) * block_size + n
    return _rows_of_block(cache, entry, offset, first + n < end, KEYS)


@triton.jit
def _is_below(x, bound):
    """Whether int32 `x` is in [0, bound): in 32 bits, as each thread does it for all of its rows."""
    return x.to(tl.uint32, bitcast=True) < tl.minimum(bound, 0x7FFFFFFF).to(tl.uint32)


@triton.jit
def _times(x, y):
    """Product, int64, of int32 and of an integer below 2**32, neither negative."""
    return x.to(tl.uint32, bitcast=True).to(tl.int64) * y.to(tl.uint32).to(tl.int64)


@triton.constexpr_function
def in_line_unit(kv, keys):
    """The unit of places of rows in line: bytes, so that an address is one multiplication, or the keys' own.

    Over bytes this is no gain: tiles of 16 heads over fp8_ds_mla take 5 % longer.
    """
    return keys.unit * kv.dtype.element_ty.primitive_bitwidth // 8 if keys.operands == "plain" else 1


@triton.jit
def rows_at(kv, place, KEYS: tl.constexpr):
    """Pointers to the rows at `place`."""
    UNIT: tl.constexpr = in_line_unit(kv, KEYS)
    if KEYS.in_line and UNIT > 1:
        place = tl.multiple_of(place, UNIT)
        row = (kv.to(tl.pointer_type(tl.uint8)) + place).to(kv.dtype)
    else:
        row = kv + place * KEYS.unit
    return row


@triton.jit
def _rows_of_block(cache, block, offset, valid, KEYS: tl.constexpr):
    _kv, _table, _known, num_blocks, block_size, _inverse, _max_blocks, stride_block = cache
    valid = valid & _is_below(block, num_blocks)
    start = _times(block, stride_block)
    place = start + offset.to(tl.int64) * (KEYS.row_width // KEYS.unit)
    scale_place = place
    if is_v4(KEYS):
        scale_place = start * KEYS.unit + block_size.to(tl.int64) * V4_ROW_BYTES + offset.to(tl.int64) * V4_SCALE_BYTES
    return place, scale_place, valid


@triton.jit
def load_rows(cache, places, BITS: tl.constexpr, OPTIONS: tl.constexpr):
    """Raw rows at `places` for tensor cores: four groups of 128 dims, the dims behind 512, and four scales.

    Keys that are not valid are zeros. A mask stands for what a format does not have. BITS as in `load_rope`.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    kv = cache[0]
    place, scale_place, valid = places
    row = rows_at(kv, place, KEYS)
    start = row[:, None]
    within = valid[:, None]
    group = tl.arange(0, 128)[None, :]
    rope, s0, s1, s2, s3 = valid, valid, valid, valid, valid
    if KEYS.operands == "fp8":
        k0 = tl.load(start + group, mask=within, other=0)
        k1 = tl.load(start + (128 + group), mask=within, other=0)
        k2 = tl.load(start + (256 + group), mask=within, other=0)
        k3 = tl.load(start + (384 + group), mask=within, other=0)
        rope = load_rope(row, within, True, KEYS)
        scales = (row + FP8_SCALES_AT).to(tl.pointer_type(tl.float32))
        s0 = tl.load(scales, mask=valid, other=0.0)
        s1 = tl.load(scales + 1, mask=valid, other=0.0)
        s2 = tl.load(scales + 2, mask=valid, other=0.0)
        s3 = tl.load(scales + 3, mask=valid, other=0.0)
    elif KEYS.operands == "fp8_v4":
        k0 = tl.load(start + group, mask=within, other=0)
        k1 = tl.load(start + (128 + group), mask=within, other=0)
        k2 = tl.load(start + (256 + group), mask=within, other=0)
        k3 = tl.load(start + (384 + group), mask=within & (group < V4_LATENT - 384), other=0)
        # the RoPE dims, in the upper half of the last group
        rope = (row + V4_LATENT).to(tl.pointer_type(tl.bfloat16))[:, None] + (group - (V4_LATENT - 384))
        rope = tl.load(rope, mask=within & (group >= V4_LATENT - 384), other=0.0)
        s0 = tl.load((kv + scale_place).to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    else:
        k0 = tl.load(start + group, mask=within, other=0.0)
        k1 = tl.load(start + (128 + group), mask=within, other=0.0)
        k2 = tl.load(start + (256 + group), mask=within, other=0.0)
        k3 = tl.load(start + (384 + group), mask=within, other=0.0)
        if OPTIONS.rope:
            rope = load_rope(row, within, BITS, KEYS)
    return (k0, k1, k2, k3), rope, (s0, s1, s2, s3)


@triton.jit
def load_rope(row, within, BITS: tl.constexpr, KEYS: tl.constexpr):
    """The 64 dims behind 512 of the keys at `row`.

    `within` says which are there; without it all are. BITS: as integers, so that the copies are not operands
    themselves, of which there would be one buffer more.
    """
    place = _rope_place(row, KEYS)
    if BITS:
        bits = place.to(tl.pointer_type(tl.int16))
        rope = tl.load(bits) if within is None else tl.load(bits, mask=within, other=0)
        rope = rope.to(place.dtype.element_ty, bitcast=True)
    else:
        rope = tl.load(place) if within is None else tl.load(place, mask=within, other=0.0)
    return rope


@triton.jit
def _rope_place(row, KEYS: tl.constexpr):
    """Places of the 64 RoPE dims of the keys at `row`, [keys, 64]."""
    if KEYS.operands.startswith("fp8"):
        place = (row + FP8_ROPE_AT).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, 64)[None, :]
    else:
        place = row[:, None] + (512 + tl.arange(0, 64))[None, :]
    return place


@triton.jit
def to_operands(rows, KEYS: tl.constexpr):
    """The four groups of raw rows as operands."""
    groups, rope, scales = rows
    k0, k1, k2, k3 = groups
    if KEYS.operands == "fp8":
        k0 = decode_operand(k0, KEYS)
        k1 = decode_operand(k1, KEYS)
        k2 = decode_operand(k2, KEYS)
        k3 = decode_operand(k3, KEYS)
    elif KEYS.operands == "fp8_v4":
        k0 = _scaled_operand(k0, scales[0], 0, KEYS)
        k1 = _scaled_operand(k1, scales[0], 2, KEYS)
        k2 = _scaled_operand(k2, scales[0], 4, KEYS)
        k3 = _scaled_operand(k3, scales[0], 6, KEYS)
        k3 = tl.where(tl.arange(0, 128)[None, :] < V4_LATENT - 384, k3, rope)
    return k0, k1, k2, k3


@triton.jit
def decode_operand(byte, KEYS: tl.constexpr):
    """Bytes of e4m3 (uint8) to bfloat16, exactly.

    The assembly is not pure, so that it stays where the bytes lie, 16 in a row: moved behind a change of layouts, as
    the compiler does with what is pure, it would run for scores and again for values, on bytes read one by one.
    """
    if KEYS.decode == "hardware":
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 ab, cd;
            .reg .f32 e, f, g, h;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 ab, low;
            cvt.rn.f16x2.e4m3x2 cd, high;
            mov.b32 {a, b}, ab;
            mov.b32 {c, d}, cd;
            cvt.f32.f16 e, a;
            cvt.f32.f16 f, b;
            cvt.f32.f16 g, c;
            cvt.f32.f16 h, d;
            cvt.rn.bf16x2.f32 $0, f, e;
            cvt.rn.bf16x2.f32 $1, h, g;
            }
            """,
            "=&r,=&r,r",
            [byte],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    elif KEYS.decode == "packed":
        # A byte's fields on bfloat16's are 120 short in the exponent, so one multiplication by 2**120 is left,
        # subnormals included. Four bytes with a NaN among them (0x7F, of either sign) become NaN together: one NaN
        # makes all of a query's result NaN.
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, sign, factor, zero;
            .reg .pred invalid;
            mov.b32 factor, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            and.b32 sign, low, 0x80008000;
            shr.b32 low, low, 4;
            and.b32 low, low, 0x07F007F0;
            or.b32 low, low, sign;
            fma.rn.bf16x2 $0, low, factor, zero;
            and.b32 sign, high, 0x80008000;
            shr.b32 high, high, 4;
            and.b32 high, high, 0x07F007F0;
            or.b32 high, high, sign;
            fma.rn.bf16x2 $1, high, factor, zero;
            and.b32 sign, $2, 0x7F7F7F7F;
            add.u32 sign, sign, 0x01010101;
            and.b32 sign, sign, 0x80808080;
            setp.ne.u32 invalid, sign, 0;
            @invalid mov.b32 $0, 0x7FC07FC0;
            @invalid mov.b32 $1, 0x7FC07FC0;
            }
            """,
            "=&r,=&r,r",
            [byte],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    else:
        value = narrow(decode(byte), tl.bfloat16)
    return value


@triton.jit
def _scaled_operand(byte, scales, FIRST: tl.constexpr, KEYS: tl.constexpr):
    """128 dims of fp8_ds_mla_v4 as bfloat16, with their scales, the bytes FIRST and FIRST + 1 of `scales`.

    A value times a power of two is exact in bfloat16.
    """
    exponent = (scales >> (FIRST * 8)).to(tl.int32)
    first, second = exponent & 0xFF, (exponent >> 8) & 0xFF
    upper = tl.arange(0, 128)[None, :] >= 64
    if KEYS.decode == "portable":
        scale = decode_scale(tl.where(upper, second[:, None], first[:, None]))
        value = narrow(decode(byte) * scale, tl.bfloat16)
    else:
        scale = tl.where(upper, decode_scale_bf16(second)[:, None], decode_scale_bf16(first)[:, None])
        value = decode_operand(byte, KEYS)
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 zero;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, $1, $2, zero;
            }
            """,
            "=r,r,r",
            [value, scale],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=2,
        )
    return value


@triton.jit
def load_exponents(cache, places, KEYS: tl.constexpr):
    """Exponents of the scales of a tile, `[keys, 4]`, for `half_unit`: 0 where there is no key."""
    place, _scale_place, valid = places
    scales = (rows_at(cache[0], place, KEYS) + FP8_SCALES_AT).to(tl.pointer_type(tl.int32))
    return tl.load(scales[:, None] + tl.arange(0, 4)[None, :], mask=valid[:, None], other=0) >> 23


@triton.jit
def half_unit(exponent):
    """The power of two that scales are multiplied with, by those of a program's first tile: into float16's middle.

    And whether it does not hold all of them (`half_operand`). Scales that are 0 or no numbers do not count.
    """
    counts = (exponent > 0) & (exponent < 255)
    most = tl.max(tl.max(tl.where(counts, exponent, 0), 1), 0)
    least = tl.min(tl.min(tl.where(counts, exponent, 255), 1), 0)
    middle = tl.where(most > 0, (most + least + 1) >> 1, 127 - 8)
    # two octaves above the largest scale, whatever the least
    middle = tl.minimum(tl.maximum(middle, most - 10), 247)
    # times the middle one, 2**(middle - 127): 2**-6
    unit = ((127 + 127 - 6 - middle) << 23).to(tl.float32, bitcast=True)
    return unit, (most > 0) & (least < middle - 15)


@triton.jit
def half_operand(byte, scales, unit, KEYS: tl.constexpr):
    """Dims of fp8_ds_mla, `[keys, 4, 128]`, as float16 times `scales`, `[keys, 4]`, and `unit`.

    NaN where a scale does not fit.
    """
    scales *= unit
    fits = (scales < HALF_MOST) & ((scales >= HALF_LEAST) | (scales == 0.0))
    # "packed" makes values that are 2**8 times too small, exactly
    UP: tl.constexpr = 256.0 if KEYS.decode == "packed" else 1.0
    factor = tl.where(fits, scales * UP, float("nan")).to(tl.float16)
    factor = tl.broadcast_to(factor[:, :, None], byte.shape)
    if KEYS.decode == "hardware":
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            .reg .b32 first, second;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mul.rn.f16x2 $0, first, $3;
            mul.rn.f16x2 $1, second, $4;
            }
            """,
            "=&r,=&r,r,r,r",
            [byte, factor],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    elif KEYS.decode == "packed":
        # as in `decode_operand`: a NaN makes four values NaN
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, sign;
            .reg .pred invalid;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            and.b32 sign, low, 0x80008000;
            shr.b32 low, low, 1;
            and.b32 low, low, 0x3F803F80;
            or.b32 low, low, sign;
            mul.rn.f16x2 $0, low, $3;
            and.b32 sign, high, 0x80008000;
            shr.b32 high, high, 1;
            and.b32 high, high, 0x3F803F80;
            or.b32 high, high, sign;
            mul.rn.f16x2 $1, high, $4;
            and.b32 sign, $2, 0x7F7F7F7F;
            add.u32 sign, sign, 0x01010101;
            and.b32 sign, sign, 0x80808080;
            setp.ne.u32 invalid, sign, 0;
            @invalid mov.b32 $0, 0x7E007E00;
            @invalid mov.b32 $1, 0x7E007E00;
            }
            """,
            "=&r,=&r,r,r,r",
            [byte, factor],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        value = (decode(byte) * factor.to(tl.float32)).to(tl.float16)
    return value


@triton.jit
def load_exactly(cache, places, FIRST: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr):
    """Dims FIRST .. FIRST + WIDTH of the keys at `places` in float32, [keys, WIDTH], zero where not valid."""
    kv = cache[0]
    place, scale_place, valid = places
    row = rows_at(kv, place, KEYS)
    column = FIRST + tl.arange(0, WIDTH)[None, :]
    if KEYS.operands == "fp8_v4_exact":
        scales = tl.load((kv + scale_place).to(tl.pointer_type(tl.int64)), mask=valid, other=0)[:, None]
        byte = tl.load(row[:, None] + column, mask=valid[:, None] & (column < V4_LATENT), other=0)
        rope = (row + V4_LATENT).to(tl.pointer_type(tl.bfloat16))[:, None] + (column - V4_LATENT)
        rope = tl.load(rope, mask=valid[:, None] & (column >= V4_LATENT), other=0.0)
        scale = decode_scale((scales >> (column // 64 * 8)) & 0xFF)
        keys = tl.where(column < V4_LATENT, decode(byte) * scale, widen(rope))
    elif KEYS.operands == "fp8_exact":
        scale = (row + (FP8_SCALES_AT + FIRST // 128 * 4)).to(tl.pointer_type(tl.float32))
        scale = tl.load(scale, mask=valid, other=0.0)
        keys = decode(tl.load(row[:, None] + column, mask=valid[:, None], other=0)) * scale[:, None]
    else:
        keys = widen(tl.load(row[:, None] + column, mask=valid[:, None], other=0.0))
    return keys


@triton.jit
def load_rope_exactly(cache, places, KEYS: tl.constexpr):
    """The 64 dims behind 512 of the keys at `places` in float32, [keys, 64], zero where not valid."""
    place, _, valid = places
    row = rows_at(cache[0], place, KEYS)
    return widen(tl.load(_rope_place(row, KEYS), mask=valid[:, None], other=0.0))


@triton.jit
def are_there(cache, indices, OPTIONS: tl.constexpr):
    """Which keys of a tile are there, read once more: carried from turn to turn it would be one more copy, and a wait.

    `indices` are the row's from the tile on, columns, and how many there are; None, columns and a number where all of
    these are there; or, where a tile lies in one block, its first key, columns, and the end of keys.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    start, n, end = indices
    if start is None:
        valid = n < end
    elif OPTIONS.whole:
        valid = locate_in_block(cache, look_up_block(cache, start, end), start, end, OPTIONS)[2]
    else:
        valid = locate(cache, fetch_indices(start, n, end), KEYS)[2]
    return valid
