"""A row of dense decode: by `sparse_attention_wide`, where tiles lie in one block each, or by groups."""

import triton
import triton.language as tl

from .sparse_attention_again import store_walk
from .sparse_attention_device import attend_keys, load_query, new_state, query_rows, store_result
from .sparse_attention_keys import look_up_block
from .sparse_attention_wide import attend_whole, is_whole, load_query_whole


@triton.constexpr_function
def reads_operands(options):
    """Whether keys are read by `attend_whole`."""
    return options.whole and is_whole(options)


@triton.jit
def attend_row_by_groups(queries, place, cache, span, scale_log2, results, OPTIONS: tl.constexpr):
    """Groups of 128 dims, by `attend_keys`. `queries` are the first two arguments of `query_rows`, and strides."""
    token, head, live_head, _ = place
    q_rows = query_rows(queries[0], queries[1], token, head, queries[2], OPTIONS.q_unit)
    query = (q_rows, live_head, load_query(q_rows, live_head, OPTIONS))
    state = attend_keys(query, new_state(OPTIONS), cache, None, span, scale_log2, None, OPTIONS)
    store_result(state, place, results, OPTIONS)


@triton.jit
def attend_row(queries, place, cache, span, scale_log2, results, num_splits, OPTIONS: tl.constexpr):
    """`attend_whole` as `_attend_kernel` calls it."""
    token, head, live_head, split = place
    begin, end = span
    _, out, out_strides, _, _ = results
    q, q_rope, query_strides, _ = queries
    whole = load_query_whole(query_rows(q, q_rope, token, head, query_strides, OPTIONS.q_unit), live_head, OPTIONS)
    # 0, which the compiler does not know: addresses kept until there is a result would spill
    zero = (begin < 0).to(tl.int32)
    scratch = out + (split + zero) * out_strides[0] + token * out_strides[1]
    scratch += ((head + zero).to(tl.int64) * out_strides[2])[:, None]
    scratch = scratch.to(tl.pointer_type(tl.float16))
    first = look_up_block(cache, begin, end)
    every = (begin, begin, end)
    state = attend_whole(whole, scratch, live_head, cache, None, every, first, None, scale_log2, OPTIONS)
    store_walk(state, queries, place, cache, None, span, None, scale_log2, results, num_splits, OPTIONS)
