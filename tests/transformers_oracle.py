"""Results of transformers' own models, and how near ours must be to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def assert_float32_equal(actual: torch.Tensor, expected: torch.Tensor, matmuls: int) -> None:
    """Equal to float32 rounding: the roundings of sums of up to 512 terms, over all matmuls of the depth, as a walk."""
    longest_sum = 512
    unit = torch.finfo(torch.float32).eps * math.sqrt(longest_sum * matmuls)
    torch.testing.assert_close(actual, expected, rtol=0, atol=unit * expected.abs().max().item())


def greedy_continuations(model: Any, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
    """Those of `model.generate`, of one prompt at a time."""
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
