"""The walk of 64 heads over keys that are multiplied with all dims at once, on SM90.

The compiler waits for each product where it stands. Here a tile of keys has three: all 512 dims, those behind, values.
Keys of fp8_ds_mla become float16 with their scale, which saves half of the conversion and all factors outside of
products; others are operands as they are. Of these two tiles are in shared memory, one on its way.
"""

import triton
import triton.language as tl

from .bfloat16 import narrow, widen
from .rows import FP8_SCALES_AT
from .sparse_attention_device import add_weights, dot, round_to
from .sparse_attention_keys import HALF_EXPONENT, HALF_SCALE, fetch_indices, half_operand, is_half, load_rope, locate


@triton.constexpr_function
def is_whole(tile, keys):
    """Whether keys are read by `attend_whole`."""
    return tile.apart and keys.operands in ("fp8_half", "plain")


@triton.jit
def load_query_whole(q_rows, live_head, ROPE: tl.constexpr):
    """Q in 512 dims and the 64 behind them, if there are any."""
    q_row, rope_row = q_rows
    latent = tl.load(q_row + tl.arange(0, 512)[None, :], mask=live_head[:, None], other=0.0)
    rope = latent
    if ROPE:
        rope = tl.load(rope_row + tl.arange(0, 64)[None, :], mask=live_head[:, None], other=0.0)
    return latent, rope


@triton.jit
def _halve_query(q, scale_log2, go):
    """Q for float16 keys: float16 up to a power of two a head, of which scores are freed by their scale, `[heads]`.

    The largest value is at most 2**15, so that what float16 loses is 2**-40 of it. The dims behind 512 stay bfloat16,
    for their keys are; a power of two changes nothing in them.
    """
    latent, rope = q
    # bits of bfloat16, so that nothing of float32 stays in registers
    top = tl.zeros((latent.shape[0],), tl.int32)
    # One turn: what a loop like this returns changes its layout behind it. Else all of Q does before its maxima.
    for _ in range(go.to(tl.int32)):
        top = tl.max((latent.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), 1)
    exponent = tl.maximum((top >> 7) - (127 + 14), -100)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    rope = narrow(widen(rope) * (down * HALF_SCALE), tl.bfloat16)
    return _apart((widen(latent) * down).to(tl.float16)), rope, up * (scale_log2 / HALF_SCALE)


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
def _load_rows(cache, places, KEYS: tl.constexpr, ROPE: tl.constexpr):
    """Raw rows at `places`: 512 dims, those behind, and four scales; where there are none, the first."""
    place, _scale_place, valid = places
    row = cache[0] + place * KEYS.unit
    within = valid[:, None]
    latent = tl.load(row[:, None] + tl.arange(0, 512)[None, :], mask=within, other=0)
    rope, scales = latent, latent
    if ROPE:
        rope = load_rope(row, within, True, KEYS)
    if is_half(KEYS):
        scales = (row + FP8_SCALES_AT).to(tl.pointer_type(tl.float32))[:, None] + tl.arange(0, 4)[None, :]
        scales = tl.load(scales, mask=within, other=0.0)
    return latent, rope, scales


@triton.jit
def _attend_tile(
    q, state, rows, cache, indices, scale, zero, go, again, KEYS: tl.constexpr, ROPE: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """The state after one tile of keys, and `scale`.

    `go` and `again` are true, `zero` 0, which the compiler does not know. It puts what stands behind `go` last in its
    loop: the copies of the next tile begin before the products. Where it sees that a product goes into another, it
    gives both groups of warps all of it: hence `again`. Newer compilers move what lies between branch and product.
    """
    acc, top, sums = state
    keys, rope, scales = rows
    BIAS: tl.constexpr = HALF_EXPONENT if is_half(KEYS) else 0.0
    if is_half(KEYS):
        keys = _apart(half_operand(keys, scales, KEYS))
    # It keeps the layout of `top`, else each tile would change it behind the branch.
    scale = tl.where(top == float("inf"), 0.0, scale)
    zeros = tl.zeros((q[0].shape[0], keys.shape[0]), tl.float32) + zero
    weights = round_to(zeros, keys.dtype, UPCAST)
    if go:
        if again:
            # read once more: carried from turn to turn it would be one more copy, and a wait for it
            index_row, column, end = indices
            valid = locate(cache, fetch_indices(index_row, column, end), KEYS)[2]
            scores = dot(q[0], tl.trans(keys), zeros, UPCAST)
            if ROPE:
                scores += dot(q[1], tl.trans(rope), zeros, UPCAST)
            scores = tl.where(valid[None, :], scores * scale[:, None], float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
            fade = tl.exp2(top - pivot)[:, None]
            exact = tl.exp2(scores - (pivot - BIAS)[:, None])
            sums = add_weights(sums, fade, exact)
            acc *= fade
            top = new_top
            weights = round_to(exact, keys.dtype, UPCAST)
        acc = dot(weights, keys, acc, UPCAST)
    return acc, top, sums, scale


@triton.jit
def attend_whole(
    q, cache, index_row, span, first, scale_log2, TILE: tl.constexpr, KEYS: tl.constexpr, ROPE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Does what `attend_keys` does: an accumulator of 512 dims, the largest score in base 2, sums of weights, a head.

    `first` are the indices of the first tile. Of float16 keys, scales that float16 does not hold make NaN of a row's
    sum of weights, as NaN in a key does and scores that overflow.
    """
    begin, end = span
    BLOCK_H: tl.constexpr = TILE.block_h
    n = tl.arange(0, TILE.block_n)
    latent, rope = q
    scale = tl.zeros((BLOCK_H,), tl.float32) + scale_log2
    if is_half(KEYS):
        latent, rope, scale = _halve_query(q, scale_log2, begin >= 0)
    acc = tl.zeros((BLOCK_H, 512), tl.float32)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_H, 2, 8), tl.float32)
    # One turn, which the compiler does not know. Queries that a loop changes are operands from shared memory; else
    # each warp would read all of them into registers, of which there are none left, since they are no plain load.
    for _ in range((begin >= 0).to(tl.int32)):
        index = first
        for start in tl.range(begin, end, TILE.block_n, num_stages=TILE.ahead + 1):
            places = locate(cache, index, KEYS)
            rows = _load_rows(cache, places, KEYS, ROPE)
            index = fetch_indices(index_row, start + TILE.block_n + n, end)
            acc, top, sums, scale = _attend_tile(
                (latent, rope), (acc, top, sums), rows, cache, (index_row, start + n, end), scale, scale_log2 * 0.0,
                begin >= 0, start < end, KEYS, ROPE, UPCAST,
            )  # fmt: skip
        latent, rope = tl.zeros_like(latent), tl.zeros_like(rope)
    if is_half(KEYS):
        acc = _together(acc)
    return acc, top, sums
