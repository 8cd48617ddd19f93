"""What the decoders share: the lightning indexer's scoring, and experts without shapes that depend on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

INDEX_DIM = 128
PLAIN_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_model_type(model: Any, expected: str, decoder: str) -> None:
    """Raises TypeError for a model of another architecture: its weights may fit, and give wrong tokens."""
    found = getattr(getattr(model, "config", None), "model_type", None)
    if found != expected or not hasattr(model, "lm_head"):
        what = type(model).__name__ if found is None else f"{type(model).__name__} of model_type '{found}'"
        raise TypeError(
            f"{decoder}: model must be a transformers causal language model of model_type '{expected}', got {what}"
        )


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """`sum_h weights_h * relu(scale * q_h . k)` in float32.

    Args:
        q: `[num_tokens, num_index_heads, 128]`.
        keys: `[num_keys, 128]` for all tokens, or `[num_tokens, num_keys, 128]`.
        weights: `[num_tokens, num_index_heads]` float32.
        scale: factor of the products.

    Returns:
        `[num_tokens, num_keys]`.
    """
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scale
    return torch.matmul(weights.unsqueeze(1), scores.relu()).squeeze(1)


def choose_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    one_token_per_request: bool,
) -> torch.Tensor:
    """Scores every cached index key of each token's request and keeps the best.

    Args:
        q, weights, scale: as in `index_scores`.
        index_cache: `[num_blocks, block_size, 128]`.
        block_table: `[num_requests, max_blocks]` int32; entries past a request's end may hold anything.
        req_id_per_token: `[num_tokens]` int32, -1 for padding.
        visible: `[num_tokens]` int32, keys that each token may see.
        topk: keys to keep.
        one_token_per_request: read the keys of each token's request (memory `num_tokens * capacity * 128`: for decode),
            or score all tokens against each request (work times the number of requests: for prefill). Exact both ways.

    Returns:
        `[num_tokens, min(topk, capacity)]` int32 positions in the token's request, best first, -1 where a token sees
        fewer keys.
    """
    num_tokens = q.shape[0]
    num_blocks, block_size, _ = index_cache.shape
    num_requests, max_blocks = block_table.shape
    capacity = max_blocks * block_size
    request = req_id_per_token.long().clamp(min=0)
    # what is read through entries past a request's end is masked below
    table = block_table.long().clamp(0, num_blocks - 1)
    if one_token_per_request:
        keys = index_cache[table[request]].view(num_tokens, capacity, INDEX_DIM)
        scores = index_scores(q, keys, weights, scale)
    else:
        scores = q.new_zeros((num_tokens, capacity), dtype=torch.float32)
        for row in range(num_requests):
            row_scores = index_scores(q, index_cache[table[row]].view(capacity, INDEX_DIM), weights, scale)
            scores = torch.where((request == row).unsqueeze(1), row_scores, scores)
    position = torch.arange(capacity, device=q.device)
    scores = scores.masked_fill(position >= visible.unsqueeze(1), -torch.inf)
    chosen = scores.topk(min(topk, capacity), dim=-1).indices
    return torch.where(chosen < visible.unsqueeze(1), chosen, -1).to(torch.int32)


def mix_experts(
    experts: Any,
    hidden: torch.Tensor,
    routing: torch.Tensor,
    weights: torch.Tensor,
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Every expert sees every token and the routing weight, 0 for most, decides what counts.

    transformers' loop over the experts that were hit has shapes that depend on data. This has the same terms, summed in
    float32, and no such shapes. It multiplies the MLP's work by num_experts / top_k, so it suits small models and
    short decode batches; grouped kernels are outside this library.

    Args:
        experts: holds `gate_up_proj` `[E, 2 * I, hidden_size]` and `down_proj` `[E, hidden_size, I]`.
        hidden: `[num_tokens, hidden_size]`.
        routing: `[num_tokens, top_k]` int64, experts of each token; one that stands twice counts twice.
        weights: `[num_tokens, top_k]` float32.
        activate: joins the gate and up projections, both `[E, num_tokens, I]`.
    """
    num_experts = experts.gate_up_proj.shape[0]
    dense = (routing.unsqueeze(-1) == torch.arange(num_experts, device=hidden.device)) * weights.unsqueeze(-1)
    dense = dense.sum(1)  # [num_tokens, E]
    tokens = hidden.unsqueeze(0).expand(num_experts, -1, -1)
    gate, up = torch.bmm(tokens, experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    each = torch.bmm(activate(gate, up), experts.down_proj.transpose(1, 2))
    return (each * dense.t().unsqueeze(-1)).sum(0).to(hidden.dtype)
