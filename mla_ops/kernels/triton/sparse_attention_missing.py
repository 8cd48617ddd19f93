"""Where keys of a row are missing, or all of them one: what 32 and 64 heads ask of indices before they walk.

Tiles in front of the first missing key need no masks (`whole_tiles`). Behind them a program writes the indices of the
keys that there are, one after the other, to where its output will be (`keep_valid`), and walks over those.
"""

import triton
import triton.language as tl

from .attention_options import KEPT_AT
from .sparse_attention_keys import locate


@triton.jit
def load_indices(index_row, begin, end, OPTIONS: tl.constexpr):
    """The first 2,048 indices of a span, and the first of them, for `whole_tiles_or_one`."""
    column = begin + tl.arange(0, 2048)
    one = begin
    if OPTIONS.copies:
        one = tl.load(index_row + begin, mask=begin < end, other=-1)
    return tl.load(index_row + column, mask=column < end, other=-1), one


@triton.jit
def whole_tiles(cache, seen, begin, end, OPTIONS: tl.constexpr):
    """The end of the tiles from `begin` on in which all keys are there, as far as was `seen`."""
    KEYS: tl.constexpr = OPTIONS.keys
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    missing = tl.where(locate(cache, seen[0], KEYS)[2], 2048, tl.arange(0, 2048))
    return begin + tl.minimum(tl.min(missing, 0), end - begin) // BLOCK_N * BLOCK_N


@triton.jit
def whole_tiles_or_one(cache, seen, begin, end, OPTIONS: tl.constexpr):
    """`whole_tiles`, and what `without_copies` gives: both by one reduction."""
    KEYS: tl.constexpr = OPTIONS.keys
    BLOCK_N: tl.constexpr = OPTIONS.tile.block_n
    indices, one = seen
    n = tl.arange(0, 2048)
    missing = tl.where(locate(cache, indices, KEYS)[2], 2048 + (indices == one).to(tl.int32), n)
    # the first that is missing, or 2048, or where all are one 2049
    found = tl.min(tl.where(n < end - begin, missing, 2049), 0)
    alike = (found == 2049) & (end - begin > BLOCK_N) & (end - begin <= 2048)
    short_of = tl.where(alike, tl.log2((end - begin).to(tl.float32) / BLOCK_N), 0.0)
    end = tl.where(alike, begin + BLOCK_N, end)
    return begin + tl.minimum(tl.minimum(found, 2048), end - begin) // BLOCK_N * BLOCK_N, end, short_of


@triton.jit
def room_of(place, begin):
    """Where a program keeps indices: its rows of the output, as int32.

    `place` are the output, its strides of splits, tokens and heads, split, token, and the first head.
    """
    out, strides, split, token, head = place
    # 0, which the compiler does not know: an address kept over the loop would spill
    zero = (begin < 0).to(tl.int32)
    row = out + (split + zero) * strides[0] + token * strides[1] + (head + zero).to(tl.int64) * strides[2]
    return row.to(tl.pointer_type(tl.int32))


@triton.jit
def _rank(valid, WARPS: tl.constexpr, KEYS: tl.constexpr):
    """How many of 32 neighbours, which are a warp's, are `valid` before each, and how many of all."""
    if KEYS.decode == "portable":
        by_warp = tl.reshape(valid, (WARPS, 32))
        before = tl.reshape(tl.cumsum(by_warp, 1), (WARPS * 32,)) - valid
        every = tl.reshape(tl.zeros_like(by_warp) + tl.sum(by_warp, 1)[:, None], (WARPS * 32,))
    else:
        # not pure: it is about all lanes
        before, every = tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .b32 all, below;
            setp.ne.s32 p, $2, 0;
            vote.sync.ballot.b32 all, p, -1;
            mov.u32 below, %lanemask_lt;
            and.b32 below, below, all;
            popc.b32 $0, below;
            popc.b32 $1, all;
            }
            """,
            "=&r,=&r,r",
            [valid],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return before, every


@triton.jit
def keep_valid(cache, index_row, begin, end, kept_row, TILE: tl.constexpr, KEYS: tl.constexpr):
    """Writes to `kept_row` how many of the keys from `begin` to `end` are there and, from KEPT_AT on, their indices.

    Behind these, a tile of the last of them. Of each 2,048 keys a warp has its share, whose order does not change.
    Warps tell each other by way of `kept_row`.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    WARPS: tl.constexpr = TILE.num_warps
    RUNS: tl.constexpr = 64 // WARPS
    thread = tl.arange(0, WARPS * 32)
    warp = thread // 32
    kept = begin * 0
    tl.debug_barrier()
    for start in range(begin, end, 2048):
        runs = ()
        for i in tl.static_range(RUNS):
            column = start + i * (WARPS * 32) + thread
            runs = runs + (tl.load(index_row + column, mask=column < end, other=-1),)
        places = ()
        own = thread * 0
        for i in tl.static_range(RUNS):
            before, every = _rank(locate(cache, runs[i], KEYS)[2].to(tl.int32), WARPS, KEYS)
            places = places + (own + before,)
            own += every
        tl.store(kept_row + 1 + warp, own)
        tl.debug_barrier()
        place = kept_row + (KEPT_AT + kept) + thread * 0
        for i in tl.static_range(WARPS):
            others = tl.load(kept_row + 1 + i)
            place += tl.where(warp > i, others, 0)
            kept += others
        for i in tl.static_range(RUNS):
            tl.store(place + places[i], runs[i], mask=locate(cache, runs[i], KEYS)[2])
        tl.debug_barrier()
    tl.store(kept_row, kept)
    last = tl.load(kept_row + (KEPT_AT - 1 + kept), mask=kept > 0, other=0)
    tile = tl.arange(0, BLOCK_N)
    tl.store(kept_row + (KEPT_AT + kept) + tile, tile * 0 + last)
    tl.debug_barrier()
