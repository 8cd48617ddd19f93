"""Index ops in Triton. Order is that of the reference: no atomics, scans only."""

import torch
import triton
import triton.language as tl

from ...dispatch import Lowering
from .common import cdiv, sized_jit
from .requests import Blocks, find_slot, request_of

INT32_MAX = 2**31 - 1
# indices a program looks at in one go: 8 a thread, and topk 2048 is two rounds
CONVERT_BLOCK = 1024
FILTER_BLOCK = 1024
# a window is 128 tokens in the models there are: one warp, one round
WINDOW_BLOCK = 128
COMPRESSED_BLOCK = 1024
COMBINE_BLOCK = 512


@triton.jit
def _append(target, count, value, valid):
    """Stores the valid ones behind the first `count` of a row, in order. Returns the new count."""
    chosen = valid.to(tl.int32)
    rank = count + tl.cumsum(chosen, 0) - chosen
    tl.store(target + rank, value.to(tl.int32), mask=valid)
    return count + tl.sum(chosen, 0)


@triton.jit
def _fill(target, count, width, BLOCK: tl.constexpr):
    """-1 from entry `count` of a row to its end."""
    for start in range(count, width, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        tl.store(target + entry, tl.full((BLOCK,), -1, tl.int32), mask=entry < width)


@sized_jit(any_alignment=("req_id_per_token", "block_table", "token_indices", "out", "valid_counts"))
def _convert_kernel(
    req_id_per_token,
    block_table,
    token_indices,
    out,
    valid_counts,
    topk: tl.int32,
    num_requests: tl.int32,
    max_blocks: tl.int32,
    block_size: tl.int32,
    num_blocks: tl.int64,
    stride_table: tl.int64,
    stride_indices: tl.int64,
    stride_out: tl.int64,
    COMPACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Translates one row of request-local indices to slots, counts the valid ones, and moves them to the front.

    Grid: (tokens,). The row goes by in pieces of BLOCK; the number of valid entries so far is carried from piece to
    piece and an exclusive scan ranks those within one, so the order is kept and nothing depends on timing.
    """
    token = tl.program_id(0).to(tl.int64)
    request, known = request_of(req_id_per_token, token, num_requests)
    blocks = Blocks(block_table + request * stride_table, known, max_blocks, block_size, num_blocks)
    source = token_indices + token * stride_indices
    target = out + token * stride_out
    count = 0
    for start in range(0, topk, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        index = tl.load(source + entry, mask=entry < topk, other=-1)
        slot, valid = find_slot(blocks, index, index >= 0)
        if COMPACT:
            count = _append(target, count, slot, valid)
        else:
            tl.store(target + entry, tl.where(valid, slot, -1).to(tl.int32), mask=entry < topk)
            count += tl.sum(valid.to(tl.int32), 0)
    if COMPACT:
        _fill(target, count, topk, BLOCK)
    tl.store(valid_counts + token, count)


@sized_jit(any_alignment=("positions", "req_id_per_token", "block_table", "indices", "lens"))
def _range_kernel(
    positions,
    req_id_per_token,
    block_table,
    indices,
    lens,
    width: tl.int32,
    num_requests: tl.int32,
    max_blocks: tl.int32,
    compress_ratio: tl.int32,
    block_size: tl.int32,
    num_blocks: tl.int64,
    stride_table: tl.int64,
    stride_indices: tl.int64,
    NEWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slots of a range of one request's tokens, compressed ones where the ratio is not 1.

    Grid: (tokens,). A row has the last `width` tokens up to a position (NEWEST: the sliding window), or the first. Only
    the entries that there are get translated; the rest of the row is filled.
    """
    token = tl.program_id(0).to(tl.int64)
    request, known = request_of(req_id_per_token, token, num_requests)
    position = tl.load(positions + token).to(tl.int64)
    there = tl.where(known & (position >= 0), (position + 1) // compress_ratio, 0)
    number = tl.minimum(there, width).to(tl.int32)
    first = 0
    if NEWEST:
        first = (there - number).to(tl.int32)
    blocks = Blocks(block_table + request * stride_table, known, max_blocks, block_size, num_blocks)
    target = indices + token * stride_indices
    count = 0
    for start in range(0, number, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        slot, valid = find_slot(blocks, first + entry, entry < number)
        count = _append(target, count, slot, valid)
    _fill(target, count, width, BLOCK)
    tl.store(lens + token, count)


@sized_jit(
    any_alignment=("topk_indices", "positions", "req_id_per_token", "seq_lens", "gather_lens", "indices", "lens")
)
def _combine_kernel(
    topk_indices,
    positions,
    req_id_per_token,
    seq_lens,
    gather_lens,
    indices,
    lens,
    topk: tl.int32,
    window: tl.int32,
    num_requests: tl.int32,
    compress_ratio: tl.int32,
    request_stride: tl.int64,
    window_offset: tl.int64,
    stride_topk: tl.int64,
    stride_indices: tl.int64,
    BLOCK: tl.constexpr,
):
    """Rows of a gathered workspace that one token attends: its compressed ones, then its window's.

    Grid: (tokens,). The window's rows follow each other without holes, so they need no scan.
    """
    token = tl.program_id(0).to(tl.int64)
    request, known = request_of(req_id_per_token, token, num_requests)
    position = tl.load(positions + token).to(tl.int64)
    live = known & (position >= 0)
    seq_len = tl.load(seq_lens + request, mask=live, other=0).to(tl.int64)
    gather_len = tl.load(gather_lens + request, mask=live, other=0).to(tl.int64)
    gather_start = seq_len - tl.maximum(tl.minimum(gather_len, seq_len), 0)
    base = tl.where(live, request * request_stride, 0)
    source = topk_indices + token * stride_topk
    target = indices + token * stride_indices

    complete = tl.where(live, tl.minimum((position + 1) // compress_ratio, window_offset), 0)
    count = 0
    for start in range(0, topk, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        index = tl.load(source + entry, mask=entry < topk, other=-1)
        row = base + index
        count = _append(target, count, row, (index >= 0) & (index < complete) & (row <= 0x7FFFFFFF))

    first = tl.maximum(tl.maximum(position - window + 1, gather_start), 0)
    # row of the request's token 0, had it been gathered
    origin = window_offset - gather_start
    room = tl.minimum(request_stride, 0x7FFFFFFF - base + 1) - origin
    end = tl.minimum(tl.minimum(position + 1, seq_len), room)
    number = tl.where(live, tl.maximum(end - first, 0), 0).to(tl.int32)
    for start in range(0, number, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        row = base + origin + first + entry
        tl.store(target + count + entry, row.to(tl.int32), mask=entry < number)
    count += number
    _fill(target, count, topk + window, BLOCK)
    tl.store(lens + token, count)


@sized_jit(any_alignment=("indices", "context_lens", "context_indices", "new_indices"))
def _filter_kernel(
    indices,
    context_lens,
    context_indices,
    new_indices,
    topk: tl.int32,
    stride_indices: tl.int64,
    stride_context: tl.int64,
    stride_new: tl.int64,
    BLOCK: tl.constexpr,
):
    """Splits BLOCK indices of one token at its context length. Grid: (tokens, pieces of BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = entry < topk
    context = tl.load(context_lens + token)
    index = tl.load(indices + token * stride_indices + entry, mask=within, other=-1)
    cached = (index >= 0) & (index < context)
    fresh = (index >= 0) & (index >= context)
    tl.store(context_indices + token * stride_context + entry, tl.where(cached, index, -1), mask=within)
    tl.store(new_indices + token * stride_new + entry, tl.where(fresh, index - context, -1), mask=within)


def convert_req_index_to_global_index(
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    block_size: int,
    *,
    compact: bool = False,
    num_blocks: int | None = None,
    out: torch.Tensor,
    valid_counts: torch.Tensor,
) -> None:
    num_tokens, topk = token_indices.shape
    if num_tokens == 0:
        return
    num_requests, max_blocks = block_table.shape
    _convert_kernel[(num_tokens,)](
        req_id_per_token,
        block_table,
        token_indices,
        out,
        valid_counts,
        topk,
        num_requests,
        max_blocks,
        block_size,
        INT32_MAX + 1 if num_blocks is None else num_blocks,
        block_table.stride(0),
        token_indices.stride(0),
        out.stride(0),
        COMPACT=compact,
        BLOCK=CONVERT_BLOCK,
        num_warps=4,
    )


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    num_blocks: int | None = None,
    indices: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    convert_req_index_to_global_index(
        req_id_per_token,
        block_table,
        topk_indices,
        block_size,
        compact=True,
        num_blocks=num_blocks,
        out=indices,
        valid_counts=lens,
    )


def _range_indices(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    block_size: int,
    num_blocks: int | None,
    indices: torch.Tensor,
    lens: torch.Tensor,
    *,
    newest: bool,
) -> None:
    if positions.shape[0] == 0:
        return
    _range_kernel[(positions.shape[0],)](
        positions,
        req_id_per_token,
        block_table,
        indices,
        lens,
        indices.shape[1],
        *block_table.shape,
        compress_ratio,
        block_size,
        INT32_MAX + 1 if num_blocks is None else num_blocks,
        block_table.stride(0),
        indices.stride(0),
        NEWEST=newest,
        BLOCK=WINDOW_BLOCK if newest else COMPRESSED_BLOCK,
        num_warps=1 if newest else 4,
    )


def sliding_window_indices(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    window: int,
    block_size: int,
    *,
    num_blocks: int | None = None,
    indices: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    requests = positions, req_id_per_token, block_table
    _range_indices(*requests, 1, block_size, num_blocks, indices, lens, newest=True)


def compressed_indices(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    block_size: int,
    width: int,
    *,
    num_blocks: int | None = None,
    indices: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    requests = positions, req_id_per_token, block_table
    _range_indices(*requests, compress_ratio, block_size, num_blocks, indices, lens, newest=False)


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window: int,
    compress_ratio: int,
    request_stride: int,
    window_offset: int,
    *,
    indices: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    num_tokens, topk = topk_indices.shape
    if num_tokens == 0:
        return
    _combine_kernel[(num_tokens,)](
        topk_indices,
        positions,
        req_id_per_token,
        seq_lens,
        gather_lens,
        indices,
        lens,
        topk,
        window,
        seq_lens.shape[0],
        compress_ratio,
        request_stride,
        window_offset,
        topk_indices.stride(0),
        indices.stride(0),
        BLOCK=COMBINE_BLOCK,
        num_warps=4,
    )


def filter_prefill_indices(
    indices: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    context_indices: torch.Tensor,
    new_indices: torch.Tensor,
) -> None:
    num_tokens, topk = indices.shape
    if num_tokens == 0 or topk == 0:
        return
    _filter_kernel[(num_tokens, cdiv(topk, FILTER_BLOCK))](
        indices,
        context_lens,
        context_indices,
        new_indices,
        topk,
        indices.stride(0),
        context_indices.stride(0),
        new_indices.stride(0),
        BLOCK=FILTER_BLOCK,
        num_warps=4,
    )


LOWERINGS = {
    "combine_topk_swa_indices": Lowering(combine_topk_swa_indices),
    "compressed_indices": Lowering(compressed_indices),
    "compute_global_topk_indices_and_lens": Lowering(compute_global_topk_indices_and_lens),
    "convert_req_index_to_global_index": Lowering(convert_req_index_to_global_index),
    "filter_prefill_indices": Lowering(filter_prefill_indices),
    "sliding_window_indices": Lowering(sliding_window_indices),
}
