"""The lightning indexer on SM90."""

from __future__ import annotations

from ...dispatch import Lowering
from .cache import write_index_cache, write_reason
from .indexer_logits import indexer_logits, logits_reason, paged_indexer_logits
from .select_keys import select_keys, select_keys_flat, select_reason
from .topk import topk_indices, topk_reason

LOWERINGS = {
    "write_index_cache": Lowering(write_index_cache, write_reason),
    "indexer_logits": Lowering(indexer_logits, logits_reason),
    "paged_indexer_logits": Lowering(paged_indexer_logits, logits_reason),
    "select_keys": Lowering(select_keys, select_reason),
    "select_keys.flat": Lowering(select_keys_flat, select_reason),
    "topk_indices": Lowering(topk_indices, topk_reason),
}
