"""Token-level sparse MLA in portable Triton: SM80 and up, any number of heads, any cache format."""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton.language as tl

from ...dispatch import Lowering
from ...formats import LATENT_DIM, geometry, get_format
from .attention_options import (
    SHORT_ROW,
    Tile,
    attention_options,
    has_its_sm,
    is_steady,
    keeps_indices,
    looks_at_indices,
    make_tile,
    operand_mode,
    operand_modes,
    spares_copies,
)
from .common import KEEPS_OPERANDS, Pages, capability, cdiv, num_sms, shared_of_sm, sized_jit
from .e4m3 import decode_method
from .index import convert_req_index_to_global_index
from .sparse_attention_again import store_walk
from .sparse_attention_device import (
    attend_keys,
    last_indices,
    load_query,
    named_end,
    new_state,
    query_rows,
    sample_indices,
    share_of_keys,
    without_copies,
)
from .sparse_attention_extra import _attend_extra_kernel
from .sparse_attention_keys import Keys, divider, fetch_indices, make_keys
from .sparse_attention_missing import load_indices, whole_tiles, whole_tiles_or_one
from .sparse_attention_wide import attend_whole, is_whole, load_query_whole
from .splits import allocate_parts, merge_parts, output_unit
from .waves import Shares, parts_of, suits_large_tiles, waves_of

LOG2E = 1.4426950408889634
LARGEST_ROW = 2**28  # rows in line are fewer units apart: their distance in bytes has 32 bits
SHARED_OF_FOUR_WARPS = 75 * 1024  # bytes that a program of 32 heads over plain keys takes, others more
SHARED_OF_A_PAIR = 92 * 1024  # the most that one of two such programs takes
FEW_ROWS = 128  # tokens times heads; twice as many of up to 32 heads
MANY = 8  # SMs for a program of a row that is not cut: up to as many, rows are many


def tile(device_capability: tuple[int, int], num_heads: int, mode: str, alone: bool = True) -> Tile:
    """The tile for a device, by its shared memory and registers; `tests/test_aot_compile.py` checks every entry.

    `alone`: whether a program has an SM to itself (`programs_are_alone`), on which tiles of 32 heads depend.

    Shared memory holds Q, one tile of keys as operands and, for quantised keys, `ahead` tiles of raw rows: 163
    KB on SM80, 227 on SM90 and SM100, 99 on SM86, SM89 and SM120. The accumulators, 512 float32 a head, are in
    registers. There are more keys than heads where `mma.sync` multiplies, else warps lie along the heads and those
    without any compute what others do.
    """
    if mode.endswith("exact"):
        return make_tile(16, 16, 8 if mode == "fp8_v4_exact" else 4, 0)
    if device_capability[0] < 8:  # AMD, and the interpreter: 64 KB
        return make_tile(16, 32, 4, 0)
    if num_heads > 16 and device_capability[0] == 9:
        return make_tile(64, 64, 8, 1, half=mode == "fp8", apart=True, early=True)
    if num_heads <= 16:
        return make_tile(16, 32, 4, 2)
    if mode == "fp8_v4":
        return make_tile(32, 32, 4, 1)
    half = mode == "fp8"
    if half and device_capability == (8, 0):
        return make_tile(32, 64, 8, 1, half=True, apart=True, early=True)
    if half:
        return make_tile(32, 32, 8 if alone or KEEPS_OPERANDS else 4, 1, half=True, apart=True, early=True)
    if alone:
        return make_tile(32, 32, 8, 2, apart=True)
    # two programs whose warps share the dims take 180 KB, for which SM80 has no room
    return make_tile(32, 32, 4, 1, apart=device_capability != (8, 0))


def programs_are_alone(device: torch.device, num_tokens: int, num_heads: int, deterministic: bool) -> bool:
    """Whether a program of 32 heads has an SM to itself: where no second one of four warps has room, or rows are few.

    One of eight warps then takes 10 to 18 % less. Few is up to a program of eight SMs: on an H200 as capability 120,
    bf16 8 x 128, 32 x 64, 32 x 128, 64 x 64, 8 x 64 rows take 37.6, 61.5, 96.6, 99.4, 29.7 us by pairs and 40.6, 66.4,
    108, 109, 28.6 by eight warps, fp8_ds_mla 46.0, 70.5, 120, 121 and 45.9, 75.4, 129, 130. SM80 has not been timed
    so. Where a row must not notice its batch, the device alone decides.
    """
    if shared_of_sm(device) < 2 * SHARED_OF_FOUR_WARPS:
        return True
    programs, pairs = num_tokens * cdiv(num_heads, 32), capability(device) != (8, 0)
    return not deterministic and programs * (MANY if pairs else 1) <= num_sms(device)


def is_short(num_tokens: int, num_heads: int, topk: int, mode: str, deterministic: bool, sms: int) -> bool:
    """Whether rows have few plain keys, and an SM for each 16 of their heads: such programs take whole rows.

    They have less to read and to begin with. On an H200, top-k 128, 8 x 64, 8 x 128, 32 x 64 rows take 12.3, 11.9, 14.0
    us so, and 15.6, 15.9, 16.5 in tiles of 64 heads; with two programs an SM 64 x 64 rows 18.4 for 17.3.
    """
    few = num_tokens * cdiv(num_heads, 16) <= sms
    return mode == "plain" and topk <= SHORT_ROW and few and not deterministic


def tile_heads(
    num_tokens: int, num_heads: int, deterministic: bool, softmax_scale: float = 1.0, short: bool = False
) -> int:
    """The heads that a tile over one cache is chosen for: 16, so that more programs share few rows, or SHORT ones.

    Not where a row must not notice its batch. Larger tiles take the largest score before it is scaled: not any scale
    does (`suits_large_tiles`). On an H200, fp8_ds_mla, 1 x 128 rows take 20.0 us in tiles of 16 heads and 24.6 in those
    of 64, 4 x 64 rows 25.7 and 25.6, 4 x 128 rows 38.1 and 29.1, and 32 x 32 rows 64.1 and 54.7.
    """
    few = short or num_tokens * num_heads <= FEW_ROWS * (2 if num_heads <= 32 else 1)
    return min(num_heads, 16) if (few and not deterministic) or not suits_large_tiles(softmax_scale) else num_heads


def wanted_programs(device: torch.device, chosen: Tile, programs: int) -> int:
    """Programs that run at the same time: two an SM of small tiles, where it has room and programs of 32 are many."""
    pairs = chosen.block_h == 16 and capability(device)[0] in (9, 10)
    if chosen.block_h == 32 and chosen.num_warps == 4:
        pairs = shared_of_sm(device) >= 2 * SHARED_OF_A_PAIR and programs * MANY > num_sms(device)
    return num_sms(device) * (2 if pairs else 1)


@sized_jit(any_alignment=("indices", "topk_length", "attn_sink", "block_table", "req_id_per_token", "lse"))
def _attend_kernel(
    q,
    q_rope,
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
    pages: Pages,
    shares: (tl.int32,) * 3,
    strides: (tl.int64,) * 12,
    OPTIONS: tl.constexpr,
):
    """One token, a tile of heads, one split of the token's keys: online softmax over tiles of keys.

    Grid: (tokens * head blocks, splits). Head blocks of a token are neighbours, so that its keys come from L2 for all
    but the first. The walk over the keys is `attend_keys`.

    Registers: accumulators, 512 float32 a head. Shared memory: Q, one tile of keys as operands, `TILE.ahead` of raw
    rows, P.
    """
    BLOCK_H: tl.constexpr = OPTIONS.tile.block_h
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    PARTIAL: tl.constexpr = OPTIONS.partial
    OUT_UNIT: tl.constexpr = OPTIONS.out_unit
    LOOKS: tl.constexpr = OPTIONS.looks
    num_blocks, block_size, num_requests, max_blocks = pages
    num_splits = shares[0]
    query_strides = strides[:4]
    stride_block, stride_indices, stride_table = strides[4:7]
    stride_out_split, stride_out_token, stride_out_head, stride_lse_split, stride_lse_token = strides[7:]
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    live_head = head < num_heads
    index_row = indices + token * stride_indices
    q_rows = query_rows(q, q_rope, token, head, query_strides, OPTIONS.q_unit)
    # all that can be asked for is, before anything is waited for
    if topk_length is None:
        begin, end = share_of_keys(topk, split, shares, BLOCK_N)
        last = last_indices(index_row, begin, end)
        if LOOKS:
            seen = load_indices(index_row, begin, end, OPTIONS)
        elif OPTIONS.copies:
            sample = sample_indices(index_row, begin, end, OPTIONS)
    else:
        length = tl.load(topk_length + token)
    if is_whole(OPTIONS):
        queries = load_query_whole(q_rows, live_head, OPTIONS)
    else:
        queries = load_query(q_rows, live_head, OPTIONS)
    if topk_length is None:
        # nobody said where the row ends
        first = fetch_indices(index_row, begin + tl.arange(0, BLOCK_N), end)
        if not LOOKS:
            end = named_end(index_row, begin, end, last)
    else:
        begin, end = share_of_keys(tl.minimum(tl.maximum(length, 0), topk), split, shares, BLOCK_N)
        first = fetch_indices(index_row, begin + tl.arange(0, BLOCK_N), end)
        if LOOKS:
            seen = load_indices(index_row, begin, end, OPTIONS)
        elif OPTIONS.copies:
            sample = sample_indices(index_row, begin, end, OPTIONS)
    short_of = None
    if OPTIONS.copies and not LOOKS:
        end, short_of = without_copies(index_row, begin, end, sample, OPTIONS)

    table = indices
    known = True
    if block_table is not None:
        request = tl.load(req_id_per_token + token)
        known = (request >= 0) & (request < num_requests)
        table = block_table + request.to(tl.int64) * stride_table

    cache = (kv, table, known, num_blocks, block_size, divider(block_size), max_blocks, stride_block)
    whole = begin
    if LOOKS:
        if OPTIONS.copies:
            whole, end, short_of = whole_tiles_or_one(cache, seen, begin, end, OPTIONS)
        else:
            whole = whole_tiles(cache, seen, begin, end, OPTIONS)
        if topk_length is None:  # noqa: SIM102 (known when this is compiled)
            if whole < end:
                end = named_end(index_row, begin, end, last)
    # parts are contiguous
    stride_head = 512 if PARTIAL else stride_out_head * OUT_UNIT
    out_strides = (stride_out_split * OUT_UNIT, stride_out_token * OUT_UNIT, stride_head)
    lse_strides = (stride_lse_split, stride_lse_token)
    results = (attn_sink, out, out_strides, lse, lse_strides)
    place = (token, head, live_head, split)
    if is_whole(OPTIONS):
        # 0, which the compiler does not know: addresses kept until there is a result would spill
        zero = (begin < 0).to(tl.int32)
        scratch = out + (split + zero) * out_strides[0] + token * out_strides[1]
        scratch += ((head + zero).to(tl.int64) * stride_head)[:, None]
        scratch = scratch.to(tl.pointer_type(tl.float16))
        rows = (out, out_strides, split, token, tl.program_id(0) % head_blocks * BLOCK_H)
        span = (begin, whole, end)
        state = attend_whole(queries, scratch, live_head, cache, index_row, span, first, rows, scale_log2, OPTIONS)
    else:
        query = (q_rows, live_head, queries)
        state = attend_keys(query, new_state(OPTIONS), cache, index_row, (begin, end), scale_log2, None, OPTIONS)
    queries = (q, q_rope, query_strides, num_heads)
    span = (begin, end)
    store_walk(state, queries, place, cache, index_row, span, short_of, scale_log2, results, num_splits, OPTIONS)


def two_cache_tile(device_capability: tuple[int, int], num_heads: int, keys: tuple[Keys, Keys]) -> Tile:
    """The tile for both caches. Two modes keep Q in shared memory twice, so that only the smallest tile fits.

    So do two loops, beside which more heads would spill, as 64 do beside 64 keys that the kernel translates. Copies of
    32 heads begin early, but beside entries of single keys, where they take more than 99 KB: on an H200 as capability
    120, top-k 128 + 512, 32 x 64, 128 x 64, 128 x 128 rows take 42.2, 88.9, 171.5 us so, and 48.0, 94.1, 175.0 else.
    """
    main, extra = keys
    chosen = tile(device_capability, num_heads, main.operands)
    if main != extra or (chosen.block_h == 32 and main.operands != "fp8_v4"):
        return tile(device_capability, 16, main.operands)
    if chosen.half:
        return make_tile(64, 16, 8, 2, apart=True, early=True) if KEEPS_OPERANDS else make_tile(64, 16, 8, 2)
    if chosen.block_h == 32:
        return replace(chosen, early=not main.translated and not KEEPS_OPERANDS)  # else spills 384 bytes
    return replace(chosen, block_n=32, early=False) if main.translated and chosen.block_h == 64 else chosen


class CacheSizes(NamedTuple):
    """A cache as the kernels take it: blocks, keys a block, the stride of a block in `keys.unit` elements, and rows."""

    num_blocks: int
    block_size: int
    stride_block: int
    keys: Keys


def cache_sizes(kv_cache: torch.Tensor, cache_format: str, mode: str, translated: bool) -> CacheSizes:
    """`translated`: whether indices go through a block table. Where none do and blocks follow one another without a
    gap, each row is a block of its own."""
    num_blocks, block_size, block_stride, head_dim = geometry(kv_cache, cache_format)
    entry = get_format(cache_format)
    row_width, unit = entry.data_bytes or entry.row_width(head_dim), 16 // entry.dtype.itemsize
    stride_block = block_stride // 16
    in_line = not translated and not mode.startswith("fp8_v4") and stride_block * unit == block_size * row_width
    if in_line:
        num_blocks, block_size, stride_block = num_blocks * block_size, 1, row_width // unit
    keys = make_keys(mode, row_width, unit, in_line, translated, decode_method(capability(kv_cache.device)))
    return CacheSizes(num_blocks, block_size, stride_block, keys)


def query_unit(q: torch.Tensor, q_rope: torch.Tensor | None = None) -> int:
    """Elements that strides of queries are counted in: 8 where they allow it, so that loads are as wide."""
    strides = (*q.stride()[:2], *rope_strides(q_rope))
    return 8 if all(stride % 8 == 0 for stride in strides) else 1


def rope_strides(q_rope: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if q_rope is None else (q_rope.stride(0), q_rope.stride(1))


def query_strides(q: torch.Tensor, q_rope: torch.Tensor | None, unit: int) -> tuple[int, int, int, int]:
    """Strides of tokens and heads, of queries and of their RoPE dims, in the unit of `query_unit`."""
    rope_token, rope_head = rope_strides(q_rope)
    return q.stride(0) // unit, q.stride(1) // unit, rope_token // unit, rope_head // unit


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    sizes: CacheSizes,
    chosen: Tile,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    block_table: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
    deterministic: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
    q_rope: torch.Tensor | None = None,
) -> None:
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return
    topk = indices.shape[1]
    head_blocks = cdiv(num_heads, chosen.block_h)
    wanted = wanted_programs(q.device, chosen, num_tokens * head_blocks)
    single = has_its_sm(capability(q.device), chosen)
    short = is_short(num_tokens, num_heads, topk, sizes.keys.operands, deterministic, num_sms(q.device))
    waves = waves_of(num_tokens, head_blocks, topk, chosen, wanted, deterministic, single, short)
    for rows, shares in parts_of(waves, _Rows(q, q_rope, indices, topk_length, req_id_per_token, out, lse)):
        _launch(rows, kv, softmax_scale, sizes, chosen, attn_sink, block_table, shares)


class _Rows(NamedTuple):
    q: torch.Tensor
    q_rope: torch.Tensor | None
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    req_id_per_token: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


def _launch(
    rows: _Rows,
    kv: torch.Tensor,
    softmax_scale: float,
    sizes: CacheSizes,
    chosen: Tile,
    attn_sink: torch.Tensor | None,
    block_table: torch.Tensor | None,
    shares: Shares,
) -> None:
    """Attends for rows that are cut alike."""
    q, q_rope, indices, topk_length, req_id_per_token, out, lse = rows
    num_tokens, num_heads, head_dim = q.shape
    topk, splits = indices.shape[1], shares.parts
    keys = sizes.keys.with_operands("fp8_half") if chosen.half else sizes.keys
    num_requests, max_blocks = block_table.shape if block_table is not None else (0, 0)
    q_unit = query_unit(q, q_rope)
    part_out, part_lse = allocate_parts(out, lse, splits, chosen.half)
    out_unit = output_unit(part_out)
    rope = head_dim > LATENT_DIM or q_rope is not None
    looks = looks_at_indices(keys, chosen, splits > 1, topk_length is not None)
    steady = is_steady(chosen, keys, q.dtype, topk, splits)
    keeps = looks and keeps_indices(chosen, part_out[0], topk, splits)
    copies = spares_copies(chosen, keys, topk, splits, keeps)
    fixed = keys, chosen, rope, q_unit, out_unit, splits > 1, looks, steady, keeps, copies
    _attend_kernel[(num_tokens * cdiv(num_heads, chosen.block_h), splits)](
        q,
        q_rope,
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
        Pages(sizes.num_blocks, sizes.block_size, num_requests, max_blocks),
        shares,
        (
            *query_strides(q, q_rope, q_unit),
            sizes.stride_block,
            indices.stride(0),
            block_table.stride(0) if block_table is not None else 0,
            *(stride // out_unit for stride in part_out.stride()[:-1]),
            *part_lse.stride()[:-1],
        ),
        OPTIONS=attention_options(*fixed),
        num_warps=chosen.num_warps,
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
    q_rope: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, _ = q.shape
    mode = operand_mode(q.dtype, cache_format)
    alone = programs_are_alone(q.device, num_tokens, num_heads, deterministic)
    short = is_short(num_tokens, num_heads, indices.shape[1], mode, deterministic, num_sms(q.device))
    heads = tile_heads(num_tokens, num_heads, deterministic, softmax_scale, short)
    chosen = tile(capability(q.device), heads, mode, alone)
    if block_table is not None and req_id_per_token is not None and chosen.block_h > 16:
        # once, where each thread would for all of its rows
        slots = torch.empty(indices.shape, dtype=torch.int32, device=indices.device)
        num_blocks, block_size, *_ = geometry(kv_cache, cache_format)
        counts = torch.empty(num_tokens, dtype=torch.int32, device=indices.device)
        convert_req_index_to_global_index(
            req_id_per_token, block_table, indices, block_size, num_blocks=num_blocks, out=slots, valid_counts=counts
        )
        indices, block_table, req_id_per_token = slots, None, None
    sizes = cache_sizes(kv_cache, cache_format, mode, block_table is not None)
    tables = block_table, req_id_per_token
    options = topk_length, attn_sink, *tables, deterministic
    _attend(q, kv_cache, indices, softmax_scale, sizes, chosen, *options, out, lse, q_rope)


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
    num_tokens, num_heads, _ = q.shape
    topk, extra_topk = indices.shape[1], extra_indices.shape[1]
    if num_tokens == 0:
        return
    mode, extra_mode = operand_modes(q.dtype, cache_format, extra_cache_format)
    sizes = cache_sizes(kv_cache, cache_format, mode, block_table is not None)
    extra = cache_sizes(extra_kv_cache, extra_cache_format, extra_mode, extra_block_table is not None)
    heads = num_heads
    if num_heads <= 32 and capability(q.device)[0] == 9:  # elsewhere few rows have not been timed
        heads = tile_heads(num_tokens, num_heads, deterministic)
    chosen = two_cache_tile(capability(q.device), heads, (sizes.keys, extra.keys))
    head_blocks = cdiv(num_heads, chosen.block_h)
    wanted = wanted_programs(q.device, chosen, num_tokens * head_blocks)
    single = has_its_sm(capability(q.device), chosen)
    paired = not deterministic and min(num_tokens * head_blocks, wanted) > num_sms(q.device)
    waves = waves_of(num_tokens, head_blocks, topk + extra_topk, chosen, wanted, deterministic, single)
    every = _RowsOfTwo(q, indices, topk_length, extra_indices, extra_topk_length, req_id_per_token, out, lse)
    caches = kv_cache, block_table, sizes, extra_kv_cache, extra_block_table, extra
    for rows, shares in parts_of(waves, every):
        _launch_extra(rows, caches, softmax_scale, chosen, paired, attn_sink, shares)


class _RowsOfTwo(NamedTuple):
    q: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    extra_indices: torch.Tensor
    extra_topk_length: torch.Tensor | None
    req_id_per_token: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


def _launch_extra(
    rows: _RowsOfTwo,
    caches: tuple[torch.Tensor, torch.Tensor | None, CacheSizes, torch.Tensor, torch.Tensor | None, CacheSizes],
    softmax_scale: float,
    chosen: Tile,
    paired: bool,
    attn_sink: torch.Tensor | None,
    shares: Shares,
) -> None:
    """Attends over two caches for rows that are cut alike. `paired`: whether an SM has two programs."""
    q, indices, topk_length, extra_indices, extra_topk_length, req_id_per_token, out, lse = rows
    kv_cache, block_table, sizes, extra_kv_cache, extra_block_table, extra = caches
    num_tokens, num_heads, head_dim = q.shape
    splits = shares.parts
    num_requests, max_blocks = block_table.shape if block_table is not None else (0, 0)
    extra_num_requests, extra_max_blocks = extra_block_table.shape if extra_block_table is not None else (0, 0)
    q_unit = query_unit(q)
    part_out, part_lse = allocate_parts(out, lse, splits)
    out_unit = output_unit(part_out)
    fixed = sizes.keys, chosen, head_dim > LATENT_DIM, q_unit, out_unit, splits > 1
    num_keys = indices.shape[1] + extra_indices.shape[1]
    steady = chosen.block_h == 32 and is_steady(chosen, sizes.keys, q.dtype, num_keys, splits, paired)
    of_v4 = chosen.block_h == 64 and sizes.keys.operands == "fp8_v4"  # others have not been timed
    copies = of_v4 and spares_copies(chosen, sizes.keys, num_keys, splits)
    options = attention_options(*fixed, steady=steady, copies=copies, extra_keys=extra.keys)
    _attend_extra_kernel[(num_tokens * cdiv(num_heads, chosen.block_h), splits)](
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
        shares,
        indices.shape[1],
        Pages(sizes.num_blocks, sizes.block_size, num_requests, max_blocks),
        extra_indices.shape[1],
        Pages(extra.num_blocks, extra.block_size, extra_num_requests, extra_max_blocks),
        (
            q.stride(0) // q_unit,
            q.stride(1) // q_unit,
            sizes.stride_block,
            indices.stride(0),
            block_table.stride(0) if block_table is not None else 0,
            extra.stride_block,
            extra_indices.stride(0),
            extra_block_table.stride(0) if extra_block_table is not None else 0,
            *(stride // out_unit for stride in part_out.stride()[:-1]),
            *part_lse.stride()[:-1],
        ),
        OPTIONS=options,
        num_warps=chosen.num_warps,
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
    stride = kv.stride(0) // unit
    in_line = stride < LARGEST_ROW
    keys = make_keys(operand_mode(q.dtype, ""), head_dim, unit, in_line, False, decode_method(capability(q.device)))
    sizes = CacheSizes(num_kv, 1, stride, keys)
    num_tokens, num_heads, _ = q.shape
    short = is_short(num_tokens, num_heads, indices.shape[1], keys.operands, deterministic, num_sms(q.device))
    heads = tile_heads(num_tokens, num_heads, deterministic, softmax_scale, short)
    alone = programs_are_alone(q.device, num_tokens, num_heads, deterministic)
    chosen = tile(capability(q.device), heads, keys.operands, alone)
    _attend(q, kv, indices, softmax_scale, sizes, chosen, topk_length, attn_sink, None, None, deterministic, out, lse)


LOWERINGS = {
    "paged_sparse_attention": Lowering(paged_sparse_attention, deterministic=True),
    "paged_sparse_attention.extra": Lowering(paged_sparse_attention_extra, deterministic=True),
    "sparse_attention": Lowering(sparse_attention, deterministic=True),
}
