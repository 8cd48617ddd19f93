"""The parts of the tables of refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_ops.formats import allocate_cache

INT32 = torch.int32

Arguments = dict[str, Any]
# op, what is wrong, the changed arguments, exception, words of the message
Refusal = tuple[str, str, Callable[[Arguments], Arguments], type[Exception], tuple[str, ...]]


def narrower(name: str, dim: int = 0) -> Callable[[Arguments], Arguments]:
    """One element less of `name` along `dim`."""
    return lambda given: {name: given[name].narrow(dim, 0, given[name].shape[dim] - 1).contiguous()}


def _whole(given: Arguments) -> torch.Tensor:
    return torch.cat((given["q"], given["q_rope"]), dim=-1)


# refusals of the ops that take queries in two halves
HALVES: list[tuple[str, Callable[[Arguments], Arguments], type[Exception], tuple[str, ...]]] = [
    ("queries narrower than keys", lambda g: {"q_rope": None}, ValueError, ("q is 512 wide", "576 wide")),
    (
        "whole queries beside RoPE dims",
        lambda g: {"q": _whole(g)},
        ValueError,
        ("q must be 512 wide beside q_rope", "got shape [5, 3, 576]"),
    ),
    ("other tokens of RoPE dims", narrower("q_rope"), ValueError, ("q_rope must", "num_tokens=5", "got [4, 3, 64]")),
    ("other heads of RoPE dims", narrower("q_rope", 1), ValueError, ("q_rope must", "num_heads=3", "got [5, 2, 64]")),
    ("fewer RoPE dims", narrower("q_rope", 2), ValueError, ("q_rope must", "rope_dim=64", "got [5, 3, 63]")),
    (
        "halves over V4",
        lambda g: {"kv_cache": allocate_cache("fp8_ds_mla_v4", 5, 4), "cache_format": "fp8_ds_mla_v4"},
        ValueError,
        ("q and q_rope are 576 wide", "kv_cache are 512 wide"),
    ),
    (
        "whole queries of 576 over V4",
        lambda g: {
            "q": _whole(g),
            "q_rope": None,
            "kv_cache": allocate_cache("fp8_ds_mla_v4", 5, 4),
            "cache_format": "fp8_ds_mla_v4",
        },
        ValueError,
        ("q is 576 wide", "kv_cache are 512 wide"),
    ),
]
