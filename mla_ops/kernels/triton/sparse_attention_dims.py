"""The walk of `sparse_attention_wide` for 32 heads over keys that are operands as they are: warps share the dims.

Each of eight or four warps multiplies all heads with all keys of a tile in its share of the dims, and adds up that
share of the output. So keys and values are read from shared memory once, not by two or four warps each. Scores are sums
over the warps, which go through shared memory.

Eight warps have an SM to themselves: queries are in registers, 36 a thread beside 64 of accumulators, and one tile of
keys is on its way while another is used, 74 KB. Sums pass in two halves of the keys, 16 KB. Of four warps there are two
programs an SM, 90 KB each: queries, one tile of keys, sums.
"""

import triton
import triton.language as tl

from .sparse_attention_device import dot, first_running_max, round_to
from .sparse_attention_keys import are_there


@triton.constexpr_function
def by_dims(options):
    """Whether warps share the dims: of tiles of 32 heads over plain keys that `attend_whole` reads."""
    return options.tile.block_h == 32 and options.keys.operands == "plain"


@triton.jit
def split_queries(q, scale, OPTIONS: tl.constexpr):
    """Q and its dims behind 512 as operands, `[warps, heads, dims]`, and `scale` as it is.

    Eight warps do not part the 64 dims behind 512. Their other queries are operands of a product in front of the loop
    as well, on which the scale depends, or so the compiler thinks: else it would read them in each turn.
    """
    WARPS: tl.constexpr = OPTIONS.tile.num_warps
    latent, rope = q
    latent = tl.permute(_part(latent, WARPS), (1, 0, 2))
    if WARPS == 8:
        nothing = tl.zeros((WARPS, latent.shape[2], 16), latent.dtype)
        products = dot(latent, nothing, tl.zeros((WARPS, latent.shape[1], 16), tl.float32), OPTIONS.upcast)
        scale = tl.where(tl.max(tl.max(tl.max(products, 2), 1), 0) > float("inf"), 0.0, scale)
    elif OPTIONS.rope:
        rope = tl.permute(_part(rope, WARPS), (1, 0, 2))
    return latent, rope, scale


@triton.jit
def _part(x, WARPS: tl.constexpr):
    """[rows, dims] as [rows, warps, dims of a warp]."""
    return tl.reshape(x, (x.shape[0], WARPS, x.shape[1] // WARPS))


@triton.jit
def _add_up(x):
    """[keys, heads], sums over the first dim of [warps, heads, keys]."""
    x = tl.permute(x, (2, 1, 0))
    if x.shape[2] == 8:
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2)))
        x = first + second
    else:
        x = tl.reshape(x, (x.shape[0], x.shape[1], 2, 2))
    first, second = tl.split(x)
    first, second = tl.split(first + second)
    return first + second


@triton.jit
def _scores(q, rows, OPTIONS: tl.constexpr):
    """[keys, heads] in float32."""
    WARPS: tl.constexpr = OPTIONS.tile.num_warps
    UPCAST: tl.constexpr = OPTIONS.upcast
    latent, behind = q
    keys, rope, _ = rows
    H: tl.constexpr = latent.shape[1]
    N: tl.constexpr = keys.shape[0]
    products = tl.zeros((WARPS, H, N), tl.float32)
    if WARPS == 8:
        products = dot(latent, tl.permute(_part(keys, WARPS), (1, 2, 0)), products, UPCAST)
        # a thread has lower and upper keys side by side, so that halving them moves nothing
        lower, upper = tl.split(tl.permute(tl.reshape(products, (WARPS, H, 2, N // 2)), (0, 1, 3, 2)))
        lower, upper = _add_up(lower), _add_up(upper)
        is_lower = tl.arange(0, 2)[:, None, None] == 0
        scores = tl.reshape(tl.where(is_lower, lower[None, :, :], upper[None, :, :]), (N, H))
        if OPTIONS.rope:
            scores += tl.trans(dot(behind, tl.trans(rope), tl.zeros((H, N), tl.float32), UPCAST))
    else:
        if OPTIONS.rope:
            products = dot(behind, tl.permute(_part(rope, WARPS), (1, 2, 0)), products, UPCAST)
        products = dot(latent, tl.permute(_part(keys, WARPS), (1, 2, 0)), products, UPCAST)
        scores = _add_up(products)
    return scores


@triton.jit
def attend_tile_by_dims(q, state, rows, cache, indices, scales, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Does what `_attend_tile` of `sparse_attention_wide` does, with scores and sums of weights as [keys, heads].

    `scales`: the scores' scale, and whether no tile of a STEADY program before had a key.
    """
    WARPS: tl.constexpr = OPTIONS.tile.num_warps
    UPCAST: tl.constexpr = OPTIONS.upcast
    acc, running_max, sums, unused, also_unused = state
    keys = rows[0]
    scores = _scores(q, rows, OPTIONS) * scales[0]
    if MASKED:
        valid = are_there(cache, indices, OPTIONS)
        scores = tl.where(valid[:, None], scores, float("-inf"))
    if OPTIONS.steady:
        if scales[1]:
            running_max = first_running_max(running_max, tl.max(scores, 0))
        safe_max = running_max
    else:
        former = running_max
        running_max = tl.maximum(running_max, tl.max(scores, 0))
        safe_max = tl.where(running_max == float("-inf"), 0.0, running_max)
        alpha = tl.exp2(former - safe_max)
        sums *= alpha[None, :]
    weights = tl.exp2(scores - safe_max[None, :])
    if WARPS == 8:
        sums += weights
    else:
        # of every fourth key, which a thread has: one register, not eight
        sums += tl.sum(tl.reshape(weights, (weights.shape[0] // WARPS, WARPS, weights.shape[1])), 0)
    if not OPTIONS.steady:
        acc *= alpha[:, None]
    # where the product takes them: made before, they hold more registers
    acc = dot(tl.trans(round_to(weights, keys.dtype, UPCAST)), keys, acc, UPCAST)
    return acc, running_max, sums, unused, also_unused
