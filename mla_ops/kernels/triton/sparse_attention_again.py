"""Walks that may be wrong: which are, and a second one, right for any keys, over all of theirs. Rare."""

import triton
import triton.language as tl

from .attention_options import of_second_walk
from .sparse_attention_device import (
    attend_keys,
    load_query,
    new_state,
    query_rows,
    store_part_by_units,
    store_result,
    total_weight,
)
from .sparse_attention_keys import HALF_WEIGHT, is_half


@triton.jit
def left_its_range(state):
    """1 if a STEADY program may have lost something in a head, else 0.

    Sums of weights are at least 2^-16, unless scores of the first tile with keys are no numbers. Above 2^110 weights
    soon overflow, below 2^-60 some are 0 that count; large values may overflow earlier. A program that has seen no key
    is right.
    """
    top = state[len(state) - 2]
    total = total_weight(state[len(state) - 1])
    right = (total > 2.0**-60) & (total < 2.0**110)
    # 0, or no number where an accumulator is none
    nothing = state[0] * 0.0
    for i in tl.static_range(1, len(state) - 2):
        nothing += state[i] * 0.0
    right &= tl.sum(nothing, 1) == 0.0
    right |= tl.max((top != 0.0).to(tl.int32) | (total != 0.0).to(tl.int32), 0) == 0
    return tl.max((~right).to(tl.int32), 0)


@triton.jit
def store_walk(state, queries, place, cache, index_row, span, scale_log2, results, num_splits, OPTIONS: tl.constexpr):
    """Stores a walk's result, of a second one where the first may be wrong.

    Over float16 keys a sum of weights is NaN then, by scales that float16 does not hold. STEADY programs left the range
    of weights. `queries` are the first two arguments of `query_rows`, and strides.
    """
    token, head, live_head, _ = place
    q, q_rope, query_strides = queries
    HALF: tl.constexpr = is_half(OPTIONS.keys)
    units = num_splits * results[4][0]
    if HALF or OPTIONS.steady:
        if HALF:
            total = total_weight(state[2])
            broken = tl.max((total != total).to(tl.int32), 0)
        else:
            broken = left_its_range(state)
        if broken > 0:
            AGAIN: tl.constexpr = of_second_walk(OPTIONS)
            # 1, which the compiler does not know: addresses kept since the first walk would spill
            q_rows = query_rows(q, q_rope, token + (broken - 1), head, query_strides, OPTIONS.q_unit)
            query = (q_rows, live_head, load_query(q_rows, live_head, AGAIN))
            exact = attend_keys(query, new_state(AGAIN), cache, index_row, span, scale_log2, None, AGAIN)
            if HALF and OPTIONS.partial:
                store_part_by_units(exact, place, results, units, OPTIONS)
            else:
                store_result(exact, place, results, OPTIONS)
        elif HALF:
            acc, top, sums, unit = state
            halves = (acc, top, sums * (1.0 / HALF_WEIGHT))
            # averages of keys, which are float16 in a unit, are too
            scale = 1.0 / HALF_WEIGHT if OPTIONS.partial else (1.0 / HALF_WEIGHT) / unit
            store_result(halves, place, results, OPTIONS, scale, units, 1.0 / unit)
        else:
            store_result(state, place, results, OPTIONS)
    else:
        store_result(state, place, results, OPTIONS)
