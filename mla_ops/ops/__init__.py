"""The public functions over `torch.ops.mla.*`: typed, documented, traceable."""

from .cache import concat_and_cache, gather_cache
from .index import convert_req_index_to_global_index, filter_prefill_indices
from .merge import merge_attention_states
from .plan import build_step_metadata
from .sparse_attention import paged_sparse_attention, sparse_attention

__all__ = [
    "build_step_metadata",
    "concat_and_cache",
    "convert_req_index_to_global_index",
    "filter_prefill_indices",
    "gather_cache",
    "merge_attention_states",
    "paged_sparse_attention",
    "sparse_attention",
]
