"""The lightning indexer on SM90."""

from __future__ import annotations

from ...dispatch import Lowering
from .indexer_logits import indexer_logits, logits_reason, paged_indexer_logits
from .topk import topk_indices, topk_reason

LOWERINGS = {
    "indexer_logits": Lowering(indexer_logits, logits_reason),
    "paged_indexer_logits": Lowering(paged_indexer_logits, logits_reason),
    "topk_indices": Lowering(topk_indices, topk_reason),
}
