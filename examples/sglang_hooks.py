"""SGLang's sparse attention by `mla_ops`: a plugin of two hooks.

Put it into a package with the entry point `sglang.srt.plugins`, `mla_ops = "that_package:register"`, and start SGLang
with its FlashMLA backends (`--dsa-prefill-backend flashmla_sparse --dsa-decode-backend flashmla_kv`).
"""

from __future__ import annotations

from typing import Any

import torch

import mla_ops

BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"


def forward_flashmla_kv(
    self: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    page_table_1: torch.Tensor,
) -> torch.Tensor:
    """Decode: heads as they are, no plan, and a bfloat16 cache is read as it is."""
    q = q_all.view(-1, layer.tp_q_head_num, layer.head_dim)
    cache, cache_format = kv_cache, "bf16"
    if kv_cache.element_size() == 1:
        cache, cache_format = kv_cache.view(torch.uint8), "fp8_ds_mla"
    width = 656 if cache_format == "fp8_ds_mla" else layer.head_dim
    out, _ = mla_ops.paged_sparse_attention(
        q, cache.view(-1, self.physical_page_size, width), page_table_1, sm_scale, cache_format
    )
    return out.unsqueeze(1)


def forward_flashmla_sparse(
    self: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Prefill over bfloat16 keys, flat or a cache seen as rows. -1 in the indices is enough: no lengths are needed."""
    keys = kv_cache.view(-1, q_all.shape[2])
    return mla_ops.sparse_attention(q_all, keys, page_table_1, sm_scale, attn_sink=attn_sink)[0]


HOOKS = {
    f"{BACKEND}._forward_flashmla_kv": forward_flashmla_kv,
    f"{BACKEND}._forward_flashmla_sparse": forward_flashmla_sparse,
}


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.REPLACE)
