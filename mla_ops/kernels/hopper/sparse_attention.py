"""Token-level sparse MLA on SM90: which Gluon kernel takes a call, and why one is refused.

`few_heads` puts up to 32 heads beside the keys of a token on the tensor cores' small tiles; `many_heads` gives each
block of 64 heads a program of its own. Both read `fp8_ds_mla`.
"""

from __future__ import annotations

import functools

import torch

from ...dispatch import Call, Lowering

FEW_HEADS = 32


@functools.cache
def gluon_reason() -> str | None:
    """Why the installed Triton cannot compile these kernels, or None."""
    try:
        from . import few_heads, many_heads  # noqa: F401
    except ImportError as error:
        return f"the installed Triton has not the Gluon that these kernels are written in ({error}); 3.6 has"
    return None


def paged_reason(call: Call) -> str | None:
    if call.cache_format != "fp8_ds_mla":
        return f"the Gluon kernels read fp8_ds_mla, this cache is {call.cache_format}"
    if call.dtype != torch.bfloat16:
        return f"the Gluon kernels take bfloat16 queries, these are {call.dtype}"
    return gluon_reason()


def paged_sparse_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    from . import few_heads, many_heads

    kernel = few_heads if q.shape[1] <= FEW_HEADS else many_heads
    kernel.run(
        q,
        kv_cache,
        indices,
        softmax_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        block_table=block_table,
        req_id_per_token=req_id_per_token,
        out=out,
        lse=lse,
    )


LOWERINGS = {"paged_sparse_attention": Lowering(paged_sparse_attention, paged_reason)}
