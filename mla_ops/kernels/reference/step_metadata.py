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


LOWERINGS = {
    "build_compressed_metadata": Lowering(build_compressed_metadata),
    "build_step_metadata": Lowering(build_step_metadata),
}
