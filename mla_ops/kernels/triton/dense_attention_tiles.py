"""Sizes of the dense attention kernels' programs and how many there are, by shapes and by the device."""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from . import sparse_attention
from .attention_options import make_tile
from .common import INTERPRETED, Constant, cdiv
from .splits import MAX_SPLITS

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


@dataclass(frozen=True, eq=False)
class PrefillOptions(Constant):
    """The constants of a prefill kernel.

    Attributes:
        causal: whether the last query sees the last key, the one before it the last but one, and so on.
        exact: whether products are float32, without tensor cores.
        dim, dim_v: of queries and keys; of values.
        first, second: `split_dim(dim)`.
        block_v: columns of the accumulators.
        q_unit, k_unit, v_unit, out_unit: elements that strides are counted in.
        shortest: queries of the shortest request that `_prefill_kernel` computes.
        upcast: whether products are those of the interpreter.
        block_m, block_n: queries and keys of a tile.
        sums: of weights, a query.
    """

    causal: bool
    exact: bool
    dim: int
    dim_v: int
    first: int
    second: int
    block_v: int
    q_unit: int
    k_unit: int
    v_unit: int
    out_unit: int
    shortest: int
    upcast: bool
    block_m: int
    block_n: int
    sums: int


@functools.cache
def prefill_options(
    causal: bool,
    exact: bool,
    dims: tuple[int, int],
    units: tuple[int, int, int, int],
    block_m: int,
    block_n: int,
    sums: int,
) -> PrefillOptions:
    """`dims` are those of keys and of values; `units` of q, k, v and out."""
    dim, dim_v = dims
    parts = (*split_dim(dim), value_block(dim_v))
    return PrefillOptions(causal, exact, dim, dim_v, *parts, *units, SHORTEST, INTERPRETED, block_m, block_n, sums)


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


def paged_tile(
    device_capability: tuple[int, int], num_heads: int, mode: str, alone: bool = True
) -> sparse_attention.Tile:
    """Heads x keys of rows that are cut by shapes, where a tile lies in one block: those of the sparse kernels.

    `alone` as there, of plain keys: over fp8_ds_mla tiles of which an SM has room for two spill 176 bytes, as SM86's
    do 144. SM80 has no room for two of plain keys whose warps share the dims. Groups of 128 dims take twice the time.
    """
    if mode == "fp8" and device_capability == (8, 6):
        return group_tile(device_capability, num_heads, mode)
    alone |= mode != "plain" or device_capability == (8, 0)
    chosen = sparse_attention.tile(device_capability, num_heads, mode, alone)
    if sparse_attention.KEEPS_OPERANDS and chosen.apart and chosen.block_h == 64:  # else spills in its loop
        chosen = replace(chosen, block_n=32)
    return chosen if chosen.apart and mode != "fp8_v4" else group_tile(device_capability, num_heads, mode)


def group_tile(device_capability: tuple[int, int], num_heads: int, mode: str) -> sparse_attention.Tile:
    """Heads x keys by `attend_keys`: what the sparse kernels take over one cache after another."""
    chosen = sparse_attention.tile(device_capability, num_heads, mode)
    if mode == "fp8_v4" or chosen.block_h == 32 or (mode == "plain" and num_heads <= 32):
        return sparse_attention.tile(device_capability, 16, mode)
    # Where Triton keeps operands, more plain keys spill 328 bytes.
    keeps = sparse_attention.KEEPS_OPERANDS
    if chosen.half:
        return make_tile(64, 32, 8, 2, apart=True, early=True)
    return make_tile(64, 32 if keeps else 64, 8, 1, apart=keeps, early=keeps) if chosen.block_h == 64 else chosen


def even_tile(chosen: sparse_attention.Tile) -> sparse_attention.Tile:
    """The tile of programs that share all rows: where Triton keeps operands, 64 rows would spill 270 bytes."""
    wide = chosen.block_h == 64
    keys = 32 // chosen.ahead if wide and sparse_attention.KEEPS_OPERANDS else chosen.block_n
    return make_tile(chosen.block_h, keys, chosen.num_warps, chosen.ahead, half=chosen.half, apart=wide)


def packed_tile(device_capability: tuple[int, int], rows: int, mode: str) -> sparse_attention.Tile:
    """Rows x keys for tokens together, whose rows are all of one tile."""
    if rows <= 16:
        return paged_tile(device_capability, rows, mode)
    if device_capability[0] < 8:
        return make_tile(32, 16, 4, 0)
    roomy = mode == "plain" and device_capability[0] in (8, 9, 10) and device_capability not in ((8, 6), (8, 9))
    return make_tile(32, 32, 4, 2) if roomy else make_tile(32, 32, 8, 1)


def paged_splits(
    num_tokens: int, num_head_blocks: int, capacity: int, sms: int, block_h: int, num_warps: int = 4
) -> int:
    """Programs that share one token's keys: enough to fill every SM, few enough to have MIN_SPLIT_KEYS keys each.

    From shapes alone, so that a captured launch fits every replay. Tiles of up to 32 heads and four warps leave room
    for two programs an SM, which hide each other's latency; larger ones take an SM to themselves.
    """
    programs = num_tokens * num_head_blocks
    wanted = sms * (2 if block_h <= 32 and num_warps == 4 else 1)
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
