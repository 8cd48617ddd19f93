"""Every kernel of this folder: what a wheel has machine code of."""

from __future__ import annotations

from . import cache, indexer_logits, launch, merge_parts, prefill_attention, topk
from .launch import Kernel


def every_kernel() -> list[Kernel]:
    """Each once."""
    attention = [kernel for keys in launch.KERNELS.values() for kernel in keys.kernels()]
    indexer = indexer_logits.kernels(), topk.KERNELS
    merges = [launch.merge_of_units(quantized) for quantized in (False, True)]
    others = merges, merge_parts.kernels(), prefill_attention.kernels(), *indexer
    return [*attention, *(kernel for each in others for kernel in each), *cache.KERNELS.values()]
