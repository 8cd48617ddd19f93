"""Device code of few_heads.py: its head says what a program computes, in what tiles, and why."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents

from .few_heads_layouts import (
    keys_per_thread,
    output_layout,
    partial_scores_shared,
    probability_shared,
    ring_layout,
    ring_layout_16,
    rope_layout,
    score_words_layout,
    softmax_layout,
    sum_layout,
    value_words_layout,
)
from .gluon_names import load_async, reinterpret

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


@aggregate
class Exchange:
    """What the warps hand to one another for one block: partial scores, weights, and the rescaling of the sums."""

    scores: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    rescale: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, scores, weights, rescale):
        self.scores = scores
        self.weights = weights
        self.rescale = rescale


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
def _pages(index, table, request_valid, table_width, BLOCK_SIZE: gl.constexpr, LOCAL: gl.constexpr):
    """Index -> (cache block, offset in it); block -1 where nothing is attended. Nothing outside the table is read."""
    page = index // BLOCK_SIZE
    if LOCAL:
        inside = (index >= 0) & (page < table_width) & request_valid
        block = gl.load(table + page, mask=inside, other=-1)
    else:
        block = gl.where(index >= 0, page, -1)
    return block, index % BLOCK_SIZE


@gluon.jit
def _row_chunk(block, offset, num_blocks, stride_chunks):
    """First 16-byte chunk of a key's row in the cache, -1 for a key that is not attended."""
    chunk = block.to(gl.int64) * stride_chunks + offset * ROW_CHUNKS
    return gl.where((block >= 0) & (block < num_blocks), chunk, -1)


@gluon.jit
def _copy_chunks(chunks, BLOCK: gl.constexpr):
    """Row addresses as the three copies of a block want them."""
    WARPS: gl.constexpr = gl.num_warps()
    latent = chunks.load(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])))
    rope = chunks.load(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])))
    scale = chunks.load(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])))
    return latent, rope, scale


@gluon.jit
def _start_copies(ring, stage, latent_chunk, rope_chunk, scale_chunk, words, BLOCK: gl.constexpr):
    """Start the copies of one block of rows, 16 bytes a lane; rows not attended are not read and become zeros."""
    WARPS: gl.constexpr = gl.num_warps()
    LATENT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    SCALE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    pointer = (words + gl.arange(0, 128, gl.SliceLayout(0, LATENT)))[None, :] + (latent_chunk * 4)[:, None]
    load_async(ring.latent.index(stage), pointer, mask=(latent_chunk >= 0)[:, None])
    pointer = (words + 132 + gl.arange(0, 32, gl.SliceLayout(0, ROPE)))[None, :] + (rope_chunk * 4)[:, None]
    load_async(ring.rope.index(stage), pointer, mask=(rope_chunk >= 0)[:, None])
    pointer = (words + 128 + gl.arange(0, 4, gl.SliceLayout(0, SCALE)))[None, :] + (scale_chunk * 4)[:, None]
    load_async(ring.scale.index(stage), pointer, mask=(scale_chunk >= 0)[:, None])


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
def _weighted_values(words, probabilities, accumulator, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """accumulator [4 groups, heads, 128] += probabilities [4, heads, block] x values [4, block, 128]."""
    even, odd = words.reshape([BLOCK // 2, 2, 128]).permute((0, 2, 1)).split()
    e0, o0, e1, o1, e2, o2, e3, o3 = _values_to_half(even, odd)
    low = gl.join(gl.join(e0, o0), gl.join(e2, o2))
    high = gl.join(gl.join(e1, o1), gl.join(e3, o3))
    # [pair of keys, group, warp, lane, word, parity, byte high, byte low]: a lane's neighbouring dims become tiles.
    values = gl.join(low, high).reshape([BLOCK // 2, 4, 2, 8, 2, 2, 2, 2]).permute((1, 0, 5, 4, 6, 7, 2, 3))
    values = gl.convert_layout(values.reshape([4, BLOCK, 128]), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
    return mma_v2(probabilities, values, accumulator)


@gluon.jit
def _producer(
    words,
    indices,
    key,
    limit,
    intervals,
    table,
    request_valid,
    table_width,
    num_blocks,
    stride_chunks,
    ring,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    LOCAL: gl.constexpr,
):
    """Fill the ring, block after block. Blocks -2, -1 and those past the last hold only keys that are not attended."""
    KEY: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    key = key + gl.arange(0, BLOCK, KEY)
    # Three steps ahead of the copies: index, block-table entry, row address.
    first = gl.load(indices + key, mask=key < limit, other=-1)
    index = gl.load(indices + key + BLOCK, mask=key + BLOCK < limit, other=-1)
    page, offset = _pages(first, table, request_valid, table_width, BLOCK_SIZE, LOCAL)
    for c in range(intervals + 2):
        chunk = _row_chunk(page, offset, num_blocks, stride_chunks)
        chunk = gl.where(c >= 2, chunk, -1)
        if c >= 2:
            key += BLOCK
            page, offset = _pages(index, table, request_valid, table_width, BLOCK_SIZE, LOCAL)
            index = gl.load(indices + key + BLOCK, mask=key + BLOCK < limit, other=-1)
        stage = c & (STAGES - 1)
        mbarrier.wait(ring.free.index(stage), ((c // STAGES) & 1) ^ 1)
        ring.chunk.index(stage).store(chunk)
        latent_chunk, rope_chunk, scale_chunk = _copy_chunks(ring.chunk.index(stage), BLOCK)
        _start_copies(ring, stage, latent_chunk, rope_chunk, scale_chunk, words, BLOCK)
        async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
        mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def _new_exchange(HEADS: gl.constexpr, BLOCK: gl.constexpr):
    """An exchange whose weights are zero, for a block before the first."""
    SM: gl.constexpr = softmax_layout(HEADS, BLOCK, gl.num_warps())
    ROW4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scores = gl.allocate_shared_memory(gl.float32, [4, HEADS, BLOCK], partial_scores_shared(HEADS, BLOCK))
    zero = gl.zeros([4, HEADS, BLOCK], gl.float16, SM)
    weights = gl.allocate_shared_memory(gl.float16, [4, HEADS, BLOCK], probability_shared(HEADS, BLOCK), zero)
    ones = gl.full([4, HEADS], 1.0, gl.float32, gl.SliceLayout(2, SM))
    rescale = gl.allocate_shared_memory(gl.float32, [4, HEADS], ROW4, ones)
    return Exchange(scores, weights, rescale)


@gluon.jit
def _interval(
    i,
    ring,
    own,
    other,
    q_latent,
    q_rope,
    row_scale,
    accumulator,
    maximum,
    total_weight,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    MMA: gl.constexpr,
):
    """Between two barriers: scores of block i + 1, softmax of block i, values of block i - 1."""
    WARPS: gl.constexpr = gl.num_warps()
    SM: gl.constexpr = softmax_layout(HEADS, BLOCK, WARPS)
    SUM: gl.constexpr = sum_layout(HEADS, BLOCK, WARPS)
    KEYS: gl.constexpr = keys_per_thread(HEADS, BLOCK, WARPS)
    ROW4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LAST: gl.constexpr = STAGES - 1
    # Block i is the ring's entry i + 2.
    next_stage = (i + 3) & LAST
    stage = (i + 2) & LAST
    # The barrier that comes with this: all warps are past the interval before, which was the last to read block i - 2.
    mbarrier.arrive(ring.free.index(i & LAST), count=1, pred=i >= 0)
    mbarrier.wait(ring.full.index(next_stage), ((i + 3) // STAGES) & 1)
    partial = own.scores.load(SM)
    attended = ring.chunk.index(stage).load(gl.SliceLayout(0, gl.SliceLayout(0, SM))) >= 0
    key_scale = (
        reinterpret(ring.scale.index(stage), gl.float32, [BLOCK, 4], ROW4).permute((1, 0)).load(gl.SliceLayout(1, SM))
    )
    old_rescale = other.rescale.load(gl.SliceLayout(2, MMA))
    probabilities = other.weights.load(gl.DotOperandLayout(0, MMA, 2))
    value_words = ring.latent.index((i + 1) & LAST).load(value_words_layout(BLOCK, WARPS))
    score_words = ring.latent.index(next_stage).load(score_words_layout(BLOCK, WARPS))
    rope_keys = reinterpret(ring.rope.index(next_stage), gl.bfloat16, [BLOCK, 64], ring_layout_16(BLOCK))
    rope_keys = rope_keys.load(rope_layout(BLOCK, WARPS))
    next_scale = reinterpret(ring.scale.index(next_stage), gl.float32, [BLOCK, 4], ROW4).permute((1, 0))
    next_scale = next_scale.load(gl.SliceLayout(1, MMA))

    scores = _scores(score_words, rope_keys, next_scale, q_latent, q_rope, HEADS, BLOCK, MMA)

    # Softmax of the whole block, each head in one warp. Every 128-dim group has a reference of its own (the largest
    # score + log2 scale), so that weight * scale fits float16 whatever the scales are.
    score = gl.sum(partial, 0) * row_scale[:, None]
    score = gl.where(attended[None, :], score, float("-inf"))
    log_scale = ((key_scale.to(gl.int32, bitcast=True) >> 23) | 0x4B000000).to(gl.float32, bitcast=True) - 8388735.0
    log_scale = gl.maximum(log_scale, -100.0)
    score, log_scale = gl.broadcast(gl.expand_dims(score, 0), gl.expand_dims(log_scale, 1))
    new_maximum = gl.maximum(maximum, gl.max(score + log_scale, 2))
    alpha = gl.exp2(maximum - new_maximum)
    weight = gl.exp2(score - new_maximum[:, :, None])
    partial_sum = gl.convert_layout(
        gl.sum(weight.reshape([4, HEADS, BLOCK // KEYS, KEYS]), 3), SUM, assert_trivial=True
    )
    total_weight = (
        total_weight * gl.convert_layout(alpha, gl.SliceLayout(2, SUM), assert_trivial=True)[:, :, None] + partial_sum
    )
    weight = (weight * key_scale[:, None, :]).to(gl.float16)

    accumulator = _weighted_values(value_words, probabilities, accumulator * old_rescale[:, :, None], BLOCK, MMA)

    other.scores.store(scores)
    own.weights.store(weight)
    own.rescale.store(alpha)
    return accumulator, new_maximum, total_weight


@gluon.jit
def _consumer(
    q,
    attn_sink,
    out,
    lse,
    scale_log2,
    q_stride_head,
    out_stride_head,
    lse_stride_head,
    num_heads,
    intervals,
    ring,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    USE_SINK: gl.constexpr,
):
    """Attention of one share of a token's keys, from query rows to stored result; q, out, lse point at the token."""
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, WARPS // 4], [1, 16, 8])
    LHS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SM: gl.constexpr = softmax_layout(HEADS, BLOCK, WARPS)
    SM_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SM))
    SM_GROUP_ROW: gl.constexpr = gl.SliceLayout(2, SM)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    Q_ROPE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])

    # Queries while the first rows travel: float16 for the latent part, each row times a power of two that puts its
    # largest element just under 2**15, so that bfloat16's range is kept; the RoPE part is scaled alike, in bfloat16.
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
    largest = gl.max(gl.abs(q_latent.to(gl.float32)), 1)
    largest_rope = gl.max(gl.abs(q_rope.to(gl.float32)), 1)
    largest = gl.maximum(largest, gl.convert_layout(largest_rope, gl.SliceLayout(1, Q_LAYOUT)))
    exponent = gl.minimum(gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) - 127, -100), 127)
    factor = ((127 + 14 - exponent) << 23).to(gl.float32, bitcast=True)
    row_scale = ((127 - 14 + exponent) << 23).to(gl.float32, bitcast=True) * scale_log2
    row_scale = gl.convert_layout(row_scale, SM_ROW)
    q_half = (q_latent.to(gl.float32) * factor[:, None]).to(gl.float16)
    q_half = q_half.reshape([HEADS, 4, 2, 4, 4, 2, 2]).permute((1, 0, 2, 4, 5, 3, 6)).reshape([4, HEADS, 128])
    q_half = gl.convert_layout(q_half, LHS)
    rope_factor = gl.convert_layout(factor, gl.SliceLayout(1, Q_ROPE_LAYOUT))
    q_rope = (q_rope.to(gl.float32) * rope_factor[:, None]).to(gl.bfloat16)
    q_rope = q_rope.reshape([HEADS, 4, 4, 2, 2]).permute((1, 0, 3, 2, 4)).reshape([4, HEADS, 16])
    q_rope = gl.convert_layout(q_rope, LHS)

    # Two, apart, so that the compiler sees that an interval's reads and writes do not meet.
    even = _new_exchange(HEADS, BLOCK)
    odd = _new_exchange(HEADS, BLOCK)

    accumulator = gl.zeros([4, HEADS, 128], gl.float32, MMA)
    maximum = gl.full([4, HEADS], -1e30, gl.float32, SM_GROUP_ROW)
    KEYS: gl.constexpr = keys_per_thread(HEADS, BLOCK, WARPS)
    total_weight = gl.zeros([4, HEADS, BLOCK // KEYS], gl.float32, sum_layout(HEADS, BLOCK, WARPS))
    mbarrier.wait(ring.full.index(0), 0)
    mbarrier.wait(ring.full.index(1), 0)
    for i in range(-1, intervals - 1, 2):
        accumulator, maximum, total_weight = _interval(
            i, ring, odd, even, q_half, q_rope, row_scale, accumulator, maximum, total_weight, HEADS, BLOCK, STAGES, MMA
        )
        accumulator, maximum, total_weight = _interval(
            i + 1,
            ring,
            even,
            odd,
            q_half,
            q_rope,
            row_scale,
            accumulator,
            maximum,
            total_weight,
            HEADS,
            BLOCK,
            STAGES,
            MMA,
        )

    weight_sum = gl.convert_layout(gl.sum(total_weight, 2), SM_GROUP_ROW, assert_trivial=True)
    empty = weight_sum == 0.0
    log2_sum = maximum + gl.log2(gl.where(empty, 1.0, weight_sum))
    normalise = 1.0 / gl.where(empty, 1.0, weight_sum)
    group_head = gl.arange(0, HEADS, gl.SliceLayout(0, SM_GROUP_ROW))
    group = gl.arange(0, 4, gl.SliceLayout(1, SM_GROUP_ROW))
    if USE_SINK:
        sink = gl.load(attn_sink + group_head, mask=group_head < num_heads, other=0.0)
        normalise = normalise / (1.0 + gl.exp2(sink[None, :] * LOG2_E - log2_sum))
    normalise = gl.where(empty, 0.0, normalise)
    log_sum = gl.where(empty, float("-inf"), log2_sum * LN_2)
    gl.store(
        lse + group[:, None] * 0 + (group_head * lse_stride_head)[None, :],
        log_sum,
        mask=(group == 0)[:, None] & (group_head < num_heads)[None, :],
    )
    even.rescale.store(normalise)
    accumulator = accumulator * even.rescale.load(gl.SliceLayout(2, MMA))[:, :, None]
    result = accumulator.reshape([4, HEADS, 8, 2, 8]).permute((1, 0, 3, 4, 2)).reshape([HEADS, 512])
    OUT: gl.constexpr = output_layout(HEADS, WARPS)
    result = gl.convert_layout(result, OUT, assert_trivial=True).to(out.dtype.element_ty)
    out_head = gl.arange(0, HEADS, gl.SliceLayout(1, OUT))
    out_dim = gl.arange(0, 512, gl.SliceLayout(0, OUT))
    gl.store(
        out + (out_head * out_stride_head)[:, None] + out_dim[None, :], result, mask=(out_head < num_heads)[:, None]
    )


@gluon.jit(
    do_not_specialize=[
        "index_stride",
        "table_stride",
        "topk",
        "num_blocks",
        "table_width",
        "num_requests",
        "num_splits",
        "num_heads",
        "lse_stride_split",
        "lse_stride_token",
    ]
)
def few_heads_kernel(
    q,
    cache,
    indices,
    topk_length,
    attn_sink,
    block_table,
    req_id,
    out,
    lse,
    scale_log2,
    q_stride_token: gl.int32,
    q_stride_head: gl.int32,
    stride_chunks: gl.int64,
    out_stride_split: gl.int64,
    out_stride_token: gl.int64,
    out_stride_head: gl.int32,
    lse_stride_split: gl.int64,
    lse_stride_token: gl.int64,
    lse_stride_head: gl.int32,
    index_stride: gl.int64,
    table_stride: gl.int64,
    num_heads: gl.int32,
    topk: gl.int32,
    num_blocks: gl.int32,
    table_width: gl.int32,
    num_requests: gl.int32,
    num_splits: gl.int32,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    LOCAL: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Attention of one token over one share of its keys; see the head of this file."""
    if SPLIT:
        gdc_launch_dependents()
    split = gl.program_id(0)
    token = gl.program_id(1)
    latent_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, 128], ring_layout(BLOCK, 128))
    rope_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, 32], ring_layout(BLOCK, 32))
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    chunk_ring = gl.allocate_shared_memory(gl.int64, [STAGES, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        # A stage is full once all 128 producer threads' copies have landed and one of them has also arrived itself.
        mbarrier.init(full.index(s), count=129)
        mbarrier.init(free.index(s), count=1)
    ring = Ring(latent_ring, rope_ring, scale_ring, chunk_ring, full, free)

    length = topk
    if HAS_LENGTH:
        length = gl.minimum(gl.maximum(gl.load(topk_length + token), 0), topk)
    total = gl.cdiv(length, BLOCK)
    begin = (total * split) // num_splits
    end = (total * (split + 1)) // num_splits
    intervals = gl.cdiv(end - begin + 2, 2) * 2
    request_valid = token >= 0
    # A partition takes no None: where there is no table or sink, some pointer stands in for it.
    table = indices
    if LOCAL:
        request = gl.load(req_id + token)
        request_valid = (request >= 0) & (request < num_requests)
        table = block_table + request.to(gl.int64) * table_stride
    sinks = lse
    if HAS_SINK:
        sinks = attn_sink
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    token64 = token.to(gl.int64)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    q + token64 * q_stride_token,
                    sinks,
                    out + split * out_stride_split + token64 * out_stride_token,
                    lse + split * lse_stride_split + token64 * lse_stride_token,
                    scale_log2,
                    q_stride_head,
                    out_stride_head,
                    lse_stride_head,
                    num_heads,
                    intervals,
                    ring,
                    HEADS,
                    BLOCK,
                    STAGES,
                    HAS_SINK and not SPLIT,
                ),
            ),
            (
                _producer,
                (
                    words,
                    indices + token64 * index_stride,
                    begin * BLOCK,
                    gl.minimum(end * BLOCK, length),
                    intervals,
                    table,
                    request_valid,
                    table_width,
                    num_blocks,
                    stride_chunks,
                    ring,
                    BLOCK,
                    STAGES,
                    BLOCK_SIZE,
                    LOCAL,
                ),
            ),
        ],
        [4],
        [PRODUCER_REGISTERS],
    )
