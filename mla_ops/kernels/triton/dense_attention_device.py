"""Dense attention on the device: varlen attention over flat keys, and over the whole of a paged cache's requests."""

import triton
import triton.language as tl

from .bfloat16 import widen
from .common import Pages, sized_jit
from .dense_attention_row import attend_row, attend_row_by_groups, reads_operands
from .sparse_attention_device import (
    attend_keys,
    dot,
    load_query,
    new_state,
    query_rows,
    round_to,
    store_result,
)
from .sparse_attention_keys import divider

LOWEST = tl.constexpr(-3.4028234663852886e38)  # where the largest score begins: finite, as in a row without keys


@triton.jit
def _first_tile(start, request, BLOCK_M: tl.constexpr, SHORTEST: tl.constexpr):
    """The first tile of a request: with room for a part-filled one of each that has SHORTEST queries or more."""
    return start // BLOCK_M + tl.minimum(request, start // SHORTEST)


@triton.jit
def _find_request(
    cu_seqlens, tile, num_requests, search_steps, num_tokens, BLOCK_M: tl.constexpr, SHORTEST: tl.constexpr
):
    """The request that a tile of BLOCK_M queries belongs to, and the number of the tile in it; needs no table.

    Rows behind the last request count as one more, number `num_requests`.
    """
    low = tl.full((), 0, tl.int32)
    high = num_requests
    for _ in range(search_steps):
        middle = (low + high + 1) >> 1
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + middle), 0), num_tokens).to(tl.int32)
        before = _first_tile(start, middle, BLOCK_M, SHORTEST) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, tl.maximum(middle - 1, low))
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + low), 0), num_tokens).to(tl.int32)
    return low, tile - _first_tile(start, low, BLOCK_M, SHORTEST)


@triton.jit
def load_part(start, within, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Columns FIRST .. FIRST + WIDTH of rows of DIM, zero past DIM; MASKED, also zero where a row is not `within`."""
    column = FIRST + tl.arange(0, WIDTH)[None, :]
    place = start[:, None] + column
    if MASKED:
        if FIRST + WIDTH > DIM:
            part = tl.load(place, mask=within[:, None] & (column < DIM), other=0.0)
        else:
            part = tl.load(place, mask=within[:, None], other=0.0)
    elif FIRST + WIDTH > DIM:
        part = tl.load(place, mask=column < DIM, other=0.0)
    else:
        part = tl.load(place)
    return part


@triton.jit
def load_queries(q_row, live, OPTIONS: tl.constexpr):
    """Rows of Q where they are `live`, in two parts: where they lie, `live`, the parts. Exact scores load them anew."""
    q_first = live
    q_second = live
    if not OPTIONS.exact:
        q_first = load_part(q_row, live, 0, OPTIONS.first, OPTIONS.dim, True)
        if OPTIONS.second > 0:
            q_second = load_part(q_row, live, OPTIONS.first, OPTIONS.second, OPTIONS.dim, True)
    return q_row, live, q_first, q_second


@triton.jit
def scores_of(query, k_row, within, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Products of queries and a tile of keys, unscaled; MASKED, of keys that are not `within` zero."""
    q_row, live, q_first, q_second = query
    DIM: tl.constexpr = OPTIONS.dim
    scores = tl.zeros((live.shape[0], within.shape[0]), tl.float32)
    if OPTIONS.exact:
        # narrow pieces: without tensor cores a thread holds whole rows of both operands
        for piece in tl.static_range(0, DIM, 32):
            queries = widen(load_part(q_row, live, piece, 32, DIM, True))
            keys = widen(load_part(k_row, within, piece, 32, DIM, True))
            scores = dot(queries, tl.trans(keys), scores, OPTIONS.upcast)
    else:
        if OPTIONS.second > 0:  # the smaller dot in front: the other waits for all of it
            keys = load_part(k_row, within, OPTIONS.first, OPTIONS.second, DIM, MASKED)
            scores = dot(q_second, tl.trans(keys), scores, OPTIONS.upcast)
        keys = load_part(k_row, within, 0, OPTIONS.first, DIM, MASKED)
        scores = dot(q_first, tl.trans(keys), scores, OPTIONS.upcast)
    return scores


@triton.jit
def new_rows(OPTIONS: tl.constexpr):
    """Rows that have seen no key: accumulators, running maxima, and `sums` sums of weights, in turn, one a key."""
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_V: tl.constexpr = OPTIONS.block_v
    SUMS: tl.constexpr = OPTIONS.sums
    return (
        tl.zeros((BLOCK_M, BLOCK_V), tl.float32),
        tl.full((BLOCK_M,), LOWEST, tl.float32),
        tl.zeros((BLOCK_M, SUMS), tl.float32),
    )


@triton.jit
def add_keys(state, scores, v_row, within, scale_log2, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Rows after a tile of keys with these scores, -inf where a row does not see a key."""
    acc, running_max, sums = state
    # The scale is positive, so the largest score stays the largest. It multiplies differences: a scaled score minus a
    # scaled maximum would be one multiply-add, which leaves the maximum's error: of 2**31 too much.
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    alpha = tl.exp2((running_max - new_max) * scale_log2)
    weights = tl.exp2((scores - new_max[:, None]) * scale_log2)
    parts = tl.reshape(weights, (scores.shape[0], scores.shape[1] // OPTIONS.sums, OPTIONS.sums))
    sums = sums * alpha[:, None] + tl.sum(parts, 1)
    acc *= alpha[:, None]
    values = load_part(v_row, within, 0, OPTIONS.block_v, OPTIONS.dim_v, MASKED)
    acc = dot(round_to(weights, values.dtype, OPTIONS.upcast), values, acc, OPTIONS.upcast)
    return acc, new_max, sums


@triton.jit
def store_rows(state, scale_log2, out_row, lse_place, live, OPTIONS: tl.constexpr):
    """Results of rows that are `live`."""
    acc, running_max, sums = state
    total = tl.sum(sums, 1)
    # base 2 until the very end; a row whose scores overflowed has lse +inf, as in the reference
    safe = tl.where(total == 0, 1.0, total)
    log2_sum = tl.where(running_max == float("inf"), float("inf"), running_max * scale_log2 + tl.log2(safe))
    log2_sum = tl.where(total == 0, float("-inf"), log2_sum)
    result = acc * tl.where(total == 0, 0.0, 1.0 / safe)[:, None]
    column = tl.arange(0, OPTIONS.block_v)[None, :]
    stored = live[:, None] & (column < OPTIONS.dim_v)
    tl.store(out_row[:, None] + column, round_to(result, out_row.dtype.element_ty, OPTIONS.upcast), mask=stored)
    tl.store(lse_place, log2_sum * 0.6931471805599453, mask=live)


@triton.jit
def _walk(query, last_key, state, keys, values, span, scale_log2, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Online softmax over the keys of a span, in tiles; MASKED where not every query sees every key.

    `query` is `load_queries(...)`, `last_key` the last key that each query may see; `keys` and `values` are where the
    first of them lies and the stride to the next.
    """
    k_start, stride_k = keys
    v_start, stride_v = values
    begin, end = span
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        within = key < end
        # one 64-bit place a tile, 32-bit steps from it: half the registers
        k_row = k_start + start * stride_k + (tl.arange(0, BLOCK_N) * stride_k.to(tl.int32))
        scores = scores_of(query, k_row, within, MASKED, OPTIONS)
        if MASKED:
            # a query sees no key past the last one; what queries behind the request see does not matter
            visible = key[None, :] <= last_key[:, None] if OPTIONS.causal else within[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        v_row = v_start + start * stride_v + (tl.arange(0, BLOCK_N) * stride_v.to(tl.int32))
        state = add_keys(state, scores, v_row, within, scale_log2, MASKED, OPTIONS)
    return state


@sized_jit(any_alignment=("cu_seqlens_q", "cu_seqlens_k", "lse"))
def _prefill_kernel(
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
    num_requests: tl.int32,
    search_steps: tl.int32,
    heads_per_kv_head: tl.int32,
    num_heads: tl.int32,
    heads_together: tl.int32,
    strides: (tl.int64,) * 9,
    OPTIONS: tl.constexpr,
):
    """`block_m` queries of one request, one head: softmax over the request's keys, unmasked tiles first.

    Requests of fewer than `shortest` queries are `_short_prefill_kernel`'s.

    Grid: (tiles of queries, heads), taken as one row. Neighbouring programs share a few heads, whose keys come from L2;
    of these and a causal request, the tiles with the most keys start first, so that the last programs are short ones.
    A query of `dim` is a power of two, `first`, and the rest, `second`: two dots into one tile of scores. Tokens behind
    the last request get the result of an empty one.

    Registers: accumulators `block_m` x `block_v` and scores `block_m` x `block_n`, float32. Shared memory: Q, and tiles
    of K and V for each stage.
    """
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    SHORTEST: tl.constexpr = OPTIONS.shortest
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head = strides[:6]
    stride_out_token, stride_out_head, stride_lse_token = strides[6:]
    num_tiles = tl.num_programs(0)
    place = tl.program_id(1) * num_tiles + tl.program_id(0)
    first_head = place // (num_tiles * heads_together) * heads_together
    place -= first_head * num_tiles
    together = tl.minimum(heads_together, num_heads - first_head)
    tile = num_tiles - 1 - place // together
    head = first_head + place % together
    request, block = _find_request(cu_seqlens_q, tile, num_requests, search_steps, num_tokens, BLOCK_M, SHORTEST)
    begin_q = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + request), 0), num_tokens)
    real = request < num_requests
    end_q = tl.load(cu_seqlens_q + request + 1, mask=real, other=0).to(tl.int64)
    end_q = tl.where(real, tl.minimum(end_q, num_tokens), num_tokens)
    # clamped before it is narrowed: an end of INT_MIN would wrap into a length near INT_MAX
    len_q = tl.maximum(end_q - begin_q, 0).to(tl.int32)
    if (block * BLOCK_M < len_q) & ((len_q >= SHORTEST) | (request == num_requests)):
        begin_k = tl.minimum(tl.maximum(tl.load(cu_seqlens_k + request), 0), num_kv)
        end_k = tl.load(cu_seqlens_k + request + 1, mask=real, other=0).to(tl.int64)
        len_k = tl.where(real, tl.maximum(tl.minimum(end_k, num_kv) - begin_k, 0), 0).to(tl.int32)
        kv_head = (head // heads_per_kv_head).to(tl.int64)

        query = block * BLOCK_M + tl.arange(0, BLOCK_M)
        live = query < len_q
        token = begin_q + query
        q_row = q + token * (stride_q_token * OPTIONS.q_unit) + head.to(tl.int64) * (stride_q_head * OPTIONS.q_unit)
        k_start = k + begin_k * (stride_k_token * OPTIONS.k_unit) + kv_head * (stride_k_head * OPTIONS.k_unit)
        v_start = v + begin_k * (stride_v_token * OPTIONS.v_unit) + kv_head * (stride_v_head * OPTIONS.v_unit)
        queries = load_queries(q_row, live, OPTIONS)
        # the last query sees the last key
        last_key = query + (len_k - len_q)
        end = len_k
        unmasked = len_k
        if OPTIONS.causal:
            end = tl.maximum(tl.minimum(len_k, (block + 1) * BLOCK_M + len_k - len_q), 0)
            unmasked = tl.maximum(tl.minimum(len_k, block * BLOCK_M + len_k - len_q + 1), 0)
        unmasked = unmasked // BLOCK_N * BLOCK_N
        state = new_rows(OPTIONS)
        keys = (k_start, stride_k_token * OPTIONS.k_unit)
        values = (v_start, stride_v_token * OPTIONS.v_unit)
        state = _walk(queries, last_key, state, keys, values, (0, unmasked), scale_log2, False, OPTIONS)
        state = _walk(queries, last_key, state, keys, values, (unmasked, end), scale_log2, True, OPTIONS)

        out_row = (
            out
            + token * (stride_out_token * OPTIONS.out_unit)
            + head.to(tl.int64) * (stride_out_head * OPTIONS.out_unit)
        )
        store_rows(state, scale_log2, out_row, lse + token * stride_lse_token + head, live, OPTIONS)


@sized_jit(any_alignment=("block_table", "req_id_per_token", "key_lens", "uneven", "lse"))
def _paged_kernel(
    q,
    q_rope,
    kv,
    block_table,
    req_id_per_token,
    key_lens,
    uneven,
    out,
    lse,
    scale_log2: tl.float32,
    num_heads: tl.int32,
    pages: Pages,
    num_splits: tl.int32,
    strides: (tl.int64,) * 11,
    OPTIONS: tl.constexpr,
):
    """One token, a tile of heads, one split of the token's keys: the walk of the sparse kernels over every key.

    Grid: (tokens * head blocks, splits). Head blocks of a token are neighbours, so that its keys come from L2 for all
    but the first. A token's keys are shared among its splits in whole tiles, each of which lies in one block where
    blocks are multiples of tiles (`whole`).

    Where `uneven` is given and not 0, there is nothing to do: `_even_kernel` has said so, and does it.

    Registers and shared memory: as `_attend_kernel`.
    """
    BLOCK_H: tl.constexpr = OPTIONS.tile.block_h
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    num_blocks, block_size, num_requests, max_blocks = pages
    query_strides = strides[:4]
    stride_block, stride_table = strides[4:6]
    OUT_UNIT: tl.constexpr = OPTIONS.out_unit
    out_strides = (strides[6] * OUT_UNIT, strides[7] * OUT_UNIT, strides[8] * OUT_UNIT)
    lse_strides = strides[9:]
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    live_head = head < num_heads
    request = tl.load(req_id_per_token + token)
    known = (request >= 0) & (request < num_requests)
    capacity = max_blocks.to(tl.int64) * block_size
    length = tl.minimum(tl.maximum(tl.load(key_lens + token), 0), capacity).to(tl.int32)
    length = tl.where(known, length, 0)
    if uneven is not None:
        meant = tl.load(uneven) == 0
        length = tl.where(meant, length, 0)
        live_head = live_head & meant
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits) * BLOCK_N
    begin = tl.minimum(split * share, length)
    end = tl.minimum(begin + share, length)

    queries = (q, q_rope, query_strides, num_heads)
    table = block_table + request.to(tl.int64) * stride_table
    cache = (kv, table, known, num_blocks, block_size, divider(block_size), max_blocks, stride_block)
    place = (token, head, live_head, split)
    results = (None, out, out_strides, lse, lse_strides)
    if reads_operands(OPTIONS):
        attend_row(queries, place, cache, (begin, end), scale_log2, results, num_splits, OPTIONS)
    else:
        attend_row_by_groups(queries, place, cache, (begin, end), scale_log2, results, OPTIONS)


@sized_jit(any_alignment=("block_table", "req_id_per_token", "key_lens", "uneven", "lse"))
def _packed_kernel(
    q,
    q_rope,
    kv,
    block_table,
    req_id_per_token,
    key_lens,
    uneven,
    out,
    lse,
    scale_log2: tl.float32,
    num_tokens: tl.int64,
    num_heads: tl.int32,
    tokens_together: tl.int32,
    pages: Pages,
    num_splits: tl.int32,
    strides: (tl.int64,) * 8,
    OPTIONS: tl.constexpr,
):
    """All heads of a few neighbouring tokens, at most a tile of rows, one split of their keys.

    Grid: (blocks of tokens, splits). For each request among the tokens one walk over its keys, in which its rows see
    those below their own lengths and other rows none: tokens of one request, as in speculative decode, read its keys
    once. Rows are token by token in `out` and `lse`. `uneven`: as in `_paged_kernel`.

    Registers and shared memory: as `_paged_kernel` with as many heads.
    """
    BLOCK_H: tl.constexpr = OPTIONS.tile.block_h
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    num_blocks, block_size, num_requests, max_blocks = pages
    query_strides = strides[:4]
    stride_block, stride_table, stride_out_split, stride_lse_split = strides[4:]
    first = tl.program_id(0).to(tl.int64) * tokens_together
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_H)
    token = first + row // num_heads
    live = (row < tokens_together * num_heads) & (token < num_tokens)
    request = tl.load(req_id_per_token + token, mask=live, other=-1)
    capacity = max_blocks.to(tl.int64) * block_size
    length = tl.minimum(tl.maximum(tl.load(key_lens + token, mask=live, other=0), 0), capacity).to(tl.int32)
    flat = first * num_heads + row
    if uneven is not None:
        meant = tl.load(uneven) == 0
        length = tl.where(meant, length, 0)
        live = live & meant

    q_rows = query_rows(q, q_rope, token[:, None], row % num_heads, query_strides, OPTIONS.q_unit)
    state = new_state(OPTIONS)
    for i in range(tokens_together):
        mine = tl.load(req_id_per_token + first + i, mask=first + i < num_tokens, other=-1)
        before = tl.sum(((request == mine) & (row < i * num_heads)).to(tl.int32), 0)
        known = (mine >= 0) & (mine < num_requests) & (before == 0)
        row_end = tl.where((request == mine) & live & known, length, 0)
        longest = tl.max(row_end, 0)
        share = tl.cdiv(tl.cdiv(longest, BLOCK_N), num_splits) * BLOCK_N
        begin = tl.minimum(split * share, longest)
        end = tl.minimum(begin + share, longest)
        # anew for each walk: kept for all, it would wait in registers
        query = (q_rows, live, load_query(q_rows, live, OPTIONS))
        table = block_table + mine.to(tl.int64) * stride_table
        cache = (kv, table, known, num_blocks, block_size, divider(block_size), max_blocks, stride_block)
        span = (begin, end)
        state = attend_keys(query, state, cache, None, span, scale_log2, row_end, OPTIONS)
    results = (None, out, (stride_out_split * OPTIONS.out_unit, 0, 512), lse, (stride_lse_split, 0))
    store_result(state, (0, flat, live, split), results, OPTIONS)


@sized_jit(any_alignment=("block_table", "req_id_per_token", "key_lens", "blocks", "lens"))
def _compact_blocks_kernel(
    block_table,
    req_id_per_token,
    key_lens,
    blocks,
    lens,
    num_blocks: tl.int64,
    block_size: tl.int32,
    num_requests: tl.int32,
    max_blocks: tl.int32,
    stride_table: tl.int64,
    stride_blocks: tl.int64,
    BLOCK: tl.constexpr,
):
    """One token's own row of blocks, those outside the cache left out, and the keys in what is left.

    Grid: (tokens,). Attention does not depend on the order of keys, and the last block, which may be part-filled, stays
    last. The rest of the row is block 0, for kernels that load a block before they look at the length.
    """
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(req_id_per_token + token).to(tl.int64)
    known = (request >= 0) & (request < num_requests)
    capacity = max_blocks.to(tl.int64) * block_size
    length = tl.where(known, tl.minimum(tl.maximum(tl.load(key_lens + token), 0), capacity), 0)
    row = block_table + tl.where(known, request, 0) * stride_table
    target = blocks + token * stride_blocks
    found = tl.full((), 0, tl.int32)
    kept = tl.full((), 0, tl.int64)
    for start in range(0, max_blocks, BLOCK):
        column = start + tl.arange(0, BLOCK)
        keys = tl.minimum(length - column.to(tl.int64) * block_size, block_size)
        block = tl.load(row + column, mask=keys > 0, other=-1)
        valid = (block >= 0) & (block < num_blocks)
        place = found + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(target + place, block, mask=valid)
        found += tl.sum(valid.to(tl.int32), 0)
        kept += tl.sum(tl.where(valid, keys, 0), 0)
    for start in range(found, max_blocks, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(target + column, tl.zeros((BLOCK,), tl.int32), mask=column < max_blocks)
    tl.store(lens + token, kept.to(tl.int32))


@sized_jit(any_alignment=("end", "lse"))
def _clear_behind_kernel(
    end,
    out,
    lse,
    num_heads: tl.int32,
    head_dim_v: tl.int32,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_token: tl.int64,
    BLOCK_V: tl.constexpr,
):
    """The result of an empty row for every token from `end[0]` on: what kernels of other libraries leave as it was.

    Grid: (tokens,).
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(end):
        column = tl.arange(0, BLOCK_V)
        for head in range(num_heads):
            place = out + token * stride_out_token + head * stride_out_head + column
            tl.store(place, tl.zeros((BLOCK_V,), out.dtype.element_ty), mask=column < head_dim_v)
            tl.store(lse + token * stride_lse_token + head, float("-inf"))
