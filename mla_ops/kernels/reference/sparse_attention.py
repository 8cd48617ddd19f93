"""Token-level sparse MLA in plain PyTorch, float32 inside: the specification, and the CPU kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...dispatch import Lowering
from ...formats import LATENT_DIM, geometry
from .cache import read_slots
from .index import translate

# gathered keys that one step may hold
MAX_GATHERED_BYTES = 64 * 2**20


def whole_query(q: torch.Tensor, q_rope: torch.Tensor | None) -> torch.Tensor:
    """`[num_tokens, num_heads, head_dim]` of queries whose dims behind the 512th may be a tensor of their own."""
    return q if q_rope is None else torch.cat((q, q_rope), dim=-1)


def with_positive_scale(q: torch.Tensor, softmax_scale: float) -> tuple[torch.Tensor, float]:
    """The same scores for kernels that take the largest product of a row before they scale it."""
    return (-q, -softmax_scale) if softmax_scale < 0 else (q, softmax_scale)


def softmax_and_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights over the last dim, 0 where all scores are -inf, and the logarithm of the sum of exponentials.

    Weights are not `exp(scores - lse)`: of large scores, an lse in float32 does not hold the logarithm of their number.
    """
    lse = torch.logsumexp(scores, dim=-1)
    return torch.softmax(scores, dim=-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse


def attend(
    q: torch.Tensor,
    read: Callable[[torch.Tensor], torch.Tensor],
    slots: torch.Tensor,
    valid: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    deterministic: bool = False,
) -> None:
    """Softmax over the valid slots of each row. `read` turns int64 slots into float32 keys."""
    num_tokens, _, head_dim = q.shape
    # a row alone is the same product wherever it stands; how a batch of them is computed is the library's choice
    step = 1 if deterministic else max(1, MAX_GATHERED_BYTES // max(1, slots.shape[1] * head_dim * 4))
    for start in range(0, num_tokens, step):
        rows = slice(start, min(start + step, num_tokens))
        live = valid[rows]
        keys = torch.zeros(*live.shape, head_dim, dtype=torch.float32, device=q.device)
        # rows share most of their keys: each is read once
        chosen, place = slots[rows][live].unique(return_inverse=True)
        keys[live] = read(chosen)[place]
        scores = torch.einsum("thd,tkd->thk", q[rows].float(), keys) * softmax_scale
        scores = scores.masked_fill(~live.unsqueeze(1), -torch.inf)
        weights, row_lse = softmax_and_lse(scores)
        result = torch.einsum("thk,tkd->thd", weights, keys[..., :LATENT_DIM])
        if attn_sink is not None:
            result = result * torch.sigmoid(row_lse - attn_sink).masked_fill(row_lse == -torch.inf, 0.0).unsqueeze(-1)
        out[rows] = result.to(out.dtype)
        lse[rows] = row_lse


def _within_length(indices: torch.Tensor, topk_length: torch.Tensor | None) -> torch.Tensor:
    if topk_length is None:
        return torch.ones_like(indices, dtype=torch.bool)
    return torch.arange(indices.shape[1], device=indices.device) < topk_length.unsqueeze(1)


def _paged_slots(
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    cache_format: str,
    topk_length: torch.Tensor | None,
    block_table: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 slots that `indices` name, and which of them are attended to."""
    num_blocks, block_size, _, _ = geometry(kv_cache, cache_format)
    slots = indices.long()
    if block_table is not None and req_id_per_token is not None:
        slots = translate(req_id_per_token, block_table, indices, block_size, num_blocks)
    return slots, (slots >= 0) & (slots < num_blocks * block_size) & _within_length(indices, topk_length)


def slots_or_minus_one(
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    cache_format: str,
    topk_length: torch.Tensor | None,
    block_table: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
) -> torch.Tensor:
    """int32 slots, with -1 for everything that the contract does not attend to."""
    slots, valid = _paged_slots(kv_cache, indices, cache_format, topk_length, block_table, req_id_per_token)
    return torch.where(valid, slots, -1).to(torch.int32)


def paged_sparse_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    q_rope: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    slots, valid = _paged_slots(kv_cache, indices, cache_format, topk_length, block_table, req_id_per_token)

    def read(chosen: torch.Tensor) -> torch.Tensor:
        return read_slots(kv_cache, chosen, cache_format)

    q = whole_query(q, q_rope)
    attend(q, read, slots, valid, softmax_scale, attn_sink, out, lse, deterministic)


def paged_sparse_attention_extra(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    extra_kv_cache: torch.Tensor,
    extra_indices: torch.Tensor,
    extra_cache_format: str,
    *,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    extra_block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    slots, valid = _paged_slots(kv_cache, indices, cache_format, topk_length, block_table, req_id_per_token)
    extra_slots, extra_valid = _paged_slots(
        extra_kv_cache, extra_indices, extra_cache_format, extra_topk_length, extra_block_table, req_id_per_token
    )
    num_blocks, block_size, _, head_dim = geometry(kv_cache, cache_format)
    num_slots = num_blocks * block_size

    def read(chosen: torch.Tensor) -> torch.Tensor:
        """Slots of the extra cache count on from the main one's."""
        keys = torch.empty(*chosen.shape, head_dim, dtype=torch.float32, device=chosen.device)
        extra = chosen >= num_slots
        keys[~extra] = read_slots(kv_cache, chosen[~extra], cache_format)
        keys[extra] = read_slots(extra_kv_cache, chosen[extra] - num_slots, extra_cache_format)
        return keys

    slots, valid = torch.cat((slots, extra_slots + num_slots), dim=1), torch.cat((valid, extra_valid), dim=1)
    attend(q, read, slots, valid, softmax_scale, attn_sink, out, lse, deterministic)


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    slots = indices.long()
    valid = (slots >= 0) & (slots < kv.shape[0]) & _within_length(indices, topk_length)
    attend(q, lambda chosen: kv[chosen].float(), slots, valid, softmax_scale, attn_sink, out, lse, deterministic)


LOWERINGS = {
    "paged_sparse_attention": Lowering(paged_sparse_attention, deterministic=True),
    "paged_sparse_attention.extra": Lowering(paged_sparse_attention_extra, deterministic=True),
    "sparse_attention": Lowering(sparse_attention, deterministic=True),
}
