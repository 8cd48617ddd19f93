"""Kernels of sparse multi-head latent attention as PyTorch operators, `torch.ops.mla.*`.

Importing this registers every op. It imports torch and nothing else; kernels are imported by the first call that
needs them.
"""

from . import dispatch, formats
from .formats import allocate_cache
from .metadata import StepMetadata
from .ops import (
    build_step_metadata,
    concat_and_cache,
    convert_req_index_to_global_index,
    filter_prefill_indices,
    gather_cache,
    merge_attention_states,
    paged_sparse_attention,
    sparse_attention,
)
from .warm_up import warmup

__version__ = "0.1.0"

__all__ = [
    "StepMetadata",
    "allocate_cache",
    "build_step_metadata",
    "concat_and_cache",
    "convert_req_index_to_global_index",
    "dispatch",
    "filter_prefill_indices",
    "formats",
    "gather_cache",
    "merge_attention_states",
    "paged_sparse_attention",
    "sparse_attention",
    "warmup",
]
