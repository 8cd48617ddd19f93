"""Dense multi-head latent attention: prefill over expanded keys, decode over the latents of a paged cache."""

from __future__ import annotations

from typing import Literal

import torch

from ..dispatch import Call
from ..formats import LATENT_DIM, geometry
from ..registry import Contract, Outputs, computing, require
from ..sizes import check_sizes
from ._checks import (
    FLOAT_DTYPES,
    INT32,
    check_block_table,
    check_heads,
    check_no_grad,
    check_not_negative,
    check_query_and_cache,
    check_scale,
    check_tensor,
)

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
    """Attention of each request's queries to its own keys, heads of queries and values being of different widths.

    A prefill of MLA calls it with latents expanded into keys (192 wide in DeepSeek-V3) and values (128).

    Args:
        q: `[num_tokens, num_heads, head_dim]` bfloat16, float16 or float32, 1 to 128 heads, 1 to 256 wide.
        k: `[num_kv, num_kv_heads, head_dim]` of q's dtype; num_heads is a multiple of num_kv_heads, and consecutive
            query heads share a key head.
        v: `[num_kv, num_kv_heads, head_dim_v]` of q's dtype, 1 to 256 wide. `k` and `v` may be slices of one tensor.
        cu_seqlens_q: `[num_requests + 1]` int32, ascending from 0: request r owns the rows from element r up to element
            r + 1 of `q`. An element past the tensor counts as the tensor's end. If elements do not ascend from 0, or a
            bound below is too small, CPU tensors are refused; on a GPU, which cannot say so, results are unspecified,
            and nothing outside of the tensors is read or written.
        cu_seqlens_k: the same of `k` and `v`. If each request has as many queries as keys, pass the same tensor
            twice: a lowering can then know it.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. Any will do; nothing is recompiled for another.
        softmax_scale: multiplies `q @ k`; positive. `head_dim**-0.5`, times `mscale**2` where the model has one.
        causal: a query sees the keys up to its own, the last query of a request standing beside its last key (bottom
            right). False: it sees all keys of its request.

    Returns:
        out `[num_tokens, num_heads, head_dim_v]` of q's dtype and lse `[num_tokens, num_heads]` float32, natural
        logarithm, both contiguous. A query that sees no key, and a row that no request covers, has out 0 and lse -inf.
        Keys of other requests are not seen; within a request, a key or value that is not finite may make NaN of any of
        its rows. Rows that no request covers are padding: they may hold any finite values.

    Raises:
        TypeError, ValueError: a dtype, device, shape or stride that the contract does not allow.
        NotImplementedError: no lowering can run the call, or an input requires grad.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; FlashAttention-2 (arXiv:2307.08691).
    """
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
    """Attention of each query token to the first keys of its request in a paged cache, in the absorbed form.

    Decode, speculative decode (several tokens of a request, each with its own length: causal) and mixed batches are the
    same call: tokens are flat, one row each. `StepMetadata` has the table, the requests and the lengths.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, 1 to 128 heads, 576 or 512 wide like the keys; dtype of the cache for a
            plain format, bfloat16, float16 or float32 for a quantised one.
        kv_cache: `[num_blocks, block_size, row_width]`, or `[num_blocks, block_bytes]` for `fp8_ds_mla_v4`; only read.
        block_table: `[num_requests, max_blocks]` int32. An entry outside the cache stands for keys that are not
            attended and not read.
        req_id_per_token: `[num_tokens]` int32, the row of `block_table` for each token; outside it, the token is
            padding and attends to nothing.
        key_lens: `[num_tokens]` int32: the token sees the keys at positions below this, up to the table's width.
        softmax_scale: multiplies `q @ k`, as in `paged_sparse_attention`: `192**-0.5` for DeepSeek-V3.
        cache_format: format of `kv_cache`.
        q_rope: `[num_tokens, num_heads, 64]`, as in `paged_sparse_attention`; `q` is 512 wide then.
        deterministic: the bits of a token's results depend on its own query, keys and length, and on the number of
            heads alone. With few tokens that takes several times as long.

    Returns:
        out `[num_tokens, num_heads, 512]` of q's dtype and lse `[num_tokens, num_heads]` float32, natural logarithm,
        both contiguous. Nothing to attend to: out is 0 and lse is -inf.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or format that the contract does not allow.
        NotImplementedError: no lowering can run the call, or q requires grad.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2 and appendix C.
    """
    op = "paged_attention"
    device = q.device
    head_dim = check_query_and_cache(op, q, kv_cache, cache_format, q_rope=q_rope)
    check_block_table(op, block_table, device)
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


def choose_prefill(max_seq_len: int, index_topk: int) -> Literal["dense", "sparse"]:
    """Whether a prefill of a sparse model should run dense, over expanded keys, or sparse, over chosen ones.

    With no sequence longer than `index_topk` an indexer chooses every key there is, so dense attention is exact, needs
    no scores and takes a third of the multiply-adds. Longer sequences must run sparse: so the model was trained.
    Call it on the host: the result chooses between two compiled or captured steps.

    Args:
        max_seq_len: the longest sequence of the step, new tokens included, or an upper bound.
        index_topk: keys that the model's indexer chooses for a token.

    Returns:
        "dense" or "sparse".

    Raises:
        TypeError, ValueError: one is no integer, as a tensor, which would have to be read from the device; or negative.
    """
    check_sizes("choose_prefill", 0, max_seq_len=max_seq_len, index_topk=index_topk)
    return "dense" if max_seq_len <= index_topk else "sparse"
