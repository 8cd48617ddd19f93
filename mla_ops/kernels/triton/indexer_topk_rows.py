"""Exact, deterministic top-k of rows of scores in Triton: by programs that hold a piece of a row in registers.

A score becomes a 32-bit number of the same order. The k-th largest number of a piece is found bit by bit, from the
highest: a bit is set if at least k numbers are as large. What is above that number is kept, and as many of its equals
as are still wanted, from the left. A row of several pieces keeps the best of each, in the order of columns, then the
best of these, and so on until there is one piece. Counts do not depend on the order of additions, nor does a result.
"""

import torch
import triton
import triton.language as tl

from .common import cdiv, sized_jit
from .requests import ANY_BLOCK, Blocks, find_slot, request_of

# numbers of a piece: 32 a thread, of four warps and of eight; sixteen warps spill
SMALL_PIECE, LARGE_PIECE = 4096, 8192


@triton.jit
def order_of(score):
    """float32 to int32 of the same order; -0.0 is +0.0, NaN is below -inf."""
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bits = tl.where(magnitude == 0, 0, bits)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(magnitude > 0x7F800000, -0x80000000, order)


@triton.jit
def _least_kept(number, k):
    """A uint32 number that exactly `k` of the numbers reach, where there is one, else the `k`-th largest."""
    least = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    while bit != 0:
        trial = least | bit
        count = tl.sum((number >= trial).to(tl.int32), 0)
        least = tl.where(count >= k, trial, least)
        bit = tl.where(count == k, 0, bit >> 1)
    return least


@sized_jit(any_alignment=("row_starts", "row_ends", "block_table", "req_id_per_token", "indices", "valid_counts"))
def _select_kernel(
    scores,
    columns,
    row_starts,
    row_ends,
    block_table,
    req_id_per_token,
    kept_scores,
    indices,
    valid_counts,
    topk: tl.int32,
    num_columns: tl.int32,
    num_requests: tl.int32,
    max_blocks: tl.int32,
    block_size: tl.int32,
    stride_scores: tl.int64,
    stride_columns: tl.int64,
    stride_table: tl.int64,
    stride_kept: tl.int64,
    stride_indices: tl.int64,
    PIECE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Writes the columns, or slots, of the largest scores of a piece of a row, in the order in which they stand.

    Grid: (rows, pieces). A piece writes `topk` entries behind those of the pieces before, -1 behind its last. `columns`
    are those of scores that are kept of a longer row, -1 for none. `kept_scores`, where there are several pieces, take
    the scores of what is kept; else `valid_counts` take how many there are.
    """
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    entry = tl.arange(0, PIECE)
    place = piece * PIECE + entry
    row = scores + token * (stride_scores * UNIT)
    if columns is None:
        start = 0
        end = num_columns
        if row_starts is not None:
            start = tl.minimum(tl.maximum(tl.load(row_starts + token), 0), num_columns)
        if row_ends is not None:
            end = tl.minimum(tl.maximum(tl.load(row_ends + token), 0), num_columns)
        valid = (place >= start) & (place < end)
    else:
        valid = tl.load(columns + token * (stride_columns * UNIT) + place, mask=place < num_columns, other=-1) >= 0
    score = tl.load(row + place, mask=valid, other=0.0)
    number = (order_of(score) ^ -0x80000000).to(tl.uint32, bitcast=True)
    # 0 is of no column, 1 of NaN: so a number says all, and no mask is kept beside it
    number = tl.where(valid, tl.maximum(number, 1), 0)
    least = tl.full((), 1, tl.uint32)
    count = tl.sum((number > 0).to(tl.int32), 0)
    if count > topk:
        least = _least_kept(number, topk)
        count = tl.sum((number >= least).to(tl.int32), 0)
        if count > topk:
            wanted = topk - tl.sum((number > least).to(tl.int32), 0)
            equal = (number == least).to(tl.int32)
            number = tl.where((number == least) & (tl.cumsum(equal, 0) > wanted), 0, number)
            count = topk
    ones = (number >= least).to(tl.int32)
    behind = tl.cumsum(ones, 0) - ones
    kept = number >= least
    target = indices + token * stride_indices + piece * topk
    tl.store(target + behind, place, mask=kept)
    if columns is not None or block_table is not None or kept_scores is not None:
        # of what is kept only: 32 columns, scores and addresses a thread would leave room for one program an SM
        tl.debug_barrier()
        if block_table is not None:
            request, known = request_of(req_id_per_token, token, num_requests)
            blocks = Blocks(block_table + request * stride_table, known, max_blocks, block_size, ANY_BLOCK)
        for first in range(0, count, 1024):
            chosen = first + tl.arange(0, 1024)
            there = chosen < count
            value = tl.load(target + chosen, mask=there, other=0)
            if kept_scores is not None:
                best = tl.load(row + value, mask=there, other=0.0)
                tl.store(kept_scores + token * stride_kept + piece * topk + chosen, best, mask=there)
            if columns is not None:
                value = tl.load(columns + token * (stride_columns * UNIT) + value, mask=there, other=0)
            if block_table is not None:
                slot, found = find_slot(blocks, value, there)
                value = tl.where(found, slot, -1).to(tl.int32)
            if columns is not None or block_table is not None:
                tl.store(target + chosen, value, mask=there)
    for first in range(count, topk, 1024):
        empty = first + tl.arange(0, 1024)
        tl.store(target + empty, tl.full((1024,), -1, tl.int32), mask=empty < topk)
    if valid_counts is not None:
        tl.store(valid_counts + token, count)


def piece_size(topk: int, num_columns: int) -> int:
    """Numbers of a piece: four times what is kept, or twice for `topk` above 2,048, so that rows soon get short.

    A row of up to LARGE_PIECE columns is one piece, so that nothing is held beside it.
    """
    return SMALL_PIECE if 4 * topk <= SMALL_PIECE and not SMALL_PIECE < num_columns <= LARGE_PIECE else LARGE_PIECE


def pieces_of_levels(topk: int, num_columns: int) -> list[int]:
    """Pieces of a row, of what is kept of them, and so on, down to one."""
    size = piece_size(topk, num_columns)
    pieces = [max(1, cdiv(num_columns, size))]
    while pieces[-1] > 1:
        pieces.append(cdiv(pieces[-1] * topk, size))
    return pieces


def kept_bytes(topk: int, num_columns: int) -> int:
    """Bytes that a row takes beside its scores: a score and a column of all that is kept of several pieces."""
    return sum(8 * topk * pieces for pieces in pieces_of_levels(topk, num_columns) if pieces > 1)


def select_rows(
    scores: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    block_table: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
    block_size: int,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
) -> None:
    """The columns, or slots, of each row's largest scores, in ascending order of columns."""
    num_tokens, num_columns = scores.shape
    size, columns = piece_size(topk, num_columns), None
    num_requests, max_blocks = (0, 0) if block_table is None else block_table.shape
    for pieces in pieces_of_levels(topk, num_columns):
        last = pieces == 1
        kept_scores = kept = None
        if not last:
            kept = torch.empty(num_tokens, pieces * topk, dtype=torch.int32, device=scores.device)
            kept_scores = torch.empty_like(kept, dtype=torch.float32)
        target = indices if kept is None else kept
        # four neighbours to a thread, where rows begin at a multiple
        strides = (scores.stride(0), 0 if columns is None else columns.stride(0))
        unit = 4 if all(stride % 4 == 0 for stride in strides) else 1
        _select_kernel[(num_tokens, pieces)](
            scores,
            columns,
            row_starts if columns is None else None,
            row_ends if columns is None else None,
            block_table if last else None,
            req_id_per_token if last else None,
            kept_scores,
            target,
            valid_counts if last else None,
            topk,
            num_columns,
            num_requests,
            max_blocks,
            max(block_size, 1),
            scores.stride(0) // unit,
            0 if columns is None else columns.stride(0) // unit,
            0 if block_table is None else block_table.stride(0),
            0 if kept_scores is None else kept_scores.stride(0),
            target.stride(0),
            PIECE=size,
            UNIT=unit,
            num_warps=size // 1024,
        )
        if kept_scores is not None:
            scores, columns, num_columns = kept_scores, kept, pieces * topk
