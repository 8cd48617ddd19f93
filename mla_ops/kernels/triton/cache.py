"""Cache ops in Triton. Bit for bit what the reference writes: all rounding is integer arithmetic or IEEE."""

import torch
import triton
import triton.language as tl

from ...dispatch import Lowering
from ...formats import LATENT_DIM, ROPE_DIM, geometry, get_format
from .bfloat16 import convert, narrow, widen
from .common import capability, cdiv, sized_jit
from .e4m3 import decode_by, decode_method, decode_scale, encode, exponent_of, narrow_by
from .requests import Blocks, find_block, find_request
from .rows import FP8_ROPE_AT, FP8_ROW_BYTES, FP8_SCALES_AT, V4_LATENT, V4_ROW_BYTES, V4_SCALE_BYTES
from .splits import output_unit

# rows a program gathers: 8 rows of 576 in bfloat16 are 36 values a thread, and one 16-byte load each in flight
GATHER_ROWS = 8


@triton.jit
def _store_rope(source, target):
    """64 values to bfloat16 at a byte's address; values that are bfloat16 keep their bits."""
    rope = tl.arange(0, 64)
    values = tl.load(source + rope)
    if values.dtype != tl.bfloat16:
        values = narrow(widen(values), tl.bfloat16)
    tl.store(target.to(tl.pointer_type(tl.bfloat16)) + rope, values)


@sized_jit(any_alignment=("slot_mapping",))
def _store_fp8_kernel(
    kv_c,
    k_pe,
    kv_cache,
    slot_mapping,
    num_slots: tl.int64,
    block_size: tl.int32,
    stride_kv_c: tl.int64,
    stride_k_pe: tl.int64,
    stride_block_16: tl.int64,
):
    """Quantises one token into its row.

    Grid: (rows,). A program holds 4 groups of 128 latent values and 64 RoPE values; the maximum of a group is taken
    over bit patterns, whose order is that of the magnitudes. No shared memory beyond that reduction.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        group = tl.arange(0, 4)
        inner = tl.arange(0, 128)
        offsets = group[:, None] * 128 + inner[None, :]
        bits = widen(tl.load(kv_c + row * stride_kv_c + offsets)).to(tl.int32, bitcast=True)
        exponent = exponent_of(bits, -13, axis=1)

        start = kv_cache + slot // block_size * (stride_block_16 * 16) + slot % block_size * FP8_ROW_BYTES
        tl.store(start + offsets, encode(bits, exponent[:, None]).to(tl.uint8))
        scales = (start + FP8_SCALES_AT).to(tl.pointer_type(tl.int32))
        tl.store(scales + group, (exponent + 127) << 23)
        _store_rope(k_pe + row * stride_k_pe, start + FP8_ROPE_AT)


@sized_jit(any_alignment=("slot_mapping",))
def _store_fp8_v4_kernel(
    kv_c,
    k_pe,
    kv_cache,
    slot_mapping,
    num_slots: tl.int64,
    block_size: tl.int32,
    stride_kv_c: tl.int64,
    stride_k_pe: tl.int64,
    stride_block_16: tl.int64,
):
    """Quantises one token into its data and its scales, in the two planes of its block.

    Grid: (rows,). A program holds 8 groups of 64 latent values, of which the last is not there: its place among the
    scales is the byte of padding. The rest is as in `_store_fp8_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        group = tl.arange(0, 8)
        inner = tl.arange(0, 64)
        there = (group < 7)[:, None]
        offsets = group[:, None] * 64 + inner[None, :]
        bits = widen(tl.load(kv_c + row * stride_kv_c + offsets, mask=there, other=0.0)).to(tl.int32, bitcast=True)
        exponent = exponent_of(bits, -22, axis=1)

        block = kv_cache + slot // block_size * (stride_block_16 * 16)
        offset = slot % block_size
        start = block + offset * V4_ROW_BYTES
        tl.store(start + offsets, encode(bits, exponent[:, None]).to(tl.uint8), mask=there)
        scales = block + block_size.to(tl.int64) * V4_ROW_BYTES + offset * V4_SCALE_BYTES
        tl.store(scales + group, tl.where(group < 7, exponent + 127, 0).to(tl.uint8))
        _store_rope(k_pe + row * stride_k_pe, start + V4_LATENT)


@sized_jit(any_alignment=("slot_mapping",))
def _store_plain_kernel(
    kv_c,
    k_pe,
    kv_cache,
    slot_mapping,
    num_slots: tl.int64,
    block_size: tl.int32,
    latent_dim: tl.int32,
    stride_kv_c: tl.int64,
    stride_k_pe: tl.int64,
    stride_block: tl.int64,
    ROW_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies one token's latent and RoPE key side by side into its row, converting to the cache's type.

    Grid: (rows, pieces of BLOCK values). `latent_dim` is where the second source begins.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        from_latent = column < latent_dim
        within = column < ROW_WIDTH
        latent = tl.load(kv_c + row * stride_kv_c + column, mask=from_latent & within, other=0.0)
        rope = tl.load(
            k_pe + row * stride_k_pe + (column - latent_dim), mask=(column >= latent_dim) & within, other=0.0
        )
        value = tl.where(from_latent, latent, rope)
        if value.dtype != kv_cache.dtype.element_ty:
            value = convert(value, kv_cache.dtype.element_ty)
        start = kv_cache + slot // block_size * stride_block + slot % block_size * ROW_WIDTH
        tl.store(start + column, value, mask=within)


@sized_jit(any_alignment=("block_table", "seq_lens", "cu_seq_lens", "gather_lens"))
def _gather_kernel(
    kv_cache,
    block_table,
    seq_lens,
    cu_seq_lens,
    gather_lens,
    out,
    num_rows: tl.int64,
    offset: tl.int64,
    num_requests: tl.int32,
    search_steps: tl.int32,
    max_blocks: tl.int32,
    num_blocks: tl.int64,
    block_size: tl.int32,
    stride_block_16: tl.int64,
    stride_table: tl.int64,
    stride_out: tl.int64,
    FP8: tl.constexpr,
    PLANAR: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    DECODE: tl.constexpr,
    OUT_UNIT: tl.constexpr,
):
    """Dequantises ROWS rows of the workspace.

    Grid: (blocks of ROWS rows). A row finds its request by bisection of cu_seq_lens, as torch.searchsorted does, then
    its position, block and slot; only then is a key read. Rows that no request covers are not stored, covered rows
    without a readable block are stored as zeros. Tile [ROWS, LATENT] plus [ROWS, ROPE], in registers. The latent values
    of a PLANAR row take the first part of the LATENT columns; its scales are behind all rows of its block.
    """
    out_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = out_row - offset
    request = find_request(cu_seq_lens, row, num_requests, search_steps)
    request = tl.minimum(request, num_requests - 1).to(tl.int64)

    seq_len = tl.load(seq_lens + request).to(tl.int64)
    length = tl.maximum(seq_len, 0)
    if gather_lens is not None:
        length = tl.minimum(length, tl.maximum(tl.load(gather_lens + request), 0))
    index = row - tl.load(cu_seq_lens + request)
    covered = (index >= 0) & (index < length) & (row < tl.load(cu_seq_lens + request + 1)) & (out_row < num_rows)
    position = index + seq_len - length
    blocks = Blocks(block_table + request * stride_table, covered, max_blocks, block_size, num_blocks)
    block, place, readable = find_block(blocks, position, covered)

    UNIT: tl.constexpr = 16 // (kv_cache.dtype.element_ty.primitive_bitwidth // 8)
    start = kv_cache + (block * (stride_block_16 * UNIT) + place * ROW_WIDTH)[:, None]
    target = out + (out_row * (stride_out * OUT_UNIT))[:, None]
    latent = tl.arange(0, LATENT)[None, :]
    if PLANAR:
        scale_at = block_size.to(tl.int64) * V4_ROW_BYTES + place * V4_SCALE_BYTES
        scales = kv_cache + block * (stride_block_16 * UNIT) + scale_at
        _gather_groups(start, scales, target, readable, covered, 7, 64, DECODE)
        rope = tl.arange(0, 64)[None, :]
        tail = (start + V4_LATENT).to(tl.pointer_type(tl.bfloat16))
        value = tl.load(tail + rope, mask=readable[:, None], other=0.0)
        tl.store(target + V4_LATENT + rope, value, mask=covered[:, None])
    else:
        if FP8:
            scales = (kv_cache + block * (stride_block_16 * UNIT) + place * ROW_WIDTH + LATENT).to(
                tl.pointer_type(tl.float32)
            )
            _gather_groups(start, scales, target, readable, covered, 4, 128, DECODE)
        else:
            value = tl.load(start + latent, mask=readable[:, None], other=0.0)
            tl.store(target + latent, value, mask=covered[:, None])
        if ROPE > 0:
            rope = tl.arange(0, ROPE)[None, :]
            if FP8:
                tail = (start + (LATENT + 16)).to(tl.pointer_type(tl.bfloat16))
            else:
                tail = start + LATENT
            value = tl.load(tail + rope, mask=readable[:, None], other=0.0)
            tl.store(target + LATENT + rope, value, mask=covered[:, None])


@triton.jit
def _gather_groups(
    start, scales, target, readable, covered, GROUPS: tl.constexpr, WIDTH: tl.constexpr, DECODE: tl.constexpr
):
    """The quantised dims of rows, `[rows, groups, WIDTH]`: a scale is loaded once a group.

    `start` and `target` are `[rows, 1]`, `scales` of rows. Where there is no key, zeros.
    """
    group = tl.arange(0, 512 // WIDTH)[None, :]
    wanted = group < GROUPS
    seen = readable[:, None] & wanted
    scale = tl.load(scales[:, None] + group, mask=seen, other=0)
    if WIDTH == 64:
        scale = decode_scale(scale)
    dims = group[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    value = decode_by(tl.load(start[:, :, None] + dims, mask=seen[:, :, None], other=0), DECODE)
    value *= scale[:, :, None]
    tl.store(target[:, :, None] + dims, narrow_by(value, DECODE), mask=covered[:, None, None] & wanted[:, :, None])


def concat_and_cache(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> None:
    num_blocks, block_size, block_stride, head_dim = geometry(kv_cache, cache_format)
    num_rows = min(slot_mapping.shape[0], kv_c.shape[0])
    if num_rows == 0:
        return
    num_slots = num_blocks * block_size
    if get_format(cache_format).quantized:
        store = _store_fp8_kernel if cache_format == "fp8_ds_mla" else _store_fp8_v4_kernel
        store[(num_rows,)](
            kv_c,
            k_pe,
            kv_cache,
            slot_mapping,
            num_slots,
            block_size,
            kv_c.stride(0),
            k_pe.stride(0),
            block_stride // 16,
            num_warps=2,
        )
        return
    block = 512 if head_dim >= 512 else 128
    _store_plain_kernel[(num_rows, cdiv(head_dim, block))](
        kv_c,
        k_pe,
        kv_cache,
        slot_mapping,
        num_slots,
        block_size,
        kv_c.shape[1],
        kv_c.stride(0),
        k_pe.stride(0),
        kv_cache.stride(0),
        ROW_WIDTH=head_dim,
        BLOCK=block,
        num_warps=2,
    )


def gather_cache(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    num_rows: int,
    cache_format: str,
    *,
    gather_lens: torch.Tensor | None = None,
    offset: int = 0,
    out: torch.Tensor,
) -> None:
    num_blocks, block_size, block_stride, head_dim = geometry(kv_cache, cache_format)
    num_requests, max_blocks = block_table.shape
    if num_rows == 0 or num_requests == 0:
        return
    entry, out_unit = get_format(cache_format), output_unit(out)
    _gather_kernel[(cdiv(num_rows, GATHER_ROWS),)](
        kv_cache,
        block_table,
        seq_lens,
        cu_seq_lens,
        gather_lens,
        out,
        num_rows,
        offset,
        num_requests,
        num_requests.bit_length(),
        max_blocks,
        num_blocks,
        block_size,
        block_stride // 16,
        block_table.stride(0),
        out.stride(0) // out_unit,
        FP8=entry.quantized,
        PLANAR=entry.planar,
        ROW_WIDTH=entry.data_bytes or entry.row_width(head_dim),
        LATENT=min(head_dim, LATENT_DIM),
        ROPE=ROPE_DIM if head_dim > LATENT_DIM else 0,
        ROWS=GATHER_ROWS,
        DECODE=decode_method(capability(kv_cache.device)),
        OUT_UNIT=out_unit,
        num_warps=4,
    )


LOWERINGS = {"concat_and_cache": Lowering(concat_and_cache), "gather_cache": Lowering(gather_cache)}
