"""The best keys of query tokens of the indexer on SM90: scores, then top-k, in memory that has a bound.

Scores of as many tokens as there is room for are made at one time, and chosen from by the next launch. Each launch
begins beside the end of the one in front, and waits for it before it touches the scores.
"""

from __future__ import annotations

import torch

from ...dispatch import Call
from ...formats import geometry
from ..alignment import check_cache_address
from ..cuda.driver import num_sms
from ..selection import token_slices
from . import indexer_logits
from . import topk as best
from .indexer_logits import logits_reason


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
    check_cache_address("select_keys", "index_cache", index_cache)
    if num_requests * num_columns == 0:
        _choose_none(indices, valid_counts)
        return
    q = indexer_logits.in_boxes(q)
    group = indexer_logits.group_size(q.shape[1], num_tokens, num_requests)
    slots = {"block_table": block_table, "block_size": block_size} if translate else {}
    for tokens, scores in token_slices(num_tokens, num_columns, q.device):
        ends, requests = lengths[tokens], req_id_per_token[tokens]
        given = q[tokens], index_cache, weights[tokens], ends, block_table, requests, num_columns, cache_format
        indexer_logits.paged_indexer_logits(*given, group=group, programmatic=tokens.start > 0, out=scores)
        best.topk_indices(
            scores,
            topk,
            programmatic=True,
            row_ends=ends,
            req_id_per_token=requests,
            num_requests=num_requests,
            **slots,
            indices=indices[tokens],
            valid_counts=valid_counts[tokens],
        )


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
    q, k = indexer_logits.in_boxes(q), indexer_logits.in_boxes(k)
    width = -(-num_columns // indexer_logits.TILE) * indexer_logits.TILE  # whole tiles, for scores by planes
    for tokens, whole in token_slices(num_tokens, width, q.device):
        scores = whole[:, :num_columns]
        rows = {"row_starts": row_starts[tokens], "row_ends": row_ends[tokens]}
        given = q[tokens], k, weights[tokens]
        planes = best.takes_planes(len(scores), num_columns, num_sms(q.device.index), topk)
        way = {"programmatic": tokens.start > 0, "planes": planes}
        indexer_logits.indexer_logits(*given, **rows, k_scale=k_scale, **way, out=scores)
        chosen = {"indices": indices[tokens], "valid_counts": valid_counts[tokens]}
        best.topk_indices(scores, topk, programmatic=True, planes=planes, **rows, **chosen)


def select_reason(call: Call) -> str | None:
    if call.num_keys > best.MAX_COLUMNS:
        return f"it takes rows of up to {best.MAX_COLUMNS} keys, these have {call.num_keys}"
    return logits_reason(call)
