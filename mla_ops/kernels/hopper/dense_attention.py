"""Dense MLA over a paged cache on SM90: the sparse kernels, told that every key was chosen.

A row of indices costs four bytes a key beside its 656, and all tokens share one row.
"""

from __future__ import annotations

import torch

from ...dispatch import Call, Lowering
from ...formats import geometry
from . import sparse_attention

SPARSE = "paged_sparse_attention"


def paged_reason(call: Call) -> str | None:
    return sparse_attention.LOWERINGS[SPARSE].unsupported_reason(call._replace(op=SPARSE))


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    key_lens: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    capacity = block_table.shape[1] * geometry(kv_cache, cache_format).block_size
    every_key = torch.arange(capacity, dtype=torch.int32, device=q.device)
    sparse_attention.LOWERINGS[SPARSE].run(
        q,
        kv_cache,
        every_key.expand(q.shape[0], -1),
        softmax_scale,
        cache_format,
        topk_length=key_lens,
        block_table=block_table,
        req_id_per_token=req_id_per_token,
        out=out,
        lse=lse,
    )


LOWERINGS = {"paged_attention": Lowering(paged_attention, paged_reason)}
