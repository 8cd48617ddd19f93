"""Every kernel of this folder: what a wheel has machine code of."""

from __future__ import annotations

from . import cache, indexer_candidates, indexer_logits, launch, merge_parts, prefill_attention, topk
from .launch import Kernel


def every_kernel() -> list[Kernel]:
    """Each once."""
    attention = [kernel for keys in launch.KERNELS.values() for kernel in keys.kernels()]
    indexer = indexer_logits.kernels(), indexer_candidates.kernels(), topk.KERNELS
    others = merge_parts.kernels(), prefill_attention.kernels(), *indexer
    return [*attention, *(kernel for each in others for kernel in each), *cache.KERNELS.values()]
