"""The walk over keys that are multiplied with all dims at once: of 64 heads on SM90, of 32 over fp8_ds_mla elsewhere.

The compiler waits for each `wgmma` where it stands. Here a tile of keys has three: all 512 dims, those behind, values.
Keys of fp8_ds_mla become float16 with their scale, which saves half of the conversion and all factors outside of
products; others are operands as they are. Of these two tiles are in shared memory, one on its way.
"""

import triton
import triton.language as tl

from .bfloat16 import widen
from .rows import FP8_SCALES_AT
from .sparse_attention_device import add_weights, dot, new_state, round_to
from .sparse_attention_keys import (
    HALF_EXPONENT,
    HALF_SCALE,
    fetch_indices,
    half_operand,
    is_half,
    load_rope,
    locate,
    rows_at,
)


@triton.constexpr_function
def is_whole(options):
    """Whether keys are read by `attend_whole`."""
    return options.tile.apart and options.keys.operands in ("fp8_half", "plain")


@triton.jit
def load_query_whole(q_rows, live_head, OPTIONS: tl.constexpr):
    """Q in 512 dims and the 64 behind them, if there are any."""
    q_row, rope_row = q_rows
    latent = tl.load(q_row + tl.arange(0, 512)[None, :], mask=live_head[:, None], other=0.0)
    rope = latent
    if OPTIONS.rope:
        rope = tl.load(rope_row + tl.arange(0, 64)[None, :], mask=live_head[:, None], other=0.0)
    return latent, rope


@triton.jit
def _halve_query(latent, scale_log2, go):
    """Q for float16 keys: float16 up to a power of two a head, of which scores are freed by their scale, `[heads]`.

    The largest value is at most 2**15, so that what float16 loses is 2**-40 of it. The dims behind 512 stay bfloat16,
    for their keys are; a power of two changes nothing in them.
    """
    # bits of bfloat16, so that nothing of float32 stays in registers
    top = tl.zeros((latent.shape[0],), tl.int32)
    # One turn: what a loop like this returns changes its layout behind it. Else all of Q does before its maxima.
    for _ in range(go.to(tl.int32)):
        top = tl.max((latent.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), 1)
    exponent = tl.maximum((top >> 7) - (127 + 14), -100)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return _apart((widen(latent) * down).to(tl.float16)), up * (scale_log2 / HALF_SCALE)


@triton.jit
def _apart(x):
    """512 dims in another order: of each 16, which a thread decodes, the former 8 in the first 256, the latter behind.

    So a warp's stores to shared memory, 8 dims a thread, are to different banks.
    """
    return tl.reshape(tl.permute(tl.reshape(x, (x.shape[0], 32, 2, 8)), (0, 2, 1, 3)), (x.shape[0], 512))


@triton.jit
def _together(x):
    """What `_apart` does, undone."""
    return tl.reshape(tl.permute(tl.reshape(x, (x.shape[0], 2, 32, 8)), (0, 2, 1, 3)), (x.shape[0], 512))


@triton.jit
def _load_rows(cache, places, OPTIONS: tl.constexpr):
    """Raw rows at `places`: 512 dims, those behind, and four scales; where there are none, the first.

    512 dims that have scales are four groups, `[keys, 4, 128]`.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    place, _scale_place, valid = places
    row = rows_at(cache[0], place, KEYS)
    within = valid[:, None]
    if is_half(KEYS):
        # in groups a thread has few rows, whose places it finds once
        groups = tl.arange(0, 4)[None, :, None] * 128 + row[:, None, None] + tl.arange(0, 128)[None, None, :]
        latent = tl.load(groups, mask=valid[:, None, None], other=0)
        rope = load_rope(row, within, True, KEYS)
        scales = (row + FP8_SCALES_AT).to(tl.pointer_type(tl.float32))[:, None] + tl.arange(0, 4)[None, :]
        scales = tl.load(scales, mask=within, other=0.0)
    else:
        latent = tl.load(row[:, None] + tl.arange(0, 512)[None, :], mask=within, other=0)
        rope, scales = latent, latent
        if OPTIONS.rope:
            rope = load_rope(row, within, True, KEYS)
    return latent, rope, scales


@triton.jit
def _attend_tile(q, state, rows, cache, indices, scales, sure, OPTIONS: tl.constexpr):
    """The state after one tile of keys, and the scale of each head's scores.

    `scales` are those of scores over 512 dims, a head, and behind them. `sure` are three conditions that are true,
    which the compiler does not know. It puts what stands behind the first last in its loop: the copies of the next tile
    begin before the products. Where it sees that a product goes into another, it gives all groups of warps all of it:
    hence the second, and with `mma.sync` the third. Newer compilers move what lies between branch and product.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    UPCAST: tl.constexpr = OPTIONS.upcast
    acc, top, sums = state
    keys, rope, _ = rows
    scale, scale_behind = scales
    BIAS: tl.constexpr = HALF_EXPONENT if is_half(KEYS) else 0.0
    if is_half(KEYS):
        keys = half_operand(keys, rows[2], KEYS)
        keys = _apart(tl.reshape(keys, (keys.shape[0], 512)))
    # It keeps the layout of `top`, else each tile would change it behind the branch.
    scale = tl.where(top == float("inf"), 0.0, scale)
    # 0, which the compiler does not know
    zeros = tl.zeros((q[0].shape[0], keys.shape[0]), tl.float32) + scale_behind * 0.0
    weights = round_to(zeros, keys.dtype, UPCAST)
    if sure[0]:
        if sure[1]:
            # read once more: carried from turn to turn it would be one more copy, and a wait for it
            index_row, n, left = indices
            valid = locate(cache, fetch_indices(index_row, n, left), KEYS)[2]
            scores = dot(q[0], tl.trans(keys), zeros, UPCAST)
            if is_half(KEYS):
                scores *= scale[:, None]
            if OPTIONS.rope:
                behind = zeros
                if q[0].shape[0] >= 64:  # noqa: SIM114 (known when this is compiled)
                    behind = dot(q[1], tl.trans(rope), zeros, UPCAST)
                elif sure[2]:
                    behind = dot(q[1], tl.trans(rope), zeros, UPCAST)
                scores += behind * scale_behind if is_half(KEYS) else behind
            scores = tl.where(valid[None, :], scores, float("-inf"))
            # Where both products have one scale, which is above 0, the exponents' multiplication applies it.
            largest = tl.max(scores, 1) if is_half(KEYS) else tl.max(scores, 1) * scale
            new_top = tl.maximum(top, largest)
            pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
            fade = tl.exp2(top - pivot)[:, None]
            if not is_half(KEYS):
                scores *= scale[:, None]
            exact = tl.exp2(scores - (pivot - BIAS)[:, None])
            sums = add_weights(sums, fade, exact)
            acc *= fade
            top = new_top
            weights = round_to(exact, keys.dtype, UPCAST)
        acc = dot(weights, keys, acc, UPCAST)
    return (acc, top, sums), scale


@triton.jit
def _walk(q, state, cache, index_row, span, first, scales, OPTIONS: tl.constexpr):
    """The state after all tiles of keys."""
    KEYS: tl.constexpr = OPTIONS.keys
    TILE: tl.constexpr = OPTIONS.tile
    begin, end = span
    scale, scale_behind = scales
    n = tl.arange(0, TILE.block_n)
    index = first
    for start in tl.range(begin, end, TILE.block_n, num_stages=TILE.ahead + 1):
        places = locate(cache, index, KEYS)
        rows = _load_rows(cache, places, OPTIONS)
        if is_half(KEYS):
            index = fetch_indices(index_row, start + TILE.block_n + n, end)
        else:
            # an address plus constants, for which float16 keys leave no registers
            column = start + TILE.block_n
            index = fetch_indices(index_row + column, n, end - column)
        state, scale = _attend_tile(
            q, state, rows, cache, (index_row + start, n, end - start), (scale, scale_behind),
            (begin >= 0, start < end, end >= begin), OPTIONS,
        )  # fmt: skip
    return state


@triton.jit
def attend_whole(q, scratch, live_head, cache, index_row, span, first, scale_log2, OPTIONS: tl.constexpr):
    """Does what `attend_keys` does: an accumulator of 512 dims, the largest score in base 2, sums of weights, a head.

    `first` are the indices of the first tile. Of float16 keys, scales that float16 does not hold make NaN of a row's
    sum of weights, as NaN in a key does and scores that overflow. `scratch` are places of 512 float16 a head.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    BLOCK_H: tl.constexpr = OPTIONS.tile.block_h
    begin, _ = span
    latent, rope = q
    scale = tl.zeros((BLOCK_H,), tl.float32) + scale_log2
    if is_half(KEYS):
        latent, scale = _halve_query(latent, scale_log2, begin >= 0)
    _, _, _, _, top, sums = new_state(OPTIONS)
    state = (tl.zeros((BLOCK_H, 512), tl.float32), top, sums)
    # Queries should be operands from shared memory: there are no registers left for them. What is loaded is.
    if BLOCK_H < 64:
        if is_half(KEYS):
            tl.store(scratch, latent, mask=live_head[:, None])
            tl.debug_barrier()
            latent = tl.load(scratch, mask=live_head[:, None], other=0.0)
        state = _walk((latent, rope), state, cache, index_row, span, first, (scale, scale_log2), OPTIONS)
    else:
        # So is, with `wgmma`, what a loop changes. One turn, which the compiler does not know.
        for _ in range((begin >= 0).to(tl.int32)):
            state = _walk((latent, rope), state, cache, index_row, span, first, (scale, scale_log2), OPTIONS)
            latent = tl.zeros_like(latent)
    acc, top, sums = state
    if is_half(KEYS):
        acc = _together(acc)
    return acc, top, sums
