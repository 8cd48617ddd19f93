"""Sparse MLA attention for 1 to 32 heads on Hopper, over the paged `fp8_ds_mla` cache.

Facts for a dispatcher. Takes: SM90 (written for it: `mma.sync`, `cp.async`, mbarriers, register reallocation and the
packed e4m3 conversion, no wgmma), Triton 3.6 (run there; 3.7 and 3.9 compile it, `gluon_names.py`),
bfloat16 queries [T, H, 576] with 1 <= H <= 32, last dim contiguous, a uint8 cache [num_blocks, block_size, 656] whose
stride(0) is a multiple of 16 bytes and whose stride(1) is 656, any topk, block_size a compile-time constant. Does not
take: other formats, an extra cache, float16 queries. Nothing is recompiled for other numbers of tokens, keys, lengths
or table widths; the number of splits is compiled in only as a power of two of the merge kernel.

`few_heads_kernel`: one program per (split of the keys, token), grid (num_splits, num_tokens), one program an SM:
eight warps that compute and four that fetch (a copy whose address registers wait for the memory system would stall
the arithmetic behind it). It takes its share of the token's keys in blocks of 32 and never converts a block as a
whole: raw 656-byte rows come through `cp.async` into a ring of eight blocks (168 KB of shared memory, five blocks or
105 KB on the way at any time), and each product turns the bytes it needs into float16 fragments in registers.
  - Scores: A = queries [16 or 32 heads, dims] in registers, B = keys. Two consecutive dims of one key are an e4m3
    pair of a 32-bit word, so one `cvt.rn.f16x2.e4m3x2` makes a fragment register; the inner dimension is permuted to
    what a 16-byte load gives a lane, and the queries are permuted alike. Four pairs of warps take one 128-dim scale
    group each (and a quarter of the RoPE dims, in bfloat16), multiply by the key's scale in float32 and meet in
    shared memory.
  - Values: B needs pairs of neighbouring keys of one dim: `prmt` interleaves the bytes of two keys' words, then the
    same conversion. Each pair of warps owns the 128 latent dims of its group, so the group's scale goes into the
    weights.
  - The rows of 512 and 128 bytes are stored with their 16-byte chunks xored by bits of the key, so that both orders
    of loading are free of bank conflicts.
Between two barriers a warp has three independent things to do, so that latencies hide behind one another: scores of
block i + 1, softmax of block i, values of block i - 1. Registers: at most 224 a computing thread and 56 a fetching
one, no stack. Shared memory: 195 KB and 220 KB.

`merge_splits_kernel`: exact merge of the splits in float32, launched as a programmatic dependent.

Precision. e4m3 is exact in float16, and scales never touch a key: scores are scaled in float32, and weights carry the
scale relative to a running reference of their own for each head and 128-dim group, so any float32 scales from 2^-100
to 2^100 are right to the rounding of the weights (11 bits). Queries become float16 times a power of two for each row:
exact down to 2^-39 of the row's largest element. Sums are float32. Results do not depend on the run.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .few_heads_device import few_heads_kernel

MAX_HEADS = 32
MAX_SPLITS = 64


@triton.jit(do_not_specialize=["num_splits", "num_heads"])
def merge_splits_kernel(
    partial_out,
    partial_lse,
    attn_sink,
    out,
    lse,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    num_heads: tl.int32,
    num_splits: tl.int32,
    SPLITS: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """One head's DIMS latent dims of one token: out = sum_s exp(lse_s - lse) out_s over all splits at once."""
    head = tl.program_id(0) % num_heads
    chunk = tl.program_id(0) // num_heads
    token = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, SPLITS)
    live = split < num_splits
    row = token * num_splits * num_heads + head + split * num_heads
    dim = chunk * DIMS + tl.arange(0, DIMS)
    gdc_wait()
    # A split without keys has written zeros, so its values need no mask that would wait for its lse.
    values = tl.load(partial_out + (row * 512)[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    part = tl.load(partial_lse + row, mask=live, other=float("-inf"))
    largest = tl.max(part, 0)
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp(part - reference)
    total = tl.sum(weight, 0)
    safe_total = tl.where(total == 0.0, 1.0, total)
    log_sum = largest + tl.log(safe_total)
    normalise = 1.0 / safe_total
    if HAS_SINK:
        normalise = tl.where(total == 0.0, 0.0, normalise / (1.0 + tl.exp(tl.load(attn_sink + head) - log_sum)))
    result = tl.sum(values * weight[:, None], 0) * normalise
    tl.store(out + token * out_stride_token + head * out_stride_head + dim, result.to(out.dtype.element_ty))
    if chunk == 0:
        tl.store(lse + token * lse_stride_token + head * lse_stride_head, log_sum)


def num_splits_for(num_tokens: int, topk: int, num_heads: int, num_sms: int) -> int:
    """Number of shares that the keys of each token are split into, a function of shapes only.

    The cheapest of a few counts by a model of an H200 (docs/kernels.md): a program takes 8 us and 1.1 us
    for each block of 32 keys, one program an SM runs at a time, and the merge takes 1 us and 1.1 us a megabyte of
    partial results.
    """
    num_blocks = -(-topk // 32)
    best, best_time = 1, float("inf")
    for num_splits in (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, MAX_SPLITS):
        if num_splits > max(num_blocks, 1):
            break
        waves = -(-num_tokens * num_splits // num_sms)
        time = waves * (8.0 + 1.1 * -(-num_blocks // num_splits))
        if num_splits > 1:
            time += 1.0 + 1.1 * num_tokens * num_splits * num_heads * 2048 / 1e6
        if time < best_time:
            best, best_time = num_splits, time
    return best


def run(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor,
    num_splits: int | None = None,
) -> None:
    """Write sparse MLA attention of each token over its own list of keys into `out` and `lse`.

    Args:
        q (torch.Tensor): queries [num_tokens, num_heads, 576], bfloat16, 1 to 32 heads, last dim contiguous.
        kv_cache (torch.Tensor): `fp8_ds_mla` cache [num_blocks, block_size, 656], uint8, 16-byte aligned, stride(0) a
            multiple of 16 bytes.
        indices (torch.Tensor): slots [num_tokens, topk], int32; with a block table, positions within the request. An
            index outside its range is not attended and nothing is read for it.
        softmax_scale (float): factor of the scores.
        topk_length (torch.Tensor | None): entries of each row that count, [num_tokens], int32; clamped to 0..topk.
        attn_sink (torch.Tensor | None): [num_heads], float32; scales the output by exp(lse) / (exp(lse) + exp(sink)).
        block_table (torch.Tensor | None): [num_requests, width], int32; goes with `req_id_per_token`.
        req_id_per_token (torch.Tensor | None): [num_tokens], int32; a request outside the table attends to nothing.
        out (torch.Tensor): [num_tokens, num_heads, 512], bfloat16, last dim contiguous; 0 where nothing is attended.
        lse (torch.Tensor): [num_tokens, num_heads], float32, natural log without the sink; -inf where nothing is.
        num_splits (int | None): shares of each token's keys, 1 to 64; None for `num_splits_for`.
    """
    num_tokens, num_heads, _ = q.shape
    topk = indices.shape[1]
    if num_tokens == 0:
        return
    num_splits = num_splits or num_splits_for(num_tokens, topk, num_heads, _num_sms(q.device.index))
    split = num_splits > 1
    if split:
        partial_out = torch.empty(num_tokens, num_splits, num_heads, 512, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(num_tokens, num_splits, num_heads, dtype=torch.float32, device=q.device)
        target, target_lse = partial_out, partial_lse
        out_strides = (num_heads * 512, num_splits * num_heads * 512, 512)
        lse_strides = (num_heads, num_splits * num_heads, 1)
    else:
        target, target_lse = out, lse
        out_strides = (0, out.stride(0), out.stride(1))
        lse_strides = (0, lse.stride(0), lse.stride(1))
    local = block_table is not None
    few_heads_kernel[(num_splits, num_tokens)](
        q,
        kv_cache,
        indices,
        topk_length,
        attn_sink,
        block_table,
        req_id_per_token,
        target,
        target_lse,
        softmax_scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        kv_cache.stride(0) // 16,
        *out_strides,
        *lse_strides,
        indices.stride(0),
        block_table.stride(0) if local else 0,
        num_heads,
        topk,
        kv_cache.shape[0],
        block_table.shape[1] if local else 0,
        block_table.shape[0] if local else 0,
        num_splits,
        HEADS=16 if num_heads <= 16 else MAX_HEADS,
        BLOCK=32,
        STAGES=8,
        BLOCK_SIZE=kv_cache.shape[1],
        LOCAL=local,
        HAS_LENGTH=topk_length is not None,
        HAS_SINK=attn_sink is not None,
        SPLIT=split,
        PRODUCER_REGISTERS=56,
        num_warps=8,
    )
    if split:
        merge_splits_kernel[(num_heads * 8, num_tokens)](
            partial_out,
            partial_lse,
            attn_sink,
            out,
            lse,
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            lse.stride(1),
            num_heads,
            num_splits,
            SPLITS=triton.next_power_of_2(num_splits),
            DIMS=64,
            HAS_SINK=attn_sink is not None,
            num_warps=4,
            launch_pdl=True,
        )


@functools.cache
def _num_sms(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count
