"""The sparse attention kernel for two caches, whose keys share one softmax."""

import triton
import triton.language as tl

from .attention_options import of_extra_cache, of_second_walk
from .common import Pages, sized_jit
from .sparse_attention_again import left_its_range
from .sparse_attention_device import (
    attend_keys,
    attend_tile,
    last_indices,
    load_query,
    named_end,
    new_state,
    query_rows,
    sample_indices,
    still_waits,
    store_result,
)
from .sparse_attention_keys import divider, fetch_indices, load_rows, locate

SMALL_INTEGERS = ("indices", "topk_length", "block_table", "req_id_per_token")
SMALL_INTEGERS += ("extra_indices", "extra_topk_length", "extra_block_table")


@triton.jit
def _with_divider(cache):
    kv, table, known, num_blocks, block_size, max_blocks, stride_block = cache
    return kv, table, known, num_blocks, block_size, divider(block_size), max_blocks, stride_block


@triton.jit
def _choose(first, one, other):
    """The fields of one of two tuples."""
    result = ()
    for i in tl.static_range(len(one)):
        result += (tl.where(first, one[i], other[i]),)
    return result


@triton.jit
def _attend_both(query, state, caches, index_rows, spans, scale_log2, OPTIONS: tl.constexpr):
    """`attend_keys` over two caches of the same kind in one loop: the tiles of the first, then those of the second."""
    KEYS: tl.constexpr = OPTIONS.keys
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    STAGES: tl.constexpr = OPTIONS.tile.ahead * (2 if KEYS.translated else 1) + 1
    cache, extra_cache = caches
    index_row, extra_index_row = index_rows
    begin, end = spans[0]
    extra_begin, extra_end = spans[1]
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    extra_tiles = tl.cdiv(tl.maximum(extra_end - extra_begin, 0), BLOCK_N)
    # columns of the second cache's tiles go on where those of the first end
    shift = extra_begin - tiles * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    main = tiles > 0
    waits = main | (extra_tiles > 0)
    column = tl.where(main, begin, shift) + n
    index = fetch_indices(tl.where(main, index_row, extra_index_row), column, tl.where(main, end, extra_end))
    for turn in tl.range(0, tiles + extra_tiles, num_stages=STAGES):
        chosen = _choose(turn < tiles, cache, extra_cache)
        places = locate(chosen, index, KEYS)
        rows = load_rows(chosen, places, OPTIONS.tile.early, OPTIONS)
        main = turn + 1 < tiles
        column = tl.where(main, begin, shift) + (turn + 1) * BLOCK_N + n
        index = fetch_indices(tl.where(main, index_row, extra_index_row), column, tl.where(main, end, extra_end))
        sure = (begin >= 0, waits if OPTIONS.steady else turn >= 0)
        state, _ = attend_tile(query[2], state, rows, places, n, scale_log2, None, sure, False, OPTIONS)
        if OPTIONS.steady:
            waits = still_waits(waits, state[4])
    return state


@triton.jit
def _are_one(sample, length):
    """Whether `length` indices are one."""
    seen, one = sample
    other = (seen != one) & (tl.arange(0, 2048) < length)
    return (tl.max(other.to(tl.int32), 0) == 0) & (length <= 2048)


@triton.jit
def _copies(sample, length, extra_sample, extra_length):
    """Of spans that are one index each, as `without_copies` has it: which power of two divides both; 1 of others."""
    alike = _are_one(sample, length) & _are_one(extra_sample, extra_length)
    both = tl.maximum(length, 0) | tl.maximum(extra_length, 0)
    return tl.where(alike & (both > 0), both & -both, 1)


@triton.jit
def _counted(state, copies):
    """The state after so many times its keys."""
    acc0, acc1, acc2, acc3, running_max, sums = state
    return acc0, acc1, acc2, acc3, running_max + tl.log2(copies.to(tl.float32)), sums


@sized_jit(any_alignment=(*SMALL_INTEGERS, "attn_sink", "lse"))
def _attend_extra_kernel(
    q,
    kv,
    indices,
    topk_length,
    block_table,
    extra_kv,
    extra_indices,
    extra_topk_length,
    extra_block_table,
    req_id_per_token,
    attn_sink,
    out,
    lse,
    scale_log2: tl.float32,
    num_heads: tl.int32,
    shares: (tl.int32,) * 3,
    topk: tl.int32,
    pages: Pages,
    extra_topk: tl.int32,
    extra_pages: Pages,
    strides: (tl.int64,) * 13,
    OPTIONS: tl.constexpr,
):
    """One token, a tile of heads, one split of the token's keys: the main cache's, then the extra one's.

    Grid: (tokens * head blocks, splits), as in `_attend_kernel`, and the same state, registers and shared memory. Page
    sizes are each cache's own. In tiles of 32 and 64 heads the caches are of one kind and share a loop: two loops would
    spill. The splits share the tiles of both in a row, so that most programs walk over one cache only. The operands of
    both are exact or those of neither.
    """
    BLOCK_H: tl.constexpr = OPTIONS.tile.block_h
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    OUT_UNIT: tl.constexpr = OPTIONS.out_unit
    num_blocks, block_size, num_requests, max_blocks = pages
    extra_num_blocks, extra_block_size, extra_num_requests, extra_max_blocks = extra_pages
    stride_q_token, stride_q_head, stride_block, stride_indices, stride_table = strides[:5]
    stride_extra_block, stride_extra_indices, stride_extra_table = strides[5:8]
    stride_out_split, stride_out_token, stride_out_head, stride_lse_split, stride_lse_token = strides[8:]
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    live_head = head < num_heads
    index_row = indices + token * stride_indices
    extra_index_row = extra_indices + token * stride_extra_indices

    length = topk
    if topk_length is not None:
        length = tl.minimum(tl.maximum(tl.load(topk_length + token), 0), topk)
    extra_length = extra_topk
    if extra_topk_length is not None:
        extra_length = tl.minimum(tl.maximum(tl.load(extra_topk_length + token), 0), extra_topk)
    tiles = tl.cdiv(length, BLOCK_N)
    share = tl.cdiv((tiles + tl.cdiv(extra_length, BLOCK_N)) * shares[1], shares[2])
    begin = tl.minimum(split * share * BLOCK_N, length)
    end = tl.minimum((split + 1) * share * BLOCK_N, length)
    extra_begin = tl.minimum(tl.maximum(split * share - tiles, 0) * BLOCK_N, extra_length)
    extra_end = tl.minimum(tl.maximum((split + 1) * share - tiles, 0) * BLOCK_N, extra_length)
    if OPTIONS.copies:
        sample = sample_indices(index_row, begin, end, OPTIONS)
        extra_sample = sample_indices(extra_index_row, extra_begin, extra_end, OPTIONS)
    if topk_length is None:
        last = last_indices(index_row, begin, end)
    if extra_topk_length is None:
        extra_last = last_indices(extra_index_row, extra_begin, extra_end)
        extra_end = named_end(extra_index_row, extra_begin, extra_end, extra_last)
    if topk_length is None:
        end = named_end(index_row, begin, end, last)
    copies = 1
    if OPTIONS.copies:
        copies = _copies(sample, end - begin, extra_sample, extra_end - extra_begin)
        # by way of memory: bounds by a reduction leave wgmma no uniform registers
        cell = out + split * (stride_out_split * OUT_UNIT) + token * (stride_out_token * OUT_UNIT)
        cell += (tl.program_id(0) % head_blocks * BLOCK_H) * (stride_out_head * OUT_UNIT)
        cell = cell.to(tl.pointer_type(tl.int16))
        tl.store(cell, copies.to(tl.int16))
        tl.debug_barrier()
        copies = tl.load(cell).to(tl.int32)
        end = begin + tl.maximum(end - begin, 0) // copies
        extra_end = extra_begin + tl.maximum(extra_end - extra_begin, 0) // copies

    table = indices
    known = True
    if block_table is not None:
        request = tl.load(req_id_per_token + token)
        known = (request >= 0) & (request < num_requests)
        table = block_table + request.to(tl.int64) * stride_table
    extra_table = extra_indices
    extra_known = True
    if extra_block_table is not None:
        extra_request = tl.load(req_id_per_token + token)
        extra_known = (extra_request >= 0) & (extra_request < extra_num_requests)
        extra_table = extra_block_table + extra_request.to(tl.int64) * stride_extra_table

    q_rows = query_rows(q, None, token, head, (stride_q_token, stride_q_head, 0, 0), OPTIONS.q_unit)
    query = (q_rows, live_head, load_query(q_rows, live_head, OPTIONS))
    state = new_state(OPTIONS)
    cache = (kv, table, known, num_blocks, block_size, divider(block_size), max_blocks, stride_block)
    span, extra_span = (begin, end), (extra_begin, extra_end)
    extra = (
        extra_kv,
        extra_table,
        extra_known,
        extra_num_blocks,
        extra_block_size,
        extra_max_blocks,
        stride_extra_block,
    )
    if BLOCK_H >= 32:
        caches, index_rows = (cache, _with_divider(extra)), (index_row, extra_index_row)
        state = _attend_both(query, state, caches, index_rows, (span, extra_span), scale_log2, OPTIONS)
    else:
        EXTRA: tl.constexpr = of_extra_cache(OPTIONS)
        state = attend_keys(query, state, cache, index_row, span, scale_log2, None, OPTIONS)
        state = attend_keys(
            query, state, _with_divider(extra), extra_index_row, extra_span, scale_log2, None, EXTRA
        )  # fmt: skip
    out_strides = (stride_out_split * OUT_UNIT, stride_out_token * OUT_UNIT, stride_out_head * OUT_UNIT)
    results = (attn_sink, out, out_strides, lse, (stride_lse_split, stride_lse_token))
    place = (token, head, live_head, split)
    if OPTIONS.steady:
        broken = left_its_range(state)
        if broken > 0:
            AGAIN: tl.constexpr = of_second_walk(OPTIONS)
            # as in `store_walk`
            token += broken - 1
            q_rows = query_rows(q, None, token, head, (stride_q_token, stride_q_head, 0, 0), OPTIONS.q_unit)
            query = (q_rows, live_head, load_query(q_rows, live_head, AGAIN))
            caches, index_rows = (cache, _with_divider(extra)), (index_row, extra_index_row)
            spans = span, extra_span
            exact = _attend_both(query, new_state(AGAIN), caches, index_rows, spans, scale_log2, AGAIN)
            store_result(exact, place, results, OPTIONS)
        else:
            store_result(state, place, results, OPTIONS)
    else:
        if OPTIONS.copies:
            state = _counted(state, copies)
        store_result(state, place, results, OPTIONS)
