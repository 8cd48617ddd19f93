"""Refusals of the ops of `mla_ops/ops/merge.py`."""

from __future__ import annotations

from .common import Refusal, narrower

REFUSALS: list[Refusal] = [
    ("merge_attention_states.stacked", "other parts", narrower("lses"), ValueError, ("lses", "num_parts=4", "got [3,")),
    ("merge_attention_states.stacked", "other heads", narrower("lses", 2), ValueError, ("lses", "num_heads=3")),
    ("merge_attention_states", "other tokens", narrower("out_b"), ValueError, ("out_b", "=5", "got [4, 3, 512]")),
    ("merge_attention_states", "other heads", narrower("lse_b", 1), ValueError, ("lse_b", "num_heads=3", "got [5, 2]")),
    (
        "merge_attention_states",
        "halves of two dtypes",
        lambda g: {"out_b": g["out_b"].half()},
        TypeError,
        ("out_b must be torch.bfloat16", "got torch.float16"),
    ),
]
