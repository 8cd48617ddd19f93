"""The attention of MLA prefill: `prefill_attention` over keys that the layer expanded."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ... import ops


class PrefillBackend(MLAPrefillBackend):
    """Any widths up to 256; values are not padded to the width of keys."""

    @staticmethod
    def get_name() -> str:
        return "MLA_OPS"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and bool(device_capability.major >= 8)

    def supports_out(self) -> bool:
        return False

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if output_scale is not None:
            raise NotImplementedError("mla_ops: prefill attention writes no quantized output, got output_scale")
        metadata = self._prefill_metadata
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        result, lse = ops.prefill_attention(q, k, v, starts, starts, longest, longest, self.scale)
        if out is not None:
            result = out.view_as(result).copy_(result)
        return (result, heads_first(lse)) if return_softmax_lse else result

    def run_prefill_context_chunk(
        self,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        chunk: Any = None,
        chunk_idx: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to a chunk of the context: 0.33 passes `chunk`, 0.24 `chunk_idx`, its number in the metadata."""
        if chunk_idx is not None:
            metadata = self._prefill_metadata
            context = metadata.chunked_context
            starts_q, longest_q = metadata.query_start_loc, metadata.max_query_len
            starts_k, longest_k = context.cu_seq_lens[chunk_idx], context.max_seq_lens[chunk_idx]
        else:
            starts_q, longest_q = chunk.query_start_loc, chunk.max_query_len
            starts_k, longest_k = chunk.cu_seq_lens, chunk.max_seq_len
        result, lse = ops.prefill_attention(q, k, v, starts_q, starts_k, longest_q, longest_k, self.scale, causal=False)
        if out is not None:
            result = out.view_as(result).copy_(result)
        return result, heads_first(lse)


def heads_first(lse: torch.Tensor) -> torch.Tensor:
    """`[num_heads, num_tokens]`, dense: the merge of 0.24 reads no strides."""
    return lse.T.contiguous()
