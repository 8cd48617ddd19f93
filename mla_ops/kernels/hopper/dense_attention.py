"""Dense MLA on SM90: prefill, in a file of its own, and paged attention by the sparse kernels, told that every position
was chosen.

Without indices a turn's keys are neighbours within a block, and the gather takes 16 of them in one copy. A row's keys
are shared among up to 16 CTAs of a cluster, or of a group; where that leaves SMs idle, several clusters take a part of
them each, and their float32 results are merged by a second kernel (`merge_parts`), launched before the first one ends.
Rows of unequal lengths are shared evenly among all CTAs (`balance.py`).
"""

from __future__ import annotations

import functools

import torch

from ...dispatch import Call, Lowering
from . import sparse_attention
from .balance import balance_for
from .by_length import by_length_for
from .costs import Costs, costs_of
from .launch import (
    KERNELS,
    MOST_SHARES,
    TILE_KEYS,
    Balance,
    ByLength,
    Clusters,
    Group,
    KeyFormat,
    Packing,
    Shape,
    clusters_at_once,
    groups_for,
    splits_for,
    tiles_for,
)
from .packed import packing_for
from .params import NO_CACHE, cache_params
from .prefill_attention import prefill_attention, prefill_reason
from .waves import Wave, fastest_waves, forced, launch_waves

SPARSE = "paged_sparse_attention"
MAX_KEYS = 2**31 - TILE_KEYS  # a row has no more: positions are 32 bits
SPLIT_COUNTS = (1, 2, 3, 4, 6, 8)
# Groups with more keys take longer for them than they gain by needing no second kernel.
GROUP_TURNS, MEMBER_TURNS = 128, 16
MAX_TURNS_IN_PARTS = 2**23  # turns times shares are 32 bits


def paged_reason(call: Call) -> str | None:
    return sparse_attention.LOWERINGS[SPARSE].unsupported_reason(call._replace(op=SPARSE))


def choose(
    keys: KeyFormat,
    num_tokens: int,
    num_heads: int,
    capacity: int,
    at_once: tuple[int, ...],
    costs: Costs,
    most_parts: int = SPLIT_COUNTS[-1],
) -> tuple[Wave, ...]:
    """The least predicted time, from shapes alone.

    Args:
        keys: the kernel.
        num_tokens: query tokens.
        num_heads: heads.
        capacity: keys that a request's blocks can hold.
        at_once: clusters that the device runs at one time, for each size in `SPLITS`.
        costs: times of the device.
        most_parts: of a row.
    """
    turns = max(1, -(-capacity // TILE_KEYS))
    if turns > MAX_TURNS_IN_PARTS:
        most_parts = 1
    shapes: list[Clusters | Group] = [
        Clusters(tile, splits, parts)
        for tile in tiles_for(keys, num_heads)
        for parts in SPLIT_COUNTS
        for splits in splits_for(-(-turns // parts))
        if parts <= most_parts and splits * parts <= turns and (parts == 1 or splits > 1)
    ]
    if turns <= GROUP_TURNS:
        shapes += [group for group in groups_for(keys, num_heads, turns) if turns <= MEMBER_TURNS * group.members]
    return fastest_waves(keys, shapes, num_tokens, num_heads, turns, at_once, costs)


def deterministic_shapes(keys: KeyFormat, num_heads: int, capacity: int) -> list[Shape]:
    """Launches that give a row the same bits, whatever its length and the width of the table."""
    tile, turns = tiles_for(keys, num_heads)[0], max(1, -(-capacity // TILE_KEYS))
    # More shares leave many rows waiting where no kernel's CTAs take several.
    shares = sparse_attention.SHARES_IN_REGISTERS.get(tile, MOST_SHARES) if keys.quantized else 4
    return sparse_attention.shapes_of_shares(keys, tile, shares, groups_for(keys, num_heads, turns))


@functools.lru_cache(maxsize=4096)
def _deterministic_waves(
    keys: KeyFormat, num_tokens: int, num_heads: int, capacity: int, device_index: int
) -> tuple[Wave, ...]:
    at_once = clusters_at_once(keys, tiles_for(keys, num_heads)[0], device_index)
    shapes, turns = deterministic_shapes(keys, num_heads, capacity), max(1, -(-capacity // TILE_KEYS))
    return sparse_attention.fastest_shape(keys, shapes, num_tokens, num_heads, turns, at_once, costs_of(device_index))


@functools.lru_cache(maxsize=4096)
def _waves(keys: KeyFormat, num_tokens: int, num_heads: int, capacity: int, device_index: int) -> tuple[Wave, ...]:
    at_once = clusters_at_once(keys, tiles_for(keys, num_heads)[0], device_index)
    return choose(keys, num_tokens, num_heads, capacity, at_once, costs_of(device_index))


@functools.lru_cache(maxsize=4096)
def _balance(keys: KeyFormat, num_tokens: int, num_heads: int, capacity: int, device_index: int) -> Balance | None:
    waves = _waves(keys, num_tokens, num_heads, capacity, device_index)
    at_once = clusters_at_once(keys, tiles_for(keys, num_heads)[0], device_index)
    return balance_for(keys, waves, num_tokens, num_heads, -(-capacity // TILE_KEYS), at_once, costs_of(device_index))


@functools.lru_cache(maxsize=4096)
def _by_length(
    keys: KeyFormat, num_tokens: int, num_heads: int, capacity: int, device_index: int
) -> tuple[Clusters, ByLength] | None:
    waves = _waves(keys, num_tokens, num_heads, capacity, device_index)
    at_once = clusters_at_once(keys, tiles_for(keys, num_heads)[0], device_index)
    return by_length_for(keys, waves, num_heads, -(-capacity // TILE_KEYS), at_once, costs_of(device_index))


@functools.lru_cache(maxsize=4096)
def _packing(
    keys: KeyFormat, num_tokens: int, num_heads: int, capacity: int, device_index: int
) -> tuple[Clusters, Packing] | None:
    waves = _waves(keys, num_tokens, num_heads, capacity, device_index)
    at_once = clusters_at_once(keys, tiles_for(keys, num_heads)[0], device_index)
    return packing_for(keys, waves, num_heads, -(-capacity // TILE_KEYS), at_once)


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    key_lens: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    q_rope: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return
    rows, head_dim = sparse_attention.paged_rows(kv_cache, cache_format, "kv_cache", "paged_attention")
    keys = KERNELS[cache_format, head_dim]
    capacity = min(block_table.shape[1] * rows.block_size, MAX_KEYS)
    waves, balance, by_length, packing = forced(num_tokens), None, None, None
    if not waves:
        call = keys, num_tokens, num_heads, capacity, q.device.index
        if deterministic:
            waves = _deterministic_waves(*call)
        elif packed := _packing(*call):
            waves, packing = [Wave(num_tokens, packed[0])], packed[1]
        elif found := _by_length(*call):
            waves, by_length = [Wave(num_tokens, found[0])], found[1]
        else:
            waves, balance = _waves(*call), _balance(*call)
    launch_waves(
        keys,
        waves,
        q,
        (cache_params(rows, None, key_lens, block_table, capacity), NO_CACHE),
        softmax_scale,
        q_rope=q_rope,
        attn_sink=None,
        req_id_per_token=req_id_per_token,
        out=out,
        lse=lse,
        balance=balance,
        by_length=by_length,
        packing=packing,
        deterministic=deterministic,
    )


LOWERINGS = {
    "paged_attention": Lowering(paged_attention, paged_reason, deterministic=True),
    "prefill_attention": Lowering(prefill_attention, prefill_reason),
}
