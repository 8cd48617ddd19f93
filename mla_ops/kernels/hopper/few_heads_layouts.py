"""Register and shared-memory layouts of few_heads.py, as bases over powers of two.

A basis says to which coordinates the next bit of a register, lane, warp or shared-memory offset leads. Keys and heads
are rows; the 512 latent bytes of a key are 128 words of 32 bits, and a word's bits 5 and 6 number its scale group.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.constexpr_function
def bits(value: int) -> int:
    """Number of address bits of a power of two."""
    return value.bit_length() - 1


@gluon.constexpr_function
def ring_layout(block: int, words: int) -> gl.SharedLinearLayout:
    """Shared rows of `words` 32-bit words; bits 0, 1, 2 of the key xor the 16-byte chunk by 4, 2, 4."""
    swizzle = {0: 16, 1: 8, 2: 16}
    columns = [[0, 1 << i] for i in range(bits(words))]
    rows = [[1 << i, swizzle.get(i, 0)] for i in range(bits(block))]
    return gl.SharedLinearLayout(columns + rows)


@gluon.constexpr_function
def ring_layout_16(block: int) -> gl.SharedLinearLayout:
    """The RoPE ring seen as 64 bfloat16: the same bytes as `ring_layout(block, 32)`."""
    swizzle = {0: 32, 1: 16, 2: 32}
    columns = [[0, 1 << i] for i in range(6)]
    rows = [[1 << i, swizzle.get(i, 0)] for i in range(bits(block))]
    return gl.SharedLinearLayout(columns + rows)


@gluon.constexpr_function
def score_words_layout(block: int, warps: int) -> gl.DistributedLinearLayout:
    """[block, 128 words] for Q K^T: a lane holds 16-byte pieces of one key; a warp one 128-dim group."""
    key = [[1 << i, 0] for i in range(bits(block))]
    word = [[0, 1 << i] for i in range(7)]
    split = bits(warps) - 2
    return gl.DistributedLinearLayout(
        word[0:2] + [word[4]] + key[3 + split :], word[2:4] + key[0:3], key[3 : 3 + split] + word[5:7], [], [block, 128]
    )


@gluon.constexpr_function
def rope_layout(block: int, warps: int) -> gl.DistributedLinearLayout:
    """[block, 64 bfloat16] for the RoPE part of Q K^T: each of four warp groups takes 16 dims."""
    key = [[1 << i, 0] for i in range(bits(block))]
    dim = [[0, 1 << i] for i in range(6)]
    split = bits(warps) - 2
    return gl.DistributedLinearLayout(
        dim[0:2] + key[3 + split :], dim[2:4] + key[0:3], key[3 : 3 + split] + dim[4:6], [], [block, 64]
    )


@gluon.constexpr_function
def value_words_layout(block: int, warps: int) -> gl.DistributedLinearLayout:
    """[block, 128 words] for P V: a lane holds neighbouring keys of a few neighbouring dims."""
    key = [[1 << i, 0] for i in range(bits(block))]
    word = [[0, 1 << i] for i in range(7)]
    split = bits(warps) - 2
    return gl.DistributedLinearLayout(
        word[0 : 2 - split] + [key[0]] + key[3:],
        key[1:3] + word[2 - split : 5 - split],
        word[5 - split : 7],
        [],
        [block, 128],
    )


@gluon.constexpr_function
def softmax_layout(heads: int, block: int, warps: int) -> gl.DistributedLinearLayout:
    """[4 groups, heads, block]: a thread holds neighbouring keys in all four groups; a head lies within one warp."""
    keys = bits(heads * block) - bits(warps) - 5
    group = [[1, 0, 0], [2, 0, 0]]
    head = [[0, 1 << i, 0] for i in range(bits(heads))]
    key = [[0, 0, 1 << i] for i in range(bits(block))]
    lane_heads = 5 - (bits(block) - keys)
    return gl.DistributedLinearLayout(
        key[0:keys] + group, key[keys:] + head[0:lane_heads], head[lane_heads:], [], [4, heads, block]
    )


@gluon.constexpr_function
def partial_scores_shared(heads: int, block: int) -> gl.SharedLinearLayout:
    """[4, heads, block] float32; head bits 0 and 1 xor columns by 8 and 16, which spreads 8-byte fragment stores."""
    swizzle = {0: 8, 1: 16}
    bases = [[0, 0, 1 << i] for i in range(bits(block))]
    bases += [[0, 1 << i, swizzle.get(i, 0)] for i in range(bits(heads))]
    return gl.SharedLinearLayout(bases + [[1, 0, 0], [2, 0, 0]])


@gluon.constexpr_function
def probability_shared(heads: int, block: int) -> gl.SharedLinearLayout:
    """[4, heads, block] float16; rows swizzled by 16-byte chunks for the A-operand loads."""
    chunks = bits(block) - 3
    bases = [[0, 0, 1 << i] for i in range(bits(block))]
    shift = 3 - chunks
    bases += [[0, 1 << i, 8 << (i - shift) if shift <= i < 3 else 0] for i in range(bits(heads))]
    return gl.SharedLinearLayout(bases + [[1, 0, 0], [2, 0, 0]])


@gluon.constexpr_function
def output_layout(heads: int, warps: int) -> gl.DistributedLinearLayout:
    """[heads, 512]: the accumulator's fragments after latent dims were put in order."""
    split = bits(warps) - 2
    dim = [[0, 1 << i] for i in range(9)]
    head = [[1 << i, 0] for i in range(bits(heads))]
    rep = 4 - split
    return gl.DistributedLinearLayout(
        dim[0 : rep + 1] + head[3:], dim[rep + 1 : rep + 3] + head[0:3], dim[rep + 3 : 7] + dim[7:9], [], [heads, 512]
    )


@gluon.constexpr_function
def keys_per_thread(heads: int, block: int, warps: int) -> int:
    """Keys of one head that a thread of the softmax holds."""
    return heads * block // (warps * 32)


@gluon.constexpr_function
def sum_layout(heads: int, block: int, warps: int) -> gl.DistributedLinearLayout:
    """[4, heads, lanes of a head]: `softmax_layout` with each thread's keys summed."""
    softmax = softmax_layout(heads, block, warps)
    keys = keys_per_thread(heads, block, warps)
    part = [
        [[b[0], b[1], b[2] // keys] for b in bases]
        for bases in (softmax.reg_bases[bits(keys) :], softmax.lane_bases, softmax.warp_bases)
    ]
    return gl.DistributedLinearLayout(part[0], part[1], part[2], [], [4, heads, block // keys])
