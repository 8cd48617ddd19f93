"""Dense MLA in plain PyTorch, float32 inside: the specification, and the CPU kernel."""

from __future__ import annotations

import itertools

import torch

from ...dispatch import Lowering
from ...formats import geometry
from .cache import read_slots
from .index import translate
from .sparse_attention import MAX_GATHERED_BYTES, attend, softmax_and_lse, whole_query


def _attend_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """One request: `[queries, heads, d]` against `[keys, kv_heads, d]`, the last query beside the last key."""
    len_q, num_heads, _ = q.shape
    len_k, num_kv_heads, _ = k.shape
    keys, values = k.float(), v.float()
    step = max(1, MAX_GATHERED_BYTES // (4 * num_heads * max(1, len_k)))
    for start in range(0, len_q, step):
        rows = slice(start, min(start + step, len_q))
        queries = q[rows].float().unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
        scores = torch.einsum("qhgd,khd->qhgk", queries, keys).flatten(1, 2) * softmax_scale
        if causal:
            last = torch.arange(rows.start, rows.stop, device=q.device) + len_k - len_q
            hidden = torch.arange(len_k, device=q.device) > last.unsqueeze(1)
            scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
        weights, lse[rows] = softmax_and_lse(scores)
        weights = weights.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
        out[rows] = torch.einsum("qhgk,khd->qhgd", weights, values).flatten(1, 2).to(out.dtype)


def _starts(name: str, cu_seqlens: torch.Tensor, end: int, max_seqlen: int) -> list[int]:
    """First row of each request, and the end of the last one, cut off at `end`.

    Raises:
        ValueError: they do not ascend from 0, or a request is longer than `max_seqlen`. Kernels on a GPU cannot say so.
    """
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0:
        raise ValueError(f"prefill_attention: cu_seqlens_{name} must begin with 0, got {starts[0]}")
    for place, (start, following) in enumerate(itertools.pairwise(starts), 1):
        if following < start:
            raise ValueError(
                f"prefill_attention: cu_seqlens_{name} must ascend, got {following} after {start} at element {place}"
            )
    starts = [min(start, end) for start in starts]
    longest = max((following - start for start, following in itertools.pairwise(starts)), default=0)
    if longest > max_seqlen:
        raise ValueError(
            f"prefill_attention: max_seqlen_{name} must be at least {longest}, the longest of cu_seqlens_{name}, "
            f"got {max_seqlen}"
        )
    return starts


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    *,
    causal: bool = True,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    starts_q = _starts("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    starts_k = _starts("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    out.zero_()
    lse.fill_(-torch.inf)
    for request in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[request : request + 2]), slice(*starts_k[request : request + 2])
        if keys.start < keys.stop:
            _attend_request(q[rows], k[keys], v[keys], softmax_scale, causal, out[rows], lse[rows])


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    key_lens: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    q_rope: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    q = whole_query(q, q_rope)
    num_blocks, block_size, _, _ = geometry(kv_cache, cache_format)
    num_tokens, capacity = q.shape[0], block_table.shape[1] * block_size
    width = min(capacity, int(key_lens.max())) if num_tokens else 0
    step = 1 if deterministic else max(1, MAX_GATHERED_BYTES // (8 * max(1, width)))
    for start in range(0, num_tokens, step):
        rows = slice(start, start + step)
        if deterministic:
            width = min(capacity, int(key_lens[start]))
        positions = torch.arange(max(width, 0), dtype=torch.int32, device=q.device)
        indices = positions.expand(len(key_lens[rows]), -1)
        slots = translate(req_id_per_token[rows], block_table, indices, block_size, num_blocks)
        valid = (slots >= 0) & (positions < key_lens[rows].unsqueeze(1))

        def read(chosen: torch.Tensor) -> torch.Tensor:
            return read_slots(kv_cache, chosen, cache_format)

        attend(q[rows], read, slots, valid, softmax_scale, None, out[rows], lse[rows], deterministic)


LOWERINGS = {
    "paged_attention": Lowering(paged_attention, deterministic=True),
    "prefill_attention": Lowering(prefill_attention),
}
