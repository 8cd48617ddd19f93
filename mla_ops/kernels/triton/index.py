"""Index ops in Triton. Order is that of the reference: no atomics, scans only."""

import torch
import triton.language as tl

from ...dispatch import Lowering
from .common import cdiv, sized_jit

INT32_MAX = 2**31 - 1
# indices a program looks at in one go: 8 a thread, and topk 2048 is two rounds
CONVERT_BLOCK = 1024
FILTER_BLOCK = 1024


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
    request = tl.load(req_id_per_token + token)
    known = (request >= 0) & (request < num_requests)
    table = block_table + request.to(tl.int64) * stride_table
    source = token_indices + token * stride_indices
    target = out + token * stride_out
    count = 0
    for start in range(0, topk, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        index = tl.load(source + entry, mask=entry < topk, other=-1)
        column = index // block_size
        valid = known & (index >= 0) & (column < max_blocks)
        block = tl.load(table + column, mask=valid, other=-1).to(tl.int64)
        slot = block * block_size + index % block_size
        valid &= (block >= 0) & (block < num_blocks) & (slot <= 0x7FFFFFFF)
        chosen = valid.to(tl.int32)
        if COMPACT:
            rank = count + tl.cumsum(chosen, 0) - chosen
            tl.store(target + rank, slot.to(tl.int32), mask=valid)
        else:
            tl.store(target + entry, tl.where(valid, slot, -1).to(tl.int32), mask=entry < topk)
        count += tl.sum(chosen, 0)
    if COMPACT:
        for start in range(count, topk, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            tl.store(target + entry, tl.full((BLOCK,), -1, tl.int32), mask=entry < topk)
    tl.store(valid_counts + token, count)


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
    "convert_req_index_to_global_index": Lowering(convert_req_index_to_global_index),
    "filter_prefill_indices": Lowering(filter_prefill_indices),
}
