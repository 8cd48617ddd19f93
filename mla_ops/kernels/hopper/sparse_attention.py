"""Token-level sparse MLA on SM90: paged `fp8_ds_mla`, `fp8_ds_mla_v4` and `bf16` caches, and flat bfloat16 keys.

A cluster or a group of CTAs takes a query token and a tile of its heads, each CTA a share of the keys; what they found
is merged in the cluster's shared memory, or through L2 (`group.cuh`). So there is no merge behind it and no need of a
schedule: each CTA finds its share from the lengths themselves. Tokens that do not fill the device as often as the
others are a launch of their own. Rows of unequal `topk_length` are shared evenly among all CTAs (`balance.py`). Results
are the same in every run.

Precision of the quantised formats (`sparse_attention.cu`). Keys, values and weights are float16, RoPE parts bfloat16,
sums float32. A query is float16 times a power of two of its head, exact down to 2^-39 of the head's largest magnitude.
A key is e4m3 times its scale as float16: exact for powers of two, within 2^-11 of the exact product for other scales.
Scales from 2^-62 to 2^39 have a power of two of their key taken out, for which scores and weights make up in float32.
The scales of a key that are not 0 may span 19 binades. Keys beyond, and with denormal, infinite or NaN scales, go 64 at
a time with scales in float32 (`wide.cuh`), which holds any and takes 2 to 5 times as long. An infinite or NaN query
spoils its head alone. CTAs of a cluster exchange their parts of a result as float16, bfloat16 where a power of two was
taken out.

Keys of `fp8_ds_mla_v4` are all float16, times 2^8: its e4m3 exact where the scales of a key span 15 binades, its RoPE
part exact from 2^-25 and, below that, within 2^-33. A power of two taken out of a key, where its largest scale is
outside of [2^-17, 2^-5], moves these with it, to where that scale is 2^-7. RoPE of 2^8 or more, so moved, and scales
further apart go the same way.

Bfloat16 keys (`sparse_attention_bf16.cu`, tiles of 64 heads in `sparse_attention_bf16_64.cu`) and queries are operands
as they are; weights are bfloat16.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from ...dispatch import Call, Lowering
from ...formats import geometry
from ..alignment import aligned, check_cache_address
from . import groups
from .balance import balance_for
from .costs import Costs, costs_of, predicted_us
from .launch import (
    KERNELS,
    MOST_IN_REGISTERS,
    MOST_OF_A_CTA,
    MOST_SHARES,
    NARROW,
    SPLITS,
    TILE_KEYS,
    Balance,
    Clusters,
    Group,
    KeyFormat,
    Shape,
    clusters_at_once,
    compile_reason,
    groups_for,
    splits_for,
    tiles_for,
)
from .params import NO_CACHE, CacheParams, Rows, cache_params
from .waves import Wave, fastest_waves, forced, launch_waves

SHARE_TURNS = 8  # a share of a deterministic row has no more, as far as SPLITS go
TURNS_IN_REGISTERS = 4  # the same where CTAs keep shares in registers
SHARES_IN_REGISTERS = {16: 8, 32: 6}  # heads of a tile, and the most shares of its rows
# The same where smaller tiles add up the weights of shares in the same order (`weigh_parts`).
SHARES_BY_NARROW = {32: 8, 64: 4}


def shapes_for(keys: KeyFormat, num_heads: int, turns: int) -> list[Shape]:
    """Launches to choose from, for rows with so many turns of keys."""
    clusters = [Clusters(tile, n) for tile in tiles_for(keys, num_heads) for n in splits_for(turns)]
    return [*clusters, *groups_for(keys, num_heads, turns)]


def choose(
    keys: KeyFormat, num_tokens: int, num_heads: int, topk: int, at_once: tuple[int, ...], costs: Costs
) -> tuple[Wave, ...]:
    """The least predicted time, from shapes alone.

    Args:
        keys: the kernels' format.
        num_tokens: query tokens.
        num_heads: heads.
        topk: columns of the indices.
        at_once: clusters that the device runs at one time, for each size in `SPLITS`.
        costs: times of the device.
    """
    turns = max(1, -(-topk // TILE_KEYS))
    shapes = shapes_for(keys, num_heads, turns)
    return fastest_waves(keys, shapes, num_tokens, num_heads, turns, at_once, costs)


def narrow_shapes(tile: int, shares: int) -> list[Shape]:
    """Launches by smaller tiles that give rows of so many shares the bits of this one."""
    return [
        Clusters(narrow, splits, shares=shares, bits_of=tile)
        for narrow, splits in itertools.product(NARROW, splits_for(shares))
        if narrow < tile and splits > 1 and shares <= min(SHARES_BY_NARROW.get(tile, 0), MOST_OF_A_CTA[narrow] * splits)
    ]


def shapes_of_shares(keys: KeyFormat, tile: int, shares: int, groups_of_row: list[Group]) -> list[Shape]:
    """Launches that add up so many shares of a row in the same way, of a tile and of groups worth a thought."""
    most_of_a_cta = MOST_OF_A_CTA.get(tile, shares) if keys.quantized else 1
    most = MOST_IN_REGISTERS if tile in MOST_OF_A_CTA else MOST_SHARES
    # Kernels with 32 heads that keep shares in registers have one warpgroup of scores: not the sums of two.
    own_kernel = keys.quantized and tile == 32 and 1 < shares <= most
    cluster = Clusters(tile, shares, shares=shares if own_kernel else 0)
    # CTAs of a cluster of two keep a half each in float32 where heads are fewer than groups': not the bits of shares.
    if not keys.quantized or not 1 < shares <= most or (shares == 2 and tile != groups.TILE):
        return [cluster]
    in_shares = [
        Clusters(tile, splits, shares=shares)
        for splits in (splits_for(shares) if tile in MOST_OF_A_CTA else SPLITS)
        if splits < shares and (splits == 1 or shares <= most_of_a_cta * splits)
    ]
    same_groups = (group for group in groups_of_row if group.members == shares)
    return [cluster, *same_groups, *in_shares, *narrow_shapes(tile, shares)]


def deterministic_shapes(keys: KeyFormat, num_heads: int, topk: int) -> list[Shape]:
    """Launches that give a row the same bits: they have the tile and the shares that its own capacity says."""
    tile, turns = tiles_for(keys, num_heads)[0], max(1, -(-topk // TILE_KEYS))
    shares = next((n for n in SPLITS if n * SHARE_TURNS >= turns), SPLITS[-1])
    if keys.quantized and tile in SHARES_IN_REGISTERS:
        shares = min(SHARES_IN_REGISTERS[tile], -(-turns // TURNS_IN_REGISTERS))
        shares += shares == 2
    return shapes_of_shares(keys, tile, shares, groups_for(keys, num_heads, turns))


def fastest_shape(
    keys: KeyFormat,
    shapes: Sequence[Shape],
    num_tokens: int,
    num_heads: int,
    turns: int,
    at_once: tuple[int, ...],
    costs: Costs,
) -> tuple[Wave, ...]:
    """One launch, the fastest predicted. Arguments as of `fastest_waves`."""

    def time(shape: Shape) -> float:
        return predicted_us(keys, shape, num_tokens, num_heads, turns, at_once, costs)

    runnable = [s for s in shapes if isinstance(s, Group) or at_once[SPLITS.index(s.splits)]]
    return (Wave(num_tokens, min(runnable, key=time)),)


def choose_deterministic(
    keys: KeyFormat, num_tokens: int, num_heads: int, topk: int, at_once: tuple[int, ...], costs: Costs
) -> tuple[Wave, ...]:
    """The fastest of the launches whose bits do not depend on the batch. Arguments as of `choose`."""
    shapes, turns = deterministic_shapes(keys, num_heads, topk), max(1, -(-topk // TILE_KEYS))
    return fastest_shape(keys, shapes, num_tokens, num_heads, turns, at_once, costs)


@functools.lru_cache(maxsize=4096)
def _waves(
    keys: KeyFormat, num_tokens: int, num_heads: int, topk: int, deterministic: bool, device_index: int
) -> tuple[Wave, ...]:
    at_once = clusters_at_once(keys, tiles_for(keys, num_heads)[0], device_index)
    chooses = choose_deterministic if deterministic else choose
    return chooses(keys, num_tokens, num_heads, topk, at_once, costs_of(device_index))


@functools.lru_cache(maxsize=4096)
def _balance(keys: KeyFormat, num_tokens: int, num_heads: int, topk: int, device_index: int) -> Balance | None:
    waves = _waves(keys, num_tokens, num_heads, topk, False, device_index)
    at_once = clusters_at_once(keys, tiles_for(keys, num_heads)[0], device_index)
    return balance_for(keys, waves, num_tokens, num_heads, -(-topk // TILE_KEYS), at_once, costs_of(device_index))


def _attend(
    keys: KeyFormat,
    q: torch.Tensor,
    caches: tuple[CacheParams, CacheParams],
    topk: int,
    softmax_scale: float,
    *,
    q_rope: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
    deterministic: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """`topk` counts the turns of both caches."""
    num_tokens, num_heads, _ = q.shape
    waves, balance = forced(num_tokens), None
    if not waves:
        waves = _waves(keys, num_tokens, num_heads, topk, deterministic, q.device.index)
        if not deterministic and any(cache.lengths for cache in caches):
            balance = _balance(keys, num_tokens, num_heads, topk, q.device.index)
    launch_waves(
        keys,
        waves,
        q,
        caches,
        softmax_scale,
        q_rope=q_rope,
        attn_sink=attn_sink,
        req_id_per_token=req_id_per_token,
        out=out,
        lse=lse,
        balance=balance,
        deterministic=deterministic,
    )


def paged_rows(
    kv_cache: torch.Tensor, cache_format: str, name: str, op: str = "paged_sparse_attention"
) -> tuple[Rows, int]:
    """A paged cache, and the width of its keys."""
    check_cache_address(op, name, kv_cache)
    num_blocks, block_size, block_stride, head_dim = geometry(kv_cache, cache_format)
    return Rows(kv_cache, num_blocks, block_size, block_stride), head_dim


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
    if q.shape[0] == 0 or q.shape[1] == 0:
        return
    rows, head_dim = paged_rows(kv_cache, cache_format, "kv_cache")
    _attend(
        KERNELS[cache_format, head_dim],
        q,
        (cache_params(rows, indices, topk_length, block_table), NO_CACHE),
        indices.shape[1],
        softmax_scale,
        q_rope=q_rope,
        attn_sink=attn_sink,
        req_id_per_token=req_id_per_token,
        deterministic=deterministic,
        out=out,
        lse=lse,
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
    """A turn has keys of one cache only, so each has its own last, partial turn."""
    if q.shape[0] == 0 or q.shape[1] == 0:
        return
    rows, head_dim = paged_rows(kv_cache, cache_format, "kv_cache")
    extra_rows, _ = paged_rows(extra_kv_cache, extra_cache_format, "extra_kv_cache")
    _attend(
        KERNELS[cache_format, head_dim],
        q,
        (
            cache_params(rows, indices, topk_length, block_table),
            cache_params(extra_rows, extra_indices, extra_topk_length, extra_block_table),
        ),
        -(-indices.shape[1] // TILE_KEYS) * TILE_KEYS + extra_indices.shape[1],
        softmax_scale,
        attn_sink=attn_sink,
        req_id_per_token=req_id_per_token,
        deterministic=deterministic,
        out=out,
        lse=lse,
    )


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
    """Flat keys are a cache with blocks of one token."""
    if q.shape[0] == 0 or q.shape[1] == 0:
        return
    kv = aligned(kv)
    _attend(
        KERNELS["bf16", kv.shape[1]],
        q,
        (cache_params(Rows(kv, kv.shape[0], 1, kv.stride(0) * 2), indices, topk_length, None), NO_CACHE),
        indices.shape[1],
        softmax_scale,
        attn_sink=attn_sink,
        req_id_per_token=None,
        deterministic=deterministic,
        out=out,
        lse=lse,
    )


def paged_reason(call: Call) -> str | None:
    keys = KERNELS.get((call.cache_format, call.head_dim))
    if keys is None:
        formats = ", ".join(sorted({name for name, _ in KERNELS}))
        return f"the Hopper kernels read {formats}, this cache is {call.cache_format} of width {call.head_dim}"
    if call.extra_cache_format not in ("", call.cache_format):
        return (
            f"the Hopper kernels read two caches of one format, these are {call.cache_format} and "
            f"{call.extra_cache_format}"
        )
    if call.dtype != torch.bfloat16:
        return f"the Hopper kernels take bfloat16 queries, these are {call.dtype}"
    return compile_reason()


def flat_reason(call: Call) -> str | None:
    return paged_reason(call._replace(cache_format="bf16"))


LOWERINGS = {
    "paged_sparse_attention": Lowering(paged_sparse_attention, paged_reason, deterministic=True),
    "paged_sparse_attention.extra": Lowering(paged_sparse_attention_extra, paged_reason, deterministic=True),
    "sparse_attention": Lowering(sparse_attention, flat_reason, deterministic=True),
}
