"""Refusals of the ops of `mla_ops/ops/cache.py`."""

from __future__ import annotations

import torch

from mla_ops.formats import allocate_cache

from .common import Refusal, narrower

REFUSALS: list[Refusal] = [
    ("concat_and_cache", "unknown format", lambda g: {"cache_format": "fp9"}, ValueError, ("'bf16'", "got 'fp9'")),
    (
        "concat_and_cache",
        "format of another dtype",
        lambda g: {"cache_format": "fp8_ds_mla"},
        TypeError,
        ("kv_cache", "'fp8_ds_mla'", "torch.uint8", "got torch.bfloat16"),
    ),
    (
        "concat_and_cache",
        "row width",
        lambda g: {"kv_cache": torch.zeros(5, 4, 577, dtype=torch.bfloat16)},
        ValueError,
        ("kv_cache", "576 or 512", "got [5, 4, 577]"),
    ),
    ("concat_and_cache", "fewer k_pe than kv_c", narrower("k_pe"), ValueError, ("k_pe", "num_tokens=5", "got [4, 64]")),
    ("concat_and_cache", "keys narrower than rows", narrower("k_pe", 1), ValueError, ("576", "512 + 63")),
    (
        "concat_and_cache",
        "latent of a quantised row",
        lambda g: {
            "kv_cache": allocate_cache("fp8_ds_mla", 5, 4),
            "cache_format": "fp8_ds_mla",
            "kv_c": g["kv_c"][:, :448].contiguous(),
        },
        ValueError,
        ("kv_c", "512", "got 448"),
    ),
    (
        "concat_and_cache",
        "rows apart",
        lambda g: {"kv_cache": torch.zeros(5, 4, 592, dtype=torch.bfloat16)[:, :, :576]},
        ValueError,
        ("kv_cache.stride(1)", "576", "got 592"),
    ),
    (
        "concat_and_cache",
        "blocks off their alignment",
        lambda g: {"kv_cache": torch.zeros(5, 4 * 576 + 1, dtype=torch.bfloat16)[:, :-1].unflatten(1, (4, 576))},
        ValueError,
        ("kv_cache.stride(0)", "16 bytes", "2305"),
    ),
    (
        "concat_and_cache",
        "a block without slots",
        lambda g: {"kv_cache": g["kv_cache"][:, :0]},
        ValueError,
        ("kv_cache", "block_size", "got 0"),
    ),
    ("gather_cache", "unknown format", lambda g: {"cache_format": ""}, ValueError, ("cache_format", "got ''")),
    ("gather_cache", "negative number of rows", lambda g: {"num_rows": -1}, ValueError, ("num_rows", "got -1")),
    ("gather_cache", "negative offset", lambda g: {"offset": -3}, ValueError, ("offset", "got -3")),
    (
        "gather_cache",
        "starts without the end",
        narrower("cu_seq_lens"),
        ValueError,
        ("cu_seq_lens", "num_requests+1=3", "got [2]"),
    ),
    (
        "gather_cache",
        "other requests",
        narrower("block_table"),
        ValueError,
        ("block_table", "num_requests=2", "[1, 3]"),
    ),
    (
        "gather_cache",
        "other lengths",
        narrower("gather_lens"),
        ValueError,
        ("gather_lens", "num_requests=2", "got [1]"),
    ),
    (
        "concat_and_cache",
        "latent of V4",
        lambda g: {"kv_cache": allocate_cache("fp8_ds_mla_v4", 5, 4), "cache_format": "fp8_ds_mla_v4"},
        ValueError,
        ("kv_c must be 448 wide", "'fp8_ds_mla_v4'", "got 512"),
    ),
    (
        "concat_and_cache",
        "a block of V4 that is not padded",
        lambda g: {
            "kv_cache": torch.zeros(5, 584 * 64, dtype=torch.uint8),
            "cache_format": "fp8_ds_mla_v4",
            "kv_c": g["kv_c"][:, :448].contiguous(),
        },
        ValueError,
        ("kv_cache", "ceil(584 * block_size / 576) * 576", "got shape [5, 37376]"),
    ),
    (
        "gather_cache",
        "rows of V4",
        lambda g: {"kv_cache": torch.zeros(5, 4, 576, dtype=torch.uint8), "cache_format": "fp8_ds_mla_v4"},
        ValueError,
        ("[num_blocks, block_bytes] or [num_blocks, block_size, 584]", "got [5, 4, 576]"),
    ),
    (
        "gather_cache",
        "blocks of V4 over one another",
        lambda g: {
            "kv_cache": torch.zeros(9999, dtype=torch.uint8).as_strided((5, 4, 584), (1168, 584, 1)),
            "cache_format": "fp8_ds_mla_v4",
        },
        ValueError,
        ("blocks of kv_cache take 2336 bytes", "got kv_cache.stride(0) of 1168"),
    ),
    (
        "gather_cache",
        "blocks of V4 off their alignment",
        lambda g: {
            "kv_cache": torch.zeros(5, 3000, dtype=torch.uint8)[:, :2880].as_strided((4, 2880), (2900, 1)),
            "cache_format": "fp8_ds_mla_v4",
        },
        ValueError,
        ("kv_cache.stride(0)", "16 bytes", "2900"),
    ),
]
