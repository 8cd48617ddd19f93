"""The lightning indexer's cache in Triton, and the queries that meet it. Bytes are those of the reference."""

import torch
import triton
import triton.language as tl

from ...formats import geometry
from .bfloat16 import convert, widen
from .common import cdiv, sized_jit
from .e4m3 import encode, exponent_of
from .requests import Blocks, find_block, find_request

GATHER_ROWS = 16


@triton.jit
def store_index_key(value, block, offset, block_size):
    """Quantises 128 values into their row of a block of `fp8_index`."""
    inner = tl.arange(0, 128)
    bits = value.to(tl.int32, bitcast=True)
    exponent = exponent_of(bits, -22, axis=0)
    tl.store(block + offset * 128 + inner, encode(bits, exponent).to(tl.uint8))
    scale = (block + block_size.to(tl.int64) * 128 + offset * 4).to(tl.pointer_type(tl.int32))
    tl.store(scale, (exponent + 127) << 23)


@sized_jit(any_alignment=("slot_mapping",))
def _write_kernel(
    k,
    index_cache,
    slot_mapping,
    num_slots: tl.int64,
    block_size: tl.int32,
    stride_k: tl.int64,
    stride_block: tl.int64,
    FP8: tl.constexpr,
):
    """Writes one index key. Grid: (rows,), one warp.

    `stride_block` is in elements of the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        inner = tl.arange(0, 128)
        value = tl.load(k + row * stride_k + inner)
        block = index_cache + slot // block_size * stride_block
        offset = slot % block_size
        if FP8:
            store_index_key(widen(value), block, offset, block_size)
        else:
            if value.dtype != index_cache.dtype.element_ty:
                value = convert(value, index_cache.dtype.element_ty)
            tl.store(block + offset * 128 + inner, value)


@sized_jit(any_alignment=("block_table", "seq_lens", "cu_seq_lens", "k_scale"))
def _gather_kernel(
    index_cache,
    block_table,
    seq_lens,
    cu_seq_lens,
    k,
    k_scale,
    num_rows: tl.int64,
    num_requests: tl.int32,
    search_steps: tl.int32,
    max_blocks: tl.int32,
    num_blocks: tl.int64,
    block_size: tl.int32,
    stride_block: tl.int64,
    stride_table: tl.int64,
    stride_k: tl.int64,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copies ROWS keys of requests, each row's request found by bisection. Grid: (blocks of ROWS rows,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    request = find_request(cu_seq_lens, row, num_requests, search_steps)
    request = tl.maximum(tl.minimum(request, num_requests - 1), 0).to(tl.int64)
    within = (row < num_rows) & (num_requests > 0)
    position = row - tl.load(cu_seq_lens + request, mask=within, other=0)
    readable = within & (position >= 0) & (position < tl.load(seq_lens + request, mask=within, other=0))
    readable &= row < tl.load(cu_seq_lens + request + 1, mask=within, other=0)
    blocks = Blocks(block_table + request * stride_table, readable, max_blocks, block_size, num_blocks)
    block, offset, readable = find_block(blocks, position, readable)
    inner = tl.arange(0, 128)
    start = index_cache + block * stride_block
    value = tl.load((start + offset * 128)[:, None] + inner[None, :], mask=readable[:, None], other=0)
    tl.store(k + (row * stride_k)[:, None] + inner[None, :], value, mask=(row < num_rows)[:, None])
    scale = readable.to(tl.float32)
    if FP8:
        scales = (start + block_size.to(tl.int64) * 128 + offset * 4).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales, mask=readable, other=0.0)
    tl.store(k_scale + row, scale, mask=row < num_rows)


@sized_jit()
def _quantize_kernel(
    q,
    weights,
    q_fp8,
    q_weights,
    scale: tl.float32,
    num_heads: tl.int32,
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_weights: tl.int64,
    stride_fp8_token: tl.int64,
    stride_fp8_head: tl.int64,
    stride_q_weights: tl.int64,
    HEADS: tl.constexpr,
):
    """Quantises HEADS query heads of one token. Grid: (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < num_heads
    inner = tl.arange(0, 128)
    source = q + token * stride_q_token + (head * stride_q_head)[:, None] + inner[None, :]
    bits = widen(tl.load(source, mask=there[:, None], other=0.0)).to(tl.int32, bitcast=True)
    exponent = exponent_of(bits, -22, axis=1)
    target = q_fp8 + token * stride_fp8_token + (head * stride_fp8_head)[:, None] + inner[None, :]
    tl.store(target, encode(bits, exponent[:, None]).to(tl.uint8), mask=there[:, None])
    weight = widen(tl.load(weights + token * stride_weights + head, mask=there, other=0.0))
    power = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(q_weights + token * stride_q_weights + head, weight * scale * power, mask=there)


def write_index_cache(
    k: torch.Tensor, index_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> None:
    num_blocks, block_size, _, _ = geometry(index_cache, cache_format)
    num_rows = min(slot_mapping.shape[0], k.shape[0])
    if num_rows == 0:
        return
    _write_kernel[(num_rows,)](
        k,
        index_cache,
        slot_mapping,
        num_blocks * block_size,
        block_size,
        k.stride(0),
        index_cache.stride(0),
        FP8=cache_format == "fp8_index",
        num_warps=1,
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """e4m3 as uint8; other types as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


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
    if num_rows == 0:
        return
    num_blocks, block_size, _, _ = geometry(index_cache, cache_format)
    num_requests, max_blocks = block_table.shape
    _gather_kernel[(cdiv(num_rows, GATHER_ROWS),)](
        index_cache,
        block_table,
        seq_lens,
        cu_seq_lens,
        as_bytes(k),
        k_scale,
        num_rows,
        num_requests,
        num_requests.bit_length(),
        max_blocks,
        num_blocks,
        block_size,
        index_cache.stride(0),
        block_table.stride(0),
        k.stride(0),
        FP8=cache_format == "fp8_index",
        ROWS=GATHER_ROWS,
        num_warps=4,
    )


def quantize_index_query(
    q: torch.Tensor, weights: torch.Tensor, scale: float, *, q_fp8: torch.Tensor, q_weights: torch.Tensor
) -> None:
    num_tokens, num_heads, _ = q.shape
    if num_tokens * num_heads == 0:
        return
    _quantize_kernel[(num_tokens, cdiv(num_heads, 16))](
        q,
        weights,
        as_bytes(q_fp8),
        q_weights,
        scale,
        num_heads,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        q_fp8.stride(0),
        q_fp8.stride(1),
        q_weights.stride(0),
        HEADS=16,
        num_warps=4,
    )
