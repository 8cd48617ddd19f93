"""Cache ops: schemas, preconditions, fakes."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..formats import geometry
from ..registry import Contract, computing, mutating, require
from ._checks import FLOAT_DTYPES, check_cache, check_no_grad, check_not_negative, check_tensor


@mutating("kv_cache")
def concat_and_cache(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> Call:
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
    check_tensor(op, "slot_mapping", slot_mapping, (torch.int64,), (("num_slots", None),), device)
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
    op = "gather_cache"
    entry = check_cache(op, kv_cache, cache_format)
    device = kv_cache.device
    num_requests = seq_lens.shape[0] if seq_lens.dim() else None
    check_tensor(op, "seq_lens", seq_lens, (torch.int32,), (("num_requests", None),), device)
    check_tensor(
        op, "block_table", block_table, (torch.int32,), (("num_requests", num_requests), ("max_blocks", None)), device
    )
    check_tensor(op, "cu_seq_lens", cu_seq_lens, (torch.int32,), (("num_requests+1", seq_lens.shape[0] + 1),), device)
    if gather_lens is not None:
        check_tensor(op, "gather_lens", gather_lens, (torch.int32,), (("num_requests", num_requests),), device)
    check_not_negative(op, "num_rows", num_rows)
    check_not_negative(op, "offset", offset)
    check_no_grad(op, kv_cache=kv_cache)
    call = Call(op, device, kv_cache.dtype, cache_format, num_tokens=num_rows)
    return call, {"out": ((num_rows, geometry(kv_cache, cache_format).head_dim), entry.value_dtype)}
