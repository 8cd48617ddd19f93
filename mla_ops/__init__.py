"""Kernels of sparse multi-head latent attention as PyTorch operators, `torch.ops.mla.*`.

Importing this registers every op. It imports torch and nothing else; kernels are imported by the first call that
needs them.
"""

from . import dispatch, formats
from .formats import allocate_cache
from .metadata import CompressedMetadata, StepMetadata, V4StepMetadata
from .ops import (
    ContextChunks,
    build_compressed_metadata,
    build_step_metadata,
    choose_prefill,
    chunked_prefill_attention,
    combine_topk_swa_indices,
    compress_and_cache,
    compressed_indices,
    compute_global_topk_indices_and_lens,
    concat_and_cache,
    convert_req_index_to_global_index,
    filter_prefill_indices,
    gather_cache,
    gather_index_cache,
    indexer_logits,
    merge_attention_states,
    merge_stacked_attention_states,
    merge_topk,
    paged_attention,
    paged_indexer_logits,
    paged_sparse_attention,
    plan_context_chunks,
    prefill_attention,
    quantize_index_query,
    select_flat_keys,
    select_keys,
    sliding_window_indices,
    sparse_attention,
    topk_indices,
    write_index_cache,
)
from .warm_up import warmup

__version__ = "0.1.0"

__all__ = [
    "CompressedMetadata",
    "ContextChunks",
    "StepMetadata",
    "V4StepMetadata",
    "allocate_cache",
    "build_compressed_metadata",
    "build_step_metadata",
    "choose_prefill",
    "chunked_prefill_attention",
    "combine_topk_swa_indices",
    "compress_and_cache",
    "compressed_indices",
    "compute_global_topk_indices_and_lens",
    "concat_and_cache",
    "convert_req_index_to_global_index",
    "dispatch",
    "filter_prefill_indices",
    "formats",
    "gather_cache",
    "gather_index_cache",
    "indexer_logits",
    "merge_attention_states",
    "merge_stacked_attention_states",
    "merge_topk",
    "paged_attention",
    "paged_indexer_logits",
    "paged_sparse_attention",
    "plan_context_chunks",
    "prefill_attention",
    "quantize_index_query",
    "select_flat_keys",
    "select_keys",
    "sliding_window_indices",
    "sparse_attention",
    "topk_indices",
    "warmup",
    "write_index_cache",
]
