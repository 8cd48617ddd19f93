"""The best keys of query tokens of the indexer on SM90: scores, then top-k, in memory that has a bound."""

from __future__ import annotations

import torch

from ...dispatch import Call
from ...formats import geometry
from . import indexer_logits
from . import topk as best
from .indexer_logits import logits_reason
from .select_chunks import chunks_for, row_bytes, select_by_chunks, select_flat_by_chunks


def _choose_none(indices: torch.Tensor, valid_counts: torch.Tensor) -> None:
    indices.fill_(-1)
    valid_counts.fill_(0)


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
    num_tokens = q.shape[0]
    num_requests, max_blocks = block_table.shape
    block_size = geometry(index_cache, cache_format).block_size
    num_columns = max_blocks * block_size
    if num_tokens == 0:
        return
    if num_requests * num_columns == 0:
        _choose_none(indices, valid_counts)
        return
    requests = block_table, req_id_per_token
    chosen = {"indices": indices, "valid_counts": valid_counts}
    if 4 * num_columns > row_bytes(num_tokens):
        given = q, index_cache, weights, lengths, *requests, topk, cache_format
        select_by_chunks(*given, translate=translate, **chosen)
        return
    scores = torch.empty(num_tokens, num_columns, device=q.device)
    indexer_logits.paged_indexer_logits(
        q, index_cache, weights, lengths, *requests, num_columns, cache_format, out=scores
    )
    slots = {"block_table": block_table, "block_size": block_size} if translate else {}
    rows = {"row_ends": lengths, "req_id_per_token": req_id_per_token, "num_requests": num_requests}
    best.topk_indices(scores, topk, **rows, **slots, **chosen)


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
    num_tokens, num_columns = q.shape[0], k.shape[0]
    if num_tokens == 0:
        return
    if num_columns == 0:
        _choose_none(indices, valid_counts)
        return
    chosen = {"indices": indices, "valid_counts": valid_counts}
    if 4 * num_columns > row_bytes(num_tokens):
        select_flat_by_chunks(q, k, weights, row_starts, row_ends, topk, k_scale=k_scale, **chosen)
        return
    scores = torch.empty(num_tokens, num_columns, device=q.device)
    rows = {"row_starts": row_starts, "row_ends": row_ends}
    indexer_logits.indexer_logits(q, k, weights, **rows, k_scale=k_scale, out=scores)
    best.topk_indices(scores, topk, **rows, **chosen)


def select_reason(call: Call) -> str | None:
    if call.num_keys > best.MAX_COLUMNS:
        return f"it takes rows of up to {best.MAX_COLUMNS} keys, these have {call.num_keys}"
    room = row_bytes(call.num_tokens)
    in_chunks = 4 * call.num_keys > room and call.block_size
    if in_chunks and chunks_for(call.num_keys, call.topk, call.block_size, room) is None:
        return (
            f"it takes chunks of whole blocks of rows this wide, and a block of {call.block_size} is too large for one"
        )
    return logits_reason(call)
