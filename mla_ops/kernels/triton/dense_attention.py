"""Dense MLA in portable Triton: varlen prefill with any head dims, and paged attention over any cache format."""

from dataclasses import replace
from typing import NamedTuple

import torch

from ...dispatch import Lowering
from ...formats import LATENT_DIM
from . import sparse_attention
from .common import INTERPRETED, capability, cdiv, num_sms
from .dense_attention_device import (
    _clear_behind_kernel,
    _compact_blocks_kernel,
    _packed_kernel,
    _paged_kernel,
    _prefill_kernel,
)
from .dense_attention_even import _even_kernel, _merge_cuts_kernel
from .dense_attention_short import _short_prefill_kernel
from .sparse_attention import (
    LOG2E,
    cache_sizes,
    operand_mode,
    query_unit,
    rope_strides,
)
from .splits import MAX_SPLITS, allocate_parts, merge_parts

COMPACT_BLOCK = 1024
MAX_TOKEN_STRIDE = 2**24

# Fewer keys than this do not pay for a split, whose fixed cost (Q, partial result, merge) is that of about as many.
MIN_SPLIT_KEYS = 128
DETERMINISTIC_SPLITS = 8  # of a row that must not notice its batch, whatever its length

# A token's cost besides its keys, in keys: Q, the way of the first keys, the result.
ROW_COST_KEYS = 64
# Lengths are looked at for so many keys, which a program may have at full tables, about 100 us, and for so many tokens,
# which take next to no time. Two launches more, which return at once, take about 4 us.
MAX_SHAPE_KEYS = 1024
MAX_EVEN_TOKENS = 1024
# Keys by which the longest share may exceed what is taken for even.
SLACK_KEYS = 256
# Parts that a merging program loads at once.
MERGE_PARTS = 32

# Tokens that share a loop over their request's keys have no more rows, with all their heads: a tile of 64 rows would
# spill 192 bytes a thread on SM90.
MAX_PACKED_ROWS = 32
MAX_TOKENS_TOGETHER = 8

# Queries from which on a request has tiles of 64 or 128 rows. Up to 32, tiles of 16 rows compute at most half of the
# scores that one of those would.
SHORTEST = 33
SHORT_PROGRAMS_PER_SM = 32

# Keys and values of heads that run at the same time take no more: the L2 cache of every device that has tiles.
L2_BYTES = 12 * 2**20


class Tile(NamedTuple):
    """Sizes of one program, queries x keys, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_tile(device_capability: tuple[int, int], head_dim: int, head_dim_v: int, exact: bool) -> Tile:
    """The tile for a device, by its shared memory and registers; `tests/test_aot_compile.py` checks every entry.

    Shared memory holds Q and, for each stage, a tile of K and V: 163 KB on SM80, 227 on SM90 and SM100, 99 on SM86,
    SM89 and SM120.
    """
    major = device_capability[0]
    if exact or major < 8:
        return Tile(16, 16, 4, 1)
    wide = head_dim > 192 or head_dim_v > 128
    if device_capability in ((8, 6), (8, 9)) or major == 12:
        return Tile(64, 32, 8, 2) if wide else Tile(64, 64, 8, 2)
    if major == 8:
        return Tile(64, 64, 8, 2) if wide else Tile(128, 64, 8, 3)
    return Tile(128, 32, 8, 3) if wide else Tile(128, 64, 8, 3)


def short_tile(exact: bool) -> Tile:
    """The tile of requests of few queries, which fits every device several times: 16 rows, of one or more heads."""
    return Tile(16, 16, 4, 1) if exact else Tile(16, 32, 4, 1)


def shares_of_a_request(num_requests: int, num_heads: int, sms: int) -> int:
    """Programs that share the heads of a request of few queries: enough to fill every SM, were all requests such."""
    return max(1, min(num_heads, cdiv(SHORT_PROGRAMS_PER_SM * sms, num_requests)))


def query_tiles(num_tokens: int, num_requests: int, block_m: int) -> int:
    """Tiles of all other requests: full ones, and a part-filled one of each and of the tokens behind them."""
    return num_tokens // block_m + min(num_requests, num_tokens // SHORTEST) + 1


def weight_sums(device_capability: tuple[int, int]) -> int:
    """Sums of weights that a query has until the end of its keys, a power of two.

    Eight are as many as the columns of a matrix instruction: a lane then adds up what it holds, and no sum passes
    between lanes in the loop, which saves 2 % of the time on SM90; nothing else was measured. Tiles of 64 queries, each
    of whose rows two warps share, would pass all eight between these.
    """
    return 8 if device_capability[0] == 9 else 1


def split_dim(head_dim: int) -> tuple[int, int]:
    """A head dim as two dots: the largest power of two in it, and the rest rounded up to one; each at least 16."""
    first = max(16, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - first
    return first, 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())


def heads_together(num_heads: int, head_bytes: int) -> int:
    """Heads whose tiles are dealt out together, longest first: a power of two, as many as L2 holds the keys of.

    One at a time, the longest tile of the last head starts when there is little else left to run: with 16 heads of
    8,192 tokens on 132 SMs 11 % of the time, by count.
    """
    fitting = max(1, min(num_heads, L2_BYTES // max(1, head_bytes)))
    return 1 << (fitting.bit_length() - 1)


def value_block(head_dim_v: int) -> int:
    """Columns of the accumulators: the next power of two, at least 16."""
    return max(16, 1 << (head_dim_v - 1).bit_length())


def stride_unit(tensor: torch.Tensor) -> int:
    """The unit of both leading strides: 16 bytes where they allow it, so that loads are as wide."""
    unit = 16 // tensor.element_size()
    return unit if tensor.stride(0) % unit == 0 and tensor.stride(1) % unit == 0 else 1


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
    first, second = split_dim(head_dim)
    q_unit, k_unit, v_unit, out_unit = (stride_unit(tensor) for tensor in (q, k, v, out))
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
    constants = {
        "CAUSAL": causal,
        "EXACT": exact,
        "DIM": head_dim,
        "FIRST": first,
        "SECOND": second,
        "DIM_V": head_dim_v,
        "BLOCK_V": value_block(head_dim_v),
        "Q_UNIT": q_unit,
        "K_UNIT": k_unit,
        "V_UNIT": v_unit,
        "OUT_UNIT": out_unit,
        "SHORTEST": SHORTEST,
        "UPCAST": INTERPRETED,
    }
    if num_requests:
        chosen = short_tile(exact)
        shares = shares_of_a_request(num_requests, num_heads, num_sms(q.device))
        _short_prefill_kernel[(num_requests * shares,)](
            *tensors,
            num_heads // num_kv_heads,
            num_heads,
            shares,
            *strides,
            **constants,
            BLOCK_N=chosen.block_n,
            SUMS=1,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    if min(max_seqlen_q, num_tokens) < SHORTEST:
        clear_behind(cu_seqlens_q, out, lse)
        return
    chosen = prefill_tile(capability(q.device), head_dim, head_dim_v, exact)
    _prefill_kernel[(query_tiles(num_tokens, num_requests, chosen.block_m), num_heads)](
        *tensors,
        num_requests,
        num_requests.bit_length(),
        num_heads // num_kv_heads,
        num_heads,
        heads_together(num_heads, num_kv * (head_dim + head_dim_v) * k.element_size()),
        *strides,
        **constants,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        SUMS=weight_sums(capability(q.device)),
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
            num_tokens,
            num_heads,
            head_dim_v,
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            BLOCK_V=value_block(head_dim_v),
            num_warps=1,
        )


def paged_tile(device_capability: tuple[int, int], num_heads: int, mode: str) -> sparse_attention.Tile:
    """Heads x keys: what the sparse kernels take over one cache after another."""
    chosen = sparse_attention.tile(device_capability, num_heads, mode)
    if mode == "fp8_v4" or chosen.block_h == 32 or (mode == "plain" and num_heads <= 32):
        return sparse_attention.tile(device_capability, 16, mode)
    return sparse_attention.Tile(64, 32, 8, 2) if chosen.half else chosen


def even_tile(chosen: sparse_attention.Tile) -> sparse_attention.Tile:
    return replace(chosen, apart=chosen.block_h == 64, early=False)


def packed_tile(device_capability: tuple[int, int], rows: int, mode: str) -> sparse_attention.Tile:
    """Rows x keys for tokens together, whose rows are all of one tile."""
    if rows <= 16:
        return paged_tile(device_capability, rows, mode)
    if device_capability[0] < 8:
        return sparse_attention.Tile(32, 16, 4, 0)
    roomy = mode == "plain" and device_capability[0] in (8, 9, 10) and device_capability not in ((8, 6), (8, 9))
    return sparse_attention.Tile(32, 32, 4, 2) if roomy else sparse_attention.Tile(32, 32, 8, 1)


def paged_splits(num_tokens: int, num_head_blocks: int, capacity: int, sms: int, block_h: int) -> int:
    """Programs that share one token's keys: enough to fill every SM, few enough to have MIN_SPLIT_KEYS keys each.

    From shapes alone, so that a captured launch fits every replay. Tiles of up to 32 heads leave room for two programs
    an SM, which hide each other's latency; larger ones take an SM to themselves.
    """
    programs = num_tokens * num_head_blocks
    wanted = sms * (2 if block_h <= 32 else 1)
    if programs == 0 or programs >= wanted:
        return 1
    return max(1, min(wanted // programs, cdiv(capacity, MIN_SPLIT_KEYS), MAX_SPLITS))


def even_workers(num_walks: int, num_head_blocks: int, capacity: int, num_splits: int, sms: int, block_h: int) -> int:
    """Programs of each block of heads that share all keys evenly where lengths are uneven; 0 if no lengths are so.

    From shapes alone, so that a captured launch fits every replay: where a program of the launch by shapes can have so
    many keys that others, with few, would wait for it.
    """
    wanted = sms * (2 if block_h <= 32 else 1)
    waves = cdiv(num_walks * num_head_blocks * num_splits, wanted)
    if num_walks == 1 or num_walks > MAX_EVEN_TOKENS or waves * cdiv(capacity, num_splits) <= MAX_SHAPE_KEYS:
        return 0
    return max(1, wanted // num_head_blocks)


def tokens_together(num_tokens: int, num_requests: int, num_heads: int) -> int:
    """Neighbouring tokens that one program takes: as many as a request has on average, if their heads leave room.

    Which tokens are of one request is known on the device only, where others cost a walk each: this has to be a good
    guess, not a right one. The rows of the block table are the requests; in plain decode each has one token.
    """
    if num_requests == 0:
        return 1
    return max(1, min(num_tokens // num_requests, MAX_PACKED_ROWS // num_heads, MAX_TOKENS_TOGETHER))


def _rows_are_flat(*tensors: torch.Tensor) -> bool:
    """Whether heads of all tokens are one stride apart."""
    return all(tensor.stride(0) == tensor.shape[1] * tensor.stride(1) for tensor in tensors)


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
    together = 1 if deterministic else tokens_together(num_tokens, num_requests, num_heads)
    chosen = packed_tile(capability(q.device), together * num_heads, mode)
    if together > 1 and not mode.endswith("exact") and _rows_are_flat(out, lse) and out.stride(1) == LATENT_DIM:
        _packed_attention(
            q,
            q_rope,
            kv_cache,
            sizes,
            block_table,
            req_id_per_token,
            key_lens,
            softmax_scale,
            together,
            chosen,
            out,
            lse,
        )
        return
    chosen = paged_tile(capability(q.device), num_heads, mode)
    if sizes.block_size % chosen.block_n:  # an entry a key
        chosen = replace(chosen, apart=False, early=False)
    head_blocks = cdiv(num_heads, chosen.block_h)
    capacity, sms = max_blocks * sizes.block_size, num_sms(q.device)
    splits, workers = DETERMINISTIC_SPLITS, 0
    if not deterministic:
        splits = paged_splits(num_tokens, head_blocks, capacity, sms, chosen.block_h)
        workers = even_workers(num_tokens, head_blocks, capacity, splits, sms, chosen.block_h)
    uneven = None
    if workers:
        share = (1, chosen, splits, workers)
        # fmt: off
        uneven = _share_evenly(
            q, q_rope, kv_cache, sizes, block_table, req_id_per_token, key_lens, softmax_scale, share, out, lse
        )
        # fmt: on
    q_unit = query_unit(q, q_rope)
    part_out, part_lse = allocate_parts(out, lse, splits)
    _paged_kernel[(num_tokens * head_blocks, splits)](
        q,
        q_rope,
        kv_cache,
        block_table,
        req_id_per_token,
        key_lens,
        uneven,
        part_out,
        part_lse,
        float(softmax_scale) * LOG2E,
        num_heads,
        sizes.num_blocks,
        sizes.block_size,
        num_requests,
        max_blocks,
        splits,
        q.stride(0) // q_unit,
        q.stride(1) // q_unit,
        *(stride // q_unit for stride in rope_strides(q_rope)),
        sizes.stride_block,
        block_table.stride(0),
        part_out.stride(0),
        part_out.stride(1),
        part_out.stride(2),
        part_lse.stride(0),
        part_lse.stride(1),
        KEYS=sizes.keys,
        TILE=chosen,
        ROPE=head_dim > LATENT_DIM or q_rope is not None,
        Q_UNIT=q_unit,
        PARTIAL=splits > 1,
        WHOLE=sizes.block_size % chosen.block_n == 0,
        UPCAST=INTERPRETED,
        num_warps=chosen.num_warps,
    )
    if splits > 1:
        merge_parts(part_out, part_lse, None, out, lse, uneven)


def _packed_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    kv_cache: torch.Tensor,
    sizes: sparse_attention.CacheSizes,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    key_lens: torch.Tensor,
    softmax_scale: float,
    together: int,
    chosen: sparse_attention.Tile,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_requests, max_blocks = block_table.shape
    programs = cdiv(num_tokens, together)
    capacity, sms = max_blocks * sizes.block_size, num_sms(q.device)
    splits = paged_splits(programs, 1, capacity, sms, chosen.block_h)
    workers = even_workers(programs, 1, capacity, splits, sms, chosen.block_h)
    uneven = None
    if workers:
        share = (together, chosen, splits, workers)
        # fmt: off
        uneven = _share_evenly(
            q, q_rope, kv_cache, sizes, block_table, req_id_per_token, key_lens, softmax_scale, share, out, lse
        )
        # fmt: on
    q_unit = query_unit(q, q_rope)
    part_out, part_lse = allocate_parts(out, lse, splits)
    _packed_kernel[(programs, splits)](
        q,
        q_rope,
        kv_cache,
        block_table,
        req_id_per_token,
        key_lens,
        uneven,
        part_out,
        part_lse,
        float(softmax_scale) * LOG2E,
        num_tokens,
        num_heads,
        together,
        sizes.num_blocks,
        sizes.block_size,
        num_requests,
        max_blocks,
        splits,
        q.stride(0) // q_unit,
        q.stride(1) // q_unit,
        *(stride // q_unit for stride in rope_strides(q_rope)),
        sizes.stride_block,
        block_table.stride(0),
        part_out.stride(0),
        part_lse.stride(0),
        KEYS=sizes.keys,
        TILE=chosen,
        ROPE=head_dim > LATENT_DIM or q_rope is not None,
        Q_UNIT=q_unit,
        PARTIAL=splits > 1,
        WHOLE=sizes.block_size % chosen.block_n == 0,
        UPCAST=INTERPRETED,
        num_warps=chosen.num_warps,
    )
    if splits > 1:
        merge_parts(part_out, part_lse, None, out, lse, uneven)


def _share_evenly(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    kv_cache: torch.Tensor,
    sizes: sparse_attention.CacheSizes,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    key_lens: torch.Tensor,
    softmax_scale: float,
    share: tuple[int, sparse_attention.Tile, int, int],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> torch.Tensor:
    """The launches that compute all rows if their lengths are uneven, and else nothing.

    `share`: tokens together, the tile, splits of the launch by shapes, workers. Returns the element that is then not 0,
    with which the launch by shapes does nothing.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_requests, max_blocks = block_table.shape
    together, chosen, splits, workers = share
    head_blocks = 1 if together > 1 else cdiv(num_heads, chosen.block_h)
    rows_of_a_part = head_blocks * chosen.block_h
    part_out = torch.empty(2 * workers * rows_of_a_part, LATENT_DIM, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(2 * workers * rows_of_a_part, dtype=torch.float32, device=q.device)
    cuts = torch.empty(num_tokens, 2, dtype=torch.int32, device=q.device)
    uneven = torch.empty(1, dtype=torch.int32, device=q.device)
    q_unit, out_unit = query_unit(q, q_rope), stride_unit(out)
    _even_kernel[(workers * head_blocks,)](
        q,
        q_rope,
        kv_cache,
        block_table,
        req_id_per_token,
        key_lens,
        part_out,
        part_lse,
        cuts,
        uneven,
        out,
        lse,
        float(softmax_scale) * LOG2E,
        num_tokens,
        num_heads,
        together,
        splits,
        workers,
        sizes.num_blocks,
        sizes.block_size,
        num_requests,
        max_blocks,
        q.stride(0) // q_unit,
        q.stride(1) // q_unit,
        *(stride // q_unit for stride in rope_strides(q_rope)),
        sizes.stride_block,
        block_table.stride(0),
        out.stride(0) // out_unit,
        out.stride(1) // out_unit,
        lse.stride(0),
        KEYS=sizes.keys,
        TILE=even_tile(chosen),
        ROPE=head_dim > LATENT_DIM or q_rope is not None,
        Q_UNIT=q_unit,
        OUT_UNIT=out_unit,
        PACKED=together > 1,
        LEAST=cdiv(MIN_SPLIT_KEYS, chosen.block_n),
        ROW_COST=cdiv(ROW_COST_KEYS, chosen.block_n),
        SLACK=cdiv(SLACK_KEYS, chosen.block_n),
        WHOLE=sizes.block_size % chosen.block_n == 0,
        UPCAST=INTERPRETED,
        num_warps=chosen.num_warps,
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
