"""The best keys of query tokens of the indexer on SM90: scores, then top-k, in memory that has a bound.

Scores of as many tokens as there is room for are made at one time, and chosen from by the next launch. Each launch
begins beside the end of the one in front, and waits for it before it touches the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...dispatch import Call
from ...formats import geometry
from .. import selection
from ..selection import parts
from . import indexer_logits
from . import topk as best
from .indexer_logits import logits_reason


WAY: tuple[int, int] | None = None  # trial: SMs left, tokens of a part


def _sms_left(num_tokens: int, num_columns: int, num_heads: int, device: torch.device) -> int:
    """SMs on which top-k of a part runs beside the scores of the next part; 0: one comes behind the other."""
    if WAY is not None:
        return WAY[0]
    return 0


def _by_parts(
    num_tokens: int,
    num_columns: int,
    num_heads: int,
    device: torch.device,
    scores: Callable[..., None],
    choose: Callable[..., None],
) -> None:
    left = _sms_left(num_tokens, num_columns, num_heads, device)
    if not left:
        for part, room in parts(num_tokens, num_columns, device):
            scores(part, programmatic=part.start > 0, out=room)
            choose(part, room, programmatic=True)
        return
    made = None
    if WAY:
        selection.tokens_together, before = lambda *_: WAY[1], selection.tokens_together
    for part, room in parts(num_tokens, num_columns, device, rooms=2):
        scores(part, programmatic=part.start > 0, sms_left=left if part.start else 0, out=room)
        if made is not None:
            choose(*made, programmatic=True, beside=True)
        made = part, room
    if WAY:
        selection.tokens_together = before
    assert made
    choose(*made, programmatic=True)


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
    q = indexer_logits.in_boxes(q)
    group = indexer_logits.group_size(q.shape[1], num_tokens, num_requests)
    slots = {"block_table": block_table, "block_size": block_size} if translate else {}

    def scores(part: slice, **how: Any) -> None:
        ends, requests = lengths[part], req_id_per_token[part]
        given = q[part], index_cache, weights[part], ends, block_table, requests, num_columns, cache_format
        indexer_logits.paged_indexer_logits(*given, group=group, **how)

    def choose(part: slice, room: torch.Tensor, **how: Any) -> None:
        best.topk_indices(
            room,
            topk,
            row_ends=lengths[part],
            req_id_per_token=req_id_per_token[part],
            num_requests=num_requests,
            **slots,
            **how,
            indices=indices[part],
            valid_counts=valid_counts[part],
        )

    _by_parts(num_tokens, num_columns, q.shape[1], q.device, scores, choose)


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

    def scores(part: slice, **how: Any) -> None:
        given = q[part], k, weights[part], row_starts[part], row_ends[part]
        indexer_logits.indexer_logits(*given, k_scale=k_scale, **how)

    def choose(part: slice, room: torch.Tensor, **how: Any) -> None:
        rows = {"row_starts": row_starts[part], "row_ends": row_ends[part]}
        chosen = {"indices": indices[part], "valid_counts": valid_counts[part]}
        best.topk_indices(room, topk, **rows, **how, **chosen)

    _by_parts(num_tokens, num_columns, q.shape[1], q.device, scores, choose)


def select_reason(call: Call) -> str | None:
    if call.num_keys > best.MAX_COLUMNS:
        return f"it takes rows of up to {best.MAX_COLUMNS} keys, these have {call.num_keys}"
    return logits_reason(call)
