"""Token-level sparse multi-head latent attention."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..formats import LATENT_DIM
from ..registry import Contract, computing
from ._checks import (
    FLOAT32,
    FLOAT_DTYPES,
    INT32,
    check_block_table,
    check_no_grad,
    check_query,
    check_query_and_cache,
    check_scale,
    check_tensor,
)


def _check_selection(
    op: str, q: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None, prefix: str = ""
) -> None:
    num_tokens = q.shape[0]
    check_tensor(op, f"{prefix}indices", indices, INT32, (("num_tokens", num_tokens), ("topk", None)), q.device)
    if topk_length is not None:
        check_tensor(op, f"{prefix}topk_length", topk_length, INT32, (("num_tokens", num_tokens),), q.device)


def _check_sink(op: str, q: torch.Tensor, attn_sink: torch.Tensor | None) -> None:
    if attn_sink is not None:
        check_tensor(op, "attn_sink", attn_sink, FLOAT32, (("num_heads", q.shape[1]),), q.device)


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


@computing("out", "lse", op="paged_sparse_attention", writes=("kv_cache",))
def _over_one_cache(
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
    if block_table is not None:
        check_block_table(op, block_table, q.device)
    if req_id_per_token is not None:
        check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", q.shape[0]),), q.device)
    check_no_grad(op, q=q, q_rope=q_rope, kv_cache=kv_cache, attn_sink=attn_sink)
    return _contract(op, q, head_dim, indices, cache_format, deterministic)


# The extra cache is an overload, since an optional argument that is written (`Tensor(a!)?`) crashes Inductor. It has no
# `q_rope`: DeepSeek-V4, whose layers have two caches, absorbs nothing, so that a query is 512 wide and in one piece.
@computing("out", "lse", op="paged_sparse_attention.extra", writes=("kv_cache", "extra_kv_cache"))
def _over_two_caches(
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
    if block_table is not None:
        check_block_table(op, block_table, q.device)
    if extra_block_table is not None:
        check_block_table(op, extra_block_table, q.device, "extra_block_table")
    if req_id_per_token is not None:
        check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", q.shape[0]),), q.device)
    check_no_grad(op, q=q, kv_cache=kv_cache, extra_kv_cache=extra_kv_cache, attn_sink=attn_sink)
    call, outputs = _contract(op, q, head_dim, indices, cache_format, deterministic)
    return call._replace(extra_cache_format=extra_cache_format, extra_topk=extra_indices.shape[1]), outputs


def _refuse_incomplete_extra(**arguments: torch.Tensor | str | None) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(
            "paged_sparse_attention: an extra cache takes extra_kv_cache and extra_indices, got only "
            + ", ".join(given)
        )


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
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_cache_format: str | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_block_table: torch.Tensor | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query token over the keys chosen for it in a paged cache, in the absorbed (multi-query) form.

    Decode, speculative decode, prefill and mixed batches are the same call: tokens are flat, one row each. With an
    extra cache (DeepSeek V4: `kv_cache` holds the sliding window, `extra_kv_cache` the compressed tokens), the keys of
    both share one softmax.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, 1 to 128 heads, 576 or 512 wide like the keys; dtype of the cache for a
            plain format, bfloat16, float16 or float32 for a quantised one.
        kv_cache: `[num_blocks, block_size, row_width]`, or `[num_blocks, block_bytes]` for `fp8_ds_mla_v4`; only read.
        indices: `[num_tokens, topk]` int32, any topk. Slots of the cache, or positions in the token's request if
            `block_table` is given. An entry outside the cache (negative, or past its end) is not attended and not
            read; duplicates count as often as they stand.
        softmax_scale: multiplies `q @ k`. The width of heads before absorption sets it: `192**-0.5` for DeepSeek-V3 and
            V3.2 (128 + 64), times `mscale**2` where the model has one, and `512**-0.5` for V4, which absorbs nothing.
        cache_format: format of `kv_cache`.
        q_rope: `[num_tokens, num_heads, 64]` of q's dtype, the RoPE dims of the queries; `q` is the absorbed part,
            `[num_tokens, num_heads, 512]`, then. The two may be views of any other tensors, of any strides whose last
            is 1: nothing has to be concatenated. Not with an extra cache.
        topk_length: `[num_tokens]` int32; only the first so many indices of a row count. None: all.
        attn_sink: `[num_heads]` float32, a logit that takes part in the softmax and carries no value: the output is
            scaled by `exp(lse) / (exp(lse) + exp(sink))`. -inf is no sink, +inf gives 0.
        block_table: `[num_requests, max_blocks]` int32: translate `indices` inside the kernel. Bounded by its shape and
            by the cache.
        req_id_per_token: `[num_tokens]` int32, the row of `block_table` for each token; outside it, the token is
            padding and attends to nothing. Goes with `block_table`, or `extra_block_table`.
        extra_kv_cache: a second cache, of keys as wide; its page size and format are its own. Only read.
        extra_indices: `[num_tokens, extra_topk]` int32, as `indices`, of the extra cache. Given if it is.
        extra_cache_format: format of `extra_kv_cache`; None: `cache_format`.
        extra_topk_length: `[num_tokens]` int32, as `topk_length`, of `extra_indices`.
        extra_block_table: `[num_requests, extra_max_blocks]` int32: translate `extra_indices` by it. Either table may
            be given without the other: the indices of the other cache are slots then.
        deterministic: the bits of a token's results depend on its own arguments and on the shapes of one row (heads,
            topk, extra_topk), not on other tokens, their number or its place among them. With few tokens that takes
            more time.

    Returns:
        out `[num_tokens, num_heads, 512]` of q's dtype and lse `[num_tokens, num_heads]` float32: natural logarithm of
        the sum of exponentials, without the sink. Nothing to attend to: out is 0 and lse is -inf. Both contiguous.
        `torch.ops.mla.paged_sparse_attention.out(..., out=out, lse=lse)` writes into the caller's buffers. The form
        with an extra cache is `torch.ops.mla.paged_sparse_attention.extra`, and `.extra_out`.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or format that the contract does not allow.
        ValueError: an argument of the extra cache without the cache.
        NotImplementedError: no lowering can run the call (the message has each one's reason), or q requires grad.

    Source: DeepSeek-V3.2-Exp (DeepSeek Sparse Attention); DeepSeek-V4 (two caches).
    """
    if extra_kv_cache is not None and extra_indices is not None:
        if q_rope is not None:
            raise ValueError(
                "paged_sparse_attention: q_rope does not go with an extra cache, whose queries are in one piece, 512 "
                "wide: pass the whole query as q"
            )
        return _over_two_caches(
            q,
            kv_cache,
            indices,
            softmax_scale,
            cache_format,
            extra_kv_cache,
            extra_indices,
            cache_format if extra_cache_format is None else extra_cache_format,
            topk_length=topk_length,
            extra_topk_length=extra_topk_length,
            attn_sink=attn_sink,
            block_table=block_table,
            extra_block_table=extra_block_table,
            req_id_per_token=req_id_per_token,
            deterministic=deterministic,
        )
    _refuse_incomplete_extra(
        extra_kv_cache=extra_kv_cache,
        extra_indices=extra_indices,
        extra_cache_format=extra_cache_format,
        extra_topk_length=extra_topk_length,
        extra_block_table=extra_block_table,
    )
    return _over_one_cache(
        q,
        kv_cache,
        indices,
        softmax_scale,
        cache_format,
        q_rope=q_rope,
        topk_length=topk_length,
        attn_sink=attn_sink,
        block_table=block_table,
        req_id_per_token=req_id_per_token,
        deterministic=deterministic,
    )


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
    """Attention of each query token over the keys chosen for it, from flat keys that this step computed.

    Args:
        q: `[num_tokens, num_heads, head_dim]` bfloat16, float16 or float32, 1 to 128 heads, 576 or 512 wide.
        kv: `[num_kv, head_dim]` of q's dtype; the first 512 of each row are also the value.
        indices: `[num_tokens, topk]` int32 rows of `kv`; outside `[0, num_kv)` is not attended and not read.
        softmax_scale: multiplies `q @ k`, as in `paged_sparse_attention`.
        topk_length: `[num_tokens]` int32; only the first so many indices of a row count. None: all.
        attn_sink: `[num_heads]` float32, as in `paged_sparse_attention`.
        deterministic: as in `paged_sparse_attention`.

    Returns:
        out `[num_tokens, num_heads, 512]` of q's dtype and lse `[num_tokens, num_heads]` float32, as
        `paged_sparse_attention` has them; `torch.ops.mla.sparse_attention.out` writes into the caller's buffers.

    Raises:
        TypeError, ValueError: a dtype, device, shape or stride that the contract does not allow.
        NotImplementedError: no lowering can run the call, or q or kv requires grad.

    Source: DeepSeek-V3.2-Exp (DeepSeek Sparse Attention).
    """
    op = "sparse_attention"
    check_query(op, q, FLOAT_DTYPES)
    check_tensor(op, "kv", kv, (q.dtype,), (("num_kv", None), ("head_dim", q.shape[2])), q.device)
    _check_selection(op, q, indices, topk_length)
    _check_sink(op, q, attn_sink)
    check_scale(op, "softmax_scale", softmax_scale)
    check_no_grad(op, q=q, kv=kv, attn_sink=attn_sink)
    return _contract(op, q, q.shape[2], indices, "", deterministic)
