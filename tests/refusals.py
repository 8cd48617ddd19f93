"""Calls that break an op's contract: what is wrong, which exception, and words that its message must have.

To add one: change the arguments of `test_errors.complete_sample`, which are a legal call's, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_ops.formats import allocate_cache

INT32 = torch.int32


def narrower(name: str, dim: int = 0) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """One element less of `name` along `dim`."""
    return lambda given: {name: given[name].narrow(dim, 0, given[name].shape[dim] - 1).contiguous()}


# op, what is wrong, the changed arguments, exception, words of the message
REFUSALS: list[tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]], type[Exception], tuple[str, ...]]] = [
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
        ("token_indices", "num_tokens=5", "got [4, 6]"),
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
            "build_compressed_metadata": {"block_size": 0, "compress_ratio": -4},
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
            "build_compressed_metadata": ("req_id_per_token", "slot_mapping", "compressed_lens"),
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
    ("paged_sparse_attention", "unknown format", lambda g: {"cache_format": "bf17"}, ValueError, ("got 'bf17'",)),
    (
        "paged_sparse_attention",
        "head dim of neither kind",
        lambda g: {"q": g["q"][:, :, :128].contiguous()},
        ValueError,
        ("q must", "576 or 512", "[5, 3, 128]"),
    ),
    (
        "paged_sparse_attention",
        "queries narrower than keys",
        lambda g: {"q": g["q"][:, :, :512].contiguous()},
        ValueError,
        ("q is 512 wide", "576"),
    ),
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
    (
        "paged_sparse_attention",
        "queries of 576 over V4",
        lambda g: {"kv_cache": allocate_cache("fp8_ds_mla_v4", 5, 4), "cache_format": "fp8_ds_mla_v4"},
        ValueError,
        ("q is 576 wide", "kv_cache are 512 wide"),
    ),
    (
        "paged_sparse_attention.extra",
        "unknown format of the extra cache",
        lambda g: {"extra_cache_format": "v4"},
        ValueError,
        ("cache_format must be one of", "got 'v4'"),
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
        ("extra_kv_cache of cache_format 'bf16'", "torch.bfloat16", "got torch.uint8"),
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
    *(
        (op, what, lambda g, given=given: given, ValueError, words)
        for op in ("paged_sparse_attention", "paged_sparse_attention.extra")
        for what, given, words in (
            (
                "a schedule of fewer tokens",
                {"tile_scheduler_metadata": torch.zeros(2, 2, 2, dtype=INT32)},
                ("tile_scheduler_metadata has 4 slots for 5 tokens",),
            ),
            (
                "a deterministic schedule of fewer tokens",
                {"tile_scheduler_metadata": torch.zeros(4, 4, 2, dtype=INT32), "deterministic": True},
                ("tile_scheduler_metadata has 4 clusters for 5 tokens",),
            ),
            (
                "a schedule of another width",
                {"tile_scheduler_metadata": torch.zeros(5, 4, 1, dtype=INT32)},
                ("tile_scheduler_metadata", "got [5, 4, 1]"),
            ),
        )
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
    ("merge_attention_states.stacked", "other parts", narrower("lses"), ValueError, ("lses", "num_parts=4", "got [3,")),
    ("merge_attention_states.stacked", "other heads", narrower("lses", 2), ValueError, ("lses", "num_heads=3")),
    *(
        ("prefill_attention", what, change, ValueError, words)
        for what, change, words in (
            ("other head dims", narrower("k", 2), ("k must", "head_dim=192", "191]")),
            ("other keys than values", narrower("v"), ("v must", "num_kv=5", "got [4, 2, 128]")),
            ("heads that do not divide", lambda g: {"q": g["q"][:, :3]}, ("the 3 heads of q", "got 2")),
            ("no key head", lambda g: {"k": g["k"][:, :0], "v": g["v"][:, :0]}, ("heads of q", "got 0")),
            ("no head", lambda g: {"q": g["q"][:, :0]}, ("1 to 128 heads", "got 0")),
            (
                "heads too wide",
                lambda g: {"q": torch.zeros(5, 4, 264).bfloat16(), "k": torch.zeros(5, 2, 264).bfloat16()},
                ("heads of q", "1 to 256 wide", "got 264"),
            ),
            ("values of no width", lambda g: {"v": g["v"][:, :, :0]}, ("heads of v", "got 0")),
            ("other requests", narrower("cu_seqlens_k"), ("cu_seqlens_k", "num_requests+1=4", "got [3]")),
            (
                "no start",
                lambda g: {"cu_seqlens_q": g["cu_seqlens_q"][:0], "cu_seqlens_k": g["cu_seqlens_q"][:0]},
                ("cu_seqlens_q", "at least 1, got 0"),
            ),
            ("negative bound", lambda g: {"max_seqlen_k": -1}, ("max_seqlen_k", "got -1")),
            ("scale of zero", lambda g: {"softmax_scale": 0.0}, ("softmax_scale", "positive", "got 0.0")),
        )
    ),
    *(
        ("paged_attention", what, change, kind, words)
        for what, change, kind, words in (
            ("unknown format", lambda g: {"cache_format": "x"}, ValueError, ("cache_format", "got 'x'")),
            ("other tokens", narrower("key_lens"), ValueError, ("key_lens", "num_tokens=5", "got [4]")),
            ("other owners", narrower("req_id_per_token"), ValueError, ("req_id_per_token", "=5", "got [4]")),
            (
                "head dim of neither kind",
                lambda g: {"q": g["q"][:, :, :128].contiguous()},
                ValueError,
                ("q must", "576 or 512", "[5, 3, 128]"),
            ),
            (
                "queries narrower than keys",
                lambda g: {"q": g["q"][:, :, :512].contiguous()},
                ValueError,
                ("q is 512 wide", "576 wide"),
            ),
            (
                "too many heads",
                lambda g: {"q": torch.zeros(5, 129, 576, dtype=torch.bfloat16)},
                ValueError,
                ("1 to 128 heads", "got 129"),
            ),
            (
                "queries of another dtype than plain keys",
                lambda g: {"q": g["q"].half()},
                TypeError,
                ("q must be torch.bfloat16", "got torch.float16"),
            ),
        )
    ),
    ("merge_attention_states", "other tokens", narrower("out_b"), ValueError, ("out_b", "=5", "got [4, 3, 512]")),
    ("merge_attention_states", "other heads", narrower("lse_b", 1), ValueError, ("lse_b", "num_heads=3", "got [5, 2]")),
    (
        "merge_attention_states",
        "halves of two dtypes",
        lambda g: {"out_b": g["out_b"].half()},
        TypeError,
        ("out_b must be torch.bfloat16", "got torch.float16"),
    ),
    *(
        (
            "plan_sparse_attention",
            f"{size} too small",
            lambda g, s=size, v=value: {s: v},
            ValueError,
            (size, f"{value}"),
        )
        for size, value in {"topk": -1, "extra_topk": -2, "overhead": -1, "num_workers": 0}.items()
    ),
    (
        "plan_sparse_attention",
        "a cluster of another size",
        lambda g: {"tile_scheduler_metadata": torch.zeros(5, 3, 2, dtype=INT32)},
        ValueError,
        ("cluster_size of tile_scheduler_metadata", "(1, 2, 4, 8, 16)", "got 3"),
    ),
    (
        "plan_sparse_attention",
        "slots of another width",
        lambda g: {"tile_scheduler_metadata": torch.zeros(5, 4, 3, dtype=INT32)},
        ValueError,
        ("tile_scheduler_metadata", "got [5, 4, 3]"),
    ),
    (
        "plan_sparse_attention",
        "slots that are apart",
        lambda g: {"tile_scheduler_metadata": torch.zeros(5, 4, 4, dtype=INT32)[:, :, :2]},
        ValueError,
        ("tile_scheduler_metadata must be contiguous", "strides (16, 4, 1)"),
    ),
    (
        "plan_sparse_attention",
        "fewer slots than tokens",
        lambda g: {"tile_scheduler_metadata": torch.zeros(2, 2, 2, dtype=INT32)},
        ValueError,
        ("4 slots for 5 tokens",),
    ),
    (
        "plan_sparse_attention",
        "fewer clusters than tokens",
        lambda g: {"tile_scheduler_metadata": torch.zeros(4, 8, 2, dtype=INT32), "deterministic": True},
        ValueError,
        ("4 clusters for 5 tokens",),
    ),
    (
        "plan_sparse_attention",
        "other tokens in the extra cache",
        lambda g: {"extra_topk_length": g["topk_length"][1:]},
        ValueError,
        ("extra_topk_length", "=5", "got [4]"),
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
