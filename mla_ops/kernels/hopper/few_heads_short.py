"""Device code of few_heads.py for short shares: all of a program's keys are on the way at once."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents

from .few_heads_layouts import (
    partial_scores_shared,
    probability_shared,
    query_layout,
    ring_layout,
    softmax_layout,
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
def few_heads_short_kernel(
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
    PIECE: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    LOCAL: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Attention of one token over PIECES * PIECE of its keys; see the head of few_heads.py."""
    if SPLIT:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, WARPS // 4], [1, 16, 8])
    SM: gl.constexpr = softmax_layout(HEADS, PIECE, WARPS)
    ROW4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    split = gl.program_id(0)
    token = gl.program_id(1)
    token64 = token.to(gl.int64)
    # All indices and the queries are asked for before anything is waited for.
    request_valid = token >= 0
    table = indices
    if LOCAL:
        request = gl.load(req_id + token)
        request_valid = (request >= 0) & (request < num_requests)
        table = block_table + request.to(gl.int64) * table_stride
    limit = topk
    if HAS_LENGTH:
        limit = gl.minimum(gl.load(topk_length + token), topk)
    key = split * (PIECE * PIECES) + gl.arange(0, PIECE, gl.BlockedLayout([1], [32], [WARPS], [0]))
    row = indices + token64 * index_stride
    index = ()
    for piece in gl.static_range(PIECES):
        index = index + (gl.load(row + key + piece * PIECE, mask=key + piece * PIECE < limit, other=-1),)
    Q_LAYOUT: gl.constexpr = query_layout(HEADS, WARPS, 512)
    Q_ROPE_LAYOUT: gl.constexpr = query_layout(HEADS, WARPS, 64)
    q_latent, q_rope = read_queries(
        q + token64 * q_stride_token, q_stride_head, num_heads, HEADS, Q_LAYOUT, Q_ROPE_LAYOUT
    )

    chunks = gl.allocate_shared_memory(gl.int64, [PIECES, PIECE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    place = ()
    for piece in gl.static_range(PIECES):
        place = place + (pages(index[piece], table, request_valid, table_width, BLOCK_SIZE, LOCAL),)
    for piece in gl.static_range(PIECES):
        page, offset = place[piece]
        chunks.index(piece).store(row_chunk(page, offset, num_blocks, stride_chunks))
    ring = Ring(
        gl.allocate_shared_memory(gl.int32, [PIECES, PIECE, 128], ring_layout(PIECE, 128)),
        gl.allocate_shared_memory(gl.int32, [PIECES, PIECE, 32], ring_layout(PIECE, 32)),
        gl.allocate_shared_memory(gl.int32, [PIECES, PIECE, 4], ROW4),
        chunks,
        chunks,
        chunks,
    )
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    for piece in gl.static_range(PIECES):
        latent_chunk, rope_chunk, scale_chunk = copy_chunks(chunks.index(piece), PIECE)
        start_copies(ring, piece, latent_chunk, rope_chunk, scale_chunk, words, PIECE)
        async_copy.commit_group()

    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SM))
    q_half, q_rope, row_scale = query_fragments(q_latent, q_rope, scale_log2, HEADS, MMA, ROW)
    scores = gl.allocate_shared_memory(gl.float32, [4, HEADS, PIECE], partial_scores_shared(HEADS, PIECE))
    weights = gl.allocate_shared_memory(gl.float16, [PIECES, 4, HEADS, PIECE], probability_shared(HEADS, PIECE))
    factor = gl.allocate_shared_memory(gl.float32, [4, HEADS], ROW4)

    # Every 128-dim group has a reference of its own (the largest score + log2 scale), as in the pipeline.
    score = ()
    scale = ()
    largest = gl.full([4, HEADS, PIECE], -1e30, gl.float32, SM)
    for piece in gl.static_range(PIECES):
        async_copy.wait_group(PIECES - 1 - piece)
        scores.store(stage_scores(piece, ring, q_half, q_rope, HEADS, PIECE, MMA))
        attended = chunks.index(piece).load(gl.SliceLayout(0, gl.SliceLayout(0, SM))) >= 0
        key_scale = ring.scale.index(piece)._reinterpret(gl.float32, [PIECE, 4], ROW4).permute((1, 0))
        key_scale = key_scale.load(gl.SliceLayout(1, SM))
        piece_score = gl.sum(scores.load(SM), 0) * row_scale[:, None]
        piece_score = gl.where(attended[None, :], piece_score, float("-inf"))
        log_scale = ((key_scale.to(gl.int32, bitcast=True) >> 23) | 0x4B000000).to(gl.float32, bitcast=True) - 8388735.0
        log_scale = gl.maximum(log_scale, -100.0)
        wide_score, log_scale = gl.broadcast(gl.expand_dims(piece_score, 0), gl.expand_dims(log_scale, 1))
        largest = gl.maximum(largest, wide_score + log_scale)
        score = score + (piece_score,)
        scale = scale + (key_scale,)
    maximum = gl.max(largest, 2)
    total = gl.zeros([4, HEADS, PIECE], gl.float32, SM)
    for piece in gl.static_range(PIECES):
        weight = gl.exp2(score[piece][None, :, :] - maximum[:, :, None])
        total += weight
        weights.index(piece).store((weight * scale[piece][:, None, :]).to(gl.float16))
    normalise = summary(
        maximum,
        gl.sum(total, 2),
        attn_sink,
        lse + split * lse_stride_split + token64 * lse_stride_token,
        lse_stride_head,
        num_heads,
        HAS_SINK and not SPLIT,
    )
    factor.store(normalise)
    accumulator = gl.zeros([4, HEADS, 128], gl.float32, MMA)
    for piece in gl.static_range(PIECES):
        value_words = ring.latent.index(piece).load(value_words_layout(PIECE, WARPS))
        probabilities = weights.index(piece).load(gl.DotOperandLayout(0, MMA, 2))
        accumulator = weighted_values(value_words, probabilities, accumulator, PIECE, MMA)
    accumulator = accumulator * factor.load(gl.SliceLayout(2, MMA))[:, :, None]
    store_output(
        accumulator,
        out + split * out_stride_split + token64 * out_stride_token,
        out_stride_head,
        num_heads,
        HEADS,
    )
