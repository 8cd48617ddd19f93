"""What the sparse attention kernels share on the device: reading keys of any format, the walk over them, the result."""

import triton
import triton.language as tl

from .bfloat16 import narrow, widen
from .e4m3 import decode, decode_bf16, decode_scale, decode_scale_bf16
from .rows import FP8_ROPE_AT, FP8_SCALES_AT, V4_LATENT, V4_ROW_BYTES, V4_SCALE_BYTES


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """`a @ b + acc` in float32. The interpreter's dot takes bfloat16 bits for integers, hence UPCAST."""
    if UPCAST:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """float32 to an operand's or an output's type: the instruction, or in the interpreter what it should do."""
    if UPCAST:
        return narrow(x, dtype)
    return x.to(dtype)


@triton.jit
def _load_keys(
    start,
    scales,
    valid,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
    DECODE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Dims FIRST .. FIRST + WIDTH of the keys at `start`, [keys, WIDTH], zero where not valid.

    MODE "fp8" gives bfloat16 without the scale, "fp8_v4" bfloat16 with it, "fp8_exact", "fp8_v4_exact" and "exact"
    float32, "plain" what is there. `scales` is what `_load_packed_scales` gives, for the modes of V4.
    """
    place = start[:, None] + (FIRST + tl.arange(0, WIDTH))[None, :]
    if MODE == "fp8_v4" or MODE == "fp8_v4_exact":
        keys = _load_keys_v4(start, scales, valid, FIRST, WIDTH, MODE == "fp8_v4_exact", DECODE, UPCAST)
    elif MODE == "fp8":
        keys = decode_bf16(tl.load(place, mask=valid[:, None], other=0), DECODE)
    elif MODE == "fp8_exact":
        keys = decode(tl.load(place, mask=valid[:, None], other=0)) * _load_scale(start, valid, FIRST // 128)[:, None]
    elif MODE == "exact":
        keys = tl.load(place, mask=valid[:, None], other=0.0).to(tl.float32)
    else:
        keys = tl.load(place, mask=valid[:, None], other=0.0)
    return keys


@triton.jit
def _load_keys_v4(
    start,
    scales,
    valid,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
    DECODE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Dims FIRST .. FIRST + WIDTH of keys of fp8_ds_mla_v4, scaled: the e4m3 latent, then 64 bfloat16.

    A value times a power of two is exact in bfloat16, so the scale goes into the operand here. A tile of 128 has two
    scales, or one and the RoPE dims.
    """
    column = FIRST + tl.arange(0, WIDTH)[None, :]
    rope = (start + V4_LATENT).to(tl.pointer_type(tl.bfloat16))[:, None] + (column - V4_LATENT)
    if FIRST >= V4_LATENT:
        keys = tl.load(rope, mask=valid[:, None], other=0.0)
        if EXACT:
            keys = widen(keys)
    else:
        latent = valid[:, None]
        if FIRST + WIDTH > V4_LATENT:
            latent = latent & (column < V4_LATENT)
        byte = tl.load(start[:, None] + column, mask=latent, other=0)
        exponent = ((scales >> (FIRST // 64 * 8)) & 0xFF).to(tl.int32)[:, None]
        if FIRST // 64 != (FIRST + WIDTH - 1) // 64 and FIRST + 64 < V4_LATENT:
            second = ((scales >> (FIRST // 64 * 8 + 8)) & 0xFF).to(tl.int32)[:, None]
            exponent = tl.where(column < FIRST + 64, exponent, second)
        if EXACT:
            keys = decode(byte) * decode_scale(exponent)
        elif UPCAST:
            keys = narrow(decode(byte) * decode_scale(exponent), tl.bfloat16)
        else:
            keys = decode_bf16(byte, DECODE) * decode_scale_bf16(exponent)
        if FIRST + WIDTH > V4_LATENT:
            tail = tl.load(rope, mask=valid[:, None] & (column >= V4_LATENT), other=0.0)
            if EXACT:
                tail = widen(tail)
            keys = tl.where(column < V4_LATENT, keys, tail)
    return keys


@triton.jit
def _load_packed_scales(kv, start, block, index, block_size, valid, stride_block, MODE: tl.constexpr):
    """The 8 bytes of scales of each key of fp8_ds_mla_v4 in one int64; nothing in other modes."""
    scales = start
    if MODE == "fp8_v4" or MODE == "fp8_v4_exact":
        place = kv + block.to(tl.int64) * stride_block + block_size.to(tl.int64) * V4_ROW_BYTES
        place += (index % block_size).to(tl.int64) * V4_SCALE_BYTES
        scales = tl.load(place.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    return scales


@triton.jit
def _load_scale(start, valid, GROUP: tl.constexpr):
    return tl.load((start + FP8_SCALES_AT).to(tl.pointer_type(tl.float32)) + GROUP, mask=valid, other=0.0)


@triton.jit
def _load_rope(start, valid, MODE: tl.constexpr):
    """The 64 RoPE dims of the keys at `start`, [keys, 64], zero where not valid."""
    if MODE == "fp8" or MODE == "fp8_exact":
        place = (start + FP8_ROPE_AT).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, 64)[None, :]
    else:
        place = start[:, None] + (512 + tl.arange(0, 64))[None, :]
    value = tl.load(place, mask=valid[:, None], other=0.0)
    if MODE == "fp8_exact" or MODE == "exact":
        value = widen(value)
    return value


@triton.jit
def named_end(index_row, begin, end):
    """Where the last index that is not negative stands, plus one: what is left of `end` without a tail of -1."""
    last = begin
    for start in range(begin, end, 512):
        column = start + tl.arange(0, 512)
        index = tl.load(index_row + column, mask=column < end, other=-1)
        last = tl.maximum(last, tl.max(tl.where(index >= 0, column + 1, 0), 0))
    return last


@triton.jit
def load_query(q_row, live_head, ROPE: tl.constexpr, EXACT: tl.constexpr):
    """Q in four groups of 128 dims and the 64 behind them. EXACT walks read it anew for each tile: nothing for them."""
    group = tl.arange(0, 128)[None, :]
    unused = tl.zeros((1,), tl.float32)
    q0, q1, q2, q3, q4 = unused, unused, unused, unused, unused
    if not EXACT:
        q0 = tl.load(q_row + group, mask=live_head[:, None], other=0.0)
        q1 = tl.load(q_row + (128 + group), mask=live_head[:, None], other=0.0)
        q2 = tl.load(q_row + (256 + group), mask=live_head[:, None], other=0.0)
        q3 = tl.load(q_row + (384 + group), mask=live_head[:, None], other=0.0)
        if ROPE:
            q4 = tl.load(q_row + (512 + tl.arange(0, 64))[None, :], mask=live_head[:, None], other=0.0)
    return q0, q1, q2, q3, q4


@triton.jit
def new_state(BLOCK_H: tl.constexpr):
    """Four accumulators of 128 dims, the largest score so far in base 2, and the sum of weights."""
    acc0 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc1 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc2 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc3 = tl.zeros((BLOCK_H, 128), tl.float32)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    return acc0, acc1, acc2, acc3, top, total


@triton.jit
def attend_keys(
    q_row,
    query,
    live_head,
    state,
    kv,
    index_row,
    begin,
    end,
    table,
    known,
    scale_log2,
    num_blocks,
    block_size,
    max_blocks,
    stride_block,
    MODE: tl.constexpr,
    ROPE: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    KV_UNIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr,
    UPCAST: tl.constexpr,
    WHOLE: tl.constexpr = False,
    row_end=None,
):
    """Online softmax over the keys that entries `begin` to `end` of `index_row` name, in tiles of BLOCK_N.

    No `index_row`: over the keys `begin` to `end` themselves, of which a tile lies in one block if they are WHOLE.

    A tile of keys is read once, in four groups of 128 dims and the RoPE dims behind 512, and each group serves both
    QK and PV: four dots [BLOCK_H, 128] x [128, BLOCK_N] into the scores, four dots [BLOCK_H, BLOCK_N] x
    [BLOCK_N, 128] into four float32 accumulators. Groups are also what shares a scale in fp8_ds_mla. The e4m3 values
    are exact as bfloat16, so the scale stays outside of the operands: it multiplies the group's partial scores, and
    goes into the float32 probabilities before they are rounded. Hence any positive float32 scale is right. In
    fp8_ds_mla_v4 scales are powers of two, which change nothing about that exactness, and go into the operand.

    A key is looked at only if its index, its request, its block-table entry and its block are in range and it is
    within the row's length: all else is masked at the load, so nothing in an unused slot is ever seen.

    Rows of the tile see all these keys, or, where there is a `row_end`, those at positions below their own.

    `query` is what `load_query` gives, `state` what `new_state` or an earlier walk gave; returns the state after it.
    """
    q0, q1, q2, q3, q4 = query
    acc0, acc1, acc2, acc3, top, total = state
    EXACT: tl.constexpr = MODE == "exact" or MODE == "fp8_exact" or MODE == "fp8_v4_exact"
    for start in range(begin, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        if WHOLE:
            # one division and one entry of the table for all keys of a tile
            index = column
            number = start // block_size
            block = tl.load(table + number, mask=known & (number < max_blocks), other=-1)
            valid = (column < end) & (block >= 0) & (block < num_blocks)
            offset = (start - number * block_size).to(tl.int64)
            key = kv + block.to(tl.int64) * (stride_block * KV_UNIT) + offset * ROW_WIDTH
            key += tl.arange(0, BLOCK_N) * ROW_WIDTH
        else:
            if index_row is not None:
                index = tl.load(index_row + column, mask=column < end, other=-1)
            else:
                index = tl.where(column < end, column, -1)
            valid = index >= 0
            block = index // block_size
            if table is not None:
                valid &= known & (block < max_blocks)
                block = tl.load(table + block, mask=valid, other=-1)
                valid &= block >= 0
            valid &= block < num_blocks
            key = kv + block.to(tl.int64) * (stride_block * KV_UNIT) + (index % block_size).to(tl.int64) * ROW_WIDTH
        scales = _load_packed_scales(kv, key, block, index, block_size, valid, stride_block * KV_UNIT, MODE)
        zeros = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
        if EXACT:
            scores = zeros
            # narrow pieces: without tensor cores a thread holds whole rows of both operands
            for piece in tl.static_range(0, 512, 32):
                keys = _load_keys(key, scales, valid, piece, 32, MODE, DECODE, UPCAST)
                queries = tl.load(q_row + (piece + tl.arange(0, 32))[None, :], mask=live_head[:, None], other=0.0)
                scores = dot(widen(queries), tl.trans(keys), scores, UPCAST)
            if ROPE:
                queries = tl.load(q_row + (512 + tl.arange(0, 64))[None, :], mask=live_head[:, None], other=0.0)
                scores = dot(widen(queries), tl.trans(_load_rope(key, valid, MODE)), scores, UPCAST)
        else:
            # group by group, for a tile of bytes that waits in registers takes one register each
            k0 = _load_keys(key, scales, valid, 0, 128, MODE, DECODE, UPCAST)
            scores = dot(q0, tl.trans(k0), zeros, UPCAST)
            if MODE == "fp8":
                scale0 = _load_scale(key, valid, 0)[None, :]
                scale1 = _load_scale(key, valid, 1)[None, :]
                scale2 = _load_scale(key, valid, 2)[None, :]
                scale3 = _load_scale(key, valid, 3)[None, :]
                scores *= scale0
                k1 = _load_keys(key, scales, valid, 128, 128, MODE, DECODE, UPCAST)
                scores += dot(q1, tl.trans(k1), zeros, UPCAST) * scale1
                k2 = _load_keys(key, scales, valid, 256, 128, MODE, DECODE, UPCAST)
                scores += dot(q2, tl.trans(k2), zeros, UPCAST) * scale2
                k3 = _load_keys(key, scales, valid, 384, 128, MODE, DECODE, UPCAST)
                scores += dot(q3, tl.trans(k3), zeros, UPCAST) * scale3
            elif MODE == "fp8_v4":
                k1 = _load_keys(key, scales, valid, 128, 128, MODE, DECODE, UPCAST)
                scores = dot(q1, tl.trans(k1), scores, UPCAST)
                k2 = _load_keys(key, scales, valid, 256, 128, MODE, DECODE, UPCAST)
                scores = dot(q2, tl.trans(k2), scores, UPCAST)
                k3 = _load_keys(key, scales, valid, 384, 128, MODE, DECODE, UPCAST)
                scores = dot(q3, tl.trans(k3), scores, UPCAST)
            else:
                k1 = _load_keys(key, scales, valid, 128, 128, MODE, DECODE, UPCAST)
                k2 = _load_keys(key, scales, valid, 256, 128, MODE, DECODE, UPCAST)
                k3 = _load_keys(key, scales, valid, 384, 128, MODE, DECODE, UPCAST)
                scores = dot(q1, tl.trans(k1), scores, UPCAST)
                scores = dot(q2, tl.trans(k2), scores, UPCAST)
                scores = dot(q3, tl.trans(k3), scores, UPCAST)
            if ROPE:
                scores = dot(q4, tl.trans(_load_rope(key, valid, MODE)), scores, UPCAST)

        seen = valid[None, :]
        if row_end is not None:
            seen = seen & (column[None, :] < row_end[:, None])
        scores = tl.where(seen, scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - pivot)
        weights = tl.exp2(scores - pivot[:, None])
        total = total * fade + tl.sum(weights, 1)
        top = new_top
        acc0 *= fade[:, None]
        acc1 *= fade[:, None]
        acc2 *= fade[:, None]
        acc3 *= fade[:, None]
        if EXACT:
            acc0 = dot(weights, _load_keys(key, scales, valid, 0, 128, MODE, DECODE, UPCAST), acc0, UPCAST)
            acc1 = dot(weights, _load_keys(key, scales, valid, 128, 128, MODE, DECODE, UPCAST), acc1, UPCAST)
            acc2 = dot(weights, _load_keys(key, scales, valid, 256, 128, MODE, DECODE, UPCAST), acc2, UPCAST)
            acc3 = dot(weights, _load_keys(key, scales, valid, 384, 128, MODE, DECODE, UPCAST), acc3, UPCAST)
        elif MODE == "fp8":
            acc0 = dot(round_to(weights * scale0, tl.bfloat16, UPCAST), k0, acc0, UPCAST)
            acc1 = dot(round_to(weights * scale1, tl.bfloat16, UPCAST), k1, acc1, UPCAST)
            acc2 = dot(round_to(weights * scale2, tl.bfloat16, UPCAST), k2, acc2, UPCAST)
            acc3 = dot(round_to(weights * scale3, tl.bfloat16, UPCAST), k3, acc3, UPCAST)
        else:
            rounded = round_to(weights, k0.dtype, UPCAST)
            acc0 = dot(rounded, k0, acc0, UPCAST)
            acc1 = dot(rounded, k1, acc1, UPCAST)
            acc2 = dot(rounded, k2, acc2, UPCAST)
            acc3 = dot(rounded, k3, acc3, UPCAST)
    return acc0, acc1, acc2, acc3, top, total


@triton.jit
def store_result(
    state,
    token,
    head,
    live_head,
    split,
    attn_sink,
    out,
    lse,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
    stride_lse_token,
    PARTIAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The output and lse of a token's heads: of all its keys with the sink, or PARTIAL, of one split's in base 2."""
    acc0, acc1, acc2, acc3, top, total = state
    group = tl.arange(0, 128)[None, :]
    # base 2 until the very end; a row whose scores overflowed has lse +inf, as in the reference
    safe = tl.where(total == 0, 1.0, total)
    log2_sum = tl.where(top == float("inf"), float("inf"), top + tl.log2(safe))
    log2_sum = tl.where(total == 0, float("-inf"), log2_sum)
    factor = tl.where(total == 0, 0.0, 1.0 / safe)
    lse_place = lse + split * stride_lse_split + token * stride_lse_token + head
    if PARTIAL:
        tl.store(lse_place, log2_sum, mask=live_head)
    else:
        if attn_sink is not None:
            sink = tl.load(attn_sink + head, mask=live_head, other=0.0) * 1.4426950408889634
            factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp2(sink - log2_sum)))
        tl.store(lse_place, log2_sum * 0.6931471805599453, mask=live_head)
    out_row = out + split * stride_out_split + token * stride_out_token + (head.to(tl.int64) * stride_out_head)[:, None]
    stored = live_head[:, None]
    if PARTIAL:
        # the merge does not read a split without keys
        stored &= (total != 0)[:, None]
    element: tl.constexpr = out.dtype.element_ty
    tl.store(out_row + group, round_to(acc0 * factor[:, None], element, UPCAST), mask=stored)
    tl.store(out_row + (128 + group), round_to(acc1 * factor[:, None], element, UPCAST), mask=stored)
    tl.store(out_row + (256 + group), round_to(acc2 * factor[:, None], element, UPCAST), mask=stored)
    tl.store(out_row + (384 + group), round_to(acc3 * factor[:, None], element, UPCAST), mask=stored)
