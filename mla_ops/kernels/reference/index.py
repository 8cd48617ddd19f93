"""Index ops in plain PyTorch."""

from __future__ import annotations

import torch

from ...dispatch import Lowering

INT32_MAX = 2**31 - 1


def translate(
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    block_size: int,
    num_blocks: int | None,
) -> torch.Tensor:
    """Request-local token indices `[num_tokens, topk]` to int64 slots; -1 where anything is out of range."""
    num_requests, max_blocks = block_table.shape
    if num_requests == 0 or max_blocks == 0:
        return torch.full_like(token_indices, -1, dtype=torch.int64)
    request = req_id_per_token.long().unsqueeze(1)
    index = token_indices.long()
    column = index.div(block_size, rounding_mode="floor")
    valid = (index >= 0) & (column < max_blocks) & (request >= 0) & (request < num_requests)
    block = block_table[request.clamp(0, num_requests - 1), column.clamp(0, max_blocks - 1)].long()
    valid &= block >= 0
    if num_blocks is not None:
        valid &= block < num_blocks
    return torch.where(valid, block * block_size + index % block_size, -1)


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
    slots = translate(req_id_per_token, block_table, token_indices, block_size, num_blocks)
    slots = torch.where(slots <= INT32_MAX, slots, -1).to(torch.int32)
    valid = slots >= 0
    if compact:
        order = torch.argsort((~valid).to(torch.int8), dim=1, stable=True)
        slots = slots.gather(1, order)
    out.copy_(slots)
    valid_counts.copy_(valid.sum(1))


def filter_prefill_indices(
    indices: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    context_indices: torch.Tensor,
    new_indices: torch.Tensor,
) -> None:
    context = context_lens.unsqueeze(1)
    in_context = (indices >= 0) & (indices < context)
    context_indices.copy_(torch.where(in_context, indices, -1))
    new_indices.copy_(torch.where((indices >= 0) & ~in_context, indices - context, -1))


LOWERINGS = {
    "convert_req_index_to_global_index": Lowering(convert_req_index_to_global_index),
    "filter_prefill_indices": Lowering(filter_prefill_indices),
}
