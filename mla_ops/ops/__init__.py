"""The public functions over `torch.ops.mla.*`: typed, documented, traceable."""

from .cache import concat_and_cache, gather_cache
from .chunked_context import ContextChunks, chunked_prefill_attention, plan_context_chunks
from .compressor import compress_and_cache
from .dense_attention import choose_prefill, paged_attention, prefill_attention
from .index import (
    combine_topk_swa_indices,
    compressed_indices,
    compute_global_topk_indices_and_lens,
    convert_req_index_to_global_index,
    filter_prefill_indices,
    sliding_window_indices,
)
from .indexer import (
    gather_index_cache,
    indexer_logits,
    merge_topk,
    paged_indexer_logits,
    quantize_index_query,
    select_flat_keys,
    select_keys,
    topk_indices,
    write_index_cache,
)
from .merge import merge_attention_states, merge_stacked_attention_states
from .sparse_attention import paged_sparse_attention, sparse_attention
from .step_metadata import build_compressed_metadata, build_step_metadata

__all__ = [
    "ContextChunks",
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
    "filter_prefill_indices",
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
    "write_index_cache",
]
