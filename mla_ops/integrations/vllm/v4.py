"""DeepSeek-V4's attention in vLLM: the methods `_forward_decode` and `_forward_prefill` of its layer for Hopper.

vLLM takes V4's attention from no backend, so `MLA_OPS_VLLM=v4` puts these in the place of the layer's own. Both are one
launch over the two paged caches, window and compressed: a prefill gathers nothing into a workspace, and is not cut into
chunks of requests. vLLM's metadata is read as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention as Layer

from ... import ops  # noqa: F401  registers the ops

FORMAT = "fp8_ds_mla_v4"
HEADS = (16, 32, 64, 128)  # vLLM's layers give so many to its kernels before and behind attention


def install() -> None:
    """Takes the place of the layer's methods. Layers of DeepSeek-V4.1 and of other GPUs are other classes."""
    Layer._forward_decode = forward_decode
    Layer._forward_prefill = forward_prefill
    Layer.get_padded_num_q_heads = classmethod(lambda cls, num_heads: padded_heads(num_heads))


def padded_heads(num_heads: int) -> int:
    """Heads of the buffers of queries and results. Attention takes any number."""
    fitting = [heads for heads in HEADS if heads >= num_heads]
    if not fitting:
        raise ValueError(f"mla_ops: V4's attention has up to {HEADS[-1]} heads a rank, got {num_heads}")
    return fitting[0]


def forward_decode(
    layer: Any,
    q: torch.Tensor,
    kv_cache: torch.Tensor | None,
    swa_metadata: Any,
    attn_metadata: Any,
    swa_only: bool,
    output: torch.Tensor,
) -> None:
    """Attention of the tokens of decodes, which a step has first.

    Args:
        layer: vLLM's.
        q: `[num_decode_tokens, num_heads, 512]`.
        kv_cache: of compressed keys; None in a layer that has the window only.
        swa_metadata: of the window.
        attn_metadata: of the compressed keys.
        swa_only: whether the layer has the window only.
        output: as `q`; written.
    """
    tokens = slice(0, swa_metadata.num_decode_tokens)
    indices, lens = swa_metadata.decode_swa_indices, swa_metadata.decode_swa_lens
    chosen, chosen_lens = None, None
    if not swa_only and layer.compress_ratio != 4:  # slots already
        chosen = attn_metadata.c128a_global_decode_topk_indices
        chosen_lens = attn_metadata.c128a_decode_topk_lens
    _attend(layer, q, tokens, indices, lens, kv_cache, swa_metadata, attn_metadata, chosen, chosen_lens, output)


def forward_prefill(
    layer: Any,
    q: torch.Tensor,
    positions: torch.Tensor,
    compressed_k_cache: torch.Tensor | None,
    swa_k_cache: torch.Tensor,
    output: torch.Tensor,
    attn_metadata: Any,
    swa_metadata: Any,
) -> None:
    """Attention of the tokens of prefills, which come behind those of decodes; arguments as in `forward_decode`."""
    first = swa_metadata.num_decode_tokens
    tokens = slice(first, first + swa_metadata.num_prefill_tokens)
    indices, lens = swa_metadata.prefill_swa_indices, swa_metadata.prefill_swa_lens
    _attend(layer, q, tokens, indices, lens, compressed_k_cache, swa_metadata, attn_metadata, None, None, output)


def _attend(
    layer: Any,
    q: torch.Tensor,
    tokens: slice,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    compressed: torch.Tensor | None,
    swa_metadata: Any,
    attn_metadata: Any,
    slots: torch.Tensor | None,
    lens: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """Attends to the window, and to compressed keys: `slots`, else positions in the request, which are translated."""
    num_tokens = tokens.stop - tokens.start
    window = layer.swa_cache_layer.kv_cache
    lse = torch.empty(num_tokens, q.shape[1], dtype=torch.float32, device=q.device)
    queries, results = q[:num_tokens], {"out": output[:num_tokens], "lse": lse}
    common = (queries, window, swa_indices.reshape(num_tokens, -1), layer.scale, FORMAT)
    options = {"topk_length": swa_lens[:num_tokens], "attn_sink": layer.attn_sink}
    options["deterministic"] = bool(envs.VLLM_BATCH_INVARIANT)
    if compressed is None or attn_metadata is None:
        torch.ops.mla.paged_sparse_attention.out(*common, **options, **results)
        return
    if slots is None:
        if layer.compress_ratio == 4:
            slots = layer.topk_indices_buffer[tokens]
        else:
            slots = attn_metadata.c128a_prefill_topk_indices
        requests = swa_metadata.token_to_req_indices[tokens]
        # padding is of the first request, by its number
        options["req_id_per_token"] = torch.where(swa_metadata.is_valid_token[tokens], requests, -1)
        options["extra_block_table"] = attn_metadata.block_table
    else:
        options["extra_topk_length"] = lens
    torch.ops.mla.paged_sparse_attention.extra_out(
        *common, compressed, slots.reshape(num_tokens, -1), FORMAT, **options, **results
    )
