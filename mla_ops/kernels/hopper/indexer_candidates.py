"""The best keys of a few query tokens of long contexts on SM90, in one launch: scores, candidates, the choice."""

from __future__ import annotations

import ctypes
import functools
import math
import struct

import torch

from ..cuda.driver import NO_CLUSTER
from ..cuda.params import POINTER
from . import groups, indexer_logits, sources, topk
from .launch import Kernel, reciprocal

CANDIDATES = 128  # of a CTA, which has a piece of a row
PIECE_ROWS, PIECE_TILES = 4, 64  # rows of a launch, and tiles of a CTA
MOST_SLOTS = 12 * 512  # candidates of a row that the CTA which chooses has room for
MOST_COLUMNS = 6 * 128 * 256  # it has a bit for each
LONG_ROW = 65536
SPARE_WARPGROUPS = 3  # beside those that make products: two choose, one brings keys


class SelectionParams(ctypes.Structure):
    """The struct of indexer_candidates.cuh."""

    _fields_ = [
        ("scores", indexer_logits.Params),
        ("topk", topk.TopkParams),
        ("candidates", POINTER),
        ("gates", POINTER),
        ("counters", POINTER),
        ("_", ctypes.c_char * 16),
    ]


@functools.cache
def kernel_for(num_heads: int) -> Kernel:
    threads = 128 * (indexer_logits.warpgroups(num_heads, 1, "BOXES") + SPARE_WARPGROUPS)
    return Kernel("indexer_candidates.cu", f"indexer_candidates<{num_heads}>", threads)


def kernels() -> list[Kernel]:
    """All there are."""
    return [kernel_for(heads) for heads in indexer_logits.HEADS]


def room_of_a_piece(topk_wanted: int, pieces: int) -> int:
    """Candidates that each of the pieces of a row may hand over, as `Handed` of pieces.cuh."""
    share = topk_wanted / pieces
    need = int(share + 4 * math.sqrt(share)) + 5
    return (need + need // 8 + 7) // 2 * 2


def takes(
    num_tokens: int, num_requests: int, num_columns: int, block_size: int, topk_wanted: int, num_sms: int
) -> bool:
    """Whether one launch chooses of rows that long: for few of them it takes less time than two."""
    if num_tokens > min(num_requests, PIECE_ROWS) or block_size % indexer_logits.TILE:
        return False
    if not LONG_ROW < num_columns <= MOST_COLUMNS:
        return False
    if num_tokens * (num_columns // indexer_logits.TILE) > (num_sms - PIECE_ROWS) * PIECE_TILES:
        return False
    pieces = -(-num_sms // num_tokens)
    room = room_of_a_piece(topk_wanted, num_sms // num_tokens)
    return room <= CANDIDATES and room * pieces <= MOST_SLOTS


def select_keys(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    topk_wanted: int,
    cache_format: str,
    block_size: int,
    *,
    translate: bool,
    scores: torch.Tensor,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
) -> None:
    """Runs the op's `.out` for rows that `takes` says; `scores` is memory for theirs."""
    num_tokens, num_heads, _ = q.shape
    device_index, num_columns = q.device.index, scores.shape[1]
    pieces = indexer_logits.num_sms(device_index)
    keys = index_cache, weights, lengths, block_table, req_id_per_token, num_columns, cache_format
    _, params = indexer_logits.paged_params(*keys, num_tokens, scores)
    queries = indexer_logits.tensor_map(q.data_ptr(), tuple(q.shape), (q.stride(0), q.stride(1)), (1, num_heads))
    of_scores = indexer_logits.pack(queries, *params, *reciprocal(pieces))  # type: ignore[arg-type]
    slots = {"block_table": block_table, "block_size": block_size} if translate else {}
    of_topk = topk.pack(
        topk.FEW,
        scores,
        topk_wanted,
        row_ends=lengths,
        req_id_per_token=req_id_per_token,
        num_requests=block_table.shape[0],
        **slots,
        indices=indices,
        valid_counts=valid_counts,
    )
    memory = torch.empty(pieces * (CANDIDATES + 1), dtype=torch.int64, device=q.device)
    candidates = memory.data_ptr()
    pointers = candidates, candidates + 8 * pieces * CANDIDATES, groups.counters(device_index, num_tokens)
    kernel = kernel_for(num_heads)
    sources.load(kernel.source, kernel.name, device_index).launch(
        (pieces, 1, 1),
        (kernel.threads, 1, 1),
        None,
        NO_CLUSTER,
        of_scores + of_topk + struct.pack("<QQQ16x", *pointers),
    )
