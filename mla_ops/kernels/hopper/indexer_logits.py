"""Scores of the lightning indexer on SM90: one launch, whose CTAs share all rows' keys by lengths on the device."""

from __future__ import annotations

import ctypes
import functools

import torch

from ...dispatch import Call
from ...formats import INDEX_DIM, geometry
from ..alignment import aligned, check_cache_address
from ..cuda.driver import NO_CLUSTER, num_sms
from ..cuda.params import POINTER, packer
from . import sources
from .launch import Kernel, compile_reason
from .params import Divisor, reciprocal

TILE = 64  # keys
CLUSTER = 2  # CTAs that share the copies of flat keys, for neighbouring groups of tokens
HEADS = (32, 64)
COLUMNS = 256  # heads of all tokens of a group, at most; then a box brings two heads of four tokens
CLEAN_THREADS = 256
MAX_GRID_ROWS = 32768
KEPT_BYTES = 2**25  # of scores of a cache's keys, which L2 keeps for what reads them next
FEW_KEYS = 2**16  # of all requests, up to which copies of keys ask memory for half lines (docs/notes.md)
BOX_KEYS = (8, 16, 32, 64)  # a block smaller than a tile is one box; larger ones are whole tiles


class Params(ctypes.Structure):
    """`Params` of indexer_rows.cuh; its tensor maps are aligned to 64 bytes, and so is the struct."""

    _fields_ = [
        ("queries", ctypes.c_char * 128),
        ("keys", ctypes.c_char * 128),
        ("weights", POINTER),
        ("k_scale", POINTER),
        ("row_starts", POINTER),
        ("row_ends", POINTER),
        ("req_id_per_token", POINTER),
        ("block_table", POINTER),
        ("cache", POINTER),
        ("out", POINTER),
        ("weights_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int),
        ("num_columns", ctypes.c_int),
        ("width", ctypes.c_int),
        ("num_requests", ctypes.c_int),
        ("table_width", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("boxes_log2", ctypes.c_int),
        ("of_block_size", Divisor),
        ("keeps_scores", ctypes.c_int),
        ("of_parts", Divisor),
        ("_", ctypes.c_char * 44),
    ]


pack = packer(Params)


def warpgroups(num_heads: int, tokens: int, source: str) -> int:
    """Those that make products, beside one that brings keys; as `ScoresLayout` of indexer_layout.cuh has them."""
    if source != "BOXES" or num_heads * tokens == COLUMNS:
        return 2
    return 4 if tokens == 1 else 3


@functools.cache
def kernel_for(num_heads: int, tokens: int, source: str, *, planes: bool = False) -> Kernel:
    threads = 128 * (warpgroups(num_heads, tokens, source) + 1)
    last = ", true" if planes else ""
    return Kernel("indexer_logits.cu", f"indexer_logits<{num_heads}, {tokens}, {source}{last}>", threads)


@functools.cache
def clean_kernel(source: str) -> Kernel:
    return Kernel("indexer_clean.cu", f"indexer_clean<{source}>", CLEAN_THREADS)


def group_sizes(num_heads: int) -> tuple[int, ...]:
    """Tokens of a group that there are kernels for."""
    return tuple(tokens for tokens in (1, 2, 4, 8) if tokens * num_heads <= COLUMNS)


def group_size(num_heads: int, num_tokens: int, num_requests: int) -> int:
    """Tokens that share keys: as many as a request has on average, which shapes tell; a power of two."""
    each = -(-num_tokens // max(num_requests, 1))
    return next((tokens for tokens in group_sizes(num_heads) if tokens >= each), COLUMNS // num_heads)


def box_keys(block_size: int) -> int:
    """Keys of a block that one copy brings, all of one tile; 0 where blocks and tiles do not fit each other."""
    if block_size % TILE == 0:
        return TILE
    return block_size if block_size in BOX_KEYS else 0


def kernels() -> list[Kernel]:
    """All there are."""
    scores = [kernel_for(heads, COLUMNS // heads, "FLAT", planes=planes) for heads in HEADS for planes in (False, True)]
    for source in ("BOXES", "ANYWHERE"):
        scores += [kernel_for(heads, tokens, source) for heads in HEADS for tokens in group_sizes(heads)]
    return [*scores, clean_kernel("FLAT"), clean_kernel("BOXES")]


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    shape: tuple[int, int, int],
    strides: tuple[int, int],
    box: tuple[int, int],
    *,
    half_lines: bool = False,
) -> bytes:
    """A `CUtensorMap` of bytes `[*, *, 128]`: boxes of whole rows of 128 bytes, swizzled.

    Args:
        address (int): of the first byte, a multiple of 16.
        shape (tuple[int, int, int]): slowest dim first.
        strides (tuple[int, int]): of the first two dims, bytes.
        box (tuple[int, int]): its first two dims.
        half_lines (bool): L2 asks memory for 64 bytes at one time, else for 128.
    """
    from cuda.bindings import driver

    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    promotion = driver.CUtensorMapL2promotion
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        3,
        address,
        [u64(size) for size in reversed(shape)],
        # the stride of a dim of size 1 may be anything, which the driver would refuse
        [u64(strides[dim] if shape[dim] > 1 else INDEX_DIM) for dim in (1, 0)],
        [u32(INDEX_DIM), u32(box[1]), u32(box[0])],
        [u32(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_64B if half_lines else promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise RuntimeError(
            f"indexer_logits: the driver refused a tensor map: {status.name}; shape {shape}, strides {strides}"
        )
    return ctypes.string_at(encoded.getPtr(), 128)


def in_boxes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its rows do not lie on multiples of 16 bytes, one behind the other."""
    apart = all(size == 1 or stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return aligned(tensor) if apart else tensor.clone(memory_format=torch.contiguous_format)


def _launch(
    source: str,
    tokens: int,
    q: torch.Tensor,
    num_columns: int,
    clean: bool,
    programmatic: bool,
    out: torch.Tensor,
    params: tuple[int, ...],
    planes: bool = False,
) -> None:
    """The kernels with `params` behind the fields that every source fills in the same way."""
    num_tokens, num_heads, _ = q.shape
    device_index = q.device.index
    boxes = in_boxes(q)
    assert boxes is q or not programmatic
    shape, strides = tuple(boxes.shape), (boxes.stride(0), boxes.stride(1))
    box = (4, 2) if tokens * num_heads == COLUMNS else (tokens, num_heads)
    queries = tensor_map(boxes.data_ptr(), shape, strides, box)
    cluster = CLUSTER if source == "FLAT" else 1
    clusters = max(min(num_sms(device_index) // cluster, num_tokens * -(-num_columns // TILE)), 1)
    packed = pack(queries, *params, *reciprocal(clusters))  # type: ignore[arg-type]
    if num_columns:
        kernel, *others = (kernel_for(num_heads, tokens, source, planes=way) for way in (planes, not planes))
        if source == "FLAT":  # whichever was run before a capture, the other is not compiled during it
            sources.load(others[0].source, others[0].name, device_index)
        sources.load(kernel.source, kernel.name, device_index).launch(
            (clusters * cluster, 1, 1),
            (kernel.threads, 1, 1),
            None,
            (cluster, 1, 1),
            packed,
            programmatic=programmatic,
        )
    if clean:
        kernel = clean_kernel("FLAT" if source == "FLAT" else "BOXES")
        rows = min(num_tokens, MAX_GRID_ROWS)
        columns = min(-(-out.shape[1] // CLEAN_THREADS), max(1, 16 * num_sms(device_index) // rows))
        sources.load(kernel.source, kernel.name, device_index).launch(
            (columns, rows, 1), (kernel.threads, 1, 1), 0, NO_CLUSTER, packed
        )


def flat_params(
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    k_scale: torch.Tensor | None,
    num_tokens: int,
    out: torch.Tensor | None,
    box: int = TILE,
) -> tuple[int, ...]:
    """Fields of `Params` behind the queries. `k` lies in boxes and has a row; a copy brings `box` keys."""
    num_kv = k.shape[0]
    return (
        tensor_map(k.data_ptr(), (1, num_kv, INDEX_DIM), (0, k.stride(0)), (1, box)),  # type: ignore[return-value]
        weights.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        row_starts.data_ptr(),
        row_ends.data_ptr(),
        0,
        0,
        0,
        0 if out is None else out.data_ptr(),
        weights.stride(0),
        0,
        0,
        0 if out is None else out.stride(0),
        num_tokens,
        num_kv,
        num_kv,
        0,
        0,
        0,
        1,
        0,
        *reciprocal(1),
        0,
    )


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    clean: bool = False,
    programmatic: bool = False,
    planes: bool = False,
    out: torch.Tensor,
) -> None:
    """Runs the op's `.out`.

    With `programmatic` it begins beside the end of the launch in front, which makes nothing that is read here. Queries
    and keys are as `in_boxes` returns them then. With `planes` scores lie as planes.cuh says, in rows of whole tiles
    that begin at multiples of 256 bytes.
    """
    num_tokens, num_heads, _ = q.shape
    num_kv = k.shape[0]
    if num_tokens * num_kv == 0:
        return
    k = in_boxes(k)
    _launch(
        "FLAT",
        COLUMNS // num_heads,
        q,
        num_kv,
        clean,
        programmatic,
        out,
        flat_params(k, weights, row_starts, row_ends, k_scale, num_tokens, out, TILE // CLUSTER),
        planes,
    )


NO_MAP = bytes(128)


def paged_params(
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    max_length: int,
    cache_format: str,
    num_tokens: int,
    out: torch.Tensor | None,
) -> tuple[str, tuple[int, ...]]:
    """The source of keys, and fields of `Params` behind the queries."""
    num_blocks, block_size, block_stride, _ = geometry(index_cache, cache_format)
    num_requests, max_blocks = block_table.shape
    keys, keys_map = box_keys(block_size), NO_MAP
    if num_blocks == 0:
        keys = 0  # nothing to describe, and no block that could be read
    if keys:
        shape, strides = (num_blocks, block_size, INDEX_DIM), (block_stride, INDEX_DIM)
        few = num_requests * max_length <= FEW_KEYS
        keys_map = tensor_map(index_cache.data_ptr(), shape, strides, (1, keys), half_lines=few)
    return "BOXES" if keys else "ANYWHERE", (
        keys_map,  # type: ignore[return-value]
        weights.data_ptr(),
        0,
        0,
        lengths.data_ptr(),
        req_id_per_token.data_ptr(),
        block_table.data_ptr(),
        index_cache.data_ptr(),
        0 if out is None else out.data_ptr(),
        weights.stride(0),
        block_table.stride(0),
        block_stride,
        0 if out is None else out.stride(0),
        num_tokens,
        min(max_length, max_blocks * block_size),
        max_length,
        num_requests,
        max_blocks,
        num_blocks,
        block_size,
        (TILE // keys).bit_length() - 1 if keys else 0,
        *reciprocal(block_size),
        int(4 * num_tokens * max_length <= KEPT_BYTES),
    )


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
    group: int | None = None,
    programmatic: bool = False,
    out: torch.Tensor,
) -> None:
    """Runs the op's `.out`, by groups of up to `group` tokens that share keys; `programmatic` as of flat keys."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens * max_length == 0:
        return
    check_cache_address("paged_indexer_logits", "index_cache", index_cache)
    source, params = paged_params(
        index_cache, weights, lengths, block_table, req_id_per_token, max_length, cache_format, num_tokens, out
    )
    num_columns = min(max_length, block_table.shape[1] * geometry(index_cache, cache_format).block_size)
    _launch(
        source,
        group or group_size(num_heads, num_tokens, block_table.shape[0]),
        q,
        num_columns if block_table.shape[0] else 0,
        clean,
        programmatic,
        out,
        params,
    )


def logits_reason(call: Call) -> str | None:
    if call.dtype != torch.float8_e4m3fn:
        return f"it takes queries and keys of {torch.float8_e4m3fn}, these are {call.dtype}"
    if call.num_heads not in HEADS:
        return f"it takes {' or '.join(map(str, HEADS))} heads, these are {call.num_heads}"
    return compile_reason()
