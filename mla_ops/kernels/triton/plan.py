"""Step metadata and schedules, one Triton launch each."""

import torch
import triton
import triton.language as tl

from ...dispatch import Lowering
from .common import cdiv, sized_jit

TOKEN_BLOCK = 128
COPY_BLOCK = 1024
KEY_BLOCK = 64  # keys that a schedule counts as one
NUM_SHARES = 16  # sizes of a part that a schedule chooses from
SCHEDULE_ROWS = 32
SCHEDULE_OTHERS = 128
SCHEDULE_WARPS = 8
MAX_WORKERS = 2**30  # more than slots can be, so that more of them change nothing, and sums of both are 32 bits


@triton.jit
def _copy_table_piece(
    block_table,
    block_table_buffer,
    piece,
    num_requests,
    max_blocks,
    max_blocks_buffer,
    stride_table,
    stride_table_buffer,
    COPY: tl.constexpr,
):
    """Copies one piece of one row of a block table into its buffer, -1 where nothing was given."""
    pieces = tl.cdiv(max_blocks_buffer, COPY)
    row = (piece // pieces).to(tl.int64)
    column = piece % pieces * COPY + tl.arange(0, COPY)
    given = (row < num_requests) & (column < max_blocks)
    block = tl.load(block_table + row * stride_table + column, mask=given, other=-1)
    tl.store(block_table_buffer + row * stride_table_buffer + column, block, mask=column < max_blocks_buffer)


@sized_jit(
    any_alignment=(
        "query_start_loc",
        "seq_lens",
        "block_table",
        "query_start_loc_buffer",
        "seq_lens_buffer",
        "block_table_buffer",
        "req_id_per_token",
        "positions",
        "slot_mapping",
        "key_lens",
        "topk_length",
    )
)
def _step_kernel(
    query_start_loc,
    seq_lens,
    block_table,
    query_start_loc_buffer,
    seq_lens_buffer,
    block_table_buffer,
    req_id_per_token,
    positions,
    slot_mapping,
    key_lens,
    topk_length,
    num_requests: tl.int32,
    max_num_requests: tl.int32,
    max_num_tokens: tl.int32,
    max_blocks: tl.int32,
    max_blocks_buffer: tl.int32,
    search_steps: tl.int32,
    token_programs: tl.int32,
    request_programs: tl.int32,
    block_size: tl.int32,
    index_topk: tl.int64,
    stride_table: tl.int64,
    stride_table_buffer: tl.int64,
    TOKENS: tl.constexpr,
    COPY: tl.constexpr,
):
    """One of three jobs, by program number, so that a step costs one launch.

    Grid: (token_programs + request_programs + max_num_requests * pieces of a table row), fixed by the capacities.
    The first programs each place TOKENS tokens: a bisection of query_start_loc finds the request, as
    torch.searchsorted does. The next copy and pad the request arrays, COPY entries each; the rest copy and pad COPY
    entries of one block-table row. Inputs only are read, so the jobs need no order.
    """
    program = tl.program_id(0)
    if program < token_programs:
        token = program * TOKENS + tl.arange(0, TOKENS)
        within = token < max_num_tokens
        first = tl.load(query_start_loc)
        end = tl.load(query_start_loc + num_requests)
        low = tl.zeros((TOKENS,), tl.int32)
        high = low + num_requests
        for _ in range(search_steps):
            middle = (low + high) >> 1
            open_ = low < high
            after = tl.load(query_start_loc + 1 + middle, mask=open_, other=0) <= token
            low = tl.where(open_ & after, middle + 1, low)
            high = tl.where(open_ & ~after, middle, high)
        live = within & (token >= first) & (token < end) & (num_requests > 0)
        request = tl.minimum(low, num_requests - 1)
        stop = tl.load(query_start_loc + request + 1, mask=live, other=0)
        # 64 bits: seq_lens may hold anything
        wide = token.to(tl.int64) - stop + tl.load(seq_lens + request, mask=live, other=0)
        live &= (wide >= 0) & (wide < 2147483647)
        position = wide.to(tl.int32)
        column = position // block_size
        writable = live & (column < max_blocks)
        block = tl.load(block_table + request.to(tl.int64) * stride_table + column, mask=writable, other=-1).to(
            tl.int64
        )
        slot = tl.where(block >= 0, block * block_size + position % block_size, -1)
        length = position + 1
        tl.store(req_id_per_token + token, tl.where(live, low, -1), mask=within)
        tl.store(positions + token, tl.where(live, position, 0), mask=within)
        tl.store(slot_mapping + token, slot, mask=within)
        tl.store(key_lens + token, tl.where(live, length, 0), mask=within)
        kept = tl.minimum(length.to(tl.int64), index_topk).to(tl.int32)
        tl.store(topk_length + token, tl.where(live, kept, 0), mask=within)
    elif program < token_programs + request_programs:
        entry = (program - token_programs) * COPY + tl.arange(0, COPY)
        # past the last request every start is the number of tokens
        start = tl.load(query_start_loc + tl.minimum(entry, num_requests), mask=entry <= max_num_requests, other=0)
        tl.store(query_start_loc_buffer + entry, start, mask=entry <= max_num_requests)
        length = tl.load(seq_lens + entry, mask=entry < num_requests, other=0)
        tl.store(seq_lens_buffer + entry, length, mask=entry < max_num_requests)
    else:
        _copy_table_piece(
            block_table,
            block_table_buffer,
            program - token_programs - request_programs,
            num_requests,
            max_blocks,
            max_blocks_buffer,
            stride_table,
            stride_table_buffer,
            COPY,
        )


@sized_jit(
    any_alignment=(
        "positions",
        "req_id_per_token",
        "block_table",
        "block_table_buffer",
        "slot_mapping",
        "compressed_lens",
    )
)
def _compressed_kernel(
    positions,
    req_id_per_token,
    block_table,
    block_table_buffer,
    slot_mapping,
    compressed_lens,
    num_requests: tl.int32,
    max_num_tokens: tl.int32,
    max_blocks: tl.int32,
    max_blocks_buffer: tl.int32,
    token_programs: tl.int32,
    compress_ratio: tl.int32,
    block_size: tl.int32,
    stride_table: tl.int64,
    stride_table_buffer: tl.int64,
    TOKENS: tl.constexpr,
    COPY: tl.constexpr,
):
    """One of two jobs, by program number, as in `_step_kernel`: TOKENS tokens, or COPY entries of one table row.

    Grid: (token_programs + max_num_requests * pieces of a table row), fixed by the capacities.
    """
    program = tl.program_id(0)
    if program < token_programs:
        token = program * TOKENS + tl.arange(0, TOKENS)
        within = token < max_num_tokens
        request = tl.load(req_id_per_token + token, mask=within, other=-1)
        position = tl.load(positions + token, mask=within, other=-1)
        live = (request >= 0) & (request < num_requests) & (position >= 0)
        # position + 1 may be past int32: the quotient and the remainder are those of position, one step on
        done = position // compress_ratio
        completes = position % compress_ratio == compress_ratio - 1
        column = done // block_size
        writable = live & completes & (column < max_blocks)
        block = tl.load(block_table + request.to(tl.int64) * stride_table + column, mask=writable, other=-1).to(
            tl.int64
        )
        slot = tl.where(block >= 0, block * block_size + done % block_size, -1)
        tl.store(slot_mapping + token, slot, mask=within)
        length = tl.minimum(done.to(tl.int64) + completes, 0x7FFFFFFF).to(tl.int32)
        tl.store(compressed_lens + token, tl.where(live, length, 0), mask=within)
    else:
        _copy_table_piece(
            block_table,
            block_table_buffer,
            program - token_programs,
            num_requests,
            max_blocks,
            max_blocks_buffer,
            stride_table,
            stride_table_buffer,
            COPY,
        )


@triton.jit
def _blocks_of(
    topk_length, extra_topk_length, row, num_tokens, topk, extra_topk, HAS_EXTRA: tl.constexpr, KEYS: tl.constexpr
):
    """Blocks of KEYS keys of some rows, in both caches; -1 past the last row."""
    within = row < num_tokens
    length = tl.minimum(tl.maximum(tl.load(topk_length + row, mask=within, other=0), 0), topk)
    extra = extra_topk
    if HAS_EXTRA:
        extra = tl.minimum(tl.maximum(tl.load(extra_topk_length + row, mask=within, other=0), 0), extra)
    # rounded up without passing 2^31
    blocks = (length + KEYS - 1).to(tl.uint32) // KEYS + (extra + KEYS - 1).to(tl.uint32) // KEYS
    return tl.where(within, blocks.to(tl.int32), -1)


@triton.jit
def _parts_for(blocks, share, cluster_size, DETERMINISTIC: tl.constexpr):
    """Slots of some rows: one for a row without keys, none past the last row."""
    if DETERMINISTIC:
        parts = tl.where(blocks > 0, cluster_size, 1)
    else:
        parts = 1 + (blocks > share).to(tl.int32) + 2 * (blocks > 2 * share).to(tl.int32)
        parts += 4 * (blocks > 4 * share).to(tl.int32) + 8 * (blocks > 8 * share).to(tl.int32)
        parts = tl.minimum(parts, cluster_size)
    return tl.where(blocks >= 0, parts, 0)


@sized_jit(any_alignment=("topk_length", "extra_topk_length", "slots"))
def _schedule_kernel(
    topk_length,
    extra_topk_length,
    slots,
    num_tokens: tl.int32,
    num_slots: tl.int32,
    cluster_size: tl.int32,
    topk: tl.int32,
    extra_topk: tl.int32,
    capacity: tl.int32,
    num_workers: tl.int32,
    overhead: tl.int32,
    HAS_EXTRA: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
    KEYS: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Each program decides on the share anew, places ROWS rows, and fills its part of the slots without work.

    Grid: (programs of ROWS rows, at least one). A row stands behind the slots of all that are longer, or as long with
    a smaller number: OTHERS rows are compared with ROWS at a time, so that nothing is sorted and no program waits for
    another. That is one launch, quadratic in tokens. Tiles are small because the code is: a step runs it once, from
    cold instruction caches.
    """
    program = tl.program_id(0)
    other = tl.arange(0, OTHERS)
    candidate = tl.arange(0, SHARES)
    shares = ((capacity * (4 - candidate % 2)).to(tl.uint32) + (4 << (candidate // 2)) - 1) >> (2 + candidate // 2)
    shares = shares.to(tl.int32)
    needed = tl.zeros((OTHERS, SHARES), tl.int32)
    longest = tl.zeros((OTHERS,), tl.int32)
    total = tl.zeros((OTHERS,), tl.int64)
    empty = tl.zeros((OTHERS,), tl.int32)
    for start in range(0, num_tokens, OTHERS):
        blocks = _blocks_of(
            topk_length, extra_topk_length, start + other, num_tokens, topk, extra_topk, HAS_EXTRA=HAS_EXTRA, KEYS=KEYS
        )
        longest = tl.maximum(longest, blocks)
        total += tl.maximum(blocks, 0)
        empty += (blocks == 0).to(tl.int32)
        parts = _parts_for(blocks[:, None], shares[None, :], cluster_size, DETERMINISTIC)
        needed += tl.where(blocks[:, None] > 0, parts, 0)
    longest = tl.max(longest, 0)
    empty = tl.sum(empty, 0)
    needed = tl.sum(needed, 0)
    slot = tl.maximum(tl.minimum(shares, longest), tl.cdiv(longest, cluster_size)).to(tl.int64) + overhead
    time = tl.minimum(
        tl.cdiv(needed, num_workers).to(tl.int64) * num_workers * slot,
        needed.to(tl.int64) * overhead + tl.sum(total, 0) + num_workers * slot,
    )
    time = tl.where(needed + empty <= num_slots, time, 0x7FFFFFFFFFFFFFFF)
    chosen = candidate == tl.min(tl.where(time == tl.min(time, 0), candidate, SHARES), 0)
    share = tl.sum(tl.where(chosen, shares, 0), 0)
    used = tl.sum(tl.where(chosen, needed, 0), 0) + empty

    row = program * ROWS + tl.arange(0, ROWS)
    own = _blocks_of(topk_length, extra_topk_length, row, num_tokens, topk, extra_topk, HAS_EXTRA=HAS_EXTRA, KEYS=KEYS)
    before = tl.zeros((ROWS, OTHERS), tl.int32)
    for start in range(0, num_tokens, OTHERS):
        blocks = _blocks_of(
            topk_length, extra_topk_length, start + other, num_tokens, topk, extra_topk, HAS_EXTRA=HAS_EXTRA, KEYS=KEYS
        )
        parts = _parts_for(blocks, share, cluster_size, DETERMINISTIC)[None, :]
        # of rows as long, those with a smaller number: longer by one in this comparison
        longer = blocks[None, :] + (start + other[None, :] < row[:, None]).to(tl.int32) > own[:, None]
        before += tl.where(longer, parts, 0)
    parts = _parts_for(own, share, cluster_size, DETERMINISTIC)
    part = tl.arange(0, 16)[None, :]
    entry = slots + 2 * (tl.sum(before, 1)[:, None] + part)
    mine = part < parts[:, None]
    tl.store(entry, row[:, None] + 0 * part, mask=mine)
    tl.store(entry + 1, parts[:, None] + 0 * part, mask=mine)
    for start in range(used + program * OTHERS, num_slots, tl.num_programs(0) * OTHERS):
        unused = start + other
        tl.store(slots + 2 * unused, tl.full((OTHERS,), -1, tl.int32), mask=unused < num_slots)
        tl.store(slots + 2 * unused + 1, tl.full((OTHERS,), 1, tl.int32), mask=unused < num_slots)


def build_step_metadata(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc_buffer: torch.Tensor,
    seq_lens_buffer: torch.Tensor,
    block_table_buffer: torch.Tensor,
    req_id_per_token: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_lens: torch.Tensor,
    topk_length: torch.Tensor,
    block_size: int,
    index_topk: int,
) -> None:
    num_requests, max_blocks = block_table.shape
    max_num_requests, max_blocks_buffer = block_table_buffer.shape
    max_num_tokens = req_id_per_token.shape[0]
    token_programs = cdiv(max_num_tokens, TOKEN_BLOCK)
    request_programs = cdiv(max_num_requests + 1, COPY_BLOCK)
    table_programs = max_num_requests * cdiv(max_blocks_buffer, COPY_BLOCK)
    _step_kernel[(token_programs + request_programs + table_programs,)](
        query_start_loc,
        seq_lens,
        block_table,
        query_start_loc_buffer,
        seq_lens_buffer,
        block_table_buffer,
        req_id_per_token,
        positions,
        slot_mapping,
        key_lens,
        topk_length,
        num_requests,
        max_num_requests,
        max_num_tokens,
        max_blocks,
        max_blocks_buffer,
        num_requests.bit_length(),
        token_programs,
        request_programs,
        block_size,
        index_topk,
        block_table.stride(0),
        block_table_buffer.stride(0),
        TOKENS=TOKEN_BLOCK,
        COPY=COPY_BLOCK,
        num_warps=4,
    )


def build_compressed_metadata(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    block_table_buffer: torch.Tensor,
    slot_mapping: torch.Tensor,
    compressed_lens: torch.Tensor,
    compress_ratio: int,
    block_size: int,
) -> None:
    num_requests, max_blocks = block_table.shape
    max_num_requests, max_blocks_buffer = block_table_buffer.shape
    max_num_tokens = positions.shape[0]
    token_programs = cdiv(max_num_tokens, TOKEN_BLOCK)
    table_programs = max_num_requests * cdiv(max_blocks_buffer, COPY_BLOCK)
    if token_programs + table_programs == 0:
        return
    _compressed_kernel[(token_programs + table_programs,)](
        positions,
        req_id_per_token,
        block_table,
        block_table_buffer,
        slot_mapping,
        compressed_lens,
        num_requests,
        max_num_tokens,
        max_blocks,
        max_blocks_buffer,
        token_programs,
        compress_ratio,
        block_size,
        block_table.stride(0),
        block_table_buffer.stride(0),
        TOKENS=TOKEN_BLOCK,
        COPY=COPY_BLOCK,
        num_warps=4,
    )


def plan_sparse_attention(
    topk_length: torch.Tensor,
    tile_scheduler_metadata: torch.Tensor,
    topk: int,
    num_workers: int,
    *,
    overhead: int = 4,
    extra_topk_length: torch.Tensor | None = None,
    extra_topk: int = 0,
    deterministic: bool = False,
) -> None:
    num_clusters, cluster_size, _ = tile_scheduler_metadata.shape
    num_tokens = topk_length.shape[0]
    if num_clusters == 0:
        return
    _schedule_kernel[(max(cdiv(num_tokens, SCHEDULE_ROWS), 1),)](
        topk_length,
        extra_topk_length,
        tile_scheduler_metadata,
        num_tokens,
        num_clusters * cluster_size,
        cluster_size,
        topk,
        extra_topk,
        cdiv(topk, KEY_BLOCK) + cdiv(extra_topk, KEY_BLOCK),
        min(num_workers, MAX_WORKERS),
        overhead,
        HAS_EXTRA=extra_topk_length is not None,
        DETERMINISTIC=deterministic,
        KEYS=KEY_BLOCK,
        SHARES=NUM_SHARES,
        ROWS=SCHEDULE_ROWS,
        OTHERS=SCHEDULE_OTHERS,
        num_warps=SCHEDULE_WARPS,
    )


LOWERINGS = {
    "build_compressed_metadata": Lowering(build_compressed_metadata),
    "build_step_metadata": Lowering(build_step_metadata),
    "plan_sparse_attention": Lowering(plan_sparse_attention),
}
