"""The lightning indexer in Triton: scores, and the choice of keys. Choices are those of the reference."""

import torch
import triton
import triton.language as tl

from ...dispatch import Lowering
from ...formats import geometry
from ..selection import token_slices
from .bfloat16 import widen
from .common import INTERPRETED, KEEPS_OPERANDS, capability, cdiv, sized_jit
from .e4m3 import decode
from .indexer_cache import as_bytes, gather_index_cache, quantize_index_query, write_index_cache
from .indexer_topk import merge_topk, topk_indices
from .indexer_topk_rows import kept_bytes
from .requests import request_of

# keys of a tile of scores, and query tokens that share a tile of flat keys
SCORE_KEYS = 128
SCORE_KEYS_FP32 = 16 if KEEPS_OPERANDS else 32  # 32 would spill 5,608 bytes
SCORE_TOKENS = 4


@triton.jit
def _operand(x, NATIVE_FP8: tl.constexpr, UPCAST: tl.constexpr):
    """The operand of the dot: bytes of e4m3 as they are where tensor cores take them, else as float16, exactly.

    UPCAST makes float32 of all types, for the interpreter.
    """
    if x.dtype == tl.uint8:
        if UPCAST:
            value = decode(x)
        elif NATIVE_FP8:
            value = x.to(tl.float8e4nv, bitcast=True)
        else:
            value = decode(x).to(tl.float16)
    elif UPCAST:
        value = widen(x)
    else:
        value = x
    return value


@triton.jit
def _tile_scores(query, key, weight):
    """`sum_h weight_h relu(query_h . key)` of `[HEADS, 128]` and `[KEYS, 128]` operands."""
    product = tl.dot(key, tl.trans(query), input_precision="ieee", out_dtype=tl.float32)
    return tl.sum(tl.where(product < 0, 0.0, product) * weight[None, :], 1)


@sized_jit(any_alignment=("row_starts", "row_ends", "k_scale"))
def _flat_kernel(
    q,
    k,
    weights,
    row_starts,
    row_ends,
    k_scale,
    out,
    num_tokens: tl.int32,
    num_heads: tl.int32,
    num_kv: tl.int32,
    strides: (tl.int64,) * 5,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    CLEAN: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Scores of KEYS flat keys for TOKENS query tokens, one token after the other over keys in registers.

    Grid: (blocks of tokens times blocks of keys,). A token whose keys end before the tile, or begin behind it, costs
    two loads. Strides of q and k are in UNITs.
    """
    stride_q_token, stride_q_head, stride_k, stride_weights, stride_out = strides
    groups = tl.cdiv(num_tokens, TOKENS)
    low = tl.program_id(0) // groups * KEYS
    first_token = tl.program_id(0) % groups * TOKENS
    column = low + tl.arange(0, KEYS)
    there = column < num_kv
    inner = tl.arange(0, 128)
    head = tl.arange(0, HEADS)
    last = 0
    first = num_kv
    for i in range(TOKENS):
        token = tl.minimum(first_token + i, num_tokens - 1)
        last = tl.maximum(last, tl.load(row_ends + token))
        first = tl.minimum(first, tl.load(row_starts + token))
    if CLEAN | ((last > low) & (first < low + KEYS)):
        keys = k + (column.to(tl.int64) * (stride_k * UNIT))[:, None] + inner[None, :]
        key = _operand(tl.load(keys, mask=there[:, None], other=0), NATIVE_FP8, UPCAST)
        scale = tl.full((KEYS,), 1.0, tl.float32)
        if k_scale is not None:
            scale = tl.load(k_scale + column, mask=there, other=0.0)
        for i in range(TOKENS):
            token = (first_token + i).to(tl.int64)
            if token < num_tokens:
                start = tl.load(row_starts + token)
                end = tl.load(row_ends + token)
                target = out + token * stride_out + column
                within = there & (column >= start) & (column < end)
                if (end > low) & (start < low + KEYS):
                    source = q + token * (stride_q_token * UNIT) + (head * (stride_q_head * UNIT))[:, None]
                    source += inner[None, :]
                    query = _operand(tl.load(source, mask=(head < num_heads)[:, None], other=0), NATIVE_FP8, UPCAST)
                    weight = tl.load(weights + token * stride_weights + head, mask=head < num_heads, other=0.0)
                    score = _tile_scores(query, key, weight) * scale
                    tl.store(target, score, mask=within)
                if CLEAN:
                    tl.store(target, tl.full((KEYS,), float("-inf"), tl.float32), mask=there & ~within)


@sized_jit(any_alignment=("lengths", "block_table", "req_id_per_token", "ends"))
def _paged_kernel(
    q,
    index_cache,
    weights,
    lengths,
    block_table,
    req_id_per_token,
    out,
    ends,
    num_tokens: tl.int32,
    num_heads: tl.int32,
    num_requests: tl.int32,
    max_blocks: tl.int32,
    num_blocks: tl.int64,
    block_size: tl.int32,
    num_columns: tl.int32,
    strides: (tl.int64,) * 6,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    FP8: tl.constexpr,
    CLEAN: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Scores of KEYS positions of one token's request.

    Grid: (tokens times blocks of columns,). Programs behind the token's length leave at once. `ends` takes the lengths,
    0 of a token without a request.
    """
    stride_q_token, stride_q_head, stride_block, stride_weights, stride_table, stride_out = strides
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    low = tl.program_id(0) // num_tokens * KEYS
    position = low + tl.arange(0, KEYS)
    request, known = request_of(req_id_per_token, token, num_requests)
    length = tl.where(known, tl.load(lengths + token), 0)
    within = (position < length) & (position < max_blocks.to(tl.int64) * block_size) & (position < num_columns)
    target = out + token * stride_out + position
    if ends is not None:
        tl.store(ends + token, length, mask=low == 0)
    if low < length:
        inner = tl.arange(0, 128)
        head = tl.arange(0, HEADS)
        # no `find_block`: what is `within` is within the table, and one compare a key more can be seen
        block = tl.load(block_table + request * stride_table + position // block_size, mask=within, other=-1)
        readable = within & (block >= 0) & (block < num_blocks)
        block, offset = block.to(tl.int64), position % block_size
        start = index_cache + block * (stride_block * UNIT)
        keys = (start + offset * 128)[:, None] + inner[None, :]
        key = _operand(tl.load(keys, mask=readable[:, None], other=0), NATIVE_FP8, UPCAST)
        source = q + token * (stride_q_token * UNIT) + (head * (stride_q_head * UNIT))[:, None] + inner[None, :]
        query = _operand(tl.load(source, mask=(head < num_heads)[:, None], other=0), NATIVE_FP8, UPCAST)
        weight = tl.load(weights + token * stride_weights + head, mask=head < num_heads, other=0.0)
        score = _tile_scores(query, key, weight)
        if FP8:
            scales = (start + block_size.to(tl.int64) * 128 + offset * 4).to(tl.pointer_type(tl.float32))
            score *= tl.load(scales, mask=readable, other=0.0)
        tl.store(target, tl.where(readable, score, float("-inf")), mask=within)
    if CLEAN:
        tl.store(target, tl.full((KEYS,), float("-inf"), tl.float32), mask=(position < num_columns) & ~within)


def tile_keys(dtype: torch.dtype) -> int:
    """Keys of a tile of scores: float32 operands, which no tensor core takes, would spill at more."""
    return SCORE_KEYS_FP32 if dtype == torch.float32 else SCORE_KEYS


def takes_fp8(capability: tuple[int, int]) -> bool:
    """Whether tensor cores of this compute capability multiply e4m3."""
    return capability >= (8, 9)


def score_warps(dtype: torch.dtype, device_capability: tuple[int, int]) -> int:
    """Warps of a tile of scores: more where four spill.

    Four spill e4m3 that becomes float16 in registers, and from Triton 3.9 on float32 on SM80.
    """
    if dtype == torch.float32:
        return 8 if KEEPS_OPERANDS and device_capability == (8, 0) else 4
    return 8 if dtype == torch.float8_e4m3fn and not takes_fp8(device_capability) else 4


def in_units(*strides: int) -> tuple[int, list[int]]:
    """Strides in units of 16 elements where they all are, so that rows are known to be aligned and load in vectors."""
    unit = 16 if all(stride % 16 == 0 for stride in strides) else 1
    return unit, [stride // unit for stride in strides]


def padded_heads(num_heads: int) -> int:
    return max(16, triton.next_power_of_2(num_heads))


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    clean: bool = False,
    out: torch.Tensor,
) -> None:
    num_tokens, num_heads, _ = q.shape
    if num_tokens * k.shape[0] == 0:
        return
    keys, native = tile_keys(q.dtype), takes_fp8(capability(q.device))
    unit, strides = in_units(q.stride(0), q.stride(1), k.stride(0))
    _flat_kernel[(cdiv(num_tokens, SCORE_TOKENS) * cdiv(k.shape[0], keys),)](
        as_bytes(q),
        as_bytes(k),
        weights,
        row_starts,
        row_ends,
        k_scale,
        out,
        num_tokens,
        num_heads,
        k.shape[0],
        (*strides, weights.stride(0), out.stride(0)),
        NATIVE_FP8=native,
        UPCAST=INTERPRETED,
        CLEAN=clean,
        HEADS=padded_heads(num_heads),
        KEYS=keys,
        UNIT=unit,
        TOKENS=SCORE_TOKENS,
        num_warps=score_warps(q.dtype, capability(q.device)),
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
    ends: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    num_tokens, num_heads, _ = q.shape
    if num_tokens * max_length == 0:
        return
    num_blocks, block_size, _, _ = geometry(index_cache, cache_format)
    num_requests, max_blocks = block_table.shape
    keys, native = tile_keys(q.dtype), takes_fp8(capability(q.device))
    unit, strides = in_units(q.stride(0), q.stride(1), index_cache.stride(0))
    _paged_kernel[(num_tokens * cdiv(max_length, keys),)](
        as_bytes(q),
        index_cache,
        weights,
        lengths,
        block_table,
        req_id_per_token,
        out,
        ends,
        num_tokens,
        num_heads,
        num_requests,
        max_blocks,
        num_blocks,
        block_size,
        max_length,
        (*strides, weights.stride(0), block_table.stride(0), out.stride(0)),
        NATIVE_FP8=native,
        UPCAST=INTERPRETED,
        FP8=cache_format == "fp8_index",
        CLEAN=clean,
        HEADS=padded_heads(num_heads),
        KEYS=keys,
        UNIT=unit,
        num_warps=score_warps(q.dtype, capability(q.device)),
    )


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
    num_tokens = q.shape[0]
    if num_tokens == 0:
        return
    block_size = geometry(index_cache, cache_format).block_size
    num_columns = block_table.shape[1] * block_size
    ends = torch.empty_like(lengths)
    for tokens, scores in token_slices(num_tokens, num_columns, q.device, beside=kept_bytes(topk, num_columns)):
        requests = req_id_per_token[tokens]
        given = (
            q[tokens],
            index_cache,
            weights[tokens],
            lengths[tokens],
            block_table,
            requests,
            num_columns,
            cache_format,
        )
        paged_indexer_logits(*given, ends=ends[tokens], out=scores)
        slots = {"block_table": block_table, "req_id_per_token": requests, "block_size": block_size}
        chosen = {"indices": indices[tokens], "valid_counts": valid_counts[tokens]}
        topk_indices(scores, topk, row_ends=ends[tokens], **(slots if translate else {}), **chosen)


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
    num_tokens, num_columns = q.shape[0], k.shape[0]
    if num_tokens == 0:
        return
    for tokens, scores in token_slices(num_tokens, num_columns, q.device, beside=kept_bytes(topk, num_columns)):
        rows = {"row_starts": row_starts[tokens], "row_ends": row_ends[tokens]}
        indexer_logits(q[tokens], k, weights[tokens], **rows, k_scale=k_scale, out=scores)
        topk_indices(scores, topk, **rows, indices=indices[tokens], valid_counts=valid_counts[tokens])


LOWERINGS = {
    "write_index_cache": Lowering(write_index_cache),
    "gather_index_cache": Lowering(gather_index_cache),
    "quantize_index_query": Lowering(quantize_index_query),
    "indexer_logits": Lowering(indexer_logits),
    "paged_indexer_logits": Lowering(paged_indexer_logits),
    "topk_indices": Lowering(topk_indices),
    "select_keys": Lowering(select_keys),
    "select_keys.flat": Lowering(select_keys_flat),
    "merge_topk": Lowering(merge_topk),
}
