"""Memory for what CTAs leave that share all rows of a call evenly, `struct Parts` of parts.cuh."""

from __future__ import annotations

import torch

from ...formats import LATENT_DIM


def exchange(workers: int, head_tiles: int, num_heads: int, device: torch.device) -> torch.Tensor:
    """Room for two parts of each worker.

    Its first int32 tells whether the call's rows were shared so.
    """
    numbers = 4 + 4 * workers * head_tiles + 2 * workers * num_heads * (1 + LATENT_DIM) + 3
    return torch.empty(numbers, dtype=torch.float32, device=device)


def is_balanced(parts: torch.Tensor) -> torch.Tensor:
    """The first int32 of `exchange`'s memory."""
    return parts[:1].view(torch.int32)
