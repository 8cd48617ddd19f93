"""The walk of `sparse_attention_wide` for 32 heads and eight warps over float16 keys: two operands, of 256 dims each.

A warp has 16 heads x 8 keys of scores, where each product waits for the one before. So it has two sums of 256 dims.
Queries are in registers where the compiler leaves them there, 128 a thread, beside 64 of accumulators.
"""

import triton
import triton.language as tl

from .sparse_attention_device import add_weights, dot, round_to
from .sparse_attention_keys import HALF_EXPONENT, are_there, half_operand, is_half


@triton.constexpr_function
def in_two(options):
    """Whether keys and queries are two operands each."""
    tile = options.tile
    return tile.half and tile.block_h == 32 and tile.block_n == 32 and tile.num_warps == 8


@triton.jit
def split_dims(x):
    """512 dims as two operands: of each 16, which a thread decodes, the former 8 and the latter."""
    former, latter = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 32, 2, 8)), (0, 1, 3, 2)))
    return tl.reshape(former, (x.shape[0], 256)), tl.reshape(latter, (x.shape[0], 256))


@triton.jit
def join_dims(former, latter):
    """512 dims in their order, from `split_dims`."""
    x = tl.join(tl.reshape(former, (former.shape[0], 32, 8)), tl.reshape(latter, (former.shape[0], 32, 8)))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2)), (former.shape[0], 512))


@triton.jit
def steep(scale):
    """A power of two, 2 to 4 times `scale`, and the score from which on it takes the place of `scale`.

    A weight's exponent is an exact product less the largest product, which is rounded. From 2^31 on the rounding alone
    leaves the range of `exp2`. A product with a power of two is exact. Two scores that float32 tells apart are 64 or
    more apart there, so that weights are 1 and 0 by either scale.
    """
    exponent = (tl.cast(scale, tl.int32, bitcast=True) >> 23) & 0xFF
    large = tl.minimum(284 - exponent, 255) << 23
    return ((exponent + 2) << 23).to(tl.float32, bitcast=True), large.to(tl.float32, bitcast=True)


@triton.jit
def weigh_tile(scores, state, scales, cache, indices, dtype: tl.constexpr, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Weights of a tile as operands, the largest score and sums of weights with it, and the factor of what was before.

    `scales` are those of half scores, which have theirs, and of others, which this gives them: one, and `steep`.
    """
    KEYS: tl.constexpr = OPTIONS.keys
    UPCAST: tl.constexpr = OPTIONS.upcast
    BIAS: tl.constexpr = HALF_EXPONENT if is_half(KEYS) else 0.0
    running_max, sums = state
    if MASKED:
        valid = are_there(cache, indices, OPTIONS)
        scores = tl.where(valid[None, :], scores, float("-inf"))
    if OPTIONS.steady:
        new_max, alpha = running_max, running_max[:, None]  # nothing is rescaled
        exact = tl.exp2(scores * scales[0] - running_max[:, None])
        sums = add_weights(sums, None, exact)
    else:
        largest = tl.max(scores, 1)
        if not is_half(KEYS):
            # Both products have one scale, which is above 0: the exponents' multiplication applies it.
            scale, steep_scale, large = scales
            scale = tl.where(tl.abs(largest) < large, scale, steep_scale)
            largest *= scale
        new_max = tl.maximum(running_max, largest)
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp2(running_max - safe_max)[:, None]
        if not is_half(KEYS):
            scores *= scale[:, None]
        exact = tl.exp2(scores - (safe_max - BIAS)[:, None])
        sums = add_weights(sums, alpha, exact)
    return round_to(exact, dtype, UPCAST), new_max, sums, alpha


@triton.jit
def attend_tile_in_two(q, state, rows, cache, indices, scales, sure, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Does what `_attend_tile` does. Each product of scores has a branch of its own, or all warps would compute all."""
    KEYS: tl.constexpr = OPTIONS.keys
    UPCAST: tl.constexpr = OPTIONS.upcast
    former, running_max, sums, latter, unused = state
    q_former, q_latter = q[0]
    scale, scale_behind, unit = scales
    keys = half_operand(rows[0], rows[2], unit, KEYS)
    k_former, k_latter = split_dims(tl.reshape(keys, (keys.shape[0], 512)))
    scale = tl.where(running_max == float("inf"), 0.0, scale)
    # 0, which the compiler does not know
    zeros = tl.zeros((q_former.shape[0], k_former.shape[0]), tl.float32) + scale_behind * 0.0
    weights = round_to(zeros, k_former.dtype, UPCAST)
    if sure[0]:
        if sure[1]:
            scores = dot(q_former, tl.trans(k_former), zeros, UPCAST)
            other = zeros
            if sure[2]:
                other = dot(q_latter, tl.trans(k_latter), zeros, UPCAST)
            scores += other
            scores *= scale[:, None]
            if OPTIONS.rope:
                behind = zeros
                if sure[3]:
                    behind = dot(q[1], tl.trans(rows[1]), zeros, UPCAST)
                scores += behind * scale_behind
            weighed = weigh_tile(scores, (running_max, sums), scale, cache, indices, k_former.dtype, MASKED, OPTIONS)
            weights, running_max, sums, alpha = weighed
            former *= alpha
            latter *= alpha
        former = dot(weights, k_former, former, UPCAST)
        latter = dot(weights, k_latter, latter, UPCAST)
    return (former, running_max, sums, latter, unused), scale
