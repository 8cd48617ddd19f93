"""Prefill over a cached context of any length, a bounded chunk of it at a time: functions over the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..formats import LATENT_DIM
from ..pytrees import exportable
from ..sizes import check_sizes
from .dense_attention import prefill_attention
from .merge import merge_attention_states


@exportable
class ContextChunks(NamedTuple):
    """The contents of each chunk of a batch's cached context, on the device: one plan a step, for all its layers.

    Attributes:
        ends: `[num_chunks, num_requests]` int32, tokens of each request's context up to the end of the chunk.
        lens: `[num_chunks, num_requests]` int32, how many of them are in the chunk.
        starts: `[num_chunks, num_requests + 1]` int32, the rows of the workspace that each request has in the chunk.
        num_rows: rows of the workspace, tokens of a chunk.
    """

    ends: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    num_rows: int

    @property
    def num_chunks(self) -> int:
        return self.lens.shape[0]


def plan_context_chunks(context_lens: torch.Tensor, num_rows: int, max_context_tokens: int) -> ContextChunks:
    """Cuts the context of a batch, request after request, into chunks of `num_rows` tokens; requests split anywhere.

    Device work only, so it can be captured and follows the lengths of each replay. Chunks behind the last token are
    empty: their attention finds no keys.

    Args:
        context_lens: `[num_requests]` int32, tokens of each request that are in the cache before this step.
        num_rows: tokens of a chunk, at least 1: rows of the workspace.
        max_context_tokens: an upper bound of their sum, known to the host.

    Returns:
        `ceil(max_context_tokens / num_rows)` chunks.

    Raises:
        TypeError, ValueError: a dtype or size that is not so. A sum past the bound fails an assertion on the device.
    """
    op = "plan_context_chunks"
    if not isinstance(context_lens, torch.Tensor) or context_lens.dtype != torch.int32:
        got = getattr(context_lens, "dtype", type(context_lens).__name__)
        raise TypeError(f"{op}: context_lens must be a tensor of torch.int32, got {got}")
    if context_lens.dim() != 1:
        raise ValueError(f"{op}: context_lens must have shape [num_requests], got {list(context_lens.shape)}")
    (num_rows,) = check_sizes(op, 1, num_rows=num_rows)
    (max_context_tokens,) = check_sizes(op, 0, max_context_tokens=max_context_tokens)
    lens = context_lens.clamp(min=0).long()
    ends = lens.cumsum(0)
    torch._assert_async(
        (ends <= max_context_tokens).all(), f"{op}: the context is longer than max_context_tokens, {max_context_tokens}"
    )
    num_chunks = -(-max_context_tokens // num_rows)
    window = torch.arange(num_chunks, device=lens.device).unsqueeze(1) * num_rows - (ends - lens)
    first = torch.minimum(window.clamp(min=0), lens)
    last = torch.minimum((window + num_rows).clamp(min=0), lens)
    own = last - first
    starts = torch.nn.functional.pad(own.cumsum(1), (1, 0))
    return ContextChunks(last.int(), own.int(), starts.int(), num_rows)


def chunked_prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    *,
    kv_cache: torch.Tensor,
    cache_format: str,
    block_table: torch.Tensor,
    chunks: ContextChunks,
    workspace: torch.Tensor,
    up_project: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens to themselves, causal, and to their requests' cached context, a chunk of it at a time.

    It is `prefill_attention` over both at once, with no more than a chunk of the context expanded. Each chunk is
    gathered and dequantised into the workspace, expanded into keys and values, attended to, and merged.

    The number of chunks is the only thing that a compiled or captured step is specialised on.

    Args:
        q, k, v: of the new tokens, as `prefill_attention` takes them; `[num_tokens, heads, width]`.
        cu_seqlens_q: `[num_requests + 1]` int32, the new tokens of each request.
        max_seqlen_q: an upper bound of their number.
        softmax_scale: as in `prefill_attention`.
        kv_cache: the paged latent cache, of any format.
        cache_format: format of `kv_cache`.
        block_table: `[num_requests, max_blocks]` int32. A block of the context that is not in the cache reads as zeros.
        chunks: what `plan_context_chunks` gives for the requests' cached tokens.
        workspace: `[chunks.num_rows, head_dim]` of what `gather_cache` returns for the format (bfloat16, or the cache's
            own dtype). Zeroed once by whoever allocates it; shared by all layers of a step.
        up_project: takes latents `[num_rows, 512]` and RoPE keys `[num_rows, rest]`, slices of the workspace; returns
            keys and values of them, `[num_rows, heads, width]` in q's dtype. Rows behind a chunk's tokens hold older
            ones: they are expanded as well, and not attended.

    Returns:
        out and lse, as `prefill_attention` has them. They equal those of attention over all keys at once up to the
        rounding of each chunk's output to q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: as the ops it is made of; a workspace of other rows than the plan's.

    Source: the online softmax over blocks, as in vLLM's chunked prefill for MLA.
    """
    if not isinstance(chunks, ContextChunks) or not isinstance(workspace, torch.Tensor):
        raise TypeError(
            "chunked_prefill_attention: chunks must be what plan_context_chunks returns and workspace a tensor, got "
            f"{type(chunks).__name__} and {type(workspace).__name__}"
        )
    if workspace.dim() == 0 or workspace.shape[0] != chunks.num_rows:
        raise ValueError(
            f"chunked_prefill_attention: workspace must have the plan's {chunks.num_rows} rows, got "
            f"{list(workspace.shape)}"
        )
    out, lse = prefill_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_q, max_seqlen_q, max_seqlen_q, softmax_scale, causal=True
    )
    for ends, own, starts in zip(chunks.ends.unbind(), chunks.lens.unbind(), chunks.starts.unbind(), strict=True):
        torch.ops.mla.gather_cache.out(
            kv_cache, block_table, ends, starts, chunks.num_rows, cache_format, gather_lens=own, out=workspace
        )
        keys, values = up_project(workspace[:, :LATENT_DIM], workspace[:, LATENT_DIM:])
        older = prefill_attention(
            q,
            keys,
            values,
            cu_seqlens_q,
            starts,
            max_seqlen_q,
            chunks.num_rows,
            softmax_scale,
            causal=False,
        )
        out, lse = merge_attention_states(out, lse, *older)
    return out, lse
