"""Token-level sparse MLA: schemas, preconditions, fakes."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..formats import LATENT_DIM
from ..registry import Contract, computing
from ._checks import FLOAT_DTYPES, check_no_grad, check_query, check_query_and_cache, check_scale, check_tensor

INT32 = (torch.int32,)


def _check_selection(
    op: str, q: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None, prefix: str = ""
) -> None:
    num_tokens = q.shape[0]
    check_tensor(op, f"{prefix}indices", indices, INT32, (("num_tokens", num_tokens), ("topk", None)), q.device)
    if topk_length is not None:
        check_tensor(op, f"{prefix}topk_length", topk_length, INT32, (("num_tokens", num_tokens),), q.device)


def _check_sink(op: str, q: torch.Tensor, attn_sink: torch.Tensor | None) -> None:
    if attn_sink is not None:
        check_tensor(op, "attn_sink", attn_sink, (torch.float32,), (("num_heads", q.shape[1]),), q.device)


def _check_table(op: str, q: torch.Tensor, block_table: torch.Tensor | None, name: str = "block_table") -> None:
    if block_table is not None:
        check_tensor(op, name, block_table, INT32, (("num_requests", None), ("max_blocks", None)), q.device)


def _contract(
    op: str, q: torch.Tensor, head_dim: int, indices: torch.Tensor, cache_format: str, deterministic: bool
) -> Contract:
    num_tokens, num_heads, _ = q.shape
    names, sizes = (op, q.device, q.dtype, cache_format), (head_dim, num_heads, num_tokens, indices.shape[1])
    outputs = {
        "out": ((num_tokens, num_heads, LATENT_DIM), q.dtype),
        "lse": ((num_tokens, num_heads), torch.float32),
    }
    return Call(*names, *sizes, deterministic=deterministic), outputs


@computing("out", "lse", writes=("kv_cache",))
def paged_sparse_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    q_rope: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    deterministic: bool = False,
) -> Contract:
    op = "paged_sparse_attention"
    head_dim = check_query_and_cache(op, q, kv_cache, cache_format, q_rope=q_rope)
    _check_selection(op, q, indices, topk_length)
    _check_sink(op, q, attn_sink)
    check_scale(op, "softmax_scale", softmax_scale)
    if (block_table is None) != (req_id_per_token is None):
        given, missing = ("block_table", "req_id_per_token")
        if block_table is None:
            given, missing = missing, given
        raise ValueError(f"{op}: block_table and req_id_per_token go together, got {given} without {missing}")
    _check_table(op, q, block_table)
    if req_id_per_token is not None:
        check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", q.shape[0]),), q.device)
    check_no_grad(op, q=q, q_rope=q_rope, kv_cache=kv_cache, attn_sink=attn_sink)
    return _contract(op, q, head_dim, indices, cache_format, deterministic)


# The extra cache is an overload, since an optional argument that is written (`Tensor(a!)?`) crashes Inductor. It has no
# `q_rope`: DeepSeek-V4, whose layers have two caches, absorbs nothing, so that a query is 512 wide and in one piece.
@computing("out", "lse", op="paged_sparse_attention.extra", writes=("kv_cache", "extra_kv_cache"))
def paged_sparse_attention_extra(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    extra_kv_cache: torch.Tensor,
    extra_indices: torch.Tensor,
    extra_cache_format: str,
    *,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    extra_block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    deterministic: bool = False,
) -> Contract:
    op = "paged_sparse_attention.extra"
    head_dim = check_query_and_cache(op, q, kv_cache, cache_format)
    check_query_and_cache(op, q, extra_kv_cache, extra_cache_format, "extra_kv_cache")
    _check_selection(op, q, indices, topk_length)
    _check_selection(op, q, extra_indices, extra_topk_length, "extra_")
    _check_sink(op, q, attn_sink)
    check_scale(op, "softmax_scale", softmax_scale)
    if (block_table is None and extra_block_table is None) != (req_id_per_token is None):
        tables = "block_table" if block_table is not None else "extra_block_table"
        got = "req_id_per_token without either" if req_id_per_token is not None else f"{tables} without it"
        raise ValueError(f"{op}: block_table or extra_block_table go together with req_id_per_token, got {got}")
    _check_table(op, q, block_table)
    _check_table(op, q, extra_block_table, "extra_block_table")
    if req_id_per_token is not None:
        check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", q.shape[0]),), q.device)
    check_no_grad(op, q=q, kv_cache=kv_cache, extra_kv_cache=extra_kv_cache, attn_sink=attn_sink)
    call, outputs = _contract(op, q, head_dim, indices, cache_format, deterministic)
    return call._replace(extra_cache_format=extra_cache_format, extra_topk=extra_indices.shape[1]), outputs


@computing("out", "lse")
def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    deterministic: bool = False,
) -> Contract:
    op = "sparse_attention"
    check_query(op, q, FLOAT_DTYPES)
    check_tensor(op, "kv", kv, (q.dtype,), (("num_kv", None), ("head_dim", q.shape[2])), q.device)
    _check_selection(op, q, indices, topk_length)
    _check_sink(op, q, attn_sink)
    check_scale(op, "softmax_scale", softmax_scale)
    check_no_grad(op, q=q, kv=kv, attn_sink=attn_sink)
    return _contract(op, q, q.shape[2], indices, "", deterministic)
