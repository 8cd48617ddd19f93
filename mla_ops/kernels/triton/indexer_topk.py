"""Top-k of rows of scores in Triton: in the order of columns or of scores, and the merge of chosen ones.

Which scores are kept: `indexer_topk_rows.py`. The merge selects by digits: four passes over the candidates fix
the k-th largest number; each counts, in 256 bins, the next 8 bits of the scores that agree with the digits so far.
"""

import torch
import triton
import triton.language as tl

from .common import cdiv, sized_jit
from .indexer_topk_rows import order_of, select_rows
from .requests import ANY_BLOCK, Blocks, find_slot, request_of

NUM_WARPS = 8
# candidates that a program of the merging kernel looks at in one go: two shards' of 2,048
CANDIDATES = 4096
# entries that a program of the ordering kernel ranks
RANKED = 128


@sized_jit(any_alignment=("chosen", "block_table", "req_id_per_token", "indices", "valid_counts"))
def _order_kernel(
    scores,
    chosen,
    block_table,
    req_id_per_token,
    indices,
    valid_counts,
    topk: tl.int32,
    num_requests: tl.int32,
    max_blocks: tl.int32,
    block_size: tl.int32,
    stride_scores: tl.int64,
    stride_chosen: tl.int64,
    stride_table: tl.int64,
    stride_indices: tl.int64,
    RANKED: tl.constexpr,
):
    """Puts chosen columns, which stand in ascending order, into the order of their scores; slots on request.

    Grid: (rows, pieces of RANKED entries). An entry's place is the number of entries before it: those of a higher
    score, and those of the same score on its left.
    """
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * RANKED + tl.arange(0, RANKED)
    count = tl.load(valid_counts + token)
    row = scores + token * stride_scores
    source = chosen + token * stride_chosen
    there = entry < count
    column = tl.load(source + entry, mask=there, other=0)
    order = order_of(tl.load(row + column, mask=there, other=0.0))
    place = tl.zeros((RANKED,), tl.int32)
    for first in range(0, count, RANKED):
        other = first + tl.arange(0, RANKED)
        left = tl.load(source + other, mask=other < count, other=0)
        theirs = order_of(tl.load(row + left, mask=other < count, other=0.0))[:, None]
        before = (theirs > order[None, :]) | ((theirs == order[None, :]) & (other[:, None] < entry[None, :]))
        place += tl.sum((before & (other < count)[:, None]).to(tl.int32), 0)
    value = column
    if block_table is not None:
        request, known = request_of(req_id_per_token, token, num_requests)
        blocks = Blocks(block_table + request * stride_table, known, max_blocks, block_size, ANY_BLOCK)
        slot, found = find_slot(blocks, column, there)
        value = tl.where(found, slot, -1).to(tl.int32)
    target = indices + token * stride_indices
    tl.store(target + place, value, mask=there)
    tl.store(target + entry, tl.full((RANKED,), -1, tl.int32), mask=(entry >= count) & (entry < topk))


@triton.jit
def _candidates(row, source, first, num_candidates, BLOCK: tl.constexpr):
    """Scores' numbers and the complements of positions, 32 bits whose larger one comes first, and which are any."""
    column = first + tl.arange(0, BLOCK)
    index = tl.load(source + column, mask=column < num_candidates, other=-1)
    order = order_of(tl.load(row + column, mask=column < num_candidates, other=0.0))
    number = (order ^ -0x80000000).to(tl.uint32, bitcast=True)
    return number, (0x7FFFFFFF - index).to(tl.uint32, bitcast=True), index >= 0


@triton.jit
def _last_kept(row, source, num_candidates, wanted, tied, TIES: tl.constexpr, BLOCK: tl.constexpr):
    """The `wanted`-th largest number of a row's candidates, how many of its equals to keep, and how many there are.

    With TIES of the positions' complements, among the candidates whose score has the number `tied`.
    """
    bins = tl.arange(0, 512)
    prefix = tl.full((), 0, tl.uint32)
    equals = num_candidates
    for digit in tl.static_range(4):
        shift = 24 - 8 * digit
        counts = tl.zeros((512,), tl.int32)
        for first in range(0, num_candidates, BLOCK):
            number, complement, valid = _candidates(row, source, first, num_candidates, BLOCK)
            if TIES:
                valid &= number == tied
                number = complement
            if digit > 0:
                valid &= (number >> (shift + 8)) == prefix
            place = ((number >> shift) & 0xFF).to(tl.int32)
            counts += tl.histogram(tl.where(valid, place, 256), 512)
        counts = tl.where(bins < 256, counts, 0)
        above = tl.cumsum(counts, 0, reverse=True)
        chosen = tl.sum(((above >= wanted) & (bins < 256)).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(bins > chosen, counts, 0), 0)
        equals = tl.sum(tl.where(bins == chosen, counts, 0), 0)
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    return prefix, wanted, equals


@sized_jit(any_alignment=("indices", "kept_indices", "counts"))
def _merge_kernel(
    scores,
    indices,
    kept_scores,
    kept_indices,
    counts,
    topk: tl.int32,
    num_candidates: tl.int32,
    stride_scores: tl.int64,
    stride_indices: tl.int64,
    stride_kept: tl.int64,
    BLOCK: tl.constexpr,
):
    """Keeps the best candidates of one row, in the order in which they stand.

    Grid: (rows,). Four digits fix the score of the last one kept; where not all of its equals are kept, four more fix
    the position of the last. Among candidates that have both, as many as are wanted stay.
    """
    token = tl.program_id(0).to(tl.int64)
    row = scores + token * stride_scores
    source = indices + token * stride_indices
    number_valid = 0
    for first in range(0, num_candidates, BLOCK):
        _, _, valid = _candidates(row, source, first, num_candidates, BLOCK)
        number_valid += tl.sum(valid.to(tl.int32), 0)
    least = tl.full((), 0, tl.uint32)
    last = tl.full((), 0, tl.uint32)
    wanted = num_candidates
    if number_valid > topk:
        least, above, equals = _last_kept(row, source, num_candidates, topk, 0, False, BLOCK)
        if equals > above:
            last, wanted, _ = _last_kept(row, source, num_candidates, above, least, True, BLOCK)
    count = 0
    same = 0
    for first in range(0, num_candidates, BLOCK):
        number, complement, valid = _candidates(row, source, first, num_candidates, BLOCK)
        equal = (valid & (number == least) & (complement == last)).to(tl.int32)
        chosen = (equal > 0) & (same + tl.cumsum(equal, 0) - equal < wanted)
        better = valid & ((number > least) | ((number == least) & (complement > last)))
        kept = (better | chosen).to(tl.int32)
        column = first + tl.arange(0, BLOCK)
        place = token * stride_kept + count + tl.cumsum(kept, 0) - kept
        tl.store(kept_scores + place, tl.load(row + column, mask=kept > 0), mask=kept > 0)
        tl.store(kept_indices + place, tl.load(source + column, mask=kept > 0), mask=kept > 0)
        same += tl.sum(equal, 0)
        count += tl.sum(kept, 0)
    tl.store(counts + token, count)


@sized_jit(any_alignment=("kept_indices", "counts", "best_indices"))
def _ascend_kernel(
    kept_scores,
    kept_indices,
    counts,
    best_scores,
    best_indices,
    topk: tl.int32,
    stride_kept: tl.int64,
    stride_scores: tl.int64,
    stride_indices: tl.int64,
    BLOCK: tl.constexpr,
):
    """Puts kept candidates into ascending order of position. Grid: (rows, pieces of BLOCK entries)."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + token)
    source = kept_indices + token * stride_kept
    there = entry < count
    index = tl.load(source + entry, mask=there, other=0)
    score = tl.load(kept_scores + token * stride_kept + entry, mask=there, other=0.0)
    place = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, BLOCK):
        other = first + tl.arange(0, BLOCK)
        theirs = tl.load(source + other, mask=other < count, other=0x7FFFFFFF)
        before = theirs[:, None] < index[None, :]
        before |= (theirs[:, None] == index[None, :]) & (other[:, None] < entry[None, :])
        before &= (other < count)[:, None]
        place += tl.sum(before.to(tl.int32), 0)
    tl.store(best_scores + token * stride_scores + place, score, mask=there)
    tl.store(best_indices + token * stride_indices + place, index, mask=there)
    empty = (entry >= count) & (entry < topk)
    tl.store(best_scores + token * stride_scores + entry, tl.full((BLOCK,), float("-inf"), tl.float32), mask=empty)
    tl.store(best_indices + token * stride_indices + entry, tl.full((BLOCK,), -1, tl.int32), mask=empty)


def topk_indices(
    scores: torch.Tensor,
    topk: int,
    *,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    block_size: int = 0,
    sorted: bool = False,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
) -> None:
    num_tokens = scores.shape[0]
    if num_tokens == 0:
        return
    table, chosen = block_table, torch.empty_like(indices) if sorted else indices
    tables = (None, None) if sorted else (table, req_id_per_token)
    select_rows(scores, topk, row_starts, row_ends, *tables, block_size, chosen, valid_counts)
    if sorted:
        num_requests, max_blocks = (0, 0) if table is None else table.shape
        _order_kernel[(num_tokens, cdiv(topk, RANKED))](
            scores,
            chosen,
            table,
            req_id_per_token,
            indices,
            valid_counts,
            topk,
            num_requests,
            max_blocks,
            max(block_size, 1),
            scores.stride(0),
            chosen.stride(0),
            0 if table is None else table.stride(0),
            indices.stride(0),
            RANKED=RANKED,
            num_warps=4,
        )


def merge_topk(
    scores: torch.Tensor, indices: torch.Tensor, topk: int, *, best_scores: torch.Tensor, best_indices: torch.Tensor
) -> None:
    num_tokens, num_candidates = scores.shape
    if num_tokens == 0:
        return
    kept_scores = torch.empty(num_tokens, topk, dtype=torch.float32, device=scores.device)
    kept_indices = torch.empty_like(kept_scores, dtype=torch.int32)
    counts = torch.empty(num_tokens, dtype=torch.int32, device=scores.device)
    _merge_kernel[(num_tokens,)](
        scores,
        indices,
        kept_scores,
        kept_indices,
        counts,
        topk,
        num_candidates,
        scores.stride(0),
        indices.stride(0),
        topk,
        BLOCK=CANDIDATES,
        num_warps=2 * NUM_WARPS,
    )
    _ascend_kernel[(num_tokens, cdiv(topk, RANKED))](
        kept_scores,
        kept_indices,
        counts,
        best_scores,
        best_indices,
        topk,
        topk,
        best_scores.stride(0),
        best_indices.stride(0),
        BLOCK=RANKED,
        num_warps=4,
    )
