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


def _write(slots: torch.Tensor, compact: bool, out: torch.Tensor, counts: torch.Tensor) -> None:
    """Writes int64 slots, -1 where they are negative or not int32, and how many of each row are neither."""
    slots = torch.where((slots >= 0) & (slots <= INT32_MAX), slots, -1).to(torch.int32)
    valid = slots >= 0
    if compact:
        order = torch.argsort((~valid).to(torch.int8), dim=1, stable=True)
        slots = slots.gather(1, order)
    out.copy_(slots)
    counts.copy_(valid.sum(1))


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
    _write(slots, compact, out, valid_counts)


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
    slots = translate(req_id_per_token, block_table, topk_indices, block_size, num_blocks)
    _write(slots, True, indices, lens)


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
    position = positions.long().unsqueeze(1)
    local = (position - window + 1).clamp(min=0) + torch.arange(window, device=positions.device)
    local = torch.where(local <= position, local, -1)
    _write(translate(req_id_per_token, block_table, local, block_size, num_blocks), True, indices, lens)


def _complete_groups(positions: torch.Tensor, compress_ratio: int) -> torch.Tensor:
    """Compressed tokens that each position may see: those whose whole group lies at or before it."""
    return (positions.long() + 1).clamp(min=0).div(compress_ratio, rounding_mode="floor")


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
    complete = _complete_groups(positions, compress_ratio).unsqueeze(1)
    local = torch.arange(width, device=positions.device).expand(positions.shape[0], width)
    local = torch.where(local < complete, local, -1)
    _write(translate(req_id_per_token, block_table, local, block_size, num_blocks), True, indices, lens)


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
    num_requests = seq_lens.shape[0]
    if num_requests == 0:
        indices.fill_(-1)
        lens.zero_()
        return
    request = req_id_per_token.long().unsqueeze(1)
    position = positions.long().unsqueeze(1)
    live = (request >= 0) & (request < num_requests) & (position >= 0)
    request = request.clamp(0, num_requests - 1)
    seq_len = seq_lens.long()[request]
    gather_start = seq_len - torch.minimum(gather_lens.long()[request], seq_len).clamp(min=0)

    chosen = topk_indices.long()
    complete = _complete_groups(positions, compress_ratio).unsqueeze(1).clamp(max=window_offset)
    chosen = torch.where((chosen >= 0) & (chosen < complete), chosen, -1)

    # the same positions as in `sliding_window_indices`, of which only the gathered ones have a row
    place = (position - window + 1).clamp(min=0) + torch.arange(window, device=positions.device)
    row = window_offset + place - gather_start
    gathered = (place <= position) & (place >= gather_start) & (place < seq_len) & (row < request_stride)

    rows = torch.cat((chosen, torch.where(gathered, row, -1)), dim=1)
    rows = torch.where(live & (rows >= 0), rows + request * request_stride, -1)
    _write(rows, True, indices, lens)


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
    "combine_topk_swa_indices": Lowering(combine_topk_swa_indices),
    "compressed_indices": Lowering(compressed_indices),
    "compute_global_topk_indices_and_lens": Lowering(compute_global_topk_indices_and_lens),
    "convert_req_index_to_global_index": Lowering(convert_req_index_to_global_index),
    "filter_prefill_indices": Lowering(filter_prefill_indices),
    "sliding_window_indices": Lowering(sliding_window_indices),
}
