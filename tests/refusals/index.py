"""Refusals of the ops of `mla_ops/ops/index.py`."""

from __future__ import annotations

from .common import Refusal, narrower

REFUSALS: list[Refusal] = [
    (
        "convert_req_index_to_global_index",
        "zero block size",
        lambda g: {"block_size": 0},
        ValueError,
        ("block_size", "at least 1", "got 0"),
    ),
    (
        "convert_req_index_to_global_index",
        "negative block size",
        lambda g: {"block_size": -64},
        ValueError,
        ("block_size", "got -64"),
    ),
    (
        "convert_req_index_to_global_index",
        "negative number of blocks",
        lambda g: {"num_blocks": -1},
        ValueError,
        ("num_blocks", "got -1"),
    ),
    (
        "convert_req_index_to_global_index",
        "other tokens",
        narrower("token_indices"),
        ValueError,
        ("req_id_per_token", "num_tokens=4", "got [5]"),
    ),
    ("filter_prefill_indices", "other tokens", narrower("context_lens"), ValueError, ("context_lens", "=5", "got [4]")),
    *(
        (
            op_name,
            f"{size} too small",
            lambda g, size=size, value=value: {size: value},
            ValueError,
            (size, f"got {value}"),
        )
        for op_name, sizes in {
            "sliding_window_indices": {"block_size": 0, "window": -1, "num_blocks": -1},
            "compressed_indices": {"block_size": 0, "compress_ratio": 0, "width": -2, "num_blocks": -1},
            "compute_global_topk_indices_and_lens": {"block_size": -64, "num_blocks": -1},
            "combine_topk_swa_indices": {"window": -1, "compress_ratio": 0, "window_offset": -3},
        }.items()
        for size, value in sizes.items()
    ),
    *(
        (op_name, f"other tokens of {name}", narrower(name), ValueError, (name, "=5", "got [4]"))
        for op_name, names in {
            "sliding_window_indices": ("req_id_per_token",),
            "compressed_indices": ("req_id_per_token",),
            "compute_global_topk_indices_and_lens": ("req_id_per_token",),
            "combine_topk_swa_indices": ("positions", "req_id_per_token"),
        }.items()
        for name in names
    ),
    (
        "combine_topk_swa_indices",
        "other requests",
        narrower("gather_lens"),
        ValueError,
        ("gather_lens", "num_requests=2", "got [1]"),
    ),
    (
        "combine_topk_swa_indices",
        "a window past the request's rows",
        lambda g: {"window_offset": 17},
        ValueError,
        ("window_offset", "request_stride, 16", "got 17"),
    ),
]
