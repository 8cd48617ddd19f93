"""Refusals of the ops of `mla_ops/ops/sparse_attention.py`."""

from __future__ import annotations

import torch

from mla_ops.formats import allocate_cache

from .common import HALVES, Refusal, narrower

REFUSALS: list[Refusal] = [
    ("paged_sparse_attention", "unknown format", lambda g: {"cache_format": "bf17"}, ValueError, ("got 'bf17'",)),
    (
        "paged_sparse_attention",
        "head dim of neither kind",
        lambda g: {"q": g["q"][:, :, :128].contiguous()},
        ValueError,
        ("q must", "576 or 512", "[5, 3, 128]"),
    ),
    *(("paged_sparse_attention", *refusal) for refusal in HALVES),
    (
        "paged_sparse_attention",
        "a cache of index keys",
        lambda g: {"kv_cache": allocate_cache("bf16", 5, 4, head_dim=128)},
        ValueError,
        ("kv_cache are 128 wide",),
    ),
    (
        "paged_sparse_attention",
        "no head",
        lambda g: {"q": g["q"][:, :0]},
        ValueError,
        ("1 to 128 heads", "got 0"),
    ),
    (
        "paged_sparse_attention",
        "too many heads",
        lambda g: {"q": torch.zeros(5, 129, 576, dtype=torch.bfloat16)},
        ValueError,
        ("1 to 128 heads", "got 129"),
    ),
    ("paged_sparse_attention", "other tokens", narrower("indices"), ValueError, ("indices", "=5", "got [4, 6]")),
    ("paged_sparse_attention", "other lengths", narrower("topk_length"), ValueError, ("topk_length", "=5", "got [4]")),
    ("paged_sparse_attention", "other heads", narrower("attn_sink"), ValueError, ("attn_sink", "=3", "got [2]")),
    (
        "paged_sparse_attention",
        "other requests",
        narrower("req_id_per_token"),
        ValueError,
        ("req_id_per_token", "=5", "got [4]"),
    ),
    (
        "paged_sparse_attention",
        "a block table alone",
        lambda g: {"req_id_per_token": None},
        ValueError,
        ("block_table and req_id_per_token go together", "got block_table without req_id_per_token"),
    ),
    (
        "paged_sparse_attention",
        "request ids alone",
        lambda g: {"block_table": None},
        ValueError,
        ("got req_id_per_token without block_table",),
    ),
    (
        "paged_sparse_attention",
        "queries of another dtype than plain keys",
        lambda g: {"q": g["q"].half()},
        TypeError,
        ("q must be torch.bfloat16", "got torch.float16"),
    ),
    (
        "paged_sparse_attention.extra",
        "unknown format of the extra cache",
        lambda g: {"extra_cache_format": "v4"},
        ValueError,
        ("extra: extra_cache_format must be one of", "got 'v4'"),
    ),
    (
        "paged_sparse_attention.extra",
        "a format of index keys for the extra cache",
        lambda g: {"extra_cache_format": "fp8_index"},
        ValueError,
        ("extra: extra_cache_format 'fp8_index' holds index keys", "expected one of"),
    ),
    (
        "paged_sparse_attention.extra",
        "extra keys of another width",
        lambda g: {"extra_kv_cache": allocate_cache("fp8_ds_mla", 5, 4), "extra_cache_format": "fp8_ds_mla"},
        ValueError,
        ("q is 512 wide", "extra_kv_cache are 576 wide"),
    ),
    (
        "paged_sparse_attention.extra",
        "extra keys of another dtype",
        lambda g: {"extra_cache_format": "bf16"},
        TypeError,
        ("extra_kv_cache of extra_cache_format 'bf16'", "torch.bfloat16", "got torch.uint8"),
    ),
    (
        "paged_sparse_attention.extra",
        "other tokens in the extra cache",
        narrower("extra_indices"),
        ValueError,
        ("extra_indices", "=5", "got [4, 3]"),
    ),
    (
        "paged_sparse_attention.extra",
        "other lengths in the extra cache",
        narrower("extra_topk_length"),
        ValueError,
        ("extra_topk_length", "=5", "got [4]"),
    ),
    (
        "paged_sparse_attention.extra",
        "block tables without requests",
        lambda g: {"req_id_per_token": None, "block_table": None},
        ValueError,
        ("go together with req_id_per_token", "got extra_block_table without it"),
    ),
    (
        "paged_sparse_attention.extra",
        "requests without a block table",
        lambda g: {"extra_block_table": None, "block_table": None},
        ValueError,
        ("go together with req_id_per_token", "got req_id_per_token without either"),
    ),
    (
        "sparse_attention",
        "keys of another dtype",
        lambda g: {"kv": g["kv"].half()},
        TypeError,
        ("kv must be torch.bfloat16", "got torch.float16"),
    ),
    ("sparse_attention", "narrower keys", narrower("kv", 1), ValueError, ("kv must", "head_dim=576", "575]")),
    ("sparse_attention", "other tokens", narrower("indices"), ValueError, ("indices", "=5", "got [4, 6]")),
]
