"""Refusals of the ops of `mla_ops/ops/step_metadata.py`."""

from __future__ import annotations

import torch

from .common import INT32, Refusal, narrower

REFUSALS: list[Refusal] = [
    *(
        (
            "build_compressed_metadata",
            f"{size} too small",
            lambda g, size=size, value=value: {size: value},
            ValueError,
            (size, f"got {value}"),
        )
        for size, value in {"block_size": 0, "compress_ratio": -4}.items()
    ),
    *(
        (
            "build_compressed_metadata",
            f"other tokens of {name}",
            narrower(name),
            ValueError,
            (name, "=5", "got [4]"),
        )
        for name in ("req_id_per_token", "slot_mapping", "compressed_lens")
    ),
    (
        "build_compressed_metadata",
        "more requests than the buffer holds",
        lambda g: {"block_table": torch.zeros(5, 3, dtype=INT32)},
        ValueError,
        ("5 requests", "room for 4"),
    ),
    (
        "build_compressed_metadata",
        "a wider block table than the buffer",
        lambda g: {"block_table": torch.zeros(2, 9, dtype=INT32)},
        ValueError,
        ("block_table is 9 blocks wide", "4"),
    ),
    ("build_step_metadata", "zero block size", lambda g: {"block_size": 0}, ValueError, ("block_size", "got 0")),
    ("build_step_metadata", "negative top k", lambda g: {"index_topk": -1}, ValueError, ("index_topk", "got -1")),
    (
        "build_step_metadata",
        "starts without the end",
        narrower("query_start_loc"),
        ValueError,
        ("query_start_loc", "num_requests+1=3", "got [2]"),
    ),
    (
        "build_step_metadata",
        "more requests than the buffers hold",
        lambda g: {
            "seq_lens": torch.ones(5, dtype=INT32),
            "query_start_loc": torch.arange(6, dtype=INT32),
            "block_table": torch.zeros(5, 3, dtype=INT32),
        },
        ValueError,
        ("5 requests", "room for 4"),
    ),
    (
        "build_step_metadata",
        "a wider block table than the buffer",
        lambda g: {"block_table": torch.zeros(2, 9, dtype=INT32)},
        ValueError,
        ("block_table is 9 blocks wide", "4"),
    ),
    (
        "build_step_metadata",
        "buffers of two lengths",
        narrower("key_lens"),
        ValueError,
        ("key_lens", "=12", "got [11]"),
    ),
]
