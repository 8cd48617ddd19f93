"""Parts that all decoders have: rotation, and the lightning indexer's choice."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats import ROPE_DIM
from ..ops import quantize_index_query, select_keys


class Rope(NamedTuple):
    """How a model rotates 64 dims of a head: which dims make a pair, and where the 64 stand.

    Attributes:
        pairs: `neighbours` for (0, 1), (2, 3), ...; `halves` for (0, 32), (1, 33), ....
        side: `first` or `last` of the head's dims. A head of 64 dims has no others.
    """

    pairs: str
    side: str = "first"

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates `[num_tokens, ..., dims]` by the angles of 32 pairs, `[num_tokens, 32]`.

        Neighbours leave as all firsts, then all seconds. Queries and keys are permuted alike, so their dot products are
        those of the pairs left in place.
        """
        shape = (x.shape[0], *(1,) * (x.dim() - 2), ROPE_DIM // 2)
        cos, sin = cos.view(shape), sin.view(shape)
        rest = x.shape[-1] - ROPE_DIM
        if self.side == "first":
            turned, still = x.split((ROPE_DIM, rest), dim=-1)
        else:
            still, turned = x.split((rest, ROPE_DIM), dim=-1)
        if self.pairs == "neighbours":
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        both = first * cos - second * sin, second * cos + first * sin
        return torch.cat((*both, still) if self.side == "first" else (still, *both), dim=-1)


def prepare_index_query(
    q: torch.Tensor, weights: torch.Tensor, scale: float, index_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries and weights as the scores of `index_format` take them; arguments as in `choose_keys`."""
    if index_format == "fp8_index":
        return quantize_index_query(q, weights, scale)
    return q, weights.float() * scale


def choose_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    index_format: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores the cached index keys that each token sees, `sum_h weights_h * relu(scale * q_h . k)`, and keeps the best.

    Args:
        q: `[num_tokens, num_index_heads, 128]` of the model's dtype.
        weights: `[num_tokens, num_index_heads]`.
        scale: positive factor of the products; `relu` commutes with it, so that it is multiplied into the weights.
        index_cache: of `index_format`.
        block_table: `[num_requests, max_blocks]` int32; entries past a request's end may hold anything.
        req_id_per_token: `[num_tokens]` int32, -1 for padding.
        visible: `[num_tokens]` int32, keys that each token sees.
        topk: keys to keep.
        index_format: `fp8_index`, or a plain format.

    Returns:
        `[num_tokens, topk]` int32 positions in the token's request, ascending, -1 behind the last; and `[num_tokens]`
        int32, how many there are. Among equal scores (relu makes 0 of all keys that every head cuts off) the lowest
        positions are kept.
    """
    q, weights = prepare_index_query(q, weights, scale, index_format)
    return select_keys(q, index_cache, weights, visible, block_table, req_id_per_token, topk, index_format)
