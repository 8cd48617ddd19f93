"""Device code of few_heads.py for long shares, a pipeline: that file's head says what a program computes, and why."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents

from .few_heads_layouts import (
    keys_per_thread,
    partial_scores_shared,
    probability_shared,
    ring_layout,
    softmax_layout,
    sum_layout,
    value_words_layout,
)
from .few_heads_parts import (
    Ring,
    copy_chunks,
    pages,
    query_fragments,
    read_queries,
    row_chunk,
    stage_scores,
    start_copies,
    store_output,
    summary,
    weighted_values,
)


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
    """Fill the ring, block after block. Keys of blocks -2, -1 and of those past the last are not attended."""
    KEY: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    key = key + gl.arange(0, BLOCK, KEY)
    # Three steps ahead of the copies: index, block-table entry, row address.
    first = gl.load(indices + key, mask=key < limit, other=-1)
    index = gl.load(indices + key + BLOCK, mask=key + BLOCK < limit, other=-1)
    page, offset = pages(first, table, request_valid, table_width, BLOCK_SIZE, LOCAL)
    for c in range(intervals + 2):
        chunk = row_chunk(page, offset, num_blocks, stride_chunks)
        chunk = gl.where(c >= 2, chunk, -1)
        if c >= 2:
            key += BLOCK
            page, offset = pages(index, table, request_valid, table_width, BLOCK_SIZE, LOCAL)
            index = gl.load(indices + key + BLOCK, mask=key + BLOCK < limit, other=-1)
        stage = c & (STAGES - 1)
        mbarrier.wait(ring.free.index(stage), ((c // STAGES) & 1) ^ 1)
        ring.chunk.index(stage).store(chunk)
        latent_chunk, rope_chunk, scale_chunk = copy_chunks(ring.chunk.index(stage), BLOCK)
        start_copies(ring, stage, latent_chunk, rope_chunk, scale_chunk, words, BLOCK)
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
        ring.scale.index(stage)._reinterpret(gl.float32, [BLOCK, 4], ROW4).permute((1, 0)).load(gl.SliceLayout(1, SM))
    )
    old_rescale = other.rescale.load(gl.SliceLayout(2, MMA))
    probabilities = other.weights.load(gl.DotOperandLayout(0, MMA, 2))
    value_words = ring.latent.index((i + 1) & LAST).load(value_words_layout(BLOCK, WARPS))
    scores = stage_scores(next_stage, ring, q_latent, q_rope, HEADS, BLOCK, MMA)

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

    accumulator = weighted_values(value_words, probabilities, accumulator * old_rescale[:, :, None], BLOCK, MMA)

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
    """Attention of one share of a token's keys, from the queries to the stored result; pointers are the token's."""
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, WARPS // 4], [1, 16, 8])
    SM: gl.constexpr = softmax_layout(HEADS, BLOCK, WARPS)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SM))
    SM_GROUP_ROW: gl.constexpr = gl.SliceLayout(2, SM)
    # Queries while the first rows travel.
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    Q_ROPE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    q_latent, q_rope = read_queries(q, q_stride_head, num_heads, HEADS, Q_LAYOUT, Q_ROPE_LAYOUT)
    q_half, q_rope, row_scale = query_fragments(q_latent, q_rope, scale_log2, HEADS, MMA, ROW)

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
    normalise = summary(maximum, weight_sum, attn_sink, lse, lse_stride_head, num_heads, USE_SINK)
    even.rescale.store(normalise)
    accumulator = accumulator * even.rescale.load(gl.SliceLayout(2, MMA))[:, :, None]
    store_output(accumulator, out, out_stride_head, num_heads, HEADS)


@gluon.jit(
    do_not_specialize=[
        "index_stride",
        "table_stride",
        "topk",
        "num_blocks",
        "table_width",
        "num_requests",
        "num_splits",
        "lse_stride_split",
        "lse_stride_token",
        "num_heads",
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
    """Attention of one token over one share of its keys; see the head of few_heads.py."""
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
