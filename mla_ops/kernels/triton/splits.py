"""Parts of rows whose keys several programs share: where they are written, and their merge."""

import torch
import triton
import triton.language as tl

from .bfloat16 import narrow
from .common import sized_jit

MAX_SPLITS = 64


@sized_jit(any_alignment=("attn_sink", "uneven", "lse"))
def _merge_splits_kernel(
    partial_out,
    partial_lse,
    attn_sink,
    uneven,
    out,
    lse,
    num_heads: tl.int32,
    num_rows: tl.int64,
    num_splits: tl.int32,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_token: tl.int64,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OUT_UNIT: tl.constexpr,
):
    """Merges the splits of one (token, head), exactly, and applies the sink.

    Grid: (tokens * heads,). The base-2 lse of all splits, at most MAX_SPLITS, then the partial rows, BLOCK_S at a time,
    in the order of the splits. A split that had nothing to attend to is not read: nothing was written. Rows are
    float32, or float16 in units that lie behind all lse: one of a row, or, where that is negative, one of each 128
    dims, in four planes as large as the lse. Where `uneven` is given and not 0, results are left as they are.
    """
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    head = row % num_heads
    column = tl.arange(0, 512)
    meant = None
    if uneven is not None:
        meant = tl.load(uneven) == 0
        num_splits = tl.where(meant, num_splits, 0)
    splits = tl.arange(0, MAX_SPLITS)
    parts = tl.load(partial_lse + splits * num_rows + row, mask=splits < num_splits, other=float("-inf"))
    lse_max = tl.max(parts, 0)
    safe_max = tl.where(lse_max == float("-inf"), 0.0, lse_max)
    total = tl.sum(tl.exp2(parts - safe_max), 0)
    acc = tl.zeros((512,), tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        part = tl.load(partial_lse + split * num_rows + row, mask=split < num_splits, other=float("-inf"))
        place = partial_out + (split * num_rows + row)[:, None] * 512 + column[None, :]
        values = tl.load(place, mask=(part != float("-inf"))[:, None], other=0.0)
        weight = tl.exp2(part - safe_max)
        if values.dtype == tl.float16:
            unit = tl.load(partial_lse + (num_splits + split) * num_rows + row, mask=part != float("-inf"), other=0.0)
            if tl.min(unit, 0) < 0:
                for one in range(first, tl.minimum(first + BLOCK_S, num_splits)):
                    acc += _part_by_groups(partial_out, partial_lse, safe_max, one, row, column, num_splits, num_rows)
            else:
                acc += tl.sum((weight * unit)[:, None] * values.to(tl.float32), 0)
        else:
            acc += tl.sum(weight[:, None] * values, 0)
    safe = tl.where(total == 0, 1.0, total)
    log2_sum = tl.where(lse_max == float("inf"), float("inf"), safe_max + tl.log2(safe))
    log2_sum = tl.where(total == 0, float("-inf"), log2_sum)
    factor = tl.where(total == 0, 0.0, 1.0 / safe)
    if attn_sink is not None:
        sink = tl.load(attn_sink + head) * 1.4426950408889634
        factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp2(sink - log2_sum)))
    place = out + token * (stride_out_token * OUT_UNIT) + head.to(tl.int64) * (stride_out_head * OUT_UNIT) + column
    tl.store(place, narrow(acc * factor, out.dtype.element_ty), mask=meant)
    tl.store(lse + token * stride_lse_token + head, log2_sum * 0.6931471805599453, mask=meant)


@triton.jit
def _part_by_groups(partial_out, partial_lse, safe_max, split, row, column, num_splits, num_rows):
    """The weighted row of one split, whose units are of its four groups of 128 dims, or of all of them."""
    part = tl.load(partial_lse + split * num_rows + row)
    there = part != float("-inf")
    units = partial_lse + (num_splits + split) * num_rows + row
    unit = tl.load(units, mask=there, other=0.0)
    plane = tl.where(unit < 0, column // 128, 0)
    unit = tl.abs(tl.load(units + plane * (num_splits * num_rows), mask=there, other=0.0))
    values = tl.load(partial_out + (split * num_rows + row) * 512 + column, mask=there, other=0.0)
    return tl.exp2(part - safe_max) * unit * values.to(tl.float32)


def output_unit(out: torch.Tensor) -> int:
    """Elements that strides of outputs are counted in: 16 bytes where they allow it, so that stores are as wide."""
    unit = 16 // out.element_size()
    return unit if all(stride % unit == 0 for stride in out.stride()[:-1]) else 1


def allocate_parts(
    out: torch.Tensor, lse: torch.Tensor, splits: int, half: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory that the splits write: rows that a merge reads, or the result itself if there is one split.

    `half`: rows of float16, with four units a row behind all lse.
    """
    if splits == 1:
        return out.unsqueeze(0), lse.unsqueeze(0)
    return (
        torch.empty(splits, *out.shape, dtype=torch.float16 if half else torch.float32, device=out.device),
        torch.empty((5 if half else 1) * splits, *lse.shape, dtype=torch.float32, device=out.device),
    )


def merge_block(splits: int) -> int:
    """Splits whose partial rows a merging program loads at once."""
    return max(2, min(16, 1 << (splits - 1).bit_length()))


def merge_warps(dtype: torch.dtype) -> int:
    """Warps of a merging program: its threads load a row at a time, 16 bytes each."""
    return 512 * dtype.itemsize // (16 * 32)


def merge_parts(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    uneven: torch.Tensor | None = None,
) -> None:
    splits, num_tokens, num_heads, _ = part_out.shape
    out_unit = output_unit(out)
    _merge_splits_kernel[(num_tokens * num_heads,)](
        part_out,
        part_lse,
        attn_sink,
        uneven,
        out,
        lse,
        num_heads,
        num_tokens * num_heads,
        splits,
        out.stride(0) // out_unit,
        out.stride(1) // out_unit,
        lse.stride(0),
        MAX_SPLITS=MAX_SPLITS,
        BLOCK_S=merge_block(splits),
        OUT_UNIT=out_unit,
        num_warps=merge_warps(part_out.dtype),
    )
