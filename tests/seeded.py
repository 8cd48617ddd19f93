"""Tensors that are a function of a seed, the same in every process."""

from __future__ import annotations

import torch


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def int32(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(-1, high, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
