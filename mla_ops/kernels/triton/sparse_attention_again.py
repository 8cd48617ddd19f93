"""Walks that may be wrong: which are, and a second one, right for any keys, over all of theirs."""

import triton
import triton.language as tl

from .attention_options import of_second_walk, walks_alike
from .sparse_attention_device import (
    attend_keys,
    load_query,
    new_state,
    query_rows,
    store_part_by_units,
    store_result,
    total_weight,
)
from .sparse_attention_keys import HALF_WEIGHT, fetch_indices, is_half
from .sparse_attention_wide import attend_whole, load_query_whole


@triton.jit
def left_its_range(state):
    """1 if a STEADY program may have lost something in a head, else 0.

    Sums of weights are at least 2^-16, unless scores of the first tile with keys are no numbers. Above 2^110 weights
    soon overflow, below 2^-60 some are 0 that count; large values may overflow earlier. A program that has seen no key
    is right.
    """
    running_max = state[len(state) - 2]
    total = total_weight(state[len(state) - 1])
    right = (total > 2.0**-60) & (total < 2.0**110)
    # 0, or no number where an accumulator is none
    nothing = state[0] * 0.0
    for i in tl.static_range(1, len(state) - 2):
        nothing += state[i] * 0.0
    right &= tl.sum(nothing, 1) == 0.0
    right |= tl.max((running_max != 0.0).to(tl.int32) | (total != 0.0).to(tl.int32), 0) == 0
    return tl.max((~right).to(tl.int32), 0)


@triton.jit
def _walk_again(queries, place, cache, index_row, span, scale_log2, nought, OPTIONS: tl.constexpr):
    """The state after a second walk. `nought` is 0, which the compiler does not know: what is kept would spill else."""
    AGAIN: tl.constexpr = of_second_walk(OPTIONS)
    q, q_rope, query_strides, num_heads = queries
    token, head, live_head, _ = place
    if OPTIONS.tile.block_h == 64:
        head += nought
        live_head = head < num_heads
        span = (span[0] + nought, span[1] + nought)
        if index_row is not None:
            index_row += nought
    q_rows = query_rows(q, q_rope, token + nought, head, query_strides, OPTIONS.q_unit)
    if walks_alike(OPTIONS):
        begin, end = span
        first = fetch_indices(index_row, begin + tl.arange(0, AGAIN.tile.block_n), end)
        query = load_query_whole(q_rows, live_head, AGAIN)
        span = (begin, begin, end)
        state = attend_whole(query, None, live_head, cache, index_row, span, first, None, scale_log2, AGAIN)
    else:
        query = (q_rows, live_head, load_query(q_rows, live_head, AGAIN))
        state = attend_keys(query, new_state(AGAIN), cache, index_row, span, scale_log2, None, AGAIN)
    return state


@triton.jit
def _with_copies(state, short_of, TOP: tl.constexpr):
    """The state whose largest scores are `short_of` larger, so that its lse is."""
    result = ()
    for i in tl.static_range(len(state)):
        if i == TOP and short_of is not None:
            result += (state[i] + short_of,)
        else:
            result += (state[i],)
    return result


@triton.jit
def store_walk(
    state, queries, place, cache, index_row, span, short_of, scale_log2, results, num_splits, OPTIONS: tl.constexpr
):
    """Stores a walk's result, of a second one where the first may be wrong. lses are `short_of` so much, in base 2.

    Over float16 keys a sum of weights is NaN then, by scales that float16 does not hold. STEADY programs left the range
    of weights. `queries` are the first two arguments of `query_rows`, strides, and the number of heads.
    """
    HALF: tl.constexpr = is_half(OPTIONS.keys)
    if walks_alike(OPTIONS):
        broken = left_its_range(state)
        if broken > 0:
            state = _walk_again(queries, place, cache, index_row, span, scale_log2, broken - 1, OPTIONS)
        store_result(_with_copies(state, short_of, 1), place, results, OPTIONS)
    elif HALF or OPTIONS.steady:
        units = num_splits * results[4][0]
        if HALF:
            total = total_weight(state[2])
            broken = tl.max((total != total).to(tl.int32), 0)
        else:
            broken = left_its_range(state)
        if broken > 0:
            exact = _walk_again(queries, place, cache, index_row, span, scale_log2, broken - 1, OPTIONS)
            exact = _with_copies(exact, short_of, 4)
            if HALF and OPTIONS.partial:
                store_part_by_units(exact, place, results, units, OPTIONS)
            else:
                store_result(exact, place, results, OPTIONS)
        elif HALF:
            acc, running_max, sums, unit = state
            halves = _with_copies((acc, running_max, sums * (1.0 / HALF_WEIGHT)), short_of, 1)
            # averages of keys, which are float16 in a unit, are too
            scale = 1.0 / HALF_WEIGHT if OPTIONS.partial else (1.0 / HALF_WEIGHT) / unit
            store_result(halves, place, results, OPTIONS, scale, units, 1.0 / unit)
        else:
            store_result(_with_copies(state, short_of, len(state) - 2), place, results, OPTIONS)
    else:
        store_result(_with_copies(state, short_of, len(state) - 2), place, results, OPTIONS)
