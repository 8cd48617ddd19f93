"""The best keys of query tokens of the indexer on SM90, of wide rows chosen while their scores are made."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple

import torch

from ...dispatch import Call
from ...formats import geometry
from ..cuda.params import POINTER, packer
from . import indexer_logits, sources
from . import topk as best
from .indexer_logits import HEADS, THREADS, TILE, box_keys, group_size, in_boxes, logits_reason
from .launch import Kernel
from .select_chunks import WHOLE_COLUMNS, chunks_for, select_by_chunks, select_flat_by_chunks

CLUSTERS = best.CLUSTERS
LEAST_OF_A_CTA = 1024  # columns
SOURCES = ("FLAT", "BOXES")
TOKENS = (1, 2, 4)  # of a group
SEGMENTS = (64, 32, 16)  # tiles from one count of entries to the next
CHOICE_BYTES = {1: 1216, 2: 1232, 4: 1264}  # by tokens of a group, as sizeof(Choice)
DEVIATIONS = 6  # of a CTA's share of the best keys, that it hands on besides


class SelectParams(ctypes.Structure):
    """As in select_rows.cuh."""

    _fields_ = [
        ("scores", indexer_logits.Params),
        ("indices", POINTER),
        ("counts", POINTER),
        ("indices_pitch", ctypes.c_int64),
        ("k", ctypes.c_int),
        ("cluster", ctypes.c_int),
        ("capacity", ctypes.c_int),
        ("segment", ctypes.c_int),
        ("share", ctypes.c_int),
        ("translate", ctypes.c_int),
        ("_", ctypes.c_char * 16),
    ]


pack = packer(SelectParams)


class Plan(NamedTuple):
    """How rows are read.

    Attributes:
        tokens: of a group, which shares keys.
        cluster: CTAs that share a group's keys.
        capacity: entries of a row that a CTA has room for.
        segment: tiles from one count of entries to the next.
        share: entries that a CTA of a cluster hands on at first.
    """

    tokens: int
    cluster: int
    capacity: int
    segment: int
    share: int


@functools.cache
def kernel_for(num_heads: int, tokens: int, source: str) -> Kernel:
    return Kernel("select_keys.cu", f"select_keys<{num_heads}, {tokens}, {source}>", THREADS)


def group_sizes(num_heads: int, source: str = "BOXES") -> tuple[int, ...]:
    """Tokens of a group that there are kernels for: 128 columns, for a launch of 256 did not end on a GPU."""
    return tuple(tokens for tokens in TOKENS if tokens * num_heads <= 128) if source == "BOXES" else (1,)


def stages(num_heads: int, tokens: int) -> int:
    """Tiles of the ring of keys, as SelectLayout."""
    return 12 if tokens == 1 else 4 if num_heads * tokens == 256 else 8


def kernels() -> list[Kernel]:
    """All there are."""
    return [
        kernel_for(heads, tokens, source)
        for source in SOURCES
        for heads in HEADS
        for tokens in group_sizes(heads, source)
    ]


def fixed_bytes(num_heads: int, tokens: int) -> int:
    """Shared memory besides entries: `Fixed` in select_rows.cuh."""
    ring, warps = stages(num_heads, tokens), THREADS // 32
    queries, keys = 2 * tokens * num_heads * 128, ring * TILE * (128 + 4)
    words = 2 * 16 + 4 * warps + 16 + 8 * (3 * 2 + 2 * ring)
    return -(-(queries + keys + words) // 16) * 16 + CHOICE_BYTES[tokens] + 4 * best.BINS


def capacity_for(num_heads: int, tokens: int) -> int:
    """Entries of a row that there is room for."""
    return (sources.MAX_SHARED_BYTES - fixed_bytes(num_heads, tokens)) // (8 * tokens)


def segment_for(topk: int, capacity: int) -> int:
    """Tiles between counts of entries: long segments cost less, short ones leave room for more. 0: none fits.

    Where two segments fit behind the best, the first that is full is not yet the last.
    """
    for tiles in SEGMENTS[:-1]:
        if topk + 2 * tiles * TILE <= capacity:
            return tiles
    return SEGMENTS[-1] if topk + SEGMENTS[-1] * TILE <= capacity else 0


def share_for(topk: int, cluster: int) -> int:
    """A CTA's part of the best keys, and some deviations of a number that is drawn."""
    mean = topk / cluster
    return min(topk, math.ceil(mean + DEVIATIONS * math.sqrt(mean) + 4))


def plan_for(
    num_heads: int,
    num_tokens: int,
    together: int,
    num_columns: int,
    topk: int,
    at_once: tuple[int, ...],
) -> Plan:
    """By sizes that the host knows; lengths of rows are the device's.

    Args:
        num_heads: of a query.
        num_tokens: of all queries.
        together: tokens that share keys.
        num_columns: keys of a row at most.
        topk: keys to choose.
        at_once: clusters of each size in `CLUSTERS` that run at one time.
    """
    fitting = [size for size in group_sizes(num_heads) if segment_for(topk, capacity_for(num_heads, size))]
    tokens = next((size for size in fitting if size >= together), fitting[-1])
    capacity = capacity_for(num_heads, tokens)
    units, cluster = -(-num_tokens // tokens), 1
    for size, clusters in zip(CLUSTERS, at_once, strict=True):
        room = topk + size * share_for(topk, size)
        if units <= clusters and LEAST_OF_A_CTA * size <= num_columns and room <= capacity:
            cluster = size
    return Plan(tokens, cluster, capacity, segment_for(topk, capacity), share_for(topk, cluster))


@functools.cache
def _at_once(device_index: int) -> tuple[int, ...]:
    kernel = kernel_for(64, 1, "BOXES")
    loaded = sources.load(kernel.source, kernel.name, device_index)
    block = (THREADS, 1, 1)
    return tuple(loaded.occupancy_clusters(block, sources.MAX_SHARED_BYTES, (size, 1, 1)) for size in CLUSTERS)


def _launch(
    source: str,
    together: int,
    q: torch.Tensor,
    num_columns: int,
    topk: int,
    params: tuple[int, ...],
    translate: bool,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
) -> None:
    num_tokens, num_heads, _ = q.shape
    device_index = q.device.index
    plan = plan_for(num_heads, num_tokens, together, num_columns, topk, _at_once(device_index))
    q = in_boxes(q)
    strides, box = (q.stride(0), q.stride(1)), (plan.tokens, num_heads)
    packed = pack(
        indexer_logits.tensor_map(q.data_ptr(), tuple(q.shape), strides, box),  # type: ignore[arg-type]
        *params,
        indices.data_ptr(),
        valid_counts.data_ptr(),
        indices.stride(0),
        topk,
        plan.cluster,
        plan.capacity,
        plan.segment,
        plan.share,
        int(translate),
    )
    kernel = kernel_for(num_heads, plan.tokens, source)
    sources.load(kernel.source, kernel.name, device_index).launch(
        (-(-num_tokens // plan.tokens) * plan.cluster, 1, 1),
        (THREADS, 1, 1),
        fixed_bytes(num_heads, plan.tokens) + 8 * plan.tokens * plan.capacity,
        (plan.cluster, 1, 1),
        packed,
    )


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
    num_tokens, num_heads, _ = q.shape
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
    if num_columns <= WHOLE_COLUMNS:
        scores = torch.empty(num_tokens, num_columns, device=q.device)
        given = q, index_cache, weights, lengths, *requests, num_columns, cache_format
        indexer_logits.paged_indexer_logits(*given, out=scores)
        slots = {"block_table": block_table, "block_size": block_size} if translate else {}
        rows = {"row_ends": lengths, "req_id_per_token": req_id_per_token, "num_requests": num_requests}
        best.topk_indices(scores, topk, **rows, **slots, **chosen)
        return
    source, params = indexer_logits.paged_params(
        index_cache, weights, lengths, *requests, num_columns, cache_format, num_tokens, None
    )
    if source == "ANYWHERE":
        given_too = q, index_cache, weights, lengths, *requests, topk, cache_format
        select_by_chunks(*given_too, translate=translate, **chosen)
        return
    together = group_size(num_heads, num_tokens, num_requests)
    _launch(source, together, q, num_columns, topk, params, translate, indices, valid_counts)


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
    num_tokens = q.shape[0]
    if num_tokens == 0:
        return
    if k.shape[0] == 0:
        _choose_none(indices, valid_counts)
        return
    chosen = {"indices": indices, "valid_counts": valid_counts}
    if k.shape[0] <= WHOLE_COLUMNS:
        scores = torch.empty(num_tokens, k.shape[0], device=q.device)
        rows = {"row_starts": row_starts, "row_ends": row_ends}
        indexer_logits.indexer_logits(q, k, weights, **rows, k_scale=k_scale, out=scores)
        best.topk_indices(scores, topk, **rows, **chosen)
        return
    if num_tokens > indexer_logits.num_sms(q.device.index):
        select_flat_by_chunks(q, k, weights, row_starts, row_ends, topk, k_scale=k_scale, **chosen)
        return
    k = in_boxes(k)
    params = indexer_logits.flat_params(k, weights, row_starts, row_ends, k_scale, num_tokens, None)
    _launch("FLAT", 1, q, k.shape[0], topk, params, False, indices, valid_counts)


def select_reason(call: Call) -> str | None:
    if call.num_keys > best.MAX_COLUMNS:
        return f"it takes rows of up to {best.MAX_COLUMNS} keys, these have {call.num_keys}"
    in_chunks = call.num_keys > WHOLE_COLUMNS and call.block_size and not box_keys(call.block_size)
    if in_chunks and chunks_for(call.num_keys, call.topk, call.block_size) is None:
        return (
            f"it takes chunks of whole blocks of rows this wide, and a block of {call.block_size} is too large for one"
        )
    return logits_reason(call)
