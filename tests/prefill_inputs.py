"""Shared by the tests of dense prefill: inputs, and one call held against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attention_oracle
import dense_oracle
import torch


def starts(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)


def inputs(
    lens_q: Sequence[int],
    lens_k: Sequence[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    padding: int = 0,
) -> tuple[Any, ...]:
    """Arguments up to the scale, with `padding` rows of each tensor behind the last request."""

    def normal(rows: int, num_heads: int, dim: int) -> torch.Tensor:
        return torch.randn(rows + padding, num_heads, dim, device=device).to(dtype)

    q, k = normal(sum(lens_q), heads[0], dims[0]), normal(sum(lens_k), heads[1], dims[0])
    v = normal(sum(lens_k), heads[1], dims[1])
    lengths = starts(lens_q, device), starts(lens_k, device)
    return q, k, v, *lengths, max([0, *lens_q]), max([0, *lens_k]), dims[0] ** -0.5


def operand(lowering: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that probabilities are rounded to: nothing in the reference and in float32."""
    return None if lowering == "reference" or dtype == torch.float32 else dtype


def check(
    lowering: str, arguments: tuple[Any, ...], causal: bool, tokens: list[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of a call, or all, held against float64."""
    out, lse = torch.ops.mla.prefill_attention(*arguments, causal=causal)
    *tensors, _, _, scale = arguments
    rounded = operand(lowering, arguments[0].dtype)
    expected = dense_oracle.prefill(*tensors, scale, causal=causal, operand=rounded, tokens=tokens)
    attention_oracle.assert_close(out, lse, expected)
    return out, lse


def poison_behind(arguments: tuple[Any, ...], lens_q: Sequence[int], lens_k: Sequence[int]) -> None:
    """NaN in the rows behind the last request."""
    for tensor, lens in zip(arguments, (lens_q, lens_k, lens_k), strict=False):
        tensor[sum(lens) :] = math.nan
