"""The compressor of DeepSeek-V4 in plain PyTorch, float32 inside."""

from __future__ import annotations

import math

import torch

from ...dispatch import Lowering
from ...formats import ROPE_DIM, get_format
from .cache import concat_and_cache
from .indexer import write_index_cache

# states that are gathered at once; with 512 channels, 16 MB for each of keys and scores
STATES_AT_ONCE = 8192


def _state_rows(
    state_cache: torch.Tensor, state_block_table: torch.Tensor, request: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each (request, position) in the flattened state cache, and whether there is one. Both int64, any shape."""
    num_blocks, block_size, _ = state_cache.shape
    column = position // block_size % state_block_table.shape[1]
    block = state_block_table[request, column].long()
    return block * block_size + position % block_size, (block >= 0) & (block < num_blocks)


def _equals_at(values: torch.Tensor, row: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Whether `values[row] == expected`; False for a row that does not exist."""
    there = (row >= 0) & (row < values.shape[0])
    return there & (values[row.clamp(0, values.shape[0] - 1)] == expected)


def _rotate_tail(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates the neighbouring pairs of the last 64 dims, in place of each other."""
    head, tail = x.split((x.shape[-1] - ROPE_DIM, ROPE_DIM), dim=-1)
    cos, sin = cos_sin.split(ROPE_DIM // 2, dim=-1)
    first, second = tail[..., 0::2], tail[..., 1::2]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((head, rotated.flatten(-2)), dim=-1)


def compress_and_cache(
    kv: torch.Tensor,
    score: torch.Tensor,
    position_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    state_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    state_block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    eps: float,
    cache_format: str,
) -> None:
    num_tokens, width = kv.shape
    num_requests, max_blocks = state_block_table.shape
    ratio, head_dim = position_bias.shape[0], norm_weight.shape[0]
    window = ratio * (width // head_dim)
    capacity = max_blocks * state_cache.shape[1]
    request, position = req_id_per_token.long(), positions.long()
    live = (request >= 0) & (request < num_requests) & (position >= 0)

    completes = live & ((position + 1) % ratio == 0) & (slot_mapping >= 0)
    completes &= position - (ratio - 1) < cos_sin.shape[0]
    # a group's states lie `back` tokens before its last one; it takes half `series` of each
    back = torch.arange(window - 1, -1, -1, device=kv.device)
    series = (torch.arange(window, device=kv.device) // ratio).view(1, window, 1).expand(-1, -1, head_dim)
    for rows in completes.nonzero().squeeze(1).split(max(STATES_AT_ONCE // window, 1)):
        owner = request[rows].unsqueeze(1).expand(-1, window)
        source = position[rows].unsqueeze(1) - back
        row = rows.unsqueeze(1) - back
        here = _equals_at(request, row, owner) & _equals_at(position, row, source) & (source >= 0)
        slots, stored = _state_rows(state_cache, state_block_table, owner, source.clamp(min=0))
        stored &= (source >= 0) & ~here
        states = kv.new_zeros((len(rows), window, 2 * width), dtype=torch.float32)
        states[..., width:] = -torch.inf
        states[stored] = state_cache[slots[stored] // state_cache.shape[1], slots[stored] % state_cache.shape[1]]
        states[here] = torch.cat((kv[row[here]].float(), score[row[here]] + position_bias[source[here] % ratio]), dim=1)

        states = states.view(len(rows), window, 2, width // head_dim, head_dim)
        keys, scores = (
            states[:, :, part].gather(2, series.expand(len(rows), -1, -1).unsqueeze(2)).squeeze(2) for part in (0, 1)
        )
        pooled = (keys * scores.softmax(dim=1)).sum(dim=1)
        normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
        entry = _rotate_tail(normed, cos_sin[position[rows] - (ratio - 1)])
        entry = entry.masked_fill(entry.isnan(), math.nan)  # NaN of one pattern of bits
        if get_format(cache_format).index_only:
            write_index_cache(entry, kv_cache, slot_mapping[rows], cache_format)
        else:
            latent, rope = entry.split((head_dim - ROPE_DIM, ROPE_DIM), dim=1)
            concat_and_cache(latent, rope, kv_cache, slot_mapping[rows], cache_format)

    # only now: a group may need what this step's tokens replace
    row = torch.arange(num_tokens, device=kv.device) + capacity
    replaced = _equals_at(request, row, request) & _equals_at(position, row, position + capacity)
    kept = (live & ~replaced).nonzero().squeeze(1)
    slots, stored = _state_rows(state_cache, state_block_table, request[kept], position[kept])
    slots, kept = slots[stored], kept[stored]
    states = torch.cat((kv[kept].float(), score[kept] + position_bias[position[kept] % ratio]), dim=1)
    state_cache[slots // state_cache.shape[1], slots % state_cache.shape[1]] = states


LOWERINGS = {"compress_and_cache": Lowering(compress_and_cache)}
