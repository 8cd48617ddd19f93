"""Refusals of the ops of `mla_ops/ops/dense_attention.py`."""

from __future__ import annotations

import torch

from .common import HALVES, Refusal, narrower

REFUSALS: list[Refusal] = [
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
    *(("paged_attention", *refusal) for refusal in HALVES),
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
]
