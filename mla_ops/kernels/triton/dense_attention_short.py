"""Prefill of requests that have few queries: several heads in one tile."""

import triton
import triton.language as tl

from .common import sized_jit
from .dense_attention_device import add_keys, load_queries, new_rows, scores_of, store_rows


@triton.jit
def _request_span(cu_seqlens, request, size):
    """The first row of a request, int64, and its length, within a tensor of `size` rows."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + request), 0), size)
    end = tl.load(cu_seqlens + request + 1).to(tl.int64)
    # clamped before it is narrowed: an end of INT_MIN would wrap into a length near INT_MAX
    return begin, tl.maximum(tl.minimum(end, size) - begin, 0).to(tl.int32)


@sized_jit(any_alignment=("cu_seqlens_q", "cu_seqlens_k", "lse"))
def _short_prefill_kernel(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    out,
    lse,
    scale_log2: tl.float32,
    num_tokens: tl.int64,
    num_kv: tl.int64,
    heads_per_kv_head: tl.int32,
    num_heads: tl.int32,
    num_shares: tl.int32,
    strides: (tl.int64,) * 9,
    OPTIONS: tl.constexpr,
):
    """The queries of a request that has fewer than `shortest`: softmax over its keys, in tiles of 16 rows.

    Grid: (requests * shares,). A share is every `num_shares`-th tile of the request. A tile has 16 queries of one head
    or, of fewer queries and keys, of 2, 4, 8 or 16 heads, where a row sees the columns of its head only: others have
    the weight 0, so that a value which is not finite reaches all heads of its tile. Which tile a row is in depends on
    its request alone.

    Registers: accumulators 16 x `block_v` and scores 16 x `block_n`, float32. Shared memory: Q, and a tile of K and V.
    """
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head = strides[:6]
    stride_out_token, stride_out_head, stride_lse_token = strides[6:]
    request = tl.program_id(0) // num_shares
    begin_q, len_q = _request_span(cu_seqlens_q, request, num_tokens)
    if (len_q > 0) & (len_q < OPTIONS.shortest):
        begin_k, len_k = _request_span(cu_seqlens_k, request, num_kv)
        # a head has 2 ** log_width rows, and BLOCK_N / 16 times as many columns
        widest = tl.maximum(len_q, tl.cdiv(len_k, BLOCK_N // 16))
        log_width = (widest > 1).to(tl.int32) + (widest > 2).to(tl.int32)
        log_width += (widest > 4).to(tl.int32) + (widest > 8).to(tl.int32)
        heads_together = 16 >> log_width
        keys_together = (BLOCK_N // 16) << log_width
        row = tl.arange(0, 16)
        row_head, row_query = row >> log_width, row & ((1 << log_width) - 1)
        column = tl.arange(0, BLOCK_N)
        column_head, column_key = (column // (BLOCK_N // 16)) >> log_width, column & (keys_together - 1)
        own_head = row_head[:, None] == column_head[None, :]
        slices = tl.cdiv(len_q, 16)  # more than one have one head each
        tiles = slices * tl.cdiv(num_heads, heads_together)
        for tile in range(tl.program_id(0) % num_shares, tiles, num_shares):
            first_query = tile % slices * 16
            head = tile // slices * heads_together + row_head
            query = first_query + row_query
            live = (query < len_q) & (head < num_heads)
            token, head_place = begin_q + query, head.to(tl.int64)
            q_row = q + token * (stride_q_token * OPTIONS.q_unit) + head_place * (stride_q_head * OPTIONS.q_unit)
            queries = load_queries(q_row, live, OPTIONS)
            key_head = tile // slices * heads_together + column_head
            kv_head = (key_head // heads_per_kv_head).to(tl.int64)
            first_key = begin_k + column_key
            k_start = k + first_key * (stride_k_token * OPTIONS.k_unit) + kv_head * (stride_k_head * OPTIONS.k_unit)
            v_start = v + first_key * (stride_v_token * OPTIONS.v_unit) + kv_head * (stride_v_head * OPTIONS.v_unit)
            # the last query sees the last key
            last_key = query + (len_k - len_q)
            end = len_k
            if OPTIONS.causal:
                end = tl.maximum(tl.minimum(len_k, first_query + 16 + len_k - len_q), 0)
            state = new_rows(OPTIONS)
            for start in tl.range(0, end, keys_together):
                key = start + column_key
                within = (key < end) & (key_head < num_heads)
                k_row = k_start + start * (stride_k_token * OPTIONS.k_unit)
                scores = scores_of(queries, k_row, within, True, OPTIONS)
                visible = key[None, :] <= last_key[:, None] if OPTIONS.causal else within[None, :]
                scores = tl.where(own_head & visible, scores, float("-inf"))
                v_row = v_start + start * (stride_v_token * OPTIONS.v_unit)
                state = add_keys(state, scores, v_row, within, scale_log2, True, OPTIONS)
            out_row = (
                out + token * (stride_out_token * OPTIONS.out_unit) + head_place * (stride_out_head * OPTIONS.out_unit)
            )
            store_rows(state, scale_log2, out_row, lse + token * stride_lse_token + head, live, OPTIONS)
