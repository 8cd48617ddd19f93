"""Dense decode over rows of unequal lengths: their keys shared evenly among programs, whatever row they are of.

A call's other launch (`dense_attention_device.py`) gives every row as many programs as the shape says, and waits for
the longest row. Which of the two does the work is decided by the lengths, on the device, and left in `uneven`.
"""

import triton
import triton.language as tl

from .bfloat16 import narrow
from .common import Pages, sized_jit
from .sparse_attention_device import (
    attend_keys,
    finish,
    load_query,
    new_state,
    query_rows,
    store_groups,
)
from .sparse_attention_keys import divider

# a program reads so many lengths at once
CHUNK = tl.constexpr(512)
# Rows of one length take less than twice as long by their shapes as shared evenly: splits are the largest whole number.
UNEVEN = tl.constexpr(2)


@triton.jit
def _is_uneven(
    walks,
    num_tokens,
    tokens_together,
    num_splits,
    num_workers,
    BLOCK_N: tl.constexpr,
    SLACK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Whether the longest walk's share, in tiles of keys, is above UNEVEN of what a worker has of all, and SLACK."""
    total = tl.full((), 0, tl.int64)
    longest = tl.full((), 0, tl.int64)
    for start in range(0, num_tokens, CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        tiles = _count_units(tokens, num_tokens, walks, tokens_together, BLOCK_N, 0, PACKED)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    return tl.cdiv(longest, num_splits) > UNEVEN * tl.cdiv(total, num_workers) + SLACK


@triton.jit
def _count_units(
    tokens, num_tokens, walks, tokens_together, BLOCK_N: tl.constexpr, ROW_COST: tl.constexpr, PACKED: tl.constexpr
):
    """The units of the walks that begin at `tokens`, int64: tiles of keys, and ROW_COST for what a walk costs besides.

    Tokens together (PACKED) of one request share a walk, which begins at the first of them; others have no units.
    """
    req_id_per_token, key_lens, num_requests, capacity = walks
    there = tokens < num_tokens
    request = tl.load(req_id_per_token + tokens, mask=there, other=-1)
    longest = tl.load(key_lens + tokens, mask=there, other=0)
    if PACKED:
        first = tokens // tokens_together * tokens_together
        for i in range(tokens_together):
            other = first + i
            same = other < num_tokens
            same &= tl.load(req_id_per_token + other, mask=same, other=-1) == request
            longest = tl.maximum(longest, tl.load(key_lens + other, mask=same, other=0))
            there &= ~(same & (other < tokens))
    keys = _clamp_length(longest, request, num_requests, capacity)
    return tl.where(there, tl.cdiv(keys, BLOCK_N) + ROW_COST, 0).to(tl.int64)


@triton.jit
def _clamp_length(length, request, num_requests, capacity):
    """Keys of a token's walk: none of a request that there is not, and none behind the block table."""
    known = (request >= 0) & (request < num_requests)
    return tl.where(known, tl.minimum(tl.maximum(length, 0), capacity), 0).to(tl.int32)


@triton.jit
def _own_interval(
    worker,
    num_workers,
    least_units,
    num_tokens,
    walks,
    tokens_together,
    BLOCK_N: tl.constexpr,
    ROW_COST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The units of all walks, one walk's behind the other's, in equal intervals, and which are the worker's.

    Returns the units that a worker has, and of this one: the first unit; the tokens that its walks begin at, from and
    to; the unit at which the first of these walks begins.
    """
    total = tl.full((), 0, tl.int64)
    for start in range(0, num_tokens, CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        total += tl.sum(_count_units(tokens, num_tokens, walks, tokens_together, BLOCK_N, ROW_COST, PACKED), 0)
    share = tl.maximum(tl.cdiv(total, num_workers), least_units)
    begin = worker * share
    first_token = tl.full((), 0, tl.int32)
    end_token = tl.full((), 0, tl.int32)
    walk_start = tl.full((), 0, tl.int64)
    before = tl.full((), 0, tl.int64)
    for start in range(0, num_tokens, CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        units = _count_units(tokens, num_tokens, walks, tokens_together, BLOCK_N, ROW_COST, PACKED)
        behind = before + tl.cumsum(units, 0)
        passed = (behind <= begin) & (tokens < num_tokens)
        reached = (behind - units < tl.minimum(begin + share, total)) & (tokens < num_tokens)
        first_token += tl.sum(passed.to(tl.int32), 0)
        end_token += tl.sum(reached.to(tl.int32), 0)
        walk_start = tl.maximum(walk_start, tl.max(tl.where(passed, behind, 0), 0))
        before += tl.sum(units, 0)
    return share, begin, first_token, end_token, walk_start


@triton.jit
def _packed_rows(leader, request, data, sizes, BLOCK_H: tl.constexpr):
    """The rows of the tokens together with `leader`: token, head, whether of its request, and the keys they see."""
    _q, _q_rope, _kv, _block_table, req_id_per_token, key_lens, _part_out, _part_lse, _out, _lse = data
    num_tokens, num_heads, tokens_together, _num_blocks, block_size, num_requests, max_blocks = sizes
    row = tl.arange(0, BLOCK_H)
    token = leader // tokens_together * tokens_together + row // num_heads
    live = (row < tokens_together * num_heads) & (token < num_tokens)
    live &= tl.load(req_id_per_token + token, mask=live, other=-1) == request
    length = tl.load(key_lens + token, mask=live, other=0)
    row_end = _clamp_length(length, request, num_requests, max_blocks.to(tl.int64) * block_size)
    return token, row % num_heads, live, row_end


@triton.jit(noinline=True)
def _attend_walk(data, sizes, strides, walk, scale_log2, OPTIONS: tl.constexpr):
    """The tiles `low` to `high` of one walk, and its result, or a part of it.

    A call of its own: inside the kernel's loop over walks, addresses and constants of this loop over keys would wait
    in registers, and spill.
    """
    q, q_rope, kv, block_table, _req_id_per_token, _key_lens, part_out, part_lse, out, lse = data
    _num_tokens, num_heads, _tokens_together, num_blocks, block_size, num_requests, max_blocks = sizes
    query_strides = (strides[0], strides[1], strides[2], strides[3])
    stride_block, stride_table, stride_out_token = strides[4], strides[5], strides[6]
    stride_out_head, stride_lse = strides[7], strides[8]
    leader, request, keys, low, high, place, parts, head_block = walk
    BLOCK_H: tl.constexpr = OPTIONS.tile.block_h
    row = tl.arange(0, BLOCK_H)
    head_blocks = 1
    if OPTIONS.packed:
        token, head, live, row_end = _packed_rows(leader, request, data, sizes, BLOCK_H)
    else:
        head_blocks = tl.cdiv(num_heads, BLOCK_H)
        head = head_block * BLOCK_H + row
        token, live, row_end = leader, head < num_heads, None
    token, head_place = token.to(tl.int64), head.to(tl.int64)
    q_rows = query_rows(q, q_rope, token[:, None] if OPTIONS.packed else token, head, query_strides, OPTIONS.q_unit)
    query = (q_rows, live, load_query(q_rows, live, OPTIONS))
    known = (request >= 0) & (request < num_requests)
    table = block_table + request.to(tl.int64) * stride_table
    cache = (kv, table, known, num_blocks, block_size, divider(block_size), max_blocks, stride_block)
    span = (low * OPTIONS.tile.block_n, tl.minimum(high * OPTIONS.tile.block_n, keys))
    state = new_state(OPTIONS)
    state = attend_keys(query, state, cache, None, span, scale_log2, row_end, OPTIONS)
    if parts > 1:
        part = (place.to(tl.int64) * head_blocks + head_block) * BLOCK_H + row
        _store_rows(state, part_out + part * 512, part_lse + part, live, True, OPTIONS.upcast)
    else:
        out_row = out + (token * stride_out_token + head_place * stride_out_head) * OPTIONS.out_unit
        _store_rows(state, out_row, lse + token * stride_lse + head, live, False, OPTIONS.upcast)


@triton.jit
def _store_rows(state, out_row, lse_place, live, PARTIAL: tl.constexpr, UPCAST: tl.constexpr):
    """A walk's result, or PARTIAL, that of a part, which the merge does not read if it had no key."""
    total, log2_sum, factor = finish(state)
    stored = live[:, None]
    if PARTIAL:
        tl.store(lse_place, log2_sum, mask=live)
        stored &= (total != 0)[:, None]
    else:
        tl.store(lse_place, log2_sum * 0.6931471805599453, mask=live)
    store_groups(state, factor, out_row[:, None], stored, UPCAST)


@sized_jit(any_alignment=("block_table", "req_id_per_token", "key_lens", "lse"))
def _even_kernel(
    q,
    q_rope,
    kv,
    block_table,
    req_id_per_token,
    key_lens,
    part_out,
    part_lse,
    cuts,
    uneven,
    out,
    lse,
    scale_log2: tl.float32,
    num_tokens: tl.int32,
    num_heads: tl.int32,
    tokens_together: tl.int32,
    num_splits: tl.int32,
    num_workers: tl.int32,
    pages: Pages,
    strides: (tl.int64,) * 9,
    LEAST: tl.constexpr,
    ROW_COST: tl.constexpr,
    SLACK: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """An equal share of all tokens' tiles of keys, if their lengths are uneven; else nothing. `uneven` says which.

    Grid: (workers * head blocks). Head blocks of a worker are neighbours, so that its keys come from L2 for all but the
    first. A walk goes over the keys of one token for a tile of heads; `packed`, of neighbouring tokens of one request
    with all their heads, as in `_packed_kernel`. A tile of keys lies in one block where blocks are multiples of tiles
    (`whole`). `num_splits` are those of the launch by shapes.

    A walk that one worker has is written as it is. A walk that is cut leaves a part of float32 of each worker, in the
    first of its two places if the walk began before its interval, else in the second; `cuts` says of each token which
    worker has the first part and how many there are, 1 or 0 if it is not cut.

    Registers and shared memory: as `_attend_kernel`.
    """
    PACKED: tl.constexpr = OPTIONS.packed
    BLOCK_H: tl.constexpr = OPTIONS.tile.block_h
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    num_blocks, block_size, num_requests, max_blocks = pages
    head_blocks = 1 if PACKED else tl.cdiv(num_heads, BLOCK_H)
    worker = tl.program_id(0) // head_blocks
    head_block = tl.program_id(0) % head_blocks
    capacity = max_blocks.to(tl.int64) * block_size
    walks = (req_id_per_token, key_lens, num_requests, capacity)
    if _is_uneven(walks, num_tokens, tokens_together, num_splits, num_workers, BLOCK_N, SLACK, PACKED):
        if tl.program_id(0) == 0:
            tl.store(uneven, 1)
        share, begin, first_token, end_token, walk_start = _own_interval(
            worker, num_workers, LEAST, num_tokens, walks, tokens_together, BLOCK_N, ROW_COST, PACKED
        )
    else:
        share = tl.full((), 1, tl.int64)
        begin = tl.full((), 0, tl.int64)
        walk_start = begin
        first_token = tl.full((), 0, tl.int32)
        end_token = first_token
        if tl.program_id(0) == 0:
            tl.store(uneven, 0)
            for start in range(0, num_tokens, CHUNK):
                tokens = start + tl.arange(0, CHUNK)
                tl.store(cuts + 2 * tokens + 1, tl.zeros_like(tokens), mask=tokens < num_tokens)

    data = (q, q_rope, kv, block_table, req_id_per_token, key_lens, part_out, part_lse, out, lse)
    sizes = (num_tokens, num_heads, tokens_together, num_blocks, block_size, num_requests, max_blocks)
    zero = tl.full((), 0, tl.int32)
    for number in range(first_token, end_token):
        leader = zero + number  # a tensor in the interpreter, too
        request = tl.load(req_id_per_token + leader)
        if PACKED:
            token, _head, live, row_end = _packed_rows(leader, request, data, sizes, BLOCK_H)
            keys = tl.max(row_end, 0)
            leads = tl.sum((live & (token < leader)).to(tl.int32), 0) == 0
        else:
            keys = _clamp_length(tl.load(key_lens + leader), request, num_requests, capacity)
            leads = True
        tiles = tl.cdiv(keys, BLOCK_N)
        # the worker's units, counted from the walk's first tile
        behind = begin - walk_start - ROW_COST
        low = tl.minimum(tl.maximum(behind, 0), tiles).to(tl.int32)
        high = tl.minimum(tl.maximum(behind + share, 0), tiles).to(tl.int32)
        first_worker = ((walk_start + ROW_COST) // share).to(tl.int32)
        parts = ((walk_start + ROW_COST + tiles - 1) // share).to(tl.int32) - first_worker + 1
        parts = tl.where(tiles == 0, 1, parts)
        place = 2 * worker + (worker == first_worker).to(tl.int32)
        begins_here = walk_start >= begin
        if leads & begins_here & (head_block == 0):
            if PACKED:
                tl.store(cuts + 2 * token, tl.zeros_like(token) + first_worker, mask=live)
                tl.store(cuts + 2 * token + 1, tl.zeros_like(token) + parts, mask=live)
            else:
                tl.store(cuts + 2 * leader, first_worker)
                tl.store(cuts + 2 * leader + 1, parts)
        if leads:
            walk_start += tiles + ROW_COST
        leads = leads & ((low < high) | ((tiles == 0) & begins_here))
        if leads:
            walk = (leader, request, keys, low, high, place, parts, head_block)
            _attend_walk(data, sizes, strides, walk, scale_log2, OPTIONS)


@sized_jit(any_alignment=("cuts", "lse"))
def _merge_cuts_kernel(
    part_out,
    part_lse,
    cuts,
    out,
    lse,
    num_heads: tl.int32,
    tokens_together: tl.int32,
    rows_of_a_part: tl.int32,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_token: tl.int64,
    BLOCK_S: tl.constexpr,
):
    """Merges 128 columns of the parts of one (token, head), exactly, in the order of its keys.

    Grid: (tokens * heads, 4). Rows of walks that are not cut are left as they are.

    Registers: BLOCK_S * 128 float32 of parts. Shared memory: as many for each stage.
    """
    token = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    first_worker = tl.load(cuts + 2 * token)
    parts = tl.load(cuts + 2 * token + 1)
    if parts > 1:
        row = (token % tokens_together) * num_heads + head
        column = tl.program_id(1) * 128 + tl.arange(0, 128)
        running_max = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        acc = tl.zeros((128,), tl.float32)
        for start in tl.range(0, parts, BLOCK_S, num_stages=2):
            part = start + tl.arange(0, BLOCK_S)
            there = part < parts
            place = 2 * (first_worker + part) + (part == 0).to(tl.int32)
            place = place.to(tl.int64) * rows_of_a_part + row
            part_log2 = tl.load(part_lse + place, mask=there, other=float("-inf"))
            values = tl.load(part_out + place[:, None] * 512 + column[None, :], mask=there[:, None], other=0.0)
            # nothing was written of a part that had no key
            values = tl.where((part_log2 == float("-inf"))[:, None], 0.0, values)
            new_max = tl.maximum(running_max, tl.max(part_log2, 0))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            alpha = tl.exp2(running_max - safe_max)
            weight = tl.exp2(part_log2 - safe_max)
            total = total * alpha + tl.sum(weight, 0)
            acc = acc * alpha + tl.sum(weight[:, None] * values, 0)
            running_max = new_max
        safe = tl.where(total == 0, 1.0, total)
        log2_sum = tl.where(running_max == float("inf"), float("inf"), running_max + tl.log2(safe))
        log2_sum = tl.where(total == 0, float("-inf"), log2_sum)
        factor = tl.where(total == 0, 0.0, 1.0 / safe)
        out_row = out + token.to(tl.int64) * stride_out_token + head.to(tl.int64) * stride_out_head
        tl.store(out_row + column, narrow(acc * factor, out.dtype.element_ty))
        if tl.program_id(1) == 0:
            tl.store(lse + token.to(tl.int64) * stride_lse_token + head, log2_sum * 0.6931471805599453)
