"""The best keys of wide rows of the indexer on SM90, by scores and top-k of chunks of columns.

Scores of a chunk lie behind the scores of the best columns so far, in the order of columns, and top-k chooses among
both. So equal scores go to the lowest column, as over whole rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...formats import geometry
from . import indexer_logits
from .indexer_logits import TILE
from .topk import Chunk, topk_indices

ROW_BYTES = 64 * 1024  # of memory that a row may take beside its result, whatever the number of rows
CALL_BYTES = 32 * 1024 * 1024  # that all rows of a call may take, if that is more for each


def row_bytes(num_tokens: int) -> int:
    """Memory that a row of a call may take beside its result."""
    return max(ROW_BYTES, CALL_BYTES // max(num_tokens, 1))


class Chunks(NamedTuple):
    """How a wide row is cut.

    Attributes:
        count: of chunks.
        width: columns of each but the last, whole blocks.
    """

    count: int
    width: int

    @property
    def firsts(self) -> range:
        """The column at which each begins."""
        return range(0, self.count * self.width, self.width)

    def row_bytes(self, topk: int) -> int:
        """Of scores of a chunk and of the best so far, columns of these, and bounds."""
        return 4 * (self.width + topk + 3 + topk) + 8 * (self.count + 1)


@functools.cache
def chunks_for(num_columns: int, topk: int, block_size: int, room: int) -> Chunks | None:
    """The fewest chunks of about one width for which `room` bytes a row suffice; None if a block is too large."""
    blocks = -(-num_columns // block_size)
    for together in range(min(blocks, room // 4 // block_size), 0, -1):
        count = -(-blocks // together)
        chunks = Chunks(count, -(-blocks // count) * block_size)
        if chunks.row_bytes(topk) <= room:
            return chunks._replace(count=-(-num_columns // chunks.width))
    return None


def _bounds(row: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Bounds of rows counted from the first column of each chunk, `[count, num_tokens]`.

    An end far below 0 may become one above it. Then scores are made that nobody reads.
    """
    firsts = torch.arange(0, chunks.count * chunks.width, chunks.width, dtype=torch.int32, device=row.device)
    return row - firsts[:, None]


def choose_of_chunks(
    chunks: Chunks,
    score: Callable[[int, torch.Tensor], None],
    num_columns: int,
    topk: int,
    slots: dict[str, Any],
    *,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
    **rows: Any,
) -> None:
    """`score(i, out)` makes the scores of chunk i."""
    scores = torch.empty(len(indices), (topk + chunks.width + 3) // 4 * 4, device=indices.device)
    other = torch.empty_like(indices)
    kept, chosen = (indices, other) if chunks.count % 2 == 0 else (other, indices)
    for number, first in enumerate(chunks.firsts):
        score(number, scores[:, topk : topk + min(chunks.width, num_columns - first)])
        last = number + 1 == chunks.count
        topk_indices(
            scores[:, : topk + chunks.width],
            topk,
            **rows,
            **(slots if last else {}),
            chunk=Chunk(first, num_columns, kept, last),
            indices=chosen,
            valid_counts=valid_counts,
        )
        kept, chosen = chosen, kept


def select_by_chunks(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    topk: int,
    cache_format: str,
    *,
    translate: bool,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
) -> None:
    """`select_keys` of rows whose scores take more than `row_bytes`."""
    num_requests, max_blocks = block_table.shape
    block_size = geometry(index_cache, cache_format).block_size
    num_columns = max_blocks * block_size
    chunks = chunks_for(num_columns, topk, block_size, row_bytes(len(q)))
    assert chunks is not None, "select_reason"
    ends, blocks = _bounds(lengths, chunks), chunks.width // block_size

    def score(number: int, out: torch.Tensor) -> None:
        table = block_table[:, number * blocks : (number + 1) * blocks]
        given = q, index_cache, weights, ends[number], table, req_id_per_token, out.shape[1], cache_format
        indexer_logits.paged_indexer_logits(*given, out=out)

    choose_of_chunks(
        chunks,
        score,
        num_columns,
        topk,
        {"block_table": block_table, "block_size": block_size} if translate else {},
        row_ends=lengths,
        req_id_per_token=req_id_per_token,
        num_requests=num_requests,
        indices=indices,
        valid_counts=valid_counts,
    )


def select_flat_by_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    topk: int,
    *,
    k_scale: torch.Tensor | None,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
) -> None:
    """`select_keys.flat` of as many keys."""
    chunks = chunks_for(k.shape[0], topk, TILE, row_bytes(len(q)))
    assert chunks is not None, "tiles are small"
    starts, ends = _bounds(row_starts.clamp(min=0), chunks), _bounds(row_ends, chunks)

    def score(number: int, out: torch.Tensor) -> None:
        columns = slice(number * chunks.width, number * chunks.width + out.shape[1])
        scale = None if k_scale is None else k_scale[columns]
        indexer_logits.indexer_logits(q, k[columns], weights, starts[number], ends[number], k_scale=scale, out=out)

    rows = {"row_starts": row_starts, "row_ends": row_ends}
    chosen = {"indices": indices, "valid_counts": valid_counts}
    choose_of_chunks(chunks, score, k.shape[0], topk, {}, **rows, **chosen)
