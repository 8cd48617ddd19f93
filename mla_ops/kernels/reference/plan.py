"""Step metadata in plain PyTorch."""

from __future__ import annotations

import torch

from ...dispatch import Lowering
from .index import INT32_MAX


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
    num_tokens = query_start_loc[-1:]
    query_start_loc_buffer.copy_(num_tokens.expand_as(query_start_loc_buffer))
    query_start_loc_buffer[: num_requests + 1] = query_start_loc
    seq_lens_buffer.zero_()
    seq_lens_buffer[:num_requests] = seq_lens
    block_table_buffer.fill_(-1)
    block_table_buffer[:num_requests, :max_blocks] = block_table

    token = torch.arange(req_id_per_token.shape[0], dtype=torch.int32, device=seq_lens.device)
    live = (token >= query_start_loc[0]) & (token < num_tokens)
    request = torch.searchsorted(query_start_loc[1:].contiguous(), token, right=True)
    last = max(num_requests - 1, 0)
    safe = request.clamp(max=last)
    if num_requests == 0:
        live = torch.zeros_like(live)
        position = torch.zeros_like(token)
    else:
        # 64 bits: seq_lens may hold anything
        position = token.long() - query_start_loc[safe + 1] + seq_lens[safe]
        live &= (position >= 0) & (position < INT32_MAX)
    req_id_per_token.copy_(torch.where(live, request, -1))
    positions.copy_(torch.where(live, position, 0))
    key_lens.copy_(torch.where(live, position + 1, 0))
    topk_length.copy_(torch.where(live, (position + 1).clamp(max=index_topk), 0))

    column = position.long().div(block_size, rounding_mode="floor")
    if num_requests == 0 or max_blocks == 0:
        slot_mapping.fill_(-1)
        return
    block = block_table[safe, column.clamp(0, max_blocks - 1)].long()
    writable = live & (column < max_blocks) & (block >= 0)
    slot_mapping.copy_(torch.where(writable, block * block_size + position % block_size, -1))


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
    block_table_buffer.fill_(-1)
    block_table_buffer[:num_requests, :max_blocks] = block_table

    end = positions.long() + 1
    live = (req_id_per_token >= 0) & (req_id_per_token < num_requests) & (end > 0)
    length = torch.where(live, end // compress_ratio, 0)
    compressed_lens.copy_(length.clamp(max=INT32_MAX))
    if num_requests == 0 or max_blocks == 0:
        slot_mapping.fill_(-1)
        return
    index = length - 1
    column = index.div(block_size, rounding_mode="floor")
    writable = live & (end % compress_ratio == 0) & (column < max_blocks)
    request = req_id_per_token.long().clamp(0, num_requests - 1)
    block = block_table[request, column.clamp(0, max_blocks - 1)].long()
    slot_mapping.copy_(torch.where(writable & (block >= 0), block * block_size + index % block_size, -1))


KEY_BLOCK = 64
NUM_SHARES = 16


def candidate_shares(capacity: int, device: torch.device) -> torch.Tensor:
    """Blocks of a part, `[16]`: falling by half octaves from the longest row that may be."""
    candidate = torch.arange(NUM_SHARES, device=device)
    return -(-capacity * (4 - candidate % 2) // (4 << candidate // 2))


def parts_for(blocks: torch.Tensor, share: torch.Tensor, cluster_size: int) -> torch.Tensor:
    """The power of two of parts that `blocks` are split into so that a part has at most `share`, if that suffices."""
    parts = torch.ones_like(blocks)
    for power in (1, 2, 4, 8):
        parts = torch.where(blocks > power * share, 2 * power, parts)
    return parts.clamp(max=cluster_size)


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
    num_slots, num_tokens = num_clusters * cluster_size, topk_length.shape[0]
    slots = tile_scheduler_metadata.view(-1, 2)
    if num_tokens == 0:
        slots[:, 0], slots[:, 1] = -1, 1
        return

    def count_blocks(length: torch.Tensor, columns: int) -> torch.Tensor:
        return (length.long().clamp(0, columns) + KEY_BLOCK - 1) // KEY_BLOCK

    extra_length = extra_topk_length if extra_topk_length is not None else torch.full_like(topk_length, INT32_MAX)
    blocks = count_blocks(topk_length, topk) + count_blocks(extra_length, extra_topk)
    live = blocks > 0
    if deterministic:
        parts = torch.where(live, cluster_size, 1)
    else:
        capacity = -(-topk // KEY_BLOCK) + -(-extra_topk // KEY_BLOCK)
        share = candidate_shares(capacity, blocks.device)
        candidates = parts_for(blocks[:, None], share, cluster_size)
        needed = candidates.where(live[:, None], 0).sum(0)
        longest = blocks.max()
        slot = overhead + torch.maximum(share.clamp(max=longest), -(-longest // cluster_size))
        # both are upper bounds: whole rounds of the longest slot, and the average beside one longest slot
        rounds = -(-needed // num_workers) * num_workers * slot
        average = needed * overhead + blocks.sum() + num_workers * slot
        fits = needed + (~live).sum() <= num_slots
        time = torch.minimum(rounds, average).where(fits, torch.iinfo(torch.int64).max)
        parts = candidates[:, time.argmin()]

    row = torch.argsort(blocks, descending=True, stable=True)
    slot = torch.arange(num_slots, device=row.device)
    position = torch.searchsorted(parts[row].cumsum(0), slot, right=True)
    entry = row[position.clamp(max=num_tokens - 1)]
    slots[:, 0] = torch.where(position < num_tokens, entry, -1)
    slots[:, 1] = torch.where(position < num_tokens, parts[entry], 1)


LOWERINGS = {
    "build_compressed_metadata": Lowering(build_compressed_metadata),
    "build_step_metadata": Lowering(build_step_metadata),
    "plan_sparse_attention": Lowering(plan_sparse_attention),
}
