"""Dense MLA in portable Triton: varlen prefill with any head dims, and paged attention over any cache format."""

from dataclasses import replace
from typing import NamedTuple

import torch

from ...dispatch import Lowering
from ...formats import LATENT_DIM
from .attention_options import Tile, attention_options, is_steady
from .common import Pages, capability, cdiv, num_sms
from .dense_attention_device import (
    _clear_behind_kernel,
    _compact_blocks_kernel,
    _packed_kernel,
    _paged_kernel,
    _prefill_kernel,
)
from .dense_attention_even import _even_kernel, _merge_cuts_kernel
from .dense_attention_short import _short_prefill_kernel
from .dense_attention_tiles import (
    DETERMINISTIC_SPLITS,
    MIN_SPLIT_KEYS,
    ROW_COST_KEYS,
    SHORTEST,
    SLACK_KEYS,
    even_tile,
    even_workers,
    group_tile,
    heads_together,
    packed_tile,
    paged_splits,
    paged_tile,
    prefill_options,
    prefill_tile,
    query_tiles,
    shares_of_a_request,
    short_tile,
    stride_unit,
    tokens_together,
    value_block,
    weight_sums,
)
from .sparse_attention import (
    LOG2E,
    CacheSizes,
    cache_sizes,
    operand_mode,
    programs_are_alone,
    query_strides,
    query_unit,
)
from .splits import allocate_parts, merge_parts, output_unit
from .waves import suits_large_tiles

COMPACT_BLOCK = 1024
MAX_TOKEN_STRIDE = 2**24

# Parts that a merging program loads at once.
MERGE_PARTS = 32


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    *,
    causal: bool = True,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_kv, num_kv_heads, head_dim_v = v.shape
    if num_tokens == 0:
        return
    # a tile's rows are 32-bit steps apart
    k, v = (tensor if tensor.stride(0) < MAX_TOKEN_STRIDE else tensor.contiguous() for tensor in (k, v))
    num_requests = cu_seqlens_q.shape[0] - 1
    exact = q.dtype == torch.float32
    units = stride_unit(q), stride_unit(k), stride_unit(v), stride_unit(out)
    q_unit, k_unit, v_unit, out_unit = units
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, float(softmax_scale) * LOG2E, num_tokens, num_kv)
    strides = (
        q.stride(0) // q_unit,
        q.stride(1) // q_unit,
        k.stride(0) // k_unit,
        k.stride(1) // k_unit,
        v.stride(0) // v_unit,
        v.stride(1) // v_unit,
        out.stride(0) // out_unit,
        out.stride(1) // out_unit,
        lse.stride(0),
    )
    if num_requests:
        chosen = short_tile(exact)
        shares = shares_of_a_request(num_requests, num_heads, num_sms(q.device))
        _short_prefill_kernel[(num_requests * shares,)](
            *tensors,
            num_heads // num_kv_heads,
            num_heads,
            shares,
            strides,
            OPTIONS=prefill_options(causal, exact, (head_dim, head_dim_v), units, chosen.block_m, chosen.block_n, 1),
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    if min(max_seqlen_q, num_tokens) < SHORTEST:
        clear_behind(cu_seqlens_q, out, lse)
        return
    chosen, sums = prefill_tile(capability(q.device), head_dim, head_dim_v, exact), weight_sums(capability(q.device))
    _prefill_kernel[(query_tiles(num_tokens, num_requests, chosen.block_m), num_heads)](
        *tensors,
        num_requests,
        num_requests.bit_length(),
        num_heads // num_kv_heads,
        num_heads,
        heads_together(num_heads, num_kv * (head_dim + head_dim_v) * k.element_size()),
        strides,
        OPTIONS=prefill_options(causal, exact, (head_dim, head_dim_v), units, chosen.block_m, chosen.block_n, sums),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )


def clear_behind(cu_seqlens_q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Gives the tokens behind the last request the result of an empty row; touches no other."""
    num_tokens, num_heads, head_dim_v = out.shape
    if num_tokens:
        _clear_behind_kernel[(num_tokens,)](
            cu_seqlens_q[-1:],
            out,
            lse,
            num_heads,
            head_dim_v,
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            BLOCK_V=value_block(head_dim_v),
            num_warps=1,
        )


def _rows_are_flat(*tensors: torch.Tensor) -> bool:
    """Whether heads of all tokens are one stride apart."""
    return all(tensor.stride(0) == tensor.shape[1] * tensor.stride(1) for tensor in tensors)


class Decode(NamedTuple):
    """What the launches of one dense decode have in common.

    Attributes:
        tensors: queries, their RoPE dims, cache, block table, request of each token, and keys that it sees.
        scale_log2: the softmax's scale, for exponents of 2.
        pages: of the cache.
        strides: `query_strides`, of a block of the cache, and of the block table.
        sizes: of the cache.
        rope: whether there are dims behind the latent.
        q_unit: what strides of queries are counted in.
    """

    tensors: tuple[torch.Tensor | None, ...]
    scale_log2: float
    pages: Pages
    strides: tuple[int, ...]
    sizes: CacheSizes
    rope: bool
    q_unit: int


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    key_lens: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    q_rope: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    mode = operand_mode(q.dtype, cache_format)
    sizes = cache_sizes(kv_cache, cache_format, mode, translated=True)
    num_requests, max_blocks = block_table.shape
    q_unit = query_unit(q, q_rope)
    decode = Decode(
        (q, q_rope, kv_cache, block_table, req_id_per_token, key_lens),
        float(softmax_scale) * LOG2E,
        Pages(sizes.num_blocks, sizes.block_size, num_requests, max_blocks),
        (*query_strides(q, q_rope, q_unit), sizes.stride_block, block_table.stride(0)),
        sizes,
        head_dim > LATENT_DIM or q_rope is not None,
        q_unit,
    )
    together = 1 if deterministic else tokens_together(num_tokens, num_requests, num_heads)
    packed = together > 1 and not mode.endswith("exact") and _rows_are_flat(out, lse) and out.stride(1) == LATENT_DIM
    if packed:
        chosen = evenly = packed_tile(capability(q.device), together * num_heads, mode)
        programs, head_blocks = cdiv(num_tokens, together), 1
    else:
        evenly, together = group_tile(capability(q.device), num_heads, mode), 1
        # by the device alone: parts make as many programs as it has room for
        alone = programs_are_alone(q.device, num_tokens, num_heads, deterministic=True)
        chosen = _tile_of_rows(capability(q.device), num_heads, mode, alone, softmax_scale, sizes.block_size)
        programs, head_blocks = num_tokens, cdiv(num_heads, chosen.block_h)
    capacity, sms = max_blocks * sizes.block_size, num_sms(q.device)
    splits, workers = DETERMINISTIC_SPLITS, 0
    if not deterministic:
        num_warps = chosen.num_warps if not packed else 4
        splits = paged_splits(programs, head_blocks, capacity, sms, chosen.block_h, num_warps)
        even_blocks = 1 if packed else cdiv(num_heads, evenly.block_h)
        workers = even_workers(programs, even_blocks, capacity, splits, sms, evenly.block_h)
    uneven = _share_evenly(decode, together, evenly, splits, workers, out, lse) if workers else None
    part_out, part_lse = allocate_parts(out, lse, splits, chosen.half)
    tensors = (*decode.tensors, uneven, part_out, part_lse, decode.scale_log2)
    # tiles that are `whole` may take the largest score before it is scaled
    whole = sizes.block_size % chosen.block_n == 0 and suits_large_tiles(softmax_scale)
    keys = sizes.keys.with_operands("fp8_half") if chosen.half else sizes.keys
    walks = whole and not packed and chosen.block_h == 32
    steady = walks and is_steady(chosen, keys, q.dtype, capacity, splits)
    # by stores of 16 bytes whole rows of bfloat16 spill, and 100 x 128 take 836 us for 777
    out_unit = min(output_unit(part_out), 8 if splits > 1 else 4)
    fixed = keys, chosen, decode.rope, q_unit, out_unit, splits > 1
    options = attention_options(*fixed, steady=steady, whole=whole)
    out_strides = tuple(stride // out_unit for stride in part_out.stride()[:-1])
    if packed:
        strides = (*decode.strides, out_strides[0], part_lse.stride(0))
        _packed_kernel[(programs, splits)](
            *tensors,
            num_tokens,
            num_heads,
            together,
            decode.pages,
            splits,
            strides,
            OPTIONS=options,
            num_warps=chosen.num_warps,
        )
    else:
        strides = (*decode.strides, *out_strides, *part_lse.stride()[:-1])
        _paged_kernel[(num_tokens * head_blocks, splits)](
            *tensors, num_heads, decode.pages, splits, strides, OPTIONS=options, num_warps=chosen.num_warps
        )
    if splits > 1:
        merge_parts(part_out, part_lse, None, out, lse, uneven)


def _tile_of_rows(
    device_capability: tuple[int, int], num_heads: int, mode: str, alone: bool, scale: float, block_size: int
) -> Tile:
    """The tile of rows by shapes: of groups where a tile of keys has several blocks, or the scale does not suit."""
    chosen = paged_tile(device_capability, num_heads, mode, alone)
    if block_size % chosen.block_n or not suits_large_tiles(scale):
        chosen = group_tile(device_capability, num_heads, mode)
    if block_size % chosen.block_n:  # an entry a key
        chosen = replace(chosen, apart=False, early=False)
    return chosen


def _share_evenly(
    decode: Decode, together: int, chosen: Tile, splits: int, workers: int, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """The launches that compute all rows if their lengths are uneven, and else nothing.

    `together`, `chosen` and `splits` are those of the launch by shapes: tokens of a program, its tile, programs of a
    row. Returns the element that is then not 0, with which that launch does nothing.
    """
    num_tokens, num_heads, _ = out.shape
    head_blocks = 1 if together > 1 else cdiv(num_heads, chosen.block_h)
    rows_of_a_part = head_blocks * chosen.block_h
    part_out = torch.empty(2 * workers * rows_of_a_part, LATENT_DIM, dtype=torch.float32, device=out.device)
    part_lse = torch.empty(2 * workers * rows_of_a_part, dtype=torch.float32, device=out.device)
    cuts = torch.empty(num_tokens, 2, dtype=torch.int32, device=out.device)
    uneven = torch.empty(1, dtype=torch.int32, device=out.device)
    out_unit, even, sizes = stride_unit(out), even_tile(chosen), decode.sizes
    whole, packed = sizes.block_size % even.block_n == 0, together > 1
    _even_kernel[(workers * head_blocks,)](
        *decode.tensors,
        part_out,
        part_lse,
        cuts,
        uneven,
        out,
        lse,
        decode.scale_log2,
        num_tokens,
        num_heads,
        together,
        splits,
        workers,
        decode.pages,
        (*decode.strides, out.stride(0) // out_unit, out.stride(1) // out_unit, lse.stride(0)),
        LEAST=cdiv(MIN_SPLIT_KEYS, even.block_n),
        ROW_COST=cdiv(ROW_COST_KEYS, even.block_n),
        SLACK=cdiv(SLACK_KEYS, even.block_n),
        OPTIONS=attention_options(sizes.keys, even, decode.rope, decode.q_unit, out_unit, whole=whole, packed=packed),
        num_warps=even.num_warps,
    )
    _merge_cuts_kernel[(num_tokens * num_heads, LATENT_DIM // 128)](
        part_out,
        part_lse,
        cuts,
        out,
        lse,
        num_heads,
        together,
        rows_of_a_part,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        BLOCK_S=MERGE_PARTS,
        num_warps=4,
    )
    return uneven


def compact_blocks(
    block_table: torch.Tensor, req_id_per_token: torch.Tensor, key_lens: torch.Tensor, num_blocks: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token as a request of its own, for kernels that survive no block outside the cache.

    Returns:
        `[num_tokens, max_blocks]` int32, blocks that exist, in order, then 0; `[num_tokens]` int32, keys in them.
    """
    num_tokens = key_lens.shape[0]
    num_requests, max_blocks = block_table.shape
    blocks = block_table.new_empty((num_tokens, max_blocks))
    lens = torch.empty_like(key_lens)
    if num_tokens:
        _compact_blocks_kernel[(num_tokens,)](
            block_table,
            req_id_per_token,
            key_lens,
            blocks,
            lens,
            num_blocks,
            block_size,
            num_requests,
            max_blocks,
            block_table.stride(0),
            blocks.stride(0),
            BLOCK=COMPACT_BLOCK,
            num_warps=4,
        )
    return blocks, lens


LOWERINGS = {
    "paged_attention": Lowering(paged_attention, deterministic=True),
    "prefill_attention": Lowering(prefill_attention),
}
