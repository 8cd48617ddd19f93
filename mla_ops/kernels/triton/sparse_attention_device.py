"""Device code that the sparse attention kernels share: the loop over the keys, the result."""

import triton
import triton.language as tl

from .bfloat16 import narrow, widen
from .sparse_attention_keys import (
    fetch_indices,
    is_exact,
    load_exactly,
    load_rope_exactly,
    load_rows,
    locate,
    locate_in_block,
    look_up_block,
    to_operands,
)


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
def share_of_keys(length, split, shares, BLOCK_N: tl.constexpr):
    """The columns, from and to, of a split of a row: whole tiles, by `Shares`."""
    share = tl.cdiv(tl.cdiv(length, BLOCK_N) * shares[1], shares[2]) * BLOCK_N
    begin = tl.minimum(split * share, length)
    return begin, tl.minimum(begin + share, length)


@triton.jit
def last_indices(index_row, begin, end):
    """The last 512 indices of the columns from `begin` to `end`, for `named_end`."""
    column = end - 512 + tl.arange(0, 512)
    return tl.load(index_row + column, mask=column >= begin, other=-1)


@triton.jit
def named_end(index_row, begin, end, last):
    """The place of the last index that is not negative, plus one: `end` without a tail of -1."""
    start = end - 512
    found = tl.max(tl.where(last >= 0, start + 1 + tl.arange(0, 512), begin), 0)
    while (found == begin) & (start > begin):
        start -= 512
        column = start + tl.arange(0, 512)
        index = tl.load(index_row + column, mask=column >= begin, other=-1)
        found = tl.max(tl.where(index >= 0, column + 1, begin), 0)
    return found


@triton.jit
def _query_row(q, token, head, stride_token, stride_head, Q_UNIT: tl.constexpr):
    return q + token * (stride_token * Q_UNIT) + (head.to(tl.int64) * (stride_head * Q_UNIT))[:, None]


@triton.jit
def query_rows(q, q_rope, token, head, strides, Q_UNIT: tl.constexpr):
    """Addresses of each head's query, and of its dims behind the 512th, which `q_rope` has if it is given.

    `strides` are those of tokens and heads in `q`, then in `q_rope`, in units of Q_UNIT.
    """
    stride_token, stride_head, stride_rope_token, stride_rope_head = strides
    latent = _query_row(q, token, head, stride_token, stride_head, Q_UNIT)
    rope = latent + 512
    if q_rope is not None:
        rope = _query_row(q_rope, token, head, stride_rope_token, stride_rope_head, Q_UNIT)
    return latent, rope


@triton.jit
def load_query(q_rows, live_head, OPTIONS: tl.constexpr):
    """Q in four groups of 128 dims and the 64 behind them. Exact walks read it anew for each tile: nothing for them."""
    q_row, rope_row = q_rows
    group = tl.arange(0, 128)[None, :]
    unused = tl.zeros((1,), tl.float32)
    q0, q1, q2, q3, q4 = unused, unused, unused, unused, unused
    if not is_exact(OPTIONS.keys):
        q0 = tl.load(q_row + group, mask=live_head[:, None], other=0.0)
        q1 = tl.load(q_row + (128 + group), mask=live_head[:, None], other=0.0)
        q2 = tl.load(q_row + (256 + group), mask=live_head[:, None], other=0.0)
        q3 = tl.load(q_row + (384 + group), mask=live_head[:, None], other=0.0)
        if OPTIONS.rope:
            q4 = tl.load(rope_row + tl.arange(0, 64)[None, :], mask=live_head[:, None], other=0.0)
    return q0, q1, q2, q3, q4


@triton.jit
def new_state(OPTIONS: tl.constexpr):
    """Four accumulators of 128 dims, the largest score so far in base 2, and sums of weights.

    A head has several sums until the end of its keys, so that none passes between threads in the loop. Warps of small
    tiles lie beside one another along the keys, where every column has a sum; those of 64 heads lie along the heads in
    two groups, where a thread has all columns of a remainder by 8 of its group.
    """
    BLOCK_H: tl.constexpr = OPTIONS.tile.block_h
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    acc = tl.zeros((BLOCK_H, 128), tl.float32)
    running_max = tl.full((BLOCK_H,), 0.0 if OPTIONS.steady else float("-inf"), tl.float32)
    if BLOCK_H < 64:
        sums = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
    else:
        sums = tl.zeros((BLOCK_H, 2, 8), tl.float32)
    return acc, acc, acc, acc, running_max, sums


@triton.jit
def add_weights(sums, alpha, weights):
    """Sums of weights, `[heads, keys]` or `[heads, 2, 8]`, after those of a tile."""
    if len(sums.shape) == 2:
        sums = sums * alpha + weights
    else:
        # the two groups of warps have half of the columns each
        by_group = tl.reshape(weights, (weights.shape[0], 2, weights.shape[1] // 16, 8))
        if alpha is not None:
            sums *= alpha[:, :, None]
        sums += tl.sum(by_group, 2)
    return sums


@triton.jit
def total_weight(sums):
    return tl.sum(tl.sum(sums, 2), 1) if len(sums.shape) == 3 else tl.sum(sums, 1)


@triton.jit
def _scores(query, keys, rows, zero, OPTIONS: tl.constexpr):
    """[heads, keys] in float32. Groups of fp8_ds_mla have their scale outside of the operands.

    `zero` is None, or 0 that the compiler does not know for one: then each product is summed up on its own.
    """
    UPCAST: tl.constexpr = OPTIONS.upcast
    q0, q1, q2, q3, q4 = query
    k0, k1, k2, k3 = keys
    _, rope, scales = rows
    s0, s1, s2, s3 = scales
    zeros = tl.zeros((q0.shape[0], k0.shape[0]), tl.float32)
    if zero is not None:
        zeros += zero
    scores = zeros
    if OPTIONS.rope:
        scores = dot(q4, tl.trans(rope), zeros, UPCAST)
    if OPTIONS.keys.operands == "fp8":
        scores += dot(q0, tl.trans(k0), zeros, UPCAST) * s0[None, :]
        scores += dot(q1, tl.trans(k1), zeros, UPCAST) * s1[None, :]
        scores += dot(q2, tl.trans(k2), zeros, UPCAST) * s2[None, :]
        scores += dot(q3, tl.trans(k3), zeros, UPCAST) * s3[None, :]
    elif zero is not None:
        scores += dot(q0, tl.trans(k0), zeros, UPCAST)
        scores += dot(q1, tl.trans(k1), zeros, UPCAST)
        scores += dot(q2, tl.trans(k2), zeros, UPCAST)
        scores += dot(q3, tl.trans(k3), zeros, UPCAST)
    else:
        scores = dot(q0, tl.trans(k0), scores, UPCAST)
        scores = dot(q1, tl.trans(k1), scores, UPCAST)
        scores = dot(q2, tl.trans(k2), scores, UPCAST)
        scores = dot(q3, tl.trans(k3), scores, UPCAST)
    return scores


@triton.jit
def first_running_max(running_max, largest):
    """`running_max` of a STEADY program, from 0 and the largest scores of its first tile, a head.

    Where these are no numbers it stays 0, else it is another. Weights of the first tile are up to 2^-16, so that others
    may be above by 2^120 before a program walks again (`left_its_range`).
    """
    largest += 16.0
    largest = tl.where(largest == 0.0, 1.0, largest)
    return tl.where(tl.abs(largest) < float("inf"), largest, running_max)


@triton.jit
def are_wild(scores, valid, largest):
    """Whether scores of few keys, a head, foretell others too far above: they lie 64 apart in base 2, or are huge."""
    least = tl.min(tl.where(valid, scores, float("inf")), 1)
    HUGE: tl.constexpr = 2.0**20
    wild = (largest - least > 64.0) | (largest > HUGE)
    return wild | ((largest < -HUGE) & (largest > float("-inf")))


@triton.jit
def still_waits(waits, running_max):
    """Whether a STEADY program has not seen a key yet, after another tile."""
    if waits:
        waits = tl.max((running_max != 0.0).to(tl.int32), 0) == 0
    return waits


@triton.jit
def _weights_about(state, scores, is_first, rescales, OPTIONS: tl.constexpr):
    """Does what `_rescale` does, in a STEADY program: nothing is rescaled, but in tiles of 16 heads if it `rescales`.

    A program of those rescales from its first tile on where scores there are wild.
    """
    acc0, acc1, acc2, acc3, running_max, sums = state
    if is_first:
        largest = tl.max(scores, 1)
        running_max = first_running_max(running_max, largest)
        if OPTIONS.tile.block_h == 16:
            rescales = tl.max(are_wild(scores, scores > float("-inf"), largest).to(tl.int32), 0) > 0
    if rescales:
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        alpha = tl.exp2(running_max - new_max)[:, None]
        acc0, acc1, acc2, acc3 = acc0 * alpha, acc1 * alpha, acc2 * alpha, acc3 * alpha
        sums *= alpha
        running_max = new_max
    weights = tl.exp2(scores - running_max[:, None])
    return (acc0, acc1, acc2, acc3, running_max, sums + weights), weights, rescales


@triton.jit
def _rescale(state, scores):
    """One step of the online softmax: the state rescaled to the new largest score, and the weights of `scores`."""
    acc0, acc1, acc2, acc3, running_max, sums = state
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = tl.exp2(running_max - safe_max)[:, None]
    weights = tl.exp2(scores - safe_max[:, None])
    sums = add_weights(sums, alpha, weights)
    return (acc0 * alpha, acc1 * alpha, acc2 * alpha, acc3 * alpha, new_max, sums), weights


@triton.jit
def _round_weights(weights, keys, rows, OPTIONS: tl.constexpr):
    """Weights as operands: one, or one for each group, as scales of fp8_ds_mla go into them before they are rounded."""
    UPCAST: tl.constexpr = OPTIONS.upcast
    s0, s1, s2, s3 = rows[2]
    if OPTIONS.keys.operands == "fp8":
        p0 = round_to(weights * s0[None, :], tl.bfloat16, UPCAST)
        p1 = round_to(weights * s1[None, :], tl.bfloat16, UPCAST)
        p2 = round_to(weights * s2[None, :], tl.bfloat16, UPCAST)
        p3 = round_to(weights * s3[None, :], tl.bfloat16, UPCAST)
        operands = (p0, p1, p2, p3)
    else:
        operands = (round_to(weights, keys[0].dtype, UPCAST),)
    return operands


@triton.jit
def _mask(scores, column, places, row_end, scale_log2):
    """Scores in base 2, -inf where there is no key, or none that a row sees."""
    seen = places[2][None, :]
    if row_end is not None:
        seen = seen & (column[None, :] < row_end[:, None])
    return tl.where(seen, scores * scale_log2, float("-inf"))


@triton.jit
def _weigh(q, state, keys, rows, seen, zero, is_first, rescales, OPTIONS: tl.constexpr):
    """The state rescaled to a tile's scores, weights as operands, and whether a STEADY program rescales."""
    column, places, scale_log2, row_end = seen
    scores = _mask(_scores(q, keys, rows, zero, OPTIONS), column, places, row_end, scale_log2)
    if OPTIONS.steady:
        rescaled, weights, rescales = _weights_about(state, scores, is_first, rescales, OPTIONS)
    else:
        rescaled, weights = _rescale(state, scores)
    return rescaled, _round_weights(weights, keys, rows, OPTIONS), rescales


@triton.jit
def _attend_operands(q, state, keys, rows, seen, sure, rescales, OPTIONS: tl.constexpr):
    """The state after a tile of keys that are operands, and whether a STEADY program rescales.

    Scores APART stand behind what is `sure`, and each of their products has a sum of its own: where the compiler sees
    that a product goes into another, it gives both groups of warps all of it. STEADY ones, which do not, take for
    `sure` whether no tile before had a key.
    """
    UPCAST: tl.constexpr = OPTIONS.upcast
    if OPTIONS.tile.apart:
        acc0, acc1, acc2, acc3, running_max, sums = state
        # anything that is no constant
        weights = tl.zeros((q[0].shape[0], keys[0].shape[0]), tl.float32) + seen[2]
        p = _round_weights(weights, keys, rows, OPTIONS)
        if sure:
            rescaled, p, _ = _weigh(q, state, keys, rows, seen, seen[2] * 0.0, False, False, OPTIONS)
            acc0, acc1, acc2, acc3, running_max, sums = rescaled
    else:
        rescaled, p, rescales = _weigh(q, state, keys, rows, seen, None, sure, rescales, OPTIONS)
        acc0, acc1, acc2, acc3, running_max, sums = rescaled
    if len(p) == 1:
        p = p + p + p + p
    acc0 = dot(p[0], keys[0], acc0, UPCAST)
    acc1 = dot(p[1], keys[1], acc1, UPCAST)
    acc2 = dot(p[2], keys[2], acc2, UPCAST)
    acc3 = dot(p[3], keys[3], acc3, UPCAST)
    return (acc0, acc1, acc2, acc3, running_max, sums), rescales


@triton.jit
def attend_tile(q, state, rows, places, column, scale_log2, row_end, sure, rescales, OPTIONS: tl.constexpr):
    """The state after one tile of keys, and whether a STEADY program rescales.

    `sure` are two conditions that are true, which the compiler does not know.

    The compiler puts what stands behind a condition last in its loop. So the copies of a tile that is `early` begin
    when the tile before has become operands, not when it has been multiplied.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    k0, k1, k2, k3 = to_operands(rows, KEYS)
    keys = k0, k1, k2, k3
    seen = (column, places, scale_log2, row_end)
    if OPTIONS.tile.early:
        acc0, acc1, acc2, acc3, running_max, sums = state
        if sure[0]:
            new, _ = _attend_operands(q, state, keys, rows, seen, sure[1], False, OPTIONS)
            acc0, acc1, acc2, acc3, running_max, sums = new
        state = (acc0, acc1, acc2, acc3, running_max, sums)
    else:
        state, rescales = _attend_operands(q, state, keys, rows, seen, sure[1], rescales, OPTIONS)
    return state, rescales


@triton.jit
def attend_keys(query, state, cache, index_row, span, scale_log2, row_end, OPTIONS: tl.constexpr):
    """Online softmax over the keys that columns `span` of `index_row` name, in tiles; returns the state after it.

    No `index_row`: over the keys in `span` themselves, of which a tile lies in one block if they are `whole`. Rows of
    the tile see all keys, or, where there is a `row_end`, those at positions below their own.

    A tile of keys is read once, in four groups of 128 dims and the RoPE dims behind 512, and each group serves both
    QK and PV. Groups are also what shares a scale in fp8_ds_mla. The e4m3 values are exact as bfloat16, so the scale
    stays outside of the operands: it multiplies the group's partial scores, and goes into the float32 weights before
    they are rounded. Hence any positive float32 scale is right.

    Rows are copied to shared memory `ahead` tiles ahead. Their indices are loaded a turn before the copies begin,
    and table entries have stages of the compiler's pipeline of their own, so that no copy waits for its addresses.

    `query` is `(query_rows(...), live_head, load_query(...))`.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    TILE: tl.constexpr = OPTIONS.tile
    begin, end = span
    q_rows, live_head, q = query
    RESCALES: tl.constexpr = OPTIONS.steady and TILE.block_h == 16
    n = tl.arange(0, TILE.block_n)
    # true, which is not known when this is compiled
    sure = (begin >= 0, end >= begin)
    waits = tl.max((state[4] != 0.0).to(tl.int32), 0) == 0 if OPTIONS.steady else False
    if is_exact(KEYS):
        state = _attend_exactly(q_rows, live_head, state, cache, index_row, span, scale_log2, row_end, OPTIONS)
    elif OPTIONS.whole:
        entry = look_up_block(cache, begin, end)
        for start in tl.range(begin, end, TILE.block_n, num_stages=TILE.ahead + 1):
            places = locate_in_block(cache, entry, start, end, OPTIONS)
            rows = load_rows(cache, places, TILE.early, OPTIONS)
            entry = look_up_block(cache, start + TILE.block_n, end)
            state, _ = attend_tile(q, state, rows, places, start + n, scale_log2, row_end, sure, False, OPTIONS)
    else:
        STAGES: tl.constexpr = TILE.ahead * (2 if KEYS.translated else 1) + 1
        index = fetch_indices(index_row, begin + n, end)
        rescales = begin < 0 if RESCALES else False
        for start in tl.range(begin, end, TILE.block_n, num_stages=STAGES):
            places = locate(cache, index, KEYS)
            rows = load_rows(cache, places, False, OPTIONS)
            index = fetch_indices(index_row, start + TILE.block_n + n, end)
            if OPTIONS.steady:
                sure = (begin >= 0, waits)
            if RESCALES:
                state, rescales = attend_tile(
                    q, state, rows, places, start + n, scale_log2, row_end, sure, rescales, OPTIONS
                )
            else:
                state, _ = attend_tile(q, state, rows, places, start + n, scale_log2, row_end, sure, False, OPTIONS)
            if OPTIONS.steady:
                waits = still_waits(waits, state[4])
    return state


@triton.jit
def _attend_exactly(q_rows, live_head, state, cache, index_row, span, scale_log2, row_end, OPTIONS: tl.constexpr):
    """`attend_keys` in float32, without tensor cores, in narrow pieces: a thread holds whole rows of both operands."""
    begin, end = span
    q_row, rope_row = q_rows
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    KEYS: tl.constexpr = OPTIONS.keys
    UPCAST: tl.constexpr = OPTIONS.upcast
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        column = start + tl.arange(0, BLOCK_N)
        places = locate(cache, fetch_indices(index_row, column, end), KEYS)
        scores = tl.zeros((live_head.shape[0], BLOCK_N), tl.float32)
        for piece in tl.static_range(0, 512, 32):
            queries = tl.load(q_row + (piece + tl.arange(0, 32))[None, :], mask=live_head[:, None], other=0.0)
            scores = dot(widen(queries), tl.trans(load_exactly(cache, places, piece, 32, KEYS)), scores, UPCAST)
        if OPTIONS.rope:
            queries = tl.load(rope_row + tl.arange(0, 64)[None, :], mask=live_head[:, None], other=0.0)
            scores = dot(widen(queries), tl.trans(load_rope_exactly(cache, places, KEYS)), scores, UPCAST)
        state, weights = _rescale(state, _mask(scores, column, places, row_end, scale_log2))
        acc0, acc1, acc2, acc3, running_max, sums = state
        acc0 = dot(weights, load_exactly(cache, places, 0, 128, KEYS), acc0, UPCAST)
        acc1 = dot(weights, load_exactly(cache, places, 128, 128, KEYS), acc1, UPCAST)
        acc2 = dot(weights, load_exactly(cache, places, 256, 128, KEYS), acc2, UPCAST)
        acc3 = dot(weights, load_exactly(cache, places, 384, 128, KEYS), acc3, UPCAST)
        state = (acc0, acc1, acc2, acc3, running_max, sums)
    return state


@triton.jit
def store_result(state, place, results, OPTIONS: tl.constexpr, scale=1.0, units=None, unit=1.0):
    """The output and lse of a token's heads: of all its keys with the sink, or, of one split's, a part, in base 2.

    `place` is `(token, head, live_head, split)`; `results` the sink, the output, its strides of splits, tokens and
    heads, the lse, and its strides of splits and tokens. What is stored is `scale` times the accumulators' average. The
    `unit` of a part of 16 bits goes `units` behind its lse.
    """
    token, head, live_head, split = place
    attn_sink, out, out_strides, lse, lse_strides = results
    total, log2_sum, factor = finish(state)
    stride_split, stride_token, stride_head = out_strides
    lse_place = lse + split * lse_strides[0] + token * lse_strides[1] + head
    if OPTIONS.partial:
        tl.store(lse_place, log2_sum, mask=live_head)
        if units is not None:
            tl.store(lse_place + units, unit, mask=live_head)
    else:
        if attn_sink is not None:
            sink = tl.load(attn_sink + head, mask=live_head, other=0.0) * 1.4426950408889634
            factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp2(sink - log2_sum)))
        tl.store(lse_place, log2_sum * 0.6931471805599453, mask=live_head)
    out_row = out + split * stride_split + token * stride_token + (head.to(tl.int64) * stride_head)[:, None]
    stored = live_head[:, None]
    if OPTIONS.partial:
        # the merge does not read a split without keys
        stored &= (total != 0)[:, None]
    store_groups(state, factor * scale, out_row, stored, OPTIONS.upcast)


@triton.jit
def store_part_by_units(state, place, results, units, OPTIONS: tl.constexpr):
    """A split's result in float16, where `store_result` stores it, with a unit for each head and group of 128 dims.

    Units are powers of two. The largest finite value of a group is 2^14 to 2^15 of them, so float16 holds each value to
    2^-11 of it or to 2^-39 of the largest. Units of the first group go `units` behind the lse, negative, for the merge
    to know that there are four; the next group's `units` further.
    """
    token, head, live_head, split = place
    _attn_sink, out, out_strides, lse, lse_strides = results
    total, log2_sum, factor = finish(state)
    lse_place = lse + split * lse_strides[0] + token * lse_strides[1] + head
    tl.store(lse_place, log2_sum, mask=live_head)
    out_row = out + split * out_strides[0] + token * out_strides[1] + (head.to(tl.int64) * out_strides[2])[:, None]
    stored = live_head[:, None] & (total != 0)[:, None]
    tl.static_assert(len(state) == 6)
    for i in tl.static_range(4):
        values = tl.abs(state[i] * factor[:, None])
        largest = tl.max(tl.where(values < float("inf"), values, 0.0), 1)
        exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 14, 1)
        unit = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(lse_place + (i + 1) * units, -unit if i == 0 else unit, mask=live_head)
        values = round_to(state[i] * (factor * inverse)[:, None], tl.float16, OPTIONS.upcast)
        tl.store(out_row + (i * 128 + tl.arange(0, 128)[None, :]), values, mask=stored)


@triton.jit
def finish(state):
    """Each row's sum of weights, lse in base 2, and the factor of its accumulators."""
    running_max, sums = state[len(state) - 2], state[len(state) - 1]
    total = total_weight(sums)
    # base 2 until the very end; a row whose scores overflowed has lse +inf, as in the reference
    safe = tl.where(total == 0, 1.0, total)
    log2_sum = tl.where(running_max == float("inf"), float("inf"), running_max + tl.log2(safe))
    log2_sum = tl.where(total == 0, float("-inf"), log2_sum)
    factor = tl.where(total == 0, 0.0, 1.0 / safe)
    return total, log2_sum, factor


@triton.jit
def store_groups(state, factor, out_row, stored, UPCAST: tl.constexpr):
    """The accumulators times `factor`, where `stored`."""
    element: tl.constexpr = out_row.dtype.element_ty
    WIDTH: tl.constexpr = 512 // (len(state) - 2)
    group = tl.arange(0, WIDTH)[None, :]
    for i in tl.static_range(len(state) - 2):
        tl.store(out_row + (i * WIDTH + group), round_to(state[i] * factor[:, None], element, UPCAST), mask=stored)


@triton.jit
def sample_indices(index_row, begin, end, OPTIONS: tl.constexpr):
    """For `without_copies`: 32 indices all over a span, or, of more than 16 heads, the first 2,048 and the first."""
    if OPTIONS.tile.block_h == 16:
        column = begin + tl.arange(0, 32) * ((end - begin) // 32)
        one = end
    else:
        column = begin + tl.arange(0, 2048)
        one = tl.load(index_row + begin, mask=begin < end, other=-1)
    return tl.load(index_row + column, mask=column < end, other=-1), one


@triton.jit
def without_copies(index_row, begin, end, sample, OPTIONS: tl.constexpr):
    """Where a walk over a span may end, and what its lse is then short of, in base 2.

    Behind a tile, if all indices of the span are one: else all SMs would wait for the same lines of L2. As rows are
    that are there to fill a batch.
    """
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    seen, one = sample
    if OPTIONS.tile.block_h == 16:
        alike = (tl.max(seen, 0) == tl.min(seen, 0)) & (end - begin > BLOCK_N)
        if alike:
            index = tl.max(seen, 0)
            start = begin
            while alike & (start < end):
                column = start + tl.arange(0, 512)
                other = tl.load(index_row + column, mask=column < end, other=index) != index
                alike = tl.max(other.to(tl.int32), 0) == 0
                start += 512
    else:
        # behind a loop that such a result ends, wgmma has no uniform registers
        other = (seen != one) & (tl.arange(0, 2048) < end - begin)
        alike = (tl.max(other.to(tl.int32), 0) == 0) & (end - begin > BLOCK_N) & (end - begin <= 2048)
    missing = tl.where(alike, tl.log2((end - begin).to(tl.float32) / BLOCK_N), 0.0)
    return tl.where(alike, begin + BLOCK_N, end), missing
