"""Attention over expanded keys: what a prefill of a dense model does, and of a sparse one where it is exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..formats import LATENT_DIM, ROPE_DIM, get_format
from ..metadata import StepMetadata
from ..ops import ContextChunks, chunked_prefill_attention, plan_context_chunks
from ..pytrees import exportable

# tokens of cached context that are expanded at a time: 128 heads of DeepSeek-V3 take 40 KB in bfloat16 each
CONTEXT_ROWS = 4096


@exportable
class DensePrefill(NamedTuple):
    """Inputs of a step that attends to expanded keys.

    Attributes:
        query_start_loc: `[num_requests + 1]` int32, first token of each request.
        chunks: the plan of the requests' cached context.
    """

    query_start_loc: torch.Tensor
    chunks: ContextChunks

    @classmethod
    def plan(cls, metadata: StepMetadata, max_context_tokens: int) -> DensePrefill:
        """The plan of a step whose requests have no more than `max_context_tokens` in the cache together."""
        starts = metadata.query_start_loc
        context_lens = metadata.seq_lens - starts.diff()
        num_rows = max(1, min(CONTEXT_ROWS, max_context_tokens))
        return cls(starts, plan_context_chunks(context_lens, num_rows, max_context_tokens))

    def workspace(self, cache_format: str, device: torch.device) -> torch.Tensor:
        """Room for one chunk, for all layers of the step."""
        shape = self.chunks.num_rows, LATENT_DIM + ROPE_DIM
        return torch.zeros(shape, dtype=get_format(cache_format).value_dtype, device=device)


def attend_expanded(
    attention: Any,
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_format: str,
    block_table: torch.Tensor,
    dense: DensePrefill,
    workspace: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a step's tokens to themselves, causal, and to their requests' cached context.

    Args:
        attention: the model's own module, whose `kv_b_proj` expands latents.
        q: `[num_tokens, num_heads, head_dim]`, the RoPE part last.
        kv_c, k_pe: latents and RoPE keys of the step's tokens, `[num_tokens, 512]` and `[num_tokens, 64]`.
        kv_cache, cache_format, block_table: where the context is.
        dense, workspace: the step's plan, and room for a chunk.

    Returns:
        `[num_tokens, num_heads, v_head_dim]`, and the lse `[num_tokens, num_heads]` float32.
    """
    num_heads, nope_dim = q.shape[1], attention.qk_nope_head_dim

    def expand(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.unflatten(attention.kv_b_proj(latent.to(q.dtype)), -1, (num_heads, -1))
        k_nope, v = both.split((nope_dim, attention.v_head_dim), dim=-1)
        return torch.cat((k_nope, rope.to(q.dtype).unsqueeze(1).expand(-1, num_heads, -1)), dim=-1), v

    return chunked_prefill_attention(
        q,
        *expand(kv_c, k_pe),
        dense.query_start_loc,
        q.shape[0],
        attention.scaling,
        kv_cache=kv_cache,
        cache_format=cache_format,
        block_table=block_table,
        chunks=dense.chunks,
        workspace=workspace,
        up_project=expand,
    )
