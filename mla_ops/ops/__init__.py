"""The public functions over `torch.ops.mla.*`: typed, documented, traceable."""

from .cache import concat_and_cache, gather_cache
from .compressor import compress_and_cache
from .index import (
    combine_topk_swa_indices,
    compressed_indices,
    compute_global_topk_indices_and_lens,
    convert_req_index_to_global_index,
    filter_prefill_indices,
    sliding_window_indices,
)
from .merge import merge_attention_states
from .plan import build_compressed_metadata, build_step_metadata
from .sparse_attention import paged_sparse_attention, sparse_attention

__all__ = [
    "build_compressed_metadata",
    "build_step_metadata",
    "combine_topk_swa_indices",
    "compress_and_cache",
    "compressed_indices",
    "compute_global_topk_indices_and_lens",
    "concat_and_cache",
    "convert_req_index_to_global_index",
    "filter_prefill_indices",
    "gather_cache",
    "merge_attention_states",
    "paged_sparse_attention",
    "sliding_window_indices",
    "sparse_attention",
]
