"""Exact softmax merge of partial results in Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...dispatch import Lowering
from .bfloat16 import widen
from .common import INTERPRETED, cdiv, sized_jit
from .sparse_attention_device import round_to

# values of one part that a program of 128 threads holds: two loads of 16 bytes a thread in bfloat16
MERGE_VALUES = 2048
MERGE_STAGES = 3
# columns that a warp loads at a time, 16 bytes a thread in bfloat16: what a row's weights cost, a warp pays once
PIECE = 256
PAIR_VALUES = 4 * PIECE


def merge_tile(head_dim_v: int) -> tuple[int, int]:
    """Rows and columns of a program that merges any number of parts."""
    block_d = 512 if head_dim_v > 256 else 256 if head_dim_v > 128 else 128
    return MERGE_VALUES // block_d, block_d


class PairTile(NamedTuple):
    """Heads of a program, its columns, and the columns of one load."""

    rows: int
    block_d: int
    piece: int
    num_warps: int


def pair_tile(num_heads: int, head_dim_v: int) -> PairTile:
    """A warp for each row of a program that merges two parts, or for two rows of 128 values."""
    block_d = merge_tile(head_dim_v)[1]
    piece = min(PIECE, block_d)
    rows = min(PAIR_VALUES // piece, 1 << (num_heads - 1).bit_length())
    return PairTile(rows, block_d, piece, max(1, rows * piece // PIECE))


def stride_unit(*tensors: torch.Tensor) -> int:
    """The unit of strides and the width, in elements: 16 bytes where those of all tensors allow it, for wide loads."""
    unit = 16 // tensors[0].element_size()
    sizes = [size for tensor in tensors for size in (*tensor.stride()[:-1], tensor.shape[-1])]
    return unit if all(size % unit == 0 for size in sizes) else 1


@sized_jit(any_alignment=("lse_a", "lse_b", "lse"))
def _merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_heads: tl.int32,
    head_dim_v: tl.int32,
    stride_a_token: tl.int64,
    stride_a_head: tl.int64,
    stride_lse_a_token: tl.int64,
    stride_lse_a_head: tl.int64,
    stride_b_token: tl.int64,
    stride_b_head: tl.int64,
    stride_lse_b_token: tl.int64,
    stride_lse_b_head: tl.int64,
    stride_token: tl.int64,
    stride_head: tl.int64,
    stride_lse_token: tl.int64,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Merges ROWS heads of a token.

    Grid: (tokens, blocks of ROWS heads, blocks of BLOCK_D values). A warp has a row, and loads it in pieces: everything
    but the values themselves is computed once for 16 of them a thread. Values are loaded beside their weights, not
    after them. A side with weight 0 may hold anything, so it is replaced before it is multiplied; +inf as lse marks an
    empty row in some kernels and counts as -inf.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    within = head < num_heads
    row_a = out_a + token * (stride_a_token * UNIT) + (head.to(tl.int64) * (stride_a_head * UNIT))[:, None]
    row_b = out_b + token * (stride_b_token * UNIT) + (head.to(tl.int64) * (stride_b_head * UNIT))[:, None]
    row = out + token * (stride_token * UNIT) + (head.to(tl.int64) * (stride_head * UNIT))[:, None]
    first = tl.program_id(2) * BLOCK_D + tl.arange(0, PIECE)[None, :]
    inside = within[:, None] & (first < head_dim_v * UNIT)
    first_a = tl.load(row_a + first, mask=inside, other=0.0)
    first_b = tl.load(row_b + first, mask=inside, other=0.0)
    if BLOCK_D > PIECE:
        tl.static_assert(BLOCK_D == 2 * PIECE)
        second = first + PIECE
        also_inside = within[:, None] & (second < head_dim_v * UNIT)
        second_a = tl.load(row_a + second, mask=also_inside, other=0.0)
        second_b = tl.load(row_b + second, mask=also_inside, other=0.0)

    empty = float("-inf")
    a = tl.load(lse_a + token * stride_lse_a_token + head * stride_lse_a_head, mask=within, other=empty)
    b = tl.load(lse_b + token * stride_lse_b_token + head * stride_lse_b_head, mask=within, other=empty)
    a = tl.where(a == float("inf"), empty, a)
    b = tl.where(b == float("inf"), empty, b)
    lse_max = tl.maximum(a, b)
    safe_max = tl.where(lse_max == empty, 0.0, lse_max)
    weight_a = tl.exp(a - safe_max)
    weight_b = tl.exp(b - safe_max)
    total = weight_a + weight_b
    safe = tl.where(total == 0, 1.0, total)
    weight_a = (weight_a / safe)[:, None]
    weight_b = (weight_b / safe)[:, None]
    merged = weigh(first_a, weight_a) + weigh(first_b, weight_b)
    tl.store(row + first, round_to(merged, out.dtype.element_ty, UPCAST), mask=inside)
    if BLOCK_D > PIECE:
        merged = weigh(second_a, weight_a) + weigh(second_b, weight_b)
        tl.store(row + second, round_to(merged, out.dtype.element_ty, UPCAST), mask=also_inside)
    if tl.program_id(2) == 0:
        tl.store(
            lse + token * stride_lse_token + head, tl.where(total == 0, empty, safe_max + tl.log(safe)), mask=within
        )


@triton.jit
def weigh(value, weight):
    """A part without weight may hold anything, NaN included."""
    return weight * tl.where(weight != 0, widen(value), 0.0)


@sized_jit(any_alignment=("lses", "lse"))
def _merge_stacked_kernel(
    outs,
    lses,
    out,
    lse,
    num_parts: tl.int32,
    num_rows: tl.int64,
    num_heads: tl.int32,
    head_dim_v: tl.int32,
    stride_part: tl.int64,
    stride_part_token: tl.int64,
    stride_part_head: tl.int64,
    stride_lse_part: tl.int64,
    stride_lse_part_token: tl.int64,
    stride_lse_part_head: tl.int64,
    stride_token: tl.int64,
    stride_head: tl.int64,
    stride_lse_token: tl.int64,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Merges ROWS (token, head) rows of any number of parts, in their order.

    Grid: (blocks of ROWS rows, pieces of BLOCK_D values). One pass over the parts' lse for their maximum, one over lse
    and values, whose loads are some parts ahead. Empty rows are marked as in `_merge_kernel`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within = row < num_rows
    token = (row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    empty = float("-inf")
    lse_row = lses + token * stride_lse_part_token + head * stride_lse_part_head
    lse_max = tl.full((ROWS,), empty, tl.float32)
    for part in range(num_parts):
        value = tl.load(lse_row + part * stride_lse_part, mask=within, other=empty)
        lse_max = tl.maximum(lse_max, tl.where(value == float("inf"), empty, value))
    safe_max = tl.where(lse_max == empty, 0.0, lse_max)

    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = within[:, None] & (column < head_dim_v * UNIT)[None, :]
    row_place = token * (stride_part_token * UNIT) + head * (stride_part_head * UNIT)
    first = outs + row_place[:, None] + column[None, :]
    total = tl.zeros((ROWS,), tl.float32)
    merged = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for part in tl.range(0, num_parts, num_stages=STAGES):
        value = tl.load(first + part * (stride_part * UNIT), mask=inside, other=0.0)
        log = tl.load(lse_row + part * stride_lse_part, mask=within, other=empty)
        weight = tl.exp(tl.where(log == float("inf"), empty, log) - safe_max)
        total += weight
        merged += weigh(value, weight[:, None])
    safe = tl.where(total == 0, 1.0, total)
    place = (token * (stride_token * UNIT) + head * (stride_head * UNIT))[:, None] + column[None, :]
    tl.store(out + place, round_to(merged / safe[:, None], out.dtype.element_ty, UPCAST), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(
            lse + token * stride_lse_token + head, tl.where(total == 0, empty, safe_max + tl.log(safe)), mask=within
        )


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim_v = out_a.shape
    if num_tokens == 0 or num_heads == 0:
        return
    chosen = pair_tile(num_heads, head_dim_v)
    unit = stride_unit(out_a, out_b, out)
    _merge_kernel[(num_tokens, cdiv(num_heads, chosen.rows), max(1, cdiv(head_dim_v, chosen.block_d)))](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        num_heads,
        head_dim_v // unit,
        out_a.stride(0) // unit,
        out_a.stride(1) // unit,
        lse_a.stride(0),
        lse_a.stride(1),
        out_b.stride(0) // unit,
        out_b.stride(1) // unit,
        lse_b.stride(0),
        lse_b.stride(1),
        out.stride(0) // unit,
        out.stride(1) // unit,
        lse.stride(0),
        UNIT=unit,
        ROWS=chosen.rows,
        BLOCK_D=chosen.block_d,
        PIECE=chosen.piece,
        UPCAST=INTERPRETED,
        num_warps=chosen.num_warps,
    )


def merge_attention_states_stacked(
    outs: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor, lse: torch.Tensor
) -> None:
    num_parts, num_tokens, num_heads, head_dim_v = outs.shape
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return
    rows, block_d = merge_tile(head_dim_v)
    unit = stride_unit(outs, out)
    _merge_stacked_kernel[(cdiv(num_rows, rows), max(1, cdiv(head_dim_v, block_d)))](
        outs,
        lses,
        out,
        lse,
        num_parts,
        num_rows,
        num_heads,
        head_dim_v // unit,
        outs.stride(0) // unit,
        outs.stride(1) // unit,
        outs.stride(2) // unit,
        lses.stride(0),
        lses.stride(1),
        lses.stride(2),
        out.stride(0) // unit,
        out.stride(1) // unit,
        lse.stride(0),
        UNIT=unit,
        STAGES=MERGE_STAGES,
        ROWS=rows,
        BLOCK_D=block_d,
        UPCAST=INTERPRETED,
        num_warps=4,
    )


LOWERINGS = {
    "merge_attention_states": Lowering(merge_attention_states),
    "merge_attention_states.stacked": Lowering(merge_attention_states_stacked),
}
