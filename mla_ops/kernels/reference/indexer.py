"""Ops of the lightning indexer in plain PyTorch: what bytes, scores and choices mean."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...dispatch import Lowering
from ...formats import INDEX_DIM, geometry, planar_views
from .cache import convert, quantize_groups

LOWEST_EXPONENT = -22  # the power of two above 1e-4 / 448
TILE_KEYS = 1024
TILE_TOKENS = 16
# an order of scores and positions in one int64: 32 bits of score, 31 bits of position
POSITION_BITS = 31
NONE = torch.iinfo(torch.int64).min
RANKED_VALUES = 1 << 22


def write_index_cache(
    k: torch.Tensor, index_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> None:
    num_blocks, block_size, _, _ = geometry(index_cache, cache_format)
    slots = slot_mapping[: k.shape[0]]
    written = ((slots >= 0) & (slots < num_blocks * block_size)).nonzero().squeeze(1)
    slots, keys = slots[written], k[written]
    place = slots // block_size, slots % block_size
    if cache_format == "fp8_index":
        data, scales = planar_views(index_cache, cache_format)
        e4m3, exponent = quantize_groups(keys, INDEX_DIM, LOWEST_EXPONENT)
        data[place], scales[place] = e4m3, ((exponent + 127) << 23).view(torch.uint8)
    else:
        index_cache[place] = convert(keys, index_cache.dtype)


def read_index_keys(
    index_cache: torch.Tensor, slots: torch.Tensor, cache_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys as stored and their scales at `slots` (int64, any shape, all valid): `[..., 128]` and `[...]`."""
    _, block_size, _, _ = geometry(index_cache, cache_format)
    place = slots // block_size, slots % block_size
    if cache_format != "fp8_index":
        return index_cache[place], torch.ones(slots.shape, dtype=torch.float32, device=slots.device)
    data, scales = planar_views(index_cache, cache_format)
    return data[place].view(torch.float8_e4m3fn), scales[place].view(torch.float32).squeeze(-1)


def slots_of(
    block_table: torch.Tensor, request: torch.Tensor, position: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 slots of positions by each request's blocks, and which of them the table has; others are 0.

    `request` and `position` are int64 and broadcast; an unknown request has no blocks.
    """
    num_requests, max_blocks = block_table.shape
    column = position // block_size
    there = (request >= 0) & (request < num_requests) & (position >= 0) & (column < max_blocks)
    if num_requests * max_blocks == 0:
        return torch.zeros_like(there, dtype=torch.int64), there
    block = block_table[request.clamp(0, num_requests - 1), column.clamp(0, max_blocks - 1)].long()
    there &= block >= 0
    return torch.where(there, block * block_size + position % block_size, 0), there


def gather_index_cache(
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    num_rows: int,
    cache_format: str,
    *,
    k: torch.Tensor,
    k_scale: torch.Tensor,
) -> None:
    num_blocks, block_size, _, _ = geometry(index_cache, cache_format)
    (k.view(torch.uint8) if cache_format == "fp8_index" else k).zero_()
    k_scale.zero_()
    if block_table.shape[0] == 0:
        return
    row = torch.arange(num_rows, device=k.device)
    request = torch.searchsorted(cu_seq_lens[1:].long(), row, right=True).clamp(max=block_table.shape[0] - 1)
    position = row - cu_seq_lens[request]
    covered = (position >= 0) & (position < seq_lens[request]) & (row < cu_seq_lens[request + 1])
    slots, there = slots_of(block_table, request, position, block_size)
    chosen = (covered & there & (slots < num_blocks * block_size)).nonzero().squeeze(1)
    for part in chosen.split(65536):
        keys, scales = read_index_keys(index_cache, slots[part], cache_format)
        if cache_format == "fp8_index":
            k.view(torch.uint8)[part] = keys.view(torch.uint8)
        else:
            k[part] = keys
        k_scale[part] = scales


def quantize_index_query(
    q: torch.Tensor, weights: torch.Tensor, scale: float, *, q_fp8: torch.Tensor, q_weights: torch.Tensor
) -> None:
    e4m3, exponent = quantize_groups(q.reshape(-1, INDEX_DIM), INDEX_DIM, LOWEST_EXPONENT)
    q_fp8.view(torch.uint8).copy_(e4m3.view(q.shape))
    q_scale = ((exponent + 127) << 23).view(torch.float32).view(weights.shape)
    q_weights.copy_(weights.float() * scale * q_scale)


def tile_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Scores of a tile of keys for each token: `[t, H, 128]`, `[t, TILE_KEYS, 128]`, `[t, H]`, `[t, TILE_KEYS]`.

    A tile always has TILE_KEYS keys, so that the library underneath adds up in one order wherever a tile ends.
    """
    products = torch.bmm(q.float(), keys.float().transpose(1, 2))
    return (products.relu() * weights.unsqueeze(-1)).sum(1) * scales


Tiles = Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]


def flat_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    k_scale: torch.Tensor | None,
) -> Tiles:
    """(tokens, columns, scores, whether the row has the column) of all tiles that a row needs."""
    num_kv = k.shape[0]
    starts, ends = row_starts.clamp(0, num_kv), row_ends.clamp(0, num_kv)
    for first in range(0, q.shape[0], TILE_TOKENS):
        tokens = slice(first, min(first + TILE_TOKENS, q.shape[0]))
        live = ends[tokens] > starts[tokens]
        if not live.any():
            continue
        low = int(starts[tokens][live].min()) // TILE_KEYS * TILE_KEYS
        for start in range(low, int(ends[tokens][live].max()), TILE_KEYS):
            columns = slice(start, min(start + TILE_KEYS, num_kv))
            count = columns.stop - columns.start
            keys = torch.zeros(TILE_KEYS, INDEX_DIM, dtype=torch.float32, device=q.device)
            keys[:count] = k[columns].float()
            scales = torch.ones(TILE_KEYS, dtype=torch.float32, device=q.device)
            if k_scale is not None:
                scales[:count] = k_scale[columns]
            rows = q[tokens].shape[0]
            scores = tile_scores(q[tokens], keys.expand(rows, -1, -1), weights[tokens], scales.expand(rows, -1))
            column = torch.arange(columns.start, columns.stop, device=q.device)
            within = (column >= starts[tokens].unsqueeze(1)) & (column < ends[tokens].unsqueeze(1))
            yield tokens, columns, scores[:, :count], within


def paged_tiles(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    max_length: int,
    cache_format: str,
) -> Tiles:
    """Yields tiles as `flat_tiles` does, over the positions of each token's request."""
    num_blocks, block_size, _, _ = geometry(index_cache, cache_format)
    num_requests, max_blocks = block_table.shape
    known = (req_id_per_token >= 0) & (req_id_per_token < num_requests)
    ends = torch.where(known, lengths, 0).clamp(0, min(max_length, max_blocks * block_size))
    for first in range(0, q.shape[0], TILE_TOKENS):
        tokens = slice(first, min(first + TILE_TOKENS, q.shape[0]))
        request = req_id_per_token[tokens].long().unsqueeze(1)
        for start in range(0, int(ends[tokens].max()), TILE_KEYS):
            columns = slice(start, min(start + TILE_KEYS, max_length))
            position = torch.arange(start, start + TILE_KEYS, device=q.device).unsqueeze(0)
            within = position < ends[tokens].unsqueeze(1)
            slots, there = slots_of(block_table, request, position, block_size)
            readable = within & there & (slots < num_blocks * block_size)
            keys = torch.zeros(*readable.shape, INDEX_DIM, dtype=torch.float32, device=q.device)
            scales = torch.zeros(readable.shape, dtype=torch.float32, device=q.device)
            chosen, place = slots[readable].unique(return_inverse=True)  # tokens of one request share their keys
            read, scale = read_index_keys(index_cache, chosen, cache_format)
            keys[readable], scales[readable] = read.float()[place], scale[place]
            scores = tile_scores(q[tokens], keys, weights[tokens], scales)
            scores = torch.where(readable, scores, -torch.inf)
            count = columns.stop - columns.start
            yield tokens, columns, scores[:, :count], within[:, :count]


def _write_scores(tiles: Tiles, clean: bool, out: torch.Tensor) -> None:
    if clean:
        out.fill_(-torch.inf)
    for tokens, columns, scores, within in tiles:
        target = out[tokens, columns]
        target.copy_(torch.where(within, scores, target))


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    clean: bool = False,
    out: torch.Tensor,
) -> None:
    _write_scores(flat_tiles(q, k, weights, row_starts, row_ends, k_scale), clean, out)


def paged_indexer_logits(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    max_length: int,
    cache_format: str,
    *,
    clean: bool = False,
    out: torch.Tensor,
) -> None:
    tiles = paged_tiles(q, index_cache, weights, lengths, block_table, req_id_per_token, max_length, cache_format)
    _write_scores(tiles, clean, out)


def rank(scores: torch.Tensor, position: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """int64 whose order is the op's: higher scores first, then lower positions; NaN last, and what is not valid NONE.

    The bits of a float32 are ordered as sign and magnitude. -0.0 becomes +0.0 before.
    """
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = torch.where(scores.isnan(), torch.iinfo(torch.int32).min, order).long()
    ranked = (order << POSITION_BITS) + ((1 << POSITION_BITS) - 1 - position)
    return torch.where(valid, ranked, NONE)


def positions_of(ranked: torch.Tensor) -> torch.Tensor:
    """Positions behind `rank`, -1 for NONE."""
    mask = (1 << POSITION_BITS) - 1
    return torch.where(ranked == NONE, -1, mask - (ranked & mask))


def best(ranked: torch.Tensor, topk: int) -> torch.Tensor:
    """The `topk` highest of each row, highest first, filled up with NONE."""
    values = ranked.topk(min(topk, ranked.shape[1]), dim=1).values
    return torch.nn.functional.pad(values, (0, topk - values.shape[1]), value=NONE)


def ascending(positions: torch.Tensor) -> torch.Tensor:
    """Each row in order, -1 behind the others."""
    beyond = torch.iinfo(torch.int64).max
    ordered = torch.where(positions < 0, beyond, positions).sort(dim=1).values
    return torch.where(ordered == beyond, -1, ordered)


def translate_positions(
    positions: torch.Tensor, block_table: torch.Tensor, req_id_per_token: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slots of int64 positions `[num_tokens, n]`; -1 stays, and stands for a slot that does not exist."""
    slots, there = slots_of(block_table, req_id_per_token.long().unsqueeze(1), positions, block_size)
    return torch.where(there & (slots <= torch.iinfo(torch.int32).max), slots, -1)


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
    num_tokens, num_columns = scores.shape
    column = torch.arange(num_columns, device=scores.device)
    for rows in torch.arange(num_tokens, device=scores.device).split(max(1, RANKED_VALUES // max(num_columns, 1))):
        valid = torch.ones(len(rows), num_columns, dtype=torch.bool, device=scores.device)
        if row_starts is not None:
            valid &= column >= row_starts[rows].unsqueeze(1)
        if row_ends is not None:
            valid &= column < row_ends[rows].unsqueeze(1)
        positions = positions_of(best(rank(scores[rows], column, valid), topk))
        valid_counts[rows] = (positions >= 0).sum(1).to(torch.int32)
        if not sorted:
            positions = ascending(positions)
        if block_table is not None and req_id_per_token is not None:
            positions = translate_positions(positions, block_table, req_id_per_token[rows], block_size)
        indices[rows] = positions.to(torch.int32)


def _select(tiles: Tiles, num_tokens: int, topk: int, device: torch.device) -> torch.Tensor:
    """Positions of the best, ascending: candidates of the tiles so far against each new tile."""
    candidates = torch.full((num_tokens, topk), NONE, dtype=torch.int64, device=device)
    for tokens, columns, scores, within in tiles:
        column = torch.arange(columns.start, columns.stop, device=device)
        both = torch.cat((candidates[tokens], rank(scores, column, within)), dim=1)
        candidates[tokens] = best(both, topk)
    return ascending(positions_of(candidates))


def select_keys(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    topk: int,
    cache_format: str,
    *,
    translate: bool = False,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
) -> None:
    _, block_size, _, _ = geometry(index_cache, cache_format)
    capacity = block_table.shape[1] * block_size
    tiles = paged_tiles(q, index_cache, weights, lengths, block_table, req_id_per_token, capacity, cache_format)
    positions = _select(tiles, q.shape[0], topk, q.device)
    valid_counts.copy_((positions >= 0).sum(1))
    if translate:
        positions = translate_positions(positions, block_table, req_id_per_token, block_size)
    indices.copy_(positions)


def select_keys_flat(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    topk: int,
    *,
    k_scale: torch.Tensor | None = None,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
) -> None:
    positions = _select(flat_tiles(q, k, weights, row_starts, row_ends, k_scale), q.shape[0], topk, q.device)
    valid_counts.copy_((positions >= 0).sum(1))
    indices.copy_(positions)


def merge_topk(
    scores: torch.Tensor, indices: torch.Tensor, topk: int, *, best_scores: torch.Tensor, best_indices: torch.Tensor
) -> None:
    """Ranks candidates as `topk_indices` ranks columns; a candidate's position is its index."""
    ranked = rank(scores, indices.long(), indices >= 0)
    order = ranked.topk(min(topk, scores.shape[1]), dim=1).indices
    chosen = indices.gather(1, order).long()
    chosen, place = torch.where(chosen < 0, torch.iinfo(torch.int64).max, chosen).sort(dim=1)
    values = scores.gather(1, order).gather(1, place)
    none = chosen == torch.iinfo(torch.int64).max
    width = order.shape[1]
    best_indices[:, :width] = torch.where(none, -1, chosen).to(torch.int32)
    best_scores[:, :width] = torch.where(none, -torch.inf, values)
    best_indices[:, width:] = -1
    best_scores[:, width:] = -torch.inf


LOWERINGS: dict[str, Lowering] = {
    op: Lowering(run)
    for op, run in (
        ("write_index_cache", write_index_cache),
        ("gather_index_cache", gather_index_cache),
        ("quantize_index_query", quantize_index_query),
        ("indexer_logits", indexer_logits),
        ("paged_indexer_logits", paged_indexer_logits),
        ("topk_indices", topk_indices),
        ("select_keys", select_keys),
        ("select_keys.flat", select_keys_flat),
        ("merge_topk", merge_topk),
    )
}
