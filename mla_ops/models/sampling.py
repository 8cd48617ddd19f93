"""Choosing tokens on the device: greedy, temperature and top-p, by noise that is a function of the seed."""

from __future__ import annotations

import torch

MASK_32 = 0xFFFFFFFF


def choose_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """A token for each row, by the Gumbel-max trick. Device work only, of fixed shapes; may be captured.

    Args:
        logits: `[num_rows, vocab_size]`.
        temperature: `[num_rows]` float32; 0 takes the most likely token.
        top_p: `[num_rows]` float32; tokens behind the first that have this probability together are left out.
        seeds: `[num_rows]` int64.
        counts: `[num_rows]` int64, tokens that the request has: each has noise of its own.

    Returns:
        `[num_rows]` int64.
    """
    scaled = logits.float() / temperature.clamp(min=1e-6).unsqueeze(1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ordered = ordered.masked_fill(before >= top_p.unsqueeze(1), -torch.inf)
    # before the first token nothing is taken, whatever the sum's rounding
    ordered = torch.cat((scaled.gather(1, order[:, :1]), ordered[:, 1:]), dim=1)
    sampled = order.gather(1, (ordered + gumbel_noise(order, seeds, counts)).argmax(-1, keepdim=True)).squeeze(1)
    return torch.where(temperature > 0, sampled, logits.argmax(-1))


def gumbel_noise(tokens: torch.Tensor, seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, `[num_rows, n]` float32, a function of `(seed, count, token)` alone."""
    key = _hash(_hash(seeds & MASK_32) ^ _hash((seeds >> 32) & MASK_32) ^ _hash(counts + 0x9E3779B9))
    bits = _hash(key.unsqueeze(1) ^ _hash(tokens))
    # 23 bits and a half: never 0 or 1 in float32
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _hash(x: torch.Tensor) -> torch.Tensor:
    """32 bits to 32 well-mixed bits, in int64 (Wellons, "lowbias32")."""
    x = x & MASK_32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK_32
    return x ^ (x >> 16)
