"""Device code of the many-heads kernel: gather, scores, softmax and values of 64 heads; and the merge of its splits."""

import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_names import reinterpret, thread_barrier
from .many_heads_layouts import (
    HEAD,
    KEY,
    NO_SCORE_YET,
    OUTPUT,
    PLAIN,
    REQUESTS,
    ROPE_TILE,
    ROW,
    ROWS_OUT,
    SCALAR,
    SCORES,
    TILE,
    WORDS,
    any_over,
    both_halves,
    convert_piece,
    find_block,
    larger_halves,
    largest_bits,
    largest_finite_bits,
    load_first_pair,
    pairs_to_float16,
    prefetch_rows,
    rope_operand,
    row_pointers,
    scale_bfloat16_pairs,
    store_queries,
    touch_rows,
)


@gluon.jit
def scores_warpgroup(
    kv_cache, zero_row, indices, first, last, table_row, table_width, num_cache_blocks, block_stride_16, lse, attn_sink,
    q_smem, q_rope_smem, left_smem, right_smem, p_smem, reference_smem, alpha_smem, flag_smem, row_smem, q_scale_smem,
    q_full, full, free, row_full, softmax_scale_log2, num_heads, head_block,
    BLOCK_SIZE: gl.constexpr, HAS_TABLE: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """Gathers and converts 64 keys a turn, multiplies them with Q, and leaves values and probabilities.

    A turn takes eight pieces in four pairs (dims 0..63 and 256..319, and so on), each pair's words loaded two pairs
    ahead. The order of stores, barriers and loads is the measured best, and it matters: gathers queue in the load pipe,
    and a store or a shared-memory load behind a burst of them waits for all of it.
    """
    row = gl.arange(0, 64, ROW)
    lane = gl.arange(0, 16, gl.SliceLayout(0, WORDS))
    num_turns = gl.cdiv(last - first, 64)

    position = first + row
    index = gl.load(indices + position, mask=position < last, other=-1)
    block = find_block(index, table_row, table_width, BLOCK_SIZE, HAS_TABLE)
    valid, base = row_pointers(kv_cache, zero_row, index, block, num_cache_blocks, block_stride_16, BLOCK_SIZE)
    scales, k0, k4 = load_first_pair(base, lane)
    p = base[:, None] + lane[None, :]
    k1 = gl.load(p + 16, cache_modifier=".cg")
    k5 = gl.load(p + 80, cache_modifier=".cg")
    touch_rows(base)

    reference_smem.store(gl.full([64], NO_SCORE_YET, gl.float32, HEAD))
    # One partial sum a thread and head: adding up over lanes and warps waits until the end.
    sums = gl.sum(gl.zeros([64, 64], gl.float32, SCORES).reshape([4, 2, 8, 64]), 1)
    mbarrier.wait(q_full, 0)
    factor = softmax_scale_log2 * gl.max(q_scale_smem.load(SCALAR), 0)
    for i in range(num_turns):
        stage = i % 2
        # Keeps the descriptors of Q out of registers: a loop-invariant address would be hoisted, and spill.
        zero = i >> 26
        s01, s23 = scales.to(gl.float32, bitcast=True).reshape([64, 2, 2]).permute((0, 2, 1)).split()
        s0, s1 = s01.split()
        s2, s3 = s23.split()
        s0 = gl.convert_layout(s0, ROW)
        s1 = gl.convert_layout(s1, ROW)
        s2 = gl.convert_layout(s2, ROW)
        s3 = gl.convert_layout(s3, ROW)
        # What of the largest scale float16 cannot hold moves into the exponent of the row: 0 for 2^-13 <= scale < 2^7.
        largest = gl.maximum(gl.maximum(gl.abs(s0), gl.abs(s1)), gl.maximum(gl.abs(s2), gl.abs(s3)))
        exponent = largest.to(gl.int32, bitcast=True) >> 23
        shift = gl.maximum(exponent - 133, 0) + gl.maximum(gl.minimum(exponent - 114, 0), -60)
        down = ((127 - shift) << 23).to(gl.float32, bitcast=True)
        key_add = gl.convert_layout(gl.where(valid, shift.to(gl.float32), float("-inf")), KEY)
        p = base[:, None] + lane[None, :]
        k2 = gl.load(p + 32, cache_modifier=".cg")
        k6 = gl.load(p + 96, cache_modifier=".cg")
        position += 64
        index = gl.load(indices + position, mask=position < last, other=-1)
        mbarrier.wait(free.index(stage), ((i // 2) & 1) ^ 1)
        left = left_smem.index(stage)
        right = right_smem.index(stage)
        s = gl.zeros([64, 64], gl.float32, SCORES)
        t0 = both_halves(s0 * down)
        t1 = both_halves(s1 * down)
        t2 = both_halves(s2 * down)
        t3 = both_halves(s3 * down)

        # Loads stand behind a barrier that stands behind the stores: in the one queue of the load and store pipe a
        # store behind a burst of gathers keeps its registers, and with them the next conversion, waiting.
        c = convert_piece(k0, t0)
        s = warpgroup_mma(c, q_smem.index(zero + 0).permute((1, 0)), s, use_acc=False, is_async=True)
        d = convert_piece(k4, t2)
        s = warpgroup_mma(d, q_smem.index(zero + 4).permute((1, 0)), s, is_async=True)
        left.slice(0, 64, dim=1).store(c)
        right.slice(0, 64, dim=1).store(d)
        thread_barrier()
        k3 = gl.load(p + 48, cache_modifier=".cg")
        k7 = gl.load(p + 112, cache_modifier=".cg")
        s, c = warpgroup_mma_wait(1, deps=(s, c))

        c = convert_piece(k1, t0)
        s = warpgroup_mma(c, q_smem.index(zero + 1).permute((1, 0)), s, is_async=True)
        s, d = warpgroup_mma_wait(1, deps=(s, d))
        d = convert_piece(k5, t2)
        s = warpgroup_mma(d, q_smem.index(zero + 5).permute((1, 0)), s, is_async=True)
        left.slice(64, 64, dim=1).store(c)
        right.slice(64, 64, dim=1).store(d)
        thread_barrier()
        r0 = gl.load(p + 132, cache_modifier=".cg")
        r1 = gl.load(p + 148, cache_modifier=".cg")
        block = find_block(index, table_row, table_width, BLOCK_SIZE, HAS_TABLE)
        s, c = warpgroup_mma_wait(1, deps=(s, c))

        c = convert_piece(k2, t1)
        s = warpgroup_mma(c, q_smem.index(zero + 2).permute((1, 0)), s, is_async=True)
        s, d = warpgroup_mma_wait(1, deps=(s, d))
        d = convert_piece(k6, t3)
        s = warpgroup_mma(d, q_smem.index(zero + 6).permute((1, 0)), s, is_async=True)
        left.slice(128, 64, dim=1).store(c)
        right.slice(128, 64, dim=1).store(d)
        valid, base = row_pointers(kv_cache, zero_row, index, block, num_cache_blocks, block_stride_16, BLOCK_SIZE)
        thread_barrier()
        scales, k0, k4 = load_first_pair(base, lane)
        s, c = warpgroup_mma_wait(1, deps=(s, c))

        c = convert_piece(k3, t1)
        s = warpgroup_mma(c, q_smem.index(zero + 3).permute((1, 0)), s, is_async=True)
        s, d = warpgroup_mma_wait(1, deps=(s, d))
        d = convert_piece(k7, t3)
        s = warpgroup_mma(d, q_smem.index(zero + 7).permute((1, 0)), s, is_async=True)
        left.slice(192, 64, dim=1).store(c)
        right.slice(192, 64, dim=1).store(d)
        thread_barrier()
        s, c = warpgroup_mma_wait(1, deps=(s, c))

        down2 = (127 - shift) * 0x800080  # the power of two as bfloat16, in both halves
        a = rope_operand(r0, down2)
        b = rope_operand(r1, down2)
        s = warpgroup_mma(a, q_rope_smem.index(zero + 0).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(b, q_rope_smem.index(zero + 1).permute((1, 0)), s, is_async=True)
        key_factor = gl.convert_layout(((127 + shift) << 23).to(gl.float32, bitcast=True) * factor, KEY)
        key_down = gl.convert_layout(down, KEY)
        reference = reference_smem.load(HEAD)
        s, d, a, b = warpgroup_mma_wait(0, deps=(s, d, a, b))

        y = s * key_factor[:, None] + (key_add[:, None] - reference[None, :])
        over = gl.max(gl.max(gl.max(y.reshape([4, 2, 8, 8, 4, 2]), 5), 3), 1).reshape([128])
        flag_smem.index(stage).store(any_over(over))
        moved = gl.max(flag_smem.index(stage).slice(0, 1).load(SCALAR), 0)
        if moved != 0:
            y = s * key_factor[:, None] + key_add[:, None]
            new = gl.maximum(reference, gl.max(y, 0))
            alpha = gl.exp2(reference - new)
            alpha_smem.index(stage).store(alpha)
            reference_smem.store(new)
            alpha = gl.convert_layout(alpha, gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout)))
            sums = sums * alpha[None, None, :]
            y = y - new[None, :]
        p = base[:, None] + lane[None, :]
        k1 = gl.load(p + 16, cache_modifier=".cg")
        k5 = gl.load(p + 80, cache_modifier=".cg")
        w = gl.exp2(y)
        sums += gl.sum((w * key_down[:, None]).reshape([4, 2, 8, 64]), 1)
        p_smem.index(stage).store(w.to(gl.float16))
        fence_async_shared()
        mbarrier.arrive(full.index(stage), count=1)

    total = gl.convert_layout(gl.sum(gl.sum(sums, 1), 0), SCALAR)
    head = head_block * 64 + gl.arange(0, 64, SCALAR)
    natural = (reference_smem.load(SCALAR) + gl.log2(total)) * 0.6931471805599453
    natural = gl.where(total > 0.0, natural, float("-inf"))
    # total is NaN only where a query or an attended key is: keep that visible.
    natural = gl.where(total == total, natural, total)
    weight = gl.where(total == 0.0, 0.0, 1.0 / total)
    if HAS_SINK:
        sink = gl.load(attn_sink + head, mask=head < num_heads, other=float("-inf"))
        weight = gl.where(total == 0.0, 0.0, weight / (1.0 + gl.exp(sink - natural)))
    row_smem.store(weight)
    mbarrier.arrive(row_full, count=1)
    gl.store(lse + head, natural, mask=head < num_heads)


@gluon.jit
def values_warpgroup(
    q, q_stride_head_2, out, out_stride_head, num_turns, kv_cache, indices, first, last, table_row, table_width,
    num_cache_blocks, block_stride_16, q_smem, q_rope_smem, v_smem, p_smem, alpha_smem, flag_smem, row_smem,
    q_max_smem, q_scale_smem, q_max_full, q_full, full, free, row_full, num_heads, head_block,
    BLOCK_SIZE: gl.constexpr, HAS_TABLE: gl.constexpr, PARTIAL: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Brings half of Q to shared memory, then adds up P V over its 256 of the 512 latent dimensions."""
    LQ: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    head = head_block * 64 + gl.arange(0, 64, gl.SliceLayout(1, LQ))
    pair = gl.arange(0, 32, gl.SliceLayout(0, LQ))
    live = (head < num_heads)[:, None] & (pair >= 0)[None, :]
    qp = q + HALF * 128 + head[:, None] * q_stride_head_2 + pair[None, :]
    head_r = head_block * 64 + gl.arange(0, 64, gl.SliceLayout(1, LR))
    pair_r = gl.arange(0, 16, gl.SliceLayout(0, LR))
    rp = q + 256 + HALF * 16 + head_r[:, None] * q_stride_head_2 + pair_r[None, :]
    x0 = gl.load(qp, mask=live, other=0)
    x1 = gl.load(qp + 32, mask=live, other=0)
    x2 = gl.load(qp + 64, mask=live, other=0)
    x3 = gl.load(qp + 96, mask=live, other=0)
    rope = gl.load(rp, mask=(head_r < num_heads)[:, None] & (pair_r >= 0)[None, :], other=0)
    top = largest_bits(larger_halves(larger_halves(x0, x1), larger_halves(x2, x3)))
    top = gl.maximum(top, largest_bits(rope))
    if top >= 0x7F80:
        # Infinities and NaN ruin their own head only: they do not choose the scale.
        top = gl.maximum(largest_finite_bits(x0), largest_finite_bits(x1))
        top = gl.maximum(top, gl.maximum(largest_finite_bits(x2), largest_finite_bits(x3)))
        top = gl.maximum(top, largest_finite_bits(rope))
    q_max_smem.index(HALF).store(gl.full([1], 0, gl.int32, SCALAR) + top)
    mbarrier.arrive(q_max_full, count=1)
    mbarrier.wait(q_max_full, 0)
    top = gl.maximum(gl.max(q_max_smem.index(0).load(SCALAR), 0), gl.max(q_max_smem.index(1).load(SCALAR), 0))
    # The power of two that brings the tile's largest magnitude to [2^14, 2^15).
    biased = gl.minimum(gl.maximum(268 - (top >> 7), 1), 253)
    scale = (biased << 23).to(gl.float32, bitcast=True)
    rope = scale_bfloat16_pairs(rope, biased * 0x800080).reshape([64, 4, 2, 2]).permute((0, 2, 3, 1)).reshape([64, 16])
    reinterpret(q_rope_smem.index(HALF), gl.int32, [64, 16], gl.NVMMASharedLayout(64, 32, 2)).store(rope)
    store_queries(q_smem.index(HALF * 4), pairs_to_float16(x0, scale))
    store_queries(q_smem.index(HALF * 4 + 1), pairs_to_float16(x1, scale))
    store_queries(q_smem.index(HALF * 4 + 2), pairs_to_float16(x2, scale))
    store_queries(q_smem.index(HALF * 4 + 3), pairs_to_float16(x3, scale))
    q_scale_smem.store(gl.full([1], 0.0, gl.float32, SCALAR) + ((254 - biased) << 23).to(gl.float32, bitcast=True))
    fence_async_shared()
    mbarrier.arrive(q_full, count=1)

    position = first + gl.arange(0, 64, gl.SliceLayout(1, REQUESTS))
    if HALF == 1:
        for _ in range(2):
            position += 64
            index = gl.load(indices + position, mask=position < last, other=-1)
            prefetch_rows(
                kv_cache, index, table_row, table_width, num_cache_blocks, block_stride_16, BLOCK_SIZE, HAS_TABLE
            )
        position += 64
        index = gl.load(indices + position, mask=position < last, other=-1)
    acc = gl.zeros([64, 256], gl.float32, OUTPUT)
    for i in range(num_turns):
        stage = i % 2
        mbarrier.wait(full.index(stage), (i // 2) & 1)
        moved = gl.max(flag_smem.index(stage).slice(0, 1).load(SCALAR), 0)
        if moved != 0:
            acc = acc * alpha_smem.index(stage).load(gl.SliceLayout(1, OUTPUT))[:, None]
        acc = warpgroup_mma(p_smem.index(stage).permute((1, 0)), v_smem.index(stage), acc, is_async=True)
        if HALF == 1:
            # Three turns ahead, in the shadow of the product.
            prefetch_rows(
                kv_cache, index, table_row, table_width, num_cache_blocks, block_stride_16, BLOCK_SIZE, HAS_TABLE
            )
            position += 64
            index = gl.load(indices + position, mask=position < last, other=-1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)

    mbarrier.wait(row_full, 0)
    acc = acc * row_smem.load(gl.SliceLayout(1, OUTPUT))[:, None]
    if PARTIAL:
        # In the operand's order of dimensions: the merge puts them right.
        head_o = head_block * 64 + gl.arange(0, 64, gl.SliceLayout(1, OUTPUT))
        dim_o = gl.arange(0, 256, gl.SliceLayout(0, OUTPUT))
        op = out + HALF * 256 + head_o[:, None] * out_stride_head + dim_o[None, :]
        gl.store(op, acc, mask=(head_o < num_heads)[:, None] & (dim_o >= 0)[None, :])
    else:
        # A thread holds 16 neighbouring dimensions.
        x = acc.to(out.dtype.element_ty).reshape([64, 4, 4, 2, 4, 2]).permute((0, 1, 4, 2, 3, 5)).reshape([64, 256])
        x = gl.convert_layout(x, ROWS_OUT)
        head_o = head_block * 64 + gl.arange(0, 64, gl.SliceLayout(1, ROWS_OUT))
        dim_o = gl.arange(0, 256, gl.SliceLayout(0, ROWS_OUT))
        op = out + HALF * 256 + head_o[:, None] * out_stride_head + dim_o[None, :]
        gl.store(op, x, mask=(head_o < num_heads)[:, None] & (dim_o >= 0)[None, :])


@gluon.jit(
    do_not_specialize=[
        "indices_stride",
        "block_stride_16",
        "topk",
        "num_heads",
        "num_cache_blocks",
        "splits",
        "turns_per_split",
        "table_width",
        "table_stride",
        "num_requests",
        "lse_stride_split",
    ],
)
def many_heads_kernel(
    q, kv_cache, zero_row, indices, topk_length, attn_sink, block_table, req_id_per_token, out, lse,
    softmax_scale_log2, q_stride_token_2, q_stride_head_2, indices_stride: gl.int64, out_stride_token, out_stride_head,
    block_stride_16: gl.int64,
    topk: gl.int32, num_heads: gl.int32, num_cache_blocks: gl.int32, splits: gl.int32, turns_per_split: gl.int32,
    table_width: gl.int32, table_stride: gl.int64, num_requests: gl.int32, out_stride_split,
    lse_stride_split: gl.int64,
    BLOCK_SIZE: gl.constexpr, HAS_LENGTH: gl.constexpr, HAS_SINK: gl.constexpr, HAS_TABLE: gl.constexpr,
    PARTIAL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """64 heads of one token over one split of its keys.

    Grid: head blocks (fastest, so that those of a token meet in L2) x splits x tokens, one program an SM. Three
    warpgroups: `scores_warpgroup` (default partition) and two `values_warpgroup`, 256 of the 512 output dims each. A
    turn is 64 keys. Shared memory, 224,528 bytes: Q 72 KB; two stages of 64 values as float16, 64 KB each, and of
    probabilities, 8 KB each. Registers: 184 for the scores, 160 for the values (128 of them accumulators); no spills.
    The values need no barriers of their own: `full` says that the values and probabilities of a stage are there, `free`
    that both products are done with it.
    """
    head_blocks = gl.cdiv(num_heads, 64)
    head_block = gl.program_id(0) % head_blocks
    split = (gl.program_id(0) // head_blocks) % splits
    token = (gl.program_id(0) // (head_blocks * splits)).to(gl.int64)
    q_smem = gl.allocate_shared_memory(gl.float16, [8, 64, 64], TILE)
    q_rope_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 32], ROPE_TILE)
    # Two allocations, stored to in turn: the compiler puts a barrier between two stores to one of them.
    left_smem = gl.allocate_shared_memory(gl.float16, [2, 64, 256], TILE)
    right_smem = gl.allocate_shared_memory(gl.float16, [2, 64, 256], TILE)
    p_smem = gl.allocate_shared_memory(gl.float16, [2, 64, 64], TILE)
    reference_smem = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    row_smem = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    flag_smem = gl.allocate_shared_memory(gl.int32, [2, 128], PLAIN)
    q_max_smem = gl.allocate_shared_memory(gl.int32, [2, 1], PLAIN)
    q_scale_smem = gl.allocate_shared_memory(gl.float32, [1], PLAIN)
    q_max_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    row_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(q_max_full, count=2)
    mbarrier.init(q_full, count=2)
    mbarrier.init(row_full, count=1)

    if PARTIAL:
        # The merge may be brought onto idle SMs from here on; it waits for this grid's end before it reads.
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    first = split * turns_per_split * 64
    last = gl.minimum(topk, first + turns_per_split * 64)
    if HAS_LENGTH:
        last = gl.minimum(last, gl.load(topk_length + token))
    last = gl.maximum(last, first)
    table_row = block_table
    if HAS_TABLE:
        request = gl.load(req_id_per_token + token)
        known = (request >= 0) & (request < num_requests)
        table_width = gl.where(known, table_width, 0)
        table_row = block_table + gl.where(known, request, 0).to(gl.int64) * table_stride
    num_turns = gl.cdiv(last - first, 64)
    indices += token * indices_stride
    q = q.to(gl.pointer_type(gl.int32), bitcast=True) + token * q_stride_token_2
    out += token * out_stride_token + split.to(gl.int64) * out_stride_split
    lse += token * num_heads + split * lse_stride_split
    words = kv_cache.to(gl.pointer_type(gl.int32), bitcast=True)
    gl.warp_specialize(
        [
            (scores_warpgroup, (
                words, zero_row, indices, first, last, table_row, table_width, num_cache_blocks, block_stride_16, lse,
                attn_sink, q_smem, q_rope_smem, left_smem, right_smem, p_smem, reference_smem, alpha_smem, flag_smem,
                row_smem, q_scale_smem, q_full, full, free, row_full, softmax_scale_log2, num_heads, head_block,
                BLOCK_SIZE, HAS_TABLE, HAS_SINK,
            )),
            (values_warpgroup, (
                q, q_stride_head_2, out, out_stride_head, num_turns, words, indices, first, last, table_row,
                table_width, num_cache_blocks, block_stride_16, q_smem, q_rope_smem, left_smem, p_smem, alpha_smem,
                flag_smem, row_smem, q_max_smem, q_scale_smem, q_max_full, q_full, full, free, row_full, num_heads,
                head_block, BLOCK_SIZE, HAS_TABLE, PARTIAL, 0,
            )),
            (values_warpgroup, (
                q, q_stride_head_2, out, out_stride_head, num_turns, words, indices, first, last, table_row,
                table_width, num_cache_blocks, block_stride_16, q_smem, q_rope_smem, right_smem, p_smem, alpha_smem,
                flag_smem, row_smem, q_max_smem, q_scale_smem, q_max_full, q_full, full, free, row_full, num_heads,
                head_block, BLOCK_SIZE, HAS_TABLE, PARTIAL, 1,
            )),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_heads", "splits", "split_stride", "lse_stride"])
def merge_splits_kernel(
    part, part_lse, attn_sink, out, lse, out_stride_token, out_stride_head,
    num_heads: tl.int32, splits: tl.int32, split_stride: tl.int64, lse_stride: tl.int64,
    SPLITS: tl.constexpr, HAS_SINK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program a token and head: the splits' outputs weighted by their share of the softmax sum, in fixed order."""
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    head = row % num_heads
    split = tl.arange(0, SPLITS)
    place = tl.arange(0, 512)
    # The partial results' order of dimensions: that in which the four lanes of a key's row hold them.
    dim = place // 64 * 64 + place // 2 % 4 * 16 + place // 16 % 4 * 4 + place // 8 % 2 * 2 + place % 2
    if USE_PDL:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    part_l = tl.load(part_lse + split * lse_stride + row, mask=split < splits, other=float("-inf"))
    from_part = part + split[:, None] * split_stride + row * 512 + place[None, :]
    x = tl.load(from_part, mask=(split < splits)[:, None], other=0.0)
    top = tl.max(part_l, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(part_l - top)
    total = tl.sum(weight, 0)
    merged = tl.sum(x * weight[:, None], 0)
    natural = tl.where(total == 0.0, float("-inf"), top + tl.log(total))
    scale = tl.where(total == 0.0, 0.0, 1.0 / total)
    if HAS_SINK:
        sink = tl.load(attn_sink + head)
        scale = tl.where(total == 0.0, 0.0, scale / (1.0 + tl.exp(sink - natural)))
    tl.store(out + token * out_stride_token + head * out_stride_head + dim, (merged * scale).to(out.dtype.element_ty))
    tl.store(lse + row, natural)
