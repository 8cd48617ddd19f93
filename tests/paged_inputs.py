"""Shared by the tests of dense attention over a paged cache: one call, or a captured one, held against float64."""

from __future__ import annotations

import math

import attention_oracle
import torch
from attention_inputs import SCALE, operand


def int32(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(
    lowering: str,
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lens: torch.Tensor,
    cache_format: str,
    tokens: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All of a request's keys, up to each token's length, are what the sparse oracle is told to choose."""
    out, lse = torch.ops.mla.paged_attention(q, cache, table, requests, lens, SCALE, cache_format)
    width = min(table.shape[1] * cache.shape[1], max([0, *lens.tolist()])) if cache.dim() == 3 else int(lens.max())
    everything = torch.arange(width, dtype=torch.int32, device=q.device).expand(len(q), -1)
    expected = attention_oracle.attention(
        q,
        cache,
        everything,
        SCALE,
        topk_length=lens,
        block_table=table,
        req_id_per_token=requests,
        operand=operand(lowering, cache_format, q.dtype),
        tokens=tokens,
        cache_format=cache_format,
    )
    attention_oracle.assert_close(out, lse, expected)
    return out, lse


def check_replays(
    lowering: str,
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, str],
    lengths: list[list[int]],
    tokens: list[int] | None = None,
) -> None:
    """A call is captured once and replayed with other lengths: eager's bits, which are checked."""
    q, cache, table, requests, lens, _, cache_format = arguments
    out = torch.empty(*q.shape[:2], 512, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], device=q.device)
    torch.ops.mla.paged_attention.out(*arguments, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.mla.paged_attention.out(*arguments, out=out, lse=lse)
    for new_lens in lengths:
        lens.copy_(int32(new_lens, q.device))
        out.fill_(math.nan), lse.fill_(math.nan)
        graph.replay()
        eager = check(lowering, q, cache, table, requests, lens, cache_format, tokens)
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])
