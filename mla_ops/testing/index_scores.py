"""Scores of the lightning indexer in float64, and how far a kernel may be from them."""

from __future__ import annotations

import torch

# A tensor core of Hopper or Ada adds 32 products of e4m3 and what it has so far at the exponent of the largest of
# these, whose fraction keeps 13 bits: each of them, and their sum, loses less than the last bit.
E4M3_TERMS, E4M3_FRACTION = 32, 2.0**-13


def exact_scores(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, k_scale: torch.Tensor, *, e4m3_cores: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores `[T, keys]` in float64, and the bound of the error of float32 sums in any order.

    A sum of n products has an error of at most n * 2**-24 of the sum of their magnitudes; here n is 128 for a dot, then
    num_heads, then a multiplication by the weight and one by the scale. `e4m3_cores` adds what those lose in a dot.
    """
    q, k, weights, k_scale = (x.double() for x in (q.float(), k.float(), weights, k_scale))
    num_tokens, num_heads, dims = q.shape
    dots = torch.zeros(num_tokens, num_heads, len(k), dtype=torch.float64, device=q.device)
    lost = torch.zeros_like(dots)
    for first in range(0, dims, E4M3_TERMS) if e4m3_cores else ():
        part = slice(first, first + E4M3_TERMS)
        # a token at a time: products of all would not fit
        largest = torch.stack([(row[:, None, part].abs() * k[None, :, part].abs()).amax(-1) for row in q])
        largest = torch.maximum(largest, dots.abs() + lost)
        dots += torch.einsum("thd,kd->thk", q[..., part], k[:, part])
        lost += (E4M3_TERMS + 1) * E4M3_FRACTION * largest + E4M3_FRACTION * dots.abs()
    dots = torch.einsum("thd,kd->thk", q, k)
    sizes = torch.einsum("thd,kd->thk", q.abs(), k.abs())
    scores = torch.einsum("th,thk->tk", weights, dots.relu()) * k_scale
    # Tensor cores truncate where they add: one bit more
    lost = lost + (sizes + lost) * (dims + num_heads + 2) * 2.0**-23
    return scores, torch.einsum("th,thk->tk", weights.abs(), lost) * k_scale.abs()
