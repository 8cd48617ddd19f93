"""What both kernels of few_heads.py are made of: addresses and copies of rows, the products, queries, results."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.core import _aggregate as aggregate

from .few_heads_layouts import output_layout, ring_layout_16, rope_layout, score_words_layout

ROW_CHUNKS = gl.constexpr(41)  # 656 bytes in pieces of 16
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class Ring:
    """Blocks of raw rows in shared memory: latent words, RoPE words, scales, and the address of each row."""

    latent: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    scale: gl.shared_memory_descriptor
    chunk: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, latent, rope, scale, chunk, full, free):
        self.latent = latent
        self.rope = rope
        self.scale = scale
        self.chunk = chunk
        self.full = full
        self.free = free


@gluon.jit
def _keys_to_half(words):
    """e4m3 x 4 in a word -> four float16, for pairs of neighbouring dims."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 l, h;
        .reg .b32 x, y;
        mov.b32 {l, h}, $4;
        cvt.rn.f16x2.e4m3x2 x, l;
        cvt.rn.f16x2.e4m3x2 y, h;
        mov.b32 {$0, $1}, x;
        mov.b32 {$2, $3}, y;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _values_to_half(even, odd):
    """Words of two neighbouring keys -> float16 pairs (even key, odd key) for each of the four dims."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 l, h;
        .reg .b32 x, y, z;
        prmt.b32 z, $8, $9, 0x5140;
        mov.b32 {l, h}, z;
        cvt.rn.f16x2.e4m3x2 x, l;
        cvt.rn.f16x2.e4m3x2 y, h;
        mov.b32 {$0, $1}, x;
        mov.b32 {$2, $3}, y;
        prmt.b32 z, $8, $9, 0x7362;
        mov.b32 {l, h}, z;
        cvt.rn.f16x2.e4m3x2 x, l;
        cvt.rn.f16x2.e4m3x2 y, h;
        mov.b32 {$4, $5}, x;
        mov.b32 {$6, $7}, y;
        }""",
        "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r",
        [even, odd],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pages(index, table, request_valid, table_width, BLOCK_SIZE: gl.constexpr, LOCAL: gl.constexpr):
    """Index -> (cache block, offset in it); block -1 where nothing is attended. Nothing outside the table is read."""
    page = index // BLOCK_SIZE
    if LOCAL:
        inside = (index >= 0) & (page < table_width) & request_valid
        block = gl.load(table + page, mask=inside, other=-1)
    else:
        block = gl.where(index >= 0, page, -1)
    return block, index % BLOCK_SIZE


@gluon.jit
def row_chunk(block, offset, num_blocks, stride_chunks):
    """First 16-byte chunk of a key's row in the cache, -1 for a key that is not attended."""
    chunk = block.to(gl.int64) * stride_chunks + offset * ROW_CHUNKS
    return gl.where((block >= 0) & (block < num_blocks), chunk, -1)


@gluon.jit
def copy_chunks(chunks, BLOCK: gl.constexpr):
    """Row addresses as the three copies of a block want them."""
    WARPS: gl.constexpr = gl.num_warps()
    latent = chunks.load(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])))
    rope = chunks.load(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])))
    scale = chunks.load(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])))
    return latent, rope, scale


@gluon.jit
def start_copies(ring, stage, latent_chunk, rope_chunk, scale_chunk, words, BLOCK: gl.constexpr):
    """Start the copies of one block of rows, 16 bytes a lane; rows not attended are not read and become zeros."""
    WARPS: gl.constexpr = gl.num_warps()
    LATENT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    SCALE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    pointer = (words + gl.arange(0, 128, gl.SliceLayout(0, LATENT)))[None, :] + (latent_chunk * 4)[:, None]
    async_copy.async_copy_global_to_shared(ring.latent.index(stage), pointer, mask=(latent_chunk >= 0)[:, None])
    pointer = (words + 132 + gl.arange(0, 32, gl.SliceLayout(0, ROPE)))[None, :] + (rope_chunk * 4)[:, None]
    async_copy.async_copy_global_to_shared(ring.rope.index(stage), pointer, mask=(rope_chunk >= 0)[:, None])
    pointer = (words + 128 + gl.arange(0, 4, gl.SliceLayout(0, SCALE)))[None, :] + (scale_chunk * 4)[:, None]
    async_copy.async_copy_global_to_shared(ring.scale.index(stage), pointer, mask=(scale_chunk >= 0)[:, None])


@gluon.jit
def _scores(words, rope_keys, scale, q_latent, q_rope, HEADS: gl.constexpr, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """Partial scores [4 groups, heads, block]: the group's scaled latent product plus a quarter of the RoPE product."""
    RHS: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    x0, x1, x2, x3 = _keys_to_half(words)
    keys = gl.join(gl.join(x0, x2), gl.join(x1, x3)).reshape([BLOCK, 4, 2, 4, 4, 2, 2])
    keys = keys.permute((1, 2, 4, 5, 3, 6, 0)).reshape([4, 128, BLOCK])
    keys = gl.convert_layout(keys, RHS, assert_trivial=True)
    zero = gl.zeros([4, HEADS, BLOCK], gl.float32, MMA)
    product = mma_v2(q_latent, keys, zero)
    rope_keys = rope_keys.reshape([BLOCK, 4, 4, 2, 2]).permute((1, 3, 2, 4, 0)).reshape([4, 16, BLOCK])
    rope_keys = gl.convert_layout(rope_keys, RHS, assert_trivial=True)
    rope_product = mma_v2(q_rope, rope_keys, zero)
    return product * scale[:, None, :] + rope_product


@gluon.jit
def weighted_values(words, probabilities, accumulator, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """accumulator [4 groups, heads, 128] += probabilities [4, heads, block] x values [4, block, 128]."""
    SIDE: gl.constexpr = gl.num_warps() // 4  # warps of a group
    even, odd = words.reshape([BLOCK // 2, 2, 128]).permute((0, 2, 1)).split()
    e0, o0, e1, o1, e2, o2, e3, o3 = _values_to_half(even, odd)
    low = gl.join(gl.join(e0, o0), gl.join(e2, o2))
    high = gl.join(gl.join(e1, o1), gl.join(e3, o3))
    # [pair of keys, group, warp, lane, word, parity, byte high, byte low]: a lane's neighbouring dims become tiles.
    values = gl.join(low, high).reshape([BLOCK // 2, 4, SIDE, 8, 4 // SIDE, 2, 2, 2]).permute((1, 0, 5, 4, 6, 7, 2, 3))
    values = gl.convert_layout(values.reshape([4, BLOCK, 128]), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
    return mma_v2(probabilities, values, accumulator)


@gluon.jit
def stage_scores(stage, ring, q_latent, q_rope, HEADS: gl.constexpr, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """Partial scores of the block in a stage of the ring."""
    WARPS: gl.constexpr = gl.num_warps()
    ROW4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = ring.latent.index(stage).load(score_words_layout(BLOCK, WARPS))
    rope_keys = (
        ring.rope.index(stage)
        ._reinterpret(gl.bfloat16, [BLOCK, 64], ring_layout_16(BLOCK))
        .load(rope_layout(BLOCK, WARPS))
    )
    scale = (
        ring.scale.index(stage)._reinterpret(gl.float32, [BLOCK, 4], ROW4).permute((1, 0)).load(gl.SliceLayout(1, MMA))
    )
    return _scores(words, rope_keys, scale, q_latent, q_rope, HEADS, BLOCK, MMA)


@gluon.jit
def read_queries(q, q_stride_head, num_heads, HEADS: gl.constexpr, Q_LAYOUT: gl.constexpr, Q_ROPE_LAYOUT: gl.constexpr):
    """Queries of a token, latent and RoPE part."""
    head = gl.arange(0, HEADS, gl.SliceLayout(1, Q_LAYOUT))
    dim = gl.arange(0, 512, gl.SliceLayout(0, Q_LAYOUT))
    rope_head = gl.arange(0, HEADS, gl.SliceLayout(1, Q_ROPE_LAYOUT))
    rope_dim = gl.arange(0, 64, gl.SliceLayout(0, Q_ROPE_LAYOUT))
    q_latent = gl.load(q + head[:, None] * q_stride_head + dim[None, :], mask=(head < num_heads)[:, None], other=0.0)
    q_rope = gl.load(
        q + 512 + rope_head[:, None] * q_stride_head + rope_dim[None, :],
        mask=(rope_head < num_heads)[:, None],
        other=0.0,
    )
    return q_latent, q_rope


@gluon.jit
def query_fragments(q_latent, q_rope, scale_log2, HEADS: gl.constexpr, MMA: gl.constexpr, ROW: gl.constexpr):
    """Queries as fragments, and each head's factor from their product with keys to log2 of the weight.

    float16 for the latent part, each row times a power of two that puts its largest element just under 2**15, so that
    bfloat16's range is kept; the RoPE part is scaled alike, in bfloat16.
    """
    LHS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    Q_LAYOUT: gl.constexpr = q_latent.type.layout
    Q_ROPE_LAYOUT: gl.constexpr = q_rope.type.layout
    largest = gl.max(gl.abs(q_latent.to(gl.float32)), 1)
    largest_rope = gl.max(gl.abs(q_rope.to(gl.float32)), 1)
    largest = gl.maximum(largest, gl.convert_layout(largest_rope, gl.SliceLayout(1, Q_LAYOUT)))
    exponent = gl.minimum(gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) - 127, -100), 127)
    factor = ((127 + 14 - exponent) << 23).to(gl.float32, bitcast=True)
    row_scale = ((127 - 14 + exponent) << 23).to(gl.float32, bitcast=True) * scale_log2
    row_scale = gl.convert_layout(row_scale, ROW)
    q_half = (q_latent.to(gl.float32) * factor[:, None]).to(gl.float16)
    q_half = q_half.reshape([HEADS, 4, 2, 4, 4, 2, 2]).permute((1, 0, 2, 4, 5, 3, 6)).reshape([4, HEADS, 128])
    q_half = gl.convert_layout(q_half, LHS)
    rope_factor = gl.convert_layout(factor, gl.SliceLayout(1, Q_ROPE_LAYOUT))
    q_rope = (q_rope.to(gl.float32) * rope_factor[:, None]).to(gl.bfloat16)
    q_rope = q_rope.reshape([HEADS, 4, 4, 2, 2]).permute((1, 0, 3, 2, 4)).reshape([4, HEADS, 16])
    q_rope = gl.convert_layout(q_rope, LHS)
    return q_half, q_rope, row_scale


@gluon.jit
def summary(maximum, weight_sum, attn_sink, lse, lse_stride_head, num_heads, USE_SINK: gl.constexpr):
    """Store the log-sum of each head; returns the factor of each head and group's accumulator."""
    LAYOUT: gl.constexpr = maximum.type.layout
    empty = weight_sum == 0.0
    log2_sum = maximum + gl.log2(gl.where(empty, 1.0, weight_sum))
    normalise = 1.0 / gl.where(empty, 1.0, weight_sum)
    head = gl.arange(0, maximum.shape[1], gl.SliceLayout(0, LAYOUT))
    group = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT))
    if USE_SINK:
        sink = gl.load(attn_sink + head, mask=head < num_heads, other=0.0)
        normalise = normalise / (1.0 + gl.exp2(sink[None, :] * LOG2_E - log2_sum))
    normalise = gl.where(empty, 0.0, normalise)
    log_sum = gl.where(empty, float("-inf"), log2_sum * LN_2)
    gl.store(
        lse + group[:, None] * 0 + (head * lse_stride_head)[None, :],
        log_sum,
        mask=(group == 0)[:, None] & (head < num_heads)[None, :],
    )
    return normalise


@gluon.jit
def store_output(accumulator, out, out_stride_head, num_heads, HEADS: gl.constexpr):
    """Store the accumulator [4 groups, heads, 128] with its latent dims put in order."""
    WARPS: gl.constexpr = gl.num_warps()
    OUT: gl.constexpr = output_layout(HEADS, WARPS)
    result = accumulator.reshape([4, HEADS, 64 // WARPS, WARPS // 4, 8]).permute((1, 0, 3, 4, 2)).reshape([HEADS, 512])
    result = gl.convert_layout(result, OUT, assert_trivial=True).to(out.dtype.element_ty)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, OUT))
    dim = gl.arange(0, 512, gl.SliceLayout(0, OUT))
    gl.store(out + (head * out_stride_head)[:, None] + dim[None, :], result, mask=(head < num_heads)[:, None])
