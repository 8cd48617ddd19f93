"""Token-level sparse MLA in portable Triton: SM80 and up, any number of heads, any cache format."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...dispatch import Lowering
from ...formats import LATENT_DIM
from .bfloat16 import narrow, widen
from .common import INTERPRETED, capability, cdiv, num_sms, sized_jit
from .e4m3 import decode, decode_bf16

LOG2E = 1.4426950408889634
MAX_SPLITS = 64
# fewer keys than this do not pay for a split: its fixed cost (Q, partial result, merge) is that of about as many
MIN_SPLIT_KEYS = 64


class Tile(NamedTuple):
    """Sizes of one program, heads x keys, and how it is compiled."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    decode: str


def tile(device_capability: tuple[int, int], num_heads: int, mode: str) -> Tile:
    """The tile for a device, by its shared memory and registers; `tests/test_aot_compile.py` checks every entry.

    Shared memory holds Q and one tile of keys in the operands' type: 163 KB on SM80, 227 on SM90 and SM100, 99 on
    SM86, SM89 and SM120. The accumulators, 512 float32 a head, are in registers: 64 heads take half of them all.
    """
    major = device_capability[0]
    decode_method = "portable" if major < 8 else "packed" if device_capability < (8, 9) else "hardware"
    if mode.endswith("exact"):
        return Tile(16, 16, 4, 1, decode_method)
    if num_heads <= 16:
        return Tile(16, 32, 4, 1, decode_method)
    # Accumulators of 64 rows would go to SM100's tensor memory, where four of them and the scores do not fit: there,
    # 32 heads and the same instructions as everywhere.
    if num_heads <= 32 or major in (10, 11):
        return Tile(32, 32, 8, 1, decode_method)
    if mode == "fp8":
        return Tile(64, 32, 8, 1, decode_method)
    small = major == 12 or device_capability in ((8, 6), (8, 9)) or major < 8
    return Tile(64, 16 if small else 64, 8, 1, decode_method)


def num_splits(num_tokens: int, num_head_blocks: int, topk: int, sms: int) -> int:
    """Programs that share one row's keys: as many as leave no SM idle, none with fewer than MIN_SPLIT_KEYS keys.

    From shapes alone, so that a captured launch fits every replay.
    """
    programs = num_tokens * num_head_blocks
    if programs == 0 or programs >= sms:
        return 1
    return max(1, min(sms // programs, cdiv(topk, MIN_SPLIT_KEYS), MAX_SPLITS))


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """`a @ b + acc` in float32. The interpreter's dot takes bfloat16 bits for integers, hence UPCAST."""
    if UPCAST:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _round(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """float32 to an operand's or an output's type: the instruction, or in the interpreter what it should do."""
    if UPCAST:
        return narrow(x, dtype)
    return x.to(dtype)


@triton.jit
def _load_keys(start, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr, DECODE: tl.constexpr):
    """Latent dims FIRST .. FIRST + WIDTH of the keys at `start`, [keys, WIDTH], zero where not valid.

    MODE "fp8" gives bfloat16 without the scale, "fp8_exact" and "exact" float32 with it, "plain" what is there.
    """
    place = start[:, None] + (FIRST + tl.arange(0, WIDTH))[None, :]
    if MODE == "fp8":
        keys = decode_bf16(tl.load(place, mask=valid[:, None], other=0), DECODE)
    elif MODE == "fp8_exact":
        keys = decode(tl.load(place, mask=valid[:, None], other=0)) * _load_scale(start, valid, FIRST // 128)[:, None]
    elif MODE == "exact":
        keys = tl.load(place, mask=valid[:, None], other=0.0).to(tl.float32)
    else:
        keys = tl.load(place, mask=valid[:, None], other=0.0)
    return keys


@triton.jit
def _load_scale(start, valid, GROUP: tl.constexpr):
    return tl.load((start + 512).to(tl.pointer_type(tl.float32)) + GROUP, mask=valid, other=0.0)


@triton.jit
def _load_rope(start, valid, MODE: tl.constexpr):
    """The 64 RoPE dims of the keys at `start`, [keys, 64], zero where not valid."""
    if MODE == "fp8" or MODE == "fp8_exact":
        place = (start + 528).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, 64)[None, :]
    else:
        place = start[:, None] + (512 + tl.arange(0, 64))[None, :]
    value = tl.load(place, mask=valid[:, None], other=0.0)
    if MODE == "fp8_exact" or MODE == "exact":
        value = widen(value)
    return value


@sized_jit(any_alignment=("indices", "topk_length", "attn_sink", "block_table", "req_id_per_token", "lse"))
def _attend_kernel(
    q,
    kv,
    indices,
    topk_length,
    attn_sink,
    block_table,
    req_id_per_token,
    out,
    lse,
    scale_log2: tl.float32,
    num_heads: tl.int32,
    topk: tl.int32,
    num_blocks: tl.int64,
    block_size: tl.int32,
    num_requests: tl.int32,
    max_blocks: tl.int32,
    num_splits: tl.int32,
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_block: tl.int64,
    stride_indices: tl.int64,
    stride_table: tl.int64,
    stride_out_split: tl.int64,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_split: tl.int64,
    stride_lse_token: tl.int64,
    MODE: tl.constexpr,
    ROPE: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    Q_UNIT: tl.constexpr,
    KV_UNIT: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One token, BLOCK_H heads, one split of the token's keys: online softmax over tiles of BLOCK_N keys.

    Grid: (tokens * head blocks, splits). Head blocks of a token are neighbours, so that its keys come from L2 for all
    but the first.

    A tile of keys is read once, in four groups of 128 latent dims and the RoPE dims, and each group serves both
    QK and PV: four dots [BLOCK_H, 128] x [128, BLOCK_N] into the scores, four dots [BLOCK_H, BLOCK_N] x
    [BLOCK_N, 128] into four float32 accumulators. Groups are also what shares a scale in fp8_ds_mla. The e4m3 values
    are exact as bfloat16, so the scale stays outside of the operands: it multiplies the group's partial scores, and
    goes into the float32 probabilities before they are rounded. Hence any positive float32 scale is right.

    Registers: accumulators BLOCK_H * 512 float32, one tile of keys, and Q where the tensor cores want it there.
    Shared memory: Q, the tile of keys, P.

    A key is looked at only if its index, its request, its block-table entry and its block are in range and it is
    within the row's length: all else is masked at the load, so nothing in an unused slot is ever seen.
    """
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    live_head = head < num_heads
    index_row = indices + token * stride_indices

    length = topk
    if topk_length is not None:
        length = tl.minimum(tl.maximum(tl.load(topk_length + token), 0), topk)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits) * BLOCK_N
    begin = tl.minimum(split * share, length)
    end = tl.minimum(begin + share, length)
    if topk_length is None:
        # nobody said where the row ends: its tail of -1 is found by reading the indices once
        last = begin
        for start in range(begin, end, 512):
            column = start + tl.arange(0, 512)
            index = tl.load(index_row + column, mask=column < end, other=-1)
            last = tl.maximum(last, tl.max(tl.where(index >= 0, column + 1, 0), 0))
        end = last

    table = block_table
    known = True
    if block_table is not None:
        request = tl.load(req_id_per_token + token)
        known = (request >= 0) & (request < num_requests)
        table = block_table + request.to(tl.int64) * stride_table

    EXACT: tl.constexpr = MODE == "exact" or MODE == "fp8_exact"
    q_row = q + token * (stride_q_token * Q_UNIT) + (head.to(tl.int64) * (stride_q_head * Q_UNIT))[:, None]
    group = tl.arange(0, 128)[None, :]
    if not EXACT:
        q0 = tl.load(q_row + group, mask=live_head[:, None], other=0.0)
        q1 = tl.load(q_row + (128 + group), mask=live_head[:, None], other=0.0)
        q2 = tl.load(q_row + (256 + group), mask=live_head[:, None], other=0.0)
        q3 = tl.load(q_row + (384 + group), mask=live_head[:, None], other=0.0)
        if ROPE:
            q4 = tl.load(q_row + (512 + tl.arange(0, 64))[None, :], mask=live_head[:, None], other=0.0)

    acc0 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc1 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc2 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc3 = tl.zeros((BLOCK_H, 128), tl.float32)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(begin, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        index = tl.load(index_row + column, mask=column < end, other=-1)
        valid = index >= 0
        block = index // block_size
        if block_table is not None:
            valid &= known & (block < max_blocks)
            block = tl.load(table + block, mask=valid, other=-1)
            valid &= block >= 0
        valid &= block < num_blocks
        key = kv + block.to(tl.int64) * (stride_block * KV_UNIT) + (index % block_size).to(tl.int64) * ROW_WIDTH

        zeros = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
        if EXACT:
            scores = zeros
            # narrow pieces: without tensor cores a thread holds whole rows of both operands
            for piece in tl.static_range(0, 512, 32):
                keys = _load_keys(key, valid, piece, 32, MODE, DECODE)
                queries = tl.load(q_row + (piece + tl.arange(0, 32))[None, :], mask=live_head[:, None], other=0.0)
                scores = _dot(widen(queries), tl.trans(keys), scores, UPCAST)
            if ROPE:
                queries = tl.load(q_row + (512 + tl.arange(0, 64))[None, :], mask=live_head[:, None], other=0.0)
                scores = _dot(widen(queries), tl.trans(_load_rope(key, valid, MODE)), scores, UPCAST)
        else:
            # group by group, for a tile of bytes that waits in registers takes one register each
            k0 = _load_keys(key, valid, 0, 128, MODE, DECODE)
            scores = _dot(q0, tl.trans(k0), zeros, UPCAST)
            if MODE == "fp8":
                scale0 = _load_scale(key, valid, 0)[None, :]
                scale1 = _load_scale(key, valid, 1)[None, :]
                scale2 = _load_scale(key, valid, 2)[None, :]
                scale3 = _load_scale(key, valid, 3)[None, :]
                scores *= scale0
                k1 = _load_keys(key, valid, 128, 128, MODE, DECODE)
                scores += _dot(q1, tl.trans(k1), zeros, UPCAST) * scale1
                k2 = _load_keys(key, valid, 256, 128, MODE, DECODE)
                scores += _dot(q2, tl.trans(k2), zeros, UPCAST) * scale2
                k3 = _load_keys(key, valid, 384, 128, MODE, DECODE)
                scores += _dot(q3, tl.trans(k3), zeros, UPCAST) * scale3
            else:
                k1 = _load_keys(key, valid, 128, 128, MODE, DECODE)
                k2 = _load_keys(key, valid, 256, 128, MODE, DECODE)
                k3 = _load_keys(key, valid, 384, 128, MODE, DECODE)
                scores = _dot(q1, tl.trans(k1), scores, UPCAST)
                scores = _dot(q2, tl.trans(k2), scores, UPCAST)
                scores = _dot(q3, tl.trans(k3), scores, UPCAST)
            if ROPE:
                scores = _dot(q4, tl.trans(_load_rope(key, valid, MODE)), scores, UPCAST)

        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - pivot)
        weights = tl.exp2(scores - pivot[:, None])
        total = total * fade + tl.sum(weights, 1)
        top = new_top
        acc0 *= fade[:, None]
        acc1 *= fade[:, None]
        acc2 *= fade[:, None]
        acc3 *= fade[:, None]
        if EXACT:
            acc0 = _dot(weights, _load_keys(key, valid, 0, 128, MODE, DECODE), acc0, UPCAST)
            acc1 = _dot(weights, _load_keys(key, valid, 128, 128, MODE, DECODE), acc1, UPCAST)
            acc2 = _dot(weights, _load_keys(key, valid, 256, 128, MODE, DECODE), acc2, UPCAST)
            acc3 = _dot(weights, _load_keys(key, valid, 384, 128, MODE, DECODE), acc3, UPCAST)
        elif MODE == "fp8":
            acc0 = _dot(_round(weights * scale0, tl.bfloat16, UPCAST), k0, acc0, UPCAST)
            acc1 = _dot(_round(weights * scale1, tl.bfloat16, UPCAST), k1, acc1, UPCAST)
            acc2 = _dot(_round(weights * scale2, tl.bfloat16, UPCAST), k2, acc2, UPCAST)
            acc3 = _dot(_round(weights * scale3, tl.bfloat16, UPCAST), k3, acc3, UPCAST)
        else:
            rounded = _round(weights, k0.dtype, UPCAST)
            acc0 = _dot(rounded, k0, acc0, UPCAST)
            acc1 = _dot(rounded, k1, acc1, UPCAST)
            acc2 = _dot(rounded, k2, acc2, UPCAST)
            acc3 = _dot(rounded, k3, acc3, UPCAST)

    # base 2 until the very end; a row whose scores overflowed has lse +inf, as in the reference
    safe = tl.where(total == 0, 1.0, total)
    log2_sum = tl.where(top == float("inf"), float("inf"), top + tl.log2(safe))
    log2_sum = tl.where(total == 0, float("-inf"), log2_sum)
    factor = tl.where(total == 0, 0.0, 1.0 / safe)
    lse_place = lse + split * stride_lse_split + token * stride_lse_token + head
    if PARTIAL:
        tl.store(lse_place, log2_sum, mask=live_head)
    else:
        if attn_sink is not None:
            sink = tl.load(attn_sink + head, mask=live_head, other=0.0) * 1.4426950408889634
            factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp2(sink - log2_sum)))
        tl.store(lse_place, log2_sum * 0.6931471805599453, mask=live_head)
    out_row = out + split * stride_out_split + token * stride_out_token + (head.to(tl.int64) * stride_out_head)[:, None]
    stored = live_head[:, None]
    if PARTIAL:
        # the merge does not read a split without keys
        stored &= (total != 0)[:, None]
    element: tl.constexpr = out.dtype.element_ty
    tl.store(out_row + group, _round(acc0 * factor[:, None], element, UPCAST), mask=stored)
    tl.store(out_row + (128 + group), _round(acc1 * factor[:, None], element, UPCAST), mask=stored)
    tl.store(out_row + (256 + group), _round(acc2 * factor[:, None], element, UPCAST), mask=stored)
    tl.store(out_row + (384 + group), _round(acc3 * factor[:, None], element, UPCAST), mask=stored)


@sized_jit(any_alignment=("attn_sink", "lse"))
def _merge_splits_kernel(
    partial_out,
    partial_lse,
    attn_sink,
    out,
    lse,
    num_heads: tl.int32,
    num_rows: tl.int64,
    num_splits: tl.int32,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_token: tl.int64,
    BLOCK_S: tl.constexpr,
):
    """Merges the splits of one (token, head), exactly, and applies the sink.

    Grid: (tokens * heads,). The base-2 lse of all splits, at most BLOCK_S, first; then one pass over the partial rows
    of 512 float32, in the order of the splits. A split that had nothing to attend to is not read: nothing was written.
    """
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    head = row % num_heads
    splits = tl.arange(0, BLOCK_S)
    parts = tl.load(partial_lse + splits * num_rows + row, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(parts, 0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(parts - pivot), 0)
    column = tl.arange(0, 512)
    acc = tl.zeros((512,), tl.float32)
    for split in range(num_splits):
        part = tl.load(partial_lse + split * num_rows + row)
        place = partial_out + (split * num_rows + row) * 512 + column
        written = tl.where(part == float("-inf"), 0, 512)
        acc += tl.exp2(part - pivot) * tl.load(place, mask=column < written, other=0.0)
    safe = tl.where(total == 0, 1.0, total)
    log2_sum = tl.where(top == float("inf"), float("inf"), pivot + tl.log2(safe))
    log2_sum = tl.where(total == 0, float("-inf"), log2_sum)
    factor = tl.where(total == 0, 0.0, 1.0 / safe)
    if attn_sink is not None:
        sink = tl.load(attn_sink + head) * 1.4426950408889634
        factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp2(sink - log2_sum)))
    place = out + token * stride_out_token + head.to(tl.int64) * stride_out_head + column
    tl.store(place, narrow(acc * factor, out.dtype.element_ty))
    tl.store(lse + token * stride_lse_token + head, log2_sum * 0.6931471805599453)


def operand_mode(q_dtype: torch.dtype, cache_format: str) -> str:
    """How keys become operands: "fp8", "plain", or in IEEE float32 "fp8_exact" and "exact".

    float16 and float32 queries do not fit bfloat16 operands, and fp8_ds_mla's RoPE part does not fit float16, so they
    read such a cache through float32.
    """
    if cache_format == "fp8_ds_mla":
        return "fp8" if q_dtype == torch.bfloat16 else "fp8_exact"
    return "exact" if q_dtype == torch.float32 else "plain"


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    num_blocks: int,
    block_size: int,
    row_width: int,
    kv_unit: int,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    block_table: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    topk = indices.shape[1]
    if num_tokens == 0:
        return
    mode = operand_mode(q.dtype, cache_format)
    chosen = tile(capability(q.device), num_heads, mode)
    head_blocks = cdiv(num_heads, chosen.block_h)
    splits = num_splits(num_tokens, head_blocks, topk, num_sms(q.device))
    num_requests, max_blocks = block_table.shape if block_table is not None else (0, 0)
    q_unit = 8 if q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0 else 1
    if splits > 1:
        part_out = torch.empty(splits, num_tokens, num_heads, LATENT_DIM, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, num_tokens, num_heads, dtype=torch.float32, device=q.device)
    else:
        part_out, part_lse = out.unsqueeze(0), lse.unsqueeze(0)
    _attend_kernel[(num_tokens * head_blocks, splits)](
        q,
        kv,
        indices,
        topk_length,
        None if splits > 1 else attn_sink,
        block_table,
        req_id_per_token,
        part_out,
        part_lse,
        float(softmax_scale) * LOG2E,
        num_heads,
        topk,
        num_blocks,
        block_size,
        num_requests,
        max_blocks,
        splits,
        q.stride(0) // q_unit,
        q.stride(1) // q_unit,
        kv.stride(0) // kv_unit,
        indices.stride(0),
        block_table.stride(0) if block_table is not None else 0,
        part_out.stride(0),
        part_out.stride(1),
        part_out.stride(2),
        part_lse.stride(0),
        part_lse.stride(1),
        MODE=mode,
        ROPE=head_dim > LATENT_DIM,
        ROW_WIDTH=row_width,
        Q_UNIT=q_unit,
        KV_UNIT=kv_unit,
        PARTIAL=splits > 1,
        BLOCK_H=chosen.block_h,
        BLOCK_N=chosen.block_n,
        DECODE=chosen.decode,
        UPCAST=INTERPRETED,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    if splits > 1:
        _merge_splits_kernel[(num_tokens * num_heads,)](
            part_out,
            part_lse,
            attn_sink,
            out,
            lse,
            num_heads,
            num_tokens * num_heads,
            splits,
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            BLOCK_S=MAX_SPLITS,
            num_warps=4,
        )


def paged_sparse_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_blocks, block_size, row_width = kv_cache.shape
    _attend(
        q,
        kv_cache,
        indices,
        softmax_scale,
        cache_format,
        num_blocks,
        block_size,
        row_width,
        16 // kv_cache.element_size(),
        topk_length,
        attn_sink,
        block_table,
        req_id_per_token,
        out,
        lse,
    )


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    unit = 16 // kv.element_size()
    _attend(
        q,
        kv,
        indices,
        softmax_scale,
        "",
        kv.shape[0],
        1,
        kv.shape[1],
        unit if kv.stride(0) % unit == 0 else 1,
        topk_length,
        attn_sink,
        None,
        None,
        out,
        lse,
    )


LOWERINGS = {
    "paged_sparse_attention": Lowering(paged_sparse_attention),
    "sparse_attention": Lowering(sparse_attention),
}
