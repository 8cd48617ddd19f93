"""Sparse MLA decode for 33 to 128 heads on Hopper, over the paged `fp8_ds_mla` cache.

Takes bfloat16 queries [T, H, 576], any H (64 heads at a time, so few heads waste work), caches [num_blocks,
block_size, 656] of bytes, SM90 only, Triton 3.6 (run there; 3.7 and 3.9 compile it, `gluon_names.py`).

How it works. Scores are computed transposed, S^T = K Q^T, so that the keys are the tensor cores' *register* operand:
the warpgroup that gathers a key converts it from e4m3 to float16 in registers, multiplies it with Q at once, and
writes it to shared memory only as a value. Two more warpgroups add up P V behind it. The softmax's reference moves
only when a score exceeds it by 2^8 (exact: the final division cancels it), so the usual turn has no reduction across
threads but one vote.

Precision. Keys and probabilities are float16, the RoPE part is bfloat16, sums are float32. A key is e4m3 times
float16 of its scale: exact for power-of-two scales in [2^-13, 2^7), and within 2^-11 of the exact product for any
other scale. Outside [2^-13, 2^7) a power of two of the token's largest scale moves into an exponent of the row, which
enters its score and its part of the softmax sum in float32, for scales from 2^-73 up; smaller ones count as they are
but with fewer bits of value. Queries are float16 times one power of two for each 64 heads, exact down to 2^-31 of the
tile's largest magnitude; infinite or NaN heads touch no other head. Results are the same in every run.

Splits follow from shapes; partial results are merged exactly by a second kernel, which is launched early
(programmatic dependent launch) and waits on the device.
"""

import functools
import math

import torch
import triton

from .many_heads_device import many_heads_kernel, merge_splits_kernel

# Microseconds on one H200, docs/kernels.md: a turn of 64 keys, what a program costs besides
# (launch, Q, the first gather, the last product), the merge, and the partial results' traffic.
TURN_US, PROGRAM_US, MERGE_US, PARTIAL_BYTES_PER_US = 3.0, 13.0, 3.5, 5.0e6
MAX_SPLITS = 32
VALUE_REGISTERS = 160


@functools.lru_cache(maxsize=4096)
def choose_splits(num_tokens: int, num_heads: int, topk: int, num_sms: int) -> tuple[int, int]:
    """(splits, turns of 64 keys a split) with the least predicted time, from shapes alone."""
    rows = num_tokens * -(-num_heads // 64)
    turns = max(1, -(-topk // 64))
    best = (math.inf, 1, turns)
    for wanted in range(1, min(turns, MAX_SPLITS) + 1):
        per_split = -(-turns // wanted)
        splits = -(-turns // per_split)
        if splits != wanted:
            continue
        time = -(-rows * splits // num_sms) * (per_split * TURN_US + PROGRAM_US)
        if splits > 1:
            time += MERGE_US + 2 * rows * splits * 64 * 2048 / PARTIAL_BYTES_PER_US
        best = min(best, (time, splits, per_split))
    return best[1], best[2]


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_zero_rows: dict[torch.device, torch.Tensor] = {}


def _zero_row(device: torch.device) -> torch.Tensor:
    """656 bytes of zeros that stand for every key which is not attended."""
    row = _zero_rows.get(device)
    if row is None:
        row = torch.zeros(164, dtype=torch.int32, device=device)
        if not torch.cuda.is_current_stream_capturing():
            # Other streams may use it from now on. One made during a capture belongs to that graph alone.
            torch.cuda.current_stream(device).synchronize()
            _zero_rows[device] = row
    return row


def run(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    *,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    block_table: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    splits: tuple[int, int] | None = None,
) -> None:
    """Sparse MLA attention of every query token over its chosen slots of an `fp8_ds_mla` cache.

    Args:
        q: [T, H, 576] bfloat16, last dim contiguous, other strides free.
        kv_cache: [num_blocks, block_size, 656] uint8, stride(0) a multiple of 16 bytes, 16-byte aligned.
        indices: [T, topk] int32; slots, or request-local positions with `block_table`. Out of range: not attended.
        softmax_scale: factor of the scores before the softmax.
        topk_length: [T] int32; only the first so many indices of a row count.
        attn_sink: [H] float32, natural-log weight that joins the softmax sum only.
        block_table: [num_requests, width] int32, with `req_id_per_token` [T] int32.
        out: [T, H, 512] bfloat16, last dim contiguous; written.
        lse: [T, H] float32; written, natural log, without the sink; -inf where nothing is attended.
        splits: (splits, turns of 64 keys a split), for measurements; by default `choose_splits` decides.
    """
    num_tokens, num_heads, _ = q.shape
    topk = indices.shape[1]
    if num_tokens == 0 or num_heads == 0:
        return
    strided_lse = None
    if not lse.is_contiguous():
        strided_lse, lse = lse, torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    if q.stride(0) % 2 or q.stride(1) % 2 or q.data_ptr() % 4:
        q = q.contiguous()  # the kernel reads pairs
    num_splits, turns_per_split = splits or choose_splits(num_tokens, num_heads, topk, _num_sms(q.device))
    if num_splits > 1:
        part = torch.empty(num_splits, num_tokens, num_heads, 512, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(num_splits, num_tokens, num_heads, dtype=torch.float32, device=q.device)
        target, target_lse = part, part_lse
    else:
        target, target_lse = out, lse
    has_table = block_table is not None
    many_heads_kernel[(-(-num_heads // 64) * num_splits * num_tokens,)](
        q,
        kv_cache,
        _zero_row(q.device),
        indices,
        indices if topk_length is None else topk_length,
        lse if attn_sink is None else attn_sink,
        block_table if has_table else indices,
        req_id_per_token if has_table else indices,
        target,
        target_lse,
        softmax_scale * math.log2(math.e),
        q.stride(0) // 2,
        q.stride(1) // 2,
        indices.stride(0),
        num_heads * 512 if num_splits > 1 else out.stride(0),
        512 if num_splits > 1 else out.stride(1),
        kv_cache.stride(0) // 16,
        topk,
        num_heads,
        kv_cache.shape[0],
        num_splits,
        turns_per_split,
        block_table.shape[1] if has_table else 0,
        block_table.stride(0) if has_table else 0,
        block_table.shape[0] if has_table else 0,
        # 0 where unused: a product that outgrows 32 bits would be another compilation.
        num_tokens * num_heads * 512 if num_splits > 1 else 0,
        num_tokens * num_heads,
        BLOCK_SIZE=kv_cache.shape[1],
        HAS_LENGTH=topk_length is not None,
        HAS_SINK=attn_sink is not None and num_splits == 1,
        HAS_TABLE=has_table,
        PARTIAL=num_splits > 1,
        REGISTERS=VALUE_REGISTERS,
        num_warps=4,
    )
    if num_splits > 1:
        padded = triton.next_power_of_2(num_splits)
        merge_splits_kernel[(num_tokens * num_heads,)](
            part,
            part_lse,
            lse if attn_sink is None else attn_sink,
            out,
            lse,
            out.stride(0),
            out.stride(1),
            num_heads,
            num_splits,
            num_tokens * num_heads * 512,
            num_tokens * num_heads,
            SPLITS=padded,
            HAS_SINK=attn_sink is not None,
            USE_PDL=True,
            num_warps=8 if padded > 8 else 4,
            launch_pdl=True,
        )
    if strided_lse is not None:
        strided_lse.copy_(lse)
