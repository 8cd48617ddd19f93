"""Refusals of the ops of `mla_ops/ops/compressor.py`."""

from __future__ import annotations

import torch

from mla_ops.formats import allocate_cache

from .common import Refusal, narrower

REFUSALS: list[Refusal] = [
    ("compress_and_cache", "fewer scores", narrower("score"), ValueError, ("score", "num_tokens=5", "got [4, 512]")),
    ("compress_and_cache", "narrower scores", narrower("score", 1), ValueError, ("score", "width=512", "got [5, 511]")),
    (
        "compress_and_cache",
        "a width of neither one series nor two",
        lambda g: {name: torch.zeros(5, 768) for name in ("kv", "score")} | {"position_bias": torch.zeros(3, 768)},
        ValueError,
        ("kv must be 512 wide, or 1024 with overlap", "got 768"),
    ),
    (
        "compress_and_cache",
        "no ratio",
        lambda g: {"position_bias": g["position_bias"][:0]},
        ValueError,
        ("at least 1",),
    ),
    (
        "compress_and_cache",
        "entries of a width that no model has",
        lambda g: {"norm_weight": torch.ones(256)},
        ValueError,
        ("norm_weight", "[512] or [128]", "got [256]"),
    ),
    (
        "compress_and_cache",
        "a cache of other entries",
        lambda g: {"kv_cache": allocate_cache("bf16", 5, 4, head_dim=128)},
        ValueError,
        ("kv_cache", "width 128", "norm_weight has 512"),
    ),
    (
        "compress_and_cache",
        "a format without rows of 512",
        lambda g: {"cache_format": "fp8_ds_mla", "kv_cache": allocate_cache("fp8_ds_mla", 5, 4)},
        ValueError,
        ("'fp8_ds_mla'", "width 576", "norm_weight has 512"),
    ),
    (
        "compress_and_cache",
        "a group that the state cache has no room for",
        lambda g: {"state_block_table": g["state_block_table"][:, :1]},
        ValueError,
        ("state_block_table", "room for the 3 tokens", "got 1 blocks of 2"),
    ),
    (
        "compress_and_cache",
        "states apart",
        lambda g: {"state_cache": torch.zeros(5, 2, 1028)[:, :, :1024]},
        ValueError,
        ("state_cache.stride(1)", "1024", "got 1028"),
    ),
    (
        "compress_and_cache",
        "states off their alignment",
        lambda g: {"state_cache": torch.zeros(5, 2 * 1024 + 1)[:, :-1].unflatten(1, (2, 1024))},
        ValueError,
        ("state_cache", "16 bytes", "stride(0) of 2049"),
    ),
    (
        "compress_and_cache",
        "states that start off their alignment",
        lambda g: {"state_cache": torch.zeros(5 * 2 * 1024 + 1)[1:].view(5, 2, 1024)},
        ValueError,
        ("state_cache", "16 bytes", "storage offset of 1"),
    ),
    ("compress_and_cache", "narrower angles", narrower("cos_sin", 1), ValueError, ("cos_sin", "=64", "got [9, 63]")),
    ("compress_and_cache", "other tokens", narrower("slot_mapping"), ValueError, ("slot_mapping", "=5", "got [4]")),
]
