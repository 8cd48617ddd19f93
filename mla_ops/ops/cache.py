"""Writing and reading the paged cache."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..formats import geometry
from ..registry import Contract, computing, mutating, require
from ._checks import FLOAT_DTYPES, INT32, INT64, check_cache, check_no_grad, check_not_negative, check_tensor


@mutating("kv_cache")
def concat_and_cache(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> Call:
    """Writes the latent and the RoPE key of each token to its slot, quantising as the format says.

    Args:
        kv_c: latents, `[num_tokens, 512]`; `[num_tokens, 448]` for `fp8_ds_mla_v4`. (For a plain format, the first part
            of the row, whatever its width.) A `bf16` or `fp16` cache takes its own dtype or float32, the other
            formats bfloat16, float16 or float32.
        k_pe: RoPE keys after rotation, `[num_tokens, 64]`, dtype of `kv_c`. May be 0 wide where the rows are 512 wide.
        kv_cache: `[num_blocks, block_size, row_width]` of the format's dtype, written in place; for `fp8_ds_mla_v4`
            `[num_blocks, block_bytes]`, or the view `[num_blocks, block_size, 584]` of it. `stride(0)` is free in
            multiples of 16 bytes, so blocks may be padded or be slices of a larger pool.
        slot_mapping: `[num_slots]` int64, `block * block_size + offset` of each token. A negative slot is padding and
            one past the cache is ignored: nothing is written. Rows `i < min(num_slots, num_tokens)` are written; if
            two of them name one slot, which one stays is undefined.
        cache_format: `bf16`, `fp16`, `fp32`, `fp8_ds_mla` or `fp8_ds_mla_v4`; docs/formats.md has their bytes.

    Raises:
        TypeError, ValueError: a dtype, device, shape or stride that the contract does not allow; nothing is written.

    Source: DeepSeek-V3.2 and DeepSeek-V4 (FlashMLA's cache layouts).
    """
    op = "concat_and_cache"
    entry = check_cache(op, kv_cache, cache_format)
    head_dim = geometry(kv_cache, cache_format).head_dim
    dtypes = FLOAT_DTYPES if entry.quantized or entry.dtype == torch.float32 else (entry.dtype, torch.float32)
    device = kv_c.device
    check_tensor(op, "kv_c", kv_c, dtypes, (("num_tokens", None), ("latent_dim", None)), device)
    check_tensor(op, "k_pe", k_pe, (kv_c.dtype,), (("num_tokens", kv_c.shape[0]), ("rope_dim", None)), device)
    if entry.quantized:
        require(
            kv_c.shape[1] == entry.latent_dim,
            lambda: (
                f"{op}: kv_c must be {entry.latent_dim} wide for cache_format '{cache_format}', got {kv_c.shape[1]}"
            ),
        )
    require(
        kv_c.shape[1] + k_pe.shape[1] == head_dim,
        lambda: (
            f"{op}: kv_c and k_pe must be {head_dim} wide together, as the rows of kv_cache are, "
            f"got {kv_c.shape[1]} + {k_pe.shape[1]}"
        ),
    )
    if kv_cache.device != device:
        raise ValueError(f"{op}: kv_cache must be on {device} like the first argument, got {kv_cache.device}")
    check_tensor(op, "slot_mapping", slot_mapping, INT64, (("num_slots", None),), device)
    check_no_grad(op, kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    return Call(op, device, kv_c.dtype, cache_format, num_tokens=slot_mapping.shape[0])


@computing("out", writes=("kv_cache",), zeroed=True)
def gather_cache(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    num_rows: int,
    cache_format: str,
    *,
    gather_lens: torch.Tensor | None = None,
    offset: int = 0,
) -> Contract:
    """Reads paged rows back into a dense workspace, dequantised: whole requests, or the last tokens of each.

    Args:
        kv_cache: as `concat_and_cache` writes it; only read.
        block_table: `[num_requests, max_blocks]` int32. Entries outside the cache read as zeros.
        seq_lens: `[num_requests]` int32, tokens in the cache of each request.
        cu_seq_lens: `[num_requests + 1]` int32, ascending: request r owns output rows `offset + cu_seq_lens[r]` up to
            `offset + cu_seq_lens[r + 1]`, and what does not fit there is not written.
        num_rows: rows of the output; an upper bound known to the host.
        cache_format: format of `kv_cache`.
        gather_lens: `[num_requests]` int32. Only the last `gather_lens[r]` tokens of request r are read, so a chunk
            `[start, end)` of a request is `seq_lens = end`, `gather_lens = end - start`. None reads all.
        offset: added to every output row, for several gathers into one workspace (`.out`).

    Returns:
        `[num_rows, head_dim]`, contiguous; bfloat16 for `bf16` and the fp8 formats, else the cache's dtype. Rows that
        no request covers are zero. `torch.ops.mla.gather_cache.out(..., out=workspace)` leaves those untouched.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or negative size that the contract does not allow.
    """
    op = "gather_cache"
    entry = check_cache(op, kv_cache, cache_format)
    device = kv_cache.device
    num_requests = seq_lens.shape[0] if seq_lens.dim() else None
    check_tensor(op, "seq_lens", seq_lens, INT32, (("num_requests", None),), device)
    check_tensor(op, "block_table", block_table, INT32, (("num_requests", num_requests), ("max_blocks", None)), device)
    check_tensor(op, "cu_seq_lens", cu_seq_lens, INT32, (("num_requests+1", seq_lens.shape[0] + 1),), device)
    if gather_lens is not None:
        check_tensor(op, "gather_lens", gather_lens, INT32, (("num_requests", num_requests),), device)
    check_not_negative(op, "num_rows", num_rows)
    check_not_negative(op, "offset", offset)
    check_no_grad(op, kv_cache=kv_cache)
    call = Call(op, device, kv_cache.dtype, cache_format, num_tokens=num_rows)
    return call, {"out": ((num_rows, geometry(kv_cache, cache_format).head_dim), entry.value_dtype)}
