"""Refusals of the ops of `mla_ops/ops/indexer.py`."""

from __future__ import annotations

import torch

from .common import Refusal, narrower

REFUSALS: list[Refusal] = [
    ("write_index_cache", "keys too narrow", narrower("k", 1), ValueError, ("k must", "head_dim=128", "got [5, 127]")),
    (
        "write_index_cache",
        "a format of latents",
        lambda g: {"cache_format": "fp8_ds_mla"},
        ValueError,
        ("index_cache of cache_format 'fp8_ds_mla'", "656"),
    ),
    (
        "write_index_cache",
        "rows of latents",
        lambda g: {"index_cache": torch.zeros(5, 4, 576, dtype=torch.bfloat16), "cache_format": "bf16"},
        ValueError,
        ("keys of width 128", "got 576"),
    ),
    (
        "write_index_cache",
        "blocks that are not on 16 bytes",
        lambda g: {"index_cache": torch.zeros(5, 3, 132, dtype=torch.uint8)},
        ValueError,
        ("16 bytes", "stride(0) of 396"),
    ),
    (
        "write_index_cache",
        "blocks of no size",
        lambda g: {"index_cache": torch.zeros(5, 544, dtype=torch.uint8)},
        ValueError,
        ("ceil(132 * block_size / 16) * 16", "[5, 544]"),
    ),
    ("gather_index_cache", "rows below zero", lambda g: {"num_rows": -1}, ValueError, ("num_rows", "got -1")),
    ("gather_index_cache", "too few starts", narrower("cu_seq_lens"), ValueError, ("cu_seq_lens", "=3", "got [2]")),
    ("quantize_index_query", "other heads", narrower("weights", 1), ValueError, ("weights", "num_heads=3", "[5, 2]")),
    ("indexer_logits", "keys of another dtype", lambda g: {"k": g["k"].half()}, TypeError, ("k must", "float8_e4m3fn")),
    ("indexer_logits", "too few ends", narrower("row_ends"), ValueError, ("row_ends", "num_tokens=5", "got [4]")),
    ("indexer_logits", "too few scales", narrower("k_scale"), ValueError, ("k_scale", "num_kv=11", "got [10]")),
    ("paged_indexer_logits", "a length below zero", lambda g: {"max_length": -3}, ValueError, ("max_length", "-3")),
    (
        "paged_indexer_logits",
        "queries that do not go with the cache",
        lambda g: {"q": g["q"].bfloat16()},
        TypeError,
        ("q must be torch.float8_e4m3fn", "got torch.bfloat16"),
    ),
    ("topk_indices", "none wanted", lambda g: {"topk": 0}, ValueError, ("topk must be at least 1", "got 0")),
    ("topk_indices", "too many wanted", lambda g: {"topk": 4097}, ValueError, ("topk must be at most 4096", "4097")),
    ("topk_indices", "a table alone", lambda g: {"req_id_per_token": None}, ValueError, ("block_table needs req_id",)),
    ("topk_indices", "no block size", lambda g: {"block_size": 0}, ValueError, ("block_size", "got 0")),
    ("select_keys", "none wanted", lambda g: {"topk": 0}, ValueError, ("topk must be at least 1", "got 0")),
    ("select_keys", "other tokens", narrower("lengths"), ValueError, ("lengths", "num_tokens=5", "got [4]")),
    ("select_keys.flat", "too many wanted", lambda g: {"topk": 9999}, ValueError, ("topk", "4096", "9999")),
    ("merge_topk", "other candidates", narrower("indices", 1), ValueError, ("indices", "=8", "got [3, 7]")),
    (
        "paged_attention",
        "a format of index keys",
        lambda g: {"cache_format": "fp8_index"},
        ValueError,
        ("'fp8_index' holds index keys", "which this op does not take"),
    ),
]
