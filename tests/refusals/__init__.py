"""Calls that break an op's contract: what is wrong, which exception, and words that its message must have.

To add one: change the arguments of `test_errors.complete_sample`, which are a legal call's, by name.
"""

from __future__ import annotations

from . import cache, compressor, dense_attention, index, indexer, merge, sparse_attention, step_metadata
from .common import Refusal

REFUSALS: list[Refusal] = [
    *cache.REFUSALS,
    *compressor.REFUSALS,
    *dense_attention.REFUSALS,
    *index.REFUSALS,
    *indexer.REFUSALS,
    *merge.REFUSALS,
    *step_metadata.REFUSALS,
    *sparse_attention.REFUSALS,
]
