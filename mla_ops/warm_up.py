"""Compiling and loading, before a capture, every kernel that a configuration will launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .formats import LATENT_DIM, allocate_cache, get_format
from .metadata import StepMetadata
from .ops import (
    concat_and_cache,
    convert_req_index_to_global_index,
    filter_prefill_indices,
    gather_cache,
    merge_attention_states,
    paged_sparse_attention,
)


def warmup(
    *,
    cache_format: str,
    num_heads: int,
    topk: int,
    num_tokens: Sequence[int],
    head_dim: int = 576,
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    with_sink: bool = False,
    device: torch.device | str = "cuda",
) -> None:
    """Runs every op of a decode or prefill step once on small caches, so that nothing compiles during a capture.

    A capture must not compile or load a kernel, and a serving process should not do it under its first request. Kernels
    are specialised on dtypes, format, head count and the tile that the token count asks for, never on token counts,
    lengths or table widths themselves: one call covers them all.

    Args:
        cache_format: format of the latent cache.
        num_heads: query heads on this device.
        topk: keys chosen for a token.
        num_tokens: token counts of the steps to come (decode batch sizes, prefill chunk); each tile that they select is
            compiled.
        head_dim: 576 or 512.
        block_size: tokens a cache block.
        dtype: dtype of q and of the tokens written.
        with_sink: whether attention gets `attn_sink`.
        device: where to run.
    """
    device = torch.device(device)
    latent_dim = min(head_dim, LATENT_DIM)
    kv_cache = allocate_cache(cache_format, 2, block_size, head_dim=head_dim, device=device)
    metadata = StepMetadata.allocate(
        max_num_tokens=1,
        max_num_requests=1,
        max_blocks_per_request=2,
        block_size=block_size,
        index_topk=topk,
        device=device,
    )

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    query_start_loc, seq_lens, block_table = int32(0, 1), int32(1), int32(0, 1).view(1, 2)
    metadata.build(query_start_loc, seq_lens, block_table)
    token = torch.zeros(1, head_dim, dtype=dtype, device=device)
    concat_and_cache(token[:, :latent_dim], token[:, latent_dim:], kv_cache, metadata.slot_mapping, cache_format)
    gather_cache(kv_cache, block_table, seq_lens, query_start_loc, 1, cache_format)

    attn_sink = torch.zeros(num_heads, device=device) if with_sink else None
    query_dtype = dtype if get_format(cache_format).quantized else kv_cache.dtype
    for count in sorted(set(num_tokens)):
        q = torch.zeros(count, num_heads, head_dim, dtype=query_dtype, device=device)
        indices = torch.full((count, topk), -1, dtype=torch.int32, device=device)
        lengths = torch.zeros(count, dtype=torch.int32, device=device)
        convert_req_index_to_global_index(lengths, block_table, indices, block_size)
        convert_req_index_to_global_index(lengths, block_table, indices, block_size, compact=True)
        filter_prefill_indices(indices, lengths)
        for table, requests in ((None, None), (block_table, lengths)):
            for topk_length in (None, lengths):
                out, lse = paged_sparse_attention(
                    q,
                    kv_cache,
                    indices,
                    576**-0.5,
                    cache_format,
                    topk_length=topk_length,
                    attn_sink=attn_sink,
                    block_table=table,
                    req_id_per_token=requests,
                )
        merge_attention_states(out, lse, out, lse)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
