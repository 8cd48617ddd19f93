"""Memory for what CTAs leave that share all rows of a call evenly, `struct Parts` of parts.cuh."""

from __future__ import annotations

import torch

from ...formats import LATENT_DIM


def exchange(workers: int, tile: int, num_heads: int, device: torch.device) -> torch.Tensor:
    """Room for two parts of each worker, whose CTAs have `tile` heads each.

    Its first int32 tells whether the call's rows were shared so.
    """
    head_tiles = -(-num_heads // tile)
    numbers = 4 + workers * (4 * head_tiles + 4 * (num_heads + num_heads % 2) + 2 * head_tiles * tile * LATENT_DIM)
    return torch.empty(numbers, dtype=torch.float32, device=device)


def is_balanced(parts: torch.Tensor) -> torch.Tensor:
    """The first int32 of `exchange`'s memory."""
    return parts[:1].view(torch.int32)
