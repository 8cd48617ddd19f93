"""Dense multi-head latent attention: schemas, preconditions, fakes."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..formats import LATENT_DIM, geometry
from ..registry import Contract, Outputs, computing, require
from ._checks import (
    FLOAT_DTYPES,
    check_heads,
    check_no_grad,
    check_not_negative,
    check_query_and_cache,
    check_scale,
    check_tensor,
)

INT32 = (torch.int32,)
MAX_HEAD_DIM = 256


def _check_head_dim(op: str, name: str, head_dim: int) -> None:
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{op}: heads of {name} must be 1 to {MAX_HEAD_DIM} wide, got {head_dim}")


def _outputs(q: torch.Tensor, head_dim_v: int) -> Outputs:
    num_tokens, num_heads, _ = q.shape
    return {"out": ((num_tokens, num_heads, head_dim_v), q.dtype), "lse": ((num_tokens, num_heads), torch.float32)}


@computing("out", "lse")
def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    *,
    causal: bool = True,
) -> Contract:
    op = "prefill_attention"
    device = q.device
    check_tensor(op, "q", q, FLOAT_DTYPES, (("num_tokens", None), ("num_heads", None), ("head_dim", None)), device)
    check_heads(op, q.shape[1])
    _check_head_dim(op, "q", q.shape[2])
    key_dims = (("num_kv", None), ("num_kv_heads", None), ("head_dim", q.shape[2]))
    check_tensor(op, "k", k, (q.dtype,), key_dims, device)
    num_kv, num_kv_heads, _ = k.shape
    if num_kv_heads < 1 or q.shape[1] % num_kv_heads:
        raise ValueError(f"{op}: the {q.shape[1]} heads of q must be a multiple of those of k, got {num_kv_heads}")
    value_dims = (("num_kv", num_kv), ("num_kv_heads", num_kv_heads), ("head_dim_v", None))
    check_tensor(op, "v", v, (q.dtype,), value_dims, device)
    _check_head_dim(op, "v", v.shape[2])
    check_tensor(op, "cu_seqlens_q", cu_seqlens_q, INT32, (("num_requests+1", None),), device)
    require(
        cu_seqlens_q.shape[0] >= 1,
        lambda: f"{op}: cu_seqlens_q must have num_requests + 1 elements, at least 1, got {cu_seqlens_q.shape[0]}",
    )
    check_tensor(op, "cu_seqlens_k", cu_seqlens_k, INT32, (("num_requests+1", cu_seqlens_q.shape[0]),), device)
    check_not_negative(op, "max_seqlen_q", max_seqlen_q)
    check_not_negative(op, "max_seqlen_k", max_seqlen_k)
    require(softmax_scale > 0, lambda: f"{op}: softmax_scale must be positive, got {softmax_scale}")
    check_scale(op, "softmax_scale", softmax_scale)
    check_no_grad(op, q=q, k=k, v=v)
    num_tokens, num_heads, head_dim = q.shape
    call = Call(op, device, q.dtype, "", head_dim, num_heads, num_tokens, head_dim_v=v.shape[2])
    return call, _outputs(q, v.shape[2])


@computing("out", "lse", writes=("kv_cache",))
def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    key_lens: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    q_rope: torch.Tensor | None = None,
    deterministic: bool = False,
) -> Contract:
    op = "paged_attention"
    device = q.device
    head_dim = check_query_and_cache(op, q, kv_cache, cache_format, q_rope=q_rope)
    check_tensor(op, "block_table", block_table, INT32, (("num_requests", None), ("max_blocks", None)), device)
    tokens = (("num_tokens", q.shape[0]),)
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, tokens, device)
    check_tensor(op, "key_lens", key_lens, INT32, tokens, device)
    check_scale(op, "softmax_scale", softmax_scale)
    check_no_grad(op, q=q, q_rope=q_rope, kv_cache=kv_cache)
    num_tokens, num_heads, _ = q.shape
    block_size = geometry(kv_cache, cache_format).block_size
    capacity = block_table.shape[1] * block_size
    names, sizes = (op, device, q.dtype, cache_format), (head_dim, num_heads, num_tokens, capacity)
    return Call(*names, *sizes, block_size=block_size, deterministic=deterministic), _outputs(q, LATENT_DIM)
