"""Exact softmax merge of two partial results in Triton."""

import torch
import triton.language as tl

from ...dispatch import Lowering
from .bfloat16 import narrow, widen
from .common import cdiv, sized_jit

MERGE_ROWS = 4


@sized_jit(any_alignment=("lse_a", "lse_b", "lse"))
def _merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_rows: tl.int64,
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
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merges ROWS (token, head) rows.

    Grid: (blocks of ROWS rows, pieces of BLOCK_D values). A side with weight 0 is not even read, as it may hold
    anything; +inf as lse marks an empty row in some kernels and counts as -inf.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    within = row < num_rows
    token = row // num_heads
    head = row % num_heads
    empty = float("-inf")
    a = tl.load(lse_a + token * stride_lse_a_token + head * stride_lse_a_head, mask=within, other=empty)
    b = tl.load(lse_b + token * stride_lse_b_token + head * stride_lse_b_head, mask=within, other=empty)
    a = tl.where(a == float("inf"), empty, a)
    b = tl.where(b == float("inf"), empty, b)
    top = tl.maximum(a, b)
    pivot = tl.where(top == empty, 0.0, top)
    weight_a = tl.exp(a - pivot)
    weight_b = tl.exp(b - pivot)
    total = weight_a + weight_b
    safe = tl.where(total == 0, 1.0, total)

    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = within[:, None] & (column < head_dim_v)[None, :]
    place_a = (token * stride_a_token + head * stride_a_head)[:, None] + column[None, :]
    place_b = (token * stride_b_token + head * stride_b_head)[:, None] + column[None, :]
    value_a = widen(tl.load(out_a + place_a, mask=inside & (weight_a != 0)[:, None], other=0.0))
    value_b = widen(tl.load(out_b + place_b, mask=inside & (weight_b != 0)[:, None], other=0.0))
    merged = value_a * (weight_a / safe)[:, None] + value_b * (weight_b / safe)[:, None]
    place = (token * stride_token + head * stride_head)[:, None] + column[None, :]
    tl.store(out + place, narrow(merged, out.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(lse + token * stride_lse_token + head, tl.where(total == 0, empty, pivot + tl.log(safe)), mask=within)


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
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return
    block_d = 512 if head_dim_v > 256 else 128
    _merge_kernel[(cdiv(num_rows, MERGE_ROWS), max(1, cdiv(head_dim_v, block_d)))](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        num_rows,
        num_heads,
        head_dim_v,
        out_a.stride(0),
        out_a.stride(1),
        lse_a.stride(0),
        lse_a.stride(1),
        out_b.stride(0),
        out_b.stride(1),
        lse_b.stride(0),
        lse_b.stride(1),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        ROWS=MERGE_ROWS,
        BLOCK_D=block_d,
        num_warps=4,
    )


LOWERINGS = {"merge_attention_states": Lowering(merge_attention_states)}
