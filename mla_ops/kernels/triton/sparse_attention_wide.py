"""The walk over keys that are multiplied with all dims at once: of 64 heads on SM90, of 32 over fp8_ds_mla elsewhere.

The compiler waits for each `wgmma` where it stands, but for those of scores that run on (`scores_run_on`). Here a tile
of keys has three: all 512 dims, those behind, values. Keys of fp8_ds_mla become float16 with their scale, which saves
half of the conversion and all factors outside of products. Others are operands as they are: two tiles are in shared
memory, one on its way.
"""

import triton
import triton.language as tl

from .attention_options import KEPT_AT
from .bfloat16 import widen
from .common import HOLDS_QUERIES
from .rows import FP8_SCALES_AT
from .sparse_attention_device import are_wild, dot, first_running_max, new_state, round_to, still_waits
from .sparse_attention_dims import attend_tile_by_dims, by_dims, split_queries
from .sparse_attention_keys import (
    fetch_indices,
    half_operand,
    half_unit,
    is_half,
    load_exponents,
    load_rope,
    locate,
    locate_in_block,
    look_up_block,
    rows_at,
)
from .sparse_attention_missing import keep_valid, room_of
from .sparse_attention_two import attend_tile_in_two, in_two, join_dims, split_dims, steep, weigh_tile

# by newer compilers they spill 250 to 290 bytes
QUERIES_IN_REGISTERS = tl.constexpr(HOLDS_QUERIES)


@triton.constexpr_function
def is_whole(options):
    """Whether keys are read by `attend_whole`."""
    return options.tile.apart and options.keys.operands in ("fp8_half", "plain")


@triton.constexpr_function
def scores_run_on(options):
    """Whether the products of scores run while the copies of the next tile begin.

    They have to read what was copied, not what was converted. In parts of rows, which have few tiles, it takes longer.
    """
    return options.tile.block_h >= 64 and options.keys.operands == "plain" and not options.partial


@triton.jit
def load_query_whole(q_rows, live_head, OPTIONS: tl.constexpr):
    """Q in 512 dims, and the 64 behind them, if there are any."""
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
    largest = tl.zeros((latent.shape[0],), tl.int32)
    # One turn: what a loop like this returns changes its layout behind it. Else all of Q does before its maxima.
    for _ in range(go.to(tl.int32)):
        largest = tl.max((latent.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), 1)
    exponent = tl.maximum((largest >> 7) - (127 + 14), -100)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return (widen(latent) * down).to(tl.float16), up * scale_log2


@triton.jit
def _apart(x):
    """512 dims in another order: of each 16, which a thread decodes, the former 8 in the first 256, the latter behind.

    So a warp's stores to shared memory, 8 dims a thread, are to different banks.
    """
    return tl.reshape(tl.permute(tl.reshape(x, (x.shape[0], 32, 2, 8)), (0, 2, 1, 3)), (x.shape[0], 512))


@triton.jit
def _together(x):
    """The former order of dims that are `_apart`."""
    return tl.reshape(tl.permute(tl.reshape(x, (x.shape[0], 2, 32, 8)), (0, 2, 1, 3)), (x.shape[0], 512))


@triton.jit
def _load_rows(cache, places, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Raw rows at `places`: 512 dims, those behind, and four scales; where there are none, the first.

    512 dims that have scales are four groups, `[keys, 4, 128]`: in groups a thread has few rows, whose places it finds
    once. MASKED, zeros stand where no key is; else all keys are there.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    place, _scale_place, valid = places
    row = rows_at(cache[0], place, KEYS)
    within = valid[:, None] if MASKED else None
    if is_half(KEYS):
        latent_place = tl.arange(0, 4)[None, :, None] * 128 + row[:, None, None] + tl.arange(0, 128)[None, None, :]
        latent = _load(latent_place, valid[:, None, None] if MASKED else None)
        rope = load_rope(row, within, True, KEYS)
        scale_place = (row + FP8_SCALES_AT).to(tl.pointer_type(tl.float32))[:, None] + tl.arange(0, 4)[None, :]
        scales = _load(scale_place, within)
    else:
        latent = _load(row[:, None] + tl.arange(0, 512)[None, :], within)
        rope = latent
        scales = rope
        if OPTIONS.rope:
            BITS: tl.constexpr = not scores_run_on(OPTIONS) and not by_dims(OPTIONS)
            rope = load_rope(row, within, BITS, KEYS)
    return latent, rope, scales


@triton.jit
def _load(place, within):
    return tl.load(place) if within is None else tl.load(place, mask=within, other=0)


@triton.jit
def _surely(start, end):
    """Four conditions that are true in a loop from `start` to `end`: LLVM proves them, Triton's passes do not.

    Code behind a condition is in a branch while Triton lays out and pipelines a loop, and in line afterwards.
    """
    return start != end, start < end, start <= end, end > start


@triton.jit
def _attend_tile(q, state, rows, cache, indices, scales, sure, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    if by_dims(OPTIONS):
        scale = scales[0]
        state = attend_tile_by_dims(q, state, rows, cache, indices, scales[:2], MASKED, OPTIONS)
    elif in_two(OPTIONS):
        state, scale = attend_tile_in_two(q, state, rows, cache, indices, scales, sure, MASKED, OPTIONS)
    else:
        state, scale = _attend_tile_in_one(q, state, rows, cache, indices, scales, sure, MASKED, OPTIONS)
    return state, scale


@triton.jit
def _attend_tile_in_one(q, state, rows, cache, indices, scales, sure, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """The state after one tile of keys, and the scale of each head's scores. MASKED: some keys may not be there.

    `scales` are those of scores over 512 dims, a head, and behind them, and the keys' unit, or `steep`. Code behind the
    first condition (`sure`) comes last in the loop: the copies of the next tile begin before the products. Where the
    compiler sees that a product goes into another, it gives all groups of warps all of it: hence the second, and with
    `mma.sync` the third. Newer compilers move what lies between branch and product.

    Products of scores that run on stand before the conditions: the compiler waits for them where they are used, if they
    are used behind a condition, are operands from copies and go on to the next turn (`_keep`).
    """
    KEYS: tl.constexpr = OPTIONS.keys
    UPCAST: tl.constexpr = OPTIONS.upcast
    acc, running_max, sums, running, running_rope = state
    keys, rope, _ = rows
    scale, scale_behind, unit = scales
    if is_half(KEYS):
        keys = half_operand(keys, rows[2], unit, KEYS)
        keys = _apart(tl.reshape(keys, (keys.shape[0], 512)))
        # It keeps the layout of `running_max`, else each tile would change it behind the branch.
        scale = tl.where(running_max == float("inf"), 0.0, scale)
    # 0, which the compiler does not know
    zeros = tl.zeros((q[0].shape[0], keys.shape[0]), tl.float32) + scale_behind * 0.0
    weights = round_to(zeros, keys.dtype, UPCAST)
    RUN_ON: tl.constexpr = scores_run_on(OPTIONS)
    if RUN_ON:
        running = dot(q[0], tl.trans(keys), zeros, UPCAST)
        if OPTIONS.rope:
            running_rope = dot(q[1], tl.trans(rope), zeros, UPCAST)
    if sure[0]:
        if sure[1]:
            if RUN_ON:
                scores = running
            else:
                scores = dot(q[0], tl.trans(keys), zeros, UPCAST)
            if is_half(KEYS):
                scores *= scale[:, None]
            if OPTIONS.rope and RUN_ON:
                scores += running_rope
            elif OPTIONS.rope:
                behind = zeros
                if q[0].shape[0] >= 64:  # noqa: SIM114 (known when this is compiled)
                    behind = dot(q[1], tl.trans(rope), zeros, UPCAST)
                elif sure[2]:
                    behind = dot(q[1], tl.trans(rope), zeros, UPCAST)
                scores += behind * scale_behind if is_half(KEYS) else behind
            factors = scale
            if OPTIONS.steady:
                factors = (scale_behind,)
            elif not is_half(KEYS):
                factors = (scale_behind, unit[0], unit[1])
            weighed = weigh_tile(scores, (running_max, sums), factors, cache, indices, keys.dtype, MASKED, OPTIONS)
            weights, running_max, sums, alpha = weighed
            if not OPTIONS.steady:
                acc *= alpha
        acc = dot(weights, keys, acc, UPCAST)
    return (acc, running_max, sums, running, running_rope), scale


@triton.jit
def _keep(sums, products):
    """`sums` as they are, which the compiler does not know before LLVM: so it keeps the last products until here."""
    by_group = tl.reshape(products, (products.shape[0], 2, products.shape[1] // 16, 8))
    return tl.where(tl.sum(by_group, 2) > float("inf"), 0.0, sums)


@triton.jit
def _walk(q, state, cache, index_row, span, first, place, scales, OPTIONS: tl.constexpr):
    """The state after all tiles of keys: those up to `whole`, in which all keys are there, without masks.

    Programs that keep indices (`Options.keeps`) write those of keys that are there anew where one is missing: of all
    the row's, or of the last tile's alone. `place` is as in `room_of`.

    Where warps share the dims, the second of `scales` is whether a STEADY program has not seen a key yet.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    TILE: tl.constexpr = OPTIONS.tile
    begin, whole, end = span
    if OPTIONS.looks:
        if OPTIONS.keeps:  # noqa: SIM102 (known when this is compiled)
            if whole < end:
                if end - whole > TILE.block_n:
                    whole = begin
                keep_valid(cache, index_row, whole, end, room_of(place, begin), TILE, KEYS)
        state, scales = _walk_valid(q, state, cache, index_row, (begin, whole), first, scales, OPTIONS)
        # Where there is no such tile, nothing for the rest is kept in registers: it would spill.
        if whole < end:
            if OPTIONS.keeps:
                state = _walk_kept(q, state, cache, room_of(place, begin), scales, OPTIONS)
            else:
                index = fetch_indices(index_row, whole + tl.arange(0, TILE.block_n), end)
                state = _walk_masked(q, state, cache, index_row, (whole, end), index, scales, OPTIONS)
    else:
        state = _walk_masked(q, state, cache, index_row, (begin, end), first, scales, OPTIONS)
    return state


@triton.jit
def _walk_valid(q, state, cache, index_row, span, first, scales, OPTIONS: tl.constexpr):
    """The state after whole tiles in which all keys are there, and `scales` after them."""
    KEYS: tl.constexpr = OPTIONS.keys
    TILE: tl.constexpr = OPTIONS.tile
    begin, end = span
    scale, scale_behind, unit = scales
    n = tl.arange(0, TILE.block_n)
    index = first
    last = end - TILE.block_n
    for start in tl.range(begin, end, TILE.block_n, num_stages=TILE.ahead + 1):
        rows = _load_rows(cache, locate(cache, index, KEYS), False, OPTIONS)
        index = tl.load(index_row + tl.minimum(start + TILE.block_n, last) + n)
        scales = (scale, scale_behind, unit)
        state, scale = _attend_tile(q, state, rows, cache, None, scales, _surely(start, end), False, OPTIONS)
        if OPTIONS.steady and by_dims(OPTIONS):
            scale_behind = still_waits(scale_behind, state[1])
    return state, (scale, scale_behind, unit)


@triton.jit
def _walk_kept(q, state, cache, kept_row, scales, OPTIONS: tl.constexpr):
    """The state after the keys whose indices `keep_valid` has written."""
    TILE: tl.constexpr = OPTIONS.tile
    scale, scale_behind, unit = scales
    KEYS: tl.constexpr = OPTIONS.keys
    n = tl.arange(0, TILE.block_n)
    end = tl.load(kept_row)
    index_row = kept_row + KEPT_AT
    index = tl.load(index_row + n)
    for start in tl.range(0, end, TILE.block_n, num_stages=TILE.ahead + 1):
        rows = _load_rows(cache, locate(cache, index, KEYS), False, OPTIONS)
        index = tl.load(index_row + tl.minimum(start + TILE.block_n, end) + n)
        here = (None, n, end - start)
        scales = (scale, scale_behind, unit)
        state, scale = _attend_tile(q, state, rows, cache, here, scales, _surely(start, end), True, OPTIONS)
        if OPTIONS.steady and by_dims(OPTIONS):
            scale_behind = still_waits(scale_behind, state[1])
    return state


@triton.jit
def _walk_masked(q, state, cache, index_row, span, first, scales, OPTIONS: tl.constexpr):
    """The state after tiles in which some keys may not be there: after others, or all.

    Behind another loop, and where e4m3 is converted by arithmetic, there are too few registers for branches to go.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    FEW_REGISTERS: tl.constexpr = OPTIONS.looks or KEYS.decode == "packed"
    TILE: tl.constexpr = OPTIONS.tile
    begin, end = span
    scale, scale_behind, unit = scales
    n = tl.arange(0, TILE.block_n)
    index = first
    for start in tl.range(begin, end, TILE.block_n, num_stages=TILE.ahead + 1):
        if OPTIONS.whole:
            places = locate_in_block(cache, index, start, end, OPTIONS)
        else:
            places = locate(cache, index, KEYS)
        rows = _load_rows(cache, places, True, OPTIONS)
        if OPTIONS.whole:
            index = look_up_block(cache, start + TILE.block_n, end)
        elif is_half(KEYS):
            index = fetch_indices(index_row, start + TILE.block_n + n, end)
        else:
            # an address plus constants, for which float16 keys leave no registers
            column = start + TILE.block_n
            index = fetch_indices(index_row + column, n, end - column)
        sure = _surely(start, end)
        if FEW_REGISTERS:
            # the first and the last of these LLVM does not prove, either
            sure = (begin >= 0, start < end, end >= begin, end > begin)
        if OPTIONS.whole:
            here = (start, n, end)
        else:
            here = (index_row + start, n, end - start)
        scales = (scale, scale_behind, unit)
        state, scale = _attend_tile(q, state, rows, cache, here, scales, sure, True, OPTIONS)
        if OPTIONS.steady and by_dims(OPTIONS):
            scale_behind = still_waits(scale_behind, state[1])
    return state


@triton.jit
def _by_way_of(scratch, latent, live_head):
    """`latent` as it is, loaded from where it has been stored."""
    place = scratch + tl.arange(0, latent.shape[1])[None, :]
    tl.store(place, latent, mask=live_head[:, None])
    tl.debug_barrier()
    return tl.load(place, mask=live_head[:, None], other=0.0)


@triton.jit
def attend_whole(q, scratch, live_head, cache, index_row, span, first, place, scale_log2, OPTIONS: tl.constexpr):
    """Does what `attend_keys` does: an accumulator of 512 dims, the largest score in base 2, sums of weights, a head.

    `span` are columns of `index_row`: the first, the end of the tiles in which all keys are there, and the end. `first`
    are the indices of the first tile; without an `index_row` a tile lies in one block, whose entry it is. `place` is as
    in `room_of`, `scratch` are places of 512 float16 a head, `[heads, 1]`.

    Over float16 keys, scales that float16 does not hold, NaN and scores that overflow make NaN of a row's sums.
    """
    BLOCK_H: tl.constexpr = OPTIONS.tile.block_h
    KEYS: tl.constexpr = OPTIONS.keys
    HALF: tl.constexpr = is_half(KEYS)
    begin = span[0]
    latent, rope = q
    scale = tl.zeros((BLOCK_H,), tl.float32) + scale_log2
    unit = scale_log2
    if HALF:
        if OPTIONS.whole:
            places = locate_in_block(cache, first, begin, span[2], OPTIONS)
        else:
            places = locate(cache, first, KEYS)
        # on their way while queries become operands
        exponents = load_exponents(cache, places, KEYS)
        latent, scale = _halve_query(latent, scale_log2, begin >= 0)
        if in_two(OPTIONS):
            latent = split_dims(latent)
        else:
            latent = _apart(latent)
        unit, wide = half_unit(exponents)
        scale /= unit
        if BLOCK_H == 64:
            span = (begin, tl.where(wide, begin, span[1]), tl.where(wide, begin, span[2]))
    elif not OPTIONS.steady and not by_dims(OPTIONS):
        unit = steep(scale_log2)
    _, _, _, _, running_max, sums = new_state(OPTIONS)
    if HALF and BLOCK_H == 64:
        sums = tl.where(wide, float("nan"), sums)
    running = running_max
    if scores_run_on(OPTIONS):
        BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
        running = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
    if in_two(OPTIONS):
        acc = tl.zeros((BLOCK_H, 256), tl.float32)
        state = (acc, running_max, sums, acc, running)
    else:
        state = (tl.zeros((BLOCK_H, 512), tl.float32), running_max, sums, running, running)
    scales = (scale, scale_log2, unit)
    if by_dims(OPTIONS):
        latent, rope, scale = split_queries((latent, rope), scale_log2, OPTIONS)
        if OPTIONS.tile.num_warps == 4:
            sums = tl.zeros((4, BLOCK_H), tl.float32)
        state = (state[0], running_max, sums, running, running)
        scales = (scale, begin >= 0, unit)
        state = _walk((latent, rope), state, cache, index_row, span, first, place, scales, OPTIONS)
    # Queries should be operands from shared memory, as loaded ones are, where there are no registers left for them.
    elif BLOCK_H < 64:
        if in_two(OPTIONS):
            if not QUERIES_IN_REGISTERS:
                latent = (_by_way_of(scratch, latent[0], live_head), _by_way_of(scratch + 256, latent[1], live_head))
        else:
            latent = _by_way_of(scratch, latent, live_head)
        state = _walk((latent, rope), state, cache, index_row, span, first, place, scales, OPTIONS)
    else:
        # So is, with `wgmma`, what a loop changes. One turn, which the compiler does not know.
        for turn in range((begin >= 0).to(tl.int32)):
            queries, walked = (latent, rope), span
            if OPTIONS.steady:
                # where the turn is part of addresses, nothing moves out of this loop and stays in shared memory
                ends = (begin + turn, span[2])
                cell = _cell(place)
                tl.store(cell, tl.full((), 1, tl.int16))
                first_max, tame = _first_running_max(
                    queries, running_max, cache, index_row, ends, cell, scale_log2, OPTIONS
                )
                state = (state[0], first_max, sums, running, running)
                walked = (begin, begin + (span[1] - begin) * tame, begin + (span[2] - begin) * tame)
            state = _walk(queries, state, cache, index_row, walked, first, place, scales, OPTIONS)
            latent = tl.zeros_like(latent)
    acc, running_max, sums, running, running_rope = state
    if by_dims(OPTIONS):
        sums = tl.trans(sums)
    if scores_run_on(OPTIONS):
        sums = _keep(sums, running)
        if OPTIONS.rope:
            sums = _keep(sums, running_rope)
    if in_two(OPTIONS):
        acc = join_dims(acc, running)
    elif HALF:
        acc = _together(acc)
    result = (acc, running_max, sums)
    if HALF:
        result = (acc, running_max, sums, unit)
    elif not OPTIONS.steady and not by_dims(OPTIONS):
        # from 2^32 on by the other scale, else below 2^31
        result = (
            acc,
            tl.where(tl.abs(running_max) > 1.5 * 2.0**31, running_max * (scale_log2 / unit[0]), running_max),
            sums,
        )
    return result


@triton.jit
def _first_running_max(q, running_max, cache, index_row, span, cell, scale, OPTIONS: tl.constexpr):
    """What weights of a STEADY program of 64 heads are about, by 16 keys all over its row, and 0 if they are wild.

    In front of the loop: a branch in it would take uniform registers from `wgmma`.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    UPCAST: tl.constexpr = OPTIONS.upcast
    begin, end = span
    column = begin + tl.arange(0, 16) * ((end - begin) // 16)
    places = locate(cache, fetch_indices(index_row, column, end), KEYS)
    keys, rope, _ = _load_rows(cache, places, True, OPTIONS)
    tl.debug_barrier()
    before = tl.load(cell)
    zeros = tl.zeros((q[0].shape[0], 16), tl.float32)
    scores = dot(q[0], tl.trans(keys), zeros, UPCAST)
    if OPTIONS.rope:
        scores += dot(q[1], tl.trans(rope), zeros, UPCAST)
    scores *= scale
    valid = places[2][None, :]
    largest = tl.max(tl.where(valid, scores, float("-inf")), 1)
    wild = are_wild(scores, valid, largest)
    # not 0, as if a key had been seen
    return tl.where(wild, 1.0, first_running_max(running_max, largest)), _none_by_memory(wild, cell, before)


@triton.jit
def _cell(place):
    """The place of a program's first output, where a flag is until there is a result."""
    out, strides, split, token, head = place
    cell = out + split * strides[0] + token * strides[1] + head.to(tl.int64) * strides[2]
    return cell.to(tl.pointer_type(tl.int16))


@triton.jit
def _none_by_memory(flag, cell, before):
    """0 where a head's `flag` is true, else 1, by way of a `cell` that is 1, and was when it was read `before`.

    A loop whose bounds depend on a reduction in the same loop around it has no uniform registers left for `wgmma`.
    """
    nothing = tl.zeros_like(flag.to(tl.int32))
    tl.store(cell + nothing, nothing.to(tl.int16), mask=flag)
    tl.debug_barrier()
    # from L1, where it is since it was read before
    return (tl.load(cell, cache_modifier=".ca") & before).to(tl.int32)
