"""Ops without their kernels: schema, preconditions, fake kernel. Importing a family registers its ops."""

from . import cache, compressor, dense_attention, index, indexer, merge, sparse_attention, step_metadata

__all__ = ["cache", "compressor", "dense_attention", "index", "indexer", "merge", "sparse_attention", "step_metadata"]
