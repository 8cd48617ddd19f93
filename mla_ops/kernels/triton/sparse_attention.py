"""Token-level sparse MLA in portable Triton: SM80 and up, any number of heads, any cache format."""

from typing import NamedTuple

import torch
import triton.language as tl

from ...dispatch import Lowering
from ...formats import LATENT_DIM, geometry, get_format
from .bfloat16 import narrow
from .common import INTERPRETED, capability, cdiv, num_sms, sized_jit
from .sparse_attention_device import attend_keys, load_query, named_end, new_state, store_result
from .sparse_attention_extra import _attend_extra_kernel

LOG2E = 1.4426950408889634
MAX_SPLITS = 64
# fewer keys than this do not pay for a split: its fixed cost (Q, partial result, merge) is that of about as many
MIN_SPLIT_KEYS = 64
DETERMINISTIC_SPLIT_KEYS = 512


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
        return Tile(16, 16, 8 if mode == "fp8_v4_exact" else 4, 1, decode_method)
    if num_heads <= 16:
        return Tile(16, 32, 4, 1, decode_method)
    # Accumulators of 64 rows would go to SM100's tensor memory, where four of them and the scores do not fit: there,
    # 32 heads and the same instructions as everywhere. So, too, for the keys of V4, whose scaling takes the registers
    # that 64 rows leave.
    if num_heads <= 32 or major in (10, 11) or mode == "fp8_v4":
        return Tile(32, 32, 8, 1, decode_method)
    if mode == "fp8":
        return Tile(64, 32, 8, 1, decode_method)
    small = major == 12 or device_capability in ((8, 6), (8, 9)) or major < 8
    return Tile(64, 16 if small else 64, 8, 1, decode_method)


def num_splits(num_tokens: int, num_head_blocks: int, topk: int, sms: int, deterministic: bool = False) -> int:
    """Programs that share one row's keys: as many as leave no SM idle, none with fewer than MIN_SPLIT_KEYS keys.

    From shapes alone, so that a captured launch fits every replay; from topk alone where a row must not notice its
    batch.
    """
    if deterministic:
        return max(1, min(cdiv(topk, DETERMINISTIC_SPLIT_KEYS), MAX_SPLITS))
    programs = num_tokens * num_head_blocks
    if programs == 0 or programs >= sms:
        return 1
    return max(1, min(sms // programs, cdiv(topk, MIN_SPLIT_KEYS), MAX_SPLITS))


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
    but the first. The walk over the keys is `attend_keys`.

    Registers: accumulators BLOCK_H * 512 float32, one tile of keys, and Q where the tensor cores want it there.
    Shared memory: Q, the tile of keys, P.
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
        end = named_end(index_row, begin, end)

    table = block_table
    known = True
    if block_table is not None:
        request = tl.load(req_id_per_token + token)
        known = (request >= 0) & (request < num_requests)
        table = block_table + request.to(tl.int64) * stride_table

    EXACT: tl.constexpr = MODE == "exact" or MODE == "fp8_exact" or MODE == "fp8_v4_exact"
    q_row = q + token * (stride_q_token * Q_UNIT) + (head.to(tl.int64) * (stride_q_head * Q_UNIT))[:, None]
    state = attend_keys(
        q_row,
        load_query(q_row, live_head, ROPE, EXACT),
        live_head,
        new_state(BLOCK_H),
        kv,
        index_row,
        begin,
        end,
        table,
        known,
        scale_log2,
        num_blocks,
        block_size,
        max_blocks,
        stride_block,
        MODE,
        ROPE,
        ROW_WIDTH,
        KV_UNIT,
        BLOCK_H,
        BLOCK_N,
        DECODE,
        UPCAST,
    )
    store_result(
        state,
        token,
        head,
        live_head,
        split,
        attn_sink,
        out,
        lse,
        stride_out_split,
        stride_out_token,
        stride_out_head,
        stride_lse_split,
        stride_lse_token,
        PARTIAL,
        UPCAST,
    )


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
    """How keys become operands: "fp8", "fp8_v4", "plain", or in IEEE float32 "fp8_exact", "fp8_v4_exact", "exact".

    float16 and float32 queries do not fit bfloat16 operands, and the RoPE part of the quantised formats does not fit
    float16, so they read such a cache through float32.
    """
    if cache_format in ("fp8_ds_mla", "fp8_ds_mla_v4"):
        mode = "fp8" if cache_format == "fp8_ds_mla" else "fp8_v4"
        return mode if q_dtype == torch.bfloat16 else f"{mode}_exact"
    return "exact" if q_dtype == torch.float32 else "plain"


def operand_modes(q_dtype: torch.dtype, cache_format: str, extra_cache_format: str) -> tuple[str, str]:
    """As `operand_mode` for two caches, which are read through float32 together or not at all."""
    mode, extra_mode = operand_mode(q_dtype, cache_format), operand_mode(q_dtype, extra_cache_format)
    if mode.endswith("exact") and extra_mode == "plain":
        return mode, "exact"
    if extra_mode.endswith("exact") and mode == "plain":
        return "exact", extra_mode
    return mode, extra_mode


def two_cache_tile(device_capability: tuple[int, int], num_heads: int, modes: tuple[str, str]) -> Tile:
    """The tile for both caches. Two modes keep Q in shared memory twice, so that only the smallest tile fits."""
    mode, extra_mode = modes
    if mode == extra_mode:
        return tile(device_capability, num_heads, mode)
    return tile(device_capability, 16, mode)


class CacheSizes(NamedTuple):
    """A cache as the kernels take it: sizes, and the row and block stride in elements, the latter over `unit`."""

    num_blocks: int
    block_size: int
    row_width: int
    unit: int
    stride_block: int


def cache_keys(kv_cache: torch.Tensor, cache_format: str) -> CacheSizes:
    num_blocks, block_size, block_stride, head_dim = geometry(kv_cache, cache_format)
    entry = get_format(cache_format)
    row_width = entry.data_bytes or entry.row_width(head_dim)
    return CacheSizes(num_blocks, block_size, row_width, 16 // entry.dtype.itemsize, block_stride // 16)


def query_unit(q: torch.Tensor) -> int:
    return 8 if q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0 else 1


def allocate_parts(out: torch.Tensor, lse: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the splits write: rows of float32 that a merge reads, or the result itself if there is one split."""
    if splits == 1:
        return out.unsqueeze(0), lse.unsqueeze(0)
    return (
        torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device),
        torch.empty(splits, *lse.shape, dtype=torch.float32, device=out.device),
    )


def merge_parts(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    splits, num_tokens, num_heads = part_lse.shape
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


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    mode: str,
    keys: CacheSizes,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    block_table: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
    deterministic: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    topk = indices.shape[1]
    if num_tokens == 0:
        return
    chosen = tile(capability(q.device), num_heads, mode)
    head_blocks = cdiv(num_heads, chosen.block_h)
    splits = num_splits(num_tokens, head_blocks, topk, num_sms(q.device), deterministic)
    num_requests, max_blocks = block_table.shape if block_table is not None else (0, 0)
    q_unit = query_unit(q)
    part_out, part_lse = allocate_parts(out, lse, splits)
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
        keys.num_blocks,
        keys.block_size,
        num_requests,
        max_blocks,
        splits,
        q.stride(0) // q_unit,
        q.stride(1) // q_unit,
        keys.stride_block,
        indices.stride(0),
        block_table.stride(0) if block_table is not None else 0,
        part_out.stride(0),
        part_out.stride(1),
        part_out.stride(2),
        part_lse.stride(0),
        part_lse.stride(1),
        MODE=mode,
        ROPE=head_dim > LATENT_DIM,
        ROW_WIDTH=keys.row_width,
        Q_UNIT=q_unit,
        KV_UNIT=keys.unit,
        PARTIAL=splits > 1,
        BLOCK_H=chosen.block_h,
        BLOCK_N=chosen.block_n,
        DECODE=chosen.decode,
        UPCAST=INTERPRETED,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    if splits > 1:
        merge_parts(part_out, part_lse, attn_sink, out, lse)


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
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    _attend(
        q,
        kv_cache,
        indices,
        softmax_scale,
        operand_mode(q.dtype, cache_format),
        cache_keys(kv_cache, cache_format),
        topk_length,
        attn_sink,
        block_table,
        req_id_per_token,
        deterministic,
        out,
        lse,
    )


def paged_sparse_attention_extra(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    extra_kv_cache: torch.Tensor,
    extra_indices: torch.Tensor,
    extra_cache_format: str,
    *,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    extra_block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    topk, extra_topk = indices.shape[1], extra_indices.shape[1]
    if num_tokens == 0:
        return
    mode, extra_mode = operand_modes(q.dtype, cache_format, extra_cache_format)
    keys, extra_keys = cache_keys(kv_cache, cache_format), cache_keys(extra_kv_cache, extra_cache_format)
    chosen = two_cache_tile(capability(q.device), num_heads, (mode, extra_mode))
    head_blocks = cdiv(num_heads, chosen.block_h)
    splits = num_splits(num_tokens, head_blocks, topk + extra_topk, num_sms(q.device), deterministic)
    num_requests, max_blocks = block_table.shape if block_table is not None else (0, 0)
    extra_num_requests, extra_max_blocks = extra_block_table.shape if extra_block_table is not None else (0, 0)
    q_unit = query_unit(q)
    part_out, part_lse = allocate_parts(out, lse, splits)
    _attend_extra_kernel[(num_tokens * head_blocks, splits)](
        q,
        kv_cache,
        indices,
        topk_length,
        block_table,
        extra_kv_cache,
        extra_indices,
        extra_topk_length,
        extra_block_table,
        req_id_per_token,
        None if splits > 1 else attn_sink,
        part_out,
        part_lse,
        float(softmax_scale) * LOG2E,
        num_heads,
        splits,
        topk,
        keys.num_blocks,
        keys.block_size,
        num_requests,
        max_blocks,
        extra_topk,
        extra_keys.num_blocks,
        extra_keys.block_size,
        extra_num_requests,
        extra_max_blocks,
        q.stride(0) // q_unit,
        q.stride(1) // q_unit,
        keys.stride_block,
        indices.stride(0),
        block_table.stride(0) if block_table is not None else 0,
        extra_keys.stride_block,
        extra_indices.stride(0),
        extra_block_table.stride(0) if extra_block_table is not None else 0,
        part_out.stride(0),
        part_out.stride(1),
        part_out.stride(2),
        part_lse.stride(0),
        part_lse.stride(1),
        MODE=mode,
        ROW_WIDTH=keys.row_width,
        KV_UNIT=keys.unit,
        EXTRA_MODE=extra_mode,
        EXTRA_ROW_WIDTH=extra_keys.row_width,
        EXTRA_KV_UNIT=extra_keys.unit,
        ROPE=head_dim > LATENT_DIM,
        Q_UNIT=q_unit,
        PARTIAL=splits > 1,
        BLOCK_H=chosen.block_h,
        BLOCK_N=chosen.block_n,
        DECODE=chosen.decode,
        UPCAST=INTERPRETED,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    if splits > 1:
        merge_parts(part_out, part_lse, attn_sink, out, lse)


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_kv, head_dim = kv.shape
    unit = 16 // kv.element_size()
    if kv.stride(0) % unit:
        unit = 1
    # each row is a block of its own
    keys = CacheSizes(num_kv, 1, head_dim, unit, kv.stride(0) // unit)
    mode = operand_mode(q.dtype, "")
    _attend(q, kv, indices, softmax_scale, mode, keys, topk_length, attn_sink, None, None, deterministic, out, lse)


LOWERINGS = {
    "paged_sparse_attention": Lowering(paged_sparse_attention, deterministic=True),
    "paged_sparse_attention.extra": Lowering(paged_sparse_attention_extra, deterministic=True),
    "sparse_attention": Lowering(sparse_attention, deterministic=True),
}
